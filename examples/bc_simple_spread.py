"""Behaviour cloning: record a policy that knows where to go, and have a net learn its actions from the recording.

    python examples/bc_simple_spread.py
    marlvec data runs/seek

The recording stays in --data, and is used again where it is there. The net is judged by its return, as a share of the
way from random actions to the recorded policy. Needs torch, and the extra `parquet`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies, weights and the order of rows")
parser.add_argument("--total-timesteps", type=int, default=40_000, help="env steps that are recorded")
parser.add_argument("--num-envs", type=int, default=128, help="envs at once")
parser.add_argument("--epochs", type=int, default=6, help="times that the net sees all rows")
parser.add_argument("--games", type=int, default=500, help="episodes by which each policy is judged")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--data", type=Path, default=Path("runs/seek"), help="folder of the recording")
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

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


def seek(rows: Rows) -> np.ndarray:
    """Head for the landmark that has the agent's own number: 1 left, 2 right, 3 down, 4 up."""
    landmarks = rows.obs[:, 4:10].reshape(-1, 3, 2)  # as seen from the agent
    way = landmarks[np.arange(len(rows)), rows.agent_index] - 0.2 * rows.obs[:, 0:2]
    axis = np.abs(way).argmax(axis=1)
    return 1 + 2 * axis + (way[np.arange(len(way)), axis] > 0)


def collector_of(envs: marlvec.VectorEnv, policy: object, **options: object) -> marlvec.Collector:
    """All policies see their agent's number: (n, 18) and 3 more."""
    return marlvec.Collector(envs, policy, agent_connectors=[AgentIndicator()], seed=args.seed, **options)


def mean_return(policy: object) -> float:
    """Mean team return over whole episodes, in envs of their own."""
    with marlvec.make("simple_spread", args.num_envs, backend=args.backend) as envs:
        return (
            collector_of(envs, policy, batch_mode="complete", explore=False, window=args.games)
            .collect(episodes=args.games)["main"]["rewards"]
            .sum()
            / args.games
        )


# 1. Record.
if not (args.data / "manifest.jsonl").exists():
    with (
        marlvec.make("simple_spread", args.num_envs, backend=args.backend) as envs,
        marlvec.Recorder(args.data, notes={"policy": "seek", "seed": args.seed}) as recorder,
    ):
        for _ in collector_of(envs, seek, callbacks=[recorder]).batches(env_steps=5_000, total=args.total_timesteps):
            pass

# 2. Learn the recorded actions: a classifier over rows in random order.
net = nn.Sequential(nn.Linear(21, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
with marlvec.load_dataset(args.data) as data:
    print(data)
    hits = []
    for rows in data["main"].minibatches(1024, seed=args.seed, epochs=args.epochs, columns=["obs", "actions"]):
        columns = rows.to_torch()
        logits = net(columns["obs"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, columns["actions"]).backward()
        optimizer.step()
        hits.append((logits.argmax(1) == columns["actions"]).float().mean().item())
print(f"the net answers as the recording in {np.mean(hits[-20:]):.1%} of the last minibatches")

# 3. Judge.
random, recorded, cloned = map(mean_return, (marlvec.RandomPolicy(), seek, TorchPolicy(net)))
share = (cloned - random) / (recorded - random)
print(f"team return: random {random:.1f}, recorded {recorded:.1f}, cloned {cloned:.1f}: {share:.0%} of the way")
