"""Examples that learn from recordings, as short as they learn something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import run

pytest.importorskip("pyarrow")


@pytest.mark.slow("trains")
def test_a_net_learns_what_a_recorded_policy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "numba"):
        pytest.importorskip(library, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    run("bc_simple_spread", "--seed", 1, "--total-timesteps", 20_000, "--epochs", 8, "--games", 200)
    said = capsys.readouterr().out
    assert "main: 60,000 rows" in said
    random, recorded, cloned = map(float, re.findall(r"(?:random|recorded|cloned) (-[\d.]+)", said))
    assert random < recorded
    assert recorded / cloned >= 0.9  # both are below 0
    assert (cloned - random) / (recorded - random) >= 0.9
    run("bc_simple_spread", "--seed", 1, "--epochs", 1, "--games", 8)  # with the recording that is there
    assert "main: 60,000 rows" in capsys.readouterr().out


@pytest.mark.slow("trains")
def test_what_is_learned_offline_is_better_than_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "numba"):
        pytest.importorskip(library, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    run("iql_simple_spread", "--seed", 1, "--total-timesteps", 40_000, "--games", 200)
    random, recorded, learned = map(
        float, re.findall(r"(?:random|recorded|learned) (-[\d.]+)", capsys.readouterr().out)
    )
    assert random < recorded < learned
    assert learned - recorded > 0.4 * (recorded - random)
