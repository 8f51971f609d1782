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
    """Open an empty block, private to this user; return its file descriptor, labelled ``name`` in lists of files."""
    # `in_file`: use a file in the temporary folder, as on systems without anonymous shared memory.
    with limits.asked_for("a block of shared memory"):
        if not in_file and sys.platform == "linux" and hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)  # a memfd begins as 0777
            return fd
        with tempfile.TemporaryFile() as file:  # unlinked at once, mode 0600
            return os.dup(file.fileno())


def grow(fd: int, size: int, *, in_file: bool = False) -> None:
    """Give the block its final size, in bytes, and allocate it: a lack of memory raises here, not as SIGBUS later."""
    # Checked before the allocation: a kernel that overcommits, or a memory cgroup, would kill a process instead.
    limits.check_memory(size)
    if sys.platform == "linux":
        with limits.asked_for(f"{size:,} bytes of shared memory"):
            os.posix_fallocate(fd, 0, size)
        if not in_file and hasattr(os, "memfd_create"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        os.ftruncate(fd, size)


def map_memory(fd: int, size: int, *, inherit: bool = True) -> mmap.mmap:
    """Map the block into this process. It is unmapped when the last array on it is deleted."""
    # Without `inherit`, on Linux, a forked child that accesses it dies: a child that continues a worker's code must not
    # write into rows.
    block = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if not inherit and hasattr(mmap, "MADV_DONTFORK"):
        block.madvise(mmap.MADV_DONTFORK)
    return block
