"""`StateInObs`: shows each agent the env's global state, beside or behind its observation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Dict, Space

from marlvec.connectors.agent._support.leafwise_obs import append_to_obs, appended_space
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree

__all__ = ["StateInObs"]


class StateInObs(AgentConnector):
    """Puts column ``state`` beside or behind the observation, for policies and values that see the whole env.

    The column is there where the envs were made with ``make(..., state=True)``.

    Args:
        state_space: Space of one state: ``envs.state_space``.
        mode: ``"dict"`` for ``{"obs": …, "state": …}``; ``"append"`` for one vector, where both are vectors.

    Raises:
        ArgumentError: ``mode`` is neither, or ``state_space`` is no space.
        UnsupportedSpaceError: Where a space is first seen: with ``"append"``, observation or state is no vector.
        ContractError: In a call: the rows have no column ``state``, or it is not of ``state_space``.
    """

    def __init__(self, state_space: Space[Any], mode: Literal["dict", "append"] = "dict") -> None:
        if not isinstance(state_space, Space):
            raise ArgumentError(
                f"state_space must be a space, as envs.state_space is; got {type(state_space).__name__}"
            )
        if mode not in ("dict", "append"):
            raise ArgumentError(f'mode must be "dict" or "append", got {mode!r}')
        self.state_space = state_space
        self.mode = mode
        self._tree = SpaceTree(state_space)
        self._dtype: np.dtype[Any] | None = None

    def __call__(self, rows: Rows) -> Rows:
        if "state" not in rows:
            raise ContractError(
                f"{self.name} needs column 'state', got {list(rows.keys())}: make the envs with make(..., state=True)"
            )
        state = self._checked(rows)
        if self.mode == "dict":
            return rows.replace(obs={"obs": rows.obs, "state": state})
        if self._dtype is None:
            raise self._not_set_up()
        return append_to_obs(rows, state, self._dtype)

    def setup(self, space: Space[Any]) -> None:
        after = self.output_space(space)
        self._dtype = None if after.dtype is None else np.dtype(after.dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        if self.mode == "dict":
            return Dict(OrderedDict([("obs", space), ("state", self.state_space)]))
        if not isinstance(self.state_space, Box) or len(self.state_space.shape) != 1:
            raise UnsupportedSpaceError(
                f'{self.name} cannot append {self.state_space}: use mode="dict", then FlattenObs'
            )
        return appended_space(space, self.state_space, 1, self.name)

    def _checked(self, rows: Rows) -> Any:
        leaves = self._tree.flatten(rows.state)
        for leaf, value in zip(self._tree.leaves, leaves, strict=True):
            if not leaf.is_object and (value.shape[1:] != leaf.shape or value.dtype != leaf.dtype):
                raise ContractError(
                    f"{self.name} expects {leaf.dtype} of shape {leaf.shape} for {leaf} of the state, and got "
                    f"{value.dtype} of shape {value.shape[1:]}; give it envs.state_space"
                )
        return self._tree.unflatten(leaves)
