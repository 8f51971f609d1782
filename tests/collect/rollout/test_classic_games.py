"""PettingZoo's own turn-based games, each beside a plain loop over the same game with the same seeds and decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import Rows
from marlvec.policies import Policy
from marlvec.registry import resolve
from tests.collect.helpers.players import MODES

SEED, NUM_ENVS = 3, 3
GAMES: dict[str, dict[str, Any]] = {
    "connect_four": {},
    "tictactoe": {},
    "leduc_holdem": {},
    "hanabi": {"colors": 3, "ranks": 3, "players": 3, "hand_size": 2, "max_life_tokens": 3},
}
"""Two pay each other when the game ends, on whoever's move; three share what each move earns or costs."""


def decide(mask: NDArray[Any], eps_id: int, player: int, turn: int) -> int:
    """An allowed move, drawn for this decision alone."""
    return int(np.random.default_rng([eps_id, player, turn]).choice(np.flatnonzero(mask)))


class Drawing(Policy):
    """Moves by `decide`."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        whose = zip(*(rows[name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True)
        return np.array([decide(mask, *one) for mask, one in zip(rows["action_mask"], whose, strict=True)])


@dataclass
class Turn:
    """One decision in the plain loop, and what its player is paid from then until its next turn or end."""

    obs: NDArray[Any]
    mask: NDArray[np.bool_]
    action: int
    paid: list[float] = field(default_factory=list)
    next_obs: Any = None
    ended: tuple[bool, bool] = (False, False)


@dataclass
class Game:
    """One game of the plain loop: each player's turns, all it was paid, what of that before the first, and moves."""

    turns: list[list[Turn]]
    paid: list[float]
    early: list[float]
    moves: int = 0


def play(env: Any, seed: int | None, eps_id: int) -> Game:
    """A loop as in PettingZoo's documentation; ``env.rewards`` is what the last move paid, to whomever."""
    env.reset(seed=seed)
    names = env.possible_agents
    game = Game([[] for _ in names], [0.0] * len(names), [0.0] * len(names))
    for name in env.agent_iter():
        seen, owed, terminated, truncated, _ = env.last()
        player = names.index(name)
        turns = game.turns[player]
        if turns:
            turns[-1].next_obs = seen["observation"].copy()
            turns[-1].ended = terminated, truncated
            assert sum(turns[-1].paid) == owed, "the env's own account"
        if terminated or truncated:
            env.step(None)
            continue
        mask = seen["action_mask"].astype(bool)
        turns.append(Turn(seen["observation"].copy(), mask, decide(mask, eps_id, player, len(turns))))
        env.step(turns[-1].action)
        game.moves += 1
        for other, reward in env.rewards.items():
            game.paid[names.index(other)] += reward
            if game.turns[names.index(other)]:
                game.turns[names.index(other)][-1].paid.append(reward)
            else:
                game.early[names.index(other)] += reward
    return game


def check_game(game: Game, rows: dict[int, Any]) -> None:
    """Compare one game with its rows in the batches, by player."""
    for player, turns in enumerate(game.turns):
        own = rows.get(player)
        if own is None:
            assert not turns
            continue
        earlies = [game.early[player], *[0.0] * (len(turns) - 1)]  # what came before the first turn goes to that
        columns = {
            "obs": [turn.obs for turn in turns],
            "action_mask": [turn.mask for turn in turns],
            "actions": [turn.action for turn in turns],
            "rewards": [sum(turn.paid) + early for turn, early in zip(turns, earlies, strict=True)],
            "next_obs": [turn.next_obs for turn in turns],
            "terminated": [turn.ended[0] for turn in turns],
            "truncated": [turn.ended[1] for turn in turns],
            "t": list(range(len(turns))),
        }
        for name, values in columns.items():
            np.testing.assert_array_equal(own[name], np.array(values), err_msg=name)
        assert own["rewards"].sum() == game.paid[player]


@pytest.mark.checklist(52)
@pytest.mark.checklist(114)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GAMES)
def test_each_rows_reward_is_all_that_was_paid_until_the_players_next_turn(
    name: str, mode: str, batch_mode: Any
) -> None:
    """Rows of many batches, which cut through games; seats change from game to game."""
    with marlvec.make(name, NUM_ENVS, backend="sync", autoreset_mode=mode, **GAMES[name]) as envs:
        collector = Collector(
            envs,
            {"even": Drawing(), "odd": Drawing()},
            lambda agent, episode: ("even", "odd")[(int(agent[-1]) + episode.number) % 2],
            batch_mode=batch_mode,
            seed=SEED,
            window=1000,
        )
        batches = [collector.collect(env_steps=37) for _ in range(8)]
        records = collector.metrics.episodes
    parts = [rows.take(np.argsort(rows["t"], kind="stable")) for batch in batches for rows in batch.values()]
    found: dict[tuple[int, int], list[Any]] = {}
    for rows in parts:
        for eps_id, player in set(zip(rows["eps_id"].tolist(), rows["agent_index"].tolist(), strict=True)):
            own = rows.take((rows["eps_id"] == eps_id) & (rows["agent_index"] == player))
            found.setdefault((eps_id, player), []).append(own)
    games = [resolve(name).with_kwargs(**GAMES[name])() for _ in range(NUM_ENVS)]
    seeds: list[int | None] = list(marlvec.env_seeds(SEED, NUM_ENVS))
    told = 0
    for record in records:
        game = play(games[record.env_id], seeds[record.env_id], record.eps_id)
        seeds[record.env_id] = None
        assert record.length == game.moves
        assert record.returns_A.tolist() == game.paid
        assert record.lengths_A.tolist() == [len(turns) for turns in game.turns]
        rows = {
            player: marlvec.SampleBatch.concat(found[record.eps_id, player])
            for player in range(len(game.turns))
            if (record.eps_id, player) in found
        }
        if batch_mode == "truncate" or rows:  # in complete mode some episodes wait for the next call
            check_game(game, rows)
            told += 1
    assert told >= 8
    for env in games:
        env.close()
