"""`NormalizeObs` beside Gymnasium's vectorized `NormalizeObservation`: 64 rows of 4 numbers, processor time of a call.

    python benchmarks/normalize_obs.py [--rows 64] [--size 4] [--rounds 40]

Both learn and normalise the same observations, in turns within one run. The ratio is Gymnasium's time over ours, so
that 1 is as quick and more is quicker. Through the pipeline is what a collector pays; the piece alone is what the
wrapper's arithmetic is beside.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from connector_peers import PEERS
from gymnasium.spaces import Box

from marlvec.connectors import AgentPipeline, NormalizeObs, Rows

__all__ = ["main"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 64), ("size", 4), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    obs = np.random.default_rng(0).normal(3, 2, (args.rows, args.size)).astype(np.float32)
    contests = PEERS["gymnasium"](obs[:, None], obs[:, None])
    theirs = next(tick for question, _, tick in contests if question.startswith("running mean"))
    rows = Rows(env_id=np.arange(args.rows), agent_index=np.zeros(args.rows, np.int64), obs=obs)
    space = Box(-np.inf, np.inf, obs.shape[1:], np.float32)
    alone, pipeline = NormalizeObs(), AgentPipeline([NormalizeObs()])
    alone.setup(space)
    pipeline.bind(space)
    ticks: dict[str, Callable[[], Any]] = {
        "Gymnasium's NormalizeObservation": theirs,
        "NormalizeObs, the piece alone": lambda: alone(rows),
        "NormalizeObs, in a pipeline": lambda: pipeline(rows),
    }
    times: dict[str, list[float]] = {name: [] for name in ticks}
    for _ in range(args.rounds):
        for name, tick in ticks.items():
            times[name].append(_processor_us(tick))
    gymnasium = np.array(times["Gymnasium's NormalizeObservation"])
    for name, took in times.items():
        low, middle, high = np.percentile(gymnasium / np.array(took), [25, 50, 75])
        print(f"{name:<34} {np.median(took):6.1f} µs   ratio {middle:.2f} [{low:.2f}, {high:.2f}]")


def _processor_us(tick: Callable[[], Any], calls: int = 500) -> float:
    for _ in range(20):
        tick()
    start = time.process_time_ns()
    for _ in range(calls):
        tick()
    return (time.process_time_ns() - start) / calls / 1000


if __name__ == "__main__":
    main()
