"""`check_env`: play whole episodes on a raw env and find every breach of its contract.

One seed is played again in the same instance, in another, and beside another; and state that instances share is found.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from marlvec import registry
from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.adapters.base import Adapter
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.user_env import wrapper_chain
from marlvec.errors import ArgumentError, ContractError, MarlvecError
from marlvec.testing.findings import (
    CHECKS,
    Finding,
    Findings,
    PlayedCall,
    RuleBroken,
    check_names,
    episodes_bar,
    first_difference,
    leaf,
)
from marlvec.testing.players import AdapterPlayer, PlayedStep, Player, SlotPlayer
from marlvec.testing.players_turns import TurnPlayer, WorldEnv
from marlvec.vector.pools.jax import JaxWorld

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
"""Classes of random generators."""
_LIBRARIES = ("abc", "builtins", "collections", "enum", "marlvec", "numpy", "pygame", "torch", "typing")
_BASES = ("gymnasium.core", "gymnasium.spaces", "gymnasium.utils", "gymnasium.wrappers", "pettingzoo.utils")
_MOST_OBJECTS, _MOST_BYTES, _MOST_PLACES = 5_000, 10_000_000, 3

_PROCESS = {
    "np.random": "it draws from np.random, the one generator of the whole process: draw from self.np_random instead of "
    "the functions of numpy.random, and set self.np_random = np.random.default_rng(seed) in reset(seed=…)",
    "random": "it draws from the module random, the one generator of the whole process: draw from self.random instead, "
    "and set self.random = random.Random(seed) in reset(seed=…)",
}
"""Advice on draws from each generator that a process has only once."""


def draw_advice(names: Iterable[str]) -> str:
    """Return the advice on draws from these generators, ``"np.random"`` and ``"random"``; ``""`` without any."""
    return "; ".join(_PROCESS[name] for name in names)


class SharedState:
    """State that two instances of an env share, and which of it changes."""

    def __init__(self, first: Any, second: Any) -> None:
        self._places: dict[str, Callable[[], Any]] = {}
        self._advice: dict[str, str] = {}
        self._moved: dict[str, bool] = {}
        self._generators: set[str] = set()
        layers = list(wrapper_chain(first))
        held = reachable([*layers, getattr(first, "unwrapped", first)])
        others = reachable([*wrapper_chain(second), getattr(second, "unwrapped", second)])
        self._add_globals()
        kinds = {kind for one, _ in held.values() for kind in type(one).__mro__ if not _is_library(kind.__module__)}
        for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
            self._add_data(kind, f"{kind.__qualname__}.", f"{kind.__qualname__}.%s is an attribute of the class")
        found = [module for kind in kinds if (module := sys.modules.get(kind.__module__)) is not None]
        used = {near.__name__: near for module in found for near in _near(module)}
        for name in sorted(used):
            self._add_data(used[name], f"{name}:", f"%s is a global of the module {name}")
        for key, (one, path) in held.items():
            if key in others and path and isinstance(one, (list, dict, set, bytearray, np.ndarray, *GENERATORS)):
                self._add(
                    path,
                    partial(_same, one),
                    f"{path} is the same object in both instances (a default argument, or made outside of the class?): "
                    f"make one for each instance, in __init__() or reset()",
                )
        self._before = {name: fingerprint(read()) for name, read in self._places.items()}

    def update(self) -> None:
        """Record what changed since the last call."""
        for name, read in self._places.items():
            if self._moved.get(name):
                continue
            now = fingerprint(read())
            if now is not None and now != self._before[name]:
                self._moved[name] = True

    def advice(self) -> str:
        """Return what to change; ``""`` if nothing changed."""
        # Generators first: a changed counter may be mere statistics.
        names = sorted(self._moved, key=lambda name: name not in self._generators)
        return "; ".join(self._advice[name] for name in names[:_MOST_PLACES])

    def _add(self, name: str, read: Callable[[], Any], advice: str) -> None:
        self._places[name], self._advice[name] = read, advice
        if isinstance(read(), GENERATORS):
            self._generators.add(name)

    def _add_globals(self) -> None:
        self._generators |= _PROCESS.keys()
        self._add("np.random", np.random.get_state, _PROCESS["np.random"])
        self._add("random", random.getstate, _PROCESS["random"])

    def _add_data(self, owner: Any, prefix: str, text: str) -> None:
        for name, value in list(vars(owner).items()):
            if not name.startswith("__") and _is_data(value):
                self._add(
                    f"{prefix}{name}",
                    lambda name=name: vars(owner).get(name),  # type: ignore[misc]
                    f"{text % name}, which all instances share, and changes while they play: {_fix(name, value)}",
                )


def _near(module: ModuleType) -> Iterator[ModuleType]:
    """Yield a module, and the modules of its own package or folder that it imports from."""
    yield module
    for value in list(vars(module).values()):
        if not isinstance(value, (ModuleType, type, FunctionType)):
            continue
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
        other = sys.modules.get(name)
        if other is None or _is_library(name):
            continue
        own_package = name.partition(".")[0] == module.__name__.partition(".")[0]
        if own_package or (_folder(other) and _folder(other) == _folder(module)):
            yield other


def _folder(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else None


def _same(value: Any) -> Any:
    return value


def _fix(name: str, value: Any) -> str:
    if isinstance(value, random.Random):
        return f"set self.{name} = random.Random(seed) in reset(seed=…)"
    if isinstance(value, GENERATORS):
        return f"set self.{name} = np.random.default_rng(seed) in reset(seed=…)"
    return f"set self.{name} in __init__() or reset()"


def reachable(roots: list[Any]) -> dict[int, tuple[Any, str]]:
    """Return the objects that an env holds, by id, each with its path; the env's own layers first."""
    found: dict[int, tuple[Any, str]] = {}
    queue: list[tuple[Any, str]] = [(root, "") for root in roots]
    while queue and len(found) < _MOST_OBJECTS:
        one, path = queue.pop(0)
        if id(one) in found:
            continue
        found[id(one)] = one, path
        queue += [(part, where) for part, where in _parts(one, path) if _is_data(part)]
    return found


def _parts(one: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(one, dict):
        yield from ((part, f"{path}[{key!r}]") for key, part in list(one.items())[:100])
    elif isinstance(one, (list, tuple, set)):
        yield from ((part, f"{path}[{i}]") for i, part in enumerate(list(one)[:100]))
    elif not _is_library(type(one).__module__) or not path:
        yield from ((part, f"{path or 'self'}.{name}") for name, part in list(getattr(one, "__dict__", {}).items()))


def _is_library(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _LIBRARIES or module.startswith(_BASES)


def _is_data(value: Any) -> bool:
    if isinstance(value, (type, ModuleType, property, staticmethod, classmethod)) or callable(value):
        return False
    return not hasattr(type(value), "__get__")


def fingerprint(value: Any) -> int | None:
    """Return a number that changes with the value; None if it cannot be computed."""
    if isinstance(value, random.Random):
        try:
            value = value.getstate()
        except NotImplementedError:  # random.SystemRandom has no state
            return None
    if isinstance(value, np.ndarray) and value.nbytes > _MOST_BYTES:
        return None
    if isinstance(value, (list, dict, set)) and len(value) > _MOST_BYTES // 100:
        return None
    try:
        return hash(pickle.dumps(value, protocol=5))
    except Exception:  # not picklable: other places must show a change
        return None


_OWN_PROCESS = (
    'Until then give each env a process of its own: marlvec.make(…, num_envs=N, backend="async", num_workers=N), '
    "with the same N twice"
)
_LOOK_AT = 200  # moments in which shared state is searched; a whole episode of most envs
_MORE_SEEDS = 40  # begun in instances that have played: some envs depend on that in one of 20 seeds
_REPEATS = frozenset({"seed", "reset", "shared_state"})


class EnvDifference(NamedTuple):
    """The first difference between two plays of one seed."""

    place: PlayedCall
    subject: str
    expected: str
    got: str

    def add_to(self, findings: Findings, check: str, change: str = "") -> None:
        findings.add_fault(self.place, check, self.subject, self.expected, self.got, change)


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
        if "reset" not in skip:
            _check_more_seeds(first, second, range(seed + 1, seed + 1 + min(_MORE_SEEDS, len(trace) // 3)), findings)
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


def _check_more_seeds(first: Player, second: Player, seeds: range, findings: Findings) -> None:
    """Begin an episode of each seed in two instances that were left differently; both must begin alike.

    For envs in which only a few seeds depend on what was played before, as in lbforaging 2.0, whose players' last cells
    are still taken while the new players are placed.
    """
    kept = [player.log.findings for player in (first, second)]
    for player in (first, second):
        player.log.divert(kept[0].new())  # what these resets break was reported before
    found = None
    for seed in seeds:
        here = next(first.moments(1, seed))
        next(second.moments(1, seed + _MORE_SEEDS))
        there = next(second.moments(1, seed))
        source = f"a second instance, which had played other episodes before (seed {seed})"
        found = found or _difference([here], [there], source)
    for player, own in zip((first, second), kept, strict=True):
        player.log.divert(own)
    if found is not None:
        found.add_to(findings, "reset")


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


def _check_another_seed(player: Player, trace: Sequence[PlayedStep], seed: int, findings: Findings) -> None:
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
        EnvDifference(PlayedCall(player.name, "reset()"), "the seed", expected, got).add_to(findings, "seed", change)


def _play_alternately(
    first: Player, second: Player, trace: Sequence[PlayedStep], episodes: int, seed: int, findings: Findings
) -> EnvDifference | None:
    """Play the seed in the second instance while the first plays another seed, call by call."""
    moments: list[PlayedStep] = []
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


def _alternate(first: Player, second: Player, own: list[PlayedStep], episodes: int, seed: int) -> Iterator[PlayedStep]:
    others = first.moments(episodes, seed + 1)
    for moment in second.moments(episodes, seed):
        own.append(moment)
        yield moment
        next(others, None)
    yield from others


def _shared_state_advice(first: Player, second: Player, moments: Iterator[PlayedStep]) -> str:
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


def _difference(first: Sequence[PlayedStep], again: Sequence[PlayedStep], source: str) -> EnvDifference | None:
    for before, now in zip(first, again, strict=False):
        if before.facts.keys() != now.facts.keys():
            facts, others = (sorted(moment.facts) for moment in (before, now))
            expected = f"the same for the same seed, {facts}"
            return EnvDifference(now.place, "what it brings", expected, f"{others} from {source}")
        for subject, fact in before.facts.items():
            if changed := first_difference(fact, now.facts[subject]):
                where = leaf(subject, changed.path)
                expected = f"the same for the same seed, {changed.expected}"
                return EnvDifference(now.place, where, expected, f"{changed.got} from {source}")
    if len(first) != len(again):
        longer = max(first, again, key=len)[min(len(first), len(again))]
        expected = f"{len(first)} calls in all for the same seed"
        return EnvDifference(longer.place, "the episodes", expected, f"{len(again)} from {source}")
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


_PLAYERS: tuple[tuple[type[MultiAgentEnv], Callable[[Any, int, Findings], Player]], ...] = (
    (AECAdapter, TurnPlayer),
    (Adapter, AdapterPlayer),
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

    Marlvec's adapters correct some things silently; here they report them, too. The episodes of one seed are played by
    one instance, by it again, and by a second instance that alternates with the first, call by call; every
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
    ``reset``         the same seed gives them in the same instance, reset again; and up to 40 more seeds begin alike
                      in instances that have played different episodes
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
            PlayedCall(build.entry.id, "__init__()").raised(error)
        if isinstance(one, JaxWorld):
            try:
                one = WorldEnv(one)
            except ContractError as error:
                expected, change = "one that keeps the protocol of JaxWorld", "see marlvec.JaxWorld"
                PlayedCall(one.name, "__init__()").fault("form", "the world", expected, str(error), change)
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
            except RuleBroken as fault:  # before any env was played
                findings.add(fault)
            except MarlvecError:
                raise
            except Exception as error:  # of the check's code: what was found until then is reported with it
                findings.add(PlayedCall(build.entry.id, "reset(seed=…)").stopped(error))
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
    place = PlayedCall(name, "__init__()")
    findings.add_fault(place, "shared_state", "the factory", "a new env from each call", "the very same one", change)


def _player_of(env: Any, max_steps: int, findings: Findings) -> Player:
    # The adapter gives the env's form and calling convention; the env inside it is played.
    try:
        adapter = adapt(env)
    except ContractError as error:
        got = f"{type(error).__name__}: {error}"
        PlayedCall(type(env).__name__, "__init__()").fault("form", "the env", "one that make() takes", got)
    return next(make for kind, make in _PLAYERS if isinstance(adapter, kind))(adapter, max_steps, findings)
