"""The AEC view of one env: PettingZoo's checkers, and the raw env's own numbers in the raw env's own order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ActionError, ArgumentError, NotResetError
from marlvec.interop.pettingzoo import AECView, ParallelView
from marlvec.registry import resolve
from marlvec.testing import KeyedEnv, Script, ScriptedParallelEnv, TurnEnv
from tests.interop import checkers

ARCHERS = {"spawn_delay": 2, "max_zombies": 30, "line_death": True, "max_cycles": 60}
ENVS: dict[str, Callable[[], AECView]] = {
    "spread": partial(AECView.make, "simple_spread"),
    "tag": partial(AECView.make, "simple_tag"),
    "connect four": partial(AECView.make, "pettingzoo/classic/connect_four"),
    "tictactoe": partial(AECView.make, "pettingzoo/classic/tictactoe"),
    "archers": partial(AECView.make, "pettingzoo/butterfly/knights_archers_zombies", **ARCHERS),
}


@pytest.mark.checklist(127)
@pytest.mark.filterwarnings("ignore:Observation numpy array is all zeros")  # boards begin empty
@pytest.mark.parametrize("name", ENVS)
def test_the_api_test_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    view = ENVS[name]()
    checkers.api_test(view, 60)
    view.close()
    assert capsys.readouterr().out == "Starting API test\nPassed API test\n"


@pytest.mark.parametrize("name", ["spread", "tag", "archers"])
def test_the_seed_test_passes(name: str) -> None:
    checkers.seed_test(ENVS[name], 30)


def test_state_and_pictures_are_the_envs_own() -> None:
    view = AECView.make("simple_spread", render_mode="rgb_array")
    view.reset(seed=1)
    assert view.state_space.contains(view.state())
    assert view.render().ndim == 3
    assert view.render_mode == "rgb_array"
    view.close()


def play(env: Any, seed: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """A whole game: whose turn it was and what was told, and what was told to those who had ended."""
    rng = np.random.default_rng(seed)
    turns: list[tuple[Any, ...]] = []
    ends: list[tuple[Any, ...]] = []
    env.reset(seed=seed)
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        told = (agent, obs["observation"].tobytes(), float(reward), terminated, truncated)
        if terminated or truncated:
            ends.append(told)
            env.step(None)
        else:
            turns.append((*told, obs["action_mask"].tolist(), list(env.agents)))
            env.step(int(rng.choice(np.flatnonzero(obs["action_mask"]))))
    return turns, ends


@pytest.mark.parametrize("game", ["connect_four", "tictactoe", "leduc_holdem"])
def test_games_go_as_in_the_raw_env(game: str) -> None:
    """Every turn, observation, mask, reward and flag in the raw env's order, and the ends."""
    if game == "leduc_holdem":
        pytest.importorskip("rlcard")
    id_ = f"pettingzoo/classic/{game}"
    raw, view = resolve(id_)(), AECView.make(id_)
    for seed in range(12):
        (turns, ends), (raw_turns, raw_ends) = play(view, seed), play(raw, seed)
        assert turns == raw_turns
        assert sorted(ends) == sorted(raw_ends)
        if game != "leduc_holdem":  # there, whoever would have been next if the game went on ends first
            assert ends == raw_ends
    raw.close()
    view.close()


def test_agents_that_act_at_once_are_asked_in_turn() -> None:
    """What a round brings is what the parallel env brings for the same actions."""
    view, parallel = AECView.make("simple_tag"), ParallelView.make("simple_tag")
    view.reset(seed=4)
    obs, _ = parallel.reset(seed=4)
    rng = np.random.default_rng(4)
    rounds = 0
    while parallel.agents:
        actions = {}
        for agent in parallel.possible_agents:
            assert view.agent_selection == agent
            assert view.last()[0].tobytes() == obs[agent].tobytes()
            actions[agent] = int(rng.integers(5))
            view.step(actions[agent])
        obs, rewards, terminated, truncated, _ = parallel.step(actions)
        assert (view.rewards, view.terminations, view.truncations) == (rewards, terminated, truncated)
        rounds += 1
    assert rounds == 25
    assert len(view.agents) == 4
    for _ in range(4):
        view.step(None)
    assert view.agents == []
    view.close()
    parallel.close()


def test_agents_come_and_go_and_every_reward_is_told_once() -> None:
    """Sums of what last() gave each agent are its returns in the raw env; whoever has ended is asked first."""
    scripts = [Script([0, 0, 1], [2, 6, 4], ["terminated", "truncated", "both"])]
    for make_env in (
        partial(ScriptedParallelEnv, scripts, agent_num=3),
        partial(TurnEnv, scripts, agent_num=3),
        partial(KeyedEnv, scripts, agent_num=3, waits=lambda t, a: (t + a) % 3 == 0),
    ):
        view, envs = AECView.make(make_env), marlvec.make(make_env, 1, backend="sync", autoreset_mode="disabled")
        view.reset(seed=0)
        envs.reset(seed=[0])
        returns, ended = dict.fromkeys(view.possible_agents, 0.0), []
        for agent in view.agent_iter():
            _, reward, terminated, truncated, _ = view.last()
            returns[agent] += reward
            over = terminated or truncated
            ended += [agent] * over
            assert over or not any(view.terminations[a] or view.truncations[a] for a in view.agents)
            view.step(None if over else 0)
        expected = np.zeros(3)
        while envs.agents_at(0):
            expected += envs.step(np.zeros((1, 3), np.int64))[1][0]
        assert [*returns.values()] == pytest.approx(expected)
        assert sorted(ended) == sorted(view.possible_agents)
        view.close()
        envs.close()


def test_errors_name_the_cause_and_change_nothing() -> None:
    view = AECView.make("simple_spread")
    with pytest.raises(NotResetError):
        view.step(0)
    view.reset(seed=0)
    view.step(1)
    view.step(2)
    with pytest.raises(ActionError):
        view.step(9)
    assert view.agent_selection == "agent_2"
    view.step(3)
    assert view.agent_selection == "agent_0"
    for _ in range(24 * 3):
        view.step(0)
    with pytest.raises(ValueError, match="only valid action is None"):
        view.step(0)
    view.close()
    with marlvec.make("simple_spread", 2, backend="sync") as envs, pytest.raises(ArgumentError, match="num_envs=1"):
        AECView(envs)
