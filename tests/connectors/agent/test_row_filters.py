"""Rows that are taken out, and what later rows say for them; against a loop over each agent's rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.helpers.episodes import Tick, rows_at, ticks
from tests.connectors.helpers.samples import Space, pairs_of, rows_of, same_tree, vectors

VECTOR = vectors(2)


def bound(piece: c.AgentConnector, actions: Space | None = None) -> Any:
    c.AgentPipeline([piece]).bind(VECTOR, (), actions)
    return piece


def awake(rows: c.Rows) -> Any:
    """Keeps about half of the rows: those whose observation begins with a number above 0."""
    return rows.obs[:, 0] > 0


class Reference:
    """One agent's rows, one after the other."""

    def __init__(self) -> None:
        self.owed, self.first_is_gone = 0.0, False

    def pass_(self, *, keep: bool, first: bool, reward: float) -> tuple[bool, float] | None:
        """``first`` and reward of the row as it goes on, or None."""
        if first:
            self.owed, self.first_is_gone = 0.0, not keep
            return (True, reward) if keep else None
        self.owed += reward
        if not keep:
            return None
        if self.first_is_gone:  # no action before this row could be paid
            self.first_is_gone = False
            return True, 0.0
        paid, self.owed = self.owed, 0.0
        return False, paid


@pytest.mark.slow("draws many batches")
@given(game=ticks(14), cut=st.integers(0, 13), k=st.one_of(st.none(), st.integers(1, 4)))
def test_rewards_of_removed_rows_go_to_the_next_kept_row(game: list[Tick], cut: int, k: int | None) -> None:
    """For FilterRows and FrameSkip, also where the state was taken over mid-episode. No reward is lost."""
    make = (lambda: c.FilterRows(awake)) if k is None else (lambda: c.FrameSkip(k))
    piece = make()
    agents: dict[tuple[int, int], Reference] = defaultdict(Reference)
    count: dict[tuple[int, int], int] = defaultdict(int)
    for tick in game:
        if tick.number == cut:
            again = make()
            again.load_state_dict(piece.state_dict())
            same_tree(again.state_dict(), piece.state_dict())
            piece = again
        rows = rows_at(tick, VECTOR)
        out = piece(rows)
        stays = awake(rows)
        wanted = []
        for i, pair in enumerate(tick.pairs):
            count[pair] = 0 if tick.first[i] else count[pair]
            keep = tick.last[i] or (bool(stays[i]) if k is None else count[pair] % k == 0)
            count[pair] += 1
            passed = agents[pair].pass_(keep=keep, first=tick.first[i], reward=float(rows.rewards[i]))
            if passed is not None:
                wanted.append((*pair, *passed, rows.obs[i].tolist(), tick.last[i]))
        got = [out[name].tolist() for name in ("env_id", "agent_index", "first", "rewards", "obs", "last")]
        assert repr(list(zip(*got, strict=True))) == repr(wanted)  # as text, because a first row's reward is NaN
        piece.reset(tick.resets)
        for pair in [pair for pair in agents if pair[0] in tick.resets]:
            del agents[pair], count[pair]


def test_frame_skip_asks_at_every_kth_row() -> None:
    pipeline = c.AgentPipeline([c.FrameSkip(3), c.FrameStack(2)])
    pipeline.bind(vectors(1))
    assert pipeline.changes_length
    seen = []
    for t in range(8):
        obs = np.full((1, 1), t, np.float32)
        columns = {"first": np.array([t == 0]), "last": np.array([t == 7]), "rewards": np.array([float(t)])}
        out = pipeline(rows_of([(0, 0)], obs, **columns))
        seen += list(zip(out.obs.tolist(), out.rewards.tolist(), out.first.tolist(), strict=True))
    # Later pieces see only the rows that stay; what was paid in between is summed; the last row comes out of turn.
    assert seen == [([0, 0], 0, True), ([0, 3], 1 + 2 + 3, False), ([3, 6], 4 + 5 + 6, False), ([6, 7], 7, False)]
    assert c.FrameSkip(3).noop == "repeat"


def test_rows_may_lack_columns() -> None:
    rows = rows_of(pairs_of(3, 2), np.linspace(-1, 1, 12).reshape(6, 2))
    whole = c.FilterRows(awake)
    assert whole(rows).env_id.tolist() == [1, 2, 2]
    assert len(c.FilterRows(awake)(rows.take([]))) == 0
    rows.obs.flags.writeable = False
    reward = np.ones(6)
    reward.flags.writeable = False
    assert whole(rows.replace(rewards=reward)).rewards.tolist() == [1, 1, 1]
    assert whole(rows.replace(rewards=reward, obs=rows.obs + 2)).rewards.tolist() == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=1), 1, 0),
        (spaces.Discrete(3), np.int32(2), 0.5),
        (spaces.Box(-1, 1, (2,), np.float32), [0.1, 0.0], [2.0, 0.0]),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros(2), np.zeros(3)),
        (spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)]), (1, [0, 1]), (1, 0, 1)),
        (spaces.Dict({"a": spaces.Text(2), "b": spaces.Discrete(2)}), {"a": "x", "b": 0}, {"a": "xyz", "b": 0}),
    ],
)
def test_a_noop_is_an_action_of_the_policy(space: Space, good: Any, bad: Any) -> None:
    assert bound(c.FilterRows(awake, noop=good), space).noop is good
    assert bound(c.FilterRows(awake, noop="repeat"), space).noop == "repeat"
    assert bound(c.FilterRows(awake), space).noop is None
    bound(c.FilterRows(awake, noop=bad))  # where the action space is not known, nobody can tell
    with pytest.raises(ArgumentError, match="noop"):
        bound(c.FilterRows(awake, noop=bad), space)


def test_refusals() -> None:
    rows = rows_of([(0, 0)], np.zeros((1, 2)), rewards=np.ones(1))
    for wrong in (np.ones(1), [True, False], True, None):
        piece = c.FilterRows(lambda rows, wrong=wrong: wrong)
        before = piece.state_dict()
        with pytest.raises(ContractError, match=r"must say of each row whether it stays, as bool of shape \(1,\); got"):
            piece(rows)
        same_tree(piece.state_dict(), before)
