"""``marlvec check``: what is wrong with an env as a table, as JSON, and in the exit code."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from marlvec.cli import app
from tests.terminal import at_a_terminal

BROKEN = "tests.testing.test_findings:ManyFaults"
GOOD = "tests.testing.test_check_env:Good"


def check(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check", *arguments])


def test_an_env_that_is_fine() -> None:
    result = check(GOOD, "--episodes", "2")
    assert (result.exit_code, result.stdout) == (0, f"{GOOD}: nothing found\n"), result.output


@pytest.mark.slow("runs commands as programs")
def test_at_a_terminal_a_bar_says_how_far_it_is() -> None:
    """The episodes are played four times over; the bar is on stderr, and the findings are on stdout."""
    code, printed, seen = at_a_terminal([sys.executable, "-m", "marlvec.cli", "check", GOOD, "--episodes", "2"])
    assert (code, printed) == (0, f"{GOOD}: nothing found\n")
    bar = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)
    assert re.search(r"8/8 episodes  [\d,]+ calls/s", bar)


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize("width", [60, 80, 400])
def test_the_table_is_never_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from marlvec.testing import check_env
    from tests.testing.test_findings import ManyFaults

    monkeypatch.setattr("marlvec.cli.console._WIDTH_IN_A_PIPE", width)
    result = check(BROKEN)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    shown = "".join(result.stdout.split())
    assert shown.startswith(f"{BROKEN}:6findings,5serious")
    own = 0  # of the findings, as in "reset(seed=…)"
    for one in check_env(ManyFaults, raise_first=False):
        for part in (f"{one.check}: {one.severity}", one.where, one.subject, one.expected, one.got, one.change):
            assert "".join(part.split()) in shown
            own += part.count("…")
    assert shown.count("…") == own


def test_json_has_every_finding() -> None:
    result = check(BROKEN, "--json", "--skip", "observations", "--skip", "flags")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["env"], said["serious"]) == (BROKEN, 2)
    assert [one["check"] for one in said["findings"]] == ["rewards", "infos"]
    assert set(said["findings"][0]) == {
        "check",
        "severity",
        "where",
        "subject",
        "expected",
        "got",
        "change",
        "times",
    }
    result = check(GOOD, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"env": GOOD, "serious": 0, "findings": []})


def test_arguments_reach_the_env_and_the_check() -> None:
    assert check("simple_spread", "--set", "max_cycles=5", "--max-steps", "5", "--episodes", "1").exit_code == 0
    result = check("simple_spread", "--set", "max_cycles=6", "--max-steps", "5", "--episodes", "1", "--json")
    assert [one["check"] for one in json.loads(result.stdout)["findings"]] == ["ends"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simple_sprad"], "simple_spread"),
        (["simple_spread", "--skip", "flag"], "did you mean 'flags'?"),
        (["simple_spread", "--set", "colour=red"], "--set colour: simple_spread does not accept it"),
        (["simple_spread", "--episodes", "0"], "episodes"),
    ],
)
def test_usage_errors_exit_with_code_2(arguments: list[str], message: str) -> None:
    result = check(*arguments)
    assert result.exit_code == 2
    assert message in result.output
