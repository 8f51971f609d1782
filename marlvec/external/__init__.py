"""Simulators that drive the loop themselves: game servers, robots, browsers, logs. They ask, and marlvec answers.

`make` gives an `ExternalVectorEnv`: to a `Collector` one more `VectorEnv`, whose slots are filled from outside. Its
`Door` is where episodes come in, each an `Episode`. `ExternalEnv` drives from a thread.
"""

from marlvec.external.door import Door
from marlvec.external.episode import Episode
from marlvec.external.making import make
from marlvec.external.thread import ExternalEnv
from marlvec.external.vector_env import ExternalVectorEnv

__all__ = ["make", "ExternalVectorEnv", "Door", "Episode", "ExternalEnv"]
