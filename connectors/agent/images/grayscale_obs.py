"""`GrayscaleObs`: images from RGB to gray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.spaces import Leaf

__all__ = ["GrayscaleObs"]

_WEIGHTS = np.array([299, 587, 114])
"""Red, green and blue in thousandths of what the eye sees as bright: ITU-R BT.601, as OpenCV and Pillow have it."""


class GrayscaleObs(LeafwiseObs):
    """Turns every image in colour, a Box leaf ``(H, W, 3)``, into one of brightness; other leaves pass unchanged.

    Brightness is 0.299 red + 0.587 green + 0.114 blue. The dtype stays; ints are rounded, halves to even.

    Args:
        keep_axis: Whether the image keeps an axis of one channel: ``(H, W, 1)``, else ``(H, W)``.
        keys: Paths of the leaves to work on; all images in colour where None.

    Raises:
        ArgumentError: Where a space is first seen: a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: there is no image in colour.
    """

    _kind = "images in colour, Boxes of shape (H, W, 3)"
    _advice = "put TransposeObs((1, 2, 0)) before it if the channels stand first"

    def __init__(self, *, keep_axis: bool = True, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.keep_axis = keep_axis

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box) or leaf.dtype.kind not in "fiu" or len(leaf.shape) != 3 or leaf.shape[2] != 3:
            return None
        gray = _Gray(leaf.dtype, keep_axis=self.keep_axis)
        # Rounding keeps sums of this kind in order, so that no value comes to lie beyond its bounds.
        low, high = gray(space.low[None])[0], gray(space.high[None])[0]
        return LeafPlan(Box(low, high, dtype=leaf.dtype.type), gray)


class _Gray:
    """Weighs the channels of one leaf."""

    def __init__(self, dtype: np.dtype[Any], *, keep_axis: bool) -> None:
        self.dtype = dtype
        self.ints = dtype.kind in "iu"
        self.keep_axis = keep_axis
        # A thousand bytes, or 16-bit ints in float64, are whole numbers without rounding.
        small = dtype.itemsize == 1 if self.ints else dtype.itemsize <= 4
        self.weights = (_WEIGHTS if self.ints else _WEIGHTS / 1000).astype(np.float32 if small else np.float64)

    def __call__(self, image_n: NDArray[Any]) -> NDArray[Any]:
        red, green, blue = self.weights
        dtype = self.weights.dtype
        gray: NDArray[Any] = np.multiply(image_n[..., 0], red, dtype=dtype)
        gray += np.multiply(image_n[..., 1], green, dtype=dtype)
        gray += np.multiply(image_n[..., 2], blue, dtype=dtype)
        if self.keep_axis:
            gray = gray[..., None]
        if self.ints:
            gray /= 1000
            np.rint(gray, out=gray)
        return gray.astype(self.dtype, copy=False)
