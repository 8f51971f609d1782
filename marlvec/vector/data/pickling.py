"""Pickling of values one by one, so that an error names the failing value; and pickling of classes by value."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import cloudpickle

from marlvec.errors import SerialisationError

__all__ = ["cannot_unpickle", "dump_by_value", "dump_each", "importing", "load_each", "summary_of"]

_dumping = threading.RLock()  # cloudpickle has one set of modules to pickle by value for the whole process
_checked: tuple[tuple[str, ...], list[ModuleType]] = ((), [])


def dump_each(values: Sequence[Any], *, by_value: bool = False) -> bytes:
    """Pickle values one after the other; objects that they share are pickled once.

    `by_value`: the process that unpickles them cannot import the classes of this process's main module. Else only
    objects that cannot be pickled otherwise are pickled by value.
    """
    if by_value:
        return dump_by_value(values)
    try:
        return _dump(pickle.Pickler, values)
    except Exception:
        return _dump(cloudpickle.Pickler, values)


def _dump(kind: Any, values: Sequence[Any]) -> bytes:
    file = io.BytesIO()
    pickler = kind(file, protocol=5)
    for value in values:
        pickler.dump(value)
    return file.getvalue()


def dump_by_value(values: Sequence[Any]) -> bytes:
    """Pickle values one after the other, for processes that never ran this one's main module.

    Classes and functions are pickled by value, as those of ``__main__`` are, if their module

    * is ``__mp_main__``, the main module of a process that multiprocessing started;
    * is being imported right now: a worker that imports it would run it again, and make envs again;
    * cannot be found by name, or is another file there: pytest's ``importlib`` mode, a module loaded from a path.
    """
    with _by_value():
        return _dump(cloudpickle.Pickler, values)


def importing() -> set[str]:
    """Return the names of the modules that this thread is importing at this moment."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            spec = frame.f_globals.get("__spec__")
            if spec is not None and getattr(spec, "_initializing", False) and spec.name in sys.modules:
                names.add(spec.name)
        frame = frame.f_back
    return names


@contextmanager
def _by_value() -> Iterator[None]:
    with _dumping, ExitStack() as stack:
        for module in _not_to_be_imported():
            registered = cloudpickle.list_registry_pickle_by_value()  # by the user, or under a second name
            if module.__name__ not in registered and sys.modules.get(module.__name__) is module:
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _not_to_be_imported() -> list[ModuleType]:
    """Return the modules that workers must not, or cannot, import; searched again after further imports."""
    global _checked
    names = tuple(sys.modules)
    if names != _checked[0]:
        paths = set(sys.path)
        found = [
            module
            for module in list(sys.modules.values())
            if isinstance(file := getattr(module, "__file__", None), str)
            and file.endswith(".py")
            and (name := getattr(module, "__name__", "__main__")) != "__main__"
            and (name == "__mp_main__" or (_root_of(file, name) not in paths and not _can_be_found(module)))
        ]
        _checked = names, found
    if not (begun := importing()):
        return _checked[1]
    return _checked[1] + [sys.modules[name] for name in begun if getattr(sys.modules[name], "__file__", None)]


def _root_of(file: str, name: str) -> str:
    """Return the folder of sys.path in which a module of this file and name lies; empty if it cannot."""
    path = name.replace(".", "/")
    for end in (f"/{path}.py", f"/{path}/__init__.py"):
        if file.endswith(end):
            return file.removesuffix(end)
    return ""


def _can_be_found(module: ModuleType) -> bool:
    """Return whether an import of its name finds the file of this module."""
    parent = module.__name__.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module.__name__, path)
        except Exception:  # finders of other packages may raise anything
            continue
        if spec is not None:
            return not spec.origin or not spec.has_location or _is_same_file(spec.origin, str(module.__file__))
    return False


def _is_same_file(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:  # gone since, or inside an archive
        return one == other


def load_each(data: bytes, names: Iterable[str], *, where: str = "this process") -> list[Any]:
    """Unpickle values from `dump_each`; `SerialisationError` has the value's name and ``where``, this process."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    values = []
    for name in names:
        try:
            values.append(unpickler.load())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user classes may raise anything
            raise cannot_unpickle(name, error, where=where) from error
    return values


def summary_of(error: BaseException) -> str:
    """Return the type and text of an exception in one line."""
    try:
        text = str(error)
    except Exception as broken:  # an exception whose own __str__ raises is still an exception
        text = f"(its __str__ raised {type(broken).__name__})"
    lines = text.splitlines() or [""]
    first = lines[0] if len(lines[0]) <= 500 else lines[0][:500] + "…"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def cannot_unpickle(what: str, error: BaseException, *, where: str) -> SerialisationError:
    """Return the error for an object that was received through a pipe and cannot be unpickled."""
    return SerialisationError(
        f"{where} cannot unpickle {what}: {summary_of(error)}. Use plain data (numbers, text, arrays), or a class "
        f"that can be imported and unpickled there; or use backend='sync', which pickles nothing."
    )
