"""A block of anonymous shared memory, or a file without a name, passed to workers by file descriptor.

It has no entry in /dev/shm or a temporary folder, so none can be left behind, whichever process is killed.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

if sys.platform != "win32":
    import fcntl

from marlvec.vector.processes import limits

__all__ = ["create", "grow", "map_memory"]


def create(name: str = "marlvec", *, in_file: bool = False) -> int:
    """Open an empty block, private to this user, and return its file descriptor.

    Args:
        name: Its label in lists of a process's open files; it cannot be opened by this name.
        in_file: Use a file in the temporary folder, as on systems without anonymous shared memory.

    Raises:
        ResourceError: There is no free file descriptor, or no memory.
    """
    with limits.asked_for("a block of shared memory"):
        if not in_file and sys.platform == "linux" and hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)  # a memfd begins as 0777
            return fd
        with tempfile.TemporaryFile() as file:  # unlinked at once, mode 0600
            return os.dup(file.fileno())


def grow(fd: int, size: int, *, in_file: bool = False) -> None:
    """Give the block its final size, and allocate it: a lack of memory raises here, not as SIGBUS later.

    Args:
        fd: The block.
        size: Its size in bytes.
        in_file: As in `create`.

    Raises:
        ResourceError: There is not enough memory. Checked before the allocation: a kernel that overcommits, or a memory
            cgroup, would kill a process instead of refusing.
    """
    limits.check_memory(size)
    if sys.platform == "linux":
        with limits.asked_for(f"{size:,} bytes of shared memory"):
            os.posix_fallocate(fd, 0, size)
        if not in_file and hasattr(os, "memfd_create"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        os.ftruncate(fd, size)


def map_memory(fd: int, size: int, *, inherit: bool = True) -> mmap.mmap:
    """Map the block into this process. It is unmapped when the last array on it is deleted.

    Args:
        fd: The block.
        size: Its size in bytes.
        inherit: Whether forked children have the mapping, too. If not, on Linux, a child that accesses it dies: a child
            that continues a worker's code must not write into rows.
    """
    block = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if not inherit and hasattr(mmap, "MADV_DONTFORK"):
        block.madvise(mmap.MADV_DONTFORK)
    return block
