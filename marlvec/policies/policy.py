"""Policies: rows in, actions out; plain functions and objects with a method ``act``, too."""

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

__all__ = [
    "Policy",
    "PolicyOutput",
    "PolicyState",
    "takes_explore",
    "Acts",
    "FunctionPolicy",
    "ObjectPolicy",
    "PolicyLike",
    "as_policy",
]

PolicyOutput = Tree | tuple[Tree, Mapping[str, Tree]]
"""Actions (n, …), a tree in the shape of the action space; or those and a dict of further columns (n, …)."""
PolicyState = dict[str, Any]
"""What a policy has learned and remembers: numbers, texts, arrays, and dicts, lists and tuples of those."""


def takes_explore(act: Callable[..., Any]) -> bool:
    """Whether an ``act`` takes ``explore``; one that takes rows alone does not."""
    try:
        parameters = signature_of(act).parameters.values()
    except (ValueError, TypeError):  # of a function written in C
        return False
    return any(p.kind is p.VAR_KEYWORD or (p.name == "explore" and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


class Policy(ABC):
    """Chooses actions for rows.

    A subclass may leave out ``explore`` where it makes no difference: ``def act(self, rows)``.

    Attributes:
        version: Number of the weights in use; every row collected carries the one it was decided with.
        observation_space: One observation as the policy sees it; None until `setup`.
        action_space: One action as the policy gives it; None until `setup`.
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
        """Learn the spaces. Called once by the collector, before the first `act`.

        Args:
            observation_space: One row's observation, behind the agent connectors.
            action_space: One row's action, before the action connectors.
            seed: From the collector's seed, another one for each policy; passed on to `reseed`.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Begin a new random stream. Called by `setup`, and by ``collector.reset(seed=…)``; does nothing here."""

    @abstractmethod
    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Choose one action per row.

        Args:
            rows: n rows: ``obs``, ids, ``t``, ``first``, ``rewards`` (since the agent's previous row),
                ``action_mask`` (n, k) bool where the env gives one, and what the connectors added.
            explore: Whether to explore, or to act as well as it can.

        Returns:
            Actions (n, …), or ``(actions, columns)`` with further columns (n, …), e.g. ``logp``. The columns must stay
            the same from call to call; they are found in the batch under their names.
        """

    def state_dict(self) -> PolicyState:
        """Copy out all that distinguishes it from one that was just built and set up: weights, random streams, memory.

        Returns:
            A copy that later calls do not change; here ``{}``: there is nothing. `version` is not in it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; from then on it answers as that policy did.

        Args:
            state: As `state_dict` gave it, of a policy built with equal arguments and set up with equal spaces.

        Raises:
            ArgumentError: It does not fit; nothing was loaded.
        """
        if state:
            raise ArgumentError(
                f"a {type(self).__name__} keeps no state and got {list(state)}: override state_dict() and "
                f"load_state_dict() together"
            )

    def get_weights(self) -> PolicyState:
        """Copy out what a learner changes, and that alone: what makes policies of many collectors decide alike.

        Random streams and memory are not in it, as each policy has its own. Learners that broadcast to many collectors
        send this. `state_dict` has it, too.

        Returns:
            A copy that later calls do not change; here ``{}``: there is nothing to learn. `version` is not in it.
        """
        return {}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over what `get_weights` gave; nothing else changes, `version` neither.

        Args:
            weights: As `get_weights` gave them, of a policy built with equal arguments.

        Raises:
            ArgumentError: They do not fit; nothing was set.
        """
        if weights:
            raise ArgumentError(
                f"a {type(self).__name__} has no weights and got {list(weights)}: override get_weights() and "
                f"set_weights() together"
            )


def _for_rows_alone(act: Callable[..., PolicyOutput]) -> Callable[..., PolicyOutput]:
    @functools.wraps(act)
    def whatever(self: Policy, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return act(self, rows)

    return whatever


class Acts(Protocol):
    """Anything with a method ``act(rows)``."""

    def act(self, rows: Rows, /) -> PolicyOutput:
        """Choose one action per row, as `Policy.act` does."""


PolicyLike = Policy | Acts | Callable[[Rows], PolicyOutput]
"""What may stand wherever a policy is expected; `as_policy` makes a policy of it."""


class FunctionPolicy(Policy):
    """A policy made of a function.

    Args:
        function: Takes rows, returns what `Policy.act` returns.
    """

    def __init__(self, function: Callable[[Rows], PolicyOutput]) -> None:
        if not callable(function):
            raise ArgumentError(f"FunctionPolicy wants a function of rows, got {type(function).__name__}")
        self.function = function

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.function(rows)

    def __repr__(self) -> str:
        return f"FunctionPolicy({getattr(self.function, '__name__', repr(self.function))})"


class ObjectPolicy(Policy):
    """A policy made of an object that has a method ``act(rows)``, and need not derive from `Policy`.

    ``act`` is given ``explore`` if it has such an argument. Whatever else of a `Policy` the object has is used, too:
    ``setup``, ``reseed``, ``state_dict``, ``load_state_dict``, ``get_weights``, ``set_weights``, ``version``; and its
    other attributes are found here.

    Args:
        wrapped: The object.
    """

    def __init__(self, wrapped: Acts) -> None:
        self.wrapped: Any = wrapped
        self._takes_explore, self._version = takes_explore(wrapped.act), 0

    def __getattr__(self, name: str) -> Any:
        # Only called where normal lookup fails. A half-built instance (copy, unpickling) wraps nothing yet.
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
        said: PolicyOutput = self.wrapped.act(rows, explore=explore) if self._takes_explore else self.wrapped.act(rows)
        return said

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


_known: weakref.WeakValueDictionary[int, ObjectPolicy] = weakref.WeakValueDictionary()  # by id of what they wrap
_lock = threading.Lock()


def as_policy(given: PolicyLike, name: str = "policy", *, also: str = "") -> Policy:
    """Make a policy of whatever may stand for one: the one place that says what that is.

    A `Policy` stays what it is. An object with a method ``act(rows)`` becomes an `ObjectPolicy`, the same one as long
    as that is in use; a function of rows a `FunctionPolicy`.

    Args:
        given: One of those.
        name: What it is, for messages.
        also: What else it may be where it is asked for, likewise.

    Raises:
        ArgumentError: It is none of those; says what to give instead.
    """
    if isinstance(given, Policy):
        return given
    what = f"{name} must be a marlvec Policy, an object with a method act(rows), or a function of rows{also}; got"
    if isinstance(given, type):
        raise ArgumentError(f"{what} the class {given.__name__}: give an instance of it, {given.__name__}(...)")
    if callable(getattr(given, "act", None)):
        with _lock:  # the object lives as long as what wraps it, so no other object has its id
            policy = _known.get(id(given))
            if policy is None:
                policy = _known[id(given)] = ObjectPolicy(given)  # type: ignore[arg-type]  # it has the method
        return policy
    if not callable(given):
        raise ArgumentError(f"{what} {given!r:.200}")
    if _is_module(given):
        raise ArgumentError(f"{what} a torch module: give TorchPolicy(module), of marlvec.interop.torch.policy")
    try:
        signature = signature_of(given)
    except (ValueError, TypeError):  # of a function written in C; calling it will show
        return FunctionPolicy(given)
    try:
        signature.bind(None)
    except TypeError:
        hint = ": call it, if it builds a policy" if not signature.parameters else ""
        raise ArgumentError(f"{what} {given!r:.200}, a function of {signature}{hint}") from None
    return FunctionPolicy(given)


def _is_module(given: object) -> bool:
    return any(base.__module__ == "torch.nn.modules.module" for base in type(given).__mro__)
