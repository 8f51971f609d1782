"""What connectors cost: the default chains, every connector there is, and other libraries' wrappers on the same rows.

Run ``python benchmarks/connectors.py``. As in `limit`, contestants take turns in short rounds, ratios are taken inside
a round, and medians over rounds are quoted with their quartiles. A tick is one call with all rows: 48 of them (16 envs,
3 agents, 18 numbers each) and 12,288 (4,096 envs). Four connectors are FlattenObs, NormalizeObs, FrameStack(4) and
AgentIndicator.

Gymnasium's and SuperSuit's wrappers stand around envs that hand out prepared rows and do nothing else. RLlib's
connectors are called as its own stacks do, row by row (old) and episode by episode (new). They run where they are
installed (``supersuit``, ``ray[rllib]``), and a line says where not. Each is as it comes, and they do not all
compute the same: SuperSuit normalises by bounds only, RLlib's new stack has statistics for each agent.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
import warnings

import numpy as np
from connector_cases import AGENTS, CASES, LARGE, QUESTIONS, SMALL, UNIT, VECTOR, WIDTH, Tick, chains, rows_of
from connector_peers import PEERS, version
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import marlvec

Times = NDArray[np.float64]


def contestants(console: Console, envs: int) -> dict[str, dict[str, Tick]]:
    """By question, ours and everybody's who is installed."""
    found = {question: {f"marlvec {case.name}": case.tick(envs)} for question, case in QUESTIONS.items()}
    obs, unit = (rows_of(envs, space).obs.reshape(envs, len(AGENTS), WIDTH) for space in (VECTOR, UNIT))
    for library, build in PEERS.items():
        if version(library) is None:
            console.print(f"{library}: not installed, left out")
            continue
        try:
            for question, label, tick in build(obs, unit):
                tick()
                found[question][label] = tick
        except Exception as error:  # a peer that cannot be made is no reason to show none
            console.print(f"{library}: left out: {type(error).__name__}: {error}", markup=False)
    return found


# --- measuring


def measure(ticks: dict[str, Tick], rounds: int, seconds: float, label: str) -> dict[str, Times]:
    """Seconds per tick, (rounds,) per contestant."""
    counts = {}
    for name, tick in ticks.items():
        count = 1
        while (took := _run(tick, count)) < seconds / 4:
            count *= 2
        counts[name] = max(1, round(count * seconds / took))
    times: dict[str, list[float]] = {name: [] for name in ticks}
    for r in track(range(rounds), description=label, transient=True):
        for name in list(ticks) if r % 2 == 0 else reversed(list(ticks)):
            times[name].append(_run(ticks[name], counts[name]) / counts[name])
    return {name: np.array(values) for name, values in times.items()}


def _run(tick: Tick, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        tick()
    return time.perf_counter() - start


def page_faults(tick: Tick) -> float:
    """Pages that the kernel hands out in a tick; it costs much where the allocator gave them back the tick before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _run(tick, 8)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 8


def report_chains(console: Console, envs: int, ticks: dict[str, Tick], times: dict[str, Times]) -> None:
    """Print what the chains cost."""
    rows = envs * len(AGENTS)
    table = Table(title=f"chains, {rows:,} rows of {WIDTH} numbers")
    for heading in ("", "µs per tick", "ns per row", "ns per row-element", "time / one copy", "page faults"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, seconds in times.items():
        per_row = seconds / rows * 1e9
        spread = _spread(seconds / next(iter(times.values())))
        cells = _spread(seconds * 1e6), f"{np.median(per_row):,.1f}", _spread(per_row / WIDTH), spread
        table.add_row(name, *cells, f"{page_faults(ticks[name]):,.0f}")
    console.print(table)


def report_pieces(console: Console, times: dict[int, dict[str, Times]]) -> None:
    """Print what every connector costs a row, alone in its pipeline."""
    table = Table(title="every connector, alone in its pipeline: ns per row")
    table.add_column("")
    for envs in times:
        table.add_column(f"{envs * len(AGENTS):,} rows", justify="right")
    for name in times[SMALL]:
        table.add_row(name, *(_spread(of[name] / (envs * len(AGENTS)) * 1e9) for envs, of in times.items()))
    console.print(table)


def report_peers(console: Console, envs: int, question: str, times: dict[str, Times]) -> None:
    """Print who answers one question how fast."""
    table = Table(title=f"{question}, {envs * len(AGENTS):,} rows of {WIDTH} numbers")
    for heading in ("", "µs per tick", "time / marlvec"):
        table.add_column(heading, justify="left" if not heading else "right")
    mine = next(iter(times.values()))
    for name, seconds in times.items():
        table.add_row(name, f"{np.median(seconds) * 1e6:,.1f}", _spread(seconds / mine))
    console.print(table)


def _spread(values: Times) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    digits = 0 if middle >= 100 else 2
    return f"{middle:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each contestant in each round")
    parser.add_argument("--only", choices=("chains", "pieces", "peers"), default=None, help="only these tables")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of old idioms in the peers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=120)
    versions = ", ".join(f"{name} {version(name) or '(not installed)'}" for name in ("numpy", *PEERS))
    cores = len(os.sched_getaffinity(0))
    about = f"marlvec {marlvec.__version__}, Python {platform.python_version()}, {cores} usable cores"
    console.print(f"{about}, {args.rounds} rounds; {versions}")
    if args.only in (None, "chains"):
        for envs in (SMALL, LARGE):
            ticks = chains(envs)
            report_chains(console, envs, ticks, measure(ticks, args.rounds, args.seconds, "chains"))
    if args.only in (None, "pieces"):
        every = {envs: {case.name: case.tick(envs) for case in CASES} for envs in (SMALL, LARGE)}
        times = {envs: measure(of, args.rounds, args.seconds / 2, "connectors") for envs, of in every.items()}
        report_pieces(console, times)
    if args.only in (None, "peers"):
        for question, everybody in contestants(console, SMALL).items():
            report_peers(console, SMALL, question, measure(everybody, args.rounds, args.seconds, question))


if __name__ == "__main__":
    main()
