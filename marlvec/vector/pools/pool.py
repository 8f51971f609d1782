"""`Pool`: the contract of one object that steps many envs, written by another library.

Adapters beside this file convert EnvPool's pools and Gymnasium's vector envs; `PoolVectorEnv` uses only `Pool`. A pool
gets requests (`reset`, `send`) and replies later (`recv`), in any order of envs.

Axis letters: n envs of one call, k episodes that ended in it, A agents, A_g agents of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, Info
from marlvec.errors import ArgumentError
from marlvec.spaces import Leaf
from marlvec.vector.data.infos import Path

__all__ = ["FinalRows", "Leaves", "Pool", "PoolReply", "harmless_action"]

BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]
Leaves = list[list[NDArray[Any]]]
"""Per group, per leaf of its space: an array whose first axes are envs and the group's agents."""


@dataclass(slots=True)
class FinalRows:
    """Final rows of ended episodes, from a pool that begins the next episodes in the same step."""

    rows: Ids  # (k,) int64, ascending: positions of these envs in the reply
    obs: Leaves  # per group, per leaf (k, A_g, *leaf.shape)
    state: NDArray[Any] | None = None  # (k, *state_space.shape), if the pool returns states
    present: BoolArray | None = None  # (k, A): in the next episodes, whose first rows are in the reply; None: all
    infos: dict[int, Info] = field(default_factory=dict)  # of the final rows, by env


@dataclass(slots=True)
class PoolReply:
    """Rows of ``n`` envs, in order of arrival.

    A pool that sets ``alive`` returns all rows ready to use: zeros for agents that were not in the episode before,
    ``acting`` only for agents that are alive, masks that allow everything for the others, and ``done``.
    """

    env_ids: Ids  # (n,) int64
    obs: Leaves  # per group, per leaf (n, A_g, *leaf.shape); zeros where an agent has no row
    reward: NDArray[Any]  # (n, A)
    terminated: BoolArray  # (n, A)
    truncated: BoolArray  # (n, A)
    # (n, A), agents with a row; None: all. Rows of agents that had already left the episode are ignored.
    present: BoolArray | None = None
    acting: BoolArray | None = None  # (n, A), agents that must act next; None: all present agents
    masks: Sequence[BoolArray | None] | None = None  # per group (n, A_g, choices), or None
    # (n, A), agents in the episode after this step, or in the next one where `finals` has the row; None: derived
    alive: BoolArray | None = None
    done: BoolArray | None = None  # (n,), envs whose episode ended in this step; None: derived
    elapsed: NDArray[Any] | None = None  # (n,), steps since the reset
    infos: dict[int, Info] = field(default_factory=dict)  # further infos, by env
    # further infos, path → (n, …), or (n, A, …) under `OF_AGENTS` of data/infos.py
    columns: dict[Path, NDArray[Any]] = field(default_factory=dict)
    has_columns: BoolArray | None = None  # (n,), envs whose columns are valid; None: all
    finals: FinalRows | None = None  # of episodes that the pool replaced by new ones in this step
    state: NDArray[Any] | None = None  # (n, *state_space.shape)
    # The receiver may keep the arrays in `obs`: rows of all envs in order, zeros where an agent is not in the episode,
    # never written to again by the pool. They may be read-only.
    gives_obs: bool = False

    def select(self, which: BoolArray | Ids) -> PoolReply:
        """Return the rows where ``which`` is True, or at these positions."""
        chosen: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.ndarray):
                chosen[entry.name] = value[which]
        ids = set(chosen["env_ids"].tolist())
        n = len(self.env_ids)
        return replace(
            self,
            **chosen,
            obs=[[leaf[which] for leaf in leaves] for leaves in self.obs],
            masks=None if self.masks is None else [None if mask is None else mask[which] for mask in self.masks],
            infos={i: info for i, info in self.infos.items() if i in ids},
            columns={path: column[which] for path, column in self.columns.items()},
            finals=None if self.finals is None else _select_finals(self.finals, np.arange(n)[which], ids),
            gives_obs=False,
        )


class Pool(ABC):
    """Many envs of one kind, with batched requests and replies."""

    spec: EnvSpec  # of one env; with a `state_space` the pool can return global states
    num_envs: int  # N, the envs that callers see: 0 to N - 1
    num_spares: int = 0  # hidden envs, N to N + num_spares - 1, which fill batches
    batch_size: int  # number of rows for which `recv` waits, unless `synchronous`
    # The pool's own mode, an `AutoresetMode` or its name. "next_step": the next `send` to an env begins its next
    # episode, whatever the action; "same_step": the pool begins it at once, and reports the old one in
    # `PoolReply.finals`.
    autoreset: str
    steps_all: bool = False  # `send` requires all envs
    synchronous: bool = True  # each request, of any number of envs, gets one reply, before the next request
    fills_idle: bool = False  # `send` itself replaces actions of agents that do not act by harmless ones
    brings_state: bool = False  # replies must have `PoolReply.state`; set before the first call
    promised_limit: int | None = None  # a longer episode raises: the pool ignored its ``max_episode_steps``

    def warm_up(self) -> None:
        """Compile and allocate before the first call; ``brings_state`` is already set."""

    def action_dtype(self, leaf: Leaf) -> np.dtype[Any]:
        """Return the dtype of this leaf's actions in `send`; by default the leaf's dtype."""
        return leaf.dtype

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Raise `ArgumentError` if the pool does not support these arguments of a reset."""

    @abstractmethod
    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Request new episodes of these envs, which may include spares."""

    @abstractmethod
    def send(self, ids: Ids, actions: Leaves, acting: BoolArray) -> None:
        """Request a step of these envs, ascending.

        `actions` are per group, per leaf (n, A_g, *leaf.shape), valid; the pool must not keep the arrays. `acting` (n,
        A) bool are agents whose actions count; all False in envs whose episode is over.
        """

    @abstractmethod
    def recv(self) -> PoolReply:
        """Wait for the next reply."""

    def forget(self) -> bool:
        """Discard all requests after a Ctrl-C at any point; return whether the pool can continue after a reset."""
        # The next call is a reset; no env is stepped before it.
        return False

    def state(self) -> NDArray[Any]:
        """Return all envs' global states, (N, *state_space.shape); called only with a ``state_space``."""
        raise NotImplementedError(f"{self.spec.name}: state()")

    # --- saved states, between two calls

    def state_obstacle(self) -> str | None:
        """Return why states of envs cannot be saved, and what to do; None if they can."""
        return (
            f"{self.spec.name} keeps the states of its envs to itself; backend='async' or 'native' saves them, where "
            f"it has them"
        )

    def get_state(self, ids: Ids) -> dict[str, Any]:
        """Copy all state that the next steps of these envs depend on, name → array (n, …); plain data."""
        raise NotImplementedError(f"{self.spec.name}: get_state()")

    def check_state(self, state: Any, n: int) -> None:
        """Raise `ArgumentError` unless a state from `get_state` of ``n`` envs fits these envs."""
        raise ArgumentError(f"set_state(): {self.state_obstacle()}")

    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        """Restore states from `get_state`: env ``ids[k]`` gets entry ``places[k]``."""
        raise NotImplementedError(f"{self.spec.name}: set_state()")

    @abstractmethod
    def env(self, i: int) -> Any:
        """Return env ``i`` as an object, for control calls."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""


def harmless_action(space: Any) -> NDArray[Any]:
    """Return an action in the space, for agents that need not act."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is not None and high is not None:
        return np.clip(np.zeros(space.shape, space.dtype), low, high)
    return np.asarray(np.zeros(space.shape, space.dtype) + getattr(space, "start", 0), space.dtype)


def _select_finals(finals: FinalRows, places: Ids, ids: set[int]) -> FinalRows:
    """Select the final rows at these positions of a reply with envs ``ids``."""
    kept = np.flatnonzero(np.isin(places, finals.rows))  # rows of the new reply
    order = np.searchsorted(finals.rows, places[kept])
    return FinalRows(
        rows=kept,
        obs=[[leaf[order] for leaf in leaves] for leaves in finals.obs],
        state=None if finals.state is None else finals.state[order],
        present=None if finals.present is None else finals.present[order],
        infos={i: info for i, info in finals.infos.items() if i in ids},
    )
