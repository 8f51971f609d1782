"""`check_vector_env`: checks of any implementation of `VectorEnv`.

It plays whole episodes with actions that depend only on the seed, the env and its step count: rows, ends in the three
autoreset modes, calls at the wrong time, and calls on the envs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import numpy as np
from gymnasium.spaces import Discrete, Space

from marlvec.errors import ArgumentError, BusyError, ClosedError, NothingPendingError, NotResetError, StateError
from marlvec.testing.findings import PlayedCall, check_member, first_difference, leaf
from marlvec.trees import map_tree, tree_leaves, zip_trees
from marlvec.vector.settings import env_seeds
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep


def check_autoreset(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """In all modes every env plays the same episodes; only the step where the next one begins differs."""
    logs: dict[str, list[EnvLog]] = {}
    for mode in ("disabled", "next_step", "same_step"):
        with make(autoreset_mode=mode) as envs:
            if envs.autoreset_mode != mode or envs.metadata.get("autoreset_mode") != mode:
                place.broken("autoreset_mode", repr(mode), f"{envs.autoreset_mode!r}, metadata {envs.metadata}")
            logs[mode] = _Player(envs, place, seed).play()
    for mode in ("next_step", "same_step"):
        for i, (first, other) in enumerate(zip(logs["disabled"], logs[mode], strict=True)):
            # Modes reach the last end of the slowest env at different times: compare up to the shorter log.
            for k, ((kind, expected), (other_kind, others)) in enumerate(zip(first, other, strict=False)):
                where = f"{mode} beside disabled, env {i}, event {k}"
                compare(place, where, kind, other_kind)
                compare(place, f"{where} ({kind})", expected, others)


def check_busy(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """While a step is pending every other call is refused; the step can still be fetched."""
    with make() as envs, make() as others:
        envs.reset(seed=seed)
        others.reset(seed=seed)
        actions = actions_for(envs, seed, [0] * envs.num_envs)
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: envs.step(actions),
            "step_send": lambda: envs.step_send(actions),
            "send": lambda: envs.send(actions),
            "reset": envs.reset,
            "reset(env_ids=[0])": lambda: envs.reset(env_ids=[0]),
            "async_reset": envs.async_reset,
            "call": lambda: envs.call("render"),
            "get_attr": lambda: envs.get_attr("metadata"),
            "set_attr": lambda: envs.set_attr("metadata", {}),
            "exec_func": lambda: envs.exec_func(_mark, None, 0),
            "env_is_wrapped": lambda: envs.env_is_wrapped(VectorEnv),
            "render": envs.render,
            "agents_at": lambda: envs.agents_at(0),
            "random_action": envs.random_action,
        }
        if envs.state_space is not None:
            calls["state"] = envs.state
        envs.step_send(actions)
        for name, call in calls.items():
            _refuses(place, f"{name} while step_send() is pending", BusyError, call)
        compare(place, "step_fetch() after refused calls", record(others.step(actions)), record(envs.step_fetch()))


def check_close(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """``close`` may be called again, and with a step pending; after it every other call is refused."""
    with make() as envs:
        envs.reset(seed=seed)
        actions = envs.random_action()
        envs.step_send(actions)
        envs.close()
        if not envs.closed:
            place.broken("closed after close()", "True", "False")
        try:
            envs.close()
        except Exception as error:
            place.broken("a second close()", "no error", f"{type(error).__name__}: {error}")
        calls: dict[str, Callable[[], Any]] = {
            "reset": envs.reset,
            "step": lambda: envs.step(actions),
            "step_fetch": envs.step_fetch,
            "send": lambda: envs.send(actions),
            "recv": envs.recv,
            "get_attr": lambda: envs.get_attr("metadata"),
        }
        for name, call in calls.items():
            _refuses(place, f"{name}() after close()", ClosedError, call)


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


def check_determinism(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Two new vectorizers with the same seed give the same results, over whole episodes."""
    with make() as envs, make() as others:
        pairs = zip(play(envs, seed, STEPS), play(others, seed, STEPS), strict=True)
        for t, (first, again) in enumerate(pairs):
            compare(place, f"step {t} of a second one with seed {seed}", first, again)


def check_guards(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Nothing can be stepped before a reset, and nothing fetched that was not sent."""
    with make() as envs:
        actions = envs.action_space.sample()
        _refuses(place, "step() before a reset", NotResetError, lambda: envs.step(actions))
        _refuses(place, "send() before a reset", NotResetError, lambda: envs.send(actions))
        for name in ("reset_fetch", "step_fetch", "call_fetch", "exec_func_fetch", "recv"):
            _refuses(place, f"{name}() with nothing sent", NothingPendingError, getattr(envs, name))
        envs.reset(seed=seed)
        envs.step_send(envs.random_action())
        _refuses(place, "reset_fetch() after step_send()", NothingPendingError, envs.reset_fetch)
        envs.step_fetch()
        _refuses(place, "step_fetch() for the second time", NothingPendingError, envs.step_fetch)


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


def check_own_answers(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """``exec_func`` and ``get_attr`` call the chosen envs, and return results in their order."""
    with make() as envs:
        n = envs.num_envs
        envs.reset(seed=seed)
        for i in range(n):
            envs.exec_func(_mark, [i], 10 + i)
        for ids in (list(range(n)), list(range(n))[::-1], [n - 1]):
            expected = tuple(10 + i for i in ids)
            compare(place, f"exec_func(indices={ids})", expected, envs.exec_func(_read, ids))
            compare(place, f"get_attr(indices={ids})", expected, envs.get_attr(_MARK, ids))
        compare(place, "get_attr() of all", tuple(10 + i for i in range(n)), envs.get_attr(_MARK))
        envs.set_attr(_MARK, 7, [n - 1])
        compare(place, f"get_attr() after set_attr(indices=[{n - 1}])", (*range(10, 9 + n), 7), envs.get_attr(_MARK))
        envs.step(envs.random_action())


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


def check_seeding(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """A seed is spread over the envs like `marlvec.env_seeds`."""
    with make() as envs, make() as others:
        spread = record(envs.reset(seed=seed))
        given = record(others.reset(seed=env_seeds(seed, others.num_envs)))
        compare(place, f"reset(seed={seed}) beside reset(seed=env_seeds({seed}, N))", given, spread)


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


CHECKS: dict[str, Callable[[VectorPlace, MakeEnvs, int], None]] = {
    "spaces": check_spaces,
    "seeding": check_seeding,
    "determinism": check_determinism,
    "halves": check_halves,
    "stream": check_stream,
    "guards": check_guards,
    "busy": check_busy,
    "partial reset": check_partial_reset,
    "autoreset": check_autoreset,
    "copies": check_copies,
    "own answers": check_own_answers,
    "close": check_close,
}


def check_vector_env(make_envs: MakeEnvs, *, seed: int = 0) -> tuple[str, ...]:
    """Run every check on new vectorizers, over whole episodes.

    Args:
        make_envs: Builds a vectorizer of at least two equal envs; takes ``autoreset_mode`` and ``copy`` and passes them
            on, e.g. ``lambda **settings: marlvec.make("simple_spread", 3, **settings)``. The envs must behave equally
            for equal seeds, and end their episodes within a few hundred steps. Each vectorizer is closed.
        seed: Seed of the envs and actions.

    Returns:
        Names of all checks.

    Raises:
        ContractError: A check failed: ``"check_vector_env: <check>: <what>: expected ..., got ..."``.
        ArgumentError: ``make_envs`` makes a single env, which cannot show mix-ups.
    """
    with make_envs() as envs:
        if envs.num_envs < 2:
            raise ArgumentError(f"make_envs: expected at least 2 envs (to find mixed-up rows), got {envs.num_envs}")
    for name, check in CHECKS.items():
        check(VectorPlace("check_vector_env", name), make_envs, seed)
    return tuple(CHECKS)


_ARRAYS = ("alive", "acting", "action_mask", "reset_mask", "state", "final_observation", "_final_observation")


class MakeEnvs(Protocol):
    """Builds the vectorizer to check."""

    def __call__(self, *, autoreset_mode: str = ..., copy: bool = ...) -> VectorEnv: ...


class VectorPlace(PlayedCall):
    """One check; ``call`` is its name."""

    def __str__(self) -> str:
        return f"{self.env}: {self.call}"


def play(envs: VectorEnv, seed: int, steps: int) -> list[Any]:
    """Return copies of the results of a seeded reset and ``steps`` steps."""
    trace = [record(envs.reset(seed=seed))]
    trace += [record(envs.step(actions_for(envs, seed, [t] * envs.num_envs))) for t in range(steps)]
    return trace


def record(result: Sequence[Any]) -> dict[str, Any]:
    """Return copies of all arrays of a reset or step, by name."""
    names = ("obs", "rewards", "terminated", "truncated") if len(result) == 5 else ("obs",)
    parts = dict(zip(names, result[:-1], strict=True))
    infos: Mapping[str, Any] = result[-1]
    results: dict[str, Any] = deepcopy({**parts, **{name: infos[name] for name in _ARRAYS if name in infos}})
    return results


def actions_for(envs: VectorEnv, seed: int, counts: Sequence[int], env_ids: Sequence[int] | None = None) -> Any:
    """Return random legal actions that depend only on the seed, each chosen env's index and its step count."""
    ids = range(envs.num_envs) if env_ids is None else env_ids
    drawn = [
        envs.random_action(seed=seed * 1_000_003 + 10_007 * i + count, env_ids=[i])
        for i, count in zip(ids, counts, strict=True)
    ]
    return zip_trees(np.concatenate, drawn)


def row_of(tree: Any, i: int | tuple[int, ...]) -> Any:
    """Return a copy of one row of every array in a tree."""
    return map_tree(lambda leaf: deepcopy(leaf[i]), tree)


def compare(place: VectorPlace, where: str, expected: Any, got: Any) -> None:
    """Report values that are not equal bit for bit; name the first difference."""
    if changed := first_difference(expected, got):
        place.broken(leaf(where, changed.path), changed.expected, changed.got)


STEPS = 40


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


STREAM_STEPS = 20
_STREAMED = ("rewards", "terminated", "truncated", "alive", "acting")


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


EPISODES = 3
MAX_STEPS = 2_000

EnvLog = list[tuple[str, dict[str, Any]]]
"""Events of one env: ``"reset"``, ``"step"`` or ``"end"``, each with its results, whatever the mode."""


class _Player:
    def __init__(self, envs: VectorEnv, place: VectorPlace, seed: int) -> None:
        self._envs, self._place, self._seed = envs, place, seed
        self._logs: list[EnvLog] = [[] for _ in range(envs.num_envs)]
        self._counts = [0] * envs.num_envs  # steps taken by the env
        self._ended = [0] * envs.num_envs

    def play(self) -> list[EnvLog]:
        """Play one mode until every env has ended `EPISODES` episodes; return the events of each env."""
        envs, mode = self._envs, self._envs.autoreset_mode
        obs, infos = envs.reset(seed=self._seed)
        for i in range(envs.num_envs):
            self._add_reset(i, obs, infos)
        over = np.zeros(envs.num_envs, np.bool_)
        for t in range(1, MAX_STEPS + 1):
            if mode == "disabled" and over.any():
                self._check_refused(over)
                obs, infos = envs.reset(env_ids=over)
                for i in np.flatnonzero(over).tolist():
                    self._add_reset(i, obs, infos)
                over[...] = False
            step = envs.step(actions_for(envs, self._seed, self._counts))
            obs, rewards, ended, cut, infos = step
            expected = over if mode == "next_step" else np.zeros_like(over)
            compare(self._place, f"{mode}, reset_mask of step {t}", expected, infos["reset_mask"].copy())
            over = infos.get("_final_observation", np.zeros(envs.num_envs, np.bool_)).copy()
            for i in range(envs.num_envs):
                if infos["reset_mask"][i]:
                    if rewards[i].any() or ended[i].any() or cut[i].any():
                        self._place.broken(f"{mode}, env {i}, step {t}", "no reward or flag in a reset row", "some")
                    self._add_reset(i, obs, infos)
                else:
                    self._add_step(i, t, step, bool(over[i]))
            if min(self._ended) >= EPISODES:
                return self._logs
        self._place.broken(f"{mode}, every env", f"{EPISODES} episodes within {MAX_STEPS} steps", f"{self._ended}")

    def _add_reset(self, i: int, obs: Any, infos: dict[str, Any]) -> None:
        self._logs[i].append(("reset", {"obs": row_of(obs, i), **self._status(i, infos)}))

    def _add_step(self, i: int, t: int, step: tuple[Any, ...], over: bool) -> None:
        obs, rewards, ended, cut, infos = step
        mode = self._envs.autoreset_mode
        self._counts[i] += 1
        results = {"rewards": row_of(rewards, i), "terminated": row_of(ended, i), "truncated": row_of(cut, i)}
        if not over:
            results |= {"obs": row_of(obs, i), **self._status(i, infos)}
            if not infos["alive"][i].any():
                self._place.broken(f"{mode}, env {i}, step {t}", "_final_observation where no agent is left", "False")
            self._logs[i].append(("step", results))
            return
        self._ended[i] += 1
        self._logs[i].append(("end", results | {"final": row_of(infos["final_observation"], i)}))
        if infos["alive"][i].any() is not np.bool_(mode == "same_step"):
            got = "some" if mode != "same_step" else "none"
            self._place.broken(f"{mode}, env {i}, alive after the end in step {t}", "the opposite", got)
        if mode == "same_step":
            self._add_reset(i, obs, infos)
        else:
            self._check_last(i, t, step)

    def _check_last(self, i: int, t: int, step: tuple[Any, ...]) -> None:
        """An agent that ends in a row without a reset has its last observation in both obs and final_observation."""
        obs, _, ended, cut, infos = step
        envs = self._envs
        for group, members in envs.groups.items():
            for j, a in enumerate(members):
                if ended[i, a] or cut[i, a]:
                    shown, final = (tree[group] if envs.grouped else tree for tree in (obs, infos["final_observation"]))
                    where = f"{envs.autoreset_mode}, final_observation of env {i}, agent {envs.agents[a]!r}, step {t}"
                    compare(self._place, where, row_of(shown, (i, j)), row_of(final, (i, j)))

    def _status(self, i: int, infos: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in ("alive", "acting", "action_mask") if name in infos]
        return {name: row_of(infos[name], i) for name in names}

    def _check_refused(self, over: Any) -> None:
        """Check that an env without an episode cannot be stepped."""
        envs = self._envs
        try:
            envs.step(envs.action_space.sample())
        except NotResetError:
            return
        got = f"a step of envs {np.flatnonzero(over).tolist()}, which have ended"
        self._place.broken("disabled, step() after an end", "NotResetError", got)


_MARK = "_marlvec_check_mark"  # private: envs that are not separate objects reject public names


def _refuses(place: VectorPlace, what: str, error: type[StateError], call: Callable[[], Any]) -> None:
    """Report a call that does not raise this error."""
    try:
        call()
    except error:
        return
    except Exception as other:
        place.broken(what, error.__name__, f"{type(other).__name__}: {other}")
    place.broken(what, error.__name__, "no error")


def _mark(env: Any, value: int) -> None:
    setattr(env, _MARK, value)


def _read(env: Any) -> Any:
    return getattr(env, _MARK)
