"""Runs that are recorded: envs of two kinds of agents and two policies, the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.trees import Tree, tree_leaves

__all__ = ["collector", "concat", "make_batch", "policy_of", "same_rows", "two_lives", "write"]


def policy_of(agent: str, episode: object) -> str:
    """Whose agent it is, in simple_tag."""
    return "chasers" if agent.startswith("adv") else "runner"


def collector(envs: marlvec.VectorEnv, callbacks: Sequence[Any] = (), **options: Any) -> marlvec.Collector:
    """Collects from simple_tag, always the same."""
    policies = {"chasers": marlvec.RandomPolicy(), "runner": marlvec.RandomPolicy()}
    return marlvec.Collector(envs, policies, policy_of, callbacks=callbacks, seed=0, **options)


def make_batch(start: int, n: int, columns: Callable[[np.ndarray[Any, Any]], Mapping[str, Tree]]) -> MultiAgentBatch:
    """Rows number ``start`` to ``start + n - 1`` of policy "main"."""
    return MultiAgentBatch({"main": SampleBatch(columns(np.arange(start, start + n)))}, env_steps=n)


def two_lives() -> MultiAgentBatch:
    """An episode in which agent 0 is truncated after two steps, comes back in step 4 and terminates."""
    env_t = np.array([0, 1, 4, 5, 6, *range(7)])
    n = len(env_t)
    columns = {
        "obs": env_t[:, None] * 1.0,
        "actions": env_t % 3,
        "actions_for_env": env_t % 3,
        "rewards": np.ones(n),
        "next_obs": env_t[:, None] + 1.0,
        "terminated": np.isin(np.arange(n), [4, 11]),
        "truncated": np.arange(n) == 1,
        "next_obs_missing": np.zeros(n, np.bool_),
        "t": np.array([0, 1, 2, 3, 4, *range(7)]),
        "env_t": env_t,
        "next_env_t": env_t + 1,
        "eps_id": np.full(n, 3),
        "unroll_id": np.repeat([0, 1, 2], [2, 3, 7]),
        "env_id": np.zeros(n, np.int64),
        "agent_index": np.repeat([0, 1], [5, 7]),
        "policy_version": np.zeros(n, np.int64),
    }
    return MultiAgentBatch({"main": SampleBatch(columns)}, env_steps=7)


def write(folder: Path, batches: Iterable[MultiAgentBatch], **options: Any) -> None:
    """Record batches by hand."""
    with marlvec.Recorder(folder, **options) as recorder:
        for batch in batches:
            recorder.write(batch)


def concat(batches: Sequence[MultiAgentBatch]) -> dict[str, SampleBatch]:
    """All rows, by policy."""
    return dict(MultiAgentBatch.concat(batches)) if batches else {}


def same_rows(got: SampleBatch, want: SampleBatch) -> None:
    """Equal columns in equal order, bit for bit."""
    assert list(got.keys()) == list(want.keys())
    for name, column in want.items():
        pairs = list(zip(tree_leaves(got[name]), tree_leaves(column), strict=True))
        for (path, leaf), (other_path, other) in pairs:
            assert path == other_path
            assert leaf.shape == other.shape
            if other.dtype.kind != "U":
                assert leaf.dtype == other.dtype
                assert leaf.tobytes() == other.tobytes()
            else:
                assert (leaf == other).all()
