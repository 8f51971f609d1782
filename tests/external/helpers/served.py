"""A server with somebody who collects, and clients that say exactly what a test wants them to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import external
from marlvec.external import ExternalVectorEnv, Limits, Server
from marlvec.external.connections import ClientConnection
from marlvec.external.handshake import ClientHandshake, Welcome
from marlvec.external.messages import FORMS, Message, Type, read_message, write_array, write_message
from marlvec.external.session_loop import SocketLoop
from marlvec.policies import FunctionPolicy
from tests.waiting import LONG

__all__ = ["SPACES", "Clock", "Raw", "Served", "expected", "obs_of", "served", "wire_obs"]

SPACES = {name: (Box(-1000, 1000, (3,)), Discrete(50)) for name in ("a", "b")}


def obs_of(number: int) -> np.ndarray[Any, Any]:
    """An observation that says which one it is."""
    return np.array([number, 2 * number, 1], np.float32)


def expected(obs: np.ndarray[Any, Any]) -> int:
    """What the policy of a `served` server does at an observation."""
    return int(obs[0] * 7 + obs[1]) % 50


def wire_obs(number: int, *agents: str) -> dict[str, Any]:
    """Observations as they go over the wire."""
    return {agent: write_array(obs_of(number)) for agent in agents or ("a", "b")}


class Clock:
    """A server's clock that stands until it is told to go on, so that no test depends on how quick a machine is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class _Enough(Exception):
    """Whoever collects may stop."""


class Served:
    """A server, its vectorizer, and a thread that collects from it."""

    def __init__(self, envs: ExternalVectorEnv, server: Server) -> None:
        self.envs, self.server = envs, server
        self.url = server.url
        self.rows: list[Any] = []

    def collect(self) -> None:
        policy = FunctionPolicy(lambda rows: (rows["obs"][:, 0] * 7 + rows["obs"][:, 1]).astype(np.int64) % 50)
        collector = marlvec.Collector(self.envs, policy, "main", seed=0)
        try:
            while True:
                self.rows.extend(collector.collect(env_steps=1).values())  # none where nobody is trained
                del self.rows[:-100]
        except _Enough:
            pass

    def stop(self, thread: threading.Thread) -> None:
        self.envs.gateway.fail(_Enough())
        thread.join()


@contextmanager
def served(
    num_envs: int = 4,
    *,
    spaces: Any = None,
    collect: bool = True,
    envs_options: dict[str, Any] | None = None,
    server_options: dict[str, Any] | None = None,
    clock: Clock | None = None,
    **limits: Any,
) -> Iterator[Served]:
    """A server of two agents, whose policy does what `expected` says; its clock is the machine's, unless given."""
    options = {"batch_wait": 0.0, **(envs_options or {})}
    with (
        nullcontext() if clock is None else mock.patch.object(SocketLoop, "clock", clock),
        external.make(spaces or SPACES, num_envs, **options) as envs,
        Server(envs, limits=Limits(**limits), **(server_options or {})) as server,
    ):
        there = Served(envs, server)
        thread = threading.Thread(target=there.collect)
        if collect:
            thread.start()
        try:
            yield there
        finally:
            if collect:
                there.stop(thread)


class Raw:
    """A client that sends what it is told to, and answers nothing by itself.

    Args:
        url: The server.
        token: What it knows.
        session: What it wants to resume.
        received: Number of the last reply it claims to have got, likewise.
        greet: Whether to go through the handshake.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        session: bytes = b"",
        received: int = 0,
        greet: bool = True,
    ) -> None:
        self.link = ClientConnection(url, time.monotonic() + LONG)
        self.number = 0
        self.received = received
        self.inbox: list[Message] = []
        self.welcome: Welcome | None = None
        if greet:
            self.greet(token, session)

    def greet(self, token: str | None = None, session: bytes = b"") -> None:
        shake = ClientHandshake(token, self.link.host, "raw", session)
        self.link.send(write_message(shake.hello()))
        while self.welcome is None:
            try:
                answer = shake.receive(self.get())
            except BaseException:
                self.close()
                raise
            if isinstance(answer, Welcome):
                self.welcome = answer
                self.number = answer.received
            else:
                self.link.send(write_message(answer._replace(received=self.received)))

    @property
    def sock(self) -> socket.socket:
        return self.link._sock

    def data(self, kind: Type, **fields: Any) -> bytes:
        """The bytes of the next message."""
        if FORMS[kind].is_numbered:
            self.number += 1
        return write_message(Message(kind, fields, self.number if FORMS[kind].is_numbered else 0, self.received))

    def send(self, kind: Type, **fields: Any) -> int:
        """Send the next message; returns its number."""
        self.link.send(self.data(kind, **fields))
        return self.number

    def get(self, timeout: float = LONG) -> Message:
        """The next message."""
        deadline = time.monotonic() + timeout
        while not self.inbox:
            assert time.monotonic() < deadline, "nothing came"
            for data in self.link.receive(deadline - time.monotonic()):
                self.inbox.append(read_message(data, "server"))
        message = self.inbox.pop(0)
        self.received = max(self.received, message.number)
        return message

    def ask(self, kind: Type, **fields: Any) -> Message:
        """Send a request and wait for its reply."""
        number = self.send(kind, **fields)
        reply = self.get()
        while reply.fields.get("re") != number and reply.type is not Type.ERROR:
            reply = self.get()
        return reply

    def begin(self, episode: int = 1) -> None:
        assert self.ask(Type.BEGIN, episode=episode, training=True).type is Type.OK

    def step(self, number: int, episode: int = 1, **more: Any) -> None:
        """One env step, and see that the answer is right."""
        reply = self.ask(Type.STEP, episode=episode, obs=wire_obs(number), **more)
        assert reply.type is Type.ACTIONS, reply
        action = expected(obs_of(number))
        assert reply.fields["actions"] == {"a": action, "b": action}

    def wait_for_end(self, timeout: float = LONG) -> list[Message]:
        """Read until the server has closed the connection."""
        found = self.inbox
        deadline = time.monotonic() + timeout
        while True:
            assert time.monotonic() < deadline, f"it is still open; there came {found}"
            try:
                found += [read_message(data, "server") for data in self.link.receive(deadline - time.monotonic())]
            except ConnectionError:
                self.close()
                return found

    def close(self) -> None:
        self.link.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
