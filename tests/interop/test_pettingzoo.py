"""The PettingZoo views of one env, parallel and AEC, give what the raw env gives, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.utils.conversions import parallel_to_aec

import marlvec
from marlvec import SyncVectorEnv
from marlvec.errors import ActionError, ArgumentError, ClosedError, EnvRaised, NotResetError
from marlvec.interop.pettingzoo import AECView, ParallelView
from marlvec.registry import resolve
from marlvec.testing import KeyedEnv, RaisingEnv, SampledEnv, Script, ScriptedParallelEnv, TurnEnv
from tests.interop.envs import (
    SPACES,
    CountEnv,
    api_test,
    max_cycles_test,
    parallel_api_test,
    parallel_seed_test,
    render_test,
    seed_test,
    state_test,
)
from tests.vector.support.kinds import SCRIPTED, factories_of
from tests.vector.support.reference import Frame, flatten, pick, record

# --- the PettingZoo view of one env gives what the raw env gives, to the last bit


# Everyone is born and ends, as PettingZoo's checker wants it.
COMING_AND_GOING = [
    Script([0, 0, 0], [3, 7, 5], ["terminated", "truncated", "both"]),
    Script([0, 2, 4], [6, 5, 9], ["truncated", "terminated", "terminated"]),
]
scripted = partial(ScriptedParallelEnv, COMING_AND_GOING)

ENVS: dict[str, Callable[[], ParallelView]] = {
    "spread": partial(ParallelView.make, "simple_spread"),
    "tag": partial(ParallelView.make, "simple_tag"),
    "rps": partial(ParallelView.make, "pettingzoo/classic/rps"),
    "tictactoe": partial(ParallelView.make, "pettingzoo/classic/tictactoe"),
    "archers": partial(
        ParallelView.make,
        "pettingzoo/butterfly/knights_archers_zombies",
        spawn_delay=2,
        max_zombies=30,
        line_death=True,
    ),
    "early deaths, late births": partial(ParallelView.make, scripted),
    "masked": partial(ParallelView.make, partial(scripted, masked=True)),
    "in a worker": partial(ParallelView.make, scripted, backend="async"),
    "turns": partial(ParallelView.make, partial(TurnEnv, COMING_AND_GOING, agent_num=3)),
    "turns, masked": partial(ParallelView.make, partial(TurnEnv, COMING_AND_GOING, agent_num=3, masked=True)),
    "one agent": partial(ParallelView.make, "CartPole-v1"),
}


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.checklist(127)
@pytest.mark.parametrize("name", ENVS)
def test_the_parallel_api_test_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    view = ENVS[name]()
    parallel_api_test(view, 300)
    assert view.agents == [] or name == "spread"
    view.close()
    assert capsys.readouterr().out == "Passed Parallel API test\n"


# PettingZoo's seed test samples without masks, and scripted envs take no masked action.
@pytest.mark.parametrize("name", [name for name in ENVS if "masked" not in name])
def test_the_parallel_seed_test_passes(name: str) -> None:
    parallel_seed_test(ENVS[name], 30)  # closes what it makes


# The AEC checker wants arrays as observations, so neither numbers (rps) nor dicts (masks).
@pytest.mark.parametrize("name", ["spread", "tag", "archers"])
def test_the_aec_test_passes_over_pettingzoos_own_conversion(name: str) -> None:
    env = parallel_to_aec(ENVS[name]())
    api_test(env, 60)
    env.close()


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@pytest.mark.parametrize("name", ["spread", "tag", "rps", "archers", "one agent"])
def test_the_seed_test_passes_over_pettingzoos_own_conversion(name: str) -> None:
    seed_test(lambda: parallel_to_aec(ENVS[name]()), 30)


def test_max_cycles_are_kept() -> None:
    made: list[ParallelView] = []

    def parallel_env(max_cycles: int) -> ParallelView:
        made.append(ParallelView.make("simple_spread", max_cycles=max_cycles))
        return made[-1]

    env = SimpleNamespace(parallel_env=parallel_env, env=lambda max_cycles: parallel_to_aec(parallel_env(max_cycles)))
    max_cycles_test(env)
    for view in made:
        view.close()


def test_the_state_test_passes() -> None:
    views = [ParallelView.make("simple_spread") for _ in range(2)]
    state_test(parallel_to_aec(views[0]), views[1])
    for view in views:
        view.close()


@pytest.mark.slow("steps or trains with another library")
def test_the_render_test_passes() -> None:
    made: list[ParallelView] = []

    def env(render_mode: str) -> Any:
        made.append(ParallelView.make("simple_spread", render_mode=render_mode))
        assert made[-1].render_mode == render_mode
        return parallel_to_aec(made[-1])

    render_test(env)
    assert len(made) == 3
    for view in made:
        view.close()


# --- traces


def check_trace(make_env: Callable[[], Any], view: ParallelView, *, seed: int = 3, episodes: int = 3) -> int:
    """Make the calls that a plain loop over the raw env has recorded on a view, whole episodes; how many steps."""
    names, groups = view.possible_agents, view.envs.spec.groups
    places = {a: (g, j) for g, group in enumerate(groups) for j, a in enumerate(group.agents)}
    steps, alive, acted = 0, np.zeros(len(names), bool), np.zeros(len(names), bool)

    def check(frame: Frame, here: list[int], obs: dict[str, Any], infos: dict[str, Any]) -> None:
        assert list(obs) == list(infos) == [names[a] for a in here]
        for a in here:
            name, (g, j), seen, mask = names[a], places[a], obs[names[a]], frame.masks[places[a][0]]
            if mask is not None:
                assert seen.keys() == {"observation", "action_mask"}
                assert seen["action_mask"].dtype == np.int8
                assert seen["action_mask"].tolist() == mask[0, j].astype(int).tolist()
                seen = seen["observation"]
            leaves = [np.asarray(leaf) for leaf in flatten(seen)]
            for mine, leaf in zip(leaves, frame.obs[g], strict=True):
                assert mine.tobytes() == np.asarray(leaf[0, j], mine.dtype).tobytes()
            # Zeros are what an agent sees that waits for its first turn.
            assert groups[g].observation_space.contains(seen) or not any(leaf.any() for leaf in leaves)
            told = {**frame.infos[0].get("__common__", {}), **frame.infos[0].get(name, {})}
            told["acting"] = bool(frame.flags["acting"][0, a])
            assert repr(sorted(infos[name].items())) == repr(sorted(told.items()))

    for call in record([make_env], "disabled", seed=seed, episodes=episodes):
        frame = call.expected
        flags = {name: flag[0] for name, flag in frame.flags.items()}
        ended = flags["terminated"] | flags["truncated"]
        if call.kind == "reset":
            obs, infos = view.reset(seed=call.seed[0] if call.env_ids else marlvec.env_seeds(call.seed, 1)[0])
            here = np.flatnonzero(flags["alive"]).tolist()
        else:
            acting = np.flatnonzero(acted).tolist()
            told = {
                names[a]: pick(groups[g].action_space, call.actions[g], 0, j) for a in acting for g, j in [places[a]]
            }
            if steps % 2:  # who waits, or is gone, may say anything
                told = {name: told.get(name) for name in reversed(names)}
            obs, rewards, terminated, truncated, infos = view.step(told)
            here = np.flatnonzero(alive | flags["alive"] | ended).tolist()
            assert rewards == {names[a]: frame.rewards[0, a] for a in here}
            for got, name in ((terminated, "terminated"), (truncated, "truncated")):
                assert got == {names[a]: bool(flags[name][a]) for a in here}
                assert all(type(flag) is bool for flag in got.values())
            steps += 1
        check(frame, here, obs, infos)
        alive, acted = flags["alive"], flags["acting"]
        assert view.agents == list(view.envs.agents_at(0)) == [names[a] for a in np.flatnonzero(alive)]
        if not alive.any():
            with pytest.raises(NotResetError):
                view.step({})
    view.close()
    return steps


REAL = {
    "spread": ("simple_spread", {"max_cycles": 9}),
    "tag": ("simple_tag", {"max_cycles": 9}),
    "rps": ("pettingzoo/classic/rps", {"max_cycles": 6}),
    "tictactoe": ("pettingzoo/classic/tictactoe", {}),
    "archers": (
        "pettingzoo/butterfly/knights_archers_zombies",
        {"spawn_delay": 2, "max_zombies": 30, "line_death": True, "max_cycles": 90},
    ),
    "one agent": ("CartPole-v1", {}),
}


@pytest.mark.mostly_slow("steps or trains with another library", quick=5)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("name", REAL)
def test_a_real_env_says_what_it_says_without_the_view(name: str, backend: str) -> None:
    env_id, kwargs = REAL[name]
    (factory,) = factories_of(env_id, 1)
    steps = check_trace(partial(factory, **kwargs), ParallelView.make(env_id, backend=backend, **kwargs))
    assert steps >= 15


@pytest.mark.parametrize("kind", [*SCRIPTED, "single"])
def test_a_scripted_env_says_what_it_says_without_the_view(kind: str) -> None:
    """Births, deaths, turns, masks and infos of every kind."""
    (factory,) = factories_of(kind, 1)
    check_trace(factory, ParallelView.make(factory), episodes=6)


@settings(max_examples=40)
@given(
    agent_num=st.integers(1, 4),
    longest=st.integers(1, 9),
    kind=st.sampled_from(sorted(SCRIPTED)),
    seed=st.integers(0, 2**32),
)
def test_any_script(agent_num: int, longest: int, kind: str, seed: int) -> None:
    (factory,) = factories_of(kind, 1, agent_num=agent_num, longest=longest)
    check_trace(factory, ParallelView.make(factory), seed=seed)


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@pytest.mark.parametrize("space", SPACES)
def test_any_space(space: str) -> None:
    """Observations and actions of every kind, two groups of agents."""
    kind = partial(SampledEnv, [SPACES[space], SPACES[space], Box(0, 1, (2,))], [SPACES[space]] * 3, agent_num=3)
    assert check_trace(kind, ParallelView.make(kind)) == 15


def test_views_of_shared_rows_stay_what_they_were() -> None:
    """What the view hands out is the caller's, though the vectorizer copies nothing."""
    view = ParallelView.make(scripted, copy=False)
    obs, _ = view.reset(seed=0)
    before = {agent: value.copy() for agent, value in obs.items()}
    view.step(dict.fromkeys(view.agents, 1))
    assert all((obs[agent] == before[agent]).all() for agent in before)
    view.close()


# --- what it adds, and what it refuses


def test_spaces_are_the_same_object_each_time_and_each_agents_own() -> None:
    view = ParallelView.make(partial(scripted, masked=True))
    for kind in (view.observation_space, view.action_space):
        found = [kind(agent) for agent in view.possible_agents]
        assert all(kind(agent) is space for agent, space in zip(view.possible_agents, found, strict=True))
        assert len({id(space) for space in found}) == 3
    assert list(view.observation_space("agent_0").spaces) == ["action_mask", "observation"]
    assert view.observation_space("agent_0")["action_mask"] == Box(0, 1, (5,), np.int8)
    with pytest.raises(ArgumentError, match=r"no agent 'nobody'; the agents are \['agent_0', 'agent_1', 'agent_2'\]"):
        view.action_space("nobody")
    obs, _ = view.reset(seed=0)
    assert all(view.observation_space(agent).contains(obs[agent]) for agent in view.agents)
    view.close()


class Talker(ScriptedParallelEnv):
    """Says the same words at both levels."""

    def step(self, actions: dict[str, Any]) -> Any:
        *rest, infos = super().step(actions)
        infos = {agent: {"acting": "hard", "shared": 1} for agent in infos}
        return *rest, {**infos, "__common__": {"shared": 7, "acting": 8, "elsewhere": 9}}


def test_no_word_of_the_env_is_lost() -> None:
    view = ParallelView.make(partial(Talker, [Script.together(2, 3)], agent_num=2))
    view.reset()
    infos = view.step({"agent_0": 0, "agent_1": 0})[4]
    expected = {
        "elsewhere": 9,
        "shared": 1,
        "acting": True,
        "__common__": {"shared": 7, "acting": 8},
        "__agents__": {"acting": "hard"},
    }
    assert infos == {"agent_0": expected, "agent_1": expected}
    view.close()


def test_the_state_is_the_envs_to_the_very_end() -> None:
    """After the last step only where each step brings it: an env that is over is not asked."""
    kind = partial(ScriptedParallelEnv, [Script.together(2, 2)], agent_num=2, state=True)
    brought = ParallelView(SyncVectorEnv([kind], autoreset_mode="disabled", state=True))
    asked, without = ParallelView.make(kind), ParallelView.make(scripted)
    for view in (brought, asked):
        assert view.state_space.shape == (6,)
        view.reset(seed=0)
        for step in (1, 2):
            assert view.state()[2:4].tolist() == [0, step - 1], "episode and step"
            view.step({"agent_0": 1, "agent_1": 2})
    assert brought.state()[2:4].tolist() == [0, 2]
    with pytest.raises(NotResetError):
        asked.state()
    assert not hasattr(without, "state_space")
    with pytest.raises(ArgumentError, match="has no global state"):
        without.state()
    for view in (brought, asked, without):
        view.close()


def test_it_shows_and_closes_the_env() -> None:
    view = ParallelView.make(partial(CountEnv, 2, render_mode="ansi"))
    assert (view.render_mode, str(view), view.max_num_agents, view.num_agents) == ("ansi", "count", 1, 0)
    assert view.metadata == {"name": "count", "render_modes": ["rgb_array", "ansi"], "render_fps": 7}
    assert view.unwrapped is view
    view.reset()
    assert view.render() == "count 0"
    view.close()
    view.close()
    with pytest.raises(ClosedError):
        view.reset()


def test_seed_and_options_reach_the_env_as_they_are() -> None:
    view = ParallelView.make(CountEnv)
    view.reset(seed=11, options={"level": 3})
    view.reset()
    assert view.envs.get_attr("heard") == ([(11, {"level": 3}), (None, None)],)
    with pytest.raises(ArgumentError, match="seed"):
        view.reset(seed=-1)
    view.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 2, "autoreset_mode": "disabled"}, "got num_envs=2 and autoreset_mode='disabled'"),
        ({"num_envs": 1}, "got num_envs=1 and autoreset_mode='same_step'"),
        ({"num_envs": 1, "autoreset_mode": "next_step"}, "expected num_envs=1 and autoreset_mode='disabled'"),
    ],
)
def test_it_must_drive_its_env_alone(options: dict[str, Any], message: str) -> None:
    with marlvec.make(scripted, backend="sync", **options) as envs, pytest.raises(ArgumentError, match=message):
        ParallelView(envs)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"agent_0": 0, "agent_1": 0}, r"must act, \['agent_0', 'agent_1', 'agent_2'\]; missing are \['agent_2'\]"),
        ({}, "missing are"),
        ({"agent_0": 0, "agent_1": 0, "agent_2": 0, "nobody": 0}, "no agent 'nobody'"),
        ({"agent_0": 0, "agent_1": 5, "agent_2": 0}, r"agent 'agent_1': 5 is not in Discrete\(5\)"),
        ({"agent_0": 0, "agent_1": 0.5, "agent_2": 0}, "expected dtype int64, got float64"),
        ({"agent_0": 0, "agent_1": [1, 2], "agent_2": 0}, r"agent 'agent_1': expected shape \(\), got \(2,\)"),
        ({"agent_0": 0, "agent_1": None, "agent_2": 0}, "expected dtype int64, got object"),
    ],
)
@pytest.mark.fault("E1")
@pytest.mark.fault("E2")
def test_wrong_actions_are_refused_before_anything_is_sent(actions: dict[str, Any], message: str) -> None:
    view = ParallelView.make(partial(ScriptedParallelEnv, [Script.together(3, 4)]))
    view.reset()
    with pytest.raises(ActionError, match=message):
        view.step(actions)
    assert view.step(dict.fromkeys(view.agents, 1))[0]["agent_0"][3] == 1, "the first step"
    view.close()


def test_wrong_trees_of_actions_are_refused() -> None:
    view = ParallelView.make(partial(SampledEnv, SPACES["box"], SPACES["dict"], agent_num=2))
    view.reset()
    action = view.action_space("agent_0").sample()
    with pytest.raises(ActionError, match=r"action of agent 'agent_1': expected a dict with keys \['what', 'where'\]"):
        view.step({"agent_0": action, "agent_1": 3})
    with pytest.raises(ActionError, match=r"agent 'agent_1', leaf 'where': expected shape \(2,\), got \(3,\)"):
        view.step({"agent_0": action, "agent_1": {**action, "where": np.zeros(3, int)}})
    view.step({"agent_0": action, "agent_1": action})
    view.close()


def test_an_env_that_raises_is_named_and_can_be_reset() -> None:
    view = ParallelView.make(partial(RaisingEnv, at=2))
    view.reset(seed=0)
    with pytest.raises(EnvRaised, match="env 0 raised in step"):
        for _ in range(3):
            view.step(dict.fromkeys(view.agents, 0))
    view.reset(seed=0)
    view.close()


def test_make_closes_unsupported_envs() -> None:
    class Narrow(ParallelView):
        def __init__(self, envs: Any) -> None:
            super().__init__(envs)
            raise RuntimeError("no view today")

    closed: list[bool] = []

    class Noting(CountEnv):
        def close(self) -> None:
            closed.append(True)

    with pytest.raises(RuntimeError, match="no view today"):
        Narrow.make(Noting)
    assert closed == [True]


def test_a_gymnasium_env_is_a_game_of_one() -> None:
    view = ParallelView.make("CartPole-v1")
    with gymnasium.make("CartPole-v1") as env:
        expected, _ = env.reset(seed=4)
        obs, infos = view.reset(seed=4)
        assert obs["agent_0"].tobytes() == expected.tobytes()
        assert infos == {"agent_0": {"acting": True}}
        assert view.action_space("agent_0") == Discrete(2)
    view.close()


# --- the AEC view of one env: PettingZoo's checkers, and the raw env's own numbers in the raw env's own order


ARCHERS = {"spawn_delay": 2, "max_zombies": 30, "line_death": True, "max_cycles": 60}
AEC_ENVS: dict[str, Callable[[], AECView]] = {
    "spread": partial(AECView.make, "simple_spread"),
    "tag": partial(AECView.make, "simple_tag"),
    "connect four": partial(AECView.make, "pettingzoo/classic/connect_four"),
    "tictactoe": partial(AECView.make, "pettingzoo/classic/tictactoe"),
    "archers": partial(AECView.make, "pettingzoo/butterfly/knights_archers_zombies", **ARCHERS),
}


@pytest.mark.checklist(127)
@pytest.mark.filterwarnings("ignore:Observation numpy array is all zeros")  # boards begin empty
@pytest.mark.parametrize("name", AEC_ENVS)
def test_the_api_test_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    view = AEC_ENVS[name]()
    api_test(view, 60)
    view.close()
    assert capsys.readouterr().out == "Starting API test\nPassed API test\n"


@pytest.mark.parametrize("name", ["spread", "tag", "archers"])
def test_the_seed_test_passes(name: str) -> None:
    seed_test(AEC_ENVS[name], 30)


def test_state_and_pictures_are_the_envs_own() -> None:
    view = AECView.make("simple_spread", render_mode="rgb_array")
    view.reset(seed=1)
    assert view.state_space.contains(view.state())
    assert view.render().ndim == 3
    assert view.render_mode == "rgb_array"
    view.close()


def play(env: Any, seed: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """A whole game: whose turn it was and what was told, and what was told to those who had ended."""
    rng = np.random.default_rng(seed)
    turns: list[tuple[Any, ...]] = []
    ends: list[tuple[Any, ...]] = []
    env.reset(seed=seed)
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        told = (agent, obs["observation"].tobytes(), float(reward), terminated, truncated)
        if terminated or truncated:
            ends.append(told)
            env.step(None)
        else:
            turns.append((*told, obs["action_mask"].tolist(), list(env.agents)))
            env.step(int(rng.choice(np.flatnonzero(obs["action_mask"]))))
    return turns, ends


@pytest.mark.parametrize("game", ["connect_four", "tictactoe", "leduc_holdem"])
def test_games_go_as_in_the_raw_env(game: str) -> None:
    """Every turn, observation, mask, reward and flag in the raw env's order, and the ends."""
    if game == "leduc_holdem":
        pytest.importorskip("rlcard")
    id_ = f"pettingzoo/classic/{game}"
    raw, view = resolve(id_)(), AECView.make(id_)
    for seed in range(12):
        (turns, ends), (raw_turns, raw_ends) = play(view, seed), play(raw, seed)
        assert turns == raw_turns
        assert sorted(ends) == sorted(raw_ends)
        if game != "leduc_holdem":  # there, whoever would have been next if the game went on ends first
            assert ends == raw_ends
    raw.close()
    view.close()


def test_agents_that_act_at_once_are_asked_in_turn() -> None:
    """What a round brings is what the parallel env brings for the same actions."""
    view, parallel = AECView.make("simple_tag"), ParallelView.make("simple_tag")
    view.reset(seed=4)
    obs, _ = parallel.reset(seed=4)
    rng = np.random.default_rng(4)
    rounds = 0
    while parallel.agents:
        actions = {}
        for agent in parallel.possible_agents:
            assert view.agent_selection == agent
            assert view.last()[0].tobytes() == obs[agent].tobytes()
            actions[agent] = int(rng.integers(5))
            view.step(actions[agent])
        obs, rewards, terminated, truncated, _ = parallel.step(actions)
        assert (view.rewards, view.terminations, view.truncations) == (rewards, terminated, truncated)
        rounds += 1
    assert rounds == 25
    assert len(view.agents) == 4
    for _ in range(4):
        view.step(None)
    assert view.agents == []
    view.close()
    parallel.close()


def test_agents_come_and_go_and_every_reward_is_told_once() -> None:
    """Sums of what last() gave each agent are its returns in the raw env; whoever has ended is asked first."""
    scripts = [Script([0, 0, 1], [2, 6, 4], ["terminated", "truncated", "both"])]
    for make_env in (
        partial(ScriptedParallelEnv, scripts, agent_num=3),
        partial(TurnEnv, scripts, agent_num=3),
        partial(KeyedEnv, scripts, agent_num=3, waits=lambda t, a: (t + a) % 3 == 0),
    ):
        view, envs = AECView.make(make_env), marlvec.make(make_env, 1, backend="sync", autoreset_mode="disabled")
        view.reset(seed=0)
        envs.reset(seed=[0])
        returns, ended = dict.fromkeys(view.possible_agents, 0.0), []
        for agent in view.agent_iter():
            _, reward, terminated, truncated, _ = view.last()
            returns[agent] += reward
            over = terminated or truncated
            ended += [agent] * over
            assert over or not any(view.terminations[a] or view.truncations[a] for a in view.agents)
            view.step(None if over else 0)
        expected = np.zeros(3)
        while envs.agents_at(0):
            expected += envs.step(np.zeros((1, 3), np.int64))[1][0]
        assert [*returns.values()] == pytest.approx(expected)
        assert sorted(ended) == sorted(view.possible_agents)
        view.close()
        envs.close()


def test_errors_name_the_cause_and_change_nothing() -> None:
    view = AECView.make("simple_spread")
    with pytest.raises(NotResetError):
        view.step(0)
    view.reset(seed=0)
    view.step(1)
    view.step(2)
    with pytest.raises(ActionError):
        view.step(9)
    assert view.agent_selection == "agent_2"
    view.step(3)
    assert view.agent_selection == "agent_0"
    for _ in range(24 * 3):
        view.step(0)
    with pytest.raises(ValueError, match="only valid action is None"):
        view.step(0)
    view.close()
    with marlvec.make("simple_spread", 2, backend="sync") as envs, pytest.raises(ArgumentError, match="num_envs=1"):
        AECView(envs)
