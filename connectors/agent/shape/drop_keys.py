"""`DropKeys`: a Dict observation without some of its keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from gymnasium.spaces import Dict, Space, Tuple

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree

__all__ = ["DropKeys", "drop_from_space", "drop_from_value"]


class DropKeys(AgentConnector):
    """Takes parts out of nested Dict observations; a Dict that is left with one key stays a Dict.

    Args:
        paths: What to take out, e.g. ``"camera/left"``, with all below it. A Dict in a Tuple is reached by its number:
            ``"0/left"``.

    Raises:
        ArgumentError: No path is given; or, where a space is first seen: a path is not in it or names an entry of a
            Tuple, or a Dict would be left empty.
        UnsupportedSpaceError: Where a space is first seen: it is no Dict and no Tuple.
    """

    def __init__(self, *paths: str) -> None:
        if not paths:
            raise ArgumentError("name at least one path to drop")
        self.paths = paths
        self._tree: SpaceTree | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        self._tree.flatten(rows.obs)  # says what is wrong with observations of another structure
        return rows.replace(obs=drop_from_value(rows.obs, self.paths))

    def setup(self, space: Space[Any]) -> None:
        self.output_space(space)
        self._tree = SpaceTree(space)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return drop_from_space(space, self.paths, repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.paths))})"


def drop_from_space(space: Space[Any], paths: tuple[str, ...], who: str) -> Space[Any]:
    """Space without the keys at ``paths``.

    Raises:
        ArgumentError: A path is not in the space or names an entry of a Tuple, or a Dict would be left empty.
        UnsupportedSpaceError: The space is no Dict and no Tuple.
    """
    if not isinstance(space, (Dict, Tuple)):
        raise UnsupportedSpaceError(f"{who} needs a Dict to take keys out of, got {space}; put it further to the front")
    missing = set(paths)
    after = _drop(space, "", missing, paths, who)
    if missing:
        known = list(_keys(space, ""))
        raise ArgumentError(f"{who}: no key {sorted(missing)[0]!r} in the space; its keys are {known}")
    return after


def _drop(space: Space[Any], path: str, missing: set[str], paths: tuple[str, ...], who: str) -> Space[Any]:
    """Walk down; what is found is taken out of ``missing``."""
    if isinstance(space, Tuple):
        parts = []
        for i, sub in enumerate(space.spaces):
            if (at := _join(path, i)) in paths:
                raise ArgumentError(f"{who}: {at!r} is an entry of a Tuple, which has no keys to take out")
            parts.append(_drop(sub, at, missing, paths, who))
        return Tuple(parts)
    if not isinstance(space, Dict):
        return space
    kept: OrderedDict[Any, Space[Any]] = OrderedDict()  # Dict sorts the keys of any other
    for key, sub in space.spaces.items():
        at = _join(path, key)
        if at in paths:
            missing.difference_update(p for p in (at, *_keys(sub, at)) if p in missing)
        else:
            kept[key] = _drop(sub, at, missing, paths, who)
    if not kept:
        what = f"; drop {path!r} itself" if path else ""
        raise ArgumentError(f"{who} leaves nothing of {path or 'the observation'!r}{what}")
    return Dict(kept)


def drop_from_value(value: Tree, paths: tuple[str, ...], path: str = "") -> Tree:
    """Values of a space without those at ``paths``; nothing is copied."""
    if isinstance(value, dict):
        kept = ((key, item, _join(path, key)) for key, item in value.items())
        return {key: drop_from_value(item, paths, at) for key, item, at in kept if at not in paths}
    if isinstance(value, (tuple, list)):
        return tuple(drop_from_value(item, paths, _join(path, i)) for i, item in enumerate(value))
    return value


def _keys(space: Space[Any], path: str) -> list[str]:
    """Paths of all Dict keys and Tuple entries below."""
    if isinstance(space, Dict):
        pairs: list[tuple[Any, Space[Any]]] = list(space.spaces.items())
    elif isinstance(space, Tuple):
        pairs = list(enumerate(space.spaces))
    else:
        return []
    return [name for key, sub in pairs for name in (_join(path, key), *_keys(sub, _join(path, key)))]


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)
