"""Envs that others wrote, of every kind: whole episodes are those of a plain loop, bit for bit."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import marlvec
from marlvec.errors import EnvContractError
from marlvec.testing import check_env
from tests.families.others import EVERY, ROWS, Every, Row, momaland, single
from tests.vector.support.reference import record, replay

# --- Envs that others wrote, of every kind: whole episodes are those of a plain loop, bit for bit, sync and async


# What these libraries warn of when they are imported and used is for those who write them.
QUIET = pytest.mark.filterwarnings("ignore")

EPISODES = 2


def params() -> list[Any]:
    return [
        pytest.param(row, id=f"{row.package}-{row.name}", marks=[pytest.mark.soak] if row.is_long else [])
        for row in ROWS
    ]


def need(package: str) -> None:
    """Skip where it is not installed. Not importing it here: some start threads, or draw random numbers."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make families` does it")


@QUIET
@pytest.mark.parametrize("row", params())
def test_whole_episodes_are_those_of_a_plain_loop(row: Row) -> None:
    need(row.package)
    plain = row.factory if row.plainly is None else lambda: row.plainly(row.factory())  # type: ignore[misc]  # it is
    calls = record([plain] * row.num_envs, "same_step", episodes=EPISODES, interrupt=0.05, reseed=1.0)
    for place in ({"backend": "sync"}, {"backend": "async", "num_workers": row.num_envs}):
        with marlvec.make(row.factory, row.num_envs, **place, **row.kwargs) as envs:
            replay(envs, calls)


@QUIET
@pytest.mark.soak
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("every", EVERY, ids=lambda every: every.package)
def test_every_env_that_runs_by_itself_does_so_here(every: Every) -> None:
    """One of each, in short episodes; which do not is known, for docs/envs.md names them."""
    need(every.package)
    single(every.package, every.one).close()
    specs = [spec for spec in gymnasium.registry.values() if str(spec.entry_point).startswith(every.package)]
    newest = {spec.name: max(other.version or 0 for other in specs if other.name == spec.name) for spec in specs}
    if every.package == "gymnasium_robotics":  # whose older versions are for older simulators
        specs = [spec for spec in specs if spec.version == newest[spec.name]]
    failed = {}
    for spec in specs:
        factory = partial(single, every.package, spec.id, *every.wrappers, max_episode_steps=5)
        try:
            calls = record([factory], "same_step", episodes=2)
            with marlvec.make(factory, 1, backend="sync") as envs:
                replay(envs, calls)
        except Exception as error:  # by AssertionErrors of theirs and of ours, and whatever else
            failed[spec.id] = f"{type(error).__name__}: {error}"[:300]
    if "pygame" in sys.modules:  # some that draw leave what SDL opens
        sys.modules["pygame"].quit()
    known = {spec.id for spec in specs if re.fullmatch(every.not_these, spec.id)}
    assert {name: said for name, said in failed.items() if name not in known} == {}
    assert known <= failed.keys(), "these run now: docs/envs.md should say so"


@QUIET
def test_rewards_of_several_objectives_are_refused_with_the_wrapper_that_makes_one_of_them() -> None:
    need("mo_gymnasium")
    with marlvec.make(partial(single, "mo_gymnasium", "deep-sea-treasure-v0"), backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvContractError, match=r"combine them: marlvec\.envs\.adapt\(env, reward_weights="):
            envs.step(envs.random_action())
    need("momaland")
    with marlvec.make(
        partial(momaland, "item_gathering.moitem_gathering_v0", "parallel_env", one_number=False), backend="sync"
    ) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvContractError, match=r"combine them: marlvec\.envs\.adapt\(env, reward_weights="):
            envs.step(envs.random_action())
    with marlvec.make(partial(momaland, "connect4.moconnect4_v0", "env", one_number=False), backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvContractError, match=r"combine them: marlvec\.envs\.adapt\(env, reward_weights="):
            envs.step(envs.random_action())


@QUIET
def test_agents_that_have_arrived_and_go_on_being_rewarded() -> None:
    """In highway-env's v1 and v2: refused, for such a reward has no decision; an env may end with its first agent."""
    need("highway_env")
    config = {"duration": 20, "initial_vehicle_count": 1, "spawn_probability": 0.0}
    factory = partial(single, "highway_env", "intersection-multi-agent-v2", config=config)
    faster, arrivals = np.full((2, 2), 2), 0
    with marlvec.make(factory, 2, backend="sync", agents="tuple", done_on="any") as envs:
        envs.reset(seed=0)
        for _ in range(20):
            _, _, terminated, truncated, _ = envs.step(faster)
            arrivals += int((terminated.any(axis=1) & truncated.any(axis=1)).sum())
    assert arrivals
    with marlvec.make(factory, 2, backend="sync", agents="tuple") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvContractError, match=r"reward of agent 'agent_\d': expected 0, for it has ended"):
            for _ in range(20):
                envs.step(faster)


# --- Gymnasium envs of several agents that others wrote: whole episodes are those of a plain loop, byte for byte


STEPS, SEEDS = 120, [3, 4]
ENVS = [
    ("lbforaging", "lbforaging:Foraging-5x5-2p-1f-v3"),
    ("lbforaging", "lbforaging:Foraging-5x5-3p-1f-coop-v3"),
    ("lbforaging", "lbforaging:Foraging-2s-8x8-4p-3f-coop-v3"),
    ("rware", "rware:rware-tiny-2ag-v2"),
    ("rware", "rware:rware-tiny-4ag-hard-v2"),
]


def plain_loop(env_id: str, seed: int, actions: Any) -> list[Any]:
    """What the env itself says: ``(obs, rewards, terminated, truncated)``, the last obs before each reset included."""
    env: Any = gymnasium.make(env_id, disable_env_checker=True)
    out: list[Any] = [env.reset(seed=seed)[0]]
    for joint in actions:
        last, rewards, terminated, truncated, _ = env.step([int(action) for action in joint])
        over = bool(terminated or truncated)
        obs = env.reset()[0] if over else last
        out.append((obs, last if over else None, rewards, bool(terminated), bool(truncated)))
    env.close()
    return out


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
@pytest.mark.parametrize(("package", "env_id"), ENVS)
def test_whole_joint_episodes_are_those_of_a_plain_loop(package: str, env_id: str, backend: str) -> None:
    pytest.importorskip(package)
    if (package, backend) == ("rware", "thread"):
        pytest.skip("rware numbers its agents by a counter of the class, which resets in two threads share")
    with marlvec.make(f"gymnasium/{env_id}", len(SEEDS), backend=backend) as envs:
        agent_num = envs.agent_num
        assert envs.agents == tuple(f"agent_{a}" for a in range(agent_num))
        actions = np.random.default_rng(0).integers(0, 5, (STEPS, len(SEEDS), agent_num))
        loops = [plain_loop(env_id, seed, actions[:, i]) for i, seed in enumerate(SEEDS)]
        obs, _ = envs.reset(seed=SEEDS)
        for i, loop in enumerate(loops):
            np.testing.assert_array_equal(obs[i], loop[0])
        for t in range(STEPS):
            obs, rewards, terminated, truncated, infos = envs.step(actions[t])
            for i, loop in enumerate(loops):
                now, last, paid, ended, cut = loop[t + 1]
                np.testing.assert_array_equal(obs[i], now)
                assert rewards[i].tolist() == [float(reward) for reward in paid]
                assert terminated[i].tolist() == [ended] * agent_num
                assert truncated[i].tolist() == [cut] * agent_num
                if last is not None:
                    np.testing.assert_array_equal(infos["final_observation"][i], last)


@pytest.mark.parametrize(("package", "env_id"), [ENVS[0], ENVS[3]])
def test_a_check_finds_only_that_lbforaging_begins_some_seeds_otherwise_once_it_has_played(
    package: str, env_id: str
) -> None:
    pytest.importorskip(package)
    limit = {"max_episode_steps": 40} if package == "lbforaging" else {"max_steps": 40}
    found = check_env(partial(gymnasium.make, env_id, disable_env_checker=True, **limit), raise_first=False)
    assert [one.check for one in found] == (["reset"] if package == "lbforaging" else [])
    assert all("which had played other episodes before (seed " in one.got for one in found)


FIXED = [f"MultiGrid-Empty-{size}-v0" for size in ("5x5", "6x6", "8x8", "16x16")]
DRAWN = [
    "MultiGrid-BlockedUnlockPickup-v0",
    "MultiGrid-Empty-Random-5x5-v0",
    "MultiGrid-Empty-Random-6x6-v0",
    *(f"MultiGrid-LockedHallway-{number}Rooms-v0" for number in (2, 4, 6)),
    "MultiGrid-Playground-v0",
    *(f"MultiGrid-RedBlueDoors-{size}-v0" for size in ("6x6", "8x8")),
]


def multigrid_env(name: str) -> Any:
    envs: Any = importlib.import_module("multigrid.envs")
    kind, kwargs = envs.CONFIGURATIONS[name]
    return kind(agents=3, max_steps=25, **kwargs)


# In a fresh virtual environment multigrid compiles what it observes with, each process for itself: minutes, where
# others use the cores, too.
COMPILES = pytest.mark.time_limit(900)


@COMPILES
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
@pytest.mark.parametrize("name", FIXED)
def test_dicts_with_numbers_for_keys_are_agents(name: str, backend: str) -> None:
    pytest.importorskip("multigrid")
    with marlvec.make(partial(multigrid_env, name), 2, backend=backend) as envs:
        assert envs.agents == ("0", "1", "2")
        actions = np.random.default_rng(0).integers(0, 7, (STEPS, 2, 3))
        plain = [multigrid_env(name) for _ in SEEDS]
        first = [env.reset(seed=seed)[0] for env, seed in zip(plain, SEEDS, strict=True)]
        obs, _ = envs.reset(seed=SEEDS)
        ended = np.zeros((2, 3), bool)
        assert_seen(obs, first, ended)
        for t in range(STEPS):
            obs, rewards, terminated, truncated, _ = envs.step(actions[t])
            now = []
            for i, env in enumerate(plain):
                joint = {a: 0 if ended[i, a] else int(actions[t, i, a]) for a in range(3)}
                seen, paid, flags, cut, _ = env.step(joint)
                for a in range(3):
                    here = not ended[i, a]
                    assert rewards[i, a] == (paid[a] if here else 0)
                    assert (terminated[i, a], truncated[i, a]) == ((flags[a], cut[a]) if here else (False, False))
                    ended[i, a] |= flags[a] or cut[a]
                if ended[i].all():
                    seen, ended[i] = env.reset()[0], False
                now.append(seen)
            assert_seen(obs, now, ended)


def assert_seen(obs: Any, plain: list[Any], ended: Any) -> None:
    for i, seen in enumerate(plain):
        for a in range(3):
            if ended[i, a]:
                continue
            np.testing.assert_array_equal(obs["image"][i, a], seen[a]["image"])
            assert obs["direction"][i, a] == seen[a]["direction"]
            assert str(obs["mission"][i, a]) == str(seen[a]["mission"])


@COMPILES
def test_a_check_finds_nothing_in_a_space_that_derives_from_another_kind() -> None:
    pytest.importorskip("multigrid")
    assert check_env(partial(multigrid_env, FIXED[0]), raise_first=False) == []


@COMPILES
def test_what_multigrid_draws_does_not_come_from_the_seed() -> None:
    """Theirs, not ours: of the envs that place things at random, two with one seed begin unlike each other."""
    pytest.importorskip("multigrid")
    envs: Any = importlib.import_module("multigrid.envs")
    assert {*FIXED, *DRAWN} == set(envs.CONFIGURATIONS)
    for name in [*FIXED, *DRAWN]:
        env, other = multigrid_env(name), multigrid_env(name)
        equal = []
        for seed in range(6):
            seen, also = (one.reset(seed=seed)[0] for one in (env, other))
            images = all(np.array_equal(seen[a]["image"], also[a]["image"]) for a in range(3))
            equal.append(images and all(seen[a]["direction"] == also[a]["direction"] for a in range(3)))
        assert all(equal) == (name in FIXED), name
