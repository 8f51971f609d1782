"""Checks that results do not depend on how rows, or fragments of finished batches, are grouped into calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks.calls import form_of
from marlvec.testing.connector_checks.report import keys_of
from marlvec.testing.connector_checks.story import Moment
from marlvec.testing.connector_checks.trial import BatchTrial, EpisodeTrial
from marlvec.trees import map_tree

__all__ = [
    "check_batched",
    "check_learning",
    "check_order",
    "check_subsets",
    "check_empty_batch",
    "check_fragments",
    "check_fragment_order",
]

Parts = Callable[[Moment], list[Any]]

_ACROSS = "one that looks at other agents of its env sets across_agents; one that learns says what in merge_states()"
_ORDER = "where a row stands means nothing: go by env_id and agent_index"


def check_batched(trial: EpisodeTrial) -> None:
    """All rows in one call give what each row (each env, with across_agents) gives in a call of its own."""
    for training in trial.modes:
        _in_parts(trial, training, lambda moment: trial.alone(moment.rows), "in a call of its own", _ACROSS)


def check_order(trial: EpisodeTrial) -> None:
    """The order of rows makes no difference."""
    rng = np.random.default_rng(0)
    for training in trial.modes:
        for parts in (lambda m: [np.arange(len(m.rows))[::-1]], lambda m: [rng.permutation(len(m.rows))]):
            _in_parts(trial, training, parts, "in another order", _ORDER)


def check_subsets(trial: EpisodeTrial) -> None:
    """Other rows in the call, and other envs and agents, make no difference; resets are checked elsewhere."""
    rng = np.random.default_rng(0)
    moments = [Moment(moment.rows, moment.answer) for moment in trial.moments()]
    for training in trial.modes:
        _in_parts(trial, training, lambda m: _halves(trial, m, rng), "in a call without the others", _ACROSS)
        player = trial.player(training=training)
        whole = [player.see(moment) for moment in moments]
        ways = {
            f"where there is only env {env}": [moment.of_envs((env,)) for moment in moments]
            for env in range(trial.num_envs)
        }
        if not trial.across:
            ways |= {
                f"where there is only agent {agent}": [m.take(m.rows.agent_index == agent) for m in moments]
                for agent in range(len(trial.agents))
            }
        for condition, some in ways.items():
            player = trial.player(training=training)
            for k, moment in enumerate(some):
                mine = set(keys_of(moment.rows))
                chosen = np.array([key in mine for key in keys_of(whole[k])], np.bool_)
                _compare(trial, whole[k].take(chosen), [player.see(moment)], k, condition, _ACROSS)


def check_learning(trial: EpisodeTrial) -> None:
    """What is learnt does not depend on how rows are grouped into calls."""
    trial.learn()
    if not trial.learns:
        return
    rng = np.random.default_rng(0)
    ways: dict[str, Parts] = {
        "from rows in calls of their own": lambda m: trial.alone(m.rows),
        "from rows in another order": lambda m: [rng.permutation(len(m.rows))],
        "from rows in two calls": lambda m: _halves(trial, m, rng),
    }
    whole = trial.player(training=True).watch(trial.moments())
    expected = trial.first_learnt(whole.piece, trial.merged(whole.piece))
    for way, parts in ways.items():
        player = trial.player(training=True)
        for moment in trial.moments():
            player.see_parts(moment, parts(moment))
        got = trial.first_learnt(player.piece, trial.merged(player.piece))
        trial.report.same_learnt(expected, got, f"what is learnt {way}", "each row counts once")


def _in_parts(trial: EpisodeTrial, training: bool, parts: Parts, condition: str, hint: str) -> None:
    whole, single = (trial.player(training=training) for _ in range(2))
    for k, moment in enumerate(trial.moments()):
        expected = whole.see(moment)
        outs = single.see_parts(moment, parts(moment))
        _compare(trial, expected, outs, k, condition, hint)


def _compare(trial: EpisodeTrial, whole: Rows, outs: list[Rows], k: int, condition: str, hint: str) -> None:
    """Raise if rows of one call differ from the same rows in smaller calls."""
    there = set(keys_of(whole))
    apart = {key for out in outs for key in keys_of(out)}
    if differ := sorted(there ^ apart):
        got, expected = ("a row", "none") if differ[0] in there else ("none", "a row")
        trial.report.broken(f"moment {k}, (env, agent) {differ[0]}", f"{expected} as {condition}", got, hint)
    for out in outs:
        wanted = set(keys_of(out))
        mine = whole.take(np.array([key in wanted for key in keys_of(whole)], np.bool_))
        trial.report.compare(out, mine, k, f"as {condition}", hint, near=True)


def _halves(trial: EpisodeTrial, moment: Moment, rng: np.random.Generator) -> list[Any]:
    side = rng.random((trial.num_envs, len(trial.agents))) < 0.5
    if trial.across:
        side[:] = side[:, :1]
    chosen = side[moment.rows.env_id, moment.rows.agent_index]
    return [np.flatnonzero(chosen), np.flatnonzero(~chosen)]


_FRAGMENTS = "one whose rows depend on other fragments sets across_agents"


def check_empty_batch(trial: BatchTrial) -> None:
    """A call without rows returns none, in the same columns."""
    player, rows = trial.player(), trial.moments()[0].rows
    out, none = player.call(rows), player.call(rows.take(slice(0, 0)))
    if len(none):
        trial.report.broken("the rows that come out of none", "none", str(len(none)))
    expected, got = ({name: map_tree(form_of, c) for name, c in rows.items()} for rows in (out, none))
    trial.report.same(expected, got, "the columns of no rows")


def check_fragments(trial: BatchTrial) -> None:
    """All fragments in one call give what each gives in a call of its own."""
    whole, single = trial.player(), trial.player()
    if whole.piece.across_agents:
        return
    condition = "each fragment as in a call of its own"
    for k, moment in enumerate(trial.moments()):
        expected = whole.see(moment)
        parts = single.see_parts(moment, [np.flatnonzero(moment.rows.unroll_id == u) for u in _unrolls(moment.rows)])
        try:
            apart = Rows.concat(parts)
        except ValueError as error:
            subject = f"batch {k}, fragments in calls of their own"
            trial.report.broken(subject, "columns of one form", str(error), _FRAGMENTS)
        trial.report.compare(apart, expected, k, condition, _FRAGMENTS, near=True)


def check_fragment_order(trial: BatchTrial) -> None:
    """The order of fragments makes no difference."""
    whole, turned = trial.player(), trial.player()
    for k, moment in enumerate(trial.moments()):
        unrolls = _unrolls(moment.rows)
        turn = [np.flatnonzero(moment.rows.unroll_id == unroll) for unroll in unrolls[::-1]]
        expected, got = whole.see(moment), turned.see(moment.take(np.concatenate(turn)))
        if "unroll_id" not in expected or expected["unroll_id"].shape[:1] != (len(expected),):
            return  # rows cannot be identified
        number = [out["unroll_id"].reshape(len(out), -1)[:, 0] for out in (expected, got)]
        back = [np.concatenate([np.flatnonzero(ids == unroll) for unroll in unrolls]) for ids in number]
        hint = "the order of fragments means nothing"
        condition = "with its fragments in another order"
        trial.report.compare(expected.take(back[0]), got.take(back[1]), k, condition, hint, near=True)


def _unrolls(rows: Rows) -> list[int]:
    return list(dict.fromkeys(rows.unroll_id.tolist()))
