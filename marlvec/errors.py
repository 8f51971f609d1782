"""Every error that marlvec raises, in one tree; in brackets, further base classes, for existing `except` clauses.

    MarlvecError
    ├── StateError (RuntimeError)     a call came at the wrong time
    │   ├── ClosedError (gymnasium.error.ClosedEnvironmentError)  ... after close()
    │   ├── BusyError (gymnasium.error.AlreadyPendingCallError)  ... while another call, `name`, was pending
    │   ├── NothingPendingError (gymnasium.error.NoAsyncCallError)  ... a fetch without a request
    │   ├── NotResetError (gymnasium.error.ResetNeeded)  ... a step of an env that has no running episode
    │   ├── EnvsDriven                ... after other code drove the envs that a collector collects from
    │   ├── EpisodesFull              ... no more episodes can run at a time
    │   ├── EpisodeOver               ... in an episode that has ended, or was lost
    │   │   └── EpisodeCut            ... because the collector's side has ended it
    │   └── BrokenError               ... after a worker died; only close() is left
    ├── ArgumentError (ValueError)    an argument is wrong; nothing was sent to any env
    │   └── ActionError               the actions have the wrong shape, dtype or structure
    ├── RegistryError (RuntimeError)
    │   ├── UnknownEnvError (LookupError, gymnasium.error.NameNotFound)
    │   └── AlreadyRegisteredError (ValueError)
    ├── SerialisationError (TypeError)  an object cannot be pickled for a worker, or written to a file
    ├── UnsupportedSpaceError (TypeError)
    ├── ContractError (ValueError)    an env, policy or connector broke its contract
    ├── FetchTimeout (TimeoutError, multiprocessing.TimeoutError)  time ran out; the request stays pending
    ├── AnswerTimeout (TimeoutError)  an external simulator waited too long for the collector
    ├── DriverGone (RuntimeError)     the thread or client that drove an external simulator has ended
    ├── CheckpointError (RuntimeError)  a file is missing, damaged, or has other contents
    ├── ProtocolError (ConnectionError)  a message from a socket violates the protocol
    ├── RefusedError (RuntimeError)   the other side of a socket refused a request; `code` is the reason
    ├── ConnectionLost (ConnectionError)  the other side of a socket is gone
    ├── EnvFault (RuntimeError)       an env or its worker failed
    │   ├── EnvRaised                 an env raised; `__cause__` is the original exception
    │   │   ├── EnvArgumentError (TypeError)  ... a TypeError, while it was being constructed
    │   │   └── EnvContractError (ContractError)  ... or returned a value that violates its contract
    │   ├── EnvTimeout (TimeoutError) an env did not return within step_timeout; its worker was killed
    │   └── WorkerDied                a worker process died
    ├── CollectorDied (RuntimeError)  a collector of marlvec.distributed died, and others do not replace it
    │   └── CollectorTimeout (TimeoutError)  ... because a request ran for too long
    ├── RemoteCause (RuntimeError)    replaces a worker's exception, as a cause, that could not be rebuilt here
    ├── ResourceError (OSError)       the machine lacks memory, processes or file descriptors
    └── MissingExtraError (ImportError, gymnasium.error.DependencyNotInstalled)  an optional library is not installed

    RestartQuietly (Exception)        for envs to raise: restart me, without a log entry

    ContractWarning (UserWarning)     a broken contract, with ``validate="warn"`` and similar options

Messages have the place, what was expected, what was found, and what to do.

This module imports Gymnasium. Code that must start fast without it, such as ``--help``, imports this module only when
it raises.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import gymnasium.error

__all__ = [
    "ActionError",
    "AnswerTimeout",
    "AlreadyRegisteredError",
    "ArgumentError",
    "BrokenError",
    "BusyError",
    "CheckpointError",
    "ClosedError",
    "CollectorDied",
    "CollectorTimeout",
    "ConnectionLost",
    "ContractError",
    "ContractWarning",
    "DriverGone",
    "EnvArgumentError",
    "EnvContractError",
    "EnvFault",
    "EnvRaised",
    "EnvTimeout",
    "EnvsDriven",
    "EpisodeCut",
    "EpisodeOver",
    "EpisodesFull",
    "Failure",
    "FetchTimeout",
    "MarlvecError",
    "MissingExtraError",
    "NotResetError",
    "NothingPendingError",
    "ProtocolError",
    "RefusedError",
    "RegistryError",
    "RemoteCause",
    "ResourceError",
    "RestartQuietly",
    "SerialisationError",
    "StateError",
    "UnknownEnvError",
    "UnsupportedSpaceError",
    "WorkerDied",
]


def rebuild_error(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild a pickled exception without its constructor, which may take other arguments than ``args``."""
    builtin: Any = kind  # the base with the memory layout: of two, OSError rather than RuntimeError
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error: BaseException = builtin.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


class MarlvecError(Exception):
    """Base class of every error that marlvec raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (type(self), self.args, vars(self))


class StateError(MarlvecError, RuntimeError):
    """A call came at the wrong time."""


class ClosedError(StateError, gymnasium.error.ClosedEnvironmentError):
    """The vectorizer was closed."""


class BusyError(StateError, gymnasium.error.AlreadyPendingCallError):
    """Another call is pending; fetch it first.

    Attributes:
        name: Name of the pending call, e.g. ``"step"``; empty if it is not a call of a vectorizer.
    """

    def __init__(self, message: str, name: str = "") -> None:
        RuntimeError.__init__(self, message)  # Gymnasium's __init__ requires a name
        self.name = name


class NothingPendingError(StateError, gymnasium.error.NoAsyncCallError):
    """There is no result to fetch.

    Attributes:
        name: Name of the call whose result was requested, e.g. ``"step"``; empty for any call.
    """

    def __init__(self, message: str, name: str = "") -> None:
        RuntimeError.__init__(self, message)  # Gymnasium's __init__ requires a name
        self.name = name


class NotResetError(StateError, gymnasium.error.ResetNeeded):
    """An env has no running episode: it was never reset, or its episode is over."""


class EnvsDriven(StateError):
    """Other code reset or stepped the envs that a collector collects from, or fetched their rows.

    The collector has lost track of its running episodes: `Collector.reset` begins new ones.
    """


class EpisodesFull(StateError):
    """All slots for external episodes are in use; an episode must end before another can begin."""


class EpisodeOver(StateError):
    """The episode has ended, or was lost; the text has the reason."""


class EpisodeCut(EpisodeOver):
    """The collector's side has ended the episode: it began new ones, time was up, or the client was silent."""


class BrokenError(StateError):
    """A worker died earlier; only ``close()`` can be called."""


class ArgumentError(MarlvecError, ValueError):
    """An argument is wrong. No request was sent to any env."""


class ActionError(ArgumentError):
    """Actions have the wrong structure, shape or dtype. No request was sent to any env."""


class RegistryError(MarlvecError, RuntimeError):
    """The id of an env, or the name of a connector or function, is wrong or ambiguous."""


class UnknownEnvError(RegistryError, LookupError, gymnasium.error.NameNotFound):
    """No env is registered under this id."""


class AlreadyRegisteredError(RegistryError, ValueError):
    """This id or name is registered already, for another object."""


class SerialisationError(MarlvecError, TypeError):
    """An object cannot be pickled for a worker process, or cannot be saved in a config or file."""


class UnsupportedSpaceError(MarlvecError, TypeError):
    """A leaf of a space has no fixed-size array form."""


class ContractError(MarlvecError, ValueError):
    """An env, policy or connector returned a value that violates its contract."""


class ContractWarning(UserWarning):
    """An env breaks its contract, and continues: invalid values, or a generator shared by its instances."""


class CheckpointError(MarlvecError, RuntimeError):
    """A file cannot be read: it is missing, damaged, or of another version, chain or space.

    Attributes:
        file: Its path, as given.
        reason: What is wrong with it.
    """

    def __init__(self, file: str | PathLike[str], reason: str) -> None:
        super().__init__(f"{fspath(file)} {reason}")
        self.file = fspath(file)
        self.reason = reason


class ProtocolError(MarlvecError, ConnectionError):
    """A message from a socket violates the protocol. The connection is closed; nothing else has changed.

    `marlvec.distributed` raises it for an answer that is no longer expected, and ignores the answer.

    Attributes:
        code: ``"protocol"``; ``"version"`` if the versions of the two sides differ; ``"limit"`` for too large messages.
    """

    def __init__(self, message: str, code: str = "protocol") -> None:
        super().__init__(message)
        self.code = code


class RefusedError(MarlvecError, RuntimeError):
    """The other side of a socket refused a request.

    Attributes:
        code: The reason, from the list in docs/protocol.md: ``"token"``, ``"version"``, ``"full"``, ``"value"``, ….
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ConnectionLost(MarlvecError, ConnectionError):
    """The other side of a socket has disconnected, or was silent for too long, and did not reconnect in time."""


class FetchTimeout(MarlvecError, TimeoutError, multiprocessing.TimeoutError):
    """Time ran out. The request is still pending: fetch again for the same reply."""


class AnswerTimeout(MarlvecError, TimeoutError):
    """An external simulator waited too long for an action, a free slot, or queue space. Its request stays pending."""


class DriverGone(MarlvecError, RuntimeError):
    """The thread that drove a simulator has ended: it raised (``__cause__``), or returned while a call waited for it.

    Its running episodes are lost; other episodes continue, and collected steps are kept: the call may be repeated.
    """


class CollectorDied(MarlvecError, RuntimeError):
    """A collector died, and ``on_fault`` or ``max_restarts`` of `marlvec.distributed.Collectors` ends the call.

    The counts of steps stay consistent, and received batches are kept: the call may be repeated.

    Attributes:
        index: Index of the collector.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class CollectorTimeout(CollectorDied, TimeoutError):
    """A collector's request ran for longer than ``timeout``, and it was ended."""


class MissingExtraError(MarlvecError, ImportError, gymnasium.error.DependencyNotInstalled):
    """An optional dependency is not installed; the text names the extra that installs it."""


class ResourceError(MarlvecError, OSError):
    """The machine lacks a resource: memory, processes, file descriptors. All started processes were ended."""


class RestartQuietly(Exception):
    """For an env to raise, in any operation: it requests a restart.

    Its running episode is lost, as after a fault, and its row is marked; but nothing is logged, and it does not count
    as a fault. Works with any ``on_fault``. Raised again and again without a step in between, it counts as a fault.
    """


class RemoteCause(MarlvecError, RuntimeError):
    """Replaces a worker's exception that could not be rebuilt in this process."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One env's failure inside one call.

    Attributes:
        env_id: Index of the env; -1 if no single env is the cause.
        operation: The operation that failed, e.g. ``"step"``.
        summary: Type and text of the exception, one line.
        traceback: The traceback in the env's process, as text, at most 64 KiB.
        exception: The original exception, or a `RemoteCause` if it could not be rebuilt.
        pid: Id of the worker process; None if it happened in this process.
        request: Number of the worker's request; None if it happened in this process.
    """

    env_id: int
    operation: str
    summary: str
    traceback: str
    exception: BaseException
    pid: int | None = None
    request: int | None = None


class EnvFault(MarlvecError, RuntimeError):
    """An env or its worker failed.

    Attributes:
        failures: Every failure of the call, in env order.
        result: A `VectorStep` with the rows of the envs that did not fail in this call, so that none is lost; None if
            the call has no rows, as in a constructor.
    """

    def __init__(self, message: str, failures: tuple[Failure, ...] = (), result: Any = None) -> None:
        super().__init__(message)
        self.failures = failures
        self.result = result

    @property
    def env_ids(self) -> tuple[int, ...]:
        """Indices of the envs that failed."""
        return tuple(failure.env_id for failure in self.failures)


class EnvRaised(EnvFault):
    """One or more envs raised. ``__cause__`` is the first one's original exception."""


class EnvArgumentError(EnvRaised, TypeError):
    """An env's constructor refused its arguments."""


class EnvContractError(EnvRaised, ContractError):
    """One or more envs returned a value that violates their contract."""


class EnvTimeout(EnvFault, TimeoutError):
    """An env did not return within ``step_timeout``. Its worker was killed, with all its envs.

    Attributes:
        pid: The worker's process id.
        lost_env_ids: The envs it ran.
    """

    def __init__(
        self,
        message: str,
        failures: tuple[Failure, ...] = (),
        result: Any = None,
        *,
        pid: int = -1,
        lost_env_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, failures, result)
        self.pid = pid
        self.lost_env_ids = lost_env_ids


class WorkerDied(EnvFault):
    """A worker process died.

    Attributes:
        pid: The worker's process id.
        exitcode: Its exit code, minus the signal number if a signal killed it; None if unknown.
        lost_env_ids: The envs it ran.
    """

    def __init__(
        self, message: str, *, pid: int = -1, exitcode: int | None = None, lost_env_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.exitcode = exitcode
        self.lost_env_ids = lost_env_ids

    @property
    def env_ids(self) -> tuple[int, ...]:
        return self.lost_env_ids
