"""Ctrl-C at any moment: raised once, and after it the vectorizer works, or says in one sentence why it does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import random, signal, sys, time
import numpy as np
from functools import partial
from marlvec.testing.scripted import SlowEnv, decode
from marlvec.errors import BrokenError, NotResetError
from marlvec.vector import AsyncVectorEnv, SyncVectorEnv

N, A = 4, 3
rng = random.Random(SEED)
factories = [partial(SlowEnv, 5, env_index=i, seconds=0.004) for i in range(N)]
acts = np.ones((N, A), np.int64)
counts = dict(interrupted=0, settled=0, broken=0)

def new():
    envs = AsyncVectorEnv(factories, num_workers=2) if BACKEND == "async" else SyncVectorEnv(factories)
    envs.reset(seed=0)
    return envs

def calls(envs):
    return {
        "step": lambda: envs.step(acts),
        "reset": lambda: envs.reset(),
        "get_attr": lambda: envs.get_attr("num_agents"),
        "exec_func": lambda: envs.exec_func(lambda env: time.sleep(0.004)),
    }

envs = new()
while counts["interrupted"] < ROUNDS:
    name = rng.choice(["step", "step", "reset", "get_attr", "exec_func"])
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.02))
        try:
            for _ in range(50):
                calls(envs)[name]()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        counts["interrupted"] += 1
    except NotResetError:
        pass
    # The next call works ...
    try:
        obs, infos = envs.reset(seed=1)
        assert [decode(row[0])[3] for row in obs] == [0] * N
        obs, rewards, *_ = envs.step(acts)
        assert [decode(row[0])[0] for row in obs] == list(range(N)), "its own rows"
        assert [decode(row[0])[3] for row in obs] == [1] * N, "of this step, and not of one that was interrupted"
        counts["settled"] += 1
    except BrokenError as error:  # ... or says why it cannot
        assert "was interrupted" in str(error), error
        counts["broken"] += 1
        envs.close()
        envs = new()
envs.close()
print(counts["interrupted"], counts["settled"], counts["broken"])
"""

SIGNAL_IS_CTRL_C = """
import signal
signal.signal(signal.SIGALRM, signal.default_int_handler)
"""


@pytest.mark.checklist(75)
@pytest.mark.fault("A25")
@pytest.mark.parametrize("backend", ["async", "sync"])
def test_after_ctrl_c_the_next_call_works_or_says_why_not(backend: str) -> None:
    program = f"SEED, ROUNDS, BACKEND = 0, 150, {backend!r}\n" + SIGNAL_IS_CTRL_C + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"(\d+) (\d+) (\d+)\n", done.stdout)
    assert found
    interrupted, settled, broken = map(int, found.groups())
    assert interrupted == 150
    # A few are broken, as a rule, where it was in the middle of a message: how many is a matter of where Ctrl-C hit.
    assert settled > broken
