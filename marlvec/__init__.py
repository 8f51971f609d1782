"""marlvec: many multi-agent environments at once, exact, unbreakable and fast.

`make` builds a `VectorEnv`; a `Collector` passes its rows through agent connectors, policies and action connectors, and
returns a `MultiAgentBatch` with one `SampleBatch` per policy.
"""

import importlib.util
import sys
import typing

# A name is imported when it is first used, so that `import marlvec`, `--help` and worker processes start fast. Type
# checkers read the imports; `_SOURCES` has the same names for run time, and tests/test_exports.py compares the two.
if typing.TYPE_CHECKING:
    from marlvec import connectors, errors
    from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
    from marlvec.collect.callbacks import Callback
    from marlvec.collect.loggers import JSONLinesLogger, LiveTable, TensorBoardLogger
    from marlvec.envs import MultiAgentEnv, RecordVideo
    from marlvec.errors import RestartQuietly
    from marlvec.making import make
    from marlvec.policies import (
        AnswerLimit,
        AsyncPolicy,
        FunctionPolicy,
        Policy,
        PolicyMap,
        RandomPolicy,
        ScriptedPolicy,
        load_checkpoint,
        save_checkpoint,
    )
    from marlvec.recording.dataset import load_dataset
    from marlvec.recording.recorder import Recorder
    from marlvec.registry import register
    from marlvec.serialization.values import register_space
    from marlvec.vector import (
        AsyncVectorEnv,
        Fault,
        JaxMarlWorld,
        JaxRows,
        JaxWorld,
        JumanjiWorld,
        NativeVectorEnv,
        PerEnv,
        PgxWorld,
        PoolVectorEnv,
        RestartLimit,
        SyncVectorEnv,
        ThreadVectorEnv,
        VectorEnv,
        VectorStep,
        env_seeds,
        infos_from_list,
        infos_to_list,
        load_state,
        save_state,
        tile_frames,
    )
else:
    _SOURCES = {
        "marlvec.collect": "Collector MultiAgentBatch SampleBatch",
        "marlvec.collect.callbacks": "Callback",
        "marlvec.collect.loggers": "JSONLinesLogger LiveTable TensorBoardLogger",
        "marlvec.envs": "MultiAgentEnv RecordVideo",
        "marlvec.errors": "RestartQuietly",
        "marlvec.making": "make",
        "marlvec.policies": (
            "AnswerLimit AsyncPolicy FunctionPolicy Policy PolicyMap RandomPolicy ScriptedPolicy load_checkpoint "
            "save_checkpoint"
        ),
        "marlvec.recording.dataset": "load_dataset",
        "marlvec.recording.recorder": "Recorder",
        "marlvec.registry": "register",
        "marlvec.serialization.values": "register_space",
        "marlvec.vector": (
            "AsyncVectorEnv Fault JaxMarlWorld JaxRows JaxWorld JumanjiWorld NativeVectorEnv PerEnv PgxWorld "
            "PoolVectorEnv RestartLimit SyncVectorEnv ThreadVectorEnv VectorEnv VectorStep env_seeds infos_from_list "
            "infos_to_list load_state save_state tile_frames"
        ),
    }

    def __getattr__(name: str) -> object:
        for source, names in _SOURCES.items():
            if name in names.split():
                globals()[name] = found = getattr(importlib.import_module(source), name)
                return found
        if not name.startswith("_") and importlib.util.find_spec(f"marlvec.{name}") is not None:
            return importlib.import_module(f"marlvec.{name}")
        raise AttributeError(f"module 'marlvec' has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


__version__ = "0.1.0"

__all__ = [
    "make",
    "register",
    "register_space",
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
    "save_state",
    "load_state",
    "MultiAgentEnv",
    "JaxWorld",
    "JaxRows",
    "JaxMarlWorld",
    "JumanjiWorld",
    "PgxWorld",
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
    "AsyncPolicy",
    "AnswerLimit",
    "PolicyMap",
    "save_checkpoint",
    "load_checkpoint",
    "Callback",
    "LiveTable",
    "TensorBoardLogger",
    "JSONLinesLogger",
    "Recorder",
    "load_dataset",
    "errors",
]
