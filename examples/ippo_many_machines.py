"""Three agents learn to cover three landmarks, from many collectors: IPPO on Ray.

    python examples/ippo_many_machines.py                                     # two processes of this machine
    python examples/ippo_many_machines.py --address auto --collectors 16      # a cluster that is there
    python examples/ippo_many_machines.py --backend sync                      # the same numbers without Ray

Each agent learns from what it sees itself; all share one policy, or with --apart each has its own. All that is kept is
in --checkpoint: the last state and the best, a plot, with --track TensorBoard logs. With --resume, and otherwise the
same flags, it goes on from there: with compiled envs (numba) to the numbers that it would have come to without the
break. Needs torch, and the extras `distributed`, `plot` and, for --track, `tensorboard`.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs, policies and weights")
parser.add_argument("--total-timesteps", type=int, default=100_000, help="env steps, those before --resume included")
parser.add_argument("--num-envs", type=int, default=64, help="envs of a collector")
parser.add_argument("--collectors", type=int, default=2, help="how many")
parser.add_argument("--backend", choices=["ray", "sync"], default="ray", help="where collectors run")
parser.add_argument("--address", help="of a Ray cluster that is there")
parser.add_argument("--apart", action="store_true", help="a policy of its own for each agent")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/many_machines"), help="folder for all that is kept")
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
    from marlvec.connectors import GeneralAdvantageEstimation, NormalizeObs, Standardize
    from marlvec.distributed import Collectors
    from marlvec.interop.torch import TorchPolicy

    logs = [marlvec.TensorBoardLogger(args.checkpoint / "logs")] if args.track else []
    if args.address:
        import ray

        ray.init(address=args.address)
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install torch 'marlvec[distributed,plot,tensorboard]'") from None

NAMES = {f"agent_{i}": f"policy_{i}" if args.apart else "policy" for i in range(3)}  # of the policy of each agent
torch.manual_seed(args.seed)
torch.set_num_threads(1)  # with nets this small, threads wait for each other more than they work


def tower(outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers."""
    layers = [nn.Linear(18, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Net(nn.Module):
    """An actor and a critic, both over what one agent sees."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = tower(5, 0.01), tower(1, 1.0)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs), "values": self.critic(obs)}


def build(place):
    """Make one collector; runs in its process. Advantages are made there, beside the envs."""
    policies = {name: TorchPolicy(Net()) for name in NAMES.values()}
    gae = {name: [GeneralAdvantageEstimation(0.9, 0.95, policy.values)] for name, policy in policies.items()}
    envs = marlvec.make("simple_spread", num_envs=args.num_envs, backend="auto")
    chain = [NormalizeObs()]  # what each learns is merged with every batch, and given to all
    return marlvec.Collector(envs, policies, NAMES, agent_connectors=chain, learner_connectors=gae, seed=place.seed)


def update(net: Net, optimizer: torch.optim.Optimizer, rows: marlvec.SampleBatch) -> None:
    """PPO's clipped policy gradient; the learning rate falls with the env steps that are done."""
    optimizer.param_groups[0]["lr"] = 3e-3 / (1 + done / 150_000)
    rng = np.random.default_rng((args.seed, done))
    for some in (some for _ in range(8) for some in rows.minibatches(-(-len(rows) // 4), rng)):
        part = some.to_torch()
        found = net(part["obs"])
        distribution = torch.distributions.Categorical(logits=found["inputs"])
        ratio = (distribution.log_prob(part["actions"]) - part["logp"]).exp()
        gain = torch.min(ratio * part["advantages"], ratio.clamp(0.8, 1.2) * part["advantages"]).mean()
        value_loss = (found["values"].squeeze(-1) - part["value_targets"]).square().mean()
        optimizer.zero_grad()
        (0.5 * value_loss - gain - 0.003 * distribution.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


nets = {name: Net() for name in NAMES.values()}
optimizers = {f"adam_{name}": torch.optim.Adam(net.parameters(), eps=1e-5) for name, net in nets.items()}
learner = {**nets, **optimizers}
progress = marlvec.load_checkpoint(args.checkpoint) if args.resume else {"done": 0, "curve": []}
done, curve, episodes = progress["done"], progress["curve"], args.collectors * args.num_envs  # of one update
# Standardize looks at the whole batch, so it belongs here, and not into build.
settings = {"seed": args.seed, "learner_connectors": [Standardize()], "callbacks": logs, "window": episodes}
with Collectors(build, args.collectors, args.backend, **settings) as collectors:
    if args.resume:
        marlvec.load_checkpoint(args.checkpoint, collector=collectors, learner=learner)
    while done < args.total_timesteps:
        collectors.set_weights({name: TorchPolicy(net).get_weights() for name, net in nets.items()})
        batch = collectors.collect(env_steps=25 * episodes)
        done += batch.env_steps
        for name, rows in batch.items():
            update(nets[name], optimizers[f"adam_{name}"], rows)
        curve.append([done, collectors.metrics.returns.mean])
        learned = {"collector": collectors, "learner": learner, "progress": {"done": done, "curve": curve}}
        marlvec.save_checkpoint(args.checkpoint, **learned, score=curve[-1][1])
        print(f"{done:,} env steps, {collectors.accounting.lost:,} lost: team return {curve[-1][1]:.1f}", flush=True)
for log in logs:
    log.close()

axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
axes.plot(*np.transpose(curve))
axes.set(title="mean over an update's episodes", xlabel="env steps", ylabel="team return (sum over agents)")
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
