from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box

from marlvec.connectors import AgentIndicator, AgentPipeline
from marlvec.errors import ContractError
from tests.connectors.helpers.samples import rows_of, vectors

NAMES = ("wolf_0", "hare_0", "wolf_1")
EYE = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
KINDS = [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("args", "kwargs", "codes"),
    [
        ((), {}, EYE),
        ((3,), {}, EYE),
        ((["a", "b", "c"],), {}, EYE),
        ((), {"mode": "type"}, KINDS),
        ((), {"mode": "type", "types": ["x", "y", "x"]}, KINDS),
        ((3,), {"mode": "type", "types": ["x", "y", "x"]}, KINDS),
        ((), {"mode": "type", "types": {"wolf_1": "x", "hare_0": "y", "wolf_0": "x", "fox": "z"}}, KINDS),
        ((["red1", "blue1", "red2"],), {"mode": "type"}, KINDS),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_it_appends_who_the_agent_is(args: Any, kwargs: Any, codes: list[list[int]], dtype: Any) -> None:
    pipeline = AgentPipeline([AgentIndicator(*args, **kwargs)])
    pipeline.bind(Box(2, 9, (2,), dtype), NAMES)
    order = [2, 0, 1, 1]
    obs = np.arange(2, 10).astype(dtype).reshape(4, 2)
    out = pipeline(rows_of([(e, a) for e, a in enumerate(order)], obs)).obs
    assert out.dtype == dtype
    assert out.tolist() == [[*row, *codes[a]] for row, a in zip(obs.tolist(), order, strict=True)]
    width = len(codes[0])
    assert pipeline.output_space_ == Box(
        np.array([2, 2] + [0] * width, dtype), np.array([9, 9] + [1] * width, dtype), dtype=dtype
    )


def test_an_agent_beyond_the_last_is_an_error() -> None:
    pipeline = AgentPipeline([AgentIndicator(2)])
    pipeline.bind(vectors())
    with pytest.raises(ContractError, match="agent_index 2 in rows of 2 agents"):
        pipeline(rows_of([(0, 2)], np.zeros((1, 3), np.float32)))


def test_repr() -> None:
    assert repr(AgentIndicator()) == "AgentIndicator()"
    assert repr(AgentIndicator(["a"], mode="type")) == "AgentIndicator(agents=('a',), mode='type')"
