"""The public surface is a list, and importing it is light: nothing heavy or optional, nothing printed or started."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import marlvec

# --- The public surface is a list: a name that comes or goes is a decision, and shows in a diff


SURFACE = {
    "marlvec": """
        make register register_space
        VectorEnv SyncVectorEnv ThreadVectorEnv AsyncVectorEnv NativeVectorEnv PoolVectorEnv VectorStep
        PerEnv
        Fault RestartLimit RestartQuietly
        RecordVideo tile_frames
        env_seeds infos_to_list infos_from_list save_state load_state
        connectors errors
        Collector MultiAgentBatch SampleBatch
        Policy RandomPolicy FunctionPolicy ScriptedPolicy AsyncPolicy AnswerLimit PolicyMap
        save_checkpoint load_checkpoint
        Callback LiveTable TensorBoardLogger JSONLinesLogger
        Recorder load_dataset
        MultiAgentEnv JaxWorld JaxRows JaxMarlWorld JumanjiWorld PgxWorld
    """,
    "marlvec.connectors": """
        ActionConnector AgentConnector AgentTable Connector LearnerConnector Pipeline RowRandom Rows
        action_connector agent_connector catalogue connector_from_config learner_connector
        register_connector register_function
        ActionMaskFromObs AgentIndicator AgentPipeline CastObs ClipObs ClipReward DeathMask DelayObs
        DropKeys FilterRows FlattenObs FrameSkip FrameStack GrayscaleObs History MapObs MapReward MaxObs
        NormalizeObs NormalizeReward OneHotObs PadObs PerAgent PrevActions PrevRewards ReshapeObs ResizeObs
        RnnState RowFilter ScaleObs ScaleReward StateInObs TeamObs Template TimeFeature TransposeObs View
        ActionPipeline ClipActions DiscretizeActions EpsilonGreedy GaussianNoise MapActions MaskInvalid
        OrnsteinUhlenbeckNoise PadActions ReadOnlyActions RepeatActions ReplaceNaN StickyActions ToNumpy
        UnsquashActions
        AddLastObs AddView Fragments GeneralAdvantageEstimation LearnerPipeline NStep PadSequences
        ReturnsToGo Standardize UnpadSequences VTrace ValueFunction regroup
    """,
    "marlvec.connectors.agent": """
        ActionMaskFromObs AgentIndicator AgentPipeline CastObs ClipObs ClipReward DeathMask DelayObs
        DropKeys FilterRows FlattenObs FrameSkip FrameStack GrayscaleObs History MapObs MapReward MaxObs
        NormalizeObs NormalizeReward OneHotObs PadObs PerAgent PrevActions PrevRewards ReshapeObs ResizeObs
        RnnState RowFilter ScaleObs ScaleReward StateInObs TeamObs Template TimeFeature TransposeObs View
    """,
    "marlvec.connectors.action": """
        ActionPipeline ClipActions DiscretizeActions EpsilonGreedy GaussianNoise MapActions MaskInvalid
        OrnsteinUhlenbeckNoise PadActions ReadOnlyActions RepeatActions ReplaceNaN StickyActions ToNumpy
        UnsquashActions
    """,
    "marlvec.connectors.learner": """
        AddLastObs AddView Fragments GeneralAdvantageEstimation LearnerPipeline NStep PadSequences
        ReturnsToGo Standardize UnpadSequences VTrace ValueFunction regroup
    """,
    "marlvec.errors": """
        MarlvecError
        StateError ClosedError BusyError NothingPendingError NotResetError BrokenError
        ArgumentError ActionError
        RegistryError UnknownEnvError AlreadyRegisteredError
        SerialisationError UnsupportedSpaceError ContractError FetchTimeout
        EpisodesFull EpisodeOver EpisodeCut AnswerTimeout DriverGone EnvsDriven
        ProtocolError RefusedError ConnectionLost
        EnvFault EnvRaised EnvArgumentError EnvContractError EnvTimeout WorkerDied Failure RemoteCause
        RestartQuietly ResourceError CheckpointError MissingExtraError CollectorDied CollectorTimeout
        ContractWarning
    """,
    "marlvec.recording": """
        RecordedDataset RecordedRows Column EpisodeTable
        to_minari from_minari to_vault from_vault to_replay_buffer to_mdp_dataset
    """,
    "marlvec.native": "NativeEntry NativeEnv Rows register_native",
    "marlvec.selfplay": """
        OpponentPool Opponent read_opponents EvictionRule oldest thinned weakest SnapshotRule Every OnWinRate
        SelfPlayMapping Matchmaker Mirror Latest Uniform ByRating Prioritised MainExploiter Mixture
        RatingTracker Game MatchTable WinCount Ratings BradleyTerry Elo OpenSkill
        evaluate_match MatchResult WinRate
        alpha_rank exploitability
    """,
    "marlvec.distributed": "Collectors Accounting CollectorStats Place",
    "marlvec.external": """
        make ExternalVectorEnv EpisodeGateway ExternalEpisode ExternalEnv replay Replay
        Server Client LocalInference Limits make_token find_token
    """,
    "marlvec.interop.cleanrl": "CleanRLVectorEnv",
    "marlvec.interop.gymnasium": "GymnasiumVectorEnv",
    "marlvec.interop.pettingzoo": "AECView ParallelView",
    "marlvec.interop.sb3": "SB3VecEnv only_decisions",
    "marlvec.interop.supersuit": "SuperSuitVecEnv concat_vec_envs_v1 pettingzoo_env_to_vec_env_v1",
}
PUBLIC = [*SURFACE, "marlvec.collect", "marlvec.envs", "marlvec.policies", "marlvec.registry", "marlvec.testing"]


@pytest.mark.parametrize("name", SURFACE)
def test_the_surface_is_this_list(name: str) -> None:
    assert sorted(importlib.import_module(name).__all__) == sorted(SURFACE[name].split())


@pytest.mark.parametrize("name", PUBLIC)
def test_listed_names_exist_once_and_are_marlvecs(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    for exported in module.__all__:
        value = getattr(module, exported)
        # Constants and type aliases do not know their home.
        if (inspect.isclass(value) and value is not Any) or inspect.isfunction(value):
            assert value.__module__.partition(".")[0] == "marlvec", f"{exported} lives in {value.__module__}"


def test_a_name_of_the_root_is_imported_when_it_is_used_from_where_type_checkers_find_it() -> None:
    """The imports of `marlvec/__init__.py`, which do not run, against the table, which does."""
    tree = ast.parse(Path(marlvec.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: node.module for node in imports for alias in node.names}
    used = {name: source for source, names in vars(marlvec)["_SOURCES"].items() for name in names.split()}
    submodules = {"connectors": "marlvec", "errors": "marlvec"}
    assert typed == used | submodules
    assert sorted(typed) == sorted(marlvec.__all__)


def test_the_root_knows_its_names_and_its_submodules_and_nothing_else() -> None:
    assert set(marlvec.__all__) < set(dir(marlvec))
    assert vars(marlvec)["__getattr__"]("selfplay") is importlib.import_module("marlvec.selfplay")
    assert vars(marlvec)["__getattr__"]("make") is importlib.import_module("marlvec.making").make
    for name in ("Colector", "__wrapped__", "_private"):
        assert not hasattr(marlvec, name)
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'marlvec'"):
        exec("from marlvec import nothing")


@pytest.mark.parametrize("name", ["marlvec", "marlvec.connectors", "marlvec.testing"])
def test_unlisted_names_are_not_exported(name: str) -> None:
    module = importlib.import_module(name)
    # Submodules become attributes of their package when something imports them; `annotations` is the future import.
    seen = {key for key, value in vars(module).items() if not key.startswith("_") and not isinstance(value, ModuleType)}
    assert sorted(seen - {"annotations"} - set(module.__all__)) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is_for(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert [path for path, value in _documentable(module) if not (inspect.getdoc(value) or "").strip()] == []


def _documentable(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public classes and functions, and the public methods and properties of the classes; a base's words count."""
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        yield name, value
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            method = inspect.isfunction(member) or isinstance(member, property | staticmethod | classmethod)
            if method and not key.startswith("_"):
                yield f"{name}.{key}", member


# --- `import marlvec`, and all that it names, is light: nothing heavy or optional, nothing printed, nothing started


ROOT = Path(__file__).resolve().parent.parent
# Optional libraries, and the families of envs, which are imported when one of theirs is made.
NEVER = (
    *("torch", "ray", "matplotlib", "pandas", "tensorflow", "jax", "mpe2", "pygame", "pytest", "hypothesis"),
    *("numba", "msgpack", "websockets", "pyarrow"),
)

PROBE = """
import json, os, sys, threading

tried = []

class Watch:
    # First in line: also an import that a `try` would swallow is seen, whether the library is installed or not.
    def find_spec(self, name, path=None, target=None):
        if name in {never!r}:
            tried.append(name)

sys.meta_path.insert(0, Watch())
fds = set(os.listdir("/proc/self/fd"))
{statement}
children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
print(json.dumps({{
    "tried": tried,
    "threads": [thread.name for thread in threading.enumerate()],
    "children": children,
    "fds": sorted(set(os.listdir("/proc/self/fd")) - fds),
}}))
"""


@pytest.mark.mostly_slow("starts programs of its own", quick=8)
@pytest.mark.parametrize(
    "statement",
    [
        "import marlvec",
        "from marlvec import *",
        "import marlvec.connectors",
        "import marlvec.testing",
        "import marlvec.cli",
        "import marlvec.distributed",
        "import marlvec.native, marlvec.vector",
        "import marlvec.external, marlvec.recording",
    ],
)
def test_an_import_brings_and_starts_nothing_it_need_not(statement: str, tmp_path: Path) -> None:
    probe = PROBE.format(statement=statement, never=NEVER)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{probe}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.returncode == 0
    assert json.loads(result.stdout) == {"tried": [], "threads": ["MainThread"], "children": [], "fds": []}


# Imported before a command is known, or while `--help` is answered: they would be most of the time that it takes.
HELP = """
import json, sys
from typer.testing import CliRunner
import marlvec
from marlvec.cli import app
commands = ["rollout", "record", "play", "arena", "serve", "bench", "envs", "connectors"]
codes = [CliRunner().invoke(app, [*command, "-h"]).exit_code for command in [[], *([name] for name in commands)]]
print(json.dumps([codes, [name for name in {heavy!r} if name in sys.modules]]))
"""


@pytest.mark.slow("starts programs of its own")
def test_help_is_answered_without_the_library() -> None:
    heavy = ("numpy", "gymnasium", "pettingzoo", "tree", "marlvec.vector", "marlvec.collect", "marlvec.connectors")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{HELP.format(heavy=heavy)}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [[0] * 9, []]
