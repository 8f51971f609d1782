"""What holds for every test: nothing is left behind, no test hangs, and Hypothesis behaves the same everywhere."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key  # no public name for the terminal behind the capture
from hypothesis import settings

import marlvec
from marlvec.vector.workers import fork_server as client
from marlvec.vector.workers.pool import ensure_server
from tests.checklist import Recorder, stable_id
from tests.defects.registry import VARIABLE
from tests.leaks import Snapshot, leaks, mark_descendants
from tests.tiers import mark_slow, tier_of

# A shell that runs this in the background, or nohup, has these ignored, and every program we start would have, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Before any env is imported: pygame greets on import, and opens a window unless told otherwise.
os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
os.environ["SDL_VIDEODRIVER"] = "dummy"
# Before torch is: its threads would wait for each other, and for the other processes that tests run in.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What envs of tests need: half of all processor time went into importing it anew in each of thousands of workers.
client.preload += ["pytest", "marlvec.testing", "marlvec.collect", "tests.vector.support.kinds"]

settings.register_profile("marlvec", deadline=None, print_blob=True)
settings.register_profile("marlvec-ci", settings.get_profile("marlvec"), derandomize=True)
settings.load_profile("marlvec-ci" if os.environ.get("CI") else "marlvec")


COLLECTED = pytest.StashKey[dict[str, str]]()
"""Of every test that was collected, also where this run leaves it out, its tier: quick, slow or soak."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "marlvec-checklist")
    for name in marlvec.__all__:  # now, and not for the first time where a test has put something in its place
        getattr(marlvec, name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the tiers before pytest leaves any out; and start with the tests of hundreds of processes.

    A process that has grown takes three times as long to fork.
    """
    mark_slow(items)
    config.stash[COLLECTED] = {stable_id(item.nodeid): tier_of(item) for item in items}
    items.sort(key=lambda item: item.get_closest_marker("many_processes") is None)  # stable


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if mark := item.get_closest_marker("time_limit"):
        (seconds,) = mark.args
        terminal = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(seconds, exit=True, file=terminal)  # in place of pytest's own


def _is_hunt() -> bool:
    """Whether this run has a defect: its failures hold envs, whose end is not waited for."""
    return VARIABLE in os.environ


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_the_end() -> Iterator[None]:
    """The same for what lives longer than a test: modules' and sessions' fixtures."""
    mark_descendants()
    if _is_hunt():
        yield
        return
    ensure_server()  # one process and one socket, which live as long as this process
    gc.collect()
    gc.freeze()  # thousands of tests and their parameters, which every collection would go through
    before = Snapshot.take()
    yield
    if found := leaks(before):
        pytest.fail("left behind at the end of the session:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_logs_of_sb3_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stable-Baselines3 writes logs into a new folder in /tmp for each model, unless this is set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SB3_LOGDIR", str(tmp_path_factory.mktemp("sb3")))
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(nothing_left_at_the_end: None) -> Iterator[None]:
    """Fails the test that leaves a file, thread, process or shared memory behind.

    pytest sets up autouse fixtures first and tears them down last, so every other fixture of the test is gone by then.
    """
    if _is_hunt():
        yield
        return
    before = Snapshot.take()
    yield
    if found := leaks(before):
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)
