from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from marlvec.connectors import AgentPipeline, NormalizeObs, Rows
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.trees import tree_leaves
from tests.connectors.helpers.samples import same_tree, vectors

WIDE = vectors(2, dtype=np.float64)


def make(space: spaces.Space[Any] = WIDE, agents: int = 0, **kwargs: Any) -> NormalizeObs:
    piece = NormalizeObs(**kwargs)
    AgentPipeline([piece]).bind(space, [f"agent_{i}" for i in range(agents)])
    return piece


def rows(obs: Any, agent_index: Any = None) -> Rows:
    n = len(next(leaf for _, leaf in tree_leaves(obs)))
    return Rows(obs=obs, env_id=np.arange(n), agent_index=np.zeros(n, int) if agent_index is None else agent_index)


def moments(piece: NormalizeObs, leaf: str = "") -> Any:
    return piece.state_dict()["moments"][leaf]


def assert_moments(got: Any, data: Any) -> None:
    """Count exact; mean and variance to 1e-12 of the data's size, which is all that any summation can promise."""
    if np.ndim(got["count"]):
        assert len(got["count"]) == 1
        got = {key: value[0] for key, value in got.items()}
    size = np.abs(data).max(axis=0, initial=1e-300)
    assert got["count"] == len(data)
    np.testing.assert_allclose(got["mean"], data.mean(axis=0), rtol=1e-12, atol=float((1e-12 * size).max()))
    variance = data.var(axis=0)
    # Below the smallest normal number no digits are left to agree on.
    atol = float((1e-12 * size**2).max()) + np.finfo(np.float64).tiny
    np.testing.assert_allclose(got["m2"] / len(data), variance, rtol=1e-12, atol=atol)


def arrays(n: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    values = st.floats(-1e4, 1e4, allow_subnormal=False)
    return n.flatmap(lambda k: hnp.arrays(np.float64, (k, 2), elements=values))


@pytest.mark.parametrize("update", [True, False])
def test_frozen_statistics_are_not_dropped_for_a_space_of_other_shapes(update: bool) -> None:
    """A saved policy in another env would see values that are not normalised."""
    piece = NormalizeObs(update=update)
    chain = AgentPipeline([piece])
    chain.bind(WIDE)
    chain.eval()
    chain.bind(vectors(3))  # nothing was learned yet
    chain.bind(WIDE)
    piece.load_state_dict(learned())
    if not update:
        chain.train()
    with pytest.raises(UnsupportedSpaceError, match=r"frozen statistics of the shapes .*\(2,\)"):
        chain.bind(vectors(3))
    assert (chain.input_space, piece.counts.tolist()) == (WIDE, [4])
    chain.bind(vectors(2))
    if update:
        chain.train()
        chain.bind(vectors(3))
        assert piece.counts.tolist() == [0]


def learned() -> Any:
    piece = make()
    piece(rows(np.arange(8.0).reshape(4, 2)))
    return piece.state_dict()


@pytest.mark.checklist(84)
@given(data=arrays(st.integers(1, 30)))
def test_values_are_normalised_with_the_statistics_of_each_leaf_and_agent(data: Any) -> None:
    """Every row counts once, none in eval. (What several workers have learnt is merged in test_moments.py.)"""
    unclipped = make(clip=None, epsilon=1e-6)
    out = unclipped(rows(data)).obs
    state = unclipped.state_dict()
    unclipped.eval()(rows(data * 3))
    same_tree(unclipped.state_dict(), state)
    assert unclipped.counts.tolist() == [len(data)]
    np.testing.assert_allclose(out, (data - data.mean(0)) / np.sqrt(data.var(0) + 1e-6), rtol=1e-6, atol=1e-6)

    tree = spaces.Dict({"a": WIDE, "b": spaces.Tuple([spaces.Box(-1e9, 1e9, (), np.float64), spaces.Discrete(3)])})
    leafy = make(tree)
    out = leafy(rows({"a": data, "b": (data[:, 0] * 2, np.ones(len(data), int))})).obs
    assert_moments(moments(leafy, "a"), data)
    assert_moments(moments(leafy, "b/0"), data[:, 0] * 2)
    assert out["b"][1].tolist() == [1] * len(data)
    np.testing.assert_array_equal(out["a"], make()(rows(data)).obs)

    group = np.arange(len(data)) % 3
    each = make(agents=3, per_agent=True)
    out = each(rows(data, group)).obs
    for agent in range(3):
        mine = data[group == agent]
        if len(mine):
            alone = make()
            np.testing.assert_allclose(out[group == agent], alone(rows(mine)).obs, rtol=1e-9, atol=1e-9)
            got = {key: value[agent] for key, value in moments(each).items()}
            assert_moments(got, mine)
        else:
            assert each.counts[agent] == 0


@given(data=arrays(st.integers(2, 20)), cut=st.integers(0, 20))
def test_agents_merge_each_with_itself(data: Any, cut: int) -> None:
    """Also where one copy has met agents that the other has not."""
    group = np.arange(len(data)) % 4
    one, two = make(per_agent=True), make(per_agent=True)
    for worker, part in zip((one, two), (slice(None, cut), slice(cut, None)), strict=True):
        worker(rows(data[part], group[part]))
    merged = one.merge_states([one.state_dict(), two.state_dict()])["moments"][""]
    for agent in range(len(merged["count"])):
        assert_moments({key: value[agent] for key, value in merged.items()}, data[group == agent])


def test_a_copy_that_lost_everything_merges_again() -> None:
    """What was shared counts once, whoever still has it; two different pasts cannot be joined."""
    one, two = make(), make()
    one(rows(np.array([[1.0, 2], [3, 4]])))
    two(rows(np.array([[5.0, 6]])))
    merged = one.merge_states([one.state_dict(), two.state_dict()])
    one.load_state_dict(merged)
    fresh = make()
    fresh(rows(np.array([[7.0, 8]])))
    states = [fresh.state_dict(), one.state_dict()]
    for order in (states, states[::-1]):
        assert_moments(one.merge_states(order)["moments"][""], np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    fresh.load_state_dict(fresh.merge_states([fresh.state_dict()]))
    with pytest.raises(ArgumentError, match="go back to different merged states"):
        one.merge_states([one.state_dict(), fresh.state_dict()])
    same_tree(one.merge_states([]), one.state_dict())


def test_values_before_there_are_statistics() -> None:
    piece = make(per_agent=True, agents=2).eval()
    assert piece(rows(np.array([[1.0, 99.0]]))).obs.tolist() == [[1.0, 10.0]]
    piece.train()
    assert piece(rows(np.array([[1.0, 99.0]]))).obs.tolist() == [[0.0, 0.0]]
    piece.eval()
    out = piece(rows(np.array([[1.0, 99.0], [3.0, 4.0]]), np.array([0, 5]))).obs  # an agent nobody has met
    assert out.tolist() == [[0.0, 0.0], [3.0, 4.0]]


def test_update_false_freezes_in_training_too() -> None:
    piece = make(update=False)
    piece(rows(np.ones((2, 2))))
    assert piece.counts.tolist() == [0]


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(np.float32, np.float32), (np.float64, np.float64), (np.uint8, np.float32), (np.int64, np.float32)],
)
def test_dtypes(dtype: Any, out: Any) -> None:
    piece = make(spaces.Box(0, 100, (2,), dtype))
    assert piece(rows(np.array([[1, 2], [3, 9]], dtype))).obs.dtype == out
    assert piece.output_space(spaces.Box(0, 100, (2,), dtype)) == spaces.Box(-10, 10, (2,), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("per_agent", [False, True])
def test_a_value_that_would_spoil_the_statistics_is_an_error(bad: float, per_agent: bool) -> None:
    tree = spaces.Dict({"a": WIDE, "b": WIDE})
    piece = make(tree, per_agent=per_agent, agents=1)
    fine = np.arange(4.0).reshape(2, 2)
    piece(rows({"a": fine, "b": fine}))
    state = piece.state_dict()
    with pytest.raises(ContractError, match=r"leaf 'b' has a NaN, infinite or huge entry"):
        piece(rows({"a": fine, "b": fine * [[1, bad], [1, 1]]}))
    same_tree(piece.state_dict(), state)


def test_refusals() -> None:
    with pytest.raises(StateError, match="does not know its space"):
        _ = NormalizeObs().counts
    piece = make()
    with pytest.raises(ArgumentError, match=r"expected moments of the leaves \[''\]"):
        piece.load_state_dict({"moments": {}})
    with pytest.raises(ArgumentError, match=r"moments: mean: expected float64 of \(1, 2\), got float64 of \(1, 3\)"):
        piece.load_state_dict(make(vectors(3)).state_dict())
