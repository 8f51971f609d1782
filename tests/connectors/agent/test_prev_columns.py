"""Previous actions and rewards, against a list per agent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec import connectors as c
from marlvec.errors import ContractError, StateError, UnsupportedSpaceError
from tests.connectors.helpers.samples import Space, pairs_of, rows_of, same_tree, vectors

VECTOR = vectors(2)
WORDS = spaces.Dict({"say": spaces.Text(3), "walk": spaces.Sequence(spaces.Discrete(3)), "go": spaces.Discrete(2)})


def bound(piece: Any, actions: Space | None = None, space: Space = VECTOR) -> Any:
    pipeline = c.AgentPipeline([piece])
    pipeline.bind(space, ("a", "b"), actions)
    return piece


@pytest.mark.checklist(88)
def test_actions_without_a_fixed_size_are_remembered_as_they_are() -> None:
    piece = bound(c.PrevActions(2), WORDS)
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
        bound(c.PrevActions(into_obs=True), WORDS)


class Odd(spaces.Discrete):
    """A user's own space, which its start is not in."""

    def contains(self, x: Any) -> bool:
        return super().contains(x) and int(x) % 2 == 1

    def sample(self, mask: Any = None, probability: Any = None) -> np.int64:
        return np.int64(1 + 2 * self.np_random.integers(self.n // 2))


def test_a_space_of_the_users_own_gives_a_member() -> None:
    shown = bound(c.PrevActions(3), Odd(8))(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"]
    assert (shown % 2 == 1).all()
    same_tree(bound(c.PrevActions(3), Odd(8))(rows_of([(0, 0)], np.zeros((1, 2))))["prev_actions"], shown)


def test_the_bounds_behind_the_observation() -> None:
    actions = spaces.Tuple([spaces.Discrete(2), spaces.Box(-3, 4, (1,), np.float64)])
    low, high = np.array([0, 0, -3, 0, 0, -3], float), np.array([9, 1, 1, 4, 1, 1, 4], float)
    declared = c.PrevActions(2, into_obs=True)
    bound(declared, actions, spaces.Box(0, 9, (1,), np.uint8))
    assert declared.output_space(spaces.Box(0, 9, (1,), np.uint8)) == spaces.Box(
        np.append(0, low), high, dtype=np.float64
    )
    pay = c.PrevRewards(2, into_obs=True).output_space(spaces.Box(0, 1, (1,), np.uint8))
    assert (pay.dtype, pay.shape) == (np.float32, (3,))
    assert np.isinf(pay.low[1:]).all()
    huge = bound(c.PrevRewards(into_obs=True))
    out = huge(rows_of([(0, 0)], np.zeros((1, 2), np.float32), rewards=np.array([1e300]))).obs
    assert out.tolist() == [[0, 0, np.inf]]


def test_an_equal_space_keeps_the_history_and_another_begins_anew() -> None:
    """An action of another space need not be in this one, even where it has the same form."""
    pipeline = c.AgentPipeline([c.PrevActions()])
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
    rows = rows_of([(0, 0)], np.zeros((1, 2)), rewards=np.zeros(1))
    with pytest.raises(StateError, match="does not know its space"):
        c.PrevActions().on_policy_output(rows)
    piece = bound(c.PrevActions(), spaces.Discrete(3))
    with pytest.raises(ContractError, match="needs the column 'actions' of the policy's output"):
        piece.on_policy_output(rows)
    state = piece.state_dict()
    for wrong in (np.zeros((1, 1), int), np.array([0.5])):
        with pytest.raises(ContractError, match=r"expected actions as int64 of shape \(1,\), got"):
            piece.on_policy_output(rows.replace(actions=wrong))
    same_tree(piece.state_dict(), state)
    for adder, name in ((piece, "prev_actions"), (c.PrevRewards(), "prev_rewards")):
        with pytest.raises(ContractError, match=f"adds column '{name}', but the rows have one"):
            adder(rows.replace(**{name: np.zeros(1)}))
