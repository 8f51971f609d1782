"""Which of the closed transitions go into a batch, and the batch made of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.collect.acting.policy_runner import PolicyRunner
from marlvec.collect.acting.policy_set import PolicySet, TrainedPolicies
from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics.metrics import EpisodeRecord, Metrics
from marlvec.collect.rollout import RolloutLoop
from marlvec.collect.rollout_state import Counters
from marlvec.collect.sample_target import MEASURES, SampleTarget
from marlvec.connectors import Rows

__all__ = ["Delivery", "BatchBuilder"]


class Delivery:
    """Says what is lacking, and hands over.

    Args:
        loop: Who brings it in.
        harvest: Who makes batches.
        company: The policies.
        episodes: The accounts of the running episodes.
        metrics: Where the time goes.
        agent_num: A.
        complete: Whether only whole episodes are handed over.
    """

    def __init__(
        self,
        loop: RolloutLoop,
        harvest: BatchBuilder,
        company: PolicySet,
        episodes: EpisodeTracker,
        metrics: Metrics,
        *,
        agent_num: int,
        complete: bool,
    ) -> None:
        self._loop, self._harvest, self._company = loop, harvest, company
        self._episodes, self._metrics = episodes, metrics
        self._num_envs, self._agent_num, self._complete = len(episodes.eps_id_N), agent_num, complete

    def envs_needed(self, goal: SampleTarget, pending: int = 0) -> int:
        """Of how many envs one more step is needed; 0 when there is enough.

        Args:
            goal: What was asked for.
            pending: So many steps that were not counted yet bring all they can: each an end, and a row of every agent.
        """
        unit, everyone = goal.unit, self._num_envs
        if self._complete:
            there = sum(MEASURES[unit](record) for _, _, record in self._loop.finished)
            if pending:  # that much may end with them
                there += {
                    "env_steps": pending + self._episodes.steps_running,
                    "agent_steps": pending * self._agent_num + int(self._episodes.turn_L.sum()),
                    "episodes": pending,
                }[unit]
            return everyone if there < goal.amount else 0
        lacking = goal.amount - int(getattr(self._loop.gain, unit)) - pending * self._rows_a_step(goal)
        if unit == "agent_steps":
            lacking = -(-lacking // self._agent_num)
        elif unit == "episodes" and lacking > 0:
            lacking = everyone
        return max(0, min(everyone, lacking))

    def _rows_a_step(self, goal: SampleTarget) -> int:
        """What an env's step brings at most: it closes at most one transition an agent."""
        return self._agent_num if goal.unit == "agent_steps" else 1

    def deliver(self, goal: SampleTarget, trained: TrainedPolicies) -> MultiAgentBatch:
        """Make the batch, and forget what is in it."""
        loop = self._loop
        taken: list[EpisodeRecord] = []
        if self._complete:
            there = 0
            while there < goal.amount:
                taken.append(loop.finished[len(taken)][2])
                there += MEASURES[goal.unit](taken[-1])
            slots = self._harvest.of_episodes([record.eps_id for record in taken])
            env_steps = sum(record.length for record in taken)
        else:
            slots = (
                self._harvest.first_closed(goal.amount) if goal.unit == "agent_steps" else self._harvest.all_closed()
            )
            env_steps = loop.gain.env_steps
        began = perf_counter()
        untrained, policy_L = self._episodes.untrained, self._episodes.policy_NA.reshape(-1)
        batches = self._harvest.make(slots, trained, untrained)
        loop.state = "lost"  # until it is on record what was handed over
        self._harvest.forget(slots, loop.slot_L, policy_L)
        for eps_id in tuple(untrained):
            if eps_id not in self._episodes.eps_id_N and not self._harvest.holds(eps_id):
                untrained.remove(eps_id)
        self._metrics.timers["batch"].add(perf_counter() - began)
        self._company.drop_idle(loop)
        if self._complete:
            del loop.finished[: len(taken)]
        else:
            self._episodes.hand_over()
        decisions = sum(map(len, slots))
        known = tuple(self._company.policies)
        batch = MultiAgentBatch(batches, env_steps=env_steps, known=known, agent_steps=decisions)
        loop.gain = Counters(
            env_steps=loop.gain.env_steps - env_steps,
            decisions=loop.gain.decisions - batch.agent_steps,
            agent_steps=loop.gain.agent_steps - batch.agent_steps,
        )
        loop.state = "ready"
        return batch


IntArray = NDArray[np.int64]


class BatchBuilder:
    """Turns trajectories into batches and numbers their fragments.

    Args:
        roles: Whose trajectories; looked at anew each time.
        reward_dtype: Dtype of the batches' rewards; None to leave it as it is.
    """

    def __init__(self, roles: Sequence[PolicyRunner], reward_dtype: DTypeLike | None) -> None:
        self._roles = roles
        self._reward_dtype = None if reward_dtype is None else np.dtype(reward_dtype)
        self._next_unroll = 0

    def all_closed(self) -> list[IntArray]:
        """Slots of all closed transitions, per role."""
        return [role.trajectories.closed() for role in self._roles]

    def of_episodes(self, eps_ids: Sequence[int]) -> list[IntArray]:
        """Slots of these episodes' transitions, per role."""
        wanted = np.array(eps_ids, np.int64)
        return [role.trajectories.closed(wanted) for role in self._roles]

    def first_closed(self, amount: int) -> list[IntArray]:
        """Slots of the ``amount`` transitions that were closed first: by tick, then env, then agent."""
        slots = self.all_closed()
        orders = [role.trajectories.closing_order(s) for role, s in zip(self._roles, slots, strict=True)]
        ticks, lanes = (np.concatenate(part) for part in zip(*orders, strict=True))
        chosen = np.zeros(len(ticks), np.bool_)
        chosen[np.lexsort((lanes, ticks))[:amount]] = True
        masks = np.split(chosen, np.cumsum([len(s) for s in slots])[:-1])
        return [s[mask] for s, mask in zip(slots, masks, strict=True)]

    def holds(self, eps_id: int) -> bool:
        """Whether rows of an episode are still to come."""
        wanted = np.array([eps_id])
        return any(len(role.trajectories.of_episodes(wanted)) for role in self._roles)

    def make(
        self,
        slots: Sequence[IntArray],
        is_trained: Callable[[str], bool] = lambda policy_id: True,
        untrained: Collection[int] = (),
    ) -> Mapping[str, SampleBatch]:
        """Make batches of these transitions; none of them is forgotten before `forget`.

        Args:
            slots: Per role, ascending.
            is_trained: Whether a policy gets a batch. Rows of the others are only shown to learner connectors.
            untrained: Ids of episodes that are for no batch, and shown to nobody.
        """
        found: dict[str, Rows] = {}
        unroll = self._next_unroll
        shown = [role.trajectories.without(own, untrained) for role, own in zip(self._roles, slots, strict=True)]
        trained = [
            role
            for role, own in zip(self._roles, shown, strict=True)
            if len(own) and not role.is_frozen and is_trained(role.policy_id)
        ]
        all_are_shown = any(len(role.learner_connectors) for role in trained)
        for role, own in zip(self._roles, shown, strict=True):
            if len(own) and (all_are_shown or role in trained):
                columns, unroll = role.trajectories.read(own, unroll)
                if self._reward_dtype is not None:
                    columns["rewards"] = columns["rewards"].astype(self._reward_dtype, copy=False)
                found[role.policy_id] = Rows(columns)
        batches = self._connected(trained, found)
        self._next_unroll = unroll
        return batches

    def forget(self, slots: Sequence[IntArray], slot_L: IntArray, policy_L: IntArray) -> None:
        """Forget transitions that are in batches.

        Args:
            slots: Per role, ascending.
            slot_L: (L,) each lane's present slot, or -1; moved along in place.
            policy_L: (L,) index of the role that plays each lane.
        """
        for role, own in zip(self._roles, slots, strict=True):
            if len(own):
                role.forget(own, slot_L, policy_L)

    def _connected(self, roles: Sequence[PolicyRunner], found: Mapping[str, Rows]) -> dict[str, SampleBatch]:
        """Send these roles' rows through their learner connectors, each piece of which may look at all rows first."""
        batches = {}
        for role in roles:
            if len(role.learner_connectors):
                role.learner_connectors.see_batch(found)
        for role in roles:
            try:
                rows = role.learner_connectors(found[role.policy_id])
            except Exception as error:
                error.add_note(
                    f"in the learner connectors of policy {role.policy_id!r}; no row is lost: call collect() again"
                )
                raise
            batches[role.policy_id] = SampleBatch(rows.columns)
        return batches
