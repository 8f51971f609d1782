"""`Recorder`: what is collected is on disk, once and in order, whatever fails meanwhile, a kill included."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    MissingExtraError,
    ResourceError,
    SerialisationError,
    StateError,
)
from marlvec.testing.scripted import CounterEnv, SampledEnv
from tests.recording.runs import BATCHES, ENV_STEPS, collector, concat, make_batch, same_rows, write
from tests.vector.support.reference import refused
from tests.waiting import until, within

pytest.importorskip("pyarrow")


# --- `Recorder`: what is collected is on disk, once and in order, whatever fails meanwhile


@pytest.fixture
def envs() -> Iterator[marlvec.VectorEnv]:
    with marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as made:
        yield made


def recorded(folder: Path) -> dict[str, SampleBatch]:
    with marlvec.load_dataset(folder) as data:
        return {name: rows.read() for name, rows in data.items()}


def same(folder: Path, batches: list[MultiAgentBatch]) -> None:
    """The recording holds these batches' rows, in order."""
    want, got = concat(batches), recorded(folder)
    assert sorted(got) == sorted(want)
    for name, rows in want.items():
        same_rows(got[name], rows)


def plain(numbers: Any) -> dict[str, Any]:
    return {"x": numbers, "obs": np.stack([numbers, -numbers], axis=1).astype(np.float32)}


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


# --- what is recorded


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_it_records_all_collected_batches(format: Any, envs: marlvec.VectorEnv, tmp_path: Path) -> None:
    with marlvec.Recorder(tmp_path / "run", format=format, part_bytes=20_000) as recorder:
        batches = [
            collector_of.collect(env_steps=31) for collector_of in [collector(envs, [recorder])] for _ in range(12)
        ]
    same(tmp_path / "run", batches)
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert len(data["chasers"].files) > 3
        assert data.env_steps == 12 * 31
        assert data.is_closed
        assert data.agents == envs.agents
        for agent in envs.agents:
            assert data.observation_space(agent) == envs.agent_observation_space(agent)
            assert data.action_space(agent) == envs.agent_action_space(agent)
        assert data.sessions[0].about["collectors"][0]["seed"] == 0
    assert recorder.rows == {name: len(rows) for name, rows in concat(batches).items()}
    assert "closed" in repr(recorder)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_trees_images_texts_and_empty_arrays_come_back(format: Any, tmp_path: Path) -> None:
    def columns(numbers: Any) -> dict[str, Any]:
        n = len(numbers)
        image = np.arange(n * 12, dtype=np.uint8).reshape(n, 2, 2, 3)
        obs = {"image": image, "more": (numbers > 3, np.zeros((n, 0))), 7: numbers.astype(">f4")}
        return {"obs": obs, "name": np.array([f"ä{k}" for k in numbers], "U5"), "bits": np.ones((n, 3), np.bool_)}

    batches = [make_batch(start, n, columns) for start, n in [(0, 3), (3, 1), (4, 120), (124, 0)]]
    write(tmp_path / "run", batches, format=format)
    same(tmp_path / "run", batches)


def test_a_column_may_begin_late(tmp_path: Path) -> None:
    batches = [make_batch(0, 4, plain), make_batch(4, 4, lambda n: {**plain(n), "off_policy": n > 5})]
    write(tmp_path / "run", batches)
    rows = recorded(tmp_path / "run")["main"]
    assert rows["off_policy"].tolist() == [False] * 6 + [True] * 2
    assert rows["x"].tolist() == list(range(8))


def test_dropped_columns_are_not_there(tmp_path: Path) -> None:
    batch = make_batch(0, 4, lambda n: {**plain(n), "infos": [{}] * 4})
    write(tmp_path / "run", [batch], drop=["infos"])
    assert list(recorded(tmp_path / "run")["main"].keys()) == ["x", "obs"]


def test_other_libraries_read_it(tmp_path: Path) -> None:
    from pyarrow import dataset

    batches = {"a/b": SampleBatch(plain(np.arange(3))), "..": SampleBatch(plain(np.arange(5)))}
    write(tmp_path / "run", [MultiAgentBatch(batches, env_steps=5)])
    table = dataset.dataset(tmp_path / "run", partitioning="hive", exclude_invalid_files=True).to_table().to_pydict()
    assert sorted(zip(table["policy"], table["x"], strict=True)) == sorted(
        (name, k) for name, rows in batches.items() for k in rows["x"].tolist()
    )


# --- each row once


class FailsOnce(marlvec.Callback):
    """Refuses some batches."""

    def __init__(self, numbers: tuple[int, ...], error: BaseException) -> None:
        self.numbers, self.error, self.calls = numbers, error, 0

    def on_sample_end(self, *_: object) -> None:
        self.calls += 1
        if self.calls in self.numbers:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("amounts", [(20, 20, 20, 20, 20), (20, 40, 6, 4, 30), (20, 3, 50, 8, 8)])
@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (2, 3)])
def test_rows_of_a_batch_that_comes_again_are_recorded_once(
    numbers: tuple[int, ...], amounts: tuple[int, ...], error: BaseException, envs: marlvec.VectorEnv, tmp_path: Path
) -> None:
    returned = []
    with marlvec.Recorder(tmp_path / "run") as recorder:
        collects = collector(envs, [recorder, FailsOnce(numbers, error)])
        for amount in amounts:
            with contextlib.suppress(ValueError, KeyboardInterrupt):
                returned.append(collects.collect(env_steps=amount))
        while collects.metrics.env_steps > sum(batch.env_steps for batch in returned):
            returned.append(collects.collect(env_steps=1))
    want, got = concat(returned), recorded(tmp_path / "run")
    for name, rows in want.items():
        keys = [
            sorted(zip(b["eps_id"], b["agent_index"], b["t"], b["rewards"], strict=True)) for b in (got[name], rows)
        ]
        assert keys[0] == keys[1]
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert data.env_steps == sum(batch.env_steps for batch in returned)


def test_after_a_reset_rows_that_were_lost_stay_and_new_ones_follow(envs: marlvec.VectorEnv, tmp_path: Path) -> None:
    with marlvec.Recorder(tmp_path / "run") as recorder:
        collects = collector(envs, [recorder, FailsOnce((1,), ValueError("no"))])
        refused(ValueError, "no", collects.collect, env_steps=10)
        collects.reset()
        batches = [collects.collect(env_steps=10) for _ in range(3)]
    rows = recorded(tmp_path / "run")["runner"]
    same_rows(rows.slice(len(rows) - 30, len(rows)), concat(batches)["runner"])


def test_two_collectors_need_streams_of_their_own(envs: marlvec.VectorEnv, tmp_path: Path) -> None:
    with marlvec.Recorder(tmp_path / "run") as recorder:
        first, other = collector(envs, [recorder]), collector(envs, [recorder], stream=1)
        batches = [first.collect(env_steps=8)]
        other.reset()
        batches.append(other.collect(env_steps=8))
        third = collector(envs, [recorder])
        third.reset()
        refused(ArgumentError, "two collectors have stream=0.*give each its own stream", third.collect, env_steps=8)
    same(tmp_path / "run", batches)


def test_it_goes_back_to_a_checkpoint_with_its_collector(envs: marlvec.VectorEnv, tmp_path: Path) -> None:
    with marlvec.Recorder(tmp_path / "run") as recorder:
        collects = collector(envs, [recorder])
        batches = [collects.collect(env_steps=12)]
        state = collects.get_state()
        recorder.flush()
        collects.collect(env_steps=12)
        collects.set_state(state)
        batches.append(collects.collect(env_steps=12))
    same(tmp_path / "run", batches)
    assert [line["close"] for line in lines_of(tmp_path / "run") if "close" in line] == [0]
    state["others"] = [[who, one] for who, one in state["others"]]
    with marlvec.Recorder(tmp_path / "run", append=True) as recorder:
        collects = collector(envs, [recorder])
        collects.set_state(state)
        batches[1:] = [collects.collect(env_steps=12), collects.collect(env_steps=4)]
    same(tmp_path / "run", batches)
    assert len({line["session"] for line in lines_of(tmp_path / "run") if "part" in line}) == 1


def test_a_state_of_another_recording_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "other", [make_batch(0, 9, plain)])
    with marlvec.Recorder(tmp_path / "other", append=True) as recorder:
        state = recorder.state_dict()
    batches = [make_batch(0, 4, plain)]
    with marlvec.Recorder(tmp_path / "run") as recorder:
        recorder.write(batches[0])
        recorder.load_state_dict(state)
        refused(ArgumentError, "the state of a Recorder: expected other fields", recorder.load_state_dict, {"bytes": 3})
    same(tmp_path / "run", batches)


# --- the disk


def write_all(recorder: marlvec.Recorder, batches: list[MultiAgentBatch]) -> None:
    for batch in batches:
        recorder.write(batch)


class Disk:
    """A disk for drafts that may be full, or slow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        self.open = threading.Event()
        self.open.set()
        self.refused = 0
        write = os.write

        def refusing(handle: int, data: Any) -> int:
            if threading.current_thread().name == "marlvec-recorder":
                assert self.open.wait(60)
                if self.error is not None:
                    self.refused += 1
                    raise self.error
                return write(handle, data[:1000])  # as a disk may
            return write(handle, data)

        patch.setattr(os, "write", refusing)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_full_disk_raises_and_nothing_is_lost(
    format: Any, disk: Disk, envs: marlvec.VectorEnv, tmp_path: Path
) -> None:
    recorder = marlvec.Recorder(tmp_path / "run", format=format, on_full="raise", part_bytes=1)
    collects = collector(envs, [recorder])
    batches = [collects.collect(env_steps=20)]
    recorder.flush()
    disk.error = OSError(errno.ENOSPC, "no room")
    rejected = 0
    for _ in range(6):
        try:
            batches.append(collects.collect(env_steps=20))
        except ResourceError:
            rejected += 1
    assert rejected >= 3
    refused(ResourceError, r"cannot write .*no room.*rows wait in memory: make room", recorder.close)
    assert not recorder.closed
    disk.error = None
    recorder.flush()
    batches.append(collects.collect(env_steps=40))
    recorder.close()
    got = recorded(tmp_path / "run")
    for name, rows in concat(batches).items():
        for column in ("eps_id", "t", "agent_index", "rewards"):
            order = [np.lexsort((b["t"], b["agent_index"], b["eps_id"])) for b in (got[name], rows)]
            assert (got[name][column][order[0]] == rows[column][order[1]]).all()
    assert not list((tmp_path / "run").glob("*/.*"))


def test_a_full_disk_makes_it_wait_where_that_is_asked(disk: Disk, tmp_path: Path) -> None:
    batches = [make_batch(10 * k, 10, plain) for k in range(6)]
    with marlvec.Recorder(tmp_path / "run", part_bytes=1) as recorder:
        disk.error = OSError(errno.ENOSPC, "no room")
        recorder.write(batches[0])
        until(lambda: disk.refused)

        def free() -> None:
            until(lambda: disk.refused > 1)
            disk.error = None

        frees = threading.Thread(target=free)
        frees.start()
        with pytest.warns(RuntimeWarning, match="waits for the disk: .*no room"):
            write_all(recorder, batches[1:])
        frees.join()
    same(tmp_path / "run", batches)


def test_another_error_of_the_disk_raises_in_any_case(disk: Disk, tmp_path: Path) -> None:
    recorder = marlvec.Recorder(tmp_path / "run")
    disk.error = OSError(errno.EIO, "broken")
    recorder.write(make_batch(0, 10, plain))
    refused(ResourceError, "broken", recorder.flush)
    disk.error = None
    recorder.close()
    same(tmp_path / "run", [make_batch(0, 10, plain)])


def test_waiting_for_a_full_disk_ends_in_an_error_and_a_later_call_writes_everything(
    disk: Disk, tmp_path: Path
) -> None:
    batches = [make_batch(10 * k, 10, plain) for k in range(3)]
    recorder = marlvec.Recorder(tmp_path / "run", part_bytes=1, full_seconds=0.2)
    disk.error = OSError(errno.EDQUOT, "quota exceeded")
    recorder.write(batches[0])
    text = r"quota exceeded\); \d+ rows wait in memory: make room, and call again"
    with pytest.warns(RuntimeWarning, match="waits for the disk: .*quota"), pytest.raises(ResourceError, match=text):
        write_all(recorder, [*batches[1:], make_batch(30, 10, plain)])
    with within(30, usual=1), pytest.raises(ResourceError, match="quota exceeded"):
        recorder.close()  # one more attempt, no second wait
    disk.error = None
    recorder.flush()
    kept = len(recorded(tmp_path / "run")["main"]) // 10
    write_all(recorder, batches[kept:])
    recorder.close()
    same(tmp_path / "run", batches)


@pytest.mark.parametrize("what", [marlvec.Recorder.flush, marlvec.Recorder.close])
def test_ctrl_c_ends_the_wait_for_a_full_disk_and_the_block_does_not_wait_again(
    what: Any, disk: Disk, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match="no room"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with marlvec.Recorder(tmp_path / "run", part_bytes=1, full_seconds=float("inf")) as recorder:
            disk.error = OSError(errno.ENOSPC, "no room")
            recorder.write(make_batch(0, 10, plain))
            until(lambda: disk.refused)
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            try:
                what(recorder)
            except KeyboardInterrupt:
                raise ValueError("stopped") from None
    disk.error = None
    recorder.close()
    same(tmp_path / "run", [make_batch(0, 10, plain)])


ENDS = """
import errno, os, resource, shutil, sys, threading, warnings
import marlvec
from pathlib import Path
from tests.recording.runs import make_batch
from tests.recording.test_recorder import plain
from tests.waiting import until

folder, what, on_full, format, how = Path(sys.argv[1]), *sys.argv[2:]
warnings.simplefilter("ignore")
write, refused = os.write, threading.Event()

def refusing(handle, data):
    if threading.current_thread().name != "marlvec-recorder":
        return write(handle, data)
    try:
        if full and what.startswith("E") and what != "EFBIG":
            raise OSError(getattr(errno, what), "no room")
        return write(handle, data)
    except OSError:
        refused.set()
        raise

full, os.write = False, refusing
recorder = marlvec.Recorder(folder, format, part_bytes=1, on_full=on_full, full_seconds=0.5)
recorder.write(make_batch(0, 10, plain))
recorder.flush()
full = True
if what == "EFBIG":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
if what == "gone":
    shutil.rmtree(folder)
recorder.write(make_batch(10, 5000, plain))
if how == "close":
    try:
        recorder.close()
    except marlvec.errors.ResourceError as error:
        print("typed:", error)
elif what.startswith("E"):
    assert refused.wait(60)
if how == "forget":
    del recorder
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("what", "on_full", "format", "how"),
    [
        ("ENOSPC", "raise", "parquet", "close"),
        ("ENOSPC", "wait", "arrow", "exit"),
        *(
            pytest.param(*case, marks=pytest.mark.slow("a process each"))
            for case in [
                ("ENOSPC", "raise", "parquet", "exit"),
                ("ENOSPC", "wait", "parquet", "close"),
                ("ENOSPC", "raise", "arrow", "forget"),
                ("EDQUOT", "wait", "parquet", "forget"),
                ("EFBIG", "wait", "arrow", "close"),
                ("EFBIG", "raise", "parquet", "exit"),
                ("gone", "raise", "parquet", "close"),
                ("gone", "wait", "parquet", "exit"),
            ]
        ),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="it has no limit of a file's size")
def test_a_process_whose_disk_is_full_ends_by_itself_and_says_what_is_lost(
    what: str, on_full: str, format: str, how: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path / "run"), what, on_full, format, how]
    with within(90, usual=5):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 7, done.stderr
    assert "Fatal" not in done.stderr
    assert re.search(r"ResourceError: Recorder\(.*5,000 rows are lost; the parts .* are complete", done.stderr)
    if how == "close":
        assert re.search(r"typed: Recorder\(.*cannot write \(\[Errno .*5,000 rows wait in memory", done.stdout)
    if what != "gone":
        same(tmp_path / "run", [make_batch(0, 10, plain)])
        assert not list((tmp_path / "run").glob("*/.*"))


def test_a_folder_that_is_deleted_before_the_session_is_closed_is_an_error(tmp_path: Path) -> None:
    recorder = marlvec.Recorder(tmp_path / "run")
    recorder.write(make_batch(0, 10, plain))
    recorder.flush()
    (tmp_path / "run").rename(tmp_path / "moved")
    for call in (recorder.close, recorder.state_dict):
        refused(ResourceError, "cannot write .*No such file.*: put that right, and call again", call)
    (tmp_path / "moved").rename(tmp_path / "run")
    recorder.close()
    same(tmp_path / "run", [make_batch(0, 10, plain)])


def test_a_queue_that_is_full_raises_or_waits(disk: Disk, tmp_path: Path) -> None:
    taken = [make_batch(0, 10, plain), make_batch(10, 10, plain)]
    recorder = marlvec.Recorder(tmp_path / "run", on_full="raise", queue_size=2, part_bytes=1)
    disk.open.clear()
    for batch in taken:
        recorder.write(batch)
    with pytest.raises(ResourceError, match="2 batches wait to be written.*the batch was not taken"):
        recorder.write(make_batch(20, 10, plain))
    disk.open.set()
    recorder.close()
    same(tmp_path / "run", taken)


def test_a_thread_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from marlvec.recording import files as part_file

    recorder = marlvec.Recorder(tmp_path / "run", part_bytes=1)
    recorder.write(make_batch(0, 10, plain))
    recorder.flush()
    monkeypatch.setattr(part_file, "arrow_array", lambda array: 1 / 0)
    recorder.write(make_batch(10, 10, plain))
    refused(StateError, "its thread has failed.*ZeroDivisionError", recorder.flush)
    refused(StateError, "its thread has failed", recorder.close)
    assert recorder.closed
    same(tmp_path / "run", [make_batch(0, 10, plain)])
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert not data.is_closed


def test_parts_are_published_when_they_are_old(tmp_path: Path) -> None:
    with marlvec.Recorder(tmp_path / "run", part_seconds=0.01) as recorder:
        recorder.write(make_batch(0, 10, plain))
        until(lambda: recorder.rows == {"main": 10})


def test_a_recorder_that_is_forgotten_is_closed(tmp_path: Path) -> None:
    recorder = marlvec.Recorder(tmp_path / "run")
    recorder.write(make_batch(0, 10, plain))
    loop = [recorder]
    loop.append(loop)  # type: ignore[arg-type]  # a circle, for the garbage collector
    del recorder, loop
    gc.collect()
    same(tmp_path / "run", [make_batch(0, 10, plain)])
    assert lines_of(tmp_path / "run")[-1] == {"close": 0, "parts": 1}


# --- folders, and what is refused


def test_another_session_goes_on(envs: marlvec.VectorEnv, tmp_path: Path) -> None:
    batches = []
    for k in range(2):
        with marlvec.Recorder(tmp_path / "run", append=True, notes={f"run {k}": k}) as recorder:
            batches.append(collector(envs, [recorder]).collect(env_steps=10 + k))
    same(tmp_path / "run", batches)
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert [session.closed for session in data.sessions] == [True, True]
        assert len(list(data.episodes())) == len(set(zip(*data.episode_table()[:2], strict=True)))
    for env, options, text in [
        ("simple_spread", {}, r"differ from the recording's in name: expected 'simple_tag"),
        ("simple_tag", {"continuous_actions": True}, r"action space of 'adversary_0': expected Discrete\(5\), got Box"),
    ]:
        with marlvec.make(env, 2, backend="native", **options) as others, pytest.raises(ArgumentError, match=text):
            marlvec.Recorder(tmp_path / "run", append=True, envs=others)
    same(tmp_path / "run", batches)


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(ArgumentError, match=r"expected a new or empty folder, it holds \['thesis.tex'\]"):
        marlvec.Recorder(tmp_path / "full")
    write(tmp_path / "run", [make_batch(0, 3, plain)])
    refused(ArgumentError, r"it holds a recording; give another, or append=True", marlvec.Recorder, tmp_path / "run")
    with marlvec.Recorder(tmp_path / "run", append=True) as recorder:
        if sys.platform != "win32":
            refused(StateError, "another recorder is writing there", marlvec.Recorder, tmp_path / "run", append=True)
        recorder.write(make_batch(3, 2, plain))
    same(tmp_path / "run", [make_batch(0, 5, plain)])


def test_a_recording_that_holds_nothing_is_begun_again(tmp_path: Path) -> None:
    """A program that failed before its first batch, on envs of another kind, can be mended and run again."""
    with (
        contextlib.suppress(ZeroDivisionError),
        marlvec.make(CounterEnv, backend="sync") as envs,
        marlvec.Recorder(tmp_path / "run", envs=envs, notes={"try": 1}),
    ):
        raise ZeroDivisionError
    with marlvec.load_dataset(tmp_path / "run") as dataset:
        first = dataset.env_name
    with (
        marlvec.make(partial(SampledEnv, Box(0, 1, (2,)), Discrete(2)), backend="sync") as envs,
        marlvec.Recorder(tmp_path / "run", envs=envs, notes={"try": 2}) as recorder,
    ):
        recorder.write(make_batch(0, 3, plain))
    with marlvec.load_dataset(tmp_path / "run") as dataset:
        assert dataset.env_name != first
        assert (dataset.notes, len(dataset.sessions)) == ({"try": 2}, 1)
    same(tmp_path / "run", [make_batch(0, 3, plain)])


def test_remains_of_a_killed_recorder_are_removed(tmp_path: Path) -> None:
    write(tmp_path / "run", [make_batch(0, 3, plain)])
    left = tmp_path / "run" / "policy=main"
    (left / "part-000001.parquet").write_bytes(b"x")
    (left / ".part-000002.parquet.99-0123abcd.tmp").write_bytes(b"x")
    with (tmp_path / "run" / "manifest.jsonl").open("ab") as file:
        file.write(b'{"part": 1, "sess')
    same(tmp_path / "run", [make_batch(0, 3, plain)])
    write(tmp_path / "run", [make_batch(3, 4, plain)], append=True)
    same(tmp_path / "run", [make_batch(0, 7, plain)])
    assert sorted(path.name for path in left.iterdir()) == ["part-000000.parquet", "part-000001.parquet"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "hdf5"}, "format must be one of 'parquet', 'arrow'"),
        ({"on_full": "drop"}, "on_full must be one of"),
        ({"part_bytes": 0}, r"part_bytes=0\): expected an integer of at least 1"),
        ({"queue_size": 1.5}, r"queue_size=1.5\)"),
        ({"part_seconds": -1}, r"part_seconds=-1\): expected a number above 0"),
        ({"full_seconds": 0}, r"full_seconds=0\): expected a number above 0"),
        ({"drop": "infos"}, r"write drop=\['infos'\]"),
        ({"notes": {"x": object()}}, "expected JSON data"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    refused(ArgumentError, text, marlvec.Recorder, tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_recorded_is_named(tmp_path: Path) -> None:
    with marlvec.Recorder(tmp_path / "run") as recorder:
        recorder.write(make_batch(0, 3, plain))
        for bad, error, text in [
            (make_batch(3, 2, lambda n: {**plain(n), "infos": [{}] * 2}), SerialisationError, r"'infos \(object\)'"),
            (make_batch(3, 2, lambda n: {"x": n.astype(float)}), ArgumentError, "column 'x': expected <i8.*got <f8"),
            (make_batch(3, 2, lambda n: {"obs": np.zeros((2, 5), np.float32)}), ArgumentError, r"shape \(2,\) a row"),
            (make_batch(3, 2, lambda n: {"x": {"y": n}}), ArgumentError, "column 'x': expected the structure x, as"),
            (make_batch(3, 2, plain)["main"], ArgumentError, "expected a MultiAgentBatch, got SampleBatch"),
        ]:
            refused(error, text, recorder.write, bad)
        recorder.write(make_batch(3, 2, plain))
    same(tmp_path / "run", [make_batch(0, 5, plain)])
    for call in (lambda: recorder.write(make_batch(5, 2, plain)), recorder.flush):
        refused(ClosedError, "is closed", call)
    recorder.close()


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (marlvec.Recorder, marlvec.load_dataset):
        refused(MissingExtraError, r'pip install "marlvec\[parquet\]"', call, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_many_collectors_are_recorded_on_the_head(tmp_path: Path) -> None:
    from marlvec.distributed import Collectors
    from tests.distributed.helpers import plain as build

    returned = []
    with (
        marlvec.Recorder(tmp_path / "run") as recorder,
        Collectors(build, 2, "sync", seed=0, callbacks=[recorder, FailsOnce((2,), ValueError("no"))]) as many,
    ):
        for _ in range(4):
            with contextlib.suppress(ValueError):
                returned.append(many.collect(env_steps=40))
    assert len(returned) == 3
    got, want = recorded(tmp_path / "run"), concat(returned)
    for name, rows in want.items():
        keys = [list(zip(b["eps_id"], b["agent_index"], b["t"], strict=True)) for b in (got[name], rows)]
        assert len(set(keys[0])) == len(keys[0])
        assert set(keys[1]) <= set(keys[0])


def test_ctrl_c_in_close_leaves_a_recorder_that_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = marlvec.Recorder(tmp_path / "run")
    recorder.write(make_batch(0, 3, plain))
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    refused(KeyboardInterrupt, "", recorder.close)
    recorder.write(make_batch(3, 2, plain))
    recorder.close()
    same(tmp_path / "run", [make_batch(0, 5, plain)])
    with marlvec.load_dataset(tmp_path / "run") as data:
        assert data.is_closed


# --- A recorder whose process is killed: what the manifest lists is on disk, and is a beginning of what was collected


@pytest.fixture(scope="module")
def whole() -> dict[str, SampleBatch]:
    pytest.importorskip("numba")
    with marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs:
        collects = collector(envs)
        return concat([collects.collect(env_steps=ENV_STEPS) for _ in range(BATCHES)])


def record_and_kill(folder: Path, format: str, kills: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.recording.runs", str(folder), format, str(kills), str(seed)]
    subprocess.run(command, check=True, timeout=170)


def check_what_is_there(folder: Path, reference: dict[str, SampleBatch]) -> int | None:
    """Return the rows that are there; None where nothing had begun."""
    try:
        data = marlvec.load_dataset(folder)
    except CheckpointError as error:
        # It was killed before it had said that it begins: nothing was collected yet.
        assert "manifest.jsonl" in str(error) or "is not a folder" in str(error)  # noqa: PT017  # either is right
        assert not list(folder.glob("*/*.parquet"))
        return None
    rows = 0
    with data:
        for name, series in data.items():
            got = series.read()
            same_rows(got, reference[name].slice(0, len(got)))
            rows += len(got)
        assert len(data.get("chasers", ())) == 3 * len(data.get("runner", ()))  # all policies to the same batch
        listed = {path for series in data.values() for path in series.files}
        others = {path for path in folder.glob("policy=*/part-*") if path not in listed}
        assert len({path.stem for path in others}) <= 1, "but for the part in the making"
        assert data.is_closed == (rows == sum(map(len, reference.values())))
    return rows


@pytest.mark.parametrize(
    ("kills", "step"), [(6, 10), pytest.param(60, 1, marks=pytest.mark.slow("a process for each act"))]
)
def test_killed_at_any_act_on_its_files(kills: int, step: int, whole: dict[str, SampleBatch], tmp_path: Path) -> None:
    record_and_kill(tmp_path, "parquet", kills, -step)
    found = [check_what_is_there(tmp_path / str(k), whole) for k in range(kills)]
    assert found[0] is None
    assert len(set(found)) > 3
    assert sorted(found, key=lambda rows: -1 if rows is None else rows) == found


@pytest.mark.parametrize(
    ("format", "kills"),
    [
        pytest.param("parquet", 6, marks=pytest.mark.slow("seconds of recording")),
        pytest.param("arrow", 6, marks=pytest.mark.slow("seconds of recording")),
        pytest.param("parquet", 100, marks=pytest.mark.soak),
        pytest.param("arrow", 100, marks=pytest.mark.soak),
    ],
)
def test_killed_at_random_moments(format: Any, kills: int, whole: dict[str, SampleBatch], tmp_path: Path) -> None:
    record_and_kill(tmp_path, format, kills, seed=kills)
    found = [check_what_is_there(tmp_path / str(k), whole) for k in range(kills)]
    assert any(found)
    for k in range(kills):  # and a recorder goes on there
        if found[k] is not None:
            write(tmp_path / str(k), [], append=True)
            assert check_what_is_there(tmp_path / str(k), whole) == found[k]
            assert not list((tmp_path / str(k)).glob("policy=*/.*"))
