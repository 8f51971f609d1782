"""Every connector that marlvec ships keeps to the contract, by the same check that users run on theirs.

The check (`check_connector`) has laws of calls, batches, episodes, states, copies and configs; what is bit for bit, and
what is said of connectors that do not know their space yet, is here. What each connector computes is in its own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from marlvec import connectors as c
from marlvec.connectors import Connector, Rows
from marlvec.connectors.registry import catalogue
from marlvec.errors import ArgumentError, StateError
from marlvec.testing.check_connector import check_batched, check_connector, check_order
from marlvec.testing.connector_trial import EpisodeTrial, Moment, Report
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import same_tree

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
UNIT = Box(-2.0, 3.0, (2, 2), np.float64)
IMAGE = Box(0, 255, (8, 6, 3), np.uint8)
NESTED = Dict(place=Box(-9.0, 9.0, (2,)), rest=Tuple([Discrete(3, start=1), Box(0.0, np.inf, (1,), np.float64)]))
ARM = Dict(arm=Box(-1.0, 4.0, (2,), np.float32), gear=Discrete(3, start=-1))
CAMERA = Dict(
    eye=Box(0, 255, (5, 4, 3), np.uint8),
    heat=Box(-1, 1, (5, 4, 3)),
    place=Box(-9, 9, (2,), np.float64),
    rest=Tuple([Discrete(4, start=1), MultiBinary(2)]),
)
ROBOT = Dict(
    arm=Box(np.array([-2.0, 0.1], np.float32), np.array([3.0, 0.3], np.float32)),
    dial=Box(0, 9, (1,), np.int64),
    gear=Discrete(5, start=-2),
    head=Tuple([Box(-1, 1, (2, 1), np.float64), MultiDiscrete([[2, 3], [4, 1]], start=[[1, 0], [0, 5]])]),
    lights=MultiBinary(2),
)
STATE = Box(-np.inf, np.inf, (5,), np.float32)
WIDE_STATE = Box(-5, 5, (4,), np.float64)
NAMES = ("wolf_0", "wolf_1", "hare")
RNN = {"h": np.zeros(4, np.float32), "c": np.ones(2)}
RNN_OUT = Dict(h=Box(-1.0, 1.0, (4,)), c=Box(-1.0, 1.0, (2,), np.float64))
STATES = {"state_in": Box(-1.0, 1.0, (2,)), "state_out": Box(-1.0, 1.0, (2,))}


def _double(obs: Any, *_: Any) -> Any:
    return obs * 2


def _keep(rows: Rows) -> Any:
    return rows.obs[:, 0] > 0


def _value(rows: Rows) -> Any:
    return rows.obs[:, 0]


def _mine(obs: Any, agent: Any) -> Any:
    return obs * NAMES.index(agent)


def _mean(team_obs_nA: Any, team_mask_nA: Any, rows: Rows) -> Any:
    return team_obs_nA.sum(1) / team_mask_nA.sum(1, keepdims=True) - rows.obs


def _negate(actions: Any) -> Any:
    return map_tree(lambda leaf: -leaf, actions)


def _some_nan(rows: Rows) -> Any:
    return np.where(rows.obs[:, :1, None] > 0, np.nan, np.ones((len(rows), 2, 2)))


def _sequences() -> Connector:
    return c.LearnerPipeline([c.PadSequences(3), c.UnpadSequences()])


def _estimates() -> Connector:
    return c.LearnerPipeline([c.AddLastObs(), c.GeneralAdvantageEstimation(), c.VTrace()])


# Name, positional or keyword arguments, space, arguments of the check.
CASES: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("FlattenObs", (), NESTED, {}),
    ("FlattenObs", {"drop": ["rest/0"]}, NESTED, {}),
    ("NormalizeObs", (), NESTED, {}),
    ("NormalizeObs", {"per_agent": True, "clip": None}, VECTOR, {}),
    ("NormalizeObs", {"per_agent": True, "clip": None}, NESTED, {}),
    ("FrameStack", (3,), NESTED, {}),
    ("FrameStack", {"k": 2, "new_axis": True, "axis": 0, "pad": "repeat"}, IMAGE, {}),
    ("FrameStack", {"k": 3, "new_axis": True, "axis": 0, "pad": "repeat"}, NESTED, {}),
    ("AgentIndicator", (), VECTOR, {}),
    ("AgentIndicator", {"mode": "type"}, VECTOR, {"agents": NAMES}),
    ("ClipReward", {"sign": True}, VECTOR, {}),
    ("ClipReward", {"limit": 0.5}, VECTOR, {}),
    ("ActionMaskFromObs", (), Dict(observation=VECTOR, action_mask=MultiBinary(4)), {}),
    ("CastObs", ("float64",), NESTED, {}),
    ("CastObs", ("float32",), CAMERA, {}),
    ("CastObs", {"dtype": "int16", "keys": ["place", "eye"]}, CAMERA, {}),
    ("ClipObs", (-1.0, 1.0), NESTED, {}),
    ("ClipObs", (-0.5, 200), CAMERA, {}),
    ("DeathMask", (), NESTED, {}),
    ("DeathMask", (), CAMERA, {}),
    ("DeathMask", {"append": True}, VECTOR, {}),
    ("DelayObs", (2,), NESTED, {}),
    ("DropKeys", ("place",), NESTED, {}),
    ("DropKeys", ("heat", "place"), CAMERA, {}),
    ("FilterRows", (_keep, 0), VECTOR, {}),
    ("FrameSkip", (3,), NESTED, {}),
    ("GrayscaleObs", (), IMAGE, {}),
    ("GrayscaleObs", (), CAMERA, {}),
    ("GrayscaleObs", {"keep_axis": False}, IMAGE, {}),
    ("MapObs", (_double,), VECTOR, {}),
    ("MapReward", (_double,), VECTOR, {}),
    ("MaxObs", (3,), IMAGE, {}),
    ("NormalizeReward", (), VECTOR, {}),
    ("NormalizeReward", {"per_agent": True, "clip": None}, VECTOR, {}),
    ("OneHotObs", (), MultiDiscrete([2, 3]), {}),
    ("OneHotObs", (), CAMERA, {}),
    ("PadObs", (7,), VECTOR, {}),
    ("PadObs", ((5, 6, 3),), CAMERA, {}),
    ("PerAgent", (_double,), VECTOR, {}),
    ("PerAgent", (_mine,), VECTOR, {"agents": NAMES}),
    ("PrevActions", (3,), NESTED, {"action_space": ARM}),
    ("PrevActions", (2, True), VECTOR, {"action_space": Discrete(4, start=2)}),
    ("PrevRewards", (3,), NESTED, {}),
    ("PrevRewards", (2, True), VECTOR, {}),
    ("ReshapeObs", ((3, 1),), VECTOR, {}),
    ("ReshapeObs", {"shape": (-1, 3), "keys": ["eye", "heat"]}, CAMERA, {}),
    ("ResizeObs", ((4, 4),), IMAGE, {}),
    ("ResizeObs", ((5, 9), "linear"), IMAGE, {}),
    ("ResizeObs", ((5, 9), "nearest"), IMAGE, {}),
    ("ResizeObs", ((3, 3),), CAMERA, {}),
    ("ResizeObs", ((7, 2), "linear"), CAMERA, {}),
    ("ResizeObs", ((7, 2), "nearest"), CAMERA, {}),
    ("RnnState", (RNN,), VECTOR, {"columns": {"state_out": RNN_OUT}}),
    ("ScaleObs", (-1.0, 1.0), IMAGE, {}),
    ("ScaleObs", (-1, 1), CAMERA, {}),
    ("ScaleReward", (0.5, 1.0), VECTOR, {}),
    ("StateInObs", (STATE,), NESTED, {}),
    ("StateInObs", (STATE, "append"), VECTOR, {}),
    ("StateInObs", (WIDE_STATE, "append"), VECTOR, {"columns": {"state": WIDE_STATE}}),
    ("TeamObs", (), NESTED, {}),
    ("TeamObs", (), CAMERA, {}),
    ("TeamObs", (_mean, VECTOR), VECTOR, {}),
    ("TimeFeature", (10,), VECTOR, {}),
    ("TransposeObs", (), IMAGE, {}),
    ("TransposeObs", (), CAMERA, {}),
    ("View", ("before", "obs", "-3:0"), NESTED, {}),
    ("View", ("before", "actions", "-3:-1"), VECTOR, {"action_space": ARM}),
    ("View", ("before", "logp", -1, np.float32(0)), VECTOR, {}),
    ("View", ("before", "obs", [-4, -2], "repeat"), VECTOR, {}),
    ("ToNumpy", (), ARM, {}),
    ("UnsquashActions", (), ARM, {}),
    ("ClipActions", (), ARM, {}),
    ("ReadOnlyActions", (), ARM, {}),
    ("DiscretizeActions", (5,), UNIT, {}),
    ("DiscretizeActions", {"bins": [2, 3], "joint": True}, Box(-1.0, 4.0, (2,)), {}),
    ("DiscretizeActions", (2,), ROBOT, {}),
    ("EpsilonGreedy", (0.5,), Discrete(5), {}),
    ("EpsilonGreedy", {"epsilon": 0.9, "final": 0.1, "decay_steps": 5}, Discrete(5, start=2), {}),
    ("EpsilonGreedy", {"epsilon": 0.9, "final": 0, "decay_steps": 3}, ROBOT, {}),
    ("GaussianNoise", (0.5,), ARM, {}),
    ("GaussianNoise", {"std": 0.9, "final": 0.1, "decay_steps": 5}, UNIT, {}),
    ("GaussianNoise", {"std": 0.5, "final": 0.01, "decay_steps": 4}, ROBOT, {}),
    ("MapActions", (lambda actions: actions * 1,), UNIT, {}),
    ("MapActions", (_negate,), Box(-1, 1, (2,)), {}),
    ("MaskInvalid", (), Discrete(5), {}),
    ("MaskInvalid", ("random",), MultiDiscrete([2, 3]), {}),
    ("MaskInvalid", ("random",), MultiDiscrete([3, 4], start=[1, -1]), {}),
    ("OrnsteinUhlenbeckNoise", (), ARM, {}),
    ("OrnsteinUhlenbeckNoise", {"sigma": 2, "clip": True}, ROBOT, {}),
    ("PadActions", (9,), Discrete(5), {}),
    ("PadActions", {"n": 6, "invalid": 1}, ROBOT, {}),
    ("RepeatActions", (3,), ARM, {}),
    ("RepeatActions", (3,), ROBOT, {}),
    ("ReplaceNaN", ("random",), ARM, {}),
    ("ReplaceNaN", (), ROBOT, {}),
    ("ReplaceNaN", ("random",), UNIT, {"columns": {"actions": _some_nan}}),
    ("StickyActions", (0.5,), ARM, {}),
    ("StickyActions", {"p": 0.5, "seed": 7}, ROBOT, {}),
    ("AddLastObs", (), VECTOR, {}),
    ("AddView", ("around", "obs", "-2:2"), VECTOR, {}),
    ("GeneralAdvantageEstimation", (), VECTOR, {}),
    ("GeneralAdvantageEstimation", {"value_function": _value}, VECTOR, {}),
    ("NStep", (3,), VECTOR, {}),
    ("PadSequences", (3,), VECTOR, {"columns": STATES}),
    ("ReturnsToGo", {"bootstrap": True}, VECTOR, {}),
    ("Standardize", (), VECTOR, {}),
    ("VTrace", (), VECTOR, {}),
]
CHAINS: list[tuple[Callable[[], Connector], dict[str, Any]]] = [
    (_sequences, {"columns": STATES}),
    (_estimates, {}),
    (c.ActionPipeline.default, {}),
    (c.ActionPipeline.default, {"space": ROBOT}),
]


def _make(name: str, args: Any) -> Connector:
    cls = getattr(c, name)
    piece: Connector = cls(**args) if isinstance(args, dict) else cls(*args)
    return piece


each_case = pytest.mark.parametrize(
    ("name", "args", "space", "more"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(94)
@each_case
def test_it_keeps_to_the_contract(name: str, args: Any, space: Any, more: dict[str, Any]) -> None:
    check_connector(lambda: _make(name, args), space, **more)


def _trial(name: str, args: Any, space: Any, more: dict[str, Any]) -> EpisodeTrial:
    given = {"action_space": Discrete(4), "agents": NAMES, "columns": {}, **more}
    trial = EpisodeTrial(lambda: _make(name, args), space, num_envs=4, seed=0, **given)
    trial.learn()
    return trial


each_of_actors = pytest.mark.parametrize(
    ("name", "args", "space", "more"),
    [case for case in CASES if not issubclass(getattr(c, case[0]), c.LearnerConnector)],
    ids=lambda value: value if isinstance(value, str) else "",
)


@pytest.mark.checklist(94)
@each_of_actors
def test_a_batch_is_its_rows_one_by_one_bit_for_bit(
    name: str, args: Any, space: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows in one call, in any order, against each row (each env, where it looks across agents) in its own call."""
    compare = Report.compare
    monkeypatch.setattr(Report, "compare", lambda *args, near=False: compare(*args))
    trial = _trial(name, args, space, more)
    check_batched(trial)
    check_order(trial)


@each_of_actors
def test_a_reset_alone_begins_an_episode(name: str, args: Any, space: Any, more: dict[str, Any]) -> None:
    """What is remembered goes, though no row says that it is the first; what was learnt stays, and decays go on."""
    if "decay_steps" in args:
        return
    trial = _trial(name, args, space, more)
    moments = [Moment(moment.rows.drop("first"), moment.answer) for moment in trial.moments()]
    used, fresh = trial.player(), trial.player()
    for moment in moments[:6]:
        used.see(moment)
    used.reset(None)
    for moment in moments[6:]:
        same_tree(used.see(moment), fresh.see(moment))


def _spoilt(state: Any) -> Any:
    """The same state whose last array has one axis more."""
    if isinstance(state, np.ndarray):
        return state[..., None]
    keys = list(state) if isinstance(state, dict) else range(len(state))
    last = next(key for key in reversed(keys) if isinstance(state[key], (dict, list, np.ndarray)))
    changed = {key: _spoilt(state[key]) if key == last else state[key] for key in keys}
    return changed if isinstance(state, dict) else list(changed.values())


@each_of_actors
def test_foreign_state_is_rejected_as_a_whole(name: str, args: Any, space: Any, more: dict[str, Any]) -> None:
    trial = _trial(name, args, space, more)
    used, other = trial.player(), trial.player()
    for moment in trial.moments()[:4]:
        used.see(moment)
    other.see(trial.moments()[0])
    state, before = used.piece.state_dict(), other.piece.state_dict()
    for wrong in [{"x": 1}, *([_spoilt(state)] if state else [])]:
        with pytest.raises(ArgumentError):
            other.piece.load_state_dict(wrong)
        same_tree(other.piece.state_dict(), before)


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.parametrize(("make", "more"), CHAINS, ids=lambda value: getattr(value, "__name__", ""))
def test_and_so_do_chains(make: Callable[[], Connector], more: dict[str, Any]) -> None:
    check_connector(make, **more)


@each_case
def test_it_keeps_its_arguments_under_their_names(name: str, args: Any, space: Any, more: dict[str, Any]) -> None:
    piece = _make(name, args)
    params = piece.params()
    assert repr(_make(name, params["paths"] if name == "DropKeys" else params)) == repr(piece)


FIRST = {case[0]: case[1] for case in reversed(CASES)} | {"PrevRewards": {"into_obs": True}}
NEED_NO_SPACE = {"ClipReward", "FilterRows", "FrameSkip", "MapActions", "MapReward", "NormalizeReward"} | {
    *("ReadOnlyActions", "RnnState", "ScaleReward", "StateInObs"),
    *(name for name in FIRST if issubclass(getattr(c, name), c.LearnerConnector)),
}
NEED_IT_FOR_A_STATE = {"DelayObs", "FrameStack", "MaxObs", "NormalizeObs", "OrnsteinUhlenbeckNoise", "PrevActions"} | {
    *("RepeatActions", "StickyActions", "TeamObs", "View")
}


@pytest.mark.parametrize("name", FIRST)
def test_connector_without_a_space_raises_and_has_no_state(name: str) -> None:
    piece, ones = _make(name, FIRST[name]), np.ones(1, np.int64)
    rows = Rows(env_id=ones, agent_index=ones, t=ones, obs=ones[:, None], actions=ones, actions_for_env=ones)
    if name not in NEED_NO_SPACE:
        with pytest.raises(StateError, match=f"{name} does not know its space"):
            piece(rows.replace(rewards=ones, terminated=ones > 0, action_mask=ones[:, None] > 0))
    if name in NEED_IT_FOR_A_STATE:
        assert piece.state_dict() == {}
        with pytest.raises(StateError, match=f"{name} does not know its space"):
            piece.load_state_dict({"from_policy": False, "history": {}} if name == "View" else {})


def test_all_were_tried() -> None:
    # UnpadSequences takes nothing but what PadSequences gave, and was tried behind it.
    assert {case[0] for case in CASES} | {"UnpadSequences"} == {row.name for row in catalogue()}
