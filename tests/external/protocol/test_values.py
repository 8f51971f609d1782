"""Arrays, values, spaces and weights, there and back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from marlvec.errors import ContractError, ProtocolError, SerialisationError, UnsupportedSpaceError
from marlvec.external import messages as arrays_module
from marlvec.external.messages import (
    DTYPES,
    MAX_SPACE_DEPTH,
    ValueReader,
    pack,
    pack_plain,
    read_array,
    read_mask,
    read_space,
    unpack,
    unpack_plain,
    unpack_tree,
    write_array,
    write_mask,
    write_space,
)

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(-np.inf, np.inf, (18,)),
    spaces.Box(np.arange(3.0), np.arange(3.0) + 1, dtype=np.float64),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(0, 1, ()),
    spaces.Box(0, 1, (0, 2)),
    spaces.Box(0, 1, (3,), np.float16),
    spaces.Box(0, 1, (3,), np.bool_),
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], np.int32, start=[[1, 0], [0, -1]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 2]),
    spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(0, 1, (1,)), spaces.MultiBinary(1)]))),
    spaces.Tuple([]),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    a, b = np.asarray(one), np.asarray(other)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(
    npst.arrays(st.sampled_from(sorted(DTYPES)).map(np.dtype), npst.array_shapes(min_dims=0, min_side=0, max_side=3))
)
def test_arrays_come_back_to_the_bit(array: np.ndarray[Any, Any]) -> None:
    data = unpack(pack({"a": write_array(array)}))["a"]
    back = read_array(data, "here")
    assert same(back, array)
    assert not back.flags.writeable


def test_arrays_of_another_order_and_layout() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    assert np.array_equal(read_array(write_array(array), "here"), array)


def test_on_a_machine_whose_bytes_stand_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays_module.sys, "byteorder", "big")
    assert np.array_equal(read_array(write_array(np.arange(3.0)), "here"), np.arange(3.0))


ATTACKS: dict[str, Any] = {
    "no array": {"dtype": "float32"},
    "two parts": ["float32", [1]],
    "objects": ["object", [1], b"\0" * 8],
    "objects by letter": ["O", [1], b"\0" * 8],
    "numpy's own name for objects": ["|O", [1], b"\0" * 8],
    "void": ["V8", [1], b"\0" * 8],
    "texts": ["<U2", [1], b"\0" * 8],
    "times": ["datetime64", [1], b"\0" * 8],
    "complex": ["complex64", [1], b"\0" * 8],
    "structures": ["f4,f4", [1], b"\0" * 8],
    "structures as a list": [[["a", "f4"]], [1], b"\0" * 8],
    "a dtype that is a dict": [{}, [1], b"\0" * 8],
    "a letter": ["f", [2], b"\0" * 8],
    "big-endian": [">f4", [2], b"\0" * 8],
    "longdouble": ["float128", [1], b"\0" * 16],
    "a shape that is a number": ["float32", 2, b"\0" * 8],
    "a shape of texts": ["float32", ["2"], b"\0" * 8],
    "a shape of bools": ["float32", [True], b"\0" * 4],
    "a negative side": ["float32", [-1], b"\0" * 8],
    "two negative sides": ["float32", [-1, -2], b"\0" * 8],
    "a product that overflows to 0": ["int8", [2**31 - 1, 2**31 - 1, 2**31 - 1], b""],
    "2**64 numbers": ["int8", [2**16] * 4, b""],
    "a side of 2**63": ["int8", [2**63], b""],
    "nine sides": ["int8", [1] * 9, b"\0"],
    "NaN sides": ["int8", [float("nan")], b""],
    "too few bytes": ["float32", [2], b"\0" * 7],
    "too many bytes": ["float32", [2], b"\0" * 9],
    "bytes for nothing": ["float32", [0], b"\0"],
    "a text of bytes": ["float32", [2], "\0" * 8],
    "a list of bytes": ["uint8", [2], [1, 2]],
    "a bool of 2": ["bool", [2], b"\0\2"],
    "a pickle": ["object", [1], b"\x80\x04cos\nsystem\n."],
    "a npy file": ["uint8", [1], b"\x93NUMPY\x01\x00"],
}


@pytest.mark.fault("G7")
@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_no_array(name: str) -> None:
    with pytest.raises(ProtocolError, match="^here: "):
        read_array(ATTACKS[name], "here")


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_values_come_back_to_the_bit(space: spaces.Space[Any]) -> None:
    reader = ValueReader(space)
    space.seed(0)
    for _ in range(5):
        value = space.sample()
        back = reader.read(unpack(pack({"a": reader.write(value)}))["a"], "here")
        assert same(back, value)
        assert space.contains(back)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_come_back(space: spaces.Space[Any]) -> None:
    back = read_space(unpack(pack(write_space(space))))
    assert back == space
    assert back.dtype == space.dtype
    assert type(back) is type(space)


@pytest.mark.fault("G8")
@pytest.mark.parametrize(
    ("space", "data", "what"),
    [
        (spaces.Discrete(5), 1.0, "expected a number of int64, got float"),
        (spaces.Discrete(5), True, "got bool"),
        (spaces.Discrete(5), None, "got NoneType"),
        (spaces.Discrete(5), write_array(np.array(1)), "got list"),
        (spaces.Discrete(5), 2**63, "expected a number of int64, got 9223372036854775808"),
        (spaces.Box(0, 255, (), np.uint8), -1, "expected a number of uint8"),
        (spaces.Box(0, 1, ()), "1", "expected a number of float32, got str"),
        (spaces.Box(0, 1, (), np.bool_), 1, "expected a number of bool, got int"),
        (spaces.Box(0, 1, (2,)), write_array(np.zeros(3, np.float32)), r"expected float32 of \(2,\), got float32 of"),
        (spaces.Box(0, 1, (2,)), write_array(np.zeros(2)), r"got float64 of \(2,\)"),
        (spaces.Box(0, 1, (2,)), 5, r"expected an array, float32 of \(2,\), got int"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}, r"here: expected a dict with keys \['a'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), 1, "here: expected a dict"),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": "1"}, "here/a: expected a number"),
        (spaces.Tuple([spaces.Discrete(2)]), [1, 1], "here: expected a tuple of length 1"),
    ],
)
def test_sound_values_of_another_space(space: spaces.Space[Any], data: Any, what: str) -> None:
    with pytest.raises(ContractError, match=what):
        ValueReader(space).read(data, "here")


def test_floats_that_are_too_large_are_infinite() -> None:
    assert ValueReader(spaces.Box(0, 1, ())).read(1e300, "here") == np.inf


def test_values_of_another_dtype_are_cast_within_their_kind() -> None:
    reader = ValueReader(spaces.Box(0, 9, (2,)))
    for value in ([0.5, 1.0], np.array([0.5, 1.0]), np.array([0.5, 1.0], np.float16), np.array([0.5, 1.0], ">f4")):
        assert same(reader.read(reader.write(value), "here"), np.array([0.5, 1.0], np.float32))
    assert same(reader.read(reader.write(np.array([[1, 0.5]], np.float32).T[::-1, 0]), "here"), np.float32([0.5, 1]))


def test_values_that_cannot_be_written() -> None:
    with pytest.raises(ContractError, match=r"expected float32 of \(2,\), got float64 of \(3,\)"):
        ValueReader(spaces.Box(0, 1, (2,))).write(np.zeros(3))
    with pytest.raises(ContractError, match="expected int64"):
        ValueReader(spaces.Discrete(2)).write(0.5)
    with pytest.raises(ContractError, match="dict with keys"):
        ValueReader(spaces.Dict(a=spaces.Discrete(2))).write({})


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Dict(a=spaces.Text(5)),
        spaces.Dict({1: spaces.Discrete(2)}),
        spaces.Box(0, 1, (1,) * 9),
    ],
    ids=str,
)
def test_spaces_that_stay_at_home(space: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpaceError, match="over a socket"):
        ValueReader(space)
    if isinstance(space, (spaces.Text, spaces.Sequence)):
        with pytest.raises(UnsupportedSpaceError, match="over a socket"):
            write_space(space)


def _deep(depth: int) -> dict[str, Any]:
    return {"space": "tuple", "items": [_deep(depth - 1)] if depth else []}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"space": "text"},
        {"space": []},
        {"space": "box"},
        {"space": "box", "dtype": "object", "shape": [1], "low": 0, "high": 1},
        {"space": "box", "dtype": "float32", "shape": [-1], "low": 0, "high": 1},
        {"space": "box", "dtype": "float32", "shape": [2**40], "low": 0, "high": 1},
        {"space": "box", "dtype": "float32", "shape": 3, "low": 0, "high": 1},
        {"space": "box", "dtype": "float32", "shape": [1], "low": "0", "high": 1},
        {"space": "box", "dtype": "float32", "shape": [1], "low": write_array(np.zeros(1)), "high": 1},
        {"space": "box", "dtype": "float32", "shape": [1], "low": 1, "high": 0, "more": 1},
        {"space": "discrete", "dtype": "int64", "n": 0, "start": 0},
        {"space": "discrete", "dtype": "int64", "n": "5", "start": 0},
        {"space": "discrete", "dtype": "float32", "n": 5, "start": 0},
        {"space": "multi_discrete", "nvec": [2, 3], "start": 0},
        {"space": "multi_binary", "n": [1] * 9},
        {"space": "multi_binary", "n": -1},
        {"space": "dict", "items": 5},
        {"space": "dict", "items": [["a"]]},
        {"space": "dict", "items": [[1, {"space": "discrete", "dtype": "int64", "n": 2, "start": 0}]]},
        {"space": "tuple", "items": [], "more": []},
        _deep(MAX_SPACE_DEPTH + 1),
    ],
    ids=lambda data: str(data)[:60],
)
def test_what_is_no_space(data: Any) -> None:
    with pytest.raises(ProtocolError):
        read_space(data)


@pytest.mark.fault("G7")
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (
            {"space": "box", "dtype": "int8", "shape": [-3], "low": 0, "high": 1},
            "lengths 0 to 2147483647, got the length -3",
        ),
        ({"space": "box", "dtype": "int8", "shape": [2**40, 0], "low": 0, "high": 1}, "got the length 1099511627776"),
        ({"space": "box", "dtype": "int8", "shape": [2.0], "low": 0, "high": 1}, "got the length 2.0"),
        ({"space": "box", "dtype": "int8", "shape": [1] * 9, "low": 0, "high": 1}, "at most 8 lengths, got list"),
        ({"space": "box", "dtype": "int8", "shape": [2], "low": float("nan"), "high": 1}, "a bound: "),
        ({"space": "box", "dtype": "int8", "shape": [2], "low": 0, "high": 300.0}, "a bound: "),
        ({"space": "box", "dtype": "int8", "shape": [2], "low": 0, "high": 300}, "out of bounds for int8"),
        ({"space": "multi_binary", "n": -3}, "got the length -3"),
        ({"space": "multi_binary", "n": [2, -3]}, "got the length -3"),
        ({"space": "discrete", "dtype": "int64", "n": -3, "start": 0}, "n from 1, .* got n=-3, start=0"),
        ({"space": "discrete", "dtype": "int64", "n": 2, "start": 2**63 - 1}, "from start on in int64"),
        ({"space": "discrete", "dtype": "uint8", "n": 256, "start": 1}, "from start on in uint8"),
        ({"space": "multi_discrete", "nvec": ["int8", [-3], b"x"], "start": ["int8", [1], b"x"]}, "nvec: .* length -3"),
        ({"space": "multi_discrete", "nvec": ["int8", [1], b"\xfd"], "start": ["int8", [1], b"x"]}, "nvec from 1"),
        (
            {"space": "multi_discrete", "nvec": ["int8", [1], b"\x7f"], "start": ["int8", [1], b"\2"]},
            "start on in int8",
        ),
        ({"space": "multi_discrete", "nvec": ["int8", [1], b"\1"], "start": ["uint8", [1], b"\1"]}, "start like nvec"),
    ],
    ids=str,
)
def test_whole_numbers_of_a_space_are_refused_by_what_is_wrong_with_them(data: Any, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        read_space(data)


def test_discrete_spaces_up_to_the_last_number_of_their_dtype() -> None:
    for space in (
        spaces.Discrete(2, start=2**63 - 2),
        spaces.Discrete(255, start=1, dtype=np.uint8),
        spaces.MultiDiscrete(np.array([127, 1], np.int8), np.int8, start=np.array([1, 127], np.int8)),
    ):
        assert read_space(unpack(pack(write_space(space)))) == space


def test_spaces_may_be_as_deep_as_is_said() -> None:
    assert isinstance(read_space(_deep(MAX_SPACE_DEPTH)), spaces.Tuple)


def test_masks() -> None:
    mask = np.array([True, False, True])
    assert same(read_mask(write_mask(mask), "here"), mask)
    for wrong in (np.zeros(3), np.zeros((1, 3), np.bool_)):
        with pytest.raises(ProtocolError, match="here: expected bools in one row"):
            read_mask(write_array(wrong), "here")


WEIGHTS: dict[str, Any] = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "numbers": [None, True, 1, -(2**63), 2**200, -(2**70), 0.5, float("inf"), "text", b"bytes"],
    "scalars": [np.float32(0.1), np.int8(-3), np.bool_(True), np.float16(2)],
    "tuple": (1, (2, [3])),
    "items": {1: "one", (2, 3): "two", "$array": "not one"},
    "empty": [{}, [], ()],
    "stream": np.random.default_rng(0).bit_generator.state,
}


def test_weights_come_back() -> None:
    back = unpack_plain(pack_plain(WEIGHTS, "it"))
    assert list(back) == list(WEIGHTS)
    assert same(back["array"], WEIGHTS["array"])
    assert back["array"].flags.writeable
    for name in ("numbers", "scalars", "tuple", "items", "empty", "stream"):
        assert back[name] == WEIGHTS[name]
    assert [type(scalar) for scalar in back["scalars"]] == [type(scalar) for scalar in WEIGHTS["scalars"]]


@pytest.mark.parametrize(
    "value", [object(), np.array([object()]), lambda: 1, {"a": {1, 2}}, np.complex64(1), np.datetime64(0, "s")]
)
def test_what_is_no_weight(value: Any) -> None:
    with pytest.raises(SerialisationError, match="does not go over a socket"):
        pack_plain([value], "it")


def test_weights_that_never_end() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SerialisationError, match="more than 64 deep"):
        pack_plain(value, "it")


@pytest.mark.parametrize(
    "data",
    [
        {"$function": "os.system"},
        {"$array": ["object", [1], b"\0" * 8]},
        {"$array": 5},
        {"$tuple": 5},
        {"$scalar": ["object", 1]},
        {"$scalar": ["float32", "1"]},
        {"$scalar": ["int8", 1000]},
        {"$scalar": ["int8"]},
        {"$int": "x"},
        {"$int": 5},
        {"$int": "9" * 5000},
        {"$items": [[[], 1]]},
        {"$items": [1]},
        {"$tuple": [], "more": 1},
        {"$unknown": 1},
    ],
    ids=lambda data: str(data)[:40],
)
def test_weights_of_others(data: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_plain(pack(data))


def test_weights_are_msgpack_and_not_too_deep() -> None:
    with pytest.raises(ProtocolError):
        unpack_plain(b"\xc1")
    with pytest.raises(ProtocolError, match="more than 64 deep"):
        unpack_plain(b"\x91" * 70 + b"\x90")
    with pytest.raises(ProtocolError):
        unpack_tree(b"\x91" * 100_000 + b"\x90")
