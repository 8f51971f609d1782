"""Images: gray, of another size, without flicker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, MultiBinary, Space
from numpy.typing import NDArray

from marlvec.connectors.agent_tables import LastValues, Remembers, blank_obs
from marlvec.connectors.connector import AgentConnector, PositiveInt, from_setup
from marlvec.connectors.leafwise import LeafPlan, LeafwiseObs
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree

_WEIGHTS = np.array([299, 587, 114])
"""Red, green and blue in thousandths of what the eye sees as bright: ITU-R BT.601, as OpenCV and Pillow have it."""


class GrayscaleObs(LeafwiseObs):
    """Turns every image in colour, a Box leaf ``(H, W, 3)``, into one of brightness; other leaves pass unchanged.

    Brightness is 0.299 red + 0.587 green + 0.114 blue. The dtype stays; ints are rounded, halves to even.

    Args:
        keep_axis: Whether the image keeps an axis of one channel: ``(H, W, 1)``, else ``(H, W)``.
        keys: Paths of the leaves; None: all images in colour.

    Raises:
        ArgumentError: In `bind`: a path is not in it.
        UnsupportedSpaceError: In `bind`: there is no image in colour.
    """

    _kind = "images in colour, Boxes of shape (H, W, 3)"
    _advice = "put TransposeObs((1, 2, 0)) before it if the channels stand first"

    def __init__(self, *, keep_axis: bool = True, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys=keys)
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


@dataclass(eq=False, repr=False)
class MaxObs(Remembers, AgentConnector):
    """Takes the elementwise maximum over an agent's last k observations, against flickering sprites.

    For each Box and MultiBinary leaf; other leaves pass unchanged. Before an episode's k-th row it uses the rows so
    far.

    Args:
        k: Number of observations, at least 1.

    Raises:
        ArgumentError: ``k`` is below 1.
        UnsupportedSpaceError: In `bind`: there is no Box or MultiBinary in it.
    """

    k: PositiveInt = 2

    _tree = from_setup(SpaceTree)
    _history = from_setup(LastValues)

    def __call__(self, rows: Rows) -> Rows:
        leaves = self._tree.flatten(rows.obs)
        self._history.begin(rows)
        self._history.push(rows, [leaves[i] for i in self._ordered], "obs")
        last = self._history.look(rows, np.arange(1 - self.k, 1))
        for i, values in zip(self._ordered, last, strict=True):
            leaves[i] = np.max(values, axis=1)
        return rows.replace(obs=self._tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        ordered = self._find_ordered(tree)
        if not self._tables or tree.space != self._tree.space:
            self._history = LastValues(self.k, [blank_obs(tree.leaves[i]) for i in ordered], repeat=True)
            self._tables = self._history.tables
        self._tree, self._ordered = tree, ordered

    def output_space(self, space: Space[Any]) -> Space[Any]:
        self._find_ordered(SpaceTree(space))
        return space

    def _find_ordered(self, tree: SpaceTree) -> tuple[int, ...]:
        """Return the positions of leaves whose numbers are ordered, not categories."""
        found = tuple(i for i, leaf in enumerate(tree.leaves) if isinstance(leaf.space, (Box, MultiBinary)))
        if not found:
            raise UnsupportedSpaceError(f"{self.name} found no Box or MultiBinary in {tree.space}")
        return found


Ints = NDArray[np.int64]
Method = Literal["area", "linear", "nearest"]


@dataclass(eq=False, repr=False)
class ResizeObs(LeafwiseObs):
    """Brings every image, a Box leaf ``(H, W)`` or ``(H, W, C)``, to size ``(h, w)``; others pass unchanged.

    The dtype stays. Ints are computed exactly, then rounded, halves to even. Each channel's bounds become those
    of all its pixels.

    * ``"area"``: each new pixel is the mean of the area that it covers, edge pixels weighted by their share. For making
      images smaller.
    * ``"linear"``: interpolates the four nearest pixels by the distance of centres, and extends the outermost ones.
      For making images larger; when making them smaller it skips pixels, which flickers.
    * ``"nearest"``: the pixel that contains the new pixel's centre. No new values; for maps of classes.

    Args:
        size: ``(h, w)`` of the new images.
        method: The method.
        keys: Paths of the leaves; None: all images.

    Raises:
        ArgumentError: ``size`` is not two numbers of at least 1, or ``method`` has another value; or, where a space
            is first seen, a path is not in it.
        UnsupportedSpaceError: In `bind`: there is no image.
    """

    size: tuple[int, int]
    method: Method = "area"

    _kind = "images, Boxes of shape (H, W) or (H, W, C)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.size) != 2 or min(self.size) < 1:
            raise ArgumentError(f"size must be (height, width), each at least 1; got {self.size!r}")
        self.size = (int(self.size[0]), int(self.size[1]))

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box) or len(leaf.shape) not in (2, 3) or 0 in leaf.shape:
            return None
        shape = (*self.size, *leaf.shape[2:])
        low = np.broadcast_to(space.low.min((0, 1), keepdims=True), shape)
        high = np.broadcast_to(space.high.max((0, 1), keepdims=True), shape)
        after = Box(low, high, dtype=leaf.dtype.type)
        if leaf.shape[:2] == self.size:
            return LeafPlan(after, np.asarray)
        if self.method == "nearest" or leaf.dtype.kind == "b":
            return LeafPlan(after, _Nearest(leaf.shape[:2], self.size))
        return LeafPlan(after, _Mean(space, after, self.method))


class _Nearest:
    def __init__(self, source: tuple[int, ...], target: tuple[int, int]) -> None:
        rows, columns = ((2 * np.arange(t) + 1) * s // (2 * t) for s, t in zip(source, target, strict=True))
        self.rows, self.columns = rows[:, None], columns

    def __call__(self, image_n: NDArray[Any]) -> NDArray[Any]:
        chosen: NDArray[Any] = image_n[:, self.rows, self.columns]
        return chosen


class _Mean:
    """Weighs pixels: a matrix from the left for the rows, one from the right for the columns.

    For ints the weights are whole numbers, and so are all sums, exact in float32 up to 2**24, in float64 up to 2**53.
    """

    def __init__(self, before: Box, after: Box, method: Method) -> None:
        (height, width), (h, w) = before.shape[:2], after.shape[:2]
        rows, row_sum = _weights(height, h, method)
        columns, column_sum = _weights(width, w, method)
        self.channels = before.shape[2] if len(before.shape) == 3 else 1
        self.shape = after.shape
        self.low, self.high = after.low[:1, :1], after.high[:1, :1]
        self.ints = after.low.dtype.kind in "iu"
        self.dtype = after.low.dtype
        self.total = row_sum * column_sum
        if self.ints:
            largest = max(abs(int(before.low.min())), abs(int(before.high.max()))) * self.total
            work: Any = np.float32 if largest < 2**24 else np.float64
            self.rows, self.columns = rows.astype(work), columns.T.astype(work)
        else:
            work = np.float64 if self.dtype == np.float64 else np.float32
            self.rows, self.columns = (rows / row_sum).astype(work), (columns / column_sum).T.astype(work)
        self.work = work

    def __call__(self, image_n: NDArray[Any]) -> NDArray[Any]:
        n, height, width = image_n.shape[:3]
        (h, _), channels = self.rows.shape, self.channels
        image_n = image_n.astype(self.work, copy=False).reshape(n, height, width * channels)
        image_n = np.matmul(self.rows, image_n)  # image by image, so that rounding does not depend on the batch
        image_n = image_n.reshape(n, h, width, channels)
        planes = [np.matmul(image_n[..., k], self.columns) for k in range(channels)]
        image_n = np.stack(planes, axis=-1).reshape(n, *self.shape)
        if self.ints:
            image_n = np.rint(image_n.astype(np.float64) / self.total)
        else:
            image_n = np.clip(image_n, self.low, self.high)  # rounding errors beyond the bounds
        return image_n.astype(self.dtype, copy=False)


def _weights(source: int, target: int, method: Method) -> tuple[Ints, int]:
    """Return int weights (target, source) of pixels along one axis, and the sum of each row, equal for all rows."""
    common = gcd(source, target)
    s, t = source // common, target // common  # a new pixel is s / t old ones long
    new, old = np.arange(target)[:, None], np.arange(source)
    if method == "area":  # in parts of 1/t: new pixels begin at multiples of s, old ones at multiples of t
        shared = np.minimum((new + 1) * s, (old + 1) * t) - np.maximum(new * s, old * t)
        return np.maximum(shared, 0), s
    # In parts of 1/(2t) from the first old centre on, which stand 2t apart: where the new centres lie.
    centre = np.clip((2 * new + 1) * s - t, 0, 2 * t * (source - 1))
    return np.maximum(2 * t - np.abs(centre - 2 * t * old), 0), 2 * t
