"""Rows of a batch, chosen, cut and joined: equal to what lists of dicts give."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, SampleBatch
from marlvec.connectors import AddLastObs
from marlvec.errors import ArgumentError, ContractError
from tests.collect.helpers.players import EchoPolicy, sync
from tests.collect.helpers.row_dicts import Row, batch_of, fragments_of, row, row_lists, rows_of


def numbers(batch: SampleBatch) -> list[int]:
    return [info["number"] for info in batch["infos"].tolist()]


# --- slice, take, concat


@pytest.mark.checklist(116)
@given(row_lists(), st.integers(-12, 12), st.integers(-12, 12))
def test_slices_are_slices_of_the_rows(rows: list[Row], start: int, stop: int) -> None:
    batch = batch_of(rows)
    assert rows_of(batch) == rows
    assert rows_of(batch.slice(start, stop)) == rows[start:stop]
    assert all(np.shares_memory(part["rewards"], batch["rewards"]) for part in [batch.slice(0, 3)] if len(part))


@pytest.mark.checklist(116)
@given(row_lists(min_size=1), st.data())
def test_rows_are_taken_by_number_and_by_mask(rows: list[Row], data: st.DataObject) -> None:
    n = len(rows)
    where = data.draw(st.lists(st.integers(-n, n - 1)))
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assert rows_of(batch_of(rows).take(where)) == [rows[i] for i in where]
    assert rows_of(batch_of(rows).take(mask)) == [r for r, chosen in zip(rows, mask, strict=True) if chosen]


@pytest.mark.checklist(116)
@given(st.lists(row_lists(), min_size=1, max_size=4))
def test_concat_puts_rows_after_rows(parts: list[list[Row]]) -> None:
    batches = [batch_of(part) for part in parts]
    joined = SampleBatch.concat(batches)
    assert rows_of(joined) == [r for part in parts for r in part]
    assert repr(joined).partition("\n")[2].replace(f"({len(joined)},", "(n,") == (
        repr(batches[0]).partition("\n")[2].replace(f"({len(parts[0])},", "(n,")
    )
    assert not np.shares_memory(joined["rewards"], batches[0]["rewards"])


@pytest.mark.checklist(116)
def test_concat_refuses_other_columns_and_names_them() -> None:
    batch = batch_of([row(0, t=0, eps_id=0, unroll_id=0, env_id=0, agent_index=0)])
    with pytest.raises(ArgumentError, match=r"batch 1 .* columns \['name'\] are missing, columns \['logp'\] are not"):
        SampleBatch.concat([batch, batch.drop("name").replace(logp=np.zeros(1))])
    with pytest.raises(ArgumentError, match=r"columns \['name'\] are missing, columns \[\] are not"):
        SampleBatch.concat([batch, batch, batch.drop("name")])
    with pytest.raises(ArgumentError, match=r"columns \[\] are missing, columns \['logp'\] are not"):
        SampleBatch.concat([batch, batch.replace(logp=np.zeros(1))])
    with pytest.raises(ArgumentError, match="at least one"):
        SampleBatch.concat([])
    wrong: dict[str, tuple[Any, str]] = {
        "rewards": (np.zeros(1, np.float32), "'rewards'.*batch 1 has float32.*batch 0 has float64"),
        "t": (np.zeros((1, 2), np.int64), r"'t'.*of shape \(1, 2\)"),
        "env_id": (np.zeros(1), "'env_id'.*float64"),  # int64 as float64 would lose ids above 2**53
        "obs": ({"image": np.zeros((1, 2, 3), np.float32)}, r"'obs'.*keys \['image', 'pair'\]"),
        "name": ((np.zeros(1, "U8"),), "'name'.*expected an array, got a tuple"),
    }
    for name, (column, message) in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            SampleBatch.concat([batch, batch.replace(**{name: column})])
    short, long = (SampleBatch({"name": np.array([text])}) for text in ("a", "long"))
    assert SampleBatch.concat([short, long])["name"].tolist() == ["a", "long"]


# --- shuffle, minibatches


@pytest.mark.checklist(116)
@given(row_lists(), st.integers(0, 2**64 - 1))
def test_shuffle_moves_whole_rows(rows: list[Row], seed: int) -> None:
    batch = batch_of(rows)
    shuffled = batch.shuffle(seed)
    assert sorted(rows_of(shuffled), key=lambda r: r["infos"]["number"]) == rows
    assert rows_of(batch.shuffle(seed)) == rows_of(shuffled) == rows_of(batch.shuffle(np.random.default_rng(seed)))
    assert rows_of(batch) == rows
    assert all(info is rows[number]["infos"] for info, number in zip(shuffled["infos"], numbers(shuffled), strict=True))


def test_every_order_is_as_likely_as_another() -> None:
    batch, rng = SampleBatch({"x": np.arange(3)}), np.random.default_rng(0)
    counts = Counter(tuple(batch.shuffle(rng)["x"].tolist()) for _ in range(6000))
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())  # 1000 each; five standard deviations are 144
    assert len({tuple(SampleBatch({"x": np.arange(30)}).shuffle()["x"].tolist()) for _ in range(5)}) == 5


@pytest.mark.checklist(116)
@given(row_lists(), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_minibatches_hold_every_row_once(rows: list[Row], size: int, seed: int, drop_last: bool) -> None:
    parts = [rows_of(part) for part in batch_of(rows).minibatches(size, seed, drop_last=drop_last)]
    whole, rest = divmod(len(rows), size)
    assert list(map(len, parts)) == [size] * whole + ([rest] if rest and not drop_last else [])
    shuffled = rows_of(batch_of(rows).shuffle(seed))
    assert [r for part in parts for r in part] == shuffled[: whole * size if drop_last else None]


def test_a_generator_gives_each_pass_another_order() -> None:
    batch, rng = SampleBatch({"x": np.arange(50)}), np.random.default_rng(0)
    first, second = (SampleBatch.concat(list(batch.minibatches(7, rng)))["x"].tolist() for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "3", None])
def test_sizes_that_are_none_are_refused_at_once(wrong: Any) -> None:
    batch = batch_of([row(0, t=0, eps_id=0, unroll_id=0, env_id=0, agent_index=0)])
    for call in (batch.minibatches, batch.timeslices):
        with pytest.raises(ArgumentError, match="must be a whole number of at least 1"):
            call(wrong)
    if wrong is not None:
        with pytest.raises(ArgumentError, match="max_len must be a whole number of at least 1"):
            batch.right_zero_pad(wrong)
        if wrong != 0:
            for call in (batch.shuffle, lambda seed: batch.minibatches(1, seed)):
                with pytest.raises(ArgumentError, match="seed"):
                    call(wrong)


# --- cutting


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(116)
@given(row_lists(), st.integers(1, 9))
def test_timeslices_end_with_a_remainder(rows: list[Row], k: int) -> None:
    parts = batch_of(rows).timeslices(np.int64(k))  # type: ignore[arg-type]  # numpy's ints count
    assert [rows_of(part) for part in parts] == [rows[i : i + k] for i in range(0, len(rows), k)]


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(115)
@pytest.mark.checklist(116)
@settings(max_examples=300)
@given(st.lists(row_lists(), min_size=1, max_size=3), st.booleans())
def test_fragments_are_one_agents_rows_of_one_episode(parts: list[list[Row]], twice: bool) -> None:
    """Also across the seams of concatenated batches, whose numbers are equal by chance, or by being the same batch."""
    parts = parts * 2 if twice else parts
    rows = [r for part in parts for r in part]
    batch = SampleBatch.concat([batch_of(part) for part in parts])
    found = batch.split_by_fragment()
    assert [rows_of(part) for part in found] == fragments_of(rows)
    for part in found:
        assert len({tuple(ids) for ids in zip(part.eps_id, part.env_id, part.agent_index, strict=True)}) == 1
        assert (np.diff(part.t) == 1).all() or len(parts) > 1
        assert np.shares_memory(part["rewards"], batch["rewards"])


@pytest.mark.checklist(116)
@pytest.mark.parametrize("name", ["unroll_id", "eps_id", "env_id", "agent_index", "t"])
def test_neighbours_that_differ_in_one_number_stay_two(name: str) -> None:
    rows = [row(i, t=i, eps_id=3, unroll_id=3, env_id=3, agent_index=3) for i in range(4)]
    other = rows[:2] + [{**r, name: r[name] - 2 if name == "t" else 4} for r in rows[2:]]
    assert [rows_of(part) for part in batch_of(rows).split_by_fragment()] == [rows]
    assert [rows_of(part) for part in batch_of(other).split_by_fragment()] == [other[:2], other[2:]]


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(116)
@settings(max_examples=300)
@given(row_lists(), st.integers(0, 99) | st.none())
def test_an_episode_is_all_its_agents_rows_wherever_they_stand(rows: list[Row], seed: int | None) -> None:
    batch = batch_of(rows) if seed is None else batch_of(rows).shuffle(seed)
    wanted: dict[int, list[Row]] = {}
    for r in rows_of(batch):
        wanted.setdefault(r["eps_id"], []).append(r)
    assert [rows_of(part) for part in batch.split_by_episode()] == list(wanted.values())


def test_phantom_rows_go_with_their_fragment_and_are_no_second_decision() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), learner_connectors=[AddLastObs()], seed=0)
        batches = [collector.collect(env_steps=5)["main"] for _ in range(4)]
    batch = SampleBatch.concat(batches)
    assert batch.phantom.sum() == len(batch.split_by_fragment()) == len(np.unique(batch.unroll_id))
    assert all(part.phantom.tolist() == [False] * (len(part) - 1) + [True] for part in batch.split_by_fragment())
    assert sum(map(len, batch.split_by_episode())) == len(batch)


def test_one_id_of_two_episodes_is_found_out() -> None:
    rows = [row(i, t=i, eps_id=0, unroll_id=0, env_id=0, agent_index=1) for i in range(3)]
    batch = batch_of(rows)
    for twice in (SampleBatch.concat([batch, batch]), SampleBatch.concat([batch, batch.slice(1, 2)])):
        with pytest.raises(
            ArgumentError, match="eps_id 0 has decision t=[01] of agent 1 more than once; .*several col"
        ):
            twice.split_by_episode()
    with pytest.raises(ArgumentError, match="eps_id 0 has rows of several envs; .*several collectors"):
        SampleBatch.concat([batch, batch.replace(env_id=batch.env_id + 1)]).split_by_episode()
    apart = SampleBatch.concat([batch, batch.replace(eps_id=batch.eps_id + 7)])
    assert [rows_of(part) for part in apart.split_by_episode()] == [
        rows,
        [{**r, "eps_id": 7} for r in rows],
    ]


def test_cutting_needs_its_column() -> None:
    batch = SampleBatch({"x": np.zeros(3)})
    for call, name in ((batch.split_by_fragment, "unroll_id"), (batch.split_by_episode, "eps_id")):
        with pytest.raises(ArgumentError, match=rf"needs a column '{name}'; the columns are \['x'\]"):
            call()
    sequences = batch_of([row(0, t=0, eps_id=0, unroll_id=0, env_id=0, agent_index=0)]).right_zero_pad(2)
    with pytest.raises(ArgumentError, match=r"one 'eps_id' a row, got shape \(1, 2\).*unpad"):
        sequences.split_by_episode()
    with pytest.raises(ArgumentError, match="one 'unroll_id' a row, got a tree"):
        batch.replace(unroll_id={"a": np.zeros(3)}).split_by_fragment()


# --- sequences


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(115)
@pytest.mark.checklist(116)
@settings(max_examples=200)
@given(row_lists(), st.integers(1, 5) | st.none())
def test_padding_makes_sequences_of_single_fragments(rows: list[Row], max_len: int | None) -> None:
    size = max([len(part) for part in fragments_of(rows)] + [1]) if max_len is None else max_len
    wanted = [part[i : i + size] for part in fragments_of(rows) for i in range(0, len(part), size)]
    batch = batch_of(rows)
    padded = batch.right_zero_pad(max_len)
    assert len(padded) == len(wanted)
    assert padded["seq_lens"].tolist() == [len(part) for part in wanted]
    assert padded["obs"]["image"].shape == (len(wanted), size, 2, 3)
    for i, part in enumerate(wanted):
        blank = size - len(part)
        assert padded["rewards"][i].tolist() == [r["rewards"] for r in part] + [0.0] * blank
        assert padded["infos"][i].tolist() == [r["infos"] for r in part] + [None] * blank
        assert padded["loss_mask"][i].tolist() == [True] * len(part) + [False] * blank
        assert not padded["obs"]["image"][i, len(part) :].any()
    assert rows_of(padded.unpad()) == rows
    shuffled = padded.shuffle(3).unpad()
    assert sorted(rows_of(shuffled), key=lambda r: r["infos"]["number"]) == rows


def test_rows_out_of_order_are_not_made_sequences() -> None:
    rows = [row(i, t=i, eps_id=0, unroll_id=0, env_id=0, agent_index=0) for i in range(3)]
    batch = batch_of(rows)
    for wrong in (batch.take([2, 1, 0]), SampleBatch.concat([batch, batch]), batch.right_zero_pad()):
        with pytest.raises((ContractError, ArgumentError)):
            wrong.right_zero_pad(3)
    with pytest.raises(ContractError, match="seq_lens"):
        batch.unpad()


def test_the_state_is_kept_once_a_sequence_and_comes_back() -> None:
    rows = [row(i, t=i, eps_id=0, unroll_id=0, env_id=0, agent_index=0) for i in range(5)]
    batch = batch_of(rows).replace(state_in=np.arange(10.0).reshape(5, 2))
    padded = batch.right_zero_pad(2)
    assert padded["state_in"].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert padded.unpad()["state_in"].tolist() == batch["state_in"].tolist()


# --- columns that are made when they are read


def collected() -> SampleBatch:
    """Rows of agents that come, go and take turns, in a batch that cuts through episodes."""
    with sync("keyed, no last obs", 3, 3) as envs:
        return Collector(envs, EchoPolicy(), seed=1).collect(env_steps=60)["main"]


@pytest.mark.checklist(116)
@given(st.data())
def test_what_is_chosen_of_a_column_is_the_same_before_and_after_it_was_read(data: st.DataObject) -> None:
    late, read = collected(), collected()
    n, names = len(read), [name for name in list(read.keys()) if name.startswith("next_")]
    assert {"next_obs", "next_obs_missing", "next_env_t"} <= set(names)
    dict(read)
    for _ in range(data.draw(st.integers(1, 4))):
        move, n = data.draw(st.sampled_from(["take", "mask", "slice", "drop", "replace", "pickle", "copy"])), len(read)
        if move == "take" and n:
            where = np.array(data.draw(st.lists(st.integers(-n, n - 1), max_size=12)), np.int64)
            late, read = late.take(where), read.take(where)
        elif move == "mask":
            chosen = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
            late, read = late.take(chosen), read.take(chosen)
        elif move == "slice":
            bounds = data.draw(st.integers(-n, n)), data.draw(st.integers(-n, n))
            late, read = late.slice(*bounds), read.slice(*bounds)
        elif move == "drop" and "terminated" in read:
            late, read = late.drop("terminated"), read.drop("terminated")
        elif move == "replace":
            late, read = late.replace(more=late["t"] + 1), read.replace(more=read["t"] + 1)
        elif move == "pickle":
            late = pickle.loads(pickle.dumps(late))
        elif move == "copy":
            late = copy.deepcopy(late)
    assert list(late.keys()) == list(read.keys())
    for name, column in read.items():
        assert late[name].dtype == column.dtype
        np.testing.assert_array_equal(late[name], column)
    assert late.next_obs is late["next_obs"]


@pytest.mark.checklist(116)
def test_a_column_that_is_left_alone_has_a_length() -> None:
    batch = collected()
    n = len(batch)
    alone = batch.drop(*(name for name in list(batch.keys()) if name != "next_obs"))
    assert len(alone) == n
    with pytest.raises(IndexError):
        alone.take(np.array([n]))
    assert len(SampleBatch({"x": np.arange(3)})) == 3
