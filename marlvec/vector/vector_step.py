"""`VectorStep`: the result of one step, as rows of some envs taken from the buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import COMMON, EnvSpec, Info
from marlvec.errors import RestartQuietly
from marlvec.spaces import own_objects
from marlvec.vector.buffers import Buffers, EnvSelection
from marlvec.vector.infos import ColumnRows, ShardReport, put_columns, stack_infos

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]


class VectorStep:
    """One step (or reset) of ``n`` envs, in the order in which they became ready.

    Attributes:
        env_ids: (n,) int64, the env of each row.
        obs_leaves: Per group, per leaf: (n, A_g, *leaf.shape). Leaves without a fixed-size array form are arrays of
            objects, (n, A_g), with None where an agent is absent.
        final_leaves: As ``obs_leaves``: the last true observation of each agent that ended in this step. In ``done``
            rows, of every agent of the ended episode, even if it ended earlier; zeros (None for objects) for agents
            that never joined. Other rows are undefined.
        rewards: (n, A) float64.
        terminated, truncated: (n, A) bool, the agent ended in this step, or was lost; see `fault`.
        final_missing: (n, A) bool, the agent ended in this step and the env returned no observation for it: its row of
            ``final_leaves`` repeats its previous observation.
        done: (n,) bool, the env's episode ended in this step.
        eventful: Whether an agent ended, or an episode ended or was lost, in any row.
        alive, acting: (n, A) bool.
        reset_mask: (n,) bool, the row is a next-step autoreset: its action was ignored.
        action_masks: Per group (n, A_g, k) bool, or None.
        state: (n, *state_space.shape), the global states; None unless the vectorizer was made with ``state=True``.
        final_state: As ``state``: in ``done`` rows, the state in which the episode ended; other rows are undefined.
    """

    __slots__ = (
        "_columns",
        "_faults",
        "_final_columns",
        "_final_infos",
        "_grouped",
        "_infos",
        "_spec",
        "acting",
        "action_masks",
        "alive",
        "done",
        "env_ids",
        "eventful",
        "final_leaves",
        "final_missing",
        "final_state",
        "obs_leaves",
        "reset_mask",
        "rewards",
        "state",
        "terminated",
        "truncated",
    )

    def __init__(
        self,
        buffers: Buffers,
        env_ids: NDArray[np.int64],
        rows: EnvSelection,
        report: ShardReport,
        *,
        grouped: bool,
        copy: bool,
        state: bool = False,
        copier: Callable[[AnyArray], AnyArray] = np.ndarray.copy,
    ) -> None:
        # The common case, all rows copied, is a function in C.
        cut = copier if copy and rows.__class__ is slice and rows == slice(None) else _row_copier(rows, copy=copy)
        self._spec: EnvSpec = buffers.spec
        self._grouped = grouped
        self._infos, self._final_infos, self._faults = report.infos, report.final_infos, report.faults
        self._columns: ColumnRows = {} if report.columns is None else report.columns.cut(cut)
        self._final_columns: ColumnRows = {} if report.final_columns is None else report.final_columns.cut(cut)
        self.env_ids = env_ids
        cut_leaf = _with_own_objects(cut) if copy and buffers.has_objects else cut
        self.obs_leaves = [[*map(cut_leaf, leaves)] for leaves in buffers.obs]
        self.rewards: NDArray[np.float64] = cut(buffers.reward)
        flags, a = cut(buffers.flags), len(self._spec.agents)
        terminated, truncated, final_missing, done, reset_mask, alive, acting, gave_mask = buffers.flag_parts
        self.terminated: BoolArray = flags[terminated]
        self.truncated: BoolArray = flags[truncated]
        self.final_missing: BoolArray = flags[final_missing]
        self.done: BoolArray = flags[done]
        self.reset_mask: BoolArray = flags[reset_mask]
        self.alive: BoolArray = flags[alive]
        self.acting: BoolArray = flags[acting]
        masks = buffers.shown_masks
        if masks is not buffers.action_masks and np.count_nonzero(flags[gave_mask]):
            masks = buffers.masks_given(rows)
        self.action_masks = [None if mask is None else cut(mask) for mask in masks]
        self.state: AnyArray | None = None
        self.final_state: AnyArray | None = None
        if state:
            assert buffers.state is not None
            assert buffers.final_state is not None
            self.state, self.final_state = cut(buffers.state), cut(buffers.final_state)
        # Most steps end no agent, and with images most time goes into copying observations.
        if np.count_nonzero(flags[:, : 2 * a]):  # terminated or truncated; a fifth of the time of any()
            self.final_leaves = [[cut_leaf(leaf) for leaf in leaves] for leaves in buffers.final_obs]
            self.eventful = True
        else:
            self.final_leaves = self.obs_leaves
            self.eventful = bool(self._faults or np.count_nonzero(self.done))

    def __len__(self) -> int:
        return len(self.env_ids)

    def __repr__(self) -> str:
        return (
            f"VectorStep(env_ids={self.env_ids.tolist()}, done={int(self.done.sum())}, acting={int(self.acting.sum())})"
        )

    @property
    def ended(self) -> BoolArray:
        """(n, A) bool: the agent was terminated or truncated in this step."""
        return self.terminated | self.truncated

    @property
    def has_final(self) -> BoolArray:
        """(n, A) bool: the agent ended in this step, and has a final observation: its episode was not lost."""
        return self.ended & ~self.fault[:, None] if self._faults else self.ended

    @property
    def fault(self) -> BoolArray:
        """(n,) bool: the env's episode was lost, and the env restarted or masked.

        Such a row is ``done``, and agents that were alive are ``truncated``; it has no final observations, rewards or
        infos of the lost episode. Otherwise it is like any row in which an episode ended.
        """
        return self._faulty(quiet_only=False)

    @property
    def quiet(self) -> BoolArray:
        """(n,) bool: the env's episode was lost because the env raised `RestartQuietly`."""
        return self._faulty(quiet_only=True)

    def _faulty(self, *, quiet_only: bool) -> BoolArray:
        if not self._faults:
            return np.zeros(len(self.env_ids), np.bool_)
        ids = [i for i, f in self._faults.items() if not quiet_only or isinstance(f.exception, RestartQuietly)]
        return np.isin(self.env_ids, ids)

    @property
    def obs(self) -> Any:
        """Observations (n, A, …), or a dict of groups to (n, A_g, …)."""
        if not self._grouped and self._spec.groups[0].observation_tree.is_leaf:  # nearly always
            return self.obs_leaves[0][0]
        return public_tree(self._spec, self.obs_leaves, grouped=self._grouped)

    @property
    def final_obs(self) -> Any:
        """Final observations, in the form of `obs`."""
        if not self._grouped and self._spec.groups[0].observation_tree.is_leaf:
            return self.final_leaves[0][0]
        return public_tree(self._spec, self.final_leaves, grouped=self._grouped)

    @property
    def action_mask(self) -> Any:
        """(n, A, k) bool, or a dict of the groups with a mask to (n, A_g, k); None if no group has one."""
        return public_masks(self._spec, self.action_masks, grouped=self._grouped)

    @property
    def infos(self) -> dict[str, Any]:
        """Gymnasium's dict of arrays, see `marlvec.vector.infos`; first axis is that of ``env_ids``."""
        out = self._stack(self._infos) if self._infos else {}
        if self._columns:
            put_columns(out, self._columns, len(self._spec.agents))
        out["alive"] = self.alive
        out["acting"] = self.acting
        for mask in self.action_masks:
            if mask is not None:
                out["action_mask"] = self.action_mask
                break
        out["reset_mask"] = self.reset_mask
        whole = self.done  # episodes that ended, and were not lost
        if self._faults:
            out["fault"] = self.fault
            whole = self.done & ~self.fault
        if self.final_leaves is not self.obs_leaves:
            # Two names of one array: OpenRL's and Gymnasium's.
            out["final_observation"] = out["final_obs"] = self.final_obs
            out["_final_observation"] = out["_final_obs"] = whole
            if np.count_nonzero(self.final_missing):
                out["final_observation_missing"] = self.final_missing
        if self.state is not None:
            out["state"] = self.state
            if self.done.any():
                out["final_state"], out["_final_state"] = self.final_state, whole
        if self._final_infos:
            out["final_info"] = self._stack(self._final_infos)
            out["_final_info"] = np.isin(self.env_ids, list(self._final_infos))
        if self._final_columns:
            put_columns(out.setdefault("final_info", {}), self._final_columns, len(self._spec.agents))
            out["_final_info"] = whole
        return out

    @property
    def off_policy_actions(self) -> list[tuple[int, str, Any, bool]]:
        """Actions that agents took without a policy, from infos: (env id, agent name, action, whether in env's form).

        Info ``"off_policy_action"`` holds an action in the policy's form, ``"logged_action"`` one in the env's form.
        """
        if not self._infos:
            return []
        mine = self.env_ids.tolist()
        return [
            (i, who, entries[key], key == "logged_action")
            for i in mine
            for who, entries in self._infos.get(i, {}).items()
            for key in ("off_policy_action", "logged_action")
            if who != COMMON and key in entries
        ]

    @property
    def untrained(self) -> list[int]:
        """Ids of envs whose new episode is excluded from batches: its first info ``"training_enabled"`` is False."""
        if not self._infos:
            return []
        mine = self.env_ids.tolist()
        return [i for i in mine if self._infos.get(i, {}).get(COMMON, {}).get("training_enabled") is False]

    def _stack(self, infos: Mapping[int, Info]) -> dict[str, Any]:
        position = {i: k for k, i in enumerate(self.env_ids.tolist())}
        own = {position[i]: info for i, info in infos.items() if i in position}
        return stack_infos(own, len(self.env_ids), self._spec.agents)


def _row_copier(rows: EnvSelection, *, copy: bool) -> Callable[[AnyArray], AnyArray]:
    """Return a function that takes these rows of an array: as a copy, or as a read-only view."""

    def cut(array: AnyArray) -> AnyArray:
        part = array[rows]
        if part.base is None:
            return part  # indexing with an array has copied already
        if copy:
            return part.copy()
        part.flags.writeable = False
        return part

    return cut


def _with_own_objects(cut: Callable[[AnyArray], AnyArray]) -> Callable[[AnyArray], AnyArray]:

    def cut_leaf(array: AnyArray) -> AnyArray:
        part = cut(array)
        return own_objects(part) if part.dtype == np.object_ else part

    return cut_leaf


def public_tree(spec: EnvSpec, leaves: Sequence[Sequence[AnyArray]], *, grouped: bool) -> Any:
    """Return leaves per group in the public form: one tree, or a dict of groups."""
    if not grouped:
        return spec.groups[0].observation_tree.unflatten(leaves[0])
    return {group.name: group.observation_tree.unflatten(part) for group, part in zip(spec.groups, leaves, strict=True)}


def public_masks(spec: EnvSpec, masks: Sequence[AnyArray | None], *, grouped: bool) -> Any:
    """Return masks per group in the public form: one array, or a dict of groups."""
    if not grouped:
        return masks[0]
    found = {group.name: mask for group, mask in zip(spec.groups, masks, strict=True) if mask is not None}
    return found or None
