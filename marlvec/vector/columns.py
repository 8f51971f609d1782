"""Infos that come as arrays over all envs, and never are dicts per env: what a pool tells with every step.

Axis letters: N envs, n rows of one reply, A agents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.vector.buffers import Selection
from marlvec.vector.infos import AGENTS, is_plain

__all__ = ["OF_AGENTS", "Columns", "Cut", "Path", "fill_in"]

OF_AGENTS = "\0agents"
"""First part of a `Path` whose column has an agent axis."""

Path = tuple[str, ...]
"""Keys from the outside in; one, where dicts are not nested."""

Cut = Mapping[Path, tuple[NDArray[Any], NDArray[np.bool_]]]
"""Columns and their masks, of the rows of one result."""


class Columns:
    """A table with a row for each env.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._values: dict[Path, NDArray[Any]] = {}
        self._given: dict[Path, NDArray[np.bool_]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def write(self, rows: Selection, columns: Mapping[Path, NDArray[Any]]) -> None:
        """Take in what these envs say, and forget what they said before.

        Args:
            rows: The envs.
            columns: Path → (n, …).
        """
        for path, given in self._given.items():
            if path not in columns:
                given[rows] = False
        for path, column in columns.items():
            held = self._values.get(path)
            if held is None or held.dtype != column.dtype or held.shape[1:] != column.shape[1:]:
                held = self._make(path, column)
            held[rows] = column
            self._given[path][rows] = True

    def forget(self, rows: Selection) -> None:
        """These envs say nothing now."""
        for given in self._given.values():
            given[rows] = False

    def read(self, rows: Selection) -> dict[Path, NDArray[Any]]:
        """Copies of what these envs say now."""
        return {path: np.array(values[rows]) for path, values in self._values.items() if self._given[path][rows].any()}

    def cut(self, cut: Callable[[NDArray[Any]], NDArray[Any]]) -> Cut:
        """The rows of a result, all columns of them.

        Args:
            cut: Takes its rows of an array.
        """
        found = {path: (cut(values), cut(self._given[path])) for path, values in self._values.items()}
        return {path: pair for path, pair in found.items() if np.count_nonzero(pair[1])}

    def _make(self, path: Path, column: NDArray[Any]) -> NDArray[Any]:
        if path in self._values:  # of another shape or dtype than before: what is there was somebody else's
            self._given[path][:] = False
        blank = None if column.dtype == np.object_ else 0
        self._values[path] = np.full((self._num_envs, *column.shape[1:]), blank, column.dtype)
        self._given.setdefault(path, np.zeros(self._num_envs, np.bool_))
        return self._values[path]


def fill_in(infos: dict[str, Any], columns: Cut, agent_num: int) -> None:
    """Put columns into infos, where `marlvec.vector.infos` says that they belong.

    Args:
        infos: Filled in place.
        columns: What `Columns.cut` gave.
        agent_num: A.
    """
    both = {path[1] for path in columns if path[0] == OF_AGENTS} & {path[0] for path in columns}
    for path, (values, given) in columns.items():
        if path[0] == OF_AGENTS:
            _put(infos, path[1:], values, np.repeat(given[:, None], agent_num, axis=1), AGENTS, ())
        else:
            _put(infos, path, values, given, "__common__", both)


def _put(
    infos: dict[str, Any],
    path: Path,
    values: NDArray[Any],
    given: NDArray[np.bool_],
    level: str,
    taken: Iterable[str],
) -> None:
    key, *rest = path
    if rest:
        inner: dict[str, Any] = {}
        found = infos.get(key)
        if isinstance(found, dict) and is_plain(key) and key not in taken:
            inner = found
        _put(inner, tuple(rest), values, given, level, ())
        value: Any = inner
    else:
        value = values
    if is_plain(key) and key not in taken:
        infos[key], infos["_" + key] = value, given
    else:
        infos.setdefault(level, {})[key] = (value, given)
