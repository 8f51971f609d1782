"""`Collectors`: one batch from many collectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

from marlvec.arguments import check_choice, count_from, whole_number
from marlvec.collect import Collector, Metrics, MultiAgentBatch
from marlvec.collect.background import BatchSchedule, SampleTarget
from marlvec.collect.callbacks import CallbackLike
from marlvec.collect.collector import BatchSource
from marlvec.collect.episodes import PolicyMapping
from marlvec.collect.metrics import STREAM_BITS
from marlvec.collect.policies import (
    Chain,
    Connectors,
    NewPolicy,
    PoliciesToTrain,
    TrainedPolicies,
)
from marlvec.distributed.accounting import (
    Accounting,
    FragmentPlan,
    Ledger,
    Plan,
    Shares,
    joined,
    oldest_row,
    stats_after,
)
from marlvec.distributed.collector_group import (
    CollectorGroup,
    HeadCallbacks,
    HeadPolicies,
    MergeRounds,
    PolicyLog,
    RemoteCollector,
)
from marlvec.distributed.engine import Engine, SyncEngine
from marlvec.distributed.server import (
    AddPolicy,
    CollectRequest,
    Place,
    PolicyChange,
    RemovePolicy,
    TrainPolicies,
    pickled,
)
from marlvec.distributed.stateful_collectors import StatefulCollectors
from marlvec.errors import ArgumentError, ClosedError
from marlvec.serialization.saved import ProcessBound
from marlvec.vector.settings import RestartLimit, check_seed, entropy_of

Build = Callable[[Place], Collector]


class Collectors(ProcessBound, StatefulCollectors, BatchSource):
    """Collects one batch from many collectors, each in its own process on this machine or another.

    The caller's process is the *head*. It requests fragments from collectors, joins them into a batch for the learner,
    and counts its requests: whatever dies, ``requested == delivered + lost + outstanding`` (see `accounting`), no row
    comes twice, and no episode has a gap between two rows. The head starts no thread: work for collectors during
    learning is requested before `collect` returns.

    A collector that dies is restarted with a new seed and new ids; its running episodes are lost. After `close`, calls
    that reach collectors raise `ClosedError`.

    Args:
        build: ``build(place) -> Collector``, pickled by value and called in the collector's process, which owns the
            collector and its envs, and closes them.
        num_collectors: Number of collectors.
        backend: ``"ray"``: actors of the Ray cluster to which this process is connected; if it is not connected, of a
            new cluster on this machine, which ends when the last `Collectors` that uses it is closed. Needs
            ``marlvec[distributed]``. ``"sync"``: all in this process, one after the other; for reference and
            debugging.
        sync: True: each batch has a share of every collector, collected with the current weights and joined in the
            order of collectors: the same numbers in every run, on both backends. (They depend on the number of
            collectors.) False: batches consist of fragments in order of arrival.
        fragment: Amount of one request, in the unit of `collect`; only for ``sync=False``. None: the first batch's
            amount divided by ``num_collectors``.
        max_in_flight: Most requests of one collector, the running one included; only for ``sync=False``.
        max_policy_lag: Most versions between a fragment's request and its delivery; only for ``sync=False``. `collect`
            waits for fragments that would get too old; none is dropped. 0: collectors wait while the learner learns.
            None: no bound.
        timeout: Seconds that a request may run before its collector counts as hung and is ended; ``math.inf``: never.
        on_fault: Reaction to a lost collector. ``"restart"``: restart it, and request the lost amount again.
            ``"mask"``: continue without it; the other collectors deliver its share. ``"raise"``: raise
            `CollectorDied`; the next call continues like ``"restart"``.
        max_restarts: How often one collector may be restarted: a count, or a `marlvec.RestartLimit`.
        sync_states: Batches between two merges of connectors' statistics (`marlvec.connectors.NormalizeObs`, …), which
            all collectors get; None: never. Statistics of ``build``'s learner connectors are not merged.
        learner_connectors: Run over the joined batch, in the same form as for `marlvec.Collector`. Learner connectors
            of ``build`` run in each collector, over its own rows; they must not need the whole batch.
        callbacks: Called on the head: for batches, for the episodes in them, and for collectors that start or are lost.
            Pass callbacks with other hooks (steps, resets) to the collector in ``build``.
        seed: Source of all places' seeds; None: from the operating system.
        window: Number of last episodes in the metrics.
        remote_args: For Ray's ``Actor.options``: a dict, or a function of the place; one CPU each by default.

    Raises:
        ArgumentError: An argument is wrong, or the collectors that ``build`` returns do not fit together.
        MissingExtraError: ray is not installed.
        SerialisationError: ``build`` cannot be pickled.
        CollectorDied: A collector died too often while it was built.
        Exception: Raised by ``build``.

    Attributes:
        metrics: Metrics of all returned batches, over the last episodes of all collectors. Each collector counts its
            ``env_id`` from 0.
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
        self._on_fault = on_fault
        self._plan = _plan(fragment, max_in_flight, max_policy_lag, sync=sync)
        self._callbacks = HeadCallbacks(callbacks)
        self._ledger = Ledger()
        self._rounds = MergeRounds(sync_states)
        self._closed = False
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
            rounds=self._rounds,
            log=self._log,
        )
        try:
            self._grow(number)
            started = self._group.started
            assert started is not None  # the first collector was built
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
        """Collect one batch. Pass exactly one amount, as to `marlvec.Collector.collect`.

        If collectors are in truncate mode, the batch holds exactly this amount, whatever dies. In complete mode it may
        hold more, as each collector's part may.

        Args:
            steps: An amount in the unit of the collectors' ``count_by``.
            env_steps: An amount of env steps.
            agent_steps: An amount of decisions with a known outcome.
            episodes: A number of episodes.

        Returns:
            The rows of all collectors, collector by collector, each in order.

        Raises:
            ArgumentError: Not exactly one positive amount; or not a multiple of ``fragment``.
            CollectorDied: See ``on_fault`` and ``max_restarts``; calling again continues.
            Exception: Raised in a collector (by an env, policy, connector or callback), with its notes: the rows come
                with its next answer. Or raised on the head by ``build``, a learner connector or a callback. The head
                loses no rows: calling again continues.
            KeyboardInterrupt: Ctrl-C. The head loses no rows: calling again continues.
            StateError: After such an exception, the unfinished batch has another amount.
        """
        return self._fill(BatchSchedule(self._goal("collect", steps, env_steps, agent_steps, episodes), None))

    def _check_ready_for(self, call: str) -> None:
        self._check_open()
        self._check_whole()

    def _fill(self, schedule: BatchSchedule, *, show: Callable[[int], object] | None = None) -> MultiAgentBatch:
        self._check_ready_for("collect")
        goal = schedule.next_goal
        assert goal is not None  # callers check first that requests are left
        self._raise()
        self._group.forget_delivered()
        self._restart_missing()
        self._plan.begin(goal, self._group.active)
        self._rounds.record_batch(self._plan.asked(self._group.active))
        while True:
            self._ask(self._plan.requests(self._ledger, self._group.active), goal)
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
        """Make the batch. If interrupted before its last assignments, it is not delivered, and comes again."""
        answers = [self._group.answers[request_id] for request_id in chosen]
        parts = [part for answer in answers for part in answer.parts]
        deltas = [answer.delta for answer in answers if answer.delta is not None]
        batch = joined(parts, self._policies.learner_connectors, self.metrics.policies)
        oldest = oldest_row(parts, tuple(self._policies.weights))
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
            self._ledger.state, schedule.done = ledger_state, done  # assignments only: Ctrl-C cannot split them
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
            merged = None if collector.merged == rounds.number else rounds.merged
            collector.merged = rounds.number
            hands_over, wants_pipelines = rounds.ask(index)
            request = CollectRequest(
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
        """Wait for the first answer or loss; `_raise` raises collectors' exceptions."""
        self._group.end_doubtful()
        if self._group.is_awaited:
            self._group.receive()
        self._report()

    def _raise(self) -> None:
        raised, self._group.raised = self._group.raised, []
        if raised:
            for other in raised[1:]:
                raised[0].add_note(f"besides {type(other).__name__}: {other}")
            raise raised[0]

    # --- starting and losing collectors

    def _restart_missing(self) -> None:
        """Restart or mask lost collectors, or raise, as ``on_fault`` requires."""
        self._group.end_doubtful()
        lost = [
            collector
            for collector in self._group.collectors.values()
            if collector.handle is None and not collector.is_masked
        ]
        if not lost and self._group.active:
            return
        if self._on_fault == "mask":
            for collector in lost:
                collector.is_masked = collector.why is not None  # else Ctrl-C came while it was built
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
            loss = group.losses.pop(0)
            self._callbacks.call("on_collector_lost", loss.place, loss.why, loss.requests)
        while group.builds:
            self._callbacks.call("on_collector_start", group.builds.pop(0))

    def resize(self, num_collectors: int) -> None:
        """Change the number of collectors, between two batches.

        New collectors have new ids and seeds. If there are fewer, the last ones first deliver their requests, into the
        next batches, and then close their envs.

        Raises:
            ArgumentError: ``num_collectors`` is not a positive integer.
            CollectorDied: See ``on_fault`` and ``max_restarts``.
            Exception: Raised by ``build``.
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
        """Places of the current collectors."""
        collectors = self._group.collectors.values()
        return tuple(
            collector.place for collector in collectors if collector.place is not None and collector.handle is not None
        )

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Process ids in the order of collectors; None for this process, or a lost collector."""
        return tuple(collector.pid for collector in self._group.collectors.values())

    def place_of(self, eps_id: int) -> Place:
        """Return the place of the collector that made an episode or fragment, even if the collector is gone.

        Args:
            eps_id: An ``eps_id`` or ``unroll_id``.

        Returns:
            The place at which its collector was built.

        Raises:
            KeyError: No collector has made it.
        """
        return self._group.place_of(int(eps_id) >> STREAM_BITS)

    @property
    def accounting(self) -> Accounting:
        """Return the accounting of requests, up to the last returned batch."""
        return self._ledger.accounting

    # --- weights

    def set_weights(self, weights: Mapping[str, Any]) -> int:
        """Send all collectors weights of some policies; they apply from each collector's next request.

        Rows decided with them have the new version in ``policy_version``. Requests on their way keep the old weights.

        Args:
            weights: By policy id, from `marlvec.Policy.get_weights`.

        Returns:
            The new version.

        Raises:
            ArgumentError: A policy does not exist.
            SerialisationError: The weights cannot be pickled.
            StateError: An outstanding fragment would exceed ``max_policy_lag``: call `collect` first.
        """
        self._check_open()
        bases = [entry.base for entry in self._ledger.fragments]
        self._policies.set_weights(weights, bases, self._plan.max_lag)
        return self.version

    @property
    def version(self) -> int:
        """Version of the current weights; 0 is the version with which the first collector was built."""
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
        """Add a policy to all collectors, after their earlier requests; restarted collectors get it, too.

        The policy and its connectors are pickled together, so references between them are kept. ``like`` copies the
        first collector's connectors, so all collectors have equal ones.

        Args:
            policy_id: Id of the policy; it must never have been used here.
            policy: The policy, as for `marlvec.Collector.add_policy`.
            like: Id of a policy whose connectors are copied, those in collectors and those of the head.
            agent_connectors: Its chain in collectors, instead of a copy.
            action_connectors: Its chain in collectors, instead of a copy.
            learner_connectors: Its chain in collectors, instead of a copy; they must not need the whole batch.
            frozen: Whether it is never trained.
            policy_mapping: The policy mapping of episodes that begin from now on; None: the mapping of ``build``, which
                may read its collector's ``policies``.

        Raises:
            ArgumentError: The id was used before; or see `marlvec.Collector.add_policy`.
            KeyError: The policy ``like`` does not exist.
            StateError: ``policy_mapping`` is given, but the mapping of ``build`` is fixed.
            SerialisationError: The policy, a connector or the function cannot be pickled.
            CollectorDied: See ``on_fault``. The policy was not added.
            Exception: The first collector that adds it raised. The policy was not added.
        """
        self._check_open()
        known = self._policies
        chains = known.learner_connectors_with(policy_id, like)
        parts = policy, agent_connectors, action_connectors, learner_connectors
        content = pickled(parts, f"policy {policy_id!r}, or a connector of it,")

        def on_confirmed() -> None:
            known.add(policy_id, chains)
            self.metrics.policies = tuple(dict.fromkeys((*self.metrics.policies, policy_id)))

        self._change(AddPolicy(policy_id, content, like, frozen, _mapping(policy_mapping)), on_confirmed)

    def remove_policy(self, policy_id: str, *, policy_mapping: PolicyMapping | None = None) -> None:
        """Remove a policy: each collector removes it once no running episode there uses it, without a further call.

        Its rows that are in no batch yet still come, under its id.

        Args:
            policy_id: Id of the policy.
            policy_mapping: The policy mapping of episodes that begin from now on, which must not name the policy; None:
                the mapping of ``build`` no longer names it.

        Raises:
            KeyError: The policy does not exist.
            StateError: A fixed mapping names it.
            SerialisationError: The function cannot be pickled.
            CollectorDied: See ``on_fault``. The policy was not removed.
        """
        self._check_open()
        self._policies.find(policy_id)

        def on_confirmed() -> None:
            self._policies.remove(policy_id)
            self._rounds.forget(policy_id)

        self._change(RemovePolicy(policy_id, _mapping(policy_mapping)), on_confirmed)

    @property
    def policies(self) -> tuple[str, ...]:
        """Ids of the current policies."""
        self._log.call_confirmed()
        return tuple(self._policies.ids)

    @property
    def policies_to_train(self) -> PoliciesToTrain:
        """Policies with batches, as in `marlvec.Collector.policies_to_train`; may be set between calls.

        A function is pickled, and called in the collectors. A change applies from each collector's next request, to
        running episodes, too.
        """
        return self._policies.trained

    @policies_to_train.setter
    def policies_to_train(self, policies_to_train: PoliciesToTrain) -> None:
        self._check_open()
        given = TrainedPolicies(policies_to_train, self._policies.ids).given

        def on_confirmed() -> None:
            self._policies.trained = given

        self._change(TrainPolicies(pickled(given, "policies_to_train")), on_confirmed)

    def _change(self, content: PolicyChange, on_confirmed: Callable[[], None]) -> None:
        """Make a change in all collectors, first in one, then in the others.

        `on_confirmed` is called once the first collector has made it (twice if Ctrl-C comes meanwhile): from then on
        all make it, even after Ctrl-C.
        """
        group, log = self._group, self._log
        self._await_changes()  # a collector may have made a change that Ctrl-C has undone
        number = log.add(content, on_confirmed)
        try:
            while not log.is_confirmed(number):
                self._restart_missing()
                group.send_changes(group.active[0], number)
                self._await_changes()
        except BaseException:
            log.drop(number)
            raise
        log.call_confirmed()
        for index in group.active:
            group.send_changes(index)
        self._await_changes()
        log.compact()

    def _await_changes(self) -> None:
        while self._group.has_commands:
            self._receive()

    # --- the end

    def close(self) -> None:
        """End all collectors. Outstanding requests are lost. May be called twice."""
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
        self._check_process("a call")
        if self._closed:
            raise ClosedError("these collectors are closed")
        self._log.call_confirmed()  # Ctrl-C may have kept an earlier call from it


def _plan(fragment: int | None, max_in_flight: int, max_policy_lag: int | None, *, sync: bool) -> Plan:
    if sync:
        if fragment is not None:
            raise ArgumentError("fragment is for sync=False; with sync=True each collector gets its share of a batch")
        return Shares()
    size = None if fragment is None else count_from(fragment, f"Collectors(fragment={fragment!r})")
    most = count_from(max_in_flight, f"Collectors(max_in_flight={max_in_flight!r})")
    if max_policy_lag is not None and (whole_number(max_policy_lag) is None or max_policy_lag < 0):
        raise ArgumentError(f"max_policy_lag must be an integer of at least 0, or None, got {max_policy_lag!r}")
    return FragmentPlan(size, most, max_policy_lag)


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
    from marlvec.distributed.ray_engine import RayEngine

    return RayEngine(remote_args)
