"""`check_connector`: check a connector against its contract on sampled episodes.

Its checks: how rows are grouped into calls changes nothing; a call leaves its input alone, and its output lies in the
declared space; states can be saved, loaded, copied and merged; the end of an episode clears its memory, and no other.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.arguments import signature_of
from marlvec.connectors.connector import ActionConnector, AgentConnector, Connector, LearnerConnector
from marlvec.connectors.pipeline import with_inner
from marlvec.connectors.registry import connector_from_config
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, SerialisationError
from marlvec.testing.connector_trial import (
    BatchTrial,
    ColumnLike,
    ConnectorDriver,
    EpisodeTrial,
    Refused,
    Trial,
    TrialReport,
    TrialStep,
    has_leaves,
    keys_of,
    outsider,
    place,
)
from marlvec.trees import map_tree, tree_leaves

_T = TypeVar("_T", bound=Trial)


def check_batched(trial: EpisodeTrial) -> None:
    """All rows in one call give what each row (each env, with across_agents) gives in a call of its own."""
    for training in trial.modes:
        _in_parts(trial, training, lambda step: trial.alone(step.rows), "in a call of its own", _ACROSS)


def check_config(trial: Trial) -> None:
    """The connector built from the config is equal, and continues from the state."""
    player = trial.player(training=True)
    if (built := _read_back(trial.report, player.piece)) is None:
        return
    other = trial.driver(trial.piece(built))
    trial.load(other.piece, player.watch(trial.before).piece.state_dict())
    trial.go_on(player, [other], "from one built from the config")


def check_copy(trial: Trial) -> None:
    """A deep copy continues like the original, and neither affects the other."""
    player = trial.player(training=True).watch(trial.before)
    with trial.report.asking("copy.deepcopy()"):
        twin = trial.driver(copy.deepcopy(player.piece))
    held = copy.deepcopy(player.piece.state_dict())
    outs = [twin.see(step) for step in trial.after]
    hint = "a copy must share nothing that changes with the original"
    trial.report.same(held, player.piece.state_dict(), "the state after a deep copy was used", hint)
    for k, (step, out) in enumerate(zip(trial.after, outs, strict=True), trial.cut):
        trial.report.compare(player.see(step), out, k, "from a deep copy", hint)


def check_empty(trial: EpisodeTrial) -> None:
    """A call without rows returns none, in the same columns, and changes nothing."""
    player = trial.player()
    for step in trial.steps():
        out = player.see(step)
        state = player.piece.state_dict()
        none = player.call(step.rows.take(np.zeros(0, np.int64)))
        for name, column in out.items():
            if name not in none:
                trial.report.broken("the columns of no rows", f"{name!r} among them", str(list(none.keys())))
            trial.report.same(map_tree(form_of, column), map_tree(form_of, none[name]), f"column {name!r} of no rows")
        trial.report.same(state, player.piece.state_dict(), "the state after a call without rows")


def check_first(trial: EpisodeTrial) -> None:
    """A row with ``first`` set begins an episode, even without a reset()."""
    envs, others = (tuple(range(first, trial.num_envs, 2)) for first in (0, 1))
    pairs = zip(trial.steps(seed=_AFTER_CUT), trial.after, strict=False)
    turned = [new.of_envs(envs).beside(old.of_envs(others)) for new, old in pairs]
    _compare_reset(trial, turned, envs, lambda player: None, "as at an episode's beginning", _FIRST)


def check_hand_over(trial: EpisodeTrial) -> None:
    """Two connectors hand over and keep learning while their states are merged: all they learn counts once."""
    both, *pair = (trial.driver(trial.piece()) for _ in range(3))
    pieces = [player.piece for player in pair]
    handed: list[Any] = []
    for k, step in enumerate(trial.before):
        both.see(step)
        for i, player in enumerate(pair):
            player.watch(_share(trial, [step], i))
        if k % 3 == 0:  # another step comes before the states are merged
            handed = _handed(trial, pieces)
            if not trial.learns and has_leaves(handed):
                expected = "{}, as merge_states() gives nothing"
                trial.report.broken("what hand_over() returns", expected, repr(handed[0])[:100])
        elif k % 3 == 1:
            _take_merged(trial, pieces, _merged(trial, pieces, handed))
    if not trial.learns:
        return
    merged = _merged(trial, pieces, _handed(trial, pieces))
    _take_merged(trial, pieces, merged)
    pooled = trial.first_learnt(both.piece, trial.merged(both.piece))
    hint = "override merge_states(), hand_over() and take_merged() together"
    rounds = "what two have learnt, merged round after round"
    trial.report.same_learnt(pooled, trial.first_learnt(both.piece, merged), rounds, hint)
    other = trial.driver(trial.piece()).piece
    _take_merged(trial, [other], merged)
    taken = "what another one has learnt that takes over the merged state"
    trial.report.same_learnt(pooled, trial.first_learnt(other, trial.merged(other)), taken, hint)


def check_inputs(trial: Trial) -> None:
    """Input arrays are neither written to nor kept: the caller may overwrite them after the call."""
    hint = "copy an array before you write to it"
    player, quiet = trial.player(), trial.player()
    for k, step in enumerate(trial.fresh_steps()):
        expected = quiet.see(TrialStep(_copy_rows(step.rows), _copy_rows(step.answer), step.over))
        rows = _copy_rows(step.rows)
        out = player.call(rows)
        _untouched(trial, step.rows, rows, k, hint)
        held = _copy_rows(out)
        _overwrite(rows)
        trial.report.compare(expected, held, k, "whatever became of earlier calls' arrays", "keep copies of arrays")
        answered = player.answered(held, step)
        rows = _copy_rows(answered)
        player.show_answer(rows)
        _untouched(trial, answered, rows, k, hint)
        _overwrite(rows)
        if step.over:
            player.reset(list(step.over))


def check_inside(trial: EpisodeTrial) -> None:
    """The output lies in the declared space: observations in output_space(), actions in the env's space."""
    column, space = ("actions_for_env", trial.space) if trial.acts else ("obs", trial.outer)
    for training in trial.both:
        player = trial.player(training=training)
        for k, step in enumerate(trial.steps()):
            out = player.see(step)
            if column not in out:
                trial.report.broken("the columns that come out", f"{column!r} among them", str(list(out.keys())))
            found = outsider(space, out[column], len(out), exact=not trial.acts)
            if found:
                found = found._replace(path=f"{column}/{found.path}" if found.path else column)
                hint = "" if trial.acts else "output_space() must say what comes out"
                trial.report.broken(f"step {k}, {place(found, out)}", found.expected, found.got, hint)


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
    whole = trial.player(training=True).watch(trial.steps())
    expected = trial.first_learnt(whole.piece, trial.merged(whole.piece))
    for way, parts in ways.items():
        player = trial.player(training=True)
        for step in trial.steps():
            player.see_parts(step, parts(step))
        got = trial.first_learnt(player.piece, trial.merged(player.piece))
        trial.report.same_learnt(expected, got, f"what is learnt {way}", "each row counts once")


def check_merge(trial: EpisodeTrial) -> None:
    """Merged states of two that saw different envs equal what one learns from all; running episodes continue."""
    both, *pair = (trial.driver(trial.piece()) for _ in range(3))
    both.watch(trial.before)
    for i, player in enumerate(pair):
        player.watch(_share(trial, trial.before, i))
    pieces = [player.piece for player in pair]
    merged, turned = trial.merged(*pieces), trial.merged(*reversed(pieces))
    trial.report.same_learnt(merged, turned, "the merged state in another order")
    pooled = trial.first_learnt(both.piece, trial.merged(both.piece))
    hint = "merge_states() joins what was learnt as if one had seen it all, and nothing else"
    trial.report.same_learnt(pooled, trial.first_learnt(both.piece, merged), "what two have learnt, merged", hint)
    if not trial.learns:
        return
    one = pair[0]
    one.piece.eval()
    plain = trial.driver(copy.deepcopy(one.piece), training=False)
    trial.load(plain.piece, trial.merged(one.piece))
    hint = "loading a merged state leaves running episodes alone"
    for k, step in enumerate(_share(trial, trial.after, 0), trial.cut):
        condition = "after loading its own merged state"
        trial.report.compare(one.see(step), plain.see(step), k, condition, hint, near=True)


def check_mode(trial: EpisodeTrial) -> None:
    """train() and eval() switch, and return the connector; in eval nothing is learnt."""
    player = trial.player(training=True)
    for name, training in (("eval", False), ("train", True), ("eval", False)):
        with trial.report.asking(f"{name}()"):
            returned = getattr(player.piece, name)()
        if returned is not player.piece:
            trial.report.broken(f"what {name}() returns", "the connector itself", type(returned).__name__)
        if wrong := [piece for piece in with_inner(player.piece) if piece.training is not training]:
            trial.report.broken(f"training of {wrong[0].name} after {name}()", str(training), str(wrong[0].training))
    learnt = copy.deepcopy(trial.merged(player.piece))
    now = trial.merged(player.watch(trial.steps()).piece)
    trial.report.same(learnt, now, "what was learnt, after episodes in eval", "freeze it in eval()")


def check_order(trial: EpisodeTrial) -> None:
    """The order of rows makes no difference."""
    rng = np.random.default_rng(0)
    for training in trial.modes:
        for parts in (lambda m: [np.arange(len(m.rows))[::-1]], lambda m: [rng.permutation(len(m.rows))]):
            _in_parts(trial, training, parts, "in another order", _ORDER)


def check_outputs(trial: Trial) -> None:
    """Later calls do not write to returned arrays."""
    player = trial.player()
    before: list[tuple[Rows, Rows]] = []
    for step in trial.steps():
        for k, (out, held) in enumerate(before):
            trial.report.compare(held, out, k, "as when it was returned", "return copies of what is remembered")
        out = player.see(step)
        before.append((out, _copy_rows(out)))


def check_repeat(trial: Trial) -> None:
    """Two equal connectors with the same input return the same, bit for bit."""
    for training in trial.both:
        one, two = (trial.player(training=training) for _ in range(2))
        for k, step in enumerate(trial.steps()):
            hint = "draw random numbers with RowRandom, and share nothing between instances"
            trial.report.compare(one.see(step), two.see(step), k, "from one made alike", hint)


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


def check_rows(trial: Trial) -> None:
    """The output has the input's rows."""
    for training in trial.both:
        trial.player(training=training).watch(trial.steps())


def check_setup(trial: EpisodeTrial) -> None:
    """Declaring spaces changes nothing, and setup() with the same space clears nothing."""
    player, other = (trial.player().watch(trial.before) for _ in range(2))
    state = copy.deepcopy(other.piece.state_dict())
    again = trial.declared(other.piece, trial.space)
    if again != trial.outer:
        trial.report.broken("the space it declares, asked again", str(trial.outer), str(again))
    trial.report.same(state, other.piece.state_dict(), "the state after it was asked for a space", "that must be pure")
    with trial.report.asking("setup() once more"):
        other.piece.setup(trial.space)
    hint = "an edit of a pipeline sets every piece up anew"
    trial.report.same(state, other.piece.state_dict(), "the state after setup() with the same space", hint)
    _go_on(trial, player, [other], "after setup() with the same space", hint)


def check_state(trial: Trial) -> None:
    """state_dict() is plain data and a copy; a connector that loads it continues bit for bit."""
    for training in trial.both:
        player = trial.player(training=training).watch(trial.before)
        used = trial.player(training=training).watch(trial.steps(seed=_OTHER)[: trial.cut])
        used.reset(None)
        state = _plain_state(trial.report, player.piece)
        held = copy.deepcopy(state)
        fresh = trial.driver(trial.piece(), training=training)
        # Each connector loads its own copy, so that an array kept by one shows at the end.
        for other, given in ((fresh, state), (used, copy.deepcopy(state))):
            trial.load(other.piece, given)
            loaded = _plain_state(trial.report, other.piece)
            trial.report.same(held, loaded, "the state of one that has loaded it", _ALL)
        _go_on(trial, player, [fresh, used], "from one that has loaded the state", _ALL)
        trial.report.same(held, state, "a state that was taken, later", "it must be a copy, and loading must copy it")
    _refuses_foreign(trial.report, trial.player(training=True).watch(trial.before).piece)


def check_subsets(trial: EpisodeTrial) -> None:
    """Other rows in the call, and other envs and agents, make no difference; resets are checked elsewhere."""
    rng = np.random.default_rng(0)
    steps = [TrialStep(step.rows, step.answer) for step in trial.steps()]
    for training in trial.modes:
        _in_parts(trial, training, lambda m: _halves(trial, m, rng), "in a call without the others", _ACROSS)
        player = trial.player(training=training)
        whole = [player.see(step) for step in steps]
        ways = {
            f"where there is only env {env}": [step.of_envs((env,)) for step in steps] for env in range(trial.num_envs)
        }
        if not trial.across:
            ways |= {
                f"where there is only agent {agent}": [m.take(m.rows.agent_index == agent) for m in steps]
                for agent in range(len(trial.agents))
            }
        for condition, some in ways.items():
            player = trial.player(training=training)
            for k, step in enumerate(some):
                mine = set(keys_of(step.rows))
                chosen = np.array([key in mine for key in keys_of(whole[k])], np.bool_)
                _compare(trial, whole[k].take(chosen), [player.see(step)], k, condition, _ACROSS)


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


def check_empty_batch(trial: BatchTrial) -> None:
    """A call without rows returns none, in the same columns."""
    player, rows = trial.player(), trial.steps()[0].rows
    out, none = player.call(rows), player.call(rows.take(slice(0, 0)))
    if len(none):
        trial.report.broken("the rows that come out of none", "none", str(len(none)))
    expected, got = ({name: map_tree(form_of, c) for name, c in rows.items()} for rows in (out, none))
    trial.report.same(expected, got, "the columns of no rows")


def check_fragment_order(trial: BatchTrial) -> None:
    """The order of fragments makes no difference."""
    whole, turned = trial.player(), trial.player()
    for k, step in enumerate(trial.steps()):
        unrolls = _unrolls(step.rows)
        turn = [np.flatnonzero(step.rows.unroll_id == unroll) for unroll in unrolls[::-1]]
        expected, got = whole.see(step), turned.see(step.take(np.concatenate(turn)))
        if "unroll_id" not in expected or expected["unroll_id"].shape[:1] != (len(expected),):
            return  # rows cannot be identified
        number = [out["unroll_id"].reshape(len(out), -1)[:, 0] for out in (expected, got)]
        back = [np.concatenate([np.flatnonzero(ids == unroll) for unroll in unrolls]) for ids in number]
        hint = "the order of fragments means nothing"
        condition = "with its fragments in another order"
        trial.report.compare(expected.take(back[0]), got.take(back[1]), k, condition, hint, near=True)


def check_fragments(trial: BatchTrial) -> None:
    """All fragments in one call give what each gives in a call of its own."""
    whole, single = trial.player(), trial.player()
    if whole.piece.across_agents:
        return
    condition = "each fragment as in a call of its own"
    for k, step in enumerate(trial.steps()):
        expected = whole.see(step)
        parts = single.see_parts(step, [np.flatnonzero(step.rows.unroll_id == u) for u in _unrolls(step.rows)])
        try:
            apart = Rows.concat(parts)
        except ValueError as error:
            subject = f"batch {k}, fragments in calls of their own"
            trial.report.broken(subject, "columns of one form", str(error), _FRAGMENTS)
        trial.report.compare(apart, expected, k, condition, _FRAGMENTS, near=True)


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
    """Play sampled episodes to a connector or a pipeline, and check all that it returns.

    Several envs have episodes that begin and end at different times; agents take turns, join late and leave early; some
    episodes are lost. They are played to new connectors many times: in one call, row by row, in another order,
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

    On the learner side the episodes are finished batches of fragments: ``batched`` calls it with one fragment at a time
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


Parts = Callable[[TrialStep], list[Any]]

_ACROSS = "one that looks at other agents of its env sets across_agents; one that learns says what in merge_states()"
_ORDER = "where a row stands means nothing: go by env_id and agent_index"


def _in_parts(trial: EpisodeTrial, training: bool, parts: Parts, condition: str, hint: str) -> None:
    whole, single = (trial.player(training=training) for _ in range(2))
    for k, step in enumerate(trial.steps()):
        expected = whole.see(step)
        outs = single.see_parts(step, parts(step))
        _compare(trial, expected, outs, k, condition, hint)


def _compare(trial: EpisodeTrial, whole: Rows, outs: list[Rows], k: int, condition: str, hint: str) -> None:
    """Raise if rows of one call differ from the same rows in smaller calls."""
    there = set(keys_of(whole))
    apart = {key for out in outs for key in keys_of(out)}
    if differ := sorted(there ^ apart):
        got, expected = ("a row", "none") if differ[0] in there else ("none", "a row")
        trial.report.broken(f"step {k}, (env, agent) {differ[0]}", f"{expected} as {condition}", got, hint)
    for out in outs:
        wanted = set(keys_of(out))
        mine = whole.take(np.array([key in wanted for key in keys_of(whole)], np.bool_))
        trial.report.compare(out, mine, k, f"as {condition}", hint, near=True)


def _halves(trial: EpisodeTrial, step: TrialStep, rng: np.random.Generator) -> list[Any]:
    side = rng.random((trial.num_envs, len(trial.agents))) < 0.5
    if trial.across:
        side[:] = side[:, :1]
    chosen = side[step.rows.env_id, step.rows.agent_index]
    return [np.flatnonzero(chosen), np.flatnonzero(~chosen)]


_FRAGMENTS = "one whose rows depend on other fragments sets across_agents"


def _unrolls(rows: Rows) -> list[int]:
    return list(dict.fromkeys(rows.unroll_id.tolist()))


def _untouched(trial: Trial, before: Rows, after: Rows, k: int, hint: str) -> None:
    names, others = list(before.keys()), list(after.keys())
    if names != others:
        trial.report.broken(f"step {k}, the columns that were given", str(names), str(others), "call rows.replace()")
    trial.report.compare(before, after, k, "as it was given", hint)


def form_of(array: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of one row of a column."""
    return str(array.dtype), tuple(array.shape[1:])


def _copy_rows(rows: Rows) -> Rows:
    return Rows({name: map_tree(np.array, column) for name, column in rows.items()})


def _overwrite(rows: Rows) -> None:
    for _, column in rows.items():
        for _, leaf in tree_leaves(column):
            _overwrite_array(leaf)


def _overwrite_array(array: NDArray[Any]) -> None:
    if array.dtype == object:
        array[...] = None
    else:
        array[...] = np.asarray(101).astype(array.dtype)


_OTHER = 3_000  # seed of different episodes
_ALL = "state_dict() must hold all that it remembers"


def _go_on(trial: Trial, player: ConnectorDriver, others: list[ConnectorDriver], condition: str, hint: str) -> None:
    trial.go_on(player, others, condition, hint)
    for other in others:
        trial.report.same(player.piece.state_dict(), other.piece.state_dict(), f"the state in the end {condition}")


def _plain_state(report: TrialReport, piece: Connector) -> Any:
    with report.asking("state_dict()"):
        state = piece.state_dict()
    if not isinstance(state, dict):
        report.broken("what state_dict() returns", "a dict", type(state).__name__)
    if odd := _odd(state, ""):
        report.broken("the state", "dicts, lists, arrays, numbers, strings and None", odd)
    return state


def _refuses_foreign(report: TrialReport, piece: Connector) -> None:
    """Raise if a connector accepts another connector's state."""
    state = copy.deepcopy(piece.state_dict())
    try:
        piece.load_state_dict({"what no connector remembers": 1})
    except ArgumentError:
        report.same(state, piece.state_dict(), "the state after it refused another one")
    except Exception as error:
        report.broken("load_state_dict() of another's", "ArgumentError", f"{type(error).__name__}: {error}")
    else:
        report.broken("load_state_dict() of another's", "ArgumentError", "no error")


def _odd(state: Any, path: str) -> str | None:
    """Return a description of the first thing in a state that is not plain data."""
    if isinstance(state, dict):
        if keys := [key for key in state if not isinstance(key, str)]:
            return f"the key {keys[0]!r} at {path or '/'}"
        return next((odd for key, item in state.items() if (odd := _odd(item, f"{path}/{key}"))), None)
    if isinstance(state, (list, tuple)):
        return next((odd for i, item in enumerate(state) if (odd := _odd(item, f"{path}/{i}"))), None)
    if isinstance(state, np.ndarray):
        return f"an array of objects at {path}" if state.dtype == object else None
    if state is None or isinstance(state, (bool, int, float, str, np.generic)):
        return None
    return f"{type(state).__name__} at {path}"


def _share(trial: EpisodeTrial, steps: list[TrialStep], i: int) -> list[TrialStep]:
    """Return the steps of the envs that the first or second of two connectors sees."""
    return [step.of_envs(tuple(range(i, trial.num_envs, 2))) for step in steps]


def _handed(trial: Trial, pieces: list[Connector]) -> list[Any]:
    with trial.report.asking("hand_over()"):
        return [copy.deepcopy(piece.hand_over()) for piece in pieces]


def _merged(trial: Trial, pieces: list[Connector], handed: list[Any]) -> Any:
    with trial.report.asking("merge_states()"):
        return pieces[0].merge_states(handed)


def _take_merged(trial: Trial, pieces: list[Connector], merged: Any) -> None:
    for piece in pieces:
        with trial.report.asking("take_merged()"):
            piece.take_merged(copy.deepcopy(merged))


def _read_back(report: TrialReport, piece: Connector) -> Connector | None:
    """Build a connector from another one's config; None if the config names an unregistered class or function."""
    with report.asking("to_config()"):
        try:
            config = piece.to_config()
        except SerialisationError:
            return None
    try:
        json.dumps(config, default=_array)
    except TypeError as error:
        report.broken("the config", "JSON-able data and arrays", str(error))
    with report.asking("building from the config"):
        built = connector_from_config(copy.deepcopy(config))
        again = built.to_config()
    if type(built) is not type(piece) or repr(built) != repr(piece):
        report.broken("what is built from the config", repr(piece), repr(built), "keep arguments under their own names")
    report.same(config, again, "the config of what was built from it")
    return built


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON-able")


_AFTER_CUT = 2_000  # seed of the episodes after the cut
_RESET = "reset() forgets all that is remembered of an env's running episodes, and of the envs it names only"
_FIRST = "a row that has `first` begins an episode: nothing is remembered of the one before"


def _compare_reset(
    trial: EpisodeTrial,
    after: list[TrialStep],
    envs: tuple[int, ...],
    between: Callable[[ConnectorDriver], None],
    condition: str,
    hint: str,
) -> None:
    """Play on after a cut: these envs must behave as new, the others as if there were no cut."""
    new, cut, uncut = trial.player(), *(trial.player().watch(trial.before) for _ in range(2))
    between(cut)
    rest = tuple(env for env in range(trial.num_envs) if env not in envs)
    for k, step in enumerate(after, trial.cut):
        out = cut.see(step)
        for player, whose in ((new, envs), (uncut, rest)):
            seen = player.see(step)
            expected, got = (rows.take(np.isin(rows.env_id, whose)) for rows in (seen, out))
            if gone := [key for key in keys_of(expected) if key not in keys_of(got)]:
                trial.report.broken(f"step {k}, (env, agent) {gone[0]}", f"a row {condition}", "none", hint)
            trial.report.compare(expected, got, k, condition, hint, near=True)
