"""Three agents with continuous actions: MADDPG (Lowe et al. 2017), an actor and a critic of its own for each agent.

An actor sees what its agent sees; a critic sees what all see and do, and is used only to learn. Learning is off policy,
from a replay memory. With --resume it goes on bit by bit. Needs torch, `plot`, for --track `tensorboard`.
"""

import argparse
from functools import partial
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies, weights and the memory's samples")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=64, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--memory", type=int, default=100_000, help="env steps in the replay memory")
parser.add_argument("--games", type=int, default=500, help="episodes in the end, by which it is judged")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/maddpg"), help="folder for all that is kept")
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
    from marlvec.connectors import ActionPipeline, GaussianNoise, Rows

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": [], "memory": {}}
    done, curve, memory = progress["done"], progress["curve"], progress["memory"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

LEARNING_RATE, GAMMA, MINIBATCH, UPDATES, TARGET_RATE = 1e-3, 0.9, 512, 2, 0.01
STEPS, SAVE_EVERY, EXPLORING = 2, 100, 100_000  # of each env a batch; batches; env steps
NEEDED = "obs", "next_obs", "actions_executed", "rewards", "terminated"
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. The nets of one agent.
class Agent(nn.Module):
    """An actor, obs (n, 18) to actions (n, 5) before their tanh; a critic of the obs and actions of all."""

    def __init__(self, obs: int, actions: int, agents: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
            for inputs, outputs in ((obs, actions), (agents * (obs + actions), 1))
        )

    def worth(self, obs: list[torch.Tensor], actions: list[torch.Tensor]) -> torch.Tensor:
        """What the agent expects, (n,), from the observations and actions of all agents."""
        return self.critic(torch.cat([*obs, *actions], 1))[:, 0]


@torch.no_grad()
def act(agent: str, rows: Rows) -> np.ndarray:
    """One agent's actions, to which GaussianNoise adds while it learns."""
    return nets[agent].actor(torch.from_numpy(rows.obs)).tanh().numpy()


# 2. What they learn from: the last env steps. All act in every step, so rows of equal number belong together.
def remember(agent: str, rows: marlvec.SampleBatch) -> None:
    """Write an agent's rows over its oldest ones."""
    place = np.arange(done - len(rows), done) % args.memory
    for name in NEEDED:
        key = f"{agent}/{name}"
        if key not in memory:
            memory[key] = np.zeros((args.memory, *rows[name].shape[1:]), rows[name].dtype)
        memory[key][place] = rows[name]


def update(index: np.ndarray) -> None:
    """One step of each agent's critic, towards the reward and what its target net expects; then of its actor."""
    part = {key: torch.from_numpy(column[index]) for key, column in memory.items()}
    obs, next_obs, actions = ([part[f"{agent}/{name}"] for agent in nets] for name in NEEDED[:3])
    with torch.no_grad():
        next_actions = [targets[agent].actor(seen).tanh() for agent, seen in zip(nets, next_obs, strict=True)]
    for k, (agent, net) in enumerate(nets.items()):
        with torch.no_grad():
            goes_on = (~part[f"{agent}/terminated"]).float()
            goal = part[f"{agent}/rewards"].float() + GAMMA * goes_on * targets[agent].worth(next_obs, next_actions)
        optimizers[f"{agent}/critic"].zero_grad()
        (net.worth(obs, actions) - goal).square().mean().backward()
        optimizers[f"{agent}/critic"].step()
        own = [*actions[:k], net.actor(obs[k]).tanh(), *actions[k + 1 :]]
        optimizers[f"{agent}/actor"].zero_grad()
        (-net.worth(obs, own).mean()).backward()
        optimizers[f"{agent}/actor"].step()
    with torch.no_grad():
        for old, new in zip(targets.parameters(), nets.parameters(), strict=True):
            old.lerp_(new, TARGET_RATE)


# 3. All of it. Episodes by which it is judged are played in envs of their own.
made = {"num_envs": args.num_envs, "backend": args.backend, "env_state": "deepcopy", "continuous_actions": True}
table = marlvec.LiveTable(args.total_timesteps, title="simple_spread")
with marlvec.make("simple_spread", **made) as envs, marlvec.make("simple_spread", **made) as others, table:
    nets, targets = (nn.ModuleDict({agent: Agent(18, 5, 3) for agent in envs.agents}) for _ in range(2))
    targets.load_state_dict(nets.state_dict())
    optimizers = {
        f"{agent}/{part}": torch.optim.Adam(getattr(net, part).parameters(), LEARNING_RATE)
        for agent, net in nets.items()
        for part in ("actor", "critic")
    }
    noise = {"std": 0.6, "final": 0.1, "decay_steps": EXPLORING // args.num_envs}
    collector = marlvec.Collector(
        envs,
        {agent: marlvec.FunctionPolicy(partial(act, agent)) for agent in nets} | {"random": marlvec.RandomPolicy()},
        policy_mapping={agent: agent for agent in nets},
        policies_to_train=list(nets),
        action_connectors={agent: [GaussianNoise(**noise), *ActionPipeline.default()] for agent in nets},
        callbacks=[table, *logs],
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": {"nets": nets, "targets": targets, **optimizers}}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    while done < args.total_timesteps:
        batch = collector.collect(env_steps=STEPS * args.num_envs)
        done += batch.env_steps
        for agent in nets:
            remember(agent, batch[agent])
        rng = np.random.default_rng([args.seed, done])
        for index in rng.integers(min(done, args.memory), size=(UPDATES, MINIBATCH)):
            update(index)
        if done >= args.total_timesteps or done // args.num_envs // STEPS % SAVE_EVERY == 0:
            curve.append([done, collector.evaluate(args.games // 5 + 1, seed=args.seed).returns.mean])
            marlvec.save_checkpoint(args.checkpoint, **learned, progress=progress | {"done": done})
    main = collector.evaluate(args.games, seed=args.seed)
    random = collector.evaluate(args.games, policy_mapping="random", seed=args.seed)
for log in logs:
    log.close()

# 4. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), "o-", markersize=3)
axes.set(title="MADDPG, simple_spread", xlabel="env steps", ylabel="team return (sum over agents)")
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"team return (sum over agents): {random.returns.mean:.1f} at random, {main.returns.mean:.1f} trained")
print(f"wrote last.npz, return.png{', logs' * args.track} into {args.checkpoint}")
