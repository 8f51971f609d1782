"""TorchRL's own parts on marlvec's view: collectors, transforms, MAPPO's and IPPO's losses, masks in distributions."""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from typing import Any

import pytest

from marlvec.errors import MissingExtraError

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

with warnings.catch_warnings():  # it warns of classes of its own when they are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import Collector

from tensordict.nn import TensorDictModule, TensorDictSequential  # noqa: E402
from torch.distributions import Categorical  # noqa: E402
from torchrl.envs import Compose, InitTracker, RewardSum, StepCounter, TransformedEnv  # noqa: E402
from torchrl.modules import MaskedCategorical, MultiAgentMLP, ProbabilisticActor  # noqa: E402
from torchrl.objectives.multiagent import IPPOLoss, MAPPOLoss  # noqa: E402

from marlvec.interop.torchrl import TorchRLEnv  # noqa: E402
from marlvec.testing.scripted import Script, ScriptedParallelEnv  # noqa: E402

N = 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def actor_of(env: Any, group: str, inputs: int, actions: int, agents: int, *, masked: bool) -> Any:
    net = MultiAgentMLP(inputs, actions, agents, centralized=False, share_params=True, depth=1, num_cells=16)

    in_keys = {"logits": (group, "logits")} | ({"mask": (group, "action_mask")} if masked else {})
    return ProbabilisticActor(
        TensorDictModule(
            torch.nn.Sequential(torch.nn.Flatten(-3), Cast(), net) if masked else net,
            in_keys=[(group, "observation")],
            out_keys=[(group, "logits")],
        ),
        spec=env.full_action_spec[group, "action"],
        in_keys=in_keys if masked else [(group, "logits")],
        out_keys=[(group, "action")],
        distribution_class=MaskedCategorical if masked else Categorical,
        return_log_prob=True,
        log_prob_key=(group, "log_prob"),
    )


class Cast(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.float()


def test_a_collectors_batches_are_whole_episodes_in_a_row() -> None:
    """What is next is where the following step begins, but for a new episode; sums and counts begin with it."""
    env = TransformedEnv(
        TorchRLEnv.make("simple_spread", N, backend="sync", max_episode_steps=7),
        Compose(RewardSum(in_keys=[("agent", "reward")], out_keys=[("agent", "sum")]), StepCounter(), InitTracker()),
    )
    actor = actor_of(env, "agent", 18, 5, 3, masked=False)
    collector = Collector(
        env, actor, frames_per_batch=N * 10, total_frames=N * 30, auto_register_policy_transforms=False
    )
    data = torch.cat([batch.clone() for batch in collector], dim=1)
    collector.shutdown()
    assert env.base_env.envs.closed
    assert data.shape == (N, 30)
    done = data["next", "done"][..., 0]
    assert (done == (torch.arange(1, 31) % 7 == 0)).all()
    obs, following = data["agent", "observation"], data["next", "agent", "observation"]
    same = (obs[:, 1:] == following[:, :-1]).flatten(2).all(dim=2)
    assert (same == ~done[:, :-1]).all()
    assert (data["is_init"][:, 1:, 0] == done[:, :-1]).all()
    assert (data["next", "step_count"][..., 0] == torch.arange(30) % 7 + 1).all()
    rewards = data["next", "agent", "reward"]
    torch.testing.assert_close(data["next", "agent", "sum"][:, 6], rewards[:, :7].sum(dim=1))
    torch.testing.assert_close(data["next", "agent", "sum"][:, 13], rewards[:, 7:14].sum(dim=1))


def test_after_an_agents_death_the_roots_done_ends_episodes_and_traj_ids_do_not() -> None:
    """As docs/libraries/torchrl.md says of TorchRL's `Collector`; the first agent ends in step 2 of 6."""
    script = Script([0, 0], [2, 6], ["terminated"] * 2)
    env = TorchRLEnv.make(partial(ScriptedParallelEnv, script, agent_num=2), 2, backend="sync", group_map="each")
    collector = Collector(env, None, frames_per_batch=24, total_frames=24)
    (data,) = (batch.clone() for batch in collector)
    collector.shutdown()
    ids = data["collector", "traj_ids"]
    changes = (ids[:, 1:] != ids[:, :-1]).tolist()
    assert changes == [[False, True, True, True, True, True, False, True, True, True, True]] * 2
    done = data["next", "done"][..., 0].long()
    assert (done.cumsum(-1) - done).tolist() == [[0] * 6 + [1] * 6] * 2


@pytest.mark.parametrize(("loss_class", "centralized"), [(MAPPOLoss, True), (IPPOLoss, False)])
def test_the_losses_of_mappo_and_ippo_learn_from_each_group(loss_class: Any, centralized: bool) -> None:
    """Two groups of unequal agents; an update changes the actor and the critic of its own group."""
    env = TorchRLEnv.make("simple_tag", N, backend="sync", max_episode_steps=5)
    sizes = {"adversary": (16, 3), "agent": (14, 1)}
    actors = {group: actor_of(env, group, inputs, 5, n, masked=False) for group, (inputs, n) in sizes.items()}
    policy = TensorDictSequential(*actors.values())
    with torch.no_grad():
        data = env.rollout(12, policy, break_when_any_done=False)
    assert data["next", "done"].sum() == 2 * N
    for group, (inputs, n) in sizes.items():
        critic = TensorDictModule(
            MultiAgentMLP(inputs, 1, n, centralized=centralized, share_params=True, depth=1, num_cells=16),
            in_keys=[(group, "observation")],
            out_keys=[(group, "state_value")],
        )
        loss = loss_class(actors[group], critic)
        loss.set_keys(
            action=(group, "action"),
            sample_log_prob=(group, "log_prob"),
            value=(group, "state_value"),
            reward=(group, "reward"),
            done=(group, "done"),
            terminated=(group, "terminated"),
        )
        loss.make_value_estimator(gamma=0.9, lmbda=0.9)
        with torch.no_grad():
            loss.value_estimator(data)
        assert data["advantage"].shape == (N, 12, n, 1)
        values = loss(data.reshape(-1))
        sum(value for name, value in values.items() if name.startswith("loss_")).backward()
        gradients = [parameter.grad for parameter in loss.parameters()]
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert sum(bool(gradient.any()) for gradient in gradients) > len(gradients) / 2
        # A step that was cut off is worth what follows; the value of the state after the end is not forgotten.
        cut = data["next", group, "truncated"][..., 0]
        assert (cut.all(dim=-1) == data["next", "done"][..., 0]).all()
        assert not data["next", group, "terminated"].any()
    env.close()


def test_masks_go_into_distributions() -> None:
    """Whole games of connect four; nobody ever does what its mask forbids, or the env would raise."""
    pytest.importorskip("pygame")
    env = TorchRLEnv.make("connect_four", N, backend="sync", validate="strict")
    actor = actor_of(env, "player", 84, 7, 2, masked=True)
    with torch.no_grad():
        data = env.rollout(90, actor, break_when_any_done=False)
    allowed = data["player", "action_mask"].gather(-1, data["player", "action"].unsqueeze(-1))
    assert allowed.all()
    assert not data["player", "action_mask"].all()
    assert data["next", "done"].sum() >= 2 * N
    won = data["next", "player", "reward"][data["next", "done"][..., 0]]
    assert (won.sum(dim=(1, 2)) == 0).all(), "one wins what the other loses"
    env.close()


def test_to_moves_tensors_to_the_device() -> None:
    env = TorchRLEnv.make("simple_spread", 2, backend="sync", device="cpu")
    td = env.rand_step(env.reset())
    assert td.device == td["next"].device == td["agent"].device == torch.device("cpu")
    env.close()


def test_without_torchrl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marlvec.interop.torchrl")
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(MissingExtraError, match=r"TorchRLEnv needs torchrl.*pip install 'marlvec\[torchrl\]'"):
        importlib.import_module("marlvec.interop.torchrl")
