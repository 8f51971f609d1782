"""From one seed to one seed per env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError

__all__ = ["check_seed", "entropy_of", "env_seeds", "restart_seed", "spread_seeds", "random_stream"]


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """Spread one seed over ``num_envs`` envs.

    Env ``i`` gets the upper 31 bits of the first word of ``numpy.random.SeedSequence(seed, spawn_key=(i,))``: a
    function of the seed and the env's index alone, so that neither the number of envs nor of workers matters, and
    seeds 0 and 1 share no stream.

    Args:
        seed: 0 to 2**64 - 1; numpy integers count.
        num_envs: N.

    Returns:
        N ints from 0 to 2**31 - 1: also envs that keep their seed in a C int accept these.

    Raises:
        ArgumentError: The seed is not such an integer.
    """
    root = check_seed(seed)
    return [int(np.random.SeedSequence(root, spawn_key=(i,)).generate_state(1)[0]) >> 1 for i in range(num_envs)]


def restart_seed(seed: int, incarnation: int) -> int:
    """Return the seed of a restarted env, from its last seed and the number of restarts since, from 1."""
    # The upper 31 bits of the first word of numpy.random.SeedSequence(seed, spawn_key=(incarnation,)).
    return int(np.random.SeedSequence(seed, spawn_key=(incarnation,)).generate_state(1)[0]) >> 1


def entropy_of(seed: int | None) -> int:
    """Return the seed; if it is None, one from the operating system."""
    if seed is not None:
        return seed
    fresh = np.random.SeedSequence().entropy
    assert isinstance(fresh, int)  # a sequence only if one was passed in
    return fresh


def check_seed(seed: Any, where: str = "seed") -> int:
    """Return the seed as an int, from 0 to 2**64 - 1."""
    value = whole_number(seed)
    if value is not None and 0 <= value < 2**64:
        return value
    raise ArgumentError(f"{where} must be an integer from 0 to 2**64 - 1, got {seed!r} ({type(seed).__name__})")


def spread_seeds(seed: int | Sequence[int | None] | None, env_ids: Sequence[int], num_envs: int) -> list[int | None]:
    """Return one seed per env in ``env_ids``; a sequence of seeds is used unchanged."""
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, (list, tuple)) or (isinstance(seed, np.ndarray) and seed.ndim):
        if len(seed) != len(env_ids):
            raise ArgumentError(f"seed is a list of {len(seed)} for {len(env_ids)} envs; give one seed, or one per env")
        return [None if s is None else check_seed(s, f"seed[{k}]") for k, s in enumerate(seed)]
    seeds = env_seeds(seed, num_envs)  # type: ignore[arg-type]  # which raises if it is not an integer
    return [seeds[i] for i in env_ids]


def random_stream(seed: int | None) -> np.random.Generator:
    """Return a random stream from the seed of all envs, independent of the envs' own; None: fresh entropy."""
    return np.random.default_rng(None if seed is None else np.random.SeedSequence(check_seed(seed), spawn_key=(0, 1)))
