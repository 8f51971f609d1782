"""PPO of RLlib's new API stack on its own wrapper of PettingZoo's envs, in one process."""

from __future__ import annotations

import logging

import ray
import settings as same
import torch
from exchange import Exchange
from mpe2 import simple_spread_v3
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

exchange = Exchange()
torch.set_num_threads(1)
register_env("spread", lambda _: ParallelPettingZooEnv(simple_spread_v3.parallel_env()))
config = (
    PPOConfig()
    .environment("spread")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=same.NUM_ENVS, rollout_fragment_length=same.STEPS)
    .multi_agent(policies={"main"}, policy_mapping_fn=lambda *_, **__: "main")
    .rl_module(
        model_config=DefaultModelConfig(
            fcnet_hiddens=same.HIDDEN,
            fcnet_activation="tanh",
            fcnet_kernel_initializer="orthogonal_",
            fcnet_kernel_initializer_kwargs={"gain": 2**0.5},
            fcnet_bias_initializer="zeros_",
            head_fcnet_kernel_initializer="orthogonal_",
            head_fcnet_kernel_initializer_kwargs={"gain": 0.01},
            head_fcnet_bias_initializer="zeros_",
            vf_share_layers=False,
        )
    )
    .training(
        train_batch_size_per_learner=same.BATCH,
        minibatch_size=same.MINIBATCH,
        num_epochs=same.EPOCHS,
        lr=same.LEARNING_RATE,
        gamma=same.GAMMA,
        lambda_=same.LAMBDA,
        clip_param=same.CLIP,
        entropy_coeff=same.ENTROPY,
        vf_loss_coeff=same.VALUE,
        vf_clip_param=float("inf"),
        use_kl_loss=False,
        grad_clip=same.MAX_GRAD_NORM,
        grad_clip_by="global_norm",
    )
    .debugging(seed=exchange.seed, log_level="ERROR")
)
ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
algo = config.build_algo()
module, env_steps = algo.get_module("main"), 0
actor = [*module.encoder.actor_encoder.parameters(), *module.pi.parameters()]
exchange.ready()
while not exchange.stops(env_steps, actor):
    found = algo.train()["env_runners"]
    env_steps = int(found["num_env_steps_sampled_lifetime"])
algo.stop()
ray.shutdown()
