"""Handshakes, numbers, what is sent again, and how slots go round."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ArgumentError, EpisodesFull, ProtocolError, RefusedError
from marlvec.external.handshake import ClientHandshake, ServerHandshake, Welcome
from marlvec.external.messages import EpisodeState, Message, MessageStream, Type, check_order, read_message
from marlvec.external.session import SlotQueue
from marlvec.external.tokens import ENVIRONMENT_VARIABLE, check_token, find_token, make_token, proof
from tests.external.served import Raw, Served, served
from tests.external.test_socket_faults import masked
from tests.vector.support.reference import refused
from tests.waiting import until

# --- Tokens, proofs and the handshake


TOKEN, ANOTHER = 32 * "t", 32 * "a"  # not drawn: names of cases stay the same
SERVER = b"s" * 16
HOST = "127.0.0.1:8000"
WELCOME = Welcome(b"w" * 32, False, 0, ("a", "b"), [{}], {"window": 4}, 7)


def pair(
    client_token: str | None, server_token: str | None, host: str = HOST
) -> tuple[ClientHandshake, ServerHandshake]:
    return ClientHandshake(client_token, host, "me", b"x" * 32), ServerHandshake(server_token, SERVER, HOST)


def play(client: ClientHandshake, server: ServerHandshake) -> Welcome:
    challenge = server.receive(client.hello())
    assert challenge is not None
    assert not server.is_done
    auth = client.receive(challenge)
    assert isinstance(auth, Message)
    assert server.receive(auth) is None
    assert server.is_done
    answer = client.receive(server.welcome(WELCOME))
    assert isinstance(answer, Welcome)
    return answer


@pytest.mark.parametrize("token", [None, TOKEN])
def test_two_that_fit(token: str | None) -> None:
    client, server = pair(token, token)
    assert play(client, server) == WELCOME
    assert server.session == b"x" * 32
    assert client.receive.__self__ is client


@pytest.mark.fault("G13")
@pytest.mark.parametrize(
    ("client_token", "server_token", "what"),
    [
        (ANOTHER, TOKEN, "the token is missing or wrong"),
        (None, TOKEN, "and this client has none; token=marlvec.external.find_token.. reads .* MARLVEC_TOKEN"),
        (TOKEN, None, "this client has a token, but the server requires none"),
    ],
)
def test_tokens_that_do_not_fit(client_token: str | None, server_token: str | None, what: str) -> None:
    caught = refused(RefusedError, what, play, *pair(client_token, server_token))
    assert caught.code == "token"


@pytest.mark.fault("G13")
def test_an_auth_without_a_proof_or_with_one_nobody_asked_for() -> None:
    for token, sent in ((TOKEN, b""), (None, b"p" * 32)):
        client, server = pair(None, token)
        server.receive(client.hello())
        refused(RefusedError, "", server.receive, Message(Type.AUTH, {"proof": sent, "session": b""}))
        assert not server.is_done


@pytest.mark.fault("G13")
def test_a_proof_is_good_for_one_handshake_of_one_server_by_one_name() -> None:
    client, server = pair(TOKEN, TOKEN)
    challenge = server.receive(client.hello())
    assert challenge is not None
    auth = client.receive(challenge)
    assert isinstance(auth, Message)
    again = ServerHandshake(TOKEN, SERVER, HOST)  # other random bytes
    again.receive(client.hello())
    refused(RefusedError, "", again.receive, auth)
    # Another server passes the client's messages on: the client had dialled that one.
    refused(RefusedError, "", play, *pair(TOKEN, TOKEN, host="evil.example:8000"))
    assert play(*pair(TOKEN, TOKEN, host=HOST.upper())) == WELCOME


@pytest.mark.fault("G13")
def test_a_server_that_does_not_know_the_token() -> None:
    client, server = pair(TOKEN, TOKEN)
    challenge = server.receive(client.hello())
    assert challenge is not None
    auth = client.receive(challenge)
    assert isinstance(auth, Message)
    server.receive(auth)
    sound = server.welcome(WELCOME)
    own = auth.fields["proof"]  # its own, sent back
    for sent in (b"", b"p" * 32, own):
        with pytest.raises(RefusedError, match="the server does not know the token"):
            client.receive(Message(Type.WELCOME, {**sound.fields, "proof": sent}))


def test_proofs_differ_by_role() -> None:
    one, other = (proof(TOKEN, role, HOST, SERVER, b"c" * 32, b"s" * 32) for role in ("client", "server"))
    assert one != other
    assert len(one) == 32


@pytest.mark.fault("G12")
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"versions": [0]}, r"speaks version 1 of the protocol, the client speaks \[0\]"),
        ({"versions": [999, 1000]}, r"speaks version 1 of the protocol, the client speaks \[999, 1000\]"),
        ({"features": ["resume", "telepathy"]}, r"features \['resume', 'weights'\], the client needs \['telepathy'\]"),
    ],
)
def test_versions_and_features_that_do_not_fit(changed: dict[str, Any], what: str) -> None:
    client, server = pair(None, None)
    hello = client.hello()
    caught = refused(RefusedError, what, server.receive, Message(hello.type, {**hello.fields, **changed}))
    assert caught.code == "version"


@pytest.mark.fault("G12")
def test_a_server_that_chooses_another_version() -> None:
    client, server = pair(None, None)
    challenge = server.receive(client.hello())
    assert challenge is not None
    with pytest.raises(RefusedError, match="the server chose version 2, this client speaks 1"):
        client.receive(Message(challenge.type, {**challenge.fields, "version": 2}))


@pytest.mark.fault("G16")
def test_whatever_comes_out_of_turn() -> None:
    client, server = pair(None, None)
    hello = client.hello()
    auth = Message(Type.AUTH, {"proof": b"", "session": b""})
    refused(ProtocolError, "expected 'hello', got 'auth'", server.receive, auth)
    challenge = server.receive(hello)
    assert challenge is not None
    refused(ProtocolError, "expected 'auth', got 'hello'", server.receive, hello)
    refused(ProtocolError, "expected 'challenge', got 'welcome'", client.receive, server.welcome(WELCOME))
    assert server.receive(auth) is None
    refused(ProtocolError, "expected 'nothing more', got 'auth'", server.receive, auth)
    client.receive(challenge)
    refused(ProtocolError, "expected 'welcome', got 'challenge'", client.receive, challenge)


def test_a_server_that_refuses() -> None:
    with pytest.raises(RefusedError, match="come back later") as caught:
        pair(None, None)[0].receive(Message(Type.ERROR, {"code": "full", "text": "come back later"}))
    assert caught.value.code == "full"


# --- where tokens come from


def test_tokens_are_long_and_new() -> None:
    assert check_token(make_token()) != make_token()
    assert len(make_token()) == 43


@pytest.mark.fault("G13")
@pytest.mark.parametrize("token", ["", "short", "x" * 31, "ä" * 40, "x" * 40 + "\n", None, b"x" * 40])
def test_what_is_no_token(token: Any) -> None:
    caught = refused(ArgumentError, "32 or more printable ASCII characters", check_token, token)
    assert not token or str(token) not in str(caught)


def test_tokens_of_files_and_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert find_token() is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, TOKEN + "\n")
    assert find_token() == TOKEN
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    refused(ArgumentError, ENVIRONMENT_VARIABLE, find_token)
    file = tmp_path / "token"
    refused(ArgumentError, "cannot be read", find_token, file)
    other = secrets.token_hex()
    file.write_text(other + "\n")
    file.chmod(0o644)
    refused(ArgumentError, "chmod 600", find_token, file)
    file.chmod(0o600)
    assert find_token(file) == other


# --- Numbers, what is sent again, and what may come when


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
    refused(ProtocolError, "message 4 came after 2; some are missing", stream.take, bye(4))
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
        refused(ProtocolError, "message 4 cannot have been received: the last one sent was 3", say, 4)


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
        caught = refused(RefusedError, said, check_order, message, state)
        assert caught.code == ("episode" if state is None else "order")
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


# --- Slots go round the clients, whatever one of them begins and abandons. Counted in events, not in seconds


ANY: Any = None


def serve(queue: SlotQueue, free: list[int], slots: dict[tuple[Any, int], int | None]) -> tuple[Any, int] | None:
    """Give the next one a slot."""
    turn = queue.first(free)
    if turn is not None:
        queue.remove(*turn, slots[turn], served=True)
    return turn


def test_clients_have_their_turn_and_their_episodes_come_in_order() -> None:
    queue, slots = SlotQueue(), {}
    for who, number in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 7), ("b", 2)]:
        queue.add(who, number, None)  # type: ignore[arg-type]
        slots[who, number] = None
    assert len(queue) == 6
    order = [serve(queue, [0], slots) for _ in range(6)]
    assert order == [("a", 1), ("b", 1), ("c", 7), ("a", 2), ("b", 2), ("a", 3)]
    assert not queue
    assert queue.first([0]) is None


def test_who_wants_a_certain_slot_keeps_nobody_from_another() -> None:
    queue = SlotQueue()
    slots: dict[tuple[Any, int], int | None] = {("a", 1): 0, ("a", 2): 1, ("b", 1): None, ("c", 1): 1}
    for (who, number), slot in slots.items():
        queue.add(who, number, slot)
    assert queue.first([]) is None
    assert queue.first([2]) == ("b", 1)
    assert [serve(queue, [1], slots) for _ in range(4)] == [("a", 2), ("b", 1), ("c", 1), None]
    assert serve(queue, [1, 0], slots) == ("a", 1)
    assert len(queue) == 0


def test_who_does_not_wait_any_more_is_gone_at_once() -> None:
    queue = SlotQueue()
    for number in range(10_000):
        queue.add("a", number, number % 3 or None)  # type: ignore[arg-type]
        queue.remove("a", number, number % 3 or None)  # type: ignore[arg-type]
    assert len(queue) == 0
    assert not queue


def queued(there: Served) -> int:
    return len(there.server._loop.session_manager._queue)


@pytest.mark.fault("G9")
@pytest.mark.parametrize("holds", [True, False])
def test_who_begins_and_abandons_all_the_time_keeps_nobody_out(holds: bool) -> None:
    """Each round is one piece of bytes: its episode is abandoned, and the next begins, before anybody else is heard."""
    with served(1) as there, Raw(there.url) as greedy, Raw(there.url) as patient:
        (greedy if holds else patient).begin()
        if not holds:
            greedy.send(Type.BEGIN, episode=1, training=True)
            until(lambda: queued(there) == 1)
        number = patient.send(Type.BEGIN, episode=2, training=True)
        until(lambda: queued(there) == 2 - holds)
        for episode in range(1, 41):
            abandon = masked(greedy.data(Type.ABANDON, episode=episode, reason="on a whim"))
            begin = masked(greedy.data(Type.BEGIN, episode=episode + 1, training=True))
            greedy.sock.sendall(abandon + begin)
        until(lambda: greedy.get().fields["re"] == greedy.number - 1)  # all but the last one are answered
        assert queued(there) <= 2
        if not holds:
            assert patient.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
            # The greedy one's turn went with each episode that it abandoned: the patient one is before it.
        reply = patient.get()
        assert (reply.type, reply.fields["re"]) == (Type.OK, number)
        patient.step(3, episode=2)
        begun = [m for m in greedy.inbox if m.type is Type.OK]
        assert begun == []
        assert patient.ask(Type.END, episode=2, obs={}, truncated=False).type is Type.OK
        assert greedy.get().fields["re"] == greedy.number  # and then it is served
        assert queued(there) == 0


@pytest.mark.fault("G9")
def test_slots_go_round_the_clients() -> None:
    """One asks for twenty, and then two others for two each: they do not wait for all of the twenty."""
    with served(1, episodes=32) as there, Raw(there.url) as holder:
        holder.begin()
        with Raw(there.url) as many, Raw(there.url) as one, Raw(there.url) as other:
            begun: list[str] = []
            waiting = 0
            for raw, count in ((many, 20), (one, 2), (other, 2)):
                for episode in range(1, count + 1):
                    raw.send(Type.BEGIN, episode=episode, training=True)
                    waiting += 1
                until(lambda: queued(there) == waiting)  # noqa: B023
            assert holder.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
            left = {"many": (many, 20), "one": (one, 2), "other": (other, 2)}
            numbers = dict.fromkeys(left, 0)
            for name in ("many", "one", "other", "many", "one", "other", "many", "many"):
                raw, _ = left[name]
                numbers[name] += 1
                assert raw.get().type is Type.OK
                begun.append(name)
                assert raw.ask(Type.END, episode=numbers[name], obs={}, truncated=False).type is Type.OK
            assert many.get().type is Type.OK


@pytest.mark.fault("G9")
def test_who_waits_for_a_slot_of_its_own_keeps_nobody_from_the_others() -> None:
    with served(2) as there, Raw(there.url) as holder, Raw(there.url) as picky, Raw(there.url) as modest:
        assert holder.ask(Type.BEGIN, episode=1, training=True, slot=0).type is Type.OK
        picky.send(Type.BEGIN, episode=1, training=True, slot=0)
        until(lambda: queued(there) == 1)
        for episode in range(1, 5):
            modest.begin(episode)
            modest.step(1, episode)
            assert modest.ask(Type.END, episode=episode, obs={}, truncated=False).type is Type.OK
        assert holder.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
        assert picky.get().type is Type.OK
        refused(EpisodesFull, "", there.envs.gateway.begin, env_id=0)
