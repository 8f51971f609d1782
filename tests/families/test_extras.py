"""What `marlvec envs` says of extras is what pyproject.toml and the packages themselves say."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import gymnasium
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from marlvec.envs.making.catalog import atari_env, catalog, gymnasium_entry, gymnasium_env
from marlvec.envs.making.factory import EnvEntry
from marlvec.errors import MissingExtraError
from marlvec.registry import listing

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = (None, "classic", "butterfly", "sisl", "atari", "box2d")
FAMILIES = ("mpe", "classic", "butterfly", "sisl", "atari")
MODULES = packages_distributions()


def brought_by(extra: str | None) -> set[str]:
    """Every distribution that ``pip install "marlvec[extra]"`` installs."""
    found: set[str] = set()
    lines = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    pending = [Requirement(line) for line in lines]
    done: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for part in ("", *requirement.extras):
            if (name, part) not in done:
                done.add((name, part))
                found.add(name)
                pending += needs(name, part)
    return found


def needs(distribution: str, extra: str) -> Iterator[Requirement]:
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def entries() -> list[EnvEntry]:
    gymnasiums = (gymnasium_entry(env_id) for env_id in gymnasium.envs.registration.registry)
    return [*catalog(), *(entry for entry in gymnasiums if entry.extra is not None)]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_all_that_its_envs_need(extra: str | None) -> None:
    mine = [entry for entry in entries() if entry.extra == extra]
    assert mine
    there = brought_by(extra)
    for entry in mine:
        for module in entry.packages:
            assert {canonicalize_name(name) for name in MODULES[module]} & there, (entry.id, module)


def test_where_the_tests_run_every_family_is_installed() -> None:
    rows = listing(with_gymnasium=True)
    assert [row.id for row in rows if row.family in FAMILIES and not row.installed] == []
    assert [row.id for row in rows if row.extra is not None and not row.installed] == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_env_needs_a_deep_learning_library(extra: str | None) -> None:
    assert not brought_by(extra) & {"torch", "jax", "tensorflow", "ray"}


def test_a_box2d_env_without_box2d_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(env_id: str, **kwargs: object) -> None:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(MissingExtraError, match=r'Box2D is not installed.*pip install "marlvec\[box2d\]"'):
        gymnasium_env("LunarLander-v3")


def test_atari_without_games_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "ale_py" else find(name, *args)
    )
    with pytest.raises(MissingExtraError, match=r'rom pong is not installed.*pip install "marlvec\[atari\]"'):
        atari_env("atari/pong_v3", "parallel")
    with pytest.raises(OSError, match="rom pong is not installed"):
        atari_env("atari/pong_v3", "parallel", auto_rom_install_path="/nowhere")
