"""An answer's rows in pieces: the same rows once the head has joined them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.distributed.accounting import in_pieces, joined
from marlvec.distributed.server import Answer, Raised
from marlvec.trees import tree_leaves


def rows_of(number: int, start: int = 0) -> SampleBatch:
    """Rows whose largest leaf has 32 bytes each, inside a tree; with a column of Python objects."""
    ids = np.arange(start, start + number)
    wide = np.repeat(ids[:, None], 4, axis=1)
    objects = np.array([{"id": i} for i in ids.tolist()], dtype=object)
    return SampleBatch({"obs": {"wide": wide, "flag": ids % 2 == 0}, "t": ids, "infos": objects})


def answer_of(rows: dict[str, int]) -> Answer:
    found = {name: rows_of(number, 1000 * k) for k, (name, number) in enumerate(rows.items())}
    return Answer(7, 2, (MultiAgentBatch(found, env_steps=11, known=("a", "b", "gone"), agent_steps=29),))


def leaves(batch: MultiAgentBatch) -> list[tuple[Any, ...]]:
    return [
        (policy, name, path, leaf.dtype, leaf.tolist())
        for policy, rows in batch.items()
        for name, column in rows.items()
        for path, leaf in tree_leaves(column)
    ]


@pytest.mark.parametrize("rows", [{"a": 100}, {"a": 3, "b": 50}, {"b": 64, "a": 33}, {"a": 1}, {}], ids=str)
def test_pieces_are_small_views_and_join_to_the_same_batch(rows: dict[str, int]) -> None:
    limit, answer = 320, answer_of(rows)  # ten rows
    cut = in_pieces(answer, limit)
    assert isinstance(cut, Answer)
    assert (cut.id, cut.epoch) == (7, 2)
    assert len(cut.parts) == max([1, *(-(-number // 10) for number in rows.values())])
    for part in cut.parts:
        for policy, own in part.items():
            for name, column in own.items():
                for path, leaf in tree_leaves(column):
                    assert 0 < leaf.nbytes <= limit
                    assert np.shares_memory(leaf, dict(tree_leaves(answer.parts[0][policy][name]))[path])
    whole, again = joined(answer.parts, {}, ("a", "b")), joined(cut.parts, {}, ("a", "b"))
    assert (again.env_steps, again.agent_steps, again.known) == (11, 29, whole.known)
    assert list(again) == list(rows)
    assert leaves(again) == leaves(whole)


def test_several_answers_keep_their_order() -> None:
    answers = [answer_of({"a": 25, "b": 5}), answer_of({"b": 30})]
    whole = joined([part for answer in answers for part in answer.parts], {}, ())
    cut = [in_pieces(answer, 64) for answer in answers]
    again = joined([part for answer in cut if isinstance(answer, Answer) for part in answer.parts], {}, ())
    assert leaves(again) == leaves(whole)
    assert (again.env_steps, again.agent_steps) == (22, 58)


def test_a_row_larger_than_the_limit_is_a_piece_of_its_own() -> None:
    cut = in_pieces(answer_of({"a": 5}), 1)
    assert isinstance(cut, Answer)
    assert [len(part["a"]) for part in cut.parts] == [1] * 5


def test_what_has_no_rows_is_left_as_it_is() -> None:
    for reply in (Answer(1, 0, value=3), Raised("it failed", (), None)):
        assert in_pieces(reply, 10) == reply
