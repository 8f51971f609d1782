"""Three agents learn to cover three landmarks: PPO with one policy for all, advantages from learner connectors.

    python examples/ppo_simple_spread.py --track
    tensorboard --logdir runs/simple_spread

Each update learns from one episode of every env. All that is kept is in --checkpoint: the last state and the best, a
plot, with --track TensorBoard logs, with --video the same episode with random actions and with the trained policy.
--resume continues from there, to the same numbers, bit by bit, as without the break. Needs torch and the extra `plot`;
`tensorboard` for --track, `video` for --video.
"""

import argparse
import time
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=100_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=128, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--games", type=int, default=500, help="episodes in the end, by which it is judged")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/simple_spread"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
parser.add_argument("--video", action="store_true", help="write a GIF of random actions and one of the trained policy")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    import marlvec
    from marlvec.connectors import GeneralAdvantageEstimation, NormalizeObs, Rows, Standardize
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

LEARNING_RATE, EPOCHS, MINIBATCH = 3e-3, 8, 2_400
GAMMA, LAMBDA, CLIP, ENTROPY = 0.9, 0.95, 0.2, 0.003

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. The net: what to do, and what the moment is worth. A policy of marlvec is made of it.
def tower(outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers."""
    layers = [nn.Linear(18, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Net(nn.Module):
    """An actor and a critic, both over what one agent sees."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = tower(5, 0.01), tower(1, 1.0)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs), "values": self.critic(obs)}


policy = TorchPolicy(Net())
optimizer = torch.optim.Adam(policy.module.parameters(), eps=1e-5)


# 2. The update. The batch comes with advantages and value targets.
def update(rows: marlvec.SampleBatch, done: int) -> dict[str, float]:
    """PPO's clipped policy gradient; the learning rate falls with the env steps that are done."""
    optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + done / 150_000)
    columns = {name: rows[name] for name in ("obs", "actions", "logp", "advantages", "value_targets")}
    rng, sums = np.random.default_rng((args.seed, done)), np.zeros(3)
    for _ in range(EPOCHS):
        for some in np.array_split(rng.permutation(len(rows)), max(1, len(rows) // MINIBATCH)):
            part = {name: torch.from_numpy(column[some]) for name, column in columns.items()}
            distribution, found = policy.forward(Rows({"obs": columns["obs"][some]}))
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"]).mean()
            value_loss = (found["values"] - part["value_targets"]).square().mean()
            entropy = distribution.entropy().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * entropy).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
            sums += [value_loss.item(), entropy.item(), 1]
    policy.note_update()
    return {"value loss": sums[0] / sums[2], "entropy": sums[1] / sums[2]}


# 3. All of it. Episodes by which it is judged are played in envs of their own.
table = marlvec.LiveTable(args.total_timesteps, title="simple_spread", window=args.num_envs)
made = {"num_envs": args.num_envs, "backend": args.backend, "env_state": "deepcopy"}  # compiled or not, envs resume
with marlvec.make("simple_spread", **made) as envs, marlvec.make("simple_spread", **made) as others, table:
    gae = GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=policy.values)
    collector = marlvec.Collector(
        envs,
        {"main": policy, "random": marlvec.RandomPolicy()},
        policy_mapping="main",
        policies_to_train=["main"],
        agent_connectors={"main": [NormalizeObs()]},
        learner_connectors={"main": [gae, Standardize()]},
        batch_mode="complete",
        callbacks=[table, *logs],
        window=args.num_envs,
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": {"optimizer": optimizer}}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    began, before = time.perf_counter(), done
    while done < args.total_timesteps:
        batch = collector.collect(episodes=args.num_envs)
        done += batch.env_steps
        curve.append([done, collector.metrics.returns.mean])
        for name, value in update(batch["main"], done).items():
            collector.metrics.add_value(name, value)
        progress = {"done": done, "curve": curve}
        marlvec.save_checkpoint(args.checkpoint, **learned, progress=progress, score=curve[-1][1])
    print(f"{done - before:,} env steps in {time.perf_counter() - began:.0f} s")
    found = [collector.evaluate(args.games, policy_mapping=who, seed=args.seed) for who in ("random", "main")]
    random, trained = (one.returns.mean for one in found)
    for who in ("random", "main") if args.video else ():
        film = marlvec.RecordVideo(args.checkpoint / who, episodes=[0], format="gif")
        with marlvec.make("simple_spread", 1, render_mode="rgb_array", wrappers=[film]) as filmed:
            collector.evaluate(1, filmed, policy_mapping=who, seed=args.seed)
for log in logs:
    log.close()

# 4. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), label="while it learns")
axes.axhline(random, color="gray", linestyle="--", label="random")
axes.set(title="mean over an update's episodes", xlabel="env steps", ylabel="team return (sum over agents)")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"team return (sum over agents): {random:.1f} at random, {trained:.1f} trained")
extra = ", logs" * args.track + ", two GIFs" * args.video
print(f"wrote last.npz, best.npz, return.png{extra} into {args.checkpoint}")
