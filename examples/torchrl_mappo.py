"""TorchRL's MAPPO on marlvec's envs: three agents spread over three landmarks.

`TorchRLEnv` is TorchRL's batched env; all else here is TorchRL's: networks, collector, advantages, loss. In the end the
policy plays whole episodes against random moves, and the returns on the way are drawn. With --resume weights and
optimizer go on, and new episodes begin, which TorchRL's collector cannot save.
"""

import argparse
import time
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and weights")
parser.add_argument("--total-timesteps", type=int, default=1_600, help="env steps in all; 400000 take some minutes")
parser.add_argument("--num-envs", type=int, default=32, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--batch", type=int, default=1_600, help="env steps between two updates")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/torchrl_spread"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import torch
    from matplotlib.figure import Figure
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl.collectors import Collector
    from torchrl.envs import RewardSum, TransformedEnv
    from torchrl.modules import MultiAgentMLP, ProbabilisticActor
    from torchrl.objectives.multiagent import MAPPOLoss

    import marlvec
    from marlvec.interop.torchrl import TorchRLEnv

    if args.track:
        from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[torchrl,plot,tensorboard]'") from None

torch.manual_seed(args.seed)
torch.set_num_threads(1)


def make_env() -> TransformedEnv:
    """N envs in which an episode's return is added up."""
    env = TorchRLEnv.make("simple_spread", args.num_envs, backend=args.backend)
    env.set_seed(args.seed)
    return TransformedEnv(env, RewardSum(in_keys=[("agent", "reward")], out_keys=[("agent", "episode_reward")]))


def net(outputs: int, *, sees_all: bool) -> MultiAgentMLP:
    """One network for all agents; a critic that sees all of them makes it MAPPO, one that does not IPPO."""
    return MultiAgentMLP(18, outputs, n_agents=3, centralized=sees_all, share_params=True, depth=2, num_cells=128)


env = make_env()
logits = TensorDictModule(net(5, sees_all=False), in_keys=[("agent", "observation")], out_keys=[("agent", "logits")])
actor = ProbabilisticActor(
    logits,
    spec=env.full_action_spec,
    in_keys=[("agent", "logits")],
    out_keys=[("agent", "action")],
    distribution_class=Categorical,
    return_log_prob=True,
    log_prob_key=("agent", "log_prob"),
)
critic = TensorDictModule(
    net(1, sees_all=True), in_keys=[("agent", "observation")], out_keys=[("agent", "state_value")]
)
loss = MAPPOLoss(actor, critic, entropy_coeff=0.01)
loss.set_keys(
    action=("agent", "action"),
    sample_log_prob=("agent", "log_prob"),
    value=("agent", "state_value"),
    reward=("agent", "reward"),
    done=("agent", "done"),
    terminated=("agent", "terminated"),
)
loss.make_value_estimator(gamma=0.95, lmbda=0.9)
optimizer = torch.optim.Adam(loss.parameters(), lr=5e-4)


def update(data: torch.Tensor) -> None:
    """Learn from a batch, a few times over."""
    with torch.no_grad():
        loss.value_estimator(data)
    rows = data.reshape(-1)
    for _ in range(6):
        for part in torch.randperm(len(rows)).split(400):
            values = loss(rows[part])
            optimizer.zero_grad()
            sum(value for name, value in values.items() if name.startswith("loss_")).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()


def evaluate(policy: TensorDictModule | None) -> float:
    """Mean return per agent over whole episodes, one in each env."""
    with torch.no_grad():
        test = make_env()
        data = test.rollout(25, policy)
        test.close()
    return data["next", "agent", "episode_reward"][:, -1].mean().item()


learner = {"loss": loss, "optimizer": optimizer}
curve = marlvec.load_checkpoint(args.checkpoint, learner=learner)["curve"] if args.resume else []
done = before = curve[-1][0] if curve else 0
if args.resume and done >= args.total_timesteps:
    parser.error(f"{done} env steps are done; --total-timesteps counts them, too")
began, writer = time.perf_counter(), SummaryWriter(args.checkpoint / "logs") if args.track else None
left = args.total_timesteps - done
collector = Collector(env, actor, frames_per_batch=args.batch, total_frames=left, auto_register_policy_transforms=False)
for data in collector:
    ended = data["next", "done"][..., 0]
    done += args.batch
    curve.append((done, data["next", "agent", "episode_reward"][ended].mean().item()))
    update(data)
    marlvec.save_checkpoint(args.checkpoint, learner=learner, progress={"curve": curve}, score=curve[-1][1])
    if writer:
        writer.add_scalar("return per agent", curve[-1][1], done)
collector.shutdown()
print(f"{done - before:,} env steps in {time.perf_counter() - began:.0f} s")
random, learned = evaluate(None), evaluate(actor)
if writer:
    writer.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(*zip(*curve, strict=True), label="MAPPO")
axes.axhline(random, color="grey", linestyle="--", label="random")
axes.set(xlabel="env steps", ylabel="return per agent", title="simple_spread, TorchRL's MAPPO on TorchRLEnv")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"mean return per agent: random {random:.1f}, after {done} env steps {learned:.1f}")
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
