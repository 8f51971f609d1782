"""Scripts that are written for one agent at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from marlvec.collect import Collector
from marlvec.connectors import FilterRows, Rows
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies import Memory, RandomPolicy, ScriptedPolicy
from tests.collect.players import KINDS, MODES, sync

OBS = Box(-1, 1, (2,), np.float32)
FIVE = Discrete(5)


def made(script: Any, space: Any = FIVE, seed: int = 0) -> ScriptedPolicy:
    policy = ScriptedPolicy(script)
    policy.setup(OBS, space, seed=seed)
    return policy


def rows(n: int, t: int = 0, **columns: Any) -> Rows:
    ids = np.arange(n)
    obs = np.stack([ids, ids * 10], axis=1).astype(np.float32)
    given = {"env_id": ids // 2, "agent_index": ids % 2, "obs": obs, "t": np.full(n, t), "eps_id": ids // 2}
    return Rows({**given, **columns})


def test_actions_depend_on_the_agents_observation_name_and_memory() -> None:
    asked = []

    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        memory["sum"] = memory.get("sum", 0) + int(obs[1])
        asked.append((agent, t, memory["sum"], type(agent), type(t)))
        return int(obs[0]) % 5

    policy = made(script)
    for t in range(3):
        actions = policy.act(rows(4, t))
        assert actions.dtype == np.int64
        assert actions.tolist() == [0, 1, 2, 3]
    assert asked == [(i % 2, t, 10 * i * (t + 1), int, int) for t in range(3) for i in range(4)]


@pytest.mark.mostly_slow("collects whole runs", quick=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_memories_begin_anew_with_each_episode_and_never_in_between(kind: str, mode: str) -> None:
    """Whatever agents come late, go early, wait for their turn or are left out."""

    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        turns.append((t, memory.setdefault("turns", 0)))
        memory["turns"] += 1
        allowed = np.arange(5) if memory.action_mask is None else np.flatnonzero(memory.action_mask)
        return int(allowed[0])

    turns: list[tuple[int, int]] = []
    with sync(kind, 3, 3, mode) as envs:
        collector = Collector(envs, ScriptedPolicy(script), seed=1)
        for amount in (40, 1, 7, 60):
            collector.collect(env_steps=amount)
        assert collector.metrics.episodes_total > 6
    assert len(turns) == collector.metrics.agent_steps
    assert all(t == remembered for t, remembered in turns)


def test_a_memory_is_new_though_the_episodes_first_rows_were_filtered() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        assert memory.setdefault("episode", int(obs[0])) == int(obs[0])
        return 0

    policy = made(script)
    first = rows(2, 0, eps_id=np.array([5, 5]), obs=np.zeros((2, 2)))
    later = rows(2, 3, eps_id=np.array([6, 6]), obs=np.ones((2, 2)))
    for part in (first, first.replace(t=np.full(2, 1)), later):
        policy.act(part)
    with sync("parallel", 2, 2) as envs:
        keep = FilterRows(lambda rows: ~rows.first | rows.last, noop=0)
        turns: list[int] = []
        counts = ScriptedPolicy(lambda obs, agent, t, memory: turns.append(memory.setdefault("n", t)) or 0)
        Collector(envs, counts, agent_connectors=[keep], seed=0).collect(env_steps=60)
        assert set(turns) == {0}  # `t` counts decisions, and the no-op was none


def test_random_numbers_belong_to_seed_env_agent_and_episode() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        return int(memory.rng.integers(10**9))

    space = Discrete(10**9)
    together = made(script, space, seed=3).act(rows(6))
    alone = made(script, space, seed=3).act(rows(6).take(np.array([4])))
    assert together[4] == alone[0]
    assert len(set(together.tolist())) == 6
    assert made(script, space, seed=4).act(rows(6)).tolist() != together.tolist()
    again = made(script, space, seed=3)
    again.act(rows(6))
    assert again.act(rows(6, 1)).tolist() != together.tolist()
    again.reseed(3)
    assert again.act(rows(6)).tolist() == together.tolist()


def test_actions_of_any_space_are_stacked() -> None:
    space = Dict(
        go=Box(-1, 1, (2,), np.float32),
        pair=Tuple((Discrete(3, start=-1), MultiDiscrete([2, 3]))),
        press=MultiBinary(2),
        say=Text(5),
    )

    def script(obs: Any, agent: int, t: int, memory: Memory) -> Any:
        return {"go": [agent, 0.5], "pair": (agent - 1, [1, 2]), "press": [0, 1], "say": "ab"[agent]}

    out = made(script, space).act(rows(3))
    np.testing.assert_array_equal(out["go"], np.array([[0, 0.5], [1, 0.5], [0, 0.5]], np.float32), strict=True)
    assert out["pair"][0].tolist() == [-1, 0, -1]
    assert out["pair"][1].tolist() == [[1, 2]] * 3
    assert out["press"].dtype == np.int8
    assert out["say"].tolist() == ["a", "b", "a"]


@pytest.mark.parametrize("space", [Box(0, 255, (2,), np.uint8), Box(0, 1, (2,), np.bool_)], ids=str)
def test_ints_of_a_list_that_the_dtype_of_the_space_can_hold_are_an_action(space: Box) -> None:
    actions = made(lambda obs, agent, t, memory: [0, 1], space).act(rows(2))
    assert actions.dtype == space.dtype
    assert actions.tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("bad", [None, 1.5, [1], "left", {"a": 1}, [[1], [1, 2]], 2**70])
def test_a_wrong_action_names_the_script_the_env_and_the_agent(bad: Any) -> None:
    def clumsy(obs: Any, agent: int, t: int, memory: Memory) -> Any:
        return bad if obs[0] == 3 else 1

    with pytest.raises(ContractError, match=r"ScriptedPolicy\(clumsy\).*env 1, agent 1.*Discrete"):
        made(clumsy).act(rows(4))
    with pytest.raises(ContractError, match="env 1, agent 1"):
        made(lambda obs, agent, t, memory: 300 if obs[0] == 3 else 1, Box(-128, 127, (), np.int8)).act(rows(4))


def test_a_scripts_exception_names_the_agent() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        return 1 // int(obs[0] - 2)

    with pytest.raises(ZeroDivisionError) as caught:
        made(script).act(rows(4, 7))
    assert "env 1, agent 0, decision 7" in caught.value.__notes__[0]
    with pytest.raises(ArgumentError, match="expected a function"):
        ScriptedPolicy(3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(StateError, match=r"setup\(\)"):
        ScriptedPolicy(script).act(rows(1))


def test_a_copy_from_its_state_goes_on_alike() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        memory.setdefault("seen", []).append(np.asarray(obs))
        memory["last"] = (agent, {"t": t})
        return int(memory.rng.integers(1000)) + len(memory["seen"])

    one, other = made(script, Discrete(10**6), seed=5), made(script, Discrete(10**6), seed=6)
    one.act(rows(4))
    state = one.state_dict()
    ahead = one.act(rows(4, 1))
    other.load_state_dict(state)
    assert other.act(rows(4, 1)).tolist() == ahead.tolist()
    other.load_state_dict(state)  # neither of them has changed it
    assert other.act(rows(4, 1)).tolist() == ahead.tolist()
    with pytest.raises(ArgumentError, match="state of a ScriptedPolicy"):
        other.load_state_dict(RandomPolicy(1).state_dict())
