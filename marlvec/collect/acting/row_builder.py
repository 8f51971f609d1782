"""From what came back from the envs to rows, through the agent connectors."""

from __future__ import annotations

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
        episodes, group = self._episodes, self._router.groups[runner.group_index]
        lanes, places, n = chosen.lanes, chosen.places, len(chosen.lanes)
        first = ~episodes.seen_L[places]
        reward = episodes.owed_L[places].copy()
        if np.count_nonzero(first):  # what was paid before an agent's first row goes to its first transition
            reward[first] = 0.0
            episodes.owed_L[lanes[~first]] = 0.0
            episodes.seen_L[places] = True
        else:
            episodes.owed_L[places] = 0.0
        leaves = (env_step.final if last else env_step.obs)[runner.group_index]
        columns: dict[str, Tree] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": episodes.eps_id_N[chosen.env_id],
            "t": episodes.turn_L[places].copy(),
            "obs": group.observation_tree.unflatten([chosen.pick(leaf) for leaf in leaves]),
            "rewards": reward,
            "terminated": self._router.pick(runner, chosen, env_step.terminated) if last else np.zeros(n, np.bool_),
            "truncated": self._router.pick(runner, chosen, env_step.truncated) if last else np.zeros(n, np.bool_),
            "first": first,
            "last": (np.ones if last else np.zeros)(n, np.bool_),
        }
        mask = env_step.masks[runner.group_index]
        if mask is not None:
            columns["action_mask"] = np.ones((n, mask.shape[2]), np.bool_) if last else chosen.pick(mask)
        if env_step.state is not None:
            columns["state"] = _state(chosen, env_step, last=last)
        began = perf_counter()
        rows, kept = runner.observe(Rows.of_length(columns, n))
        timer = self._metrics.timers["agent_connectors"]
        timer.seconds, timer.calls = timer.seconds + perf_counter() - began, timer.calls + 1
        return rows, kept


def _state(chosen: Selection, env_step: EnvStep, *, last: bool) -> NDArray[Any]:
    """Each row's global state: with a last row that in which the episode ended, where all of it has ended."""
    assert env_step.state is not None
    at = np.searchsorted(env_step.env_ids, chosen.env_id)
    state: NDArray[Any] = env_step.state[at]
    if last and env_step.final_state is not None:
        over = env_step.done[at]
        state[over] = env_step.final_state[at[over]]
    return state
