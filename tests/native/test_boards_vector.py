"""Boards and cards through `make`: the native backend gives the arrays that envs in this process give."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.errors import ActionError, ArgumentError, EnvArgumentError
from marlvec.policies import RandomPolicy
from marlvec.testing import check_vector_env

N = 3
ARGUMENTS: dict[str, dict[str, Any]] = {
    "tictactoe_v3": {},
    "connect_four_v3": {},
    "rps_v2": {"num_actions": 5, "max_cycles": 4},
    "kuhn_poker": {},
    "leduc_poker": {},
}
MODES = ("same_step", "next_step", "disabled")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """PettingZoo logs a warning at each illegal move."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Pair:
    """The same envs on both backends: every call is made on both, and must bring the same."""

    def __init__(self, name: str, **settings: Any) -> None:
        make = partial(marlvec.make, name, **{"num_envs": N, "validate": "off", **ARGUMENTS[name], **settings})
        self.backends = [make(backend=backend) for backend in ("sync", "native")]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: Any) -> None:
        for envs in self.backends:
            envs.close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The rows as both have them, in the form of ``(…, infos)``."""
        plain, native = (getattr(envs, method)(*args, **kwargs) for envs in self.backends)
        assert list(plain[-1]) == list(native[-1]), "the same infos, in the same order"
        for one, other in zip((*plain[:-1], *plain[-1].values()), (*native[:-1], *native[-1].values()), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        return plain

    def play(self, steps: int, rng: np.random.Generator, illegal: float, reset: float = 0.0) -> int:
        """Reset and play; now and then start some games anew. The number of games that ended."""
        envs = self.backends[0]
        _, infos = self.call("reset", seed=int(rng.integers(2**63)))
        games = 0
        for _ in range(steps):
            over = ~infos["alive"].any(axis=1)
            again = over if envs.autoreset_mode == "disabled" else np.zeros(N, np.bool_)
            again |= rng.random(N) < reset
            if again.any():
                seed = int(rng.integers(2**63)) if rng.random() < 0.5 else None
                _, infos = self.call("reset", seed=seed, env_ids=again)
            _, _, terminated, truncated, infos = self.call("step", self.choose(infos, rng, illegal))
            games += int((terminated | truncated).all(axis=1).sum())
        return games

    def choose(self, infos: dict[str, Any], rng: np.random.Generator, illegal: float) -> np.ndarray:
        """Actions (N, 2): allowed ones, but for a share, and nonsense from those who are not acting."""
        n = int(self.backends[0].spec.action_spaces[0].n)
        allowed = infos.get("action_mask", np.ones((N, 2, n), np.bool_))
        chances = rng.random((N, 2, n)) * np.where(rng.random((N, 2, 1)) < illegal, 1.0, allowed)
        return np.where(infos["acting"], chances.argmax(axis=2), 77)


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_whole_games_on_both_backends(name: str, mode: str) -> None:
    with Pair(name, autoreset_mode=mode) as pair:
        assert pair.play(120, np.random.default_rng(1), illegal=0.05) > 10


@pytest.mark.slow("compiles, and plays whole games")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_is_asked_for(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(ARGUMENTS)), "env")
    arguments: dict[str, Any] = {
        "autoreset_mode": data.draw(st.sampled_from(MODES)),
        "done_on": data.draw(st.sampled_from(["all", "any"])),
        "max_episode_steps": data.draw(st.none() | st.integers(1, 9)),
        "pad": data.draw(st.booleans(), "pad"),
    }
    if name == "rps_v2":
        arguments |= {"num_actions": data.draw(st.sampled_from([3, 5, 9])), "max_cycles": data.draw(st.integers(1, 6))}
    with Pair(name, **arguments) as pair:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        pair.play(
            25, rng, illegal=data.draw(st.sampled_from([0.0, 0.1, 1.0])), reset=data.draw(st.sampled_from([0, 0.1]))
        )


@pytest.mark.soak
@pytest.mark.parametrize("name", ARGUMENTS)
def test_many_games_on_both_backends(name: str) -> None:
    for seed, mode in enumerate(MODES):
        with Pair(name, autoreset_mode=mode) as pair:
            assert pair.play(20_000, np.random.default_rng(seed), illegal=0.02, reset=0.001) > 1_000


@pytest.mark.slow("compiles every game")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_contract_suite_passes(name: str) -> None:
    check_vector_env(partial(marlvec.make, name, num_envs=3, backend="native"), seed=1)


@pytest.mark.slow("compiles games")
@pytest.mark.parametrize("name", ["connect_four_v3", "leduc_poker"])
def test_a_collector_brings_the_same_batches(name: str) -> None:
    with Pair(name, num_envs=4) as pair:
        batches = []
        for envs in pair.backends:
            collector = marlvec.Collector(envs, RandomPolicy(), seed=5)
            batches.append([collector.collect(env_steps=steps) for steps in (50, 200)])
    for plain, native in zip(*batches, strict=True):
        assert list(plain) == list(native)
        for policy in plain:
            assert plain[policy].keys() == native[policy].keys()
            for column, values in plain[policy].items():
                np.testing.assert_array_equal(values, native[policy][column], column)


@pytest.mark.mostly_slow("compiles kernels", quick=3)
@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3", "leduc_poker"])
def test_an_action_that_there_is_not_raises_before_any_game_has_moved(name: str) -> None:
    with marlvec.make(name, num_envs=3, backend="native", validate="off") as envs:
        envs.reset(seed=0)
        obs, *_ = envs.step(np.ones((3, 2), np.int64))
        agent = envs.agents[1]
        for bad in (-1, int(envs.spec.action_spaces[0].n)):
            actions = np.ones((3, 2), np.int64)
            actions[2, 1] = bad
            with pytest.raises(ActionError, match=rf"env 2.*{agent}"):
                envs.step(actions)
        again, infos = envs.reset(env_ids=[0])
        np.testing.assert_array_equal(again[1:], obs[1:])
        assert infos["acting"][1:].tolist() == [[False, True]] * 2


def test_worlds_are_drawn_and_asked_as_envs_are() -> None:
    with Pair("connect_four_v3", num_envs=2, render_mode="rgb_array") as pair:
        pair.call("reset", seed=0)
        pair.call("step", np.array([[3, 0], [0, 0]]))
        plain, native = (envs.render() for envs in pair.backends)
        np.testing.assert_array_equal(plain, native)


def test_arguments_that_there_are_not_raise() -> None:
    with pytest.raises(EnvArgumentError, match="sides"):
        marlvec.make("tictactoe_v3", backend="native", sides=4)
    with pytest.raises(ArgumentError, match="num_actions: expected an odd int"):
        marlvec.make("rps_v2", backend="native", num_actions=4)


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker"])
def test_poker_has_a_form_for_every_backend(name: str) -> None:
    made = partial(marlvec.make, name, num_envs=3)
    told = []
    for backend in ("native", "sync", "thread", "async"):
        with made(backend=backend) as envs:
            rows = [envs.reset(seed=11)]
            rows += [envs.step(np.ones((3, 2), np.int64)) for _ in range(12)]
            told.append(rows)
            assert np.array_equal(envs.get_attr("mover"), rows[-1][-1]["acting"].argmax(axis=1))
    for rows in told[1:]:
        np.testing.assert_equal(rows, told[0])
