"""What `marlvec envs` says of extras is what pyproject.toml and the packages themselves say."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import marlvec
from marlvec.envs.builtin_ids import JAXMARL, JUMANJI, PGX, atari_env, catalog, gymnasium_entry, gymnasium_env
from marlvec.envs.making import EnvEntry
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
    elsewhere = (JAXMARL, JUMANJI, PGX)  # `make families` has an environment of their own
    assert {row.family for row in rows} >= {*FAMILIES, *elsewhere}
    assert [row.id for row in rows if row.extra is not None and not row.installed and row.family not in elsewhere] == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_env_needs_a_deep_learning_library(extra: str | None) -> None:
    assert not brought_by(extra) & {"torch", "jax", "tensorflow", "ray"}


@pytest.mark.parametrize(
    ("env_id", "extra"), [("jaxmarl/SMAX", "jaxmarl"), ("jumanji/Cleaner-v0", "jumanji"), ("pgx/hex", "pgx")]
)
def test_worlds_of_jax_without_their_suite_name_the_extra(
    env_id: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingExtraError, match=rf"{env_id}.*pip install 'marlvec\[{extra}\]'"):
        marlvec.make(env_id, 4)


@pytest.mark.parametrize(
    ("env_id", "error", "message"),
    [
        (
            "JaxRobotarium_navigation",
            ValueError("JaxRobotarium_navigation requires the jaxrobotarium package, which is not installed."),
            "needs jaxrobotarium, which is not installed; to install it: see https://github.com/GT-STAR-Lab/JaxRobotarium",
        ),
        (
            "ant_4x2",
            ImportError(
                "ant_4x2 requires brax, which is not installed. Install it with `pip install jaxmarl[mabrax]`."
            ),
            "needs brax, which is not installed; to install it: pip install 'marlvec[brax]'",
        ),
    ],
)
def test_what_jaxmarl_lacks_is_named_once_with_its_command(
    env_id: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JaxMARL's own errors, from a stand-in for it."""

    def fail(*_: object, **__: object) -> None:
        raise error

    registration = SimpleNamespace(registered_envs=[env_id], make=fail)
    modules = {"jax": SimpleNamespace(), "jaxmarl": SimpleNamespace(), "jaxmarl.registration": registration}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(MissingExtraError) as caught:
        marlvec.JaxMarlWorld(env_id)
    assert str(caught.value) == f"env 'jaxmarl/{env_id}' {message}"


def test_a_world_without_jax_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(marlvec.JaxWorld):
        agents = ("a",)
        reset = step = lambda *_: None

    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingExtraError, match=r"jax world needs jax.*pip install 'marlvec\[jax\]'"):
        marlvec.make(Empty, 4)


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
