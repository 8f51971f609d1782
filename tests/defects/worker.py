"""The way of a defect into worker processes: it comes with the loop that they are given to run."""

from __future__ import annotations

from typing import Any

from marlvec.vector.workers.worker import WorkerLink, serve
from tests.defects import vector  # noqa: F401  (they are in the registry then)
from tests.defects.registry import DEFECTS, Patch

__all__ = ["Loop", "put_in"]

_there: set[str] = set()  # a worker that was forked has those of its parent


class PlainPatch:
    """Patches for good."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)


def put_in(name: str, patch: Patch | None = None) -> None:
    """Put a defect into this process, once."""
    if name not in _there:
        _there.add(name)
        DEFECTS[name].apply(patch or PlainPatch())


class Loop:
    """The loop of any worker; where it is unpickled, the defect is put in first.

    Args:
        name: The defect's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, link: WorkerLink) -> None:
        serve(link)

    def __reduce__(self) -> Any:
        return _loop_with, (self.name,)


def _loop_with(name: str) -> Loop:
    put_in(name)
    return Loop(name)
