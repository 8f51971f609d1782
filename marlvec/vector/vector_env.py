"""`VectorEnv`: the public class: many envs as arrays with an agent axis.

Axis letters: N envs, A agents, A_g agents of a group. See docs/shapes.md for every array, axis by axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options, check_env_ids, spread_options
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, BusyError, NothingPendingError
from marlvec.spaces import batch_space
from marlvec.vector.base import ALL_ROWS
from marlvec.vector.call_state import CONTROL_CALLS, CallEvent, exclusive
from marlvec.vector.commands import Command, call_method, execute, set_attributes
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.env_states import StatefulVectorEnv
from marlvec.vector.faults.failures import raise_failures
from marlvec.vector.faults.recovery import Fault
from marlvec.vector.random_action import random_actions
from marlvec.vector.seeding import check_seed, random_stream, spread_seeds
from marlvec.vector.vector_step import VectorStep

__all__ = ["VectorEnv"]


class VectorEnv(StatefulVectorEnv):
    """N copies of a multi-agent env, stepped together or as they become ready.

    Made by `marlvec.make`, or directly by `SyncVectorEnv`, `ThreadVectorEnv`, `AsyncVectorEnv` (from factories),
    `NativeVectorEnv` and `PoolVectorEnv`.

    Every reply belongs to one numbered request: no stale result is returned. Wrong calls raise before a request is
    sent: `ClosedError`, `BusyError` (names the pending call), `NothingPendingError`, `NotResetError`, `BrokenError`.

    Names of other libraries work, too: `num_agents`, `possible_agents`, and Gymnasium's ``reset_async`` /
    ``reset_wait``, ``step_async`` / ``step_wait``, ``call_async`` / ``call_wait``. `async_reset` is a different call.

    Control calls (`call`, `exec_func`, `get_attr`, `set_attr`, `env_is_wrapped`, `render`) run where the envs live, one
    env after the other, and cost no episode. Their ``indices`` choose envs (None: all); answers have one entry per
    chosen env, in the order of ``indices``. They raise `BusyError` while another call is pending (its result can still
    be fetched), and `EnvRaised` if an env failed: it lists all failures, ``.result`` has the answers of the other envs
    by env index, and every episode continues. Masked envs (``on_fault="mask"``) are not called; their answer is None.

    Attributes:
        num_envs: N.
        agent_num: A.
        agents: Agent names, in order of the agent axis.
        groups: Group name → indices of its agents.
        grouped: Whether observations and actions are dicts of groups: with several groups, or if requested.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``; also in ``metadata["autoreset_mode"]``.
        done_on: An episode ends when ``"all"`` or ``"any"`` of its agents are done.
        copy: Whether results are copies; else read-only views, valid until the next call that steps.
        backend: Where envs run: ``"sync"``, ``"thread"``, ``"async"``, ``"native"``, ``"pool"`` or ``"external"``.
        backend_reason: Why ``make(backend="auto")`` chose this backend; empty if the caller chose it.
        shared_generators: Names of random generators in the envs' class that several envs of one process draw from,
            e.g. ``"Duel.rng"``; `marlvec.make` warns of them.
        on_fault: ``"raise"``, ``"restart"`` or ``"mask"``: how an env's fault is handled.
        brings_state: Whether each reset and step returns the envs' global state: ``make(..., state=True)``.
        drive_count: Grows with each reset, step and fetch of rows; a `Collector` finds by it that other code drove the
            envs. Control calls (`render`, `get_attr`, …) do not change it.
        spec: Agents, spaces and name of one env.
        metadata: The envs' metadata.
    """

    # --- spaces and agents ---

    def _bind(self, spec: EnvSpec, buffers: Buffers) -> None:
        super()._bind(spec, buffers)
        self.agents = spec.agents
        self.agent_num = len(spec.agents)
        self.groups = {group.name: group.agents for group in spec.groups}
        self.metadata: dict[str, Any] = {**spec.metadata, "autoreset_mode": self.autoreset_mode}

    def agent_observation_space(self, agent: str | int) -> spaces.Space[Any]:
        """Return one agent's own observation space, as its env declares it: not padded."""
        return self.spec.own_observation_spaces[self._agent_index(agent)]

    def agent_action_space(self, agent: str | int) -> spaces.Space[Any]:
        """Return one agent's own action space, as its env declares it: not padded."""
        return self.spec.own_action_spaces[self._agent_index(agent)]

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
                raise ArgumentError(f"no agent {agent!r}; the agents are {list(self.agents)}")
            return self.agents.index(agent)
        if not -self.agent_num <= agent < self.agent_num:
            raise ArgumentError(f"no agent number {agent}; the {self.agent_num} agents are {list(self.agents)}")
        return range(self.agent_num)[agent]

    # --- reset and step ---

    @exclusive(fetches=True)
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
                env, used unchanged; or None: every env continues its own random stream.
            options: One dict for all, or one (or None) per chosen env.
            env_ids: Envs to reset, as indices or as an (N,) bool mask; None: all. The other envs keep their episode.

        Returns:
            ``(obs, infos)``; obs (N, A, …) as in `step`, of all envs.

        Raises:
            ArgumentError: Wrong seed, options or env_ids; no request was sent.
            EnvRaised: An env raised; names the env, with its traceback.
        """
        self._call_state.check_idle("reset")
        self._request_reset("reset", seed, options, env_ids)
        result = self._fetch("reset")
        return result.obs, result.infos

    @exclusive()
    def reset_send(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
    ) -> None:
        """Request a reset; `reset_fetch` or `recv` returns the result. Arguments as in `reset`."""
        self._call_state.check_idle("reset_send")
        self._request_reset("reset", seed, options, env_ids)

    @exclusive()
    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that `reset_send` requested.

        Returns:
            ``(obs, infos)``, as `reset`.

        Raises:
            FetchTimeout: Not all envs replied within ``timeout`` seconds; fetch again for the same reply.
        """
        self._call_state.check_pending("reset")
        result = self._fetch("reset", timeout)
        return result.obs, result.infos

    @exclusive(fetches=True)
    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all envs.

        Args:
            actions: (N, A, …), a tree of such arrays for Dict and Tuple spaces, or a dict of groups to (N, A_g, …).
                Actions of agents that are not acting are ignored. Also, and slower, a dict of agents to (N, …), or a
                list with one dict of agents per env, in which agents that are not acting may be missing.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``: obs (N, A, …) or a dict of groups, rewards (N, A) float64,
            both flags (N, A) bool; infos is Gymnasium's dict of arrays (see `marlvec.vector.data.infos`), in which
            marlvec fills ``alive``, ``acting``, ``reset_mask``, ``action_mask`` (if the envs have one)
            and, in steps in which an agent ended, ``final_observation`` (``final_obs`` is the same array).

        Raises:
            ActionError: Wrong structure, shape, dtype or value; no request was sent.
            NotResetError: An env has no episode; names the env.
            EnvRaised, EnvTimeout, WorkerDied: An env or its worker failed, and ``on_fault`` does not handle it; names
                the env.
        """
        self._call_state.check_ready("step", self._everyone)
        self._request_step("step", actions, self._everyone)
        self._wait(self.num_envs, None, "step")
        result = self._deliver(everything=True)
        return result.obs, result.rewards, result.terminated, result.truncated, result.infos

    @exclusive()
    def step_send(self, actions: Any) -> None:
        """Send actions to all envs; `step_fetch` returns the result."""
        self._call_state.check_ready("step_send", self._everyone)
        self._request_step("step", actions, self._everyone)

    @exclusive()
    def step_fetch(
        self, timeout: float | None = None
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Wait for the step that `step_send` began.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``, as `step`.

        Raises:
            FetchTimeout: Not all envs replied within ``timeout`` seconds; fetch again for the same reply.
        """
        self._call_state.check_pending("step")
        result = self._fetch("step", timeout)
        return result.obs, result.rewards, result.terminated, result.truncated, result.infos

    reset_async, reset_wait = reset_send, reset_fetch
    step_async, step_wait = step_send, step_fetch

    # --- send and recv: envs as they become ready ---

    @exclusive()
    def async_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
    ) -> None:
        """Request new episodes, while other envs may be busy; `recv` returns each env once. Arguments as in `reset`.

        An env that `recv` has returned accepts `send` at once, before the other envs are ready.

        Raises:
            BusyError: One of these envs has a request in flight or a result not yet received, or a call other than
                ``send`` or ``async_reset`` is pending.
        """
        self._request_reset("async_reset", seed, options, env_ids)

    @exclusive()
    def send(self, actions: Any, env_ids: EnvIds | None = None) -> None:
        """Send actions to some envs, while others may be busy; `recv` returns the results.

        Args:
            actions: As in `step`, with one row per env in ``env_ids``, in the same order.
            env_ids: Indices or (N,) bool mask; None for all.

        Raises:
            BusyError: One of these envs has a request in flight or a result not yet received, or a call other than
                ``send`` or ``async_reset`` is pending.
        """
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._call_state.check_free(ids, "send")
        self._call_state.check_episodes(ids, "send")
        self._request_step("send", actions, ids)

    @exclusive()
    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> VectorStep:
        """Receive the rows of envs that are ready, in the order in which they became ready.

        Args:
            min_envs: Wait for at least this many envs; None for all envs in flight.
            timeout: Seconds to wait; None for ever.

        Returns:
            A `VectorStep` with the rows of ``result.env_ids``; in env order if these are all envs.

        Raises:
            NothingPendingError: No request was sent.
            FetchTimeout: Too few envs replied in time; no result is lost, call again.
        """
        calls = self._call_state
        calls.check_open()
        if calls.pending is None:
            raise NothingPendingError("recv() with nothing sent; send(), async_reset() or reset_send() first")
        if calls.pending in CONTROL_CALLS:
            raise BusyError(f"recv() while {calls.pending}() is pending; {calls.pending}_fetch() first", calls.pending)
        outstanding = calls.outstanding
        wanted = outstanding if min_envs is None else min_envs
        if min_envs is not None and not 1 <= min_envs <= outstanding:
            raise ArgumentError(f"min_envs must be from 1 to {outstanding} (the envs in flight), got {min_envs}")
        self._wait(wanted, timeout, "recv")
        return self._deliver()

    @exclusive()
    def drain(self, timeout: float | None = None) -> VectorStep:
        """Receive all outstanding results, so that `step`, `reset` and control calls are allowed again.

        Args:
            timeout: Seconds to wait; None for ever.

        Returns:
            A `VectorStep` with the rows of all envs that were in flight; it has no rows if none was.

        Raises:
            BusyError: A control call is pending; fetch it instead.
            FetchTimeout: Not all envs replied in time; no result is lost, call again.
        """
        calls = self._call_state
        calls.check_open()
        if calls.pending in CONTROL_CALLS:
            raise BusyError(f"drain() while {calls.pending}() is pending; {calls.pending}_fetch() first", calls.pending)
        self._wait(calls.outstanding, timeout, "drain")
        return self._deliver()

    # --- control calls ---

    @exclusive(fetches=True)
    def call(self, name: str, /, *args: Any, indices: EnvIds | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of the envs, on the outermost wrapper that has it.

        Args:
            name: Name of the method. ``reset``, ``step``, ``seed`` and ``close`` are refused. An attribute that is not
                a method is read; then no arguments are allowed.
            args: Its positional arguments; every env gets a copy.
            indices: The envs; None: all.
            kwargs: Its keyword arguments.

        Returns:
            The method's return values, one entry per chosen env, in the order of ``indices``.
        """
        return self._answers_to(call_method(name, args, kwargs), indices)

    @exclusive()
    def call_send(self, name: str, /, *args: Any, indices: EnvIds | None = None, **kwargs: Any) -> None:
        """Send the request of `call`; `call_fetch` returns the answers.

        Args:
            name: Name of the method or attribute.
            indices: Ids of the envs; None: all.
            args: Positional arguments of the method.
            kwargs: Keyword arguments of the method.
        """
        self._control(call_method(name, args, kwargs), indices)

    @exclusive()
    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the answers to `call_send`.

        Returns:
            One entry per chosen env, as `call`.

        Raises:
            FetchTimeout: Not all envs answered within ``timeout`` seconds; fetch again for the same answers.
        """
        return self._fetch_answers("call", timeout)

    call_async, call_wait = call_send, call_fetch

    @exclusive(fetches=True)
    def exec_func(
        self, fn: Callable[..., Any], /, indices: EnvIds | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run ``fn(env, *args, **kwargs)`` where each env lives; ``env`` is the user's, including all wrappers.

        Args:
            fn: Any callable; lambdas and closures are sent by value.
            indices: The envs, as the second positional argument or by name; None: all.
            args: More positional arguments; every env gets a copy.
            kwargs: Keyword arguments; an argument of ``fn`` named ``indices`` can only be passed by position.

        Returns:
            The return values of ``fn``, one entry per chosen env, in the order of ``indices``.
        """
        return self._answers_to(execute(fn, args, kwargs), indices)

    @exclusive()
    def exec_func_send(
        self, fn: Callable[..., Any], /, indices: EnvIds | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Send the request of `exec_func`; `exec_func_fetch` returns the answers.

        Args:
            fn: The function; its first argument is the env.
            indices: Ids of the envs; None: all.
            args: Further positional arguments.
            kwargs: Keyword arguments.
        """
        self._control(execute(fn, args, kwargs), indices)

    @exclusive()
    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the answers to `exec_func_send`.

        Returns:
            One entry per chosen env, as `exec_func`.

        Raises:
            FetchTimeout: Not all envs answered within ``timeout`` seconds; fetch again for the same answers.
        """
        return self._fetch_answers("exec_func", timeout)

    @exclusive(fetches=True)
    def get_attr(self, name: str, indices: EnvIds | None = None) -> tuple[Any, ...]:
        """Read an attribute of the envs, from the outermost wrapper that has it; a method is returned, not called.

        Args:
            name: Name of the attribute.
            indices: The envs; None: all.

        Returns:
            Its value, one entry per chosen env, in the order of ``indices``.
        """
        return self._answers_to(Command("get_attr", (name,)), indices)

    @exclusive(fetches=True)
    def set_attr(self, name: str, value: Any, indices: EnvIds | None = None) -> None:
        """Set an attribute of the envs, on the outermost wrapper that has it.

        Args:
            name: Name of the attribute. If no layer has it, it is created on the env beneath all wrappers.
            value: One value (a list counts as one) for every env; or a `PerEnv` with one value per chosen env.
            indices: The envs; None: all.
        """
        ids = self._chosen_ids("set_attr", indices)
        self._ask("set_attr", ids, set_attributes(name, value, len(ids)))
        self._fetch_answers("set_attr")

    @exclusive(fetches=True)
    def env_is_wrapped(self, cls: type, indices: EnvIds | None = None) -> tuple[bool, ...]:
        """Return whether each env is wrapped, at any depth, in an instance of ``cls``."""
        if not isinstance(cls, type):
            raise ArgumentError(f"env_is_wrapped(): expected a wrapper class, got {cls!r}")
        return self._answers_to(Command("env_is_wrapped", (cls,)), indices)

    @exclusive(fetches=True)
    def render(self, indices: EnvIds | None = None) -> tuple[Any, ...]:
        """Render envs.

        Args:
            indices: The envs; None: all.

        Returns:
            The return value of each env's own ``render()``: an (H, W, 3) uint8 frame for ``render_mode="rgb_array"``,
            text for ``"ansi"``, None for ``"human"``. `marlvec.tile_frames` combines frames into one picture.
        """
        return self._answers_to(Command("render"), indices)

    @exclusive(fetches=True)
    def state(self) -> NDArray[Any]:
        """Return the global state of every env, (N, *state_space.shape).

        With ``make(..., state=True)`` each reset and step also returns it as ``infos["state"]``, and the state in which
        an episode ended as ``infos["final_state"]``.

        Returns:
            ``(N, *state_space.shape)``, of the state space's dtype.

        Raises:
            ArgumentError: The envs have no ``state_space``.
        """
        if self.spec.state_space is None:
            raise ArgumentError(f"state(): {self.spec.name} has no global state: it declares no state_space")
        self._call_state.check_ready("state", self._everyone)
        self._ask("state", self._everyone)
        report = self._fetch_report("state")
        raise_failures(report.failures, self._place_name, report.answers)
        assert self._buffers.state is not None
        return self._buffers.state.copy()

    # --- answered from the rows of the last step ---

    @exclusive()
    def agents_at(self, env_id: int) -> tuple[str, ...]:
        """Return the names of the agents that are alive in one env now, in order of the agent axis.

        Args:
            env_id: Index of the env.

        Returns:
            The names; empty if the env has no running episode.
        """
        ids = check_env_ids([env_id], self.num_envs)
        self._call_state.check_free(ids, "agents_at")
        return tuple(
            name for name, alive in zip(self.agents, self._buffers.alive[ids[0]].tolist(), strict=True) if alive
        )

    @exclusive()
    def random_action(self, seed: int | None = None, env_ids: EnvIds | None = None) -> Any:
        """Draw a random action for every agent, in the form that `step` and `send` take.

        Args:
            seed: Seed of this draw alone. None: draw from the vectorizer's own stream, which ``reset(seed=…)`` of all
                envs seeds again.
            env_ids: The envs; None for all. The first axis of the result is in this order.

        Returns:
            (n, A, …), a tree of such arrays, or a dict of groups; uniform over the actions that the masks allow.

        Raises:
            ContractError: The mask of an agent that must act allows no action.
            UnsupportedSpaceError: The class of the action space has no ``sample``.
        """
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._call_state.check_free(ids, "random_action")
        self._call_state.check_episodes(ids, "random_action")
        if seed is not None:
            rng = np.random.default_rng(check_seed(seed))
        elif self._rng is None:
            rng = self._rng = random_stream(None)
        else:
            rng = self._rng
        rows, buffers = self._selection(ids), self._buffers
        return random_actions(
            self.spec,
            rng,
            acting=buffers.acting[rows],
            masks=[None if mask is None else mask[rows] for mask in buffers.masks_given(rows)],
            env_ids=ids,
            grouped=self.grouped,
        )

    # --- closing, and faults so far ---

    def close(self, timeout: float = 5.0) -> None:
        """Close all envs and release all resources. May be called again, after errors, and with a call pending.

        In a thread that waits in another call, that call raises `ClosedError`.

        Args:
            timeout: Seconds for envs to finish, and for another thread to leave its call; workers that are still alive
                then are killed.
        """
        if not self._call_state.closed:
            self._call_state.on(CallEvent.CLOSE)
            with self._call_state.left(timeout):
                del self._buffers  # frees the memory now, or with the caller's last view of it
                self._copier.forget()
                self._shut_down(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        groups = ", ".join(f"{group}: {len(members)}" for group, members in self.groups.items())
        chosen = f"backend={self.backend!r} ({self.backend_reason}), " if self.backend_reason else ""
        return (
            f"<{name} of {self.spec.name}: num_envs={self.num_envs}, agent_num={self.agent_num} ({groups}), "
            f"autoreset_mode={self.autoreset_mode!r}, {chosen}{self._call_state}>"
        )

    @property
    def num_agents(self) -> int:
        """PettingZoo's name of `agent_num`; counts all agents, alive or not."""
        return self.agent_num

    @property
    def possible_agents(self) -> tuple[str, ...]:
        """PettingZoo's name of `agents`."""
        return self.agents

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The last 1,000 faults that were handled by a restart or a mask, oldest first."""
        return tuple(self._fault_log.faults)

    @property
    def incarnations(self) -> NDArray[np.int64]:
        """(N,) int64: number of restarts of each env."""
        return self._recovery.incarnations.copy()

    @property
    def masked_env_ids(self) -> tuple[int, ...]:
        """Envs that ``on_fault="mask"`` has taken out for good."""
        return tuple(np.flatnonzero(self._recovery.masked).tolist())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._call_state.closed

    # --- sending requests ---

    def _request_reset(self, call: str, seed: Any, options: Options, env_ids: EnvIds | None) -> None:
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._call_state.check_free(ids, call)
        seeds = spread_seeds(seed, ids.tolist(), self.num_envs)
        spread_out = spread_options(options, len(ids))
        if ids is self._everyone and isinstance(seed, (int, np.integer)):
            self._rng = random_stream(int(seed))
        self._request(call, ids, (seeds, spread_out))

    def _request_step(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        rows = ALL_ROWS if ids is self._everyone else self._selection(ids)
        self._action_writer.write(self._buffers, actions, ids, rows)
        self._request(call, ids)
