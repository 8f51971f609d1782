"""A server with somebody who collects, clients that say what a test wants, and simulators played from outside."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import numpy as np
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import external
from marlvec.errors import EpisodeCut
from marlvec.external import Client, ExternalEnv, ExternalVectorEnv, Limits, Server
from marlvec.external.connections import ClientConnection
from marlvec.external.handshake import ClientHandshake, Welcome
from marlvec.external.messages import FORMS, Message, Type, read_message, write_array, write_message
from marlvec.external.session_loop import SocketLoop
from marlvec.policies import FunctionPolicy
from tests.waiting import LONG, until

# --- Simulators for the tests: envs of PettingZoo's two kinds, played from outside


def by_sight(salt: int = 3) -> FunctionPolicy:
    """Decides by what is seen alone, so that no order of rows and no other row makes a difference."""

    def act(rows: Any) -> Any:
        numbers = np.abs(np.floor(rows["obs"].reshape(len(rows), -1).sum(axis=1) * 997)).astype(np.int64) * 31 + salt
        if "action_mask" not in rows:
            return numbers % 5
        allowed = [np.flatnonzero(mask) for mask in rows["action_mask"]]
        return np.array([choices[n % len(choices)] for choices, n in zip(allowed, numbers, strict=True)])

    return FunctionPolicy(act)


def play_parallel(self: ExternalEnv, env: Any, env_id: int | None, seed: int | None, **options: Any) -> None:
    """One episode of a PettingZoo Parallel env."""
    episode = self.start_episode(env_id=env_id, **options)
    obs, _ = env.reset(seed=seed)
    while True:
        try:
            actions = self.get_action(episode, obs)
        except EpisodeCut:  # time was up
            return
        obs, rewards, terminated, truncated, infos = env.step(actions)
        self.log_returns(episode, rewards, infos)
        over = {agent for agent in obs if terminated[agent] or truncated[agent]}
        flags = {"terminated": {a: terminated[a] for a in over}, "truncated": {a: truncated[a] for a in over}}
        last = {agent: obs.pop(agent) for agent in over}
        if not obs:
            self.end_episode(episode, last, **flags)
            return
        if over:
            self.end_agents(episode, last, **flags)


def play_turns(self: ExternalEnv, env: Any, env_id: int | None, seed: int | None, **options: Any) -> None:
    """One episode of a PettingZoo AEC env whose agents all end together."""
    episode = self.start_episode(env_id=env_id, **options)
    env.reset(seed=seed)
    while env.agents and not any(env.terminations.values()):
        agent = env.agent_selection
        actions = self.get_action(episode, {agent: env.observe(agent)})
        env.step(actions[agent])
        self.log_returns(episode, env.rewards)
    self.end_episode(episode, {agent: env.observe(agent) for agent in env.possible_agents}, terminated=True)


class Play(ExternalEnv):
    """Plays some episodes of an env, one after the other.

    Args:
        envs: Where.
        env: The env.
        play: One episode of it.
        env_id: The slot it plays in, or None.
        seed: Of the env's first reset.
        episodes: How many; None: until it is stopped.
        options: As `ExternalEnv`.
    """

    def __init__(
        self,
        envs: ExternalVectorEnv,
        env: Any,
        play: Callable[..., None],
        *,
        env_id: int | None = None,
        seed: int | None = None,
        episodes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(envs, **options)
        self.env, self.play, self.env_id, self.seed, self.episodes = env, play, env_id, seed, episodes

    def run(self) -> None:
        seed, played = self.seed, 0
        while not self.stopping and played != self.episodes:
            self.play(self, self.env, self.env_id, seed)
            seed, played = None, played + 1
        self.env.close()


# --- A server with somebody who collects, and clients that say exactly what a test wants them to


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
        self, url: str, token: str | None = None, *, session: bytes = b"", received: int = 0, greet: bool = True
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


UPGRADE = (
    "GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: marlvec.v1\r\n{more}\r\n"
)


@contextmanager
def dial(there: Served) -> Iterator[socket.socket]:
    """A bare socket."""
    with socket.create_connection((there.server.host, there.server.port), 5) as sock:
        yield sock


def upgrade(there: Served, **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items() if name != "Host")
    return UPGRADE.format(host=headers.get("Host", f"127.0.0.1:{there.server.port}"), more=more).encode()


def read_all(sock: socket.socket, seconds: float = 60.0) -> bytes:
    """What comes until the server closes."""
    sock.settimeout(seconds)
    found = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


def masked(payload: bytes, opcode: int = 2, *, fin: bool = True, length: bytes | None = None) -> bytes:
    """One WebSocket frame from a client; its mask is zeros."""
    if length is None:
        n = len(payload)
        length = (
            bytes([0x80 | n])
            if n < 126
            else b"\xfe" + struct.pack(">H", n)
            if n < 65536
            else b"\xff" + struct.pack(">Q", n)
        )
    return bytes([(0x80 if fin else 0) | opcode]) + length + b"\0\0\0\0" + payload


class Honest:
    """A client that plays all the while, and must never see a wrong answer."""

    def __init__(self, there: Served) -> None:
        self._client = Client(there.url, timeout=120)
        self._episode = self._client.start_episode()
        self._stop = threading.Event()
        self.steps, self.error = 0, None
        self._thread = threading.Thread(target=self._play)

    def _play(self) -> None:
        try:
            while not self._stop.is_set():
                obs = obs_of(self.steps % 400)
                answer = self._client.get_action(self._episode, {"a": obs, "b": obs})
                assert answer == {"a": expected(obs), "b": expected(obs)}
                self.steps += 1
                self._stop.wait(0.002)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        before = self.steps
        with suppress(AssertionError):
            until(lambda: self.steps > before + 3 or self.error)
        self._stop.set()
        self._thread.join()
        self._client.close()
        assert self.error is None, self.error
        assert self.steps > before + 3, "the honest client was not answered any more"


def hello() -> bytes:
    return write_message(Message(Type.HELLO, {"versions": [1], "features": [], "name": "", "nonce": b"n" * 32}))
