"""A network learns connect four by playing what it was: PPO, a pool of opponents, action masks.

    python examples/selfplay_connect_four.py --track
    tensorboard --logdir runs/connect_four
    marlvec play connect_four --policy examples/selfplay_connect_four.py:LEAGUE@runs/connect_four/pool

Of ten games the learner plays three against itself, three against former selves, those that beat it first, and four
against random moves, lest it forget what only fools do. Every 30 000 steps, and whenever it wins 85 % of its games
against others, it becomes one of its former selves. All that is kept is in --checkpoint: the last state and the best,
opponents, results, a plot, with --track TensorBoard logs. With --resume it goes on from there.
"""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled worlds if numba is there")
parser.add_argument("--batch", type=int, default=4_096, help="env steps between two updates")
parser.add_argument("--snapshot-every", type=int, default=30_000, help="env steps")
parser.add_argument("--evaluate-every", type=int, default=25_000, help="env steps")
parser.add_argument("--games", type=int, default=400, help="games of each match in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/connect_four"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args(None if __name__ == "__main__" else [])  # before torch is imported, which takes seconds
if __name__ == "__main__" and not args.resume and (args.checkpoint / "last.npz").exists():
    parser.error(f"there is a run in {args.checkpoint}: --resume goes on with it; or choose another --checkpoint")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from rich import print as show
    from torch import nn

    import marlvec
    from marlvec import selfplay
    from marlvec.connectors import FlattenObs, GeneralAdvantageEstimation, Rows, Standardize
    from marlvec.interop.torch import TorchPolicy

    if args.track:
        import tensorboard  # noqa: F401  (for marlvec.TensorBoardLogger)
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

# 1. The policy. What it plays against is built by the same function, and gets its weights from the pool.
LINES = [
    [7 * (row + i * down) + column + i * right for i in range(4)]
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
    for row in range(6 - 3 * down)
    for column in range(7)
    if 0 <= column + 3 * right < 7
]


class Net(nn.Module):
    """Looks at each of the 69 lines of four fields with the same eyes, then at all of them and the board together."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Flatten())
        self.trunk = nn.Sequential(nn.Linear(16 * len(LINES) + 84, 128), nn.ReLU())
        self.actor, self.critic = nn.Linear(128, 7), nn.Linear(128, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        lines = self.line(obs.reshape(-1, 42, 2)[:, LINES].flatten(2))  # (n, 84) is own stones, the other's, by field
        seen = self.trunk(torch.cat([lines, obs], dim=1))
        return {"inputs": self.actor(seen), "values": self.critic(seen)}


def make_policy() -> TorchPolicy:
    """A policy as it is before it has learned anything."""
    return TorchPolicy(Net())


LEAGUE = {"main": make_policy, "random": marlvec.RandomPolicy}  # what builds an opponent, by whose snapshot it is


# 2. PPO; the learning rate falls to a twentieth.
def update(policy: TorchPolicy, optimizer: torch.optim.Optimizer, batch: marlvec.SampleBatch, done: int) -> None:
    """Learn from a batch, after so many env steps."""
    optimizer.param_groups[0]["lr"] = 1e-3 * max(1 - done / args.total_timesteps, 0.05)
    for epoch in range(4):
        for part in batch.minibatches(512, seed=args.seed + done + epoch):
            names = ("logp", "advantages", "value_targets")
            logp, advantages, targets = (torch.as_tensor(np.asarray(part[name], np.float32)) for name in names)
            distribution, found = policy.forward(Rows(dict(part.items())))  # obeys the column action_mask
            ratio = (distribution.logp(torch.as_tensor(part["actions"])) - logp).exp()
            gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            value_loss = (found["values"] - targets).square().mean() / 2
            optimizer.zero_grad()
            (0.5 * value_loss - gain - 0.01 * distribution.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
    policy.note_update()


# 3. How good it is, in games that are not trained with.
def compare(collector: marlvec.Collector, pool: selfplay.OpponentPool, arena: marlvec.VectorEnv, **how) -> dict:
    """Win rates: at its best against random moves; both drawing, or all games were one, against its first snapshot."""
    first = next((one for one in pool.values() if one.of == "main"), None)
    found = {}
    for name, rival in (("random", pool["random"]), ("first snapshot", first)):
        if rival is not None:
            players = {"learner": collector.policies["main"], name: rival}
            options = {"agent_connectors": {"learner": collector.agent_connectors["main"]}, "progress": False}
            result = selfplay.evaluate_match(players, arena, explore=name != "random", **options, **how)
            found[name] = result.win_rate("learner")
    return found


# 4. Training.
def main() -> None:
    """Play and learn until --total-timesteps are done, then say what came of it."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.module.parameters(), eps=1e-5)
    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    table = marlvec.LiveTable(max(args.total_timesteps - done, 1), title="connect four", policies=["main"])
    options = {"policies": ["main"], "first_step": done}
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", **options)] if args.track else []
    with (
        marlvec.make("connect_four", num_envs=args.num_envs, backend=args.backend) as envs,
        marlvec.make("connect_four", num_envs=64, backend=args.backend) as arena,
        table,
    ):
        board = selfplay.RatingTracker(envs.agents, table=selfplay.MatchTable(decay=0.99), note=["main"])
        when = [selfplay.Every(args.snapshot_every), selfplay.OnWinRate(board.table, 0.85, games=500)]
        rules = {"capacity": 8, "leaves": selfplay.thinned, "when": when, "board": board}
        if args.resume:
            pool = selfplay.OpponentPool.load(args.checkpoint / "pool", LEAGUE, **rules)
        else:
            pool = selfplay.OpponentPool(LEAGUE, folder=args.checkpoint / "pool", **rules)
            pool.add("random", marlvec.RandomPolicy(), anchor=True)  # never leaves
        former, random = (selfplay.Prioritised(board.table, of=[name]) for name in LEAGUE)
        matchmaker = selfplay.Mixture((0.3, selfplay.Mirror()), (0.3, former), (0.4, random))
        mapping = selfplay.SelfPlayMapping(pool, envs.agents, {"main": matchmaker})
        gae = GeneralAdvantageEstimation(0.99, 0.95, value_function=policy.values)
        collector = marlvec.Collector(
            envs,
            {"main": policy},
            mapping,
            agent_connectors={"main": [FlattenObs()]},
            learner_connectors={"main": [gae, Standardize()]},
            callbacks=[board, table, *logs],
            seed=args.seed + done,
        )
        learned = {"collector": collector, "learner": {"optimizer": optimizer, "board": board}}
        if args.resume:
            marlvec.load_checkpoint(args.checkpoint, **learned)
        mapping.update(collector)
        while done < args.total_timesteps:
            batch = collector.collect(env_steps=min(args.batch, args.total_timesteps - done))
            done += batch.env_steps
            update(policy, optimizer, batch["main"], done)
            if pool.offer(collector, "main", step=done):
                mapping.update(collector)
            score = None
            if done >= args.total_timesteps or done - (curve[-1][0] if curve else 0) >= args.evaluate_every:
                rates = {
                    name: rate.mean for name, rate in compare(collector, pool, arena, games=64, seed=args.seed).items()
                }
                curve.append([done, rates])
                score = rates["random"]
            progress = {"done": done, "curve": curve}
            marlvec.save_checkpoint(args.checkpoint, **learned, progress=progress, score=score)
        rates = compare(collector, pool, arena, games=args.games, seed=args.seed + 1)
        players = {**{name: pool[name] for name in list(pool)[:: max(len(pool) // 6, 1)]}, "now": policy}
        own = {"now": collector.agent_connectors["main"]}
        games = len(players) * (len(players) - 1) * max(args.games // 20, 1)
        league = selfplay.evaluate_match(players, arena, games, agent_connectors=own)
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
    found = {"env_steps": done, "seed": args.seed, **{name: rate.mean for name, rate in rates.items()}}
    (args.checkpoint / "results.json").write_text(json.dumps(found))
    show(league)
    for name, rate in rates.items():
        print(f"against {name}: {rate}")
    print(
        f"wrote last.npz, best.npz, pool, connect_four.png, results.json{', logs' * args.track} into {args.checkpoint}"
    )


if __name__ == "__main__":
    main()
