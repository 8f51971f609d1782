"""Envs for a command, and a word while they are compiled."""

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
    """Build envs as `make`; if that means to compile them, which takes seconds and is done once, say so.

    Args:
        env: What to build.
        num_envs: N.
        backend: As for `make`.
        console: Where that is said; None: on stderr.
        options: For `make`.
    """
    compiled = backend in ("auto", "native") and native_entry(resolve(env).entry.id) is not None
    with _saying_what_is_compiled(env, console) if compiled else nullcontext():
        return make(env, num_envs, backend=backend, **options)


@contextmanager
def _saying_what_is_compiled(env: str, console: Console | None) -> Iterator[None]:
    try:
        from numba.core import event
    except ImportError:  # make() says what is missing, or takes another backend
        yield
        return
    console = Console(stderr=True, emoji=False) if console is None else console
    began: list[float] = []

    def on_start(self: object, what: object) -> None:
        if not began:
            began.append(perf_counter())
            console.print(f"compiling {env} for this machine, once; that is not counted as speed …", highlight=False)

    # numba reports what it compiles, and not what it finds on disk.
    listener = type("Listener", (event.Listener,), {"on_start": on_start, "on_end": lambda self, what: None})()
    with event.install_listener("numba:compile", listener):
        yield
    if began:
        console.print(f"compiled in {perf_counter() - began[0]:.0f} s, and kept on disk", highlight=False)
