"""`Buffers`: observations, actions, rewards, flags and masks of all envs as flat arrays, on the heap or shared.

`BufferReuse` copies large arrays into the memory of earlier copies that are no longer in use.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import Slot
from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ArgumentError, ResourceError, SerialisationError
from marlvec.serialization.saved import check_array
from marlvec.serialization.values import object_from, plain_object
from marlvec.spaces import SpaceTree
from marlvec.vector.failures import dump_each, load_each

_ALIGNMENT = 64  # a cache line, so that no two arrays share one

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
EnvSelection = slice | NDArray[np.int64]


class Buffers:
    """The arrays of envs of one spec, on ``memory`` of `nbytes` zeros, or the heap. Objects are always on the heap.

    Attributes:
        obs: Per group, per leaf: (N, A_g, *leaf.shape). Of objects (N, A_g), with None where there is none.
        final_obs: As ``obs``: each agent's observation at its end.
        actions: As ``obs``, of the action space.
        action_masks: Per group (N, A_g, n) bool, or None where the actions are no choices.
        shown_masks: The action masks that users see; see `masks_given`.
        own_choices: Per group (A_g, n) bool, what masks allow where an env forbids nothing; or True: everything.
        reward: (N, A) float64.
        flags: (N, 5A + 3) bool, all flags in one block, so that one copy takes all; see `split_flags`.
        events: (N, 3A + 2) bool, the flags of this step alone.
        terminated, truncated, alive, acting: (N, A) bool.
        final_missing: (N, A) bool, the agent ended in this step and has no observation of it.
        done: (N,) bool, the env's episode ended in this step.
        reset_mask: (N,) bool, this row is a next-step autoreset.
        gave_mask: (N,) bool, the env has given an action mask that its spaces do not declare, now or before.
        state: (N, *state_space.shape), or None.
        final_state: As ``state``: the state in which an episode ended.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, memory: Any = None) -> None:
        arrays: dict[str, AnyArray] = {}
        layout, size = _layout(spec, num_envs)
        # The arrays keep the mapping alive, so a view that outlives the vectorizer is still safe to read.
        flat = None if memory is None else np.frombuffer(memory, np.uint8)
        try:
            for name, cells in _object_layout(spec, num_envs):
                arrays[name] = np.full(cells, None, np.object_)
            for name, shape, dtype, where in layout:
                arrays[name] = np.zeros(shape, dtype) if flat is None else flat[where].view(dtype).reshape(shape)
        except MemoryError as error:
            refusal = ResourceError(
                f"the rows of {num_envs:,} envs need {size:,} bytes of memory, and cannot get them ({error}). Use "
                f"fewer envs, or smaller observations (uint8 instead of float32 for images)"
            )
            refusal.errno = errno.ENOMEM
            raise refusal from error
        self._adopt(spec, num_envs, arrays)
        if memory is None:
            self.clear_masks()

    def _adopt(self, spec: EnvSpec, num_envs: int, arrays: dict[str, AnyArray]) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self._arrays = arrays
        objects = [name for name, array in arrays.items() if array.dtype == np.object_]
        self._results = [name for name in arrays if not name.startswith("action/")]
        self._object_results = [name for name in objects if not name.startswith("action/")]
        self._object_actions = [name for name in objects if name.startswith("action/")]
        self.has_objects = bool(objects)
        groups = list(enumerate(spec.groups))
        self.obs = [[arrays[f"obs/{g}/{k}"] for k in range(len(group.observation_tree.leaves))] for g, group in groups]
        self.final_obs = [[arrays[f"final/{g}/{k}"] for k in range(len(leaves))] for g, leaves in enumerate(self.obs)]
        self.actions = [[arrays[f"action/{g}/{k}"] for k in range(len(gr.action_tree.leaves))] for g, gr in groups]
        self.action_masks: list[BoolArray | None] = [arrays.get(f"mask/{g}") for g, _ in groups]
        if all(group.choices == group.mask_size for _, group in groups):
            self.shown_masks = self.action_masks
        else:
            declares = [group.mask_size is not None for _, group in groups]
            self.shown_masks = [mask if own else None for mask, own in zip(self.action_masks, declares, strict=True)]
        self.own_choices = [_allowed(spec, group) for _, group in groups]
        self.reward: NDArray[np.float64] = arrays["reward"]
        self.flags: BoolArray = arrays["flags"]
        agent_num = len(spec.agents)
        self.events = self.flags[:, : 3 * agent_num + 2]
        self.flag_parts = flag_parts(agent_num)
        (
            self.terminated,
            self.truncated,
            self.final_missing,
            self.done,
            self.reset_mask,
            self.alive,
            self.acting,
            self.gave_mask,
        ) = split_flags(self.flags, agent_num)
        # For what is done again and again with one env's row:
        self._obs_blanks, self._final_blanks = _blanks(self.obs), _blanks(self.final_obs)
        self._obs_pairs = [
            pair for both in zip(self.obs, self.final_obs, strict=True) for pair in zip(*both, strict=True)
        ]
        self._alive_tracker = self.flags[:, 3 * agent_num + 2 : 5 * agent_num + 2]
        self._declares_masks = any(size is not None for size in spec.mask_sizes)
        self.state: AnyArray | None = arrays.get("state")
        self.final_state: AnyArray | None = arrays.get("final_state")

    def arrays(self) -> Iterable[AnyArray]:
        return self._arrays.values()

    @staticmethod
    def nbytes(spec: EnvSpec, num_envs: int) -> int:
        """Return the bytes of memory that ``num_envs`` envs need; at least one."""
        return max(1, _layout(spec, num_envs)[1])

    def rows(self, start: int, stop: int) -> Buffers:
        """Return views of the envs ``start`` to ``stop - 1``, as buffers."""
        view = object.__new__(Buffers)
        view._adopt(self.spec, stop - start, {name: array[start:stop] for name, array in self._arrays.items()})
        return view

    def slot(self, i: int) -> Slot:
        """Return env ``i``'s row, for the env to write into."""
        return Slot.of_groups(
            self.spec,
            obs=[[leaf[i] for leaf in leaves] for leaves in self.obs],
            final_obs=[[leaf[i] for leaf in leaves] for leaves in self.final_obs],
            actions=[[leaf[i] for leaf in leaves] for leaves in self.actions],
            action_mask=[None if mask is None else mask[i] for mask in self.action_masks],
            gave_mask=self.gave_mask[i : i + 1],
            reward=self.reward[i],
            terminated=self.terminated[i],
            truncated=self.truncated[i],
            final_missing=self.final_missing[i],
            alive=self.alive[i],
            acting=self.acting[i],
            state=None if self.state is None else self.state[i, ...],
        )

    # What a pool may do, whose rows are all in this process.

    def use_action_dtype(self, g: int, k: int, dtype: np.dtype[Any]) -> None:
        """Keep the actions of leaf ``k`` of group ``g`` in this dtype from now on; before the first action."""
        if self.actions[g][k].dtype != dtype:
            self.actions[g][k] = self._arrays[f"action/{g}/{k}"] = self.actions[g][k].astype(dtype)

    def take_obs(self, g: int, leaves: Sequence[AnyArray]) -> None:
        """Make these arrays, (N, A_g, …) a leaf, the observations of group ``g``; they may be read-only."""
        for k, (leaf, own) in enumerate(zip(leaves, self.obs[g], strict=True)):
            assert leaf.shape == own.shape
            self.obs[g][k] = self._arrays[f"obs/{g}/{k}"] = leaf

    def own_obs(self, g: int) -> list[AnyArray]:
        """Return observations of group ``g`` to write into: copies replace arrays that were taken and are read-only."""
        for k, leaf in enumerate(self.obs[g]):
            if not leaf.flags.writeable:
                self.obs[g][k] = self._arrays[f"obs/{g}/{k}"] = leaf.copy()
        return self.obs[g]

    def clear_row(self, i: int) -> None:
        """Clear env ``i``'s row: no observations, no agent alive or acting, and masks allow everything."""
        self.clear_obs(i)
        self._alive_tracker[i] = False
        if self._declares_masks or self.gave_mask[i]:  # else nothing was forbidden yet
            self.clear_masks(i)

    def clear_obs(self, i: int) -> None:
        """Clear env ``i``'s observations: zeros, and no objects."""
        for leaf, blank in self._obs_blanks:
            leaf[i] = blank

    def clear_final_obs(self, i: int) -> None:
        for leaf, blank in self._final_blanks:
            leaf[i] = blank

    def snapshot(self, i: int, ended: Sequence[bool]) -> None:
        """Copy the observations of env ``i``'s agents that ended, A bools, before it can reuse its buffers."""
        if all(ended):
            for source, target in self._obs_pairs:
                target[i] = source[i]
            return
        for group, obs, final in zip(self.spec.groups, self.obs, self.final_obs, strict=True):
            who = [j for j, a in enumerate(group.agents) if ended[a]]
            for source, target in zip(obs, final, strict=True):
                target[i, who] = source[i, who]

    def clear_masks(self, rows: EnvSelection | int = slice(None)) -> None:
        """Allow every action that an agent has in these envs."""
        for mask, allowed in zip(self.action_masks, self.own_choices, strict=True):
            if mask is not None:
                mask[rows] = allowed

    def masks_given(self, rows: EnvSelection) -> list[BoolArray | None]:
        """Return masks per group, (N, A_g, n) bool for all envs, or None; ``rows`` are those that are requested now.

        A mask that the spaces declare is always there. If envs give masks with their infos, they are there from the
        first rows on in which one of these envs has given one, all True where an env gives none.
        """
        if self.shown_masks is not self.action_masks and np.count_nonzero(self.gave_mask[rows]):
            self.shown_masks = self.action_masks
        return self.shown_masks

    # Objects are always sent by value. What is here was found to be picklable, and small enough, when it was written.

    def pack_objects(self, rows: NDArray[np.int64]) -> list[bytes]:
        """Pickle the objects that envs write, a row in one piece: an observation that is also final, once."""
        arrays = [self._arrays[name] for name in self._object_results]
        return [dump_each([value for array in arrays for value in array[i]]) for i in rows.tolist()]

    def unpack_objects(self, rows: NDArray[np.int64], packed: Sequence[bytes]) -> dict[int, SerialisationError]:
        """Write objects from `pack_objects` into these rows; return errors of rows that failed to unpickle."""
        arrays = {name: self._arrays[name] for name in self._object_results}
        agents = [self.spec.agents[a] for name in arrays for a in self.spec.groups[int(name.split("/")[1])].agents]
        bad = {}
        for i, data in zip(rows.tolist(), packed, strict=True):
            try:
                values = iter(load_each(data, [f"the observation of agent {agent!r}" for agent in agents]))
            except SerialisationError as error:
                bad[i] = error
                continue
            for array in arrays.values():
                for j in range(array.shape[1]):
                    array[i, j] = next(values)
        return bad

    def pack_object_actions(self, rows: EnvSelection) -> list[AnyArray]:
        """Return arrays of the objects among these rows' actions, to be pickled by value."""
        return [self._arrays[name][rows] for name in self._object_actions]

    def unpack_object_actions(self, rows: EnvSelection, packed: Sequence[AnyArray]) -> None:
        """Write objects from `pack_object_actions` into these rows."""
        for name, array in zip(self._object_actions, packed, strict=True):
            self._arrays[name][rows] = array

    # What a saved state has of the rows: what envs write. Final observations that are all zero are left out.

    def get_rows(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Copy what envs write, for these rows: name → (n, …) array, or, of objects, a list of n rows."""
        found: dict[str, Any] = {}
        for name in self._results:
            array = self._arrays[name][rows]
            if array.dtype == np.object_:
                found[name] = [[plain_object(value) for value in row] for row in array.tolist()]
            elif not name.startswith("final/") or array.any():
                found[name] = array
        return found

    def check_rows(self, saved: Any, n: int) -> None:
        """Raise `ArgumentError` unless ``saved`` are ``n`` rows from `get_rows` of such envs."""
        if not isinstance(saved, Mapping):
            raise ArgumentError(f"set_state(): rows: expected a dict of arrays, got {saved!r:.200}")
        zero = {name for name in self._results if name.startswith("final/") and name not in self._object_results}
        if not set(self._results) - zero <= saved.keys() <= set(self._results):
            raise ArgumentError(
                f"set_state(): rows: expected {sorted(self._results)}, got {sorted(map(str, saved))}: spaces or "
                f"settings differ"
            )
        for name, rows in saved.items():
            own = self._arrays[name]
            if own.dtype != np.object_:
                check_array(saved, name, own.dtype, (n, *own.shape[1:]), "set_state(): rows")
                continue
            agents = own.shape[1]
            if not isinstance(rows, list) or [type(row) for row in rows] != [list] * n or {*map(len, rows)} - {agents}:
                raise ArgumentError(
                    f"set_state(): rows: {name}: expected {n} lists of {agents} objects, got {rows!r:.200}"
                )

    def set_rows(self, rows: NDArray[np.int64], saved: Mapping[str, Any], places: NDArray[np.int64]) -> None:
        """Write rows from `get_rows` into these rows; ``places`` are the indices in ``saved``, one per row."""
        for g in range(len(self.obs)):
            self.own_obs(g)
        for name in self._results:
            array = self._arrays[name]
            if array.dtype != np.object_:
                array[rows] = saved[name][places] if name in saved else 0
                continue
            for i, k in zip(rows.tolist(), places.tolist(), strict=True):
                for j in range(array.shape[1]):
                    array[i, j] = object_from(saved[name][k][j])


def split_flags(flags: BoolArray, agent_num: int) -> tuple[BoolArray, ...]:
    """Return views of a block of flags, (n, A) or (n,) each."""
    # terminated, truncated, final_missing (n, A), done, reset_mask (n,), alive, acting (n, A), gave_mask (n,).
    return tuple(flags[part] for part in flag_parts(agent_num))


def flag_parts(agent_num: int) -> tuple[tuple[slice, slice | int], ...]:
    """Return the index of each part of a block of flags, in the order of `split_flags`."""
    a, everyone = agent_num, slice(None)
    return (
        (everyone, slice(a)),
        (everyone, slice(a, 2 * a)),
        (everyone, slice(2 * a, 3 * a)),
        (everyone, 3 * a),
        (everyone, 3 * a + 1),
        (everyone, slice(3 * a + 2, 4 * a + 2)),
        (everyone, slice(4 * a + 2, 5 * a + 2)),
        (everyone, 5 * a + 2),
    )


def _allowed(spec: EnvSpec, group: AgentGroup) -> BoolArray | bool:
    """Return the masks of a group where nothing is forbidden: True, or (A_g, n) where agents lack some choices."""
    own = [spec.allowed[a] for a in group.agents]
    if all(part is None for part in own):
        return True
    return np.stack([np.ones(group.choices or 0, np.bool_) if part is None else part for part in own])


def _blanks(arrays: Sequence[Sequence[AnyArray]]) -> list[tuple[AnyArray, Any]]:
    """Return each array and its fill value."""
    return [(leaf, None if leaf.dtype == np.object_ else 0) for leaves in arrays for leaf in leaves]


def _object_layout(spec: EnvSpec, num_envs: int) -> list[tuple[str, tuple[int, int]]]:
    """Return name and shape of every array of objects; the same on both sides."""
    return [
        (f"{kind}/{g}/{k}", (num_envs, len(group.agents)))
        for g, group in enumerate(spec.groups)
        for kind, tree in _trees(group)
        for k, leaf in enumerate(tree.leaves)
        if leaf.is_object
    ]


def _trees(group: AgentGroup) -> tuple[tuple[str, SpaceTree], ...]:
    return ("obs", group.observation_tree), ("final", group.observation_tree), ("action", group.action_tree)


def _layout(spec: EnvSpec, num_envs: int) -> tuple[list[tuple[str, tuple[int, ...], np.dtype[Any], slice]], int]:
    """Return name, shape, dtype and bytes of every array of numbers, in memory order; and the total number of bytes."""
    # Parent and workers compute the same layout from the same arguments.
    n, agent_num = num_envs, len(spec.agents)
    flag = np.dtype(np.bool_)
    arrays: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = []
    for g, group in enumerate(spec.groups):
        size = len(group.agents)
        for kind, tree in _trees(group):
            arrays += [
                (f"{kind}/{g}/{k}", (n, size, *leaf.shape), leaf.dtype)
                for k, leaf in enumerate(tree.leaves)
                if not leaf.is_object
            ]
        if (choices := group.choices) is not None:
            arrays.append((f"mask/{g}", (n, size, choices), flag))
    arrays += [("reward", (n, agent_num), np.dtype(np.float64)), ("flags", (n, 5 * agent_num + 3), flag)]
    if (space := spec.state_space) is not None:
        assert space.shape is not None
        arrays += [(kind, (n, *space.shape), np.dtype(space.dtype)) for kind in ("state", "final_state")]
    out, offset = [], 0
    for name, shape, dtype in arrays:
        nbytes = dtype.itemsize * math.prod(shape)
        out.append((name, shape, dtype, slice(offset, offset + nbytes)))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return out, offset


_LARGE = 1 << 16  # bytes; malloc itself reuses smaller blocks
_MAX_PER_SIZE = 4  # blocks of one size: a caller holds those of this step and the last; two more may be in use inside
_MAX_BYTES = 1 << 28  # bytes in all, in use or not


class BufferReuse:
    """Copies arrays by ``into``; large ones into memory that was used before.

    The system provides fresh memory page by page, on first access, which takes several times as long as the copy. A
    copy belongs to the caller like any other array. Once the copy and all views and tensors on its memory are deleted,
    the next copy of that size may use the memory.
    """

    def __init__(self, into: Callable[[AnyArray, AnyArray], object] = np.copyto) -> None:
        self._into = into
        self._known: dict[int, list[NDArray[np.uint8]]] = {}
        self._bytes = 0

    def __call__(self, array: AnyArray) -> AnyArray:
        """Return a copy that belongs to the caller."""
        size = array.nbytes
        if size < _LARGE or array.dtype.hasobject or not _COUNTS:
            return array.copy()
        out = self._memory(size).view(array.dtype).reshape(array.shape)
        self._into(out, array)
        return out

    def copier_of(self, arrays: Iterable[AnyArray]) -> Callable[[AnyArray], AnyArray]:
        """Return the function that copies arrays of these sizes: this object, or numpy's copy if none is large."""
        return self if any(array.nbytes >= _LARGE for array in arrays) else np.ndarray.copy

    def forget(self) -> None:
        """Release all memory; copies that callers hold stay valid."""
        self._known.clear()
        self._bytes = 0

    def _memory(self, size: int) -> NDArray[np.uint8]:
        known = self._known.setdefault(size, [])
        for k in range(len(known)):
            if _references(known, k) == _ALONE:
                return known[k]
        memory = np.empty(size, np.uint8)
        if len(known) == _MAX_PER_SIZE:  # all are in use: forget one, so that later copies can still reuse memory
            del known[0]
        elif self._bytes + size > _MAX_BYTES:
            return memory
        else:
            self._bytes += size
        known.append(memory)
        return memory


def _references(known: list[NDArray[np.uint8]], k: int) -> int:
    return sys.getrefcount(known[k])


_ALONE = _references([np.empty(0, np.uint8)], 0)
"""Reference count of an array that only the list refers to."""

_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether reference counts are reliable: not in free-threaded Python."""
