"""Who plays whom: mappings and matchmakers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec.collect import Episode
from marlvec.connectors import NormalizeObs, RnnState, Rows
from marlvec.errors import ArgumentError
from marlvec.policies import Policy, PolicyMap
from marlvec.selfplay import (
    ByRating,
    Elo,
    Every,
    Latest,
    MainExploiter,
    Matchmaker,
    MatchTable,
    Mirror,
    Mixture,
    Opponent,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
    Uniform,
)
from marlvec.selfplay.opponents import FrozenPolicy
from tests.selfplay.nim import Net, Nim, player
from tests.vector.support.reference import refused

# --- Who plays whom: from the seed alone, balanced, to the end of the episode; and how opponents are asked


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.checklist(129)
@given(
    seed=st.integers(0, 2**70),
    seats=st.integers(2, 5),
    learners=st.integers(1, 3),
    num_envs=st.integers(1, 7),
    stretches=st.integers(1, 3),
)
def test_learners_take_their_turns_on_all_sides(
    seed: int, seats: int, learners: int, num_envs: int, stretches: int
) -> None:
    """In each stretch of each env exactly; and over the envs as evenly as can be at any time."""
    agents = [f"agent_{a}" for a in range(seats)]
    names = [f"main {i}" for i in range(learners)]
    mapping = SelfPlayMapping(_pool(1), agents, dict.fromkeys(names, Uniform()))
    mapping._entered = dict(_pool(1))
    turns = seats * learners
    seen = np.zeros((num_envs, stretches * turns), np.int64)
    for number in range(stretches * turns):
        for env_id in range(num_envs):
            episode = Episode(number * num_envs + env_id, env_id, number, seed)
            line_up = [mapping(agent, episode) for agent in agents]
            (place,) = (a for a, name in enumerate(line_up) if name in names)
            assert {name for a, name in enumerate(line_up) if a != place} == {"old 0"}
            seen[env_id, number] = names.index(line_up[place]) * seats + place
    for env_id in range(num_envs):
        for k in range(stretches):
            assert sorted(seen[env_id, k * turns : (k + 1) * turns].tolist()) == list(range(turns))
    for number in range(stretches * turns):
        counts = Counter(seen[:, number].tolist())
        assert max(counts.values()) - min(counts.get(k, 0) for k in range(turns)) <= 1


_POOLS: dict[int, OpponentPool] = {}


def _pool(count: int) -> OpponentPool:
    """A pool that is only looked at."""
    if count not in _POOLS:
        _POOLS[count] = OpponentPool(Net)
        for i in range(count):
            _POOLS[count].add(f"old {i}", Net(), step=i)
    return _POOLS[count]


def train(seed: int, *, rounds: int = 6, bound: int | None = None, **options: Any) -> dict[str, Any]:
    """A whole run of self-play with all kinds of matchmakers; returns everything that came of it."""
    net = Net()
    with marlvec.make(Nim, 6, **({"backend": "sync"} | options)) as envs:
        board = RatingTracker(envs.agents)
        pool = OpponentPool({"main": Net, "rule": _rule}, capacity=4, when=[Every(150)], board=board)
        pool.add("rule", _rule(), of="rule", anchor=True)
        makers = [(1.0, Mirror()), (1.0, Latest(2)), (2.0, Prioritised(board.table)), (1.0, ByRating(board.ratings))]
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Mixture(*makers)})
        policies: Any = {"main": net} if bound is None else PolicyMap({"main": net}, capacity=bound)
        collector = marlvec.Collector(
            envs, policies, mapping, callbacks=[board], agent_connectors=[NormalizeObs()], seed=seed, window=10_000
        )
        mapping.update(collector)
        rows = []
        for _ in range(rounds):
            batch = collector.collect(env_steps=120)
            rows.append({name: batch["main"][name] for name in ("obs", "actions", "rewards", "eps_id", "agent_index")})
            net.learn(0.05)
            if pool.offer(collector, "main"):
                mapping.update(collector)
        return {
            "rows": rows,
            "board": board.state_dict(),
            "games": list(board.games),
            "pool": [(o.opponent_id, o.digest) for o in pool.values()],
        }


def _rule() -> Policy:
    return player(0.7)


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(129)
def test_equal_seeds_give_equal_runs_in_one_process_and_in_many() -> None:
    first = train(5)
    assert len(first["games"]) > 50
    assert len({game.players for game in first["games"]}) > 6
    for options in (
        {},
        {"bound": 1},
        {"backend": "async", "num_workers": 2},
        {"autoreset_mode": "disabled"},
        {"backend": "async", "num_workers": 1, "autoreset_mode": "next_step"},
    ):
        np.random.seed(1)  # noqa: NPY002  (nobody may look at it)
        np.testing.assert_equal(train(5, **options), first)
    assert train(6)["games"] != first["games"]


_SCRIPT = """
import numpy as np
from tests.selfplay.test_mapping import train
run = train(2, rounds=2)
print(run["games"], run["pool"])
"""


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(129)
def test_nothing_hangs_on_a_salted_hash() -> None:
    """In RLlib's example who plays is hash(episode_id) % 2, another one in each process."""
    printed = set()
    for salt in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], env=environ, capture_output=True, text=True, check=True, cwd=ROOT
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert "Game(" in printed.pop()


def test_a_reset_with_the_same_seed_brings_the_same_opponents() -> None:
    with marlvec.make(Nim, 4, backend="sync") as envs:
        pool = _pool(5)
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        collector = marlvec.Collector(envs, Net(), mapping, seed=0, window=10_000)
        mapping.update(collector)

        def games(seed: int) -> list[Any]:
            collector.metrics.episodes.clear()
            before = collector.metrics.episodes_total
            collector.reset(seed=seed)
            collector.collect(env_steps=200)
            records = collector.metrics.latest(collector.metrics.episodes_total - before)
            return [(r.env_id, r.number, r.policies, r.returns_A.tolist()) for r in records]

        first = games(1)
        assert games(2) != first
        assert games(1) == first


class Counting(Policy):
    """Counts its own moves in a state, by itself; allowed moves only, and at random."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.salt = 0.0
        self.calls: list[int] = []
        self.rng = np.random.default_rng(0)

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        np.testing.assert_array_equal(rows["state_in"][:, 0], rows["t"])
        np.testing.assert_array_equal(rows["state_in"][:, 1], np.where(rows["t"] > 0, self.salt, 0))
        self.calls.append(len(rows))
        state = np.stack([rows["t"] + 1, np.full(len(rows), self.salt)], axis=1).astype(np.float32)
        noise = self.rng.random((len(rows), 3))
        return np.where(rows["action_mask"], noise, -1).argmax(axis=1), {"state_out": state}

    def state_dict(self) -> dict[str, Any]:
        return {"salt": self.salt}

    def load_state_dict(self, state: Any) -> None:
        self.salt = state["salt"]


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(131)
def test_opponents_are_asked_once_a_tick_about_all_their_rows_with_their_own_memory() -> None:
    """Nim raises at a move that is not allowed, and each policy checks that its state is its own agent's."""
    main = Counting()
    rnn = RnnState(np.zeros(2, np.float32))
    with marlvec.make(Nim, 16, backend="sync", env_kwargs={"agent_num": 3}, validate="strict") as envs:
        pool = OpponentPool(Counting)
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        collector = marlvec.Collector(
            envs, {"main": main}, mapping, agent_connectors=[NormalizeObs(), rnn], seed=0, window=10_000
        )
        for i in range(3):
            main.salt = float(i + 1)
            collector.collect(env_steps=160)
            collector.reset()  # no episode goes on in which it had another salt
            pool.snapshot(collector, "main")
            mapping.update(collector)
        assert len({repr(pool[name].agent_connectors().state_dict()) for name in pool}) == 3
        main.salt = 9.0
        playing = [main]
        for name in pool:
            policy = collector.policies[name]
            assert isinstance(policy, FrozenPolicy)
            assert isinstance(policy._inner, Counting)
            assert policy._inner.salt == int(name[-1]) + 1
            playing.append(policy._inner)
        for one in playing:
            one.calls.clear()
        collector.collect(env_steps=16 * 50)
        calls = [one.calls for one in playing]
        assert all(0 < len(asked) <= 50 for asked in calls)  # at most once a tick
        assert all(sum(asked) > 1.5 * len(asked) for asked in calls)  # several rows at a time
        assert sum(map(sum, calls)) == 16 * 50  # one move a step, by one of these four


class Watched(Net):
    """Notes whom it was asked about, in one book for all."""

    book: list[tuple[int, int, int]]  # salt, episode, agent

    def __init__(self, book: list[tuple[int, int, int]], salt: int = -1) -> None:
        super().__init__()
        self.book, self.salt = book, salt

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.book += [
            (self.salt, e, a) for e, a in zip(rows["eps_id"].tolist(), rows["agent_index"].tolist(), strict=True)
        ]
        return super().act(rows, explore=explore)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "salt": self.salt}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.salt = state["salt"]


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(131)
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_players_of_an_episode_stay_until_its_end(mode: str) -> None:
    """While the pool changes with every batch, opponents leave, and matchmakers draw."""
    book: list[tuple[int, int, int]] = []
    main = Watched(book)
    with marlvec.make(Nim, 8, backend="sync", autoreset_mode=mode, env_kwargs={"smallest": 6, "largest": 30}) as envs:
        pool = OpponentPool(lambda: Watched(book), capacity=3)
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Mixture((1, Mirror()), (4, Uniform()))})
        collector = marlvec.Collector(envs, {"main": main}, mapping, seed=1, window=10_000)
        for i in range(12):
            main.salt = i
            opponent = pool.snapshot(collector, "main")
            assert opponent.opponent_id == f"main_{i}"
            mapping.update(collector)
            main.salt = -1
            collector.collect(env_steps=45)  # in the middle of episodes
        records = {record.eps_id: record for record in collector.metrics.episodes}
    found: dict[tuple[int, int], set[int]] = {}
    for salt, eps_id, agent in book:
        found.setdefault((eps_id, agent), set()).add(salt)
    assert len(records) > 40
    for eps_id, record in records.items():
        for agent, policy_id in enumerate(record.policies):
            salt = -1 if policy_id == "main" else int(policy_id[5:])
            assert found.get((eps_id, agent), {salt}) == {salt}
    assert len({policy for record in records.values() for policy in record.policies}) > 8


@pytest.mark.checklist(128)
def test_two_kinds_of_learner_play_their_own_sides() -> None:
    """Hunters and prey: each learner meets old ones of the other kind, and learns of its own games alone."""
    sides = {"hunters": ["player_0", "player_2"], "prey": ["player_1"]}
    with marlvec.make(Nim, 4, backend="sync", env_kwargs={"agent_num": 3}) as envs:
        board = RatingTracker(envs.agents, sides, note=["hunter", "runner"])
        pool = OpponentPool({"hunter": Net, "runner": Net})
        mapping = SelfPlayMapping(
            pool,
            envs.agents,
            {"hunter": Uniform(), "runner": Mixture((1, Mirror()), (3, Uniform()))},
            sides=sides,
            plays={"hunter": ["hunters"], "runner": ["prey"]},
        )
        collector = marlvec.Collector(
            envs, {"hunter": Net(), "runner": Net()}, mapping, callbacks=[board], seed=0, window=10_000
        )
        for _ in range(3):
            batch = collector.collect(env_steps=200)
            assert set(batch) == {"hunter", "runner"}
            assert set(batch["hunter"].agent_index.tolist()) == {0, 2}
            for learner in ("hunter", "runner"):
                pool.snapshot(collector, learner)
            mapping.update(collector)
        assert collector.metrics.custom["score of hunter"].count > 20
    met = {game.players for game in board.games}
    assert {(("hunter",), ("runner",)), (("hunter",), ("runner_0",)), (("hunter_1",), ("runner",))} <= met
    assert all(len(team) == 1 for teams in met for team in teams)
    assert all(any(name in ("hunter", "runner") for team in teams for name in team) for teams in met)
    assert all(hunters[0].startswith("hunter") and prey[0].startswith("runner") for hunters, prey in met)


class Stranger(Matchmaker):
    def choose(self, learner: str, opponents: Any, rng: Any) -> str:
        return "stranger"


def test_invalid_arguments_raise() -> None:
    pool, two = _pool(2), ["a", "b"]
    for call, message in (
        (lambda: SelfPlayMapping(pool, two, {}), "learners: expected at least one"),
        (lambda: SelfPlayMapping(pool, two, {"x": Mirror()}, plays={"x": ["c"]}), r"unknown sides \['c'\]"),
        (lambda: SelfPlayMapping(pool, two, {"x": Mirror()}, plays={"x": ["a"]}), r"no learner can play the sides"),
        (lambda: SelfPlayMapping(pool, two, {"x": Mirror()}, sides={"all": two}), "sides: expected at least two"),
    ):
        refused(ArgumentError, message, call)
    with marlvec.make(Nim, 2, backend="sync") as envs:
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Stranger()})
        collector = marlvec.Collector(envs, Net(), mapping, seed=0)
        mapping.update(collector)
        with pytest.raises(ArgumentError, match="for side '.*': expected a learner or one of .*, got 'stranger'"):
            collector.collect(env_steps=10)


# --- Matchmakers: how often whom, and from nothing but the game's own random stream


DRAWS = 4000


def opponents(*names: str) -> list[Opponent]:
    """Records of opponents that nobody builds."""
    return [Opponent(name, name.split("_")[0], i, False, Net, (None, None, None)) for i, name in enumerate(names)]  # type: ignore[arg-type]


OLD = opponents("main_0", "main_1", "main_2", "rival_0")


def shares(maker: Matchmaker, given: list[Opponent] = OLD, learner: str = "main") -> dict[str, float]:
    rng = np.random.default_rng(0)
    counts = Counter(maker.choose(learner, given, rng) for _ in range(DRAWS))
    return {name: count / DRAWS for name, count in counts.items()}


def near(found: dict[str, float], expected: dict[str, float]) -> None:
    """Within four standard deviations."""
    for name in found.keys() | expected.keys():
        share = expected.get(name, 0.0)
        assert abs(found.get(name, 0.0) - share) <= 4 * np.sqrt(share * (1 - share) / DRAWS) + 1e-9, (name, found)


@pytest.mark.checklist(128)
def test_latest_and_uniform() -> None:
    assert shares(Latest()) == {"rival_0": 1.0}
    near(shares(Latest(2)), {"main_2": 0.5, "rival_0": 0.5})
    near(shares(Latest(9)), dict.fromkeys(("main_0", "main_1", "main_2", "rival_0"), 0.25))
    near(shares(Uniform()), dict.fromkeys(("main_0", "main_1", "main_2", "rival_0"), 0.25))
    assert shares(Mirror()) == {"main": 1.0}


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(128)
def test_prioritised_by_win_rate() -> None:
    table = MatchTable()
    for other, wins, losses in (("main_0", 9, 1), ("main_1", 1, 1), ("main_2", 1, 9)):
        for _ in range(wins):
            table.add_result("main", other, 1)
        for _ in range(losses):
            table.add_result("main", other, -1)
    hard = np.array([0.1**2, 0.5**2, 0.9**2, 0.5**2])  # who was never met counts as even
    names = [one.opponent_id for one in OLD]
    near(shares(Prioritised(table)), dict(zip(names, hard / hard.sum(), strict=True)))
    even = np.array([0.09, 0.25, 0.09, 0.25])
    near(shares(Prioritised(table, "even")), dict(zip(names, even / even.sum(), strict=True)))
    near(shares(Prioritised(table, lambda rate: float(rate > 0.8))), {"main_0": 1.0})
    near(shares(Prioritised(table, lambda rate: 0.0)), dict.fromkeys(names, 0.25))
    near(shares(Prioritised(table, "even", of=["rival"])), {"rival_0": 1.0})
    near(shares(Prioritised(table, lambda rate: 1.0, of=["nobody"])), dict.fromkeys(names, 0.25))


def test_by_rating_prefers_equals() -> None:
    ratings = Elo(fixed={"main": 1200, "main_0": 1200, "main_1": 1000, "main_2": 1400, "rival_0": -5000})
    weights = np.array([1.0, np.exp(-0.5), np.exp(-0.5), 0.0])
    names = [one.opponent_id for one in OLD]
    near(shares(ByRating(ratings, spread=200)), dict(zip(names, weights / weights.sum(), strict=True)))
    ratings.fixed["main"] = 1e6  # far above all: the nearest one
    assert shares(ByRating(ratings)) == {"main_2": 1.0}


def test_an_exploiter_plays_the_main_learner_until_it_has_no_chance() -> None:
    table = MatchTable()
    maker = MainExploiter("main", table, enough=0.2, games=10)
    assert shares(maker, learner="exploiter") == {"main": 1.0}
    for i in range(10):
        table.add_result("exploiter", "main", 1 if i < 1 else -1)
    found = shares(maker, learner="exploiter")
    near(found, dict.fromkeys(("main_0", "main_1", "main_2"), 1 / 3))  # the main learner's past, and nobody else's
    for _ in range(10):
        table.add_result("exploiter", "main", 1)
    assert shares(maker, learner="exploiter") == {"main": 1.0}


def test_a_mixture_gives_each_its_share() -> None:
    maker = Mixture((3, Mirror()), (1, Latest()))
    near(shares(maker), {"main": 0.75, "rival_0": 0.25})


@pytest.mark.slow("plays and rates many matches")
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 2**32))
def test_whom_has_no_weight_is_never_drawn(weights: list[float], seed: int) -> None:
    names = [f"main_{i}" for i in range(len(weights))]
    table = MatchTable()
    by_rate = {0.5: 0.0}
    for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
        for _ in range(i + 1):
            table.add_result("main", name, 1)
        table.add_result("main", name, -1)
        by_rate[table.win_rate("main", name)] = weight
    chosen = Prioritised(table, by_rate.__getitem__).choose("main", opponents(*names), np.random.default_rng(seed))
    assert by_rate[table.win_rate("main", chosen)] > 0 or not any(by_rate[table.win_rate("main", n)] for n in names)


def test_invalid_arguments_of_matchmakers_raise() -> None:
    table, rng = MatchTable(), np.random.default_rng(0)
    calls: list[tuple[Any, str]] = [
        (lambda: Latest(0), "count must be"),
        (lambda: ByRating(Elo(), 0), "spread must be"),
        (lambda: Prioritised(table, "soft"), "weighting must be one of"),
        (lambda: MainExploiter("main", table, enough=2), "enough must be"),
        (lambda: Mixture(), "expected pairs"),
        (lambda: Mixture((0, Mirror())), "positive share"),
        (lambda: Prioritised(table, lambda rate: -1.0).choose("main", OLD, rng), "of at least 0"),
        (lambda: Prioritised(table, lambda rate: float("nan")).choose("main", OLD, rng), "finite"),
    ]
    for call, message in calls:
        refused(ArgumentError, message, call)
