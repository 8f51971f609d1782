"""EnvPool's tasks behind ``marlvec.make("envpool/…")``: spaces from task specs; pools built once seeds are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import envpool
import numpy as np

from marlvec.errors import ArgumentError
from marlvec.vector.pools.envpool import EnvPoolAdapter, form_of
from marlvec.vector.pools.pool import check_known

_NO_LIMIT = 2**31 - 1


def build(
    num_envs: int, *, task_id: str, batch_size: int | None = None, seed: Any = None, **kwargs: Any
) -> EnvPoolAdapter:
    """Prepare a pool of one task; the first reset builds it.

    A pool that returns ``batch_size`` rows at a time gets ``batch_size - 1`` spare envs, which fill the last batches;
    pools of games for several players always do so, by default with a size that costs little. ``seed`` is of the first
    episodes, until a ``reset(seed=…)``: an int, which EnvPool spreads as ``seed + i``, or one per env; None: random.
    """
    check_known("envpool", task_id, envpool.list_all_envs(), "envpool.list_all_envs()")
    if "env_type" in kwargs:
        raise ArgumentError(f"env_type={kwargs['env_type']!r}: marlvec reads EnvPool's 'gymnasium' answers only")
    if batch_size is not None and not 1 <= batch_size <= num_envs:
        raise ArgumentError(f"batch_size: expected 1 to num_envs={num_envs}, got {batch_size!r}")
    if "max_episode_steps" in kwargs:
        _refuse_ignored_limit(task_id, kwargs["max_episode_steps"])
    players = form_of(envpool.make_spec(task_id, **kwargs)).num_players
    if players == 1 and batch_size in (None, num_envs):
        batch, total = num_envs, num_envs
    else:
        batch = batch_size or _good_batch(num_envs)
        total = num_envs + batch - 1
    config = {"num_envs": total, "batch_size": batch, **kwargs}
    first = _first_seeds(seed, num_envs, total)
    form = form_of(envpool.make_spec(task_id, **config), name=f"envpool/{task_id}")

    def make_pool(seeds: list[int] | None) -> Any:
        return envpool.make(task_id, env_type="gymnasium", seed=first if seeds is None else seeds, **config)

    return EnvPoolAdapter(form, make_pool=make_pool, num_envs=num_envs)


def _refuse_ignored_limit(task_id: str, limit: Any) -> None:
    """Raise for tasks that ignore a time limit, and only call the ends of longer episodes truncations (1.2.5)."""
    form = form_of(envpool.make_spec(task_id))
    if form.num_players > 1 or form.max_episode_steps == _NO_LIMIT:
        raise ArgumentError(
            f"max_episode_steps={limit!r}: EnvPool's {task_id} ignores a time limit, and reports episodes that end "
            f"later as truncated; leave it out"
        )


def _good_batch(num_envs: int) -> int:
    """Return a divisor of N near five times its root: one reply costs as much as about ten board resets."""
    most = min(num_envs, math.ceil(5 * math.sqrt(num_envs)))
    divisor = max(k for k in range(1, most + 1) if num_envs % k == 0)
    return divisor if 3 * divisor >= most else most


def _first_seeds(seed: Any, num_envs: int, total: int) -> Any:
    """Return the seeds of all envs, spares included."""
    if seed is None:
        return (np.random.SeedSequence().generate_state(total) >> 1).tolist()
    if isinstance(seed, (list, tuple, np.ndarray)):
        if len(seed) != num_envs:
            raise ArgumentError(f"seed is a list of {len(seed)} for {num_envs} envs; give one seed, or one per env")
        chosen: Sequence[int] = [int(one) for one in seed]
        return [*chosen, *[0] * (total - num_envs)]
    return int(seed)
