"""Text, Sequence, Graph, OneOf and spaces of users' own: values without a fixed size, on every backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space, Text, Tuple
from pettingzoo import ParallelEnv

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.envs import PaddedEnv, adapt
from marlvec.errors import ActionError, ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import ObjectArray
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.buffers import Buffers
from tests.faults.harness.programs import run
from tests.vector.support.kinds import BACKENDS
from tests.vector.support.object_envs import OBJECTS, Card, Hands, ObjectEnv, at
from tests.vector.support.object_envs import make_envs as make


def objects(backend: str, observation: str, action: str, n: int = 2, late: bool = False, **options: Any) -> VectorEnv:
    return make(backend, [partial(ObjectEnv, observation, action, late=late, env_index=i) for i in range(n)], **options)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(58)
def test_fixed_size_leaves_stay_in_shared_memory_and_objects_can_be_refused() -> None:
    name = "inside Dict and Tuple"
    with objects("async", name, "text") as envs:
        rows = Buffers.nbytes(envs.spec, 2)
        arrays = 3 * 64 + 5 * 64 + 2 * 64  # obs and final obs of pixels and n; rewards, flags
        assert rows <= arrays
    with pytest.raises(UnsupportedSpaceError) as refused:
        AsyncVectorEnv([partial(ObjectEnv, name, "text")], shared_memory="require", context="fork")
    for leaf in ("observation of agent 'ann', leaf 'hand' (Hands)", "leaf 'words/0' (Text)", "leaf 'words/1/deep'"):
        assert leaf in str(refused.value)
    assert "action of agent 'ann' (Text)" in str(refused.value)
    assert "pixels" not in str(refused.value)
    plain = partial(SampledEnv, Box(0, 1, (2,)), Discrete(2))
    with AsyncVectorEnv([plain], shared_memory="require", context="fork") as envs:
        envs.reset()


@pytest.mark.checklist(59)
@pytest.mark.parametrize("grouped", [False, True])
def test_spaces_of_one_agent_one_env_and_all(grouped: bool) -> None:
    with objects("sync", "inside Dict and Tuple", "one of", grouped=grouped) as envs:
        obs, _ = envs.reset(seed=1)
        batched, single = envs.observation_space, envs.single_observation_space
        if grouped:
            obs, batched, single = obs["agents"], batched["agents"], single["agents"]
        assert batched["hand"] == ObjectArray(Hands(2), (2, 3))
        assert single["words"][0] == ObjectArray(Text(3), (3,))
        assert batched["pixels"].shape == (2, 3, 2, 2)
        for i in range(2):
            row = {"pixels": obs["pixels"][i], "hand": obs["hand"][i]}
            row["words"] = obs["words"][0][i], {key: part[i] for key, part in obs["words"][1].items()}
            assert single.contains(row)
            for a in range(3):
                assert envs.agent_observation_space(a).contains(at(envs.agent_observation_space(a), obs, i, a))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=5)
@pytest.mark.parametrize("backend", BACKENDS)
def test_spaces_without_an_equality_of_their_own_make_one_group(backend: str) -> None:
    """Each agent of each env has built its own, and so has each process."""
    with objects(backend, "custom", "custom") as envs:
        assert list(envs.groups) == ["agents"]
    other = partial(SampledEnv, Hands(3), Hands(3), agent_num=3)
    with pytest.raises(ContractError, match=r"env 1\b.*agents: expected \('ann'"):
        make(backend, [partial(ObjectEnv, "custom", "custom"), other])
    differs = [partial(SampledEnv, Hands(n), Discrete(2)) for n in (3, 4)]
    with pytest.raises(ContractError, match="env 1.*observation space of agent 'agent_0' at /: expected <"):
        make(backend, differs)


class Reusing(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Hands out one list that it changes, keeps the actions it was given, and ends agent b early."""

    metadata: dict[str, Any] = {"name": "reusing"}
    possible_agents = ["a", "b"]
    render_mode = None

    def __init__(self) -> None:
        self.hand: list[Card] = []
        self.kept: list[Any] = []

    def observation_space(self, agent: str) -> Space[Any]:
        return Hands(9)

    def action_space(self, agent: str) -> Space[Any]:
        return Hands(9)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = ["a", "b"], 0
        self.hand.clear()
        self.kept.clear()
        return dict.fromkeys(self.agents, self.hand), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.kept += actions.values()
        assert [card.rank for card in self.kept[0]] == [7], "nobody changes an action that was given"
        self.t += 1
        self.hand.append(Card("c", self.t))
        here, over = self.agents, self.t == 4
        self.agents = [agent for agent in here if not over and not (agent == "b" and self.t == 2)]
        ended = {agent: agent not in self.agents for agent in here}
        return dict.fromkeys(here, self.hand), dict.fromkeys(here, 0.0), ended, dict.fromkeys(here, False), {}


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_neither_side_sees_the_others_changes(backend: str) -> None:
    def ranks(cell: Any) -> Any:
        return None if cell is None else [card.rank for card in cell]

    with make(backend, [Reusing, Reusing]) as envs:
        for _ in range(3):
            obs, _ = envs.reset()
            for t in range(1, 4):
                actions = np.empty((2, 2), object)
                for i in np.ndindex(2, 2):
                    actions[i] = [Card("h", 7)]
                envs.step_send(actions)
                for cell in actions.flat:
                    cell[0].rank = -1
                before, (obs, *_, infos) = obs, envs.step_fetch()
                assert [ranks(cell) for cell in obs[:, 0]] == [list(range(1, t + 1))] * 2
                assert [ranks(cell) for cell in obs[:, 1]] == [list(range(1, t + 1)) if t < 3 else None] * 2
                assert all(ranks(cell) == list(range(1, t)) for cell in before[:, 0])
                for cell in (*obs[:, 0], *infos.get("final_observation", np.empty(0, object)).flat):
                    if cell is not None:
                        cell.append(Card("x", 99))
                again = envs.reset(env_ids=[])[0]
                assert [ranks(cell) for cell in again[:, 0]] == [list(range(1, t + 1))] * 2
                obs = again


def test_a_class_of_the_users_own_that_narrows_a_space_of_arrays() -> None:
    with make("sync", [partial(SampledEnv, Even(9), Tuple([Even(9), Discrete(2)]))], validate="strict") as envs:
        envs.reset()
        good = np.zeros((1, 2), np.int64)
        assert envs.step((good + 4, good))[0].dtype == np.int64
        with pytest.raises(ActionError, match="agent 'agent_0': leaf '0': expected a member of"):
            envs.step((good + 3, good))


class Even(Discrete):
    """Even numbers only."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample() // 2 * 2

    def contains(self, x: Any) -> bool:
        return super().contains(x) and int(x) % 2 == 0


SCRIPT = """
from gymnasium.spaces import Space
from pettingzoo import ParallelEnv

class Coin:
    def __init__(self, side):
        self.side = side

class Coins(Space):
    def sample(self, mask=None, probability=None):
        return Coin(int(self.np_random.integers(2)))
    def contains(self, x):
        return isinstance(x, Coin)

class Env(ParallelEnv):
    metadata = {"name": "coins"}
    possible_agents = ["a", "b"]
    def observation_space(self, agent):
        return Coins()
    def action_space(self, agent):
        return Coins()
    def reset(self, seed=None, options=None):
        self.agents, self.t = ["a", "b"], 0
        return {agent: Coin(9) for agent in self.agents}, {}
    def step(self, actions):
        assert all(isinstance(coin, Coin) for coin in actions.values())
        self.t += 1
        over = dict.fromkeys(actions, self.t == 3)
        self.agents = [] if self.t == 3 else self.agents
        return actions, dict.fromkeys(actions, 0.0), over, dict.fromkeys(actions, False), {}

for backend in ("sync", "thread", "async"):
    with marlvec.make(Env, num_envs=2, backend=backend) as envs:
        envs.reset(seed=0)
        for t in range(7):
            actions = envs.random_action(seed=t)
            obs, _, terminated, _, infos = envs.step(actions)
            obs = infos["final_observation"] if terminated.all() else obs
            assert [type(coin) is Coin for coin in obs.flat] == [True] * 4
            assert [coin.side for coin in obs.flat] == [coin.side for coin in actions.flat]
print("fine")
"""


@pytest.mark.slow("plays whole episodes in worker processes")
def test_classes_of_a_script(tmp_path: Path) -> None:
    """Spaces and values of classes that the main script defines, which workers do not import."""
    assert run(SCRIPT, tmp_path) == ["fine"]


class Speaker(gymnasium.Env[Any, Any]):
    """One agent that hears what it said."""

    observation_space = Dict({"heard": Text(9, min_length=0), "t": Discrete(9)})
    action_space = Text(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return {"heard": "", "t": 0}, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return {"heard": action, "t": self.t}, 0.0, self.t == 3, False, {}


def test_objects_of_a_gymnasium_env() -> None:
    with make("sync", [Speaker, Speaker]) as envs:
        obs, _ = envs.reset()
        assert obs["heard"].tolist() == [[""], [""]]
        for t in range(1, 9):
            obs, *_, infos = envs.step([[f"say{t}"], ["nothing"]])
            last = infos["final_observation"] if t % 3 == 0 else obs
            assert last["heard"].tolist() == [[f"say{t}"], ["nothing"]]


def test_objects_beside_arrays_that_are_padded() -> None:
    spaces = [Dict({"word": Text(4), "row": Box(1, 2, (n,))}) for n in (2, 3)]
    action = Tuple([OBJECTS["graph"](), Discrete(2)])
    factory = partial(padded, spaces, action)
    with make("sync", [factory, factory], validate="strict") as envs:
        obs, _ = envs.reset(seed=0)
        for t in range(9):
            assert obs["row"].shape == (2, 2, 3)
            assert all(Text(4).contains(word) for word in obs["word"].flat)
            obs, rewards, *_ = envs.step(envs.random_action(seed=t))
            assert (rewards > 0).all()


def padded(spaces: list[Any], action: Any) -> Any:
    return PaddedEnv(adapt(SampledEnv(spaces, action)))


class Stated(Speaker):
    """Has a state of words, for which there is no array."""

    state_space = Text(9)

    def state(self) -> str:
        return "fine"


def test_a_state_of_objects_is_none_that_could_be_asked_for() -> None:
    with make("sync", [Stated]) as envs:
        envs.reset()
        assert envs.state_space is None
    with pytest.raises(ArgumentError, match="has no global state"):
        make("sync", [Stated], state=True)
