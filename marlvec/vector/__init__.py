"""Many envs at once. `vector_env` is the public class, `backends` decide where envs run, `shards` run them."""

from marlvec.envs.rendering import tile_frames
from marlvec.vector.backends.native import NativeVectorEnv
from marlvec.vector.backends.pool import PoolVectorEnv
from marlvec.vector.backends.process import AsyncVectorEnv
from marlvec.vector.backends.sync import SyncVectorEnv
from marlvec.vector.backends.thread import ThreadVectorEnv
from marlvec.vector.commands import PerEnv
from marlvec.vector.data.infos import infos_from_list, infos_to_list
from marlvec.vector.data.saved_states import load_state, save_state
from marlvec.vector.faults.recovery import Fault
from marlvec.vector.faults.restarts import RestartLimit
from marlvec.vector.pools.jax.jaxmarl import JaxMarlWorld
from marlvec.vector.pools.jax.jumanji import JumanjiWorld
from marlvec.vector.pools.jax.pgx import PgxWorld
from marlvec.vector.pools.jax.world import JaxRows, JaxWorld
from marlvec.vector.seeding import env_seeds
from marlvec.vector.vector_env import VectorEnv
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
