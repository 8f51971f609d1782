"""A marlvec vectorizer as a TorchRL env: one tensordict of N envs, nested tensordicts of (N, n) agents."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Self, TypeGuard

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.env_ids import Options, spread_options
from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ActionError, ArgumentError, ContractError, NotResetError, UnsupportedSpaceError
from marlvec.extras import needs_extra
from marlvec.interop.rows import check_view, places_of, viewed
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.spaces import Leaf, SpaceTree, describe_difference
from marlvec.trees import map_tree
from marlvec.vector.settings import env_seeds, spread_seeds
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

with needs_extra("torchrl", "TorchRLEnv", "pip install 'marlvec[torchrl]'"):
    import torch
    from tensordict import TensorDict, TensorDictBase
    from torch import Tensor
    from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
    from torchrl.envs import EnvBase, MarlGroupMapType


__all__ = ["TorchRLEnv"]


def observation_spec(tree: SpaceTree, *lead: int) -> Any:
    """Return the spec of observations (*lead, …), with bounds that include 0, the observation of absent agents."""
    return _build(tree.space, "observation", lead, _observation_leaf)


def action_spec(tree: SpaceTree, *lead: int, categorical: bool) -> Any:
    """Return the spec of actions (*lead, …), of choices as numbers from 0, or one-hot with one more axis."""

    def leaf_spec(space: Space[Any], lead: tuple[int, ...], dtype: torch.dtype) -> Any:
        if isinstance(space, Discrete):
            n = int(space.n)
            return Categorical(n, lead, dtype=dtype) if categorical else OneHot(n, (*lead, n), dtype=torch.bool)
        if _is_flat(space):
            nvec = [int(n) for n in space.nvec]
            if categorical:
                return MultiCategorical(nvec, (*lead, len(nvec)), dtype=dtype)
            return MultiOneHot(nvec, (*lead, sum(nvec)), dtype=torch.bool)
        if isinstance(space, MultiDiscrete):
            return Bounded(space.start, space.start + space.nvec - 1, space.shape, dtype=dtype).expand(
                *lead, *space.shape
            )
        return _array_leaf(space, lead, dtype)

    return _build(tree.space, "action", lead, leaf_spec)


def flags_spec(*shape: int) -> Any:
    """Return the spec of bools."""
    return Categorical(2, shape, dtype=torch.bool)


def nested(space: Space[Any], values: Any) -> Any:
    """Convert a tree of tensors to TensorDict's form: nested dicts with string keys, also for tuples."""
    if isinstance(space, Dict):
        return {str(key): nested(sub, values[key]) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return {str(i): nested(sub, values[i]) for i, sub in enumerate(space.spaces)}
    return values


class TensorActionReader:
    """Reads actions from a tensordict, as numbers of their space."""

    def __init__(self, tree: SpaceTree, *, categorical: bool) -> None:
        self.tree = tree
        self._readers = [_reader(leaf, categorical=categorical) for leaf in tree.leaves]

    def leaves(self, actions: Any) -> list[NDArray[Any]]:
        """Read a tensor, or nested tensordicts, with any leading axes; KeyError: a part is missing."""
        found: list[Tensor] = []
        _collect(self.tree.space, actions, found)
        return [read(part) for read, part in zip(self._readers, found, strict=True)]


def _build(space: Space[Any], path: str, lead: tuple[int, ...], leaf_spec: Callable[..., Any]) -> Any:
    if isinstance(space, (Dict, Tuple)):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        specs = {str(key): _build(sub, f"{path}/{key}", lead, leaf_spec) for key, sub in parts}
        if len(specs) < len(space.spaces):
            raise UnsupportedSpaceError(f"{path}: expected keys that differ as strings, got {space}")
        return Composite(specs, shape=lead)
    try:
        dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    except TypeError as error:
        raise UnsupportedSpaceError(f"{path}: {space} has values that no tensor can hold ({error})") from None
    return leaf_spec(space, lead, dtype)


def _observation_leaf(space: Space[Any], lead: tuple[int, ...], dtype: torch.dtype) -> Any:
    if isinstance(space, Discrete):
        if space.start == 0:
            return Categorical(int(space.n), lead, dtype=dtype)
        last = int(space.start + space.n - 1)
        return Bounded(min(0, int(space.start)), max(0, last), lead, dtype=dtype)
    if isinstance(space, MultiDiscrete):
        low, high = np.minimum(space.start, 0), np.maximum(space.start + space.nvec - 1, 0)
        return Bounded(low, high, space.shape, dtype=dtype).expand(*lead, *space.shape)
    return _array_leaf(space, lead, dtype, with_zero=True)


def _array_leaf(space: Space[Any], lead: tuple[int, ...], dtype: torch.dtype, *, with_zero: bool = False) -> Any:
    assert space.shape is not None
    if isinstance(space, MultiBinary):
        return Binary(shape=(*lead, *space.shape), dtype=dtype)
    assert isinstance(space, Box)
    if not (space.bounded_below.any() or space.bounded_above.any()):
        return Unbounded((*lead, *space.shape), dtype=dtype)
    low, high = (np.minimum(space.low, 0), np.maximum(space.high, 0)) if with_zero else (space.low, space.high)
    bounds = [torch.from_numpy(np.array(bound, space.dtype)) for bound in (low, high)]
    return Bounded(*bounds, space.shape, dtype=dtype).expand(*lead, *space.shape)


def _is_flat(space: Space[Any]) -> TypeGuard[MultiDiscrete]:
    return isinstance(space, MultiDiscrete) and space.nvec.ndim == 1


def _collect(space: Space[Any], actions: Any, found: list[Tensor]) -> None:
    if isinstance(space, (Dict, Tuple)):
        keys = space.spaces if isinstance(space, Dict) else range(len(space.spaces))
        parts: Mapping[str, Any] = dict(actions.items())
        for key in keys:
            _collect(space.spaces[key], parts[str(key)], found)  # type: ignore[index]  # both can be asked so
    else:
        found.append(actions)


def _reader(leaf: Leaf, *, categorical: bool) -> Callable[[Tensor], NDArray[Any]]:
    space: Any = leaf.space
    if isinstance(space, Discrete):
        start = int(space.start)
        if categorical:
            return lambda actions: _numpy(actions) + start if start else _numpy(actions)
        return lambda actions: _numpy(actions.int().argmax(dim=-1)) + start
    if _is_flat(space):
        if categorical:
            return lambda actions: _numpy(actions) + space.start
        sizes = [int(n) for n in space.nvec]
        return lambda actions: (
            _numpy(torch.stack([part.int().argmax(dim=-1) for part in actions.split(sizes, dim=-1)], dim=-1))
            + space.start
        )
    return _numpy


def _numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


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
        self._readers = [
            TensorActionReader(group.action_tree, categorical=categorical_actions) for group in envs.spec.groups
        ]
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


GroupMap = str | Mapping[str, Sequence[str]] | None
"""``"spaces"`` or None, ``"all"``, ``"each"``, ``"prefix"``; or group name → names of its agents, in order."""


def group_agents(spec: EnvSpec, group_map: GroupMap = None) -> dict[str, list[str]]:
    """Return the names of each group's agents, or raise ArgumentError with all problems.

    ``"spaces"`` or None: marlvec's own groups; ``"all"``: one group, ``"agents"``; ``"each"``: one group per agent,
    with its name; ``"prefix"``: ``agent_0, agent_1`` form the group ``agent``, a name without a number its own.
    """
    agents = list(spec.agents)
    if group_map is None or group_map == "spaces":
        return {group.name: [agents[a] for a in group.agents] for group in spec.groups}
    if group_map == "all":
        return {"agents": agents}
    if group_map == "each":
        return {agent: [agent] for agent in agents}
    if group_map == "prefix":
        found: dict[str, list[str]] = {}
        for agent in agents:
            found.setdefault(re.sub(r"_\d+$", "", agent), []).append(agent)
        return found
    if isinstance(group_map, Mapping):
        return _checked(group_map, agents)
    raise ArgumentError(
        f"group_map: expected 'spaces', 'all', 'each', 'prefix', or a dict of group name to agent names, "
        f"got {group_map!r}"
    )


@dataclass(frozen=True)
class GroupPlaces:
    """Positions of one group's agents: slices where possible, which avoids copies."""

    name: str
    group: int  # index in `spec.groups`
    own: slice | list[int]  # positions in that group
    on_axis: slice | list[int]  # positions on the agent axis
    count: int
    whole: bool  # all agents of that group, in its order


def find_places(spec: EnvSpec, name: str, members: Sequence[str]) -> GroupPlaces:
    """Find the positions of a group's agents, or raise ArgumentError if their spaces differ."""
    places = places_of(spec)
    g = places[members[0]][0]
    home = spec.groups[g]
    if other := next((agent for agent in members if places[agent][0] != g), None):
        raise ArgumentError(
            f"group_map: expected equal spaces for the agents of group {name!r}, which share one tensor, but "
            f"{members[0]!r} and {other!r} differ: {_difference(home, spec.groups[places[other][0]])}. Put them in two "
            f"groups, or make them equal with make(..., pad=True)"
        )
    own = [places[agent][1] for agent in members]
    on_axis = [home.agents[j] for j in own]
    return GroupPlaces(name, g, _cut(own), _cut(on_axis), len(own), own == list(range(len(home.agents))))


def _cut(places: list[int]) -> slice | list[int]:
    run = range(places[0], places[0] + len(places))
    return slice(run.start, run.stop) if places == list(run) else places


def _checked(group_map: Mapping[Any, Any], agents: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, members in group_map.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"group_map: expected names of groups that are strings, got {name!r}")
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise ArgumentError(f"group_map[{name!r}]: expected a list of agent names, got {members!r}")
        groups[name] = list(members)
    placed = [agent for members in groups.values() for agent in members]
    wrong = {
        "these groups are empty": [name for name, members in groups.items() if not members],
        "these agents are unknown": [agent for agent in placed if agent not in agents],
        "these agents are in it more than once": [agent for agent in agents if placed.count(agent) > 1],
        "these agents are missing": [agent for agent in agents if agent not in placed],
    }
    if found := [f"{what}: {', '.join(map(str, who))}" for what, who in wrong.items() if who]:
        raise ArgumentError(
            f"group_map: every agent must be in exactly one group; {'; '.join(found)}. Agents: {agents}"
        )
    return groups


def _difference(mine: AgentGroup, theirs: AgentGroup) -> str:
    for what, a, b in (
        ("observation space", mine.observation_space, theirs.observation_space),
        ("action space", mine.action_space, theirs.action_space),
    ):
        if differs := describe_difference(a, b):
            return f"{what} {differs}"
    return f"action masks of length {mine.mask_size} and {theirs.mask_size}"


@dataclass(frozen=True)
class EnvSnapshot:
    """Arrays with one row per env; never written to, so that callers may keep them."""

    obs: list[list[NDArray[Any]]]  # for each group and leaf: (n, A_g, …)
    acting: NDArray[np.bool_]  # (n, A)
    masks: list[NDArray[np.bool_] | None]  # for each group: (n, A_g, k), or None
    state: NDArray[Any] | None  # (n, …)

    @classmethod
    def of(cls, result: VectorStep) -> EnvSnapshot:
        return cls(result.obs_leaves, result.acting, result.action_masks, result.state)

    def picked(self, ids: NDArray[np.int64]) -> EnvSnapshot:
        return EnvSnapshot(
            [[leaf[ids] for leaf in leaves] for leaves in self.obs],
            self.acting[ids],
            [None if mask is None else mask[ids] for mask in self.masks],
            None if self.state is None else self.state[ids],
        )

    def updated(self, ids: NDArray[np.int64], other: EnvSnapshot) -> EnvSnapshot:
        """Return a copy with ``other`` in these rows; a missing mask counts as all True."""
        if len(ids) == len(self.acting) and np.array_equal(ids, np.arange(len(ids))):
            return other

        def put(whole: NDArray[Any], part: NDArray[Any]) -> NDArray[Any]:
            whole = whole.copy()
            whole[ids] = part
            return whole

        def put_mask(whole: NDArray[np.bool_] | None, part: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
            if whole is not None:
                return put(whole, np.ones((len(ids), *whole.shape[1:]), np.bool_) if part is None else part)
            return None if part is None else put(np.ones((len(self.acting), *part.shape[1:]), np.bool_), part)

        return EnvSnapshot(
            _paired(put, self.obs, other.obs),
            put(self.acting, other.acting),
            [put_mask(*pair) for pair in zip(self.masks, other.masks, strict=True)],
            None if self.state is None or other.state is None else put(self.state, other.state),
        )

    def at_ends(
        self, result: VectorStep, before: EnvSnapshot, groups: Sequence[AgentGroup], *, same_step: bool
    ) -> EnvSnapshot:
        """Return this snapshot, with final observations (and no acting agents) in rows whose episode ended.

        ``before`` has the final observations of lost episodes. In same-step mode ended rows are already the next
        episode's.
        """
        if not result.done.any():
            return self
        obs, state = self.obs, self.state
        sources = []
        if same_step:
            # As in the other modes, agents that ended earlier have zeros.
            here = [result.ended[:, group.agents] for group in groups]
            final = [
                [np.where(who.reshape(*who.shape, *[1] * (leaf.ndim - 2)), leaf, leaf.dtype.type()) for leaf in leaves]
                for who, leaves in zip(here, result.final_leaves, strict=True)
            ]
            sources.append((result.done, final, result.final_state))
        if result.fault.any():
            sources.append((result.fault, before.obs, before.state))
        for rows, last, last_state in sources:
            obs = _paired(_taking(rows), obs, last)
            state = state if state is None or last_state is None else _taking(rows)(state, last_state)
        ends = result.done[:, None]
        masks = [None if mask is None else mask | ends[:, :, None] for mask in self.masks]
        return replace(self, obs=obs, state=state, acting=self.acting & ~ends, masks=masks)


def scatter(ids: NDArray[np.int64], part: NDArray[Any], row_num: int) -> NDArray[Any]:
    """Return ``row_num`` rows of zeros, with ``part`` in the rows ``ids``."""
    whole = np.zeros((row_num, *part.shape[1:]), part.dtype)
    whole[ids] = part
    return whole


def _paired(
    function: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
    some: list[list[NDArray[Any]]],
    others: list[list[NDArray[Any]]],
) -> list[list[NDArray[Any]]]:
    return [[function(*pair) for pair in zip(*leaves, strict=True)] for leaves in zip(some, others, strict=True)]


def _taking(rows: NDArray[np.bool_]) -> Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]:
    """Return a function that takes these rows from its second argument."""
    return lambda one, other: np.where(rows.reshape(-1, *[1] * (one.ndim - 1)), other, one)
