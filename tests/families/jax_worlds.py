"""Worlds of JAX for tests: `Chase` has all that the protocol allows, `Race` is small and alike for all agents."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Discrete

from marlvec import JaxRows, JaxWorld

HUNTERS, HARES = 2, 3
LIMIT = 11


class Chase(JaxWorld):
    """Hunters of one kind, hares of another, who die one by one; random numbers in every step, masks, infos, a state.

    Hunters cannot stand still twice; hares observe less. A step pays each hunter for each hare caught. The episode ends
    when all hares are dead, then for hunters, too, or is cut after `LIMIT` steps.
    """

    name = "chase"

    def __init__(self, reach: float = 0.25) -> None:
        self.reach = reach
        self.agents = (*(f"hunter_{i}" for i in range(HUNTERS)), *(f"hare_{i}" for i in range(HARES)))
        size = 2 * (HUNTERS + HARES)
        self.observation_spaces = (Box(-9, 9, (size,), np.float32),) * HUNTERS + (Box(-9, 9, (2,), np.float32),) * HARES
        self.action_spaces = (Discrete(5),) * HUNTERS + (Discrete(3, start=1),) * HARES
        self.mask_sizes = (5,) * HUNTERS + (None,) * HARES
        self.state_space = Box(-9, 99, (size + 1,), np.float32)

    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        state = {
            "places": jax.random.uniform(key, (HUNTERS + HARES, 2), minval=-1, maxval=1),
            "last": jnp.zeros(HUNTERS, jnp.int32),
            "dead": jnp.zeros(HARES, bool),
            "t": 0,  # of a weak type
            "key": jax.random.fold_in(key, 5),
        }
        return state, JaxRows(self._obs(state), action_masks={"hunter": self._masks(state)})

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        own, inner = jax.random.split(state["key"])
        noise = 0.05 * jax.random.normal(key, (HUNTERS + HARES, 2)) + 0.01 * jax.random.normal(inner)
        ways = jnp.array([[0, 0], [-0.2, 0], [0.2, 0], [0, -0.2], [0, 0.2]])
        moves = jnp.concatenate([ways[actions["hunter"]], 0.5 * ways[actions["hare"]]])
        places = jnp.clip(state["places"] + moves + noise, -2, 2)
        gaps = jnp.linalg.norm(places[:HUNTERS, None] - places[None, HUNTERS:], axis=-1)
        caught = (gaps < self.reach) & ~state["dead"]
        dead = state["dead"] | caught.any(axis=0)
        t = state["t"] + 1
        state = {"places": places, "last": actions["hunter"], "dead": dead, "t": t, "key": own}
        won, late = dead.all(), t >= LIMIT
        pay = jnp.concatenate([caught.sum(axis=1) * 1.0, jnp.where(dead, -1.0, 0.1)])
        terminated = jnp.concatenate([jnp.full(HUNTERS, won), dead])
        rows = JaxRows(
            self._obs(state),
            pay,
            terminated,
            late & ~terminated,
            action_masks={"hunter": self._masks(state)},
            infos={"nearest": gaps.min()},
            agent_infos={"moves": moves},
        )
        return state, rows

    def global_state(self, state: Any) -> Any:
        return jnp.append(state["places"].reshape(-1), 1.0 * state["t"])

    def _obs(self, state: Any) -> dict[str, Any]:
        flat = state["places"].reshape(-1)
        shift = jnp.arange(HUNTERS, dtype=jnp.float32)[:, None]
        return {"hunter": flat[None] + shift, "hare": state["places"][HUNTERS:]}

    def _masks(self, state: Any) -> Any:
        return (state["last"] != 0)[:, None] | (jnp.arange(5) != 0)[None]


class Race(JaxWorld):
    """Two runners take turns; the first at `goal` wins. A reward for who waits, too."""

    name = "race"
    agents = ("red", "blue")
    observation_spaces = (Box(0, 99, (2,), np.float32),) * 2
    action_spaces = (Discrete(3),) * 2
    mask_sizes = (3, 3)

    def __init__(self, goal: int = 9) -> None:
        self.goal = goal

    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        state = {"at": jnp.zeros(2, jnp.float32), "turn": jax.random.randint(key, (), 0, 2)}
        return state, self._rows(state)

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        me = jnp.arange(2) == state["turn"]
        at = state["at"] + me * (1 + actions[state["turn"]] + jax.random.bernoulli(key))
        state = {"at": at, "turn": 1 - state["turn"]}
        over = (at >= self.goal).any()
        rows = self._rows(state)
        reward = jnp.where(me, 1.0, -0.5)
        return state, rows._replace(rewards=reward, terminated=jnp.full(2, over), truncated=jnp.zeros(2, bool))

    def _rows(self, state: Any) -> JaxRows:
        allowed = jnp.arange(3)[None] <= state["at"][:, None]
        return JaxRows(
            jnp.stack([state["at"], state["at"][::-1]]),
            acting=jnp.arange(2) == state["turn"],
            action_masks=allowed,
        )
