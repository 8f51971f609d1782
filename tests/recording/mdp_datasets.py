"""d3rlpy's own datasets of a recording; in a process of its own, as d3rlpy warns when it is imported.

``python -m tests.recording.mdp_datasets FOLDER`` records two runs in the folder, and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import marlvec
from marlvec.recording import to_mdp_dataset

__all__ = ["main"]


def main(folder: Path) -> None:
    """Compare d3rlpy's episodes and transitions with the recorded rows."""
    for name, options in (("discrete", {}), ("continuous", {"continuous_actions": True})):
        with (
            marlvec.make("simple_spread", 2, max_cycles=5, backend="sync", **options) as envs,
            marlvec.Recorder(folder / name) as recorder,
        ):
            collects = marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=[recorder], seed=0)
            rows = marlvec.SampleBatch.concat([collects.collect(env_steps=13)["main"] for _ in range(2)])
        with marlvec.load_dataset(folder / name) as data:
            dataset = to_mdp_dataset(data)
        keys = np.unique(np.stack([rows["eps_id"], rows["agent_index"]], axis=1), axis=0).tolist()
        assert len(dataset.episodes) == len(keys)
        for episode, (eps_id, agent) in zip(dataset.episodes, keys, strict=True):
            want = rows.take(np.flatnonzero((rows["eps_id"] == eps_id) & (rows["agent_index"] == agent)))
            np.testing.assert_array_equal(episode.observations, want.obs)
            np.testing.assert_array_equal(episode.actions, want.actions.reshape(len(want), -1))
            np.testing.assert_array_equal(episode.rewards[:, 0], want.rewards.astype(np.float32))
            assert not episode.terminated
            assert episode.transition_count == len(want) - 1
        info = dataset.dataset_info
        assert (info.action_space.name, info.action_size) == (name.upper(), 5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
