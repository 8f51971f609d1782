"""``marlvec bench``: speed of each backend for one env, and a recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.text import Text

from marlvec.cli.building import build_envs
from marlvec.cli.console import print_json
from marlvec.cli.display.table import print_table
from marlvec.collect.progress_bar import ProgressBar
from marlvec.errors import ArgumentError, ContractError, MissingExtraError
from marlvec.making import DEFAULT_BACKEND
from marlvec.selfplay.results.whole_table import Column
from marlvec.vector import VectorEnv

__all__ = ["Figures", "bench", "print_bench", "recommended"]

_ROUNDS = 7  # backends take turns, so that other load on the machine affects all of them
_CLOSE = 1.1  # factor by which a backend must be faster to be recommended over a simpler one
_SIMPLEST = ("sync", "native", "thread", "async", "pool")


@dataclass(frozen=True)
class Figures:
    """Measurements of one backend."""

    backend: str
    env_steps_per_second: float  # median over the rounds; of all envs together
    agent_steps_per_second: float
    slowest: float  # env steps a second in this round
    fastest: float
    workers: int  # processes or threads; 0 if envs run in this process


def bench(
    env: str,
    num_envs: int,
    num_workers: int | None,
    env_kwargs: Mapping[str, Any] | None,
    seconds: float,
    console: Console,
) -> tuple[list[Figures], dict[str, str]]:
    """Step an env with random actions on each backend, in turns; return figures, fastest first, and why others refuse.

    Drawing actions, starting, and the first steps with their compilation are not counted.
    """
    running: dict[str, VectorEnv] = {}
    refused: dict[str, str] = {}
    rounds = 0
    total = len(_SIMPLEST) * (_ROUNDS + 1)
    bar = ProgressBar(f"{env} × {num_envs}", "rounds", total, speed_unit="env steps", console=console)
    with ExitStack() as stack, bar:
        for backend in _SIMPLEST:
            workers = num_workers if backend in ("async", "thread") else None
            try:
                envs = build_envs(
                    env,
                    num_envs,
                    backend=backend,
                    console=console,
                    num_workers=workers,
                    copy=False,
                    env_kwargs=dict(env_kwargs or {}),
                )
            except (ArgumentError, ContractError, MissingExtraError) as error:
                refused[backend] = str(error).splitlines()[0]
                rounds += _ROUNDS + 1
                bar.show(rounds, speed=0.0)
                continue
            running[backend] = stack.enter_context(envs)
            envs.reset(seed=0)
            _stepping(envs, seconds / (2 * _ROUNDS))
            rounds += 1
            bar.show(rounds, speed=0.0)
        if not running:
            raise ArgumentError(
                f"no backend runs {env}: " + "; ".join(f"{name}: {why}" for name, why in refused.items())
            )
        rates: dict[str, list[float]] = {backend: [] for backend in running}
        for _ in range(_ROUNDS):
            for backend, envs in running.items():
                rates[backend].append(_stepping(envs, seconds / _ROUNDS))
                rounds += 1
                bar.show(rounds, speed=rates[backend][-1], note=backend)
        figures = [
            Figures(
                backend,
                median(rates[backend]),
                median(rates[backend]) * envs.agent_num,
                min(rates[backend]),
                max(rates[backend]),
                getattr(envs, "num_workers", 0),
            )
            for backend, envs in running.items()
        ]
    return sorted(figures, key=lambda one: -one.env_steps_per_second), refused


def _stepping(envs: VectorEnv, seconds: float) -> float:
    """Measure env steps a second, over at least so many seconds within `step` and two steps."""
    spent, steps = 0.0, 0
    while spent < seconds or steps < 2:
        actions = envs.random_action()
        began = perf_counter()
        envs.step(actions)
        spent += perf_counter() - began
        steps += 1
    return steps * envs.num_envs / spent


def recommended(figures: list[Figures]) -> Figures:
    """Return the simplest backend within a tenth of the fastest."""
    good = [one for one in figures if one.env_steps_per_second * _CLOSE >= figures[0].env_steps_per_second]
    return min(good, key=lambda one: _SIMPLEST.index(one.backend))


def print_bench(
    console: Console, env: str, num_envs: int, figures: list[Figures], refused: Mapping[str, str], *, as_json: bool
) -> None:
    """Print the measurements and the recommendation: a table, or one JSON object."""
    best = recommended(figures)
    if as_json:
        result = {
            "env": env,
            "num_envs": num_envs,
            "backends": [asdict(one) for one in figures],
            "refused": dict(refused),
            "recommended": best.backend,
        }
        print_json(result)
        return
    columns: list[Column] = [("backend", "left")]
    columns += [(name, "right") for name in ("env steps/s", "agent steps/s", "slowest to fastest round")]
    rows: list[list[str | Text]] = []
    for one in figures:
        name = f"{one.backend} ({one.workers} worker{'s' * (one.workers != 1)})" if one.workers else one.backend
        rows.append(
            [
                Text(name, "bold" if one is best else ""),
                f"{one.env_steps_per_second:,.0f}",
                f"{one.agent_steps_per_second:,.0f}",
                f"{one.slowest:,.0f} – {one.fastest:,.0f}",
            ]
        )
    print_table(console, Text(f"{env} × {num_envs}, step() with random actions"), columns, rows)
    for name, why in refused.items():
        console.print(f"without {name}: {why}", style="dim", markup=False, highlight=False)
    others = [one for one in figures if one is not best]
    ahead = ", ".join(f"{_times(best, one)} × {one.backend}" for one in others)
    chosen = f'make("{env}", num_envs={num_envs}, backend="{best.backend}")'
    default = "the default" if best.backend == DEFAULT_BACKEND else chosen
    console.print(
        f"Take {best.backend}: {default}" + (f"; {ahead}" if ahead else ""),
        style="green",
        markup=False,
        highlight=False,
    )


def _times(one: Figures, other: Figures) -> str:
    ratio = one.env_steps_per_second / other.env_steps_per_second
    return f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"
