"""``marlvec play``, as somebody who plays meets it."""

from __future__ import annotations

import html
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from typer.testing import CliRunner

from marlvec import RandomPolicy
from marlvec.cli import app
from marlvec.connectors import AgentPipeline, RnnState
from marlvec.policies import as_policy, save_policy
from marlvec.selfplay import OpponentPool
from tests.programs import converse

PLAYERS = '''
import numpy as np
from marlvec import RandomPolicy

def lowest(rows):
    """The first move that is allowed."""
    return rows["action_mask"].argmax(axis=1)

def paper(rows):
    return np.ones(len(rows), np.int64)

def make():
    return RandomPolicy()

class Counting:
    """Plays the field of its state, one more in each of its moves; its weights are where it begins."""

    start = np.array(0)

    def act(self, rows):
        return (rows["state_in"][:, 0] + self.start).astype(np.int64), {"state_out": rows["state_in"] + 1}

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]

def counting():
    return Counting()

class Locked(Counting):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle a lock")

locked = Locked()

def anything(*args):
    return lowest(*args)

number = 3
'''
LOWEST = ("tictactoe", "--policy", "players.py:lowest")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with policies and a pool in it, to stand in; what the command does to this process is undone."""
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    pool = OpponentPool(RandomPolicy, folder=tmp_path / "pool")
    for name in ("old", "new"):
        pool.add(name, RandomPolicy())
    OpponentPool(RandomPolicy, folder=tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("players", None)


def play(*args: str, typed: str) -> Any:
    result = CliRunner().invoke(app, ["play", *args], input=typed, prog_name="marlvec")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow("runs commands as programs")
def test_a_game_is_won_at_a_terminal_and_the_next_one_left() -> None:
    ask = "(q to quit)"
    command = [sys.executable, "-m", "marlvec.cli", "play", *LOWEST]
    answers = [(ask, "5\n"), (ask, "1\n"), ("allowed: 2, 3, 4, 6, 7, 8, 9", "3\n"), (ask, ""), (ask, "7\n")]
    code, seen = converse(command, [*answers, ("game 2", ""), (ask, "q\n")])
    seen = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen).replace("\r", "")
    assert code == 0, seen
    assert "game 1: you play player_1, lowest plays player_2" in seen
    assert "field 1 is taken; allowed: 2, 3, 4, 6, 7, 8, 9" in seen
    assert "  ○ ○ ● \n  4 ● 6 \n  ● 8 9 \nyou win: 1 against -1, after 5 moves" in seen
    assert "game 2: you play player_2" in seen
    assert seen.index("you win") < seen.index("game 2")
    assert seen.rstrip().endswith("games won 1, drawn 0, lost 0")


@pytest.mark.slow("runs commands as programs")
@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 0)], ids=["Ctrl-C", "Ctrl-D"])
def test_it_can_be_left_by_a_key(key: str, code: int) -> None:
    command = [sys.executable, "-m", "marlvec.cli", "play", *LOWEST]
    found, seen = converse(command, [("(q to quit)", key)])
    assert found == code, seen
    assert "Traceback" not in seen


@pytest.mark.slow("runs commands as programs")
def test_ctrl_c_that_came_just_before_the_wait_ends_it(folder: Path) -> None:
    """``interrupt_main`` wakes nobody from a system call, as a signal does not that came a moment too early."""
    (folder / "late.py").write_text(
        "import _thread, threading\n\n\ndef lowest(rows):\n    threading.Timer(0.5, _thread.interrupt_main).start()\n"
        "    return rows['action_mask'].argmax(axis=1)\n"
    )
    command = [sys.executable, "-m", "marlvec.cli", "play", "tictactoe", "--policy", "late.py:lowest"]
    found, seen = converse(command, [("(q to quit)", "5\n"), ("(q to quit)", "")])
    assert found == 130, seen
    assert "Traceback" not in seen


def test_a_game_is_lost_and_counted() -> None:
    result = play(*LOWEST, "--games", "1", typed="4\n5\n7\n")
    assert result.exit_code == 0
    assert "  ○ ○ ○ \n  ● ● 6 \n  ● 8 9 " in result.stdout
    assert "you lose: -1 against 1, after 6 moves" in result.stdout
    assert result.stdout.rstrip().endswith("games won 0, drawn 0, lost 1")


def test_a_seat_is_kept_and_nonsense_is_explained() -> None:
    result = play(*LOWEST, "--agent", "player_2", typed="99\n\nfive\n-1\n2\nquit\n")
    assert "game 1: you play player_2, lowest plays player_1" in result.stdout
    for typed in ("99", "", "five", "-1"):
        assert f"{typed!r} is not a move; allowed: 2, 3, 4, 5, 6, 7, 8, 9" in result.stdout
    assert "  ● ○ ● \n" in result.stdout
    assert "games won" not in result.stdout, "none was played to its end"


def test_a_full_column_is_full() -> None:
    result = play("connect_four", "--policy", "players.py:lowest", "--agent", "player_0", typed="1\n1\n1\n1\nq\n")
    assert "column 1 is full; allowed: 2, 3, 4, 5, 6, 7" in result.stdout
    assert "".join(f"  {stone} · · · · · · \n" for stone in "○●○●○●") in result.stdout


def test_simultaneous_moves_are_shown_afterwards() -> None:
    result = play("rps", "--policy", "players.py:paper", "--games", "1", "--set", "max_cycles=1", typed="2\n")
    assert result.stdout.index("move, 0 to 2") < result.stdout.index("paper plays 1")
    assert "you win: 1 against -1, after 1 moves" in result.stdout


@pytest.mark.slow("compiles the games")
def test_cards_are_shown_and_moves_have_names() -> None:
    pytest.importorskip("numba", reason="poker is a compiled world")
    result = play("kuhn_poker", "--policy", "players.py:lowest", "--games", "1", "--seed", "0", typed="raise\nb\n")
    assert re.search(r"your card [JQK] *$", result.stdout, re.M)
    assert "'raise' is not a move; allowed: pass, bet" in result.stdout
    assert re.search(r"your card [JQK]; you bet, the other passes", result.stdout)
    assert "you win: 1 against -1, after 2 moves" in result.stdout


CARDS = """
import numpy as np
from gymnasium.spaces import Box, Discrete


class Cards:
    \"\"\"Each draws a card in each of two rounds; ``MODE``\"\"\"

    metadata = {"name": "my_cards_v0", MODES}
    possible_agents = ["north", "south"]

    def __init__(self, render_mode=None):
        INIT
        self.rounds = 0

    def observation_space(self, agent):
        return Box(0, 9, (3,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.rounds = list(self.possible_agents), 0
        return self._all(np.full(3, 7, np.float32)), self._all({})

    def step(self, actions):
        self.rounds += 1
        over = self.rounds == 2
        if over:
            self.agents = []
        return (self._all(np.full(3, 7, np.float32)), {"north": 1.0, "south": 0.0}, self._all(over), self._all(False),
            self._all({}))

    def _all(self, value):
        return dict.fromkeys(self.possible_agents, value)

    def render(self):
        RENDER

    def close(self):
        pass
"""
ANSI = ('"render_modes": ["human", "ansi"]', "self.render_mode = render_mode")
ROUND = "return f'\\x1b[31mround {self.rounds}\\x1b[0m: ace of spades'"


@pytest.mark.parametrize(
    ("modes", "init", "render", "is_text"),
    [
        ("", "pass", ROUND, True),
        (*ANSI, f"assert self.render_mode == 'ansi'; {ROUND}", True),
        ('"render_modes": ["rgb_array"]', "self.render_mode = render_mode", ROUND, False),
        ("", "pass", "return np.zeros((4, 4, 3), np.uint8)", False),
        ("", "pass", "raise RuntimeError('no display')", False),
        ("", "pass", "raise NotImplementedError", False),
    ],
    ids=["one way", "ansi", "no text", "frames", "raises", "none"],
)
def test_own_games_are_shown_by_their_own_text(modes: str, init: str, render: str, is_text: bool, folder: Path) -> None:
    code = CARDS.replace("MODES", modes).replace("INIT", init).replace("RENDER", render)
    (folder / "cards.py").write_text(code, encoding="utf-8")
    result = play("cards.py:Cards", "--games", "2", "--agent", "north", typed="0\n1\n0\n0\n")
    assert result.exit_code == 0, result.output
    shown = re.findall(r"^(round \d: ace of spades|  \[7. 7. 7.\])", result.stdout, re.M)
    positions = [f"round {n}: ace of spades" for n in (0, 1, 2)] if is_text else ["  [7. 7. 7.]"] * 3
    assert shown == positions * 2
    assert result.stdout.count("you win: 2 against 0, after 2 moves") == 2


@pytest.mark.parametrize(("where", "name"), [("pool", "new"), ("pool/old", "old")])
def test_an_opponent_of_a_pool_plays(where: str, name: str) -> None:
    before = {file: file.read_bytes() for file in Path("pool").iterdir()}
    result = play("tictactoe", "--policy", f"players.py:make@{where}", "--explore", typed="1\nq\n")
    assert f"you play player_1, {name} plays player_2" in result.stdout
    assert re.search(rf"{name} plays \d$", result.stdout, re.M)
    assert {file: file.read_bytes() for file in Path("pool").iterdir()} == before


def test_a_recurrent_policy_plays_from_its_one_file() -> None:
    save_counting("mine.npz", 3)
    result = play("tictactoe", "--policy", "players.py:counting@mine.npz", typed="1\n2\nq\n")
    assert result.exit_code == 0, result.stderr
    assert "you play player_1, counting plays player_2" in result.stdout
    assert re.findall(r"counting plays (\d)$", result.stdout, re.M) == ["4", "5"]
    same = ("--connectors", "RnnState([0] * 1)")
    result = play("tictactoe", "--policy", "a=players.py:Counting@mine.npz", *same, "--agent", "player_2", typed="q\n")
    assert re.findall(r"a plays (\d)$", result.stdout, re.M) == ["4"]
    save_counting("bare.npz", 7, ())
    bare = ("tictactoe", "--policy", "players.py:counting@bare.npz", "--connectors", "RnnState(np.zeros(1))")
    result = play(*bare, "--agent", "player_2", typed="q\n")
    assert re.findall(r"counting plays (\d)$", result.stdout, re.M) == ["8"]


def save_counting(path: str, start: int, pieces: Any = None) -> None:
    """Save players.py's `Counting`, with the connector that returns it its state."""
    namespace: dict[str, Any] = {}
    exec(PLAYERS, namespace)
    policy = namespace["Counting"]()
    policy.start = np.array(start)
    chain = AgentPipeline([RnnState([0])] if pieces is None else pieces)
    save_policy(path, as_policy(policy), chain if len(chain) else None)


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("tictactoe", "--agent", "x"), "--agent x: no such agent; the agents are player_1, player_2"),
        (("CartPole-v1",), "CartPole-v1: expected at least two agents, got one, agent_0"),
        (
            ("simple_spread", "--set", "continuous_actions=True"),
            "expected a Discrete action space, whose moves a person can type",
        ),
        (("tictactoe", "--policy", "you=random"), "'you' is you"),
        (("tictactoe", "--policy", "players.py:make@none"), "expected a pool of opponents, found none in none or ."),
        (("tictactoe", "--policy", "players.py:make@empty"), "expected an opponent, but the pool is empty"),
        (("tictactoe", "--policy", "players.py:make@pool/x"), "no opponent 'x' in pool; the opponents are old, new"),
        (("tictactoe", "--policy", "players.py:make@pool/*"), "expected one player, got 2: ['old', 'new']"),
        (
            ("tictactoe", "--policy", "players.py:number@pool"),
            "function that builds the policy, or a dict, before @, got 3",
        ),
        (("tictactoe", "--policy", "players.py:none@pool"), "players.py has no 'none'"),
        (("tictactoe", "--policy", "players.py:make@none"), "or a file of save_policy()"),
        (("tictactoe", "--policy", "players.py:number@mine.npz"), "a method act(rows), or a function of rows"),
        (("tictactoe", "--policy", "players.py:lowest@mine.npz"), "FunctionPolicy: expected none, got ['start']"),
        (("tictactoe", "--policy", "players.py:anything@mine.npz"), "FunctionPolicy: expected none, got ['start']"),
        (("tictactoe", "--policy", "players.py:locked@mine.npz"), "cannot be copied (TypeError('cannot pickle a lock"),
        (("tictactoe", "--policy", "players.py:make@mine.npz"), "its state is in mine.npz"),
        (("tictactoe", "--policy", "players.py:make@players.py"), "players.py"),
        (
            ("tictactoe", "--policy", "players.py:counting@mine.npz", "--connectors", "FrameStack(2)"),
            "counting was saved with its own connectors, AgentPipeline([RnnState(initial=[0])]); leave the option out",
        ),
    ],
)
def test_errors_are_one_line(args: tuple[str, ...], words: str) -> None:
    save_counting("mine.npz", 3)
    result = play(*args, typed="")
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def played_in_the_browser(monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[Any, dict[str, str]]:
    """Run ``marlvec play … --browser``, where a client plays one game as the page does; and all that was served."""
    import webbrowser
    from urllib.parse import urlsplit
    from urllib.request import urlopen

    external = pytest.importorskip("marlvec.external")
    pytest.importorskip("websockets")
    pytest.importorskip("pygame", reason="connect_four needs marlvec[classic]")
    served: dict[str, str] = {}
    threads: list[threading.Thread] = []

    def visit(url: str) -> bool:
        assert urlsplit(url).hostname == "127.0.0.1"
        for name in ("", "page.js", "game.js", "marlvec.js", "style.css"):
            with urlopen(url + name, timeout=30) as answer:
                served[name] = answer.read().decode()
        with pytest.raises(HTTPError, match="404"):
            urlopen(url + "../commands/play.py", timeout=30)
        (where,) = re.findall(r'data-url="(.*?)"', served[""])
        assert urlsplit(where).hostname == "127.0.0.1"

        def game() -> None:
            board = np.zeros((6, 7, 2), np.int8)
            with external.Client(where) as client:
                episode = client.start_episode()
                obs = {"player_0": {"observation": board, "action_mask": np.ones(7, np.int8)}}
                served["move"] = str(client.get_action(episode, obs, masks={"player_0": np.ones(7, bool)})["player_0"])
                last = dict.fromkeys(("player_0", "player_1"), obs["player_0"])
                client.end_episode(episode, last, terminated=True)

        threads.append(threading.Thread(target=game))
        threads[0].start()
        return True

    monkeypatch.setattr(webbrowser, "open", visit)
    result = play("connect_four", "--browser", "--games", "1", *args, typed="")
    for thread in threads:
        thread.join()
    return result, served


@pytest.mark.mostly_slow("runs commands as programs", quick=3)
@pytest.mark.parametrize(
    ("policy", "said", "moves"),
    [
        ((), "random moves", "0123456"),
        (("--policy", "players.py:lowest"), "lowest (players.py:lowest)", "0"),
        (("--policy", "players.py:make@pool"), "new, a snapshot of 'new' from step 0", "0123456"),
    ],
)
def test_in_the_browser_the_page_says_truly_what_plays(
    policy: tuple[str, ...], said: str, moves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, served = played_in_the_browser(monkeypatch, *policy)
    assert result.exit_code == 0, result.output
    assert re.fullmatch(
        rf"connect four against {re.escape(said)}: http://127\.0\.0\.1:\d+/; Ctrl-C ends it", result.stdout.strip()
    )
    (shown,) = re.findall(r'You against <span id="opponent">(.*?)</span>', served[""])
    assert html.unescape(shown) == said
    assert served["move"] in moves


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("tictactoe",), "error: --browser: expected connect_four, the only env with a page, got tictactoe"),
        (
            ("connect_four", "--agent", "player_1"),
            "error: --agent player_1: not with --browser, where you and the opponent begin in turns",
        ),
    ],
)
def test_browser_rejects_envs_without_a_page(args: tuple[str, ...], line: str) -> None:
    pytest.importorskip("websockets")
    pytest.importorskip("pygame", reason="board games need marlvec[classic]")
    result = play(*args, "--browser", typed="")
    assert (result.exit_code, result.stderr.strip()) == (2, line)
