"""Pools of opponents, and self-play that goes on where it was saved."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import Collector
from marlvec.connectors import ActionPipeline, AgentPipeline, EpsilonGreedy, FrameStack, NormalizeObs, Rows
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError, StateError
from marlvec.policies import FunctionPolicy, Policy, PolicyMap, RandomPolicy
from marlvec.selfplay import (
    Elo,
    Every,
    Latest,
    MatchTable,
    Mirror,
    Mixture,
    OnWinRate,
    Opponent,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
    Uniform,
    evaluate_match,
    oldest,
    read_opponents,
    thinned,
    weakest,
)
from marlvec.selfplay import opponents as opponent_pool
from marlvec.selfplay import opponents as pool_index
from marlvec.serialization.archive import read_archive, write_archive
from tests.checkpoints.training import Linear, Momentum
from tests.collect.saved import columns_of, counted, without_clock
from tests.selfplay.nim import Net, Nim, player
from tests.vector.support.reference import refused, same

# --- Pools: what was kept stays what it was, whatever becomes of its learner, and comes back from the disk to the bit


def answers(policy: Policy) -> list[int]:
    """What a policy does in some rows, by itself."""
    policy.setup(Box(0, 50, (2,)), Discrete(3), seed=3)
    obs = np.stack([np.arange(50), np.zeros(50)], axis=1)
    where = np.arange(50)
    rows = Rows(
        {"obs": obs, "env_id": where, "agent_index": where, "eps_id": where, "action_mask": np.ones((50, 3), np.bool_)}
    )
    found: list[int] = np.asarray(policy.act(rows)).tolist()
    return found


def statistics(pipeline: AgentPipeline) -> str:
    return repr(pipeline.state_dict())


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(128)
@pytest.mark.parametrize("bounded", [False, True], ids=["dict", "PolicyMap"])
def test_an_opponent_stays_what_it_was_while_its_learner_goes_on(bounded: bool, tmp_path: Path) -> None:
    """Weights, statistics, files and answers; it plays, swapped in and out, is in no batch, and never learns."""
    net = Net()
    with marlvec.make(Nim, 6, backend="sync") as envs:
        pool = OpponentPool(Net, folder=tmp_path / "pool", capacity=4, when=[Every(100)])
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        policies: Any = PolicyMap({"main": net}, capacity=2) if bounded else {"main": net}
        collector = marlvec.Collector(envs, policies, mapping, agent_connectors=[NormalizeObs()], seed=0)
        known: dict[str, tuple[Opponent, str, list[int], str]] = {}
        for _ in range(14):
            batch = collector.collect(env_steps=60)
            assert set(batch) == {"main"}  # though policies_to_train names nobody, so all
            net.learn(0.1)
            collector.train()
            new = pool.offer(collector, "main")
            if new is not None:
                mapping.update(collector)
                assert statistics(new.agent_connectors()) == statistics(collector.agent_connectors["main"])
                known[new.opponent_id] = new, new.digest, answers(new.policy()), statistics(new.agent_connectors())
            for opponent, digest, said, statistic in known.values():
                if opponent.opponent_id in pool:
                    assert opponent.digest == digest
                    assert answers(opponent.policy()) == said
                    assert statistics(opponent.agent_connectors()) == statistic
        assert [o.step for o, *_ in known.values()] == [120, 240, 360, 480, 600, 720, 840]
        assert list(pool) == ["main_3", "main_4", "main_5", "main_6"]
        assert len({tuple(said) for _, _, said, _ in known.values()}) > 3  # they do differ
        assert len({statistic for *_, statistic in known.values()}) == 7
        played = {name for record in collector.metrics.episodes for name in record.policies}
        assert played >= {"main", "main_4", "main_5"}
        for name in pool:
            assert not collector.agent_connectors[name].training
            assert not pool[name].agent_connectors().training
            assert statistics(collector.agent_connectors[name]) == known[name][3]
            weights = collector.policies[name].state_dict()["weights"]
            np.testing.assert_array_equal(weights, pool[name].policy_state()["weights"])


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(128)
def test_a_pool_comes_back_from_the_disk_exactly(tmp_path: Path) -> None:
    table = MatchTable()
    rules = [Every(100), OnWinRate(table)]
    pool = OpponentPool({"main": Net, "rule": lambda: player(1.0)}, folder=tmp_path / "one", when=rules)
    net = Net()
    with marlvec.make(Nim, 4, backend="sync") as envs:
        collector = marlvec.Collector(
            envs,
            {"main": net},
            agent_connectors=[NormalizeObs()],
            action_connectors=[EpsilonGreedy(0.3, seed=1)],
            seed=0,
        )
        pool.add("anchor", player(1.0), of="rule", anchor=True)
        for _ in range(3):
            collector.collect(env_steps=80)
            net.learn()
            net.version += 7
            pool.snapshot(collector, "main")
    pool.save(tmp_path / "two")
    again_rules = [Every(100), OnWinRate(table)]
    make: Any = {"main": Net, "rule": lambda: player(1.0)}
    for folder in ("one", "two"):
        again = OpponentPool.load(tmp_path / folder, make, when=again_rules)
        assert list(again) == list(pool) == ["anchor", "main_0", "main_1", "main_2"]
        for name, old in pool.items():
            new = again[name]
            assert (new.of, new.step, new.anchor, new.digest) == (old.of, old.step, old.anchor, old.digest)
            np.testing.assert_equal(new.policy_state(), old.policy_state())
            assert statistics(new.agent_connectors()) == statistics(old.agent_connectors())
            assert repr(new.action_connectors()) == repr(old.action_connectors())
        assert answers(again["main_1"].policy()) == answers(pool["main_1"].policy())
        assert again["main_2"].policy_state()["weights"].any()
        assert [rule.state_dict() for rule in again_rules] == [rule.state_dict() for rule in rules]
        assert evaluate_match(again, Nim, 12, backend="sync") == evaluate_match(pool, Nim, 12, backend="sync")
        with marlvec.make(Nim, 4, backend="sync") as envs:
            collector = marlvec.Collector(envs, {"main": net}, seed=0)
            assert again.snapshot(collector, "main").opponent_id == "main_3"  # numbers go on
    for file in (tmp_path / "two").iterdir():
        with np.load(file, allow_pickle=False) as arrays:
            assert all(arrays[name].dtype.kind != "O" for name in arrays)


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(128)
@settings(max_examples=12)
@given(
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    capacity=st.integers(1, 5),
    rule=st.sampled_from(["oldest", "thinned", "weakest"]),
    data=st.data(),
)
def test_a_bounded_pool_holds_as_many_as_it_may_and_the_right_ones(
    steps: list[int], capacity: int, rule: str, data: Any
) -> None:
    """Against a plain list, in any order of coming and going; the folder holds what the pool does and nothing else."""
    ratings = marlvec.selfplay.Elo()
    leaves = {"oldest": oldest, "thinned": thinned, "weakest": weakest(ratings)}[rule]
    pool = OpponentPool(RandomPolicy, capacity=capacity, leaves=leaves)
    pool.add("anchor", RandomPolicy(), anchor=True)
    expected: list[tuple[str, int]] = []
    now = 0
    for i, step in enumerate(steps):
        now += step
        name = f"opponent {i}"
        ratings.rate([name, "somebody"], [data.draw(st.integers(0, 2)), 1])
        pool.add(name, RandomPolicy(), step=now)
        expected.append((name, now))
        if len(expected) > capacity:
            if rule == "oldest" or len(expected) < 3:
                expected.pop(0) if rule != "weakest" else _drop_weakest(expected, ratings)
            elif rule == "thinned":
                times = [t for _, t in expected]
                gaps = [times[k + 1] - times[k - 1] for k in range(1, len(times) - 1)]
                expected.pop(1 + gaps.index(min(gaps)))
            else:
                _drop_weakest(expected, ratings)
        if len(expected) > 1 and data.draw(st.booleans()):
            gone, _ = expected.pop(data.draw(st.integers(0, len(expected) - 1)))
            pool.remove(gone)
    assert list(pool) == ["anchor", *(name for name, _ in expected)]
    gc.collect()
    assert len(list(pool.folder.iterdir())) == len(pool) + 1
    assert list(OpponentPool.load(pool.folder, RandomPolicy)) == list(pool)


def test_a_rule_that_chooses_nobody_in_the_pool_leaves_the_pool_as_it_was() -> None:
    pool = OpponentPool(RandomPolicy, capacity=1, leaves=lambda opponents: "oldest")  # type: ignore[arg-type,return-value]
    pool.add("first", RandomPolicy())
    files = sorted(pool.folder.iterdir())
    refused(ArgumentError, r"leaves\(\): expected one of", pool.add, "second", RandomPolicy())
    gc.collect()
    assert (list(pool), sorted(pool.folder.iterdir())) == (["first"], files)
    assert list(OpponentPool.load(pool.folder, RandomPolicy)) == ["first"]


def _drop_weakest(expected: list[tuple[str, int]], ratings: Any) -> None:
    weak = min(expected[:-1] or expected, key=lambda pair: ratings.rating(pair[0]))
    expected.remove(weak)


@pytest.mark.checklist(128)
def test_a_snapshot_is_due_every_so_many_steps_or_on_a_win_rate() -> None:
    rule = Every(100)
    assert [step for step in range(0, 500, 30) if rule.is_due("main", step) and not rule.taken("main", step)] == [
        120,
        240,
        360,
        480,
    ]
    table = MatchTable()
    won = OnWinRate(table, 0.6, games=10)
    for _ in range(9):
        table.add_result("main", "old", 1)
    assert not won.is_due("main", 0)  # too few
    table.add_result("main", "old", -1)
    assert won.is_due("main", 0)
    won.taken("main", 0)
    assert not won.is_due("main", 0)
    for i in range(20):
        table.add_result("main", "old", 1 if i < 11 else -1)
    assert not won.is_due("main", 0)  # 11 of 20, though of all 30 it has 20
    for _ in range(4):
        table.add_result("main", "old", 1)
    assert won.is_due("main", 0)
    assert not won.is_due("other", 0)
    for wrong in (lambda: Every(0), lambda: OnWinRate(table, 0), lambda: OnWinRate(table, games=0)):
        refused(ArgumentError, "", wrong)


def test_what_connectors_remember_of_running_episodes_is_not_kept() -> None:
    with marlvec.make(Nim, 4, backend="sync", env_kwargs={"smallest": 12}) as envs:
        pool = OpponentPool(Net)
        collector = marlvec.Collector(envs, Net(), agent_connectors=[FrameStack(3)], seed=0)
        collector.collect(env_steps=8)
        running = collector.agent_connectors["main"].state_dict()["FrameStack"]["started"]["values"]
        assert running.all()
        kept = pool.snapshot(collector, "main").agent_connectors().state_dict()
        assert not kept["FrameStack"]["started"]["values"].any()
        assert running.all()


def test_a_snapshot_begins_with_its_learners_rating_and_no_results() -> None:
    with marlvec.make(Nim, 4, backend="sync") as envs:
        board = RatingTracker(envs.agents)
        pool = OpponentPool(Net, board=board)
        board.ratings.rate(["main", "other"], [1, 0])
        pool.snapshot(marlvec.Collector(envs, Net(), seed=0), "main")
        assert board.ratings.rating("main_0") == board.ratings.rating("main") > 1000
        assert board.table.total("main_0").games == 0


@pytest.mark.checklist(128)
def test_an_evicted_opponent_finishes_its_games_before_its_files_go(tmp_path: Path) -> None:
    with marlvec.make(Nim, 4, backend="sync", env_kwargs={"smallest": 12, "largest": 14}) as envs:
        pool = OpponentPool(Net, folder=tmp_path)
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        collector = marlvec.Collector(envs, PolicyMap({"main": Net()}, capacity=1), mapping, seed=0, window=999)
        pool.snapshot(collector, "main")
        mapping.update(collector)
        collector.collect(env_steps=8)
        file = pool["main_0"].files[0]
        gone = pool.remove("main_0")
        mapping.update(collector)
        assert "main_0" in collector.policies  # it is in the middle of a game
        pool.snapshot(collector, "main")  # something else wants to be in memory
        mapping.update(collector)
        assert file.exists()
        seen = [record.policies for record in collector.metrics.episodes]
        for _ in range(40):
            collector.collect(env_steps=20)
            mapping.update(collector)
        records = collector.metrics.episodes
        assert any("main_0" in record.policies for record in records if record.number == 0)
        assert not any("main_0" in record.policies for record in records if record.number > 0)
        assert seen == []
        assert list(collector.policies) == ["main", "main_1"]
        assert file.exists()  # we still have it
        del gone
        gc.collect()
        assert not file.exists()


class RandomNet(RandomPolicy):
    """A policy of its own, though it is a random one."""


class Full:
    """Writes fail, after so many."""

    def __init__(self, write: Callable[..., None], left: int) -> None:
        self.write, self.left = write, left

    def __call__(self, *arguments: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(*arguments)


def test_reading_a_pool_changes_no_files(tmp_path: Path) -> None:
    pool = OpponentPool(Net, folder=tmp_path)
    pool.add("a", Net())
    (tmp_path / "a-1234.policy-5678-1.npz").touch()  # as one that a training is about to enter
    before = sorted(tmp_path.iterdir())
    found = read_opponents(tmp_path, Net)
    assert list(found) == ["a"]
    assert found["a"].digest == pool["a"].digest
    assert sorted(tmp_path.iterdir()) == before
    refused(CheckpointError, "cannot be read", read_opponents, tmp_path / "none", Net)
    assert not (tmp_path / "none").exists()


@pytest.mark.checklist(128)
@pytest.mark.parametrize("left", [0, 1])
def test_what_cannot_be_written_changes_nothing(left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = OpponentPool(Net, folder=tmp_path, capacity=2)
    for name in "ab":
        pool.add(name, Net())
    before = {name: opponent.digest for name, opponent in pool.items()}
    with monkeypatch.context() as patch:
        full = Full(opponent_pool.write_archive, left)
        for module in (opponent_pool, pool_index):
            patch.setattr(module, "write_archive", full)
        refused(OSError, "No space", pool.add, "c", Net())
        if not left:
            refused(OSError, "No space", pool.remove, "a")
    assert {name: opponent.digest for name, opponent in pool.items()} == before
    again = OpponentPool.load(tmp_path, Net)
    assert {name: opponent.digest for name, opponent in again.items()} == before
    assert len(list(tmp_path.iterdir())) == 3  # what a failed write left is gone
    pool.add("c", Net())
    assert list(pool) == ["b", "c"]


class Unsaveable(Net):
    def state_dict(self) -> dict[str, Any]:
        return {"weights": object()}


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    pool = OpponentPool({"main": Net}, folder=tmp_path / "pool")
    pool.add("a", Net(), of="main")
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: OpponentPool(Net(), folder=None), ArgumentError, "make must be a function"),  # type: ignore[arg-type]
        (lambda: OpponentPool(Net, capacity=0), ArgumentError, "capacity=0 .*expected an integer of at least 1"),
        (lambda: OpponentPool(Net, folder=tmp_path / "pool"), ArgumentError, "holds a pool already"),
        (lambda: OpponentPool.load(tmp_path / "none", Net), CheckpointError, "cannot be read"),
        (lambda: OpponentPool.load(tmp_path / "pool", {"other": Net}), ArgumentError, "no function for policies of"),
        (lambda: pool.add("a", Net(), of="main"), ArgumentError, "'a' is taken"),
        (lambda: pool.add("b", Net()), ArgumentError, "no function for policies of 'b'"),
        (lambda: pool.add("b", Net, of="main"), ArgumentError, "got the class Net: give an instance"),
        (lambda: pool.add("b", Unsaveable(), of="main"), SerialisationError, "the state of 'b'"),
        (lambda: pool["c"], KeyError, "no opponent 'c'; the opponents are"),
        (lambda: pool.remove("c"), KeyError, "no opponent 'c'"),
        (lambda: pool["a"].policy().act(Rows({})), MarlvecError, "call setup"),
    ]
    for call, kind, message in cases:
        refused(kind, message, call)
    assert list(pool) == ["a"]
    pool["a"].files[0].write_bytes(b"?" + pool["a"].files[0].read_bytes()[1:])
    refused(CheckpointError, "damaged", OpponentPool.load, tmp_path / "pool", {"main": Net})
    refused(CheckpointError, "damaged", answers, pool["a"].policy())


@pytest.mark.slow("plays and rates many matches")
def test_a_temporary_pool_goes_with_its_object() -> None:
    pool = OpponentPool(Net)
    pool.add("a", Net(), agent_connectors=AgentPipeline([]), action_connectors=ActionPipeline([]))
    folder = pool.folder
    assert len(list(folder.iterdir())) == 4
    del pool
    gc.collect()
    assert not folder.exists()


def test_strange_ids_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a b", "A B", "..", "ä" * 300, "main:3", "\udcff"]
    pool = OpponentPool(Net, folder=tmp_path)
    for name in names:
        pool.add(name, Net())
    assert list(OpponentPool.load(tmp_path, Net)) == names
    assert len(list(tmp_path.iterdir())) == len(names) + 1


# --- who cannot be built


@pytest.mark.mostly_slow("plays and rates many matches", quick=2)
@pytest.mark.parametrize("make", [Net, {"main": Net}], ids=["function", "dict"])
def test_a_random_policy_needs_no_make(make: Any, tmp_path: Path) -> None:
    """Beside snapshots of a learner of another kind; it plays, comes back from the disk, and plays the same."""
    pool = OpponentPool(make, folder=tmp_path)
    with marlvec.make(Nim, 4, backend="sync") as envs:
        collector = marlvec.Collector(envs, {"main": Net()}, seed=0)
        pool.add("random", RandomPolicy(), anchor=True)
        pool.snapshot(collector, "main")
    expected = evaluate_match(pool, Nim, 20, backend="sync")
    assert {player for game in expected.games for team in game.players for player in team} == {"random", "main_0"}
    with marlvec.make(Nim, 4, backend="sync") as envs:
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        collector = marlvec.Collector(envs, {"main": Net()}, mapping, seed=0)
        mapping.update(collector)
        collector.collect(episodes=20)
        assert "random" in {name for record in collector.metrics.episodes for name in record.policies}
    pool.save(tmp_path / "copy")
    for folder in (tmp_path, tmp_path / "copy"):
        again = OpponentPool.load(folder, make)
        assert (list(again), again["random"].anchor) == (["random", "main_0"], True)
        assert evaluate_match(again, Nim, 20, backend="sync") == expected
        assert evaluate_match(read_opponents(folder, make), Nim, 20, backend="sync") == expected


@pytest.mark.parametrize(
    "other",
    [player(1.0), FunctionPolicy(lambda rows: rows["action_mask"].argmax(axis=1)), RandomNet()],
    ids=["script", "function", "subclass"],
)
def test_what_the_pool_cannot_build_is_refused_when_it_is_added(other: Any, tmp_path: Path) -> None:
    """Not when it is first to play; nothing has changed then. A dict says how each is built."""
    built: list[Policy] = []

    def make() -> Policy:
        built.append(Net())
        return built[-1]

    pool = OpponentPool(make, folder=tmp_path)
    pool.add("a", Net())
    files = sorted(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match=r"opponent 'other' is .*builds .*Give the pool a dict, make=\{'other': "):
        pool.add("other", other, anchor=True)
    assert (list(pool), sorted(tmp_path.iterdir())) == (["a"], files)
    count = len(built)
    pool.add("b", Net())
    assert len(built) == count  # once for each kind
    both = OpponentPool({"main": make, "rule": lambda: other})
    both.add("other", other, of="rule", anchor=True)
    both.add("a", Net(), of="main")
    assert evaluate_match(both, Nim, 8, backend="sync").lost == 0


# --- an index that lies


def bent(folder: Path, name: Any, place: int = 0) -> None:
    """Have the index in a folder name another file of its first opponent."""
    data = read_archive(folder / pool_index.INDEX)
    data["opponents"][0][4][place] = name
    write_archive(folder / pool_index.INDEX, data)


def other_names(folder: Path, outside: Path) -> list[Any]:
    own = OpponentPool.load(folder, Net)["a"].files[0].name
    return [
        f"../{outside.name}",
        str(outside),
        f"../{folder.name}/{own}",
        f"sub/{own}",
        f"..\\{own}",
        "..",
        ".",
        "",
        f"{own}\0",
        f"{own}\n",
        pool_index.INDEX,
        own.replace("policy", "agent"),
        "notes.npz",
        7,
        [own],
    ]


def test_an_index_that_names_files_of_others_is_refused_and_they_stay(tmp_path: Path) -> None:
    """Whatever it names beside what a pool writes: nothing in or outside the folder is read, changed or removed."""
    folder, outside = tmp_path / "pool", tmp_path / "precious.policy-0123456789abcdef-1.npz"
    pool = OpponentPool(Net, folder=folder)
    for name in "ab":
        pool.add(name, Net(), agent_connectors=AgentPipeline([]))
    sound = pool["a"].files[0].name
    outside.write_bytes(pool["a"].files[0].read_bytes())  # it could be read
    (folder / "notes.npz").write_bytes(outside.read_bytes())
    names = [*other_names(folder, outside), pool["b"].files[0].name]  # also one that two would share
    del pool
    for name in names:
        bent(folder, name)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for call in (OpponentPool.load, read_opponents):
            raised = refused(CheckpointError, "as a file of opponent", call, folder, Net)
            assert raised.file == str(folder / pool_index.INDEX)
            assert repr(name) in str(raised)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    bent(folder, sound)
    bent(folder, "../connectors.npz", place=1)
    refused(CheckpointError, r"'../connectors\.npz' as a file of opponent 'a'", OpponentPool.load, folder, Net)


def test_a_link_out_of_a_pools_folder_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    folder, other = tmp_path / "pool", tmp_path / "other"
    pool = OpponentPool(Net, folder=folder)
    file = pool.add("a", Net()).files[0]
    del pool
    outside = file.replace(tmp_path / "outside.npz")
    file.symlink_to(outside)
    raised = refused(CheckpointError, "is a link out of the pool's folder", OpponentPool.load, folder, Net)
    assert raised.file == str(file)
    file.unlink()
    outside.replace(file)
    index = (folder / pool_index.INDEX).replace(tmp_path / "index.npz")
    (folder / pool_index.INDEX).symlink_to(index)
    content = index.read_bytes()
    refused(CheckpointError, "is a link out of the pool's folder", OpponentPool.load, folder, Net)
    other.mkdir()
    (other / pool_index.INDEX).symlink_to(tmp_path / "nowhere.npz")
    refused(CheckpointError, "is a link out of the pool's folder", OpponentPool, Net, folder=other)
    refused(CheckpointError, "is a link out of the pool's folder", OpponentPool(Net).save, other)
    assert index.read_bytes() == content
    assert not (tmp_path / "nowhere.npz").exists()


def test_a_folder_that_is_a_link_is_a_pools_folder_like_any_other(tmp_path: Path) -> None:
    OpponentPool(Net, folder=tmp_path / "real").add("a", Net())
    (tmp_path / "link").symlink_to("real")
    pool = OpponentPool.load(tmp_path / "link", Net)
    pool.add("b", Net())
    assert list(OpponentPool.load(tmp_path / "real", Net)) == ["a", "b"]


# --- Self-play goes on where its collector was saved: who plays whom, opponents in mid-episode, ratings, and the pool


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
            refused(ArgumentError, text, second.collector.set_state, {**state, "others": others})
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
            refused(RuntimeError, "no", second.collector.set_state, state)
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
        refused(StateError, "'rival' cannot be removed: it plays", third.set_state, state)
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
