"""Two players learn level-based foraging: IPPO, one net for both, on compiled envs that are lbforaging's bit for bit.

    python examples/ippo_foraging.py --seed 0

Each player acts on what it sees, and its critic sees no more; the reward is the team's, as in EPyMARL (Papoudakis et
al. 2021). An episode in which all foods are loaded has a team return of 1. With --resume it goes on bit by bit. Needs
torch, and the extras `native` (else `lbf`), `plot` and, for --track, `tensorboard`.
"""

import argparse
import time
from functools import partial
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=2_000_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256, help="envs at once")
parser.add_argument("--num-steps", type=int, default=50, help="steps of each env a batch; an episode has up to 50")
parser.add_argument("--env", default="lbf/Foraging-8x8-2p-3f-v3", help="size, players and foods")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--games", type=int, default=1_000, help="episodes in the end, by which it is judged")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/foraging"), help="folder for all that is kept")
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
    from marlvec.connectors import GeneralAdvantageEstimation, NormalizeObs, Rows, Standardize, agent_connector
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[native,plot,tensorboard]'") from None

LEARNING_RATE, EPOCHS, MINIBATCH = 1e-3, 4, 4_096
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. The net: what to do, and what the moment is worth.
class Net(nn.Module):
    """An actor and a critic, both over what one player sees."""

    def __init__(self, sees: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(sees, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))
            for outputs in (6, 1)
        )

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs), "values": self.critic(obs)}


# 2. What they learn from: what either of them loads is good for both. Metrics count the env's own rewards.
@agent_connector
def team_reward(rows: Rows) -> Rows:
    """Each player's reward becomes the sum over the players of its episode."""
    _, episode = np.unique(rows.eps_id, return_inverse=True)
    return rows.replace(rewards=np.bincount(episode, rows.rewards)[episode])


def update(batch: marlvec.SampleBatch, done: int) -> None:
    """PPO's clipped policy gradient; the learning rate falls with the env steps that are done."""
    optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + done / 1_000_000)
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


# 3. All of it. Episodes by which it is judged are played in envs of their own.
table = marlvec.LiveTable(args.total_timesteps, title=args.env)
made = {"num_envs": args.num_envs, "backend": args.backend, "env_state": "deepcopy"}  # compiled or not, envs resume
with marlvec.make(args.env, **made) as envs, marlvec.make(args.env, **made) as others, table:
    policy = TorchPolicy(Net(envs.agent_observation_space(0).shape[0]))
    optimizer = torch.optim.Adam(policy.module.parameters(), eps=1e-5)
    collector = marlvec.Collector(
        envs,
        {"main": policy, "random": marlvec.RandomPolicy()},
        policy_mapping="main",
        policies_to_train=["main"],
        agent_connectors={"main": [team_reward, NormalizeObs()]},
        learner_connectors={
            "main": [GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=policy.values), Standardize()]
        },
        callbacks=[table, *logs],
        window=1_000,
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": {"optimizer": optimizer}}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    began, before = time.perf_counter(), done
    while done < args.total_timesteps:
        batch = collector.collect(env_steps=args.num_envs * args.num_steps)
        done += batch.env_steps
        update(batch["main"], done)
        curve.append([done, collector.metrics.returns.mean])
        marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve})
    print(f"{done - before:,} env steps in {time.perf_counter() - began:.0f} s")
    judge = partial(collector.evaluate, args.games, seed=args.seed)  # EPyMARL's tests sample actions, too
    random, trained = (judge(policy_mapping=who, explore=True).returns.mean for who in ("random", "main"))
    best = judge(policy_mapping="main").returns.mean
for log in logs:
    log.close()

# 4. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), label="while it learns")
axes.axhline(random, color="gray", linestyle="--", label="random")
axes.set(title=args.env, xlabel="env steps", ylabel="team return (share of foods' levels)", ylim=(0, 1.05))
axes.legend(loc="lower right")
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"team return (all foods: 1): {random:.2f} at random, {trained:.3f} trained; likeliest actions only: {best:.2f}")
print(f"wrote last.npz, return.png{', logs' * args.track} into {args.checkpoint}")
