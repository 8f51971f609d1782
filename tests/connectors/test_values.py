"""Observations whose values change: scaled, clipped, mapped, and told more or less."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Dict
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors import AgentIndicator, AgentPipeline
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from tests.connectors import samples
from tests.connectors.samples import (
    Space,
    all_inside,
    any_spaces,
    batch,
    bound,
    rows_of,
    same_tree,
    through,
    unbatch,
    vectors,
)
from tests.vector.support.reference import refused

# --- Connectors that change the values of single leaves: CastObs, ScaleObs, ClipObs, PadObs, ReshapeObs, OneHotObs


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
        refused(UnsupportedSpaceError, r"works on .*, and there is none in", bound, piece, space)
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


# --- MapObs and PerAgent: functions of observations


NAMES = ("wolf", "hare", "fox")
named = partial(samples.bound, agents=NAMES)
PLACE = spaces.Dict({"at": spaces.Box(-9, 9, (2,)), "kind": spaces.Discrete(4)})


@given(space=any_spaces(), n=st.integers(0, 4))
def test_the_function_gets_all_rows_or_one_and_both_come_out_alike(space: Space, n: int) -> None:
    """Any space: identity by row is identity; the single rows are what the space itself would give."""
    obs = batch(space, n)
    pairs = [(i, i % 3) for i in range(n)]
    seen: list[Any] = []
    whole = named(c.MapObs(lambda value: value), space)(rows_of(pairs, obs)).obs
    apart = named(c.PerAgent(lambda value, agent: [seen.append((value, agent)), value][1]), space)(
        rows_of(pairs, obs)
    ).obs
    same_tree(whole, obs)
    same_tree(map_tree(np.asarray, apart), obs)
    assert [agent for _, agent in seen] == [NAMES[i % 3] for i in range(n)]
    for i, (value, _) in enumerate(seen):
        same_tree(value, unbatch(space, obs, i))


def test_one_call_for_all_rows() -> None:
    calls: list[Any] = []

    def toward_origin(obs: Any) -> Any:
        calls.append(obs["at"].shape)
        return -obs["at"] / np.linalg.norm(obs["at"], axis=1, keepdims=True)

    pipeline = named(c.MapObs(toward_origin, spaces.Box(-1, 1, (2,))), PLACE)
    obs = {"at": np.array([[3, 4], [0, -2]], np.float32), "kind": np.array([0, 1])}
    out = pipeline(rows_of([(0, 0), (0, 1)], obs)).obs
    np.testing.assert_allclose(out, [[-0.6, -0.8], [0, 1]], rtol=1e-6)
    assert calls == [(2, 2)]
    assert pipeline.output_space_ == spaces.Box(-1, 1, (2,))


def test_a_function_may_know_who_it_looks_at() -> None:
    def mirrored(obs: Any, agent: str | int) -> Any:
        return -obs if agent in ("hare", 1) else obs

    rows = rows_of([(4, 1), (0, 0), (0, 1)], np.ones((3, 2), np.float32))
    for agents in (NAMES, ()):
        assert named(c.PerAgent(mirrored), vectors(2), agents=agents)(rows).obs.tolist() == [[-1, -1], [1, 1], [-1, -1]]
    with pytest.raises(ContractError, match="agent_index 3 in rows of 3 agents"):
        named(c.PerAgent(mirrored), vectors(2))(rows_of([(0, 3)], np.ones((1, 2), np.float32)))


def test_the_space_may_be_a_rule() -> None:
    def first_half(space: Space) -> Space:
        assert isinstance(space, spaces.Box)
        half = space.shape[0] // 2
        return spaces.Box(space.low[:half], space.high[:half])

    pieces = [c.MapObs(lambda obs: obs[:, : obs.shape[1] // 2], first_half) for _ in range(2)]
    pipeline = c.AgentPipeline(pieces)
    pipeline.bind(vectors(8, -1, 1))
    assert pipeline.output_space_ == vectors(2, -1, 1)
    assert c.MapObs(len, vectors()).params() == {"function": len, "output_space": vectors()}
    assert pipeline(c.Rows(obs=np.zeros((3, 8), np.float32))).obs.shape == (3, 2)


def test_kinds_of_numbers_are_brought_to_what_was_declared() -> None:
    space = spaces.Dict({"x": vectors(2), "hit": spaces.MultiBinary(1), "k": spaces.Discrete(3)})

    def wide(obs: Any) -> Any:
        return {"x": obs["x"].astype(np.float64), "hit": obs["hit"] > 0, "k": obs["k"].astype(np.int32)}

    def lists(obs: Any, agent: Any) -> Any:
        return {"x": obs["x"].tolist(), "hit": [True], "k": int(obs["k"])}

    obs = {"x": np.ones((2, 2), np.float32), "hit": np.ones((2, 1), np.int8), "k": np.array([1, 2])}
    for piece in (c.MapObs(wide), c.PerAgent(lists)):
        same_tree(named(piece, space)(rows_of([(0, 0), (0, 1)], obs)).obs, {key: obs[key] for key in space.spaces})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"at": np.zeros((2, 3), np.float32), "kind": np.zeros(2, int)}, r"float32 of shape \(2, 3\) for leaf 'at'"),
        ({"at": np.zeros((1, 2), np.float32), "kind": np.zeros(2, int)}, r"shape \(1, 2\) for leaf 'at'"),
        ({"at": np.zeros((2, 2), np.float32), "kind": np.zeros(2)}, r"float64 of shape \(2,\) for leaf 'kind'"),
        ({"at": np.zeros((2, 2), np.float32)}, r"expected a dict with keys \['at', 'kind'\] at /, got \['at'\]"),
        ({"at": [[1], [1, 2]], "kind": np.zeros(2, int)}, "what is no regular array for leaf 'at'"),
        (None, "got NoneType"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_where(value: Any, text: str) -> None:
    rows = rows_of([(0, 0), (0, 1)], batch(PLACE, 2))
    with pytest.raises(ContractError, match=f"the function of MapObs returned.*{text}.*say so with output_space="):
        named(c.MapObs(lambda obs: value), PLACE)(rows)

    def second_is_bad(obs: Any, agent: Any) -> Any:
        if agent == "wolf":
            return obs
        return map_tree(lambda leaf: leaf[1] if isinstance(leaf, np.ndarray) and len(leaf) == 2 else leaf, value)

    refused(ContractError, "the function of PerAgent returned for row 1", named(c.PerAgent(second_is_bad), PLACE), rows)


def test_what_was_given_cannot_be_written_to_and_what_comes_out_can() -> None:
    def in_place(obs: Any, agent: Any = None) -> Any:
        obs *= 2
        return obs

    rows = rows_of([(0, 0)], np.ones((1, 2), np.float32))
    for piece in (c.MapObs(in_place), c.PerAgent(in_place)):
        refused(ValueError, "read-only", named(piece, vectors(2)), rows)
    for piece in (c.MapObs(lambda obs: obs), c.MapObs(lambda obs: np.broadcast_to(np.float32(1), obs.shape))):
        out = named(piece, vectors(2))(rows).obs
        out += 1
    assert rows.obs.tolist() == [[1, 1]]


def test_objects_pass_by_their_number() -> None:
    texts = np.array(["a", "bc"], object)
    upper = named(c.PerAgent(lambda obs, agent: f"{agent}: {obs}"), spaces.Text(9))
    assert upper(rows_of([(0, 0), (0, 2)], texts)).obs.tolist() == ["wolf: a", "fox: bc"]
    whole = named(c.MapObs(lambda obs: obs[::-1]), spaces.Text(9))
    assert whole(rows_of([(0, 0), (0, 2)], texts)).obs.tolist() == ["bc", "a"]
    with pytest.raises(ContractError, match=r"expected objects of shape \(2,\)"):
        named(c.MapObs(lambda obs: obs[:1]), spaces.Text(9))(rows_of([(0, 0), (0, 2)], texts))


# --- Connectors of single leaves on numbers that can be checked in one's head, and the spaces that they declare


F32, F64, U8, I64, INF = np.float32, np.float64, np.uint8, np.int64, np.inf
SMALL_IMAGE = Box(0, 255, (2, 3), U8)
IMAGE = Box(0, 255, (2, 4), U8)
PIXELS = [[[0, 2, 9, 9], [4, 6, 9, 10]]]
SIX = [[[0, 1, 2], [3, 4, 5]]]
LEFT, RIGHT = [[[0, -INF], [0, 0]], [[0, 0], [0, 0]]], [[[1, 1], [1, 3]], [[1, 1], [5, 1]]]
STEPS = {"t": np.array([0, 1, 3, 4, 9])}
DEAD = {"terminated": np.array([False, True, False])}


def box(low: Any, high: Any, dtype: Any = F32) -> Box:
    return Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


def ends(dtype: Any) -> Box:
    limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None
    return Box(limits.min, limits.max, (2,), dtype) if limits else Box(-INF, INF, (2,), dtype)


Row = tuple[c.AgentConnector, Box, Any, Any, Box, dict[str, Any]]
# A connector, its space, observations, what becomes of them, the space after it, and other columns.
ROWS: list[Row] = [
    *(
        (c.TimeFeature(4), box([0, 0], [9, 9], d), [[1, 2]] * 5, shown, box([0, 0, 0], [9, 9, 1], after), STEPS)
        for shown in [[[1, 2, x] for x in (0, 0.25, 0.75, 1, 1)]]
        for d, after in ((F32, F32), (F64, F64), (U8, F32), (I64, F64))
    ),
    *(
        (
            c.StateInObs(box([-9], [9], d), "append"),
            box([-1], [1]),
            [[0.5]],
            [[0.5, 7]],
            box([-1, -9], [1, 9], d),
            state,
        )
        for d, state in ((F32, {"state": np.array([[7]], F32)}), (F64, {"state": np.array([[7]], F64)}))
    ),
    *(
        (
            c.DeathMask(append=True),
            box([1], [9], d),
            [[1], [3], [5]],
            [[1, 1], [0, 0], [5, 1]],
            box([0, 0], [9, 1], d),
            DEAD,
        )
        for d in (F32, F64, U8)
    ),
    (c.PadObs(4), box([1, 1], [2, 2]), [[1, 2]], [[1, 2, 0, 0]], box([1, 1, 0, 0], [2, 2, 0, 0]), {}),
    (
        *(c.PadObs((2, 3)), box([[-1, -1]], [[1, 1]], F64), [[[-1, 1]]], [[[-1, 1, 0], [0, 0, 0]]]),
        *(box([[-1, -1, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]], F64), {}),
    ),
    (c.ReshapeObs((3, 2)), SMALL_IMAGE, SIX, [[[0, 1], [2, 3], [4, 5]]], Box(0, 255, (3, 2), U8), {}),
    (c.ReshapeObs((-1,)), SMALL_IMAGE, SIX, [[0, 1, 2, 3, 4, 5]], Box(0, 255, (6,), U8), {}),
    (c.ReshapeObs((6, -1)), SMALL_IMAGE, SIX, [[[x] for x in range(6)]], Box(0, 255, (6, 1), U8), {}),
    (c.ReshapeObs((2, 1)), box([0, 1], [2, 3]), [[0, 1]], [[[0], [1]]], box([[0], [1]], [[2], [3]]), {}),
    (c.ScaleObs(), box([0, -1, 5], [10, 1, 6]), [[5, 0.5, 5.25]], [[0.5, 0.75, 0.25]], Box(0, 1, (3,)), {}),
    (c.ResizeObs((1, 2)), IMAGE, PIXELS, [[[3, 9]]], Box(0, 255, (1, 2), U8), {}),
    (c.ResizeObs((1, 4), "nearest"), IMAGE, PIXELS, [[[4, 6, 9, 10]]], Box(0, 255, (1, 4), U8), {}),
    (c.ResizeObs((2, 8)), IMAGE, PIXELS, np.repeat(PIXELS, 2, 2).tolist(), Box(0, 255, (2, 8), U8), {}),
    (c.ResizeObs((1, 2)), Box(0, 1, (2, 2), bool), [[[0, 1], [1, 0]]], [[[True, False]]], Box(0, 1, (1, 2), bool), {}),
    # Bounds are those of all pixels, channel by channel.
    (c.ResizeObs((1, 1)), box(LEFT, RIGHT), [np.zeros((2, 2, 2))], [[[[0, 0]]]], box([[[0, -INF]]], [[[5, 3]]]), {}),
    (c.GrayscaleObs(), box([[[0] * 3]], [[[1, INF, 1]]]), [[[[0] * 3]]], [[[[0]]]], Box(0, INF, (1, 1, 1)), {}),
    *(
        (c.ClipObs(low, high), ends(d), [[0, 1], [2, 5], [9, 100]], shown, Box(*bounds, (2,), d), {})
        for low, high, d, shown, bounds in (
            (-1, 1, F32, [[0, 1], [1, 1], [1, 1]], (-1, 1)),
            (None, 0.5, F32, [[0, 0.5], [0.5, 0.5], [0.5, 0.5]], (-INF, 0.5)),
            (1.5, None, F64, [[1.5, 1.5], [2, 5], [9, 100]], (1.5, INF)),
            (2.5, 7.5, U8, [[3, 3], [3, 5], [7, 7]], (3, 7)),
            (-5, 1000, U8, [[0, 1], [2, 5], [9, 100]], (0, 255)),
            (None, 1e300, I64, [[0, 1], [2, 5], [9, 100]], (-(2**63), 2**63 - 1)),
        )
    ),
    (c.CastObs("float32"), Box(-1e300, 1e300, (1,), F64), [[2]], [[2]], Box(-INF, INF, (1,)), {}),
    (c.CastObs("int8"), Box(-128.4, 127.4, (1,)), [[-128.4]], [[-128]], Box(-128, 127, (1,), np.int8), {}),
    (c.CastObs("int8"), Box(-0.6, 9.6, (1,)), [[9.6]], [[10]], Box(-1, 10, (1,), np.int8), {}),
    (c.CastObs("int8"), Box(0, 9, (0,)), [[]], [[]], Box(0, 9, (0,), np.int8), {}),
    (c.CastObs("uint64"), Box(0.0, 2.0**63, (1,), F64), [[2]], [[2]], Box(0, 2**63, (1,), np.uint64), {}),
]


@pytest.mark.parametrize(("piece", "space", "obs", "shown", "after", "columns"), ROWS)
def test_by_hand(
    piece: c.AgentConnector, space: Box, obs: Any, shown: Any, after: Box, columns: dict[str, Any]
) -> None:
    pipeline = bound(piece, space)
    assert pipeline.output_space_ == after
    out = pipeline(c.Rows(obs=np.array(obs, space.dtype), **columns)).obs
    assert (out.tolist(), out.dtype) == (shown, after.dtype)


@pytest.mark.parametrize("piece", [c.ResizeObs((2, 3)), c.ReshapeObs((2, 3)), c.DropKeys("b")], ids=repr)
def test_what_needs_no_change_is_not_copied(piece: c.AgentConnector) -> None:
    space = Dict(a=SMALL_IMAGE, b=SMALL_IMAGE)
    obs = {"a": np.zeros((1, 2, 3), U8), "b": np.ones((1, 2, 3), U8)}
    assert np.shares_memory(bound(piece, space)(c.Rows(obs=obs)).obs["a"], obs["a"])


# --- Observations that are told more, or less: TimeFeature, StateInObs and DeathMask


STATE = spaces.Box(-9, 9, (3,))


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), state_space=any_spaces(), n=st.integers(0, 3))
def test_the_state_stands_beside_any_observation(space: Space, state_space: Space, n: int) -> None:
    pipeline = bound(c.StateInObs(state_space), space)
    obs, state = batch(space, n), batch(state_space, n)
    out = pipeline(c.Rows(obs=obs, state=state)).obs
    assert list(out) == ["obs", "state"]
    assert out["obs"] is obs
    for got, want in zip(
        SpaceTree(state_space).flatten(out["state"]), SpaceTree(state_space).flatten(state), strict=True
    ):
        assert got is want
    assert all_inside(pipeline.output_space_, out, n)


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), data=st.data())
def test_the_dead_see_nothing(space: Space, data: st.DataObject) -> None:
    """Any space, any rows: the terminated are blank, all others untouched, and the blank is a member of the space."""
    dead = np.array(data.draw(st.lists(st.booleans(), max_size=4)), bool)
    n = len(dead)
    pipeline, obs = bound(c.DeathMask(), space), batch(space, n)
    rows = c.Rows(obs=obs, terminated=dead, truncated=~dead, last=np.ones(n, bool))
    out = pipeline(rows).obs
    assert all_inside(pipeline.output_space_, out, n)
    leaves = SpaceTree(space).leaves
    for leaf, before, after in zip(leaves, SpaceTree(space).flatten(obs), SpaceTree(space).flatten(out), strict=True):
        blank = np.broadcast_to(getattr(leaf.space, "start", 0), leaf.shape)
        assert after.dtype == leaf.dtype
        for i in range(n):
            np.testing.assert_array_equal(after[i], blank if dead[i] else before[i])
    if not dead.any():
        assert pipeline(rows) is rows


@pytest.mark.parametrize(
    ("piece", "columns", "text"),
    [
        (c.TimeFeature(4), {}, r"needs column 't', the number of the decision; got \['obs'\]"),
        (c.StateInObs(STATE), {}, r"needs column 'state', got \['obs'\]: make the envs with make"),
        (
            c.StateInObs(STATE),
            {"state": np.zeros((1, 2), np.float32)},
            r"expects float32 of shape \(3,\) for the value",
        ),
        (c.StateInObs(STATE), {"state": np.zeros((1, 3))}, r"for the value of the state, and got"),
        (c.DeathMask(), {}, "needs column 'terminated'"),
    ],
)
def test_a_column_that_is_missing_or_does_not_fit(piece: Any, columns: Any, text: str) -> None:
    refused(ContractError, text, bound(piece, vectors()), c.Rows(obs=np.zeros((1, 3), np.float32), **columns))


WOLVES_AND_HARE = ("wolf_0", "hare_0", "wolf_1")
EYE = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
KINDS = [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("args", "kwargs", "codes"),
    [
        ((), {}, EYE),
        ((3,), {}, EYE),
        ((["a", "b", "c"],), {}, EYE),
        ((), {"mode": "type"}, KINDS),
        ((), {"mode": "type", "types": ["x", "y", "x"]}, KINDS),
        ((3,), {"mode": "type", "types": ["x", "y", "x"]}, KINDS),
        ((), {"mode": "type", "types": {"wolf_1": "x", "hare_0": "y", "wolf_0": "x", "fox": "z"}}, KINDS),
        ((["red1", "blue1", "red2"],), {"mode": "type"}, KINDS),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_it_appends_who_the_agent_is(args: Any, kwargs: Any, codes: list[list[int]], dtype: Any) -> None:
    pipeline = AgentPipeline([AgentIndicator(*args, **kwargs)])
    pipeline.bind(Box(2, 9, (2,), dtype), WOLVES_AND_HARE)
    order = [2, 0, 1, 1]
    obs = np.arange(2, 10).astype(dtype).reshape(4, 2)
    out = pipeline(rows_of([(e, a) for e, a in enumerate(order)], obs)).obs
    assert out.dtype == dtype
    assert out.tolist() == [[*row, *codes[a]] for row, a in zip(obs.tolist(), order, strict=True)]
    width = len(codes[0])
    assert pipeline.output_space_ == Box(
        np.array([2, 2] + [0] * width, dtype), np.array([9, 9] + [1] * width, dtype), dtype=dtype
    )


def test_an_agent_beyond_the_last_is_an_error() -> None:
    pipeline = AgentPipeline([AgentIndicator(2)])
    pipeline.bind(vectors())
    with pytest.raises(ContractError, match="agent_index 2 in rows of 2 agents"):
        pipeline(rows_of([(0, 2)], np.zeros((1, 3), np.float32)))


def test_repr() -> None:
    assert repr(AgentIndicator()) == "AgentIndicator()"
    assert repr(AgentIndicator(["a"], mode="type")) == "AgentIndicator(agents=('a',), mode='type')"
