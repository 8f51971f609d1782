"""Check: the end of an episode clears its memory, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from marlvec.testing.connector_checks.player import ConnectorDriver
from marlvec.testing.connector_checks.report import keys_of
from marlvec.testing.connector_checks.story import Moment
from marlvec.testing.connector_checks.trial import EpisodeTrial

__all__ = ["check_first", "check_reset"]

_AFTER_CUT = 2_000  # seed of the story after the cut
_RESET = "reset() forgets all that is remembered of an env's running episodes, and of the envs it names only"
_FIRST = "a row that has `first` begins an episode: nothing is remembered of the one before"


def check_first(trial: EpisodeTrial) -> None:
    """A row with ``first`` set begins an episode, even without a reset()."""
    envs, others = (tuple(range(first, trial.num_envs, 2)) for first in (0, 1))
    pairs = zip(trial.moments(seed=_AFTER_CUT), trial.after, strict=False)
    turned = [new.of_envs(envs).beside(old.of_envs(others)) for new, old in pairs]
    _compare_reset(trial, turned, envs, lambda player: None, "as at an episode's beginning", _FIRST)


def check_reset(trial: EpisodeTrial) -> None:
    """reset(env_ids) clears exactly these envs, None all of them; what was learnt stays."""
    player = trial.player(training=True).watch(trial.before)
    learnt = copy.deepcopy(trial.merged(player.piece))
    player.reset(None)
    trial.report.same(learnt, trial.merged(player.piece), "what was learnt, after reset()", "it is of no one episode")
    some = tuple(range(0, trial.num_envs, 2))
    calls: list[tuple[Any, tuple[int, ...]]] = [
        (list(some), some),
        (np.array(some, np.int64), some),
        (np.array(some[::-1], np.int32), some),
        ([], ()),
        ([trial.num_envs + 5], ()),
        (None, tuple(range(trial.num_envs))),
    ]
    for env_ids, envs in calls:
        reset = partial(ConnectorDriver.reset, env_ids=env_ids)
        _compare_reset(trial, trial.after, envs, reset, f"after reset({env_ids!r})", _RESET)


def _compare_reset(
    trial: EpisodeTrial,
    after: list[Moment],
    envs: tuple[int, ...],
    between: Callable[[ConnectorDriver], None],
    condition: str,
    hint: str,
) -> None:
    """Play on after a cut: these envs must behave as new, the others as if there were no cut."""
    new, cut, uncut = trial.player(), *(trial.player().watch(trial.before) for _ in range(2))
    between(cut)
    rest = tuple(env for env in range(trial.num_envs) if env not in envs)
    for k, moment in enumerate(after, trial.cut):
        out = cut.see(moment)
        for player, whose in ((new, envs), (uncut, rest)):
            seen = player.see(moment)
            expected, got = (rows.take(np.isin(rows.env_id, whose)) for rows in (seen, out))
            if gone := [key for key in keys_of(expected) if key not in keys_of(got)]:
                trial.report.broken(f"moment {k}, (env, agent) {gone[0]}", f"a row {condition}", "none", hint)
            trial.report.compare(expected, got, k, condition, hint, near=True)
