"""`Collector`: rows of all envs through connectors and policies, back to the envs, and into batches.

`BatchSource` is what a `Collector` and the `Collectors` of many processes share; `Evaluation` plays whole episodes
without learning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.arguments import count_from
from marlvec.collect.background import (
    Background,
    BatchSchedule,
    CollectingStopped,
    CollectingThread,
    SampleTarget,
    Unit,
    UpdateLock,
    sample_target,
)
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks import CallbackLike, CallbackList
from marlvec.collect.episodes import EpisodeTracker, PolicyMapping
from marlvec.collect.metrics import (
    CurrentState,
    EpisodeRecord,
    Metrics,
    RolloutState,
    Stats,
    first_id,
    stats_of_agents,
    stats_of_policy,
)
from marlvec.collect.policies import Chain, Connectors, NewPolicy, PoliciesToTrain, PolicySet, TrainedPolicies, named
from marlvec.collect.rollout import BatchBuilder, RolloutLoop
from marlvec.collect.row_builder import RandomSteps
from marlvec.collect.state import StatefulCollector
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import PolicyLike
from marlvec.policies.policy_map import copies_of, eval_copies
from marlvec.serialization.saved import ProcessBound
from marlvec.vector.settings import check_seed, entropy_of
from marlvec.vector.vector_env import VectorEnv

_POLICY_STREAM = 0x706F6C696379  # "policy"
_EVALUATION_STREAM = 0x6576616C  # "eval"
_RANDOM_STREAM = 0x7761726D  # of the random steps
_EVALUATION_ROUNDS = 8  # between two looks at which envs are still wanted


class BatchSource(ABC):
    """Calls that collect batches."""

    metrics: Metrics
    _count_by: Unit

    @abstractmethod
    def _fill(self, schedule: BatchSchedule, *, show: Callable[[int], object] | None = None) -> MultiAgentBatch:
        """Collect the next batch of a schedule; ``show`` is called with how much of that is done."""

    @abstractmethod
    def _check_ready_for(self, call: str) -> None:
        """Raise where a batch cannot be collected now."""

    def _goal(
        self, call: str, steps: int | None, env_steps: int | None, agent_steps: int | None, episodes: int | None
    ) -> SampleTarget:
        amounts: dict[Unit, int | None] = {"env_steps": env_steps, "agent_steps": agent_steps, "episodes": episodes}
        return sample_target(amounts, steps, self._count_by, call)

    def batches(
        self,
        steps: int | None = None,
        *,
        env_steps: int | None = None,
        agent_steps: int | None = None,
        episodes: int | None = None,
        total: int | None = None,
        progress: bool = False,
    ) -> Iterator[MultiAgentBatch]:
        """Collect one batch after the other, each when it is asked for.

        What one raises comes out of ``next()`` and ends the iteration; nothing is lost, as with `collect`: begin
        another one.

        Args:
            steps: How much a batch is, as `collect` takes it.
            env_steps: How many env steps a batch is.
            agent_steps: How many decisions with a known outcome a batch is.
            episodes: How many episodes a batch is.
            total: How much all of them are, in the same unit: the last one holds what is left. In complete mode, where
                a batch may hold more, they end once there is that much. None: they never end.
            progress: Whether to draw a progress bar on stderr.

        Raises:
            ArgumentError: Not exactly one positive amount, or a total that is not positive.
        """
        goal = self._goal("batches", steps, env_steps, agent_steps, episodes)
        schedule = BatchSchedule(goal, None if total is None else count_from(total, f"batches(total={total!r})"))
        bar: AbstractContextManager[Any] = nullcontext()
        if progress:
            from marlvec.collect.progress_bar import collecting  # here, since rich takes its time

            bar = collecting(goal.unit, schedule.total, self.metrics)
        return self._run(schedule, bar)

    def _run(self, schedule: BatchSchedule, bar: AbstractContextManager[Any]) -> Iterator[MultiAgentBatch]:
        with bar as show:
            while schedule.next_goal is not None:
                self._check_ready_for("batches")
                yield self._fill(schedule, show=show)


class Collector(ProcessBound, StatefulCollector, BatchSource):
    """Collects experience: per policy, one row per agent decision.

    In each tick, every policy answers its waiting rows of all envs in one call; the envs step; their new rows pass the
    agent connectors at once, and wait. So each observation passes the connectors once, and weights changed between two
    calls of `collect` are used from the first row on. A transition runs from an agent's decision to its next turn or
    its end, with the sum of its rewards in between; at an end ``next_obs`` is the agent's final observation, after the
    same connectors. Batches do not depend on the autoreset mode.

    If an env is restarted or masked, because of a fault or `RestartQuietly`, its episode is lost: its rows that are in
    no batch yet are dropped and not counted, its connectors' state is reset, and no statistics contain it; other envs
    are not affected. In truncate mode an earlier batch may have its beginning, whose last row is neither terminated nor
    truncated. `Metrics` counts the losses. Masked envs are left out from then on.

    The envs belong to the caller: the collector resets them at its first `collect`, and never closes them. If other
    code resets or steps them, `collect` raises `EnvsDriven` until `reset`.

    Args:
        envs: The envs.
        policies: Policy id to policy; or one policy, which gets the id ``"main"``. A policy may also be an object with
            a method ``act(rows)``, or a function of rows. A `PolicyMap` is not copied.
        policy_mapping: The policy of each agent: a policy id, a dict of agent name to id, or a function
            ``(agent name, episode) -> id``, called once per episode and agent. None: the only policy. All agents of a
            policy must have the same spaces.
        policy_mapping_fn: RLlib's name of ``policy_mapping``; give one of the two.
        agent_connectors: Between envs and policies. One chain (a pipeline or a list of connectors), copied for each
            policy; or policy id to chain; or None for ``AgentPipeline.default()``. A connector that was given to
            another collector before is copied as it was then, so that the two share nothing and both begin alike; to go
            on with what it has learnt since, pass ``copy.deepcopy`` of it. Functions and
            policies in connectors are shared.
        action_connectors: Between policies and envs, in the same forms; None for ``ActionPipeline.default()``.
        learner_connectors: Between batches and learners, in the same forms; None: no connectors. They see every
            policy's rows before they change their own. Chains of policies without rows in a batch are not called.
        policies_to_train: Ids of the policies that get batches, or a function ``(policy id) -> bool``, called at each
            batch for each policy with rows; None: all. Rows of other policies are in no batch, but metrics,
            ``batch.agent_steps`` and the amounts of `collect` count all decisions.
        batch_mode: ``"truncate"``: batches of exactly the requested size, which cut through episodes; ``"complete"``:
            whole episodes only.
        count_by: Unit of ``collect(1000)``: ``"env_steps"`` or ``"agent_steps"``.
        batch_size: Size of a batch of ``for batch in collector`` and of `background`, in units of ``count_by``.
        overlap: Whether policies answer for one half of the envs while the workers step the other, in a fixed order.
            Batches are equal bit for bit if policies and connectors answer each row independently. With one random
            stream for all rows, or running statistics, rows come in another, repeatable order. Callbacks receive half
            of the envs at a time.
        random_steps: The first env steps, this many, use uniformly random legal actions, equally many in every env.
            Only recurrent policies are called, for their state (see `RnnState`). Their rows have ``off_policy`` set,
            and the policies' other columns are meaningless (NaN, 0).
        reward_dtype: Dtype of rewards in batches, e.g. ``np.float32``; None leaves float64. Metrics stay float64.
        callbacks: Callbacks, in calling order: a `Callback`, or a dict of its methods' names to functions, or a
            function with one of these names. They belong to the caller, who closes them.
        explore: Whether policies explore; may be set between calls.
        seed: Seeds the envs' first reset (as ``envs.reset(seed=seed)``), every policy, every episode's ``rng`` and,
            beside their own seeds, the connectors' draws (exploration, noise, `StickyActions`), each with a separate
            stream. None: from the operating system.
        window: Number of last episodes that metrics are over.
        evaluation_envs: Default envs of `evaluate`; not the collector's own.
        stream: Ids begin at ``stream << 43``: collectors of two streams have no ``eps_id`` or ``unroll_id`` in common.

    Raises:
        ArgumentError: An argument is wrong.
        KeyError: The mapping names an unknown policy; lists the known ones.
        ContractError: A policy is mapped to agents of different spaces.

    Attributes:
        envs, policies: As given; policies by id, converted by `marlvec.policies.as_policy`.
        agent_connectors, action_connectors, learner_connectors: Pipeline by policy id.
        metrics: Returns, lengths, durations, totals, timers.
    """

    def __init__(
        self,
        envs: VectorEnv,
        policies: Mapping[str, PolicyLike] | PolicyLike,
        policy_mapping: PolicyMapping | None = None,
        *,
        policy_mapping_fn: PolicyMapping | None = None,
        agent_connectors: Connectors = None,
        action_connectors: Connectors = None,
        learner_connectors: Connectors = None,
        policies_to_train: PoliciesToTrain = None,
        batch_mode: Literal["truncate", "complete"] = "truncate",
        count_by: Literal["env_steps", "agent_steps"] = "env_steps",
        batch_size: int | None = None,
        overlap: bool = False,
        random_steps: int = 0,
        reward_dtype: DTypeLike | None = None,
        callbacks: Iterable[CallbackLike] = (),
        explore: bool = True,
        seed: int | None = None,
        window: int = 100,
        evaluation_envs: VectorEnv | None = None,
        stream: int = 0,
    ) -> None:
        if batch_mode not in ("truncate", "complete"):
            raise ArgumentError(f"batch_mode must be 'truncate' or 'complete', got {batch_mode!r}")
        if count_by not in ("env_steps", "agent_steps"):
            raise ArgumentError(f"count_by must be 'env_steps' or 'agent_steps', got {count_by!r}")
        self.envs = envs
        self.policies = named(policies)
        self._batch_mode, self._count_by = batch_mode, count_by
        self._batch_size = None if batch_size is None else count_from(batch_size, f"batch_size={batch_size!r}")
        self._seed = None if seed is None else check_seed(seed)
        self._entropy = entropy_of(self._seed)
        ids = tuple(self.policies)
        if policy_mapping_fn is not None and policy_mapping is not None:
            raise ArgumentError("policy_mapping and policy_mapping_fn are two names of one argument; give one")
        policy_mapping = policy_mapping_fn if policy_mapping is None else policy_mapping
        if policy_mapping is None:
            if len(ids) > 1:
                raise ArgumentError(
                    f"policy_mapping: expected which of the policies {list(ids)} plays each agent, got None; give a "
                    f"dict of agent name to policy id, {{{envs.agents[0]!r}: {ids[0]!r}, …}}, or a function of "
                    f"(agent, episode)"
                )
            policy_mapping = ids[0]
        self._trained = TrainedPolicies(policies_to_train, ids)
        if evaluation_envs is not None:
            check_apart(evaluation_envs, envs, "Collector(evaluation_envs=...)")
        self._evaluation_envs, self._evaluations = evaluation_envs, 0
        self._stream, first = stream, first_id(stream)
        self._episodes = EpisodeTracker(envs.num_envs, envs.agents, ids, policy_mapping, first)
        connectors = agent_connectors, action_connectors, learner_connectors
        self._policy_set = PolicySet(
            envs, self.policies, connectors, self._episodes, partial(self._seed_of, _POLICY_STREAM), self._run_mark
        )
        self.agent_connectors, self.action_connectors, self.learner_connectors = self._policy_set.pipelines
        self._runners = self._policy_set.runners
        self._current = CurrentState(envs.num_envs, first)
        self.metrics = Metrics(envs.agents, ids, window=window, current=self._current)
        complete = batch_mode == "complete"
        self._callback_list = CallbackList(callbacks, envs, self.metrics)
        self._loop = RolloutLoop(
            envs,
            self._policy_set.router,
            self._episodes,
            self.metrics,
            self._current,
            keep_finished=complete,
            explore=explore,
            overlap=overlap,
            callback_list=self._callback_list,
            random_steps=self._random_steps(random_steps),
            log=self._policy_set.log,
        )
        self._batch_builder = BatchBuilder(
            self._current,
            self._runners,
            self._policy_set.log,
            self._episodes,
            self.metrics,
            self.policies.keys(),
            complete=complete,
            reward_dtype=reward_dtype,
        )
        self._update_lock = UpdateLock()
        self._owner = CollectingThread()
        self._background: Background | None = None
        self._callback_list.collector_created(self)

    def __repr__(self) -> str:
        return (
            f"<Collector of {list(self.policies)} in {self.envs!r}: batch_mode={self._batch_mode!r}, "
            f"{self.metrics.env_steps} env steps, {self.metrics.episodes_total} episodes>"
        )

    # --- one batch

    def collect(
        self,
        steps: int | None = None,
        *,
        env_steps: int | None = None,
        agent_steps: int | None = None,
        episodes: int | None = None,
    ) -> MultiAgentBatch:
        """Collect one batch. Give exactly one amount.

        The amounts:

        =================  ===============================================  ========================================
        ..                 ``batch_mode="truncate"``                        ``batch_mode="complete"``
        =================  ===============================================  ========================================
        ``env_steps=k``    exactly k env steps, shared over the envs        episodes, until their env steps sum to k
        ``agent_steps=k``  exactly k rows; further rows come next time      episodes, until their rows sum to k
        ``episodes=k``     until k episodes have ended; parts of others     exactly k episodes
        =================  ===============================================  ========================================

        Nothing is lost between calls: decisions with an open outcome, and finished episodes beyond k, come in a later
        batch. If k is not a multiple of N, the envs that have waited longest make the remaining steps.

        Args:
            steps: An amount in units of ``count_by``.
            env_steps: An amount of env steps.
            agent_steps: An amount of decisions with a known outcome.
            episodes: A number of episodes.

        Raises:
            ArgumentError: Not exactly one positive amount.
            ContractError: A policy or connector returned a wrong form; names the policy. If a learner connector
                failed, nothing is lost: the next call tries again.
            EnvFault: An env raised or a worker died, and the envs' ``on_fault`` is ``"raise"``, or its limit is
                reached. The running episodes are lost; the next call begins new ones.
            Exception: A policy's error, with a note that names the policy. Nothing was sent; the next call continues,
                and its batch has the rows that this call had collected.
            StateError: All envs are masked; or batches are collected in the background; or a callback, a policy or a
                connector calls it in the middle of a step.
            EnvsDriven: Other code has reset or stepped the envs, or received their rows. The running episodes are
                lost: call `reset`.
            KeyboardInterrupt: Ctrl-C. In a policy, or while waiting for envs, nothing is lost: the next call continues.
                In the middle of a step the running episodes are lost: the next call begins new ones, and metrics count
                the lost ones as ``episodes_interrupted``. No other row is lost or duplicated.
            BusyError: Another thread collects.
            BaseException: A callback's error, with a note that names the callback, after the step of the envs: the
                next call continues. See `Callback`.

        After an interrupt or an error, a policy's own random stream and a connector's statistics may have advanced by
        the interrupted step.
        """
        goal = self._goal("collect", steps, env_steps, agent_steps, episodes)
        self._check_foreground("collect")
        return self._fill(BatchSchedule(goal, None))

    def _fill(
        self,
        schedule: BatchSchedule,
        is_stopped: Callable[[], bool] | None = None,
        show: Callable[[int], object] | None = None,
    ) -> MultiAgentBatch:
        """Collect the schedule's next batch; between two steps call ``is_stopped``, and ``show`` with the amount done.

        Ctrl-C may come at any line. Until the last store the batch is not delivered, and comes again next time; behind
        it nothing is called before the caller has the batch, and so Python does not look whether Ctrl-C has come.
        Raises `CollectingStopped` if ``is_stopped`` says so: collected rows stay.
        """
        self._owner.claim(self, "collect", self._callback_list.running_hook)
        try:
            self._check_ready()
            loop, lock, goal = self._loop, self._update_lock, schedule.next_goal
            assert goal is not None  # says who calls
            with lock:
                was_dirty = loop.come_to_order()
            if loop.is_new:
                loop.start(entropy=self._entropy, seed=self._seed)
            elif not was_dirty:
                loop.scheduler.check_alone()
            self._policy_set.drop_retired()
            needed = partial(self._batch_builder.envs_needed, goal)
            loop.begin_call(needed, self._batch_builder.steps_of_all(goal))
            while loop.steps_left or needed() or loop.scheduler.is_in_a_round:
                if is_stopped is not None and is_stopped():
                    raise CollectingStopped
                with lock:
                    loop.step(needed)
            state = self._current.state
            with lock:
                built = self._batch_builder.build(goal, self._trained)
            self._callback_list.sample_end(built.batch)
            batch, after = built.batch, self._batch_builder.after(built, state)
            done = schedule.done_with(goal, batch)
            if show is not None:
                show(done)
        finally:
            # Where Ctrl-C has come no call is made that another one could end.
            self._update_lock.stepping = None  # not interrupted: stores alone
            self._owner.thread = self._current.tick_counters = None  # not interrupted: stores alone
        self._current.state, schedule.done = after, done
        return batch

    def _check_ready_for(self, call: str) -> None:
        self._check_foreground(call)

    _instead = "build it in each process; save_checkpoint() and load_checkpoint() carry what it has learned and reached"
    _run_mark = 0  # other marks, other draws of connectors

    def _check_foreground(self, call: str) -> None:
        self._check_process(f"{call}()")
        if self._background is None:
            return
        if self._background.is_in_use:
            raise StateError(
                f"{call}() while batches are collected in the background: take them from there, or leave its `with`"
            )
        self._background.close()  # it was, but Ctrl-C may have come before its thread had ended
        self._background = None

    # --- many

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        """Collect batches of ``batch_size`` for ever.

        Raises:
            StateError: The collector was made without ``batch_size``.
        """
        if self._batch_size is None:
            raise StateError(
                "how much is a batch? Give the collector a batch_size, or ask collector.batches(env_steps=...)"
            )
        return self.batches(self._batch_size)

    # --- in the background

    def background(
        self,
        steps: int | None = None,
        *,
        env_steps: int | None = None,
        agent_steps: int | None = None,
        episodes: int | None = None,
        total: int | None = None,
        ahead: int = 1,
    ) -> Background:
        """Collect in a thread of its own, while this one learns from the batches before.

            with collector.background(env_steps=4096, total=1_000_000) as batches:
                for batch in batches:
                    gradients = ...                    # while the next batch is collected
                    with collector.updating():
                        ...                            # change weights, and the policy's version

        Policies, connectors and callbacks are called in that thread. Weights of policies that it uses are changed
        inside `updating`, and metrics are read there. Until the block is left, the collector can neither `collect` nor
        `reset`.

        Args:
            steps: How much a batch is; ``batch_size`` where no amount is given.
            env_steps: As `collect`.
            agent_steps: As `collect`.
            episodes: As `collect`.
            total: As in `batches`.
            ahead: Most batches collected ahead of those taken, including the unfinished one. With a larger number,
                batches have decisions of older weights.

        Raises:
            ArgumentError: An amount, the total or ``ahead`` is not positive.
            StateError: Batches are already collected in the background.
        """
        if steps is env_steps is agent_steps is episodes is None:
            steps = self._batch_size
        goal = self._goal("background", steps, env_steps, agent_steps, episodes)
        course = BatchSchedule(goal, None if total is None else count_from(total, f"background(total={total!r})"))
        number = count_from(ahead, f"background(ahead={ahead!r})")
        self._check_foreground("background")
        self._background = Background(
            self._fill, self._receive_pending, course, number, self._take_waiting(course, goal)
        )
        return self._background

    def _receive_pending(self) -> None:
        """Receive pending replies of the envs."""
        if not self._loop.is_dirty:
            with self._update_lock:
                self._loop.receive_pending()

    def updating(self) -> AbstractContextManager[None]:
        """Context in which to change weights, or anything else that may change between two calls of `collect`.

        Entering waits for the end of the step in progress; the collecting thread (see `background`) waits for the end
        of the block. So weights change only between two steps, and each row was decided by the weights of its
        ``policy_version``. Change the version together with the weights.

        Raises:
            StateError: Called by a callback in the middle of a step.
        """
        self._check_process("updating()")
        return self._update_lock.updating()

    # --- reset

    def reset(self, seed: int | None = None) -> None:
        """Begin new episodes in all envs. Running episodes and all undelivered rows are lost.

        Works after any failure: a fault, Ctrl-C, or other code that has driven the envs.

        Args:
            seed: Seeds envs, policies, connectors and episodes again, like the constructor's; None: their random
                streams continue (at the first call, from the constructor's seed).

        Raises:
            StateError: Batches are collected in the background.
        """
        self._check_foreground("reset")
        if self._callback_list.running_hook != "on_sample_end":
            self._owner.claim(self, "reset", self._callback_list.running_hook)
        try:
            if seed is not None:
                self._seed = self._entropy = check_seed(seed)
                self._policy_set.reseed()
            elif self._loop.is_new:
                seed = self._seed
            self._drop_waiting()
            self._loop.start(entropy=self._entropy, seed=seed)
            self._is_half_set = False
        finally:
            self._owner.thread = self._current.tick_counters = None  # not interrupted: stores alone

    def train(self) -> Self:
        """Let all connectors learn their statistics, except those of frozen policies."""
        self._policy_set.train()
        return self

    def eval(self) -> Self:
        """Freeze all connectors' statistics."""
        self._policy_set.eval()
        return self

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
    ) -> None:
        """Add a policy, between two calls of `collect`; from now on the mapping function may name it.

        If `policies_to_train` is a list, the policy is not in it.

        Args:
            policy_id: Its id, a new one.
            policy: The policy, in any form that the constructor takes; for a `PolicyMap`, a function that builds it.
            like: Id of a policy whose connectors are copied, with their learned state, but without their memory of
                running episodes.
            agent_connectors: Its agent chain, instead of ``like``'s.
            action_connectors: Its action chain, instead of ``like``'s.
            learner_connectors: Its learner chain, instead of ``like``'s.
            frozen: Whether it is never trained: no batch has its rows, and its connectors stay in eval mode, also after
                `train`.

        Raises:
            ArgumentError: The id is taken; the policy is invalid, or already has an id; or its connectors are
                ambiguous, because the constructor got one chain for all policies.
            KeyError: The policy ``like`` is unknown.
            StateError: A removed policy had this id, and some of its rows are still pending.
        """
        own = agent_connectors, action_connectors, learner_connectors
        self._policy_set.add(policy_id, policy, like, own, is_frozen=frozen)
        self._count_policies()

    def remove_policy(self, policy_id: str) -> None:
        """Remove a policy (``policy_id``) that plays in no running episode, between two calls of `collect`.

        Its undelivered rows still come, under its id. The mapping function must not name it any more.

        Raises:
            KeyError: The policy is unknown.
            StateError: It plays in running episodes, or by a fixed mapping. Nothing has changed: let the mapping
                function name others, and try again once these episodes have ended.
        """
        self._policy_set.remove(policy_id, self._loop.living)
        self._count_policies()

    @property
    def policy_mapping(self) -> PolicyMapping:
        """The policy of each agent; set another function for episodes that begin later."""
        return self._episodes.mapping

    @policy_mapping.setter
    def policy_mapping(self, policy_mapping: PolicyMapping) -> None:
        self._episodes.change_mapping(policy_mapping)

    @property
    def policies_to_train(self) -> PoliciesToTrain:
        """The policies that get batches; may be set between calls."""
        return self._trained.given

    @policies_to_train.setter
    def policies_to_train(self, policies_to_train: PoliciesToTrain) -> None:
        self._trained = TrainedPolicies(policies_to_train, tuple(self.policies))

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Ids of the policies that get batches: those of `policies_to_train` that are not frozen."""
        return self._policy_set.trained(self._trained)

    def _count_policies(self) -> None:
        """Pass the ids of all policies to metrics, including those of episodes in their window."""
        known = [*self._policy_set.all_ids, *self.metrics.policies_seen]
        self.metrics.policies = tuple(dict.fromkeys(known))

    @property
    def explore(self) -> bool:
        """Whether policies explore; may be set between calls."""
        return self._loop.explore

    @explore.setter
    def explore(self, explore: bool) -> None:
        self._loop.explore = bool(explore)

    @property
    def batch_mode(self) -> str:
        """``"truncate"`` or ``"complete"``."""
        return self._batch_mode

    @property
    def count_by(self) -> str:
        """``"env_steps"`` or ``"agent_steps"``."""
        return self._count_by

    @property
    def seed(self) -> int | None:
        """Seed of envs, policies and episodes; None: they are seeded by the operating system."""
        return self._seed

    @property
    def stream(self) -> int:
        """Stream number of ids; may be set before the first `collect`."""
        return self._stream

    @stream.setter
    def stream(self, stream: int) -> None:
        if not self._loop.is_new:
            raise StateError(f"it has collected with stream={self._stream}; give Collector(stream={stream}) then")
        self._stream, first = stream, first_id(stream)
        self._episodes.begin_ids(first)
        self._current.state = RolloutState.new(self.envs.num_envs, first)

    # --- how good they are

    def evaluate(
        self,
        episodes: int,
        envs: VectorEnv | None = None,
        *,
        policy_mapping: PolicyMapping | None = None,
        explore: bool = False,
        seed: int | None = None,
    ) -> Evaluation:
        """Play whole episodes in other envs, without side effects on the training.

        Policies and connectors are copied (`copy.deepcopy`), connectors in eval mode. The collector's envs, running
        episodes, statistics, random streams and metrics are unchanged, and no callback is called. May be called while
        batches are collected in the background.

        Every env plays equally many episodes, its first ones (the first envs one more if there is a remainder), so that
        short episodes do not count more than long ones.

        Args:
            episodes: Number of episodes, at least 1.
            envs: Other envs with the same agents and spaces, in any number; they are reset, and belong to the caller.
                None: the constructor's ``evaluation_envs``.
            policy_mapping: The policy of each agent; None: this collector's mapping. A function is called with the
                evaluation's episodes.
            explore: Whether policies explore.
            seed: Seeds envs, policies, connectors' draws and episodes; None: another seed in each call, derived from
                the collector's. Connectors never repeat a training's draws, even with its seed.

        Returns:
            The records of the episodes, with statistics over them.

        Raises:
            ArgumentError: ``episodes`` is not positive; or the envs are the collector's own, or have other agents or
                spaces.
            StateError: No envs are given.
            Exception: An error of a policy, a connector or an env. The collector is not affected.
        """
        amount = count_from(episodes, f"evaluate({episodes!r})")
        self._check_process("evaluate()")
        envs = self._evaluation_envs if envs is None else envs
        if envs is None:
            raise StateError(
                "evaluate(): expected envs to play in, got none: pass marlvec.make(...) with the same arguments, or "
                "give the collector evaluation_envs"
            )
        check_apart(envs, self.envs, "evaluate()")
        if envs.agents != self.envs.agents:
            raise ArgumentError(f"evaluate(): envs have the agents {envs.agents}, the collector's {self.envs.agents}")
        if seed is None:
            self._evaluations += 1
            seed = self._seed_of(_EVALUATION_STREAM, self._evaluations)
        with self.updating():
            chains = [eval_copies(pipelines, self.envs.num_envs) for pipelines in self._policy_set.pipelines]
            inner = EvaluationCollector(
                envs,
                copies_of(self.policies),
                self._episodes.mapping if policy_mapping is None else policy_mapping,
                agent_connectors=chains[0],
                action_connectors=chains[1],
                policies_to_train=(),
                callbacks=[{"on_episode_end": lambda _, record: quotas.note(record)}],
                explore=explore,
                seed=seed,
            )
        quotas = EpisodeQuotas(amount, envs.num_envs)
        while (wanted := quotas.wanted(inner._loop.living)).any():
            inner._loop.scheduler.rest(~wanted)
            inner.collect(env_steps=_EVALUATION_ROUNDS * int(wanted.sum()))
        played = {name for record in quotas.records for name in record.policies}
        versions = {name: policy.version for name, policy in inner.policies.items() if name in played}
        lost = inner.metrics.episodes_faulty + inner.metrics.episodes_restarted
        return Evaluation(quotas.records, envs.agents, versions, lost)

    def _random_steps(self, steps: Any) -> RandomSteps:
        is_none = isinstance(steps, (int, np.integer)) and not steps
        number = 0 if is_none else count_from(steps, f"random_steps={steps!r}")
        return RandomSteps(number, self.envs.num_envs, self.envs.agents, self._seed_of(_RANDOM_STREAM, 0))

    def _seed_of(self, purpose: int, number: int) -> int:
        stream = np.random.SeedSequence(self._entropy, spawn_key=(purpose, number))
        return int(stream.generate_state(1, np.uint64)[0])


class EvaluationCollector(Collector):
    """A collector whose connectors draw other numbers than in a training with the same seed."""

    _run_mark = _EVALUATION_STREAM


CollectingThread.methods |= {method.__code__ for method in (Collector._fill, Collector.reset)}


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of `Collector.evaluate`.

    Attributes:
        episodes: The episodes' records: every env's first one, by env, then every env's second one, and so on.
        agents: Agent names, in order of the records' arrays.
        versions: Policy id to the version that was evaluated, of those that played.
        lost: Number of episodes that were lost to faults or `RestartQuietly`; others were played for them.
    """

    episodes: Sequence[EpisodeRecord]
    agents: tuple[str, ...]
    versions: Mapping[str, int]
    lost: int = 0

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def returns(self) -> Stats:
        """Of whole episodes: the sum over all agents."""
        return Stats.of(e.episode_return for e in self.episodes)

    @property
    def lengths(self) -> Stats:
        """Env steps an episode."""
        return Stats.of(e.length for e in self.episodes)

    @property
    def agent_returns(self) -> dict[str, Stats]:
        """Agent name to its returns in the episodes it was in."""
        return {
            name: stats_of_agents([(e, a) for e in self.episodes if e.present_A[a]])["return"]
            for a, name in enumerate(self.agents)
        }

    @property
    def policy_returns(self) -> dict[str, Stats]:
        """Policy id to the returns of the agents it played, each on its own."""
        return {name: stats_of_policy(self.episodes, name)["return"] for name in self.versions}

    def __repr__(self) -> str:
        lost = f", {self.lost} lost" if self.lost else ""
        lines = [f"Evaluation of {len(self)} episodes{lost}:"]
        lines.append(f"  team return (sum over agents): {_line(self.returns)}")
        lines.append(f"  length: {_line(self.lengths)}")
        per_policy = ("return per agent of policy", self.policy_returns)
        for what, found in (("return of agent", self.agent_returns), per_policy):
            lines += [f"  {what} {name!r}: {_line(stats)}" for name, stats in found.items()]
        return "\n".join(lines)


def _line(stats: Stats) -> str:
    return f"{stats.mean:.4g} ± {stats.std:.4g} (min {stats.min:.4g}, max {stats.max:.4g})"


class EpisodeQuotas:
    """The episodes that each env still has to play.

    It is settled before they begin which episodes count: every env's first ones, as many of each. To take the first to
    end would favour short episodes, and to take them from whichever env begins one, envs in which they are short.
    """

    def __init__(self, episodes: int, num_envs: int) -> None:
        self._left_N = np.full(num_envs, episodes // num_envs)
        self._left_N[: episodes % num_envs] += 1
        self._found: list[tuple[int, EpisodeRecord]] = []
        self._count_N = np.zeros(num_envs, np.int64)

    def note(self, record: EpisodeRecord) -> None:
        """An episode has ended."""
        i = record.env_id
        if self._left_N[i] > 0:
            self._found.append((int(self._count_N[i]), record))
            self._left_N[i] -= 1
            self._count_N[i] += 1

    def wanted(self, living: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(N,): of which envs there are too few. What was wanted of one that is out for good is of the others."""
        gone = np.ones(len(self._left_N), np.bool_)
        gone[living] = False
        if len(living):
            for i in np.flatnonzero(gone & (self._left_N > 0)).tolist():
                for _ in range(int(self._left_N[i])):
                    planned = self._left_N[living] + self._count_N[living]
                    self._left_N[living[np.argmin(planned)]] += 1
                self._left_N[i] = 0
        wanted: NDArray[np.bool_] = self._left_N > 0
        return wanted

    @property
    def records(self) -> list[EpisodeRecord]:
        """The finished episodes, by round and env."""
        return [record for _, record in sorted(self._found, key=lambda item: (item[0], item[1].env_id))]


def check_apart(envs: VectorEnv, collected: VectorEnv, who: str) -> None:
    """Refuse the envs that are collected from, also behind a view of them."""
    if envs is collected or getattr(envs, "envs", None) is collected:
        raise ArgumentError(f"{who} cannot play in the envs that are collected from; make() others")
