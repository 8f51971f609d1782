"""View requirements and the state of recurrent policies, against a list per agent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.helpers.samples import Space, pairs_of, rows_of, same_tree, vectors

OBS = spaces.Dict({"a": vectors(2, dtype=np.float32), "b": spaces.Discrete(3, start=2)})
ACTIONS = spaces.Tuple([spaces.Discrete(4, start=1), spaces.Box(2, 3, (2,), np.float32)])
HIDDEN = {"h": np.full(3, 0.5, np.float32), "c": (np.array(7),)}


def bound(piece: Any, space: Space = OBS, actions: Space | None = ACTIONS) -> Any:
    c.AgentPipeline([piece]).bind(space, (), actions)
    return piece


def test_fills() -> None:
    rows = rows_of([(0, 0)], {"a": np.ones((1, 2), np.float32), "b": np.array([3])}, t=np.array([4]))
    shown = bound(c.View("x", "obs", "-1:0", fill=9))(rows)["x"]
    assert (shown["a"].tolist(), shown["b"].tolist()) == ([[[9, 9], [1, 1]]], [[9, 3]])
    shown = bound(c.View("x", "obs", -1, fill={"a": np.array([5, 6]), "b": 1}))(rows)["x"]
    assert (shown["a"].tolist(), shown["b"].tolist()) == ([[5, 6]], [1])
    assert bound(c.View("x", "t", -1, fill=-1))(rows)["x"].tolist() == [-1]
    assert bound(c.View("x", "actions", -2, fill=(3, 2.5)))(rows)["x"][1].tolist() == [[2.5, 2.5]]
    for fill, match in (
        (-1.5, "fill: -1.5 does not fit dtype int64"),
        ({"a": 1}, "fill: expected one row's value of 'obs': expected a dict with keys"),
        ({"a": np.zeros(3), "b": 0}, r"a value of shape \(3,\) does not fit shape \(2,\)"),
    ):
        with pytest.raises(ArgumentError, match=match):
            bound(c.View("x", "obs", -1, fill=fill))


def test_a_loaded_history_waits_for_its_column_and_is_reset_meanwhile() -> None:
    rows = rows_of(pairs_of(2, 1), np.zeros((2, 1)), t=np.array([5, 6]))
    one = c.View("x", "t", -1)
    one(rows)
    two = c.View("x", "t", -1)
    two.load_state_dict(one.state_dict())
    two.reset([1])
    three = c.View("x", "t", -1)
    three.load_state_dict(two.state_dict())
    for piece in (two, three):
        assert piece(rows)["x"].tolist() == [5, 0]


def test_a_history_loaded_between_a_row_and_its_answer_takes_the_answer_in() -> None:
    rows = rows_of(pairs_of(2, 1), np.zeros((2, 1)))
    one, two = c.View("x", "logp", "-2:-1", 0.0), c.View("x", "logp", "-2:-1", 0.0)
    one(rows)
    two.load_state_dict(one.state_dict())
    for piece in (one, two):
        piece.on_policy_output(rows.replace(logp=np.array([1.0, 2.0])))
    assert one(rows)["x"].tolist() == two(rows)["x"].tolist() == [[0, 1], [0, 2]]


def test_refusals_of_views() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 1)))
    with pytest.raises(
        ContractError, match="at shift 0, but the rows have only .*a policy's column is known from shift -1 on"
    ):
        c.View("x", "logp", 0)(rows)
    for fill in (None, "repeat"):
        with pytest.raises(ContractError, match="if it is one of the policy's, give fill"):
            c.View("x", "logp", -1, fill)(rows)
    piece = c.View("x", "logp", -1, 0.0)
    with pytest.raises(ContractError, match="which neither the rows have nor the policy's output"):
        piece.on_policy_output(piece(rows))
    with pytest.raises(ContractError, match=r"expected 'logp' as float64 of shape \(1,\), got int64 of shape \(1, 2\)"):
        piece.on_policy_output(rows.replace(logp=np.zeros((1, 2), int)))
    with pytest.raises(ContractError, match="adds column 'x', but the rows have one"):
        piece(rows.replace(x=np.zeros(1)))
    assert c.View("x", "obs", -1).state_dict() == c.View("x", "t", -1).state_dict() == {}
    with pytest.raises(ArgumentError, match="expected the history of column 'rewards'"):
        c.View("x", "rewards", -1).load_state_dict({"from_policy": True, "history": {}})


def test_refusals_of_states() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 1)))
    piece = c.RnnState(HIDDEN)
    with pytest.raises(ContractError, match="needs the column 'state_out'.*the policy returns it as"):
        piece.on_policy_output(rows)
    state = piece.state_dict()
    for wrong, match in (
        ({"h": np.zeros((1, 3))}, "expected a dict with keys"),
        ({"h": np.zeros((1, 3)), "c": (np.array([0.5]),)}, "expected 'state_out' as int64 of shape"),
        ({"h": np.zeros((1, 4)), "c": (np.array([1]),)}, "got float64 of shape"),
    ):
        with pytest.raises(ContractError, match=match):
            piece.on_policy_output(rows.replace(state_out=wrong))
    same_tree(piece.state_dict(), state)
    with pytest.raises(ContractError, match="adds column 'state_in', but the rows have one"):
        piece(piece(rows))
    with pytest.raises(ContractError, match="expected numbers"):
        c.RnnState({"h": "x", "c": None})
    assert c.RnnState(np.zeros(2), "memory_in", "memory").params().keys() == {"initial", "column", "source"}
