"""Which robots of a warehouse go forward, where several want to: as rware decides it with networkx.

Each robot is an arrow from its place to the one it wants, its own if it stays. Arrows that hang together are settled
together: robots in a ring of three or more all go, two that would change places do not, and none goes where one stays.
Where a line of robots ends before a free place, they all go; where two lines come together, the longer one. Of equally
long ones the first goes in the order in which networkx passes through the places. That is the order in which they came
into the graph; but where fewer than half of all places hang together, that of a Python set of ``(column, row)``, whose
order comes from their hashes, and is the same in every run. So the set is played out here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import kernel

__all__ = ["FORWARD", "Traffic", "commit", "make_traffic"]

FORWARD = 1

_FREE = -1
_PROBES = np.uint64(9)  # of CPython's sets: entries beside the first that are looked at, before another jump
_SHIFT = np.uint64(5)
_SMALLEST = 8  # of their tables

Whole = NDArray[np.int64]


class Traffic(NamedTuple):
    """What A robots want, and what becomes of it.

    Attributes:
        start, target: (A,) int64, places.
        committed: (A,) bool, who goes, or stays as it wants to.
        ahead: (A,) int64, who is at the target, -1: no robot.
        depth: (A,) int64, length of the longest line behind each.
        end: (A,) int64, the free place at the end of the line, -1: there is none.
        nodes: (2 * A,) int64, all places, in the order in which they come into the graph.
        reached: (2 * A,) int64, those that hang together, by search.
        seen: (2 * A,) bool, whether they were reached.
        table, spare: tables of a set: places, or -1.
    """

    start: Whole
    target: Whole
    committed: NDArray[np.bool_]
    ahead: Whole
    depth: Whole
    end: Whole
    nodes: Whole
    reached: Whole
    seen: NDArray[np.bool_]
    table: Whole
    spare: Whole


@kernel
def make_traffic(a_num: int) -> Traffic:
    """Room for so many robots."""
    size = _SMALLEST
    while size <= 4 * (2 * a_num + 1):
        size *= 2
    return Traffic(
        np.empty(a_num, np.int64),
        np.empty(a_num, np.int64),
        np.empty(a_num, np.bool_),
        np.empty(a_num, np.int64),
        np.empty(a_num, np.int64),
        np.empty(a_num, np.int64),
        np.empty(2 * a_num, np.int64),
        np.empty(2 * a_num, np.int64),
        np.empty(2 * a_num, np.bool_),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )


@kernel
def commit(t: Traffic, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """Decide who goes.

    Args:
        t: Starts and targets; the rest is written.
        robots: Which robot is at each place, counted from 1; 0: none.
        hashes: Python's hash of each place.
    """
    a_num = len(t.start)
    crowded = False
    for a in range(a_num):
        t.ahead[a] = robots[t.target[a]] - 1
        t.committed[a] = t.ahead[a] == a
        t.depth[a] = 0
        crowded |= t.ahead[a] != a
    if not crowded:  # all stay
        return
    for a in range(a_num):
        t.end[a] = _follow(t, a)
    for a in range(a_num):
        if t.end[a] == _FREE:
            continue
        is_first = True  # of those whose lines end there
        for b in range(a):
            is_first &= t.end[b] != t.end[a]
        if is_first:
            _commit_line(t, t.end[a], robots, hashes)


@kernel
def _follow(t: Traffic, a: int) -> Any:
    """The free place at the end of robot ``a``'s line, or -1; if it is in a ring of three or more, it goes."""
    b, length = t.ahead[a], 1
    last = a
    while b >= 0 and b != last and b != a and length <= len(t.start):
        t.depth[b] = max(t.depth[b], length)
        last = b
        b = t.ahead[b]
        length += 1
    if b == a and length >= 3:
        t.committed[a] = True
    return t.target[last] if b < 0 else _FREE


@kernel
def _commit_line(t: Traffic, end: int, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """The longest line to a free place goes, from its head on."""
    place = end
    ordered = False
    while True:
        best, tied = -1, False
        for b in range(len(t.start)):
            if t.target[b] != place or t.start[b] == place:
                continue
            if best < 0 or t.depth[b] > t.depth[best]:
                best, tied = b, False
            elif t.depth[b] == t.depth[best]:
                tied = True
        if best < 0:
            return
        if tied:
            if not ordered:
                _order(t, end, robots, hashes)
                ordered = True
            best = _first(t, place, t.depth[best])
        t.committed[best] = True
        place = t.start[best]


@kernel
def _first(t: Traffic, place: int, depth: int) -> int:
    """Who of those that want to go there, and have the longest lines behind them, comes first in ``nodes``."""
    for k in range(len(t.nodes)):
        for b in range(len(t.start)):
            if t.start[b] == t.nodes[k] and t.target[b] == place and t.depth[b] == depth:
                return b
    return -1


@kernel
def _order(t: Traffic, end: int, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """Write into ``nodes`` the places in the order in which networkx passes through those that lead to ``end``."""
    a_num = len(t.start)
    count, members = 0, 1
    for a in range(a_num):
        members += t.end[a] == end
        for place in (t.start[a], t.target[a]):
            is_new = True
            for k in range(count):
                is_new &= t.nodes[k] != place
            if is_new:
                t.nodes[count] = place
                count += 1
    t.nodes[count:] = _FREE
    if 2 * members >= count:
        return
    # The search that finds them puts them into one set, and the view of the graph into a second one.
    _search(t, end, count, members, robots)
    mask = _fill(t.table, t.spare, t.reached[:members], hashes)
    found = 0
    for k in range(int(mask) + 1):
        if t.table[k] >= 0:
            t.reached[found] = t.table[k]
            found += 1
    mask = _fill(t.table, t.spare, t.reached[:members], hashes)
    found = 0
    for k in range(int(mask) + 1):
        if t.table[k] >= 0:
            t.nodes[found] = t.table[k]
            found += 1
    t.nodes[found:] = _FREE


@kernel
def _search(t: Traffic, end: int, count: int, members: int, robots: Whole) -> None:
    """Breadth first from the first place that leads to ``end``: of each, first its robot's target, then who comes."""
    for k in range(count):
        t.seen[k] = False
    for k in range(count):
        a = robots[t.nodes[k]] - 1
        if t.nodes[k] == end or (a >= 0 and t.end[a] == end):
            t.reached[0] = t.nodes[k]
            t.seen[k] = True
            break
    found = 1
    for k in range(members):
        a = robots[t.reached[k]] - 1
        if a >= 0:
            found = _reach(t, t.target[a], found)
        for b in range(len(t.start)):
            if t.target[b] == t.reached[k]:
                found = _reach(t, t.start[b], found)


@kernel
def _reach(t: Traffic, place: int, found: int) -> int:
    for k in range(len(t.nodes)):
        if t.nodes[k] == place:
            if not t.seen[k]:
                t.seen[k] = True
                t.reached[found] = place
                return found + 1
            break
    return found


@kernel
def _fill(table: Whole, spare: Whole, places: Whole, hashes: NDArray[np.uint64]) -> Any:
    """Put places into an empty set of CPython's, one by one; returns the mask of its table."""
    mask = np.uint64(_SMALLEST - 1)
    table[: int(mask) + 1] = -1
    for k in range(len(places)):
        _put(table, mask, places[k], hashes)
        if (k + 1) * 5 < int(mask) * 3:
            continue
        size = _SMALLEST  # it is full: into a larger one, in the order in which they stand
        while size <= 4 * (k + 1):
            size *= 2
        before = int(mask) + 1
        spare[:before] = table[:before]
        mask = np.uint64(size - 1)
        table[:size] = -1
        for j in range(before):
            if spare[j] >= 0:
                _put(table, mask, spare[j], hashes)
    return mask


@kernel
def _put(table: Whole, mask: np.uint64, place: int, hashes: NDArray[np.uint64]) -> None:
    """Into the first entry that is empty, as CPython looks for one."""
    perturb = hashes[place]
    k = perturb & mask
    while True:
        last = k + _PROBES if k + _PROBES <= mask else k
        for entry in range(k, last + np.uint64(1)):
            if table[entry] < 0:
                table[entry] = place
                return
        perturb >>= _SHIFT
        k = (k * np.uint64(5) + np.uint64(1) + perturb) & mask
