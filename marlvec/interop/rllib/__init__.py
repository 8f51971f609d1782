"""RLlib with marlvec's envs: an env runner, a vector env, an env, and marlvec's connectors in RLlib's pipelines."""

from marlvec.interop.rllib.connector import RLlibConnector
from marlvec.interop.rllib.env import RLlibMultiAgentEnv
from marlvec.interop.rllib.env_runner import RLlibEnvRunner
from marlvec.interop.rllib.vector_env import RLlibVectorEnv

__all__ = ["RLlibEnvRunner", "RLlibVectorEnv", "RLlibMultiAgentEnv", "RLlibConnector"]
