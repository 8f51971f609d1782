"""make() warns of a random generator in the envs' class that several envs of a process draw from, and of no other."""

from __future__ import annotations

import random
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest

from marlvec import make
from marlvec.errors import ContractWarning
from tests.testing.test_check_env import Good

PLACES: list[dict[str, Any]] = [
    {"backend": "sync"},
    {"backend": "thread", "num_workers": 3},
    {"backend": "async", "num_workers": 2},
]
APART = {"backend": "async", "num_workers": 3}


class InTheClass(Good):
    dice = np.random.default_rng(0)

    def see(self, agent: str) -> Any:
        return {"camera": {"left": self.dice.random(2, np.float32)}, "clock": self.t}


class Inherited(InTheClass):
    """One generator more, of another kind, which a class method makes anew for all."""

    coin = random.Random(0)

    @classmethod
    def shuffle(cls) -> None:
        cls.coin = random.Random(1)


class OnlyDefault(Good):
    """Has one in the class, and sets its own in each reset."""

    rng = np.random.default_rng(0)


class FromTheSystem(Good):
    entropy = random.SystemRandom()


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    noise = np.random.RandomState(0)


def warned(env: Any, num_envs: int = 3, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(env, num_envs, **options).close()
    assert all(one.category is ContractWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("options", PLACES, ids=lambda options: options["backend"])
def test_one_warning_names_it_and_says_what_to_do(options: dict[str, Any]) -> None:
    (text,) = warned(InTheClass, **options)
    assert text.startswith("InTheClass.dice is a random generator in the class of the envs, expected one for each env")
    assert "Set self.dice = np.random.default_rng(seed) in reset(seed=…)" in text
    assert 'make(…, num_envs=3, backend="async", num_workers=3)' in text
    (text,) = warned(Inherited, **options)
    assert text.startswith("InTheClass.dice (and Inherited.coin) is")


def test_wrappers_are_looked_at_too() -> None:
    (text,) = warned(lambda: Wrapped(gymnasium.make("CartPole-v1").unwrapped), backend="sync")
    assert text.startswith("Wrapped.noise is")


def test_with_a_process_or_an_env_alone_there_is_none() -> None:
    assert warned(InTheClass, **APART) == []
    for options in (*PLACES[:1], APART):
        assert warned(InTheClass, 1, **({**options, "num_workers": 1} if "num_workers" in options else options)) == []
    assert warned([InTheClass, Good, OnlyDefault], None, backend="sync") == []


@pytest.mark.parametrize("env", [Good, OnlyDefault, FromTheSystem, "simple_tag", "tictactoe", "CartPole-v1"])
def test_envs_that_are_fine_get_none(env: Any) -> None:
    assert warned(env, backend="sync") == []
