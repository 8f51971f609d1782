"""A program that records until it is killed: ``python -m tests.recording.killed FOLDER FORMAT KILLS SEED``.

It forks ``KILLS`` children, one after another, so that imports are paid once. Child k records into ``FOLDER/k`` and is
killed after a random while (SEED), every other one once it has rows on disk; with a negative SEED, at its
(1 - k * SEED)-th write, sync or rename of a file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import marlvec
from tests.recording.runs import collector

ENV_STEPS, BATCHES = 7, 250


def record(folder: Path, format: Any) -> None:
    """Record the run whose beginnings are expected on disk."""
    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(folder, format, part_bytes=4000) as recorder,
    ):
        collects = collector(envs, [recorder])
        for _ in range(BATCHES):
            collects.collect(env_steps=ENV_STEPS)


def has_part(folder: Path) -> bool:
    """Whether a recording lists rows."""
    path = folder / "manifest.jsonl"
    return path.exists() and b'"part"' in path.read_bytes()


def die_at(number: int) -> None:
    """Have the process killed at its n-th act on files that a recording consists of."""
    acts = 0

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal acts
            acts += 1
            if acts == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("write", "fsync", "ftruncate"):
        setattr(os, name, deadly(getattr(os, name)))
    Path.replace = deadly(Path.replace)  # type: ignore[method-assign]


def main() -> None:
    """Run as the command says."""
    folder, format, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs:
        collector(envs).collect(env_steps=ENV_STEPS)  # compiles
    rng = np.random.default_rng(abs(seed))
    for k in range(kills):
        if (child := os.fork()) == 0:
            try:
                if seed < 0:
                    die_at(1 - k * seed)
                record(folder / str(k), format)
            finally:
                os._exit(0)
        if seed >= 0:
            while k % 2 == 0 and not has_part(folder / str(k)):
                time.sleep(0.002)
            time.sleep(float(rng.uniform(0.0, 0.3)))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
