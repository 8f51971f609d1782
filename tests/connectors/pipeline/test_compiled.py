"""What a pipeline works out ahead of its calls: which pieces run, and that every edit is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c


class Doubles(c.ActionConnector):
    """Also counts what it is told."""

    def __init__(self) -> None:
        self.told = self.forgot = 0

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(actions_for_env=rows.actions_for_env * 2)

    def on_policy_output(self, rows: c.Rows) -> None:
        self.told += 1

    def reset(self, env_ids: Any = None) -> None:
        self.forgot += 1


class ClipsAndMore(c.ClipActions):
    """What `ClipActions` says of itself is not true of this one's call."""

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(more=np.ones(len(rows)))


def calls(pipeline: c.ActionPipeline) -> dict[str, int]:
    return {name: timing.calls for name, timing in pipeline.timings.items()}


def test_pieces_that_change_nothing_are_not_called() -> None:
    rows = c.Rows(actions=np.array([0, 2]))
    pipeline = c.ActionPipeline.default()
    pipeline.bind(spaces.Discrete(3))
    pipeline(rows)
    assert calls(pipeline) == {"ToNumpy": 1, "UnsquashActions": 0, "ClipActions": 0, "ReadOnlyActions": 1}
    pipeline.bind(spaces.Box(-1, 0.5, (), np.float32))  # now they do
    out = pipeline(c.Rows(actions=np.array([0.0, 2.0], np.float32)))
    assert calls(pipeline) == {"ToNumpy": 2, "UnsquashActions": 1, "ClipActions": 1, "ReadOnlyActions": 2}
    assert out.actions_for_env.tolist() == [-0.25, 0.5]
    assert not c.ClipActions().is_identity  # nobody knows yet


def test_class_flags_do_not_apply_to_a_subclass_with_its_own_call() -> None:
    pipeline = c.ActionPipeline([ClipsAndMore()])
    pipeline.bind(spaces.Discrete(3))
    assert "more" in pipeline(c.Rows(actions=np.array([0, 2])))


def test_a_piece_of_the_users_may_say_so_too() -> None:
    class Nothing(c.AgentConnector):
        is_identity = True

        def __call__(self, rows: c.Rows) -> c.Rows:
            raise AssertionError("called")

    pipeline = c.AgentPipeline([Nothing()])
    pipeline.bind(spaces.Discrete(3))
    rows = c.Rows(obs=np.zeros(2, np.int64))
    assert pipeline(rows) is rows


@given(edits=st.lists(st.tuples(st.sampled_from(["add", "remove", "nest"]), st.integers(0, 9)), max_size=12))
def test_every_edit_of_every_pipeline_inside_is_seen(edits: list[tuple[str, int]]) -> None:
    """Pieces come, go and are nested at any depth; a call runs those that are there, once each."""
    outer = c.ActionPipeline([])
    outer.bind(spaces.Box(-np.inf, np.inf, ()))
    chains = [outer]
    for edit, k in edits:
        chain = chains[k % len(chains)]
        if edit == "add":
            chain.append(Doubles())
        elif edit == "nest":
            chains.append(c.ActionPipeline([c.UnsquashActions()]))
            chain.append(chains[-1])
        elif plain := [piece for piece in chain if isinstance(piece, Doubles)]:
            chain.remove(plain[k % len(plain)])
        there = [piece for each in chains for piece in each if isinstance(piece, Doubles)]
        before = [(piece.told, piece.forgot) for piece in there]
        out = outer(c.Rows(actions=np.ones(2)))
        outer.on_policy_output(out)
        outer.reset([0])
        assert out.actions_for_env.tolist() == [2.0 ** len(there)] * 2
        assert [(piece.told, piece.forgot) for piece in there] == [(a + 1, b + 1) for a, b in before]
