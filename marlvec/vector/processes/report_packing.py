"""Packs a worker's report for the pipe, so that an error names the value that cannot be pickled."""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from marlvec.envs.spec import COMMON
from marlvec.errors import ContractError, Failure, SerialisationError
from marlvec.vector.data.pickling import dump_each, load_each
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture, pack_failures, pickle_or_explain, unpack_failures

__all__ = ["MAX_BYTES", "pack_report", "unpack_report"]

MAX_BYTES = 64 * 2**20
"""Maximum size of one env's pickled infos in one call, in bytes. Checked only for infos sent to the parent."""
_INFO, _ANSWER = "the info", "the answer"
_OPERATIONS = {_INFO: "infos", _ANSWER: "call"}


def pack_report(report: Report, first: int) -> bytes:
    """Pickle a report. Infos and answers that cannot be pickled, or are too large, become failures of their env.

    Plain data is pickled in one piece. Objects whose unpickling runs code other than Python's or numpy's may raise in
    the parent, so they are pickled one by one. ``first`` is the global index of the worker's first env.
    """
    tables = (report.infos, report.final_infos, report.answers)
    failures = report.failures
    file = io.BytesIO()
    try:
        _PlainPickler(file, protocol=5).dump((*tables, pack_failures(failures), report.warnings))
        data = file.getvalue()
    except Exception:  # some data are not plain, or cannot be pickled: find these, keep the rest
        for table, what in zip(tables, (_INFO, _INFO, _ANSWER), strict=True):
            failures = failures + _seal_each(table, what, first)
        data = pickle.dumps((*tables, pack_failures(failures), report.warnings), protocol=5)
    if len(data) > MAX_BYTES and (large := _drop_large(report, first)):
        data = pickle.dumps((*tables, pack_failures(failures + large), report.warnings), protocol=5)
    return data


class _PlainPickler(pickle.Pickler):
    """Pickles data that any process can unpickle, and raises at other objects."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse objects that are not Python's or numpy's; called for all but builtin numbers, texts, containers."""
        kind = obj if isinstance(obj, (type, FunctionType, BuiltinFunctionType)) else type(obj)
        if str(kind.__module__).partition(".")[0] in ("builtins", "numpy"):
            return NotImplemented
        raise TypeError(f"{kind.__qualname__} is not plain")


def _drop_large(report: Report, first: int) -> list[Failure]:
    """Remove infos of envs that exceed `MAX_BYTES`, and return failures for them. Answers may have any size."""
    failures = []
    tables = (report.infos, report.final_infos)
    for i in sorted(report.infos.keys() | report.final_infos.keys()):
        size = sum(len(pickle.dumps(table[i], protocol=5)) for table in tables if i in table)
        if size > MAX_BYTES:
            for table in tables:
                table.pop(i, None)
            problem = f"its infos take {size:,} bytes, pickled; expected at most {MAX_BYTES:,} in one call"
            failures.append(capture(first + i, "infos", ContractError(problem)))
    return failures


class _Sealed(NamedTuple):
    """The info of an env with the agents of its parts, or an answer (``agents`` is None), pickled by `dump_each`."""

    agents: tuple[Any, ...] | None
    data: bytes


def _seal(value: Any, what: str, env_id: int) -> _Sealed:
    is_info = what == _INFO
    try:
        return _Sealed(tuple(value) if is_info else None, dump_each(list(value.values()) if is_info else [value]))
    except Exception:
        pickle_or_explain(value, f"{what} of env {env_id}", coming_back=True)  # raises with the reason
        raise


def _seal_each(table: dict[int, Any], what: str, first: int) -> list[Failure]:
    failures = []
    for i, value in list(table.items()):
        try:
            table[i] = _seal(value, what, first + i)
        except Exception as error:
            del table[i]
            failures.append(capture(first + i, _OPERATIONS[what], error))
    return failures


def unpack_report(payload: bytes, first: int) -> Report:
    """Rebuild a report in the parent, with global env indices. A part that cannot be unpickled becomes a failure."""
    infos, final_infos, answers, failures, warnings = pickle.loads(payload)
    report = Report(failures=unpack_failures(failures), warnings=warnings)
    failed = {failure.env_id for failure in report.failures}
    parts = ((infos, report.infos, _INFO), (final_infos, report.final_infos, _INFO), (answers, report.answers, _ANSWER))
    for source, target, what in parts:
        for i, value in source.items():
            try:
                target[first + i] = _open(value, what) if isinstance(value, _Sealed) else value
            except SerialisationError as error:
                if first + i not in failed:
                    failed.add(first + i)
                    report.failures.append(capture(first + i, _OPERATIONS[what], error))
    return report


def _open(sealed: _Sealed, what: str) -> Any:
    if sealed.agents is None:
        (answer,) = load_each(sealed.data, [what])
        return answer
    names = [what if agent == COMMON else f"{what} of agent {agent!r}" for agent in sealed.agents]
    return dict(zip(sealed.agents, load_each(sealed.data, names), strict=True))
