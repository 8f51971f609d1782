"""DropKeys and ActionMaskFromObs: parts taken out of Dicts."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, bound

BOX = spaces.Box(-1, 1, (2,))
SEEN = spaces.Dict(OrderedDict([("z", BOX), ("eye", spaces.Dict({"l": BOX, "r": BOX})), ("t", spaces.Tuple([BOX]))]))
GAME = spaces.Dict({"observation": BOX, "action_mask": spaces.MultiBinary(4)})


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), n=st.integers(0, 3), data=st.data())
def test_dropped_keys_are_removed_and_others_unchanged(space: Space, n: int, data: st.DataObject) -> None:
    """Any paths of any space: the leaves that are left are the very same arrays, at the same paths, in order."""
    tree = SpaceTree(space)
    prefixes = {
        "/".join(leaf.path.split("/")[: i + 1]) for leaf in tree.leaves for i in range(leaf.path.count("/") + 1)
    }
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return
    paths = data.draw(st.lists(st.sampled_from(sorted(prefixes)), min_size=1, max_size=3, unique=True))
    obs = batch(space, n)
    try:
        pipeline = bound(c.DropKeys(*paths), space)
    except ArgumentError as error:
        assert any(text in str(error) for text in ("entry of a Tuple", "leaves nothing"))  # noqa: PT017  # rightly refused
        return
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    kept = [(leaf.path, array) for leaf, array in zip(tree.leaves, tree.flatten(obs), strict=True)]
    kept = [(path, array) for path, array in kept if not any(path == p or path.startswith(f"{p}/") for p in paths)]
    after = SpaceTree(pipeline.output_space_)
    assert [leaf.path for leaf in after.leaves] == [path for path, _ in kept]
    for got, (_, want) in zip(after.flatten(out), kept, strict=True):
        assert got is want


def test_a_dict_of_one_key_stays_a_dict_and_keys_keep_their_order() -> None:
    after = bound(c.DropKeys("eye/l"), SEEN).output_space_
    assert isinstance(after, spaces.Dict)
    assert list(after.spaces) == ["z", "eye", "t"]
    assert after["eye"] == spaces.Dict({"r": BOX})
    assert bound(c.DropKeys("eye", "eye/l", "t"), SEEN).output_space_ == spaces.Dict({"z": BOX})


def test_what_cannot_be_dropped_and_the_config() -> None:
    with pytest.raises(ContractError, match="expected a dict with keys"):
        bound(c.DropKeys("z"), SEEN)(c.Rows(obs={"z": np.zeros((1, 2))}))
    piece = c.DropKeys("eye/l", "z")
    assert repr(piece) == "DropKeys('eye/l', 'z')"
    assert repr(c.DropKeys.from_config(piece.to_config())) == repr(piece)


@pytest.mark.parametrize("kind", [spaces.MultiBinary(4), spaces.Box(0, 1, (4,), np.int8), spaces.Box(0, 1, (4,))])
def test_a_mask_moves_from_the_observation_to_its_column(kind: Any) -> None:
    space = spaces.Dict({"game": spaces.Dict({"board": BOX, "legal": kind}), "rest": BOX})
    mask = np.array([[1, 0, 0, 1], [0, 1, 1, 1]], kind.dtype)
    obs = {"game": {"board": np.zeros((2, 2), np.float32), "legal": mask}, "rest": np.ones((2, 2), np.float32)}
    pipeline = bound(c.ActionMaskFromObs("game/legal"), space, (), spaces.Discrete(4))
    out = pipeline(c.Rows(obs=obs))
    assert out.action_mask.dtype == np.bool_
    assert out.action_mask.tolist() == (mask == 1).tolist()
    assert out.obs["game"].keys() == {"board"}
    assert pipeline.output_space_ == spaces.Dict({"game": spaces.Dict({"board": BOX}), "rest": BOX})
    assert all_inside(pipeline.output_space_, out.obs, 2)
    assert obs["game"]["legal"] is mask  # type: ignore[index]  # nested dicts


def test_two_masks_must_both_allow() -> None:
    obs = {"observation": np.zeros((1, 2), np.float32), "action_mask": np.array([[1, 1, 0, 0]], np.int8)}
    given_ = np.array([[True, False, True, False]])
    out = bound(c.ActionMaskFromObs(), GAME)(c.Rows(obs=obs, action_mask=given_))
    assert out.action_mask.tolist() == [[True, False, False, False]]
    assert given_.tolist() == [[True, False, True, False]]
    with pytest.raises(ContractError, match=r"action_mask of shape \(1, 3\) already, and 'action_mask' .* \(1, 4\)"):
        bound(c.ActionMaskFromObs(), GAME)(c.Rows(obs=obs, action_mask=given_[:, :3]))
