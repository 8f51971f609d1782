"""`Recorder`: streams collected batches to disk; a thread of its own writes them from a bounded queue."""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_choice, count_from
from marlvec.collect.append_file import digest_before
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.batch_files import Arrays, TableForm, arrow_libraries, table_form
from marlvec.collect.callbacks import ClosingCallback
from marlvec.collect.metrics import STREAM_BITS, Metrics
from marlvec.errors import ArgumentError, ClosedError, ResourceError, StateError
from marlvec.recording.files import (
    MANIFEST,
    DraftFile,
    Format,
    Manifest,
    Part,
    PartFileWriter,
    RecordingSession,
    append_lines,
    check_same_envs,
    describe_envs,
    lines_of_part,
    open_folder,
    part_path,
    read_manifest,
    read_schema,
    remove_unlisted,
    session_line,
    write_schema,
)
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.records import Count, read_fields
from marlvec.serialization.saved import ProcessBound
from marlvec.vector.vector_env import VectorEnv


class Recorder(ProcessBound, ClosingCallback):
    """Records batches on disk, for `load_dataset`: as a collector's callback, or by hand with `write`.

        with marlvec.Recorder("runs/spread") as recorder:
            collector = marlvec.Collector(envs, policies, callbacks=[recorder])
            for batch in collector.batches(env_steps=4096, total=1_000_000): ...

    A thread writes, while the next batch is collected. Each policy has a series of files, Parquet by default, which
    polars, DuckDB and pandas read without marlvec. The rows of about a minute, or 64 MiB of them, make a part, with
    one file a policy; ``manifest.jsonl`` lists the parts whose files are whole. However the process ends, the
    recording holds the first part of the collected rows: a killed process loses the unfinished part at most, and its
    session stays marked as not closed.

    No batch is lost silently. If the disk is slow or full, collecting waits or raises; see ``on_full``. If a process
    ends while its disk is full, the rows of no part are lost, and an error on stderr has their number. If another
    callback or Ctrl-C keeps `Collector.collect` from returning a batch, its rows come again but are recorded once. If
    a collector continues from a checkpoint (`Collector.save`), its recorder drops the parts written after it, as
    their rows come again.

    Do not write into arrays of batches: they are written to disk while the next batch is collected, not copied.

    Batches are recorded after all connectors, learner connectors too: leave out learner connectors that pad
    sequences. Columns of Python objects other than texts raise; ``drop`` leaves them out.

    Args:
        folder: Folder of the recording: new or empty, or one in which nothing was recorded yet; with ``append``, an
            existing recording.
        format: ``"parquet"``: small files; or ``"arrow"``: uncompressed, twice the size, written in a third of the
            time, and read without a copy.
        envs: The envs, whose agents and spaces are noted; only for `write` by hand: a collector passes its envs itself.
        append: Whether to add a session of the same envs to an existing recording.
        drop: Names of columns to leave out.
        notes: Further JSON data for ``schema.json``, such as the env's id and arguments.
        part_bytes: A part is finished once its rows have this many bytes, or
        part_seconds: once they are this old.
        queue_size: Most batches that wait to be written.
        on_full: ``"wait"``: collecting waits while the queue is full and, with a warning, while the disk is full.
            ``"raise"``: raises `ResourceError`; the batch is not recorded, and its rows come again with the next
            ``collect()``.
        full_seconds: Seconds that ``"wait"`` waits for a full disk, also in `close`; then it does as ``"raise"``.
            ``float("inf")``: until there is room, or Ctrl-C. Other errors of the disk always raise at once.

    Raises:
        ArgumentError: An argument is wrong; the folder holds something else, or a recording and ``append`` is False.
        CheckpointError: The recording in the folder is damaged.
        StateError: Another recorder is writing to the folder.
        MissingExtraError: pyarrow is not installed.
        OSError: The folder cannot be written to.

    Attributes:
        folder: As given.
    """

    def __init__(
        self,
        folder: FilePath,
        format: Format = "parquet",
        *,
        envs: VectorEnv | None = None,
        append: bool = False,
        drop: Sequence[str] = (),
        notes: Mapping[str, Any] | None = None,
        part_bytes: int = 64 << 20,
        part_seconds: float = 60.0,
        queue_size: int = 2,
        on_full: OnFull = "wait",
        full_seconds: float = 30.0,
    ) -> None:
        check_choice("format", format, ("parquet", "arrow"))
        check_choice("on_full", on_full, ("wait", "raise"))
        for name, value in (("part_bytes", part_bytes), ("queue_size", queue_size)):
            count_from(value, f"Recorder({name}={value!r})")
        for name, seconds in (("part_seconds", part_seconds), ("full_seconds", full_seconds)):
            if not seconds > 0:
                raise ArgumentError(f"Recorder({name}={seconds!r}): expected a number above 0")
        if isinstance(drop, str):
            raise ArgumentError(f"Recorder(drop={drop!r}): expected a list of column names; write drop=[{drop!r}]")
        try:
            self._notes: dict[str, Any] = json.loads(json.dumps(dict(notes or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"Recorder(notes=...): expected JSON data: {error}") from error
        arrow_libraries()
        self.folder, self._format, self._drop = Path(folder), format, frozenset(drop)
        handle, self._manifest = open_folder(self.folder, append=append)
        self._about: dict[str, Any] = {"began": datetime.now(UTC).isoformat(timespec="seconds")}
        self._streams: dict[int, Metrics] = {}
        self._forms: dict[str, dict[str, list[Any]]] = {}  # forms of columns so far, by policy id and name
        self._trees: dict[str, dict[str, Any]] = {}
        self._writer = PartWriter(
            self.folder,
            handle,
            self._manifest,
            format=format,
            part_bytes=part_bytes,
            part_seconds=part_seconds,
            queue_size=queue_size,
            on_full=on_full,
            full_seconds=full_seconds,
        )
        # If close() was forgotten, or failed.
        self._finalizer = weakref.finalize(self, PartWriter.finish, self._writer)
        self._finalizer.atexit = False  # the end of the process finishes all writers itself
        self._envs: dict[str, Any] | None = None
        self._has_schema = bool(self._manifest.sessions)
        try:
            if self._has_schema:
                self._envs, kept = read_schema(self.folder)
                self._notes = kept | self._notes
            if envs is not None:
                self._set_envs(envs)
        except BaseException:
            self._finalizer.detach()
            os.close(handle)
            raise

    def __repr__(self) -> str:
        rows = ", ".join(f"{n:,} of {policy_id!r}" for policy_id, n in self.rows.items()) or "none"
        state = "closed" if self.closed else f"{self._writer.waiting_rows:,} rows wait"
        return f"<Recorder {str(self.folder)!r} ({self._format}): rows on disk: {rows}; {state}>"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    @property
    def rows(self) -> dict[str, int]:
        """Rows in finished parts on disk, by policy id, of all sessions."""
        found: dict[str, int] = {}
        for part in list(self._manifest.parts):
            for file in part.files:
                found[file.policy] = found.get(file.policy, 0) + file.rows
        return found

    # --- as a callback

    def on_collector_created(self, collector: Any) -> None:
        self._check_open("a collector was built with it")
        self._set_envs(collector.envs)
        policies = {name: type(policy).__name__ for name, policy in collector.policies.items()}
        about = {"num_envs": collector.envs.num_envs, "seed": collector.seed, "policies": policies}
        self._about.setdefault("collectors", []).append(about | {"batch_mode": collector.batch_mode})

    def on_sample_end(self, batch: MultiAgentBatch, metrics: Metrics) -> None:
        self._put(batch, metrics)

    # --- by hand

    def write(self, batch: MultiAgentBatch) -> None:
        """Record a batch without copying: do not write into its arrays later.

        Raises:
            ArgumentError: ``batch`` is not a `MultiAgentBatch`, or a column's dtype or shape has changed.
            SerialisationError: Columns hold Python objects, or a dtype that the files do not support; names them.
            ResourceError: The disk is full or slow; see ``on_full``. The batch is not recorded.
            StateError: The thread that writes has failed.
            ClosedError: The recorder is closed.
        """
        self._put(batch, None)

    def flush(self) -> None:
        """Finish the current part, and wait until it is on disk.

        Raises:
            ResourceError: The disk cannot be written to. Nothing is lost: call again.
            StateError: The thread that writes has failed.
            ClosedError: The recorder is closed.
        """
        self._check_open("flush()")
        self._writer.flush()

    def close(self) -> None:
        """Write all queued batches, and mark the session as closed. May be called twice.

        Raises:
            ResourceError: The disk cannot be written to. Nothing is lost: call again.
            StateError: The thread that writes has failed; the parts that the manifest lists are complete.
        """
        if self.closed or self._is_forked:  # the process that made it writes the rest
            return
        if self._writer.session is None:
            self._begin()
        try:
            self._writer.close()
        except StateError:
            self._finalizer.detach()
            raise
        self._finalizer.detach()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Write all queued batches; return how much is recorded.

        Returns:
            The size of the manifest, a digest of its end, and the session, as plain data.

        Raises:
            ResourceError: The disk cannot be written to. Nothing is lost: call again.
        """
        self.flush()
        size = self._manifest.size
        try:
            end = digest_before(self.folder / MANIFEST, size)
        except OSError as error:  # the folder was deleted
            raise self._writer.cannot_write(error) from error
        return {"bytes": size, "end": end, "session": self._writer.session}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop the parts that were written after `state_dict` was called; another recording stays as it is.

        Raises:
            ArgumentError: ``state`` is not from `state_dict`.
            OSError: The manifest cannot be written.
        """
        where, manifest = "the state of a Recorder", self._manifest
        size, end, session = read_fields(state, where, bytes=Count, end=str, session=int | None).values()
        self.flush()
        if size > manifest.size or (size and digest_before(self.folder / MANIFEST, size) != end):
            return
        self._writer.cut(size)
        kept = read_manifest(self.folder) if size else Manifest()
        manifest.sessions[:], manifest.forms[:], manifest.parts[:] = kept.sessions, kept.forms, kept.parts
        manifest.size = size
        remove_unlisted(self.folder, manifest)
        self._writer.session = session if kept.sessions else None  # whose episodes go on

    # --- inside

    def _put(self, batch: MultiAgentBatch, metrics: Metrics | None) -> None:
        self._check_open("write()" if metrics is None else "a batch was collected")
        if not isinstance(batch, MultiAgentBatch):
            raise ArgumentError(
                f"write(): expected a MultiAgentBatch, got {type(batch).__name__}; rows of one policy make one: "
                f"MultiAgentBatch({{'main': rows}}, env_steps=...)"
            )
        tables = {}
        for policy_id, rows in batch.items():
            columns = {name: column for name, column in rows.items() if name not in self._drop}
            form, arrays = table_form(columns, f"policy {policy_id!r}: a recording")
            forms = {name: [_text_free(dtype), shape] for name, (dtype, shape) in form.forms.items()}
            form = form._replace(forms=forms)
            self._check_form(policy_id, form)
            tables[policy_id] = Table(form, arrays, len(rows))
        self._check_source(batch, metrics)
        if self._writer.session is None:
            self._begin()
        self._writer.put(QueuedBatch(batch, tables, metrics))
        for policy_id, table in tables.items():
            self._forms[policy_id] |= table.form.forms
            self._trees[policy_id] |= dict(table.form.columns)

    def _check_form(self, policy_id: str, form: TableForm) -> None:
        """Raise if a column's dtype or shape differs from earlier batches; columns may appear and vanish."""
        where = f"Recorder({str(self.folder)!r}): policy {policy_id!r}: column"
        if policy_id not in self._forms:
            before = [one for owner, one in self._manifest.forms if owner == policy_id]
            self._forms[policy_id] = {name: kind for one in before for name, kind in one.forms.items()}
            self._trees[policy_id] = {name: tree for one in before for name, tree in one.columns}
        for name, kind in form.forms.items():
            if (expected := self._forms[policy_id].get(name, kind)) != kind:
                raise ArgumentError(
                    f"{where} {name!r}: expected {expected[0]} of shape {tuple(expected[1])} a row, as before, got "
                    f"{kind[0]} of shape {tuple(kind[1])}; record into another folder, or "
                    f"drop=[{name.partition('/')[0]!r}]"
                )
        for name, tree in form.columns:
            if (expected := self._trees[policy_id].get(name, tree)) != tree:
                raise ArgumentError(
                    f"{where} {name!r}: expected the structure {expected}, as before, got {tree}; record into another "
                    f"folder, or drop=[{name!r}]"
                )

    def _check_source(self, batch: MultiAgentBatch, metrics: Metrics | None) -> None:
        """Raise if two collectors that share this recorder use the same ids."""
        if metrics is None:
            return
        for rows in batch.values():
            if "eps_id" in rows and len(rows):
                stream = int(rows["eps_id"].flat[0]) >> STREAM_BITS
                if self._streams.setdefault(stream, metrics) is not metrics:
                    raise ArgumentError(
                        f"Recorder({str(self.folder)!r}): two collectors have stream={stream}, and so the same "
                        f"eps_ids; give each its own stream or its own recorder"
                    )
                return

    def _set_envs(self, envs: VectorEnv) -> None:
        described = describe_envs(envs)
        if self._envs is not None:
            check_same_envs(self._envs, described, self.folder)
            return
        self._envs = described
        if self._has_schema:
            self._write_schema()

    def _begin(self) -> None:
        """Begin a session in the manifest."""
        if not self._has_schema:
            self._write_schema()
            self._has_schema = True
        self._writer.begin(self._about)

    def _write_schema(self) -> None:
        try:
            write_schema(self.folder, self._envs, self._notes)
        except OSError as error:
            raise self._writer.cannot_write(error) from error

    def _check_open(self, what: str) -> None:
        self._check_process(f"Recorder({str(self.folder)!r}): {what}")
        if self.closed:
            raise ClosedError(f"Recorder({str(self.folder)!r}) is closed: {what}")


def _text_free(dtype: str) -> str:
    """Return the dtype without a text's width, which differs between batches."""
    return "<U0" if dtype[1] == "U" else dtype


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
        self._manifest.sessions.append(RecordingSession(dict(about)))
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

    def _mark_closed(self) -> None:
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
            self._mark_closed()
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
                self._persist(self._mark_closed)
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


_KEYS = ("eps_id", "agent_index", "t")


class Table(NamedTuple):
    """One policy's rows: their form, arrays by the table's column, and number."""

    form: TableForm
    arrays: Arrays
    rows: int


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch that waits to be written."""

    batch: MultiAgentBatch  # as the collector made it
    tables: Mapping[str, Table]  # what is written, by policy id
    source: object  # metrics of the collector that made it; None for a batch that was written by hand


class RepeatedRows:
    """One collector's batches, without rows that came before.

    A batch that a callback refused, or before whose return Ctrl-C came, is not delivered: its rows come again, in the
    next batch or over several, and the fragments of the next batch have the numbers of those of the one before.
    """

    def __init__(self) -> None:
        self._last: MultiAgentBatch | None = None
        self._undelivered: set[tuple[str, int, int, int]] = set()
        self._env_steps = 0  # of batches that were not delivered, and did not come again yet

    def drop_from(self, queued: QueuedBatch) -> tuple[Mapping[str, Table], int]:
        """Return the batch's tables without repeated rows, and its env steps without theirs."""
        batch, last, self._last = queued.batch, self._last, queued.batch
        if last is not None:
            before, now = _fragments(last), _fragments(batch)
            if now is None:
                return queued.tables, batch.env_steps
            if before is not None and any(now[stream][0] <= before[stream][1] for stream in now.keys() & before.keys()):
                self._undelivered |= {key for policy_id in last for key in _keys(policy_id, last)}
                self._env_steps += last.env_steps
        if not self._undelivered:
            return queued.tables, batch.env_steps
        tables, hits = {}, 0
        for policy_id, table in queued.tables.items():
            keys = _keys(policy_id, batch)
            new_B = np.array([key not in self._undelivered for key in keys], np.bool_)
            hits += len(new_B) - int(new_B.sum())
            self._undelivered.difference_update(keys)
            tables[policy_id] = _chosen(table, new_B)
        repeated = min(self._env_steps, batch.env_steps) if hits else 0
        self._env_steps -= repeated
        if not hits:  # what was not delivered was lost: the collector was reset
            self._undelivered, self._env_steps = set(), 0
        return tables, batch.env_steps - repeated


def _chosen(table: Table, chosen_B: NDArray[np.bool_]) -> Table:
    if chosen_B.all():
        return table
    return Table(table.form, {name: array[chosen_B] for name, array in table.arrays.items()}, int(chosen_B.sum()))


def _fragments(batch: MultiAgentBatch) -> dict[int, tuple[int, int]] | None:
    """First and last ``unroll_id``, by the collector's stream; None where a row is not a decision each."""
    if not all(name in rows and np.ndim(rows[name]) == 1 for rows in batch.values() for name in (*_KEYS, "unroll_id")):
        return None
    found: dict[int, tuple[int, int]] = {}
    for rows in batch.values():
        ids_B = rows["unroll_id"]
        streams = range(int(ids_B.min()) >> STREAM_BITS, (int(ids_B.max()) >> STREAM_BITS) + 1) if len(ids_B) else ()
        for stream in streams:
            own_B = ids_B if len(streams) == 1 else ids_B[ids_B >> STREAM_BITS == stream]
            if len(own_B):
                first, last = found.get(stream, (own_B[0], own_B[0]))
                found[stream] = min(int(first), int(own_B.min())), max(int(last), int(own_B.max()))
    return found


def _keys(policy_id: str, batch: MultiAgentBatch) -> list[tuple[str, int, int, int]]:
    rows = batch[policy_id]
    columns = (rows[name].tolist() for name in _KEYS)
    return [(policy_id, *key) for key in zip(*columns, strict=True)]
