"""Check: results do not depend on how rows are grouped into calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from marlvec.connectors.rows import Rows
from marlvec.testing.connector_checks._support.report import keys_of
from marlvec.testing.connector_checks._support.story import Moment
from marlvec.testing.connector_checks._support.trial import EpisodeTrial

__all__ = ["check_batched", "check_learning", "check_order", "check_subsets"]

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
