"""`check_env`: play whole episodes on a raw env and find every breach of its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from marlvec import registry
from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.adapters.gymnasium import GymnasiumAdapter
from marlvec.envs.adapters.joint import JointAdapter
from marlvec.envs.adapters.parallel import ParallelAdapter
from marlvec.envs.adapters.rllib import RLlibAdapter
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.errors import ArgumentError, ContractError, MarlvecError
from marlvec.testing.env_checks.findings import Fault, Finding, Findings, Place, check_names
from marlvec.testing.env_checks.players.aec import TurnPlayer
from marlvec.testing.env_checks.players.base import Player
from marlvec.testing.env_checks.players.by_agent import KeyedPlayer, ParallelPlayer
from marlvec.testing.env_checks.players.gymnasium import JointPlayer, SinglePlayer
from marlvec.testing.env_checks.players.slot import SlotPlayer, WorldEnv
from marlvec.testing.env_checks.repeats import check_repeats, count_episodes
from marlvec.testing.episodes_bar import episodes_bar
from marlvec.vector.pools.jax.world import JaxWorld

__all__ = ["check_env"]

_PLAYERS: tuple[tuple[type[MultiAgentEnv], Callable[[Any, int, Findings], Player]], ...] = (
    (ParallelAdapter, ParallelPlayer),
    (AECAdapter, TurnPlayer),
    (JointAdapter, JointPlayer),
    (GymnasiumAdapter, SinglePlayer),
    (RLlibAdapter, KeyedPlayer),
    (MultiAgentEnv, SlotPlayer),
)
"""The player of envs with each adapter; envs without an adapter use the last."""


def check_env(
    env: registry.EnvLike,
    *,
    episodes: int = 3,
    seed: int = 0,
    max_steps: int = 10_000,
    skip: Iterable[str] | str = (),
    raise_first: bool = True,
    progress: bool = False,
) -> list[Finding]:
    """Play whole episodes of random legal actions on an env, and find all its faults in one run.

    The raw env is played, without marlvec's adapters, which correct some things silently. The episodes of one seed are
    played by one instance, by it again, and by a second instance that alternates with the first, call by call; every
    observation, mask, state, reward and flag must be equal bit for bit. The checks, most serious first:

    ================  ================================================================================================
    ``form``          the env has a form that `marlvec.make` accepts
    ``runs``          ``reset()`` and ``step()`` raise no error
    ``results``       they return tuples of the right length, with dicts in them; the old API (no infos from
                      ``reset()``, 4 values from ``step()``) is a minor finding
    ``shared_state``  two alternating instances do not affect each other: attributes of the class, globals of the
                      module, ``np.random`` and ``random``, shared objects
    ``seed``          the same seed gives the same episodes in a second instance; if the env is random, another seed
                      gives others
    ``reset``         the same seed gives them in the same instance, reset again
    ``life``          an ended agent leaves, sends no more data and does not return; no agent leaves without a flag
    ``agents``        agents are in ``possible_agents``, once each
    ``keys``          every dict has exactly the agents of the step as keys
    ``ends``          every episode ends within ``max_steps``
    ``rewards``       rewards are finite real numbers
    ``rewards_once``  a turn-based env shows each reward once, then clears it; ``last()`` returns their sum
    ``flags``         terminations and truncations are bools
    ``masks``         action masks fit the action space, and allow at least one
    ``observations``  observations are in their space, leaf by leaf, to dtype and shape
    ``state``         global states are in ``state_space``
    ``spaces``        spaces are the same objects at each call, and never change
    ``infos``         infos are dicts (contents are not compared)
    ``arguments``     actions and options are not modified
    ================  ================================================================================================

    A fault in every step, or of every agent, is reported once, where first seen. After a fault that leaves the set of
    agents unclear, checks that depend on it are skipped until the next episode.

    Args:
        env: Builds the env: an id, ``"module:attr"``, ``"FILE.py:attr"``, a class or a factory, as for
            `marlvec.make`.
        episodes: Number of episodes, each played four or five times in all.
        seed: Seed of the env and of the actions.
        max_steps: Most steps that an episode may take.
        skip: Names of checks to leave out.
        raise_first: Whether to raise at the end if there are findings, or to return them.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        The findings, most serious first; each names the place, what was expected and got, and what to change.

    Raises:
        ContractError: The env broke its contract; lists all findings.
        ArgumentError: ``episodes`` or ``max_steps`` is less than 1; ``skip`` has an unknown name; or
            ``env`` is an env, not a builder.
        UnknownEnvError: The id is unknown.
    """
    build = registry.resolve(env)
    for what, number in (("episodes", episodes), ("max_steps", max_steps)):
        if number < 1:
            raise ArgumentError(f"{what}: expected at least 1, got {number}")
    skipped = check_names(skip)
    findings = Findings(skipped)
    played: list[Any] = []

    def player() -> Player | None:
        try:
            one = build()
        except MarlvecError:
            raise
        except Exception as error:
            Place(build.entry.id, "__init__()").raised(error)
        if isinstance(one, JaxWorld):
            try:
                one = WorldEnv(one)
            except ContractError as error:
                expected, change = "one that keeps the protocol of JaxWorld", "see marlvec.JaxWorld"
                Place(one.name, "__init__()").fault("form", "the world", expected, str(error), change)
        if any(one is other for other in played):
            _refuse_same(type(one).__name__, findings)
            return None
        played.append(one)
        made = _player_of(one, max_steps, findings)
        made.watch = watch
        return made

    calls = done = 0

    def watch(over: bool) -> None:
        nonlocal calls, done
        calls, done = calls + 1, done + over
        show(done, calls)

    with episodes_bar(count_episodes(episodes, skipped), "calls", shown=progress) as show:
        try:
            try:
                first = player()
                if first is not None:
                    check_repeats(first, player, episodes, seed, findings, skipped)
            except Fault as fault:  # before any env was played
                findings.add(fault)
            except MarlvecError:
                raise
            except Exception as error:  # of the check's code: what was found until then is reported with it
                findings.add(Place(build.entry.id, "reset(seed=…)").stopped(error))
        finally:
            for one in played:
                if callable(close := getattr(one, "close", None)):
                    close()
    found = findings.in_order()
    if found and raise_first:
        raise ContractError(_listed(found))
    return found


def _listed(found: list[Finding]) -> str:
    if len(found) == 1:
        return str(found[0])
    return "\n".join(
        [f"{len(found)} findings, serious ones first", *(f"{i}. {one.check}: {one}" for i, one in enumerate(found, 1))]
    )


def _refuse_same(name: str, findings: Findings) -> None:
    change = "build the env in the factory, so that each call makes one: lambda: MyEnv(…), or the class itself"
    place = Place(name, "__init__()")
    findings.note(place, "shared_state", "the factory", "a new env from each call", "the very same one", change)


def _player_of(env: Any, max_steps: int, findings: Findings) -> Player:
    # The adapter gives the env's form and calling convention; the env inside it is played.
    try:
        adapter = adapt(env)
    except ContractError as error:
        got = f"{type(error).__name__}: {error}"
        Place(type(env).__name__, "__init__()").fault("form", "the env", "one that make() takes", got)
    return next(make for kind, make in _PLAYERS if isinstance(adapter, kind))(adapter, max_steps, findings)
