"""Count, mean and variance that can be joined and parted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError

__all__ = ["Moments"]

Floats = NDArray[np.float64]


class Moments:
    """Count, mean and sum of squared deviations of G groups of arrays, in float64. Never changed once made.

    Joining two is exact but for rounding (Chan, Golub and LeVeque): the answer is that of the pooled data.

    Args:
        groups: G.
        shape: Shape of one value.

    Attributes:
        count: (G,) number of values.
        mean: (G, *shape); 0 where there are no values.
        m2: (G, *shape) sum of squared deviations from the mean.
    """

    __slots__ = ("count", "m2", "mean")

    count: Floats
    mean: Floats
    m2: Floats

    def __init__(self, groups: int, shape: tuple[int, ...]) -> None:
        self.count = np.zeros(groups)
        self.mean = np.zeros((groups, *shape))
        self.m2 = np.zeros((groups, *shape))

    @classmethod
    def of(cls, values_n: Floats, group_n: NDArray[Any] | None, groups: int) -> Moments:
        """Moments of (n, *shape) values, n > 0; ``group_n`` (n,) says which group each is of, None that G is 1."""
        if group_n is None:
            mean = np.add.reduce(values_n, 0) / len(values_n)
            deviation = values_n - mean
            deviation *= deviation
            return cls._made(np.array([float(len(values_n))]), mean[None], np.add.reduce(deviation, 0)[None])
        new = cls(groups, values_n.shape[1:])
        np.add.at(new.count, group_n, 1.0)
        np.add.at(new.mean, group_n, values_n)
        new.mean /= _column(np.maximum(new.count, 1.0), new.mean)
        np.add.at(new.m2, group_n, (values_n - new.mean[group_n]) ** 2)
        return new

    @classmethod
    def _made(cls, count: Floats, mean: Floats, m2: Floats) -> Moments:
        new = cls.__new__(cls)
        new.count, new.mean, new.m2 = count, mean, m2
        return new

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value."""
        return self.mean.shape[1:]

    @property
    def finite(self) -> bool:
        """Whether no value was NaN or infinite and nothing overflowed."""
        return bool(np.isfinite(self.m2).all())

    def joined(self, other: Moments) -> Moments:
        """Moments of the data of both."""
        total = self.count + other.count
        share = _column(other.count / np.maximum(total, 1.0), self.mean)
        delta = other.mean - self.mean
        mean = self.mean + delta * share
        delta *= delta
        delta *= _column(self.count, self.mean) * share
        delta += self.m2
        delta += other.m2
        return self._made(total, mean, delta)

    def without(self, part: Moments) -> Moments:
        """Moments of the data that is not in ``part``: ``part.joined(answer)`` is this one again."""
        count = self.count - part.count
        some = _column(count > 0, self.mean)
        odds = _column(part.count / np.maximum(count, 1.0), self.mean)
        mean = np.where(some, self.mean + (self.mean - part.mean) * odds, 0.0)
        weight = _column(part.count * count / np.maximum(self.count, 1.0), self.mean)
        m2 = np.where(some, self.m2 - part.m2 - (mean - part.mean) ** 2 * weight, 0.0)
        return self._made(count, mean, m2)

    def grown(self, groups: int) -> Moments:
        """The same with room for ``groups`` groups, or itself where it has that."""
        if groups <= len(self.count):
            return self
        new = Moments(groups, self.shape)
        here = slice(len(self.count))
        new.count[here], new.mean[here], new.m2[here] = self.count, self.mean, self.m2
        return new

    def scale(self, epsilon: float) -> Floats:
        """(G, *shape) 1 / standard deviation; 1 where there are no values."""
        count = _column(self.count, self.mean)
        return np.where(count > 0, 1.0 / np.sqrt(self.m2 / np.maximum(count, 1.0) + epsilon), 1.0)

    def same_as(self, other: Moments) -> bool:
        """Whether every number is equal."""
        return all(
            np.array_equal(a, b) for a, b in ((self.count, other.count), (self.mean, other.mean), (self.m2, other.m2))
        )

    def state_dict(self) -> dict[str, Floats]:
        """Exact copy."""
        return {"count": self.count.copy(), "mean": self.mean.copy(), "m2": self.m2.copy()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], shape: tuple[int, ...]) -> Moments:
        """Build it again.

        Raises:
            ArgumentError: The state is of values of another shape.
        """
        new = cls._made(*(np.array(state[key], np.float64) for key in ("count", "mean", "m2")))
        if new.count.ndim != 1 or not new.mean.shape == new.m2.shape == (len(new.count), *shape):
            raise ArgumentError(f"expected moments of values of shape {shape}, got {new.mean.shape[1:]}")
        return new


def _column(group_values: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Reshape (G,) so that it broadcasts against (G, *shape)."""
    return group_values.reshape(-1, *[1] * (like.ndim - 1))
