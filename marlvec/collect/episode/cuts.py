"""Positions of the rows of one episode, agent or sequence in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError
from marlvec.trees import Tree

__all__ = ["check_size", "episodes", "fragments", "ids", "moments"]

IntArray = NDArray[np.int64]
Columns = Mapping[str, Tree]


def check_size(name: str, value: Any) -> int:
    """Return a number of rows, which must be a whole number above 0, as an int."""
    size = whole_number(value)
    if size is None or size < 1:
        raise ArgumentError(f"{name} must be a whole number of at least 1, got {value!r}")
    return size


def ids(columns: Columns, name: str, why: str) -> NDArray[Any]:
    """Return a column (n,) of one number a row; ``why``, for messages, is the call that needs it."""
    if name not in columns:
        raise ArgumentError(f"{why} needs a column {name!r}; the columns are {list(columns)}")
    shape = getattr(columns[name], "shape", None)
    if shape is None or len(shape) != 1:
        got = "a tree" if shape is None else f"shape {tuple(shape)}"
        raise ArgumentError(f"{why} needs one {name!r} a row, got {got}; of sequences (B, T, …), call unpad() first")
    return np.asarray(columns[name])


def fragments(columns: Columns, n: int) -> list[tuple[int, int]]:
    """Return (first row, end) of each fragment: consecutive decisions of one agent in one episode."""
    unroll = ids(columns, "unroll_id", "splitting by fragment")
    begins = np.ones(n, np.bool_)
    begins[1:] = unroll[1:] != unroll[:-1]
    # Concatenated batches, of two collectors or one batch twice, may have neighbours of equal unroll_id.
    for name in ("eps_id", "env_id", "agent_index"):
        if name in columns:
            values = ids(columns, name, "splitting by fragment")
            begins[1:] |= values[1:] != values[:-1]
    if "t" in columns:
        t = ids(columns, "t", "splitting by fragment")
        begins[1:] |= t[1:] <= t[:-1]
    return list(pairwise([*np.flatnonzero(begins).tolist(), n])) if n else []


def episodes(columns: Columns) -> list[IntArray]:
    """Return the positions of each episode's rows, ascending; episodes in order of first appearance.

    An ``eps_id`` with rows of two envs, or a decision twice, belongs to several episodes and is refused.
    """
    eps = ids(columns, "eps_id", "splitting by episode")
    _check_unique(columns, eps)
    _, first, number = np.unique(eps, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # an episode's rank by first appearance
    return _groups(rank[number], len(first))


def moments(batches: Mapping[str, Columns], k: int, by: str) -> list[tuple[int, dict[str, IntArray]]]:
    """Cut the rows of all policies into chunks of k moments, ascending; a moment is one value of (``eps_id``, ``by``).

    Returns each chunk's number of moments, and the positions of its rows by policy.
    """
    if not batches:
        return []
    keys = []
    for name, columns in batches.items():
        why = f"timeslices() of policy {name!r}"
        keys.append((ids(columns, by, why), ids(columns, "eps_id", why)))
    time, eps = (np.concatenate(parts) for parts in zip(*keys, strict=True))
    order = np.lexsort((time, eps))
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (time[order][1:] != time[order][:-1]) | (eps[order][1:] != eps[order][:-1])
    moment = np.empty(len(order), np.int64)
    moment[order] = np.cumsum(is_new) - 1
    total = int(is_new.sum())
    count = -(-total // k)
    per_policy = np.split(moment // k, np.cumsum([len(own) for own, _ in keys])[:-1])
    groups = {name: _groups(own, count) for name, own in zip(batches, per_policy, strict=True)}
    return [
        (min(k, total - i * k), {name: own[i] for name, own in groups.items() if len(own[i])}) for i in range(count)
    ]


def _groups(number_n: IntArray, count: int) -> list[IntArray]:
    """Return the positions of each of the numbers 0 … count - 1, ascending."""
    order = np.argsort(number_n, kind="stable")
    bounds = np.searchsorted(number_n[order], np.arange(count + 1))
    return [order[start:stop] for start, stop in pairwise(bounds.tolist())]


def _check_unique(columns: Columns, eps: NDArray[Any]) -> None:
    why = "splitting by episode"
    true = ~ids(columns, "phantom", why).astype(np.bool_) if "phantom" in columns else np.ones(len(eps), np.bool_)
    if "env_id" in columns:
        env = ids(columns, "env_id", why)
        order = np.lexsort((env, eps))
        torn = (eps[order][1:] == eps[order][:-1]) & (env[order][1:] != env[order][:-1])
        if torn.any():
            where = order[np.flatnonzero(torn)[0]]
            raise ArgumentError(f"eps_id {eps[where]} has rows of several envs; {_TWO_SOURCES}")
    if "t" in columns and "agent_index" in columns:
        t, agent, own = (ids(columns, name, why)[true] for name in ("t", "agent_index", "eps_id"))
        order = np.lexsort((t, agent, own))
        keys = np.stack([own[order], agent[order], t[order]])
        if (twice := np.flatnonzero((keys[:, 1:] == keys[:, :-1]).all(0))).size:
            e, a, moment = keys[:, twice[0]].tolist()
            raise ArgumentError(f"eps_id {e} has decision t={moment} of agent {a} more than once; {_TWO_SOURCES}")


_TWO_SOURCES = (
    "where batches of several collectors were concatenated, split each before, or give each its own range of eps_id"
)
