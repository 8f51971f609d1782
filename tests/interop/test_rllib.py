"""RLlib's runner and pipelines on marlvec's envs and connectors give the numbers of plain envs and plain calls."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore:::ray", "ignore::DeprecationWarning")

import torch  # noqa: E402
from gymnasium.spaces import Box, Dict, Discrete  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.core.columns import Columns  # noqa: E402
from ray.rllib.core.rl_module.rl_module import RLModuleSpec  # noqa: E402
from ray.rllib.core.rl_module.torch import TorchRLModule  # noqa: E402
from ray.rllib.env.multi_agent_env import MultiAgentEnv  # noqa: E402
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode  # noqa: E402
from ray.rllib.utils.pre_checks.env import check_multiagent_environments  # noqa: E402
from ray.tune.registry import register_env  # noqa: E402

import marlvec  # noqa: E402
from marlvec import env_seeds  # noqa: E402
from marlvec.connectors import (  # noqa: E402
    AgentIndicator,
    AgentPipeline,
    ClipReward,
    FilterRows,
    FlattenObs,
    FrameStack,
    NormalizeObs,
    PrevActions,
    Rows,
)
from marlvec.errors import ActionError, ArgumentError, BusyError, ContractError, UnsupportedSpaceError  # noqa: E402
from marlvec.interop.rllib import RLlibConnector, RLlibEnvRunner, RLlibMultiAgentEnv, RLlibVectorEnv  # noqa: E402
from marlvec.registry import resolve  # noqa: E402
from marlvec.testing import RaisingEnv, check_connector  # noqa: E402
from tests.interop.envs import archers  # noqa: E402
from tests.vector.support.drivers import COMMON, News, driver_of  # noqa: E402
from tests.vector.support.kinds import SCRIPTED, factories_of  # noqa: E402
from tests.vector.support.reference import assert_same, assert_trees_equal  # noqa: E402

# --- an env runner of RLlib's that plays at random, within the masks; and which episode was whose


class MaskedRandom(TorchRLModule):
    """Draws one of n actions; of those allowed, where observations have a mask. It counts how often it was asked."""

    def setup(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.asked = 0

    def _forward(self, batch: Any, **kwargs: Any) -> dict[str, Any]:
        obs = batch[Columns.OBS]
        masked = isinstance(obs, dict) and "action_mask" in obs
        leaf = obs["action_mask"] if masked else next(iter(obs.values())) if isinstance(obs, dict) else obs
        weights = leaf if masked else torch.ones(len(leaf), int(self.action_space.n))
        self.asked += len(leaf)
        return {Columns.ACTIONS: torch.multinomial(weights, 1, generator=self.generator)[:, 0]}


def config_of(
    env: Any,
    env_num: int,
    *,
    modules: Any = ("agent",),
    connector: Any = None,
    seed: int | None = 3,
    **env_config: Any,
) -> PPOConfig:
    """A config of one module for all agents whose names differ by a number, played at random."""

    def module_of(agent_id: str, episode: Any, **kwargs: Any) -> str:
        return agent_id.rpartition("_")[0] or "agent"

    return (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(
            env_runner_cls=RLlibEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=env_num,
            env_to_module_connector=None if connector is None else lambda env, spaces, device: connector(),
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=MaskedRandom))
        .multi_agent(policies=set(modules), policy_mapping_fn=module_of)
        .debugging(seed=seed)
    )


def runner_of(env: Any, env_num: int, **how: Any) -> RLlibEnvRunner:
    """A runner, and under ``begun`` the ids of each env's episodes in order."""
    begun: list[list[str]] = [[] for _ in range(env_num)]

    def note(*, episode: Any, env_index: int, **kwargs: Any) -> None:
        begun[env_index].append(episode.id_)

    config = config_of(env, env_num, **how).callbacks(on_episode_created=note)
    runner = RLlibEnvRunner(config=config, worker_index=0)
    runner.begun = begun
    return runner


def played(runner: RLlibEnvRunner, steps: int, **how: Any) -> list[list[Any]]:
    """Per env its episodes that came to an end within so many steps, whole: chunks put together."""
    found: dict[str, Any] = {}
    for _ in range(2):  # so that episodes are cut, and go on
        for chunk in runner.sample(num_timesteps=steps * runner.num_envs // 2, **how):
            if chunk.id_ in found:
                found[chunk.id_].concat_episode(chunk)
            else:
                found[chunk.id_] = chunk
    return [[found[key] for key in own if key in found and found[key].is_done] for own in runner.begun]


# --- RLlib's runner on marlvec's envs gives the numbers of the plain envs: whole episodes, every agent


N = 2
ROOT = Path(__file__).resolve().parents[2]

Factory = Callable[[], Any]


@contextmanager
def running(env: Any, env_num: int = N, **how: Any) -> Iterator[Any]:
    runner = runner_of(env, env_num, **how)
    try:
        yield runner
    finally:
        runner.stop()


class Life:
    """What one agent's episode must hold, by a plain loop."""

    def __init__(self, first: Any, said: dict[str, Any]) -> None:
        self.obs, self.infos, self.rewards, self.owed, self.ended = [first], [said], [], 0.0, (False, False)
        self.hanging = False

    def step(self, obs: Any, said: dict[str, Any], ended: tuple[bool, bool]) -> None:
        self.obs.append(obs)
        self.infos.append(said)
        self.rewards.append(self.owed)
        self.owed, self.hanging, self.ended = 0.0, False, ended


def lives(driver: Any, news: News, actions_of: Callable[[int, int], Any]) -> tuple[dict[int, Life], News]:
    """Play an episode to its end with each agent's own actions."""

    def said(a: int) -> dict[str, Any]:
        return {**news.infos.get(COMMON, {}), **news.infos.get(driver.names[a], {})}

    found = {a: Life(news.obs[a], said(a)) for a in sorted(news.acting)}
    while news.alive:
        acting = sorted(news.acting)
        for a in acting:
            found[a].hanging = True
        news = driver.step({a: actions_of(a, len(found[a].rewards)) for a in acting})
        for a, reward in news.rewards.items():
            if a in found:
                found[a].owed += reward
        for a in sorted(news.acting | set(news.ended)):
            if a in found and found[a].hanging:
                found[a].step(news.obs.get(a, found[a].obs[-1]), said(a), news.ended.get(a, (False, False)))
            elif a not in found and a not in news.ended:  # RLlib counts what was paid before as nobody's
                found[a] = Life(news.obs[a], said(a))
    return found, news


def check(factories: list[Factory], episodes: list[list[Any]], masked: bool = False) -> tuple[int, int]:
    """Compare whole episodes with those of plain envs; how many there were, and how many of them time cut off."""
    count = cut = 0
    for factory, seed, own in zip(factories, env_seeds(3, len(factories)), episodes, strict=True):
        driver = driver_of(factory())
        news = driver.reset(seed, None)
        for number, episode in enumerate(own):
            if number:
                news = driver.reset(None, None)
            agents = episode.agent_episodes
            found, news = lives(driver, news, lambda a, t, d=driver, own=agents: own[d.names[a]].get_actions(t))
            assert {driver.names[a] for a in found} == set(agents)
            assert episode.is_done
            # One that was cut off in the last step must be told as that; one that ended so before, may be.
            if (False, True) in [found[a].ended for a in news.ended if a in found]:
                assert (episode.is_terminated, episode.is_truncated) == (False, True)
            elif all(life.ended[0] for life in found.values()):
                assert (episode.is_terminated, episode.is_truncated) == (True, False)
            for a, life in found.items():
                mine = agents[driver.names[a]]
                for t, (obs, said) in enumerate(zip(life.obs, life.infos, strict=True)):
                    seen, where = mine.get_observations(t), f"{driver.names[a]}, episode {number}, {t}"
                    assert_trees_equal(seen["observations"] if masked else seen, obs, where)
                    info = mine.get_infos(t)
                    assert_trees_equal({key: info[key] for key in said}, said, where)
                    assert info.keys() - said.keys() <= {"action_mask", "__common__"}
                assert len(mine) == len(life.rewards)
                assert mine.get_rewards().tolist() == life.rewards
                assert mine.is_terminated == life.ended[0], (driver.names[a], number)
                assert mine.is_truncated or life.ended != (False, True)
            count, cut = count + 1, cut + episode.is_truncated
        driver.env.close()
    return count, cut


@pytest.mark.parametrize("kind", ["simple_tag", "archers", "connect_four"])
def test_whole_episodes_are_those_of_the_plain_env(kind: str) -> None:
    factories = {
        "simple_tag": [partial(resolve("simple_tag"), max_cycles=12)] * N,
        "archers": [archers] * N,
        "connect_four": list(factories_of("pettingzoo/classic/connect_four", N)),
    }[kind]
    modules = {"simple_tag": {"adversary", "agent"}, "archers": {"archer", "knight"}, "connect_four": {"player"}}[kind]
    steps = {"simple_tag": 40, "archers": 400, "connect_four": 90}[kind]
    masks = {"action_masks": True} if kind == "connect_four" else {}
    with running(factories[0], modules=modules, marlvec={"backend": "sync", **masks}) as runner:
        count, cut = check(factories, played(runner, steps), masked=bool(masks))
    assert count >= 2 * N
    assert cut == (count if kind == "simple_tag" else 0)


@pytest.mark.parametrize("kind", SCRIPTED)
def test_agents_that_come_and_go_are_those_of_the_plain_env(kind: str) -> None:
    masked = "masked" in kind
    modules = {"player" if kind.startswith("turns") else "agent"}
    with running(factories_of(kind, N), modules=modules, marlvec={"backend": "sync", "action_masks": masked}) as runner:
        count, cut = check(factories_of(kind, N), played(runner, 80, random_actions=not masked), masked=masked)
    assert count >= 4 * N
    assert cut


@pytest.mark.checklist(126)
@pytest.mark.parametrize("kind", ["simple_tag", "connect_four", "parallel", "turns", "keyed"])
def test_one_env_passes_rllibs_own_check_and_plays_as_the_plain_one(kind: str) -> None:
    factory = factories_of("pettingzoo/classic/connect_four" if kind == "connect_four" else kind, 1)[0]
    checked, env = RLlibMultiAgentEnv.make(factory), RLlibMultiAgentEnv.make(factory)
    check_multiagent_environments(checked)
    checked.close()
    driver = driver_of(factory())
    for seed in (5, 6):
        news = driver.reset(seed, None)
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            assert_trees_equal(obs, {driver.names[a]: news.obs[a] for a in news.acting | set(news.ended)}, kind)
            actions = {driver.names[a]: env.get_action_space(driver.names[a]).sample() for a in sorted(news.acting)}
            news = driver.step({driver.names.index(name): action for name, action in actions.items()})
            obs, rewards, terminateds, truncateds, _ = env.step(actions)
            assert env.agents == [driver.names[a] for a in sorted(news.alive)]
            over = terminateds["__all__"] or truncateds["__all__"]
            assert over == (not news.alive)
            if kind in ("simple_tag", "connect_four"):  # others may tell ends late
                assert rewards == {driver.names[a]: reward for a, reward in news.rewards.items()}
    driver.env.close()
    env.close()


def test_time_that_is_up_is_bootstrapped_and_an_end_is_not() -> None:
    """The trap: if each agent says it was truncated, RLlib says the episode has terminated."""
    envs = RLlibVectorEnv(marlvec.make("simple_tag", 2, backend="sync", autoreset_mode="next_step", max_cycles=3))
    obs, _ = envs.reset(seed=0)
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations=obs[0])
    for _ in range(3):
        actions = [{name: np.int64(1) for name in own} for own in obs]
        obs, rewards, terminateds, truncateds, infos = envs.step(actions)
        episode.add_env_step(
            obs[0], actions[0], rewards[0], infos[0], terminateds=terminateds[0], truncateds=truncateds[0]
        )
    assert truncateds[0] == {**dict.fromkeys(envs.envs[0].possible_agents, False), "__all__": True}
    assert (episode.is_terminated, episode.is_truncated) == (False, True)
    assert all(own.is_truncated and not own.is_terminated for own in episode.agent_episodes.values())
    # The next call begins the next episode, whatever the actions.
    obs, rewards, terminateds, truncateds, _ = envs.step([{}, {}])
    assert set(obs[0]) == set(envs.envs[0].possible_agents)
    assert (rewards[0], terminateds[0], truncateds[0]) == ({}, {"__all__": False}, {"__all__": False})
    envs.close()


def test_an_episode_lost_to_a_fault_is_cut_off_at_what_was_seen_last() -> None:
    how = {"backend": "sync", "autoreset_mode": "next_step", "on_fault": "restart"}
    envs = RLlibVectorEnv(marlvec.make([partial(RaisingEnv, at=2)] * 2, **how))
    obs, _ = envs.reset(seed=0)
    for _ in range(20):
        before = obs
        obs, rewards, terminateds, truncateds, infos = envs.step(
            [{name: envs.single_action_spaces[name].sample() for name in own} for own in obs]
        )
        if truncateds[0]["__all__"]:
            break
    assert truncateds[0]["__all__"]
    assert not terminateds[0]["__all__"]
    assert infos[0]
    for name, info in infos[0].items():
        assert info["fault"] is True
        assert_trees_equal(obs[0][name], before[0][name], name)
        assert rewards[0][name] == 0
    envs.close()


def test_seeds_and_env_configs_reach_the_envs() -> None:
    seen = []
    for seed in (3, 3, 4):
        with running("simple_spread", seed=seed, N=2, marlvec={"backend": "sync", "max_episode_steps": 4}) as runner:
            (first, second) = runner.sample(num_episodes=2, random_actions=True)
        seen.append([episode.get_observations(0)["agent_0"] for episode in (first, second)])
        assert (len(first), first.is_truncated, set(first.agent_ids)) == (4, True, {"agent_0", "agent_1"})
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    assert not np.array_equal(*seen[0])


class Counter(MultiAgentEnv):
    """One agent that sees how many steps were made."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = ["agent_0"]
        self.observation_spaces, self.action_spaces = (
            {"agent_0": Box(0, 99, (1,), np.float32)},
            {"agent_0": Discrete(2)},
        )
        self.length, self.count = (config or {}).get("length", 3), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return {"agent_0": np.zeros(1, np.float32)}, {}

    def step(self, action_dict: Any) -> Any:
        self.count += 1
        over = self.count == self.length
        return (
            {"agent_0": np.full(1, self.count, np.float32)},
            {"agent_0": 1.0},
            {"__all__": over},
            {"__all__": False},
            {},
        )


@pytest.mark.parametrize("registered", [False, True])
def test_envs_of_rllibs_own_kind_are_built_from_the_env_config(registered: bool) -> None:
    if registered:
        register_env("marlvec-counter", Counter)
    with running("marlvec-counter" if registered else Counter, length=5, marlvec={"backend": "sync"}) as runner:
        for episode in runner.sample(num_episodes=3, random_actions=True):
            assert episode.get_observations()["agent_0"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
            assert episode.is_terminated


def test_masks_stand_in_the_infos_unless_observations_have_them() -> None:
    env = RLlibMultiAgentEnv.make("pettingzoo/classic/connect_four")
    obs, infos = env.reset(seed=0)
    assert obs["player_0"].shape == (6, 7, 2)
    assert infos["player_0"]["action_mask"].tolist() == [1] * 7
    env.close()
    env = RLlibMultiAgentEnv.make("pettingzoo/classic/connect_four", action_masks=True)
    obs, infos = env.reset(seed=0)
    assert env.get_observation_space("player_0").contains(obs["player_0"])
    assert "action_mask" not in infos["player_0"]
    env.close()


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ArgumentError, match="next_step.*got autoreset_mode='same_step'"):
        RLlibVectorEnv(marlvec.make("simple_spread", 1, backend="sync"))
    with pytest.raises(ArgumentError, match="num_envs=1"):
        RLlibMultiAgentEnv(marlvec.make("simple_spread", 2, backend="sync"))
    with pytest.raises(ArgumentError, match=r"env_config\['marlvec'\].*num_envs"):
        runner_of("simple_spread", 2, marlvec={"num_envs": 3})
    envs = RLlibVectorEnv(marlvec.make("simple_spread", 2, backend="sync", autoreset_mode="next_step"))
    envs.reset()
    good = dict.fromkeys(("agent_0", "agent_1", "agent_2"), 0)
    for bad, words in [
        ([good], "one dict per env, 2"),
        ([good, {"agent_0": 0}], "actions of env 1: expected one for each agent that must act"),
        ([good, {**good, "bob": 1}], "env 1: no agent 'bob'"),
        ([good, {**good, "agent_2": np.zeros(2)}], "env 1, agent 'agent_2': expected shape"),
        ([good, {**good, "agent_2": 9}], "9"),
    ]:
        with pytest.raises(ActionError, match=words):
            envs.step(bad)
    with pytest.raises(BusyError, match="env 1"):
        envs.envs[1].step({})
    envs.close()


@pytest.mark.time_limit(400)
def test_the_example_trains_two_iterations(tmp_path: Path) -> None:
    """In a process of its own, since RLlib's algorithms start Ray."""
    script = ROOT / "examples" / "rllib_ppo_spread.py"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, str(script), "--total-timesteps", "480", "--batch", "240", "--num-envs", "8"]
    run += ["--checkpoint", str(tmp_path / "kept")]
    result = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "480 env steps" in result.stdout
    assert re.search(r"mean return per agent: random -\d+\.\d, after \d+ env steps -\d+\.\d", result.stdout)


# --- marlvec's connectors in RLlib's pipelines: the numbers of a plain call over the same rows, state that survives


Pipe = Callable[[], AgentPipeline]


def pieces() -> AgentPipeline:
    return AgentPipeline(
        [FlattenObs(), FrameStack(3), PrevActions(2, into_obs=True), NormalizeObs(update=False), AgentIndicator()]
    )


def expected(pipeline: AgentPipeline, agent_index: int, raw: Any, actions: Any) -> list[Any]:
    """One agent's episode through a pipeline of its own, row by row."""
    seen = []
    one = np.array([0])
    for t, obs in enumerate(raw):
        where = {"env_id": one, "agent_index": np.array([agent_index])}
        if t:
            pipeline.on_policy_output(Rows({**where, "actions": actions[t - 1 : t]}))
        last = np.array([t == len(raw) - 1])
        rows = Rows({**where, "obs": np.asarray(obs)[None], "rewards": np.zeros(1), "first": one == t, "last": last})
        seen.append(pipeline(rows).obs[0])
    return seen


@pytest.mark.parametrize("kind", ["simple_tag", "parallel", "turns", "keyed, no last obs"])
def test_observations_are_those_of_the_plain_pipeline_and_every_one_passes_once(kind: str) -> None:
    """The same random actions with and without: RLlib draws them from the spaces, which are seeded alike."""
    seen = []
    modules = {"simple_tag": {"adversary", "agent"}}.get(kind, {"player" if kind.startswith("turns") else "agent"})
    for connector in (None, lambda: RLlibConnector(pieces())):
        runner = runner_of(factories_of(kind, N), N, modules=modules, connector=connector, marlvec={"backend": "sync"})
        spaces = runner.env.single_action_spaces
        for number, space in enumerate(spaces.values()):
            space.seed(number)
        seen.append((played(runner, 80, random_actions=True), runner))
    (raw, plain), (made, runner) = seen
    count = 0
    for before, after in zip(raw, made, strict=True):
        assert len(before) == len(after) >= 2
        for one, other in zip(before, after, strict=True):
            for agent, own in one.agent_episodes.items():
                space, action_space = plain.env.single_observation_space[agent], plain.env.single_action_spaces[agent]
                pipeline = pieces()
                agents = list(plain.env.single_observation_space)
                pipeline.bind(space, agents, action_space)
                want = expected(pipeline, agents.index(agent), own.get_observations(), own.get_actions())
                got = other.agent_episodes[agent].get_observations()
                np.testing.assert_array_equal(own.get_actions(), other.agent_episodes[agent].get_actions())
                assert_same(np.asarray(got), np.stack(want), f"{kind}, {agent}")
                assert runner._env_to_module.observation_space is not None
                count += len(want)
    assert count > 100
    out = runner.config.build_env_to_module_connector(runner.env)
    agent = next(iter(plain.env.single_observation_space))
    assert out.connectors[0].observation_space[agent] == pipeline_space(plain, agent)
    plain.stop()
    runner.stop()


def pipeline_space(runner: Any, agent: str) -> Any:
    pipeline = pieces()
    names = list(runner.env.single_observation_space)
    pipeline.bind(runner.env.single_observation_space[agent], names, runner.env.single_action_spaces[agent])
    return pipeline.output_space_


SPACES = Dict({"a_0": Box(-9, 9, (2,), np.float32), "a_1": Box(-9, 9, (2,), np.float32)})
ACTIONS = Dict({"a_0": Discrete(3), "a_1": Discrete(3)})


def connected(*pieces: Any, spaces: Any = SPACES) -> RLlibConnector:
    return RLlibConnector(AgentPipeline(pieces), spaces, ACTIONS)


def episode_of(*obs: tuple[float, ...]) -> MultiAgentEpisode:
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent, episode: "m")
    episode.add_env_reset(observations=seen_by_both(obs[0]))
    for values in obs[1:]:
        step(episode, values)
    return episode


def seen_by_both(values: tuple[float, ...]) -> dict[str, Any]:
    return {"a_0": np.array(values, np.float32), "a_1": -np.array(values, np.float32)}


def step(episode: MultiAgentEpisode, values: tuple[float, ...], reward: float = 1.0, over: bool = False) -> None:
    both = ("a_0", "a_1")
    episode.add_env_step(
        seen_by_both(values), dict.fromkeys(both, 1), dict.fromkeys(both, reward), terminateds={"__all__": over}
    )


def call(connector: RLlibConnector, *episodes: Any, explore: bool = True) -> None:
    assert connector(rl_module=None, batch={"x": 1}, episodes=list(episodes), explore=explore) == {"x": 1}


def newest(episode: MultiAgentEpisode) -> list[float]:
    return [float(x) for x in episode.agent_episodes["a_0"].get_observations(-1)]


def test_running_episodes_keep_their_history_whoever_else_comes_and_goes() -> None:
    connector = connected(FrameStack(2))
    one, two = episode_of((1, 1)), episode_of((2, 2))
    call(connector, one, two)
    step(one, (3, 3), over=True)
    step(two, (4, 4))
    call(connector, one)  # RLlib shows those that are done by themselves, and then all that run
    assert newest(one) == [1, 1, 3, 3]
    fresh = episode_of((5, 5))
    call(connector, fresh, two)
    assert (newest(fresh), newest(two)) == ([0, 0, 5, 5], [2, 2, 4, 4])
    assert len(connector._slots) == 2
    # Episodes that RLlib drops, as it does when it resets all envs, leave nothing behind.
    for number in range(20):
        call(connector, *(dropped := [episode_of((number, 1)), episode_of((number, 2))]))
        assert newest(dropped[0]) == [0, 0, number, 1]
    assert len(connector._slots) == 2
    # A chunk that was cut off goes on.
    cut = dropped[0].cut(len_lookback_buffer=1)
    step(cut, (7, 7))
    call(connector, cut)
    assert newest(cut) == [19, 1, 7, 7]


def test_what_was_learnt_survives_and_what_belongs_to_episodes_stays() -> None:
    connector = connected(NormalizeObs(), FrameStack(2))
    first = episode_of((1, 3))
    call(connector, first)
    step(first, (2, 5))
    call(connector, first)
    state = pickle.loads(pickle.dumps(connector.get_state()))
    other = connected(NormalizeObs(), FrameStack(2))
    mine = episode_of((8, 8))
    call(other, mine)
    other.set_state(state)
    step(mine, (1, 1))
    call(other, mine, explore=False)
    (group,) = other._groups
    moments = group.pipeline["NormalizeObs"]
    assert moments.counts.tolist() == [4]  # of the other's, and none since: it did not explore
    np.testing.assert_allclose(newest(mine)[2:], [(1 - 0) / np.sqrt(2.5 + 1e-8), 1 / np.sqrt(17 + 1e-8)], rtol=1e-6)
    np.testing.assert_allclose(newest(mine)[:2], [1, 1])  # its own first frame, by what was learnt then
    call(other, episode_of((1, 1)))
    assert moments.counts.tolist() == [6]
    other.reset_state()
    call(other, episode_of((1, 1)))
    assert other._groups[0].pipeline["NormalizeObs"].counts.tolist() == [2]


@pytest.mark.parametrize("rounds", [1, 3])
def test_runners_that_learnt_apart_agree_once_merged(rounds: int) -> None:
    copies, alone = [connected(NormalizeObs()) for _ in range(2)], connected(NormalizeObs())
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for copy in copies:
            values = tuple(rng.normal(size=2))
            call(copy, episode_of(values))
            call(alone, episode_of(values))
        merged = copies[0].merge_states([copy.get_state() for copy in copies])
        for copy in copies:
            copy.set_state(pickle.loads(pickle.dumps(merged)))
    for copy in copies:
        probe, mine = episode_of((0.3, -2)), episode_of((0.3, -2))
        call(copy, probe, explore=False)
        call(alone, mine, explore=False)
        np.testing.assert_allclose(newest(probe), newest(mine), rtol=1e-5)
        assert copy._groups[0].pipeline["NormalizeObs"].counts.tolist() == [4 * rounds]


def test_check_connector_is_for_the_pipeline_that_it_carries() -> None:
    """RLlib has its own way of merging: nothing is collected between `get_state` and `set_state` there."""
    check_connector(
        lambda: AgentPipeline([FlattenObs(), FrameStack(2), NormalizeObs()]),
        SPACES["a_0"],
        action_space=ACTIONS["a_0"],
    )
    with pytest.raises(ArgumentError, match=r"expected a connector, or a function without arguments .*RLlibConnector"):
        check_connector(connected(FrameStack(2), NormalizeObs()))  # type: ignore[arg-type]  # on purpose


def test_only_observations_pass_where_there_are_masks() -> None:
    masked = {
        name: Dict({"observations": space, "action_mask": Box(0, 1, (3,), np.float32)})
        for name, space in SPACES.items()
    }
    connector = connected(FrameStack(2), spaces=Dict(masked))
    assert connector.observation_space["a_0"]["observations"].shape == (4,)
    mask = np.array([1, 0, 1], np.float32)
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent, episode: "m")
    episode.add_env_reset(observations={"a_0": {"observations": np.ones(2, np.float32), "action_mask": mask}})
    call(connector, episode)
    obs = episode.agent_episodes["a_0"].get_observations(-1)
    assert connector.observation_space["a_0"].contains(obs)
    assert (obs["observations"].tolist(), obs["action_mask"].tolist()) == ([0, 0, 1, 1], [1, 0, 1])


def test_rewards_that_a_piece_changes_are_changed_in_the_episode() -> None:
    connector = connected(ClipReward(limit=1))
    episode = episode_of((1, 1))
    call(connector, episode)
    step(episode, (1, 2), reward=5.0)
    call(connector, episode)
    assert [own.get_rewards(-1) for own in episode.agent_episodes.values()] == [1.0, 1.0]


def test_mismatches_raise() -> None:
    with pytest.raises(ArgumentError, match="AgentPipeline"):
        RLlibConnector(FrameStack(2))
    with pytest.raises(ArgumentError, match="as many rows"):
        RLlibConnector(AgentPipeline([FilterRows(lambda rows: rows.t >= 0, noop=0)]))
    with pytest.raises(ArgumentError, match="Dict space"):
        RLlibConnector(AgentPipeline([FrameStack(2)]), Box(0, 1, (2,)), Discrete(2))
    with pytest.raises(UnsupportedSpaceError, match="FrameStack"):
        connected(FrameStack(2, axis=3))
    with pytest.raises(ContractError, match="prev_actions.*into_obs"):
        call(connected(PrevActions()), episode_of((1, 1)))
    with pytest.raises(ArgumentError, match="state of 1 pipelines"):
        connected(NormalizeObs()).set_state({"groups": []})
