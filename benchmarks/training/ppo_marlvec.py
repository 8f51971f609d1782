"""PPO on marlvec: `Collector`, `TorchPolicy` and learner connectors, with a loss written out."""

from __future__ import annotations

import settings as same
import torch
from exchange import Exchange
from torch import nn

import marlvec
from marlvec.connectors import GeneralAdvantageEstimation, Standardize
from marlvec.interop.torch import TorchPolicy

exchange = Exchange()
torch.manual_seed(exchange.seed)
torch.set_num_threads(1)


def tower(outputs: int, gain: float) -> nn.Sequential:
    """Return a net of two hidden layers."""
    layers: list[nn.Module] = []
    for inputs, width in zip([18, *same.HIDDEN], [*same.HIDDEN, outputs], strict=True):
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, gain if len(layers) > 2 * len(same.HIDDEN) else 2**0.5)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class Net(nn.Module):
    """An actor and a critic, both over one agent's observation."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = tower(5, 0.01), tower(1, 1.0)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs": self.actor(obs), "values": self.critic(obs)}


policy = TorchPolicy(Net())
optimizer = torch.optim.Adam(policy.module.parameters(), lr=same.LEARNING_RATE)


def update(batch: marlvec.SampleBatch, seed: int) -> None:
    """Learn from a batch by PPO's clipped loss."""
    for epoch in range(same.EPOCHS):
        for rows in batch.minibatches(same.MINIBATCH, seed=seed + epoch):
            part = rows.to_torch()
            distribution, found = policy.forward(rows)
            ratio = (distribution.logp(part["actions"]) - part["logp"]).exp()
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - same.CLIP, 1 + same.CLIP) * part["advantages"])
            value_loss = (found["values"] - part["value_targets"]).square().mean()
            optimizer.zero_grad()
            (same.VALUE * value_loss - gain.mean() - same.ENTROPY * distribution.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.module.parameters(), same.MAX_GRAD_NORM)
            optimizer.step()
    policy.note_update()


with marlvec.make("simple_spread", num_envs=same.NUM_ENVS, backend=exchange.variant) as envs:
    gae = GeneralAdvantageEstimation(same.GAMMA, same.LAMBDA, value_function=policy.values)
    collector = marlvec.Collector(envs, policy, learner_connectors=[gae, Standardize()], seed=exchange.seed)
    exchange.ready()
    env_steps = 0
    while not exchange.stops(env_steps, policy.module.actor.parameters()):
        batch = collector.collect(env_steps=same.BATCH)
        env_steps += batch.env_steps
        update(batch["main"], env_steps)
