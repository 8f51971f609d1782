"""After an interrupt that lost some of what came in, a channel finds its next answer, and what follows it."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.vector.workers import channel as ch
from marlvec.vector.workers.channel import ChannelClosed, pair

PAYLOADS = st.lists(st.binary(max_size=40), max_size=5)


@given(
    before=PAYLOADS,
    lost=st.integers(0, 400),
    taken=st.integers(0, 3),
    answer=st.binary(max_size=40),
    split=st.integers(0, 500),
)
def test_what_was_asked_before_is_thrown_away(
    before: list[bytes], lost: int, taken: int, answer: bytes, split: int
) -> None:
    """Whole messages were taken, bytes of the next ones were read and lost, and the answer may come in two pieces."""
    ours, (their_read, their_write) = pair()
    theirs = ch.Channel(their_read, their_write)
    try:
        for number, payload in enumerate(before, start=2):
            theirs.send(ch.OK, number, payload, 3)
        for _ in before[:taken]:
            assert ours.take() is not None
        if left := sum(16 + len(payload) for payload in before[taken:]):
            os.read(ours.read_fd, min(lost, left))
        theirs.send(ch.OK, 99, answer)
        ours.skip_to(99, 10.0)
        theirs.send(ch.OK, 100, b"next", 1)
        assert ours.take(100) == (ch.OK, 1, 100, b"next")
        # In pieces: some of it is read before it is looked for.
        theirs.send(ch.OK, 101, answer)
        ours._begun += os.read(ours.read_fd, 1 + split % (16 + len(answer)))
        ours.skip_to(101, 10.0)
        assert ours.take() is None
    finally:
        ours.close()
        theirs.close()


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    ours, (their_read, their_write) = pair()
    theirs = ch.Channel(their_read, their_write)
    theirs.send(ch.OK, 5, b"something else")
    with pytest.raises(ChannelClosed, match="time is up"):
        ours.skip_to(6, 0.05)
    theirs.close()
    with pytest.raises(ChannelClosed, match="end of file"):
        ours.skip_to(6, 10.0)
    ours.close()
