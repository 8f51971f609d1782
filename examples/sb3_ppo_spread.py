"""PPO of Stable-Baselines3 on simple_spread: three agents share one policy, 64 envs are one batch of 192 rows.

As it stands it takes seconds and learns little; with `--total-timesteps 2000000` it takes minutes. With --resume
weights and optimizer go on, and new episodes begin, which Stable-Baselines3 cannot save. Needs the extras `sb3`,
`plot` and, for --track, `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and weights")
parser.add_argument("--total-timesteps", type=int, default=9_600, help="rows in all: decisions of single agents")
parser.add_argument("--num-envs", type=int, default=64, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/sb3_spread"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    import marlvec
    from marlvec.interop.sb3 import SB3VecEnv, only_decisions

    if args.track:
        import tensorboard  # noqa: F401  (Stable-Baselines3 writes the logs)
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[sb3,plot,tensorboard]'") from None


class Curve(BaseCallback):
    """Keeps the mean return of the episodes that ended in each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []  # of episodes since the last rollout
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        # Each agent's own return: the view gives it in the step in which its episode ends, no VecMonitor needed.
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        self.points.append((self.num_timesteps, float(np.mean(self.returns))))
        self.returns = []


def play(model: PPO | None) -> float:
    """Mean return per agent over an episode of each row; None acts at random."""
    view.seed(1)
    obs, returns = view.reset(), []
    rng = np.random.default_rng(1)
    for _ in range(25):
        actions = rng.integers(5, size=view.num_envs) if model is None else model.predict(obs)[0]
        obs, _, _, infos = view.step(actions)
        returns += [info["episode"]["r"] for info in infos if "episode" in info]
    return float(np.mean(returns))


torch.set_num_threads(1)  # the net is so small that threads would only wait for each other
view = SB3VecEnv(marlvec.make("simple_spread", num_envs=args.num_envs, backend=args.backend))
logs = str(args.checkpoint / "logs") if args.track else None
options = {
    "batch_size": 50 * view.num_envs // 4,
    "n_epochs": 8,
    "learning_rate": 1e-3,
    "device": "cpu",
    "tensorboard_log": logs,
}
model = PPO("MlpPolicy", view, n_steps=50, seed=args.seed, **options)
only_decisions(model)  # changes nothing here, where everyone decides in every step
random_return = play(None)
curve, learner = Curve(), {"policy": model.policy, "optimizer": model.policy.optimizer}
if args.resume:
    curve.points = marlvec.load_checkpoint(args.checkpoint, learner=learner)["curve"]
    model.num_timesteps = curve.points[-1][0]
while model.num_timesteps < args.total_timesteps:
    model.learn(max(args.total_timesteps // 20, 1), callback=curve, reset_num_timesteps=False)
    model.logger.close()
    progress, score = {"curve": curve.points}, curve.points[-1][1]
    marlvec.save_checkpoint(args.checkpoint, learner=learner, progress=progress, score=score)
learned_return = play(model)
view.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.axhline(random_return, color="gray", linestyle=":", label="random")
axes.plot(*zip(*curve.points, strict=True), label="PPO, one policy for three agents")
axes.set(xlabel="rows", ylabel="return per agent", title="simple_spread, Stable-Baselines3")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=100)
print(f"mean return per agent: random {random_return:.1f}, after {model.num_timesteps} rows {learned_return:.1f}")
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
