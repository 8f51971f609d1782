"""`load_file`: imports a Python file by its path; the file may import the modules of its folder."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["load_file"]

_homes: dict[str, Path] = {}  # top-level module that a loaded file has imported → the module's folder
_loaded: dict[Path, tuple[int, ModuleType]] = {}  # path → time of the file's last change, and its module


def load_file(path: Path) -> ModuleType:
    """Import a file under its own name, or with a suffix if another module has that name.

    It is imported again only if it has changed, and then into the same module; a file that raises is not imported. Its
    classes and functions are pickled by value for worker processes that cannot import it by name.
    """
    path = path.resolve(strict=True)
    changed = path.stat().st_mtime_ns
    known = _loaded.get(path)
    module = _new_module(path) if known is None else known[1]
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses and pickle need it there
    if known is not None and known[0] == changed:
        return module
    assert module.__spec__ is not None  # `_new_module` has made the module from a spec,
    assert module.__spec__.loader is not None  # which has a loader
    try:
        with _beside(path.parent):
            module.__spec__.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before
        raise
    _loaded[path] = changed, module
    return module


def _new_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_name_of(path), path)
    assert spec is not None  # every path that ends in .py has one
    return importlib.util.module_from_spec(spec)


def _name_of(path: Path) -> str:
    """Return the file's stem as module name, with a suffix if another module has that name."""
    name = path.stem
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None) or ""
    else:
        spec = None if "." in name else PathFinder.find_spec(name)
        origin = str(path) if spec is None or spec.origin is None else spec.origin
    is_free = origin == str(path) or (Path(origin).is_file() and path.samefile(origin))
    return name if is_free else f"{name}_{zlib.crc32(bytes(path)):08x}"


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let imports in the block find modules in a folder, after all others, so that none hides an installed module.

    ``sys.path`` is not changed, since worker processes get a copy of it. Files in two folders may each import a
    neighbour of the same name; each gets the one in its folder.
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
    """Finds top-level modules, whose ``path`` is None, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None
        spec = PathFinder.find_spec(fullname, [str(self._folder)], target)
        if spec is not None:
            _homes[fullname] = self._folder
        return spec
