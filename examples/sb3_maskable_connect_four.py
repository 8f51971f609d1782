"""MaskablePPO of sb3-contrib learns connect four against itself: both players are rows of one batch.

The player who waits is a row, too, but decides nothing: `only_decisions` keeps it out of what is learned from, and adds
what the opponent's move brings to the reward of the move before. As it stands it takes seconds and learns little; with
`--total-timesteps 1000000` it takes minutes. With --resume weights and optimizer go on, and new games begin, which
Stable-Baselines3 cannot save. Needs the extras `sb3`, `classic`, `plot` and, for --track, `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and weights")
parser.add_argument("--total-timesteps", type=int, default=4_096, help="rows in all; half are decisions")
parser.add_argument("--num-envs", type=int, default=32, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument(
    "--checkpoint", type=Path, default=Path("runs/sb3_connect_four"), help="folder for all that is kept"
)
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from sb3_contrib import MaskablePPO

    import marlvec
    from marlvec.interop.sb3 import SB3VecEnv, only_decisions

    if args.track:
        import tensorboard  # noqa: F401  (Stable-Baselines3 writes the logs)
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[sb3,classic,plot,tensorboard]'") from None


def win_rate(model: MaskablePPO, games: int = 200) -> float:
    """Share of games won against random moves; the model begins in every other one."""
    view = SB3VecEnv(marlvec.make("pettingzoo/classic/connect_four", num_envs=50, backend=args.backend))
    view.seed(2)
    rng, won, played = np.random.default_rng(2), 0, 0
    ours = np.arange(view.num_envs) % 4 % 3 == 0  # rows 0 and 3 of 0, 1 | 2, 3: the first player, then the second
    obs = view.reset()
    while played < games:
        masks = view.action_masks()
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in masks])
        actions[ours] = model.predict(obs, action_masks=masks, deterministic=True)[0][ours]
        obs, rewards, dones, _ = view.step(actions)
        won, played = won + int((rewards[ours] > 0).sum()), played + int(dones[ours].sum())
    view.close()
    return won / played


torch.set_num_threads(1)  # the net is so small that threads would only wait for each other
view = SB3VecEnv(marlvec.make("pettingzoo/classic/connect_four", num_envs=args.num_envs, backend=args.backend))
logs = str(args.checkpoint / "logs") if args.track else None
options = {"batch_size": 8 * view.num_envs, "n_epochs": 6, "ent_coef": 0.02, "device": "cpu", "tensorboard_log": logs}
model = MaskablePPO("MlpPolicy", view, n_steps=64, seed=args.seed, **options)
only_decisions(model)
learner = {"policy": model.policy, "optimizer": model.policy.optimizer}
points = marlvec.load_checkpoint(args.checkpoint, learner=learner)["curve"] if args.resume else [(0, win_rate(model))]
model.num_timesteps = points[-1][0]
while model.num_timesteps < args.total_timesteps:
    model.learn(max(args.total_timesteps // 20, 1), reset_num_timesteps=False)
    model.logger.close()
    points.append((model.num_timesteps, win_rate(model)))
    marlvec.save_checkpoint(args.checkpoint, learner=learner, progress={"curve": points}, score=points[-1][1])
view.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(*zip(*points, strict=True), marker=".")
axes.set(
    xlabel="rows", ylabel="games won (one agent)", ylim=(0, 1), title="MaskablePPO against itself, then random moves"
)
axes.grid(alpha=0.3)
axes.figure.savefig(args.checkpoint / "win_rate.png", dpi=100)
print(f"games won against random moves: {points[0][1]:.0%} untrained, {points[-1][1]:.0%} after {points[-1][0]} rows")
print(f"wrote last.npz, best.npz, win_rate.png{', logs' * args.track} into {args.checkpoint}")
