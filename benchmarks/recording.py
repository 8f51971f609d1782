"""What recording costs: `collect()` with a recorder against without, minibatches from many rows, and memory.

Run ``python benchmarks/recording.py``; ``--rows 10_000_000`` for the size in the docs. Contestants take turns in short
rounds, ratios are taken inside a round, and medians are quoted with their quartiles.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch

_BATCHES = 12  # a round


def collecting(title: str, num_envs: int, env_steps: int, rounds: int, **options: Any) -> None:
    """Rates of collecting, without a recorder and with one of each format."""
    with tempfile.TemporaryDirectory() as folder:
        made, envs_of, recorders = {}, [], []
        for name in ("none", "arrow", "parquet"):
            envs = marlvec.make("simple_spread", num_envs, **options)
            envs_of.append(envs)
            recorder = None if name == "none" else marlvec.Recorder(Path(folder, name), name)  # type: ignore[arg-type]  # a format's name
            recorders += [recorder] if recorder else []
            callbacks = [recorder] if recorder else []
            made[name] = marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=callbacks, seed=0)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        cpu: dict[str, list[float]] = {name: [] for name in made}
        for k in range(rounds + 1):
            for name, collector in made.items():
                start, began = time.perf_counter(), time.process_time()
                for _ in range(_BATCHES if k else 4):  # the first round warms up
                    collector.collect(env_steps=env_steps)
                seconds[name].append(time.perf_counter() - start)
                for recorder in recorders:
                    if recorder.folder.name == name:
                        recorder.flush()  # so that it does not write while others are measured
                cpu[name].append(time.process_time() - began)
        for recorder in recorders:
            recorder.close()
        for envs in envs_of:
            envs.close()
        rows = _BATCHES * env_steps * 3
        print(f"{title}, batches of {env_steps} env steps")
        base, alone = np.array(seconds["none"][1:]), np.median(cpu["none"][1:]) / rows * 1e6
        for name, times in seconds.items():
            ratio = np.quantile(base / np.array(times[1:]), [0.25, 0.5, 0.75])
            used = np.median(cpu[name][1:]) / rows * 1e6
            print(
                f"  {name:<8} {np.min(times[1:]) / rows * 1e6:6.3f} µs a row, {used:6.3f} µs of processor time "
                f"({alone / used:.2f} of without); rate {ratio[1]:.2f} of without ({ratio[0]:.2f} to {ratio[2]:.2f})"
            )


def batch_of(rng: np.random.Generator, start: int, n: int) -> MultiAgentBatch:
    """Rows as simple_spread's, 16 columns."""
    obs = rng.standard_normal((n, 18)).astype(np.float32)
    ids = np.arange(start, start + n)
    numbers = {f"id_{k}": ids for k in range(8)}
    flags = {f"flag_{k}": ids % 25 == 0 for k in range(3)}
    columns = {"obs": obs, "next_obs": obs, "actions": ids % 5, "rewards": rng.standard_normal(n), **numbers, **flags}
    return MultiAgentBatch({"main": SampleBatch(columns)}, env_steps=n)


def reading(format: Any, rows: int, size: int) -> None:
    """Time of a minibatch, all columns and three of them, and how much memory that takes."""
    folder = Path(tempfile.mkdtemp())
    try:
        rng = np.random.default_rng(0)
        batch = batch_of(rng, 0, 50_000)
        before = memory()
        start = time.perf_counter()
        with marlvec.Recorder(folder / "run", format) as recorder:
            written = 0.0
            for at in range(0, rows, len(batch["main"])):
                recorder.write(batch)
                written = max(written, memory()) if at % 500_000 == 0 else written
        wrote = time.perf_counter() - start
        with marlvec.load_dataset(folder / "run") as data:
            print(f"{format}, {rows:,} rows, {data.size_bytes / rows:.0f} bytes a row on disk")
            print(
                f"  written in {wrote / rows * 1e6:.2f} µs a row; memory {before:.0f} MB before, {written:.0f} at most"
            )
            few = ["obs", "actions", "rewards"]
            for what, columns in (("all columns, checksums compared", None), ("all columns", None), (str(few), few)):
                start, began, count, most = time.perf_counter(), time.process_time(), 0, 0.0
                for minibatch in data["main"].minibatches(size, seed=0, columns=columns):
                    count += len(minibatch) > 0
                    most = max(most, memory()) if count % 16 == 1 else most
                took = (time.perf_counter() - start) / count * 1e3
                used = (time.process_time() - began) / count * 1e3
                print(
                    f"  a minibatch of {size}, {what}: {took:.2f} ms, {used:.2f} ms of processor time; memory at most "
                    f"{most:.0f} MB"
                )
    finally:
        shutil.rmtree(folder)


def memory() -> float:
    """Memory of this process in MB, without pages of mapped files, which the system takes back as it likes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("no RssAnon in /proc/self/status")


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=4096)
    options = parser.parse_args()
    for format in ("arrow", "parquet"):
        reading(format, options.rows, options.size)
    collecting("simple_spread × 16, async", 16, 1024, options.rounds, backend="async", num_workers=2)
    collecting("simple_spread × 1,024, native", 1024, 25_600, options.rounds, backend="native")


if __name__ == "__main__":
    main()
