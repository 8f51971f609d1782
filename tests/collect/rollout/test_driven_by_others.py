"""Envs that somebody else has driven in between: it is said at once, in so many words, and `reset` goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from marlvec import external
from marlvec.collect import Collector
from marlvec.errors import ArgumentError, EnvsDriven, StateError
from marlvec.policies import FunctionPolicy
from marlvec.vector import VectorEnv
from tests.collect.helpers.players import MODES, EchoPolicy, envs_on, factories
from tests.collect.helpers.reference import check_rows
from tests.external.test_thread import ONE, Game

N = 4

noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))

BACKENDS = ("sync", "thread", "async", "native", "pool")


def made(backend: str, mode: str = "same_step") -> VectorEnv:
    return envs_on(backend, factories("parallel", N, 2), mode)


def policy_of(envs: VectorEnv) -> Any:
    return noop if envs.backend in ("native", "pool") else EchoPolicy()


def second_collector(envs: VectorEnv) -> None:
    Collector(envs, policy_of(envs), seed=9).collect(env_steps=3)


def stray_stream(envs: VectorEnv) -> None:
    envs.send(envs.random_action())
    envs.recv(1)


def left_behind(envs: VectorEnv) -> None:
    """Sent, and never received."""
    envs.step_send(envs.random_action())


OTHERS: dict[str, Callable[[VectorEnv], Any]] = {
    "step": lambda envs: envs.step(envs.random_action()),
    "reset": lambda envs: envs.reset(),
    "reset of one": lambda envs: envs.reset(env_ids=[1]),
    "stream": stray_stream,
    "left behind": left_behind,
    "second collector": second_collector,
}


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_said_at_the_next_collect_and_reset_goes_on(backend: str, other: str, overlap: bool) -> None:
    lost: list[str] = []
    callback_list = {"on_episode_lost": lambda episode, why: lost.append(why)}
    with made(backend) as envs:
        collector = Collector(envs, policy_of(envs), seed=0, overlap=overlap, callbacks=[callback_list])
        handed = collector.collect(agent_steps=17)
        OTHERS[other](envs)
        for _ in range(2):  # again, until it is reset
            with pytest.raises(EnvsDriven, match=r"another collector.* reset\(\)"):
                collector.collect(env_steps=20)
        metrics = collector.metrics
        assert not lost
        collector.reset()
        assert lost == ["reset"] * N
        assert metrics.env_steps == handed.env_steps + metrics.env_steps_lost
        assert metrics.agent_steps == handed.agent_steps + metrics.agent_steps_lost
        batch = collector.collect(env_steps=50)
        assert batch.env_steps == 50
        check_rows(batch)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_env_calls_are_allowed(backend: str) -> None:
    with made(backend) as envs, made(backend) as plain:
        collector = Collector(envs, policy_of(envs), seed=0)
        undisturbed = Collector(plain, policy_of(plain), seed=0)
        for _ in range(3):
            got, want = collector.collect(env_steps=19), undisturbed.collect(env_steps=19)
            for name, rows in want.items():
                for column, values in rows.items():
                    np.testing.assert_array_equal(got[name][column], values)
            before = envs.drive_count
            envs.random_action()
            envs.agents_at(1)
            if backend not in ("native", "pool"):
                envs.get_attr("metadata")
                envs.env_is_wrapped(object)
                envs.exec_func(lambda env: env.possible_agents)
                envs.exec_func_send(lambda env: 1, None)
                envs.exec_func_fetch()
            with pytest.raises(ArgumentError):
                envs.step("nonsense")  # nothing was sent
            assert envs.drive_count == before


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_steps_the_envs_in_the_middle_is_found_out(mode: str) -> None:
    with made("sync", mode) as envs:

        def on_episode_step(step: Any) -> None:
            if collector.metrics.env_steps == 5 * N:
                envs.reset()

        collector = Collector(envs, EchoPolicy(), seed=0, callbacks=[on_episode_step])
        with pytest.raises(EnvsDriven):
            collector.collect(env_steps=100)
        with pytest.raises(StateError, match=r"reset\(\)"):
            collector.collect(env_steps=100)
        collector.reset()
        check_rows(collector.collect(env_steps=16))


def test_rows_taken_away_between_two_halves_are_missed() -> None:
    """A policy fails with one half on the way; then somebody receives that half."""
    calls: list[int] = []

    def act(rows: Any) -> Any:
        calls.append(len(rows))
        if len(calls) == 6:
            raise ValueError("scripted")
        return np.zeros(len(rows), int)

    with made("async") as envs:
        collector = Collector(envs, FunctionPolicy(act), seed=0, overlap=True)
        with pytest.raises(ValueError, match="scripted"):
            collector.collect(env_steps=100)
        envs.drain()
        with pytest.raises(EnvsDriven):
            collector.collect(env_steps=100)
        collector.reset()
        check_rows(collector.collect(env_steps=40))


def test_in_the_background_it_comes_out_of_next() -> None:
    with made("thread") as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        collector.collect(env_steps=8)
        envs.step(envs.random_action())
        with pytest.raises(EnvsDriven), collector.background(env_steps=8) as batches:
            next(batches)
        collector.reset()
        with collector.background(env_steps=8, total=24) as batches:
            assert [batch.env_steps for batch in batches] == [8, 8, 8]


class Behind:
    """A view: all that it is asked goes to the envs."""

    def __init__(self, envs: VectorEnv) -> None:
        self.envs = envs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)


@pytest.mark.parametrize("view", [lambda envs: envs, Behind])
def test_evaluation_uses_separate_envs(view: Any) -> None:
    with made("sync") as envs, made("sync") as others:
        with pytest.raises(ArgumentError, match=r"evaluation_envs.*make\(\) others"):
            Collector(envs, EchoPolicy(), evaluation_envs=view(envs))
        collector = Collector(envs, EchoPolicy(), seed=0, evaluation_envs=others)
        with pytest.raises(ArgumentError, match=r"evaluate\(\).*make\(\) others"):
            collector.evaluate(1, view(envs))
        for _ in range(2):
            collector.collect(env_steps=10)
            assert len(collector.evaluate(3)) == 3


def test_evaluation_in_envs_that_others_have_left_in_the_middle() -> None:
    """As an evaluation that Ctrl-C has ended leaves them."""
    with made("async") as envs, made("async") as others:
        collector = Collector(envs, EchoPolicy(), seed=0, evaluation_envs=others)
        others.reset()
        others.send(others.random_action())
        assert len(collector.evaluate(3)) == 3


@pytest.mark.parametrize("lockstep", [False, True])
def test_two_collectors_on_the_slots_of_simulators_outside(lockstep: bool) -> None:
    with external.make(ONE, lockstep=lockstep) as envs, Game(envs):
        first, second = Collector(envs, noop, seed=0), Collector(envs, noop, seed=1)
        first.collect(env_steps=6)
        second.collect(env_steps=6)
        with pytest.raises(EnvsDriven):
            first.collect(env_steps=6)
        first.reset()
        rows = first.collect(env_steps=6)["main"]
        assert (rows["next_obs"][:, 0] == rows["obs"][:, 0] + 1).all()
        assert (rows["rewards"] == rows["obs"][:, 0] + 1).all()
        with pytest.raises(EnvsDriven):
            second.collect(env_steps=6)
