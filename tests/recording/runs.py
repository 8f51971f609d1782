"""Runs that are recorded, the same each time; `main` is a program that records until it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.trees import Tree, tree_leaves

# --- Runs that are recorded: envs of two kinds of agents and two policies, the same each time


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


# --- A program that records until it is killed: ``python -m tests.recording.runs FOLDER FORMAT KILLS SEED``


ENV_STEPS, BATCHES = 7, 250


def record(folder: Path, format: Any) -> None:
    """Record the run whose beginnings are expected on disk."""
    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(folder, format, part_bytes=4000) as recorder,
    ):
        collects = collector(envs, [recorder])
        for _ in range(BATCHES):
            collects.collect(env_steps=ENV_STEPS)


def has_part(folder: Path) -> bool:
    """Whether a recording lists rows."""
    path = folder / "manifest.jsonl"
    return path.exists() and b'"part"' in path.read_bytes()


def die_at(number: int) -> None:
    """Have the process killed at its n-th act on files that a recording consists of."""
    acts = 0

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal acts
            acts += 1
            if acts == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("write", "fsync", "ftruncate"):
        setattr(os, name, deadly(getattr(os, name)))
    Path.replace = deadly(Path.replace)  # type: ignore[method-assign]


def main() -> None:
    """Fork ``KILLS`` children, one after another, so that imports are paid once.

    Child k records into ``FOLDER/k`` and is killed after a random while (SEED), every other one once it has rows on
    disk; with a negative SEED, at its (1 - k * SEED)-th write, sync or rename of a file.
    """
    folder, format, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs:
        collector(envs).collect(env_steps=ENV_STEPS)  # compiles
    rng = np.random.default_rng(abs(seed))
    for k in range(kills):
        if (child := os.fork()) == 0:
            try:
                if seed < 0:
                    die_at(1 - k * seed)
                record(folder / str(k), format)
            finally:
                os._exit(0)
        if seed >= 0:
            while k % 2 == 0 and not has_part(folder / str(k)):
                time.sleep(0.002)
            time.sleep(float(rng.uniform(0.0, 0.3)))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
