"""Connectors that remember, each against lists of what an agent's rows held and what it answered in its episode."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Tuple
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.collect import Collector
from marlvec.connectors import AgentTable
from marlvec.connectors.agent_tables import Shift, parse_shifts
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.policies import FunctionPolicy
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree, zip_trees
from tests.collect.players import MODES, sync
from tests.connectors.samples import (
    Episodes,
    Space,
    Tick,
    all_inside,
    answered,
    any_spaces,
    bound,
    pairs_of,
    rows_at,
    rows_of,
    same_tree,
    ticks,
    vectors,
)
from tests.vector.support.reference import refused

# --- Connectors that remember, each against lists of what an agent's rows held and what it answered in its episode


VECTOR = vectors(2)
OBS = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3, start=2)})
MIXED = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "keys": spaces.MultiBinary(3), **OBS.spaces})
HIDDEN: Any = {"h": np.full(3, 0.5, np.float32), "c": (np.array(7),)}


class Memory(NamedTuple):
    """A connector that remembers, the spaces it is bound to, and a column as it must be by an agent's past."""

    make: Callable[[], c.AgentConnector]
    expected: Callable[[Any, Any], Any]
    column: str = "obs"
    space: Space = VECTOR
    actions: Space = spaces.Discrete(2)
    hidden: Any = None


def entry(column: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i], column)


def blank(space: Space, *, inside: bool = False) -> Any:
    """Zeros, or the first choice; with ``inside`` the numbers next to 0 that a Box has."""
    tree = SpaceTree(space)
    leaves = [np.full(leaf.shape, getattr(leaf.space, "start", 0), leaf.dtype) for leaf in tree.leaves]
    if inside:
        boxes = [leaf.space for leaf in tree.leaves]
        leaves = [
            np.clip(0, s.low, s.high).astype(s.dtype) if isinstance(s, spaces.Box) else zeros
            for s, zeros in zip(boxes, leaves, strict=True)
        ]
    return tree.unflatten(leaves)


def last(n: int, past: list[Any], before: Any) -> list[Any]:
    return [before] * (n - len(past)) + past[max(0, len(past) - n) :]


@st.composite
def frame_stacks(draw: st.DrawFn) -> Memory:
    space, k, axis, new_axis = (
        draw(any_spaces()),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([0, -1])),
        draw(st.booleans()),
    )
    pad: Any = draw(st.sampled_from(["zero", "repeat"]))

    def join(frames: list[Any]) -> Any:
        if new_axis or not np.ndim(frames[0]):
            return np.stack(frames, axis if np.ndim(frames[0]) else 0)
        return np.concatenate(frames, axis)

    def expected(rows: Any, _: Any) -> Any:
        seen = [row["obs"] for row in rows]
        return zip_trees(join, last(k, seen, seen[0] if pad == "repeat" else blank(space)))

    return Memory(lambda: c.FrameStack(k, axis=axis, new_axis=new_axis, pad=pad), expected, space=space)


@st.composite
def delays(draw: st.DrawFn) -> Memory:
    space, k = draw(any_spaces()), draw(st.integers(0, 4))
    return Memory(lambda: c.DelayObs(k), lambda rows, _: rows[max(0, len(rows) - 1 - k)]["obs"], space=space)


@st.composite
def maxima(draw: st.DrawFn) -> Memory:
    k = draw(st.integers(1, 4))

    def expected(rows: Any, _: Any) -> Any:
        most = zip_trees(lambda leaves: np.max(leaves, axis=0), [row["obs"] for row in rows[-k:]])
        return {**most, "b": rows[-1]["obs"]["b"]}

    return Memory(lambda: c.MaxObs(k), expected, space=MIXED)


@st.composite
def prev_actions(draw: st.DrawFn) -> Memory:
    actions, n, into_obs = draw(any_spaces()), draw(st.integers(1, 3)), draw(st.booleans())
    flat = bound(c.FlattenObs(), actions)

    def expected(rows: Any, answers: Any) -> Any:
        done = last(n, [answer["actions"] for answer in answers], blank(actions, inside=True))
        if not into_obs:
            return zip_trees(np.stack, done) if n > 1 else done[0]
        vectors = [flat(c.Rows(obs=map_tree(lambda leaf: leaf[None], action))).obs[0] for action in done]
        return np.concatenate([rows[-1]["obs"], *vectors])

    return Memory(lambda: c.PrevActions(n, into_obs), expected, "obs" if into_obs else "prev_actions", actions=actions)


@st.composite
def prev_rewards(draw: st.DrawFn) -> Memory:
    n, into_obs = draw(st.integers(1, 3)), draw(st.booleans())

    def expected(rows: Any, _: Any) -> Any:
        paid = np.array(last(n, [np.nan_to_num(row["rewards"]) for row in rows], 0.0))
        if into_obs:
            return np.concatenate([rows[-1]["obs"], paid.astype(np.float32)])
        return paid if n > 1 else paid[0]

    return Memory(lambda: c.PrevRewards(n, into_obs), expected, "obs" if into_obs else "prev_rewards")


@st.composite
def rnn_states(draw: st.DrawFn) -> Memory:
    initial = draw(st.sampled_from([HIDDEN, tuple(HIDDEN.values())]))
    return Memory(
        lambda: c.RnnState(initial),
        lambda _, answers: answers[-1]["state_out"] if answers else initial,
        "state_in",
        hidden=lambda tree: tree if initial is HIDDEN else tuple(tree.values()),
    )


@st.composite
def shifts(draw: st.DrawFn, newest: int) -> Shift:
    """An int, a list or a range, from -5 to ``newest``."""
    start = draw(st.integers(-5, newest))
    stop, step = draw(st.integers(start, newest)), draw(st.integers(1, 3))
    several = draw(st.lists(st.integers(-5, newest), min_size=1, unique=True))
    return draw(st.sampled_from([start, f"{start}:{stop}", f"{start}:{stop}:{step}", several]))


@st.composite
def views(draw: st.DrawFn) -> Memory:
    """Of the rows' columns ("speed" is one that a connector before it added), the actions, and other answers."""
    actions = spaces.Tuple([spaces.Discrete(4, start=1), spaces.Box(2, 3, (2,), np.float32)])
    blanks = {"obs": blank(OBS), "rewards": np.array(0.0), "speed": np.zeros(2, np.int16)}
    said = {"actions": blank(actions, inside=True), "hidden": HIDDEN}
    source = draw(st.sampled_from([*blanks, *said]))
    spec = draw(shifts(-1 if source in said else 0))
    repeat = source in blanks and draw(st.booleans())
    fill: Any = "repeat" if repeat else HIDDEN if source == "hidden" else None

    def expected(rows: Any, answers: Any) -> Any:
        past = [row[source] for row in (answers if source in said else rows)]
        known = dict(enumerate(reversed(past), source in said))
        shown = [known.get(-s, past[0] if repeat else (blanks | said)[source]) for s in parse_shifts(spec)]
        return shown[0] if isinstance(spec, int) else zip_trees(np.stack, shown)

    return Memory(lambda: c.View("seen", source, spec, fill), expected, "seen", OBS, actions, lambda tree: tree)


CHECKLIST: dict[int, list[Any]] = {
    87: [frame_stacks, delays, maxima],
    88: [prev_actions, prev_rewards],
    89: [rnn_states],
    90: [views],
}


def hidden(tick: Tick, rows: c.Rows) -> Any:
    """A policy's own column: numbers of the row's pair and tick."""
    size = rows.env_id * 100 + rows.agent_index * 10 + tick.number
    return {"h": np.repeat(size[:, None], 3, 1).astype(np.float32), "c": (size,)}


@pytest.mark.slow("draws many batches")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind(), marks=pytest.mark.checklist(line), id=kind.__name__)
        for line, kinds in CHECKLIST.items()
        for kind in kinds
    ],
)
@given(data=st.data(), game=ticks(), cut=st.integers(0, 9))
def test_what_is_shown_is_the_agents_own_past_of_its_episode(
    kind: st.SearchStrategy[Memory], data: st.DataObject, game: list[Tick], cut: int
) -> None:
    """Agents come, go and are reset, in rows in any order. After any tick another one takes over the state."""
    memory = data.draw(kind)
    pipeline = bound(memory.make(), memory.space, ("a", "b"), memory.actions)
    seen, said = Episodes(), Episodes()
    for tick in game:
        piece: Any = pipeline[0]
        if tick.number == cut and (state := piece.state_dict()):
            pipeline = bound(memory.make(), memory.space, ("a", "b"), memory.actions)
            pipeline[0].load_state_dict(deepcopy(state))
            same_tree(pipeline[0].state_dict(), state)
        rows = rows_at(tick, memory.space)
        rows = rows.replace(speed=np.stack([rows.env_id - 3, rows.agent_index + tick.number], 1).astype(np.int16))
        out = pipeline(rows)
        assert all_inside(pipeline.output_space_, out.obs, len(tick.pairs))
        for i, pair in enumerate(tick.pairs):
            past, answers = seen.begin(pair, first=tick.first[i]), said.begin(pair, first=tick.first[i])
            past.append({name: entry(column, i) for name, column in rows.items()})
            same_tree(entry(out[memory.column], i), memory.expected(past, answers))
        returned = memory.hidden(hidden(tick, rows)) if memory.hidden else None
        columns = {} if returned is None else {"state_out": returned, "hidden": returned}
        if (answer := answered(out, tick, memory.actions, **columns)) is not None:
            pipeline.on_policy_output(answer)
            for i, pair in enumerate(zip(answer.env_id.tolist(), answer.agent_index.tolist(), strict=True)):
                said.values[pair].append({name: entry(column, i) for name, column in answer.items()})
        for each in (pipeline, seen, said):
            each.reset(tick.resets)


@pytest.mark.parametrize(
    ("piece", "values", "shown"),
    [
        (c.FrameStack(3), [1, 2, 3, 4], [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        (c.FrameStack(3, pad="repeat"), [1, 2], [[1, 1, 1], [1, 1, 2]]),
        (c.DelayObs(2), [3, 1, 2, 0], [[3], [3], [3], [1]]),
        (c.MaxObs(), [3, 1, 2, 0], [[3], [3], [2], [2]]),
    ],
    ids=repr,
)
def test_by_hand(piece: c.AgentConnector, values: list[int], shown: list[list[int]]) -> None:
    """Rows without a column ``first``: an episode begins with an agent's first row, and after a reset."""
    pipeline = bound(piece, vectors(1))
    for _ in range(2):
        rows = [rows_of([(1, 0)], np.array([[value]], np.float32)) for value in values]
        assert [pipeline(each).obs[0].tolist() for each in rows] == shown
        pipeline.reset()


def test_what_users_expect_of_the_shapes_of_frame_stack() -> None:
    image = spaces.Box(0, 255, (8, 6, 3), np.uint8)
    for piece, space, expected in (
        (c.FrameStack(4), image, spaces.Box(0, 255, (8, 6, 12), np.uint8)),
        (c.FrameStack(4, new_axis=True, axis=0), image, spaces.Box(0, 255, (4, 8, 6, 3), np.uint8)),
        (c.FrameStack(4, axis=0), image, spaces.Box(0, 255, (32, 6, 3), np.uint8)),
        (c.FrameStack(3), spaces.Discrete(5), spaces.MultiDiscrete([5] * 3)),
        (c.FrameStack(2), spaces.MultiBinary([2, 3]), spaces.MultiBinary([2, 6])),
        (c.FrameStack(2), spaces.Box(1, 2, (1,)), spaces.Box(0, 2, (2,))),
        (c.FrameStack(2, pad="repeat"), spaces.Box(1, 2, (1,)), spaces.Box(1, 2, (2,))),
    ):
        assert piece.output_space(space) == expected


# --- Previous actions and rewards, against a list per agent


WORDS = spaces.Dict({"say": spaces.Text(3), "walk": spaces.Sequence(spaces.Discrete(3)), "go": spaces.Discrete(2)})


def bound_piece(piece: Any, actions: Space | None = None, space: Space = VECTOR) -> Any:
    return bound(piece, space, ("a", "b"), actions)[0]


@pytest.mark.checklist(88)
def test_actions_without_a_fixed_size_are_remembered_as_they_are() -> None:
    piece = bound_piece(c.PrevActions(2), WORDS)
    rows = rows_of(pairs_of(2, 1), np.zeros((2, 2)))
    start = piece(rows)["prev_actions"]
    for i in range(2):
        assert WORDS.contains({key: column[i, 1] for key, column in start.items()} | {"go": start["go"][i, 1]})
    walk = np.empty(2, object)
    walk[:] = [(1, 2), ()]
    piece.on_policy_output(rows.replace(actions={"say": ["ab", "c"], "walk": walk, "go": np.array([1, 0])}))
    shown = piece(rows)["prev_actions"]
    assert (shown["say"][:, 1].tolist(), shown["walk"][:, 1].tolist(), shown["go"][:, 1].tolist()) == (
        ["ab", "c"],
        [(1, 2), ()],
        [1, 0],
    )
    refused(UnsupportedSpaceError, "has no fixed size", bound_piece, c.PrevActions(into_obs=True), WORDS)


class Odd(spaces.Discrete):
    """A user's own space, which its start is not in."""

    def contains(self, x: Any) -> bool:
        return super().contains(x) and int(x) % 2 == 1

    def sample(self, mask: Any = None, probability: Any = None) -> np.int64:
        return np.int64(1 + 2 * self.np_random.integers(self.n // 2))


def test_a_space_of_the_users_own_gives_a_member() -> None:
    shown = bound_piece(c.PrevActions(3), Odd(8))(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"]
    assert (shown % 2 == 1).all()
    same_tree(bound_piece(c.PrevActions(3), Odd(8))(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"], shown)


def test_the_bounds_behind_the_observation() -> None:
    actions = spaces.Tuple([spaces.Discrete(2), spaces.Box(-3, 4, (1,), np.float64)])
    low, high = np.array([0, 0, -3, 0, 0, -3], float), np.array([9, 1, 1, 4, 1, 1, 4], float)
    declared = c.PrevActions(2, into_obs=True)
    bound_piece(declared, actions, spaces.Box(0, 9, (1,), np.uint8))
    assert declared.output_space(spaces.Box(0, 9, (1,), np.uint8)) == spaces.Box(
        np.append(0, low), high, dtype=np.float64
    )
    pay = c.PrevRewards(2, into_obs=True).output_space(spaces.Box(0, 1, (1,), np.uint8))
    assert (pay.dtype, pay.shape) == (np.float32, (3,))
    assert np.isinf(pay.low[1:]).all()
    huge = bound_piece(c.PrevRewards(into_obs=True))
    out = huge(rows_of([(0, 0)], np.zeros((1, 2), np.float32), rewards=np.array([1e300]))).obs
    assert out.tolist() == [[0, 0, np.inf]]


def test_an_equal_space_keeps_the_history_and_another_begins_anew() -> None:
    """An action of another space need not be in this one, even where it has the same form."""
    pipeline = c.AgentPipeline([c.PrevActions()])
    rows = rows_of([(0, 0)], np.zeros((1, 2)))
    pipeline.bind(VECTOR, (), spaces.Discrete(5))
    pipeline.on_policy_output(rows.replace(actions=np.array([3])))
    pipeline.bind(VECTOR, (), spaces.Discrete(5))
    assert pipeline(rows)["prev_actions"].tolist() == [3]
    pipeline.bind(VECTOR, (), spaces.Discrete(3, start=1))
    assert pipeline(rows)["prev_actions"].tolist() == [1]
    pipeline.bind(VECTOR, (), spaces.MultiDiscrete([5, 5]))
    assert pipeline(rows)["prev_actions"].tolist() == [[0, 0]]


def test_previous_columns_refuse() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 2)), rewards=np.zeros(1))
    refused(StateError, "does not know its space", c.PrevActions().on_policy_output, rows)
    piece = bound_piece(c.PrevActions(), spaces.Discrete(3))
    refused(ContractError, "needs the column 'actions' of the policy's output", piece.on_policy_output, rows)
    state = piece.state_dict()
    for wrong in (np.zeros((1, 1), int), np.array([0.5])):
        with pytest.raises(ContractError, match=r"expected actions as int64 of shape \(1,\), got"):
            piece.on_policy_output(rows.replace(actions=wrong))
    same_tree(piece.state_dict(), state)
    for adder, name in ((piece, "prev_actions"), (c.PrevRewards(), "prev_rewards")):
        with pytest.raises(ContractError, match=f"adds column '{name}', but the rows have one"):
            adder(rows.replace(**{name: np.zeros(1)}))


# --- View requirements and the state of recurrent policies, against a list per agent


PAIR = spaces.Dict({"a": vectors(2, dtype=np.float32), "b": spaces.Discrete(3, start=2)})
ACTIONS = spaces.Tuple([spaces.Discrete(4, start=1), spaces.Box(2, 3, (2,), np.float32)])
HIDDEN_STATE = {"h": np.full(3, 0.5, np.float32), "c": (np.array(7),)}


def bound_view(piece: Any, space: Space = PAIR, actions: Space | None = ACTIONS) -> Any:
    return bound(piece, space, (), actions)[0]


def test_fills() -> None:
    rows = rows_of([(0, 0)], {"a": np.ones((1, 2), np.float32), "b": np.array([3])}, t=np.array([4]))
    shown = bound_view(c.View("x", "obs", "-1:0", fill=9))(rows)["x"]
    assert (shown["a"].tolist(), shown["b"].tolist()) == ([[[9, 9], [1, 1]]], [[9, 3]])
    shown = bound_view(c.View("x", "obs", -1, fill={"a": np.array([5, 6]), "b": 1}))(rows)["x"]
    assert (shown["a"].tolist(), shown["b"].tolist()) == ([[5, 6]], [1])
    assert bound_view(c.View("x", "t", -1, fill=-1))(rows)["x"].tolist() == [-1]
    assert bound_view(c.View("x", "actions", -2, fill=(3, 2.5)))(rows)["x"][1].tolist() == [[2.5, 2.5]]
    for fill, match in (
        (-1.5, "fill: -1.5 does not fit dtype int64"),
        ({"a": 1}, "fill: expected one row's value of 'obs': expected a dict with keys"),
        ({"a": np.zeros(3), "b": 0}, r"a value of shape \(3,\) does not fit shape \(2,\)"),
    ):
        refused(ArgumentError, match, bound_view, c.View("x", "obs", -1, fill=fill))


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
        refused(ContractError, "if it is one of the policy's, give fill", c.View("x", "logp", -1, fill), rows)
    piece = c.View("x", "logp", -1, 0.0)
    refused(ContractError, "which neither the rows have nor the policy's output", piece.on_policy_output, piece(rows))
    with pytest.raises(ContractError, match=r"expected 'logp' as float64 of shape \(1,\), got int64 of shape \(1, 2\)"):
        piece.on_policy_output(rows.replace(logp=np.zeros((1, 2), int)))
    refused(ContractError, "adds column 'x', but the rows have one", piece, rows.replace(x=np.zeros(1)))
    assert c.View("x", "obs", -1).state_dict() == c.View("x", "t", -1).state_dict() == {}
    with pytest.raises(ArgumentError, match="expected the history of column 'rewards'"):
        c.View("x", "rewards", -1).load_state_dict({"from_policy": True, "history": {}})


def test_refusals_of_states() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 1)))
    piece = c.RnnState(HIDDEN_STATE)
    refused(ContractError, "needs the column 'state_out'.*the policy returns it as", piece.on_policy_output, rows)
    state = piece.state_dict()
    for wrong, match in (
        ({"h": np.zeros((1, 3))}, "expected a dict with keys"),
        ({"h": np.zeros((1, 3)), "c": (np.array([0.5]),)}, "expected 'state_out' as int64 of shape"),
        ({"h": np.zeros((1, 4)), "c": (np.array([1]),)}, "got float64 of shape"),
    ):
        refused(ContractError, match, piece.on_policy_output, rows.replace(state_out=wrong))
    same_tree(piece.state_dict(), state)
    refused(ContractError, "adds column 'state_in', but the rows have one", piece, piece(rows))
    refused(ContractError, "expected numbers", c.RnnState, {"h": "x", "c": None})
    assert c.RnnState(np.zeros(2), "memory_in", "memory").params().keys() == {"initial", "column", "source"}


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


def test_a_table_refuses() -> None:
    table = AgentTable((2,), np.float32)
    with pytest.raises(
        ArgumentError, match=r"slots of agents: values: expected float32 of \(any, any, 2\), got float32 of \(1, 1, 3\)"
    ):
        table.load_state_dict({"values": np.zeros((1, 1, 3), np.float32)})
    refused(ArgumentError, "negative", table.get, np.array([-1]), np.array([0]))
    assert repr(table) == "AgentTable((2,), float32; 0 envs, 0 agents)"
    one, two = (bound(c.FrameStack(2), space) for space in (vectors(2), Tuple([vectors(2), vectors(3)])))
    for pipeline, wrong, text in (
        (two, one, "FrameStack: frames: expected 2 leaves, got 1"),
        (one, bound(c.FrameStack(2), vectors(3)), "FrameStack: frames: values: expected float32"),
        (one, bound(c.DelayObs(1), vectors(2)), r"missing \['started', 'frames'\], unknown \['count', 'rings'\]"),
    ):
        refused(ArgumentError, text, pipeline[0].load_state_dict, wrong[0].state_dict())


INTS = st.integers(-50, 50)


@given(start=INTS, length=st.integers(0, 40), step=st.one_of(st.none(), st.integers(1, 9)))
def test_both_ends_belong_to_a_range(start: int, length: int, step: int | None) -> None:
    stop = start + length
    wanted, at = [], start
    while at <= stop:
        wanted.append(at)
        at += step or 1
    assert parse_shifts(f"{start}:{stop}" if step is None else f"{start}:{stop}:{step}") == tuple(wanted)


@given(shifts=st.lists(INTS, min_size=1, unique=True))
def test_lists_come_oldest_first_and_an_int_is_a_list_of_one(shifts: list[int]) -> None:
    assert parse_shifts(shifts) == parse_shifts(tuple(np.array(shifts))) == tuple(sorted(shifts))
    assert parse_shifts(shifts[0]) == parse_shifts(np.int64(shifts[0])) == (shifts[0],)
    assert all(type(shift) is int for shift in parse_shifts(list(np.array(shifts))))


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [("-3:-1", (-3, -2, -1)), ("0:3", (0, 1, 2, 3)), ("0:0", (0,)), ("-5:0:2", (-5, -3, -1)), ("-0:1", (0, 1))],
)
def test_what_rllib_gets_wrong_and_what_it_writes_in_its_examples(spec: str, wanted: tuple[int, ...]) -> None:
    assert parse_shifts(spec) == wanted


@pytest.mark.mostly_slow("draws many batches", quick=5)
@pytest.mark.parametrize(
    "spec",
    [
        *("", ":", "1", "-3", "1:", ":1", "-3:-1:", "a:b", "0:k", "1:2:3:4", " 1:2", "1: 2", "1:2\n", "+1:2", "1_0:20"),
        *("\u0661:\u0662", "1.0:2", "--1:0", "-1:-3", "0:5:0", "0:5:-1", "-999999999:0", "0:" + "9" * 5000),
        *(
            None,
            1.0,
            True,
            [],
            (),
            [1, 1],
            [0.5],
            ["1"],
            [True],
            [[1]],
            {1, 2},
            {1: 2},
            b"0:1",
            np.float64(1),
            range(0),
        ),
        *(np.array([1, 2]), np.array([0.0])),
    ],
)
def test_everything_else_is_an_error(spec: Any) -> None:
    refused(ArgumentError, "shift|a <= b and a step above 0", parse_shifts, spec)


# --- Histories and statistics over whole runs: every row counted once, and nothing lost with the process that knew it


def count_up(rows: c.Rows) -> Any:
    """Answers with a state that counts the agent's decisions."""
    return np.zeros(len(rows), np.int64), {"state_out": rows["state_in"] + 1, "turn": rows["t"]}


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.fault("E8")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_each_row_and_each_answer_passes_each_piece_once(kind: str, mode: str) -> None:
    """A row or an answer that passed twice, or not at all, would shift every history that counts them.

    The amounts asked for are such that calls return early, in the middle of a step and of an episode.
    """
    spread = c.NormalizeReward(0.5, clip=None)
    pieces = [
        c.RnnState(np.array(0)),
        c.AgentPipeline([c.View("rows", "t", "-2:0", -1), c.View("turns", "turn", "-2:-1", np.array(-1))]),
        *(spread, c.PrevRewards(2)),
    ]
    with sync(kind, 3, 3, mode) as envs:
        collector = Collector(envs, FunctionPolicy(count_up), agent_connectors=pieces, seed=6)
        batches = [collector.collect(env_steps=n)["main"] for n in (50, 1, 7, 64, 13)]
        batches += [collector.collect(agent_steps=n)["main"] for n in (1, 2, 31)]
        batches.append(collector.collect(env_steps=9)["main"])  # and what was closed before
    rows = {key: np.concatenate([batch[key] for batch in batches]) for key, _ in batches[0].items()}
    t = rows["t"]
    assert (t > 3).any()
    np.testing.assert_array_equal(rows["state_in"], t)
    back = t[:, None] + np.array([-2, -1, 0])
    np.testing.assert_array_equal(rows["rows"], np.where(back < 0, -1, back))
    np.testing.assert_array_equal(rows["turns"], np.where(back < 0, -1, back)[:, :2])
    lanes = list(zip(*(rows[name].tolist() for name in ("eps_id", "env_id", "agent_index")), strict=True))
    paid = {
        (*lane, turn): reward for lane, turn, reward in zip(lanes, t.tolist(), rows["rewards"].tolist(), strict=True)
    }
    for lane, turn, shown in zip(lanes, t.tolist(), rows["prev_rewards"].tolist(), strict=True):
        assert shown == [paid[(*lane, when)] if when >= 0 else 0.0 for when in (turn - 2, turn - 1)]
    assert spread.counts[0] == len(t)  # one reward per transition, its last one included
