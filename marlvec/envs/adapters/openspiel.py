"""`OpenSpielEnv`: any game of OpenSpiel as a `MultiAgentEnv`: ``make("openspiel/kuhn_poker")``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import Info
from marlvec.errors import ArgumentError, ContractError, UnknownEnvError
from marlvec.extras import import_extra

_INFORMATION_STATE, _OBSERVATION = "information_state", "observation"
_GAME_SEED = "rng_seed"  # parameter of games with their own generator; in other games "seed" belongs to the rules
_SEED_LIMIT = 2**31 - 1


class OpenSpielEnv(MultiAgentEnv):
    """A game of OpenSpiel: one step is one move, or one joint move if the players move simultaneously.

    The player to move observes, and gets the legal actions as its mask; the others keep their last observation. At the
    end all players observe. Chance nodes are resolved in the step, or the reset, that leads to them: each outcome is
    ``rng.choice(outcomes, p=probabilities)``, where ``rng`` is ``np.random.default_rng(seed)`` of the last reset with a
    seed. So one seed determines this game and all that follow.

    Rewards are the game's returns, in the step in which the game ends. In games that reward moves, they are the change
    of the returns since the last step, including chance nodes.

    Args:
        game: A name, or a name and parameters in OpenSpiel's syntax, ``"misere(game=kuhn_poker())"``, or a
            ``pyspiel.Game``.
        observation: The tensor to observe: ``"information_state"`` (all that the player knows), ``"observation"`` (what
            it sees now), or ``"auto"``: the first of these that the game has.
        render_mode: ``"ansi"``: `render` returns OpenSpiel's own text.
        parameters: Parameters of the game, e.g. ``players=3``.

    Attributes:
        game: The ``pyspiel.Game``.
        game_state: The ``pyspiel.State``; None before the first reset.

    Raises:
        UnknownEnvError: OpenSpiel has no such game; lists similar names.
        MissingExtraError: OpenSpiel is not installed (extra ``openspiel``).
        ArgumentError: The game has no such tensor, is a mean field game, or refuses a parameter's value; or
            ``rng_seed`` is given, which only resets may set.
        TypeError: The game has no such parameter.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(
        self, game: Any, *, observation: str = "auto", render_mode: str | None = None, **parameters: Any
    ) -> None:
        self._spiel = import_extra("pyspiel", f"env 'openspiel/{game}'", "pip install 'marlvec[openspiel]'")
        self.render_mode = render_mode
        self._rng = np.random.default_rng()
        self._name, self._parameters = game, parameters
        self.game = self._load(None) if isinstance(game, str) else game
        kind = self.game.get_type()
        self.name = f"openspiel/{kind.short_name}"
        if kind.dynamics == self._spiel.GameType.Dynamics.MEAN_FIELD:
            raise ArgumentError(f"{self.name} is a mean field game: it has no players with turns of their own")
        self._draws = self._is_drawn_inside(kind)
        self._rewards_moves = kind.reward_model == self._spiel.GameType.RewardModel.REWARDS
        self._kind = self._choose_tensor(observation, kind)
        shape = getattr(self.game, f"{self._kind}_tensor_shape")()
        players, actions = self.game.num_players(), self.game.num_distinct_actions()
        self._shape = tuple(shape)
        self.agents = tuple(f"player_{p}" for p in range(players))
        self.observation_spaces = (Box(-np.inf, np.inf, self._shape, np.float32),) * players
        self.action_spaces = (Discrete(actions),) * players
        self.mask_sizes = (actions,) * players
        self.game_state: Any = None
        self._legal: dict[int, Sequence[int]] = {}  # player that acts → its legal actions

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin a game; options are ignored."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
            if self._draws:
                self.game = self._load(int(self._rng.integers(_SEED_LIMIT)))
        self.game_state = self.game.new_initial_state()
        self._pass_chance()
        for p in range(len(self.agents)):
            slot.alive[p] = True
        self._give_turns(slot)
        return None

    def step(self, slot: Slot) -> Info | None:
        """Make the move of the player whose turn it is, and resolve all chance nodes after it.

        Raises:
            ValueError: The move is not legal; the game is unchanged.
        """
        state, actions = self.game_state, slot.read_actions()
        for p, legal in self._legal.items():
            if actions[p] not in legal:
                raise ValueError(
                    f"{self.name}: action {actions[p]} of {self.agents[p]} is not legal; legal are {legal}"
                )
        won_before = self._read_returns()
        if state.is_simultaneous_node():
            # Players without a legal action need an entry, too; its value is ignored.
            state.apply_actions([actions[p] if p in self._legal else 0 for p in range(len(self.agents))])
        else:
            (mover,) = self._legal
            state.apply_action(actions[mover])
        self._pass_chance()
        for p in self._legal:
            slot.acting[p] = False
            slot.clear_mask(p)
        for p, won in enumerate((self._read_returns() - won_before).tolist()):
            slot.reward[p] = won
        if not state.is_terminal():
            self._give_turns(slot)
            return None
        self._legal = {}
        for p in range(len(self.agents)):
            self._observe(slot, p)
            slot.terminated[p] = True
            slot.alive[p] = False
        slot.done = True
        return None

    def cut_short(self, slot: Slot) -> None:
        """End the game here: every player observes the present state."""
        for p, alive in enumerate(slot.alive):
            if alive:
                self._observe(slot, p)
        self._legal = {}
        super().cut_short(slot)

    def render(self) -> str:
        """Return the game as OpenSpiel prints it; empty before the first reset."""
        return "" if self.game_state is None else str(self.game_state)

    def state_obstacle(self) -> str | None:
        """Return why the game's state cannot be saved, or None."""
        if self._draws:
            return f"{self.name} draws from its own generator, which OpenSpiel does not expose"
        return None

    def get_state(self) -> dict[str, Any]:
        """Return the game's history, and the generator of its chance nodes."""
        game_state = None if self.game_state is None else self.game_state.serialize()
        return {"game_state": game_state, "rng": self._rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state`."""
        self._rng = np.random.default_rng()
        self._rng.bit_generator.state = state["rng"]
        text = state["game_state"]
        self.game_state = None if text is None else self.game.deserialize_state(text)
        self._legal = {} if text is None else self._find_legal()

    def _give_turns(self, slot: Slot) -> None:
        """Write the observations and action masks of the players to move."""
        self._legal = self._find_legal()
        for p, legal in self._legal.items():
            slot.acting[p] = True
            self._observe(slot, p)
            mask = slot.action_mask[p]
            assert mask is not None
            mask[...] = False
            mask[legal] = True

    def _find_legal(self) -> dict[int, Sequence[int]]:
        state = self.game_state
        if state.is_terminal():
            return {}
        movers = range(len(self.agents)) if state.is_simultaneous_node() else (state.current_player(),)
        found = {p: legal for p in movers if (legal := state.legal_actions(p))}
        if not found:
            raise ContractError(f"{self.name}: no player has a legal action, and the game is not over")
        return found

    def _pass_chance(self) -> None:
        """Resolve chance nodes until a player must move or the game is over."""
        state = self.game_state
        while state.is_chance_node():
            outcomes, probabilities = zip(*state.chance_outcomes(), strict=True)
            state.apply_action(int(self._rng.choice(outcomes, p=probabilities)))

    def _read_returns(self) -> NDArray[np.float64]:
        """Return each player's return so far; 0 before the end in games that reward only the end."""
        # Not rewards(): after a chance node several games repeat the rewards of the move before it.
        if self._rewards_moves or self.game_state.is_terminal():
            return np.asarray(self.game_state.returns())
        return np.zeros(len(self.agents))

    def _observe(self, slot: Slot, player: int) -> None:
        state = self.game_state
        values = state.information_state_tensor if self._kind == _INFORMATION_STATE else state.observation_tensor
        slot.write_obs(player, np.asarray(values(player), np.float32).reshape(self._shape))

    def _load(self, seed: int | None) -> Any:
        """Load the game by its name; a game with its own generator gets this seed."""
        name, parameters = self._name, self._parameters
        stem = name.partition("(")[0]
        known = {kind.short_name: kind for kind in self._spiel.registered_games()}
        if stem not in known:
            near = difflib.get_close_matches(stem, known, n=5, cutoff=0.6)
            hint = f"Did you mean {' or '.join(repr(f'openspiel/{one}') for one in near)}? " if near else ""
            raise UnknownEnvError(
                f"unknown env 'openspiel/{name}'. {hint}pyspiel.registered_names() lists OpenSpiel's games"
            )
        taken = known[stem].parameter_specification
        for parameter in parameters:
            if parameter not in taken:
                raise TypeError(f"{stem} has no parameter {parameter!r}; it has {', '.join(sorted(taken)) or 'none'}")
        if _GAME_SEED in parameters:
            raise ArgumentError(f"{_GAME_SEED}={parameters[_GAME_SEED]!r}: resets set it; call reset(seed=…)")
        if _GAME_SEED in taken:
            parameters = {**parameters, _GAME_SEED: int(self._rng.integers(_SEED_LIMIT)) if seed is None else seed}
        try:
            return self._spiel.load_game(name, parameters) if parameters else self._spiel.load_game(name)
        except self._spiel.SpielError as error:  # an invalid value, or a missing bracket
            shown = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
            raise ArgumentError(
                f"openspiel/{name}{f' with {shown}' if shown else ''}: expected valid parameters; OpenSpiel's error: "
                f"{error}"
            ) from error

    def _is_drawn_inside(self, kind: Any) -> bool:
        """Return whether the game draws from its own generator, which `_load` seeds."""
        if kind.chance_mode != self._spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
            return False
        if not isinstance(self._name, str) or _GAME_SEED not in kind.parameter_specification:
            raise ArgumentError(
                f"{self.name} draws from its own generator, which cannot be seeded: expected a game with chance "
                f"nodes, or the name of one with a parameter {_GAME_SEED!r}"
            )
        return True

    def _choose_tensor(self, wanted: str, kind: Any) -> str:
        """Return which of the game's tensors is observed."""
        both = (_INFORMATION_STATE, _OBSERVATION)
        if wanted not in ("auto", *both):
            raise ArgumentError(f"observation: expected 'auto', {both[0]!r} or {both[1]!r}, got {wanted!r}")
        there = [name for name in both if getattr(kind, f"provides_{name}_tensor")]
        found = there[:1] if wanted == "auto" else [name for name in there if name == wanted]
        if not found:
            has = f"it has {there[0]!r}" if there else "it has texts only"
            what = "as numbers" if wanted == "auto" else f"as {wanted!r}"
            raise ArgumentError(f"{self.name} has no observation {what}; {has}")
        return found[0]
