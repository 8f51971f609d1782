"""`ExternalVectorEnv`: a vectorizer whose slots are filled from outside: `make` creates one.

`ExternalEnv` is a simulator in a thread of this process that runs at its own pace; `Replay` replays logged episodes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.connectors.action.valid_actions import EXECUTED, EXECUTED_MISSING
from marlvec.env_ids import EnvIds, Options
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.recipes import write_recipes
from marlvec.envs.spec import EnvSpec, Info
from marlvec.envs.wrappers import check_limit
from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    BrokenError,
    BusyError,
    CheckpointError,
    ClosedError,
    DriverGone,
    EpisodeCut,
    EpisodeOver,
    EpisodesFull,
    Failure,
    StateError,
)
from marlvec.external.episode import DEFAULT, EpisodeDriver, EpisodeGateway, ExternalEpisode, Flags
from marlvec.external.exchange import Ending, ExternalRow, RowExchange, ValueChecker
from marlvec.registry import EnvLike, resolve_all
from marlvec.spaces.action_masks import split_action_mask
from marlvec.trees import map_tree
from marlvec.vector.buffers import Buffers
from marlvec.vector.calls import CallEvent, exclusive
from marlvec.vector.cores import MANY_ENVS, check_num_envs
from marlvec.vector.in_process import InProcessVectorEnv
from marlvec.vector.infos import ShardReport
from marlvec.vector.settings import LONGEST_WAIT, Settings
from marlvec.vector.shard import Shard
from marlvec.vector.vector_step import VectorStep

Spaces = Mapping[str, tuple[Space[Any], Space[Any]]]
"""Agent name → its observation space and its action space."""


def make(
    env: EnvLike | Spaces | EnvSpec,
    num_envs: int = 1,
    *,
    batch_size: int | None = None,
    batch_wait: float = 0.002,
    max_backlog: int = 64,
    lockstep: bool = False,
    max_episode_steps: int | None = None,
    idle_timeout: float | None = None,
    copy: bool = True,
    grouped: bool = False,
    validate: str = "sample",
    **kwargs: Any,
) -> ExternalVectorEnv:
    """Make a vectorizer for episodes that run outside.

    Args:
        env: The env that runs outside: a dict of agent name to ``(observation space, action space)``; or anything that
            `marlvec.make` takes for one env (it is built here once for its spaces, and closed); or an `EnvSpec`. An
            ``action_mask`` in an observation space is a mask, as in `marlvec.make`.
        num_envs: How many episodes can run at a time.
        batch_size: See `ExternalVectorEnv`.
        batch_wait: See `ExternalVectorEnv`.
        max_backlog: See `ExternalVectorEnv`.
        lockstep: See `ExternalVectorEnv`.
        max_episode_steps: See `ExternalVectorEnv`.
        idle_timeout: See `ExternalVectorEnv`.
        copy: As in `marlvec.make`.
        grouped: As in `marlvec.make`.
        validate: As in `marlvec.make`; see also `ExternalVectorEnv`.
        kwargs: For the env's constructor.

    Returns:
        A vectorizer whose slots are filled from outside, for a `Collector`.

    Raises:
        ArgumentError: An argument is wrong, or a space is not a Gymnasium space.
        ResourceError: The machine lacks memory for so many envs.
        Exception: As `marlvec.make`, if an env is built.
    """
    if isinstance(num_envs, Integral) and num_envs > MANY_ENVS:
        check_num_envs(int(num_envs))
    return ExternalVectorEnv(
        _spec_of(env, kwargs),
        num_envs,
        batch_size=batch_size,
        batch_wait=batch_wait,
        max_backlog=max_backlog,
        lockstep=lockstep,
        max_episode_steps=max_episode_steps,
        idle_timeout=idle_timeout,
        copy=copy,
        grouped=grouped,
        validate=validate,
    )


def _spec_of(env: EnvLike | Spaces | EnvSpec, kwargs: Mapping[str, Any]) -> EnvSpec:
    if isinstance(env, (Mapping, EnvSpec)):
        if kwargs:
            raise ArgumentError(
                f"make(): {sorted(kwargs)} are for an env's constructor, but env is a dict of spaces or a spec; "
                f"leave them out"
            )
        return env if isinstance(env, EnvSpec) else _spec_of_spaces(env)
    (recipe,) = write_recipes(resolve_all(env, 1), kwargs=kwargs)
    built = adapt(recipe())
    try:
        return built.spec()
    finally:
        built.close()


def _spec_of_spaces(spaces: Spaces) -> EnvSpec:
    if not spaces:
        raise ArgumentError("make(env): expected at least one agent with its spaces, got an empty dict")
    for name, pair in spaces.items():
        if (
            not isinstance(name, str)
            or not isinstance(pair, tuple)
            or [isinstance(s, Space) for s in pair] != [True] * 2
        ):
            raise ArgumentError(
                f"make(env): expected agent name -> (observation space, action space), got {name!r}: {pair!r}"
            )
    pairs = [
        split_action_mask(observation, action, f"make(env): observation space of agent {name!r}")
        for name, (observation, action) in spaces.items()
    ]
    return EnvSpec(
        name="external",
        agents=tuple(spaces),
        observation_spaces=tuple(space for space, _ in pairs),
        action_spaces=tuple(action for _, action in spaces.values()),
        mask_sizes=tuple(size for _, size in pairs),
    )


class ExternalVectorEnv(InProcessVectorEnv):
    """N slots for episodes that external simulators drive. Made by `marlvec.external.make`.

    A slot is an env that other code steps. A reset requests an episode, and returns once one has begun outside; a send
    hands out actions, and returns the rows that follow. The row that ends an episode holds its end only
    (``autoreset_mode="disabled"``). Values are checked in the simulator's call: wrong values raise there, never here.
    An abandoned episode is a fault (``infos["fault"]``, `faults`).

    It starts no thread: `recv` takes rows, and `send` gives answers.

    Without ``lockstep``, a `Collector` waits for no particular slot: it answers the slots that request actions, several
    in one call, and stores rows as they come. Batches have exactly the requested size, with episodes in order of
    arrival. With ``lockstep`` it steps all slots together, as every other vectorizer: batches equal those of the same
    envs in this process bit for bit, and all slots must be in use.

    Args:
        spec: Agents and spaces of one external env.
        num_envs: N, how many episodes can run at a time.
        batch_size: How many rows are taken, and answered in one policy call, at most; None: N.
        batch_wait: Seconds to wait for more rows after the first, while other simulators are working on one.
        max_backlog: How many rows may wait in one slot.
        lockstep: Whether all slots are stepped together.
        max_episode_steps: Episode length in steps: then all agents in it are truncated, and its next `ask` ends it.
            None: no limit.
        idle_timeout: Seconds after which an episode whose simulator is silent, although it is its turn, is lost.
            Checked during `collect`, or when a driver needs a slot. None: never.
        copy: As in `marlvec.make`.
        grouped: As in `marlvec.make`.
        validate: As in `marlvec.make`, for actions. Values from outside are always checked against their spaces, except
            with ``"off"``; shapes and dtypes always.

    Raises:
        ArgumentError: An argument is wrong.

    Attributes:
        gateway: The `EpisodeGateway` that begins episodes.
    """

    backend = "external"

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int = 1,
        *,
        batch_size: int | None = None,
        batch_wait: float = 0.002,
        max_backlog: int = 64,
        lockstep: bool = False,
        max_episode_steps: int | None = None,
        idle_timeout: float | None = None,
        copy: bool = True,
        grouped: bool = False,
        validate: str = "sample",
    ) -> None:
        chosen = Settings(autoreset_mode="disabled", copy=copy, grouped=grouped, validate=validate)
        super().__init__(num_envs, chosen)
        if batch_size is not None and batch_size < 1:
            raise ArgumentError(f"batch_size: expected at least 1, or None, got {batch_size}")
        if not 0 <= batch_wait < float("inf"):
            raise ArgumentError(f"batch_wait: expected seconds, 0 or more, got {batch_wait}")
        if max_backlog < 1:
            raise ArgumentError(f"max_backlog: expected at least 1, got {max_backlog}")
        if max_episode_steps is not None:
            check_limit(max_episode_steps)
        if idle_timeout is not None and not 0 < idle_timeout < float("inf"):
            raise ArgumentError(f"idle_timeout: expected seconds above 0, or None, got {idle_timeout}")
        self.lockstep = bool(lockstep)
        self._most, self._batch_wait = batch_size or num_envs, batch_wait
        self._slot_envs = [SlotEnv(spec) for _ in range(num_envs)]
        self._shard = Shard([partial(_identity, slot_env) for slot_env in self._slot_envs], 0, chosen)
        buffers = Buffers(self._shard.spec, num_envs)
        self._shard.attach(buffers)
        self._slots = [buffers.slot(i) for i in range(num_envs)]  # to read actions from
        self._exchange = RowExchange(num_envs, max_backlog, idle_timeout)
        self._bind(self._shard.spec, buffers)
        checker = ValueChecker(self.spec, values=chosen.validate != "off")
        self.gateway = EpisodeGateway(self._exchange, checker, max_episode_steps)

    def _find_obstacles(self) -> dict[int, str]:
        why = "its episodes run in an external simulator, which keeps their state"
        return dict.fromkeys(range(self.num_envs), why)

    @exclusive()
    def drain(self, timeout: float | None = None) -> VectorStep:
        """Receive all available rows without waiting; episodes whose next row has not come are lost.

        Args:
            timeout: Ignored: nothing is waited for.

        Returns:
            As `VectorEnv.drain`. Slots in which no episode had begun get a row in which no agent is alive.
        """
        self._call_state.check_open()
        self._exchange.cancel_requests()
        return super().drain(timeout)

    def _request_reset(self, call: str, seed: Any, options: Options, env_ids: EnvIds | None) -> None:
        if options is not None:
            raise ArgumentError(f"{call}(options={options!r}): episodes begin outside; options cannot reach them")
        super()._request_reset(call, seed, options, env_ids)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        if operation not in ("reset", "step", "send"):
            super()._send_request(operation, env_ids, arguments)
            return
        self._is_sending = True
        due = self._exchange.request_rows(env_ids.tolist(), "reset" if operation == "reset" else "step")
        for row in due:
            self._answer(row)

    def _answer(self, row: ExternalRow) -> None:
        actions = self._slots[row.episode.env_id].read_actions()
        try:
            assert row.answer is not None
            row.answer({self.agents[a]: actions[a] for a in row.obs})
        except Exception as error:  # the simulator's own callback failed: its episode is lost
            row.episode.abandon(error)

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        if self._requests:
            return super()._receive(timeout, everyone)
        most, wait_for_more = (self.num_envs, 0.0) if everyone else (self._most, self._batch_wait)
        taken = self._exchange.take(timeout, most, wait_for_more)
        try:
            if taken:
                self._replies.append((np.array([i for i, _ in taken], np.int64), self._write(taken)))
        except BaseException:  # e.g. Ctrl-C: the taken rows are half written
            self._call_state.on(CallEvent.BREAK, BrokenError("recv() was interrupted while it took rows"))
            raise
        return bool(taken)

    def _run(
        self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]
    ) -> ShardReport | None:
        return self._shard.do(operation, env_ids.tolist(), arguments)

    def _forget_requests(self) -> bool:
        return False  # simulators still work on their requests

    def _write(self, taken: Sequence[tuple[int, ExternalRow | None]]) -> ShardReport:
        report = ShardReport()
        first: list[int] = []
        steps: list[int] = []
        for i, row in taken:
            if row is None or row.lost is not None:
                self._write_lost(i, None if row is None else row.lost, report)
                continue
            self._slot_envs[i].row = row
            (first if row.first else steps).append(i)
        if first:
            nothing = [None] * len(first)
            report.update(self._shard.reset(first, nothing, nothing))
        if steps:
            report.update(self._shard.step(steps))
        return report

    def _write_lost(self, i: int, reason: BaseException | None, report: ShardReport) -> None:
        """Write a row for a lost episode or, without a reason, for an empty slot."""
        buffers = self._buffers
        alive = buffers.alive[i].copy()
        buffers.reward[i] = 0
        buffers.events[i] = False
        buffers.done[i] = True
        buffers.alive[i] = buffers.acting[i] = False
        for clear in (buffers.clear_obs, buffers.clear_final_obs, buffers.clear_masks):
            clear(i)
        if reason is not None:
            buffers.truncated[i] = alive
            summary = f"{type(reason).__name__}: {reason}"
            report.faults[i] = Failure(i, "episode", summary, "", reason)
            if not isinstance(reason, (ClosedError, EpisodeCut)):  # dropped on purpose
                self._fault_log.add([i], [i], "episode", summary, "lose", quiet=False)

    def _shut_down(self, timeout: float) -> None:
        self._exchange.close()
        self._shard.close()


def _identity(slot_env: SlotEnv) -> SlotEnv:
    return slot_env


class SlotEnv(MultiAgentEnv):
    """Writes `row`, which comes from outside, into its slot. Its shard treats it as any other env."""

    row: ExternalRow

    def __init__(self, spec: EnvSpec) -> None:
        self.name, self.agents, self.metadata = spec.name, spec.agents, spec.metadata
        self.observation_spaces, self.action_spaces = spec.observation_spaces, spec.action_spaces
        self.mask_sizes = spec.mask_sizes
        self._acting: tuple[int, ...] = ()

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._acting = ()
        return self._write(slot)

    def step(self, slot: Slot) -> Info | None:
        for a in self._acting:
            slot.acting[a] = False
            slot.clear_mask(a)
        return self._write(slot)

    def _write(self, slot: Slot) -> Info | None:
        row = self.row
        for a, obs in row.obs.items():
            slot.alive[a] = slot.acting[a] = True
            slot.write_obs(a, obs)
        for a, mask in row.masks.items():
            slot.write_mask(a, mask)
        for a, reward in row.rewards.items():
            slot.reward[a] = reward
        for a, (obs, terminated, truncated) in row.ended.items():
            if obs is None:
                slot.final_missing[a] = True  # the row keeps the agent's last observation
            else:
                slot.write_obs(a, obs)
            slot.terminated[a], slot.truncated[a] = terminated, truncated
            slot.alive[a] = False
        self._acting = tuple(row.obs)
        slot.done = row.done
        infos, row.infos = row.infos, {}  # the row object lives until the next one comes
        return infos or None


Dataset = Any
"""A `MultiAgentBatch` or `SampleBatch`, a saved file of either, a list of these, a recording, or a Minari dataset."""
_NEEDED = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
_IN_TIME = ("t", "env_t", "next_env_t", "eps_id", "agent_index")


@dataclass(slots=True)
class LoggedStep:
    """Everything that happened between two env steps, by agent name."""

    rewards: dict[str, float] = field(default_factory=dict)  # since the previous step
    ended: dict[str, Ending] = field(default_factory=dict)
    obs: dict[str, Any] = field(default_factory=dict)  # of the agents that act
    actions: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)  # where known


@dataclass(frozen=True, slots=True)
class LoggedEpisode:
    """One episode."""

    moments: Sequence[LoggedStep]  # in order; no agent acts in the last one
    as_policy: bool  # its actions are a policy's outputs, and not the actions that the env received


def read_logs(dataset: Dataset, agents: Sequence[str]) -> Callable[[], Iterator[LoggedEpisode]]:
    """Return a function that iterates over a dataset's episodes, from the first one at each call.

    An episode without an end is truncated at its last row. An episode that lacks rows in the middle raises
    `ArgumentError` when it is reached.
    """
    if hasattr(dataset, "iterate_episodes"):
        if len(agents) != 1:
            raise ArgumentError(f"dataset: Minari data has one agent, got agents {list(agents)}")
        return lambda: (_of_arrays(episode, agents[0]) for episode in dataset.iterate_episodes())
    if hasattr(dataset, "episode_batches"):

        def read_groups() -> Iterator[LoggedEpisode]:
            for group in dataset.episode_batches():
                _check(group, agents)
                yield from _of_batch(group, agents)

        return read_groups
    batches = [_batch(part) for part in (dataset if isinstance(dataset, (list, tuple)) else [dataset])]
    if not batches:
        raise ArgumentError("dataset: expected episodes, got an empty list")
    batch = batches[0] if len(batches) == 1 else MultiAgentBatch.concat(batches)
    _check(batch, agents)
    return lambda: _of_batch(batch, agents)


def _batch(part: Any) -> MultiAgentBatch:
    if isinstance(part, (str, PathLike)):
        part = _load(Path(part))
    if isinstance(part, SampleBatch):
        return MultiAgentBatch({"main": part}, env_steps=0)
    if isinstance(part, MultiAgentBatch):
        return part
    raise ArgumentError(
        f"dataset: expected a MultiAgentBatch or SampleBatch, a file that one of them saved, a list of these, or a "
        f"Minari dataset; got {type(part).__name__}"
    )


def _load(path: Path) -> MultiAgentBatch | SampleBatch:
    try:
        return MultiAgentBatch.load(path)
    except CheckpointError:
        if not path.is_file():
            raise
        return SampleBatch.load(path)  # raises if the file holds neither


def _check(batch: MultiAgentBatch, agents: Sequence[str]) -> None:
    for policy_id, rows in batch.items():
        if missing := [name for name in (*_NEEDED, *_IN_TIME) if name not in rows]:
            raise ArgumentError(
                f"rows of policy {policy_id!r} lack the columns {missing}; save batches with all of their columns"
            )
        if np.any(rows.get(EXECUTED_MISSING, False)):
            raise ArgumentError(
                f"rows of policy {policy_id!r} are marked in {EXECUTED_MISSING!r}: their executed actions are "
                f"unknown; put noise and masks before the connectors that convert actions"
            )
        if (most := int(rows["agent_index"].max(initial=0))) >= len(agents):
            raise ArgumentError(
                f"rows of policy {policy_id!r} have agent number {most}, but the agents are {list(agents)}"
            )


def _of_batch(batch: MultiAgentBatch, agents: Sequence[str]) -> Iterator[LoggedEpisode]:
    ids = [rows["eps_id"] for rows in batch.values()]
    for eps_id in np.unique(np.concatenate(ids)).tolist() if ids else ():
        yield LoggedEpisode(_moments(eps_id, batch, agents), as_policy=True)


def _moments(eps_id: int, batch: Mapping[str, SampleBatch], agents: Sequence[str]) -> list[LoggedStep]:
    moments: dict[int, LoggedStep] = {}
    cut: dict[str, Ending] = {}
    for rows in batch.values():
        mine = np.flatnonzero(rows["eps_id"] == eps_id)
        for a in np.unique(rows["agent_index"][mine]).tolist():
            indices = mine[rows["agent_index"][mine] == a]
            indices = indices[np.argsort(rows["t"][indices], kind="stable")]
            _check_whole(rows, indices, f"episode {eps_id}, agent {agents[a]!r}")
            for i in indices.tolist():
                _note(rows, i, agents[a], moments)
            last = int(indices[-1])
            if not (rows["terminated"][last] or rows["truncated"][last]):
                cut[agents[a]] = (_at(rows["next_obs"], last), False, True)
    moments[max(moments)].ended.update(cut)
    return [moments[t] for t in sorted(moments)]


def _check_whole(rows: SampleBatch, indices: NDArray[np.int64], whose: str) -> None:
    if (gaps := np.flatnonzero(np.diff(rows["t"][indices]) != 1)).size:
        t = int(rows["t"][indices[gaps[0]]])
        raise ArgumentError(f"{whose}: rows are missing between its decision number {t} and the next one")


def _note(rows: SampleBatch, i: int, agent: str, moments: dict[int, LoggedStep]) -> None:
    begins = moments.setdefault(int(rows["env_t"][i]), LoggedStep())
    actions = rows[EXECUTED] if EXECUTED in rows else rows["actions"]
    begins.obs[agent], begins.actions[agent] = _at(rows["obs"], i), _at(actions, i)
    if "action_mask" in rows:
        begins.masks[agent] = rows["action_mask"][i]
    ends = moments.setdefault(int(rows["next_env_t"][i]), LoggedStep())
    ends.rewards[agent] = float(rows["rewards"][i])
    terminated, truncated = bool(rows["terminated"][i]), bool(rows["truncated"][i])
    if terminated or truncated:
        is_missing = "next_obs_missing" in rows and rows["next_obs_missing"][i]
        ends.ended[agent] = (None if is_missing else _at(rows["next_obs"], i), terminated, truncated)


def _of_arrays(episode: Any, agent: str) -> LoggedEpisode:
    """Convert a Minari episode: arrays over time T, observations T + 1."""
    length = len(episode.rewards)
    moments = [
        LoggedStep(
            rewards={agent: float(episode.rewards[t - 1])} if t else {},
            obs={agent: _at(episode.observations, t)},
            actions={agent: _at(episode.actions, t)},
        )
        for t in range(length)
    ]
    terminated, truncated = bool(episode.terminations[-1]), bool(episode.truncations[-1])
    ending = (_at(episode.observations, length), terminated, truncated or not terminated)
    return LoggedEpisode([*moments, LoggedStep({agent: float(episode.rewards[-1])}, {agent: ending})], as_policy=False)


def _at(tree: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i], tree)


class ExternalEnv(EpisodeDriver):
    """Drives episodes from outside the collector, in its own thread or in yours.

        class Game(ExternalEnv):
            def run(self):
                while not self.stopping:
                    episode = self.start_episode()
                    obs = simulator.begin()
                    while not simulator.over:
                        actions = self.get_action(episode, obs)
                        obs, rewards = simulator.go(actions)
                        self.log_returns(episode, rewards)
                    self.end_episode(episode, obs)

        with Game(envs):                      # starts the thread, and stops it
            batch = collector.collect(4096)

    Without a `run`, create one and call it from your own threads. Different episodes may be driven from different
    threads, each episode by one thread at a time.

    If the vectorizer has one agent, observations, actions, rewards and infos are that agent's values; otherwise they
    are dicts by agent name.

    If `run` raises, the collector's call raises `DriverGone` at once, and the driver's running episodes are lost;
    `stop` loses them, too. If `run` raises `EpisodeCut`, it is called again.

    Args:
        envs: The vectorizer that its episodes run in.
        timeout: Seconds that each call waits for the collector at most; None: for ever. The collector answers only
            during `collect`, so the time between two calls of `collect` counts.
        max_episodes: How many of its episodes may run at a time; None: as many as there are slots.
        dicts: Whether values are dicts by agent name even if there is one agent.

    Attributes:
        gateway: The vectorizer's `EpisodeGateway`.
        agents: Agent names, in order.
        timeout: As given; may be changed.
    """

    def __init__(
        self,
        envs: ExternalVectorEnv,
        *,
        timeout: float | None = None,
        max_episodes: int | None = None,
        dicts: bool = False,
    ) -> None:
        if max_episodes is not None and max_episodes < 1:
            raise ArgumentError(f"max_episodes: expected at least 1, or None, got {max_episodes}")
        self.gateway, self._local_episodes = envs.gateway, LocalEpisodes(envs.gateway, max_episodes)
        super().__init__(self._local_episodes, self.gateway.agents, timeout, dicts=dicts)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Drive the simulator; runs in the thread that `start` starts. Return when `stopping` is True.

        If it raises `EpisodeCut`, its other running episodes are lost, and it is called again.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    # --- the thread

    def start(self) -> Self:
        """Start a thread that calls `run`.

        Returns:
            This object.

        Raises:
            StateError: The thread is already running, or the class does not define `run`.
        """
        if type(self).run is ExternalEnv.run:
            raise StateError(
                f"{type(self).__name__} has no run(): derive from ExternalEnv, or call it from your thread"
            )
        self._check_process("start()")
        if self.is_alive:
            raise StateError(f"{type(self).__name__} start(): its thread runs already; stop() it first")
        self._local_episodes.stopped = False
        self.gateway.arrive()
        self._thread = threading.Thread(target=self._main, name=f"marlvec-{type(self).__name__}", daemon=True)
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether its thread is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether `run` must return: `stop` was called, or the vectorizer was closed."""
        return self._local_episodes.stopped or self.gateway.closed

    def stop(self, timeout: float | None = 10.0) -> None:
        """Stop the thread: waiting calls raise `ClosedError`, and running episodes are lost.

        Safe to call again, and if no thread was started.

        Args:
            timeout: Seconds to wait for `run` to return; None: for ever.

        Raises:
            StateError: `run` did not return in time; the thread still runs.
        """
        self._local_episodes.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise StateError(
                f"{type(self).__name__}.run() has not returned {timeout} s after stop(); have its loops test "
                f"self.stopping"
            )

    def __enter__(self) -> Self:
        return self if type(self).run is ExternalEnv.run else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "its thread runs" if self.is_alive else "no thread"
        return f"<{type(self).__name__}: {len(self._local_episodes)} episodes, {state}>"

    def _main(self) -> None:
        name, error = type(self).__name__, None
        while True:
            try:
                self.run()
            except BaseException as raised:  # sys.exit() too
                if not (self.stopping and isinstance(raised, StateError)):  # stop() and close() end run() by this error
                    error = raised
            self._local_episodes.abandon(error or DriverGone(f"{name}.run() returned while the episode was running"))
            if not isinstance(error, EpisodeCut):
                break
            error = None
        if error is not None:
            gone = DriverGone(f"{name}.run() raised {type(error).__name__}: {error}")
            gone.__cause__ = error
            self.gateway.fail(gone)
        self.gateway.depart()

    # --- episodes

    def log_action(
        self,
        episode_id: Hashable,
        obs: Any,
        actions: Any,
        *,
        masks: Any = None,
        timeout: float | None = DEFAULT,
        as_policy: bool = False,
    ) -> None:
        """Log actions that were taken at observations; no policy is asked for an action.

        Waits only while too many rows wait for the collector.

        Args:
            episode_id: The episode.
            obs: Observations of all agents that act now.
            actions: Their actions.
            masks: As `get_action`.
            timeout: Seconds to wait until a row is accepted; default: the constructor's.
            as_policy: As `ExternalEpisode.log_action`.

        Raises:
            AnswerTimeout: The row was not accepted in time. Nothing was logged.
            MarlvecError: As `get_action`.
        """
        tables = self._table(obs), self._table(actions), None if masks is None else self._table(masks)
        self._local_episodes.log(episode_id, *tables, self._seconds(timeout), as_policy=as_policy)


class Replay(ExternalEnv):
    """Replays logged episodes, as many at a time as there are free slots. Made by `replay`.

    Args:
        envs: The vectorizer.
        dataset: The episodes.
        repeat: How often to replay all; None: until stopped.
        training_enabled: Whether their rows go into batches.
    """

    def __init__(
        self, envs: ExternalVectorEnv, dataset: Dataset, *, repeat: int | None = 1, training_enabled: bool = True
    ) -> None:
        if repeat is not None and repeat < 1:
            raise ArgumentError(f"repeat: expected at least 1, or None, got {repeat}")
        super().__init__(envs, dicts=True)
        self._read = read_logs(dataset, self.gateway.agents)
        self._repeat, self._training_enabled = repeat, training_enabled

    def run(self) -> None:
        """Replay all episodes."""
        logs = self._logs()
        playing: list[Iterator[None]] = []
        todo = next(logs, None)
        while (todo is not None or playing) and not self.stopping:
            if todo is not None and len(playing) < self.gateway.num_envs:
                try:  # other drivers may have taken the remaining slots
                    playing.append(self._play(todo, timeout=0.0 if playing else None))
                    next(playing[-1])
                except EpisodesFull:
                    playing.pop()
                else:
                    todo = next(logs, None)
                    continue
            # In turns, so that the collector finds rows of all episodes.
            playing = [play for play in playing if next(play, self) is not self]

    def _logs(self) -> Iterator[LoggedEpisode]:
        rounds = 0
        while self._repeat is None or rounds < self._repeat:
            before = rounds
            for log in self._read():
                rounds = before + 1
                yield log
            if rounds == before:
                return  # the dataset has no episode

    def _play(self, log: LoggedEpisode, timeout: float | None) -> Iterator[None]:
        """Begin an episode, then log one row each time."""
        episode = self.start_episode(training_enabled=self._training_enabled, timeout=timeout)
        yield
        for moment in log.moments:
            if moment.rewards:
                self.log_returns(episode, moment.rewards)
            final_obs = {agent: obs for agent, (obs, _, _) in moment.ended.items()}
            terminated = {agent: over for agent, (_, over, _) in moment.ended.items()}
            truncated = {agent: cut for agent, (_, _, cut) in moment.ended.items()}
            if moment is log.moments[-1]:
                self.end_episode(episode, final_obs, terminated=terminated, truncated=truncated)
            elif moment.ended:
                self.end_agents(episode, final_obs, terminated=terminated, truncated=truncated)
            if moment.obs:
                self.log_action(
                    episode, moment.obs, moment.actions, masks=moment.masks or None, as_policy=log.as_policy
                )
                yield


def replay(
    dataset: Dataset, envs: ExternalVectorEnv, *, repeat: int | None = 1, training_enabled: bool = True
) -> Replay:
    """Replay logged episodes in a vectorizer; the rows hold the log's actions, not a policy's.

        envs = marlvec.external.make({"agent": (observations, actions)}, num_envs=8)
        with replay("run.npz", envs):
            batch = collector.collect(episodes=100)

    They are treated as live episodes: connectors, mapping, metrics, batches. Once all have been replayed, a call that
    waits for more raises `DriverGone`.

    Observations and actions of a saved batch are on the policy's side of the connectors that collected it: replay them
    with agent connectors that do not repeat that work. If exploration changed actions, the executed ones are replayed
    (``actions_executed``), and exploration does not change them. Columns that policies added (``logp``, …) are
    meaningless, as in every off-policy row; only a recurrent policy is called, for its state (see `RnnState`). Actions
    of a Minari dataset are those that the env received; see `Episode.log_action`.

    ``t``, ``env_t`` and ``next_env_t`` equal the log's if the log has the episode from its reset and a row of some
    agent at each env step. Otherwise they count from the log's first row, without env steps at which no agent of the
    log decides.

    Args:
        dataset: A `MultiAgentBatch` or `SampleBatch`, a saved file of either (``.npz``, ``.parquet``), a list of these
            (which may hold parts of the same episodes), or a Minari dataset.
        envs: The vectorizer.
        repeat: How often to replay all; None: until stopped.
        training_enabled: False: their rows are in no batch, but pass through everything else.

    Returns:
        A `Replay`, for use in a ``with`` block.

    Raises:
        ArgumentError: Not a dataset, or it does not fit the agents; see `read_logs`. An episode that lacks rows raises
            when it is reached.
        CheckpointError: A file cannot be read.
    """
    return Replay(envs, dataset, repeat=repeat, training_enabled=training_enabled)


_numbers = count()


class _Run:
    """An episode, its answers (`box`), and whether a request's answer was not fetched yet (`asked`)."""

    __slots__ = ("asked", "box", "episode")

    def __init__(self, episode: ExternalEpisode, box: queue.SimpleQueue[Any]) -> None:
        self.episode, self.box, self.asked = episode, box, False

    def check_idle(self, call: str) -> None:
        """Raise if the next answer would belong to an earlier request."""
        if self.asked:
            raise BusyError(f"{call}(): the earlier request's actions are still to be taken; wait_for_action() first")


class LocalEpisodes:
    """Running episodes of one driver; see `RunningEpisodes`. Any thread may use it, an episode one thread at a time."""

    def __init__(self, gateway: EpisodeGateway, max_episodes: int | None) -> None:
        self._gateway, self._max_episodes = gateway, max_episodes
        self._runs: dict[Hashable, _Run] = {}
        self._changed = threading.Condition()
        self.stopped = False

    def __len__(self) -> int:
        return len(self._runs)

    def stop(self) -> None:
        """Make waiting calls raise `ClosedError`, and lose running episodes."""
        with self._changed:
            self.stopped = True
            runs = self._take_all()
        for run in runs:
            run.box.put(ClosedError("stop() was called"))
            run.episode.abandon(ClosedError("stop() was called"))

    def abandon(self, error: BaseException) -> None:
        """Lose running episodes."""
        for run in self._take_all():
            run.episode.abandon(error)

    def _take_all(self) -> list[_Run]:
        with self._changed:
            runs = list(self._runs.values())
            self._runs.clear()
            self._changed.notify_all()
        return runs

    # --- calls of the driver

    def begin(
        self, key: Hashable | None, *, training_enabled: bool, env_id: int | None, timeout: float | None
    ) -> Hashable:
        key = f"episode-{next(_numbers)}" if key is None else key
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self.stopped:
                    raise ClosedError("start_episode(): stop() was called")
                if key in self._runs:
                    raise StateError(f"start_episode({key!r}): an episode with this id runs; end_episode() it first")
                if self._max_episodes is not None and len(self._runs) >= self._max_episodes:
                    raise EpisodesFull(
                        f"start_episode(): {len(self._runs)} episodes run, as many as max_episodes allows"
                    )
                try:
                    episode = self._gateway.begin(
                        training_enabled=training_enabled, env_id=env_id, on_lost=box.put, on_free=self._wake
                    )
                except EpisodesFull:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise
                    self._changed.wait(LONGEST_WAIT if left is None else min(left, LONGEST_WAIT))
                    continue
                self._runs[key] = _Run(episode, box)
                return key

    def ask(self, key: Hashable, obs: Any, masks: Any, timeout: float | None) -> Mapping[str, Any]:
        run = self._running(key)
        run.check_idle("get_action")
        with self._forgetting(key):
            run.episode.ask(obs, masks=masks, answer=run.box.put)
        run.asked = True
        return self.wait(key, timeout)

    def wait(self, key: Hashable, timeout: float | None) -> Mapping[str, Any]:
        run = self._running(key)
        if not run.asked:
            raise StateError(f"wait_for_action({key!r}): nothing was asked for; call get_action() first")
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            with suppress(queue.Empty):
                answer: Mapping[str, Any] | Exception = run.box.get(timeout=min(left, LONGEST_WAIT))
                break
            if left <= LONGEST_WAIT:
                raise AnswerTimeout(
                    f"episode {key!r}: no action within {timeout} s; is a collector collecting? The request stays "
                    f"pending: call wait_for_action() again, or end_episode()"
                )
        run.asked = False
        if isinstance(answer, Exception):
            self._forget(key)
            raise answer
        return answer

    def log(
        self, key: Hashable, obs: Any, actions: Any, masks: Any, timeout: float | None, *, as_policy: bool = False
    ) -> None:
        run = self._running(key)
        run.check_idle("log_action")
        with self._forgetting(key):
            run.episode.wait_for_room(timeout)
            run.episode.log_action(obs, actions, masks=masks, as_policy=as_policy)

    def log_returns(self, key: Hashable, rewards: Any, infos: Any) -> None:
        self._running(key).episode.log_returns(rewards, infos)

    def leave(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        """End some agents, without waiting; see `EpisodeDriver.end_agents`."""
        self._running(key).episode.end_agents(final_obs, terminated=terminated, truncated=truncated)

    def end(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        """End an episode, without waiting; see `EpisodeDriver.end_episode`."""
        self._running(key).episode.end(final_obs, terminated=terminated, truncated=truncated)
        self._forget(key)

    # --- inside

    def _running(self, key: Hashable) -> _Run:
        with self._changed:
            run = self._runs.get(key)
            if run is None and self.stopped:
                raise ClosedError(f"episode {key!r}: stop() was called")
        if run is None:
            raise EpisodeOver(f"no episode {key!r} runs: it has ended, was lost, or never began")
        if run.episode.over is not None:  # lost by the collector's side
            self._forget(key)
            raise type(run.episode.over)(str(run.episode.over))
        return run

    def _forget(self, key: Hashable) -> None:
        with self._changed:
            self._runs.pop(key, None)
            self._changed.notify_all()

    @contextmanager
    def _forgetting(self, key: Hashable) -> Iterator[None]:
        """Forget the episode if the call finds it over."""
        try:
            yield
        except EpisodeOver:
            self._forget(key)
            raise

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
