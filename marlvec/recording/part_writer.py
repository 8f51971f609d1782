"""`PartWriter`: a thread that writes batches from a bounded queue to disk."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeAlias

from marlvec.collect.batch.arrow_columns import TableForm
from marlvec.errors import ResourceError, StateError
from marlvec.recording.files.draft_file import DraftFile, append_lines
from marlvec.recording.files.manifest import MANIFEST, Manifest, Part, Session, lines_of_part, part_path, session_line
from marlvec.recording.files.part_file import Format, PartFileWriter
from marlvec.recording.repeated_rows import QueuedBatch, RepeatedRows

__all__ = ["OnFull", "PartWriter"]

OnFull: TypeAlias = Literal["wait", "raise"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 1.0
_EXIT_SECONDS = 30.0  # how long a recorder that was not closed waits for a full disk, at most


class PartWriter:
    """Writes batches in a thread, in their order, as the parts of a recording.

    A part is published once its rows have ``part_bytes``, or are ``part_seconds`` old. ``queue_size`` batches may wait;
    ``on_full`` is what `put` does if the queue or the disk is full; it waits ``full_seconds`` for a full disk.
    ``handle`` is the manifest's open file; written parts are added to ``manifest``.
    """

    def __init__(
        self,
        folder: Path,
        handle: int,
        manifest: Manifest,
        *,
        format: Format,
        part_bytes: int,
        part_seconds: float,
        queue_size: int,
        on_full: OnFull,
        full_seconds: float,
    ) -> None:
        self._folder, self._handle, self._manifest = folder, handle, manifest
        self._format, self._part_bytes, self._part_seconds = format, part_bytes, part_seconds
        self._queue_size, self._on_full, self._full_seconds = queue_size, on_full, full_seconds
        self._pid = os.getpid()
        self._changed = threading.Condition()  # its lock is reentrant
        self._queue: deque[QueuedBatch] = deque()
        self._thread: threading.Thread | None = None
        self._ending = self._is_over = self._closes_itself = self._gives_up = False
        self._flushes_wanted = self._flushes_done = 0
        self._open_rows = 0  # rows of the unfinished part, without those of the queue's first batch
        self._attempts, self._has_warned, self._was_interrupted = 0, False, False
        self._trouble: OSError | None = None  # why the thread cannot write now; it retries
        self._trouble_began = 0.0
        self._failure: BaseException | None = None  # why the thread has ended
        # Used by the thread only:
        self._open: dict[str, PartFileWriter] = {}
        self._new_forms: dict[int, tuple[str, TableForm]] = {}
        self._part_size, self._part_began = 0, 0.0
        self._env_steps = 0
        self._repeated: dict[int, tuple[object, RepeatedRows]] = {}  # by id() of a living source
        self.session: int | None = None

    # --- called by the recorder

    def put(self, batch: QueuedBatch) -> None:
        """Queue a batch. If this raises or is interrupted, the batch is not queued.

        `ResourceError`: the disk cannot be written to, or the queue is full and ``on_full="raise"``; `StateError`: the
        thread has failed.
        """
        if self._failure is None:
            self._start()
        with self._changed:
            self._check_disk()
            while len(self._queue) >= self._queue_size:
                if self._on_full == "raise":
                    raise ResourceError(
                        f"Recorder({str(self._folder)!r}): {self._queue_size} batches wait to be written, and the disk "
                        f"is slower than collecting: the batch was not taken; use on_full='wait' or a longer queue"
                    )
                self._changed.wait()
                self._check_disk()
            self._queue.append(batch)
            self._changed.notify_all()

    def flush(self) -> None:
        """Write and publish all queued batches. After a `ResourceError` (disk) nothing is lost: call again."""
        with self._changed:
            if self._thread is None or self._is_over:
                self._check_disk()
                return
            self._flushes_wanted += 1
            wanted = self._flushes_wanted
            self._check_disk()
            self._changed.notify_all()
            while self._flushes_done < wanted and not self._is_over:
                self._changed.wait()
                self._check_disk(retry=False)

    def close(self) -> None:
        """Write all queued batches, mark the session as closed in the manifest, and end the thread. As `flush`.

        If it raises `ResourceError`, the thread goes on trying: call again, or `finish`.
        """
        if threading.current_thread() is self._thread:  # the recorder was garbage-collected in this thread
            with self._changed:
                self._ending = self._closes_itself = True
            return
        try:
            self.flush()
            self._close_now()
        except StateError:
            self._end()
            raise
        self._end()

    def finish(self) -> None:
        """Close at the end of the process: gives up the rows that cannot be written. Does nothing in a forked process.

        `ResourceError`: rows are lost; also if Ctrl-C ends the wait for a slow disk.
        """
        if os.getpid() != self._pid:
            return
        self._full_seconds = min(self._full_seconds, _EXIT_SECONDS)
        try:
            self.close()
        except StateError:
            raise
        except BaseException as error:
            rows, cause = self.waiting_rows, self._trouble or error
            with self._changed:
                self._gives_up = True
                self._changed.notify_all()
            self._end()
            raise ResourceError(
                f"Recorder({str(self._folder)!r}): cannot write ({cause!r}): {rows:,} rows are lost; the parts that "
                f"its manifest lists are complete"
            ) from error

    def _end(self) -> None:
        thread = self._thread
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._close_handle()

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:  # else Ctrl-C came in an earlier call
            os.close(handle)

    @property
    def waiting_rows(self) -> int:
        """Rows that are in memory only, not in a published part."""
        with self._changed:
            queued = sum(table.rows for batch in self._queue for table in batch.tables.values())
            return queued + self._open_rows

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin a session in the manifest, before the first batch."""
        number = len(self._manifest.sessions)
        self._append_now(session_line(number, about))
        self._manifest.sessions.append(Session(dict(about)))
        self.session = number

    def cut(self, size: int) -> None:
        """Truncate the manifest to ``size`` bytes; call `flush` first."""
        os.ftruncate(self._handle, size)
        os.fsync(self._handle)
        self._repeated = {}

    def cannot_write(self, trouble: OSError) -> ResourceError:
        """Return the `ResourceError` for a failed write."""
        what = "make room" if trouble.errno in _FULL else "put that right"
        return ResourceError(
            f"Recorder({str(self._folder)!r}): cannot write ({trouble}); {self.waiting_rows:,} rows wait in memory: "
            f"{what}, and call again"
        )

    def _note_close(self) -> None:
        if self.session is None or self._manifest.sessions[self.session].closed:
            return
        self._append([{"close": self.session, "parts": len(self._manifest.parts)}])
        self._manifest.sessions[self.session].closed = True

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        path, own = self._folder / MANIFEST, os.fstat(self._handle)
        if not os.path.samestat(path.stat(), own) and not own.st_nlink:  # what is written to it now would be lost
            raise FileNotFoundError(errno.ENOENT, "was deleted while it was written", str(path))
        self._manifest.size = append_lines(self._handle, self._manifest.size, lines)

    def _close_now(self) -> None:
        try:
            self._note_close()
        except OSError as error:
            raise self.cannot_write(error) from error

    def _append_now(self, line: Mapping[str, Any]) -> None:
        try:
            self._append([line])
        except OSError as error:
            raise self.cannot_write(error) from error

    def _start(self) -> None:
        if self._thread is not None and self._ending:  # Ctrl-C came in close()
            self._thread.join()
            self._thread = None
        if self._thread is None:
            self._ending = self._is_over = False
            self._thread = threading.Thread(target=self._run, name="marlvec-recorder", daemon=True)
            self._thread.start()
            _running.add(self)

    def _check_disk(self, *, retry: bool = True) -> None:
        """Raise if the thread has failed or cannot write; with ``on_full="wait"``, wait for space for a time."""
        while True:
            if self._failure is not None:
                raise StateError(
                    f"Recorder({str(self._folder)!r}): its thread has failed, and rows that were not published are "
                    f"lost: {self._failure!r:.300}"
                ) from self._failure
            if self._trouble is None:
                self._has_warned = False
                return
            if (left := self._seconds_to_wait(self._trouble)) > 0:
                if not self._has_warned:
                    self._has_warned = True
                    warnings.warn(
                        f"Recorder({str(self._folder)!r}) waits for the disk: {self._trouble}",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                try:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                except BaseException:  # Ctrl-C: the with block that it leaves must not wait again
                    self._was_interrupted = True
                    raise
            elif retry:
                attempt, retry = self._attempts, False
                self._changed.notify_all()
                while self._trouble is not None and self._attempts == attempt and self._failure is None:
                    self._changed.wait()
            else:
                raise self.cannot_write(self._trouble) from self._trouble

    def _seconds_to_wait(self, trouble: OSError) -> float:
        if self._on_full != "wait" or trouble.errno not in _FULL or self._was_interrupted:
            return 0.0
        return self._trouble_began + self._full_seconds - monotonic()

    # --- called by the thread

    def _run(self) -> None:
        try:
            while (todo := self._next()) is not None:
                batch, flushes = todo
                if batch is not None:
                    self._write(batch)
                if batch is None or self._part_size >= self._part_bytes:
                    self._publish()
                with self._changed:
                    if batch is not None:
                        self._queue.popleft()
                        self._open_rows = sum(writer.rows for writer in self._open.values())
                    self._flushes_done = max(self._flushes_done, flushes)
                    self._changed.notify_all()
            if self._closes_itself:
                self._publish()
                self._persist(self._note_close)
                self._close_handle()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            for writer in self._open.values():
                writer.discard()
        finally:
            _running.discard(self)
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _next(self) -> tuple[QueuedBatch | None, int] | None:
        """Wait for work: (first queued batch, 0), or (None, number of flushes served) to publish; None to end."""
        with self._changed:
            while not self._queue or self._gives_up:
                if self._gives_up:
                    raise _GivenUp
                if self._flushes_wanted > self._flushes_done:
                    return None, self._flushes_wanted
                if self._ending:
                    return None
                left = None
                if self._open and (left := self._part_began + self._part_seconds - monotonic()) <= 0:
                    return None, 0
                self._changed.wait(left)
            return self._queue[0], 0

    def _write(self, batch: QueuedBatch) -> None:
        tables, env_steps = batch.tables, batch.batch.env_steps
        if batch.source is not None:
            _, repeated = self._repeated.setdefault(id(batch.source), (batch.source, RepeatedRows()))
            tables, env_steps = repeated.drop_from(batch)
        is_old = bool(self._open) and monotonic() >= self._part_began + self._part_seconds
        if is_old or any(writer.form != tables[name].form for name, writer in self._open.items() if name in tables):
            self._publish()
        if not self._open:
            self._part_began = monotonic()
        for policy_id, table in tables.items():
            if table.rows:
                if policy_id not in self._open:
                    self._open[policy_id] = self._open_file(policy_id, table.form)
                self._open[policy_id].add(table.arrays, table.rows)
                self._part_size += table.rows * table.form.row_bytes
        self._env_steps += env_steps

    def _open_file(self, policy_id: str, form: TableForm) -> PartFileWriter:
        known = [*self._manifest.forms, *self._new_forms.values()]
        number = next((k for k, one in enumerate(known) if one == (policy_id, form)), len(known))
        if number == len(known):
            self._new_forms[number] = policy_id, form
        path = self._folder / part_path(policy_id, len(self._manifest.parts), self._format)
        return PartFileWriter(DraftFile(path, self._persist), policy_id, form, number, self._format)

    def _publish(self) -> None:
        """Close the part's files; list them in the manifest."""
        if not self._open:
            return
        files = tuple(writer.close() for writer in self._open.values())
        assert self.session is not None
        part = Part(len(self._manifest.parts), self.session, self._env_steps, files)
        lines = list(lines_of_part(part, self._new_forms))
        self._persist(lambda: self._append(lines))
        with self._changed:
            self._manifest.forms += self._new_forms.values()
            self._manifest.parts.append(part)
            self._manifest.sessions[self.session].closed = False
            self._open, self._new_forms, self._part_size, self._open_rows = {}, {}, 0, 0
            self._env_steps = 0

    def _persist(self, call: Callable[[], object]) -> Any:
        """Retry ``call`` until the disk accepts it; meanwhile `put` and `flush` wait, or raise the disk's error."""
        while True:
            if self._gives_up:
                raise _GivenUp
            try:
                result = call()
            except OSError as error:
                with self._changed:
                    if self._trouble is None:
                        self._trouble_began = monotonic()
                    self._trouble = error
                    self._attempts += 1
                    self._changed.notify_all()
                    if not self._gives_up:
                        self._changed.wait(_RETRY_SECONDS)
                continue
            if self._trouble is not None:
                with self._changed:
                    self._trouble, self._was_interrupted = None, False
                    self._attempts += 1
                    self._changed.notify_all()
            return result


class _GivenUp(Exception):
    """Raised in the thread: `PartWriter.finish` gave up what cannot be written."""


_running: set[PartWriter] = set()


@atexit.register
def _finish_all() -> None:
    """Finish all writers before the interpreter ends: a thread inside pyarrow would then abort the process."""
    # Not by weakref.finalize: Ctrl-C in any object's finalizer skips all finalizers after it.
    for writer in list(_running):
        try:
            writer.finish()
        except BaseException:
            sys.excepthook(*sys.exc_info())
