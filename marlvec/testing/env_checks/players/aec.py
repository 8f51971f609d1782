"""Checks PettingZoo AEC envs, also that they give each reward once."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.return_values import AgentId
from marlvec.spaces.equality import short
from marlvec.testing.env_checks.findings import Findings, Place
from marlvec.testing.env_checks.players.base import RawPlayer
from marlvec.testing.env_checks.values import check_agents, check_table

__all__ = ["TurnPlayer", "RewardsOnce"]


class TurnPlayer(RawPlayer):
    """Plays a turn-based env like a loop over ``agent_iter()`` and ``last()``; dead steps count too."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._once = RewardsOnce()
        self._flagged: set[AgentId] = set()
        self._selected: set[AgentId] = set()  # in this game; only these are observed

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.ask_reset(seed, options)
        self._once.begin()
        self.live, self._flagged, self._selected = set(), set(), set()
        self.live = set(self._check_moves())
        if not self.live:
            change = "set self.agents = self.possible_agents[:] in reset()"
            self.place.fault("agents", "env.agents", "at least one agent", "none", change)
        for agent in self._flagged:
            change = "set every termination and truncation to False in reset()"
            self.place.fault("life", f"flags of agent {agent!r}", "False before the first move", "True", change)

    def step(self, rng: np.random.Generator) -> None:
        """Let the selected agent move, or take its dead step."""
        env, agent = self.env, self.env.agent_selection
        self._once.watch(env)
        if agent in self._flagged:
            before = dict(env.rewards)
            self.ask(env.step, None)
            if agent in env.agents:
                expected = f"the dead agent {agent!r} to leave it in step(None)"
                change = "call self._was_dead_step(action) and return where the selected agent has ended"
                self.place.fault("life", "env.agents", expected, "it still there", change)
            with self.place.logging():
                self._once.check_dead_step(self.place, env, before, agent)
        else:
            obs, *_, info = self.ask(env.last)
            action = self.draw(agent, self.allowed(agent, obs, info), rng)
            self.ask(env.step, action, given=f"action of agent {agent!r}")
            with self.place.logging():
                self._once.check_step(self.place, env, agent)
        now = self._check_moves()
        for left in sorted(self.live - set(now), key=str):
            if left not in self._flagged:
                self.place.report("life", "env.agents", f"agent {left!r}, whose flags are False", "it has left")
            self.gone.add(left)
        self.live = set(now)
        self.over = not now

    def _check_moves(self) -> list[AgentId]:
        env, place = self.env, self.place
        now = check_agents(env.agents, self.agents, place, "env.agents")
        self.note("env.agents", now)
        for agent in now:
            if agent in self.gone:
                place.fault("life", "env.agents", f"no agent {agent!r}, which has ended", "it again")
        tables = {what: self._table(what, now) for what in ("rewards", "terminations", "truncations")}
        infos = self.check_infos(env.infos)
        self._selected.update(agent for agent in now if agent == env.agent_selection)
        for agent in sorted(tables["rewards"], key=str):
            if agent in self.agents:
                self.note_reward(agent, tables["rewards"][agent])
            if agent in self.gone and tables["rewards"][agent] != 0:
                got = str(tables["rewards"][agent])
                change = "set no reward of an agent that has left env.agents"
                place.report("life", f"reward of agent {agent!r}", "none, for it has ended", got, change)
        # An agent may end and leave in one step, without a dead step: its flags are still in the dicts.
        left = [agent for agent in self.agents if agent in self.live - set(now) - self._flagged]
        for agent in now + left:
            ended = self.ends(agent, *(tables[what].get(agent, False) for what in ("terminations", "truncations")))
            if agent in self._flagged and not ended:
                change = "leave a termination or truncation True, once it is, till the agent has left env.agents"
                place.report("life", f"flags of agent {agent!r}", "True until it leaves", "False again", change)
            if ended:
                self._flagged.add(agent)
            if agent not in infos and agent in now:
                place.report("keys", "infos", f"one of agent {agent!r}", "none", kind="infos")
            if agent in self._selected:
                self.observe(agent, self.ask(env.observe, agent))
        if now:
            self._check_turn(now)
        return now

    def _check_turn(self, now: list[AgentId]) -> None:
        env, selected = self.env, self.env.agent_selection
        if selected not in now:
            change = "select an agent of self.agents"
            self.place.fault("agents", "agent_selection", f"one of env.agents {now}", repr(selected), change)
        self.note("agent_selection", selected)
        answer = self.ask(env.last)
        if not isinstance(answer, tuple) or len(answer) != 5:
            change = "return (observation, reward, termination, truncation, info), as AECEnv.last() does"
            self.place.fault("results", "last()", "a tuple of 5", type(answer).__name__, change)
        flags = self.ends(selected, answer[2], answer[3])
        with self.place.logging():
            if flags is not (selected in self._flagged):
                change = "leave last() as AECEnv has it"
                expected = "the flags in env.terminations and env.truncations"
                self.place.fault("flags", f"last() of agent {selected!r}", expected, "others", change)
        with self.place.logging():
            self._once.check_last(self.place, selected, answer[1])

    def _table(self, what: str, now: list[AgentId]) -> Mapping[Any, Any]:
        if not hasattr(self.env, what) and hasattr(self.env, "dones"):
            got = "none, and env.dones: PettingZoo's old API"
            change = "set self.terminations and self.truncations in place of self.dones; last() returns 5 values"
            self.place.fault("results", f"env.{what}", "a dict of flags by agent", got, change)
        table = check_table(getattr(self.env, what, None), self.place, f"env.{what}")
        with self.place.logging():
            check_agents(list(table), self.agents, self.place, what)
        for agent in now:
            if agent not in table:
                self.place.report("keys", what, f"one of agent {agent!r}", "none", kind=what)
        return table


class WatchedRewards(dict[Any, Any]):
    """Rewards of an env that record of which agents they were written since the last clear."""

    def __init__(self, rewards: Mapping[Any, Any]) -> None:
        super().__init__(rewards)
        self.written: set[Any] = set()

    def __setitem__(self, agent: Any, value: Any) -> None:
        self.written.add(agent)
        super().__setitem__(agent, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for agent, value in dict(*args, **kwargs).items():
            self[agent] = value

    def __ior__(self, other: Any) -> WatchedRewards:  # type: ignore[misc]  # dict's own takes pairs, too
        self.update(other)
        return self


class RewardsOnce:
    """Tracks the rewards of one AEC env: each step shows its own, ``last()`` the sum since the agent's turn.

    A reward that is not cleared shows again in the next step, and counts twice.
    """

    def __init__(self) -> None:
        self._watched: WatchedRewards | None = None
        self._sums: dict[AgentId, float] | None = {}

    def begin(self) -> None:
        """Begin a game, with no rewards yet."""
        self._sums = {}

    def watch(self, env: Any) -> None:
        """Before a step: track the env's dict of rewards, if it is a plain dict."""
        owner = getattr(env, "unwrapped", env)
        rewards = getattr(owner, "rewards", None)
        if isinstance(rewards, WatchedRewards):
            self._watched = rewards
        elif type(rewards) is dict and env.rewards is rewards and "rewards" in vars(owner):
            owner.rewards = self._watched = WatchedRewards(rewards)
        else:
            self._watched = None
        if self._watched is not None:
            self._watched.written.clear()

    def check_step(self, place: Place, env: Any, mover: AgentId) -> None:
        """After the step of a live agent: check that no reward of an earlier step remains."""
        sums, rewards = self._sums, env.rewards
        if sums is not None and isinstance(rewards, Mapping):
            sums[mover] = 0.0
            if all(map(_is_number, rewards.values())):
                for agent, value in rewards.items():
                    sums[agent] = sums.get(agent, 0.0) + value
            else:
                self._sums = None
        if self._watched is None or rewards is not self._watched:
            return  # the step made a new dict
        for agent, value in rewards.items():
            if agent not in self._watched.written and _is_number(value) and value != 0:
                place.fault(
                    "rewards_once",
                    f"reward of agent {agent!r}",
                    "what this step brought it, 0 where that is nothing",
                    f"{short(value)} again, which an earlier call wrote, and which counts twice",
                )

    def check_dead_step(self, place: Place, env: Any, before: Mapping[Any, Any], dead: AgentId) -> None:
        """After a dead agent's step: check that earlier rewards are cleared. If not, nothing is summed any more."""
        rewards = env.rewards
        for agent, value in rewards.items() if isinstance(rewards, Mapping) else ():
            if _is_number(value) and value != 0 and agent in before and before[agent] == value:
                self._sums = None  # last() may add it up: not a second fault
                place.fault(
                    "rewards_once",
                    f"reward of agent {agent!r}",
                    f"0 after step(None) of the dead agent {dead!r}",
                    f"{short(value)} again, which would count twice",
                    "clear env.rewards in step(None), as AECEnv._was_dead_step() does",
                )

    def check_last(self, place: Place, agent: AgentId, reward: Any) -> None:
        """Check that ``last()`` returns the sum of an agent's rewards since its turn. If not, no more are summed."""
        if self._sums is None or not _is_number(reward):
            return
        expected = self._sums.get(agent, 0.0)
        if not math.isclose(reward, expected, rel_tol=1e-5, abs_tol=1e-6):
            self._sums = None
            place.fault(
                "rewards_once",
                f"reward that last() has of agent {agent!r}",
                f"{short(expected)}, the sum of what env.rewards showed since its last turn",
                short(reward),
                "in step(), set self._cumulative_rewards[agent] = 0 of the agent that acts, and call "
                "self._accumulate_rewards() once, when self.rewards is complete",
                kind="last()",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
