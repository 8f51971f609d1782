"""Ctrl-C at any moment: raised once, and after it the vectorizer works, or says in one sentence why it does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec import Collector, RandomPolicy, external
from marlvec.external import ExternalEnv
from tests.faults.harness.programs import run
from tests.vector.support.kinds import vectorize
from tests.waiting import Gate, GatedEnv, until

PROGRAM = """
signal.signal(signal.SIGALRM, signal.default_int_handler)
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


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.checklist(75)
@pytest.mark.fault("A25")
@pytest.mark.parametrize("backend", ["async", "sync"])
def test_after_ctrl_c_the_next_call_works_or_says_why_not(backend: str, tmp_path: Path) -> None:
    (said,) = run(f"SEED, ROUNDS, BACKEND = 0, 60, {backend!r}\n" + PROGRAM, tmp_path)
    interrupted, settled, broken = map(int, said.split())
    assert interrupted == 60
    # A few are broken, as a rule, where it was in the middle of a message: how many is a matter of where Ctrl-C hit.
    assert settled > broken


@contextmanager
def unheard_ctrl_c() -> Iterator[None]:
    """Ctrl-C while this thread waits, in a way that does not end its wait: as one that comes just before it.

    Python notes a signal in whatever thread the system hands it to, and raises when the main thread looks next.
    """
    waiter, late, over = threading.get_native_id(), threading.Event(), threading.Event()

    def looks_asleep() -> bool:
        stats = [Path(f"/proc/self/task/{waiter}/stat").read_text().rpartition(")")[2].split()[0] for _ in range(20)]
        return set(stats) == {"S"}

    def interrupt() -> None:
        until(looks_asleep)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not over.wait(40):
            late.set()
            os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        helper.join()
    assert not late.is_set(), "it was not heard until the wait ended"


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@pytest.mark.parametrize("backend", ["thread", "async"])
def test_a_wait_for_envs_hears_of_ctrl_c_that_came_just_before_it(backend: str, tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, vectorize(backend, [partial(GatedEnv, gate, length=9)] * 2) as envs:
        envs.reset(seed=0)
        try:
            with unheard_ctrl_c():
                envs.step(np.ones((2, envs.agent_num), np.int64))
        finally:
            gate.let_through(100)


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.fault("A25")
@pytest.mark.parametrize("wait", ["collect", "collect in the background", "get_action", "begin"])
def test_a_wait_for_the_other_side_hears_of_ctrl_c_that_came_just_before_it(wait: str) -> None:
    with external.make({"agent": (Box(0, 1, (1,), np.float32), Discrete(2))}) as envs:
        collector, game = Collector(envs, RandomPolicy(), seed=0), ExternalEnv(envs)
        episode = None if wait.startswith("collect") else game.start_episode()
        calls: dict[str, Callable[[], object]] = {
            "collect": lambda: collector.collect(1),
            "get_action": lambda: game.get_action(episode, [0]),
            "begin": lambda: game.start_episode(),
        }
        if wait in calls:
            with unheard_ctrl_c():
                calls[wait]()
            return
        with pytest.raises(EOFError, match="enough"), collector.background(1) as batches:
            with unheard_ctrl_c():
                next(batches)
            envs.gateway.fail(EOFError("enough"))
