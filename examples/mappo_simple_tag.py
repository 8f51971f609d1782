"""Three hunters and their prey learn against each other: MAPPO, two policies, critics that see what everybody sees.

    python examples/mappo_simple_tag.py --track
    tensorboard --logdir runs/simple_tag

An agent acts on what it sees itself. What a moment is worth is said by a critic of its team, over the rows of all four
agents, which a learner connector puts together. All that is kept is in --checkpoint: the last state, a plot, with
--track TensorBoard logs. With --resume it goes on from there, and comes to the numbers it would have come to without
the break. Needs torch, and the extras `plot` and, for --track, `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=200_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=128, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled worlds if numba is there")
parser.add_argument("--games", type=int, default=500, help="episodes of each pair in the end")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/simple_tag"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if not args.resume and (args.checkpoint / "last.npz").exists():
    parser.error(f"there is a run in {args.checkpoint}: --resume goes on with it; or choose another --checkpoint")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    import marlvec
    from marlvec.connectors import GeneralAdvantageEstimation, LearnerConnector, NormalizeObs, Rows, Standardize
    from marlvec.interop.torch import TorchPolicy

    progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
    done, curve = progress["done"], progress["curve"]
    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs", agents=False, first_step=done)] if args.track else []
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[plot,tensorboard]'") from None

LEARNING_RATE, EPOCHS, MINIBATCH, EVALUATE_EVERY = 3e-3, 4, 2_400, 5
GAMMA, LAMBDA, CLIP, ENTROPY, NEARNESS = 0.9, 0.95, 0.2, 0.003, 0.3
AGENTS = {"hunters": (0, 1, 2), "prey": (3,)}
SEES = {"hunters": 16, "prey": 14}  # numbers an agent of each team sees
JOINT = 3 * 16 + 14
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


def update(team: str, rows: marlvec.SampleBatch, done: int) -> None:
    """PPO's clipped policy gradient; the learning rate falls with the env steps that are done."""
    policy, optimizer, rng = policies[team], optimizers[team], np.random.default_rng((args.seed, done))
    optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + done / 150_000)
    columns = {name: rows[name] for name in ("obs", "joint_obs", "actions", "logp", "advantages", "value_targets")}
    for _ in range(EPOCHS):
        for some in np.array_split(rng.permutation(len(rows)), max(1, len(rows) // MINIBATCH)):
            part = {name: torch.from_numpy(column[some]) for name, column in columns.items()}
            distribution, _ = policy.forward(Rows({"obs": columns["obs"][some]}))
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"]).mean()
            value_loss = (policy.module.critic(part["joint_obs"])[:, 0] - part["value_targets"]).square().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), 0.5)
            optimizer.step()
    policy.note_update()


# 2. The critic's part in collecting. What it gives, GeneralAdvantageEstimation goes on with.
class CentralCritic(LearnerConnector):
    """Adds joint_obs (n, 62), what all agents of the env saw then; its values, and those of what came after."""

    across_agents = True  # a row depends on the rows of others

    def __init__(self, critic: nn.Module) -> None:
        self.critic = critic

    def see_batch(self, batch: dict[str, Rows]) -> None:
        """Put together what everybody saw, and saw next: a row for each of the M moments, (M, 62)."""
        self._moments = np.unique(moment_of(batch["prey"]))
        self._joint, self._after = np.zeros((2, len(self._moments), JOINT), np.float32)
        begin = 0
        for name, agent in [(name, agent) for name, agents in AGENTS.items() for agent in agents]:
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


def touches(hunters: str, prey: str, games: int) -> np.ndarray:
    """How often hunters touch the prey, which is what the game is about, (games,); every touch pays each 10."""
    who = dict(zip(envs.agents, [*3 * [hunters], prey], strict=True))
    found = collector.evaluate(games, policy_mapping=who, seed=args.seed)
    return np.array([record.returns_A[0] / 10 for record in found.episodes])


# 4. All of it. Episodes by which they are judged are played in envs of their own.
PAIRS = ("hunters", "random_prey"), ("random_hunters", "prey"), ("hunters", "prey"), ("random_hunters", "random_prey")
table = marlvec.LiveTable(args.total_timesteps - done, title="simple_tag", window=args.num_envs)
with (
    marlvec.make("simple_tag", num_envs=args.num_envs, backend=args.backend) as envs,
    marlvec.make("simple_tag", num_envs=args.num_envs, backend=args.backend) as others,
    table,
):
    critics = {
        name: [CentralCritic(policy.module.critic), GeneralAdvantageEstimation(GAMMA, LAMBDA), Standardize()]
        for name, policy in policies.items()
    }
    collector = marlvec.Collector(
        envs,
        policies | {"random_hunters": marlvec.RandomPolicy(), "random_prey": marlvec.RandomPolicy()},
        policy_mapping=dict(zip(envs.agents, [*3 * ["hunters"], "prey"], strict=True)),
        policies_to_train=list(policies),
        agent_connectors={"hunters": [paid(12, -1), NormalizeObs()], "prey": [paid(8, 1), NormalizeObs()]},
        learner_connectors=critics,
        batch_mode="complete",
        callbacks=[table, *logs],
        window=args.num_envs,
        seed=args.seed,
        evaluation_envs=others,
    )
    learned = {"collector": collector, "learner": optimizers}
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, **learned)
    while done < args.total_timesteps:
        if len(curve) * EVALUATE_EVERY * args.num_envs * 25 <= done:
            curve.append([done, *(float(touches(*pair, 100).mean()) for pair in PAIRS[:3])])
        # New episodes, whose seeds say how far it is: an update depends on the checkpoint before it and nothing else.
        collector.reset(seed=args.seed * 2**32 + done)
        batch = collector.collect(episodes=args.num_envs)
        done += batch.env_steps
        for team in policies:
            update(team, batch[team], done)
        marlvec.save_checkpoint(args.checkpoint, **learned, progress={"done": done, "curve": curve})
    results = {pair: touches(*pair, args.games) for pair in PAIRS}
for log in logs:
    log.close()

# 5. What came of it.
axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
steps, *lines = np.transpose(curve)
for line, (hunters, prey) in zip(lines, PAIRS[:3], strict=True):
    axes.plot(steps, line, "o-", markersize=3, label=f"{hunters}, {prey}".replace("_", " "))
axes.set(title="simple_tag", xlabel="env steps", ylabel="touches an episode (team of hunters)")
axes.legend()
axes.figure.savefig(args.checkpoint / "touches.png", dpi=80)
for (hunters, prey), found in results.items():
    print(f"{hunters:>14} and {prey:>11}: {found.mean():.2f} touches, prey caught in {(found > 0).mean():.0%}")
print(f"wrote last.npz, touches.png{', logs' * args.track} into {args.checkpoint}")
