"""ResizeObs, GrayscaleObs and TransposeObs, and images through a whole chain."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from marlvec import connectors as c
from marlvec.errors import UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, bound, through, unbatch

Image = NDArray[Any]
BYTES = (np.uint8, np.int8, np.uint16, np.int32)


def image_space(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return spaces.Box(-1, 2, shape, dtype)
    return spaces.Box(np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype)


# --- resizing against pixels worked out one by one, in fractions


def weights(source: int, target: int, i: int, method: str) -> dict[int, Fraction]:
    """Which old pixels new pixel i is made of."""
    step = Fraction(source, target)
    centre = (i + Fraction(1, 2)) * step
    if method == "nearest":
        return {int(centre): Fraction(1)}
    if method == "area":
        shares = {j: min((i + 1) * step, j + 1) - max(i * step, j) for j in range(source)}
        return {j: Fraction(share) / step for j, share in shares.items() if share > 0}
    at = centre - Fraction(1, 2)
    left = at.__floor__()
    found: dict[int, Fraction] = {}
    for j, share in ((left, 1 - (at - left)), (left + 1, at - left)):
        inside = min(max(j, 0), source - 1)
        found[inside] = found.get(inside, Fraction(0)) + share
    return found


def resized(image: Image, size: tuple[int, int], method: str) -> Image:
    """The plain reference: one image, every pixel and channel by itself."""
    image = image[..., None] if image.ndim == 2 else image
    height, width, channels = image.shape
    out = np.zeros((*size, channels), image.dtype)
    for y in range(size[0]):
        for x in range(size[1]):
            rows, columns = weights(height, size[0], y, method), weights(width, size[1], x, method)
            for channel in range(channels):
                exact = sum(
                    a * b * Fraction(image[j, k, channel].item()) for j, a in rows.items() for k, b in columns.items()
                )
                out[y, x, channel] = round(exact) if image.dtype.kind in "iu" else float(exact)  # type: ignore[arg-type]
    return out


@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    channels=st.sampled_from([None, 1, 2, 3]),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    method=st.sampled_from(["area", "linear", "nearest"]),
    dtype=st.sampled_from([*BYTES, np.float32, np.float64]),
    n=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_every_pixel_is_what_it_should_be(
    shape: tuple[int, int], channels: int | None, size: tuple[int, int], method: Any, dtype: Any, n: int, seed: int
) -> None:
    space = image_space(shape if channels is None else (*shape, channels), dtype)
    images = batch(space, n, seed)
    pipeline = bound(c.ResizeObs(size, method), space)
    out = pipeline(c.Rows(obs=images)).obs
    assert out.dtype == dtype
    assert out.shape == (n, *size, *space.shape[2:])
    assert all_inside(pipeline.output_space_, out, n)
    for before, after in zip(images, out, strict=True):
        want = resized(before, size, method).reshape(after.shape)
        if np.dtype(dtype).kind == "f":
            np.testing.assert_allclose(after, want, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("method", ["area", "linear", "nearest"])
def test_an_image_of_one_value_stays_so_at_any_size(method: Any) -> None:
    """Also where sums are large: an Atari screen of white, and floats whose weights cannot be exact."""
    screen = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    white = np.full((2, 210, 160, 3), 255, np.uint8)
    assert (through(c.ResizeObs((84, 84), method), screen, white) == 255).all()
    tenth = np.full((1, 210, 160), 0.1, np.float32)
    space = spaces.Box(0, np.float32(0.1), (210, 160))
    out = through(c.ResizeObs((84, 84), method), space, tenth)
    np.testing.assert_allclose(out, 0.1, rtol=1e-5)
    assert all_inside(bound(c.ResizeObs((84, 84), method), space).output_space_, out, 1)


def test_sizes_and_axes_may_be_lists() -> None:
    assert repr(c.TransposeObs([1, 0])) == "TransposeObs(axes=(1, 0))"
    assert c.ResizeObs([84, 96]).params() == {"size": (84, 96), "method": "area", "keys": None}  # type: ignore[arg-type]


# --- grayscale


@pytest.mark.parametrize("keep_axis", [True, False])
@pytest.mark.parametrize("dtype", [*BYTES, np.float32, np.float64])
def test_gray_is_the_weighted_mean_of_the_channels(dtype: Any, keep_axis: bool) -> None:
    space = image_space((4, 5, 3), dtype)
    images = np.concatenate([batch(space, 6), space.low[None], space.high[None]])
    pipeline = bound(c.GrayscaleObs(keep_axis=keep_axis), space)
    out = pipeline(c.Rows(obs=images)).obs
    assert out.dtype == dtype
    assert out.shape == ((8, 4, 5, 1) if keep_axis else (8, 4, 5))
    assert pipeline.output_space_ == image_space(out.shape[1:], dtype)
    assert all_inside(pipeline.output_space_, out, 8)
    for color, gray in zip(images.reshape(-1, 3).tolist(), out.reshape(-1).tolist(), strict=True):
        exact = Fraction(299 * Fraction(color[0]) + 587 * Fraction(color[1]) + 114 * Fraction(color[2])) / 1000
        if np.dtype(dtype).kind == "f":
            assert gray == pytest.approx(float(exact), rel=1e-5, abs=1e-6)
        else:
            assert gray == round(exact)


# --- axes


def test_channels_go_first_without_a_copy() -> None:
    space = image_space((4, 5, 3), np.uint8)
    images = batch(space, 2)
    out = through(c.TransposeObs(), space, images)
    np.testing.assert_array_equal(out, np.stack([np.moveaxis(image, 2, 0) for image in images]))
    assert np.shares_memory(out, images)
    np.testing.assert_array_equal(
        through(c.TransposeObs((1, 2, 0)), bound(c.TransposeObs(), space).output_space_, out), images
    )


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), axes=st.sampled_from([(1, 0), (2, 0, 1), (0, 2, 1), (0,)]), n=st.integers(0, 3))
def test_any_order_of_axes_of_boxes_of_that_rank(space: Space, axes: tuple[int, ...], n: int) -> None:
    leaves = SpaceTree(space).leaves
    if not any(isinstance(leaf.space, spaces.Box) and len(leaf.shape) == len(axes) for leaf in leaves):
        with pytest.raises(UnsupportedSpaceError, match=f"works on Boxes of {len(axes)} axes"):
            bound(c.TransposeObs(axes), space)
        return
    pipeline, obs = bound(c.TransposeObs(axes), space), batch(space, n)
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    for leaf, before, after in zip(leaves, SpaceTree(space).flatten(obs), SpaceTree(space).flatten(out), strict=True):
        for i in range(n):
            same = not isinstance(leaf.space, spaces.Box) or len(leaf.shape) != len(axes)
            np.testing.assert_array_equal(after[i], before[i] if same else np.transpose(before[i], axes))


# --- all together


def nested_with_camera(inner: Space, height: int, width: int) -> spaces.Dict:
    camera = spaces.Box(0, 255, (height, width, 3), np.uint8)
    return spaces.Dict({"eye": spaces.Dict({"left": camera, "mode": spaces.Discrete(3, start=1)}), "rest": inner})


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(86)
@given(inner=any_spaces(), height=st.integers(2, 6), width=st.integers(2, 6), n=st.integers(0, 3), drop=st.booleans())
def test_images_and_choices_anywhere_in_a_space_become_what_a_network_takes(
    inner: Space, height: int, width: int, n: int, drop: bool
) -> None:
    """Resize, gray, channels first, scale and cast for the camera, one-hots for the rest, keys dropped, all flattened.

    Against the same done to one row at a time by hand and by Gymnasium's own flatten.
    """
    space = nested_with_camera(inner, height, width)
    camera = ["eye/left"]
    pipeline = c.AgentPipeline(
        [
            c.ResizeObs((2, 3), keys=camera),
            c.GrayscaleObs(keys=camera),
            c.TransposeObs(keys=camera),
            c.ScaleObs(-1, 1, keys=camera),
            c.CastObs("float64", keys=camera),
            c.OneHotObs(),
            *([c.DropKeys("rest")] if drop else []),
        ]
    )
    pipeline.bind(space)
    obs = batch(space, n)
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    assert ("rest" in out) is not drop
    for i in range(n):
        picture = resized(obs["eye"]["left"][i], (2, 3), "area").astype(float)
        gray = np.rint(np.round(picture @ [0.299, 0.587, 0.114], 9))  # away with what the float sum is off by
        np.testing.assert_allclose(out["eye"]["left"][i], [gray / 255 * 2 - 1], atol=1e-6)
        assert out["eye"]["mode"][i].tolist() == [obs["eye"]["mode"][i] == k for k in (1, 2, 3)]
    assert out["eye"]["left"].dtype == np.float64
    dropped = bound(c.FlattenObs(drop=["rest", "eye/left"]), space)(c.Rows(obs=obs)).obs
    np.testing.assert_array_equal(dropped, out["eye"]["mode"])
    flat = bound(c.FlattenObs(), space)(c.Rows(obs=obs)).obs
    for i in range(n):
        np.testing.assert_array_equal(flat[i], spaces.flatten(space, unbatch(space, obs, i)).astype(flat.dtype))
