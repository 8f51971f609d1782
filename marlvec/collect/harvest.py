"""Which of the closed transitions go into a batch, and the batch made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.collect.batch import SampleBatch
from marlvec.collect.roles import Role
from marlvec.connectors import Rows

__all__ = ["Harvest"]

IntArray = NDArray[np.int64]


class Harvest:
    """Turns trajectories into batches and numbers their fragments.

    Args:
        roles: Whose trajectories.
        reward_dtype: Dtype of the batches' rewards; None to leave it as it is.
    """

    def __init__(self, roles: Sequence[Role], reward_dtype: DTypeLike | None) -> None:
        self._roles = tuple(roles)
        self._reward_dtype = None if reward_dtype is None else np.dtype(reward_dtype)
        self._next_unroll = 0

    def all_closed(self) -> list[IntArray]:
        """Slots of all closed transitions, per role."""
        return [role.trajectories.closed() for role in self._roles]

    def of_episodes(self, eps_ids: Sequence[int]) -> list[IntArray]:
        """Slots of these episodes' transitions, per role."""
        wanted = np.array(eps_ids, np.int64)
        return [role.trajectories.closed(wanted) for role in self._roles]

    def first_closed(self, amount: int) -> list[IntArray]:
        """Slots of the ``amount`` transitions that were closed first: by tick, then env, then agent."""
        slots = self.all_closed()
        orders = [role.trajectories.closing_order(s) for role, s in zip(self._roles, slots, strict=True)]
        ticks, lanes = (np.concatenate(part) for part in zip(*orders, strict=True))
        chosen = np.zeros(len(ticks), np.bool_)
        chosen[np.lexsort((lanes, ticks))[:amount]] = True
        masks = np.split(chosen, np.cumsum([len(s) for s in slots])[:-1])
        return [s[mask] for s, mask in zip(slots, masks, strict=True)]

    def reap(self, slots: Sequence[IntArray], slot_L: IntArray, policy_L: IntArray) -> Mapping[str, SampleBatch]:
        """Make batches of these transitions, and forget them once the learner connectors have done their work.

        Args:
            slots: Per role, ascending.
            slot_L: (L,) each lane's present slot, or -1; moved along in place.
            policy_L: (L,) index of the role that plays each lane.
        """
        found: dict[str, Rows] = {}
        unroll = self._next_unroll
        for role, own in zip(self._roles, slots, strict=True):
            if len(own):
                columns, unroll = role.trajectories.read(own, unroll)
                if self._reward_dtype is not None:
                    columns["rewards"] = columns["rewards"].astype(self._reward_dtype, copy=False)
                found[role.policy_id] = Rows(columns)
        batches = self._connected(found)
        self._next_unroll = unroll
        for role, own in zip(self._roles, slots, strict=True):
            if len(own):
                role.forget(own, slot_L, policy_L)
        return batches

    def _connected(self, found: Mapping[str, Rows]) -> dict[str, SampleBatch]:
        """Send rows through the learner connectors, each piece of which may look at all of them first."""
        roles = [role for role in self._roles if role.policy_id in found]
        batches = {}
        for role in roles:
            if len(role.learner_connectors):
                role.learner_connectors.see_batch(found)
        for role in roles:
            try:
                rows = role.learner_connectors(found[role.policy_id])
            except Exception as error:
                error.add_note(
                    f"in the learner connectors of policy {role.policy_id!r}; no row is lost: call collect() again"
                )
                raise
            batches[role.policy_id] = SampleBatch(rows.columns)
        return batches
