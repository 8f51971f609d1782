"""`ExternalEpisode`: one episode that runs outside; checks its values and passes its rows on.

`EpisodeGateway` begins episodes, and gives each a slot; `EpisodeDriver` is the calls that a simulator makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from marlvec.envs.spec import COMMON, Info
from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    BusyError,
    ClosedError,
    EpisodeCut,
    EpisodeOver,
    EpisodesFull,
    MarlvecError,
    StateError,
)
from marlvec.external.exchange import Account, Answer, Ending, ExternalRow, RowExchange, ValueChecker, growth
from marlvec.serialization.saved import ProcessBound

_ROW = 1024  # bytes of an empty row

Flags = bool | Mapping[str, bool]
OnLost = Callable[[Exception], None]


class ExternalEpisode:
    """An external episode, made by `EpisodeGateway.begin`. Never waits; any thread may use it, one call at a time.

    Data goes to the collector in rows, one per env step: `ask` and `log_action` send the observations at which agents
    act, `end` sends the last row. Rewards, infos and ends in between go with the next row.

    Every call checks all its arguments before it changes anything: after an error the episode is unchanged.

    Args:
        exchange: The queue of rows.
        checker: Checks all values.
        env_id: Its slot.
        training_enabled: Whether its rows go into batches.
        on_lost: Called once, if the collector's side loses the episode.
        max_steps: Episode length after which it is cut; None: no limit.
        account: Counts its bytes, or None.

    Attributes:
        id: Its number, unique in this vectorizer.
        env_id: Its slot, as in batches; other episodes use the same slot before and after.
        training_enabled, account: As given.
        over: Why the episode accepts no more calls, or None.
    """

    def __init__(
        self,
        exchange: RowExchange,
        checker: ValueChecker,
        env_id: int,
        *,
        training_enabled: bool,
        on_lost: OnLost | None,
        max_steps: int | None,
        account: Account | None = None,
    ) -> None:
        self.id = next(exchange.numbers)
        self.env_id, self.training_enabled, self.account = env_id, training_enabled, account
        self.over: Exception | None = None
        self._exchange, self._checker, self._on_lost = exchange, checker, on_lost
        self._first, self._steps_left = True, max_steps
        self._waiting: Answer | None = None
        self._alive: set[int] = set()
        self._gone: set[int] = set()
        self._rewards: dict[int, float] = {}
        self._infos: Info = {} if training_enabled else {COMMON: {"training_enabled": False}}
        self._ended: dict[int, Ending] = {}
        self._bytes = 0  # of rewards, infos and ends that wait for their row

    def __repr__(self) -> str:
        state = "over" if self.over is not None else "waits for an answer" if self._waiting else "runs"
        return f"<ExternalEpisode {self.id} in slot {self.env_id}: {state}>"

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents in the episode: they had an observation and have not ended."""
        return tuple(self._checker.agents[a] for a in sorted(self._alive))

    @property
    def is_waiting(self) -> bool:
        """Whether `ask` was called and its answer is due."""
        return self._waiting is not None

    @property
    def backlog(self) -> int:
        """How many rows wait in its slot."""
        return len(self._exchange.places[self.env_id].rows)

    @property
    def has_room(self) -> bool:
        """Whether one more row is accepted; always True if none waits in the slot."""
        waiting = self.backlog
        is_full = waiting > 0 and self.account is not None and self.account.is_full
        return self.over is not None or (waiting < self._exchange.max_backlog and not is_full)

    # --- rows

    def ask(
        self,
        obs: Mapping[str, Any],
        *,
        answer: Answer,
        logged: Mapping[str, Any] | None = None,
        rewards: Mapping[str, Any] | None = None,
        infos: Mapping[str, Mapping[str, Any]] | None = None,
        masks: Mapping[str, Any] | None = None,
    ) -> None:
        """Request actions for the agents that have an observation.

        Args:
            obs: Agent name to observation, of all agents that act now. May contain the action mask if the env's own
                spaces do.
            answer: Called once with agent name to env action, for all agents that act, in the collector's thread: it
                must be quick. Not called if the episode is lost or ended first.
            logged: Actions already chosen outside for some of these agents: their policies are not called.
            rewards: As `log_returns`.
            infos: As `log_returns`.
            masks: Agent name to action mask.

        Raises:
            EpisodeOver: The episode has ended, or was lost; `EpisodeCut`: the time limit was reached, and it ended
                here.
            BusyError: An answer is due, or too many rows wait.
            ArgumentError: An agent is unknown.
            StateError: No agent acts, or one has already ended.
            ContractError: A value does not match its space; names the agent.
        """
        self._log_row("ask", obs, (logged, True), rewards, infos, masks, answer)

    def log_action(
        self,
        obs: Mapping[str, Any],
        actions: Mapping[str, Any],
        *,
        rewards: Mapping[str, Any] | None = None,
        infos: Mapping[str, Mapping[str, Any]] | None = None,
        masks: Mapping[str, Any] | None = None,
        as_policy: bool = False,
    ) -> None:
        """Log actions that were taken at observations. No policy is asked for an action, and no answer comes.

        Args:
            obs: Agent name to observation, of all agents that act now.
            actions: Agent name to action, of the same agents, as the env received it. The collector refuses them if
                action connectors change the action space, since these cannot be inverted.
            rewards: As `log_returns`.
            infos: As `log_returns`.
            masks: Agent name to action mask.
            as_policy: Whether the actions are policy outputs, before the action connectors. They are checked only in
                the collector, so accept them only from a client that you trust.

        Raises:
            BusyError: Too many rows wait, see `wait_for_room`; or an answer is due.
            MarlvecError: As `ask`.
        """
        self._log_row("log_action", obs, (actions, not as_policy), rewards, infos, masks, None)

    def _log_row(
        self,
        call: str,
        obs: Any,
        logged: tuple[Any, bool],
        rewards: Any,
        infos: Any,
        masks: Any,
        answer: Answer | None,
    ) -> None:
        with self._calling(call):
            if not self.has_room:
                raise BusyError(f"{self.backlog} rows wait for the collector; call wait_for_room() first")
            seen, seen_masks = self._checker.observations(obs, masks, acting=True)
            actions, are_env = logged
            done = {} if actions is None else self._checker.actions(actions, seen, are_env=are_env)
            self._check_acting(seen, done, asks=answer is not None)
            self._note(*self._outcome(rewards, infos))
            if self._steps_left == 1 and not self._first:
                self._cut(seen)
            key = "logged_action" if are_env else "off_policy_action"
            for a, action in done.items():
                self._infos.setdefault(self._checker.agents[a], {})[key] = action
            self._alive.update(seen)
            self._waiting = answer
            row = self._row(obs=seen, masks=seen_masks)
            row.answer = None if answer is None else self._answer
            self._exchange.put(self.env_id, row)

    def _check_acting(self, seen: Mapping[int, Any], done: Mapping[int, Any], *, asks: bool) -> None:
        names = self._checker.agents
        if not seen:
            raise StateError("obs is empty: pass the observation of at least one acting agent")
        if gone := [names[a] for a in seen if a in self._gone]:
            raise StateError(f"agents {gone} have ended already in this episode")
        if not asks and (silent := [names[a] for a in seen if a not in done]):
            raise StateError(f"agents {silent} have an observation but no action; ask() for those")

    def log_returns(self, rewards: Mapping[str, Any], infos: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Log agents' rewards for their last actions. They add up until the next row.

        Rewards before the first row are sent with the second: they count for the agent's first action.

        Args:
            rewards: Agent name to a finite number; also for agents whose turn it is not.
            infos: Agent name to dict; ``"__common__"`` for infos of no single agent. A later value replaces an earlier
                one under the same key; the next row takes them all.

        Raises:
            EpisodeOver, ArgumentError, ContractError: As `ask`.
        """
        with self._calling("log_returns", waiting=True):
            self._note(*self._outcome(rewards, infos))

    # --- ends

    def end_agents(
        self,
        final_obs: Mapping[str, Any],
        *,
        terminated: Flags | None = None,
        truncated: Flags = False,
        rewards: Mapping[str, Any] | None = None,
        infos: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """End some agents; the episode continues. They cannot act again; the next row marks their end.

        Args:
            final_obs: Agent name to last observation, or to None if it has none: none is invented.
            terminated: Whether they reached a terminal state; None: those that are not truncated.
            truncated: Whether they were cut short.
            rewards: As `log_returns`.
            infos: As `log_returns`.

        Raises:
            ArgumentError: An agent is unknown, or neither terminated nor truncated.
            StateError: An agent has already ended.
            MarlvecError: As `ask`.
        """
        with self._calling("end_agents"):
            ended = self._endings(final_obs, terminated, truncated)
            self._note(*self._outcome(rewards, infos, ended), ended)
            self._gone.update(ended)
            self._alive.difference_update(ended)

    def end(
        self,
        final_obs: Mapping[str, Any] | None = None,
        *,
        terminated: Flags | None = None,
        truncated: Flags = False,
        rewards: Mapping[str, Any] | None = None,
        infos: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """End the episode for all agents that are left. Its slot is free at once.

        A pending answer is dropped. An episode in which no agent ever acted leaves no row.

        Args:
            final_obs: Agent name to last observation; agents that are left and not in it have none. None: no agent has
                one.
            terminated: As `end_agents`.
            truncated: As `end_agents`: True if the time limit was reached, so that learners bootstrap from the final
                value.
            rewards: As `log_returns`.
            infos: As `log_returns`.

        Raises:
            MarlvecError: As `end_agents`.
        """
        with self._calling("end", waiting=True):
            given = {} if final_obs is None else final_obs
            self._checker.indices(given, "final_obs")
            ended = self._endings({**dict.fromkeys(self.agents), **given}, terminated, truncated)
            self._note(*self._outcome(rewards, infos, ended), ended)
            self._waiting = None
            if not self._first:
                self._exchange.put(self.env_id, self._row(done=True))
            self.over = EpisodeOver(f"episode {self.id} has ended")
            self.forget()
            self._exchange.leave(self.env_id)

    def abandon(self, error: BaseException) -> None:
        """Give the episode up, because of an error: its simulator failed, or its client is gone.

        The collector sees a lost episode, as with any failed env: truncated, marked as ``fault``, without final
        observations; the error's type and text are in ``envs.faults``. Its slot is free at once. Does nothing if the
        episode is over.
        """
        with self._exchange.changing():
            if self.over is None:
                self.over = EpisodeOver(f"episode {self.id} was abandoned: {type(error).__name__}: {error}")
                self._waiting = None
                self._exchange.lose(self, error)

    def wait_for_room(self, timeout: float | None = None) -> None:
        """Wait until another row is accepted.

        Raises:
            AnswerTimeout: No row was accepted within ``timeout`` seconds (None: for ever): no collector collects, or it
                is too slow.
            EpisodeOver: The episode has ended, or was lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._exchange.lock:
            while not self.has_room:
                if not self._exchange.wait(deadline):
                    raise AnswerTimeout(
                        f"episode {self.id} in slot {self.env_id}: {self.backlog} rows wait, and none was taken within "
                        f"{timeout} s; is a collector collecting?"
                    )
            self._check("wait_for_room", waiting=True)

    def lost(self, reason: Exception) -> None:
        """Note that the collector's side has lost the episode, for this reason; called by the exchange."""
        self._waiting = None
        if self._on_lost is not None:
            self._on_lost(reason)

    # --- inside; called with the exchange locked

    def forget(self) -> None:
        """Drop rewards, infos and ends that are in no row yet; called when the episode is over."""
        self._rewards, self._infos, self._ended = {}, {}, {}
        if self.account is not None:
            self.account.add(pending=-self._bytes)
        self._bytes = 0

    def _cut(self, seen: Mapping[int, Any]) -> NoReturn:
        """End the episode at its time limit: truncate all agents, with their current observations."""
        self._ended.update({a: (seen.get(a), False, True) for a in self._alive | seen.keys()})
        self._exchange.put(self.env_id, self._row(obs_of_ended=len(seen), done=True))
        self.over = EpisodeCut(f"episode {self.id} was cut: it has made as many steps as max_episode_steps allows")
        self._exchange.leave(self.env_id)
        raise self.over

    @contextmanager
    def _calling(self, call: str, *, waiting: bool = False) -> Iterator[None]:
        """Lock the exchange for one call, and name the call in its errors. `waiting`: also while an answer is due."""
        try:
            with self._exchange.lock:
                self._check(call, waiting=waiting)
                yield
        except MarlvecError as error:
            raise type(error)(f"{call}() of episode {self.id} in slot {self.env_id}: {error}") from None
        finally:
            self._exchange.notify()

    def _check(self, call: str, *, waiting: bool) -> None:
        if self.over is not None:
            raise type(self.over)(str(self.over))
        if self._waiting is not None and not waiting:
            raise BusyError(f"the answer to the last ask() has not come; wait for it before {call}(), or end()")

    def _outcome(
        self, rewards: Any, infos: Any, ended: Mapping[int, Ending] | None = None
    ) -> tuple[dict[int, float], Info]:
        """Return the checked rewards and infos; `_note` stores them."""
        given = {} if rewards is None else self._checker.rewards(rewards)
        for a in self._gone.intersection(given):
            if a not in self._ended and a not in (ended or {}):
                raise StateError(f"agent {self._checker.agents[a]!r} has ended, and can get no reward, got {given[a]}")
        return given, {} if infos is None else self._checker.infos(infos)

    def _note(self, given: Mapping[int, float], new_infos: Info, ended: Mapping[int, Ending] | None = None) -> None:
        """Add rewards, infos and ends to those of the next row. Takes time in proportion to the new data only."""
        rewards, before = self._rewards, self._bytes
        for a, reward in given.items():
            rewards[a] = rewards[a] + reward if a in rewards else reward
        for who, info in new_infos.items():
            known = self._infos.setdefault(who, {})
            if self.account is not None:
                self._bytes += growth(known, info)
            known.update(info)
        if ended:
            self._ended.update(ended)
            self._bytes += len(ended) * self._checker.agent_bytes
        if self.account is not None:
            self.account.add(pending=self._bytes - before)

    def _endings(self, final_obs: Any, terminated: Flags | None, truncated: Flags) -> dict[int, Ending]:
        names = self._checker.agents
        found = self._checker.indices(final_obs, "final_obs")
        if self._first and found:
            raise StateError("no agent has acted yet, so no agent can end; call end() without final_obs")
        if gone := [names[a] for a in found if a in self._gone]:
            raise StateError(f"agents {gone} have ended already in this episode")
        seen, _ = self._checker.observations(
            {names[a]: obs for a, obs in found.items() if obs is not None}, None, acting=False
        )
        cut = self._checker.flags(truncated, found, "truncated")
        over = {a: not cut[a] for a in found}
        if terminated is not None:
            over = self._checker.flags(terminated, found, "terminated")
        if neither := [names[a] for a in found if not (over[a] or cut[a])]:
            raise ArgumentError(f"agents {neither} end: expected terminated or truncated True, got False for both")
        return {a: (seen.get(a), over[a], cut[a]) for a in found}

    def _row(
        self,
        *,
        obs: Mapping[int, Any] | None = None,
        masks: Mapping[int, Any] | None = None,
        obs_of_ended: int = 0,
        done: bool = False,
    ) -> ExternalRow:
        first, rewards = self._first, self._rewards
        if not first and self._steps_left is not None:
            self._steps_left -= 1
        row = ExternalRow(self, first, obs or {}, masks or {}, {} if first else rewards, self._ended, self._infos, done)
        self._first, self._ended, self._infos = False, {}, {}
        self._rewards = rewards if first else {}
        if self.account is not None:
            row.cost = _ROW + self._bytes + (len(row.obs) + obs_of_ended) * self._checker.agent_bytes
            self.account.add(pending=-self._bytes, rows=row.cost)
            self._bytes = 0
        return row

    def _answer(self, actions: dict[str, Any]) -> None:
        """Pass the collector's actions on, unless the episode no longer waits for them."""
        with self._exchange.lock:
            answer, self._waiting = self._waiting, None
        if answer is not None:
            answer(actions)


class EpisodeGateway:
    """Begins external episodes in the slots of an `ExternalVectorEnv`. May be used from any thread.

    Args:
        exchange: The queue of rows.
        checker: Checks all values.
        max_episode_steps: Episode length after which it is cut; None: no limit.

    Attributes:
        agents: Agent names, in order of the agent axis.
        num_envs: N, how many episodes can run at a time.
    """

    def __init__(self, exchange: RowExchange, checker: ValueChecker, max_episode_steps: int | None = None) -> None:
        self._exchange, self._checker, self._max_steps = exchange, checker, max_episode_steps
        self.agents = checker.agents
        self.num_envs = len(exchange.places)

    def __repr__(self) -> str:
        return f"<EpisodeGateway: {len(self.episodes)} of {self.num_envs} episodes run>"

    @property
    def episodes(self) -> tuple[ExternalEpisode, ...]:
        """The running episodes, by slot."""
        with self._exchange.lock:
            return tuple(place.episode for place in self._exchange.places if isinstance(place.episode, ExternalEpisode))

    @property
    def closed(self) -> bool:
        """Whether the vectorizer was closed."""
        return self._exchange.closed

    def begin(
        self,
        *,
        training_enabled: bool = True,
        env_id: int | None = None,
        timeout: float | None = 0.0,
        on_lost: OnLost | None = None,
        on_free: Callable[[], None] | None = None,
        account: Account | None = None,
    ) -> ExternalEpisode:
        """Begin an episode.

        Args:
            training_enabled: False: its rows are in no batch; metrics and amounts to collect include them.
            env_id: The slot it gets; None: the free slot with the fewest waiting rows.
            timeout: Seconds to wait for a free slot; 0: not at all; None: for ever.
            on_lost: Called once, with the reason, if the collector begins new episodes or the vectorizer is closed.
                Runs in any thread, and must be quick.
            on_free: If `EpisodesFull` is raised, called once when a slot is free or the vectorizer is closed. Runs in
                any thread, and must be quick.
            account: Counts and limits the episode's bytes; None: no limit.

        Returns:
            The episode, in its slot.

        Raises:
            EpisodesFull: All slots are taken, or the slot ``env_id`` is.
            ClosedError: The vectorizer was closed.
            ArgumentError: No slot ``env_id`` exists.
        """
        exchange = self._exchange
        if env_id is not None and not 0 <= env_id < self.num_envs:
            raise ArgumentError(f"begin(env_id={env_id!r}): no such slot; slots are 0 to {self.num_envs - 1}")
        deadline = None if timeout is None else time.monotonic() + timeout
        with exchange.changing():
            while True:
                if exchange.closed:
                    raise ClosedError("begin(): the vectorizer was closed")
                exchange.look_for_idle(time.monotonic())
                free = exchange.free()
                if env_id is not None:
                    free = [env_id] if env_id in free else []
                if free:
                    break
                if not exchange.wait(deadline):
                    if on_free is not None:
                        exchange.when_free(on_free)
                    what = (
                        f"{self.num_envs} episodes run, as many as can" if env_id is None else f"slot {env_id} is taken"
                    )
                    raise EpisodesFull(
                        f"begin(): {what}; end() one first, wait with timeout=…, or make() more num_envs"
                    )
            episode = ExternalEpisode(
                exchange,
                self._checker,
                free[0],
                training_enabled=training_enabled,
                on_lost=on_lost,
                max_steps=self._max_steps,
                account=account,
            )
            exchange.place(free[0], episode)
        return episode

    def free_slots(self, on_free: Callable[[], None]) -> list[int]:
        """Return the free slots, those with the fewest waiting rows first.

        ``on_free`` is called once when one more slot is free or the vectorizer is closed, as in `begin`.

        Returns:
            Env ids.
        """
        exchange = self._exchange
        with exchange.changing():
            exchange.look_for_idle(time.monotonic())
            exchange.when_free(on_free)
            return exchange.free()

    def drop(self, account: Account, reason: BaseException) -> None:
        """Abandon, for this reason, all episodes with rows that wait on an account, also ended ones."""
        exchange = self._exchange
        with exchange.changing():
            for place in exchange.places:
                for episode in {row.episode for row in place.rows if row.episode.account is account}:
                    exchange.lose(episode, reason)

    def fail(self, error: Exception) -> None:
        """Make the collector's call raise an error as soon as possible. No episode is lost by it."""
        with self._exchange.changing():
            self._exchange.fail(error)

    def arrive(self) -> None:
        """Count a driver in: the collector waits for its rows until `depart`."""
        with self._exchange.lock:
            self._exchange.drivers = (self._exchange.drivers or 0) + 1

    def depart(self) -> None:
        """Count a driver out. If none is left, a call that waits for rows raises."""
        with self._exchange.changing():
            assert self._exchange.drivers
            self._exchange.drivers -= 1
            self._exchange.wake_collector()


DEFAULT = -1.0
"""Timeout argument: use the constructor's timeout."""


class RunningEpisodes(Protocol):
    """Running episodes of one driver, by id; its calls are those of `EpisodeDriver`.

    Dicts are keyed by agent name; a timeout of None waits for ever.
    """

    def __len__(self) -> int: ...

    def begin(
        self, key: Hashable | None, *, training_enabled: bool, env_id: int | None, timeout: float | None
    ) -> Hashable: ...

    def ask(self, key: Hashable, obs: Any, masks: Any, timeout: float | None) -> Mapping[str, Any]: ...

    def wait(self, key: Hashable, timeout: float | None) -> Mapping[str, Any]: ...

    def log(self, key: Hashable, obs: Any, actions: Any, masks: Any, timeout: float | None) -> None: ...

    def log_returns(self, key: Hashable, rewards: Any, infos: Any) -> None: ...

    def leave(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None: ...

    def end(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None: ...


class EpisodeDriver(ProcessBound):
    """Begins episodes, requests actions, and logs rewards and ends.

    Args:
        episodes: The driver's running episodes.
        agents: Agent names, in order.
        timeout: Seconds that each call waits at most; None: for ever. May be changed later.
        dicts: Whether values are dicts by agent name even if there is one agent.
    """

    def __init__(self, episodes: RunningEpisodes, agents: Sequence[str], timeout: float | None, *, dicts: bool) -> None:
        self.agents, self.timeout = tuple(agents), timeout
        self._running_episodes = episodes
        self._alone = self.agents[0] if len(self.agents) == 1 and not dicts else None

    @property
    def _episodes(self) -> RunningEpisodes:
        self._check_process("an episode")
        return self._running_episodes

    def start_episode(
        self,
        episode_id: Hashable | None = None,
        *,
        training_enabled: bool = True,
        env_id: int | None = None,
        timeout: float | None = DEFAULT,
    ) -> Hashable:
        """Begin an episode; wait for a free slot.

        Args:
            episode_id: Name of the episode; None: a new name, unique for this driver.
            training_enabled: False: its rows are in no batch.
            env_id: The slot it gets; None: any.
            timeout: Seconds to wait; default: the constructor's.

        Returns:
            The episode's id, valid until the episode is over.

        Raises:
            EpisodesFull: No slot was free in time, or this driver already runs ``max_episodes``.
            StateError: An episode with this id is running.
            ClosedError: The driver or the vectorizer was closed.
            MarlvecError: As `get_action`.
        """
        return self._episodes.begin(
            episode_id, training_enabled=training_enabled, env_id=env_id, timeout=self._seconds(timeout)
        )

    def get_action(self, episode_id: Hashable, obs: Any, *, masks: Any = None, timeout: float | None = DEFAULT) -> Any:
        """Request actions, and wait for them.

        Args:
            episode_id: The episode.
            obs: Observations of all agents that act now.
            masks: Action masks, if the observations don't contain them.
            timeout: Seconds to wait; default: the constructor's.

        Returns:
            Actions for the env.

        Raises:
            AnswerTimeout: No action came in time. Call `wait_for_action`, or end the episode.
            EpisodeOver: No such episode is running. `EpisodeCut`: the time limit was reached, and the episode ended
                here.
            BusyError, StateError: An earlier request's actions were not fetched; or an agent acts that has ended.
            ContractError, ArgumentError: A value does not match the declared spaces. Nothing was requested.
            ConnectionLost: The server is gone; so is the episode if the server has lost this session.
            ClosedError: The driver or the vectorizer was closed.
        """
        tables = self._table(obs), None if masks is None else self._table(masks)
        return self._unwrap(self._episodes.ask(episode_id, *tables, self._seconds(timeout)))

    def wait_for_action(self, episode_id: Hashable, timeout: float | None = DEFAULT) -> Any:
        """Wait for the actions of a `get_action` that timed out.

        Returns:
            As `get_action`.

        Raises:
            StateError: No request is pending.
            MarlvecError: As `get_action`.
        """
        return self._unwrap(self._episodes.wait(episode_id, self._seconds(timeout)))

    def log_action(
        self, episode_id: Hashable, obs: Any, actions: Any, *, masks: Any = None, timeout: float | None = DEFAULT
    ) -> None:
        """Log actions that were taken at observations; no policy is asked for an action.

        Waits only while too many rows wait for the collector.

        Args:
            episode_id: The episode.
            obs: Observations of all agents that act now.
            actions: Their actions, as the env received them.
            masks: As `get_action`.
            timeout: Seconds to wait until a row is accepted; default: the constructor's.

        Raises:
            AnswerTimeout: The row was not accepted in time. Nothing was logged.
            MarlvecError: As `get_action`.
        """
        tables = self._table(obs), self._table(actions), None if masks is None else self._table(masks)
        self._episodes.log(episode_id, *tables, self._seconds(timeout))

    def log_returns(self, episode_id: Hashable, rewards: Any, infos: Any = None) -> None:
        """Log rewards for the last actions. They add up until the next observation or the end.

        Args:
            episode_id: The episode.
            rewards: By agent; a number if there is one agent.
            infos: By agent; ``"__common__"`` for infos of no single agent.

        Raises:
            EpisodeOver: No such episode is running.
            ContractError, ArgumentError: A reward is not a finite number; an info cannot be sent.
        """
        self._episodes.log_returns(episode_id, self._table(rewards), None if infos is None else self._table(infos))

    def end_agents(
        self, episode_id: Hashable, final_obs: Any, *, terminated: Flags | None = None, truncated: Flags = False
    ) -> None:
        """End some agents; the episode continues.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation, or to None if it has none.
            terminated: Whether they reached a terminal state; None: those that are not truncated.
            truncated: Whether they were cut short.

        Raises:
            MarlvecError: As `get_action`.
        """
        self._episodes.leave(episode_id, self._table(final_obs), terminated, truncated, self.timeout)

    def end_episode(
        self,
        episode_id: Hashable,
        final_obs: Any = None,
        *,
        terminated: Flags | None = None,
        truncated: Flags = False,
        timeout: float | None = DEFAULT,
    ) -> None:
        """End the episode for all agents that are left. Its id is forgotten.

        Args:
            episode_id: The episode.
            final_obs: Agent name to last observation; agents not in it have none. None: no agent has one.
            terminated: As `end_agents`; None: also agents that a dict ``truncated`` leaves out are terminated.
            truncated: As `end_agents`: True if the time limit was reached.
            timeout: Seconds to wait until a server confirms; default: the constructor's.

        Raises:
            MarlvecError: As `get_action`.
        """
        table = {} if final_obs is None else self._table(final_obs)
        self._episodes.end(episode_id, table, terminated, truncated, self._seconds(timeout))

    def _table(self, value: Any) -> Mapping[str, Any]:
        return value if self._alone is None else {self._alone: value}  # the episode checks its type

    def _unwrap(self, actions: Mapping[str, Any]) -> Any:
        return actions if self._alone is None else actions[self._alone]

    def _seconds(self, timeout: float | None) -> float | None:
        return self.timeout if timeout == DEFAULT else timeout
