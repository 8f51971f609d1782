"""View requirements and the state of recurrent policies, against a list per agent."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline
from marlvec.connectors._support.shifts import Shift, parse_shifts
from marlvec.connectors.agent.memory.rnn_state import RnnState
from marlvec.connectors.agent.memory.view import View
from marlvec.connectors.connector import AgentConnector
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.trees import map_tree
from tests.connectors.helpers.episodes import Episodes, Tick, answered, rows_at, ticks
from tests.connectors.helpers.samples import Space, pairs_of, rows_of, same_tree, vectors

OBS = spaces.Dict({"a": vectors(2, dtype=np.float32), "b": spaces.Discrete(3, start=2)})
ACTIONS = spaces.Tuple([spaces.Discrete(4, start=1), spaces.Box(2, 3, (2,), np.float32)])
NO_OBS = {"a": np.zeros(2, np.float32), "b": np.array(2)}
NO_ACTION = (np.array(1), np.full(2, 2, np.float32))
HIDDEN = {"h": np.full(3, 0.5, np.float32), "c": (np.array(7),)}


def bound(piece: Any, space: Space = OBS, actions: Space | None = ACTIONS) -> Any:
    AgentPipeline([piece]).bind(space, (), actions)
    return piece


@st.composite
def shifts(draw: st.DrawFn, last: int) -> Shift:
    """An int, a list or a range, from -5 to ``last``."""
    start = draw(st.integers(-5, last))
    stop = draw(st.integers(start, last))
    step = draw(st.integers(1, 3))
    several = draw(st.lists(st.integers(-5, last), min_size=1, unique=True))
    return draw(st.sampled_from([start, f"{start}:{stop}", f"{start}:{stop}:{step}", several]))


def hidden(tick: Tick, rows: Any) -> Any:
    """A policy's own column: numbers of the row's pair and tick."""
    size = rows.env_id * 100 + rows.agent_index * 10 + tick.number
    return {"h": np.repeat(size[:, None], 3, 1).astype(np.float32), "c": (size,)}


SOURCES: dict[str, tuple[Any, Any, int]] = {
    "obs": (NO_OBS, None, 0),
    "rewards": (np.array(0.0), None, 0),
    "speed": (np.zeros(2, np.int16), None, 0),  # a column that a connector before it added
    "actions": (NO_ACTION, None, -1),
    "hidden": (HIDDEN, HIDDEN, -1),
}


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(90)
@given(data=st.data(), source=st.sampled_from(list(SOURCES)), game=ticks(), cut=st.integers(0, 9))
def test_a_view_shows_what_the_agents_own_rows_held(
    data: st.DataObject, source: str, game: list[Tick], cut: int
) -> None:
    """Any shifts of any column, of the rows and of the policy, its actions and trees too, for every agent of every env.

    Against a list of all the agent's rows of its episode, of which the shifts pick. A second one takes over the state
    after any of the ticks, mid-episode, into a fresh view, and goes on the same to the bit.
    """
    blank, fill, last = SOURCES[source]
    spec = data.draw(shifts(last))
    repeat = last == 0 and data.draw(st.booleans())
    make = lambda: bound(View("seen", source, spec, "repeat" if repeat else fill))  # noqa: E731  # named for use twice
    piece = make()
    model = Episodes()
    for tick in game:
        rows = rows_at(tick, OBS)
        rows = rows.replace(speed=np.stack([rows.env_id - 3, rows.agent_index + tick.number], 1).astype(np.int16))
        rows = rows.replace(rewards=np.nan_to_num(rows.rewards, nan=0.25))
        if tick.number == cut:
            again = make()
            if state := piece.state_dict():
                again.load_state_dict(deepcopy(state))
                same_tree(again.state_dict(), state)
            piece = again
        out = piece(rows)
        picked = parse_shifts(spec)
        for i, pair in enumerate(tick.pairs):
            past = model.begin(pair, first=tick.first[i])
            if last == 0:
                past.append(map_tree(lambda leaf, i=i: leaf[i], rows[source]))
                known = dict(enumerate(reversed(past)))
            else:
                known = dict(enumerate(reversed(past), 1))
            wanted = [known.get(-shift, past[0] if repeat else blank) for shift in picked]
            got = map_tree(lambda leaf, i=i: leaf[i], out["seen"])
            for j, value in enumerate(wanted):
                same_tree(got if isinstance(spec, int) else map_tree(lambda leaf, j=j: leaf[j], got), value)
            if not isinstance(spec, int):
                assert all(len(leaf) == len(picked) for _, leaf in _leaves(got))
        if (answer := answered(out, tick, ACTIONS, hidden=hidden(tick, rows))) is not None:
            piece.on_policy_output(answer)
            for i, pair in enumerate(zip(answer.env_id.tolist(), answer.agent_index.tolist(), strict=True)):
                if last == -1:
                    model.values[pair].append(map_tree(lambda leaf, i=i: np.array(leaf[i]), answer[source]))
        piece.reset(tick.resets)
        model.reset(tick.resets)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    map_tree(lambda leaf: found.append(("", leaf)), tree)
    return found


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(89)
@given(game=ticks(), tuples=st.booleans(), cut=st.integers(0, 9))
def test_the_state_of_a_recurrent_policy_is_its_last_output_per_agent(game: list[Tick], tuples: bool, cut: int) -> None:
    """The initial one at an episode's start, then what it returned for that agent, in whatever rows it came.

    A batch of all gives what one piece per env gives that only ever sees its own rows, in the opposite order. Taken
    over mid-episode by a fresh one, it goes on the same.
    """
    initial = tuple(HIDDEN.values()) if tuples else HIDDEN
    piece = RnnState(initial)
    apart = {env: RnnState(initial) for env in range(4)}
    model = Episodes()
    for tick in game:
        if tick.number == cut:
            again = RnnState(initial)
            again.load_state_dict(piece.state_dict())
            piece = again
        rows = rows_at(tick, OBS)
        out = piece(rows)
        state = out["state_in"]
        for i, pair in enumerate(tick.pairs):
            past = model.begin(pair, first=tick.first[i])
            same_tree(map_tree(lambda leaf, i=i: leaf[i], state), past[-1] if past else initial)
        given_out = hidden(tick, rows)
        returned = tuple(given_out.values()) if tuples else given_out
        answer = answered(out, tick, ACTIONS, state_out=returned)
        for env, alone in apart.items():
            mine = np.flatnonzero(rows.env_id == env)[::-1]
            same_tree(alone(rows.take(mine))["state_in"], out.take(mine)["state_in"])
            if answer is not None:
                alone.on_policy_output(answer.take(np.flatnonzero(answer.env_id == env)[::-1]))
            alone.reset(tick.resets)
        if answer is not None:
            piece.on_policy_output(answer)
            for i, pair in enumerate(zip(answer.env_id.tolist(), answer.agent_index.tolist(), strict=True)):
                model.values[pair].append(map_tree(lambda leaf, i=i: np.array(leaf[i]), answer["state_out"]))
        piece.reset(tick.resets)
        model.reset(tick.resets)


def test_fills() -> None:
    rows = rows_of([(0, 0)], {"a": np.ones((1, 2), np.float32), "b": np.array([3])}, t=np.array([4]))
    shown = bound(View("x", "obs", "-1:0", fill=9))(rows)["x"]
    assert (shown["a"].tolist(), shown["b"].tolist()) == ([[[9, 9], [1, 1]]], [[9, 3]])
    shown = bound(View("x", "obs", -1, fill={"a": np.array([5, 6]), "b": 1}))(rows)["x"]
    assert (shown["a"].tolist(), shown["b"].tolist()) == ([[5, 6]], [1])
    assert bound(View("x", "t", -1, fill=-1))(rows)["x"].tolist() == [-1]
    assert bound(View("x", "actions", -2, fill=(3, 2.5)))(rows)["x"][1].tolist() == [[2.5, 2.5]]
    for fill, match in (
        (-1.5, "fill: -1.5 does not fit dtype int64"),
        ({"a": 1}, "fill is not one row's 'obs': expected a dict with keys"),
        ({"a": np.zeros(3), "b": 0}, r"a value of shape \(3,\) does not fit shape \(2,\)"),
    ):
        with pytest.raises(ArgumentError, match=match):
            bound(View("x", "obs", -1, fill=fill))


class Doubler(AgentConnector):
    def __call__(self, rows: Any) -> Any:
        return rows.replace(double=rows.rewards * 2)


def test_it_sees_columns_that_connectors_before_it_added() -> None:
    pipeline = AgentPipeline([Doubler(), View("trace", "double", [-1, 0]), View("back", "trace", -1)])
    pipeline.bind(vectors(1))
    for reward in (1.0, 2.0, 3.0):
        out = pipeline(rows_of([(0, 0)], np.zeros((1, 1)), rewards=np.array([reward])))
    assert (out["trace"].tolist(), out["back"].tolist()) == ([[4, 6]], [[2, 4]])


def test_a_loaded_history_waits_for_its_column_and_is_reset_meanwhile() -> None:
    rows = rows_of(pairs_of(2, 1), np.zeros((2, 1)), t=np.array([5, 6]))
    one = View("x", "t", -1)
    one(rows)
    two = View("x", "t", -1)
    two.load_state_dict(one.state_dict())
    two.reset([1])
    three = View("x", "t", -1)
    three.load_state_dict(two.state_dict())
    for piece in (two, three):
        assert piece(rows)["x"].tolist() == [5, 0]


def test_a_history_loaded_between_a_row_and_its_answer_takes_the_answer_in() -> None:
    rows = rows_of(pairs_of(2, 1), np.zeros((2, 1)))
    one, two = View("x", "logp", "-2:-1", 0.0), View("x", "logp", "-2:-1", 0.0)
    one(rows)
    two.load_state_dict(one.state_dict())
    for piece in (one, two):
        piece.on_policy_output(rows.replace(logp=np.array([1.0, 2.0])))
    assert one(rows)["x"].tolist() == two(rows)["x"].tolist() == [[0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("x", "obs", 1), "looks ahead.*use AddView on the learner side"),
        (("x", "obs", "0:2"), "looks ahead"),
        (("x", "obs", "0:k"), "a shift is an int"),
        (("x", "obs", []), "at least one shift"),
        (("x", "actions", 0), "asks for the action that is still to be chosen"),
        (("x", "actions", -1, "repeat"), "fill must be None"),
        (("x", "obs", -1, "zero"), "fill must be None"),
        (("obs", "obs", -1), "belongs to the row itself"),
        (("t", "obs", -1), "belongs to the row itself"),
    ],
)
def test_a_bad_view_is_an_error_when_it_is_built(args: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        View(*args)


def test_refusals_of_views() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 1)))
    with pytest.raises(
        ContractError, match="at shift 0, but the rows have only .*the last that is known is at shift -1"
    ):
        View("x", "logp", 0)(rows)
    for fill in (None, "repeat"):
        with pytest.raises(ContractError, match="if it is one of the policy's, give fill"):
            View("x", "logp", -1, fill)(rows)
    piece = View("x", "logp", -1, 0.0)
    with pytest.raises(ContractError, match="which neither the rows have nor the policy's output"):
        piece.on_policy_output(piece(rows))
    with pytest.raises(ContractError, match=r"expected 'logp' as float64 of shape \(1,\), got int64 of shape \(1, 2\)"):
        piece.on_policy_output(rows.replace(logp=np.zeros((1, 2), int)))
    with pytest.raises(ContractError, match="adds column 'x', but the rows have one"):
        piece(rows.replace(x=np.zeros(1)))
    with pytest.raises(ArgumentError, match="does not know the action space"):
        bound(View("x", "actions", -1), OBS, None)
    with pytest.raises(UnsupportedSpaceError, match="has no fixed size"):
        bound(View("x", "obs", -1), spaces.Text(3))
    with pytest.raises(StateError, match="does not know its space"):
        View("x", "obs", -1)(rows)
    with pytest.raises(StateError, match="does not know its space"):
        View("x", "obs", -1).load_state_dict({"from_policy": False, "history": {}})
    assert View("x", "obs", -1).state_dict() == View("x", "t", -1).state_dict() == {}
    reward = View("x", "rewards", -1)
    for state in ({"a": 1}, {"from_policy": True, "history": {}}):
        with pytest.raises(ArgumentError, match="expected the history of column 'rewards'"):
            reward.load_state_dict(state)


def test_refusals_of_states() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 1)))
    piece = RnnState(HIDDEN)
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
        RnnState({"h": "x", "c": None})
    with pytest.raises(ArgumentError, match="history: rings: values: expected"):
        piece.load_state_dict(RnnState((np.zeros(2), np.zeros(3))).state_dict())
    assert RnnState(np.zeros(2), "memory_in", "memory").params().keys() == {"initial", "column", "source"}
