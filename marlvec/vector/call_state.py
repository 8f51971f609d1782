"""`CallState`: which call is pending, which envs are busy, and which have an episode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import BrokenError, BusyError, ClosedError, MarlvecError, NothingPendingError, NotResetError

__all__ = ["CONTROL_CALLS", "STREAM", "CallState", "alone", "whole"]

STREAM = ("send", "async_reset")
"""Calls that may be made while others of their kind are under way, of other envs; ``recv`` brings what they asked."""


CONTROL_CALLS = ("call", "exec_func", "get_attr", "set_attr", "env_is_wrapped", "render", "state")
"""Calls that bring answers, not rows."""


class CallState:
    """The calls of one vectorizer.

    An env goes from idle to in flight (`begin`), to arrived (`arrive`), and back to idle (`hand_out`). Nothing but
    `hand_out` forgets a request that went out, so a timeout loses none.

    Args:
        num_envs: N.

    Attributes:
        pending: The public call whose result is still to be fetched, or None; of several in `STREAM`, the last one.
        closed: Whether the vectorizer was closed.
        broken: Why only ``close()`` is left, or None.
        interrupted: Whether the pending call was left by an interrupt, so that nobody will fetch its result.
        torn: How an interrupt came in the middle of a change of what is here, so that none of it can be relied on; or
            None.
        outstanding: How many envs have a result that was not handed out yet.
        arrived: How many of those have replied.
        entered: Held by the thread that is in a call.
    """

    def __init__(self, num_envs: int) -> None:
        self.pending: str | None = None
        self.closed = False
        self.broken: MarlvecError | None = None
        self.interrupted = False
        self.torn: str | None = None
        self.outstanding = 0
        self.arrived = 0
        # Reentrant: an interrupt just after it was taken must not lock this thread out for good.
        self.lock = threading.RLock()
        self._batches: list[NDArray[np.int64]] = []  # envs that have arrived, first come first
        # The envs of a call that is under way alone: no need to mark each.
        self._sole_call_ids: NDArray[np.int64] | None = None
        self._busy = np.zeros(num_envs, np.bool_)  # otherwise: in flight, or arrived and not handed out
        self._no_episode = np.ones(num_envs, np.bool_)
        self._all_run = False  # no env is without an episode: spares the look at each

    def __str__(self) -> str:
        if self.closed:
            return "closed"
        if self.broken is not None:
            return "broken"
        return "idle" if self.pending is None else f"{self.pending} pending"

    @property
    def in_flight(self) -> list[int]:
        """Envs that have not replied yet."""
        waiting = self._busy.copy()
        if self._sole_call_ids is not None:
            waiting[self._sole_call_ids] = True
        for batch in self._batches:
            waiting[batch] = False
        return np.flatnonzero(waiting).tolist()

    def check_open(self) -> None:
        """Raise if nothing can be called any more."""
        if self.closed:
            raise ClosedError("this vectorizer was closed; make() a new one")
        if self.broken is not None:
            raise BrokenError(f"only close() is left. What happened: {self.broken}") from self.broken

    def check_idle(self, call: str) -> None:
        """Raise if ``call`` must wait for another one."""
        if self.pending is None and not self.closed and self.broken is None:
            return
        self.check_open()
        how = "recv() or drain() the rest" if self.pending in STREAM else f"{self.pending}_fetch()"
        raise BusyError(f"{call}() while {self.pending}() is pending; {how} first")

    def check_free(self, env_ids: NDArray[np.int64], call: str) -> None:
        """Raise if these envs cannot be asked by ``call``, one of `STREAM`, now."""
        self.check_open()
        if self.pending is None:
            return
        if self.pending not in STREAM:
            raise BusyError(f"{call}() while {self.pending}() is pending; {self.pending}_fetch() first")
        self._mark_each()
        busy = env_ids[self._busy[env_ids]]
        if len(busy):
            raise BusyError(f"{call}() to envs {busy.tolist()}, which still have a result to receive; recv() first")

    def check_pending(self, call: str) -> None:
        """Raise if the pending call is not ``call``."""
        if self.pending == call and self.broken is None and not self.closed:
            return
        self.check_open()
        what = f"{self.pending}() is pending" if self.pending else "nothing is pending"
        raise NothingPendingError(f"{call}_fetch(): {what}; {call}_send() first")

    def check_episodes(self, env_ids: NDArray[np.int64], call: str) -> None:
        """Raise if one of these envs has no running episode."""
        if self._all_run:
            return
        missing = env_ids[self._no_episode[env_ids]]
        if len(missing):
            raise NotResetError(f"{call}(): envs {missing.tolist()} have no running episode; reset them first")

    def begin(self, call: str, env_ids: NDArray[np.int64]) -> None:
        """These envs, all idle, get a request."""
        if self.pending is None:
            self._sole_call_ids = env_ids
        else:
            self._mark_each()
            self._busy[env_ids] = True
        self.pending = call
        self.outstanding += len(env_ids)

    def undo_begin(self, env_ids: NDArray[np.int64], outstanding: int) -> None:
        """Undo `begin`, also one that was interrupted: nothing was sent.

        Args:
            env_ids: Its envs.
            outstanding: As it was before.
        """
        self._mark_each()
        self._busy[env_ids] = False
        self.outstanding = outstanding
        if not outstanding:
            self.pending = None

    def forget(self) -> None:
        """Nothing is pending, and no env has an episode; what was torn is whole again."""
        self.lose_episodes(np.arange(len(self._no_episode)))
        self._busy[:] = False
        self._sole_call_ids, self._batches = None, []
        self.outstanding = self.arrived = 0
        self.pending = None
        self.interrupted = False
        self.torn = None

    def _mark_each(self) -> None:
        if self._sole_call_ids is not None:
            self._busy[self._sole_call_ids] = True
            self._sole_call_ids = None

    def lose_episodes(self, env_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """These envs have no running episode until one is begun."""
        if len(env_ids):
            self._no_episode[env_ids] = True
            self._all_run = False

    def have_episodes(self, env_ids: NDArray[np.int64]) -> None:
        """These envs have a running episode."""
        if not self._all_run:
            self._no_episode[env_ids] = False
            self._all_run = not self._no_episode.any()

    def arrive(self, env_ids: NDArray[np.int64]) -> None:
        """These envs have replied."""
        self._batches.append(env_ids)
        self.arrived += len(env_ids)

    def hand_out(self) -> NDArray[np.int64]:
        """Take all that has arrived; of a stream of calls in the order of arrival, unless these are all envs."""
        batches, self._batches = self._batches, []
        everything = self.arrived == self.outstanding
        self.outstanding -= self.arrived
        self.arrived = 0
        if everything:
            in_order, self.pending = self.pending not in STREAM, None
            if self._sole_call_ids is not None:
                whole, self._sole_call_ids = self._sole_call_ids, None
                return whole if in_order or len(whole) == len(self._busy) else _join(batches)
        self._mark_each()
        ids = _join(batches)
        self._busy[ids] = False
        return ids


def _join(batches: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(batches) == 1:
        return batches[0]
    return np.concatenate(batches) if batches else np.zeros(0, np.int64)


class _HasCalls(Protocol):
    _call_state: CallState

    def _drop_interrupted(self) -> None: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")
_V = TypeVar("_V", bound=_HasCalls)


def alone(method: Callable[Concatenate[_V, _P], _R]) -> Callable[Concatenate[_V, _P], _R]:
    """Let one thread in at a time: a second one is told so, and never gets a share of the first one's reply."""

    @wraps(method)
    def call(self: _V, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        lock = self._call_state.lock
        if not lock.acquire(blocking=False):
            raise BusyError(f"{method.__name__}() while another thread is in a call of this vectorizer")
        try:
            if (self._call_state.interrupted or self._call_state.torn) and not self._call_state.closed:
                self._drop_interrupted()
            return method(self, *args, **kwargs)
        finally:
            lock.release()

    return call


def whole(method: Callable[Concatenate[_V, _P], _R]) -> Callable[Concatenate[_V, _P], _R]:
    """For a call that asks and fetches in one: if Ctrl-C ends it, nobody will fetch what it asked for."""

    @wraps(method)
    def call(self: _V, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._call_state.interrupted = self._call_state.pending is not None
            raise

    return call
