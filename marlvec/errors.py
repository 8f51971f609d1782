"""Every error marlvec raises, in one tree; in brackets, what `except` clauses for other libraries catch it by.

    MarlvecError
    ├── StateError (RuntimeError)     a call came at the wrong time
    │   ├── ClosedError (gymnasium.error.ClosedEnvironmentError)  ... after close()
    │   ├── BusyError (gymnasium.error.AlreadyPendingCallError)  ... while another call was pending; `name` says which
    │   ├── NothingPendingError (gymnasium.error.NoAsyncCallError)  ... a fetch with nothing sent
    │   ├── NotResetError (gymnasium.error.ResetNeeded)  ... a step of an env that has no running episode
    │   ├── EnvsDriven                ... after other code drove the envs that a collector collects from
    │   ├── EpisodesFull              ... no more episodes can run at a time
    │   ├── EpisodeOver               ... in an episode that has ended, or was lost
    │   │   └── EpisodeCut            ... because the collector's side has ended it
    │   └── BrokenError               ... after a worker died; only close() is left
    ├── ArgumentError (ValueError)    an argument is wrong; nothing was sent to any env
    │   └── ActionError               the actions have the wrong shape, dtype or structure
    ├── RegistryError
    │   ├── UnknownEnvError (LookupError, gymnasium.error.NameNotFound)
    │   └── AlreadyRegisteredError (ValueError)
    ├── SerialisationError (TypeError)  something cannot be pickled for a worker, or written to a file
    ├── UnsupportedSpaceError (TypeError)
    ├── ContractError (ValueError)    an env, policy or connector broke its contract
    ├── FetchTimeout (TimeoutError, multiprocessing.TimeoutError)  time ran out; the request stays pending
    ├── AnswerTimeout (TimeoutError)  a simulator outside waited too long for the collector
    ├── DriverGone                    the thread or client that drove a simulator outside is gone
    ├── CheckpointError               a file does not hold what should be in it
    ├── ProtocolError                 what came over a socket is not what the protocol allows
    ├── RefusedError                  the other side of a socket said no; its `code` says why
    ├── ConnectionLost (ConnectionError)  the other side of a socket is gone
    ├── EnvFault (RuntimeError)       something went wrong inside an env or its worker
    │   ├── EnvRaised                 an env raised; `__cause__` is the original exception
    │   │   ├── EnvArgumentError (TypeError)  ... a TypeError, while it was being constructed
    │   │   └── EnvContractError (ContractError)  ... or returned what its contract does not allow
    │   ├── EnvTimeout (TimeoutError) an env did not come back within step_timeout; its worker was killed
    │   └── WorkerDied                a worker process is gone
    ├── CollectorDied (RuntimeError)  a collector of marlvec.distributed is gone, and others do not make up for it
    │   └── CollectorTimeout (TimeoutError)  ... because a request ran for too long
    ├── ResourceError (OSError)       the machine has not enough memory, processes or file descriptors
    └── MissingExtraError (ImportError, gymnasium.error.DependencyNotInstalled)  an optional library is not installed

    RestartQuietly (Exception)        for envs to raise: build me anew, and make no fuss about it

    ContractWarning (UserWarning)     a broken contract where ``validate="warn"`` asks for no more than a warning

Messages say what was expected, what was got, where, and what to do about it.

With this module comes Gymnasium. What has to be quick without it, such as a ``--help``, imports it where it raises.
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


class MarlvecError(Exception):
    """Base class of every error that marlvec raises on purpose."""


class StateError(MarlvecError, RuntimeError):
    """A call came at the wrong time."""


class ClosedError(StateError, gymnasium.error.ClosedEnvironmentError):
    """The vectorizer was closed."""


class BusyError(StateError, gymnasium.error.AlreadyPendingCallError):
    """Another call is pending; fetch it first.

    Attributes:
        name: Of the pending call, e.g. ``"step"``; empty where it is no call of a vectorizer.
    """

    def __init__(self, message: str, name: str = "") -> None:
        RuntimeError.__init__(self, message)  # Gymnasium's asks for a name
        self.name = name


class NothingPendingError(StateError, gymnasium.error.NoAsyncCallError):
    """There is nothing to fetch.

    Attributes:
        name: Of the call whose result was asked for, e.g. ``"step"``; empty where any would do.
    """

    def __init__(self, message: str, name: str = "") -> None:
        RuntimeError.__init__(self, message)  # Gymnasium's asks for a name
        self.name = name


class NotResetError(StateError, gymnasium.error.ResetNeeded):
    """An env has no running episode: it was never reset, or its episode is over."""


class EnvsDriven(StateError):
    """Other code reset or stepped the envs that a collector collects from, or took their rows.

    Its running episodes are not what it knows of them: `Collector.reset` begins new ones.
    """


class EpisodesFull(StateError):
    """As many episodes run outside as there are slots; one has to end before another can begin."""


class EpisodeOver(StateError):
    """The episode has ended, or was lost; the text says how."""


class EpisodeCut(EpisodeOver):
    """The collector's side has ended the episode: it begins new ones, time was up, or nothing was heard of it."""


class BrokenError(StateError):
    """A worker died earlier; only ``close()`` is left."""


class ArgumentError(MarlvecError, ValueError):
    """An argument is wrong. Nothing was sent to any env."""


class ActionError(ArgumentError):
    """Actions have the wrong structure, shape or dtype. Nothing was sent to any env."""


class RegistryError(MarlvecError, RuntimeError):
    """Something is wrong with the id of an env, or the name of a connector or function."""


class UnknownEnvError(RegistryError, LookupError, gymnasium.error.NameNotFound):
    """No env is registered under this id."""


class AlreadyRegisteredError(RegistryError, ValueError):
    """Something else is registered under this id or name already."""


class SerialisationError(MarlvecError, TypeError):
    """An object cannot be pickled, though it has to cross to a worker process, or has no form in a config or file."""


class UnsupportedSpaceError(MarlvecError, TypeError):
    """A leaf of a space has no fixed-size array form."""


class ContractError(MarlvecError, ValueError):
    """An env, policy or connector returned something its contract does not allow."""


class ContractWarning(UserWarning):
    """An env breaks its contract, and goes on: values are not allowed, or its instances share a generator."""


class CheckpointError(MarlvecError, RuntimeError):
    """A file cannot be read back: it is not there, damaged, or of another version, chain or space.

    Attributes:
        file: Its path, as it was given.
        reason: What is wrong with it.
    """

    def __init__(self, file: str | PathLike[str], reason: str) -> None:
        super().__init__(f"{fspath(file)} {reason}")
        self.file = fspath(file)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.reason)


class ProtocolError(MarlvecError, ConnectionError):
    """What came over a socket is not what the protocol allows. The connection is closed; nothing else has changed.

    `marlvec.distributed` raises it for an answer that is no longer waited for, and uses no such answer.

    Attributes:
        code: ``"protocol"``; ``"version"`` where the two sides speak different ones; ``"limit"`` where it was too much.
    """

    def __init__(self, message: str, code: str = "protocol") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.code)


class RefusedError(MarlvecError, RuntimeError):
    """The other side of a socket said no.

    Attributes:
        code: Why, as docs/protocol.md lists it, e.g. ``"token"``, ``"version"``, ``"full"``, ``"value"``.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.code)


class ConnectionLost(MarlvecError, ConnectionError):
    """The other side of a socket is gone, or silent for too long, and did not come back in time."""


class FetchTimeout(MarlvecError, TimeoutError, multiprocessing.TimeoutError):
    """Time ran out. The request is still pending: fetch again for the same reply."""


class AnswerTimeout(MarlvecError, TimeoutError):
    """A simulator outside waited too long: for an action, for a free slot, or for room. What it asked stays asked."""


class DriverGone(MarlvecError, RuntimeError):
    """The thread that drove a simulator is gone: it raised (``__cause__``), or returned while a call waited for it.

    Its running episodes are lost; those of others go on, and what was collected is kept: the call may be made again.
    """


class CollectorDied(MarlvecError, RuntimeError):
    """A collector is gone, and ``on_fault`` or ``max_restarts`` of `marlvec.distributed.Collectors` ends the call.

    The books balance, and nothing that was there is lost: the call may be made again.

    Attributes:
        index: Which.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.index)


class CollectorTimeout(CollectorDied, TimeoutError):
    """A collector's request ran for longer than ``timeout``, and it was ended."""


class MissingExtraError(MarlvecError, ImportError, gymnasium.error.DependencyNotInstalled):
    """An optional dependency is not installed; the text names the extra that brings it."""


class ResourceError(MarlvecError, OSError):
    """The machine has not enough of something: memory, processes, file descriptors. Nothing is left behind."""


class RestartQuietly(Exception):
    """For an env to raise, in any operation: it wants to be built anew.

    Its running episode is lost, as after a fault, and its row says so; but nothing is logged, and it does not count as
    one. Works whatever ``on_fault`` says. An env that raises it again and again without ever stepping is a fault.
    """


class RemoteCause(MarlvecError):
    """Stands in for a worker's exception that could not be rebuilt in this process."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One env's failure inside one call.

    Attributes:
        env_id: Index of the env; -1 when no single env is to blame.
        operation: What it was asked to do, e.g. ``"step"``.
        summary: Type and text of the exception, one line.
        traceback: The traceback where it happened, as text, at most 64 KiB.
        exception: The original exception, or a `RemoteCause` where it could not be rebuilt.
        pid: Id of the worker process in which it happened; None where that was no other process.
        request: Number of the request that it answered, likewise.
    """

    env_id: int
    operation: str
    summary: str
    traceback: str
    exception: BaseException
    pid: int | None = None
    request: int | None = None


class EnvFault(MarlvecError, RuntimeError):
    """Something went wrong inside an env or its worker.

    Attributes:
        failures: Every failure of the call, in env order.
        result: A `VectorStep` with the rows of the envs that did not fail in this call, so that none of it is lost;
            None where there are no such rows, as in a constructor.
    """

    def __init__(self, message: str, failures: tuple[Failure, ...] = (), result: Any = None) -> None:
        super().__init__(message)
        self.failures = failures
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.failures, self.result)

    @property
    def env_ids(self) -> tuple[int, ...]:
        """Indices of the envs that failed."""
        return tuple(failure.env_id for failure in self.failures)


class EnvRaised(EnvFault):
    """One or more envs raised. ``__cause__`` is the first one's original exception."""


class EnvArgumentError(EnvRaised, TypeError):
    """An env's constructor refused its arguments."""


class EnvContractError(EnvRaised, ContractError):
    """One or more envs returned what their contract does not allow."""


class EnvTimeout(EnvFault, TimeoutError):
    """An env did not come back within ``step_timeout``. Its worker was killed, and the other envs in it with it.

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_env_timeout, (self.args[0], self.failures, self.result, self.pid, self.lost_env_ids)


class WorkerDied(EnvFault):
    """A worker process is gone.

    Attributes:
        pid: The worker's process id.
        exitcode: Its exit code, minus the signal number if a signal killed it, or None where unknown.
        lost_env_ids: The envs it ran.
    """

    def __init__(
        self, message: str, *, pid: int = -1, exitcode: int | None = None, lost_env_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.exitcode = exitcode
        self.lost_env_ids = lost_env_ids

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_worker_died, (self.args[0], self.pid, self.exitcode, self.lost_env_ids)

    @property
    def env_ids(self) -> tuple[int, ...]:
        return self.lost_env_ids


def _rebuild_worker_died(message: str, pid: int, exitcode: int | None, env_ids: tuple[int, ...]) -> WorkerDied:
    return WorkerDied(message, pid=pid, exitcode=exitcode, lost_env_ids=env_ids)


def _rebuild_env_timeout(
    message: str, failures: tuple[Failure, ...], result: Any, pid: int, env_ids: tuple[int, ...]
) -> EnvTimeout:
    return EnvTimeout(message, failures, result, pid=pid, lost_env_ids=env_ids)
