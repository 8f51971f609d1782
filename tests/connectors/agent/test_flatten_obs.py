from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, FlattenObs, Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from tests.connectors.helpers.samples import Space, any_spaces, batch, unbatch


def bound(space: Space, **kwargs: Any) -> AgentPipeline:
    pipeline = AgentPipeline([FlattenObs(**kwargs)])
    pipeline.bind(space)
    return pipeline


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), n=st.integers(0, 4))
def test_it_flattens_as_gymnasium_does(space: Space, n: int) -> None:
    pipeline, obs = bound(space), batch(space, n)
    flat = pipeline(Rows(obs=obs)).obs
    dtype = np.float64 if any(leaf.dtype == np.float64 for leaf in SpaceTree(space).leaves) else np.float32
    assert flat.dtype == dtype == pipeline.output_space_.dtype
    assert flat.shape == (n, spaces.flatdim(space))
    for i in range(n):
        np.testing.assert_array_equal(flat[i], np.asarray(spaces.flatten(space, unbatch(space, obs, i)), dtype))


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), data=st.data())
def test_keys_to_keep_or_to_drop(space: Space, data: st.DataObject) -> None:
    """Any set of paths, of leaves or of what holds them: keep is what drop of the others is."""
    paths = [leaf.path for leaf in SpaceTree(space).leaves]
    prefixes = sorted({"/".join(path.split("/")[: i + 1]) for path in paths for i in range(path.count("/") + 1)})
    chosen = data.draw(st.lists(st.sampled_from(prefixes), min_size=1, unique=True))
    kept = [any(path == key or path.startswith(f"{key}/") for key in chosen) for path in paths]
    leaves = SpaceTree(space).flatten(batch(space, 3))
    parts = [
        bound(leaf.space)(Rows(obs=array)).obs for leaf, array in zip(SpaceTree(space).leaves, leaves, strict=True)
    ]
    for key, keep in (("keys", kept), ("drop", [not k for k in kept])):
        if not any(keep):
            with pytest.raises(ArgumentError, match="leaves nothing"):
                bound(space, **{key: chosen})
            continue
        flat = bound(space, **{key: chosen})(Rows(obs=batch(space, 3))).obs
        np.testing.assert_array_equal(flat, np.concatenate([p for p, k in zip(parts, keep, strict=True) if k], axis=1))


def test_float64_counts_only_where_it_is_kept() -> None:
    space = spaces.Dict({"wide": spaces.Box(-1, 1, (2,), np.float64), "n": spaces.Discrete(2)})
    assert bound(space).output_space_.dtype == np.float64
    assert bound(space, drop=["wide"]).output_space_ == spaces.Box(0, 1, (2,))


def test_a_vector_that_is_flat_already_is_not_copied() -> None:
    pipeline = bound(spaces.Box(-1, 1, (3,)))
    rows = Rows(obs=np.zeros((2, 3), np.float32))
    assert pipeline(rows) is rows
    wide = Rows(obs=np.zeros((2, 3), np.float64))
    assert pipeline(wide).obs.dtype == np.float32


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(3, start=1), np.array([1, 4])),
        (spaces.Discrete(3, start=1), np.array([3, 0])),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 0], [2, 2]])),
    ],
)
def test_a_category_that_is_not_there_is_an_error(space: Space, obs: Any) -> None:
    with pytest.raises(ContractError, match=r"the value is \d in row 1, outside of"):
        bound(space)(Rows(obs=obs))
