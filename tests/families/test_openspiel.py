"""OpenSpiel's games by ``make("openspiel/…")``: whole games beside a plain loop over pyspiel, bit for bit."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.envs import OpenSpielEnv
from marlvec.errors import ArgumentError, EnvArgumentError, EnvRaised, MissingExtraError, UnknownEnvError
from marlvec.testing import check_env
from tests.families.trace import legal_actions

pyspiel = pytest.importorskip("pyspiel", reason="the extra `openspiel` is not installed")

NUM_ENVS = 3
GAMES = 4  # that each env plays to its end
SEED = 5

# Sequential and simultaneous, chance at the start, within and nowhere, returns at the end and rewards on the way, two
# and more players, tensors of both kinds, and one that draws by itself.
ROWS = {
    "kuhn_poker": {},
    "kuhn_poker(players=3)": {},
    "leduc_poker": {"observation": "observation"},
    "tic_tac_toe": {},
    "connect_four": {},
    "liars_dice": {"numdice": 1},
    "pig": {"players": 3, "winscore": 15},
    "goofspiel": {"num_cards": 4},
    "oshi_zumo": {"coins": 6},
    "markov_soccer": {"horizon": 40},
    "catch": {},
    "2048": {"max_tile": 32},
    "hanabi": {"players": 3, "colors": 2, "ranks": 2, "hand_size": 2, "max_life_tokens": 1},
    "negotiation": {},
    "misere(game=tic_tac_toe())": {},
}


class PlainGame:
    """One env as a loop over pyspiel has it: what each player saw last, what was paid, whose turn it is."""

    def __init__(self, name: str, observation: str = "auto", **parameters: Any) -> None:
        self.name, self.parameters = name, parameters
        self.game = pyspiel.load_game(name, parameters) if parameters else pyspiel.load_game(name)
        kind = self.game.get_type()
        by_state = kind.provides_information_state_tensor and observation != "observation"
        self.tensor = "information_state_tensor" if by_state else "observation_tensor"
        self.rewarding = kind.reward_model == pyspiel.GameType.RewardModel.REWARDS
        self.players = self.game.num_players()

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
            if "rng_seed" in self.game.get_type().parameter_specification:
                seeded = {**self.parameters, "rng_seed": int(self.rng.integers(2**31 - 1))}
                self.game = pyspiel.load_game(self.name, seeded)
        self.state = self.game.new_initial_state()
        self.total = np.zeros(self.players)
        self.seen: dict[int, Any] = {}
        self.draw()
        self.turn()

    def draw(self) -> None:
        while self.state.is_chance_node():
            outcomes, probabilities = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(self.rng.choice(outcomes, p=probabilities))

    def turn(self) -> None:
        state = self.state
        movers = range(self.players) if state.is_simultaneous_node() else [state.current_player()]
        self.legal = {} if state.is_terminal() else {p: x for p in movers if (x := state.legal_actions(p))}
        for p in range(self.players) if state.is_terminal() else self.legal:
            self.seen[p] = np.array(getattr(state, self.tensor)(p), np.float32)

    def step(self, actions: Any) -> np.ndarray[Any, Any]:
        """Returns what was paid."""
        before = np.array(self.state.returns())
        if self.state.is_simultaneous_node():
            self.state.apply_actions([int(actions[p]) if p in self.legal else 0 for p in range(self.players)])
        else:
            self.state.apply_action(int(actions[self.state.current_player()]))
        moved = self.state.rewards()
        by_move = not self.state.is_chance_node()
        self.draw()
        if self.rewarding:
            paid = np.array(self.state.returns()) - before
            assert not by_move or paid.tolist() == moved
        else:
            paid = np.array(self.state.returns()) if self.state.is_terminal() else np.zeros(self.players)
        self.total += paid
        self.turn()
        return paid


def check_rows(game: PlainGame, i: int, obs: Any, infos: Any) -> None:
    shape, n = obs.shape[2:], game.game.num_distinct_actions()
    for p in range(game.players):
        seen = game.seen.get(p)
        expected = np.zeros(shape, np.float32) if seen is None else seen.reshape(shape)
        assert obs[i, p].tobytes() == expected.tobytes()
        assert infos["acting"][i, p] == (p in game.legal)
        mask = np.isin(np.arange(n), game.legal[p]) if p in game.legal else np.ones(n, bool)
        assert (infos["action_mask"][i, p] == mask).all()


@pytest.mark.mostly_slow("plays real envs on every backend", quick=2)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("name", ROWS)
def test_whole_games_are_those_of_a_plain_loop(name: str, backend: str) -> None:
    workers = {"num_workers": 2} if backend == "async" else {}
    rng = np.random.default_rng(SEED)
    games = [PlainGame(name, **ROWS[name]) for _ in range(NUM_ENVS)]
    played = np.zeros(NUM_ENVS, int)
    with marlvec.make(
        f"openspiel/{name}", NUM_ENVS, backend=backend, validate="strict", **workers, **ROWS[name]
    ) as envs:
        assert envs.agents == tuple(f"player_{p}" for p in range(games[0].players))
        obs, infos = envs.reset(seed=SEED)
        for i, (game, seed) in enumerate(zip(games, marlvec.env_seeds(SEED, NUM_ENVS), strict=True)):
            game.reset(seed)
            check_rows(game, i, obs, infos)
        while played.min() < GAMES:
            (actions,) = legal_actions(envs, infos, rng)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            assert not truncated.any()
            for i, game in enumerate(games):
                paid = game.step(actions[i])
                assert rewards[i].tobytes() == paid.tobytes()
                over = game.state.is_terminal()
                assert terminated[i].tolist() == [over] * game.players
                if over:
                    played[i] += 1
                    np.testing.assert_allclose(game.total, game.state.returns())  # all that was won, and once
                    for p, last in game.seen.items():
                        assert infos["final_observation"][i, p].tobytes() == last.tobytes()
                    game.reset(None)
                check_rows(game, i, obs, infos)


@pytest.mark.parametrize("game", ["kuhn_poker", "goofspiel", "negotiation", "hanabi"])
def test_an_env_fulfils_the_contract(game: str) -> None:
    check_env(lambda: OpenSpielEnv(game))


def trace(seed: Any, game: str = "negotiation", steps: int = 60) -> list[bytes]:
    rng = np.random.default_rng(0)
    with marlvec.make(f"openspiel/{game}", 2, backend="sync") as envs:
        obs, infos = envs.reset(seed=seed)
        out = [obs.tobytes()]
        for _ in range(steps):
            obs, rewards, _, _, infos = envs.step(legal_actions(envs, infos, rng)[0])
            out += [obs.tobytes(), rewards.tobytes()]
    return out


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker", "negotiation"])
def test_one_seed_settles_all_games_that_follow(game: str) -> None:
    first = trace(7, game)
    assert trace(7, game) == first
    assert trace(8, game) != first
    assert trace([2**64 - 1, 7], game) == trace([2**64 - 1, 7], game)
    assert trace(None, game) != trace(None, game)


def test_a_game_goes_on_from_its_saved_state() -> None:
    rng = np.random.default_rng(0)
    with marlvec.make("openspiel/leduc_poker", 2, backend="sync") as envs:
        infos = envs.reset(seed=3)[1]
        for _ in range(7):
            infos = envs.step(legal_actions(envs, infos, rng)[0])[-1]
        saved = envs.get_state()
        runs = []
        for _ in range(2):
            envs.set_state(saved)
            again, now, run = np.random.default_rng(1), infos, []
            for _ in range(30):
                obs, rewards, _, _, now = envs.step(legal_actions(envs, now, again)[0])
                run += [obs.tobytes(), rewards.tobytes()]
            runs.append(run)
        assert runs[0] == runs[1]
    with marlvec.make("openspiel/negotiation", 1, backend="sync") as envs:
        envs.reset(seed=0)
        assert "draws from its own generator" in envs.state_obstacles()[0]


def test_a_limit_ends_a_game_with_what_all_players_see_then() -> None:
    rng = np.random.default_rng(0)
    with marlvec.make("openspiel/tic_tac_toe", 1, backend="sync", max_episode_steps=3) as envs:
        infos = envs.reset(seed=0)[1]
        for _ in range(3):
            _, rewards, terminated, truncated, infos = envs.step(legal_actions(envs, infos, rng)[0])
        assert truncated.all()
        assert not terminated.any()
        assert not rewards.any()
        x, o = infos["final_observation"][0]
        assert x[0].sum() == o[0].sum() == 6  # cells that are empty


def test_unsupported_arguments_raise() -> None:
    with pytest.raises(
        UnknownEnvError, match=r"unknown env 'openspiel/kuhn_pokr'\. Did you mean 'openspiel/kuhn_poker'"
    ):
        marlvec.make("openspiel/kuhn_pokr", backend="sync")
    with pytest.raises(UnknownEnvError, match="lists OpenSpiel's games"):
        marlvec.make("openspiel/kuhn_pokr", num_workers=1)
    with pytest.raises(EnvArgumentError, match="kuhn_poker has no parameter 'player'; it has players"):
        marlvec.make("openspiel/kuhn_poker", backend="sync", player=3)
    with pytest.raises(
        ArgumentError, match="openspiel/kuhn_poker with players=300: .* OpenSpiel's error: .*max_num_players"
    ):
        marlvec.make("openspiel/kuhn_poker", backend="sync", players=300)
    with pytest.raises(ArgumentError, match="OpenSpiel's error: Missing closing bracket"):
        marlvec.make("openspiel/go(board_size=", backend="sync")
    with pytest.raises(ArgumentError, match="resets set it; call reset.seed="):
        marlvec.make("openspiel/negotiation", backend="sync", rng_seed=3)
    with pytest.raises(ArgumentError, match="mean field game"):
        marlvec.make("openspiel/mfg_crowd_modelling", backend="sync")
    with pytest.raises(ArgumentError, match="coin_game has no observation as numbers; it has texts only"):
        marlvec.make("openspiel/coin_game", backend="sync")
    with pytest.raises(
        ArgumentError, match="observation: expected 'auto', 'information_state' or 'observation', got 'b"
    ):
        marlvec.make("openspiel/kuhn_poker", backend="sync", observation="board")
    with pytest.raises(ArgumentError, match="connect_four has no observation as 'information_state'; it has 'observ"):
        marlvec.make("openspiel/connect_four", backend="sync", observation="information_state")
    with pytest.raises(ArgumentError, match="its own generator, which cannot be seeded"):
        marlvec.make(lambda: OpenSpielEnv(pyspiel.load_game("negotiation")), backend="sync")


def test_an_illegal_move_names_the_legal_ones() -> None:
    with marlvec.make("openspiel/tic_tac_toe", 1, backend="sync", validate="off") as envs:
        envs.reset(seed=0)
        envs.step(np.full((1, 2), 4))
        with pytest.raises(EnvRaised, match=r"action 4 of player_1 is not legal; legal are \[0, 1, 2, 3, 5, 6, 7, 8\]"):
            envs.step(np.full((1, 2), 4))


def test_a_game_of_ones_own_and_its_text() -> None:
    with marlvec.make(
        lambda: OpenSpielEnv(pyspiel.load_game("tic_tac_toe"), render_mode="ansi"), backend="sync"
    ) as envs:
        assert envs.render() == ("",)
        envs.reset(seed=0)
        envs.step(np.full((1, 2), 4))
        assert envs.render() == ("...\n.x.\n...",)


def test_without_openspiel_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    with pytest.raises(MissingExtraError, match=r"openspiel/kuhn_poker.*pip install 'marlvec\[openspiel\]'"):
        marlvec.make("openspiel/kuhn_poker", backend="sync")
