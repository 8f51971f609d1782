"""One env: the slot contract, and adapters from users' envs to it."""

from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.adapters.dicts import ParallelAdapter, RLlibAdapter
from marlvec.envs.adapters.gymnasium import GymnasiumAdapter, JointAdapter
from marlvec.envs.adapters.openspiel import OpenSpielEnv
from marlvec.envs.adapters.textarena import TextArenaEnv
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import COMMON, AgentGroup, AutoresetMode, EnvSpec, Info
from marlvec.envs.video import RecordVideo
from marlvec.envs.wrappers import ClearDeadStepRewards, PaddedEnv, SeedStream, TimeLimit

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
    "TextArenaEnv",
    "TimeLimit",
    "adapt",
]
