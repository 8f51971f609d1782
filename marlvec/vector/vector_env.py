"""The public face of many envs: arrays with an agent axis, and one state machine that guards every call.

Axis letters: N envs, A agents, A_g agents of a group. See docs/shapes.md for every array, axis by axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options, check_env_ids, spread_options
from marlvec.errors import ArgumentError, BusyError, NothingPendingError
from marlvec.vector.calls import STREAM, alone, whole
from marlvec.vector.controls import Controls
from marlvec.vector.fault_log import Fault
from marlvec.vector.result import VectorStep
from marlvec.vector.seeding import spread, stream

__all__ = ["VectorEnv"]

_ROWS = (*STREAM, "reset", "step")  # calls that bring rows


class VectorEnv(Controls):
    """N copies of a multi-agent env, stepped together or as they become ready.

    Made by `marlvec.make`, or directly from factories by `SyncVectorEnv`, `ThreadVectorEnv` and `AsyncVectorEnv`.

    Every reply belongs to one numbered request: nothing stale is ever delivered. Wrong calls raise before anything is
    sent: `ClosedError`, `BusyError` (names the pending call), `NothingPendingError`, `NotResetError`, `BrokenError`.

    What other libraries call by another name answers to it, too: `num_agents`, `possible_agents`, `step_async` and
    `step_wait`. There is no ``reset_async``: `async_reset` is something else.

    Attributes:
        num_envs: N.
        agent_num: A.
        agents: Agent names, in order of the agent axis.
        groups: Group name → indices of its agents.
        grouped: Whether observations and actions are dicts of groups: there are several groups, or it was asked for.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``; also in ``metadata["autoreset_mode"]``.
        done_on: ``"all"`` or ``"any"``: the end of which agents ends an episode.
        copy: Whether results are copies; else read-only views that are valid until the next call that steps.
        backend: ``"sync"``, ``"thread"`` or ``"async"``.
        on_fault: ``"raise"``, ``"restart"`` or ``"mask"``: what becomes of an env at which something goes wrong.
        brings_state: Whether each reset and step brings the envs' global state: ``make(..., state=True)``.
        drive_count: Goes up whenever somebody resets or steps envs or takes their rows. A `Collector` sees by it that
            somebody else has; control calls (`render`, `get_attr`, …) leave it as it is.
        spec: What one env looks like.
        metadata: The envs' metadata.
    """

    # --- reset and step ---

    @whole
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
        self._send_reset("reset", seed, options, env_ids)

    @alone
    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that `reset_send` asked for.

        Raises:
            FetchTimeout: Not all envs replied within ``timeout`` seconds; fetch again for the same reply.
        """
        result = self._fetch_all("reset", timeout)
        return result.obs, result.infos

    @whole
    @alone
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
            agent ended, ``final_observation`` (``final_obs`` is the same array).

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
            NotResetError: An env has no episode; names it.
            EnvRaised, EnvTimeout, WorkerDied: Something went wrong in an env or its worker, and ``on_fault`` does not
                say to go on; names it.
        """
        self._calls.check_idle("step")
        self._send_actions("step", actions, self._everyone)
        result = self._fetch_all("step")
        return result.obs, result.rewards, result.terminated, result.truncated, result.infos

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

    step_async, step_wait = step_send, step_fetch

    # --- send and recv: envs as they become ready ---

    @alone
    def async_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
    ) -> None:
        """Ask for new episodes, while other envs may be busy; `recv` brings each env once. Arguments as in `reset`.

        What `recv` has brought may be sent to at once, before the others are there.

        Raises:
            BusyError: One of these envs has a request in flight or a result not yet received, or a call that is not
                ``send`` or ``async_reset`` is pending.
        """
        self._send_reset("async_reset", seed, options, env_ids)

    @alone
    def send(self, actions: Any, env_ids: EnvIds | None = None) -> None:
        """Send actions to some envs, while others may be busy; `recv` brings the results.

        Args:
            actions: As in `step`, with one row per env in ``env_ids``, in their order.
            env_ids: Indices or (N,) bool mask; None for all.

        Raises:
            BusyError: One of them has a request in flight or a result not yet received, or a call that is not ``send``
                or ``async_reset`` is pending.
        """
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._calls.check_free(ids, "send")
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
        calls = self._calls
        calls.check_open()
        if calls.pending is None:
            raise NothingPendingError("recv() with nothing sent; send(), async_reset() or reset_send() first")
        if calls.pending not in _ROWS:
            raise BusyError(f"recv() while {calls.pending}() is pending; {calls.pending}_fetch() first")
        outstanding = calls.outstanding
        wanted = outstanding if min_envs is None else min_envs
        if min_envs is not None and not 1 <= min_envs <= outstanding:
            raise ArgumentError(f"min_envs must be from 1 to {outstanding} (the envs in flight), got {min_envs}")
        self._wait_for(wanted, timeout, "recv")
        return self._deliver()

    @alone
    def drain(self, timeout: float | None = None) -> VectorStep:
        """Receive all that is outstanding, so that `step`, `reset` and control calls are allowed again.

        Args:
            timeout: Seconds to wait; None for ever.

        Returns:
            A `VectorStep` with the rows of all envs that were in flight; without rows if none was.

        Raises:
            BusyError: A control call is pending; fetch it instead.
            FetchTimeout: Not all envs replied in time; nothing is lost, call again.
        """
        calls = self._calls
        calls.check_open()
        if calls.pending is not None and calls.pending not in _ROWS:
            raise BusyError(f"drain() while {calls.pending}() is pending; {calls.pending}_fetch() first")
        self._wait_for(calls.outstanding, timeout, "drain")
        return self._deliver()

    def close(self, timeout: float = 5.0) -> None:
        """Close all envs and leave nothing behind. May be called again, after errors, and with a call pending.

        Args:
            timeout: Seconds to let envs finish; what is not gone by then is killed.
        """
        if not self._calls.closed:
            self._calls.closed = True
            del self._buffers  # the memory goes now, or with the last view of it that the caller keeps
            self._copier.forget()
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
    def num_agents(self) -> int:
        """`agent_num`, as PettingZoo calls it: of all, whether they are alive or not."""
        return self.agent_num

    @property
    def possible_agents(self) -> tuple[str, ...]:
        """`agents`, as PettingZoo calls them."""
        return self.agents

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The last 1,000 faults that were survived, oldest first."""
        return tuple(self._recovery.log.faults)

    @property
    def incarnations(self) -> NDArray[np.int64]:
        """(N,) int64: how often each env was built anew."""
        return self._recovery.incarnations.copy()

    @property
    def masked_env_ids(self) -> tuple[int, ...]:
        """Envs that are out for good: ``on_fault="mask"``."""
        return tuple(np.flatnonzero(self._recovery.masked).tolist())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._calls.closed

    def _send_reset(self, call: str, seed: Any, options: Options, env_ids: EnvIds | None) -> None:
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._calls.check_free(ids, call)
        seeds = spread(seed, ids.tolist(), self.num_envs)
        spread_out = spread_options(options, len(ids))
        if ids is self._everyone and isinstance(seed, (int, np.integer)):
            self._rng = stream(int(seed))
        self._begin(call, "reset", ids, (seeds, spread_out))

    def _send_actions(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        self._calls.check_episodes(ids, call)
        self._action_writer.write(self._buffers, actions, ids, self._rows(ids))
        self._begin(call, call, ids)
