"""The scripts of self-play train, short of what they do as they stand: what they learn, and that they go on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from marlvec.cli import app
from tests.examples import scripts

pytest.importorskip("torch")
pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")
pytest.importorskip("numba", reason="compiled envs, or it would take minutes")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run an example that keeps what it found; how far it came."""

    def run(name: str, *args: str) -> dict[str, Any]:
        folder = tmp_path / "kept"
        scripts.run(name, "--checkpoint", folder, "--track", *args)
        found: dict[str, Any] = scripts.checkpoint(folder)["progress"]
        return found

    return run


def steps_of(folder: Path) -> list[int]:
    """Env steps at which there is something in TensorBoard's logs, file by file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = sorted(folder.iterdir())
    events = [Event.FromString(raw) for path in files for raw in RawEventFileLoader(str(path)).Load()]
    return [event.step for event in events if event.HasField("summary")]


@pytest.mark.slow("trains")
@pytest.mark.time_limit(600)  # a whole training
def test_connect_four_is_learned(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--num-envs", "128", "--snapshot-every", "16384")
    name, kept = "selfplay_connect_four", tmp_path / "kept"
    first = run(name, *short, "--total-timesteps", "8192", "--games", "20")
    assert first["done"] == 8192
    before = scripts.checkpoint(kept)
    with pytest.raises(SystemExit):  # it does not write over what there is
        run(name, *short, "--total-timesteps", "8192")
    assert "--resume goes on with the run in" in capsys.readouterr().err
    found = run(name, *short, "--total-timesteps", "28672", "--games", "60", "--resume")
    assert found["done"] == 28672
    assert [step for step, _ in found["curve"]] == [8192, 16384, 28672], "where it became an opponent, and in the end"
    assert steps_of(kept / "logs") == list(range(4096, 28673, 4096))
    after = scripts.checkpoint(kept)
    assert after["learner"].keys() == before["learner"].keys() == {"optimizer"}
    others = [who for who, _ in after["collector"]["whole"]["others"]]
    assert any("RatingTracker" in who for who in others), "ratings go on with the collector"
    assert after["collector"] != before["collector"]
    assert (kept / "best.npz").exists()
    assert (kept / "connect_four.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    (*_, rate) = re.findall(r"against random: (\d\d\.\d)% \[", printed)
    assert float(rate) > 60, "who knows nothing wins half of its games"
    # A person can play against what it has kept.
    policy = f"{scripts.EXAMPLES / name}.py:LEAGUE@{kept / 'pool'}/main_0"
    command = ["play", "connect_four", "--policy", policy, "--agent", "player_1", "--games", "1"]
    result = CliRunner().invoke(app, command, input="4\n" * 3 + "1\n2\n3\n5\n6\n7\n" * 6, prog_name="marlvec")
    assert result.exit_code == 0, result.output
    assert re.search(r"main_0 plays \d", result.stdout)
    assert re.search(r"games won \d, drawn \d, lost \d", result.stdout)


@pytest.mark.slow("trains")
@pytest.mark.parametrize("name", ["selfplay_connect_four", "selfplay_kuhn"])
def test_a_batch_of_one_step_has_no_decision_of_the_learner_and_ends_well(name: str, run: Run) -> None:
    assert run(name, "--num-envs", "64", "--total-timesteps", "1", "--games", "2")["done"] == 1


@pytest.mark.slow("trains")
def test_kuhn_poker_runs_to_its_end_without_openspiel(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    found = run("selfplay_kuhn", "--num-envs", "64", "--snapshots", "2", "--games", "2", "--total-timesteps", "8192")
    assert found["done"] == 8192
    *_, advice, last = capsys.readouterr().out.splitlines()
    assert "pip install 'marlvec[openspiel]'" in advice
    assert last == f"wrote last.npz, pool, kuhn.png, logs into {tmp_path / 'kept'}"


@pytest.mark.slow("trains")
def test_kuhn_poker_is_learned(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyspiel", reason="OpenSpiel says how far from perfect it is")
    short = ("--batch", "2048", "--num-envs", "512", "--snapshots", "5", "--games", "10")
    first = run("selfplay_kuhn", *short, "--total-timesteps", "8192")
    assert first["done"] == 8192
    found = run("selfplay_kuhn", *short, "--total-timesteps", "32768", "--resume")
    assert found["done"] == 32768
    *_, average = found["curve"][-1]
    assert average < 0.25, "0.458 is who plays at random"
    steps = steps_of(tmp_path / "kept" / "logs")
    assert steps == list(range(2048, 32769, 2048))
    assert (tmp_path / "kept" / "kuhn.png").read_bytes().startswith(b"\x89PNG")
