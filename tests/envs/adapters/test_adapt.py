"""Which adapter an env gets, and what is no env."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import SyncVectorEnv

from marlvec.envs import AECAdapter, GymnasiumAdapter, ParallelAdapter, RLlibAdapter, adapt
from marlvec.errors import ContractError
from marlvec.spaces.action_masks import split_action_mask
from marlvec.testing.scripted import CounterEnv, KeyedEnv, NoOpEnv, SampledEnv, Script, SingleEnv, TurnEnv
from tests.envs.support import Rig


class MultiAgentEnv(gymnasium.Env[Any, Any]):
    """RLlib's own base class has this name, derives from gymnasium.Env, and need not be there to be known."""


class DerivedFromRLlib(MultiAgentEnv):
    def __init__(self) -> None:
        self._keyed = KeyedEnv(Script.together(3, 4))
        self.possible_agents = self._keyed.possible_agents
        self.observation_spaces = self._keyed.observation_spaces
        self.action_spaces = self._keyed.action_spaces

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._keyed.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self._keyed.step(action)


class ParallelLook:
    """A Parallel env that derives from nothing."""

    def __init__(self) -> None:
        self._env = CounterEnv(4)
        self.possible_agents = self._env.possible_agents

    @property
    def agents(self) -> list[str]:
        return self._env.agents

    def observation_space(self, agent: str) -> Any:
        return self._env.observation_space(agent)

    def action_space(self, agent: str) -> Any:
        return self._env.action_space(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._env.reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        return self._env.step(actions)


class TurnLook:
    """An AEC env that derives from nothing."""

    def __init__(self) -> None:
        self._env = TurnEnv(Script.together(2, 4))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_env"], name)


class SingleLook:
    """A Gymnasium env that derives from nothing."""

    def __init__(self) -> None:
        self._env = SingleEnv(4)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self._env.step(action)


CASES = [
    (lambda: CounterEnv(4), ParallelAdapter),
    (lambda: NoOpEnv(length=4), ParallelAdapter),
    (ParallelLook, ParallelAdapter),
    (lambda: pettingzoo.make("parallel", "classic/rps_v2", max_cycles=4), ParallelAdapter),
    (lambda: TurnEnv(Script.together(2, 4)), AECAdapter),
    (TurnLook, AECAdapter),
    (lambda: pettingzoo.make("aec", "classic/rps_v2", max_cycles=2), AECAdapter),
    (lambda: SingleEnv(4), GymnasiumAdapter),
    (SingleLook, GymnasiumAdapter),
    (lambda: gymnasium.make("FrozenLake-v1", max_episode_steps=4), GymnasiumAdapter),
    (lambda: KeyedEnv(Script.together(3, 4)), RLlibAdapter),
    (DerivedFromRLlib, RLlibAdapter),
    (lambda: gymnasium.wrappers.OrderEnforcing(DerivedFromRLlib()), RLlibAdapter),
]


@pytest.mark.checklist(7)
@pytest.mark.parametrize(("make", "adapter"), CASES)
def test_each_kind_comes_to_the_same_contract(make: Any, adapter: Any) -> None:
    rig = Rig(adapt(make()))
    assert type(rig.env) is adapter
    agent_num = len(rig.spec.agents)
    for seed in range(3):
        rig.reset(seed=seed)
        assert rig.alive_A.all()
        assert rig.acting_A.any()
        steps = 0
        while not rig.done:
            assert not (rig.acting_A & ~rig.alive_A).any()
            assert not ((rig.terminated_A | rig.truncated_A) & rig.alive_A).any()
            rig.step([0] * agent_num)
            steps += 1
        assert steps <= 4
        assert (rig.terminated_A | rig.truncated_A).all()
        assert not rig.alive_A.any()
        assert not rig.acting_A.any()
    rig.env.close()


def test_an_adapter_passes_through() -> None:
    chosen = RLlibAdapter(KeyedEnv(Script.together(3, 4)))
    assert adapt(chosen) is chosen
    env = CounterEnv()
    assert adapt(env).unwrapped is env


def test_close_reaches_the_env() -> None:
    for make in (CounterEnv, SingleEnv, TurnEnv, KeyedEnv):
        env = make()
        adapt(env).close()
        assert env.closed


@pytest.mark.fault("B15")
@pytest.mark.parametrize(
    ("thing", "got"),
    [
        (None, "None"),
        (CounterEnv, "the class CounterEnv"),
        (3, "builtins.int"),
        ("simple_spread", "builtins.str"),
        (object(), "builtins.object"),
    ],
)
def test_values_that_are_not_envs_are_refused(thing: Any, got: str) -> None:
    with pytest.raises(ContractError, match=got) as caught:
        adapt(thing)
    for form in ("PettingZoo Parallel", "PettingZoo AEC", "Gymnasium", "RLlib-style"):
        assert form in str(caught.value)


def test_a_vector_env_is_no_env() -> None:
    envs = SyncVectorEnv([SingleEnv])
    with pytest.raises(ContractError, match="many envs already"):
        adapt(envs)
    envs.close()


def test_an_env_without_agents_or_spaces() -> None:
    class Nobody(CounterEnv):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = []

    class Unnamed(CounterEnv):
        def __init__(self) -> None:
            super().__init__()
            del self.possible_agents

    class Spaceless(CounterEnv):
        def observation_space(self, agent: str) -> Any:
            raise KeyError(agent)

    class NoSpace(CounterEnv):
        def action_space(self, agent: str) -> Any:
            return 5

    class SpaceNotMethod(CounterEnv):
        observation_space: Any = Discrete(2)

    class OldFlags(TurnEnv):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
            super().reset(seed, options)
            self.dones = self.__dict__.pop("terminations")

    rig = Rig(adapt(OldFlags()))
    with pytest.raises(ContractError, match="got none, and env.dones: PettingZoo's old API"):
        rig.reset()
    for broken, words in (
        (SpaceNotMethod, "SpaceNotMethod.observation_space: expected a method, got the space Discrete"),
        (Nobody, "at least one agent"),
        (Unnamed, "possible_agents: missing"),
        (Spaceless, "no space for agent 'agent_0'"),
        (NoSpace, "action space of agent 'agent_0': expected a gymnasium space, got int"),
    ):
        with pytest.raises(ContractError, match=words):
            adapt(broken())


OBS = Box(-1, 1, (2,), np.float32)


class LateSingle(gymnasium.Env[Any, Any]):
    """Makes its spaces in reset()."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space, self.action_space = OBS, Discrete(2)
        return np.zeros(2, np.float32), {}


class LateParallel(pettingzoo.ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    possible_agents = ["a", "b"]
    observation_spaces: Any
    action_spaces: Any

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.agents, OBS)
        self.action_spaces = dict.fromkeys(self.agents, Discrete(2))
        return dict.fromkeys(self.agents, np.zeros(2, np.float32)), {"a": {}, "b": {}}


class LateEmpty(LateParallel):
    def __init__(self) -> None:
        self.observation_spaces = self.action_spaces = {}


class LateNone(LateParallel):
    def __init__(self) -> None:
        self.observation_spaces = self.action_spaces = None

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]


class LateAgents(LateParallel):
    possible_agents: Any = None

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.possible_agents = ["a", "b"]
        return super().reset(seed, options)


class LateKeyed:
    possible_agents = ["a", "b"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_spaces = dict.fromkeys(self.possible_agents, OBS)
        self.action_spaces = dict.fromkeys(self.possible_agents, Discrete(2))
        return dict.fromkeys(self.possible_agents, np.zeros(2, np.float32)), {}

    def step(self, actions: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        (LateSingle, "observation_space"),
        (LateParallel, "observation_spaces"),
        (LateEmpty, "observation_spaces"),
        (LateNone, "observation_spaces"),
        (LateAgents, "possible_agents"),
        (LateKeyed, "observation_spaces"),
    ],
)
def test_spaces_that_come_with_reset_are_refused_with_the_way_out_which_works(kind: Any, attribute: str) -> None:
    with pytest.raises(ContractError, match=rf"Set self\.{attribute}\b.* lenient=True\), which resets it"):
        adapt(kind())
    assert all(space == OBS for space in adapt(kind(), lenient=True).spec().observation_spaces)


def test_the_error_names_observation_spaces_where_an_env_has_none() -> None:
    class Plain:
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {}, {}

        def step(self, actions: Any) -> Any:
            return {}, {}, {"__all__": True}, {"__all__": True}, {}

    class Typo(pettingzoo.ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
        possible_agents = ["a"]

        def observation_space(self, agent: str) -> Any:
            return {}[None]

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return {}, {}

    class Raises(Typo):
        observation_spaces = {"a": OBS}

        def observation_space(self, agent: str) -> Any:
            return len(5)  # type: ignore[arg-type]  # that is the fault

    for kind in (Plain, Typo):
        with pytest.raises(ContractError, match=r"Set self\.observation_spaces = {agent: space, …}"):
            adapt(kind())
    with pytest.raises(TypeError, match="has no len"):
        adapt(Raises())


def test_spaces_in_dicts_are_read_without_pettingzoos_warning() -> None:
    class Dicts(pettingzoo.ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
        possible_agents = ["a", "b"]
        observation_spaces = {"a": Box(0, 1, (1,)), "b": Box(0, 1, (2,))}
        action_spaces = {"a": Discrete(2), "b": Discrete(3)}

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return {}, {}

    spec = adapt(Dicts()).spec()
    assert [space.shape for space in spec.observation_spaces] == [(1,), (2,)]
    assert spec.action_spaces == (Discrete(2), Discrete(3))


@pytest.mark.parametrize(
    ("space", "action_space", "size", "inner"),
    [
        (Dict(observation=Box(0, 1, (2,)), action_mask=Box(0, 1, (4,), np.int8)), Discrete(4), 4, Box),
        (Dict(observation=Box(0, 1, (2,)), action_mask=MultiBinary(4)), Discrete(4, start=1), 4, Box),
        (Dict(x=Box(0, 1, (2,)), y=Discrete(2), action_mask=MultiBinary(5)), MultiDiscrete([2, 3]), 5, Dict),
        (Dict(observation=Box(0, 1, (2,)), action_mask=Box(0, 1, (3,))), Discrete(4), None, Dict),
        (Dict(observation=Box(0, 1, (2,)), action_mask=Box(0, 1, (2, 2))), Discrete(4), None, Dict),
        (Dict(observation=Box(0, 1, (2,)), action_mask=Discrete(4)), Discrete(4), None, Dict),
        (Dict(observation=Box(0, 1, (2,)), action_mask=MultiBinary(4)), Box(0, 1, (4,)), None, Dict),
        (Box(0, 1, (2,)), Discrete(4), None, Box),
    ],
)
def test_masks_are_told_from_observations(space: Any, action_space: Any, size: int | None, inner: Any) -> None:
    rest, found = split_action_mask(space, action_space)
    assert found == size
    assert type(rest) is inner
    if isinstance(rest, Dict) and size is not None:
        assert "action_mask" not in rest.spaces
    env = SampledEnv(space, action_space, length=3)
    rig = Rig(adapt(env))
    for seed in range(3):
        rig.reset(seed=seed)
        while not rig.done:
            mask = rig.mask(0)
            assert (None if mask is None else len(mask)) == size
            rig.step([action_space.sample(), action_space.sample()])


def test_adapting_imports_neither_ray_nor_pettingzoo() -> None:
    script = (
        "import sys, marlvec.envs\n"
        "from gymnasium.spaces import Box, Discrete\n"
        "class E:\n"
        "    possible_agents = ['a']\n"
        "    observation_space, action_space = Box(0, 1, (1,)), Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): pass\n"
        "    def step(self, actions): pass\n"
        "print(type(marlvec.envs.adapt(E())).__name__, 'ray' in sys.modules, 'pettingzoo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["RLlibAdapter", "False", "False"], done.stderr
