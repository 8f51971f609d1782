"""SampleBatch and MultiAgentBatch."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError
from tests.collect.helpers.players import EchoPolicy, sync


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
