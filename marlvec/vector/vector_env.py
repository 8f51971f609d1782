"""The public face of many envs: arrays with an agent axis, and one state machine that guards every call.

Axis letters: N envs, A agents, A_g agents of a group. See docs/shapes.md for every array, axis by axis.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, FetchTimeout, NothingPendingError, WorkerDied
from marlvec.vector.actions import VALIDATE_MODES, ActionWriter
from marlvec.vector.arguments import EnvIds, Options, check_choice, check_env_ids, spread_options
from marlvec.vector.buffers import Buffers, Selection
from marlvec.vector.calls import Calls, alone
from marlvec.vector.faults import raise_failures
from marlvec.vector.result import VectorStep
from marlvec.vector.seeding import spread
from marlvec.vector.shard import AUTORESET_MODES, DONE_ON, Report

__all__ = ["VectorEnv"]


class VectorEnv(ABC):
    """N copies of a multi-agent env, stepped together or as they become ready.

    Made by `marlvec.make`, or directly from factories by `SyncVectorEnv` and `AsyncVectorEnv`.

    Every reply belongs to one numbered request: nothing stale is ever delivered. Wrong calls raise before anything is
    sent: `ClosedError`, `BusyError` (names the pending call), `NothingPendingError`, `NotResetError`, `BrokenError`.

    Attributes:
        num_envs: N.
        agent_num: A.
        agents: Agent names, in order of the agent axis.
        groups: Group name → indices of its agents.
        grouped: Whether observations and actions are dicts of groups: there are several groups, or it was asked for.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``; also in ``metadata["autoreset_mode"]``.
        done_on: ``"all"`` or ``"any"``: the end of which agents ends an episode.
        copy: Whether results are copies; else read-only views that are valid until the next call that steps.
        backend: ``"sync"`` or ``"async"``.
        spec: What one env looks like.
        metadata: The envs' metadata.
    """

    backend: str = "?"
    _place: str = "?"  # where envs run, for messages

    def __init__(self, num_envs: int, *, autoreset_mode: str, done_on: str, copy: bool, validate: str) -> None:
        if num_envs < 1:
            raise ArgumentError(f"num_envs must be at least 1, got {num_envs}")
        check_choice("autoreset_mode", autoreset_mode, AUTORESET_MODES)
        check_choice("done_on", done_on, DONE_ON)
        check_choice("validate", validate, VALIDATE_MODES)
        self.num_envs = num_envs
        self.autoreset_mode = autoreset_mode
        self.done_on = done_on
        self.copy = bool(copy)
        self._validate = validate
        self._calls = Calls(num_envs)
        self._everyone = np.arange(num_envs)
        self._everyone.flags.writeable = False
        self._report = Report()  # of replies that have arrived and were not handed out yet

    def _bind(self, spec: EnvSpec, buffers: Buffers, *, grouped: bool) -> None:
        """Take on what is known once the envs are built."""
        self.spec = spec
        self._buffers = buffers
        self.agents = spec.agents
        self.agent_num = len(spec.agents)
        self.groups = {group.name: group.agents for group in spec.groups}
        self.grouped = bool(grouped) or len(spec.groups) > 1
        self.metadata = {**spec.metadata, "autoreset_mode": self.autoreset_mode}
        self._action_writer = ActionWriter(spec, grouped=self.grouped, validate=self._validate)

    # --- what a backend provides ---

    @abstractmethod
    def _dispatch(self, operation: str, env_ids: NDArray[np.int64], arguments: Any) -> None:
        """Ask these idle envs to do ``"reset"``, ``"step"`` or ``"state"``; must not wait."""

    @abstractmethod
    def _gather(
        self, timeout: float | None, everyone: bool
    ) -> Sequence[tuple[NDArray[np.int64], Report | None]] | None:
        """Wait for replies: envs that are ready now, and what they report. None if time ran out.

        Args:
            timeout: Seconds; None for ever.
            everyone: Whether all that is in flight is wanted, so that the order of arrival does not matter.

        Raises:
            WorkerDied: A worker is gone.
        """

    @abstractmethod
    def _shut_down(self, timeout: float) -> None:
        """Release everything, whatever state it is in, in bounded time."""

    # --- reset and step ---

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all envs, or in the chosen ones.

        Args:
            seed: One int (0 to 2**64 - 1), spread over the envs by `marlvec.env_seeds`; or one int or None per chosen
                env, given as they are; or None: every env goes on with its own random stream.
            options: One dict for all, or one (or None) per chosen env.
            env_ids: The envs to reset, as indices or as an (N,) bool mask; None for all. The others keep their episode.

        Returns:
            ``(obs, infos)``; obs (N, A, …) as in `step`, of all envs.

        Raises:
            ArgumentError: Wrong seed, options or env_ids; nothing was sent.
            EnvRaised: An env raised; names it, with its traceback.
        """
        self.reset_send(seed=seed, options=options, env_ids=env_ids)
        return self.reset_fetch()

    @alone
    def reset_send(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
    ) -> None:
        """Ask for a reset; `reset_fetch` or `recv` brings the result. Arguments as in `reset`."""
        self._calls.check_idle("reset_send")
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        seeds = spread(seed, ids.tolist(), self.num_envs)
        self._begin("reset", "reset", ids, (seeds, spread_options(options, len(ids))))

    @alone
    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that `reset_send` asked for.

        Raises:
            FetchTimeout: Not all envs replied within ``timeout`` seconds; fetch again for the same reply.
        """
        result = self._fetch_all("reset", timeout)
        return result.obs, result.infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all envs.

        Args:
            actions: (N, A, …), a tree of such arrays for Dict and Tuple spaces, or a dict of groups to (N, A_g, …).
                Those of agents that are not acting are ignored and may be anything.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``: obs (N, A, …) or a dict of groups, rewards (N, A) float64,
            both flags (N, A) bool; infos is Gymnasium's dict of arrays (see `marlvec.vector.infos`), in which marlvec
            fills ``alive``, ``acting``, ``reset_mask``, ``action_mask`` (where there is one) and, in steps in which an
            agent ended, ``final_observation``.

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
            NotResetError: An env has no episode; names it.
            EnvRaised, WorkerDied: Something went wrong in an env or its worker; names it.
        """
        self.step_send(actions)
        return self.step_fetch()

    @alone
    def step_send(self, actions: Any) -> None:
        """Send actions to all envs; `step_fetch` brings the result."""
        self._calls.check_idle("step_send")
        self._send_actions("step", actions, self._everyone)

    @alone
    def step_fetch(
        self, timeout: float | None = None
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Wait for the step that `step_send` began.

        Raises:
            FetchTimeout: Not all envs replied within ``timeout`` seconds; fetch again for the same reply.
        """
        result = self._fetch_all("step", timeout)
        return result.obs, result.rewards, result.terminated, result.truncated, result.infos

    # --- send and recv: envs as they become ready ---

    @alone
    def send(self, actions: Any, env_ids: EnvIds | None = None) -> None:
        """Send actions to some envs, while others may be busy; `recv` brings the results.

        Args:
            actions: As in `step`, with one row per env in ``env_ids``, in their order.
            env_ids: Indices or (N,) bool mask; None for all.

        Raises:
            BusyError: One of them has a request in flight or a result not yet received, or a `step` or `reset` is
                pending.
        """
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._calls.check_free(ids)
        self._send_actions("send", actions, ids)

    @alone
    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> VectorStep:
        """Receive the rows of envs that are ready, first come first served.

        Args:
            min_envs: Wait for at least so many; None for all that are in flight.
            timeout: Seconds to wait; None for ever.

        Returns:
            A `VectorStep` with the rows of ``result.env_ids``; in env order if these are all envs.

        Raises:
            NothingPendingError: Nothing was sent.
            FetchTimeout: Too few envs replied in time; nothing is lost, call again.
        """
        self._calls.check_open()
        if self._calls.pending is None:
            raise NothingPendingError("recv() with nothing sent; send() or reset_send() first")
        outstanding = self._calls.outstanding
        wanted = outstanding if min_envs is None else min_envs
        if not 1 <= wanted <= outstanding:
            raise ArgumentError(f"min_envs must be from 1 to {outstanding} (the envs in flight), got {min_envs}")
        self._wait_for(wanted, timeout, "recv")
        return self._deliver()

    @alone
    def state(self) -> NDArray[Any]:
        """Global state of every env, (N, *state_space.shape).

        Raises:
            ArgumentError: The envs have no ``state_space``.
        """
        if self.spec.state_space is None:
            raise ArgumentError(f"{self.spec.name} has no global state: it declares no state_space")
        self._calls.check_idle("state")
        self._calls.check_episodes(self._everyone, "state")
        self._begin("state", "state", self._everyone, None)
        self._fetch_all("state", None)
        assert self._buffers.state is not None
        return self._buffers.state.copy()

    def close(self, timeout: float = 5.0) -> None:
        """Close all envs and leave nothing behind. May be called again, after errors, and with a call pending.

        Args:
            timeout: Seconds to let envs finish; what is not gone by then is killed.
        """
        if not self._calls.closed:
            self._calls.closed = True
            del self._buffers  # the memory goes now, or with the last view of it that the caller keeps
            self._shut_down(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        groups = ", ".join(f"{group}: {len(members)}" for group, members in self.groups.items())
        return (
            f"<{name} of {self.spec.name}: num_envs={self.num_envs}, agent_num={self.agent_num} ({groups}), "
            f"autoreset_mode={self.autoreset_mode!r}, {self._calls}>"
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._calls.closed

    # --- spaces; reading one never touches an env ---

    def agent_observation_space(self, agent: str | int) -> spaces.Space[Any]:
        """One agent's observation space."""
        return self.spec.observation_spaces[self._agent_index(agent)]

    def agent_action_space(self, agent: str | int) -> spaces.Space[Any]:
        """One agent's action space."""
        return self.spec.action_spaces[self._agent_index(agent)]

    @property
    def state_space(self) -> spaces.Space[Any] | None:
        """Space of one env's global state, or None."""
        return self.spec.state_space

    @cached_property
    def single_observation_space(self) -> spaces.Space[Any]:
        """One env's observations: (A, …), or a Dict of groups to (A_g, …)."""
        return self._per_group([(g.name, batch_space(g.observation_space, len(g.agents))) for g in self.spec.groups])

    @cached_property
    def single_action_space(self) -> spaces.Space[Any]:
        """One env's actions: (A, …), or a Dict of groups to (A_g, …)."""
        return self._per_group([(g.name, batch_space(g.action_space, len(g.agents))) for g in self.spec.groups])

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:
        """All envs' observations: (N, A, …), or a Dict of groups to (N, A_g, …)."""
        return batch_space(self.single_observation_space, self.num_envs)

    @cached_property
    def action_space(self) -> spaces.Space[Any]:
        """All envs' actions: (N, A, …), or a Dict of groups to (N, A_g, …)."""
        return batch_space(self.single_action_space, self.num_envs)

    def _per_group(self, parts: list[tuple[str, spaces.Space[Any]]]) -> spaces.Space[Any]:
        return spaces.Dict(dict(parts)) if self.grouped else parts[0][1]

    def _agent_index(self, agent: str | int) -> int:
        if isinstance(agent, str):
            if agent not in self.agents:
                raise ArgumentError(f"no agent {agent!r}; there are {list(self.agents)}")
            return self.agents.index(agent)
        return range(self.agent_num)[agent]

    def _send_actions(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        self._calls.check_episodes(ids, call)
        self._action_writer.write(self._buffers, actions, ids, self._rows(ids))
        if len(ids):
            self._begin(call, "step", ids, None)

    def _begin(self, call: str, operation: str, ids: NDArray[np.int64], arguments: Any) -> None:
        self._calls.begin(call, ids)
        if operation == "reset":
            self._calls.lose_episodes(ids)  # until the new ones have begun
        try:
            self._dispatch(operation, ids, arguments)
        except WorkerDied as error:
            self._calls.broken = error
            raise

    def _fetch_all(self, call: str, timeout: float | None) -> VectorStep:
        self._calls.check_pending(call)
        self._wait_for(self._calls.outstanding, timeout, f"{call}_fetch")
        return self._deliver(everything=True)

    def _wait_for(self, wanted: int, timeout: float | None, call: str) -> None:
        """Take in replies until ``wanted`` envs are ready."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._calls.arrived < wanted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                news = self._gather(left, wanted == self._calls.outstanding)
            except WorkerDied as error:
                self._calls.broken = error
                raise
            if news is None:
                raise FetchTimeout(
                    f"{call}(): envs {self._calls.in_flight} did not reply within {timeout} s; "
                    f"their requests stay pending, fetch again"
                )
            for ids, report in news:
                self._calls.arrive(ids)
                if report is not None:
                    self._report.update(report)

    def _deliver(self, *, everything: bool = False) -> VectorStep:
        """Hand out what has arrived, or raise what went wrong in it."""
        was_state = self._calls.pending == "state"
        arrived = self._calls.hand_out()
        report, self._report = self._report, Report()
        ids = self._everyone if everything or len(arrived) == self.num_envs else arrived
        if not was_state:
            self._calls.have_episodes(arrived)
            if self.autoreset_mode == "disabled":
                self._calls.lose_episodes(arrived[self._buffers.done[arrived]])
        if failed := [failure.env_id for failure in report.failures]:
            ids = ids[~np.isin(ids, failed)]
            if not was_state:
                self._calls.lose_episodes(failed)
        rows = self._rows(ids)
        result = VectorStep(self._buffers, ids, rows, report, grouped=self.grouped, copy=self.copy)
        raise_failures(report.failures, self._place, result)
        return result

    def _rows(self, ids: NDArray[np.int64]) -> Selection:
        """A slice where all envs are meant, in order: no index array, no copies."""
        if ids is self._everyone or (len(ids) == self.num_envs and np.array_equal(ids, self._everyone)):
            return slice(None)
        return ids
