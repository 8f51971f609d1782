"""A network learns Kuhn poker by self-play until a perfect opponent wins next to nothing of it.

    python examples/selfplay_kuhn.py --track
    marlvec play kuhn_poker --policy examples/selfplay_kuhn.py:make_policy@runs/kuhn/pool

The learner plays both sides, half of its hands against itself and half against any of its former selves, and joins
them again and again. A bonus on entropy, large at first, keeps it from running after each opponent's last mistake. How
far it is from an equilibrium is computed exactly where OpenSpiel is installed (extra `openspiel`): what a perfect
opponent would win of it, 0.458 chips a hand of who plays at random. With --resume it goes on bit by bit. Needs torch,
and the extra `plot`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=300_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=1024, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--batch", type=int, default=8_192, help="env steps between two updates")
parser.add_argument("--snapshots", type=int, default=20, help="about how many former selves there are in the end")
parser.add_argument("--games", type=int, default=200, help="hands of each line-up in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/kuhn"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args(None if __name__ == "__main__" else [])  # before torch is imported, which takes seconds
if __name__ == "__main__" and args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from rich import print as show
    from torch import nn

    import marlvec
    from marlvec import selfplay
    from marlvec.connectors import GeneralAdvantageEstimation
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", policies=["main"])] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None


# 1. The policy. What it plays against is built by the same function, and gets its weights from the pool.
class Net(nn.Module):
    """From what a player knows, which side, which card, what was bet: what to do, and what it may hope for."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(11, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(11, 32), nn.Tanh(), nn.Linear(32, 1))
        nn.init.zeros_(self.actor[-1].weight)
        nn.init.zeros_(self.actor[-1].bias)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs), "values": self.critic(obs)}


def make_policy() -> TorchPolicy:
    """A policy as it is before it has learned anything: it passes and bets at random."""
    return TorchPolicy(Net())


# 2. PPO, with a bonus on entropy that falls to a tenth, as the learning rate does.
def update(policy: TorchPolicy, optimizer: torch.optim.Optimizer, batch: marlvec.SampleBatch, done: int) -> None:
    """Learn from a batch, after so many env steps."""
    left = 1 - done / args.total_timesteps
    optimizer.param_groups[0]["lr"] = 1e-2 * max(left, 0.1)
    for epoch in range(4):
        for rows in batch.minibatches(1024, seed=args.seed + done + epoch):
            part, (distribution, found) = rows.to_torch(), policy.forward(rows)
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(0.8, 1.2) * part["advantages"]).mean()
            value_loss = (found["values"] - part["value_targets"]).square().mean() / 2
            optimizer.zero_grad()
            (value_loss - gain - (0.05 + 0.45 * left) * distribution.entropy().mean()).backward()  # in chips
            optimizer.step()
    policy.note_update()


# 3. How far it is from an equilibrium: the learner as it is, and the newer half of its former selves on average.
def distance(policy: TorchPolicy, pool: selfplay.OpponentPool) -> tuple[float, float]:
    """Chips a hand that a perfect opponent wins of each; NaN where OpenSpiel is not installed."""
    try:
        return selfplay.exploitability(policy), selfplay.exploitability(list(pool.values())[len(pool) // 2 :])
    except marlvec.errors.MissingExtraError:
        return float("nan"), float("nan")


# 4. Training.
def main() -> None:
    """Play and learn until --total-timesteps are done, then say what came of it."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.module.parameters())
    done, curve = progress["done"], progress["curve"]
    table = marlvec.LiveTable(args.total_timesteps, title="Kuhn poker", policies=["main"])
    with marlvec.make("kuhn_poker", args.num_envs, backend=args.backend, env_state="deepcopy") as envs, table:
        board = selfplay.RatingTracker(envs.agents, note=["main"])
        when = [selfplay.Every(max(args.total_timesteps // args.snapshots, 1))]
        kept = {"folder": args.checkpoint / "pool", "make": make_policy, "when": when, "board": board}
        pool = selfplay.OpponentPool.load(**kept) if args.resume else selfplay.OpponentPool(**kept)
        half = selfplay.Mixture((0.5, selfplay.Mirror()), (0.5, selfplay.Uniform()))
        mapping = selfplay.SelfPlayMapping(pool, envs.agents, {"main": half})
        gae = GeneralAdvantageEstimation(1.0, 1.0, value_function=policy.values)
        options = {"learner_connectors": {"main": [gae]}, "callbacks": [board, table, *logs]}
        collector = marlvec.Collector(envs, {"main": policy}, mapping, seed=args.seed, **options)
        learned = {"collector": collector, "learner": {"optimizer": optimizer}}  # opponents and ratings are in it, too
        if args.resume:
            marlvec.load_checkpoint(args.checkpoint, **learned)
        mapping.update(collector)
        while done < args.total_timesteps:
            batch = collector.collect(env_steps=min(args.batch, args.total_timesteps - done))
            done += batch.env_steps
            if "main" in batch:  # a last one of a few steps may hold no whole decision of it
                update(policy, optimizer, batch["main"], done)
            if pool.offer(collector, "main", step=done):
                mapping.update(collector)
                curve.append([done, *distance(policy, pool)])
            marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve})
        players = {"random": marlvec.RandomPolicy(), **{name: pool[name] for name in list(pool)[:: len(pool) // 6 + 1]}}
        league = selfplay.evaluate_match(players, envs, len(players) * (len(players) - 1) * args.games, seed=args.seed)
    for log in logs:
        log.close()

    # 5. What came of it.
    axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
    steps, alone, average = zip(*curve, strict=True)
    axes.plot(steps, alone, "o-", label="the learner as it is")
    axes.plot(steps, average, "o-", label="the newer snapshots' average")
    axes.axhline(0.458333, color="grey", linestyle=":", label="at random")
    axes.set(title="Kuhn poker", xlabel="env steps", ylabel="exploitability, chips a hand (each agent)", ylim=(0, 0.5))
    axes.legend()
    axes.figure.savefig(args.checkpoint / "kuhn.png", dpi=80)
    show(league)
    if np.isnan(alone[-1]):
        print("exploitability is not known without OpenSpiel: pip install 'marlvec[openspiel]'")
    else:
        print(f"exploitability: the learner {alone[-1]:.3f}, the average {average[-1]:.3f}, at random 0.458")
    print(f"wrote last.npz, pool, kuhn.png{', logs' * args.track} into {args.checkpoint}")


if __name__ == "__main__":
    main()
