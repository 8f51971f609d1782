"""Who has left the running episodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.arrivals import Arrival
from marlvec.errors import ContractError

__all__ = ["Departures"]


class Departures:
    """Notes which agents have ended in the running episodes, and that none of them comes back.

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

    def check(self, arrival: Arrival) -> None:
        """Make sure that nobody is to act who has ended.

        Raises:
            ContractError: Somebody is; names env and agent.
        """
        if not self._any:
            return
        back = arrival.acting & self._gone_NA[arrival.where]
        if back.any():
            i, a = np.argwhere(back)[0].tolist()
            raise ContractError(
                f"env {int(arrival.env_ids[i])}: agent {self._agents[a]!r} is to act, but it has ended already "
                f"in this episode"
            )
