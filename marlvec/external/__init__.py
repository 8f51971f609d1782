"""External simulators: game servers, robots, browsers and logs that drive the loop and request actions from marlvec.

`make` returns an `ExternalVectorEnv`, a `VectorEnv` for a `Collector` whose slots are filled from outside. Its
`EpisodeGateway` begins episodes, each an `ExternalEpisode`. Episodes come from a thread (`ExternalEnv`), from logs
(`replay`), or from other processes over a socket (`Server` and `Client`).
"""

from marlvec.external.client import Client
from marlvec.external.episode import EpisodeGateway, ExternalEpisode
from marlvec.external.exchange import Limits, LocalInference
from marlvec.external.server import Server
from marlvec.external.tokens import find_token, make_token
from marlvec.external.vector_env import ExternalEnv, ExternalVectorEnv, Replay, make, replay

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
