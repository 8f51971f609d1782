"""marlvec: many multi-agent environments at once, exact, unbreakable and fast.

The road, top to bottom: `make` builds a `VectorEnv`; a `Collector` sends its rows through agent connectors, policies
and action connectors; out comes a `MultiAgentBatch` with one `SampleBatch` per policy.
"""

from marlvec import connectors, errors
from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
from marlvec.collect.callbacks import Callback, JSONLinesLogger, LiveTable, TensorBoardLogger
from marlvec.envs import MultiAgentEnv, RecordVideo
from marlvec.errors import RestartQuietly
from marlvec.making import make
from marlvec.policies import FunctionPolicy, Policy, PolicyMap, RandomPolicy, ScriptedPolicy
from marlvec.registry import register
from marlvec.vector import (
    AsyncVectorEnv,
    Fault,
    NativeVectorEnv,
    PerEnv,
    PoolVectorEnv,
    RestartLimit,
    SyncVectorEnv,
    ThreadVectorEnv,
    VectorEnv,
    VectorStep,
    env_seeds,
    infos_from_list,
    infos_to_list,
    tile_frames,
)

__version__ = "0.1.0"

__all__ = [
    "make",
    "register",
    "VectorEnv",
    "SyncVectorEnv",
    "ThreadVectorEnv",
    "AsyncVectorEnv",
    "NativeVectorEnv",
    "PoolVectorEnv",
    "PerEnv",
    "Fault",
    "RestartLimit",
    "RestartQuietly",
    "VectorStep",
    "env_seeds",
    "infos_to_list",
    "infos_from_list",
    "MultiAgentEnv",
    "RecordVideo",
    "tile_frames",
    "connectors",
    "Collector",
    "MultiAgentBatch",
    "SampleBatch",
    "Policy",
    "RandomPolicy",
    "FunctionPolicy",
    "ScriptedPolicy",
    "PolicyMap",
    "Callback",
    "LiveTable",
    "TensorBoardLogger",
    "JSONLinesLogger",
    "errors",
]
