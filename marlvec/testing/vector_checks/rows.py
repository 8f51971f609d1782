"""Checks of the rows that a vectorizer returns, also as its envs become ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space

from marlvec.testing.env_checks.findings import leaf
from marlvec.testing.env_checks.values import check_member
from marlvec.testing.vector_checks.play import MakeEnvs, VectorPlace, actions_for, compare, play, record, row_of
from marlvec.trees import tree_leaves
from marlvec.vector.seeding import env_seeds
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

__all__ = [
    "check_copies",
    "check_determinism",
    "check_halves",
    "check_partial_reset",
    "check_seeding",
    "check_spaces",
    "check_stream",
]

STEPS = 40


def check_spaces(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Shapes and dtypes; observations and random actions are in the agents', the envs' and the batched spaces."""
    names = ("observation_space", "action_space", "single_observation_space", "single_action_space")
    with make() as envs:
        spaces = {name: getattr(envs, name) for name in names}
        obs, infos = envs.reset(seed=seed)
        for t in range(STEPS):
            _check_rows(envs, place, spaces, obs, infos, "observation")
            actions = envs.random_action()
            _check_rows(envs, place, spaces, actions, infos, "action")
            _check_masks(envs, place, actions, infos)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            arrays = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
            for name, array in {**arrays, "alive": infos["alive"], "acting": infos["acting"]}.items():
                dtype = np.float64 if name == "rewards" else np.bool_
                _check_array(place, f"{name} of step {t + 1}", array, (envs.num_envs, envs.agent_num), dtype)
            _check_array(place, f"reset_mask of step {t + 1}", infos["reset_mask"], (envs.num_envs,), np.bool_)
            for name, space in spaces.items():
                if getattr(envs, name) is not space:
                    place.broken(name, "the same object on each read", "another one")


def _check_array(place: VectorPlace, what: str, got: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if not isinstance(got, np.ndarray) or got.shape != shape or got.dtype != dtype:
        found = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got).__name__
        place.broken(what, f"{np.dtype(dtype)} {shape}", found)


def _check_rows(
    envs: VectorEnv, place: VectorPlace, spaces: dict[str, Space[Any]], values: Any, infos: dict[str, Any], kind: str
) -> None:
    """Check one batch as a whole, by env, and by agent. Absent agents' zeros may be outside their space."""
    all_in = bool(infos["alive"].all())
    if all_in:
        check_member(spaces[f"{kind}_space"], values, place, f"{kind}s")
    for i in range(envs.num_envs):
        if infos["alive"][i].all():
            check_member(spaces[f"single_{kind}_space"], row_of(values, i), place, f"{kind}s of env {i}")
        for a, j, group in _places(envs):
            if infos["alive"][i, a] and envs.spec.original_observation_spaces is None:
                part = row_of(values[group] if envs.grouped else values, (i, j))
                space = getattr(envs, f"agent_{kind}_space")(a)
                check_member(space, part, place, f"{kind} of env {i}, agent {envs.agents[a]!r}")


def _places(envs: VectorEnv) -> Iterator[tuple[int, int, str]]:
    """Yield each agent's place on the agent axis, its place in its group, and the group."""
    for group, members in envs.groups.items():
        yield from ((a, j, group) for j, a in enumerate(members))


def _check_masks(envs: VectorEnv, place: VectorPlace, actions: Any, infos: dict[str, Any]) -> None:
    masks = infos.get("action_mask")
    if masks is None:
        return
    for a, j, group in _places(envs):
        space = envs.agent_action_space(a)
        mask = masks.get(group) if isinstance(masks, dict) else masks
        if mask is None or not isinstance(space, Discrete):
            continue
        for i in np.flatnonzero(infos["acting"][:, a]).tolist():
            action = int((actions[group] if envs.grouped else actions)[i, j])
            if not mask[i, j, action - int(space.start)]:
                subject = f"random_action of env {i}, agent {envs.agents[a]!r}"
                place.broken(subject, f"an action that its mask allows {mask[i, j].astype(int).tolist()}", str(action))


def check_seeding(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """A seed is spread over the envs like `marlvec.env_seeds`."""
    with make() as envs, make() as others:
        spread = record(envs.reset(seed=seed))
        given = record(others.reset(seed=env_seeds(seed, others.num_envs)))
        compare(place, f"reset(seed={seed}) beside reset(seed=env_seeds({seed}, N))", given, spread)


def check_determinism(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Two new vectorizers with the same seed give the same results, over whole episodes."""
    with make() as envs, make() as others:
        pairs = zip(play(envs, seed, STEPS), play(others, seed, STEPS), strict=True)
        for t, (first, again) in enumerate(pairs):
            compare(place, f"step {t} of a second one with seed {seed}", first, again)


def check_halves(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """``step`` equals ``step_send`` and ``step_fetch``; ``reset`` equals ``reset_send`` and ``reset_fetch``."""
    with make() as envs, make() as others:
        envs.reset_send(seed=seed)
        compare(place, "reset_send() and reset_fetch()", record(others.reset(seed=seed)), record(envs.reset_fetch()))
        for t in range(STEPS):
            actions = actions_for(envs, seed, [t] * envs.num_envs)
            envs.step_send(actions)
            whole = record(others.step(actions))
            compare(place, f"step_send() and step_fetch() of step {t + 1}", whole, record(envs.step_fetch()))


def check_partial_reset(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """A reset of some envs leaves the rows of the others equal bit for bit, and their episodes running."""
    with make() as envs, make() as untouched:
        n = envs.num_envs
        last = play(envs, seed, 1)[-1]
        play(untouched, seed, 1)
        for i in range(n):
            obs, infos = envs.reset(seed=[seed + i], env_ids=[i])
            for other in range(i + 1, n):
                for name, array in (("obs", obs), ("alive", infos["alive"]), ("acting", infos["acting"])):
                    before, after = row_of(last[name], other), row_of(array, other)
                    compare(place, f"{name} of env {other} after reset(env_ids=[{i}])", before, after)
            if not infos["alive"][i].any():
                place.broken(f"env {i} after reset(env_ids=[{i}])", "an agent alive", "none")
            if i == n - 1:
                break
            actions = actions_for(untouched, seed, [i + 1] * n)
            stepped = record(untouched.step(actions))
            mixed = actions_for(envs, seed, [i + 1] * n)
            last = record(envs.step(mixed))
            for other in range(i + 1, n):
                where = f"env {other} in the step after reset(env_ids=[{i}])"
                for name in ("obs", "rewards", "terminated", "truncated", "alive", "acting"):
                    compare(place, f"{name} of {where}", row_of(stepped[name], other), row_of(last[name], other))


def check_copies(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """With ``copy=True`` a result never changes; with ``copy=False`` it is equal and read-only."""
    with make(copy=True) as envs, make(copy=False) as views:
        kept: list[tuple[Any, dict[str, Any]]] = []
        for t in range(STEPS):
            result: tuple[Any, ...]
            viewed: tuple[Any, ...]
            if t == 0:
                result, viewed = envs.reset(seed=seed), views.reset(seed=seed)
            else:
                actions = actions_for(envs, seed, [t] * envs.num_envs)
                result, viewed = envs.step(actions), views.step(actions)
            compare(place, f"copy=False beside copy=True, step {t}", record(result), record(viewed))
            for path, array in tree_leaves(viewed[0]):
                if array.flags.writeable:
                    what = f"{leaf('obs', path)} with copy=False"
                    place.broken(what, "a view that cannot be written to", "one that can")
            kept = [*kept[-2:], (result, record(result))]
            for old, copied in kept[:-1]:
                compare(place, f"an earlier result with copy=True after step {t}", copied, record(old))


STREAM_STEPS = 20
_STREAMED = ("rewards", "terminated", "truncated", "alive", "acting")


def check_stream(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Each env is received once per request, with its own rows, in any order."""
    with make() as envs, make() as lockstep:
        n = envs.num_envs
        expected = [record(lockstep.reset(seed=seed))]
        for t in range(STREAM_STEPS):
            expected.append(record(lockstep.step(actions_for(lockstep, seed, [t] * n))))
        envs.async_reset(seed=seed)
        counts, waiting = [-1] * n, set(range(n))
        while min(counts) < STREAM_STEPS:
            result = envs.recv(min_envs=1)
            got = _taken(place, result, waiting)
            for k, i in enumerate(got):
                counts[i] += 1
                _check_row(place, result, k, i, counts[i], expected[counts[i]])
            waiting -= set(got)
            again = [i for i in got if counts[i] < STREAM_STEPS]
            if again:
                envs.send(actions_for(envs, seed, [counts[i] for i in again], again), again)
                waiting |= set(again)
        if len(nothing := envs.drain()):
            place.broken("drain() with nothing under way", "no rows", f"those of envs {nothing.env_ids.tolist()}")
        half = set(range(0, n, 2))
        envs.send(envs.random_action(env_ids=sorted(half)), sorted(half))
        if (drained := set(_taken(place, envs.drain(), half))) != half:
            place.broken("drain()", f"all envs under way {sorted(half)}", str(sorted(drained)))
        envs.step(envs.random_action())


def _taken(place: VectorPlace, result: VectorStep, waiting: set[int]) -> list[int]:
    ids: list[int] = result.env_ids.tolist()
    if not ids or len(set(ids)) != len(ids) or not set(ids) <= waiting:
        place.broken("env_ids", f"some of the envs under way {sorted(waiting)}, each once", str(ids))
    if len(result.rewards) != len(ids):
        place.broken("rewards", f"{len(ids)} rows, one for each of envs {ids}", f"{len(result.rewards)}")
    return ids


def _check_row(place: VectorPlace, result: VectorStep, k: int, i: int, t: int, expected: dict[str, Any]) -> None:
    where = f"of env {i} in its step {t}" if t else f"of env {i} at its reset"
    compare(place, f"obs {where}", row_of(expected["obs"], i), row_of(result.obs, k))
    for name in _STREAMED if t else _STREAMED[3:]:
        compare(place, f"{name} {where}", row_of(expected[name], i), row_of(getattr(result, name), k))
