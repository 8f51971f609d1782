"""Columns of any form, through whole collects: from its ids and its observation follows all else that a row holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from hypothesis import strategies as st
from pettingzoo import ParallelEnv

import marlvec
from marlvec import Collector
from marlvec.connectors import AgentPipeline, Rows, agent_connector
from marlvec.connectors.agent import ClipReward, FrameStack, NormalizeObs, PrevActions
from marlvec.errors import RestartQuietly
from marlvec.policies import Policy
from marlvec.spaces import SpaceTree
from marlvec.trees import tree_leaves
from tests.collect.helpers.plans import BATCH_MODES, FEW_OR_MANY, for_examples
from tests.collect.helpers.players import MODES
from tests.vector.support.kinds import BACKENDS, vectorize

BOX = Box(-9, 999, (3,), np.float32)
SPACES: dict[str, Any] = {
    "box": BOX,
    "dict": Dict({"image": Box(0, 255, (2, 2), np.uint8), "pair": Tuple((Discrete(5), BOX))}),
    "tuple": Tuple((BOX, MultiDiscrete([2, 3]))),
    "text": Dict({"said": Text(4), "seen": BOX}),
}
BOX_OF: dict[str, Any] = {
    "box": lambda obs: obs,
    "dict": lambda obs: obs["pair"][1],
    "tuple": lambda obs: obs[0],
    "text": lambda obs: obs["seen"],
}
"""Where a space has the box whose first number is the episode."""


def drawn(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def obs_of(space: str, env: int, episode: int, t: int, agent: int) -> Any:
    """What an agent sees."""
    rng, tree = drawn(env, episode, t, agent), SpaceTree(SPACES[space])
    leaves = [
        "".join(rng.choice(list("abcd"), 3))
        if isinstance(leaf.space, Text)
        else np.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)
        for leaf in tree.leaves
    ]
    obs = tree.unflatten(leaves)
    BOX_OF[space](obs)[0] = episode
    return obs


@cache
def plain_obs(space: str, *moment: int) -> list[Any]:
    return plain(obs_of(space, *moment))


def plain(tree: Any) -> list[Any]:
    """Leaves of a tree, as paths and lists."""
    return [(path, np.asarray(leaf).tolist()) for path, leaf in tree_leaves(tree)]


@cache
def mask_of(env: int, episode: int, t: int, agent: int) -> Any:
    return (drawn(1, env, episode, t, agent).random(4) < 0.5) | (np.arange(4) == 1)


def is_masked(masked: int, episode: int, t: int) -> bool:
    """Whether there are masks: from the beginning, or from the second step of an episode on."""
    return (episode, t) >= (masked, min(masked, 1))


@cache
def pay_of(env: int, episode: int, t: int, agent: int, action: int) -> float:
    """What an agent is paid for an action."""
    return float(action + drawn(2, env, episode, t, agent).normal())


@cache
def length_of(env: int, episode: int) -> int:
    return int(drawn(3, env, episode).integers(1, 7))


@cache
def is_strange(env: int, episode: int) -> bool:
    return bool(drawn(4, env, episode).random() < 0.4)


@cache
def ends_of(odd: str, env: int, episode: int, t: int, agent: int) -> tuple[bool, bool]:
    """Whether an agent is terminated or truncated at a moment."""
    if t == length_of(env, episode):
        cut = bool(drawn(5, env, episode, agent).random() < 0.5)
        return not cut, cut
    return odd == "death" and is_strange(env, episode) and t == 2 and agent == 1, False


class World(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Three agents that mostly act all the time, in episodes of different lengths.

    Args:
        space: Of observations, by name.
        odd: What now and then happens in it: "death" of one agent before the others, an agent "late", a "restart".
        masked: From which episode on it gives action masks.
        env_index: Its place.
    """

    metadata: Any = {"name": "world", "render_modes": []}
    render_mode = None
    state_space = Box(-99, 99, (2,), np.float64)
    possible_agents = ["a", "b", "c"]

    def __init__(self, space: str, odd: str, masked: int, env_index: int = 0) -> None:
        self.agents: list[str] = []
        self.space, self.odd, self.masked, self.index, self.episode = space, odd, masked, env_index, -1

    def observation_space(self, agent: str) -> Any:
        return SPACES[self.space]

    def action_space(self, agent: str) -> Any:
        return Discrete(4)

    def state(self) -> Any:
        return np.array([self.episode, self.t], np.float64)

    def moment(self, agent: str) -> tuple[int, int, int, int]:
        return self.index, self.episode, self.t, "abc".index(agent)

    def told(self, agents: list[str]) -> tuple[Any, Any]:
        obs = {agent: obs_of(self.space, *self.moment(agent)) for agent in agents}
        if not is_masked(self.masked, self.episode, self.t):
            return obs, {agent: {} for agent in agents}
        return obs, {agent: {"action_mask": mask_of(*self.moment(agent))} for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode = 0, self.episode + 1
        late = self.odd == "late" and is_strange(self.index, self.episode)
        self.agents = self.possible_agents[: 2 if late else 3]
        return self.told(self.agents)

    def step(self, actions: Any) -> Any:
        rewards = {agent: pay_of(*self.moment(agent), actions[agent]) for agent in self.agents}
        self.t += 1
        if self.odd == "restart" and self.t == 2 and is_strange(self.index, self.episode):
            raise RestartQuietly("now and then")
        if self.t == 1 < length_of(self.index, self.episode) and "c" not in self.agents:
            self.agents, rewards["c"] = [*self.agents, "c"], 0.5
        here = self.agents
        ends = {agent: ends_of(self.odd, *self.moment(agent)) for agent in here}
        self.agents = [agent for agent in here if not any(ends[agent])]
        obs, infos = self.told(here)
        return obs, rewards, {a: end[0] for a, end in ends.items()}, {a: end[1] for a, end in ends.items()}, infos

    def close(self) -> None:
        pass


class Chooser(Policy):
    """Acts by numbers that follow from the row alone, and says more about it."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        number = rows["eps_id"] * 7 + rows["t"] * 3 + rows["agent_index"] + self.salt
        actions = number % 4
        if "action_mask" in rows:
            actions = np.where(rows["action_mask"][np.arange(len(rows)), actions], actions, 1)
        return actions, {"logp": np.sin(number).astype(np.float32), "more": {"x": number[:, None] * 0.5}}


@agent_connector(name="count")
def count(rows: Rows) -> Rows:
    """Adds a column, but for last rows."""
    return rows if rows["last"].any() else rows.replace(counted=rows["t"] + 1)


CONNECTORS: dict[str, Any] = {
    "default": lambda: AgentPipeline.default(),
    "added": lambda: [count],
    "learned": lambda: [NormalizeObs(), ClipReward(limit=1.5), PrevActions(), FrameStack(2)],
}


@dataclass
class Setting:
    """How a collector and its envs are made."""

    space: str = "box"
    odd: str = ""
    masked: int = 99
    num_envs: int = 3
    backend: str = "sync"
    mode: str = "same_step"
    copy: bool = False
    state: bool = False
    policies: str = "ppp"
    connectors: str = "default"
    batch_mode: str = "truncate"

    def envs(self) -> marlvec.VectorEnv:
        factories = [partial(World, self.space, self.odd, self.masked, i) for i in range(self.num_envs)]
        return vectorize(self.backend, factories, autoreset_mode=self.mode, copy=self.copy, state=self.state)

    def collector(self, envs: marlvec.VectorEnv) -> Collector:
        names = sorted({*self.policies})
        chains = None if self.space == "text" else {name: CONNECTORS[self.connectors]() for name in names}
        return Collector(
            envs,
            {name: Chooser(salt) for salt, name in enumerate(names)},
            dict(zip("abc", self.policies, strict=True)),
            agent_connectors=chains,
            batch_mode=self.batch_mode,  # type: ignore[arg-type]  # one of the two
            seed=0,
        )

    def check(self, name: str, rows: Any) -> None:
        """Check every column of some rows."""
        is_changed = self.connectors == "learned" and self.space != "text"
        assert ("state" in rows, "next_state" in rows) == (self.state, self.state)
        salt = sorted({*self.policies}).index(name)
        episode_column = BOX_OF[self.space](rows["obs"])[:, 0] if not is_changed else rows["eps_id"] // self.num_envs
        columns = {key: plain(column) for key, column in rows.items()}
        for i in range(len(rows)):
            row: dict[str, Any] = {key: [(path, leaf[i]) for path, leaf in column] for key, column in columns.items()}
            one = {key: leaves[0][1] for key, leaves in row.items() if leaves}
            env, agent, t, then = (one[key] for key in ("env_id", "agent_index", "env_t", "next_env_t"))
            episode = int(episode_column[i])
            assert then == t + 1
            if not is_changed:
                assert row["obs"] == plain_obs(self.space, env, episode, t, agent)
                assert row["next_obs"] == plain_obs(self.space, env, episode, then, agent)
            elif self.odd == "restart":  # of an env that was built anew nobody knows how many episodes it has played
                continue
            assert (one["terminated"], one["truncated"]) == ends_of(self.odd, env, episode, then, agent)
            if self.state:
                assert (one["state"], one["next_state"]) == ([episode, t], [episode, then])
            mask = mask_of(env, episode, t, agent).tolist() if is_masked(self.masked, episode, t) else [True] * 4
            assert one.get("action_mask", [True] * 4) == mask, (env, episode, t, agent)
            number = one["eps_id"] * 7 + one["t"] * 3 + agent + salt
            action = number % 4 if mask[number % 4] else 1
            assert one["actions"] == one["actions_for_env"] == action
            assert (one["logp"], row["more"][0][1]) == (float(np.sin(number).astype(np.float32)), [number * 0.5])
            pay = pay_of(env, episode, t, agent, action) + 0.5 * (t == 1 and one["t"] == 0)
            assert one["rewards"] == (np.clip(pay, -1.5, 1.5) if is_changed else pay)
            if self.connectors == "added" and self.space != "text":
                assert one["counted"] == one["t"] + 1


def play(setting: Setting, calls: Sequence[tuple[str, int]]) -> None:
    """Collect, and check every row."""
    with setting.envs() as envs:
        collector = setting.collector(envs)
        for unit, amount in calls:
            for name, rows in collector.collect(**{unit: amount}).items():
                setting.check(name, rows)
                leaves = [leaf for _, column in rows.items() for _, leaf in tree_leaves(column)]
                assert all(leaf.flags.writeable and leaf.flags.c_contiguous for leaf in leaves)
                assert not any(np.may_share_memory(one, other) for k, one in enumerate(leaves) for other in leaves[:k])


EVERY = [("env_steps", 3 * 8), ("env_steps", 3), ("agent_steps", 9 * 5), ("env_steps", 4), ("env_steps", 2)]
"""Steps of all envs, parts of such, agent steps."""


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@FEW_OR_MANY
@pytest.mark.parametrize("space", SPACES)
def test_every_column_of_every_row_is_what_its_env_and_policy_gave(space: str, examples: int) -> None:
    settings = st.builds(
        Setting,
        space=st.just(space),
        odd=st.sampled_from(["", "", "death", "late", "restart"]),
        masked=st.sampled_from([99, 0, 2]),
        num_envs=st.integers(1, 4),
        mode=st.sampled_from(MODES),
        copy=st.booleans(),
        state=st.booleans(),
        policies=st.sampled_from(["ppp", "pqp", "pqr"]),
        connectors=st.sampled_from(sorted(CONNECTORS)),
        batch_mode=st.sampled_from(BATCH_MODES),
    )
    calls = st.lists(st.tuples(st.sampled_from(["env_steps", "agent_steps"]), st.integers(1, 40)), max_size=4)
    for_examples(
        min(examples, 40), lambda calls, **found: play(calls=EVERY + calls, **found), setting=settings, calls=calls
    )


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_column_is_right_on_every_backend(backend: str, mode: str) -> None:
    """Of envs of which one gives masks from its third episode on."""
    setting = Setting("dict", masked=2, backend=backend, mode=mode, state=True, policies="pqp", connectors="added")
    play(setting, [*EVERY, ("env_steps", 3 * 4)])
