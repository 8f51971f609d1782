"""`JaxMarlWorld`: JaxMARL's envs: ``make("jaxmarl/SMAX", num_envs=1024)``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

from marlvec.envs.making.catalog import BRAX_ENVS
from marlvec.errors import ArgumentError, ContractError, MarlvecError, MissingExtraError
from marlvec.vector.pools.jax.world import JaxRows, JaxWorld
from marlvec.vector.pools.suites import array_space, check_known, import_suite, made_or_built

__all__ = ["JaxMarlWorld"]

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
