"""Every env family, whole episodes: a plain loop, the sync and the async vectorizer say the same, bit for bit."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import VectorEnv
from marlvec.envs.builtin_ids import catalog
from marlvec.registry import resolve
from tests.families.legal import legal_actions
from tests.families.table import ROWS, Row
from tests.families.trace import Trace, difference
from tests.vector.support.reference import Frame, Reference, assert_same, check_infos, check_leaves, leaves_of, public

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
