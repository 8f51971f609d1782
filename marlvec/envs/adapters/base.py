"""`Adapter`: base of all adapters; checks of an env's return values; envs that reset themselves."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, ClassVar, NamedTuple, NoReturn

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.arguments import signature_of
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import COMMON, AutoresetMode, Info
from marlvec.envs.user_env import UserEnvState, one_each, wrapper_chain
from marlvec.errors import ArgumentError, ContractError, ContractWarning
from marlvec.spaces import SpaceTree, describe_difference
from marlvec.spaces.action_masks import split_action_mask
from marlvec.spaces.equality import short

AgentId = Hashable
"""An agent's name in the user's env; usually a string, in RLlib-style envs often an int."""

_REAL = (bool, int, float, np.bool_, np.integer, np.floating)
_FLAG = (bool, np.bool_)


def contract_error(env: str, call: str, problem: str) -> NoReturn:
    """Raise a `ContractError` with the env and the call that broke the contract."""
    raise ContractError(f"{env}.{call}: {problem}")


@dataclass(frozen=True)
class Sink:
    """Where the rules go that the results of one call of an env break; this one raises at the first.

    `check_env` has one that collects them, so code after a `report` must go on with what it has. All take the name of
    the check in `check_env`, what is wrong, what was expected, what came, and what to change. Findings with equal
    ``check``, ``path`` and ``kind`` (by default the advice) are one. ``minor``: marlvec corrects it silently;
    ``breaks``: what is found in the rest of the episode may be a consequence.
    """

    env: str
    call: str  # e.g. "step()"

    collects: ClassVar[bool] = False

    def fault(
        self,
        check: str,
        subject: str,
        expected: str,
        got: str,
        change: str = "",
        *,
        path: str = "",
        kind: str = "",
        minor: bool = False,
        breaks: bool = False,
    ) -> NoReturn:
        """Raise the error of a rule without which the results cannot be read on."""
        advice = f". {change[0].upper()}{change[1:]}" if change else ""
        contract_error(self.env, self.call, f"{subject}: expected {expected}, got {got}{advice}")

    def report(self, *broken: Any, **more: Any) -> None:
        """Report a rule that is broken; arguments as those of `fault`."""
        self.fault(*broken, **more)

    def remark(self, *broken: Any, **more: Any) -> None:
        """Report a rule that adapters do not insist on; arguments as those of `fault`."""


def missing_hint(declaration: str) -> str:
    """Return what to do about an attribute that an env does not have, for the end of an error message."""
    return (
        f". Set self.{declaration} in __init__(); or, if the env has it only after reset(), write "
        f"make(…, lenient=True), which resets it once when it is built"
    )


VECTOR_HINT = "if it is one number per objective, combine them: marlvec.envs.adapt(env, reward_weights=[…])"
"""What to do about a reward with several numbers, for the end of an error message."""


def only_element(value: Any) -> Any:
    """Return the element of an array (numpy's or another library's) of one real number or bool; else None."""
    if not hasattr(value, "__array__"):
        return None
    try:
        array = np.asarray(value)
    except Exception:  # a tensor on a GPU, or with a gradient
        return None
    return array.reshape(())[()] if array.size == 1 and array.dtype.kind in "biuf" else None


def zero_or_one(value: Any) -> bool | None:
    """Convert an int, or an array of one int or bool, to a flag; None if it is not 0 or 1."""
    number = value if isinstance(value, int) else only_element(value)
    return bool(number) if isinstance(number, (int, np.integer, np.bool_)) and number in (0, 1) else None


def as_reward(value: Any, sink: Sink, agent: AgentId, vector_hint: str = "", *, lenient: bool = False) -> float:
    """Convert one agent's reward to a float; NaN and infinities pass, since `ObservationValidator` checks them.

    `vector_hint`: advice for a reward with one number per objective; `lenient`: an array of one number is accepted.
    """
    plain = value[()] if isinstance(value, np.ndarray) and value.shape == () else value
    if isinstance(plain, _REAL):
        if (plain is not value or plain.__class__ is np.bool_) and not lenient:
            sink.remark("rewards", f"reward of agent {agent!r}", "a real number", _text(value), minor=True)
        try:
            return float(plain)
        except OverflowError:
            sink.report("rewards", f"reward of agent {agent!r}", "a real number that a float can hold", _text(value))
            return 0.0
    number = only_element(value)
    if number is None or not lenient:
        change = vector_hint if isinstance(value, (list, tuple, np.ndarray)) else ""
        if number is not None:
            change = "return float(reward), or write make(…, lenient=True), which accepts an array of one number"
        sink.report("rewards", f"reward of agent {agent!r}", "a real number", _text(value), change)
    return 0.0 if number is None else float(number)


def as_flag(
    value: Any, sink: Sink, agent: AgentId, what: str, several_hint: str = "", *, lenient: bool = False
) -> bool:
    """Convert one agent's termination or truncation flag to a bool.

    `several_hint`: advice for a value with several flags; `lenient`: 0, 1 and arrays of one flag are accepted.
    """
    if isinstance(value, _FLAG):
        return bool(value)
    flag = zero_or_one(value)
    if flag is None or not lenient:
        change = several_hint if isinstance(value, (list, tuple, np.ndarray)) else ""
        if flag is not None:
            change = "return bool(flag), or write make(…, lenient=True), which accepts 0 and 1, and arrays of one flag"
        sink.report("flags", f"{what} of agent {agent!r}", "a bool", _text(value), change, kind=what)
    return bool(np.any(value)) if flag is None else flag


def _text(value: Any) -> str:
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    return f"{type(value).__name__}{shape} {short(value)}"


def mapping(value: Any, sink: Sink, what: str, check: str = "results") -> Mapping[Any, Any]:
    """Check that a part of an env's result is a dict, mostly one keyed by agent."""
    if value.__class__ is dict or isinstance(value, Mapping):  # the first is quicker
        found: Mapping[Any, Any] = value
        return found
    sink.fault(check, what, "a dict", _text(value), "" if check == "infos" else f"return a dict as {what}")


def infos_in(value: Any, sink: Sink, what: str) -> Mapping[Any, Any]:
    """Check that infos are a dict; empty if they are not, and the sink collects."""
    if value.__class__ is dict or isinstance(value, Mapping):
        found: Mapping[Any, Any] = value
        return found
    sink.report("infos", what, "a dict", _text(value))
    return {}


def agent_ids(found: Any, env: str, where: str) -> list[AgentId]:
    """Check that an env's list of agents has entries that can be keys of dicts."""
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        contract_error(env, where, f"expected a list of agents, got {type(found).__name__}: {short_repr(found)}")
    ids = list(found)
    for agent in ids:
        if not _is_key(agent):
            contract_error(
                env, where, f"expected strings or other keys of dicts, got {type(agent).__name__}: {agent!r}"
            )
    return ids


def _is_key(agent: Any) -> bool:
    """Return whether an agent can be a key: a tuple that contains a list is Hashable by its class, but has no hash."""
    try:
        hash(agent)
    except TypeError:
        return False
    return True


def refuse_unknown(table: Iterable[Any], known: Mapping[Any, int], sink: Sink, what: str) -> None:
    """Check that a table has no unknown agents."""
    for agent in table:
        try:
            if agent in known:
                continue
            tell = sink.report
        except TypeError:  # not hashable
            tell = sink.fault
        tell("agents", what, f"agents of {names_of(known)}", f"the unknown agent {agent!r}")


def live_agents(agents: Any, known: Mapping[Any, int], sink: Sink) -> frozenset[AgentId]:
    """Check an env's list of live agents, and return it as a set."""
    is_list = isinstance(agents, (list, tuple))
    if not is_list and (sink.collects or not isinstance(agents, Iterable)):
        change = "keep a list of agents in env.agents"
        sink.fault("agents", "env.agents", "a list of agents", type(agents).__name__, change)
    refuse_unknown(agents, known, sink, "env.agents")
    found = frozenset(agents)
    if sink.collects and len(found) != len(agents):
        sink.fault("agents", "env.agents", "every agent once", short(agents), "name each agent once in env.agents")
    return found


def names_of(agents: Iterable[Any], limit: int = 12) -> str:
    """List agents for a message, at most ``limit``."""
    shown = [repr(agent) for agent in agents]
    return ", ".join(shown[:limit]) + (f", … ({len(shown)} in all)" if len(shown) > limit else "")


def two_values(result: Any, sink: Sink) -> tuple[Any, Any]:
    """Return observations and infos of a reset that are dicts by agent; old envs return the observations alone."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    if not isinstance(result, Mapping):
        sink.fault(
            "results", "the result", "a tuple of 2", _size(result), "return (observations, infos)", kind=sink.call
        )
    remark_old_reset(result, sink)
    return result, {}


def remark_old_reset(result: Any, sink: Sink) -> None:
    """Remark that a reset returned observations alone."""
    _remark_old(sink, "a tuple of 2", f"{type(result).__name__} without infos", "return (observations, infos)")


def _remark_old(sink: Sink, expected: str, got: str, change: str) -> None:
    old = f"{got}: the old API, as of Gym before 0.26"
    sink.remark("results", "the result", expected, old, change, kind=sink.call, minor=True)


def five_values(result: Any, sink: Sink) -> Sequence[Any]:
    """Return observation, reward, terminated, truncated and info of a step; convert the four values of an old env.

    An old env's done means terminated, unless ``info["TimeLimit.truncated"]`` is True.
    """
    if (result.__class__ is tuple and len(result) == 5) or _step_length(result, sink) == 5:
        five: Sequence[Any] = result
        return five
    obs, reward, done, info = result
    flags = (False, done) if _ran_out_of_time(info) else (done, False)
    return obs, reward, *flags, info


def five_dicts(
    result: Any, sink: Sink, tables: Sequence[str], *, team: Sequence[Any] = (), ends: Sequence[Any] = ()
) -> list[Mapping[Any, Any]]:
    """As `five_values`, for results that are dicts by agent; `tables` names the first four, for messages.

    A reward that is one number is the reward of each agent of ``team``, and one flag is that of each key in ``ends``;
    with an empty ``team`` both are errors.
    """
    if _step_length(result, sink) == 4:
        obs, rewards, found, infos = result
        dones, infos = _shared(found, ends, sink, "dones"), infos_in(infos, sink, "infos")
        late = {agent for agent in dones if _ran_out_of_time(infos.get(agent))}
        over = {agent: False if agent in late else done for agent, done in dones.items()}
        cuts = {agent: done if agent in late else False for agent, done in dones.items()}
        result = obs, rewards, over, cuts, infos
    *parts, infos = result
    shared: tuple[Sequence[Any], ...] = ((), team, ends, ends)
    checked = [_shared(part, keys, sink, what) for part, what, keys in zip(parts, tables, shared, strict=True)]
    return [*checked, infos_in(infos, sink, "infos")]


def _shared(value: Any, keys: Sequence[Any], sink: Sink, what: str) -> Mapping[Any, Any]:
    """Return a dict by agent; a number is that of each of ``keys``, if there are any."""
    return dict.fromkeys(keys, value) if keys and isinstance(value, _REAL) else mapping(value, sink, what)


def _ran_out_of_time(info: Any) -> bool:
    return isinstance(info, Mapping) and info.get("TimeLimit.truncated", False) is True


_FIVE = "return (observations, rewards, terminations, truncations, infos)"


def _step_length(result: Any, sink: Sink) -> int:
    size = len(result) if isinstance(result, (tuple, list)) else -1
    if size not in (4, 5):
        sink.fault("results", "the result", "a tuple of 5, or of the old API's 4", _size(result), _FIVE, kind=sink.call)
    if size == 4:
        _remark_old(sink, "a tuple of 5", "a tuple of 4 with one value for terminations and truncations", _FIVE)
    elif result.__class__ is list:
        sink.remark("results", "the result", "a tuple of 5", "a list", _FIVE, kind=sink.call)
    return size


def _size(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else _text(result)


MAX_DEPTH = 32
"""Maximum nesting of dicts in an info; guards against a dict that contains itself."""

# Values that an env may change later are copied; all others are passed on unchanged.
_MUTABLE = (np.ndarray, dict, list, tuple, set, bytearray)


def _snapshot(info: Mapping[Any, Any], sink: Sink) -> dict[str, Any]:
    """Copy one info dict so that the env may reuse it and the arrays in it."""
    out: dict[str, Any] = {}
    for key, value in info.items():
        name = key if key.__class__ is str else str(key)
        if name in out:
            sink.report("infos", "keys of an info", "keys that differ as text", f"{name!r} twice (as {key!r}, too)")
        if isinstance(value, dict) and _has_no_end(value):
            got = "a dict that contains itself, or more in a row"
            sink.fault("infos", f"the value of {key!r} in an info", f"at most {MAX_DEPTH} dicts in a row", got)
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = value.copy()
        elif isinstance(value, _MUTABLE):
            try:
                value = deepcopy(value)
            except Exception as error:
                got = f"one that cannot be copied ({type(error).__name__}: {error})"
                sink.report("infos", f"the value of {key!r} in an info", "a value that copy.deepcopy() copies", got)
        out[name] = value
    return out


def _has_no_end(table: dict[Any, Any]) -> bool:
    """Return whether dicts are nested deeper than `MAX_DEPTH`. A dict that occurs twice on a level is visited once."""
    level = {id(table): table}
    for _ in range(MAX_DEPTH):
        level = {id(value): value for inner in level.values() for value in inner.values() if isinstance(value, dict)}
        if not level:
            return False
    return True


def common_info(info: Any, sink: Sink) -> Info | None:
    """Convert the info dict of an env that has one for all agents; its entries go under `COMMON`."""
    if info is None:
        sink.remark("infos", "info", "a dict", _text(info))
        return None
    found = infos_in(info, sink, "info")
    return {COMMON: _snapshot(found, sink)} if found else None


def infos_by_agent(infos: Mapping[Any, Any], index: Mapping[Any, int], names: Sequence[str], sink: Sink) -> Info | None:
    """Copy the infos of an env that has one info dict per agent; None if all are empty.

    `index`: agent to index; `names` in that order. Keys that are not agents (``"common"``, …) go under `COMMON`.
    """
    out: Info = {}
    for key, info in infos.items():
        a = index.get(key)
        is_dict = isinstance(info, Mapping)
        if a is not None and not is_dict:
            tell = sink.remark if info is None else sink.report
            tell("infos", f"info of agent {key!r}", "a dict", _text(info))
        elif a is not None and info:
            out[names[a]] = _snapshot(info, sink)
        elif a is None and info is not None and not (is_dict and not info):
            entries = info if key == COMMON and is_dict else {key: info}
            out.setdefault(COMMON, {}).update(_snapshot(entries, sink))
    return out or None


def warn_of_contract(message: str) -> None:
    """Emit a `ContractWarning` at the innermost frame outside of marlvec."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "marlvec":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ContractWarning, stacklevel=level + 1)


OBSERVATION_KEYS = ("final_observation", "final_obs", "terminal_observation")
_INFO = "final_info"
_NOTHING: Any = object()


class EndAndBegin(NamedTuple):
    """The infos of a step in which an env reset itself, by episode."""

    observations: dict[str, Any]  # agent name → final observation of the ended episode
    ended: Info | None  # infos of its last step
    begun: Info | None  # infos of the reset


def resets_itself(env: Any, name: str) -> bool:
    """Return whether an env declares that the step that ends an episode also begins the next one.

    It declares this by ``has_auto_reset = True`` (as in OpenRL), or in its metadata by ``autoreset_mode``
    ``"same_step"`` or a true ``autoreset``. Gymnasium's own enum in the dict of a class is ignored with a
    `ContractWarning`: its vector envs up to 1.2 write their mode there, for all envs of the class.
    """
    # The outermost layer with the attribute decides.
    says = (getattr(layer, "has_auto_reset", None) for layer in wrapper_chain(env))
    declared = next((bool(word) for word in says if isinstance(word, (bool, np.bool_))), None)
    if declared is not None:
        return declared
    metadata = getattr(env, "metadata", None)
    if not isinstance(metadata, Mapping):
        return False
    if (word := metadata.get("autoreset_mode")) is None:
        return bool(metadata.get("autoreset", False))
    if isinstance(word, gymnasium.vector.AutoresetMode) and _is_in_a_class(env, metadata):
        warn_of_contract(
            f"{name}: metadata: autoreset_mode is {word!r} in the dict of a class, where vector envs of Gymnasium up "
            f"to 1.2 write their own mode; it is ignored. If the env resets itself, write 'same_step'"
        )
        return False
    match AutoresetMode.named(word):
        case AutoresetMode.DISABLED:
            return False
        case AutoresetMode.SAME_STEP:
            return True
    contract_error(
        name,
        "metadata",
        f"autoreset_mode is {word!r}: expected an env that leaves resets to marlvec "
        f"('disabled'), or resets itself in the step that ends its episode ('same_step')",
    )


def _is_in_a_class(env: Any, metadata: Mapping[Any, Any]) -> bool:
    *_, innermost = wrapper_chain(env)
    return any(vars(kind).get("metadata") is metadata for kind in type(innermost).__mro__)


def take_finals(new_infos: Info | None, ended: Mapping[str, AgentId], sink: Sink) -> EndAndBegin:
    """Find the final observations, and split the infos, which are modified, by episode.

    Each agent's final observation is in its own info, or by agent in the common one, under one of `OBSERVATION_KEYS`.
    If there is a ``"final_info"`` beside it, that is the info of the last step, and the rest is the info of the reset;
    without one, all infos belong to the ended episode. `ended`: name → the env's own name, of each agent that ended.
    """
    new_infos = {} if new_infos is None else new_infos
    shared = _pop(new_infos.get(COMMON, {}), OBSERVATION_KEYS)
    by_id = shared if isinstance(shared, Mapping) else {}
    observations: dict[str, Any] = {}
    for name, agent in ended.items():
        own = new_infos.get(name, {})
        # A Gymnasium env has one agent, whose info is the common one.
        found = shared if name == COMMON else _pop(own, OBSERVATION_KEYS)
        found = by_id.get(agent, _NOTHING) if found is _NOTHING else found
        if found is not _NOTHING:
            observations[name] = found
            continue
        sink.report(
            "observations",
            f"final observation of agent {agent!r}",
            f"one in its info under {', '.join(map(repr, OBSERVATION_KEYS))}",
            f"none, and keys {sorted(own)}",
            "put what the agent saw last into its info, as the env says that it resets itself",
        )
    parts = [(who, info.pop(_INFO)) for who, info in new_infos.items() if _INFO in info]
    rest = {who: info for who, info in new_infos.items() if info} or None
    if not parts:
        return EndAndBegin(observations, rest, None)
    names = {agent: name for name, agent in ended.items()}
    last: Info = {}
    for who, part in parts:
        for key, value in (infos_in(part, sink, _INFO) if part is not None else {}).items():
            if who == COMMON and key in names:
                last.setdefault(names[key], {}).update(infos_in(value, sink, _INFO))
            else:
                last.setdefault(who, {})[key] = value
    return EndAndBegin(observations, {who: info for who, info in last.items() if info} or None, rest)


def _pop(info: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((info.pop(key) for key in keys if key in info), _NOTHING)


NOT_JOINED, LIVE, ENDED = range(3)
"""Status of an agent in its episode."""
MISSING: Any = object()
"""Placeholder for an observation that the env did not return."""

PLAIN_REWARDS: frozenset[Any] = frozenset({float, np.float64})
"""Classes of rewards that need no check."""

_RESERVED = (COMMON, "__all__")


class Adapter(MultiAgentEnv):
    """A user's env as a `MultiAgentEnv`; ``env`` is the env as it was passed in, ``ids`` its own names of its agents.

    `agents` has the names as strings. Observation spaces are given with action masks, and declared without.
    """

    _declaration: ClassVar[str] = "{}_spaces = {{agent: space, …}}"  # how a user's env declares its spaces
    is_lenient = False  # rewards and flags may be arrays of one element, and flags 0 or 1
    reward_weights: Mapping[AgentId, NDArray[np.float64]] | None = None  # of each objective, if rewards are vectors
    plain_rewards = PLAIN_REWARDS  # none if there are weights
    copies_attributes = False  # copies of the env's attributes are its state, if it has no ``get_state()``

    def __init__(
        self,
        env: Any,
        ids: Iterable[AgentId],
        observation_spaces: Sequence[Any],
        action_spaces: Sequence[Any],
    ) -> None:
        self.env = env
        self.metadata = _plain_metadata(getattr(env, "metadata", None))
        self.name = _name_of(env, self.metadata)
        # Where broken rules are reported; `check_env` sets others.
        self.at_reset, self.at_step = Sink(self.name, "reset()"), Sink(self.name, "step()")
        self.ids: tuple[AgentId, ...] = tuple(ids)
        self.agents = tuple(str(agent) for agent in self.ids)
        self._info_keys: tuple[str, ...] = self.agents  # keys of the agents' own infos in an `Info`
        self._index: dict[AgentId, int] = {agent: a for a, agent in enumerate(self.ids)}
        for name in self.agents:
            if name in _RESERVED:
                raise ContractError(f"{self.name}: {name!r} is a reserved word and cannot be an agent's name")
        self._declared = [
            (kind, agent, space)
            for kind, found in (("observation", observation_spaces), ("action", action_spaces))
            for agent, space in zip(self.ids, found, strict=True)
        ]
        for kind, agent, space in self._declared:
            if not isinstance(space, Space):
                got = type(space).__name__
                raise ContractError(
                    f"{self.name}: {kind} space of agent {agent!r}: expected a gymnasium space, got {got}"
                    + (missing_hint(self._declaration.format(kind)) if space is None else "")
                )
        pairs = [
            split_action_mask(observation, action, f"{self.name}: observation space of agent {agent!r}")
            for agent, observation, action in zip(self.ids, observation_spaces, action_spaces, strict=True)
        ]
        self.observation_spaces = tuple(space for space, _ in pairs)
        self.action_spaces = tuple(action_spaces)
        self.mask_sizes = tuple(size for _, size in pairs)
        # Dict(observation=X, action_mask=M) is unwrapped to X; from any other Dict only the mask is removed.
        self._bare = [
            size is not None and set(space.spaces) == {"observation", "action_mask"}
            for space, (_, size) in zip(observation_spaces, pairs, strict=True)
        ]
        self.state_space = _state_space(env)
        self.resets_itself = resets_itself(env, self.name)
        self._reset_takes = keywords_of(env.reset)
        self._status = [NOT_JOINED] * len(self.ids)

    @property
    def unwrapped(self) -> Any:
        return self.env

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self.env.state())

    def state_obstacle(self) -> str | None:
        return self._user_state().obstacle()

    def get_state(self) -> dict[str, Any]:
        return {"agents": self._agents_now(), "user": self._user_state().get()}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.keys() != {"agents", "user"}:
            raise ArgumentError(f"{self.name}: expected the state of an env with the same marlvec wrappers")
        self._user_state().set(state["user"])
        self._recall_agents(state["agents"])

    def _user_state(self) -> UserEnvState:
        return UserEnvState(self.env, self.name, copies_attributes=self.copies_attributes)

    def _agents_now(self) -> dict[str, Any]:
        """Return the adapter's state of its agents, as plain data."""
        return {"status": list(self._status)}

    def _recall_agents(self, now: dict[str, Any]) -> None:
        """Restore the result of `_agents_now`; the user's env was restored before."""
        self._status = one_each(now["status"], len(self.ids), f"{self.name}: status")

    def takes(self, keyword: str) -> bool:
        """Return whether the env's ``reset`` takes an argument of this name."""
        return self._reset_takes is None or keyword in self._reset_takes

    def call_reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Call the env's ``reset`` with the arguments that it accepts; raise if a given one would be dropped."""
        kwargs: dict[str, Any] = {}
        if self.takes("seed"):
            kwargs["seed"] = seed
        elif seed is not None:
            reseed = getattr(self.env, "seed", None)
            if not callable(reseed):
                change = "write reset(self, seed=None, options=None)"
                got = f"{sorted(self._reset_takes or ())}: it takes no seed, and there is no seed() method"
                self.at_reset.fault("results", "the signature", "an argument 'seed'", got, change)
            reseed(seed)
        if self.takes("options"):
            # A copy for each env: an env that changes its options must not change another env's, or the caller's.
            kwargs["options"] = None if options is None else deepcopy(options)
        elif options is not None:
            self.at_reset.fault("results", "options", "no options, since it takes none", repr(options))
        result = self.env.reset(**kwargs)
        if not self.at_reset.collects:  # check_env looks more closely
            self._check_spaces()
        return result

    @abstractmethod
    def space_of(self, kind: str, agent: AgentId) -> Any:
        """Return one agent's ``"observation"`` or ``"action"`` space from the env, including its mask."""

    def space_call(self, kind: str, agent: AgentId) -> str:
        """Return the call by which a user reads a space, for messages."""
        return f"{kind}_space({agent!r})"

    def path_of_observation(self, a: int) -> str:
        """Return where the observation of agent number ``a`` is in what the env returns for it."""
        return "observation" if self._bare[a] else ""

    def _check_spaces(self) -> None:
        """Raise if the env's spaces have changed since the buffers and policies were made."""
        for kind, agent, space in self._declared:
            try:
                now = self.space_of(kind, agent)
            except Exception:  # an env may have spaces of present agents only
                continue
            if now is not space and isinstance(now, Space) and (differs := describe_difference(space, now)):
                contract_error(
                    self.name,
                    "reset()",
                    f"{kind} space of agent {agent!r}: expected the one that the env was built with, got another "
                    f"{differs}. Declare one space that has room for all",
                )

    def _reward(self, value: Any, agent: AgentId, vector_hint: str = "") -> float:
        if self.reward_weights is not None:
            return self._weigh(value, agent, self.reward_weights[agent])
        if type(value) is float:
            return value
        return as_reward(value, self.at_step, agent, vector_hint, lenient=self.is_lenient)

    def _weigh(self, value: Any, agent: AgentId, weights: NDArray[np.float64]) -> float:
        """Return the weighted sum of a reward with one number per objective."""
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            numbers = np.zeros(())
        if numbers.shape != weights.shape:
            expected = f"{len(weights)} numbers, as many as reward_weights"
            self.at_step.report("rewards", f"reward of agent {agent!r}", expected, _text(value))
            return 0.0
        return float(numbers @ weights)

    def _flag(self, value: Any, agent: AgentId, what: str, several_hint: str = "") -> bool:
        if value is True or value is False:
            return value is True
        return as_flag(value, self.at_step, agent, what, several_hint, lenient=self.is_lenient)

    def _flags_in(self, agent: AgentId, ends: Mapping[Any, Any], cuts: Mapping[Any, Any]) -> tuple[bool, bool]:
        """Return an agent's two flags; False if a dict has none for it."""
        return (
            agent in ends and self._flag(ends[agent], agent, "termination"),
            agent in cuts and self._flag(cuts[agent], agent, "truncation"),
        )

    def _infos_by_agent(self, infos: Mapping[Any, Any], sink: Sink) -> Info | None:
        return infos_by_agent(infos, self._index, self.agents, sink)

    def _observe(self, slot: Slot, a: int, value: Any, acting: bool) -> None:
        """Write agent number ``a``'s observation, and its mask if it has one; if not acting, the mask allows all."""
        if self.mask_sizes[a] is None:
            slot.write_obs(a, value)
            return
        slot.write_obs(a, self._without_mask(a, value))
        if acting:
            slot.write_mask(a, value["action_mask"])
        else:
            slot.clear_mask(a)

    def _join(self, slot: Slot, a: int, obs: Any) -> None:
        """Write agent number ``a``'s first observation; it is alive and acting now."""
        if obs is not MISSING:
            self._observe(slot, a, obs, True)
        slot.alive[a] = slot.acting[a] = True
        self._status[a] = LIVE

    def _record(self, slot: Slot, a: int, obs: Any, reward: float, ended: bool, cut: bool, acts: bool = True) -> bool:
        """Write a step's results for agent number ``a``; return whether it acts next.

        With ``obs`` `MISSING` it keeps its previous observation.
        """
        here = not (ended or cut)
        acts = acts and here
        if obs is MISSING:
            slot.final_missing[a] = not here
            slot.clear_mask(a)
        else:
            self._observe(slot, a, obs, acts)
        slot.reward[a] = reward
        slot.terminated[a] = ended
        slot.truncated[a] = cut
        slot.alive[a] = here
        slot.acting[a] = acts
        self._status[a] = LIVE if here else ENDED
        return acts

    def _without_mask(self, a: int, value: Any) -> Any:
        if self.mask_sizes[a] is None:
            return value
        subject = f"observation of agent {self.ids[a]!r}"
        if not isinstance(value, Mapping) or "action_mask" not in value:
            got = f"keys {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
            self.at_step.fault("observations", subject, "a dict with an 'action_mask'", got)
        if self._bare[a]:
            if len(value) != 2 or "observation" not in value:
                got = f"{sorted(map(str, value))}"
                self.at_step.fault("observations", subject, "keys ['action_mask', 'observation']", got)
            return value["observation"]
        return {key: part for key, part in value.items() if key != "action_mask"}

    def _take_masks(self, slot: Slot, new_infos: Info | None) -> Info | None:
        """Move action masks of acting agents, whose spaces declare none, from the infos into the slot.

        Must be called after ``acting`` is written. Modifies and returns the infos. `ContractError`: an agent's action
        space cannot have a mask.
        """
        if new_infos is None and not slot.gave_mask[0]:
            return None
        rest = {} if new_infos is None else new_infos
        for a, info in self._pop_masks(slot, rest):
            if info and slot.acting[a]:
                slot.write_mask(a, info["action_mask"])
            else:
                slot.clear_mask(a)
        return rest or None

    def _pop_masks(self, slot: Slot, new_infos: Info) -> Iterator[tuple[int, Info]]:
        """Remove masks of agents whose spaces declare none; yield each such agent's index and a dict of its mask.

        Beside a Box, an entry of that name is an info like others; so is None beside any space that has no masks.
        """
        for a, who in enumerate(self._info_keys):
            if self.mask_sizes[a] is not None:
                continue
            info = new_infos.get(who, {})
            has_mask = slot.action_mask[a] is not None
            if has_mask or (info.get("action_mask") is not None and not isinstance(self.action_spaces[a], Box)):
                yield a, {"action_mask": info.pop("action_mask")} if "action_mask" in info else {}
                if not info:
                    new_infos.pop(who, None)

    def _end_and_begin(self, slot: Slot, new_infos: Info | None) -> Info | None:
        """Finish the ended episode of an env that has itself begun the next one; then write the new agents.

        Must be called after the flags are written. Modifies the infos of the step; returns those of the reset.
        """
        flags = zip(slot.terminated, slot.truncated, strict=True)
        places = {self._info_keys[a]: a for a, flag in enumerate(flags) if any(flag)}
        finals = take_finals(new_infos, {who: self.ids[a] for who, a in places.items()}, self.at_step)
        for who, observation in finals.observations.items():
            slot.write_final(places[who], self._without_mask(places[who], observation))
        for a in range(len(self.ids)):
            slot.zero_obs(a)
            slot.clear_mask(a)
            # Final observations were in the infos; else take_finals has raised.
            slot.alive[a] = slot.acting[a] = slot.final_missing[a] = False
        slot.done = slot.begun = True
        last = finals.ended or {}
        for _ in self._pop_masks(slot, last):
            pass  # masks after the end are not needed
        slot.final_info = last or None
        return finals.begun


class DictAdapter(Adapter):
    """An `Adapter` for envs whose ``reset`` and ``step`` return dicts by agent."""

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin an episode with the agents that the env observes. An old env returns the observations alone."""
        result, sink = self.call_reset(seed, options), self.at_reset
        obs, infos = two_values(result, sink)
        infos = infos_in(infos, sink, "infos")
        self._begin(slot, mapping(obs, sink, "observations"), sink)
        return self._take_masks(slot, self._infos_by_agent(infos, sink))

    @abstractmethod
    def _begin(self, slot: Slot, obs: Mapping[Any, Any], sink: Sink) -> None:
        pass


def keywords_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keywords that a callable accepts; None if it accepts any, or has no readable signature."""
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _state_space(env: Any) -> Space[Any] | None:
    """Return the env's ``state_space`` if its values are fixed-size arrays and the env has ``state()``; else None."""
    space = getattr(env, "state_space", None)
    if not isinstance(space, Space) or not callable(getattr(env, "state", None)):
        return None
    tree = SpaceTree(space)
    return space if tree.is_leaf and not tree.leaves[0].is_object else None


def _name_of(env: Any, metadata: Mapping[str, Any]) -> str:
    name = metadata.get("name")
    if isinstance(name, str) and name:
        return name
    spec_id = getattr(getattr(env, "spec", None), "id", None)
    if isinstance(spec_id, str) and spec_id:
        return spec_id
    inner = getattr(env, "unwrapped", env)
    return type(env if inner is None else inner).__name__


def _plain_metadata(metadata: Any) -> dict[str, Any]:
    """Return the plain data in an env's metadata; the rest (enums, classes, functions) may not be picklable."""
    if not isinstance(metadata, Mapping):
        return {}
    kept = ((str(key), _plain(value)) for key, value in metadata.items())
    return {key: value for key, value in kept if value is not _DROPPED}


_DROPPED = object()


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return _plain_metadata(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        if any(part is _DROPPED for part in parts):
            return _DROPPED
        return tuple(parts) if isinstance(value, tuple) else parts
    return _DROPPED
