"""What flat rows must look like in same-step mode, put together from what a plain loop over the raw envs gave."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.interop.row_views import Seen
from tests.vector.support.reference import Call, Frame, assert_same, assert_trees_equal, bare, flatten

__all__ = ["Expected", "check_rows", "rows_of", "words"]


def rows_of(array: NDArray[Any]) -> NDArray[Any]:
    """(N, A, …) to (N * A, …)."""
    return np.concatenate(list(array))


def words(infos: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Per row what its agent was told, and its env."""
    return [{**info.get("__common__", {}), **info.get(name, {})} for info in infos for name in names]


class Expected:
    """A frame of one group, as rows."""

    def __init__(self, frame: Frame, names: tuple[str, ...]) -> None:
        self.rewards = rows_of(frame.rewards)
        self.terminated, self.truncated, self.alive, self.acting = (
            rows_of(frame.flags[name]) for name in ("terminated", "truncated", "alive", "acting")
        )
        self.ended = self.terminated | self.truncated
        self.done = np.repeat(frame.done, len(names))
        self.obs = [rows_of(leaf).copy() for leaf in frame.obs[0]]
        for leaf in self.obs:
            leaf[self.ended & ~self.done] = 0
        self.final = [rows_of(leaf) for leaf in frame.final[0]]
        self.masks = None if frame.masks[0] is None else rows_of(frame.masks[0])
        now, last = words(frame.infos, names), words(frame.final_infos, names)
        # Where a new episode has begun, what was said of the old one stands apart.
        self.said = [last[row] if self.done[row] else now[row] for row in range(len(now))]
        self.begun = [now[row] if self.done[row] else {} for row in range(len(now))]


def check_rows(seen: Seen, calls: list[Call], names: tuple[str, ...]) -> int:
    """Make these calls through a view and compare every row; how many agents ended on the way."""
    ends, returns, lengths, alive = 0, np.zeros(seen.rows), np.zeros(seen.rows, int), np.zeros(seen.rows, bool)
    for number, call in enumerate(call for call in calls if call.env_ids is None):
        where, want = f"call {number}, {call.kind}", Expected(call.expected, names)
        if call.kind == "reset":
            obs, told = seen.reset(call.seed)
            returns[:], lengths[:] = 0, 0
            if told is not None:
                assert_trees_equal([bare_words(info) for info in told], words(call.expected.infos, names), where)
        else:
            got = seen.step(rows_of(call.actions[0]))
            obs = got.obs
            assert_same(got.rewards, want.rewards.astype(got.rewards.dtype), f"{where} rewards")
            for mine, theirs in ((got.terminated, want.terminated), (got.truncated, want.truncated)):
                if mine is not None:
                    assert mine.tolist() == theirs.tolist(), where
            assert got.ended.tolist() == want.ended.tolist(), where
            returns, lengths = returns + want.rewards, lengths + alive
            for row in np.flatnonzero(want.ended):
                ends += 1
                assert got.episode(row) == (returns[row], lengths[row]), where
                if got.final is not None:
                    for mine, leaf in zip(flatten(got.final(row)), want.final, strict=True):
                        assert_same(np.asarray(mine), leaf[row], f"{where} final of row {row}")
            returns[want.ended], lengths[want.ended] = 0, 0
            if got.said is not None:
                assert_trees_equal([bare_words(info) for info in got.said], want.said, f"{where} infos")
        for mine, leaf in zip(flatten(obs), want.obs, strict=True):
            assert_same(np.ascontiguousarray(mine), leaf, f"{where} obs")
        alive = want.alive
        if (flags := seen.flags()) is not None:
            for mine, theirs in zip(flags, (want.alive, want.acting), strict=True):
                assert mine is None or mine.tolist() == theirs.tolist(), where
        if (masks := seen.masks()) is not None and want.masks is not None:
            assert_same(masks, want.masks, f"{where} masks")
    return ends


OURS = {"alive", "acting", "action_mask", "TimeLimit.truncated", "terminal_observation", "episode"}


def bare_words(info: dict[str, Any]) -> dict[str, Any]:
    """A row's info without what views add."""
    return {key: bare(value) for key, value in info.items() if key not in OURS}
