"""Ctrl-C: in whole programs, and at every line of a step."""

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

# Ctrl-C at any moment: raised once, and after it the vectorizer works, or says in one sentence why it does not.


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


# Ctrl-C, or no memory left, at the lines of a call, one after the other: the next reset works, nothing waits for ever.
#
# At every seventh line here, at every single one in the soak.


SOME = pytest.mark.time_limit(240)
ERRORS = ("KeyboardInterrupt", "MemoryError")
EVERY_LINE = pytest.param(1, marks=[pytest.mark.soak, pytest.mark.time_limit(7200)])

STEP_PROGRAM = """
from marlvec.vector.calls import CallPhase
from tests.tracer import Tracer
from tests.vector.support.kinds import vectorize

logging.getLogger("marlvec").setLevel("ERROR")  # each restart is a warning there
N, A = 3, 2
HERE = os.path.dirname(marlvec.__file__)
acts = np.ones((N, A), np.int64)

class Fallible(CounterEnv):
    failing = False
    def step(self, actions):
        if self.failing:
            self.failing = False
            raise ValueError("once")
        return super().step(actions)

def fail_once(env):
    env.failing = True

def stream(envs):
    envs.send(acts)
    envs.recv(min_envs=1)
    envs.drain()

def fall(envs):
    try:
        envs.step(acts)
    except EnvRaised:
        envs.reset(env_ids=[1])

CALLS = {
    "step": lambda envs: envs.step(acts),
    "reset": lambda envs: envs.reset(seed=2),
    "some": lambda envs: envs.reset(env_ids=[0, 2]),
    "stream": stream,
    "exec_func": lambda envs: envs.exec_func(id),
    "fall": fall,
}

def interrupted(name, mode, step):
    call, line, place = CALLS[name], 0, ""
    factories = [partial(Fallible, 4, agent_num=A, env_index=i) for i in range(N)]
    with vectorize(BACKEND, factories, on_fault=mode, max_restarts=RestartLimit(10**6, backoff=0.0)) as envs:
        while place is not None:
            line += step
            faulthandler.dump_traceback_later(45, exit=True)
            envs.reset(seed=1)
            if name == "fall":
                envs.exec_func(fail_once, [1])
            try:
                with Tracer((HERE,), line, everywhere=True, error=ERROR) as tracer:
                    call(envs)
            except (ERROR if ERROR is KeyboardInterrupt else (ERROR, EnvRaised)):  # an env's own, for all that is known
                pass
            place = tracer.place
            if envs._call_state.pending in ("send", "async_reset") and envs._call_state.phase is not CallPhase.TORN:
                envs.drain()  # a stream goes on where it was
            for seed in (1, 2):
                obs, _ = envs.reset(seed=seed)
                assert [decode(row[0])[3] for row in obs] == [0] * N
                try:
                    obs, *_ = envs.step(acts)
                except EnvRaised:  # what was planned for a step that never came
                    assert name == "fall"
                    continue
                if name != "fall":
                    assert [decode(row[0])[0] for row in obs] == list(range(N)), "its own rows"
                    assert [decode(row[0])[3] for row in obs] == [1] * N, "of this step"
            assert envs._call_state.pending is None and envs.exec_func(lambda env: 5) == (5,) * N
    return line

print(sum(interrupted(name, mode, STEP) for name in NAMES for mode in MODES))
"""


def interrupt(head: str, program: str, every: int, folder: Path) -> None:
    """Run a program that interrupts a call at every so manieth line, and prints how many there are."""
    (lines,) = run(f"STEP = {every}\n{head}\n{program}", folder, timeout=220 if every > 1 else 7000)
    assert int(lines) > 300


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.checklist(75)
@pytest.mark.fault("A25")
@pytest.mark.parametrize(
    ("error", "every"),
    [
        pytest.param("KeyboardInterrupt", 7, marks=SOME),
        pytest.param("MemoryError", 13, marks=SOME),
        *(pytest.param(error, 1, marks=[pytest.mark.soak, pytest.mark.time_limit(7200)]) for error in ERRORS),
    ],
)
@pytest.mark.parametrize("backend", ["async", "thread", "sync"])
@pytest.mark.parametrize(
    ("names", "modes"),
    [(["step", "reset", "some", "stream", "exec_func"], ["raise"]), (["fall"], ["raise", "restart"])],
)
def test_at_any_line(backend: str, names: list[str], modes: list[str], error: str, every: int, tmp_path: Path) -> None:
    interrupt(f"BACKEND, NAMES, MODES, ERROR = {backend!r}, {names}, {modes}, {error}", STEP_PROGRAM, every, tmp_path)


DYING = """
from tests.faults.harness.programs import wait_gone
from tests.tracer import Tracer

logging.getLogger("marlvec").setLevel("ERROR")
N, A = 3, 2
HERE = os.path.dirname(marlvec.__file__)
acts = np.ones((N, A), np.int64)
factories = [partial(CounterEnv, 4, agent_num=A, env_index=i) for i in range(N)]
limit = RestartLimit(10**6, backoff=0.0)

line, place = 0, ""
with AsyncVectorEnv(factories, num_workers=2, on_fault="restart", max_restarts=limit) as envs:
    while place is not None:
        line += STEP
        faulthandler.dump_traceback_later(45, exit=True)
        envs.reset(seed=1)
        pid = envs.worker_pids[0]
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid], 30)
        try:
            with Tracer((HERE,), line) as tracer:
                envs.step(acts)
        except KeyboardInterrupt:
            pass
        place = tracer.place
        for seed in (1, 2):
            obs, _ = envs.reset(seed=seed)
            assert [decode(row[0])[3] for row in obs] == [0] * N
            obs, *_ = envs.step(acts)
            assert [decode(row[0])[0] for row in obs] == list(range(N)), "its own rows"
            assert [decode(row[0])[3] for row in obs] == [1] * N, "of this step"
        assert envs.exec_func(lambda env: 5) == (5,) * N
print(line)
"""


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.checklist(75)
@pytest.mark.fault("A25")
@pytest.mark.parametrize("every", [pytest.param(149, marks=SOME), EVERY_LINE])
def test_ctrl_c_while_a_dead_worker_is_replaced(every: int, tmp_path: Path) -> None:
    interrupt("", DYING, every, tmp_path)
