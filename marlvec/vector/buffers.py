"""Every number that crosses a process, laid out once as flat leaf arrays over all rows.

`Buffers` looks the same on the heap and in shared memory; nothing outside this file can tell. Axis letters: N envs,
A agents, A_g agents of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec

__all__ = ["Buffers", "Selection", "split_flags"]

_ALIGNMENT = 64  # a cache line, so that no two arrays share one

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Selection = slice | NDArray[np.int64]


class Buffers:
    """The arrays of ``num_envs`` envs of one spec.

    Args:
        spec: What the envs look like.
        num_envs: N.
        memory: A writable buffer of at least `Buffers.nbytes(spec, num_envs)` bytes, zero-filled; None for the heap.

    Attributes:
        obs: Per group, per leaf: (N, A_g, *leaf.shape).
        final_obs: Likewise: each agent's observation at its end.
        actions: Likewise, of the action space.
        action_masks: Per group (N, A_g, n) bool, or None.
        reward: (N, A) float64.
        flags: (N, 4A + 2) bool, everything below in one block, so that one copy takes all; see `split_flags`.
        events: (N, 2A + 2) bool, those of them that tell of this step alone.
        terminated, truncated: (N, A) bool.
        done: (N,) bool, the env's episode ended in this step.
        reset_mask: (N,) bool, this row is a next-step autoreset.
        alive, acting: (N, A) bool.
        state: (N, *state_space.shape), or None.
    """

    __slots__ = (
        "_arrays",
        "acting",
        "action_masks",
        "actions",
        "alive",
        "done",
        "events",
        "final_obs",
        "flags",
        "num_envs",
        "obs",
        "reset_mask",
        "reward",
        "spec",
        "state",
        "terminated",
        "truncated",
    )

    def __init__(self, spec: EnvSpec, num_envs: int, memory: Any = None) -> None:
        arrays: dict[str, AnyArray] = {}
        if memory is None:
            for name, shape, dtype in _layout(spec, num_envs):
                arrays[name] = np.zeros(shape, dtype)
        else:
            # The arrays keep the mapping alive, so a view that outlives the vectorizer is still safe to read.
            flat = np.frombuffer(memory, np.uint8)
            offset = 0
            for name, shape, dtype in _layout(spec, num_envs):
                size = _nbytes(shape, dtype)
                arrays[name] = flat[offset : offset + size].view(dtype).reshape(shape)
                offset += _aligned(size)
        self._adopt(spec, num_envs, arrays)
        if memory is None:
            self.clear_masks()

    def _adopt(self, spec: EnvSpec, num_envs: int, arrays: dict[str, AnyArray]) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self._arrays = arrays
        groups = list(enumerate(spec.groups))
        self.obs = [[arrays[f"obs/{g}/{k}"] for k in range(len(group.observation_tree.leaves))] for g, group in groups]
        self.final_obs = [[arrays[f"final/{g}/{k}"] for k in range(len(leaves))] for g, leaves in enumerate(self.obs)]
        self.actions = [[arrays[f"action/{g}/{k}"] for k in range(len(gr.action_tree.leaves))] for g, gr in groups]
        self.action_masks = [arrays.get(f"mask/{g}") for g, _ in groups]
        self.reward: NDArray[np.float64] = arrays["reward"]
        self.flags: BoolArray = arrays["flags"]
        agent_num = len(spec.agents)
        self.events = self.flags[:, : 2 * agent_num + 2]
        (
            self.terminated,
            self.truncated,
            self.done,
            self.reset_mask,
            self.alive,
            self.acting,
        ) = split_flags(self.flags, agent_num)
        self.state: AnyArray | None = arrays.get("state")

    @staticmethod
    def nbytes(spec: EnvSpec, num_envs: int) -> int:
        """Bytes of memory that ``num_envs`` envs need; at least one."""
        return max(1, sum(_aligned(_nbytes(shape, dtype)) for _, shape, dtype in _layout(spec, num_envs)))

    def rows(self, start: int, stop: int) -> Buffers:
        """Views of the envs ``start`` to ``stop - 1``, as buffers of their own."""
        view = object.__new__(Buffers)
        view._adopt(self.spec, stop - start, {name: array[start:stop] for name, array in self._arrays.items()})
        return view

    def slot(self, i: int) -> Slot:
        """Env ``i``'s row, for the env to write into."""
        return Slot(
            self.spec,
            obs=[[leaf[i] for leaf in leaves] for leaves in self.obs],
            actions=[[leaf[i] for leaf in leaves] for leaves in self.actions],
            action_mask=[None if mask is None else mask[i] for mask in self.action_masks],
            reward=self.reward[i],
            terminated=self.terminated[i],
            truncated=self.truncated[i],
            alive=self.alive[i],
            acting=self.acting[i],
            state=None if self.state is None else self.state[i],
        )

    def clear_masks(self, rows: Selection | int = slice(None)) -> None:
        """Allow every action in these envs."""
        for mask in self.action_masks:
            if mask is not None:
                mask[rows] = True

    # Without shared memory rows travel by value. Names are in layout order on both sides.

    def pack_results(self, rows: Selection) -> list[AnyArray]:
        """Copy what envs write, for these rows."""
        return [self._arrays[name][rows] for name in self._result_names()]

    def unpack_results(self, rows: Selection, packed: Sequence[AnyArray]) -> None:
        """Write what `pack_results` gave into these rows."""
        for name, array in zip(self._result_names(), packed, strict=True):
            self._arrays[name][rows] = array

    def pack_actions(self, rows: Selection) -> list[AnyArray]:
        """Copy these rows' actions."""
        return [leaf[rows] for leaves in self.actions for leaf in leaves]

    def unpack_actions(self, rows: Selection, packed: Sequence[AnyArray]) -> None:
        """Write what `pack_actions` gave into these rows."""
        targets = [leaf for leaves in self.actions for leaf in leaves]
        for leaf, array in zip(targets, packed, strict=True):
            leaf[rows] = array

    def _result_names(self) -> list[str]:
        return [name for name in self._arrays if not name.startswith("action/")]


def split_flags(flags: BoolArray, agent_num: int) -> tuple[BoolArray, ...]:
    """Views of a block of flags: terminated, truncated (n, A), done, reset_mask (n,), alive, acting (n, A)."""
    a = agent_num
    return (
        flags[:, :a],
        flags[:, a : 2 * a],
        flags[:, 2 * a],
        flags[:, 2 * a + 1],
        flags[:, 2 * a + 2 : 3 * a + 2],
        flags[:, 3 * a + 2 :],
    )


def _layout(spec: EnvSpec, num_envs: int) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of every array, in memory order; the same on both sides, from the same arguments."""
    n, agent_num = num_envs, len(spec.agents)
    flag = np.dtype(np.bool_)
    for g, group in enumerate(spec.groups):
        size = len(group.agents)
        for kind, tree in (
            ("obs", group.observation_tree),
            ("final", group.observation_tree),
            ("action", group.action_tree),
        ):
            for k, leaf in enumerate(tree.leaves):
                yield f"{kind}/{g}/{k}", (n, size, *leaf.shape), leaf.dtype
        if group.mask_size is not None:
            yield f"mask/{g}", (n, size, group.mask_size), flag
    yield "reward", (n, agent_num), np.dtype(np.float64)
    yield "flags", (n, 4 * agent_num + 2), flag
    if spec.state_space is not None:
        assert spec.state_space.shape is not None
        yield "state", (n, *spec.state_space.shape), np.dtype(spec.state_space.dtype)


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
