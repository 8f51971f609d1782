"""`RowStore`: puts rows that came into the logs of their policies, and notes which lanes are open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_logs import PolicyLogs
from marlvec.collect.acting.policy_router import joined
from marlvec.collect.acting.row_builder import BuiltRows
from marlvec.collect.columns.table import COLUMNS
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.scheduling.lockstep import LockstepScheduler
from marlvec.collect.storage.moment import Moment
from marlvec.collect.storage.policy_rows import PolicyRows, copied_rows
from marlvec.connectors import Rows
from marlvec.env_ids import Where

__all__ = ["RowStore"]

IntArray = NDArray[np.int64]
_ENVS_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.from_env)


class RowStore:
    """Stores rows of one moment in the logs; the scheduler knows the rounds of the envs."""

    def __init__(self, logs: PolicyLogs, episodes: EpisodeTracker, scheduler: LockstepScheduler) -> None:
        self._logs, self._episodes, self._scheduler = logs, episodes, scheduler
        self.open_L = np.zeros(episodes.policy_NA.size, np.bool_)  # lanes that wait for an action or for its outcome
        self.open_NA = self.open_L.reshape(episodes.policy_NA.shape)

    def close(self, all_built: Sequence[BuiltRows]) -> int:
        """Store last rows; return how many transitions they close."""
        closed, unread = 0, []
        for runner, moment, shared, _ in all_built:
            acted = self.open_L[moment.lanes]
            # Agents that ended before they ever acted: the connectors saw their last row, but it closes nothing.
            rows = moment if np.count_nonzero(acted) == len(acted) else moment.take(acted)
            if not len(rows.lanes):
                continue
            if runner.keeps_rows:
                rows.ticks = self._rounds(rows.lanes)
                runner.log.append(rows, shared)
            else:
                unread.append(rows.lanes)
            self.open_L[rows.lanes] = False
            closed += len(rows.lanes)
        if unread:
            self._count(unread, final=True)
        return closed

    def wait(self, all_built: Sequence[BuiltRows], *, hands_over: bool) -> int:
        """Store rows to act on, and have them wait, ready, for their policies; return how many transitions they close.

        ``hands_over``: no other code has the envs' observations, so a policy may be given those arrays.
        """
        owned = _ENVS_COLUMNS if hands_over else ()
        seen: list[Moment] = []
        unread: list[IntArray] = []
        for runner, moment, shared, removed in all_built:
            if removed is not None:  # no policy is asked about them; their open rows stay open
                runner.noops.add(removed)
                if not len(moment.lanes):
                    continue
            moment.ticks = self._rounds(moment.lanes)
            if runner.keeps_rows:
                columns, part = moment.columns, moment.part
                runner.log.append(moment, shared)
                if moment.block is not None and not shared and runner.agent_connectors.is_identity:
                    moment.spare = PolicyRows(columns, part, len(moment.lanes), owned)  # the log has copies
            else:
                if shared:
                    moment.columns = dict(copied_rows(Rows(moment.columns)).items())
                unread.append(moment.lanes)
            seen.append(moment)
            runner.ready = runner.ready.join(moment) if len(runner.ready.lanes) else moment
        if unread:
            self._count(unread, final=False)
        if not seen:
            return 0
        everyone: Where = seen[0].where if len(seen) == 1 else np.concatenate([moment.lanes for moment in seen])
        closed = int(np.count_nonzero(self.open_L[everyone]))
        self.open_L[everyone] = True
        return closed

    def _count(self, unread: Sequence[IntArray], *, final: bool) -> None:
        """Store whose rows came that are not read."""
        lanes = joined(unread)
        env_id, episodes = lanes // self.open_NA.shape[1], self._episodes
        env_t, eps_id = episodes.length_N[env_id], episodes.eps_id_N[env_id]
        self._logs.unread.count(lanes, self._rounds(lanes), env_t, eps_id, final=final)

    def _rounds(self, lanes: IntArray) -> IntArray | int:
        """The round that rows of these lanes come in: of all, or (n,) of each."""
        rounds = self._scheduler.round_N
        if self._scheduler.all_go_together:
            return int(rounds[0])
        found: IntArray = rounds[lanes // self.open_NA.shape[1]]
        return found
