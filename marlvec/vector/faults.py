"""What becomes of an exception inside an env: caught where it happens, carried as data, raised once in the caller."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle

from marlvec.errors import (
    ArgumentError,
    ContractError,
    EnvArgumentError,
    EnvContractError,
    EnvRaised,
    Failure,
    MissingExtraError,
    RemoteCause,
    ResourceError,
    SerialisationError,
    UnsupportedSpaceError,
)
from marlvec.vector.culprit import find_culprit

__all__ = [
    "PackedFailure",
    "cannot_unpickle",
    "capture",
    "describe_exit",
    "out_of_space",
    "pack_failure",
    "picklable",
    "raise_failures",
    "summary_of",
    "unpack_failure",
]

_MAX_TEXT = 64 * 1024
_MAX_PICKLE = 1024 * 1024
_MAX_LISTED = 20  # failures of one call that a message lists

# These say all there is to say by themselves; wrapping them would only bury the message.
_SPEAKS_FOR_ITSELF = (MissingExtraError, ResourceError, SerialisationError, UnsupportedSpaceError)


def capture(env_id: int, operation: str, error: BaseException) -> Failure:
    """Note an exception that is being handled."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(env_id, operation, summary_of(error), _shorten(text), error)


def out_of_space(env_id: int, operation: str, problem: str) -> Failure:
    """Note that an env returned something that does not lie in its space."""
    return Failure(env_id, operation, problem, "", ContractError(problem))


def summary_of(error: BaseException) -> str:
    """The type and text of an exception, one line."""
    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises is still an exception
        text = f"(its __str__ raised {type(broken).__name__})"
    lines = text.splitlines() or [""]
    first = lines[0] if len(lines[0]) <= 500 else lines[0][:500] + "…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - _MAX_TEXT} characters left out …\n{text[-half:]}"


PackedFailure = tuple[int, str, str, str, bytes | None]


def pack_failure(failure: Failure) -> PackedFailure:
    """Make a failure fit to cross to the parent.

    The exception goes as its class, args and attributes and not by its own pickling: that would call the class with
    ``args``, which fails for every exception whose constructor wants something else. Only Python's own go by theirs:
    they keep attributes (``errno``, ``filename``) outside their ``__dict__``.
    """
    error = failure.exception
    state = {k: v for k, v in vars(error).items() if k != "__notes__"}
    try:
        if type(error).__module__ == "builtins" and not state:
            pickled = cloudpickle.dumps(error)
        else:
            pickled = cloudpickle.dumps((type(error), error.args, state))
        pickle.loads(pickled)
    except BaseException:  # whatever it holds (a lock, a socket) cannot cross; the text does
        pickled = None
    if pickled is not None and len(pickled) > _MAX_PICKLE:
        pickled = None
    return failure.env_id, failure.operation, failure.summary, failure.traceback, pickled


def unpack_failure(packed: PackedFailure) -> Failure:
    """Rebuild a failure in the parent, its exception too where that can be."""
    env_id, operation, summary, text, pickled = packed
    error: BaseException = RemoteCause(summary)
    if pickled is not None:
        try:
            loaded = pickle.loads(pickled)
            error = loaded if isinstance(loaded, BaseException) else _rebuild(*loaded)
        except KeyboardInterrupt:
            raise
        except BaseException:  # e.g. its class lives in a module that this process cannot import
            error = RemoteCause(summary)
    return Failure(env_id, operation, summary, text, error)


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(state)
    return error


def raise_failures(failures: Sequence[Failure], where: str, result: Any = None, *, can_go_on: bool = True) -> None:
    """Raise one error that lists every failure; do nothing if there are none.

    Args:
        failures: In any order.
        where: How to name the place, e.g. ``"worker processes"``; goes into the text.
        result: Rows of the envs that did not fail.
        can_go_on: Whether a reset helps.
    """
    if not failures:
        return
    ordered = tuple(sorted(failures, key=lambda failure: failure.env_id))
    first = ordered[0]
    cause = first.exception
    building = first.operation == "__init__"
    if isinstance(cause, _SPEAKS_FOR_ITSELF) or (building and isinstance(cause, ArgumentError)):
        raise type(cause)(f"env {first.env_id}, {first.operation}(): {cause}") from None
    if isinstance(cause, ContractError):  # its text says where and what; the traceback is ours
        lines = [
            f"env {f.env_id}, {f.operation}(): {f.exception if isinstance(f.exception, ContractError) else f.summary}"
            for f in ordered[:_MAX_LISTED]
        ]
        raise EnvContractError(_shorten(_listing(lines, len(ordered))), ordered, result) from cause
    lines = [f"env {f.env_id} raised in {f.operation}(): {f.summary}" for f in ordered[:_MAX_LISTED]]
    head = _listing(lines, len(ordered))
    whose = f"{where} {first.pid}, request {first.request}" if first.pid is not None else where
    text = f"{head}\n\n--- where it happened (env {first.env_id}, {whose}) ---\n{first.traceback}"
    if building:
        kind = EnvArgumentError if isinstance(cause, TypeError) else EnvRaised
        raise kind(text, ordered) from cause
    if first.operation in ("step", "reset") and can_go_on:
        text += "\nThese envs have no running episode now: reset() them (all, or env_ids=…) to go on, or close()."
    raise EnvRaised(text, ordered, result) from cause


def _listing(lines: Sequence[str], total: int) -> str:
    more = [f"… and {total - len(lines)} envs more"] if total > len(lines) else []
    return "\n".join([*lines, *more])


def describe_exit(exitcode: int | None) -> str:
    """Say in words how a process ended."""
    if exitcode is None:
        return "ended without telling how"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "unknown"
    hint = " (possibly the kernel's out-of-memory killer)" if name == "SIGKILL" else ""
    return f"was killed by signal {-exitcode} ({name}){hint}"


def picklable(value: Any, what: str, *, coming_back: bool = False) -> bytes:
    """Pickle by value what a worker must get, or what comes back from it.

    Raises:
        SerialisationError: It cannot be pickled; says what and why.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        way = "come back from its worker process" if coming_back else "reach a worker process"
        advice = "Give back plain data" if coming_back else "Create such objects inside the factory"
        culprit = find_culprit(value)
        at = f" (its {culprit})" if culprit else ""
        raise SerialisationError(
            f"{what} cannot be pickled, so it cannot {way}: {summary_of(error)}{at}. {advice} instead, or use "
            f"backend='sync'."
        ) from error
    return data


def cannot_unpickle(what: str, error: BaseException, *, where: str) -> SerialisationError:
    """The error that tells of something that came through a pipe and could not be rebuilt."""
    return SerialisationError(
        f"{where} cannot unpickle {what}: {summary_of(error)}. Take plain data (numbers, text, arrays), or a class "
        f"that can be imported and rebuilt there; or use backend='sync', which pickles nothing."
    )
