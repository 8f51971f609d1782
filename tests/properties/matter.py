"""Matter: members of any space, infos and rewards of any kind, made from bytes. Equal bytes make equal matter."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

__all__ = ["INFO_KEYS", "Matter"]

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
