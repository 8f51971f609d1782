"""Allowed actions in the place of forbidden ones."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors.action.choices import Choices
from marlvec.connectors.action.row_name import row_name
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.row_random import RowRandom
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["MaskInvalid"]


class MaskInvalid(ActionConnector):
    """Replaces actions that ``action_mask`` forbids, in ``actions_for_env``; the policy's own stay in ``actions``.

    Works on a Discrete, and on a MultiDiscrete dimension by dimension, whose masks stand one after the other. Spaces of
    other kinds have no masks, and pass unchanged, as do rows without the column. It belongs behind whatever changes
    actions, for its mask is the env's.

    Args:
        fallback: What is sent instead: the ``"first"`` that is allowed, a ``"random"`` one of them, or nothing:
            ``"raise"``.
        seed: Of the random ones.

    Raises:
        ArgumentError: ``fallback`` is none of the three.
        ContractError: In a call: a mask does not fit the space or allows nothing, an action is outside the space, or
            one is forbidden and ``fallback`` is ``"raise"``; names env and agent.
    """

    def __init__(self, fallback: Literal["first", "random", "raise"] = "first", *, seed: int = 0) -> None:
        if fallback not in ("first", "random", "raise"):
            raise ArgumentError(f'fallback must be "first", "random" or "raise", got {fallback!r}')
        self.fallback = fallback
        self.seed = seed
        self._random = RowRandom(seed, "MaskInvalid")
        self._is_set_up = False
        self._choices: Choices | None = None

    def __call__(self, rows: Rows) -> Rows:
        if not self._is_set_up:
            raise self._not_set_up()
        if self._choices is None or "action_mask" not in rows.columns:
            return rows
        mask = self._choices.check(rows.action_mask)
        chosen = self._choices.read(rows.actions_for_env, rows)
        allowed = self._choices.allowed(mask, chosen)
        if allowed.all():
            return rows.replace(actions_for_env=self._choices.write(chosen))  # in the space's dtype, as below
        if self.fallback == "raise":
            i = int(np.flatnonzero(~allowed.all(axis=1))[0])
            raise ContractError(
                f"the action {rows.actions_for_env[i]} of {row_name(rows, i)} is forbidden by its action mask; let the "
                f"policy mind the mask, or choose another fallback"
            )
        if self.fallback == "random":
            uniform = self._random.uniform(rows, len(self._choices.sizes))
        else:
            uniform = np.zeros(chosen.shape)
        instead = self._choices.pick(uniform, mask, lambda i: row_name(rows, i))
        return rows.replace(actions_for_env=self._choices.write(np.where(allowed, chosen, instead)))

    def setup(self, space: Space[Any]) -> None:
        self._is_set_up = True
        self._choices = Choices.of(space)
