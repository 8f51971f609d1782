"""A collector's calls that bring batches: one, many, or many in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from marlvec.collect.background import Background
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks.hooks import Hooks
from marlvec.collect.company import Company
from marlvec.collect.delivery import Delivery
from marlvec.collect.goal import Course, Goal, Unit, amount_of, goal_of
from marlvec.collect.loop import Loop
from marlvec.collect.metrics import Metrics
from marlvec.collect.progress_bar import ProgressBar
from marlvec.collect.trained import Trained
from marlvec.collect.turns import Turns
from marlvec.errors import BusyError, StateError
from marlvec.vector.seeding import check_seed

__all__ = ["Gathering"]


class Gathering:
    """What `Collector` does once it is made; it says what these attributes are."""

    metrics: Metrics
    _loop: Loop
    _delivery: Delivery
    _company: Company
    _hooks: Hooks
    _trained: Trained
    _count_by: Unit
    _batch_size: int | None
    _seed: int | None
    _entropy: int

    def __init__(self) -> None:
        self._turns = Turns()
        self._collecting: int | None = None  # the thread that collects
        self._entering = threading.Lock()
        self._background: Background | None = None

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
                episodes are lost: call `reset` to go on.
            Exception: What a policy raises, with a note that names it. Nothing was sent; calling again goes on from
                there, and that call's batch holds what this one had collected.
            StateError: An earlier call failed half-way through a step, or all envs are masked; or it is collected in
                the background.
            EnvsDriven: Somebody else has reset or stepped the envs, or has taken their rows, since this collector did.
                The running episodes are lost: call `reset` to go on.
            KeyboardInterrupt: As everywhere. In a policy, and while envs are waited for, it costs nothing: calling
                again goes on. In the middle of a step what runs is lost, calling again says so, and `reset` goes on.
            BusyError: Another thread collects.
            BaseException: What a callback raises, with a note that names it, once the step of the envs is finished:
                calling again goes on. See `Callback`.
        """
        goal = self._goal("collect", steps, env_steps, agent_steps, episodes)
        self._check_foreground("collect")
        batch = self._fill(goal, lambda: False)
        assert batch is not None  # nobody has stopped it
        return batch

    def _fill(self, goal: Goal, is_stopped: Callable[[], bool]) -> MultiAgentBatch | None:
        """Collect until there is enough, or until it is stopped between two steps: then what there is stays."""
        if self._loop.state == "lost":
            raise StateError("an earlier call failed half-way through a step; call reset() to begin new episodes")
        if self._loop.state == "ready":
            self._loop.traffic.check_alone()
        me = threading.get_ident()
        with self._entering:
            if self._collecting not in (None, me):
                raise BusyError("collect() while another thread collects with this collector")
            self._collecting = me
        try:
            if self._loop.state == "new":
                self._loop.start(entropy=self._entropy, seed=self._seed)
            needed, turns = partial(self._delivery.envs_needed, goal), self._turns
            self._loop.traffic.begin_call(needed)
            while needed() or self._loop.traffic.is_in_a_round:
                if is_stopped():
                    return None
                with turns:
                    self._company.hand_over(self._loop)
                    self._loop.step(needed)
            with turns:
                batch = self._delivery.deliver(goal, self._trained)
            self._loop.note_handed(batch.env_steps, batch.agent_steps)
            try:
                self._hooks.sample_end(batch)
            except BaseException:
                self._loop.note_handed(-batch.env_steps, -batch.agent_steps)
                raise
            return batch
        finally:
            # Stores alone: where Ctrl-C has come, no call is made that another one could end.
            self._turns.stepping = self._collecting = None

    def _goal(
        self, call: str, steps: int | None, env_steps: int | None, agent_steps: int | None, episodes: int | None
    ) -> Goal:
        amounts: dict[Unit, int | None] = {"env_steps": env_steps, "agent_steps": agent_steps, "episodes": episodes}
        return goal_of(amounts, steps, self._count_by, call)

    def _check_foreground(self, call: str) -> None:
        if self._background is not None:
            raise StateError(
                f"{call}() while batches are collected in the background: take them from there, or leave its `with` "
                f"block first"
            )

    # --- many

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        """Collect batches of ``batch_size`` for ever.

        Raises:
            StateError: The collector was made without ``batch_size``.
        """
        if self._batch_size is None:
            raise StateError(
                "how much is a batch? Give the collector a batch_size, or say "
                "`for batch in collector.batches(env_steps=...)`"
            )
        return self.batches(self._batch_size)

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
            env_steps: Likewise.
            agent_steps: Likewise.
            episodes: Likewise.
            total: How much all of them are, in the same unit: the last one holds what is left. In complete mode, where
                a batch may hold more, they end once there is that much. None: they never end.
            progress: Whether to draw a progress bar on stderr.

        Raises:
            ArgumentError: Not exactly one positive amount, or a total that is not positive.
        """
        goal = self._goal("batches", steps, env_steps, agent_steps, episodes)
        course = Course(goal, None if total is None else amount_of(total, f"batches(total={total!r})"))
        return self._run(course, ProgressBar(goal.unit, course, self.metrics) if progress else None)

    def _run(self, course: Course, bar: ProgressBar | None) -> Iterator[MultiAgentBatch]:
        shown: AbstractContextManager[object] = nullcontext() if bar is None else bar
        with shown:
            while (goal := course.next_goal) is not None:
                self._check_foreground("batches")
                batch = self._fill(goal, lambda: False)
                assert batch is not None  # nobody has stopped it
                course.note(goal, batch)
                if bar is not None:
                    bar.show()
                yield batch

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
            env_steps: Likewise.
            agent_steps: Likewise.
            episodes: Likewise.
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
        course = Course(goal, None if total is None else amount_of(total, f"background(total={total!r})"))
        number = amount_of(ahead, f"background(ahead={ahead!r})")
        self._check_foreground("background")
        self._background = Background(self._fill, self._settle, self._leave_background, course, number)
        return self._background

    def _settle(self) -> None:
        """Take in what is on the way."""
        if self._loop.state != "lost":
            with self._turns:
                self._loop.settle()

    def _leave_background(self) -> None:
        self._background = None

    def updating(self) -> AbstractContextManager[None]:
        """Change weights in here, or anything else that may be changed between two calls of `collect`.

        Another thread that collects (see `background`) waits meanwhile, and this one for the end of the step in
        progress: weights change between two steps and never within one, so each row was decided by the very weights
        that its ``policy_version`` names. Change the version with them.

        Raises:
            StateError: In a callback that is told of a step.
        """
        return self._turns.updating()

    # --- anew

    def reset(self, seed: int | None = None) -> None:
        """Begin new episodes in all envs. Running ones are lost, with all rows that were not handed over.

        It goes on after whatever has happened: a fault, Ctrl-C, or somebody else who has driven the envs.

        Args:
            seed: Seeds envs, policies and episodes anew, as the constructor's; None: all go on with their streams,
                or begin with those of the constructor's seed.

        Raises:
            StateError: It is collected in the background.
        """
        self._check_foreground("reset")
        if seed is not None:
            self._seed = self._entropy = check_seed(seed)
            self._company.reseed()
        elif self._loop.state == "new":
            seed = self._seed
        self._loop.start(entropy=self._entropy, seed=seed)
