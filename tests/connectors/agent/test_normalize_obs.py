from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from marlvec.connectors import AgentPipeline, FlattenObs, NormalizeObs, Rows
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.trees import tree_leaves
from tests.connectors.helpers.samples import rows_of, same_tree, vectors

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


def split(data: Any, cuts: list[int]) -> list[Any]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def arrays(n: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    values = st.floats(-1e4, 1e4, allow_subnormal=False)
    return n.flatmap(lambda k: hnp.arrays(np.float64, (k, 2), elements=values))


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(84)
@given(data=arrays(st.integers(1, 30)), cuts=st.lists(st.integers(0, 30), max_size=4), rounds=st.integers(1, 3))
def test_merged_statistics_are_those_of_the_pooled_data(data: Any, cuts: list[int], rounds: int) -> None:
    """Over any split into workers, and over rounds of merging and loading; the rest of the line below in one go.

    Frozen in eval; every row counts once; clip=None; per leaf; and per agent.
    """
    workers = [make() for _ in range(len(cuts) + 1)]
    seen = data[:0]
    for k in range(rounds):
        parts = split(data * (k + 1), [min(c, len(data)) for c in cuts])
        for worker, part in zip(workers, parts, strict=True):
            worker(rows(part))
        merged = workers[0].merge_states([worker.state_dict() for worker in workers])
        for worker in workers:
            worker.load_state_dict(merged)
        seen = np.concatenate([seen, data * (k + 1)])
        for worker in workers:
            assert_moments(moments(worker), seen)

    frozen = workers[0].eval()
    state = frozen.state_dict()
    for part in (data, data * 3):
        frozen(rows(part))
    same_tree(frozen.state_dict(), state)

    once, whole = make(), make()
    for row in data:
        once(rows(row[None]))
    whole(rows(data))
    assert once.counts.tolist() == whole.counts.tolist() == [len(data)]
    assert_moments(moments(once), data)
    assert_moments(moments(whole), data)

    unclipped = make(clip=None, epsilon=1e-6)
    out = unclipped(rows(data)).obs
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


def test_the_input_is_not_written_to() -> None:
    obs = np.arange(6.0).reshape(3, 2)
    obs.flags.writeable = False
    make()(rows(obs))
    make(per_agent=True)(rows(obs))


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


def test_a_state_is_exact_and_a_copy() -> None:
    one, two = make(), make()
    one(rows(np.random.default_rng(0).normal(size=(9, 2))))
    state = one.state_dict()
    two.load_state_dict(state)
    data = rows(np.random.default_rng(1).normal(size=(9, 2)))
    same_tree(one(data), two(data))
    same_tree(one.state_dict(), two.state_dict())
    assert state["moments"][""]["count"].tolist() == [9]


def test_refusals() -> None:
    for kwargs in ({"clip": 0.0}, {"clip": -1.0}, {"epsilon": 0.0}, {"clip": float("nan")}):
        with pytest.raises(ArgumentError, match="must be above 0"):
            NormalizeObs(**kwargs)  # type: ignore[arg-type]  # each is a float
    with pytest.raises(UnsupportedSpaceError, match="found no Box in Discrete.*put FlattenObs before it"):
        make(spaces.Discrete(3))
    for use in (lambda: NormalizeObs().counts, lambda: NormalizeObs().load_state_dict({})):
        with pytest.raises(StateError, match="does not know its space"):
            use()
    assert NormalizeObs().state_dict() == {}
    piece = make()
    with pytest.raises(ArgumentError, match=r"expected moments of the leaves \[''\]"):
        piece.load_state_dict({"moments": {}})
    with pytest.raises(ArgumentError, match=r"moments: mean: expected float64 of \(1, 2\), got float64 of \(1, 3\)"):
        piece.load_state_dict(make(vectors(3)).state_dict())


def test_it_comes_after_flatten_obs() -> None:
    pipeline = AgentPipeline([FlattenObs(), NormalizeObs()])
    pipeline.bind(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,))}))
    obs = {"a": np.array([0, 1]), "b": np.array([[0, 1], [1, 0]], np.float32)}
    np.testing.assert_allclose(
        pipeline(rows_of([(0, 0), (1, 0)], obs)).obs, [[1, -1, -1, 1], [-1, 1, 1, -1]], atol=1e-6
    )
