"""A script written for Gymnasium's vector envs: its wrappers normalize and count, evolution finds a policy.

The view has one row per agent: 96 envs of simple_spread are 288 rows. 24 candidates play in four envs each, and all
three agents of an env follow the same one. With --resume it goes on bit by bit. Needs the extra `plot` and, for
--track, `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and of what is drawn")
parser.add_argument("--total-timesteps", type=int, default=9_600, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=96, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument(
    "--checkpoint", type=Path, default=Path("runs/gymnasium_spread"), help="folder for all that is kept"
)
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before anything large is imported
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
    from matplotlib.figure import Figure

    import marlvec
    from marlvec.interop.gymnasium import GymnasiumVectorEnv

    if args.track:
        from tensorboard.summary import Writer
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[plot,tensorboard]'") from None

CANDIDATES, RATE, NOISE = args.num_envs // 4, 1.0, 0.3
rng = np.random.default_rng(args.seed)

# 1. Gymnasium's own wrappers, in the mode that they want.
made = marlvec.make("simple_spread", 4 * CANDIDATES, backend=args.backend, autoreset_mode="next_step")
view = GymnasiumVectorEnv(made)
envs = NormalizeObservation(RecordEpisodeStatistics(view))
(size,), choices = view.single_observation_space.shape, int(view.single_action_space.n)


def play(weights: np.ndarray | None, seed: int) -> np.ndarray:
    """Mean return per agent under each candidate, (candidates,), over one episode in each of its envs.

    Args:
        weights: (candidates, size, choices); None plays at random.
        seed: The same envs for the same seed.
    """
    obs, _ = envs.reset(seed=seed)
    while True:
        if weights is None:
            actions = rng.integers(choices, size=view.num_envs)
        else:
            pulls = np.einsum("crk,cka->cra", obs.reshape(CANDIDATES, -1, size), weights)
            actions = pulls.argmax(axis=2).ravel()
        obs, _, _, _, infos = envs.step(actions)
        if "episode" in infos:  # simple_spread's episodes end together
            return infos["episode"]["r"].reshape(CANDIDATES, -1).mean(axis=1)


# 2. Evolution strategies with pairs of opposite candidates (Salimans et al. 2017).
random_return = play(None, args.seed).mean()
mean, curve, done, seen = np.zeros((size, choices)), [], 0, envs.obs_rms
if args.resume:
    progress = marlvec.load_checkpoint(args.checkpoint)
    mean, curve, done = progress["mean"], progress["curve"], progress["done"]
    seen.mean, seen.var, seen.count = progress["seen"]
writer = Writer(str(args.checkpoint / "logs")) if args.track else None
while done < args.total_timesteps:
    rng = np.random.default_rng((args.seed, done))  # depends on the checkpoint before it and nothing else
    noise = rng.normal(size=(CANDIDATES // 2, size, choices))
    noise = np.concatenate([noise, -noise])
    returns = play(mean + NOISE * noise, args.seed + 1 + len(curve))
    ranks = returns.argsort().argsort() / (CANDIDATES - 1) - 0.5
    mean += RATE * np.einsum("c,ckd->kd", ranks, noise) / CANDIDATES / NOISE
    done += 25 * made.num_envs
    curve.append((done, float(returns.mean())))
    progress = {"mean": mean, "curve": curve, "done": done, "seen": [seen.mean, seen.var, float(seen.count)]}
    marlvec.save_checkpoint(args.checkpoint, progress=progress, score=curve[-1][1])
    if writer:
        writer.add_scalar("return per agent", curve[-1][1], done)
envs.update_running_mean = False  # the judgment changes nothing
learned_return = play(np.broadcast_to(mean, (CANDIDATES, size, choices)), args.seed).mean()
envs.close()
if writer:
    writer.close()

# 3. The curve.
axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.axhline(random_return, color="gray", linestyle=":", label="random")
axes.plot(*zip(*curve, strict=True), label="candidates")
axes.set(xlabel="env steps", ylabel="return per agent", title="simple_spread, Gymnasium's vector wrappers")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=100)
print(f"mean return per agent: random {random_return:.1f}, after {done} env steps {learned_return:.1f}")
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
