"""`EpsilonGreedy`: a random action with probability epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors._support.executed_actions import ExecutedActions, is_given
from marlvec.connectors._support.row_random import RowRandom
from marlvec.connectors.action.decay import Decay
from marlvec.connectors.action.valid_actions import Choices, row_name
from marlvec.connectors.connector import ActionConnector, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree

__all__ = ["EpsilonGreedy"]


class EpsilonGreedy(ActionConnector):
    """Replaces an agent's action by a random one with probability ``epsilon``, while training.

    The batch gets a column ``actions_executed``: what the agent did, in the policy's space. Off-policy learners
    (Q-learning) take this column; ``actions`` stays what the policy chose. Actions that no policy chose
    (``off_policy``) pass unchanged.

    Draws evenly from every Discrete and MultiDiscrete of the action; from what ``action_mask`` allows where the action
    is one of the two itself and rows have the column. Other leaves pass unchanged.

    With ``final`` and ``decay_steps`` the probability goes linearly from ``epsilon`` to ``final``. Each agent of each
    env counts its own decisions, so with 16 envs a decay over 16,000 steps of all of them is ``decay_steps=1000``. What
    is assigned to ``epsilon`` holds from the next call on.

    Args:
        epsilon: Probability, at first.
        final: Probability after the decay; None to stay at ``epsilon``.
        decay_steps: Decisions of an agent, while training, until then.
        seed: Equal seeds give equal draws.

    Raises:
        ArgumentError: A probability is not in [0, 1], or only one of ``final`` and ``decay_steps`` is given.
        UnsupportedSpaceError: Where a space is first seen: there is nothing to choose from in it.
        ContractError: In a call: a mask does not fit the space, or allows nothing.
    """

    def __init__(
        self, epsilon: float = 0.1, *, final: float | None = None, decay_steps: int | None = None, seed: int = 0
    ) -> None:
        for name, value in (("epsilon", epsilon), ("final", final)):
            if value is not None and not 0 <= value <= 1:
                raise ArgumentError(f"{name} must be a probability in [0, 1], got {value}")
        self.epsilon = epsilon
        self.final = final
        self.decay_steps = decay_steps
        self.seed = seed
        self._decay = Decay(final, decay_steps)
        self._random = RowRandom(seed, "EpsilonGreedy")
        self._tree: SpaceTree | None = None
        self._executed: ExecutedActions | None = None
        self._choices: list[tuple[int, Choices]] = []
        self._size = 0

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None or self._executed is None:
            raise self._not_set_up()
        if not self.training:
            return self._executed.send(rows, rows.actions_for_env, explores=True)
        drawn = self._random.uniform(rows, 1 + self._size)
        which = np.flatnonzero((drawn[:, :1] < self._decay(self.epsilon, rows))[:, 0] & ~is_given(rows))
        self._decay.count(rows)
        mask = self._mask(rows)
        leaves = self._tree.flatten(rows.actions_for_env)
        at = 1
        for i, choices in self._choices:
            end = at + len(choices.sizes)
            chosen = choices.pick(
                drawn[which, at:end], None if mask is None else mask[which], lambda j: row_name(rows, int(which[j]))
            )
            picked = choices.write(chosen)
            given = np.asarray(leaves[i])
            # Also where no row explores: a dtype that depended on the draws would depend on which rows are in the
            # batch.
            leaves[i] = given.astype(np.result_type(given, picked))
            leaves[i][which] = picked
            at = end
        return self._executed.send(rows, self._tree.unflatten(leaves), explores=True)

    def _mask(self, rows: Rows) -> NDArray[np.bool_] | None:
        """What the rows' actions may be, where masks are of the action as a whole."""
        assert self._tree is not None
        if not self._tree.is_leaf or "action_mask" not in rows:
            return None
        return self._choices[0][1].check(rows.action_mask)

    def setup(self, space: Space[Any]) -> None:
        self._tree, self._choices = SpaceTree(space), _choices(space)
        self._executed = ExecutedActions(space, self.action_space)
        self._size = sum(len(choices.sizes) for _, choices in self._choices)

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        if not _choices(space):
            raise UnsupportedSpaceError(
                f"EpsilonGreedy needs a Discrete or MultiDiscrete to choose from, got {space}; "
                f"put DiscretizeActions behind it, or use GaussianNoise"
            )
        return space

    def state_dict(self) -> State:
        return self._decay.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._decay.load_state_dict(state)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        return self._decay.merge_states(states)

    def take_merged(self, state: Mapping[str, Any]) -> None:
        self._decay.take_merged(state)


def _choices(space: Space[Any]) -> list[tuple[int, Choices]]:
    found = enumerate(Choices.of(leaf.space) for leaf in SpaceTree(space).leaves)
    return [(i, choices) for i, choices in found if choices is not None]
