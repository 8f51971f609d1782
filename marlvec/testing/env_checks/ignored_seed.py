"""Check: a random env plays another episode when `reset` gets another seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from marlvec.envs.wrapper_chain import wrapper_chain
from marlvec.testing.env_checks.shared_state import GENERATORS, fingerprint, reachable

__all__ = ["fixed_generators"]


def fixed_generators(env: Any, reset: Callable[[int], object], seeds: tuple[int, int]) -> list[str]:
    """Return the names of random generators, ``"self.rng"``, ``"np.random"``, that resets with two seeds set alike."""
    states = []
    for seed in seeds:
        for generator in _generators(env).values():
            generator.random()  # so a generator that reset() does not set differs after the second reset
        reset(seed)
        states.append({name: _state_of(generator) for name, generator in _generators(env).items()})
    first, second = states
    return [name for name, state in first.items() if state is not None and state == second.get(name)]


def _generators(env: Any) -> dict[str, Any]:
    """Return the generators of an env and the two of the process, by name."""
    parts = reachable([*wrapper_chain(env), getattr(env, "unwrapped", env)]).values()
    held: dict[str, Any] = {path: part for part, path in parts if isinstance(part, GENERATORS)}
    return {**held, "np.random": np.random, "random": random}


def _state_of(generator: Any) -> int | None:
    if isinstance(generator, random.Random):
        return fingerprint(generator)
    if isinstance(generator, np.random.Generator):
        return fingerprint(generator.bit_generator.state)
    return fingerprint(generator.get_state() if hasattr(generator, "get_state") else generator.getstate())
