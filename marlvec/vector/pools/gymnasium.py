"""`GymnasiumPool`: a Gymnasium vector env as a `Pool` of single-agent envs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from marlvec.envs.adapters.gymnasium import AGENT
from marlvec.envs.spec import COMMON, AutoresetMode, EnvSpec, Info
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import count_choices, mask_refusal, read_mask, split_action_mask
from marlvec.vector.pools.pool import FinalRows, Leaves, Pool, PoolReply

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_FINAL_OBS, _FINAL_INFO, _MASK = "final_obs", "final_info", "action_mask"


class GymnasiumPool(Pool):
    """Adapts a ``gymnasium.vector.VectorEnv``: steps all envs at once; resets some if it supports ``reset_mask``."""

    steps_all = True

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        name = envs.spec.id if envs.spec is not None else type(envs.unwrapped).__name__
        mode = AutoresetMode.declared_by(envs.metadata, name)
        if mode is None:
            raise ContractError(f"{name}: expected metadata['autoreset_mode'] to say what it does when an episode ends")
        self.num_envs = self.batch_size = int(envs.num_envs)
        self.autoreset = mode
        self._envs = envs
        self._asynchronous = envs if isinstance(envs, AsyncVectorEnv) else None  # a wrapper has no step_async
        self._of_envs = isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))  # else one object is all envs
        self._everyone = np.arange(self.num_envs)
        self._request: Callable[[], Any] | None = None
        self._asked: Ids = self._everyone
        space, action_space = envs.single_observation_space, envs.single_action_space
        self._tree, self._actions = SpaceTree(space), SpaceTree(action_space)
        for leaf in (*self._tree.leaves, *self._actions.leaves):
            if leaf.is_object:
                raise ContractError(
                    f"{name}: {leaf} ({leaf.space}) has no fixed-size array form; backend='sync' takes it"
                )
        rest, mask_size = split_action_mask(space, action_space, f"{name}: observation space")
        paths = [leaf.path for leaf in self._tree.leaves]
        self._mask_leaf = paths.index("action_mask") if mask_size is not None else None
        self._masks_in_infos = mask_size is None and not isinstance(action_space, Box)
        metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
        self.spec = EnvSpec(name, (AGENT,), (rest,), (action_space,), (mask_size,), metadata=metadata)

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        name = self.spec.name
        if any(option != options[0] for option in options):
            raise ArgumentError(f"reset(options=…): {name} takes one dict for all envs")
        if self._of_envs:
            return
        if len(ids) < self.num_envs:
            raise ArgumentError(f"reset(env_ids=…): {name} resets all its envs at once, got {ids.tolist()}")

    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        self._asked = ids
        seed: Any = None
        if any(one is not None for one in seeds):
            by_env: list[int | None] = [None] * self.num_envs
            for i, one in zip(ids.tolist(), seeds, strict=True):
                by_env[i] = one
            seed = by_env if self._of_envs else by_env[0]  # one object that is all envs has one random stream
        given = options[0] if len(options) else None
        chosen = None if given is None else dict(given)  # a copy: Gymnasium removes the mask from the dict
        if len(ids) < self.num_envs:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[ids] = True
            chosen = {**(chosen or {}), "reset_mask": mask}
        if self._asynchronous is None:
            self._request = partial(self._envs.reset, seed=seed, options=chosen)
        else:
            self._asynchronous.reset_async(seed=seed, options=chosen)
            self._request = self._asynchronous.reset_wait

    def send(self, ids: Ids, actions: Leaves, acting: BoolArray) -> None:
        if len(ids) < self.num_envs:
            raise ArgumentError(f"{self.spec.name} steps all its {self.num_envs} envs at once, got {ids.tolist()}")
        by_env = np.argsort(ids) if (ids[1:] < ids[:-1]).any() else slice(None)
        action = self._actions.unflatten([leaf[:, 0][by_env] for leaf in actions[0]])
        self._asked = self._everyone
        if self._asynchronous is None:
            self._request = partial(self._envs.step, action)
        else:
            self._asynchronous.step_async(action)
            self._request = self._asynchronous.step_wait

    def recv(self) -> PoolReply:
        request, self._request = self._request, None
        assert request is not None
        answer = request()
        ids = self._asked
        if len(answer) == 2:
            obs, infos = answer
            reward, terminated, truncated = np.zeros(self.num_envs), *np.zeros((2, self.num_envs), np.bool_)
        else:
            obs, reward, terminated, truncated, infos = answer
        finals = None
        ended = terminated | truncated
        infos = dict(infos)
        if self.autoreset is AutoresetMode.SAME_STEP:
            if ended.any():
                finals = self._finals(ended, infos)
            infos = {
                key: value for key, value in infos.items() if key.removeprefix("_") not in (_FINAL_OBS, _FINAL_INFO)
            }
        leaves, mask = self._leaves(obs)
        if self._masks_in_infos and _MASK in infos:
            mask = self._pop_mask(infos)
        return PoolReply(
            env_ids=ids,
            obs=[[leaf[ids, None] for leaf in leaves]],
            reward=np.asarray(reward)[ids, None],
            terminated=np.asarray(terminated, np.bool_)[ids, None],
            truncated=np.asarray(truncated, np.bool_)[ids, None],
            masks=None if mask is None else [mask[ids, None].astype(np.bool_)],
            infos={i: info for i, info in _by_env(infos).items() if i in set(ids.tolist())} if infos else {},
            finals=finals,
        )

    def forget(self) -> bool:
        self._request = None
        return isinstance(self._envs.unwrapped, SyncVectorEnv)  # its envs only need a reset

    def env(self, i: int) -> Any:
        if not isinstance(self._envs.unwrapped, SyncVectorEnv):
            raise ArgumentError(f"{self.spec.name}: its envs are not in this process, and cannot be asked for anything")
        return self._envs.unwrapped.envs[i]

    def close(self) -> None:
        if not self._envs.closed:
            self._envs.close()

    def _leaves(self, obs: Any) -> tuple[list[NDArray[Any]], NDArray[Any] | None]:
        leaves = [np.asarray(leaf) for leaf in self._tree.flatten(obs)]
        return leaves, None if self._mask_leaf is None else leaves.pop(self._mask_leaf)

    def _pop_mask(self, infos: dict[str, Any]) -> NDArray[Any] | None:
        """Remove the action masks from the infos: (N, k) bool, all True for envs without one; None if no env has one.

        `ContractError`: a mask does not fit the action space, or that cannot have a mask.
        """
        space = self.spec.action_spaces[0]
        given = _by_env({key: infos.pop(key) for key in (_MASK, "_" + _MASK) if key in infos})
        masks: NDArray[np.bool_] | None = None
        for i, info in given.items():
            try:
                value, size = info[COMMON][_MASK], count_choices(space)
                if value is None and size is None:
                    continue
                if size is None:
                    raise ContractError(mask_refusal(space))
                if (own := read_mask(value)).shape != (size,):
                    raise ContractError(f"expected shape ({size},), got {own.shape}")
            except ContractError as error:
                raise ContractError(f"{self.spec.name}: env {i}: action mask in its info: {error}") from None
            masks = np.ones((self.num_envs, size), np.bool_) if masks is None else masks
            masks[i] = own
        return masks

    def _finals(self, ended: BoolArray, infos: Mapping[str, Any]) -> FinalRows:
        """Return final observations and infos, from arrays of objects with one entry per env."""
        if _FINAL_OBS not in infos:
            raise ContractError(f"{self.spec.name}: episodes ended, and infos have no {_FINAL_OBS!r}")
        rows = np.flatnonzero(ended)
        out = [np.zeros((len(rows), 1, *leaf.shape), leaf.dtype) for leaf in self._tree.leaves]
        for k, i in enumerate(rows.tolist()):
            for target, value in zip(out, self._tree.flatten(infos[_FINAL_OBS][i]), strict=True):
                target[k, 0] = value
        if self._mask_leaf is not None:
            del out[self._mask_leaf]
        last = infos.get(_FINAL_INFO, {})
        if self._masks_in_infos:  # a mask after the end is not needed
            last = {key: value for key, value in last.items() if key not in (_MASK, "_" + _MASK)}
        return FinalRows(rows, [out], infos=_by_env(last))


def _by_env(infos: Mapping[str, Any]) -> dict[int, Info]:
    """Convert Gymnasium's dict of arrays to one info dict per env that has infos."""
    found: dict[int, dict[str, Any]] = {}
    for key, values in infos.items():
        mask = infos.get("_" + key)
        if mask is None:
            continue  # the mask of another key
        for i in np.flatnonzero(mask).tolist():
            found.setdefault(i, {})[key] = _at(values, i)
    return {i: {COMMON: info} for i, info in found.items()}


def _at(values: Any, i: int) -> Any:
    if isinstance(values, Mapping):
        masks = {"_" + key for key in values}  # Gymnasium's wrappers omit the masks of inner dicts
        given = {key: values.get("_" + key) for key in values if key not in masks}
        return {key: _at(values[key], i) for key, mask in given.items() if mask is None or mask[i]}
    value = values[i]
    if isinstance(value, np.generic):
        return value.item()
    return value.copy() if isinstance(value, np.ndarray) else value


GYMNASIUM_MODES = {mode: gymnasium.vector.AutoresetMode[mode.name] for mode in AutoresetMode}
"""Gymnasium's names for ours."""
