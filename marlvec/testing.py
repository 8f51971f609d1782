"""Checks of envs and vectorizers, and scripted envs for your own tests: their data say where they come from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec import registry
from marlvec.envs import check
from marlvec.envs.testing import (
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
from marlvec.vector.check import check_vector_env

__all__ = [
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


def check_env(
    env: registry.EnvLike | Any,
    *,
    episodes: int = 3,
    seed: int = 0,
    max_steps: int = 10_000,
    actions: Callable[[Any, Any, NDArray[np.bool_] | None, np.random.Generator], Any] | None = None,
    endless: bool = False,
    ignore_infos: Collection[str] = (),
    picklable: bool = False,
) -> None:
    """Play whole episodes of random legal actions on an env and check all that it says.

    The raw env is played, without marlvec's adapters, which put some things right in silence. Checked are: spaces (the
    same objects on each call, never changed), observations, states and masks (in their space, to dtype, shape and every
    leaf), rewards (finite real numbers), flags (bools), infos (dicts), keys and agents (nobody unknown, no data after
    an end, nobody comes back, who has ended leaves), the end of every episode, and that arguments are left as they
    were. Then all of it is played again with the same seed, by a second env and by the first one, and every
    observation, mask, state, reward, flag and info must be the same to the bit. (Of an object without an equality of
    its own in an info only the type counts.)

    Args:
        env: What builds the env: an id, ``"module:attr"``, a class or a factory, as for `marlvec.make`; called twice,
            and both envs are closed afterwards. Or an env, which then is the only one that plays, and is left open.
        episodes: How many episodes to play; three times in all, or twice if an env was given.
        seed: Seed of the env and of the actions.
        max_steps: Within how many steps every episode must end.
        actions: Chooses the actions instead: ``fn(agent, observation, mask, rng)``, with mask (k,) bool or None; must
            do the same for the same arguments.
        endless: Whether episodes need not end: one that has not after ``max_steps`` steps is left there.
        ignore_infos: Keys of infos, at any depth, that may differ from play to play, e.g. because they tell the time.
        picklable: Whether what builds the env must survive being pickled by value, as it is for a worker process; the
            second env is built from the copy.

    Raises:
        ContractError: The env broke its contract. Says in which call, episode and step (counted from 1), of which
            agent, in which leaf, what was expected and what was got.
        ArgumentError: ``episodes`` or ``max_steps`` is less than 1; ``actions`` gave what is no member of the action
            space; ``picklable`` is asked of an env; or ``env`` stands for no env.
        UnknownEnvError: No such id.
    """
    check.check_env(
        env if check.is_env(env) else registry.resolve(env),
        episodes=episodes,
        seed=seed,
        max_steps=max_steps,
        actions=actions,
        endless=endless,
        ignore_infos=ignore_infos,
        picklable=picklable,
    )
