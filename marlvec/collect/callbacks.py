"""`Callback`: base class of objects that a collector calls while collecting; `CallbackList` calls all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.episodes import Episode, EpisodeTracker
from marlvec.collect.metrics import EpisodeRecord, FinishedEpisodes, Metrics, as_number
from marlvec.collect.scheduling import EnvStep
from marlvec.envs.spec import Info
from marlvec.errors import ArgumentError
from marlvec.serialization.records import read_fields
from marlvec.serialization.saved import State
from marlvec.vector.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv

LossReason = Literal["fault", "restart", "reset", "interrupt"]
"""Why an episode was lost."""

HOOKS = (
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_episode_lost",
    "on_sample_end",
    "on_collector_created",
    "on_collector_start",
    "on_collector_lost",
)
"""Names of the methods of `Callback`."""


class Callback:
    """Hooks that a collector calls while collecting. Override the hooks you need; the others cost nothing.

    For each episode: created, started, its steps, then its end or its loss; and once per batch `on_sample_end`. The
    order is the same in every autoreset mode. Within one step of the envs: steps, losses, ends, new episodes; each in
    env order.

    If a callback raises, `Collector.collect` (or ``reset``) raises the error, with a note that names the callback, once
    the step is finished and all other callbacks were called for it. No data is lost: the next call continues. If
    `on_sample_end` raises, the batch is not returned, and the next batch has its rows: callbacks may see them twice.

    Several collectors may share a callback. During a hook, its collector can neither collect nor reset.
    """

    def on_episode_created(self, episode: RunningEpisode) -> None:
        """Called when an episode has a policy for each agent, before connectors get its first rows."""

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """Called once per episode, when its first observations have passed the agent connectors."""

    def on_episode_step(self, step: EpisodeStep) -> None:
        """Called once for each step of some envs, with all of these envs. A reset is not a step."""

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        """Called when an episode has ended and its last rows have passed the agent connectors.

        Numbers put into ``episode.custom`` here still count. `Metrics` gets the record after this hook.
        """

    def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
        """Called when a running episode is lost: it has no record, and `on_episode_end` is not called for it.

        Args:
            episode: The episode.
            why: ``"fault"``: its env failed, or another env in the same worker. ``"restart"``: its env raised
                `RestartQuietly`. ``"reset"``: `Collector.reset` was called. ``"interrupt"``: Ctrl-C, or an error of an
                env or a connector, in the middle of a tick; the hook is called in the next `collect`.
        """

    def on_sample_end(self, batch: MultiAgentBatch, metrics: Metrics) -> None:
        """Called before a batch is returned, with the collector's metrics."""

    def on_collector_created(self, collector: Any) -> None:
        """Called at the end of the constructor of `Collector`, which passes on errors raised here.

        Args:
            collector: The `Collector`.
        """

    def on_collector_start(self, place: Any) -> None:
        """Called by `marlvec.distributed.Collectors` only, when one of its collectors was built.

        Args:
            place: Its `marlvec.distributed.Place`.
        """

    def on_collector_lost(self, place: Any, why: str, requests: int) -> None:
        """Called by `marlvec.distributed.Collectors` only, when one of its collectors was lost.

        Args:
            place: Its `marlvec.distributed.Place`.
            why: As in `marlvec.distributed.Accounting`.
            requests: Number of requests lost with it.
        """


class ClosingCallback(Callback, ABC):
    """A callback that is closed, by `close` or at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Close it. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        each = tuple[str, tuple[str, ...], dict[str, Any], Any]
        (saved,) = read_fields(state, where, running=list[each | None]).values()
        if len(saved) != len(self._running_N):
            raise ArgumentError(f"{where}: expected {len(self._running_N)}, got {saved!r:.200}")

        def put(entropy: int, policy_ids: Mapping[int, str]) -> None:
            running_N = np.full_like(self._running_N, None)
            for i in np.flatnonzero(episodes.eps_id_N >= 0).tolist() if self.follows else ():
                episode = running_N[i] = _running_episode(i, episodes, policy_ids, entropy)
                if (known := saved[i]) is not None:
                    episode.stage, episode.policies, episode.custom, episode.rng_state = known
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


class RunningEpisode(Episode):
    """One episode, the same object from its creation to its end.

    Attributes:
        policies: Each agent's policy id when the episode was created.
        custom: Numbers by name, for callbacks to fill; copied to `EpisodeRecord.custom` and `Metrics.custom`.
    """

    __slots__ = ("custom", "policies", "stage")

    def __init__(self, eps_id: int, env_id: int, number: int, entropy: int, policies: tuple[str, ...]) -> None:
        super().__init__(eps_id, env_id, number, entropy)
        self.policies = policies
        self.custom: dict[str, float] = {}
        self.stage = "running"  # last stage reported to callbacks: "new", "running", "over"


class EpisodeStep:
    """One step of n envs, in env order, without envs whose episode was lost in it.

    Its arrays are copies: keep or change them freely.

    Attributes:
        env_ids: (n,) int64, ascending.
        rewards: (n, A) float64, raw rewards of the envs.
        terminated, truncated: (n, A) bool, whether the agent ended in this step.
        done: (n,) bool, whether the episode ended in this step.
        metrics: The collector's.
    """

    def __init__(
        self,
        env_step: EnvStep,
        rows: NDArray[np.int64],
        running_N: NDArray[np.object_],
        envs: VectorEnv,
        metrics: Metrics,
    ) -> None:
        self.env_ids = env_step.env_ids[rows]
        self.rewards = env_step.rewards[rows]
        self.terminated, self.truncated = env_step.terminated[rows], env_step.truncated[rows]
        self.done = env_step.done[rows]
        self.metrics = metrics
        self._running_n = running_N[self.env_ids]
        self._results, self._envs = env_step.results, envs

    def __len__(self) -> int:
        return len(self.env_ids)

    def __repr__(self) -> str:
        return f"EpisodeStep(env_ids={self.env_ids.tolist()}, done={self.done.tolist()})"

    @cached_property
    def episodes(self) -> list[RunningEpisode]:
        """Each env's episode in this step."""
        episodes: list[RunningEpisode] = self._running_n.tolist()
        return episodes

    @cached_property
    def infos(self) -> list[Info]:
        """Each env's infos of this step, ``{agent: {key: value}, "__common__": {key: value}}``; built when read."""
        agents, ended = self._envs.agents, set(self.env_ids[self.done].tolist())
        found: dict[int, Info] = {}
        for result in self._results:
            ids, stacked = result.env_ids.tolist(), result.infos
            found |= zip(ids, infos_to_list(stacked, agents, len(ids)), strict=True)
            if self._envs.autoreset.begins_at_once:  # after an episode's end they belong to the next episode
                finals = zip(ids, infos_to_list(stacked.get("final_info", {}), agents, len(ids)), strict=True)
                found |= {i: info for i, info in finals if i in ended}
        return [found[i] for i in self.env_ids.tolist()]
