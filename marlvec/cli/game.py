"""A person plays: `GameUI` draws boards as text, `HumanPolicy` prompts for actions, `PageServer` serves the page."""

from __future__ import annotations

import html
import select
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from marlvec.collect import EpisodeRecord
from marlvec.collect.callbacks import Callback, EpisodeStep, RunningEpisode
from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, MarlvecError
from marlvec.policies import Policy
from marlvec.policies.policy import PolicyOutput
from marlvec.policies.policy_map import SharedPolicy
from marlvec.serialization.saved import ProcessBound
from marlvec.trees import map_tree
from marlvec.vector import VectorEnv
from marlvec.vector.settings import LONGEST_WAIT

_STONES = (("●", "bold yellow"), ("○", "bold red"))
"""Stones of the first and of the second player; distinct without colours, too."""


@dataclass(frozen=True)
class GameUI:
    """Display and move names of one game."""

    moves: Sequence[str]  # names of actions
    ask: str  # the prompt
    draw: Callable[[Any, int], Text]  # from an observation and its agent's index
    refuse: Callable[[str], str]  # from a move's name to why it is not allowed
    is_general: bool = False  # for any game: the text of the env's own render() is better, if it returns text

    def action(self, typed: str) -> int | None:
        """Return the number of the move with this name or unique prefix; None if there is none."""
        typed = typed.strip().lower()
        found = [i for i, name in enumerate(self.moves) if name == typed]
        found = found or [i for i, name in enumerate(self.moves) if typed and name.startswith(typed)]
        return found[0] if len(found) == 1 else None


def game_ui_of(name: str, action_space: Space[Any]) -> GameUI:
    """Return the display of a game: its own, or a general one of texts and numbers, for any Discrete actions."""
    if not isinstance(action_space, Discrete):
        raise ArgumentError(
            f"{name}: expected a Discrete action space, whose moves a person can type, got {action_space}"
        )
    game = name.rpartition("/")[2].rpartition("_v")[0] or name
    if game in _GAME_UIS:
        return _GAME_UIS[game]
    numbers = [str(i) for i in range(int(action_space.n))]
    return GameUI(
        numbers, f"move, 0 to {len(numbers) - 1}", _as_text, lambda move: f"{move} is not allowed now", is_general=True
    )


class RenderedText:
    """The text of an env's own ``render()``; None for good once it returns something else, or raises."""

    def __init__(self, envs: VectorEnv) -> None:
        self._envs: VectorEnv | None = envs

    def __call__(self) -> Text | None:
        if self._envs is None:
            return None
        try:
            (drawn,) = self._envs.render()
        except MarlvecError:
            drawn = None
        if isinstance(drawn, str) and drawn.strip():
            return Text.from_ansi(drawn)
        self._envs = None
        return None


def _board(obs: NDArray[Any], agent: int, empty: Callable[[int, int], str]) -> list[Text]:
    """Return lines of a board observed as planes of the agent's own stones and of the other's."""
    lines = []
    for row in range(obs.shape[0]):
        line = Text("  ")
        for column in range(obs.shape[1]):
            own, other = obs[row, column, :2]
            if own or other:
                line.append(*_STONES[agent if own else 1 - agent])
            else:
                line.append(empty(row, column), "dim")
            line.append(" ")
        lines.append(line)
    return lines


def _connect_four(obs: Any, agent: int) -> Text:
    board = _board(np.asarray(obs), agent, lambda row, column: "·")
    return Text("\n").join([*board, Text("  1 2 3 4 5 6 7", "cyan")])


def _tictactoe(obs: Any, agent: int) -> Text:
    # Fields have the numbers of the env's actions, row by row.
    return Text("\n").join(_board(np.asarray(obs), agent, lambda row, column: str(3 * row + column + 1)))


def _kuhn(obs: Any, agent: int) -> Text:
    """Draw OpenSpiel's tensor: player (2), card (3), pass or bet of each of three moves (6)."""
    card = "JQK"[int(np.argmax(obs[2:5]))]
    moves = [int(pair.argmax()) for pair in np.reshape(obs[5:11], (3, 2)) if pair.any()]
    own, others = ("you pass", "you bet"), ("the other passes", "the other bets")
    played = [(own if i % 2 == agent else others)[move] for i, move in enumerate(moves)]
    return Text.assemble("  your card ", (card, "bold cyan"), f"; {', '.join(played)}" if played else "")


def _as_text(obs: Any, agent: int) -> Text:
    with np.printoptions(precision=3, suppress=True, threshold=200):
        return Text("\n".join(f"  {line}" for line in str(obs).splitlines()))


_GAME_UIS = {
    "connect_four": GameUI(
        [str(i) for i in range(1, 8)], "column, 1 to 7", _connect_four, lambda move: f"column {move} is full"
    ),
    "tictactoe": GameUI(
        [str(i) for i in range(1, 10)], "field, 1 to 9", _tictactoe, lambda move: f"field {move} is taken"
    ),
    "kuhn_poker": GameUI(["pass", "bet"], "pass or bet", _kuhn, lambda move: f"you cannot {move} now"),
}


_LEAVE = ("q", "quit", "exit")


class Quit(Exception):
    """Raised when the person quits."""


class HumanPolicy(Policy):
    """Shows each observation, and prompts until an allowed move is typed; raises `Quit`."""

    ui: GameUI

    def __init__(self, game: str, console: Console, render: Callable[[], Text | None]) -> None:
        self._game, self._console, self._render = game, console, render
        self.start = 0

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self.ui = game_ui_of(self._game, action_space)
        self.start = int(action_space.start) if isinstance(action_space, Discrete) else 0
        super().setup(observation_space, action_space, seed=seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        masks = rows.get("action_mask", np.ones((len(rows), len(self.ui.moves)), np.bool_))
        agents = rows["agent_index"].tolist()
        return np.array(
            [self._ask(map_tree(itemgetter(i), rows["obs"]), agents[i], masks[i]) for i in range(len(rows))]
        )

    def text_now(self) -> Text | None:
        """Return the env's own text of the present position, if that is what is shown."""
        return self._render() if self.ui.is_general else None

    def _ask(self, obs: Any, agent: int, allowed: Any) -> int:
        moves = self.ui.moves
        self._console.print(self.text_now() or self.ui.draw(obs, agent))
        prompt = Text.assemble((self.ui.ask, "bold"), (" (q to quit)", "dim"), ": ")
        while True:
            try:
                self._console.print(prompt, end="")
                _wait_for_a_line()
                typed = self._console.input().strip()
            except EOFError:
                self._console.print()
                raise Quit from None
            if typed.lower() in _LEAVE:
                raise Quit
            action = self.ui.action(typed)
            if action is not None and allowed[action]:
                return self.start + action
            why = f"{typed!r} is not a move" if action is None else self.ui.refuse(moves[action])
            legal = ", ".join(name for name, may in zip(moves, allowed, strict=True) if may)
            self._console.print(Text(f"{why}; allowed: {legal}", "yellow"))


def _wait_for_a_line() -> None:
    """Return once a line, or the end of input, can be read from the terminal.

    Ctrl-C just before the wait does not interrupt it, so every wait is short. On Windows, where only sockets can be
    waited for, reading the line waits.
    """
    while sys.platform != "win32" and sys.stdin.isatty() and not select.select([sys.stdin], [], [], LONGEST_WAIT)[0]:
        pass


class AnnouncingPolicy(SharedPolicy):
    """A policy whose moves are recorded, to show them once all agents have moved."""

    def __init__(self, name: str, host: Policy) -> None:
        super().__init__(name, host)
        self.noted: list[tuple[int, int]] = []  # (agent index, action) of moves that were not shown yet

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        output = super().act(rows, explore=explore)
        actions = np.asarray(output[0] if isinstance(output, tuple) else output).tolist()
        self.noted += zip(rows["agent_index"].tolist(), actions, strict=True)
        return output


_RESULTS = (("you win", "bold green"), ("a draw", "bold yellow"), ("you lose", "bold red"))


class PlayCallback(Callback):
    """Shows a person the course of games; a callback of the collector that plays them."""

    def __init__(
        self, console: Console, you: HumanPolicy, other: AnnouncingPolicy, name: str, agents: Sequence[str]
    ) -> None:
        self._console, self._you, self._other, self._name, self._agents = console, you, other, name, agents
        self._own_index = 0
        # The game whose end is shown next, the person's agent, and the env's own text of the last position.
        self._ended: tuple[EpisodeRecord, int, Text | None] | None = None
        self._header: str | None = None  # header of the next game
        self._results: Counter[str] = Counter()

    def on_episode_start(self, episode: RunningEpisode) -> None:
        self._own_index = next(a for a, name in enumerate(episode.policies) if name != self._name)
        them = ", ".join(name for a, name in enumerate(self._agents) if a != self._own_index)
        self._header = f"game {episode.number + 1}: you play {self._agents[self._own_index]}, {self._name} plays {them}"
        if self._ended is None:  # otherwise the last game ended in the same step
            self.begin_game()

    def on_episode_step(self, step: EpisodeStep) -> None:
        moves, self._other.noted = self._other.noted, []  # shown only once all have moved
        for agent, action in moves:
            who = self._name if len(self._agents) == 2 else f"{self._name} as {self._agents[agent]}"
            self._print(f"{who} plays {self._you.ui.moves[action - self._you.start]}", "magenta")

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self._ended = record, self._own_index, self._you.text_now()

    def begin_game(self) -> None:
        """Print the players of a new game, once."""
        if self._header is not None:
            self._print(self._header, "bold")
        self._header = None

    def end_game(self, obs: Any | None) -> None:
        """Print the last position, as the person observes it, if at all, and the result."""
        assert self._ended is not None  # set by the episode that was just collected
        (record, own_index, text), self._ended = self._ended, None
        if text is not None or obs is not None:
            self._console.print(text or self._you.ui.draw(obs, own_index))
        own = float(record.returns_A[own_index])
        best = max(float(value) for a, value in enumerate(record.returns_A) if a != own_index)
        result, style = _RESULTS[0 if own > best else 1 if own == best else 2]
        self._results[result] += 1
        self._print(f"{result}: {own:g} against {best:g}, after {record.length} moves\n", style)

    def print_results(self) -> None:
        if self._results:
            won, drawn, lost = (self._results[result] for result, _ in _RESULTS)
            self._print(f"games won {won}, drawn {drawn}, lost {lost}", "bold")

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style))


FOLDER = Path(__file__).resolve().parent / "browser"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HOSTS = ("127.0.0.1", "localhost")
_URL = 'data-url="ws://127.0.0.1:8765/"'
_BEGIN, _END = '<span id="opponent">', "</span>"


def page_of(opponent: str, url: str) -> str:
    """Return the page's HTML, "You against ``opponent``", for the policy server at ``url``, ``ws://…``."""
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    before, _, rest = text.replace(_URL, f'data-url="{html.escape(url)}"').partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{html.escape(opponent)}{_END}{after}"


class PageServer(ProcessBound):
    """Serves the page from a thread until closed; use it in a ``with`` block.

    It answers only requests to 127.0.0.1 and localhost: a foreign page whose name resolves to this machine (DNS
    rebinding) receives nothing.
    """

    def __init__(self, opponent: str, url: str) -> None:
        files = {f"/{path.name}": path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
        files["/"] = files["/index.html"] = page_of(opponent, url).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.partition("?")[0]
                found = files.get(name)
                status = 200 if found is not None else 404
                if self.headers.get("Host", "").rpartition(":")[0] not in _HOSTS:
                    status, found = 403, None
                self.send_response(status)
                kind = _TYPES.get(Path(name).suffix, _TYPES[".html"])
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(found or b"")))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(found or b"")

            def log_message(self, *args: Any) -> None:
                """Discard log lines, which would clutter the player's terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="marlvec page", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        if not self._is_forked:  # a fork has no thread that would answer
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._check_process("with PageServer")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
