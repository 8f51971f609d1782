"""Settings: `Limits` of a server's clients, and `LocalInference` of a client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from marlvec.collect.acting.policy_set import Connectors
from marlvec.errors import ArgumentError
from marlvec.policies import PolicyLike

__all__ = ["Limits", "LocalInference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for each client, and for all clients together. A client beyond them receives the reason and is cut off.

    Attributes:
        clients: Connected clients at a time; further clients are refused, also those that reconnect.
        episodes: Running episodes of one client.
        message_bytes: Bytes of one message; a longer one is refused before it is read.
        window: Unanswered requests of one client.
        held_bytes: Bytes of one client's requests that wait for the collector or for their turn, and of rewards, infos
            and ends that wait for their row. Once its waiting rows hold as many bytes, further rows wait.
        kept_bytes: Bytes of replies that one client has not confirmed.
        unsent_bytes: Bytes that one client is too slow to read.
        total_bytes: All these bytes and those of waiting rows, for all clients; the client with the most is cut off
            first. Once waiting rows hold half of it, further rows wait.
        messages_per_second: Messages of one client; beyond that rate, the server reads them more slowly.
        handshake_seconds: Time for a new client to authenticate.
        message_seconds: Time from a message's first byte to its last, in any number of fragments; also for a slow
            client to read something.
        heartbeat_seconds: A client that is silent for this long is pinged, and dropped after twice as long.
        idle_seconds: Time that an episode may wait for its client's next message.
        episode_seconds: Duration of an episode.
        begin_seconds: Wait for a slot for a new episode.
        resume_seconds: Time for a disconnected client to resume its session; 0: its episodes are lost at once.

    Raises:
        ArgumentError: A limit is not a positive number.
    """

    clients: int = 1024
    episodes: int = 64
    message_bytes: int = 16 * 2**20
    window: int = 256
    held_bytes: int = 32 * 2**20
    kept_bytes: int = 8 * 2**20
    unsent_bytes: int = 8 * 2**20
    total_bytes: int = 2**29
    messages_per_second: float = 20_000
    handshake_seconds: float = 5
    message_seconds: float = 10
    heartbeat_seconds: float = 10
    idle_seconds: float = 300
    episode_seconds: float = math.inf
    begin_seconds: float = 60
    resume_seconds: float = 30

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            is_whole = limit.type == "int"
            if (
                isinstance(value, bool)
                or not isinstance(value, int if is_whole else (int, float))
                or not (value > 0 or (value == 0 and limit.name == "resume_seconds"))
            ):
                raise ArgumentError(
                    f"Limits({limit.name}={value!r}): expected a positive {'whole ' if is_whole else ''}number"
                )
        if not 4096 <= self.message_bytes <= 2**31:
            raise ArgumentError(f"Limits(message_bytes={self.message_bytes}): expected a number from 4,096 to 2**31")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInference:
    """Settings to run policies in the client's process: it waits for no answer, and sends its actions to the server.

    Weights come from `Server.publish`, in numbered versions. Build the policies here as in the server's process: they
    load the server's ``state_dict``; connectors load the server's learned state at each new episode. Received data
    names no class or function. In the server's batches these rows are ``off_policy``, with the actions that the env
    received; other policy outputs (``logp``, …) stay here. Action connectors must keep the action space: the collector
    cannot compute the policy's output from the env's action, and refuses it.

    Attributes:
        policies: Policy id to policy, as in the server's collector; or one policy, which becomes ``"main"``. A policy
            may also be an object with a method ``act(rows)``, or a function of rows.
        policy_mapping: A policy id, or agent name to policy id; None: the only policy.
        agent_connectors: As for a `Collector`.
        action_connectors: As for a `Collector`.
        explore: Whether the policies explore.
        update_seconds: Seconds between checks for newer weights.
        seed: Seed of the policies; None: from the operating system.
    """

    policies: Mapping[str, PolicyLike] | PolicyLike
    policy_mapping: str | Mapping[str, str] | None = None
    agent_connectors: Connectors = None
    action_connectors: Connectors = None
    explore: bool = True
    update_seconds: float = 10.0
    seed: int | None = None
