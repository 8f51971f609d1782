"""Previous actions and rewards, against a list per agent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, FlattenObs, Rows
from marlvec.connectors.agent.memory.prev_actions import PrevActions
from marlvec.connectors.agent.memory.prev_rewards import PrevRewards
from marlvec.connectors.connector import AgentConnector
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.trees import map_tree, zip_trees
from tests.connectors.helpers.episodes import Episodes, Tick, play, ticks
from tests.connectors.helpers.samples import (
    Space,
    all_inside,
    any_spaces,
    pairs_of,
    plain,
    rows_of,
    same_tree,
    unbatch,
    vectors,
)

VECTOR = vectors(2)
WORDS = spaces.Dict({"say": spaces.Text(3), "walk": spaces.Sequence(spaces.Discrete(3)), "go": spaces.Discrete(2)})


def bound(piece: Any, actions: Space | None = None, space: Space = VECTOR) -> Any:
    pipeline = AgentPipeline([piece])
    pipeline.bind(space, ("a", "b"), actions)
    return piece


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(88)
@given(actions=any_spaces(), n=st.integers(1, 3), game=ticks())
def test_previous_actions_and_rewards_of_any_action_space(actions: Space, n: int, game: list[Tick]) -> None:
    """Each agent's own last n, oldest first; valid actions and rewards of 0 before an episode's first ones.

    As columns, and behind the observation: as FlattenObs writes them, inside the declared space.
    """
    column, inside = bound(PrevActions(n), actions), bound(PrevActions(n, into_obs=True), actions)
    rewards, both = bound(PrevRewards(n)), bound(PrevRewards(n, into_obs=True))
    done, paid = Episodes(), Episodes()
    flat = FlattenObs()
    AgentPipeline([flat]).bind(actions)
    games = [play(piece, game, VECTOR, actions) for piece in (column, inside, rewards, both)]
    for (tick, rows, out, answer), (_, _, out_obs, _), (_, _, with_pay, _), (_, _, pay_obs, _) in zip(
        *games, strict=True
    ):
        count = len(tick.pairs)
        shown = out["prev_actions"]
        each = [shown] if n == 1 else [map_tree(lambda leaf, j=j: leaf[:, j], shown) for j in range(n)]
        for part in each:
            assert all_inside(actions, part, count)
        behind = [flat(Rows(obs=part)).obs for part in each] if count else []
        if count:
            np.testing.assert_array_equal(out_obs.obs, np.concatenate([rows.obs, *behind], axis=1))
        for piece, result in ((inside, out_obs), (both, pay_obs)):
            declared = piece.output_space(VECTOR)
            assert result.obs.dtype == declared.dtype
            assert all_inside(declared, result.obs, count)
        assert with_pay["prev_rewards"].dtype == np.float64
        np.testing.assert_array_equal(pay_obs.obs[:, 2:], with_pay["prev_rewards"].reshape(count, n).astype(np.float32))
        for i, pair in enumerate(tick.pairs):
            before = done.begin(pair, first=tick.first[i])[-n:]
            for j, wanted in enumerate(before, n - len(before)):
                same_tree(unbatch(actions, each[j], i), wanted)
            was_paid = paid.begin(pair, first=tick.first[i])
            was_paid.append(0.0 if tick.first[i] else float(rows.rewards[i]))
            wanted_pay = ([0.0] * n + was_paid)[-n:]
            assert with_pay["prev_rewards"][i].tolist() == (wanted_pay if n > 1 else wanted_pay[0])
        if answer is not None:
            for i, pair in enumerate(zip(answer.env_id.tolist(), answer.agent_index.tolist(), strict=True)):
                done.values[pair].append(unbatch(actions, answer["actions"], i))
        for seen in (done, paid):
            seen.reset(tick.resets)


@pytest.mark.checklist(88)
def test_actions_without_a_fixed_size_are_remembered_as_they_are() -> None:
    piece = bound(PrevActions(2), WORDS)
    rows = rows_of(pairs_of(2, 1), np.zeros((2, 2)))
    start = piece(rows)["prev_actions"]
    for i in range(2):
        assert WORDS.contains({key: column[i, 1] for key, column in start.items()} | {"go": start["go"][i, 1]})
    walk = np.empty(2, object)
    walk[:] = [(1, 2), ()]
    piece.on_policy_output(rows.replace(actions={"say": ["ab", "c"], "walk": walk, "go": np.array([1, 0])}))
    shown = piece(rows)["prev_actions"]
    assert (shown["say"][:, 1].tolist(), shown["walk"][:, 1].tolist(), shown["go"][:, 1].tolist()) == (
        ["ab", "c"],
        [(1, 2), ()],
        [1, 0],
    )
    with pytest.raises(UnsupportedSpaceError, match="has no fixed size"):
        bound(PrevActions(into_obs=True), WORDS)


@pytest.mark.parametrize(
    ("space", "start"),
    [
        (spaces.Discrete(3, start=2), 2),
        (spaces.MultiDiscrete([2, 3], start=[1, -4]), [1, -4]),
        (spaces.MultiBinary(2), [0, 0]),
        (spaces.Box(1.5, 2.0, (1,)), [1.5]),
        (spaces.Box(-3, -1, (2,), np.int32), [-1, -1]),
        (spaces.Box(-np.inf, np.inf, (2,)), [0, 0]),
    ],
)
def test_what_stands_for_no_action(space: Space, start: Any) -> None:
    piece = bound(PrevActions(), space)
    shown = piece(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"]
    assert shown[0].tolist() == start
    assert shown.dtype == space.dtype


class Odd(spaces.Discrete):
    """A user's own space, which its start is not in."""

    def contains(self, x: Any) -> bool:
        return super().contains(x) and int(x) % 2 == 1

    def sample(self, mask: Any = None, probability: Any = None) -> np.int64:
        return np.int64(1 + 2 * self.np_random.integers(self.n // 2))


def test_a_space_of_the_users_own_gives_a_member() -> None:
    shown = bound(PrevActions(3), Odd(8))(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"]
    assert (shown % 2 == 1).all()
    same_tree(bound(PrevActions(3), Odd(8))(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"], shown)


def test_the_bounds_behind_the_observation() -> None:
    actions = spaces.Tuple([spaces.Discrete(2), spaces.Box(-3, 4, (1,), np.float64)])
    low, high = np.array([0, 0, -3, 0, 0, -3], float), np.array([9, 1, 1, 4, 1, 1, 4], float)
    declared = PrevActions(2, into_obs=True)
    bound(declared, actions, spaces.Box(0, 9, (1,), np.uint8))
    assert declared.output_space(spaces.Box(0, 9, (1,), np.uint8)) == spaces.Box(
        np.append(0, low), high, dtype=np.float64
    )
    pay = PrevRewards(2, into_obs=True).output_space(spaces.Box(0, 1, (1,), np.uint8))
    assert (pay.dtype, pay.shape) == (np.float32, (3,))
    assert np.isinf(pay.low[1:]).all()
    huge = bound(PrevRewards(into_obs=True))
    out = huge(rows_of([(0, 0)], np.zeros((1, 2), np.float32), rewards=np.array([1e300]))).obs
    assert out.tolist() == [[0, 0, np.inf]]


@pytest.mark.parametrize(
    "make", [lambda: PrevActions(2), lambda: PrevRewards(3), lambda: PrevRewards(2, into_obs=True)]
)
def test_a_state_is_exact(make: Any) -> None:
    actions = spaces.Dict({"a": spaces.Discrete(4), "b": spaces.Box(-1, 1, (2,))})
    one, two = bound(make(), actions), bound(make(), actions)
    rng = np.random.default_rng(0)

    def step(piece: AgentConnector, k: int) -> Any:
        rows = rows_of(
            pairs_of(3, 2)[k % 3 :], np.zeros((6 - k % 3, 2), np.float32), rewards=np.arange(6.0)[k % 3 :] + k
        )
        out = piece(rows)
        chosen = zip_trees(np.stack, [plain(actions.sample()) for _ in range(len(rows))])
        piece.on_policy_output(out.replace(actions=chosen))
        return dict(out)

    actions.seed(int(rng.integers(9)))
    for k in range(5):
        step(one, k)
    one.reset([1])
    two.load_state_dict(one.state_dict())
    for k in range(5):
        actions.seed(k)
        left = step(one, k)
        actions.seed(k)
        same_tree(left, step(two, k))
        same_tree(one.state_dict(), two.state_dict())


def test_an_equal_space_keeps_the_history_and_another_begins_anew() -> None:
    """An action of another space need not be in this one, even where it has the same form."""
    pipeline = AgentPipeline([PrevActions()])
    rows = rows_of([(0, 0)], np.zeros((1, 2)))
    pipeline.bind(VECTOR, (), spaces.Discrete(5))
    pipeline.on_policy_output(rows.replace(actions=np.array([3])))
    pipeline.bind(VECTOR, (), spaces.Discrete(5))
    assert pipeline(rows)["prev_actions"].tolist() == [3]
    pipeline.bind(VECTOR, (), spaces.Discrete(3, start=1))
    assert pipeline(rows)["prev_actions"].tolist() == [1]
    pipeline.bind(VECTOR, (), spaces.MultiDiscrete([5, 5]))
    assert pipeline(rows)["prev_actions"].tolist() == [[0, 0]]


def test_refusals() -> None:
    for make in (PrevActions, PrevRewards):
        with pytest.raises(ArgumentError, match="n must be at least 1, got 0"):
            make(0)
        with pytest.raises(UnsupportedSpaceError, match="put FlattenObs before it"):
            bound(make(into_obs=True), spaces.Discrete(2), spaces.Discrete(3))
    with pytest.raises(ArgumentError, match=r"does not know the action space: .*bind\(space, agents, action_space\)"):
        bound(PrevActions())
    rows = rows_of([(0, 0)], np.zeros((1, 2)), rewards=np.zeros(1))
    for use in (
        lambda: PrevActions()(rows),
        lambda: PrevActions().on_policy_output(rows),
        lambda: PrevActions().load_state_dict({}),
        lambda: PrevRewards(into_obs=True)(rows),
    ):
        with pytest.raises(StateError, match="does not know its space"):
            use()
    assert PrevActions().state_dict() == {}
    piece = bound(PrevActions(), spaces.Discrete(3))
    with pytest.raises(ContractError, match="needs the column 'actions' of the policy's output"):
        piece.on_policy_output(rows)
    state = piece.state_dict()
    for wrong in (np.zeros((1, 1), int), np.array([0.5])):
        with pytest.raises(ContractError, match=r"expected actions as int64 of shape \(1,\), got"):
            piece.on_policy_output(rows.replace(actions=wrong))
    same_tree(piece.state_dict(), state)
    for adder, name in ((piece, "prev_actions"), (PrevRewards(), "prev_rewards")):
        with pytest.raises(ContractError, match=f"adds column '{name}', but the rows have one"):
            adder(rows.replace(**{name: np.zeros(1)}))
    with pytest.raises(ArgumentError, match=r"missing \['count', 'rings'\], unknown \['x'\]"):
        piece.load_state_dict({"x": 1})
    with pytest.raises(ArgumentError, match="history: rings: values: expected"):
        piece.load_state_dict(bound(PrevActions(), spaces.MultiBinary(2)).state_dict())
