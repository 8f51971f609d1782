"""Self-play goes on where its collector was saved: who plays whom, opponents in mid-episode, ratings, and the pool."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import Collector
from marlvec.connectors import NormalizeObs
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import PolicyMap, RandomPolicy
from marlvec.selfplay import (
    Elo,
    Every,
    Latest,
    Mirror,
    Mixture,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
)
from tests.checkpoints.learner import Linear, Momentum
from tests.collect.saved import columns_of, counted, without_clock
from tests.vector.api.test_saved_states import same


class League:
    """Connect four by self-play: a pool of at most two snapshots, ratings, and a mapping that draws per episode.

    Args:
        folder: Of the pool; None: a temporary one.
        bound: How many opponents are in memory; None: all.
        options: To the collector.
    """

    def __init__(self, folder: Path | None = None, bound: int | None = None, **options: Any) -> None:
        self.envs = marlvec.make("connect_four", 5, backend="native")
        self.policy = Linear()
        self.momentum = Momentum(self.policy)
        self.board = RatingTracker(self.envs.agents, ratings=Elo(), keep=20)
        self.pool = OpponentPool(Linear, folder=folder, capacity=2, when=[Every(120)], board=self.board)
        self.pool.add("random", RandomPolicy(seed=5), anchor=True)
        makers = (1.0, Mirror()), (2.0, Latest(2)), (2.0, Prioritised(self.board.table))
        self.mapping = SelfPlayMapping(self.pool, self.envs.agents, {"main": Mixture(*makers)})
        policies: Any = {"main": self.policy}
        self.collector = Collector(
            self.envs,
            policies if bound is None else PolicyMap(policies, capacity=bound),
            self.mapping,
            agent_connectors={"main": [NormalizeObs()]},
            callbacks=[self.board],
            seed=11,
            **options,
        )

    def __enter__(self) -> League:
        return self

    def __exit__(self, *_: object) -> None:
        self.envs.close()

    def train(self, rounds: range) -> list[Any]:
        """Collect, learn, and take snapshots; returns all that came of it."""
        found: list[Any] = []
        for k in rounds:
            if k == 0:
                self.mapping.update(self.collector)
            batch = self.collector.collect(env_steps=47)
            found.append(columns_of(batch))
            self.momentum.learn(batch["main"])
            if self.pool.offer(self.collector, "main"):
                self.mapping.update(self.collector)
            found += [list(self.collector.policies), [(one.opponent_id, one.digest) for one in self.pool.values()]]
        return [*found, counted(self.collector), self.board.state_dict()]

    def plays(self, name: str) -> bool:
        """Whether an opponent is in the middle of an episode."""
        number = self.collector._policy_set.numbers[name]
        return bool(len(self.collector._episodes.running_of(number, self.collector._loop.living)))

    def get_state(self) -> Any:
        """That of the collector, and what learns."""
        return self.collector.get_state(), self.momentum.state_dict()

    def set_state(self, state: Any) -> None:
        self.collector.set_state(state[0])
        self.momentum.load_state_dict(state[1])


SAVED, END = 16, 24


@pytest.mark.mostly_slow("plays and rates many matches", quick=2)
@pytest.mark.parametrize(("batch_mode", "bound"), [("truncate", None), ("complete", 2)])
def test_a_league_goes_on_in_a_new_collector(batch_mode: Any, bound: int | None, tmp_path: Path) -> None:
    """Which has no opponents yet; and in the one that had gone on, whose newest opponents the state does not know."""
    options: Any = {"batch_mode": batch_mode, "bound": bound}
    with League(**options) as whole:
        whole.train(range(SAVED))
        want = whole.train(range(SAVED, END))
        last = without_clock(whole.collector.get_state())
    with League(tmp_path / "pool", **options) as first:
        first.train(range(SAVED))
        first.collector.save(tmp_path / "one.npz")
        saved, learned = first.get_state()
        assert len(first.mapping._entered) > len(first.pool), "one that has left the pool plays to its end"
        assert sum(first.plays(name) for name in first.mapping._entered) > 1
        same(first.train(range(SAVED, END)), want)
        first.set_state((saved, learned))
        same(first.train(range(SAVED, END)), want)
        same(without_clock(first.collector.get_state()), last)
    with League(tmp_path / "new", **options) as second:
        second.collector.load(tmp_path / "one.npz")
        second.momentum.load_state_dict(learned)
        same(without_clock(second.collector.get_state()), without_clock(saved))
        same(second.train(range(SAVED, END)), want)
        same(without_clock(second.collector.get_state()), last)
        gc.collect()
        held = {file for one in second.mapping._entered.values() for file in one.files if file is not None}
        there = {path for path in (tmp_path / "new").iterdir() if path.name != "pool.npz"}
        assert held <= there
        assert there == held or bound is not None, "files of opponents that are nowhere any more are gone"


@pytest.mark.slow("plays and rates many matches")
def test_a_league_goes_on_with_the_pool_that_the_other_left_behind(tmp_path: Path) -> None:
    """Which had gone on after its state was saved: the folder follows the state."""
    with League(tmp_path / "pool") as first:
        first.train(range(SAVED))
        state = first.get_state()
        want = first.train(range(SAVED, END))
    with League() as second:
        second.pool = OpponentPool.load(tmp_path / "pool", Linear, capacity=2, when=[Every(120)], board=second.board)
        second.mapping._pool = second.pool
        second.mapping.update(second.collector)
        second.set_state(state)
        same(second.train(range(SAVED, END)), want)


def test_a_state_that_is_refused_leaves_the_opponents_alone() -> None:
    with League() as first, League() as second, League() as third:
        first.train(range(SAVED))
        state = first.collector.get_state()
        for league in (second, third):
            league.train(range(4))
        before = without_clock(second.collector.get_state())
        names = list(second.collector.policies)
        for part in ("rollout", "episodes", "policies", "metrics", "running"):
            with pytest.raises(ArgumentError, match=r"expected other fields; missing"):
                second.collector.set_state({**state, part: {"odd": 1}})
            assert list(second.collector.policies) == names
        mapping, board = state["others"]
        for others, text in (
            ([[mapping[0], {"odd": 1}], board], "expected the state of a SelfPlayMapping"),
            ([mapping], "callbacks with a state: expected"),
            ([board], "policies: .*differ|policies: the state is of"),
        ):
            with pytest.raises(ArgumentError, match=text):
                second.collector.set_state({**state, "others": others})
            assert list(second.collector.policies) == names
        second.collector.check_state(state)
        assert list(second.collector.policies) == names
        same(without_clock(second.collector.get_state()), before)
        same(second.train(range(4, 10)), third.train(range(4, 10)))


def test_what_loads_after_the_mapping_and_fails_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with League() as first, League() as second, League() as third:
        first.train(range(SAVED))
        state = first.collector.get_state()
        for league in (second, third):
            league.train(range(4))
        before = without_clock(second.collector.get_state())

        def refuse(*_: object) -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patch:
            patch.setattr(second.board, "load_state_dict", lambda saved: refuse() if saved["counts"][0] > 30 else None)
            with pytest.raises(RuntimeError, match="no"):
                second.collector.set_state(state)
        same(without_clock(second.collector.get_state()), before)
        same(second.train(range(4, 10)), third.train(range(4, 10)))


def rivalling(weight: float) -> Linear:
    policy = Linear()
    policy.weights = np.full((84, 7), weight)
    return policy


def test_another_opponent_of_the_same_id_is_replaced_unless_it_plays() -> None:
    with League() as first, League() as second:
        first.pool.add("rival", rivalling(1.0), of="main", anchor=True)
        first.train(range(3))
        state = first.get_state()
        want = first.train(range(3, 6))
        rival = rivalling(2.0)
        second.pool.add("rival", rival, of="main", anchor=True)
        second.mapping.update(second.collector)
        second.set_state(state)
        same(second.train(range(3, 6)), want)
    with League() as third:
        third.pool.add("rival", rival, of="main", anchor=True)
        third.train(range(1))
        while not third.plays("rival"):
            third.train(range(1, 2))
        before = without_clock(third.collector.get_state())
        with pytest.raises(StateError, match="'rival' cannot be removed: it plays"):
            third.set_state(state)
        same(without_clock(third.collector.get_state()), before)


@pytest.mark.slow("plays and rates many matches")
def test_the_mapping_has_the_same_opponents_where_the_state_was_set_twice() -> None:
    with League() as first, League() as second:
        first.train(range(SAVED))
        state = first.get_state()
        want = first.train(range(SAVED, END))
        for _ in range(2):
            second.set_state(state)
        same(second.train(range(SAVED, END)), want)
