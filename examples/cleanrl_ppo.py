"""PPO in one file, the way CleanRL writes it: 64 envs of simple_spread are 192 rows, and all agents share the net.

With --resume it goes on bit by bit. Needs torch, `plot`, for --track `tensorboard`. 600000 steps take a minute.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and weights")
parser.add_argument("--total-timesteps", type=int, default=9_600, help="rows in all: decisions of single agents")
parser.add_argument("--num-envs", type=int, default=64, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/cleanrl_spread"), help="folder for all that is kept")
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
    from torch.distributions import Categorical

    import marlvec
    from marlvec.interop.cleanrl import CleanRLVectorEnv

    if args.track:
        from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

NUM_STEPS, EPOCHS, MINIBATCHES, LEARNING_RATE, GAMMA, LAMBDA, CLIP, ENTROPY = 50, 8, 4, 1e-3, 0.95, 0.95, 0.2, 0.003
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # the net is so small that threads would only wait for each other

made = marlvec.make("simple_spread", args.num_envs, backend=args.backend, env_state="deepcopy")  # get_state() for all
envs = CleanRLVectorEnv(made)
num_rows = envs.num_envs  # what CleanRL calls num_envs: one for each agent of each env


def tower(outputs: int, inputs: int = envs.single_observation_space.shape[0]) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, outputs))


actor, critic = tower(int(envs.single_action_space.n)), tower(1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE, eps=1e-5)


def value_of(obs: np.ndarray) -> torch.Tensor:
    """What the critic says of these rows."""
    return critic(torch.as_tensor(obs)).squeeze(-1).detach()


obs = torch.zeros(NUM_STEPS, num_rows, *envs.single_observation_space.shape)  # storage, (time, rows, …)
actions = torch.zeros(NUM_STEPS, num_rows, dtype=torch.int64)
logprobs, rewards, dones, values = (torch.zeros(NUM_STEPS, num_rows) for _ in range(4))


def roll(next_obs: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Fill the storage; returns what is seen after it, and the returns of the episodes that ended."""
    returns: list[float] = []
    for t in range(NUM_STEPS):
        obs[t] = torch.as_tensor(next_obs)
        with torch.no_grad():
            choice = Categorical(logits=actor(obs[t]))
            actions[t] = choice.sample()
            logprobs[t], values[t] = choice.log_prob(actions[t]), critic(obs[t]).squeeze(-1)
        next_obs, reward, terminated, truncated, infos = envs.step(actions[t].numpy())
        rewards[t], dones[t] = torch.as_tensor(reward), torch.as_tensor(terminated | truncated)
        if truncated.any():  # time was up: what was to come is worth what the critic says of the true last observation
            rewards[t][torch.as_tensor(truncated)] += GAMMA * value_of(np.stack(infos["final_observation"][truncated]))
        returns += [info["episode"]["r"] for info in infos.get("final_info", ()) if info]
    return next_obs, returns


def advantages_of(next_obs: np.ndarray) -> torch.Tensor:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16)."""
    out, carried, next_values = torch.zeros_like(rewards), 0.0, value_of(next_obs)
    for t in reversed(range(NUM_STEPS)):
        goes_on = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * next_values * goes_on - values[t]
        out[t] = carried = delta + GAMMA * LAMBDA * goes_on * carried
        next_values = values[t]
    return out


def update(advantages: torch.Tensor) -> None:
    """PPO's clipped loss."""
    targets = (advantages + values).flatten()
    flat = obs.flatten(0, 1), actions.flatten(), logprobs.flatten(), advantages.flatten(), targets
    for _ in range(EPOCHS):
        for some in torch.randperm(len(targets)).chunk(MINIBATCHES):
            b_obs, b_actions, b_logprobs, b_advantages, b_targets = (column[some] for column in flat)
            choice = Categorical(logits=actor(b_obs))
            ratio = (choice.log_prob(b_actions) - b_logprobs).exp()
            b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
            gain = torch.min(ratio * b_advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * b_advantages).mean()
            value_loss = (critic(b_obs).squeeze(-1) - b_targets).square().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def play(*, at_random: bool) -> float:
    """Mean return per agent over the first episode of every env."""
    seen, _ = envs.reset(seed=1)
    returns: list[float] = []
    while not returns:
        logits = actor(torch.as_tensor(seen)).detach() * (not at_random)
        seen, _, _, _, infos = envs.step(Categorical(logits=logits).sample().numpy())
        returns = [info["episode"]["r"] for info in infos.get("final_info", ()) if info]
    return float(np.mean(returns))


random_return = play(at_random=True)
learner = {"actor": actor, "critic": critic, "optimizer": optimizer}
progress = marlvec.load_checkpoint(args.checkpoint, learner=learner) if args.resume else {"curve": [], "done": 0}
curve, done = progress["curve"], progress["done"]
writer = SummaryWriter(args.checkpoint / "logs") if args.track else None
seen, _ = envs.reset(seed=args.seed)
if args.resume:  # a roll is of whole episodes, so the view has nothing to remember
    seen = made.set_state(progress["envs"])[0].reshape(seen.shape)
    torch.set_rng_state(progress["torch"])
while done < args.total_timesteps:
    seen, returns = roll(seen)
    update(advantages_of(seen))
    done += NUM_STEPS * num_rows
    curve.append((done, float(np.mean(returns))))
    progress = {"curve": curve, "done": done, "envs": made.get_state(), "torch": torch.get_rng_state()}
    marlvec.save_checkpoint(args.checkpoint, learner=learner, progress=progress, score=curve[-1][1])
    if writer:
        writer.add_scalar("return per agent", curve[-1][1], done)
learned_return = play(at_random=False)
envs.close()
if writer:
    writer.close()
axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.axhline(random_return, color="gray", linestyle=":", label="random")
axes.plot(*zip(*curve, strict=True), label="PPO, one net for three agents")
axes.set(xlabel="rows", ylabel="return per agent", title="simple_spread, PPO as CleanRL writes it")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=100)
print(f"mean return per agent: random {random_return:.1f}, after {done} rows {learned_return:.1f}")
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
