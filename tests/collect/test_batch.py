"""SampleBatch and MultiAgentBatch: columns, rows, memory and objects."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
from marlvec.collect.rows import BatchMemory
from marlvec.connectors import AddLastObs, FlattenObs, FrameStack, NormalizeObs
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from tests.collect.players import EchoPolicy, sync
from tests.collect.test_row_log import World
from tests.vector.support.kinds import OBJECTS, ObjectEnv, at, make_envs

# --- the slow reference for batches: a list of rows, each a dict of plain Python values


Row = dict[str, Any]

IDS = ("t", "eps_id", "unroll_id", "env_id", "agent_index")


def batch_of(rows: list[Row]) -> SampleBatch:
    """Batch of these rows, with the dtypes that `row` means."""

    def column(values: list[Any]) -> Any:
        return np.array(values)

    n = len(rows)
    infos = np.empty(n, object)
    infos[:] = [row["infos"] for row in rows]
    images = np.array([row["obs"]["image"] for row in rows], np.float32).reshape(n, 2, 3)
    pair = (np.array([row["obs"]["pair"][0] for row in rows], np.int8), column([row["obs"]["pair"][1] for row in rows]))
    return SampleBatch(
        {
            "obs": {"image": images, "pair": (pair[0], pair[1].astype(np.bool_))},
            "rewards": np.array([row["rewards"] for row in rows], np.float64),
            "infos": infos,
            "name": np.array([row["name"] for row in rows], "U8"),
            **{name: np.array([row[name] for row in rows], np.int64) for name in IDS},
        }
    )


def rows_of(batch: SampleBatch) -> list[Row]:
    """What the batch holds, row by row."""
    return [{k: map_tree(lambda leaf: _plain(leaf[i]), v) for k, v in batch.items()} for i in range(len(batch))]  # noqa: B023  (called at once)


def row(number: int, **ids: int) -> Row:
    """A row of which every column tells its number."""
    return {
        "obs": {"image": [[number, 1, 2], [3, 4, -number]], "pair": (number % 128, number % 3 == 0)},
        "rewards": number / 7,
        "infos": {"number": number},
        "name": f"row {number}",
        **ids,
    }


@st.composite
def row_lists(draw: st.DrawFn, first_number: int = 0, min_size: int = 0) -> list[Row]:
    """Rows as a collector orders them: by env, agent and time, cut anywhere at both ends."""
    rows: list[Row] = []
    num_envs, unroll = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    lengths = st.lists(st.integers(0, 4), max_size=3)
    for env in range(num_envs):
        for agent in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, 3))  # in the middle of an episode
            for number, length in enumerate(draw(lengths)):
                ids = {"eps_id": number * num_envs + env, "unroll_id": unroll, "env_id": env, "agent_index": agent}
                rows += [row(first_number + len(rows) + t, t=start + t, **ids) for t in range(length)]
                unroll, start = unroll + (length > 0), 0
    while len(rows) < min_size:
        unroll += 1
        ids = {"eps_id": 99, "unroll_id": unroll, "env_id": 99, "agent_index": len(rows), "t": 0}
        rows.append(row(first_number + len(rows), **ids))
    return rows


def fragments_of(rows: list[Row]) -> list[list[Row]]:
    """Stretches of one agent's decisions in one episode."""
    found: list[list[Row]] = []
    for r in rows:
        last = found[-1][-1] if found else None
        same = last is not None and all(r[name] == last[name] for name in IDS if name != "t")
        if same and last is not None and r["t"] > last["t"]:
            found[-1].append(r)
        else:
            found.append([r])
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


# --- sampleBatch and MultiAgentBatch


def small() -> SampleBatch:
    obs = {"image": np.arange(12.0).reshape(4, 3), "pair": (np.arange(4), np.arange(4) > 1)}
    return SampleBatch({"obs": obs, "rewards": np.arange(4, dtype=np.float32), "take": np.arange(4)})


def test_columns_are_read_by_attribute_and_by_name() -> None:
    batch = small()
    assert len(batch) == 4
    assert batch.rewards is batch["rewards"]
    assert batch.obs["pair"][1].tolist() == [False, False, True, True]
    assert list(batch.keys()) == ["obs", "rewards", "take"]
    assert dict(batch.items())["rewards"] is batch.rewards
    assert "obs" in batch
    assert "logp" not in batch
    assert batch["take"].tolist() == [0, 1, 2, 3]  # as an attribute this name is the method
    with pytest.raises(AttributeError, match=r"'logp'.*\['obs', 'rewards', 'take'\]"):
        batch.logp  # noqa: B018  (reading it is the test)
    with pytest.raises(KeyError, match=r"'logp'.*rewards"):
        batch["logp"]
    with pytest.raises(TypeError, match=r"slice\(\) or take\(\)"):
        batch[2]  # type: ignore[index]  # on purpose
    with pytest.raises(TypeError):
        list(batch)


def test_rows_are_chosen_in_every_leaf() -> None:
    batch = small()
    part = batch.slice(1, 3)
    assert len(part) == 2
    assert part.obs["image"].tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert np.shares_memory(part.obs["image"], batch.obs["image"])
    assert len(batch.slice(3, 99)) == 1
    assert len(batch.slice(-2, 4)) == 2
    chosen = batch.take([3, 0, 3])
    assert chosen.obs["pair"][0].tolist() == [3, 0, 3]
    assert chosen.rewards.dtype == np.float32
    assert not np.shares_memory(chosen.rewards, batch.rewards)
    assert batch.take(batch.rewards > 1).obs["pair"][0].tolist() == [2, 3]
    assert batch.take(np.array([3, 1], np.uint64)).obs["pair"][0].tolist() == [3, 1]
    assert len(batch.take([])) == 0
    for wrong in ([True, False], [[0, 1]], [0.5], 1, ["a"]):
        with pytest.raises(ArgumentError, match=r"take\(\) wants"):
            batch.take(wrong)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(IndexError):
        batch.take([4])


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ArgumentError, match="column 'obs' at b has 3 rows"):
        SampleBatch({"obs": {"a": np.zeros(2), "b": np.zeros(3)}})
    with pytest.raises(ArgumentError, match="at least one column"):
        SampleBatch({})


def test_columns_come_and_go() -> None:
    batch = small()
    more = batch.replace(rewards=np.ones(4), infos=[{}, {"a": 1}, {}, {}])
    assert list(more.keys()) == ["obs", "rewards", "take", "infos"]
    assert more["rewards"].tolist() == [1, 1, 1, 1]
    assert batch["rewards"].tolist() == [0, 1, 2, 3]
    assert more["obs"] is batch["obs"]
    assert list(more.drop("obs", "take").keys()) == ["rewards", "infos"]
    with pytest.raises(ArgumentError, match="'rewards' has 3 rows"):
        batch.replace(rewards=np.ones(3))
    with pytest.raises(KeyError, match="no column 'logp'"):
        batch.drop("logp")
    with pytest.raises(ArgumentError, match="at least one column"):
        batch.drop("obs", "rewards", "take")


def test_lists_become_arrays() -> None:
    batch = SampleBatch({"x": [1, 2], "tree": {"y": [[0.5], [1.5]]}, "infos": [{}, {"a": 1}], "ragged": [[1], [1, 2]]})
    assert batch["x"].dtype == np.int64
    assert batch["tree"]["y"].shape == (2, 1)
    assert batch["infos"].dtype == batch["ragged"].dtype == object
    assert batch["ragged"].tolist() == [[1], [1, 2]]
    assert batch["infos"].shape == (2,)
    for wrong in (1.5, np.float64(3), "text", None):
        with pytest.raises(ArgumentError, match="column 'x' at a must be an array with the rows on its first axis"):
            SampleBatch({"x": {"a": wrong}})


def test_batches_survive_pickling_and_copying() -> None:
    batch = MultiAgentBatch({"main": small()}, env_steps=2, known=("main", "other"))
    for again in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert repr(again) == repr(batch)
        np.testing.assert_array_equal(again["main"].obs["image"], batch["main"].obs["image"])
        assert (again.env_steps, again.agent_steps) == (2, 4)


def test_reprs_tell_names_shapes_and_dtypes() -> None:
    assert repr(small()).splitlines() == [
        "SampleBatch of 4 rows",
        "  obs/image   float64  (4, 3)",
        "  obs/pair/0  int64    (4,)",
        "  obs/pair/1  bool     (4,)",
        "  rewards     float32  (4,)",
        "  take        int64    (4,)",
    ]
    many = MultiAgentBatch({"main": small()}, env_steps=2, known=("other", "main"))
    assert repr(many).splitlines() == [
        "MultiAgentBatch: 2 env steps, 4 agent steps",
        "  policy  rows   size  columns",
        "  main       4  180 B  obs, rewards, take",
        "  other      0",
    ]
    assert small().size_bytes == many.size_bytes == 4 * (3 * 8 + 8 + 1 + 4 + 8)
    big = MultiAgentBatch({str(k): SampleBatch({"x": np.zeros(10**k, np.uint8)}) for k in (3, 6)}, env_steps=1)
    assert [line.split()[2:4] for line in repr(big).splitlines()[2:]] == [["1.0", "kB"], ["1.0", "MB"]]


@pytest.mark.checklist(113)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("policies", [1, 2, 3])
def test_one_policy_or_many_the_output_is_one_batch_per_policy_with_counts(policies: int, batch_mode: str) -> None:
    with sync("parallel", 3, 3) as envs:
        ids = [f"p{i}" for i in range(policies)]
        collector = Collector(
            envs,
            {name: EchoPolicy() for name in ids},
            {name: ids[a % policies] for a, name in enumerate(envs.agents)},
            batch_mode=batch_mode,  # type: ignore[arg-type]  # pytest knows no literals
            seed=0,
        )
        total = 0
        for _ in range(3):
            batch = collector.collect(env_steps=60)
            assert type(batch) is MultiAgentBatch
            assert list(batch) == ids
            assert len(batch) == policies
            assert all(type(rows) is SampleBatch for rows in batch.values())
            assert batch.agent_steps == sum(len(rows) for rows in batch.values()) > 0
            assert batch.env_steps == 60 if batch_mode == "truncate" else batch.env_steps >= 60
            for name, rows in batch.items():
                assert {ids[a % policies] for a in rows["agent_index"].tolist()} == {name}
            total += batch.env_steps
        assert total <= collector.metrics.env_steps


def test_policy_without_rows_has_no_key() -> None:
    with sync("parallel", 2, 2) as envs:
        policies = {"busy": EchoPolicy(), "idle": EchoPolicy()}
        batch = Collector(envs, policies, "busy", seed=0).collect(env_steps=10)
        assert list(batch) == ["busy"]
        assert "idle" not in batch
        assert batch.get("idle") is None
        with pytest.raises(KeyError, match=r"'idle' has no rows in this batch; \['busy'\]"):
            batch["idle"]
        with pytest.raises(KeyError, match=r"no policy 'ide'; the policies are \['busy', 'idle'\]"):
            batch["ide"]


# --- rows of a batch, chosen, cut and joined: equal to what lists of dicts give


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


# --- batches of several policies, cut in step, joined and mapped


POLICIES = ("a", "b")


def split(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by who plays: every second agent is b's."""
    found = {name: [r for r in rows if POLICIES[r["agent_index"] % 2] == name] for name in POLICIES}
    return {name: own for name, own in found.items() if own}


def multi(rows: list[Row], env_steps: int = 7, agent_steps: int | None = None) -> MultiAgentBatch:
    batches = {name: batch_of(own) for name, own in split(rows).items()}
    return MultiAgentBatch(batches, env_steps=env_steps, agent_steps=agent_steps, known=POLICIES)


def rows_by_policy(batch: MultiAgentBatch) -> dict[str, list[Row]]:
    return {name: rows_of(own) for name, own in batch.items()}


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(116)
@settings(max_examples=300)
@given(row_lists(), st.integers(1, 5))
def test_timeslices_cut_all_policies_in_step(rows: list[Row], k: int) -> None:
    moments = sorted({(r["eps_id"], r["t"]) for r in rows})
    wanted = [set(moments[i : i + k]) for i in range(0, len(moments), k)]
    parts = multi(rows).timeslices(k)
    assert [part.env_steps for part in parts] == [len(own) for own in wanted]
    for part, own in zip(parts, wanted, strict=True):
        assert rows_by_policy(part) == split([r for r in rows if (r["eps_id"], r["t"]) in own])
        assert part.agent_steps == sum(map(len, part.values()))
        with pytest.raises(KeyError, match=r"has no rows|no policy 'c'; the policies are \['a', 'b'\]"):
            part["c"]


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(113)
@pytest.mark.checklist(116)
@given(st.lists(row_lists(), min_size=1, max_size=4))
def test_concat_joins_policy_by_policy_and_adds_the_counts_up(parts: list[list[Row]]) -> None:
    joined = MultiAgentBatch.concat([multi(part, i, len(part) + 1) for i, part in enumerate(parts)])
    assert type(joined) is MultiAgentBatch
    assert rows_by_policy(joined) == split([r for part in parts for r in part])
    assert joined.env_steps == sum(range(len(parts)))
    assert joined.agent_steps == sum(len(part) + 1 for part in parts)
    for name in POLICIES:
        if name not in joined:
            with pytest.raises(KeyError, match="has no rows in this batch"):
                joined[name]


def test_concat_says_whose_columns_differ() -> None:
    rows = [row(a, t=0, eps_id=0, unroll_id=a, env_id=0, agent_index=a) for a in range(2)]
    one = multi(rows)
    other = MultiAgentBatch({"a": one["a"], "b": one["b"].drop("infos")}, env_steps=1)
    with pytest.raises(ArgumentError, match=r"policy 'b'.*batch 1 .* columns \['infos'\] are missing"):
        MultiAgentBatch.concat([one, other])
    with pytest.raises(ArgumentError, match="at least one"):
        MultiAgentBatch.concat([])


def test_map_keeps_counts_and_drops_empty_policies() -> None:
    rows = [row(i, t=i, eps_id=0, unroll_id=0, env_id=0, agent_index=i % 2) for i in range(5)]
    batch = multi(rows, 9, 11)
    mapped = batch.map(lambda own: own.drop("infos").slice(2, 9))
    assert list(mapped) == ["a"]
    assert mapped["a"].t.tolist() == [4]
    assert "infos" not in mapped["a"]
    assert (mapped.env_steps, mapped.agent_steps) == (9, 11)
    assert len(batch["a"]) == 3
    with pytest.raises(KeyError, match="'b' has no rows"):
        mapped["b"]
    with pytest.raises(ArgumentError, match=r"got dict for policy 'a'.*items\(\)"):
        batch.map(lambda own: dict(own.items()))  # type: ignore[arg-type,return-value]  # on purpose


@pytest.mark.parametrize("wrong", [0, True, 1.5, None])
def test_timeslices_want_a_size_and_their_columns(wrong: Any) -> None:
    batch = multi([row(0, t=0, eps_id=0, unroll_id=0, env_id=0, agent_index=0)])
    with pytest.raises(ArgumentError, match="k must be a whole number of at least 1"):
        batch.timeslices(wrong)
    with pytest.raises(ArgumentError, match=r"timeslices\(\) of policy 'a' needs a column 'env_t'"):
        batch.timeslices(1, by="env_t")
    assert MultiAgentBatch({}, env_steps=0).timeslices(3) == []


@pytest.mark.checklist(113)
@pytest.mark.checklist(115)
def test_a_collectors_batch_falls_into_env_steps() -> None:
    with sync("buffer", 3, 4) as envs:
        mapping = {name: "even" if a % 2 == 0 else "odd" for a, name in enumerate(envs.agents)}
        collector = Collector(envs, {"even": EchoPolicy(), "odd": EchoPolicy()}, mapping, seed=0)
        batches = [collector.collect(env_steps=20) for _ in range(3)]
    batch = MultiAgentBatch.concat(batches)
    assert batch.env_steps == 60
    steps = batch.timeslices(1)
    assert sum(part.agent_steps for part in steps) == batch.agent_steps
    for part in steps:
        assert type(part) is MultiAgentBatch
        pairs = [pair for own in part.values() for pair in zip(own.env_id, own.agent_index, strict=True)]
        assert len(set(pairs)) == len(pairs)
        assert len({moment for own in part.values() for moment in zip(own.eps_id, own.t, strict=True)}) == 1
    again = MultiAgentBatch.concat(steps)
    for name, own in batch.items():
        order = np.lexsort((own.t, own.eps_id))
        assert isinstance(again[name], SampleBatch)
        np.testing.assert_array_equal(again[name].t, own.t[order])
        np.testing.assert_array_equal(np.sort(again[name].obs, axis=0), np.sort(own.obs, axis=0))


# --- memory of batches: whoever holds an array, or a view of it, has it for himself; what nobody holds is used again


SHAPES: list[tuple[tuple[int, ...], Any]] = [((1 << 14,), np.int64), ((1 << 15, 2), np.float32), ((3,), np.float32)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 5)), max_size=30))
def test_arrays_held_by_the_caller_are_not_reused(moves: list[tuple[int, int, int]]) -> None:
    memory, held = BatchMemory(), []
    for number, (batches, shape, drop) in enumerate(moves):
        for _ in range(batches):
            memory.begin()
        array = memory.empty(*SHAPES[shape])
        assert array.shape == SHAPES[shape][0]
        assert array.dtype == SHAPES[shape][1]
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = number
        held.append((number, array[1:] if drop % 2 else array.view()))
        del array
        for value, other in held:
            assert (other == value).all()
        if drop > 2:
            held.pop(drop % len(held))


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_loop_that_holds_one_batch_goes_round_in_two() -> None:
    memory, seen = BatchMemory(), set()
    for _ in range(9):
        memory.begin()
        batch = [memory.empty((1 << 13, k), np.float64) for k in (1, 1, 3)]
        seen |= {address(array) for array in batch}
    assert len(seen) == 6


def test_what_two_batches_did_not_need_is_let_go() -> None:
    memory = BatchMemory()
    piece = weakref.ref(memory.empty((1 << 14,), np.int64).base)
    for _ in range(2):
        gc.collect()
        assert piece() is not None
        memory.begin()
    memory.begin()
    gc.collect()
    assert piece() is None


def test_object_columns_are_not_reused() -> None:
    array = BatchMemory().empty((1 << 14,), np.object_)
    assert array.base is None
    assert array[0] is None


# --- observations and actions that are Python objects, through a whole collect()


BACKENDS = ("sync", "async")


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=12)
@pytest.mark.parametrize("name", ["sequence", "graph", "text", "custom", "inside Dict and Tuple"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_that_are_objects(backend: str, name: str) -> None:
    """The env checks each against its space, and pays a checksum of what it was handed."""
    space = OBJECTS[name]()
    rng, sampler = np.random.default_rng(0), SpaceSampler(SpaceTree(space))
    policy = FunctionPolicy(lambda rows: sampler.sample(rng, len(rows)))
    with make_envs(backend, [partial(ObjectEnv, name, name, late=True, env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, {"main": policy}, seed=1)
        for _ in range(2):
            batch = collector.collect(env_steps=12)["main"]
            for k in range(len(batch)):
                assert space.contains(at(space, batch.obs, k))
                assert space.contains(at(space, batch.next_obs, k))
                action = at(space, batch.actions_for_env, k)
                assert space.contains(action)
                if name != "inside Dict and Tuple":  # whose numbers the env is handed in other types
                    assert batch.actions[k] is batch.actions_for_env[k]
                    assert batch.rewards[k] == crc32(repr(action).encode()) % 9973


def test_texts_may_come_as_an_array_of_texts_and_nothing_else_may() -> None:
    answers: list[Any] = [
        lambda n: np.array(["a"] * n),
        lambda n: np.array(["abc"] * n),
        lambda n: np.full(n, "x", object),
    ]
    turn = iter(answers * 2)
    with make_envs("sync", [partial(ObjectEnv, "text", "text", env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, {"main": FunctionPolicy(lambda rows: next(turn)(len(rows)))}, seed=0)
        batch = collector.collect(env_steps=6)["main"]
        assert batch.actions.dtype == object
        assert set(batch.actions.tolist()) == {"a", "abc", "x"}
        for wrong in (lambda n: np.zeros(n), lambda n: np.full((n, 1), "a", object)):
            turn = iter([wrong])
            with pytest.raises(ContractError, match=r"policy 'main' gave 'actions' as .*needs object of shape \(\d,\)"):
                collector.collect(env_steps=2)


def test_connectors_let_objects_pass_or_refuse_them_by_name() -> None:
    with make_envs("sync", [partial(World, "text", "", 99, i) for i in range(2)]) as envs:
        for piece in (FlattenObs(), FrameStack(2)):
            with pytest.raises(UnsupportedSpaceError, match="leaf 'said'.* Text, which has no fixed size"):
                Collector(envs, {"main": RandomPolicy()}, agent_connectors=[piece], seed=0).collect(env_steps=2)
        collector = Collector(envs, {"main": RandomPolicy()}, agent_connectors=[NormalizeObs()], seed=0)
        batch = collector.collect(env_steps=8)["main"]
        assert batch.obs["said"].dtype == object
        assert not np.isin(batch.obs["seen"][8:], [0, 1]).all(), "which is what it was before"
        dropped = [FlattenObs(drop=["said"]), FrameStack(2)]
        batch = Collector(envs, {"main": RandomPolicy()}, agent_connectors=dropped, seed=0).collect(env_steps=8)["main"]
        assert batch.obs.shape[1:] == (6,)


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
