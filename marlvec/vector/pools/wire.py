"""The short way to a pool of EnvPool's: its compiled calls, without the Python that EnvPool has around them.

EnvPool's ``send`` and ``recv`` sort arrays into trees and back, for tasks of any form; for those whose observations are
one array, of one player, a list of arrays is all there is. What is spared is 60 to 100 µs a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Wire"]

_ASKED = ["env_id", "players.env_id", "action"]
_TOLD = {"obs", "reward", "done", "trunc", "elapsed_step"}
_KNOWN = {*_TOLD, "discount", "step_type"}
_PLAYERS = "info:players.env_id"  # with one player, the same as env_id


class Wire:
    """Sends to one pool and receives from it.

    Args:
        pool: One for which `fits` is true.
    """

    def __init__(self, pool: Any) -> None:
        self._send, self._recv = pool._send, pool._recv
        self._keys: list[str] = list(pool._state_keys)
        self._infos = [(k, k.removeprefix("info:")) for k in self._keys if k.startswith("info:") and k != _PLAYERS]
        self._everyone = np.arange(pool.config["num_envs"], dtype=np.int32)
        self._dtype: np.dtype[Any] = np.dtype(pool._spec._action_spec[-1][0])

    @staticmethod
    def fits(pool: Any) -> bool:
        """Whether a pool is EnvPool's own, its ``send`` and ``recv`` too, and its arrays are in this form."""
        kind = type(pool)
        for name in ("send", "recv", "_to", "_from"):  # somebody's subclass may do more in them
            method = getattr(kind, name, None)
            if not str(getattr(method, "__module__", "")).startswith("envpool.python.") or name in vars(pool):
                return False
        if not all(hasattr(pool, name) for name in ("_send", "_recv", "_state_keys", "_action_keys")):
            return False
        told = {key for key in pool._state_keys if key != _PLAYERS}
        known = told >= _TOLD and all(key in _KNOWN or key.startswith("info:") for key in told)
        flat = not any("." in key for key in told)
        return list(pool._action_keys) == _ASKED and known and flat and pool.config.get("max_num_players") == 1

    def send(self, action: NDArray[Any], ids: NDArray[np.int64] | None) -> None:
        """Have these envs, or all, make a step; the action is copied."""
        envs = self._everyone if ids is None else ids.astype(np.int32)
        self._send([envs, envs, action.astype(self._dtype, order="C")])

    def recv(self) -> tuple[Any, ...]:
        """Wait for the next answer: what the pool's own ``recv`` returns."""
        told = dict(zip(self._keys, self._recv(), strict=True))
        info = {name: told[key] for key, name in self._infos}
        info["elapsed_step"] = told["elapsed_step"]
        truncated = told["trunc"]
        return told["obs"], told["reward"], told["done"] & ~truncated, truncated, info
