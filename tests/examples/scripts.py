"""Training scripts of examples/, run as their users run them, but in this process: torch and numba are loaded once."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from marlvec.serialization.archive import read_archive
from marlvec.serialization.values import decode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: object) -> None:
    """Run ``python examples/NAME.py ARGUMENTS``; what it prints is the test's own output."""
    with _command_line(str(EXAMPLES / f"{name}.py"), *map(str, arguments)):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


CLOCKS = {"timers", "duration", "seconds"}
"""What a collector's state has of the time that things took."""


def checkpoint(folder: Path) -> dict[str, Any]:
    """All that a script wrote down for --resume, arrays as their bytes, so that two can be compared; but no clocks."""
    found: dict[str, Any] = _comparable(decode(read_archive(folder / "last.npz")["parts"]))
    for runner in found.get("collector", {}).get("whole", {}).get("policies", {}).get("runners", {}).values():
        if runner["bound"] < 0:  # has not played, and gets its random stream when it does
            del runner["policy"]
    return found


def learned(folder: Path) -> dict[str, Any]:
    """What of it belongs to no env: policies, connectors, what else learns, the curve."""
    found = checkpoint(folder)
    runners = found.pop("collector")["whole"]["policies"]["runners"]
    return {**found, "policies": {name: (one.get("policy"), one["connectors"]) for name, one in runners.items()}}


def _comparable(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return data.dtype.str, data.shape, data.tobytes()
    if isinstance(data, dict):
        # The file of a random opponent has a stream that nothing has seeded yet: a collector does, where it plays.
        left_out = CLOCKS | {"files"} if data.get("random") is True else CLOCKS
        return {key: _comparable(value) for key, value in data.items() if key not in left_out}
    if isinstance(data, (list, tuple)):
        return [_comparable(value) for value in data]
    return data


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    """Scripts set torch's number of threads and seed for their whole process; other tests get theirs back."""
    import torch

    before, threads = sys.argv, torch.get_num_threads()
    sys.argv = list(words)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        sys.argv = before
        torch.set_num_threads(threads)
