"""Batches elsewhere: in files, and as arrays of torch, JAX and RLlib."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import marlvec
from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
from marlvec.collect.rows import BatchMemory
from marlvec.errors import ArgumentError, CheckpointError, ContractError, MissingExtraError, SerialisationError
from marlvec.policies import Policy
from marlvec.serialization.archive import write_archive
from marlvec.trees import Tree, ragged_array, tree_leaves
from tests.bombs import sealed
from tests.collect.players import EchoPolicy, sync
from tests.collect.test_async_policies import Turns

# --- batches in files: what comes back, who else can open them, and what a bad one gets


OFTEN = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sample(n: int = 4) -> SampleBatch:
    obs = {"camera": np.arange(6.0 * n, dtype=np.float32).reshape(n, 2, 3), 7: (np.arange(n) > 1, np.zeros((n, 0)))}
    return SampleBatch({"obs": obs, "rewards": np.array([np.nan, np.inf, -0.0, 1.5])[:n], "name": np.array(["ä"] * n)})


def same(one: Any, other: Any) -> None:
    """Equal columns in equal order, to the bit."""
    assert list(one.keys()) == list(other.keys())
    for name, column in one.items():
        same_tree(column, other[name])


def same_tree(one: Tree, other: Tree) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    for (path, leaf), (other_path, other_leaf) in pairs:
        assert path == other_path
        assert leaf.dtype == other_leaf.dtype
        assert leaf.shape == other_leaf.shape
        assert leaf.tobytes() == other_leaf.tobytes()


@st.composite
def batches(draw: st.DrawFn, parquet: bool = False) -> SampleBatch:
    n = draw(st.integers(0, 4))
    numbers = st.sampled_from(
        ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", ">f4", "<U3"]
    )
    dtypes = numbers if parquet else st.one_of(numbers, st.sampled_from(["c8", "S2", "datetime64[s]", "<f4, i8"]))
    shapes = st.lists(st.integers(0, 3), max_size=2)

    def leaf(dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        if dtype == "<U3":
            cells = st.lists(st.text(st.characters(codec="utf-8"), max_size=3), min_size=1, max_size=9)
            return np.resize(np.array(draw(cells), "U3"), (n, *shape))
        return draw(hnp.arrays(np.dtype(dtype), (n, *shape)))

    def order(array: Any) -> Any:
        return np.asfortranarray(array) if draw(st.booleans()) else array

    leaves = st.builds(lambda dtype, shape: order(leaf(dtype, shape)), dtypes, shapes)
    kinds = (st.text(max_size=3), st.integers(-3, 3) | st.booleans(), st.none())

    def nests(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        dicts = (st.dictionaries(keys, inner, max_size=2) for keys in kinds)
        return st.one_of(*dicts, st.lists(inner, max_size=2).map(tuple))

    trees = st.recursive(leaves, nests, max_leaves=4)
    trees |= st.dictionaries(st.one_of(*kinds), trees, max_size=2)  # on the outside keys may be of several kinds
    columns = draw(st.dictionaries(st.text(max_size=6), trees, max_size=3))
    return SampleBatch({**columns, "t": np.arange(n)})


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(116)
@OFTEN
@given(batches(), st.dictionaries(st.text(max_size=5), batches(), max_size=3), st.integers(0, 99))
def test_npz_round_trip(tmp_path: Path, batch: SampleBatch, many: dict[str, SampleBatch], steps: int) -> None:
    batch.save(tmp_path / "one.npz")
    same(SampleBatch.load(tmp_path / "one.npz"), batch)
    whole = MultiAgentBatch(many, env_steps=steps, agent_steps=np.int64(steps + 1), known=(*many, "idle"))  # type: ignore[arg-type]  # numpy's ints count
    whole.save(str(tmp_path / "many.npz"))
    back = MultiAgentBatch.load(tmp_path / "many.npz")
    assert list(back) == list(many)
    assert (back.env_steps, back.agent_steps) == (steps, steps + 1)
    for name, own in many.items():
        same(back[name], own)
    if "idle" not in many:
        with pytest.raises(KeyError, match="idle.* has no rows"):
            back["idle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.npz", "one.npz"]


def test_numpy_alone_opens_it_by_the_columns_names(tmp_path: Path) -> None:
    MultiAgentBatch({"main": sample(), "b/c": sample(2)}, env_steps=3).save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as entries:
        names = [f"{p}/{c}" for p in ("main", "b/c") for c in ("obs/camera", "obs/7/0", "obs/7/1", "rewards", "name")]
        assert entries.files == ["manifest", *names]
        np.testing.assert_array_equal(entries["main/obs/camera"], sample().obs["camera"])
        assert json.loads(entries["manifest"].tobytes())["data"]["env_steps"] == 3


def test_names_that_no_archive_holds_or_that_meet_are_told_apart(tmp_path: Path) -> None:
    names = ["a\0b", "a_b", "manifest", "x", "x.npy", "/x", "../x", "\ud800", "", "a/b"]
    batch = SampleBatch({**{name: np.array([i]) for i, name in enumerate(names)}, "a": {"b": np.array([99])}})
    batch.save(tmp_path / "x.npz")
    same(SampleBatch.load(tmp_path / "x.npz"), batch)


def test_loaded_arrays_are_writable(tmp_path: Path) -> None:
    sample().save(tmp_path / "x.npz")
    loaded = SampleBatch.load(tmp_path / "x.npz")
    loaded["rewards"][:] = 0
    assert all(leaf.flags.writeable for _, column in loaded.items() for _, leaf in tree_leaves(column))


def test_objects_are_not_pickled(tmp_path: Path) -> None:
    batch = sample().replace(infos=[{}] * 4, obs={"graph": [{}] * 4})
    with pytest.raises(SerialisationError, match=r"\['obs/graph', 'infos'\] hold Python objects.*drop"):
        batch.save(tmp_path / "x.npz")
    with pytest.raises(SerialisationError, match=r"\['main/obs/graph', 'main/infos'\]"):
        MultiAgentBatch({"main": batch}, env_steps=1).save(tmp_path / "x.npz")
    with pytest.raises(SerialisationError, match=r"'obs' has the keys \[\(1, 2\)\]"):
        sample().replace(obs={(1, 2): np.zeros(4)}).save(tmp_path / "x.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "x.pkl", "x.npy", "x.NPZ"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    many = MultiAgentBatch({"main": sample()}, env_steps=1)
    for call in (sample().save, SampleBatch.load, many.save, MultiAgentBatch.load):
        with pytest.raises(ArgumentError, match=r"ends in \.npz"):
            call(tmp_path / name)


# --- bad files


def test_a_file_of_the_other_kind_says_who_reads_it(tmp_path: Path) -> None:
    sample().save(tmp_path / "one.npz")
    MultiAgentBatch({"main": sample()}, env_steps=1).save(tmp_path / "many.npz")
    with pytest.raises(CheckpointError, match=r"holds a SampleBatch, not a MultiAgentBatch: use SampleBatch\.load"):
        MultiAgentBatch.load(tmp_path / "one.npz")
    with pytest.raises(CheckpointError, match=r"use MultiAgentBatch\.load"):
        SampleBatch.load(tmp_path / "many.npz")


def test_damaged_or_truncated_file_raises(tmp_path: Path) -> None:
    path, bad = tmp_path / "x.npz", tmp_path / "bad.npz"
    sample().save(path)
    content = path.read_bytes()
    cut = [content[:length] for length in range(0, len(content), 13)]
    turned = [
        content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        for place in range(0, len(content), 3)
    ]
    for spoilt in cut + turned:
        bad.write_bytes(spoilt)
        with pytest.raises(CheckpointError):
            SampleBatch.load(bad)


def test_foreign_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for load in (SampleBatch.load, MultiAgentBatch.load):
        with pytest.raises(CheckpointError, match="No such file"):
            load(tmp_path / "missing.npz")
        with pytest.raises(CheckpointError, match="is not a file"):
            load(make_folder(tmp_path / "folder.npz"))
        np.savez(path, obs=np.zeros(3))
        with pytest.raises(CheckpointError, match="is not a marlvec archive"):
            load(path)
        write_archive(path, {"x": np.zeros(3)})
        with pytest.raises(CheckpointError, match=r"holds no batch, not a (SampleBatch|MultiAgentBatch)$"):
            load(path)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(CheckpointError, match="is not a file"):
        SampleBatch.load(tmp_path / "pipe.npz")


def make_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Pipeline"},
        {"kind": ["SampleBatch"]},
        {"batches": 3},
        {"batches": [["", [["x", {"list": []}]]]]},
        {"batches": [["", [["x", {"dict": [[[], {"$array": "rewards"}]]}]]]]},
        {"batches": [["", [["x", {"$array": "missing"}]]]]},
        {"batches": [["", [["x", "rewards"]]]]},
        {"batches": []},
        {"batches": [["", []]]},
        {"batches": [["", [["a", {"$array": "rewards"}], ["b", {"$array": "rewards"}]]]]},
    ],
)
def test_nonsense_with_a_valid_checksum_raises(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    SampleBatch({"rewards": np.zeros(4)}).save(path)
    with np.load(path) as entries:
        arrays = dict(entries)
    manifest = json.loads(arrays["manifest"].tobytes())
    manifest["data"] |= change
    asked = '"rewards"' in json.dumps(manifest)
    arrays = {"rewards": arrays["rewards"]} if asked else {}
    file = io.BytesIO()
    np.savez(file, manifest=np.frombuffer(json.dumps(manifest).encode(), np.uint8), **arrays)
    path.write_bytes(sealed(file.getvalue()))
    with pytest.raises(CheckpointError, match=r"x\.npz"):
        SampleBatch.load(path)


# --- Parquet


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (sample().save, SampleBatch.load):
        with pytest.raises(MissingExtraError, match=r'a Parquet file needs pyarrow.*pip install "marlvec\[parquet\]"'):
            call(tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(116)
@OFTEN
@given(batches(parquet=True))
def test_parquet_round_trip(tmp_path: Path, batch: SampleBatch) -> None:
    pytest.importorskip("pyarrow")
    batch.save(tmp_path / "x.parquet")
    loaded = SampleBatch.load(tmp_path / "x.parquet")
    same(loaded, batch)
    assert all(leaf.flags.writeable for _, column in loaded.items() for _, leaf in tree_leaves(column))
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


@pytest.mark.slow("a hundred files")
@OFTEN
@given(st.dictionaries(st.text(max_size=5), batches(parquet=True), max_size=3), st.integers(0, 99))
def test_parquet_gives_back_all_policies(tmp_path: Path, many: dict[str, SampleBatch], steps: int) -> None:
    pytest.importorskip("pyarrow")
    MultiAgentBatch(many, env_steps=steps, agent_steps=7, known=(*many, "idle")).save(tmp_path / "x.parquet")
    back = MultiAgentBatch.load(tmp_path / "x.parquet")
    assert list(back) == list(many)
    assert (back.env_steps, back.agent_steps, back.known) == (steps, 7, (*many, "idle"))
    for name, own in many.items():
        same(back[name], own)


def test_policies_of_one_parquet_file_share_columns_of_equal_form(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"t": np.arange(2), "obs": np.ones((2, 3))}
    other = {"t": np.arange(1), "obs": np.ones((1, 2)), "logp": np.zeros(1), "policy": np.zeros(1)}
    whole = MultiAgentBatch({"one": SampleBatch(rows), "two": SampleBatch(other)}, env_steps=3)
    whole.save(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["policy", "t", "obs", "two/obs", "logp", "policy~2"]
    assert table["policy"].to_pylist() == ["one", "one", "two"]
    assert table["two/obs"].to_pylist() == [None, None, [1.0, 1.0]]
    back = MultiAgentBatch.load(tmp_path / "x.parquet")
    for name, batch in whole.items():
        same(back[name], batch)
    with pytest.raises(CheckpointError, match=r"holds a MultiAgentBatch, .* use MultiAgentBatch\.load"):
        SampleBatch.load(tmp_path / "x.parquet")
    whole["one"].save(tmp_path / "x.parquet")
    with pytest.raises(CheckpointError, match=r"holds a SampleBatch, .* use SampleBatch\.load"):
        MultiAgentBatch.load(tmp_path / "x.parquet")


def test_texts_with_a_nul_in_them_come_back(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    batch = SampleBatch({"text": np.array(["\x00b", "a\x00b", ""])})
    batch.save(tmp_path / "x.parquet")
    same(SampleBatch.load(tmp_path / "x.parquet"), batch)


def test_arrow_alone_opens_it_by_the_columns_names(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sample().save(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["obs/camera", "obs/7/0", "rewards", "name"]
    assert table["obs/camera"].to_pylist()[1] == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert table["obs/7/0"].to_pylist() == [False, False, True, True]
    assert table["name"].to_pylist() == ["ä"] * 4
    assert table["rewards"].null_count == 0  # NaN is a number here


def test_what_parquet_cannot_hold_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    batch = sample().replace(infos=[{}] * 4, z=np.zeros(4, np.complex64), long=np.zeros(4, np.longdouble))
    with pytest.raises(SerialisationError, match=r"'infos \(object\)', 'z \(complex64\)', 'long \(.*\)'"):
        batch.save(tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def test_bad_parquet_file_raises(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    with pytest.raises(CheckpointError, match="No such file"):
        SampleBatch.load(path)
    parquet.write_table(arrow.table({"x": [1, 2]}), path)
    with pytest.raises(CheckpointError, match="is a Parquet file, but holds no SampleBatch"):
        SampleBatch.load(path)
    batch = SampleBatch({"x": np.arange(1000)})
    batch.save(path)
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            SampleBatch.load(path)
    for place in range(200, 4000, 97):  # among the pages; numbers are what is not to change unnoticed
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        with pytest.raises(CheckpointError):
            SampleBatch.load(path)


# --- batches as arrays of other libraries


@pytest.mark.parametrize(
    ("call", "hidden", "words"),
    [
        ("to_torch", ("torch", "tensordict"), r"to_\w+\(\) needs \w+, which cannot be imported.*pip install"),
        (
            "to_tensordict",
            ("torch", "tensordict"),
            r"to_tensordict\(\) needs \w+, which cannot be imported.*pip install",
        ),
        ("to_jax", ("jax",), r"to_jax\(\) needs jax, which cannot be imported.*pip install"),
        ("to_rllib", ("ray",), r'to_rllib\(\) needs ray.*pip install "ray\[rllib\]"'),
    ],
)
def test_a_library_that_is_missing_is_named(
    call: str, hidden: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    many = [MultiAgentBatch({}, env_steps=0)] if call == "to_rllib" else []
    for batch in (SampleBatch({"rewards": np.arange(4.0)}), *many):
        with pytest.raises(MissingExtraError, match=words):
            getattr(batch, call)()


# --- batches as torch tensors and as a TensorDict


def sample_of_torch() -> SampleBatch:
    obs = {"camera": np.arange(12, dtype=np.float32).reshape(4, 3), "pair": (np.arange(4), np.arange(4) > 1)}
    return SampleBatch({"obs": obs, "rewards": np.arange(4.0), "action_mask": np.ones((4, 2), np.bool_)})


def test_tensors_share_the_arrays_memory() -> None:
    torch = pytest.importorskip("torch")
    batch = sample_of_torch()
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
    tensors = sample_of_torch().to_torch("meta")
    assert tensors["obs"]["pair"][1].device == tensors["rewards"].device == torch.device("meta")
    assert tensors["obs"]["camera"].shape == (4, 3)


@pytest.mark.parametrize("call", ["to_torch", "to_tensordict"])
def test_columns_that_are_no_numbers_are_named(call: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensordict")
    more = {"infos": [{}] * 4, "name": np.array(["a"] * 4), "when": np.zeros(4, "datetime64[s]")}
    batch = sample_of_torch().replace(**more, obs={"graph": [{}] * 4})
    named = r"\['obs/graph \(object\)', 'infos \(object\)', 'name \(<U1\)', 'when \(datetime64\[s\]\)'\].*drop\(\)"
    with pytest.raises(ArgumentError, match=named):
        getattr(batch, call)()
    assert list(batch.drop("obs", *more).to_torch()) == ["rewards", "action_mask"]


def test_a_tensordict_has_the_rows_as_its_batch() -> None:
    torch = pytest.importorskip("torch")
    tensordict = pytest.importorskip("tensordict")
    batch = sample_of_torch()
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
        sample_of_torch().to_torch(pin_memory=True)
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
    batch = sample_of_torch().take([0, 1])
    pinned = batch.to_torch("cuda", pin_memory=True)
    assert calls[:2] == [("pin", (2, 3)), ("cuda", True)]
    assert pinned["rewards"].tolist() == batch["rewards"].tolist()


# --- batches as JAX arrays; run where jax is (`make families`), the error and the alignment everywhere


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


# --- batches as RLlib's. (Nothing of ray runs; its module with the two classes is all that is imported.)


MODULE = "ray.rllib.policy.sample_batch"


@pytest.fixture(params=["stand-in", "ray"])
def rllib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """RLlib's module, or one with classes that take what RLlib's take."""
    if request.param == "ray":
        return pytest.importorskip(MODULE)

    class TheirMultiAgentBatch:
        def __init__(self, policy_batches: dict[str, Any], env_steps: int) -> None:
            self.policy_batches, self.count = policy_batches, env_steps

    module = ModuleType(MODULE)
    module.SampleBatch = type("TheirSampleBatch", (dict,), {})  # type: ignore[attr-defined]  # a stand-in
    module.MultiAgentBatch = TheirMultiAgentBatch  # type: ignore[attr-defined]  # a stand-in
    for name in ("ray", "ray.rllib", "ray.rllib.policy"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def test_columns_get_rllibs_names_and_are_not_copied(rllib: Any) -> None:
    with sync("masked", 2, 2) as envs:
        batch = Collector(envs, {"main": EchoPolicy()}, seed=0).collect(env_steps=12)
    theirs = batch.to_rllib()
    assert type(theirs) is rllib.MultiAgentBatch
    assert theirs.count == 12
    (own,) = theirs.policy_batches.values()
    assert type(own) is rllib.SampleBatch
    renamed = {"next_obs": "new_obs", "terminated": "terminateds", "truncated": "truncateds"}
    assert list(own) == [renamed.get(name, name) for name, _ in batch["main"].items()]
    for name, column in batch["main"].items():
        assert own[renamed.get(name, name)] is column
    extra = SampleBatch({"logp": np.zeros(3), "values": np.ones(3), "infos": [{}] * 3, "obs": {"a": np.zeros(3)}})
    assert list(extra.to_rllib()) == ["action_logp", "vf_preds", "infos", "obs"]


def test_what_rllib_would_take_wrongly_is_refused(rllib: Any) -> None:
    batch = SampleBatch({"obs": np.zeros(3), "t": np.arange(3), "unroll_id": np.zeros(3, np.int64)})
    with pytest.raises(ArgumentError, match=r"sequences.*unpad\(\)"):
        batch.right_zero_pad(2).to_rllib()
    with pytest.raises(ArgumentError, match=r"\['vf_preds'\] exist already as columns"):
        batch.replace(values=np.zeros(3), vf_preds=np.zeros(3)).to_rllib()


# --- columns of rows of unlike length


class Tokens(Policy):
    """Rows of 0 to 3 tokens, as lists; at times all are of one length."""

    ragged: ClassVar[Any] = {"tokens": np.int32, "logp_tokens": np.float32}

    def act(self, rows: Any) -> Any:
        counts = [int(t) % 4 for t in rows.t]
        columns = {"tokens": [list(range(k)) for k in counts], "logp_tokens": [[-0.5] * k for k in counts]}
        return np.zeros(len(rows), np.int64), columns


def same_ragged(one: Any, other: Any, dtype: Any = None) -> None:
    assert one.shape == other.shape
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype == (dtype or a.dtype)
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def tokens_of(**options: Any) -> Collector:
    return Collector(marlvec.make(Turns, num_envs=2, backend="sync"), Tokens(), seed=0, **options)


def test_declared_columns_are_arrays_of_one_dimension() -> None:
    rows = tokens_of().collect(env_steps=40)["main"]
    assert rows["tokens"].dtype == rows["logp_tokens"].dtype == object
    wanted = np.empty(len(rows), object)
    wanted[:] = [np.arange(t % 4, dtype=np.int32) for t in rows.t]
    same_ragged(rows["tokens"], wanted, np.dtype(np.int32))
    assert {row.dtype for row in rows["logp_tokens"]} == {np.dtype(np.float32)}
    empty = tokens_of(random_steps=24).collect(env_steps=40)["main"]
    assert empty.off_policy.sum() == 24
    assert {(len(row), row.dtype.str) for row in empty["tokens"][empty.off_policy]} == {(0, "<i4")}


def test_columns_of_lists_go_on_from_a_state() -> None:
    one, other = tokens_of(), tokens_of()
    one.collect(env_steps=15)
    other.set_state(one.get_state())
    rows, others = (collector.collect(env_steps=30)["main"] for collector in (one, other))
    same_ragged(rows["tokens"], others["tokens"])


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_columns_of_lists_are_in_files(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    rows = tokens_of().collect(env_steps=40)["main"]
    wide = np.empty(len(rows), object)
    wide[:] = [np.arange(3.0) for _ in range(len(rows))]
    rows = rows.replace(wide=wide)
    rows.save(tmp_path / f"batch.{suffix}")
    found = SampleBatch.load(tmp_path / f"batch.{suffix}")
    for name in ("tokens", "logp_tokens", "wide"):
        same_ragged(found[name], rows[name])
    both = MultiAgentBatch({"a": rows, "b": rows.slice(0, 3)}, env_steps=1)
    both.save(tmp_path / f"both.{suffix}")
    same_ragged(MultiAgentBatch.load(tmp_path / f"both.{suffix}")["b"]["tokens"], rows["tokens"][:3])


def test_columns_of_lists_are_in_recordings(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with marlvec.Recorder(tmp_path / "data") as recorder:
        collector = tokens_of(callbacks=[recorder])
        rows = SampleBatch.concat([collector.collect(env_steps=20)["main"] for _ in range(3)])
    recorded = marlvec.load_dataset(tmp_path / "data")["main"]
    column = recorded.column("tokens")
    assert column.dtype == object
    same_ragged(np.asarray(column), rows["tokens"])
    assert sum(len(batch) for batch in recorded.minibatches(16, seed=0)) == len(rows)


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=6))
def test_rows_are_padded_on_the_right(lists: list[list[int]]) -> None:
    rows = SampleBatch({"tokens": ragged_array(lists, np.int16)})
    padded, mask = rows.right_pad("tokens", -1)
    assert padded.dtype == np.int16
    assert padded.shape == mask.shape == (len(lists), max(map(len, lists)))
    assert [row[: len(wanted)].tolist() for row, wanted in zip(padded, lists, strict=True)] == lists
    assert mask.sum(axis=1).tolist() == list(map(len, lists))
    assert (padded[~mask] == -1).all()


def test_columns_of_lists_as_tensors() -> None:
    torch = pytest.importorskip("torch")
    rows = SampleBatch({"tokens": ragged_array([[1, 2], [], [3]], np.int32), "x": np.arange(3)})
    found = rows.to_torch(ragged="pad")
    assert found["tokens"].tolist() == [[1, 2], [0, 0], [3, 0]]
    assert found["tokens_mask"].tolist() == [[True, True], [False, False], [True, False]]
    nested = rows.to_torch(ragged="nested")["tokens"]
    assert [row.tolist() for row in nested.unbind()] == [[1, 2], [], [3]]
    assert nested.dtype == torch.int32
    with pytest.raises(ArgumentError, match=r"got \['tokens \(object\)'\]; drop\(\) them first"):
        rows.to_torch()
    with pytest.raises(ArgumentError, match="expected ragged='pad', 'nested' or None"):
        rows.to_torch(ragged="zip")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected a column of 1-D arrays, got int64"):
        rows.right_pad("x")


@pytest.mark.parametrize("bad", [[[1.5]], [[[1, 2]]], [["left"]]])
def test_rows_of_another_form_are_refused(bad: Any) -> None:
    with pytest.raises(ContractError, match=r"'tokens', row 0: expected a list or 1-D array of int32"):
        ragged_array(bad, np.int32, "tokens")
