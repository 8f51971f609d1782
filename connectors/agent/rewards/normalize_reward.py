"""`NormalizeReward`: rewards divided by the standard deviation of the discounted return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable
from marlvec.connectors.agent._support.moments import RunningMoments, load_moments, merge_moments, save_moments
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["NormalizeReward"]

_SHAPES: dict[str, tuple[int, ...]] = {"": ()}


class NormalizeReward(AgentConnector):
    """Divides the ``rewards`` column by the running standard deviation of the discounted return.

    As gymnasium's wrapper of that name: every reward makes its agent's return ``gamma * return + reward``, which enters
    the statistics, and is then divided by ``sqrt(variance + epsilon)``. Its mean stays where it is, so that good stays
    good. Other than there, each (env, agent) has a return of its own that begins anew with its episode, and the
    statistics hold real returns only, where gymnasium's begin with a variance of 1.

    An episode's first rows have no reward yet: they pass unchanged and count for nothing. In eval the statistics are
    frozen. `merge_states` gives those of the pooled data, as in `NormalizeObs`; the returns of running episodes stay
    with the copy that runs them.

    Args:
        gamma: Discount of the return, from 0 to 1.
        epsilon: Added to the variance.
        clip: Rewards are then clipped to ``[-clip, clip]``; None for no clipping.
        per_agent: Whether each agent has statistics of its own.

    Raises:
        ArgumentError: ``gamma`` is not from 0 to 1, or ``epsilon`` or ``clip`` not above 0.
    """

    def __init__(
        self, gamma: float = 0.99, epsilon: float = 1e-8, clip: float | None = 10.0, per_agent: bool = False
    ) -> None:
        if not 0 <= gamma <= 1:
            raise ArgumentError(f"gamma must be from 0 to 1, got {gamma}")
        if not epsilon > 0:
            raise ArgumentError(f"epsilon must be above 0, got {epsilon}")
        if clip is not None and not clip > 0:
            raise ArgumentError(f"clip must be above 0, or None for no clipping; got {clip}")
        self.gamma = gamma
        self.epsilon = epsilon
        self.clip = clip
        self.per_agent = per_agent
        self._moments = RunningMoments.empty(0 if per_agent else 1, ())
        self._returns = AgentTable((), np.float64)

    def __call__(self, rows: Rows) -> Rows:
        rewards = np.array(rows.rewards, np.float64)
        rewarded = np.flatnonzero(~rows.first) if "first" in rows else np.arange(len(rows))
        env_id, agent_index, amount = rows.env_id[rewarded], rows.agent_index[rewarded], rewards[rewarded]
        if not np.isfinite(amount).all():
            bad = rewarded[~np.isfinite(amount)][0]
            raise ContractError(
                f"reward {rewards[bad]} of env {rows.env_id[bad]}, agent {rows.agent_index[bad]}; "
                f"nothing was learnt from these rows"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow leaves moments that are not finite
            returns = self._returns.get(env_id, agent_index) * self.gamma + amount
            if self.training and len(rewarded):
                self._learn(returns, agent_index)
        if len(rewarded) < len(rows):
            self._returns.set(rows.env_id, rows.agent_index, 0.0)
        self._returns.set(env_id, agent_index, returns)
        scaled = amount * self._scale(agent_index)
        rewards[rewarded] = scaled if self.clip is None else np.clip(scaled, -self.clip, self.clip)
        return rows.replace(rewards=rewards)

    @property
    def counts(self) -> NDArray[np.float64]:
        """(1,), or (A,) with ``per_agent``: how many rewards the statistics are of."""
        return self._moments.total.count.copy()

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._returns.reset(env_ids)

    def state_dict(self) -> State:
        return {**save_moments({"": self._moments}), "returns": self._returns.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or what `merge_states` did, which leaves running returns alone."""
        (moments,) = load_moments(state, _SHAPES)
        if "returns" in state:
            self._returns.load_state_dict(state["returns"])
        self._moments = moments

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Join the statistics of copies that saw different data; of none, give this one's.

        Returns:
            A state for `load_state_dict`: counts, means and variances of all data together.

        Raises:
            ArgumentError: Two copies last loaded different merged states, so what they have in common is not known.
        """
        copies = [load_moments(state, _SHAPES)[0] for state in states]
        return save_moments({"": merge_moments(copies) if copies else self._moments})

    def hand_over(self) -> State:
        self._moments = self._moments.handed_over()
        return save_moments({"": self._moments})

    def take_merged(self, state: Mapping[str, Any]) -> None:
        if state:
            (merged,) = load_moments(state, _SHAPES)
            self._moments = self._moments.with_merged(merged)

    def _learn(self, returns: NDArray[np.float64], agent_index: NDArray[Any]) -> None:
        old = self._moments
        if self.per_agent:
            old = old.grown(int(agent_index.max()) + 1)
        new = old.learnt(returns, agent_index if self.per_agent else None)
        if not new.total.finite:
            raise ContractError("the return is too large for float64; nothing was learnt from these rows")
        self._moments = new

    def _scale(self, agent_index: NDArray[Any]) -> NDArray[np.float64]:
        """What to multiply the rewards of these agents with; 1 for an agent of which nothing is known."""
        scale = self._moments.total.scale(self.epsilon)
        if self.per_agent:
            scale = np.append(scale, 1.0)[np.minimum(agent_index, len(scale))]
        return scale
