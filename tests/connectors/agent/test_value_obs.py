"""Connectors that change the values of single leaves: CastObs, ScaleObs, ClipObs, PadObs, ReshapeObs, OneHotObs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, FlattenObs, Rows
from marlvec.connectors.agent.shape.pad_obs import PadObs
from marlvec.connectors.agent.shape.reshape_obs import ReshapeObs
from marlvec.connectors.agent.values.cast_obs import CastObs
from marlvec.connectors.agent.values.clip_obs import ClipObs
from marlvec.connectors.agent.values.one_hot_obs import OneHotObs
from marlvec.connectors.agent.values.scale_obs import ScaleObs
from marlvec.connectors.connector import AgentConnector
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, same_tree

BYTES = spaces.Box(0, 255, (2, 3), np.uint8)


def bound(piece: AgentConnector, space: Space) -> AgentPipeline:
    pipeline = AgentPipeline([piece])
    pipeline.bind(space)
    return pipeline


def through(piece: AgentConnector, space: Space, obs: Any) -> Any:
    return bound(piece, space)(Rows(obs=obs)).obs


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), n=st.integers(0, 4), data=st.data())
def test_leaves_of_another_kind_pass_and_the_rest_lies_in_its_space(space: Space, n: int, data: st.DataObject) -> None:
    """Any space, each piece: what is not of its kind is the very same array, and all that comes out is declared."""
    piece, kind = data.draw(
        st.sampled_from(
            [
                (CastObs("float64"), spaces.Box),
                (CastObs(np.float16), spaces.Box),
                (ClipObs(-0.5, 100), spaces.Box),
                (ClipObs(high=3), spaces.Box),
                (ReshapeObs([1, -1]), spaces.Box),
                (OneHotObs(), (spaces.Discrete, spaces.MultiDiscrete)),
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
    out = pipeline(Rows(obs=obs)).obs
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
    out = through(CastObs(dtype), space, values)
    assert out.dtype == np.dtype(dtype)
    want = [[float(x) if np.dtype(dtype).kind == "f" else round(float(x)) for x in row] for row in values]
    assert out.tolist() == want
    assert bound(CastObs(dtype), space).output_space_ == spaces.Box(0, 255, (6,), np.dtype(dtype).type)


def test_casting_never_wraps_around() -> None:
    for space in (spaces.Box(-1, 255, (2,)), spaces.Box(0, 256, (2,), np.int64), spaces.Box(-np.inf, np.inf, (2,))):
        with pytest.raises(UnsupportedSpaceError, match=r"the bounds of the value, Box \(2,\).* do not fit uint8"):
            bound(CastObs("uint8"), space)
    wide = spaces.Box(0.0, float(2**63), (1,), np.float64)
    with pytest.raises(UnsupportedSpaceError, match="do not fit int64"):
        bound(CastObs("int64"), wide)
    assert bound(CastObs("uint64"), wide).output_space_.dtype == np.uint64
    assert bound(CastObs("float32"), spaces.Box(-1e300, 1e300, (1,), np.float64)).output_space_ == spaces.Box(
        -np.inf, np.inf, (1,)
    )
    assert bound(CastObs("int8"), spaces.Box(-128.4, 127.4, (1,))).output_space_ == spaces.Box(-128, 127, (1,), np.int8)
    pipeline = bound(CastObs("uint8"), spaces.Box(0, 9, (2,)))
    for bad in (9.5, -1, np.nan, np.inf):
        with pytest.raises(
            ContractError, match=r"the value has .* in row 1, outside of Box \(2,\).*cannot become uint8"
        ):
            pipeline(Rows(obs=np.array([[1, 2], [3, bad]], np.float32)))
    assert bound(CastObs("int8"), spaces.Box(-0.6, 9.6, (1,))).output_space_ == spaces.Box(-1, 10, (1,), np.int8)
    assert bound(CastObs("int8"), spaces.Box(0, 9, (0,), np.float32)).output_space_.shape == (0,)


def test_a_dtype_is_kept_by_its_name() -> None:
    assert CastObs(np.float32).params() == {"dtype": "float32", "keys": None}
    for bad, text in (("colour", "one of numpy's"), ("bool", "floats or ints"), (np.complex64, "floats or ints")):
        with pytest.raises(ArgumentError, match=text):
            CastObs(bad)


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
    out = through(ScaleObs(*target), space, values)
    assert out.dtype == np.float32
    assert (out[0] == np.float32(target[0])).all()
    assert (out[1] == np.float32(target[1] if top > bottom else target[0])).all()
    half = top / 2 - bottom / 2 or 1  # halves, for bounds as far apart as float64 can be
    share = (values.astype(np.float64) / 2 - bottom / 2) / half
    np.testing.assert_allclose(out, target[0] + share * (target[1] - target[0]), rtol=1e-5, atol=1e-5)
    assert all_inside(spaces.Box(*target, (3,)), out, len(out))


def test_scaling_goes_entry_by_entry_and_bytes_come_out_as_their_255th() -> None:
    space = spaces.Box(np.array([0, -1, 5], np.float32), np.array([10, 1, 6], np.float32))
    obs = np.array([[5, 0.5, 5.25]], np.float32)
    assert through(ScaleObs(), space, obs).tolist() == [[0.5, 0.75, 0.25]]
    every = np.arange(256, dtype=np.uint8).reshape(128, 2)
    out = through(ScaleObs(), spaces.Box(0, 255, (2,), np.uint8), every)
    np.testing.assert_array_equal(out, every.astype(np.float32) / np.float32(255))


def test_a_narrow_range_holds_what_is_scaled_to_it() -> None:
    """Between neighbouring floats rounding is as large as the range."""
    target = (3, 3 + 2**-21)
    obs = np.linspace(0, 1, 10_000, dtype=np.float32).reshape(-1, 1)
    out = through(ScaleObs(*target), spaces.Box(0, 1, (1,)), obs)
    assert all_inside(bound(ScaleObs(*target), spaces.Box(0, 1, (1,))).output_space_, out, len(out))
    assert len(np.unique(out)) == 3


def test_what_has_no_bounds_is_not_scaled() -> None:
    open_, half = spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(0, np.inf, (2,))
    for space in (open_, half, spaces.Discrete(3)):
        with pytest.raises(
            UnsupportedSpaceError, match=r"bounds at both ends, and there is none in .*ClipObs before it"
        ):
            bound(ScaleObs(), space)
    both = spaces.Dict({"a": open_, "b": BYTES})
    obs = batch(both, 3)
    out = through(ScaleObs(), both, obs)
    assert out["a"] is obs["a"]
    assert out["b"].max() <= 1
    chain = AgentPipeline([ClipObs(-2, 2), ScaleObs(-1, 1)])
    chain.bind(open_)
    assert chain(Rows(obs=np.array([[-9, 1]], np.float32))).obs.tolist() == [[-1, 0.5]]
    for low, high in ((1, 1), (2, 1), (0, np.inf), (np.nan, 1)):
        with pytest.raises(ArgumentError, match="low must be below high and both finite"):
            ScaleObs(low, high)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "bounds"),
    [
        (-1, 1, np.float32, (-1, 1)),
        (None, 0.1, np.float32, (-np.inf, np.float32(0.1))),
        (-0.5, None, np.float64, (-0.5, np.inf)),
        (2.5, 7.5, np.uint8, (3, 7)),
        (-5, 1000, np.uint8, (0, 255)),
        (None, 1e300, np.int64, (-(2**63), 2**63 - 1)),
    ],
)
def test_clipping_takes_the_bounds_along(low: Any, high: Any, dtype: Any, bounds: Any) -> None:
    kind = np.dtype(dtype)
    ends = (-np.inf, np.inf) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    space = spaces.Box(*ends, (2,), dtype)
    pipeline = bound(ClipObs(low, high), space)
    assert pipeline.output_space_ == spaces.Box(*bounds, (2,), dtype)
    obs = np.array([[0, 1], [2, 3], [5, 100]]).astype(dtype)
    out = pipeline(Rows(obs=obs)).obs
    assert out.dtype == dtype
    assert out.tolist() == [[min(max(x, bounds[0]), bounds[1]) for x in row] for row in obs.tolist()]


def test_what_cannot_be_clipped() -> None:
    with pytest.raises(ArgumentError, match="give low, high or both"):
        ClipObs()
    for low, high in ((2, 1), (np.nan, 1)):
        with pytest.raises(ArgumentError, match="low must not be above high"):
            ClipObs(low, high)
    for low, high in ((0.2, 0.8), (256, 300), (-9, -1)):
        with pytest.raises(UnsupportedSpaceError, match="no uint8 of the value lies between"):
            bound(ClipObs(low, high), BYTES)


def test_padding_puts_zeros_behind() -> None:
    space = spaces.Dict({"a": spaces.Box(1, 2, (2,)), "b": spaces.Box(-1, 1, (1, 2), np.float64), "c": BYTES})
    obs = {
        "a": np.array([[1, 2]], np.float32),
        "b": np.array([[[-1.0, 1.0]]]),
        "c": np.full((1, 2, 3), 7, np.uint8),
    }
    assert through(PadObs(4), space, obs)["a"].tolist() == [[1, 2, 0, 0]]
    pipeline = bound(PadObs((2, 3)), space)
    out = pipeline(Rows(obs=obs)).obs
    assert out["a"] is obs["a"]
    assert out["b"].tolist() == [[[-1, 1, 0], [0, 0, 0]]]
    assert out["c"].tolist() == obs["c"].tolist()
    assert out["b"].dtype == np.float64
    high = np.array([[1, 1, 0], [0, 0, 0]], np.float64)
    after = pipeline.output_space_
    assert isinstance(after, spaces.Dict)
    assert after["b"] == spaces.Box(-high, high, dtype=np.float64)
    for shape, text in (((1, 9), "leaf 'c' of shape .* is larger already"), ((1, 1, 1), "Boxes of 3 axes")):
        with pytest.raises(UnsupportedSpaceError, match=text):
            bound(PadObs(shape), space)
    with pytest.raises(ArgumentError, match="lengths of at least 0"):
        PadObs((-1,))


def test_reshaping_keeps_the_numbers_in_order() -> None:
    obs = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert through(ReshapeObs((3, 2)), BYTES, obs).tolist() == obs.reshape(2, 3, 2).tolist()
    assert bound(ReshapeObs((-1,)), BYTES).output_space_ == spaces.Box(0, 255, (6,), np.uint8)
    assert through(ReshapeObs((6, -1)), BYTES, obs[:0]).shape == (0, 6, 1)
    low = spaces.Box(np.array([0, 1], np.float32), np.array([2, 3], np.float32))
    assert bound(ReshapeObs((2, 1)), low).output_space_ == spaces.Box(low.low[:, None], low.high[:, None])
    with pytest.raises(
        UnsupportedSpaceError, match=r"cannot give the value of shape \(2, 3\) that shape; name .*keys="
    ):
        bound(ReshapeObs((5,)), BYTES)
    for shape in ((-2,), (-1, -1)):
        with pytest.raises(ArgumentError, match="of which one may be -1"):
            ReshapeObs(shape)


@given(space=any_spaces(), n=st.integers(0, 3))
def test_one_hots_in_place_are_what_gymnasium_makes_of_each_leaf(space: Space, n: int) -> None:
    leaves = SpaceTree(space).leaves
    chosen = [isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)) for leaf in leaves]
    if not any(chosen):
        return
    pipeline, obs = bound(OneHotObs(), space), batch(space, n)
    out = pipeline(Rows(obs=obs)).obs
    pairs = zip(leaves, SpaceTree(space).flatten(obs), SpaceTree(pipeline.output_space_).flatten(out), strict=True)
    for (leaf, before, after), hot in zip(pairs, chosen, strict=True):
        if hot:
            assert after.dtype == np.float32
            for i in range(n):
                np.testing.assert_array_equal(after[i], spaces.flatten(leaf.space, before[i]))
    same_tree(
        map_tree(np.asarray, bound(FlattenObs(), pipeline.output_space_)(Rows(obs=out)).obs),
        bound(FlattenObs(), space)(Rows(obs=obs)).obs,
    )


def test_a_category_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ContractError, match="leaf 'x' is 4 in row 1, outside of"):
        through(OneHotObs(), spaces.Dict({"x": spaces.Discrete(3, start=1)}), {"x": np.array([1, 4])})


def test_keys_name_the_leaves_to_work_on() -> None:
    box = spaces.Box(-1, 1, (2,))
    space = spaces.Dict({"eye": spaces.Dict({"l": box, "r": box, "on": spaces.Discrete(2)}), "ear": box})

    def changed(*keys: str) -> list[str]:
        after = SpaceTree(bound(ReshapeObs((2, 1), keys=keys), space).output_space_)
        return [leaf.path for leaf in after.leaves if leaf.shape == (2, 1)]

    assert changed("eye") == ["eye/l", "eye/r"]
    assert changed("eye/r", "ear") == ["ear", "eye/r"]
    with pytest.raises(ArgumentError, match=r"no key 'ey' in the space; its leaves are \['ear', 'eye/l'"):
        changed("ey")
    with pytest.raises(UnsupportedSpaceError, match=r"works on Boxes, and there is none at 'eye/on' of"):
        changed("ear", "eye/on")
    assert repr(ClipObs(-1, 1, keys=["a"])) == "ClipObs(low=-1, high=1, keys=('a',))"


def test_before_it_knows_its_space() -> None:
    with pytest.raises(StateError, match="ClipObs does not know its space"):
        ClipObs(0, 1)(Rows(obs=np.zeros((1, 2))))
