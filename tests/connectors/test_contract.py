"""Every connector that marlvec ships keeps to the contract, by the same check that users run on theirs.

The check (`check_connector`) has laws of calls, batches, episodes, states, copies and configs; what is bit for bit, and
what is said of connectors that do not know their space yet, is here. What each connector computes is in its own tests.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple
from numpy.typing import NDArray

from benchmarks import connector_cases as measured
from benchmarks import connector_peers as peers
from benchmarks.connector_cases import AGENTS, QUESTIONS, SMALL, WIDTH, Case, chains
from marlvec import connectors
from marlvec import connectors as c
from marlvec.connectors import AgentConnector, Connector, Rows
from marlvec.connectors.connector import EnvIds, State
from marlvec.connectors.registry import SIDES, CatalogueRow, catalogue
from marlvec.errors import ArgumentError, StateError, UnsupportedSpaceError
from marlvec.spaces import AnyText
from marlvec.testing.check_connector import check_batched, check_connector, check_order
from marlvec.testing.connector_trial import EpisodeTrial, TrialReport, TrialStep
from marlvec.trees import map_tree
from tests.connectors.samples import pairs_of, rows_of, same_tree, vectors
from tests.vector.support.reference import refused

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
TALK = Dict(heard=AnyText(5, examples=["", "a", "b c"]), place=VECTOR, said=spaces.Text(4))
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
    ("Template", ("<{obs}|{obs}>",), TALK, {}),
    ("Template", {"template": "{obs}.", "keys": ["heard"]}, TALK, {}),
    ("History", {"keep": 2}, TALK, {}),
    ("History", {"max_chars": 9, "separator": ";"}, AnyText(6), {}),
    ("History", {"keep": 3, "max_chars": 8, "keys": ["said"]}, TALK, {}),
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
    compare = TrialReport.compare
    monkeypatch.setattr(TrialReport, "compare", lambda *args, near=False: compare(*args))
    trial = _trial(name, args, space, more)
    check_batched(trial)
    check_order(trial)


@each_of_actors
def test_a_reset_alone_begins_an_episode(name: str, args: Any, space: Any, more: dict[str, Any]) -> None:
    """What is remembered goes, though no row says that it is the first; what was learnt stays, and decays go on."""
    if "decay_steps" in args:
        return
    trial = _trial(name, args, space, more)
    steps = [TrialStep(step.rows.drop("first"), step.answer) for step in trial.steps()]
    used, fresh = trial.player(), trial.player()
    for step in steps[:6]:
        used.see(step)
    used.reset(None)
    for step in steps[6:]:
        same_tree(used.see(step), fresh.see(step))


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
    for step in trial.steps()[:4]:
        used.see(step)
    other.see(trial.steps()[0])
    state, before = used.piece.state_dict(), other.piece.state_dict()
    for wrong in [{"x": 1}, *([_spoilt(state)] if state else [])]:
        refused(ArgumentError, "", other.piece.load_state_dict, wrong)
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


class LastAction(c.AgentConnector):
    """Appends the agent's last action to its observation, and learns how many rows there were for each policy."""

    def __init__(self) -> None:
        self.table = c.AgentTable((1,), np.float32)
        self.seen = np.zeros(4, np.int64)

    def __call__(self, rows: c.Rows) -> c.Rows:
        if self.training:
            np.add.at(self.seen, rows.policy_index, 1)
        return rows.replace(obs=np.concatenate([rows.obs, self.table.get(rows.env_id, rows.agent_index)], axis=1))

    def output_space(self, space: Space[Any]) -> Space[Any]:
        assert isinstance(space, Box)
        return vectors(space.shape[0] + 1)

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self.table.reset(env_ids)

    def on_policy_output(self, rows: c.Rows) -> None:
        self.table.set(rows.env_id, rows.agent_index, rows.actions[:, None])

    def state_dict(self) -> State:
        return {"table": self.table.state_dict(), "seen": self.seen.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
        self.seen = np.array(state["seen"])

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        return {"table": self.table.state_dict(), "seen": np.sum([s["seen"] for s in states], axis=0)}


def rows_at(pairs: list[tuple[int, int]], policy: int = 0) -> c.Rows:
    ids = np.array(pairs)
    return rows_of(pairs, ids.astype(np.float32), policy_index=np.full(len(pairs), policy))


@pytest.mark.checklist(79)
def test_a_connector_has_a_batched_call_with_ids_reset_policy_output_mode_state_and_a_space_rule() -> None:
    """A user's connector uses each hook through a pipeline, and each one reaches it as the contract says."""
    piece = LastAction()
    pipeline = c.AgentPipeline([piece])
    pipeline.bind(vectors(2))
    assert pipeline.output_space_ == vectors(3)

    everyone = pairs_of(3, 2)
    out = pipeline(rows_at(everyone))
    assert out.obs.shape == (6, 3)
    assert out.obs[:, 2].tolist() == [0] * 6
    pipeline.on_policy_output(out.replace(actions=np.arange(1.0, 7.0)))
    some = [(2, 1), (0, 0), (1, 1)]
    out = pipeline(rows_at(some, policy=3))
    assert out.obs.tolist() == [[2, 1, 6], [0, 0, 1], [1, 1, 4]]

    pipeline.reset([1])
    assert pipeline(rows_at(everyone)).obs[:, 2].tolist() == [1, 2, 0, 0, 5, 6]
    assert piece.seen.tolist() == [12, 0, 0, 3]

    pipeline.eval()
    assert not piece.training
    pipeline(rows_at(everyone))
    assert piece.seen.tolist() == [12, 0, 0, 3]
    pipeline.train()
    assert piece.training

    other = c.AgentPipeline([LastAction()])
    other.bind(vectors(2))
    other.load_state_dict(pipeline.state_dict())
    same_tree(other.state_dict(), pipeline.state_dict())
    assert other(rows_at(some)).obs.tolist() == pipeline(rows_at(some)).obs.tolist()
    merged = pipeline.merge_states([pipeline.state_dict(), other.state_dict()])
    assert merged["LastAction"]["seen"].tolist() == [30, 0, 0, 6]
    pipeline.load_state_dict(merged)
    assert piece.seen.tolist() == [30, 0, 0, 6]


def test_the_defaults_of_a_connector() -> None:
    class Plain(c.AgentConnector):
        def __call__(self, rows: c.Rows) -> c.Rows:
            return rows

    piece = Plain()
    piece.setup(vectors())
    piece.reset([0])
    piece.on_policy_output(c.Rows())
    assert piece.state_dict() == piece.merge_states([{}, {}]) == {}
    piece.load_state_dict({})
    refused(ArgumentError, r"Plain has no state, got \['x'\]", piece.load_state_dict, {"x": 1})
    assert piece.output_space(vectors()) == vectors()
    assert piece.name == "Plain"
    assert repr(piece) == "Plain()"
    assert piece.eval().training is False
    assert piece.train().training is True
    with pytest.raises(TypeError):
        c.AgentConnector()  # type: ignore[abstract]  # that it cannot be made is the point


def test_a_function_is_a_connector() -> None:
    @c.agent_connector
    def double(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs * 2)

    @c.agent_connector(name="wider", output_space=lambda space: vectors(4))
    def widen(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=np.concatenate([rows.obs, rows.obs[:, :1]], axis=1))

    assert isinstance(double, c.AgentConnector)
    assert (double.name, widen.name, repr(double)) == ("double", "wider", "double")
    pipeline = c.AgentPipeline([double, widen, double])
    pipeline.bind(vectors(3))
    assert pipeline.names == ("double", "wider", "double_2")
    assert pipeline.output_space_ == vectors(4)
    assert pipeline(c.Rows(obs=np.ones((2, 3), np.float32))).obs.tolist() == [[4, 4, 4, 4]] * 2


def test_a_function_is_an_action_connector() -> None:
    @c.action_connector(policy_space=lambda space: Box(0, 1, (2,)))
    def halve(rows: c.Rows) -> c.Rows:
        return rows.replace(actions_for_env=rows.actions_for_env / 2)

    @c.action_connector
    def same(rows: c.Rows) -> c.Rows:
        return rows

    assert isinstance(same, c.ActionConnector)
    assert (same.name, repr(halve)) == ("same", "halve")
    pipeline = c.ActionPipeline([halve, same])
    pipeline.bind(Box(0, 0.5, (2,)))
    assert pipeline.policy_space_ == Box(0, 1, (2,))
    assert pipeline.env_space == Box(0, 0.5, (2,))
    out = pipeline(c.Rows(actions=np.ones((1, 2))))
    assert out.actions_for_env.tolist() == [[0.5, 0.5]]
    assert out.actions.tolist() == [[1, 1]]


def test_only_functions_can_be_decorated() -> None:
    with pytest.raises(ArgumentError, match="expected a function"):
        c.agent_connector(3)  # type: ignore[call-overload]  # a wrong argument is the point


# --- The catalogue is what ``marlvec.connectors`` exports, no more and no less


NOT_PIECES = {
    "Connector",
    "AgentConnector",
    "ActionConnector",
    "LearnerConnector",
    "Pipeline",
    "AgentPipeline",
    "ActionPipeline",
    "LearnerPipeline",
    "RowFilter",
    "FunctionAgentConnector",
    "FunctionActionConnector",
    "FunctionLearnerConnector",
}


def test_every_exported_connector_is_in_it_once() -> None:
    classes = {
        name
        for name in connectors.__all__
        if inspect.isclass(getattr(connectors, name)) and issubclass(getattr(connectors, name), connectors.Connector)
    }
    assert sorted(row.name for row in catalogue()) == sorted(classes - NOT_PIECES)


def test_each_says_its_side_and_what_it_does_in_one_line() -> None:
    rows = catalogue()
    assert CatalogueRow("action", "ToNumpy", "Converts every column that is not numpy to arrays, leaf by leaf") in rows
    for side, name, line in rows:
        assert issubclass(getattr(connectors, name), SIDES[side])
        assert 10 < len(line) <= 140, (name, line)
        assert "\n" not in line
    assert [row.side for row in rows] == sorted((row.side for row in rows), key=list(SIDES).index)


def test_it_can_be_searched_by_name_and_side() -> None:
    assert [row.name for row in catalogue("NORMALIZEo")] == ["NormalizeObs"]
    assert {row.side for row in catalogue(side="action")} == {"action"}
    assert catalogue("FrameStack", "action") == catalogue("no such") == []
    refused(ArgumentError, r"expected a side of \['agent', 'action', 'learner'\], got 'env'", catalogue, side="env")


def test_a_new_piece_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newcomer(AgentConnector):
        """Does
        this and that.

        And says more. Much more.
        """

        def __call__(self, rows: Rows) -> Rows:
            return rows

    monkeypatch.setattr(connectors.agent, "Newcomer", Newcomer, raising=False)
    monkeypatch.setattr(connectors.agent, "__all__", [*connectors.agent.__all__, "Newcomer"])
    assert CatalogueRow("agent", "Newcomer", "Does this and that") in catalogue()


# --- What connectors refuse, and in which words: arguments when they are made, spaces when their pipeline is bound


INF, NAN = np.inf, np.nan
IN_BOUNDS = Box(-1, 1, (2,))
BYTES = Box(0, 255, (2, 3), np.uint8)
OPEN = Box(-INF, INF, (2,))
PADDED = spaces.Dict({"a": Box(1, 2, (2,)), "b": Box(-1, 1, (1, 2), np.float64), "c": BYTES})
EYES = spaces.Dict({"eye": spaces.Dict({"l": IN_BOUNDS, "on": Discrete(2)}), "ear": IN_BOUNDS})
SEEN = spaces.Dict(
    [("z", IN_BOUNDS), ("eye", spaces.Dict({"l": IN_BOUNDS, "r": IN_BOUNDS})), ("t", spaces.Tuple([IN_BOUNDS]))]
)
MASKED = spaces.Dict({"observation": IN_BOUNDS, "action_mask": MultiBinary(4)})
WORDS = spaces.Dict({"say": Text(3), "go": Discrete(2)})
FLAT = spaces.Dict({"a": Discrete(2), "ab": spaces.Tuple([Discrete(2)])})


def first(value: Any) -> Any:
    return value


# Connectors, each of some arguments (positional, or by keyword), and what the ArgumentError says.
ARGUMENTS: list[tuple[str, list[Any], str]] = [
    ("AgentIndicator", [{"mode": "x"}], "mode must be"),
    ("AgentIndicator", [{"types": ["a"]}], 'only used with mode="type"'),
    ("CastObs", [("colour",)], "one of numpy's"),
    ("CastObs", [("bool",), (np.complex64,)], "floats or ints"),
    ("ClipObs", [()], "give low, high or both"),
    ("ClipObs", [(2, 1), (NAN, 1)], "low must not be above high"),
    ("ClipReward", [(), {"sign": True, "limit": 1.0}], "give sign=True or a limit"),
    ("ClipReward", [{"limit": 0.0}, {"limit": -1.0}, {"limit": NAN}], "limit must be above 0"),
    ("DelayObs", [(-1,)], "k must be a whole number of at least 0, got -1"),
    ("DropKeys", [()], "at least one path"),
    ("FilterRows", [([True],)], "keep must be a function of rows, got list"),
    ("FilterRows", [(first, "wait")], "noop must be an action or \"repeat\", got 'wait'"),
    ("FlattenObs", [{"keys": ["a"], "drop": ["b"]}], "not both"),
    ("FrameSkip", [(0,)], "k must be at least 1, got 0"),
    ("FrameStack", [(0,), (1.5,), (True,)], "k must be a whole number of at least 1, got"),
    ("FrameStack", [{"k": 2, "pad": "none"}], 'pad must be "zero" or "repeat"'),
    ("MapObs", [(3,)], "MapObs takes a function, got int"),
    ("MapObs", [(first, 3)], "output_space must be a space, a function"),
    ("MapReward", [(3,)], "wants a function of rewards, got int"),
    ("MaxObs", [(0,), (1.5,), (True,)], "k must be a whole number of at least 1, got"),
    ("NormalizeObs", [{"clip": 0.0}, {"clip": -1.0}, {"clip": NAN}, {"epsilon": 0.0}], "must be above 0"),
    ("NormalizeReward", [(-0.1,), (1.1,), (NAN,)], "gamma must be from 0 to 1"),
    ("NormalizeReward", [{"epsilon": 0.0}, {"clip": 0.0}, {"clip": NAN}], "must be above 0"),
    ("PadObs", [((-1,),)], "lengths of at least 0"),
    ("PerAgent", [(3,)], "PerAgent takes a function, got int"),
    ("PerAgent", [(first, 3)], "output_space must be a space, a function"),
    ("PrevActions", [(0,)], "n must be a whole number of at least 1, got 0"),
    ("PrevRewards", [(0,)], "n must be a whole number of at least 1, got 0"),
    ("ReshapeObs", [((-2,),), ((-1, -1),)], "of which one may be -1"),
    ("ResizeObs", [((84,),), ((0, 3),), ((84, 84, 3),)], "size must be"),
    ("ResizeObs", [((2, 2), "cubic")], "method must be"),
    ("ScaleObs", [(1, 1), (2, 1), (0, INF), (NAN, 1)], "low must be below high and both finite"),
    ("ScaleReward", [(NAN,), (INF,), (1.0, INF)], "scale and shift must be finite"),
    ("StateInObs", [(OPEN, "front")], "mode must be"),
    ("StateInObs", [(3,)], "state_space must be a space"),
    ("TeamObs", [(first,), (None, OPEN)], "function and output_space: expected both or neither"),
    ("TeamObs", [(3, OPEN)], "TeamObs takes a function, got int"),
    ("TimeFeature", [(0,), (-1,), (NAN,)], "horizon must be above 0"),
    ("TransposeObs", [((0, 0),), ((1, 2),), ((-1, 0),)], "once, got"),
    ("View", [("x", "obs", 1)], "looks ahead.*use AddView on the learner side"),
    ("View", [("x", "obs", "0:2")], "looks ahead"),
    ("View", [("x", "obs", "0:k")], "a shift is an int"),
    ("View", [("x", "obs", [])], "at least one shift"),
    ("View", [("x", "actions", 0)], "asks for the action that is still to be chosen"),
    ("View", [("x", "actions", -1, "repeat"), ("x", "obs", -1, "zero")], "fill must be None"),
    ("View", [("obs", "obs", -1), ("t", "obs", -1)], "belongs to the row itself"),
    ("DiscretizeActions", [(n,) for n in (1, 0, -3, 2.0, True, "3", [], [2, 1], [[2, 2]])], "bins must be ints from 2"),
    ("EpsilonGreedy", [(1.5,), (-0.1,), (NAN,)], "epsilon must be a probability"),
    ("EpsilonGreedy", [{"epsilon": 0.5, "final": 2, "decay_steps": 1}], "final must be a probability"),
    ("EpsilonGreedy", [{"epsilon": 0.5, "decay_steps": 5}], "give final and decay_steps, or neither"),
    ("GaussianNoise", [(s,) for s in (-1, NAN, INF, [[1.0]], [0.1, -0.1])], "std must be a number from 0 on"),
    ("GaussianNoise", [{"std": 1, "final": -1, "decay_steps": 3}], "final must be a number from 0 on"),
    ("GaussianNoise", [{"std": 1, "final": 0}], "give final and decay_steps, or neither"),
    (
        "GaussianNoise",
        [{"std": 1, "final": 0, "decay_steps": 0}],
        "decay_steps must be a whole number of at least 1.*, got 0",
    ),
    ("MapActions", [(3,)], "MapActions takes a function, got int"),
    ("MapActions", [(first, 3)], "policy_space must be a space, a function from space to space, or None; got int"),
    ("MaskInvalid", [("last",)], 'fallback must be "first", "random" or "raise"'),
    ("OrnsteinUhlenbeckNoise", [(-1,), (NAN,), (1, -1), (1, INF), (1, 1, 0)], "theta and sigma must be numbers from 0"),
    ("PadActions", [(0,), (-1,), (2.5,), (True,), (None,)], "n must be a whole number of at least 1"),
    ("RepeatActions", [(0,), (1.5,), (True,), ("2",)], "k must be a whole number of at least 1"),
    ("ReplaceNaN", [(0,)], 'fill must be "zeros", "random" or "raise", got 0'),
    ("StickyActions", [(-0.1,), (1.1,), (NAN,)], "p must be a probability"),
    ("AddView", [("y", "x", "0:k")], "a shift is an int"),
    ("AddView", [("y", "x", 1, "zeros")], 'fill must be None, "repeat" or one row\'s value'),
    ("GeneralAdvantageEstimation", [(-0.1,), (1.1,), (NAN,)], "gamma must be from 0 to 1, got"),
    ("GeneralAdvantageEstimation", [(0.9, -0.1), (0.9, 1.1), (0.9, NAN)], "gae_lambda must be from 0 to 1, got"),
    ("NStep", [(1, -0.1), (1, 1.1), (1, NAN)], "gamma must be from 0 to 1, got"),
    ("NStep", [(0,), (-1,), (1.5,), (True,), ("2",)], "n must be a whole number of at least 1, got"),
    ("PadSequences", [(0,), (-2,), (2.0,), (False,), ("3",)], "max_len must be a whole number of at least 1, got"),
    ("ReturnsToGo", [(-0.1,), (1.1,), (NAN,)], "gamma must be from 0 to 1, got"),
    ("Standardize", [{"epsilon": -1.0}], "epsilon must be at least 0"),
    ("VTrace", [(0.9, 1.0, 2.0), (0.9, 1.0, 0.0), (0.9, NAN, 1.0), (0.9, -1.0, -2.0)], "expected 0 < c_bar <= rho_bar"),
    ("VTrace", [(2.0,)], "gamma must be from 0 to 1"),
]

SpaceCase = tuple[str, Any, list[Any], str]
NO_VECTOR = [Box(0, 1, (2, 2)), Box(0, 1, ()), Discrete(3)]
# Connectors with their arguments, each on some spaces, and what the UnsupportedSpaceError says.
SPACES: list[SpaceCase] = [
    ("ActionMaskFromObs", ("observation",), [spaces.Dict(observation=Discrete(3), x=OPEN)], r"or Box of shape \(k,\)"),
    ("ActionMaskFromObs", ("a",), [spaces.Dict(a=MultiBinary([2, 2]), x=OPEN)], r"MultiBinary or Box of shape \(k,\)"),
    ("ActionMaskFromObs", ("a",), [spaces.Dict(a=spaces.Dict(b=OPEN), x=OPEN)], "got None"),
    ("ActionMaskFromObs", (), [OPEN], "needs a Dict"),
    ("ActionMaskFromObs", (), [MASKED], r"found a mask of 4 actions for Discrete\(3\)"),
    ("AgentIndicator", (2,), NO_VECTOR, "needs a vector to append to: put FlattenObs before it"),
    ("CastObs", ("uint8",), [Box(-1, 255, (2,)), OPEN], r"the bounds of the value, Box \(2,\).* do not fit uint8"),
    ("CastObs", ("uint8",), [Box(0, 256, (2,), np.int64)], "do not fit uint8"),
    ("CastObs", ("int64",), [Box(0.0, 2.0**63, (1,), np.float64)], "do not fit int64"),
    ("ClipObs", (0.2, 0.8), [BYTES], "no uint8 of the value lies between"),
    ("ClipObs", (256, 300), [BYTES], "no uint8 of the value lies between"),
    ("ClipObs", (-9, -1), [BYTES], "no uint8 of the value lies between"),
    ("DeathMask", {"append": True}, [Discrete(2)], "put FlattenObs before it"),
    ("DeathMask", (), [Text(3)], "no fixed size"),
    ("DelayObs", (1,), [Text(3)], "cannot keep the value of Text, which has no fixed size"),
    ("DropKeys", ("a",), [OPEN], "needs a Dict to take keys out of"),
    ("FlattenObs", (), [Text(3)], "no fixed size and cannot be part of a vector"),
    ("FrameStack", {"k": 2, "axis": 1}, [OPEN], "axis 1 does not exist"),
    ("FrameStack", (2,), [Text(3)], "cannot keep the value of Text, which has no fixed size"),
    ("GrayscaleObs", (), [Box(0, 1, (4, 4)), Box(0, 1, (4, 4, 4)), Box(0, 1, (3,))], "put TransposeObs"),
    ("MaxObs", (), [Discrete(2)], "found no Box or MultiBinary in Discrete"),
    ("NormalizeObs", (), [Discrete(3), Text(3)], "found no Box in .*put FlattenObs before it"),
    ("PadObs", ((1, 9),), [PADDED], "leaf 'c' of shape .* is larger already"),
    ("PadObs", ((1, 1, 1),), [PADDED], "Boxes of 3 axes"),
    ("PrevActions", {"into_obs": True}, [Discrete(2)], "put FlattenObs before it"),
    ("PrevRewards", {"into_obs": True}, [Discrete(2)], "put FlattenObs before it"),
    ("ReshapeObs", ((5,),), [BYTES], r"cannot give the value of shape \(2, 3\) that shape; name .*keys="),
    (
        "ReshapeObs",
        {"shape": (2, 1), "keys": ["ear", "eye/on"]},
        [EYES],
        "works on Boxes, and there is none at 'eye/on' of",
    ),
    ("ResizeObs", ((2, 2),), [Box(0, 1, (4,)), Box(0, 1, (2,) * 4), MultiBinary([3, 3])], "works on images"),
    ("ScaleObs", (), [OPEN, Box(0, INF, (2,)), Discrete(3)], "bounds at both ends, and there is none in .*ClipObs"),
    ("StateInObs", (Discrete(3), "append"), [OPEN], 'use mode="dict", then FlattenObs'),
    ("StateInObs", (OPEN, "append"), [Discrete(3)], "put FlattenObs before it"),
    ("TeamObs", (), [Text(3)], "no fixed size"),
    ("TimeFeature", (4,), [Discrete(3)], "put FlattenObs before it"),
    ("View", ("x", "obs", -1), [Text(3)], "has no fixed size"),
    ("DiscretizeActions", (3,), [Discrete(3)], "needs a Box, got Discrete"),
    ("DiscretizeActions", (3,), [Box(0, INF, (2,))], "needs bounds, got .*MapActions"),
    ("DiscretizeActions", ([3, 3],), [Box(0, 1, (3,))], "bins has 2 numbers for the 3 elements"),
    ("DiscretizeActions", (8,), [Box(-3, 3, (1,), np.int8)], "8 bins are more than the 7 ints from -3 to 3"),
    ("DiscretizeActions", {"bins": 9, "joint": True}, [Box(0, 1, (30,))], "joint choices .* are too many"),
    ("EpsilonGreedy", (), [OPEN], "needs a Discrete or MultiDiscrete.*GaussianNoise"),
    ("GaussianNoise", ([1, 2, 3],), [IN_BOUNDS], "std has 3 numbers for the 2 elements"),
    ("GaussianNoise", (), [Discrete(3), Box(0, 9, (1,), np.int64)], "GaussianNoise needs a Box of floats.*EpsilonGre"),
    ("OrnsteinUhlenbeckNoise", (), [Discrete(3), Box(0, 9, (1,), np.int64)], "needs a Box of floats.*EpsilonGreedy"),
    ("PadActions", (2,), [Discrete(3)], "fewer choices than the env's.*give it 3 at least"),
    ("PadActions", (5,), [OPEN], "make.*pad=True"),
    ("RepeatActions", (2,), [WORDS], "cannot keep leaf 'say' of Text, which has no fixed size"),
    ("StickyActions", (), [WORDS], "cannot keep leaf 'say' of Text, which has no fixed size"),
]
# The same, where not the space but an argument is at fault: the ArgumentError.
ARGUMENTS_ON_SPACES: list[SpaceCase] = [
    ("ActionMaskFromObs", ("mask",), [MASKED], "no key 'mask' in the space"),
    ("ActionMaskFromObs", (), [spaces.Dict(action_mask=MultiBinary(4))], "leaves nothing"),
    ("AgentIndicator", (), [OPEN], "the agents are not known"),
    ("AgentIndicator", (0,), [OPEN], "the agents are not known"),
    ("AgentIndicator", {"agents": 2, "mode": "type"}, [OPEN], "need agents by name"),
    ("AgentIndicator", {"agents": 2, "mode": "type", "types": {"a": "x"}}, [OPEN], "need agents by name"),
    ("AgentIndicator", {"agents": "ab", "mode": "type", "types": {"a": 1}}, [OPEN], r"no type is given .* \['b'\]"),
    ("AgentIndicator", {"agents": 2, "mode": "type", "types": ["x"]}, [OPEN], "1 types are given for 2 agents"),
    ("DropKeys", ("nose",), [SEEN], r"no key 'nose' in the space; its keys are \['z', 'eye', 'eye/l', .*'t', 't/0'\]"),
    ("DropKeys", ("eye/l", "eye/r"), [SEEN], "leaves nothing of 'eye'; drop 'eye' itself"),
    ("DropKeys", ("z", "eye", "t"), [SEEN], "leaves nothing of 'the observation'"),
    ("DropKeys", ("t/0",), [SEEN], "'t/0' is an entry of a Tuple"),
    ("FlattenObs", {"keys": ["b"]}, [FLAT], r"no key '.*' in the space; its leaves are \['a', 'ab/0'\]"),
    ("FlattenObs", {"drop": ["ab/1"]}, [FLAT], r"no key '.*' in the space; its leaves are \['a', 'ab/0'\]"),
    ("MapObs", (first, lambda space: None), [OPEN], "the output_space of MapObs must return a space, got NoneType"),
    ("PrevActions", (), [None], r"does not know the action space: .*bind\(space, agents, action_space\)"),
    ("ReshapeObs", {"shape": (2, 1), "keys": ["ey"]}, [EYES], r"no key 'ey' .* its leaves are \['ear', 'eye/l'"),
    ("View", ("x", "actions", -1), [None], "does not know the action space"),
    ("TeamObs", (), [None], "the agents are not known"),
    ("PadActions", {"n": 5, "invalid": 3}, [Discrete(3)], "invalid=3 must be an action of .*: 0 to 2"),
    ("PadActions", {"n": 5, "invalid": 0}, [Discrete(3, start=1)], "invalid=0 must be an action"),
]


def made(name: str, args: Any) -> Any:
    return getattr(c, name)(**args) if isinstance(args, dict) else getattr(c, name)(*args)


@pytest.mark.parametrize(("name", "arguments", "text"), ARGUMENTS)
def test_arguments(name: str, arguments: list[Any], text: str) -> None:
    for args in arguments:
        refused(ArgumentError, text, made, name, args)


@pytest.mark.parametrize(
    ("error", "name", "args", "bad", "text"),
    [*((UnsupportedSpaceError, *case) for case in SPACES), *((ArgumentError, *case) for case in ARGUMENTS_ON_SPACES)],
)
def test_spaces(error: type[Exception], name: str, args: Any, bad: list[Any], text: str) -> None:
    """On None, a vector is given alone, without agents and actions."""
    for space in bad:
        piece = made(name, args)
        known = () if space is None or name == "AgentIndicator" else (("a", "b"), Discrete(3))
        with pytest.raises(error, match=text) as raised:
            if isinstance(piece, c.ActionConnector):
                c.ActionPipeline([piece]).bind(space)
            else:
                c.AgentPipeline([piece]).bind(vectors() if space is None else space, *known)
        assert f"in connector '{name}' of " in raised.value.__notes__[0]


@pytest.mark.parametrize("action_space", [MultiBinary(4), spaces.Tuple((Discrete(4),))])
def test_a_mask_in_the_observation_of_composite_actions_is_refused(action_space: Any) -> None:
    pipeline = c.AgentPipeline([c.ActionMaskFromObs()])
    with pytest.raises(
        UnsupportedSpaceError, match=f"action mask: expected none, got one for {type(action_space).__name__}"
    ):
        pipeline.bind(MASKED, action_space=action_space)


# --- The benchmark of connectors measures all of them, runs as it stands, and asks all contestants the same


ROOT = Path(__file__).resolve().parents[2]


def test_every_connector_there_is_has_its_case() -> None:
    assert sorted(case.name for case in measured.CASES) == sorted(row.name for row in catalogue())


@pytest.mark.parametrize("case", measured.CASES, ids=lambda case: case.name)
def test_a_tick_takes_all_rows(case: Case) -> None:
    tick = case.tick(4)
    counts = [len(tick()) for _ in range(3)]
    if case.make().changes_length:
        assert any(counts)
    else:
        assert counts == [4 * len(AGENTS)] * 3


def test_the_chains_run() -> None:
    for tick in chains(4).values():
        tick()


def test_the_questions_are_those_of_the_peers() -> None:
    assert set(QUESTIONS) == {peers.STACK, peers.NORMALIZE, peers.SCALE}


@pytest.mark.parametrize("library", peers.PEERS)
def test_who_is_asked_answers_for_every_row(library: str) -> None:
    if peers.version(library) is None:
        pytest.skip(f"{library} is not installed")
    plain, unit = (measured.rows_of(SMALL, space).obs for space in (measured.VECTOR, measured.UNIT))
    shaped = [obs.reshape(SMALL, len(AGENTS), WIDTH) for obs in (plain, unit)]
    answered = set()
    for question, label, tick in peers.PEERS[library](*shaped):
        out = tick()
        answered.add(question)
        if library == "gymnasium":
            _agrees(question, out, plain)
        elif question == peers.SCALE:
            got = np.concatenate([list(of_env.values()) for of_env in out])
            np.testing.assert_allclose(got, (unit + 1) / 2, atol=1e-6)
        assert label
    assert answered
    assert answered <= set(QUESTIONS)


def _agrees(question: str, out: Any, obs: NDArray[np.float32]) -> None:
    """Whether what Gymnasium computes is what we do."""
    if question == peers.NORMALIZE:
        np.testing.assert_allclose(out, (obs - obs.mean(axis=0)) / obs.std(axis=0), rtol=1e-3, atol=1e-3)
    else:
        assert np.array(out).shape == (len(obs), 4, WIDTH)
        np.testing.assert_array_equal(np.array(out)[:, -1], obs)


@pytest.mark.slow("draws many batches")
def test_it_runs_as_it_stands() -> None:
    command = [sys.executable, "benchmarks/connectors.py", "--rounds", "1", "--seconds", "0.0001"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for words in ("48 rows of 18 numbers", "12,288 rows", "ns per row", *QUESTIONS, "Gymnasium", "usable cores"):
        assert words in result.stdout, words
    for library in peers.PEERS:
        if peers.version(library) is None:
            assert f"{library}: not installed, left out" in result.stdout
