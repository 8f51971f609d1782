"""From what came back from the envs to rows, through the agent connectors."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyRunner, Selection, copied_rows
from marlvec.collect.episodes import EpisodeTracker, numbers_at
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.connectors import Rows
from marlvec.trees import Tree

__all__ = ["BuiltRows", "RowBuilder"]


class BuiltRows(NamedTuple):
    """A policy's rows.

    Attributes:
        runner: The policy's.
        chosen: Which rows were asked for.
        rows: Behind its agent connectors.
        kept: (n,) bool, which of those asked for they are; None for all.
        spare: See `ReadyRows.spare`.
    """

    runner: PolicyRunner
    chosen: Selection
    rows: Rows
    kept: NDArray[np.bool_] | None
    spare: tuple[Rows, int, int] | None


class RowBuilder:
    """Makes a policy's rows, and sends them through its agent connectors.

    Args:
        router: Which policy plays which agent.
        episodes: The accounts of the running episodes.
        metrics: Where the time goes.
    """

    def __init__(self, router: PolicyRouter, episodes: EpisodeTracker, metrics: Metrics) -> None:
        self._router, self._episodes, self._metrics = router, episodes, metrics

    def rows(
        self, runner: PolicyRunner, chosen: Selection, env_step: EnvStep, *, last: bool
    ) -> tuple[Rows, NDArray[np.bool_] | None]:
        """Rows behind the agent connectors, and which of those asked for they are: (n,) bool, or None for all.

        Args:
            runner: Whose rows.
            chosen: Which.
            env_step: Where they are.
            last: Whether these are final observations.
        """
        columns, leaves = self._columns(runner.group_index, chosen, env_step, last=last)
        columns["obs"] = self._router.groups[runner.group_index].observation_tree.unflatten(leaves)
        return self._observed(runner, Rows.of_length(columns, len(chosen.lanes)))

    def next_rows(self, runner: PolicyRunner, chosen: Selection, env_step: EnvStep) -> tuple[Rows, bool]:
        """`rows` of all agents of a policy, in a step of all envs that ended no agent and after which all are to act.

        Returns:
            The rows; and whether they came out of the connectors as they went in: then no other code has their arrays,
            where those of ``env_step`` are not.
        """
        episodes, places, g, n = self._episodes, chosen.places, runner.group_index, len(chosen.lanes)
        columns: dict[str, Any] = {
            "env_id": chosen.env_id.copy(),
            "agent_index": chosen.agent_index.copy(),
            "eps_id": episodes.eps_id_N[chosen.env_id],
            "t": episodes.turn_L[places].copy(),
            "obs": _NOTHING,
            "rewards": episodes.owed_L[places].copy(),
            "terminated": np.zeros(n, np.bool_),
            "truncated": np.zeros(n, np.bool_),
            "first": np.zeros(n, np.bool_),
            "last": np.zeros(n, np.bool_),
        }
        episodes.owed_L[places] = 0.0
        mask, leaves = env_step.masks[g], env_step.obs[g]
        if mask is not None:
            columns["action_mask"] = chosen.pick(mask)
        if env_step.state is not None:
            columns["state"] = _state(chosen, env_step, last=False)
        tree = self._router.groups[g].observation_tree
        columns["obs"] = chosen.pick(leaves[0]) if tree.is_leaf else tree.unflatten([*map(chosen.pick, leaves)])
        rows = Rows.of_length(columns, n)
        if runner.agent_connectors.is_identity:
            return rows, True
        out, _ = self._observed(runner, rows)
        return out, out is rows

    def shared(self, env_step: EnvStep, lanes: NDArray[np.int64], *, last: bool) -> Iterator[BuiltRows]:
        """Rows of all policies in the groups that several play in: columns are made once, and divided up.

        Args:
            env_step: Where they are.
            lanes: Which.
            last: Whether these are final observations.
        """
        for g, chosen, shares in self._router.split(env_step.env_ids, lanes):
            columns, leaves = self._columns(g, chosen, env_step, last=last)
            tree = self._router.groups[g].observation_tree
            if tree.is_leaf:
                columns["obs"] = leaves[0]
            spare = None
            if not last:
                spare = copied_rows(Rows.of_length({**columns, "obs": tree.unflatten(leaves)}, len(chosen.lanes)))
            flat = chosen.flat
            assert flat is not None  # so split() makes them
            for runner, start, stop in shares:
                own: dict[str, Tree] = {name: column[start:stop] for name, column in columns.items()}
                if not tree.is_leaf:
                    own["obs"] = tree.unflatten([leaf[start:stop] for leaf in leaves])
                own_lanes = chosen.lanes[start:stop]
                mine = Selection(flat[start:stop], own["env_id"], own["agent_index"], own_lanes, own_lanes)
                rows = Rows.of_length(own, stop - start)
                if runner.agent_connectors.is_identity:
                    yield BuiltRows(runner, mine, rows, None, None if spare is None else (spare, start, stop))
                else:
                    yield BuiltRows(runner, mine, *self._observed(runner, rows), None)

    def _columns(
        self, group_index: int, chosen: Selection, env_step: EnvStep, *, last: bool
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """Columns of rows of one group, and the leaves of their observations, for which there is a place in order."""
        episodes, lanes, places, n = self._episodes, chosen.lanes, chosen.places, len(chosen.lanes)
        rewards, first = episodes.settle(lanes, places)
        leaves = (env_step.final if last else env_step.obs)[group_index]
        columns: dict[str, Any] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": episodes.eps_id_N[chosen.env_id],
            "t": numbers_at(episodes.turn_L, places),
            "obs": _NOTHING,
            "rewards": rewards,
            "terminated": self._router.pick(group_index, chosen, env_step.terminated)
            if last
            else np.zeros(n, np.bool_),
            "truncated": self._router.pick(group_index, chosen, env_step.truncated) if last else np.zeros(n, np.bool_),
            "first": first,
            "last": (np.ones if last else np.zeros)(n, np.bool_),
        }
        mask = env_step.masks[group_index]
        if mask is not None:
            columns["action_mask"] = np.ones((n, mask.shape[2]), np.bool_) if last else chosen.pick(mask)
        if env_step.state is not None:
            columns["state"] = _state(chosen, env_step, last=last)
        return columns, [chosen.pick(leaf) for leaf in leaves]

    def _observed(self, runner: PolicyRunner, rows: Rows) -> tuple[Rows, NDArray[np.bool_] | None]:
        began = perf_counter()
        out, kept = runner.observe(rows)
        timer = self._metrics.timers["agent_connectors"]
        timer.seconds, timer.calls = timer.seconds + perf_counter() - began, timer.calls + 1
        return out, kept


_NOTHING = np.zeros(0)


def _state(chosen: Selection, env_step: EnvStep, *, last: bool) -> NDArray[Any]:
    """Each row's global state: with a last row that in which the episode ended, where all of it has ended."""
    assert env_step.state is not None
    at = np.searchsorted(env_step.env_ids, chosen.env_id)
    state: NDArray[Any] = env_step.state[at]
    if last and env_step.final_state is not None:
        over = env_step.done[at]
        state[over] = env_step.final_state[at[over]]
    return state
