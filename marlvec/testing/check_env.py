"""`check_env`: plays whole episodes on a raw env and checks that it keeps its contract."""

from __future__ import annotations

from typing import Any

from marlvec import registry
from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.detect import adapt
from marlvec.envs.adapters.gymnasium import GymnasiumAdapter
from marlvec.envs.adapters.parallel import ParallelAdapter
from marlvec.envs.env import MultiAgentEnv
from marlvec.errors import ArgumentError
from marlvec.testing.env_checks.aec import TurnPlayer
from marlvec.testing.env_checks.gymnasium import SinglePlayer
from marlvec.testing.env_checks.parallel import ParallelPlayer
from marlvec.testing.env_checks.player import Player, check_equal
from marlvec.testing.env_checks.rllib import KeyedPlayer
from marlvec.testing.env_checks.slot import SlotPlayer

__all__ = ["check_env"]


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
    build = registry.resolve(env)
    for what, number in (("episodes", episodes), ("max_steps", max_steps)):
        if number < 1:
            raise ArgumentError(f"{what}: expected at least 1, got {number}")
    first_env = build()
    second_env: Any = None
    try:
        first = _player_of(first_env, max_steps)
        trace = first.play(episodes, seed)
        second_env = build()
        second = _player_of(second_env, max_steps)
        check_equal(trace, second.play(episodes, seed), "a second instance")
        check_equal(trace, first.play(episodes, seed), "the same instance, reset again")
    finally:
        for played in (first_env, second_env):
            if callable(close := getattr(played, "close", None)):
                close()


def _player_of(env: Any, max_steps: int) -> Player:
    # An adapter says which form the env has, and how it is called; the env inside is what is played.
    adapter: MultiAgentEnv = adapt(env)
    if not isinstance(adapter, Adapter):
        return SlotPlayer(adapter, max_steps)
    raw, name = adapter.env, adapter.name
    if isinstance(adapter, ParallelAdapter):
        return ParallelPlayer(raw, name, max_steps)
    if isinstance(adapter, AECAdapter):
        return TurnPlayer(raw, name, max_steps)
    if isinstance(adapter, GymnasiumAdapter):
        return SinglePlayer(raw, name, max_steps)
    return KeyedPlayer(raw, name, list(adapter.ids), max_steps)
