"""The scripts of self-play train, short of what they do as they stand: what they learn, and that they go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from marlvec.cli import app
from tests.examples import scripts

pytest.importorskip("torch")
pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")
pytest.importorskip("numba", reason="compiled worlds, or it would take minutes")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run an example that keeps what it found; its results."""

    def run(name: str, *args: str) -> dict[str, Any]:
        folder = tmp_path / "kept"
        scripts.run(name, "--folder", folder, *args)
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return found

    return run


def steps_of(folder: Path) -> list[int]:
    """Env steps at which there is something in TensorBoard's logs, file by file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = sorted(folder.iterdir())
    events = [Event.FromString(raw) for path in files for raw in RawEventFileLoader(str(path)).Load()]
    return [event.step for event in events if event.HasField("summary")]


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.mark.time_limit(600)  # a whole training
def test_connect_four_is_learned(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--batch", "2048", "--num-envs", "128", "--snapshot-every", "16384", "--evaluate-every", "32768")
    name, kept = "selfplay_connect_four", tmp_path / "kept"
    first = run(name, *short, "--steps", "8192", "--games", "20")
    assert first["env_steps"] == 8192
    before = arrays_of(kept / "learner.npz")
    with pytest.raises(SystemExit):  # it does not write over what there is
        run(name, *short, "--steps", "8192")
    assert "--resume goes on with it" in capsys.readouterr().err
    found = run(name, *short, "--steps", "28672", "--games", "60", "--resume")
    assert found["env_steps"] == 28672
    assert found["random"] > 0.6, "who knows nothing wins half of its games"
    assert steps_of(kept / "logs") == list(range(2048, 28673, 2048))
    after = arrays_of(kept / "learner.npz")
    assert after.keys() == before.keys()
    assert after["adam/0/step"] > before["adam/0/step"] > 0
    assert [step for step, _ in json.loads(str(after["progress"]))[1]] == [8192, 28672]
    assert (kept / "connect_four.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"against random: \d\d\.\d% \[", printed)
    # A person can play against what it has kept.
    policy = f"{scripts.EXAMPLES / name}.py:LEAGUE@{kept / 'pool'}/main_0"
    command = ["play", "connect_four", "--policy", policy, "--agent", "player_1", "--games", "1"]
    result = CliRunner().invoke(app, command, input="4\n" * 3 + "1\n2\n3\n5\n6\n7\n" * 6, prog_name="marlvec")
    assert result.exit_code == 0, result.output
    assert re.search(r"main_0 plays \d", result.stdout)
    assert re.search(r"games won \d, drawn \d, lost \d", result.stdout)


def test_kuhn_poker_is_learned(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyspiel", reason="OpenSpiel says how far from perfect it is")
    short = ("--batch", "2048", "--num-envs", "512", "--snapshots", "5", "--games", "10")
    first = run("selfplay_kuhn", *short, "--steps", "8192")
    assert first["env_steps"] == 8192
    found = run("selfplay_kuhn", *short, "--steps", "32768", "--resume")
    assert found["env_steps"] == 32768
    assert found["average"] < 0.25, "0.458 is who plays at random"
    steps = steps_of(tmp_path / "kept" / "logs")
    assert steps == list(range(2048, 32769, 2048))
    assert (tmp_path / "kept" / "kuhn.png").read_bytes().startswith(b"\x89PNG")
