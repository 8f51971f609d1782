"""`PgxWorld`: Pgx's games: ``make("pgx/go_9x9", num_envs=1024)``."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete

from marlvec.vector.pools.jax.world import JaxRows, JaxWorld
from marlvec.vector.pools.suites import array_space, import_suite, made_or_built

__all__ = ["PgxWorld"]


class PgxWorld(JaxWorld):
    """A game of Pgx, ``pgx.make(game, **kwargs)``: one player acts at a time; all see the board, each from its side.

    The player who moves first is drawn with the episode, as Pgx does. A move that the mask forbids loses the game.

    Args:
        game: An id of Pgx, or a game of Pgx that is built already, also of a subclass of your own.
        kwargs: For ``pgx.make``; none with a built game.

    Raises:
        UnknownEnvError: Pgx has no such id.
        ArgumentError: An argument with a built game.
    """

    def __init__(self, game: Any, **kwargs: Any) -> None:
        self.name = f"pgx/{game if isinstance(game, str) else game.id}"
        pgx = import_suite("pgx", f"env {self.name!r}", "pgx")
        self._jax = jax = import_suite("jax", f"env {self.name!r}", "jax")
        self.env = env = made_or_built(self.name, game, kwargs, pgx.available_envs(), pgx.make)
        num_players = int(env.num_players)
        self.agents = tuple(f"player_{a}" for a in range(num_players))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dtypes of 64 bits
            seen = jax.eval_shape(env.init, jax.eval_shape(lambda: jax.random.key(0))).observation
        self.observation_spaces = (array_space(seen.shape, seen.dtype),) * num_players
        self.action_spaces = (Discrete(int(env.num_actions)),) * num_players
        self.mask_sizes = (int(env.num_actions),) * num_players
        self._players = np.arange(num_players)

    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        state = self.env.init(key)
        return self._kept(state), self._rows(state)

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        jnp = self._jax.numpy
        state = self.env.step(state, actions[state.current_player], key)
        shape = self._players.shape
        rows = self._rows(state)._replace(
            rewards=state.rewards,
            terminated=jnp.broadcast_to(state.terminated, shape),
            truncated=jnp.broadcast_to(state.truncated & ~state.terminated, shape),
        )
        return self._kept(state), rows

    def _kept(self, state: Any) -> Any:
        """Return the state without its observation, which no step reads."""
        return state.replace(observation=None)

    def _rows(self, state: Any) -> JaxRows:
        jnp = self._jax.numpy
        turn = self._players == state.current_player
        obs = self._observe(state, turn)
        if obs.dtype == bool:
            obs = obs.astype(jnp.int8)
        return JaxRows(obs, acting=turn, action_masks=turn[:, None] & state.legal_action_mask[None])

    def _observe(self, state: Any, turn: Any) -> Any:
        """Return each player's observation, (A, …); Pgx has already computed that of the player to move."""
        if len(self.agents) == 1:
            return state.observation[None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pgx would have the observation of the player to move alone
            if len(self.agents) == 2:
                others = self.env.observe(state, 1 - state.current_player)[None]
            else:
                others = self._jax.vmap(self.env.observe, in_axes=(None, 0))(state, self._players)
        return self._jax.numpy.where(turn.reshape(-1, *[1] * state.observation.ndim), state.observation[None], others)
