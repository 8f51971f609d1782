"""Jumanji's envs by ``make("jumanji/…")``: whole episodes beside a plain loop over ``step``, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ArgumentError, ContractError, EnvArgumentError, UnknownEnvError
from marlvec.testing import check_vector_env

pytestmark = pytest.mark.slow("compiles worlds of JAX")


jax = pytest.importorskip("jax", reason="the extra `jumanji` is not installed")
jumanji = pytest.importorskip("jumanji", reason="the extra `jumanji` is not installed")
jnp = jax.numpy

from marlvec.vector.pools.jax_suites import JumanjiWorld  # noqa: E402  (jumanji first)
from tests.vector.support.reference import assert_same  # noqa: E402

MODES = ("same_step", "next_step", "disabled")
SEEDS = [21, 22, 23, 2**32 - 1]
NUM_ENVS = len(SEEDS)
Natural = Callable[[Any, Any], Any]


def _connected(state: Any, seen: Any) -> Any:
    at_target = (state.agents.position == state.agents.target).all(-1)
    return (at_target | ~seen.action_mask[..., 1:].any(-1)).all(-1)


# Arguments, steps, and when the game is over without a limit; None: in each step before the limit that ends it.
ROWS: dict[str, tuple[dict[str, Any], int, Natural | None]] = {
    "Cleaner-v0": ({"time_limit": 9}, 30, lambda state, seen: (seen.grid != 0).all((-2, -1))),
    "Connector-v3": ({"time_limit": 14}, 40, _connected),
    "LevelBasedForaging-v0": ({"time_limit": 12}, 40, lambda state, seen: state.food_items.eaten.all(-1)),
    "MMST-v0": ({"time_limit": 8}, 25, lambda state, seen: state.finished_agents.all(-1)),
    "MultiCVRP-v0": ({}, 60, None),
    "RobotWarehouse-v0": ({"time_limit": 20}, 60, None),
}


def fields(record: Any, prefix: str = "") -> dict[str, Any]:
    """Arrays of nested records (or dicts) by their path."""
    found: dict[str, Any] = {}
    items = record if isinstance(record, Mapping) else record._asdict() if hasattr(record, "_asdict") else vars(record)
    for name, value in items.items():
        if hasattr(value, "shape"):
            found[prefix + name] = np.asarray(value)
        else:
            found |= fields(value, f"{prefix}{name}/")
    return found


class Plain:
    """N envs of Jumanji's, vectorized and nothing else."""

    def __init__(self, env: Any) -> None:
        self.keys = jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in SEEDS])
        self.counts, self.steps = np.zeros(NUM_ENVS, np.uint32), np.zeros(NUM_ENVS, int)
        self.reset, self.advance = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
        self.fold = jax.jit(jax.vmap(lambda key, t: jax.random.fold_in(jax.random.wrap_key_data(key), t)))
        self.state: Any = None

    def begin(self, who: Any) -> None:
        state, timestep = self.reset(self.fold(self.keys, self.counts))
        if self.state is None:
            self.state, self.seen = state, timestep.observation
        else:
            ids = np.flatnonzero(who)
            self.state, self.seen = jax.tree.map(
                lambda old, new: old.at[ids].set(new[ids]), (self.state, self.seen), (state, timestep.observation)
            )
        self.counts[who] += 1
        self.steps[who] = 0

    def step(self, actions: Any, going: Any) -> Any:
        self.state, timestep = self.advance(self.state, jnp.asarray(actions))
        self.seen = timestep.observation
        self.counts[going] += 1
        self.steps[going] += 1
        return timestep


@pytest.mark.time_limit(600)  # compiles Jumanji's step twice, in marlvec and in the loop
@pytest.mark.parametrize(
    ("env_id", "mode"),
    [(env_id, "same_step") for env_id in ROWS]
    + [(env_id, mode) for env_id in ("RobotWarehouse-v0", "Connector-v3") for mode in MODES[1:]],
)
def test_whole_episodes_are_those_of_a_plain_loop(env_id: str, mode: str) -> None:
    kwargs, steps, natural = ROWS[env_id]
    env = jumanji.make(env_id, **kwargs)
    limit = getattr(env, "time_limit", 10**9)
    plain = Plain(env)
    waiting = np.zeros(NUM_ENVS, bool)
    ends = late = 0
    with marlvec.make(f"jumanji/{env_id}", NUM_ENVS, autoreset_mode=mode, validate="strict", **kwargs) as envs:
        a = envs.agent_num

        def expected() -> dict[str, Any]:
            """What the loop observes, as each agent does."""
            found = {name: value for name, value in fields(plain.seen).items() if name != "action_mask"}
            own = ("agents_view", "searcher_views")
            return {
                name: value if name in own else np.repeat(value[:, None], a, axis=1) for name, value in found.items()
            }

        def check(obs: Any, infos: Any, over: Any) -> None:
            found, wanted = fields(obs), expected()
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert_same(found[name], value, name)
            if "action_mask" in infos:
                mask = np.array(plain.seen.action_mask)
                can_act = mask.any(axis=2)
                assert_same(infos["acting"], (can_act | ~can_act.any(axis=1, keepdims=True)) & ~over[:, None])
                mask[~can_act] = True
                mask[over] = True
                assert_same(infos["action_mask"], mask)

        obs, infos = envs.reset(seed=SEEDS)
        plain.begin(np.ones(NUM_ENVS, bool))
        check(obs, infos, waiting)
        for _ in range(steps):
            actions = envs.random_action()
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            timestep = plain.step(np.asarray(actions, env.action_spec.dtype), ~waiting)
            over = np.asarray(timestep.last()) & ~waiting
            by_itself = plain.steps < limit if natural is None else np.asarray(natural(plain.state, plain.seen))
            paid = np.asarray(timestep.reward, np.float64)
            paid = np.broadcast_to(paid[:, None], (NUM_ENVS, a)) if paid.ndim == 1 else paid
            assert_same(rewards, np.where(waiting[:, None], 0, paid))
            assert_same(terminated, np.repeat((over & by_itself)[:, None], a, axis=1))
            assert_same(truncated, np.repeat((over & ~by_itself)[:, None], a, axis=1))
            for name, value in (timestep.extras or {}).items() if mode == "disabled" else ():
                assert_same(infos[name], value)
            if timestep.discount.ndim == 2 and mode == "disabled":
                assert_same(infos["discount"], timestep.discount)
            ends, late = ends + int(over.sum()), late + int((over & ~by_itself).sum())
            if over.any():
                finals = fields(infos["final_observation"])
                for name, value in expected().items():
                    assert_same(finals[name][over], value[over], name)
            if mode == "next_step":
                if waiting.any():
                    plain.begin(waiting)
                waiting = over
            elif over.any():
                if mode == "disabled":
                    check(obs, infos, over)
                    obs, infos = envs.reset(env_ids=over)
                plain.begin(over)
            check(obs, infos, waiting)
    assert ends >= NUM_ENVS
    assert late > 0 or env_id == "MultiCVRP-v0"


def test_a_collision_terminates_and_the_limit_truncates() -> None:
    """Jumanji's warehouse says the same of both; a move that the mask forbids ends a cleaning."""
    with marlvec.make("jumanji/RobotWarehouse-v0", 16, time_limit=40, validate="off") as envs:
        envs.reset(seed=0)
        ends = np.zeros(2, int)
        for _ in range(120):
            _, _, terminated, truncated, _ = envs.step(envs.random_action())
            ends += terminated[:, 0].sum(), truncated[:, 0].sum()
        assert (ends > 0).all()
    with marlvec.make("jumanji/Cleaner-v0", 2, validate="off") as envs:
        envs.reset(seed=0)
        _, _, terminated, truncated, _ = envs.step(np.zeros((2, 3), np.int64))  # up, into the wall
        assert terminated.all()
        assert not truncated.any()


@pytest.mark.time_limit(600)
@pytest.mark.parametrize(
    ("env_id", "discount"), [("LevelBasedForaging-v0", 1), ("RobotWarehouse-v0", 0), ("Cleaner-v0", 0)]
)
def test_the_time_limit_truncates_whatever_jumanjis_discount_says(env_id: str, discount: int) -> None:
    """At its limit level-based foraging gives the discount 1, and the others 0, as at an end of the game itself."""
    world, limit = JumanjiWorld(env_id, time_limit=3), 3
    plain = Plain(world.env)
    with marlvec.make(world, NUM_ENVS, autoreset_mode="disabled", validate="off") as envs:
        envs.reset(seed=SEEDS)
        plain.begin(np.arange(NUM_ENVS))
        for t in range(1, limit + 1):
            stays = np.zeros((NUM_ENVS, envs.agent_num), int)
            actions = envs.random_action(seed=t) if env_id == "Cleaner-v0" else stays  # in Cleaner, 0 is a move
            _, _, terminated, truncated, infos = envs.step(actions)
            timestep = plain.step(np.asarray(actions, world.env.action_spec.dtype), np.ones(NUM_ENVS, bool))
            assert not terminated.any()
            assert truncated.all() == truncated.any() == (t == limit)
        assert timestep.last().all()
        assert (np.asarray(timestep.discount) == discount).all()
        if env_id == "LevelBasedForaging-v0":
            assert_same(infos["discount"], timestep.discount)
        if env_id == "Cleaner-v0":  # a move that the mask forbids, in the last step
            envs.reset(seed=SEEDS)
            for t in range(1, limit):
                *_, infos = envs.step(envs.random_action(seed=t))
            forbidden = infos["action_mask"].argmin(axis=2)
            _, _, terminated, truncated, _ = envs.step(forbidden)
            assert terminated.all()
            assert not truncated.any()


def test_a_state_goes_on_bit_by_bit() -> None:
    with marlvec.make("jumanji/RobotWarehouse-v0", 3, time_limit=15) as envs:
        envs.reset(seed=1)
        for t in range(5):
            envs.step(envs.random_action(seed=t))
        saved = envs.get_state()
        first = [envs.step(envs.random_action(seed=t))[1].tobytes() for t in range(40)]
        envs.set_state(saved)
        assert [envs.step(envs.random_action(seed=t))[1].tobytes() for t in range(40)] == first


def test_numbers_depend_on_the_own_seed_alone() -> None:
    def run(num_envs: int) -> list[bytes]:
        with marlvec.make("jumanji/LevelBasedForaging-v0", num_envs, time_limit=10, validate="off") as envs:
            obs, _ = envs.reset(seed=[*range(num_envs)])
            said = [obs["agents_view"][:8].tobytes()]
            for t in range(30):
                obs, *_ = envs.step(np.full((num_envs, 2), t % 6))
                said.append(obs["agents_view"][:8].tobytes())
            return said

    assert run(8) == run(64)


def test_they_keep_the_contract_of_vector_envs() -> None:
    world = JumanjiWorld("Connector-v3", time_limit=8)
    assert "autoreset" in check_vector_env(lambda **settings: marlvec.make(world, 3, **settings))


def test_unsupported_arguments_raise() -> None:
    with pytest.raises(UnknownEnvError, match=r"unknown env 'jumanji/connector-v3'\. Did you mean 'jumanji/Connector"):
        marlvec.make("jumanji/connector-v3", 2)
    with pytest.raises(ArgumentError, match="'jumanji/Snake-v1': expected an env with several agents, got one"):
        marlvec.make("jumanji/Snake-v1", 2)
    with pytest.raises(ArgumentError, match="backend='sync': Jumanji's envs are stepped all at once"):
        marlvec.make("jumanji/Connector-v3", 2, backend="sync")
    with pytest.raises(EnvArgumentError, match="speed"):
        marlvec.make("jumanji/Connector-v3", 2, speed=3)


def test_actions_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(jumanji.make("Connector-v3"))
    unlike = jumanji.specs.MultiDiscreteArray(jnp.arange(3, 13), name="action")
    monkeypatch.setattr(kind, "action_spec", unlike)
    with pytest.raises(ContractError, match=r"jumanji/Connector-v3: action_spec: expected choices from 0 on"):
        marlvec.make("jumanji/Connector-v3", 2)


def test_a_built_env_is_a_world() -> None:
    env = jumanji.make("RobotWarehouse-v0", time_limit=2)
    with marlvec.make(marlvec.JumanjiWorld(env), 2) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())
        assert envs.step(envs.random_action())[3].all()
    with pytest.raises(ArgumentError, match="expected no arguments with a built env"):
        marlvec.JumanjiWorld(env, time_limit=3)
