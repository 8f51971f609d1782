"""`Recorder`: streams collected batches to disk."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from marlvec.arguments import check_choice, count_from
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.batch.arrow_columns import TableForm, arrow_libraries, table_form
from marlvec.collect.callbacks.append_file import digest_before
from marlvec.collect.callbacks.callback import ClosingCallback
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.rollout_state import STREAM_BITS
from marlvec.errors import ArgumentError, ClosedError, StateError
from marlvec.recording.files.manifest import MANIFEST, Manifest, open_folder, read_manifest, remove_unlisted
from marlvec.recording.files.part_file import Format
from marlvec.recording.files.schema import check_same_envs, describe_envs, read_schema, write_schema
from marlvec.recording.part_writer import OnFull, PartWriter
from marlvec.recording.repeated_rows import QueuedBatch, Table
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.saved import ProcessBound
from marlvec.vector.vector_env import VectorEnv

__all__ = ["Recorder"]


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
    sequences. Columns of Python objects raise; ``drop`` leaves them out.

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
                self._note_envs(envs)
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
                found[file.policy_id] = found.get(file.policy_id, 0) + file.rows
        return found

    # --- as a callback

    def on_collector_created(self, collector: Any) -> None:
        self._check_open("a collector was built with it")
        self._note_envs(collector.envs)
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
        if state.keys() != {"bytes", "end", "session"}:
            raise ArgumentError(f"expected the state of a Recorder, got {list(state)}")
        self.flush()
        size, session, manifest = int(state["bytes"]), state["session"], self._manifest
        if size > manifest.size or (size and digest_before(self.folder / MANIFEST, size) != state["end"]):
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

    def _note_envs(self, envs: VectorEnv) -> None:
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
