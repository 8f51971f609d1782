"""Torch modules as policies, step by step and on padded sequences."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import AddLastObs, GeneralAdvantageEstimation, LearnerPipeline, PadSequences, RnnState, Rows
from marlvec.errors import ArgumentError, ContractError, MissingExtraError, StateError, UnsupportedSpaceError
from marlvec.policies import PolicyMap, RandomPolicy
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.players import sync
from tests.selfplay.nim import Nim

torch = pytest.importorskip("torch", reason="torch is not installed: TorchPolicy cannot be tried here")


# --- torch modules as policies


OBS = Box(-1, 1, (3,), np.float32)
HIDE_TORCH = "import sys; sys.modules['torch'] = None; import marlvec.interop.torch"


@pytest.mark.slow("steps or trains with another library")
def test_without_torch_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = subprocess.run([sys.executable, "-c", HIDE_TORCH], capture_output=True, text=True)
    assert "marlvec.errors.MissingExtraError: TorchPolicy needs torch" in found.stderr
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "marlvec.interop.torch", raising=False)
    with pytest.raises(MissingExtraError, match=r"pytorch\.org"):
        importlib.import_module("marlvec.interop.torch")


def policy_of(module: Any, space: Any, seed: int = 0, **options: Any) -> Any:
    from marlvec.interop.torch import TorchPolicy

    policy = TorchPolicy(module, **options)
    policy.setup(OBS, space, seed=seed)
    return policy


class Told(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is Any where it is not installed
    """Says what it was built with, whatever it sees; notes what it was given."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self.said = said
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.given: list[Any] = []

    def forward(self, *given: Any) -> Any:
        self.given.append(given)
        n = len(given[0]["a"] if isinstance(given[0], dict) else given[0])
        if isinstance(self.said, dict):
            return {name: torch.as_tensor(value).expand(n, *np.shape(value)) for name, value in self.said.items()}
        return (torch.as_tensor(self.said, dtype=torch.float32) * self.scale).expand(n, -1)


def rows(n: int, **columns: Any) -> Rows:
    ids = np.arange(n)
    given = {"env_id": ids // 2, "agent_index": ids % 2, "obs": np.zeros((n, 3), np.float32), "t": ids * 0}
    return Rows({**given, **columns})


LOGITS = [0.0, 1.0, -1.0, 2.0]
P = np.exp(LOGITS) / np.exp(LOGITS).sum()


def test_a_discrete_head_draws_by_its_logits_and_says_how_likely_it_was() -> None:
    policy = policy_of(Told(LOGITS), Discrete(4, start=-2))
    actions, columns = policy.act(rows(20000))
    assert actions.dtype == np.int64
    counts = np.bincount(actions + 2, minlength=4)
    assert (np.abs(counts - 20000 * P) < 5 * np.sqrt(20000 * P * (1 - P))).all()
    np.testing.assert_allclose(columns["logp"], np.log(P)[actions + 2], rtol=1e-5)
    assert columns["logp"].dtype == np.float32
    best, columns = policy.act(rows(3), explore=False)
    assert best.tolist() == [1, 1, 1]
    np.testing.assert_allclose(columns["logp"], np.log(P)[[3, 3, 3]], rtol=1e-5)


def test_masked_actions_are_never_drawn_and_others_follow_the_logits() -> None:
    mask = np.tile([True, False, True, True], (20000, 1))
    policy = policy_of(Told([0.0, 100.0, -1.0, 2.0]), Discrete(4))
    actions, columns = policy.act(rows(20000, action_mask=mask))
    p = np.where([1, 0, 1, 1], np.exp([0.0, 0.0, -1.0, 2.0]), 0)
    p /= p.sum()
    counts = np.bincount(actions, minlength=4)
    assert counts[1] == 0
    assert (np.abs(counts - 20000 * p) <= 5 * np.sqrt(20000 * p * (1 - p))).all()
    np.testing.assert_allclose(columns["logp"], np.log(p[actions]), rtol=1e-5)
    assert policy.act(rows(2, action_mask=mask[:2]), explore=False)[0].tolist() == [3, 3]
    mask[1] = False
    with pytest.raises(ContractError, match="env 0, agent 1: expected an allowed action"):
        policy.act(rows(20000, action_mask=mask))
    with pytest.raises(ContractError, match="expected 4 entries, one per choice, got 3"):
        policy.act(rows(2, action_mask=np.ones((2, 3), np.bool_)))


def test_a_multidiscrete_head_has_its_dimensions_one_after_the_other() -> None:
    space = MultiDiscrete([2, 3], start=[5, -1])
    logits = [0.0, 1.0, 2.0, 0.0, -1.0]
    policy = policy_of(Told(logits), space)
    actions, columns = policy.act(rows(500))
    assert all(space.contains(action) for action in actions)
    p, q = np.exp(logits[:2]), np.exp(logits[2:])
    p, q = p / p.sum(), q / q.sum()
    np.testing.assert_allclose(columns["logp"], np.log(p[actions[:, 0] - 5] * q[actions[:, 1] + 1]), rtol=1e-5)
    assert policy.act(rows(2), explore=False)[0].tolist() == [[6, -1]] * 2
    mask = np.tile([True, False, False, True, True], (500, 1))
    masked, _ = policy.act(rows(500, action_mask=mask))
    assert set(masked[:, 0]) == {5}
    assert set(masked[:, 1]) == {0, 1}
    mask[3, 2:] = False
    with pytest.raises(ContractError, match="env 1, agent 1: expected an allowed action"):
        policy.act(rows(500, action_mask=mask))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_box_head_is_a_diagonal_gaussian(dtype: Any) -> None:
    mean, log_std = np.array([1.0, -2.0]), np.array([0.5, -1.0])
    policy = policy_of(Told([*mean, *log_std]), Box(-1, 1, (2, 1), dtype))
    actions, columns = policy.act(rows(20000))
    assert (actions.shape, actions.dtype) == ((20000, 2, 1), dtype)
    flat, std = actions[:, :, 0], np.exp(log_std)
    np.testing.assert_allclose(flat.mean(axis=0), mean, atol=5 * std.max() / math.sqrt(20000))
    np.testing.assert_allclose(flat.std(axis=0), std, rtol=0.03)
    z = (flat - mean) / std
    expected = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(axis=1)
    np.testing.assert_allclose(columns["logp"], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(policy.act(rows(2), explore=False)[0][:, :, 0], [mean, mean], rtol=1e-6)


def test_heads_of_a_tree_stand_leaf_by_leaf() -> None:
    space = Dict(move=Box(-1, 1, (1,), np.float32), pick=Tuple((Discrete(2), MultiBinary(2))))
    policy = policy_of(Told([3.0, -20.0, 0.0, 1.0, 0.0, 9.0, 9.0, 0.0]), space)
    actions, columns = policy.act(rows(400))
    np.testing.assert_allclose(actions["move"], 3.0, atol=1e-4)
    assert 0 < actions["pick"][0].sum() < 400
    assert actions["pick"][1].dtype == np.int8
    assert (actions["pick"][1].mean(axis=0).round(1) == [1.0, 0.0]).all()
    distribution, _ = policy.forward(rows(400))
    tensors = {"move": torch.tensor(actions["move"]), "pick": tuple(map(torch.tensor, actions["pick"]))}
    np.testing.assert_array_equal(distribution.logp(tensors).detach().numpy(), columns["logp"])
    assert policy._head.size == 8  # 2 + 2 + 4


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 2]), Box(-1, 1, (2,), np.float32)])
def test_numbers_agree_with_torchs_own_distributions(space: Any) -> None:
    numbers = [0.3, -0.7, 1.1, 0.2]
    distribution, _ = policy_of(Told(numbers), space).forward(rows(1))
    t = torch.distributions
    x = torch.tensor([numbers])
    if isinstance(space, Discrete):
        theirs, action = t.Categorical(logits=x), torch.tensor([2])
    elif isinstance(space, MultiDiscrete):
        theirs, action = t.Independent(t.Categorical(logits=x.reshape(1, 2, 2)), 1), torch.tensor([[1, 0]])
    else:
        theirs, action = t.Independent(t.Normal(x[:, :2], x[:, 2:].exp()), 1), torch.tensor([[0.1, 0.9]])
    torch.testing.assert_close(distribution.logp(action), theirs.log_prob(action))
    torch.testing.assert_close(distribution.entropy(), theirs.entropy())


def test_entropy_of_a_masked_row_is_finite_and_has_a_gradient() -> None:
    module = Told(LOGITS)
    distribution, _ = policy_of(module, Discrete(4)).forward(rows(1, action_mask=np.array([[True, False, True, True]])))
    distribution.entropy().sum().backward()
    assert torch.isfinite(module.scale.grad)


@pytest.mark.checklist(105)
def test_one_forward_call_covers_all_rows_without_gradient_in_eval_mode() -> None:
    class Wobbly(Told):
        def __init__(self) -> None:
            super().__init__(LOGITS)
            self.drop, self.fixed = torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)
            self.fixed.eval()

        def forward(self, obs: Any) -> Any:
            assert not torch.is_grad_enabled()
            assert not self.training
            assert not self.drop.training
            return self.drop(super().forward(obs))

    module = Wobbly()
    policy = policy_of(module, Discrete(4))
    policy.act(rows(7))
    assert [len(given[0]) for given in module.given] == [7]
    assert (module.training, module.drop.training, module.fixed.training) == (True, True, False)  # each as it was


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([2, 2]), Box(-1, 1, (2,), np.float32)])
def test_random_numbers_come_from_its_own_generator_alone(space: Any) -> None:
    before = torch.random.get_rng_state()
    drawn = [policy_of(Told(LOGITS), space, seed=3).act(rows(50))[0] for _ in range(2)]
    np.testing.assert_array_equal(*drawn)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    np.testing.assert_array_equal(policy_of(Told(LOGITS), space, seed=3).act(rows(50))[0], drawn[0])
    assert (policy_of(Told(LOGITS), space, seed=2**64 - 1).act(rows(50))[0] != drawn[0]).any()
    policy = policy_of(Told(LOGITS), space, seed=1)
    first = policy.act(rows(50))[0]
    assert (policy.act(rows(50))[0] != first).any()
    policy.reseed(1)
    np.testing.assert_array_equal(policy.act(rows(50))[0], first)


def test_a_seed_of_its_own_beats_the_collectors() -> None:
    from marlvec.interop.torch import TorchPolicy

    def draw(seed: int | None, collectors: int) -> list[int]:
        policy = TorchPolicy(Told([0.0] * 1000), seed=seed)
        policy.setup(OBS, Discrete(1000), seed=collectors)
        drawn: list[int] = policy.act(rows(5))[0].tolist()
        return drawn

    assert draw(None, 1) != draw(None, 2)
    assert draw(7, 1) == draw(7, 2)


def test_floats_come_in_the_modules_dtype_and_the_rest_as_it_is() -> None:
    module = Told(LOGITS).double()
    obs = {
        "a": np.zeros((2, 3), np.float32),
        "image": (np.zeros((2, 4), np.uint8),),
        "n": np.zeros(2, np.int64),
        "flag": np.zeros((2, 1), np.bool_),
    }
    obs["a"].flags.writeable = False  # torch warns of such, and warnings are errors here
    policy_of(module, Discrete(4)).act(rows(2, obs=obs))
    ((given,),) = module.given
    assert given["a"].dtype == torch.float64
    assert given["image"][0].dtype == torch.uint8
    assert given["n"].dtype == torch.int64
    assert given["flag"].dtype == torch.bool


def test_values_and_other_columns_are_in_the_batch_and_feed_gae() -> None:
    class Critic(torch.nn.Module):  # type: ignore[misc,name-defined]  # likewise
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 4)

        def forward(self, obs: Any) -> Any:
            return {"inputs": self.net(obs), "values": obs.sum(dim=1, keepdim=True), "hidden": {"x": obs * 2}}

    from marlvec.interop.torch import TorchPolicy

    with SyncVectorEnv([lambda i=i: SampledEnv(OBS, Discrete(4), env_index=i) for i in range(2)]) as envs:
        policy = TorchPolicy(Critic())
        gae = GeneralAdvantageEstimation(value_function=policy.values)
        batch = Collector(envs, policy, learner_connectors=[gae], seed=0).collect(env_steps=30)["main"]
    np.testing.assert_allclose(batch["values"], batch["obs"].sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(batch["hidden"]["x"], batch["obs"] * 2)
    assert np.isfinite(batch["advantages"]).all()
    distribution, columns = policy.forward(batch)
    np.testing.assert_allclose(distribution.logp(torch.tensor(batch["actions"])).detach(), batch["logp"], rtol=1e-5)
    assert columns["values"].shape == (60,)
    loss = -distribution.logp(torch.tensor(batch["actions"])).mean()
    loss.backward()
    assert policy.module.net.weight.grad is not None
    gradient = policy.module.net.weight.grad.clone()
    policy.module.zero_grad()
    distribution, columns = policy.forward(batch)  # the batch itself
    (-distribution.logp(torch.tensor(batch["actions"])).mean()).backward()
    assert torch.equal(policy.module.net.weight.grad, gradient)
    np.testing.assert_array_equal(policy.values(batch), policy.values(Rows(batch)))
    assert policy.probabilities(batch).shape == (60, 4)


def test_a_batch_brings_its_masks_and_states_to_forward() -> None:
    """From whole episodes: what was not allowed has no probability, and is no part of the gradient."""

    class Remembers(torch.nn.Module):  # type: ignore[misc,name-defined]  # likewise
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 3)

        def forward(self, obs: Any, state: Any) -> Any:
            return {"inputs": self.net(obs) + state, "state_out": state + 1}

    from marlvec.interop.torch import TorchPolicy

    with marlvec.make(Nim, 3, backend="sync") as envs:
        chain = [RnnState(np.zeros(1, np.float32))]
        collector = Collector(
            envs, TorchPolicy(Remembers()), agent_connectors=chain, batch_mode="complete", count_by="env_steps", seed=0
        )
        policy: Any = collector.policies["main"]
        batch = collector.collect(episodes=9)["main"]
    assert not batch.action_mask.all()
    distribution, _ = policy.forward(batch)
    logp = distribution.logp(torch.tensor(batch["actions"]))
    np.testing.assert_allclose(logp.detach(), batch["logp"], rtol=1e-5)
    assert ((policy.probabilities(batch) == 0) == ~batch.action_mask).all()
    logp.sum().backward()
    assert torch.isfinite(policy.module.net.weight.grad).all()


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_a_recurrent_module_gets_back_the_state_it_gave_for_the_agents_last_row(kind: str) -> None:
    class Counts(torch.nn.Module):  # type: ignore[misc,name-defined]  # likewise
        def forward(self, obs: Any, state: Any) -> Any:
            turns, total = state["turns"], state["sum"][0]
            after = {"turns": turns + 1, "sum": (total + obs.sum(dim=1, keepdim=True),)}
            return {"inputs": torch.zeros(len(obs), 5), "state_out": after}

    from marlvec.interop.torch import TorchPolicy

    initial = {"turns": np.zeros(1, np.int64), "sum": (np.zeros(1, np.float32),)}
    with sync(kind, 3, 3) as envs:
        collector = Collector(envs, TorchPolicy(Counts()), agent_connectors=[RnnState(initial)], seed=0)
        for _ in range(3):
            batch = collector.collect(env_steps=40)["main"]
            np.testing.assert_array_equal(batch["state_in"]["turns"][:, 0], batch["t"])
            np.testing.assert_array_equal(batch["state_out"]["turns"][:, 0], batch["t"] + 1)
            inside = batch["unroll_id"][1:] == batch["unroll_id"][:-1]
            np.testing.assert_array_equal(
                batch["state_in"]["sum"][0][1:][inside], batch["state_out"]["sum"][0][:-1][inside]
            )


@pytest.mark.fault("E3")
def test_invalid_module_outputs_are_named() -> None:
    nan = [0.0, math.nan, 0.0, 0.0]
    for said, message in (
        (nan, r"expected finite 'inputs', got NaN, first for env 0, agent 0"),
        ([0.0] * 3, r"4 numbers a row for Discrete\(4\).*got \(4, 3\)"),
        ({"values": 1.0}, "expected a dict with 'inputs', got keys"),
        ({"inputs": LOGITS, "logp": 1.0}, "expected no 'logp'"),
        ({"inputs": LOGITS, "values": [1.0, 2.0]}, r"'values' of shape .*got \(4, 2\)"),
    ):
        with pytest.raises(ContractError, match=message):
            policy_of(Told(said), Discrete(4)).act(rows(4))
    with pytest.raises(ContractError, match="expected 'values', got only"):
        policy_of(Told(LOGITS), Discrete(4)).values(rows(2))


def test_what_cannot_be_a_policy_is_refused() -> None:
    from marlvec.interop.torch import TorchPolicy

    with pytest.raises(ArgumentError, match="expected a torch.nn.Module"):
        TorchPolicy(lambda obs: obs)
    with pytest.raises(ArgumentError, match="distribution must be a function"):
        TorchPolicy(Told(LOGITS), 3)
    for call in (TorchPolicy(Told(LOGITS)).act, TorchPolicy(Told(LOGITS)).values):
        with pytest.raises(StateError, match=r"setup\(\)"):
            call(rows(1))
    for space in (Box(0, 5, (2,), np.int64), Text(3)):
        with pytest.raises(UnsupportedSpaceError, match="no default distribution over"):
            policy_of(Told(LOGITS), space)


def test_a_distribution_of_ones_own() -> None:
    class Always:
        def __init__(self, inputs: Any, mask: Any) -> None:
            self.inputs, self.mask = inputs, mask

        def sample(self, generator: Any) -> Any:
            return torch.randint(7, 9, (len(self.inputs),), generator=generator)

        def mode(self) -> Any:
            return torch.full((len(self.inputs),), 7)

        def logp(self, actions: Any) -> Any:
            return torch.full((len(actions),), -math.log(2))

        def entropy(self) -> Any:
            return torch.full((len(self.inputs),), math.log(2))

    policy = policy_of(Told(LOGITS), Box(0, 10, (), np.int64), distribution=Always)
    actions, columns = policy.act(rows(200, action_mask=np.ones((200, 11), np.bool_)))
    assert set(actions.tolist()) == {7, 8}
    np.testing.assert_allclose(columns["logp"], -math.log(2), rtol=1e-6)
    assert policy.act(rows(2), explore=False)[0].tolist() == [7, 7]


def net(dtype: Any = None) -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    return module if dtype is None else module.to(dtype)


def bits(module: Any) -> dict[str, Any]:
    tensors = module.state_dict().items()
    return {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors}


@pytest.mark.checklist(107)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.float16])
def test_weights_go_out_and_come_back_to_the_bit(dtype: Any) -> None:
    policies = PolicyMap({name: lambda: policy_of(net(dtype), Discrete(4)) for name in "ab"}, capacity=1)
    policy = policies["a"]
    policy.setup(OBS, Discrete(4), seed=5)
    with torch.no_grad():
        policy.module[0].weight.view(-1)[0] = math.nan
    policy.note_update()
    known = bits(policy.module)
    random = policy.state_dict()["generator"].tobytes()
    del policy
    policies["b"]
    assert policies.in_memory == ("b",)
    back = policies["a"]
    assert bits(back.module) == known
    assert back.state_dict()["generator"].tobytes() == random
    assert back.version == 1


def test_versions_count_updates_and_stand_in_the_batch() -> None:
    with SyncVectorEnv([lambda: SampledEnv(OBS, Discrete(4))]) as envs:
        policy = policy_of(net(), Discrete(4))
        collector = Collector(envs, policy, seed=0)
        assert set(collector.collect(env_steps=5)["main"]["policy_version"]) == {0}
        policy.note_update()
        assert set(collector.collect(env_steps=5)["main"]["policy_version"]) == {1}
        policy.load_state_dict(policy.state_dict())
        assert set(collector.collect(env_steps=5)["main"]["policy_version"]) == {2}
    assert repr(policy) == "TorchPolicy(Sequential, device='cpu', version 2)"


def test_a_copy_from_its_state_acts_alike_and_other_weights_are_refused() -> None:
    one, other = policy_of(net(), Discrete(4), seed=1), policy_of(net(), Discrete(4), seed=2)
    some = rows(20, obs=np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32))
    one.act(some)
    state = one.state_dict()
    expected = one.act(some)
    other.load_state_dict(state)
    actions, columns = other.act(some)
    np.testing.assert_array_equal(actions, expected[0])
    np.testing.assert_array_equal(columns["logp"], expected[1]["logp"])
    before = {name: value.clone() for name, value in other.module.state_dict().items()}
    for bad, message in (
        (RandomPolicy(1).state_dict(), "state of a TorchPolicy"),
        (policy_of(torch.nn.Linear(3, 4), Discrete(4)).state_dict(), "expected those of this module"),
        (policy_of(net(torch.float64), Discrete(4)).state_dict(), "expected float32 of shape"),
        ({**state, "generator": np.zeros(3, np.uint8)}, "random generator"),
    ):
        with pytest.raises(ArgumentError, match=message):
            other.load_state_dict(bad)
    assert all(torch.equal(value, before[name]) for name, value in other.module.state_dict().items())
    assert other.version == 1


def test_weights_alone_leave_the_random_stream_and_the_version() -> None:
    """Also through a map that swaps the policy out; those of another module change nothing."""
    policies = PolicyMap({name: lambda: policy_of(net(torch.bfloat16), Discrete(4)) for name in "ab"}, capacity=1)
    one, other = policy_of(net(torch.bfloat16), Discrete(4), seed=1), policies["a"]
    random = other.state_dict()["generator"].tobytes()
    weights = one.get_weights()
    other.set_weights(weights)
    with torch.no_grad():
        one.module[0].weight.zero_()
        other.module[2].weight.zero_()
    assert any(value.any() for name, value in weights.items() if name == "2.weight"), "a copy"
    other.set_weights(weights)
    del other
    policies["b"]
    back = policies["a"]
    assert policies.in_memory == ("a",)
    one.set_weights(weights)
    assert bits(back.module) == bits(one.module)
    assert (back.state_dict()["generator"].tobytes(), back.version) == (random, 0)
    for bad in ({}, {"weight": np.zeros(3)}, {**weights, "0.weight": np.zeros(3)}):
        with pytest.raises(ArgumentError, match=r"expected those of this module|expected .* of shape"):
            back.set_weights(bad)
    assert bits(back.module) == bits(one.module)


# --- `TorchPolicy` on padded sequences (B, T, …): the numbers of the steps one by one, and gradients through time


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


def bare_policy(module: Any) -> Any:
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
    policy = bare_policy(Recurrent(3, k))
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
    policy = bare_policy(module)
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
        policy = bare_policy(Recurrent(2, 3, sees_zeros=True))  # as a last observation of this game
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
        policy = bare_policy(net)
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
    policy = bare_policy(Lstm())
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
        policy = bare_policy(module)
        policy.setup(OBS, Discrete(4), seed=0)
        with pytest.raises(ContractError, match=message):
            policy.forward(batch)
