"""`check_vector_env`: checks of any implementation of `VectorEnv`."""

from __future__ import annotations

from collections.abc import Callable

from marlvec.errors import ArgumentError
from marlvec.testing.vector_checks.autoreset import check_autoreset
from marlvec.testing.vector_checks.guards import check_busy, check_close, check_guards, check_own_answers
from marlvec.testing.vector_checks.play import MakeEnvs, VectorPlace
from marlvec.testing.vector_checks.rows import (
    check_copies,
    check_determinism,
    check_halves,
    check_partial_reset,
    check_seeding,
    check_spaces,
    check_stream,
)

__all__ = ["CHECKS", "check_vector_env"]

CHECKS: dict[str, Callable[[VectorPlace, MakeEnvs, int], None]] = {
    "spaces": check_spaces,
    "seeding": check_seeding,
    "determinism": check_determinism,
    "halves": check_halves,
    "stream": check_stream,
    "guards": check_guards,
    "busy": check_busy,
    "partial reset": check_partial_reset,
    "autoreset": check_autoreset,
    "copies": check_copies,
    "own answers": check_own_answers,
    "close": check_close,
}


def check_vector_env(make_envs: MakeEnvs, *, seed: int = 0) -> tuple[str, ...]:
    """Run every check on new vectorizers, over whole episodes.

    Args:
        make_envs: Builds a vectorizer of at least two equal envs; takes ``autoreset_mode`` and ``copy`` and passes them
            on, e.g. ``lambda **settings: marlvec.make("simple_spread", 3, **settings)``. The envs must behave equally
            for equal seeds, and end their episodes within a few hundred steps. Each vectorizer is closed.
        seed: Seed of the envs and actions.

    Returns:
        Names of all checks.

    Raises:
        ContractError: A check failed: ``"check_vector_env: <check>: <what>: expected ..., got ..."``.
        ArgumentError: ``make_envs`` makes a single env, which cannot show mix-ups.
    """
    with make_envs() as envs:
        if envs.num_envs < 2:
            raise ArgumentError(f"make_envs: expected at least 2 envs (to find mixed-up rows), got {envs.num_envs}")
    for name, check in CHECKS.items():
        check(VectorPlace("check_vector_env", name), make_envs, seed)
    return tuple(CHECKS)
