"""Offline learning: implicit Q-learning (IQL, Kostrikov et al. 2021) from the recording of a policy that often errs.

    python examples/iql_simple_spread.py
    marlvec data runs/erring

Half of the recorded actions are random. The net never acts while it learns: it learns what actions are worth from the
recording alone, and imitates those that turned out better than expected. The recording stays in --data, and is used
again where it is there. Needs torch, and the extra `parquet`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies, weights and the order of rows")
parser.add_argument("--total-timesteps", type=int, default=100_000, help="env steps that are recorded")
parser.add_argument("--num-envs", type=int, default=128, help="envs at once")
parser.add_argument("--epochs", type=int, default=5, help="times that the nets see all rows")
parser.add_argument("--errors", type=float, default=0.5, help="share of recorded actions that are random")
parser.add_argument("--games", type=int, default=500, help="episodes by which each policy is judged")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--data", type=Path, default=Path("runs/erring"), help="folder of the recording")
args = parser.parse_args()  # before torch is imported, which takes seconds

try:
    import numpy as np
    import torch
    from torch import nn

    import marlvec
    from marlvec.connectors import AgentIndicator, Rows
    from marlvec.interop.torch import TorchPolicy
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[parquet]'") from None

GAMMA, EXPECTILE, TEMPERATURE, TARGET_RATE = 0.9, 0.8, 3.0, 0.01

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


class Erring(marlvec.Policy):
    """Heads for the landmark that has the agent's own number, but for a share of random actions."""

    def reseed(self, seed: int) -> None:
        """Begin a stream of errors."""
        self.rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> np.ndarray:
        """1 left, 2 right, 3 down, 4 up; (n,) actions for n rows."""
        landmarks = rows.obs[:, 4:10].reshape(-1, 3, 2)  # as seen from the agent
        way = landmarks[np.arange(len(rows)), rows.agent_index] - 0.2 * rows.obs[:, 0:2]
        axis = np.abs(way).argmax(axis=1)
        best = 1 + 2 * axis + (way[np.arange(len(way)), axis] > 0)
        return np.where(self.rng.random(len(rows)) < args.errors, self.rng.integers(5, size=len(rows)), best)


def collector_of(envs: marlvec.VectorEnv, policy: object, **options: object) -> marlvec.Collector:
    """All policies see their agent's number: (n, 18) and 3 more."""
    return marlvec.Collector(envs, policy, agent_connectors=[AgentIndicator()], seed=args.seed, **options)


def mean_return(policy: object) -> float:
    """Mean team return over whole episodes, in envs of their own."""
    with marlvec.make("simple_spread", args.num_envs, backend=args.backend) as envs:
        collector = collector_of(envs, policy, batch_mode="complete", explore=False)
        return collector.collect(episodes=args.games)["main"]["rewards"].sum() / args.games


# 1. Record.
if not (args.data / "manifest.jsonl").exists():
    with (
        marlvec.make("simple_spread", args.num_envs, backend=args.backend) as envs,
        marlvec.Recorder(args.data, notes={"errors": args.errors, "seed": args.seed}) as recorder,
    ):
        collector = collector_of(envs, Erring(), callbacks=[recorder])
        for _ in collector.batches(env_steps=5_000, total=args.total_timesteps):
            pass


# 2. Learn from the recording alone.
def net(outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(21, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


q, target, value, actor = net(5), net(5), net(1), net(5)
target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam([*q.parameters(), *value.parameters(), *actor.parameters()], lr=1e-3)
needed = ["obs", "actions", "rewards", "next_obs", "terminated"]
with marlvec.load_dataset(args.data) as data:
    print(data)
    for rows in data["main"].minibatches(1024, seed=args.seed, epochs=args.epochs, columns=needed):
        columns = rows.to_torch()
        actions = columns["actions"][:, None]
        with torch.no_grad():
            goes_on = (~columns["terminated"]).float()
            goal = columns["rewards"].float() + GAMMA * goes_on * value(columns["next_obs"])[:, 0]
            worth = target(columns["obs"]).gather(1, actions)[:, 0]
        better = worth - value(columns["obs"])[:, 0]
        value_loss = ((EXPECTILE - (better < 0).float()).abs() * better.square()).mean()
        q_loss = (q(columns["obs"]).gather(1, actions)[:, 0] - goal).square().mean()
        weight = (TEMPERATURE * better.detach()).exp().clamp(max=100.0)
        actor_loss = (
            weight * nn.functional.cross_entropy(actor(columns["obs"]), actions[:, 0], reduction="none")
        ).mean()
        optimizer.zero_grad()
        (value_loss + q_loss + actor_loss).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), q.parameters(), strict=True):
                old.lerp_(new, TARGET_RATE)

# 3. Judge.
random, recorded, learned = map(mean_return, (marlvec.RandomPolicy(), Erring(), TorchPolicy(actor)))
print(f"team return: random {random:.1f}, recorded {recorded:.1f}, learned {learned:.1f}")
