"""Kaggle's games by ``examples/kaggle_games.py``: agents observe and get what ``env.run`` gives to agents."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.testing import check_env
from tests.examples.scripts import EXAMPLES, run

pytest.importorskip("kaggle_environments", reason="pip install --no-deps kaggle-environments jsonschema requests")

from kaggle_environments import make

KAGGLE = f"{EXAMPLES / 'kaggle_games.py'}:KaggleGame"
ENVS, GAMES, SEED = 2, 3, 5

# In turns and all at once, hidden and shared fields, agents who leave early, totals that fall, actions with names.
ROWS: dict[str, dict[str, Any]] = {
    "connectx": {"choices": 7},
    "rps": {"choices": 3, "configuration": {"episodeSteps": 12}},
    "hungry_geese": {"num_agents": 4, "configuration": {"episodeSteps": 40}},
    "halite": {"num_agents": 4, "configuration": {"episodeSteps": 12}},
}


def number(*parts: Any) -> int:
    """A number that depends on these alone."""
    return zlib.crc32(repr(parts).encode())


def answer(name: str, agent: int, turn: int, seen: Any) -> Any:
    """What an agent does, as Kaggle takes it; at times an invalid action."""
    if name == "halite":
        _, yards, ships = seen["players"][agent]
        moves = {uid: ["NORTH", "EAST", "SOUTH", "WEST", "CONVERT"][number(uid, turn) % 5] for uid in ships}
        return {**moves, **(dict.fromkeys(yards, "SPAWN") if number(agent, turn) % 3 == 0 else {})}
    if name == "hungry_geese":
        return ["NORTH", "EAST", "SOUTH", "WEST"][number(agent, turn // 3) % 4]
    return number(name, agent, turn, seen["step"]) % (7 if name == "connectx" else 3)


def of_json(value: Any) -> Any:
    """Plain values, without the time that is left, which a run counts down."""
    if isinstance(value, dict):
        return {key: of_json(item) for key, item in value.items() if key != "remainingOverageTime"}
    return [of_json(item) for item in value] if isinstance(value, list) else value


def play(name: str, backend: str = "sync", seed: int = SEED) -> list[list[dict[str, Any]]]:
    """Games in envs: per game what each agent saw and did, and its rewards."""
    words = ["NORTH", "EAST", "SOUTH", "WEST"]
    with marlvec.make(KAGGLE, ENVS, game=name, backend=backend, **ROWS[name]) as envs:
        n = envs.agent_num

        def empty() -> dict[str, Any]:
            return {"seen": [[] for _ in range(n)], "rewards": np.zeros(n), "last": [None] * n}

        games = [[empty()] for _ in range(ENVS)]
        obs, infos = envs.reset(seed=seed)
        while min(map(len, games)) <= GAMES:
            kind = object if name == "halite" else np.int64
            actions = np.zeros((ENVS, n), kind)
            for i in range(ENVS):
                game = games[i][-1]
                for a in np.flatnonzero(infos["acting"][i]).tolist():
                    done = answer(name, a, len(game["seen"][a]), obs[i, a])
                    game["seen"][a].append(of_json(obs[i, a]))
                    actions[i, a] = words.index(done) if name == "hungry_geese" else done
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            assert not truncated.any()
            for i in range(ENVS):
                game = games[i][-1]
                game["rewards"] += rewards[i]
                over = bool(infos.get("_final_observation", np.zeros(ENVS, bool))[i])
                for a in np.flatnonzero(terminated[i]):
                    last = infos["final_observation"][i, a] if over else obs[i, a]
                    game["last"][a] = of_json(last)
                if over:
                    games[i].append(empty())
    return [found[:GAMES] for found in games]


def run_alone(name: str, seed: int) -> tuple[list[list[Any]], Any]:
    """One game by Kaggle's own ``run``, alone in the process: what agents saw, and the states in the end."""
    random.seed(seed)
    np.random.seed(seed)
    options = ROWS[name]
    env = make(name, configuration=dict(options.get("configuration", {})))
    seen: list[list[Any]] = [[] for _ in range(options.get("num_agents", env.specification.agents[0]))]

    def agent(a: int) -> Any:
        def act(observation: Any, configuration: Any) -> Any:
            done = answer(name, a, len(seen[a]), observation)
            seen[a].append(of_json(observation))
            return done

        return act

    env.run([agent(a) for a in range(len(seen))])
    return seen, env


@pytest.mark.parametrize("name", ROWS)
def test_agents_see_and_get_what_a_run_gives_them(name: str) -> None:
    """Three games in one env beside another one; no two begin alike; totals add up."""
    outside = random.getstate(), np.random.get_state()[1].tolist()
    played = play(name)
    assert outside == (random.getstate(), np.random.get_state()[1].tolist())
    for games, env_seed in zip(played, marlvec.env_seeds(SEED, ENVS), strict=True):
        rng = np.random.default_rng(env_seed)
        for game in games:
            seen, env = run_alone(name, int(rng.integers(2**31)))
            assert game["seen"] == seen
            for a, state in enumerate(env.state):
                first = env.steps[0][a].reward
                assert state.reward is not None
                assert game["rewards"][a] == state.reward - first
                assert game["last"][a] is not None
    if name in ("halite", "hungry_geese"):
        firsts = [str(game["seen"][0][0]) for games in played for game in games]
        assert len(set(firsts)) == len(firsts)


def test_worker_processes_play_the_same_games() -> None:
    np.testing.assert_equal(play("hungry_geese", "async"), play("hungry_geese"))


def test_hidden_fields_are_not_shown() -> None:
    """mab's chances of winning; what it draws comes from the operating system, so no seed repeats it."""
    with marlvec.make(KAGGLE, 1, game="mab", choices=100, backend="sync") as envs:
        obs, _ = envs.reset(seed=0)
        obs = envs.step(np.array([[3, 4]]))[0]
    for a in (0, 1):
        assert obs[0, a].keys() == {"remainingOverageTime", "step", "agentIndex", "reward", "lastActions"}
        assert obs[0, a]["lastActions"] == [3, 4]
        assert obs[0, a]["agentIndex"] == a


@pytest.mark.parametrize(("name", "others"), [("connectx", 0.0), ("rps", 1.0)])
def test_an_invalid_action_forfeits(name: str, others: float) -> None:
    with marlvec.make(KAGGLE, 1, game=name, choices=9, forfeit=-7.0, backend="sync", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        obs, rewards, terminated, _, infos = envs.step(np.array([[8, 1]]))
    assert rewards.tolist() == [[-7.0, others]]
    assert terminated.all()
    assert infos["status"][0].tolist() == ["INVALID", "DONE"]
    assert all(isinstance(seen, dict) for seen in obs[0])


def test_it_fulfils_the_contract_and_its_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    check_env(marlvec.registry.resolve(KAGGLE).with_kwargs(game="connectx", choices=7), max_steps=60)
    run("kaggle_games", "connectx", "--games", 4)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("returns [" in line for line in lines)
