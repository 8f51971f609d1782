"""From what came back from the envs to rows, through the agent connectors."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyRunner, Selection
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.connectors import Rows
from marlvec.trees import Tree

__all__ = ["RowBuilder"]


class RowBuilder:
    """Makes a policy's rows, and sends them through its agent connectors.

    Args:
        router: Who plays whom.
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

    def shared(
        self, env_step: EnvStep, mask_nA: NDArray[np.bool_], *, last: bool
    ) -> Iterator[tuple[PolicyRunner, Selection, Rows, NDArray[np.bool_] | None]]:
        """The same, of all policies in the groups that several play in: columns are made once, and divided up.

        Args:
            env_step: Where they are.
            mask_nA: (n, A) which.
            last: Whether these are final observations.
        """
        for g, chosen, shares in self._router.split(env_step.env_ids, mask_nA):
            columns, leaves = self._columns(g, chosen, env_step, last=last)
            tree = self._router.groups[g].observation_tree
            flat = chosen.flat
            assert flat is not None  # so split() makes them
            for runner, start, stop in shares:
                own: dict[str, Tree] = {name: column[start:stop] for name, column in columns.items()}
                own["obs"] = tree.unflatten([leaf[start:stop] for leaf in leaves])
                lanes = chosen.lanes[start:stop]
                mine = Selection(flat[start:stop], own["env_id"], own["agent_index"], lanes, lanes)
                yield runner, mine, *self._observed(runner, Rows.of_length(own, stop - start))

    def _columns(
        self, group_index: int, chosen: Selection, env_step: EnvStep, *, last: bool
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """Columns of rows of one group, and the leaves of their observations, for which there is a place in order."""
        episodes, lanes, places, n = self._episodes, chosen.lanes, chosen.places, len(chosen.lanes)
        first = ~episodes.seen_L[places]
        rewards = episodes.owed_L[places].copy()
        if np.count_nonzero(first):  # what was paid before an agent's first row goes to its first transition
            rewards[first] = 0.0
            episodes.owed_L[lanes[~first]] = 0.0
            episodes.seen_L[places] = True
        else:
            episodes.owed_L[places] = 0.0
        leaves = (env_step.final if last else env_step.obs)[group_index]
        columns: dict[str, Any] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": episodes.eps_id_N[chosen.env_id],
            "t": episodes.turn_L[places].copy(),
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
