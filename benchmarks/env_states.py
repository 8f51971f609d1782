"""What it costs to save envs and collectors, and to let them go on: milliseconds, and bytes in a file.

Run ``python benchmarks/env_states.py``, or with ``--num-envs 16 1024 --kinds native``. Of each kind: `get_state` and
`set_state` of all envs, in memory; the same to a file and back, as `save_state` and `load_state`, or `Collector.save`
and `load`, write and read it; a step beside them for comparison; and the size of the file. Medians of five calls, in
the middle of episodes. A collector has `NormalizeObs`, keeps batches of whole episodes, and so holds rows of all
running ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.connectors import FlattenObs, NormalizeObs

__all__ = ["KINDS", "Costs", "DriftEnv", "measure"]


class DriftEnv(gymnasium.Env[Any, Any]):
    """A small env that says what its state is."""

    observation_space = Box(-np.inf, np.inf, (8,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self._rng = np.random.default_rng()
        self._place = np.zeros(8, np.float32)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin somewhere."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._place, self._t = self._rng.normal(size=8).astype(np.float32), 0
        return self._place, {}

    def step(self, action: Any) -> Any:
        """Drift."""
        self._place = self._place + (action - 0.5) * self._rng.normal(size=8).astype(np.float32)
        self._t += 1
        return self._place, 0.0, self._t >= 100, False, {}

    def get_state(self) -> dict[str, Any]:
        """Place, time and random stream."""
        return {"place": self._place, "t": self._t, "rng": self._rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._place, self._t = state["place"], state["t"]
        self._rng.bit_generator.state = state["rng"]


@dataclass(frozen=True)
class Kind:
    """A kind of env.

    Attributes:
        name: What to call it.
        make: Builds so many of them.
        most: More are not tried: to build them would take minutes.
        is_collector: Whether a collector of such envs is saved, and not they alone.
    """

    name: str
    make: Callable[[int], marlvec.VectorEnv]
    most: int = 1 << 20
    is_collector: bool = False


def _native(env: str) -> Callable[[int], marlvec.VectorEnv]:
    return partial(marlvec.make, env, backend="native")


KINDS = (
    Kind("collector, simple_spread, native", _native("simple_spread"), is_collector=True),
    Kind("collector, connect_four, native", _native("connect_four"), is_collector=True),
    Kind("simple_spread, native", _native("simple_spread")),
    Kind("connect_four, native", _native("connect_four")),
    Kind("own get_state(), sync", lambda n: marlvec.make(DriftEnv, n, backend="sync")),
    Kind("own get_state(), async", lambda n: marlvec.make(DriftEnv, n, backend="async")),
    Kind(
        "CartPole-v1, deepcopy, sync", partial(marlvec.make, "CartPole-v1", backend="sync", env_state="deepcopy"), 1_024
    ),
    Kind(
        "simple_spread, deepcopy, sync",
        partial(marlvec.make, "simple_spread", backend="sync", env_state="deepcopy"),
        16,
    ),
    Kind("simple_spread, deepcopy, async", partial(marlvec.make, "simple_spread", env_state="deepcopy"), 1_024),
)


@dataclass(frozen=True)
class Costs:
    """What was measured of one kind.

    Attributes:
        get: Milliseconds of `get_state`.
        put: Milliseconds of `set_state`.
        save: Milliseconds of `get_state` and the file.
        load: Milliseconds of the file and `set_state`.
        step: Milliseconds of a step.
        size: Bytes of the file.
    """

    get: float
    put: float
    save: float
    load: float
    step: float
    size: int


def measure(kind: Kind, num_envs: int, repeats: int = 5) -> Costs:
    """Measure one kind.

    Args:
        kind: Which.
        num_envs: How many envs.
        repeats: Of how many calls the median is taken.
    """
    with kind.make(num_envs) as envs, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"
        save: Callable[[], Any]
        load: Callable[[], Any]
        step: Callable[[], Any]
        if kind.is_collector:
            collector = marlvec.Collector(
                envs,
                marlvec.RandomPolicy(),
                agent_connectors=[FlattenObs(), NormalizeObs()],
                batch_mode="complete",
                seed=0,
            )
            collector.collect(env_steps=3 * num_envs)  # whole episodes, and what is running then
            saved: Any = collector
            save, load = partial(collector.save, path), partial(collector.load, path)
            step = partial(collector.collect, env_steps=num_envs)
        else:
            envs.reset(seed=0)
            actions = envs.random_action(seed=0)
            for _ in range(3):
                envs.step(actions)
            saved, step = envs, partial(envs.step, actions)
            save, load = partial(_save_envs, path, envs), partial(_load_envs, path, envs)
        state = saved.get_state()
        saved.set_state(state)
        save()
        calls = (saved.get_state, partial(saved.set_state, state), save, load, step)
        get, put, saving, loading, stepping = (_median(call, repeats) for call in calls)
        return Costs(get, put, saving, loading, stepping, path.stat().st_size)


def _save_envs(path: Path, envs: marlvec.VectorEnv) -> None:
    marlvec.save_state(path, envs.get_state())


def _load_envs(path: Path, envs: marlvec.VectorEnv) -> None:
    envs.set_state(marlvec.load_state(path))


def _median(call: Callable[[], Any], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 1_024, 16_384])
    parser.add_argument("--kinds", default="", help="only those with this in their names")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    table = Table(
        "what", "N", "get", "set", "save", "load", "a step", "bytes", "an env", title="milliseconds, and bytes"
    )
    for kind in KINDS:
        for n in chosen.num_envs:
            if n <= kind.most and chosen.kinds in kind.name:
                costs = measure(kind, n, chosen.repeats)
                figures = [f"{ms:.3g}" for ms in (costs.get, costs.put, costs.save, costs.load, costs.step)]
                table.add_row(kind.name, f"{n:,}", *figures, f"{costs.size:,}", f"{costs.size / n:,.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
