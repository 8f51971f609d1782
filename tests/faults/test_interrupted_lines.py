"""Ctrl-C, or no memory left, at the lines of a call, one after the other: the next reset works, nothing waits for ever.

At every seventh line here, at every single one in the soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness.programs import run

SOME = pytest.mark.time_limit(240)
ERRORS = ("KeyboardInterrupt", "MemoryError")
EVERY_LINE = pytest.param(1, marks=[pytest.mark.soak, pytest.mark.time_limit(7200)])

PROGRAM = """
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
    interrupt(f"BACKEND, NAMES, MODES, ERROR = {backend!r}, {names}, {modes}, {error}", PROGRAM, every, tmp_path)


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
