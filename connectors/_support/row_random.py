"""`RowRandom`: random numbers per row, independent of the batch that contains the row."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["RowRandom"]

U64 = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_MULTIPLY = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)
_SPARE = np.uint64(11)  # a double holds 53 of 64 bits


class RowRandom:
    """Draws that depend only on ``(seed, stream, eps_id, agent_index, t)``, and in a collector on its seed.

    Each row has its own generator, seeded by a hash of these numbers. So it draws the same in batches of any size and
    order, in any process, and after a restart, without a state to save. Without ``eps_id`` the ``env_id`` replaces it;
    an env's episodes then draw equal numbers at equal ``t``.

    A row's first k draws do not depend on the number of draws, and all kinds of draw below use the same bits: give each
    purpose its own stream.

    The generator is SplitMix64, and its output function is the hash too: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014, with the constants of Vigna's ``splitmix64.c``. Normal numbers are
    made of uniform ones by Box and Muller, "A note on the generation of random normal deviates", 1958.

    Args:
        seed: An int of at least 0.
        stream: Name of the purpose; streams of one seed are independent.

    Raises:
        ArgumentError: ``seed`` is not an int, or below 0.
    """

    def __init__(self, seed: int, stream: str) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ArgumentError(f"seed must be an int from 0 on, got {seed!r}")
        self.seed = int(seed)
        self.stream = stream
        self.follow_run(None)

    def follow_run(self, run_seed: int | None) -> None:
        """Draw other numbers for each ``run_seed``.

        Args:
            run_seed: From 0 to 2**64 - 1; None: draws as outside of collectors.
        """
        key = b"" if run_seed is None else run_seed.to_bytes(8, "little")
        # Not hash(), whose salt differs between processes.
        digest = hashlib.blake2b(f"{self.seed}/{self.stream}".encode(), key=key, digest_size=8).digest()
        self._key = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __repr__(self) -> str:
        return f"RowRandom({self.seed}, {self.stream!r})"

    def uniform(self, rows: Rows, k: int = 1) -> NDArray[np.float64]:
        """Draw (n, k) numbers in [0, 1).

        Returns:
            (n, k) float64; a row's numbers do not depend on the other rows.

        Raises:
            ContractError: The rows lack ``t``, ``agent_index``, or both ``eps_id`` and ``env_id``.
        """
        words = self._words(rows, k)
        words >>= _SPARE
        drawn: NDArray[np.float64] = words * np.float64(2.0**-53)
        return drawn

    def normal(self, rows: Rows, k: int = 1) -> NDArray[np.float64]:
        """Draw (n, k) numbers of mean 0 and variance 1; for errors see `uniform`."""
        pairs = (k + 1) // 2
        u = self.uniform(rows, 2 * pairs)
        radius = np.sqrt(-2 * np.log1p(-u[:, 0::2]))  # of 1 - u, which is never 0
        angle = 2 * np.pi * u[:, 1::2]
        out = np.empty_like(u)
        out[:, 0::2] = radius * np.cos(angle)
        out[:, 1::2] = radius * np.sin(angle)
        return out[:, :k]

    def integers(self, rows: Rows, high_n: ArrayLike, k: int = 1) -> NDArray[np.int64]:
        """Draw (n, k) ints from 0 to below ``high_n``; for errors see `uniform`.

        Args:
            rows: n rows.
            high_n: One int for all rows, (n,) ints, or (n, k) ints; from 1 to 2**53.
            k: Number of draws per row.
        """
        high: NDArray[Any] = np.asarray(high_n)
        # Rounding never reaches high itself: the product is at least half a step of doubles below it.
        drawn: NDArray[Any] = self.uniform(rows, k) * (high[:, None] if high.ndim == 1 else high)
        return drawn.astype(np.int64)

    def _words(self, rows: Rows, k: int) -> U64:
        """(n, k) words of 64 random bits."""
        state = self._key
        for name in ("eps_id" if "eps_id" in rows else "env_id", "agent_index", "t"):
            if name not in rows:
                raise ContractError(
                    f"random numbers belong to rows by eps_id (or env_id), agent_index and t, and these rows have "
                    f"no {name!r}; the columns are {list(rows.keys())}. Give them that column"
                )
            # One more, so that a number's 0 is a step too.
            state = mix(state + (np.asarray(rows[name]).astype(np.uint64) + np.uint64(1)) * _STEP)
        return mix(state[:, None] + np.arange(1, k + 1, dtype=np.uint64) * _STEP)


def mix(words: U64) -> U64:
    """SplitMix64's output function, in place: one-to-one, and each bit in changes about half of the bits out."""
    for shift, factor in zip(_SHIFT, _MULTIPLY, strict=False):
        words ^= words >> shift
        words *= factor
    words ^= words >> _SHIFT[-1]
    return words
