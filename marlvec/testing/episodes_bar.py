"""`episodes_bar`: the progress bar of checks that play whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["episodes_bar"]


@contextmanager
def episodes_bar(total: int, unit: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the numbers of finished episodes and of units so far, and draws a bar on stderr."""
    if not shown:
        yield lambda episodes, units: None
        return
    from marlvec.collect.progress_bar import ProgressBar  # here: rich is slow to import

    began = perf_counter()
    with ProgressBar("check", "episodes", total, speed_unit=unit) as bar:
        yield lambda episodes, units: bar.show(min(episodes, total), speed=units / max(perf_counter() - began, 1e-9))
