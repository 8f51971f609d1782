"""Every env family, whole episodes on every backend; their seeds; and what `marlvec envs` says of extras."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import marlvec
from marlvec import VectorEnv
from marlvec.envs.builtin_ids import (
    JAXMARL,
    JUMANJI,
    PGX,
    TEXTARENA,
    atari_env,
    catalog,
    gymnasium_entry,
    gymnasium_env,
)
from marlvec.envs.recipes import EnvEntry
from marlvec.errors import MissingExtraError
from marlvec.registry import listing, resolve
from tests.families.table import ROWS, Row
from tests.families.trace import Trace, difference, legal_actions
from tests.vector.support.reference import Frame, Reference, assert_same, check_infos, check_leaves, leaves_of, public

# --- Every env family, whole episodes: a plain loop, the sync and the async vectorizer say the same, bit for bit


NUM_ENVS = 2
EPISODES = 2
SEED = 2


# Atari games are one adapter and one emulator: here those of two, of four and of leaving players, in the soak all.
SOME_GAMES = ("pong_v3", "pong_v3-in colour", "quadrapong_v4-in grey", "mario_bros_v3", "othello_v3", "maze_craze_v3")


def params() -> list[Any]:
    found = []
    for row in ROWS:
        marks = [pytest.mark.filterwarnings(f"ignore:.*{row.warns}:UserWarning")] if row.warns else []
        family, _, name = row.name.rpartition("/")
        if family.endswith("atari") and name not in SOME_GAMES:
            marks.append(pytest.mark.soak)
        found.append(pytest.param(row, id=row.name, marks=marks))
    return found


def test_the_table_has_every_env_of_every_family() -> None:
    entries = [entry for entry in catalog() if entry.family != "cards"]  # ours alone; see tests/native/test_games.py
    assert {entry.id for entry in entries} <= {row.env for row in ROWS}
    assert Counter(entry.family for entry in entries) == {
        "mpe": 12,
        "classic": 9,
        "butterfly": 3,
        "sisl": 2,
        "atari": 24,
    }
    assert len({row.env for row in ROWS if row.env.startswith("gymnasium/")}) >= 12
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.slow("plays real envs on every backend")
@pytest.mark.parametrize("row", params())
def test_two_whole_episodes_are_the_same_everywhere(row: Row, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(SEED)
    traces = {"sync": Trace(), "async": Trace()}
    plain = Reference([lambda: plain_env(row)] * NUM_ENVS, "same_step")
    everyone = range(NUM_ENVS)
    with (
        marlvec.make(row.env, NUM_ENVS, backend="sync", env_kwargs=row.kwargs) as sync,
        marlvec.make(row.env, NUM_ENVS, backend="async", num_workers=2, env_kwargs=row.kwargs) as far,
    ):
        where = "reset"
        frame = plain.reset(everyone, marlvec.env_seeds(SEED, NUM_ENVS))
        here, there = sync.reset(seed=SEED), far.reset(seed=SEED)
        check_infos(sync, here[1], frame, where, stepped=False)
        ends = np.zeros(NUM_ENVS, int)
        number = 0
        while True:
            check_same(traces, here, there, where)
            check_leaves(leaves_of(sync, here[0]), frame.obs, f"{where} obs")
            if frame.state is not None:
                for venv in (sync, far):
                    assert_same(venv.state(), frame.state, f"{where} state, {venv.backend}")
            if ends.min() == EPISODES:
                break
            actions = legal_actions(sync, here[-1], rng)
            number += 1
            where = f"step {number}"
            far.step_send(public(far, actions))  # both at once
            frame = plain.step(everyone, actions)
            here = sync.step(public(sync, actions))
            there = far.step_fetch()
            check_step(sync, here, frame, where)
            ends += frame.done
    for world in plain.worlds:
        world.driver.env.close()
    assert str(traces["sync"]) == str(traces["async"])
    check_printed(row, capfd)


def plain_env(row: Row) -> Any:
    env = resolve(row.env).with_kwargs(**row.kwargs)()
    return env if row.plainly is None else row.plainly(env)


def check_same(traces: dict[str, Trace], here: Any, there: Any, where: str) -> None:
    if traces["sync"].add(here) != traces["async"].add(there):
        pytest.fail(f"{where}: async differs from sync: {difference(there, here)}", pytrace=False)


def check_step(venv: VectorEnv, result: Any, frame: Frame, where: str) -> None:
    _, rewards, terminated, truncated, infos = result
    assert_same(rewards, frame.rewards, f"{where} rewards")
    assert_same(terminated, frame.flags["terminated"], f"{where} terminated")
    assert_same(truncated, frame.flags["truncated"], f"{where} truncated")
    check_infos(venv, infos, frame, where, stepped=True)


def check_printed(row: Row, capfd: pytest.CaptureFixture[str]) -> None:
    """Workers write to this process's stdout and stderr; nobody wants to see greetings there."""
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    if row.warns:  # Python shows a warning in two lines
        assert all(re.search(rf"UserWarning: .*{row.warns}|^  gym(nasium)?\.logger\.warn\($", line) for line in lines)
    else:
        assert lines == []


# --- One seed settles all episodes that follow, in families that have ideas of their own about seeds


HANABI = {"colors": 2, "ranks": 2, "hand_size": 2, "max_information_tokens": 3, "max_life_tokens": 1}


def hanabi_trace(seed: Any, *, steps: int = 40) -> tuple[str, int]:
    """A run of several short games, and how many there were."""
    rng = np.random.default_rng(0)
    trace, games = Trace(), 0
    with marlvec.make("hanabi", 2, backend="sync", **HANABI) as envs:
        result: tuple[Any, ...] = envs.reset(seed=seed)
        trace.add(result)
        for _ in range(steps):
            result = envs.step(legal_actions(envs, result[-1], rng)[0])
            games += int(result[-1].get("_final_observation", np.zeros(2)).sum())
            trace.add(result)
    return str(trace), games


@pytest.mark.mostly_slow("plays real envs on every backend", quick=4)
@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_hanabi_takes_every_seed_and_deals_the_same_cards_in_every_game(seed: int) -> None:
    """OpenSpiel takes 31 bits, and at a reset without a seed PettingZoo's env draws from the system's entropy."""
    first, games = hanabi_trace(seed)
    assert games >= 4
    assert hanabi_trace(seed) == (first, games)
    assert hanabi_trace([seed, seed])[0] != first, "envs have seeds of their own"


def test_hanabi_without_a_seed_is_not_repeated() -> None:
    assert hanabi_trace(None)[0] != hanabi_trace(None)[0]


def test_hanabi_gets_small_seeds_as_they_are() -> None:
    ours, bare = resolve("hanabi").with_kwargs(**HANABI)(), resolve("hanabi").with_kwargs(**HANABI)().env
    for env in (ours, bare):
        env.reset(seed=5)
    seen = [env.observe(env.agent_selection)["observation"] for env in (ours, bare)]
    assert seen[0].tobytes() == seen[1].tobytes()


@pytest.mark.slow("plays real envs on every backend")
def test_atari_players_may_lose_one_by_one() -> None:
    """A whole game beside PettingZoo's own env, whose agents leave `agents` when they have no life left."""
    game = "pettingzoo/atari/mario_bros_v3"
    bare = resolve(game).with_kwargs(obs_type="ram")()
    rng = np.random.default_rng(1)
    seen, _ = bare.reset(seed=1)
    with marlvec.make(game, 1, backend="sync", autoreset_mode="disabled", obs_type="ram") as envs:
        obs, infos = envs.reset(seed=[1])
        counts = [len(bare.agents)]
        while bare.agents:
            (actions,) = legal_actions(envs, infos, rng)
            table = {agent: int(actions[0, envs.agents.index(agent)]) for agent in bare.agents}
            seen, paid, ended, _, _ = bare.step(table)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for a, agent in enumerate(envs.agents):
                assert infos["alive"][0, a] == infos["acting"][0, a] == (agent in bare.agents)
                assert rewards[0, a] == paid.get(agent, 0)
                assert terminated[0, a] == ended.get(agent, False)
                assert obs[0, a].tobytes() == seen.get(agent, np.zeros(128, np.uint8)).tobytes()
            assert not truncated.any()
            if len(bare.agents) != counts[-1]:
                counts.append(len(bare.agents))
    bare.close()
    assert counts == [2, 1, 0]


# --- What `marlvec envs` says of extras is what pyproject.toml and the packages themselves say


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
    elsewhere = (JAXMARL, JUMANJI, PGX, TEXTARENA)  # `make families` has an environment of their own
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


def test_a_game_in_text_without_textarena_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(MissingExtraError, match=r"TicTacToe-v0' needs textarena.*pip install 'marlvec\[textarena\]'"):
        marlvec.make("textarena/TicTacToe-v0", 4, backend="sync")


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
