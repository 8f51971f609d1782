"""What PettingZoo 1.27.0's tests expect of envs (its ``test`` folder), asked of `ParallelView` and `AECView`.

Its checkers (``pettingzoo.test``) run on both views in tests/interop; here stands what only its repository tests:
wrappers of whole episodes, conversions there and back, masks as its documentation has them.

Different on purpose, each beside its test: a view is not pickled, it drives workers; agents that nobody knew of before
(its ``generated_agents`` envs, without ``possible_agents``) are refused with a `ContractError`, since arrays need an
axis, unless ``lenient=True`` says that those of a first reset are all; the names of agents are strings; a mask is among
the observations wherever the env had it.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel, parallel_to_aec
from pettingzoo.utils.wrappers import MultiEpisodeEnv, MultiEpisodeParallelEnv, TerminateIllegalWrapper

from marlvec.errors import ContractError
from marlvec.interop.pettingzoo import AECView, ParallelView
from marlvec.making import make
from marlvec.testing import Script, ScriptedParallelEnv, TurnEnv
from tests.vector.support.reference import refused

# Agents that come late, leave early, and end in every way.
SCRIPTS = [
    Script([0, 0, 0], [3, 7, 5], ["terminated", "truncated", "both"]),
    Script([0, 2, 4], [6, 5, 9], ["truncated", "terminated", "terminated"]),
]


def parallel_views(**options: Any) -> list[ParallelView]:
    return [ParallelView.make(partial(ScriptedParallelEnv, SCRIPTS, **options)) for _ in range(2)]


def play(env: Any, seed: int) -> list[Any]:
    """One game of an AEC env by random moves that masks allow, as PettingZoo's documentation has it."""
    env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    seen = []
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, info = env.last()
        seen.append((agent, obs, reward, terminated, truncated))
        if terminated or truncated:
            action = None
        else:
            mask = info.get("action_mask", obs.get("action_mask") if isinstance(obs, dict) else None)
            count = env.action_space(agent).n
            action = int(rng.choice(count if mask is None else np.flatnonzero(mask)))
        env.step(action)
    return seen


# --- wrappers


@pytest.mark.parametrize("episodes", [1, 3])
def test_several_episodes_as_one_by_turns(episodes: int) -> None:
    """The wrapper resets whenever all agents have ended; there are as many moves as in so many games."""
    with make("pettingzoo/classic/tictactoe", 1, autoreset_mode="disabled", backend="sync") as envs:
        env = MultiEpisodeEnv(AECView(envs), num_episodes=episodes)
        env.reset(seed=42)
        moves = 0
        for agent in env.agent_iter():
            obs, _, terminated, truncated, _ = env.last()
            moves += 1
            env.step(None if terminated or truncated else int(np.flatnonzero(obs["action_mask"])[0]))
            assert agent in env.possible_agents
    assert moves == episodes * (7 + 2), "each game has seven moves and two dead steps"


@pytest.mark.parametrize("episodes", [1, 3])
def test_several_episodes_as_one_at_once(episodes: int) -> None:
    env = MultiEpisodeParallelEnv(ParallelView.make("simple_spread", max_cycles=5), num_episodes=episodes)
    env.reset(seed=42)
    steps = 0
    while env.agents:
        steps += 1
        env.step(dict.fromkeys(env.agents, 0))
    assert steps == episodes * 5
    env.close()


def test_an_illegal_move_ends_the_game_and_the_next_game_is_whole() -> None:
    view = AECView.make("pettingzoo/classic/tictactoe", validate="off")
    env = TerminateIllegalWrapper(view, illegal_reward=-1)
    for _ in range(2):
        env.reset(seed=42)
        env.step(4)
        loser = env.agent_selection
        env.step(4)
        assert env.rewards == {agent: -1 if agent == loser else 0 for agent in env.possible_agents}
        assert all(env.terminations.values())
        for _ in env.agent_iter():
            env.step(None)
        assert env.agents == []
    env.close()


# --- spaces


@pytest.mark.parametrize("view", [ParallelView, AECView])
def test_spaces_are_there_as_dicts_too(view: Any) -> None:
    env = view.make("simple_tag", num_good=2)
    assert list(env.observation_spaces) == list(env.action_spaces) == env.possible_agents
    for agent in env.possible_agents:
        assert env.observation_spaces[agent] is env.observation_space(agent)
        assert env.action_spaces[agent] is env.action_space(agent)
    assert len({space.shape for space in env.observation_spaces.values()}) == 2
    env.close()


# --- conversions


def test_there_and_back_is_the_view_itself() -> None:
    ours, other = parallel_views()
    back = aec_to_parallel(parallel_to_aec(other))
    assert back is other, "theirs unwraps what it wrapped"
    assert ours.unwrapped is ours
    for seed in (1, None):
        assert data_equivalence(ours.reset(seed=seed), back.reset(seed=seed))
        while ours.agents:
            actions = dict.fromkeys(ours.agents, 1)
            assert data_equivalence(ours.step(actions), back.step(actions))
    ours.close()
    other.close()


def test_by_turns_and_at_once_tell_the_same() -> None:
    at_once, other = parallel_views()
    by_turns = parallel_to_aec(other)
    obs, _ = at_once.reset(seed=3)
    by_turns.reset(seed=3)
    for agent in at_once.agents:
        assert (by_turns.observe(agent) == obs[agent]).all()
    seen = [play(env, 5) for env in (parallel_to_aec(at_once), by_turns)]
    assert data_equivalence(*seen)
    at_once.close()
    other.close()


# --- masks and seeds


@pytest.mark.parametrize("kind", [partial(ScriptedParallelEnv, SCRIPTS), partial(TurnEnv, SCRIPTS, agent_num=3)])
def test_the_same_seed_gives_the_same_game_with_masks(kind: Any) -> None:
    views = [AECView.make(partial(kind, masked=True)) for _ in range(2)]
    for seed in (3, 3, 4):
        games = [play(view, seed) for view in views]
        assert data_equivalence(*games)
        assert games[0][0][1].keys() == {"observation", "action_mask"}
    for view in views:
        view.close()


# --- different on purpose


def test_here_a_view_is_not_pickled() -> None:
    view = ParallelView.make("simple_spread")
    refused(TypeError, "cannot be pickled or copied", pickle.dumps, view)
    view.close()


class GeneratedAgents(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Says nothing of agents before it is reset."""

    metadata = {"name": "generated", "render_modes": []}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = ["walker_0"]
        return {"walker_0": 0}, {"walker_0": {}}


def test_here_agents_are_known_before() -> None:
    refused(ContractError, r"possible_agents.*lenient=True", ParallelView.make, GeneratedAgents)
