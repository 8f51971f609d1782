"""marlvec's connectors in RLlib's pipelines: the numbers of a plain call over the same rows, state that survives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore:::ray", "ignore::DeprecationWarning")

from gymnasium.spaces import Box, Dict, Discrete  # noqa: E402
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode  # noqa: E402

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
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError  # noqa: E402
from marlvec.interop.rllib import RLlibConnector  # noqa: E402
from marlvec.testing import check_connector  # noqa: E402
from tests.interop.rllib_runner import played, runner_of  # noqa: E402
from tests.vector.support.kinds import factories_of  # noqa: E402
from tests.vector.support.reference import assert_same  # noqa: E402

N = 2

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
