"""Matches, what is counted in them, and exact exploitability."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import marlvec
from marlvec.connectors import AgentIndicator, AgentPipeline, FrameStack, NormalizeObs, Rows, StickyActions
from marlvec.errors import ArgumentError, ContractError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.selfplay import Elo, Game, OpponentPool, WinRate, evaluate_match, exploitability
from marlvec.selfplay.evaluate import MatchSchedule, line_ups
from marlvec.testing.scripted import SampledEnv
from tests.selfplay.nim import Net, Nim, play, player, players
from tests.vector.support.reference import refused

# --- Matches: who plays whom, what is counted, and that it is the same however it is run


RUNS: list[dict[str, Any]] = [
    {"backend": "sync"},
    {"backend": "sync", "autoreset_mode": "disabled"},
    {"backend": "thread", "num_workers": 3},
    {"backend": "async", "num_workers": 1},
    {"backend": "async", "num_workers": 2, "autoreset_mode": "next_step"},
]


def serial(policies: Any, games: int, **options: Any) -> Any:
    env = partial(Nim, **options.pop("nim", {}))
    return evaluate_match(policies, env, games, backend="sync", **options)


@pytest.mark.slow("plays and rates many matches")
@pytest.mark.checklist(129)
def test_a_match_is_the_same_in_one_process_and_in_many() -> None:
    def match(seed: int, run: dict[str, Any]) -> Any:
        np.random.seed(len(run))  # noqa: NPY002  (nobody may look at it)
        policies = {**players(0.2, 0.8), "net": Net(), "random": RandomPolicy()}
        return evaluate_match(policies, Nim, 60, num_envs=5, seed=seed, **run)

    first, *others = [match(3, run) for run in RUNS]
    assert len(first.games) == 60
    for run, other in zip(RUNS[1:], others, strict=True):
        assert other == first, run
    assert match(4, RUNS[0]).games != first.games


@pytest.mark.checklist(129)
@given(
    names=st.integers(2, 6),
    sides=st.integers(2, 4),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 2**64),
    cut=st.data(),
)
def test_each_policy_has_each_side_equally_often(names: int, sides: int, rounds: int, seed: int, cut: Any) -> None:
    who, seats = [f"p{i}" for i in range(names)], [f"s{i}" for i in range(sides)]
    ups = line_ups(who, seats)
    schedule = MatchSchedule(ups, seed)
    total = rounds * len(ups)
    played = [schedule[game] for game in range(total)]
    counts = np.array([[sum(up[s] == name for up in played) for s in range(sides)] for name in who])
    if names >= sides:
        assert (counts == counts[0, 0]).all()
    else:
        assert (counts == counts[:, :1]).all()
        assert all(set(up) == set(who) for up in played)
    # A part of a round has no line-up twice.
    k = cut.draw(st.integers(0, total))
    parts = [played[i : i + len(ups)] for i in range(0, k, len(ups))]
    assert all(len(set(part)) == len(part) for part in parts)
    assert [MatchSchedule(ups, seed)[game] for game in range(total)] == played


def test_policies_play_only_their_sides() -> None:
    plays = {"hunter": ["a"], "prey": ["b"], "prey 2": ["b"]}
    assert line_ups(list(plays), ["a", "b"], plays) == [("hunter", "prey"), ("hunter", "prey 2")]
    refused(ArgumentError, "no line-up is possible", line_ups, ["x", "y"], ["a", "b"], {"x": ["a"], "y": ["a"]})
    refused(ArgumentError, r"plays: unknown \['c'\]", line_ups, ["x", "y"], ["a", "b"], {"x": ["c"]})
    refused(ArgumentError, "expected at least two, got", line_ups, ["x"], ["a", "b"])


@pytest.mark.checklist(130)
def test_draws_truncations_and_games_without_a_first_move_are_told() -> None:
    """Against a count of the same games by hand: pile and moves say how each one went."""
    found = serial(players(0.0, 1.0), 200, seed=1, nim={"draws": True}, max_episode_steps=4)
    assert len(found.games) == 200
    ended = [game for game in found.games if not game.truncated]
    assert found.truncations == 200 - len(ended) > 5
    assert all(game.scores == (0, 0) and game.length == 4 and game.is_draw for game in found.games if game.truncated)
    assert found.draws == sum(game.scores == (0, 0) for game in found.games) > found.truncations
    for game in found.games:
        assert game.unmoved == (("player_1",) if game.length == 1 else ())
        if not game.is_draw:  # who made the last move has won
            assert game.winners == (f"player_{(game.length - 1) % 2}",)
    short = sum(game.length == 1 for game in found.games)
    assert found.unmoved() == short > 10
    assert sum(found.unmoved(name) for name in found.players) == short
    # Everybody who took part counts, also who never moved.
    rates = [found.win_rate(name) for name in found.players]
    assert [rate.games for rate in rates] == [200, 200]
    assert rates[0].draws == rates[1].draws == found.draws
    assert (rates[0].wins, rates[0].losses) == (rates[1].losses, rates[1].wins)
    assert found.table.total("skill 1.0").wins == rates[1].wins
    assert len(found.rate(Elo()).players) == 2


def test_the_better_one_wins_and_the_interval_says_how_surely() -> None:
    found = serial(players(0.0, 1.0), 200)
    strong = found.win_rate("skill 1.0")
    assert strong.low > 0.6
    assert found.win_rate("skill 0.0").high < 0.4
    by_side = [found.win_rate("skill 1.0", side=side) for side in found.sides]
    assert [rate.games for rate in by_side] == [100, 100]
    assert by_side[0].mean > by_side[1].mean  # who begins can always win, or nearly
    for name, against, side in (("x", None, None), ("skill 1.0", "x", None), ("skill 1.0", None, "x")):
        refused(KeyError, "'x'", found.win_rate, name, against, side=side)


def test_an_interval_is_wilsons() -> None:
    rate = WinRate.of([1.0] * 7 + [0.0] * 3)
    assert (rate.mean, rate.wins, rate.draws, rate.losses) == (0.7, 7, 0, 3)
    assert rate.low == pytest.approx(0.3968, abs=1e-4)
    assert rate.high == pytest.approx(0.8922, abs=1e-4)
    assert WinRate.of([1.0, 1.0]).high == 1.0
    assert math.isnan(WinRate.of([]).mean)
    assert WinRate.of([0.5], 0.5).draws == 1
    refused(ArgumentError, "confidence", WinRate.of, [1.0], 1.0)


@settings(max_examples=30)
@given(share=st.floats(0.05, 0.95), seed=st.integers(0, 1000))
def test_an_interval_holds_the_truth_as_often_as_it_says(share: float, seed: int) -> None:
    wins = np.random.default_rng(seed).random((400, 60)) < share
    rates = [WinRate.of(row.astype(float).tolist(), 0.9) for row in wins]
    assert np.mean([rate.low <= share <= rate.high for rate in rates]) > 0.8


def test_long_games_count_as_often_as_short_ones() -> None:
    """Each env plays its own list of games; the first ones to end would be the short ones."""
    found = serial(players(0.0, 0.1), 64, num_envs=16, nim={"largest": 40})
    per_env = [sum(game.env_id == i for game in found.games) for i in range(16)]
    assert per_env == [4] * 16
    assert all(sorted(g.number for g in found.games if g.env_id == i) == [0, 1, 2, 3] for i in range(16))


def test_more_than_two_sides() -> None:
    found = serial(players(0.0, 0.5, 1.0), 60, nim={"agent_num": 3})
    assert {game.players for game in found.games} == {
        tuple((name,) for name in up) for up in line_ups(found.players, found.sides)
    }
    assert found.win_rate("skill 1.0").games == 60
    game = found.games[0]
    assert sorted(game.scores) == [-2, 0, 2]
    assert game.score_of(game.players[game.scores.index(0)][0]) == 0.5  # better than one, worse than the other
    two = serial(players(0.0, 1.0), 30, nim={"agent_num": 3})
    assert all(len({name for side in game.players for name in side}) == 2 for game in two.games)


def test_policies_and_connectors_are_left_as_they_were() -> None:
    net, connectors = Net(), AgentPipeline([NormalizeObs()])
    with marlvec.make(Nim, 2, backend="sync") as envs:
        collector = marlvec.Collector(envs, net, agent_connectors=connectors, seed=0)
        collector.collect(env_steps=50)
        before = net.state_dict(), net.version, repr(connectors.state_dict()), connectors.training
        policies = {"net": net, "other": player(0.5)}
        evaluate_match(policies, Nim, 8, backend="sync", agent_connectors={"net": connectors})
        after = net.state_dict(), net.version, repr(connectors.state_dict()), connectors.training
        np.testing.assert_equal(after, before)
        with pytest.raises(ArgumentError, match="give it the same connectors"):
            evaluate_match(policies, Nim, 8, backend="sync", agent_connectors={"net": [FrameStack(2)]})
        np.testing.assert_equal(net.state_dict(), before[0])


def test_a_pool_plays_with_its_own_connectors() -> None:
    pool = OpponentPool(Net)
    net = Net()
    for i in range(3):
        pool.add(f"net {i}", net)
        net.learn()
    found = serial(pool, 30)
    assert found.players == ("net 0", "net 1", "net 2")
    assert serial(dict(pool), 30) == found


def test_a_game_that_was_lost_is_played_anew(tmp_path: Path) -> None:
    options: dict[str, Any] = {"nim": {"raises_in": str(tmp_path / "once"), "smallest": 8}, "on_fault": "restart"}
    found = serial(players(0.0, 1.0), 24, num_envs=4, **options)
    assert (found.lost, found.unplayed, len(found.games)) == (1, 0, 24)
    assert "1 lost and repeated" in repr(found)
    options["nim"]["raises_in"] = str(tmp_path / "again")
    found = serial(players(0.0, 1.0), 24, num_envs=4, **{**options, "on_fault": "mask"})
    assert (found.lost, found.unplayed, len(found.games)) == (1, 6, 18)
    alone = {**options, "nim": {"raises_in": str(tmp_path / "third"), "smallest": 8}, "on_fault": "mask"}
    refused(marlvec.errors.EnvFault, "No env is left", serial, players(0.0, 1.0), 5, num_envs=1, **alone)


def test_an_open_vectorizer_is_used_and_left_open() -> None:
    with marlvec.make(Nim, 4, backend="sync") as envs:
        found = evaluate_match(players(0.0, 1.0), envs, 12, seed=5)
        assert found == serial(players(0.0, 1.0), 12, num_envs=4, seed=5)
        assert not envs.closed
        refused(ArgumentError, "backend", evaluate_match, players(0.0, 1.0), envs, 12, backend="sync")


def test_it_shows_progress_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    found = serial(players(0.0, 0.5, 1.0), 12, progress=True)
    assert "12/12" in capsys.readouterr().err
    serial(players(0.0, 1.0), 4)
    assert capsys.readouterr().err == ""
    for width in (40, 80):  # nothing is cut
        console = Console(width=width)
        with console.capture() as shown:
            console.print(found)
        assert shown.get().count("skill 0.5") >= 2
        assert "…" not in shown.get()
        rate = found.win_rate("skill 0.5")
        for number in (f"{rate.mean:.1%}", f"{rate.low:.1%} – {rate.high:.1%}", "as player_1"):
            assert number in shown.get()
        assert max(map(len, shown.get().splitlines())) <= width
    console = Console(width=160)
    with console.capture() as shown:
        console.print(found)
    assert "12 games, 0 drawn, 0 truncated" in shown.get()
    assert "as player_1" in shown.get()
    assert "wins–draws–losses" in shown.get()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"games": 0}, "games=0: expected an integer of at least 1"),
        ({"games": True}, "games=.*expected an integer"),
        ({"num_envs": 0}, "num_envs=.*expected an integer"),
        ({"policies": {"a": player(1)}}, "expected at least two, got"),
        ({"policies": {"a": player(1), "b": play}}, "'b' must be a marlvec Policy"),
        ({"sides": {"one": ["player_0"]}}, "each of the agents"),
        ({"sides": {"one": ["player_0", "player_1"]}}, "sides: expected at least two"),
        ({"score": lambda record: [1.0]}, "expected one number for each of the sides"),
        ({"score": lambda record: [1.0, math.nan]}, "expected one number for each of the sides"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"policies": players(0.0, 1.0), "env": Nim, "games": 4, "backend": "sync"}
    refused(marlvec.errors.MarlvecError, message, evaluate_match, **(arguments | change))


def test_sides_of_several_agents() -> None:
    """Two pairs in four seats: each pair is one policy, and its score the sum."""
    sides = {"even": ["player_0", "player_2"], "odd": ["player_1", "player_3"]}
    found = serial(players(0.0, 1.0), 8, sides=sides, nim={"agent_num": 4})
    assert found.sides == ("even", "odd")
    assert all(len(team) == 1 for game in found.games for team in game.players)
    assert all(sum(game.scores) == 0 for game in found.games)


def test_a_game_that_mixes_policies_on_a_side_counts_for_all_of_them() -> None:
    game = Game(("a", "b"), (("x", "y"), ("z", "y")), (1.0, 0.0), 5, False, (), 0, 0)
    assert game.score_of("x") == 1.0
    assert game.score_of("z") == 0.0
    assert game.score_of("y") is None  # it was on both sides
    assert game.score_of("x", "q") is None


def test_a_function_policy_has_nothing_to_restore() -> None:
    first = FunctionPolicy(lambda rows: rows["action_mask"].argmax(axis=1))
    assert len(serial({"first": first, "best": player(1.0)}, 10).games) == 10


@pytest.mark.parametrize("seeds", [(0, 0, True), (0, 1, False)])
def test_sticky_actions_of_a_match_follow_from_its_seed(seeds: tuple[int, int, bool]) -> None:
    one, two, is_same = seeds

    def sent(seed: int) -> list[Any]:
        seen: list[Any] = []
        see = marlvec.connectors.action_connector(lambda rows: seen.append(rows.actions_for_env.tolist()) or rows)
        turns = {name: FunctionPolicy(lambda rows: rows.t % 2) for name in "ab"}
        chains = {name: [StickyActions(0.5), see] for name in turns}
        env = partial(SampledEnv, Box(-1, 1, (2,)), Discrete(2))
        evaluate_match(turns, env, 8, num_envs=2, seed=seed, action_connectors=chains, backend="sync")
        return seen

    assert (sent(one) == sent(two)) == is_same


# --- Exact exploitability, against numbers that are known


needs_openspiel = pytest.mark.skipif(
    importlib.util.find_spec("pyspiel") is None,
    reason="OpenSpiel is not installed: nothing says how exploitable a policy is",
)


def uniform(rows: Rows) -> Any:
    mask = rows["action_mask"]
    return mask / mask.sum(axis=1, keepdims=True)


def kuhn(alpha: float) -> Callable[[Rows], Any]:
    """The equilibria of Kuhn poker, one for each alpha from 0 to 1/3.

    Of an information-state tensor (11,): player (2), card (3), and pass or bet of each of three moves (6).
    """

    def probabilities(rows: Rows) -> Any:
        found = []
        for obs in rows["obs"]:
            player, card = int(obs[:2].argmax()), int(obs[2:5].argmax())
            moves = [int(pair.argmax()) for pair in obs[5:].reshape(3, 2) if pair.any()]
            if player == 0:
                bet = (alpha, 0.0, 3 * alpha)[card] if not moves else (0.0, alpha + 1 / 3, 1.0)[card]
            else:
                bet = (1 / 3, 0.0, 1.0)[card] if moves == [0] else (0.0, 1 / 3, 1.0)[card]
            found.append([1 - bet, bet])
        return np.array(found)

    return probabilities


@needs_openspiel
@pytest.mark.mostly_slow("plays and rates many matches", quick=3)
@pytest.mark.parametrize(("game", "value"), [("kuhn_poker", 0.458333), ("leduc_poker", 2.373611)])
def test_random_play_has_the_known_exploitability(game: str, value: float) -> None:
    assert exploitability(uniform, game) == pytest.approx(value, abs=1e-6)
    if game == "kuhn_poker":
        assert exploitability(RandomPolicy(), game) == pytest.approx(value, abs=1e-6)


@needs_openspiel
@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_an_equilibrium_cannot_be_exploited(alpha: float) -> None:
    assert exploitability(kuhn(alpha)) == pytest.approx(0, abs=1e-9)
    assert exploitability(lambda rows: 0.8 * kuhn(alpha)(rows) + 0.2 * uniform(rows)) > 0.01


@needs_openspiel
def test_equilibria_drawn_before_the_game_are_one() -> None:
    several = [kuhn(0.0), kuhn(1 / 3)]
    assert exploitability(several) == pytest.approx(0, abs=1e-9)
    assert exploitability(several, weights=[3, 1]) == pytest.approx(0, abs=1e-9)
    assert exploitability([uniform, kuhn(0.1)], weights=[1, 0]) == pytest.approx(0.458333, abs=1e-6)


def _fixed(probabilities: Any, rows: Any) -> Any:
    return probabilities


@needs_openspiel
def test_an_average_is_openspiels() -> None:
    """Averaged by how they get there; the mean of their probabilities at each information state is another thing."""
    import pyspiel
    from open_spiel.python import policy as tables
    from open_spiel.python.algorithms.exploitability import nash_conv
    from open_spiel.python.algorithms.policy_aggregator import PolicyAggregator

    rng = np.random.default_rng(0)
    game = pyspiel.load_game("kuhn_poker")
    own, theirs = [], []
    for _ in range(3):
        table = tables.TabularPolicy(game)
        table.action_probability_array[:] = rng.dirichlet([0.5, 0.5], size=12)
        own.append(partial(_fixed, table.action_probability_array.copy()))
        theirs.append(table)
    weights = [0.5, 0.3, 0.2]
    whole = PolicyAggregator(game).aggregate([0, 1], [theirs, theirs], [weights, weights])
    assert exploitability(own, weights=weights) == pytest.approx(nash_conv(game, whole) / 2, abs=1e-9)
    mean = np.average([one(None) for one in own], axis=0, weights=weights)
    assert abs(exploitability(lambda rows: mean) - exploitability(own, weights=weights)) > 0.001


@needs_openspiel
def test_a_network_is_asked_as_it_plays() -> None:
    torch = pytest.importorskip("torch")
    from marlvec.interop.torch import TorchPolicy

    torch.manual_seed(0)
    net = torch.nn.Linear(11, 2)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    assert exploitability(TorchPolicy(net)) == pytest.approx(0.458333, abs=1e-6)
    wide = torch.nn.Linear(13, 2)
    value = exploitability(TorchPolicy(wide), agent_connectors=AgentPipeline([AgentIndicator()]))
    assert 0 < value < 2
    deep = TorchPolicy(torch.nn.Linear(30, 3))
    assert 0 < exploitability(deep, "leduc_poker") < 10


@needs_openspiel
def test_a_pool_is_asked_as_it_is_with_the_connectors_it_has(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from marlvec.interop.torch import TorchPolicy

    torch.manual_seed(0)
    indicator = AgentPipeline([AgentIndicator()])
    indicator.bind(Box(0, 1, (11,), np.float32), ["player_0", "player_1"], Discrete(2))
    policies = [TorchPolicy(torch.nn.Linear(13, 2)) for _ in range(2)]
    pool = OpponentPool(lambda: TorchPolicy(torch.nn.Linear(13, 2)), folder=tmp_path)
    for i, policy in enumerate(policies):
        pool.add(f"old_{i}", policy, agent_connectors=indicator)
    expected = exploitability(policies, agent_connectors=indicator)
    assert exploitability(list(pool.values())) == pytest.approx(expected, abs=1e-9)
    assert exploitability(pool["old_1"]) == pytest.approx(exploitability(policies[1:], agent_connectors=indicator))
    pool = OpponentPool(RandomPolicy)
    pool.add("random", RandomPolicy())
    assert exploitability(pool["random"]) == pytest.approx(0.458333, abs=1e-6)


@needs_openspiel
def test_an_opponent_that_says_none_is_refused() -> None:
    pool = OpponentPool(lambda: FunctionPolicy(uniform))
    pool.add("rule", FunctionPolicy(uniform))
    refused(ArgumentError, r"FrozenPolicy\('rule'\): expected probabilities", exploitability, pool["rule"])


@needs_openspiel
def test_invalid_arguments_of_exploitability_raise() -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (FunctionPolicy(uniform), {}, ArgumentError, ": expected probabilities"),
        (lambda rows: np.ones((12, 3)), {}, ContractError, "shape"),
        (lambda rows: np.ones((12, 2)), {}, ContractError, "expected a sum of 1"),
        (
            lambda rows: np.full((len(rows), 3), 1 / 3),
            {"game": "leduc_poker"},
            ContractError,
            "over the allowed actions",
        ),
        ([uniform], {"weights": [0]}, ArgumentError, "expected one for each"),
        ([uniform], {"weights": [1, 1]}, ArgumentError, "expected one for each"),
        ([], {}, ArgumentError, "expected one for each"),
    ]
    for policies, options, kind, message in cases:
        refused(kind, message, exploitability, policies, **options)
