"""`Pair`: native envs and their reference, which get the same calls; and the shortest calls that show a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces.equality import difference
from marlvec.trees import map_tree, tree_leaves
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
