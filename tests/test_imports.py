"""`import marlvec`, and all that it names, is light: nothing heavy or optional, nothing printed, nothing started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Optional libraries, and the families of envs, which are imported when one of theirs is made.
NEVER = ("torch", "ray", "matplotlib", "pandas", "tensorflow", "jax", "mpe2", "pygame", "pytest", "hypothesis")

PROBE = """
import json, os, sys, threading

tried = []

class Watch:
    # First in line: also an import that a `try` would swallow is seen, whether the library is installed or not.
    def find_spec(self, name, path=None, target=None):
        if name in {never!r}:
            tried.append(name)

sys.meta_path.insert(0, Watch())
fds = set(os.listdir("/proc/self/fd"))
{statement}
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
print(json.dumps({{
    "tried": tried,
    "threads": [thread.name for thread in threading.enumerate()],
    "children": children,
    "fds": sorted(set(os.listdir("/proc/self/fd")) - fds),
}}))
"""


@pytest.mark.mostly_slow("starts programs of its own", quick=8)
@pytest.mark.parametrize(
    "statement",
    [
        "import marlvec",
        "from marlvec import *",
        "import marlvec.connectors",
        "import marlvec.testing",
        "import marlvec.cli",
        "import marlvec.distributed",
    ],
)
def test_an_import_brings_and_starts_nothing_it_need_not(statement: str, tmp_path: Path) -> None:
    probe = PROBE.format(statement=statement, never=NEVER)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{probe}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.returncode == 0
    assert json.loads(result.stdout) == {"tried": [], "threads": ["MainThread"], "children": [], "fds": []}


# Imported before a command is known, or while `--help` is answered: they would be most of the time that it takes.
HELP = """
import json, sys
from typer.testing import CliRunner
import marlvec
from marlvec.cli import app
commands = ["rollout", "record", "play", "arena", "serve", "bench", "envs", "connectors"]
codes = [CliRunner().invoke(app, [*command, "-h"]).exit_code for command in [[], *([name] for name in commands)]]
print(json.dumps([codes, [name for name in {heavy!r} if name in sys.modules]]))
"""


@pytest.mark.slow("starts programs of its own")
def test_help_is_answered_without_the_library() -> None:
    heavy = ("numpy", "gymnasium", "pettingzoo", "tree", "marlvec.vector", "marlvec.collect", "marlvec.connectors")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{HELP.format(heavy=heavy)}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [[0] * 9, []]
