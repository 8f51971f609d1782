"""Values of spaces without a fixed shape (Text, Graph, Sequence): copies, limits of size, arrays of them; `AnyText`."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces
from gymnasium.vector import utils
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces.equality import describe_difference
from marlvec.spaces.tree import Leaf, SpaceTree, map_space

MAX_BYTES = 16 * 2**20
"""Maximum total size of the objects that one env returns, or receives, in one call, in bytes."""

_NUMBERS = frozenset({type(None), bool, int, float, complex})


def snapshot(leaf: Leaf, value: Any, *, by_value: bool = False) -> tuple[Any, int]:
    """Return a copy of a leaf's value, or an immutable value itself, and its size in bytes, pickled.

    `by_value`: the receiving process cannot import the classes of this process's main module.
    """
    # Copied by pickling, even without worker processes, so that results are equal in all backends.
    size = _size_of_constant(value)
    if size is not None:
        return value, size
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        _pickle_attributes(type(value))
    try:
        data = cloudpickle.dumps(value) if by_value else pack(value)
        return unpack(data), len(data)
    except Exception as error:
        raise ContractError(
            f"{leaf}: a {type(value).__name__} that cannot be pickled, so it can neither be copied nor sent to another "
            f"process: {type(error).__name__}: {error}"
        ) from error


def check_size(leaf: Leaf, size: int, others: int) -> None:
    """Raise `ContractError` if a value and the env's other objects of the call exceed `MAX_BYTES`; sizes in bytes."""
    if size + others > MAX_BYTES:
        raise ContractError(
            f"{leaf}: a value of {size:,} bytes, pickled, and others of {others:,} bytes in the same env; "
            f"expected at most {MAX_BYTES:,} bytes of objects for an env at a time"
        )


def own_objects(array: NDArray[Any]) -> NDArray[Any]:
    """Copy an array of objects together with the objects; return the array itself if all are immutable."""
    if all(_size_of_constant(value) is not None for value in array.flat):
        return array
    copied: NDArray[Any] = unpack(pack(array))
    return copied


def pack(value: Any) -> bytes:
    """Pickle objects; by value if their classes cannot be imported."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        data: bytes = cloudpickle.dumps(value)
        return data


def unpack(data: bytes) -> Any:
    """Unpickle the result of `pack`."""
    return pickle.loads(data)


def _pickle_attributes(kind: type[NDArray[Any]]) -> None:
    """Register a pickling function for a user's array class that keeps attributes, which numpy drops."""
    # Otherwise a text attribute of a number is lost (multigrid's missions). Classes with their own pickling are
    # skipped.
    says_itself = any(getattr(kind, name) is not getattr(np.ndarray, name) for name in ("__reduce__", "__reduce_ex__"))
    if not says_itself and kind not in copyreg.dispatch_table:
        copyreg.pickle(kind, _reduce_array)


def _reduce_array(array: NDArray[Any]) -> tuple[Any, tuple[Any, ...]]:
    return _rebuild_array, (type(array), np.asarray(array), getattr(array, "__dict__", {}))


def _rebuild_array(kind: type[NDArray[Any]], array: NDArray[Any], attributes: dict[str, Any]) -> NDArray[Any]:
    _pickle_attributes(kind)  # this process may pickle it again
    out = array.view(kind)
    if attributes:
        vars(out).update(attributes)
    return out


def _size_of_constant(value: Any) -> int | None:
    """Return the approximate size in bytes of an immutable value; None if the value is mutable."""
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return len(value)
    if kind in _NUMBERS:
        return 8 if kind is not int else 8 + value.bit_length() // 8
    if isinstance(value, np.generic):
        return None if isinstance(value, np.void) else 32 + value.nbytes  # structured scalars are mutable
    if kind is not tuple:
        return None
    total = 8
    for part in value:
        size = _size_of_constant(part)
        if size is None:
            return None
        total += size
    return total


class ObjectArray(spaces.Space[NDArray[Any]]):
    """Arrays of dtype object with a member of one space in every cell: for values without a fixed-size array form.

    A cell may be None if its agent is absent. Samples have a value in every cell, drawn from `space`, a copy.
    """

    def __init__(self, space: spaces.Space[Any], shape: tuple[int, ...], seed: int | None = None) -> None:
        self.space = deepcopy(space)
        self._lead = tuple(shape)
        super().__init__(shape, np.object_, seed)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._lead

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def seed(self, seed: int | None = None) -> int:
        used: int = super().seed(seed)
        self.space.seed(int(self.np_random.integers(np.iinfo(np.int32).max)))
        return used

    def sample(self, mask: Any = None, probability: Any = None) -> NDArray[Any]:
        """Draw a member for every cell; ``mask`` and ``probability`` are passed to the space for each cell."""
        if self._np_random is None:
            self.seed()
        options = {name: value for name, value in (("mask", mask), ("probability", probability)) if value is not None}
        out = np.full(self._lead, None, np.object_)
        for where in np.ndindex(self._lead):
            out[where] = self.space.sample(**options)
        return out

    def contains(self, x: Any) -> bool:
        if not isinstance(x, np.ndarray) or x.dtype != np.object_ or x.shape != self._lead:
            return False
        return all(value is None or self.space.contains(value) for value in x.flat)

    def __repr__(self) -> str:
        return f"ObjectArray({self.space}, {self.shape})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectArray) or self.shape != other.shape:
            return False
        return describe_difference(self.space, other.space) is None

    __hash__ = None  # type: ignore[assignment]  # like Gymnasium's spaces: seeding changes it


def batch_space(space: spaces.Space[Any], n: int) -> spaces.Space[Any]:
    """Return a space with one more leading axis of length n, as `gymnasium.vector.utils.batch_space` does."""
    # Gymnasium makes a tuple of n spaces of a leaf without a fixed-size array form; an ObjectArray has the same leading
    # axes as other leaves.

    def batch(leaf: spaces.Space[Any]) -> spaces.Space[Any]:
        if isinstance(leaf, ObjectArray):
            return ObjectArray(leaf.space, (n, *leaf.shape))
        return ObjectArray(leaf, (n,)) if SpaceTree(leaf).leaves[0].is_object else utils.batch_space(leaf, n)

    return map_space(batch, space)  # Gymnasium's own loses the order of a Dict's keys


class AnyText(spaces.Space[str]):
    """Texts of any characters, up to a length: what a language model reads and says.

    Gymnasium's ``Text`` looks each character up in an alphabet, whose default has neither spaces nor newlines; this
    space looks at the type and the length alone. Two are equal if their ``max_length`` is.

    Args:
        max_length: The longest text, in characters.
        examples: Texts that `sample` draws from, for random play; none: up to 16 random letters.
        seed: Seed of `sample`.

    Raises:
        ArgumentError: ``max_length`` is not an int of at least 0, or an example is no member.
    """

    def __init__(self, max_length: int = 1_000_000, *, examples: Sequence[str] = (), seed: int | None = None) -> None:
        self.max_length = check_int("AnyText(): max_length", max_length, 0)
        self.examples = tuple(examples)
        if bad := [text for text in self.examples if not self.contains(text)]:
            raise ArgumentError(
                f"AnyText(): examples: expected texts of at most {max_length} characters, got {bad[0]!r}"
            )
        super().__init__(None, str, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draw an example, or some random letters; ``mask`` and ``probability`` are refused (`ArgumentError`)."""
        if mask is not None or probability is not None:
            raise ArgumentError("AnyText.sample(): texts have neither a mask nor probabilities")
        if self.examples:
            return self.examples[int(self.np_random.integers(len(self.examples)))]
        length = int(self.np_random.integers(min(16, self.max_length) + 1))
        return "".join(map(chr, self.np_random.integers(ord("a"), ord("z") + 1, length).tolist()))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]  # like Gymnasium's spaces: seeding changes it
