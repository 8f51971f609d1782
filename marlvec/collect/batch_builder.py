"""`BatchBuilder`: chooses the closed transitions of a batch and builds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.collect.acting.policy_logs import EVERYTHING, Chosen, PolicyLogs
from marlvec.collect.acting.policy_runner import PolicyRunner
from marlvec.collect.acting.policy_set import TrainedPolicies
from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.batch.sample_target import SampleTarget
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.rollout_state import CurrentState, RolloutState
from marlvec.connectors import Rows
from marlvec.errors import StateError

__all__ = ["BatchBuilder", "BuiltBatch"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A batch that is made and not delivered yet."""

    batch: MultiAgentBatch
    delivered: tuple[int, int]  # as `RolloutState.delivered`
    whole: int  # how many of the finished episodes that wait are in it, where it is made of those
    unroll_id: int  # number of the fragment after its last one


class BatchBuilder:
    """Makes batches of what runners have stored; nothing that is stored changes.

    Runners and policy ids (of policies that were not removed) are read at each call. ``complete``: only whole episodes
    are delivered. ``reward_dtype``: None leaves rewards as they are.
    """

    def __init__(
        self,
        current: CurrentState,
        runners: Mapping[int, PolicyRunner],
        logs: PolicyLogs,
        episodes: EpisodeTracker,
        metrics: Metrics,
        policies: Collection[str],
        *,
        complete: bool,
        reward_dtype: DTypeLike | None,
    ) -> None:
        self._current, self._runners, self._episodes, self._metrics = current, runners, episodes, metrics
        self._logs = logs
        self._policies, self._complete = policies, complete
        self._num_envs, self._agent_num = episodes.policy_NA.shape
        self._reward_dtype = None if reward_dtype is None else np.dtype(reward_dtype)

    # --- what is lacking

    def envs_needed(self, goal: SampleTarget, pending: int = 0) -> int:
        """Return of how many envs one more step is needed; 0 when there is enough.

        ``pending``: so many steps that were not counted yet bring all they can: each an end, and a row of every agent.
        """
        unit, all_envs, counters = goal.unit, self._num_envs, self._current.state.counters
        if self._complete:
            there = {
                "env_steps": counters.ended_env_steps,
                "agent_steps": counters.ended_agent_steps,
                "episodes": counters.ended_episodes,
            }[unit]
            if pending:  # that much may end with them
                there += {
                    "env_steps": pending + int(self._episodes.length_N.sum()),
                    "agent_steps": pending * self._agent_num + int(self._episodes.turn_L.sum()),
                    "episodes": pending,
                }[unit]
            return all_envs if there < goal.amount else 0
        if unit == "env_steps":
            lacking = goal.amount - counters.waiting_env_steps - pending
        elif unit == "agent_steps":  # a step closes at most one transition an agent
            lacking = -(-(goal.amount - counters.closed_steps) // self._agent_num) - pending
        else:
            lacking = all_envs if goal.amount > counters.ended_episodes + pending else 0
        return max(0, min(all_envs, lacking))

    def steps_of_all(self, goal: SampleTarget) -> int:
        """Return how many steps of all envs fill the batch exactly; 0 if rows wait, or if envs step apart."""
        counters = self._current.state.counters
        per_step = {"env_steps": self._num_envs, "agent_steps": self._num_envs * self._agent_num}.get(goal.unit)
        if self._complete or per_step is None or counters.waiting_env_steps or counters.closed_steps:
            return 0
        steps, rest = divmod(goal.amount, per_step)
        return 0 if rest else steps

    # --- the batch

    def build(self, goal: SampleTarget, trained: TrainedPolicies) -> BuiltBatch:
        """Make the batch; may be called repeatedly."""
        began = perf_counter()
        state = self._current.state
        counters, whole = state.counters, 0
        if self._complete:
            there = 0
            while there < goal.amount:
                there += getattr(state.finished[whole], goal.unit)
                whole += 1
            taken = state.finished[:whole]
            numbers = self._logs.of_episodes([episode.eps_id for episode in taken])
            env_steps = sum(episode.env_steps for episode in taken)
            delivered = taken[-1].round, taken[-1].env_id
        elif goal.unit == "agent_steps" and goal.amount < counters.closed_steps:
            delivered = self._logs.last_of_first(goal.amount)
            numbers = self._logs.closed_until(delivered)
            env_steps = counters.waiting_env_steps
        else:
            numbers, env_steps, delivered = self._logs.closed(), counters.waiting_env_steps, EVERYTHING
        batches, unroll_id = self.make(numbers, counters.unroll_id, trained, self._episodes.untrained)
        decisions = sum(map(len, numbers.values()))
        batch = MultiAgentBatch(batches, env_steps=env_steps, known=tuple(self._policies), agent_steps=decisions)
        self._metrics.timers["batch"].add(perf_counter() - began)
        return BuiltBatch(batch, delivered, whole, unroll_id)

    def after(self, built: BuiltBatch, before: RolloutState) -> RolloutState:
        """Return the state to publish when a batch is delivered, from the state it was built from."""
        state, batch = self._current.state, built.batch
        counters = state.counters.copy()
        counters.env_steps_delivered += batch.env_steps
        counters.agent_steps_delivered += batch.agent_steps
        counters.unroll_id = built.unroll_id
        if state is not before:  # a callback has called reset(), and what is in the batch has counted as lost
            counters.env_steps_lost -= batch.env_steps
            counters.agent_steps_lost -= batch.agent_steps
            return state._replace(counters=counters)
        counters.closed_steps -= batch.agent_steps
        if self._complete:
            taken = state.finished[: built.whole]
            counters.ended_episodes -= built.whole
            counters.ended_env_steps -= batch.env_steps
            counters.ended_agent_steps -= sum(episode.agent_steps for episode in taken)
        else:
            counters.ended_episodes = counters.ended_env_steps = 0
        return state._replace(counters=counters, delivered=built.delivered)

    # --- from transitions to policies' batches

    def make(
        self,
        numbers: Chosen,
        unroll_id: int = 0,
        is_trained: Callable[[str], bool] = lambda policy_id: True,
        untrained: Collection[int] = (),
    ) -> tuple[Mapping[str, SampleBatch], int]:
        """Make batches of these transitions, ascending: by policy id, and the number after the last fragment's.

        Rows of policies that are not trained are only shown to learner connectors. ``untrained``: ids of episodes that
        are for no batch, and shown to no callback.
        """
        found: dict[str, Rows] = {}
        shown = {runner: runner.log.without(own, untrained) for runner, own in numbers.items() if runner is not None}
        trained = [
            runner
            for runner, own in shown.items()
            if len(own) and not runner.is_frozen and is_trained(runner.policy_id)
        ]
        all_are_shown = any(len(runner.learner_connectors) for runner in trained)
        if all_are_shown and len(self._logs.unread.without(numbers[None], untrained)):
            unread = [repr(runner.policy_id) for runner in self._runners.values() if not runner.keeps_rows]
            raise StateError(
                f"learner connectors have come, and rows of the frozen policies {', '.join(unread)} were not kept for "
                f"them to look at: call reset()"
            )
        for runner, own in shown.items():
            if len(own) and (all_are_shown or runner in trained):
                columns, unroll_id = runner.log.read(own, unroll_id)
                if self._reward_dtype is not None:
                    columns["rewards"] = columns["rewards"].astype(self._reward_dtype, copy=False)
                found[runner.policy_id] = Rows(columns)
        return self._connected(trained, found), unroll_id

    def _connected(self, runners: Sequence[PolicyRunner], found: Mapping[str, Rows]) -> dict[str, SampleBatch]:
        """Send these runners' rows through their learner connectors, which may all look at all rows first."""
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
