"""Linux's control groups (man 7 cgroups), which bound the cores and the memory of a container or a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["groups_of"]


def groups_of(controller: str, own: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the groups of this process that have a controller, and their ancestors.

    In a container the mount point may be its own group, while the path is the one outside: such folders are missing.

    Args:
        controller: ``"cpu"`` or ``"memory"``.
        own: File with the groups of this process: ``/proc/self/cgroup``.
        root: Mount point of the groups.

    Yields:
        A group's folder, and whether it is of version 1.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / path.strip("/")
            yield from ((group, bool(controllers)) for group in (folder, *folder.parents) if group.is_relative_to(top))
