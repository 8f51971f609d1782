"""How the scripts of this folder are started and judged by `time_to_train`.

`time_to_train` starts each script in a process of its own. After each update the script hands its actor's weights over
and waits; the parent plays the evaluation episodes and answers whether to stop. Evaluation is not in the script's time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def processor_seconds() -> float:
    """Return the processor time, in seconds, of this process and its descendants, those that have ended included."""
    ticks, todo = 0, [os.getpid()]
    while todo:
        process = Path(f"/proc/{todo.pop()}")
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            for thread in (process / "task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
        except OSError:  # ended meanwhile
            continue
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that were waited for
    return ticks / os.sysconf("SC_CLK_TCK")


class Exchange:
    """A script's side of the exchange: JSON lines on stdout and stdin, weights in a file.

    Attributes:
        seed: Seed of envs, weights and actions.
        variant: Which variant of the script to run, where there are several.
    """

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--variant", default="")
        parser.add_argument("--weights", type=Path, required=True)
        parser.add_argument("--began", type=float, required=True, help="time.monotonic() of the start")
        args = parser.parse_args()
        self.seed: int = args.seed
        self.variant: str = args.variant
        self._weights, self._began, self._paused = args.weights, args.began, np.zeros(2)
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no message

    def ready(self) -> None:
        """Report that imports are done, and envs and nets are made."""
        self._say(kind="ready", spent=self._spent())

    def stops(self, env_steps: int, parameters: Iterable[Any]) -> bool:
        """Return whether to stop, after so many env steps; ``parameters`` are the actor's, layer by layer."""
        spent = self._spent()
        np.savez(self._weights, *(parameter.detach().numpy() for parameter in parameters))
        self._say(kind="update", spent=spent, env_steps=env_steps)
        stop = bool(json.loads(sys.stdin.readline()))
        self._paused += np.subtract(self._spent(), spent)
        return stop

    def _spent(self) -> list[float]:
        """Seconds on the clock and of processor time since the start, without pauses."""
        return list(np.array([time.monotonic() - self._began, processor_seconds()]) - self._paused)

    def _say(self, **message: Any) -> None:
        print(json.dumps(message), file=self._answers, flush=True)
