"""EnvPool's CartPole as the engine, marlvec around it: whole episodes, true ends, and a policy that learns to balance.

Needs the extra `envpool`; `--plot cartpole.png` (extra `plot`) draws what came of it.

The pool hands out 32 of its 64 envs at a time, while its threads step the others. A collector turns that stream into
batches. The policy is a line through the four observations; the cross-entropy method looks for a good one.
"""

import argparse
from pathlib import Path

import numpy as np

import marlvec
from marlvec.connectors import Rows

parser = argparse.ArgumentParser()
parser.add_argument("--generations", type=int, default=6)
parser.add_argument("--plot", type=Path, help="file to draw the returns into")
args = parser.parse_args()

CANDIDATES, ELITE = 64, 8

# 1. Envs of EnvPool's, with the agent axis of every VectorEnv: A is 1 here.
envs = marlvec.make("envpool/CartPole-v1", num_envs=CANDIDATES, batch_size=32, max_episode_steps=200)
print(envs, "\n")


# 2. Candidate i plays in env i.
class Lines:
    """One linear policy per env."""

    weights = np.zeros((CANDIDATES, 4))

    def act(self, rows: Rows) -> np.ndarray:
        """Push to the right where the candidate's weighted sum is positive."""
        return (np.einsum("nk,nk->n", rows.obs, self.weights[rows.env_id]) > 0).astype(np.int64)


lines = Lines()
collector = marlvec.Collector(
    envs, policies={"lines": marlvec.FunctionPolicy(lines.act)}, policy_mapping="lines", batch_mode="complete", seed=0
)

# 3. Keep the best, and look around them.
rng = np.random.default_rng(0)
mean, spread, curve = np.zeros(4), np.ones(4), []
for generation in range(args.generations):
    lines.weights = rng.normal(mean, spread, (CANDIDATES, 4))
    rows = collector.collect(episodes=4 * CANDIDATES)["lines"]
    paid = np.bincount(rows.env_id, rows.rewards, CANDIDATES)
    played = np.bincount(rows.env_id, rows.terminated | rows.truncated, CANDIDATES)
    returns = paid / np.maximum(played, 1)
    best = np.argsort(returns)[-ELITE:]
    mean, spread = lines.weights[best].mean(axis=0), lines.weights[best].std(axis=0) + 0.1
    curve.append(returns.mean())
    cut = np.count_nonzero(rows.truncated)
    print(f"generation {generation}: mean return {returns.mean():6.1f}, {cut} of {played.sum():.0f} ran out of time")
envs.close()

if args.plot is not None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
    axes.plot(curve, marker=".")
    axes.set(xlabel="generation", ylabel="mean return", title="CartPole in EnvPool, cross-entropy method")
    figure.savefig(args.plot, dpi=100)
