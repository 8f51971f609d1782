"""`SeedStream`: a new seed for every reset of AEC envs that would repeat themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from pettingzoo.utils import BaseWrapper

__all__ = ["SeedStream"]

_LIMIT = 2**31


class SeedStream(BaseWrapper):  # type: ignore[misc]  # PettingZoo has no types
    """Makes an env as repeatable as Gymnasium's rules want it: one seed settles this episode and all that follow.

    For envs that go back to the system's entropy at a reset without a seed, so that only the first episode can be
    repeated, or that take no seed beyond a C ``int``.

    Args:
        env: A PettingZoo AEC env.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._stream = np.random.default_rng()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode.

        Args:
            seed: Given to the env as it is if it is below 2**31, else folded to 31 bits. None: the next one of the
                stream that the last seed began.
            options: For the env.
        """
        if seed is not None:
            self._stream = np.random.default_rng(seed)
            small = seed if seed < _LIMIT else int(np.random.SeedSequence(seed).generate_state(1)[0]) % _LIMIT
        else:
            small = int(self._stream.integers(_LIMIT))
        super().reset(seed=small, options=options)
