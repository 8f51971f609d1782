"""One block of anonymous shared memory, or of a file without a name, passed to workers by file descriptor.

Nothing here appears in /dev/shm or any temp folder, so nothing can be left behind there, whatever is killed.
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
        name: What it is called where a process's open files are listed; no name by which it could be opened.
        in_file: Use a file in the folder for temporary files, as systems without such memory do.

    Raises:
        ResourceError: There is no file descriptor left, or no memory.
    """
    with limits.asked_for("a block of shared memory"):
        if not in_file and sys.platform == "linux" and hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)  # a memfd begins as 0777
            return fd
        with tempfile.TemporaryFile() as file:  # unlinked at once, mode 0600
            return os.dup(file.fileno())


def grow(fd: int, size: int, *, in_file: bool = False) -> None:
    """Give the block its final size, allocated for real: running out of memory shows here, not as SIGBUS later.

    Args:
        fd: The block.
        size: Its size in bytes.
        in_file: As it was created.

    Raises:
        ResourceError: There is not as much memory. Looked at before it is taken: a kernel that overcommits, or a
            memory cgroup, would rather kill a process than refuse.
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
    """Map the block into this process. It is unmapped when the last array over it is gone.

    Args:
        fd: The block.
        size: Its size.
        inherit: Whether a forked child has it, too. Without, on Linux, a child dies by touching it: in a worker, one
            that goes on as if it were the worker itself must not write into rows.
    """
    block = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    if not inherit and hasattr(mmap, "MADV_DONTFORK"):
        block.madvise(mmap.MADV_DONTFORK)
    return block
