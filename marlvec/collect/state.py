"""`StatefulCollector`: saves and restores the state of a collector, of its users' objects, and of untaken batches."""

from __future__ import annotations

import copy
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect.background import Background, BatchSchedule, CollectingThread, SampleTarget, UpdateLock
from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.callbacks import CallbackList
from marlvec.collect.columns import ColumnSpecs, plain_rows, rows_from
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics import CurrentState, Metrics
from marlvec.collect.policies import PolicySet, column_specs
from marlvec.collect.rollout import BatchBuilder, RolloutLoop
from marlvec.connectors import Pipeline
from marlvec.errors import ArgumentError, MarlvecError, SerialisationError, StateError
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.records import Count, from_plain, read_fields
from marlvec.serialization.saved import State, check_fields, number_field
from marlvec.serialization.values import encode, outline, read_value, write_value
from marlvec.vector.vector_env import VectorEnv


def describe_collector(
    envs: VectorEnv,
    policies: PolicySet,
    episodes: EpisodeTracker,
    settings: Mapping[str, Any],
    leaving: Collection[str] = (),
) -> State:
    """Return the identity of a collector, without the policies in ``leaving``, as strings and numbers."""
    mapping = episodes.mapping
    policy_ids = sorted(set(policies.policies) - set(leaving))
    return {
        "env": envs.spec.name,
        "num_envs": envs.num_envs,
        "agents": list(envs.agents),
        "spaces": {
            group.name: [
                [envs.agents[a] for a in group.agents],
                _of_space(group.observation_space),
                _of_space(group.action_space),
            ]
            for group in envs.spec.groups
        },
        "policies": policy_ids,
        "policy_mapping": "a function" if callable(mapping) else mapping,
        "connectors": {
            name: [describe_pipeline(pipelines[name]) for pipelines in policies.pipelines] for name in policy_ids
        },
        **settings,
    }


def _of_space(space: Space[Any]) -> list[str]:
    try:
        return outline(encode(space, "a space"))
    except SerialisationError:  # one of the user's own
        return [repr(space)]


def describe_pipeline(pipeline: Pipeline[Any]) -> list[str]:
    """Return a line per connector of a pipeline: its class and arguments, without its learned state."""
    try:
        return outline(pipeline.to_config())
    except SerialisationError:  # a class or a function in it is not registered
        return [f"{name}: {type(piece).__name__}" for name, piece in zip(pipeline.names, pipeline, strict=True)]


def check_identity(saved: Any, own: State, who: str = "this collector has") -> None:
    """Check that a state's identity equals that of the collector(s) to load it into; name all differences."""
    where = "set_state()"
    check_fields(saved, own, f"{where}: what it belongs to")
    found = []
    for name, here in own.items():
        if saved[name] == here:
            continue
        if isinstance(here, Mapping) and isinstance(saved[name], Mapping):
            there, here = _lines(saved[name]), _lines(here)
            lines = list(difflib.unified_diff(here, there, "here", "state", n=3, lineterm=""))
            found.append("\n".join([f"{name}:", *lines[:_MOST_LINES]]))
        else:
            found.append(f"{name}: the state is of {saved[name]!r:.300}, {who} {here!r:.300}")
    if found:
        raise ArgumentError(f"{where}: the state is of another collector. " + "; ".join(found))


_MOST_LINES = 40


def _lines(value: Any, indent: str = "") -> list[str]:
    """Return nested texts as indented lines below their names."""
    if isinstance(value, Mapping):
        return [line for key, part in value.items() for line in (f"{indent}{key}:", *_lines(part, f"{indent}  "))]
    if isinstance(value, (list, tuple)):
        return [line for part in value for line in _lines(part, indent)]
    return [f"{indent}{value}"]


_OF_WRONG_DATA = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_METHODS = ("get_state", "set_state"), ("state_dict", "load_state_dict")


def _methods(thing: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the methods that get and set an object's state; None if it has none."""
    if isinstance(thing, Mapping):
        return None
    for pair in _METHODS:
        get, put = (getattr(thing, name, None) for name in pair)
        if callable(get) and callable(put):
            return get, put
    return None


def has_state(thing: Any) -> bool:
    """Whether an object has ``get_state()`` and ``set_state()``, or ``state_dict()`` and ``load_state_dict()``."""
    return _methods(thing) is not None


def state_of(thing: Any) -> Any:
    """Return a copy of an object's state; it must have one."""
    methods = _methods(thing)
    assert methods is not None  # has_state() is true
    return copy.deepcopy(methods[0]())


Put = Callable[[Any], Any]


class StateLoader:
    """Loads states one after the other; if an object rejects its state, restores the earlier ones."""

    def __init__(self) -> None:
        self._wanted: list[tuple[str, Callable[[], Any], Put, Any]] = []
        self._before: list[tuple[Put, Any]] = []

    def add(self, who: str, thing: Any, state: Any) -> None:
        """Register an object, ``who`` in messages, and the state that `load` will give it."""
        if (methods := _methods(thing)) is None:
            raise ArgumentError(f"{who}: the saved state has a state for it, but {thing!r:.200} cannot load one")
        self._wanted.append((who, *methods, state))

    def add_all(self, things: Iterable[tuple[str, Any]], saved: Any) -> None:
        """Register the callbacks and the mapping that have a state, by name; `saved` has names and states in order."""
        others, states = list(things), from_plain(list[tuple[str, Any]], saved, "set_state(): callbacks with a state")
        if [who for who, _ in others] != [who for who, _ in states]:
            raise ArgumentError(
                f"set_state(): callbacks with a state: expected {[who for who, _ in others]}, got "
                f"{[who for who, _ in states]}; pass the same callbacks"
            )
        for (who, thing), (_, own) in zip(others, states, strict=True):
            self.add(who, thing, own)

    def load(self) -> None:
        """Load all states; an error names the object that raised it. Call `undo` then."""
        for who, get, put, state in self._wanted:
            self._before.append((put, copy.deepcopy(get())))
            try:
                put(copy.deepcopy(state))
            except Exception as error:
                if isinstance(error, _OF_WRONG_DATA) and not isinstance(error, MarlvecError):
                    raise ArgumentError(f"set_state(): {who} cannot take its state: {error!r:.300}") from error
                error.add_note(f"in the state of {who}")
                raise

    def undo(self) -> None:
        """Restore the previous states of all objects."""
        while self._before:
            put, state = self._before.pop()
            put(state)


def get_batch_state(batch: MultiAgentBatch) -> State:
    """Return a batch as plain data."""
    return {
        "policies": {name: plain_rows(batch[name], f"a batch of {name!r}") for name in batch},
        "known": list(batch.known),
        "env_steps": batch.env_steps,
        "agent_steps": batch.agent_steps,
    }


def batch_from(state: Any, specs: Mapping[str, ColumnSpecs]) -> MultiAgentBatch:
    """Rebuild a batch from a result of `get_batch_state`, in new arrays.

    ``specs``: allowed columns by policy id; for other policies only the collector's columns are checked.
    """
    where = "a batch that waits"
    kinds = {"policies": dict[str, Any], "known": tuple[str, ...], "env_steps": Count, "agent_steps": Count}
    found = read_fields(state, where, **kinds)
    policies = {name: rows_from(rows, f"{where}: {name}") for name, rows in found.pop("policies").items()}
    for name, rows in policies.items():
        specs.get(name, ColumnSpecs({}, any_shape=True)).check(dict(rows.items()), f"{where}: {name}")
    return MultiAgentBatch({name: SampleBatch(rows) for name, rows in policies.items()}, **found)


FORMAT = 2
_RESTART_STREAM = 0x72657374617274  # "restart"
_FIELDS = (
    *("format", "belongs_to", "seed", "entropy", "evaluations", "rollout", "episodes", "policies", "metrics"),
    *("running", "others", "envs", "waiting"),
)


class StatefulCollector(ABC):
    """The part of `Collector` that saves and restores everything its next batches depend on."""

    envs: VectorEnv
    metrics: Metrics
    _loop: RolloutLoop
    _policy_set: PolicySet
    _episodes: EpisodeTracker
    _callback_list: CallbackList
    _batch_builder: BatchBuilder
    _current: CurrentState
    _update_lock: UpdateLock
    _owner: CollectingThread
    _seed: int | None
    _entropy: int
    _evaluations: int
    _stream: int
    _batch_mode: str
    _background: Background | None
    _waiting: Sequence[MultiAgentBatch] = ()  # made in the background before the state was saved
    _is_half_set = False  # whether set_state was interrupted
    _is_taken_over = False  # whether the running set_state has begun to change the collector

    @property
    def resumes_exactly(self) -> NDArray[np.bool_]:
        """Return which envs continue bit by bit from a saved state: (N,) bool.

        In other envs, loading a state loses the running episodes and begins new ones; ``envs.state_obstacles()``
        returns the reasons.

        Raises:
            BusyError: Another call of the envs is pending.
        """
        exact_N = np.ones(self.envs.num_envs, np.bool_)
        exact_N[list(self.envs.state_obstacles())] = False
        return exact_N

    def get_state(self) -> State:
        """Return everything the next batches depend on; call it between two calls of `collect`.

        The state has rows that are in no batch yet, running episodes, random streams, learned state and memory of
        connectors, metrics and counters, the envs that can be saved (see `resumes_exactly`), and the ``state_dict()``
        or ``get_state()`` of policies, callbacks and the mapping, if they have one.

        While batches are collected in the background, the call waits for the end of a step. Finished batches that were
        not taken are in the state: after loading, the next `background` begins with them.

        Returns:
            Plain data: numbers, strings, None, arrays, lists, tuples and dicts, which later calls do not change.

        Raises:
            StateError: A callback, a policy or a connector calls it; the envs are external; or a policy was removed
                and some of its rows are still pending.
            EnvsDriven: Other code has reset or stepped the envs.
            SerialisationError: A value cannot be written to a file; names it.
            BusyError: Another thread collects.
        """
        with self._pause("get_state") as waiting:
            self._owner.claim(self, "get_state", self._callback_list.running_hook)
            try:
                return self._get_state(waiting)
            finally:
                self._owner.thread = self._current.tick_counters = None  # not interrupted: stores alone

    def set_state(self, state: State) -> None:
        """Continue from the state of an equally built collector: the next batches equal that collector's.

        Running episodes and stored rows are dropped. Envs without a state begin new episodes; the saved episodes' rows
        that were in no batch are lost, and metrics count them (``episodes_restarted``, ``env_steps_lost``).

        Opponents of a `SelfPlayMapping` are added or removed as in the state.

        After Ctrl-C at any point, the collector is unchanged, or has the state, or `collect` raises `StateError` until
        `reset` or `set_state` is called.

        Args:
            state: A state from `get_state`.

        Raises:
            ArgumentError: Not a valid state, or one of another collector; names the differences. Nothing has changed.
            StateError: As in `get_state`; or batches are collected in the background.
            EnvFault: An env failed to load its state or to reset: call `reset`, or `set_state` again.
            Exception: Any other error of a policy, a connector, a callback or the mapping. Nothing has changed.
        """
        self._check_foreground("set_state")
        self._owner.claim(self, "set_state", self._callback_list.running_hook)
        try:
            self._set_state(state)
        finally:
            self._owner.thread = self._current.tick_counters = None  # not interrupted: stores alone
        self._callback_list.raise_held()

    def check_state(self, state: State) -> None:
        """Check that a state of `get_state` is of an equally built collector; change nothing.

        Raises:
            ArgumentError: Not a valid state, or one of another collector; names the differences.
        """
        self._check_format(state)
        coming = ComingPolicies(self, self._episodes.mapping)
        seeds = self._policy_set.seed_count
        try:
            coming.add(state)
            check_identity(state["belongs_to"], self._identity_without(coming.leaving))
        finally:
            self._take_back(coming, seeds)

    def save(self, path: FilePath) -> None:
        """Write `get_state` to a file, atomically.

        Args:
            path: The file, by convention ``.npz``; an old file is replaced.

        Raises:
            SerialisationError: A value cannot be written to a file; names it.
            OSError: The file cannot be written; an old file is unchanged.
            StateError: As in `get_state`.
        """
        write_value(path, "collector", self.get_state(), "the collector's state")

    def load(self, path: FilePath) -> None:
        """Continue from a file of `save`: see `set_state`. No code in it is executed.

        Raises:
            CheckpointError: The file does not exist, is damaged, of another version, or holds something else.
            ArgumentError: It is of another collector; names the differences.
            StateError: As in `set_state`.
        """
        self.set_state(read_value(path, "collector", "collector"))

    @abstractmethod
    def _check_foreground(self, call: str) -> None: ...

    @abstractmethod
    def _seed_of(self, purpose: int, number: int) -> int: ...

    def _identity_without(self, leaving: Collection[str] = ()) -> State:
        settings = {"batch_mode": self._batch_mode, "stream": self._stream}
        return describe_collector(self.envs, self._policy_set, self._episodes, settings, leaving)

    @staticmethod
    def _check_format(state: State) -> None:
        where = "set_state()"
        check_fields(state, _FIELDS, where)
        if state["format"] != FORMAT:
            raise ArgumentError(
                f"{where}: expected a state of format {FORMAT}, got {state['format']!r:.50}; save it with this version"
            )

    def _take_back(self, coming: ComingPolicies, seed_count: int) -> None:
        """Restore the previous policies, and the count that the next added policy's seed depends on."""
        coming.take_back()
        self._policy_set.seed_count = seed_count

    def _check_whole(self) -> None:
        """Raise if a call of `set_state` was interrupted."""
        if self._is_half_set:
            raise StateError(
                "an earlier set_state() was interrupted, and the collector's parts do not fit together: call "
                "set_state() again, or reset()"
            )

    def _check_ready(self) -> None:
        """Raise unless the collector may collect now."""
        self._check_whole()
        if self._waiting:
            raise StateError(
                f"the loaded state has {len(self._waiting)} batches that were made in the background and not taken: "
                f"take them by background(), or drop them by reset()"
            )

    def _pause(self, call: str) -> AbstractContextManager[Sequence[MultiAgentBatch]]:
        """Return a context in which no batch is collected; it yields the finished batches that were not taken."""
        background = self._background
        if background is None or background.is_closed:
            self._check_foreground(call)
            return nullcontext(self._waiting)
        return background.paused()

    def _take_waiting(self, schedule: BatchSchedule, goal: SampleTarget) -> Sequence[MultiAgentBatch]:
        """Return the loaded batches that were not taken, and count them for a schedule."""
        waiting, self._waiting = self._waiting, ()
        for batch in waiting:
            schedule.done = schedule.done_with(goal, batch)
        return waiting

    def _drop_waiting(self) -> None:
        """Drop the loaded batches that were not taken, and count their steps as not delivered."""
        state, waiting = self._current.state, self._waiting
        counters = state.counters.copy()
        counters.env_steps_delivered -= sum(batch.env_steps for batch in waiting)
        counters.agent_steps_delivered -= sum(batch.agent_steps for batch in waiting)
        self._current.state, self._waiting = state._replace(counters=counters), ()  # not interrupted: stores alone

    def _check_inside(self) -> None:
        """Raise if the envs are external."""
        if self.envs.backend == "external":
            raise StateError(
                "external envs cannot be saved: their simulators run outside, in an unknown state; "
                "save policies and connectors alone, by save_checkpoint(..., exact=False)"
            )

    def _come_to_rest(self) -> None:
        """Do what the next call of `collect` would do first, and receive pending replies."""
        self._check_inside()
        self._check_whole()
        loop = self._loop
        if loop.is_new:
            return
        with self._update_lock:
            loop.come_to_order()
            loop.scheduler.check_alone()
            loop.receive_pending()

    def _get_envs(self) -> State | None:
        """Return the state of the envs that have one."""
        if self._loop.is_new:
            return None
        exact = np.flatnonzero(self.resumes_exactly)
        if not len(exact):
            return None
        return self.envs.get_state(None if len(exact) == self.envs.num_envs else exact)

    def _get_state(self, waiting: Sequence[MultiAgentBatch]) -> State:
        self._come_to_rest()
        return {
            "format": FORMAT,
            "belongs_to": self._identity_without(),
            "seed": self._seed,
            "entropy": self._entropy,
            "evaluations": self._evaluations,
            "rollout": self._loop.get_state(),
            "episodes": self._episodes.get_state(),
            "policies": self._policy_set.get_state(),
            "metrics": self.metrics.get_state(),
            "running": self._callback_list.get_state(),
            "others": [[who, state_of(thing)] for who, thing in self._others()],
            "envs": self._get_envs(),
            "waiting": [get_batch_state(batch) for batch in waiting],
        }

    def _others(self) -> Iterator[tuple[str, Any]]:
        """Yield objects with a state, other than policies and connectors, each once."""
        callbacks = ((f"callbacks[{i}]", callback) for i, callback in enumerate(self._callback_list.callbacks))
        seen = set()
        mapping = self._episodes.mapping
        named = [
            (name_of_mapping(mapping), mapping),
            *((f"{who}, {type(one).__name__}", one) for who, one in callbacks),
        ]
        for who, thing in named:
            if id(thing) not in seen and has_state(thing):
                seen.add(id(thing))
                yield who, thing

    def _set_state(self, state: State) -> None:
        self._check_inside()
        self._check_format(state)
        coming, seeds = ComingPolicies(self, self._episodes.mapping), self._policy_set.seed_count
        self._is_taken_over = False
        try:
            try:
                coming.add(state)
                change = self._prepare(state, coming.leaving)
            except ArgumentError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise ArgumentError(f"set_state(): expected a state from get_state(): {error!r:.200}") from error
            change()
        except BaseException:
            if not self._is_half_set or not self._is_taken_over:
                self._take_back(coming, seeds)
            raise

    def _prepare(self, state: State, leaving: Collection[str]) -> Callable[[], None]:
        """Validate a whole state; return a function that installs it, and removes the policies in ``leaving``."""
        where, loop = "set_state()", self._loop
        check_identity(state["belongs_to"], self._identity_without(leaving))
        numbers = {name: number for name, number in self._policy_set.numbers.items() if name not in leaving}
        seed = None if state["seed"] is None else number_field(state, "seed", where)
        entropy, evaluations = (number_field(state, name, where) for name in ("entropy", "evaluations"))
        put_loop = loop.prepare(state["rollout"])
        _check_counters(state["rollout"]["reached"]["counters"])
        put_policies = self._policy_set.prepare(state["policies"], leaving)
        put_episodes = self._episodes.prepare(state["episodes"], leaving)
        put_metrics = self.metrics.prepare(state["metrics"], numbers)
        put_running = self._callback_list.prepare(state["running"], self._episodes)
        loader = self._loader(state)
        bound = (runner for runner in self._policy_set.runners.values() if runner.group_index >= 0)
        specs = {runner.policy_id: column_specs(runner, of_batch=True) for runner in bound}
        waiting = tuple(batch_from(batch, specs) for batch in state["waiting"])

        def put_all() -> None:
            put_episodes()
            put_policies()
            put_metrics()
            self._seed, self._entropy, self._evaluations = seed, entropy, evaluations
            self._policy_set.seed_connectors()
            put_loop()
            put_running(entropy, {number: name for name, number in numbers.items()})
            self._waiting = waiting

        return partial(self._change, loader, state["envs"], put_all)

    def _change(self, loader: StateLoader, envs: State | None, put_all: Callable[[], None]) -> None:
        """Install all parts of a state, first those that may reject it."""
        loop = self._loop
        if loop.is_dirty:
            loop.scheduler.abandon()
        else:
            with self._update_lock:
                loop.receive_pending()
        driven = self.envs.drive_count
        self._is_half_set = self._is_taken_over = True
        try:
            loader.load()
            if envs is not None:
                self.envs.set_state(envs)
        except Exception:
            if self.envs.drive_count == driven:  # the envs are unchanged
                loader.undo()
                self._is_half_set = False
            raise
        put_all()
        if not loop.is_new:
            exact = () if envs is None else envs["env_ids"]
            others = np.setdiff1d(np.arange(self.envs.num_envs), exact)
            loop.restart_envs(others, self._seed_of(_RESTART_STREAM, self._current.state.tick))
        self._is_half_set = False

    def _loader(self, state: State) -> StateLoader:
        """Return the loader of the states of policies, connectors, callbacks and the mapping."""
        loader = StateLoader()
        for policy_id, one in state["policies"]["runners"].items():
            runner = self._policy_set.find(policy_id)
            loader.add(f"policy {policy_id!r}", runner.policy, one["policy"])
            if not isinstance(one["connectors"], list) or len(one["connectors"]) != len(runner.chains):
                raise ArgumentError(f"set_state(): connectors of {policy_id!r}: expected three states")
            for chain, own in zip(runner.chains, one["connectors"], strict=True):
                if own:
                    loader.add(f"the connectors of policy {policy_id!r}", chain, own)
        loader.add_all(self._others(), state["others"])
        return loader


def _check_counters(saved: Mapping[str, int]) -> None:
    """Refuse impossible counters, such as fewer env steps than delivered and lost: `collect` would make them again."""
    large = {name: number for name, number in saved.items() if number >= _MOST}
    steps, delivered, lost = (saved[f"env_steps{which}"] for which in ("", "_delivered", "_lost"))
    if large or delivered + lost > steps:
        raise ArgumentError(
            f"set_state(): counters: {large or f'{delivered} + {lost} env steps delivered and lost of {steps}'}"
        )


_MOST = 1 << 62


@runtime_checkable
class AddsPolicies(Protocol):
    """A mapping that adds policies to its collector, and lists them in its state."""

    def add_policies(self, state: Any, collector: Any) -> Callable[[], None]:
        """Add the policies of a state to a collector; return a function that removes them."""

    def unknown_policies(self, state: Any, collector: Any) -> Collection[str]:
        """Return ids of policies that it has added to a collector and that are not in a state."""


def name_of_mapping(mapping: Any) -> str:
    """Return the name under which a mapping's state is saved."""
    return f"policy_mapping, {type(mapping).__name__}"


class ComingPolicies:
    """Adds the policies of a state to a collector before the rest of the state is validated; can undo that.

    Policies are added only if the collector's mapping is an `AddsPolicies`.
    """

    def __init__(self, collector: Any, mapping: Any) -> None:
        self._collector, self._mapping = collector, mapping
        self._undo: Callable[[], None] | None = None
        # ids of policies that are not in the state; removed with the running episodes
        self.leaving: frozenset[str] = frozenset()

    def add(self, state: Mapping[str, Any]) -> None:
        """Add the policies that the collector lacks; if this raises, nothing has changed.

        `StateError`: another policy with one of these ids plays in a running episode.
        """
        mapping, name = self._mapping, name_of_mapping(self._mapping)
        own = [saved for who, saved in state["others"] if who == name]
        if own and isinstance(mapping, AddsPolicies):
            self._undo = mapping.add_policies(own[0], self._collector)
            self.leaving = frozenset(mapping.unknown_policies(own[0], self._collector))

    def take_back(self) -> None:
        """Restore the collector's previous policies."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


CollectingThread.methods |= {StatefulCollector.get_state.__code__, StatefulCollector.set_state.__code__}
