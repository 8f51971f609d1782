"""Checks of envs and vectorizers, and scripted envs for your own tests: their data say where they come from."""

from __future__ import annotations

from marlvec import registry
from marlvec.testing import check_env as check
from marlvec.testing.check_connector import check_connector
from marlvec.testing.check_vector_env import check_vector_env
from marlvec.testing.scripted import (
    ALIVE_CHECKSUM,
    WIDTH,
    CounterEnv,
    End,
    ExitingEnv,
    FaultyEnv,
    HangingEnv,
    KeyedEnv,
    NoOpEnv,
    RaisingEnv,
    SampledEnv,
    Script,
    ScriptedParallelEnv,
    ScriptLike,
    SingleEnv,
    SlowEnv,
    Stamp,
    TurnEnv,
    action_code,
    checksum,
    decode,
    decode_reward,
    draw,
    draw_script,
    next_checksum,
    reward_of,
    stamp_space,
)

__all__ = [
    "check_connector",
    "check_env",
    "check_vector_env",
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


def check_env(env: registry.EnvLike, *, episodes: int = 3, seed: int = 0, max_steps: int = 10_000) -> None:
    """Play whole episodes of random legal actions on an env and check all that it says.

    The raw env is played, without marlvec's adapters, which put some things right in silence. Checked are: spaces (the
    same objects on each call, never changed), observations, states and masks (in their space, to dtype, shape and every
    leaf), rewards (finite real numbers), flags (bools), infos (dicts), keys and agents (nobody unknown, no data after
    an end, nobody comes back, who has ended leaves), the end of every episode, and that arguments are left as they
    were. Then all of it is played again with the same seed, by a second env and by the first one, and every
    observation, mask, state, reward and flag must be the same to the bit.

    Args:
        env: What builds the env: an id, ``"module:attr"``, a class or a factory, as for `marlvec.make`.
        episodes: How many episodes to play; three times in all.
        seed: Seed of the env and of the actions.
        max_steps: Within how many steps every episode must end.

    Raises:
        ContractError: The env broke its contract. Says in which call, episode and step (counted from 1), of which
            agent, in which leaf, what was expected and what was got.
        ArgumentError: ``episodes`` or ``max_steps`` is less than 1; or ``env`` is an env and builds none.
        UnknownEnvError: No such id.
    """
    check.check_env(registry.resolve(env), episodes=episodes, seed=seed, max_steps=max_steps)
