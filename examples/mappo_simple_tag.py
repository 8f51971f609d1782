"""Three hunters and their prey learn against each other: MAPPO, two policies, critics that see the state of the env.

With --resume it goes on bit by bit. Needs torch, `plot`, for --track `tensorboard`, for --video `video`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=128, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--games", type=int, default=500, help="episodes of each pair in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/simple_tag"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
parser.add_argument("--video", action="store_true", help="film four episodes of what was learned, too, as GIFs")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    import marlvec
    from marlvec.connectors import GeneralAdvantageEstimation, NormalizeObs, Rows, Standardize, StateInObs
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

LEARNING_RATE, EPOCHS, MINIBATCH, EVALUATE_EVERY = 3e-3, 4, 2_400, 5
GAMMA, LAMBDA, CLIP, ENTROPY, NEARNESS = 0.9, 0.95, 0.2, 0.003, 0.3
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. Each team has a policy for all its agents: an actor that sees what one agent sees, a critic that sees the state.
class Net(nn.Module):
    """What to do, and what the moment is worth to the team."""

    def __init__(self, sees: int, state: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(n, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))
            for n, outputs in ((sees, 5), (state, 1))
        )

    def forward(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(seen["obs"]), "values": self.critic(seen["state"])}


def update(team: str, batch: marlvec.SampleBatch, done: int) -> None:
    """PPO's clipped policy gradient; the learning rate falls with the env steps that are done."""
    policy, optimizer = policies[team], optimizers[team]
    optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + done / 150_000)
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


# 2. What they learn from: the rewards of touches, and at each step a little for how near the nearest of the others is.
def shaped(begin: int, sign: int) -> marlvec.connectors.AgentConnector:
    """Where the others are is in an observation's numbers from ``begin`` to 14. Metrics count the env's own rewards."""

    @marlvec.connectors.agent_connector
    def reward(rows: Rows) -> Rows:
        near = np.linalg.norm(rows.obs[:, begin:14].reshape(len(rows), -1, 2), axis=2).min(axis=1)
        return rows.replace(rewards=np.where(rows.first, 0.0, rows.rewards / 10 + sign * NEARNESS * near))

    return reward


def touches(hunters: str, prey: str, games: int) -> np.ndarray:
    """How often hunters touch the prey, which is what the game is about, (games,); a touch is a reward of 10."""
    who = dict(zip(envs.agents, [*3 * [hunters], prey], strict=True))
    found = collector.evaluate(games, policy_mapping=who, seed=args.seed)
    return np.array([record.returns_A[0] / 10 for record in found.episodes])


# 3. All of it. Episodes by which they are judged are played in envs of their own.
PAIRS = ("hunters", "random_prey"), ("random_hunters", "prey"), ("hunters", "prey"), ("random_hunters", "random_prey")
made = {"num_envs": args.num_envs, "backend": args.backend, "state": True, "env_state": "deepcopy"}
table = marlvec.LiveTable(args.total_timesteps, title="simple_tag")
with marlvec.make("simple_tag", **made) as envs, marlvec.make("simple_tag", **made) as others, table:
    policies = {"hunters": TorchPolicy(Net(16, 62)), "prey": TorchPolicy(Net(14, 62))}  # 62 = 3 * 16 + 14
    optimizers = {name: torch.optim.Adam(policy.module.parameters(), eps=1e-5) for name, policy in policies.items()}
    collector = marlvec.Collector(
        envs,
        policies | {"random_hunters": marlvec.RandomPolicy(), "random_prey": marlvec.RandomPolicy()},
        policy_mapping=dict(zip(envs.agents, [*3 * ["hunters"], "prey"], strict=True)),
        policies_to_train=list(policies),
        agent_connectors={
            team: [shaped(*nearest), StateInObs(envs.state_space), NormalizeObs()]
            for team, nearest in {"hunters": (12, -1), "prey": (8, 1)}.items()
        },
        learner_connectors={
            team: [GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=policy.values), Standardize()]
            for team, policy in policies.items()
        },
        batch_mode="complete",
        callbacks=[table, *logs],
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": optimizers}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    while done < args.total_timesteps:
        if len(curve) * EVALUATE_EVERY * args.num_envs * 25 <= done:
            curve.append([done, *(float(touches(*pair, 100).mean()) for pair in PAIRS[:3])])
        batch = collector.collect(episodes=args.num_envs)
        done += batch.env_steps
        for team in policies:
            update(team, batch[team], done)
        marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve})
    results = {pair: touches(*pair, args.games) for pair in PAIRS}
    if args.video:
        film = marlvec.RecordVideo(args.checkpoint, episodes=[0], format="gif")
        with marlvec.make("simple_tag", 4, render_mode="rgb_array", state=True, wrappers=[film]) as filmed:
            collector.evaluate(4, filmed, seed=args.seed)
for log in logs:
    log.close()

# 4. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
steps, *lines = np.transpose(curve)
for line, (hunters, prey) in zip(lines, PAIRS[:3], strict=True):
    axes.plot(steps, line, "o-", markersize=3, label=f"{hunters}, {prey}".replace("_", " "))
axes.set(title="simple_tag", xlabel="env steps", ylabel="touches an episode (team of hunters)")
axes.legend()
axes.figure.savefig(args.checkpoint / "touches.png", dpi=80)
for (hunters, prey), found in results.items():
    print(f"{hunters:>14} and {prey:>11}: {found.mean():.2f} touches, prey caught in {(found > 0).mean():.0%}")
print(f"wrote last.npz, touches.png{', logs' * args.track}{', four GIFs' * args.video} into {args.checkpoint}")
