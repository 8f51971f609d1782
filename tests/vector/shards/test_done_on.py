"""When an episode is over: when all agents have ended, in any mixture, or when the first has."""

from __future__ import annotations

import numpy as np
import pytest

import marlvec
from marlvec.testing import Script, ScriptedParallelEnv, decode

BACKENDS = ("sync", "async")
# Agent 0 is terminated in step 2, agent 1 truncated in step 4, agent 2 both in step 5.
MIXED = Script(births=[0, 0, 0], deaths=[2, 4, 5], ends=["terminated", "truncated", "both"])


def run(backend: str, done_on: str, script: Script, steps: int) -> list[tuple]:
    rows = []
    with marlvec.make(lambda: ScriptedParallelEnv(script), num_envs=2, backend=backend, done_on=done_on) as envs:
        envs.reset(seed=3)
        for _ in range(steps):
            envs.send(np.ones((2, 3), np.int64))
            rows.append(envs.recv())
    return rows


@pytest.mark.checklist(44)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_episode_is_over_when_every_agent_has_ended_in_any_mixture(backend: str) -> None:
    steps = run(backend, "all", MIXED, 16)
    assert [bool(step.done.all()) for step in steps] == [t % 5 == 0 for t in range(1, 17)]
    for t, step in enumerate(steps, start=1):
        k = (t - 1) % 5 + 1
        assert step.terminated.tolist() == [[k == 2, False, k == 5]] * 2
        assert step.truncated.tolist() == [[False, k == 4, k == 5]] * 2
        # After the last step of an episode these are the next one's.
        assert step.alive.tolist() == [[k < 2 or k == 5, k < 4 or k == 5, True]] * 2


@pytest.mark.checklist(44)
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_done_on_any_the_first_end_is_the_end_of_all(backend: str) -> None:
    steps = run(backend, "any", MIXED, 10)
    for t, step in enumerate(steps, start=1):
        over = t % 2 == 0
        assert step.done.tolist() == [over] * 2
        assert step.terminated.tolist() == [[over, False, False]] * 2
        assert step.truncated.tolist() == [[False, over, over]] * 2  # the others were still alive: their time is up
        assert step.alive.all()
        if over:  # everybody's final observation is of step 2 of the episode that ended
            stamps = [[decode(row) for row in rows] for rows in step.final_leaves[0][0]]
            assert {stamp.t for rows in stamps for stamp in rows} == {2}
            assert {stamp.episode for rows in stamps for stamp in rows} == {t // 2 - 1}


def test_an_unknown_done_on_is_refused() -> None:
    with pytest.raises(marlvec.errors.ArgumentError, match="done_on must be one of 'all', 'any', got 'some'"):
        marlvec.make(ScriptedParallelEnv, num_envs=2, done_on="some")
