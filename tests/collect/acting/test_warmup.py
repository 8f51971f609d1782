"""Random steps before the first ones of the policies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.collect.row_builder import RowDraws
from marlvec.connectors import RnnState, Rows
from marlvec.errors import ArgumentError
from marlvec.policies import FunctionPolicy
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from tests.collect.helpers.plans import FEW_OR_MANY, for_examples
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy, Scattered, factories, sync
from tests.collect.helpers.reference import same_batch


def check_first_steps(
    kind: str, num_envs: int, random_steps: int, amounts: list[int], mode: str, order: int | None
) -> None:
    policy = EchoPolicy()
    options: dict[str, Any] = {"random_steps": random_steps, "seed": 3}
    settings = {"autoreset_mode": mode, "validate": "strict"}
    with sync(kind, num_envs, 2, mode) as envs, Scattered(factories(kind, num_envs, 2), order, **settings) as others:
        collector = Collector(envs, policy, **options)
        overlapping = Collector(others, EchoPolicy(), overlap=True, **options)
        for amount in amounts:
            batch = collector.collect(env_steps=amount)
            same_batch(overlapping.collect(env_steps=amount), batch)
            for rows in batch.values():
                if "action_mask" in rows:
                    assert rows["action_mask"][np.arange(len(rows)), rows["actions"]].all()
        asked = {env for call in policy.calls for env, _ in call}
        for env in range(num_envs):
            share, steps = ((n + num_envs - 1 - env) // num_envs for n in (random_steps, sum(amounts)))
            assert steps > share or env not in asked


@pytest.mark.slow("collects whole runs on several backends")
@FEW_OR_MANY
def test_the_first_steps_are_random_and_marked(examples: int) -> None:
    check_first_steps("parallel", 2, 1, [2], "same_step", 0)  # with overlap `off_policy` comes first
    for_examples(
        examples,
        check_first_steps,
        kind=st.sampled_from(list(KINDS)),
        num_envs=st.integers(1, 4),
        random_steps=st.integers(0, 40),
        amounts=st.lists(st.integers(1, 15), min_size=1, max_size=5),
        mode=st.sampled_from(MODES),
        order=st.integers(0, 2**32),
    )


def test_every_row_tells_whether_its_policy_was_asked() -> None:
    with sync("buffer", 2, 1) as envs:
        policy = EchoPolicy()
        collector = Collector(envs, policy, random_steps=7, seed=0)
        rows = collector.collect(env_steps=30)["main"]
        asked = sum(map(len, policy.calls))
        assert int((~rows["off_policy"]).sum()) <= asked <= int((~rows["off_policy"]).sum()) + 2
        marked = rows["off_policy"]
        assert marked.any()
        np.testing.assert_array_equal(rows["seen"][~marked], rows["obs"][~marked].sum(axis=1))
        said = rows["seen"][marked]
        assert (np.isnan(said) if said.dtype.kind == "f" else said == 0).all()
        assert marked[rows["env_id"] == 0].tolist() == sorted(marked[rows["env_id"] == 0].tolist(), reverse=True)


@pytest.mark.slow("collects whole runs on several backends")
def test_random_actions_reach_every_choice_alike() -> None:
    with sync("buffer", 4, 3) as envs:
        rows = Collector(envs, EchoPolicy(), random_steps=4000, seed=0).collect(env_steps=2000)["main"]
        assert rows["off_policy"].all()
        counts = np.bincount(rows["actions"], minlength=5)
        assert (np.abs(counts / len(rows) - 0.2) < 0.03).all()


def test_it_is_over_once_and_for_all() -> None:
    with sync("keyed", 2, 2) as envs:
        policy = EchoPolicy()
        collector = Collector(envs, policy, random_steps=6, seed=0)
        collector.collect(env_steps=6)
        assert not policy.calls
        collector.reset()
        collector.collect(env_steps=1)
        assert policy.calls


@pytest.mark.parametrize("kind", ["parallel", "masked turns", "keyed"])
def test_recurrent_policy_has_its_states_in_the_first_steps_also_with_overlap(kind: str) -> None:
    def act(rows: Rows) -> Any:
        actions = rows["action_mask"].argmax(axis=1) if "action_mask" in rows else np.zeros(len(rows), np.int64)
        return actions, {"state_out": rows["state_in"] + 1}

    def options() -> dict[str, Any]:
        return {"agent_connectors": [RnnState(np.zeros((), np.int64))], "random_steps": 9, "seed": 3}

    with sync(kind, 3, 2) as envs, Scattered(factories(kind, 3, 2), 5) as others:
        collector = Collector(envs, FunctionPolicy(act), **options())
        overlapping = Collector(others, FunctionPolicy(act), overlap=True, **options())
        for amount in (4, 20):
            batch = collector.collect(env_steps=amount)
            same_batch(overlapping.collect(env_steps=amount), batch)
            rows = batch["main"]
            assert rows["off_policy"].any()
            np.testing.assert_array_equal(rows["state_in"], rows["t"])
            np.testing.assert_array_equal(rows["state_out"], rows["t"] + 1)


@pytest.mark.parametrize("steps", [-1, 1.5, "3", None])
def test_a_wrong_number_is_refused(steps: Any) -> None:
    with sync("keyed", 2, 2) as envs, pytest.raises(ArgumentError, match="random_steps="):
        Collector(envs, EchoPolicy(), random_steps=steps)


SPACES = {
    "discrete": Discrete(5, start=2),
    "multi": MultiDiscrete([3, 4]),
    "bounded": Box(-2.0, 3.0, (2, 2), np.float32),
    "unbounded": Box(-np.inf, np.array([1.0, np.inf], np.float32), (2,), np.float32),
    "bytes": Box(0, 255, (3,), np.uint8),
    "wide": Box(-(2**63), 2**63 - 1, (2,), np.int64),
    "tree": Dict({"a": Discrete(3), "b": Box(0.0, 1.0, (), np.float64)}),
}


@pytest.mark.parametrize("name", SPACES)
def test_draws_belong_to_rows_in_whatever_batch_they_stand(name: str) -> None:
    space, n = SPACES[name], 200
    ids = np.arange(n)
    rows = Rows({"eps_id": ids // 10, "agent_index": ids % 2, "t": ids % 5, "env_id": ids % 3})
    sampler = SpaceSampler(SpaceTree(space))
    draw: Any = partial(RowDraws, 3, "test")
    tree = SpaceTree(space)
    whole = tree.flatten(sampler.sample(draw(rows), n))
    some = np.array([5, 150, 7, 63])
    part = tree.flatten(sampler.sample(draw(rows.take(some)), len(some)))
    for leaf, own in zip(whole, part, strict=True):
        np.testing.assert_array_equal(leaf[some], own)
    for i in range(n):
        assert space.contains(tree.unflatten([np.asarray(leaf[i]) for leaf in whole]))
