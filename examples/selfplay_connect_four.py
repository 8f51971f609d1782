"""A network learns connect four by playing what it was: PPO, a pool of opponents, action masks.

    python examples/selfplay_connect_four.py --steps 1000000 --backend async

Half of its games the learner plays against itself, the other half against former selves, those that beat it first.
Whenever it wins 60 % of its games against others, or after 100 000 steps, it joins them. What it keeps is in --folder:
the pool, results, weights, TensorBoard logs and plots; --resume goes on from there.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from rich import print as show
from torch import nn

import marlvec
from marlvec.connectors import FlattenObs, GeneralAdvantageEstimation, Rows, Standardize
from marlvec.interop.torch_policy import TorchPolicy
from marlvec.selfplay import (
    Every,
    MatchTable,
    Mirror,
    Mixture,
    OnWinRate,
    OpponentPool,
    Prioritised,
    Scoreboard,
    SelfPlayMapping,
    evaluate_match,
    thinned,
)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=4_000, help="env steps; a million takes some minutes")
parser.add_argument("--num-envs", type=int, default=64)
parser.add_argument("--backend", default="async")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch", type=int, default=4_096, help="env steps between two updates")
parser.add_argument("--games", type=int, default=40, help="games of each match in the end")
parser.add_argument("--folder", type=Path, default=None, help="where to keep everything; else nothing is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)


# 1. The policy. What it plays against is built by the same function, and gets its weights from the pool.
class Net(nn.Module):
    """Two towers over the flat board: what to do, and what the position is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = self._tower(7, 0.01)
        self.critic = self._tower(1, 1.0)

    @staticmethod
    def _tower(out: int, gain: float) -> nn.Sequential:
        layers = [nn.Linear(84, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, out)]
        for layer in layers[::2]:
            nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(*layers)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs), "values": self.critic(obs)}


def make_policy() -> TorchPolicy:
    """A policy as it is before it has learned anything."""
    return TorchPolicy(Net())


# 2. PPO.
class PPO:
    """Clipped policy gradient with a clipped value loss; the learning rate falls to nothing at the end."""

    def __init__(self, policy: TorchPolicy, lr: float = 1e-3, epochs: int = 4, size: int = 512) -> None:
        self.policy, self.lr, self.epochs, self.size = policy, lr, epochs, size
        self.optimizer = torch.optim.Adam(policy.module.parameters(), lr=lr, eps=1e-5)

    def update(self, batch: marlvec.SampleBatch, left: float, seed: int) -> dict[str, float]:
        """Learn from a batch; ``left`` is the part of the training that is still to come."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * max(left, 0.05)
        losses = []
        for epoch in range(self.epochs):
            for part in batch.minibatches(self.size, seed=seed * self.epochs + epoch):
                columns = dict(part.items())
                logp, advantage, old, target = (
                    torch.as_tensor(np.asarray(columns[name], np.float32))
                    for name in ("logp", "advantages", "values", "value_targets")
                )
                distribution, found = self.policy.forward(Rows(columns))
                ratio = (distribution.logp(torch.as_tensor(columns["actions"])) - logp).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                value = found["values"]
                clipped = old + (value - old).clamp(-0.2, 0.2)
                value_loss = torch.max((value - target) ** 2, (clipped - target) ** 2).mean() / 2
                entropy = distribution.entropy().mean()
                loss = -gain + 0.5 * value_loss - 0.01 * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.module.parameters(), 0.5)
                self.optimizer.step()
                losses.append([gain.item(), value_loss.item(), entropy.item()])
        self.policy.note_update()
        return dict(zip(("gain", "value_loss", "entropy"), np.mean(losses, axis=0).tolist(), strict=True))


# 3. Who plays whom.
def build_pool(board: Scoreboard) -> OpponentPool:
    """The opponents; with --resume those there were, and their results."""
    rules = [Every(100_000), OnWinRate(board.table, 0.6, games=200)]
    options = {"capacity": 20, "leaves": thinned, "when": rules, "board": board}
    if args.resume:
        board.load(args.folder / "board.npz")
        return OpponentPool.load(args.folder / "pool", make_policy, **options)
    return OpponentPool(make_policy, folder=args.folder and args.folder / "pool", **options)


# 4. Training.
def train(envs: marlvec.VectorEnv, learner: TorchPolicy, ppo: PPO, done: int) -> tuple[OpponentPool, Scoreboard]:
    """Play and learn until --steps are done."""
    with marlvec.LiveTable(total_env_steps=args.steps - done, title="connect four") as table:
        board = Scoreboard(envs.agents, table=MatchTable(decay=0.99), note=["main"])
        pool = build_pool(board)
        callbacks = [board, table]
        if args.folder:
            callbacks.append(marlvec.TensorBoardLogger(args.folder / "logs"))
        matchmaker = Mixture((0.5, Mirror()), (0.5, Prioritised(board.table)))
        mapping = SelfPlayMapping(pool, envs.agents, {"main": matchmaker})
        collector = marlvec.Collector(
            envs,
            marlvec.PolicyMap({"main": learner}, capacity=8),
            mapping,
            agent_connectors=[FlattenObs()],
            learner_connectors={
                "main": [GeneralAdvantageEstimation(0.99, 0.95, value_function=learner.values), Standardize()]
            },
            callbacks=callbacks,
            seed=args.seed + done,
        )
        if not pool:
            pool.snapshot(collector, "main")  # how it was before it learned anything
        mapping.update(collector)
        while done < args.steps:
            batch = collector.collect(env_steps=min(args.batch, args.steps - done))
            done += batch.env_steps
            for name, value in ppo.update(batch["main"], 1 - done / args.steps, seed=done).items():
                collector.metrics.add_value(name, value)
            if pool.offer(collector, "main", step=done):
                mapping.update(collector)
            if args.folder:
                save(learner, ppo, board, done)
        pool.snapshot(collector, "main", opponent_id=f"final_{done}", step=done)
    return pool, board


def save(learner: TorchPolicy, ppo: PPO, board: Scoreboard, done: int) -> None:
    """Keep what --resume needs; the pool keeps itself."""
    board.save(args.folder / "board.npz")
    state = {"net": learner.module.state_dict(), "optimizer": ppo.optimizer.state_dict(), "done": done}
    torch.save(state, args.folder / "learner.tmp")
    (args.folder / "learner.tmp").replace(args.folder / "learner.pt")


# 5. What came of it.
def plot(result: marlvec.selfplay.MatchResult, board: Scoreboard, pool: OpponentPool) -> None:
    """Ratings of the snapshots, and who beats whom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    old = [opponent for opponent in pool.values() if not opponent.opponent_id.startswith("final")]
    left.plot([one.step for one in old], [board.ratings.rating(one.opponent_id) for one in old], "o-")
    left.set(title="Elo of the snapshots, by their games in training", xlabel="env steps", ylabel="rating")
    names = list(result.players)
    image = right.imshow(result.table.payoffs(names), vmin=0, vmax=1, cmap="RdYlGn")
    right.set_xticks(range(len(names)), names, rotation=60, ha="right")
    right.set_yticks(range(len(names)), names)
    right.set_title("win rate, row against column")
    figure.colorbar(image, ax=right)
    figure.savefig(args.folder / "selfplay.png", dpi=120)


learner = make_policy()
ppo = PPO(learner)
done = 0
if args.resume:
    state = torch.load(args.folder / "learner.pt")
    learner.module.load_state_dict(state["net"])
    ppo.optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
with marlvec.make("connect_four", num_envs=args.num_envs, backend=args.backend) as envs:
    began = time.perf_counter()
    pool, board = train(envs, learner, ppo, done)
    print(f"{args.steps - done} env steps in {time.perf_counter() - began:.0f} s; {len(pool)} opponents")
    final, first = pool[f"final_{args.steps}"], next(iter(pool.values()))
    rivals = {"random": marlvec.RandomPolicy(), "its first snapshot": first}
    for name, rival in rivals.items():
        connectors = {name: [FlattenObs()]} if isinstance(rival, marlvec.Policy) else None
        players = {"learner": final, name: rival}
        found = evaluate_match(players, envs, args.games, seed=args.seed, agent_connectors=connectors)
        print(f"against {name}: {found.win_rate('learner')}")
    if args.folder and len(pool) > 2:
        chosen = [list(pool.values())[i] for i in np.unique(np.linspace(0, len(pool) - 1, 6).astype(int))]
        league = evaluate_match({one.opponent_id: one for one in chosen}, envs, 10 * 30, seed=args.seed)
        show(league)
        plot(league, board, pool)
