"""What learns, cheaply, in tests of checkpoints: a softmax over linear logits, by policy gradient, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space

from marlvec import SampleBatch
from marlvec.connectors import Rows
from marlvec.policies import Policy

__all__ = ["Linear", "Momentum"]


class Linear(Policy):
    """Draws actions with its own random stream, from logits that are linear in the observation.

    Attributes:
        weights: (inputs, actions) float64; none before it knows its spaces.
    """

    def __init__(self) -> None:
        self.weights = np.zeros((0, 0))
        self.rng = np.random.default_rng(0)

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        assert isinstance(action_space, Discrete)
        if not self.weights.size:  # else they were loaded
            self.weights = np.zeros((int(np.prod(observation_space.shape or ())), int(action_space.n)))
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        logits = self.logits(rows)
        noise = self.rng.gumbel(size=logits.shape) if explore else 0.0
        actions = (logits + noise).argmax(axis=1)
        return actions, {"logit": logits[np.arange(len(actions)), actions]}

    def logits(self, rows: Rows) -> np.ndarray[Any, Any]:
        """One per action, -inf where it is forbidden."""
        logits = rows["obs"].reshape(len(rows), -1).astype(np.float64) @ self.weights
        mask = rows.get("action_mask")
        return logits if mask is None else np.where(mask, logits, -np.inf)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.copy(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = np.array(state["weights"])
        self.rng.bit_generator.state = state["rng"]


class Momentum:
    """Learns from one batch after the other; what it remembers of earlier ones is a part of the training.

    Args:
        policy: Whose weights.
    """

    def __init__(self, policy: Linear) -> None:
        self._policy, self._speed, self._baseline = policy, np.zeros(()), 0.0

    def learn(self, rows: SampleBatch) -> None:
        """One step along the gradient."""
        policy, n = self._policy, len(rows)
        if n == 0:
            return
        logits = policy.logits(rows)
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        off = -chances
        off[np.arange(n), rows.actions] += 1.0
        gain = rows.rewards - self._baseline
        self._baseline += 0.1 * float(gain.mean())
        gradient = rows.obs.reshape(n, -1).astype(np.float64).T @ (off * gain[:, None]) / n
        self._speed = 0.9 * self._speed + gradient
        policy.weights = policy.weights + 0.05 * self._speed
        policy.version += 1

    def state_dict(self) -> dict[str, Any]:
        return {"speed": self._speed, "baseline": self._baseline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._speed, self._baseline = np.array(state["speed"]), state["baseline"]
