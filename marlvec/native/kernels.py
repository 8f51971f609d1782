"""Compiles kernels (no interpreter lock, cached, floats exactly as written); numpy's random numbers in them.

The draws are those of ``Generator(PCG64(SeedSequence(seed)))``, bit for bit, one stream an env.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from marlvec.native.rng_streams import Streams

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """Compile a function on its first call, in nopython mode, without the interpreter lock, cached on disk.

    No fast math: operations are neither reordered nor fused. Division by zero gives infinity or NaN, like numpy's.
    """
    jit: Any = partial(numba.njit, nogil=True, error_model="numpy")
    try:
        compiled: Any = jit(cache=True)(function)
    except RuntimeError:  # no cache for functions of a prompt or in a read-only folder
        return cast("_F", jit()(function))
    kept = getattr(compiled, "_cache", None)  # NUMBA_DISABLE_JIT returns the plain function
    if kept is not None:
        # To validate its cache, numba checks only the function's file. But a kernel contains compiled code of other
        # files, so the stamp covers them, too.
        file = kept._cache_file
        file._source_stamp = (*file._source_stamp, _sources())
    return cast("_F", compiled)


@cache
def _sources() -> str:
    """Return a digest of all marlvec code that a kernel may call: every file below this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@kernel
def end_episode(i: Any, flags: Any, alive: Any, acting: Any, done: Any) -> None:
    """End env ``i``'s episode: set all agents' ``flags`` (terminated or truncated)."""
    for a in range(flags.shape[1]):
        flags[i, a] = True
        alive[i, a] = False
        acting[i, a] = False
    done[i] = True


_HIGH = np.uint64(2549297995355413924)  # PCG64's multiplier
_LOW = np.uint64(4865540595714422341)
_HALF = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_1 = np.uint64(1)
_63 = np.uint64(63)
_64 = np.uint64(64)


def seed_envs(rng: Streams, ids: NDArray[np.int64], seeds: Sequence[int]) -> None:
    """Seed the streams of these envs, like ``numpy.random.default_rng(seed)``; a seed is below 2**64."""
    _seed(rng, ids, np.array(seeds, np.uint64))


@kernel
def _seed(rng: Streams, ids: NDArray[np.int64], seeds: NDArray[np.uint64]) -> None:
    pool = np.empty(4, np.uint32)
    words = np.empty(8, np.uint32)
    for k in range(len(ids)):
        _seed_sequence(seeds[k], pool, words)
        i = ids[k]
        state_low = np.uint64(words[0]) | (np.uint64(words[1]) << _32)
        state_high = np.uint64(words[2]) | (np.uint64(words[3]) << _32)
        inc_low = np.uint64(words[4]) | (np.uint64(words[5]) << _32)
        inc_high = np.uint64(words[6]) | (np.uint64(words[7]) << _32)
        # generate_state(4, uint64): the first of each pair is the high half.
        state_low, state_high = state_high, state_low
        inc_low, inc_high = inc_high, inc_low
        inc_high = (inc_high << _1) | (inc_low >> _63)
        inc_low = (inc_low << _1) | _1
        rng[i, 0] = 0
        rng[i, 1] = 0
        rng[i, 2] = inc_high
        rng[i, 3] = inc_low
        rng[i, 4] = 0
        rng[i, 5] = 0
        _advance(rng, i)
        low = rng[i, 1] + state_low
        rng[i, 0] = rng[i, 0] + state_high + (_1 if low < state_low else np.uint64(0))
        rng[i, 1] = low
        _advance(rng, i)


@kernel
def _hash(value: np.uint32, multiplier: np.uint32) -> tuple[np.uint32, np.uint32]:
    """Hash one word like SeedSequence; return it and the next multiplier."""
    value = np.uint32(value ^ multiplier)
    multiplier = np.uint32(multiplier * np.uint32(0x931E8875))
    value = np.uint32(value * multiplier)
    value = np.uint32(value ^ (value >> np.uint32(16)))
    return value, multiplier


@kernel
def _mix(x: np.uint32, y: np.uint32) -> np.uint32:
    result = np.uint32(np.uint32(x * np.uint32(0xCA01F9DD)) - np.uint32(y * np.uint32(0x4973F715)))
    return np.uint32(result ^ (result >> np.uint32(16)))


@kernel
def _seed_sequence(seed: np.uint64, pool: NDArray[np.uint32], words: NDArray[np.uint32]) -> None:
    """``SeedSequence(seed).generate_state(8)`` into ``words``."""
    entropy = (np.uint32(seed & _HALF), np.uint32(seed >> _32))  # a missing word counts as zero
    multiplier = np.uint32(0x43B0D7E5)
    for j in range(4):
        word = entropy[j] if j < 2 else np.uint32(0)
        pool[j], multiplier = _hash(word, multiplier)
    for source in range(4):
        for target in range(4):
            if source != target:
                word, multiplier = _hash(pool[source], multiplier)
                pool[target] = _mix(pool[target], word)
    multiplier = np.uint32(0x8B51F9DD)
    for j in range(8):
        word = np.uint32(pool[j % 4] ^ multiplier)
        multiplier = np.uint32(multiplier * np.uint32(0x58F38DED))
        word = np.uint32(word * multiplier)
        words[j] = np.uint32(word ^ (word >> np.uint32(16)))


@kernel
def _product(a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the high and low half of a 64 × 64 bit product."""
    a_low, a_high = a & _HALF, a >> _32
    b_low, b_high = b & _HALF, b >> _32
    low = a_low * b_low
    middle = a_high * b_low + (low >> _32)
    other = a_low * b_high + (middle & _HALF)
    return a_high * b_high + (middle >> _32) + (other >> _32), a * b


@kernel
def _advance(rng: Streams, i: int) -> None:
    """Advance the 128-bit linear congruential generator by one step."""
    high, low = rng[i, 0], rng[i, 1]
    product_high, product_low = _product(low, _LOW)
    product_high += high * _LOW + low * _HIGH
    new_low = product_low + rng[i, 3]
    rng[i, 0] = product_high + rng[i, 2] + (_1 if new_low < product_low else np.uint64(0))
    rng[i, 1] = new_low


@kernel
def next_uint64(rng: Streams, i: int) -> Any:
    """Return the next 64 bits of env ``i``'s stream."""
    _advance(rng, i)
    turn = rng[i, 0] >> np.uint64(58)
    value = rng[i, 0] ^ rng[i, 1]
    return (value >> turn) | (value << ((_64 - turn) & _63))


@kernel
def next_uint32(rng: Streams, i: int) -> Any:
    """Return the next 32 bits, in a uint64: the kept half of the last 64 bits, if any."""
    if rng[i, 4] != 0:
        rng[i, 4] = 0
        return rng[i, 5]
    value = next_uint64(rng, i)
    rng[i, 4] = 1
    rng[i, 5] = value >> _32
    return value & _HALF


@kernel
def double(rng: Streams, i: int) -> Any:
    """``Generator.random()``: a float64 in [0, 1)."""
    return np.float64(next_uint64(rng, i) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def uniform(rng: Streams, i: int, low: float, high: float) -> Any:
    """``Generator.uniform(low, high)``."""
    return low + (high - low) * double(rng, i)


@kernel
def bounded(rng: Streams, i: int, n: int) -> Any:
    """``Generator.integers(n)``, n from 1 to 2**32 - 1: Lemire's method on 32 bits. A single choice needs no draw."""
    if n == 1:
        return 0
    size = np.uint64(n)
    product = next_uint32(rng, i) * size
    left = product & _HALF
    if left < size:
        threshold = (np.uint64(0xFFFFFFFF) - (size - _1)) % size
        while left < threshold:
            product = next_uint32(rng, i) * size
            left = product & _HALF
    return np.int64(product >> _32)


@kernel
def interval(rng: Streams, i: int, most: int) -> Any:
    """Draw from 0 to ``most`` as `shuffle` does: masked bits, until they are at most ``most``; 0 needs no draw."""
    if most == 0:
        return 0
    top = np.uint64(most)
    mask = top
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> np.uint64(shift)
    value = next_uint32(rng, i) & mask
    while value > top:
        value = next_uint32(rng, i) & mask
    return np.int64(value)


@kernel
def shuffle(rng: Streams, i: int, values: Any) -> None:
    """``Generator.shuffle(values)`` in place, of an array (n,) of any dtype, or of a list."""
    for k in range(len(values) - 1, 0, -1):
        j = interval(rng, i, k)
        values[k], values[j] = values[j], values[k]


@kernel
def permutation(rng: Streams, i: int, out: NDArray[np.int64]) -> None:
    """``Generator.permutation(len(out))``, into ``out``."""
    for k in range(len(out)):
        out[k] = k
    shuffle(rng, i, out)


_LARGE = 10_000  # above so many choices, numpy uses another method to draw a large part of them


@kernel
def sample(rng: Streams, i: int, n: int, out: NDArray[np.int64]) -> None:
    """``Generator.choice(n, size=len(out), replace=False)``: different numbers below n, by Floyd's method.

    With replacement, ``Generator.choice(n, size)`` is `bounded` for each.
    """
    size = len(out)
    if n > _LARGE and size > n // 50:
        pool = np.arange(n)
        _mix_tail(rng, i, pool, max(n - size, 1))
        out[:] = pool[n - size :]
        return
    for k in range(size):
        value = bounded(rng, i, n - size + k + 1)
        for j in range(k):
            if out[j] == value:
                value = n - size + k
                break
        out[k] = value
    _mix_tail(rng, i, out, 1)


@kernel
def _mix_tail(rng: Streams, i: int, values: NDArray[np.int64], first: int) -> None:
    """Do numpy's shuffle (from the end down) only for the numbers from index ``first`` on."""
    for k in range(len(values) - 1, first - 1, -1):
        j = bounded(rng, i, k + 1)
        values[k], values[j] = values[j], values[k]
