"""One env: the slot contract, and adapters from users' envs to it."""

from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.adapters.gymnasium import GymnasiumAdapter
from marlvec.envs.adapters.joint import JointAdapter
from marlvec.envs.adapters.openspiel import OpenSpielEnv
from marlvec.envs.adapters.parallel import ParallelAdapter
from marlvec.envs.adapters.rllib import RLlibAdapter
from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, AgentGroup, EnvSpec, Info
from marlvec.envs.wrappers.padding import PaddedEnv
from marlvec.envs.wrappers.recording import RecordVideo
from marlvec.envs.wrappers.seed_stream import ClearDeadStepRewards, SeedStream
from marlvec.envs.wrappers.time_limit import TimeLimit

__all__ = [
    "COMMON",
    "AgentGroup",
    "AutoresetMode",
    "EnvSpec",
    "GymnasiumAdapter",
    "Info",
    "JointAdapter",
    "MultiAgentEnv",
    "PaddedEnv",
    "AECAdapter",
    "ParallelAdapter",
    "OpenSpielEnv",
    "ClearDeadStepRewards",
    "RLlibAdapter",
    "RecordVideo",
    "SeedStream",
    "Slot",
    "TimeLimit",
    "adapt",
]
