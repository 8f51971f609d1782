"""Numbers, what is sent again, and what may come when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ProtocolError, RefusedError
from marlvec.external.messages import EpisodeState, Message, MessageStream, Type, check_order, read_message
from tests.external.helpers.served import Raw, served

OF_EPISODES = {Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END, Type.ABANDON}


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


@pytest.mark.fault("G16")
@pytest.mark.parametrize(
    ("state", "allowed", "said"),
    [
        (None, set(), "there is no episode 3, or it is over"),
        (EpisodeState.BEGINNING, {Type.ABANDON}, "episode 3 waits for a free slot: '.*' cannot come now"),
        (EpisodeState.RUNNING, OF_EPISODES, "-"),
        (EpisodeState.ASKED, {Type.RETURNS, Type.END, Type.ABANDON}, "episode 3 waits for actions: '.*' cannot come"),
    ],
)
def test_what_may_come_when(state: EpisodeState | None, allowed: set[Type], said: str) -> None:
    for kind in OF_EPISODES:
        message = Message(kind, {"episode": 3}, 1)
        if kind in allowed:
            check_order(message, state)
            continue
        with pytest.raises(RefusedError, match=said) as caught:
            check_order(message, state)
        assert caught.value.code == ("episode" if state is None else "order")
    check_order(Message(Type.WEIGHTS, {"have": 0}, 1), state)


@pytest.mark.fault("G16")
def test_numbers_of_episodes_grow_and_so_many_run_at_a_time() -> None:
    with served(2, episodes=2) as there, Raw(there.url) as raw:
        raw.begin(3)
        for number in (3, 2, 0):
            reply = raw.ask(Type.BEGIN, episode=number, training=True).fields
            text = f"episode {number} is not new: numbers must grow, the last was 3"
            assert (reply["code"], reply["text"]) == ("order", text)
        raw.begin(4)
        reply = raw.ask(Type.BEGIN, episode=5, training=True).fields
        text = "a client may have 2 episodes at a time; end one first"
        assert (reply["code"], reply["text"]) == ("limit", text)
        raw.ask(Type.ABANDON, episode=3, reason="")
        assert raw.ask(Type.END, episode=3, obs={}, truncated=False).fields["code"] == "episode"
        raw.begin(5)
