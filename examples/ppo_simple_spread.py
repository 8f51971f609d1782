"""Three agents learn to cover three landmarks: PPO with one policy for all, advantages from learner connectors.

    python examples/ppo_simple_spread.py
    tensorboard --logdir runs/simple_spread

Each update learns from one episode of every env. All that is kept is in --folder: a checkpoint after each update,
TensorBoard logs, a plot. With --resume it goes on from there, and comes to the numbers that it would have come to
without the break.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import tree
from torch import nn

import marlvec
from marlvec.connectors import GeneralAdvantageEstimation, NormalizeObs, Rows, Standardize
from marlvec.interop.torch import TorchPolicy
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.values import decode, encode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=100_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=128)
parser.add_argument("--backend", default="auto", help="auto: compiled worlds if numba is there, else processes")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--games", type=int, default=500, help="episodes in the end, by which it is judged")
parser.add_argument("--folder", type=Path, default=Path("runs/simple_spread"), help="where everything is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)

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
    names = ("obs", "actions", "logp", "advantages", "value_targets")
    columns = {name: rows[name] for name in names}
    rng, sums = np.random.default_rng((args.seed, done)), np.zeros(3)
    for _ in range(EPOCHS):
        for some in np.array_split(rng.permutation(len(rows)), max(1, len(rows) // MINIBATCH)):
            part = {name: torch.from_numpy(column[some]) for name, column in columns.items()}
            distribution, found = policy.forward(Rows({"obs": columns["obs"][some]}))
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.min(ratio * part["advantages"], clipped * part["advantages"]).mean()
            value_loss = (found["values"] - part["value_targets"]).square().mean()
            entropy = distribution.entropy().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * entropy).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
            sums += [value_loss.item(), entropy.item(), 1]
    policy.note_update()
    return {"value loss": sums[0] / sums[2], "entropy": sums[1] / sums[2]}


# 3. Checkpoints: arrays and JSON in one file, which is there as a whole or not at all.
def save(collector: marlvec.Collector, done: int, curve: list[list[float]]) -> None:
    """Write down all that the next update depends on, and the curve."""
    state = {
        "policy": policy.state_dict(),
        "optimizer": tree.map_structure(
            lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, optimizer.state_dict()
        ),
        "connectors": collector.agent_connectors["main"].state_dict(),
        "done": done,
        "curve": curve,
    }
    write_archive(args.folder / "checkpoint.npz", {"state": encode(state, "the checkpoint")})


def load(state: dict) -> None:
    """Take over policy and optimizer of a checkpoint."""
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(
        tree.map_structure(
            lambda leaf: torch.tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, state["optimizer"]
        )
    )


# 4. Training.
def train(collector: marlvec.Collector, done: int, curve: list[list[float]]) -> int:
    """Play and learn until --steps are done."""
    while done < args.steps:
        # New episodes, whose seeds say how far it is: an update depends on the checkpoint before it and nothing else.
        collector.reset(seed=args.seed * 2**32 + done)
        batch = collector.collect(episodes=args.num_envs)
        done += batch.env_steps
        curve.append([done, collector.metrics.returns.mean])
        for name, value in update(batch["main"], done).items():
            collector.metrics.add_value(name, value)
        save(collector, done, curve)
    return done


def plot(curve: list[list[float]], random: float) -> None:
    """The team's return in each update's episodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(*np.transpose(curve), label="while it learns")
    axes.axhline(random, color="gray", linestyle="--", label="random")
    axes.axhline(0.7 * random, color="gray", linestyle=":", label="30 % better")
    axes.set(title="simple_spread, mean over an update's episodes", xlabel="env steps")
    axes.set_ylabel("team return (sum over agents)")
    axes.legend()
    figure.savefig(args.folder / "return.png", dpi=80)


# 5. All of it. Episodes by which it is judged are played in envs of their own.
with (
    marlvec.make("simple_spread", num_envs=args.num_envs, backend=args.backend) as envs,
    marlvec.make("simple_spread", num_envs=args.num_envs, backend=args.backend) as others,
):
    state = decode(read_archive(args.folder / "checkpoint.npz")["state"]) if args.resume else {"done": 0, "curve": []}
    table = marlvec.LiveTable(args.steps - state["done"], title="simple_spread", window=args.num_envs)
    logger = marlvec.TensorBoardLogger(args.folder / "logs", agents=False, first_step=state["done"])
    gae = GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=policy.values)
    collector = marlvec.Collector(
        envs,
        {"main": policy, "random": marlvec.RandomPolicy()},
        policy_mapping="main",
        agent_connectors={"main": [NormalizeObs()]},
        learner_connectors={"main": [gae, Standardize()]},
        batch_mode="complete",
        callbacks=[table, logger],
        window=args.num_envs,
        seed=args.seed,
        evaluation_envs=others,
    )
    if args.resume:
        load(state)
        collector.agent_connectors["main"].load_state_dict(state["connectors"])
    began = time.perf_counter()
    with table, logger:
        done = train(collector, state["done"], state["curve"])
    print(f"{done - state['done']:,} env steps in {time.perf_counter() - began:.0f} s")
    random, trained = (
        collector.evaluate(args.games, policy_mapping=who, seed=args.seed).returns.mean for who in ("random", "main")
    )
    better = 1 - trained / random
    print(f"team return (sum over agents): {random:.1f} at random, {trained:.1f} trained, {better:.0%} better")
    plot(state["curve"], random)
