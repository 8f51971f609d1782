"""Threads that share one call's work: they look for it, then sleep; no call waits for a thread that does not run."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `native` is not installed")

from marlvec.vector import thread_team
from marlvec.vector.thread_team import ThreadTeam
from marlvec.vector.watch import store_and_watch
from tests.tracer import Tracer
from tests.vector.support.reference import refused

LONG = 60 * 10**9  # ns
HERE = "marlvec/vector/thread_team"

MakeTeam = Callable[..., ThreadTeam]


@pytest.fixture
def make_team(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTeam]:
    """Build teams as on a machine of so many cores; all are closed in the end."""
    teams = []

    def make(num_threads: int, cores: int = 8) -> ThreadTeam:
        monkeypatch.setattr(thread_team, "usable_cores", lambda: cores)
        teams.append(ThreadTeam(num_threads))
        return teams[-1]

    yield make
    for team in teams:
        team.close()


@pytest.mark.parametrize("cores", [2, 8], ids=["sleeping", "looking"])
def test_all_threads_run_at_the_same_time(make_team: MakeTeam, cores: int) -> None:
    team, barrier = make_team(3, cores), threading.Barrier(4)
    for _ in range(20):
        team.run([partial(barrier.wait, 60.0)] * 4)


@pytest.mark.parametrize("cores", [1, 2, 8], ids=["alone", "sleeping", "looking"])
def test_every_share_is_run_once_and_is_over_when_the_call_returns(make_team: MakeTeam, cores: int) -> None:
    """Also shares so short that the caller takes them back, and so long that it waits."""
    team, runs = make_team(2, cores), [0] * 3
    for call in range(600):

        def work(k: int, long: bool = call % 40 == 0) -> None:
            if long and k:
                time.sleep(0.004)
            runs[k] += 1

        team.run([partial(work, k) for k in range(1 + call % 3)])
    assert runs == [600, 400, 200]


def test_with_one_core_the_caller_does_it_all(make_team: MakeTeam) -> None:
    before, seen = threading.active_count(), []
    team = make_team(3, cores=1)
    team.run([lambda: seen.append(threading.current_thread())] * 4)
    assert threading.active_count() == before
    assert seen == [threading.current_thread()] * 4


def test_shares_that_no_helper_begins_are_the_callers(make_team: MakeTeam) -> None:
    """Here since all helpers have ended; on a busy machine since they do not get a core."""
    team, seen = make_team(2), []
    team.close()
    team.close()
    for _ in range(3):
        team.run([lambda: seen.append(threading.current_thread())] * 3)
    assert seen == [threading.current_thread()] * 9


@pytest.mark.parametrize("culprit", [0, 2])
def test_what_one_raises_is_raised_when_no_other_runs(make_team: MakeTeam, culprit: int) -> None:
    team, running = make_team(2), Counter[int]()
    for _ in range(3):  # and the next call works
        barrier = threading.Barrier(3)

        def work(k: int, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(60.0)
            running["now"] += 1
            if k == culprit:
                running["now"] -= 1
                raise ValueError(f"share {k}")
            time.sleep(0.02)
            running["now"] -= 1

        refused(ValueError, f"share {culprit}", team.run, [partial(work, k) for k in range(3)])
        assert running["now"] == 0


def test_what_nobody_began_when_the_caller_raises_is_not_run(make_team: MakeTeam) -> None:
    team, seen = make_team(1), []
    team.close()  # so that no helper begins any

    def fail() -> None:
        raise ValueError("first")

    refused(ValueError, "first", team.run, [fail, lambda: seen.append(1)])
    team.run([lambda: seen.append(2)])
    assert seen == [2]


def test_ctrl_c_comes_when_no_share_runs(make_team: MakeTeam) -> None:
    """A real signal, while the caller waits for a helper: looking, and later asleep."""
    team, ended = make_team(1), []
    for seconds in (0.0005, 0.02, 0.0005):

        def work(seconds: float = seconds) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(seconds)
            ended.append(seconds)

        barrier = threading.Barrier(2)

        def share(barrier: threading.Barrier = barrier, work: Callable[[], None] = work) -> None:
            barrier.wait(60.0)
            work()

        refused(KeyboardInterrupt, "", team.run, [partial(barrier.wait, 60.0), share])
        assert ended.pop() == seconds
    team.run([lambda: ended.append(0.0)] * 2)
    assert ended == [0.0, 0.0]


@pytest.mark.parametrize("cores", [1, 2, 8], ids=["alone", "sleeping", "looking"])
def test_ctrl_c_at_any_line_leaves_no_share_running(make_team: MakeTeam, cores: int) -> None:
    team, running, line, place = make_team(2, cores), [0, 0, 0], 0, ""
    runs = [0, 0, 0]

    def work(k: int) -> None:
        running[k] = 1
        time.sleep(0.0002)
        runs[k] += 1
        running[k] = 0

    works = [partial(work, k) for k in range(3)]
    while place is not None:
        line += 1
        try:
            with Tracer((HERE,), line) as tracer:
                team.run(works)
        except KeyboardInterrupt:
            pass
        place = tracer.place
        assert running == [0, 0, 0], place
        assert max(runs) <= 1, place
        runs[:] = [0, 0, 0]
        team.run(works)
        assert runs == [1, 1, 1], place
        runs[:] = [0, 0, 0]
    assert line > 20


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_a_team_of_its_own(make_team: MakeTeam) -> None:
    team, barrier = make_team(1), threading.Barrier(2)
    team.run([partial(barrier.wait, 60.0)] * 2)
    if not (pid := os.fork()):
        code = 1
        try:
            barrier = threading.Barrier(2)
            team.run([partial(barrier.wait, 60.0)] * 2)
            team.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    team.run([partial(barrier.wait, 60.0)] * 2)


def test_threads_of_a_team_that_nobody_closed_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_team, "usable_cores", lambda: 8)
    before = set(threading.enumerate())
    team = ThreadTeam(2)
    team.run([gc.collect] * 3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del team
    gc.collect()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_an_idle_team_keeps_no_work_alive(make_team: MakeTeam) -> None:
    class Work:
        def __call__(self) -> None:
            barrier.wait(60.0)

    team, barrier = make_team(1), threading.Barrier(2)
    team.run([Work(), Work()])
    team.close()
    gc.collect()
    assert [found for found in gc.get_objects() if type(found) is Work] == []


@pytest.mark.slow("starts a program of its own")
def test_a_program_may_end_right_after_a_step() -> None:
    program = """
import marlvec
envs = marlvec.make("simple", 256, backend="native", num_workers=2)
envs.reset(seed=0)
envs.step(envs.random_action())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")


# --- looking and sleeping ---


class Watch:
    """Stands for `store_and_watch`: notes how long a helper would look, and looks at nothing."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    def __call__(self, cells: Any, tell: int, number: int, at: int, least: int, limit: int) -> None:
        if tell == thread_team._ENDED:
            self.limits.append(limit)
        cells[tell] = number


@pytest.mark.parametrize(("num_threads", "cores", "looks"), [(1, 2, True), (2, 2, False), (3, 4, True), (1, 1, False)])
def test_threads_look_only_where_each_has_a_core(
    make_team: MakeTeam, monkeypatch: pytest.MonkeyPatch, num_threads: int, cores: int, looks: bool
) -> None:
    watch = Watch()
    monkeypatch.setattr(thread_team, "find_watch", lambda: watch)
    team = make_team(num_threads, cores)
    team.run([gc.isenabled] * (num_threads + 1))
    team.close()
    assert bool(watch.limits) == looks


def test_a_thread_that_waited_long_twice_sleeps_until_a_wait_is_short(
    make_team: MakeTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    monkeypatch.setattr(thread_team, "find_watch", lambda: watch)
    monkeypatch.setattr(thread_team, "_LOOKING", 1)  # ns: every wait is longer
    team = make_team(1)

    def run() -> None:
        barrier = threading.Barrier(2)
        team.run([partial(barrier.wait, 60.0)] * 2)

    for _ in range(4):
        run()
    monkeypatch.setattr(thread_team, "_LOOKING", LONG)  # no wait is
    for _ in range(3):
        run()
    team.close()
    assert watch.limits[:4] == [1, 1, 0, 0]
    assert watch.limits[-1] == LONG


def test_two_threads_pass_numbers_without_the_interpreter_lock() -> None:
    cells = np.zeros(32, np.int64)

    def answer() -> None:
        for number in range(300):
            store_and_watch(cells, 16, number, 0, number + 1, LONG)

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(1, 301):
        store_and_watch(cells, 0, number, 16, number, 0 if number == 300 else LONG)
    thread.join()
    assert (cells[0], cells[16]) == (300, 299)


def test_what_does_not_come_is_looked_for_until_the_limit() -> None:
    cells = np.zeros(32, np.int64)
    store_and_watch(cells, 16, 7, 0, 1, 100_000)
    assert cells[16] == 7
    assert cells[0] == 0


@pytest.mark.parametrize("missing", [(os, "sched_yield"), (time, "CLOCK_MONOTONIC")], ids=lambda found: found[1])
def test_threads_sleep_where_the_system_lacks_a_call(monkeypatch: pytest.MonkeyPatch, missing: tuple[Any, str]) -> None:
    assert thread_team.find_watch() is store_and_watch
    monkeypatch.delattr(*missing)
    assert thread_team.find_watch.__wrapped__() is None


def test_threads_sleep_where_numba_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlvec.vector.watch.store_and_watch", Watch())
    assert thread_team.find_watch.__wrapped__() is None
