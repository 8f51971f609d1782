"""Numbers, what is sent again, and what may come when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ProtocolError, RefusedError
from marlvec.external.protocol.messages import Message, Type, read_message
from marlvec.external.protocol.stream import EpisodeState, EpisodeStates, MessageStream


def ok(stream: MessageStream, re: int = 1) -> bytes:
    return stream.make(Type.OK, {"re": re})


def bye(number: int, received: int = 0) -> Message:
    return Message(Type.BYE, {}, number, received)


@pytest.mark.fault("G2")
def test_what_comes_twice_is_counted_and_dropped() -> None:
    stream = MessageStream(1000)
    assert stream.take(bye(1))
    assert stream.take(bye(2))
    assert not stream.take(bye(1))
    assert not stream.take(bye(2))
    assert (stream.received, stream.duplicates) == (2, 2)
    with pytest.raises(ProtocolError, match="message 4 came after 2; some are missing"):
        stream.take(bye(4))
    assert stream.take(Message(Type.PING, {}))
    assert stream.received == 2


def test_what_was_told_is_not_kept() -> None:
    stream = MessageStream(1000)
    first, second = ok(stream), ok(stream, 2)
    assert stream.sent == 2
    assert stream.kept_bytes == len(first) + len(second)
    assert stream.missing(0) == [first, second]
    stream.take(bye(1, received=1))
    assert stream.missing(1) == [second]
    assert stream.kept_bytes == len(second)
    assert read_message(ok(stream, 3), "server").received == 1
    assert read_message(stream.make(Type.PONG, {}), "server").number == 0
    stream.acknowledge(3)
    assert stream.missing(3) == []
    assert stream.kept_bytes == 0
    for say in (stream.acknowledge, stream.missing):
        with pytest.raises(ProtocolError, match="message 4 cannot have been received: the last one sent was 3"):
            say(4)


@pytest.mark.fault("G11")
def test_who_tells_of_nothing_is_not_sent_more_than_is_kept() -> None:
    stream = MessageStream(100)
    while stream.kept_bytes + 40 < 100:
        ok(stream)
    with pytest.raises(ProtocolError, match="the other side confirms none") as caught:
        for _ in range(10):
            ok(stream)
    assert caught.value.code == "limit"
    assert stream.kept_bytes <= 100
    with pytest.raises(ProtocolError, match="a message of .* bytes; the other side takes 20"):
        MessageStream(1000).make(Type.OK, {"re": 1}, max_bytes=20)
    large = MessageStream(10)  # one may always be on the way
    ok(large)


@pytest.mark.fault("G2")
@given(st.lists(st.sampled_from(["send", "break"]), max_size=60), st.randoms(use_true_random=False))
def test_breaks_lose_nothing_and_double_nothing(events: list[str], random: object) -> None:
    """Two sides, and a wire that loses whatever is on it, as often as it likes."""
    sides = MessageStream(10**6), MessageStream(10**6)
    wires: tuple[list[bytes], list[bytes]] = [], []
    seen: list[int] = []
    sent = 0

    def deliver(most: int) -> None:
        while wires[0] and most:
            message = read_message(wires[0].pop(0), "server")
            if sides[1].take(message):
                seen.append(message.fields["re"])
            most -= 1

    for event in [*events, "break"]:
        if event == "send":
            sent += 1
            wires[0].append(sides[0].make(Type.OK, {"re": sent}))
            deliver(random.randint(0, 2))  # type: ignore[attr-defined]
        else:
            wires[0].clear()
            wires[0].extend(sides[0].missing(sides[1].received))
    deliver(-1)
    assert seen == list(range(1, sent + 1))
    assert sides[1].duplicates == 0


def request(kind: Type, episode: int) -> Message:
    return Message(kind, {"episode": episode}, 1)


@pytest.mark.fault("G16")
def test_what_may_come_when() -> None:
    episodes = EpisodeStates(2)
    with pytest.raises(RefusedError, match="there is no episode 3, or it is over") as caught:
        episodes.check(request(Type.STEP, 3))
    assert caught.value.code == "episode"
    episodes.check(request(Type.BEGIN, 3))
    assert 3 not in episodes
    episodes.begin(3)
    assert 3 in episodes
    assert len(episodes) == 1
    for number in (3, 2, 0):
        with pytest.raises(RefusedError, match=f"episode {number} is not new: numbers must grow, the last was 3"):
            episodes.check(request(Type.BEGIN, number))
    with pytest.raises(RefusedError, match="waits for a free slot: 'step' cannot come now") as caught:
        episodes.check(request(Type.STEP, 3))
    assert caught.value.code == "order"
    episodes.check(request(Type.ABANDON, 3))
    episodes.move(3, EpisodeState.RUNNING)
    for kind in (Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END, Type.ABANDON):
        episodes.check(request(kind, 3))
    episodes.move(3, EpisodeState.ASKED)
    assert episodes.state(3) is EpisodeState.ASKED
    for kind in (Type.STEP, Type.LOG, Type.LEAVE):
        with pytest.raises(RefusedError, match="waits for actions"):
            episodes.check(request(kind, 3))
    for kind in (Type.RETURNS, Type.END, Type.ABANDON):
        episodes.check(request(kind, 3))
    episodes.begin(4)
    with pytest.raises(RefusedError, match="2 episodes at a time") as caught:
        episodes.check(request(Type.BEGIN, 5))
    assert caught.value.code == "limit"
    episodes.end(3)
    episodes.end(3)
    with pytest.raises(RefusedError, match="no episode 3"):
        episodes.check(request(Type.END, 3))
    episodes.check(request(Type.BEGIN, 5))
    episodes.check(Message(Type.WEIGHTS, {"have": 0}, 1))
