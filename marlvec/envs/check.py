"""Whether an env keeps to its contract: whole episodes on the raw env, strictly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import cloudpickle

from marlvec.envs.adapt import adapt
from marlvec.envs.adapter import Adapter
from marlvec.envs.checks.keyed import KeyedPlayer
from marlvec.envs.checks.parallel import ParallelPlayer
from marlvec.envs.checks.place import Place
from marlvec.envs.checks.player import Player
from marlvec.envs.checks.rules import Choose, Rules
from marlvec.envs.checks.single import SinglePlayer
from marlvec.envs.checks.slots import SlotPlayer
from marlvec.envs.checks.trace import check_equal
from marlvec.envs.checks.turns import TurnPlayer
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.factory import EnvFactory
from marlvec.envs.gymnasium import GymnasiumEnv
from marlvec.envs.pettingzoo import PettingZooParallelEnv
from marlvec.envs.turns import PettingZooAECEnv
from marlvec.errors import ArgumentError, ContractError

__all__ = ["check_env", "is_env"]

_AGAIN = "the same instance, reset again"


def check_env(
    env: Any,
    *,
    episodes: int = 3,
    seed: int = 0,
    max_steps: int = 10_000,
    actions: Choose | None = None,
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

    The first reset of a play is seeded and has ``options=None``; the others have ``seed=None`` and ``options={}``.

    Args:
        env: What builds the env, in any form that `marlvec.make` takes: called twice, and both are closed afterwards.
            Or an env, which then is the only one that plays, and is left open.
        episodes: How many episodes to play; three times in all, or twice if an env was given.
        seed: Seed of the env and of the actions.
        max_steps: Within how many steps every episode must end.
        actions: Chooses the actions instead: ``fn(agent, observation, mask, rng)``, with mask (k,) bool or None; must
            do the same for the same arguments.
        endless: Whether episodes need not end: one that has not after ``max_steps`` steps is left there.
        ignore_infos: Keys of infos, at any depth, that may differ from play to play, e.g. because they tell the time.
        picklable: Whether ``env`` must survive being pickled by value, as it is for a worker process; the second env
            is built from the copy.

    Raises:
        ContractError: The env broke its contract. Says in which call, episode and step (counted from 1), of which
            agent, in which leaf, what was expected and what was got.
        ArgumentError: ``episodes`` or ``max_steps`` is less than 1; ``actions`` gave what is no member of the action
            space; ``picklable`` is asked of an env.
    """
    for what, number in (("episodes", episodes), ("max_steps", max_steps)):
        if number < 1:
            raise ArgumentError(f"{what}: expected at least 1, got {number}")
    rules = Rules(max_steps, endless, actions, frozenset(ignore_infos))
    if not is_env(env):
        _check_two(env, _copy(env) if picklable else env, rules, episodes, seed)
        return
    if picklable:
        raise ArgumentError(f"picklable: expected what builds envs, got an env of class {type(env).__name__}")
    player = _player_of(env, rules)
    check_equal(player.play(episodes, seed), player.play(episodes, seed), _AGAIN)


def is_env(env: Any) -> bool:
    """Whether this is an env, not what builds one."""
    return isinstance(env, MultiAgentEnv) or (callable(getattr(env, "step", None)) and not isinstance(env, type))


def _check_two(build: Callable[[], Any], build_second: Callable[[], Any], rules: Rules, episodes: int, seed: int) -> None:
    """Play the first env, then a second one, then the first one again."""
    built: list[Any] = []
    try:
        built.append(build())
        first = _player_of(built[0], rules)
        trace = first.play(episodes, seed)
        built.append(build_second())
        check_equal(trace, _player_of(built[1], rules).play(episodes, seed), "a second instance")
        check_equal(trace, first.play(episodes, seed), _AGAIN)
    except BaseException:
        _close_all(built)  # what went wrong first is what the caller must hear
        raise
    if fault := _close_all(built):
        Place(first.name, "close()").broken("the call", "no exception", f"{type(fault).__name__}: {fault}")


def _close_all(envs: Iterable[Any]) -> Exception | None:
    """Close every env; return the first exception in doing so."""
    faults: list[Exception] = []
    for env in envs:
        if callable(close := getattr(env, "close", None)):
            try:
                close()
            except Exception as error:
                faults.append(error)
    return faults[0] if faults else None


def _copy(build: Callable[[], Any]) -> Callable[[], Any]:
    """What builds an env, as it arrives in a worker process."""
    try:
        copied: Callable[[], Any] = cloudpickle.loads(cloudpickle.dumps(build))
    except Exception as error:
        name = build.entry.id if isinstance(build, EnvFactory) else getattr(build, "__qualname__", type(build).__name__)
        raise ContractError(
            f"{name}: what builds the env: expected that it can be pickled, got {type(error).__name__}: {error}"
        ) from error
    return copied


def _player_of(env: Any, rules: Rules) -> Player:
    # An adapter says which form the env has, and how it is called; the env inside is what is played.
    adapter: MultiAgentEnv = adapt(env)
    if not isinstance(adapter, Adapter):
        return SlotPlayer(adapter, rules)
    raw, name = adapter.env, adapter.name
    if isinstance(adapter, PettingZooParallelEnv):
        return ParallelPlayer(raw, name, rules)
    if isinstance(adapter, PettingZooAECEnv):
        return TurnPlayer(raw, name, rules)
    if isinstance(adapter, GymnasiumEnv):
        return SinglePlayer(raw, name, rules)
    return KeyedPlayer(raw, name, list(adapter.ids), rules)
