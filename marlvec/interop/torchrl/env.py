"""A marlvec vectorizer as a TorchRL env: one tensordict of N envs, nested tensordicts of (N, n) agents.

Axis letters: N envs, A agents, n agents of one of TorchRL's groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import Options, spread_options
from marlvec.errors import ActionError, ArgumentError, ContractError, NotResetError
from marlvec.extras import needs_extra
from marlvec.interop.rows.view_checks import check_view, viewed
from marlvec.interop.torchrl.grouping import GroupMap, GroupPlaces, find_places, group_agents
from marlvec.interop.torchrl.snapshot import EnvSnapshot, scatter
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from marlvec.vector.seeding import env_seeds, spread_seeds
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

with needs_extra("torchrl", "TorchRLEnv", "pip install 'marlvec[torchrl]'"):
    import torch
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import EnvBase, MarlGroupMapType

    from marlvec.interop.torchrl.specs import ActionReader, action_spec, flags_spec, nested, observation_spec

__all__ = ["TorchRLEnv"]

_FLAGS = ("done", "terminated", "truncated")
_ROOT = {*_FLAGS, "state", "fault", "next", "reward", "action", "observation", "_reset", "_step"}
_TORCHRL_NAMES = {MarlGroupMapType.ALL_IN_ONE_GROUP: "all", MarlGroupMapType.ONE_GROUP_PER_AGENT: "each"}


class TorchRLEnv(EnvBase):  # type: ignore[misc]  # torchrl is Any where it is not installed
    """A view of a `VectorEnv` as TorchRL's batched, multi-agent env: ``batch_size`` is ``(N,)``.

    ===================================  ==========  ==================================================================
    key, after `reset` and in ``"next"`` shape
    ===================================  ==========  ==================================================================
    ``(group, "observation")``           (N, n, …)   observations; nested tensordicts for Dict and Tuple spaces
    ``(group, "mask")``                  (N, n)      whether the agent must act now: alive, and not waiting for its turn
    ``(group, "action_mask")``           (N, n, k)   allowed choices; all True where ``mask`` is False
    ``(group, "reward")``                (N, n, 1)   rewards of the step, also of agents that waited
    ``(group, "done")`` and similar      (N, n, 1)   whether the agent has ended, in this step or before, and how
    ``"done"``                           (N, 1)      the episode is over, and `reset` must begin the next one
    ``"terminated"``, ``"truncated"``    (N, 1)      how it ended; it counts as truncated if any agent was
    ``"state"``                          (N, …)      with ``make(..., state=True)``
    ``"fault"``                          (N, 1)      the episode was lost, unless ``on_fault="raise"``
    ===================================  ==========  ==================================================================

    Actions are read from ``(group, "action")``: (N, n) for a Discrete space, (N, n, k) with
    ``categorical_actions=False``. In ``"next"`` an episode that ends has its true last observation. Observations of
    absent agents are zeros. Tensors share the memory of marlvec's arrays if the group is one of marlvec's; no memory is
    written twice.

    TorchRL's collectors change ``("collector", "traj_ids")`` at every step while any agent is done. Cut sequences at
    the root's ``("next", "done")``, as ``SliceSampler(end_key=("next", "done"))`` does, on a storage with ``ndim=2``.

    `set_seed` applies to the next `reset`, which then equals ``envs.reset(seed=…)``, with every backend, and for
    partial resets (``"_reset"``) and partial steps (``"_step"``). `reset` also takes ``seed`` and ``options``, as
    `VectorEnv.reset` does: one for all, or one per env that is reset.

    Args:
        envs: The vectorizer, made with ``copy=True``, and ``autoreset_mode="same_step"``, so that the next episode has
            begun when TorchRL requests it, or ``"disabled"``. No other code may step or reset it.
        group_map: Which agents share tensors: None, ``"spaces"``, ``"all"``, ``"each"``, ``"prefix"``, TorchRL's
            ``MarlGroupMapType``, or a dict of group name to agent names. Agents of a group must have equal spaces.
        categorical_actions: Whether choices are numbers from 0; otherwise they are one-hot.
        action_masks: Which groups have ``"action_mask"``: None: groups whose spaces declare one; True: also groups
            whose envs may put one into infos; False: none.
        reward_dtype: Dtype of rewards.
        device: Device of all tensors; None: the CPU.

    Raises:
        MissingExtraError: (By the import.) torchrl is not installed.
        ArgumentError: The vectorizer was made with other settings, or ``group_map`` is invalid; the message says why.
        UnsupportedSpaceError: A space has values that no tensor can hold.

    Attributes:
        envs: The vectorizer.
        group_map: Group name → names of its agents.
        result: The last `VectorStep`, for results without a place in a tensordict, such as ``result.infos``; or None.
    """

    def __init__(
        self,
        envs: VectorEnv,
        *,
        group_map: GroupMap | MarlGroupMapType = None,
        categorical_actions: bool = True,
        action_masks: bool | None = None,
        reward_dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        check_view(envs, "TorchRLEnv")
        super().__init__(device=device, batch_size=(envs.num_envs,), allow_done_after_reset=True)
        self.envs = envs
        chosen = _TORCHRL_NAMES[group_map] if isinstance(group_map, MarlGroupMapType) else group_map
        self.group_map = group_agents(envs.spec, chosen)
        if taken := _ROOT.intersection(self.group_map):
            raise ArgumentError(f"group_map: {taken.pop()!r} is a key of TorchRL; choose another group name")
        self._places = [find_places(envs.spec, name, members) for name, members in self.group_map.items()]
        self._readers = [ActionReader(group.action_tree, categorical=categorical_actions) for group in envs.spec.groups]
        self._mask_sizes = [
            {None: group.mask_size, True: group.choices, False: None}[action_masks] for group in envs.spec.groups
        ]
        self._reward_dtype = reward_dtype
        self._same_step = envs.autoreset.begins_at_once
        self._marks_faults = envs.on_fault != "raise"
        self._wants_masks = action_masks is not False
        self.result: VectorStep | None = None
        self._rows: EnvSnapshot | None = None
        shape = envs.num_envs, envs.agent_num
        self._terminated, self._truncated = np.zeros((2, *shape), np.bool_)  # in the running episode
        # Envs whose episode has ended, and of which TorchRL has not requested the next one.
        self._over = np.zeros(envs.num_envs, np.bool_)
        self._seeds: list[int | None] = [None] * envs.num_envs
        self._make_specs(categorical_actions)
        self.is_closed = False

    @classmethod
    def make(
        cls,
        env: EnvLike | Sequence[EnvLike],
        num_envs: int | None = None,
        *,
        group_map: GroupMap | MarlGroupMapType = None,
        categorical_actions: bool = True,
        action_masks: bool | None = None,
        reward_dtype: torch.dtype = torch.float32,
        device: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Build envs and a view of them.

        ``env``, ``num_envs`` and ``kwargs`` are as in `marlvec.make`, other arguments as for the constructor.
        """
        envs = make(env, num_envs, **kwargs)
        return viewed(
            cls,
            envs,
            group_map=group_map,
            categorical_actions=categorical_actions,
            action_masks=action_masks,
            reward_dtype=reward_dtype,
            device=device,
        )

    def __repr__(self) -> str:
        groups = ", ".join(f"{name}: {len(members)}" for name, members in self.group_map.items())
        return f"TorchRLEnv({self.envs.spec.name}, num_envs={self.envs.num_envs}, {groups}, device={self.device})"

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the vectorizer, and with it all envs."""
        self.envs.close()
        super().close(raise_if_closed=raise_if_closed)

    # --- methods that TorchRL calls

    def _make_specs(self, categorical: bool) -> None:
        spec, n_envs = self.envs.spec, self.envs.num_envs
        parts: dict[str, dict[str, Any]] = {"observation": {}, "action": {}, "reward": {}, "done": {}}
        for places in self._places:
            lead = n_envs, places.count
            tree = spec.groups[places.group].observation_tree
            seen = {"observation": observation_spec(tree, *lead), "mask": flags_spec(*lead)}
            if (size := self._mask_sizes[places.group]) is not None:
                seen["action_mask"] = flags_spec(*lead, size)
            action = action_spec(spec.groups[places.group].action_tree, *lead, categorical=categorical)
            own_specs = {
                "observation": seen,
                "action": {"action": action},
                "reward": {"reward": Unbounded((*lead, 1), dtype=self._reward_dtype)},
                "done": {name: flags_spec(*lead, 1) for name in _FLAGS},
            }
            for kind, own in own_specs.items():
                parts[kind][places.name] = Composite(own, shape=lead)
        parts["done"] |= {name: flags_spec(n_envs, 1) for name in _FLAGS}
        if self.envs.brings_state:
            assert self.envs.state_space is not None
            parts["observation"]["state"] = observation_spec(SpaceTree(self.envs.state_space), n_envs)
        if self._marks_faults:
            parts["observation"]["fault"] = flags_spec(n_envs, 1)
        for kind, own in parts.items():
            setattr(self, f"{kind}_spec", Composite(own, shape=(n_envs,)).to(self.device or "cpu"))

    def _set_seed(self, seed: int | None) -> None:
        n_envs = self.envs.num_envs
        self._seeds = [None] * n_envs if seed is None else list(env_seeds(seed, n_envs))

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
    ) -> TensorDictBase:
        wanted = None if tensordict is None else tensordict.get("_reset", None)
        n_envs = self.envs.num_envs
        ids = np.arange(n_envs) if wanted is None else np.flatnonzero(wanted.reshape(n_envs, -1).any(dim=1).cpu())
        if self._rows is None and len(ids) < n_envs:
            raise NotResetError(
                f"reset() of envs {ids.tolist()}: the first reset must cover all {n_envs} envs, without '_reset'"
            )
        for i, given in zip(ids.tolist(), spread_seeds(seed, ids.tolist(), n_envs), strict=True):
            self._seeds[i] = self._seeds[i] if given is None else given
        # In same-step mode, envs whose episode ended have already begun the next one: use its first rows.
        chosen = {
            i: option
            for i, option in zip(ids.tolist(), spread_options(options, len(ids)), strict=True)
            if not (self._same_step and self._over[i]) or self._seeds[i] is not None or option is not None
        }
        if asked := list(chosen):
            seeds = [self._seeds[i] for i in asked]
            self.envs.reset_send(seed=seeds, options=list(chosen.values()), env_ids=asked)
            self.result = self.envs.recv()
            fresh = EnvSnapshot.of(self.result)
            self._rows = fresh if self._rows is None else self._rows.updated(self.result.env_ids, fresh)
        assert self._rows is not None
        for i in asked:
            self._seeds[i] = None
        self._over[ids] = False
        ended = np.isin(np.arange(n_envs), ids)[:, None]
        self._terminated, self._truncated = self._terminated & ~ended, self._truncated & ~ended
        return self._tensors(self._rows, np.zeros(n_envs, np.bool_), {})

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset the envs whose episode is over: as TorchRL does, but faster if the next episodes have begun already."""
        over = self._over
        if not self._has_begun_all(tensordict):
            return super().maybe_reset(tensordict)
        assert self._rows is not None
        fresh = self._tensors(self._rows, np.zeros(len(over), np.bool_), {})  # the other envs' rows are unchanged
        for key in self.done_keys:
            fresh.set(key, torch.zeros_like(tensordict.get(key)))
        if not over.all():  # if all begin at once, TorchRL keeps entries of other code
            _blank_others(tensordict, torch.from_numpy(over), keep=fresh)
        self._over = np.zeros_like(over)
        self._terminated, self._truncated = np.zeros_like(self._terminated), np.zeros_like(self._truncated)
        return tensordict.update(fresh)

    def _has_begun_all(self, tensordict: TensorDictBase) -> bool:
        """Return whether TorchRL is about to request only first rows of episodes that have begun already."""
        over = self._over
        if not self._same_step or self.device is not None or tensordict.get("_reset", None) is not None:
            return False
        ended = self._terminated | self._truncated
        return bool(
            over.any()
            and not ended[~over].any()
            and all(self._seeds[i] is None for i in np.flatnonzero(over).tolist())
            and np.array_equal(tensordict.get("done").numpy().reshape(-1), over)
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        wanted = tensordict.get("_step", None)
        n_envs = self.envs.num_envs
        ids = None
        if wanted is not None:
            ids = np.flatnonzero(wanted.reshape(n_envs, -1).any(dim=1).cpu())
            for places in self._places:  # TorchRL's rollout would fail to stack steps that have it
                tensordict.get(places.name).pop("_neg_step", None)
        if len(over := np.flatnonzero(self._over if ids is None else self._over[ids])):
            first = over[0] if ids is None else ids[over[0]]
            raise NotResetError(f"step() of env {first}: its episode is over; reset() it, or leave it out of '_step'")
        actions = self._actions(tensordict)
        if ids is None:
            self.envs.step_send(actions)
        else:
            self.envs.send(map_tree(itemgetter(ids), actions), ids)
        result = self.result = self.envs.recv()
        ids = None if ids is None else result.env_ids  # in order of arrival
        before = self._rows
        assert before is not None
        after = EnvSnapshot.of(result)
        seen = before if ids is None else before.picked(ids)
        last = after.at_ends(result, seen, self.envs.spec.groups, same_step=self._same_step)
        flags = self._flags(result, ids)
        rewards, done, fault = result.rewards, result.done, result.fault
        if ids is not None:
            after, last = before.updated(ids, after), before.updated(ids, last)
            rewards, done, fault = (scatter(ids, array, n_envs) for array in (rewards, done, fault))
        self._rows = after
        self._over = self._over | done if ids is not None else done.copy()
        out = self._tensors(last, fault, {"reward": rewards, **flags})
        return out if wanted is None else _with_old_rows(out, wanted.reshape(n_envs), tensordict)

    # --- from arrays to tensors, and back

    def _flags(self, result: VectorStep, ids: NDArray[np.int64] | None) -> dict[str, NDArray[np.bool_]]:
        """Return which agents have ended so far, (N, A), and under ``"root"`` which envs ended in this step, (3, N)."""
        back = result.alive & ~result.done[:, None]  # also agents that joined again
        cut = result.done & result.truncated.any(axis=1)
        if ids is None:
            self._terminated = result.terminated | (self._terminated & ~back)
            self._truncated = result.truncated | (self._truncated & ~back)
        else:
            self._terminated, self._truncated = self._terminated.copy(), self._truncated.copy()
            self._terminated[ids] = result.terminated | (self._terminated[ids] & ~back)
            self._truncated[ids] = result.truncated | (self._truncated[ids] & ~back)
            cut = scatter(ids, cut, self.envs.num_envs)
        done = result.done if ids is None else scatter(ids, result.done, self.envs.num_envs)
        return {
            "terminated": self._terminated,
            "truncated": self._truncated,
            "done": self._terminated | self._truncated,
            "root": np.stack([done & ~cut, cut, done]),
        }

    def _tensors(self, rows: EnvSnapshot, fault: NDArray[np.bool_], step: dict[str, NDArray[Any]]) -> TensorDictBase:
        """Return all tensors of a reset, or of a step if given its rewards and flags."""
        n_envs = self.envs.num_envs
        source: dict[str, Any] = {}
        agents: dict[str, Any] = {}
        if step:
            root = torch.from_numpy(step.pop("root")).unsqueeze(-1)
            source = dict(zip(("terminated", "truncated", "done"), root, strict=True))
            agents = {name: torch.from_numpy(array).unsqueeze(-1) for name, array in step.items()}
            agents["reward"] = agents["reward"].to(self._reward_dtype)
        agents["mask"] = torch.from_numpy(rows.acting)
        for places in self._places:
            tree = self.envs.spec.groups[places.group].observation_tree
            leaves = [torch.from_numpy(leaf)[:, places.own] for leaf in rows.obs[places.group]]
            own = {name: tensor[:, places.on_axis] for name, tensor in agents.items()}
            own["observation"] = nested(tree.space, tree.unflatten(leaves))
            if (mask := self._mask(rows, places)) is not None:
                own["action_mask"] = mask
                spec = self.full_action_spec[places.name, "action"]
                if hasattr(spec, "update_mask"):  # TorchRL has none for a MultiDiscrete of several axes
                    spec.update_mask(mask.to(self.device or "cpu"))
            source[places.name] = TensorDict(own, batch_size=(n_envs, places.count), device=self.device)
        if rows.state is not None:
            source["state"] = torch.from_numpy(rows.state)
        if self._marks_faults:
            source["fault"] = torch.from_numpy(fault).unsqueeze(-1)
        return TensorDict(source, batch_size=(n_envs,), device=self.device)

    def _mask(self, rows: EnvSnapshot, places: GroupPlaces) -> torch.Tensor | None:
        mask = rows.masks[places.group]
        size = self._mask_sizes[places.group]
        if size is None:
            if mask is not None and self._wants_masks:
                raise ContractError(
                    f"{self.envs.spec.name} has action masks in its infos, which this TorchRLEnv does not declare: "
                    f"pass action_masks=True to use them, or False to ignore them"
                )
            return None
        if mask is None:
            return torch.ones(self.envs.num_envs, places.count, size, dtype=torch.bool)
        return torch.from_numpy(mask)[:, places.own]

    def _actions(self, tensordict: TensorDictBase) -> Any:
        spec, n_envs = self.envs.spec, self.envs.num_envs
        found: list[list[NDArray[Any]]] = [[] for _ in spec.groups]
        for places in self._places:
            action = tensordict.get((places.name, "action"), None)
            if action is None:
                raise ActionError(f"step(): expected an action under {(places.name, 'action')}, got none")
            leaves = self._readers[places.group].leaves(action)
            if places.whole:
                found[places.group] = leaves
                continue
            target = found[places.group] = found[places.group] or [
                np.zeros((n_envs, len(spec.groups[places.group].agents), *leaf.shape[2:]), leaf.dtype)
                for leaf in leaves
            ]
            for whole, leaf in zip(target, leaves, strict=True):
                whole[:, places.own] = leaf
        trees = [group.action_tree.unflatten(leaves) for group, leaves in zip(spec.groups, found, strict=True)]
        return dict(zip(self.envs.groups, trees, strict=True)) if self.envs.grouped else trees[0]


def _with_old_rows(now: TensorDictBase, new_n: torch.Tensor, before: TensorDictBase) -> TensorDictBase:
    """Return new values in the rows ``new_n``, and old ones in the others; zeros if there are none, e.g. of rewards."""

    def merge(key: Any, tensor: torch.Tensor) -> torch.Tensor:
        old = before.get(key, None)
        return torch.where(_along(new_n, tensor), tensor, torch.zeros_like(tensor) if old is None else old)

    return now.named_apply(merge, nested_keys=True)


def _blank_others(tensordict: TensorDictBase, rows_n: torch.Tensor, *, keep: TensorDictBase) -> None:
    """Zero some rows of all tensors, except of keys in ``keep``; old tensors are unchanged."""
    kept = set(keep.keys(True, True))
    for key in [key for key in tensordict.keys(True, True) if key not in kept]:
        tensor = tensordict.get(key)
        tensordict.set(key, tensor.masked_fill(_along(rows_n, tensor), 0))


def _along(rows_n: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return rows_n.reshape(-1, *[1] * (tensor.ndim - 1))
