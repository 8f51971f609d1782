"""What marlvec is measured against: the same raw envs, with as little around them as can be.

* `Bare` (P): a bare loop over one raw env on every core at once. No machinery at all: the physical limit.
* `Lockstep` (L): as many forked workers as cores; raw envs write their rows into shared memory; one byte through a pipe
  each way per vector step. Nothing is checked, copied or protected.
* `HandLoop`: a careful loop over all envs in this process, as one writes it by hand: arrays, autoreset, final
  observations.

Each has ``run(vector_steps)`` and counts env steps per second.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

__all__ = ["Bare", "Contestant", "HandLoop", "Lockstep", "spread", "usable_cores"]

MakeEnv = Callable[[], Any]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Contestant(Protocol):
    """Anything that steps ``num_envs`` envs."""

    def run(self, vector_steps: int) -> float:
        """Take so many vector steps; seconds they took."""

    def close(self) -> None:
        """Release everything."""


class _Forked:
    """Forked children that run a function each time they are told to."""

    def __init__(self, bodies: list[Callable[[int], None]]) -> None:
        self._children: list[tuple[int, int, int]] = []
        for body in bodies:
            down_r, down_w = os.pipe()
            up_r, up_w = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(down_w)
                os.close(up_r)
                while head := os.read(down_r, 4):
                    start = time.perf_counter()
                    body(struct.unpack("i", head)[0])
                    os.write(up_w, struct.pack("d", time.perf_counter() - start))
                os._exit(0)
            os.close(down_r)
            os.close(up_w)
            self._children.append((pid, down_w, up_r))

    def call(self, count: int) -> list[float]:
        """Let all run ``count`` steps at once; seconds each took."""
        for _, down, _ in self._children:
            os.write(down, struct.pack("i", count))
        return [struct.unpack("d", os.read(up, 8))[0] for _, _, up in self._children]

    def close(self) -> None:
        _end(self._children)


def _end(children: list[tuple[int, int, int]]) -> None:
    """End forked children. A closed pipe would not tell them: those forked later hold its other end too."""
    for pid, down, up in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(down)
        os.close(up)
    children.clear()


class Bare:
    """P: one raw env per core, all cores at once.

    Args:
        make_env: A PettingZoo Parallel env with Discrete(5) actions.
        num_envs: How many envs the others step; ``run(k)`` takes ``k * num_envs`` env steps in all.
    """

    def __init__(self, make_env: MakeEnv, num_envs: int) -> None:
        self._cores = usable_cores()
        self._num_envs = num_envs
        self._forked = _Forked([_bare_loop(make_env, seed) for seed in range(self._cores)])

    def run(self, vector_steps: int) -> float:
        each = -(-vector_steps * self._num_envs // self._cores)
        times = self._forked.call(each)
        # Each core's own rate counts, for as long as it ran.
        rate = sum(each / seconds for seconds in times)
        return vector_steps * self._num_envs / rate

    def close(self) -> None:
        self._forked.close()


def _bare_loop(make_env: MakeEnv, seed: int) -> Callable[[int], None]:
    env = make_env()
    env.reset(seed=seed)
    script = _action_dicts(env.possible_agents, seed)

    def body(count: int) -> None:
        for t in range(count):
            env.step(script[t & 63])
            if not env.agents:
                env.reset()

    return body


def _action_dicts(agents: list[str], seed: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    return [dict(zip(agents, row, strict=True)) for row in rng.integers(0, 5, (64, len(agents))).tolist()]


class Lockstep:
    """L: forked workers, rows in shared memory, one byte each way per vector step."""

    def __init__(self, make_env: MakeEnv, num_envs: int) -> None:
        probe = make_env()
        agents = probe.possible_agents
        shape = (num_envs, len(agents), *probe.observation_space(agents[0]).shape)
        self._obs = np.frombuffer(mmap.mmap(-1, 4 * int(np.prod(shape))), np.float32).reshape(shape)
        self._scalars = np.frombuffer(mmap.mmap(-1, 3 * 8 * num_envs * len(agents)), np.float64).reshape(
            3, num_envs, len(agents)
        )
        self._children: list[tuple[int, int, int]] = []
        for slice_ in np.array_split(np.arange(num_envs), usable_cores()):
            down_r, down_w = os.pipe()
            up_r, up_w = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(down_w)
                os.close(up_r)
                step = _row_loop(make_env, slice_.tolist(), self._obs, self._scalars)
                while os.read(down_r, 1):
                    step()
                    os.write(up_w, b"x")
                os._exit(0)
            os.close(down_r)
            os.close(up_w)
            self._children.append((pid, down_w, up_r))

    def run(self, vector_steps: int) -> float:
        children = self._children
        start = time.perf_counter()
        for _ in range(vector_steps):
            for _, down, _ in children:
                os.write(down, b"x")
            for _, _, up in children:
                os.read(up, 1)
        return time.perf_counter() - start

    def close(self) -> None:
        _end(self._children)


def _row_loop(make_env: MakeEnv, rows: list[int], obs_NA: Any, scalars: Any) -> Callable[[], None]:
    envs = []
    for i in rows:
        env = make_env()
        agents = env.possible_agents
        env.reset(seed=i)
        views = [(name, obs_NA[i, a]) for a, name in enumerate(agents)]
        reward, terminated, truncated = (memoryview(scalars[k, i]) for k in range(3))
        envs.append((env, _action_dicts(agents, i), views, reward, terminated, truncated))
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        for env, script, views, reward, terminated, truncated in envs:
            obs, rew, term, trunc, _ = env.step(script[t & 63])
            for a, (name, row) in enumerate(views):
                row[...] = obs[name]
                reward[a] = rew[name]
                terminated[a] = term[name]
                truncated[a] = trunc[name]
            if not env.agents:
                obs, _ = env.reset()
                for name, row in views:
                    row[...] = obs[name]

    return step


class HandLoop:
    """A careful loop in one process: arrays, autoreset, final observations kept."""

    def __init__(self, make_env: MakeEnv, num_envs: int) -> None:
        self._envs = [make_env() for _ in range(num_envs)]
        agents = self._agents = self._envs[0].possible_agents
        shape = self._envs[0].observation_space(agents[0]).shape
        self._obs_NA = np.zeros((num_envs, len(agents), *shape), np.float32)
        self._final_NA = np.zeros_like(self._obs_NA)
        self._reward_NA = np.zeros((num_envs, len(agents)))
        self._terminated_NA = np.zeros((num_envs, len(agents)), bool)
        self._truncated_NA = np.zeros((num_envs, len(agents)), bool)
        self._actions = np.random.default_rng(0).integers(0, 5, (64, num_envs, len(agents)))
        self._t = 0
        for i, env in enumerate(self._envs):
            obs, _ = env.reset(seed=i)
            for a, name in enumerate(agents):
                self._obs_NA[i, a] = obs[name]

    def run(self, vector_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(vector_steps):
            self._t += 1
            self.step(self._actions[self._t & 63])
        return time.perf_counter() - start

    def step(self, actions_NA: Any) -> tuple[Any, Any, Any, Any]:
        """One vector step; copies of obs, rewards and both flags."""
        agents, obs_NA, reward_NA = self._agents, self._obs_NA, self._reward_NA
        for i, (env, row) in enumerate(zip(self._envs, actions_NA.tolist(), strict=True)):
            obs, rewards, terminated, truncated, _ = env.step(dict(zip(agents, row, strict=True)))
            for a, name in enumerate(agents):
                obs_NA[i, a] = obs[name]
                reward_NA[i, a] = rewards[name]
                self._terminated_NA[i, a] = terminated[name]
                self._truncated_NA[i, a] = truncated[name]
            if not env.agents:
                self._final_NA[i] = obs_NA[i]
                obs, _ = env.reset()
                for a, name in enumerate(agents):
                    obs_NA[i, a] = obs[name]
        return obs_NA.copy(), reward_NA.copy(), self._terminated_NA.copy(), self._truncated_NA.copy()

    def close(self) -> None:
        self._envs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def spread(ratios: Any, digits: int = 2) -> str:
    """Median of some ratios, and their quartiles."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
