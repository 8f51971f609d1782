"""Policies: rows in, actions out; also from plain functions and objects with a method ``act``."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gymnasium.spaces import Space

from marlvec.arguments import signature_of
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.trees import Tree

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
        observation_space: Space of one observation, after the agent connectors; None until `setup`.
        action_space: Space of one action, before the action connectors; None until `setup`.
    """

    version: int = 0
    observation_space: Space[Any] | None = None
    action_space: Space[Any] | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        act = cls.__dict__.get("act")
        if inspect.isfunction(act) and not takes_explore(act):
            cls.act = _for_rows_alone(act)  # type: ignore[method-assign]  # callers may pass ``explore`` to it

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
        return output

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
    long as that is in use; a function of rows becomes a `FunctionPolicy`. ``name``, and further accepted types in
    ``also``, are for messages.

    Raises:
        ArgumentError: It cannot be used as a policy; the message says what to pass instead.
    """
    if isinstance(given, Policy):
        return given
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
