"""PettingZoo AEC envs through their adapter: turns, first turns, and wrappers, over whole games."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pettingzoo
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, BaseWrapper, OrderEnforcingWrapper

import marlvec
from marlvec.envs import adapt
from marlvec.envs.adapters.aec import state_owner
from marlvec.errors import ContractError, EnvContractError
from marlvec.testing import check_env
from marlvec.testing.scripted import Script, TurnEnv, draw_script
from tests.envs.support import Rig
from tests.vector.support.kinds import HERE_AND_AWAY, vectorize

# --- PettingZoo AEC envs through their adapter, against loops over ``agent_iter()`` and ``last()`` over whole games


EPISODES = 3


def split(obs: Any) -> tuple[Any, Any]:
    """An observation and its mask."""
    return (obs["observation"], obs["action_mask"]) if isinstance(obs, dict) else (obs, None)


def choose(env: Any, agent: str, mask: Any, rng: np.random.Generator) -> int:
    allowed = np.arange(env.action_space(agent).n) if mask is None else np.flatnonzero(mask)
    return int(rng.choice(allowed))


def last_says(plain: Any, rng: np.random.Generator, seed: int | None) -> list[dict[str, Any]]:
    """One game by hand: what ``last()`` told each agent, turn by turn, dead turns included."""
    plain.reset(seed=seed)
    turns = []
    for agent in plain.agent_iter():
        value, reward, terminated, truncated, info = plain.last()
        obs, mask = split(value)
        over = terminated or truncated
        action = None if over else choose(plain, agent, mask, rng)
        flags = bool(terminated), bool(truncated)
        turns.append({"agent": agent, "obs": obs, "mask": mask, "reward": float(reward), "flags": flags})
        turns[-1] |= {"info": dict(info), "action": action}
        plain.step(action)
    return turns


def rig_says(rig: Rig, rng: np.random.Generator, seed: int | None) -> list[dict[str, Any]]:
    """The same game through the adapter, put into the same words: rewards are summed up between an agent's turns."""
    infos = rig.reset(seed=seed) or {}
    names = rig.spec.agents
    owed = np.zeros(len(names))
    turns = []
    while True:
        (acting,) = np.flatnonzero(rig.acting_A)
        agent, mask = names[acting], rig.mask(acting)
        for a in range(len(names)):
            if a != acting and rig.mask(a) is not None:
                assert rig.mask(a).all(), "the mask of one that does not act allows everything"
        assert rig.alive_A[acting]
        action = int(rng.choice(np.arange(rig.spec.action_spaces[acting].n) if mask is None else np.flatnonzero(mask)))
        turn = {"agent": agent, "obs": rig.row(acting), "mask": mask, "reward": owed[acting], "flags": (False, False)}
        turns.append(turn | {"info": infos.get(agent, {}), "action": action})
        owed[acting] = 0.0
        before = {a: rig.row(a) for a in range(len(names))}
        infos = rig.step([action if a == acting else 0 for a in range(len(names))]) or {}
        owed += rig.reward_A
        ended = rig.terminated_A | rig.truncated_A
        assert not np.any(ended & rig.alive_A)
        assert not np.any(rig.acting_A & ~rig.alive_A)
        for a in np.flatnonzero(ended):
            flags = bool(rig.terminated_A[a]), bool(rig.truncated_A[a])
            turn = {"agent": names[a], "obs": rig.row(a), "reward": owed[a], "flags": flags}
            turns.append(turn | {"info": infos.get(names[a], {}), "action": None})
            owed[a] = 0.0
        for a in np.flatnonzero(rig.alive_A & ~rig.acting_A):
            if np.any(before[a]):  # it was in the game before
                np.testing.assert_array_equal(rig.row(a), before[a], "one that waits keeps its observation")
        if rig.done:
            assert not rig.alive_A.any()
            assert not owed.any()
            return turns
        assert rig.acting_A.sum() == 1


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Live turns in the same order; dead turns by agent, for those of one vector step have no order among them."""
    for live in (True, False):
        mine, theirs = ([turn for turn in turns if (turn["action"] is not None) == live] for turns in (got, expected))
        if not live:
            mine, theirs = (sorted(turns, key=lambda turn: turn["agent"]) for turns in (mine, theirs))
        assert [turn["agent"] for turn in mine] == [turn["agent"] for turn in theirs]
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a["obs"], b["obs"])
            assert (a["reward"], a["flags"], a["action"]) == (b["reward"], b["flags"], b["action"])
            np.testing.assert_equal(a["info"], b["info"])
            if live and b["mask"] is not None:
                np.testing.assert_array_equal(a["mask"], b["mask"] != 0)


@pytest.mark.slow("plays whole episodes of many envs")
@pytest.mark.fault("D3")
@given(
    seed=st.integers(0, 10_000),
    agent_num=st.integers(1, 4),
    dead_first=st.booleans(),
    masked=st.booleans(),
    shuffled=st.booleans(),
)
@settings(max_examples=60)
def test_scripted_games(seed: int, agent_num: int, dead_first: bool, masked: bool, shuffled: bool) -> None:
    """Births and deaths in mid-game, everyone paid for every move, the dead stepping at once or in their turn."""
    rng = np.random.default_rng(seed)
    scripts = [draw_script(rng, agent_num, 12) for _ in range(EPISODES)]
    order = [*range(agent_num), int(rng.integers(agent_num))] if shuffled else None
    options: dict[str, Any] = {"agent_num": agent_num, "order": order, "dead_first": dead_first, "masked": masked}
    plain, rig = TurnEnv(scripts, **options), Rig(adapt(TurnEnv(scripts, **options)))
    for episode in range(EPISODES):
        game = seed + episode
        expected = last_says(plain, np.random.default_rng(game), game)
        assert_same(rig_says(rig, np.random.default_rng(game), game), expected)


@pytest.mark.parametrize("name", ["tictactoe", "connect_four", "leduc_holdem", "texas_holdem", "rps"])
def test_classic_games(name: str) -> None:
    version = {"tictactoe": 3, "connect_four": 3, "leduc_holdem": 4, "texas_holdem": 4, "rps": 2}[name]
    plain, other = (pettingzoo.make("aec", f"classic/{name}_v{version}") for _ in range(2))
    rig = Rig(adapt(other))
    for game in range(EPISODES * 2):
        expected = last_says(plain, np.random.default_rng(game), game)
        assert_same(rig_says(rig, np.random.default_rng(game), game), expected)
    rig.env.close()


@pytest.mark.fault("D12")
def test_an_illegal_move_ends_the_game_for_all() -> None:
    rig = Rig(adapt(pettingzoo.make("aec", "classic/tictactoe_v3")))
    for _ in range(EPISODES):
        rig.reset(seed=0)
        rig.step([4, 0])
        assert rig.mask(1) is not None
        assert rig.mask(1).tolist() == [k != 4 for k in range(9)]
        rig.step([0, 4])
        assert rig.done
        assert rig.reward_A.tolist() == [0.0, -1.0]
        assert rig.flags() == {
            "terminated": [True, True],
            "truncated": [True, True],
            "alive": [False, False],
            "acting": [False, False],
        }


@pytest.mark.fault("D7")
def test_rewards_of_a_game_are_the_envs_own_sum() -> None:
    script = Script([0, 0, 2], [3, 9, 9], ["terminated", "truncated", "both"])
    rig = Rig(adapt(TurnEnv(script, agent_num=3)))
    for episode in range(EPISODES):
        rig.reset(seed=episode)
        total = np.zeros(3)
        while not rig.done:
            rig.step([1, 1, 1])
            total += rig.reward_A
        for a, (born, ended) in enumerate([(0, 3), (0, 9), (1, 9)]):
            first = 2 if a == 2 else born + 1
            assert total[a] == sum(episode * 1e6 + t * 1e3 + a + 1 / 4096 for t in range(first, ended + 1))


def test_an_env_that_empties_its_agents_at_once() -> None:
    """Against PettingZoo's rules, but common: no dead steps, ``agents`` is simply empty at the end."""

    class Abrupt(TurnEnv):
        def step(self, action: Any) -> None:
            super().step(action)
            if all(self.terminations.values()):
                self.agents = []

    rig = Rig(adapt(Abrupt(Script.together(2, 4, "terminated"))))
    for episode in range(EPISODES):
        rig.reset(seed=0)
        for t in range(1, 5):
            rig.step([0, 0])
            assert rig.done is (t == 4)
        assert rig.terminated_A.all()
        assert [rig.row(a)[2:5].tolist() for a in range(2)] == [[episode, 4, a] for a in range(2)]


class Objectives(BaseWrapper[str, Any, Any]):
    """Two rewards where there was one, as momaland's games have them."""

    @property
    def rewards(self) -> dict[str, Any]:  # type: ignore[override]  # theirs is an attribute
        return {agent: np.array([reward, reward / 4]) for agent, reward in self.env.rewards.items()}


class OneNumber(BaseWrapper[str, Any, Any]):
    """A wrapper of a user, in place of ``reward_weights``."""

    @property
    def rewards(self) -> dict[str, float]:  # type: ignore[override]  # theirs is an attribute
        return {agent: float(np.dot(reward, [2.0, 4.0])) for agent, reward in self.env.rewards.items()}


def test_rewards_of_several_objectives_become_one_number_by_weights_or_a_wrapper() -> None:
    game = Script.together(2, 4, "terminated")
    rig = Rig(adapt(Objectives(TurnEnv(game))))
    rig.reset(seed=0)
    with pytest.raises(ContractError, match=r"adapt\(env, reward_weights="):
        rig.step([0, 0])
    plain, one = Rig(adapt(TurnEnv(game))), Rig(adapt(OneNumber(Objectives(TurnEnv(game)))))
    weighed = Rig(adapt(Objectives(TurnEnv(game)), reward_weights=[2.0, 4.0]))
    for rig in (plain, one, weighed):
        rig.reset(seed=0)
    while not plain.done:
        for rig in (plain, one, weighed):
            rig.step([0, 0])
        assert plain.reward_A.any()
        assert one.reward_A.tolist() == weighed.reward_A.tolist() == (3 * plain.reward_A).tolist()
    assert one.done
    assert weighed.done


# --- what last() says


class Hidden(TurnEnv):
    """Adds rewards up for ``last()``, and shows none of them."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.rewards = dict.fromkeys(self.rewards, 0.0)


class Forgotten(TurnEnv):
    """Does not set an agent's sum to zero when it acts, so that ``last()`` counts rewards again."""

    def step(self, action: Any) -> None:
        agent, before = self.agent_selection, self._cumulative_rewards[self.agent_selection]
        super().step(action)
        if agent in self._cumulative_rewards and not (self.terminations[agent] or self.truncations[agent]):
            self._cumulative_rewards[agent] += before


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
@pytest.mark.parametrize(("kind", "times"), [(TurnEnv, 0), (Hidden, 1), (Forgotten, 1)])
def test_last_with_another_sum_than_rewards_warns_once(kind: type[TurnEnv], times: int, backend: str) -> None:
    """Four envs, in processes, too: one warning for all of them, at the caller's line."""
    with vectorize(backend, [partial(kind, Script.together(2, 7), env_index=i) for i in range(4)]) as envs:
        envs.reset(seed=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(40):
                envs.step(np.ones((4, 2), np.int64))
    texts = [str(warning.message) for warning in caught if warning.filename == __file__]
    assert len(texts) == len(caught) == times
    assert all("turns: last() and env.rewards disagree" in text for text in texts)


def test_a_restored_game_continues_without_a_false_warning() -> None:
    with vectorize("sync", [partial(TurnEnv, Script.together(3, 9), agent_num=3)], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        for _ in range(4):
            envs.step(np.ones((1, 3), np.int64))
        state = envs.get_state()
        for _ in range(30):
            envs.step(np.ones((1, 3), np.int64))
        envs.set_state(state)
        for _ in range(30):
            envs.step(np.ones((1, 3), np.int64))


# --- Turn-based envs that know what an agent sees only from its first turn on, as SuperSuit's wrappers have it


BACKENDS = ("sync", "thread", "async")


class LastSeen(BaseWrapper):  # type: ignore[misc]  # pettingzoo has no type information
    """Observes whoever is selected and remembers it; of all others in this game it knows nothing."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self.seen: dict[str, Any] = {}
        self.look()

    def step(self, action: Any) -> None:
        super().step(action)
        if self.agents:
            self.look()

    def look(self) -> None:
        self.seen[self.agent_selection] = self.env.observe(self.agent_selection)

    def observe(self, agent: str) -> Any:
        return self.seen[agent]


def build(scripts: list[Script], agent_num: int, outside: Callable[[Any], Any], **options: Any) -> Any:
    return outside(LastSeen(TurnEnv(scripts, agent_num=agent_num, **options)))


def bare(env: Any) -> Any:
    return env


@pytest.mark.slow("plays whole episodes of many envs")
@given(seed=st.integers(0, 10_000), agent_num=st.integers(1, 4), dead_first=st.booleans(), masked=st.booleans())
@pytest.mark.parametrize("outside", [bare, OrderEnforcingWrapper])
def test_games_are_those_of_a_loop_over_last(
    outside: Callable[[Any], Any], seed: int, agent_num: int, dead_first: bool, masked: bool
) -> None:
    rng = np.random.default_rng(seed)
    scripts = [draw_script(rng, agent_num, 12) for _ in range(3)]
    make = partial(build, scripts, agent_num, outside, dead_first=dead_first, masked=masked)
    plain, rig = make(), Rig(adapt(make()))
    for game in range(seed, seed + 3):
        expected = last_says(plain, np.random.default_rng(game), game)
        assert_same(rig_says(rig, np.random.default_rng(game), game), expected)


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick=2)
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("limit", [None, 1, 2, 5])
def test_backends_agree_and_who_had_no_turn_has_zeros(mode: str, limit: int | None) -> None:
    """Agent 2 is born late, agent 1 dies before its second turn; and the next game begins with nothing of this one."""
    script = Script([0, 0, 2, 0], [9, 4, 9, 9], ["terminated", "truncated", "both", "terminated"])
    factories = [partial(build, [script], 4, OrderEnforcingWrapper)] * 3
    vectorizers = [
        marlvec.make(factories, backend=backend, autoreset_mode=mode, max_episode_steps=limit) for backend in BACKENDS
    ]
    try:
        had_turn = np.zeros((3, 4), np.bool_)
        told = [envs.reset(seed=0) for envs in vectorizers]
        for _ in range(30):
            for obs, infos in told[1:]:
                np.testing.assert_equal((obs, infos), told[0])
            obs, infos = told[0]
            had_turn |= infos["acting"]
            assert not obs[infos["alive"] & ~had_turn].any()
            assert obs[infos["acting"]].any(axis=1).all()
            if mode == "disabled" and not infos["alive"].any():
                had_turn[...] = False
                told = [envs.reset() for envs in vectorizers]
                continue
            results = [envs.step(np.ones((3, 4), np.int64)) for envs in vectorizers]
            for result in results[1:]:
                np.testing.assert_equal(result[1:4], results[0][1:4])
            told = [(result[0], result[4]) for result in results]
            infos = told[0][1]
            if infos.get("_final_observation", np.False_).any():
                if limit == 1:  # agents 0 and 1 were selected; agent 3 was not
                    assert infos["final_observation_missing"].tolist() == [[False, False, False, True]] * 3
                    assert not infos["final_observation"][:, 2:].any()
                had_turn[...] = False
    finally:
        for envs in vectorizers:
            envs.close()


def test_check_env_observes_nobody_before_its_turn() -> None:
    class Again(LastSeen):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
            self.env.world.episode = -1
            super().reset(seed, options)

    check_env(lambda: Again(TurnEnv(Script.together(3, 7), agent_num=3)))


class Tall(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two agents, whose observations cannot be zero; the second one's first one may be told too tall."""

    metadata = {"name": "tall"}

    def __init__(self, height: float = 1.5) -> None:
        super().__init__()
        self.possible_agents = ["a", "b"]
        self.height = height

    def observation_space(self, agent: str) -> Any:
        return Dict({"height": Box(1, 2, (1,), np.float32), "name": Text(3)})

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def observe(self, agent: str) -> Any:
        height = self.height if agent == "b" else 1.5
        return {"height": np.array([height], np.float32), "name": agent}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection = "a"
        self.rewards = self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        self.agent_selection = "b" if self.agent_selection == "a" else "a"


def test_zeros_that_no_space_has_are_no_observation() -> None:
    with marlvec.make(Tall, 2, backend="sync", validate="strict", max_episode_steps=3) as envs:
        obs, _ = envs.reset()
        assert obs["name"].tolist() == [["a", None]] * 2
        assert obs["height"].tolist() == [[[1.5], [0.0]]] * 2
        for _ in range(7):
            obs, *_ = envs.step(np.zeros((2, 2), np.int64))
    with (
        marlvec.make(partial(Tall, 3.0), 2, backend="sync", validate="strict") as envs,
        pytest.raises(EnvContractError, match="step.*observation of agent 'b', leaf 'height'"),
    ):
        envs.reset()
        envs.step(np.zeros((2, 2), np.int64))


# --- Envs in wrappers: what PettingZoo's own hand on is read where it stands, and what a user's says counts


class Doubled(BaseWrapper):  # type: ignore[misc]  # pettingzoo has no type information
    """Pays twice as much, by a property."""

    @property
    def rewards(self) -> dict[str, float]:
        return {agent: 2 * reward for agent, reward in self.env.rewards.items()}

    @property
    def _cumulative_rewards(self) -> dict[str, float]:
        return {agent: 2 * reward for agent, reward in self.env._cumulative_rewards.items()}


class Kept(BaseWrapper):  # type: ignore[misc]
    """Has attributes of its own, as all wrappers once had, from the first move on."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.rewards = {agent: reward + 1 for agent, reward in self.env.rewards.items()}


class Asked(BaseWrapper):  # type: ignore[misc]
    """Answers when it is asked."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return {agent: -reward for agent, reward in found.items()} if name == "rewards" else found


def usual(env: Any) -> Any:
    """As PettingZoo's envs come."""
    return OrderEnforcingWrapper(AssertOutOfBoundsWrapper(env))


@pytest.mark.parametrize("seed", range(4))
def test_games_in_wrappers_are_those_without(seed: int) -> None:
    plain, rig = TurnEnv(agent_num=3), Rig(adapt(usual(TurnEnv(agent_num=3))))
    for episode in range(3):
        by_hand, by_rig = np.random.default_rng(episode), np.random.default_rng(episode)
        first = seed if episode == 0 else None
        expected = last_says(plain, by_hand, first)
        assert_same(rig_says(rig, by_rig, first), expected)


@pytest.mark.parametrize("inside", [usual, lambda env: env], ids=["over wrappers", "over the env"])
@pytest.mark.parametrize("outside", [usual, lambda env: env], ids=["under wrappers", "outermost"])
@pytest.mark.parametrize(
    ("own", "change"), [(Doubled, lambda paid: 2 * paid), (Kept, lambda paid: paid + 1), (Asked, lambda paid: -paid)]
)
def test_a_users_wrapper_overrides_attributes(
    own: Any, change: Callable[[float], float], inside: Callable[[Any], Any], outside: Callable[[Any], Any]
) -> None:
    script = Script(births=(0, 0), deaths=(7, 7), ends=("terminated", "truncated"))
    plain, rig = Rig(adapt(TurnEnv(script))), Rig(adapt(outside(own(inside(TurnEnv(script))))))
    for _ in range(3):
        plain.reset(seed=5)
        rig.reset(seed=5)
        for _ in range(6):  # in the seventh move dead turns follow, which a wrapper may pay for, too
            plain.step([0, 0])
            rig.step([0, 0])
            assert plain.reward_A.all()
            assert rig.reward_A.tolist() == list(map(change, plain.reward_A.tolist()))
        assert plain.acting_A.any()


def test_which_layer_answers() -> None:
    raw = TurnEnv()
    raw.reset(seed=0)
    assert state_owner(raw) is raw
    assert state_owner(usual(raw)) is raw
    assert state_owner(usual(usual(raw))) is raw
    for own in (Doubled, Kept, Asked):
        wrapper = own(usual(raw))
        assert state_owner(usual(wrapper)) is wrapper
    telling = BaseWrapper(raw)
    telling.rewards = {}
    assert state_owner(OrderEnforcingWrapper(telling)) is telling
    assert state_owner(None) is None
