"""`VectorEnv`: the public class: many envs as arrays with an agent axis; and the saved states of its envs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options, check_env_ids, spread_options
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, BusyError, CheckpointError, Failure, NothingPendingError, StateError
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.records import Count, from_plain, read_fields
from marlvec.serialization.saved import check_array, check_fields
from marlvec.serialization.values import read_value, write_value
from marlvec.spaces import batch_space
from marlvec.vector.base import ALL_ROWS, VectorEnvBase
from marlvec.vector.buffers import Buffers
from marlvec.vector.calls import CONTROL_CALLS, CallEvent, Command, call_method, exclusive, execute, set_attributes
from marlvec.vector.failures import raise_failures
from marlvec.vector.infos import ShardReport
from marlvec.vector.native_shard import BatchedShard
from marlvec.vector.recovery import Fault
from marlvec.vector.settings import check_seed, random_actions, random_stream, spread_seeds
from marlvec.vector.shard import SAVED, EnvPhase
from marlvec.vector.vector_step import VectorStep


class StatefulVectorEnv(VectorEnvBase):
    """The part of `VectorEnv` that saves and restores states of envs, between two of its other calls."""

    _rng: np.random.Generator | None = None  # for `random_action`; made on first use
    _obstacles: dict[int, str] | None = None  # env → why its state cannot be saved; None: not requested yet
    _no_entries: dict[str, Any] | None = None  # state of `recovery` for no envs: names, dtypes and shapes
    _state_kind = "env"  # kind of the states that fit these envs
    _batch: BatchedShard | None = None  # has all envs' states as arrays: of native envs, or of a pool
    _sends_rows = False  # whether rows hold objects, which workers see only if they are sent

    @exclusive(fetches=True)
    def state_obstacles(self) -> dict[int, str]:
        """Return which envs' states `get_state` cannot save, and why.

        Returns:
            Env index → what is missing and what to do about it; empty if all states can be saved exactly.

        Raises:
            BusyError: Another call is pending.
        """
        self._call_state.check_idle("state_obstacles")
        return dict(self._find_obstacles())

    @exclusive(fetches=True)
    def get_state(self, env_ids: EnvIds | None = None) -> dict[str, Any]:
        """Save the state of envs, so that after `set_state` they, or equal envs, continue bit for bit.

        The state is plain data: numbers, texts, None, arrays, lists, tuples and dicts. It holds everything that the
        next steps depend on: the envs' own states with their random streams, the last returned rows, and what is due
        next (an autoreset, seeds of restarts). Saving costs no episode.

        Not in the state: `faults`, `incarnations` and the budget of restarts. The random stream of `random_action` is
        only in a state of all envs (``env_ids=None``).

        Args:
            env_ids: The envs, as indices or as an (N,) bool mask; None for all.

        Returns:
            The state of these envs: the first axis of its arrays has one row per env, in the order of ``env_ids``.

        Raises:
            ArgumentError: An env's state cannot be saved; the text has the reason and the remedy (`state_obstacles`).
            StateError: An env lost its episode to a fault that the next step or reset will raise.
            BusyError: Another call is pending.
            EnvRaised: An env's own ``get_state()`` raised; names the env.
            SerialisationError: An env's own state is not plain data; names the env and the part.
        """
        ids = self._chosen_ids("get_state", env_ids)
        self._check_states(ids, "get_state")
        envs, over = self._get_env_states(ids)
        stream = self._rng if env_ids is None else None
        return {
            "format": FORMATS[self._state_kind],
            "kind": self._state_kind,
            "env": self.spec.name,
            "agents": list(self.spec.agents),
            "autoreset": self.autoreset_mode,
            "env_ids": ids.copy(),
            "running": self._call_state.has_episodes(ids),
            "over": over,
            "rows": self._buffers.get_rows(ids),
            "recovery": self._recovery.get_state(ids),
            "envs": envs,
            "actions": None if stream is None else stream.bit_generator.state,
        }

    @exclusive(fetches=True)
    def set_state(
        self, state: Mapping[str, Any], env_ids: EnvIds | None = None, *, from_ids: EnvIds | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Restore envs from a state that `get_state` saved, here or in another vectorizer of the same envs.

        The state of one env may go into several: they behave alike until their actions differ, since their random
        streams are equal, too. The envs that receive a state lose their running episodes; the other envs do not change.
        An env that was never reset is reset once first. A state of all envs, passed as ``set_state(state)``, also
        restores the random stream of `random_action`.

        Args:
            state: A state from `get_state`, or one read from its file; it is copied.
            env_ids: The envs that receive a state, as indices or as an (N,) bool mask. None: the envs that were saved;
                with ``from_ids``: all.
            from_ids: For each of ``env_ids``, the index of the saved env whose state it receives. None: one state each,
                in order; if only one was saved, that one for all.

        Returns:
            ``(obs, infos)`` of all envs, as they were last returned before the state was saved; infos hold only
            marlvec's own keys.

        Raises:
            ArgumentError: Not a state, a state of other envs, or saved and present masks of envs differ; no env was
                changed.
            StateError: One of the envs lost its episode to a fault that the next step or reset will raise.
            BusyError: Another call is pending.
            EnvRaised: An env could not restore its state; it has no episode now, the other envs were restored.
        """
        self._call_state.check_idle("set_state")
        of = check_states(state, kind=self._state_kind, spec=self.spec, autoreset_mode=self.autoreset_mode)
        ids, places = choose_states(of, env_ids, from_ids, self.num_envs)
        self._check_states(ids, "set_state")
        self._buffers.check_rows(state["rows"], len(of))
        if self._no_entries is None:
            self._no_entries = self._recovery.get_state(np.zeros(0, np.int64))
        check_entries(state["recovery"], self._no_entries, len(of), "set_state(): recovery")
        recovery = take_states(state["recovery"], places)
        self._recovery.check_masks(ids, recovery["masked"])
        self._check_env_states(state["envs"], len(of), state["recovery"]["masked"])
        stream = None if state["actions"] is None else stream_from(state["actions"])
        self.drive_count += 1
        self._call_state.lose_episodes(ids)  # until they are restored
        failures = self._set_env_states(ids, state, places)
        good = ~np.isin(ids, [failure.env_id for failure in failures])
        ids, places = ids[good], places[good]
        self._buffers.set_rows(ids, state["rows"], places)
        self._recovery.set_state(ids, take_states(state["recovery"], places))
        self._call_state.have_episodes(ids[state["running"][places]])
        if env_ids is None and from_ids is None and stream is not None:
            self._rng = stream
        raise_failures(failures, self._place_name)
        result = self._make_step(self._everyone, ShardReport())
        return result.obs, result.infos

    def _find_obstacles(self) -> dict[int, str]:
        """Return env → why its state cannot be saved. Requested once: restarted envs come from the same factories."""
        if self._obstacles is None:
            answers = self._answers_to(Command("state_obstacles"), None)
            self._obstacles = {i: found for i, found in enumerate(answers) if found is not None}
        return self._obstacles

    def _check_states(self, ids: NDArray[np.int64], call: str) -> None:
        if problem := describe_obstacles(self._find_obstacles(), ids, call):
            raise ArgumentError(problem)
        if with_faults := self._recovery.unseen_faults(ids):
            raise StateError(
                f"{call}(): envs {with_faults} lost their episodes to a fault that the next step or reset shows; "
                f"step or reset them first"
            )

    def _get_env_states(self, ids: NDArray[np.int64]) -> tuple[Any, NDArray[np.bool_]]:
        """Return the shards' states of these envs (None if masked), and whose episodes are over."""
        if self._batch is not None:
            saved = self._batch.get_state(ids)
            return saved, saved["phase"] == EnvPhase.OVER
        self._ask("get_state", ids)
        answers = self._fetch_answers("get_state")
        over = [answer is not None and answer["phase"] == EnvPhase.OVER for answer in answers]
        return list(answers), np.array(over, np.bool_)

    def _check_env_states(self, saved: Any, n: int, masked: NDArray[np.bool_]) -> None:
        if self._batch is None:
            check_each(saved, n, SAVED, len(self.spec.agents), masked)
        else:
            self._batch.check_state(saved, n)

    def _set_env_states(
        self, ids: NDArray[np.int64], state: Mapping[str, Any], places: NDArray[np.int64]
    ) -> list[Failure]:
        """Restore envs in their shards; return the failures."""
        if self._batch is not None:
            self._batch.set_state(ids, state["envs"], places)
            return []
        alive = np.array([state["envs"][k] is not None for k in places.tolist()], np.bool_)
        chosen = places[alive].tolist()
        if not chosen:
            return []
        rows: list[Any] = [None] * len(chosen)
        if self._sends_rows:
            rows = [{name: part[k : k + 1] for name, part in state["rows"].items()} for k in chosen]
        self._ask("set_state", ids[alive], [state["envs"][k] for k in chosen], rows)
        return self._fetch_report("set_state").failures


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
            both flags (N, A) bool; infos is Gymnasium's dict of arrays (see `marlvec.vector.infos`), in which
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
        masked = self._recovery.masked
        return tuple(masked.nonzero()[0].tolist()) if np.count_nonzero(masked) else ()

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


FORMATS = {"env": 1, "native": 2, "pool": 2}
"""Kind of envs → format of their states."""
_KEYS = frozenset(
    {
        "format",
        "kind",
        "env",
        "agents",
        "autoreset",
        "env_ids",
        "running",
        "over",
        "rows",
        "recovery",
        "envs",
        "actions",
    }
)
IntArray = NDArray[np.int64]


def is_state(state: Any) -> bool:
    """Return whether ``state`` has the keys of a state from `VectorEnv.get_state`."""
    return isinstance(state, Mapping) and state.keys() == _KEYS


def check_states(state: Any, *, kind: str, spec: EnvSpec, autoreset_mode: str) -> IntArray:
    """Check that a state from `VectorEnv.get_state` fits a vectorizer's envs; return the saved ids, (n,) int64."""
    if not is_state(state):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(f"set_state(): expected a state from get_state(), got {got}")
    wanted = {"kind": kind, "format": FORMATS[kind], "env": spec.name, "agents": list(spec.agents)}
    for what, expected in wanted.items():
        if repr(state[what]) != repr(expected):  # an array in it has no truth value for ==
            raise ArgumentError(f"set_state(): {what}: expected {expected!r}, got a state of {state[what]!r:.200}")
    of = check_array(state, "env_ids", np.int64, (None,), "set_state()")
    for what in ("running", "over"):
        check_array(state, what, np.bool_, of.shape, "set_state()")
    if state["autoreset"] != autoreset_mode and np.any(state["over"]):
        over = of[state["over"]].tolist()
        raise ArgumentError(
            f"set_state(): autoreset_mode: expected a state of {autoreset_mode!r}, got one of "
            f"{state['autoreset']!r}, and the episodes of envs {over} are over; save a state while they run"
        )
    return of


def check_entries(saved: Any, own: Mapping[str, Any], n: int, where: str) -> None:
    """Validate the per-env entries of a state of ``n`` envs."""
    # `own` has each entry for no envs: an array (0, …), or an empty list for numbers and None.
    check_fields(saved, own, where)
    for name, empty in own.items():
        if isinstance(empty, np.ndarray):
            found = check_array(saved, name, empty.dtype, (n, *empty.shape[1:]), where)
            if found.dtype.kind == "i" and (found < 0).any():
                raise ArgumentError(f"{where}: {name}: expected no negative numbers, got {found.min()}")
            continue
        if len(numbers := from_plain(list[Count | None], saved[name], f"{where}: {name}")) != n:
            raise ArgumentError(f"{where}: {name}: expected {n} numbers, or None, got {numbers!r:.200}")


def check_each(saved: Any, n: int, phases: Collection[int], agent_num: int, masked: Any) -> None:
    """Validate the shards' states of ``n`` env objects: one dict per env; None for a masked env."""
    if not isinstance(saved, list) or len(saved) != n:
        raise ArgumentError(f"set_state(): envs: expected a list of {n} states, got {saved!r:.200}")
    kinds = {"phase": Count, "done": bool, "ended": list[Count], "next_seed": Count | None, "env": Any}
    for k, one in enumerate(saved):
        where = f"set_state(): envs[{k}]"
        if one is None and masked[k]:
            continue
        phase, _, ended, *_ = read_fields(one, where, **kinds).values()
        if masked[k] or phase not in phases or max(ended, default=0) >= agent_num:
            raise ArgumentError(f"{where}: expected the state of an env, got {one!r:.200}")


def choose_states(
    of: IntArray, env_ids: EnvIds | None, from_ids: EnvIds | None, num_envs: int
) -> tuple[IntArray, IntArray]:
    """Return the ids of the envs that receive a state, and the index of each one's state among the saved ones, ``of``.

    `env_ids` None: the saved envs; with `from_ids`: all. `from_ids`, the saved env for each, None: one each in order,
    or the only one.
    """
    if env_ids is None:
        ids = of if from_ids is None else np.arange(num_envs)
    else:
        ids = np.asarray(env_ids)
    if len(ids) and ids.dtype != np.bool_ and ids.max(initial=0) >= num_envs and env_ids is None:
        raise ArgumentError(f"set_state(): state of envs {of.tolist()} for {num_envs} envs: choose with env_ids=")
    ids = check_env_ids(ids, num_envs)
    if from_ids is None:
        if len(of) not in (1, len(ids)):
            raise ArgumentError(
                f"set_state(): state of {len(of)} envs for {len(ids)} envs: choose which with from_ids="
            )
        return ids, np.zeros(len(ids), np.int64) if len(of) == 1 else np.arange(len(ids))
    wanted = np.asarray(from_ids)
    if wanted.shape != ids.shape or wanted.dtype.kind not in "iu" or not np.isin(wanted, of).all():
        raise ArgumentError(
            f"set_state(): from_ids: expected one of {of.tolist()} for each of {len(ids)} envs, got {wanted.tolist()}"
        )
    order = np.argsort(of, kind="stable")
    return ids, order[np.searchsorted(of, wanted, sorter=order)]


def take_states(saved: Mapping[str, Any], places: IntArray) -> dict[str, Any]:
    """Take the entries at these indices: of arrays along their first axis, of lists by item."""
    return {
        name: np.asarray(part)[places] if isinstance(part, np.ndarray) else [part[k] for k in places.tolist()]
        for name, part in saved.items()
    }


def describe_obstacles(obstacles: Mapping[int, str], ids: IntArray, call: str) -> str | None:
    """Return the error message for those ``ids`` whose states cannot be saved, or None."""
    found: dict[str, list[int]] = {}
    for i in ids.tolist() if obstacles else ():
        if i in obstacles:
            found.setdefault(obstacles[i], []).append(i)
    if not found:
        return None
    each = (f"{'env' if len(of) == 1 else 'envs'} {', '.join(map(str, of[:8]))}" for of in found.values())
    more = (f" and {len(of) - 8} more" if len(of) > 8 else "" for of in found.values())
    return f"{call}(): " + "; ".join(f"{who}{rest}: {why}" for who, rest, why in zip(each, more, found, strict=True))


def stream_from(state: Mapping[str, Any]) -> np.random.Generator:
    """Return a random stream with this state, the ``state`` of a numpy PCG64."""
    generator = np.random.Generator(np.random.PCG64(0))
    try:
        generator.bit_generator.state = state
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ArgumentError(f"set_state(): actions: expected the state of a PCG64, got {state!r:.200}") from error
    return generator


def save_state(path: FilePath, state: Mapping[str, Any]) -> None:
    """Write the state of envs to a file. The write is atomic: the file is complete or unchanged.

        marlvec.save_state("before.npz", envs.get_state([3]))
        envs.set_state(marlvec.load_state("before.npz"))

    ``marlvec record ENV --from before.npz -o after.mp4`` records the steps that follow it.

    Args:
        path: The file, by convention ``.npz``; an old one is replaced.
        state: A state from `VectorEnv.get_state`. For a collector, use `Collector.save`.

    Raises:
        ArgumentError: ``state`` is something else.
        OSError: The file cannot be written; an old file is unchanged.
    """
    if not is_state(state):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(
            f"save_state(): expected a state from envs.get_state(), got {got!r:.200}; collectors and trainings are "
            f"saved by collector.save(path) and save_checkpoint(folder)"
        )
    write_value(path, "envs", dict(state), "the state")


def load_state(path: FilePath) -> dict[str, Any]:
    """Read a file that `save_state` wrote; no code in it is executed.

    Args:
        path: The file.

    Returns:
        The state, for `VectorEnv.set_state`, which checks that the envs fit.

    Raises:
        CheckpointError: The file does not exist, is damaged, of another version, or holds something else.
    """
    state = read_value(path, "envs", "state of envs")
    read = FORMATS.get(str(state["kind"])) if is_state(state) else FORMATS["env"]
    if not is_state(state) or state["format"] != read:
        what = state.get("format") if isinstance(state, Mapping) else state
        raise CheckpointError(path, f"holds a state of envs of the format {what!r:.50}; this version reads {read}")
    return dict(state)
