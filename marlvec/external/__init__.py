"""External simulators: game servers, robots, browsers and logs that drive the loop and request actions from marlvec.

`make` returns an `ExternalVectorEnv`, a `VectorEnv` for a `Collector` whose slots are filled from outside. Its
`EpisodeGateway` begins episodes, each an `ExternalEpisode`. Episodes come from a thread (`ExternalEnv`), from logs
(`replay`), or from other processes over a socket (`Server` and `Client`).
"""

from marlvec.external.client.client import Client
from marlvec.external.exchange.external_episode import ExternalEpisode
from marlvec.external.exchange.gateway import EpisodeGateway
from marlvec.external.external_env import ExternalEnv
from marlvec.external.protocol.tokens import find_token, make_token
from marlvec.external.replay import Replay, replay
from marlvec.external.server.server import Server
from marlvec.external.settings import Limits, LocalInference
from marlvec.external.vector_env import ExternalVectorEnv, make

__all__ = [
    "make",
    "ExternalVectorEnv",
    "EpisodeGateway",
    "ExternalEpisode",
    "ExternalEnv",
    "replay",
    "Replay",
    "Server",
    "Client",
    "LocalInference",
    "Limits",
    "make_token",
    "find_token",
]
