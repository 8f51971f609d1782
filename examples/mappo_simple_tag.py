"""Three hunters and their prey learn against each other: MAPPO, two policies, critics that see what everybody sees.

    python examples/mappo_simple_tag.py
    tensorboard --logdir runs/simple_tag

An agent acts on what it sees itself. What a moment is worth is said by a critic of its team, over the rows of all four
agents, which a learner connector puts together. All is kept in --folder: a checkpoint after each update, TensorBoard
logs, a plot. With --resume it goes on from there, and comes to the numbers it would have come to without the break.
"""

import argparse
import itertools
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import tree
from torch import nn

import marlvec
from marlvec.connectors import GeneralAdvantageEstimation, LearnerConnector, NormalizeObs, Rows, Standardize
from marlvec.interop.torch import TorchPolicy
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.values import decode, encode

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=128)
parser.add_argument("--backend", default="auto", help="auto: compiled worlds if numba is there, else processes")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--games", type=int, default=500, help="episodes of each pair in the end")
parser.add_argument("--folder", type=Path, default=Path("runs/simple_tag"), help="where everything is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)

LEARNING_RATE, EPOCHS, MINIBATCH, EVALUATE_EVERY = 3e-3, 4, 2_400, 5
GAMMA, LAMBDA, CLIP, ENTROPY, NEARNESS = 0.9, 0.95, 0.2, 0.003, 0.3
SEES = {"hunters": 16, "prey": 14}  # numbers an agent of each team sees
AGENTS = {"hunters": (0, 1, 2), "prey": (3,)}
JOINT = 3 * 16 + 14
LEARNED_FROM = ("obs", "joint_obs", "actions", "logp", "advantages", "value_targets")

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


# 1. Each team has a policy for all its agents, a critic, and an optimizer of both.
def tower(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers."""
    layers = [nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Net(nn.Module):
    """An actor that sees what one agent sees; and beside it the critic, which is asked when there is a batch."""

    def __init__(self, sees: int) -> None:
        super().__init__()
        self.actor, self.critic = tower(sees, 5, 0.01), tower(JOINT, 1, 1.0)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.actor(obs)


policies = {name: TorchPolicy(Net(sees)) for name, sees in SEES.items()}
optimizers = {name: torch.optim.Adam(policy.module.parameters(), eps=1e-5) for name, policy in policies.items()}


def update(team: str, rows: marlvec.SampleBatch, done: int) -> dict[str, float]:
    """PPO's clipped policy gradient; the learning rate falls with the env steps that are done."""
    policy, optimizer = policies[team], optimizers[team]
    optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + done / 150_000)
    columns = {name: rows[name] for name in LEARNED_FROM}
    rng, sums = np.random.default_rng((args.seed, done)), np.zeros(3)
    for _ in range(EPOCHS):
        for some in np.array_split(rng.permutation(len(rows)), max(1, len(rows) // MINIBATCH)):
            part = {name: torch.from_numpy(column[some]) for name, column in columns.items()}
            distribution, _ = policy.forward(Rows({"obs": columns["obs"][some]}))
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.min(ratio * part["advantages"], clipped * part["advantages"]).mean()
            value_loss = (policy.module.critic(part["joint_obs"])[:, 0] - part["value_targets"]).square().mean()
            entropy = distribution.entropy().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * entropy).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
            sums += [value_loss.item(), entropy.item(), 1]
    policy.note_update()
    return {f"{team}: value loss": sums[0] / sums[2], f"{team}: entropy": sums[1] / sums[2]}


# 2. The critic's part in collecting. What it gives, GeneralAdvantageEstimation goes on with.
class CentralCritic(LearnerConnector):
    """Adds joint_obs (n, 62), what all agents of the env saw then; its values, and those of what came after."""

    across_agents = True  # a row depends on the rows of others

    def __init__(self, critic: nn.Module) -> None:
        self.critic = critic

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        """Put together what everybody saw, and saw next: a row for each of the M moments, (M, 62)."""
        self._moments = np.unique(moment_of(batch["prey"]))
        self._joint, self._after = np.zeros((2, len(self._moments), JOINT), np.float32)
        begin = 0
        for name, agents in AGENTS.items():
            for agent in agents:
                rows = batch[name].take(np.flatnonzero(batch[name].agent_index == agent))
                at, end = np.searchsorted(self._moments, moment_of(rows)), begin + SEES[name]
                self._joint[at, begin:end], self._after[at, begin:end] = rows.obs, rows.next_obs
                begin = end

    def __call__(self, rows: Rows) -> Rows:
        with torch.no_grad():
            values, after = (self.critic(torch.from_numpy(x))[:, 0].numpy() for x in (self._joint, self._after))
        at = np.searchsorted(self._moments, moment_of(rows))
        return rows.replace(joint_obs=self._joint[at], values=values[at], next_values=after[at])


def moment_of(rows: Rows) -> np.ndarray:
    """A number for each row's episode and time; no episode is longer than 25 steps."""
    return 25 * rows.eps_id + rows.t


# 3. What they learn from: the touches paid for, and at each step a little for how near the nearest of the others is.
def paid(begin: int, sign: int) -> marlvec.connectors.AgentConnector:
    """Where the others are is in an observation's numbers from ``begin`` to 14. Metrics count what the env pays."""

    @marlvec.connectors.agent_connector
    def reward(rows: Rows) -> Rows:
        near = np.linalg.norm(rows.obs[:, begin:14].reshape(len(rows), -1, 2), axis=2).min(axis=1)
        return rows.replace(rewards=np.where(rows.first, 0.0, rows.rewards / 10 + sign * NEARNESS * near))

    return reward


# 4. Checkpoints: arrays and JSON in one file, which is there as a whole or not at all.
def save(collector: marlvec.Collector, done: int, curve: list[list[float]]) -> None:
    """Write down all that the next update depends on, and the curve."""
    state: dict = {"done": done, "curve": curve}
    for name in policies:
        learned = [part[name].state_dict() for part in (policies, collector.agent_connectors, optimizers)]
        state[name] = tree.map_structure(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, learned)
    write_archive(args.folder / "checkpoint.npz", {"state": encode(state, "the checkpoint")})


def load(collector: marlvec.Collector, state: dict) -> None:
    """Take over what a checkpoint has of the teams."""
    for name in policies:
        policy, connectors, optimizer = state[name]
        policies[name].load_state_dict(policy)
        collector.agent_connectors[name].load_state_dict(connectors)
        tensors = tree.map_structure(lambda x: torch.tensor(x) if isinstance(x, np.ndarray) else x, optimizer)
        optimizers[name].load_state_dict(tensors)


# 5. How good they are, by what a game is about: how often hunters touch the prey in an episode.
def touches(collector: marlvec.Collector, hunters: str, prey: str, games: int) -> np.ndarray:
    """Touches in each of so many episodes, (games,); every touch pays each hunter 10."""
    found = collector.evaluate(
        games, policy_mapping=dict(zip(collector.envs.agents, [*3 * [hunters], prey], strict=True)), seed=args.seed
    )
    return np.array([record.returns_A[0] / 10 for record in found.episodes])


def train(collector: marlvec.Collector, done: int, curve: list[list[float]]) -> int:
    """Play and learn until --steps are done; now and then see how it goes against those that act at random."""
    while done < args.steps:
        if len(curve) * EVALUATE_EVERY * args.num_envs * 25 <= done:
            pairs = ("hunters", "random_prey"), ("random_hunters", "prey"), ("hunters", "prey")
            curve.append([done, *(float(touches(collector, *pair, 100).mean()) for pair in pairs)])
        # New episodes, whose seeds say how far it is: an update depends on the checkpoint before it and nothing else.
        collector.reset(seed=args.seed * 2**32 + done)
        batch = collector.collect(episodes=args.num_envs)
        done += batch.env_steps
        for team in policies:
            for what, value in update(team, batch[team], done).items():
                collector.metrics.add_value(what, value)
        save(collector, done, curve)
    return done


def plot(curve: list[list[float]], table: np.ndarray) -> None:
    """Touches against opponents that act at random, and the table of who meets whom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", width_ratios=(2, 1))
    steps, *lines = np.transpose(curve)
    for line, label in zip(lines, ("hunters, random prey", "random hunters, prey", "both as they are"), strict=True):
        left.plot(steps, line, "o-", markersize=3, label=label)
    left.set(title="simple_tag: touches an episode", xlabel="env steps")
    left.legend()
    right.imshow(table, cmap="Oranges", vmin=0, vmax=1.5 * table.max())
    for (i, j), value in np.ndenumerate(table):
        right.text(j, i, f"{value:.2f}", ha="center", va="center")
    right.set(title="in the end", xticks=(0, 1), yticks=(0, 1))
    right.set(xticklabels=("random prey", "prey"), yticklabels=("random\nhunters", "hunters"))
    figure.savefig(args.folder / "touches.png", dpi=80)


# 6. All of it. Episodes by which they are judged are played in envs of their own.
with (
    marlvec.make("simple_tag", num_envs=args.num_envs, backend=args.backend) as envs,
    marlvec.make("simple_tag", num_envs=args.num_envs, backend=args.backend) as others,
):
    state = decode(read_archive(args.folder / "checkpoint.npz")["state"]) if args.resume else {"done": 0, "curve": []}
    table = marlvec.LiveTable(args.steps - state["done"], title="simple_tag", window=args.num_envs)
    logger = marlvec.TensorBoardLogger(args.folder / "logs", agents=False, first_step=state["done"])
    collector = marlvec.Collector(
        envs,
        policies | {"random_hunters": marlvec.RandomPolicy(), "random_prey": marlvec.RandomPolicy()},
        policy_mapping=dict(zip(envs.agents, [*3 * ["hunters"], "prey"], strict=True)),
        agent_connectors={"hunters": [paid(12, -1), NormalizeObs()], "prey": [paid(8, 1), NormalizeObs()]},
        learner_connectors={
            name: [CentralCritic(policy.module.critic), GeneralAdvantageEstimation(GAMMA, LAMBDA), Standardize()]
            for name, policy in policies.items()
        },
        batch_mode="complete",
        callbacks=[table, logger],
        window=args.num_envs,
        seed=args.seed,
        evaluation_envs=others,
    )
    if args.resume:
        load(collector, state)
    began = time.perf_counter()
    with table, logger:
        done = train(collector, state["done"], state["curve"])
    print(f"{done - state['done']:,} env steps in {time.perf_counter() - began:.0f} s")
    means = []
    for hunters, prey in itertools.product(("random_hunters", "hunters"), ("random_prey", "prey")):
        found = touches(collector, hunters, prey, args.games)
        means.append(found.mean())
        print(f"{hunters:>14} and {prey:>11}: {means[-1]:.2f} touches, prey caught in {(found > 0).mean():.0%}")
    plot(state["curve"], np.reshape(means, (2, 2)))
