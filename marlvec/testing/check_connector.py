"""`check_connector`: check a connector against its contract on sampled episodes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from marlvec.arguments import signature_of
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector
from marlvec.errors import ArgumentError
from marlvec.testing.connector_checks.batches import (
    check_batched,
    check_empty_batch,
    check_fragment_order,
    check_fragments,
    check_learning,
    check_order,
    check_subsets,
)
from marlvec.testing.connector_checks.calls import (
    check_empty,
    check_inputs,
    check_inside,
    check_outputs,
    check_repeat,
    check_rows,
)
from marlvec.testing.connector_checks.episodes import check_first, check_reset
from marlvec.testing.connector_checks.memory import (
    check_config,
    check_copy,
    check_hand_over,
    check_merge,
    check_mode,
    check_setup,
    check_state,
)
from marlvec.testing.connector_checks.report import Refused
from marlvec.testing.connector_checks.story import ColumnLike
from marlvec.testing.connector_checks.trial import BatchTrial, EpisodeTrial, Trial

__all__ = ["check_connector"]

_T = TypeVar("_T", bound=Trial)

_CHECKS: dict[str, Callable[[EpisodeTrial], None]] = {
    "rows": check_rows,
    "repeat": check_repeat,
    "inputs": check_inputs,
    "outputs": check_outputs,
    "inside": check_inside,
    "empty": check_empty,
    "learning": check_learning,
    "merge": check_merge,
    "hand_over": check_hand_over,
    "mode": check_mode,
    "batched": check_batched,
    "order": check_order,
    "subsets": check_subsets,
    "first": check_first,
    "reset": check_reset,
    "state": check_state,
    "copy": check_copy,
    "setup": check_setup,
    "config": check_config,
}
_BATCH_CHECKS: dict[str, Callable[[BatchTrial], None]] = {
    "rows": check_rows,
    "repeat": check_repeat,
    "inputs": check_inputs,
    "outputs": check_outputs,
    "empty": check_empty_batch,
    "batched": check_fragments,
    "order": check_fragment_order,
    "state": check_state,
    "copy": check_copy,
    "config": check_config,
}

_OBS: tuple[Space[Any], ...] = (
    Box(-np.inf, np.inf, (3,), np.float32),
    Box(-2.0, 3.0, (2, 2), np.float64),
    Box(0, 255, (8, 8, 3), np.uint8),
    Discrete(4, start=1),
    MultiDiscrete([2, 3]),
    MultiBinary(3),
    Dict(
        OrderedDict(
            place=Box(-9.0, 9.0, (2,), np.float32), rest=Tuple([Discrete(3), Box(0.0, np.inf, (1,), np.float64)])
        )
    ),
)
_ACTIONS: tuple[Space[Any], ...] = (
    Discrete(5),
    Box(-2.0, 3.0, (2,), np.float32),
    Box(-np.inf, np.inf, (2,), np.float32),
    MultiDiscrete([2, 3]),
    Dict(OrderedDict(arm=Box(-1.0, 4.0, (2,), np.float64), gear=Discrete(3, start=-1))),
)


def check_connector(
    make: Connector | Callable[[], Connector],
    space: Space[Any] | None = None,
    *,
    action_space: Space[Any] | None = None,
    agents: Sequence[str] = ("agent_0", "agent_1", "agent_2"),
    num_envs: int = 4,
    columns: Mapping[str, ColumnLike] | None = None,
    seed: int = 0,
) -> None:
    """Play sampled episodes (stories) to a connector or a pipeline, and check all that it returns.

    A story has several envs whose episodes begin and end at different times; agents take turns, join late and leave
    early; some episodes are lost. It is played to new connectors many times: in one call, row by row, in another order,
    in parts, with a reset, from a state, on a copy. The checks:

    ============  ====================================================================================================
    ``rows``      rows come out, as many as went in (fewer only with ``changes_length``), in their order; with
                  ``is_identity`` all of them as they are
    ``repeat``    two equal connectors return the same, bit for bit
    ``inputs``    input arrays are neither written to nor kept
    ``outputs``   later calls do not write to returned arrays
    ``inside``    observations lie in ``output_space()``; actions lie in the env's space if they were in
                  ``policy_space()``
    ``empty``     a call without rows returns none, in the same columns, and changes nothing
    ``learning``  what is learnt does not depend on how rows are grouped into calls
    ``merge``     merged states equal what one connector learns from all the data; running episodes are unchanged
    ``hand_over`` what is learnt during a merge counts once, in the next round; another connector can take over
    ``mode``      ``train()`` and ``eval()`` switch; in eval nothing is learnt
    ``batched``   all rows in one call come out as in separate calls (with ``across_agents`` each env's)
    ``order``     the order of rows makes no difference
    ``subsets``   the other rows in the call, and the number of envs and agents, make no difference
    ``first``     a row with ``first`` begins an episode
    ``reset``     ``reset()`` clears the episodes of the given envs, and nothing else
    ``state``     ``state_dict()`` is plain data and holds everything remembered, also mid-episode
    ``copy``      a deep copy continues like the original and shares nothing with it
    ``setup``     declaring spaces changes nothing; ``setup()`` with the same space clears nothing
    ``config``    rebuilt from its config, it is equal (skipped where it has no config)
    ============  ====================================================================================================

    A connector that learns nothing is checked fully in training and in eval; one that learns has its results checked in
    eval and what it learns in training. Results may differ in their last digits where sums are taken in another order;
    after a state, a copy or a setup they must be equal bit for bit.

    On the learner side the stories are finished batches of fragments: ``batched`` calls it with one fragment at a time
    (skipped with ``across_agents``), ``order`` reverses the fragments, and checks of spaces, modes and running episodes
    are skipped.

    Args:
        make: Builds a new connector at each call; or a new connector, which is copied.
        space: Agent side: space of one observation at its input. Action side: space of one action at its output. None
            tries several and skips those it refuses. Learner side: space of one observation; None for a vector.
        action_space: Space of one policy action, on the agent and learner side; None for ``Discrete(4)``.
        agents: Names of the agents.
        num_envs: Number of envs, at least 2.
        columns: Extra columns that the connector needs, in the rows and in the policy's output: the space of one row's
            value, or a function from the rows to the whole column. Always present are the collector's columns,
            ``state``, and the policy's ``actions``, ``logp`` and ``values``; in finished batches also ``next_state``,
            ``next_values``, ``target_logp`` and ``advantages``.
        seed: Seed of all draws.

    Raises:
        ContractError: The connector broke its contract; the message names the check, the space and the place, and what
            was expected and got.
        UnsupportedSpaceError, ArgumentError: The connector refuses ``space``, or all spaces tried.
        ArgumentError: An argument is invalid.
    """
    if not isinstance(num_envs, (int, np.integer)) or num_envs < 2:
        raise ArgumentError(f"num_envs: expected at least 2, got {num_envs!r}")
    if not agents:
        raise ArgumentError("agents: expected at least one agent, got none")
    for what, given in (("space", space), ("action_space", action_space)):
        if given is not None and not isinstance(given, Space):
            raise ArgumentError(f"{what}: expected a Gymnasium space or None, got {given!r:.200}")
    build, piece = _maker(make)
    if isinstance(piece, AgentConnector):
        spaces = _OBS
    elif isinstance(piece, ActionConnector):
        spaces = _ACTIONS
    elif isinstance(piece, LearnerConnector):
        obs, action = space or _OBS[0], action_space or Discrete(4)
        _check(BatchTrial(build, obs, action, columns or {}, num_envs, len(agents), seed), _BATCH_CHECKS)
        return
    else:
        whose = "" if piece is make else f", which {make!r:.200} made"
        raise ArgumentError(f"expected a connector, or a function that makes one, got {piece!r:.200}{whose}")
    refused: list[Exception] = []
    for each in spaces if space is None else (space,):
        try:
            action = action_space or Discrete(4)
            trial = EpisodeTrial(build, each, action, tuple(agents), num_envs, columns or {}, seed)
            _check(trial, _CHECKS)
        except Refused as error:
            refused.append(error.error)
    if len(refused) == (len(spaces) if space is None else 1):
        reason = refused[0]
        if space is None:
            reason.add_note(f"{piece.name} refuses all spaces that were tried; give check_connector(..., space=)")
        raise reason


def _maker(make: Connector | Callable[[], Connector]) -> tuple[Callable[[], Connector], Connector]:
    """Return a function that builds a new connector at each call, and one that it built."""
    if isinstance(make, Connector):
        return lambda: copy.deepcopy(make), make
    if not callable(make):
        return make, make
    try:
        signature_of(make).bind()
    except TypeError as error:
        name = getattr(make, "__name__", repr(make))
        raise ArgumentError(
            f"expected a connector, or a function without arguments that makes one, got {name} ({error}): give an "
            f"instance, {name}(...)"
        ) from None
    except ValueError:
        pass  # written in C; the call will show
    return make, make()


def _check(trial: _T, checks: Mapping[str, Callable[[_T], None]]) -> None:
    for name, check in checks.items():
        trial.report.check = name
        check(trial)
