"""JaxMARL's envs by ``make("jaxmarl/…")``: whole episodes beside a plain loop over ``step_env``, bit for bit."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ArgumentError, ContractError, EnvArgumentError, UnknownEnvError

pytestmark = pytest.mark.slow("compiles worlds of JAX")


jax = pytest.importorskip("jax", reason="the extra `jaxmarl` is not installed")
jaxmarl = pytest.importorskip("jaxmarl", reason="the extra `jaxmarl` is not installed")
jnp = jax.numpy

from marlvec.vector.pools.jax_suites import JaxMarlWorld  # noqa: E402  (jaxmarl first)
from tests.examples.scripts import run  # noqa: E402
from tests.vector.support.reference import assert_same  # noqa: E402

MODES = ("same_step", "next_step", "disabled")
NUM_ENVS = 5

# Agents alike, of unlike spaces, that die, with masks and a state, with infos, by turns, with Boxes as actions.
ROWS: dict[str, tuple[str, dict[str, Any], int]] = {
    "spread": ("MPE_simple_spread_v3", {"max_steps": 12}, 40),
    "tag": ("MPE_simple_tag_v3", {"max_steps": 9}, 30),
    "continuous": ("MPE_simple_spread_v3", {"max_steps": 12, "action_type": "Continuous"}, 30),
    "smax": ("HeuristicEnemySMAX", {"scenario": "3m", "max_steps": 30}, 70),
    "overcooked": ("overcooked", {"layout": "cramped_room", "max_steps": 15}, 40),
    "hanabi": ("hanabi", {}, 60),
    "brax": ("halfcheetah_6x1", {"episode_length": 7, "auto_reset": False}, 20),
}
BRAX = importlib.util.find_spec("brax") is not None


class Plain:
    """N envs of JaxMARL's, vectorized and nothing else."""

    def __init__(self, env: Any, seeds: list[int]) -> None:
        self.env, self.n = env, len(seeds)
        self.keys = jnp.stack([jax.random.key_data(jax.random.key(seed)) for seed in seeds])
        self.counts = np.zeros(self.n, np.uint32)
        self.reset, self.step_env = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step_env))
        self.fold = jax.jit(jax.vmap(lambda key, t: jax.random.fold_in(jax.random.wrap_key_data(key), t)))

    def begin(self, ids: Any = None) -> None:
        obs, state = self.reset(self.fold(self.keys, self.counts))
        if ids is None:
            self.obs, self.state = obs, state
            self.counts += 1
        else:
            self.obs, self.state = jax.tree.map(
                lambda old, new: old.at[ids].set(new[ids]), (self.obs, self.state), (obs, state)
            )
            self.counts[ids] += 1

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any]:
        keys = self.fold(self.keys, self.counts)
        self.obs, self.state, rewards, dones, _ = self.step_env(keys, self.state, actions)
        self.counts += 1
        return rewards, dones


@pytest.mark.time_limit(600)  # Brax takes minutes to compile
@pytest.mark.filterwarnings("ignore:Accessing `:DeprecationWarning")  # of mujoco, whose older names Brax uses
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "same_step") for name in ROWS] + [("smax", "next_step"), ("smax", "disabled"), ("tag", "next_step")],
)
def test_whole_episodes_are_those_of_a_plain_loop(name: str, mode: str) -> None:
    if name == "brax" and not BRAX:
        pytest.skip("the extra `brax` is not installed")
    if name == "brax" and jax.default_backend() != "cpu":
        pytest.skip("on a GPU, XLA rounds contacts differently in each program")
    env_id, kwargs, steps = ROWS[name]
    world = JaxMarlWorld(env_id, **kwargs)
    env, agents = world.env, world.agents
    plain = Plain(env, [11, 12, 13, 14, 2**32 - 1])
    waiting = np.zeros(NUM_ENVS, bool)
    ends = deaths = late = 0
    with marlvec.make(world, NUM_ENVS, autoreset_mode=mode, state=world.state_space is not None) as envs:
        obs, infos = envs.reset(seed=[11, 12, 13, 14, 2**32 - 1])
        plain.begin()
        homes = {agents[a]: (group, j) for group, members in envs.groups.items() for j, a in enumerate(members)}
        alive = np.ones((NUM_ENVS, len(agents)), bool)

        def rows_of(tree: Any, agent: str) -> Any:
            group, j = homes[agent]
            return (tree[group] if isinstance(tree, dict) else tree)[:, j]

        def check(found: Any, infos: Any) -> None:
            for a, agent in enumerate(agents):
                got, expected = rows_of(found, agent), np.array(plain.obs[agent])
                expected[~alive[:, a] & ~died[:, a]] = 0
                assert_same(got, expected, agent)
            if "action_mask" in infos:
                method = env.get_legal_moves if name == "hanabi" else env.get_avail_actions
                masks = jax.vmap(method)(plain.state)
                for agent in agents:
                    free = ~infos["acting"][:, list(agents).index(agent), None]
                    assert_same(rows_of(infos["action_mask"], agent), np.asarray(masks[agent]).astype(bool) | free)
            if world.state_space is not None:
                assert_same(infos["state"], jax.vmap(env.get_world_state)(plain.state))

        died = np.zeros_like(alive)
        check(obs, infos)
        for t in range(steps):
            actions = envs.random_action()
            acting = infos["acting"]
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            sent = {}
            for a, agent in enumerate(agents):
                own = np.array(rows_of(actions, agent))
                own[~acting[:, a]] = 0
                sent[agent] = jnp.asarray(own)
            plain.counts[waiting] -= 1  # the step of an ended env does not count, and is its reset
            paid, dones = plain.step(sent)
            if waiting.any():
                plain.begin(np.flatnonzero(waiting))
            before = alive | waiting[:, None]
            over = np.asarray(dones["__all__"]) & ~waiting
            gone = np.stack([np.asarray(dones[agent]) for agent in agents], 1) & ~waiting[:, None]
            died = alive & (gone | over[:, None])
            expected = np.stack([np.asarray(paid[agent], np.float64) for agent in agents], 1)
            assert_same(rewards, np.where(alive, expected, 0))
            assert ((terminated | truncated) == died).all()
            assert not (terminated & truncated).any()
            alive = before & ~died
            ends += int(over.sum())
            deaths += int((terminated & ~over[:, None]).sum())
            late += int(truncated.any(axis=1).sum())
            if over.any():
                for agent in agents:
                    who = over & died[:, agents.index(agent)]
                    assert_same(rows_of(infos["final_observation"], agent)[who], np.asarray(plain.obs[agent])[who], t)
            if mode == "disabled" and over.any():
                check(obs, infos)
            if mode != "next_step" and over.any():
                plain.begin(np.flatnonzero(over))
                alive[over], died[over] = True, False
                if mode == "disabled":
                    obs, infos = envs.reset(env_ids=over)
            waiting = over if mode == "next_step" else waiting
            check(obs, infos)
    assert ends >= NUM_ENVS
    assert (deaths > 0) == (name == "smax")
    assert late > 0 or name in ("smax", "hanabi"), late


def test_smax_tells_a_lost_battle_from_the_end_of_time() -> None:
    with marlvec.make("jaxmarl/HeuristicEnemySMAX", 8, max_steps=3) as envs:
        envs.reset(seed=0)
        for t in range(1, 9):
            _, _, terminated, truncated, _ = envs.step(envs.random_action())
            assert not terminated.any()
            assert truncated.all() == truncated.any() == (t % 4 == 0)  # SMAX counts a step after it has looked


def test_hanabi_has_turns_and_pays_who_waits() -> None:
    with marlvec.make("jaxmarl/hanabi", 4) as envs:
        _, infos = envs.reset(seed=0)
        paid = False
        for _ in range(200):
            turn = infos["acting"]
            assert (turn.sum(axis=1) == 1).all()
            _, rewards, *_, infos = envs.step(envs.random_action())
            paid |= bool((rewards * ~turn).any())
        assert paid


def test_overcooked_says_its_shaped_reward_of_each_agent() -> None:
    with marlvec.make("jaxmarl/overcooked", 3) as envs:
        envs.reset(seed=0)
        *_, infos = envs.step(envs.random_action())
        assert infos["shaped_reward"].shape == (3, 2)
        assert envs.single_observation_space.shape == (2, 4, 5, 26)  # what it observes, not what it declares


def test_a_state_goes_on_bit_by_bit() -> None:
    with marlvec.make("jaxmarl/HeuristicEnemySMAX", 3, scenario="3m") as envs:
        envs.reset(seed=1)
        for t in range(5):
            envs.step(envs.random_action(seed=t))
        saved = envs.get_state()
        first = [envs.step(envs.random_action(seed=t))[0].tobytes() for t in range(40)]
        envs.set_state(saved)
        assert [envs.step(envs.random_action(seed=t))[0].tobytes() for t in range(40)] == first


def test_unsupported_arguments_raise() -> None:
    with pytest.raises(UnknownEnvError, match=r"unknown env 'jaxmarl/smax'\. Did you mean 'jaxmarl/SMAX'"):
        marlvec.make("jaxmarl/smax", 2)
    with pytest.raises(ArgumentError, match="backend='async'|backend='sync': JaxMARL's envs are stepped all at once"):
        marlvec.make("jaxmarl/SMAX", 2, backend="sync")
    with pytest.raises(ArgumentError, match="jaxmarl/ant_4x2: expected auto_reset=False, got True"):
        marlvec.make("jaxmarl/ant_4x2", 2, auto_reset=True)
    with pytest.raises(EnvArgumentError, match="speed"):
        marlvec.make("jaxmarl/switch_riddle", 2, speed=3)


def test_brax_that_is_missing_is_named_with_the_extra() -> None:
    """JaxMARL looks for it when it is imported, so in a process without."""
    code = (
        "import sys; sys.modules['brax'] = None\n"
        "import marlvec\n"
        "try: marlvec.make('jaxmarl/halfcheetah_6x1', 2)\n"
        "except marlvec.errors.MissingExtraError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "env 'jaxmarl/halfcheetah_6x1' needs brax, which is not installed; to install it: pip install" in said
    assert "'marlvec[brax]'" in said


def test_the_example_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At small size: it trains, saves, goes on, and plays battles in the end."""
    pytest.importorskip("torch")
    small = ("--num-envs", 8, "--num-steps", 16, "--games", 4, "--checkpoint", tmp_path / "run")
    run("mappo_smax", "--total-timesteps", 256, *small)
    run("mappo_smax", "--total-timesteps", 512, *small, "--resume")
    said = capsys.readouterr().out
    assert len(re.findall(r"^ +(?:random|marines): return \d\.\d\d, battles won \d+%$", said, re.M)) == 4


def test_a_tell_in_the_last_step_terminates() -> None:
    """`switch_riddle` has a limit and no `is_terminal`: its step with the limit out of reach says why it ends."""
    with marlvec.make("jaxmarl/switch_riddle", 4, num_agents=3, autoreset_mode="disabled") as envs:
        limit = envs.get_attr("world")[0].env.max_steps
        for told in (True, False):
            envs.reset(seed=0)
            for t in range(limit):
                tell = told and t == limit - 1
                actions = np.full((4, 3), envs.get_attr("world")[0].env.game_actions["TELL"] if tell else 0)
                _, _, terminated, truncated, _ = envs.step(actions)
            assert terminated.all() == terminated.any() == told
            assert truncated.all() == truncated.any() == (not told)


def test_a_redirected_stdout_stays_redirected() -> None:
    """JaxMARL's import replaces it; in a process of its own, since imports happen once."""
    code = (
        "import contextlib, io, marlvec\n"
        "with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "    marlvec.make('jaxmarl/MPE_simple_v3', 1).close()\n"
        "    print('inside')\n"
        "assert text.getvalue() == 'inside\\n', text.getvalue()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=170)


@pytest.mark.parametrize(
    ("name", "match"),
    [("storm", "raised KeyError: 0"), ("storm_2p", "raised AttributeError"), ("storm_np", "raised TypeError")],
)
def test_envs_that_break_jaxmarls_protocol_are_named(name: str, match: str) -> None:
    with pytest.raises(ContractError, match=f"jaxmarl/{name}: expected an env with JaxMARL's protocol.*{match}"):
        marlvec.make(f"jaxmarl/{name}", 1)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # jaxnav's own
@pytest.mark.parametrize(("name", "options"), [("HeuristicEnemySMAX", {"action_type": "continuous"}), ("jaxnav", {})])
def test_masks_of_continuous_actions_are_refused(name: str, options: Any) -> None:
    with pytest.raises(ContractError, match=f"jaxmarl/{name}.mask_sizes: .*expected None"):
        marlvec.make(f"jaxmarl/{name}", 1, **options)


def test_a_global_state_by_agent_becomes_one_vector() -> None:
    with marlvec.make("jaxmarl/MPE_simple_facmac_v1", 2, state=True) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["state"].shape == (2, *envs.state_space.shape)


def test_a_built_env_is_a_world() -> None:
    env = jaxmarl.make("MPE_simple_spread_v3", num_agents=2)
    named = partial(marlvec.make, "jaxmarl/MPE_simple_spread_v3", num_agents=2)
    with marlvec.make(JaxMarlWorld(env), 2) as envs, named(2) as other:
        assert np.array_equal(envs.reset(seed=1)[0], other.reset(seed=1)[0])
    with pytest.raises(ArgumentError, match=r"expected no arguments with a built env, got \['num_agents'\]"):
        JaxMarlWorld(env, num_agents=3)
