"""Games in turns: boards beside PettingZoo's, poker beside OpenSpiel's, and both through `make`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pyspiel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.envs import adapt
from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.errors import ActionError, ArgumentError, EnvArgumentError
from marlvec.native.games.connect_four import ConnectFour
from marlvec.native.games.kuhn import KuhnPoker
from marlvec.native.games.leduc import LeducPoker
from marlvec.native.games.rps import RockPaperScissors
from marlvec.native.games.tictactoe import TicTacToe
from marlvec.native.turn_game import TurnGame
from marlvec.policies import RandomPolicy
from marlvec.testing import check_vector_env
from tests.native.support import Shown, Table
from tests.vector.support.reference import refused

# Boards and cards through `make`: the native backend gives the arrays that envs in this process give.


N = 3
ARGUMENTS: dict[str, dict[str, Any]] = {
    "tictactoe_v3": {},
    "connect_four_v3": {},
    "rps_v2": {"num_actions": 5, "max_cycles": 4},
    "kuhn_poker": {},
    "leduc_poker": {},
}
MODES = ("same_step", "next_step", "disabled")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """PettingZoo logs a warning at each illegal move."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Pair:
    """The same envs on both backends: every call is made on both, and must bring the same."""

    def __init__(self, name: str, **settings: Any) -> None:
        make = partial(marlvec.make, name, **{"num_envs": N, "validate": "off", **ARGUMENTS[name], **settings})
        self.backends = [make(backend=backend) for backend in ("sync", "native")]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: Any) -> None:
        for envs in self.backends:
            envs.close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The rows as both have them, in the form of ``(…, infos)``."""
        plain, native = (getattr(envs, method)(*args, **kwargs) for envs in self.backends)
        assert list(plain[-1]) == list(native[-1]), "the same infos, in the same order"
        for one, other in zip((*plain[:-1], *plain[-1].values()), (*native[:-1], *native[-1].values()), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        return plain

    def play(self, steps: int, rng: np.random.Generator, illegal: float, reset: float = 0.0) -> int:
        """Reset and play; now and then start some games anew. The number of games that ended."""
        envs = self.backends[0]
        _, infos = self.call("reset", seed=int(rng.integers(2**63)))
        games = 0
        for _ in range(steps):
            over = ~infos["alive"].any(axis=1)
            again = over if envs.autoreset_mode == "disabled" else np.zeros(N, np.bool_)
            again |= rng.random(N) < reset
            if again.any():
                seed = int(rng.integers(2**63)) if rng.random() < 0.5 else None
                _, infos = self.call("reset", seed=seed, env_ids=again)
            _, _, terminated, truncated, infos = self.call("step", self.choose(infos, rng, illegal))
            games += int((terminated | truncated).all(axis=1).sum())
        return games

    def choose(self, infos: dict[str, Any], rng: np.random.Generator, illegal: float) -> np.ndarray:
        """Actions (N, 2): allowed ones, but for a share, and nonsense from those who are not acting."""
        n = int(self.backends[0].spec.action_spaces[0].n)
        allowed = infos.get("action_mask", np.ones((N, 2, n), np.bool_))
        chances = rng.random((N, 2, n)) * np.where(rng.random((N, 2, 1)) < illegal, 1.0, allowed)
        return np.where(infos["acting"], chances.argmax(axis=2), 77)


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_whole_games_on_both_backends(name: str, mode: str) -> None:
    with Pair(name, autoreset_mode=mode) as pair:
        assert pair.play(120, np.random.default_rng(1), illegal=0.05) > 10


@pytest.mark.slow("compiles, and plays whole games")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_is_asked_for(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(ARGUMENTS)), "env")
    arguments: dict[str, Any] = {
        "autoreset_mode": data.draw(st.sampled_from(MODES)),
        "done_on": data.draw(st.sampled_from(["all", "any"])),
        "max_episode_steps": data.draw(st.none() | st.integers(1, 9)),
        "pad": data.draw(st.booleans(), "pad"),
    }
    if name == "rps_v2":
        arguments |= {"num_actions": data.draw(st.sampled_from([3, 5, 9])), "max_cycles": data.draw(st.integers(1, 6))}
    with Pair(name, **arguments) as pair:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        pair.play(
            25, rng, illegal=data.draw(st.sampled_from([0.0, 0.1, 1.0])), reset=data.draw(st.sampled_from([0, 0.1]))
        )


@pytest.mark.soak
@pytest.mark.parametrize("name", ARGUMENTS)
def test_many_games_on_both_backends(name: str) -> None:
    for seed, mode in enumerate(MODES):
        with Pair(name, autoreset_mode=mode) as pair:
            assert pair.play(20_000, np.random.default_rng(seed), illegal=0.02, reset=0.001) > 1_000


@pytest.mark.slow("compiles every game")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_contract_suite_passes(name: str) -> None:
    check_vector_env(partial(marlvec.make, name, num_envs=3, backend="native"), seed=1)


@pytest.mark.slow("compiles games")
@pytest.mark.parametrize("name", ["connect_four_v3", "leduc_poker"])
def test_a_collector_brings_the_same_batches(name: str) -> None:
    with Pair(name, num_envs=4) as pair:
        batches = []
        for envs in pair.backends:
            collector = marlvec.Collector(envs, RandomPolicy(), seed=5)
            batches.append([collector.collect(env_steps=steps) for steps in (50, 200)])
    for plain, native in zip(*batches, strict=True):
        assert list(plain) == list(native)
        for policy in plain:
            assert plain[policy].keys() == native[policy].keys()
            for column, values in plain[policy].items():
                np.testing.assert_array_equal(values, native[policy][column], column)


@pytest.mark.mostly_slow("compiles kernels", quick=3)
@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3", "leduc_poker"])
def test_an_action_that_there_is_not_raises_before_any_game_has_moved(name: str) -> None:
    with marlvec.make(name, num_envs=3, backend="native", validate="off") as envs:
        envs.reset(seed=0)
        obs, *_ = envs.step(np.ones((3, 2), np.int64))
        agent = envs.agents[1]
        for bad in (-1, int(envs.spec.action_spaces[0].n)):
            actions = np.ones((3, 2), np.int64)
            actions[2, 1] = bad
            refused(ActionError, rf"env 2.*{agent}", envs.step, actions)
        again, infos = envs.reset(env_ids=[0])
        np.testing.assert_array_equal(again[1:], obs[1:])
        assert infos["acting"][1:].tolist() == [[False, True]] * 2


def test_worlds_are_drawn_and_asked_as_envs_are() -> None:
    with Pair("connect_four_v3", num_envs=2, render_mode="rgb_array") as pair:
        pair.call("reset", seed=0)
        pair.call("step", np.array([[3, 0], [0, 0]]))
        plain, native = (envs.render() for envs in pair.backends)
        np.testing.assert_array_equal(plain, native)


def test_arguments_that_there_are_not_raise() -> None:
    refused(EnvArgumentError, "sides", marlvec.make, "tictactoe_v3", backend="native", sides=4)
    refused(ArgumentError, "num_actions: expected an odd int", marlvec.make, "rps_v2", backend="native", num_actions=4)


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker"])
def test_poker_has_a_form_for_every_backend(name: str) -> None:
    made = partial(marlvec.make, name, num_envs=3)
    told = []
    for backend in ("native", "sync", "thread", "async"):
        with made(backend=backend) as envs:
            rows = [envs.reset(seed=11)]
            rows += [envs.step(np.ones((3, 2), np.int64)) for _ in range(12)]
            told.append(rows)
            assert np.array_equal(envs.get_attr("mover"), rows[-1][-1]["acting"].argmax(axis=1))
    for rows in told[1:]:
        np.testing.assert_equal(rows, told[0])


# The boards against PettingZoo's own games, move by move: 2,000 random games each, illegal moves included.


GAMES = 2_000
LOT = 250  # side by side: each of PettingZoo's games holds its pictures, a megabyte
ILLEGAL = 0.02  # share of moves that are chosen without a look at the mask

TURNS = {"tictactoe_v3": TicTacToe, "connect_four_v3": ConnectFour}


class Games(Shown):
    """N of PettingZoo's own turn-based games, and what each row is to show after every move."""

    def __init__(self, game: str, env: TurnGame) -> None:
        super().__init__(env)
        self.agents = env.agents
        self.envs = [pettingzoo_env(f"classic/{game}", "aec") for _ in range(env.num_envs)]

    def begin(self, i: int) -> None:
        self.envs[i].reset()
        for a in range(2):
            self._observe(i, a)

    def play(self, i: int, action: int) -> None:
        env = self.envs[i]
        env.step(action)
        rewards, terminated, truncated = (
            [told[agent] for agent in self.agents] for told in (env.rewards, env.terminations, env.truncations)
        )
        if any(terminated):
            for a in range(2):
                self._observe(i, a)
            self.end(i, rewards, terminated, truncated)
        else:
            assert not any(rewards)
            self._observe(i, self.agents.index(env.agent_selection))

    def _observe(self, i: int, a: int) -> None:
        seen = self.envs[i].observe(self.agents[a])
        self.obs[i, a] = seen["observation"]
        if self.agents[a] == self.envs[i].agent_selection:
            self.turn(i, a, seen["action_mask"])


def play_lot(game: str, seed: int) -> set[tuple[float, float, bool, bool]]:
    """Play some games side by side to their ends; returns the kinds of end there were."""
    table = Table(TURNS[game](LOT))
    games = Games(game, table.env)
    rng = np.random.default_rng(seed)
    running = np.arange(LOT)
    table.reset(running)
    for i in running:
        games.begin(i)
    games.hold(table, running)
    ends = set()
    while len(running):
        moves = rng.integers(0, games.masks.shape[-1], LOT)
        for i in running[rng.random(len(running)) > ILLEGAL]:
            moves[i] = rng.choice(np.flatnonzero(games.masks[i, games.acting[i]]))
        for i in running:
            games.play(i, int(moves[i]))
        table.step(running, moves)
        games.hold(table, running)
        ends |= {(*games.reward[i], *games.truncated[i]) for i in running[table.rows.done[running]]}
        running = running[~table.rows.done[running]]
    return ends


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("game", TURNS)
def test_boards_show_what_pettingzoo_shows_after_every_move(game: str) -> None:
    ends = set().union(*(play_lot(game, seed) for seed in range(GAMES // LOT)))
    won, lost, drawn = (1.0, -1.0, False, False), (-1.0, 1.0, False, False), (0.0, 0.0, False, False)
    illegal = {(-1.0, 0.0, True, True), (0.0, -1.0, True, True)}
    assert ends == {won, lost, drawn, *illegal}, "a kind of end that did not come up was not tested"


ROCKS = [(LOT, 3, 2, seed) for seed in range(GAMES // LOT)] + [(50, 3, 15, 0), (200, 7, 4, 0), (5, 5, 0, 0)]


@pytest.mark.mostly_slow("compiles the game", quick=6)
@pytest.mark.parametrize(("games", "num_actions", "max_cycles", "seed"), ROCKS)
def test_rock_paper_scissors_is_pettingzoos(games: int, num_actions: int, max_cycles: int, seed: int) -> None:
    arguments = {"num_actions": num_actions, "max_cycles": max_cycles}
    table = Table(RockPaperScissors(games, **arguments))
    agents, rows = table.env.agents, table.rows
    envs = [pettingzoo_env("classic/rps_v2", "parallel", **arguments) for _ in range(games)]
    everyone = np.arange(games)
    rng = np.random.default_rng(seed)
    table.reset(everyone)
    first = [env.reset()[0] for env in envs]
    np.testing.assert_array_equal(rows.obs[0][0], [[obs[agent] for agent in agents] for obs in first])
    assert rows.obs[0][0].dtype == np.int64
    assert rows.alive.all()
    assert rows.acting.all()
    for _ in range(max(1, max_cycles)):
        actions = rng.integers(0, num_actions, (games, 2))
        table.step(everyone, actions)
        told = [env.step(dict(zip(agents, row.tolist(), strict=True))) for env, row in zip(envs, actions, strict=True)]
        shown = rows.obs[0][0], rows.reward, rows.terminated, rows.truncated
        for k, (what, got) in enumerate(zip(("obs", "reward", "terminated", "truncated"), shown, strict=True)):
            np.testing.assert_array_equal(got, [[one[k][agent] for agent in agents] for one in told], what)
        over = np.array([not env.agents for env in envs])
        np.testing.assert_array_equal(rows.done, over)
        np.testing.assert_array_equal(rows.alive, ~over[:, None] & np.ones(2, np.bool_))
        np.testing.assert_array_equal(rows.acting, rows.alive)
    assert over.all()
    for i in range(5):
        mine, plain = table.env.reference(i).unwrapped, envs[i].unwrapped
        assert (mine.history, mine.state, mine.num_moves) == (plain.history, plain.state, plain.num_moves)


@pytest.mark.parametrize(
    "arguments", [{"num_actions": 4}, {"num_actions": 1}, {"num_actions": 3.0}, {"max_cycles": None}]
)
def test_rock_paper_scissors_refuses_what_pettingzoo_cannot_play(arguments: dict[str, Any]) -> None:
    refused(ArgumentError, f"rps_v2: {next(iter(arguments))}: expected .*got", RockPaperScissors, 2, **arguments)


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("game", TURNS)
def test_a_game_that_is_cut_short_is_observed_by_both(game: str) -> None:
    """As the AEC adapter has it: the one who waits has not seen its own move, and sees it then."""
    table = Table(TURNS[game](3))
    env = pettingzoo_env(f"classic/{game}", "aec")
    ids = np.array([0, 2])
    table.reset(np.arange(3))
    env.reset()
    for action in (2, 4, 3):
        table.step(ids, np.full(3, action))
        env.step(action)
    obs = table.rows.obs[0][0]
    waiting = table.env.agents[0]
    assert not np.array_equal(obs[0, 0], env.observe(waiting)["observation"])
    table.env.cut_short(ids)
    for i in ids:
        for a, agent in enumerate(table.env.agents):
            np.testing.assert_array_equal(obs[i, a], env.observe(agent)["observation"])
    assert not obs[1].any(), "another world's rows were touched"


@pytest.mark.slow("compiles every game, and draws")
@pytest.mark.parametrize("game", [*TURNS, "rps_v2"])
def test_a_world_as_pettingzoos_own_env_looks_the_same(game: str) -> None:
    native = TURNS.get(game, RockPaperScissors)
    kind = "parallel" if game == "rps_v2" else "aec"
    table = Table(native(2))
    env = pettingzoo_env(f"classic/{game}", kind, render_mode="rgb_array")
    table.reset(np.arange(2))
    env.reset()
    for action in (2, 0, 1):
        table.step(np.array([1]), np.full(2, action))
        env.step(action if kind == "aec" else dict.fromkeys(env.agents, action))
    np.testing.assert_array_equal(table.env.reference(1, "rgb_array").render(), env.render())
    fresh = table.env.reference(0, "rgb_array").render()
    assert not np.array_equal(fresh, env.render())
    if kind == "aec":
        twin = table.env.reference(1)
        for agent in table.env.agents:
            np.testing.assert_equal(twin.observe(agent), env.observe(agent))


@pytest.mark.parametrize("game", [*TURNS, "rps_v2"])
def test_a_world_is_described_as_pettingzoos_adapter_describes_it(game: str) -> None:
    native = TURNS.get(game, RockPaperScissors)
    reference = adapt(pettingzoo_env(f"classic/{game}", "parallel" if game == "rps_v2" else "aec")).spec()
    assert native(1).spec().difference(reference) is None
    assert native(1).spec().metadata == reference.metadata
    assert native(1).spec().name == reference.name


# Kuhn and Leduc poker against OpenSpiel: every history of Kuhn, 5,000 random deals of Leduc.


DEALS = 5_000


class Hands(Shown):
    """N hands that OpenSpiel plays, with the cards that each world's stream has dealt."""

    def __init__(self, game: Any, env: TurnGame) -> None:
        super().__init__(env)
        self.states = [game.new_initial_state() for _ in range(env.num_envs)]
        self.cards = [list(cards) for cards in dealt(env).tolist()]
        for i in range(env.num_envs):
            self._look(i)  # who moves second has seen nothing yet

    def play(self, i: int, action: int) -> None:
        self.states[i].apply_action(action)
        self._look(i)

    def _look(self, i: int) -> None:
        state = self.states[i]
        while state.is_chance_node():
            state.apply_action(self.cards[i].pop(0))
        if state.is_terminal():
            self.end(i, state.returns(), True, False)
            for a in range(2):
                self.obs[i, a] = state.information_state_tensor(a)
        else:
            mover = state.current_player()
            self.turn(i, mover, state.legal_actions_mask(mover))
            self.obs[i, mover] = state.information_state_tensor(mover)


def dealt(env: TurnGame) -> np.ndarray:
    """(N, cards): what each world's stream dealt."""
    return env.hands if isinstance(env, KuhnPoker) else env.game.deals


def histories(state: Any, actions: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way through a game: what chance deals, and what the players do."""
    if state.is_terminal():
        return [((), ())]
    found = []
    for action in state.legal_actions():
        mine = state.is_chance_node()
        for cards, moves in histories(state.child(action)):
            found.append(((action, *cards), moves) if mine else (cards, (action, *moves)))
    return found


@pytest.mark.slow("compiles kernels")
def test_kuhn_is_openspiels_in_every_history() -> None:
    game = pyspiel.load_game("kuhn_poker")
    every = histories(game.new_initial_state())
    assert len(every) == 30
    found = Table(KuhnPoker(200))
    found.reset(np.arange(200), range(200))
    seed_of = {tuple(cards): seed for seed, cards in enumerate(dealt(found.env).tolist())}
    assert len(seed_of) == 6, "200 seeds bring all deals"
    table = Table(KuhnPoker(len(every)))
    ids = np.arange(len(every))
    table.reset(ids, [seed_of[cards] for cards, _ in every])
    hands = Hands(game, table.env)
    hands.hold(table, ids)
    for turn in range(3):
        ids = np.array([i for i, (_, moves) in enumerate(every) if len(moves) > turn])
        actions = np.array([[*moves, -1, -1][turn] for _, moves in every])
        for i in ids:
            hands.play(i, actions[i])
        table.step(ids, actions)
        hands.hold(table, ids)
    assert all(state.is_terminal() for state in hands.states)


def test_leduc_is_openspiels_over_random_deals() -> None:
    table = Table(LeducPoker(DEALS))
    ids = np.arange(DEALS)
    table.reset(ids, range(DEALS))
    hands = Hands(pyspiel.load_game("leduc_poker"), table.env)
    hands.hold(table, ids)
    rng = np.random.default_rng(5)
    returns = set()
    while len(ids):
        actions = np.zeros(DEALS, np.int64)
        for i in ids:
            legal = hands.states[i].legal_actions()
            actions[i] = legal[rng.integers(len(legal))]
            hands.play(i, actions[i])
        table.step(ids, actions)
        hands.hold(table, ids)
        returns.update(table.rows.reward[ids[table.rows.done[ids]], 0].tolist())
        ids = ids[~table.rows.done[ids]]
    assert returns >= {0.0, 1.0, -1.0, 3.0, -3.0, 13.0, -13.0}


@pytest.mark.parametrize(("moves", "chips"), [((0,), 1.0), ((2, 2, 2), 3.0), ((2, 1, 0), 3.0)])
def test_an_illegal_move_at_leduc_is_a_fold_and_a_truncation(moves: tuple[int, ...], chips: float) -> None:
    """A fold with nothing to answer, a third raise, and a fold in the second round before anybody has raised."""
    table = Table(LeducPoker(2))
    first = np.array([0])
    table.reset(np.arange(2), [0, 0])
    for move in moves:
        assert not table.rows.done[0]
        (mover,) = np.flatnonzero(table.rows.acting[0])
        allowed = table.rows.action_masks[0][0, mover].copy()
        table.step(first, np.array([move, -1]))
    assert not allowed[moves[-1]]
    lost = [-chips if a == mover else chips for a in range(2)]
    assert table.rows.reward[0].tolist() == lost
    assert table.rows.terminated[0].all()
    assert table.rows.truncated[0].all()
    assert not table.rows.alive[0].any()
    assert not table.rows.acting[0].any()
    assert table.rows.action_masks[0][0].all()


@pytest.mark.parametrize(("native", "deck"), [(KuhnPoker, 3), (LeducPoker, 6)])
def test_deals_come_from_the_worlds_seed_and_go_on_with_its_stream(native: type[TurnGame], deck: int) -> None:
    table = Table(native(50))
    ids = np.arange(50)
    table.reset(ids, range(100, 150))
    streams = [np.random.default_rng(seed) for seed in range(100, 150)]
    for episode in range(3):
        if episode:
            table.reset(ids)
        for i, rng in enumerate(streams):
            left = list(range(deck))
            drawn = [left.pop(rng.integers(len(left))) for _ in range(dealt(table.env).shape[1])]
            assert dealt(table.env)[i].tolist() == drawn


@pytest.mark.parametrize(("native", "deck", "cards"), [(KuhnPoker, 3, 2), (LeducPoker, 6, 3)])
def test_every_deal_is_as_likely_as_any_other(native: type[TurnGame], deck: int, cards: int) -> None:
    worlds = 60_000
    table = Table(native(worlds))
    table.reset(np.arange(worlds), range(worlds))
    found, counts = np.unique(dealt(table.env), axis=0, return_counts=True)
    kinds = int(np.prod(range(deck, deck - cards, -1)))
    assert len(found) == kinds
    expected = worlds / kinds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < kinds - 1 + 5 * np.sqrt(2 * (kinds - 1))  # five standard deviations


def test_a_hand_that_is_cut_short_is_seen_by_both() -> None:
    for native, name in ((KuhnPoker, "kuhn_poker"), (LeducPoker, "leduc_poker")):
        table = Table(native(2))
        table.reset(np.arange(2), [1, 2])
        hands = Hands(pyspiel.load_game(name), table.env)
        one = np.array([1])
        table.step(one, np.ones(2, np.int64))
        hands.play(1, 1)
        hands.hold(table, one)
        assert not np.array_equal(hands.obs[1, 0], hands.states[1].information_state_tensor(0))
        table.env.cut_short(one)
        for a in range(2):
            np.testing.assert_array_equal(table.rows.obs[0][0][1, a], hands.states[1].information_state_tensor(a))
