"""The boards against PettingZoo's own games, move by move: 2,000 random games each, illegal moves included."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from marlvec.envs import adapt
from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.errors import ArgumentError
from marlvec.native.games.connect_four import ConnectFour
from marlvec.native.games.rps import RockPaperScissors
from marlvec.native.games.tictactoe import TicTacToe
from marlvec.native.turn_game import TurnGame
from tests.native.table import Shown, Table

GAMES = 2_000
LOT = 250  # side by side: each of PettingZoo's games holds its pictures, a megabyte
ILLEGAL = 0.02  # share of moves that are chosen without a look at the mask

TURNS = {"tictactoe_v3": TicTacToe, "connect_four_v3": ConnectFour}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """PettingZoo logs a warning at each illegal move."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


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
    with pytest.raises(ArgumentError, match=f"rps_v2: {next(iter(arguments))}: expected .*got"):
        RockPaperScissors(2, **arguments)


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
