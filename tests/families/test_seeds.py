"""One seed settles all episodes that follow, in families that have ideas of their own about seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.registry import resolve
from tests.families.legal import legal_actions
from tests.families.trace import Trace

HANABI = {"colors": 2, "ranks": 2, "hand_size": 2, "max_information_tokens": 3, "max_life_tokens": 1}


def hanabi_trace(seed: Any, *, steps: int = 40) -> tuple[str, int]:
    """A run of several short games, and how many there were."""
    rng = np.random.default_rng(0)
    trace, games = Trace(), 0
    with marlvec.make("hanabi", 2, backend="sync", **HANABI) as envs:
        result: tuple[Any, ...] = envs.reset(seed=seed)
        trace.add(result)
        for _ in range(steps):
            result = envs.step(legal_actions(envs, result[-1], rng)[0])
            games += int(result[-1].get("_final_observation", np.zeros(2)).sum())
            trace.add(result)
    return str(trace), games


@pytest.mark.mostly_slow("plays real envs on every backend", quick=4)
@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_hanabi_takes_every_seed_and_deals_the_same_cards_in_every_game(seed: int) -> None:
    """OpenSpiel takes 31 bits, and at a reset without a seed PettingZoo's env draws from the system's entropy."""
    first, games = hanabi_trace(seed)
    assert games >= 4
    assert hanabi_trace(seed) == (first, games)
    assert hanabi_trace([seed, seed])[0] != first, "envs have seeds of their own"


def test_hanabi_without_a_seed_is_not_repeated() -> None:
    assert hanabi_trace(None)[0] != hanabi_trace(None)[0]


def test_hanabi_gets_small_seeds_as_they_are() -> None:
    ours, bare = resolve("hanabi").with_kwargs(**HANABI)(), resolve("hanabi").with_kwargs(**HANABI)().env
    for env in (ours, bare):
        env.reset(seed=5)
    seen = [env.observe(env.agent_selection)["observation"] for env in (ours, bare)]
    assert seen[0].tobytes() == seen[1].tobytes()


@pytest.mark.slow("plays real envs on every backend")
def test_atari_players_may_lose_one_by_one() -> None:
    """A whole game beside PettingZoo's own env, whose agents leave `agents` when they have no life left."""
    game = "pettingzoo/atari/mario_bros_v3"
    bare = resolve(game).with_kwargs(obs_type="ram")()
    rng = np.random.default_rng(1)
    seen, _ = bare.reset(seed=1)
    with marlvec.make(game, 1, backend="sync", autoreset_mode="disabled", obs_type="ram") as envs:
        obs, infos = envs.reset(seed=[1])
        counts = [len(bare.agents)]
        while bare.agents:
            (actions,) = legal_actions(envs, infos, rng)
            table = {agent: int(actions[0, envs.agents.index(agent)]) for agent in bare.agents}
            seen, paid, ended, _, _ = bare.step(table)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for a, agent in enumerate(envs.agents):
                assert infos["alive"][0, a] == infos["acting"][0, a] == (agent in bare.agents)
                assert rewards[0, a] == paid.get(agent, 0)
                assert terminated[0, a] == ended.get(agent, False)
                assert obs[0, a].tobytes() == seen.get(agent, np.zeros(128, np.uint8)).tobytes()
            assert not truncated.any()
            if len(bare.agents) != counts[-1]:
                counts.append(len(bare.agents))
    bare.close()
    assert counts == [2, 1, 0]
