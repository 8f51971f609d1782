"""PPO in one file, as CleanRL writes it for PettingZoo, on SuperSuit's envs: each agent is a row.

As in CleanRL, the time limit is an end like any other. Variant ``bootstrap`` adds the value of the last observation.
"""

from __future__ import annotations

import numpy as np
import settings as same
import supersuit
import torch
from exchange import Exchange
from mpe2 import simple_spread_v3
from torch import nn
from torch.distributions import Categorical

exchange = Exchange()
torch.manual_seed(exchange.seed)
torch.set_num_threads(1)

env = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
envs = supersuit.concat_vec_envs_v1(env, same.NUM_ENVS, num_cpus=0, base_class="gymnasium")


def tower(outputs: int, gain: float) -> nn.Sequential:
    """Return a net of two hidden layers."""
    layers: list[nn.Module] = []
    for inputs, width in zip([18, *same.HIDDEN], [*same.HIDDEN, outputs], strict=True):
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, gain if len(layers) > 2 * len(same.HIDDEN) else 2**0.5)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


actor, critic = tower(5, 0.01), tower(1, 1.0)
parameters = [*actor.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=same.LEARNING_RATE)

num_rows = same.NUM_ENVS * same.AGENTS
obs = torch.zeros(same.STEPS, num_rows, 18)
actions = torch.zeros(same.STEPS, num_rows, dtype=torch.int64)
logprobs, rewards, dones, values = (torch.zeros(same.STEPS, num_rows) for _ in range(4))
next_obs = torch.as_tensor(envs.reset(seed=exchange.seed)[0])
env_steps = 0
exchange.ready()
while not exchange.stops(env_steps, actor.parameters()):
    for t in range(same.STEPS):
        obs[t] = next_obs
        with torch.no_grad():
            choice = Categorical(logits=actor(next_obs))
            actions[t] = choice.sample()
            logprobs[t], values[t] = choice.log_prob(actions[t]), critic(next_obs).flatten()
        seen, reward, terminated, truncated, infos = envs.step(actions[t].numpy())
        next_obs, rewards[t] = torch.as_tensor(seen), torch.as_tensor(reward)
        if exchange.variant == "bootstrap" and truncated.any():  # simple_spread's envs all end in the same step
            last_obs = torch.as_tensor(np.stack([info["terminal_observation"] for info in infos]))
            with torch.no_grad():
                rewards[t] += same.GAMMA * critic(last_obs).flatten()
        dones[t] = torch.as_tensor(np.logical_or(terminated, truncated))
    env_steps += same.BATCH

    with torch.no_grad():  # generalized advantage estimation
        advantages, carried, next_values = torch.zeros_like(rewards), 0.0, critic(next_obs).flatten()
        for t in reversed(range(same.STEPS)):
            continues = 1.0 - dones[t]
            delta = rewards[t] + same.GAMMA * next_values * continues - values[t]
            advantages[t] = carried = delta + same.GAMMA * same.LAMBDA * continues * carried
            next_values = values[t]
        targets = (advantages + values).flatten()

    columns = obs.flatten(0, 1), actions.flatten(), logprobs.flatten(), advantages.flatten(), targets
    for _ in range(same.EPOCHS):
        for some in torch.randperm(same.ROWS).split(same.MINIBATCH):
            b_obs, b_actions, b_logprobs, b_advantages, b_targets = (column[some] for column in columns)
            choice = Categorical(logits=actor(b_obs))
            ratio = (choice.log_prob(b_actions) - b_logprobs).exp()
            b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
            gain = torch.min(ratio * b_advantages, ratio.clamp(1 - same.CLIP, 1 + same.CLIP) * b_advantages)
            value_loss = (critic(b_obs).flatten() - b_targets).square().mean()
            optimizer.zero_grad()
            (same.VALUE * value_loss - gain.mean() - same.ENTROPY * choice.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(parameters, same.MAX_GRAD_NORM)
            optimizer.step()
