"""Connectors of single leaves on numbers that can be checked in one's head, and the spaces that they declare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from marlvec import connectors as c
from tests.connectors.helpers.samples import bound

F32, F64, U8, I64, INF = np.float32, np.float64, np.uint8, np.int64, np.inf
BYTES = Box(0, 255, (2, 3), U8)
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
    (c.ReshapeObs((3, 2)), BYTES, SIX, [[[0, 1], [2, 3], [4, 5]]], Box(0, 255, (3, 2), U8), {}),
    (c.ReshapeObs((-1,)), BYTES, SIX, [[0, 1, 2, 3, 4, 5]], Box(0, 255, (6,), U8), {}),
    (c.ReshapeObs((6, -1)), BYTES, SIX, [[[x] for x in range(6)]], Box(0, 255, (6, 1), U8), {}),
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
    space = Dict(a=BYTES, b=BYTES)
    obs = {"a": np.zeros((1, 2, 3), U8), "b": np.ones((1, 2, 3), U8)}
    assert np.shares_memory(bound(piece, space)(c.Rows(obs=obs)).obs["a"], obs["a"])
