"""The state of a `PolicyRunner`: its rows, what it knows of them, its connectors and its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_runner import PolicyAnswer, PolicyRunner
from marlvec.collect.columns.forms import ColumnForms
from marlvec.collect.columns.plain import columns_from, plain_columns, plain_rows, rows_from
from marlvec.collect.columns.specs import ColumnSpecs
from marlvec.collect.storage.moment import Moment
from marlvec.connectors import Rows
from marlvec.connectors.pipeline import with_inner
from marlvec.errors import ArgumentError, StateError
from marlvec.serialization.plain_objects import array_from, plain_array
from marlvec.serialization.state_fields import State, array_field, check_fields, flag_field, number_field

__all__ = ["column_specs", "get_runner_state", "prepare_runner", "put_modes"]

_FIELDS = ("version", "policy", "connectors", "training", "frozen", "seed_number", "bound", "rows")
_ROWS = ("forms", "stored", "ready", "unsent", "noops", "off_policy")


def get_runner_state(runner: PolicyRunner) -> State:
    """Return the state of a runner, its policy and its connectors."""
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
    who = f"policy {runner.policy_id!r}"
    return {
        "forms": runner.log.forms.get_state(),
        "stored": runner.log.get_state() if runner.keeps_rows else None,
        "ready": {"lanes": runner.ready.lanes.copy(), "rows": plain_rows(runner.ready.rows, who)},
        "unsent": None if runner.unsent is None else _get_answer(runner.unsent, who),
        "noops": runner.noops.get_state(),
        "off_policy": runner.off_policy.get_state(),
    }


def _get_answer(answer: PolicyAnswer, who: str) -> State:
    """An answer that its action connectors have seen, and that the envs have not got."""
    parts = [[plain_array(leaf, who) for leaf in leaves] for leaves in answer.parts]
    return {
        "lanes": answer.ready.lanes.copy(),
        "given": plain_rows(answer.given, who),
        "said": plain_columns({"actions": answer.actions, **answer.columns}, who),
        "version": answer.version,
        "rows": None if answer.rows is None else plain_rows(answer.rows, who),
        "for_env": [plain_array(leaf, who) for leaf in answer.for_env],
        "parts": parts,
    }


def prepare_runner(runner: PolicyRunner, state: State) -> Callable[[], None]:
    """Validate a state from `get_runner_state()`; return a function that installs it, without policy and connectors.

    A runner that had not played then, and has now, must play agents of the same spaces (`StateError`).
    """
    where = f"policy {runner.policy_id!r}"
    check_fields(state, _FIELDS, where)
    version, seed_number = number_field(state, "version", where), number_field(state, "seed_number", where)
    bound, frozen = number_field(state, "bound", where, least=-1), flag_field(state, "frozen", where)
    modes = [[piece.training for piece in with_inner(chain)] for chain in runner.chains]
    if [len(part) for part in state["training"]] != [len(part) for part in modes]:
        raise ArgumentError(f"{where}: training: expected a flag for each connector, {modes}, got {state['training']}")
    if runner.group_index not in (-1, bound):
        raise StateError(f"{where} has played agents of other spaces than the saved policy did: make a new collector")
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


def column_specs(runner: PolicyRunner, *, of_batch: bool = False) -> ColumnSpecs:
    """Return what saved rows of a bound runner are checked against, or rows of a batch, behind learner connectors."""
    spaces = {
        "obs": runner.agent_connectors.output_space_,
        "actions": runner.action_connectors.policy_space_,
        "actions_executed": runner.action_connectors.policy_space_,
        "actions_for_env": runner.env_tree.space,
    }
    exact = {"actions_for_env", *(["obs"] if runner.agent_connectors.is_identity else [])}
    return ColumnSpecs(spaces, exact, any_shape=of_batch and len(runner.learner_connectors) > 0)


def _prepare_rows(runner: PolicyRunner, state: Any, where: str) -> Callable[[], None]:
    check_fields(state, _ROWS, where)
    specs = column_specs(runner)
    forms = ColumnForms.from_state(state["forms"], specs, where)
    stored, ready = state["stored"], check_fields(state["ready"], ("lanes", "rows"), where)
    put_log = None if stored is None else runner.log.prepare(stored, forms)
    rows = _rows_from(ready["rows"], forms, specs, f"{where}: ready rows")
    if len(rows) and forms.rows and (rows.keys() ^ forms.rows.keys()) - {"action_mask"}:
        raise ArgumentError(
            f"{where}: expected ready rows with the columns {list(forms.rows)}, got {list(rows.keys())}"
        )
    lanes = array_field(ready, "lanes", np.int64, (len(rows),), where)
    answer = None if state["unsent"] is None else _answer_from(runner, state["unsent"], forms, f"{where}: unsent")
    puts = runner.noops.prepare(state["noops"]), runner.off_policy.prepare(state["off_policy"])
    if runner.action_connectors.only_converts:  # else the columns that are stored may be others
        forms.fit_saved(columns_from(state["off_policy"]["blanks"], 1, where), f"{where}: blanks", known=forms.answers)

    def put() -> None:
        runner.clear()
        runner.keeps_rows = put_log is not None
        if put_log is None:
            runner.log.forms = forms
        else:
            put_log()
        for part in puts:
            part()
        runner.take_ready(_waiting(lanes, rows), answer)

    return put


def _rows_from(state: Any, forms: ColumnForms, specs: ColumnSpecs, where: str) -> Rows:
    """The rows of a state, once the dtype and shape of each column were found to be right."""
    rows = rows_from(state, where)
    columns = dict(rows.items())
    specs.check(columns, where)
    forms.fit_saved(columns, where, known=forms.rows)
    return rows


def _waiting(lanes: NDArray[np.int64], rows: Rows) -> Moment:
    return Moment(lanes, 0, np.zeros_like(lanes), False, None, dict(rows.items()))


def _answer_from(runner: PolicyRunner, state: Any, forms: ColumnForms, where: str) -> PolicyAnswer:
    check_fields(state, ("lanes", "given", "said", "version", "rows", "for_env", "parts"), where)
    specs = column_specs(runner)
    given = _rows_from(state["given"], forms, specs, f"{where}: given")
    lanes = array_field(state, "lanes", np.int64, (len(given),), where)
    said = columns_from(state["said"], len(given), f"{where}: said")
    specs.check(said, f"{where}: said")
    rows = None if state["rows"] is None else _rows_from(state["rows"], forms, specs, f"{where}: rows")
    for_env = [array_from(leaf) for leaf in state["for_env"]]
    specs.check({"actions_for_env": runner.env_tree.unflatten(for_env)}, f"{where}: for_env")
    parts = [[array_from(leaf) for leaf in leaves] for leaves in state["parts"]]
    if parts and len(parts) != len(forms.answers):
        raise ArgumentError(f"{where}: parts: expected {len(forms.answers)} columns, got {len(parts)}")
    if parts:
        columns = {name: form.tree(leaves) for (name, form), leaves in zip(forms.answers.items(), parts, strict=True)}
        forms.fit_saved(columns, f"{where}: parts")
    return PolicyAnswer(
        runner,
        _waiting(lanes, given),
        given,
        said.pop("actions"),
        said,
        number_field(state, "version", where),
        rows,
        for_env,
        parts,
    )
