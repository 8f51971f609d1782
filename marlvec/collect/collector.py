"""The collector: rows of all envs through connectors and policies, back to the envs, and into batches.

Axis letters: N envs, A agents, n rows or envs of one call, L lanes (N * A, one per env and agent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import DTypeLike

from marlvec.collect.acting.policy_set import (
    Chain,
    Connectors,
    NewPolicy,
    PoliciesToTrain,
    PolicySet,
    TrainedPolicies,
    named,
)
from marlvec.collect.acting.random_steps import RandomSteps
from marlvec.collect.background import Background, CollectingStopped, CollectingThread, UpdateLock
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.batch.sample_target import BatchSchedule, count_from
from marlvec.collect.batch_builder import BatchBuilder
from marlvec.collect.batch_source import BatchSource
from marlvec.collect.callbacks.callback_list import CallbackLike, CallbackList
from marlvec.collect.episodes import EpisodeTracker, PolicyMapping
from marlvec.collect.evaluation import EpisodeQuotas, Evaluation, check_apart
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.rollout import RolloutLoop
from marlvec.collect.rollout_state import CurrentState, RolloutState, first_id
from marlvec.collect.state.stateful_collector import StatefulCollector
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import PolicyLike
from marlvec.policies.policy_copy import copies_of, eval_copies
from marlvec.vector.seeding import check_seed, entropy_of
from marlvec.vector.vector_env import VectorEnv

__all__ = ["Collector"]

_POLICY_STREAM = 0x706F6C696379  # "policy"
_EVALUATION_STREAM = 0x6576616C  # "eval"
_RANDOM_STREAM = 0x7761726D  # of the random steps
_EVALUATION_ROUNDS = 8  # between two looks at which envs are still wanted


class Collector(StatefulCollector, BatchSource):
    """Collects experience: per policy, one row per agent decision.

    Each tick, every policy answers all rows that wait for it, of all envs, in one call; the envs step; what comes back
    goes through the agent connectors at once and waits. So an observation passes them once, and a policy that changes
    between two calls of `collect` decides with its new weights from the first row on. A transition runs from an agent's
    decision to its next turn, or to its own end, with the sum of its rewards in between; at an end ``next_obs`` is the
    agent's final observation, through the same connectors. What a batch holds does not depend on the autoreset mode.

    Where an env is built anew or masked, because of a fault or of `RestartQuietly`, the episode it was in is lost: all
    its rows that no batch holds yet are dropped and count for nothing, its connectors' state is reset, it is in no
    statistics, and the others go on as if nothing had happened. In truncate mode earlier batches may hold its
    beginning; nothing follows on the last row there, which is neither terminated nor truncated. `Metrics` counts what
    was lost. Masked envs are left out from then on.

    The envs belong to the caller: the collector resets them at its first `collect`, and never closes them. Where
    other code resets or steps them, it says so (`EnvsDriven`) and goes on with `reset`.

    Args:
        envs: The envs.
        policies: Policy id to policy; or one policy, which gets the id ``"main"``. A `PolicyMap` is used as it is. An
            object with a method ``act(rows)``, or a function of rows, will do for a policy.
        policy_mapping: Which policy plays which agent: a policy id, a dict of agent name to id, or a function
            ``(agent name, episode) -> id``, called once per episode and agent. None: the only policy there is. All
            agents that one policy plays must have the same spaces.
        policy_mapping_fn: RLlib's name for the same; give one of the two.
        agent_connectors: Between envs and policies. One chain (a pipeline or a list of connectors), copied per policy
            where there are several; or policy id to chain; or None for ``AgentPipeline.default()``.
        action_connectors: Between policies and envs, in the same forms; None for ``ActionPipeline.default()``.
        learner_connectors: Between batches and learners, in the same forms; None for none. They see every policy's
            rows before they change their own. Those of a policy that has no rows in a batch are not called.
        policies_to_train: Ids of the policies that get batches, or a function ``(policy id) -> bool``, asked at each
            batch about those that have rows; None: all. What the others did is in no batch, and nowhere else missing:
            metrics, ``batch.agent_steps`` and the amounts that `collect` takes count the decisions of all.
        batch_mode: ``"truncate"``: batches of exactly the asked size, which cut through episodes; ``"complete"``:
            whole episodes only.
        count_by: What ``collect(1000)`` counts: ``"env_steps"`` or ``"agent_steps"``.
        batch_size: How much a batch of ``for batch in collector`` and of `background` is, as ``count_by`` counts.
        overlap: Whether policies answer for one half of the envs while the workers step the other, in a fixed order.
            Batches are the same, bit for bit, as long as policies and connectors answer each row for itself: one that
            draws from one random stream for all rows, or keeps running statistics, meets rows in another order, which
            is the same one each time. Callbacks hear of half of the envs at a time.
        random_steps: So many env steps, the first of this collector, are made with uniformly random legal actions, as
            many in every env. No policy is asked, but a recurrent one for its state (see `RnnState`); rows of them are
            marked in the column ``off_policy``, and what else policies add says nothing there (NaN, 0).
        reward_dtype: Dtype of rewards in batches, e.g. ``np.float32``; None leaves float64. Metrics stay float64.
        callbacks: What is called, in this order: a `Callback`, or a dict of its methods' names to functions,
            or a function that has one of these names. They belong to the caller, too, who closes them.
        explore: Whether policies explore; may be set between calls.
        seed: Seeds the envs' first reset (as ``envs.reset(seed=seed)``), every policy and every episode's ``rng``, each
            with a stream of its own. None: from the operating system.
        window: Number of last episodes that metrics are over.
        evaluation_envs: Those that `evaluate` plays in, where it is given none; not those that are collected from.
        stream: Ids begin at ``stream << 43``: collectors of two streams have no ``eps_id`` or ``unroll_id`` in common.

    Raises:
        ArgumentError: An argument is wrong.
        KeyError: The mapping names an unknown policy; lists the known ones.
        ContractError: A policy is to play agents of different spaces.

    Attributes:
        envs, policies: As given; policies by id, what is none as `marlvec.policies.as_policy` makes one of it.
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
            envs, self.policies, connectors, self._episodes, partial(self._seed_of, _POLICY_STREAM)
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
            logs=self._policy_set.logs,
        )
        self._batch_builder = BatchBuilder(
            self._current,
            self._runners,
            self._policy_set.logs,
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

        What is asked for, and what comes:

        =================  ===============================================  ========================================
        ..                 ``batch_mode="truncate"``                        ``batch_mode="complete"``
        =================  ===============================================  ========================================
        ``env_steps=k``    exactly k env steps, shared over the envs        episodes, until their env steps sum to k
        ``agent_steps=k``  exactly k rows; those too many come next time    episodes, until their rows sum to k
        ``episodes=k``     until k episodes have ended; parts of others     exactly k episodes
        =================  ===============================================  ========================================

        Nothing is lost between calls: a decision whose outcome is not known yet comes in a later batch, as do episodes
        that end and are not needed. Where k is not a multiple of N, those envs step that have waited longest.

        Args:
            steps: An amount of what ``count_by`` names.
            env_steps: An amount of env steps.
            agent_steps: An amount of decisions with a known outcome.
            episodes: A number of episodes.

        Raises:
            ArgumentError: Not exactly one positive amount.
            ContractError: A policy or connector answered in a wrong form; names the policy. Where a learner connector
                failed, nothing is lost: calling again tries it again.
            EnvFault: An env raised or a worker died, and ``on_fault`` of the envs does not let them go on. The running
                episodes are lost; calling again begins new ones.
            Exception: What a policy raises, with a note that names it. Nothing was sent; calling again goes on from
                there, and that call's batch holds what this one had collected.
            StateError: All envs are masked; or it is collected in the background; or a callback, a policy or a
                connector asks for it in the middle of a step.
            EnvsDriven: Other code has reset or stepped the envs, or has taken their rows, since this collector did.
                The running episodes are lost: call `reset` to go on.
            KeyboardInterrupt: As everywhere. In a policy, and while envs are waited for, it costs nothing: calling
                again goes on. In the middle of a step the running episodes are lost: calling again begins new ones, and
                metrics count the lost ones as ``episodes_interrupted``. No other row is lost, and none comes twice.
            BusyError: Another thread collects.
            BaseException: What a callback raises, with a note that names it, once the step of the envs is finished:
                calling again goes on. See `Callback`.

        What a policy draws from random streams of its own, and what a connector has learned, may have seen a step that
        an interrupt or an error has ended.
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
        """Collect the next batch.

        Ctrl-C may come at any line. Until the last store the batch is not delivered, and comes again next time; behind
        it nothing is called before the caller has the batch, and so Python does not look whether Ctrl-C has come.

        Args:
            schedule: Says how much; there is something left.
            is_stopped: Asked between two steps.
            show: Called with how much of the schedule is done.

        Raises:
            CollectingStopped: ``is_stopped`` says so. What there is stays.
            Exception: As `collect`.
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

    def _check_foreground(self, call: str) -> None:
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
            ahead: How many batches there may be beyond those taken, the one in the making included. With more of them
                the learner is further behind: batches hold decisions of older weights.

        Returns:
            A `Background`, to be used in a ``with`` block and iterated over.

        Raises:
            ArgumentError: An amount, the total or ``ahead`` is not positive.
            StateError: There is one already.
        """
        if steps is env_steps is agent_steps is episodes is None:
            steps = self._batch_size
        goal = self._goal("background", steps, env_steps, agent_steps, episodes)
        course = BatchSchedule(goal, None if total is None else count_from(total, f"background(total={total!r})"))
        number = count_from(ahead, f"background(ahead={ahead!r})")
        self._check_foreground("background")
        self._background = Background(self._fill, self._settle, course, number, self._take_waiting(course, goal))
        return self._background

    def _settle(self) -> None:
        """Take in what is on the way."""
        if not self._loop.is_dirty:
            with self._update_lock:
                self._loop.settle()

    def updating(self) -> AbstractContextManager[None]:
        """Change weights in here, or anything else that may be changed between two calls of `collect`.

        Another thread that collects (see `background`) waits meanwhile, and this one for the end of the step in
        progress: weights change between two steps and never within one, so each row was decided by the very weights
        that its ``policy_version`` names. Change the version with them.

        Raises:
            StateError: In a callback that is called for a step.
        """
        return self._update_lock.updating()

    # --- reset

    def reset(self, seed: int | None = None) -> None:
        """Begin new episodes in all envs. Running ones are lost, with all rows that were not handed over.

        It goes on after whatever has happened: a fault, Ctrl-C, or other code that has driven the envs.

        Args:
            seed: Seeds envs, policies and episodes again, as the constructor's; None: all go on with their streams,
                or begin with those of the constructor's seed.

        Raises:
            StateError: It is collected in the background.
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
        """Let all connectors learn their statistics, but for those of frozen policies."""
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
        """Add a policy, between two calls of `collect`; from now on it plays what the mapping function gives it.

        Where `policies_to_train` is a list it is not in it.

        Args:
            policy_id: Its id, a new one.
            policy: The policy, in a form that the constructor takes; where `policies` is a `PolicyMap`, a function that
                builds it.
            like: Id of a policy whose connectors it gets copies of, with all they have learned, and without what they
                remember of running episodes.
            agent_connectors: Its own chain, instead.
            action_connectors: Its own chain, instead.
            learner_connectors: Its own chain, instead.
            frozen: Whether it is never trained: it is in no batch, whatever `policies_to_train` says, and its
                connectors stay in eval mode, also after `train`.

        Raises:
            ArgumentError: The id is taken; the policy is none, or has an id already; or its connectors are not clear,
                because one chain was given for all policies.
            KeyError: There is no policy ``like``.
            StateError: A policy of that id was removed, and some of its rows are still to come.
        """
        own = agent_connectors, action_connectors, learner_connectors
        self._policy_set.add(policy_id, policy, like, own, is_frozen=frozen)
        self._count_policies()

    def remove_policy(self, policy_id: str) -> None:
        """Remove a policy that plays in no running episode, between two calls of `collect`. It is not asked again.

        Rows of it that no batch holds yet still come, under its id. A mapping function must not name it any more.

        Args:
            policy_id: Which.

        Raises:
            KeyError: There is no such policy.
            StateError: It plays in running episodes, or by a fixed mapping. Nothing has changed: have the mapping
                function name others, and try again once those episodes have ended.
        """
        self._policy_set.remove(policy_id, self._loop.living)
        self._count_policies()

    @property
    def policy_mapping(self) -> PolicyMapping:
        """The policy of each agent; a function may be replaced by another, for episodes that begin."""
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
        """Have metrics know all policies there are, and those of the episodes they are over."""
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
        """Stream number that ids begin with; may be set before anything was collected."""
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
        """Play whole episodes in other envs, without an effect on anything that is trained with.

        Policies and connectors are copied (`copy.deepcopy`), connectors in eval mode; running episodes, statistics,
        random streams, memories, metrics and the envs of this collector stay as they are, and callbacks hear nothing.
        May be called while batches are collected in the background.

        As many episodes are played in every env, its first ones; with a remainder one more in the first envs. So short
        episodes do not count more than long ones.

        Args:
            episodes: How many, 1 at least.
            envs: Other envs of the same agents and spaces, which belong to the caller; None: the constructor's
                ``evaluation_envs``. They need not be as many, and are reset.
            policy_mapping: Which policy plays which agent; None: as in this collector. A function is asked, with
                evaluation's episodes.
            explore: Whether policies explore.
            seed: Seeds envs, policies and episodes; None: with another seed each time, which follows from the
                collector's.

        Returns:
            The records of the episodes, with statistics over them.

        Raises:
            ArgumentError: ``episodes`` is not positive; the envs are those that are collected from, or others.
            StateError: There are no envs for it.
            Exception: What policies, connectors and envs raise. The collector itself is not concerned.
        """
        amount = count_from(episodes, f"evaluate({episodes!r})")
        envs = self._evaluation_envs if envs is None else envs
        if envs is None:
            raise StateError(
                "evaluate() plays in envs of its own: give it some, marlvec.make(...) with the same arguments, or give "
                "the collector evaluation_envs"
            )
        check_apart(envs, self.envs, "evaluate()")
        if envs.agents != self.envs.agents:
            raise ArgumentError(f"evaluate(): envs have the agents {envs.agents}, the collector's {self.envs.agents}")
        if seed is None:
            self._evaluations += 1
            seed = self._seed_of(_EVALUATION_STREAM, self._evaluations)
        with self.updating():
            chains = [eval_copies(pipelines, self.envs.num_envs) for pipelines in self._policy_set.pipelines]
            inner = Collector(
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


CollectingThread.methods |= {method.__code__ for method in (Collector._fill, Collector.reset)}
