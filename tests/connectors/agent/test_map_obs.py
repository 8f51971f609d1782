"""MapObs and PerAgent: functions of observations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError
from marlvec.trees import map_tree
from tests.connectors.helpers import samples
from tests.connectors.helpers.samples import Space, any_spaces, batch, rows_of, same_tree, unbatch, vectors

NAMES = ("wolf", "hare", "fox")
bound = partial(samples.bound, agents=NAMES)
PLACE = spaces.Dict({"at": spaces.Box(-9, 9, (2,)), "kind": spaces.Discrete(4)})


@given(space=any_spaces(), n=st.integers(0, 4))
def test_the_function_gets_all_rows_or_one_and_both_come_out_alike(space: Space, n: int) -> None:
    """Any space: identity by row is identity; the single rows are what the space itself would give."""
    obs = batch(space, n)
    pairs = [(i, i % 3) for i in range(n)]
    seen: list[Any] = []
    whole = bound(c.MapObs(lambda value: value), space)(rows_of(pairs, obs)).obs
    apart = bound(c.PerAgent(lambda value, agent: [seen.append((value, agent)), value][1]), space)(
        rows_of(pairs, obs)
    ).obs
    same_tree(whole, obs)
    same_tree(map_tree(np.asarray, apart), obs)
    assert [agent for _, agent in seen] == [NAMES[i % 3] for i in range(n)]
    for i, (value, _) in enumerate(seen):
        same_tree(value, unbatch(space, obs, i))


def test_one_call_for_all_rows() -> None:
    calls: list[Any] = []

    def toward_origin(obs: Any) -> Any:
        calls.append(obs["at"].shape)
        return -obs["at"] / np.linalg.norm(obs["at"], axis=1, keepdims=True)

    pipeline = bound(c.MapObs(toward_origin, spaces.Box(-1, 1, (2,))), PLACE)
    obs = {"at": np.array([[3, 4], [0, -2]], np.float32), "kind": np.array([0, 1])}
    out = pipeline(rows_of([(0, 0), (0, 1)], obs)).obs
    np.testing.assert_allclose(out, [[-0.6, -0.8], [0, 1]], rtol=1e-6)
    assert calls == [(2, 2)]
    assert pipeline.output_space_ == spaces.Box(-1, 1, (2,))


def test_a_function_may_know_who_it_looks_at() -> None:
    def mirrored(obs: Any, agent: str | int) -> Any:
        return -obs if agent in ("hare", 1) else obs

    rows = rows_of([(4, 1), (0, 0), (0, 1)], np.ones((3, 2), np.float32))
    for agents in (NAMES, ()):
        assert bound(c.PerAgent(mirrored), vectors(2), agents=agents)(rows).obs.tolist() == [[-1, -1], [1, 1], [-1, -1]]
    with pytest.raises(ContractError, match="agent_index 3 in rows of 3 agents"):
        bound(c.PerAgent(mirrored), vectors(2))(rows_of([(0, 3)], np.ones((1, 2), np.float32)))


def test_the_space_may_be_a_rule() -> None:
    def first_half(space: Space) -> Space:
        assert isinstance(space, spaces.Box)
        half = space.shape[0] // 2
        return spaces.Box(space.low[:half], space.high[:half])

    pieces = [c.MapObs(lambda obs: obs[:, : obs.shape[1] // 2], first_half) for _ in range(2)]
    pipeline = c.AgentPipeline(pieces)
    pipeline.bind(vectors(8, -1, 1))
    assert pipeline.output_space_ == vectors(2, -1, 1)
    assert c.MapObs(len, vectors()).params() == {"function": len, "output_space": vectors()}
    assert pipeline(c.Rows(obs=np.zeros((3, 8), np.float32))).obs.shape == (3, 2)


def test_kinds_of_numbers_are_brought_to_what_was_declared() -> None:
    space = spaces.Dict({"x": vectors(2), "hit": spaces.MultiBinary(1), "k": spaces.Discrete(3)})

    def wide(obs: Any) -> Any:
        return {"x": obs["x"].astype(np.float64), "hit": obs["hit"] > 0, "k": obs["k"].astype(np.int32)}

    def lists(obs: Any, agent: Any) -> Any:
        return {"x": obs["x"].tolist(), "hit": [True], "k": int(obs["k"])}

    obs = {"x": np.ones((2, 2), np.float32), "hit": np.ones((2, 1), np.int8), "k": np.array([1, 2])}
    for piece in (c.MapObs(wide), c.PerAgent(lists)):
        same_tree(bound(piece, space)(rows_of([(0, 0), (0, 1)], obs)).obs, {key: obs[key] for key in space.spaces})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"at": np.zeros((2, 3), np.float32), "kind": np.zeros(2, int)}, r"float32 of shape \(2, 3\) for leaf 'at'"),
        ({"at": np.zeros((1, 2), np.float32), "kind": np.zeros(2, int)}, r"shape \(1, 2\) for leaf 'at'"),
        ({"at": np.zeros((2, 2), np.float32), "kind": np.zeros(2)}, r"float64 of shape \(2,\) for leaf 'kind'"),
        ({"at": np.zeros((2, 2), np.float32)}, r"expected a dict with keys \['at', 'kind'\] at /, got \['at'\]"),
        ({"at": [[1], [1, 2]], "kind": np.zeros(2, int)}, "what is no regular array for leaf 'at'"),
        (None, "got NoneType"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_where(value: Any, text: str) -> None:
    rows = rows_of([(0, 0), (0, 1)], batch(PLACE, 2))
    with pytest.raises(ContractError, match=f"the function of MapObs returned.*{text}.*say so with output_space="):
        bound(c.MapObs(lambda obs: value), PLACE)(rows)

    def second_is_bad(obs: Any, agent: Any) -> Any:
        if agent == "wolf":
            return obs
        return map_tree(lambda leaf: leaf[1] if isinstance(leaf, np.ndarray) and len(leaf) == 2 else leaf, value)

    with pytest.raises(ContractError, match="the function of PerAgent returned for row 1"):
        bound(c.PerAgent(second_is_bad), PLACE)(rows)


def test_what_was_given_cannot_be_written_to_and_what_comes_out_can() -> None:
    def in_place(obs: Any, agent: Any = None) -> Any:
        obs *= 2
        return obs

    rows = rows_of([(0, 0)], np.ones((1, 2), np.float32))
    for piece in (c.MapObs(in_place), c.PerAgent(in_place)):
        with pytest.raises(ValueError, match="read-only"):
            bound(piece, vectors(2))(rows)
    for piece in (c.MapObs(lambda obs: obs), c.MapObs(lambda obs: np.broadcast_to(np.float32(1), obs.shape))):
        out = bound(piece, vectors(2))(rows).obs
        out += 1
    assert rows.obs.tolist() == [[1, 1]]


def test_objects_pass_by_their_number() -> None:
    texts = np.array(["a", "bc"], object)
    upper = bound(c.PerAgent(lambda obs, agent: f"{agent}: {obs}"), spaces.Text(9))
    assert upper(rows_of([(0, 0), (0, 2)], texts)).obs.tolist() == ["wolf: a", "fox: bc"]
    whole = bound(c.MapObs(lambda obs: obs[::-1]), spaces.Text(9))
    assert whole(rows_of([(0, 0), (0, 2)], texts)).obs.tolist() == ["bc", "a"]
    with pytest.raises(ContractError, match=r"expected objects of shape \(2,\)"):
        bound(c.MapObs(lambda obs: obs[:1]), spaces.Text(9))(rows_of([(0, 0), (0, 2)], texts))
