"""What Ray costs: two collectors as actors beside the same two as independent processes, in processor time.

    python benchmarks/distributed.py                       # all sizes; some minutes
    python benchmarks/distributed.py --size python --turns 3 --steps 128

In turns in one run, medians. *share* is the processor time of an env step in independent processes over that with Ray,
where actors, head, raylet and the store all count; it holds under others' load. *efficiency* is the ratio of env steps
a second, and wants a machine that is idle. Needs marlvec[distributed,native].
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import marlvec
from marlvec.distributed import Collectors, Place

SIZES = {  # backend of the envs, envs of a collector, env steps of a request, requests of a turn
    "python": ("sync", 16, 512, 12),
    "native small": ("native", 64, 4_096, 40),
    "native": ("native", 1_024, 16_384, 40),
    "native large": ("native", 1_024, 65_536, 12),
}


def build(place: Place, size: str) -> marlvec.Collector:
    """One collector, whose policy is as cheap as can be: nothing else would show what carrying costs."""
    backend, num_envs, *_ = SIZES[size]
    envs = marlvec.make("simple_spread", num_envs=num_envs, backend=backend)
    return marlvec.Collector(envs, marlvec.RandomPolicy(), seed=place.seed, agent_connectors=[])


def alone(size: str) -> None:
    """One of the independent processes: says its seconds of processor time, and of the clock."""
    collector, (_, _, steps, requests) = build(Place(0, 0, 0, 0, 1), size), SIZES[size]
    for _ in range(2):
        collector.collect(env_steps=steps)
    began, clock = time.process_time(), time.perf_counter()
    for _ in range(requests):
        collector.collect(env_steps=steps)
    print(json.dumps([time.process_time() - began, time.perf_counter() - clock]))
    collector.envs.close()


def independent(size: str) -> tuple[float, float]:
    """Processor seconds an env step, and env steps a second."""
    command = [sys.executable, __file__, "--alone", size, "--steps", str(SIZES[size][2])]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in pair]
    steps = SIZES[size][2] * SIZES[size][3]
    return sum(cpu for cpu, _ in found) / (2 * steps), sum(steps / wall for _, wall in found)


def with_ray(collectors: Collectors, size: str) -> tuple[float, float]:
    """Likewise."""
    _, _, steps, requests = SIZES[size]
    before, clock = processor_seconds(), time.perf_counter()
    for _ in range(requests):
        collectors.collect(env_steps=2 * steps)
        collectors.set_weights({})
    wall = time.perf_counter() - clock
    return (processor_seconds() - before) / (2 * steps * requests), 2 * steps * requests / wall


def processor_seconds() -> float:
    """Of this process and all that it has started, and they."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all", help="which")
    parser.add_argument("--turns", type=int, default=9, help="how often each is measured")
    parser.add_argument("--steps", type=int, help="env steps of a request, instead")
    parser.add_argument("--alone", choices=list(SIZES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for size, (backend, num_envs, steps, requests) in list(SIZES.items()) if args.steps else ():
        SIZES[size] = backend, num_envs, args.steps, min(40, max(6, requests * steps // args.steps))
    if args.alone:
        alone(args.alone)
        return
    import ray

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=1_000_000_000, log_to_driver=False
    )
    print(f"{'size':<14}{'steps':>9}{'ms a request':>14}{'share':>8}{'efficiency':>12}{'env steps/s':>14}")
    for size in SIZES if args.size == "all" else [args.size]:
        options = {"sync": False, "fragment": SIZES[size][2], "sync_states": None}
        with Collectors(partial(build, size=size), 2, **options) as collectors:
            for _ in range(SIZES[size][3]):  # each actor has touched most of the store's memory, kernels are compiled
                collectors.collect(env_steps=2 * SIZES[size][2])
            turns = [(independent(size), with_ray(collectors, size)) for _ in range(args.turns)]
        share = statistics.median(one[0] / two[0] for one, two in turns)
        efficiency = statistics.median(two[1] / one[1] for one, two in turns)
        milliseconds = statistics.median(one[0] for one, _ in turns) * SIZES[size][2] * 1e3
        rate = statistics.median(two[1] for _, two in turns)
        print(
            f"{size:<14}{SIZES[size][2]:>9,}{milliseconds:>14.1f}{share:>8.2f}{efficiency:>12.2f}{rate:>14,.0f}",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
