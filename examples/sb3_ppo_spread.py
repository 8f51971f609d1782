"""PPO of Stable-Baselines3 on simple_spread: three agents share one policy, 64 envs are one batch of 192 rows.

Needs the extra `sb3`. As it stands it takes seconds and learns little; with `--steps 2000000` it takes minutes, and
`--plot spread.png` (extra `plot`) shows what came of it.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

import marlvec
from marlvec.interop.sb3 import SB3VecEnv, only_decisions

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=9_600, help="rows to learn from: decisions of single agents")
parser.add_argument("--backend", default="sync", help="native: compiled worlds, extra `native`")
parser.add_argument("--plot", type=Path, help="file to draw the returns into")
args = parser.parse_args()


class Curve(BaseCallback):
    """Keeps the mean return of the episodes that ended in each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []  # of episodes since the last rollout
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        # Each agent's own return: the view tells it in the step in which its episode ends, no VecMonitor needed.
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        self.points.append((self.num_timesteps, float(np.mean(self.returns))))
        self.returns = []


def play(model: PPO | None) -> float:
    """Mean return per agent over 192 episodes; None acts at random."""
    view.seed(1)
    obs, returns = view.reset(), []
    rng = np.random.default_rng(1)
    for _ in range(25):
        actions = rng.integers(5, size=view.num_envs) if model is None else model.predict(obs)[0]
        obs, _, _, infos = view.step(actions)
        returns += [info["episode"]["r"] for info in infos if "episode" in info]
    return float(np.mean(returns))


torch.set_num_threads(1)  # the net is so small that threads would only wait for each other
view = SB3VecEnv(marlvec.make("simple_spread", num_envs=64, backend=args.backend))
model = PPO("MlpPolicy", view, n_steps=50, batch_size=2400, n_epochs=8, learning_rate=1e-3, seed=0, device="cpu")
only_decisions(model)  # changes nothing here, where everyone decides in every step; see docs/interop.md
random_return = play(None)
curve = Curve()
model.learn(args.steps, callback=curve)
learned_return = play(model)
print(f"mean return per agent: random {random_return:.1f}, after {model.num_timesteps} rows {learned_return:.1f}")
view.close()

if args.plot is not None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
    axes.axhline(random_return, color="gray", linestyle=":", label="random")
    axes.plot(*zip(*curve.points, strict=True), label="PPO, one policy for three agents")
    axes.set(xlabel="rows", ylabel="return per agent", title="simple_spread, Stable-Baselines3")
    axes.legend()
    figure.savefig(args.plot, dpi=100)
