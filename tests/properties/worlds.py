"""Envs of any form: any API, any spaces, agents that come and go, and matter in all that they say.

What an env says is settled by its last seed, the episode, the step and the actions that have reached it, and by
nothing else: looking twice gives the same. Matter is made from bytes: members of any space, infos and rewards of any
kind; equal bytes make equal matter.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.envs.detect import adapt
from marlvec.envs.wrappers import TimeLimit
from marlvec.testing.scripted import KeyedEnv, ScriptedParallelEnv, SingleEnv, TurnEnv
from marlvec.testing.scripted.script import ScriptedState
from tests.vector.support.kinds import waits
from tests.vector.support.reference import is_object

INFO_KEYS = ("reward", "t", "deep", "alive", "final_info", "state", "_hidden", "", "_", "ünï", "__agents__", "x/y")
"""Keys of infos: plain ones, those of marlvec itself, and those that look like one of its masks."""

NAN_BITS = 0x7FF8_0000_0000_0000


class Matter:
    """An endless stream of bytes that follows from a key, and what can be made of it.

    Args:
        key: Numbers that settle everything.
        wild: Whether floats may be anything: NaN with any payload, infinite, out of bounds.
    """

    def __init__(self, *key: int, wild: bool = False) -> None:
        self._key = struct.pack(f"<{len(key)}q", *key)
        self._bytes = b""
        self._block = 0
        self.wild = wild

    def take(self, size: int) -> bytes:
        """The next bytes."""
        while len(self._bytes) < size:
            seed = self._key + self._block.to_bytes(4, "little")
            self._bytes += hashlib.shake_128(seed).digest(max(256, size))
            self._block += 1
        out, self._bytes = self._bytes[:size], self._bytes[size:]
        return out

    def below(self, n: int) -> int:
        """A number from 0 to n - 1; n up to 2**16 or so."""
        return int.from_bytes(self.take(4), "little") % n

    def chance(self, p: float) -> bool:
        return self.below(1000) < 1000 * p

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def shuffled(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """The same dict in another order."""
        keys = list(table)
        keys.sort(key=lambda _: self.below(1 << 16))
        return {key: table[key] for key in keys}

    def array(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Any bits: integers of the whole range, floats with every payload of NaN."""
        dtype = np.dtype(dtype)
        data = self.take(dtype.itemsize * int(np.prod(shape)))
        if dtype.kind == "b":
            return (np.frombuffer(data, np.uint8) & 1).astype(bool).reshape(shape)
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def member(self, space: Space[Any]) -> Any:
        """A member of a space; of a Box something of its form, where this is wild."""
        if isinstance(space, Dict):
            return {key: self.member(sub) for key, sub in space.spaces.items()}
        if isinstance(space, Tuple):
            return tuple(self.member(sub) for sub in space.spaces)
        if isinstance(space, Box):
            return self._in_box(space)
        if isinstance(space, Discrete):
            return space.start + type(space.start)(self.below(int(space.n)))
        if isinstance(space, MultiDiscrete):
            return (space.start + self.array(np.uint32, space.shape) % space.nvec).astype(space.dtype)
        if isinstance(space, MultiBinary):
            return self.array(bool, space.shape).astype(np.int8)
        space.seed(self.below(1 << 16))
        return space.sample()

    def _in_box(self, space: Box) -> Any:
        dtype = np.dtype(space.dtype)
        raw = self.array(dtype, space.shape)
        if self.wild and dtype.kind == "f":
            return self._with_nans(raw)
        if dtype.kind == "f":
            return np.clip(np.where(np.isnan(raw), dtype.type(0), raw), space.low, space.high)
        return np.clip(raw, space.low, space.high)

    def _with_nans(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Make a third of the floats NaN, each with the payload that it has as a number."""
        bits = raw.reshape(-1).view(f"u{raw.itemsize}")
        exponent = {2: 0x7C00, 4: 0x7F80_0000, 8: 0x7FF0_0000_0000_0000}[raw.itemsize]
        for k in range(len(bits)):
            if self.below(3) == 0:
                bits[k] |= exponent | 1
        return bits.view(raw.dtype).reshape(raw.shape)

    def reward(self) -> Any:
        """A reward in any of the forms that envs give."""
        if self.wild and self.chance(0.3):
            return struct.unpack("<d", struct.pack("<Q", NAN_BITS | self.below(1 << 16)))[0]
        number = self.below(2000) / 7 - 100
        return self.choice((float, np.float32, np.float64, np.float16, int, np.int8, bool, np.array))(
            number if abs(number) < 100 else 0.0
        )

    def info(self) -> dict[Any, Any]:
        """One info dict; every value in it may be changed by the env afterwards."""
        return {self.choice(INFO_KEYS): self.value() for _ in range(1 + self.below(3))}

    def value(self, depth: int = 0) -> Any:
        """A value of an info."""
        makers: Sequence[Callable[[], Any]] = (
            lambda: None,
            lambda: self.chance(0.5),
            lambda: self.below(100),
            lambda: 1 << (40 + self.below(60)),
            lambda: struct.unpack("<d", self.take(8))[0],
            lambda: struct.unpack("<d", struct.pack("<Q", NAN_BITS | self.below(1 << 16)))[0],
            lambda: self.take(self.below(5)).hex(),
            lambda: self.take(self.below(5)),
            lambda: (self.below(9), "two"),
            lambda: self.choice((np.int16, np.float32, np.float64, np.uint8))(self.below(100)),
            lambda: self.array(self.choice(("f2", "f4", "f8")), (self.below(3), 2)),
            lambda: self.array(self.choice(("bool", "u1", "i8", "S2")), self.choice(((0,), (3,), (2, 0), (1, 2)))),
            lambda: self.array(self.choice(("bool", "i4", "f4", "f8")), ()),
            lambda: self.choice((np.array, np.datetime64))(np.datetime64(self.below(1 << 30), "ns")),
            lambda: np.array(self.take(2).hex()),
            lambda: np.array([self.take(2).hex(), "x"]),
            lambda: np.array([None, self.below(5)], object),
            lambda: [self.value(depth + 1) for _ in range(self.below(3))],
            lambda: {self.choice(("a", "b", "_c", "", 3)): self.value(depth + 1) for _ in range(self.below(3))},
            lambda: {self.choice(("a", "b")): self.value(depth + 1) for _ in range(1 + self.below(2))},
        )
        return self.choice(makers[:-3] if depth > 2 else makers)()


# --- envs


APIS = ("parallel", "turns", "keyed", "single")


@dataclass(frozen=True)
class Seat:
    """What one agent sees and does.

    Attributes:
        observation: Its observation space, without mask.
        action: Its action space.
        mask: Where its action mask stands, if it has one: ``"alone"`` beside the observation, ``"among"`` the keys of
            a Dict, or ``"info"``, now and then.
    """

    observation: Space[Any]
    action: Space[Any]
    mask: str | None = None

    @property
    def choices(self) -> int | None:
        """Length of its mask."""
        if self.mask is None or not isinstance(self.action, (Discrete, MultiDiscrete)):
            return None
        return int(self.action.n) if isinstance(self.action, Discrete) else int(self.action.nvec.sum())

    @property
    def public_space(self) -> Space[Any]:
        """Observation space as the env declares it."""
        if self.choices is None or self.mask == "info":
            return self.observation
        mask = Box(0, 1, (self.choices,), np.int8)
        if self.mask == "alone":
            return Dict({"observation": self.observation, "action_mask": mask})
        return Dict({"zebra": self.observation, "action_mask": mask, "aside": Discrete(5)})


@dataclass(frozen=True)
class Design:
    """What the envs of one vectorizer have in common.

    Attributes:
        api: One of `APIS`.
        seats: One per agent.
        state: Space of the global state, or None.
        longest: Longest episode.
        limit: Steps after which an episode is cut short, or None.
        talk: How often an agent has an info, 0 to 1.
        wild: Whether floats may be NaN, with payloads, and out of bounds.
        reuse: Whether the env overwrites the arrays and dicts that it has handed out.
        sloppy: Whether numbers come in other dtypes than the spaces say, where that changes no value.
        flag: A choice that only some APIs have: who is dead goes first, agents have no last observation.
    """

    api: str
    seats: tuple[Seat, ...]
    state: Space[Any] | None = None
    longest: int = 5
    limit: int | None = None
    talk: float = 0.2
    wild: bool = False
    reuse: bool = False
    sloppy: bool = False
    flag: bool = False


class DrawnWorld(ScriptedState):
    """A scripted world whose words are matter."""

    def __init__(self, design: Design, env_index: int) -> None:
        super().__init__(len(design.seats), None, longest=design.longest, env_index=env_index)
        self.design = deepcopy(design)  # it is drawn from
        self.salt = 0
        self.heard: Any = None
        self._spoken: dict[tuple[str, int], Any] = {}
        self._kept: list[Any] = []
        self._shown: dict[int, NDArray[np.int8]] = {}  # masks of those who act

    def matter(self, what: int, a: int = 0) -> Matter:
        checksum = self._checksums[a] if a < self.agent_num else 0
        key = (self.env_index, self._drawn, self.episode, self.t, self.salt, checksum, what, a)
        return Matter(*key, wild=self.design.wild)

    def listen(self, options: Any) -> None:
        """Take in the options of a reset, and change them."""
        if options is not None:
            self.salt += options["salt"]
            options["deep"].append(self.salt)
            options["salt"] = -1

    def reset(self, seed: int | None) -> None:
        super().reset(seed)
        self._kept, self._shown = [], {}

    def act(self, actions: Any) -> None:
        for a, action in actions.items():
            space = self.design.seats[a].action
            assert space.contains(action), f"action {action!r} of agent {a} is not in {space}"
            mask = self._shown.get(a)
            assert mask is None or allowed(space, mask, action), f"action {action!r} of agent {a} is masked: {mask}"
        # What an env was given stays its own: it is looked at again a step later, and then spoilt.
        for action in self._kept:
            self._checksums = [(31 * c + code_of(action)) % 65_521 for c in self._checksums]
            spoil(action)
        self._kept = [actions[a] for a in sorted(actions)]
        self.t += 1
        for a, action in actions.items():
            self._checksums[a] = (31 * self._checksums[a] + code_of(action) + 1) % 65_521

    def mask(self, a: int) -> NDArray[np.int8] | None:
        seat = self.design.seats[a]
        if seat.choices is None:
            return None
        mask = np.frombuffer(self.matter(1, a).take(seat.choices), np.int8) & 1
        sizes = [seat.choices] if isinstance(seat.action, Discrete) else seat.action.nvec.ravel().tolist()
        start = 0
        for size in sizes:  # at least one choice of each
            mask[start + self.t % size] = 1
            start += size
        return mask

    def observe_masked(self, a: int, *, acting: bool = True) -> Any:
        seat, matter = self.design.seats[a], self.matter(0, a)
        value = matter.member(seat.observation)
        if self.design.sloppy:
            value = careless(seat.observation, value, matter)
        mask = self.mask(a)
        if mask is not None and seat.mask != "info":
            if acting:
                self._shown[a] = mask.copy()
            else:
                mask[:] = 0
            value = {"observation" if seat.mask == "alone" else "zebra": value, "action_mask": mask}
            if seat.mask == "among":
                value["aside"] = matter.below(5)
        return self._speak("obs", a, reordered(value, matter))

    def reward(self, a: int, action: Any) -> Any:
        return self.matter(2, a).reward()

    def info(self, a: int) -> dict[str, Any]:
        matter, mask = self.matter(3, a), self.mask(a)
        info = matter.info() if matter.chance(self.design.talk) else {}
        if mask is not None and self.design.seats[a].mask == "info":
            self._shown.pop(a, None)
            if matter.chance(0.7):
                self._shown[a] = mask
                info["action_mask"] = mask.astype(matter.choice((bool, np.int8, np.float32)))
        return self._speak("info", a, info)

    def common(self) -> dict[str, Any]:
        """Infos of the whole env, under the names that envs use for that."""
        matter = self.matter(4)
        if not matter.chance(self.design.talk / 2):
            return {}
        return {matter.choice(("common", "__common__")): self._speak("common", 0, matter.info())}

    def state(self) -> Any:
        assert self.design.state is not None
        return self._speak("state", 0, self.matter(5).member(self.design.state))

    def _speak(self, what: str, a: int, value: Any) -> Any:
        """Say it, in the arrays and dicts of last time where this env reuses them."""
        if not self.design.reuse:
            return value
        old = self._spoken.get((what, a))
        self._spoken[what, a] = value = poured(value, old)
        return value


class Nudged:
    """What can be asked of such an env besides resets and steps."""

    world: DrawnWorld
    note: Any = 0

    def nudge(self, by: int) -> tuple[int, int]:
        """Change all that it will say in this episode and later."""
        self.world.salt += by
        return self.world.env_index, self.world.salt

    def clock(self) -> tuple[int, ...]:
        return self.world.env_index, self.world.episode, self.world.t, self.world.salt


class DrawnParallelEnv(Nudged, ScriptedParallelEnv):
    def __init__(self, design: Design, env_index: int) -> None:
        super().__init__(agent_num=len(design.seats), env_index=env_index)
        self.world = DrawnWorld(design, env_index)
        if design.state is not None:
            self.state_space = design.state

    def observation_space(self, agent: str) -> Space[Any]:
        return self.world.design.seats[self._place(agent)].public_space

    def action_space(self, agent: str) -> Space[Any]:
        return self.world.design.seats[self._place(agent)].action

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.world.listen(options)
        return tuple(self._mixed(table) for table in super().reset(seed, options))

    def step(self, actions: dict[str, Any]) -> Any:
        return tuple(self._mixed(table) for table in super().step(actions))

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        return {**{agent: self.world.info(self._place(agent)) for agent in agents}, **self.world.common()}

    def _mixed(self, table: dict[str, Any]) -> dict[str, Any]:
        return self.world.matter(6, len(table)).shuffled(table)


class DrawnTurnEnv(Nudged, TurnEnv):
    def __init__(self, design: Design, env_index: int) -> None:
        super().__init__(agent_num=len(design.seats), env_index=env_index, dead_first=design.flag)
        self.world = DrawnWorld(design, env_index)
        if design.state is not None:
            self.state_space = design.state

    def observation_space(self, agent: str) -> Space[Any]:
        return self.world.design.seats[self._place(agent)].public_space

    def action_space(self, agent: str) -> Space[Any]:
        return self.world.design.seats[self._place(agent)].action

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.world.listen(options)
        super().reset(seed, options)


class DrawnKeyedEnv(Nudged, KeyedEnv):
    def __init__(self, design: Design, env_index: int) -> None:
        some = len(design.seats) % 2 == 0
        super().__init__(agent_num=len(design.seats), waits=waits, int_ids=some, last_obs=not design.flag)
        self.world = DrawnWorld(design, env_index)
        self.observation_spaces = {agent: seat.public_space for agent, seat in self._seats()}
        self.action_spaces = {agent: seat.action for agent, seat in self._seats()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.world.listen(options)
        return tuple(self.world.matter(6).shuffled(table) for table in super().reset(seed=seed, options=options))

    def step(self, actions: dict[Any, Any]) -> Any:
        return tuple(self.world.matter(6).shuffled(table) for table in super().step(actions))

    def _infos(self, agents: list[Any]) -> dict[Any, Any]:
        infos = {agent: self.world.info(self.possible_agents.index(agent)) for agent in agents}
        return {**infos, **self.world.common()}

    def _seats(self) -> Any:
        return zip(self.possible_agents, self.world.design.seats, strict=True)


class DrawnSingleEnv(Nudged, SingleEnv):
    def __init__(self, design: Design, env_index: int) -> None:
        super().__init__(1, env_index=env_index)
        self.world = DrawnWorld(design, env_index)
        self.observation_space = design.seats[0].public_space
        self.action_space = design.seats[0].action
        if design.state is not None:
            self.state_space = design.state

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.world.listen(options)
        return super().reset(seed=seed, options=options)

    def state(self) -> Any:
        return self.world.state()

    def _info(self) -> dict[str, Any]:
        return self.world.info(0)


_FACES: dict[str, Callable[[Design, int], Any]] = {
    "parallel": DrawnParallelEnv,
    "turns": DrawnTurnEnv,
    "keyed": DrawnKeyedEnv,
    "single": DrawnSingleEnv,
}


def build(design: Design, env_index: int) -> Any:
    """One env, as the plain loop gets it."""
    return _FACES[design.api](design, env_index)


def build_limited(design: Design, env_index: int) -> Any:
    """One env, as the vectorizer gets it."""
    env = build(design, env_index)
    return env if design.limit is None else TimeLimit(adapt(env), design.limit)


def factories_of(design: Design, n: int, *, limited: bool = True) -> list[Callable[[], Any]]:
    return [partial(build_limited if limited else build, design, i) for i in range(n)]


def code_of(action: Any) -> int:
    """A number that tells actions apart, by their types and bytes."""
    return zlib.crc32(repr(plain(action)).encode())


def plain(value: Any) -> Any:
    """The same without arrays and numpy's scalars, whose ``repr`` leaves out digits."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, plain(value[key])) for key in sorted(value)]
    return (type(value).__name__, *map(plain, value)) if isinstance(value, (tuple, list)) else value


def allowed(space: Space[Any], mask: NDArray[Any], action: Any) -> bool:
    """Whether a mask allows this action."""
    if isinstance(space, Discrete):
        return bool(mask[int(action) - int(space.start)])
    assert isinstance(space, MultiDiscrete)
    starts = np.concatenate([[0], np.cumsum(space.nvec.ravel())[:-1]])
    return bool(mask[starts + (np.asarray(action) - space.start).ravel()].all())


def reordered(value: Any, matter: Matter) -> Any:
    """The same value, its dicts in another order."""
    if isinstance(value, dict):
        return matter.shuffled({key: reordered(sub, matter) for key, sub in value.items()})
    return type(value)(reordered(sub, matter) for sub in value) if type(value) in (tuple, list) else value


def careless(space: Space[Any], value: Any, matter: Matter) -> Any:
    """The same numbers in other dtypes, tuples as lists."""
    if isinstance(space, Dict):
        return {key: careless(sub, value[key], matter) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return [careless(sub, part, matter) for sub, part in zip(space.spaces, value, strict=True)]
    if is_object(space):
        return value
    if isinstance(value, np.ndarray) and matter.chance(0.5):
        if value.dtype.kind in "iub" and value.dtype != np.uint64:
            return value.astype(np.int64)
        return value.astype(np.float64) if value.dtype.kind == "f" and not matter.wild else value
    return odd(np.asarray(value), matter)


def odd(array: NDArray[Any], matter: Matter) -> NDArray[Any]:
    """The same array in another layout."""
    match matter.below(4):
        case 0:
            return array.astype(array.dtype.newbyteorder())
        case 1:
            return np.array(array, order="F")
        case 2:
            return np.repeat(array[..., None], 2, axis=-1)[..., 0]  # every other element of a larger one
        case _:
            array.flags.writeable = False
            return array


def poured(new: Any, old: Any) -> Any:
    """The new value in the old one's dicts and arrays, as far as they fit."""
    if isinstance(new, dict) and isinstance(old, dict):
        parts = {key: poured(value, old.get(key)) for key, value in new.items()}
        old.clear()
        old.update(parts)
        return old
    arrays = isinstance(new, np.ndarray) and isinstance(old, np.ndarray) and new.dtype != object
    if arrays and (new.dtype, new.shape) == (old.dtype, old.shape) and old.flags.writeable:
        old[...] = new
        return old
    if isinstance(new, list) and isinstance(old, list):
        old[:] = new
        return old
    return new


def spoil(value: Any) -> None:
    """Overwrite all arrays of an action."""
    if isinstance(value, dict):
        for part in value.values():
            spoil(part)
    elif isinstance(value, tuple):
        for part in value:
            spoil(part)
    elif isinstance(value, np.ndarray):
        value.fill(1)
