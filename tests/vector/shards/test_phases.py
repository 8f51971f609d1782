"""The phases of a shard's envs: the table under random events, and a shard that is driven at random against a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from marlvec.envs import MultiAgentEnv, Slot
from marlvec.vector.buffers import Buffers
from marlvec.vector.settings import Settings
from marlvec.vector.shard import TRANSITIONS, BatchedPhases, EnvEvent, EnvPhase, EnvPhases, Shard

MODES = ["same_step", "next_step", "disabled"]
N = 3


@given(st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from(EnvEvent)), max_size=60))
def test_phases_follow_the_table_and_nothing_else(events: list[tuple[int, EnvEvent]]) -> None:
    phases, model = EnvPhases(N), [EnvPhase.UNREADY] * N
    for i, event in events:
        if (after := TRANSITIONS[event].get(model[i])) is None:
            with pytest.raises(KeyError):
                phases.on(i, event)
        else:
            phases.on(i, event)
            model[i] = after
        assert [phases[k] for k in range(N)] == model
        assert phases.special == {k for k in range(N) if model[k] is not EnvPhase.RUNNING}


@pytest.mark.slow("plays whole episodes in worker processes")
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.tuples(st.lists(st.integers(0, n - 1), unique=True).map(sorted), st.sampled_from(EnvEvent)),
            max_size=40,
        ).map(lambda events: (n, events))
    )
)
def test_phases_of_a_batch_follow_the_table_all_or_none(
    given_: tuple[int, list[tuple[list[int], EnvEvent]]],
) -> None:
    n, events = given_
    phases, model = BatchedPhases(n), [EnvPhase.UNREADY] * n
    for ids, event in events:
        rows = slice(None) if len(ids) == n else np.array(ids, np.int64)
        table = TRANSITIONS[event]
        if wrong := {model[i].name for i in ids if model[i] not in table}:
            with pytest.raises(KeyError, match=f"{event.name} of envs that are {', '.join(sorted(wrong))}"):
                phases.on(rows, event)
        else:
            phases.on(rows, event)
            for i in ids:
                model[i] = table[model[i]]
        assert phases.values.tolist() == model
        for phase in EnvPhase:
            assert phases.are_all(rows, phase) == all(model[i] is phase for i in ids)
            assert phases.where(rows, phase).tolist() == [model[i] is phase for i in ids]


def test_every_phase_is_reached_and_left() -> None:
    reached = {after for row in TRANSITIONS.values() for after in row.values()}
    left = {before for row in TRANSITIONS.values() for before, after in row.items() if before is not after}
    assert reached | {EnvPhase.UNREADY} == left == set(EnvPhase)
    assert set(TRANSITIONS) == set(EnvEvent)


class Puppet(MultiAgentEnv):
    """Does in its next call what it is told to: ``"go on"``, ``"end"``, ``"raise"`` or ``"follow"`` (by itself)."""

    name = "puppet"
    agents = ("a",)
    observation_spaces = (Box(-1, 1, (1,)),)
    action_spaces = (Discrete(2),)
    state_space = None

    def __init__(self, orders: dict[str, str], *, resets_itself: bool) -> None:
        if orders["build"] == "raise":
            raise RuntimeError("not built")
        self.orders, self.resets_itself = orders, resets_itself

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if self.orders["reset"] == "raise":
            raise RuntimeError("not reset")
        if self.orders["reset"] == "end":
            return  # nobody is alive
        slot.write_obs(0, np.ones(1, np.float32))
        slot.alive[0] = slot.acting[0] = True

    def step(self, slot: Slot) -> None:
        order = self.orders["step"]
        if order == "raise":
            raise RuntimeError("not stepped")
        if order == "end":
            slot.terminated[0] = True
            slot.done = True
            slot.alive[0] = slot.acting[0] = False
        if order == "end" and self.resets_itself:
            slot.write_final(0, np.zeros(1, np.float32))
            slot.begun = True
            slot.alive[0] = slot.acting[0] = True


OPERATIONS = st.sampled_from(["reset", "step", "step", "step", "restart", "wait", "rebuild"])
ORDERS = st.fixed_dictionaries(
    {
        "build": st.sampled_from(["go on", "go on", "raise"]),
        "reset": st.sampled_from(["go on", "go on", "raise", "end"]),
        "step": st.sampled_from(["go on", "go on", "end", "raise"]),
    }
)


def expected(phase: EnvPhase, operation: str, orders: dict[str, str], mode: str, *, resets_itself: bool) -> EnvPhase:
    """The table of transitions as prose has it, for one operation from beginning to end."""
    begun = EnvPhase.BEGUN if orders["reset"] == "go on" else EnvPhase.UNREADY
    if operation == "rebuild":  # with the next episode
        return begun if orders["build"] == "go on" else EnvPhase.ABSENT
    if operation in ("reset", "restart"):
        return EnvPhase.ABSENT if phase is EnvPhase.ABSENT and orders["build"] != "go on" else begun
    if operation == "wait":  # without one
        return EnvPhase.OVER if orders["build"] == "go on" else EnvPhase.ABSENT
    if phase is EnvPhase.ABSENT:
        return phase
    if phase is EnvPhase.OVER and mode == "next_step":
        return begun
    if phase in (EnvPhase.OVER, EnvPhase.UNREADY) or orders["step"] == "raise":
        return EnvPhase.UNREADY
    if orders["step"] == "go on":
        return EnvPhase.RUNNING
    if resets_itself:
        return EnvPhase.BEGUN
    return begun if mode == "same_step" else EnvPhase.OVER


@pytest.mark.slow("plays whole episodes in worker processes")
@given(
    mode=st.sampled_from(MODES),
    resets_itself=st.booleans(),
    calls=st.lists(st.tuples(OPERATIONS, st.lists(ORDERS, min_size=N, max_size=N)), max_size=20),
)
def test_a_shard_goes_where_the_table_says(
    mode: str, resets_itself: bool, calls: list[tuple[str, list[dict[str, str]]]]
) -> None:
    resets_itself = resets_itself and mode == "same_step"
    orders = [{"build": "go on", "reset": "go on", "step": "go on"} for _ in range(N)]
    factories = [lambda own=own: Puppet(own, resets_itself=resets_itself) for own in orders]
    shard = Shard(factories, 0, Settings(autoreset_mode=mode))
    buffers = Buffers(shard.spec, N)
    shard.attach(buffers)
    nothing, ids = [None] * N, range(N)
    model = [EnvPhase.UNREADY] * N
    for operation, given_orders in calls:
        for own, new in zip(orders, given_orders, strict=True):
            own.update(new)
        had_finals = buffers.final_obs[0][0].any(axis=(1, 2))
        before = list(model)
        model = [
            expected(phase, operation, own, mode, resets_itself=resets_itself)
            for phase, own in zip(model, orders, strict=True)
        ]
        if operation == "step":
            report = shard.step(ids)
        elif operation == "reset":
            report = shard.reset(ids, nothing, nothing)
        else:
            anew, begin = operation in ("rebuild", "wait"), operation != "wait"
            # As `Recovery` has it: what is to be built anew is; what is there is only begun anew.
            build = [anew or phase is EnvPhase.ABSENT for phase in before]
            report = shard.restart(ids, nothing, nothing, build, [begin] * N, [False] * N)
        assert [shard._phases[i] for i in ids] == model
        failed = {failure.env_id for failure in report.failures}
        assert failed == {i for i in ids if model[i] in (EnvPhase.UNREADY, EnvPhase.ABSENT)}
        for i in ids:
            there = model[i] in (EnvPhase.BEGUN, EnvPhase.RUNNING)
            assert not there or buffers.alive[i, 0]
            if operation == "step" and before[i] is EnvPhase.BEGUN and not buffers.done[i]:
                assert not buffers.final_obs[0][0][i].any(), "final observations go with the first step of the next"
            if operation == "step" and before[i] is EnvPhase.RUNNING and not buffers.done[i]:
                assert buffers.final_obs[0][0][i].any() == had_finals[i]
    assert shard.close() == []
