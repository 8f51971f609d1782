"""`Collectors`: many collectors, asked for their parts of one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

from marlvec.arguments import check_choice, whole_number
from marlvec.collect import Collector, Metrics, MultiAgentBatch
from marlvec.collect.acting.policy_set import (
    Chain,
    Connectors,
    NewPolicy,
    PoliciesToTrain,
    TrainedPolicies,
)
from marlvec.collect.batch.sample_target import BatchSchedule, SampleTarget, count_from
from marlvec.collect.batch_source import BatchSource
from marlvec.collect.callbacks.callback_list import CallbackLike
from marlvec.collect.episodes import PolicyMapping
from marlvec.collect.rollout_state import STREAM_BITS
from marlvec.distributed.accounting.ledger import Accounting, Ledger
from marlvec.distributed.accounting.plans import Fragments, Plan, Shares
from marlvec.distributed.collector_group import CollectorGroup, RemoteCollector
from marlvec.distributed.engines.engine import Engine
from marlvec.distributed.engines.sync_engine import SyncEngine
from marlvec.distributed.head_callbacks import HeadCallbacks
from marlvec.distributed.head_policies import HeadPolicies
from marlvec.distributed.joining import joined, oldest_row, stats_after
from marlvec.distributed.merge_rounds import MergeRounds
from marlvec.distributed.place import Place
from marlvec.distributed.policy_log import PolicyLog
from marlvec.distributed.server.messages import Answer, Request
from marlvec.distributed.server.policy_changes import (
    AddPolicy,
    PolicyChange,
    RemovePolicy,
    TrainPolicies,
    pickled,
)
from marlvec.distributed.state.stateful_collectors import StatefulCollectors
from marlvec.errors import ArgumentError, ClosedError
from marlvec.vector.faults.restarts import RestartLimit
from marlvec.vector.seeding import check_seed, entropy_of

__all__ = ["Collectors"]

Build = Callable[[Place], Collector]


class Collectors(StatefulCollectors, BatchSource):
    """Many collectors, each in a process of its own on this machine or another, asked for their parts of one batch.

    The caller's process is the *head*. It asks collectors for fragments, joins them into the batch that a learner
    takes, and counts what it requested: whatever dies, ``requested == delivered + lost + outstanding`` (see
    `accounting`), no row comes twice, and within an episode no row is missing between two others. It starts no thread:
    what collectors are to do while the learner learns is asked for before `collect` returns.

    A collector that dies is restarted with another seed and ids of its own; the episodes that ran in it are lost.

    Args:
        build: ``build(place) -> Collector``, called where the collector is to run, and pickled by value. The collector
            and its envs then belong to the process they are in, which closes them.
        num_collectors: How many.
        backend: ``"ray"``: actors of the Ray cluster that this process is connected to; where it is not, of one on this
            machine that ends with `close`, or, where several use it, with that of the last. Needs
            ``marlvec[distributed]``. ``"sync"``: all in this process, one after the other; the reference, and the way
            to debug.
        sync: Whether each batch has a share of every collector, made with the present weights, and joined in the order
            of collectors: the same numbers every time, on both backends. (For another number of collectors they are
            others.) Else batches are made of fragments in the order in which they come.
        fragment: Env steps, or whatever `collect` is asked for, of one request; where ``sync`` is False alone. None:
            the first batch's over ``num_collectors``.
        max_in_flight: How many requests a collector may have, the running one included; likewise.
        max_policy_lag: How many versions older than the present weights those may be that a fragment was asked for
            with, when it is handed out; likewise. What would get too old is waited for, nothing is dropped. 0:
            collectors wait while the learner learns. None: no bound.
        timeout: Seconds that a request may run before its collector counts as hung and is ended; ``math.inf``: never.
        on_fault: What happens where a collector is lost. ``"restart"``: it is restarted, and what was lost is asked
            for again. ``"mask"``: it stays away, and others make up for it. ``"raise"``: `CollectorDied` is raised;
            calling again goes on as ``"restart"`` would.
        max_restarts: How often one collector may be restarted: a count, or a `marlvec.RestartLimit`.
        sync_states: With every how many batches what connectors have learnt (`marlvec.connectors.NormalizeObs`, …) is
            merged and given to all; None: never. What learner connectors of ``build`` learn stays where they are.
        learner_connectors: Between the joined batch and the learner, as `marlvec.Collector` takes them. Those that
            `build` gives a collector run there, over its own rows, and must not look across a whole batch.
        callbacks: Called on the head: for batches, for episodes that are handed out with them, and for collectors that
            start or are lost. Callbacks for what happens beside the envs are given to the collector in ``build``.
        seed: What all places' seeds follow from; None: from the operating system.
        window: Number of last episodes that metrics are over.
        remote_args: For Ray's ``Actor.options``: a dict, or a function of the place; one CPU each by default.

    Raises:
        ArgumentError: An argument is wrong, or ``build`` does not return collectors that fit together.
        MissingExtraError: ray is not installed.
        SerialisationError: ``build`` cannot be pickled.
        CollectorDied: A collector died too often while it was built.
        Exception: What ``build`` raises.

    Attributes:
        metrics: Of all that was handed out, over the last episodes of all collectors. ``env_id`` counts in each
            collector for itself.
    """

    def __init__(
        self,
        build: Build,
        num_collectors: int,
        backend: Literal["ray", "sync"] = "ray",
        *,
        sync: bool = True,
        fragment: int | None = None,
        max_in_flight: int = 2,
        max_policy_lag: int | None = 1,
        timeout: float = 300.0,
        on_fault: Literal["restart", "mask", "raise"] = "restart",
        max_restarts: int | RestartLimit = 10,
        sync_states: int | None = 1,
        learner_connectors: Connectors = None,
        callbacks: Iterable[CallbackLike] = (),
        seed: int | None = None,
        window: int = 100,
        remote_args: Mapping[str, Any] | Callable[[Place], Mapping[str, Any]] | None = None,
    ) -> None:
        check_choice("backend", backend, ("ray", "sync"))
        check_choice("on_fault", on_fault, ("restart", "mask", "raise"))
        number = count_from(num_collectors, f"Collectors(num_collectors={num_collectors!r})")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ArgumentError(f"timeout must be above 0 seconds, got {timeout!r}")
        if sync_states is not None:
            count_from(sync_states, f"Collectors(sync_states={sync_states!r})")
        self._on_fault, self._is_sync = on_fault, sync
        self._plan = _plan(fragment, max_in_flight, max_policy_lag, sync=sync)
        self._callbacks = HeadCallbacks(callbacks)
        self._ledger = Ledger()
        self._rounds = MergeRounds(sync_states)
        self._closed = False
        self._raised: list[BaseException] = []
        limit = max_restarts if isinstance(max_restarts, RestartLimit) else RestartLimit(max_restarts)
        episodes = count_from(window, f"Collectors(window={window!r})")
        entropy = entropy_of(None if seed is None else check_seed(seed))
        hint = ": have it make envs and policies itself, where it is called"
        build_bytes = pickled(_checked(build), "build", hint)
        engine = _engine(backend, remote_args)
        self._engine, self._log = engine, PolicyLog(engine.put)
        self._group = CollectorGroup(
            engine,
            build_bytes,
            self._ledger,
            entropy=entropy,
            timeout=float(timeout),
            limit=limit,
            merged=lambda: (self._rounds.merged, self._rounds.number),
            log=self._log,
        )
        try:
            self._grow(number)
            started = self._group.started
            assert started is not None  # the first one was built
            self._policies = HeadPolicies(started, learner_connectors, engine.put)
            self.metrics = Metrics(started.agents, started.policies, window=episodes)
        except BaseException:
            self.close()
            raise
        self._count_by: Any = started.count_by

    def __repr__(self) -> str:
        return f"<Collectors {self._group.active}, version {self.version}, {self.accounting}>"

    # --- batches

    def collect(
        self,
        steps: int | None = None,
        *,
        env_steps: int | None = None,
        agent_steps: int | None = None,
        episodes: int | None = None,
    ) -> MultiAgentBatch:
        """Collect one batch. Give exactly one amount, as to `marlvec.Collector.collect`.

        Where collectors are in truncate mode the batch holds exactly so many env steps, whatever dies. In complete mode
        it may hold more, as each collector's part does.

        Args:
            steps: An amount of what ``count_by`` of the collectors names.
            env_steps: An amount of env steps.
            agent_steps: An amount of decisions with a known outcome.
            episodes: A number of episodes.

        Returns:
            The rows of all collectors, those of one after those of another, each collector's in order.

        Raises:
            ArgumentError: Not exactly one positive amount; or no multiple of ``fragment``.
            CollectorDied: See ``on_fault`` and ``max_restarts``; the call may be made again.
            Exception: What a collector raises (an env, a policy, a connector or a callback there), with its notes: its
                rows come with its next answer. What ``build``, a learner connector or a callback raises here. Nothing
                that is on the head is lost: calling again goes on.
            KeyboardInterrupt: Likewise.
            StateError: A batch of another amount is unfinished, after one of these.
            ClosedError: It is closed.
        """
        return self._fill(BatchSchedule(self._goal("collect", steps, env_steps, agent_steps, episodes), None))

    def _check_ready_for(self, call: str) -> None:
        self._check_open()
        self._check_whole()

    def _fill(self, schedule: BatchSchedule, *, show: Callable[[int], object] | None = None) -> MultiAgentBatch:
        self._check_ready_for("collect")
        goal = schedule.next_goal
        assert goal is not None  # callers ask only where something is left
        self._raise()
        self._group.forget_delivered()
        self._restart_missing()
        self._plan.begin(goal, self._group.active)
        self._rounds.note_batch(self._plan.asked(self._group.active))
        while True:
            self._ask(self._plan.lacking(self._ledger, self._group.active), goal)
            chosen = self._plan.chosen(self._ledger, self.version)
            if chosen is not None:
                break
            self._receive()
            self._raise()
            self._restart_missing()
        return self._hand_out(chosen, goal, schedule, show)

    def _hand_out(
        self, chosen: list[int], goal: SampleTarget, schedule: BatchSchedule, show: Callable[[int], object] | None
    ) -> MultiAgentBatch:
        """Make the batch. Until the last stores it is not delivered, and comes again next time."""
        answers = [self._group.answers[request_id] for request_id in chosen]
        parts = [part for answer in answers for part in answer.parts]
        deltas = [answer.delta for answer in answers if answer.delta is not None]
        batch = joined(parts, self._policies.learner_connectors, self.metrics.policies)
        oldest = oldest_row(parts, tuple(self._policies.weights))
        self._ask(self._plan.ahead(self._ledger, self._group.active, chosen), goal)
        ledger_state = self._ledger.after_delivery(chosen, self.version, 0 if oldest is None else self.version - oldest)
        metrics = self.metrics
        before, after = (metrics.state, metrics.collectors), metrics.after(deltas)
        entries = [self._ledger[request_id] for request_id in chosen]
        restarts = {index: remote.epoch for index, remote in self._group.collectors.items()}
        stats = stats_after(metrics.collectors, restarts, entries, answers, self.version)
        try:
            metrics.collectors = stats
            metrics.show(after)
            records = (delta.episodes.record(i) for delta in deltas for i in range(len(delta.episodes)))
            self._callbacks.sample_end(records, batch, self.metrics)
            done = schedule.done_with(goal, batch)
            if show is not None:
                show(done)
            self._ledger.state, schedule.done = ledger_state, done  # not interrupted: stores alone
        except BaseException as error:
            metrics.collectors = before[1]
            metrics.show(before[0])
            error.add_note("the batch is not returned; no row is lost: call collect() again")
            raise
        self._plan.end()
        return batch

    def _ask(self, wanted: Iterable[tuple[int, int]], goal: SampleTarget) -> None:
        rounds = self._rounds
        for index, amount in wanted:
            self._group.send_changes(index)
            collector = self._group.collectors[index]
            entry = self._group.issue(index, amount, self.version)
            self._plan.issued(index, amount, entry.id)
            merged = None if collector.merged == rounds.number else rounds.merged
            collector.merged = rounds.number
            hands_over, wants_pipelines = rounds.ask(index)
            request = Request(
                id=entry.id,
                index=index,
                epoch=entry.epoch,
                goal=SampleTarget(goal.unit, amount),
                base=self.version,
                weights=self._policies.reference,
                merged=merged,
                hands_over=hands_over,
                wants_pipelines=wants_pipelines,
            )
            self._group.ask(entry, request)

    def _receive(self) -> None:
        """Wait for the first answer, or loss; what a collector raises is kept for `_raise`."""
        self._raised += self._group.end_doubtful(self._take)
        if self._group.is_awaited:
            self._raised += self._group.receive(self._take)
        self._report()

    def _raise(self) -> None:
        """Raise what collectors have raised.

        Raises:
            Exception: That.
        """
        raised, self._raised = self._raised, []
        if raised:
            for other in raised[1:]:
                raised[0].add_note(f"besides {type(other).__name__}: {other}")
            raise raised[0]

    def _take(self, index: int, answer: Answer | None) -> None:
        if answer is None or answer.handed is not None:
            self._rounds.take(index, None if answer is None else answer.handed)

    # --- starting and losing collectors

    def _restart_missing(self) -> None:
        """Restart those that are lost, as ``on_fault`` says.

        Raises:
            CollectorDied: See ``on_fault``.
        """
        self._raised += self._group.end_doubtful(self._take)
        lost = [
            collector
            for collector in self._group.collectors.values()
            if collector.handle is None and not collector.is_masked
        ]
        if not lost and self._group.active:
            return
        if self._on_fault == "mask":
            for collector in lost:
                collector.is_masked = collector.why is not None  # else Ctrl-C has come while it was built
            if not self._group.active:
                raise self._group.death(next(iter(self._group.collectors.values())), "It was the last one.")
            lost = [collector for collector in lost if not collector.is_masked]
        if self._on_fault == "raise":
            for collector in lost:
                if collector.why is not None and not collector.is_reported:
                    collector.is_reported = True
                    raise self._group.death(collector)
        for collector in lost:
            if collector.why is not None:
                self._group.allow_restart(collector)
        self._build(lost)

    def _grow(self, number: int) -> None:
        collectors = [self._group.new(index) for index in range(len(self._group.collectors), number)]
        self._group.collectors.update({collector.index: collector for collector in collectors})
        self._build(collectors)

    def _build(self, collectors: list[RemoteCollector]) -> None:
        try:
            self._group.build(collectors, len(self._group.collectors))
        finally:
            self._report()

    def _report(self) -> None:
        """Call callbacks for collectors that started or were lost."""
        group = self._group
        while group.losses:
            self._callbacks.collector_lost(group.losses.pop(0))
        while group.builds:
            self._callbacks.collector_start(group.builds.pop(0))

    def resize(self, num_collectors: int) -> None:
        """Have another number of collectors, between two batches.

        New ones have ids and seeds of their own. Those that leave, the last ones, first deliver what they were asked
        for, which is in the next batches, and then close their envs.

        Args:
            num_collectors: How many.

        Raises:
            ArgumentError: It is no positive number.
            CollectorDied: As `collect`.
            Exception: What ``build`` raises.
            ClosedError: It is closed.
        """
        self._check_open()
        number = count_from(num_collectors, f"resize({num_collectors!r})")
        leaving = [index for index in self._group.collectors if index >= number]
        while any(self._group.collectors[index].tickets for index in leaving):
            self._receive()
        for index in leaving:
            self._rounds.take(index, None)
            self._group.leave(index)
        self._restart_missing()
        self._grow(number)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the collectors are that are there now."""
        collectors = self._group.collectors.values()
        return tuple(
            collector.place for collector in collectors if collector.place is not None and collector.handle is not None
        )

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Their processes, in the order of collectors; None where that is this one, or where one is lost."""
        return tuple(collector.pid for collector in self._group.collectors.values())

    def place_of(self, eps_id: int) -> Place:
        """Which collector made an episode or a fragment, also where it is lost or has left.

        Args:
            eps_id: An ``eps_id`` or ``unroll_id``.

        Returns:
            The place that its collector was built at.

        Raises:
            KeyError: No collector has made it.
        """
        return self._group.place_of(int(eps_id) >> STREAM_BITS)

    @property
    def accounting(self) -> Accounting:
        """What was asked for, and what became of it, up to the last batch that was handed out."""
        return self._ledger.accounting

    # --- weights

    def set_weights(self, weights: Mapping[str, Any]) -> int:
        """Give all collectors weights of some policies; each takes them with the next request that it is sent.

        Rows that were decided by these have the new version in ``policy_version``. Those on their way are not touched.

        Args:
            weights: By policy id, as `marlvec.Policy.get_weights` gives them.

        Returns:
            The new version.

        Raises:
            ArgumentError: There is no such policy.
            SerialisationError: They cannot be pickled.
            StateError: A fragment on its way would get older than ``max_policy_lag``: call `collect` first.
            ClosedError: It is closed.
        """
        self._check_open()
        bases = [entry.base for entry in self._ledger.fragments]
        self._policies.set_weights(weights, bases, self._plan.max_lag)
        return self.version

    @property
    def version(self) -> int:
        """Number of the present weights, from 0: those that the first collector was built with."""
        return self._policies.version

    # --- policies that come and go

    def add_policy(
        self,
        policy_id: str,
        policy: NewPolicy,
        *,
        like: str | None = None,
        agent_connectors: Chain | None = None,
        action_connectors: Chain | None = None,
        learner_connectors: Chain | None = None,
        frozen: bool = False,
        policy_mapping: PolicyMapping | None = None,
    ) -> None:
        """Add a policy to all collectors, in order with what they were asked for; restarted ones get it, too.

        The policy and its connectors are pickled together, so a connector that knows the policy knows the copy beside
        it. What ``like`` copies is that of the first collector, so all have the same of it.

        Args:
            policy_id: Its id, one that was never used here.
            policy: As `marlvec.Collector.add_policy` takes it.
            like: Id of a policy whose connectors it gets copies of: those in collectors, and those of the head.
            agent_connectors: Its own chain in collectors, instead.
            action_connectors: Likewise.
            learner_connectors: Likewise, and none that look across a whole batch.
            frozen: Whether it is never trained.
            policy_mapping: A function that says who plays in episodes that begin from now on; None: that of ``build``,
                which may look into the ``policies`` of its collector.

        Raises:
            ArgumentError: The id was used; or as `marlvec.Collector.add_policy`.
            KeyError: There is no policy ``like``.
            StateError: ``policy_mapping`` is given, and that of ``build`` is fixed.
            SerialisationError: The policy, a connector or the function cannot be pickled.
            CollectorDied: See ``on_fault``. It was not added.
            Exception: What the first collector raises that gets it. It was not added.
            ClosedError: It is closed.
        """
        self._check_open()
        known = self._policies
        chains = known.learner_connectors_with(policy_id, like)
        parts = policy, agent_connectors, action_connectors, learner_connectors
        content = pickled(parts, f"policy {policy_id!r}, or a connector of it,")

        def note() -> None:
            known.add(policy_id, chains)
            self.metrics.policies = tuple(dict.fromkeys((*self.metrics.policies, policy_id)))

        self._change(AddPolicy(policy_id, content, like, frozen, _mapping(policy_mapping)), note)

    def remove_policy(self, policy_id: str, *, policy_mapping: PolicyMapping | None = None) -> None:
        """Remove a policy: each collector does once it plays in no running episode there, without a further call.

        Rows of it that no batch holds yet still come, under its id.

        Args:
            policy_id: Which.
            policy_mapping: A function that says who plays in episodes that begin from now on, which must not name it;
                None: that of ``build`` does not any more.

        Raises:
            KeyError: There is no such policy.
            StateError: It plays by a fixed mapping.
            SerialisationError: The function cannot be pickled.
            CollectorDied: See ``on_fault``. It was not removed.
            ClosedError: It is closed.
        """
        self._check_open()
        self._policies.find(policy_id)

        def note() -> None:
            self._policies.remove(policy_id)
            self._rounds.forget(policy_id)

        self._change(RemovePolicy(policy_id, _mapping(policy_mapping)), note)

    @property
    def policies(self) -> tuple[str, ...]:
        """Ids of the policies that there are now."""
        self._log.note_confirmed()
        return tuple(self._policies.ids)

    @property
    def policies_to_train(self) -> PoliciesToTrain:
        """Which policies get batches, as `marlvec.Collector.policies_to_train`; may be set between calls.

        A function is pickled, and called in the collectors. Episodes that run already, and what is on its way, change
        with the next request of a collector.
        """
        return self._policies.trained

    @policies_to_train.setter
    def policies_to_train(self, policies_to_train: PoliciesToTrain) -> None:
        self._check_open()
        given = TrainedPolicies(policies_to_train, self._policies.ids).given

        def note() -> None:
            self._policies.trained = given

        self._change(TrainPolicies(pickled(given, "policies_to_train")), note)

    def _change(self, content: PolicyChange, note: Callable[[], None]) -> None:
        """Have all collectors make a change, the first one before the others.

        Args:
            content: The change.
            note: Called once the first one has made it, or twice where Ctrl-C comes meanwhile: from then on all make
                it, also after Ctrl-C.
        """
        group, log = self._group, self._log
        self._await_changes()  # one may have made what Ctrl-C has undone
        number = log.add(content, note)
        try:
            while not log.is_confirmed(number):
                self._restart_missing()
                group.send_changes(group.active[0], number)
                self._await_changes()
        except BaseException:
            log.drop(number)
            raise
        log.note_confirmed()
        for index in group.active:
            group.send_changes(index)
        self._await_changes()
        log.compact()

    def _await_changes(self) -> None:
        while self._group.has_commands:
            self._receive()

    # --- the end

    def close(self) -> None:
        """End all collectors. What was outstanding is lost. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ledger.lose([entry.id for entry in self._ledger], "closed")
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # half-built, or the interpreter ends
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("these collectors are closed")
        self._log.note_confirmed()  # Ctrl-C may have come before that was done


def _plan(fragment: int | None, max_in_flight: int, max_policy_lag: int | None, *, sync: bool) -> Plan:
    if sync:
        if fragment is not None:
            raise ArgumentError("fragment is for sync=False; with sync=True each collector gets its share of a batch")
        return Shares()
    size = None if fragment is None else count_from(fragment, f"Collectors(fragment={fragment!r})")
    most = count_from(max_in_flight, f"Collectors(max_in_flight={max_in_flight!r})")
    if max_policy_lag is not None and (whole_number(max_policy_lag) is None or max_policy_lag < 0):
        raise ArgumentError(f"max_policy_lag must be an integer of at least 0, or None, got {max_policy_lag!r}")
    return Fragments(size, most, max_policy_lag)


def _checked(build: Build) -> Build:
    if not callable(build):
        raise ArgumentError(f"build must be a function (place) -> Collector, got {build!r:.200}")
    return build


def _mapping(function: PolicyMapping | None) -> bytes | None:
    if function is None:
        return None
    if not callable(function):
        raise ArgumentError(f"policy_mapping must be a function of (agent, episode), got {function!r:.200}")
    return pickled(function, "policy_mapping")


def _engine(backend: str, remote_args: Any) -> Engine:
    if backend == "sync":
        if remote_args is not None:
            raise ArgumentError('remote_args are for backend="ray"')
        return SyncEngine()
    from marlvec.distributed.engines.ray_engine import RayEngine

    return RayEngine(remote_args)
