"""Defects of the vectorizer where workers die, envs raise, and what follows on that.

They are for what the canaries of tests/properties cannot reach: worker processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from marlvec.envs.adapters.aec import AECAdapter
from marlvec.envs.env import Slot
from marlvec.errors import FetchTimeout
from marlvec.serialization.saved import ProcessBound
from marlvec.vector import buffers as buffer_reuse
from marlvec.vector import checks as actions
from marlvec.vector import shard
from marlvec.vector.async_env import AsyncVectorEnv
from marlvec.vector.base import VectorEnvBase
from marlvec.vector.buffers import Buffers
from marlvec.vector.failures import WorkerExit, WorkerLost
from marlvec.vector.recovery import FaultLog, Recovery, RowKind
from marlvec.vector.shard import EnvPhase, Shard
from marlvec.vector.vector_step import VectorStep
from marlvec.vector.workers.channel import ChannelClosed
from marlvec.vector.workers.pool import WorkerPool
from marlvec.vector.workers.worker import Watchdog
from tests.defects.registry import Patch, after, during, found_by

MACHINE = (
    "tests/faults/test_campaigns.py::test_some_calls_whatever_happens",
    "tests/faults/test_campaigns.py::test_any_calls_whatever_happens",
)
RESTART = "tests/faults/test_restart.py"
ANEW = f"{RESTART}::test_one_env_begins_anew_and_the_others_do_not_notice"
FORBIDDEN = "tests/vector/test_actions.py"
TURNS = "tests/envs/adapters/test_aec.py"
MASKS = "tests/envs/adapters/test_masks.py"
FORKS = "tests/vector/test_leftovers.py"


# --- what rows tell of an episode that was lost


@found_by(*MACHINE)
def alive_taken_after(patch: Patch) -> None:
    """Who was alive is taken from the new episode's row, not from what the caller last heard."""

    def take(_: Any, recovery: Recovery, i: int, buffers: Buffers) -> None:
        buffers.truncated[i] = buffers.alive[i]

    after(patch, Recovery, "_write_fault", take)


@found_by(*MACHINE)
def truncated_all(patch: Patch) -> None:
    """Of a lost episode all agents are truncated, those that had left before too."""

    def truncate(_: Any, recovery: Recovery, i: int, buffers: Buffers) -> None:
        buffers.truncated[i] = True

    after(patch, Recovery, "_write_fault", truncate)


@found_by(*MACHINE, in_workers=True)
def reward_of_the_step_before(patch: Patch) -> None:
    """A row of an env whose idle worker died still has the reward of the step before."""
    write_fault, restart = Recovery._write_fault, Shard.restart

    def write(recovery: Recovery, i: int, buffers: Buffers) -> None:
        rewards = buffers.reward[i].copy()
        write_fault(recovery, i, buffers)
        buffers.reward[i] = rewards

    def keep(shard: Shard, ids: Any, *rest: Any) -> Any:
        rewards = shard._buffers.reward[ids].copy()
        report = restart(shard, ids, *rest)
        shard._buffers.reward[ids] = rewards
        return report

    patch.setattr(Recovery, "_write_fault", write)
    patch.setattr(Shard, "restart", keep)


@found_by(*MACHINE)
def fault_flag_forgotten(patch: Patch) -> None:
    """The row of a lost episode does not say that it was lost."""

    def forget(report: Any, recovery: Recovery, *rest: Any) -> None:
        report.faults = {i: cause for i, cause in report.faults.items() if recovery.masked[i]}

    after(patch, Recovery, "complete_rows", forget)


@found_by(*MACHINE)
def final_obs_of_a_lost_episode(patch: Patch) -> None:
    """A lost episode is said to have final observations."""
    infos = VectorStep.infos.fget

    def whole(step: VectorStep) -> dict[str, Any]:
        out = infos(step)
        return out | {key: step.done for key in ("_final_observation", "_final_state") if key in out}

    patch.setattr(VectorStep, "infos", property(whole))


@found_by(*MACHINE, f"{RESTART}::test_an_episode_that_had_ended_is_not_lost_when_the_next_one_cannot_begin")
def whole_episode_told_as_lost(patch: Patch) -> None:
    """An episode that had ended is told as lost when the next one cannot begin."""
    restart = Recovery._restart

    def lose(recovery: Recovery, failure: Any, kind: RowKind, *, quiet: bool) -> Any:
        return restart(recovery, failure, recovery._kind(failure.env_id) if kind is RowKind.END else kind, quiet=quiet)

    patch.setattr(Recovery, "_restart", lose)


@found_by(*MACHINE)
def masked_end_told_again(patch: Patch) -> None:
    """A masked env tells of its end in each row."""
    split = Recovery.divert

    def tell(recovery: Recovery, request: Any, buffers: Buffers) -> Any:
        told = set(recovery._masked_unsaid)
        parts = split(recovery, request, buffers)
        for i in told - recovery._masked_unsaid:
            buffers.done[i] = True
        return parts

    patch.setattr(Recovery, "divert", tell)


@found_by(*MACHINE)
def quiet_ones_are_logged(patch: Patch) -> None:
    """A quiet restart is told like a fault."""
    add = FaultLog.add
    patch.setattr(FaultLog, "add", lambda log, *what, quiet: add(log, *what, quiet=False))


# --- who is lost


@found_by(*MACHINE)
def in_flight_env_not_revived(patch: Patch) -> None:
    """Envs in flight when their worker died are handed out as they were."""
    worker_lost = Recovery.worker_lost

    def hand_out(recovery: Recovery, loss: WorkerLost, *rest: Any, control: bool) -> Any:
        done = worker_lost(recovery, loss, *rest, control=control)
        return done if done is None else ([], loss.in_flight)

    patch.setattr(Recovery, "worker_lost", hand_out)


@found_by(*MACHINE, ANEW)
def lost_idle_env_not_told(patch: Patch) -> None:
    """An env that was idle when its worker died is not known to be lost."""
    worker_lost = Recovery.worker_lost

    def forget(recovery: Recovery, *what: Any, control: bool) -> Any:
        before = set(recovery._lost_idle)
        done = worker_lost(recovery, *what, control=control)
        if recovery.mode == "restart":
            recovery._lost_idle &= before
            recovery._update_flags()
        return done

    patch.setattr(Recovery, "worker_lost", forget)


@found_by(*MACHINE, ANEW)
def only_the_culprit_is_lost(patch: Patch) -> None:
    """Of a dead worker's envs only the one at work is taken to be lost."""
    worker_lost = Recovery.worker_lost

    def blame(recovery: Recovery, loss: WorkerLost, *rest: Any, control: bool) -> Any:
        before = set(recovery._lost_idle)
        done = worker_lost(recovery, loss, *rest, control=control)
        if loss.culprits:
            recovery._lost_idle -= set(loss.env_ids.tolist()) - set(loss.culprits) - before
            recovery._update_flags()
        return done

    patch.setattr(Recovery, "worker_lost", blame)


@found_by(*MACHINE)
def neighbour_lost_too(patch: Patch) -> None:
    """Where one env raises, its neighbour loses its episode."""

    def lose(told: Any, recovery: Recovery, failure: Any, *rest: Any) -> None:
        neighbour = failure.env_id - 1
        if told is None and neighbour >= 0 and neighbour not in recovery._revived:
            recovery._lost_idle.add(neighbour)
            recovery._update_flags()

    after(patch, Recovery, "_restart", lose)


@found_by(*MACHINE, in_workers=True)
def siblings_rows_cleared(patch: Patch) -> None:
    """A new worker clears the rows of all its envs, of those too that have a result to hand out."""

    def clear(_: Any, shard: Shard, *rest: Any) -> None:
        for i in shard.everyone:
            shard._clear_row(i)

    after(patch, Shard, "attach", clear)


@found_by(f"{RESTART}::test_one_env_begins_anew_and_the_others_do_not_notice")
def wrong_env_blamed(patch: Patch) -> None:
    """A worker that died is said to have been at work on another env."""
    bury = WorkerPool.reap

    def blame(worker_pool: WorkerPool, *who: Any, **how: Any) -> WorkerExit:
        worker_exit = bury(worker_pool, *who, **how)
        at = worker_exit.at_work_on
        return worker_exit if at is None else replace(worker_exit, at_work_on=max(worker_exit.first, at - 1))

    patch.setattr(WorkerPool, "reap", blame)


# --- the next incarnation


@found_by(*MACHINE)
def incarnation_not_counted(patch: Patch) -> None:
    """Envs that were lost with their neighbour's worker are not counted as built anew."""
    worker_lost, anew = Recovery.worker_lost, Recovery._count_restarts

    def lose(recovery: Recovery, loss: WorkerLost, *rest: Any, control: bool) -> Any:
        asked = [] if control else loss.in_flight.tolist()
        with during(recovery, "_count_restarts", lambda ids: anew(recovery, asked)):
            return worker_lost(recovery, loss, *rest, control=control)

    patch.setattr(Recovery, "worker_lost", lose)


@found_by(*MACHINE)
def seed_not_advanced(patch: Patch) -> None:
    """A new incarnation gets the seed of the one before it."""

    def keep(_: Any, recovery: Recovery, ids: list[int]) -> None:
        for i in ids:
            recovery._since[i] -= 1

    after(patch, Recovery, "_count_restarts", keep)


@found_by(f"{RESTART}::test_only_the_first_episode_of_a_new_incarnation_is_seeded", *MACHINE, in_workers=True)
def seed_of_the_restart_kept(patch: Patch) -> None:
    """The seed of a new incarnation's first reset is used for its later resets, too."""
    reset_env = Shard._reset_env

    def keep(shard: Shard, i: int, *rest: Any) -> None:
        seeds = dict(shard._next_seeds)
        reset_env(shard, i, *rest)
        shard._next_seeds = seeds

    patch.setattr(Shard, "_reset_env", keep)


@found_by(*MACHINE)
def options_of_a_lost_reset_forgotten(patch: Patch) -> None:
    """A reset that is repeated in a new incarnation goes without its options."""
    revival = Recovery._revival

    def forget(recovery: Recovery, asked: Any, *, build: bool) -> Any:
        operation, ids, (seeds, options, *rest) = revival(recovery, asked, build=build)
        return operation, ids, (seeds, [None] * len(options), *rest)

    patch.setattr(Recovery, "_revival", forget)


@found_by(*MACHINE, in_workers=True)
def lost_step_sent_again(patch: Patch) -> None:
    """A step that was lost is made up for in the new incarnation."""

    def make_up(_: Any, shard: Shard, ids: Any, *rest: Any) -> None:
        for i in ids:
            if shard._phases[i] is EnvPhase.BEGUN:
                shard.step([i])

    after(patch, Shard, "restart", make_up)


@found_by(*MACHINE)
def masked_env_comes_back(patch: Patch) -> None:
    """An explicit reset brings back an env that was masked."""
    record_reset = Recovery.record_reset

    def unmask(recovery: Recovery, ids: Any, *rest: Any) -> Any:
        recovery.masked[ids] = False
        return record_reset(recovery, ids, *rest)

    patch.setattr(Recovery, "record_reset", unmask)


@found_by(*MACHINE)
def wrong_envs_in_a_new_worker(patch: Patch) -> None:
    """A new worker builds the envs of another one."""
    start = WorkerPool.start

    def confuse(pool: WorkerPool, w: int) -> str | None:
        with during(pool, "_plans", pool._plans[-1:] + pool._plans[:-1]):
            return start(pool, w)

    patch.setattr(WorkerPool, "start", confuse)


@found_by(*MACHINE)
def restarts_without_limit(patch: Patch) -> None:
    """Restarts are counted by process, not by worker."""
    worker_lost = Recovery.worker_lost

    def count(recovery: Recovery, loss: WorkerLost, *rest: Any, control: bool) -> Any:
        spend = recovery._budget.try_restart
        with during(recovery._budget, "try_restart", lambda _, why: spend(("worker", loss.error.pid), why)):
            return worker_lost(recovery, loss, *rest, control=control)

    patch.setattr(Recovery, "worker_lost", count)


# --- requests and replies


@found_by(*MACHINE)
def double_delivery(patch: Patch) -> None:
    """The first part of an answer is delivered again with the second."""
    take = AsyncVectorEnv._read_reply

    def again(envs: AsyncVectorEnv, w: int) -> str | None:
        queue = envs._worker_pool.outstanding[w]
        number, ids = queue[0]
        wrong = take(envs, w)
        if queue and queue[0][0] == number:  # answered in part
            queue[0] = number, ids[: len(queue[0][1])]
        return wrong

    patch.setattr(AsyncVectorEnv, "_read_reply", again)


@found_by(*MACHINE, f"{RESTART}::test_a_worker_that_answers_in_part_and_dies_is_not_waited_for")
def last_reply_lost_before_a_death(patch: Patch) -> None:
    """What a worker had said before it died is not read."""
    take, go_on = AsyncVectorEnv._read_reply, WorkerPool.advance

    def lose(envs: AsyncVectorEnv, w: int) -> str | None:
        if w in envs._worker_pool.ended:
            raise ChannelClosed
        return take(envs, w)

    def lose_news(pool: WorkerPool, w: int) -> str | None:
        if w in pool.ended:
            raise ChannelClosed
        return go_on(pool, w)

    patch.setattr(AsyncVectorEnv, "_read_reply", lose)
    patch.setattr(WorkerPool, "advance", lose_news)


@found_by(*MACHINE)
def outstanding_requests_not_cleared(patch: Patch) -> None:
    """A worker that was replaced still owes the answers of the one before it."""
    loss_of = AsyncVectorEnv._lost

    def owe(envs: AsyncVectorEnv, w: int, *rest: Any) -> WorkerLost:
        owed = list(envs._worker_pool.outstanding[w])
        loss = loss_of(envs, w, *rest)
        envs._worker_pool.outstanding[w].extend(owed)
        return loss

    patch.setattr(AsyncVectorEnv, "_lost", owe)


@found_by(*MACHINE)
def stale_reply_after_a_timeout(patch: Patch) -> None:
    """A fetch that runs out of time forgets its request; the late answer is taken for that to the next one."""
    wait_for, take = VectorEnvBase._wait, AsyncVectorEnv._read_reply

    def forget(engine: VectorEnvBase, *what: Any) -> None:
        try:
            wait_for(engine, *what)
        except FetchTimeout:
            engine._call_state.undo_begin(engine._everyone, 0)
            raise

    def mistake(envs: AsyncVectorEnv, w: int) -> str | None:
        queue = envs._worker_pool.outstanding[w]
        queue[0] = queue[0][0], queue[-1][1]  # the number of the first one, the envs of the last
        return take(envs, w)

    patch.setattr(VectorEnvBase, "_wait", forget)
    patch.setattr(AsyncVectorEnv, "_read_reply", mistake)


@found_by(*MACHINE)
def ended_env_has_an_episode(patch: Patch) -> None:
    """With autoreset disabled, an env that was lost needs no reset."""
    deliver = VectorEnvBase._deliver

    def go_on(engine: VectorEnvBase, **how: Any) -> VectorStep:
        lost = np.array(list(engine._report.faults if engine._report else ()), np.int64)
        try:
            return deliver(engine, **how)
        finally:
            if engine.autoreset_mode == "disabled":
                engine._call_state.have_episodes(lost)

    patch.setattr(VectorEnvBase, "_deliver", go_on)


@found_by(f"{RESTART}::test_slow_is_not_hung")
def watchdog_counts_the_whole_request(patch: Patch) -> None:
    """A worker has the time of one env for all of its envs."""
    look = Watchdog.look
    patch.setattr(Watchdog, "look", lambda dog, busy: look(dog, [(w, number, 0) for w, number, _ in busy]))


@found_by("tests/vector/test_buffers.py")
def copies_over_what_is_held(patch: Patch) -> None:
    """A large result is copied over an older one that somebody still has."""
    references = buffer_reuse._references
    patch.setattr(buffer_reuse, "_references", lambda known, k: max(references(known, k) - 1, buffer_reuse._ALONE))


@found_by(FORBIDDEN)
def forbidden_by_the_mask_of_another_env(patch: Patch) -> None:
    """All envs' actions are held against the mask of the first one."""
    find = actions.find_forbidden
    patch.setattr(
        actions, "find_forbidden", lambda space, given, mask: find(space, given, np.broadcast_to(mask[:1], mask.shape))
    )


@found_by(TURNS)
def last_is_believed(patch: Patch) -> None:
    """Nothing is said where last() and rewards disagree."""
    patch.setattr(AECAdapter, "_compare_with_last", lambda *_: None)


@found_by(TURNS)
def warnings_of_workers_dropped(patch: Patch) -> None:
    """The caller never hears of a broken contract in a worker process."""
    patch.setattr(VectorEnvBase, "_warn", lambda *_: None)


# --- masks that no policy gets, and forks


@found_by(f"{MASKS}::test_a_mask_of_composite_actions_is_refused")
def masks_of_composite_actions_dropped(patch: Patch) -> None:
    """A mask of Tuple, Dict or MultiBinary actions is dropped in silence."""
    write = Slot.write_mask

    def drop(slot: Slot, agent: int, value: Any) -> None:
        if slot.action_mask[agent] is not None:
            write(slot, agent, value)

    patch.setattr(Slot, "write_mask", drop)


@found_by(f"{MASKS}::test_a_mask_in_infos_of_an_env_with_a_slot_is_refused")
def masks_in_infos_forbid_nothing(patch: Patch) -> None:
    """A mask in infos of an env that writes into its slot is an info like others."""
    patch.setattr(shard, "refuse_masks", lambda *_: None)


@found_by(
    f"{FORKS}::test_a_fork_leaves_videos_to_its_parent", f"{FORKS}::test_a_fork_leaves_many_collectors_to_its_parent"
)
def forks_use_what_is_their_parents(patch: Patch) -> None:
    """A forked process goes on with its parent's workers, files and connections."""
    patch.setattr(ProcessBound, "_check_process", lambda *_: None)
