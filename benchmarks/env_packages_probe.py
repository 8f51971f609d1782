"""Run one package's env by a plain loop and by marlvec, and write what both did.

`env_packages` starts it in the virtual environment of the package, with the names of two files: the entry of the list,
and the result, which is written after each part, so that a time limit keeps what was found before.
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import marlvec
from marlvec.errors import MarlvecError
from marlvec.testing import check_env

MODES = ("same_step", "next_step", "disabled")
BACKENDS = ("sync", "async")
ENVS = 4
STEPS = 200
SECONDS = 12.0  # for each pair of backend and mode
EPISODE = 200  # steps of a plain episode, at most
SEEDS = 12  # begun twice in one env
APIS = {"parallel": "Parallel", "turns": "AEC", "joint": "Gymnasium", "keyed": "RLlib", "marlenv": "marlenv"}
PACKAGES = ("gymnasium", "pettingzoo", "numpy", "jax", "torch")


def built_by(entry: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the function that builds the env: the entry's code defines ``build``."""
    names: dict[str, Any] = {"__name__": "built"}
    exec(compile(entry["build"], entry["name"], "exec"), names)  # code of our own list
    return names["build"]  # type: ignore[no-any-return]  # the list's entries define it


# --- A plain loop, without marlvec


class Plain:
    """One env in a plain loop: what it returns by agent, and who is alive and acts.

    ``form``: ``parallel``, ``turns``, ``joint`` (Gymnasium's Tuples and Dicts), ``keyed`` (RLlib's) or ``marlenv``.
    """

    def __init__(self, env: Any, weights: Any = None) -> None:
        self.env, self.weights = env, weights
        self.form = form_of(env)
        self.names: list[Any] = []
        if self.form in ("parallel", "turns", "keyed"):
            self.names = list(env.possible_agents)
        elif self.form == "joint":
            parts = getattr(env.action_space, "spaces", env.action_space)
            self.names = list(parts) if isinstance(parts, dict) else list(range(len(parts)))
        elif self.form == "marlenv":
            self.names = list(range(env.n_agents))
        self.gone: set[Any] = set()
        self.joined: set[Any] = set(self.names)
        self.obs: Any = {}
        self.infos: Any = {}

    def observation_space(self, agent: Any) -> Any:
        if self.form == "keyed":
            return self.env.get_observation_space(agent)
        try:
            return self.env.observation_space[agent] if self.form == "joint" else self.env.observation_space(agent)
        except (AttributeError, KeyError, TypeError, NotImplementedError):
            return None

    def action_space(self, agent: Any) -> Any:
        """Return an agent's action space."""
        if self.form == "keyed":
            return self.env.get_action_space(agent)
        return self.env.action_space[agent] if self.form == "joint" else self.env.action_space(agent)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        env, self.gone = self.env, set()
        if self.form == "marlenv":
            obs, _ = env.reset(seed=seed) if seed is not None else env.reset()
            self.obs, self.infos = self._of_marlenv(obs)
            return self._view()
        result = env.reset(seed=seed)
        if self.form == "turns":
            result = {}, {}
        self.obs, self.infos = result if isinstance(result, tuple) else (result, {})
        if self.form == "joint":
            self.obs = self._each(self.obs)
        self.joined = set(self.obs) if self.form == "keyed" else set(self.names)
        return self._view()

    def step(self, actions: dict[Any, Any]) -> dict[str, Any]:
        if self.form == "turns":
            return self._turn(actions)
        env = self.env
        if self.form == "marlenv":
            result = env.step(np.array([actions[a] for a in self.names]))
            self.obs, self.infos = self._of_marlenv(result.obs)
            rewards: Any = self._weighted(result.reward)
            ends, cuts = bool(result.done), bool(result.truncated) and not result.done
        elif self.form == "parallel":
            self.obs, rewards, ends, cuts, self.infos = env.step({a: actions[a] for a in env.agents})
        elif self.form == "keyed":
            live = [a for a in self.names if a in self.joined - self.gone and a in self.obs]
            self.obs, rewards, own_ends, own_cuts, self.infos = env.step({a: actions[a] for a in live})
            self.joined |= set(self.obs)
            flags = {a: (bool(own_ends.get(a)), bool(own_cuts.get(a))) for a in self.joined}
            whole = bool(own_ends.get("__all__")), bool(own_cuts.get("__all__"))
            flags = {a: own if any(own) else whole for a, own in flags.items()}
            ends, cuts = ({a: own[k] for a, own in flags.items() if a not in self.gone} for k in (0, 1))
        else:
            joint = {a: actions[a] for a in self.names}
            keyed = isinstance(getattr(env.action_space, "spaces", env.action_space), dict)
            obs, rewards, ends, cuts, self.infos = env.step(joint if keyed else tuple(joint.values()))
            self.obs = self._each(obs)
        here = [a for a in self.names if a not in self.gone]
        paid, over, late = (self._each(value) for value in (rewards, ends, cuts))
        self.gone |= {a for a in here if over.get(a) or late.get(a)}
        view = self._view()
        if self.form == "parallel":
            here = [a for a in self.names if a in paid or a in over or a in late]
        view["rewards"] |= {a: float(self._weighted(paid.get(a, 0))) for a in here}
        view["terminated"] |= {a: bool(over.get(a, False)) for a in here}
        view["truncated"] |= {a: bool(late.get(a, False)) for a in here}
        view["done"] = not any(view["alive"].values())
        return view

    def legal(self, agent: Any, obs: Any) -> Any:
        """Return the agent's mask now, from its observation or its info; None if it has none."""
        if isinstance(obs, Mapping) and "action_mask" in obs:
            return np.asarray(obs["action_mask"])
        infos = self.env.infos if self.form == "turns" else self.infos
        info = infos.get(agent) if isinstance(infos, Mapping) else None
        mask = info.get("action_mask") if isinstance(info, Mapping) else None
        return None if mask is None else np.asarray(mask)

    def _weighted(self, reward: Any) -> Any:
        if self.weights is not None:
            return float(np.dot(np.asarray(reward, float), self.weights))
        return np.asarray(reward).reshape(())[()] if np.size(reward) == 1 else reward

    def _each(self, value: Any) -> dict[Any, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, (list, tuple)) or np.ndim(value):
            return dict(zip(self.names, value, strict=True))
        return dict.fromkeys(self.names, value)

    def _of_marlenv(self, obs: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        masks = np.asarray(obs.available_actions, bool)
        seen = {a: {"observation": obs.data[a], "action_mask": masks[a]} for a in self.names}
        if obs.extras.size:
            seen = {a: {"data": obs.data[a], "extras": obs.extras[a], "action_mask": masks[a]} for a in self.names}
        return seen, {}

    def _view(self) -> dict[str, Any]:
        env = self.env
        listed = self.form in ("parallel", "turns")
        live = list(env.agents) if listed else [a for a in self.names if a in self.joined - self.gone]
        alive = {a: a in live for a in self.names}
        acting, obs = dict(alive), {a: self.obs.get(a) for a in self.names}
        if self.form == "keyed":
            acting = {a: alive[a] and a in self.obs for a in self.names}
        if self.form == "turns":
            turn = env.agent_selection
            acts = bool(live) and turn in live and not (env.terminations[turn] or env.truncations[turn])
            acting = {a: acts and a == turn for a in self.names}
            obs = {a: env.observe(a) if a in live else None for a in self.names}
        return {
            "obs": obs,
            "alive": alive,
            "acting": acting,
            "rewards": dict.fromkeys(self.names, 0.0),
            "terminated": dict.fromkeys(self.names, False),
            "truncated": dict.fromkeys(self.names, False),
            "done": False,
        }

    def _turn(self, actions: dict[Any, Any]) -> dict[str, Any]:
        """Make one agent's move, and step over all agents that have ended."""
        env, before = self.env, list(self.env.agents)
        env.step(actions[env.agent_selection])
        paid = {a: float(self._weighted(env.rewards.get(a, 0.0))) for a in self.names}
        over = {a: bool(env.terminations.get(a)) if a in before else False for a in self.names}
        late = {a: bool(env.truncations.get(a)) if a in before else False for a in self.names}
        seen = {a: copy.deepcopy(env.observe(a)) for a in before}
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            seen[env.agent_selection] = copy.deepcopy(env.observe(env.agent_selection))
            env.step(None)
        view = self._view()
        obs = {a: seen.get(a) for a in self.names}
        return {**view, "obs": obs, "rewards": paid, "terminated": over, "truncated": late, "done": not env.agents}


def form_of(env: Any) -> str:
    """Return the form of an env's API, or an empty text for one that has none of those of `Plain`."""
    if any(kind.__module__.startswith("marlenv.") for kind in type(env).__mro__):
        return "marlenv"
    if hasattr(env, "agent_iter") and hasattr(env, "observe"):
        return "turns"
    if hasattr(env, "get_action_space") and any(kind.__name__ == "MultiAgentEnv" for kind in type(env).__mro__):
        return "keyed"
    if hasattr(env, "possible_agents") and callable(getattr(env, "action_space", None)):
        return "parallel"
    space = getattr(env, "action_space", None)
    return "joint" if hasattr(space, "spaces") or isinstance(space, dict) else ""


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, dtypes and shapes too; NaN equals NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if a is None or isinstance(a, str):
        return bool(a == b)
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype == object:
        return str(a) == str(b)
    return bool(np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"))


def copied(value: Any) -> Any:
    """Copy an observation; numpy's flat iterators have no copies."""
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    return np.array(value) if isinstance(value, np.flatiter) else copy.deepcopy(value)


# --- What the env does by itself


def episode(plain: Plain, seed: int | None, steps: int, draws: int) -> tuple[list[Any], list[Any]]:
    """Play by random valid actions; return copies of all views, and the observations as they were returned."""
    rng = np.random.default_rng(draws)
    view = plain.reset(seed)
    if plain.form != "marlenv":
        for i, agent in enumerate(plain.names):
            plain.action_space(agent).seed(100 * draws + i)
    trace, kept = [], []
    for _ in range(steps):
        trace.append({key: copied(value) for key, value in view.items()})
        kept.append(view["obs"])
        if view["done"]:
            break
        view = plain.step({a: _drawn(plain, a, view, rng) for a in plain.names})
    return trace, kept


def _drawn(plain: Plain, agent: Any, view: dict[str, Any], rng: np.random.Generator) -> Any:
    mask = plain.legal(agent, view["obs"][agent]) if view["acting"][agent] else None
    if plain.form == "marlenv":
        return int(rng.choice(np.flatnonzero(mask))) if mask is not None else 0
    space = plain.action_space(agent)
    if mask is not None and mask.ndim == 1 and hasattr(space, "n") and mask.any():
        return space.dtype.type(rng.choice(np.flatnonzero(mask)))
    return space.sample()


def traps(build: Callable[[], Any], weights: Any) -> dict[str, Any]:
    """Return how an env treats seeds, arrays, dtypes, flags, copies and the process's random numbers."""
    found: dict[str, Any] = {}

    def new() -> Plain:
        return Plain(build(), weights)

    seed_process(0)
    plain = new()
    before = state_of_process()
    trace, kept = episode(plain, 7, EPISODE, 1)
    found["global random"] = before != state_of_process()
    found["steps"] = len(trace) - 1
    found["ends"] = sorted(
        {
            "+".join(flag for flag in ("terminated", "truncated") if view[flag][a])
            for view in trace
            for a in plain.names
            if view["terminated"][a] or view["truncated"][a]
        }
    )
    found["over"] = trace[-1]["done"]
    if plain.form != "turns":  # whose observations are read, not returned
        found["arrays change later"] = sum(not same(a, b["obs"]) for a, b in zip(kept, trace, strict=True))
    if plain.form != "marlenv":
        found["outside"], found["other dtype"] = _against_spaces(plain, trace)
    seed_process(1)
    found["seed repeats in a new env"] = same(trace, episode(new(), 7, EPISODE, 1)[0])
    used, other = new(), 0
    for seed in range(SEEDS):
        episode(used, seed, 25, seed)
        other += not same(episode(new(), seed, 2, 1)[0], episode(used, seed, 2, 1)[0])
    found["seeds that begin otherwise in a used env"] = other
    fresh = new()
    starts = [episode(fresh, seed, 3, 1)[0][0] for seed in (7, None, None)]
    found["resets without a seed differ"] = not same(starts[1], starts[2])
    again = new()
    found["resets without a seed repeat"] = same(starts, [episode(again, seed, 3, 1)[0][0] for seed in (7, None, None)])
    for how, way in (("pickle", lambda env: pickle.loads(pickle.dumps(env))), ("deepcopy", copy.deepcopy)):
        plain = new()
        episode(plain, 7, 4, 1)
        try:
            twin = Plain(way(plain.env), weights)
        except Exception as error:
            found[how] = f"raises {type(error).__name__}"
            continue
        twin.gone, twin.joined, twin.obs, twin.infos = set(plain.gone), set(plain.joined), plain.obs, plain.infos
        here = _played_on(plain)
        try:
            found[how] = "right" if same(here, _played_on(twin)) else "another state"
        except Exception:  # most are copies of the constructor's arguments, without an episode
            found[how] = "another state"
    return found


def seed_process(seed: int) -> None:
    """Seed the generators that all code of a process shares: an env should not draw from them."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the one that envs draw from


def state_of_process() -> list[Any]:
    """Return the state of both generators."""
    return [random.getstate(), repr(np.random.get_state())]  # noqa: NPY002  # likewise


def _played_on(plain: Plain) -> Any:
    """Step an env, or its copy, with actions that depend on nothing but its agents."""
    if plain.form == "turns":
        view = plain._view()
        rng = np.random.default_rng(3)
        return copied(plain.step({a: _drawn(plain, a, view, rng) for a in plain.names}))
    actions = {}
    for agent in plain.env.agents if plain.form == "parallel" else plain.names:
        if plain.form == "marlenv":
            actions[agent] = int(np.flatnonzero(plain.env.available_actions()[agent])[0])
        else:
            plain.action_space(agent).seed(5)
            actions[agent] = plain.action_space(agent).sample()
    return copied(plain.step(actions))


def _against_spaces(plain: Plain, trace: list[Any]) -> tuple[str, str]:
    outside, dtypes = "", ""
    for view in trace:
        for agent, obs in view["obs"].items():
            space = plain.observation_space(agent)
            if obs is None or space is None:
                continue
            try:
                inside = bool(space.contains(obs))
            except Exception:
                inside = False
            outside = outside or ("" if inside else f"agent {agent!r}")
            dtypes = dtypes or next((f"{b} for {a}" for a, b in _dtypes(space, obs) if a != b), "")
    return outside, dtypes


def _dtypes(space: Any, obs: Any) -> list[tuple[str, str]]:
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping) and isinstance(obs, Mapping):
        return [pair for key, part in inner.items() if key in obs for pair in _dtypes(part, obs[key])]
    if inner is not None and isinstance(obs, (tuple, list)):
        return [pair for part, value in zip(inner, obs, strict=False) for pair in _dtypes(part, value)]
    dtype = getattr(space, "dtype", None)
    return [] if dtype is None else [(str(dtype), str(getattr(obs, "dtype", type(obs).__name__)))]


# --- marlvec's rows beside it


def entry_at(tree: Any, i: int, j: int) -> Any:
    """Return entry (i, j) of each array of a tree."""
    if isinstance(tree, dict):
        return {k: entry_at(v, i, j) for k, v in tree.items()}
    return tuple(entry_at(v, i, j) for v in tree) if isinstance(tree, tuple) else tree[i][j]


def differs(got: Any, expected: Any) -> bool:
    """Return whether a value of a row is not the plain loop's, or lost something in the cast to its space's dtype."""
    if isinstance(expected, Mapping):
        return any(k not in got or differs(got[k], v) for k, v in expected.items())
    if isinstance(expected, (tuple, list)) and isinstance(got, (tuple, list)):
        return any(map(differs, got, expected))
    if isinstance(expected, str) or isinstance(got, str):
        return str(got) != str(expected)
    x, y = np.asarray(got), np.asarray(expected)
    if x.shape != y.shape or x.dtype == object:
        return x.shape != y.shape or str(got) != str(expected)
    floats = x.dtype.kind == "f"
    with np.errstate(all="ignore"):
        return not np.array_equal(x, y.astype(x.dtype), equal_nan=floats)


def core(obs: Any) -> Any:
    """Return an observation without its mask, as marlvec declares it."""
    if not isinstance(obs, Mapping) or "action_mask" not in obs:
        return obs
    rest = {key: value for key, value in obs.items() if key != "action_mask"}
    return rest["observation"] if set(rest) == {"observation"} else rest


class Comparison:
    """The rows of one vectorizer beside plain loops with the same seeds and actions."""

    def __init__(self, build: Callable[[], Any], envs: Any, mode: str, weights: Any) -> None:
        self.envs, self.mode = envs, mode
        self.plains = [Plain(build(), weights) for _ in range(ENVS)]
        for plain in self.plains:  # a plain dict of spaces may have another order than Gymnasium's Dict
            if set(map(str, plain.names)) == set(envs.agents):
                plain.names.sort(key=lambda agent: envs.agents.index(str(agent)))
        self.index: dict[str, tuple[str, int]] = {
            envs.agents[a]: (group.name, j) for group in envs.spec.groups for j, a in enumerate(group.agents)
        }
        self.ends = 0

    def at(self, tree: Any, i: int, a: int) -> Any:
        group, j = self.index[self.envs.agents[a]]
        return entry_at(tree[group] if self.envs.grouped else tree, i, j)

    def check(self, i: int, row: Any, view: dict[str, Any], after: dict[str, Any] | None = None) -> str:
        """Return the first difference of row i; ``after``: the reset that the step brought with it."""
        plain, now = self.plains[i], view if after is None else after
        for a, agent in enumerate(plain.names):
            for name in ("rewards", "terminated", "truncated"):
                if getattr(row, name)[i, a] != view[name][agent]:
                    return f"{name} of {agent!r}: {getattr(row, name)[i, a]}, plain loop {view[name][agent]}"
            for name in ("alive", "acting"):
                if getattr(row, name)[i, a] != now[name][agent]:
                    return f"{name} of {agent!r}"
            ended = view["terminated"][agent] or view["truncated"][agent]
            obs, shown = now["obs"][agent], after is not None or now["alive"][agent] or ended
            last = view["obs"][agent] if ended else None
            if last is not None and differs(self.at(row.final_obs, i, a), core(last)):
                return f"final observation of {agent!r}"
            if plain.form == "turns" and not now["acting"][agent] and (not ended or after is not None):
                shown = False
            if shown and obs is not None and differs(self.at(row.obs, i, a), core(obs)):
                return f"observation of {agent!r}"
            mask = plain.legal(agent, obs) if now["acting"][agent] else None
            if mask is not None:
                shown_mask = None if row.action_mask is None else self.at(row.action_mask, i, a)
                if shown_mask is None or not np.array_equal(shown_mask, mask.astype(bool).reshape(-1)):
                    return f"mask of {agent!r}"
        return "" if bool(row.done[i]) == view["done"] else "done"

    def run(self, steps: int, seconds: float) -> tuple[str, int]:
        """Return the first difference, or an empty text, and the number of steps."""
        envs, start = self.envs, time.monotonic()
        seeds = [11 + i for i in range(ENVS)]
        envs.reset_send(seed=seeds)
        row = envs.recv()
        views = [plain.reset(seed) for plain, seed in zip(self.plains, seeds, strict=True)]
        for i, view in enumerate(views):
            if problem := self.check(i, row, view):
                return f"reset, {problem}", 0
        waiting = [False] * ENVS
        for t in range(1, steps + 1):
            if time.monotonic() - start > seconds:
                return "", t - 1
            if self.mode == "disabled" and any(waiting):
                ids = [i for i in range(ENVS) if waiting[i]]
                envs.reset_send(env_ids=ids)
                envs.recv()
                for i in ids:
                    views[i], waiting[i] = self.plains[i].reset(), False
            actions = envs.random_action(seed=t)
            envs.send(actions)
            row = envs.recv()
            for i, plain in enumerate(self.plains):
                if self.mode == "next_step" and waiting[i]:
                    views[i], waiting[i] = plain.reset(), False
                    problem = self.check(i, row, views[i])
                else:
                    chosen = {agent: _plain_action(self.at(actions, i, a)) for a, agent in enumerate(plain.names)}
                    view = plain.step(chosen)
                    after = plain.reset() if view["done"] and self.mode == "same_step" else None
                    self.ends += view["done"]
                    problem = self.check(i, row, view, after)
                    waiting[i] = view["done"] and self.mode != "same_step"
                    views[i] = view if after is None else after
                if problem:
                    return f"step {t}, env {i}: {problem}", t
        return "", steps


def _plain_action(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_action(part) for key, part in value.items()}
    return int(value) if np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iu" else value


def short(error: BaseException, size: int = 400) -> str:
    """Return an error's kind and text, cut, without the name of the home folder."""
    text = without_places(f"{type(error).__name__}: {error}")
    return text if len(text) <= size else text[: size - 1] + "…"


def without_places(text: str) -> str:
    """Return a text without the folders of this machine."""
    return re.sub(r"/\S*/site-packages/", "", text).replace(str(Path.home()), "~")


def compare(
    plainly: Callable[[], Any],
    build: Callable[[], Any],
    options: dict[str, Any],
    weights: Any,
    entry: Mapping[str, Any],
) -> dict[str, Any]:
    """Return, for each backend and mode, the steps that were equal, or the first difference or error.

    ``plainly`` builds envs for the plain loop, ``build`` those for marlvec: with its wrapper, if the entry has one.
    """
    found: dict[str, Any] = {}
    for backend in entry.get("backends", BACKENDS):
        for mode in MODES:
            workers = {"num_workers": entry.get("num_workers", 2)} if backend == "async" else {}
            try:
                with marlvec.make(build, ENVS, backend=backend, autoreset_mode=mode, **workers, **options) as envs:
                    comparison = Comparison(plainly, envs, mode, weights)
                    problem, steps = comparison.run(entry.get("steps", STEPS), entry.get("seconds", SECONDS))
                    found[f"{backend} {mode}"] = problem or {"steps": steps, "ends": comparison.ends}
            except Exception as error:
                found[f"{backend} {mode}"] = short(error)
    return found


def speed(target: Any, options: dict[str, Any]) -> float:
    """Return microseconds of processor time a step of one env, of 4 in one process."""
    place = {} if isinstance(target, str) else {"backend": "sync"}
    with marlvec.make(target, ENVS, **place, **options) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(envs.random_action())
        steps, spent = 0, 0.0
        while spent < 1.0 and steps < 2000:
            action = envs.random_action()
            start = time.process_time()
            envs.step(action)
            spent += time.process_time() - start
            steps += 1
    return round(1e6 * spent / (steps * ENVS), 1)


def main(entry_file: str, result_file: str) -> None:
    """Write the result of one entry."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    entry = json.loads(Path(entry_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"versions": {name: v for name in PACKAGES if (v := version_of(name))}}

    def save() -> None:
        Path(result_file).write_text(json.dumps(result), encoding="utf-8")

    def try_part(name: str, part: Callable[[], Any]) -> None:
        try:
            result[name] = part()
        except Exception as error:
            result[f"{name} error"] = short(error)
        save()

    options, weights = entry.get("options", {}), entry.get("weights")
    if "make" in entry:  # an id of marlvec's: envs that step together, or that it brings itself
        result["api"] = entry.get("api", "pool")
        try_part("us a step", lambda: speed(entry["make"], options))
        return
    plainly = built_by(entry)
    wrap = entry.get("wrap")
    build = plainly if wrap is None else lambda: eval(wrap, {**vars(marlvec.envs), "env": plainly()})  # of our own list
    try:
        env = plainly()
    except Exception as error:
        result["raises"] = short(error)
        save()
        return
    result["api"] = APIS.get(form_of(env), "own")
    result["class"] = f"{type(env).__module__}.{type(env).__qualname__}"
    save()
    try:
        marlvec.make(build, 1, backend="sync", **options).close()
    except MarlvecError as error:
        result["refused"] = short(error, 700)
        save()
    known = result["api"] != "own"
    if known:
        try_part("traps", lambda: traps(plainly, weights))
    if "refused" in result:
        return
    try_part("us a step", lambda: speed(build, options))
    if known:
        try_part("equal", lambda: compare(plainly, build, options, weights, entry))
    given = {key: options[key] for key in ("agents", "lenient") if key in options}
    checked: Callable[[], Any] = (lambda: marlvec.envs.adapt(build(), **given)) if given else build
    try_part("check_env", lambda: findings(checked))


def findings(build: Callable[[], Any]) -> list[str]:
    """Return what `check_env` finds, a line each."""
    return [
        without_places(f"{one.check} ({one.severity}): {one.subject}: expected {one.expected}, got {one.got}")[:240]
        for one in check_env(build, raise_first=False, max_steps=200)
    ]


def version_of(name: str) -> str:
    """Return the installed version of a package, or an empty text."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
