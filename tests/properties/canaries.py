"""Seeded defects: each breaks the vectorizer in one way in which vectorizers have been broken before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from marlvec.envs import env as action_reader
from marlvec.envs.adapters import base
from marlvec.envs.adapters import base as return_values
from marlvec.envs.env import Slot
from marlvec.errors import FetchTimeout
from marlvec.vector import vector_env
from marlvec.vector.base import VectorEnvBase
from marlvec.vector.buffers import Buffers
from marlvec.vector.calls import STREAM_CALLS, CallEvent, CallState
from marlvec.vector.shard import EnvEvent, EnvPhase, Shard
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep
from tests.defects.registry import Patch, after, found_by

__all__ = ["PROGRAMS"]

PROGRAMS = "tests/properties/test_programs.py"


def canary(defect: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Keep a defect; its name is its title."""
    defect.__doc__ = f"{defect.__name__.replace('_', ' ').capitalize()}."
    return found_by(f"{PROGRAMS}::test_in_this_process", f"{PROGRAMS}::test_in_this_process_at_length")(defect)


@canary
def final_obs_taken_after_the_reset(patch: Patch) -> None:
    snapshot, late = Buffers.snapshot, {}

    def remember(buffers: Buffers, i: int, ended: Any) -> None:
        if buffers.done[i]:
            late[id(buffers), i] = list(ended)
        else:
            snapshot(buffers, i, ended)

    def take(_: Any, shard: Shard, i: int, *rest: Any) -> None:
        if (key := (id(shard._buffers), i)) in late:
            snapshot(shard._buffers, i, late.pop(key))

    patch.setattr(Buffers, "snapshot", remember)
    after(patch, Shard, "_reset_env", take)


@canary
def autoreset_flag_kept_after_an_explicit_reset(patch: Patch) -> None:
    reset = Shard.reset

    def keep(shard: Shard, ids: Any, *rest: Any) -> Any:
        over = [i for i in ids if shard._phases[i] is EnvPhase.OVER]
        report = reset(shard, ids, *rest)
        for i in over if shard._autoreset.begins_on_next_step else ():
            shard._phases.on(i, EnvEvent.WAIT)
        return report

    patch.setattr(Shard, "reset", keep)


@canary
def rows_in_the_order_of_the_dict(patch: Patch) -> None:
    mapping = return_values.mapping

    def by_place(value: Any, sink: Any, what: str, check: str = "results") -> Any:
        table = mapping(value, sink, what, check)
        return dict(zip(sorted(table), table.values(), strict=True)) if what == "observations" else table

    for module in (base, return_values):  # in resets, and in steps
        patch.setattr(module, "mapping", by_place)


@canary
def mask_inverted(patch: Patch) -> None:
    write = Slot.write_mask
    patch.setattr(Slot, "write_mask", lambda slot, a, value: write(slot, a, np.equal(value, 0)))


@canary
def mask_kept_while_others_move(patch: Patch) -> None:
    patch.setattr(Slot, "clear_mask", lambda slot, a: None)


@canary
def reward_of_the_boundary_step_dropped(patch: Patch) -> None:
    def drop(_: Any, shard: Shard, i: int, *rest: Any) -> None:
        shard._buffers.reward[i] = 0

    after(patch, Shard, "_finish", drop)


@canary
def rewards_of_the_step_before(patch: Patch) -> None:
    last: dict[int, Any] = {}

    def delay(_: Any, shard: Shard, ids: Any) -> None:
        rewards = shard._buffers.reward
        new = rewards.copy()
        rewards[...] = last.get(id(shard._buffers), new)
        last[id(shard._buffers)] = new

    after(patch, Shard, "step", delay)


@canary
def request_forgotten_at_a_timeout(patch: Patch) -> None:
    wait_for = VectorEnvBase._wait

    def forget(engine: VectorEnvBase, wanted: int, timeout: float | None, call: str) -> None:
        try:
            wait_for(engine, wanted, timeout, call)
        except FetchTimeout:
            calls = engine._call_state
            calls.pending, calls._sole_call_ids, calls._batches = None, None, []
            calls.outstanding = calls.arrived = 0
            calls._busy[:] = False
            calls.on(CallEvent.FINISH)
            raise

    patch.setattr(VectorEnvBase, "_wait", forget)


@canary
def rows_delivered_twice(patch: Patch) -> None:
    hand_out = CallState.hand_out
    last: WeakKeyDictionary[CallState, Any] = WeakKeyDictionary()

    def again(calls: CallState) -> Any:
        ids = hand_out(calls)
        if calls.pending in STREAM_CALLS:
            ids = np.union1d(ids, last.get(calls, ids))
        last[calls] = ids[:1]
        return ids

    patch.setattr(CallState, "hand_out", again)


@canary
def sent_rows_in_env_order(patch: Patch) -> None:
    send = VectorEnv._request_step
    patch.setattr(VectorEnv, "_request_step", lambda envs, call, actions, ids: send(envs, call, actions, np.sort(ids)))


@canary
def received_rows_in_env_order(patch: Patch) -> None:
    rows = VectorEnvBase._selection

    def in_order(engine: VectorEnvBase, ids: Any) -> Any:
        found = rows(engine, ids)
        return found if isinstance(found, slice) else np.sort(found)

    patch.setattr(VectorEnvBase, "_selection", in_order)


@canary
def reset_mask_missing(patch: Patch) -> None:
    def hide(_: Any, shard: Shard, i: int, *rest: Any) -> None:
        shard._buffers.reset_mask[i] = False

    after(patch, Shard, "_step_without_episode", hide)


@canary
def infos_of_reset_and_last_step_swapped(patch: Patch) -> None:
    def swap(_: Any, shard: Shard, i: int, slot: Slot, report: Any) -> None:
        first, last = report.infos.pop(i, None), report.final_infos.pop(i, None)
        if last:
            report.infos[i] = last
        if first:
            report.final_infos[i] = first

    after(patch, Shard, "_finish", swap)


@canary
def infos_of_a_neighbour(patch: Patch) -> None:
    def rotate(report: Any, shard: Shard, ids: Any) -> None:
        n = len(shard.envs)
        report.infos = {(i + 1) % n: info for i, info in report.infos.items()}

    after(patch, Shard, "step", rotate)


@canary
def obs_of_an_ended_agent_not_cleared(patch: Patch) -> None:
    patch.setattr(Shard, "_clear_ended", lambda shard, ids: None)


@canary
def partial_reset_touches_a_neighbour(patch: Patch) -> None:
    def touch(_: Any, shard: Shard, ids: Any, *rest: Any) -> None:
        for i in {(i + 1) % len(shard.envs) for i in ids} - set(ids):
            for leaves in shard._buffers.obs:
                for leaf in leaves:
                    leaf[i] = None if leaf.dtype == object else 0

    after(patch, Shard, "reset", touch)


@canary
def nan_normalised(patch: Patch) -> None:
    def normalise(_: Any, shard: Shard, ids: Any) -> None:
        for leaves in shard._buffers.obs:
            for leaf in leaves:
                if leaf.dtype.kind == "f":
                    leaf[np.isnan(leaf)] = np.nan

    after(patch, Shard, "step", normalise)


@canary
def one_seed_for_all_envs(patch: Patch) -> None:
    spread = vector_env.spread_seeds

    def share(seed: Any, ids: Any, n: int) -> Any:
        seeds = spread(seed, ids, n)
        return seeds[:1] * len(seeds)

    patch.setattr(vector_env, "spread_seeds", share)


@canary
def views_in_place_of_copies(patch: Patch) -> None:
    step = VectorStep.__init__

    def view(result: VectorStep, buffers: Any, ids: Any, rows: Any, report: Any, **options: Any) -> None:
        step(result, buffers, ids, rows, report, **options)
        result.rewards = buffers.reward[rows]

    patch.setattr(VectorStep, "__init__", view)


@canary
def over_only_if_all_end_alike(patch: Patch) -> None:
    look_after = Shard._after_step

    def miss(shard: Shard, i: int, slot: Slot, report: Any) -> None:
        terminated, truncated = shard._buffers.terminated[i], shard._buffers.truncated[i]
        if slot.done and terminated.any() and truncated.any() and not (terminated & truncated).any():
            slot.done = False
            return
        look_after(shard, i, slot, report)

    patch.setattr(Shard, "_after_step", miss)


@canary
def flags_told_as_one(patch: Patch) -> None:
    def merge(_: Any, shard: Shard, ids: Any) -> None:
        shard._buffers.terminated[...] &= ~shard._buffers.truncated

    after(patch, Shard, "step", merge)


@canary
def actions_not_copied(patch: Patch) -> None:
    def read(reader: Any, k: int) -> list[Any]:
        if reader._is_bare[k]:
            return reader._rows[k].tolist()  # type: ignore[no-any-return]  # a list, by numpy's word
        return [reader._rows[k][j, ...] for j in range(len(reader._rows[k]))]

    patch.setattr(action_reader.ActionReader, "_read_leaf", read)


@canary
def final_state_taken_after_the_reset(patch: Patch) -> None:
    def take(_: Any, shard: Shard, i: int, *rest: Any) -> None:
        if shard._keep_state and shard._buffers.state is not None and shard._buffers.final_state is not None:
            shard._buffers.final_state[i] = shard._buffers.state[i]

    after(patch, Shard, "_finish", take)


@canary
def answers_in_env_order(patch: Patch) -> None:
    chosen = VectorEnv._chosen_ids
    patch.setattr(VectorEnv, "_chosen_ids", lambda envs, call, indices: np.sort(chosen(envs, call, indices)))


@canary
def everyone_alive_acts(patch: Patch) -> None:
    def act(_: Any, shard: Shard, ids: Any) -> None:
        shard._buffers.acting[...] = shard._buffers.alive

    after(patch, Shard, "step", act)
