"""Defects of connectors and their pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.connectors import Connector, NormalizeObs, Rows
from marlvec.connectors import agent_tables as agent_table
from marlvec.connectors.action.valid_actions import EXECUTED_MISSING, ExecutedActions
from marlvec.connectors.agent.memory import FrameStack
from marlvec.connectors.agent.normalization import RunningMoments
from marlvec.connectors.agent_tables import AgentTable
from marlvec.connectors.learner import returns
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.pipeline import Pipeline
from marlvec.serialization.saved import check_fields
from tests.defects.registry import Patch, after, found_by

CONNECTORS = "tests/connectors"
MEMORY, CONTRACT = f"{CONNECTORS}/test_memory.py", f"{CONNECTORS}/test_contract.py"
NORMALIZATION, RETURNS = f"{CONNECTORS}/test_normalization.py", f"{CONNECTORS}/test_returns.py"
PIPELINE, SEQUENCES = f"{CONNECTORS}/test_pipeline.py", f"{CONNECTORS}/test_sequences.py"


@found_by(MEMORY, CONTRACT)
def connector_frames_of_the_episode_before(patch: Patch) -> None:
    """Frames of an episode that has ended are stacked with those of the next one."""
    push = FrameStack.__call__

    def keep(stack: FrameStack, rows: Rows) -> Rows:
        return push(stack, rows.replace(first=np.zeros(len(rows), np.bool_)) if "first" in rows else rows)

    patch.setattr(FrameStack, "__call__", keep)
    patch.setattr(FrameStack, "reset", lambda stack, env_ids=None: None)


@found_by(MEMORY)
def connector_memory_of_all_envs_reset(patch: Patch) -> None:
    """Where the episode of one env begins, what connectors remember of all envs is forgotten."""
    reset = AgentTable.reset
    patch.setattr(AgentTable, "reset", lambda table, env_ids=None: reset(table))


@found_by(MEMORY)
def connector_memory_shared_by_state(patch: Patch) -> None:
    """A saved state is the connector's own array, and changes with it."""
    patch.setattr(AgentTable, "state_dict", lambda table: {"values": table.values})


@found_by(CONTRACT)
def connector_parameters_of_any_value(patch: Patch) -> None:
    """Parameters are taken as they are, whatever their types say is legal."""
    patch.setattr(Connector, "__post_init__", lambda _: None)


@found_by(MEMORY, CONTRACT)
def connector_state_half_loaded(patch: Patch) -> None:
    """Of a state whose last table does not fit, the tables before it stay loaded."""

    def one_by_one(state: Any, tables: Mapping[str, Any], owner: str) -> None:
        check_fields(state, tables, owner)
        for name, table in tables.items():
            parts = [(table, state[name])] if isinstance(table, AgentTable) else zip(table, state[name], strict=True)
            for own, part in parts:
                own.values = own.checked(part, f"{owner}: {name}")

    patch.setattr(agent_table, "load_tables", one_by_one)


@found_by(NORMALIZATION)
def connector_hands_over_and_keeps(patch: Patch) -> None:
    """What a normalizer has handed over stays its own, and counts twice once it comes back merged."""
    patch.setattr(RunningMoments, "handed_over", lambda moments: moments)


@found_by(NORMALIZATION)
def connector_learns_while_evaluating(patch: Patch) -> None:
    """Statistics go on being learnt after eval()."""
    learn = NormalizeObs.__call__

    def always(connector: NormalizeObs, rows: Rows) -> Rows:
        training, connector.training = connector.training, True
        try:
            return learn(connector, rows)
        finally:
            connector.training = training

    patch.setattr(NormalizeObs, "__call__", always)


@found_by(RETURNS, SEQUENCES)
def connector_truncated_has_no_value(patch: Patch) -> None:
    """An episode that was cut off counts as one that was over: nothing is expected after it."""
    patch.setattr(returns, "end_values", lambda rows, fragments, function: np.zeros(len(fragments)))


@found_by(RETURNS, SEQUENCES)
def connector_advantages_cross_fragments(patch: Patch) -> None:
    """Advantages run on from one fragment into the one before it."""
    scan = returns.Fragments.scan

    def across(fragments: Any, deltas: Any, factor: float) -> Any:
        found, total = scan(fragments, deltas, factor), 0.0
        for k in reversed(range(len(deltas))):
            found[k] = total = deltas[k] + factor * total
        return found

    patch.setattr(returns.Fragments, "scan", across)


@found_by(PIPELINE)
def pipeline_inserted_one_too_late(patch: Patch) -> None:
    """A connector that is inserted comes after the one that it should come before."""
    insert = Pipeline._insert
    patch.setattr(Pipeline, "_insert", lambda chain, where, piece: insert(chain, min(where + 1, len(chain)), piece))


@found_by(PIPELINE)
def pipeline_edit_kept_although_refused(patch: Patch) -> None:
    """A connector that does not fit stays in the pipeline that refused it."""
    put = Pipeline._put

    def forward_only(chain: Any, stages: Any) -> None:
        if len(stages) >= len(chain._stages):
            put(chain, stages)

    patch.setattr(Pipeline, "_put", forward_only)


@found_by(PIPELINE, CONTRACT, f"{CONNECTORS}/test_restoring.py")
def pipeline_state_of_the_first_alone(patch: Patch) -> None:
    """Of a pipeline's state the first connector's part alone is loaded."""
    load = Pipeline.load_state_dict

    def first(chain: Any, state: Mapping[str, Any]) -> None:
        now = chain.state_dict()
        load(chain, {name: state[name] if k == 0 and name in state else now[name] for k, name in enumerate(now)})

    patch.setattr(Pipeline, "load_state_dict", first)


@found_by(PIPELINE, MEMORY)
def pipeline_answers_not_passed_on(patch: Patch) -> None:
    """Connectors that look at the policy's answers are not shown them once the pipeline was edited."""

    def forget(_: Any, chain: Any, stages: Any) -> None:
        chain._program = chain._compile()._replace(watchful=())

    after(patch, Pipeline, "_edit", forget)


@found_by(RETURNS)
def connector_nan_crosses_fragments(patch: Patch) -> None:
    """A NaN goes into the fragments before it, by a weight of 0."""

    def scan(fragments: Fragments, x_n: Any, decay_n: Any) -> Any:
        y = np.where(fragments.left_n >= 0, x_n, 0.0)
        weight = np.where(fragments.left_n > 0, decay_n, 0.0)
        reach = 1
        while reach < len(y) and (fragments.left_n >= reach).any():
            y[:-reach] += weight[:-reach] * y[reach:]
            weight[:-reach] *= weight[reach:]
            weight[-reach:] = 0
            reach *= 2
        return y

    patch.setattr(Fragments, "scan", scan)


EXECUTED_TESTS = "tests/connectors/test_valid_actions.py"


@found_by(EXECUTED_TESTS)
def connector_held_actions_in_no_column(patch: Patch) -> None:
    """A connector that sends another action than the policy's adds no ``actions_executed``."""
    send = ExecutedActions.send
    patch.setattr(ExecutedActions, "send", lambda own, rows, actions, *, chooses=False: send(own, rows, actions))


@found_by(EXECUTED_TESTS)
def connector_changes_without_a_mark(patch: Patch) -> None:
    """Changes that cannot be converted back look like the policy's own actions."""
    columns = ExecutedActions.columns

    def unmarked(own: ExecutedActions, rows: Rows, actions: Any) -> dict[str, Any]:
        found = columns(own, rows, actions)
        return found | {name: np.zeros(len(rows), np.bool_) for name in found if name == EXECUTED_MISSING}

    patch.setattr(ExecutedActions, "columns", unmarked)
