"""Checks PettingZoo AEC envs, also that they give each reward once; and envs that write into slots, JAX worlds too."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from marlvec.envs.adapters.aec import no_reward_of, refuse_dones
from marlvec.envs.adapters.base import Adapter, AgentId, infos_in, live_agents, mapping, refuse_unknown
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.spaces.equality import short
from marlvec.testing.findings import Findings, PlayedCall, check_reward
from marlvec.testing.players import AdapterPlayer
from marlvec.vector.pools.jax import JaxPool, JaxWorld
from marlvec.vector.pools.pool import Leaves, PoolReply


class TurnPlayer(AdapterPlayer):
    """Plays a turn-based env, and after each of its calls looks at what the adapter does not read, dead steps too."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._index = {agent: a for a, agent in enumerate(self.agents)}
        self._once = RewardsOnce()
        self._flagged: set[AgentId] = set()
        self._selected: set[AgentId] = set()  # in this game; only these are observed
        self._listed: Set[AgentId] = frozenset()
        self._left: set[AgentId] = set()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        env, once = self.env, self._once
        if name == "step":
            mover, before = env.agent_selection, dict(env.rewards)
            once.watch(env)
        result = super().call(name, *args, **kwargs)
        if name == "step":
            with self.place.logging():
                if args[0] is not None:
                    once.check_step(self.place, env, mover)
                elif mover not in env.agents:  # else the adapter finds it there
                    once.check_dead_step(self.place, env, before, mover)
        elif name == "reset":
            once.begin()
            self._flagged, self._selected, self._listed, self._left = set(), set(), frozenset(), set()
        if name in ("reset", "step"):
            self._look()
        if name == "reset":  # the adapter reads rewards of steps only
            for agent, value in env.rewards.items():
                check_reward(value, self.place, agent)
        return result

    def _look(self) -> None:
        """Check what the env says of all its agents."""
        env, place = self.env, self.place
        listed = live_agents(env.agents, self._index, place)
        tables = {what: self._table(what, listed) for what in ("rewards", "terminations", "truncations")}
        infos = infos_in(env.infos, place, "infos")
        for agent, reward in tables["rewards"].items():
            if agent in self._left and _is_number(reward) and reward != 0:
                no_reward_of(agent, reward, place)
        self._left |= self._listed - listed
        self._listed = listed
        for agent in [agent for agent in self.agents if agent in listed]:
            ended = self.ends(agent, *(tables[what].get(agent, False) for what in ("terminations", "truncations")))
            if agent in self._flagged and not ended:
                change = "leave a termination or truncation True, once it is, till the agent has left env.agents"
                place.report("life", f"flags of agent {agent!r}", "True until it leaves", "False again", change)
            if ended:
                self._flagged.add(agent)
            if agent in infos:
                infos_in(infos[agent], place, f"info of agent {agent!r}")
            else:
                place.report("keys", "infos", f"one of agent {agent!r}", "none", kind="infos")
            if agent == env.agent_selection:
                self._selected.add(agent)
                self._check_last(agent)
            elif agent in self._selected:
                self.observe(agent, self.ask(env.observe, agent))

    def _check_last(self, selected: AgentId) -> None:
        answer = self.ask(self.env.last)
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

    def _table(self, what: str, listed: Set[AgentId]) -> Mapping[Any, Any]:
        if not hasattr(self.env, what) and hasattr(self.env, "dones"):
            refuse_dones(self.place)
        table = mapping(getattr(self.env, what, None), self.place, f"env.{what}")
        refuse_unknown(table, self._index, self.place, what)
        for agent in listed:
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

    def check_step(self, place: PlayedCall, env: Any, mover: AgentId) -> None:
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

    def check_dead_step(self, place: PlayedCall, env: Any, before: Mapping[Any, Any], dead: AgentId) -> None:
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

    def check_last(self, place: PlayedCall, agent: AgentId, reward: Any) -> None:
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


class WorldEnv(MultiAgentEnv):
    """One world, compiled, which resets nothing by itself; `ContractError` if it breaks the protocol."""

    def __init__(self, world: JaxWorld) -> None:
        self.world = world
        self._pool = JaxPool(world, 1, autoreset_mode="disabled")
        spec = self._pool.spec
        self.name, self.agents, self.metadata = spec.name, spec.agents, spec.metadata
        self.observation_spaces, self.action_spaces = spec.observation_spaces, spec.action_spaces
        self.mask_sizes, self.state_space = spec.mask_sizes, spec.state_space
        self._groups = spec.groups
        self._one = np.zeros(1, np.int64)

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._pool.reset(self._one, [seed], [None])
        self._write(slot, self._pool.recv(), [True] * len(self.agents))

    def step(self, slot: Slot) -> None:
        given, actions = slot.read_actions(), []
        for group in self._groups:
            leaves = [np.zeros((1, len(group.agents), *leaf.shape), leaf.dtype) for leaf in group.action_tree.leaves]
            for j, a in enumerate(group.agents):
                if slot.acting[a]:
                    for target, part in zip(leaves, group.action_tree.flatten(given[a]), strict=True):
                        target[0, j] = part
            actions.append(leaves)
        self._step(slot, actions)

    def _step(self, slot: Slot, actions: Leaves) -> None:
        before = list(slot.alive)
        self._pool.send(self._one, actions, np.array(slot.acting)[None])
        reply = self._pool.recv()
        for a, was_alive in enumerate(before):
            if was_alive:
                slot.reward[a] = float(reply.reward[0, a])
                slot.terminated[a], slot.truncated[a] = bool(reply.terminated[0, a]), bool(reply.truncated[0, a])
        self._write(slot, reply, before)
        slot.done = not any(slot.alive)

    def _write(self, slot: Slot, reply: PoolReply, present: list[Any]) -> None:
        ended = (reply.terminated | reply.truncated)[0]
        for g, group in enumerate(self._groups):
            for j, a in enumerate(group.agents):
                if not present[a]:
                    continue
                slot.write_obs(a, group.observation_tree.unflatten([leaf[0, j] for leaf in reply.obs[g]]))
                slot.alive[a] = alive = not ended[a]
                slot.acting[a] = alive and (reply.acting is None or bool(reply.acting[0, a]))
                mask = None if reply.masks is None else reply.masks[g]
                if mask is not None:
                    slot.write_mask(a, mask[0, j])

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self._pool.state()[0])

    def close(self) -> None:
        self._pool.close()
