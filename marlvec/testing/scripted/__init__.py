"""Scripted envs: their data name their origin, so any mix-up on the way to the user shows."""

from marlvec.testing.scripted.faulty import ExitingEnv, FaultyEnv, HangingEnv, RaisingEnv, SlowEnv
from marlvec.testing.scripted.other_apis import KeyedEnv, SingleEnv, TurnEnv
from marlvec.testing.scripted.parallel import CounterEnv, NoOpEnv, SampledEnv, ScriptedParallelEnv
from marlvec.testing.scripted.script import End, Script, ScriptLike, draw_script
from marlvec.testing.scripted.stamp import (
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
