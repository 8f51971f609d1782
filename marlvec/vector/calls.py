"""Which call is pending, which envs are busy, and which have an episode (`CallState`); commands to single envs.

A command calls a method, gets or sets an attribute, runs a function, or renders, where the env lives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import wraps
from operator import methodcaller
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.recipes import copy_or_share
from marlvec.envs.spec import Info
from marlvec.envs.user_env import get_attribute, is_wrapped, set_attribute
from marlvec.envs.video import render_env
from marlvec.errors import (
    ArgumentError,
    BrokenError,
    BusyError,
    ClosedError,
    MarlvecError,
    NothingPendingError,
    NotResetError,
)
from marlvec.vector.failures import capture
from marlvec.vector.infos import ShardReport


class CallKind(IntEnum):
    """What a public call returns, and which other calls may be pending at the same time."""

    ROWS = 0
    """Rows of all requested envs; no other call may be pending."""
    STREAM = 1
    """Rows as they become ready; other stream calls, to other envs, may be pending."""
    CONTROL = 2
    """Answers; no other call may be pending."""


class PublicCall(NamedTuple):
    """A public call that sends requests to envs: the operation that shards run, and what the call returns."""

    operation: str
    kind: CallKind


_ROWS, _STREAM, _CONTROL = CallKind
_COMMANDS = ("call", "exec_func", "get_attr", "set_attr", "env_is_wrapped", "render", "state_obstacles")
PUBLIC_CALLS: Mapping[str, PublicCall] = {
    "reset": PublicCall("reset", _ROWS),
    "step": PublicCall("step", _ROWS),
    "async_reset": PublicCall("reset", _STREAM),
    "send": PublicCall("send", _STREAM),
    **dict.fromkeys(_COMMANDS, PublicCall("control", _CONTROL)),
    **{name: PublicCall(name, _CONTROL) for name in ("state", "get_state", "set_state")},
}

STREAM_CALLS = frozenset(name for name, call in PUBLIC_CALLS.items() if call.kind == CallKind.STREAM)
CONTROL_CALLS = frozenset(name for name, call in PUBLIC_CALLS.items() if call.kind == CallKind.CONTROL)


class CallPhase(IntEnum):
    """Which calls a vectorizer accepts."""

    IDLE = 0
    """No request is pending."""
    PENDING = 1
    """The result of a call is still to be fetched."""
    INTERRUPTED = 2
    """A result is pending; Ctrl-C ended the call that would have fetched it. The next call drops the result."""
    TORN = 3
    """Ctrl-C came in the middle of a change: the next call drops all requests if the backend can, or breaks."""
    BROKEN = 4
    """Only `close` is accepted."""
    CLOSED = 5
    """No call is accepted."""


class CallEvent(IntEnum):
    """Events that change the phase of a vectorizer."""

    BEGIN = 0
    """A call sends requests to envs."""
    FINISH = 1
    """No result is outstanding: all results were returned, or the call was undone."""
    INTERRUPT = 2
    """Ctrl-C ended a call that requests and fetches in one."""
    TEAR = 3
    """Ctrl-C came while a request was sent, or a reply read or returned."""
    FORGET = 4
    """All requests are dropped, and all episodes with them."""
    BREAK = 5
    """A worker died and is not restarted, a pool or kernel raised midway, or no env is alive."""
    CLOSE = 6
    """`close` was called."""


_IDLE, _PENDING, _INTERRUPTED, _TORN, _BROKEN, _CLOSED = CallPhase
_LAST = {_BROKEN: _BROKEN, _CLOSED: _CLOSED}  # no event leaves these phases while a call still runs

TRANSITIONS: Mapping[CallEvent, Mapping[CallPhase, CallPhase]] = {
    CallEvent.BEGIN: {_IDLE: _PENDING, _PENDING: _PENDING, _CLOSED: _CLOSED},
    CallEvent.FINISH: {_IDLE: _IDLE, _PENDING: _IDLE, _INTERRUPTED: _IDLE, **_LAST},
    CallEvent.INTERRUPT: {_IDLE: _IDLE, _PENDING: _INTERRUPTED, _INTERRUPTED: _INTERRUPTED, _TORN: _TORN, **_LAST},
    CallEvent.TEAR: {_IDLE: _TORN, _PENDING: _TORN, _INTERRUPTED: _TORN, _TORN: _TORN, **_LAST},
    CallEvent.FORGET: {_TORN: _IDLE, _CLOSED: _CLOSED},
    CallEvent.BREAK: {_IDLE: _BROKEN, _PENDING: _BROKEN, _INTERRUPTED: _BROKEN, _TORN: _BROKEN, **_LAST},
    CallEvent.CLOSE: dict.fromkeys(CallPhase, _CLOSED),
}
"""Event, phase before → phase after. A missing pair is a bug and raises KeyError."""

_BEGIN, _FINISH = TRANSITIONS[CallEvent.BEGIN], TRANSITIONS[CallEvent.FINISH]


class CallState:
    """The calls of one vectorizer.

    An env goes from idle to in flight (`begin`), to arrived (`arrive`), and back to idle (`hand_out`). Only `hand_out`
    and `forget` remove a request that was sent, so a timeout loses none.
    """

    def __init__(self, num_envs: int) -> None:
        self.phase = _IDLE
        self.pending: str | None = None
        self.reason: MarlvecError | str | None = None
        self.outstanding = 0
        self.arrived = 0
        # Reentrant: an interrupt just after it was acquired must not lock out this thread for ever.
        self.lock = threading.RLock()
        self._batches: list[NDArray[np.int64]] = []  # envs that have arrived, in order of arrival
        # The envs of the only pending call, so that each need not be marked in _busy.
        self._sole_call_ids: NDArray[np.int64] | None = None
        self._busy = np.zeros(num_envs, np.bool_)  # with several pending calls: in flight, or arrived but not returned
        self._no_episode = np.ones(num_envs, np.bool_)
        self.all_run = False

    def __str__(self) -> str:
        if self.phase in _LAST:
            return self.phase.name.lower()
        return "idle" if self.pending is None else f"{self.pending} pending"

    @property
    def closed(self) -> bool:
        return self.phase is _CLOSED

    @property
    def asked(self) -> NDArray[np.int64]:
        """Envs whose result was not returned yet, ascending."""
        asked = self._busy.copy()
        if self._sole_call_ids is not None:
            asked[self._sole_call_ids] = True
        return np.flatnonzero(asked)

    @property
    def in_flight(self) -> NDArray[np.int64]:
        """Envs in `asked` that have not replied yet."""
        asked = self.asked
        return asked[~np.isin(asked, _join(self._batches))]

    @contextmanager
    def left(self, timeout: float) -> Iterator[None]:
        """Wait at most ``timeout`` seconds until no other thread is in a call; keep other threads out in the block."""
        is_ours = self.lock.acquire(timeout=timeout)
        try:
            yield
        finally:
            if is_ours:
                self.lock.release()

    # --- checks

    def check_open(self) -> None:
        if self.phase is _CLOSED:
            raise ClosedError("this vectorizer was closed; make() a new one")
        if self.phase is _BROKEN:
            cause = self.reason if isinstance(self.reason, MarlvecError) else None
            raise BrokenError(f"only close() is left. What happened: {self.reason}") from cause

    def check_idle(self, call: str) -> None:
        if self.phase is not _IDLE:
            self._refuse(call)

    def check_ready(self, call: str, env_ids: NDArray[np.int64]) -> None:
        """Raise if another call is pending, or if one of these envs has no running episode."""
        if self.phase is not _IDLE:
            self._refuse(call)
        if not self.all_run:
            self.check_episodes(env_ids, call)

    def _refuse(self, call: str) -> None:
        self.check_open()
        how = "recv() or drain() the rest" if self.pending in STREAM_CALLS else f"{self.pending}_fetch()"
        raise BusyError(f"{call}() while {self.pending}() is pending; {how} first", self.pending or "")

    def check_free(self, env_ids: NDArray[np.int64], call: str) -> None:
        """Raise if ``call``, a stream call, cannot send requests to these envs now."""
        if self.phase is _IDLE:
            return
        self.check_open()
        if self.pending not in STREAM_CALLS:
            what = f"{call}() while {self.pending}() is pending; {self.pending}_fetch() first"
            raise BusyError(what, self.pending or "")
        self._mark_each()
        busy = env_ids[self._busy[env_ids]]
        if len(busy):
            what = f"{call}() to envs {busy.tolist()}, which still have a result to receive; recv() first"
            raise BusyError(what, self.pending or "")

    def check_pending(self, call: str) -> None:
        if self.phase is _PENDING and self.pending == call:
            return
        self.check_open()
        what = f"{self.pending}() is pending" if self.pending else "nothing is pending"
        raise NothingPendingError(f"{call}_fetch(): {what}; {call}_send() first", call)

    def check_episodes(self, env_ids: NDArray[np.int64], call: str) -> None:
        if self.all_run:
            return
        missing = env_ids[self._no_episode[env_ids]]
        if len(missing):
            raise NotResetError(f"{call}(): envs {missing.tolist()} have no running episode; reset them first")

    # --- events

    def on(self, event: CallEvent, reason: MarlvecError | str | None = None) -> None:
        """Apply an event; ``reason``: where the interrupt came (`TEAR`), or the error that users see (`BREAK`)."""
        after = TRANSITIONS[event][self.phase]
        if reason is not None and after is not _CLOSED:
            self.reason = reason
        self.phase = after

    def begin(self, call: str, env_ids: NDArray[np.int64]) -> None:
        """Note that these envs, all idle, receive a request."""
        if self.pending is None:
            self._sole_call_ids = env_ids
        else:
            self._mark_each()
            self._busy[env_ids] = True
        self.pending = call
        self.outstanding += len(env_ids)
        self.phase = _BEGIN[self.phase]

    def undo_begin(self, env_ids: NDArray[np.int64], outstanding: int) -> None:
        """Undo `begin`, even an interrupted one; no request was sent. ``outstanding`` is the number before `begin`."""
        self._mark_each()
        self._busy[env_ids] = False
        self.outstanding = outstanding
        if not outstanding:
            self.pending = None
            self.phase = _FINISH[self.phase]

    def forget(self) -> None:
        """Drop all pending calls and all episodes; the phase is idle again."""
        self.lose_episodes(np.arange(len(self._no_episode)))
        self._busy[:] = False
        self._sole_call_ids, self._batches = None, []
        self.outstanding = self.arrived = 0
        self.pending = self.reason = None
        self.on(CallEvent.FORGET)

    def _mark_each(self) -> None:
        if self._sole_call_ids is not None:
            self._busy[self._sole_call_ids] = True
            self._sole_call_ids = None

    def lose_episodes(self, env_ids: Sequence[int] | NDArray[np.int64]) -> None:
        if len(env_ids):
            self._no_episode[env_ids] = True
            self.all_run = False

    def have_episodes(self, env_ids: NDArray[np.int64]) -> None:
        self._no_episode[env_ids] = False
        self.all_run = not self._no_episode.any()

    def has_episodes(self, env_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return ~self._no_episode[env_ids]

    def arrive(self, env_ids: NDArray[np.int64]) -> None:
        """Note that these envs have replied."""
        self._batches.append(env_ids)
        self.arrived += len(env_ids)

    def hand_out(self) -> NDArray[np.int64]:
        """Return all arrived envs and mark them idle; stream calls in order of arrival, unless all envs arrived."""
        batches, self._batches = self._batches, []
        everything = self.arrived == self.outstanding
        self.outstanding -= self.arrived
        self.arrived = 0
        if everything:
            in_order, self.pending = self.pending not in STREAM_CALLS, None
            self.phase = _FINISH[self.phase]
            if self._sole_call_ids is not None:
                sole, self._sole_call_ids = self._sole_call_ids, None
                return sole if in_order or len(sole) == len(self._busy) else _join(batches)
        self._mark_each()
        ids = _join(batches)
        self._busy[ids] = False
        return ids


def _join(batches: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(batches) == 1:
        return batches[0]
    return np.concatenate(batches) if batches else np.zeros(0, np.int64)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception can be raised at any line: Ctrl-C, a signal handler's `SystemExit`, `MemoryError`."""
    return not isinstance(error, Exception) or isinstance(error, MemoryError)


class _HasCallState(Protocol):
    _call_state: CallState
    _made_in: int
    _works_in_forks: bool

    def _check_process(self, call: str) -> None: ...

    def _drop_interrupted(self) -> None: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")
_V = TypeVar("_V", bound=_HasCallState)
_Method = Callable[Concatenate[_V, _P], _R]


def exclusive(*, fetches: bool = False) -> Callable[[_Method[_V, _P, _R]], _Method[_V, _P, _R]]:
    """Decorate a method that is a public call: only one thread can be in a call, so it never receives another's reply.

    Results of an interrupted call are dropped first. `fetches`: the call requests and fetches in one, so if Ctrl-C ends
    it, its result is not fetched.
    """

    def decorate(method: _Method[_V, _P, _R]) -> _Method[_V, _P, _R]:
        @wraps(method)
        def call(self: _V, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            state = self._call_state
            if self._made_in != os.getpid() and not self._works_in_forks:
                self._check_process(f"{method.__name__}()")
            if not state.lock.acquire(blocking=False):
                if state.closed:
                    state.check_open()
                raise BusyError(f"{method.__name__}() while another thread is in a call of this vectorizer")
            try:
                if state.phase is _INTERRUPTED or state.phase is _TORN:
                    self._drop_interrupted()
                return method(self, *args, **kwargs)
            except BaseException as error:
                if fetches and is_interrupt(error):
                    state.on(CallEvent.INTERRUPT)
                elif state.closed and isinstance(error, Exception) and not isinstance(error, MarlvecError):
                    # Another thread closed the vectorizer without waiting longer for this call to end.
                    raise ClosedError(f"{method.__name__}(): this vectorizer was closed meanwhile") from error
                raise
            finally:
                state.lock.release()

        return call

    return decorate


# Called past the call state machine, these methods would change an env without its rows.
_REFUSED = {
    "reset": "use reset(env_ids=…)",
    "step": "use step() or send()",
    "close": "use close()",
    "seed": "use reset(seed=…)",
}


class PerEnv:
    """One value per env, for `VectorEnv.set_attr`; any other value, even a list, is set on every env unchanged.

    Args:
        values: One per chosen env, in the order of the envs.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"PerEnv({list(self.values)!r})"


class Command(NamedTuple):
    """One command for one env: a public call (a key of `_FUNCTIONS`), and arguments of its function behind the env."""

    call: str
    args: tuple[Any, ...] = ()

    @property
    def operation(self) -> str:
        """The name that a failure has: the env's own method, or the public call."""
        return str(self.args[0]) if self.call == "call" else self.call


def call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Command:
    """Call a method of the env, or read an attribute, as Gymnasium's vector envs do."""
    if name in _REFUSED:
        raise ArgumentError(f"call({name!r}): only the vectorizer may call this; {_REFUSED[name]}")
    return Command("call", (name, args, kwargs))


def execute(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Command:
    """Call a function with the user's env, including all wrappers."""
    if not callable(function):
        got = f"{type(function).__name__}: {function!r}"
        raise ArgumentError(f"exec_func(): expected a function of an env, got {got}")
    return Command("exec_func", (function, args, kwargs))


def set_attributes(name: str, value: Any, n: int) -> list[Command]:
    """Set an attribute of ``n`` envs, on the layer that owns it."""
    values = value.values if isinstance(value, PerEnv) else (value,) * n
    if len(values) != n:
        raise ArgumentError(
            f"set_attr({name!r}): expected PerEnv with one value for each of {n} envs, got {len(values)}"
        )
    return [Command("set_attr", (name, one)) for one in values]


def _call(env: MultiAgentEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = get_attribute(env, name)
    if callable(found):
        return found(*copy_or_share(args), **copy_or_share(kwargs))
    if args or kwargs:
        raise ArgumentError(f"call({name!r}): {type(found).__name__} is not a method; pass no arguments")
    return found


def _execute(env: MultiAgentEnv, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(env.unwrapped, *copy_or_share(args), **copy_or_share(kwargs))


def _set_attribute(env: MultiAgentEnv, name: str, value: Any) -> None:
    set_attribute(env, name, copy_or_share(value))


# Public call → function of a `MultiAgentEnv` and the command's arguments.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "call": _call,
    "exec_func": _execute,
    "get_attr": get_attribute,
    "set_attr": _set_attribute,
    "env_is_wrapped": is_wrapped,
    "render": render_env,
    "state_obstacles": methodcaller("state_obstacle"),
}


def run_commands(
    ids: Iterable[int],
    commands: Sequence[Command],
    env_of: Callable[[int], MultiAgentEnv],
    first_env_id: int = 0,
    *,
    advice: str = "",
) -> ShardReport:
    """Run one command per env, given by local indices, the keys of the answers. A failure costs no episode."""
    # `first_env_id` is the global index of local env 0; `advice` is appended to an `ArgumentError`.
    report = ShardReport()
    for i, command in zip(ids, commands, strict=True):
        try:
            report.answers[i] = _FUNCTIONS[command.call](env_of(i), *command.args)
        except Exception as error:
            if advice and isinstance(error, ArgumentError):
                error.args = (f"{error} {advice}",)
            report.failures.append(capture(first_env_id + i, command.operation, error))
    return report


class EnvHandle(MultiAgentEnv):
    """Target of commands for one env of a native kernel or a pool, which has no env object; never stepped."""

    def __init__(self, env: Any, name: str) -> None:
        self.name = name
        self._env = env

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        raise NotImplementedError

    def step(self, slot: Slot) -> Info | None:
        raise NotImplementedError

    @property
    def unwrapped(self) -> Any:
        return self._env
