"""`TextArenaEnv`: any game of textarena as a `MultiAgentEnv`: ``make("textarena/TicTacToe-v0", num_players=2)``."""

from __future__ import annotations

import difflib
import random
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from marlvec.arguments import check_int
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import Info
from marlvec.errors import ArgumentError, ContractError, MissingExtraError, UnknownEnvError
from marlvec.extras import import_extra
from marlvec.spaces.objects import AnyText

HISTORIES = ("full", "train", "new")
_SHORT, _RAW = "-train", "-raw"  # ends of textarena's ids
_SEED_LIMIT = 2**31
_NUMBERS_TRIED = (2, 1, 3, 4, 5, 6)  # of players; four games accept any number
_PASSED_OVER = 1_000  # players in a row, more than any game has
_EXAMPLES = tuple(f"[{digit}]" for digit in range(10))  # for random play: the moves of many games
_SWAPPED_REWARD = re.compile(r"Invalid Move: (-?[\d.]+(?:e-?\d+)?)")
_MISSING_DATA = re.compile(r"nltk\.download\('(\w+)'\)")  # in nltk's own error

_PROCESS = threading.RLock()
"""Held while a game's own streams replace the process's: envs in threads share these."""
_begun: set[tuple[str, int, str]] = set()
"""Games, numbers of players and options that have begun in this process."""


class TextArenaEnv(MultiAgentEnv):
    """A game of textarena: one step is one answer, and observations and actions are texts.

    The player whose turn it is observes and acts; the others keep their last observation, None before their first turn.
    At the end, and where a limit cuts the game, all players observe. Rewards come at the end, one for every player,
    also for those whom the game put out before: until then they wait.

    A refused answer is repeated: the same player acts again, and its infos have ``"warnings"``. After the second one in
    a row the game puts the player out, or ends; a game without any player left is truncated. In the last step the infos
    of every player have ``"forfeit"`` (whether its answer ended the game for it), ``"role"`` and ``"reason"``.

    Each game is a new object, which draws from streams of its own in place of ``random`` and ``np.random``: the same
    seed repeats it, whatever else the process draws. The seed of a game comes from
    ``np.random.default_rng(seed)`` of the last reset with a seed, so one seed determines this game and all that follow.

    Args:
        game: textarena's id, without ``"-train"``: ``"TicTacToe-v0"``. ``"-raw"`` at its end leaves the answer as it
            is, where textarena adds brackets to an answer without any; it needs ``history="new"``.
        num_players: How many play; None: the first of 2, 1, 3, 4, 5, 6 that the game accepts.
        history: What a player reads: ``"full"``: all its messages of this game; ``"train"``: textarena's short form,
            of rules, messages and last board; ``"new"``: the messages since its last turn.
        options: Arguments of the game, e.g. ``max_turns=50``.

    Attributes:
        game: The id.
        textarena_env: textarena's env, in its wrappers; None before the first reset.

    Raises:
        UnknownEnvError: textarena has no such game; lists similar ids.
        MissingExtraError: textarena is not installed (extra ``textarena``), or a game needs another package, data of
            nltk, or a newer Python.
        ArgumentError: The number of players or ``history`` is wrong.
        TypeError: The game has no such argument.
    """

    def __init__(self, game: str, *, num_players: int | None = None, history: str = "full", **options: Any) -> None:
        self._library = import_extra("textarena", f"env 'textarena/{game}'", "pip install 'marlvec[textarena]'")
        self.game = game
        self.name = f"textarena/{game}"
        self._id, self._history, self._options = self._choose_form(history), history, options
        self.textarena_env: Any = None
        self._seeds = np.random.default_rng()
        self._seed: int | None = None  # of the present game
        self._moves: list[str] = []
        self._mover = 0
        players = self._try(num_players)
        self.agents = tuple(f"player_{p}" for p in range(players))
        self.observation_spaces = (AnyText(),) * players
        self.action_spaces = (AnyText(examples=_EXAMPLES),) * players

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin a game; options are ignored."""
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        text = self._begin(int(self._seeds.integers(_SEED_LIMIT)))
        for p in range(len(self.agents)):
            slot.alive[p] = True
        return self._give_turn(slot, text)

    def step(self, slot: Slot) -> Info | None:
        """Give the game the answer of the player whose turn it is."""
        mover = self._mover
        answer = slot.read_actions()[mover]
        if not isinstance(answer, str):
            raise ContractError(
                f"{self.name}: action of {self.agents[mover]}: expected a text, got {type(answer).__name__}"
            )
        slot.acting[mover] = False
        try:
            text = self._answer(str(answer))
        except _NobodyLeft:
            return self._leave(slot)
        if text is not None:
            return self._give_turn(slot, text)
        rewards, facts = self.textarena_env.close()
        infos: Info = {}
        for p, agent in enumerate(self.agents):
            slot.reward[p], reason = self._result(p, rewards, facts[p])
            slot.terminated[p] = True
            slot.alive[p] = False
            slot.write_obs(p, self._read(p))
            infos[agent] = {"forfeit": bool(facts[p]["invalid_move"]), "role": str(facts[p]["role"]), "reason": reason}
        slot.done = True
        return infos

    def cut_short(self, slot: Slot) -> None:
        """End the game here: every player observes what it has not read yet."""
        for p, alive in enumerate(slot.alive):
            if alive and p != self._mover:
                slot.write_obs(p, self._read(p))
        super().cut_short(slot)

    def _leave(self, slot: Slot) -> Info:
        """Cut a game that put every player out, and looks for the next one for ever."""
        self._mover = -1
        self.cut_short(slot)
        return {agent: {"reason": "every player is out, and the game does not end"} for agent in self.agents}

    def get_state(self) -> dict[str, Any]:
        """Return the game's seed and its moves, and the stream of seeds."""
        return {"seed": self._seed, "moves": list(self._moves), "seeds": self._seeds.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Play a game from `get_state` again, from its seed and moves."""
        self._seeds = np.random.default_rng()
        self._seeds.bit_generator.state = state["seeds"]
        self._forget()
        if state["seed"] is not None:
            self._begin(state["seed"])
            with suppress(_NobodyLeft):
                for move in state["moves"]:
                    self._answer(move)

    def _give_turn(self, slot: Slot, text: str) -> Info | None:
        mover = self._mover
        slot.acting[mover] = True
        slot.write_obs(mover, text)
        warnings = getattr(self._state, "error_count", 0)
        return {self.agents[mover]: {"warnings": int(warnings)}} if warnings else None

    def _result(self, player: int, rewards: Any, facts: dict[str, Any]) -> tuple[float, str]:
        """Return a player's reward and the reason for it."""
        reward, reason = (rewards or {}).get(player), str(facts.get("reason") or "")
        if isinstance(reward, str) and (number := _SWAPPED_REWARD.fullmatch(reason)):
            # Four games for one player hand both to textarena in the wrong order.
            reward, reason = float(number[1]), f"Invalid Move: {reward}"
        if not isinstance(reward, (int, float, np.number)):
            raise ContractError(f"{self.name}: reward of player {player}: expected a number at the end, got {reward!r}")
        return float(reward), reason

    def _begin(self, seed: int, players: int | None = None) -> str:
        """Begin a game; return the text for the player whose turn it is."""
        stream = random.Random(seed)
        self._stream, self._numpy_stream = stream.getstate(), np.random.RandomState(seed).get_state(legacy=False)
        self._draws_numpy = True  # until it is known
        self.textarena_env = None
        self._is_beginning = False
        with self._own_streams():
            env = self._library.make(self._id, **self._options)
            self._is_beginning = True
            env.reset(num_players=len(self.agents) if players is None else players, seed=seed)
            self._is_beginning = False
            layers = list(_layers(env, self._library.Wrapper))
            self._base = layers[-1]
            self._view = next((layer for layer in layers if isinstance(layer, self._library.ObservationWrapper)), None)
            self._state = self._base.state
            if isinstance(out := getattr(self._state, "elimination_order", None), list):
                self._state.elimination_order = _Out(out)
            self.textarena_env, self._seed, self._moves = env, seed, []
            self._draws_numpy = _imports_numpy(type(self._base).__module__)
            return self._look()

    def _answer(self, text: str) -> str | None:
        """Play an answer; return the text for the player whose turn it is, or None if the game is over."""
        with self._own_streams():
            self._moves.append(text)
            over, _ = self.textarena_env.step(text)
            return None if over else self._look()

    def _look(self) -> str:
        """Return the text for the player whose turn it is, as textarena gives it."""
        source = self._base if self._history == "new" else self.textarena_env
        try:
            self._mover, seen = source.get_observation()
        except (IndexError, ValueError) as error:
            if self._history != "train":
                raise
            raise ArgumentError(
                f"{self.name} has no short form, since it showed its player no board ({error}): expected "
                f"history='full' or 'new', got 'train'"
            ) from error
        text = seen if isinstance(seen, str) else self._render(seen)
        return text

    def _read(self, player: int) -> str:
        """Return the text for a player who has no turn: its messages are taken from the game's state."""
        messages, self._state.observations[player] = self._state.observations[player], []
        if self._history == "new" or self._view is None:
            return self._render(messages)
        try:
            text: str = self._view.observation(player, messages)
        except (IndexError, ValueError):  # the short form of a player who was shown no board
            return self._render(self._view.full_observations[player])
        return text

    def _render(self, messages: Iterable[tuple[int, str, Any]]) -> str:
        """Return messages as textarena's own wrapper joins them."""
        names = self._state.role_mapping
        return "".join(
            f"\n[{'GAME' if sender == self._library.GAME_ID else names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in messages
        )

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """In this context the process draws from the game's streams, and nltk fetches nothing."""
        nltk: Any = sys.modules.get("nltk")
        with _PROCESS:
            outside, download, with_numpy = random.getstate(), getattr(nltk, "download", None), self._draws_numpy
            numpy_outside = np.random.get_state(legacy=False) if with_numpy else None  # noqa: NPY002  # games draw from it
            random.setstate(self._stream)
            if with_numpy:
                np.random.set_state(self._numpy_stream)  # noqa: NPY002  # likewise
            if download is not None:
                nltk.download = _fetch_nothing
            try:
                yield
            finally:
                if download is not None:
                    nltk.download = download
                self._stream = random.getstate()
                random.setstate(outside)
                if numpy_outside is not None:
                    self._numpy_stream = np.random.get_state(legacy=False)  # noqa: NPY002  # likewise
                    np.random.set_state(numpy_outside)  # noqa: NPY002  # likewise

    # --- Whether a game can begin

    def _choose_form(self, history: str) -> str:
        """Return textarena's id of this game in the form of ``history``."""
        game, known = self.game, self._library.envs.registration.ENV_REGISTRY
        if history not in HISTORIES:
            raise ArgumentError(f"history: expected {', '.join(map(repr, HISTORIES))}, got {history!r}")
        if game not in known:
            plain = [name for name in known if not name.endswith((_SHORT, _RAW))]
            near = difflib.get_close_matches(game, plain, n=5, cutoff=0.6)
            hint = f"Did you mean {' or '.join(repr(f'textarena/{name}') for name in near)}? " if near else ""
            raise UnknownEnvError(
                f"unknown env 'textarena/{game}'. {hint}textarena.envs.registration.ENV_REGISTRY has textarena's ids"
            )
        if game.endswith(_SHORT):
            bare = game.removesuffix(_SHORT)
            raise ArgumentError(f"textarena/{game}: make('textarena/{bare}', …, history='train') has this form")
        if game.endswith(_RAW) and history != "new":
            raise ArgumentError(f"textarena/{game} keeps no history: expected history='new', got {history!r}")
        form = game + _SHORT if history == "train" else game
        wrappers = known[form].default_wrappers if form in known else None
        if history != "new" and not any(issubclass(one, self._library.ObservationWrapper) for one in wrappers or ()):
            raise ArgumentError(f"textarena/{game} has no form of history={history!r}; history='new' is there")
        return form

    def _try(self, num_players: int | None) -> int:
        """Begin a game, and forget it; return the number of players."""
        if num_players is not None:
            check_int(f"textarena/{self.game}: num_players", num_players, 1)
        options = repr(sorted(self._options.items()))
        refusals: list[Exception] = []
        tried = _NUMBERS_TRIED if num_players is None else (num_players,)
        for players in tried:
            if (self._id, players, options) not in _begun:
                try:
                    with self._explained():
                        self._begin(0, players)
                except (AssertionError, ValueError) as error:  # what games raise for a number that they do not accept
                    if not self._is_beginning:
                        raise
                    refusals.append(error)
                    continue
                self._forget()
                _begun.add((self._id, players, options))
            return players
        raise ArgumentError(
            f"{self.name} does not begin with num_players={' or '.join(map(str, tried))}; textarena's error: "
            f"{refusals[0]}"
        ) from refusals[0]

    def _forget(self) -> None:
        self._seed, self._moves, self.textarena_env = None, [], None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """In this context, errors of games that need something else say what."""
        try:
            yield
        except SyntaxError as error:
            if sys.version_info >= (3, 12) or "f-string" not in str(error):
                raise
            raise MissingExtraError(
                f"env 'textarena/{self.game}' needs Python 3.12: textarena's code of this game is not that of "
                f"{sys.version_info.major}.{sys.version_info.minor} ({error})"
            ) from error
        except ImportError as error:
            raise MissingExtraError(
                f"env 'textarena/{self.game}' needs a package that textarena does not bring: {error}"
            ) from error
        except LookupError as error:
            data = _MISSING_DATA.search(str(error))
            if data is None:
                raise
            raise MissingExtraError(
                f"env 'textarena/{self.game}' needs nltk's data {data[1]!r}, which marlvec does not fetch by itself; "
                f"to fetch it: python -m nltk.downloader {data[1]}"
            ) from error


class _NobodyLeft(Exception):
    """A game looks for a player who is not out, and there is none."""


class _Out(list[int]):
    """Players that a game put out. textarena passes over them in a loop, which must end when there are no others."""

    def __init__(self, players: Iterable[int]) -> None:
        super().__init__(players)
        self._passed = 0

    def __contains__(self, player: object) -> bool:
        found = super().__contains__(player)
        self._passed = self._passed + 1 if found else 0
        if self._passed > _PASSED_OVER:
            raise _NobodyLeft
        return found


def _fetch_nothing(*_: Any, **__: Any) -> bool:
    """Stand in for ``nltk.download``, which games call when they are imported, and some for each game."""
    return True


def _layers(env: Any, wrapper: type) -> Iterator[Any]:
    """Yield an env of textarena's, from its outermost wrapper to the game."""
    yield env
    while isinstance(env, wrapper):
        env = vars(env)["env"]
        yield env


@cache
def _imports_numpy(module: str) -> bool:
    """Return whether a module, or another one of its package, has numpy under a name of its own."""
    package = module.rpartition(".")[0] or module
    found = [one for name, one in list(sys.modules.items()) if name == module or name.startswith(package + ".")]
    return any(value is np for one in found for value in vars(one).values())
