"""`Pool`: the contract of one object that steps many envs, written by another library.

EnvPool's pools and Gymnasium's vector envs are brought to it by the adapters beside this file; `PoolVectorEnv`
talks to nothing else. A pool is asked (`reset`, `send`) and answers later (`recv`), in whatever order its envs come.

Axis letters: n envs of one call, A agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, Info
from marlvec.vector.data.infos import Path

__all__ = ["FinalRows", "Pool", "PoolReply"]

BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]


@dataclass(slots=True)
class FinalRows:
    """Last rows of episodes, from a pool that has begun the next ones in the same step.

    Attributes:
        ended: (n,) bool, in which envs.
        obs: Per leaf (n, A, *leaf.shape), the final observations; other rows mean nothing.
        infos: Their infos, by env.
    """

    ended: BoolArray
    obs: list[NDArray[Any]]
    infos: dict[int, Info] = field(default_factory=dict)


@dataclass(slots=True)
class PoolReply:
    """Rows of ``n`` envs, in the order in which they came.

    Attributes:
        env_ids: (n,) int64.
        obs: Per leaf of the observation space (n, A, *leaf.shape); zeros where an agent has no row.
        reward: (n, A).
        terminated, truncated: (n, A) bool.
        present: (n, A) bool, who has a row; None: all. Rows of those who had one before and were not in the
            episode any more mean nothing.
        acting: (n, A) bool, who must act next; None: all that are present.
        mask: (n, A, k) bool, action masks; None: the pool gives none.
        elapsed: (n,), steps since the reset; None: the pool does not say.
        infos: What else it says, by env.
        columns: Likewise, a table at a time: path → (n, …), or (n, A, …) under `marlvec.vector.data.infos.OF_AGENTS`.
        has_columns: (n,) bool, whose columns mean something; None: those of all envs.
        finals: Of episodes that the pool has replaced by the next in this step; None: it never does.
    """

    env_ids: Ids
    obs: list[NDArray[Any]]
    reward: NDArray[Any]
    terminated: BoolArray
    truncated: BoolArray
    present: BoolArray | None = None
    acting: BoolArray | None = None
    mask: BoolArray | None = None
    elapsed: NDArray[Any] | None = None
    infos: dict[int, Info] = field(default_factory=dict)
    columns: dict[Path, NDArray[Any]] = field(default_factory=dict)
    has_columns: BoolArray | None = None
    finals: FinalRows | None = None

    def select(self, which: BoolArray | Ids) -> PoolReply:
        """Some of the rows: where ``which`` is True, or at these places."""
        return _only(self, which)


class Pool(ABC):
    """Many envs of one kind, asked and answering in batches.

    Attributes:
        spec: What one env looks like. All agents have equal spaces.
        num_envs: N, the envs that are for use: 0 to N - 1.
        num_spares: Further ones, N to N + num_spares - 1, which callers do not see: they fill up batches.
        batch_size: How many rows `recv` waits for, unless it is ``synchronous``.
        autoreset: What the pool does by itself when an episode ends, an `AutoresetMode` or its name: ``"next_step"``:
            the next `send` to that env begins another, whatever the action; ``"disabled"``: nothing; ``"same_step"``:
            it begins another at once, and reports the old one in `PoolReply.finals`.
        steps_all: Whether `send` takes all envs only.
        synchronous: Whether it answers every call by itself, of however many envs, and takes no other meanwhile.
    """

    spec: EnvSpec
    num_envs: int
    num_spares: int = 0
    batch_size: int
    autoreset: str
    steps_all: bool = False
    synchronous: bool = True

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Look at the arguments of a reset before anything happens.

        Raises:
            ArgumentError: It cannot do that.
        """

    @abstractmethod
    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Ask these envs, spares among them, for new episodes."""

    @abstractmethod
    def send(self, ids: Ids, actions: Sequence[NDArray[Any]], acting: BoolArray) -> None:
        """Ask these envs for a step.

        Args:
            ids: Which, ascending.
            actions: Per leaf of the action space (n, A, *leaf.shape), which it must not keep; all lie in the space.
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

    @abstractmethod
    def env(self, i: int) -> Any:
        """Env ``i`` as an object, for control calls."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""


def _only(reply: PoolReply, which: BoolArray | Ids) -> PoolReply:
    chosen: dict[str, Any] = {}
    for entry in fields(reply):
        value = getattr(reply, entry.name)
        if isinstance(value, np.ndarray):
            chosen[entry.name] = value[which]
    ids = set(chosen["env_ids"].tolist())
    finals = reply.finals
    return replace(
        reply,
        **chosen,
        obs=[leaf[which] for leaf in reply.obs],
        infos={i: info for i, info in reply.infos.items() if i in ids},
        columns={path: column[which] for path, column in reply.columns.items()},
        finals=None
        if finals is None
        else FinalRows(
            finals.ended[which],
            [leaf[which] for leaf in finals.obs],
            {i: info for i, info in finals.infos.items() if i in ids},
        ),
    )
