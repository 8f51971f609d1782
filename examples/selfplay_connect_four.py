"""A network learns connect four by playing what it was: PPO, a pool of opponents, action masks.

    python examples/selfplay_connect_four.py --track
    marlvec play connect_four --browser --policy examples/selfplay_connect_four.py:LEAGUE@runs/connect_four/pool

Of ten games the learner plays three against itself, three against former selves, those that beat it first, and four
against random moves, lest it forget what only fools do. Every 30 000 steps, and whenever it wins 85 % of its games
against others, it becomes one of its former selves. With --resume it goes on bit by bit. Needs torch, and `plot`.
"""

import argparse
from functools import partial
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--snapshot-every", type=int, default=30_000, help="env steps")
parser.add_argument("--games", type=int, default=400, help="games of each match in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/connect_four"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args(None if __name__ == "__main__" else [])  # before torch is imported, which takes seconds
if __name__ == "__main__" and args.resume != (args.checkpoint / "last.npz").exists():
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
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", policies=["main"])] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None


# 1. The policy. What it plays against is built by the same function, and gets its weights from the pool.
class Net(nn.Module):
    """Looks at each square of four times four fields with the same eyes, then at all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = nn.Sequential(nn.Conv2d(2, 64, 4), nn.ReLU(), nn.Flatten())
        self.trunk = nn.Sequential(nn.Linear(64 * 3 * 4 + 84, 128), nn.ReLU())
        self.actor, self.critic = nn.Linear(128, 7), nn.Linear(128, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        board = obs.float().movedim(3, 1)  # own stones, the other's: (n, 2, 6, 7)
        seen = self.trunk(torch.cat([self.squares(board), board.flatten(1)], dim=1))
        return {"inputs": self.actor(seen), "values": self.critic(seen)}


# What builds an opponent, by whose snapshot it is.
LEAGUE = {"main": lambda: TorchPolicy(Net()), "random": marlvec.RandomPolicy}


# 2. PPO; the learning rate falls to a twentieth.
def update(policy: TorchPolicy, optimizer: torch.optim.Optimizer, batch: marlvec.SampleBatch, done: int) -> None:
    """Learn from a batch, after so many env steps."""
    optimizer.param_groups[0]["lr"] = 1e-3 * max(1 - done / args.total_timesteps, 0.05)
    for epoch in range(4):
        for rows in batch.minibatches(512, seed=args.seed + done + epoch):
            part, (distribution, found) = rows.to_torch(), policy.forward(rows)  # obeys the column action_mask
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(0.8, 1.2) * part["advantages"]).mean()
            value_loss = (found["values"] - part["value_targets"]).square().mean() / 2
            optimizer.zero_grad()
            (0.5 * value_loss - gain - 0.01 * distribution.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
    policy.note_update()


# 3. How good it is, in games that are not trained with.
def compare(policy: TorchPolicy, pool: selfplay.OpponentPool, arena: marlvec.VectorEnv, **how) -> dict:
    """Win rates: at its best against random moves; both drawing, or all games were one, against its first snapshot."""
    found, first = {}, [one for one in pool.values() if one.of == "main"][:1]
    for name, rival in zip(("random", "first snapshot"), [pool["random"], *first], strict=False):
        result = selfplay.evaluate_match({"learner": policy, name: rival}, arena, explore=name != "random", **how)
        found[name] = result.win_rate("learner")
    return found


# 4. Training.
def main() -> None:
    """Play and learn until --total-timesteps are done, then say what came of it."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = LEAGUE["main"]()
    optimizer = torch.optim.Adam(policy.module.parameters(), eps=1e-5)
    done, curve = progress["done"], progress["curve"]
    table = marlvec.LiveTable(args.total_timesteps, title="connect four", policies=["main"])
    make = partial(marlvec.make, "connect_four", backend=args.backend)
    with make(num_envs=args.num_envs, env_state="deepcopy") as envs, make(num_envs=64) as arena, table:
        board = selfplay.RatingTracker(envs.agents, table=selfplay.MatchTable(decay=0.99), note=["main"])
        when = [selfplay.Every(args.snapshot_every), selfplay.OnWinRate(board.table, 0.85, games=500)]
        kept = {"folder": args.checkpoint / "pool", "make": LEAGUE, "when": when, "board": board}
        kept |= {"capacity": 8, "leaves": selfplay.thinned}
        pool = selfplay.OpponentPool.load(**kept) if args.resume else selfplay.OpponentPool(**kept)
        if not args.resume:
            pool.add("random", marlvec.RandomPolicy(), anchor=True)  # never leaves
        former, random = (selfplay.Prioritised(board.table, of=[name]) for name in LEAGUE)
        matchmaker = selfplay.Mixture((0.3, selfplay.Mirror()), (0.3, former), (0.4, random))
        mapping = selfplay.SelfPlayMapping(pool, envs.agents, {"main": matchmaker})
        gae = GeneralAdvantageEstimation(0.99, 0.95, value_function=policy.values)
        options = {"learner_connectors": {"main": [gae, Standardize()]}, "callbacks": [board, table, *logs]}
        collector = marlvec.Collector(envs, {"main": policy}, mapping, seed=args.seed, **options)
        learned = {"collector": collector, "learner": {"optimizer": optimizer}}  # opponents and ratings are in it, too
        if args.resume:
            marlvec.load_checkpoint(args.checkpoint, **learned)
        mapping.update(collector)
        while done < args.total_timesteps:
            batch = collector.collect(env_steps=min(4_096, args.total_timesteps - done))
            done, score = done + batch.env_steps, None
            if "main" in batch:  # a last one of a few steps may hold no whole decision of it
                update(policy, optimizer, batch["main"], done)
            if pool.offer(collector, "main", step=done) or done >= args.total_timesteps:
                mapping.update(collector)
                rates = compare(policy, pool, arena, games=64, seed=args.seed, progress=False)
                curve.append([done, {name: rate.mean for name, rate in rates.items()}])
                score = rates["random"].mean
            marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve}, score=score)
        rates = compare(policy, pool, arena, games=args.games, seed=args.seed + 1)
    for log in logs:
        log.close()

    # 5. What came of it.
    axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
    for name in ("random", "first snapshot"):
        seen = np.array([(step, found[name]) for step, found in curve if name in found]).reshape(-1, 2)
        axes.plot(*seen.T, "o-", label=f"against {name}")
    axes.set(title="connect four", xlabel="env steps", ylabel="win rate of the learner (one agent)", ylim=(0.4, 1.02))
    axes.legend()
    axes.figure.savefig(args.checkpoint / "connect_four.png", dpi=80)
    print(*(f"against {name}: {rate}" for name, rate in rates.items()), sep="\n")
    print(f"wrote last.npz, best.npz, pool, connect_four.png{', logs' * args.track} into {args.checkpoint}")


if __name__ == "__main__":
    main()
