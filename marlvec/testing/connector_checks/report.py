"""The format in which checks of connectors report faults, and their tolerances for numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree, membership
from marlvec.spaces.equality import Difference, difference, short

__all__ = ["learnt", "outsider", "summed", "BatchReport", "Key", "Refused", "Report", "keys_of"]

_ULPS = 64.0  # rounding of a sum taken in another order
_LEARNT = 1e-6  # rounding of learnt statistics


def summed(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (…,) bool, whether numbers differ by no more than the rounding of a sum in another order."""
    return _within(expected, got, _ULPS * float(np.finfo(expected.dtype).eps), 0.0)


def learnt(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (…,) bool, whether numbers differ by no more than the rounding of statistics learnt in another order."""
    return _within(expected, got, _LEARNT, 1.0)


def _within(expected: NDArray[Any], got: NDArray[Any], tolerance: float, least: float) -> NDArray[np.bool_]:
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=least))
    close: NDArray[np.bool_] = np.isclose(got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return close


def outsider(space: Space[Any], tree: Any, n: int, *, exact: bool = True) -> Difference | None:
    """Return the first value of a column of n rows outside its space.

    `exact`: each leaf must have the space's dtype; else a lossless conversion is enough.
    """
    spaces = SpaceTree(space)
    try:
        values = spaces.flatten(tree)
    except ContractError as error:
        return Difference("", (), "the structure of the space", str(error))
    return next(
        (found for leaf, v in zip(spaces.leaves, values, strict=True) if (found := _in(leaf, v, n, exact))), None
    )


def _in(leaf: Leaf, value: Any, n: int, exact: bool) -> Difference | None:
    if not isinstance(value, np.ndarray):
        return Difference(leaf.path, (), "an array", f"{type(value).__name__} {short(value)}")
    if value.shape != (n, *leaf.shape):
        return Difference(leaf.path, (), f"shape {(n, *leaf.shape)}", str(value.shape))
    if value.dtype != leaf.dtype and (exact or not _fits(value, leaf.dtype)):
        return Difference(leaf.path, (), f"dtype {leaf.dtype}", str(value.dtype))
    members, everywhere = membership(leaf, in_buffer=False), np.ones((n, 1), np.bool_)
    if members is None or (good := members.rows(value[:, None], everywhere)).all():
        return None
    row = int(np.argmin(good))
    return Difference(leaf.path, (row,), *members.refuse(value[row, ...]))


def _fits(value: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    return np.can_cast(value.dtype, dtype, "same_kind") and bool(
        (value.astype(dtype) == value).all() or dtype.kind == "f"
    )


Key = tuple[int, int]
"""(env, agent)"""


class Refused(Exception):
    """The connector rejects this space with the documented error, `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Report:
    """Reports faults of one connector on one input, which `on` describes."""

    def __init__(self, connector: str, on: str) -> None:
        self.connector, self.on = connector, on
        self.check = "setup"

    def broken(self, subject: str, expected: str, got: str, hint: str = "") -> NoReturn:
        """Raise the `ContractError` of a fault."""
        what = f"{subject}: expected {expected}, got {got}" + (f"; {hint}" if hint else "")
        raise ContractError(f"{self.connector}, check {self.check!r}, on {self.on}: {what}")

    @contextmanager
    def asking(self, subject: str, *, may_refuse: bool = False) -> Iterator[None]:
        """Turn any error of the connector into a `ContractError` that names the call.

        `may_refuse`: it may reject the space here.
        """
        try:
            yield
        except Exception as error:
            if may_refuse and isinstance(error, (ArgumentError, UnsupportedSpaceError)):
                raise Refused(error) from error
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            hint = "what it cannot take it refuses in output_space() or policy_space(); columns={name: space} adds some"
            try:
                self.broken(subject, "no error", f"{type(error).__name__}: {error}{notes}", hint)
            except ContractError as broken:
                raise broken from error

    def same(self, expected: Any, got: Any, subject: str, hint: str = "") -> None:
        """Raise if two values differ in any bit."""
        if differs := difference(expected, got):
            self.broken(f"{subject}, {differs}", differs.expected, differs.got, hint)

    def same_learnt(self, expected: Any, got: Any, subject: str, hint: str = "") -> None:
        """Raise if two merged states differ by more than a millionth, whatever their number types."""
        if differs := difference(expected, got, close=learnt, typed=False):
            self.broken(f"{subject}, {differs}", differs.expected, differs.got, hint)

    def compare(
        self, expected: Rows, got: Rows, moment: int, condition: str, hint: str = "", *, near: bool = False
    ) -> None:
        """Raise if rows differ from the expected ones, which may be more, in any order.

        `condition` must make no difference, e.g. ``"in any order"``; `near`: floats may differ in their last digits.
        """
        places = {key: i for i, key in enumerate(keys_of(expected))}
        if more := [key for key in keys_of(got) if key not in places]:
            self.broken(f"moment {moment}, (env, agent) {more[0]}", f"no row {condition}", "one", hint)
        expected = expected.take(np.array([places[key] for key in keys_of(got)], np.int64))
        if differs := difference(expected, got, close=summed if near else None):
            where = place(differs, got)
            self.broken(f"moment {moment}, {where}", f"{differs.expected} {condition}", differs.got, hint)


class BatchReport(Report):
    """A `Report` of finished batches, whose rows are compared in order; a moment is a batch."""

    def compare(
        self, expected: Rows, got: Rows, moment: int, condition: str, hint: str = "", *, near: bool = False
    ) -> None:
        if differs := difference(expected, got, close=summed if near else None):
            row = f", row {differs.at[0]}" if differs.at else ""
            where = f"column {differs.path!r}{row}" if differs.path else "the columns"
            self.broken(f"batch {moment}, {condition}, {where}", differs.expected, differs.got, hint)


def keys_of(rows: Rows) -> list[Key]:
    """Return (env, agent) of each row."""
    return list(zip(rows.env_id.tolist(), rows.agent_index.tolist(), strict=True))


def place(differs: Difference, rows: Rows) -> str:
    """Name the place of a difference between rows."""
    if not differs.path:
        return "the columns"
    if not differs.at:
        return f"column {differs.path!r}"
    env, agent = keys_of(rows)[differs.at[0]]
    inner = differs.at[1:]
    return f"column {differs.path!r} of env {env}, agent {agent}" + (f", index {inner}" if inner else "")
