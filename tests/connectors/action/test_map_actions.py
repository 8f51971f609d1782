"""MapActions and PadActions: what lets a policy act in a space of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec.connectors import ActionPipeline, MaskInvalid, UnsquashActions, agent_connector
from marlvec.connectors.action.conversions import MapActions, PadActions
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from tests.connectors.helpers.action_samples import bind, decisions
from tests.connectors.helpers.samples import all_inside, any_spaces, batch, same_tree

ARM = spaces.Box(-2, 2, (2,))


def steer(action: Any) -> Any:
    """From one of 3 choices to a turn: left, none, right."""
    return np.stack([(action - 1) * 2.0, np.ones(len(action))], axis=1).astype(np.float32)


def test_a_function_on_all_actions_at_once() -> None:
    pipeline = bind(MapActions(lambda actions: actions / 2), ARM)
    assert pipeline.policy_space_ == ARM
    rows = decisions(np.array([[2.0, 1.0], [0.0, -2.0]]), envs=2)
    out = pipeline(rows)
    assert out.actions_for_env.tolist() == [[1, 0.5], [0, -1]]
    assert out.actions is rows.actions


@pytest.mark.parametrize("policy_space", [spaces.Discrete(3), lambda space: spaces.Discrete(1 + space.shape[0])])
def test_the_policys_space_is_given_or_worked_out(policy_space: Any) -> None:
    pipeline = bind(MapActions(steer, policy_space), ARM)
    assert pipeline.policy_space_ == spaces.Discrete(3)
    out = pipeline(decisions(np.array([0, 1, 2]), envs=3)).actions_for_env
    assert out.tolist() == [[-2, 1], [0, 1], [2, 1]]
    assert all_inside(ARM, out, 3)


def test_it_works_on_what_the_pieces_before_it_made() -> None:
    chain = ActionPipeline([UnsquashActions(), MapActions(lambda actions: -actions)])
    chain.bind(ARM)
    assert chain.policy_space_ == spaces.Box(-1, 1, (2,))
    assert chain(decisions(np.ones((1, 2), np.float32))).actions_for_env.tolist() == [[-2, -2]]
    swap = bind(MapActions(lambda a: {"x": a["y"], "y": a["x"]}), spaces.Dict({"x": ARM, "y": ARM}))
    actions = {"x": np.ones((1, 2)), "y": np.zeros((1, 2))}
    assert swap(decisions(actions)).actions_for_env["x"] is actions["y"]


def test_invalid_function_space_or_row_count_raises() -> None:
    with pytest.raises(ArgumentError, match="MapActions takes a function, got int"):
        MapActions(3)  # type: ignore[arg-type]  # a wrong value is the point
    with pytest.raises(ArgumentError, match="policy_space must be a space, .*, or None; got int"):
        MapActions(steer, 3)  # type: ignore[arg-type]  # likewise
    short = bind(MapActions(lambda actions: actions[1:]), ARM)
    with pytest.raises(ArgumentError, match="'actions_for_env' has 1 rows") as raised:
        short(decisions(np.zeros((2, 2)), envs=2))
    assert raised.value.__notes__ == ["in connector 'MapActions' of ActionPipeline"]
    assert MapActions(steer, spaces.Discrete(3)).params() == {"function": steer, "policy_space": spaces.Discrete(3)}


@pytest.mark.slow("draws many batches")
@given(
    n=st.integers(1, 6), more=st.integers(0, 3), start=st.integers(-3, 3), dtype=st.sampled_from([np.int64, np.int8])
)
def test_unknown_action_becomes_the_invalid_action(n: int, more: int, start: int, dtype: Any) -> None:
    space = spaces.Discrete(n, start=start, dtype=dtype)
    actions = np.arange(start, start + n + more)
    for invalid in (None, start, start + n - 1):
        pipeline = bind(PadActions(n + more, invalid=invalid), space)
        assert pipeline.policy_space_ == spaces.Discrete(n + more, start=start, dtype=dtype)
        out = pipeline(decisions(actions, envs=len(actions))).actions_for_env
        assert out.dtype == dtype
        assert out[:n].tolist() == actions[:n].tolist()
        assert out[n:].tolist() == [start if invalid is None else invalid] * more


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), seed=st.integers(0, 9))
def test_each_discrete_of_a_tree_is_widened_and_the_rest_stays(space: Any, seed: int) -> None:
    pipeline = ActionPipeline([PadActions(7)])
    if "Discrete(" not in str(space).replace("MultiDiscrete(", ""):
        with pytest.raises(UnsupportedSpaceError, match="PadActions widens Discretes, and there is none in"):
            pipeline.bind(space)
        return
    pipeline.bind(space)
    rows = decisions(batch(pipeline.policy_space_, 5, seed), envs=5)
    assert all_inside(space, pipeline(rows).actions_for_env, 5)
    same_tree(pipeline(rows.replace(actions=batch(space, 5, seed))).actions_for_env, batch(space, 5, seed))


@pytest.mark.parametrize("actions", [[8], [0], [2.0]])
def test_action_outside_the_policys_space_raises(actions: Any) -> None:
    with pytest.raises(ContractError, match="expected (an action|actions) of Discrete"):
        bind(PadActions(7), spaces.Discrete(3, start=1))(decisions(np.array(actions)))


@agent_connector
def pad_mask(rows: Any) -> Any:
    return rows.replace(action_mask=np.pad(rows.action_mask, [(0, 0), (0, 12 - rows.action_mask.shape[1])]))


def test_padded_actions_with_masks_of_the_env_need_wider_masks() -> None:
    """The error says with what connector, and with it every choice is allowed."""

    def collect(agent: list[Any], action: list[Any]) -> Any:
        with marlvec.make("tictactoe_v3", num_envs=2, backend="sync", validate="strict") as envs:
            policy = marlvec.RandomPolicy()
            collector = marlvec.Collector(envs, policy, agent_connectors=agent, action_connectors=action, seed=0)
            return collector.collect(env_steps=60)["main"]

    with pytest.raises(ContractError, match=r"9 entries.* 12 choices: .*PadActions.*rows.replace\(action_mask=…\)"):
        collect([], [PadActions(12)])
    for action in ([PadActions(12)], [MaskInvalid(), PadActions(12)]):
        rows = collect([pad_mask], action)
        assert rows.action_mask.shape[1:] == rows.next_action_mask.shape[1:] == (12,)
        assert rows.action_mask[np.arange(len(rows)), rows.actions].all()
        assert rows.actions.max() < 9
