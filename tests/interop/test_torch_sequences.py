"""`TorchPolicy` on padded sequences (B, T, …): the numbers of the steps one by one, and gradients through time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import AddLastObs, GeneralAdvantageEstimation, LearnerPipeline, PadSequences, RnnState, Rows
from marlvec.errors import ContractError
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.players import sync
from tests.selfplay.nim import Nim

torch = pytest.importorskip("torch", reason="torch is not installed: TorchPolicy cannot be tried here")

OBS = Box(-1, 1, (3,), np.float32)
SPACES = {
    "discrete": (Discrete(4, start=3), 4),  # zeros, which are in the padding, are no actions of it
    "multi": (MultiDiscrete([2, 3], start=[1, 1]), 5),
    "box": (Box(-1, 1, (2,), np.float32), 4),
    "tree": (Dict(move=Box(-1, 1, (1,), np.float32), pick=Discrete(3)), 5),
}


class Recurrent(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is Any where it is not installed
    """A GRU cell, and a count of the calls for each row; notes how many rows each call had."""

    def __init__(self, inputs: int, outputs: int, *, sees_zeros: bool = False) -> None:
        super().__init__()
        self.sees_zeros = sees_zeros
        self.cell, self.head = torch.nn.GRUCell(inputs, 8), torch.nn.Linear(8, outputs)
        self.value, self.calls = torch.nn.Linear(8, 1), []

    def forward(self, obs: Any, state: Any) -> Any:
        assert self.sees_zeros or not bool((obs == 0).all(dim=1).any()), "padding reached the module"
        self.calls.append(len(obs))
        h = self.cell(obs, state["h"][0])
        out = {"h": (h,), "count": state["count"] + 1}
        return {"inputs": self.head(h), "values": self.value(h), "state_out": out, "twice": {"h": 2 * h}}


INITIAL = {"h": (np.zeros(8, np.float32),), "count": np.zeros((), np.int64)}


def policy_of(module: Any) -> Any:
    from marlvec.interop.torch import TorchPolicy

    return TorchPolicy(module)


def collected(policy: Any, space: Space[Any], env_steps: int = 60) -> Any:
    """Rows of episodes of several lengths, some of them cut by the end of the batch, and states that go on from one."""
    with SyncVectorEnv([lambda i=i: SampledEnv(OBS, space, env_index=i) for i in range(3)]) as envs:
        collector = Collector(envs, policy, agent_connectors=[RnnState(INITIAL)], seed=0)
        collector.collect(env_steps=10)
        return collector.collect(env_steps=env_steps)["main"]


def tensors(tree: Any) -> Any:
    return marlvec.trees.map_tree(torch.tensor, tree)


def same(found: Any, wanted: Any, mask: Any) -> None:
    """Check (B, T, …) tensors against arrays, and zeros in the padding."""
    for (path, one), (_, other) in zip(
        marlvec.trees.tree_leaves(found), marlvec.trees.tree_leaves(wanted), strict=True
    ):
        one = one.detach().numpy()
        np.testing.assert_allclose(one[mask], other[mask], rtol=1e-5, atol=1e-6, err_msg=path)
        assert not one[~mask].any(), path


@pytest.mark.parametrize("max_len", [1, 4, 7, 100])
@pytest.mark.parametrize("name", SPACES)
def test_sequences_give_what_was_collected_step_by_step(name: str, max_len: int) -> None:
    space, k = SPACES[name]
    torch.manual_seed(0)
    policy = policy_of(Recurrent(3, k))
    rows = collected(policy, space)
    batch = PadSequences(max_len)(rows)
    policy.module.calls.clear()
    distribution, columns = policy.forward(batch)
    mask = batch["loss_mask"]
    assert sum(policy.module.calls) == len(rows)
    assert len(policy.module.calls) == batch["seq_lens"].max() <= max_len
    same(distribution.logp(tensors(batch["actions"])), batch["logp"], mask)
    for column in ("values", "state_out", "twice"):
        same(columns[column], batch[column], mask)
    assert columns["values"].shape == mask.shape
    flat, _ = policy.forward(rows)
    np.testing.assert_allclose(distribution.entropy().detach()[mask], flat.entropy().detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.values(batch)[mask], rows["values"], rtol=1e-5, atol=1e-6)
    best = distribution.mode()
    for (_, one), (_, other) in zip(
        marlvec.trees.tree_leaves(best), marlvec.trees.tree_leaves(flat.mode()), strict=True
    ):
        np.testing.assert_allclose(one.detach()[mask], other.detach(), rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_the_states_of_a_sequence() -> None:
    torch.manual_seed(0)
    module = Recurrent(3, 4)
    policy = policy_of(module)
    rows = collected(policy, Discrete(4))
    distribution, columns = policy.forward(PadSequences(6)(rows))
    (distribution.entropy().sum() + columns["values"].sum()).backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    total = torch.zeros(())  # by hand: every sequence by itself, one row at a time
    for unroll in np.unique(rows["unroll_id"]):
        mine = rows.take(rows["unroll_id"] == unroll)
        for i in range(len(mine)):
            if i % 6 == 0:
                state = {"h": (torch.tensor(mine["state_in"]["h"][0][i : i + 1]),), "count": torch.zeros(1)}
            out = module(torch.tensor(mine["obs"][i : i + 1]), state)
            state = out["state_out"]
            p = torch.softmax(out["inputs"], dim=-1)
            total = total - (p * p.log()).sum() + out["values"].sum()
    total.backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5)
    one_step = policy.forward(rows)  # with the states of the batch, nothing flows from step to step
    module.zero_grad()
    (one_step[0].entropy().sum() + one_step[1]["values"].sum()).backward()
    assert (found["cell.weight_hh"] - module.cell.weight_hh.grad).abs().max() > 1e-3


def test_masks_and_phantom_rows_come_along() -> None:
    with marlvec.make(Nim, 3, backend="sync") as envs:
        policy = policy_of(Recurrent(2, 3, sees_zeros=True))  # as a last observation of this game
        chain = [RnnState(INITIAL)]
        collector = Collector(envs, policy, agent_connectors=chain, seed=0)
        rows = Rows(collector.collect(env_steps=40)["main"])
    assert not rows["action_mask"].all()
    longer = AddLastObs()(rows)
    batch = PadSequences(100)(longer)
    real = batch["loss_mask"]
    probabilities = policy.probabilities(batch)
    assert (probabilities[real][~batch["action_mask"][real]] == 0).all()
    np.testing.assert_allclose(probabilities[real], policy.probabilities(rows), rtol=1e-4, atol=1e-5)
    # A phantom row goes on from the state of the row before it: what a critic bootstraps from.
    phantom = batch["phantom"]
    assert phantom.any()
    np.testing.assert_allclose(policy.values(batch)[phantom], policy.values(longer)[longer["phantom"]], rtol=1e-4)


def test_a_module_without_state_is_called_once_for_all_true_steps() -> None:
    with sync("parallel", 2, 2) as envs:
        width = envs.agent_observation_space(envs.agents[0]).shape[0]
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 5))
        policy = policy_of(net)
        rows = Rows(Collector(envs, policy, seed=0).collect(env_steps=40)["main"])
    batch = PadSequences(5)(rows)
    mask = batch["loss_mask"]
    assert not mask.all()
    net.train()  # with statistics of the batch, which padding would move
    padded, _ = policy.forward(batch)
    flat, _ = policy.forward(rows)
    found = padded.logp(torch.tensor(batch["actions"]))
    assert torch.equal(found[torch.tensor(mask)], flat.logp(torch.tensor(rows["actions"])))
    assert not found[~torch.tensor(mask)].any()


def test_a_module_that_takes_whole_sequences_itself() -> None:
    class Lstm(torch.nn.Module):  # type: ignore[misc,name-defined]  # likewise
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(3, 8, batch_first=True)
            self.head, self.value = torch.nn.Linear(8, 4), torch.nn.Linear(8, 1)
            self.shapes: list[Any] = []

        def forward(self, obs: Any, state: Any) -> Any:
            out = self.forward_sequences(obs[:, None], state)
            return {name: out[name] if name == "state_out" else out[name][:, 0] for name in out}

        def forward_sequences(self, obs: Any, state: Any) -> Any:
            self.shapes.append(tuple(obs.shape))
            h, (last_h, last_c) = self.lstm(obs, (state[0][None], state[1][None]))
            return {"inputs": self.head(h), "values": self.value(h), "state_out": (last_h[0], last_c[0])}

    torch.manual_seed(0)
    policy = policy_of(Lstm())
    with SyncVectorEnv([lambda i=i: SampledEnv(OBS, Discrete(4), env_index=i) for i in range(3)]) as envs:
        zeros = np.zeros(8, np.float32)
        gae = GeneralAdvantageEstimation(value_function=policy.values)
        learner = LearnerPipeline([gae, PadSequences(5)])
        options: dict[str, Any] = {"agent_connectors": [RnnState((zeros, zeros))], "learner_connectors": learner}
        batch = Collector(envs, policy, seed=0, **options).collect(env_steps=50)["main"]
    policy.module.shapes.clear()
    distribution, columns = policy.forward(batch)
    assert policy.module.shapes == [batch["obs"].shape]
    same(distribution.logp(tensors(batch["actions"])), batch["logp"], batch["loss_mask"])
    same(columns["values"], batch["values"], batch["loss_mask"])
    assert [tuple(leaf.shape) for leaf in columns["state_out"]] == [(len(batch), 8)] * 2


def test_invalid_recurrent_outputs_are_named() -> None:
    class Forgets(Recurrent):
        def forward(self, obs: Any, state: Any) -> Any:
            out = super().forward(obs, state)
            del out["state_out"]
            return out

    class Breaks(Recurrent):
        def forward(self, obs: Any, state: Any) -> Any:
            out = super().forward(obs, state)
            worn = (state["count"] >= 2)[:, None]
            return {**out, "inputs": out["inputs"].masked_fill(worn, float("nan"))}

    rows = Rows(
        obs=np.ones((7, 3), np.float32),
        unroll_id=np.array([0, 0, 1, 1, 1, 1, 1]),
        t=np.arange(7),
        state_in={"h": (np.zeros((7, 8), np.float32),), "count": np.zeros(7, np.int64)},
    )
    batch = PadSequences(10)(rows)
    for module, message in (
        (Forgets(3, 4), "expected 'state_out', got only"),
        (Breaks(3, 4), "expected finite 'inputs', got NaN, first for step 2 of sequence 1"),
    ):
        policy = policy_of(module)
        policy.setup(OBS, Discrete(4), seed=0)
        with pytest.raises(ContractError, match=message):
            policy.forward(batch)
