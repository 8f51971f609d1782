"""A recorder whose process is killed: what the manifest lists is on disk, and is a beginning of what was collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import marlvec
from marlvec.collect import SampleBatch
from marlvec.errors import CheckpointError
from tests.recording.killed import BATCHES, ENV_STEPS
from tests.recording.runs import collector, concat, same_rows, write

pytest.importorskip("pyarrow")
pytest.importorskip("numba")


@pytest.fixture(scope="module")
def reference() -> dict[str, SampleBatch]:
    with marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs:
        collects = collector(envs)
        return concat([collects.collect(env_steps=ENV_STEPS) for _ in range(BATCHES)])


def kill(folder: Path, format: str, kills: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.recording.killed", str(folder), format, str(kills), str(seed)]
    subprocess.run(command, check=True, timeout=170)


def check(folder: Path, reference: dict[str, SampleBatch]) -> int | None:
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
def test_killed_at_any_act_on_its_files(
    kills: int, step: int, reference: dict[str, SampleBatch], tmp_path: Path
) -> None:
    kill(tmp_path, "parquet", kills, -step)
    found = [check(tmp_path / str(k), reference) for k in range(kills)]
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
def test_killed_at_random_moments(format: Any, kills: int, reference: dict[str, SampleBatch], tmp_path: Path) -> None:
    kill(tmp_path, format, kills, seed=kills)
    found = [check(tmp_path / str(k), reference) for k in range(kills)]
    assert any(found)
    for k in range(kills):  # and a recorder goes on there
        if found[k] is not None:
            write(tmp_path / str(k), [], append=True)
            assert check(tmp_path / str(k), reference) == found[k]
            assert not list((tmp_path / str(k)).glob("policy=*/.*"))
