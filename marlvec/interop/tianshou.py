"""A marlvec vectorizer as a vector env of Tianshou 2: one row per agent, or one row per env whose agents take turns.

Axis letters: N envs, A agents, R rows, n rows or envs of one call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.spec import COMMON
from marlvec.errors import ActionError, ArgumentError, ContractError
from marlvec.extras import needs_extra
from marlvec.interop.rows import ask_envs, check_view, one_group, value_at, viewed
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.vector.infos import infos_to_list
from marlvec.vector.settings import spread_seeds
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

with needs_extra("tianshou", "a view for Tianshou", "pip install 'marlvec[tianshou]'"):
    from tianshou.env import BaseVectorEnv

__all__ = ["TianshouVectorEnv", "TianshouTurnVectorEnv"]

Ids = int | Sequence[int] | NDArray[np.int64] | None
Step = tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], NDArray[Any]]


class _View(BaseVectorEnv):  # type: ignore[misc]  # tianshou is Any where it is not installed
    _row_per_agent: bool

    def __init__(self, envs: VectorEnv) -> None:
        # The base class's __init__ is not called: it would start a worker per row.
        view = "TianshouVectorEnv" if self._row_per_agent else "TianshouTurnVectorEnv"
        check_view(envs, view)
        self._group = one_group(envs, view)  # Tianshou stacks all agents' observations
        self.envs = envs
        self.env_num = self.wait_num = envs.num_envs * (envs.agent_num if self._row_per_agent else 1)
        self.is_async = self.is_closed = False
        self.workers: list[Any] = []
        self._seeds: list[int | None] = [None] * envs.num_envs

    @classmethod
    def make(cls, env: EnvLike | Sequence[EnvLike], num_envs: int | None = None, **kwargs: Any) -> Self:
        """Build envs and a view of them; arguments as in `marlvec.make`, except ``autoreset_mode``."""
        envs = make(env, num_envs, autoreset_mode="disabled", **kwargs)
        return viewed(cls, envs)

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Return for each row its space, or an attribute of its env."""
        self._assert_is_not_closed()
        rows = [int(row) for row in self._wrap_id(id)]
        spaces = {"observation_space": self._group.observation_space, "action_space": self._group.action_space}
        if key in spaces:
            return [deepcopy(spaces[key]) for _ in rows]
        return ask_envs([self._env_of(row) for row in rows], partial(self.envs.get_attr, key))

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of the rows' envs."""
        self._assert_is_not_closed()
        self.envs.set_attr(key, value, sorted({self._env_of(int(row)) for row in self._wrap_id(id)}))

    def seed(self, seed: int | Sequence[int] | None = None) -> list[Any]:
        """Seed the next reset of each env, by one seed, spread by `marlvec.env_seeds`, or by N; return N seeds."""
        self._assert_is_not_closed()
        self._seeds = spread_seeds(seed, range(self.envs.num_envs), self.envs.num_envs)
        return list(self._seeds)

    def render(self, **kwargs: Any) -> list[Any]:
        """One frame per env."""
        self._assert_is_not_closed()
        return list(self.envs.render(**kwargs))

    def close(self) -> None:
        """Close the vectorizer, and with it all envs."""
        if not self.is_closed:
            self.envs.close()
            self.is_closed = True

    @abstractmethod
    def _env_of(self, row: int) -> int:
        """Return the env that a row belongs to."""

    def _begin(self, env_ids: list[int], seed: Any, options: Any) -> VectorStep:
        """Reset envs; the result has their order of arrival."""
        given = spread_seeds(seed, env_ids, self.envs.num_envs)
        seeds = [self._seeds[i] if own is None else own for i, own in zip(env_ids, given, strict=True)]
        self.envs.reset_send(seed=seeds, options=options, env_ids=env_ids)
        result = self.envs.recv()
        for i in env_ids:
            self._seeds[i] = None
        return result

    def _public(self, leaves: list[NDArray[Any]]) -> Any:
        tree = self._group.action_tree.unflatten(leaves)
        return {self._group.name: tree} if self.envs.grouped else tree

    def _masks(self, result: VectorStep) -> NDArray[np.bool_] | None:
        """Return masks (n, A, k), all True if the envs have none; None if actions are not discrete."""
        mask = result.action_masks[0]
        if mask is None and isinstance(self._group.action_space, Discrete):
            return np.ones((len(result), self.envs.agent_num, int(self._group.action_space.n)), np.bool_)
        return mask

    def _given(self, action: Any, count: int) -> list[NDArray[Any]]:
        """Return actions by leaf, (n, …) each."""
        leaves = [np.asarray(leaf) for leaf in self._group.action_tree.flatten(action)]
        if wrong := [leaf.shape for leaf in leaves if leaf.shape[:1] != (count,)]:
            rows = "rows" if self._row_per_agent else "envs"
            raise ActionError(f"step(): expected one action for each of {count} {rows}, got shape {wrong[0]}")
        return leaves


class TianshouVectorEnv(_View):
    """N envs as N × A rows that share a policy; the agents of env i are rows i * A to i * A + A - 1.

    Tianshou's single-agent algorithms learn from all rows alike. If the envs' spaces declare action masks, observations
    are ``{"obs": …, "mask": …}``, as its algorithms expect, else plain arrays.

    Every row must be a decision; a row of an agent that has ended, has not joined or waits for its turn would record a
    decision that no agent made. So envs with several agents must be made with ``done_on="any"``, and an agent that does
    not act is an error; use `TianshouTurnVectorEnv` for such envs. An env is stepped as a whole: all its rows together,
    so ``collect(n_episode=…)`` must be a multiple of A.

    Args:
        envs: The vectorizer, made with ``copy=True, autoreset_mode="disabled"``, as by `make`. No other code may step
            or reset it.

    Raises:
        MissingExtraError: (By the import.) tianshou is not installed.
        ArgumentError: The vectorizer was made with other settings.

    Attributes:
        envs: The vectorizer.
        env_num: R = N × A.
    """

    _row_per_agent = True

    def __init__(self, envs: VectorEnv) -> None:
        if envs.agent_num > 1 and envs.done_on != "any":
            raise ArgumentError(
                f"TianshouVectorEnv: expected done_on='any' for {envs.agent_num} agents, got {envs.done_on!r}: rows of "
                f"one env must end together, as Tianshou resets each row that ended; TianshouVectorEnv.make() sets it"
            )
        super().__init__(envs)
        self._masked = self._group.mask_size is not None

    @classmethod
    def make(cls, env: EnvLike | Sequence[EnvLike], num_envs: int | None = None, **kwargs: Any) -> Self:
        """Build envs and a view of them, with ``done_on="any"``; see `marlvec.make`."""
        return super().make(env, num_envs, **{"done_on": "any"} | kwargs)

    def reset(self, env_id: Ids = None, *, seed: Any = None, options: Any = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin new episodes; return ``(obs, infos)`` of these rows, in their order.

        Args:
            env_id: Rows, all rows of an env together; None: all.
            seed: As in `VectorEnv.reset`.
            options: As in `VectorEnv.reset`.

        Raises:
            ArgumentError: Some rows of an env are missing.
            ContractError: An agent does not act.
        """
        self._assert_is_not_closed()
        env_ids, whose, agents = self._whole(env_id)
        result = self._begin(env_ids.tolist(), seed, options)
        self._check_acting(result)
        rows = np.argsort(result.env_ids)[whose] * self.envs.agent_num + agents
        return self._obs(result)[rows], self._infos(result)[rows]

    def step(self, action: Any, id: Ids = None) -> Step:
        """Step the envs of these rows.

        Args:
            action: (n, …), one per row.
            id: Rows, all rows of an env together; None: all.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)`` of these rows, in their order; rewards float64.

        Raises:
            ArgumentError: Some rows of an env are missing.
            ActionError: Invalid actions.
            ContractError: An agent does not act, and its env continues.
        """
        self._assert_is_not_closed()
        env_ids, whose, agents = self._whole(id)
        agent_num = self.envs.agent_num
        back = np.argsort(whose * agent_num + agents)
        leaves = [leaf[back] for leaf in self._given(action, len(whose))]
        leaves = [leaf.reshape(len(env_ids), agent_num, *leaf.shape[1:]) for leaf in leaves]
        self.envs.send(self._public(leaves), env_ids)
        result = self.envs.recv()
        self._check_acting(result)
        rows = np.argsort(result.env_ids)[whose] * agent_num + agents  # results come in any order
        rewards, terminated, truncated = (
            array.reshape(-1)[rows] for array in (result.rewards, result.terminated, result.truncated)
        )
        return self._obs(result)[rows], rewards, terminated, truncated, self._infos(result)[rows]

    def _env_of(self, row: int) -> int:
        return row // self.envs.agent_num

    def _whole(self, rows: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the envs of some rows, ascending; for each row, the position of its env there; and its agent."""
        ids = np.asarray(self._wrap_id(rows), np.int64)
        env_ids, whose, counts = np.unique(ids // self.envs.agent_num, return_inverse=True, return_counts=True)
        if len(torn := env_ids[counts != self.envs.agent_num]):
            raise ArgumentError(
                f"rows {ids.tolist()}: expected all {self.envs.agent_num} rows of env {torn[0]}, which are stepped and "
                f"reset together; collect(n_episode=…) must be a multiple of that"
            )
        return env_ids, whose, ids % self.envs.agent_num

    def _check_acting(self, result: VectorStep) -> None:
        idle = np.argwhere(~result.acting & ~result.done[:, None])
        if len(idle):
            i, a = idle[0].tolist()
            raise ContractError(
                f"env {result.env_ids[i]}, agent {self.envs.agents[a]!r} does not act now, but Tianshou would record a "
                f"decision; use TianshouTurnVectorEnv for envs in which agents wait, end early or join late"
            )

    def _obs(self, result: VectorStep) -> NDArray[Any]:
        tree, (leaves,) = self._group.observation_tree, result.obs_leaves
        if tree.is_leaf and not self._masked:
            (leaf,) = leaves
            return leaf.reshape(-1, *leaf.shape[2:])
        rows = np.empty((len(result), self.envs.agent_num), np.object_)
        mask = self._masks(result)
        for place in np.ndindex(*rows.shape):
            value = value_at(tree, leaves, place)
            rows[place] = {"obs": value, "mask": mask[place].copy()} if self._masked and mask is not None else value
        return rows.reshape(-1)

    def _infos(self, result: VectorStep) -> NDArray[Any]:
        raw_infos = infos_to_list(result.infos, self.envs.agents, len(result))
        return np.array(
            [
                {**raw_infos[k].get(COMMON, {}), **raw_infos[k].get(who, {}), "env_id": i * self.envs.agent_num + a}
                for k, i in enumerate(result.env_ids.tolist())
                for a, who in enumerate(self.envs.agents)
            ],
            np.object_,
        )


class TianshouTurnVectorEnv(_View):
    """N envs as N rows in which one agent acts at a time: Tianshou's own multi-agent form.

    Observations are ``{"agent_id": …, "obs": …}``, with ``"mask"`` for Discrete actions, and rewards are (n, A); so
    ``MultiAgentOnPolicyAlgorithm(algorithms=[…], env=view)`` and its off-policy counterpart learn from them. Agents
    that act at the same time are queried one after the other, each with its current observation; the env is stepped
    when all have acted, and that row has the rewards of all. Agents that have ended, have not joined or wait are not
    queried, so agents may join and leave. An episode's last row has the final observation of the agent that acted last,
    and is truncated if any agent was.

    Args:
        envs: As for `TianshouVectorEnv`.

    Raises:
        MissingExtraError: (By the import.) tianshou is not installed.
        ArgumentError: The vectorizer was made with other settings.

    Attributes:
        envs: The vectorizer.
        env_num: N.
        agents: The agents' names.
        agent_idx: Agent name → index of its rewards.
    """

    _row_per_agent = False

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs)
        self.agents = list(envs.agents)
        self.agent_idx = {agent: a for a, agent in enumerate(self.agents)}
        self._actions = self._group.action_tree.zeros(envs.num_envs, envs.agent_num)
        self._asked: list[list[int]] = [[] for _ in range(envs.num_envs)]  # agents still to act in this step
        self._seen: list[Mapping[str, Any]] = [{} for _ in range(envs.num_envs)]

    def reset(self, env_id: Ids = None, *, seed: Any = None, options: Any = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin new episodes; return ``(obs, infos)`` in the order of ``env_id``. Arguments as in `VectorEnv.reset`."""
        self._assert_is_not_closed()
        ids = [int(i) for i in self._wrap_id(env_id)]
        self._take(self._begin(ids, seed, options))
        return self._rows(ids, dict.fromkeys(ids, None))

    def step(self, action: Any, id: Ids = None) -> Step:
        """Store the actions of the queried agents; step the envs in which all have acted.

        Args:
            action: (n, …), one per env.
            id: The envs; None for all.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)`` of these envs, in their order; rewards (n, A) float64.

        Raises:
            ActionError: Invalid actions.
        """
        self._assert_is_not_closed()
        ids = [int(i) for i in self._wrap_id(id)]
        given = self._given(action, len(ids))
        asked, held = self._asked, self._actions  # locals, since Tianshou's __getattribute__ is slow
        actors = {i: asked[i].pop(0) for i in ids}
        for leaf, answers in zip(held, given, strict=True):
            leaf[ids, list(actors.values())] = answers
        rewards = np.zeros((self.env_num, len(self.agents)))
        terminated, truncated = np.zeros((2, self.env_num), np.bool_)
        while ready := sorted(i for i in ids if not asked[i] and not terminated[i] and not truncated[i]):
            self.envs.send(self._public([leaf[ready] for leaf in held]), ready)
            result = self.envs.recv()
            stepped = result.env_ids  # in order of arrival
            rewards[stepped] += result.rewards
            truncated[stepped] = cut = result.done & result.truncated.any(axis=1)
            terminated[stepped] = result.done & ~cut
            self._take(result)
        obs, infos = self._rows(ids, actors)
        return obs, rewards[ids], terminated[ids], truncated[ids], infos

    def _env_of(self, row: int) -> int:
        return row

    def _take(self, result: VectorStep) -> None:
        """Store these envs' observations, masks and infos, and the agents to query."""
        masks, asked, seen = self._masks(result), self._asked, self._seen
        raw_infos = infos_to_list(result.infos, self.envs.agents, len(result))
        for k, (i, acting) in enumerate(zip(result.env_ids.tolist(), result.acting.tolist(), strict=True)):
            asked[i] = [a for a, acts in enumerate(acting) if acts]
            seen[i] = {
                "leaves": [leaf[k] for leaf in result.obs_leaves[0]],
                "mask": None if masks is None else masks[k],
                "infos": raw_infos[k],
            }

    def _rows(self, ids: list[int], actors: Mapping[int, int | None]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the observation of the next agent to query; at an episode's end, of the agent that acted last."""
        obs, infos = np.empty(len(ids), np.object_), np.empty(len(ids), np.object_)
        tree, agents, asked, shown = self._group.observation_tree, self.agents, self._asked, self._seen
        for k, i in enumerate(ids):
            seen, last = shown[i], actors[i]
            a = asked[i][0] if asked[i] else 0 if last is None else last
            agent = agents[a]
            obs[k] = {"agent_id": agent, "obs": value_at(tree, seen["leaves"], (a,))}
            if seen["mask"] is not None:
                obs[k]["mask"] = seen["mask"][a].copy()
            infos[k] = {**seen["infos"].get(COMMON, {}), **seen["infos"].get(agent, {}), "env_id": i}
        return obs, infos
