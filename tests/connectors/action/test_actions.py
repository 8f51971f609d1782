from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError
from marlvec.trees import tree_leaves
from tests.connectors.helpers.samples import batch, same_tree

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
    with pytest.raises(ContractError, match="expected numbers"):
        default(spaces.Discrete(3))(c.Rows(actions=bad))


def test_a_wrong_structure_is_an_error() -> None:
    with pytest.raises(ContractError, match="expected a dict with keys"):
        default(SPACE)(c.Rows(actions={"arm": np.zeros((1, 2))}))


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
