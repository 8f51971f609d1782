"""Policies: rows in, actions out; also from plain functions and objects with a method ``act``."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gymnasium.spaces import Space

from marlvec.arguments import count_from, signature_of
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, ragged_array

if TYPE_CHECKING:
    from concurrent.futures import Future

PolicyOutput = Tree | tuple[Tree, Mapping[str, Tree]]
"""Actions (n, …), a tree in the shape of the action space; or actions and a dict of further columns (n, …)."""
PolicyState = dict[str, Any]
"""A policy's learned state and memory: numbers, texts, arrays, and dicts, lists and tuples of these."""


def takes_explore(act: Callable[..., Any]) -> bool:
    """Return whether ``act`` has an argument ``explore``."""
    try:
        parameters = signature_of(act).parameters.values()
    except (ValueError, TypeError):  # a function written in C
        return False
    return any(p.kind is p.VAR_KEYWORD or (p.name == "explore" and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


class Policy(ABC):
    """Chooses actions for rows.

    A subclass that ignores ``explore`` may leave it out: ``def act(self, rows)``.

    Attributes:
        version: Version of the weights in use; each collected row carries the version that chose its action.
        ragged: Columns whose rows have unlike lengths, such as tokens, with the dtype of their numbers. The policy may
            return them as lists of lists; batches have arrays of objects, (n,), each a 1-D array.
        observation_space: Space of one observation, after the agent connectors; None until `setup`.
        action_space: Space of one action, before the action connectors; None until `setup`.
    """

    version: int = 0
    ragged: Mapping[str, Any] = MappingProxyType({})
    observation_space: Space[Any] | None = None
    action_space: Space[Any] | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        act = cls.__dict__.get("act")
        if inspect.isfunction(act) and not takes_explore(act):
            cls.act = _for_rows_alone(act)  # type: ignore[method-assign]  # callers may pass ``explore`` to it
        if act is not None and cls.ragged:
            cls.act = _with_ragged(cls.act)  # type: ignore[method-assign]  # so that others need not ask

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Set the spaces. Called once by the collector, before the first `act`.

        Args:
            observation_space: Space of one row's observation, after the agent connectors.
            action_space: Space of one row's action, before the action connectors.
            seed: From the collector's seed, different for each policy; passed on to `reseed`.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Restart the random generator. Called by `setup` and ``collector.reset(seed=…)``; does nothing here."""

    @abstractmethod
    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Choose one action per row.

        Args:
            rows: n rows: ``obs``, ids, ``t``, ``first``, ``rewards`` (since the agent's previous row),
                ``action_mask`` (n, k) bool if the env has masks, and columns of the connectors.
            explore: Whether to explore, or to act as well as possible.

        Returns:
            Actions (n, …), or ``(actions, columns)`` with further columns (n, …), e.g. ``logp``. Return the same
            columns at each call; the batch has them under their names.
        """

    def state_dict(self) -> PolicyState:
        """Return everything that distinguishes it from a new policy after `setup`: weights, random generators, memory.

        Returns:
            A copy that later calls do not change; here ``{}``, an empty state. `version` is not included.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`; the policy then acts as that policy did.

        Args:
            state: A state of a policy built with equal arguments and set up with equal spaces.

        Raises:
            ArgumentError: It does not fit; nothing was loaded.
        """
        if state:
            raise ArgumentError(
                f"state of a {type(self).__name__}: expected none, got {list(state)}; override state_dict() and "
                f"load_state_dict() together"
            )

    def get_weights(self) -> PolicyState:
        """Return what a learner changes, and nothing else: policies with equal weights decide alike.

        Random generators and memory are not included, as each policy has its own. Learners that broadcast to many
        collectors send this. `state_dict` includes it.

        Returns:
            A copy that later calls do not change; here ``{}``: nothing to learn. `version` is not included.
        """
        return {}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Load weights from `get_weights`; nothing else changes, including `version`.

        Args:
            weights: Weights of a policy built with equal arguments.

        Raises:
            ArgumentError: They do not fit; nothing was set.
        """
        if weights:
            raise ArgumentError(
                f"weights of a {type(self).__name__}: expected none, got {list(weights)}; override get_weights() and "
                f"set_weights() together"
            )


def _for_rows_alone(act: Callable[..., PolicyOutput]) -> Callable[..., PolicyOutput]:
    @functools.wraps(act)
    def act_on_rows(self: Policy, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return act(self, rows)

    return act_on_rows


class AnswerLimit:
    """How many requests of asynchronous policies may be under way at a time: one limit for all policies that get it.

    Copies of a policy share its limit.

    Args:
        max_in_flight: The number, at least 1.

    Raises:
        ArgumentError: It is not positive.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = count_from(max_in_flight, f"max_in_flight={max_in_flight!r}")
        self._lock = threading.Lock()
        self._inside: set[Hashable] = set()
        self._waiting: set[Callable[[], object]] = set()

    def enter(self, request: Hashable, wake: Callable[[], object]) -> bool:
        """Count a request as under way, if there is room.

        Args:
            request: The request.
            wake: Called once, when another request has left, if there is no room.

        Returns:
            Whether there is room.
        """
        with self._lock:
            if len(self._inside) < self.max_in_flight:
                self._inside.add(request)
                return True
            self._waiting.add(wake)
            return False

    def leave(self, request: Hashable, own: Callable[[], object] | None = None) -> None:
        """Count a request as under way no longer; may be called again, from any thread.

        Args:
            request: The request.
            own: Not called, though it waits for room.
        """
        with self._lock:
            self._inside.discard(request)
            if not self._waiting:
                return
            waiting, self._waiting = self._waiting, set()
            waiting.discard(own)
        for wake in waiting:
            wake()

    def __deepcopy__(self, memo: object) -> AnswerLimit:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerLimit, (self.max_in_flight,)

    def __repr__(self) -> str:
        return f"AnswerLimit({self.max_in_flight})"


class AsyncPolicy(Policy):
    """A policy that answers row by row, slowly, many rows at a time: a client of a model server, for example.

    A collector requests an answer for each acting agent, and each env continues as soon as its own answers are there.
    Derive from this class and define ``async def answer(self, row)`` or ``ask(self, row)``; or pass a function. In a
    collector without asynchronous scheduling, `act` waits for the answers to all its rows.

    A row has the columns of `Policy.act` without the first axis (``row.obs``, ``row.action_mask``, ...), ``row.seed``,
    an int below 2**31 that follows from the collector's seed, the policy, the episode, the agent and ``t``, and
    ``row.explore``. An answer is an action, or ``(action, columns)``. Answers do not depend on the order of requests if
    they depend on the row alone.

    Args:
        answer: ``async def answer(row)``, run in an event loop in a thread of its own, the same for all policies; or
            ``ask(row)``, called by the collecting thread, which returns a `concurrent.futures.Future` at once; or an
            object with a method of one of these names. None: the class defines one.
        max_in_flight: Most requests under way at a time, or an `AnswerLimit` that several policies share. This and the
            others, if None: the attribute of this name of ``answer`` or the class.
        answer_timeout: Seconds for an answer; a later one has failed.
        on_failure: If an answer raises or is late: ``"raise"`` raises, and the next call of the collector requests it
            again; ``"restart"`` loses the episode, and its env begins another one; ``"fallback"`` sends ``fallback``,
            and the row has ``off_policy`` set.
        fallback: An action of the policy's space.
        ragged: See `Policy`.

    Raises:
        ArgumentError: An argument is wrong.

    Attributes:
        max_in_flight, answer_timeout, on_failure, fallback: As given; by default 16, None, ``"raise"``, None.
        failures: Number of answers that raised or were late.
    """

    max_in_flight: int | AnswerLimit = 16
    answer_timeout: float | None = None
    on_failure: Literal["raise", "restart", "fallback"] = "raise"
    fallback: Any = None
    failures = 0
    answer_seed = 0
    _way: tuple[bool, Any] | None = None  # whether it is an ``async def answer``, and the function
    _limit: AnswerLimit | None = None

    def __init__(
        self,
        answer: Any = None,
        *,
        max_in_flight: int | AnswerLimit | None = None,
        answer_timeout: float | None = None,
        on_failure: Literal["raise", "restart", "fallback"] | None = None,
        fallback: Any = None,
        ragged: Mapping[str, Any] | None = None,
    ) -> None:
        given = (max_in_flight, answer_timeout, on_failure, fallback, ragged)
        for name, value in zip(_SETTINGS, given, strict=True):
            if value is not None:
                setattr(self, name, value)
            elif answer is not None and hasattr(answer, name):
                setattr(self, name, getattr(answer, name))
        self._way = None if answer is None else _way(answer)
        if not (_is_overridden(self, "ask") or _is_overridden(self, "answer")) and not is_async(answer, called=True):
            raise ArgumentError(
                f"AsyncPolicy(): expected an async function of a row, a function of a row that returns a Future, or an "
                f"object with a method answer(row) or ask(row), got {answer!r:.200}"
            )
        self.check_settings()

    def check_settings(self) -> None:
        """Raise `ArgumentError` if a setting is wrong."""
        if self.on_failure not in ("raise", "restart", "fallback"):
            raise ArgumentError(f"on_failure: expected 'raise', 'restart' or 'fallback', got {self.on_failure!r:.100}")
        if self.on_failure == "fallback" and self.fallback is None:
            raise ArgumentError("on_failure='fallback': expected an action in fallback, got None")
        timeout = self.answer_timeout
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise ArgumentError(f"answer_timeout: expected seconds above 0, or None, got {timeout!r:.100}")
        self.limit  # noqa: B018 # raises if it is not positive

    @property
    def limit(self) -> AnswerLimit:
        """The limit of requests under way."""
        if self._limit is None:
            given = self.max_in_flight
            self._limit = given if isinstance(given, AnswerLimit) else AnswerLimit(given)
        return self._limit

    def reseed(self, seed: int) -> None:
        self.answer_seed = seed

    def ask(self, row: Any) -> Future[Any]:
        """Request an answer; return at once. Here: run `answer` in the event loop's thread.

        Args:
            row: The row.

        Returns:
            A `concurrent.futures.Future` of an action, or of ``(action, columns)``.
        """
        from marlvec.policies.answers import run_later  # asyncio takes its time, and others need not load it

        if self._way is None:
            return run_later(self, self.answer, row)
        is_answer, function = self._way
        future: Future[Any] = run_later(self, function, row) if is_answer else function(row)
        return future

    async def answer(self, row: Any) -> Any:
        """Answer one row.

        Args:
            row: The row.

        Returns:
            An action, or ``(action, columns)``.
        """
        raise NotImplementedError("define `async def answer(self, row)` or `ask(self, row)`")

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Request answers for all rows, and wait for them."""
        from marlvec.policies.answers import ask_all, gather

        return gather(self, ask_all(self, rows, range(len(rows)), explore=explore))

    def __repr__(self) -> str:
        given = "" if self._way is None else getattr(self._way[1], "__qualname__", repr(self._way[1]))
        return f"{type(self).__name__}({given})"


_SETTINGS = ("max_in_flight", "answer_timeout", "on_failure", "fallback", "ragged")


def _is_overridden(policy: AsyncPolicy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(AsyncPolicy, name)


def _way(given: Any) -> tuple[bool, Any]:
    if hasattr(given, "answer") or hasattr(given, "ask"):
        is_answer = hasattr(given, "answer")
        return is_answer, given.answer if is_answer else given.ask
    return inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(type(given).__call__), given


def is_async(given: Any, *, called: bool = False) -> bool:
    """Return whether an object answers row by row: an async function, or with a method ``answer`` or ``ask``.

    ``called``: also a function that returns futures.
    """
    if isinstance(given, type) or given is None:
        return False
    if inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(getattr(given, "answer", None)):
        return True
    return callable(getattr(given, "ask", None)) or (called and callable(given))


def _with_ragged(act: Callable[..., PolicyOutput]) -> Callable[..., PolicyOutput]:
    @functools.wraps(act)
    def act_ragged(self: Policy, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return ragged_output(act(self, rows, explore=explore), self.ragged)

    return act_ragged


def ragged_output(output: PolicyOutput, ragged: Mapping[str, Any]) -> PolicyOutput:
    """Return the output of `Policy.act` with the declared columns as arrays of 1-D arrays."""
    if not isinstance(output, tuple) or len(output) != 2 or not isinstance(output[1], Mapping):
        return output
    actions, columns = output
    return actions, {
        name: ragged_array(column, ragged[name], name) if name in ragged else column for name, column in columns.items()
    }


class Acts(Protocol):
    """Anything with a method ``act(rows)``."""

    def act(self, rows: Rows, /) -> PolicyOutput:
        """Choose one action per row, as `Policy.act`."""


PolicyLike = Policy | Acts | Callable[[Rows], PolicyOutput]
"""Everything that can be used as a policy; `as_policy` converts it."""


class FunctionPolicy(Policy):
    """A policy made of a function.

    Answers are in the policy's space, which connectors derive from the env's: with the default action connectors a
    bounded Box becomes [-1, 1], and `UnsquashActions` scales answers to the env's bounds (0.8 is sent to Pendulum as
    1.6). To answer in the env's own units, leave it out: ``action_connectors=[ToNumpy(), ClipActions()]``. The first
    answer outside of [-1, 1] warns.

    Args:
        function: Takes rows, returns the result of `Policy.act`.
    """

    def __init__(self, function: Callable[[Rows], PolicyOutput]) -> None:
        if not callable(function):
            raise ArgumentError(f"FunctionPolicy(): expected a function of rows, got {type(function).__name__}")
        self.function = function

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.function(rows)

    def __repr__(self) -> str:
        return f"FunctionPolicy({getattr(self.function, '__name__', repr(self.function))})"


class ObjectPolicy(Policy):
    """A policy made of an object with a method ``act(rows)``, which need not derive from `Policy`.

    ``act`` receives ``explore`` if it has such an argument. The object's ``setup``, ``reseed``, ``state_dict``,
    ``load_state_dict``, ``get_weights``, ``set_weights`` and ``version`` are used, too; all its other attributes are
    readable here.
    """

    def __init__(self, wrapped: Acts) -> None:
        self.wrapped: Any = wrapped
        self._takes_explore, self._version = takes_explore(wrapped.act), 0
        self.ragged = dict(getattr(wrapped, "ragged", {}))

    def __getattr__(self, name: str) -> Any:
        # Only called where normal lookup fails. During copying and unpickling there is no `wrapped` yet.
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    @property
    def version(self) -> int:
        return int(getattr(self.wrapped, "version", self._version))

    @version.setter
    def version(self, version: int) -> None:
        if hasattr(self.wrapped, "version"):
            self.wrapped.version = version
        else:
            self._version = version

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        if hasattr(self.wrapped, "setup"):
            self.observation_space, self.action_space = observation_space, action_space
            self.wrapped.setup(observation_space, action_space, seed=seed)
        else:
            super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        if hasattr(self.wrapped, "reseed"):
            self.wrapped.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        output: PolicyOutput = (
            self.wrapped.act(rows, explore=explore) if self._takes_explore else self.wrapped.act(rows)
        )
        return ragged_output(output, self.ragged) if self.ragged else output

    def state_dict(self) -> PolicyState:
        if not hasattr(self.wrapped, "state_dict"):
            return super().state_dict()
        state: PolicyState = self.wrapped.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.wrapped, "load_state_dict"):
            self.wrapped.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def get_weights(self) -> PolicyState:
        if not hasattr(self.wrapped, "get_weights"):
            return super().get_weights()
        weights: PolicyState = self.wrapped.get_weights()
        return weights

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        if hasattr(self.wrapped, "set_weights"):
            self.wrapped.set_weights(weights)
        else:
            super().set_weights(weights)

    def __repr__(self) -> str:
        return f"ObjectPolicy({self.wrapped!r})"


_known: weakref.WeakValueDictionary[int, ObjectPolicy] = weakref.WeakValueDictionary()  # by id of the wrapped object
_lock = threading.Lock()


def as_policy(given: PolicyLike, name: str = "policy", *, also: str = "") -> Policy:
    """Convert anything that can be used as a policy to a policy.

    A `Policy` is returned unchanged. An object with a method ``act(rows)`` becomes an `ObjectPolicy`, the same one as
    long as that is in use; a function of rows becomes a `FunctionPolicy`; an ``async def`` function of a row, or an
    object with a method ``answer(row)`` or ``ask(row)`` and none ``act``, an `AsyncPolicy`. ``name``, and further
    accepted types in ``also``, are for messages.

    Raises:
        ArgumentError: It cannot be used as a policy; the message says what to pass instead.
    """
    if isinstance(given, Policy):
        return given
    if not hasattr(given, "act") and is_async(given):
        return AsyncPolicy(given)
    what = f"{name} must be a marlvec Policy, an object with a method act(rows), or a function of rows{also}; got"
    if isinstance(given, type):
        raise ArgumentError(f"{what} the class {given.__name__}: give an instance of it, {given.__name__}(...)")
    if callable(getattr(given, "act", None)):
        with _lock:  # the wrapper keeps the object alive, so its id stays unique
            policy = _known.get(id(given))
            if policy is None:
                policy = _known[id(given)] = ObjectPolicy(given)  # type: ignore[arg-type]  # it has the method
        return policy
    if not callable(given):
        raise ArgumentError(f"{what} {given!r:.200}")
    if _is_module(given):
        raise ArgumentError(f"{what} a torch module: give TorchPolicy(module), of marlvec.interop.torch")
    try:
        signature = signature_of(given)
    except (ValueError, TypeError):  # a function written in C: a call will tell
        return FunctionPolicy(given)
    try:
        signature.bind(None)
    except TypeError:
        hint = ": call it, if it builds a policy" if not signature.parameters else ""
        raise ArgumentError(f"{what} {given!r:.200}, a function of {signature}{hint}") from None
    return FunctionPolicy(given)


def _is_module(given: object) -> bool:
    return any(base.__module__ == "torch.nn.modules.module" for base in type(given).__mro__)
