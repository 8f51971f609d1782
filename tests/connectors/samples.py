"""What the connector tests are fed with: spaces and their values, decisions of agents, episodes, and fragments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Box
from hypothesis import strategies as st
from numpy.typing import NDArray

from marlvec.connectors import ActionPipeline, AgentConnector, AgentPipeline, Connector, Rows
from marlvec.connectors.connector import ActionConnector
from marlvec.testing.connector_trial import SampledRows
from marlvec.trees import zip_trees

# --- What the connector tests are fed with: random spaces, and batches of values of a space


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


# --- What the tests of the action side are fed with: decisions of agents whose episodes come and go


WOLF_AND_HARE = ("wolf", "hare")
OBS = Box(-1, 1, (2,))


def bind(piece: ActionConnector, space: Space, *, training: bool = True) -> ActionPipeline:
    """The piece in a pipeline that knows what the env takes."""
    pipeline = ActionPipeline([piece])
    pipeline.bind(space, WOLF_AND_HARE)
    return pipeline.train() if training else pipeline.eval()


def decisions(actions: Any, *, envs: int = 1, agents: int = 1, t: int = 0, eps: int = 0, **columns: Any) -> Rows:
    """One decision of every agent of every env, in order; all are at the same ``t`` of their episodes."""
    n = envs * agents
    env_id = np.repeat(np.arange(envs), agents)
    return Rows(
        env_id=env_id,
        agent_index=np.tile(np.arange(agents), envs),
        eps_id=eps * envs + env_id,
        t=np.full(n, t),
        first=np.full(n, t == 0),
        actions=actions,
        **columns,
    )


def sampled_actions(
    space: Space, ticks: int, *, envs: int = 3, agents: int = 2, seed: int = 0, mask: Space | None = None
) -> list[Rows]:
    """Draw ticks of an imagined rollout, whose actions are members of ``space``, with action masks of ``mask``."""
    sampled = SampledRows(OBS, space, OBS if mask is None else mask, {}, envs, agents, seed)
    acting = [step.take(~step.rows.last) for step in sampled.steps(ticks)]
    return [step.rows.replace(**step.answer) for step in acting]


def send(pipeline: ActionPipeline, ticks: Sequence[Rows]) -> list[Rows]:
    return [pipeline(rows) for rows in ticks]


# --- Episodes that come and go: ticks of rows as a collector would give them, and what a policy answers


Pair = tuple[int, int]

ENVS, AGENTS = 3, 2


@dataclass
class Tick:
    """One call: which pairs have rows, who begins, who ends, and which envs are reset after it."""

    pairs: list[Pair]
    first: list[bool]
    last: list[bool]
    resets: list[int]
    number: int = 0


@dataclass
class Episodes:
    """The plain reference's memory: of every pair the values of its running episode, oldest first."""

    values: dict[Pair, list[Any]] = field(default_factory=dict)

    def begin(self, pair: Pair, *, first: bool) -> list[Any]:
        if first or pair not in self.values:
            self.values[pair] = []
        return self.values[pair]

    def reset(self, envs: list[int]) -> None:
        self.values = {pair: seen for pair, seen in self.values.items() if pair[0] not in envs}


@st.composite
def ticks(draw: st.DrawFn, most: int = 10) -> list[Tick]:
    """Any subset of 3 envs × 2 agents in any order, tick after tick. An agent that ended comes back as first."""
    out: list[Tick] = []
    fresh = set(pairs_of(ENVS, AGENTS))
    for number in range(draw(st.integers(1, most))):
        pairs = draw(st.lists(st.sampled_from(pairs_of(ENVS, AGENTS)), unique=True, max_size=ENVS * AGENTS))
        first = [pair in fresh or draw(st.sampled_from([False] * 5 + [True])) for pair in pairs]
        last = [draw(st.sampled_from([False] * 4 + [True])) for _ in pairs]
        fresh = (fresh - set(pairs)) | {pair for pair, ends in zip(pairs, last, strict=True) if ends}
        resets = sorted(draw(st.sets(st.integers(0, ENVS), max_size=1)))
        if draw(st.booleans()):  # else the reset alone has to begin the episode anew
            fresh |= {pair for pair in pairs_of(ENVS, AGENTS) if pair[0] in resets}
        out.append(Tick(pairs, first, last, resets, number))
    return out


def rows_at(tick: Tick, space: Space, **columns: Any) -> Rows:
    """Rows of a tick; every number is that of its pair and tick, whatever the batch."""
    everyone = pairs_of(ENVS, AGENTS)
    where = np.array([everyone.index(pair) for pair in tick.pairs], np.int64)
    rng = np.random.default_rng(tick.number)
    reward = np.round(rng.normal(size=len(everyone)), 3)
    all_rows = rows_of(everyone, batch(space, len(everyone), 100 + tick.number), rewards=reward)
    rows = all_rows.take(where)
    first = np.array(tick.first, bool)
    return rows.replace(
        first=first, last=np.array(tick.last, bool), rewards=np.where(first, np.nan, rows.rewards), **columns
    )


def answered(rows: Rows, tick: Tick, actions: Space, **columns: Any) -> Rows | None:
    """The rows that a policy answers, all but the last ones, with what it answers; None where there are none."""
    acting = ~np.array(tick.last, bool)
    if not acting.any():
        return None
    everyone = pairs_of(ENVS, AGENTS)
    where = np.array([everyone.index(pair) for pair in tick.pairs], np.int64)
    answers = rows_of(everyone, np.zeros(len(everyone)), actions=batch(actions, len(everyone), 500 + tick.number))
    return rows.replace(actions=answers.take(where)["actions"], **columns).take(acting)


def play_ticks(
    piece: Connector, game: list[Tick], space: Space, actions: Space
) -> Iterator[tuple[Tick, Rows, Rows, Rows | None]]:
    """Run a piece through a game: yields each tick, its rows, what came of them and what the policy answered."""
    for tick in game:
        rows = rows_at(tick, space)
        out = piece(rows)
        answer = answered(out, tick, actions) if len(out) == len(rows) else None
        yield tick, rows, out, answer
        if answer is not None:
            piece.on_policy_output(answer)
        piece.reset(tick.resets)


# --- Random fragments as plain Python lists, the rows made of them, and every formula once more, in its slowest form


ENDS = ("terminated", "truncated", "both", "cut")


@dataclass(frozen=True)
class Fragment:
    """A stretch of one agent's episode.

    Attributes:
        rewards: One per row.
        values: V of each row's observation.
        end: How it ended; "cut" where the episode goes on in another batch.
        end_value: V of the last row's next observation.
        logp: Log-probabilities of the actions under the policy that acted.
        target_logp: Those under the policy that learns.
        start: ``t`` of the first row.
    """

    rewards: tuple[float, ...]
    values: tuple[float, ...]
    end: str
    end_value: float
    logp: tuple[float, ...]
    target_logp: tuple[float, ...]
    start: int = 0

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def terminated(self) -> bool:
        return self.end in ("terminated", "both")

    @property
    def bootstrap(self) -> float:
        """What the formulas must take for V after the last row."""
        return 0.0 if self.terminated else self.end_value

    def value_after(self, t: int) -> float:
        return self.values[t + 1] if t + 1 < len(self) else self.bootstrap


@st.composite
def fragments(draw: st.DrawFn, ends: Sequence[str] = ENDS) -> Fragment:
    n = draw(st.integers(1, 9))
    number = st.floats(-100, 100, allow_subnormal=False)
    chance = st.floats(-5, 0, allow_subnormal=False)

    def several(of: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(of, min_size=n, max_size=n)))

    return Fragment(
        rewards=several(number),
        values=several(number),
        end=draw(st.sampled_from(ends)),
        end_value=draw(number),
        logp=several(chance),
        target_logp=several(chance),
        start=draw(st.integers(0, 3)),
    )


def batches(ends: Sequence[str] = ENDS, min_size: int = 0) -> st.SearchStrategy[list[Fragment]]:
    return st.lists(fragments(ends), min_size=min_size, max_size=6)


GAMMAS = st.one_of(st.sampled_from([0.0, 0.99, 1.0]), st.floats(0, 1, allow_subnormal=False))


def rows_of_fragments(batch: Sequence[Fragment]) -> Rows:
    """The fragments as a collector would give them.

    An observation is (number that no other one has, its value); the actions are (2,) floats.
    """
    obs, next_obs = [], []
    for f, fragment in enumerate(batch):
        seen = [(100 * f + t, value) for t, value in enumerate((*fragment.values, fragment.end_value))]
        obs += seen[:-1]
        next_obs += seen[1:]
    lengths = [len(fragment) for fragment in batch]
    number = np.repeat(np.arange(len(batch)), lengths)
    n = len(number)

    def joined(name: str) -> Any:
        return np.array([x for fragment in batch for x in getattr(fragment, name)], np.float64)

    def at_the_end(*ends: str) -> Any:
        flags = [t + 1 == len(f) and f.end in ends for f in batch for t in range(len(f))]
        return np.array(flags, np.bool_)

    return Rows(
        obs=np.array(obs).reshape(n, 2),
        actions={"arm": np.arange(2.0 * n).reshape(n, 2), "gear": np.arange(n)},
        rewards=joined("rewards"),
        next_obs=np.array(next_obs).reshape(n, 2),
        terminated=at_the_end("terminated", "both"),
        truncated=at_the_end("truncated", "both"),
        t=np.array([fragment.start + t for fragment in batch for t in range(len(fragment))], np.int64),
        eps_id=number + 40,
        unroll_id=number + 7,
        env_id=number // 2,
        agent_index=number % 2,
        values=joined("values"),
        logp=joined("logp"),
        target_logp=joined("target_logp"),
    )


class Critic:
    """A value function that reads the value off the observation, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Rows] = []

    def __call__(self, rows: Rows) -> Any:
        self.asked.append(rows)
        return rows["obs"][:, 1]


# --- the formulas, by their definitions
# (The references here are definitions, not algorithms: a sum is written as a sum, for one row at a time.)


def per_row(function: Any, batch: Sequence[Fragment], *arguments: Any) -> list[Any]:
    return [function(fragment, t, *arguments) for fragment in batch for t in range(len(fragment))]


def delta(f: Fragment, t: int, gamma: float) -> float:
    return f.rewards[t] + gamma * f.value_after(t) - f.values[t]


def advantage(f: Fragment, t: int, gamma: float, lambda_: float) -> float:
    """The exponentially weighted sum of all deltas from t on (Schulman et al. 2016, equation 16)."""
    return sum((gamma * lambda_) ** i * delta(f, t + i, gamma) for i in range(len(f) - t))


def return_to_go(f: Fragment, t: int, gamma: float, bootstrap: bool) -> float:
    k = len(f) - t
    paid = sum(gamma**i * f.rewards[t + i] for i in range(k))
    return paid + gamma**k * f.bootstrap if bootstrap else paid


def n_step(f: Fragment, t: int, n: int, gamma: float) -> tuple[float, int, float]:
    """Reward over up to n rows, how many those are, and the discount of what comes after."""
    k = min(n, len(f) - t)
    terminated = t + k == len(f) and f.terminated
    return sum(gamma**i * f.rewards[t + i] for i in range(k)), k, 0.0 if terminated else gamma**k


def v_trace(f: Fragment, t: int, gamma: float, rho_bar: float, c_bar: float) -> float:
    """Equation 1 of Espeholt et al. 2018."""
    if t == len(f):
        return f.bootstrap
    ratios = [math.exp(f.target_logp[s] - f.logp[s]) for s in range(len(f))]
    total = f.values[t]
    for s in range(t, len(f)):
        trace = math.prod(min(c_bar, ratios[i]) for i in range(t, s))
        total += gamma ** (s - t) * trace * min(rho_bar, ratios[s]) * delta(f, s, gamma)
    return total


def v_trace_advantage(f: Fragment, t: int, gamma: float, rho_bar: float, c_bar: float) -> float:
    rho = min(rho_bar, math.exp(f.target_logp[t] - f.logp[t]))
    return rho * (f.rewards[t] + gamma * v_trace(f, t + 1, gamma, rho_bar, c_bar) - f.values[t])


def assert_close(got: Any, want: Any) -> None:
    """Equal to the last digit of float32."""
    assert np.asarray(got).dtype == np.float32
    np.testing.assert_allclose(got, np.array(want, np.float64).reshape(np.shape(got)), rtol=2e-7, atol=1e-9)
