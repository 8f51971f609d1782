from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Tuple
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors import AgentTable
from marlvec.errors import ArgumentError
from tests.connectors.helpers.samples import bound, vectors

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), unique=True, max_size=8)
STEPS = st.lists(st.one_of(PAIRS, st.lists(st.integers(0, 8), max_size=3).map(set)), max_size=8)


@given(steps=STEPS)
def test_it_is_a_dict_of_env_and_agent(steps: list[list[tuple[int, int]] | set[int]]) -> None:
    """Against a dict, over writes and resets of any subset in any order; and its state is exact."""
    table, value = AgentTable((2,), np.float32, fill=-1), 0
    model: dict[tuple[int, int], float] = {}
    for step in steps:
        if isinstance(step, set):
            table.reset(sorted(step))
            model = {pair: v for pair, v in model.items() if pair[0] not in step}
        else:
            env_id, agent_index = np.array(step, np.int64).reshape(-1, 2).T
            new = np.arange(value, value + len(step), dtype=np.float32)
            table.set(env_id, agent_index, np.stack([new, -new], 1))
            model.update(zip(step, new.tolist(), strict=True))
            value += len(step)
        copy = AgentTable((2,), np.float32, fill=-1)
        copy.load_state_dict(table.state_dict())
        everyone = np.array([(e, a) for e in range(7) for a in range(5)])[::-1]
        for each in (table, copy):
            got = each.get(*everyone.T)
            want = [(v, -v) if (v := model.get(tuple(pair))) is not None else (-1, -1) for pair in everyone.tolist()]
            assert got.tolist() == [list(w) for w in want]


def test_the_state_is_a_copy() -> None:
    table = AgentTable((), np.int64)
    one = np.array([1])
    table.set(one, one, 5)
    state = table.state_dict()
    table.set(one, one, 6)
    other = AgentTable((), np.int64)
    other.load_state_dict(state)
    other.set(one, one, 7)
    assert state["values"].tolist() == [[0, 0], [0, 5]]


def test_reset_of_all_and_of_envs_never_seen() -> None:
    table = AgentTable((), np.int64, fill=3)
    table.reset([0, 9])
    table.set(np.array([0, 1]), np.array([0, 0]), [8, 9])
    table.reset(np.array([9]))
    assert table.get(np.array([0, 1]), np.array([0, 0])).tolist() == [8, 9]
    table.reset()
    assert table.get(np.array([0, 1]), np.array([0, 0])).tolist() == [3, 3]


def test_refusals() -> None:
    table = AgentTable((2,), np.float32)
    with pytest.raises(
        ArgumentError, match=r"slots of agents: values: expected float32 of \(any, any, 2\), got float32 of \(1, 1, 3\)"
    ):
        table.load_state_dict({"values": np.zeros((1, 1, 3), np.float32)})
    with pytest.raises(ArgumentError, match="negative"):
        table.get(np.array([-1]), np.array([0]))
    assert repr(table) == "AgentTable((2,), float32; 0 envs, 0 agents)"
    one, two = (bound(c.FrameStack(2), space) for space in (vectors(2), Tuple([vectors(2), vectors(3)])))
    for pipeline, wrong, text in (
        (two, one, "FrameStack: frames: expected 2 leaves, got 1"),
        (one, bound(c.FrameStack(2), vectors(3)), "FrameStack: frames: values: expected float32"),
        (one, bound(c.DelayObs(1), vectors(2)), r"missing \['started', 'frames'\], unknown \['count', 'rings'\]"),
    ):
        with pytest.raises(ArgumentError, match=text):
            pipeline[0].load_state_dict(wrong[0].state_dict())
