"""A policy of one's own: a function from rows to actions.

In mpe2's simple_spread, three agents should cover three landmarks. Here each heads for the landmark that has its own
number. From the command line:

    marlvec rollout simple_spread --policy examples/seek.py:seek
"""

import numpy as np

import marlvec
from marlvec.connectors import Rows


def seek(rows: Rows) -> np.ndarray:
    """One action for each of n rows: 0 stay, 1 left, 2 right, 3 down, 4 up."""
    velocity = rows.obs[:, 0:2]
    landmarks = rows.obs[:, 4:10].reshape(-1, 3, 2)  # where each one is, seen from the agent
    own = landmarks[np.arange(len(rows)), rows.agent_index]
    way = own - 0.2 * velocity  # brake before it is there
    axis = np.abs(way).argmax(axis=1)
    forward = way[np.arange(len(rows)), axis] > 0
    return 1 + 2 * axis + forward


if __name__ == "__main__":
    for name, policy in {"random": marlvec.RandomPolicy(), "seek": marlvec.FunctionPolicy(seek)}.items():
        with marlvec.make("simple_spread", num_envs=16) as envs:
            collector = marlvec.Collector(envs, policy, seed=0)
            collector.collect(episodes=160)
            print(f"{name:>6}: the agents' returns in the last 100 episodes sum to {collector.metrics.returns.mean:.1f}")
