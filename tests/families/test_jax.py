"""JAX worlds of one's own: whole episodes beside a plain loop over their functions with the same keys, bit for bit."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.envs.builtin_ids import JAXMARL, JUMANJI, PGX
from marlvec.errors import ArgumentError, ContractError
from marlvec.registry import listing
from marlvec.testing import check_env, check_vector_env

pytestmark = pytest.mark.slow("compiles worlds of JAX")

MODES = ("same_step", "next_step", "disabled")
NUM_ENVS = 6


jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
jnp = jax.numpy

from gymnasium.spaces import Box, Discrete, MultiDiscrete  # noqa: E402  (jax first: without it nothing below is there)

from tests.families.jax_worlds import LIMIT, Chase, Race  # noqa: E402
from tests.properties.test_orders import check_orders  # noqa: E402
from tests.vector.support.reference import assert_same  # noqa: E402

CHASE, RACE = Chase(), Race()  # pools of the same world share what was compiled
WORLDS: dict[str, Any] = {"chase": CHASE, "race": RACE}


class PlainLoop:
    """N worlds, vectorized and nothing else: keys, counts, who is alive, resets where an episode is over.

    Args:
        world: The world.
        seeds: One a world.
    """

    def __init__(self, world: Any, seeds: list[int]) -> None:
        self.world, self.groups = world, world.spec().groups
        self.keys = jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in seeds])
        self.counts = np.zeros(len(seeds), np.uint32)
        self._reset, self._step = jax.jit(jax.vmap(world.reset)), jax.jit(jax.vmap(world.step))

    def keys_now(self) -> Any:
        return jax.vmap(lambda key, t: jax.random.fold_in(jax.random.wrap_key_data(key), t))(self.keys, self.counts)

    def begin(self, ids: Any = slice(None)) -> None:
        state, rows = self._reset(self.keys_now())
        self.counts[ids] += 1
        alive = np.ones((len(self.counts), len(self.world.agents)), bool)
        if isinstance(ids, slice):
            self.state, self.obs, self.masks, self.acting, self.alive = state, *self.read(rows), alive
            return
        self.state = jax.tree.map(lambda old, new: jnp.asarray(old).at[ids].set(new[ids]), self.state, state)
        for mine, new in zip((self.obs, self.masks), self.read(rows)[:2], strict=True):
            for name in mine:
                mine[name][ids] = new[name][ids]
        acting = self.read(rows)[2]
        if acting is not None:
            self.acting[ids] = acting[ids]
        self.alive[ids] = True

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        """Returns rewards, terminated, truncated, infos; of agents that are not in the episode zeros."""
        acting = self.alive if self.acting is None else self.acting & self.alive
        for group in self.groups:  # those who do not act say the first that there is
            own = actions[group.name] if isinstance(actions, dict) else actions
            own[~acting[:, group.agents]] = group.action_space.start
        state, rows = self._step(self.keys_now(), self.state, actions)
        self.counts[self.alive.any(axis=1)] += 1
        self.state = state
        self.obs, self.masks, self.acting = self.read(rows)
        alive = self.alive
        rewards = np.where(alive, np.asarray(rows.rewards), 0)
        terminated, truncated = np.asarray(rows.terminated) & alive, np.asarray(rows.truncated) & alive
        self.alive = alive & ~terminated & ~truncated
        for group in self.groups:  # zeros of those that had left before
            self.obs[group.name][~alive[:, group.agents]] = 0
        infos = {name: np.asarray(value) for name, value in (*rows.infos.items(), *rows.agent_infos.items())}
        return rewards, terminated, truncated, infos

    def read(self, rows: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
        def by_group(tree: Any) -> dict[str, Any]:
            if tree is None:
                return {}
            tree = tree if isinstance(tree, dict) else {self.groups[0].name: tree}
            return {name: np.array(value) for name, value in tree.items()}

        return by_group(rows.obs), by_group(rows.action_masks), None if rows.acting is None else np.array(rows.acting)


def named(envs: Any, value: Any) -> dict[str, Any]:
    return value if envs.grouped else {next(iter(envs.groups)): value}


def check_rows(envs: Any, obs: Any, infos: dict[str, Any], loop: PlainLoop, rows: Any = slice(None)) -> None:
    for name, value in named(envs, obs).items():
        assert_same(value[rows], loop.obs[name][rows], name)
    acting = loop.alive if loop.acting is None else loop.acting & loop.alive
    assert_same(infos["alive"][rows], loop.alive[rows])
    assert_same(infos["acting"][rows], acting[rows])
    for name, mask in named(envs, infos.get("action_mask", {})).items() if loop.masks else ():
        free = ~acting[:, envs.groups[name], None]
        assert_same(mask[rows], (loop.masks[name] | free)[rows], "mask")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WORLDS)
def test_whole_episodes_are_those_of_a_plain_loop(name: str, mode: str) -> None:
    """Observations, rewards, flags, final observations, masks, turns, infos, the global state."""
    world = WORLDS[name]
    seeds = marlvec.env_seeds(3, NUM_ENVS)
    loop = PlainLoop(world, seeds)
    ended = died = 0
    over = np.zeros(NUM_ENVS, bool)
    with marlvec.make(WORLDS[name], NUM_ENVS, autoreset_mode=mode, state=name == "chase") as envs:
        assert envs.backend == "pool"
        obs, infos = envs.reset(seed=3)
        loop.begin()
        check_rows(envs, obs, infos, loop)
        for _ in range(60):
            actions = envs.random_action()
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            finals: dict[str, Any] = {}
            paid, *ends, said = loop.step(actions)
            if mode == "next_step" and over.any():  # an ended world's step was its reset
                loop.begin(np.flatnonzero(over))
                assert infos["reset_mask"].tolist() == over.tolist()
            assert "final_state" not in infos or ends[0].any() or ends[1].any()
            assert_same(rewards, paid.astype(float))
            assert_same(terminated, ends[0])
            assert_same(truncated, ends[1])
            left = (ends[0] | ends[1]) & (loop.alive.any(axis=1) | over)[:, None]
            died += int(left.sum())
            done = ~loop.alive.any(axis=1)
            ended += int(done.sum())
            finals = {group: value.copy() for group, value in loop.obs.items()}
            if name == "chase":
                last = np.asarray(jax.vmap(world.global_state)(loop.state)).copy()

                if mode == "same_step":
                    for key in said if done.any() else ():
                        assert_same(infos["final_info"][key][done], said[key][done], key)
                for key in said if (~done & ~over).any() else ():
                    assert_same(infos[key][~done & ~over], said[key][~done & ~over], key)
            if mode == "same_step" and done.any():
                loop.begin(np.flatnonzero(done))
            check_rows(envs, obs, infos, loop)
            for group, value in named(envs, infos.get("final_observation", {})).items() if done.any() else ():
                who = ((ends[0] | ends[1])[:, envs.groups[group]]) & done[:, None]
                assert_same(value[who], finals[group][who], "final")
            if name == "chase":
                assert_same(infos["state"], jax.vmap(world.global_state)(loop.state))
                assert_same(envs.state(), infos["state"]) if mode == "same_step" else None
                if done.any():
                    assert_same(infos["final_state"][done], last[done])
            if mode == "disabled" and done.any():
                ids = np.flatnonzero(done)
                loop.begin(ids)
                obs, infos = envs.reset(env_ids=ids)
                check_rows(envs, obs, infos, loop)
            over = done if mode == "next_step" else np.zeros(NUM_ENVS, bool)
    assert ended >= NUM_ENVS
    assert died >= 1 or name == "race"


def trace(num_envs: int, world: Any = CHASE, seeds: Any = None, steps: int = 40, **options: Any) -> list[list[bytes]]:
    """What each env says, under a policy that looks at its own rows alone."""
    told: list[list[bytes]] = [[] for _ in range(num_envs)]
    with marlvec.make(world, num_envs, **options) as envs:
        obs, infos = envs.reset(seed=[*range(100, 100 + num_envs)] if seeds is None else seeds)
        for t in range(steps):
            actions = {}
            for name, value in named(envs, obs).items():
                wanted = (value.sum(axis=-1) * 7).astype(np.int64) + t
                actions[name] = wanted % 3 + (1 if name == "hare" else 0)
            if world is RACE:
                actions = {name: np.zeros_like(value) for name, value in actions.items()}
            if world is CHASE:
                actions["hunter"] = wanted[:, :1].repeat(2, axis=1) % 4 + 1
            obs, *parts, infos = envs.step(actions if envs.grouped else actions[next(iter(actions))])
            for i in range(num_envs):
                rows = [value[i].tobytes() for value in named(envs, obs).values()]
                told[i] += [*rows, *(part[i].tobytes() for part in parts), infos["alive"][i].tobytes()]
    return told


@pytest.mark.parametrize("world", [CHASE, RACE], ids=["chase", "race"])
def test_a_worlds_numbers_depend_on_its_own_seed_alone(world: Any) -> None:
    few, many = trace(8, world), trace(64, world)
    assert many[:8] == few
    assert len({tuple(one) for one in many}) > 32
    shuffled = trace(8, world, seeds=[103, 100, 107, 101, 102, 104, 106, 105])
    assert shuffled[1] == few[0]
    assert shuffled[2] == few[7]


def test_seeds_of_all_sizes_and_none() -> None:
    first = trace(2, seeds=[2**64 - 1, 5])
    assert trace(2, seeds=[2**64 - 1, 5]) == first
    assert trace(2, seeds=[2**32 - 1, 5])[0] != first[0]
    assert trace(2, seeds=[None, 5])[1] == first[1]
    assert trace(2, seeds=[None, 5])[0] != trace(2, seeds=[None, 5])[0]


def test_some_envs_can_be_reset_and_seeded_at_any_time() -> None:
    """Before the first reset of all, too; the others go on as if nothing had been."""
    with marlvec.make(RACE, 4, autoreset_mode="disabled") as envs, marlvec.make(RACE, 4) as other:
        envs.reset(env_ids=[2], seed=[7])
        envs.reset(env_ids=[0, 1, 3], seed=[5, 6, 8])
        other.reset(seed=[5, 6, 7, 8])
        actions = np.zeros((4, 2), np.int64)
        for _ in range(3):
            assert_same(envs.step(actions)[0], other.step(actions)[0])
        envs.reset(env_ids=[1, 2])
        envs.reset(env_ids=[3], seed=[8])
        other.reset(env_ids=[3], seed=[8])
        for _ in range(3):
            assert_same(envs.step(actions)[0][[0, 3]], other.step(actions)[0][[0, 3]])


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("world", [CHASE, RACE], ids=["chase", "race"])
def test_the_order_of_a_request_changes_no_row(world: Any, mode: str) -> None:
    check_orders(partial(marlvec.make, world, 4, autoreset_mode=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [CHASE, RACE], ids=["chase", "race"])
def test_a_saved_state_goes_on_bit_by_bit(world: Any, mode: str) -> None:
    """In the same vectorizer, in another one of other seeds, and one world's state in all of them."""
    make = partial(marlvec.make, world, 5, autoreset_mode=mode)

    def play(envs: Any, steps: int) -> list[bytes]:
        out = []
        for t in range(steps):
            obs, *parts, infos = envs.step(envs.random_action(seed=t))
            rows = [*named(envs, obs).values(), *parts, infos["alive"], infos["reset_mask"]]
            out += [row.tobytes() for row in rows]
            if mode == "disabled" and "final_obs" in infos:
                envs.reset(env_ids=infos["_final_obs"])
        return out

    with make() as envs, make() as other:
        envs.reset(seed=1)
        play(envs, 7)
        assert envs.state_obstacles() == {}
        saved = envs.get_state()
        after = play(envs, 30)
        envs.set_state(saved)
        assert play(envs, 30) == after
        other.set_state(saved)
        assert play(other, 30) == after
        one = envs.get_state([3])
        obs, _ = other.set_state(one, env_ids=range(5))
        assert all(len({row.tobytes() for row in value}) == 1 for value in named(other, obs).values())
        states = other.get_state()["envs"]["pool"]
        assert all(len({row.tobytes() for row in leaf}) == 1 for leaf in states.values())
        wrong = dict(saved["envs"]["pool"])
        wrong[".counts"] = wrong[".counts"].astype(np.int64)
        with pytest.raises(ArgumentError, match=r"set_state\(\): pool: .counts"):
            envs.set_state({**saved, "envs": {**saved["envs"], "pool": wrong}})
        del wrong[".counts"]
        with pytest.raises(ArgumentError, match="pool: expected the arrays"):
            envs.set_state({**saved, "envs": {**saved["envs"], "pool": wrong}})


def test_time_limits_cut_who_is_alive() -> None:
    with marlvec.make(Chase(reach=0.0), 3, max_episode_steps=4) as envs:
        envs.reset(seed=0)
        for t in range(1, 13):
            _, _, terminated, truncated, _ = envs.step(envs.random_action())
            assert not terminated.any()
            assert truncated.all() == (t % 4 == 0) == truncated.any()
    assert LIMIT > 4


def test_arrays_are_the_callers_own_or_views_without_a_copy() -> None:
    with marlvec.make(RACE, 4) as envs:
        obs, _ = envs.reset(seed=0)
        obs[...] = -1
        before = envs.step(envs.random_action())[0]
        kept = before.copy()
        envs.step(envs.random_action())
        assert_same(before, kept)
    with marlvec.make(RACE, 4, copy=False) as envs:
        envs.reset(seed=0)
        obs = envs.step(envs.random_action())[0]
        assert not obs.flags.writeable
        assert np.shares_memory(obs, envs._buffers.obs[0][0])


def test_nothing_is_compiled_in_steps() -> None:
    """Neither in steps in which some end, nor after resets and states of some."""
    compiled: list[str] = []
    with marlvec.make(CHASE, 40) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
        try:
            for _ in range(150):
                envs.step(envs.random_action())
        finally:
            jax.monitoring.clear_event_listeners()
    assert [event for event in compiled if "compile" in event] == []


@pytest.mark.parametrize("world", [CHASE, RACE], ids=["chase", "race"])
def test_they_keep_the_contract_of_vector_envs(world: Any) -> None:
    assert "autoreset" in check_vector_env(lambda **settings: marlvec.make(world, 3, **settings))


@pytest.mark.parametrize("world", [Chase, RACE], ids=["a class", "a world"])
def test_check_env_plays_them(world: Any) -> None:
    assert check_env(world, episodes=1, raise_first=False) == []


def test_check_env_finds_what_is_wrong() -> None:
    class Paints(Race):
        name = "paints"
        observation_spaces = (Box(0, 1, (2,), np.float32),) * 2

    found = check_env(Paints, episodes=1, raise_first=False)
    assert [one.check for one in found] == ["observations"]
    found = check_env(lambda: Broken(step={"rewards": np.zeros(3)}), raise_first=False)
    assert [one.check for one in found] == ["form"]
    assert "rewards: expected shape (2,), as declared, got float32 of shape (3,)" in found[0].got


def test_they_can_be_registered_as_classes_and_as_they_are() -> None:
    marlvec.register("tests/race_v1", Race, kwargs={"goal": 5}, overwrite=True)
    marlvec.register("tests/short_race_v1", Race(goal=3), overwrite=True)
    for name, goal in (("race", 5), ("tests/short_race_v1", 3), (Race(4), 4), (partial(Race, 2), 2)):
        with marlvec.make(name, 2) as envs:
            assert envs.backend == "pool"
            assert {view.world.goal for view in envs.exec_func(lambda env: env)} == {goal}
    with marlvec.make(Race, 2, goal=7) as envs:
        assert envs.exec_func(lambda env: env.world.goal) == (7, 7)
        envs.reset(seed=0)
        assert envs.exec_func(lambda env: env.state["at"].shape) == ((2,), (2,))
    with marlvec.make(lambda: Race(), 2, backend="pool") as envs:
        assert envs.agents == ("red", "blue")


def test_unsupported_arguments_raise() -> None:
    with pytest.raises(ArgumentError, match="backend='sync': worlds of JAX are stepped all at once"):
        marlvec.make(Race, 2, backend="sync")
    with pytest.raises(ArgumentError, match=r"pad=True: chase is a pool.*\['hunter', 'hare'\]"):
        marlvec.make(Chase, 2, pad=True)
    with pytest.raises(ArgumentError, match="render_mode='rgb_array': race draws nothing"):
        marlvec.make(Race, 2, render_mode="rgb_array")
    with pytest.raises(ArgumentError, match="state=True: expected envs with a global state, and race has none"):
        marlvec.make(Race, 2, state=True)
    with pytest.raises(ContractError, match="functional JAX env.*backend='pool'"):
        marlvec.make(lambda: Race(), 2, backend="sync")
    with marlvec.make(Race, 2) as envs:
        envs.reset(seed=0)
        with pytest.raises(ArgumentError, match="takes none"):
            envs.reset(options={"a": 1})


class Broken(Race):
    """A race in which one thing is wrong."""

    name = "broken"

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong

    def reset(self, key: Any) -> tuple[Any, Any]:
        state, rows = super().reset(key)
        return state, rows._replace(**self.wrong.get("reset", {}))

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, Any]:
        state, rows = super().step(key, state, actions)
        state.update(self.wrong.get("state", {}))
        return state, rows._replace(**self.wrong.get("step", {}))


class Changing(Race):
    """Its spaces are others each time."""

    name = "changing"
    looks = 0

    @property
    def observation_spaces(self) -> Any:
        self.looks += 1
        return (Box(0, self.looks, (2,), np.float32),) * 2

    @observation_spaces.setter
    def observation_spaces(self, value: Any) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            {"step": {"obs": np.zeros((3, 2), np.float32)}},
            r"broken\.step\(\): observations of 'agents': expected float32 of shape \(2, 2\), as declared, got float32 "
            r"of shape \(3, 2\)",
        ),
        ({"reset": {"obs": np.zeros((2, 2), np.int32)}}, r"reset\(\): obs.* expected float32 .*, got int32 of shape"),
        ({"step": {"rewards": np.zeros(3)}}, r"step\(\): rewards: expected shape \(2,\), as declared, got float32 of"),
        ({"step": {"rewards": np.zeros(2, int)}}, r"step\(\): rewards: expected floats, got int32"),
        ({"step": {"rewards": None}}, r"step\(\): rewards: expected shape \(2,\), got None"),
        ({"reset": {"rewards": np.zeros(2)}}, r"reset\(\): rewards: expected None after a reset"),
        (
            {"step": {"rewards": np.array([0, np.nan])}},
            r"rewards: expected finite numbers, got nan for agent 'blue'",
        ),
        ({"step": {"obs": np.full((2, 2), np.nan, np.float32)}}, r"step\(\): observations: expected numbers, got NaN"),
        ({"step": {"terminated": np.zeros(2)}}, r"terminated: expected bool of shape \(2,\), as declared, got float32"),
        ({"step": {"acting": None}}, r"step\(\): acting: expected it in both of reset\(\) and step\(\), or in none"),
        ({"step": {"action_masks": None}}, r"action masks of 'agents': expected bool of shape \(2, 3\), got None"),
        ({"reset": {"infos": {"a": 1.0}}}, r"reset\(\): infos: expected none after a reset, got \['a'\]"),
        ({"step": {"agent_infos": {"a": np.zeros(3)}}}, r"agent_infos\['a'\]: expected a first axis of 2 agents"),
        (
            {"state": {"at": np.zeros(3, np.float32)}},
            r"state\['at'\]: expected float32 of shape \(2,\), as reset",
        ),
        ({"state": {"more": np.zeros(3)}}, r"step\(\): state: expected the structure that reset\(\) makes"),
    ],
)
def test_a_world_that_breaks_the_protocol_is_refused_when_it_is_made(wrong: Any, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        marlvec.make(Broken(**wrong), 2)


@pytest.mark.parametrize(
    ("space", "size", "expected"),
    [
        (Box(-1, 1, (2,), np.float32), 3, "None, since it has no choices"),
        (Discrete(15), 2, "15, one entry per choice"),
        (MultiDiscrete([2, 3]), 3, "5, one entry per choice"),
    ],
)
def test_a_mask_that_does_not_fit_the_actions_is_refused_when_the_world_is_made(
    space: Any, size: int, expected: str
) -> None:
    class Masked(Race):
        action_spaces = (space,) * 2
        mask_sizes = (size,) * 2

    with pytest.raises(ContractError, match=f"race.mask_sizes: agent 'red': expected {expected}"):
        marlvec.make(Masked(), 2)


def test_a_world_that_changed_after_it_was_compiled_is_refused() -> None:
    world = Race(goal=9)
    marlvec.make(world, 2).close()
    marlvec.make(world, 3).close()
    world.goal = 20
    with pytest.raises(ContractError, match=r"race: .* got changed attributes \['goal'\].* build another world"):
        marlvec.make(world, 2)


def test_spaces_that_change_are_refused() -> None:
    with pytest.raises(ContractError, match=r"changing.spec\(\): spaces: expected the same at every look, got others"):
        marlvec.make(Changing, 2)


def test_the_page_has_a_world_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")
    (code,) = [
        block for block in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M) if "class Rendezvous" in block
    ]
    exec(compile(code.replace("num_envs=1024", "num_envs=8"), "jax.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == "('red', 'blue') (8, 2, 4) (8, 2)\n"
    assert check_env(_loaded(code), episodes=1, raise_first=False) == []


def _loaded(code: str) -> Any:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code.partition("with marlvec.make")[0], "jax.md", "exec"), names)
    return names["Rendezvous"]


LISTED = {row.id: row for row in listing() if row.family in (JAXMARL, JUMANJI, PGX)}


@pytest.mark.time_limit(1200)  # Brax takes minutes to compile
@pytest.mark.filterwarnings("ignore:Accessing `:DeprecationWarning")  # of mujoco, whose older names Brax uses
@pytest.mark.parametrize("env_id", LISTED)
def test_every_listed_id_is_made_and_steps(env_id: str) -> None:
    if not LISTED[env_id].installed:
        pytest.skip(f"the extra `{LISTED[env_id].extra}` is not installed")
    with marlvec.make(env_id, 2) as envs:
        envs.reset(seed=0)
        _, rewards, terminated, truncated, _ = envs.step(envs.random_action(seed=0))
        assert rewards.shape == terminated.shape == truncated.shape == (2, envs.agent_num)
