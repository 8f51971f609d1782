"""textarena's games by ``make("textarena/…")``: whole games beside a plain loop over textarena, texts included."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.envs import TextArenaEnv
from marlvec.envs.builtin_ids import TEXTARENA, listed_entries
from marlvec.errors import (
    ArgumentError,
    EnvArgumentError,
    EnvContractError,
    EnvRaised,
    MissingExtraError,
    UnknownEnvError,
)
from marlvec.testing import check_env
from tests.examples.scripts import run

pytest.importorskip("textarena", reason="the extra `textarena` is not installed")

import textarena as ta

SEED = 5
LIMIT = 30  # answers a game
NUM_ENVS = 2
GAMES = 3  # that each env plays

ALONE = """
    2048 Bandit Blackjack Countdown Crosswords Cryptarithm FifteenPuzzle FrozenLake GuessTheNumber LightsOut LogicPuzzle
    Mastermind Minesweeper PegJump RushHour Secretary Set Slitherlink Sokoban Sudoku ThreeCardMonte TowerOfHanoi
"""
TWO = """
    Alquerque Battleship Breakthrough Briscola Chopsticks ColonelBlotto ConnectFour Crusade GameOfPureStrategy
    GermanWhist Golf HighSociety IndianPoker IteratedMatchingPennies IteratedPrisonersDilemma IteratedRockPaperScissors
    IteratedTwoThirdsAverage IteratedUltimatumGame KuhnPoker LiarsDice LinesOfAction MarketEntryGame MemoryGame
    NewRecruit Nim Othello PigDice Poker PublicGoodsGame QuantumTicTacToe SantoriniBaseFixed SimpleBlindAuction
    SimpleNegotiation SimpleTak Snake SpiteAndMalice Stratego Surround Tak TicTacToe TruthAndDeception TwoDollar
    UltimateTicTacToe WildTicTacToe
"""
MORE = {"SettlersOfCatan": 4, "SecretMafia": 6, "Taboo": 4, "ThreePlayerGOPS": 3, "ThreePlayerIPD": 3}
MORE["ThreePlayerTicTacToe"] = 3
PLAYERS = {**dict.fromkeys(ALONE.split(), 1), **dict.fromkeys(TWO.split(), 2), **MORE}
"""Games that begin without data from elsewhere, and the number of players that is taken where none is given."""
F_STRINGS = ("Chess", "Checkers", "IteratedStagHunt", "ReverseTicTacToe", "UltimateTexasHoldem")
MORE_THAN_TWO = {"Golf": 4, "LiarsDice": 3, "Poker": 5, "Snake": 4, "PublicGoodsGame": 3, "SecretMafia": 8}


OWN_FORMS = ("SettlersOfCatan", "SimpleNegotiation", "TwoDollar")  # of all that a player was told


@dataclass
class Game:
    """One game as it was played: who read what and answered what; all that came at the end."""

    turns: list[tuple[int, str, str]] = field(default_factory=list)
    warnings: list[int] = field(default_factory=list)  # at each turn
    rewards: Any = None
    last: Any = None  # texts of all players
    info: dict[str, Any] = field(default_factory=dict)
    was_cut: bool = False
    is_stuck: bool = False  # all players are out, and textarena would look for the next one for ever


def some_move(text: str, rng: np.random.Generator) -> str:
    """A move that stands in the text in brackets, or a number: often legal, and often not."""
    shown = re.findall(r"\[[^\[\]\n]{1,12}\]", text)[-24:]
    if shown and rng.random() < 0.8:
        return str(rng.choice(shown))
    return f"[{rng.integers(10)}]" if rng.random() < 0.8 else f"{rng.integers(10)} {rng.integers(10)}"


def play(envs: Any, number: int, rng: np.random.Generator, seed: Any = SEED) -> list[list[Game]]:
    """Play some games in each env."""
    n = envs.num_envs
    done: list[list[Game]] = [[Game()] for _ in range(n)]
    obs, infos = envs.reset(seed=seed)
    while min(map(len, done)) <= number:
        actions = np.full((n, envs.agent_num), None, object)
        for i in range(n):
            (mover,) = np.flatnonzero(infos["acting"][i])
            text = obs[i, mover]
            actions[i, mover] = some_move(text, rng)
            done[i][-1].turns.append((int(mover), text, actions[i, mover]))
            warned = infos.get("warnings")
            done[i][-1].warnings.append(0 if warned is None else int(warned[i, mover] * infos["_warnings"][i, mover]))
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i in range(n):
            game = done[i][-1]
            if terminated[i].all() or truncated[i].all():
                game.rewards, game.was_cut = rewards[i].tolist(), bool(truncated[i].all())
                game.last = infos["final_observation"][i].tolist()
                game.is_stuck = game.was_cut and "final_info" in infos and "reason" in infos["final_info"]
                if not game.was_cut:
                    game.info = {key: values[i] for key, values in infos["final_info"].items() if key[0] != "_"}
                done[i].append(Game())
            else:
                assert not rewards[i].any()
                assert not terminated[i].any()
                assert not truncated[i].any()
                assert infos["alive"][i].all()
    return [games[:number] for games in done]


def game_seeds(env_seed: int, number: int) -> list[int]:
    rng = np.random.default_rng(env_seed)
    return [int(rng.integers(2**31)) for _ in range(number)]


def begin(game_id: str, players: int, seed: int) -> Any:
    """A game alone in the process, as textarena's README begins it."""
    random.seed(seed)
    np.random.seed(seed)
    env = ta.make(game_id)
    env.reset(num_players=players, seed=seed)
    return env


def check_game(name: str, players: int, seed: int, game: Game, history: str = "full") -> None:
    """Play a game's answers again in a plain loop."""
    plain = begin(f"{name}-train" if history == "train" else name, players, seed)
    over = False
    for k, (mover, text, answer) in enumerate(game.turns):
        assert plain.get_observation() == (mover, text)
        assert game.warnings[k] == plain.state.error_count
        if not (game.is_stuck and k == len(game.turns) - 1):
            over, _ = plain.step(answer)
        assert over == (k == len(game.turns) - 1 and not game.was_cut)
    if over:
        rewards, facts = plain.close()
        for player in range(players):
            assert game.info["forfeit"][player] == facts[player]["invalid_move"]
            assert game.info["role"][player] == facts[player]["role"]
            if not isinstance(rewards[player], str):
                assert game.rewards[player] == rewards[player]
                assert game.info["reason"][player] == (facts[player].get("reason") or "")
    else:
        assert not any(game.rewards)


def check_last_texts(name: str, players: int, seed: int, game: Game) -> None:
    """The last texts in full are all messages that textarena keeps for a player who never reads."""
    plain = begin(name, players, seed)
    while isinstance(plain, ta.Wrapper) and not isinstance(plain, ta.ActionWrapper):
        plain = plain.env
    for _, _, answer in game.turns[:-1] if game.is_stuck else game.turns:
        plain.step(answer)
    for player in range(players):
        text = joined(plain, plain.state.observations[player])
        assert game.last[player].startswith(text) if game.is_stuck else game.last[player] == text


def joined(plain: Any, told: Any) -> str:
    names = {ta.GAME_ID: "GAME", **{p: role for p, role in plain.state.role_mapping.items() if p >= 0}}
    return "".join(f"\n[{names.get(who, f'Player {who}')}] {message}" for who, message, _ in told)


@pytest.mark.parametrize("name", PLAYERS)
def test_whole_games_are_those_of_a_plain_loop(name: str) -> None:
    """Three games in one env, beside another one that plays, each like a game alone in a process."""
    game_id, players = f"{name}-v0", PLAYERS[name]
    outside = random.getstate(), np.random.get_state()[1].tolist()
    with marlvec.make(f"textarena/{game_id}", NUM_ENVS, backend="sync", max_episode_steps=LIMIT) as envs:
        assert envs.agents == tuple(f"player_{p}" for p in range(players))
        played = play(envs, GAMES, np.random.default_rng(SEED))
    assert outside == (random.getstate(), np.random.get_state()[1].tolist())
    for games, env_seed in zip(played, marlvec.env_seeds(SEED, NUM_ENVS), strict=True):
        for game, seed in zip(games, game_seeds(env_seed, GAMES), strict=True):
            check_game(game_id, players, seed, game)
            if name not in OWN_FORMS:
                check_last_texts(game_id, players, seed, game)


@pytest.mark.parametrize("name", MORE_THAN_TWO)
def test_more_players(name: str) -> None:
    game_id, players = f"{name}-v0", MORE_THAN_TWO[name]
    with marlvec.make(f"textarena/{game_id}", 1, num_players=players, backend="sync", max_episode_steps=LIMIT) as envs:
        ((game,),) = play(envs, 1, np.random.default_rng(SEED))
    (seed,) = game_seeds(marlvec.env_seeds(SEED, 1)[0], 1)
    check_game(game_id, players, seed, game)
    check_last_texts(game_id, players, seed, game)


@pytest.mark.parametrize("name", [name for name in PLAYERS if name not in ("RushHour", "LightsOut")])
def test_the_short_form_is_textarenas(name: str) -> None:
    game_id, players = f"{name}-v0", PLAYERS[name]
    with marlvec.make(f"textarena/{game_id}", 1, history="train", backend="sync", max_episode_steps=LIMIT) as envs:
        (games,) = play(envs, 2, np.random.default_rng(SEED))
    for game, seed in zip(games, game_seeds(marlvec.env_seeds(SEED, 1)[0], 2), strict=True):
        check_game(game_id, players, seed, game, "train")
        assert all(game.last)


@pytest.mark.parametrize("name", ["TicTacToe", "PigDice", "KuhnPoker", "SecretMafia", "SettlersOfCatan", "Sudoku"])
@pytest.mark.parametrize("form", ["", "-raw"])
def test_what_is_new_is_told_once(name: str, form: str) -> None:
    game_id, players = f"{name}-v0{form}", PLAYERS[name]
    with marlvec.make(f"textarena/{game_id}", 1, history="new", backend="sync", max_episode_steps=LIMIT) as envs:
        ((game,),) = play(envs, 1, np.random.default_rng(SEED))
    outer = begin(game_id, players, game_seeds(marlvec.env_seeds(SEED, 1)[0], 1)[0])
    inner = outer
    while isinstance(inner, ta.Wrapper):
        inner = inner.env
    for mover, text, answer in game.turns:
        now, told = inner.get_observation()
        assert (now, joined(inner, told)) == (mover, text)
        outer.step(answer)
    for player in range(players):
        if not game.was_cut or player != mover:
            assert game.last[player] == joined(inner, inner.state.observations[player])


# --- What becomes of answers that a game refuses


def answer(envs: Any, *texts: str) -> Any:
    """Give these answers one after the other, each by the player whose turn it is, in the one env."""
    for text in texts:
        reply = envs.step(np.full((1, envs.agent_num), text, object))
    return reply


def single(game: str, **kwargs: Any) -> Any:
    return marlvec.make(f"textarena/{game}", 1, **{"backend": "sync", "autoreset_mode": "disabled", **kwargs})


def test_a_first_refusal_is_a_warning() -> None:
    with single("TicTacToe-v0") as envs:
        envs.reset(seed=0)
        obs, rewards, terminated, _, infos = answer(envs, "[4]", "[4]")
        assert infos["acting"].tolist() == [[False, True]]
        assert infos["warnings"][0, 1] == 1
        assert infos["_warnings"].tolist() == [[False, True]]
        assert "already occupied" in obs[0, 1]
        assert not rewards.any()
        assert not terminated.any()
        infos = answer(envs, "[3]", "[5]", "[5]")[-1]  # counted anew after a move
        assert infos["warnings"][0, 1] == 1


def test_a_second_refusal_ends_a_game_for_two() -> None:
    with single("TicTacToe-v0") as envs:
        envs.reset(seed=0)
        obs, rewards, terminated, truncated, infos = answer(envs, "[4]", "[4]", "hello")
    assert rewards.tolist() == [[1.0, -1.0]]
    assert terminated.all()
    assert not truncated.any()
    assert infos["forfeit"].tolist() == [[False, True]]
    assert infos["role"].tolist() == [["Player 0", "Player 1"]]
    assert infos["reason"][0, 0] == infos["reason"][0, 1] != ""
    assert "hello" in obs[0, 0]
    assert "hello" in obs[0, 1]


@pytest.mark.parametrize(
    "game", ["Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte", "TowerOfHanoi", "Sudoku"]
)
def test_a_second_refusal_alone_pays_what_was_done(game: str) -> None:
    """The first four hand reward and reason to textarena in the wrong order."""
    with single(f"{game}-v0") as envs:
        envs.reset(seed=[3])
        _, rewards, terminated, _, infos = answer(envs, "hello", "hello")
    assert terminated.all()
    assert infos["forfeit"].all()
    plain = begin(f"{game}-v0", 1, game_seeds(3, 1)[0])
    assert [plain.step("hello")[0] for _ in range(2)] == [False, True]
    given, facts = plain.close()
    reason = facts[0]["reason"].removeprefix("Invalid Move: ")
    swapped = isinstance(given[0], str)
    assert swapped == (game not in ("TowerOfHanoi", "Sudoku"))
    assert rewards[0, 0] == float(reason if swapped else given[0])
    assert infos["reason"][0, 0] == f"Invalid Move: {given[0] if swapped else reason}"


def test_a_second_refusal_ends_a_game_for_three() -> None:
    with single("ThreePlayerTicTacToe-v0") as envs:
        envs.reset(seed=0)
        _, rewards, terminated, _, infos = answer(envs, "hello", "hello")
    assert rewards.tolist() == [[-1.0, 1.0, 1.0]]
    assert terminated.all()
    assert infos["forfeit"].tolist() == [[True, False, False]]


def test_who_is_out_waits_for_its_reward() -> None:
    with single("LiarsDice-v0", num_players=3) as envs:
        envs.reset(seed=0)
        _, rewards, terminated, _, infos = answer(envs, "hello", "hello")
        assert infos["alive"].all()
        assert infos["acting"].sum() == 1
        assert not terminated.any()
        movers, text = [], "[Bid: 1, 2]"
        while not terminated.any():
            movers.append(int(np.flatnonzero(infos["acting"][0])[0]))
            obs, rewards, terminated, _, infos = answer(envs, text)
            text = "[Call]" if text != "[Call]" else "[Bid: 1, 2]"
            assert len(movers) < 300
    assert set(movers) == {1, 2}
    assert infos["forfeit"][0, 0]
    assert rewards[0, 0] == rewards.min() == -1
    assert rewards.max() == 1
    assert "hello" in obs[0, 0]


def test_a_player_without_a_turn_sees_the_end_alone() -> None:
    with single("KuhnPoker-v0") as envs:
        obs, infos = envs.reset(seed=0)
        (mover,) = np.flatnonzero(infos["acting"][0])
        assert obs[0, 1 - mover] is None
        obs, rewards, terminated, _, infos = answer(envs, "hello", "hello")
        assert terminated.all()
        assert rewards[0, 1 - mover] == 1
        assert "Kuhn Poker" in obs[0, 1 - mover]
    with marlvec.make("textarena/KuhnPoker-v0", 4, backend="sync") as envs:
        mute = marlvec.ScriptedPolicy(lambda obs, agent, t, memory: "hello")
        rows = marlvec.Collector(envs, mute, batch_mode="complete", seed=0).collect(episodes=8)["main"]
    assert [len(set(game.agent_index)) for game in rows.split_by_episode()] == [1] * 8
    assert rows.rewards.sum() == -8  # the others' are in no row


@pytest.mark.parametrize("game", ["PublicGoodsGame-v0", "MarketEntryGame-v0"])
def test_the_endless_are_cut(game: str) -> None:
    """They ask a player who is out for ever."""

    def play_on(limit: int | None) -> int:
        """Return the number of answers."""
        with single(game, num_players=3, max_episode_steps=limit) as envs:
            infos = envs.reset(seed=0)[1]
            steps = 0
            while infos["alive"].all():
                words = "hello" if infos["acting"][0, 0] else "{yes} [1] [E]"
                obs, rewards, terminated, truncated, infos = answer(envs, words)
                steps += 1
        assert truncated.all()
        assert not terminated.any()
        assert not rewards.any()
        assert all(obs[0])
        return steps

    assert play_on(None) == 400
    assert play_on(450) == 450


@pytest.mark.parametrize("game", ["PublicGoodsGame-v0", "MarketEntryGame-v0"])
def test_a_game_with_nobody_left_is_cut(game: str) -> None:
    """textarena would look for the next player for ever."""
    with marlvec.make(f"textarena/{game}", 2, backend="sync", max_episode_steps=60) as envs:
        played = play(envs, 6, np.random.default_rng(0))
    stuck = [one for games in played for one in games if one.is_stuck]
    assert stuck
    assert all(one.was_cut and not any(one.rewards) and all(one.last) for one in stuck)


def test_what_a_game_raises_is_the_fault_of_its_env() -> None:
    with single("CharacterConclave-v0") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match="env 0 raised in step.*TypeError"):
            answer(envs, "hello")
        assert "hello" not in str(envs.reset(seed=0)[0])
    with (
        single("TicTacToe-v0", validate="off") as envs,
        pytest.raises(EnvContractError, match="action of player_0: expected a text, got int"),
    ):
        envs.reset(seed=0)
        envs.step(np.full((1, 2), 3, object))


# --- Seeds, states, places


def trace(seed: Any, game: str = "PigDice-v0", games: int = 3, **kwargs: Any) -> list[Any]:
    with marlvec.make(f"textarena/{game}", 3, **{"backend": "sync", "max_episode_steps": LIMIT, **kwargs}) as envs:
        played = play(envs, games, np.random.default_rng(0), seed)
    return [(game.turns, game.rewards, game.last) for games in played for game in games]


@pytest.mark.parametrize("game", ["PigDice-v0", "KuhnPoker-v0", "SecretMafia-v0"])
def test_one_seed_settles_all_games_that_follow(game: str) -> None:
    first = trace(7, game)
    random.seed(1)
    np.random.seed(1)
    assert trace(7, game) == first
    assert trace(8, game) != first
    assert trace([2**64 - 1, 7, 9], game) == trace([2**64 - 1, 7, 9], game)
    assert trace(None, game) != trace(None, game)


@pytest.mark.parametrize("game", ["TicTacToe-v0", "PigDice-v0", "SecretMafia-v0"])
def test_all_backends_play_the_same_games(game: str) -> None:
    first = trace(7, game)
    assert trace(7, game, backend="thread", num_workers=3) == first
    assert trace(7, game, backend="async", num_workers=2) == first


@pytest.mark.parametrize("history", ["full", "train", "new"])
@pytest.mark.parametrize("game", ["PigDice-v0", "LiarsDice-v0", "SecretMafia-v0"])
def test_a_game_goes_on_from_its_saved_state(game: str, history: str) -> None:
    with marlvec.make(f"textarena/{game}", 2, history=history, backend="sync", max_episode_steps=LIMIT) as envs:
        assert envs.state_obstacles() == {}
        rng = np.random.default_rng(0)
        obs, infos = envs.reset(seed=3)

        def go_on(steps: int) -> Iterator[Any]:
            nonlocal obs, infos
            for _ in range(steps):
                actions = np.full((2, envs.agent_num), None, object)
                for i, mover in np.argwhere(infos["acting"]).tolist():
                    actions[i, mover] = some_move(obs[i, mover], rng)
                obs, *rest, infos = envs.step(actions)
                yield [obs.tolist(), *(value.tolist() for value in rest)]

        list(go_on(7))
        saved, seen = envs.get_state(), (obs, infos)
        runs = []
        for _ in range(2):
            rng = np.random.default_rng(1)
            envs.set_state(saved)
            obs, infos = seen
            runs.append(list(go_on(60)))
        assert runs[0] == runs[1]
        obs, infos = envs.reset(seed=9)
        list(go_on(5))
    with marlvec.make(f"textarena/{game}", 2, history=history, backend="sync", max_episode_steps=LIMIT) as envs:
        envs.reset(seed=0)
        rng = np.random.default_rng(1)
        envs.set_state(saved)
        obs, infos = seen
        assert list(go_on(60)) == runs[0]


def test_a_state_from_before_the_first_game() -> None:
    env, other = TextArenaEnv("PigDice-v0"), TextArenaEnv("PigDice-v0")
    other.set_state(env.get_state())
    assert other.textarena_env is None
    assert other.get_state() == env.get_state()


class DrawnEnv(ta.Env):
    """Draws from both of the process's generators, at the beginning and at each step."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = ta.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda **_: f"{np.random.normal()} {random.random()}")

    def step(self, action: str) -> Any:
        drawn = f"{np.random.normal()} {np.random.randint(1000)} {random.random()}"
        self.state.add_observation(drawn, ta.ObservationType.GAME_MESSAGE)
        return self.state.step()


def test_what_a_game_draws_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """From either generator, at any time; and what others draw between its steps stays theirs, too."""
    ta.envs.registration.register("Drawn-v0", DrawnEnv, [ta.wrappers.LLMObservationWrapper])
    try:

        def texts(draw: bool) -> list[str]:
            out = []
            with single("Drawn-v0") as envs:
                obs, _ = envs.reset(seed=4)
                for _ in range(6):
                    out.append(obs[0, 0])
                    if draw:
                        outside.append((np.random.normal(), random.random()))
                    obs = answer(envs, "x")[0]
            return out

        outside: list[Any] = []
        np.random.seed(8)
        random.seed(8)
        assert texts(True) == texts(False)
        np.random.seed(8)
        random.seed(8)
        assert outside == [(np.random.normal(), random.random()) for _ in outside]
    finally:
        del ta.envs.registration.ENV_REGISTRY["Drawn-v0"]


@pytest.mark.parametrize("game", ["TicTacToe-v0", "KuhnPoker-v0", "SecretMafia-v0"])
def test_an_env_fulfils_the_contract(game: str) -> None:
    check_env(lambda: TextArenaEnv(game))


# --- What cannot begin


def test_nothing_is_fetched() -> None:
    import nltk

    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("fetched")

    download, nltk.download = nltk.download, fetch
    try:
        if "words" in str(nltk.data.path) or has_words():
            pytest.skip("nltk's words are on this machine")
        for game in ("Hangman-v0", "Wordle-v0", "SpellingBee-v0", "WordChains-v0"):
            with pytest.raises(
                MissingExtraError, match=f"{game}' needs nltk's data 'words'.*python -m nltk.downloader words"
            ):
                single(game)
        assert nltk.download is fetch
        with single("Crosswords-v0") as envs:
            envs.reset(seed=0)
    finally:
        nltk.download = download


def has_words() -> bool:
    import nltk

    try:
        nltk.data.find("corpora/words")
    except LookupError:
        return False
    return True


@pytest.mark.parametrize("game", F_STRINGS)
def test_some_need_a_newer_python(game: str) -> None:
    if sys.version_info < (3, 12):
        with pytest.raises(MissingExtraError, match=rf"{game}-v0' needs Python 3.12: .*f-string"):
            single(f"{game}-v0")
    else:
        with single(f"{game}-v0") as envs:
            envs.reset(seed=0)


def test_unsupported_arguments_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[Exception], words: str, game: str, **kwargs: Any) -> None:
        with pytest.raises(error, match=words):
            single(game, **kwargs)

    refused(
        UnknownEnvError, r"unknown env 'textarena/TicTacTo-v0'\. Did you mean 'textarena/TicTacToe-v0'", "TicTacTo-v0"
    )
    refused(ArgumentError, "TicTacToe-v0 does not begin with num_players=3.*has to be 2", "TicTacToe-v0", num_players=3)
    refused(ArgumentError, "SecretMafia-v0 does not begin with num_players=5", "SecretMafia-v0", num_players=5)
    refused(ArgumentError, "num_players: expected an int of at least 1, got 2.5", "TicTacToe-v0", num_players=2.5)
    refused(ArgumentError, "history: expected 'full', 'train', 'new', got 'all'", "TicTacToe-v0", history="all")
    refused(ArgumentError, "history='train'. has this form", "TicTacToe-v0-train")
    refused(ArgumentError, "keeps no history: expected history='new', got 'full'", "TicTacToe-v0-raw")
    refused(ArgumentError, "LightsOut-v0 has no short form", "LightsOut-v0", history="train")
    refused(ArgumentError, "no form of history='full'", "BabyAiText-v0")
    refused(MissingExtraError, "BabyAiText-v0' needs a package.*'gym'", "BabyAiText-v0", history="new")
    refused(EnvArgumentError, "unexpected keyword argument 'size'", "TicTacToe-v0", size=4)
    refused(EnvRaised, "OPENROUTER_API_KEY", "Debate-v0")
    monkeypatch.setitem(sys.modules, "textarena", None)
    refused(MissingExtraError, r"TicTacToe-v0' needs textarena.*pip install 'marlvec\[textarena\]'", "TicTacToe-v0")


def test_every_listed_game_is_one_of_textarenas() -> None:
    listed = [entry.id.partition("/")[2] for entry in listed_entries() if entry.family == TEXTARENA]
    known = ta.envs.registration.ENV_REGISTRY
    assert [game for game in listed if game not in known] == []
    assert len({known[game].entry_point for game in listed}) == len(listed) == 86
    assert {f"{name}-v0" for name in (*PLAYERS, *F_STRINGS)} <= set(listed)


def test_the_league_of_the_gallery(capsys: pytest.CaptureFixture[str]) -> None:
    run("league_text", "--games", 48)
    *_, first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.startswith("careful")
    assert {line.split("  ")[0] for line in (second, third, fourth)} == {"model", "anywhere", "sloppy model"}
