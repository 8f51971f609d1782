"""Threads that take a share of one call's work."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import pytest

from marlvec.vector.shards.thread_team import ThreadTeam


def test_every_share_is_done_each_in_its_own_thread() -> None:
    helpers, seen = ThreadTeam(3), [""] * 4

    def work(k: int) -> None:
        seen[k] = threading.current_thread().name

    for _ in range(200):
        seen[:] = [""] * 4
        helpers.run([partial(work, k) for k in range(4)])
        assert seen == [threading.current_thread().name, *(f"marlvec-native-{w}" for w in range(3))]
    helpers.run([partial(work, 0)])
    helpers.close()


@pytest.mark.parametrize("culprit", [0, 2])
def test_what_one_raises_is_raised_when_the_others_are_done(culprit: int) -> None:
    helpers, done = ThreadTeam(2), [False] * 3

    def work(k: int) -> None:
        if k == culprit:
            raise ValueError(f"share {k}")
        time.sleep(0.05)
        done[k] = True

    for _ in range(2):  # and the next call works
        done[:] = [False] * 3
        with pytest.raises(ValueError, match=f"share {culprit}"):
            helpers.run([partial(work, k) for k in range(3)])
        assert done == [k != culprit for k in range(3)]
    helpers.close()
    helpers.close()


def test_those_whom_nobody_closed_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    helpers = ThreadTeam(2)
    threads = set(threading.enumerate()) - before
    del helpers
    gc.collect()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
