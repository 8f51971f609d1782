"""PettingZoo's own test functions."""

from __future__ import annotations

import warnings

# They import envs through PettingZoo's old names on their way, which warns.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import (
        api_test,
        max_cycles_test,
        parallel_api_test,
        parallel_seed_test,
        render_test,
        seed_test,
        state_test,
    )

__all__ = [
    "api_test",
    "max_cycles_test",
    "parallel_api_test",
    "parallel_seed_test",
    "render_test",
    "seed_test",
    "state_test",
]
