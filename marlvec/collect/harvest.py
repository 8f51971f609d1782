"""Which of the closed transitions go into a batch, and the batch made of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

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
        roles: Whose trajectories; looked at anew each time.
        reward_dtype: Dtype of the batches' rewards; None to leave it as it is.
    """

    def __init__(self, roles: Sequence[Role], reward_dtype: DTypeLike | None) -> None:
        self._roles = roles
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

    def holds(self, eps_id: int) -> bool:
        """Whether rows of an episode are still to come."""
        wanted = np.array([eps_id])
        return any(len(role.trajectories.of_episodes(wanted)) for role in self._roles)

    def make(
        self,
        slots: Sequence[IntArray],
        is_trained: Callable[[str], bool] = lambda policy_id: True,
        untrained: Collection[int] = (),
    ) -> Mapping[str, SampleBatch]:
        """Make batches of these transitions; none of them is forgotten before `forget`.

        Args:
            slots: Per role, ascending.
            is_trained: Whether a policy gets a batch. Rows of the others are only shown to learner connectors.
            untrained: Ids of episodes that are for no batch, and shown to nobody.
        """
        found: dict[str, Rows] = {}
        unroll = self._next_unroll
        shown = [role.trajectories.without(own, untrained) for role, own in zip(self._roles, slots, strict=True)]
        trained = [
            role
            for role, own in zip(self._roles, shown, strict=True)
            if len(own) and not role.is_frozen and is_trained(role.policy_id)
        ]
        all_are_shown = any(len(role.learner_connectors) for role in trained)
        for role, own in zip(self._roles, shown, strict=True):
            if len(own) and (all_are_shown or role in trained):
                columns, unroll = role.trajectories.read(own, unroll)
                if self._reward_dtype is not None:
                    columns["rewards"] = columns["rewards"].astype(self._reward_dtype, copy=False)
                found[role.policy_id] = Rows(columns)
        batches = self._connected(trained, found)
        self._next_unroll = unroll
        return batches

    def forget(self, slots: Sequence[IntArray], slot_L: IntArray, policy_L: IntArray) -> None:
        """Forget transitions that are in batches.

        Args:
            slots: Per role, ascending.
            slot_L: (L,) each lane's present slot, or -1; moved along in place.
            policy_L: (L,) index of the role that plays each lane.
        """
        for role, own in zip(self._roles, slots, strict=True):
            if len(own):
                role.forget(own, slot_L, policy_L)

    def _connected(self, roles: Sequence[Role], found: Mapping[str, Rows]) -> dict[str, SampleBatch]:
        """Send these roles' rows through their learner connectors, each piece of which may look at all rows first."""
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
