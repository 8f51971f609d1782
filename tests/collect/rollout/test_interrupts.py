"""Ctrl-C wherever it comes: after `Collector.reset` everything works, rows are true, and nothing waits for ever."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import ActionConnector, AgentConnector, LearnerConnector, Rows
from marlvec.errors import BrokenError, StateError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.vector import VectorEnv
from tests.collect.rollout.test_driven_by_others import check_rows

N = 3


class Clock:
    """Two agents see (step, episode); the reward says what they did in which step.

    Args:
        interrupt_at: In which of its steps it is interrupted, from 1; 0: never.
    """

    def __init__(self, interrupt_at: int = 0) -> None:
        self.metadata: dict[str, Any] = {}
        self.possible_agents = ["a", "b"]
        self.agents = self.possible_agents[:]
        self.t = self.episode = self.steps = 0
        self.interrupt_at = interrupt_at

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1e9, (2,), np.float64)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def obs(self) -> dict[str, Any]:
        return {agent: np.array([self.t, self.episode], np.float64) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode, self.agents = 0, self.episode + 1, self.possible_agents[:]
        return self.obs(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        self.t += 1
        over = self.t >= 4
        rewards = {agent: float(100 * self.t + actions[agent]) for agent in self.possible_agents}
        flags = dict.fromkeys(self.possible_agents, over)
        if over:
            self.agents = []
        none = dict.fromkeys(self.possible_agents, False)
        return self.obs(), rewards, none, flags, {agent: {} for agent in self.possible_agents}

    def close(self) -> None:
        pass


def decide(rows: Rows) -> Any:
    return (rows["obs"][:, 0] * 7 + rows["obs"][:, 1]).astype(np.int64) % 5


def noop(rows: Rows) -> Any:
    return np.zeros(len(rows), np.int64)


def check(batch: Any) -> None:
    """Rows are those that the envs gave, each with its own decision and what came of it."""
    check_rows(batch)
    rows = batch["main"]
    if rows["obs"].shape[1] != 2:  # another env
        return
    np.testing.assert_array_equal(rows["obs"][:, 0], rows["env_t"])
    np.testing.assert_array_equal(rows["next_obs"][:, 0], rows["next_env_t"])
    np.testing.assert_array_equal(rows["t"], rows["env_t"])
    np.testing.assert_array_equal(rows["actions"], decide(rows))
    np.testing.assert_array_equal(rows["rewards"], 100 * rows["next_obs"][:, 0] + rows["actions"])
    np.testing.assert_array_equal(rows["obs"][:, 1], rows["next_obs"][:, 1])


def healed(collector: Collector, *, in_background: bool = True) -> int:
    """After a reset whole episodes are collected, also by another thread, and weights can be changed.

    Returns:
        Env steps in batches.
    """
    collector.reset()
    before, lost = collector.metrics.env_steps, collector.metrics.env_steps_lost
    batches = [collector.collect(env_steps=k) for k in (4 * N, 2 * N + 1, 3 * N)]
    with collector.updating():
        pass
    if in_background:
        with collector.background(env_steps=2 * N, total=2 * N) as more:
            batches += list(more)
    else:
        batches.append(collector.collect(env_steps=2 * N))
    for batch in batches:
        check(batch)
    keys = [
        key
        for batch in batches
        for key in zip(*(batch["main"][name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True)
    ]
    assert len(set(keys)) == len(keys)
    assert collector.metrics.env_steps - before == sum(batch.env_steps for batch in batches) == 11 * N + 1
    assert collector.metrics.env_steps_lost == lost
    return 11 * N + 1


# --- in somebody else's code


class Interrupting:
    """Counts calls, and is interrupted in one of them."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def in_env(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    makes = [lambda i=i: Clock(at if i == 1 else 0) for i in range(N)]
    return marlvec.make(makes, backend="sync", **options), {}


def in_policy(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            interrupt()
            return decide(rows)

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"policies": Stopped()}


def in_agent_connector(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            interrupt()
            return rows

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"agent_connectors": [Stopped()]}


def in_action_connector(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(ActionConnector):
        def __call__(self, rows: Rows) -> Rows:
            interrupt()
            return rows

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"action_connectors": [Stopped()]}


def in_learner_connector(at: int, **options: Any) -> tuple[VectorEnv, dict[str, Any]]:
    interrupt = Interrupting(at)

    class Stopped(LearnerConnector):
        def __call__(self, rows: Rows) -> Rows:
            interrupt()
            return rows

    return marlvec.make(Clock, num_envs=N, backend="sync", **options), {"learner_connectors": [Stopped()]}


@pytest.mark.fault("A25")
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize(
    "where",
    [in_env, in_policy, in_agent_connector, in_action_connector, in_learner_connector],
    ids=lambda f: f.__name__,
)
def test_in_code_of_others(where: Callable[..., Any], at: int, overlap: bool, mode: str) -> None:
    envs, parts = where(at, autoreset_mode=mode)
    with envs:
        policies = parts.pop("policies", FunctionPolicy(decide))
        collector = Collector(envs, policies, seed=0, overlap=overlap, **parts)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(12):
                check(collector.collect(env_steps=2 * N))
        if where in (in_policy, in_action_connector, in_learner_connector):  # nothing was lost
            check(collector.collect(env_steps=2 * N))
            assert collector.metrics.env_steps_lost == 0
        else:
            for _ in range(2):
                with pytest.raises(StateError, match=r"reset\(\)"):
                    collector.collect(env_steps=1)
        healed(collector)


# --- at any line


class Tracer:
    """Raises KeyboardInterrupt at one line of code in some folders, as Ctrl-C does.

    Not where a ``with`` block is left: there CPython looks for no signal, so that a lock is never left behind.

    Args:
        folders: Parts of file names.
        line: The how manieth line that is run; from 1.
    """

    def __init__(self, folders: tuple[str, ...], line: int) -> None:
        self.folders, self.left = folders, line
        self.place: str | None = None
        self._seen: set[tuple[int, int]] = set()

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in self.folders) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self._line
        name, line = frame.f_code.co_filename, frame.f_lineno
        if linecache.getline(name, line).lstrip().startswith("with "):
            key = id(frame), line
            if key in self._seen:
                self._seen.discard(key)
                return self._line
            self._seen.add(key)
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            self.place = f"{name.rpartition('marlvec/')[2]}:{line}"
            raise KeyboardInterrupt
        return self._line


def made(backend: str, mode: str) -> VectorEnv:
    options: dict[str, Any] = {"num_workers": 2} if backend in ("thread", "async") else {}
    if backend == "native":
        pytest.importorskip("numba")
        return marlvec.make("simple_spread", num_envs=N, backend="native", autoreset_mode=mode, max_cycles=4)
    return marlvec.make(Clock, num_envs=N, backend=backend, autoreset_mode=mode, **options)


COLLECT = ("/marlvec/collect/",)


@pytest.mark.fault("A25")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("backend", ["sync", "thread", "async", "native"])
def test_at_any_line_of_a_collect(backend: str, mode: str, overlap: bool) -> None:
    policy = FunctionPolicy(noop if backend == "native" else decide)
    line, step, places, handed = 1, 61, [], 0
    with made(backend, mode) as envs:
        collector = Collector(envs, policy, seed=0, overlap=overlap)
        while True:
            handed += healed(collector)
            try:
                with Tracer(COLLECT, line) as tracer:
                    batch = collector.collect(env_steps=4 * N)
            except KeyboardInterrupt:
                places.append(tracer.place)
                handed = collector._loop._handed_env_steps  # a batch may have been on its way to us
            if tracer.place is None:
                break
            line += step
        check(batch)
        handed += batch.env_steps + healed(collector)
        assert collector.metrics.env_steps == handed + collector.metrics.env_steps_lost
    assert len(places) > 15


@pytest.mark.fault("A25")
@pytest.mark.parametrize("line", range(1, 1200, 37))
def test_at_any_line_of_the_first_collect(line: int) -> None:
    """Where policies and connectors first learn their spaces, and columns their form."""
    with made("sync", "same_step") as envs:
        collector = Collector(envs, FunctionPolicy(decide), seed=0)
        try:
            with Tracer(COLLECT, line):
                check(collector.collect(env_steps=4 * N))
        except KeyboardInterrupt:
            pass
        healed(collector)


@pytest.mark.fault("A25")
@pytest.mark.parametrize("backend", ["sync", "native", "async"])
def test_at_any_line_of_the_vectorizer(backend: str) -> None:
    """In the middle of a message only closing is left, and it says so; everywhere else `reset` goes on."""
    policy = FunctionPolicy(noop if backend == "native" else decide)
    line, step, broken, count = 1, 53, 0, 0
    envs = made(backend, "same_step")
    try:
        collector = Collector(envs, policy, seed=0)
        while True:
            try:
                healed(collector, in_background=False)
            except BrokenError as error:
                said = str(error)
                assert "was interrupted" in said
                broken += 1
                envs.close()
                envs = made(backend, "same_step")
                collector = Collector(envs, policy, seed=0)
                healed(collector, in_background=False)
            try:
                with Tracer(("/marlvec/vector/",), line) as tracer:
                    check(collector.collect(env_steps=4 * N))
            except KeyboardInterrupt:
                count += 1
            if tracer.place is None:
                break
            line += step
    finally:
        envs.close()
    assert count > 10
    assert broken < count / 2
