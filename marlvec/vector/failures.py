"""Errors of envs and workers: captured where they occur, sent across processes, raised once in the caller.

Values are pickled one by one, so that an error names the value that fails; classes and functions are pickled by value.
"""

from __future__ import annotations

import io
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from marlvec.errors import (
    ArgumentError,
    ContractError,
    EnvArgumentError,
    EnvContractError,
    EnvFault,
    EnvRaised,
    EnvTimeout,
    Failure,
    MissingExtraError,
    RemoteCause,
    ResourceError,
    SerialisationError,
    UnknownEnvError,
    UnsupportedSpaceError,
    WorkerDied,
    rebuild_error,
)
from marlvec.extras import describe_package

_MAX_TEXT = 64 * 1024
_MAX_PICKLE = 1024 * 1024
_CALLERS = ("marlvec.vector.", "marlvec.envs.")
_MAX_LISTED = 20  # failures of one call that a message lists
_SPEAKS_FOR_ITSELF = (MissingExtraError, ResourceError, SerialisationError, UnknownEnvError, UnsupportedSpaceError)


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - _MAX_TEXT} characters left out …\n{text[-half:]}"


def capture(env_id: int, operation: str, error: BaseException) -> Failure:
    """Return the `Failure` for an exception that is being handled."""
    text = "".join(traceback.format_exception(type(error), error, _from_the_env_on(error.__traceback__)))
    if operation == "__init__" and (note := describe_package(error)):
        text += f"\n{note}\n"
    return Failure(env_id, operation, summary_of(error), _shorten(text), error)


def _from_the_env_on(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the env's code; all of it if it has none."""
    found = trace
    while found is not None and found.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
        found = found.tb_next
    return trace if found is None else found


def out_of_space(env_id: int, operation: str, problem: str) -> Failure:
    """Return the `Failure` for an env that returned a value outside its space."""
    return Failure(env_id, operation, problem, "", ContractError(problem))


def pack_failures(failures: Iterable[Failure]) -> bytes:
    """Pickle failures for the parent process, with exceptions as class, args and attributes."""
    # An exception's own pickling would call the class with `args`, which fails if the constructor takes other
    # arguments. Only Python's builtin exceptions use it: they keep attributes (errno, filename) outside their __dict__.
    return pickle.dumps([(f.env_id, f.operation, f.summary, f.traceback, _pack(f.exception)) for f in failures])


def _pack(error: BaseException) -> bytes | None:
    state = {k: v for k, v in vars(error).items() if k != "__notes__"}
    try:
        if type(error).__module__ == "builtins" and not state:
            pickled = cloudpickle.dumps(error)
        else:
            pickled = cloudpickle.dumps((type(error), error.args, state))
        pickle.loads(pickled)
    except BaseException:  # it holds an object (a lock, a socket) that cannot be pickled; its text is sent
        return None
    return pickled if len(pickled) <= _MAX_PICKLE else None


def unpack_failures(data: bytes) -> list[Failure]:
    """Rebuild failures in the parent, with their exceptions if possible."""
    return [
        Failure(env_id, operation, summary, text, _unpack(pickled, summary))
        for env_id, operation, summary, text, pickled in pickle.loads(data)
    ]


def _unpack(pickled: bytes | None, summary: str) -> BaseException:
    if pickled is None:
        return RemoteCause(summary)
    try:
        loaded = pickle.loads(pickled)
        return loaded if isinstance(loaded, BaseException) else rebuild_error(*loaded)
    except KeyboardInterrupt:
        raise
    except BaseException:  # e.g. its class lives in a module that this process cannot import
        return RemoteCause(summary)


def raise_failures(
    failures: Sequence[Failure],
    where: str,
    result: Any = None,
    *,
    can_go_on: bool = True,
    starts: Sequence[int] = (),
) -> None:
    """Raise one error that lists every failure, if there is one; ``where`` is e.g. ``"worker process"``.

    `result`: rows of the envs that did not fail. `starts`: first env of each worker, while workers build their envs.
    """
    if not failures:
        return
    ordered = tuple(sorted(failures, key=lambda failure: failure.env_id))
    first = ordered[0]
    cause = first.exception
    building = first.operation == "__init__"
    if isinstance(cause, _SPEAKS_FOR_ITSELF) or (building and isinstance(cause, ArgumentError)):
        raise type(cause)(f"env {first.env_id}, {first.operation}(): {cause}") from None
    listed = ordered[:_MAX_LISTED]
    names = [f"env {failure.env_id}" for failure in listed]
    total = len(ordered)
    if _fails_everywhere(ordered, starts):
        # A worker stops building at its first failure.
        listed, names, total = (first,), [f"all envs (the first of each of {total} workers was tried)"], 1
    if isinstance(cause, ContractError):  # its text is complete; the traceback shows marlvec's code only
        lines = [
            f"{name}, {f.operation}(): {f.exception if isinstance(f.exception, ContractError) else f.summary}"
            for name, f in zip(names, listed, strict=True)
        ]
        raise EnvContractError(_shorten(_listing(lines, total)), ordered, result) from cause
    lines = [f"{name} raised in {f.operation}(): {f.summary}" for name, f in zip(names, listed, strict=True)]
    head = _listing(lines, total)
    whose = f"{where} {first.pid}, request {first.request}" if first.pid is not None else where
    text = f"{head}\n\n--- where it happened (env {first.env_id}, {whose}) ---\n{first.traceback}"
    if building:
        kind = EnvArgumentError if isinstance(cause, TypeError) else EnvRaised
        raise kind(text, ordered) from cause
    if first.operation in ("step", "reset") and can_go_on:
        text += "\nThese envs have no running episode now: reset() them (all, or env_ids=…) to continue, or close()."
    raise EnvRaised(text, ordered, result) from cause


def _fails_everywhere(ordered: Sequence[Failure], starts: Sequence[int]) -> bool:
    """Return whether each of several workers failed to build its first env, all for the same reason."""
    env_ids = [failure.env_id for failure in ordered]
    return len(env_ids) > 1 and env_ids == list(starts) and len({failure.summary for failure in ordered}) == 1


def _listing(lines: Sequence[str], total: int) -> str:
    more = [f"… and {total - len(lines)} envs more"] if total > len(lines) else []
    return "\n".join([*lines, *more])


def describe_exit(exitcode: int | None) -> str:
    """Describe in words how a process ended."""
    if exitcode is None:
        return "ended in an unknown way"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "unknown"
    hint = " (possibly the kernel's out-of-memory killer)" if name == "SIGKILL" else ""
    return f"was killed by signal {-exitcode} ({name}){hint}"


def pickle_or_explain(value: Any, what: str, *, coming_back: bool = False) -> bytes:
    """Pickle by value an object for a worker or its parent; `SerialisationError` names a part that fails."""
    try:
        return dump_by_value([value])
    except Exception as error:
        way = "be returned from its worker process" if coming_back else "be sent to a worker process"
        advice = "Return plain data" if coming_back else "Create such objects inside the factory"
        culprit = find_unpicklable(value)
        at = f" (its {culprit})" if culprit else ""
        raise SerialisationError(
            f"{what} cannot be pickled, so it cannot {way}: {summary_of(error)}{at}. {advice} instead, or use "
            f"backend='sync'."
        ) from error


def find_unpicklable(value: Any) -> str:
    """Return the path to the innermost part that fails, ``"[2].keywords['config'].lock"``; empty: the value itself."""
    way, seen = "", set[int]()
    while id(value) not in seen:
        seen.add(id(value))
        for step, part in _parts(value):
            if not _can_be_pickled(part):
                way, value = way + step, part
                break
    return way


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each after its path from the value."""
    match value:
        case dict():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"[{k}]", part) for k, part in enumerate(value))
        case partial():
            yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
        case MethodType():
            yield ".__self__", value.__self__
        case FunctionType():
            yield from _parts_of_function(value)
        case _:
            own = getattr(value, "__dict__", {})
            yield from ((f".{name}", part) for name, part in own.items() if not name.startswith("__"))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's defaults, and variables of other scopes that it uses: they are pickled with it."""
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing was assigned to it yet
            yield f".__closure__[{name!r}]", cell.cell_contents
    for name in sorted(_names_in(function.__code__) & function.__globals__.keys()):
        yield f".__globals__[{name!r}]", function.__globals__[name]


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker."""

    worker: int
    pid: int
    exitcode: int | None  # None if unknown
    first: int  # its first env
    last: int  # its last env
    at_work_on: int | None  # env whose code ran
    call: str | None  # pending call
    request: int | None  # number of the unanswered request
    how: str | None  # why it was killed, if it did not end by itself
    timeout: float | None  # seconds, if it was killed because an env took longer
    report: str  # output of faulthandler
    building: bool = False

    @property
    def culprits(self) -> tuple[int, ...]:
        """The env that caused the exit, if known."""
        return () if self.at_work_on is None else (self.at_work_on,)

    @property
    def env_ids(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.last + 1))

    def __str__(self) -> str:
        envs = f"env {self.first}" if self.first == self.last else f"envs {self.first} to {self.last}"
        who = f"worker {self.worker} (pid {self.pid}, {envs})"
        number = f" (request {self.request})" if self.request is not None else ""
        when = f"during {self.call}(){number}" if self.call else "between calls"
        when = "while it built its envs" if self.building else when
        where = "" if self.at_work_on is None else f", at work on env {self.at_work_on}"
        if self.timeout is not None:
            culprit = "an env" if self.at_work_on is None else f"env {self.at_work_on}"
            return f"{culprit} did not come back within step_timeout={self.timeout:g} s {when}; {who} was killed"
        return f"{who} {self.how or describe_exit(self.exitcode)} {when}{where}"

    @property
    def reason(self) -> str:
        """The cause, without pids and request numbers, which differ each time."""
        if self.timeout is not None:
            return "hung" if self.at_work_on is None else f"env {self.at_work_on} hung"
        where = "" if self.at_work_on is None else f" at work on env {self.at_work_on}"
        return (self.how or describe_exit(self.exitcode)) + where

    def error(self, *, only_close_is_left: bool) -> EnvFault:
        return error_of([self], only_close_is_left=only_close_is_left)


def error_of(gone: Sequence[WorkerExit], *, only_close_is_left: bool) -> EnvFault:
    """Return one error for all workers that ended together."""
    advice = " Their episodes are lost" + ("; only close() is left." if only_close_is_left else ".")
    text = "\n".join(map(str, gone)) + "." + advice
    for one in gone:
        if one.report:
            what = "where it was" if one.timeout is not None else "its last words"
            text += f"\n\n--- {what} (worker {one.worker}) ---\n{one.report.rstrip()}"
    lost = tuple(i for one in gone for i in one.env_ids)
    first = gone[0]
    if first.timeout is not None:
        failures = tuple(
            Failure(i, first.call or "", str(first), first.report, TimeoutError(str(first))) for i in first.culprits
        )
        return EnvTimeout(text, failures, pid=first.pid, lost_env_ids=lost)
    return WorkerDied(text, pid=first.pid, exitcode=first.exitcode, lost_env_ids=lost)


class WorkerLost(Exception):
    """A worker died, and its envs with it. Internal: users see ``error``.

    `in_flight` are its envs that had not replied, `idle` the others, `culprits` those that caused the exit, if known.
    """

    def __init__(
        self,
        worker: int,
        error: EnvFault,
        in_flight: NDArray[np.int64],
        idle: NDArray[np.int64],
        worker_exit: WorkerExit,
    ) -> None:
        super().__init__(str(error))
        self.culprits, self.reason = worker_exit.culprits, worker_exit.reason
        self.worker, self.error = worker, error
        self.in_flight, self.idle = in_flight, idle

    @property
    def env_ids(self) -> NDArray[np.int64]:
        return np.sort(np.concatenate([self.in_flight, self.idle]))


_dumping = threading.RLock()  # cloudpickle has one set of modules to pickle by value for the whole process
_checked: tuple[tuple[str, ...], list[ModuleType]] = ((), [])


def dump_each(values: Sequence[Any], *, by_value: bool = False) -> bytes:
    """Pickle values one after the other; objects that they share are pickled once.

    `by_value`: the process that unpickles them cannot import the classes of this process's main module. Else only
    objects that cannot be pickled otherwise are pickled by value.
    """
    if by_value:
        return dump_by_value(values)
    try:
        return _dump(pickle.Pickler, values)
    except Exception:
        return _dump(cloudpickle.Pickler, values)


def _dump(kind: Any, values: Sequence[Any]) -> bytes:
    file = io.BytesIO()
    pickler = kind(file, protocol=5)
    for value in values:
        pickler.dump(value)
    return file.getvalue()


def dump_by_value(values: Sequence[Any]) -> bytes:
    """Pickle values one after the other, for processes that never ran this one's main module.

    Classes and functions are pickled by value, as those of ``__main__`` are, if their module

    * is ``__mp_main__``, the main module of a process that multiprocessing started;
    * is being imported right now: a worker that imports it would run it again, and make envs again;
    * cannot be found by name, or is another file there: pytest's ``importlib`` mode, a module loaded from a path.
    """
    with _by_value():
        return _dump(cloudpickle.Pickler, values)


def importing() -> set[str]:
    """Return the names of the modules that this thread is importing at this moment."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            spec = frame.f_globals.get("__spec__")
            if spec is not None and getattr(spec, "_initializing", False) and spec.name in sys.modules:
                names.add(spec.name)
        frame = frame.f_back
    return names


@contextmanager
def _by_value() -> Iterator[None]:
    with _dumping, ExitStack() as stack:
        for module in _not_to_be_imported():
            registered = cloudpickle.list_registry_pickle_by_value()  # by the user, or under a second name
            if module.__name__ not in registered and sys.modules.get(module.__name__) is module:
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _not_to_be_imported() -> list[ModuleType]:
    """Return the modules that workers must not, or cannot, import; searched again after further imports."""
    global _checked
    names = tuple(sys.modules)
    if names != _checked[0]:
        paths = set(sys.path)
        found = [
            module
            for module in list(sys.modules.values())
            if isinstance(file := getattr(module, "__file__", None), str)
            and file.endswith(".py")
            and (name := getattr(module, "__name__", "__main__")) != "__main__"
            and (name == "__mp_main__" or (_root_of(file, name) not in paths and not _can_be_found(module)))
        ]
        _checked = names, found
    if not (begun := importing()):
        return _checked[1]
    return _checked[1] + [sys.modules[name] for name in begun if getattr(sys.modules[name], "__file__", None)]


def _root_of(file: str, name: str) -> str:
    """Return the folder of sys.path in which a module of this file and name lies; empty if it cannot."""
    path = name.replace(".", "/")
    for end in (f"/{path}.py", f"/{path}/__init__.py"):
        if file.endswith(end):
            return file.removesuffix(end)
    return ""


def _can_be_found(module: ModuleType) -> bool:
    """Return whether an import of its name finds the file of this module."""
    parent = module.__name__.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module.__name__, path)
        except Exception:  # finders of other packages may raise anything
            continue
        if spec is not None:
            return not spec.origin or not spec.has_location or _is_same_file(spec.origin, str(module.__file__))
    return False


def _is_same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # gone since, or inside an archive
        return one == other


def load_each(data: bytes, names: Iterable[str], *, where: str = "this process") -> list[Any]:
    """Unpickle values from `dump_each`; `SerialisationError` has the value's name and ``where``, this process."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    values = []
    for name in names:
        try:
            values.append(unpickler.load())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user classes may raise anything
            raise cannot_unpickle(name, error, where=where) from error
    return values


def summary_of(error: BaseException) -> str:
    """Return the type and text of an exception in one line."""
    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises is still an exception
        text = f"(its __str__ raised {type(broken).__name__})"
    lines = text.splitlines() or [""]
    first = lines[0] if len(lines[0]) <= 500 else lines[0][:500] + "…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def cannot_unpickle(what: str, error: BaseException, *, where: str) -> SerialisationError:
    """Return the error for an object that was received through a pipe and cannot be unpickled."""
    return SerialisationError(
        f"{where} cannot unpickle {what}: {summary_of(error)}. Use plain data (numbers, text, arrays), or a class "
        f"that can be imported and unpickled there; or use backend='sync', which pickles nothing."
    )
