"""Infos as Gymnasium's dict of arrays with presence masks, and back to one dict per env, without loss.

`ShardReport` carries the results of a call that are not in the buffers: infos, answers, failures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.adapters.base import MAX_DEPTH
from marlvec.envs.spec import COMMON, Info
from marlvec.errors import Failure
from marlvec.vector.buffers import EnvSelection

AGENTS = "__agents__"
RESERVED = frozenset(
    {
        "alive",
        "acting",
        "action_mask",
        "state",
        "final_observation",
        "final_obs",
        "final_observation_missing",
        "final_info",
        "final_state",
        "reset_mask",
        "fault",
        COMMON,
        AGENTS,
    }
)
"""Keys at the top level that marlvec itself fills."""
Infos = dict[str, Any]


def infos_from_list(infos: Sequence[Info], agents: Sequence[str]) -> Infos:
    """Turn one dict per env into one dict of arrays.

    Args:
        infos: Per env ``{agent: {key: value}, "__common__": {key: value}}``; empty dicts may be left out.
        agents: Agent names, in order of the agent axis.

    Returns:
        The dict of arrays described at the head of `marlvec.vector.infos`.
    """
    return stack_infos(dict(enumerate(infos)), len(infos), agents)


def stack_infos(infos: Mapping[int, Info], num_envs: int, agents: Sequence[str]) -> Infos:
    """Like `infos_from_list`, from a dict without the envs that have no infos."""
    of_agents: dict[Any, dict[tuple[int, ...], Any]] = {}
    of_envs: dict[Any, dict[tuple[int, ...], Any]] = {}
    index = {name: a for a, name in enumerate(agents)}
    for i, info in infos.items():
        for who, entries in info.items():
            if who == COMMON:
                for key, value in entries.items():
                    of_envs.setdefault(key, {})[(i,)] = value
            else:
                a = index[who]
                for key, value in entries.items():
                    of_agents.setdefault(key, {})[i, a] = value
    out: Infos = {}
    both = of_agents.keys() & of_envs.keys()
    for space, found, shape in ((AGENTS, of_agents, (num_envs, len(agents))), (COMMON, of_envs, (num_envs,))):
        for key, values in found.items():
            array, mask = _stack(values, shape)
            if is_plain(key) and not (key in both and space == COMMON):
                out[key], out["_" + key] = array, mask
            else:
                out.setdefault(space, {})[key] = (array, mask)
    return out


def infos_to_list(infos: Mapping[str, Any], agents: Sequence[str], num_envs: int) -> list[Info]:
    """Turn a dict of arrays back into one dict per env; the inverse of `infos_from_list`.

    Scalars, and arrays without axes, become Python scalars. Entries that marlvec itself filled (`RESERVED`) are not
    infos of the env and are left out.

    Args:
        infos: Infos from ``reset`` or ``step``.
        agents: Agent names, in order of the agent axis.
        num_envs: N.

    Returns:
        Per env ``{agent: {key: value}, "__common__": {key: value}}``, without empty dicts.
    """
    out: list[Info] = [{} for _ in range(num_envs)]

    def put(key: Any, array: Any, mask: NDArray[np.bool_], level: str) -> None:
        for where in np.argwhere(mask).tolist():
            who = COMMON if level == COMMON else agents[where[1]]
            out[where[0]].setdefault(who, {})[key] = _unstack(array, tuple(where))

    for key, array in infos.items():
        if key in RESERVED or key.startswith("_"):
            continue
        mask = infos["_" + key]
        put(key, array, mask, COMMON if mask.ndim == 1 else AGENTS)
    for level in (AGENTS, COMMON):
        for key, (array, mask) in infos.get(level, {}).items():
            put(key, array, mask, level)
    return out


def is_plain(key: Any) -> bool:
    """Return whether an info of this key is allowed at the top level."""
    return isinstance(key, str) and bool(key) and not key.startswith("_") and key not in RESERVED


def _stack(
    values: Mapping[tuple[int, ...], Any], shape: tuple[int, ...], depth: int = MAX_DEPTH
) -> tuple[Any, NDArray[np.bool_]]:
    """Stack values by position into an array (or dict of arrays) of leading ``shape``; also return the mask."""
    mask = np.zeros(shape, np.bool_)
    for where in values:
        mask[where] = True
    if depth and all(isinstance(v, dict) and all(map(_is_nestable, v)) for v in values.values()):
        inner: dict[str, dict[tuple[int, ...], Any]] = {}
        for where, value in values.items():
            for key, item in value.items():
                inner.setdefault(key, {})[where] = item
        nested: dict[str, Any] = {}
        for key, items in inner.items():
            nested[key], nested["_" + key] = _stack(items, shape, depth - 1)
        return nested, mask
    array = _empty_like(values.values(), shape)
    for where, value in values.items():
        array[where] = value
    return array, mask


def _is_nestable(key: Any) -> bool:
    return isinstance(key, str) and bool(key) and not key.startswith("_")


def _empty_like(values: Collection[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an empty array of the narrowest dtype that holds all these values unchanged."""
    kinds = {type(value) for value in values}
    kind = kinds.pop()
    if not kinds:
        if kind is np.ndarray:
            forms = {(value.shape, value.dtype) for value in values}
            lead, dtype = forms.pop()
            # Arrays without axes are unstacked as scalars, which is lossless for numbers only.
            if not forms and not dtype.hasobject and (lead or dtype.kind in "biufc"):
                return np.zeros((*shape, *lead), dtype)
        elif kind is int:
            if all(-(2**63) <= value < 2**63 for value in values):
                return np.zeros(shape, np.int64)
        elif kind in (bool, float) or issubclass(kind, (np.bool_, np.number)):
            return np.zeros(shape, kind)
    return np.full(shape, None, object)


def _unstack(array: Any, where: tuple[int, ...]) -> Any:
    if isinstance(array, dict):
        return {
            key: _unstack(sub, where)
            for key, sub in array.items()
            if not key.startswith("_") and array["_" + key][where]
        }
    value = array[where]
    if isinstance(value, np.generic) and array.dtype != object:
        return value.item()
    return value.copy() if isinstance(value, np.ndarray) and array.dtype != object else value


OF_AGENTS = "\0agents"
"""First part of a `Path` whose column has an agent axis."""
Path = tuple[str, ...]
"""Keys from the outside in; a single key if dicts are not nested."""
ColumnRows = Mapping[Path, tuple[NDArray[Any], NDArray[np.bool_]]]
"""Columns and their masks, for the rows of one result."""


class InfoColumns:
    """A table of infos with a row for each env."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._values: dict[Path, NDArray[Any]] = {}
        self._given: dict[Path, NDArray[np.bool_]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def write(self, rows: EnvSelection, columns: Mapping[Path, NDArray[Any]]) -> None:
        """Write infos of these envs, path → (n, …), and forget their previous infos."""
        for path, given in self._given.items():
            if path not in columns:
                given[rows] = False
        for path, column in columns.items():
            held = self._values.get(path)
            if held is None or held.dtype != column.dtype or held.shape[1:] != column.shape[1:]:
                held = self._make(path, column)
            held[rows] = column
            self._given[path][rows] = True

    def forget(self, rows: EnvSelection) -> None:
        """Clear the infos of these envs."""
        for given in self._given.values():
            given[rows] = False

    def cut(self, cut: Callable[[NDArray[Any]], NDArray[Any]]) -> ColumnRows:
        """Return the rows of a result, for all columns; ``cut`` takes them from an array."""
        found = {path: (cut(values), cut(self._given[path])) for path, values in self._values.items()}
        return {path: pair for path, pair in found.items() if np.count_nonzero(pair[1])}

    def _make(self, path: Path, column: NDArray[Any]) -> NDArray[Any]:
        if path in self._values:  # shape or dtype has changed: older values are dropped
            self._given[path][:] = False
        blank = None if column.dtype == np.object_ else 0
        self._values[path] = np.full((self._num_envs, *column.shape[1:]), blank, column.dtype)
        self._given.setdefault(path, np.zeros(self._num_envs, np.bool_))
        return self._values[path]


def put_columns(infos: dict[str, Any], columns: ColumnRows, agent_num: int) -> None:
    """Put columns from `InfoColumns.cut` into infos, in the form of this file, in place."""
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


@dataclass(slots=True)
class ShardReport:
    """Results of one call that are not in the buffers; all tables are by env index."""

    # non-empty infos; after a same-step autoreset, those of the reset
    infos: dict[int, Info] = field(default_factory=dict)
    # of the last step of an episode, if a same-step autoreset followed
    final_infos: dict[int, Info] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)  # at most one per env
    answers: dict[int, Any] = field(default_factory=dict)  # of control commands
    warnings: list[str] = field(default_factory=list)  # texts of `ContractWarning` from worker processes
    faults: dict[int, Failure] = field(default_factory=dict)  # of envs that lost their episode; only in the parent
    columns: InfoColumns | None = None  # infos as arrays, only from a pool
    final_columns: InfoColumns | None = None

    def __bool__(self) -> bool:
        has_more = self.infos or self.final_infos or self.failures or self.answers or self.warnings or self.faults
        return bool(has_more) or self.columns is not None

    def update(self, other: ShardReport) -> None:
        """Add another shard's report."""
        self.infos.update(other.infos)
        self.final_infos.update(other.final_infos)
        self.failures.extend(other.failures)
        self.answers.update(other.answers)
        self.warnings.extend(other.warnings)
        self.faults.update(other.faults)
        if other.columns is not None:
            self.columns, self.final_columns = other.columns, other.final_columns

    def shifted(self, first: int) -> ShardReport:
        """Return this report with global env indices; local env 0 has ``first``. Failures have global ones already."""
        if not first:
            return self
        tables = (self.infos, self.final_infos, self.answers)
        infos, final_infos, answers = ({first + i: found for i, found in table.items()} for table in tables)
        return ShardReport(infos, final_infos, self.failures, answers, self.warnings)
