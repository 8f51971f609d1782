"""Many envs at once. `vector_env` is the public face; `shard` is what runs the envs, here or in workers."""

from marlvec.envs.rendering import tile_frames
from marlvec.vector.async_ import AsyncVectorEnv
from marlvec.vector.control import PerEnv
from marlvec.vector.fault_log import Fault
from marlvec.vector.infos import infos_from_list, infos_to_list
from marlvec.vector.native import NativeVectorEnv
from marlvec.vector.pool import PoolVectorEnv
from marlvec.vector.restarts import RestartLimit
from marlvec.vector.result import VectorStep
from marlvec.vector.seeding import env_seeds
from marlvec.vector.sync import SyncVectorEnv
from marlvec.vector.thread import ThreadVectorEnv
from marlvec.vector.vector_env import VectorEnv

__all__ = [
    "VectorEnv",
    "SyncVectorEnv",
    "ThreadVectorEnv",
    "AsyncVectorEnv",
    "NativeVectorEnv",
    "PoolVectorEnv",
    "PerEnv",
    "Fault",
    "RestartLimit",
    "VectorStep",
    "env_seeds",
    "infos_from_list",
    "infos_to_list",
    "tile_frames",
]
