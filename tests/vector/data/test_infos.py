"""Infos: dicts of arrays with presence masks, and back without loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marlvec import infos_from_list, infos_to_list
from marlvec.errors import SerialisationError
from marlvec.testing.scripted import SingleEnv
from marlvec.vector.infos import RESERVED
from tests.vector.support.kinds import vectorize
from tests.vector.support.reference import assert_trees_equal

AGENTS = ("red", "green", "blue")

SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)


def arrays(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    return (np.random.default_rng(seed).random(shape) * 200).astype(dtype)


VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        st.text(max_size=4),
        st.none(),
        st.builds(
            arrays, st.sampled_from(["bool", "uint8", "int64", "float16", "float64", "U3"]), SHAPES, st.integers(0, 99)
        ),
        st.just(b"bytes"),
        st.just((1, "two")),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(["a", "b", "_c", ""]), st.integers(0, 2)), inner, max_size=3),
    ),
    max_leaves=6,
)
KEYS = st.one_of(
    st.sampled_from([*sorted(RESERVED), "reward", "_reward", "t", "", "_", "__agents__x"]), st.text(max_size=3)
)
ENTRIES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=3)
INFOS = st.lists(st.dictionaries(st.sampled_from([*AGENTS, "__common__"]), ENTRIES, max_size=4), min_size=1, max_size=4)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(26)
@given(infos=INFOS)
@example(infos=[{"red": {"x": 1}}, {"red": {"x": 1.5}}, {"red": {"x": True}}])
@example(infos=[{"red": {"x": {"y": 1}}}, {"blue": {"x": 3}}, {"__common__": {"x": {"y": {"z": None}}}}])
@example(infos=[{"red": {"x": {}}}, {"red": {"x": {"y": 1}}}])
@example(infos=[{"red": {"alive": 3, "_x": 1}, "__common__": {"x": [1]}}, {}])
@example(infos=[{"red": {"x": np.zeros(2)}}, {"red": {"x": np.zeros(3)}}, {"red": {"x": np.zeros(2, np.int8)}}])
def test_there_and_back(infos: list[Any]) -> None:
    """Every value, key and type comes back, whatever is beside it."""
    packed = infos_from_list(infos, AGENTS)
    back = infos_to_list(packed, AGENTS, len(infos))
    assert_trees_equal(back, infos, "infos")


@pytest.mark.checklist(26)
def test_the_form() -> None:
    packed = infos_from_list(
        [{"red": {"hits": 3, "place": np.array([1.0, 2.0])}, "__common__": {"level": 7}}, {"blue": {"hits": 4}}, {}],
        AGENTS,
    )
    assert packed["hits"].tolist() == [[3, 0, 0], [0, 0, 4], [0, 0, 0]]
    assert packed["hits"].dtype == np.int64
    assert packed["_hits"].tolist() == [[True, False, False], [False, False, True], [False] * 3]
    assert packed["place"].shape == (3, 3, 2)
    assert packed["level"].tolist() == [7, 0, 0]
    assert packed["_level"].tolist() == [True, False, False]
    assert packed["_level"].dtype == packed["_hits"].dtype == np.bool_


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("C12")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_an_info_that_cannot_cross_is_an_error_of_its_env(context: str) -> None:
    import threading

    class Locked(SingleEnv):
        def _info(self) -> dict[str, Any]:
            return (
                {"lock": threading.Lock()} if self.world.t == 2 and self.world.env_index == 1 else {"fine": lambda: 3}
            )

    with vectorize("async", [partial(Locked, 4, env_index=i) for i in range(3)], context=context) as envs:
        for _ in range(3):
            infos = envs.reset()[1]
            assert infos["fine"][2]() == 3, "a function travels by value"
            envs.step(np.zeros((3, 1), np.int64))
            with pytest.raises(
                SerialisationError, match=r"env 1, infos\(\): the info of env 1 cannot be pickled.*lock"
            ):
                envs.step(np.zeros((3, 1), np.int64))
