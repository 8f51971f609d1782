"""From start to end: nothing is left behind, however it ends, and it starts from wherever Python runs.

The fixture around every test looks for open files, processes, threads and shared memory that it left.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, SyncVectorEnv
from marlvec.testing.scripted import CounterEnv, decode
from tests.faults.harness.programs import wait_gone
from tests.waiting import LONG

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


@pytest.mark.slow("plays whole episodes in worker processes")
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


@pytest.mark.slow("plays whole episodes in worker processes")
def test_from_a_module_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    with start(["-m", "package"], cwd=tmp_path, stdin=subprocess.DEVNULL) as process:
        assert process.communicate(timeout=150) == ("ok\n", "")


@pytest.mark.slow("plays whole episodes in worker processes")
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


@pytest.mark.slow("plays whole episodes in worker processes")
def test_from_a_thread_of_a_script(tmp_path: Path) -> None:
    text = f"""
import threading
program = {PROGRAM!r}
thread = threading.Thread(target=lambda: exec(program, globals()))
thread.start()
thread.join()
"""
    assert run([script(tmp_path, text)]) == "ok\n"


@pytest.mark.slow("plays whole episodes in worker processes")
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


@pytest.mark.slow("plays whole episodes in worker processes")
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
