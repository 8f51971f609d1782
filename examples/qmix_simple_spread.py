"""Three agents learn one value: QMIX (Rashid et al. 2018), or with --mixer vdn their values' sum, VDN (Sunehag et al.).

One net for all agents, which also sees the agent's number; double Q-learning from a replay memory, within action masks
if --env has them. With --resume it goes on bit by bit. Needs torch, `plot`, for --track `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies, weights and the memory's samples")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=32, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--env", default="simple_spread", help="an env with a state, whose agents act in every step")
parser.add_argument("--mixer", choices=["qmix", "vdn"], default="qmix", help="what makes agents' values the team's")
parser.add_argument("--memory", type=int, default=50_000, help="env steps in the replay memory")
parser.add_argument("--games", type=int, default=500, help="episodes in the end, by which it is judged")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/qmix"), help="folder for all that is kept")
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
    from marlvec.connectors import AgentIndicator, EpsilonGreedy, Rows

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": [], "memory": {}}
    done, curve, memory = progress["done"], progress["curve"], progress["memory"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

LEARNING_RATE, GAMMA, MINIBATCH, UPDATES, TARGET_RATE = 1e-3, 0.9, 256, 4, 0.01
STEPS, SAVE_EVERY, EXPLORING = 4, 100, 60_000  # of each env a batch; batches; env steps
NEEDED = "obs", "next_obs", "state", "next_state", "actions_executed", "rewards", "terminated"
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. What an agent's actions are worth, and what they make of the team's value.
class Team(nn.Module):
    """``values`` of an agent's actions, obs (…, d) to (…, k); and the mixer."""

    def __init__(self, obs: int, actions: int, agents: int, state: int) -> None:
        super().__init__()
        self.values, self.base = (
            nn.Sequential(nn.Linear(n, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))
            for n, outputs in ((obs, actions), (state, 1))
        )
        self.first, self.bias, self.second = (nn.Linear(state, outputs) for outputs in (agents * 32, 32, 32))

    def mix(self, chosen: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Values of A agents' chosen actions (n, A), and states, to the team's values (n,)."""
        if args.mixer == "vdn":
            return chosen.sum(1)
        weights = self.first(state).abs().view(*chosen.shape, 32)
        hidden = nn.functional.elu((chosen[:, None] @ weights)[:, 0] + self.bias(state))
        return (hidden * self.second(state).abs()).sum(1) + self.base(state)[:, 0]


def best(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Numbers of the best allowed actions."""
    return (values if mask is None else values.masked_fill(~mask, -torch.inf)).argmax(-1)


@torch.no_grad()
def act(rows: Rows) -> np.ndarray:
    """The agents' best actions, of which EpsilonGreedy replaces some while they learn."""
    mask = torch.from_numpy(rows.action_mask) if "action_mask" in rows else None
    return best(net.values(torch.from_numpy(rows.obs)), mask).numpy()


# 2. What they learn from: a memory of the last env steps, with all agents side by side.
def remember(rows: marlvec.SampleBatch) -> None:
    """Write a batch into the memory's columns (size, A, …), over the oldest env steps."""
    order = np.lexsort([rows.agent_index, rows.env_t, rows.eps_id]).reshape(-1, len(envs.agents))
    place = np.arange(done - len(order), done) % args.memory
    for name in [*NEEDED, *(["next_action_mask"] if "next_action_mask" in rows else [])]:
        if name not in memory:
            memory[name] = np.zeros((args.memory, *order.shape[1:], *rows[name].shape[1:]), rows[name].dtype)
        memory[name][place] = rows[name][order]


def update(part: dict[str, torch.Tensor]) -> None:
    """Double Q-learning of the team's value: the net chooses the next actions, the target net says their worth."""
    with torch.no_grad():
        then = best(net.values(part["next_obs"]), part.get("next_action_mask"))[..., None]
        worth = target.mix(target.values(part["next_obs"]).gather(-1, then)[..., 0], part["next_state"][:, 0])
        goal = part["rewards"].float().mean(1) + GAMMA * (~part["terminated"].all(1)).float() * worth
    chosen = net.values(part["obs"]).gather(-1, part["actions_executed"][..., None])[..., 0]
    optimizer.zero_grad()
    (net.mix(chosen, part["state"][:, 0]) - goal).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(target.parameters(), net.parameters(), strict=True):
            old.lerp_(new, TARGET_RATE)


# 3. All of it. Episodes by which it is judged are played in envs of their own.
made = {"num_envs": args.num_envs, "backend": args.backend, "state": True, "env_state": "deepcopy"}
table = marlvec.LiveTable(args.total_timesteps, title=args.env)
with marlvec.make(args.env, **made) as envs, marlvec.make(args.env, **made) as others, table:
    obs, agents = envs.agent_observation_space(0).shape[0], len(envs.agents)
    sizes = obs + agents, int(envs.agent_action_space(0).n), agents, envs.state_space.shape[0]
    net, target = Team(*sizes), Team(*sizes)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
    collector = marlvec.Collector(
        envs,
        {"main": marlvec.FunctionPolicy(act), "random": marlvec.RandomPolicy()},
        policy_mapping="main",
        policies_to_train=["main"],
        agent_connectors={"main": [AgentIndicator()]},
        action_connectors={"main": [EpsilonGreedy(1.0, final=0.05, decay_steps=EXPLORING // args.num_envs)]},
        callbacks=[table, *logs],
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": {"net": net, "target": target, "optimizer": optimizer}}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    while done < args.total_timesteps:
        batch = collector.collect(env_steps=STEPS * args.num_envs)
        done += batch.env_steps
        remember(batch["main"])
        rng = np.random.default_rng([args.seed, done])
        for index in rng.integers(min(done, args.memory), size=(UPDATES, MINIBATCH)):
            update({name: torch.from_numpy(column[index]) for name, column in memory.items()})
        if done >= args.total_timesteps or done // args.num_envs // STEPS % SAVE_EVERY == 0:
            curve.append([done, collector.evaluate(args.games // 5 + 1, seed=args.seed).returns.mean])
            marlvec.save_checkpoint(args.checkpoint, **learned, progress=progress | {"done": done})
    random, main = (collector.evaluate(args.games, policy_mapping=who, seed=args.seed) for who in ("random", "main"))
for log in logs:
    log.close()

# 4. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), "o-", markersize=3)
axes.set(title=f"{args.mixer}, {args.env}", xlabel="env steps", ylabel="team return (sum over agents)")
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"team return (sum over agents): {random.returns.mean:.1f} at random, {main.returns.mean:.1f} by {args.mixer}")
print(f"wrote last.npz, return.png{', logs' * args.track} into {args.checkpoint}")
