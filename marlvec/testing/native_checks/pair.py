"""`Pair`: native envs and their reference, which get the same calls, and their first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces.equality import difference
from marlvec.vector.vector_env import VectorEnv

__all__ = ["MakeEnvs", "Pair", "Unequal"]

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
