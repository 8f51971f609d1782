"""How tests wait: for what happens, never for as long as it usually takes. What a machine does first is its own affair.

`until` waits for a condition, `Gate` holds envs up until the test lets them go, `overdue` waits until some envs alone
have not replied. Where a time is promised, `within` bounds it, at ten times the usual and more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from marlvec.errors import FetchTimeout
from marlvec.testing.scripted import FaultyEnv

__all__ = ["LONG", "Gate", "GatedEnv", "overdue", "until", "within"]

LONG = 60.0
"""Seconds after which a test gives up: what it waits for usually takes milliseconds, seconds at most."""


def until(condition: Callable[[], Any], seconds: float = LONG) -> None:
    """Wait until this is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come to pass within {seconds} s"
        time.sleep(0.002)


@contextmanager
def within(seconds: float, *, usual: float) -> Iterator[None]:
    """Let the block take ``seconds`` at most. It usually takes ``usual``, and other programs may have the cores."""
    assert seconds >= 10 * usual, f"a bound is ten times the usual at least, {10 * usual} s"
    begin = time.monotonic()
    yield
    assert (took := time.monotonic() - begin) < seconds, f"took {took:.2f} s"


class Gate:
    """Lets through as many as the test says, in whatever thread or process they wait.

    Envs get a copy of their own: it is no more than a path.

    Args:
        folder: Where it may make a file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"gate-{len(list(folder.iterdir()))}"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR)  # keeps what is written while nobody waits

    def let_through(self, count: int = 1) -> None:
        """Let so many through, whether they wait already or come later."""
        os.write(self._fd, b"." * count)

    def wait(self) -> None:
        """Wait to be let through."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            os.read(fd, 1)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of it. Who still waits waits for ever."""
        os.close(self._fd)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return _opened, (self.path,)


def _opened(path: Path) -> Gate:
    gate = Gate.__new__(Gate)
    gate.path = path
    return gate


class GatedEnv(FaultyEnv):
    """Waits at a gate, in every step unless told otherwise.

    Args:
        gate: Where.
        options: See `FaultyEnv`.
    """

    def __init__(self, gate: Gate, *args: Any, at: int | None = None, env_index: int = 0, **options: Any) -> None:
        self._gate = gate
        super().__init__(*args, at=at, env_index=env_index, **options)

    def strike(self) -> None:
        self._gate.wait()


def overdue(fetch: Callable[..., Any], env_ids: Sequence[int], *args: Any) -> FetchTimeout:
    """Fetch, and run out of time, until these envs alone have not replied; the error that says so."""
    expected = re.compile(re.escape(f"envs {list(env_ids)} did not reply within"))
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        with pytest.raises(FetchTimeout) as caught:
            fetch(*args, timeout=0.02)
        if expected.search(str(caught.value)):
            return caught.value
    raise AssertionError(str(caught.value))
