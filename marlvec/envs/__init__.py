"""One env: the slot contract, and adapters that bring users' envs to it."""

from marlvec.envs.adapters.aec import PettingZooAECEnv
from marlvec.envs.adapters.detect import adapt
from marlvec.envs.adapters.gymnasium import GymnasiumEnv
from marlvec.envs.adapters.parallel import PettingZooParallelEnv
from marlvec.envs.adapters.rllib import RLlibEnv
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, AgentGroup, EnvSpec, Info
from marlvec.envs.wrappers.padding import Padded
from marlvec.envs.wrappers.recording import RecordVideo
from marlvec.envs.wrappers.time_limit import TimeLimit

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
