"""Each part of a training goes on where it was: half a run, its state in a fresh object, and the other half."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.collect import Episode
from marlvec.collect.loggers import JSONLinesLogger, TensorBoardLogger
from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.policies import Policy, RandomPolicy, ScriptedPolicy
from marlvec.selfplay import (
    BradleyTerry,
    Elo,
    Every,
    Latest,
    Mixture,
    OnWinRate,
    OpenSkill,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
)
from marlvec.serialization.values import decode, encode
from tests.selfplay.nim import Net, Nim, play, player


def through_a_file(state: Any) -> Any:
    """A state as it comes back from a file."""
    return decode(encode(state, "the state"))


# --- policies


def _torch() -> Policy:
    torch = pytest.importorskip("torch")
    from marlvec.interop.torch import TorchPolicy

    torch.manual_seed(0)
    return TorchPolicy(torch.nn.Linear(2, 3))


POLICIES: dict[str, Callable[[], Policy]] = {
    "random": RandomPolicy,
    "scripted": lambda: ScriptedPolicy(play_and_count),
    "torch": _torch,
}


def play_and_count(obs: Any, agent: int, t: int, memory: Any) -> int:
    """Draws from its random stream, and remembers."""
    memory["count"] = memory.get("count", 0) + 1
    return (play(0.5, obs, agent, t, memory) + int(memory["count"])) % 3


@pytest.mark.parametrize("kind", POLICIES)
def test_policies_draw_what_they_would_have_drawn(kind: str) -> None:
    def asked(policy: Policy, calls: range) -> list[Any]:
        where = np.arange(20)
        ids = {"env_id": where, "agent_index": where % 2, "eps_id": where, "action_mask": np.ones((20, 3), np.bool_)}
        obs = np.stack([where, -where], axis=1).astype(np.float32)
        return [np.asarray(_actions(policy.act(Rows({"obs": obs, "t": where * 0 + call, **ids})))) for call in calls]

    def made(seed: int) -> Policy:
        policy = POLICIES[kind]()
        policy.setup(Box(-50, 50, (2,)), Discrete(3), seed=seed)
        return policy

    whole, first, second = made(1), made(1), made(2)
    expected = asked(whole, range(20))
    found = asked(first, range(10))
    second.load_state_dict(through_a_file(first.state_dict()))
    np.testing.assert_equal(found + asked(second, range(10, 20)), expected)
    with pytest.raises(ArgumentError):
        second.load_state_dict({"nothing": "of it"})


def _actions(said: Any) -> Any:
    return said[0] if isinstance(said, tuple) else said


# --- ratings


RATINGS: dict[str, Callable[[], Any]] = {"Elo": Elo, "BradleyTerry": BradleyTerry, "OpenSkill": OpenSkill}


@pytest.mark.mostly_slow("trains, saves and goes on", quick=3)
@pytest.mark.parametrize("kind", RATINGS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), half=st.integers(0, 30))
def test_ratings_tables_and_rules_go_on_to_the_bit(kind: str, seed: int, half: int) -> None:
    if kind == "OpenSkill":
        pytest.importorskip("openskill")
    rng = np.random.default_rng(seed)
    pairs = [tuple(map(str, rng.choice(list("abcd"), 2, replace=False))) for _ in range(30)]
    games = [(pair, tuple(rng.integers(0, 3, 2).tolist())) for pair in pairs]

    def made() -> tuple[Any, RatingTracker, list[Any]]:
        board = RatingTracker(["one", "two"], ratings=RATINGS[kind](), keep=9)
        board.table.decay = 0.97
        return board, board, [Every(4), OnWinRate(board.table, 0.6, games=3)]

    def played(board: RatingTracker, rules: list[Any], numbers: range) -> list[Any]:
        found = []
        for n in numbers:
            (one, other), scores = games[n]
            board.add(_game(one, other, scores, n))
            due = [rule.is_due(one, n) for rule in rules]
            if any(due):
                for rule in rules:
                    rule.taken(one, n)
            found.append((due, board.ratings.ranking(), board.table.payoffs().tolist(), list(board.games)))
        return found

    _, whole, whole_rules = made()
    _, first, first_rules = made()
    _, second, second_rules = made()
    expected = played(whole, whole_rules, range(30))
    found = played(first, first_rules, range(half))
    second.load_state_dict(through_a_file(first.state_dict()))
    for rule, saved in zip(second_rules, first_rules, strict=True):
        rule.load_state_dict(through_a_file(saved.state_dict()))
    found += played(second, second_rules, range(half, 30))
    np.testing.assert_equal(found, expected)
    np.testing.assert_equal(second.state_dict(), whole.state_dict())


def _game(one: str, other: str, scores: tuple[int, ...], number: int) -> Any:
    from marlvec.selfplay import Game

    won = tuple(map(float, scores))
    return Game(("one", "two"), ((one,), (other,)), won, 7, number % 3 == 0, ("two",) * (number % 2), 0, number)


# --- pools


def _rule() -> Policy:
    return player(0.7)


MAKE = {"main": Net, "rule": _rule}


class League:
    """A training in self-play but for the playing: who would meet, and what would come of it."""

    def __init__(self, folder: Path | None) -> None:
        self.net = Net()
        self.envs = marlvec.make(Nim, 1, backend="sync")
        self.board = RatingTracker(self.envs.agents)
        self.pool = OpponentPool(MAKE, folder=folder, capacity=2, when=[Every(40)], board=self.board)
        self.pool.add("rule", _rule(), of="rule", anchor=True)
        matchmaker = Mixture((1.0, Latest(2)), (2.0, Prioritised(self.board.table)))
        self.mapping = SelfPlayMapping(self.pool, self.envs.agents, {"main": matchmaker})
        self.collector = marlvec.Collector(self.envs, {"main": self.net}, self.mapping, seed=0)
        self.mapping.update(self.collector)

    def play(self, rounds: range) -> list[Any]:
        """Choose line-ups, rate their games, learn."""
        found: list[Any] = []
        for k in rounds:
            rng = np.random.default_rng(k)
            for number in range(20 * k, 20 * k + 20):
                episode = Episode(number, number % 3, number, 7)
                one, other = (self.mapping(agent, episode) for agent in self.envs.agents)
                self.board.add(_game(one, other, tuple(rng.integers(0, 3, 2).tolist()), number))
                found.append((one, other))
            self.net.learn(0.05)
            if self.pool.offer(self.collector, "main", step=50 * k) is not None:
                self.mapping.update(self.collector)
            found.append([(one.opponent_id, one.digest, one.step) for one in self.pool.values()])
            found.append(list(self.collector.policies))
        return found

    def get_state(self) -> Any:
        """All of it."""
        state = [self.mapping.get_state(), self.net.state_dict(), self.net.version, self.board.state_dict()]
        return through_a_file(state)

    def set_state(self, state: Any) -> None:
        """Go on from there."""
        self.mapping.set_state(state[0], self.collector)
        self.net.load_state_dict(state[1])
        self.net.version = state[2]
        self.board.load_state_dict(state[3])


@pytest.mark.slow("trains, saves and goes on")
@pytest.mark.parametrize("kept", [None, "folder"])
def test_a_league_goes_on_with_its_opponents(kept: str | None, tmp_path: Path) -> None:
    """Also where the run that was killed had changed the pool after its state was saved."""
    whole = League(None)
    expected = whole.play(range(8))
    first = League(tmp_path / kept if kept else None)
    found = first.play(range(4))
    state = first.get_state()
    first.play(range(4, 7))  # goes on, and is killed
    second = League(tmp_path / "second")
    second.set_state(state)
    np.testing.assert_equal(found + second.play(range(4, 8)), expected)
    np.testing.assert_equal(second.board.state_dict(), whole.board.state_dict())
    first.set_state(state)  # one that is there already goes back, too
    np.testing.assert_equal(found + first.play(range(4, 8)), expected)
    for league in (whole, first, second):
        league.envs.close()


def test_a_pool_goes_back_with_its_folder(tmp_path: Path) -> None:
    pool = OpponentPool(MAKE, folder=tmp_path / "pool", capacity=2, when=[Every(10)])
    net = Net()
    for step in range(3):
        net.learn()
        pool.add(f"main_{step}", net, of="main", step=step)
    state = through_a_file(pool.state_dict())
    kept = {name: one.digest for name, one in pool.items()}
    same = pool["main_2"]
    for step in range(3, 5):
        net.learn()
        pool.add(f"main_{step}", net, of="main", step=step)
    again = OpponentPool.load(tmp_path / "pool", MAKE, capacity=2, when=[Every(10)])
    again.load_state_dict(state)
    assert {name: one.digest for name, one in again.items()} == kept
    loaded = OpponentPool.load(tmp_path / "pool", MAKE, when=[Every(10)])
    assert {name: one.digest for name, one in loaded.items()} == kept, "its folder followed"
    pool.load_state_dict(state)
    assert {name: one.digest for name, one in pool.items()} == kept
    del same, again, loaded
    gc.collect()
    assert {name: one.digest for name, one in pool.items()} == kept, "what was let go took no files of these"
    before = pool["main_2"]
    pool.load_state_dict(state)
    assert pool["main_2"] is before, "one that is the same stays"


def test_an_invalid_pool_state_changes_nothing(tmp_path: Path) -> None:
    pool = OpponentPool(MAKE, folder=tmp_path, when=[Every(10)])
    pool.add("main_0", Net(), of="main")
    state = pool.state_dict()
    with pytest.raises(ArgumentError, match="the state of an OpponentPool: expected other fields"):
        pool.load_state_dict({"opponents": []})
    with pytest.raises(ArgumentError, match="expected 1 snapshot rules, got 0"):
        pool.load_state_dict({**state, "rules": []})
    with pytest.raises(ArgumentError, match=r"no function for policies of 'other'"):
        pool.load_state_dict({**state, "opponents": [{**state["opponents"][0], "of": "other"}]})
    with pytest.raises(ArgumentError, match="'main_0' occurs twice"):
        pool.load_state_dict({**state, "opponents": state["opponents"] * 2})
    broken = {**state["opponents"][0], "files": [np.arange(9, dtype=np.uint8), None, None]}
    with pytest.raises(CheckpointError):
        pool.load_state_dict({**state, "opponents": [broken]})
    assert list(pool) == ["main_0"]
    assert pool["main_0"].policy_state()["weights"].shape == (50, 3)
    envs = marlvec.make(Nim, 1, backend="sync")
    mapping = SelfPlayMapping(pool, envs.agents, {"main": Latest()})
    other = SelfPlayMapping(pool, envs.agents, {"another": Latest()})
    collector = marlvec.Collector(envs, {"main": Net()}, mapping)
    with pytest.raises(ArgumentError, match=r"expected the learners \['main'\], got \['another'\]"):
        mapping.set_state(other.get_state(), collector)
    envs.close()


# --- loggers


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    path, other = tmp_path / "episodes.jsonl", tmp_path / "other.jsonl"
    path.write_text("one\n")
    logger = JSONLinesLogger(path)
    logger._file.add(b"two\n")
    state = through_a_file(logger.state_dict())
    logger._file.add(b"three\n")
    logger.close()
    with JSONLinesLogger(path) as again:
        again.load_state_dict(state)
        again._file.add(b"three, again\n")
        with pytest.raises(ArgumentError, match="the state of a JSONLinesLogger: expected other fields"):
            again.load_state_dict({})
    assert path.read_text() == "one\ntwo\nthree, again\n"
    other.write_text("something else that is longer\n")
    with JSONLinesLogger(other) as again:
        again.load_state_dict(state)
    assert other.read_text() == "something else that is longer\n", "another file stays as it is"
    with JSONLinesLogger("/dev/null") as nothing:
        nothing.load_state_dict(through_a_file(nothing.state_dict()))
    assert json.dumps(state)


def test_curves_go_on_at_their_step_and_what_came_after_it_is_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def collect(logger: TensorBoardLogger, batches: int) -> Any:
        with marlvec.make(Nim, 2, backend="sync") as envs:
            collector = marlvec.Collector(envs, RandomPolicy(), callbacks=[logger], seed=0)
            for _ in range(batches):
                collector.collect(env_steps=20)

    with TensorBoardLogger(tmp_path, first_step=1000) as logger:
        collect(logger, 2)
        state = through_a_file(logger.state_dict())
        assert state["env_steps"] == 40
        logger._env_steps = 0
        collect(logger, 4)  # further than the checkpoint, and then it is killed
    with TensorBoardLogger(tmp_path) as again:
        again.load_state_dict(state)
        with pytest.raises(ArgumentError, match="the state of a TensorBoardLogger: expected other fields"):
            again.load_state_dict({})
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("totals/agent_steps")
    assert sorted({event.step for event in found}) == [1020, 1040]
