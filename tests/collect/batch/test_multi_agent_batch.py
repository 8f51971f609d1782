"""Batches of several policies, cut in step, joined and mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError
from tests.collect.helpers.players import EchoPolicy, sync
from tests.collect.helpers.row_dicts import Row, batch_of, row, row_lists, rows_of

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
