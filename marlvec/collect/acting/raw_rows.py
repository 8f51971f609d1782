"""What the envs last said to each agent of a policy, as it was before the connectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors import Rows

__all__ = ["RawRows"]

IntArray = NDArray[np.int64]


class RawRows:
    """Keeps the last raw row of every agent, for another policy that may take over, with connectors of its own.

    Rows are kept as they come, in blocks and without a copy; those that later ones have made useless go by and by.

    Args:
        num_agents: A.
        num_lanes: N × A.
    """

    def __init__(self, num_agents: int, num_lanes: int) -> None:
        self._agents, self._lanes = num_agents, num_lanes
        self._blocks: list[Rows] = []  # oldest first
        self._size = 0

    def note(self, rows: Rows) -> None:
        """Keep rows that are not last ones."""
        blocks, env_id, agent_index = self._blocks, rows["env_id"], rows["agent_index"]
        # Where all of a policy's agents act in the same envs again, their ids are the same arrays each time.
        for k in range(len(blocks) - 1, -1, -1):
            if blocks[k]["env_id"] is env_id and blocks[k]["agent_index"] is agent_index:
                blocks.append(rows)
                del blocks[k]
                return
        blocks.append(rows)
        self._size += len(rows)
        if self._size > 2 * self._lanes:
            self._prune()

    def of(self, lanes: IntArray) -> Rows:
        """The last row of each of these agents, which must have had one.

        Args:
            lanes: (n,) ``env * A + agent``, ascending.
        """
        found: list[Rows] = []
        places: list[IntArray] = []
        missing = np.ones(len(lanes), np.bool_)
        for block in reversed(self._blocks):
            own = self._lanes_of(block)
            use = np.isin(own, lanes[missing])
            if use.any():
                found.append(block.take(use))
                places.append(np.searchsorted(lanes, own[use]))
                missing[places[-1]] = False
            if not missing.any():
                break
        if any("action_mask" in part for part in found):  # an env may give its first mask late: all was allowed
            k = next(part["action_mask"].shape[1] for part in found if "action_mask" in part)
            found = [
                part if "action_mask" in part else part.replace(action_mask=np.ones((len(part), k), np.bool_))
                for part in found
            ]
        return Rows.concat(found).take(np.argsort(np.concatenate(places)))

    def _prune(self) -> None:
        """Drop blocks in which nothing is anybody's last row."""
        seen = np.zeros(self._lanes, np.bool_)
        kept: list[Rows] = []
        for block in reversed(self._blocks):
            own = self._lanes_of(block)
            if not seen[own].all():
                kept.append(block)
                seen[own] = True
        self._blocks = kept[::-1]
        self._size = sum(map(len, kept))

    def _lanes_of(self, rows: Rows) -> IntArray:
        lanes: NDArray[Any] = rows["env_id"] * self._agents + rows["agent_index"]
        return lanes
