"""``marlvec record-data`` and ``marlvec data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import marlvec
from marlvec.cli import app
from tests.recording.runs import make_batch, write

pytest.importorskip("pyarrow")
pytest.importorskip("numba")

PLAYERS = """
import numpy as np

calls = 0

def left(rows):
    return np.ones(len(rows), np.int64)

def stop(rows):
    global calls
    calls += 1
    if calls == 250:
        raise KeyboardInterrupt
    return left(rows)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data_players.py").write_text(PLAYERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_dataset_is_recorded_and_shown(folder: Path) -> None:
    options = ["--out", "run", "--env-steps", "300", "--num-envs", "4", "--seed", "3", "--set", "max_cycles=5"]
    players = ["--policy", "fox=data_players.py:left", "--policy", "dogs=random", "--mapping", "adversary=dogs"]
    result = run("record-data", "simple_tag", *options, *players, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["env"], content["env_steps"], content["closed"]) == ("simple_tag_v3", 300, True)
    assert {one["policy"]: one["rows"] for one in content["policies"]} == {"dogs": 900, "fox": 300}
    assert content["notes"]["env_kwargs"] == {"max_cycles": 5}
    with marlvec.load_dataset("run") as data:
        assert (data["fox"].read().actions == 1).all()
        table = data.episode_table()
    whole = content["episodes"]
    assert whole["whole"] == int(table.whole.sum()) == 60
    assert whole["return_mean"] == pytest.approx(table.returns[table.whole].mean())
    assert whole["length_mean"] == 5
    assert content["policies"][0]["columns"]["obs"] in ("float32 (16,)", "float32 (14,)")
    again = run("record-data", "simple_tag", *options, *players, "--append")
    assert again.exit_code == 0, again.output
    shown = run("data", "run").stdout
    assert "run of simple_tag_v3: 600 env steps" in shown
    assert "120 whole episodes, parts of 0; return" in shown
    assert json.loads(run("data", "run", "--json").stdout)["env_steps"] == 600


def test_ctrl_c_ends_it_early_with_what_there_is(folder: Path) -> None:
    options = ["--out", "run", "--env-steps", "10000", "--num-envs", "2", "--policy", "data_players.py:stop"]
    result = run("record-data", "simple_spread", *options)
    assert result.exit_code == 130
    with marlvec.load_dataset("run") as data:
        assert data.is_closed
        assert 0 < data.env_steps < 10000


def test_rows_that_are_no_episodes_are_shown_too(folder: Path) -> None:
    write(folder / "run", [make_batch(0, 3, lambda n: {"x": n})])
    with (folder / "run" / "manifest.jsonl").open("r+b") as file:
        file.truncate(len(b"".join(file.readlines()[:-1])))
    content = json.loads(run("data", "run", "--json").stdout)
    assert (content["episodes"], content["env"], content["closed"]) == (None, None, False)
    assert "not closed: its recorder was killed" in run("data", "run").stdout
    write(folder / "none", [])
    assert run("data", "none").exit_code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--policy", "nowhere.py:seek"),
        ("--policy", "a=random", "--policy", "b=random"),
        ("--policy", "random", "--connectors", "NoSuch"),
    ],
)
def test_after_a_wrong_policy_the_same_folder_can_be_recorded_into(wrong: tuple[str, ...], folder: Path) -> None:
    options = ("--out", "run", "--env-steps", "20", "--num-envs", "2", "--backend", "sync")
    failed = run("record-data", "simple_tag", *options, *wrong)
    assert (failed.exit_code, failed.stderr.count("error:")) == (2, 1), failed.stderr
    again = run("record-data", "simple_spread", *options, "--json")
    assert again.exit_code == 0, again.stderr
    content = json.loads(again.stdout)
    assert (content["env_steps"], content["env"], content["closed"]) == (20, "simple_spread_v3", True)
    full = run("record-data", "simple_spread", *options)
    assert (full.exit_code, "it holds a recording" in full.stderr) == (2, True)


def test_errors_come_in_a_line(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "x").touch()
    for arguments, code, text in [
        (["data", "nowhere"], 2, "is not a folder"),
        (["data", "full"], 2, "is not a recording"),
        (["record-data", "simple_spread", "--out", "full"], 2, "expected a new or empty folder"),
        (["record-data", "simple_spread"], 2, "--out"),
    ]:
        result = run(*arguments)
        assert result.exit_code == code
        assert text in result.stderr
