"""What a call leaves behind apart from numbers in the buffers, and its way from a worker to the parent."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from marlvec.envs.spec import Info
from marlvec.errors import ContractError, Failure
from marlvec.vector.columns import Columns
from marlvec.vector.faults import capture, pack_failure, picklable, unpack_failure

__all__ = ["MAX_BYTES", "Report", "pack_report", "unpack_report"]

MAX_BYTES = 64 * 2**20
"""Bytes that the infos of one env in one call may take, pickled. Only what crosses to the parent is measured."""


@dataclass(slots=True)
class Report:
    """What one call leaves behind apart from numbers in the buffers.

    Attributes:
        infos: Non-empty infos by env index; after a same-step autoreset those of the reset.
        final_infos: Infos of the last step of episodes that a same-step autoreset ended.
        failures: What went wrong, at most one per env.
        answers: What control commands returned.
        faults: Envs that lost their episode, and to what; only in the parent, see `marlvec.vector.recovery`.
        columns: Infos that came as arrays, see `marlvec.vector.columns`; None but from a pool.
        final_columns: Likewise, as ``final_infos``.
    """

    infos: dict[int, Info] = field(default_factory=dict)
    final_infos: dict[int, Info] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    answers: dict[int, Any] = field(default_factory=dict)
    faults: dict[int, Failure] = field(default_factory=dict)
    columns: Columns | None = None
    final_columns: Columns | None = None

    def __bool__(self) -> bool:
        told = self.infos or self.final_infos or self.failures or self.answers or self.faults
        return bool(told) or self.columns is not None

    def update(self, other: Report) -> None:
        """Take in another shard's report."""
        self.infos.update(other.infos)
        self.final_infos.update(other.final_infos)
        self.failures.extend(other.failures)
        self.answers.update(other.answers)
        self.faults.update(other.faults)
        if other.columns is not None:
            self.columns, self.final_columns = other.columns, other.final_columns

    def shifted(self, first: int) -> Report:
        """The same with global env indices, ``first`` being that of local env 0; failures have them already."""
        if not first:
            return self
        tables = (self.infos, self.final_infos, self.answers)
        infos, final_infos, answers = ({first + i: found for i, found in table.items()} for table in tables)
        return Report(infos, final_infos, self.failures, answers)


def pack_report(report: Report, first: int) -> bytes:
    """Pickle a report. Infos and answers that cannot be pickled, or are too large, become failures of their env.

    Args:
        report: With local env indices.
        first: Global index of the worker's first env, for messages.
    """
    tables = (report.infos, report.final_infos, report.answers)
    failures = [pack_failure(failure) for failure in report.failures]
    try:
        data = pickle.dumps((*tables, failures), protocol=5)
    except Exception:  # something is local, or refuses: find the culprits, keep the rest
        for table, what in zip(tables, ("the info", "the info", "the answer"), strict=True):
            failures += _pickle_each(table, what, first)
        data = pickle.dumps((*tables, failures), protocol=5)
    if len(data) > MAX_BYTES and (large := _drop_large(report, first)):
        data = pickle.dumps((*tables, failures + large), protocol=5)
    return data


def _drop_large(report: Report, first: int) -> list[Any]:
    """Take out the infos of envs that have too much of them; answers are what the caller asked for."""
    failures = []
    tables = (report.infos, report.final_infos)
    for i in sorted(report.infos.keys() | report.final_infos.keys()):
        size = sum(len(pickle.dumps(table[i], protocol=5)) for table in tables if i in table)
        if size > MAX_BYTES:
            for table in tables:
                table.pop(i, None)
            problem = f"its infos take {size:,} bytes, pickled; expected at most {MAX_BYTES:,} in one call"
            failures.append(pack_failure(capture(first + i, "infos", ContractError(problem))))
    return failures


def _pickle_each(table: dict[int, Any], what: str, first: int) -> list[Any]:
    failures = []
    for i, value in list(table.items()):
        try:
            table[i] = _Pickled(picklable(value, f"{what} of env {first + i}", coming_back=True))
        except Exception as error:
            del table[i]
            failures.append(pack_failure(capture(first + i, "infos" if what == "the info" else "call", error)))
    return failures


class _Pickled:
    """A value that only cloudpickle could pickle; unpickles to itself."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self.data,)


def unpack_report(payload: bytes, first: int) -> Report:
    """Rebuild a report in the parent, with global env indices.

    Args:
        payload: What `pack_report` gave.
        first: Global index of the worker's first env.
    """
    infos, final_infos, answers, failures = pickle.loads(payload)
    return Report(
        infos={first + i: info for i, info in infos.items()},
        final_infos={first + i: info for i, info in final_infos.items()},
        failures=[unpack_failure(packed) for packed in failures],
        answers={first + i: answer for i, answer in answers.items()},
    )
