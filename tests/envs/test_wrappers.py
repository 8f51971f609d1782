"""Wrappers of single envs: time limits, padding, seeds; and the rules of autoreset."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple
from gymnasium.vector import AutoresetMode as GymnasiumMode
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import AgentSelector, parallel_to_aec

import marlvec
from marlvec.envs import (
    AECAdapter,
    AutoresetMode,
    ClearDeadStepRewards,
    PaddedEnv,
    ParallelAdapter,
    SeedStream,
    TimeLimit,
)
from marlvec.envs.recipes import EnvEntry, EnvFactory
from marlvec.envs.spec import AutoresetRules
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces.padding import pad_actions, pad_observations
from marlvec.testing import (
    KeyedEnv,
    NoOpEnv,
    SampledEnv,
    Script,
    ScriptedParallelEnv,
    SingleEnv,
    TurnEnv,
    decode,
    draw_script,
)
from tests.envs.support import Rig, play
from tests.families.trace import difference, legal_actions
from tests.vector.support.drivers import LivesEnv
from tests.vector.support.reference import refused

# `max_episode_steps`: time is up for whoever is left, and for nobody else.


MODES = ("same_step", "next_step", "disabled")


def scripts_of(seed: int, agent_num: int, count: int, longest: int = 9) -> list[Script]:
    rng = np.random.default_rng(seed)
    return [draw_script(rng, agent_num, longest) for _ in range(count)]


def factory(kind: str, scripts: list[Script], agent_num: int) -> Any:
    if kind == "keyed":
        return partial(KeyedEnv, scripts, agent_num=agent_num, waits=waits)
    return partial({"parallel": ScriptedParallelEnv, "turns": TurnEnv}[kind], scripts, agent_num=agent_num)


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


def check_episodes(envs: marlvec.VectorEnv, scripts: list[Script], limit: int, count: int, kind: str) -> None:
    """Hold every flag of every step of ``count`` episodes against the scripts, cut off at the limit."""
    _, infos = envs.reset(seed=0)
    for number in range(count):
        script = scripts[number % len(scripts)]
        looked = np.zeros(envs.agent_num, bool)  # in a turn-based env: was selected
        for t in range(1, min(script.length, limit) + 1):
            looked |= infos["acting"][0]
            mover = int(infos["acting"][0].argmax())
            _, _, terminated, truncated, infos = envs.step(np.ones((1, envs.agent_num), np.int64))
            alive = np.array(script.alive(t))
            late = alive & (t == limit)
            assert terminated[0].tolist() == script.terminated(t)
            assert truncated[0].tolist() == (np.array(script.truncated(t)) | late).tolist()
            over = bool(late.any() or not alive.any())
            assert not (late & terminated[0]).any()
            if over:
                following = [a % envs.agent_num for a in range(mover + 1, mover + 1 + envs.agent_num)]
                looked |= np.arange(envs.agent_num) == next((a for a in following if alive[a]), mover)
                final = infos["final_observation"][0]
                assert infos["_final_observation"].tolist() == [True]
                for a in np.flatnonzero(late).tolist():
                    if kind == "turns" and not looked[a]:
                        assert not final[a].any()
                        assert infos["final_observation_missing"][0, a]
                        continue
                    # Who waits in a keyed env keeps the last thing it saw; in a turn-based one it looks once more.
                    seen = t - 1 if kind == "keyed" and waits(t, a) and script.births[a] != t else t
                    assert (decode(final[a]).episode, decode(final[a]).t) == (number, seen)
            assert over is (t == min(script.length, limit))
        if envs.autoreset_mode == "disabled":
            assert not infos["alive"].any()
            _, infos = envs.reset(env_ids=[0])
        elif envs.autoreset_mode == "next_step":
            assert not infos["alive"].any()
            _, rewards, terminated, truncated, infos = envs.step(np.ones((1, envs.agent_num), np.int64))
            assert infos["reset_mask"].all()
            assert not any(array.any() for array in (rewards, terminated, truncated))


@pytest.mark.slow("films whole episodes")
@pytest.mark.checklist(11)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
@given(seed=st.integers(0, 10_000), limit=st.integers(1, 10), agent_num=st.integers(1, 4))
def test_living_agents_are_truncated_at_the_limit(kind: str, mode: str, seed: int, limit: int, agent_num: int) -> None:
    scripts = scripts_of(seed, agent_num, 3)
    with marlvec.make(
        factory(kind, scripts, agent_num), 1, backend="sync", autoreset_mode=mode, max_episode_steps=limit
    ) as envs:
        check_episodes(envs, scripts, limit, 4, kind)


@pytest.mark.checklist(11)
@pytest.mark.parametrize("mode", MODES)
def test_the_limit_holds_in_worker_processes(mode: str) -> None:
    scripts = scripts_of(5, 3, 3)
    with marlvec.make(factory("parallel", scripts, 3), 1, autoreset_mode=mode, max_episode_steps=4) as envs:
        check_episodes(envs, scripts, 4, 6, "parallel")


def test_an_agent_that_ends_in_the_last_step_keeps_its_own_flags() -> None:
    script = Script(births=[0, 0, 0, 2], deaths=[3, 3, 9, 9], ends=["terminated", "both", "truncated", "truncated"])
    for env in (ScriptedParallelEnv, TurnEnv, KeyedEnv):
        with marlvec.make(partial(env, script, agent_num=4), 1, backend="sync", max_episode_steps=3) as envs:
            envs.reset(seed=0)
            for _ in range(3):
                _, _, terminated, truncated, infos = envs.step(np.ones((1, 4), np.int64))
            assert terminated.tolist() == [[True, True, False, False]]
            assert truncated.tolist() == [[False, True, True, True]]
            assert infos["_final_observation"].all()
            assert infos["alive"].tolist() == [[True, True, True, False]]


def test_an_agent_before_its_dead_step_keeps_its_flag() -> None:
    """Player 0 dies in move 2, is not selected before move 4, and time is up in move 3."""
    script = Script(births=[0, 0, 0], deaths=[2, 9, 9], ends=["terminated", "truncated", "truncated"])
    env = partial(TurnEnv, script, agent_num=3, order=[1, 2, 1, 0], dead_first=False)
    with marlvec.make(env, 1, backend="sync", max_episode_steps=3) as envs:
        envs.reset(seed=0)
        flags = [envs.step(np.ones((1, 3), np.int64))[2:4] for _ in range(3)]
        assert flags[1][0].tolist() == [[False] * 3]
        assert [flag.tolist() for flag in flags[2]] == [[[True, False, False]], [[False, True, True]]]


@pytest.mark.parametrize(("given", "expected"), [(None, 3), (5, 5), (2, 2)])
def test_an_entry_may_have_a_limit_which_the_argument_replaces(given: int | None, expected: int) -> None:
    endless = partial(ScriptedParallelEnv, Script.together(2, 99), agent_num=2)
    entry = EnvEntry("endless", endless, max_episode_steps=3)
    with marlvec.make(EnvFactory(entry), 1, backend="sync", max_episode_steps=given) as envs:
        envs.reset(seed=0)
        ended = [bool(envs.step(envs.random_action())[3].all()) for _ in range(expected)]
    assert ended == [False] * (expected - 1) + [True]


def test_a_game_that_was_cut_short_cannot_go_on_without_a_reset() -> None:
    rig = Rig(TimeLimit(AECAdapter(TurnEnv(Script.together(2, 9), agent_num=2)), 2))
    rig.reset(seed=0)
    rig.step([1, 1])
    assert not rig.done
    rig.step([1, 1])
    assert rig.done
    assert rig.flags() == {
        "terminated": [False, False],
        "truncated": [True, True],
        "alive": [False, False],
        "acting": [False, False],
    }
    refused(ContractError, "the game is over", rig.step, [1, 1])


def test_single_agents_are_cut_too_and_an_explicit_reset_counts_anew() -> None:
    with marlvec.make(partial(SingleEnv, 50), 2, backend="sync", max_episode_steps=4) as envs:
        envs.reset(seed=0)
        ones = np.ones((2, 1), np.int64)
        for _ in range(3):
            assert not envs.step(ones)[3].any()
        envs.reset(env_ids=[1])
        assert [envs.step(ones)[3][:, 0].tolist() for _ in range(5)] == [
            [True, False],
            [False, False],
            [False, False],
            [False, True],
            [True, False],
        ]


def test_the_limit_takes_the_place_of_gymnasiums_own() -> None:
    for limit in (30, 230):  # the registered one is 200
        with marlvec.make("MountainCar-v0", 1, backend="sync", max_episode_steps=limit) as envs:
            envs.reset(seed=0)
            ends = [bool(envs.step(np.ones((1, 1), np.int64))[3].all()) for _ in range(limit)]
            assert np.flatnonzero(ends).tolist() == [limit - 1]
    with marlvec.make("MountainCar-v0", 1, backend="sync", env_kwargs={"max_episode_steps": 7}) as envs:
        envs.reset(seed=0)
        ends = [bool(envs.step(np.ones((1, 1), np.int64))[3].all()) for _ in range(7)]
        assert np.flatnonzero(ends).tolist() == [6]


@pytest.mark.parametrize("limit", [0, -1, 2.5, "7", True])
def test_a_limit_is_a_whole_number_of_steps(limit: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"expected an int of at least 1, got {limit!r}")):
        marlvec.make(SingleEnv, 2, max_episode_steps=limit)


def test_users_reach_their_own_env() -> None:
    with marlvec.make(partial(SingleEnv, 50), 2, backend="sync", max_episode_steps=np.int64(4)) as envs:
        assert envs.get_attr("closed") == (False, False)
        assert envs.exec_func(lambda env: type(env).__name__) == ("SingleEnv", "SingleEnv")


# `pad=True`: agents of different spaces as one group.


FLOATS = ("float16", "float32", "float64")
INTS = ("uint8", "int16", "int32", "int64")


def boxes(count: int, dtypes: tuple[str, ...]) -> Any:
    shapes = st.integers(0, 3).flatmap(
        lambda rank: st.lists(st.tuples(*[st.integers(0, 4)] * rank), min_size=count, max_size=count)
    )
    return st.tuples(shapes, st.lists(st.sampled_from(dtypes), min_size=count, max_size=count)).map(
        lambda drawn: [
            Box(np.full(shape, 3, dtype), np.full(shape, 90, dtype), shape, np.dtype(dtype).type)
            for shape, dtype in zip(*drawn, strict=True)
        ]
    )


def observations(count: int) -> Any:
    return st.one_of(
        boxes(count, FLOATS + INTS),
        boxes(count, FLOATS + INTS).map(
            lambda found: [Dict({"far": Tuple([box]), "flag": Discrete(2)}) for box in found]
        ),
        st.lists(st.builds(Discrete, st.integers(1, 6), start=st.integers(-3, 3)), min_size=count, max_size=count),
        st.lists(st.integers(1, 4).map(MultiBinary), min_size=count, max_size=count),
        st.lists(multidiscretes, min_size=count, max_size=count),
    )


multidiscretes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(MultiDiscrete)


def actions(count: int) -> Any:
    return st.one_of(
        st.lists(st.integers(1, 6), min_size=count, max_size=count).map(
            lambda sizes: [Discrete(n, start=-2) for n in sizes]
        ),
        st.lists(multidiscretes, min_size=count, max_size=count),
        boxes(count, ("float32",)),
        st.lists(st.integers(1, 4).map(MultiBinary), min_size=count, max_size=count),
        boxes(count, ("int64",)).map(lambda found: [Tuple([box, Discrete(3)]) for box in found]),
    )


def plain_leaves(space: Space[Any], value: Any) -> list[Any]:
    if isinstance(space, Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in plain_leaves(sub, value[key])]
    if isinstance(space, Tuple):
        return [leaf for sub, part in zip(space.spaces, value, strict=True) for leaf in plain_leaves(sub, part)]
    return [np.asarray(value)]


def padded_like(row: np.ndarray, own: np.ndarray) -> np.ndarray:
    """What the padded row must be: an agent's own observation in the first corner, zeros elsewhere."""
    out = np.zeros_like(row)
    out[tuple(map(slice, own.shape))] = own
    return out


@pytest.mark.slow("films whole episodes")
@given(data=st.data(), agent_num=st.integers(1, 4), seed=st.integers(0, 1000))
def test_whole_episodes_are_what_the_env_itself_says_padded(data: Any, agent_num: int, seed: int) -> None:
    spaces = data.draw(observations(agent_num)), data.draw(actions(agent_num))
    build = partial(SampledEnv, *spaces, agent_num=agent_num, length=3)
    with marlvec.make(build, 1, backend="sync", pad=True, validate="strict", autoreset_mode="disabled") as envs:
        assert list(envs.groups.values()) == [tuple(range(agent_num))]
        assert not envs.grouped
        padded = envs.single_observation_space
        twin = build()
        for episode in range(2):
            obs, infos = envs.reset(seed=[seed if episode == 0 else None])
            found, _ = twin.reset(seed=seed if episode == 0 else None)
            envs.random_action(seed=seed)
            for _ in range(3):
                assert padded.contains(_first(padded, obs))
                check_rows(padded, obs, spaces[0], found)
                check_masks(spaces[1], infos.get("action_mask"))
                chosen = envs.random_action()  # the env refuses any that is not in an agent's own space
                obs, rewards, *_, infos = envs.step(chosen)
                found, expected, *_ = twin.step(
                    {agent: own_action(spaces[1][a], chosen, a) for a, agent in enumerate(twin.possible_agents)}
                )
                assert rewards[0].tolist() == list(expected.values())
            check_rows(padded, infos["final_observation"], spaces[0], found)


def _first(space: Space[Any], batch: Any) -> Any:
    if isinstance(space, Dict):
        return {key: _first(sub, batch[key]) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_first(sub, part) for sub, part in zip(space.spaces, batch, strict=True))
    return batch[0]


def check_rows(padded: Space[Any], obs: Any, own: list[Space[Any]], found: dict[str, Any]) -> None:
    leaves = plain_leaves(padded, obs)
    for a, (space, value) in enumerate(zip(own, found.values(), strict=True)):
        for leaf, part in zip(leaves, plain_leaves(space, value), strict=True):
            assert leaf[0, a].tobytes() == padded_like(leaf[0, a], part).tobytes()


def own_action(space: Space[Any], batch: Any, a: int) -> Any:
    if isinstance(space, Tuple):
        return tuple(own_action(sub, part, a) for sub, part in zip(space.spaces, batch, strict=True))
    row = batch[0, a]
    return (
        int(row) if isinstance(space, Discrete) else np.asarray(np.asarray(row)[tuple(map(slice, space.shape or ()))])
    )


def check_masks(spaces: list[Any], masks: Any) -> None:
    if not isinstance(spaces[0], (Discrete, MultiDiscrete)) or all(space == spaces[0] for space in spaces):
        assert masks is None
        return
    if isinstance(spaces[0], Discrete):
        largest = max(int(space.n) for space in spaces)
        assert masks[0].tolist() == [[c < int(space.n) for c in range(largest)] for space in spaces]
        return
    dims = max(len(space.nvec) for space in spaces)
    sizes = [max(int(s.nvec[d]) if d < len(s.nvec) else 1 for s in spaces) for d in range(dims)]
    for space, mask in zip(spaces, masks[0], strict=True):
        own = [int(space.nvec[d]) if d < len(space.nvec) else 1 for d in range(dims)]
        assert mask.tolist() == [c < n for n, size in zip(own, sizes, strict=True) for c in range(size)]


class Roles(LivesEnv):
    """A scout with 3 actions, a worker with 5 and a chief with 5; the scout dies early, the chief comes late.

    Own masks forbid action ``t % n``; they come in observations, in infos, or not at all.
    """

    sizes = {"scout": 3, "worker": 5, "chief": 5}
    widths = {"scout": 2, "worker": 3, "chief": 1}
    reward = 1.0

    def __init__(self, masks: str = "none") -> None:
        spaces: dict[str, Any] = {agent: Box(0, 99, (width,), np.float32) for agent, width in self.widths.items()}
        if masks == "obs":
            masked = {agent: MultiBinary(n) for agent, n in self.sizes.items()}
            spaces = {agent: Dict(observation=spaces[agent], action_mask=masked[agent]) for agent in spaces}
        lives = {"scout": (0, 3), "worker": (0, 5), "chief": (2, 5)}
        super().__init__(lives, spaces, {agent: Discrete(n) for agent, n in self.sizes.items()})
        self.masks = masks

    def mask(self, agent: str, t: int | None = None) -> np.ndarray:
        n = self.sizes[agent]
        return np.array([self.masks == "none" or c != (self.t if t is None else t) % n for c in range(n)], np.int8)

    def look(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        obs: dict[str, Any] = {agent: np.full(self.widths[agent], self.t, np.float32) for agent in agents}
        infos: dict[str, Any] = {agent: {"t": self.t} for agent in agents}
        for agent in agents:
            if self.masks == "obs":
                obs[agent] = {"observation": obs[agent], "action_mask": self.mask(agent)}
            elif self.masks == "infos":
                infos[agent]["action_mask"] = self.mask(agent)
        return obs, infos

    def step(self, actions: dict[str, int]) -> Any:
        for agent, action in actions.items():
            assert self.mask(agent)[action], f"{action} is forbidden to {agent} in step {self.t}"
        return super().step(actions)


@pytest.mark.mostly_slow("films whole episodes", quick=2)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("masks", ["none", "obs", "infos"])
def test_an_agents_own_mask_and_what_it_lacks_are_both_forbidden(masks: str, backend: str) -> None:
    twin = Roles(masks)
    with marlvec.make(Roles, 2, backend=backend, pad=True, masks=masks) as envs:
        assert envs.groups == {"agents": (0, 1, 2)}
        _, infos = envs.reset(seed=0)
        envs.random_action(seed=0)
        for step in range(15):
            t = step % 5
            expected = np.zeros((3, 5), np.bool_)
            for a, agent in enumerate(twin.possible_agents):
                n = twin.sizes[agent]
                acts = twin.lives[agent][0] <= t < twin.lives[agent][1]
                # One that does not act may say whatever it has.
                expected[a, :n] = twin.mask(agent, t) if acts else True
            assert infos["action_mask"].tolist() == [expected.tolist()] * 2
            assert infos["action_mask"].shape == (2, 3, 5)
            obs, *_, infos = envs.step(envs.random_action())
            shown = np.zeros((3, 3), np.float32)
            for a, agent in enumerate(twin.possible_agents):
                born, last = twin.lives[agent][0], twin.lives[agent][1] if (t + 1) % 5 else 0
                if (born <= (t + 1) % 5 <= last) or ((t + 1) % 5 == 0 and born == 0):
                    shown[a, : twin.widths[agent]] = (t + 1) % 5
            assert obs.tolist() == [shown.tolist()] * 2


def test_the_original_spaces_can_be_read() -> None:
    with marlvec.make(Roles, 2, backend="sync", pad=True) as envs:
        assert envs.spec.original_action_spaces == (Discrete(3), Discrete(5), Discrete(5))
        assert [envs.agent_action_space(agent) for agent in envs.agents] == [Discrete(3), Discrete(5), Discrete(5)]
        shapes = [envs.agent_observation_space(agent).shape for agent in envs.agents]
        assert shapes == [(2,), (3,), (1,)]
        assert envs.single_action_space == MultiDiscrete([5, 5, 5])
        assert envs.single_observation_space.shape == (3, 3)
    with marlvec.make(Roles, 2, backend="sync") as envs:
        assert envs.spec.original_action_spaces is None
        assert [envs.agent_action_space(agent) for agent in envs.agents] == [Discrete(3), Discrete(5), Discrete(5)]
        assert len(envs.groups) == 3


class Turns(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two players with 2 and 4 moves, five moves a game."""

    metadata = {"name": "turns", "render_modes": [], "is_parallelizable": False}

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["small", "large"]

    def observation_space(self, agent: str) -> Space[Any]:
        return Box(0, 9, (1 if agent == "small" else 2,), np.float64)

    def action_space(self, agent: str) -> Space[Any]:
        return Discrete(2 if agent == "small" else 4)

    def observe(self, agent: str) -> Any:
        return np.full(self.observation_space(agent).shape, float(self.t))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.t = 0
        self.agents = self.possible_agents[:]
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self._selector = AgentSelector(self.agents)
        self.agent_selection = self._selector.next()

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        assert self.action_space(self.agent_selection).contains(action)
        self.t += 1
        self.agent_selection = self._selector.next()
        if self.t == 5:
            self.terminations = dict.fromkeys(self.agents, True)


def test_turn_based_envs_can_be_padded_and_limited() -> None:
    for limit in (5, 3):
        with marlvec.make(
            Turns, 1, backend="sync", pad=True, max_episode_steps=limit, autoreset_mode="disabled"
        ) as envs:
            _, infos = envs.reset(seed=0)
            envs.random_action(seed=3)
            small, large = [True, True, False, False], [True] * 4
            for _ in range(limit):
                assert infos["action_mask"].tolist() == [[small, large]]
                obs, _, terminated, truncated, infos = envs.step(envs.random_action())
            assert terminated.all() == (limit == 5)
            assert truncated.all() == (limit == 3)
            assert obs.tolist() == [[[limit, 0.0], [limit, limit]]]
            assert infos["final_observation"].tolist() == obs.tolist()


@pytest.mark.mostly_slow("films whole episodes", quick=2)
@pytest.mark.checklist(12)
@pytest.mark.parametrize("env", ["simple_speaker_listener", "simple_adversary", "simple_world_comm", "simple_tag"])
def test_mpe_padded_is_mpe(env: str) -> None:
    """The same numbers as group by group, and the same in worker processes; masks tell who can do what."""
    with (
        marlvec.make(env, 2, backend="sync", pad=True, max_cycles=6) as envs,
        marlvec.make(env, 2, backend="sync", grouped=True, max_cycles=6) as grouped,
        marlvec.make(env, 2, pad=True, max_cycles=6, num_workers=2) as remote,
    ):
        spaces = [(envs.agent_observation_space(agent), envs.agent_action_space(agent)) for agent in envs.agents]
        assert len(set(map(repr, spaces))) == len(grouped.groups)
        for name, members in grouped.groups.items():
            assert grouped.single_observation_space[name].shape == (len(members), *spaces[members[0]][0].shape)
            assert all(spaces[a] == spaces[members[0]] for a in members)
        sizes = [space.n for _, space in spaces]
        forbidden = None if len(set(sizes)) == 1 else [[c < n for c in range(max(sizes))] for n in sizes]
        obs, infos = envs.reset(seed=7)
        apart, _ = grouped.reset(seed=7)
        assert set(apart) == set(grouped.groups)
        rest = remote.reset(seed=7)
        envs.random_action(seed=1)
        for _ in range(14):
            assert not difference(rest, (obs, infos))
            for name, members in grouped.groups.items():
                width = apart[name].shape[2]
                assert obs[:, members, :width].tobytes() == apart[name].tobytes()
                assert not obs[:, members, width:].any()
            assert (infos["action_mask"].tolist() if forbidden else infos.get("action_mask")) == (
                forbidden and [forbidden] * 2
            )
            chosen = envs.random_action()
            obs, rewards, *_, infos = envs.step(chosen)
            apart, same, *_ = grouped.step({name: chosen[:, members] for name, members in grouped.groups.items()})
            assert rewards.tobytes() == same.tobytes()
            rest = remote.step(chosen)
            rest = (rest[0], rest[-1])


def test_what_the_env_writes_goes_straight_into_the_padded_row() -> None:
    rig = Rig(PaddedEnv(ParallelAdapter(Roles())))
    (row,) = rig.obs[0]
    inner = rig.env._enter(rig.slot)
    assert [cell.shape for cell in inner.fast_rows] == [(2,), (3,), (1,)]
    assert all(np.shares_memory(np.asarray(cell), row) for cell in inner.fast_rows)
    assert all(np.shares_memory(mask, rig.masks[0]) for mask in inner.action_mask)
    rig.reset(seed=0)
    assert rig.env._enter(rig.slot) is inner


def test_envs_of_one_kind_of_agent_are_left_alone() -> None:
    with marlvec.make("simple_spread", 2, backend="sync", pad=True) as envs:
        _, infos = envs.reset(seed=0)
        assert "action_mask" not in infos
        assert envs.spec.original_action_spaces is None
        assert envs.get_attr("max_cycles") == (25, 25)


def test_one_env_with_other_agents_of_its_own_is_named() -> None:
    """Padded spaces may be equal where what was padded is not."""
    builds = [partial(SampledEnv, [Box(0, 1, (n,)), Box(0, 1, (3 - n,))], Discrete(2)) for n in (1, 2)]
    with pytest.raises(ContractError, match=r"own observation space of agent 'agent_0' .*\(1,\).*\(2,\).*env 1"):
        marlvec.make(builds, backend="sync", pad=True)


NAMES = ("ann", "bob")


@pytest.mark.parametrize(
    ("pad", "spaces", "words"),
    [
        (pad_observations, [Box(0, 1, (2,)), Box(0, 1, (2, 2))], "ranks differ: 'ann' has 1, 'bob' has 2"),
        (
            pad_observations,
            [Box(0, 1, (2,)), Discrete(2)],
            "'ann' has Box(0.0, 1.0, (2,), float32), 'bob' has Discrete(2)",
        ),
        (
            pad_observations,
            [Dict({"eye": Box(0, 1, (2,)), "ear": Box(0, 1)}), Dict({"eye": Discrete(2), "ear": Box(0, 1)})],
            "cannot pad leaf 'eye' of the observation spaces",
        ),
        (
            pad_observations,
            [Dict({"eye": Discrete(2)}), Dict({"ear": Discrete(2)})],
            "keys differ: 'ann' has ['eye'], 'bob' has ['ear']",
        ),
        (
            pad_observations,
            [Tuple([Discrete(2)]), Tuple([Discrete(2)] * 2)],
            "lengths differ: 'ann' has 1, 'bob' has 2",
        ),
        (pad_observations, [Text(3), Text(4)], "cannot pad the observation spaces"),
        (pad_actions, [Discrete(2), Discrete(3, start=1)], "starts differ"),
        (pad_actions, [MultiDiscrete([2, 2], start=[1, 1]), MultiDiscrete([2])], "starts differ"),
        (pad_actions, [Box(0, 1, (2,)), Box(0, 2, (3,))], "bounds differ"),
        (pad_actions, [Box(0, 1, (2,)), Box(0, 1, (3,), np.float64)], "dtypes differ"),
        (
            pad_actions,
            [Dict({"go": Discrete(2)}), Dict({"go": Discrete(3)})],
            "leaf 'go' of the action spaces: choices",
        ),
        (pad_actions, [Discrete(2), Box(0, 1)], "leave pad out to have agents of different spaces in groups"),
    ],
)
def test_what_cannot_be_padded_is_named(pad: Any, spaces: list[Space[Any]], words: str) -> None:
    refused(ContractError, re.escape(words), pad, spaces, NAMES)
    with pytest.raises(ContractError, match="env 0.*cannot pad"):
        one, other = (spaces, Discrete(2)) if pad is pad_observations else (Discrete(2), spaces)
        marlvec.make(partial(SampledEnv, one, other), 2, backend="sync", pad=True)


def test_dicts_are_one_whatever_the_order_of_their_keys() -> None:
    eye, ear = Box(0, 1, (2,)), Box(5, 6, (1,))
    spaces = [Dict([("eye", eye), ("ear", ear)]), Dict([("ear", ear), ("eye", Box(0, 1, (4,)))])]
    build = partial(SampledEnv, spaces, Discrete(2))
    with marlvec.make(build, 1, backend="sync", pad=True) as envs:
        for obs, *_ in play(envs, 8):
            assert (obs["ear"] >= 5).all()
            assert (obs["eye"] <= 1).all()
            assert not obs["eye"][:, 0, 2:].any()


# `SeedStream` makes envs of every kind repeatable; `ClearDeadStepRewards` counts rewards once.


class Forgetful:
    """Draws from a generator of its own, of 31 bits, that goes back to the system's entropy at every reset."""

    def draw(self, seed: int | None) -> np.ndarray[Any, Any]:
        if seed is not None and seed >= 2**31:
            raise OverflowError("seed does not fit a C int")
        self.generator = random.Random(seed)
        self.t = 0
        return self.look()

    def look(self) -> np.ndarray[Any, Any]:
        return np.array([self.generator.random()], np.float32)


class Single(gymnasium.Env[Any, Any], Forgetful):
    observation_space, action_space = Box(0, 1, (1,)), Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.draw(seed), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.look(), self.generator.random(), self.t == 3, False, {}


class Both(ParallelEnv[str, Any, Any], Forgetful):
    metadata = {"name": "both", "is_parallelizable": True, "render_modes": []}
    render_mode = None
    possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return Single.observation_space

    def action_space(self, agent: str) -> Any:
        return Single.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        obs = self.draw(seed)
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        said = self.look(), self.generator.random(), self.t == 3, False, {}
        out = [dict.fromkeys(self.agents, value) for value in said]
        if self.t == 3:
            self.agents = []
        return out


class SeededApart(Single):
    """Its reset takes no seed."""

    def reset(self, *, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        self.options = options
        return self.look_again(), {}

    def look_again(self) -> np.ndarray[Any, Any]:
        self.t = 0
        return self.look()


def apart(env: SeededApart, seed: int) -> None:
    env.generator = random.Random(seed)


FORMS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gymnasium": (Single, lambda: SeedStream(Single())),
    "parallel": (Both, lambda: SeedStream(Both())),
    "aec": (lambda: parallel_to_aec(Both()), lambda: SeedStream(parallel_to_aec(Both()))),
}


def trace(factory: Callable[[], Any], seed: Any) -> list[bytes]:
    out = []
    with marlvec.make(factory, 2, backend="sync") as envs:
        out.append(envs.reset(seed=seed)[0].tobytes())
        for _ in range(20):
            obs, rewards, *_ = envs.step(np.zeros((2, envs.agent_num), np.int64))
            out += [obs.tobytes(), rewards.tobytes()]
    return out


@pytest.mark.parametrize("form", FORMS)
def test_one_seed_determines_all_episodes(form: str) -> None:
    bare, wrapped = FORMS[form]
    small = [3, 4]
    assert trace(bare, small) != trace(bare, small)  # the first episode alone
    assert trace(wrapped, small) == trace(wrapped, small)
    assert trace(wrapped, small)[:3] == trace(bare, small)[:3]  # small seeds are given as they are
    assert trace(wrapped, 2**63) == trace(wrapped, 2**63) != trace(wrapped, 3)
    assert trace(wrapped, None) != trace(wrapped, None)


def test_an_env_without_a_seed_gets_it_by_a_function() -> None:
    def factory() -> Any:
        return SeedStream(SeededApart(), apart)

    assert trace(factory, 3) == trace(factory, 3) != trace(factory, 4)
    env = factory()
    env.reset(seed=1, options={"level": 2})
    assert env.unwrapped.options == {"level": 2}


def test_it_is_a_wrapper_of_the_envs_own_kind() -> None:
    for factory, kind in ((Single, gymnasium.Wrapper), (Both, ParallelEnv), (lambda: parallel_to_aec(Both()), AECEnv)):
        wrapped = SeedStream(factory())
        assert isinstance(wrapped, kind)
        assert isinstance(wrapped, SeedStream)
        assert type(pickle.loads(pickle.dumps(wrapped))) is type(wrapped)
    refused(TypeError, "expected a PettingZoo AEC or Parallel env or a Gymnasium env, got object", SeedStream, object())
    refused(TypeError, "^ClearDeadStepRewards: expected a PettingZoo AEC env, got Both$", ClearDeadStepRewards, Both())


def test_shimmys_envs_pay_once() -> None:
    shimmy = pytest.importorskip("shimmy.openspiel_compatibility", reason="shimmy is not installed")
    pytest.importorskip("pyspiel", reason="OpenSpiel is not installed")

    def bare() -> Any:
        return shimmy.OpenSpielCompatibilityV0(game_name="tic_tac_toe")

    def won(factory: Callable[[], Any]) -> Any:
        rng, total = np.random.default_rng(1), np.zeros((4, 2))
        with marlvec.make(factory, 4, backend="sync", autoreset_mode="disabled") as envs:
            _, infos = envs.reset(seed=0)
            while infos["alive"].all(axis=1).any():
                ids = np.flatnonzero(infos["alive"].all(axis=1))
                if len(ids) < 4:
                    break
                _, rewards, *_, infos = envs.step(legal_actions(envs, infos, rng)[0])
                total += rewards
        return total

    twice, once = won(bare), won(lambda: ClearDeadStepRewards(SeedStream(bare())))
    assert np.abs(twice[:, 1]).max() == 2
    assert (twice[:, 0] == once[:, 0]).all()
    assert (once[:, 0] == -once[:, 1]).all()
    assert once.any()


# The autoreset modes and what follows from each: against the table, for every mode and every pool's own.


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_one_behaviour(mode: str) -> None:
    rules = AutoresetRules.of(mode)
    assert rules.mode == mode
    assert [rules.begins_at_once, rules.begins_on_next_step, rules.caller_begins] == [mode == other for other in MODES]


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        *((mode, mode) for mode in MODES),
        *((mode.upper(), mode) for mode in MODES),
        *((mode.replace("_", "-"), mode) for mode in MODES),
        *((GymnasiumMode[mode.upper()], mode) for mode in MODES),
        *((GymnasiumMode[mode.upper()].value, mode) for mode in MODES),
        *((AutoresetMode(mode), mode) for mode in MODES),
        ("sometimes", None),
        (True, None),
    ],
)
def test_words_of_others_are_understood(word: object, mode: str | None) -> None:
    assert AutoresetMode.named(word) == mode
    if mode is not None:
        assert AutoresetMode.declared_by({"autoreset_mode": word}, "it") is AutoresetMode(mode)
    else:
        with pytest.raises(ContractError, match="it: metadata: autoreset_mode is .* expected 'same_step' or"):
            AutoresetMode.declared_by({"autoreset_mode": word}, "it")


def test_an_env_without_a_declared_mode_has_none() -> None:
    assert AutoresetMode.declared_by({}, "it") is None
    assert AutoresetMode.declared_by({"autoreset_mode": None}, "it") is None


@pytest.mark.parametrize(("mode", "own", "steps_all"), list(product(MODES, MODES, [False, True])))
def test_which_pools_serve_which_mode(mode: str, own: str, steps_all: bool) -> None:
    """One that begins by itself at once cannot be kept from it; one that steps all or none cannot reset in between."""
    fits = own == mode or own != "same_step"
    if steps_all and own != mode:
        fits = (own, mode) == ("disabled", "same_step")
    rules = AutoresetRules.of(mode)
    if fits:
        rules.check_pool("Pool", AutoresetMode(own), steps_all=steps_all)
    else:
        with pytest.raises(ArgumentError, match=f"autoreset_mode='{mode}': Pool"):
            rules.check_pool("Pool", AutoresetMode(own), steps_all=steps_all)
    asked = rules.next_episode_request(AutoresetMode(own))
    if mode == "disabled" or own == "same_step":
        assert asked is None
    else:
        assert asked == {"next_step": "step", "disabled": "reset"}[own]


@pytest.mark.parametrize(("mode", "resets_itself", "keeps_state"), list(product(MODES, [False, True], [False, True])))
def test_which_envs_serve_which_mode(mode: str, resets_itself: bool, keeps_state: bool) -> None:
    rules = AutoresetRules.of(mode)
    if not resets_itself or (mode == "same_step" and not keeps_state):
        rules.check_env("Env", resets_itself=resets_itself, keeps_state=keeps_state)
    else:
        with pytest.raises(ArgumentError, match="Env resets itself"):
            rules.check_env("Env", resets_itself=resets_itself, keeps_state=keeps_state)


@pytest.mark.parametrize("given", [*MODES, *AutoresetMode])
def test_users_keep_a_plain_string_and_get_the_rules(given: str) -> None:
    with marlvec.make(NoOpEnv, 1, backend="sync", autoreset_mode=given) as envs:
        assert type(envs.autoreset_mode) is str
        assert type(envs.metadata["autoreset_mode"]) is str
        assert envs.autoreset_mode == envs.metadata["autoreset_mode"] == given
        assert envs.autoreset == AutoresetRules.of(given)
        assert f"autoreset_mode='{envs.autoreset_mode}'" in repr(envs)
