"""Records the calls of one env, and searches for the shortest script that still leads to a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from marlvec.testing.native_checks.pair import Pair, Unequal
from marlvec.trees import map_tree, tree_leaves

__all__ = ["Call", "run", "shorten"]

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
    while search.best != before and search.may_go_on:
        before = search.best
        search.cut()
        search.clear()
    assert search.found is not None
    return search.best, search.found


class _Search:
    """Search for a short script: ``best`` is the shortest so far, ``found`` its difference."""

    def __init__(self, build: Callable[[int], Pair]) -> None:
        self._build, self._left = build, _BUDGET
        self.best: list[Call] = []
        self.found: Unequal | None = None

    def fails(self, calls: list[Call]) -> bool:
        """Return whether a script leads to a difference; if so, keep it up to that call."""
        self._left -= len(calls)
        told = run(calls, self._build)
        if told is None:
            return False
        self.best, self.found = calls[: told[0] + 1], told[1]
        return True

    @property
    def may_go_on(self) -> bool:
        """Return whether attempts are left."""
        return self._left > 0

    def begin_late(self) -> None:
        """Begin at the last seeded reset that still leads to the difference."""
        for k in range(len(self.best) - 1, 0, -1):
            if self.best[k].seed is not None and self.fails(self.best[k:]):
                return

    def cut(self) -> None:
        """Drop runs of calls, long runs first; never the first call, which has the seed."""
        size = len(self.best) // 2
        while size and self._left > 0:
            at = 1
            while at < len(self.best) and self._left > 0:
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
                    if self._left <= 0:
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
