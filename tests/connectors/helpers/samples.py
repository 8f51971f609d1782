"""What the connector tests are fed with: random spaces, and batches of values of a space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st
from numpy.typing import NDArray

from marlvec.connectors import AgentConnector, AgentPipeline, Rows
from marlvec.trees import zip_trees

Space = spaces.Space[Any]

FLOATS = (np.float32, np.float64)


@st.composite
def boxes(
    draw: st.DrawFn, ranks: Sequence[int] = (0, 1, 2, 3), dtypes: Sequence[Any] = (*FLOATS, np.uint8)
) -> spaces.Box:
    shape = tuple(draw(st.integers(1, 3)) for _ in range(draw(st.sampled_from(ranks))))
    dtype = draw(st.sampled_from(dtypes))
    if dtype is np.uint8:
        return spaces.Box(0, 255, shape, np.uint8)
    if draw(st.booleans()):
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    low = draw(st.sampled_from([-1.0, -0.1, 0.0, 2.5]))
    return spaces.Box(low, low + draw(st.sampled_from([0.3, 1.0, 7.0])), shape, dtype)


def discretes() -> st.SearchStrategy[spaces.Discrete]:
    return st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-2, 3))


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    shape = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    nvec = np.array(draw(st.lists(st.integers(1, 4), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    start = np.full(shape, draw(st.integers(-1, 2)))
    return spaces.MultiDiscrete(nvec.reshape(shape), start=start)


def leaf_spaces() -> st.SearchStrategy[Space]:
    binaries = st.sampled_from([(1,), (4,), (2, 3)]).map(spaces.MultiBinary)
    return st.one_of(boxes(), discretes(), multi_discretes(), binaries)


def any_spaces() -> st.SearchStrategy[Space]:
    """Box, Discrete, MultiDiscrete, MultiBinary, and Dicts and Tuples of them, nested."""

    def nest(inner: st.SearchStrategy[Space]) -> st.SearchStrategy[Space]:
        dicts = st.dictionaries(st.sampled_from("cabd"), inner, min_size=1, max_size=3).map(spaces.Dict)
        return st.one_of(dicts, st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple))

    return st.recursive(leaf_spaces(), nest, max_leaves=5)


def batch(space: Space, n: int, seed: int = 0) -> Any:
    """Draw ``n`` samples as one tree of (n, ...) arrays."""
    if n == 0:
        return zip_trees(lambda leaves: np.stack(leaves)[:0], [plain(space.sample())])
    space.seed(seed)
    return zip_trees(np.stack, [plain(space.sample()) for _ in range(n)])


def plain(value: Any) -> Any:
    """The same with dicts and arrays only."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return np.asarray(value)


def unbatch(space: Space, tree: Any, i: int) -> Any:
    """Row ``i`` of a batch, in the form the space itself uses."""
    if isinstance(space, spaces.Dict):
        return {key: unbatch(sub, tree[key], i) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(unbatch(sub, item, i) for sub, item in zip(space.spaces, tree, strict=True))
    return np.asarray(tree[i])


def all_inside(space: Space, tree: Any, n: int) -> bool:
    return all(space.contains(unbatch(space, tree, i)) for i in range(n))


def bound(
    piece: AgentConnector, space: Space, agents: Sequence[str] = (), action_space: Space | None = None
) -> AgentPipeline:
    """The piece in a pipeline that knows its spaces."""
    pipeline = AgentPipeline([piece])
    pipeline.bind(space, agents, action_space)
    return pipeline


def through(piece: AgentConnector, space: Space, obs: Any) -> Any:
    """What becomes of observations of this space."""
    return bound(piece, space)(Rows(obs=obs)).obs


def vectors(d: int = 3, low: float = -np.inf, high: float = np.inf, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(low, high, (d,), dtype)


def rows_of(pairs: Sequence[tuple[int, int]], obs: Any, **columns: Any) -> Rows:
    """Rows of these (env, agent) pairs."""
    ids: NDArray[np.int64] = np.array(pairs, np.int64).reshape(-1, 2)
    return Rows({"env_id": ids[:, 0], "agent_index": ids[:, 1], "obs": obs, **columns})


def pairs_of(envs: int, agents: int) -> list[tuple[int, int]]:
    return [(e, a) for e in range(envs) for a in range(agents)]


def same_tree(a: Any, b: Any) -> None:
    """Equal to the bit, dtypes included; of rows, their columns."""
    a, b = (dict(one.items()) if isinstance(one, Rows) else one for one in (a, b))
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same_tree(a[key], b[key])
    elif isinstance(a, (tuple, list)):
        assert type(a) is type(b)
        for x, y in zip(a, b, strict=True):
            same_tree(x, y)
    else:
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)
