"""`CallbackList`: calls all callbacks of a collector, and raises their errors once the data is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks.callback import HOOKS, Callback, LossReason
from marlvec.collect.callbacks.episode_step import EpisodeStep, RunningEpisode
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics.episode_table import EpisodeRecord, FinishedEpisodes
from marlvec.collect.metrics.metrics import Metrics, as_number
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import State, check_fields
from marlvec.vector.vector_env import VectorEnv

__all__ = ["CallbackLike", "CallbackList", "listeners_by_hook"]

CallbackLike = Callback | Mapping[str, Callable[..., object]] | Callable[..., object]
"""A `Callback`; or a dict of its methods' names to functions; or a function that has one of these names."""

Listener = tuple[str, Callable[..., object]]


class CallbackList:
    """The callbacks of one collector, in calling order; may be empty.

    No callback misses a step: errors are held until all callbacks were called for the step and the collector has
    processed it. Then `raise_held` raises them.
    """

    def __init__(self, callbacks: Iterable[CallbackLike], envs: VectorEnv, metrics: Metrics) -> None:
        if isinstance(callbacks, Iterable) and not isinstance(callbacks, (Callback, Mapping)):
            callbacks = tuple(callbacks)
        self._listeners = listeners_by_hook(callbacks)
        self.callbacks = tuple(callbacks)
        # whether any callback has a hook for episodes
        self.follows = any(found for hook, found in self._listeners.items() if hook not in _NOT_OF_EPISODES)
        self._envs, self._metrics = envs, metrics
        self._running_N = np.full(envs.num_envs, None, np.object_)
        self._created: list[RunningEpisode] = []  # not started yet
        self._held: list[BaseException] = []
        self._running_hook = ""

    def collector_created(self, collector: object) -> None:
        """Call `on_collector_created`; an error's note names the callback."""
        if self._listeners["on_collector_created"]:
            self._call("on_collector_created", collector)
            self.raise_held()

    def step(self, env_step: EnvStep) -> None:
        """Call `on_episode_step` for the envs that stepped, without lost episodes."""
        if self._listeners["on_episode_step"] and not env_step.fault.all():
            rows = np.flatnonzero(~env_step.fault)
            step = EpisodeStep(env_step, rows, self._running_N, self._envs, self._metrics)
            self._call("on_episode_step", step)

    def lose(self, env_ids: NDArray[np.int64], reasons: Sequence[LossReason]) -> None:
        """Call `on_episode_lost` for the running episodes of these envs."""
        for i, why in zip(env_ids.tolist(), reasons, strict=True):
            if (episode := self._running_N[i]) is not None:
                if episode.stage == "running":
                    self._call("on_episode_lost", episode, why)
                self._running_N[i] = None

    def get_state(self) -> State:
        """Return the running episodes, with the custom numbers of callbacks."""
        found = [
            None if one is None else [one.stage, list(one.policies), dict(one.custom), one.rng_state]
            for one in self._running_N.tolist()
        ]
        return {"running": found}

    def prepare(self, state: State, episodes: EpisodeTracker) -> Callable[[int, Mapping[int, str]], None]:
        """Validate a state from `get_state()`; return a function that installs it, after the episode tracker's state.

        Call that function with the collector's seed and the policy ids by number. If the state has no episodes, because
        no callback followed them, the function builds them from the tracker.
        """
        where = "running episodes of callbacks"
        saved = check_fields(state, ("running",), where)["running"]
        if not isinstance(saved, list) or len(saved) != len(self._running_N):
            raise ArgumentError(f"{where}: expected {len(self._running_N)}, got {saved!r:.200}")
        for one in saved:
            if one is not None and (not isinstance(one, list) or len(one) != 4 or not isinstance(one[2], Mapping)):
                raise ArgumentError(f"{where}: expected a state from get_state(), got {one!r:.200}")

        def put(entropy: int, policy_ids: Mapping[int, str]) -> None:
            running_N = np.full_like(self._running_N, None)
            for i in np.flatnonzero(episodes.eps_id_N >= 0).tolist() if self.follows else ():
                episode = running_N[i] = _running_episode(i, episodes, policy_ids, entropy)
                if (known := saved[i]) is not None:
                    episode.stage, episode.policies, episode.custom = known[0], tuple(known[1]), dict(known[2])
                    episode.rng_state = known[3]
            self._created, self._held, self._running_N = [], [], running_N

        return put

    @property
    def running_hook(self) -> str:
        """Name of the hook that is being called, or ``""``."""
        return self._running_hook

    def lose_all(self, why: LossReason) -> None:
        """Report all running episodes as lost."""
        self._created.clear()
        self.lose(np.arange(len(self._running_N)), [why] * len(self._running_N))

    def end(self, episodes: FinishedEpisodes) -> None:
        """Call `on_episode_end`; copy the callbacks' custom numbers into the records."""
        for i, env_id in enumerate(episodes.env_id.tolist() if self.follows else ()):
            episode: RunningEpisode = self._running_N[env_id]
            self._end(episode, episodes.record(i, episode.custom))
            self._running_N[env_id] = None

    def _end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self._call("on_episode_end", episode, record)
        for name, value in list(episode.custom.items()):
            try:
                episode.custom[name] = as_number(value, f"{episode!r}.custom[{name!r}]")
            except ArgumentError as error:
                del episode.custom[name]
                self._held.append(error)

    def create(
        self, env_ids: NDArray[np.int64], episodes: EpisodeTracker, policy_ids: Mapping[int, str], entropy: int
    ) -> None:
        """Call `on_episode_created` for new episodes."""
        for i in env_ids.tolist():
            episode = _running_episode(i, episodes, policy_ids, entropy)
            if self._listeners["on_episode_created"]:
                episode.stage = "new"
            self._running_N[i] = episode
            self._created.append(episode)
            self._call("on_episode_created", episode)

    def start(self) -> None:
        """Call `on_episode_start` for the episodes created last."""
        created, self._created = self._created, []
        for episode in created:
            self._call("on_episode_start", episode)

    def raise_held(self) -> None:
        """Raise the errors held since the last call: Ctrl-C if any, else the first; notes name all failed callbacks."""
        if self._held:
            first, *others = sorted(self._held, key=lambda error: isinstance(error, Exception))
            self._held = []
            for other in others:
                notes = ", ".join(getattr(other, "__notes__", ()))
                first.add_note(f"also raised: {type(other).__name__}: {other}, {notes}")
            raise first

    def sample_end(self, batch: MultiAgentBatch) -> None:
        """Call `on_sample_end`."""
        self._call("on_sample_end", batch, self._metrics)
        try:
            self.raise_held()
        except BaseException as error:
            error.add_note("the batch is not returned; no row is lost: call collect() again")
            raise

    def _call(self, hook: str, *what: Any) -> None:
        if not (listeners := self._listeners[hook]):
            return
        began, k = perf_counter(), 0
        stage, episode = _STAGES.get(hook, ""), what[0] if hook in _STAGES else _NO_EPISODE
        try:
            self._running_hook = hook
            while k < len(listeners):
                try:
                    while k < len(listeners):
                        listener, k, episode.stage = listeners[k][1], k + 1, stage  # not interrupted: stores alone
                        listener(*what)  # not interrupted: the function that is called looks for signals
                # Ctrl-C here is held until the end of the step, too, as if it had come between two steps.
                except BaseException as error:
                    error.add_note(f"in {hook} of {listeners[k - 1][0]}")
                    self._held.append(error)
        finally:
            self._running_hook = ""
        self._metrics.timers["callbacks"].add(perf_counter() - began)


_NO_EPISODE: Any = SimpleNamespace(stage="")
_NOT_OF_EPISODES = ("on_sample_end", "on_collector_created")
_STAGES = {"on_episode_created": "running", "on_episode_end": "over", "on_episode_lost": "over"}


def _running_episode(i: int, episodes: EpisodeTracker, policy_ids: Mapping[int, str], entropy: int) -> RunningEpisode:
    policies = tuple(policy_ids[number] for number in episodes.policy_NA[i].tolist())
    return RunningEpisode(*episodes.identity(i), entropy, policies)


def listeners_by_hook(callbacks: Iterable[CallbackLike]) -> dict[str, list[Listener]]:
    """Return the listeners of each hook, in calling order; refuse an entry that is not a callback."""
    if isinstance(callbacks, (Callback, Mapping)) or not isinstance(callbacks, Iterable):
        raise ArgumentError(f"callbacks must be a list of callbacks, got {callbacks!r}; write callbacks=[...]")
    found: dict[str, list[Listener]] = {hook: [] for hook in HOOKS}
    for i, callback in enumerate(callbacks):
        for hook, listener in _methods(callback, f"callbacks[{i}]").items():
            name = type(callback).__name__ if isinstance(callback, Callback) else _name(listener)
            found[hook].append((f"callbacks[{i}], {name}", listener))
    return found


def _methods(callback: Any, who: str) -> Mapping[str, Callable[..., object]]:
    if isinstance(callback, Callback):
        methods = {hook: getattr(callback, hook) for hook in HOOKS}
        return {
            hook: method
            for hook, method in methods.items()
            if getattr(method, "__func__", method) is not getattr(Callback, hook)  # else it does nothing
        }
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ArgumentError(f"{who} is the class {callback.__name__}; give an object of it: {callback.__name__}()")
    if isinstance(callback, Mapping):
        functions = dict(callback)
    elif callable(callback):
        functions = {_name(callback): callback}
    else:
        functions = {}
    unknown = [hook for hook in functions if hook not in HOOKS]
    if unknown or not functions or not all(map(callable, functions.values())):
        raise ArgumentError(
            f"{who}: expected a Callback, or a dict of {', '.join(HOOKS)} to functions, or a function of one of these "
            f"names; got {callback!r}"
        )
    return functions


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
