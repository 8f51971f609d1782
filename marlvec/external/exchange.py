"""The queue between simulators and the collector's thread (`RowExchange`), and the checks of what comes in.

`Limits` bounds a server's clients; `ExternalRow` is one step of an episode; `ValueChecker` knows the spaces.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from reprlib import repr as short_repr
from sys import getsizeof
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.collect.policies import Connectors
from marlvec.envs.adapters.base import Sink, infos_by_agent, names_of
from marlvec.envs.spec import COMMON, EnvSpec, Info
from marlvec.errors import ArgumentError, ClosedError, ContractError, DriverGone, EpisodeCut
from marlvec.policies import PolicyLike
from marlvec.spaces import Leaf, Membership, SpaceTree, check_member, membership, snapshot
from marlvec.spaces.action_masks import mask_refusal, read_mask
from marlvec.spaces.members import fit
from marlvec.vector.settings import LONGEST_WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for each client, and for all clients together. A client beyond them receives the reason and is cut off.

    Attributes:
        clients: Connected clients at a time; further clients are refused, also those that reconnect.
        episodes: Running episodes of one client.
        message_bytes: Bytes of one message; a longer one is refused before it is read.
        window: Unanswered requests of one client.
        held_bytes: Bytes of one client's requests that wait for the collector or for their turn, and of rewards, infos
            and ends that wait for their row. Once its waiting rows hold as many bytes, further rows wait.
        kept_bytes: Bytes of replies that one client has not confirmed.
        unsent_bytes: Bytes that one client is too slow to read.
        total_bytes: All these bytes and those of waiting rows, for all clients; the client with the most is cut off
            first. Once waiting rows hold half of it, further rows wait.
        messages_per_second: Messages of one client; beyond that rate, the server reads them more slowly.
        handshake_seconds: Time for a new client to authenticate.
        message_seconds: Time from a message's first byte to its last, in any number of fragments; also for a slow
            client to read something.
        heartbeat_seconds: A client that is silent for this long is pinged, and dropped after twice as long.
        idle_seconds: Time that an episode may wait for its client's next message.
        episode_seconds: Duration of an episode.
        begin_seconds: Wait for a slot for a new episode.
        resume_seconds: Time for a disconnected client to resume its session; 0: its episodes are lost at once.

    Raises:
        ArgumentError: A limit is not a positive number.
    """

    clients: int = 1024
    episodes: int = 64
    message_bytes: int = 16 * 2**20
    window: int = 256
    held_bytes: int = 32 * 2**20
    kept_bytes: int = 8 * 2**20
    unsent_bytes: int = 8 * 2**20
    total_bytes: int = 2**29
    messages_per_second: float = 20_000
    handshake_seconds: float = 5
    message_seconds: float = 10
    heartbeat_seconds: float = 10
    idle_seconds: float = 300
    episode_seconds: float = math.inf
    begin_seconds: float = 60
    resume_seconds: float = 30

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            is_whole = limit.type == "int"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if is_whole else (int, float))
                or not (value > 0 or (value == 0 and limit.name == "resume_seconds"))
            ):
                raise ArgumentError(
                    f"Limits({limit.name}={value!r}): expected a positive {'whole ' if is_whole else ''}number"
                )
        if not 4096 <= self.message_bytes <= 2**31:
            raise ArgumentError(f"Limits(message_bytes={self.message_bytes}): expected a number from 4,096 to 2**31")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInference:
    """Settings to run policies in the client's process: it waits for no answer, and sends its actions to the server.

    Weights come from `Server.publish`, in numbered versions. Build the policies here as in the server's process: they
    load the server's ``state_dict``; connectors load the server's learned state at each new episode. Received data
    names no class or function. In the server's batches these rows are ``off_policy``, with the actions that the env
    received; other policy outputs (``logp``, …) stay here. Action connectors must keep the action space: the collector
    cannot compute the policy's output from the env's action, and refuses it.

    Attributes:
        policies: Policy id to policy, as in the server's collector; or one policy, which becomes ``"main"``. A policy
            may also be an object with a method ``act(rows)``, or a function of rows.
        policy_mapping: A policy id, or agent name to policy id; None: the only policy.
        agent_connectors: As for a `Collector`.
        action_connectors: As for a `Collector`.
        explore: Whether the policies explore.
        update_seconds: Seconds between checks for newer weights.
        seed: Seed of the policies; None: from the operating system.
    """

    policies: Mapping[str, PolicyLike] | PolicyLike
    policy_mapping: str | Mapping[str, str] | None = None
    agent_connectors: Connectors = None
    action_connectors: Connectors = None
    explore: bool = True
    update_seconds: float = 10.0
    seed: int | None = None


_ENTRY = 128  # bytes of a dict entry, including the dict's spare capacity


class Account:
    """Bytes that one client's episodes hold. Change it with the exchange locked; read it at any time.

    Above `most` bytes of rows, a slot that already has a waiting row accepts no more rows. `total` counts all clients.
    """

    __slots__ = ("_most", "_total", "pending", "rows")

    def __init__(self, most: int, total: Account | None = None) -> None:
        self._most, self._total = most, total
        self.pending = self.rows = 0

    @property
    def is_full(self) -> bool:
        """Whether the collector should take rows before more are accepted."""
        return self.rows >= self._most or (self._total is not None and self._total.is_full)

    def add(self, *, pending: int = 0, rows: int = 0) -> None:
        """Add bytes; negative numbers subtract."""
        self.pending += pending
        self.rows += rows
        if self._total is not None:
            self._total.add(pending=pending, rows=rows)


def growth(known: dict[str, Any], new_infos: dict[str, Any]) -> int:
    """Return by how many bytes infos grow if updated with new infos; equal keys are replaced."""
    return sum(
        getsizeof(value) - getsizeof(known[key]) if key in known else _ENTRY + getsizeof(key) + getsizeof(value)
        for key, value in new_infos.items()
    )


Answer = Callable[[dict[str, Any]], None]
"""Callback for actions: receives agent name → env action."""

Ending = tuple[Any, bool, bool]
"""An agent's final observation (None: it has none), terminated, truncated."""


class RowSource(Protocol):
    """The part of an external episode that rows and their exchange use; see `ExternalEpisode`."""

    id: int
    env_id: int
    account: Account | None
    over: Exception | None

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""

    def abandon(self, error: BaseException) -> None:
        """Give the episode up."""

    def lost(self, reason: Exception) -> None:
        """Note that the collector's side has lost the episode."""

    def forget(self) -> None:
        """Drop rewards, infos and ends that are in no row yet."""


@dataclass(slots=True)
class ExternalRow:
    """One row for the collector. Its values are checked copies, by agent index."""

    episode: RowSource
    first: bool = False  # of the episode's rows
    obs: Mapping[int, Any] = field(default_factory=dict)  # of the agents that act
    masks: Mapping[int, NDArray[Any]] = field(default_factory=dict)  # of some of them
    rewards: Mapping[int, float] = field(default_factory=dict)  # since the previous row
    ended: Mapping[int, Ending] = field(default_factory=dict)  # agents that ended with this row
    infos: Info = field(default_factory=dict)
    done: bool = False  # the episode is over
    answer: Answer | None = None  # None: no actions are requested
    lost: BaseException | None = None  # why the episode is lost; the row's other values do not count then
    cost: int = 0  # bytes on the account of its episode


_LOG = logging.getLogger("marlvec")

Taken = tuple[int, ExternalRow | None]
"""A slot and its next row; None: the request was cancelled, and no row came."""


class ExchangeSlot:
    """Rows and requests of one slot of a `RowExchange`."""

    __slots__ = ("asked", "cancelled", "episode", "rows", "running", "since", "wants")

    def __init__(self) -> None:
        self.episode: RowSource | None = None  # the episode that may put rows here; None: the slot is free
        self.rows: deque[ExternalRow] = deque()  # not taken yet; may belong to several episodes, one after the other
        self.wants: Literal["reset", "step"] | None = None  # None: the collector still handles the previous row
        self.running: RowSource | None = None  # the episode that the collector sees here
        self.asked: ExternalRow | None = None  # the row whose answer is due
        self.cancelled = False  # the collector cancelled its request: `take` must return None for this slot
        self.since = 0.0  # when the simulator's turn began, by `time.monotonic`

    @property
    def is_ready(self) -> bool:
        return self.wants is not None and (bool(self.rows) or self.cancelled)

    @property
    def is_awaited(self) -> bool:
        """Whether a simulator works on a row that the collector wants."""
        return self.wants is not None and self.episode is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is the simulator's turn."""
        return self.episode is not None and not self.rows and not self.episode.is_waiting


class RowExchange:
    """All slots' rows, and one lock, held while anything here is read or changed.

    Callbacks of other code never run under the lock: they are returned, or put into `_later` for `notify` to call.
    Episodes silent for `idle_timeout` seconds are lost, while a collector collects or when a driver needs a slot.
    """

    def __init__(self, num_envs: int, max_backlog: int, idle_timeout: float | None = None) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # drivers wait here for a free slot, or for a row to be accepted
        # The collector's thread waits here, outside the lock: woken while the lock is held, it would have to wait
        # again.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wake_at: int | None = None  # wake it at this number of ready rows; None: no thread waits
        self.places = [ExchangeSlot() for _ in range(num_envs)]
        self.max_backlog = max_backlog  # rows in one slot
        self.numbers = count()  # episode ids
        self.closed = False
        self.drivers: int | None = None  # None: none was ever counted in
        self._idle_timeout = idle_timeout
        self._look_at = 0.0 if idle_timeout is not None else float("inf")  # time of the next check for idle episodes
        self._ready: dict[int, None] = {}  # slots with a wanted row, in order of arrival
        self._errors: deque[Exception] = deque()
        self._wait_for_place: dict[Callable[[], None], None] = {}
        self._later: list[Callable[[], None]] = []

    # --- called by simulators

    def free(self) -> list[int]:
        """Return the free slots, those with the fewest waiting rows first."""
        found = [i for i, place in enumerate(self.places) if place.episode is None]
        return sorted(found, key=lambda i: len(self.places[i].rows))

    def place(self, i: int, episode: RowSource) -> None:
        """Put an episode into a free slot."""
        self.places[i].episode = episode
        self.places[i].since = time.monotonic()

    def put(self, i: int, row: ExternalRow) -> None:
        """Queue a row."""
        self.places[i].rows.append(row)
        self._look(i)

    def leave(self, i: int) -> None:
        """Free a slot whose episode has ended."""
        self.places[i].episode = None
        self._later += self._wait_for_place
        self._wait_for_place.clear()
        self._changed.notify_all()

    def when_free(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when a slot is free, even if registered twice."""
        self._wait_for_place[callback] = None

    def wait(self, deadline: float | None) -> bool:
        """Wait for a change that drivers wait for; return False at the deadline."""
        left = float("inf") if deadline is None else deadline - time.monotonic()
        return left > 0 and (self._changed.wait(min(left, LONGEST_WAIT)) or left > LONGEST_WAIT)

    def lose(self, episode: RowSource, reason: BaseException) -> None:
        """Lose an episode: drop its waiting rows; if the collector has seen it, send a last row with the reason."""
        i = episode.env_id
        place = self.places[i]
        self._drop_rows(place, episode)
        if place.running is episode:
            place.rows.appendleft(ExternalRow(episode, done=True, lost=reason))
        if place.episode is episode:
            self.leave(i)
        self._look(i)

    def fail(self, error: Exception) -> None:
        """Make the collector's thread raise an error."""
        self._errors.append(error)
        self.wake_collector()

    def wake_collector(self) -> None:
        """Make the collector's thread look again at whether rows can come."""
        if self._wake_at is not None:
            self._wake_at = None
            self._later.append(partial(self._wakeups.put, None))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock; then run the pending callbacks without it."""
        try:
            with self.lock:
                yield
        finally:
            self.notify()

    @property
    def _is_hopeless(self) -> bool:
        """Whether no row can come any more."""
        deserted = self.drivers == 0 and all(place.episode is None for place in self.places)
        return deserted or self.closed or bool(self._errors)

    def notify(self) -> None:
        """Run the pending callbacks, without the lock."""
        while True:
            with self.lock:
                later, self._later = self._later, []
            if not later:
                return
            for callback in later:
                try:
                    callback()
                except Exception:  # of other code, in any thread: it must not reach this caller
                    _LOG.exception("a callback of an external episode has failed")

    # --- the collector's thread

    def request_rows(self, ids: Sequence[int], what: Literal["reset", "step"]) -> list[ExternalRow]:
        """Request the next rows of slots: first rows, or following ones. Return the rows whose answers are due."""
        due: list[ExternalRow] = []
        now = time.monotonic()
        with self.lock:
            for i in ids:
                place = self.places[i]
                place.wants = what
                if what == "reset" and (running := place.running) is not None:  # the old episode is given up
                    place.running = None
                    self._drop_episode(
                        running, EpisodeCut(f"episode {running.id} was lost: the collector begins new ones")
                    )
                if place.asked is not None:
                    due.append(place.asked)
                    place.asked, place.since = None, now
                self._look(i)
            self._changed.notify_all()
        self.notify()
        return due

    def take(self, timeout: float | None, most: int, wait_for_more: float) -> list[Taken]:
        """Take up to `most` requested rows that have come, ascending; wait for the first one. Empty: time ran out.

        `wait_for_more`: seconds to wait for more rows after the first, while a simulator works on one. Raises the error
        passed to `fail`, `DriverGone` if no row waits and no driver is left, `ClosedError` after `close`.
        """
        ends = float("inf") if timeout is None else time.monotonic() + timeout
        self._listen(1, ends)
        if wait_for_more > 0 and 0 < len(self._ready) < most:
            with self.lock:
                enough = min(most, sum(place.is_awaited for place in self.places))
            self._listen(enough, time.monotonic() + wait_for_more)
        with self.lock:
            if self.closed:
                raise ClosedError("the vectorizer was closed while a call waited for its envs")
            if self._errors:
                raise self._errors.popleft()
            if not self._ready and self._is_hopeless:
                raise DriverGone(
                    "no simulator is running: every run() has returned. Nothing is lost; start() one, and "
                    "collect() again"
                )
            chosen = sorted(list(self._ready)[:most])
            return [(i, self._take(i)) for i in chosen]

    def _listen(self, enough: int, ends: float) -> None:
        """Wait for `enough` ready rows, until the time `ends`, or until no row can come."""
        while True:
            with self.lock:
                now = time.monotonic()
                self.look_for_idle(now)
                is_over = len(self._ready) >= enough or self._is_hopeless or now >= ends
                self._wake_at = None if is_over else enough
                until = min(self._look_at, ends)
            self.notify()
            if is_over:
                return
            with suppress(queue.Empty):
                self._wakeups.get(timeout=min(max(0.0, until - now), LONGEST_WAIT))

    def look_for_idle(self, now: float) -> None:
        """Lose episodes that were silent for too long, if a check is due."""
        if self._idle_timeout is None or now < self._look_at:
            return
        self._look_at = now + self._idle_timeout
        for place in self.places:
            if not place.is_idle:
                continue
            if place.since + self._idle_timeout > now:
                self._look_at = min(self._look_at, place.since + self._idle_timeout)
                continue
            episode = place.episode
            assert episode is not None
            what = f"nothing was heard for {self._idle_timeout} s"
            episode.over = EpisodeCut(f"episode {episode.id} was cut off: {what}")
            self._later.append(partial(episode.lost, episode.over))
            self.lose(episode, TimeoutError(what))

    def _take(self, i: int) -> ExternalRow | None:
        place = self.places[i]
        del self._ready[i]
        place.wants = None
        if not place.rows:
            place.cancelled = False
            return None
        row = place.rows.popleft()
        if (account := row.episode.account) is not None:
            account.add(rows=-row.cost)
        place.running = None if row.done else row.episode
        place.asked = row if row.answer is not None else None
        place.since = time.monotonic()
        self._changed.notify_all()
        return row

    def cancel_requests(self) -> None:
        """Cancel all requests: lose the episodes waited for; slots without one yield None in `take`."""
        with self.changing():
            for i, place in enumerate(self.places):
                if place.wants is None or place.rows:
                    continue
                if (running := place.running) is not None:
                    what = "the collector dropped it in drain()"
                    self._drop_episode(running, EpisodeCut(f"episode {running.id} was lost: {what}"))
                    self.lose(running, EpisodeCut(what))
                else:
                    place.cancelled = True
                    self._look(i)

    def close(self) -> None:
        """End all external episodes; no row is taken any more."""
        with self.changing():
            self.closed = True
            for place in self.places:
                if place.episode is not None:
                    self._drop_episode(place.episode, ClosedError("the vectorizer was closed"))
            self._later += self._wait_for_place
            self._wait_for_place.clear()
            self._changed.notify_all()
            self.wake_collector()

    def _drop_episode(self, episode: RowSource, reason: Exception) -> None:
        """Drop an episode on the collector's side, and report it to the simulator unless that has ended it."""
        place = self.places[episode.env_id]
        self._drop_rows(place, episode)
        if place.episode is episode:
            self.leave(episode.env_id)
            self._later.append(partial(episode.lost, reason))
            episode.over = reason

    def _drop_rows(self, place: ExchangeSlot, episode: RowSource) -> None:
        episode.forget()
        if episode.account is not None:
            episode.account.add(rows=-sum(row.cost for row in place.rows if row.episode is episode))
        place.rows = deque(row for row in place.rows if row.episode is not episode)
        if place.asked is not None and place.asked.episode is episode:
            place.asked = None

    def _look(self, i: int) -> None:
        """Update whether a slot has a requested row."""
        if not self.places[i].is_ready:
            self._ready.pop(i, None)
        elif i not in self._ready:
            self._ready[i] = None
            if self._wake_at is not None and len(self._ready) >= self._wake_at:
                self.wake_collector()


_COMMON = (COMMON, "common")  # "common" is PettingZoo's key
_ARRAY = 256  # bytes of an empty array and of the reference to it
_OURS = ("off_policy_action", "logged_action", "training_enabled")  # infos that the collector reads


class ValueChecker:
    """Checks and copies values from outside. `values`: also against their spaces; shapes and dtypes always are.

    Everywhere, `ArgumentError`: an agent is unknown; `ContractError`: a value is wrong, with the agent's name.
    """

    def __init__(self, spec: EnvSpec, *, values: bool = True) -> None:
        self.agents = spec.agents
        self._index = {name: a for a, name in enumerate(spec.agents)}
        self._mask_sizes, self._action_spaces = spec.mask_sizes, spec.action_spaces
        self._obs = [_Form(space, values=values) for space in spec.observation_spaces]
        self._actions = [_Form(space, values=True) for space in spec.action_spaces]
        self._choices: list[int | None] = [None] * len(spec.agents)
        for group in spec.groups:
            for a in group.agents:
                self._choices[a] = group.choices
        self.agent_bytes = max(
            obs.size + action.size + 8 * (choices or 0)
            for obs, action, choices in zip(self._obs, self._actions, self._choices, strict=True)
        )  # upper estimate for one agent's observation, action and mask, without object leaves

    def indices(self, table: Any, what: str) -> dict[int, Any]:
        """Return a dict by agent name as one by agent index."""
        if not isinstance(table, Mapping):
            raise ArgumentError(f"{what}: expected a dict of agent name to value, got {type(table).__name__}")
        try:
            return {self._index[name]: value for name, value in table.items()}
        except KeyError:
            unknown = [name for name in table if name not in self._index]
            raise ArgumentError(
                f"{what}: unknown agents {names_of(unknown)}; there are {names_of(self.agents)}"
            ) from None

    def observations(self, table: Any, masks: Any, *, acting: bool) -> tuple[dict[int, Any], dict[int, NDArray[Any]]]:
        """Check observations and action masks of some agents. An observation may contain its mask.

        `acting`: whether they act on them; a declared mask is required then.
        """
        found = self.indices(table, "observations")
        given = {} if masks is None else self.indices(masks, "masks")
        if stray := [self.agents[a] for a in given if a not in found]:
            raise ArgumentError(
                f"masks: expected masks only of agents with an observation, got one of {names_of(stray)}"
            )
        obs: dict[int, Any] = {}
        for a, value in found.items():
            bare, mask = split_mask(value) if self._mask_sizes[a] is not None else (value, None)
            if mask is not None:
                given.setdefault(a, mask)
            obs[a] = self._checked(self._obs[a], bare, f"observation of agent {self.agents[a]!r}")
            if acting and self._mask_sizes[a] is not None and a not in given:
                raise ContractError(
                    f"observation of agent {self.agents[a]!r}: expected an action mask with it, in a dict under "
                    f"'action_mask' or in masks, got none"
                )
        return obs, {a: self._mask(a, mask) for a, mask in given.items()} if acting else {}

    def _mask(self, a: int, value: Any) -> NDArray[Any]:
        size = self._choices[a]
        try:
            if size is None:
                raise ContractError(mask_refusal(self._action_spaces[a]))
            mask = read_mask(value)
            if len(mask) != size:
                raise ContractError(f"expected {size} entries, got {len(mask)}")
            if not mask.any():
                raise ContractError("expected at least one allowed action, got none")
        except ContractError as error:
            raise ContractError(f"action mask of agent {self.agents[a]!r}: {error}") from None
        return mask.copy()

    def actions(self, table: Any, agents: Mapping[int, Any], *, are_env: bool = True) -> dict[int, Any]:
        """Check actions of some of `agents`, chosen outside. Actions that are not env actions are not checked."""
        found = self.indices(table, "actions")
        if stray := [self.agents[a] for a in found if a not in agents]:
            raise ArgumentError(
                f"actions: expected actions only of agents with an observation, got one of {names_of(stray)}"
            )
        if not are_env:
            return found
        return {
            a: self._checked(self._actions[a], value, f"action of agent {self.agents[a]!r}")
            for a, value in found.items()
        }

    def rewards(self, table: Any) -> dict[int, float]:
        """Check that rewards are finite numbers."""
        return {a: self._reward(a, value) for a, value in self.indices(table, "rewards").items()}

    def _reward(self, a: int, value: Any) -> float:
        if not isinstance(value, (str, bytes)) and np.ndim(value) == 0:
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if math.isfinite(number):
                return number
        raise ContractError(f"reward of agent {self.agents[a]!r}: expected a finite number, got {short_repr(value)}")

    def flags(self, given: Any, agents: Mapping[int, Any], what: str) -> dict[int, bool]:
        """Parse flags: one bool for all `agents`, or a dict of bools; missing agents are False."""
        if isinstance(given, (bool, np.bool_)):
            return dict.fromkeys(agents, bool(given))
        table = self.indices(given, what)
        for a, flag in table.items():
            if a not in agents or not isinstance(flag, (bool, np.bool_)):
                raise ArgumentError(f"{what}: expected bools of agents that end, got {self.agents[a]!r}: {flag!r}")
        return {a: bool(table.get(a, False)) for a in agents}

    def infos(self, table: Any) -> Info:
        """Copy infos by agent; ``"__common__"``: of no single agent. Keys that the collector reads are refused."""
        if not isinstance(table, Mapping):
            raise ArgumentError(f"infos: expected a dict of agent name to dict, got {type(table).__name__}")
        self.indices({name: None for name in table if name not in _COMMON}, "infos")
        found = infos_by_agent(table, self._index, self.agents, Sink("infos", "info")) or {}
        for who, info in found.items():
            if ours := [key for key in _OURS if key in info]:
                raise ArgumentError(f"infos of {who!r}: the key {ours[0]!r} is reserved; choose another one")
            a = self._index.get(who)
            if a is not None and info.get("action_mask") is not None and self._takes_masks(a):
                raise ArgumentError(
                    f"infos of {who!r}: expected no 'action_mask', which no policy would see; give it as "
                    f"masks={{{who!r}: …}} beside the observations"
                )
        return found

    def _takes_masks(self, a: int) -> bool:
        """Return whether an ``action_mask`` in an agent's info is meant to forbid actions."""
        return self._mask_sizes[a] is None and not isinstance(self._action_spaces[a], Box)

    @staticmethod
    def _checked(form: _Form, value: Any, what: str) -> Any:
        try:
            return form.checked(value)
        except ContractError as error:
            raise ContractError(f"{what}: {error}") from None


def split_mask(value: Any) -> tuple[Any, Any]:
    """Split an observation from the action mask in it; the mask is None if there is none."""
    if not isinstance(value, Mapping) or "action_mask" not in value:
        return value, None
    rest = {key: part for key, part in value.items() if key != "action_mask"}
    return (rest["observation"] if rest.keys() == {"observation"} else rest), value["action_mask"]


class _Form:
    __slots__ = ("_bare", "_leaves", "_tree")

    def __init__(self, space: Any, *, values: bool) -> None:
        self._tree = SpaceTree(space)
        self._leaves = [(leaf, leaf.blank(), membership(leaf) if values else None) for leaf in self._tree.leaves]
        self._bare = self._leaves[0] if self._tree.is_leaf and not self._tree.leaves[0].is_object else None

    @property
    def size(self) -> int:
        """Approximate bytes of a value."""
        return sum(_ARRAY + blank.nbytes for _, blank, _ in self._leaves)

    def checked(self, value: Any) -> Any:
        """Return a checked copy of a value; `ContractError` names the leaf."""
        if self._bare is not None:
            return _checked_leaf(*self._bare, value)
        parts = self._tree.flatten(value)
        return self._tree.unflatten(
            [_checked_leaf(*leaf, part) for leaf, part in zip(self._leaves, parts, strict=True)]
        )


def _checked_leaf(leaf: Leaf, blank: NDArray[Any], members: Membership | None, value: Any) -> Any:
    if leaf.is_object:
        check_member(leaf, value)
        return snapshot(leaf, value)[0]
    if value.__class__ is np.ndarray and value.dtype == blank.dtype and value.shape == blank.shape:
        array = value.copy()
    else:
        array = np.array(fit(blank, value, leaf), blank.dtype)
    if members is not None and not members.are_all(array):
        one = array[None, None]
        if not members.rows(one, np.ones((1, 1), np.bool_)).all():
            raise ContractError(f"{leaf}: {members.describe(array)}")
    return array
