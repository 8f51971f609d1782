"""How a program is made to die in the middle of writing a file."""

from __future__ import annotations

__all__ = ["DYING"]

DYING = """
import os, signal, sys
from pathlib import Path

path, number = sys.argv[1], 0

def deadly(function, at):
    def call(*args, **kwargs):
        global number
        number += 1
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

class Dying:
    '''A file whose every write and flush is counted; the n-th is the process's last act.'''
    def __init__(self, file, at):
        self.file = file
        self.write = deadly(file.write, at)
        self.flush = deadly(file.flush, at)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *args):
        self.file.close()

def spoil(at):
    open_, replace = Path.open, Path.replace
    Path.open = lambda *a, **k: Dying(open_(*a, buffering=0, **k), at)
    Path.replace = deadly(replace, at)
    os.fsync = deadly(os.fsync, at)
"""
"""The n-th write, flush, fsync or rename after ``spoil(n)`` is the process's last act. ``path`` is its argument."""
