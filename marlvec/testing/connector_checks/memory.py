"""Checks of a connector's state: saved, loaded, copied and merged, and rebuilt from its config."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from marlvec.connectors.connector import Connector
from marlvec.connectors.pipeline import with_inner
from marlvec.connectors.registry import connector_from_config
from marlvec.errors import ArgumentError, SerialisationError
from marlvec.testing.connector_checks.player import ConnectorDriver
from marlvec.testing.connector_checks.report import Report
from marlvec.testing.connector_checks.story import Moment
from marlvec.testing.connector_checks.trial import EpisodeTrial, Trial, has_leaves

__all__ = ["check_copy", "check_setup", "check_state", "check_hand_over", "check_merge", "check_mode", "check_config"]

_OTHER = 3_000  # seed of a different story
_ALL = "state_dict() must hold all that it remembers"


def check_state(trial: Trial) -> None:
    """state_dict() is plain data and a copy; a connector that loads it continues bit for bit."""
    for training in trial.both:
        player = trial.player(training=training).watch(trial.before)
        used = trial.player(training=training).watch(trial.moments(seed=_OTHER)[: trial.cut])
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


def check_copy(trial: Trial) -> None:
    """A deep copy continues like the original, and neither affects the other."""
    player = trial.player(training=True).watch(trial.before)
    with trial.report.asking("copy.deepcopy()"):
        twin = trial.driver(copy.deepcopy(player.piece))
    held = copy.deepcopy(player.piece.state_dict())
    outs = [twin.see(moment) for moment in trial.after]
    hint = "a copy must share nothing that changes with the original"
    trial.report.same(held, player.piece.state_dict(), "the state after a deep copy was used", hint)
    for k, (moment, out) in enumerate(zip(trial.after, outs, strict=True), trial.cut):
        trial.report.compare(player.see(moment), out, k, "from a deep copy", hint)


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


def _go_on(trial: Trial, player: ConnectorDriver, others: list[ConnectorDriver], condition: str, hint: str) -> None:
    trial.go_on(player, others, condition, hint)
    for other in others:
        trial.report.same(player.piece.state_dict(), other.piece.state_dict(), f"the state in the end {condition}")


def _plain_state(report: Report, piece: Connector) -> Any:
    with report.asking("state_dict()"):
        state = piece.state_dict()
    if not isinstance(state, dict):
        report.broken("what state_dict() returns", "a dict", type(state).__name__)
    if odd := _odd(state, ""):
        report.broken("the state", "dicts, lists, arrays, numbers, strings and None", odd)
    return state


def _refuses_foreign(report: Report, piece: Connector) -> None:
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
    now = trial.merged(player.watch(trial.moments()).piece)
    trial.report.same(learnt, now, "what was learnt, after a story in eval", "freeze it in eval()")


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
    for k, moment in enumerate(_share(trial, trial.after, 0), trial.cut):
        condition = "after loading its own merged state"
        trial.report.compare(one.see(moment), plain.see(moment), k, condition, hint, near=True)


def check_hand_over(trial: EpisodeTrial) -> None:
    """Two connectors hand over and keep learning while their states are merged: all they learn counts once."""
    both, *pair = (trial.driver(trial.piece()) for _ in range(3))
    pieces = [player.piece for player in pair]
    handed: list[Any] = []
    for k, moment in enumerate(trial.before):
        both.see(moment)
        for i, player in enumerate(pair):
            player.watch(_share(trial, [moment], i))
        if k % 3 == 0:  # another moment comes before the states are merged
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


def _share(trial: EpisodeTrial, moments: list[Moment], i: int) -> list[Moment]:
    """Return the moments of the envs that the first or second of two connectors sees."""
    return [moment.of_envs(tuple(range(i, trial.num_envs, 2))) for moment in moments]


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


def check_config(trial: Trial) -> None:
    """The connector built from the config is equal, and continues from the state."""
    player = trial.player(training=True)
    if (built := _read_back(trial.report, player.piece)) is None:
        return
    other = trial.driver(trial.piece(built))
    trial.load(other.piece, player.watch(trial.before).piece.state_dict())
    trial.go_on(player, [other], "from one built from the config")


def _read_back(report: Report, piece: Connector) -> Connector | None:
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
