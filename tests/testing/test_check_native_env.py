"""check_native_env: passes what is equal, and names and shortens what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

pytest.importorskip("numba", reason="the extra `native` is not installed")

from marlvec import VectorEnv
from marlvec.errors import ArgumentError, ContractError
from marlvec.native import NativeEnv
from marlvec.native.kernels import bounded, kernel
from marlvec.testing import NativeMatch, check_native_env

AGENTS = ("left", "right")


class Sums(ParallelEnv[str, Any, Any]):
    """Adds up what is chosen, from a number drawn at the reset; over at ten."""

    metadata = {"name": "sums_v0"}
    possible_agents = list(AGENTS)
    seen, moves = Box(-np.inf, np.inf, (2,), np.float32), Discrete(3)

    def observation_space(self, agent: str) -> Any:
        return self.seen

    def action_space(self, agent: str) -> Any:
        return self.moves

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.agents = list(AGENTS)
        self.sum, self.twos = int(self.rng.integers(5)), 0
        return self.look(), {agent: {} for agent in AGENTS}

    def look(self) -> Any:
        return {agent: np.array([self.sum, 0.0], np.float32) for agent in AGENTS}

    def step(self, actions: Any) -> Any:
        self.sum += sum(map(int, actions.values()))
        self.twos += int(actions["right"]) == 2
        over = self.sum >= 10
        self.agents = [] if over else list(AGENTS)
        flags = dict.fromkeys(AGENTS, over), dict.fromkeys(AGENTS, False)
        return self.look(), {a: float(actions[a]) for a in AGENTS}, *flags, {a: {} for a in AGENTS}


class NativeSums(NativeEnv):
    """The same; ``fault`` spoils one thing."""

    name = "sums_v0"
    metadata = Sums.metadata
    agents = AGENTS
    observation_spaces = (Sums.seen,) * 2
    action_spaces = (Sums.moves,) * 2
    state_names: tuple[str, ...] = ("sum", "twos")
    fault = ""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.sum, self.twos = np.zeros((2, num_envs), np.int64)

    def reset(self, ids: Any) -> None:
        _reset(ids, self.rng, self.sum, self.twos, self.rows.obs[0][0], self.fault == "draws twice")
        self.set_alive(ids)
        if self.fault == "envs are mixed up" and len(ids) == self.num_envs > 2:
            self.sum[-1] = self.sum[0]

    def step(self, ids: Any) -> None:
        r = self.rows
        _step(ids, self.sum, self.twos, r.actions[0][0], r.obs[0][0], r.reward, r.terminated, r.alive, r.acting, r.done)
        if self.fault == "a reward at two twos":
            r.reward[ids, 1] += self.twos[ids] == 2
        if self.fault == "minus zero":
            r.obs[0][0][ids, 1, 1] *= -1


@kernel
def _reset(ids: Any, rng: Any, sums: Any, twos: Any, obs: Any, twice: bool) -> None:
    for i in ids:
        sums[i] = bounded(rng, i, 5)
        if twice:
            bounded(rng, i, 5)
        twos[i] = 0
        obs[i] = 0
        obs[i, :, 0] = sums[i]


@kernel
def _step(
    ids: Any,
    sums: Any,
    twos: Any,
    actions: Any,
    obs: Any,
    reward: Any,
    terminated: Any,
    alive: Any,
    acting: Any,
    done: Any,
) -> None:
    for i in ids:
        sums[i] += actions[i].sum()
        twos[i] += actions[i, 1] == 2
        for a in range(2):
            reward[i, a] = actions[i, a]
        obs[i, :, 0] = sums[i]
        if sums[i] >= 10:
            terminated[i] = True
            alive[i] = False
            acting[i] = False
            done[i] = True


def spoiled(fault: str) -> Callable[[int], NativeEnv]:
    return type("Spoiled", (NativeSums,), {"fault": fault, "state_names": ()})


def test_what_is_equal_passes() -> None:
    told = check_native_env(NativeSums, Sums, seeds=(3,), progress=True)
    assert isinstance(told, NativeMatch)
    assert told.episodes >= 3 * 3 * 3
    assert told.numbers > told.env_steps * 10


FAULTS = [
    ("draws twice", r"obs: env \d, agent 'left', index 0, .*: expected \d.0 \(the reference's\), got \d.0"),
    (
        "minus zero",
        r"obs: env 0, agent 'right', index 1, step 1 of seed 0, autoreset_mode='same_step': expected 0.0 .*got -0.0",
    ),
    ("a reward at two twos", r"rewards: env \d, agent 'right', step \d+ of seed 0, .*: expected 2.0 .*, got 3.0"),
]


@pytest.mark.parametrize(("fault", "text"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_what_differs_is_named(fault: str, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        check_native_env(spoiled(fault), Sums)


def test_the_calls_that_lead_there_are_few() -> None:
    with pytest.raises(ContractError) as caught:
        check_native_env(spoiled("a reward at two twos"), Sums, seeds=[5], autoreset_modes=["next_step"])
    lines = str(caught.value).splitlines()
    assert lines[2].startswith("  reset(seed=")
    assert lines[3:] == ["  step([0, 2])", "  step([0, 2])", "  rewards: agent 'right': expected 2.0, got 3.0"]


@pytest.mark.slow("plays many episodes")
def test_a_draw_too_many_shows_in_the_next_episode() -> None:
    with pytest.raises(ContractError) as caught:
        check_native_env(spoiled("draws twice"), Sums, autoreset_modes=["disabled"])
    lines = str(caught.value).splitlines()
    assert [line.split("(")[0] for line in lines[2:4]] == ["  reset", "  reset"]
    assert len(lines) <= 7


@pytest.mark.slow("plays many episodes")
def test_envs_that_change_one_another_are_told_apart() -> None:
    with pytest.raises(ContractError, match="env 2 was asked leads to no difference in an env alone"):
        check_native_env(spoiled("envs are mixed up"), Sums)


@pytest.mark.slow("plays many episodes")
def test_a_state_that_leaves_something_out_is_found() -> None:
    class Forgetful(NativeSums):
        state_names = ()

        def state_arrays(self) -> dict[str, Any]:
            return {name: array for name, array in super().state_arrays().items() if name != "sum"}

    with pytest.raises(ContractError, match=r"(?s)obs: .*get_state\(\), set_state\(\) in a new one"):
        check_native_env(Forgetful, Sums, episodes=40)


@pytest.mark.slow("plays many episodes")
def test_who_does_not_say_what_its_state_is_is_checked_without() -> None:
    class Silent(NativeSums):
        pass

    assert check_native_env(Silent, Sums, episodes=20).episodes


@pytest.mark.slow("plays many episodes")
def test_actions_may_be_a_function() -> None:
    def twos(envs: VectorEnv, rng: np.random.Generator) -> Any:
        return np.full((envs.num_envs, 2), 2)

    assert check_native_env(NativeSums, Sums, actions=twos).env_steps
    with pytest.raises(ContractError, match="agent 'right', step 2"):
        check_native_env(spoiled("a reward at two twos"), Sums, actions=twos)


@pytest.mark.slow("plays many episodes")
def test_a_time_limit_is_for_both() -> None:
    assert check_native_env(NativeSums, Sums, max_episode_steps=2, episodes=5).episodes


def test_other_spaces_are_refused() -> None:
    class Wider(NativeSums):
        state_names = ()
        action_spaces = (Discrete(4),) * 2

    with pytest.raises(ContractError, match="check_native_env: sums_v0: .*Discrete"):
        check_native_env(Wider, Sums)


def test_envs_that_never_end_are_refused() -> None:
    def nothing(envs: VectorEnv, rng: np.random.Generator) -> Any:
        return np.zeros((envs.num_envs, 2), np.int64)

    with pytest.raises(ContractError, match="every env to end one within 50 steps"):
        check_native_env(NativeSums, Sums, actions=nothing, max_steps=50)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("num_envs: expected an int of at least 2, got 1", {"num_envs": 1}),
    ("episodes: expected an int of at least 1, got 0", {"episodes": 0}),
    ("max_steps: expected an int of at least 1, got 1.5", {"max_steps": 1.5}),
    ("actions: expected 'random' or a function, got 'best'", {"actions": "best"}),
    ("autoreset_modes: expected some of .*, got 'never'", {"autoreset_modes": ["never"]}),
    ("native: expected a NativeEnv, got Sums", {}),
]


@pytest.mark.parametrize(("text", "options"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_arguments_are_told(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=text):
        check_native_env(lambda num_envs: Sums(), Sums, **options)  # type: ignore[arg-type, return-value]  # on purpose
