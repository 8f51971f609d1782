"""`RowExchange`: the queue between simulators that bring rows and the collector's thread that takes them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Literal

from marlvec.errors import ClosedError, DriverGone, EpisodeCut
from marlvec.external.exchange.row import ExternalRow, RowSource
from marlvec.vector.settings import LONGEST_WAIT

__all__ = ["RowExchange", "Taken"]

_LOG = logging.getLogger("marlvec")

Taken = tuple[int, ExternalRow | None]
"""A slot and its next row; None where it was recalled, and there is none."""


class ExchangeSlot:
    """One slot's place in the exchange.

    Attributes:
        episode: Who may put rows here, or None: the place is free.
        rows: What was put here and not taken yet; may be of several episodes, one after the other.
        wants: What the collector waits for, or None: it has not dealt with the row before.
        running: The episode that the collector knows, or None.
        asked: The row whose answer is due, or None.
        recalled: Whether the collector does not want a row any more, and waits to hear that there is none.
        since: Since when it is the turn of those outside, by `time.monotonic`.
    """

    __slots__ = ("asked", "episode", "recalled", "rows", "running", "since", "wants")

    def __init__(self) -> None:
        self.episode: RowSource | None = None
        self.rows: deque[ExternalRow] = deque()
        self.wants: Literal["reset", "step"] | None = None
        self.running: RowSource | None = None
        self.asked: ExternalRow | None = None
        self.recalled = False
        self.since = 0.0

    @property
    def is_ready(self) -> bool:
        return self.wants is not None and (bool(self.rows) or self.recalled)

    @property
    def is_awaited(self) -> bool:
        """Whether a simulator is at work on a row that the collector wants."""
        return self.wants is not None and self.episode is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is the turn of those outside."""
        return self.episode is not None and not self.rows and not self.episode.is_waiting


class RowExchange:
    """The places of all slots, and one lock.

    No callback of other code is called while the lock is held: what is to be called is returned, or put into
    `_later` and called by `notify`.

    Args:
        num_envs: N.
        max_backlog: How many rows may wait in one place.
        idle_timeout: Seconds after which an episode of which nothing is heard is lost; None: never. Looked at while
            a collector collects, or a driver wants a place.

    Attributes:
        lock: Held while anything here is read or changed.
        places: (N,) one per slot.
        max_backlog: As given.
        numbers: Ids for episodes.
        closed: Whether the vectorizer was closed.
        drivers: How many are known to drive; None where none has ever said so.
    """

    def __init__(self, num_envs: int, max_backlog: int, idle_timeout: float | None = None) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # those outside wait here, for a free place or for room
        # The collector's thread waits here, outside the lock: woken while it is held, it would wait for that again.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ring_at: int | None = None  # with how many rows it is to be rung; None: no thread waits
        self.places = [ExchangeSlot() for _ in range(num_envs)]
        self.max_backlog = max_backlog
        self.numbers = count()
        self.closed = False
        self.drivers: int | None = None
        self._idle_timeout = idle_timeout
        self._look_at = 0.0 if idle_timeout is not None else float("inf")  # when to look for idle ones again
        self._ready: dict[int, None] = {}  # first come, first served
        self._errors: deque[Exception] = deque()
        self._wait_for_place: dict[Callable[[], None], None] = {}
        self._later: list[Callable[[], None]] = []

    # --- outside

    def free(self) -> list[int]:
        """Places that are free, those first where the fewest rows wait."""
        found = [i for i, place in enumerate(self.places) if place.episode is None]
        return sorted(found, key=lambda i: len(self.places[i].rows))

    def place(self, i: int, episode: RowSource) -> None:
        """An episode takes a place that is free."""
        self.places[i].episode = episode
        self.places[i].since = time.monotonic()

    def put(self, i: int, row: ExternalRow) -> None:
        """Put a row down."""
        self.places[i].rows.append(row)
        self._look(i)

    def leave(self, i: int) -> None:
        """The episode in a place has ended: another one may begin there."""
        self.places[i].episode = None
        self._later += self._wait_for_place
        self._wait_for_place.clear()
        self._changed.notify_all()

    def when_free(self, callback: Callable[[], None]) -> None:
        """Call this once, when a place is free; once also where it was said twice."""
        self._wait_for_place[callback] = None

    def wait(self, deadline: float | None) -> bool:
        """Wait until something may have changed for those outside; False if time ran out."""
        left = float("inf") if deadline is None else deadline - time.monotonic()
        return left > 0 and (self._changed.wait(min(left, LONGEST_WAIT)) or left > LONGEST_WAIT)

    def lose(self, episode: RowSource, reason: BaseException) -> None:
        """Lose an episode: its rows that were not taken are dropped; the collector gets a last row if it knows it."""
        i = episode.env_id
        place = self.places[i]
        self._drop_rows(place, episode)
        if place.running is episode:
            place.rows.appendleft(ExternalRow(episode, done=True, lost=reason))
        if place.episode is episode:
            self.leave(i)
        self._look(i)

    def fail(self, error: Exception) -> None:
        """Have the collector's thread raise this; `notify` after it, as after all that may concern that thread."""
        self._errors.append(error)
        self._ring()

    def look_around(self) -> None:
        """Have the collector's thread see whether a driver is left."""
        self._ring()

    def _ring(self) -> None:
        if self._ring_at is not None:
            self._ring_at = None
            self._later.append(partial(self._bell.put, None))

    @property
    def _is_hopeless(self) -> bool:
        """Whether it is of no use to wait for a row."""
        deserted = self.drivers == 0 and all(place.episode is None for place in self.places)
        return deserted or self.closed or bool(self._errors)

    def notify(self) -> None:
        """Call what was to be called; without the lock."""
        while True:
            with self.lock:
                later, self._later = self._later, []
            if not later:
                return
            for callback in later:
                try:
                    callback()
                except Exception:  # of other code, in any thread: it must not reach this call
                    _LOG.exception("a callback of an episode outside has failed")

    # --- the collector's thread

    def want(self, ids: Sequence[int], what: Literal["reset", "step"]) -> list[ExternalRow]:
        """The next rows of these places are wanted: first ones, or those that follow.

        Returns:
            Rows whose answers are due.
        """
        due: list[ExternalRow] = []
        now = time.monotonic()
        with self.lock:
            for i in ids:
                place = self.places[i]
                place.wants = what
                if what == "reset" and (running := place.running) is not None:  # it is not wanted any more
                    place.running = None
                    self._let_go(running, EpisodeCut(f"episode {running.id} was lost: the collector begins new ones"))
                if place.asked is not None:
                    due.append(place.asked)
                    place.asked, place.since = None, now
                self._look(i)
            self._changed.notify_all()
        self.notify()
        return due

    def take(self, timeout: float | None, most: int, wait_for_more: float) -> list[Taken]:
        """Take the next rows of places that have what is wanted; wait for the first one.

        Args:
            timeout: Seconds; None for ever.
            most: How many rows to take.
            wait_for_more: Seconds to wait for more, once there is one, as long as a simulator is at work on one.

        Returns:
            Slots, ascending, and their rows; empty if time ran out.

        Raises:
            Exception: What was given to `fail`.
            DriverGone: There is no row, and no driver is left to bring one.
            ClosedError: It was closed.
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
                    "no driver is left that brings rows: every run() has returned. Nothing is lost; start() one, and "
                    "collect() again"
                )
            chosen = sorted(list(self._ready)[:most])
            return [(i, self._take(i)) for i in chosen]

    def _listen(self, enough: int, ends: float) -> None:
        """Wait until so many rows are there, or until then, or until it is of no use to wait."""
        while True:
            with self.lock:
                now = time.monotonic()
                self.look_for_idle(now)
                is_over = len(self._ready) >= enough or self._is_hopeless or now >= ends
                self._ring_at = None if is_over else enough
                until = min(self._look_at, ends)
            self.notify()
            if is_over:
                return
            with suppress(queue.Empty):
                self._bell.get(timeout=min(max(0.0, until - now), LONGEST_WAIT))

    def look_for_idle(self, now: float) -> None:
        """Lose episodes of which nothing was heard for too long, if it is time to look."""
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
            place.recalled = False
            return None
        row = place.rows.popleft()
        if (account := row.episode.account) is not None:
            account.add(rows=-row.cost)
        place.running = None if row.done else row.episode
        place.asked = row if row.answer is not None else None
        place.since = time.monotonic()
        self._changed.notify_all()
        return row

    def recall(self) -> None:
        """No more rows are wanted: episodes that the collector waits for are lost, and it waits for none."""
        with self.lock:
            for i, place in enumerate(self.places):
                if place.wants is None or place.rows:
                    continue
                if (running := place.running) is not None:
                    what = "the collector does not go on with it"
                    self._let_go(running, EpisodeCut(f"episode {running.id} was lost: {what}"))
                    self.lose(running, EpisodeCut(what))
                else:
                    place.recalled = True
                    self._look(i)
        self.notify()

    def close(self) -> None:
        """No row will be taken any more: all episodes outside are ended."""
        with self.lock:
            self.closed = True
            for place in self.places:
                if place.episode is not None:
                    self._let_go(place.episode, ClosedError("the vectorizer was closed"))
            self._later += self._wait_for_place
            self._wait_for_place.clear()
            self._changed.notify_all()
            self._ring()
        self.notify()

    def _let_go(self, episode: RowSource, reason: Exception) -> None:
        """This side loses an episode, and the other one is to hear of it, if it has not ended it already."""
        place = self.places[episode.env_id]
        self._drop_rows(place, episode)
        if place.episode is episode:
            self.leave(episode.env_id)
            self._later.append(partial(episode.lost, reason))
            episode.over = reason

    def _drop_rows(self, place: ExchangeSlot, episode: RowSource) -> None:
        """Drop what an episode has said."""
        episode.forget()
        if episode.account is not None:
            episode.account.add(rows=-sum(row.cost for row in place.rows if row.episode is episode))
        place.rows = deque(row for row in place.rows if row.episode is not episode)
        if place.asked is not None and place.asked.episode is episode:
            place.asked = None

    def _look(self, i: int) -> None:
        """See whether a place has what is wanted."""
        if not self.places[i].is_ready:
            self._ready.pop(i, None)
        elif i not in self._ready:
            self._ready[i] = None
            if self._ring_at is not None and len(self._ready) >= self._ring_at:
                self._ring()
