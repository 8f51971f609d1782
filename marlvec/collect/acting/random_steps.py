"""`RandomSteps`: random actions in the first steps of a run; `RowDraws`: draws that belong to a row."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from marlvec.collect.acting.policy_runner import PolicyRunner
from marlvec.collect.storage.moment import Moment
from marlvec.connectors._support.row_random import RowRandom
from marlvec.connectors.rows import Rows
from marlvec.sampling import SpaceSampler
from marlvec.serialization.saved import Saved, SavedField
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree

__all__ = ["RandomSteps", "RowDraws"]

IntArray = NDArray[np.int64]


class RandomSteps(Saved):
    """Gives agents random actions in place of their policies', in the first ``steps`` env steps, shared over the envs.

    No policy was asked for these actions, see `GivenActions`. Each draw belongs to a row, whatever batch that is in.
    """

    saved_as = "random steps"
    saved_fields: ClassVar = {"left": SavedField("_left_N"), "seed": SavedField("_seed")}

    def __init__(self, steps: int, num_envs: int, agents: tuple[str, ...], seed: int) -> None:
        self._left_N = np.full(num_envs, steps // num_envs)
        self._left_N[: steps % num_envs] += 1
        self._agents, self._seed = agents, seed
        self.is_over = not steps  # whether no env has such a step to come

    def note(self, runner: PolicyRunner, ready: Moment) -> None:
        """Draw for those of a policy's ready rows that have such a step to make, and for which nothing is noted yet."""
        num_agents = len(self._agents)
        mine = (self._left_N[ready.lanes // num_agents] > 0) & ~runner.off_policy.among(ready.lanes)
        if not mine.any():
            return
        ready = ready.take(mine)
        rows = ready.rows
        sampler = SpaceSampler(SpaceTree(runner.action_connectors.policy_space_))

        def where(i: int) -> str:
            env, agent = divmod(int(ready.lanes[i]), num_agents)
            return f"env {env}: agent {self._agents[agent]!r}"

        draws = cast(np.random.Generator, RowDraws(self._seed, "warm-up", rows))
        actions = sampler.sample(draws, len(rows), rows.get("action_mask"), where)
        for i, lane in enumerate(ready.lanes.tolist()):
            runner.off_policy.note(lane, map_tree(itemgetter(i), actions), where(i))

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add whether a step is to come."""
        return {**values, "is_over": not (values["_left_N"] > 0).any()}

    def count(self, env_ids: IntArray) -> None:
        """These envs have made a step."""
        self._left_N[env_ids] -= 1
        self.is_over = not (self._left_N > 0).any()


AnyArray = NDArray[Any]


class RowDraws:
    """Random draws for n rows; each depends on the seed, the stream's name and its row only: see `RowRandom`.

    Has the methods of `numpy.random.Generator` that `SpaceSampler` uses, for arrays whose first axis is the row axis. A
    number without a row, such as the seed of a space with its own ``sample``, is drawn for the first row.
    """

    def __init__(self, seed: int, stream: str, rows: Rows) -> None:
        self._seed, self._stream, self._rows = seed, stream, rows
        self._calls = 0

    def random(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw uniformly from [0, 1)."""
        return self._source().uniform(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_normal(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw from a normal distribution with mean 0 and variance 1."""
        return self._source().normal(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_exponential(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw from an exponential distribution with scale 1."""
        drawn: NDArray[np.float64] = -np.log1p(-self.random(size))
        return drawn

    def integers(
        self,
        low: ArrayLike,
        high: ArrayLike | None = None,
        size: int | tuple[int, ...] | None = None,
        dtype: DTypeLike = np.int64,
        endpoint: bool = False,
    ) -> AnyArray:
        """Draw integers from ``low`` to below ``high``, or from 0 to below ``low``."""
        begin, end = (np.asarray(0), np.asarray(low)) if high is None else (np.asarray(low), np.asarray(high))
        n = len(self._rows)
        shape = (n,) if size is None else (size,) if isinstance(size, int) else size
        # In floats, since a 64-bit range overflows its own type; the lowest bits of the widest range are not random.
        width = end.astype(np.float64) - begin + (1.0 if endpoint else 0.0)
        drawn = np.floor(self.random(shape) * width) + begin
        if np.dtype(dtype).itemsize == 8:
            drawn = np.minimum(drawn, np.nextafter(end.astype(np.float64) + (1.0 if endpoint else 0.0), -np.inf))
        numbers: AnyArray = drawn.astype(dtype)
        return numbers[0] if size is None and end.ndim == 0 else numbers

    def _source(self) -> RowRandom:
        self._calls += 1
        return RowRandom(self._seed, f"{self._stream}/{self._calls}")
