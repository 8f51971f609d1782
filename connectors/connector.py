"""`Connector`: the base class; rows in, rows out."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any, Self, TypeVar, cast

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.arguments import signature_of
from marlvec.connectors.parameters import check_parameters
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, SerialisationError, StateError
from marlvec.serialization.name_table import CLASSES
from marlvec.serialization.values import Config, decode, encode
from marlvec.spaces.equality import difference

__all__ = ["ActionConnector", "AgentConnector", "Connector", "EnvIds", "LearnerConnector", "State", "from_setup"]

State = dict[str, Any]
"""What a connector remembers: plain dicts and lists of arrays and numbers."""

EnvIds = NDArray[np.integer[Any]] | Sequence[int]

T = TypeVar("T")


class _Unset:
    """Stands on the class for an attribute that an instance does not have yet."""

    def __get__(self, connector: Connector | None, owner: type[Connector]) -> _Unset:
        if connector is not None:
            raise connector._not_set_up()
        return self


def from_setup(kind: type[T]) -> T:
    """Declare an attribute of instances, such as ``_tree``, that `Connector.setup` assigns.

    Reading it costs 40 ns more than reading another one: in a call, once.

    Raises:
        StateError: It is read before; says that the connector does not know its space.
    """
    return cast("T", _Unset())


class Connector(ABC):
    """Transforms all rows of a policy in one call.

    What every connector keeps to:

    * It is batched: one call takes rows of any subset of envs and agents in any order, and each row comes out as it
      would have in a call of its own. No (env, agent) pair appears twice in one call.
    * Rows in, as many rows out, in the same order, unless `changes_length` is set.
    * Arrays it was given are never written to.
    * Every observation passes through exactly once, an agent's last one (``rows.last``) included.
    * After an exception its state is whole, but in a pipeline the pieces before it have taken the rows in already.

    A subclass that stores each constructor argument under the argument's own name gets its `params`, repr and
    `to_config` for free. So does one that is a dataclass, with ``@dataclass(eq=False, repr=False)``.

    Attributes:
        training: Whether running statistics are learnt (True) or frozen (False).
        agents: Names of the env's agents in the order of ``agent_index``; ``()`` where not known.
        action_space: Space of one action of the policy; None where not known.
        policy_id: Id of the policy whose rows all of these are, in a collector; None elsewhere.
        changes_length: Whether this connector may return another number of rows than it was given.
        across_agents: Whether a row's outcome depends on other agents of its env (learner side: on other fragments of
            its batch), so that those belong in one call. On the agent side that call may then hold last rows of agents
            that ended beside the next rows of agents that go on.
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
            CLASSES.add(cls)  # our own need no registration

    def __post_init__(self) -> None:
        check_parameters(self)  # of marlvec's own connectors, which are dataclasses

    @abstractmethod
    def __call__(self, rows: Rows) -> Rows:
        """Transform rows."""

    @property
    def is_identity(self) -> bool:
        """Whether, with the space it was set up for, it returns all rows as they are; a pipeline then goes past it."""
        return False

    @property
    def only_converts(self) -> bool:
        """Whether all it does, to actions that are arrays in the env's form already, is to make them read-only.

        Where that goes for a whole pipeline, and for a policy's answer, the collector does so itself.
        """
        return False

    @property
    def policy_columns(self) -> tuple[str, ...]:
        """Columns of the policy's output, beside ``actions``, that `on_policy_output` needs in every row.

        In a collector the policy then also acts on rows whose action is given (``random_steps``, logged actions). The
        given action replaces the policy's action; these columns are the policy's.
        """
        return ()

    @property
    def name(self) -> str:
        """Name it asks for in a pipeline; the class's name unless set. A pipeline adds ``_2`` where it is taken."""
        return self._name if self._name is not None else type(self).__name__

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    def setup(self, space: Space[Any]) -> None:
        """Learn the space and precompute. Called when a pipeline is bound and after each of its edits.

        State must survive a space that is equal. Values remembered from another space are forgotten, since they need
        not be in this one; what was learnt stays where shapes and dtypes did.

        Args:
            space: Agent side: the space of one observation at this connector's input. Action side: the space of one
                action at its output, the side of the env.
        """

    def reset(self, env_ids: EnvIds | None = None) -> None:
        """Forget the running episodes of these envs: they ended or were lost.

        Args:
            env_ids: (k,) ints; None for every env.
        """

    def on_policy_output(self, rows: Rows) -> None:
        """See what the policy answered: the rows it was given, with its ``actions`` and the columns it added."""

    def state_dict(self) -> State:
        """Copy of all it remembers, exact; ``{}`` where it remembers nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ArgumentError: The state is not one of this connector's.
        """
        if state:
            raise ArgumentError(f"{self.name} has no state, got {list(state)}")

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Join the states of copies that worked on different data, into one that all of them can load.

        Only what was learnt is joined. What belongs to running episodes stays with the copy that runs them, so the
        answer is ``{}`` here, and loading ``{}`` through a pipeline changes nothing.

        Returns:
            A state for `load_state_dict`.
        """
        return {}

    def hand_over(self) -> State:
        """Give what was learnt, for `merge_states` of copies elsewhere, and go on learning until `take_merged`.

        Where many collectors learn at once, each hands over, one place joins, and all take what was merged while they
        are collecting. What is learnt between the two must come out once: neither lost nor counted twice. So override
        the three together. Here it is `state_dict` where `merge_states` is overridden, else ``{}``.

        Returns:
            A state for `merge_states`; ``{}`` where nothing is learnt.
        """
        return {} if type(self).merge_states is Connector.merge_states else self.state_dict()

    def take_merged(self, state: Mapping[str, Any]) -> None:
        """Take over what `merge_states` made of what all have handed over, this copy too or another in its place.

        Here it loads the state, and what was learnt since `hand_over` is gone.

        Args:
            state: The merged one; ``{}`` changes nothing.

        Raises:
            ArgumentError: It is not one of this connector's.
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

    def params(self) -> dict[str, Any]:
        """Constructor arguments, read back from the attributes of the same names."""
        names = list(signature_of(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def to_config(self) -> Config:
        """Say what it was built with, for `from_config`: JSON-able data, but for arrays, which stand as they are.

        What it remembers is not in it; that is `state_dict`.

        Returns:
            ``{"connector": name, …arguments}``.

        Raises:
            SerialisationError: Its class, or a function among its arguments, is not registered; an argument has no
                such form, or is not kept under its own name.
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
        """Build what `to_config` was asked of.

        Returns:
            A new connector or pipeline, which has learnt nothing yet.

        Raises:
            ArgumentError: This is no config, or one of something that is no ``cls``.
            RegistryError: Nothing is registered under a name in it.
            Exception: Whatever a constructor raises.
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


class AgentConnector(Connector):
    """Stands before the policy: works on ``obs``, ``rewards`` and the columns it adds."""

    def output_space(self, space: Space[Any]) -> Space[Any]:
        """Space of one observation after this connector, for ``space`` before it. Pure: changes nothing.

        Returns:
            The space of ``obs`` after this connector.

        Raises:
            UnsupportedSpaceError: It cannot work on this space; says what to do.
        """
        return space


class ActionConnector(Connector):
    """Stands behind the policy: works on ``actions_for_env``; ``actions`` stays what the policy gave.

    One that explores, in the policy's own space, also replaces ``actions_executed``, as `EpsilonGreedy` does.
    """

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        """Space of one action before this connector, for ``space`` after it. Pure: changes nothing.

        Returns:
            The space in which the policy acts, where the next connector or the env takes ``space``.

        Raises:
            UnsupportedSpaceError: It cannot work on this space; says what to do.
        """
        return space


class LearnerConnector(Connector):
    """Stands behind the collector: works on the rows of a finished batch, one policy's in one call.

    Its rows are transitions: the columns are those of a `SampleBatch` (``obs``, ``actions``, ``rewards``, ``next_obs``,
    ``terminated``, ``truncated``, ``t``, ``eps_id``, ``unroll_id``, ``env_id``, ``agent_index``, …). Rows of equal
    ``unroll_id`` stand together, ascending in time.
    """

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        """See all policies' rows of the batch, before any of them is transformed; does nothing here.

        Args:
            batch: Policy id to its rows.
        """


def _shown(value: Any) -> str:
    return str(value.__name__) if inspect.isroutine(value) else repr(value)  # not its address
