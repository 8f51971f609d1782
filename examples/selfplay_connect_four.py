"""A network learns connect four by playing what it was: PPO, a pool of opponents, action masks.

    python examples/selfplay_connect_four.py
    tensorboard --logdir runs/connect_four
    marlvec play connect_four --policy examples/selfplay_connect_four.py:LEAGUE@runs/connect_four/pool

Of ten games the learner plays three against itself, three against former selves, those that beat it first, and four
against random moves, lest it forget what only fools do. Every 30 000 steps, and whenever it wins 85 % of its
games against others, it becomes one of its former selves. All that is kept is in --folder: opponents, results, weights,
TensorBoard logs, plots. With --resume it goes on from there.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from rich import print as show
from torch import nn

import marlvec
from marlvec.connectors import FlattenObs, GeneralAdvantageEstimation, Rows, Standardize
from marlvec.interop.torch import TorchPolicy
from marlvec.selfplay import (
    BradleyTerry,
    Every,
    MatchResult,
    MatchTable,
    Mirror,
    Mixture,
    OnWinRate,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
    evaluate_match,
    thinned,
)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=256)
parser.add_argument("--backend", default="auto", help="auto: compiled worlds if numba is there, else processes")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch", type=int, default=4_096, help="env steps between two updates")
parser.add_argument("--snapshot-every", type=int, default=30_000, help="env steps")
parser.add_argument("--evaluate-every", type=int, default=25_000, help="env steps")
parser.add_argument("--games", type=int, default=400, help="games of each match in the end")
parser.add_argument("--folder", type=Path, default=Path("runs/connect_four"), help="where everything is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")


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


# 2. PPO.
class PPO:
    """Clipped policy gradient; the learning rate falls to a twentieth."""

    def __init__(self, policy: TorchPolicy, lr: float = 1e-3, epochs: int = 4, size: int = 512) -> None:
        self.policy, self.lr, self.epochs, self.size = policy, lr, epochs, size
        self.optimizer = torch.optim.Adam(policy.module.parameters(), lr=lr, eps=1e-5)

    def update(self, batch: marlvec.SampleBatch, left: float, seed: int) -> dict[str, float]:
        """Learn from a batch; ``left`` is the part of the training that is still to come."""
        self.optimizer.param_groups[0]["lr"] = self.lr * max(left, 0.05)
        losses = []
        for epoch in range(self.epochs):
            for part in batch.minibatches(self.size, seed=seed + epoch):
                columns = dict(part.items())
                logp, advantage, target = (
                    torch.as_tensor(np.asarray(columns[name], np.float32))
                    for name in ("logp", "advantages", "value_targets")
                )
                distribution, found = self.policy.forward(Rows(columns))  # obeys the column action_mask
                ratio = (distribution.logp(torch.as_tensor(columns["actions"])) - logp).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                value_loss = (found["values"] - target).square().mean() / 2
                entropy = distribution.entropy().mean()
                self.optimizer.zero_grad()
                (0.5 * value_loss - gain - 0.01 * entropy).backward()
                nn.utils.clip_grad_norm_(self.policy.module.parameters(), 0.5)
                self.optimizer.step()
                losses.append([gain.item(), value_loss.item(), entropy.item()])
        self.policy.note_update()
        return dict(zip(("gain", "value_loss", "entropy"), np.mean(losses, axis=0).tolist(), strict=True))


# 3. What --resume needs, as arrays and JSON; nothing in it is ever executed.
def save(path: Path, ppo: PPO, progress: list) -> None:
    """Write weights, the optimizer's state and how far it is, whole or not at all."""
    arrays = {f"net/{name}": weight.numpy() for name, weight in ppo.policy.module.state_dict().items()}
    for i, moments in ppo.optimizer.state_dict()["state"].items():
        arrays |= {f"adam/{i}/{name}": moment.numpy() for name, moment in moments.items()}
    with path.with_suffix(".tmp").open("wb") as file:
        np.savez(file, progress=json.dumps(progress), **arrays)
    path.with_suffix(".tmp").replace(path)


def load(path: Path, ppo: PPO) -> list:
    """Take over what `save` wrote; returns how far it was."""
    with np.load(path, allow_pickle=False) as file:
        weights = {name: torch.from_numpy(file[f"net/{name}"]) for name in ppo.policy.module.state_dict()}
        state = ppo.optimizer.state_dict()
        for key in (key for key in file.files if key.startswith("adam/")):
            _, i, name = key.split("/")
            state["state"].setdefault(int(i), {})[name] = torch.from_numpy(file[key])
        ppo.policy.module.load_state_dict(weights)
        ppo.optimizer.load_state_dict(state)
        return json.loads(str(file["progress"]))


# 4. How good it is, in games that are not trained with.
def compare(collector: marlvec.Collector, pool: OpponentPool, arena: marlvec.VectorEnv, games: int, seed: int) -> dict:
    """Win rates: at its best against random moves; both drawing, or all games were one, against its first snapshot."""
    first = next((one for one in pool.values() if one.of == "main"), None)
    found = {}
    for name, rival in (("random", pool["random"]), ("first snapshot", first)):
        if rival is not None:
            players = {"learner": collector.policies["main"], name: rival}
            options = {"agent_connectors": {"learner": collector.agent_connectors["main"]}, "progress": False}
            result = evaluate_match(players, arena, games, seed=seed, explore=name != "random", **options)
            found[name] = result.win_rate("learner")
    return found


def plot(path: Path, history: list, pool: OpponentPool, league: MatchResult) -> None:
    """Win rates, ratings of the snapshots, and who beats whom."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name in ("random", "first snapshot"):
        seen = np.array([(step / 1000, rates[name]) for step, rates in history if name in rates]).reshape(-1, 2)
        left.plot(*seen.T, "o-", label=f"against {name}")
    left.set(title="win rate of the learner", xlabel="thousand env steps", ylim=(0.4, 1.02))
    left.legend()
    ratings = league.rate(BradleyTerry(fixed={"random": 0}))
    snapshots = [name for name in league.players if name in pool and not pool[name].anchor]
    rated = [ratings.rating(name) for name in snapshots]
    errors = [ratings.interval(name)[1] - rating for name, rating in zip(snapshots, rated, strict=True)]
    middle.errorbar([pool[name].step / 1000 for name in snapshots], rated, yerr=errors, fmt="o-", capsize=3)
    middle.set(title="rating of snapshots, 95 % intervals; at random: 0", xlabel="thousand env steps")
    names = league.players
    image = right.imshow(league.table.payoffs(names), vmin=0, vmax=1, cmap="RdYlGn")
    right.set_xticks(range(len(names)), names, rotation=45, ha="right")
    right.set_yticks(range(len(names)), names)
    right.set_title("win rate, row against column")
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=80)


# 5. Training.
def main() -> None:
    """Play and learn until --steps are done, then say what came of it."""
    args = parser.parse_args()
    if (args.folder / "learner.npz").exists() and not args.resume:
        parser.error(f"there is a run in {args.folder}: --resume goes on with it; or choose another --folder")
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    ppo = PPO(make_policy())
    done, history = load(args.folder / "learner.npz", ppo) if args.resume else (0, [])
    with (
        marlvec.make("connect_four", num_envs=args.num_envs, backend=args.backend) as envs,
        marlvec.make("connect_four", num_envs=64, backend=args.backend) as arena,
        marlvec.LiveTable(max(args.steps - done, 1), title="connect four", policies=["main"]) as table,
        marlvec.TensorBoardLogger(args.folder / "logs", policies=["main"], first_step=done) as logs,
    ):
        board = RatingTracker(envs.agents, table=MatchTable(decay=0.99), note=["main"])
        rules = [Every(args.snapshot_every), OnWinRate(board.table, 0.85, games=500)]
        options = {"capacity": 8, "leaves": thinned, "when": rules, "board": board}
        if args.resume:
            board.load(args.folder / "board.npz")
            pool = OpponentPool.load(args.folder / "pool", LEAGUE, **options)
        else:
            pool = OpponentPool(LEAGUE, folder=args.folder / "pool", **options)
            pool.add("random", marlvec.RandomPolicy(), anchor=True)  # never leaves
        former, random = (Prioritised(board.table, of=[name]) for name in LEAGUE)
        matchmaker = Mixture((0.3, Mirror()), (0.3, former), (0.4, random))
        mapping = SelfPlayMapping(pool, envs.agents, {"main": matchmaker})
        gae = GeneralAdvantageEstimation(0.99, 0.95, value_function=ppo.policy.values)
        collector = marlvec.Collector(
            envs,
            {"main": ppo.policy},
            mapping,
            agent_connectors={"main": [FlattenObs()]},
            learner_connectors={"main": [gae, Standardize()]},
            callbacks=[board, table, logs],
            seed=args.seed + done,
        )
        mapping.update(collector)
        while done < args.steps:
            batch = collector.collect(env_steps=min(args.batch, args.steps - done))
            done += batch.env_steps
            for name, value in ppo.update(batch["main"], 1 - done / args.steps, seed=args.seed + done).items():
                collector.metrics.add_value(name, value)
            if pool.offer(collector, "main", step=done):
                mapping.update(collector)
            if done >= args.steps or done - (history[-1][0] if history else 0) >= args.evaluate_every:
                rates = compare(collector, pool, arena, 64, args.seed)
                history.append([done, {name: rate.mean for name, rate in rates.items()}])
                for name, rate in rates.items():
                    collector.metrics.add_value(f"win rate against {name}", rate.mean)
            board.save(args.folder / "board.npz")
            save(args.folder / "learner.npz", ppo, [done, history])
        rates = compare(collector, pool, arena, args.games, args.seed + 1)
        players = {**{name: pool[name] for name in list(pool)[:: max(len(pool) // 6, 1)]}, "now": ppo.policy}
        own = {"now": collector.agent_connectors["main"]}
        pairs = len(players) * (len(players) - 1)
        league = evaluate_match(players, arena, pairs * max(args.games // 20, 1), agent_connectors=own)

    show(league)
    for name, rate in rates.items():
        print(f"against {name}: {rate}")
    plot(args.folder / "connect_four.png", history, pool, league)
    summary = {name: rate.mean for name, rate in rates.items()}
    (args.folder / "results.json").write_text(json.dumps({"env_steps": done, "seed": args.seed, **summary}))


if __name__ == "__main__":
    main()
