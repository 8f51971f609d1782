"""The state of a `PolicyRunner`: its rows, what it knows of them, its connectors and its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from marlvec.collect.acting.policy_runner import PolicyAnswer, PolicyRunner, ReadyRows
from marlvec.collect.storage.columns import ColumnForms
from marlvec.collect.storage.dense_buffer import DenseBuffer
from marlvec.collect.storage.plain_columns import (
    columns_from,
    leaf_from,
    plain_columns,
    plain_leaf,
    plain_rows,
    rows_from,
)
from marlvec.collect.storage.slot_buffer import SlotBuffer
from marlvec.connectors.pipeline import with_inner
from marlvec.errors import ArgumentError, StateError
from marlvec.serialization.state_fields import State, array_field, check_fields, flag_field, number_field

__all__ = ["get_runner_state", "prepare_runner", "put_modes"]

_FIELDS = ("version", "policy", "connectors", "training", "frozen", "seed_number", "bound", "rows")
_ROWS = ("forms", "stored", "ready", "unsent", "noops", "off_policy")


def get_runner_state(runner: PolicyRunner) -> State:
    """All that distinguishes a runner from one that was just made, and its policy and connectors likewise.

    Raises:
        SerialisationError: A column of its rows holds Python objects.
    """
    is_bound = runner.group_index >= 0
    policy = runner.policy
    return {
        "version": int(policy.version),
        "policy": policy.state_dict(),
        "connectors": [chain.state_dict() if is_bound else {} for chain in runner.chains],
        "training": [[piece.training for piece in with_inner(chain)] for chain in runner.chains],
        "frozen": runner.is_frozen,
        "seed_number": runner.seed_number,
        "bound": runner.group_index,
        "rows": _get_rows(runner) if is_bound else None,
    }


def _get_rows(runner: PolicyRunner) -> State:
    stored, who = runner.trajectories, f"policy {runner.policy_id!r}"
    if isinstance(stored, DenseBuffer):  # which is another way to store the same
        slots = runner.new_slots()
        slots.adopt(stored)
        stored = slots
    return {
        "forms": runner.forms.get_state(),
        "stored": stored.get_state(runner.ready.lanes) if isinstance(stored, SlotBuffer) else None,
        "ready": {"lanes": runner.ready.lanes.copy(), "rows": plain_rows(runner.ready.rows, who)},
        "unsent": None if runner.unsent is None else _get_answer(runner.unsent, who),
        "noops": runner.noops.get_state(),
        "off_policy": runner.off_policy.get_state(),
    }


def _get_answer(answer: PolicyAnswer, who: str) -> State:
    """An answer that its action connectors have seen, and that the envs have not got."""
    parts = [[plain_leaf(leaf, who) for leaf in leaves] for leaves in answer.parts]
    return {
        "lanes": answer.ready.lanes.copy(),
        "given": plain_rows(answer.given, who),
        "said": plain_columns({"actions": answer.actions, **answer.columns}, who),
        "version": answer.version,
        "rows": None if answer.rows is None else plain_rows(answer.rows, who),
        "for_env": [plain_leaf(leaf, who) for leaf in answer.for_env],
        "parts": parts,
    }


def prepare_runner(runner: PolicyRunner, state: State) -> Callable[[], None]:
    """Look at what `get_runner_state` gave; returns what puts it in place, but for the policy and the connectors.

    Raises:
        ArgumentError: It is none.
        StateError: It had not played yet, and this one has, among agents of other spaces.
    """
    where = f"policy {runner.policy_id!r}"
    check_fields(state, _FIELDS, where)
    version, seed_number = number_field(state, "version", where), number_field(state, "seed_number", where)
    bound, frozen = number_field(state, "bound", where, least=-1), flag_field(state, "frozen", where)
    modes = [[piece.training for piece in with_inner(chain)] for chain in runner.chains]
    if [len(part) for part in state["training"]] != [len(part) for part in modes]:
        raise ArgumentError(f"{where}: training: expected a flag for each connector, {modes}, got {state['training']}")
    if runner.group_index not in (-1, bound):
        raise StateError(f"{where} has played agents of other spaces than it had when this was saved: make a new one")
    put_rows = runner.clear if bound < 0 else _prepare_rows(runner, state["rows"], where)

    def put() -> None:
        runner.is_frozen, runner.seed_number = frozen, seed_number
        put_rows()
        put_modes(runner, state["training"])
        if runner.policy.version != version:
            runner.policy.version = version

    return put


def put_modes(runner: PolicyRunner, training: list[list[bool]]) -> None:
    """Say for each connector whether it learns."""
    for chain, flags in zip(runner.chains, training, strict=True):
        for piece, flag in zip(with_inner(chain), flags, strict=True):
            piece.training = flag


def _prepare_rows(runner: PolicyRunner, state: Any, where: str) -> Callable[[], None]:
    check_fields(state, _ROWS, where)
    forms = ColumnForms(where)
    forms.prepare(state["forms"])()
    stored, ready = state["stored"], check_fields(state["ready"], ("lanes", "rows"), where)
    slots = None if stored is None else SlotBuffer.from_state(stored, forms, *runner.slot_settings)
    rows = rows_from(ready["rows"], where)
    if len(rows) and forms.rows and (rows.keys() ^ forms.rows.keys()) - {"action_mask"}:
        raise ArgumentError(f"{where}: ready rows have the columns {list(rows.keys())}, stored ones {list(forms.rows)}")
    lanes = array_field(ready, "lanes", np.int64, (len(rows),), where)
    answer = None if state["unsent"] is None else _answer_from(runner, state["unsent"], where)
    puts = runner.noops.prepare(state["noops"]), runner.off_policy.prepare(state["off_policy"])

    def put() -> None:
        for part in puts:
            part()
        runner.take_rows(forms, slots, ReadyRows(lanes, lanes, rows), answer)

    return put


def _answer_from(runner: PolicyRunner, state: Any, where: str) -> PolicyAnswer:
    check_fields(state, ("lanes", "given", "said", "version", "rows", "for_env", "parts"), where)
    given = rows_from(state["given"], where)
    lanes = array_field(state, "lanes", np.int64, (len(given),), where)
    said = columns_from(state["said"], len(given), where)
    return PolicyAnswer(
        runner,
        ReadyRows(lanes, lanes, given),
        given,
        said.pop("actions"),
        said,
        number_field(state, "version", where),
        None if state["rows"] is None else rows_from(state["rows"], where),
        [leaf_from(leaf) for leaf in state["for_env"]],
        [[leaf_from(leaf) for leaf in leaves] for leaves in state["parts"]],
    )
