"""Who has left the running episodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.arrivals import Arrival
from marlvec.errors import ContractError

__all__ = ["Departures"]


class Departures:
    """Notes which agents have ended in the running episodes, and which of them have come back.

    Args:
        num_envs: N.
        agents: Agent names, in order.
    """

    def __init__(self, num_envs: int, agents: tuple[str, ...]) -> None:
        self._agents = agents
        self._gone_NA = np.zeros((num_envs, len(agents)), np.bool_)
        self._any = False

    def note(self, arrival: Arrival) -> None:
        """Some agents have ended."""
        self._gone_NA[arrival.where] |= arrival.ended
        self._any = True

    def forget(self, env_ids: NDArray[np.int64]) -> None:
        """New episodes begin in these envs."""
        self._gone_NA[env_ids] = False
        self._any = bool(self._gone_NA.any())

    def check(self, arrival: Arrival, seen_NA: NDArray[np.bool_]) -> None:
        """Let those begin anew who are alive again, and make sure that nobody else is to act who has ended.

        Args:
            arrival: What came.
            seen_NA: (N, A) of whom connectors have seen a row; False from now on for those who are alive again.

        Raises:
            ContractError: Somebody has ended and is to act; names env and agent.
        """
        if not self._any:
            return
        gone = self._gone_NA[arrival.where]
        back = gone & arrival.alive
        if back.any():
            self._gone_NA[arrival.where] = gone & ~back
            seen_NA[arrival.where] &= ~back
        wrong = arrival.acting & gone & ~back
        if wrong.any():
            i, a = np.argwhere(wrong)[0].tolist()
            raise ContractError(
                f"env {int(arrival.env_ids[i])}: agent {self._agents[a]!r} is to act, but it has ended already "
                f"in this episode"
            )
