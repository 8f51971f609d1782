"""Three marines learn to fight three: MAPPO on JaxMARL's SMAX, an actor for all of them, a critic that sees the state.

The worlds are JAX's, stepped all at once in one compiled call; the learner is torch's. With --resume it goes on bit by
bit. Needs torch, and the extras `jaxmarl`, `plot` and, for --track, `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=500_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256, help="envs at once")
parser.add_argument("--num-steps", type=int, default=32, help="steps of each env a batch")
parser.add_argument("--scenario", default="3m", help="of SMAX: 3m, 2s3z, 5m_vs_6m, …")
parser.add_argument("--games", type=int, default=200, help="battles in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/smax"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    import marlvec
    from marlvec.connectors import GeneralAdvantageEstimation, NormalizeObs, Standardize, StateInObs
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[jaxmarl,plot,tensorboard]'") from None

LEARNING_RATE, EPOCHS, MINIBATCH = 1e-3, 4, 4_096
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


class Net(nn.Module):
    """Which of its moves, from what one marine sees; and what the moment is worth, from the state of the battle."""

    def __init__(self, sees: int, state: int, moves: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(n, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, outputs))
            for n, outputs in ((sees, moves), (state, 1))
        )

    def forward(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(seen["obs"]), "values": self.critic(seen["state"])}


def update(policy: TorchPolicy, optimizer: torch.optim.Optimizer, batch: marlvec.SampleBatch, done: int) -> None:
    """PPO's clipped policy gradient."""
    for epoch in range(EPOCHS):
        for rows in batch.minibatches(MINIBATCH, seed=args.seed + done + epoch):
            part, (distribution, found) = rows.to_torch(), policy.forward(rows)
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"]).mean()
            value_loss = (found["values"] - part["value_targets"]).square().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
    policy.note_update()


made = {"scenario": args.scenario, "state": True}
table = marlvec.LiveTable(args.total_timesteps, title=f"SMAX {args.scenario}")
env_id = "jaxmarl/HeuristicEnemySMAX"
with marlvec.make(env_id, args.num_envs, **made) as envs, marlvec.make(env_id, args.num_envs, **made) as arena, table:
    sees, moves = envs.agent_observation_space(0).shape[0], envs.agent_action_space(0).n
    policy = TorchPolicy(Net(sees, envs.state_space.shape[0], int(moves)))
    optimizer = torch.optim.Adam(policy.module.parameters(), LEARNING_RATE, eps=1e-5)
    collector = marlvec.Collector(
        envs,
        {"marines": policy, "random": marlvec.RandomPolicy()},
        policy_mapping=dict.fromkeys(envs.agents, "marines"),
        policies_to_train=["marines"],
        agent_connectors={"marines": [StateInObs(envs.state_space), NormalizeObs()]},
        learner_connectors={
            "marines": [GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=policy.values), Standardize()]
        },
        callbacks=[table, *logs],
        seed=args.seed,
        evaluation_envs=arena,
    )
    learned = {"collector": collector, "learner": {"marines": optimizer}}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    while done < args.total_timesteps:
        batch = collector.collect(env_steps=args.num_envs * args.num_steps)
        done += batch.env_steps
        update(policy, optimizer, batch["marines"], done)
        curve.append([done, collector.metrics.policy("marines")["return"].mean])
        marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve})

    for who in ("random", "marines"):  # a win is worth 1 on top of the damage, which is 1 at most
        found = collector.evaluate(args.games, policy_mapping=dict.fromkeys(envs.agents, who), seed=args.seed)
        returns = np.array([record.returns_A.max() for record in found.episodes])
        print(f"{who:>8}: return {returns.mean():.2f}, battles won {(returns > 1.5).mean():.0%}")

axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve))
axes.set(title=f"SMAX {args.scenario}, while it learns", xlabel="env steps", ylabel="return per agent")
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"wrote last.npz, return.png{', logs' * args.track} into {args.checkpoint}")
