"""Connectors that are broken: in a single call, in what they remember or learn, or on the learner side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium.spaces import Space

from marlvec import connectors as c
from marlvec.connectors import ActionConnector, AgentConnector, Rows
from marlvec.errors import ArgumentError
from tests.connectors.sound import Awake, Centre, Change, Later, Team


def calling(name: str, call: Callable[[Rows], Any], base: Any = AgentConnector, **members: Any) -> Any:
    """A class of connectors that do this to their rows."""
    return type(name, (base,), {"__call__": lambda _, rows: call(rows), "__module__": __name__, **members})


# --- single calls


ReturnsNothing = calling("ReturnsNothing", lambda rows: None)
LosesARow = calling("LosesARow", lambda rows: rows.take(slice(1, None)))
Sorts = calling("Sorts", lambda rows: rows.take(np.argsort(-rows.agent_index, kind="stable")))
Renumbers = calling("Renumbers", lambda rows: rows.replace(eps_id=rows.eps_id + 1))
DropsIds = calling("DropsIds", lambda rows: rows.drop("t"))
SaysItIsIdentity = calling("SaysItIsIdentity", lambda rows: rows.replace(extra=rows.t), is_identity=True)
RemovesLastRows = calling("RemovesLastRows", lambda rows: rows.take(~rows.last), Awake)
SaysNoNoop = calling("SaysNoNoop", lambda rows: rows.take((rows.obs[:, 0] >= 0) | rows.last), changes_length=True)
RepeatsRows = calling("RepeatsRows", lambda rows: Rows.concat([rows, rows]), Awake)
Raises = calling("Raises", lambda rows: rows.replace(obs=rows.obs @ np.zeros((7, 7))))
NeedsAColumn = calling("NeedsAColumn", lambda rows: rows.replace(obs=rows.obs + rows.belief))


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


Doubles = calling("Doubles", lambda rows: rows.replace(obs=rows.obs * 2))
Widens = calling("Widens", lambda rows: rows.replace(obs=rows.obs.astype(np.float64)))
Grows = calling("Grows", lambda rows: rows.replace(obs=np.concatenate([rows.obs, rows.obs], axis=1)))
PushesTooFar = calling(
    "PushesTooFar", lambda rows: rows.replace(actions_for_env=rows.actions_for_env * np.float32(1.5)), ActionConnector
)
MakesNaN = calling(
    "MakesNaN",
    lambda rows: rows.replace(actions_for_env=np.where(rows.actions_for_env > 0.9, np.nan, rows.actions_for_env)),
    ActionConnector,
)
DrawsFromTheClock = calling(
    "DrawsFromTheClock",
    lambda rows: rows.replace(obs=np.random.default_rng().normal(size=rows.obs.shape).astype(np.float32)),
)


class SharesWithAll(AgentConnector):
    seen: ClassVar[list[int]] = []

    def __call__(self, rows: Rows) -> Rows:
        self.seen.append(len(rows))
        return rows.replace(obs=rows.obs + np.float32(len(self.seen)))


WantsRows = calling("WantsRows", lambda rows: rows.replace(obs=rows.obs * 1) if rows.obs[0].all() else rows)
ForgetsColumnsOfNoRows = calling(
    "ForgetsColumnsOfNoRows", lambda rows: rows.replace(extra=rows.t) if len(rows) else rows
)


# --- batches


class DrawsInOrder(AgentConnector):
    """Its generator is seeded, but what a row gets depends on what came before it."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=self._rng.normal(size=rows.obs.shape).astype(np.float32))


CentresTheBatch = calling(
    "CentresTheBatch", lambda rows: rows.replace(obs=rows.obs - rows.obs.mean(axis=0)) if len(rows) else rows
)
CountsRows = calling("CountsRows", lambda rows: rows.replace(obs=rows.obs + np.float32(len(rows))))


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


LooksAtOtherEnvs = calling(
    "LooksAtOtherEnvs", lambda rows: rows.replace(obs=rows.obs - rows.obs.mean(axis=0)) if len(rows) else rows, Team
)


class RollsTheDice(ActionConnector):
    """Its dice are rolled call by call."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=rows.actions_for_env * np.float32(self._rng.random()))


# --- episodes


class IgnoresFirst(Change):
    def _turn(self, rows: c.Rows) -> Any:
        last = self._last.get(rows.env_id, rows.agent_index)
        self._last.set(rows.env_id, rows.agent_index, rows.obs)
        return last


class IgnoresReset(Change):
    def reset(self, env_ids: Any = None) -> None:
        pass


class ForgetsEverybody(Change):
    def reset(self, env_ids: Any = None) -> None:
        self._last.reset(None)


class ForgetsNeighbours(Change):
    def reset(self, env_ids: Any = None) -> None:
        self._last.reset(None if env_ids is None else [*env_ids, *(np.asarray(env_ids, np.int64) + 1)])


class CannotForgetAll(Change):
    def reset(self, env_ids: Any = None) -> None:
        self._last.reset(list(env_ids))


class KnowsNoNewEnvs(Change):
    def reset(self, env_ids: Any = None) -> None:
        self._last.values[slice(None) if env_ids is None else np.asarray(env_ids, np.int64)] = 0


class CountsResets(Change):
    """As a clock of all envs together."""

    def __init__(self) -> None:
        super().__init__()
        self._resets = 0

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=super().__call__(rows).obs + np.float32(self._resets))

    def reset(self, env_ids: Any = None) -> None:
        super().reset(env_ids)
        self._resets += 1


class ForgetsWhatItLearnt(Centre):
    def reset(self, env_ids: Any = None) -> None:
        if env_ids is None:
            self._parts = np.zeros((3, 4))


# --- memory


class SharesInCopies(Change):
    def __deepcopy__(self, memo: Any) -> Self:
        twin = type(self)()
        twin._last = self._last
        return twin


class ForgetsAtSetup(Change):
    def setup(self, space: Space[Any]) -> None:
        self._last = c.AgentTable((3,), np.float32)


class ForgetsWhenAsked(Change):
    def output_space(self, space: Space[Any]) -> Space[Any]:
        self._last.reset(None)
        return space


class KeepsItsHistoryToItself(Change):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ArgumentError("there is no state")


class GivesItsTable(Change):
    def state_dict(self) -> dict[str, Any]:
        return {"values": self._last.values}


class TakesTheTable(Change):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._last.values = state["values"]


class RoundsItsState(Change):
    def state_dict(self) -> dict[str, Any]:
        return {"values": self._last.values.round(2)}


class GivesObjects(Change):
    def state_dict(self) -> dict[str, Any]:
        return {"values": {0: self._last}}


class TakesAnything(Change):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "values" in state:
            super().load_state_dict(state)


class StumblesOverAnything(Change):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last.load_state_dict({"values": state["values"]})


# --- learning


class LearnsInEval(Centre):
    def __call__(self, rows: c.Rows) -> c.Rows:
        self._learn(rows)
        return rows


class ReturnsNoSelf(Change):
    def eval(self) -> Any:
        super().eval()


class NeverSwitches(Change):
    def eval(self) -> Self:
        return self


class CountsCalls(Centre):
    """A mean of the calls' means."""

    def _learn(self, rows: c.Rows) -> None:
        if len(rows):
            self._parts[0] += [*rows.obs.mean(axis=0, dtype=np.float64), 1]


class CountsTwice(Centre):
    """Merged, it takes every row for two."""

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return super().merge_states([*states, *states] if len(states) > 1 else states)


class TakesTheFirstState(Centre):
    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(states[0])


class MergesHistories(Change):
    """What it remembers of running episodes is not learnt."""

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(states[-1])


class LosesWhatComesBetween(Centre):
    """What it learns between the two calls is gone: those of the base class."""

    hand_over = c.Connector.hand_over
    take_merged = c.Connector.take_merged


class HandsOverAllAgain(Centre):
    """It goes on with what it has handed over, and hands that over once more."""

    def take_merged(self, state: Mapping[str, Any]) -> None:
        self._parts[0] += self._parts[1]
        super().take_merged(state)


class KeepsItsOwn(Centre):
    """It takes over nothing of what others have learnt."""

    def take_merged(self, state: Mapping[str, Any]) -> None:
        pass


class HandsOverHistories(Change):
    """Nothing of it is learnt, and yet it gives it away."""

    def hand_over(self) -> dict[str, Any]:
        return self.state_dict()


# --- configs


@c.register_connector
class ShrinksItsArgument(Change):
    """What it keeps under an argument's name is not what it was given."""

    def __init__(self, factor: float = 4.0) -> None:
        super().__init__()
        self.factor = factor / 2

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=super().__call__(rows).obs * np.float32(self.factor))


# --- the learner side


LosesTransitions = calling("LosesTransitions", lambda rows: rows.take(~rows.terminated), c.LearnerConnector)
TurnsTransitions = calling("TurnsTransitions", lambda rows: rows.take(slice(None, None, -1)), c.LearnerConnector)


class WritesIntoRewards(c.LearnerConnector):
    def __call__(self, rows: c.Rows) -> c.Rows:
        rows.rewards[:] = np.clip(rows.rewards, -0.1, 0.1)
        return rows


class WantsTransitions(Later):
    def _later(self, rows: c.Rows) -> Any:
        return super()._later(rows) + (0.0 * rows.rewards[0])


class MixesFragments(Later):
    def _later(self, rows: c.Rows) -> Any:
        return np.roll(rows.rewards, -1)


class CentresRewards(Later):
    def _later(self, rows: c.Rows) -> Any:
        return rows.rewards - (rows.rewards.mean() if len(rows) else 0.0)


class CountsFromTheFirst(Later):
    across_agents = True

    def _later(self, rows: c.Rows) -> Any:
        return np.arange(len(rows))


class CountsBatches(Later):
    """And does not say so in its state."""

    across_agents = True

    def __init__(self) -> None:
        self._batches = 0

    def see_batch(self, batch: Mapping[str, c.Rows]) -> None:
        self._batches += len(batch)

    def _later(self, rows: c.Rows) -> Any:
        return np.full(len(rows), self._batches)
