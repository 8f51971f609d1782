"""`InProcessVectorEnv`: base of backends in the calling process; a request runs when its reply is fetched."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.vector.call_state import is_interrupt
from marlvec.vector.data.report import Report
from marlvec.vector.settings import Settings
from marlvec.vector.vector_env import VectorEnv

__all__ = ["InProcessVectorEnv"]


class InProcessVectorEnv(VectorEnv):
    """Runs requests in the calling process, one after the other, in the calls that fetch their replies."""

    _place_name = "this process"

    def __init__(self, num_envs: int, settings: Settings) -> None:
        super().__init__(num_envs, settings)
        self._requests: list[tuple[str, NDArray[np.int64], tuple[Sequence[Any], ...]]] = []

    @abstractmethod
    def _run(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> Report | None:
        """Run an operation on these envs, and return its report."""

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        self._is_sending = True
        self._requests.append((operation, env_ids, arguments))

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        if not self._requests:
            return self._receive_nothing(timeout)
        try:
            operation, env_ids, arguments = self._requests.pop(0)
            self._replies.append((env_ids, self._run(operation, env_ids, arguments)))
        except BaseException as error:
            if is_interrupt(error):  # in the middle of an env's code: its state is unknown, so it has to be reset
                self._lose_in_flight()
            raise
        return True

    def _receive_nothing(self, timeout: float | None) -> bool:
        """Handle that no request is queued: a restart is not due yet, or an interrupt came before the request."""
        if self._recovery.due_heap:
            time.sleep(timeout or 0.0)
            return False
        self._replies.append((self._call_state.in_flight, None))
        return True

    def _lose_in_flight(self) -> None:
        """Mark envs that have not replied as idle, without an episode; results that have arrived are kept."""
        self.drive_count += 1
        calls = self._call_state
        lost = calls.in_flight
        calls.lose_episodes(lost)
        calls.undo_begin(lost, calls.arrived)
        self._requests.clear()
        self._replies.clear()

    def _forget_requests(self) -> bool:
        self._requests.clear()
        return True
