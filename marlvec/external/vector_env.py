"""`ExternalVectorEnv`: a vectorizer whose slots are filled from outside; `make` creates one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.making.recipe import write_recipes
from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info
from marlvec.envs.wrappers.time_limit import check_limit
from marlvec.errors import ArgumentError, BrokenError, ClosedError, EpisodeCut, Failure
from marlvec.external.exchange.gateway import EpisodeGateway
from marlvec.external.exchange.row import ExternalRow
from marlvec.external.exchange.row_exchange import RowExchange
from marlvec.external.exchange.value_checker import ValueChecker
from marlvec.registry import EnvLike, resolve_all
from marlvec.spaces.action_masks import split_action_mask
from marlvec.vector.backends.in_process import InProcessVectorEnv
from marlvec.vector.call_state import CallEvent, exclusive
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.report import Report
from marlvec.vector.processes.limits import MANY_ENVS, check_num_envs
from marlvec.vector.settings import Settings
from marlvec.vector.shards.shard import Shard
from marlvec.vector.vector_step import VectorStep

__all__ = ["make", "ExternalVectorEnv", "SlotEnv"]

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

    def _run(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> Report | None:
        return self._shard.do(operation, env_ids.tolist(), arguments)

    def _forget_requests(self) -> bool:
        return False  # simulators still work on their requests

    def _write(self, taken: Sequence[tuple[int, ExternalRow | None]]) -> Report:
        report = Report()
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

    def _write_lost(self, i: int, reason: BaseException | None, report: Report) -> None:
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
                self._fault_log.note([i], [i], "episode", summary, "lose", quiet=False)

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
