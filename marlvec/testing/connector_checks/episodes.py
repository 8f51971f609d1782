"""Check: the end of an episode clears what is remembered of it, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from marlvec.testing.connector_checks._support.player import ConnectorDriver
from marlvec.testing.connector_checks._support.report import keys_of
from marlvec.testing.connector_checks._support.story import Moment
from marlvec.testing.connector_checks._support.trial import Trial

__all__ = ["check_first", "check_reset"]

_CUT = 6  # moments before it
_OTHER = 2_000  # seed of the story that goes on after it
_RESET = "reset() forgets all that is remembered of an env's running episodes, and of the envs it names only"
_FIRST = "a row that has `first` begins an episode: nothing is remembered of the one before"


def check_first(trial: Trial) -> None:
    """A row with ``first`` set begins an episode, also without a reset()."""
    envs = _some(trial)
    before, after = trial.moments()[:_CUT], trial.moments(seed=_OTHER)
    others = [moment.of_envs(_others(trial)) for moment in trial.moments()[_CUT:]]
    turned = [new.of_envs(envs).beside(old) for new, old in zip(after, others, strict=False)]
    _compare(trial, before, turned, envs, lambda player: None, "as at an episode's beginning", _FIRST)


def check_reset(trial: Trial) -> None:
    """reset(env_ids) forgets exactly these envs; None all of them; what was learnt stays."""
    before, after = trial.moments()[:_CUT], trial.moments()[_CUT:]
    player = trial.player(training=True)
    for moment in before:
        player.see(moment)
    learnt = copy.deepcopy(trial.merged(player.piece))
    player.reset(None)
    trial.report.same(learnt, trial.merged(player.piece), "what was learnt, after reset()", "it is of no one episode")
    some = _some(trial)
    calls: list[tuple[Any, tuple[int, ...]]] = [
        (list(some), some),
        (np.array(some, np.int64), some),
        (np.array(some[::-1], np.int32), some),
        ([], ()),
        ([trial.num_envs + 5], ()),
        (None, tuple(range(trial.num_envs))),
    ]
    for env_ids, envs in calls:
        _compare(
            trial,
            before,
            after,
            envs,
            partial(ConnectorDriver.reset, env_ids=env_ids),
            f"after reset({env_ids!r})",
            _RESET,
        )


def _compare(
    trial: Trial,
    before: list[Moment],
    after: list[Moment],
    envs: tuple[int, ...],
    between: Callable[[ConnectorDriver], None],
    condition: str,
    hint: str,
) -> None:
    """Play on after a cut: these envs as new ones would, the others as if nothing had been."""
    cut, uncut, new = (trial.player() for _ in range(3))
    for moment in before:
        cut.see(moment)
        uncut.see(moment)
    between(cut)
    rest = tuple(env for env in range(trial.num_envs) if env not in envs)
    for k, moment in enumerate(after):
        out = cut.see(moment)
        for player, whose in ((new, envs), (uncut, rest)):
            seen = player.see(moment)
            expected, got = (rows.take(np.isin(rows.env_id, whose)) for rows in (seen, out))
            if gone := [key for key in keys_of(expected) if key not in keys_of(got)]:
                trial.report.broken(f"moment {_CUT + k}, (env, agent) {gone[0]}", f"a row {condition}", "none", hint)
            trial.report.compare(expected, got, _CUT + k, condition, hint, near=True)


def _some(trial: Trial) -> tuple[int, ...]:
    return tuple(range(0, trial.num_envs, 2))


def _others(trial: Trial) -> tuple[int, ...]:
    return tuple(range(1, trial.num_envs, 2))
