"""``marlvec bench``: every backend that runs the env, in turns, and a piece of advice."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from marlvec.cli import app
from marlvec.cli.running import Figures, recommended

QUICK = ("--num-envs", "2", "--seconds", "0.01")


@pytest.mark.slow("runs commands as programs")
def test_it_says_what_each_backend_does_and_which_to_take() -> None:
    result = CliRunner().invoke(app, ["bench", "simple_spread", *QUICK, "--set", "max_cycles=5"])
    assert result.exit_code == 0, result.output
    for backend in ("sync", "thread", "async", "native"):
        assert f" {backend}" in result.output
    assert "without pool: " in result.output
    assert "which is a single env" in " ".join(result.output.split())
    assert "Take " in result.output


def test_json_has_the_figures() -> None:
    result = CliRunner().invoke(app, ["bench", "CartPole-v1", *QUICK, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    rows = {row["backend"]: row for row in said["backends"]}
    assert set(rows) == {"sync", "thread", "async", "pool"} - set(said["refused"])
    assert said["recommended"] in rows
    for row in rows.values():
        assert 0 < row["slowest"] <= row["env_steps_per_second"] <= row["fastest"]
        assert row["agent_steps_per_second"] == row["env_steps_per_second"]
    assert "native" in said["refused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simple_sprad"], "simple_spread"),
        (["simple_spread", "--num-envs", "0"], "num-envs"),
        (["simple_spread", "--set", "colour=red"], "colour"),
    ],
)
def test_usage_errors_exit_with_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_simplest_of_equally_fast_backends_is_recommended() -> None:
    def figures(**rates: float) -> list[Figures]:
        rows = [Figures(name, rate, rate, rate, rate, 0) for name, rate in rates.items()]
        return sorted(rows, key=lambda row: -row.env_steps_per_second)

    assert recommended(figures(sync=100, thread=105, **{"async": 108})).backend == "sync"
    assert recommended(figures(sync=100, **{"async": 150})).backend == "async"
    assert recommended(figures(sync=100, native=1000, **{"async": 150})).backend == "native"
