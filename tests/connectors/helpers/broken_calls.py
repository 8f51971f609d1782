"""Connectors that are broken in a single call, or in how a batch is told from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from marlvec.connectors import ActionConnector, AgentConnector, Rows
from tests.connectors.helpers.sound import Awake, Centre, Change, Team

# --- single calls


class ReturnsNothing(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return None  # type: ignore[return-value]  # that is what is wrong


class LosesARow(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.take(slice(1, None))


class Sorts(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.take(np.argsort(-rows.agent_index, kind="stable"))


class Renumbers(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(eps_id=rows.eps_id + 1)


class DropsIds(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.drop("t")


class SaysItIsIdentity(AgentConnector):
    is_identity = True  # type: ignore[assignment]  # a class may say so once for all spaces

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(extra=rows.t)


class RemovesLastRows(Awake):
    def __call__(self, rows: Rows) -> Rows:
        return rows.take(~rows.last)


class SaysNoNoop(AgentConnector):
    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        return rows.take((rows.obs[:, 0] >= 0) | rows.last)


class RepeatsRows(Awake):
    def __call__(self, rows: Rows) -> Rows:
        return Rows.concat([rows, rows])


class Raises(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs @ np.zeros((7, 7)))


class NeedsAColumn(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs + rows.belief)


class WritesIntoObs(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        np.clip(rows.obs, -0.1, 0.1, out=rows.obs)  # a second time nothing changes
        return rows


class AddsAColumnInPlace(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        rows._columns["extra"] = rows.t
        return rows


class WritesIntoAnswers(Change):
    def on_policy_output(self, rows: Rows) -> None:
        rows.logp[:] = 0


class KeepsObs(AgentConnector):
    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Any] = {}

    def __call__(self, rows: Rows) -> Rows:
        pairs = list(zip(rows.env_id.tolist(), rows.agent_index.tolist(), strict=True))
        out = np.stack([self._held.get(pair, np.zeros(3, np.float32)) for pair in pairs])
        self._held.update(zip(pairs, rows.obs, strict=True))
        return rows.replace(obs=out)


class ReturnsItsBuffer(AgentConnector):
    def __init__(self) -> None:
        self._buffer = np.zeros((4, 3, 3), np.float32)

    def __call__(self, rows: Rows) -> Rows:
        self._buffer[rows.env_id, rows.agent_index] = rows.obs * 2
        n = len(rows)
        self._buffer.reshape(-1, 3)[:n] = rows.obs * 2
        return rows.replace(obs=self._buffer.reshape(-1, 3)[:n])


class Doubles(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs * 2)


class Widens(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs.astype(np.float64))


class Grows(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=np.concatenate([rows.obs, rows.obs], axis=1))


class PushesTooFar(ActionConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=rows.actions_for_env * np.float32(1.5))


class MakesNaN(ActionConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=np.where(rows.actions_for_env > 0.9, np.nan, rows.actions_for_env))


class DrawsFromTheClock(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=np.random.default_rng().normal(size=rows.obs.shape).astype(np.float32))


class SharesWithAll(AgentConnector):
    seen: ClassVar[list[int]] = []

    def __call__(self, rows: Rows) -> Rows:
        self.seen.append(len(rows))
        return rows.replace(obs=rows.obs + np.float32(len(self.seen)))


class WantsRows(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs * 1) if rows.obs[0].all() else rows


class ForgetsColumnsOfNoRows(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(extra=rows.t) if len(rows) else rows


# --- batches


class DrawsInOrder(AgentConnector):
    """Its generator is seeded, but what a row gets depends on what came before it."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=self._rng.normal(size=rows.obs.shape).astype(np.float32))


class CentresTheBatch(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs - rows.obs.mean(axis=0)) if len(rows) else rows


class CountsRows(AgentConnector):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs + np.float32(len(rows)))


class MixesEnvs(Change):
    """One slot for an agent of whatever env."""

    def _turn(self, rows: Rows) -> Any:
        last = self._last.get(rows.env_id * 0, rows.agent_index)
        last[rows.first] = 0
        self._last.set(rows.env_id * 0, rows.agent_index, rows.obs)
        return last


class LooksAcross(Team):
    across_agents = False


class LearnsInSecret(Centre):
    """Without merge_states it says that it learns nothing."""

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}

    def hand_over(self) -> dict[str, Any]:
        return {}


class FollowsTheFirst(AgentConnector):
    """Takes the env's first row for its leader, whoever that is."""

    across_agents = True

    def __call__(self, rows: Rows) -> Rows:
        first = np.array([np.flatnonzero(rows.env_id == env)[0] for env in rows.env_id], np.int64)
        return rows.replace(obs=rows.obs - rows.obs[first])


class SharesAClock(Change):
    """The latest turn in any env."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=super().__call__(rows).obs + np.float32(self._clock))

    def on_policy_output(self, rows: Rows) -> None:
        self._clock = max(self._clock, int((rows.t * (rows.env_id + 1)).max()))


class LooksAtOtherEnvs(Team):
    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs - rows.obs.mean(axis=0)) if len(rows) else rows


class RollsTheDice(ActionConnector):
    """Its dice are rolled call by call."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=rows.actions_for_env * np.float32(self._rng.random()))
