"""What the head itself keeps: `HeadPolicies`, ids, weights and learner connectors; `HeadCallbacks`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle

from marlvec.collect import EpisodeRecord, Metrics, MultiAgentBatch
from marlvec.collect.acting.policy_set import Connectors, PoliciesToTrain, pipelines_for
from marlvec.collect.callbacks import RunningEpisode
from marlvec.collect.callbacks.callback_list import CallbackLike, listeners_by_hook
from marlvec.collect.state.state_loader import StateLoader
from marlvec.connectors import LearnerPipeline
from marlvec.distributed.accounting import may_publish
from marlvec.distributed.server.messages import Started
from marlvec.errors import ArgumentError, SerialisationError, StateError
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["HeadPolicies", "HeadCallbacks"]


class HeadPolicies:
    """The policies that all collectors have."""

    def __init__(self, started: Started, learner_connectors: Connectors, put: Callable[[Any], Any]) -> None:
        self._put, self._given = put, learner_connectors
        self.ids = list(started.policies)
        self._removed: set[str] = set()
        self.trained: PoliciesToTrain = started.policies_to_train
        self.learner_connectors: dict[str, LearnerPipeline] = {}  # of policies that have any
        if learner_connectors is not None:
            self.learner_connectors = pipelines_for(
                LearnerPipeline, learner_connectors, self.ids, LearnerPipeline.default
            )
        self.weights: dict[str, Any] = dict(started.weights or {})  # of policies with weights
        self.reference, self.version = put(self.weights), 0

    def set_weights(self, weights: Mapping[str, Any], bases: Sequence[int], max_lag: int | None) -> None:
        """Set new weights of some policies as the next version.

        `StateError`: an outstanding fragment, requested at one of the versions `bases`, would exceed `max_lag`.
        """
        if not isinstance(weights, Mapping):
            raise ArgumentError(f"weights must be a dict by policy id, got {weights!r:.200}")
        if unknown := [name for name in weights if name not in self.ids]:
            raise ArgumentError(f"weights of unknown policies {unknown}; the policies are {self.ids}")
        if not may_publish(bases, self.version, max_lag):
            raise StateError(
                f"fragments that were asked for with version {min(bases)} are on their way, and version "
                f"{self.version + 1} would make them older than max_policy_lag={max_lag}: call collect() first"
            )
        try:  # a copy: later changes to the learner's arrays belong to a later version
            own = pickle.loads(cloudpickle.dumps(dict(weights)))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise SerialisationError(f"weights of {list(weights)} cannot be pickled: {error}") from error
        new = {**self.weights, **own}
        reference = self._put(new)
        self.weights, self.reference, self.version = new, reference, self.version + 1

    # --- policies that come and go

    def find(self, policy_id: str) -> None:
        """Check that a policy exists; the `KeyError` lists the existing policies."""
        if policy_id not in self.ids:
            raise KeyError(f"no policy {policy_id!r}; the policies are {self.ids}")

    def learner_connectors_with(self, policy_id: str, like: str | None) -> dict[str, LearnerPipeline]:
        """Return all pipelines, with a pipeline for a new policy."""
        if not isinstance(policy_id, str):
            raise ArgumentError(f"a policy id must be a string, got {policy_id!r}")
        if policy_id in self.ids or policy_id in self._removed:
            raise ArgumentError(f"there is, or was, a policy {policy_id!r}: choose another id")
        if like is not None:
            self.find(like)
        known = self.learner_connectors
        if self._given is None:
            return known
        if like is not None:
            return {**known, policy_id: copy.deepcopy(known[like])}
        if isinstance(self._given, Mapping):
            return {**known, policy_id: LearnerPipeline.default()}
        raise ArgumentError(
            f"one chain of learner_connectors was given for all policies: name with like= the policy whose connectors "
            f"{policy_id!r} gets copies of, or give Collectors a dict of them by policy id"
        )

    def add(self, policy_id: str, learner_connectors: dict[str, LearnerPipeline]) -> None:
        """Add a policy."""
        self.learner_connectors = learner_connectors
        self.ids = list(dict.fromkeys((*self.ids, policy_id)))

    def remove(self, policy_id: str) -> None:
        """Remove a policy."""
        self._removed.add(policy_id)
        self.ids = [name for name in self.ids if name != policy_id]
        self.weights.pop(policy_id, None)
        self.learner_connectors.pop(policy_id, None)

    # --- saved

    def get_state(self) -> State:
        """Return weights, their version, used ids, and the state of learner connectors."""
        return {
            "version": self.version,
            "weights": copy.deepcopy(self.weights),
            "removed": sorted(self._removed),
            "learner_connectors": {name: chain.state_dict() for name, chain in self.learner_connectors.items()},
        }

    def prepare(self, state: State, loader: StateLoader) -> Callable[[], None]:
        """Validate a state; return a function that installs it. `loader` gets the learner connectors' states."""
        where = "the policies of the head"
        check_fields(state, ("version", "weights", "removed", "learner_connectors"), where)
        version, weights = number_field(state, "version", where), dict(state["weights"])
        if unknown := [name for name in weights if name not in self.ids]:
            raise ArgumentError(f"{where}: weights of unknown policies {unknown}; the policies are {self.ids}")
        check_fields(state["learner_connectors"], tuple(self.learner_connectors), f"{where}: learner connectors")
        for name, chain in self.learner_connectors.items():
            loader.add(f"the learner connectors of policy {name!r}", chain, state["learner_connectors"][name])
        reference = self._put(weights)
        new = {
            "version": version,
            "weights": weights,
            "reference": reference,
            "_removed": set(map(str, state["removed"])),
        }
        return partial(vars(self).update, new)


_HERE = ("on_sample_end", "on_episode_end", "on_collector_start", "on_collector_lost")


class HeadCallbacks:
    """The callbacks of `Collectors`, in calling order; callbacks that have only hooks of collectors are refused."""

    def __init__(self, callbacks: Iterable[CallbackLike]) -> None:
        found = list(callbacks) if not isinstance(callbacks, dict) else callbacks
        self._listeners = listeners_by_hook(found)
        self.callbacks = tuple(found)
        for callback in found:
            own = [hook for hook, listeners in listeners_by_hook([callback]).items() if listeners]
            if own and not set(own) & set(_HERE):
                raise ArgumentError(
                    f"{callback!r} has the hooks {own}, which are called beside the envs: give it to the Collector "
                    f"in build; on the head there are {list(_HERE)}"
                )

    def sample_end(self, records: Iterable[EpisodeRecord], batch: MultiAgentBatch, metrics: Metrics) -> None:
        """Call callbacks for a finished batch and the episodes that end in it; a note names one that raises."""
        if self._listeners["on_episode_end"]:
            for record in records:
                episode = RunningEpisode(record.eps_id, record.env_id, record.number, 0, record.policies)
                episode.custom = dict(record.custom)
                episode.stage = "over"
                self.call("on_episode_end", episode, record)
        self.call("on_sample_end", batch, metrics)

    def call(self, hook: str, *what: Any) -> None:
        """Call this hook of all callbacks."""
        for name, listener in self._listeners[hook]:
            try:
                listener(*what)
            except BaseException as error:
                error.add_note(f"in {hook} of {name}")
                raise
