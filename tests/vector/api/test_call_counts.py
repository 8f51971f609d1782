"""How many of marlvec's own functions run for one call, and in how many files: a count, not a clock.

A step that is not checked, two envs; comprehensions are not counted, nor are other threads and processes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import VectorEnv
from marlvec.making import make

HERE = Path(marlvec.__file__).resolve().parent
FOLDERS = (f"{HERE}{os.sep}", f"{(HERE / 'connectors').resolve()}{os.sep}")
# Called once for each time that the kernel hands something over, so as often as the workers' timing has it.
BY_TIMING = {"WorkerPool.wait", "AdaptivePoller.wait", "Channel.take", "Channel._more"}


def calls_by_file(call: Callable[[], Any]) -> Counter[str]:
    """Calls of functions, by file."""
    files: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_qualname not in BY_TIMING:
            file = os.path.realpath(code.co_filename)
            if file.startswith(FOLDERS):
                files[file] += 1

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests have left behind is not to be closed in here
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return files


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Calls of functions, and how many files they are in."""
    files = calls_by_file(call)
    return files.total(), len(files)


def warm(envs: VectorEnv) -> Any:
    envs.reset(seed=0)
    actions = np.ones((2, 3), np.int64)
    for _ in range(20):  # the first ones are checked, and the 32nd again
        envs.step(actions)
    return actions


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("backend", "calls", "files"), [("sync", 36, 10), ("async", 34, 8)])
def test_step(backend: str, calls: int, files: int) -> None:
    options = {"num_workers": 2} if backend == "async" else {}
    with make("simple_spread", num_envs=2, backend=backend, **options) as envs:
        actions = warm(envs)
        made = count(lambda: envs.step(actions))
    assert made[0] <= calls
    assert made[1] <= files


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize(("backend", "calls", "files"), [("sync", 260, 35), ("async", 270, 36)])
def test_make(backend: str, calls: int, files: int) -> None:
    options = {"num_workers": 2} if backend == "async" else {}

    def build() -> VectorEnv:
        return make("simple_spread", num_envs=2, backend=backend, **options)

    build().close()  # what is imported and remembered once is not counted
    held: list[VectorEnv] = []
    made = count(lambda: held.append(build()))
    held[0].close()
    assert made[0] <= calls
    assert made[1] <= files
