"""A training that is killed goes on from its last checkpoint, and makes the batches of one that never was."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.checkpoints.killed import CASES

ROOT = Path(__file__).parents[2]
BATCHES = 8


@dataclass
class Life:
    """What one process has written.

    Attributes:
        begins: With which batch it began.
        batches: Number of a batch to its digest.
        end: What was there at the end; None where it was killed before.
    """

    begins: int
    batches: dict[int, str]
    end: str | None = None


def lives_in(folder: Path) -> list[Life]:
    """What all processes have written, one after the other."""
    found: list[Life] = []
    for line in (folder / "batches.txt").read_text().splitlines():
        *words, last = line.split()
        if words == ["begins", "at"]:
            found.append(Life(int(last), {}))
        elif words == ["end"]:
            found[-1].end = last
        else:
            found[-1].batches[int(words[0])] = last
    return found


def start(case: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.checkpoints.killed", case, str(folder), "--batches", str(BATCHES), *flags]
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    env = os.environ | one_thread | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(case: str, folder: Path, *flags: str) -> None:
    """Let it come to its end."""
    with start(case, folder, *flags) as process:
        _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said


def kill_in_the_middle(case: str, folder: Path, draw: random.Random, *flags: str) -> None:
    """Kill it somewhere in the batch after one that is drawn: in steps, in learning, or while it saves.

    It cannot get away: at the last batch but one it waits.
    """
    with start(case, folder, *flags, "--hold-at", str(BATCHES - 1)) as process:
        assert process.stdout is not None
        at, before, pause = draw.randrange(2, BATCHES - 1), None, 0.02
        for line in process.stdout:
            now = time.monotonic()
            pause = pause if before is None else now - before  # what the batch before has taken
            if int(line) >= at:
                time.sleep(draw.random() * 1.5 * pause)
                break
            before = now
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == -9


@dataclass
class Count:
    """What was seen.

    Attributes:
        kills: How often a training was killed.
        resumed: How often it went on from a checkpoint that was neither the first nor the last.
        compared: How many batches were held against those of the training that was never killed.
        differ: How many of them were others.
    """

    kills: int = 0
    resumed: int = 0
    compared: int = 0
    differ: int = 0


def hunt(case: str, folder: Path, seeds: range, kills: int) -> Count:
    """Kill trainings at random moments, let them go on, and compare."""
    run(case, folder / "whole")
    (whole,) = lives_in(folder / "whole")
    assert (whole.begins, list(whole.batches)) == (0, list(range(BATCHES)))
    count = Count()
    for seed in seeds:
        draw, mine = random.Random(f"{case} {seed}"), folder / str(seed)
        for life in range(kills):
            kill_in_the_middle(case, mine, draw, *(["--resume"] if life else []))
        run(case, mine, "--resume")
        lives = lives_in(mine)
        assert len(lives) == kills + 1
        for before, after in pairwise(lives):
            assert before.end is None
            # A checkpoint follows on each batch: the last of them may be there yet, or not.
            reached = before.begins + len(before.batches)
            assert after.begins in (reached - 1, reached)
            count.resumed += 0 < after.begins < BATCHES
        assert {k for life in lives for k in life.batches} == set(range(BATCHES))
        count.kills += kills
        for life in lives:
            count.compared += len(life.batches)
            count.differ += sum(whole.batches[k] != found for k, found in life.batches.items())
        assert lives[-1].end == whole.end
    return count


@pytest.mark.slow("kills trainings and trains again")
@pytest.mark.time_limit(400)
@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_training_that_was_never_killed(case: str, tmp_path: Path) -> None:
    count = hunt(case, tmp_path, range(1), kills=2)
    assert count.differ == 0, count
    assert count.resumed == count.kills == 2
    assert count.compared >= BATCHES


@pytest.mark.soak
@pytest.mark.time_limit(1200)
@pytest.mark.parametrize("case", CASES)
def test_batches_are_equal_after_repeated_kills_for_twenty_seeds(case: str, tmp_path: Path) -> None:
    count = hunt(case, tmp_path, range(20), kills=2)
    sys.stdout.write(f"{case}: {count}\n")
    assert count.differ == 0, count
    assert count.resumed >= 20
