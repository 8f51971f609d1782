"""Lets a policy file import the modules that stand beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["beside"]

_homes: dict[str, Path] = {}  # of what files have imported so: top-level module to the folder that it is from


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Have modules in a folder found in here, after all others, so that none stands in an installed one's place.

    ``sys.path`` is left alone: worker processes get a copy of it. Two files in two folders may each have a neighbour of
    the same name; each gets its own.

    Args:
        folder: Where to look.
    """
    folder = folder.resolve()
    for name in [name for name, home in _homes.items() if home != folder]:
        del _homes[name]
        for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[loaded]
    finder = _Neighbours(folder)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Neighbours(MetaPathFinder):
    """Finds top-level modules in one folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks; ``path`` is None for top-level modules."""
        if path is not None:
            return None
        spec = PathFinder.find_spec(fullname, [str(self._folder)], target)
        if spec is not None:
            _homes[fullname] = self._folder
        return spec
