"""Connectors that remember, each against lists of what an agent's rows held and what it answered in its episode."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors.agent_tables import Shift, parse_shifts
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree, zip_trees
from tests.connectors.helpers.episodes import Episodes, Tick, answered, rows_at, ticks
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, bound, rows_of, same_tree, vectors

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
