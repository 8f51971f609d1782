"""Fragments, their rows side by side and as sequences, and learner pipelines on batches of real envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec import connectors as c
from marlvec.connectors.agent_tables import parse_shifts
from marlvec.connectors.learner.batches import regroup
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.learner.sequences import AddLastObs
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree
from tests.connectors.samples import Critic, Fragment, batches, rows_of_fragments, same_tree, vectors
from tests.vector.support.reference import refused


@pytest.mark.slow("draws many batches")
@given(batch=batches())
def test_where_they_are(batch: list[Fragment]) -> None:
    found = Fragments(rows_of_fragments(batch))
    assert len(found) == len(batch)
    number, left, start = [], [], 0
    for f, fragment in enumerate(batch):
        assert (found.first_F[f], found.stop_F[f]) == (start, start + len(fragment))
        number += [f] * len(fragment)
        left += range(len(fragment) - 1, -1, -1)
        start += len(fragment)
    assert found.fragment_n.tolist() == number
    assert found.left_n.tolist() == left
    np.testing.assert_array_equal(found.last_F, found.stop_F - 1)


def rows(unroll_id: Any = (0, 0, 1), **columns: Any) -> Rows:
    return Rows(unroll_id=np.array(unroll_id), **{name: np.array(value) for name, value in columns.items()})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rows([0, 1, 0]), "rows of equal unroll_id must be adjacent; shuffle rows after"),
        (rows(t=[1, 0, 0]), "rows of equal unroll_id must ascend in t; shuffle rows after"),
        (rows(t=[1, 1, 0]), "must ascend in t"),
        (rows(phantom=[True, False, False]), "a phantom row must be its fragment's last"),
        (rows(phantom=[False, False, True]), "a phantom row must be its fragment's last, and not its only one"),
        (rows(phantom=[True, True, False]), "a phantom row must be its fragment's last"),
        (rows(seq_lens=[1, 1, 1]), r"got sequences \(B, T, …\): put this connector before PadSequences or"),
        (Rows(t=np.arange(3)), "expected a column 'unroll_id'; batches of a Collector have it; the columns are"),
    ],
)
def test_rows_out_of_order_are_refused(bad: Rows, message: str) -> None:
    refused(ContractError, message, Fragments, bad)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_an_episode_that_ends_in_the_middle_is_refused(name: str) -> None:
    spoilt = rows(**{name: [True, False, False]})
    with pytest.raises(ContractError, match=f"a row with {name}=True must be the last of its unroll_id.*NStep"):
        Fragments(spoilt).check_ends(spoilt)


def test_steps_may_be_left_out() -> None:
    """As FilterRows does; and an episode may end in every fragment's last row."""
    given = rows(t=[3, 9, 0], terminated=[False, True, True], phantom=[False, False, False])
    found = Fragments(given)
    found.check_ends(given)
    assert found.left_n.tolist() == [1, 0, 0]


# --- AddLastObs and AddView: what other rows of a fragment have, and the one after it


ONE = Fragment((1.0, 2.0), (10.0, 20.0), "truncated", 30.0, (0.0, 0.0), (0.0, 0.0), 5)
TWO = Fragment((3.0,), (40.0,), "terminated", 50.0, (0.0,), (0.0,))


@pytest.mark.slow("draws many batches")
@given(batch=batches())
def test_one_row_after_each_fragment(batch: list[Fragment]) -> None:
    rows = rows_of_fragments(batch)
    longer = AddLastObs()(rows)
    phantom = longer["phantom"]
    assert len(longer) == len(rows) + len(batch)
    true = longer.take(~phantom).drop("phantom", "loss_mask")
    same_tree(true, rows)
    assert (longer["loss_mask"] == ~phantom).all()

    ends = np.cumsum([len(fragment) for fragment in batch], dtype=np.int64) - 1
    np.testing.assert_array_equal(np.flatnonzero(phantom), ends + 1 + np.arange(len(batch)))
    new, last = longer.take(phantom), rows.take(ends)
    np.testing.assert_array_equal(new["obs"], last["next_obs"])
    np.testing.assert_array_equal(new["t"], last["t"] + 1)
    assert not new["rewards"].any()
    assert np.isnan(new["values"]).all()
    for name in ("terminated", "truncated", "unroll_id", "eps_id", "env_id", "agent_index", "actions", "next_obs"):
        same_tree(new[name], last[name])


def test_columns_that_have_a_next_one() -> None:
    rows = rows_of_fragments([ONE, TWO]).replace(
        obs={"a": np.arange(3)},
        next_obs={"a": np.arange(3) + 70},
        values=np.arange(3),
        next_values=np.arange(3) * 1.5,
        state=np.arange(3),
        next_state=np.arange(3) + 80,
        state_in=(np.zeros(3),),
        state_out=(np.ones(3),),
        loss_mask=np.array([False, True, True]),
        name=np.array(["x", "y", None], np.object_),
    )
    longer = AddLastObs()(rows)
    assert longer["obs"]["a"].tolist() == [0, 1, 71, 2, 72]
    assert longer["values"].tolist() == [0, 1, 1.5, 2, 3]
    assert longer["state"].tolist() == [0, 1, 81, 2, 82]
    assert longer["state_in"][0].tolist() == [0, 0, 1, 0, 1]
    assert longer["loss_mask"].tolist() == [False, True, False, True, False]
    assert longer["phantom"].tolist() == [False, False, True, False, True]
    assert longer["name"].tolist() == ["x", "y", "y", None, None]
    assert longer["terminated"].tolist() == [False, False, False, True, True]
    assert longer["truncated"].tolist() == [False, True, True, False, False]


def test_values_that_are_not_known_are_not_made_up() -> None:
    for dtype, out in ((np.float32, np.float32), (np.float64, np.float64), (np.int64, np.float64)):
        rows = rows_of_fragments([TWO])
        longer = AddLastObs()(rows.replace(values=rows["values"].astype(dtype)))
        assert longer["values"].dtype == out
        np.testing.assert_array_equal(longer["values"], [40.0, np.nan])


def test_refusals_of_last_observations() -> None:
    rows = rows_of_fragments([ONE])
    with pytest.raises(ContractError, match="expected rows without phantom rows, got some; use AddLastObs once"):
        AddLastObs()(AddLastObs()(rows))
    with pytest.raises(ContractError, match="expected a column 'next_state' beside 'state'"):
        AddLastObs()(rows.replace(state=np.zeros(2)))
    with pytest.raises(ContractError, match="expected a column 'next_obs'; batches of a Collector have it"):
        AddLastObs()(rows.drop("next_obs"))


# --- views

SHIFTS = st.one_of(
    st.integers(-10, 10),
    st.lists(st.integers(-4, 4), min_size=1, max_size=4, unique=True),
    st.sampled_from(["-3:-1", "0:2", "-4:4:2", "1:1"]),
)


@pytest.mark.slow("draws many batches")
@given(batch=batches(), shift=SHIFTS, fill=st.sampled_from([None, "repeat", 7]))
def test_what_other_rows_of_the_fragment_had(batch: list[Fragment], shift: Any, fill: Any) -> None:
    rows = rows_of_fragments(batch)
    shifts = parse_shifts(shift)
    for name in ("obs", "rewards", "terminated", "actions"):
        if name == "terminated" and fill == 7:
            continue  # no bool
        got = c.AddView("view", name, shift, fill)(rows)["view"]
        want, start = [], 0
        for fragment in batch:
            n = len(fragment)
            for t in range(n):
                row = []
                for s in shifts:
                    value = entry(rows[name], start + min(max(t + s, 0), n - 1))
                    if not 0 <= t + s < n and fill != "repeat":
                        value = map_tree(lambda leaf: np.full_like(leaf, fill or 0), value)
                    row.append(value)
                want.append(row)
            start += n
        assert_view(got, want, rows[name], single=isinstance(shift, int))


def entry(column: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i], column)


def assert_view(got: Any, want: list[list[Any]], source: Any, single: bool) -> None:
    if isinstance(source, dict):
        for key in source:
            assert_view(got[key], [[value[key] for value in row] for row in want], source[key], single)
        return
    assert got.dtype == source.dtype
    k = len(want[0]) if want else got.shape[1] if not single else 1
    expected = np.array(want, source.dtype).reshape(len(source), k, *source.shape[1:])
    np.testing.assert_array_equal(got, expected[:, 0] if single else expected)


def test_views_by_hand() -> None:
    rows = c.Rows(x=np.array([1, 2, 3, 4]), unroll_id=np.array([0, 0, 0, 1]))
    assert c.AddView("y", "x", -1)(rows)["y"].tolist() == [0, 1, 2, 0]
    assert c.AddView("y", "x", 1, fill="repeat")(rows)["y"].tolist() == [2, 3, 3, 4]
    assert c.AddView("y", "x", [1, -1], fill=9)(rows)["y"].tolist() == [[9, 2], [1, 3], [2, 9], [9, 9]]
    trees = rows.replace(x={"a": np.ones((4, 2), np.float32), "b": np.array(["p", "q", "r", "s"], np.object_)})
    view = c.AddView("y", "x", 1, fill={"a": np.array([5.0, 6.0]), "b": "none"})(trees)["y"]
    assert view["a"].dtype == np.float32
    assert view["a"].tolist() == [[1, 1], [1, 1], [5, 6], [5, 6]]
    assert view["b"].tolist() == ["q", "r", "none", "none"]
    assert c.AddView("y", "x", 1)(trees)["y"]["b"].tolist() == ["q", "r", None, None]


def test_a_phantom_row_shows_the_last_observation() -> None:
    rows = rows_of_fragments([Fragment((1.0, 2.0), (10.0, 20.0), "truncated", 30.0, (0.0, 0.0), (0.0, 0.0))])
    out = c.LearnerPipeline([c.AddLastObs(), c.AddView("after", "obs", 1, "repeat")])(rows)
    np.testing.assert_array_equal(out["after"][:2], rows["next_obs"])


def test_refusals_of_views() -> None:
    rows = c.Rows(x=np.array([1, 2]), u=np.array([1, 2], np.uint8), unroll_id=np.array([0, 0]))
    refused(ContractError, "expected a column 'z'", c.AddView("y", "z", 1), rows)
    refused(ContractError, "expected a new column name, got 'x'", c.AddView("x", "x", 1), rows)
    with pytest.raises(ArgumentError, match=r"fill for 'x': a value of shape \(2,\) does not fit shape \(\)"):
        c.AddView("y", "x", 1, np.zeros(2))(rows)
    for fill in (300, 0.5, float("nan")):
        refused(ArgumentError, "fill for 'u': .* does not fit dtype uint8", c.AddView("y", "u", 1, fill), rows)
    refused(ArgumentError, "expected an array, got a dict", c.AddView("y", "x", 1, {"a": 1}), rows)
    same_tree(c.AddView("y", "x", 1)(rows)["x"], rows["x"])


# --- Rows to sequences and back


def with_more(batch: list[Fragment], masked: bool) -> c.Rows:
    """Rows with a state, a column of objects, and perhaps a mask of their own."""
    rows = rows_of_fragments(batch)
    n = len(rows)
    rows = rows.replace(
        state_in={"h": np.arange(2.0 * n).reshape(n, 2), "c": (np.arange(n) + 500,)},
        name=np.array([f"row {i}" for i in range(n)], np.object_),
    )
    return rows.replace(loss_mask=np.arange(n) % 3 > 0) if masked else rows


def chunks(batch: list[Fragment], max_len: int) -> list[list[int]]:
    """The rows of each sequence, by hand."""
    found, at = [], 0
    for fragment in batch:
        for start in range(0, len(fragment), max_len):
            found.append(list(range(at + start, at + min(start + max_len, len(fragment)))))
        at += len(fragment)
    return found


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(103)
@given(batch=batches(), max_len=st.integers(1, 10), masked=st.booleans())
def test_sequences_and_back(batch: list[Fragment], max_len: int, masked: bool) -> None:
    """Zero-padded, with lengths, mask and the state at each sequence's start; and exactly the rows again."""
    rows = with_more(batch, masked)
    sequences = c.PadSequences(max_len)(rows)
    expected = chunks(batch, max_len)
    assert len(sequences) == len(expected)
    assert sequences["seq_lens"].tolist() == [len(chunk) for chunk in expected]
    mask = rows["loss_mask"] if masked else np.ones(len(rows), bool)
    assert sequences["loss_mask"].shape == (len(expected), max_len)
    assert sequences["loss_mask"].dtype == np.bool_
    for b, chunk in enumerate(expected):
        padding = max_len - len(chunk)
        assert sequences["loss_mask"][b].tolist() == [*mask[chunk].tolist(), *[False] * padding]
        same_tree(entry_at(sequences["state_in"], b), entry_at(rows["state_in"], chunk[0]))
        for name in ("obs", "actions", "rewards", "terminated", "unroll_id", "name"):
            own, true = entry_at(sequences[name], b), rows.take(chunk)[name]
            same_tree(entry_at(own, slice(None, len(chunk))), true)
            same_tree(entry_at(own, slice(len(chunk), None)), blank(true, padding))

    back = c.UnpadSequences()(sequences)
    assert list(back.keys()) == list(rows.keys())
    same_tree(back, rows)


def entry_at(column: Any, where: Any) -> Any:
    return map_tree(lambda leaf: leaf[where], column)


def blank(column: Any, n: int) -> Any:
    """What n rows without anything in them look like."""
    return map_tree(lambda leaf: np.full((n, *leaf.shape[1:]), None if leaf.dtype == object else 0, leaf.dtype), column)


@pytest.mark.slow("draws many batches")
@given(batch=batches(min_size=1), max_len=st.integers(1, 4))
def test_columns_added_to_sequences_come_back_as_rows(batch: list[Fragment], max_len: int) -> None:
    """As where values are computed by a network that remembers; phantom rows are rows like any other here."""
    rows = c.AddLastObs()(with_more(batch, False))
    sequences = c.PadSequences(max_len)(rows)
    back = c.UnpadSequences()(sequences.replace(doubled=sequences["obs"] * 2))
    np.testing.assert_array_equal(back["doubled"], rows["obs"] * 2)
    same_tree(back.drop("doubled"), rows)
    np.testing.assert_array_equal(sequences["loss_mask"].sum(), (~rows["phantom"]).sum())


def test_by_hand() -> None:
    rows = c.Rows(x=np.arange(1, 6), unroll_id=np.array([3, 3, 3, 4, 4]), memory=np.arange(5) * 10)
    sequences = c.PadSequences(2, "memory")(rows)
    assert sequences["x"].tolist() == [[1, 2], [3, 0], [4, 5]]
    assert sequences["seq_lens"].tolist() == [2, 1, 2]
    assert sequences["memory"].tolist() == [0, 20, 30]
    assert sequences["loss_mask"].tolist() == [[True, True], [True, False], [True, True]]
    same_tree(c.UnpadSequences("memory")(sequences), rows)
    sequences = c.PadSequences(4, None)(rows)
    assert sequences["memory"].tolist() == [[0, 10, 20, 0], [30, 40, 0, 0]]
    same_tree(c.UnpadSequences(None)(sequences), rows)


def test_sequences_refuse() -> None:
    rows = c.Rows(x=np.arange(5), unroll_id=np.array([3, 3, 3, 4, 4]), loss_mask=np.ones(5, bool))
    refused(ContractError, r"got sequences \(B, T, …\)", c.PadSequences(2), c.PadSequences(2)(rows))
    with pytest.raises(ContractError, match=r"columns \['loss_mask_rows'\] have names that PadSequences needs"):
        c.PadSequences(2)(rows.replace(loss_mask_rows=np.zeros(5)))
    with pytest.raises(ContractError, match="expected the columns 'seq_lens' and 'loss_mask' that PadSequences adds"):
        c.UnpadSequences()(rows)
    sequences = c.PadSequences(2)(rows)
    with pytest.raises(ContractError, match=r"column 'loss' must begin with the axes \(B, T\) = \(3, 2\), got \(3,\)"):
        c.UnpadSequences()(sequences.replace(loss=np.zeros(3)))


TABLES = st.dictionaries(
    st.tuples(st.sampled_from(["p", "q", "r"]), st.integers(0, 3)), st.sampled_from(["a", "b", "c"])
)
BATCHES = st.dictionaries(st.sampled_from(["p", "q", "r"]), st.lists(st.integers(0, 3), max_size=8))


@given(agents=BATCHES, table=TABLES)
def test_every_row_goes_where_the_mapping_says(agents: dict[str, list[int]], table: dict[tuple[str, int], str]) -> None:
    asked = []

    def mapping(policy_id: str, agent_index: int) -> str:
        asked.append((policy_id, agent_index))
        return table.get((policy_id, agent_index), "rest")

    batch, want, number = {}, {}, 0
    for policy_id, of in agents.items():
        batch[policy_id] = Rows(agent_index=np.array(of, np.int64), number=number + np.arange(len(of)))
        for agent in of:
            want.setdefault(table.get((policy_id, agent), "rest"), []).append((agent, number))
            number += 1
    got = regroup(batch, mapping)
    assert list(got) == list(want)
    for module_id, rows in got.items():
        assert list(zip(rows["agent_index"].tolist(), rows["number"].tolist(), strict=True)) == want[module_id]
    assert sorted(asked) == sorted({(policy_id, agent) for policy_id, of in agents.items() for agent in of})


def test_by_policy() -> None:
    batch = {"p": Rows(x=np.arange(2)), "q": Rows(x=np.arange(3)), "empty": Rows(x=np.arange(0))}
    got = regroup(batch, {"p": "shared", "q": "shared"})
    assert {name: rows["x"].tolist() for name, rows in got.items()} == {"shared": [0, 1, 0, 1, 2]}
    assert regroup(batch, {"p": "p", "q": "q"})["p"] is batch["p"]


def test_regroup_refuses() -> None:
    batch = {"p": Rows(x=np.zeros((2, 3))), "q": Rows(x=np.zeros((2, 4)))}
    refused(KeyError, r"no module for policy 'q'; the mapping has \['p'\]", regroup, batch, {"p": "m"})
    caught = refused(ArgumentError, "column 'x' cannot be concatenated", regroup, batch, {"p": "m", "q": "m"})
    assert caught.__notes__ == ["module 'm' gets rows of the policies ['p', 'q']"]
    refused(ContractError, "expected a column 'agent_index'", regroup, batch, lambda policy_id, agent_index: "m")


BATCH = [
    Fragment((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), end, 7.0, (-1.0, -2.0, -3.0), (-1.5, -1.5, -1.5))
    for end in ("truncated", "cut", "terminated")
]


class CountRows(c.LearnerConnector):
    """Adds how many rows all policies have together."""

    def __init__(self) -> None:
        self.total = 0

    def see_batch(self, batch: Mapping[str, c.Rows]) -> None:
        self.total = sum(map(len, batch.values()))

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(total=np.full(len(rows), self.total))


class Fails(c.LearnerConnector):
    def see_batch(self, batch: Mapping[str, c.Rows]) -> None:
        raise ValueError("no such policy")

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows


def whole_chain() -> c.LearnerPipeline:
    """Every piece there is, in an order that makes sense."""
    return c.LearnerPipeline(
        [
            c.AddView("before", "obs", "-2:-1"),
            c.VTrace(value_function=Critic()),
            c.GeneralAdvantageEstimation(value_function=Critic()),
            c.ReturnsToGo(),
            c.NStep(2),
            c.AddLastObs(),
            c.LearnerPipeline([c.Standardize(), c.Standardize("vs")]),
            c.PadSequences(2),
            c.UnpadSequences(),
        ]
    )


def test_it_runs_without_a_space() -> None:
    rows = rows_of_fragments(BATCH)
    assert c.LearnerPipeline.default()(rows) is rows
    pipeline = whole_chain()
    assert not pipeline.bound
    out = pipeline(rows)
    assert len(out) == len(rows) + len(BATCH)
    assert {"before", "vs", "advantages", "returns_to_go", "discounts", "phantom"} <= out.keys()
    np.testing.assert_allclose(out["advantages"][out["loss_mask"]].mean(), 0, atol=1e-6)
    assert pipeline.timings["PadSequences"].calls == 1


def test_a_space_does_no_harm() -> None:
    pipeline = whole_chain()
    pipeline.bind(vectors(2), ["a", "b"])
    same_tree(pipeline(rows_of_fragments(BATCH)), whole_chain()(rows_of_fragments(BATCH)))
    assert pipeline["AddView"].agents == ("a", "b")


def test_all_pieces_see_the_batch() -> None:
    count = CountRows()
    pipeline = c.LearnerPipeline([c.ReturnsToGo(), c.LearnerPipeline([count])])
    rows = rows_of_fragments(BATCH)
    pipeline.see_batch({"p": rows, "q": rows})
    assert pipeline(rows)["total"].tolist() == [18] * 9
    caught = refused(ValueError, "no such policy", c.LearnerPipeline([Fails()]).see_batch, {"p": rows})
    assert caught.__notes__ == ["in connector 'Fails' of LearnerPipeline"]


# --- Learner connectors on what a collector gathers from real envs


GAMMA, LAMBDA = 0.97, 0.9
ENVS = {"CartPole-v1": 15, "simple_spread": 10}
"""An env that ends by itself or by its time limit, and three agents that only ever run out of time."""


class Linear(marlvec.Policy):
    """Random actions; the value of an observation is a weighted sum of it."""

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def values(self, rows: c.Rows) -> Any:
        """(n,) values of rows; also the value function of the learner side."""
        obs = rows["obs"].astype(np.float64)
        return obs @ np.linspace(1.0, 2.0, obs.shape[1])

    def act(self, rows: c.Rows, *, explore: bool = True) -> Any:
        assert self.action_space is not None
        actions = self.rng.integers(0, self.action_space.n, len(rows))  # type: ignore[attr-defined]  # a Discrete
        return actions, {"values": self.values(rows)}


def gather(env_id: str, num_envs: int = 3, calls: int = 3) -> tuple[Linear, list[c.Rows]]:
    """Rows of some batches, cut wherever the steps ran out."""
    policy = Linear()
    with marlvec.make(env_id, num_envs=num_envs, backend="sync", max_episode_steps=ENVS[env_id]) as envs:
        collector = marlvec.Collector(envs, {"main": policy}, "main", seed=3)
        batches = [collector.collect(env_steps=23 * num_envs)["main"] for _ in range(calls)]
    return policy, [c.Rows(batch) for batch in batches]


def v(obs: Any) -> float:
    """The same value, of one observation."""
    return float(np.dot(obs.astype(np.float64), np.linspace(1.0, 2.0, len(obs))))


def reference(rows: c.Rows) -> list[float]:
    """Advantages row by row, from the end of the batch; whether a row is its fragment's last is read off its ids."""
    advantages = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        last = i + 1 == len(rows) or any(rows[name][i + 1] != rows[name][i] for name in ("eps_id", "agent_index"))
        after = 0.0 if rows["terminated"][i] else v(rows["next_obs"][i])
        advantages[i] = float(rows["rewards"][i]) + GAMMA * after - v(rows["obs"][i])
        if not last:
            advantages[i] += GAMMA * LAMBDA * advantages[i + 1]
    return advantages


@pytest.mark.checklist(100)
@pytest.mark.parametrize("env_id", ENVS)
def test_the_final_observation_is_what_a_truncated_row_bootstraps_from(env_id: str) -> None:
    """Never the observation of the reset that follows; of a cut fragment, the one the next batch goes on from."""
    policy, batches = gather(env_id)
    kinds = set()
    for rows, following in zip(batches, [*batches[1:], None], strict=True):
        out = c.LearnerPipeline([c.GeneralAdvantageEstimation(GAMMA, LAMBDA, policy.values)])(rows)
        np.testing.assert_allclose(out["advantages"], reference(rows), rtol=1e-6, atol=1e-6)

        ends = np.flatnonzero(np.append(rows["unroll_id"][1:] != rows["unroll_id"][:-1], True))
        for i in ends:
            obs, next_obs, got = rows["obs"][i], rows["next_obs"][i], float(out["advantages"][i])
            lane = (rows["env_id"] == rows["env_id"][i]) & (rows["agent_index"] == rows["agent_index"][i])
            paid = float(rows["rewards"][i]) - v(obs)
            if rows["terminated"][i]:
                kinds.add("terminated")
                assert got == pytest.approx(paid, rel=1e-6)
                continue
            assert got == pytest.approx(paid + GAMMA * v(next_obs), rel=1e-6, abs=1e-6)
            if rows["truncated"][i]:
                kinds.add("truncated")
                assert rows["t"][i] == ENVS[env_id] - 1
                for reset_obs in rows["obs"][lane & (rows["t"] == 0)]:
                    assert got != pytest.approx(paid + GAMMA * v(reset_obs), rel=1e-3)
            elif following is not None:
                kinds.add("cut")
                again = (following["eps_id"] == rows["eps_id"][i]) & (following["t"] == rows["t"][i] + 1)
                again &= following["agent_index"] == rows["agent_index"][i]
                np.testing.assert_array_equal(following["obs"][again], next_obs[None])
    assert kinds == {"truncated", "cut"} | ({"terminated"} if env_id == "CartPole-v1" else set())


@pytest.mark.parametrize("env_id", ENVS)
def test_where_a_batch_is_cut_changes_no_return(env_id: str) -> None:
    """With a perfect critic; here, with rewards that make any critic perfect: V(obs) - gamma * V(next_obs)."""
    policy, batches = gather(env_id)
    for rows in batches:
        true = policy.values(rows)
        after = policy.values(rows.replace(obs=rows["next_obs"])) * ~rows["terminated"]
        paid = rows.replace(rewards=true - GAMMA * after)
        out = c.ReturnsToGo(GAMMA, policy.values)(paid)
        np.testing.assert_allclose(out["returns_to_go"], true, rtol=1e-5, atol=1e-5)
        steps = c.NStep(4, GAMMA)(paid)
        targets = steps["rewards"] + steps["discounts"] * policy.values(steps.replace(obs=steps["next_obs"]))
        np.testing.assert_allclose(targets, true, rtol=1e-5, atol=1e-5)


@pytest.mark.mostly_slow("draws many batches", quick=3)
@pytest.mark.parametrize("env_id", ENVS)
def test_one_pass_over_all_sequences_values_everything(env_id: str) -> None:
    """The chain of a policy that remembers: values of all rows at once, phantom ones included, in sequences."""
    policy, batches = gather(env_id)
    rows = batches[0]
    sequences = c.LearnerPipeline([c.AddLastObs(), c.PadSequences(8)])(rows.drop("values"))
    b, t = sequences["loss_mask"].shape
    flat = policy.values(c.Rows(obs=sequences["obs"].reshape(b * t, -1)))
    learner = c.LearnerPipeline([c.UnpadSequences(), c.GeneralAdvantageEstimation(GAMMA, LAMBDA)])
    out = learner(sequences.replace(values=flat.reshape(b, t)))
    want = c.GeneralAdvantageEstimation(GAMMA, LAMBDA, policy.values)(rows)
    true = out.take(~out["phantom"]).drop("phantom", "loss_mask")
    np.testing.assert_allclose(true["advantages"], want["advantages"], rtol=1e-6, atol=1e-6)
    same_tree({name: true[name] for name in ("obs", "actions", "t")}, {n: rows[n] for n in ("obs", "actions", "t")})
    standard = c.Standardize()(out)
    assert standard["advantages"][~out["phantom"]].std() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_all_columns_of_the_successor_are_of_one_moment_after_n_steps(n: int) -> None:
    """The truth is read off the rows before NStep, by episode, agent and decision."""

    def act(rows: c.Rows) -> Any:
        after = {"sum": rows["state_in"]["sum"] + rows["obs"][:, :2], "turns": rows["state_in"]["turns"] + 1}
        return np.zeros(len(rows), np.int64), {"state_out": after, "h_out": rows["h_in"] - 1}

    chain = [
        c.RnnState({"sum": np.zeros(2, np.float32), "turns": np.zeros((), np.int64)}),
        c.RnnState(np.zeros(1), "h_in", "h_out"),
    ]
    cut = False
    with marlvec.make("simple_spread", num_envs=2, backend="sync", max_episode_steps=7, state=True) as envs:
        collector = marlvec.Collector(envs, marlvec.FunctionPolicy(act), agent_connectors=chain, seed=1)
        for _ in range(4):
            rows = c.Rows(collector.collect(env_steps=2 * 11)["main"])
            out = c.NStep(n, GAMMA)(rows)
            moved = {"next_obs", "next_state", "next_env_t", "next_obs_missing", "state_out", "h_out"}
            moved |= {"terminated", "truncated"}
            for name in rows.keys() - {*moved, "rewards"}:
                same_tree(out[name], rows[name])
            for i in range(len(rows)):
                unroll = rows["unroll_id"][i]
                last = max(j for j in range(len(rows)) if rows["unroll_id"][j] == unroll and j < i + n)
                cut |= not rows["truncated"][last]
                for name in moved:
                    same_tree(out.take([i])[name], rows.take([last])[name])
                # The state that goes with next_obs has seen all observations before it, and not that one.
                assert out["state_out"]["turns"][i] == out["next_env_t"][i] == -out["h_out"][i, 0]
    assert cut
