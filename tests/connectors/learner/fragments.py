"""Random fragments as plain Python lists, the rows made of them, and every formula once more, in its slowest form.

The references here are definitions, not algorithms: a sum is written as a sum, for one row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from marlvec.connectors.rows import Rows

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


def rows_of(batch: Sequence[Fragment]) -> Rows:
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
