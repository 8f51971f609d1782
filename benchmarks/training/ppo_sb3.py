"""PPO of Stable-Baselines3 on SuperSuit's envs, or on marlvec's (variant ``marlvec``): each agent is a row."""

from __future__ import annotations

import settings as same
import torch
from exchange import Exchange
from stable_baselines3 import PPO
from stable_baselines3.common.utils import set_random_seed
from torch import nn

exchange = Exchange()
torch.set_num_threads(1)
if exchange.variant == "marlvec":
    import marlvec
    from marlvec.interop.sb3 import SB3VecEnv

    envs = SB3VecEnv(marlvec.make("simple_spread", num_envs=same.NUM_ENVS))
    envs.seed(exchange.seed)
else:
    import supersuit
    from mpe2 import simple_spread_v3

    rows = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    envs = supersuit.concat_vec_envs_v1(rows, same.NUM_ENVS, num_cpus=0, base_class="stable_baselines3")
    envs.venv.reset(seed=exchange.seed)  # SuperSuit's envs have no seed(), which PPO(seed=) calls
set_random_seed(exchange.seed)
model = PPO(
    "MlpPolicy",
    envs,
    learning_rate=same.LEARNING_RATE,
    n_steps=same.STEPS,
    batch_size=same.MINIBATCH,
    n_epochs=same.EPOCHS,
    gamma=same.GAMMA,
    gae_lambda=same.LAMBDA,
    clip_range=same.CLIP,
    ent_coef=same.ENTROPY,
    vf_coef=same.VALUE,
    max_grad_norm=same.MAX_GRAD_NORM,
    policy_kwargs={
        "net_arch": same.HIDDEN,
        "activation_fn": nn.Tanh,
        "optimizer_kwargs": {},  # Adam's own epsilon, as in the other scripts
    },
    device="cpu",
)
actor = [*model.policy.mlp_extractor.policy_net.parameters(), *model.policy.action_net.parameters()]
exchange.ready()
while not exchange.stops(model.num_timesteps // same.AGENTS, actor):
    model.learn(same.ROWS, reset_num_timesteps=False)
