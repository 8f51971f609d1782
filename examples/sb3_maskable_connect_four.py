"""MaskablePPO of sb3-contrib learns connect four against itself: both players are rows of one batch.

The player who waits is a row, too, but decides nothing: `only_decisions` keeps it out of what is learned from, and pays
what the opponent's move brings to the move before. Needs the extras `sb3` and `classic`. As it stands it takes seconds
and learns little; with `--steps 1000000` it takes minutes, and `--plot four.png` (extra `plot`) shows what came of it.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sb3_contrib import MaskablePPO

import marlvec
from marlvec.interop.sb3 import SB3VecEnv, only_decisions

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4_096, help="rows, of which half are decisions")
parser.add_argument("--backend", default="sync", help="native: compiled boards, extra `native`")
parser.add_argument("--plot", type=Path, help="file to draw the win rate into")
args = parser.parse_args()


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
view = SB3VecEnv(marlvec.make("pettingzoo/classic/connect_four", num_envs=32, backend=args.backend))
model = MaskablePPO("MlpPolicy", view, n_steps=64, batch_size=512, n_epochs=6, ent_coef=0.02, seed=0, device="cpu")
only_decisions(model)
points = [(0, win_rate(model))]
while model.num_timesteps < args.steps:
    model.learn(max(args.steps // 20, 1), reset_num_timesteps=False)
    points.append((model.num_timesteps, win_rate(model)))
print(f"games won against random moves: {points[0][1]:.0%} untrained, {points[-1][1]:.0%} after {points[-1][0]} rows")
view.close()

if args.plot is not None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
    axes.plot(*zip(*points, strict=True), marker=".")
    axes.set(xlabel="rows", ylabel="won against random", ylim=(0, 1), title="connect four, MaskablePPO against itself")
    axes.grid(alpha=0.3)
    figure.savefig(args.plot, dpi=100)
