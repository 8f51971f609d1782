from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import ClipReward, Rows
from marlvec.errors import ArgumentError

REWARDS = st.lists(st.tuples(st.floats(allow_nan=False), st.booleans()), max_size=6)


@pytest.mark.checklist(85)
@given(pairs=REWARDS, limit=st.one_of(st.none(), st.floats(0.1, 10)))
def test_rewards_are_clipped_and_first_rows_pass(pairs: list[tuple[float, bool]], limit: float | None) -> None:
    reward = np.array([r for r, _ in pairs], np.float64)
    first = np.array([f for _, f in pairs], bool)
    piece = ClipReward(sign=True) if limit is None else ClipReward(limit=limit)
    clip: Any = (lambda r: (r > 0) - (r < 0)) if limit is None else (lambda r: max(-limit, min(limit, r)))
    before = reward.copy()
    out = piece(Rows(rewards=reward, first=first)).rewards
    assert out.dtype == np.float64
    assert out.tolist() == [r if f else clip(r) for r, f in pairs]
    assert piece(Rows(rewards=reward)).rewards.tolist() == [clip(r) for r, _ in pairs]
    assert reward.tolist() == before.tolist()


def test_a_first_row_that_says_it_has_no_reward() -> None:
    out = ClipReward(sign=True)(Rows(rewards=np.array([np.nan, -3.0]), first=np.array([True, False]))).rewards
    assert np.isnan(out[0])
    assert out[1] == -1


@pytest.mark.parametrize(
    "kwargs", [{}, {"sign": True, "limit": 1.0}, {"limit": 0.0}, {"limit": -1.0}, {"limit": float("nan")}]
)
def test_refusals(kwargs: Any) -> None:
    with pytest.raises(ArgumentError, match=r"give sign=True or a limit|limit must be above 0"):
        ClipReward(**kwargs)
