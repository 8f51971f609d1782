"""Linux without what macOS lacks, for every Python that has this folder in PYTHONPATH, workers included."""

import ctypes  # noqa: F401  (these see Linux)
import multiprocessing  # noqa: F401
import os
import resource
import select
import socket
import subprocess  # noqa: F401
import sys
import sysconfig
import tempfile  # noqa: F401
import threading  # noqa: F401

import numpy as np  # noqa: F401

sysconfig.get_config_vars()
for module, names in (
    (os, "memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fallocate eventfd"),
    (resource, "prlimit RLIMIT_RTTIME"),
    (select, "epoll"),
    (socket, "SOCK_CLOEXEC"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
