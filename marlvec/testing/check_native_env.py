"""`check_native_env`: steps a native env beside its reference, and names the first number that differs.

`Pair` is both, which get the same calls; `shorten` finds the shortest calls that show a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.envs.spec import AutoresetMode
from marlvec.errors import ArgumentError, ContractError
from marlvec.making import make
from marlvec.native.native_env import NativeEnv
from marlvec.registry import EnvLike
from marlvec.spaces.equality import difference
from marlvec.testing.findings import episodes_bar
from marlvec.trees import map_tree, tree_leaves
from marlvec.vector.in_process import NativeVectorEnv
from marlvec.vector.vector_env import VectorEnv

MakeEnvs = Callable[[int, str], VectorEnv]
"""Builds so many envs with this autoreset mode."""

_BY_AGENT = ("obs", "rewards", "terminated", "truncated", "alive", "acting", "action_mask", "final_observation")

_TWICE = ("infos/final_obs", "infos/_final_obs")  # Gymnasium's names of final observations: the same arrays


class Unequal(NamedTuple):
    """The first number that differs."""

    what: str  # name of its array, e.g. "rewards", "infos/final_observation"
    at: tuple[int, ...]  # its index; the first axis is the env
    expected: str  # the reference's number
    got: str  # the native env's number
    agent: str | None  # None if the array has no agent axis


class Pair:
    """Native envs and reference envs that get the same calls and must return the same results."""

    def __init__(self, native: MakeEnvs, reference: MakeEnvs, autoreset_mode: str, num_envs: int) -> None:
        self._make, self._num_envs, self._mode = native, num_envs, autoreset_mode
        self.over, self.ended = np.zeros((2, num_envs), np.bool_)
        self.numbers = 0  # compared so far
        with ExitStack() as stack:
            self._native = native(num_envs, autoreset_mode)
            stack.callback(self._close_native)
            self.reference = stack.enter_context(reference(num_envs, autoreset_mode))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close_native(self) -> None:
        self._native.close()  # the current one: resume() replaces it

    def check_spec(self) -> None:
        """Check that agents and spaces are equal."""
        if (found := self.reference.spec.difference(self._native.spec)) is not None:
            raise ContractError(f"check_native_env: {self._native.spec.name}: {found}")

    @property
    def can_resume(self) -> bool:
        """Return whether the native envs declare their state."""
        return not self._native.state_obstacles()

    def reset(self, seeds: Sequence[int | None], env_ids: Sequence[int]) -> Unequal | None:
        """Reset these envs of both; return the first difference."""
        return self._compare(*(envs.reset(seed=seeds, env_ids=env_ids) for envs in (self.reference, self._native)))

    def step(self, actions: Any) -> Unequal | None:
        """Step all envs of both; return the first difference."""
        return self._compare(*(envs.step(actions) for envs in (self.reference, self._native)))

    def resume(self) -> None:
        """Replace the native envs by new ones that load their state."""
        saved = self._native.get_state()
        self._native.close()
        self._native = self._make(self._num_envs, self._mode)
        self._native.set_state(saved)

    def _compare(self, expected: tuple[Any, ...], got: tuple[Any, ...]) -> Unequal | None:
        infos = expected[-1]
        self.over = ~infos["alive"].any(axis=1)
        self.ended = infos.get("_final_observation", np.zeros(self._num_envs, np.bool_))
        names = ("obs", "rewards", "terminated", "truncated", "infos") if len(expected) == 5 else ("obs", "infos")
        pairs = (_pairs(a, b, name) for name, a, b in zip(names, expected, got, strict=True))
        for what, first, second in (pair for part in pairs for pair in part):
            if what in _TWICE:
                continue
            if not (isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.dtype != object):
                if (found := difference(first, second, what)) is not None:
                    return self._unequal(found.path, found.at, found.expected, found.got)
            elif (first.dtype, first.shape) != (second.dtype, second.shape):
                return self._unequal(what, (), f"{first.dtype} {first.shape}", f"{second.dtype} {second.shape}")
            elif first.tobytes() != second.tobytes():
                at = _first_unequal(first, second)
                return self._unequal(what, at, repr(first[at].item()), repr(second[at].item()))
            else:
                self.numbers += first.size
        return None

    def _unequal(self, what: str, at: tuple[int, ...], expected: str, got: str) -> Unequal:
        parts = what.split("/")
        agent = None
        if len(at) > 1 and any(part in _BY_AGENT for part in parts[:2]):
            groups = self._native.groups
            members = next((groups[part] for part in parts if part in groups), tuple(range(self._native.agent_num)))
            agent = self._native.agents[members[at[1]]] if at[1] < len(members) else None
        return Unequal(what, at, expected, got, agent)


def _pairs(expected: Any, got: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, expected, got) of each leaf of two trees; subtrees of different structure count as leaves."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping) and expected.keys() == got.keys():
        for key in expected:
            yield from _pairs(expected[key], got[key], f"{path}/{key}")
    elif isinstance(expected, tuple) and isinstance(got, tuple) and len(expected) == len(got):
        for k, (first, second) in enumerate(zip(expected, got, strict=True)):
            yield from _pairs(first, second, f"{path}/{k}")
    else:
        yield path, expected, got


def _first_unequal(expected: NDArray[Any], got: NDArray[Any]) -> tuple[int, ...]:
    """Return the index of the first number whose bytes differ: 0.0 differs from -0.0, and NaN equals itself."""
    columns = [np.ascontiguousarray(one).reshape(-1, 1).view(np.uint8) for one in (expected, got)]
    place = int((columns[0] != columns[1]).any(axis=1).argmax())
    return tuple(int(k) for k in np.unravel_index(place, expected.shape))


_BUDGET = 100_000  # calls in all attempts


@dataclass(frozen=True, eq=False)
class Call:
    """One call; "resume" loads the state into a new env."""

    kind: Literal["reset", "step", "resume"]
    seed: int | None = None  # of a reset
    actions: Any = None  # of a step, a tree of (1, A_g, ...)

    def __str__(self) -> str:
        if self.kind == "reset":
            return "reset()" if self.seed is None else f"reset(seed={self.seed})"
        return "get_state(), set_state() in a new one" if self.kind == "resume" else f"step({_plain(self.actions)})"


def _plain(actions: Any) -> Any:
    return map_tree(lambda leaf: leaf[0].tolist(), actions)


def run(calls: Sequence[Call], build: Callable[[int], Pair]) -> tuple[int, Unequal] | None:
    """Play a script, which begins with a reset, to two equal envs (kernels would be compiled again for a single env).

    If an episode is over and the autoreset mode does not begin the next one, a step resets the env. Return the index of
    the call that shows a difference, and the difference; or None.
    """
    with build(2) as pair:
        for k, call in enumerate(calls):
            if call.kind == "resume":
                pair.resume()
                continue
            if call.kind == "reset":
                found = pair.reset([call.seed] * 2, [0, 1])
            elif pair.over.any() and pair.reference.autoreset_mode == "disabled":
                found = pair.reset([None] * 2, [0, 1])
            else:
                found = pair.step(map_tree(lambda leaf: np.concatenate([leaf, leaf]), call.actions))
            if found is not None:
                return k, found
    return None


def shorten(calls: Sequence[Call], build: Callable[[int], Pair]) -> tuple[list[Call], Unequal] | None:
    """Shorten a failing script: drop calls, then zero actions, while a difference remains.

    Return the short script and the difference at its end; None if a single env shows no difference.
    """
    search = _Search(build)
    if not search.fails(list(calls)):
        return None
    search.begin_late()
    before: list[Call] = []
    while search.best != before and search.left > 0:
        before = search.best
        search.cut()
        search.clear()
    assert search.found is not None
    return search.best, search.found


class _Search:
    """Search for a short script: ``best`` is the shortest so far, ``found`` its difference."""

    def __init__(self, build: Callable[[int], Pair]) -> None:
        self._build, self.left = build, _BUDGET
        self.best: list[Call] = []
        self.found: Unequal | None = None

    def fails(self, calls: list[Call]) -> bool:
        """Return whether a script leads to a difference; if so, keep it up to that call."""
        self.left -= len(calls)
        told = run(calls, self._build)
        if told is None:
            return False
        self.best, self.found = calls[: told[0] + 1], told[1]
        return True

    def begin_late(self) -> None:
        """Begin at the last seeded reset that still leads to the difference."""
        for k in range(len(self.best) - 1, 0, -1):
            if self.best[k].seed is not None and self.fails(self.best[k:]):
                return

    def cut(self) -> None:
        """Drop runs of calls, long runs first; never the first call, which has the seed."""
        size = len(self.best) // 2
        while size and self.left > 0:
            at = 1
            while at < len(self.best) and self.left > 0:
                if not self.fails(self.best[:at] + self.best[at + size :]):
                    at += size
            size //= 2

    def clear(self) -> None:
        """Set each agent's action to zero if the difference remains."""
        for k in range(len(self.best)):
            if k >= len(self.best) or self.best[k].kind != "step":
                continue
            for leaf in range(len(_leaves(self.best[k].actions))):
                for a in range(_leaves(self.best[k].actions)[leaf].shape[1]):
                    if self.left <= 0:
                        return
                    self._clear(k, leaf, a)
                    if k >= len(self.best):
                        return

    def _clear(self, k: int, leaf: int, a: int) -> None:
        actions = map_tree(np.copy, self.best[k].actions)
        own = _leaves(actions)[leaf]
        if own[:, a].any():
            own[:, a] = 0
            self.fails([*self.best[:k], replace(self.best[k], actions=actions), *self.best[k + 1 :]])


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in tree_leaves(tree)]


_MODES = tuple(mode.value for mode in AutoresetMode)
# Steps between partial resets (only after an episode has ended, so that long episodes can end), and between loads of
# the state into new envs.
_RESET, _RESUME = 0.04, 0.02
_SHOWN = 40  # calls of a script

Actions = Callable[[VectorEnv, np.random.Generator], Any]


@dataclass(frozen=True)
class NativeMatch:
    """Counts of steps, episodes and numbers that were equal bit for bit.

    Attributes:
        env_steps: Steps of envs.
        episodes: Episodes that ended.
        numbers: Numbers that were compared.
    """

    env_steps: int
    episodes: int
    numbers: int


def check_native_env(
    native: str | Callable[..., NativeEnv],
    reference: EnvLike,
    *,
    num_envs: int = 3,
    episodes: int = 3,
    seeds: Sequence[int] = (0, 1),
    actions: str | Actions = "random",
    autoreset_modes: Iterable[str] = _MODES,
    max_steps: int = 10_000,
    max_episode_steps: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> NativeMatch:
    """Step a native env and its reference side by side; raise at the first number that differs.

    For each autoreset mode and seed, both get the same calls until every env has ended ``episodes`` episodes: steps,
    and now and then a reset of some envs, with or without a seed. Random streams continue from one episode to the
    next, so that one draw too many shows in all later episodes. After each call all results are compared byte by byte:
    observations, rewards, flags, masks, infos, final observations, and global states if the env has them. Now and then
    the native envs' state is saved and loaded into new native envs, if they declare their state.

    Args:
        native: A subclass of `marlvec.native.NativeEnv`, a function from ``num_envs`` (and ``env_kwargs``) to one, or
            the id of an env that has a native form.
        reference: The env that it must equal: anything that `marlvec.make` takes. It runs with ``backend="sync"``.
        num_envs: Number of envs of each, at least 2.
        episodes: Number of episodes of each env.
        seeds: Seeds, one run each; env ``i`` gets ``seed + i``.
        actions: ``"random"``: random actions that masks allow. Or a function ``(envs, rng)`` that returns a step's
            actions, for states that random actions do not reach; ``envs`` is the reference's `marlvec.VectorEnv`,
            ``rng`` a numpy generator.
        autoreset_modes: Modes to play.
        max_steps: Steps in which every env must end an episode.
        max_episode_steps: A time limit for both, as in `marlvec.make`.
        env_kwargs: Arguments for both envs.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        The numbers of compared steps, episodes and values.

    Raises:
        ContractError: Agents, spaces or a number differ. The message names the number, its env, agent and step, and the
            seed; and the shortest sequence of calls found that shows the difference in a single env.
        ArgumentError: An argument is wrong.

    Example:
        ::

            check_native_env(Chase, "chase_v0", episodes=5, env_kwargs={"size": 9})
    """
    modes = list(autoreset_modes)
    for name, number, least in (
        ("num_envs", num_envs, 2),
        ("episodes", episodes, 1),
        ("max_steps", max_steps, 1),
    ):
        if (whole_number(number) or 0) < least:
            raise ArgumentError(f"check_native_env(): {name}: expected an int of at least {least}, got {number!r}")
    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise ArgumentError(f"check_native_env(): autoreset_modes: expected some of {_MODES}, got {unknown[0]!r}")
    if actions != "random" and not callable(actions):
        raise ArgumentError(f"check_native_env(): actions: expected 'random' or a function, got {actions!r}")
    kwargs = dict(env_kwargs or {})
    with make(reference, 1, backend="sync", env_kwargs=kwargs) as one:
        settings = {"max_episode_steps": max_episode_steps, "state": one.state_space is not None}
    # An id's registered arguments apply, too; every run uses the same builder.
    natives, references = partial(_native, native, kwargs, settings), partial(_reference, reference, kwargs, settings)
    draw = _random if actions == "random" else actions
    assert callable(draw)
    total = NativeMatch(0, 0, 0)
    with episodes_bar(len(modes) * len(seeds) * episodes * num_envs, "env steps", shown=progress) as show:
        for mode in modes:
            build = partial(Pair, natives, references, mode)
            for seed in seeds:
                with build(num_envs) as pair:
                    found = _Run(pair, mode, int(seed), draw, build).play(episodes, max_steps)
                total = NativeMatch(*map(sum, zip(astuple(total), astuple(found), strict=True)))
                show(total.episodes, total.env_steps)
    return total


def _native(native: str | Callable[..., NativeEnv], kwargs: Any, settings: Any, num_envs: int, mode: str) -> VectorEnv:
    settings = {"autoreset_mode": mode, "num_workers": 1, **settings}
    if isinstance(native, str):
        return make(native, num_envs, backend="native", env_kwargs=kwargs, **settings)
    env = native(num_envs, **kwargs)
    if not isinstance(env, NativeEnv):
        raise ArgumentError(f"check_native_env(): native: expected a NativeEnv, got {type(env).__name__}")
    return NativeVectorEnv(env, **settings)


def _reference(reference: EnvLike, kwargs: Any, settings: Any, num_envs: int, mode: str) -> VectorEnv:
    return make(reference, num_envs, backend="sync", autoreset_mode=mode, env_kwargs=kwargs, **settings)


def _random(envs: VectorEnv, rng: np.random.Generator) -> Any:
    return envs.random_action(seed=int(rng.integers(2**31)))


class _Run:
    def __init__(self, pair: Pair, mode: str, seed: int, draw: Actions, build: Callable[[int], Pair]) -> None:
        self._pair, self._mode, self._seed, self._draw, self._build = pair, mode, seed, draw, build
        self._rng = np.random.default_rng(seed)
        self._n = pair.reference.num_envs
        self._calls: list[list[Call]] = [[] for _ in range(self._n)]
        self._step = 0
        self._may_interrupt = True

    def play(self, episodes: int, max_steps: int) -> NativeMatch:
        pair, rng, everyone = self._pair, self._rng, list(range(self._n))
        pair.check_spec()
        ended = np.zeros(self._n, np.int64)
        self._reset([(self._seed + i) % 2**64 for i in everyone], everyone)
        while ended.min() < episodes:
            if self._step == max_steps and not ended.all():
                raise ContractError(
                    f"check_native_env: {self._name}: episodes: expected every env to end one within {max_steps} "
                    f"steps, got none from env {int(ended.argmin())}; pass max_steps or max_episode_steps"
                )
            over = np.flatnonzero(pair.over).tolist() if self._mode == "disabled" else []
            interrupts = self._may_interrupt and rng.random() < _RESET
            if over or interrupts:
                some = np.flatnonzero(rng.random(self._n) < 0.5).tolist() if interrupts else []
                chosen = sorted({*over, *some})
                if chosen:
                    self._may_interrupt &= not interrupts
                    seeds = [None if rng.random() < 0.5 else int(rng.integers(2**63)) for _ in chosen]
                    self._reset(seeds, chosen)
                    continue
            if pair.can_resume and rng.random() < _RESUME:
                pair.resume()
                for calls in self._calls:
                    calls.append(Call("resume"))
            self._take_step()
            ended += pair.ended
            self._may_interrupt |= bool(pair.ended.any())
        return NativeMatch(self._step * self._n, int(ended.sum()), pair.numbers)

    @property
    def _name(self) -> str:
        return str(self._pair.reference.spec.name)

    def _reset(self, seeds: list[int | None], env_ids: list[int]) -> None:
        for seed, i in zip(seeds, env_ids, strict=True):
            self._calls[i].append(Call("reset", seed))
        self._refuse(self._pair.reset(seeds, env_ids), "reset")

    def _take_step(self) -> None:
        actions = self._draw(self._pair.reference, self._rng)
        self._step += 1
        for i, calls in enumerate(self._calls):
            calls.append(Call("step", actions=_row(actions, i)))
        self._refuse(self._pair.step(actions), "step")

    def _refuse(self, found: Unequal | None, call: str) -> None:
        if found is None:
            return
        where = f"{call} {self._step}" if call == "step" else f"a reset after step {self._step}"
        text = f"check_native_env: {self._name}: {found.what}: {_place(found)}, {where} of seed {self._seed}, "
        text += f"autoreset_mode={self._mode!r}: expected {found.expected} (the reference's), got {found.got}"
        if found.at:
            text += "\n" + self._last_calls(found.at[0])
        raise ContractError(text)

    def _last_calls(self, i: int) -> str:
        short = shorten(self._calls[i], self._build)
        if short is None:
            return f"What env {i} was asked leads to no difference in an env alone: envs change one another"
        calls, found = short
        lines = [f"  {call}" for call in calls]
        if len(lines) > _SHOWN:
            lines[_SHOWN // 2 : -_SHOWN // 2] = [f"  … {len(lines) - _SHOWN} calls more …"]
        end = f"{found.what}: {_place(found, alone=True)}: expected {found.expected}, got {found.got}"
        return "\n".join(
            [f"In an env alone, {len(calls)} of {len(self._calls[i])} calls lead there:", *lines, f"  {end}"]
        )


def _row(actions: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i : i + 1].copy(), actions)


def _place(found: Unequal, *, alone: bool = False) -> str:
    parts = [f"env {found.at[0]}"] if found.at and not alone else []
    parts += [] if found.agent is None else [f"agent {found.agent!r}"]
    rest = found.at[1 if found.agent is None else 2 :]
    parts += [f"index {rest[0] if len(rest) == 1 else rest}"] if rest else []
    return ", ".join(parts) or "all of it"
