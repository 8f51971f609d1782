"""`RowExchange`: the queue between simulators, which put rows, and the collector's thread, which takes them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Literal

from marlvec.errors import ClosedError, DriverGone, EpisodeCut
from marlvec.external.exchange.row import ExternalRow, RowSource
from marlvec.vector.settings import LONGEST_WAIT

__all__ = ["RowExchange", "Taken"]

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
