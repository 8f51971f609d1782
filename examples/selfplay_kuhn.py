"""A network learns Kuhn poker by self-play until a perfect opponent wins next to nothing of it.

    python examples/selfplay_kuhn.py
    tensorboard --logdir runs/kuhn
    marlvec play kuhn_poker --policy examples/selfplay_kuhn.py:make_policy@runs/kuhn/pool

The learner plays both seats, half of its hands against itself and half against any of its former selves, and joins
them again and again. A bonus on entropy, large at first, keeps it from running after each opponent's last mistake. How
far it is from an equilibrium is computed exactly, by OpenSpiel: what a perfect opponent would win of it, 0.458 chips a
hand of who plays at random. All that is kept is in --folder: opponents, results, weights, TensorBoard logs, plots. With
--resume it goes on from there.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from rich import print as show
from torch import nn

import marlvec
from marlvec.connectors import GeneralAdvantageEstimation, Rows
from marlvec.interop.torch import TorchPolicy
from marlvec.selfplay import (
    BradleyTerry,
    Every,
    MatchResult,
    Mirror,
    Mixture,
    OpponentPool,
    RatingTracker,
    SelfPlayMapping,
    Uniform,
    evaluate_match,
    exploitability,
)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=300_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=1024)
parser.add_argument("--backend", default="native")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch", type=int, default=8_192, help="env steps between two updates")
parser.add_argument("--snapshots", type=int, default=20, help="about how many former selves there are in the end")
parser.add_argument("--games", type=int, default=200, help="hands of each line-up in the end")
parser.add_argument("--folder", type=Path, default=Path("runs/kuhn"), help="where everything is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")


# 1. The policy. What it plays against is built by the same function, and gets its weights from the pool.
class Net(nn.Module):
    """From what a player knows, which seat, which card, what was bet: what to do, and what it may hope for."""

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


# 2. PPO.
class PPO:
    """Clipped policy gradient, with a bonus on entropy that falls to a tenth, as the learning rate does."""

    def __init__(self, policy: TorchPolicy, lr: float = 1e-2, epochs: int = 4, size: int = 1024) -> None:
        self.policy, self.lr, self.epochs, self.size = policy, lr, epochs, size
        self.optimizer = torch.optim.Adam(policy.module.parameters(), lr=lr)

    def update(self, batch: marlvec.SampleBatch, left: float, seed: int) -> dict[str, float]:
        """Learn from a batch; ``left`` is the part of the training that is still to come."""
        self.optimizer.param_groups[0]["lr"] = self.lr * max(left, 0.1)
        bonus = 0.05 + 0.45 * left  # in chips
        losses = []
        for epoch in range(self.epochs):
            for part in batch.minibatches(self.size, seed=seed + epoch):
                columns = dict(part.items())
                logp, advantage, target = (
                    torch.as_tensor(np.asarray(columns[name], np.float32))
                    for name in ("logp", "advantages", "value_targets")
                )
                distribution, found = self.policy.forward(Rows(columns))
                ratio = (distribution.logp(torch.as_tensor(columns["actions"])) - logp).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                value_loss = (found["values"] - target).square().mean() / 2
                entropy = distribution.entropy().mean()
                self.optimizer.zero_grad()
                (value_loss - gain - bonus * entropy).backward()
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


# 4. What came of it.
def plot(path: Path, history: list, pool: OpponentPool, league: MatchResult) -> None:
    """Exploitability, ratings of the snapshots, and who beats whom."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    steps, alone, average = zip(*history, strict=True)
    left.plot(np.divide(steps, 1000), alone, "o-", label="the learner as it is")
    left.plot(np.divide(steps, 1000), average, "o-", label="the newer snapshots' average")
    left.axhline(0.458333, color="grey", linestyle=":", label="at random")
    left.set(title="exploitability, chips a hand", xlabel="thousand env steps", ylim=(0, 0.5))
    left.legend()
    ratings = league.rate(BradleyTerry(fixed={"random": 0}))
    snapshots = [name for name in league.players if name in pool]
    rated = [ratings.rating(name) for name in snapshots]
    errors = [ratings.interval(name)[1] - rating for name, rating in zip(snapshots, rated, strict=True)]
    middle.errorbar([pool[name].step / 1000 for name in snapshots], rated, yerr=errors, fmt="o-", capsize=3)
    middle.set(title="rating of snapshots, 95 % intervals; at random: 0", xlabel="thousand env steps")
    names = league.players
    image = right.imshow(league.table.payoffs(names), vmin=0.3, vmax=0.7, cmap="RdYlGn")
    right.set_xticks(range(len(names)), names, rotation=45, ha="right")
    right.set_yticks(range(len(names)), names)
    right.set_title("hands won, row against column")
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
        marlvec.make("kuhn_poker", num_envs=args.num_envs, backend=args.backend) as envs,
        marlvec.LiveTable(max(args.steps - done, 1), title="Kuhn poker", policies=["main"]) as table,
        marlvec.TensorBoardLogger(args.folder / "logs", policies=["main"], first_step=done) as logs,
    ):
        board = RatingTracker(envs.agents, note=["main"])
        options = {"when": [Every(max(args.steps // args.snapshots, 1))], "board": board}
        if args.resume:
            board.load(args.folder / "board.npz")
            pool = OpponentPool.load(args.folder / "pool", make_policy, **options)
        else:
            pool = OpponentPool(make_policy, folder=args.folder / "pool", **options)
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Mixture((0.5, Mirror()), (0.5, Uniform()))})
        gae = GeneralAdvantageEstimation(1.0, 1.0, value_function=ppo.policy.values)
        collector = marlvec.Collector(
            envs,
            {"main": ppo.policy},
            mapping,
            learner_connectors={"main": [gae]},
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
                newer = list(pool.values())[len(pool) // 2 :]  # the older half was too random yet
                history.append([done, exploitability(ppo.policy), exploitability(newer)])
                collector.metrics.add_value("exploitability of the learner", history[-1][1])
                collector.metrics.add_value("exploitability of the average", history[-1][2])
            board.save(args.folder / "board.npz")
            save(args.folder / "learner.npz", ppo, [done, history])
        chosen = list(pool)[:: max(len(pool) // 6, 1)]
        players = {"random": marlvec.RandomPolicy(), **{name: pool[name] for name in chosen}}
        pairs = len(players) * (len(players) - 1)
        league = evaluate_match(players, envs, pairs * args.games, seed=args.seed)

    show(league)
    found = dict(zip(("env_steps", "learner", "average"), history[-1], strict=True))
    print(f"exploitability: the learner {found['learner']:.3f}, the average {found['average']:.3f}, at random 0.458")
    plot(args.folder / "kuhn.png", history, pool, league)
    (args.folder / "results.json").write_text(json.dumps({"seed": args.seed, **found}))


if __name__ == "__main__":
    main()
