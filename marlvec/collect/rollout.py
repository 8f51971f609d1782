"""`RolloutLoop`: in each tick policies act, envs step, and replies become transitions and rows to act on.

`BatchBuilder` chooses the closed transitions of a batch and builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.collect.background import SampleTarget
from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.callbacks import CallbackList, LossReason
from marlvec.collect.episodes import EndedAgents, EpisodeTracker
from marlvec.collect.metrics import Counters, CurrentState, Metrics, RolloutState, WholeEpisode
from marlvec.collect.policies import PolicyRouter, TrainedPolicies
from marlvec.collect.policy_runner import GroupActions, PolicyAnswer, PolicyRunner
from marlvec.collect.row_builder import RandomSteps, RowBuilder, RowStore
from marlvec.collect.row_log import EVERYTHING, RowLog, RowNumbers
from marlvec.collect.rows import UNREAD, PolicyAnswers, PolicyPart
from marlvec.collect.scheduling import EnvsNeeded, EnvStep, LockstepScheduler, scheduler_for
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.errors import ContractError, EnvFault, EnvsDriven, StateError
from marlvec.serialization.saved import State, check_fields, flag_field, number_field
from marlvec.vector.calls import is_interrupt
from marlvec.vector.vector_env import VectorEnv

IntArray = NDArray[np.int64]
Waiting = tuple[PolicyRunner, PolicyPart]
Idle = tuple[PolicyRunner, IntArray]  # and the lanes

_NONE = PolicyPart.none()


def _none_needed(pending: int) -> int:
    return 0


class RolloutLoop:
    """Steps envs with policies and keeps the books.

    A row that came out of the agent connectors is stored at once and waits, *ready*, for its policy. Once answered it
    is *open*, until the agent's next row, ready or last, closes it. An episode that is lost takes all its rows along
    that no batch holds yet, and is in no record.

    A tick has two halves: sending, from when the envs may have moved until it is on record what they were sent; and
    taking in, from when rows have left the envs until they are ready. Deciding, and waiting for the envs, change
    nothing. Each half publishes a state as its last act. Where an interrupt or an error ends a half, the number of what
    was begun is not that of the published state: `is_dirty`, until `recover`.
    """

    def __init__(
        self,
        envs: VectorEnv,
        router: PolicyRouter,
        episodes: EpisodeTracker,
        metrics: Metrics,
        current: CurrentState,
        *,
        keep_finished: bool,
        explore: bool,
        overlap: bool,
        callback_list: CallbackList,
        random_steps: RandomSteps,
        log: RowLog,
        scheduler: LockstepScheduler | None = None,
    ) -> None:
        self._envs, self._router, self._episodes, self._metrics = envs, router, episodes, metrics
        self._runners, self._log = router.runners, log
        self._keep_finished = keep_finished
        self._ended_agents = EndedAgents(envs.num_envs, envs.agents)
        self.scheduler = scheduler_for(envs, overlap=overlap) if scheduler is None else scheduler
        self._row_builder = RowBuilder(router, episodes, metrics, self.scheduler, copies=envs.copy)
        self._row_store = RowStore(log, router.runners, envs.num_envs, envs.agent_num)
        self._callback_list, self._random_steps = callback_list, random_steps
        self.explore = explore
        self._current = current
        self.steps_left = 0  # so many steps of all envs are needed in any case
        self._begun = 0  # number of the last state that was begun
        self._counters = current.state.counters  # of the state in the making
        self._finished: tuple[WholeEpisode, ...] = ()  # of the state in the making
        self._entropy = 0
        self._starting: tuple[int, int | None] | None = None  # what `start` was called with, until it is done

    # --- states

    @property
    def living(self) -> IntArray:
        """Ids of the envs that are not masked."""
        return self.scheduler.living

    @property
    def is_new(self) -> bool:
        """Whether no episode has ever begun."""
        return self._current.state.tick == 0

    @property
    def is_dirty(self) -> bool:
        """Whether something was begun and not finished: envs may have moved, and it is not known how far."""
        return self._begun != self._current.now[1]

    def _begin_state(self) -> Counters:
        """From here on the published state may not be what the envs are in."""
        state, tick, env_steps, agent_steps, closed_steps = self._current.now
        self._finished = state.finished
        self._counters = counters = state.counters.copy()
        counters.env_steps, counters.agent_steps, counters.closed_steps = env_steps, agent_steps, closed_steps
        self._begun = tick + 1
        return counters

    def _publish(self, tick: int | None = None) -> None:
        """Publish the state that was begun, or that of a tick, by one store."""
        episodes = self._episodes
        state = RolloutState(
            self._begun if tick is None else tick,
            self._counters,
            episodes.eps_id_N,
            episodes.ended_N,
            episodes.number_N,
            self._finished,
        )
        self._current.state, self._current.tick_counters, self._starting = state, None, None

    def start(self, *, entropy: int, seed: int | None) -> None:
        """Begin new episodes in all envs; what was not handed over is dropped.

        ``entropy`` seeds the episodes' own random streams, ``seed`` the envs' reset; None: they go on with their
        streams. Callbacks' errors are raised once all is done.
        """
        counters = self._begin_state()
        self._starting = entropy, seed
        self._log.clear()
        for runner in self._runners.values():
            runner.clear()
        self._choose_columns()
        self._entropy, self._finished = entropy, ()
        # What is in no batch now never will be.
        counters.env_steps_lost = counters.env_steps - counters.env_steps_delivered
        counters.agent_steps_lost = counters.agent_steps - counters.agent_steps_delivered
        counters.closed_steps = counters.ended_episodes = counters.ended_env_steps = counters.ended_agent_steps = 0
        self._episodes.restart(numbers=seed is not None)
        self._begin_anew(seed, "reset")

    def come_to_order(self) -> bool:
        """Bring what is stored to the published state: the one way to begin anything that looks at it.

        Rows of the batch that was delivered last are dropped; then, where something was begun and not finished, what
        ran is declared lost. In this order, so that what is recovered is in no batch. May be interrupted, and called
        again. Returns whether it recovered: all envs have begun new episodes. Raises as `recover`.
        """
        self._drop_delivered()
        if self.is_new or not self.is_dirty:
            return False
        self.recover()
        return True

    def _drop_delivered(self) -> None:
        state = self._current.state
        if state.delivered is None:
            return
        finished = state.finished
        if self._keep_finished:  # batches are of whole episodes
            taken = [episode for episode in finished if episode[:2] <= state.delivered]
            chosen = self._log.closed(_ids(taken))
            finished = finished[len(taken) :]
        else:
            chosen = self._log.closed_until(state.delivered)
            self._episodes.hand_over()
        self._log.forget(chosen)
        untrained = self._episodes.untrained
        for eps_id in tuple(untrained):
            if eps_id not in self._episodes.eps_id_N and not len(self._log.of_episodes(np.array([eps_id]))):
                untrained.discard(eps_id)
        self._current.state = state._replace(finished=finished, delivered=None)

    def recover(self) -> None:
        """Count the running episodes of an unfinished tick as lost, and begin new episodes in all envs.

        Rows of episodes that had ended stay. May be interrupted itself, and called again. `EnvFault`, `BrokenError`:
        the envs cannot begin; make new ones. Callbacks' errors are raised once all is done.
        """
        if self._starting is not None:
            entropy, seed = self._starting
            self.start(entropy=entropy, seed=seed)
            return
        before = self._current.state
        counters = self._begin_state()
        kept = self._log.keep_ended(before.ended_N)
        for runner in self._runners.values():
            runner.forget_waiting()
        self._metrics.forget_unpublished()
        self._episodes.number_N = before.number_N
        counters.env_steps_lost = counters.env_steps - counters.env_steps_delivered - counters.ended_env_steps
        counters.agent_steps_lost = counters.agent_steps - counters.agent_steps_delivered - kept
        counters.closed_steps = kept
        counters.episodes_interrupted += int(np.count_nonzero(before.eps_id_N >= 0))
        self._begin_anew(None, "interrupt")

    def _begin_anew(self, seed: int | None, why: LossReason) -> None:
        self._current.tick_counters, self.steps_left = self._counters, 0
        self._row_store.set_open(_NONE.lanes)
        self._callback_list.lose_all(why)
        self.scheduler.abandon()
        self._episodes.leave(self.scheduler.all_ids)
        self._router.playing = []  # so that it is built again, whatever an interrupt may have left
        self.scheduler.reset(seed=seed)
        self._welcome_all(self.scheduler.all_ids)
        self._callback_list.raise_held()

    # --- saved

    def get_state(self) -> State:
        """Return the loop's state, between two ticks with no step in flight; router and episodes save their own.

        External envs have none (`StateError`).
        """
        return {
            "reached": self._current.state.get_state(),
            "entropy": self._entropy,
            "explore": self.explore,
            "rounds": self.scheduler.get_state(),
            "random_steps": self._random_steps.get_state(),
            "ended_agents": self._ended_agents.get_state(),
        }

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it, once envs and episodes are."""
        parts: dict[str, LockstepScheduler | RandomSteps | EndedAgents]
        parts = {"rounds": self.scheduler, "random_steps": self._random_steps, "ended_agents": self._ended_agents}
        check_fields(state, ("reached", "entropy", "explore", *parts), "rollout")
        entropy = number_field(state, "entropy", "rollout")
        reached, explore = self._current.state.with_state(state["reached"]), flag_field(state, "explore", "rollout")
        puts = [part.prepare(state[name]) for name, part in parts.items()]

        def put() -> None:
            for part in puts:
                part()
            if reached.tick:
                self._router.update()
            self._row_store.set_open(self._log.open_lanes)
            self.steps_left = 0
            self._entropy, self.explore = entropy, explore
            self._begun, self._counters, self._finished = reached.tick, reached.counters, reached.finished
            self._publish(reached.tick)

        return put

    def restart_envs(self, env_ids: IntArray, seed: int | None) -> None:
        """Lose what runs in these envs, as if they asked for it, and begin new episodes. After `EnvFault`: `start`."""
        env_ids = self.scheduler.of_living(env_ids)
        if not len(env_ids):
            return
        counters = self._begin_state()
        self._current.tick_counters = counters
        counters.agent_steps_lost -= sum(runner.forget_ready(env_ids) for runner in self._runners.values())  # undecided
        self._drop(env_ids)
        counters.episodes_restarted += len(env_ids)
        self._callback_list.lose(env_ids, ["restart"] * len(env_ids))
        self._episodes.leave(env_ids)
        self.scheduler.reset(env_ids=env_ids, seed=seed)
        self._welcome_all(env_ids)

    def _welcome_all(self, env_ids: IntArray) -> None:
        """Take in the first rows of all these envs, which were reset."""
        self._row_store.look_who_is_read()
        for env_step in self.scheduler.receive_all(env_ids):
            self.scheduler.leave_out_masked(env_step)
            self._welcome(env_step)
        self._publish()

    # --- where rows are stored

    def begin_call(self, needed: EnvsNeeded, length: int) -> None:
        """Get ready for the steps of one call of `Collector.collect`.

        ``length``: how many steps all envs are to make; 0 where they make different numbers of them.
        """
        self.scheduler.begin_call(needed)
        self._choose_columns()
        self.steps_left = length if self.scheduler.all_go_together else 0
        if self.steps_left and self._episodes.is_static:
            waiting = {}
            for runner in self._router.playing:
                ready = runner.ready
                if len(ready.lanes) != len(self._router.everyone(runner, self.scheduler.all_ids).lanes):
                    return
                if not runner.keeps_rows:
                    return
                waiting[runner.number] = ready
            self._log.begin_blocks(length, waiting)

    def _choose_columns(self) -> None:
        """Keep no rows of frozen policies where nothing reads them: where there are no learner connectors."""
        runners = self._runners.values()
        are_shown = any(len(runner.learner_connectors) for runner in runners)
        for runner in runners:
            runner.keep_rows(are_shown or not runner.is_frozen)
        self._row_store.look_who_is_read()

    # --- one tick

    def receive_pending(self) -> None:
        """Take in what is on the way, and send nothing."""
        self.scheduler.begin_call(_none_needed)
        self._row_store.look_who_is_read()
        while self.scheduler.is_on_the_way:
            self.step(_none_needed)

    def step(self, needed: EnvsNeeded) -> None:
        """Send to the envs that are due, and take in those that come back next.

        ``needed`` says how many envs' steps are needed, at least one.

        Raises:
            StateError: All envs are masked.
            ContractError, Exception: From policies and action connectors: nothing was sent, all is as before.
            EnvFault, Exception: From envs and agent connectors: `recover` is to go on.
            EnvsDriven: Other code has driven the envs; until `start` they are not touched.
            KeyboardInterrupt: In policies, action connectors and while envs are waited for: all is as before. Anywhere
                else: `recover` is to go on.
            BaseException: From callbacks, once the step is finished.
        """
        if not len(self.scheduler.living):
            raise StateError("no env is left to step: all are masked after faults; make() new ones")
        scheduler, steps_N = self.scheduler, self._episodes.steps_N
        if self.steps_left and scheduler.all_go_together:
            env_ids, self.steps_left = None, self.steps_left - 1
        else:
            env_ids, self.steps_left = scheduler.due(needed, steps_N), 0
        while env_ids is None or len(env_ids):
            self._act(env_ids)
            if env_ids is None:
                break
            env_ids = scheduler.due(needed, steps_N)
        current, timers = self._current, self._metrics.timers
        tick = current.now[1]
        self._begun = tick + 1
        began = perf_counter()
        try:
            env_step = scheduler.receive()
        except BaseException as error:
            self._begun = tick + self._is_lost(error)
            raise
        now = perf_counter()
        waiting, ingesting = timers["env_wait"], timers["ingest"]
        waiting.seconds, waiting.calls = waiting.seconds + now - began, waiting.calls + 1
        connecting, calling = timers["agent_connectors"], timers["callbacks"]
        before = connecting.seconds + calling.seconds
        is_quiet = not (env_step.eventful or env_step.is_first or self._callback_list.follows)
        if is_quiet:
            self._episodes.add_rewards(env_step.where, env_step.rewards, stay=self._envs.copy)
            closed = self._observe(env_step)
            state, _, env_steps, agent_steps, closed_steps = current.now
        else:
            self._begin_state()
            current.tick_counters = self._counters
            if env_step.is_first:
                self._welcome(env_step)
            else:
                self._take_in(env_step)
        ingesting.seconds += perf_counter() - now - (connecting.seconds + calling.seconds - before)
        ingesting.calls += 1
        if is_quiet:
            current.now = state, tick + 1, env_steps + len(env_step.env_ids), agent_steps, closed_steps + closed
            return
        self._publish()
        if self._callback_list.follows:
            self._callback_list.raise_held()

    def _is_lost(self, error: BaseException) -> bool:
        """Whether an error, of the envs or Ctrl-C, came when they had moved and it is not known how far."""
        if isinstance(error, EnvsDriven):
            return False  # so says the next call, too
        return isinstance(error, EnvFault) or not self.scheduler.is_waiting or self.scheduler.is_driven

    # --- from ready rows to the envs

    def _act(self, env_ids: IntArray | None) -> None:
        """Have the policies answer the ready rows of some envs, or of all, and send that off; to be published.

        Until the envs have taken the actions nothing changes here, so that a call that fails can be made again.
        """
        began = perf_counter()
        current = self._current
        asked, waiting, idle = self._waiting_rows(env_ids)
        acting_envs = self.scheduler.all_ids if env_ids is None else env_ids
        try:
            answers = []
            for runner, ready in asked:
                answers.append(runner.act(ready, explore=self.explore))
            decided = perf_counter()
            for answer in answers:
                answer.runner.transform(answer)
            actions = self._actions(answers, idle, acting_envs)
            sending = perf_counter()
            self._begun = current.now[1] + 1
            for runner, _ in asked:
                runner.unsent = None  # if the envs refuse these actions the policies are asked again
            self.scheduler.send(actions, env_ids)
        except BaseException as error:
            if not is_interrupt(error):
                self._begun = current.now[1]  # nothing was sent
            raise
        if not self._random_steps.is_over:
            self._random_steps.count(acting_envs)
        said, acted, decisions = [], [], 0
        for answer in answers:
            runner, ready = answer.runner, answer.ready
            acted.append(ready.lanes)
            decisions += len(ready.lanes)
            if runner.keeps_rows:
                said.append(PolicyAnswers(runner.number, ready.lanes, answer.parts))
            runner.note_sent(answer)
        if said:
            self._log.answer(said)
        if answers:
            places: Where = answers[0].ready.where if len(answers) == 1 else np.concatenate(acted)
            self._episodes.count_turns(places, decisions)
        for runner, rest in waiting:
            runner.ready = rest
        timers = self._metrics.timers
        inference, connecting = timers["inference"], timers["action_connectors"]
        inference.seconds, inference.calls = inference.seconds + decided - began, inference.calls + 1
        connecting.seconds, connecting.calls = connecting.seconds + sending - decided, connecting.calls + 1
        if idle:
            counters = self._begin_state()
            for runner, lanes in idle:
                runner.noops.lanes = np.setdiff1d(runner.noops.lanes, lanes, assume_unique=True)
                counters.noop_steps += len(lanes)
            counters.agent_steps += decisions
            self._publish()
        else:
            state, tick, env_steps, agent_steps, closed_steps = current.now
            current.now = state, tick + 1, env_steps, agent_steps + decisions, closed_steps

    def _actions(self, answers: Sequence[PolicyAnswer], idle: Sequence[Idle], env_ids: IntArray) -> object:
        """What is sent to these envs."""
        if len(answers) == 1 and not idle:
            [answer] = answers
            found = self._router.all_actions(answer, env_ids, grouped=self._envs.grouped)
            if found is not None:
                return found
        parts = [GroupActions(a.runner.group_index, a.ready.lanes, a.for_env) for a in answers]
        parts += [GroupActions(runner.group_index, lanes, runner.noops.actions(lanes)) for runner, lanes in idle]
        return self._router.actions(parts, env_ids, grouped=self._envs.grouped)

    def _waiting_rows(self, env_ids: IntArray | None) -> tuple[list[Waiting], list[Waiting], list[Idle]]:
        """Return, for some envs or all: each policy's ready rows, its other ready rows, and its idle agents."""
        chosen = None if env_ids is None else self.scheduler.among_those_back(env_ids)
        asked: list[Waiting] = []
        waiting: list[Waiting] = []
        idle: list[Idle] = []
        for runner in self._router.playing:
            if runner.declares_noop and len(runner.noops.lanes):
                lanes = runner.noops.lanes
                idle.append((runner, lanes if chosen is None else lanes[chosen[lanes // self._envs.agent_num]]))
            ready, rest = runner.ready, _NONE
            if not len(ready.lanes):
                continue
            if chosen is not None:
                mine = chosen[ready.lanes // self._envs.agent_num]
                ready, rest = ready.take(mine), ready.take(~mine)
            if len(ready.lanes):
                if not self._random_steps.is_over:
                    self._random_steps.note(runner, ready)
                asked.append((runner, ready))
            waiting.append((runner, rest))
        return asked, waiting, idle

    # --- from the envs to ready rows

    def _take_in(self, env_step: EnvStep) -> None:
        """Take in one step of some envs."""
        envs = env_step.where
        self._counters.env_steps += len(env_step.env_ids)
        self._episodes.add_rewards(envs, env_step.rewards, stay=False)
        if self._callback_list.follows:
            self._callback_list.step(env_step)
        later = None
        if env_step.eventful:
            if np.count_nonzero(env_step.fault):  # a fifth of the time of any()
                self._lose(env_step)
            if np.count_nonzero(env_step.ended):
                later = self._close(env_step)
            if np.count_nonzero(env_step.done):
                self._turn_over(env_step)
        self._counters.closed_steps += self._observe(env_step, later)

    def _lose(self, env_step: EnvStep) -> None:
        """Drop what is stored of the episodes that were lost."""
        env_ids = env_step.env_ids[env_step.fault]
        self._drop(env_ids)
        counters, quiet = self._counters, int(np.count_nonzero(env_step.quiet))
        counters.episodes_faulty += len(env_ids) - quiet
        counters.episodes_restarted += quiet
        self._callback_list.lose(env_ids, ["restart" if quiet else "fault" for quiet in env_step.quiet[env_step.fault]])

    def _drop(self, env_ids: IntArray) -> None:
        """Drop what is stored of the episodes that run in these envs, and count it as lost."""
        eps_ids, counters = self._episodes.eps_id_N[env_ids], self._counters
        still_open, closed = self._row_store.shut_envs(env_ids), self._log.lose(eps_ids)
        counters.closed_steps -= closed
        counters.env_steps_lost += self._episodes.waiting_steps(env_ids)
        counters.agent_steps_lost += closed + still_open

    def _close(self, env_step: EnvStep) -> IntArray | None:
        """Take in the final observations of agents that ended, but for those of `_closed_later`, which it returns."""
        self._episodes.see(env_step.where, env_step.ended)
        self._ended_agents.note(env_step)
        lanes = self._router.lanes(env_step.env_ids, env_step.ended)
        where = self._router.index(env_step.env_ids, lanes)
        self._episodes.truncate(lanes[~env_step.terminated[where]])
        missing = env_step.missing[where]
        if np.count_nonzero(missing):  # agents without a final observation have no last row if they had no row before
            lanes = lanes[~missing | self._episodes.seen_L[lanes]]
        later = self._closed_later(env_step, lanes)
        if later is not None:
            lanes = np.setdiff1d(lanes, later, assume_unique=True)
        self._counters.closed_steps += self._row_store.close(self._row_builder.build(env_step, lanes, last=True))
        return later

    def _closed_later(self, env_step: EnvStep, lanes: IntArray) -> IntArray | None:
        """Return the ended lanes whose last rows pass their connectors together with their team's next rows.

        Where connectors look at other agents, and an episode goes on after some of its agents have ended.
        """
        runners = [runner for runner in self._router.playing if runner.agent_connectors.across_agents]
        if not runners:
            return None
        goes_on = env_step.ended & ~env_step.done[:, None] & ~env_step.acting  # an agent may come back at once
        goes_on &= ~env_step.missing  # those without a final observation have none to show to others
        found = lanes[goes_on[self._router.index(env_step.env_ids, lanes)] & self._router.played_by(runners, lanes)]
        return found if len(found) else None

    def _turn_over(self, env_step: EnvStep) -> None:
        """Finish the episodes that ended, and begin the next ones, also where one was lost."""
        ended = env_ids = env_step.env_ids[env_step.done]
        if np.count_nonzero(env_step.fault):
            env_ids = env_step.env_ids[env_step.done & ~env_step.fault]
        open_nA = self._row_store.open_of(env_ids)
        if np.count_nonzero(open_nA):
            i, a = np.argwhere(open_nA)[0].tolist()
            raise ContractError(
                f"env {int(env_ids[i])} ended its episode, but agent {self._envs.agents[a]!r} was neither terminated "
                f"nor truncated"
            )
        finished = self._episodes.finish(env_ids)
        self._callback_list.end(finished)
        self._metrics.add(finished)
        counters = self._counters
        counters.episodes_total += len(finished)
        counters.ended_episodes += len(finished)
        counters.ended_env_steps += self._episodes.waiting_steps(env_ids)
        if self._keep_finished:
            decisions = finished.lengths.sum(axis=1)
            counters.ended_agent_steps += int(decisions.sum())
            columns = (self.scheduler.order_N[env_ids], env_ids, finished.eps_id, finished.length, decisions)
            whole = map(WholeEpisode, *(column.tolist() for column in columns))
            self._finished = tuple(sorted(chain(self._finished, whole)))
        self.scheduler.leave_out_masked(env_step)
        begun = self.scheduler.begin_next(env_step, ended, self._idle_actions)
        if len(begun) < len(ended):
            self._episodes.leave(np.setdiff1d(ended, begun, assume_unique=True))
        self._begin(begun)

    def _idle_actions(self, env_ids: IntArray) -> object:
        return self._router.actions((), env_ids, grouped=self._envs.grouped)

    def _welcome(self, env_step: EnvStep) -> None:
        """Take in rows that begin episodes."""
        self._begin(env_step.env_ids)
        self._counters.closed_steps += self._observe(env_step)

    def _begin(self, env_ids: IntArray) -> None:
        """Forget these envs' episodes; begin new episodes in the living envs, and choose their policies."""
        for runner in self._router.remembering:
            runner.reset_connectors(env_ids)
        for runner in self._router.playing or self._runners.values():
            runner.begin(env_ids)
        self._ended_agents.forget(env_ids)
        env_ids = self.scheduler.of_living(env_ids)
        if self._episodes.begin(env_ids, self._entropy) or not self._router.playing:
            self._router.update()
        if self._callback_list.follows:
            policy_ids = {number: runner.policy_id for number, runner in self._runners.items()}
            self._callback_list.create(env_ids, self._episodes, policy_ids, self._entropy)

    def _observe(self, env_step: EnvStep, later: IntArray | None = None) -> int:
        """Take in the observations of agents that must act now, and those of `_closed_later`.

        Returns how many transitions were closed.
        """
        all_act, closed = np.count_nonzero(env_step.acting) == env_step.acting.size, 0
        if not self._episodes.all_are_present:
            self._episodes.see(env_step.where, env_step.alive)
        if self._ended_agents.any_gone:
            self._ended_agents.check(env_step, self._episodes)
        if env_step.given:
            self._note_given(env_step)
        if env_step.untrained:
            self._episodes.untrained.update(self._episodes.eps_id_N[env_step.untrained].tolist())
        acting = None if all_act else self._router.lanes(env_step.env_ids, env_step.acting)
        if later is None:
            built = self._row_builder.build(env_step, acting, last=False)
        else:
            ends, built = self._row_builder.build_together(env_step, acting, later)
            closed = self._row_store.close(ends)
        follows = self._callback_list.follows
        closed += self._row_store.wait(built, hands_over=self._envs.copy and not follows)
        if follows:
            self._callback_list.start()
        return closed

    def _note_given(self, env_step: EnvStep) -> None:
        """Note what agents do without asking their policies."""
        for env_id, name, action, is_env in env_step.given:
            a = self._envs.agents.index(name)
            if env_step.acting[np.searchsorted(env_step.env_ids, env_id), a]:
                runner = self._runners[self._episodes.policy_NA[env_id, a]]
                lane, where = env_id * self._envs.agent_num + a, f"env {env_id}: agent {name!r}"
                runner.off_policy.note(lane, action, where, is_env=is_env)


def _ids(episodes: Sequence[WholeEpisode]) -> IntArray:
    return np.array([episode.eps_id for episode in episodes], np.int64)


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
        log: RowLog,
        episodes: EpisodeTracker,
        metrics: Metrics,
        policies: Collection[str],
        *,
        complete: bool,
        reward_dtype: DTypeLike | None,
    ) -> None:
        self._current, self._runners, self._episodes, self._metrics = current, runners, episodes, metrics
        self._log = log
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
            numbers = self._log.closed(_ids(taken))
            env_steps = sum(episode.env_steps for episode in taken)
            delivered = taken[-1].round, taken[-1].env_id
        elif goal.unit == "agent_steps" and goal.amount < counters.closed_steps:
            delivered = self._log.last_of_first(goal.amount)
            numbers = self._log.closed_until(delivered)
            env_steps = counters.waiting_env_steps
        else:
            numbers, env_steps, delivered = self._log.closed(), counters.waiting_env_steps, EVERYTHING
        batches, unroll_id = self.make(numbers, counters.unroll_id, trained, self._episodes.untrained)
        decisions = len(numbers)
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
        if state.tick != before.tick:  # a callback has called reset(), and what is in the batch has counted as lost
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
        numbers: RowNumbers,
        unroll_id: int = 0,
        is_trained: Callable[[str], bool] = lambda policy_id: True,
        untrained: Collection[int] = (),
    ) -> tuple[Mapping[str, SampleBatch], int]:
        """Make batches of these transitions, ascending: by policy id, and the number after the last fragment's.

        Rows of policies that are not trained are only shown to learner connectors. ``untrained``: ids of episodes that
        are for no batch, and shown to no callback.
        """
        found: dict[str, Rows] = {}
        numbers = self._log.without(numbers, untrained)
        self._log.begin_batch(numbers)
        counts = self._log.counts(numbers)
        shown = [runner for runner in self._runners.values() if runner.number in counts]
        trained = [runner for runner in shown if not runner.is_frozen and is_trained(runner.policy_id)]
        all_are_shown = any(len(runner.learner_connectors) for runner in trained)
        if all_are_shown and UNREAD in counts:
            unread = [repr(runner.policy_id) for runner in self._runners.values() if not runner.keeps_rows]
            raise StateError(
                f"learner connectors have come, and rows of the frozen policies {', '.join(unread)} were not kept for "
                f"them to look at: call reset()"
            )
        for runner in shown:
            if all_are_shown or runner in trained:
                columns, unroll_id = self._log.read(runner.number, numbers, unroll_id)
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
