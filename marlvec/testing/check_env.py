"""`check_env`: plays whole episodes on a raw env and finds all that breaks its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
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
from marlvec.testing.env_checks.findings import Fault, Finding, Findings, check_names
from marlvec.testing.env_checks.players.aec import TurnPlayer
from marlvec.testing.env_checks.players.base import Player
from marlvec.testing.env_checks.players.gymnasium import SinglePlayer
from marlvec.testing.env_checks.players.joint import JointPlayer
from marlvec.testing.env_checks.players.parallel import ParallelPlayer
from marlvec.testing.env_checks.players.rllib import KeyedPlayer
from marlvec.testing.env_checks.players.slot import SlotPlayer
from marlvec.testing.env_checks.repeats import check_repeats, count_episodes
from marlvec.testing.env_checks.report import Place
from marlvec.testing.env_checks.world_env import WorldEnv
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
"""Who plays an env that has this adapter; one without an adapter is of the last kind."""


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
    """Play whole episodes of random legal actions on an env, and find all that is wrong in one run.

    The raw env is played, without marlvec's adapters, which put some things right in silence. The episodes of one seed
    are played by one instance, by it again, and by a second one that takes turns with the first, call by call; every
    observation, mask, state, reward and flag must be the same to the bit. Each check has a name; the most serious
    stands first:

    ================  ================================================================================================
    ``form``          it is an env in one of the forms that `marlvec.make` takes
    ``runs``          ``reset()`` and ``step()`` raise nothing
    ``results``       they return tuples of the right length, with dicts in them; the old API (no infos from
                      ``reset()``, 4 values from ``step()``) is a minor finding
    ``shared_state``  two instances that take turns do not disturb each other: attributes of the class, globals of the
                      module, ``np.random`` and ``random``, objects that both hold
    ``seed``          the same seed brings the same episodes in a second instance; if the env is random, another seed
                      brings others
    ``reset``         the same seed brings them in the same instance, reset again
    ``life``          who has ended leaves, brings no more data and does not come back; no agent leaves without a flag
    ``agents``        agents are those of ``possible_agents``, once each
    ``keys``          every dict names the agents that are there, and no other
    ``ends``          every episode ends within ``max_steps``
    ``rewards``       rewards are finite real numbers
    ``rewards_once``  a turn-based env shows each reward once: none is left standing, and ``last()`` says their sum
    ``flags``         terminations and truncations are bools
    ``masks``         action masks fit the action space, and leave something to do
    ``observations``  observations are in their space, leaf by leaf, to dtype and shape
    ``state``         global states are in ``state_space``
    ``spaces``        spaces are the same objects on each call, and never change
    ``infos``         infos are dicts (what is in them is not compared: they may say the time)
    ``arguments``     actions and options are left as they were given
    ================  ================================================================================================

    A fault that is there in every step, or for every agent, is found once, where it was first seen. After one that
    leaves in doubt which agents there are, what may only follow from it is left out until the next episode.

    Args:
        env: What builds the env: an id, ``"module:attr"``, ``"FILE.py:attr"``, a class or a factory, as for
            `marlvec.make`.
        episodes: How many episodes to play; four times in all, or five.
        seed: Seed of the env and of the actions.
        max_steps: Within how many steps every episode must end.
        skip: Names of checks to leave out.
        raise_first: Raise at the end, if there are findings; False returns them.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        The findings, serious ones first: each says where, what was expected and got, and what to change.

    Raises:
        ContractError: The env broke its contract; lists all findings.
        ArgumentError: ``episodes`` or ``max_steps`` is less than 1; ``skip`` names no check; or ``env`` is an env and
            builds none.
        UnknownEnvError: No such id.
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

    with _progress_bar(count_episodes(episodes, skipped), progress) as watch:
        try:
            try:
                first = player()
                if first is not None:
                    check_repeats(first, player, episodes, seed, findings, skipped)
            except Fault as fault:  # before there was anything to play
                findings.add(fault)
        finally:
            for one in played:
                if callable(close := getattr(one, "close", None)):
                    close()
    found = findings.in_order()
    if found and raise_first:
        raise ContractError(_listed(found))
    return found


@contextmanager
def _progress_bar(total: int, progress: bool) -> Iterator[Callable[[bool], None]]:
    """Yields what is called after each call of an env, with whether its episode is over."""
    if not progress:
        yield lambda over: None
        return
    from marlvec.collect.progress_bar import ProgressBar  # here, since rich takes its time

    calls = done = 0
    began = perf_counter()

    def watch(over: bool) -> None:
        nonlocal calls, done
        calls, done = calls + 1, done + over
        bar.show(min(done, total), speed=calls / max(perf_counter() - began, 1e-9))

    with ProgressBar("check", "episodes", total, speed_unit="calls") as bar:
        yield watch


def _listed(found: list[Finding]) -> str:
    if len(found) == 1:
        return str(found[0])
    return "\n".join(
        [f"{len(found)} findings, serious ones first", *(f"{i}. {one.check}: {one}" for i, one in enumerate(found, 1))]
    )


def _refuse_same(name: str, findings: Findings) -> None:
    change = "build the env in the factory, so that each call makes one: lambda: MyEnv(…), or the class itself"
    try:
        Place(name, "__init__()").fault(
            "shared_state", "the factory", "a new env from each call", "the very same one", change
        )
    except Fault as fault:
        findings.add(fault)


def _player_of(env: Any, max_steps: int, findings: Findings) -> Player:
    # An adapter says which form the env has, and how it is called; the env inside is what is played.
    try:
        adapter = adapt(env)
    except ContractError as error:
        got = f"{type(error).__name__}: {error}"
        Place(type(env).__name__, "__init__()").fault("form", "the env", "one that make() takes", got)
    return next(make for kind, make in _PLAYERS if isinstance(adapter, kind))(adapter, max_steps, findings)
