"""`EnvStep`: the replies of some envs in one form, whatever the autoreset mode."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import Where, rows_of
from marlvec.vector.vector_step import VectorStep

__all__ = ["index_of", "EnvStep"]


def index_of(ids: NDArray[np.int64]) -> Where:
    """Return ascending row numbers (n,) as an index: a slice if evenly spaced (four times as fast as an array)."""
    rows = rows_of(ids)
    if isinstance(rows, slice) or not len(ids):
        return rows
    first, last = int(ids[0]), int(ids[-1])
    step, rest = divmod(last - first, len(ids) - 1)
    if rest or np.count_nonzero(ids[1:] - ids[:-1] != step):
        return ids
    return slice(first, last + 1, step)


AnyArray = NDArray[Any]
_FLAGS = ("terminated", "truncated", "missing", "alive", "acting", "done", "fault", "quiet")


class EnvStep:
    """Rows of some envs in env order: the end of an ended episode together with the beginning of the next.

    Same-step mode returns both at once. In the other modes `renew` adds the new episodes' first rows. ``writable``:
    whether the step's arrays are this object's to write to.

    Attributes:
        env_ids: (n,) int64, ascending; ``everything``: these are all envs; ``where``: the same as an index.
        obs, final: Per group, per leaf: (n, A_g, …), present and final observations.
        missing: (n, A) bool, the agent ended and has no final observation.
        masks: Per group (n, A_g, k) bool, or None.
        rewards: (n, A) float64.
        terminated, truncated, ended, alive, acting: (n, A) bool; no agent has ended in an episode that was lost.
        eventful: Whether any agent has ended, or an episode is over.
        done, fault, quiet: (n,) bool.
        given: (env id, agent name, action, whether it is the env's) of agents that do something unasked.
        untrained: Ids of envs whose episode begins here and is for no batch.
        is_first: Whether all these rows begin episodes, and nothing came before them; see `OnDemandScheduler`.
        state, final_state: (n, …) global states, the latter where ``done``; None where the envs give none.
        results: What the envs returned, as it came: at once, or one after the other.
    """

    __slots__ = (
        "_writable",
        "acting",
        "alive",
        "done",
        "ended",
        "env_ids",
        "eventful",
        "everything",
        "fault",
        "final",
        "final_state",
        "given",
        "is_first",
        "masks",
        "missing",
        "obs",
        "quiet",
        "results",
        "rewards",
        "state",
        "terminated",
        "truncated",
        "untrained",
        "where",
    )

    def __init__(self, step: VectorStep, num_envs: int, *, writable: bool) -> None:
        self.results = [step]
        self.env_ids = step.env_ids
        self.everything = len(step.env_ids) == num_envs
        self.obs, self.final, self.masks = step.obs_leaves, step.final_leaves, step.action_masks
        self.rewards, self.terminated, self.truncated = step.rewards, step.terminated, step.truncated
        self.missing = step.final_missing
        self.alive, self.acting, self.done = step.alive, step.acting, step.done
        self.eventful = step.eventful
        # Where nothing has happened these are all False, like the done flags, and nothing writes to them.
        self.fault, self.quiet = (step.fault, step.quiet) if self.eventful else (step.done, step.done)
        self.state, self.final_state = step.state, step.final_state
        self.given, self.untrained = step.off_policy_actions, step.untrained
        self.is_first = False
        self._writable = writable
        if not self.everything and np.count_nonzero(step.env_ids[1:] < step.env_ids[:-1]):
            self._choose(np.argsort(step.env_ids))  # first come, first in row: no order to build on
        self.where: Where = slice(None) if self.everything else index_of(self.env_ids)
        self.ended = self.terminated | self.truncated if self.eventful else self.terminated
        if self.eventful and np.count_nonzero(self.fault):
            self.ended[self.fault] = False  # there are no final observations of what was lost

    def _choose(self, rows: NDArray[np.int64]) -> None:
        same = self.final is self.obs
        self.obs = [[leaf[rows] for leaf in leaves] for leaves in self.obs]
        self.final = self.obs if same else [[leaf[rows] for leaf in leaves] for leaves in self.final]
        self.masks = [None if mask is None else mask[rows] for mask in self.masks]
        for name in ("env_ids", "rewards", *_FLAGS):
            setattr(self, name, getattr(self, name)[rows])
        if self.state is not None and self.final_state is not None:
            self.state, self.final_state = self.state[rows], self.final_state[rows]
        self._writable = True

    def part(self, chosen: NDArray[np.bool_]) -> EnvStep:
        """Return the rows where the mask (n,) is True."""
        part = copy.copy(self)
        part._choose(np.flatnonzero(chosen))
        part.everything, part.where, part.ended = False, index_of(part.env_ids), self.ended[chosen]
        mine = set(part.env_ids.tolist())
        part.given = [given for given in self.given if given[0] in mine]
        part.untrained = [i for i in self.untrained if i in mine]
        return part

    @classmethod
    def join(cls, parts: Sequence[EnvStep]) -> EnvStep:
        """Join rows of different envs that arrived one after the other into one step."""
        if len(parts) == 1:
            return parts[0]
        whole = copy.copy(parts[0])
        whole.obs = _stack([part.obs for part in parts])
        apart = any(part.final is not part.obs for part in parts)
        whole.final = _stack([part.final for part in parts]) if apart else whole.obs
        lengths = [len(part.env_ids) for part in parts]
        whole.masks = [_join_masks(masks, lengths) for masks in zip(*(part.masks for part in parts), strict=True)]
        for name in ("env_ids", "rewards", *_FLAGS, "ended"):
            setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        for name in ("state", "final_state"):
            if getattr(whole, name) is not None:
                setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        whole.eventful = any(part.eventful for part in parts)
        whole.results = [step for part in parts for step in part.results]
        order = np.argsort(whole.env_ids)
        whole._choose(order)
        whole.ended, whole.where = whole.ended[order], index_of(whole.env_ids)
        whole.given = sorted((given for part in parts for given in part.given), key=itemgetter(0))
        whole.untrained = sorted(i for part in parts for i in part.untrained)
        return whole

    def own(self) -> None:
        """Copy the arrays that are still to be read, before the next call of the envs overwrites them."""
        if not self._writable:
            self.obs = [[leaf.copy() for leaf in leaves] for leaves in self.obs]
            self.masks = [None if mask is None else mask.copy() for mask in self.masks]
            self.alive, self.acting = self.alive.copy(), self.acting.copy()
            self.state = None if self.state is None else self.state.copy()
            self._writable = True

    def renew(self, other: EnvStep) -> None:
        """Replace the last rows of ended episodes by the first rows of new ones; call `own` before the envs' reset."""
        at = np.searchsorted(self.env_ids, other.env_ids)
        for leaves, new_leaves in zip(self.obs, other.obs, strict=True):
            for leaf, new in zip(leaves, new_leaves, strict=True):
                leaf[at] = new
        for g, (mask, new_mask) in enumerate(zip(self.masks, other.masks, strict=True)):
            if new_mask is None:
                continue
            if mask is None:  # no env has given one before
                self.masks[g] = mask = np.ones((len(self.env_ids), *new_mask.shape[1:]), np.bool_)
            mask[at] = new_mask
        if self.state is not None:
            self.state[at] = other.state
        self.given = [given for given in self.given if given[0] not in other.env_ids] + other.given
        self.untrained = [i for i in self.untrained if i not in other.env_ids] + other.untrained
        self.alive[at] = other.alive
        self.acting[at] = other.acting


def _stack(parts: Sequence[list[list[AnyArray]]]) -> list[list[AnyArray]]:
    """Per group, per leaf: the parts' rows one after the other."""
    return [[np.concatenate(leaves) for leaves in zip(*group, strict=True)] for group in zip(*parts, strict=True)]


def _join_masks(masks: Sequence[AnyArray | None], lengths: Sequence[int]) -> AnyArray | None:
    """Masks of one group; before an env gives the first one everything is allowed."""
    given = next((mask for mask in masks if mask is not None), None)
    if given is None:
        return None
    shape, pairs = given.shape[1:], zip(masks, lengths, strict=True)
    return np.concatenate([np.ones((n, *shape), np.bool_) if mask is None else mask for mask, n in pairs])
