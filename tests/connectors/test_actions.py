"""Actions on their way to the env: clipped, rescaled, discretized, mapped and padded."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec import connectors as c
from marlvec.connectors import ActionPipeline, MaskInvalid, UnsquashActions, agent_connector
from marlvec.connectors.action.conversions import DiscretizeActions, MapActions, PadActions
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.trees import tree_leaves
from tests.connectors.samples import Space, all_inside, any_spaces, batch, bind, decisions, same_tree
from tests.vector.support.reference import refused

NAMES = ("ToNumpy", "UnsquashActions", "ClipActions", "ReadOnlyActions")
ARM = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([3.0, 0.3], np.float32))
FREE = spaces.Box(-np.inf, np.inf, (2,))
SPACE = spaces.Dict(
    {
        "arm": ARM,
        "free": FREE,
        "gear": spaces.Discrete(3),
        "lights": spaces.MultiBinary(2),
        "dial": spaces.Box(0, 9, (1,), np.int64),
    }
)


class Tensor:
    """A stand-in for a torch tensor that needs a gradient: only the way over detach() and cpu() is open."""

    def __init__(self, array: Any, where: str = "gpu") -> None:
        self.array, self.where = np.asarray(array), where

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("cannot convert: requires grad, on another device")

    def detach(self) -> Tensor:
        return Tensor(self.array, self.where)

    def cpu(self) -> Tensor:
        return Tensor(self.array, "cpu")

    def numpy(self) -> Any:
        assert self.where == "cpu"
        return self.array


class Lazy:
    """A stand-in for a jax array."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array


def default(space: spaces.Space[Any], *without: str) -> c.ActionPipeline:
    pipeline = c.ActionPipeline.default()
    for name in without:
        pipeline.remove(name)
    pipeline.bind(space)
    return pipeline


def policy_actions() -> Any:
    """What a policy may give for three rows of `SPACE`, in as many forms as leaves."""
    return {
        "arm": Tensor(np.array([[-1, 1], [0, 0], [1, -7]], np.float32)),
        "free": np.array([[1e9, -1e9], [0, 0.5], [-3, 3]], np.float32),
        "gear": [2, 0, 1],
        "lights": Lazy(np.array([[0, 1], [1, 1], [0, 0]], np.int8)),
        "dial": np.array([[-4], [5], [12]]),
    }


@pytest.mark.checklist(95)
@pytest.mark.parametrize("without", [(), *((name,) for name in NAMES), NAMES])
def test_the_default_chain_and_each_piece_taken_out(without: tuple[str, ...]) -> None:
    pipeline = default(SPACE, *without)
    assert pipeline.names == tuple(name for name in NAMES if name not in without)
    if "ToNumpy" in without and len(without) == 1:
        pipeline.remove("UnsquashActions")  # without numpy arrays there is nothing to reckon with
        pipeline.remove("ClipActions")
    actions = policy_actions()
    given = {key: getattr(value, "array", value) for key, value in actions.items()}
    out = pipeline(c.Rows(actions=actions)).actions_for_env

    if "ToNumpy" in pipeline:
        assert all(type(leaf) is np.ndarray for _, leaf in tree_leaves(out))
        assert out["gear"].dtype == np.int64
    else:
        assert all(type(out[key]) is type(actions[key]) for key in actions)

    low, high = ARM.low, ARM.high
    arm = given["arm"]
    if "UnsquashActions" in pipeline:
        arm = np.array([[low[0], high[1]], (low + high) / 2, [high[0], low[1] - 3 * (high[1] - low[1])]], np.float32)
        assert pipeline.policy_space_["arm"] == spaces.Box(-1, 1, (2,))  # type: ignore[index]  # a Dict
    if "ClipActions" in pipeline:
        arm = np.clip(arm, low, high)
        assert out["dial"].tolist() == [[0], [5], [9]]
        assert SPACE.contains({key: leaf[0] for key, leaf in out.items()}) == ("ToNumpy" in pipeline)
    elif "ToNumpy" in pipeline:
        assert out["dial"].tolist() == [[-4], [5], [12]]
    np.testing.assert_allclose(getattr(out["arm"], "array", out["arm"]), arm, rtol=1e-6)
    if "UnsquashActions" in pipeline:
        assert (out["arm"][0] == [low[0], high[1]]).all()  # exact at the ends
    for key in ("free", "gear", "lights"):  # unbounded, Discrete, MultiBinary
        np.testing.assert_array_equal(np.asarray(getattr(out[key], "array", out[key])), given[key])

    arrays = [(key, leaf) for key, leaf in out.items() if isinstance(leaf, np.ndarray)]
    for key, leaf in arrays:
        if "ReadOnlyActions" in pipeline:
            with pytest.raises(ValueError, match="read-only"):
                leaf[0] = 0
        else:
            assert leaf.flags.writeable
        if isinstance(actions[key], np.ndarray):
            assert actions[key].flags.writeable


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_unsquash_is_exact_at_the_ends_and_stays_between(dtype: Any, data: st.DataObject) -> None:
    """For any bounds, up to those whose difference overflows."""
    top = float(np.finfo(dtype).max)
    width: Literal[32, 64] = 32 if dtype is np.float32 else 64
    ends = st.floats(-top, top, width=width)
    low, high = sorted([data.draw(ends), data.draw(ends)])
    space = spaces.Box(np.array([low], dtype), np.array([high], dtype), dtype=dtype)
    actions = np.array([[-1.0], [1.0], *([data.draw(st.floats(-1, 1, width=width))] for _ in range(4))], dtype)
    for policy_dtype in (dtype, np.float64):
        piece = default(space, "ClipActions")
        out = piece(c.Rows(actions=actions.astype(policy_dtype))).actions_for_env
        assert out.dtype == dtype
        assert out[0, 0] == space.low[0]
        assert out[1, 0] == space.high[0]
        assert ((space.low <= out) & (out <= space.high)).all()


def test_unsquash_is_linear_and_declares_its_space() -> None:
    pipeline = default(spaces.Box(-2, 4, (1,)), "ClipActions")
    assert pipeline.policy_space_ == spaces.Box(-1, 1, (1,))
    out = pipeline(c.Rows(actions=np.array([[-1], [-0.5], [0], [0.5], [1], [2], [-2]], np.float32))).actions_for_env
    assert out.ravel().tolist() == [-2, -0.5, 1, 2.5, 4, 7, -5]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Box(0, np.inf, (2,)),
        spaces.Box(np.array([0, -np.inf], np.float32), np.array([1, np.inf], np.float32)),
    ],
)
def test_unsquash_leaves_the_rest_alone(space: spaces.Space[Any]) -> None:
    pipeline = c.ActionPipeline([c.UnsquashActions()])
    pipeline.bind(space)
    assert pipeline.policy_space_ == space
    rows = c.Rows(actions=batch(space, 4))
    assert pipeline(rows).actions_for_env is rows.actions


def test_clip_casts_only_where_nothing_is_lost() -> None:
    pipeline = default(spaces.Box(0, 1, (1,)), "UnsquashActions")
    out = pipeline(c.Rows(actions=np.array([[0.3], [7.0]]))).actions_for_env
    assert out.dtype == np.float32
    assert out.tolist() == [[np.float32(0.3)], [1.0]]
    ints = default(spaces.Box(0, 9, (1,), np.int8))
    assert ints(c.Rows(actions=np.array([[300], [-4]]))).actions_for_env.dtype == np.int8
    assert ints(c.Rows(actions=np.array([[0.7]]))).actions_for_env.tolist() == [[0.7]]


def test_nan_is_an_error() -> None:
    pipeline = default(spaces.Dict({"arm": ARM}))
    with pytest.raises(ContractError, match="the policy gave NaN for leaf 'arm' in row 1") as raised:
        pipeline(c.Rows(actions={"arm": np.array([[0, 0], [0, np.nan]])}))
    assert raised.value.__notes__ == ["in connector 'ClipActions' of ActionPipeline"]


def test_to_numpy_takes_extra_columns_along() -> None:
    pipeline = default(spaces.Discrete(3))
    actions = Tensor([1, 2])
    out = pipeline(c.Rows(actions=actions, logp=Lazy([0.5, 1]), state=({"h": Tensor([[1.0], [2.0]])},), n=[1, 2]))
    same_tree(out.actions, np.array([1, 2]))
    same_tree(out.actions_for_env, np.array([1, 2]))
    same_tree(out.logp, np.array([0.5, 1]))
    same_tree(out.state, ({"h": np.array([[1.0], [2.0]])},))
    same_tree(out.n, np.array([1, 2]))


def test_a_list_is_never_cut_down_to_ints() -> None:
    out = default(spaces.Discrete(3))(c.Rows(actions=[0.7, 1])).actions_for_env
    assert out.tolist() == [0.7, 1.0]
    assert default(ARM)(c.Rows(actions=[[0, 0], [1, 1]])).actions_for_env.dtype == np.float32


def test_a_tuple_space_takes_a_list_of_leaves() -> None:
    space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
    out = default(space)(c.Rows(actions=[np.array([0, 1]), [2, 0]])).actions_for_env
    same_tree(out, (np.array([0, 1]), np.array([2, 0])))


@pytest.mark.parametrize("bad", [[[1], [1, 2]], ["a", object()], [None, None]])
def test_non_numeric_actions_raise(bad: Any) -> None:
    refused(ContractError, "expected numbers", default(spaces.Discrete(3)), c.Rows(actions=bad))


def test_a_wrong_structure_is_an_error() -> None:
    refused(ContractError, "expected a dict with keys", default(SPACE), c.Rows(actions={"arm": np.zeros((1, 2))}))


def test_objects_pass_unchanged() -> None:
    space = spaces.Dict({"say": spaces.Text(5), "go": spaces.Box(-2, 2, (1,))})
    words = np.array(["hello", "x"], object)
    out = default(space)(c.Rows(actions={"say": words, "go": np.ones((2, 1), np.float32)})).actions_for_env
    assert out["say"].tolist() == ["hello", "x"]
    assert not out["say"].flags.writeable
    np.testing.assert_array_equal(out["go"], np.full((2, 1), 2, np.float32))


def test_actions_for_env_that_is_there_is_kept() -> None:
    pipeline = c.ActionPipeline([c.ReadOnlyActions()])
    pipeline.bind(spaces.Discrete(9))
    out = pipeline(c.Rows(actions=np.array([1]), actions_for_env=np.array([5])))
    assert out.actions_for_env.tolist() == [5]
    assert out.actions.tolist() == [1]
    assert c.ActionPipeline()(c.Rows(actions=np.array([1]))).actions_for_env.tolist() == [1]
    assert [type(piece) for piece in c.ActionPipeline.default()] == [
        c.ToNumpy,
        c.UnsquashActions,
        c.ClipActions,
        c.ReadOnlyActions,
    ]


def sent(piece: DiscretizeActions, space: Space, actions: Any) -> Any:
    actions = np.asarray(actions)
    return bind(piece, space)(decisions(actions, envs=len(actions))).actions_for_env


def test_each_element_has_a_number_of_choices_of_its_own() -> None:
    piece = DiscretizeActions([2, 5])
    assert bind(piece, ARM).policy_space_ == spaces.MultiDiscrete([2, 5])
    out = sent(piece, ARM, [[0, 0], [1, 4], [1, 2]])
    np.testing.assert_array_equal(out[:2], [ARM.low, ARM.high])
    np.testing.assert_allclose(out[2], [3, 0.2], rtol=1e-6)
    assert piece.bins == (2, 5)
    assert repr(piece) == "DiscretizeActions(bins=(2, 5))"


def test_shapes_of_any_rank_and_leaves_of_other_kinds() -> None:
    assert bind(DiscretizeActions(4), spaces.Box(0, 1, ())).policy_space_ == spaces.Discrete(4)
    assert sent(DiscretizeActions(5), spaces.Box(0, 1, ()), [0, 1, 4]).tolist() == [0, 0.25, 1]
    space = spaces.Box(0, 1, (2, 3))
    assert bind(DiscretizeActions(4), space).policy_space_ == spaces.MultiDiscrete(np.full((2, 3), 4))
    assert sent(DiscretizeActions(2), space, np.eye(3, dtype=int)[None, :2]).tolist() == [[[1, 0, 0], [0, 1, 0]]]
    robot = spaces.Dict({"arm": ARM, "gear": spaces.Discrete(3), "say": spaces.Text(3)})
    pipeline = bind(DiscretizeActions(9, joint=True), robot)
    assert pipeline.policy_space_ == spaces.Dict({**robot.spaces, "arm": spaces.Discrete(81)})
    actions = {"arm": np.array([80, 0]), "gear": np.array([2, 1]), "say": np.array(["a", "b"], object)}
    out = pipeline(decisions(actions, envs=2)).actions_for_env
    np.testing.assert_array_equal(out["arm"], [ARM.high, ARM.low])
    assert out["gear"] is actions["gear"]
    assert out["say"] is actions["say"]


def test_a_box_of_ints_gets_ints() -> None:
    space = spaces.Box(-3, 3, (1,), np.int8)
    out = sent(DiscretizeActions(4), space, [[0], [1], [2], [3]])
    assert out.tolist() == [[-3], [-1], [1], [3]]
    assert out.dtype == np.int8
    assert sent(DiscretizeActions(7), space, np.arange(7)[:, None]).ravel().tolist() == list(range(-3, 4))
    assert sent(DiscretizeActions(2), spaces.Box(0, 1, (1,), np.bool_), [[0], [1]]).tolist() == [[False], [True]]
    refused(UnsupportedSpaceError, "8 bins are more than the 7 ints from -3 to 3", bind, DiscretizeActions(8), space)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_ends_are_exact_and_values_ascend_between_them(dtype: Any, data: st.DataObject) -> None:
    """For any bounds, up to those whose difference overflows."""
    top = float(np.finfo(dtype).max)
    ends = st.floats(-top, top, width=32 if dtype is np.float32 else 64)
    low, high = sorted([data.draw(ends), data.draw(ends)])
    bins = data.draw(st.integers(2, 9))
    space = spaces.Box(np.array([low], dtype), np.array([high], dtype), dtype=dtype)
    out = sent(DiscretizeActions(bins), space, np.arange(bins)[:, None]).ravel()
    assert out.dtype == dtype
    assert (out[0], out[-1]) == (space.low[0], space.high[0])
    assert (out[1:] >= out[:-1]).all()
    even = [low * (1 - i / (bins - 1)) + high * (i / (bins - 1)) for i in range(bins)]
    np.testing.assert_allclose(out, even, rtol=1e-5, atol=1e-6 * max(abs(low), abs(high)) + 1e-30)


@given(sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4), joint=st.booleans())
def test_no_two_choices_are_the_same_action(sizes: list[int], joint: bool) -> None:
    space = spaces.Box(-1, 1, (len(sizes),))
    choices = np.array(list(itertools.product(*map(range, sizes))))
    actions = np.arange(len(choices)) if joint else choices
    out = sent(DiscretizeActions(sizes, joint=joint), space, actions)
    policy_space = bind(DiscretizeActions(sizes, joint=joint), space).policy_space_
    assert policy_space == (spaces.Discrete(len(choices)) if joint else spaces.MultiDiscrete(sizes))
    assert out.dtype == np.float32
    assert len({tuple(row) for row in out.tolist()}) == len(choices)
    np.testing.assert_allclose(out, choices / (np.array(sizes) - 1) * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([[0, 1], [3, 0]], r"expected an action of MultiDiscrete\(\[3 3\]\), got \[3 0\] for env 1, agent 0"),
        ([[0, -1]], "for env 0, agent 0"),
        ([[0.0, 1.0]], r"ints of shape \(1, 2\), got float64 of shape \(1, 2\)"),
        ([0], r"ints of shape \(1, 2\), got int64 of shape \(1,\)"),
    ],
)
def test_invalid_choice_raises(actions: Any, message: str) -> None:
    refused(ContractError, message, sent, DiscretizeActions(3), spaces.Box(-1, 1, (2,)), actions)


# --- MapActions and PadActions: what lets a policy act in a space of its own


WHEEL = spaces.Box(-2, 2, (2,))


def steer(action: Any) -> Any:
    """From one of 3 choices to a turn: left, none, right."""
    return np.stack([(action - 1) * 2.0, np.ones(len(action))], axis=1).astype(np.float32)


def test_a_function_on_all_actions_at_once() -> None:
    pipeline = bind(MapActions(lambda actions: actions / 2), WHEEL)
    assert pipeline.policy_space_ == WHEEL
    rows = decisions(np.array([[2.0, 1.0], [0.0, -2.0]]), envs=2)
    out = pipeline(rows)
    assert out.actions_for_env.tolist() == [[1, 0.5], [0, -1]]
    assert out.actions is rows.actions


@pytest.mark.parametrize("policy_space", [spaces.Discrete(3), lambda space: spaces.Discrete(1 + space.shape[0])])
def test_the_policys_space_is_given_or_worked_out(policy_space: Any) -> None:
    pipeline = bind(MapActions(steer, policy_space), WHEEL)
    assert pipeline.policy_space_ == spaces.Discrete(3)
    out = pipeline(decisions(np.array([0, 1, 2]), envs=3)).actions_for_env
    assert out.tolist() == [[-2, 1], [0, 1], [2, 1]]
    assert all_inside(WHEEL, out, 3)


def test_it_works_on_what_the_pieces_before_it_made() -> None:
    chain = ActionPipeline([UnsquashActions(), MapActions(lambda actions: -actions)])
    chain.bind(WHEEL)
    assert chain.policy_space_ == spaces.Box(-1, 1, (2,))
    assert chain(decisions(np.ones((1, 2), np.float32))).actions_for_env.tolist() == [[-2, -2]]
    swap = bind(MapActions(lambda a: {"x": a["y"], "y": a["x"]}), spaces.Dict({"x": WHEEL, "y": WHEEL}))
    actions = {"x": np.ones((1, 2)), "y": np.zeros((1, 2))}
    assert swap(decisions(actions)).actions_for_env["x"] is actions["y"]


def test_invalid_function_space_or_row_count_raises() -> None:
    refused(ArgumentError, "MapActions takes a function, got int", MapActions, 3)
    refused(ArgumentError, "policy_space must be a space, .*, or None; got int", MapActions, steer, 3)
    short = bind(MapActions(lambda actions: actions[1:]), WHEEL)
    raised = refused(ArgumentError, "'actions_for_env' has 1 rows", short, decisions(np.zeros((2, 2)), envs=2))
    assert raised.__notes__ == ["in connector 'MapActions' of ActionPipeline"]
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
        refused(UnsupportedSpaceError, "PadActions widens Discretes, and there is none in", pipeline.bind, space)
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
