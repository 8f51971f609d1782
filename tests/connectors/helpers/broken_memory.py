"""Connectors that remember, learn or forget what they should not; and broken ones of the learner side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Space

from marlvec import connectors as c
from marlvec.errors import ArgumentError
from tests.connectors.helpers.sound import Centre, Change, Later

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


class LosesTransitions(c.LearnerConnector):
    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.take(~rows.terminated)


class TurnsTransitions(c.LearnerConnector):
    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.take(slice(None, None, -1))


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
