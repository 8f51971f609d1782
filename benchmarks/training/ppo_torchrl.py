"""PPO of TorchRL on its envs: its MAPPO loss, with a critic that sees what its agent sees (IPPO)."""

from __future__ import annotations

import settings as same
import torch
from exchange import Exchange
from mpe2 import simple_spread_v3
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import PettingZooWrapper, SerialEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor
from torchrl.objectives.multiagent import IPPOLoss

exchange = Exchange()
torch.manual_seed(exchange.seed)
torch.set_num_threads(1)


def net(outputs: int, gain: float) -> MultiAgentMLP:
    """Return a net of two hidden layers that all agents share."""
    made = MultiAgentMLP(
        18,
        outputs,
        n_agents=same.AGENTS,
        centralized=False,
        share_params=True,
        depth=len(same.HIDDEN),
        num_cells=same.HIDDEN,
        activation_class=nn.Tanh,
    )
    for parameter in made.parameters():
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:
            nn.init.orthogonal_(parameter, gain if len(parameter) == outputs else 2**0.5)
    return made


envs = SerialEnv(same.NUM_ENVS, lambda: PettingZooWrapper(simple_spread_v3.parallel_env()))
envs.set_seed(exchange.seed)
actor_net, critic_net = net(5, 0.01), net(1, 1.0)
actor = ProbabilisticActor(
    TensorDictModule(actor_net, in_keys=[("agent", "observation")], out_keys=[("agent", "logits")]),
    spec=envs.full_action_spec_unbatched,
    in_keys=[("agent", "logits")],
    out_keys=[("agent", "action")],
    distribution_class=Categorical,
    return_log_prob=True,
    log_prob_key=("agent", "log_prob"),
)
critic = TensorDictModule(critic_net, in_keys=[("agent", "observation")], out_keys=[("agent", "state_value")])
loss = IPPOLoss(
    actor,
    critic,
    clip_epsilon=same.CLIP,
    entropy_coeff=same.ENTROPY,
    critic_coeff=same.VALUE,
    loss_critic_type="l2",
    normalize_advantage_exclude_dims=(),
)
loss.set_keys(
    action=("agent", "action"),
    sample_log_prob=("agent", "log_prob"),
    value=("agent", "state_value"),
    reward=("agent", "reward"),
    done=("agent", "done"),
    terminated=("agent", "terminated"),
)
loss.make_value_estimator(gamma=same.GAMMA, lmbda=same.LAMBDA)
optimizer = torch.optim.Adam(loss.parameters(), lr=same.LEARNING_RATE)
collector = Collector(envs, actor, frames_per_batch=same.BATCH, total_frames=-1)
batches, env_steps = iter(collector), 0
exchange.ready()
while not exchange.stops(env_steps, actor_net.parameters()):
    data = next(batches)
    env_steps += data.numel()
    with torch.no_grad():
        loss.value_estimator(data)
    rows = data.reshape(-1)
    for _ in range(same.EPOCHS):
        for some in torch.randperm(len(rows)).split(same.MINIBATCH // same.AGENTS):
            values = loss(rows[some])
            optimizer.zero_grad()
            sum(value for name, value in values.items() if name.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), same.MAX_GRAD_NORM)
            optimizer.step()
collector.shutdown()
