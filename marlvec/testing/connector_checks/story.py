"""`SampledRows`: episodes of rows for tests, with agents that enter, take turns and end.

Every number depends only on its (env, agent) and moment, so the rows of some envs or agents are the same whatever else
is in the story.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import choice_sizes
from marlvec.trees import Tree, map_tree

__all__ = ["ColumnLike", "Moment", "SampledRows", "sampled", "transitions"]

ColumnLike = Space[Any] | Callable[[Rows], Tree]
"""A column: the space of one row's value, or a function from the rows to the whole column."""
_STATE = Box(-np.inf, np.inf, (5,), np.float32)
_NUMBER = Box(-np.inf, np.inf, (), np.float64)


@dataclass(frozen=True)
class Moment:
    """One call's rows, the policy's answer and the resets after it."""

    rows: Rows  # without the policy's answer
    answer: Rows  # one entry per row
    over: tuple[int, ...] = ()  # envs to reset afterwards: their episode ended or was lost

    def take(self, index: Any) -> Moment:
        """Return this moment with some of its rows, and all of ``over``."""
        return Moment(self.rows.take(index), self.answer.take(index), self.over)

    def of_envs(self, env_ids: NDArray[Any] | tuple[int, ...]) -> Moment:
        """Return the rows and resets of these envs only."""
        chosen = self.take(np.isin(self.rows.env_id, env_ids))
        return Moment(chosen.rows, chosen.answer, tuple(env for env in self.over if env in env_ids))

    def beside(self, other: Moment) -> Moment:
        """Return this moment's rows followed by those of other envs."""
        rows, answer = Rows.concat([self.rows, other.rows]), Rows.concat([self.answer, other.answer])
        return Moment(rows, answer, (*self.over, *other.over))


class SampledRows:
    """Draws moments, one after the other.

    In a moment some envs have no rows, and others not every agent. An agent's episode may begin later than its env's,
    end earlier, and end without an action. Some episodes are lost midway. Stories with different seeds share no
    ``eps_id``. `mask` is the space that ``action_mask`` is for; if it has no choices, there is no such column.
    """

    def __init__(
        self,
        obs: Space[Any],
        action: Space[Any],
        mask: Space[Any],
        columns: Mapping[str, ColumnLike],
        num_envs: int,
        num_agents: int,
        seed: int,
    ) -> None:
        self._obs, self._action, self._columns = SpaceTree(obs), SpaceTree(action), columns
        self._choices = mask if isinstance(mask, (Discrete, MultiDiscrete)) else None
        self._shape = num_envs, num_agents
        self._seed = seed
        self._moment = 0
        self._rng = np.random.default_rng([seed, 0])
        self._eps_id = np.arange(num_envs) + seed * 1_000 * num_envs
        self._turn = np.zeros(self._shape, np.int64)
        self._begun = np.zeros(self._shape, np.bool_)
        self._ended = np.zeros(self._shape, np.bool_)

    def moments(self, count: int) -> list[Moment]:
        """Return the next moments, in order."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Moment:
        rng, (n, a) = self._rng, self._shape
        self._moment += 1
        # All agents are present in the first three moments, so that nothing depends on which came first.
        there = rng.random((n, a)) < 0.8 if self._moment > 3 else np.ones((n, a), np.bool_)
        there &= ((rng.random(n) < 0.8) | (self._moment <= 3))[:, None]
        there &= ~self._ended
        first = there & ~self._begun
        last = there & (rng.random((n, a)) < 0.12) & (self._moment > 2)
        lost = (rng.random(n) < 0.04) & (self._moment > 4)
        self._begun |= there
        self._ended |= last
        over = self._ended.all(axis=1) | lost
        moment = self._draw(np.flatnonzero(there), first, last, tuple(np.flatnonzero(over).tolist()))
        self._turn[there & ~last] += 1
        self._turn[over], self._begun[over], self._ended[over] = 0, False, False
        self._eps_id[over] += n
        return moment

    def _draw(self, where: NDArray[Any], first: Any, last: Any, over: tuple[int, ...]) -> Moment:
        (n, a), size = self._shape, self._shape[0] * self._shape[1]
        rng = np.random.default_rng([self._seed, self._moment])
        env_id, agent_index = np.divmod(np.arange(size), a)
        cut = rng.random(size) < 0.5
        ends, begins = last.reshape(-1), first.reshape(-1)
        columns: dict[str, Tree] = {
            "env_id": env_id,
            "agent_index": agent_index,
            "eps_id": self._eps_id[env_id],
            "t": self._turn.reshape(-1).copy(),
            "obs": sampled(self._obs, rng, size),
            "rewards": np.where(begins, 0.0, rng.normal(size=size)),
            "terminated": ends & ~cut,
            "truncated": ends & cut,
            "first": begins,
            "last": ends,
            "state": sampled(SpaceTree(_STATE), rng, n)[env_id],
        }
        if self._choices is not None:
            columns["action_mask"] = _mask(self._choices, rng, size) | ends[:, None]
        answer: dict[str, Tree] = {
            "actions": sampled(self._action, rng, size),
            "logp": rng.normal(size=size).astype(np.float32),
            "values": sampled(SpaceTree(_NUMBER), rng, size),
        }
        rows = Rows(columns).take(where)
        answers = Rows(answer).take(where)
        for name, like in self._columns.items():
            column = sampled(SpaceTree(like), rng, size) if isinstance(like, Space) else None
            # In order: a function sees the columns before its own.
            made = _made(name, like, rows) if column is None else Rows({name: column}).take(where)[name]
            rows, answers = rows.replace(**{name: made}), answers.replace(**{name: made})
        return Moment(rows, answers, over)


def sampled(tree: SpaceTree, rng: np.random.Generator, n: int) -> Tree:
    """Draw (n, …) members of a space; about a tenth of a bounded Box's numbers are bounds."""
    leaves = tree.flatten(SpaceSampler(tree).sample(rng, n))
    for i, leaf in enumerate(tree.leaves):
        space = leaf.space
        if isinstance(space, Box):
            at = rng.random(leaves[i].shape)
            leaves[i] = np.where((at < 0.05) & space.bounded_below, space.low, leaves[i])
            leaves[i] = np.where((at > 0.95) & space.bounded_above, space.high, leaves[i])
    return tree.unflatten(leaves)


def _made(name: str, like: Any, rows: Rows) -> Tree:
    if not callable(like):
        raise ArgumentError(f"column {name!r}: expected a space or a function of rows, got {type(like).__name__}")
    return map_tree(np.asarray, like(rows))


def _mask(space: Discrete | MultiDiscrete, rng: np.random.Generator, n: int) -> NDArray[np.bool_]:
    """Return a mask (n, k) of about half of the choices, at least one in each dimension."""
    parts = [(rng.random((n, k)) < 0.5) | (np.arange(k) == rng.integers(k, size=(n, 1))) for k in choice_sizes(space)]
    return np.concatenate(parts, axis=1)


_LENGTH = 20  # moments of the story


def transitions(
    obs: Space[Any], action: Space[Any], columns: Mapping[str, ColumnLike], num_envs: int, num_agents: int, seed: int
) -> Rows:
    """Draw the rows of one policy's batch, fragment after fragment, each in time order.

    The columns are those of a `SampleBatch`; ``state`` and ``next_state``; ``logp`` and ``values`` of the policy; and
    the columns that learner connectors add: ``next_values``, ``target_logp``, ``advantages``. Long fragments are cut
    in two.
    """
    moments = SampledRows(obs, action, action, columns, num_envs, num_agents, seed).moments(_LENGTH)
    rows = Rows.concat([moment.rows for moment in moments])
    answer = Rows.concat([moment.answer for moment in moments])
    before, after, fragment = _steps(rows)
    now, then, given = rows.take(before), rows.take(after), answer.take(before)
    rng = np.random.default_rng([seed, _LENGTH])
    n = len(now)
    made: dict[str, Tree] = {
        **{
            name: column
            for name, column in now.items()
            if name not in ("rewards", "terminated", "truncated", "first", "last")
        },
        **given,
        "actions_for_env": given["actions"],
        "rewards": then["rewards"],
        "next_obs": then["obs"],
        "next_state": then["state"],
        "terminated": then["terminated"],
        "truncated": then["truncated"],
        "unroll_id": fragment,
        "policy_version": np.zeros(n, np.int64),
        "next_values": answer.take(after)["values"],
        "target_logp": given["logp"] + rng.normal(size=n).astype(np.float32) / 4,
        "advantages": rng.normal(size=n).astype(np.float32),
    }
    return Rows(made)


def _steps(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where each transition begins and ends, and its fragment number."""
    lanes = list(zip(rows.eps_id.tolist(), rows.agent_index.tolist(), strict=True))
    before, after, fragment, number = [], [], [], 0
    for lane in dict.fromkeys(lanes):
        at = [i for i, other in enumerate(lanes) if other == lane]
        cut = len(at) // 2 if len(at) > 6 else 0
        for k in range(len(at) - 1):
            before.append(at[k])
            after.append(at[k + 1])
            fragment.append(number + (k >= cut > 0))
        number += 2
    return np.array(before, np.int64), np.array(after, np.int64), np.array(fragment, np.int64)
