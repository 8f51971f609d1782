"""The smallest space that contains several spaces of different sizes or bounds, and the part of each in it.

Observations: entries that an agent does not have are zero, and the bounds include all agents' values and that zero.
Actions: entries that an agent does not have are ignored; choices that it does not have must be masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree, describe_difference
from marlvec.spaces.tree import map_space

AnyArray = NDArray[Any]
Spaces = Sequence[Any]
_ADVICE = "leave pad out to have agents of different spaces in groups, or make the spaces similar with a wrapper"


def pad_observations(spaces: Spaces, agents: Sequence[str]) -> Space[Any]:
    """Return the space that contains every agent's padded observations; `agents` are names for messages."""
    return _Padding(agents, "observation", _OBSERVATIONS).pad(spaces, "")


def pad_actions(spaces: Spaces, agents: Sequence[str]) -> Space[Any]:
    """Return the action space whose first part is every agent's own action space; `agents` are names for messages."""
    return _Padding(agents, "action", _ACTIONS).pad(spaces, "")


def crops_of(own: Space[Any], padded: Space[Any]) -> list[Crop]:
    """Return the agent's own part of each leaf of a padded space, in the order of the padded space's leaves."""
    shapes = {leaf.path: leaf.shape for leaf in SpaceTree(own).leaves}
    return [tuple(map(slice, shapes[leaf.path])) for leaf in SpaceTree(padded).leaves]


class _CannotPad(Exception):
    """Why leaves cannot be padded; the caller adds the leaf."""


_Rule = Callable[[Spaces, str], Space[Any]]


class _Padding:
    def __init__(self, agents: Sequence[str], what: str, rules: Sequence[tuple[type[Any], _Rule]]) -> None:
        self._agents = agents
        self._what = what
        self._rules = rules

    def pad(self, spaces: Spaces, path: str) -> Space[Any]:
        first: Space[Any] = spaces[0]
        if all(space == first for space in spaces):
            return first
        if all(isinstance(space, Dict) for space in spaces):
            self._agree(spaces, path, "keys", lambda space: sorted(map(str, space.spaces)))
            parts = [(key, self.pad([s.spaces[key] for s in spaces], f"{path}/{key}")) for key in spaces[0].spaces]
            return Dict(parts)  # pairs keep their order; a dict would be sorted
        if all(isinstance(space, Tuple) for space in spaces):
            self._agree(spaces, path, "lengths", lambda space: len(space.spaces))
            columns = zip(*(space.spaces for space in spaces), strict=True)
            return Tuple([self.pad(column, f"{path}/{i}") for i, column in enumerate(columns)])
        for kind, rule in self._rules:
            if all(isinstance(space, kind) for space in spaces):
                if kind is not Discrete:
                    self._agree(spaces, path, "ranks", lambda space: len(space.shape))
                try:
                    return rule(spaces, path)
                except _CannotPad as why:
                    self._refuse(path, f"{why}: {self._each([repr(space) for space in spaces])}")
        self._refuse(path, self._each([repr(space) for space in spaces]))

    def _agree(self, spaces: Spaces, path: str, what: str, read: Callable[[Any], Any]) -> None:
        found = [read(space) for space in spaces]
        if any(other != found[0] for other in found):
            self._refuse(path, f"{what} differ: {self._each(list(map(str, found)))}")

    def _each(self, words: list[str]) -> str:
        """Name one agent for each different text."""
        return ", ".join(f"{agent!r} has {word}" for word, agent in dict(zip(words, self._agents, strict=True)).items())

    def _refuse(self, path: str, problem: str) -> NoReturn:
        leaf = f"leaf {path.removeprefix('/')!r} of the {self._what} spaces" if path else f"the {self._what} spaces"
        raise ContractError(f"pad=True cannot pad {leaf}: {problem}; {_ADVICE}")


def _spread(parts: Sequence[AnyArray], dtype: Any, absent: int = 0) -> list[AnyArray]:
    """Put each part into the first corner of an array large enough for all; fill the rest with ``absent``."""
    shape = tuple(np.max([part.shape for part in parts], axis=0).tolist())
    out = []
    for part in parts:
        whole = np.full(shape, absent, dtype)
        whole[tuple(map(slice, part.shape))] = part
        out.append(whole)
    return out


def _same_dtype(spaces: Spaces) -> Any:
    dtypes = {np.dtype(space.dtype) for space in spaces}
    if len(dtypes) > 1:
        raise _CannotPad("dtypes differ")
    return dtypes.pop()


def _overlay(parts: Sequence[AnyArray], dtype: Any, unowned: Any, what: str) -> AnyArray:
    """Overlay the parts, which must have equal values wherever they overlap."""
    shape = tuple(np.max([part.shape for part in parts], axis=0).tolist())
    out, known = np.full(shape, unowned, dtype), np.zeros(shape, np.bool_)
    for part in parts:
        corner = tuple(map(slice, part.shape))
        if (known[corner] & (out[corner] != part)).any():
            raise _CannotPad(f"{what} differ")
        out[corner], known[corner] = part, True
    return out


def _observed_box(spaces: Spaces, path: str) -> Space[Any]:
    dtype: Any = np.result_type(*(space.dtype for space in spaces))
    # Without axes these would be scalars, and Box takes no bools.
    low = np.asarray(np.min(_spread([space.low for space in spaces], dtype), axis=0))
    high = np.asarray(np.max(_spread([space.high for space in spaces], dtype), axis=0))
    return Box(low, high, low.shape, dtype)


def _observed_discrete(spaces: Spaces, path: str) -> Space[Any]:
    start = min(int(space.start) for space in spaces)
    end = max(int(space.start + space.n) for space in spaces)
    return Discrete(end - start, start=start)


def _observed_multidiscrete(spaces: Spaces, path: str) -> Space[Any]:
    dtype: Any = np.result_type(*(space.dtype for space in spaces))
    low = np.min(_spread([space.start for space in spaces], dtype), axis=0)
    high = np.max(_spread([space.start + space.nvec - 1 for space in spaces], dtype), axis=0)
    return MultiDiscrete(high - low + 1, dtype=dtype, start=low)


def _multibinary(spaces: Spaces, path: str) -> Space[Any]:
    shape = np.max([space.shape for space in spaces], axis=0).tolist()
    return MultiBinary(shape[0] if len(shape) == 1 else shape)


def _acted_box(spaces: Spaces, path: str) -> Space[Any]:
    dtype = _same_dtype(spaces)
    low = _overlay([s.low for s in spaces], dtype, min(s.low.min(initial=0) for s in spaces), "bounds")
    high = _overlay([s.high for s in spaces], dtype, max(s.high.max(initial=0) for s in spaces), "bounds")
    return Box(low, high, low.shape, dtype)


def _acted_discrete(spaces: Spaces, path: str) -> Space[Any]:
    _same_dtype(spaces)
    _can_be_masked(path)
    if len({int(space.start) for space in spaces}) > 1:
        raise _CannotPad("starts differ")
    sizes = [int(space.n) for space in spaces]
    largest: Space[Any] = spaces[sizes.index(max(sizes))]
    return largest


def _acted_multidiscrete(spaces: Spaces, path: str) -> Space[Any]:
    dtype = _same_dtype(spaces)
    _can_be_masked(path)
    start = _overlay([space.start for space in spaces], dtype, 0, "starts")
    return MultiDiscrete(np.max(_spread([s.nvec for s in spaces], dtype, 1), axis=0), dtype=dtype, start=start)


def _can_be_masked(path: str) -> None:
    if path:
        raise _CannotPad("choices differ where no action mask can forbid them")


_OBSERVATIONS: Sequence[tuple[type[Any], _Rule]] = (
    (Box, _observed_box),
    (Discrete, _observed_discrete),
    (MultiDiscrete, _observed_multidiscrete),
    (MultiBinary, _multibinary),
)
_ACTIONS: Sequence[tuple[type[Any], _Rule]] = (
    (Box, _acted_box),
    (Discrete, _acted_discrete),
    (MultiDiscrete, _acted_multidiscrete),
    (MultiBinary, _multibinary),
)
Crop = tuple[slice, ...]
"""An agent's own part of a padded array: one slice per axis."""


def cut(array: AnyArray, crop: Crop) -> AnyArray:
    """Return an agent's own part of its padded array: a view, even of an array without axes."""
    return array[crop] if crop else array


# --- spaces that differ only in bounds


def widen(a: Space[Any], b: Space[Any]) -> Space[Any]:
    """Return the space that contains the members of both, which differ at most in the bounds of Boxes."""
    if a == b:
        return a
    if isinstance(a, Dict) and isinstance(b, Dict):
        return Dict([(key, widen(sub, b.spaces[key])) for key, sub in a.spaces.items()])
    if isinstance(a, Tuple) and isinstance(b, Tuple):
        return Tuple([widen(x, y) for x, y in zip(a.spaces, b.spaces, strict=True)])
    if isinstance(a, Box) and isinstance(b, Box):
        dtype: Any = a.dtype
        # Without axes the results are scalars, and Box takes no bools.
        low, high = np.asarray(np.minimum(a.low, b.low)), np.asarray(np.maximum(a.high, b.high))
        return Box(low, high, a.shape, dtype)
    return a


def describe_incompatibility(expected: Space[Any], got: Space[Any]) -> str | None:
    """Return where two spaces first differ in more than the bounds of a Box, or None."""
    return describe_difference(map_space(_boundless, expected), map_space(_boundless, got))


def _boundless(space: Space[Any]) -> Space[Any]:
    if not isinstance(space, Box):
        return space
    dtype: Any = np.dtype(space.dtype)
    if dtype.kind == "f":
        return Box(-np.inf, np.inf, space.shape, dtype)
    ends: tuple[Any, Any] = (False, True) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return Box(np.full(space.shape, ends[0], dtype), np.full(space.shape, ends[1], dtype), space.shape, dtype)
