"""`EnvSnapshot`: observations, flags and masks of some envs at one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import AgentGroup
from marlvec.vector.vector_step import VectorStep

__all__ = ["EnvSnapshot", "scatter"]


@dataclass(frozen=True)
class EnvSnapshot:
    """Arrays with one row per env; never written to, so that callers may keep them."""

    obs: list[list[NDArray[Any]]]  # for each group and leaf: (n, A_g, …)
    acting: NDArray[np.bool_]  # (n, A)
    masks: list[NDArray[np.bool_] | None]  # for each group: (n, A_g, k), or None
    state: NDArray[Any] | None  # (n, …)

    @classmethod
    def of(cls, result: VectorStep) -> EnvSnapshot:
        return cls(result.obs_leaves, result.acting, result.action_masks, result.state)

    def picked(self, ids: NDArray[np.int64]) -> EnvSnapshot:
        return EnvSnapshot(
            [[leaf[ids] for leaf in leaves] for leaves in self.obs],
            self.acting[ids],
            [None if mask is None else mask[ids] for mask in self.masks],
            None if self.state is None else self.state[ids],
        )

    def updated(self, ids: NDArray[np.int64], other: EnvSnapshot) -> EnvSnapshot:
        """Return a copy with ``other`` in these rows; a missing mask counts as all True."""
        if len(ids) == len(self.acting) and np.array_equal(ids, np.arange(len(ids))):
            return other

        def put(whole: NDArray[Any], part: NDArray[Any]) -> NDArray[Any]:
            whole = whole.copy()
            whole[ids] = part
            return whole

        def put_mask(whole: NDArray[np.bool_] | None, part: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
            if whole is not None:
                return put(whole, np.ones((len(ids), *whole.shape[1:]), np.bool_) if part is None else part)
            return None if part is None else put(np.ones((len(self.acting), *part.shape[1:]), np.bool_), part)

        return EnvSnapshot(
            _paired(put, self.obs, other.obs),
            put(self.acting, other.acting),
            [put_mask(*pair) for pair in zip(self.masks, other.masks, strict=True)],
            None if self.state is None or other.state is None else put(self.state, other.state),
        )

    def at_ends(
        self, result: VectorStep, before: EnvSnapshot, groups: Sequence[AgentGroup], *, same_step: bool
    ) -> EnvSnapshot:
        """Return this snapshot, with final observations (and no acting agents) in rows whose episode ended.

        ``before`` has the final observations of lost episodes. In same-step mode ended rows are already the next
        episode's.
        """
        if not result.done.any():
            return self
        obs, state = self.obs, self.state
        sources = []
        if same_step:
            # As in the other modes, agents that ended earlier have zeros.
            here = [result.ended[:, group.agents] for group in groups]
            final = [
                [np.where(who.reshape(*who.shape, *[1] * (leaf.ndim - 2)), leaf, leaf.dtype.type()) for leaf in leaves]
                for who, leaves in zip(here, result.final_leaves, strict=True)
            ]
            sources.append((result.done, final, result.final_state))
        if result.fault.any():
            sources.append((result.fault, before.obs, before.state))
        for rows, last, last_state in sources:
            obs = _paired(_taking(rows), obs, last)
            state = state if state is None or last_state is None else _taking(rows)(state, last_state)
        ends = result.done[:, None]
        masks = [None if mask is None else mask | ends[:, :, None] for mask in self.masks]
        return replace(self, obs=obs, state=state, acting=self.acting & ~ends, masks=masks)


def scatter(ids: NDArray[np.int64], part: NDArray[Any], row_num: int) -> NDArray[Any]:
    """Return ``row_num`` rows of zeros, with ``part`` in the rows ``ids``."""
    whole = np.zeros((row_num, *part.shape[1:]), part.dtype)
    whole[ids] = part
    return whole


def _paired(
    function: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
    some: list[list[NDArray[Any]]],
    others: list[list[NDArray[Any]]],
) -> list[list[NDArray[Any]]]:
    return [[function(*pair) for pair in zip(*leaves, strict=True)] for leaves in zip(some, others, strict=True)]


def _taking(rows: NDArray[np.bool_]) -> Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]:
    """Return a function that takes these rows from its second argument."""
    return lambda one, other: np.where(rows.reshape(-1, *[1] * (one.ndim - 1)), other, one)
