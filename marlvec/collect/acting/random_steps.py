"""`RandomSteps`: random actions in the first steps of a run."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_runner import PolicyRunner
from marlvec.collect.storage.moment import Moment
from marlvec.policies.row_draws import RowDraws
from marlvec.sampling import SpaceSampler
from marlvec.serialization.saved import Saved, SavedField
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree

__all__ = ["RandomSteps"]

IntArray = NDArray[np.int64]


class RandomSteps(Saved):
    """Gives agents random actions in place of their policies', in the first ``steps`` env steps, shared over the envs.

    No policy was asked for these actions, see `GivenActions`. Each draw belongs to a row, whatever batch that is in.
    """

    saved_as = "random steps"
    saved_fields: ClassVar = {"left": SavedField("_left_N"), "seed": SavedField("_seed")}

    def __init__(self, steps: int, num_envs: int, agents: tuple[str, ...], seed: int) -> None:
        self._left_N = np.full(num_envs, steps // num_envs)
        self._left_N[: steps % num_envs] += 1
        self._agents, self._seed = agents, seed
        self.is_over = not steps  # whether no env has such a step to come

    def note(self, runner: PolicyRunner, ready: Moment) -> None:
        """Draw for those of a policy's ready rows that have such a step to make, and for which nothing is noted yet."""
        num_agents = len(self._agents)
        mine = (self._left_N[ready.lanes // num_agents] > 0) & ~runner.off_policy.among(ready.lanes)
        if not mine.any():
            return
        ready = ready.take(mine)
        rows = ready.rows
        sampler = SpaceSampler(SpaceTree(runner.action_connectors.policy_space_))

        def where(i: int) -> str:
            env, agent = divmod(int(ready.lanes[i]), num_agents)
            return f"env {env}: agent {self._agents[agent]!r}"

        draws = cast(np.random.Generator, RowDraws(self._seed, "warm-up", rows))
        actions = sampler.sample(draws, len(rows), rows.get("action_mask"), where)
        for i, lane in enumerate(ready.lanes.tolist()):
            runner.off_policy.note(lane, map_tree(itemgetter(i), actions), where(i))

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add whether a step is to come."""
        return {**values, "is_over": not (values["_left_N"] > 0).any()}

    def count(self, env_ids: IntArray) -> None:
        """These envs have made a step."""
        self._left_N[env_ids] -= 1
        self.is_over = not (self._left_N > 0).any()
