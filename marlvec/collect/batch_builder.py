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
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.rollout import RolloutLoop
from marlvec.collect.rollout_state import Counters, WholeEpisode
from marlvec.collect.sample_target import SampleTarget
from marlvec.connectors import Rows

__all__ = ["Delivery", "BatchBuilder"]


class Delivery:
    """Says what is lacking, and hands over.

    Args:
        loop: Who brings it in.
        batch_builder: Who makes batches.
        policy_set: The policies.
        episodes: The accounts of the running episodes.
        metrics: Where the time goes.
        agent_num: A.
        complete: Whether only whole episodes are handed over.
    """

    def __init__(
        self,
        loop: RolloutLoop,
        batch_builder: BatchBuilder,
        policy_set: PolicySet,
        episodes: EpisodeTracker,
        metrics: Metrics,
        *,
        agent_num: int,
        complete: bool,
    ) -> None:
        self._loop, self._batch_builder, self._policy_set = loop, batch_builder, policy_set
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
            there = sum(getattr(episode, unit) for episode in self._loop.finished)
            if pending:  # that much may end with them
                there += {
                    "env_steps": pending + self._episodes.steps_running,
                    "agent_steps": pending * self._agent_num + int(self._episodes.turn_L.sum()),
                    "episodes": pending,
                }[unit]
            return everyone if there < goal.amount else 0
        lacking = goal.amount - int(getattr(self._loop.undelivered, unit)) - pending * self._rows_a_step(goal)
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
        taken: list[WholeEpisode] = []
        if self._complete:
            there = 0
            while there < goal.amount:
                taken.append(loop.finished[len(taken)])
                there += getattr(taken[-1], goal.unit)
            slots = self._batch_builder.of_episodes([episode.eps_id for episode in taken])
            env_steps = sum(episode.env_steps for episode in taken)
        else:
            slots = (
                self._batch_builder.first_closed(goal.amount)
                if goal.unit == "agent_steps"
                else self._batch_builder.all_closed()
            )
            env_steps = loop.undelivered.env_steps
        began = perf_counter()
        untrained, policy_L = self._episodes.untrained, self._episodes.policy_NA.reshape(-1)
        batches = self._batch_builder.make(slots, trained, untrained)
        loop.state = "lost"  # until it is on record what was handed over
        self._batch_builder.forget(slots, loop.slot_L, policy_L)
        for eps_id in tuple(untrained):
            if eps_id not in self._episodes.eps_id_N and not self._batch_builder.holds(eps_id):
                untrained.remove(eps_id)
        self._metrics.timers["batch"].add(perf_counter() - began)
        if self._complete:
            del loop.finished[: len(taken)]
        else:
            self._episodes.hand_over()
        decisions = sum(map(len, slots))
        known = tuple(self._policy_set.policies)
        batch = MultiAgentBatch(batches, env_steps=env_steps, known=known, agent_steps=decisions)
        loop.undelivered = Counters(
            env_steps=loop.undelivered.env_steps - env_steps,
            decisions=loop.undelivered.decisions - batch.agent_steps,
            agent_steps=loop.undelivered.agent_steps - batch.agent_steps,
        )
        loop.state = "ready"
        return batch


IntArray = NDArray[np.int64]


class BatchBuilder:
    """Turns trajectories into batches and numbers their fragments.

    Args:
        runners: Whose trajectories; looked at anew each time.
        reward_dtype: Dtype of the batches' rewards; None to leave it as it is.
    """

    def __init__(self, runners: Mapping[int, PolicyRunner], reward_dtype: DTypeLike | None) -> None:
        self._runners = runners
        self._reward_dtype = None if reward_dtype is None else np.dtype(reward_dtype)
        self._next_unroll = 0

    def all_closed(self) -> list[IntArray]:
        """Slots of all closed transitions, per runner."""
        return [runner.trajectories.closed() for runner in self._runners.values()]

    def of_episodes(self, eps_ids: Sequence[int]) -> list[IntArray]:
        """Slots of these episodes' transitions, per runner."""
        wanted = np.array(eps_ids, np.int64)
        return [runner.trajectories.closed(wanted) for runner in self._runners.values()]

    def first_closed(self, amount: int) -> list[IntArray]:
        """Slots of the ``amount`` transitions that were closed first: by tick, then env, then agent."""
        slots = self.all_closed()
        orders = [runner.trajectories.closing_order(s) for runner, s in zip(self._runners.values(), slots, strict=True)]
        ticks, lanes = (np.concatenate(part) for part in zip(*orders, strict=True))
        chosen = np.zeros(len(ticks), np.bool_)
        chosen[np.lexsort((lanes, ticks))[:amount]] = True
        masks = np.split(chosen, np.cumsum([len(s) for s in slots])[:-1])
        return [s[mask] for s, mask in zip(slots, masks, strict=True)]

    def holds(self, eps_id: int) -> bool:
        """Whether rows of an episode are still to come."""
        wanted = np.array([eps_id])
        return any(len(runner.trajectories.of_episodes(wanted)) for runner in self._runners.values())

    def make(
        self,
        slots: Sequence[IntArray],
        is_trained: Callable[[str], bool] = lambda policy_id: True,
        untrained: Collection[int] = (),
    ) -> Mapping[str, SampleBatch]:
        """Make batches of these transitions; none of them is forgotten before `forget`.

        Args:
            slots: Per runner, ascending.
            is_trained: Whether a policy gets a batch. Rows of the others are only shown to learner connectors.
            untrained: Ids of episodes that are for no batch, and shown to nobody.
        """
        found: dict[str, Rows] = {}
        unroll = self._next_unroll
        runners = tuple(self._runners.values())
        shown = [runner.trajectories.without(own, untrained) for runner, own in zip(runners, slots, strict=True)]
        trained = [
            runner
            for runner, own in zip(runners, shown, strict=True)
            if len(own) and not runner.is_frozen and is_trained(runner.policy_id)
        ]
        all_are_shown = any(len(runner.learner_connectors) for runner in trained)
        for runner, own in zip(runners, shown, strict=True):
            if len(own) and (all_are_shown or runner in trained):
                columns, unroll = runner.trajectories.read(own, unroll)
                if self._reward_dtype is not None:
                    columns["rewards"] = columns["rewards"].astype(self._reward_dtype, copy=False)
                found[runner.policy_id] = Rows(columns)
        batches = self._connected(trained, found)
        self._next_unroll = unroll
        return batches

    def forget(self, slots: Sequence[IntArray], slot_L: IntArray, policy_L: IntArray) -> None:
        """Forget transitions that are in batches.

        Args:
            slots: Per runner, ascending.
            slot_L: (L,) each lane's present slot, or -1; moved along in place.
            policy_L: (L,) number of the policy that plays each lane.
        """
        for runner, own in zip(self._runners.values(), slots, strict=True):
            if len(own):
                runner.forget(own, slot_L, policy_L)

    def _connected(self, runners: Sequence[PolicyRunner], found: Mapping[str, Rows]) -> dict[str, SampleBatch]:
        """Send these runners' rows through their learner connectors, each piece of which may look at all rows first."""
        batches = {}
        for runner in runners:
            if len(runner.learner_connectors):
                runner.learner_connectors.see_batch(found)
        for runner in runners:
            try:
                rows = runner.learner_connectors(found[runner.policy_id])
            except Exception as error:
                error.add_note(
                    f"in the learner connectors of policy {runner.policy_id!r}; no row is lost: call collect() again"
                )
                raise
            batches[runner.policy_id] = SampleBatch(rows)
        return batches
