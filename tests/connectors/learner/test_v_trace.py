from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors.learner.returns import VTrace
from marlvec.connectors.learner.sequences import AddLastObs
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.learner.fragments import (
    GAMMAS,
    Critic,
    Fragment,
    assert_close,
    batches,
    per_row,
    return_to_go,
    rows_of,
    v_trace,
    v_trace_advantage,
)

LIMITS = st.sampled_from([0.3, 1.0, 2.5])


@pytest.mark.slow("draws many batches")
@given(batch=batches(), gamma=GAMMAS, limits=st.tuples(LIMITS, LIMITS))
def test_every_row_is_what_the_paper_says(batch: list[Fragment], gamma: float, limits: tuple[float, float]) -> None:
    c_bar, rho_bar = sorted(limits)
    rows, critic = rows_of(batch), Critic()
    out = VTrace(gamma, rho_bar, c_bar, critic)(rows)
    assert_close(out["vs"], per_row(v_trace, batch, gamma, rho_bar, c_bar))
    assert_close(out["pg_advantages"], per_row(v_trace_advantage, batch, gamma, rho_bar, c_bar))
    assert len(critic.asked) <= 1

    longer = AddLastObs()(rows)
    longer = longer.replace(values=critic(longer))
    phantom = longer["phantom"]
    with_phantoms = VTrace(gamma, rho_bar, c_bar)(longer)
    for name in ("vs", "pg_advantages"):
        np.testing.assert_array_equal(with_phantoms[name][~phantom], out[name])
        assert not with_phantoms[name][phantom].any()


@pytest.mark.slow("draws many batches")
@given(batch=batches(), gamma=GAMMAS)
def test_on_policy_it_is_the_whole_return(batch: list[Fragment], gamma: float) -> None:
    """Section 4.1 of the paper: with both policies the same, vs is the n-step Bellman target."""
    rows = rows_of(batch)
    rows = rows.replace(behaviour=rows["target_logp"])
    out = VTrace(gamma, value_function=Critic(), logp="behaviour")(rows)
    assert_close(out["vs"], per_row(return_to_go, batch, gamma, True))


def test_a_ratio_beyond_all_numbers_is_clipped() -> None:
    one = Fragment((1.0,), (2.0,), "terminated", 0.0, (-2000.0,), (0.0,))
    out = VTrace(1.0)(rows_of([one]))
    assert out["vs"].tolist() == [1.0]
    assert out["pg_advantages"].tolist() == [-1.0]


def test_refusals() -> None:
    one = rows_of([Fragment((1.0,), (2.0,), "cut", 0.0, (0.0,), (0.0,))])
    with pytest.raises(ContractError, match="expected a column 'target_logp'; a learner connector before this one"):
        VTrace(value_function=Critic())(one.drop("target_logp"))
    with pytest.raises(ContractError, match="expected a column 'values'"):
        VTrace()(one.drop("values"))
    with pytest.raises(ArgumentError, match="give value_function="):
        VTrace()(one)
    assert VTrace(rho_bar=math.inf, c_bar=math.inf).params()["c_bar"] == math.inf
