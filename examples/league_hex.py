"""A league learns Hex on worlds of JAX: a main player, and an exploiter who looks for its weaknesses.

    python examples/league_hex.py --track

Of main's games a third are against itself, a third against former selves and former exploiters, those that beat it
first, and a third against random moves. The exploiter meets main as it is now, or its past while that is too strong.
Both are nets of the same kind that learn by PPO, and every 50,000 env steps a copy of each joins the pool. With
--resume training goes on bit by bit. Needs torch, and the extras `pgx` and `plot`.
"""

import argparse
from functools import partial
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=300_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256, help="envs at once")
parser.add_argument("--num-steps", type=int, default=32, help="moves in each env a batch")
parser.add_argument("--snapshot-every", type=int, default=50_000, help="env steps")
parser.add_argument("--games", type=int, default=400, help="games of each match in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/hex"), help="folder for all that is kept")
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
    from marlvec import selfplay
    from marlvec.connectors import GeneralAdvantageEstimation, Standardize
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", policies=["main"])] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[pgx,plot,tensorboard]'") from None

LEARNERS = ("main", "exploiter")
LEARNING_RATE, EPOCHS, MINIBATCH = 1e-3, 3, 512
GAMMA, LAMBDA, CLIP, ENTROPY = 1.0, 0.95, 0.2, 0.01
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


class Net(nn.Module):
    """Convolutions over a board, turned so that who is to move connects left and right; the last move is to swap."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.actor = nn.Conv2d(32, 1, 3, padding=1)
        self.value = nn.Sequential(nn.Flatten(), nn.Linear(32 * 11 * 11, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        mine, theirs, second, may_swap = obs.float().unbind(3)  # (n, 11, 11) each
        turned = second[:, :1, :1] > 0  # the second player connects top and bottom
        planes = torch.stack([mine, theirs, may_swap], 1)
        seen = self.trunk(torch.where(turned[..., None], planes.mT, planes))
        places = self.actor(seen)[:, 0]
        value, swap = self.value(seen).unbind(1)
        places = torch.where(turned, places.mT, places).flatten(1)
        return {"inputs": torch.cat([places, swap[:, None]], 1), "values": value}


# What builds an opponent, by whose snapshot it is.
LEAGUE = {**dict.fromkeys(LEARNERS, lambda: TorchPolicy(Net())), "random": marlvec.RandomPolicy}


def update(policy: TorchPolicy, optimizer: torch.optim.Optimizer, batch: marlvec.SampleBatch, done: int) -> None:
    """PPO's clipped policy gradient."""
    for epoch in range(EPOCHS):
        for rows in batch.minibatches(MINIBATCH, seed=args.seed + done + epoch):
            part, (distribution, found) = rows.to_torch(), policy.forward(rows)  # obeys the column action_mask
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"]).mean()
            value_loss = (found["values"] - part["value_targets"]).square().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
    policy.note_update()


policies = {name: LEAGUE[name]() for name in LEARNERS}
optimizers = {name: torch.optim.Adam(policy.module.parameters(), LEARNING_RATE) for name, policy in policies.items()}
table = marlvec.LiveTable(args.total_timesteps, title="hex", policies=LEARNERS)
make = partial(marlvec.make, "pgx/hex")
with make(num_envs=args.num_envs) as envs, make(num_envs=64) as arena, table:
    board = selfplay.RatingTracker(envs.agents, table=selfplay.MatchTable(decay=0.99), note=["main"])
    kept = {"folder": args.checkpoint / "pool", "make": LEAGUE, "when": [selfplay.Every(args.snapshot_every)]}
    kept |= {"board": board, "capacity": 12, "leaves": selfplay.thinned}
    pool = selfplay.OpponentPool.load(**kept) if args.resume else selfplay.OpponentPool(**kept)
    if not args.resume:
        pool.add("random", marlvec.RandomPolicy(), anchor=True)  # never leaves
    former, random = (selfplay.Prioritised(board.table, of=list(of)) for of in (LEARNERS, ["random"]))
    third = 1 / 3
    matchmakers = {
        "main": selfplay.Mixture((third, selfplay.Mirror()), (third, former), (third, random)),
        "exploiter": selfplay.MainExploiter("main", board.table),
    }
    mapping = selfplay.SelfPlayMapping(pool, envs.agents, matchmakers)
    chains = {
        name: [GeneralAdvantageEstimation(GAMMA, LAMBDA, value_function=policy.values), Standardize()]
        for name, policy in policies.items()
    }
    options = {"learner_connectors": chains, "callbacks": [board, table, *logs], "seed": args.seed}
    collector = marlvec.Collector(envs, policies, mapping, **options)
    learned = {"collector": collector, "learner": optimizers}  # opponents and ratings are in it, too
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    mapping.update(collector)

    def match(games: int, seed: int, **how) -> selfplay.MatchResult:
        """Main at its best against random moves."""
        rivals = {"main": policies["main"], "random": pool["random"]}
        return selfplay.evaluate_match(rivals, arena, games=games, seed=seed, explore=False, **how)

    while done < args.total_timesteps:
        batch = collector.collect(env_steps=args.num_envs * args.num_steps)
        done += batch.env_steps
        for name in batch:
            update(policies[name], optimizers[name], batch[name], done)
        joined = [pool.offer(collector, name, step=done) for name in LEARNERS]
        if any(joined) or done >= args.total_timesteps:
            mapping.update(collector)
            curve.append([done, match(64, args.seed, progress=False).win_rate("main").mean])
        marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve})

    print("main against random:", match(args.games, args.seed + 1).win_rate("main"))
    met = board.table.win_count("exploiter", "main")
    print(f"the exploiter won {met.win_rate:.0%} of its latest games against main")
for log in logs:
    log.close()

axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve), "o-")
axes.set(title="hex: main against random moves", xlabel="env steps", ylabel="win rate of one agent", ylim=(0, 1.02))
axes.figure.savefig(args.checkpoint / "hex.png", dpi=80)
print(f"wrote last.npz, pool, hex.png{', logs' * args.track} into {args.checkpoint}")
