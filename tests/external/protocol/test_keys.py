"""Tokens, proofs and the handshake."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from marlvec.errors import ArgumentError, ProtocolError, RefusedError
from marlvec.external.handshake import (
    ENVIRONMENT_VARIABLE,
    ClientHandshake,
    ServerHandshake,
    Welcome,
    check_token,
    find_token,
    make_token,
    proof,
)
from marlvec.external.messages import Message, Type

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
        (
            None,
            TOKEN,
            "and this client has none; token=marlvec.external.find_token.. reads .* MARLVEC_TOKEN",
        ),
        (TOKEN, None, "this client has a token, but the server requires none"),
    ],
)
def test_tokens_that_do_not_fit(client_token: str | None, server_token: str | None, what: str) -> None:
    with pytest.raises(RefusedError, match=what) as caught:
        play(*pair(client_token, server_token))
    assert caught.value.code == "token"


@pytest.mark.fault("G13")
def test_an_auth_without_a_proof_or_with_one_nobody_asked_for() -> None:
    for token, given in ((TOKEN, b""), (None, b"p" * 32)):
        client, server = pair(None, token)
        server.receive(client.hello())
        with pytest.raises(RefusedError):
            server.receive(Message(Type.AUTH, {"proof": given, "session": b""}))
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
    with pytest.raises(RefusedError):
        again.receive(auth)
    # Another server passes the client's messages on: the client had dialled that one.
    with pytest.raises(RefusedError):
        play(*pair(TOKEN, TOKEN, host="evil.example:8000"))
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
    for given in (b"", b"p" * 32, own):
        with pytest.raises(RefusedError, match="the server does not know the token"):
            client.receive(Message(Type.WELCOME, {**sound.fields, "proof": given}))


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
    with pytest.raises(RefusedError, match=what) as caught:
        server.receive(Message(hello.type, {**hello.fields, **changed}))
    assert caught.value.code == "version"


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
    with pytest.raises(ProtocolError, match="expected 'hello', got 'auth'"):
        server.receive(auth)
    challenge = server.receive(hello)
    assert challenge is not None
    with pytest.raises(ProtocolError, match="expected 'auth', got 'hello'"):
        server.receive(hello)
    with pytest.raises(ProtocolError, match="expected 'challenge', got 'welcome'"):
        client.receive(server.welcome(WELCOME))
    assert server.receive(auth) is None
    with pytest.raises(ProtocolError, match="expected 'nothing more', got 'auth'"):
        server.receive(auth)
    client.receive(challenge)
    with pytest.raises(ProtocolError, match="expected 'welcome', got 'challenge'"):
        client.receive(challenge)


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
    with pytest.raises(ArgumentError, match="32 or more printable ASCII characters") as caught:
        check_token(token)
    assert not token or str(token) not in str(caught.value)


def test_tokens_of_files_and_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert find_token() is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, TOKEN + "\n")
    assert find_token() == TOKEN
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    with pytest.raises(ArgumentError, match=ENVIRONMENT_VARIABLE):
        find_token()
    file = tmp_path / "token"
    with pytest.raises(ArgumentError, match="cannot be read"):
        find_token(file)
    other = secrets.token_hex()
    file.write_text(other + "\n")
    file.chmod(0o644)
    with pytest.raises(ArgumentError, match="chmod 600"):
        find_token(file)
    file.chmod(0o600)
    assert find_token(file) == other
