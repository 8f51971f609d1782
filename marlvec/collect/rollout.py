"""One tick after another: policies answer, envs step, and what comes back becomes transitions and ready rows.

Axis letters: N envs, A agents, n rows or envs of one call, L lanes (N * A, one per env and agent).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.noop_actions import GroupActions
from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyAnswer, PolicyRunner, ReadyRows, Selection
from marlvec.collect.acting.random_steps import RandomSteps
from marlvec.collect.acting.row_builder import RowBuilder
from marlvec.collect.callbacks.callback import LossReason
from marlvec.collect.callbacks.callback_list import CallbackList
from marlvec.collect.episodes import EndedAgents, EpisodeTracker
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.rollout_state import Counters, CurrentState, RolloutState, WholeEpisode
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.collect.scheduling.lockstep import EnvsNeeded
from marlvec.collect.scheduling.on_demand import scheduler_for
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.errors import ContractError, EnvFault, EnvsDriven, StateError
from marlvec.vector.vector_env import VectorEnv

__all__ = ["RolloutLoop"]

IntArray = NDArray[np.int64]
Missing = NDArray[np.bool_] | None  # see SlotBuffer.append

_NONE = ReadyRows.none()
_NO_NUMBERS = np.zeros(0, np.int64)
_DENSE_TRIES = 3  # calls in a row that turned out to need slots, after which no more try without


def _nobody(pending: int) -> int:
    return 0


class RolloutLoop:
    """Steps envs with policies and keeps the books.

    A row that came out of the agent connectors is stored at once and waits, *ready*, for its policy. Once answered it
    is *open*, until the agent's next row, ready or last, closes it. An episode that is lost takes all its rows along
    that no batch holds yet, and is in no record.

    A tick has two halves, and each of them publishes a state as its last act: sending, from when the envs may have
    moved until it is on record what they were sent; and taking in, from when rows have left the envs until they are
    ready. Deciding, and waiting for the envs, change nothing. Where an interrupt or an error ends a half, the number of
    what was begun is not that of the published state: `is_dirty`, until `recover`.

    Args:
        envs: The envs.
        router: Who plays whom.
        episodes: The accounts of the running episodes.
        metrics: Where finished episodes and times go.
        current: Where states are published.
        keep_finished: Whether to note episodes that ended.
        explore: Whether policies explore.
        overlap: Whether policies answer for some envs while others step.
        callback_list: Who is told what happens.
        random_steps: In which steps agents act at random.

    Attributes:
        explore: Whether policies explore.
        scheduler: What goes to the envs and comes back.
        steps_left: So many steps of all envs are needed in any case, as `choose_storage` was told.
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
    ) -> None:
        self._envs, self._router, self._episodes, self._metrics = envs, router, episodes, metrics
        self._runners = router.runners
        self._row_builder = RowBuilder(router, episodes, metrics)
        self._keep_finished = keep_finished
        self._ended_agents = EndedAgents(envs.num_envs, envs.agents)
        self.scheduler = scheduler_for(envs, overlap=overlap)
        self._callback_list, self._random_steps = callback_list, random_steps
        self.explore = explore
        self._current = current
        self._is_dense = False  # whether the runners that play have dense buffers
        self.steps_left = 0
        self._failed_tries = 0  # at that, in a row
        self._begun = 0  # number of the last state that was begun
        self._counters = current.state.counters  # of the state in the making
        self._finished: tuple[WholeEpisode, ...] = ()  # likewise
        self._entropy = 0
        self._starting: tuple[int, int | None] | None = None  # what `start` was told, until it is done
        self._transformed: list[PolicyAnswer] = []  # what action connectors have seen in a call that failed there

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
        """Whether something was begun and not finished: envs may have moved, and nobody knows how far."""
        return self._begun != self._current.state.tick

    def _begin_state(self) -> Counters:
        """From here on the published state may not be what the envs are in."""
        state = self._current.state
        self._finished = state.finished
        self._counters = counters = state.counters.copy()
        self._begun = state.tick + 1
        return counters

    def _publish(self) -> None:
        """What was begun is done. One store ends the danger."""
        episodes = self._episodes
        state = RolloutState(
            self._begun,
            self._counters,
            episodes.eps_id_N,
            episodes.ended_N,
            episodes.number_N,
            self._finished,
        )
        self._current.state, self._current.told, self._starting = state, None, None

    def start(self, *, entropy: int, seed: int | None) -> None:
        """Begin new episodes in all envs; what was not handed over is dropped.

        Args:
            entropy: Seed of the episodes' own random streams.
            seed: Seed of the envs' reset; None: they go on with their streams.

        Raises:
            BaseException: What a callback raised, once all is done.
        """
        counters = self._begin_state()
        self._starting = entropy, seed
        for runner in self._runners.values():
            runner.clear()
        self._choose_columns()
        self._entropy, self._finished, self._failed_tries = entropy, (), 0
        # What is in no batch now never will be.
        counters.env_steps_lost = counters.env_steps - counters.env_steps_delivered
        counters.agent_steps_lost = counters.agent_steps - counters.agent_steps_delivered
        counters.closed_steps = counters.ended_episodes = counters.ended_env_steps = counters.ended_agent_steps = 0
        self._episodes.restart(numbers=seed is not None)
        self._begin_anew(seed, "reset")

    def recover(self) -> None:
        """Where something was begun and not finished: declare lost what ran, and begin new episodes in all envs.

        Rows of episodes that had ended stay. May be interrupted itself, and called again.

        Raises:
            EnvFault, BrokenError: The envs cannot begin; make new ones.
            BaseException: What a callback raised, once all is done.
        """
        if self._starting is not None:
            entropy, seed = self._starting
            self.start(entropy=entropy, seed=seed)
            return
        before = self._current.state
        counters = self._begin_state()
        kept = 0
        for runner in self._runners.values():
            runner.keep_ended(before.ended_N)
            kept += len(runner.trajectories.closed())
        self._metrics.forget_unpublished()
        self._episodes.number_N = before.number_N
        counters.env_steps_lost = counters.env_steps - counters.env_steps_delivered - counters.ended_env_steps
        counters.agent_steps_lost = counters.agent_steps - counters.agent_steps_delivered - kept
        counters.closed_steps = kept
        counters.episodes_interrupted += int(np.count_nonzero(before.eps_id_N >= 0))
        self._begin_anew(None, "interrupt")

    def _begin_anew(self, seed: int | None, why: LossReason) -> None:
        self._current.told, self._is_dense = self._counters, False
        self._callback_list.lose_all(why)
        self.scheduler.abandon()
        self._transformed = []
        self._episodes.leave(self.scheduler.all_ids)
        self._router.playing = []  # so that it is looked at anew, whatever an interrupt may have left
        self.scheduler.reset(seed=seed)
        for env_step in self.scheduler.receive_all(self.scheduler.all_ids):
            self.scheduler.leave_out_masked(env_step)
            self._welcome(env_step)
        self._publish()
        self._callback_list.raise_held()

    # --- where rows are stored

    def choose_storage(self, length: int) -> None:
        """Have rows stored in dense buffers where all agents act in each of the steps to come, as far as is known.

        Where that turns out not to be so, slots take over all that is stored, and nothing that can be seen differs.

        Args:
            length: How many steps all envs are to make; 0 where they make different numbers of them.
        """
        self._choose_columns()
        if self._is_dense:
            self._failed_tries = 0  # it was so to the end
        self._is_dense, self.steps_left = False, 0
        playing = self._router.playing
        if length and self._failed_tries < _DENSE_TRIES and self._all_act:
            tick = int(self.scheduler.round_N[0])
            with suppress(MemoryError):  # where so much is asked for that an interrupt is to end it
                for runner in playing:
                    runner.use_dense(length, tick, self._episodes.length_N)
                self._is_dense, self.steps_left = True, length
                return
        for runner in playing:
            runner.use_slots()

    def _choose_columns(self) -> None:
        """Keep no rows of frozen policies where nobody will read them: where there are no learner connectors."""
        runners = self._runners.values()
        are_shown = any(len(runner.learner_connectors) for runner in runners)
        for runner in runners:
            if not len(runner.trajectories):
                runner.trajectories.keeps_columns = are_shown or not runner.is_frozen

    @property
    def _all_act(self) -> bool:
        """Whether all agents of all envs are to act now, and will go on doing so as far as is known."""
        if not self.scheduler.all_go_together or not self._random_steps.is_over:
            return False
        if not self._episodes.is_static or self._episodes.untrained:
            return False
        playing = self._router.playing
        waiting = sum(len(runner.ready.lanes) for runner in playing)
        return waiting == self._episodes.policy_NA.size and all(runner.decides_for_all for runner in playing)

    def _use_slots(self) -> None:
        """Not all agents act, or not in all envs: have slots take over."""
        self._is_dense, self.steps_left = False, 0
        self._failed_tries += 1
        for runner in self._router.playing:
            runner.use_slots()

    # --- one tick

    def settle(self) -> None:
        """Take in what is on the way, and send nothing."""
        self.scheduler.begin_call(_nobody)
        while self.scheduler.is_on_the_way:
            self.step(_nobody)

    def step(self, needed: EnvsNeeded) -> None:
        """Send to the envs that are due, and take in those that come back next.

        Args:
            needed: How many envs' steps are needed, one or more.

        Raises:
            StateError: All envs are masked.
            ContractError, Exception: From policies and action connectors: nothing was sent, all is as before.
            EnvFault, Exception: From envs and agent connectors: `recover` is to go on.
            EnvsDriven: Somebody else has driven the envs; until `start` they are not touched.
            KeyboardInterrupt: In policies, action connectors and while envs are waited for: all is as before. Anywhere
                else: `recover` is to go on.
            BaseException: From callbacks, once the step is finished.
        """
        if not len(self.living):
            raise StateError("all envs are masked after faults, so there is nobody left to step; make() new ones")
        if self._is_dense:
            self._act_for_all()
        else:
            while (env_ids := self.scheduler.due(needed, self._episodes.steps_N)) is None or len(env_ids):
                self._act(env_ids)
        began = perf_counter()
        self._begin_state()
        try:
            env_step = self.scheduler.receive()
        except EnvsDriven:
            self._begun = self._current.state.tick  # so says the next call, too
            raise
        except EnvFault:
            raise
        except BaseException:
            if self.scheduler.is_waiting and not self.scheduler.is_driven:
                self._begun = self._current.state.tick  # nothing has come
            raise
        timers = self._metrics.timers
        now = perf_counter()
        waiting, ingesting = timers["env_wait"], timers["ingest"]
        waiting.seconds, waiting.calls = waiting.seconds + now - began, waiting.calls + 1
        connecting, telling = timers["agent_connectors"], timers["callbacks"]
        before = connecting.seconds + telling.seconds
        self._current.told = self._counters
        if env_step.is_first:
            self._welcome(env_step)
        else:
            self._take_in(env_step)
        ingesting.seconds += perf_counter() - now - (connecting.seconds + telling.seconds - before)
        ingesting.calls += 1
        self.steps_left -= self.steps_left > 0
        self._publish()
        if self._callback_list.follows:
            self._callback_list.raise_held()

    # --- from ready rows to the envs

    def _act(self, env_ids: IntArray | None) -> None:
        """Have the policies answer the ready rows of some envs, or of all, and send that off.

        Until the envs have taken the actions nothing changes here, so that a call that fails can be made again.
        """
        began = perf_counter()
        chosen = self.scheduler.among_those_back(env_ids)
        answers: list[PolicyAnswer] = []
        waiting: list[ReadyRows] = []
        idle: list[tuple[PolicyRunner, IntArray]] = []
        for runner in self._runners.values():
            ready, rest = runner.ready, _NONE
            if runner.group_index >= 0 and len(runner.noops.lanes):
                lanes = runner.noops.lanes
                idle.append((runner, lanes if chosen is None else lanes[chosen[lanes // self._envs.agent_num]]))
            if chosen is not None:
                mine = chosen[ready.lanes // self._envs.agent_num]
                ready, rest = ready.take(mine), ready.take(~mine)
            if len(ready.lanes):
                if not self._random_steps.is_over:
                    self._random_steps.note(runner, ready)
                answers.append(self._seen_before(runner, ready) or runner.act(ready, explore=self.explore))
            waiting.append(rest)
        decided = perf_counter()
        self._transform(answers)
        acting_envs = self.scheduler.all_ids if env_ids is None else env_ids
        parts = [answer.part for answer in answers]
        parts += [GroupActions(runner.group_index, lanes, runner.noops.actions(lanes)) for runner, lanes in idle]
        actions = self._router.actions(parts, acting_envs, grouped=self._envs.grouped)
        sending = perf_counter()
        counters = self._begin_state()
        self._transformed = []  # where the envs refuse these actions the policies are asked anew
        try:
            self.scheduler.send(actions, env_ids)
        except Exception:
            self._begun = self._current.state.tick  # nothing was sent
            raise
        if not self._random_steps.is_over:
            self._random_steps.count(acting_envs)
        for answer in answers:
            runner, lanes = answer.runner, answer.ready.lanes
            runner.trajectories.answer(answer.ready.places, answer.parts)
            runner.noops.note_sent(lanes, answer.for_env)
            runner.off_policy.forget(lanes)
            runner.agent_connectors.on_policy_output(answer.rows)
            self._episodes.turn_L[answer.ready.places] += 1
            counters.agent_steps += len(lanes)
        for runner, rest in zip(self._runners.values(), waiting, strict=True):
            runner.ready = rest
        for runner, lanes in idle:
            runner.noops.lanes = np.setdiff1d(runner.noops.lanes, lanes)
            counters.noop_steps += len(lanes)
        self._note_times(decided - began, sending - decided)
        self._publish()

    def _act_for_all(self) -> None:
        """`_act` where all agents of all envs do: there is nothing to choose, and nothing else to be sent."""
        began = perf_counter()
        playing, before = self._router.playing, self._transformed
        lend = self._envs.copy and not self._callback_list.follows
        try:
            answers = [
                (before and self._seen_before(runner, runner.ready))
                or runner.act(runner.ready, explore=self.explore, lend=lend)
                for runner in playing
            ]
            decided = perf_counter()
            self._transform(answers)
            parts = [GroupActions(a.runner.group_index, a.ready.lanes, a.for_env) for a in answers]
            actions = self._router.actions(parts, self.scheduler.all_ids, grouped=self._envs.grouped)
            sending = perf_counter()
            counters = self._begin_state()
            self._transformed = []
            self.scheduler.send(actions, None)
        except BaseException as error:
            if isinstance(error, Exception):
                self._begun = self._current.state.tick  # nothing was sent
            for runner in playing:
                runner.restore_ready()
            raise
        for answer in answers:
            runner = answer.runner
            runner.trajectories.answer(answer.ready.places, answer.parts)
            runner.agent_connectors.on_policy_output(answer.rows)
            runner.ready = _NONE
        self._episodes.turn_L += 1
        counters.agent_steps += len(self._episodes.turn_L)
        self._note_times(decided - began, sending - decided)
        self._publish()

    def _transform(self, answers: list[PolicyAnswer]) -> None:
        """Send answers through their action connectors, which see each of them once, whatever fails after that."""
        try:
            for answer in answers:
                if not answer.for_env:
                    answer.runner.transform(answer)
        finally:
            self._transformed = [answer for answer in answers if answer.for_env]

    def _note_times(self, deciding: float, connecting: float) -> None:
        timers = self._metrics.timers
        inference, connectors = timers["inference"], timers["action_connectors"]
        inference.seconds, inference.calls = inference.seconds + deciding, inference.calls + 1
        connectors.seconds, connectors.calls = connectors.seconds + connecting, connectors.calls + 1

    def _seen_before(self, runner: PolicyRunner, ready: ReadyRows) -> PolicyAnswer | None:
        """The answer that its action connectors have seen in a call that failed at another's: they see it once."""
        for answer in self._transformed:
            if answer.runner is runner and np.array_equal(answer.ready.lanes, ready.lanes):
                answer.ready = ready
                return answer
        return None

    # --- from the envs to ready rows

    def _take_in(self, env_step: EnvStep) -> None:
        """Take in one step of some envs."""
        envs = env_step.where
        self._counters.env_steps += len(env_step.env_ids)
        self._episodes.pay(envs, env_step.rewards)
        if self._callback_list.follows:
            self._callback_list.step(env_step)
        if env_step.eventful:
            if self._is_dense and (env_step.fault.any() or (env_step.ended != env_step.done[:, None]).any()):
                self._use_slots()
            if np.count_nonzero(env_step.fault):  # a fifth of the time of any()
                self._lose(env_step)
            if np.count_nonzero(env_step.ended):
                self._close(env_step)
            if np.count_nonzero(env_step.done):
                self._turn_over(env_step)
        self._observe(env_step)

    def _lose(self, env_step: EnvStep) -> None:
        """Drop what is stored of the episodes that were lost."""
        env_ids = env_step.env_ids[env_step.fault]
        eps_ids = self._episodes.eps_id_N[env_ids]
        still_open = closed = 0
        for runner in self._runners.values():
            trajectories = runner.use_slots()
            slots = trajectories.of_episodes(eps_ids)
            if len(slots):
                slot_NA = trajectories.slot_L.reshape(len(self.scheduler.all_ids), -1)
                still_open += int(np.count_nonzero(slot_NA[env_ids] >= 0))
                closed += len(trajectories.closed(eps_ids))
                trajectories.forget(slots)
        counters, quiet = self._counters, int(np.count_nonzero(env_step.quiet))
        counters.closed_steps -= closed
        counters.env_steps_lost += self._episodes.waiting_steps(env_ids)
        counters.agent_steps_lost += closed + still_open
        counters.episodes_faulty += len(env_ids) - quiet
        counters.episodes_restarted += quiet
        self._callback_list.lose(env_ids, ["restart" if quiet else "fault" for quiet in env_step.quiet[env_step.fault]])

    def _close(self, env_step: EnvStep) -> None:
        """Take in the final observations of agents that ended."""
        self._episodes.see(env_step.where, env_step.ended)
        self._episodes.truncate(env_step.where, env_step.ended & ~env_step.terminated)
        self._ended_agents.note(env_step)
        ended_nA = env_step.with_last_row(self._episodes.seen_NA)
        for runner, chosen, rows, _ in self._rows(env_step, ended_nA, last=True):
            lanes, missing = chosen.lanes, self._router.pick(runner.group_index, chosen, env_step.missing)
            acted = runner.trajectories.slot_L[lanes] >= 0
            if not acted.all():  # the others ended before they ever acted: the connectors saw it, but it closes nothing
                rows, lanes, missing = rows.take(acted), lanes[acted], missing[acted]
            if not len(lanes):
                continue
            self._store(runner, rows, lanes, lanes, missing)

    def _turn_over(self, env_step: EnvStep) -> None:
        """Finish the episodes that ended, and begin the next ones, also where one was lost."""
        env_ids = env_step.env_ids[env_step.done & ~env_step.fault]
        open_nA = self._open_rows(env_ids)
        if open_nA.any():
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
            columns = (self.scheduler.round_N[env_ids], env_ids, finished.eps_id, finished.length, decisions)
            whole = map(WholeEpisode, *(column.tolist() for column in columns))
            self._finished = tuple(sorted(chain(self._finished, whole)))
        self.scheduler.leave_out_masked(env_step)
        ended = env_step.env_ids[env_step.done]
        begun = self.scheduler.begin_next(env_step, ended, self._idle_actions)
        if len(begun) < len(ended):
            self._episodes.leave(np.setdiff1d(ended, begun))
        self._begin(begun)

    def _open_rows(self, env_ids: IntArray) -> NDArray[np.bool_]:
        """Agents of these envs that wait for an action or its outcome: (n, A)."""
        waiting_nA = np.zeros((len(env_ids), self._envs.agent_num), np.bool_)
        for runner in self._router.playing:
            waiting_nA |= runner.trajectories.slot_L.reshape(-1, self._envs.agent_num)[env_ids] >= 0
        return waiting_nA

    def _idle_actions(self, env_ids: IntArray) -> object:
        return self._router.actions((), env_ids, grouped=self._envs.grouped)

    def _welcome(self, env_step: EnvStep) -> None:
        """Take in rows that begin episodes."""
        self._begin(env_step.env_ids)
        self._observe(env_step)

    def _begin(self, env_ids: IntArray) -> None:
        """Forget these envs' episodes, and begin the next ones of those that live; who plays whom is settled here."""
        for runner in self._runners.values():
            runner.begin(env_ids)
        self._ended_agents.forget(env_ids)
        env_ids = self.scheduler.of_living(env_ids)
        if self._episodes.begin(env_ids, self._entropy) or not self._router.playing:
            self._router.update()
        self._callback_list.create(
            env_ids, self._episodes, {n: runner.policy_id for n, runner in self._runners.items()}, self._entropy
        )

    def _observe(self, env_step: EnvStep) -> None:
        """Take in the observations of agents that must act now."""
        all_act = np.count_nonzero(env_step.acting) == env_step.acting.size
        if self._is_dense and (not all_act or env_step.given or env_step.untrained):
            self._use_slots()
        if not self._is_dense or env_step.eventful:  # else the same agents are alive as before
            self._episodes.see(env_step.where, env_step.alive)
            self._ended_agents.check(env_step, self._episodes.seen_NA)
        if env_step.given:
            self._note_given(env_step)
        if env_step.untrained:
            self._episodes.untrained.update(self._episodes.eps_id_N[env_step.untrained].tolist())
        for runner, chosen, rows, kept in self._rows(env_step, None if all_act else env_step.acting, last=False):
            lanes, places = chosen.lanes, chosen.places
            if kept is not None:  # nobody is asked about the others; their open rows stay open
                runner.noops.add(lanes[~kept])
                lanes = places = lanes[kept]
                if not len(lanes):
                    continue
            self._store(runner, rows, lanes, places)
            ready = ReadyRows(lanes, places, rows)
            runner.ready = runner.ready.join(ready) if len(runner.ready.lanes) else ready
        if self._callback_list.follows:
            self._callback_list.start()

    def _rows(
        self, env_step: EnvStep, mask_nA: NDArray[np.bool_] | None, *, last: bool
    ) -> Iterator[tuple[PolicyRunner, Selection, Rows, NDArray[np.bool_] | None]]:
        """Each policy's rows behind its agent connectors, and which of those asked for they are; None for all.

        Args:
            env_step: Where they are.
            mask_nA: (n, A) which; None for all agents of these envs.
            last: Whether these are final observations.
        """
        for runner in self._router.playing:
            if mask_nA is None:
                chosen = self._router.everyone(runner, env_step.env_ids)
            elif self._router.plays_alone(runner):
                chosen = self._router.select(runner, env_step.env_ids, mask_nA)
            else:
                continue
            if len(chosen.lanes):
                yield runner, chosen, *self._row_builder.rows(runner, chosen, env_step, last=last)
        if mask_nA is not None:
            yield from self._row_builder.shared(env_step, mask_nA, last=last)

    def _store(self, runner: PolicyRunner, rows: Rows, lanes: IntArray, places: Where, missing: Missing = None) -> None:
        """Store rows and close the transitions that led to them."""
        if self._is_dense:
            env_t = rounds = _NO_NUMBERS  # which follow from where the rows stand
        else:
            env_id = rows["env_id"]
            env_t, rounds = self._episodes.length_N[env_id], self.scheduler.round_N[env_id]
        self._counters.closed_steps += runner.trajectories.append(rows, lanes, places, rounds, env_t, missing)

    def _note_given(self, env_step: EnvStep) -> None:
        """Note what agents do without asking their policies."""
        for env_id, name, action, is_env in env_step.given:
            a = self._envs.agents.index(name)
            if env_step.acting[np.searchsorted(env_step.env_ids, env_id), a]:
                runner = self._runners[self._episodes.policy_NA[env_id, a]]
                lane, where = env_id * self._envs.agent_num + a, f"env {env_id}: agent {name!r}"
                runner.off_policy.note(lane, action, where, is_env=is_env)
