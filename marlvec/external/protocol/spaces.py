"""Spaces as plain data, for the handshake; docs/protocol.md has their form.

A bound that is one number applies to the whole array. Infinite bounds are float64 infinities.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.errors import ProtocolError, UnsupportedSpaceError
from marlvec.external.protocol.messages import MAX_MESSAGE
from marlvec.external.protocol.values import DTYPES, read_array, read_shape, write_array

__all__ = ["read_space", "write_space"]

MAX_SPACE_DEPTH = 32


def write_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """Convert a space to plain data; `UnsupportedSpaceError` unless it is one of the six kinds."""
    match space:
        case spaces.Box():
            low, high = _write_bound(space.low), _write_bound(space.high)
            return {"space": "box", "dtype": space.dtype.name, "shape": list(space.shape), "low": low, "high": high}
        case spaces.Discrete():
            assert space.dtype is not None  # set in every Discrete
            name = np.dtype(space.dtype).name
            return {"space": "discrete", "dtype": name, "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"space": "multi_discrete", "nvec": write_array(space.nvec), "start": write_array(space.start)}
        case spaces.MultiBinary():
            return {
                "space": "multi_binary",
                "n": space.n if isinstance(space.n, int) else [int(n) for n in space.shape],
            }
        case spaces.Dict():
            return {"space": "dict", "items": [[key, write_space(sub)] for key, sub in space.spaces.items()]}
        case spaces.Tuple():
            return {"space": "tuple", "items": [write_space(sub) for sub in space.spaces]}
    raise UnsupportedSpaceError(
        f"{space} does not go over a socket: expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    )


def read_space(data: Any, depth: int = 0) -> spaces.Space[Any]:
    """Rebuild a space; `ProtocolError`: not a space, nested too deep, or larger than a message may be."""
    if type(data) is not dict or depth > MAX_SPACE_DEPTH:
        raise ProtocolError(f"expected a space, at most {MAX_SPACE_DEPTH} deep, got {type(data).__name__} at {depth}")
    try:
        kind, parts = data["space"], {key: part for key, part in data.items() if key != "space"}
        if kind == "dict":
            (items,) = parts.values()
            pairs = [(_key(key), read_space(sub, depth + 1)) for key, sub in items]
            return spaces.Dict(OrderedDict(pairs))
        if kind == "tuple":
            (items,) = parts.values()
            return spaces.Tuple([read_space(sub, depth + 1) for sub in items])
        return _KINDS[kind](**parts)
    except (LookupError, TypeError, ValueError, AssertionError, ArithmeticError) as error:
        raise ProtocolError(f"expected a space: {type(error).__name__}: {str(error)[:200]}") from None


def _key(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"expected a Dict key that is a text, got {type(key).__name__}")
    return key


def _write_bound(bound: NDArray[Any]) -> Any:
    if bound.size and (bound == bound.flat[0]).all():
        return bound.flat[0].item()
    return write_array(bound)


def _bound(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if type(data) in {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,)):
        with np.errstate(over="ignore", invalid="ignore"):  # values out of range become infinite
            return np.full(shape, data, dtype)
    array = read_array(data, "a bound")
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"expected a bound of {dtype} and {shape}, got {array.dtype} and {array.shape}")
    return array


def _shape(data: Any) -> tuple[int, ...]:
    shape = read_shape(data, "a space")
    if math.prod(shape) > MAX_MESSAGE:
        raise ValueError(f"{math.prod(shape)} numbers do not fit into a message")
    return shape


def _box(dtype: str, shape: Any, low: Any, high: Any) -> spaces.Space[Any]:
    sides, kind = _shape(shape), DTYPES[dtype].newbyteorder("=")
    return spaces.Box(_bound(low, sides, kind), _bound(high, sides, kind), sides, kind.type)


def _discrete(dtype: str, n: int, start: int) -> spaces.Space[Any]:
    if type(n) is not int or type(start) is not int:
        raise TypeError("expected n and start to be whole numbers")
    kind = DTYPES[dtype].newbyteorder("=")
    bounds = np.iinfo(kind)
    if n < 1 or not bounds.min <= start <= bounds.max - (n - 1):
        raise ValueError(f"expected n from 1, and n numbers from start on in {dtype}, got n={n}, start={start}")
    if kind == np.int64:
        return spaces.Discrete(n, start=start)  # older versions of Gymnasium have no dtype=
    return spaces.Discrete(n, start=start, dtype=kind.type)


def _multi_discrete(nvec: Any, start: Any) -> spaces.Space[Any]:
    sizes, starts = read_array(nvec, "nvec"), read_array(start, "start")
    if starts.dtype != sizes.dtype or starts.shape != sizes.shape:
        raise ValueError(
            f"expected start like nvec, {sizes.dtype} of {sizes.shape}, got {starts.dtype} of {starts.shape}"
        )
    if (sizes < 1).any() or (starts > np.iinfo(sizes.dtype).max - (sizes - 1)).any():
        raise ValueError(f"expected nvec from 1, and numbers from start on in {sizes.dtype}")
    return spaces.MultiDiscrete(sizes, sizes.dtype.type, start=starts)


def _multi_binary(n: Any) -> spaces.Space[Any]:
    return spaces.MultiBinary(_shape([n])[0] if type(n) is int else list(_shape(n)))


_KINDS: dict[str, Callable[..., spaces.Space[Any]]] = {
    "box": _box,
    "discrete": _discrete,
    "multi_discrete": _multi_discrete,
    "multi_binary": _multi_binary,
}
