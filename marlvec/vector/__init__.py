"""Many envs at once. `vector_env` is the public class, `backends` decide where envs run, `shards` run them."""

from marlvec.envs.video import tile_frames
from marlvec.vector.async_env import AsyncVectorEnv
from marlvec.vector.calls import PerEnv
from marlvec.vector.in_process import NativeVectorEnv, SyncVectorEnv, ThreadVectorEnv
from marlvec.vector.infos import infos_from_list, infos_to_list
from marlvec.vector.pool_env import PoolVectorEnv
from marlvec.vector.pools.jax import JaxRows, JaxWorld
from marlvec.vector.pools.jax_suites import JaxMarlWorld, JumanjiWorld, PgxWorld
from marlvec.vector.recovery import Fault
from marlvec.vector.settings import RestartLimit, env_seeds
from marlvec.vector.vector_env import VectorEnv, load_state, save_state
from marlvec.vector.vector_step import VectorStep

__all__ = [
    "VectorEnv",
    "SyncVectorEnv",
    "ThreadVectorEnv",
    "AsyncVectorEnv",
    "NativeVectorEnv",
    "PoolVectorEnv",
    "JaxRows",
    "JaxWorld",
    "JaxMarlWorld",
    "JumanjiWorld",
    "PgxWorld",
    "PerEnv",
    "Fault",
    "RestartLimit",
    "VectorStep",
    "env_seeds",
    "infos_from_list",
    "infos_to_list",
    "load_state",
    "save_state",
    "tile_frames",
]
