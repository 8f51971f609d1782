"""`import marlvec` is light: nothing heavy, nothing optional, nothing printed, nothing started."""

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
import {module}
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
print(json.dumps({{
    "tried": tried,
    "threads": [thread.name for thread in threading.enumerate()],
    "children": children,
    "fds": sorted(set(os.listdir("/proc/self/fd")) - fds),
}}))
"""


@pytest.mark.parametrize("module", ["marlvec", "marlvec.connectors", "marlvec.testing", "marlvec.cli"])
def test_an_import_brings_and_starts_nothing_it_need_not(module: str, tmp_path: Path) -> None:
    probe = PROBE.format(module=module, never=NEVER)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{probe}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.returncode == 0
    assert json.loads(result.stdout) == {"tried": [], "threads": ["MainThread"], "children": [], "fds": []}
