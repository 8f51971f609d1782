"""`AnyText`, and columns of texts in files: nothing is cut, padded or pickled."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Dict
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import RandomPolicy, Recorder, SampleBatch, load_dataset
from marlvec.errors import ArgumentError, CheckpointError, SerialisationError
from marlvec.serialization.values import decode, encode
from marlvec.spaces import AnyText

HARD = ["", "x", "two words\nand a line", "quotes \" ' \\ \x00 end", "ünïcödé ☃ 😀", None, "long " * 2_000]


def column(texts: list[str | None]) -> Any:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array


class Chat(gymnasium.Env[Any, Any]):
    """Answers with a text of the last action and the step; ends after five steps."""

    observation_space = Dict({"heard": AnyText(100), "step": gymnasium.spaces.Discrete(10)})
    action_space = AnyText(40, examples=["hello there", "two\nlines", "", "☃"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return {"heard": "begin, please", "step": 0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return (
            {"heard": f"step {self.steps}: {action}", "step": self.steps},
            float(len(action)),
            self.steps == 5,
            False,
            {},
        )


@pytest.mark.parametrize("value", HARD[:5])
def test_any_text_looks_at_type_and_length_alone(value: str) -> None:
    assert value in AnyText()
    assert value in AnyText(len(value))
    assert (value in AnyText(max(0, len(value) - 1))) == (not value)
    assert value.encode() not in AnyText()


def test_any_text_compares_prints_and_is_saved() -> None:
    space = AnyText(9, examples=["a b", "c"])
    assert repr(space) == "AnyText(9)"
    assert space == AnyText(9)
    assert space != AnyText(8)
    again = decode(encode(space, "it"))
    assert again == space
    assert again.examples == space.examples
    space.seed(3), again.seed(3)
    assert [space.sample() for _ in range(20)] == [again.sample() for _ in range(20)]
    assert all(len(AnyText(3, seed=seed).sample()) <= 3 for seed in range(40))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: AnyText(-1), r"max_length: expected an int of at least 0, got -1"),
        (lambda: AnyText(1.5), r"max_length: expected an int"),  # type: ignore[arg-type]
        (lambda: AnyText(2, examples=["abc"]), r"expected texts of at most 2 characters, got 'abc'"),
        (lambda: AnyText().sample(mask=1), r"neither a mask nor probabilities"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()


texts = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12)


@settings(deadline=None, max_examples=30)
@given(texts)
def test_a_column_of_texts_comes_back_from_both_files(values: list[str | None]) -> None:
    pytest.importorskip("pyarrow")
    batch = SampleBatch({"obs": {"said": column(values)}, "t": np.arange(len(values))})
    with tempfile.TemporaryDirectory() as folder:
        for name in ("x.npz", "x.parquet"):
            batch.save(Path(folder) / name)
            back = SampleBatch.load(Path(folder) / name)
            assert back["obs"]["said"].dtype == object
            assert back["obs"]["said"].tolist() == values
            assert back["t"].tolist() == list(range(len(values)))


def test_a_file_holds_little_more_than_the_characters(tmp_path: Path) -> None:
    values = [f"{i} " + "word " * (i % 400) for i in range(2_000)]
    SampleBatch({"obs": column(values)}).save(tmp_path / "x.npz")
    assert (tmp_path / "x.npz").stat().st_size < 1.1 * sum(map(len, values))
    batch = SampleBatch({"obs": column(HARD)})
    assert batch.size_bytes == 8 * len(HARD) + sum(len(text) for text in HARD if text)


def test_half_a_surrogate_pair_is_in_npz_and_refused_by_parquet(tmp_path: Path) -> None:
    batch = SampleBatch({"obs": column(["\ud800", "x"])})
    batch.save(tmp_path / "x.npz")
    assert SampleBatch.load(tmp_path / "x.npz")["obs"].tolist() == ["\ud800", "x"]
    pytest.importorskip("pyarrow")
    with pytest.raises(SerialisationError, match="obs"):
        batch.save(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["x.npz", "x.parquet"])
def test_other_objects_are_refused_by_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(SerialisationError, match="obs"):
        SampleBatch({"obs": column(["x", {"a": 1}])}).save(tmp_path / name)  # type: ignore[list-item]


def test_lengths_that_are_not_those_of_the_bytes_are_refused() -> None:
    from marlvec.collect.batch_files import _unpacked_texts

    data = np.frombuffer(b"abc", np.uint8)
    assert _unpacked_texts(data, np.array([1, -1, 2])).tolist() == ["a", None, "bc"]
    for lengths in ([1, 1], [4], [-2, 5], [3.0]):
        with pytest.raises(ValueError, match="lengths of texts"):
            _unpacked_texts(data, np.array(lengths))


def test_strings_of_numpy_become_texts(tmp_path: Path) -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy has no StringDType")
    batch = SampleBatch({"obs": np.array(["a", "bc\n"], np.dtypes.StringDType())})
    batch.save(tmp_path / "x.npz")
    assert SampleBatch.load(tmp_path / "x.npz")["obs"].tolist() == ["a", "bc\n"]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_whole_games_in_text_are_recorded_and_read(format: str, tmp_path: Path) -> None:
    """As the collector gave them, in order, mixed, and by episode; and again by an appended recording."""
    pytest.importorskip("pyarrow")
    kept = []
    with marlvec.make(Chat, num_envs=3, backend="sync") as envs:
        recorder = Recorder(tmp_path / "d", format=format)
        collector = marlvec.Collector(envs, RandomPolicy(), callbacks=[recorder], seed=1)
        with recorder:
            for _ in range(3):
                batch = collector.collect(env_steps=24)["main"]
                kept.append((batch["obs"]["heard"].tolist(), batch["actions"].tolist()))
    dataset = load_dataset(tmp_path / "d")
    rows = dataset["main"]
    read = rows.read()
    heard, actions = ([text for one in kept for text in one[i]] for i in (0, 1))
    assert read["obs"]["heard"].tolist() == heard
    assert rows.take(range(len(rows)))["actions"].tolist() == actions
    assert any("\n" in text for text in actions)
    again = list(rows.minibatches(16, seed=4))
    assert sorted(text for one in again for text in one["actions"].tolist()) == sorted(actions)
    assert all(one["actions"].dtype == object for one in again)


def test_a_checkpoint_of_a_collector_of_texts_goes_on(tmp_path: Path) -> None:
    def collected(n: int, load: bool) -> Any:
        with marlvec.make(Chat, num_envs=2, backend="sync") as envs:
            collector = marlvec.Collector(envs, RandomPolicy(), seed=1)
            if load:
                marlvec.load_checkpoint(tmp_path, collector=collector)
            found = [collector.collect(env_steps=10)["main"] for _ in range(n)]
            if not load:
                marlvec.save_checkpoint(tmp_path, collector=collector)
            return found

    assert len(collected(1, load=False)[0]["actions"]) == 10
    more = collected(1, load=True)[0]
    assert more["env_t"].tolist() != [0] * 10


def test_a_file_with_another_form_of_text_is_refused(tmp_path: Path) -> None:
    from marlvec.serialization.archive import write_archive

    path = tmp_path / "x.npz"
    write_archive(path, {"kind": "SampleBatch", "batches": [["", [["obs", {"text": [1, 2]}]]]]})
    with pytest.raises(CheckpointError, match="holds no batch"):
        SampleBatch.load(path)
