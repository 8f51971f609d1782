"""What connectors refuse, and in which words: arguments when they are made, spaces when their pipeline is bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, Text

from marlvec import connectors as c
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from tests.connectors.helpers.samples import vectors

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
        with pytest.raises(ArgumentError, match=text):
            made(name, args)


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
