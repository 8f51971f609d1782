"""Rows of one moment belong together: what connectors show of other agents is of the same moment, also at an end."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from marlvec import Collector, FunctionPolicy
from marlvec.connectors.agent import FilterRows, FrameStack, NormalizeObs, TeamObs
from tests.vector.support.kinds import vectorize

GONE, LENGTH = 2, 5  # when the second agent ends, and all others


class Team(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Three agents who see the time; the second one ends before the others.

    Args:
        truncates: Whether its end is a truncation.
        env_index: Its place: episodes of odd envs are one step longer.
    """

    metadata: Any = {"name": "team", "render_modes": []}
    render_mode = None

    def __init__(self, truncates: bool, env_index: int = 0) -> None:
        self.possible_agents = ["a", "b", "c"]
        self._truncates, self._late = truncates, env_index % 2

    def observation_space(self, agent: str) -> Any:
        return Box(-99, 99, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._t = list(self.possible_agents), 0
        return self._obs(), {agent: {} for agent in self.agents}

    def _obs(self) -> Any:
        return {agent: np.full(1, self._t + 0.1 * ord(agent), np.float32) for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self._t += 1
        over = self._t == LENGTH + self._late
        gone = {agent: over or (agent == "b" and self._t == GONE) for agent in self.agents}
        terminated = {agent: gone[agent] and not (self._truncates and not over) for agent in self.agents}
        truncated = {agent: gone[agent] and not terminated[agent] for agent in self.agents}
        found = (
            self._obs(),
            dict.fromkeys(self.agents, 1.0),
            terminated,
            truncated,
            {agent: {} for agent in self.agents},
        )
        self.agents = [agent for agent in self.agents if not gone[agent]]
        return found

    def close(self) -> None:
        pass


def team_at(t: int, *agents: str) -> Any:
    """What `TeamObs` shows at a time when these agents are there."""
    seen = [[t + 0.1 * ord(agent)] if agent in agents else [0.0] for agent in "abc"]
    return np.array(seen, np.float32), np.array([agent in agents for agent in "abc"], np.int8)


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_a_last_row_shows_the_team_of_its_own_moment(mode: str, truncates: bool, split: bool) -> None:
    """Where one agent ends and its team goes on, all rows of that moment show the same team, later ones the rest."""
    policies = {name: FunctionPolicy(lambda rows: np.zeros(len(rows), np.int64)) for name in ("pq" if split else "p")}
    mapping: Any = {"a": "p", "b": "p", "c": "q"} if split else "p"
    with vectorize("sync", [partial(Team, truncates, i) for i in range(3)], autoreset_mode=mode) as envs:
        collector = Collector(
            envs, policies, mapping, agent_connectors={name: [TeamObs()] for name in policies}, seed=0
        )
        rows = collector.collect(env_steps=3 * 14)["p"]
    mates = "ab" if split else "abc"
    left = mates.replace("b", "")
    tried = 0
    for i in range(len(rows)):
        agent, t = "abc"[rows["agent_index"][i]], int(rows["t"][i])
        there = mates if t <= GONE else left
        got = rows["obs"]["team"][i], rows["obs"]["team_mask"][i]
        for one, want in zip(got, team_at(t, *there), strict=True):
            np.testing.assert_array_equal(one, want)
        ends = rows["terminated"][i] or rows["truncated"][i]
        later = mates if t + 1 <= GONE else left
        got = rows["next_obs"]["team"][i], rows["next_obs"]["team_mask"][i]
        for one, want in zip(got, team_at(t + 1, *later), strict=True):
            np.testing.assert_array_equal(one, want)
        tried += bool(ends and agent == "b")
    assert tried >= 6


def test_other_connectors_of_the_pipeline_see_each_row_once() -> None:
    """In the same rows as without `TeamObs`: stacks, running statistics, and rows that are taken out."""

    def batch(*chain: Any) -> Any:
        with vectorize("sync", [partial(Team, True, i) for i in range(3)]) as envs:
            policy = FunctionPolicy(lambda rows: np.zeros(len(rows), np.int64))
            return Collector(envs, policy, agent_connectors=list(chain), seed=0).collect(env_steps=3 * 14)["main"]

    def evens(rows: Any) -> Any:
        return (rows["t"] % 2 == 0) | rows["last"]

    before = [FilterRows(evens, noop=0), NormalizeObs(), FrameStack(2)]
    plain = batch(*before)
    before = [FilterRows(evens, noop=0), NormalizeObs(), FrameStack(2)]
    team = batch(*before, TeamObs())
    np.testing.assert_array_equal(team["t"], plain["t"])
    np.testing.assert_array_equal(team["terminated"], plain["terminated"])
    assert team["obs"]["own"].shape == plain["obs"].shape
