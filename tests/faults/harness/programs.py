"""Whole programs for tests to run: what they said, how they ended, and whether their processes are still there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

__all__ = ["alive", "mounted", "run", "start", "wait_gone"]

ROOT = Path(__file__).resolve().parents[3]
HEAD = """
import ctypes, faulthandler, gc, json, logging, os, random, resource, signal, subprocess, sys, threading, time
from functools import partial
import numpy as np
import marlvec
from marlvec import AsyncVectorEnv, RestartLimit, SyncVectorEnv
from marlvec.errors import *
from marlvec.testing.scripted import CounterEnv, HangingEnv, SlowEnv, decode, decode_reward

def import_seconds():  # what a new interpreter takes to import marlvec, on the machine as it is now
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import marlvec.vector.workers.worker"], check=True)
    return time.monotonic() - begin

def play(envs, steps=7):
    envs.reset(seed=1)
    for t in range(steps):
        rewards = envs.step(np.full((envs.num_envs, 3), t % 5))[1]
    told = sorted({decode_reward(r)[1:] for r in rewards.ravel()})
    assert told == [((steps - 1) % 5 + 1, a, (steps - 1) % 5) for a in range(3)], told
"""


def start(program: str, folder: Path, *before: str) -> subprocess.Popen[str]:
    """Start a program after `HEAD`, in a session of its own; ``before`` is the command that runs it, e.g. unshare."""
    path = folder / "program.py"
    path.write_text(HEAD + program)
    return subprocess.Popen(
        [*before, sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )


def run(program: str, folder: Path, before: Sequence[str] = (), timeout: float = 150.0) -> list[str]:
    """Run a program to its end. It must succeed, and have nothing to say on stderr; returns the lines it said."""
    with start(program, folder, *before) as process:
        out, err = process.communicate(timeout=timeout)
    assert (process.returncode, err) == (0, ""), f"{process.returncode}, {err}"
    return out.splitlines()


def mounted(commands: str) -> list[str]:
    """The beginning of a command that runs in a mount namespace of its own, after these commands of a shell.

    Skips the test where there is no such thing.
    """
    own = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *own, "--mount", "sh", "-c", f'{commands} && cd . && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare on this machine")
    if tried.returncode:
        pytest.skip(f"this machine gives nobody a mount namespace: {tried.stderr.strip()}")
    return command


def alive(pids: Iterable[int]) -> list[int]:
    """Those of these processes that are there and are no zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":  # a zombie is dead; whoever adopted it has yet to say so
            found.append(pid)
    return found


def wait_gone(pids: Iterable[int], limit: float) -> float:
    """Wait until these processes are gone; how long it took."""
    pids, begin = list(pids), time.monotonic()
    while (left := alive(pids)) and time.monotonic() - begin < limit:
        time.sleep(0.005)
    assert not left, f"still there after {limit} s: {left}"
    return time.monotonic() - begin
