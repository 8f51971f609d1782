"""`WarmInterpreter`: runs scripts, each in a process of its own, without importing marlvec for each of them again.

A clean interpreter imports what scripts of the docs import, and forks for each script. There the script is the main
program, with its own folder, output and process group; no script sees what another one did.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.programs import LineServer

__all__ = ["Ran", "WarmInterpreter", "environ_of_scripts"]

ROOT = Path(__file__).resolve().parents[2]


class Ran(NamedTuple):
    """How a script ended, and what it wrote."""

    code: int
    output: str
    errors: str


def environ_of_scripts() -> dict[str, str]:
    """The environment of a script that a reader starts: marlvec can be imported, and pygame greets."""
    environ = {key: value for key, value in os.environ.items() if key != "PYGAME_HIDE_SUPPORT_PROMPT"}
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


class WarmInterpreter(LineServer):
    """Runs scripts; a context manager."""

    def __init__(self) -> None:
        environ = environ_of_scripts() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__([str(Path(__file__))], env=environ)

    def run(self, script: Path) -> Ran:
        """Run a script in its own folder, as ``python script.py`` does there."""
        return Ran(*self.ask(str(script)))


def main() -> None:
    """Serve scripts: one path a line comes in, one result a line goes out."""
    del sys.path[0]  # the folder of this file
    import marlvec

    for name in marlvec.__all__:
        getattr(marlvec, name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"  # noqa: PTH208
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(script: str) -> tuple[int, str, str]:
    folder = Path(tempfile.mkdtemp())  # no TemporaryDirectory: the script, too, would remove it when it ends
    output, errors = folder / "output", folder / "errors"
    if not (pid := os.fork()):
        code = 70
        try:
            os.setsid()
            os.chdir(Path(script).parent)
            for number, path in enumerate((Path(os.devnull), output, errors)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
            code = _be(script)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    written = output.read_text(), errors.read_text()
    shutil.rmtree(folder)
    return os.waitstatus_to_exitcode(status), *written


def _be(script: str) -> int:
    """Run a script in this process to its very end, as the interpreter does it; returns its exit code."""
    import atexit
    import runpy
    import threading
    import traceback

    import numpy as np

    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv, code = [script], 0
    sys.path.insert(0, str(Path(script).parent))
    np.random.seed()  # noqa: NPY002  (else all scripts would draw the same numbers from numpy's global stream)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and so does the interpreter
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
