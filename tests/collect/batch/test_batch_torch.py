"""Batches as torch tensors and as a TensorDict."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from marlvec.collect import SampleBatch
from marlvec.errors import ArgumentError, MissingExtraError


def sample() -> SampleBatch:
    obs = {"camera": np.arange(12, dtype=np.float32).reshape(4, 3), "pair": (np.arange(4), np.arange(4) > 1)}
    return SampleBatch({"obs": obs, "rewards": np.arange(4.0), "action_mask": np.ones((4, 2), np.bool_)})


@pytest.mark.parametrize("call", ["to_torch", "to_tensordict"])
def test_without_torch_the_error_says_what_to_install(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "tensordict"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"to_\w+\(\) needs \w+, which cannot be imported.*pip install"):
        getattr(sample(), call)()


def test_tensors_share_the_arrays_memory() -> None:
    torch = pytest.importorskip("torch")
    batch = sample()
    tensors = batch.to_torch()
    assert list(tensors) == ["obs", "rewards", "action_mask"]
    assert tensors["rewards"].dtype == torch.float64
    assert tensors["action_mask"].dtype == torch.bool
    assert tensors["obs"]["pair"][0].tolist() == [0, 1, 2, 3]
    for tensor, array in (
        (tensors["rewards"], batch["rewards"]),
        (tensors["obs"]["camera"], batch["obs"]["camera"]),
        (tensors["obs"]["pair"][1], batch["obs"]["pair"][1]),
    ):
        assert tensor.data_ptr() == array.ctypes.data
    tensors["obs"]["camera"][1, 2] = 77
    assert batch["obs"]["camera"][1, 2] == 77
    part = batch.slice(1, 3)
    assert part.to_torch("cpu")["rewards"].data_ptr() == batch["rewards"][1:].ctypes.data
    again = SampleBatch(tensors)  # tensors are columns, too
    assert again.to_torch()["rewards"] is tensors["rewards"]
    assert again.take([2, 0])["rewards"].tolist() == [2.0, 0.0]


def test_what_torch_cannot_share_is_copied() -> None:
    pytest.importorskip("torch")
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    packed = np.zeros(4, np.dtype([("byte", "u1"), ("number", "<f8")]))
    packed["number"] = [0, 1, 2, 3]
    columns: dict[str, Any] = {
        "read only": fixed,
        "reversed": np.arange(4.0)[::-1],
        "big-endian": np.arange(4, dtype=">i4"),
        "packed": packed["number"],
        "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
        "empty": np.zeros((4, 0), np.float16),
    }
    batch = SampleBatch(columns)
    for name, tensor in batch.to_torch().items():
        assert tensor.tolist() == batch[name].tolist(), name
        tensor += 1
    assert fixed.tolist() == [0, 1, 2, 3]
    assert batch.slice(0, 0).to_torch()["reversed"].shape == (0,)


def test_tensors_go_to_the_device_asked_for() -> None:
    torch = pytest.importorskip("torch")
    tensors = sample().to_torch("meta")
    assert tensors["obs"]["pair"][1].device == tensors["rewards"].device == torch.device("meta")
    assert tensors["obs"]["camera"].shape == (4, 3)


@pytest.mark.parametrize("call", ["to_torch", "to_tensordict"])
def test_columns_that_are_no_numbers_are_named(call: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensordict")
    more = {"infos": [{}] * 4, "name": np.array(["a"] * 4), "when": np.zeros(4, "datetime64[s]")}
    batch = sample().replace(**more, obs={"graph": [{}] * 4})
    named = r"\['obs/graph \(object\)', 'infos \(object\)', 'name \(<U1\)', 'when \(datetime64\[s\]\)'\].*drop\(\)"
    with pytest.raises(ArgumentError, match=named):
        getattr(batch, call)()
    assert list(batch.drop("obs", *more).to_torch()) == ["rewards", "action_mask"]


def test_a_tensordict_has_the_rows_as_its_batch() -> None:
    torch = pytest.importorskip("torch")
    tensordict = pytest.importorskip("tensordict")
    batch = sample()
    found = batch.to_tensordict()
    assert isinstance(found, tensordict.TensorDict)
    assert found.batch_size == found["obs"].batch_size == torch.Size([4])
    assert found["obs", "pair", "1"].tolist() == [False, False, True, True]
    assert found["obs", "camera"].data_ptr() == batch["obs"]["camera"].ctypes.data
    assert found[1:3]["rewards"].tolist() == [1.0, 2.0]
    assert batch.to_tensordict("meta")["obs", "camera"].device == torch.device("meta")
    with pytest.raises(ArgumentError, match=r"'obs': expected keys that differ as strings, got \[1, '1'\]"):
        batch.replace(obs={1: np.zeros(4), "1": np.zeros(4)}).to_tensordict()


def test_pinned_memory_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ArgumentError, match=r"to_torch\(pin_memory=True\): expected a GPU that torch can use, got none"
    ):
        sample().to_torch(pin_memory=True)
    calls: list[tuple[str, Any]] = []

    def pin(tensor: Any) -> Any:
        calls.append(("pin", tensor.shape))
        return tensor.clone()

    def to(tensor: Any, device: str, *, non_blocking: bool) -> Any:
        calls.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = sample().take([0, 1])
    pinned = batch.to_torch("cuda", pin_memory=True)
    assert calls[:2] == [("pin", (2, 3)), ("cuda", True)]
    assert pinned["rewards"].tolist() == batch["rewards"].tolist()
