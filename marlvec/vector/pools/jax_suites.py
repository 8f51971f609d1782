"""JAX suites as worlds: `JaxMarlWorld`, `JumanjiWorld` and `PgxWorld`, for ids such as ``jaxmarl/SMAX``."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

from marlvec.envs.builtin_ids import BRAX_ENVS
from marlvec.errors import ArgumentError, ContractError, MarlvecError, MissingExtraError
from marlvec.vector.pools.jax import JaxRows, JaxWorld
from marlvec.vector.pools.pool import array_space, check_known, import_suite, made_or_built

_NO_LIMIT = 2**30
_MASKS = ("get_avail_actions", "get_legal_moves")


class JaxMarlWorld(JaxWorld):
    """An env of JaxMARL, ``jaxmarl.make(env_id, **kwargs)``, by its ``step_env``, which resets nothing.

    Observations have the shape and dtype that the env really returns: Overcooked declares another one. An agent that
    dies (SMAX) is terminated then. An end at the env's ``max_steps`` truncates the agents that are alive, unless the
    game is over without it. In envs in which one agent has moves at a time (Hanabi), only that agent acts. Brax's are
    made without their own autoreset, and report their truncations. A ``scenario`` or ``layout`` may be its name. A
    global state that is a dict (MPE_simple_facmac) becomes one vector, in the order of its sorted keys.

    Args:
        env_id: An id of JaxMARL, or an env of JaxMARL that is built already, also of a subclass of your own.
        kwargs: For ``jaxmarl.make``; none with a built env.

    Raises:
        UnknownEnvError: JaxMARL has no such id.
        ArgumentError: An argument with a built env, or an env that resets itself.
        ContractError: The env breaks JaxMARL's protocol.
    """

    def __init__(self, env_id: Any, **kwargs: Any) -> None:
        self.name = f"jaxmarl/{env_id if isinstance(env_id, str) else type(env_id).__name__}"
        import_suite("jaxmarl", f"env {self.name!r}", "jaxmarl")
        self._jax = import_suite("jax", f"env {self.name!r}", "jax")
        registration = import_suite("jaxmarl.registration", f"env {self.name!r}", "jaxmarl")
        self.env = made_or_built(
            self.name, env_id, kwargs, registration.registered_envs, partial(self._make, registration)
        )
        _refuse_autoreset(self.env, self.name)
        try:
            self._describe()
        except MarlvecError:
            raise
        except Exception as error:
            raise ContractError(
                f"{self.name}: expected an env with JaxMARL's protocol, but its own code raised "
                f"{type(error).__name__}: {error}; marlvec cannot run this env"
            ) from error

    def _describe(self) -> None:
        """Read agents, spaces, masks and the time limit from the env."""
        jax, env = self._jax, self.env
        self.agents = tuple(env.agents)
        key = jax.eval_shape(lambda: jax.random.key(0))
        obs, state = jax.eval_shape(env.reset, key)
        self.observation_spaces = tuple(array_space(obs[agent].shape, obs[agent].dtype) for agent in self.agents)
        self.action_spaces = tuple(_as_gymnasium(env.action_space(agent), self.name) for agent in self.agents)
        self._masks_of = self._find_masks(state)
        self._limit = getattr(env, "max_steps", None)
        if self._masks_of is not None:
            masks = jax.eval_shape(self._masks_of, state)
            self.mask_sizes = tuple(int(masks[agent].shape[0]) for agent in self.agents)
        self._by_turns = self._masks_of is not None and hasattr(state, "cur_player_idx")
        if hasattr(env, "get_world_state"):
            found = jax.eval_shape(self.global_state, state)
            self.state_space = array_space(found.shape, found.dtype)
        # Without `is_terminal`, the same step with the limit out of reach says whether the game ends by itself.
        self._untimed: Any = None
        if self._limit is not None and not hasattr(env, "is_terminal"):
            self._untimed = copy(env)
            self._untimed.max_steps = _NO_LIMIT
        self._groups = self.spec().groups

    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        obs, state = self.env.reset(key)
        return state, self._rows(obs, state)

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        jnp = self._jax.numpy
        own: dict[str, Any] = {}
        for group in self._groups:
            rows = actions if len(self._groups) == 1 else actions[group.name]
            own |= {self.agents[a]: rows[j] for j, a in enumerate(group.agents)}
        untimed = None
        if self._untimed is not None:
            *_, untimed, _ = self._untimed.step_env(key, state, own)
        obs, state, rewards, dones, infos = self.env.step_env(key, state, own)
        over = dones["__all__"]
        done = self._stack(dones).astype(bool)
        if untimed is not None:
            terminated = self._stack(untimed).astype(bool) | untimed["__all__"]
            late = done & ~terminated | over
        else:
            late = over & self._is_late(state)
            # At the limit some envs call all agents done, and SMAX those that are dead.
            terminated = jnp.where(late, done & ~done.all(), done | over)
        of_env, of_agents = self._infos(infos)
        rows = self._rows(obs, state)._replace(
            rewards=self._stack(rewards).astype(jnp.float32),
            terminated=terminated,
            truncated=late & ~terminated,
            infos=of_env,
            agent_infos=of_agents,
        )
        return state, rows

    def global_state(self, state: Any) -> Any:
        found = self.env.get_world_state(state)
        if not isinstance(found, Mapping):
            return found
        jnp = self._jax.numpy
        return jnp.concatenate([jnp.ravel(leaf) for leaf in self._jax.tree.leaves(found)])

    def _is_late(self, state: Any) -> Any:
        """Return whether the time is up, and the game would not be over without that."""
        jnp = self._jax.numpy
        told = getattr(state, "info", {})
        if "truncation" in told:  # Brax's
            return told["truncation"] > 0
        inner = state if hasattr(state, "step") or not hasattr(state, "state") else state.state
        steps = getattr(inner, "step", getattr(inner, "time", None))
        if self._limit is None or steps is None:
            return jnp.asarray(False)
        late = jnp.asarray(steps >= self._limit)
        if hasattr(self.env, "is_terminal"):
            fresh = {"step": jnp.zeros_like(steps)}
            if hasattr(inner, "done"):
                fresh["done"] = jnp.zeros_like(inner.done)
            untimed = inner.replace(**fresh)
            late &= ~self.env.is_terminal(untimed if inner is state else state.replace(state=untimed))
        return late

    def _rows(self, obs: Mapping[str, Any], state: Any) -> JaxRows:
        jnp = self._jax.numpy
        masks = acting = None
        if self._masks_of is not None:
            found = {agent: mask.astype(bool) for agent, mask in self._masks_of(state).items()}
            masks = self._by_group(found)
            if self._by_turns:  # the others have one move, which is none
                acting = jnp.stack([found[agent].sum() > 1 for agent in self.agents])
                acting |= ~acting.any()
        seen = {agent: obs[agent] for agent in self.agents}
        if any(leaf.dtype == bool for leaf in seen.values()):
            seen = {agent: leaf.astype(jnp.int8) if leaf.dtype == bool else leaf for agent, leaf in seen.items()}
        return JaxRows(self._by_group(seen), acting=acting, action_masks=masks)

    def _by_group(self, by_agent: Mapping[str, Any]) -> Any:
        jnp = self._jax.numpy
        stacked = {group.name: jnp.stack([by_agent[self.agents[a]] for a in group.agents]) for group in self._groups}
        return stacked if len(self._groups) > 1 else next(iter(stacked.values()))

    def _stack(self, by_agent: Mapping[str, Any]) -> Any:
        jnp = self._jax.numpy
        return jnp.stack([jnp.asarray(by_agent[agent]).reshape(()) for agent in self.agents])

    def _infos(self, infos: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return infos of the env, and those that are dicts of all agents."""
        jnp = self._jax.numpy
        of_env: dict[str, Any] = {}
        of_agents: dict[str, Any] = {}
        for name, value in infos.items():
            if isinstance(value, Mapping):
                if set(self.agents) <= value.keys():
                    of_agents[name] = jnp.stack([jnp.asarray(value[agent]) for agent in self.agents])
                else:
                    of_env |= {f"{name}/{key}": jnp.asarray(part) for key, part in value.items()}
            else:
                of_env[name] = jnp.asarray(value)
        return of_env, of_agents

    def _make(self, registration: Any, env_id: str, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Overcooked's, which would rather be its second version
            try:
                return registration.make(env_id, **_arguments(env_id, kwargs))
            except (ImportError, ValueError) as error:
                if "is not installed" not in str(error):
                    raise
                what, install = (
                    ("brax", "pip install 'marlvec[brax]'")
                    if env_id in BRAX_ENVS
                    else ("jaxrobotarium", "see https://github.com/GT-STAR-Lab/JaxRobotarium")
                )
                raise MissingExtraError(
                    f"env {self.name!r} needs {what}, which is not installed; to install it: {install}"
                ) from error

    def _find_masks(self, state: Any) -> Any:
        for name in _MASKS:
            method = getattr(self.env, name, None)
            if method is None:
                continue
            try:
                self._jax.eval_shape(method, state)
            except NotImplementedError:
                continue
            return method
        return None


def _refuse_autoreset(env: Any, name: str) -> None:
    """Raise for one of Brax's envs that was built with its own autoreset."""
    inner = env
    while inner is not None:
        if type(inner).__name__ == "AutoResetWrapper":
            raise ArgumentError(
                f"{name}: expected an env built with auto_reset=False, got one that resets itself: final observations "
                f"would be lost"
            )
        inner = vars(inner).get("env")


def _arguments(env_id: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for ``jaxmarl.make``, in which scenarios and layouts are objects, and Brax resets nothing."""
    given = dict(kwargs)
    if env_id in BRAX_ENVS and given.setdefault("auto_reset", False):
        raise ArgumentError(
            f"jaxmarl/{env_id}: expected auto_reset=False, got {given['auto_reset']!r}: final observations would be "
            f"lost; leave it out, and choose autoreset_mode"
        )
    if isinstance(given.get("scenario"), str):
        smax = import_suite("jaxmarl.environments.smax", "SMAX", "jaxmarl")
        given["scenario"] = smax.map_name_to_scenario(given["scenario"])
    if env_id == "overcooked" and isinstance(given.get("layout"), str):
        layouts = import_suite("jaxmarl.environments.overcooked", "Overcooked", "jaxmarl").overcooked_layouts
        check_known("overcooked layouts: ", given["layout"], layouts)
        given["layout"] = layouts[given["layout"]]
    return given


def _as_gymnasium(space: Any, name: str) -> Space[Any]:
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return MultiDiscrete(np.asarray(space.num_categories))
    if kind == "Box":
        low, high = (np.broadcast_to(np.asarray(end, np.float32), space.shape) for end in (space.low, space.high))
        return Box(low, high, tuple(space.shape), np.float32)
    raise ContractError(f"{name}: action space: expected Discrete, MultiDiscrete or Box, got {space}")


_ROWS = ("agents_view", "searcher_views")
"""Fields of observations that have a row for each agent."""


class JumanjiWorld(JaxWorld):
    """A multi-agent env of Jumanji, ``jumanji.make(env_id, **kwargs)``: each row of its array of actions is an agent.

    An agent observes a dict of the env's fields: its own row of ``agents_view`` or ``searcher_views``, and each other
    field whole. ``action_mask`` becomes the action mask; an agent whose mask allows nothing (MMST) does not act. Each
    agent gets the reward of a team. An end that only the env's ``time_limit`` brings truncates, also where Jumanji
    calls it a termination. Jumanji's discounts of single agents are the info ``"discount"``, its extras are infos.

    Args:
        env_id: An id of Jumanji, or an env of Jumanji that is built already, also of a subclass of your own.
        kwargs: For ``jumanji.make``; none with a built env.

    Raises:
        UnknownEnvError: Jumanji has no such id.
        ArgumentError: An argument with a built env, or an env with a single agent.
        ContractError: Agents have unlike actions.
    """

    def __init__(self, env_id: Any, **kwargs: Any) -> None:
        self.name = f"jumanji/{env_id if isinstance(env_id, str) else type(env_id).__name__}"
        jumanji = import_suite("jumanji", f"env {self.name!r}", "jumanji")
        self._jax = jax = import_suite("jax", f"env {self.name!r}", "jumanji")
        known = sorted(jumanji.registered_environments())
        self.env = env = made_or_built(self.name, env_id, kwargs, known, jumanji.make)
        # MultiCVRP's vehicles are agents, too.
        if not hasattr(env, "num_agents") and type(env).__name__ != "MultiCVRP":
            raise ArgumentError(
                f"env {self.name!r}: expected an env with several agents, got one with a single agent; take one that "
                f"`marlvec envs jumanji` lists"
            )
        self._agent_num = agent_num = int(env.action_spec.shape[0])
        self.agents = tuple(f"agent_{a}" for a in range(agent_num))
        _, first = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0)))
        seen = jax.eval_shape(self._observe, first.observation)
        mask = getattr(first.observation, "action_mask", None)
        choices = None if mask is None else int(mask.shape[1])
        self.observation_spaces = (_observation_space(seen),) * agent_num
        self.action_spaces = (_action_space(env.action_spec, choices, self.name),) * agent_num
        self.mask_sizes = (choices,) * agent_num
        # The same step without the limit says whether the episode ends by itself. What both compute, jax computes once.
        self._untimed = copy(env)
        if hasattr(env, "time_limit"):
            self._untimed.time_limit = _NO_LIMIT

    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        state, timestep = self.env.reset(key)
        return state, self._rows(timestep)

    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        jnp, shape = self._jax.numpy, (self._agent_num,)
        actions = actions.astype(self.env.action_spec.dtype)
        _, untimed = self._untimed.step(state, actions)
        state, timestep = self.env.step(state, actions)
        over, by_itself = timestep.last(), untimed.last() & (untimed.discount == 0).all()
        rows = self._rows(timestep)._replace(
            rewards=jnp.broadcast_to(timestep.reward, shape).astype(jnp.float32),
            terminated=jnp.broadcast_to(over & by_itself, shape),
            truncated=jnp.broadcast_to(over & ~by_itself, shape),
            infos=dict(timestep.extras or {}),
            agent_infos={"discount": timestep.discount} if timestep.discount.shape == shape else {},
        )
        return state, rows

    def _rows(self, timestep: Any) -> JaxRows:
        mask = getattr(timestep.observation, "action_mask", None)
        acting = None
        if mask is not None:
            can_act = mask.any(axis=1)
            acting, mask = can_act | ~can_act.any(), mask | ~can_act[:, None]
        return JaxRows(self._observe(timestep.observation), acting=acting, action_masks=mask)

    def _observe(self, observation: Any) -> dict[str, Any]:
        """Return the observations of all agents, by field: (A, …)."""
        return {name: self._rows_of(name, field) for name, field in _fields(observation) if name != "action_mask"}

    def _rows_of(self, name: str, field: Any) -> Any:
        jnp = self._jax.numpy
        if isinstance(field, (int, float)):  # a first step count
            field = jnp.asarray(field)
        if not hasattr(field, "shape"):
            return {inner: self._rows_of(inner, part) for inner, part in _fields(field)}
        if field.dtype == bool:
            field = field.astype(jnp.int8)
        return field if name in _ROWS else jnp.broadcast_to(field, (self._agent_num, *field.shape))


def _fields(record: Any) -> list[tuple[str, Any]]:
    """Return names and values of a named tuple or a dataclass, which may have slots."""
    names = record._fields if hasattr(record, "_fields") else [field.name for field in dataclasses.fields(record)]
    return [(name, getattr(record, name)) for name in names]


def _observation_space(seen: Mapping[str, Any]) -> Dict:
    """Return the space of one agent's part of the fields (A, …)."""
    return Dict(
        {
            name: _observation_space(field) if isinstance(field, Mapping) else array_space(field.shape[1:], field.dtype)
            for name, field in seen.items()
        }
    )


def _action_space(spec: Any, choices: int | None, name: str) -> Space[Any]:
    """Return the space of one agent's action, from the spec of all; `ContractError` if agents have unlike actions."""
    low, high = (np.broadcast_to(np.asarray(end), spec.shape) for end in (spec.minimum, spec.maximum))
    if (low == low[:1]).all() and (high == high[:1]).all():
        if np.dtype(spec.dtype).kind == "f":
            return Box(low[0], high[0], spec.shape[1:], np.dtype(spec.dtype).type)
        if len(spec.shape) == 1 and not low.any():
            # As many as the mask has: MultiCVRP declares one that it does not have.
            return Discrete(int(high[0]) + 1 if choices is None else choices)
    raise ContractError(f"{name}: action_spec: expected choices from 0 on, or floats, alike for all agents, got {spec}")


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
