"""Two policies of one's own, for mpe2's simple_spread: three agents should cover three landmarks.

`seek` is a function and knows what to do; `Evolve` is a class and finds out while it acts. As it stands this file plays
two agents that evolve beside one that seeks. The same from the command line, with a plot:

    marlvec rollout simple_spread --policy evolve=examples/policies.py:Evolve --policy examples/policies.py:seek \
        --mapping agent_2=seek --plot returns.png
"""

import argparse

import numpy as np

import marlvec
from marlvec.connectors import Rows


def seek(rows: Rows) -> np.ndarray:
    """Head for the landmark that has the agent's own number; (n,) actions for n rows."""
    landmarks = rows.obs[:, 4:10].reshape(-1, 3, 2)  # as seen from the agent
    velocity = rows.obs[:, 0:2]
    return towards(landmarks[np.arange(len(rows)), rows.agent_index] - 0.2 * velocity)


def towards(way: np.ndarray) -> np.ndarray:
    """From directions (n, 2) to actions (n,): 1 left, 2 right, 3 down, 4 up."""
    axis = np.abs(way).argmax(axis=1)
    return 1 + 2 * axis + (way[np.arange(len(way)), axis] > 0)


class Evolve(marlvec.Policy):
    """Each env tries weights of its own; after two episodes the best quarter of them says where to look next."""

    def reseed(self, seed: int) -> None:
        """Begin anew: no idea where to go."""
        self.rng = np.random.default_rng(seed)
        self.mean, self.spread = np.zeros((3, 4)), np.ones((3, 4))
        self.weights = None

    def act(self, rows: Rows, *, explore: bool = True) -> np.ndarray:
        """Go where the three landmarks and the own velocity, each with its weight, pull."""
        if self.weights is None:
            self.try_others(1 + rows.env_id.max())
        np.add.at(self.score, rows.env_id, rows.rewards)
        self.episodes[np.unique(rows.env_id[rows.first])] += 1
        if self.episodes.min() > 2:
            best = self.weights[np.argsort(self.score)[-len(self.score) // 4 :]]
            self.mean, self.spread = best.mean(axis=0), best.std(axis=0) + 0.1
            self.try_others(len(self.score))
            self.episodes += 1  # the one that begins now
        pulls = np.concatenate([rows.obs[:, 4:10], rows.obs[:, 0:2]], axis=1).reshape(-1, 4, 2)
        weights = self.weights[rows.env_id, rows.agent_index]  # (n, 4)
        return towards((weights[:, :, None] * pulls).sum(axis=1))

    def try_others(self, num_envs: int) -> None:
        """Draw weights (envs, agents, 4)."""
        self.weights = self.mean + self.spread * self.rng.standard_normal((num_envs, 3, 4))
        self.score, self.episodes = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self.version += 1  # each row of a batch says which weights decided


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of envs and policies")
    parser.add_argument("--num-envs", type=int, default=16, help="envs at once, each with weights of its own")
    parser.add_argument("--total-timesteps", type=int, default=12_000, help="env steps of all six batches")
    args = parser.parse_args()
    with marlvec.make("simple_spread", num_envs=args.num_envs) as envs:
        collector = marlvec.Collector(
            envs,
            {"evolve": Evolve(), "seek": marlvec.FunctionPolicy(seek)},
            policy_mapping={"agent_0": "evolve", "agent_1": "evolve", "agent_2": "seek"},
            seed=args.seed,
        )
        for _ in range(6):
            batch = collector.collect(env_steps=args.total_timesteps // 6)
            newest = batch["evolve"].policy_version.max()
            print(f"weights no. {newest:2}: return of the last 100 episodes {collector.metrics.returns.mean:6.1f}")
