"""Late observations and the maximum of several, against a list per agent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, FlattenObs
from marlvec.connectors.agent.images.max_obs import MaxObs
from marlvec.connectors.agent.memory.delay_obs import DelayObs
from marlvec.connectors.connector import AgentConnector
from marlvec.errors import ArgumentError, StateError, UnsupportedSpaceError
from marlvec.trees import map_tree, zip_trees
from tests.connectors.helpers.episodes import Episodes, Tick, play, ticks
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, pairs_of, rows_of, same_tree, vectors

ACTIONS = spaces.Discrete(2)
MIXED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2), np.uint8),
        "speed": vectors(2),
        "keys": spaces.MultiBinary(3),
        "kind": spaces.Discrete(5),
    }
)


def bound(piece: AgentConnector, space: Space) -> Any:
    AgentPipeline([piece]).bind(space)
    return piece


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(87)
@given(space=any_spaces(), k=st.integers(0, 4), game=ticks(), cut=st.integers(0, 9))
def test_observations_are_those_of_k_rows_ago_and_stay_in_their_episode(
    space: Space, k: int, game: list[Tick], cut: int
) -> None:
    """The episode's first until then; also from a state that was taken over mid-episode."""
    piece, model = bound(DelayObs(k), space), Episodes()
    assert piece.output_space(space) is space
    for tick, rows, out, _ in play(piece, game, space, ACTIONS):
        assert all_inside(space, out.obs, len(tick.pairs))
        for i, pair in enumerate(tick.pairs):
            seen = model.begin(pair, first=tick.first[i])
            seen.append(map_tree(lambda leaf, i=i: leaf[i], rows.obs))
            same_tree(map_tree(lambda leaf, i=i: leaf[i], out.obs), seen[max(0, len(seen) - 1 - k)])
        model.reset(tick.resets)
        if tick.number == cut:
            again = bound(DelayObs(k), space)
            again.load_state_dict(piece.state_dict())
            same_tree(again.state_dict(), piece.state_dict())


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(87)
@given(k=st.integers(1, 4), game=ticks(), cut=st.integers(0, 9))
def test_the_maximum_is_over_the_last_k_of_the_episode(k: int, game: list[Tick], cut: int) -> None:
    first, second, model = bound(MaxObs(k), MIXED), bound(MaxObs(k), MIXED), Episodes()
    whole = play(first, game, MIXED, ACTIONS)
    for tick, rows, out, _ in whole:
        if tick.number == cut:  # before this tick's rows have passed the second one, and after those before it
            taken = second.state_dict()
            second = bound(MaxObs(k), MIXED)
            second.load_state_dict(taken)
        same_tree(second(rows), out)
        second.reset(tick.resets)
        assert all_inside(MIXED, out.obs, len(tick.pairs))
        for i, pair in enumerate(tick.pairs):
            seen = model.begin(pair, first=tick.first[i])
            seen.append(map_tree(lambda leaf, i=i: leaf[i], rows.obs))
            most = zip_trees(lambda leaves: np.max(leaves, axis=0), seen[-k:])
            same_tree(map_tree(lambda leaf, i=i: leaf[i], out.obs), {**most, "kind": seen[-1]["kind"]})
        model.reset(tick.resets)


def test_flicker_and_lag_as_supersuit_has_them() -> None:
    late, bright = bound(DelayObs(2), vectors(1)), bound(MaxObs(), vectors(1))
    values = [3.0, 1.0, 2.0, 0.0]
    rows = [rows_of([(0, 0)], np.array([[x]], np.float32)) for x in values]
    assert [late(r).obs.item() for r in rows] == [3, 3, 3, 1]
    assert [bright(r).obs.item() for r in rows] == [3, 3, 2, 2]


@pytest.mark.parametrize("make", [lambda: DelayObs(1), lambda: MaxObs(2)])
def test_what_it_gave_and_was_given_is_its_own(make: Any) -> None:
    piece = bound(make(), vectors(1))
    obs = np.ones((2, 1), np.float32)
    obs.flags.writeable = False
    out = piece(rows_of(pairs_of(2, 1), obs)).obs
    out[:] = 99
    assert piece(rows_of(pairs_of(2, 1), obs * 0)).obs.tolist() == [[1], [1]]


@pytest.mark.parametrize("make", [lambda: DelayObs(1), lambda: MaxObs(2)])
def test_edits_of_the_pipeline_keep_the_history_of_an_unchanged_space(make: Any) -> None:
    piece = make()
    pipeline = AgentPipeline([piece])
    pipeline.bind(vectors(2))
    pipeline(rows_of([(0, 0)], np.full((1, 2), 5, np.float32)))
    pipeline.prepend(FlattenObs())
    assert pipeline(rows_of([(0, 0)], np.zeros((1, 2), np.float32))).obs.tolist() == [[5, 5]]
    pipeline.bind(vectors(3))
    assert pipeline(rows_of([(0, 0)], np.zeros((1, 3), np.float32))).obs.tolist() == [[0, 0, 0]]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="k must be at least 0, got -1"):
        DelayObs(-1)
    with pytest.raises(ArgumentError, match="k must be at least 1, got 0"):
        MaxObs(0)
    with pytest.raises(UnsupportedSpaceError, match="found no Box or MultiBinary in Discrete"):
        bound(MaxObs(), spaces.Discrete(2))
    with pytest.raises(UnsupportedSpaceError, match="cannot keep the value of Text, which has no fixed size"):
        bound(DelayObs(1), spaces.Text(3))
    rows = rows_of([(0, 0)], batch(vectors(2), 1))
    for make in (lambda: DelayObs(1), MaxObs):
        for use in (lambda make=make: make()(rows), lambda make=make: make().load_state_dict({})):
            with pytest.raises(StateError, match="does not know its space"):
                use()
        assert make().state_dict() == {}
        with pytest.raises(ArgumentError, match=r"missing \['count', 'rings'\], unknown \['frames'\]"):
            bound(make(), vectors(2)).load_state_dict({"frames": []})
