"""VMAS's scenarios by ``make("vmas/…")``: whole episodes beside a plain loop over ``vmas.make_env``, bit for bit."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ArgumentError, ContractError, MissingExtraError, UnknownEnvError
from tests.properties.test_orders import check_orders
from tests.vector.support.reference import assert_same


def test_without_vmas_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(MissingExtraError, match=r"vmas/balance.*pip install 'marlvec\[vmas\]'"):
        marlvec.make("vmas/balance", 4)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the old gym's, which VMAS imports
    vmas = pytest.importorskip("vmas", reason="the extra `vmas` is not installed")
    torch = pytest.importorskip("torch")

torch.set_num_threads(1)

NUM_ENVS = 6
SEED = 4
STEPS = 45
MODES = ("same_step", "next_step", "disabled")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
DEVICES = ("cpu", pytest.param("cuda", marks=ON_GPU))

# Episodes that end by themselves, at different times (balance), none but by the limit, dicts in infos, actions of each
# kind, one agent.
ROWS: dict[str, dict[str, Any]] = {
    "balance": {"max_steps": 40},
    "navigation": {"max_steps": 23, "n_agents": 2},
    "dispersion": {"max_steps": 30, "continuous_actions": False},
    "sampling": {"max_steps": 25, "continuous_actions": False, "multidiscrete_actions": True},
    "football": {"max_steps": 15, "n_blue_agents": 2, "n_red_agents": 2},
    "goal": {"max_steps": 11},
    "simple_spread": {"max_steps": 12},
}


def plain(name: str, device: str = "cpu") -> Any:
    return vmas.make_env(name, num_envs=NUM_ENVS, terminated_truncated=True, device=device, **ROWS[name])


if torch.cuda.is_available():  # the GPU's files and threads stay with the process, so no test is the first to open them
    plain("balance", "cuda").reset()


def as_numpy(tensors: Any) -> np.ndarray[Any, Any]:
    return torch.stack(list(tensors), 1).cpu().numpy()


def as_tensors(actions: np.ndarray[Any, Any], device: str = "cpu") -> list[Any]:
    rows = torch.from_numpy(actions).to(device)
    return [rows[:, a].reshape(NUM_ENVS, -1).clone() for a in range(rows.shape[1])]


def begin(env: Any, ids: np.ndarray[Any, Any]) -> Any:
    """All at once where it is all of them, which draws other numbers than one by one."""
    if len(ids) == NUM_ENVS:
        return env.reset()
    for i in ids.tolist():
        seen = env.reset_at(i)
    return seen


def check_infos(infos: dict[str, Any], said: list[dict[str, Any]], told: np.ndarray[Any, Any]) -> None:
    """Of the envs that ``told`` says."""
    for key in said[0] if told.any() else ():
        values = as_numpy(info[key] for info in said)
        assert (infos[f"_{key}"] == told[:, None]).all()
        assert_same(infos[key][told], values[told])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("device", DEVICES)
def test_whole_episodes_are_those_of_a_plain_loop(device: str, name: str, mode: str) -> None:
    env = plain(name, device)
    ended = 0
    over = np.zeros(NUM_ENVS, bool)
    with marlvec.make(f"vmas/{name}", NUM_ENVS, autoreset_mode=mode, device=device, **ROWS[name]) as envs:
        assert envs.backend == "pool"
        assert envs.agents == tuple(agent.name for agent in env.agents)
        obs, infos = envs.reset(seed=[SEED] * NUM_ENVS)
        assert_same(obs, as_numpy(env.reset(seed=SEED)))
        for _ in range(STEPS):
            actions = envs.random_action()
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            seen, paid, term, trunc, said = env.step(as_tensors(actions, device))
            expected, flags = as_numpy(paid).astype(float), np.stack([term.cpu().numpy(), trunc.cpu().numpy()])
            last = as_numpy(seen)
            done = flags.any(axis=0)
            again = over if mode == "next_step" else done & (mode == "same_step")
            if again.any():
                seen = begin(env, np.flatnonzero(again))
            if mode == "next_step":  # an ended env's step was its reset
                expected[over], flags[:, over], done = 0, False, done & ~over
                assert infos["reset_mask"].tolist() == over.tolist()
                over = done
            ended += int(done.sum())
            assert_same(obs, as_numpy(seen))
            assert_same(rewards, expected)
            for got, flag in zip((terminated, truncated), flags, strict=True):
                assert_same(got, np.repeat(flag[:, None], len(envs.agents), axis=1))
            if done.any():
                assert_same(infos["final_observation"][done], last[done])
            if mode == "same_step":
                check_infos(infos, said, ~done)
                if done.any() and said[0]:
                    check_infos(infos["final_info"], said, done)
            else:
                check_infos(infos, said, ~again)
            if mode == "disabled" and done.any():
                ids = np.flatnonzero(done)
                seen = begin(env, ids)
                assert_same(envs.reset(env_ids=ids)[0][ids], as_numpy(seen)[ids])
    assert ended >= NUM_ENVS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["simple_tag", "simple_world_comm", "simple_speaker_listener", "simple_crypto"])
def test_agents_of_unlike_spaces_are_groups(name: str, mode: str) -> None:
    """Every agent's rows beside the plain loop's, and its final observations."""
    env = vmas.make_env(name, num_envs=NUM_ENVS, terminated_truncated=True, max_steps=7)
    agents = [agent.name for agent in env.agents]
    with marlvec.make(f"vmas/{name}", NUM_ENVS, autoreset_mode=mode, max_episode_steps=7) as envs:
        assert len(envs.groups) > 1
        homes = {a: (group, j) for group, members in envs.groups.items() for j, a in enumerate(members)}

        def same_obs(found: Any, seen: Any, rows: Any = slice(None)) -> None:
            for a in range(len(agents)):
                group, j = homes[a]
                assert_same(found[group][rows, j], seen[a].numpy()[rows])

        obs, _ = envs.reset(seed=[SEED] * NUM_ENVS)
        same_obs(obs, env.reset(seed=SEED))
        ends = 0
        for t in range(20):
            actions = envs.random_action()
            obs, rewards, _, truncated, infos = envs.step(actions)
            if mode == "next_step" and t % 8 == 7:  # all end at once, so this step was a reset
                same_obs(obs, env.reset())
                assert infos["reset_mask"].all()
                continue
            sent = [torch.from_numpy(actions[group][:, j].reshape(NUM_ENVS, -1)) for group, j in homes.values()]
            order = np.argsort(list(homes))
            seen, paid, _, trunc, _ = env.step([sent[k] for k in order])
            assert_same(rewards, as_numpy(paid).astype(float))
            assert truncated.all() == trunc.all()
            if trunc.all():
                ends += 1
                same_obs(infos["final_observation"], seen)
                if mode == "next_step":
                    same_obs(obs, seen)
                    continue
                seen = env.reset()
                obs = envs.reset()[0] if mode == "disabled" else obs
            same_obs(obs, seen)
        assert ends == 2


def test_single_envs_can_be_reset_at_any_time() -> None:
    env = plain("balance")
    with marlvec.make("vmas/balance", NUM_ENVS, **ROWS["balance"]) as envs:
        envs.reset(seed=[SEED] * NUM_ENVS)
        env.reset(seed=SEED)
        for k in range(5):
            actions = envs.random_action()
            obs = envs.step(actions)[0]
            assert_same(obs, as_numpy(env.step(as_tensors(actions))[0]))
            env.reset_at(k)
            seen = env.reset_at(k + 1, return_observations=True)
            assert_same(envs.reset(env_ids=[k, k + 1])[0], as_numpy(seen))


def trace(seed: Any, device: str, other: bool = False) -> list[bytes]:
    rng = np.random.default_rng(0)
    made = [marlvec.make("vmas/balance", 3, max_episode_steps=9, device=device) for _ in range(1 + other)]
    obs, _ = made[0].reset(seed=seed)
    out = [obs.tobytes()]
    for _ in range(30):
        if other:
            made[1].reset()
        obs, rewards, *_ = made[0].step(rng.uniform(-1, 1, (3, 3, 2)).astype(np.float32))
        out += [obs.tobytes(), rewards.tobytes()]
    for envs in made:
        envs.close()
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_one_seed_settles_all_episodes_whatever_other_pools_do(device: str) -> None:
    first = trace(7, device)
    assert trace(7, device) == first
    assert trace(7, device, other=True) == first
    assert trace(2**64 - 1, device) == trace(2**64 - 1, device) != first
    assert trace(None, device) != trace(None, device)


@pytest.mark.parametrize("device", DEVICES)
def test_global_random_streams_are_left_alone(device: str) -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  # VMAS draws from it
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    on_gpu = None if device == "cpu" else torch.cuda.get_rng_state()
    trace(3, device)
    assert on_gpu is None or (torch.cuda.get_rng_state() == on_gpu).all()
    assert (torch.get_rng_state() == before[0]).all()
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]  # noqa: NPY002


def test_control_calls_reach_the_environment() -> None:
    with marlvec.make("vmas/balance", 3) as envs:
        envs.reset(seed=0)
        assert envs.exec_func(lambda env: (env.index, env.environment.num_envs), [0, 2]) == ((0, 3), (2, 3))


def test_unsupported_arguments_raise() -> None:
    with pytest.raises(UnknownEnvError, match=r"unknown env 'vmas/balanse'\. Did you mean 'vmas/balance'"):
        marlvec.make("vmas/balanse", 2)
    with pytest.raises(ArgumentError, match="backend='sync': VMAS's envs are one simulator"):
        marlvec.make("vmas/balance", 2, backend="sync")
    with pytest.raises(ArgumentError, match=r"pad=True: vmas/simple_tag is a pool.*groups \['adversary', 'agent'\]"):
        marlvec.make("vmas/simple_tag", 2, pad=True)
    with pytest.raises(ArgumentError, match="state=True: expected envs with a global state, and vmas/balance has none"):
        marlvec.make("vmas/balance", 2, state=True)
    with pytest.raises(ArgumentError, match=r"wrappers=\[Narrow\]: vmas/balance is a pool"):
        marlvec.make("vmas/balance", 2, wrappers=type("Narrow", (), {}))
    with pytest.raises(ArgumentError, match=r"expected arguments of the scenario; VMAS reports: .*'n_agent': 3"):
        marlvec.make("vmas/balance", 2, n_agent=3)
    with pytest.raises(ArgumentError, match="dict_spaces=True: marlvec reads"):
        marlvec.make("vmas/balance", 2, dict_spaces=True)
    with marlvec.make("vmas/balance", 2) as envs:
        envs.reset(seed=0)
        with pytest.raises(ArgumentError, match="one random stream for all its envs"):
            envs.reset(seed=1, env_ids=[1])
        with pytest.raises(ArgumentError, match="has no options"):
            envs.reset(options={"level": 1})
        with pytest.raises(ArgumentError, match="steps all its envs at once"):
            envs.send(envs.random_action(env_ids=[0]), [0])


def test_the_order_of_a_request_changes_no_row() -> None:
    """A seed of all envs is env 0's, wherever env 0 stands in the request."""
    check_orders(partial(marlvec.make, "vmas/navigation", 4, n_agents=2, max_steps=7), some=False, states=False)


def test_a_mask_in_infos_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VMAS has no masks: no policy would receive it."""
    monkeypatch.setattr(
        vmas.simulator.scenario.BaseScenario, "info", lambda self, agent: {"action_mask": torch.ones(NUM_ENVS, 5)}
    )
    for continuous in (True, False):
        with marlvec.make("vmas/dispersion", NUM_ENVS, continuous_actions=continuous) as envs:
            envs.reset(seed=0)
            if continuous:
                assert envs.step(envs.random_action())[-1]["__agents__"]["action_mask"][0].shape[-1] == 5
                continue
            with pytest.raises(ContractError, match="info of agent 'agent_0': 'action_mask': expected none in infos"):
                envs.step(envs.random_action())
