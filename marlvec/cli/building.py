"""Builds envs for a command; prints a line while they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

from rich.console import Console

from marlvec.making import make
from marlvec.native.catalog import native_entry
from marlvec.registry import resolve
from marlvec.vector import VectorEnv

__all__ = ["build_envs"]


def build_envs(env: str, num_envs: int, *, backend: str, console: Console | None = None, **options: Any) -> VectorEnv:
    """Build envs as `make` does; print a line, to stderr by default, if they are compiled: it takes seconds, once."""
    compiled = backend in ("auto", "native") and native_entry(resolve(env).entry.id) is not None
    with _announcing_compilation(env, console) if compiled else nullcontext():
        return make(env, num_envs, backend=backend, **options)


@contextmanager
def _announcing_compilation(env: str, console: Console | None) -> Iterator[None]:
    try:
        from numba.core import event
    except ImportError:  # make() raises, or takes another backend
        yield
        return
    console = Console(stderr=True, emoji=False) if console is None else console
    began: list[float] = []

    def on_start(self: object, what: object) -> None:
        if not began:
            began.append(perf_counter())
            console.print(f"compiling {env} for this machine, once; this time is not counted …", highlight=False)

    # numba reports compilation, not loading from disk.
    listener = type("Listener", (event.Listener,), {"on_start": on_start, "on_end": lambda self, what: None})()
    with event.install_listener("numba:compile", listener):
        yield
    if began:
        console.print(f"compiled in {perf_counter() - began[0]:.0f} s, and cached on disk", highlight=False)
