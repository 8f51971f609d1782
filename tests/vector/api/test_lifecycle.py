"""From start to end: nothing is left behind, however it ends, and it starts from wherever Python runs.

The fixture around every test looks for open files, processes, threads and shared memory that it left.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, SyncVectorEnv, make
from marlvec.errors import BrokenError, ContractError, EnvRaised, SerialisationError, WorkerDied
from marlvec.testing.scripted import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv, SlowEnv, decode
from tests.faults.harness.programs import wait_gone
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.waiting import LONG, within

CONTEXTS = ("fork", "forkserver", "spawn")
N = 3
ROOT = Path(__file__).parents[3]


def acts(k: int = 1) -> Any:
    return np.full((N, 3), k)


def counters(n: int = N, **options: Any) -> list[Any]:
    return [partial(CounterEnv, 4, env_index=i, **options) for i in range(n)]


def running(pids: Any) -> list[int]:
    """Those that are there and are no zombies."""
    out = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        out += [pid] if state != "Z" else []
    return out


# --- close


@pytest.mark.checklist(30)
@pytest.mark.fault("B1")
@pytest.mark.parametrize("context", CONTEXTS)
def test_close_is_idempotent_and_leaves_nothing(context: str) -> None:
    envs = AsyncVectorEnv(counters(), num_workers=2, context=context)
    pids = envs.worker_pids
    envs.reset()
    envs.close()
    assert running(pids) == []
    envs.close()
    envs.close(timeout=0)
    with AsyncVectorEnv(counters(), num_workers=2, context=context) as never_reset:
        pids = never_reset.worker_pids
    assert never_reset.closed
    assert running(pids) == []
    with pytest.raises(ZeroDivisionError), AsyncVectorEnv(counters(), num_workers=2, context=context) as raising:
        pids = raising.worker_pids
        raising.reset()
        raise ZeroDivisionError  # in the parent, with a step pending or not
    assert running(pids) == []


@pytest.mark.checklist(30)
@pytest.mark.fault("B1")
@pytest.mark.parametrize("context", CONTEXTS)
def test_close_after_errors(context: str) -> None:
    for factory, error in ((RaisingEnv, EnvRaised), (ExitingEnv, WorkerDied)):
        envs = AsyncVectorEnv([partial(factory, env_index=i, only_env=1) for i in range(N)], context=context)
        pids = envs.worker_pids
        try:
            envs.reset()
            with pytest.raises(error):
                envs.step(acts())
            if error is WorkerDied:
                with pytest.raises(BrokenError):
                    envs.step(acts())
        finally:
            envs.close()
            envs.close()
        assert running(pids) == []


@pytest.mark.checklist(30)
@pytest.mark.fault("B3")
@pytest.mark.parametrize("context", CONTEXTS)
def test_close_with_a_call_pending_or_a_worker_that_hangs(context: str) -> None:
    envs = AsyncVectorEnv([partial(SlowEnv, seconds=0.2, env_index=i) for i in range(N)], context=context)
    pids = envs.worker_pids
    envs.reset()
    envs.step_send(acts())
    with within(4.5, usual=0.25):  # less than the five seconds that it has, so it was not in vain
        envs.close()  # drains
    assert running(pids) == []
    for where in ("reset", "step", "close"):
        hung = AsyncVectorEnv([partial(HangingEnv, where=where, env_index=i) for i in range(N)], context=context)
        pids = hung.worker_pids
        if where == "reset":
            hung.reset_send()
        else:
            hung.reset()
        if where == "step":
            hung.step_send(acts())
        with within(4, usual=0.25):  # and not the five seconds of its default
            hung.close(timeout=0.2)
        assert running(pids) == []


@pytest.mark.checklist(30)
def test_the_envs_own_close_is_called(tmp_path: Path) -> None:
    class Closing(CounterEnv):
        def close(self) -> None:
            (tmp_path / f"closed-{self.world.env_index}").touch(exist_ok=False)

    for backend in BACKENDS:
        with vectorize(backend, [partial(Closing, env_index=i) for i in range(N)]) as envs:
            envs.reset()
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"closed-{i}" for i in range(N)]
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("pending", [False, True])
def test_being_forgotten_closes_it(pending: bool) -> None:
    envs = AsyncVectorEnv(counters(), num_workers=2)
    pids = envs.worker_pids
    envs.reset()
    if pending:
        envs.step_send(acts())
    del envs
    gc.collect()
    wait_gone(pids, LONG)


# --- construction


@pytest.mark.fault("B12")
@pytest.mark.parametrize("context", CONTEXTS)
def test_what_cannot_be_pickled_is_refused_before_anything_starts(
    context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lambdas and local classes travel; an open lock, of which there is but one, does not."""
    lock = threading.Lock()

    class Local(CounterEnv):
        pass

    with AsyncVectorEnv([lambda: Local(3), Local, lambda n=2: CounterEnv(n)], num_workers=2, context=context) as envs:
        envs.reset()
        envs.step(acts())

    def started(*args: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr("marlvec.vector.processes.worker_pool.WorkerProcess", started)
    factories: list[Any] = [*counters(), lambda: CounterEnv(3, marks=lock)]  # type: ignore[arg-type]  # never called
    for workers in (1, 2, 4):
        with pytest.raises(SerialisationError, match="the factory of env.*3 cannot be pickled.*lock"):
            AsyncVectorEnv(factories, num_workers=workers, context=context)
    with pytest.raises(TypeError, match="lock"):
        make(factories, context=context)


@pytest.mark.fault("B15")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_factory_that_returns_no_env(backend: str) -> None:
    for thing, words in ((None, "None"), (3, "int"), (CounterEnv, "class CounterEnv"), (object(), "object")):
        factories: list[Any] = counters(4)
        factories[2] = partial(lambda thing: thing, thing)
        with pytest.raises(ContractError, match=rf"env 2\b.*expected an env in one of four forms.*{words}"):
            vectorize(backend, factories)


# --- programs


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def start(arguments: list[Any], **options: Any) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        **options,
    )


def run(arguments: list[Any], stdin: str | None = None) -> str:
    """Run Python to its end: it must succeed, and have nothing to say on stderr."""
    with start(arguments, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(stdin, timeout=150)
    assert (process.returncode, err) == (0, "")
    return out


PROGRAM = """
import numpy as np
import marlvec
from marlvec.testing import CounterEnv

class MyEnv(CounterEnv):
    BASE = 2
    def __init__(self, length=4):
        super().__init__(length, agent_num=self.BASE)

helper = lambda n: MyEnv(n)

for env in (MyEnv, lambda: helper(3), "simple_spread", "__main__:MyEnv"):
    envs = marlvec.make(env, num_envs=3)
    obs, infos = envs.reset(seed=0)
    for _ in range(30):
        obs, *_ = envs.step(np.zeros((3, envs.agent_num), np.int64))
    envs.close()
print("ok")
"""


def test_from_a_module_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    with start(["-m", "package"], cwd=tmp_path, stdin=subprocess.DEVNULL) as process:
        assert process.communicate(timeout=150) == ("ok\n", "")


@pytest.mark.fault("B12")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_main_module_with_side_effects_runs_once(context: str, tmp_path: Path) -> None:
    """No worker imports it, whatever the start method."""
    text = f"""
import os
with open({str(tmp_path / "runs")!r}, "a") as file:
    file.write("run\\n")
{PROGRAM.replace("num_envs=3", f"num_envs=3, context={context!r}")}
"""
    assert run(["-W", "ignore::DeprecationWarning", script(tmp_path, text)]) == "ok\n"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_from_a_thread_of_a_script(tmp_path: Path) -> None:
    text = f"""
import threading
program = {PROGRAM!r}
thread = threading.Thread(target=lambda: exec(program, globals()))
thread.start()
thread.join()
"""
    assert run([script(tmp_path, text)]) == "ok\n"


def test_what_envs_print_is_seen(tmp_path: Path) -> None:
    text = """
import sys
import marlvec
from marlvec.testing import CounterEnv
class Talks(CounterEnv):
    def reset(self, seed=None, options=None):
        sys.stdout.write("hello from a worker\\n")  # print() writes the end of the line by itself
        sys.stdout.flush()
        return super().reset(seed, options)
with marlvec.make(Talks, num_envs=2) as envs:
    envs.reset()
"""
    assert run([script(tmp_path, text)]) == "hello from a worker\n" * 2


def test_one_process_may_have_many(tmp_path: Path) -> None:
    """Twenty at once, closed in another order than they were made; the fork server is one for all."""
    made = [AsyncVectorEnv(counters(2), num_workers=2) for _ in range(10)]
    for k, envs in enumerate(made):
        envs.reset(seed=k)
    for envs in (*made[::2], *made[1::2][::-1]):
        obs, *_ = envs.step(np.ones((2, 3), np.int64))
        assert decode(obs[1, 0])[3] == 1
        envs.close()


def test_a_sync_vectorizer_needs_no_process() -> None:
    before = set(Path("/proc").glob("[0-9]*"))
    with SyncVectorEnv(counters()) as envs:
        envs.reset()
        new = {int(path.name) for path in set(Path("/proc").glob("[0-9]*")) - before}
        assert not [pid for pid in running(new) if f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()]
        assert all(type(env.unwrapped) is CounterEnv for env in envs.envs)
