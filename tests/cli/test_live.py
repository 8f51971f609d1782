"""``marlvec rollout --live``: how it goes while it goes, on a terminal and in a log."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marlvec.cli import app
from tests.programs import at_a_terminal

LIVE = ("rollout", "simple_spread", "--num-envs", "4", "--env-steps", "400", "--backend", "sync", "--live")


def test_in_a_log_lines_go_to_stderr_and_the_last_has_it_all() -> None:
    result = CliRunner().invoke(app, LIVE, prog_name="marlvec")
    assert result.exit_code == 0
    assert "\x1b" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.match(
        r"simple_spread_v3: 400 of 400 env steps · [\d,]+/s · 16 episodes · random: return per agent -\d+(\.\d+)? \(-",
        last,
    )
    assert re.search(r"^400 env steps, 1,200 agent steps, 16 episodes in ", result.stdout, re.M)
    assert re.search(r"^time went to: envs .*callbacks \d+%$", result.stdout, re.M)


def test_without_live_no_callback_is_called() -> None:
    result = CliRunner().invoke(app, LIVE[:-1], prog_name="marlvec")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "callbacks" not in result.stdout


def test_error_is_printed_after_the_table() -> None:
    command = ("rollout", "marlvec.testing:RaisingEnv", "--set", "at=20", "--backend", "sync", "--live")
    result = CliRunner().invoke(app, command, prog_name="marlvec")
    assert result.exit_code == 1
    *_, line, error = result.stderr.splitlines()  # one line every ten seconds, and the last
    assert " of 20,000 env steps · " in line
    assert error.startswith("error: env 0 raised in step(): ValueError")


@pytest.mark.slow("runs commands as programs")
@pytest.mark.parametrize("stop", [False, True])
def test_on_a_terminal_the_table_takes_the_place_of_the_bar(stop: bool, tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text(
        "import numpy as np\ncalls = 0\n\n\ndef left(rows):\n    global calls\n    calls += 1\n"
        f"    if calls == 60 and {stop}:\n        raise KeyboardInterrupt\n    return np.ones(len(rows), int)\n"
    )
    command = [sys.executable, "-m", "marlvec.cli", *LIVE, "--policy", "players.py:left"]
    code, printed, seen = at_a_terminal(command, tmp_path)
    assert code == (130 if stop else 0)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)
    steps = "236" if stop else "400"
    assert f"{steps} of 400 env steps" in shown
    assert not re.search(r"\d+/400", shown), "no other bar"
    assert re.search(r"━+.* 100%, 0:00:00 left" if not stop else r"━+.* 59%, \d:\d\d:\d\d left", shown)
    assert re.search(r"left +-\d", shown)
    assert "time: " in shown
    assert seen.rstrip().endswith("\x1b[?25h"), "the cursor is back"
    assert "\x1b" not in printed
    assert f"{steps} env steps, " in printed or stop
