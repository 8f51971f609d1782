"""Advice of check_env: it never tells users to change a value."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec.testing import check_env

PIXELS = Box(0, 255, (2,), np.uint8)
CHANGED: list[tuple[Any, Any, str]] = [
    (PIXELS, np.array([0.0, 0.5], np.float32), "0.5 is no uint8"),
    (PIXELS, np.array([305, 0]), "305 is no uint8"),
    (PIXELS, [-1, 0], "-1 is no uint8"),
    (Box(0, 9, (), np.int64), np.float64(1.7), "1.7 is no int64"),
    (Discrete(3), 1.7, "1.7 is no int64"),
    (Discrete(3), np.float32(0.5), "0.5 is no int64"),
    (Box(-np.inf, np.inf, (2,), np.float32), np.array([0.0, 1e300]), "1e+300 is no float32"),
]
KEPT: list[tuple[Any, Any, str]] = [
    (PIXELS, np.array([0.0, 1.0], np.float32), "return it with .astype(np.uint8)"),
    (PIXELS, [0, 255], "return np.asarray(…, dtype=np.uint8)"),
    (Discrete(3), 2.0, "return int(value)"),
    (Box(-1, 1, (2,), np.float32), np.array([0.1, 0.2]), "return it with .astype(np.float32)"),
]


class OneValueEnv(gymnasium.Env[Any, Any]):
    action_space = Discrete(2)

    def __init__(self, space: Any, value: Any) -> None:
        self.observation_space, self._value, self._t = space, value, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._value, {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._value, 0.0, self._t == 3, False, {}


def advice(space: Any, value: Any) -> list[tuple[str, bool]]:
    """Return what check_env says of the observations, and whether it calls that minor."""
    findings = check_env(lambda: OneValueEnv(space, value), max_steps=20, raise_first=False)
    return [(str(one), one.severity == "minor") for one in findings if one.check == "observations"]


@pytest.mark.parametrize(("space", "value", "words"), CHANGED)
def test_value_that_a_cast_would_change_gets_no_advice_to_cast(space: Any, value: Any, words: str) -> None:
    (text, is_minor), *_ = advice(space, value)
    assert words in text
    assert not re.search("astype|asarray|int\\(value", text)
    assert not is_minor


@pytest.mark.parametrize(("space", "value", "words"), KEPT)
def test_value_that_a_cast_keeps_gets_that_advice(space: Any, value: Any, words: str) -> None:
    assert words in advice(space, value)[0][0]
