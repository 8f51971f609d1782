"""Partial observability: each agent observes its nearest neighbours and landmarks only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import check_int
from marlvec.env_ids import rows_of
from marlvec.native.jit import kernel
from marlvec.native.mpe.physics import norms, put, put_offset
from marlvec.native.native_env import Ids

__all__ = ["Neighbours", "put_seen"]

_NO_NEIGHBOUR = -1


class Neighbours:
    """Indices of the entities that each agent sees, nearest first, filled up with -1; no limit: all, in order."""

    def __init__(
        self, num_envs: int, agent_num: int, landmark_num: int, num_agents: int | None, num_landmarks: int | None
    ) -> None:
        for name, number in (("num_agent_neighbors", num_agents), ("num_landmark_neighbors", num_landmarks)):
            if number is not None:
                check_int(name, number, 1)
        self.limited = num_agents is not None or num_landmarks is not None  # some agent may be out of another's sight
        self._limits = num_agents, num_landmarks
        each = range(agent_num)
        others = np.array([[b for b in each if b != a] for a in each], np.int64).reshape(agent_num, agent_num - 1)
        places = np.tile(np.arange(agent_num, agent_num + landmark_num), (agent_num, 1))
        self._all = others, places
        self.agents, self.landmarks = (
            np.tile(found if limit is None else np.full((agent_num, limit), _NO_NEIGHBOUR), (num_envs, 1, 1))
            for found, limit in zip(self._all, self._limits, strict=True)
        )

    def look(self, ids: Ids, pos: NDArray[np.float64]) -> None:
        """Find the nearest agents of each agent in these envs, ``pos`` (N, E, 2)."""
        rows = rows_of(ids)
        for entities, limit, seen in zip(self._all, self._limits, (self.agents, self.landmarks), strict=True):
            if limit is not None and entities.shape[1]:
                here = pos[rows]
                far = norms(here[:, entities] - here[:, : len(entities), None])
                order = np.argsort(far, axis=-1)[..., :limit]  # breaks ties like the reference
                found = np.take_along_axis(np.broadcast_to(entities, far.shape), order, -1)
                seen[rows, :, : found.shape[-1]] = found


@kernel
def put_seen(view: Any, i: Any, k: Any, pos: Any, seen: Any, a: Any) -> Any:
    """Write the offsets of the entities that agent ``a`` sees, ``seen`` (N, A, n); zeros for -1."""
    for m in range(seen.shape[2]):
        e = seen[i, a, m]
        k = put(view, i, k, 0.0, 0.0) if e < 0 else put_offset(view, i, k, pos, e, a)
    return k
