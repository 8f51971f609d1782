"""Scripted envs: their data say where they come from, so any mix-up on the way to the user shows."""

from marlvec.envs.testing.faulty import ExitingEnv, FaultyEnv, HangingEnv, RaisingEnv, SlowEnv
from marlvec.envs.testing.keyed import KeyedEnv
from marlvec.envs.testing.noop import NoOpEnv
from marlvec.envs.testing.parallel import CounterEnv, ScriptedParallelEnv
from marlvec.envs.testing.sampled import SampledEnv
from marlvec.envs.testing.script import End, Script, ScriptLike, draw_script
from marlvec.envs.testing.single import SingleEnv
from marlvec.envs.testing.stamp import (
    ALIVE_CHECKSUM,
    WIDTH,
    Stamp,
    action_code,
    checksum,
    decode,
    decode_reward,
    draw,
    next_checksum,
    reward_of,
    stamp_space,
)
from marlvec.envs.testing.turns import TurnEnv

__all__ = [
    "ALIVE_CHECKSUM",
    "WIDTH",
    "CounterEnv",
    "End",
    "ExitingEnv",
    "FaultyEnv",
    "HangingEnv",
    "KeyedEnv",
    "NoOpEnv",
    "RaisingEnv",
    "SampledEnv",
    "Script",
    "ScriptLike",
    "ScriptedParallelEnv",
    "SingleEnv",
    "SlowEnv",
    "Stamp",
    "TurnEnv",
    "action_code",
    "checksum",
    "decode",
    "decode_reward",
    "draw",
    "draw_script",
    "next_checksum",
    "reward_of",
    "stamp_space",
]
