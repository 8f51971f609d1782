"""A vectorizer that is slow and obviously right, and what to hold against it.

`Reference` keeps one plain loop per env (see `drivers`) and stacks what they say into arrays. `record` plays whole
episodes on it and writes down every call with what it must bring; `replay` makes the same calls on a `VectorEnv` and
compares every array byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from marlvec import VectorEnv, VectorStep, env_seeds, infos_to_list
from tests.vector.support.drivers import COMMON, Driver, News, SingleDriver, cut_short, driver_of, spaces_of


def is_object(space: Any) -> bool:
    """Whether values of this leaf have no fixed-size array form."""
    kinds = gymnasium.spaces
    return not isinstance(space, (kinds.Box, kinds.Discrete, kinds.MultiDiscrete, kinds.MultiBinary))


def leaf_spaces(space: Any) -> list[Any]:
    if isinstance(space, gymnasium.spaces.Dict):
        return [leaf for sub in space.spaces.values() for leaf in leaf_spaces(sub)]
    if isinstance(space, gymnasium.spaces.Tuple):
        return [leaf for sub in space.spaces for leaf in leaf_spaces(sub)]
    return [space]


def flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for sub in value.values() for leaf in flatten(sub)]
    return [leaf for sub in value for leaf in flatten(sub)] if isinstance(value, tuple) else [value]


def leaves_in(space: Any, value: Any) -> list[Any]:
    """The leaves of one value, in the order of the space, whatever the order of its dicts."""
    if isinstance(space, gymnasium.spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in leaves_in(sub, value[key])]
    if isinstance(space, gymnasium.spaces.Tuple):
        return [leaf for sub, part in zip(space.spaces, value, strict=True) for leaf in leaves_in(sub, part)]
    return [value]


def pick(space: Any, batch: Any, k: int, j: int) -> Any:
    """One agent's action out of a tree of (n, A_g, ...)."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: pick(sub, batch[key], k, j) for key, sub in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(pick(sub, part, k, j) for sub, part in zip(space.spaces, batch, strict=True))
    value = batch[k, j]
    if is_object(space):
        return deepcopy(value)
    return int(value) if isinstance(space, gymnasium.spaces.Discrete) else np.array(value)


def stack(space: Any, rows: list[list[Any]]) -> Any:
    """Actions of (n, A_g) agents as a tree of arrays."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: stack(sub, [[x[key] for x in row] for row in rows]) for key, sub in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(stack(sub, [[x[p] for x in row] for row in rows]) for p, sub in enumerate(space.spaces))
    if is_object(space):
        out = np.full((len(rows), len(rows[0])), None, object)
        for where in np.ndindex(out.shape):
            out[where] = rows[where[0]][where[1]]
        return out
    return np.array(rows, space.dtype).reshape(len(rows), len(rows[0]), *space.shape)


MODES = ("same_step", "next_step", "disabled")
NONSENSE = 77  # what agents that are not acting are made to say


@dataclass
class Group:
    agents: list[int]
    space: Any
    leaves: list[tuple[tuple[int, ...], np.dtype[Any]]]  # shape and dtype
    action_space: Any
    mask_size: int | None
    choices: int | None


@dataclass
class Frame:
    """One reset or step of some envs, stacked."""

    env_ids: list[int]
    obs: list[list[NDArray[Any]]]  # per group, per leaf: (n, A_g, ...)
    final: list[list[NDArray[Any]]]
    rewards: NDArray[np.float64]
    flags: dict[str, NDArray[np.bool_]]  # terminated, truncated, alive, acting: (n, A)
    done: NDArray[np.bool_]
    reset_mask: NDArray[np.bool_]
    masks: list[NDArray[np.bool_] | None]
    infos: list[dict[str, Any]]
    final_infos: list[dict[str, Any]]
    state: NDArray[Any] | None  # what state() says now, of all envs
    states: NDArray[Any] | None = None  # what infos say, of these envs
    final_states: NDArray[Any] | None = None


@dataclass
class World:
    """One env, and what its row shows."""

    driver: Driver
    shown: dict[int, Any] = field(default_factory=dict)
    final: dict[int, Any] = field(default_factory=dict)
    masks: dict[int, Any] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    ended: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    acting: set[int] = field(default_factory=set)
    infos: dict[str, Any] = field(default_factory=dict)
    final_infos: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    final_state: Any = None
    done_on: str = "all"
    limit: int | None = None
    steps: int = 0
    maskable: dict[int, str] = field(default_factory=dict)  # who may be given a mask in which info
    masked: bool = False  # it has happened
    over: bool = False
    done: bool = False
    was_reset: bool = False
    first: bool = False
    episodes: int = 0

    def clear(self) -> None:
        self.rewards, self.ended, self.infos, self.final_infos = {}, {}, {}, {}
        self.done = self.was_reset = False

    def begin(self, seed: int | None = None, options: Any = None) -> None:
        self.shown, self.over, self.first, self.steps = {}, False, True, 0
        self.take(self.driver.reset(seed, options))

    def take(self, news: News) -> None:
        self.shown.update(news.obs)
        self.masks = {a: mask for a, mask in news.masks.items() if mask is not None}
        self.alive, self.acting, self.infos = news.alive, news.acting, news.infos
        for a, who in self.maskable.items():
            mask = self.infos.get(who, {}).pop("action_mask", None)
            if not self.infos.get(who, True):
                del self.infos[who]
            if mask is not None and a in self.acting:
                self.masks[a], self.masked = np.asarray(mask, bool), True
        if getattr(self.driver.env, "state_space", None) is not None:
            self.state = np.array(self.driver.env.state())

    def step(self, actions: dict[int, Any], mode: str) -> None:
        self.clear()
        if self.over:
            assert mode == "next_step"
            self.was_reset = True
            self.begin()
            return
        if self.first:
            self.final, self.first = {}, False
        self.shown = {a: obs for a, obs in self.shown.items() if a in self.alive}
        news = self.driver.step({a: action for a, action in actions.items() if a in self.acting})
        self.rewards, self.ended = news.rewards, news.ended
        self.take(news)
        self.steps += 1
        if (self.done_on == "any" and news.ended) or self.steps == self.limit:
            obs, cut = cut_short(self.driver, self.alive)
            self.shown.update(obs)
            self.ended.update(cut)
            self.alive, self.acting = set(), set()
        self.final.update({a: self.shown[a] for a in self.ended if a in self.shown})
        if not self.alive:
            self.over = self.done = True
            self.episodes += 1
            self.final_state = self.state
            if mode == "same_step":
                self.final_infos = self.infos
                self.begin()


class Reference:
    """N worlds.

    Args:
        factories: One per env.
        mode: Autoreset mode.
        done_on: Whose end is that of an episode.
        state: Whether global states are told with each reset and step.
        limit: Steps after which an episode is cut short.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        mode: str,
        *,
        done_on: str = "all",
        state: bool = False,
        limit: int | None = None,
    ) -> None:
        self.mode, self.tells_state = mode, state
        self.worlds = [World(driver_of(factory()), done_on=done_on, limit=limit) for factory in factories]
        self.names = self.worlds[0].driver.names
        self.groups: list[Group] = []
        self.masked = False  # an env has given a mask in its infos
        spaces = spaces_of(self.worlds[0].driver)
        choices = [count_choices(space, size) for _, space, size in spaces]
        for world in self.worlds:
            world.maskable = {
                a: COMMON if isinstance(world.driver, SingleDriver) else name
                for a, name in enumerate(self.names)
                if choices[a] is not None and spaces[a][2] is None
            }
        for a, (space, action_space, mask_size) in enumerate(spaces):
            for group in self.groups:
                if spaces[group.agents[0]] == spaces[a]:
                    group.agents.append(a)
                    break
            else:
                leaves = [
                    ((), np.dtype(object)) if is_object(leaf) else (leaf.shape, np.dtype(leaf.dtype))
                    for leaf in leaf_spaces(space)
                ]
                self.groups.append(Group([a], space, leaves, deepcopy(action_space), mask_size, choices[a]))

    def reset(self, ids: Sequence[int], seeds: Sequence[int | None], options: Any = None) -> Frame:
        for i, seed in zip(ids, seeds, strict=True):
            self.worlds[i].clear()
            self.worlds[i].begin(seed, deepcopy(options))
        return self.frame(ids)

    def step(self, ids: Sequence[int], actions: list[Any]) -> Frame:
        """Step these envs; ``actions`` per group, rows in the order of ``ids``."""
        for k, i in enumerate(ids):
            own = {
                a: pick(group.action_space, part, k, j)
                for group, part in zip(self.groups, actions, strict=True)
                for j, a in enumerate(group.agents)
            }
            self.worlds[i].step(own, self.mode)
        return self.frame(ids)

    def draw(self, ids: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """Actions that the envs allow, per group; whoever does not act says nonsense."""
        out = []
        for group in self.groups:
            group.action_space.seed(int(rng.integers(2**31)))
            rows = []
            for i in ids:
                world = self.worlds[i]
                rows.append([])
                for a in group.agents:
                    action = group.action_space.sample()
                    mask = world.masks.get(a)
                    if a not in world.acting and isinstance(group.action_space, gymnasium.spaces.Discrete):
                        action = np.int64(NONSENSE)
                    elif mask is not None:
                        action = np.int64(rng.choice(np.flatnonzero(mask)))
                    rows[-1].append(action)
            out.append(stack(group.action_space, rows))
        return out

    def frame(self, ids: Sequence[int]) -> Frame:
        worlds = [self.worlds[i] for i in ids]
        n, agent_num = len(worlds), len(self.names)

        def rows(attribute: str) -> list[list[NDArray[Any]]]:
            out = []
            for group in self.groups:
                lead = (n, len(group.agents))
                leaves = [
                    np.full(lead, None, object) if dtype.hasobject else np.zeros((*lead, *shape), dtype)
                    for shape, dtype in group.leaves
                ]
                for k, world in enumerate(worlds):
                    for j, a in enumerate(group.agents):
                        if a in (found := getattr(world, attribute)):
                            for leaf, value in zip(leaves, leaves_in(group.space, found[a]), strict=True):
                                leaf[k, j] = value
                out.append(leaves)
            return out

        flags = {name: np.zeros((n, agent_num), bool) for name in ("terminated", "truncated", "alive", "acting")}
        rewards = np.zeros((n, agent_num))
        for k, world in enumerate(worlds):
            for a, reward in world.rewards.items():
                rewards[k, a] = reward
            for a, (term, trunc) in world.ended.items():
                flags["terminated"][k, a], flags["truncated"][k, a] = term, trunc
            for name, members in (("alive", world.alive), ("acting", world.acting)):
                flags[name][k, list(members)] = True
        masks: list[NDArray[np.bool_] | None] = []
        self.masked = self.masked or any(world.masked for world in worlds)
        for group in self.groups:
            size = group.choices if self.masked else group.mask_size
            mask = None if size is None else np.ones((n, len(group.agents), size), bool)
            for k, world in enumerate(worlds):
                for j, a in enumerate(group.agents):
                    if mask is not None and a in world.acting:
                        mask[k, j] = world.masks.get(a, True)
            masks.append(mask)
        has_state = getattr(worlds[0].driver.env, "state_space", None) is not None if worlds else False
        running = self.mode != "disabled" or not any(world.over for world in self.worlds)
        return Frame(
            list(ids),
            rows("shown"),
            rows("final"),
            rewards,
            flags,
            np.array([world.done for world in worlds], bool),
            np.array([world.was_reset for world in worlds], bool),
            masks,
            [world.infos for world in worlds],
            [world.final_infos for world in worlds],
            np.stack([world.driver.env.state() for world in self.worlds]) if has_state and running else None,
            self._states(ids, "state"),
            self._states(ids, "final_state"),
        )

    def _states(self, ids: Sequence[int], attribute: str) -> NDArray[Any] | None:
        """Global states, zeros where there has been none."""
        if not self.tells_state:
            return None
        space = self.worlds[0].driver.env.state_space
        found = [getattr(self.worlds[i], attribute) for i in ids]
        rows = [np.zeros(space.shape, space.dtype) if state is None else state for state in found]
        return np.array(rows, space.dtype).reshape(len(ids), *space.shape)


def count_choices(space: Any, mask_size: int | None) -> int | None:
    """Length of an action mask, where there is one or may be."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum()) if isinstance(space, gymnasium.spaces.MultiDiscrete) else mask_size


# --- comparing


def assert_same(got: Any, expected: Any, where: Any = "") -> None:
    """Equal dtype, shape and bytes, of numpy's array and anybody's; equal objects in arrays of objects."""
    expected = np.asarray(expected)
    assert isinstance(got, np.ndarray), where
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
    if expected.dtype == object:
        assert_trees_equal(list(got.flat), list(expected.flat), where)
        return
    assert got.tobytes() == expected.tobytes(), f"{where}:\n{got}\nexpected\n{expected}"


def bare(value: Any) -> Any:
    """numpy's scalars, and arrays without axes, as Python's."""
    numbers = isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "biufc"
    return value.item() if numbers or isinstance(value, (np.number, np.bool_)) else value


def assert_trees_equal(got: Any, expected: Any, where: str = "", *, exact: bool = False) -> None:
    """Equal types, keys, values; arrays and floats by their bytes; with ``exact`` numpy's scalars and keys in order."""
    if not exact:
        got, expected = bare(got), bare(expected)
    assert type(got) is type(expected), f"{where}: {got!r}, expected {expected!r}"
    if isinstance(expected, np.ndarray) and expected.dtype != object:
        assert_same(got, expected, where)
    elif isinstance(expected, np.ndarray):
        assert_trees_equal(got.tolist(), expected.tolist(), where, exact=exact)
    elif isinstance(expected, dict):
        if exact:
            assert_trees_equal(list(got), list(expected), where, exact=True)
        assert set(got) == set(expected), where
        for key, value in expected.items():
            assert_trees_equal(got[key], value, f"{where}/{key}", exact=exact)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for k, value in enumerate(expected):
            assert_trees_equal(got[k], value, f"{where}/{k}", exact=exact)
    elif isinstance(expected, np.generic):
        assert_same(np.asarray(got), expected, where)
    elif isinstance(expected, float):
        assert struct.pack("<d", got) == struct.pack("<d", expected), f"{where}: {got!r}, expected {expected!r}"
    else:
        assert got == expected, f"{where}: {got!r}, expected {expected!r}"


same = partial(assert_trees_equal, exact=True)


def refused(error: type[BaseException], words: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Check that a call raises this error with these words ("": any), and return it: a line of a table."""
    with pytest.raises(error, match=words or None) as caught:
        call(*args, **options)
    try:
        return caught.value
    finally:
        del caught  # or the error's traceback would hold this frame, and all above it, until the next collection


def leaves_of(venv: VectorEnv, tree: Any) -> list[list[Any]]:
    return [flatten(tree[group.name] if venv.grouped else tree) for group in venv.spec.groups]


def check_infos(venv: VectorEnv, infos: dict[str, Any], frame: Frame, where: str, *, stepped: bool) -> None:
    """All that stands in infos: the envs' own, and what marlvec puts there."""
    n, names = len(frame.env_ids), venv.agents
    assert_trees_equal(infos_to_list(infos, names, n), frame.infos, f"{where} infos")
    for name in ("alive", "acting"):
        assert_same(infos[name], frame.flags[name], f"{where} {name}")
    assert_same(infos["reset_mask"], frame.reset_mask, f"{where} reset_mask")
    masks = infos.get("action_mask")
    for group, mask in zip(venv.spec.groups, frame.masks, strict=True):
        if mask is not None:
            assert_same(masks[group.name] if venv.grouped else masks, mask, f"{where} action_mask")
        else:
            assert masks is None or group.name not in masks
    ended = frame.flags["terminated"] | frame.flags["truncated"]
    assert ("final_observation" in infos) == bool(ended.any()), where
    if ended.any():
        assert stepped
        assert_same(infos["_final_observation"], frame.done, f"{where} _final_observation")
        check_leaves(leaves_of(venv, infos["final_observation"]), frame.final, f"{where} final_observation")
    assert ("final_info" in infos) == any(frame.final_infos), where
    if any(frame.final_infos):
        assert_trees_equal(infos_to_list(infos["final_info"], names, n), frame.final_infos, f"{where} final_info")
        assert_same(infos["_final_info"], np.array(list(map(bool, frame.final_infos))), f"{where} _final_info")
    check_states(infos, frame, where)


def check_states(infos: dict[str, Any], frame: Frame, where: str) -> None:
    """Global states in infos, where they are asked for."""
    if frame.states is None or frame.final_states is None:
        assert not {"state", "final_state", "_final_state"} & infos.keys(), where
        return
    assert_same(infos["state"], frame.states, f"{where} state")
    assert ("final_state" in infos) == bool(frame.done.any()), where
    if frame.done.any():
        assert_same(infos["_final_state"], frame.done, f"{where} _final_state")
        ended = np.flatnonzero(frame.done)
        assert_same(infos["final_state"][ended], frame.final_states[ended], f"{where} final_state")


def check_leaves(got: list[list[Any]], expected: list[list[NDArray[Any]]], where: str) -> None:
    assert [len(leaves) for leaves in got] == [len(leaves) for leaves in expected], where
    for g, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{where} group {g} leaf {k}")


def check_row_step(venv: VectorEnv, step: VectorStep, frame: Frame, where: str, *, stepped: bool = True) -> None:
    """A `VectorStep` against a frame of the same envs."""
    assert step.env_ids.dtype == np.int64
    assert step.env_ids.tolist() == frame.env_ids, where
    check_leaves(step.obs_leaves, frame.obs, f"{where} obs")
    check_leaves(leaves_of(venv, step.obs), frame.obs, f"{where} obs")
    assert_same(step.rewards, frame.rewards, f"{where} rewards")
    for name, flag in frame.flags.items():
        assert_same(getattr(step, name), flag, f"{where} {name}")
    assert_same(step.done, frame.done, f"{where} done")
    assert_same(step.reset_mask, frame.reset_mask, f"{where} reset_mask")
    check_infos(venv, step.infos, frame, where, stepped=stepped)


# --- whole runs


@dataclass
class Call:
    """One call and what it must bring. ``expected`` is always a frame of all envs."""

    kind: str
    expected: Frame
    actions: Any = None  # per group
    seed: Any = None
    env_ids: list[int] | None = None
    options: Any = None


def record(
    factories: Sequence[Callable[[], Any]],
    mode: str,
    *,
    seed: int = 0,
    episodes: int = 3,
    interrupt: float = 0.0,
    reseed: float = 0.5,
) -> list[Call]:
    """Play until every env has ended so many episodes.

    Args:
        factories: One per env.
        mode: Autoreset mode.
        seed: Of the first reset, and of the actions.
        episodes: At least three.
        interrupt: How often some envs are reset explicitly, whatever they are doing.
        reseed: How often such a reset has a seed.
    """
    reference = Reference(factories, mode)
    everyone = list(range(len(factories)))
    rng = np.random.default_rng(seed)

    def frame_of_all() -> Frame:
        return reference.frame(everyone)

    reference.reset(everyone, env_seeds(seed, len(factories)))
    calls = [Call("reset", frame_of_all(), seed=seed)]
    while min(world.episodes for world in reference.worlds) < episodes:
        over = [i for i in everyone if reference.worlds[i].over]
        reset = over if mode == "disabled" else []
        if interrupt and rng.random() < interrupt:
            reset = sorted(
                {*reset, *rng.choice(everyone, int(rng.integers(len(everyone) + 1)), replace=False).tolist()}
            )
        if reset:
            seeds = [None if rng.random() >= reseed else int(rng.integers(2**32)) for _ in reset]
            for world in reference.worlds:
                world.infos, world.final_infos = {}, {}  # those of envs that are not asked are not told again
            reference.reset(reset, seeds)
            calls.append(Call("reset", frame_of_all(), seed=seeds, env_ids=reset))
        else:
            actions = reference.draw(everyone, rng)
            reference.step(everyone, actions)
            calls.append(Call("step", frame_of_all(), actions=actions))
    for world in reference.worlds:
        world.driver.env.close()
    return calls


def public(venv: VectorEnv, actions: list[Any]) -> Any:
    """Actions per group as the vectorizer takes them."""
    if not venv.grouped:
        return actions[0]
    return {group.name: part for group, part in zip(venv.spec.groups, actions, strict=True)}


def replay(venv: VectorEnv, calls: list[Call]) -> None:
    """Make these calls and compare everything."""
    for number, call in enumerate(calls):
        where = f"call {number}, {call.kind}"
        frame = call.expected
        if call.kind == "reset":
            obs, infos = venv.reset(seed=call.seed, options=call.options, env_ids=call.env_ids)
            check_leaves(leaves_of(venv, obs), frame.obs, f"{where} obs")
            if call.env_ids is None:
                check_infos(venv, infos, frame, where, stepped=False)
            else:
                assert_trees_equal(infos_to_list(infos, venv.agents, venv.num_envs), frame.infos, f"{where} infos")
                for name in ("alive", "acting"):
                    assert_same(infos[name], frame.flags[name], f"{where} {name}")
        else:
            obs, rewards, terminated, truncated, infos = venv.step(public(venv, call.actions))
            check_leaves(leaves_of(venv, obs), frame.obs, f"{where} obs")
            assert_same(rewards, frame.rewards, f"{where} rewards")
            assert_same(terminated, frame.flags["terminated"], f"{where} terminated")
            assert_same(truncated, frame.flags["truncated"], f"{where} truncated")
            check_infos(venv, infos, frame, where, stepped=True)
        if frame.state is not None:
            assert_same(venv.state(), frame.state, f"{where} state")
