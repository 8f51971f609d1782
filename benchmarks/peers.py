"""The same envs through other libraries' vectorizers, side by side with ours in one run.

Run ``python benchmarks/peers.py`` in an environment that has some of gymnasium, supersuit, tianshou, stable-baselines3
and pufferlib; what is not installed is named and left out. As in `limit`, contestants take turns in short rounds,
ratios are taken inside a round, and medians over rounds are quoted with their quartiles.

Libraries that know only envs with one agent get the team as one: observations (A, 18), MultiDiscrete actions, the sum
of the rewards. Everybody starts as his library does by default; where a careful user would choose otherwise, that
stands beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete
from limit import make_spread
from pettingzoo import ParallelEnv
from rich.console import Console
from rich.progress import track
from rich.table import Table
from yardsticks import Bare, Contestant, spread, usable_cores

import marlvec
from marlvec.testing import NoOpEnv

LENGTH = 25  # steps of an episode, of both envs


class Idle(NoOpEnv, ParallelEnv[str, Any, int]):
    """Does nothing, and derives from the class that SuperSuit asks for."""

    def __init__(self) -> None:
        super().__init__(length=LENGTH)
        self.render_mode = None


ENVS: dict[str, Callable[[], Any]] = {"simple_spread": make_spread, "no-op": Idle}


class Team(gymnasium.Env[Any, Any]):
    """A Parallel env as an env with one agent."""

    metadata = {"render_modes": []}

    def __init__(self, make_env: Callable[[], Any]) -> None:
        self.env = make_env()
        self.names = self.env.possible_agents
        space = self.env.observation_space(self.names[0])
        self.observation_space = Box(-np.inf, np.inf, (len(self.names), *space.shape), np.float32)
        self.action_space = MultiDiscrete([5] * len(self.names))

    def _stack(self, obs: dict[str, Any]) -> Any:
        return np.array([obs[name] for name in self.names], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, _ = self.env.reset(seed=seed)
        return self._stack(obs), {}

    def step(self, action: Any) -> Any:
        obs, rewards, _, _, _ = self.env.step(dict(zip(self.names, action.tolist(), strict=True)))
        return self._stack(obs), float(sum(rewards.values())), False, not self.env.agents, {}


class _Peer:
    """Anything with a ``step(actions)`` that returns rows, and flags among them."""

    def __init__(self, step: Callable[[Any], Any], close: Callable[[], None], shape: tuple[int, ...]) -> None:
        self._step, self.close = step, close
        self._actions = np.random.default_rng(0).integers(0, 5, (64, *shape))
        self._t = 0

    def run(self, vector_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(vector_steps):
            self._t += 1
            self._step(self._actions[self._t & 63])
        return time.perf_counter() - start

    def ends(self, vector_steps: int) -> int:
        """How many rows ended an episode in so many steps: proof that all envs were stepped."""
        total = 0
        for _ in range(vector_steps):
            self._t += 1
            flags = [part for part in self._step(self._actions[self._t & 63])[2:4] if isinstance(part, np.ndarray)]
            total += int(np.count_nonzero(np.logical_or.reduce(flags)))
        return total


def _marlvec(make_env: Callable[[], Any], n: int) -> Iterator[tuple[str, _Peer]]:
    for label, settings in (("async", {"backend": "async"}), ("sync", {"backend": "sync"})):
        envs = marlvec.make(make_env, num_envs=n, **settings)  # type: ignore[arg-type]  # a table of settings
        envs.reset(seed=0)
        yield f"marlvec {label}", _Peer(envs.step, envs.close, (n, envs.agent_num))


def _gymnasium(make_env: Callable[[], Any], n: int) -> Iterator[tuple[str, _Peer]]:
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    factories = [partial(Team, make_env)] * n
    for label, build in (
        (f"Gymnasium Async, {n} processes", partial(AsyncVectorEnv, factories)),
        ("Gymnasium Async, copy=False", partial(AsyncVectorEnv, factories, copy=False)),
        ("Gymnasium Sync", partial(SyncVectorEnv, factories)),
    ):
        envs = build()
        envs.reset(seed=0)
        yield label, _Peer(envs.step, envs.close, (n, *envs.single_action_space.shape))


def _supersuit(make_env: Callable[[], Any], n: int) -> Iterator[tuple[str, _Peer]]:
    import supersuit

    for cpus in (usable_cores(), 1):
        one = supersuit.pettingzoo_env_to_vec_env_v1(make_env())
        envs = supersuit.concat_vec_envs_v1(one, n, num_cpus=cpus, base_class="gymnasium")
        envs.reset(seed=0)
        label = f"SuperSuit, {cpus} processes" if cpus > 1 else "SuperSuit, this process"
        yield label, _Peer(envs.step, envs.close, (n * one.num_envs,))


def _tianshou(make_env: Callable[[], Any], n: int) -> Iterator[tuple[str, _Peer]]:
    from tianshou.env import DummyVectorEnv, ShmemVectorEnv, SubprocVectorEnv

    factories = [partial(Team, make_env)] * n
    kinds = {f"Subproc, {n} processes": SubprocVectorEnv, "Shmem": ShmemVectorEnv, "Dummy": DummyVectorEnv}
    for label, kind in kinds.items():
        envs = kind(factories)
        envs.reset()

        def step(actions: Any, envs: Any = envs) -> Any:
            result = envs.step(actions)
            done = result[2] | result[3]
            if done.any():  # it leaves this to its collector
                envs.reset(np.flatnonzero(done))
            return result

        agents = len(make_env().possible_agents)
        yield f"Tianshou {label}", _Peer(step, envs.close, (n, agents))


def _stable_baselines(make_env: Callable[[], Any], n: int) -> Iterator[tuple[str, _Peer]]:
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    factories = [partial(Team, make_env)] * n
    for label, kind in ((f"Subproc, {n} processes", SubprocVecEnv), ("Dummy", DummyVecEnv)):
        envs = kind(factories)
        envs.reset()
        yield f"SB3 {label}", _Peer(envs.step, envs.close, (n, *envs.action_space.shape))


def _pufferlib(make_env: Callable[[], Any], n: int) -> Iterator[tuple[str, _Peer]]:
    import pufferlib.emulation
    import pufferlib.vector

    create = partial(_puffer_env, make_env)
    workers = usable_cores()
    kinds = {
        f"{workers} workers": {"backend": pufferlib.vector.Multiprocessing, "num_workers": workers},
        "Serial": {"backend": pufferlib.vector.Serial},
    }
    for label, settings in kinds.items():
        envs = pufferlib.vector.make(create, num_envs=n, **settings)
        envs.reset(seed=0)
        yield f"PufferLib, {label}", _Peer(envs.step, envs.close, (envs.num_agents,))


def _puffer_env(make_env: Callable[[], Any], **kwargs: Any) -> Any:
    import pufferlib.emulation

    return pufferlib.emulation.PettingZooPufferEnv(make_env(), **kwargs)


PEERS: dict[str, Callable[[Callable[[], Any], int], Iterator[tuple[str, _Peer]]]] = {
    "marlvec": _marlvec,
    "gymnasium": _gymnasium,
    "supersuit": _supersuit,
    "tianshou": _tianshou,
    "stable-baselines3": _stable_baselines,
    "pufferlib": _pufferlib,
}


def contestants(console: Console, make_env: Callable[[], Any], n: int) -> dict[str, Contestant]:
    """Everybody who is installed and can be made; each has shown that it steps all envs."""
    found: dict[str, Contestant] = {"P: bare loop on every core": Bare(make_env, n)}
    agents = len(make_env().possible_agents)
    for library, build in PEERS.items():
        try:
            if _version(library) is None:
                continue
            for label, peer in build(make_env, n):
                found[label] = peer
                ends = peer.ends(4 * (LENGTH + 1)) / n
                # An autoreset may cost a step, and rows may be agents.
                if not any(4 * rows - 1 <= ends <= 4 * rows + 1 for rows in (1, agents)):
                    console.print(f"{label}: {ends} ends per env in {4 * (LENGTH + 1)} steps, left out")
                    peer.close()
                    del found[label]
        except Exception as error:  # a peer that cannot be made is no reason to show none
            console.print(f"{library}: {type(error).__name__}: {error}", markup=False)
    return found


def measure(everybody: dict[str, Contestant], rounds: int, seconds: float, label: str) -> dict[str, Any]:
    """Seconds per vector step, (rounds,) per contestant."""
    steps = {}
    for name, one in everybody.items():
        count = 2
        while (took := one.run(count)) < seconds / 4:
            count *= 2
        steps[name] = max(1, round(count * seconds / took))
    times: dict[str, list[float]] = {name: [] for name in everybody}
    for r in track(range(rounds), description=label, transient=True):
        for name in list(everybody) if r % 2 == 0 else reversed(list(everybody)):
            times[name].append(everybody[name].run(steps[name]) / steps[name])
    return {name: np.array(values) for name, values in times.items()}


def report(console: Console, title: str, times: dict[str, Any]) -> None:
    """Print the table of one env."""
    table = Table(title=title)
    for heading in ("", "µs per vector step", "share of P", "time / marlvec async"):
        table.add_column(heading, justify="left" if not heading else "right")
    bare, ours = next(iter(times.values())), times["marlvec async"]
    for name, seconds in times.items():
        table.add_row(name, f"{np.median(seconds) * 1e6:,.0f}", spread(bare / seconds), spread(seconds / ours))
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.15, help="of each contestant in each round")
    parser.add_argument("--env", choices=list(ENVS), default=None, help="only this one")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of old idioms in the peers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=120)
    versions = ", ".join(f"{name} {_version(name) or '(not installed)'}" for name in PEERS)
    console.print(f"Python {platform.python_version()}, {usable_cores()} usable cores; {versions}")
    for name in [args.env] if args.env else list(ENVS):
        everybody = contestants(console, ENVS[name], args.num_envs)
        try:
            times = measure(everybody, args.rounds, args.seconds, name)
        finally:
            for one in everybody.values():
                one.close()
        report(console, f"{name}, {args.num_envs} envs", times)


def _version(name: str) -> str | None:
    if name == "marlvec":  # also where it is on the path only
        return marlvec.__version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
