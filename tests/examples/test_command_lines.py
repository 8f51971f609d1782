"""The command lines of examples/: the same flags, help at once, and what is missing in a line."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.examples.scripts import EXAMPLES

SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if "argparse" in path.read_text(encoding="utf-8")]
LARGE = ("torch", "numpy", "marlvec", "gymnasium", "matplotlib", "ray", "stable_baselines3", "tianshou", "torchrl")

HELP = """
import contextlib, io, json, runpy, sys
found = {}
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    found[path] = said.getvalue()
print(json.dumps([found, sorted(sys.modules)]))
"""


# Longer than a script should be: two teams, and opponents with ratings and a league.
LONG = {"mappo_simple_tag": 205, "selfplay_connect_four": 205, "selfplay_kuhn": 170}


def test_a_script_can_be_read_at_one_go() -> None:
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {name: n for name, n in lines.items() if n > LONG.get(name, 150)} == {}


def test_help_is_shown_before_anything_large_is_imported() -> None:
    command = [sys.executable, "-c", HELP, *map(str, SCRIPTS)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found, modules = json.loads(result.stdout)
    assert not set(LARGE) & set(modules)
    assert len(found) == len(SCRIPTS) >= 12
    for path, said in found.items():
        for flag in ("--seed", "--total-timesteps", "--num-envs", "--checkpoint"):
            assert flag in said or (flag, "pettingzoo" in path) == ("--num-envs", True), f"{path} has no {flag}"
        assert "(default: " in said


def test_what_is_missing_is_named_in_a_line() -> None:
    path = str(EXAMPLES / "gymnasium_wrappers.py")
    hide = f"import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = [{path!r}, '--checkpoint', 'nowhere']"
    code = f"{hide}; runpy.run_path({path!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.endswith("; this script needs: pip install 'marlvec[plot]'")
    for other in SCRIPTS:
        assert "; this script needs: pip install " in other.read_text(encoding="utf-8"), other
