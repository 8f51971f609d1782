"""One tick after another: policies answer, envs step, and what comes back becomes transitions and ready rows.

Axis letters: N envs, A agents, n rows or envs of one call, L lanes (N * A, one per env and agent).
"""

from __future__ import annotations

from bisect import insort
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.noop_actions import GroupActions
from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyAnswer, PolicyRunner, ReadyRows
from marlvec.collect.acting.random_steps import RandomSteps
from marlvec.collect.acting.row_builder import RowBuilder
from marlvec.collect.callbacks.callback_list import CallbackList
from marlvec.collect.episodes import EndedAgents, EpisodeTracker
from marlvec.collect.metrics.metrics import EpisodeRecord, Metrics
from marlvec.collect.rollout_state import Counters
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.collect.scheduling.lockstep import EnvsNeeded
from marlvec.collect.scheduling.on_demand import scheduler_for
from marlvec.connectors import Rows
from marlvec.errors import ContractError, EnvFault, StateError
from marlvec.vector.vector_env import VectorEnv

__all__ = ["RolloutLoop"]

IntArray = NDArray[np.int64]
Missing = NDArray[np.bool_] | None  # see Trajectories.append

_NONE = ReadyRows.none()


def _nobody(pending: int) -> int:
    return 0


class RolloutLoop:
    """Steps envs with policies and keeps the books.

    A row that came out of the agent connectors is stored at once and waits, *ready*, for its policy. Once answered it
    is *open*, until the agent's next row, ready or last, closes it. An episode that is lost takes all its rows along
    that no batch holds yet, and is in no record.

    Args:
        envs: The envs.
        cast: Who plays whom.
        episodes: The accounts of the running episodes.
        metrics: Where finished episodes and times go.
        keep_finished: Whether to keep the records of episodes that ended.
        explore: Whether policies explore.
        overlap: Whether policies answer for some envs while others step.
        hooks: Who is told what happens.
        warm_up: In which steps agents act at random.

    Attributes:
        state: ``"new"``: nothing runs yet. ``"ready"``: between two steps; envs may be on the way. ``"lost"``: a call
            failed half-way through a step.
        gain: What has come in since someone last looked.
        finished: EpisodeTracker that ended, likewise, as (round, env, record) and in this order; only while
            ``keep_finished``.
        slot_L: (L,) each lane's stored row that is ready or open, or -1.
        explore: Whether policies explore.
        traffic: What goes to the envs and comes back.
    """

    def __init__(
        self,
        envs: VectorEnv,
        cast: PolicyRouter,
        episodes: EpisodeTracker,
        metrics: Metrics,
        *,
        keep_finished: bool,
        explore: bool,
        overlap: bool,
        hooks: CallbackList,
        warm_up: RandomSteps,
    ) -> None:
        n, a = envs.num_envs, envs.agent_num
        self._envs, self._cast, self._episodes, self._metrics = envs, cast, episodes, metrics
        self._roles = cast.roles
        self._intake = RowBuilder(cast, episodes, metrics)
        self._keep_finished = keep_finished
        self._departures = EndedAgents(n, envs.agents)
        self.traffic = scheduler_for(envs, overlap=overlap)
        self._hooks, self._warm_up = hooks, warm_up
        self.explore = explore
        self.state: Literal["new", "ready", "lost"] = "new"
        self.gain = Counters()
        self._handed_env_steps = self._handed_agent_steps = 0
        self.finished: list[tuple[int, int, EpisodeRecord]] = []
        self.slot_L = np.full(n * a, -1, np.int64)
        self._entropy = 0
        self._transformed: list[PolicyAnswer] = []  # what action connectors have seen in a call that failed there

    @property
    def living(self) -> IntArray:
        """Ids of the envs that are not masked."""
        return self.traffic.living

    def start(self, *, entropy: int, seed: int | None) -> None:
        """Begin new episodes in all envs; what was not handed over is dropped.

        Args:
            entropy: Seed of the episodes' own random streams.
            seed: Seed of the envs' reset; None: they go on with their streams.

        Raises:
            StateError: A callback asks for it in the middle of a step.
            BaseException: What a callback raised, once all is done.
        """
        self._hooks.check_told()
        self.state = "lost"
        self._hooks.lose_all()
        self.traffic.abandon()
        self._transformed = []
        self._entropy = entropy
        self.slot_L[:] = -1
        for role in self._roles:
            role.clear()
        # What is in no batch now never will be, also where Ctrl-C came between two counts.
        self._metrics.env_steps_lost = self._metrics.env_steps - self._handed_env_steps
        self._metrics.agent_steps_lost = self._metrics.agent_steps - self._handed_agent_steps
        self.gain = Counters()
        self.finished.clear()
        self._episodes.restart(numbers=seed is not None)
        self._cast.playing = []  # so that it is looked at anew, whatever an interrupt may have left
        self.traffic.reset(seed=seed)
        for arrival in self.traffic.receive_all(self.traffic.all_ids):
            self.traffic.leave_out_masked(arrival)
            self._welcome(arrival)
        self.state = "ready"
        self._hooks.raise_held()

    def note_handed(self, env_steps: int, agent_steps: int) -> None:
        """Somebody has got a batch of so much; less than 0 where he has not got it after all."""
        self._handed_env_steps += env_steps
        self._handed_agent_steps += agent_steps

    def settle(self) -> None:
        """Take in what is on the way, and send nothing."""
        self.traffic.begin_call(_nobody)
        while self.traffic.is_on_the_way:
            self.step(_nobody)

    def step(self, needed: EnvsNeeded) -> None:
        """Send to the envs that are due, and take in those that come back next.

        Args:
            needed: How many envs' steps are needed, one or more.

        Raises:
            StateError: All envs are masked.
            ContractError, Exception: From policies and action connectors: nothing was sent, the state is as before.
            EnvFault, Exception: From envs and agent connectors: the state is ``"lost"``.
            EnvsDriven: Somebody else has driven the envs; until `start` they are not touched.
            KeyboardInterrupt: In policies, action connectors and while envs are waited for: the state is as before.
                Anywhere else it may be ``"lost"``.
            BaseException: From callbacks, once the step is finished: the state is ``"ready"``.
        """
        if not len(self.living):
            raise StateError("all envs are masked after faults, so there is nobody left to step; make() new ones")
        while (env_ids := self.traffic.due(needed, self._episodes.steps_N)) is None or len(env_ids):
            self._act(env_ids)
        began = perf_counter()
        self.state = "lost"  # until this step is whole
        try:
            arrival = self.traffic.receive()
        except EnvFault:
            raise
        except BaseException:
            if self.traffic.is_waiting and not self.traffic.is_driven:
                self.state = "ready"  # nothing has come
            raise
        timers = self._metrics.timers
        now = perf_counter()
        timers["env_wait"].add(now - began)
        connecting, telling = timers["agent_connectors"], timers["callbacks"]
        before = connecting.seconds + telling.seconds
        if arrival.is_first:
            self._welcome(arrival)
        else:
            self._take_in(arrival)
        self.state = "ready"
        timers["ingest"].add(perf_counter() - now - (connecting.seconds + telling.seconds - before))
        self._hooks.raise_held()

    # --- from ready rows to the envs

    def _act(self, env_ids: IntArray | None) -> None:
        """Have the policies answer the ready rows of some envs, or of all, and send that off.

        Until the envs have taken the actions nothing changes here, so that a call that fails can be made again.
        """
        began = perf_counter()
        chosen = self.traffic.among_those_back(env_ids)
        answers: list[PolicyAnswer] = []
        waiting: list[ReadyRows] = []
        idle: list[tuple[PolicyRunner, IntArray]] = []
        for role in self._roles:
            ready, rest = role.ready, _NONE
            if role.group_index >= 0 and len(role.idlers.lanes):
                lanes = role.idlers.lanes
                idle.append((role, lanes if chosen is None else lanes[chosen[lanes // self._envs.agent_num]]))
            if chosen is not None:
                mine = chosen[ready.lanes // self._envs.agent_num]
                ready, rest = ready.take(mine), ready.take(~mine)
            if len(ready.lanes):
                if not self._warm_up.is_over:
                    self._warm_up.note(role, ready)
                answers.append(self._seen_before(role, ready) or role.act(ready, explore=self.explore))
            waiting.append(rest)
        decided = perf_counter()
        try:
            for answer in answers:
                if not answer.parts:
                    answer.role.transform(answer)
        finally:
            self._transformed = [answer for answer in answers if answer.parts]
        acting_envs = self.traffic.all_ids if env_ids is None else env_ids
        parts = [answer.part for answer in answers]
        parts += [GroupActions(role.group_index, lanes, role.idlers.actions(lanes)) for role, lanes in idle]
        actions = self._cast.actions(parts, acting_envs, grouped=self._envs.grouped)
        sending = perf_counter()
        self._transformed = []
        self.state = "lost"  # until it is on record what was sent
        try:
            self.traffic.send(actions, env_ids)
        except Exception:
            self.state = "ready"  # nothing was
            raise
        if not self._warm_up.is_over:
            self._warm_up.count(acting_envs)
        for answer in answers:
            role, lanes = answer.role, answer.ready.lanes
            role.trajectories.answer(answer.ready.where, answer.parts)
            role.idlers.note_sent(lanes, answer.for_env)
            role.off_policy.forget(lanes)
            role.agent_connectors.on_policy_output(answer.rows)
            self._episodes.turn_L[answer.ready.places] += 1
            self._metrics.agent_steps += len(lanes)
            self.gain.decisions += len(lanes)
        for role, rest in zip(self._roles, waiting, strict=True):
            role.ready = rest
        for role, lanes in idle:
            role.idlers.lanes = np.setdiff1d(role.idlers.lanes, lanes)
            self._metrics.noop_steps += len(lanes)
        self.state = "ready"
        self._metrics.timers["inference"].add(decided - began)
        self._metrics.timers["action_connectors"].add(sending - decided)

    def _seen_before(self, role: PolicyRunner, ready: ReadyRows) -> PolicyAnswer | None:
        """The answer that a role's action connectors have seen in a call that failed at another's: they see it once."""
        for answer in self._transformed:
            if answer.role is role and np.array_equal(answer.ready.lanes, ready.lanes):
                answer.ready = ready
                return answer
        return None

    # --- from the envs to ready rows

    def _take_in(self, arrival: EnvStep) -> None:
        """Take in one step of some envs."""
        envs = arrival.where
        self._metrics.env_steps += len(arrival.env_ids)
        self.gain.env_steps += len(arrival.env_ids)
        self._episodes.pay(envs, arrival.rewards)
        self._hooks.step(arrival)
        if arrival.eventful:
            if np.count_nonzero(arrival.fault):  # a fifth of the time of any()
                self._lose(arrival)
            if np.count_nonzero(arrival.ended):
                self._close(arrival)
            if np.count_nonzero(arrival.done):
                self._turn_over(arrival)
        self._observe(arrival)

    def _lose(self, arrival: EnvStep) -> None:
        """Drop what is stored of the episodes that were lost."""
        env_ids = arrival.env_ids[arrival.fault]
        eps_ids = self._episodes.eps_id_N[env_ids]
        slot_NA = self.slot_L.reshape(len(self.traffic.all_ids), -1)
        still_open, closed = int(np.count_nonzero(slot_NA[env_ids] >= 0)), 0
        slot_NA[env_ids] = -1
        for role in self._roles:
            slots = role.trajectories.of_episodes(eps_ids)
            if len(slots):
                closed += len(role.trajectories.closed(eps_ids))
                role.forget(slots, self.slot_L, self._episodes.policy_NA.reshape(-1))
        env_steps, decisions = self._episodes.lose(env_ids), closed + still_open
        self.gain.env_steps -= env_steps
        self.gain.decisions -= decisions
        self.gain.agent_steps -= closed
        quiet = int(np.count_nonzero(arrival.quiet))
        self._metrics.episodes_faulty += len(env_ids) - quiet
        self._metrics.episodes_restarted += quiet
        self._metrics.env_steps_lost += env_steps
        self._metrics.agent_steps_lost += decisions
        self._hooks.lose(env_ids, ["restart" if quiet else "fault" for quiet in arrival.quiet[arrival.fault]])

    def _close(self, arrival: EnvStep) -> None:
        """Take in the final observations of agents that ended."""
        self._episodes.see(arrival.where, arrival.ended)
        self._episodes.truncate(arrival.where, arrival.ended & ~arrival.terminated)
        self._departures.note(arrival)
        ended_nA = arrival.with_last_row(self._episodes.seen_NA)
        for role in self._cast.playing:
            chosen = self._cast.select(role, arrival.env_ids, ended_nA)
            lanes = chosen.lanes
            if not len(lanes):
                continue
            before = self.slot_L[lanes]
            rows, _ = self._intake.rows(role, chosen, arrival, last=True)
            missing = self._cast.pick(role, chosen, arrival.missing)
            acted = before >= 0
            if not acted.all():  # the others ended before they ever acted: the connectors saw it, but it closes nothing
                rows, lanes, before, missing = rows.take(acted), lanes[acted], before[acted], missing[acted]
            self._store(role, rows, lanes, before, missing)
            self.slot_L[lanes] = -1

    def _turn_over(self, arrival: EnvStep) -> None:
        """Finish the episodes that ended, and begin the next ones, also where one was lost."""
        env_ids = arrival.env_ids[arrival.done & ~arrival.fault]
        open_nA = self.slot_L.reshape(len(self.traffic.all_ids), -1)[env_ids] >= 0
        if open_nA.any():
            i, a = np.argwhere(open_nA)[0].tolist()
            raise ContractError(
                f"env {int(env_ids[i])} ended its episode, but agent {self._envs.agents[a]!r} was neither terminated "
                f"nor truncated"
            )
        records = self._hooks.end(self._episodes.finish(env_ids))
        self.gain.episodes += len(records)
        for record in records:
            self._metrics.add(record)
        if self._keep_finished:
            for record in records:
                insort(self.finished, (int(self.traffic.round_N[record.env_id]), record.env_id, record))
        self.traffic.leave_out_masked(arrival)
        ended = arrival.env_ids[arrival.done]
        begun = self.traffic.begin_next(arrival, ended, self._idle_actions)
        if len(begun) < len(ended):
            self._episodes.leave(np.setdiff1d(ended, begun))
        self._begin(begun)

    def _idle_actions(self, env_ids: IntArray) -> object:
        return self._cast.actions((), env_ids, grouped=self._envs.grouped)

    def _welcome(self, arrival: EnvStep) -> None:
        """Take in rows that begin episodes."""
        self._begin(arrival.env_ids)
        self._observe(arrival)

    def _begin(self, env_ids: IntArray) -> None:
        """Forget these envs' episodes, and begin the next ones of those that live; who plays whom is settled here."""
        for role in self._roles:
            role.begin(env_ids)
        self._departures.forget(env_ids)
        env_ids = self.traffic.of_living(env_ids)
        if self._episodes.begin(env_ids, self._entropy) or not self._cast.playing:
            self._cast.update()
        self._hooks.create(env_ids, self._episodes, [role.policy_id for role in self._roles], self._entropy)

    def _observe(self, arrival: EnvStep) -> None:
        """Take in the observations of agents that must act now."""
        self._episodes.see(arrival.where, arrival.alive)
        self._departures.check(arrival, self._episodes.seen_NA)
        if arrival.given:
            self._note_given(arrival)
        if arrival.untrained:
            self._episodes.untrained.update(self._episodes.eps_id_N[arrival.untrained].tolist())
        all_act = np.count_nonzero(arrival.acting) == arrival.acting.size
        for role in self._cast.playing:
            if all_act:
                chosen = self._cast.everyone(role, arrival.env_ids)
            else:
                chosen = self._cast.select(role, arrival.env_ids, arrival.acting)
            lanes, places = chosen.lanes, chosen.places
            if not len(lanes):
                continue
            before = self.slot_L[places].copy()
            rows, kept = self._intake.rows(role, chosen, arrival, last=False)
            if kept is not None:  # nobody is asked about the others; their open rows stay open
                role.idlers.add(lanes[~kept])
                lanes, before = lanes[kept], before[kept]
                places = lanes
                if not len(lanes):
                    continue
            slots = self._store(role, rows, lanes, before)
            self.slot_L[places] = slots
            role.ready = role.ready.join(ReadyRows.block(lanes, places, slots))
        self._hooks.start()

    def _store(
        self, role: PolicyRunner, rows: Rows, lanes: IntArray, before: IntArray, missing: Missing = None
    ) -> IntArray:
        """Store rows and close the transitions that led to them; returns the rows' slots, which are consecutive."""
        env_id = rows["env_id"]
        env_t, rounds = self._episodes.length_N[env_id], self.traffic.round_N[env_id]
        slots = outcomes = role.trajectories.append(rows.columns, lanes, rounds, env_t, missing)
        if np.count_nonzero(acted := before >= 0) < len(lanes):
            before, outcomes = before[acted], slots[acted]
        role.trajectories.link(before, outcomes)
        self.gain.agent_steps += len(before)
        return slots

    def _note_given(self, arrival: EnvStep) -> None:
        """Note what agents do without asking their policies."""
        for env_id, name, action, is_env in arrival.given:
            a = self._envs.agents.index(name)
            if arrival.acting[np.searchsorted(arrival.env_ids, env_id), a]:
                role = self._roles[self._episodes.policy_NA[env_id, a]]
                lane, where = env_id * self._envs.agent_num + a, f"env {env_id}: agent {name!r}"
                role.off_policy.note(lane, action, where, is_env=is_env)
