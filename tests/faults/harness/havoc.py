"""What goes wrong, and when: signals from another process at random moments, and a script of what envs are told to do.

The killer is a process of its own, so that no moment of ours is safer than another:

    with Havoc(folder, workers=2, kills=10, stops=5, gap=0.1, seed=0) as havoc:
        havoc.aim(envs.worker_pids)  # again and again: workers are replaced
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Havoc", "Plan"]

_KILLS, _STOPS, _PIDS = 0, 1, 2  # rows of the board: per worker, how often what was done, and its process id
_PARENT = os.getppid()  # in the killer
_LONGEST_STOP = 0.15  # seconds


class Plan:
    """Which requests tell their env to do something wrong: the same in every run with the same seed.

    Args:
        orders: Order to how many times.
        requests: Over how many requests to spread them; they are numbered from 1.
        seed: Where the places are drawn from.
    """

    def __init__(self, orders: Mapping[int, int], requests: int, seed: int) -> None:
        draw = random.Random(seed)
        flat = [int(order) for order, count in orders.items() for _ in range(count)]
        draw.shuffle(flat)
        places = sorted(draw.sample(range(1, requests), len(flat)), reverse=True)
        self._due = list(zip(places, reversed(flat), strict=True))

    def __len__(self) -> int:
        return len(self._due)

    def order(self, number: int) -> int:
        """The order that goes out with this request, 0 for none. Ask only where there is an episode to spoil."""
        return self._due.pop()[1] if self._due and self._due[-1][0] <= number else 0


class Havoc:
    """Kills and stops workers at random, until all is done that is planned.

    Args:
        folder: A place for its board.
        workers: How many there are to aim at.
        kills: How often SIGKILL is sent; each to a worker that lives, and none twice to one.
        stops: How often SIGSTOP is sent, and a moment later SIGCONT.
        gap: Mean seconds between two of these.
        seed: Makes a run's plan (gaps, targets, kinds) the same each time.

    Attributes:
        kills, stops: How many there were, at the end.
        killed: How often each worker was killed, at the end.
    """

    def __init__(self, folder: Path, *, workers: int, kills: int, stops: int, gap: float, seed: int) -> None:
        self._path = folder / "board"
        self._path.write_bytes(bytes(8 * 3 * workers))
        self._told: tuple[int, ...] = ()
        self._planned = kills, stops
        self._arguments = [str(self._path), str(kills), str(stops), str(gap), str(seed)]

    def __enter__(self) -> Self:
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._board = _rows_of(self._map)
        command = [sys.executable, "-S", str(Path(__file__).resolve()), *self._arguments]
        self._process = subprocess.Popen(command)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        self.kills, self.stops = self.counts
        self.killed = list(self._board[_KILLS])
        for row in self._board:
            row.release()
        self._map.close()
        assert kind or code is None, f"the killer has ended by itself: {code}"

    def aim(self, pids: Sequence[int]) -> None:
        """Say who the workers are now."""
        if pids != self._told:
            self._told = tuple(pids)
            for w, pid in enumerate(pids):
                self._board[_PIDS][w] = pid

    @property
    def counts(self) -> tuple[int, int]:
        """Kills and stops so far."""
        return sum(self._board[_KILLS]), sum(self._board[_STOPS])

    @property
    def is_over(self) -> bool:
        """Whether all is done that was planned."""
        return self.counts == self._planned


def _rows_of(board: mmap.mmap) -> list[memoryview[int]]:
    numbers = memoryview(board).cast("q")
    workers = len(numbers) // 3
    return [numbers[k * workers : (k + 1) * workers] for k in range(3)]


def _rage(board: list[memoryview[int]], kills: int, stops: int, gap: float, seed: int) -> None:
    draw = random.Random(seed)
    killed: set[int] = set()
    plan = ["kill"] * kills + ["stop"] * stops
    draw.shuffle(plan)
    for kind in plan:
        w = draw.randrange(len(board[_PIDS]))
        length = draw.uniform(1e-3, _LONGEST_STOP)
        _sleep(draw.expovariate(1 / gap))
        while not _is_alive(pid := board[_PIDS][w]) or pid in killed:  # until it has been replaced
            _sleep(1e-3)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "kill":
            killed.add(pid)
            board[_KILLS][w] += 1
            continue
        _sleep(length)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        board[_STOPS][w] += 1
    while True:
        _sleep(1.0)


def _sleep(seconds: float) -> None:
    """Sleep, and end with the process whose workers these are."""
    time.sleep(min(seconds, 2.0))
    if os.getppid() != _PARENT:
        sys.exit()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return pid > 0 and state not in "ZX"


def main() -> None:
    """The killer: board, kills, stops, gap, seed."""
    path, kills, stops, gap, seed = sys.argv[1:]
    with Path(path).open("r+b") as file:
        board = _rows_of(mmap.mmap(file.fileno(), 0))
    _rage(board, int(kills), int(stops), float(gap), int(seed))


if __name__ == "__main__":
    main()
