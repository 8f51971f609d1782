"""Converts one dict of arrays for all envs to infos per row, R = N * A: one dict for each (env, agent)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import COMMON, Info
from marlvec.vector.data.infos import AGENTS, RESERVED, infos_from_list, infos_to_list
from marlvec.vector.vector_step import VectorStep

__all__ = ["InfoEntry", "lay_out_infos", "pick_rows", "read_entries", "merged", "split_infos"]

_OURS = {key for name in RESERVED - {AGENTS, COMMON} for key in (name, "_" + name)}  # keys that marlvec adds
_ROW = "row"  # placeholder for the agent of a row


@dataclass(frozen=True, slots=True)
class InfoEntry:
    """One key of the infos."""

    level: str  # `AGENTS`, or `COMMON` if the value is the env's, repeated per agent
    key: str
    values: Any  # (R, …), or a dict of arrays with masks for nested dicts
    present: NDArray[np.bool_]  # (R,), the rows that have a value

    def at(self, row: int) -> Any:
        """Return the value in one row, with its type."""
        return _at(self.values, row)


def read_entries(infos: Mapping[str, Any], agent_num: int) -> list[InfoEntry]:
    """Return the entries of a `VectorEnv`'s infos, without keys that marlvec adds."""
    if infos.keys() <= _OURS:
        return []
    found = [(key, infos[key], infos["_" + key]) for key in infos if not key.startswith("_") and key not in RESERVED]
    for level in (AGENTS, COMMON):
        found += [(key, values, mask) for key, (values, mask) in infos.get(level, {}).items()]
    return [_entry(key, values, mask, agent_num) for key, values, mask in found]


def lay_out_infos(entries: Iterable[InfoEntry], taken: Collection[str]) -> dict[str, Any]:
    """Return entries in Gymnasium's form: ``{key: values, _key: present}``.

    Entries whose key is ``taken`` by the view, or by an earlier entry, are in ``"__agents__"`` or ``"__common__"``.
    """
    out: dict[str, Any] = {}
    aside: dict[str, dict[str, Any]] = {}
    for entry in entries:
        names = (entry.key, "_" + entry.key)
        if any(name in out or name.removeprefix("_") in taken or name in (AGENTS, COMMON) for name in names):
            aside.setdefault(entry.level, {})[entry.key] = (entry.values, entry.present)
        else:
            out |= zip(names, (entry.values, entry.present), strict=True)
    return out | aside


def pick_rows(sources: Mapping[int, Sequence[InfoEntry]], row_num: int) -> list[InfoEntry]:
    """Return entries of these rows only, each from its own source."""
    picked: list[dict[str, dict[str, Any]]] = [{} for _ in range(row_num)]
    for row, entries in sources.items():
        for entry in entries:
            if entry.present[row]:
                who = _ROW if entry.level == AGENTS else COMMON
                picked[row].setdefault(who, {})[entry.key] = entry.at(row)
    return read_entries(infos_from_list(picked, (_ROW,)), 1)


def _entry(key: str, values: Any, mask: NDArray[np.bool_], agent_num: int) -> InfoEntry:
    def repeat(array: NDArray[Any]) -> NDArray[Any]:
        return array.repeat(agent_num, axis=0)

    def join(array: NDArray[Any]) -> NDArray[Any]:
        return array.reshape(len(array) * agent_num, *array.shape[2:])

    level, spread = (COMMON, repeat) if mask.ndim == 1 else (AGENTS, join)
    return InfoEntry(level, key, _map(values, spread), spread(mask))


def _map(values: Any, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Any:
    if isinstance(values, dict):
        return {key: _map(part, function) for key, part in values.items()}
    return function(values)


def _at(values: Any, row: int) -> Any:
    if isinstance(values, dict):
        return {
            key: _at(part, row) for key, part in values.items() if not key.startswith("_") and values["_" + key][row]
        }
    return values[row]


def merged(own: Mapping[str, Any], common: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one agent's info with the env's and a view's: the view's wins, then the agent's.

    Values that lose are in ``"__common__"`` and ``"__agents__"``.
    """
    if not own and not common:
        return dict(ours)
    out = {**common, **own, **ours}
    if clash := {key: value for key, value in common.items() if key in own or key in ours}:
        out[COMMON] = clash
    if aside := {key: value for key, value in own.items() if key in ours}:
        out[AGENTS] = aside
    return out


def split_infos(result: VectorStep, agents: Sequence[str]) -> tuple[list[Info], list[Info]]:
    """Return infos of a step, and of the reset after it (empty without one), by env and agent or ``"__common__"``."""
    infos = result.infos
    now = infos_to_list(infos, agents, len(result))
    first: list[Info] = [{} for _ in now]
    if result.done.any():
        last = infos_to_list(infos.get("final_info", {}), agents, len(result))
        for i in np.flatnonzero(result.done).tolist():
            now[i], first[i] = last[i], now[i]
    return now, first
