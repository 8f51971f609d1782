"""Four robots learn to deliver shelves: MAPPO, one actor for all, a critic that sees what all of them see.

    python examples/mappo_rware.py --seed 0

Robots see their number, and the reward is the team's, 1 for each delivery, as in EPyMARL (Papoudakis et al. 2021; for
more of its tasks: benchmarks/paper_table.py). With --resume it goes on bit by bit. Needs torch, and the extras `native`
(else `rware`), `plot` and, for --track, `tensorboard`.
"""

import argparse
import time
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=2_000_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256, help="envs at once")
parser.add_argument("--num-steps", type=int, default=64, help="steps of each env a batch; an episode has 500")
parser.add_argument("--env", default="rware/rware-tiny-4ag-v2", help="size and robots")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--games", type=int, default=100, help="episodes in the end, by which it is judged")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/rware"), help="folder for all that is kept")
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
    from marlvec.connectors import AgentIndicator, GeneralAdvantageEstimation, Rows, Standardize
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[native,plot,tensorboard]'") from None

LEARNING_RATE, EPOCHS, MINIBATCH = 5e-4, 4, 2_048  # env steps a minibatch
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
NEEDED = "obs", "actions", "logp", "advantages", "value_targets"
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. The nets: what a robot does, from what it sees; what the moment is worth to the team, from what all of them see.
def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of 128."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def by_moment(rows: Rows | marlvec.SampleBatch) -> np.ndarray:
    """Numbers of rows, (M, A): the robots of a moment side by side, in their order."""
    return np.lexsort((rows.agent_index, rows.env_t, rows.eps_id)).reshape(-1, agents)


@torch.no_grad()
def values(rows: Rows) -> np.ndarray:
    """What the critic says of each row's moment."""
    found, order = np.empty(len(rows), np.float32), by_moment(rows)
    found[order] = critic(torch.from_numpy(rows.obs[order]).flatten(1))
    return found


# 2. What they learn from: each delivery is good for all. Metrics count the env's own rewards.
@marlvec.connectors.agent_connector
def team_reward(rows: Rows) -> Rows:
    """Each robot's reward becomes the sum over the robots of its episode."""
    _, episode = np.unique(rows.eps_id, return_inverse=True)
    return rows.replace(rewards=np.bincount(episode, rows.rewards)[episode])


@marlvec.connectors.learner_connector
def add_values(rows: Rows) -> Rows:
    """The critic judges a whole batch at once: no value is needed to act."""
    return rows.replace(values=values(rows))


def update(batch: marlvec.SampleBatch, done: int) -> None:
    """PPO's clipped policy gradient, over moments."""
    order, generator = by_moment(batch), torch.Generator().manual_seed(args.seed + done)
    columns = [torch.from_numpy(batch[name][order]) for name in NEEDED]
    for _ in range(EPOCHS):
        for i in torch.randperm(len(order), generator=generator).split(MINIBATCH):
            obs, actions, before, advantages, targets = (column[i] for column in columns)
            logp = torch.log_softmax(actor(obs), -1)
            ratio = (logp.gather(-1, actions[..., None])[..., 0] - before).exp()
            gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
            value_loss = (critic(obs.flatten(1)) - targets).square().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain + ENTROPY * (logp.exp() * logp).sum(-1).mean()).backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()
    policy.note_update()


# 3. All of it. Episodes by which it is judged are played in envs of their own.
table = marlvec.LiveTable(args.total_timesteps, title=args.env)
made = {"num_envs": args.num_envs, "backend": args.backend, "env_state": "deepcopy"}  # compiled or not, envs resume
with marlvec.make(args.env, **made) as envs, marlvec.make(args.env, **made) as others, table:
    agents = len(envs.agents)
    sees = envs.agent_observation_space(0).shape[0] + agents
    actor, critic = layers(sees, int(envs.agent_action_space(0).n)), layers(sees * agents, 1)
    policy = TorchPolicy(actor)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], LEARNING_RATE, eps=1e-5, fused=True)
    collector = marlvec.Collector(
        envs,
        {"main": policy, "random": marlvec.RandomPolicy()},
        policy_mapping="main",
        policies_to_train=["main"],
        agent_connectors={"main": [team_reward, AgentIndicator()]},
        learner_connectors={
            "main": [add_values, GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=values), Standardize()]
        },
        callbacks=[table, *logs],
        window=100,
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": {"critic": critic, "optimizer": optimizer}}
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
    played = [collector.evaluate(args.games, policy_mapping=who, explore=True) for who in ("random", "main")]
    random, trained = (found.returns.mean for found in played)
for log in logs:
    log.close()

# 4. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), label="while it learns")
axes.axhline(random, color="gray", linestyle="--", label="random")
axes.set(title=args.env, xlabel="env steps", ylabel="deliveries an episode (team)")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"deliveries an episode: {random:.2f} at random, {trained:.2f} trained")
print(f"wrote last.npz, return.png{', logs' * args.track} into {args.checkpoint}")
