"""RLlib's PPO on marlvec's envs: three agents spread over three landmarks, and share one policy.

`RLlibEnvRunner` steps all envs in one vectorizer, and `RLlibConnector` has marlvec's connectors prepare what the policy
sees; all else here is RLlib's. In the end the policy plays whole episodes against random moves, and the returns on the
way are drawn. With --resume weights, optimizer and what connectors learned go on, and new episodes begin, which RLlib
cannot save.
"""

import argparse
import logging
import time
from pathlib import Path

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--seed", type=int, default=0, help="of envs and weights")
parser.add_argument("--total-timesteps", type=int, default=1_600, help="env steps in all; 200000 take some minutes")
parser.add_argument("--num-envs", type=int, default=32, help="envs at once")
parser.add_argument("--backend", default="auto", help="auto: compiled envs if numba is there")
parser.add_argument("--batch", type=int, default=800, help="env steps between two updates")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/rllib_spread"), help="folder for all that is kept")
parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
parser.add_argument("--track", action="store_true", help="write TensorBoard logs, too")
args = parser.parse_args()  # before torch is imported, which takes seconds
if args.resume != (args.checkpoint / "last.npz").exists():
    parser.error(f"--resume goes on with the run in {args.checkpoint}; without it there must be none there")

try:
    import numpy as np
    import ray
    from matplotlib.figure import Figure
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    import marlvec
    from marlvec.connectors import AgentPipeline, NormalizeObs
    from marlvec.interop.rllib import RLlibConnector, RLlibEnvRunner

    if args.track:
        from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise SystemExit(f"{error}; this script needs: pip install 'marlvec[rllib,plot,tensorboard]'") from None

for name in ("ray", "ray.rllib", "ray.tune"):
    logging.getLogger(name).setLevel(logging.ERROR)

config = (
    PPOConfig()
    .environment("simple_spread", env_config={"marlvec": {"backend": args.backend}})
    .env_runners(
        env_runner_cls=RLlibEnvRunner,
        num_env_runners=0,
        num_envs_per_env_runner=args.num_envs,
        rollout_fragment_length=args.batch // args.num_envs,
        env_to_module_connector=lambda env, spaces, device: RLlibConnector(AgentPipeline([NormalizeObs(clip=5)])),
    )
    .multi_agent(policies={"everyone"}, policy_mapping_fn=lambda agent, episode, **kwargs: "everyone")
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
    .training(
        train_batch_size=args.batch,
        minibatch_size=args.batch * 3 // 4,
        num_epochs=8,
        lr=7e-4,
        gamma=0.95,
        lambda_=0.95,
        entropy_coeff=0.005,
        vf_clip_param=1e6,
        use_kl_loss=False,
        clip_param=0.2,
        grad_clip=0.5,
    )
    .debugging(seed=args.seed, log_level="ERROR")
)

ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
algo = config.build_algo()
runner = algo.env_runner


class Learned:
    """What RLlib knows as plain data: weights, Adam's state, what its connectors have learned."""

    def state_dict(self) -> dict:
        return algo.get_state(components=["learner_group", "env_runner/env_to_module_connector"])

    def load_state_dict(self, state: dict) -> None:
        algo.set_state(state)


learner = {"algorithm": Learned()}
progress = marlvec.load_checkpoint(args.checkpoint, learner=learner) if args.resume else {"steps": [], "returns": []}
steps, returns = progress["steps"], progress["returns"]
done = before = steps[-1] if steps else 0
started = time.perf_counter()
writer = SummaryWriter(args.checkpoint / "logs") if args.track else None
while done < args.total_timesteps:
    result = algo.train()["env_runners"]
    done = int(result["num_env_steps_sampled_lifetime"])
    steps.append(done)
    returns.append(result.get("episode_return_mean", np.nan) / 3)  # of an agent; there is none before an episode's end
    progress = {"steps": steps, "returns": returns}
    marlvec.save_checkpoint(args.checkpoint, learner=learner, progress=progress, score=returns[-1])
    if writer:
        writer.add_scalar("return per agent", returns[-1], done)
    if len(steps) % 10 == 0:
        print(f"{done:,} env steps: {returns[-1]:.1f}", flush=True)
print(f"{done - before:,} env steps in {time.perf_counter() - started:.0f} s")


def play(**how) -> float:
    """Mean return per agent over three whole episodes an env."""
    episodes = runner.sample(num_episodes=3 * args.num_envs, **how)
    return float(np.mean([episode.get_return() / 3 for episode in episodes]))


learnt, random = play(explore=False), play(random_actions=True)
algo.stop()
ray.shutdown()
if writer:
    writer.close()

axes = Figure(figsize=(5, 2.5), layout="constrained").subplots()
axes.plot(steps, returns, label="PPO, exploring")
axes.axhline(random, color="grey", linestyle="--", label="random moves")
axes.set(xlabel="env steps", ylabel="return per agent", title="simple_spread, RLlib on marlvec")
axes.legend()
axes.figure.savefig(args.checkpoint / "return.png", dpi=80)
print(f"mean return per agent: random {random:.1f}, after {done} env steps {learnt:.1f}")
print(f"wrote last.npz, best.npz, return.png{', logs' * args.track} into {args.checkpoint}")
