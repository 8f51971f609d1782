"""A script written for Gymnasium's vector envs: its wrappers normalize and count, evolution finds a policy.

The view has one row per agent: 96 envs of simple_spread are 288 rows. 24 candidates play in four envs each, and all
three agents of an env follow the same one. Needs no extra; `--plot spread.png` (extra `plot`) draws what came of it.
"""

import argparse
from pathlib import Path

import numpy as np
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics

import marlvec
from marlvec.interop.gymnasium import GymnasiumVectorEnv

parser = argparse.ArgumentParser()
parser.add_argument("--generations", type=int, default=4)
parser.add_argument("--backend", default="sync", help="native: compiled worlds, extra `native`")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", type=Path, help="file to draw the returns into")
args = parser.parse_args()

CANDIDATES, EACH, RATE, NOISE = 24, 4, 1.0, 0.3
rng = np.random.default_rng(args.seed)

# 1. Gymnasium's own wrappers, in the mode that they want.
view = GymnasiumVectorEnv(
    marlvec.make("simple_spread", CANDIDATES * EACH, backend=args.backend, autoreset_mode="next_step")
)
envs = NormalizeObservation(RecordEpisodeStatistics(view))
(size,), choices = view.single_observation_space.shape, int(view.single_action_space.n)


def play(weights: np.ndarray | None, seed: int) -> np.ndarray:
    """Mean return per agent under each candidate, (candidates,), over one episode in each of its envs.

    Args:
        weights: (candidates, size, choices); None plays at random.
        seed: The same worlds for the same seed.
    """
    obs, _ = envs.reset(seed=seed)
    while True:
        if weights is None:
            actions = rng.integers(choices, size=view.num_envs)
        else:
            told = np.einsum("crk,cka->cra", obs.reshape(CANDIDATES, -1, size), weights)
            actions = told.argmax(axis=2).ravel()
        obs, _, _, _, infos = envs.step(actions)
        if "episode" in infos:  # simple_spread's episodes end together
            return infos["episode"]["r"].reshape(CANDIDATES, -1).mean(axis=1)


# 2. Evolution strategies with pairs of opposite candidates (Salimans et al. 2017).
mean, curve = np.zeros((size, choices)), []
random_return = play(None, args.seed).mean()
for generation in range(args.generations):
    noise = rng.normal(size=(CANDIDATES // 2, size, choices))
    noise = np.concatenate([noise, -noise])
    returns = play(mean + NOISE * noise, args.seed + 1 + generation)
    ranks = returns.argsort().argsort() / (CANDIDATES - 1) - 0.5
    mean += RATE * np.einsum("c,ckd->kd", ranks, noise) / CANDIDATES / NOISE
    curve.append((generation + 1, returns.mean()))
envs.update_running_mean = False  # the judgment changes nothing
learned_return = play(np.broadcast_to(mean, (CANDIDATES, size, choices)), args.seed).mean()
print(f"mean return per agent: random {random_return:.1f}, after {args.generations} generations {learned_return:.1f}")
envs.close()

# 3. The curve.
if args.plot is not None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
    axes.axhline(random_return, color="gray", linestyle=":", label="random")
    axes.plot(*zip(*curve, strict=True), label="candidates")
    axes.set(xlabel="generation", ylabel="return per agent", title="simple_spread, Gymnasium's vector wrappers")
    axes.legend()
    figure.savefig(args.plot, dpi=100)
