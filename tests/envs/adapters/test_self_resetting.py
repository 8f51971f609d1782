"""Envs that reset themselves: not reset twice, and nothing of the episode that ended is lost."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import marlvec
from marlvec.errors import ArgumentError, ContractError, ContractWarning
from marlvec.testing.scripted import KeyedEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv, decode
from tests.envs.support import play
from tests.families.trace import difference


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


class SelfResettingSingleEnv(SingleEnv):
    """Resets itself; ``style`` says where its last observation and info are."""

    has_auto_reset = True
    resets = 0

    def __init__(
        self, length: Any = 5, *, style: str = "final_observation", env_index: int = 0, **options: Any
    ) -> None:
        super().__init__(length, env_index=env_index, **options)
        self.style = style

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, ended, cut, info = super().step(action)
        if ended or cut:
            last, told = obs, info
            obs, info = super().reset()
            info = {**info, self.style: last, "final_info": told}
        return obs, reward, ended, cut, info


class SelfResettingParallelEnv(ScriptedParallelEnv):
    """``style`` says whose infos tell of the last episode: each agent's own, or the common one, keyed by agent."""

    def __init__(self, *, style: str = "own", agent_num: int = 3, env_index: int = 0, **options: Any) -> None:
        super().__init__(agent_num=agent_num, env_index=env_index, **options)
        self.metadata = {**self.metadata, "autoreset_mode": "same_step"}
        self.style = style
        self.resets = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, terminations, truncations, infos = super().step(actions)
        if not self.agents:
            last, told = obs, infos
            obs, infos = super().reset()
            infos = hand_out(self.style, last, told, infos)
        return obs, rewards, terminations, truncations, infos


class SelfResettingKeyedEnv(KeyedEnv):
    metadata = {"autoreset": True}

    def __init__(
        self, *, style: str = "own", agent_num: int = 3, int_ids: bool = False, env_index: int = 0, **options: Any
    ) -> None:
        super().__init__(agent_num=agent_num, int_ids=int_ids, env_index=env_index, **options)
        self.style = style
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, actions: dict[Any, Any]) -> Any:
        obs, rewards, terminateds, truncateds, infos = super().step(actions)
        if terminateds["__all__"]:
            last, told = obs, infos
            obs, infos = super().reset()
            infos = hand_out(self.style, last, told, infos)
        return obs, rewards, terminateds, truncateds, infos


def hand_out(style: str, last: dict[Any, Any], told: dict[Any, Any], infos: dict[Any, Any]) -> dict[Any, Any]:
    """Add the last observations and infos to those of the reset."""
    rest = {who: told.pop(who) for who in list(told) if who not in last}
    common = {**rest.pop("__common__", {}), **rest}
    if style == "own":
        infos = {who: dict(info) for who, info in infos.items()}
        for who, obs in last.items():
            infos.setdefault(who, {}).update(final_obs=obs, final_info=told.get(who))
        if common:
            infos["__common__"] = {**infos.get("__common__", {}), "final_info": common}
        return infos
    return {**infos, "final_observation": last, "final_info": {**told, **common}}


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "single": (SingleEnv, SelfResettingSingleEnv, {"length": [3, 1, 5], "info_every": 2}),
    "parallel": (ScriptedParallelEnv, SelfResettingParallelEnv, {}),
    "parallel, masked": (ScriptedParallelEnv, SelfResettingParallelEnv, {"masked": True}),
    "keyed": (KeyedEnv, SelfResettingKeyedEnv, {"waits": waits}),
    "keyed, numbered": (KeyedEnv, SelfResettingKeyedEnv, {"waits": waits, "int_ids": True}),
}
STYLES = {"single": ("final_observation", "final_obs", "terminal_observation"), "": ("own", "common")}


def check_like_one_that_does_not(kind: str, style: str, backend: str) -> None:
    plain, own, options = KINDS[kind]
    settings: dict[str, Any] = {"num_envs": 2, "backend": backend, **options}
    with marlvec.make(plain, **settings) as envs:
        expected = play(envs, 40)
    with marlvec.make(own, style=style, **settings) as envs:
        for t, (got, wanted) in enumerate(zip(play(envs, 40), expected, strict=True)):
            assert not (differs := difference(got, wanted)), f"call {t}: {differs}"
        assert envs.get_attr("resets") == (1, 1)  # the one that was asked for
    assert sum(infos["_final_observation"].sum() for *_, infos in expected if "final_observation" in infos) > 10


@pytest.mark.checklist(54)
@pytest.mark.parametrize(("kind", "style"), [(kind, style) for kind in KINDS for style in STYLES.get(kind, STYLES[""])])
def test_all_is_as_if_marlvec_had_reset_it(kind: str, style: str) -> None:
    """Every array and info of whole episodes; and ``reset()`` was called once."""
    check_like_one_that_does_not(kind, style, "sync")


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick=3)
@pytest.mark.checklist(54)
@pytest.mark.parametrize(("kind", "style"), [("single", "final_obs"), ("parallel", "own"), ("keyed", "common")])
def test_it_is_not_reset_twice_in_a_worker_process_either(kind: str, style: str) -> None:
    check_like_one_that_does_not(kind, style, "async")


def test_without_a_final_info_all_of_the_info_is_of_the_episode_that_ended() -> None:
    class Terminal(SelfResettingSingleEnv):
        def step(self, action: Any) -> Any:
            obs, reward, ended, cut, info = SingleEnv.step(self, action)
            if ended or cut:
                info = {"terminal_observation": obs, "steps": self.world.t, "action_mask": np.zeros(5)}
                obs, _ = SingleEnv.reset(self)
            return obs, reward, ended, cut, info

    with marlvec.make(Terminal, 1, backend="sync", length=3) as envs:
        envs.reset(seed=0)
        for t in range(1, 10):
            obs, _, terminated, _, infos = envs.step(np.zeros((1, 1), np.int64))
            assert terminated.all() == (t % 3 == 0)
            assert decode(obs[0, 0]).t == t % 3
            assert "steps" not in infos
            if terminated.all():
                assert infos["final_info"]["steps"].tolist() == [3]
                assert set(infos["final_info"]) == {"steps", "_steps"}
                assert decode(infos["final_observation"][0, 0]).t == 3


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_final_observation_that_is_missing_is_not_invented(backend: str) -> None:
    class Silent(SelfResettingSingleEnv):
        def step(self, action: Any) -> Any:
            obs, reward, ended, cut, _ = SingleEnv.step(self, action)
            return SingleEnv.reset(self)[0] if ended else obs, reward, ended, cut, {"t": 1}

    with marlvec.make(Silent, 1, backend=backend, length=2) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros((1, 1), np.int64))
        words = (
            "expected one in its info under 'final_observation', 'final_obs', 'terminal_observation', got none, and "
            "keys ['t']"
        )
        with pytest.raises(ContractError, match=re.escape(words)):
            envs.step(np.zeros((1, 1), np.int64))


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_no_other_autoreset_mode_fits(backend: str, mode: str) -> None:
    with pytest.raises(ArgumentError, match=f"resets itself.*expected autoreset_mode='same_step', got '{mode}'"):
        marlvec.make(SelfResettingSingleEnv, 2, backend=backend, autoreset_mode=mode)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, "same_step", "SameStep", "same-step"])
def test_the_ways_to_say_so(mode: Any) -> None:
    class Saying(SelfResettingSingleEnv):
        has_auto_reset = None

        def __init__(self) -> None:
            super().__init__([2, 3])
            self.metadata = {**self.metadata, "autoreset_mode": mode}

    with marlvec.make(Saying, 1, backend="sync") as envs:
        play(envs, 12)
        assert envs.get_attr("resets") == (1,)


def test_a_wrapper_does_not_hide_it() -> None:
    with marlvec.make(SelfResettingSingleEnv, 1, backend="sync", wrappers=gymnasium.Wrapper) as envs:
        play(envs, 12)
        assert envs.get_attr("resets") == (1,)


@pytest.mark.parametrize("declared", [{"has_auto_reset": False}, {"metadata": {"autoreset_mode": "Disabled"}}, {}])
def test_an_env_without_declaration_is_reset(declared: dict[str, Any]) -> None:
    env = type("Plain", (SingleEnv,), {})

    def build() -> Any:
        one = env(3)
        for name, value in declared.items():
            setattr(one, name, value)
        return one

    with marlvec.make(build, 1, backend="sync") as envs:
        times = [decode(result[0][0, 0]).t for result in play(envs, 9)]
        assert times == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_another_moment_to_reset_itself_is_refused() -> None:
    def build() -> Any:
        env = SingleEnv()
        env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        return env

    with pytest.raises(ContractError, match=r"autoreset_mode is <AutoresetMode.NEXT_STEP.*'same_step'"):
        marlvec.make(build, 1, backend="sync")


class WithOwnMetadata(gymnasium.Env[Any, Any]):
    """Three steps an episode."""

    metadata: dict[str, Any] = {"name": "mine", "render_modes": []}
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.resets = 0, self.resets + 1
        return 0, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.t, 0.0, self.t == 3, False, {}


class WithoutMetadata(WithOwnMetadata):
    """Has those of its base."""


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", [WithOwnMetadata, WithoutMetadata])
def test_metadata_written_by_a_vector_env_does_not_count(
    monkeypatch: pytest.MonkeyPatch, kind: type[WithOwnMetadata], mode: AutoresetMode
) -> None:
    """Gymnasium's vector envs did that up to 1.2: all later envs of the class seemed to reset themselves."""
    monkeypatch.setitem(kind.metadata, "autoreset_mode", mode)
    with pytest.warns(ContractWarning, match=f"{mode.name}.* in the dict of a class.*it is ignored.*'same_step'"):
        envs = marlvec.make(lambda: gymnasium.wrappers.TimeLimit(kind(), 9), 1, backend="sync")
    with envs:
        assert [int(result[0][0, 0]) for result in play(envs, 7)] == [0, 1, 2, 0, 1, 2, 0, 1]
        assert envs.get_attr("resets") == (3,)


# Gymnasium up to 1.2 writes there.
@pytest.mark.filterwarnings("ignore:.*in the dict of a class:marlvec.errors.ContractWarning")
@pytest.mark.parametrize("registered", ["CartPole-v1", "FrozenLake-v1"])
def test_envs_that_were_in_gymnasiums_own_vector_env_are_taken(registered: str) -> None:
    gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(registered)]).close()
    for backend in ("sync", "async"):
        marlvec.make(registered, 1, backend=backend).close()


def test_a_turn_based_env_that_resets_itself_is_refused() -> None:
    def build() -> Any:
        env = TurnEnv()
        env.has_auto_reset = True
        return env

    with pytest.raises(ContractError, match="turn-based and declares that it resets itself"):
        marlvec.make(build, 1, backend="sync")


def test_a_missing_final_state_raises() -> None:
    with pytest.raises(ArgumentError, match="resets itself, so the state at the end of an episode cannot be read"):
        marlvec.make(SelfResettingParallelEnv, 1, backend="sync", state=True, env_kwargs={"state": True})


def test_a_limit_of_steps_resets_it_and_its_own_ends_count_anew() -> None:
    with marlvec.make(partial(SelfResettingSingleEnv, [3, 9]), 1, backend="sync", max_episode_steps=5) as envs:
        envs.reset(seed=0)
        seen = []
        for _ in range(3 + 5 + 3):
            _, _, terminated, truncated, _ = envs.step(np.zeros((1, 1), np.int64))
            seen.append("t" if terminated.all() else "c" if truncated.all() else ".")
        assert "".join(seen) == "..t....c..t"
        assert envs.get_attr("resets") == (2,)


def test_an_end_for_others_than_the_env_itself_resets_it() -> None:
    script = Script(births=[0, 0], deaths=[2, 4], ends=["terminated", "truncated"])
    build = partial(SelfResettingParallelEnv, script=script, agent_num=2)
    with marlvec.make(build, 1, backend="sync", done_on="any") as envs:
        envs.reset(seed=0)
        for t in range(1, 7):
            obs, _, terminated, truncated, _ = envs.step(np.ones((1, 2), np.int64))
            assert terminated.tolist() == [[t % 2 == 0, False]]
            assert truncated.tolist() == [[False, t % 2 == 0]]
            assert decode(obs[0, 1]).t == t % 2
        assert envs.get_attr("resets") == (4,)


def test_it_can_be_padded() -> None:
    """The rows of the padded observations, final ones too."""
    with marlvec.make(SelfResettingPair, 1, backend="sync", pad=True) as envs:
        envs.reset(seed=0)
        for t in range(1, 10):
            obs, _, _, truncated, infos = envs.step(envs.random_action(seed=t))
            assert truncated.all() == (t % 3 == 0)
            assert obs.tolist() == [[[t % 3, 0.0], [t % 3, t % 3]]]
            if truncated.all():
                assert infos["final_observation"].tolist() == [[[3.0, 0.0], [3.0, 3.0]]]


class SelfResettingPair:
    metadata = {"autoreset_mode": "same_step", "name": "pair"}
    possible_agents = ["ann", "bob"]
    agents = possible_agents

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(0, 9, (1 if agent == "ann" else 2,), np.float64)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(1 if agent == "ann" else 2)

    def _observe(self) -> dict[str, Any]:
        return {agent: np.full(self.observation_space(agent).shape, float(self.t)) for agent in self.agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t = 0
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        last = self._observe()
        over = dict.fromkeys(self.agents, self.t == 3)
        infos: dict[str, Any] = {}
        if self.t == 3:
            self.t = 0
            infos = {"final_observation": last}
        never, rewards = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, 0.0)
        return self._observe(), rewards, never, over, infos


def test_the_flags_of_all_agents_end_an_episode_of_a_keyed_env_without_all() -> None:
    class Quiet(SelfResettingKeyedEnv):
        def step(self, actions: dict[Any, Any]) -> Any:
            obs, rewards, terminateds, truncateds, infos = super().step(actions)
            return obs, rewards, {**terminateds, "__all__": False}, truncateds, infos

    script = Script(births=[0, 0], deaths=[1, 3], ends=["terminated", "truncated"])
    with marlvec.make(partial(Quiet, script=script, agent_num=2), 1, backend="sync") as envs:
        envs.reset(seed=0)
        for t in range(1, 10):
            obs, _, terminated, truncated, infos = envs.step(np.ones((1, 2), np.int64))
            assert terminated.tolist() == [[t % 3 == 1, False]]
            assert truncated.tolist() == [[False, t % 3 == 0]]
            assert decode(obs[0, 1]).t == t % 3
            if t % 3 == 0:
                assert [decode(row).t for row in infos["final_observation"][0]] == [1, 3]
        assert envs.get_attr("resets") == (1,)
