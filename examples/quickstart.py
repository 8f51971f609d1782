"""From envs to per-policy batches: simple_spread in 16 envs, connectors, two policies.

Three agents should cover three landmarks. Two of them are played by a policy that is to learn (here it acts at random),
the third by a function.
"""

import argparse

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and policies")
parser.add_argument("--num-envs", type=int, default=16, help="envs at once")
parser.add_argument("--total-timesteps", type=int, default=6_000, help="env steps of all three batches")
args = parser.parse_args()  # before anything large is imported

import numpy as np

import marlvec
from marlvec.connectors import AgentIndicator, FlattenObs, FrameStack, NormalizeObs, Rows

# 1. Many envs at once, in worker processes. Arrays have the axes (env, agent, ...).
envs = marlvec.make("simple_spread", num_envs=args.num_envs)
obs, infos = envs.reset(seed=args.seed)
obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
print(envs)
print(f"obs {obs.shape} {obs.dtype}, rewards {rewards.shape}, terminated {terminated.shape}\n")


# 2. A policy takes n rows, of all envs in which its agents must act, and gives n actions.
def seek(rows: Rows) -> np.ndarray:
    """Head for the landmark that has the agent's own number: 1 left, 2 right, 3 down, 4 up."""
    landmarks = rows.obs[:, 4:10].reshape(-1, 3, 2)
    way = landmarks[np.arange(len(rows)), rows.agent_index]
    axis = np.abs(way).argmax(axis=1)
    return 1 + 2 * axis + (way[np.arange(len(rows)), axis] > 0)


# 3. A collector sends rows through connectors to policies and keeps what came of their actions.
collector = marlvec.Collector(
    envs,
    policies={"learner": marlvec.RandomPolicy(), "seek": marlvec.FunctionPolicy(seek)},
    policy_mapping={"agent_0": "learner", "agent_1": "learner", "agent_2": "seek"},
    agent_connectors={"learner": [FlattenObs(), NormalizeObs(), FrameStack(4), AgentIndicator()]},
    seed=args.seed,
)
for _ in range(3):
    batch = collector.collect(env_steps=args.total_timesteps // 3)
    # Here batch["learner"] would go into an update of the learner.
    print(collector.metrics)

# 4. One batch per policy, one row per decision.
print(f"\n{batch}\n\nbatch['learner'] is a {batch['learner']}\n")

# 5. Each row's next_obs is what its agent saw next; where an episode ended, its final observation.
learner = batch["learner"]
ends = np.flatnonzero(learner.terminated | learner.truncated)
print(f"{len(ends)} of its rows are ends; the first: env {learner.env_id[ends[0]]}, t {learner.t[ends[0]]}")
print(f"newest frame of its next_obs: {learner.next_obs[ends[0], 54:72].round(2)}")
envs.close()
