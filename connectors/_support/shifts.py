"""Relative row positions, such as -2 or "-3:0", that `AddView` and its like take."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from marlvec.errors import ArgumentError

__all__ = ["Shift", "parse_shifts"]

Shift = int | str | Sequence[int]
"""One shift, several, or a range ``"a:b"`` or ``"a:b:step"`` with both ends in it."""

_RANGE = re.compile(r"(-?[0-9]{1,9}):(-?[0-9]{1,9})(?::([0-9]{1,9}))?")
_MOST = 100_000  # more rows are surely a mistake, and would fill the memory


def parse_shifts(spec: Shift) -> tuple[int, ...]:
    """List the shifts of a spec, in ascending order: the oldest row first.

    0 is the row itself, -1 the agent's row before it, 1 the row after it. ``"-3:-1"`` is -3, -2, -1 and ``"0:4:2"`` is
    0, 2, 4: both ends belong to a range, as in RLlib's view requirements.
    """
    if isinstance(spec, str):
        return _parse_range(spec)
    if isinstance(spec, Sequence) and not isinstance(spec, bytes):
        shifts = tuple(sorted(_integer(item, spec) for item in spec))
        if not shifts:
            raise ArgumentError(f"expected at least one shift, got {spec!r}")
        if len(set(shifts)) < len(shifts):
            raise ArgumentError(f"expected different shifts, got {spec!r}")
        return shifts
    return (_integer(spec, spec),)


def _parse_range(spec: str) -> tuple[int, ...]:
    found = _RANGE.fullmatch(spec)
    if found is None:
        raise _bad(spec)
    start, stop, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if start > stop or step == 0:
        raise ArgumentError(f'expected "a:b" or "a:b:step" with a <= b and a step above 0, got {spec!r}')
    shifts = range(start, stop + 1, step)
    if len(shifts) > _MOST:
        raise ArgumentError(f"expected at most {_MOST} shifts, got {len(shifts)} in {spec!r}")
    return tuple(shifts)


def _integer(item: object, spec: object) -> int:
    try:
        # A bool is an index to Python, but True as a shift is a mistake.
        if not isinstance(item, bool):
            return operator.index(item)  # type: ignore[arg-type]  # what has no index is what is caught here
    except TypeError:
        pass
    raise _bad(spec)


def _bad(spec: object) -> ArgumentError:
    return ArgumentError(f'a shift is an int, a list of ints, "a:b" or "a:b:step" (both ends included), got {spec!r}')
