"""Every connector that marlvec ships keeps to the contract, by the same check that users run on theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from marlvec import connectors as c
from marlvec.connectors import Connector, Rows
from marlvec.connectors.catalogue import catalogue
from marlvec.testing.check_connector import check_connector

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
UNIT = Box(-2.0, 3.0, (2, 2), np.float64)
IMAGE = Box(0, 255, (8, 6, 3), np.uint8)
NESTED = Dict(place=Box(-9.0, 9.0, (2,)), rest=Tuple([Discrete(3, start=1), Box(0.0, np.inf, (1,), np.float64)]))
ARM = Dict(arm=Box(-1.0, 4.0, (2,), np.float32), gear=Discrete(3, start=-1))
STATE = Box(-np.inf, np.inf, (5,), np.float32)
RNN = {"h": np.zeros(4, np.float32), "c": np.ones(2)}
RNN_OUT = Dict(h=Box(-1.0, 1.0, (4,)), c=Box(-1.0, 1.0, (2,), np.float64))
STATES = {"state_in": Box(-1.0, 1.0, (2,)), "state_out": Box(-1.0, 1.0, (2,))}


def _double(obs: Any, *_: Any) -> Any:
    return obs * 2


def _keep(rows: Rows) -> Any:
    return rows.obs[:, 0] > 0


def _value(rows: Rows) -> Any:
    return rows.obs[:, 0]


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
    ("FrameStack", (3,), NESTED, {}),
    ("FrameStack", {"k": 2, "new_axis": True, "axis": 0, "pad": "repeat"}, IMAGE, {}),
    ("AgentIndicator", (), VECTOR, {}),
    ("ClipReward", {"sign": True}, VECTOR, {}),
    ("ActionMaskFromObs", (), Dict(observation=VECTOR, action_mask=MultiBinary(4)), {}),
    ("CastObs", ("float64",), NESTED, {}),
    ("ClipObs", (-1.0, 1.0), NESTED, {}),
    ("DeathMask", (), NESTED, {}),
    ("DeathMask", {"append": True}, VECTOR, {}),
    ("DelayObs", (2,), NESTED, {}),
    ("DropKeys", ("place",), NESTED, {}),
    ("FilterRows", (_keep, 0), VECTOR, {}),
    ("FrameSkip", (3,), NESTED, {}),
    ("GrayscaleObs", (), IMAGE, {}),
    ("GrayscaleObs", {"keep_axis": False}, IMAGE, {}),
    ("MapObs", (_double,), VECTOR, {}),
    ("MapReward", (_double,), VECTOR, {}),
    ("MaxObs", (3,), IMAGE, {}),
    ("NormalizeReward", (), VECTOR, {}),
    ("NormalizeReward", {"per_agent": True, "clip": None}, VECTOR, {}),
    ("OneHotObs", (), MultiDiscrete([2, 3]), {}),
    ("PadObs", (7,), VECTOR, {}),
    ("PerAgent", (_double,), VECTOR, {}),
    ("PrevActions", (3,), NESTED, {"action_space": ARM}),
    ("PrevActions", (2, True), VECTOR, {"action_space": Discrete(4, start=2)}),
    ("PrevRewards", (3,), NESTED, {}),
    ("PrevRewards", (2, True), VECTOR, {}),
    ("ReshapeObs", ((3, 1),), VECTOR, {}),
    ("ResizeObs", ((4, 4),), IMAGE, {}),
    ("ResizeObs", ((5, 9), "linear"), IMAGE, {}),
    ("ResizeObs", ((5, 9), "nearest"), IMAGE, {}),
    ("RnnState", (RNN,), VECTOR, {"columns": {"state_out": RNN_OUT}}),
    ("ScaleObs", (-1.0, 1.0), IMAGE, {}),
    ("ScaleReward", (0.5, 1.0), VECTOR, {}),
    ("StateInObs", (STATE,), NESTED, {}),
    ("StateInObs", (STATE, "append"), VECTOR, {}),
    ("TeamObs", (), NESTED, {}),
    ("TimeFeature", (10,), VECTOR, {}),
    ("TransposeObs", (), IMAGE, {}),
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
    ("EpsilonGreedy", (0.5,), Discrete(5), {}),
    ("EpsilonGreedy", {"epsilon": 0.9, "final": 0.1, "decay_steps": 5}, Discrete(5, start=2), {}),
    ("GaussianNoise", (0.5,), ARM, {}),
    ("GaussianNoise", {"std": 0.9, "final": 0.1, "decay_steps": 5}, UNIT, {}),
    ("MapActions", (lambda actions: actions * 1,), UNIT, {}),
    ("MaskInvalid", (), Discrete(5), {}),
    ("MaskInvalid", ("random",), MultiDiscrete([2, 3]), {}),
    ("OrnsteinUhlenbeckNoise", (), ARM, {}),
    ("PadActions", (9,), Discrete(5), {}),
    ("RepeatActions", (3,), ARM, {}),
    ("ReplaceNaN", ("random",), ARM, {}),
    ("StickyActions", (0.5,), ARM, {}),
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
]


def _make(name: str, args: Any) -> Connector:
    cls = getattr(c, name)
    piece: Connector = cls(**args) if isinstance(args, dict) else cls(*args)
    return piece


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(94)
@pytest.mark.parametrize(
    ("name", "args", "space", "more"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_it_keeps_to_the_contract(name: str, args: Any, space: Any, more: dict[str, Any]) -> None:
    check_connector(lambda: _make(name, args), space, **more)


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.parametrize(("make", "more"), CHAINS, ids=lambda value: getattr(value, "__name__", ""))
def test_and_so_do_chains(make: Callable[[], Connector], more: dict[str, Any]) -> None:
    check_connector(make, **more)


def test_all_were_tried() -> None:
    # UnpadSequences takes nothing but what PadSequences gave, and was tried behind it.
    assert {case[0] for case in CASES} | {"UnpadSequences"} == {row.name for row in catalogue()}
