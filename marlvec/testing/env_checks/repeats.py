"""Play one seed again: in the same instance, in another, and in one that alternates with another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from marlvec.envs.wrapper_chain import wrapper_chain
from marlvec.testing.env_checks.findings import CHECKS, Findings, Place, first_difference, leaf
from marlvec.testing.env_checks.players.base import Moment, Player
from marlvec.testing.env_checks.shared_state import GENERATORS, SharedState, draw_advice, fingerprint, reachable

__all__ = ["check_repeats", "count_episodes"]

_OWN_PROCESS = (
    'Until then give each env a process of its own: marlvec.make(…, num_envs=N, backend="async", num_workers=N), '
    "with the same N twice"
)
_LOOK_AT = 200  # moments in which shared state is searched; a whole episode of most envs
_REPEATS = frozenset({"seed", "reset", "shared_state"})


class Difference(NamedTuple):
    """The first difference between two plays of one seed."""

    place: Place
    subject: str
    expected: str
    got: str

    def add_to(self, findings: Findings, check: str, change: str = "") -> None:
        findings.note(self.place, check, self.subject, self.expected, self.got, change)


def count_episodes(episodes: int, skip: frozenset[str]) -> int:
    """Return the number of episodes that `check_repeats` plays if it finds no difference; else it plays more."""
    return episodes if skip >= _REPEATS else 4 * episodes


def check_repeats(
    first: Player,
    another: Callable[[], Player | None],
    episodes: int,
    seed: int,
    findings: Findings,
    skip: frozenset[str],
) -> None:
    """Play the episodes of one seed several times, and find out why they differ, if they do.

    `another` makes the player of a second instance, or returns None if that cannot be played.
    """
    trace = first.play(episodes, seed)
    if skip >= _REPEATS:
        return
    # First alone, while no other instance can affect it.
    again = _difference(trace, first.play(episodes, seed), "the same instance, reset again")
    before = _process_states()
    second = another()
    in_init = [name for name, state in _process_states().items() if state != before[name]]
    if second is None:
        if again is not None:
            again.add_to(findings, "reset", _reset_advice(first, episodes, seed))
        return
    beside = None if again else _play_alternately(first, second, trace, episodes, seed, findings)
    if again is None and beside is None:
        if "seed" not in skip:
            _check_another_seed(first, trace, seed, findings)
        return
    apart = _difference(trace, second.play(episodes, seed), "a second instance")
    if apart is not None:
        moved = _shared_state_advice(first, second, second.moments(episodes, seed)) or draw_advice(in_init)
        apart.add_to(findings, "shared_state" if moved else "seed", moved)
    elif again is not None:
        again.add_to(findings, "reset", _reset_advice(first, episodes, seed))
    elif beside is not None:
        moved = _shared_state_advice(first, second, _alternate(first, second, [], episodes, seed))
        beside.add_to(findings, "shared_state", f"{moved or CHECKS['shared_state']}. {_OWN_PROCESS}")


def _process_states() -> dict[str, int | None]:
    return {"np.random": _state_of(np.random), "random": _state_of(random)}


def _reset_advice(player: Player, episodes: int, seed: int) -> str:
    """Return advice that names the generators of the process that the env draws from; ``""`` if it draws from none."""
    kept, before = player.log.findings, _process_states()
    player.log.divert(kept.new())
    for _ in islice(player.moments(episodes, seed), _LOOK_AT):
        pass
    player.log.divert(kept)
    advice = draw_advice(name for name, state in _process_states().items() if state != before[name])
    return f"{CHECKS['reset']}; {advice}" if advice else ""


def _check_another_seed(player: Player, trace: Sequence[Moment], seed: int, findings: Findings) -> None:
    """Play the first episode with another seed and the same actions; a random env must play a different one."""
    for before, now in zip(trace, player.moments(1, seed + 1, actions=seed), strict=False):
        if _difference([before], [now], ""):
            return
    fixed = _fixed_generators(player.env, lambda number: next(player.moments(1, number)), (seed, seed + 1))
    if fixed:
        names = " and ".join(fixed)
        got = f"the same one for the seeds {seed} and {seed + 1}: after both, {names} is in the same state"
        expected = "another episode for another seed, since the env is random"
        change = f"seed {names} with the seed that reset(seed=…) gets, and not with a number of its own"
        Difference(Place(player.name, "reset()"), "the seed", expected, got).add_to(findings, "seed", change)


def _play_alternately(
    first: Player, second: Player, trace: Sequence[Moment], episodes: int, seed: int, findings: Findings
) -> Difference | None:
    """Play the seed in the second instance while the first plays another seed, call by call."""
    moments: list[Moment] = []
    kept = findings.new()
    for player in (first, second):
        player.log.divert(kept)
    for _ in _alternate(first, second, moments, episodes, seed):
        pass
    for player in (first, second):
        player.log.divert(findings)
    difference = _difference(trace, moments, "an instance that takes turns with another one")
    if difference is None:
        findings.update(kept)  # else they may be consequences of shared state
    return difference


def _alternate(first: Player, second: Player, own: list[Moment], episodes: int, seed: int) -> Iterator[Moment]:
    others = first.moments(episodes, seed + 1)
    for moment in second.moments(episodes, seed):
        own.append(moment)
        yield moment
        next(others, None)
    yield from others


def _shared_state_advice(first: Player, second: Player, moments: Iterator[Moment]) -> str:
    """Return the advice on shared state that changes during play; ``""`` if none is found."""
    kept = [player.log.findings for player in (first, second)]
    for player in (first, second):
        player.log.divert(kept[0].new())
    state = SharedState(first.env, second.env)
    for _ in islice(moments, _LOOK_AT):
        state.update()
    for player, findings in zip((first, second), kept, strict=True):
        player.log.divert(findings)
    return state.advice()


def _difference(first: Sequence[Moment], again: Sequence[Moment], source: str) -> Difference | None:
    for before, now in zip(first, again, strict=False):
        if before.facts.keys() != now.facts.keys():
            facts, others = (sorted(moment.facts) for moment in (before, now))
            expected = f"the same for the same seed, {facts}"
            return Difference(now.place, "what it brings", expected, f"{others} from {source}")
        for subject, fact in before.facts.items():
            if changed := first_difference(fact, now.facts[subject]):
                where = leaf(subject, changed.path)
                expected = f"the same for the same seed, {changed.expected}"
                return Difference(now.place, where, expected, f"{changed.got} from {source}")
    if len(first) != len(again):
        longer = max(first, again, key=len)[min(len(first), len(again))]
        expected = f"{len(first)} calls in all for the same seed"
        return Difference(longer.place, "the episodes", expected, f"{len(again)} from {source}")
    return None


def _fixed_generators(env: Any, reset: Callable[[int], object], seeds: tuple[int, int]) -> list[str]:
    """Return the names of random generators, ``"self.rng"``, ``"np.random"``, that resets with two seeds set alike."""
    states = []
    for seed in seeds:
        for generator in _generators(env).values():
            generator.random()  # so a generator that reset() does not set differs after the second reset
        reset(seed)
        states.append({name: _state_of(generator) for name, generator in _generators(env).items()})
    first, second = states
    return [name for name, state in first.items() if state is not None and state == second.get(name)]


def _generators(env: Any) -> dict[str, Any]:
    """Return the generators of an env and the two of the process, by name."""
    parts = reachable([*wrapper_chain(env), getattr(env, "unwrapped", env)]).values()
    held: dict[str, Any] = {path: part for part, path in parts if isinstance(part, GENERATORS)}
    return {**held, "np.random": np.random, "random": random}


def _state_of(generator: Any) -> int | None:
    if isinstance(generator, random.Random):
        return fingerprint(generator)
    if isinstance(generator, np.random.Generator):
        return fingerprint(generator.bit_generator.state)
    return fingerprint(generator.get_state() if hasattr(generator, "get_state") else generator.getstate())
