"""One block of memory without a name, shared with workers by file descriptor.

Nothing here appears in /dev/shm or any temp folder, so nothing can be left behind there, whoever is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile

__all__ = ["create", "grow", "map_memory"]


def create() -> int:
    """Open an empty block, private to this user, and return its file descriptor."""
    if sys.platform == "linux":
        fd = os.memfd_create("marlvec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)  # a memfd is born 0777
        return fd
    with tempfile.TemporaryFile() as file:  # unlinked at birth, mode 0600
        return os.dup(file.fileno())


def grow(fd: int, size: int) -> None:
    """Give the block its final size, allocated for real: running out of memory shows here, not as SIGBUS later.

    Raises:
        OSError: The kernel refuses. One that overcommits may kill a process instead.
    """
    if sys.platform == "linux":
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        os.ftruncate(fd, size)


def map_memory(fd: int, size: int) -> mmap.mmap:
    """Map the block into this process. It is unmapped when the last array over it is gone."""
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
