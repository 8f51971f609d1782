"""The real EnvPool: every env of a pool of ours says what a bare pool of that env alone says, in whole episodes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("envpool", reason="the extra `envpool` is not installed")

import envpool

import marlvec
from marlvec import VectorEnv, env_seeds
from marlvec.errors import ArgumentError, UnknownEnvError
from marlvec.vector.pool_env import PoolVectorEnv
from marlvec.vector.pools.envpool import EnvPoolFastPath
from tests.docs.test_pages import run
from tests.vector.support.reference import MODES, flatten

EXAMPLE = Path(__file__).parents[2] / "examples" / "envpool_cartpole.py"

pytestmark = pytest.mark.checklist(125)

TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"max_episode_steps": 12},
    "Pong-v5": {"max_episode_steps": 9},
    "BinPack-v2": {},  # observations are dicts of dicts
    "HalfCheetah-v4": {"max_episode_steps": 9},  # actions are arrays
    "IntersectionMultiAgent-v0": {},  # two players at once
    "TicTacToe-v1": {},
    "ConnectFour-v1": {},
    "KuhnPoker-v1": {},
    "SparrowMahjong-v1": {},  # three players
}
QUICK = ("CartPole-v1", "KuhnPoker-v1", "TicTacToe-v1", "IntersectionMultiAgent-v0")


def bare(task: str, **kwargs: Any) -> Any:
    pool = envpool.make(task, env_type="gymnasium", **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pool.observation_space is not None  # made, with warnings, when it is first read
    return pool


def choose(space: Any, mask: Any, i: int, k: int) -> Any:
    """The action of env ``i`` in its ``k``-th step; of all its players, where several act."""
    rng = np.random.default_rng([i, k])
    if hasattr(space, "n"):
        return np.int64(rng.choice(np.flatnonzero(mask)) if mask is not None else rng.integers(space.n))
    return rng.uniform(space.low, space.high).astype(space.dtype)


def alone(task: str, i: int, seed: int, steps: int, mode: str, **kwargs: Any) -> Iterator[tuple[Any, ...]]:
    """What one env says by itself, in the form of our rows."""
    pool = bare(task, num_envs=1, seed=[seed], **kwargs)
    players = pool.config["max_num_players"]
    obs, info = pool.reset()
    reward, terminated, truncated = np.zeros(players), np.array([False]), np.array([False])
    yield row(pool, obs, reward, terminated, truncated, info, over=False)
    for k in range(steps):
        action = choose(pool.action_space, info["legal_action_mask"][0] if "legal_action_mask" in info else None, i, k)
        many = players > 1 and "current_player" not in info
        actions = np.array([action] * players if many else [action])
        if not (terminated | truncated).any():
            obs, reward, terminated, truncated, info = pool.step(actions)
            over = bool((terminated | truncated).any())
            told = row(pool, obs, reward, terminated, truncated, info, over=over)
            if not over or mode != "same_step":
                yield told
                continue
            final = told[0]
            obs, _, *_, info = pool.step(actions)
            told_now = row(pool, obs, np.zeros(players), np.array([False]), np.array([False]), info, over=False)
            yield told_now[0], *told[1:4], *told_now[4:7], final
            terminated = truncated = np.array([False])
        else:
            obs, reward, terminated, truncated, info = pool.step(actions)  # throws the actions away
            assert info["elapsed_step"] == 0
            assert not reward.any()
            yield row(pool, obs, reward, terminated, truncated, info, over=False)


def row(pool: Any, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any, *, over: bool) -> tuple[Any, ...]:
    players = pool.config["max_num_players"]
    leaves = [np.asarray(leaf) for leaf in flatten(obs)]
    seen = [leaf.astype(np.int8) if leaf.dtype == bool else leaf for leaf in leaves]
    turn = info.get("current_player")
    acting = [not over and (turn is None or turn[0] == a) for a in range(players)]
    mask = None
    if "legal_action_mask" in info:
        mask = [info["legal_action_mask"][0].tolist() if acts else [True] * pool.action_space.n for acts in acting]
    ended = bool((terminated | truncated)[0])
    parts = [leaf.tobytes() for leaf in seen]
    flags = ([bool(terminated[0])] * players, [bool(truncated[0])] * players)
    return (
        parts,
        reward.astype(np.float64).tolist(),
        *flags,
        [not over] * players,
        acting,
        mask,
        parts if ended else None,
    )


def told_by(envs: VectorEnv, steps: int, *, stream: bool) -> list[list[tuple[Any, ...]]]:
    """What each env of ours says, row by row."""
    told: list[list[tuple[Any, ...]]] = [[] for _ in range(envs.num_envs)]
    space = envs.agent_action_space(0)
    envs.async_reset(seed=3)
    while min(map(len, told)) <= steps:
        step = envs.recv(min_envs=2 if stream else None)
        for k, i in enumerate(step.env_ids.tolist()):
            obs = [leaf[k].tobytes() for leaf in step.obs_leaves[0]]
            flags = [getattr(step, name)[k].tolist() for name in ("terminated", "truncated", "alive", "acting")]
            mask = step.action_masks[0]
            final = [leaf[k].tobytes() for leaf in step.final_leaves[0]] if step.done[k] else None
            rewards = step.rewards[k].tolist()
            told[i].append((obs, rewards, *flags, None if mask is None else mask[k].tolist(), final))
        over = step.done if envs.autoreset_mode == "disabled" else np.zeros(len(step), bool)
        if over.any():
            envs.async_reset(env_ids=step.env_ids[over])
        going = np.flatnonzero(~over)
        ids = step.env_ids[going]
        if len(ids):
            actions = []
            for k, i in zip(going.tolist(), ids.tolist(), strict=True):
                masks = step.action_masks[0]
                who = int(step.acting[k].argmax())
                action = choose(space, None if masks is None else masks[k, who], i, len(told[i]) - 1)
                actions.append([action] * envs.agent_num)
            envs.send(np.array(actions), ids)
    envs.drain()
    return [rows[:steps] for rows in told]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("task", "batch"), [*((task, None) for task in TASKS), *((task, 2) for task in QUICK)], ids=str
)
def test_every_env_says_what_it_says_alone(task: str, batch: int | None, mode: str) -> None:
    num_envs, steps = (5, 60) if task in QUICK else (3, 25)
    wanted = [
        list(alone(task, i, seed, steps, mode, **TASKS[task]))[:steps] for i, seed in enumerate(env_seeds(3, num_envs))
    ]
    with marlvec.make(f"envpool/{task}", num_envs, batch_size=batch, autoreset_mode=mode, **TASKS[task]) as envs:
        got = told_by(envs, steps, stream=batch is not None)
        for mine, theirs in zip(got, wanted, strict=True):
            for t, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                for part, (x, y) in enumerate(zip(a, b, strict=True)):
                    assert x == y, (t, part)
        if "max_episode_steps" in TASKS[task]:
            assert any(True in truncated for rows in got for _, _, _, truncated, *_ in rows)
        obs, _ = envs.reset(seed=3)  # the same again, from a new pool
        assert [leaf[0].tobytes() for leaf in flatten(obs)] == got[0][0][0]


def test_a_pool_of_ones_own_is_made_anew_and_closed() -> None:
    pool = bare("CartPole-v1", num_envs=4, seed=1)
    with PoolVectorEnv(pool, autoreset_mode="next_step") as envs:
        first, infos = envs.reset()
        assert infos["elapsed_step"].tolist() == [0] * 4
        assert np.array_equal(first[:, 0], bare("CartPole-v1", num_envs=4, seed=1).reset()[0])
        seeded, _ = envs.reset(seed=8)
        assert pool.closed
        assert np.array_equal(seeded[:, 0], bare("CartPole-v1", num_envs=4, seed=env_seeds(8, 4)).reset()[0])
        envs.reset(env_ids=[2])
        envs.step(envs.random_action())


def test_an_overridden_recv_is_called() -> None:
    pool = bare("CartPole-v1", num_envs=4, seed=1)
    said = pool.recv

    def generous() -> Any:
        obs, reward, *flags, info = said()
        return obs, reward + (info["elapsed_step"] > 0), *flags, info

    pool.recv = generous
    with PoolVectorEnv(pool, autoreset_mode="next_step") as envs:
        envs.reset()
        for _ in range(3):
            assert envs.step(envs.random_action())[1].ravel().tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("task", "fits"), [("CartPole-v1", True), ("Pong-v5", True), ("BinPack-v2", False), ("TicTacToe-v1", False)]
)
def test_the_short_way_is_for_single_players_whose_observations_are_one_array(task: str, fits: bool) -> None:
    pool = bare(task, num_envs=2, seed=1)
    assert EnvPoolFastPath.fits(pool) == fits
    pool.close()


def test_seeds_of_the_first_episodes() -> None:
    def first(**options: Any) -> Any:
        with marlvec.make("envpool/CartPole-v1", 3, **options) as envs:
            return envs.reset()[0][:, 0]

    assert np.array_equal(first(seed=6), bare("CartPole-v1", num_envs=3, seed=6).reset()[0])
    assert np.array_equal(
        first(seed=[6, 5, 4], batch_size=2), bare("CartPole-v1", num_envs=3, seed=[6, 5, 4]).reset()[0]
    )
    assert not np.array_equal(first(), first())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UnknownEnvError, match="envpool/CartPole-v1"):
        marlvec.make("envpool/CartPol-v1", 2)
    with pytest.raises(ArgumentError, match="env_type"):
        marlvec.make("envpool/CartPole-v1", 2, env_type="dm")
    with pytest.raises(ArgumentError, match="batch_size: expected 1 to num_envs=2"):
        marlvec.make("envpool/CartPole-v1", 2, batch_size=3)
    with pytest.raises(ArgumentError, match="seed is a list of 1"):
        marlvec.make("envpool/CartPole-v1", 2, seed=[1])
    with pytest.raises(marlvec.errors.EnvArgumentError, match="nonsense"):
        marlvec.make("envpool/CartPole-v1", 2, nonsense=1)


def test_infos_of_players_have_an_agent_axis() -> None:
    with marlvec.make("envpool/IntersectionMultiAgent-v0", 3) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["speed"].shape == infos["_speed"].shape == (3, 2)
        assert infos["elapsed_step"].shape == (3,)


def test_frames() -> None:
    with marlvec.make("envpool/CartPole-v1", 2, render_mode="rgb_array") as envs:
        envs.reset(seed=0)
        frames = envs.render()
        assert [frame.shape[2] for frame in frames] == [3, 3]


def test_the_example_learns(tmp_path: Path) -> None:
    *_, last, _ = run(EXAMPLE, tmp_path).splitlines()
    assert float(last.split()[4].rstrip(",")) > 100, last


def test_a_collector_runs_on_a_stream() -> None:
    with marlvec.make("envpool/TicTacToe-v1", 8, batch_size=4) as envs:
        collector = marlvec.Collector(envs, policies={"main": marlvec.RandomPolicy(seed=0)}, policy_mapping="main")
        batch = collector.collect(episodes=20)
        rows = batch["main"]
        ends = rows.terminated
        assert ends.sum() >= 20
        assert (rows.action_mask[np.arange(len(rows)), rows.actions]).all()


@pytest.mark.parametrize("task", ["TicTacToe-v1", "Go9x9-v1", "IntersectionMultiAgent-v0", "Catch-v0"])
def test_a_time_limit_that_envpool_ignores_is_refused(task: str) -> None:
    with pytest.raises(ArgumentError, match=f"max_episode_steps=4: EnvPool's {task} ignores a time limit"):
        marlvec.make(f"envpool/{task}", 2, max_episode_steps=4)


@pytest.mark.slow("64 envs of two players, by two threads")
@pytest.mark.parametrize("task", ["IntersectionMultiAgent-v0", "TicTacToe-v1"])
def test_players_rows_are_those_of_their_envs_whatever_the_threads_do(task: str) -> None:
    """EnvPool's rows come in the order in which its threads are ready; actions go by env."""

    def played(num_envs: int, **options: Any) -> list[list[bytes]]:
        told: list[list[bytes]] = [[] for _ in range(num_envs)]
        with marlvec.make(f"envpool/{task}", num_envs, **options) as envs:
            _, infos = envs.reset(seed=list(range(num_envs)))
            for k in range(20):
                actions = np.zeros((num_envs, len(envs.agents)), np.int64)
                for i in range(num_envs):
                    for a in range(len(envs.agents)):
                        allowed = np.flatnonzero(infos["action_mask"][i, a]) if "action_mask" in infos else range(3)
                        actions[i, a] = np.random.default_rng([i, a, k]).choice(allowed)
                obs, *parts, infos = envs.step(actions)
                for i in range(num_envs):
                    told[i] += [part[i].tobytes() for part in (obs, *parts, infos["alive"], infos["acting"])]
        return told

    many = played(64, num_threads=2)
    assert many[:4] == played(4, num_threads=1)
    assert len({tuple(one) for one in many}) > 10
