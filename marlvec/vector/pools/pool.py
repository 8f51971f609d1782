"""`Pool`: the contract of one object that steps many envs, written by another library.

EnvPool's pools and Gymnasium's vector envs are brought to it by the adapters beside this file; `PoolVectorEnv`
talks to nothing else. A pool is asked (`reset`, `send`) and answers later (`recv`), in whatever order its envs come.

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

__all__ = ["FinalRows", "Leaves", "Pool", "PoolReply"]

BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]
Leaves = list[list[NDArray[Any]]]
"""Per group, per leaf of its space: an array whose first axes are envs and the group's agents."""


@dataclass(slots=True)
class FinalRows:
    """Last rows of the episodes that ended, from a pool that has begun the next ones in the same step.

    Attributes:
        rows: (k,) int64, ascending: which rows of the reply these episodes ended in.
        obs: Per group, per leaf (k, A_g, *leaf.shape): the final observations.
        state: (k, *state_space.shape), the global states in which they ended; None unless the pool brings states.
        present: (k, A) bool, who is in the next episodes, whose first rows the reply has; None: all.
        infos: Their infos, by env.
    """

    rows: Ids
    obs: Leaves
    state: NDArray[Any] | None = None
    present: BoolArray | None = None
    infos: dict[int, Info] = field(default_factory=dict)


@dataclass(slots=True)
class PoolReply:
    """Rows of ``n`` envs, in the order in which they came.

    Attributes:
        env_ids: (n,) int64.
        obs: Per group, per leaf (n, A_g, *leaf.shape); zeros where an agent has no row.
        reward: (n, A).
        terminated, truncated: (n, A) bool.
        present: (n, A) bool, who has a row; None: all. Rows of those who had one before and were not in the
            episode any more mean nothing.
        acting: (n, A) bool, who must act next; None: all that are present.
        masks: Per group (n, A_g, choices) bool, or None where it has none; None: the pool gives none.
        alive: (n, A) bool, who is in the episode after this step, or in the next one where `finals` has the row. A pool
            that says so gives all rows as they are to be shown: zeros of agents that were not in the episode before,
            ``acting`` only of agents that are alive, masks that allow everything to those who do not act, and ``done``.
            None: worked out from the rest.
        done: (n,) bool, whose episode ended in this step; None: worked out from the rest.
        elapsed: (n,), steps since the reset; None: the pool does not say.
        infos: What else it says, by env.
        columns: Likewise, a table at a time: path → (n, …), or (n, A, …) under `marlvec.vector.data.infos.OF_AGENTS`.
        has_columns: (n,) bool, whose columns mean something; None: those of all envs.
        finals: Of episodes that the pool has replaced by the next in this step; None: there are none.
        state: (n, *state_space.shape), the global states; None unless the pool brings them.
        gives_obs: Whether the arrays in ``obs`` are the receiver's to keep: rows of all envs in order, zeros where an
            agent is not in the episode, never written to again by the pool. They may be read-only.
    """

    env_ids: Ids
    obs: Leaves
    reward: NDArray[Any]
    terminated: BoolArray
    truncated: BoolArray
    present: BoolArray | None = None
    acting: BoolArray | None = None
    masks: Sequence[BoolArray | None] | None = None
    alive: BoolArray | None = None
    done: BoolArray | None = None
    elapsed: NDArray[Any] | None = None
    infos: dict[int, Info] = field(default_factory=dict)
    columns: dict[Path, NDArray[Any]] = field(default_factory=dict)
    has_columns: BoolArray | None = None
    finals: FinalRows | None = None
    state: NDArray[Any] | None = None
    gives_obs: bool = False

    def select(self, which: BoolArray | Ids) -> PoolReply:
        """Return some of the rows: where ``which`` is True, or at these places."""
        return _select_rows(self, which)


class Pool(ABC):
    """Many envs of one kind, asked and answering in batches.

    Attributes:
        spec: What one env looks like. With a ``state_space`` the pool can bring global states.
        num_envs: N, the envs that are for use: 0 to N - 1.
        num_spares: Further ones, N to N + num_spares - 1, which callers do not see: they fill up batches.
        batch_size: How many rows `recv` waits for, unless it is ``synchronous``.
        autoreset: What the pool does by itself when an episode ends, an `AutoresetMode` or its name: ``"next_step"``:
            the next `send` to that env begins another, whatever the action; ``"disabled"``: nothing; ``"same_step"``:
            it begins another at once, and reports the old one in `PoolReply.finals`.
        steps_all: Whether `send` takes all envs only.
        synchronous: Whether it answers every call by itself, of however many envs, and takes no other meanwhile.
        fills_idle: Whether `send` itself puts harmless actions in the places of agents that do not act.
        brings_state: Whether replies must have `PoolReply.state`; set before the first call.
    """

    spec: EnvSpec
    num_envs: int
    num_spares: int = 0
    batch_size: int
    autoreset: str
    steps_all: bool = False
    synchronous: bool = True
    fills_idle: bool = False
    brings_state: bool = False

    def warm_up(self) -> None:
        """Do what takes time once, before the first call: compile, allocate. ``brings_state`` is set by now."""

    def action_dtype(self, leaf: Leaf) -> np.dtype[Any]:
        """Return the dtype in which `send` takes actions of this leaf; the leaf's own by default."""
        return leaf.dtype

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Look at the arguments of a reset before anything happens.

        Raises:
            ArgumentError: It cannot do that.
        """

    @abstractmethod
    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Ask these envs, spares among them, for new episodes."""

    @abstractmethod
    def send(self, ids: Ids, actions: Leaves, acting: BoolArray) -> None:
        """Ask these envs for a step.

        Args:
            ids: Which, ascending.
            actions: Per group, per leaf of the action space (n, A_g, *leaf.shape), which it must not keep; all lie in
                the space.
            acting: (n, A) bool, whose actions count; none's in envs whose episode is over.
        """

    @abstractmethod
    def recv(self) -> PoolReply:
        """Wait for the next answer."""

    def forget(self) -> bool:
        """Let go of all that was asked, wherever Ctrl-C came. The next call is a reset, before which no env is stepped.

        Returns:
            Whether it can go on after that.
        """
        return False

    def state(self) -> NDArray[Any]:
        """Return the global states of all envs, (N, *state_space.shape); asked only if there is a ``state_space``."""
        raise NotImplementedError(f"{self.spec.name}: state()")

    # --- saved states, between two calls

    def state_obstacle(self) -> str | None:
        """Return why states of envs cannot be saved, and what to do; None if they can."""
        return (
            f"{self.spec.name} keeps the states of its envs to itself; backend='async' or 'native' saves them, where "
            f"it has them"
        )

    def get_state(self, ids: Ids) -> dict[str, Any]:
        """Copy all that the next steps of these envs depend on.

        Returns:
            Name → array (n, …); plain data.
        """
        raise NotImplementedError(f"{self.spec.name}: get_state()")

    def check_state(self, state: Any, n: int) -> None:
        """Validate a state from `get_state` of ``n`` envs.

        Raises:
            ArgumentError: It is none of such envs; names what differs.
        """
        raise ArgumentError(f"set_state(): {self.state_obstacle()}")

    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        """Put these envs into states from `get_state`; ``places`` says which of those each env gets."""
        raise NotImplementedError(f"{self.spec.name}: set_state()")

    @abstractmethod
    def env(self, i: int) -> Any:
        """Env ``i`` as an object, for control calls."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""


def _select_rows(reply: PoolReply, which: BoolArray | Ids) -> PoolReply:
    chosen: dict[str, Any] = {}
    for entry in fields(reply):
        value = getattr(reply, entry.name)
        if isinstance(value, np.ndarray):
            chosen[entry.name] = value[which]
    ids = set(chosen["env_ids"].tolist())
    n = len(reply.env_ids)
    return replace(
        reply,
        **chosen,
        obs=[[leaf[which] for leaf in leaves] for leaves in reply.obs],
        masks=None if reply.masks is None else [None if mask is None else mask[which] for mask in reply.masks],
        infos={i: info for i, info in reply.infos.items() if i in ids},
        columns={path: column[which] for path, column in reply.columns.items()},
        finals=None if reply.finals is None else _select_finals(reply.finals, np.arange(n)[which], ids),
        gives_obs=False,
    )


def _select_finals(finals: FinalRows, places: Ids, ids: set[int]) -> FinalRows:
    """Final rows of those at these places of a reply, whose envs are ``ids``."""
    kept = np.flatnonzero(np.isin(places, finals.rows))  # rows of the new reply
    order = np.searchsorted(finals.rows, places[kept])
    return FinalRows(
        rows=kept,
        obs=[[leaf[order] for leaf in leaves] for leaves in finals.obs],
        state=None if finals.state is None else finals.state[order],
        present=None if finals.present is None else finals.present[order],
        infos={i: info for i, info in finals.infos.items() if i in ids},
    )
