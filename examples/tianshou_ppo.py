"""Tianshou's PPO on marlvec's envs: three agents, one policy, spread over three landmarks.

`TianshouVectorEnv` shows Tianshou one row per agent; all else here is Tianshou's. In the end the policy plays whole
episodes against random moves, and the returns on the way are drawn. With --resume weights and optimizer go on, and new
episodes begin, which Tianshou's collector cannot save.
"""

import argparse
import time
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and weights")
parser.add_argument("--total-timesteps", type=int, default=1_600, help="env steps in all; 200000 take some minutes")
parser.add_argument("--num-envs", type=int, default=32, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--batch", type=int, default=1_600, help="env steps between two updates")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/tianshou_spread"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from tianshou.algorithm import PPO
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
    from torch.distributions import Categorical

    import marlvec
    from marlvec.interop.tianshou import TianshouVectorEnv

    if args.track:
        from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[tianshou,plot,tensorboard]'") from None

torch.manual_seed(args.seed)
torch.set_num_threads(1)
np.random.seed(args.seed)  # noqa: NPY002 (Tianshou draws from it)

envs = TianshouVectorEnv.make("simple_spread", args.num_envs, backend=args.backend)
rows_per_step = len(envs) // args.num_envs
space, actions = envs.observation_space[0], envs.action_space[0]
algorithm = PPO(
    policy=ProbabilisticActorPolicy(
        actor=DiscreteActor(
            preprocess_net=Net(state_shape=space.shape, hidden_sizes=[128, 128]),
            action_shape=actions.n,
            softmax_output=False,
        ),
        dist_fn=lambda logits: Categorical(logits=logits),
        action_scaling=False,
        action_space=actions,
    ),
    critic=DiscreteCritic(preprocess_net=Net(state_shape=space.shape, hidden_sizes=[128, 128])),
    optim=AdamOptimizerFactory(lr=5e-4),
    gamma=0.95,
    gae_lambda=0.9,
    max_grad_norm=0.5,
    return_scaling=True,
)
collector = Collector(algorithm, envs, VectorReplayBuffer(args.batch * rows_per_step, len(envs)))


def evaluate(*, random: bool) -> float:
    """Mean return per agent over whole episodes, one in each env."""
    envs.seed(args.seed + 1)
    stats = collector.collect(n_episode=len(envs), random=random, reset_before_collect=True)
    collector.reset(gym_reset_kwargs={"seed": args.seed})
    return float(stats.returns.mean())


random = evaluate(random=True)
learner = {"algorithm": algorithm}
curve = marlvec.load_checkpoint(args.checkpoint, learner=learner)["curve"] if args.resume else []
done = before = curve[-1][0] if curve else 0
began, writer = time.perf_counter(), SummaryWriter(args.checkpoint / "logs") if args.track else None
while done < args.total_timesteps:
    with policy_within_training_step(algorithm.policy):
        stats = collector.collect(n_step=args.batch * rows_per_step)
        algorithm.update(buffer=collector.buffer, batch_size=1_200, repeat=6)
    collector.reset_buffer(keep_statistics=True)
    done += args.batch
    curve.append((done, float(stats.returns.mean())))
    marlvec.save_checkpoint(args.checkpoint, learner=learner, progress={"curve": curve}, score=curve[-1][1])
    if writer:
        writer.add_scalar("return per agent", curve[-1][1], done)
print(f"{done - before:,} env steps in {time.perf_counter() - began:.0f} s")
learned = evaluate(random=False)
envs.close()
if writer:
    writer.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(*zip(*curve, strict=True), label="PPO")
axes.axhline(random, color="grey", linestyle="--", label="random")
axes.set(xlabel="env steps", ylabel="return per agent", title="simple_spread, Tianshou's PPO on TianshouVectorEnv")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"mean return per agent: random {random:.1f}, after {done} env steps {learned:.1f}")
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
