"""EnvPool's CartPole as the engine, marlvec around it: whole episodes, true ends, and a policy that learns to balance.

Needs the extras `envpool`, `plot` and, for --track, `tensorboard`.

The pool hands out half of its 64 envs at a time, while its threads step the others. A collector turns that stream into
batches. The policy is a line through the four observations; the cross-entropy method looks for a good one. With
--resume what it has found goes on, and new episodes begin: EnvPool keeps the states of its envs to itself.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and of what is drawn")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=64, help="envs at once")
parser.add_argument(
    "--checkpoint", type=Path, default=Path("runs/envpool_cartpole"), help="folder for all that is kept"
)
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before anything large is imported
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import envpool  # noqa: F401  (make() takes the envs from there)
    import numpy as np
    from matplotlib.figure import Figure

    import marlvec
    from marlvec.connectors import Rows

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", first_step=done)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[envpool,plot,tensorboard]'") from None

ELITE = args.num_envs // 8

# 1. Envs of EnvPool's, with the agent axis of every VectorEnv: A is 1 here.
envs = marlvec.make("envpool/CartPole-v1", num_envs=args.num_envs, batch_size=args.num_envs // 2, max_episode_steps=200)
print(envs, "\n")


# 2. Candidate i plays in env i.
class Lines:
    """One linear policy per env."""

    weights = np.zeros((args.num_envs, 4))

    def act(self, rows: Rows) -> np.ndarray:
        """Push to the right where the candidate's weighted sum is positive."""
        return (np.einsum("nk,nk->n", rows.obs, self.weights[rows.env_id]) > 0).astype(np.int64)


lines = Lines()
collector = marlvec.Collector(
    envs,
    policies={"lines": marlvec.FunctionPolicy(lines.act)},
    policy_mapping="lines",
    batch_mode="complete",
    callbacks=logs,
    seed=args.seed + done,
)

# 3. Keep the best, and look around them.
rng = np.random.default_rng((args.seed, done))
mean, spread = progress.get("mean", np.zeros(4)), progress.get("spread", np.ones(4))
while done < args.total_timesteps:
    lines.weights = rng.normal(mean, spread, (args.num_envs, 4))
    batch = collector.collect(episodes=4 * args.num_envs)
    rows, done = batch["lines"], done + batch.env_steps
    sums = np.bincount(rows.env_id, rows.rewards, args.num_envs)
    played = np.bincount(rows.env_id, rows.terminated | rows.truncated, args.num_envs)
    returns = sums / np.maximum(played, 1)
    best = np.argsort(returns)[-ELITE:]
    mean, spread = lines.weights[best].mean(axis=0), lines.weights[best].std(axis=0) + 0.1
    curve.append([done, float(returns.mean())])
    progress = {"mean": mean, "spread": spread, "curve": curve, "done": done}
    marlvec.save_checkpoint(args.checkpoint, progress=progress, score=curve[-1][1])
    cut = np.count_nonzero(rows.truncated)
    print(
        f"generation {len(curve) - 1}: mean return {returns.mean():6.1f}, {cut} of {played.sum():.0f} ran out of time"
    )
envs.close()
for log in logs:
    log.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), marker=".")
axes.set(xlabel="env steps", ylabel="return of the agent", title="CartPole in EnvPool, cross-entropy method")
axes.figure.savefig(args.checkpoint / "return.png", dpi=100)
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
