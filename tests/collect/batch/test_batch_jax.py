"""Batches as JAX arrays; run where jax is (`make families`), the error and the alignment everywhere."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import marlvec
from marlvec.collect import SampleBatch
from marlvec.collect.rows import BatchMemory
from marlvec.errors import ArgumentError, MissingExtraError


def test_without_jax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingExtraError, match=r"to_jax\(\) needs jax, which cannot be imported.*pip install"):
        SampleBatch({"rewards": np.arange(4.0)}).to_jax()


def test_large_columns_of_a_collector_begin_at_a_multiple_of_64_bytes() -> None:
    with marlvec.make("simple_spread", num_envs=16, backend="sync") as envs:
        batch = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0).collect(env_steps=16 * 64)["main"]
        large = [column for _, column in batch.items() if column.nbytes >= 1 << 16]
        assert len(large) >= 2
        assert [column.ctypes.data % 64 for column in large] == [0] * len(large)


def test_arrays_share_memory_and_keep_it() -> None:
    jax = pytest.importorskip("jax")
    memory = BatchMemory()
    memory.begin()
    obs = memory.empty((1 << 12, 8), np.float32)
    obs[:] = np.arange(8)
    batch = SampleBatch({"obs": {"camera": obs, "place": np.arange(1 << 12)}, "last": np.zeros(1 << 12, np.bool_)})
    arrays = batch.to_jax()
    assert arrays["obs"]["camera"].unsafe_buffer_pointer() == obs.ctypes.data
    assert arrays["obs"]["place"].dtype == jax.numpy.int32
    assert arrays["last"].dtype == np.bool_
    assert arrays["obs"]["place"].tolist() == list(range(1 << 12))
    del obs, batch
    for _ in range(3):  # its memory is in use, and no other batch gets it
        memory.begin()
        memory.empty((1 << 12, 8), np.float32)[:] = -1.0
    assert (np.asarray(arrays["obs"]["camera"]) == np.arange(8)).all()


def test_what_jax_cannot_share_is_copied() -> None:
    jax = pytest.importorskip("jax")
    fixed = np.arange(4, dtype=np.float32)
    fixed.flags.writeable = False
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    columns = {"fixed": fixed, "strided": wide[:, ::2], "reversed": wide[::-1], "foreign": wide.astype(">f4")}
    for device in (None, jax.devices("cpu")[0]):
        for name, array in SampleBatch(columns).to_jax(device).items():
            np.testing.assert_array_equal(np.asarray(array), columns[name], err_msg=name)


def test_objects_are_refused_by_name() -> None:
    pytest.importorskip("jax")
    batch = SampleBatch(
        {"rewards": np.arange(2.0), "text": np.array(["a", None], object), "name": np.array(["x", "y"])}
    )
    with pytest.raises(ArgumentError, match=r"expected columns of numbers, got \['text \(object\)', 'name \(<U1\)'\]"):
        batch.to_jax()
    assert list(batch.drop("text", "name").to_jax()) == ["rewards"]
