"""Connectors that change the values of single leaves: CastObs, ScaleObs, ClipObs, PadObs, ReshapeObs, OneHotObs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, bound, same_tree, through

BYTES = spaces.Box(0, 255, (2, 3), np.uint8)


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), n=st.integers(0, 4), data=st.data())
def test_leaves_of_another_kind_pass_and_the_rest_lies_in_its_space(space: Space, n: int, data: st.DataObject) -> None:
    """Any space, each piece: what is not of its kind is the very same array, and all that comes out is declared."""
    piece, kind = data.draw(
        st.sampled_from(
            [
                (c.CastObs("float64"), spaces.Box),
                (c.CastObs(np.float16), spaces.Box),
                (c.ClipObs(-0.5, 100), spaces.Box),
                (c.ClipObs(high=3), spaces.Box),
                (c.ReshapeObs([1, -1]), spaces.Box),
                (c.OneHotObs(), (spaces.Discrete, spaces.MultiDiscrete)),
            ]
        )
    )
    tree, obs = SpaceTree(space), batch(space, n)
    mine = [isinstance(leaf.space, kind) for leaf in tree.leaves]
    if not any(mine):
        with pytest.raises(UnsupportedSpaceError, match=r"works on .*, and there is none in"):
            bound(piece, space)
        return
    try:
        pipeline = bound(piece, space)
    except UnsupportedSpaceError as error:
        assert "lies between" in str(error)  # noqa: PT017  # a Box of bounds above the limit's ints
        return
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    after = SpaceTree(pipeline.output_space_)
    assert [leaf.path for leaf in after.leaves] == [leaf.path for leaf in tree.leaves]
    for before, here, worked in zip(tree.flatten(obs), after.flatten(out), mine, strict=True):
        assert worked or here is before


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int32", np.int64])
@pytest.mark.parametrize("source", [np.float32, np.float64, np.uint8, np.int64])
def test_casting_keeps_values_and_rounds_to_the_nearest_int(dtype: Any, source: Any) -> None:
    values = np.array([[0, 1, 2, 3, 254, 255], [9, 8, 7, 6, 5, 4]]).astype(source)
    if source in (np.float32, np.float64):
        values += np.array([0.5, 0.5, 0.5, 0.25, 0.75, 0], source)  # type: ignore[operator]  # floats they are
    space = spaces.Box(0, 255, (6,), source)
    out = through(c.CastObs(dtype), space, values)
    assert out.dtype == np.dtype(dtype)
    want = [[float(x) if np.dtype(dtype).kind == "f" else round(float(x)) for x in row] for row in values]
    assert out.tolist() == want
    assert bound(c.CastObs(dtype), space).output_space_ == spaces.Box(0, 255, (6,), np.dtype(dtype).type)


def test_casting_never_wraps_around() -> None:
    assert c.CastObs(np.float32).params() == {"dtype": "float32", "keys": None}
    pipeline = bound(c.CastObs("uint8"), spaces.Box(0, 9, (2,)))
    for bad in (9.5, -1, np.nan, np.inf):
        with pytest.raises(
            ContractError, match=r"the value has .* in row 1, outside of Box \(2,\).*cannot become uint8"
        ):
            pipeline(c.Rows(obs=np.array([[1, 2], [3, bad]], np.float32)))


BOUNDS = [
    (0.0, 255.0, np.uint8),
    (-3.0, 5.0, np.int64),
    (-0.1, 0.2, np.float32),
    (1e-3, 7.0, np.float64),
    (-3.4e38, 3.4e38, np.float32),
    (-1.7e308, 1.7e308, np.float64),
    (2.0, 2.0, np.float32),
]


@pytest.mark.parametrize(("low", "high", "dtype"), BOUNDS)
@pytest.mark.parametrize("target", [(0, 1), (-1, 1), (-0.3, 0.1), (0, 255)])
def test_scaling_is_linear_and_exact_at_the_ends(
    low: float, high: float, dtype: Any, target: tuple[float, float]
) -> None:
    space = spaces.Box(low, high, (3,), dtype)
    bottom, top = (np.float64(bound[0]) for bound in (space.low, space.high))
    shares = np.linspace(0, 1, 60).reshape(20, 3)
    between = (bottom * (1 - shares) + top * shares).clip(bottom, top).astype(dtype)
    values = np.stack([space.low, space.high, *between])
    out = through(c.ScaleObs(*target), space, values)
    assert out.dtype == np.float32
    assert (out[0] == np.float32(target[0])).all()
    assert (out[1] == np.float32(target[1] if top > bottom else target[0])).all()
    half = top / 2 - bottom / 2 or 1  # halves, for bounds as far apart as float64 can be
    share = (values.astype(np.float64) / 2 - bottom / 2) / half
    np.testing.assert_allclose(out, target[0] + share * (target[1] - target[0]), rtol=1e-5, atol=1e-5)
    assert all_inside(spaces.Box(*target, (3,)), out, len(out))


def test_bytes_come_out_as_their_255th() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(128, 2)
    out = through(c.ScaleObs(), spaces.Box(0, 255, (2,), np.uint8), every)
    np.testing.assert_array_equal(out, every.astype(np.float32) / np.float32(255))


def test_a_narrow_range_holds_what_is_scaled_to_it() -> None:
    """Between neighbouring floats rounding is as large as the range."""
    target = (3, 3 + 2**-21)
    obs = np.linspace(0, 1, 10_000, dtype=np.float32).reshape(-1, 1)
    out = through(c.ScaleObs(*target), spaces.Box(0, 1, (1,)), obs)
    assert all_inside(bound(c.ScaleObs(*target), spaces.Box(0, 1, (1,))).output_space_, out, len(out))
    assert len(np.unique(out)) == 3


def test_what_has_no_bounds_is_not_scaled() -> None:
    open_ = spaces.Box(-np.inf, np.inf, (2,))
    both = spaces.Dict({"a": open_, "b": BYTES})
    obs = batch(both, 3)
    out = through(c.ScaleObs(), both, obs)
    assert out["a"] is obs["a"]
    assert out["b"].max() <= 1
    chain = c.AgentPipeline([c.ClipObs(-2, 2), c.ScaleObs(-1, 1)])
    chain.bind(open_)
    assert chain(c.Rows(obs=np.array([[-9, 1]], np.float32))).obs.tolist() == [[-1, 0.5]]


@given(space=any_spaces(), n=st.integers(0, 3))
def test_one_hots_in_place_are_what_gymnasium_makes_of_each_leaf(space: Space, n: int) -> None:
    leaves = SpaceTree(space).leaves
    chosen = [isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)) for leaf in leaves]
    if not any(chosen):
        return
    pipeline, obs = bound(c.OneHotObs(), space), batch(space, n)
    out = pipeline(c.Rows(obs=obs)).obs
    pairs = zip(leaves, SpaceTree(space).flatten(obs), SpaceTree(pipeline.output_space_).flatten(out), strict=True)
    for (leaf, before, after), hot in zip(pairs, chosen, strict=True):
        if hot:
            assert after.dtype == np.float32
            for i in range(n):
                np.testing.assert_array_equal(after[i], spaces.flatten(leaf.space, before[i]))
    same_tree(
        map_tree(np.asarray, bound(c.FlattenObs(), pipeline.output_space_)(c.Rows(obs=out)).obs),
        bound(c.FlattenObs(), space)(c.Rows(obs=obs)).obs,
    )


def test_a_category_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ContractError, match="leaf 'x' is 4 in row 1, outside of"):
        through(c.OneHotObs(), spaces.Dict({"x": spaces.Discrete(3, start=1)}), {"x": np.array([1, 4])})


def test_keys_name_the_leaves_to_work_on() -> None:
    box = spaces.Box(-1, 1, (2,))
    space = spaces.Dict({"eye": spaces.Dict({"l": box, "r": box, "on": spaces.Discrete(2)}), "ear": box})

    def changed(*keys: str) -> list[str]:
        after = SpaceTree(bound(c.ReshapeObs((2, 1), keys=keys), space).output_space_)
        return [leaf.path for leaf in after.leaves if leaf.shape == (2, 1)]

    assert changed("eye") == ["eye/l", "eye/r"]
    assert changed("eye/r", "ear") == ["ear", "eye/r"]
    assert repr(c.ClipObs(-1, 1, keys=["a"])) == "ClipObs(low=-1, high=1, keys=('a',))"
