"""Decides which robots of a warehouse go forward, as rware does with networkx.

Each robot is an edge from its cell to its target (its own cell if it stays). Each connected component is resolved:
all robots of a ring of three or more go, two robots that would swap cells stay, and no robot enters an occupied cell.
A line of robots that ends at a free cell goes; if several lines end there, the longest. Among equally long lines, the
first in networkx's node order goes. This is the order of insertion into the graph, or, if the component has fewer than
half of all nodes, the order of a Python set of ``(column, row)``. A set's order depends on hashes, which are equal
in every run: `_fill` reproduces it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import kernel

__all__ = ["FORWARD", "Traffic", "commit", "make_traffic"]

FORWARD = 1

_FREE = -1
_PROBES = np.uint64(9)  # neighbouring entries that CPython's sets probe before they jump
_SHIFT = np.uint64(5)
_SMALLEST = 8  # size of a CPython set's smallest table

Whole = NDArray[np.int64]


class Traffic(NamedTuple):
    """Requested moves of A robots, which of them happen, and work arrays."""

    start: Whole  # cells, (A,)
    target: Whole
    committed: NDArray[np.bool_]  # (A,), whether the robot gets its request: it goes, or stays as requested
    ahead: Whole  # (A,), the robot in the target cell, -1: none
    depth: Whole  # (A,), length of the longest line behind the robot
    end: Whole  # (A,), the free cell at the end of the robot's line, -1: none
    nodes: Whole  # (2 * A,), the graph's nodes (cells), in order of insertion
    reached: Whole  # (2 * A,), nodes of one component, in order of the search
    seen: NDArray[np.bool_]  # (2 * A,), whether the search reached a node
    table: Whole  # hash tables of a set: cells, or -1
    spare: Whole


@kernel
def make_traffic(a_num: int) -> Traffic:
    """Allocate the arrays for ``a_num`` robots."""
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
    """Decide which robots go, from their starts and targets; ``robots`` are by cell, counted from 1; 0: none."""
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
        is_first = True  # of the robots whose lines end in this cell
        for b in range(a):
            is_first &= t.end[b] != t.end[a]
        if is_first:
            _commit_line(t, t.end[a], robots, hashes)


@kernel
def _follow(t: Traffic, a: int) -> Any:
    """Return the free cell at the end of robot ``a``'s line, or -1; in a ring of three or more, commit the robot."""
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
    """Commit the longest line that ends in this free cell, from its head on."""
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
    """Return the robot that is first in ``nodes``, among those with this target and a line of this depth."""
    for k in range(len(t.nodes)):
        for b in range(len(t.start)):
            if t.start[b] == t.nodes[k] and t.target[b] == place and t.depth[b] == depth:
                return b
    return -1


@kernel
def _order(t: Traffic, end: int, robots: Whole, hashes: NDArray[np.uint64]) -> None:
    """Write the nodes of ``end``'s component into ``nodes``, in networkx's order."""
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
    # networkx' search puts the nodes into one set, and its view of the graph into a second one.
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
    """Search breadth first from the first node that leads to ``end``; visit a robot's target before its followers."""
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
    """Insert cells into an empty table as CPython's set does; return the table's mask."""
    mask = np.uint64(_SMALLEST - 1)
    table[: int(mask) + 1] = -1
    for k in range(len(places)):
        _put(table, mask, places[k], hashes)
        if (k + 1) * 5 < int(mask) * 3:
            continue
        size = _SMALLEST  # full: move all entries, in table order, into a larger table
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
    """Insert a cell into the first empty entry of CPython's probe order."""
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
