"""`benchmarks/paper_table.py` writes the page of its results; a row that was cut off comes to the same numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numba", reason="the benchmark trains in compiled envs")

import torch

from benchmarks import paper_table
from benchmarks.paper_table import (
    PAGE,
    TASKS,
    Task,
    keep,
    missing,
    page,
    processor_seconds,
    rate,
    results,
    returns_table,
    rows_of,
    speed_table,
    spread,
    time_epymarl,
    train,
)


@pytest.fixture(autouse=True)
def torchs_own() -> Iterator[None]:
    """Give torch's seed and number of threads back, and the cores."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)
    if cores:
        os.sched_setaffinity(0, cores)


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(results()), "python -m benchmarks.paper_table --page"


def test_results_name_tasks_and_say_how_far_they_got() -> None:
    found = results()
    for row in found["rows"]:
        assert row["env"] == TASKS[row["task"]].env
        assert row["curve"][-1][0] <= row["steps"]
        assert row["processor seconds"] <= row["seconds"] * 1.05  # one thread
    for row in found["others"]:
        assert row["processor seconds"] >= 300 or "use_rnn=True" in row["options"]


def test_the_readme_claims_no_more() -> None:
    claimed = re.search(
        r"more than \*\*(\d+) times\*\*\nEPyMARL", (paper_table.ROOT / "README.md").read_text(encoding="utf-8")
    )
    found = results()
    (other,) = (
        each for each in found["others"] if (each["algorithm"], each["options"]) == ("mappo", ["use_rnn=False"])
    )
    assert claimed
    assert rate(rows_of(found["rows"], "rware-tiny-4ag", "mappo")) > int(claimed[1]) * rate([other])


def row_of(task: str, seed: int, curve: list[list[float]], seconds: float = 10.0) -> dict[str, Any]:
    steps = curve[-1][0]
    return {
        "task": task,
        "algorithm": "ippo",
        "seed": seed,
        "steps": steps,
        "curve": curve,
        "processor seconds": seconds,
    }


def test_tables() -> None:
    rows = [row_of("rware-tiny-4ag", seed, [[0, 0.0], [10**6, 5.0 + seed], [2 * 10**6, 4.0]]) for seed in (0, 1)]
    other = row_of("rware-tiny-4ag", 0, [[1000, 0.0]]) | {
        "library": "EPyMARL",
        "options": ["use_rnn=False"],
        "commit": "c" * 40,
    }
    found = {"rows": rows, "others": [other]}
    assert rate(rows) == 200_000
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 3.0]) == "2.00 ± 12.71"
    assert "| rware-tiny-4ag | IPPO | 2 | 5.50 ± 6.36 | 4.00 ± 0.00 | 2 of 40 M | 200,000 | 0 |" in returns_table(rows)
    assert "| IPPO | without recurrence | 100 | 200,000 | 2000 | 55.6 h | 2 min |" in speed_table(found)
    assert missing(found) == f"IPPO on {len(TASKS) - 1}, MAPPO on {len(TASKS)}, QMIX on {len(TASKS)}"


def test_a_row_replaces_the_earlier_one_of_its_training(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for curve in ([[0, 0.0]], [[0, 0.0], [1000, 1.0]]):
        for seed in (0, 1):
            keep("rows", row_of("rware-tiny-4ag", seed, curve), path)
    assert [(row["seed"], row["steps"]) for row in results(path)["rows"]] == [(0, 1000), (1, 1000)]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow("trains")
@pytest.mark.parametrize("algorithm", ["ippo", "mappo", "qmix"])
@pytest.mark.parametrize("task", ["lbf-8x8-2p-2f-coop", "speaker-listener"])
def test_a_row_that_was_cut_off_comes_to_the_same_numbers(
    task: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {
        "NUM_ENVS": 8,
        "EPISODES": 8,
        "EVALUATIONS": 4,
        "Q_ENVS": 8,
        "Q_STEPS": 64,
        "MEMORY": 600,
    }.items():
        monkeypatch.setattr(paper_table, key, value)
    steps = 8 * 64 * 4 * (10 if algorithm == "qmix" else 1)  # QMIX takes a tenth
    monkeypatch.setitem(TASKS, task, Task(TASKS[task].env, steps, TASKS[task].arguments))
    *_, through = train(task, algorithm, 0, runs=tmp_path / "through")
    *_, cut = train(task, algorithm, 0, steps=8 * 64 * 2, runs=tmp_path / "parts")
    *_, whole = train(task, algorithm, 0, runs=tmp_path / "parts")
    assert [steps for steps, _ in through["curve"]] == [0, 512, 1024, 1536, 2048]
    assert cut["curve"] == through["curve"][:3]
    assert whole["curve"] == through["curve"]
    assert whole["steps"] == through["steps"] == 2048
    assert whole["processor seconds"] > cut["processor seconds"] > 0


@pytest.mark.slow("trains")
def test_the_command_writes_rows_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_ENVS": 8, "EPISODES": 8, "EVALUATIONS": 20_000_000 // 512}.items():
        monkeypatch.setattr(paper_table, name, value)
    before, where = results(), ["--results", str(tmp_path / "results.json"), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["x", "lbf-8x8-2p-2f-coop", "--algorithm", "mappo", "--steps", "600", *where])
    paper_table.main()
    assert [(row["algorithm"], row["steps"]) for row in results(tmp_path / "results.json")["rows"]] == [("mappo", 1024)]
    assert results() == before


def test_a_wrong_task_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in ((["rware"], "no task rware: expected some of simple-spread, "), (["--seeds", "6"], "1 to 5")):
        monkeypatch.setattr(sys, "argv", ["x", *words])
        with pytest.raises(SystemExit):
            paper_table.main()
        assert said in capsys.readouterr().err


LOG = """
import sys, time
assert sys.argv[1:4] == ["--config=mappo", "--env-config=gymma", "with"], sys.argv
for steps in range(5_000, 1_000_000, 5_000):
    began = time.process_time()
    while time.process_time() < began + 0.02:
        pass
    print(f"[INFO 17:19:18] my_main Recent Stats | t_env: {steps:10} | Episode: 20", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_another_library_is_timed_by_its_log(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text(LOG, encoding="utf-8")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    row = time_epymarl(tmp_path, sys.executable, "mappo", 0.2, ["use_rnn=False"])
    assert 50_000 <= row["steps"] <= 100_000
    assert 0.2 <= row["processor seconds"] < 1
    assert len(row["commit"]) == 40
    assert processor_seconds(os.getsid(0)) > 0
    (tmp_path / "src" / "main.py").write_text("raise SystemExit('no torch')", encoding="utf-8")
    with pytest.raises(SystemExit, match="ended too early: no torch"):
        time_epymarl(tmp_path, sys.executable, "mappo", 0.2, [])
