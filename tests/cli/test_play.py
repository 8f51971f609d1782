"""``marlvec play`` and ``marlvec arena``, as somebody who plays meets them; and what the page of a game serves."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from typer.testing import CliRunner

from marlvec import RandomPolicy
from marlvec.cli import app
from marlvec.cli.game import PageServer
from marlvec.connectors import AgentPipeline, RnnState
from marlvec.policies import as_policy, save_policy
from marlvec.selfplay import Opponent, OpponentPool, evaluate_match
from tests.programs import converse

# --- ``marlvec play``, as somebody who plays meets it


PLAYERS = '''
import numpy as np
from marlvec import Policy, RandomPolicy, ScriptedPolicy

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

def _corner(obs, agent, t, memory):
    """The centre and corners first; any other field else."""
    allowed = np.flatnonzero(memory.action_mask)
    good = [i for i in (4, 0, 2, 6, 8) if i in allowed]
    return good[0] if good else int(memory.rng.choice(allowed))

corner = ScriptedPolicy(_corner)

class Turning(Policy):
    """Plays the first allowed field from a place on that moves in each of its turns."""

    def __init__(self, start):
        self.start = start

    def act(self, rows, *, explore=True):
        mask, state = rows["action_mask"], rows["state_in"]
        begin = (state[:, 0] + self.start).astype(np.int64)
        order = (begin[:, None] + np.arange(9)) % 9
        first = np.take_along_axis(mask, order, axis=1).argmax(axis=1)
        return order[np.arange(len(order)), first], {"state_out": state + 3}

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]

turning = Turning(7)

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


def test_files_may_have_an_at_sign_in_their_names() -> None:
    """Before the attribute, after it, or both."""
    home = Path("a@b")
    home.mkdir()
    (home / "players.py").write_bytes(Path("players.py").read_bytes())
    save_counting("mine.npz", 3)
    Path("mine.npz").rename(home / "my@own.npz")
    for maker in ("players.py", "a@b/players.py"):
        result = play("tictactoe", "--policy", f"{maker}:counting@a@b/my@own.npz", typed="1\nq\n")
        assert result.exit_code == 0, result.stderr
        assert re.findall(r"counting plays (\d)$", result.stdout, re.M) == ["4"]
    result = play("tictactoe", "--policy", "a@b/players.py:lowest", typed="q\n")
    assert (result.exit_code, result.stderr) == (0, "")


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


# --- The page of `marlvec play --browser`: what it serves, to whom, and what it shows as text


NAME = '<img src=x onerror="alert(1)">&'


def ask(page: PageServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    """Status and body of one request; the path goes as it is."""
    there = urllib.parse.urlsplit(page.url)
    connection = http.client.HTTPConnection(str(there.hostname), there.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", (host or "127.0.0.1:{}").format(there.port))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_it_serves_its_files_and_no_others() -> None:
    with PageServer("random", "ws://127.0.0.1:8765/") as page:
        for path in ("/", "/index.html", "/marlvec.js", "/page.js", "/game.js", "/style.css", "/?a=b"):
            assert ask(page, path)[0] == 200, path
        for path in (
            "/README.md",
            "/../page_server.py",
            "/%2e%2e/page_server.py",
            "//etc/passwd",
            "/etc/passwd",
            "http://x/",
        ):
            assert ask(page, path) == (404, ""), path
        assert ask(page, "/", method="POST")[0] == 501


@pytest.mark.parametrize("host", ["evil.example:{}", "127.0.0.1.evil.example:{}", "evil.example", "localhost.:{}", ""])
def test_names_that_are_made_to_lead_here_get_nothing(host: str) -> None:
    with PageServer("random", "ws://127.0.0.1:8765/") as page:
        assert ask(page, "/", host) == (403, "")
        assert ask(page, "/", "localhost:{}")[0] == 200


def test_names_are_text() -> None:
    """Of the opponent, and the url."""
    with PageServer(NAME, 'ws://x/"><script>') as page:
        _, text = ask(page, "/")
    assert "<img" not in text
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;" in text
    assert 'data-url="ws://x/&quot;&gt;&lt;script&gt;"' in text


# --- ``marlvec arena``, as somebody at a terminal meets it


def arena(*args: str, env: str = "tictactoe", backend: str = "sync") -> Any:
    result = CliRunner().invoke(app, ["arena", env, "--backend", backend, *args], prog_name="marlvec")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow("runs commands as programs")
def test_standings_are_sorted_and_numbers_add_up() -> None:
    result = arena("random", "players.py:corner", "players.py:make@pool", "--games", "30", "--plot", "arena.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "180 games" in result.stdout
    rows = {}
    for line in result.stdout.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] in ("random", "corner", "new") and len(cells) == 10:
            rows[cells[0]] = cells[1:]
    assert next(iter(rows)) == "corner", "the best first"
    games, won, drawn, lost = ([int(row[k]) for row in rows.values()] for k in (1, 2, 3, 4))
    assert games == [120] * 3
    assert sum(won) == sum(lost)
    assert sum(won) + sum(drawn) + sum(lost) == 2 * 180
    assert "bradley-terry" in result.stdout
    ratings = {name: tuple(map(int, row[0].split(" ± "))) for name, row in rows.items()}
    assert ratings["corner"][0] > 1000 > min(rating for rating, _ in ratings.values())
    assert sum(rating for rating, _ in ratings.values()) == pytest.approx(3000, abs=2)
    assert all(20 < error < 80 for _, error in ratings.values())
    low, high = map(float, re.findall(r"[\d.]+", rows["corner"][6]))
    assert 50 < low < float(rows["corner"][5].rstrip("%")) < high < 100
    assert re.search(r"^ *corner( +\d+–\d+–\d+| +–){3} *$", result.stdout, re.M)
    assert re.search(r"\d+% \[\d+%, \d+%\]", result.stdout)
    assert "Plot: arena.png" in result.stdout
    assert Path("arena.png").read_bytes().startswith(b"\x89PNG")


def test_equal_seeds_give_equal_tables_wherever_it_runs() -> None:
    args = ("random", "other=random", "--games", "10")
    first = arena(*args, "--seed", "4").stdout
    assert arena(*args, "--seed", "4", backend="thread").stdout == first
    assert arena(*args, "--seed", "5").stdout != first


def test_a_whole_pool_plays_and_may_be_given_a_name() -> None:
    printed = arena("first=players.py:make@pool/*", "players.py:make@pool/old", "--games", "2").stdout
    assert all(re.search(rf"^ *{name} ", printed, re.M) for name in ("first/old", "first/new", "old"))
    assert "12 games" in printed


def test_files_of_policies_play_with_the_connectors_in_them(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(PLAYERS, namespace)
    for name, start in (("one", 1), ("two", 0)):
        save_policy(f"{name}.npz", namespace["Turning"](start), AgentPipeline([RnnState(np.zeros(1))]))
    files = ("players.py:turning@one.npz", "players.py:turning@two.npz")
    found = json.loads(arena(*files, "random", "--games", "4", "--json").stdout)
    assert {player["id"] for player in found["players"]} == {"one/turning", "two/turning", "random"}
    assert found["games"] == 24
    players = {
        name: Opponent.from_file(f"{file}.npz", lambda: namespace["Turning"](5))
        for name, file in (("one/turning", "one"), ("two/turning", "two"))
    }
    wanted = evaluate_match({**players, "random": RandomPolicy()}, "tictactoe", 24, backend="sync", seed=0)
    for player in found["players"]:
        total = wanted.table.total(player["id"])
        assert (player["wins"], player["losses"]) == (total.wins, total.losses)
    chain = ("--connectors", "turning=RnnState([0.0] * 1)")
    save_policy("bare.npz", namespace["Turning"](0))
    bare = arena("players.py:turning@bare.npz", "random", "--games", "4", *chain, "--json")
    assert json.loads(bare.stdout)["games"] == 8
    result = arena("players.py:turning@one.npz", "random", "--connectors", "turning=RnnState([1.0])")
    assert (result.exit_code, "turning was saved with its own connectors" in result.stderr) == (2, True)


def test_opponent_of_a_pool_with_the_name_of_another_player_gets_its_folder_as_well(folder: Path) -> None:
    OpponentPool(RandomPolicy, folder=folder / "more").add("random", RandomPolicy())
    printed = arena("players.py:make@more/*", "random", "--games", "2").stdout
    assert all(re.search(rf"^ *{name} ", printed, re.M) for name in ("more/random", "random"))


def test_intervals_are_of_the_confidence_that_was_asked_for() -> None:
    widths = []
    for confidence in ("0.5", "0.95"):
        printed = arena("random", "players.py:corner", "--games", "20", "--confidence", confidence).stdout
        found = re.search(r"^ *corner +\d+ ± (\d+) +40 ", printed, re.M)
        assert found, printed
        widths.append(int(found[1]))
    assert 2 < widths[1] / widths[0] < 4, "1.96 to 0.67"


def test_json_has_what_the_tables_have() -> None:
    found = json.loads(arena("random", "players.py:corner", "--games", "20", "--json").stdout)
    best, other = found["players"]
    assert (best["id"], best["games"], found["games"]) == ("corner", 40, 40)
    assert (best["wins"], best["losses"]) == (other["losses"], other["wins"])
    low, high = best["rating_interval"]
    assert low < best["rating"] < high
    assert best["sides"]["player_1"]["games"] == 20
    (pair,) = [pair for pair in found["pairs"] if pair["player"] == "corner"]
    assert (pair["against"], pair["wins"]) == ("random", best["wins"])
    elo = json.loads(arena("random", "players.py:corner", "--games", "2", "--rating", "elo", "--json").stdout)
    assert elo["players"][0]["rating_interval"] == [None, None]


def test_no_number_is_cut_where_the_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    players = ("random", "a_name_of_some_length=random", "b=random", "c=random", "d=random")
    wide = arena(*players, "--games", "1").stdout
    monkeypatch.setattr("marlvec.cli.console._WIDTH_IN_A_PIPE", 80)
    printed = arena(*players, "--games", "1").stdout
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert len(re.findall(r"\d+–\d+–\d+ +\d+% \[\d+%, \d+%\]", printed)) == 10, "every pair once"
    ratings = re.findall(r"\d+ ± \d+", wide)
    assert re.findall(r"\d+ ± \d+", printed) == ratings
    assert len(ratings) == 5


@pytest.mark.mostly_slow("runs commands as programs", quick=3)
@pytest.mark.parametrize(("kind", "module"), [("elo", "marlvec"), ("skill", "openskill"), ("alpha-rank", "pyspiel")])
def test_players_can_be_rated_in_other_ways(kind: str, module: str) -> None:
    pytest.importorskip(module)
    printed = arena("random", "players.py:corner", "--games", "20", "--rating", kind).stdout
    names = [line.split()[0] for line in printed.splitlines() if line.strip().startswith(("random ", "corner "))]
    assert names[:2] == ["corner", "random"]


@pytest.mark.mostly_slow("runs commands as programs", quick=2)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("random",), "policies: expected at least two"),
        (("random", "random"), "there are two players 'random'; give one another id: ID=random"),
        (("random", "a=random", "--confidence", "1"), "--confidence 1.0: expected a number between 0 and 1"),
        (("random", "a=random", "--plot", "a.docx"), "--plot a.docx: expected a name that ends in one of"),
        (("random", "players.py:make@pool/x"), "no opponent 'x' in pool"),
        (("random", "a=random", "--connectors", "b=FlattenObs"), "no policy 'b'"),
    ],
)
def test_errors_of_arena_are_one_line(args: tuple[str, ...], words: str) -> None:
    result = arena(*args)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


THREADS = """
import numpy as np
import marlvec.vector.cores

def first(rows):
    import torch
    with open("threads", "w") as file:
        file.write(str(torch.get_num_threads()))
    return np.argmax(rows["action_mask"], axis=1)
"""


@pytest.mark.slow("runs commands as programs")
def test_torch_has_as_many_threads_as_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a container's quota is one core of several; torch is there already, or is imported by a policy."""
    pytest.importorskip("torch")
    (tmp_path / "threads.py").write_text(THREADS, encoding="utf-8")
    command = ("arena", "tictactoe", "random", "threads.py:first", "--games", "1", "--backend", "sync")
    script = f"""
import os, sys
import marlvec.vector.cores
{{before}}
given = dict(os.environ)
marlvec.vector.cores.usable_cores = lambda: 1
sys.argv = ["marlvec", *{command!r}]
from marlvec.cli.console import torch_within_cores
from marlvec.cli import app
app(prog_name="marlvec", standalone_mode=False)
assert os.environ.get("OMP_NUM_THREADS") == given.get("OMP_NUM_THREADS")
{{after}}
"""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    for before, after in (
        ("", "assert 'torch' in sys.modules"),
        ("import torch; torch.set_num_threads(3)", "assert torch.get_num_threads() == 3"),
    ):
        code = script.format(before=before, after=after)
        subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, cwd=tmp_path)
        assert Path("threads").read_text(encoding="utf-8") == "1"
        Path("threads").unlink()
