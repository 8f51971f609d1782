"""File descriptors that are closed once each, wherever Ctrl-C comes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from marlvec.vector.workers.channel import StackDump, closer, pair
from tests.tracer import Tracer


def made(kind: str) -> tuple[Any, list[int]]:
    """Something that can be closed, and its descriptors."""
    if kind == "channel":
        channel, theirs = pair()
        for fd in theirs:
            os.close(fd)
        return channel, [channel.read_fd, channel.write_fd]
    stacks = StackDump()
    return stacks, [stacks.fd]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.fault("A25")
@pytest.mark.parametrize("kind", ["channel", "stacks"])
def test_what_got_the_number_meanwhile_stays_open(kind: str) -> None:
    """At each line of `close`: the next call closes what is left, and nothing that was opened since."""
    line, place = 0, ""
    while place is not None:
        line += 1
        one, fds = made(kind)
        try:
            with Tracer(("/marlvec/vector/",), line) as tracer:
                one.close()
        except KeyboardInterrupt:
            pass
        place = tracer.place
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # they get the numbers that are free
        one.close()
        one.close()
        assert all(is_open(fd) for fd in others)
        assert not any(is_open(fd) for fd in set(fds) - set(others))
        for fd in others:
            os.close(fd)
    assert line > 2


def test_one_that_cannot_be_closed_leaves_none_open() -> None:
    a, b = os.pipe()
    close = closer(a, b)
    os.close(a)
    with pytest.raises(OSError, match="Bad file descriptor"):
        close()
    close()
    assert not is_open(b)
