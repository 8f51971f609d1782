"""Kuhn and Leduc poker against OpenSpiel: every history of Kuhn, 5,000 random deals of Leduc."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyspiel
import pytest

from marlvec.native.games.kuhn import KuhnPoker
from marlvec.native.games.leduc import LeducPoker
from marlvec.native.turn_game import TurnGame
from tests.native.table import Shown, Table

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
