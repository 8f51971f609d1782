"""What a file says of the batches in it: JSON in which names stand for the arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marlvec.errors import SerialisationError
from marlvec.trees import Tree

__all__ = ["ArrayNames", "outline_columns", "read_columns"]


class ArrayNames:
    """Gives every array a name that no other has and that any archive can hold, as close as can be to its own.

    Args:
        taken: Names that are not to be given.
    """

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        """A free name."""
        plain = "".join(char if char.isprintable() else "_" for char in wanted).strip("/") or "_"
        name, number = plain, 1
        while name in self._taken:
            number += 1
            name = f"{plain}~{number}"
        self._taken.add(name)
        return name


def outline_columns(columns: Mapping[str, Tree], prefix: str, put: Callable[[str, Any], str]) -> list[list[Any]]:
    """Write columns down as ``[name, tree]`` pairs, in order.

    A tree is the name of its array, ``{"dict": [[key, tree], …]}`` or ``{"tuple": [tree, …]}``.

    Args:
        columns: The columns.
        prefix: What the arrays' names begin with.
        put: Keeps an array of about this name, and returns the name it got.

    Raises:
        SerialisationError: A key of a dict is neither a text, a whole number, a bool nor None.
    """
    return [[name, _outline(column, f"{prefix}{name}", put)] for name, column in columns.items()]


def read_columns(outline: list[list[Any]], get: Callable[[str], Any]) -> dict[str, Tree]:
    """Columns again, of what `outline_columns` gave; whatever is wrong with it raises an ordinary error."""
    return {str(name): _tree(tree, get) for name, tree in outline}


def _outline(tree: Tree, name: str, put: Callable[[str, Any], str]) -> Any:
    if isinstance(tree, dict):
        if bad := [key for key in tree if key is not None and type(key) not in (str, int, bool)]:
            raise SerialisationError(
                f"{name!r} has the keys {bad}; a file holds dicts of texts, whole numbers, bools and None"
            )
        return {"dict": [[key, _outline(item, f"{name}/{key}", put)] for key, item in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_outline(item, f"{name}/{i}", put) for i, item in enumerate(tree)]}
    return put(name, tree)


def _tree(outline: Any, get: Callable[[str], Any]) -> Tree:
    if isinstance(outline, str):
        return get(outline)
    if "tuple" in outline:
        return tuple(_tree(item, get) for item in outline["tuple"])
    return {key: _tree(item, get) for key, item in outline["dict"]}
