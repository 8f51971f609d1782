"""How much is there of what was asked for, and the batch that is made of it."""

from __future__ import annotations

from time import perf_counter

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.company import Company
from marlvec.collect.episodes import Episodes
from marlvec.collect.gain import Gain
from marlvec.collect.goal import MEASURES, Goal
from marlvec.collect.harvest import Harvest
from marlvec.collect.loop import Loop
from marlvec.collect.metrics import EpisodeRecord, Metrics
from marlvec.collect.trained import Trained

__all__ = ["Delivery"]


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
        loop: Loop,
        harvest: Harvest,
        company: Company,
        episodes: Episodes,
        metrics: Metrics,
        *,
        agent_num: int,
        complete: bool,
    ) -> None:
        self._loop, self._harvest, self._company = loop, harvest, company
        self._episodes, self._metrics = episodes, metrics
        self._num_envs, self._agent_num, self._complete = len(episodes.eps_id_N), agent_num, complete

    def envs_needed(self, goal: Goal, pending: int = 0) -> int:
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

    def _rows_a_step(self, goal: Goal) -> int:
        """What an env's step brings at most: it closes at most one transition an agent."""
        return self._agent_num if goal.unit == "agent_steps" else 1

    def deliver(self, goal: Goal, trained: Trained) -> MultiAgentBatch:
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
        loop.gain = Gain(
            env_steps=loop.gain.env_steps - env_steps,
            decisions=loop.gain.decisions - batch.agent_steps,
            agent_steps=loop.gain.agent_steps - batch.agent_steps,
        )
        loop.state = "ready"
        return batch
