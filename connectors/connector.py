"""`Connector` and its three sides: what a connector is, its state, its config; bounds of its parameters."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from reprlib import repr as short
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast, get_args, get_origin

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.arguments import signature_of, whole_number
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, SerialisationError, StateError
from marlvec.serialization.values import CLASSES, Config, decode, encode
from marlvec.spaces.equality import difference
from marlvec.trees import Tree

State = dict[str, Any]
"""What a connector remembers: plain dicts and lists of arrays and numbers."""

EnvIds = NDArray[np.integer[Any]] | Sequence[int]

T = TypeVar("T")


class _Unset:
    """Class attribute in place of an instance attribute that `setup` has not set yet."""

    def __get__(self, connector: Connector | None, owner: type[Connector]) -> _Unset:
        if connector is not None:
            raise connector._not_set_up()
        return self


def from_setup(kind: type[T]) -> T:
    """Declare an attribute of instances, such as ``_tree``, that `Connector.setup` assigns; StateError before.

    Reading it costs 40 ns more than a plain attribute: read it once per call.
    """
    return cast("T", _Unset())


class Connector(ABC):
    """Transforms all rows of a policy in one call.

    The contract of every connector:

    * It is batched: one call takes rows of any subset of envs and agents in any order, and each row's result is the
      same as in a call of its own. No (env, agent) pair appears twice in one call.
    * It returns as many rows as it gets, in the same order, unless `changes_length` is set.
    * It never writes to its arguments' arrays.
    * Every observation passes through it exactly once, an agent's last one (``rows.last``) included.
    * After an exception its state is consistent, but earlier pieces of its pipeline have already processed the rows.

    Subclasses that store each constructor argument under the argument's name inherit `params`, repr and `to_config`; so
    do dataclasses with ``@dataclass(eq=False, repr=False)``.

    Attributes:
        training: Whether running statistics are learnt (True) or frozen (False).
        agents: Names of the env's agents in the order of ``agent_index``; ``()`` if unknown.
        action_space: Space of one action of the policy; None if unknown.
        policy_id: Id of the policy of all rows, in a collector; None elsewhere.
        changes_length: Whether the connector may return another number of rows than it gets.
        across_agents: Whether a row's result depends on other agents of its env (learner side: on other fragments of
            its batch), which must then be in the same call. On the agent side such a call may hold last rows of ended
            agents together with next rows of other agents.
    """

    training: bool = True
    agents: tuple[str, ...] = ()
    action_space: Space[Any] | None = None
    policy_id: str | None = None
    changes_length: bool = False
    across_agents: bool = False
    _name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("marlvec.connectors."):
            CLASSES.add(cls)  # marlvec's connectors need no registration

    def __post_init__(self) -> None:
        check_parameters(self)  # of marlvec's own connectors, which are dataclasses

    @abstractmethod
    def __call__(self, rows: Rows) -> Rows:
        """Transform rows."""

    @property
    def is_identity(self) -> bool:
        """Whether, for its space, it returns all rows unchanged; a pipeline then skips it."""
        return False

    @property
    def only_converts(self) -> bool:
        """Whether, for actions that are already arrays in the env's form, its only effect is to make them read-only.

        If this holds for a whole pipeline and a policy's answer, the collector makes them read-only itself.
        """
        return False

    @property
    def policy_columns(self) -> tuple[str, ...]:
        """Columns of the policy's output, other than ``actions``, that `on_policy_output` needs in every row.

        In a collector the policy then also acts on rows whose action is given (``random_steps``, logged actions). The
        given action replaces the policy's action; these columns are the policy's.
        """
        return ()

    @property
    def name(self) -> str:
        """Its name in a pipeline; the class's name unless set. A pipeline adds ``_2`` if the name is taken."""
        return self._name if self._name is not None else type(self).__name__

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    def setup(self, space: Space[Any]) -> None:
        """Set the space and precompute. Called when a pipeline is bound and after each of its edits.

        State must survive an equal space. Values stored from another space are dropped, as they may not fit; learnt
        statistics stay if shapes and dtypes stay.

        Args:
            space: Agent side: the space of one observation at this connector's input. Action side: the space of one
                action at its output, the side of the env.
        """

    def reset(self, env_ids: EnvIds | None = None) -> None:
        """Drop the state of these envs' running episodes, which ended or were lost; None for every env."""

    def on_policy_output(self, rows: Rows) -> None:
        """Receive the policy's rows with its answer: ``actions`` and the columns it added."""

    def state_dict(self) -> State:
        """Return an exact copy of its state; ``{}`` without state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`.

        Raises:
            ArgumentError: The state does not fit this connector.
        """
        if state:
            raise ArgumentError(f"{self.name} has no state, got {list(state)}")

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Merge states of copies that saw different data, into a state that all can load.

        Only learnt statistics are merged; state of running episodes stays in its copy. The default is ``{}``, and
        loading ``{}`` through a pipeline changes nothing.

        Returns:
            A state for `load_state_dict`.
        """
        return {}

    def hand_over(self) -> State:
        """Return learnt statistics for a merge elsewhere, and continue learning until `take_merged`.

        With many collectors, each hands over, the head merges, and all load the merged state while they collect. Data
        learnt in between must count exactly once, so override the three methods together. The default is
        `state_dict` if `merge_states` is overridden, else ``{}``.

        Returns:
            A state for `merge_states`; ``{}`` without statistics.
        """
        return {} if type(self).merge_states is Connector.merge_states else self.state_dict()

    def take_merged(self, state: Mapping[str, Any]) -> None:
        """Load the state that `merge_states` made of all handed-over states, this copy's included; ``{}``: no change.

        The default loads the state, and drops data learnt since `hand_over`.

        Raises:
            ArgumentError: The state does not fit this connector.
        """
        if state:
            self.load_state_dict(state)

    def train(self) -> Self:
        """Learn running statistics from now on."""
        self.training = True
        return self

    def eval(self) -> Self:
        """Freeze running statistics from now on."""
        self.training = False
        return self

    def follow_run(self, run_seed: int | None) -> None:
        """Have its `RowRandom` draws depend on a seed beside its own; a collector passes one from its own seed.

        Every `RowRandom` and connector among its attributes gets the seed.

        Args:
            run_seed: From 0 to 2**64 - 1; None: draws as outside of collectors.
        """
        for value in vars(self).values():
            if hasattr(type(value), "follow_run"):
                value.follow_run(run_seed)

    def params(self) -> dict[str, Any]:
        """Constructor arguments, read back from the attributes of the same names."""
        names = list(signature_of(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def to_config(self) -> Config:
        """Return its arguments for `from_config`: JSON data, except for arrays, which are not converted.

        Its state is not included: see `state_dict`.

        Returns:
            ``{"connector": name, …arguments}``.

        Raises:
            SerialisationError: Its class, or a function among its arguments, is not registered; an argument cannot be
                converted, or is not stored under its name.
        """
        name = CLASSES.name_of(type(self))
        if name is None:
            raise SerialisationError(
                f"{type(self).__name__} is not registered: write @register_connector over the class, also where it is "
                f"read back"
            )
        config: Config = {"connector": name, **self._config_parts()}
        if self._name is not None:
            config["name"] = self._name
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build a connector from the result of `to_config`.

        Returns:
            A new connector or pipeline, without learnt state.

        Raises:
            ArgumentError: It is not a config, or not of a ``cls``.
            RegistryError: A name in it is not registered.
            Exception: Raised by a constructor.
        """
        if not isinstance(config, Mapping) or not isinstance(config.get("connector"), str):
            raise ArgumentError(
                f"expected a dict that names its 'connector', as to_config() gives, got {short(config)}"
            )
        found = CLASSES.find(config["connector"])
        if not issubclass(found, cls):
            raise ArgumentError(f"expected the config of a {cls.__name__}, got that of a {found.__name__}")
        try:
            built: Self = found._from_parts(config)
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"this is no config of a {found.__name__}: {error!r:.300}") from error
        if "name" in config:
            built.name = str(config["name"])
        return built

    def _config_parts(self) -> Config:
        params = self.params()
        if lost := [name for name in signature_of(type(self)).parameters if name not in params]:
            raise SerialisationError(
                f"{type(self).__name__}: expected attributes named like its arguments {lost}: store them, or return "
                f"them from params()"
            )
        return {"args": {key: encode(value, f"{key} of {self.name}") for key, value in params.items()}}

    @classmethod
    def _from_parts(cls, config: Mapping[str, Any]) -> Self:
        args, signature = decode(config["args"]), signature_of(cls)
        if not isinstance(args, dict):
            raise TypeError(f"expected a dict of arguments, got {short(args)}")
        if unknown := [name for name in args if name not in signature.parameters]:
            known = list(signature.parameters)
            raise ArgumentError(f"{cls.__name__} takes no {short(unknown)}; its arguments are {known}")
        bound = inspect.BoundArguments(signature, args)
        return cls(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        defaults = signature_of(type(self).__init__).parameters
        changed = (f"{k}={_shown(v)}" for k, v in self.params().items() if difference(v, defaults[k].default))
        return f"{type(self).__name__}({', '.join(changed)})"

    def _not_set_up(self) -> StateError:
        return StateError(
            f"{self.name} does not know its space: call bind(space) on its pipeline, or setup(space); in a Collector "
            f"whose policies are assigned to agents when episodes begin, call its reset() first"
        )


def is_left_out(piece: Connector) -> bool:
    """Return whether a call can skip the piece."""
    return holds(piece, "is_identity")


def holds(piece: Connector, what: str) -> bool:
    """Return whether a property holds for the piece; a base class's property does not hold for an overridden call."""
    if not getattr(piece, what):
        return False
    said, called = (
        next(k for k, cls in enumerate(type(piece).__mro__) if name in vars(cls)) for name in (what, "__call__")
    )
    return said <= called


def overrides(piece: Connector, name: str) -> bool:
    """Return whether a piece has its own version of a method that does nothing by default."""
    return getattr(getattr(piece, name), "__func__", None) is not getattr(Connector, name)


class AgentConnector(Connector):
    """Agent side, before the policy: changes ``obs`` and ``rewards``, and adds columns."""

    def output_space(self, space: Space[Any]) -> Space[Any]:
        """Return the space of one observation after this connector, for ``space`` before it. Changes nothing.

        Returns:
            The space of ``obs`` after this connector.

        Raises:
            UnsupportedSpaceError: The connector does not support the space; the text has a remedy.
        """
        return space


class ActionConnector(Connector):
    """Action side, after the policy: changes ``actions_for_env``; ``actions`` stay the policy's.

    The chain writes the changed actions of your connectors to ``actions_executed``, in the policy's space, so that
    off-policy learners get the action that was taken. Set ``is_choice = False`` in connectors whose changes do not
    count as the agent's choice: conversions in one and the same space (a sign, an order), and changes by the env itself
    (`StickyActions`). A connector with another `policy_space` is always a conversion.

    Attributes:
        is_choice: Whether changed actions are the agent's own, and go into ``actions_executed``.
        undone_by: The connectors before this one whose `undo`, last first, turns an action at this place into the
            policy's space; None if one of them has no `undo`. Set by the pipeline.
    """

    is_choice: bool = True
    undone_by: tuple[ActionConnector, ...] | None = ()

    def undo(self, actions: Tree) -> Tree:
        """Convert actions back: the inverse of this connector. Override it in conversions that have an inverse.

        Connectors behind it that change actions need it for ``actions_executed``. The default returns ``actions``, for
        connectors that convert nothing.

        Args:
            actions: (n, …) actions after this connector.

        Returns:
            (n, …) actions before it that it turns into ``actions``.
        """
        return actions

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        """Return the space of one action before this connector, for ``space`` after it. Changes nothing.

        Returns:
            The policy's space, if the next connector or the env takes ``space``.

        Raises:
            UnsupportedSpaceError: The connector does not support the space; the text has a remedy.
        """
        return space


class LearnerConnector(Connector):
    """Learner side, after the collector: transforms the rows of a finished batch, one policy per call.

    Its rows are transitions: the columns are those of a `SampleBatch` (``obs``, ``actions``, ``rewards``, ``next_obs``,
    ``terminated``, ``truncated``, ``t``, ``eps_id``, ``unroll_id``, ``env_id``, ``agent_index``, …). Rows of equal
    ``unroll_id`` are adjacent, ascending in time.
    """

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        """Receive all policies' rows of the batch, by policy id, before any is transformed; does nothing by default."""


def _shown(value: Any) -> str:
    return str(value.__name__) if inspect.isroutine(value) else repr(value)  # not its address


class Range(NamedTuple):
    """The legal values of a parameter."""

    text: str  # description for messages
    read: Callable[[Any], Any]  # returns a legal value in its stored form, and None for an illegal one


def _whole(least: int) -> Range:
    def read(value: Any) -> int | None:
        number = whole_number(value)
        return number if number is not None and number >= least else None

    return Range(f"a whole number of at least {least}", read)


def _number(text: str, holds: Callable[[Any], Any]) -> Range:
    def read(value: Any) -> Any:
        try:
            return value if holds(value) else None
        except TypeError:  # not a number
            return None

    return Range(text, read)


PositiveInt = Annotated[int, _whole(1)]
NonNegativeInt = Annotated[int, _whole(0)]
PositiveFloat = Annotated[float, _number("above 0", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, _number("at least 0", lambda x: x >= 0)]
UnitFloat = Annotated[float, _number("from 0 to 1", lambda x: 0 <= x <= 1)]
Probability = Annotated[float, _number("a probability in [0, 1]", lambda x: 0 <= x <= 1)]


def check_parameters(owner: Any) -> None:
    """Check an object's fields for which its classes in ``marlvec.connectors`` declare a range or a Literal."""
    for name, legal, optional in _ranges(type(owner)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(owner, name)
        if value is None and optional:
            continue
        kept = legal.read(value)
        if kept is None:
            raise ArgumentError(f"{name} must be {legal.text}{', or None' if optional else ''}, got {value!r}")
        setattr(owner, name, kept)


@cache
def _ranges(cls: type[Any]) -> tuple[tuple[str, Range, bool], ...]:
    """Return (name, range, whether None is legal) of each field with a range."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("marlvec.connectors.")]
    hints = [item for base in ours for item in inspect.get_annotations(base, eval_str=True).items()]
    found = ((name, _range_of(hint), type(None) in get_args(hint)) for name, hint in hints)
    return tuple((name, legal, optional) for name, legal, optional in found if legal is not None)


def _range_of(hint: Any) -> Range | None:
    if get_origin(hint) is Literal:
        *others, last = (f'"{choice}"' for choice in get_args(hint))
        return Range(f"{', '.join(others)} or {last}", lambda value: value if value in get_args(hint) else None)
    marks = (mark for part in (hint, *get_args(hint)) for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in marks if isinstance(mark, Range)), None)
