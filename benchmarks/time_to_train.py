"""How long PPO takes to a trained policy on simple_spread: ours, and the same in other libraries, one core each.

Run ``python benchmarks/time_to_train.py --python PATH --python PATH``: each script of ``training/`` runs in a process
of its own, with the first interpreter that has its library; this one is tried first. What no interpreter has is named
and left out. The others' interpreters need no marlvec:

    pip install torch stable-baselines3 supersuit torchrl mpe2 pettingzoo
    pip install torch 'ray[rllib]' mpe2 pettingzoo

All have the settings of ``training/settings.py``: one policy for three agents, nets of two layers of 128, batches of
3,200 env steps. After each update the script hands its weights over and waits; this process plays the evaluation
episodes, always the same ones, with the most likely actions. The training ends as soon as their mean team return, the
sum over three agents and 25 steps, is at least ``--goal``. Evaluation is in no figure.

Everything runs on one core of a Linux machine. Processor time is that of the script and all its children; on a machine
that does other things, look at it and not at the clock. ``--json`` appends each training to a file as it ends; the
table is of all trainings in that file, so that a run that was cut off can go on.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import marlvec

SCRIPTS = Path(__file__).parent / "training"


@dataclass(frozen=True)
class Contestant:
    """A script, and what it needs."""

    script: str
    modules: tuple[str, ...]
    variant: str = ""


CONTESTANTS = {
    "marlvec, compiled envs": Contestant("ppo_marlvec.py", ("marlvec", "torch", "numba"), "native"),
    "marlvec, Python envs": Contestant("ppo_marlvec.py", ("marlvec", "torch"), "sync"),
    "CleanRL's way on SuperSuit": Contestant("ppo_cleanrl.py", ("supersuit", "torch", "mpe2")),
    "CleanRL's way, bootstrapping": Contestant("ppo_cleanrl.py", ("supersuit", "torch", "mpe2"), "bootstrap"),
    "Stable-Baselines3 on marlvec": Contestant("ppo_sb3.py", ("marlvec", "stable_baselines3", "numba"), "marlvec"),
    "Stable-Baselines3 on SuperSuit": Contestant("ppo_sb3.py", ("supersuit", "stable_baselines3", "mpe2")),
    "TorchRL": Contestant("ppo_torchrl.py", ("torchrl", "mpe2")),
    "RLlib, new stack": Contestant("ppo_rllib.py", ("ray.rllib", "torch", "mpe2")),
}


@dataclass(frozen=True)
class Training:
    """One training. Seconds are from the start of the process on, evaluation left out.

    Attributes:
        name: Key of `CONTESTANTS`.
        seed: Seed of envs, weights and actions.
        reached: Whether the goal was reached within the bounds.
        env_steps: Env steps until then.
        team_return: Mean team return of the last evaluation.
        start_up: Processor seconds until the first env step.
        processor: Processor seconds in all.
        wall: Seconds on the clock in all.
    """

    name: str
    seed: int
    reached: bool
    env_steps: int
    team_return: float
    start_up: float
    processor: float
    wall: float


class Evaluator:
    """Plays simple_spread with the most likely actions of an actor: the same first states each time.

    Args:
        episodes: Episodes, each in an env of its own.
    """

    def __init__(self, episodes: int) -> None:
        self._envs = marlvec.make("simple_spread", num_envs=episodes, backend="auto")

    def __call__(self, layers: Sequence[NDArray[Any]]) -> float:
        """Return the mean team return, for weights and biases of an actor's layers with tanh between them."""
        obs_NA, _ = self._envs.reset(seed=1_000_000)
        total, over = 0.0, False
        while not over:
            hidden = obs_NA
            for k in range(0, len(layers), 2):
                hidden = (np.tanh(hidden) if k else hidden) @ layers[k].T + layers[k + 1]
            obs_NA, rewards_NA, terminated_NA, truncated_NA, _ = self._envs.step(hidden.argmax(axis=-1))
            total += rewards_NA.sum()
            over = bool((terminated_NA | truncated_NA).all())
        return float(total / self._envs.num_envs)

    def close(self) -> None:
        """Close the envs."""
        self._envs.close()


def interpreter_of(contestant: Contestant, interpreters: Sequence[str]) -> str | None:
    """Return the first interpreter that finds all modules of a contestant."""
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))"
    for python in interpreters:
        found = subprocess.run([python, "-c", code, *contestant.modules], check=False, capture_output=True)
        if found.returncode == 0:
            return python
    return None


def code_lines(path: Path) -> int:
    """Return how many lines of a script hold code: no comments, docstrings, empty lines."""
    lines: set[int] = set()
    alone = True  # a string that begins a statement is a docstring
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
    between = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in silent:
            continue
        if token.type in between:
            alone = True
        elif not (alone and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
            alone = False
    return len(lines)


def train(
    name: str,
    python: str,
    seed: int,
    goal: float,
    bounds: tuple[int, float],
    evaluate: Callable[..., float],
    note: Callable[[int, float], None],
) -> Training:
    """Run one training; ``bounds`` are env steps and processor seconds, ``note`` gets env steps and team return.

    Raises:
        RuntimeError: The script ended before the goal and the bounds.
    """
    contestant, start_up = CONTESTANTS[name], 0.0
    environ = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else the start-up of some would be that of uncompiled Python
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        weights = Path(folder) / "weights.npz"
        command = [python, str(SCRIPTS / contestant.script), "--seed", str(seed), "--variant", contestant.variant]
        command += ["--weights", str(weights), "--began", repr(time.monotonic())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen(command, text=True, env=environ, **pipes) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                wall, processor = message["spent"]
                if message["kind"] == "ready":
                    start_up = processor
                    continue
                with np.load(weights) as found:
                    team_return = evaluate([found[key] for key in found.files])
                env_steps = message["env_steps"]
                note(env_steps, team_return)
                reached = team_return >= goal
                stop = reached or env_steps >= bounds[0] or processor >= bounds[1]
                print(json.dumps(stop), file=process.stdin, flush=True)
                if stop:
                    return Training(name, seed, reached, env_steps, team_return, start_up, processor, wall)
        log.seek(0)
        last = (log.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise RuntimeError(f"{name} ended before it was trained: {last}")


def table_of(trainings: Sequence[Training]) -> Table:
    """Return the table: medians over the seeds that reach the goal, with the least and the most."""
    headings = "reach it", "env steps", "processor s", "start-up s", "µs an env step", "clock s", "lines"
    table = Table("", *headings)
    for name, contestant in CONTESTANTS.items():
        own = [training for training in trainings if training.name == name]
        if not own:
            continue
        reached = [training for training in own if training.reached]
        shown = reached or own
        table.add_row(
            name,
            f"{len(reached)} of {len(own)}",
            spread([t.env_steps for t in shown], ",.0f"),
            spread([t.processor for t in shown], ".1f"),
            spread([t.start_up for t in shown], ".1f"),
            spread([1e6 * (t.processor - t.start_up) / max(1, t.env_steps) for t in shown], ".0f"),
            spread([t.wall for t in shown], ".0f"),
            str(code_lines(SCRIPTS / contestant.script)),
        )
    return table


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, with the least and the most where there are several."""
    least, median, most = (format(value, form) for value in (min(values), np.median(values), max(values)))
    return median if len(values) == 1 else f"{median} [{least}, {most}]"


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="an interpreter to look in")
    parser.add_argument("--only", nargs="*", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=-55.0, help="mean team return")
    parser.add_argument("--episodes", type=int, default=500, help="of an evaluation")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="env steps of a training")
    parser.add_argument("--max-seconds", type=float, default=1_800.0, help="processor time of a training")
    parser.add_argument("--json", type=Path, help="file to read earlier trainings from, and to append to")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # scripts and their children have it, too
    console, trainings = Console(width=130), []
    if args.json and args.json.exists():
        trainings = [Training(**json.loads(line)) for line in args.json.read_text().splitlines()]
    console.print(f"Python {platform.python_version()}, goal {args.goal}")
    interpreters = {}
    for name in args.only:
        python = interpreter_of(CONTESTANTS[name], [sys.executable, *args.python])
        if python is None:
            console.print(f"left out: {name}: no interpreter has {', '.join(CONTESTANTS[name].modules)}", markup=False)
        else:
            interpreters[name] = python
    done = {(training.name, training.seed) for training in trainings}
    todo = [(name, seed) for seed in args.seeds for name in interpreters if (name, seed) not in done]
    evaluator, bounds = Evaluator(args.episodes), (args.max_steps, args.max_seconds)
    columns = map(TextColumn, ("{task.description}", "{task.fields[now]}"))
    with Progress(*columns, BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(todo), now="")
        for name, seed in todo:
            progress.update(task, description=f"{name}, seed {seed}", now="")

            def note(env_steps: int, team_return: float) -> None:
                progress.update(task, now=f"{env_steps:,} env steps, return {team_return:.1f}")

            try:
                training = train(name, interpreters[name], seed, args.goal, bounds, evaluator, note)
            except RuntimeError as error:
                console.print(f"left out: {error}", markup=False)
            else:
                trainings.append(training)
                if args.json:
                    with args.json.open("a", encoding="utf-8") as file:
                        print(json.dumps(asdict(training)), file=file)
            progress.advance(task)
    evaluator.close()
    console.print(table_of(trainings))


if __name__ == "__main__":
    main()
