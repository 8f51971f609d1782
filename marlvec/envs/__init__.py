"""One env: the slot contract, and adapters that bring users' envs to it."""

from marlvec.envs.adapt import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.gymnasium import GymnasiumEnv
from marlvec.envs.padded import Padded
from marlvec.envs.pettingzoo import PettingZooParallelEnv
from marlvec.envs.recording import RecordVideo
from marlvec.envs.rllib import RLlibEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, AgentGroup, EnvSpec, Info
from marlvec.envs.time_limit import TimeLimit
from marlvec.envs.turns import PettingZooAECEnv

__all__ = [
    "COMMON",
    "AgentGroup",
    "EnvSpec",
    "GymnasiumEnv",
    "Info",
    "MultiAgentEnv",
    "Padded",
    "PettingZooAECEnv",
    "PettingZooParallelEnv",
    "RLlibEnv",
    "RecordVideo",
    "Slot",
    "TimeLimit",
    "adapt",
]
