"""A collector that was loaded from a file makes the batches of the one that went on, bit by bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import Collector
from marlvec.collect import Episode
from marlvec.connectors import FilterRows, Rows
from marlvec.connectors.action import ActionPipeline, EpsilonGreedy, StickyActions
from marlvec.connectors.agent import AgentPipeline, FrameStack, NormalizeObs, PrevActions
from marlvec.policies import Policy, RandomPolicy
from tests.collect.state.saved import Amounts, goes_on_alike
from tests.vector.support.kinds import SCRIPTED, WALKS, factories_of, vectorize, walks

N = 4
UNITS = ("env_steps", "agent_steps", "episodes")


class Drawing(RandomPolicy):
    """Draws at random, and says in a column of its own how often it was asked; its version goes on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.calls += 1
        self.version = self.calls // 3
        return super().act(rows, explore=explore), {"call": np.full(len(rows), self.calls)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({"rng": state["rng"]})
        self.calls = state["calls"]


def by_lot(agent: str, episode: Episode) -> str:
    return "ab"[int(episode.rng.integers(2))]


def keeps_some(rows: Rows) -> Any:
    return (rows["t"] + rows["env_id"]) % 3 != 1


@dataclass
class Plan:
    """How a collector is built."""

    kind: str
    backend: str = "sync"
    mode: str = "same_step"
    batch_mode: str = "truncate"
    policies: str = "one"
    connectors: str = "none"
    overlap: bool = False
    random_steps: int = 0
    frozen: bool = False
    follows: bool = False
    stream: int = 0

    def make(self) -> Collector:
        factories = walks(self.kind, N) if self.kind in WALKS else factories_of(self.kind, N)
        copied = "deepcopy" if self.kind not in WALKS else None
        envs = vectorize(self.backend, factories, autoreset_mode=self.mode, env_state=copied)
        # What is repeated a mask may forbid; and texts are no numbers to be averaged.
        connectors = "none" if "masked" in self.kind or self.kind == "single" else self.connectors
        policies: dict[str, Policy] = {"a": Drawing()} if self.policies == "one" else {"a": Drawing(), "b": Drawing()}
        mapping: Any = {"one": "a", "by lot": by_lot}.get(self.policies) or {
            name: "ab"[a % 2] for a, name in enumerate(envs.agents)
        }
        agent: dict[str, Callable[[], AgentPipeline]] = {
            "none": lambda: AgentPipeline([]),
            "memory": lambda: AgentPipeline([NormalizeObs(), FrameStack(3), PrevActions()]),
            "filter": lambda: AgentPipeline([FilterRows(keeps_some, noop=0)]),
            "repeat": lambda: AgentPipeline([FilterRows(keeps_some, noop="repeat")]),
        }

        def action() -> ActionPipeline:
            more = [EpsilonGreedy(0.5, seed=3), StickyActions(0.3, seed=1)] if connectors == "memory" else []
            return ActionPipeline([*ActionPipeline.default(), *more])

        return Collector(
            envs,
            policies,
            mapping,
            agent_connectors={name: agent[connectors]() for name in policies},
            action_connectors={name: action() for name in policies},
            batch_mode=self.batch_mode,  # type: ignore[arg-type]
            overlap=self.overlap,
            random_steps=self.random_steps,
            policies_to_train=["a"] if self.frozen else None,
            callbacks=[{"on_episode_step": note}] if self.follows else (),
            seed=7,
            window=5,
            stream=self.stream,
        )


def note(step: Any) -> None:
    """Numbers of a running episode, and draws from its random stream."""
    for episode, reward in zip(step.episodes, step.rewards, strict=True):
        custom = episode.custom
        custom["sum"] = custom.get("sum", 0.0) + float(reward[0]) * float(episode.rng.random())


amounts = st.lists(
    st.builds(lambda unit, k: {unit: k}, st.sampled_from(UNITS), st.integers(1, 30)), min_size=1, max_size=3
)


@pytest.mark.slow("collects whole runs on several backends")
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=st.builds(
        Plan,
        kind=st.sampled_from(["parallel", "turns", "keyed", "slot", "single", *SCRIPTED]),
        backend=st.sampled_from(["sync", "sync", "thread"]),
        mode=st.sampled_from(["same_step", "next_step", "disabled"]),
        batch_mode=st.sampled_from(["truncate", "complete"]),
        policies=st.sampled_from(["one", "two", "by lot"]),
        connectors=st.sampled_from(["none", "memory", "filter", "repeat"]),
        overlap=st.booleans(),
        random_steps=st.sampled_from([0, 0, 9, 40]),
        frozen=st.booleans(),
        follows=st.booleans(),
        stream=st.sampled_from([0, 5]),
    ),
    before=amounts,
    after=amounts,
)
def test_batches_are_those_of_the_run_that_went_on(plan: Plan, before: Amounts, after: Amounts) -> None:
    with tempfile.TemporaryDirectory() as folder:
        goes_on_alike(plan.make, Path(folder), before, after)


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_resume_is_exact_in_worker_processes(batch_mode: str, tmp_path: Path) -> None:
    plan = Plan("turns", "async", batch_mode=batch_mode, policies="by lot", connectors="memory", follows=True)
    goes_on_alike(plan.make, tmp_path, [{"env_steps": 37}], [{"env_steps": 20}, {"episodes": 7}])


def native(name: str, num_envs: int, **options: Any) -> Collector:
    return Collector(marlvec.make(name, num_envs, backend="native"), RandomPolicy(), seed=5, **options)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.parametrize("name", ["simple_spread", "connect_four"])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_resume_is_exact_in_native_envs(name: str, batch_mode: Any, tmp_path: Path) -> None:
    options: Any = {"batch_mode": batch_mode}

    make = partial(native, name, 6, **options)
    goes_on_alike(make, tmp_path, [{"env_steps": 60}, {"env_steps": 61}], [{"env_steps": 120}, {"agent_steps": 77}])
