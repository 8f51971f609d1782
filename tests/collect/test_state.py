"""What a collector saves: exact resume, envs without states, parts beside rows, and states that are refused."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete, Space
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv

import marlvec
from marlvec import Collector, external
from marlvec.collect import Episode
from marlvec.collect.loggers import JSONLinesLogger
from marlvec.connectors import FilterRows, Rows
from marlvec.connectors.action import ActionPipeline, EpsilonGreedy, StickyActions
from marlvec.connectors.agent import (
    AgentPipeline,
    DelayObs,
    FrameStack,
    NormalizeObs,
    NormalizeReward,
    PrevActions,
    PrevRewards,
)
from marlvec.errors import ArgumentError, CheckpointError, EnvsDriven, StateError
from marlvec.policies import Policy, RandomPolicy
from marlvec.serialization.archive import write_archive
from marlvec.serialization.values import read_value, write_value
from tests.checkpoints import training as killed
from tests.collect.saved import Amounts, batches_of, counted, goes_on_alike, without_clock
from tests.tracer import Tracer
from tests.vector.support.kinds import SCRIPTED, WALKS, ParallelWalk, PlainSingleWalk, factories_of, vectorize, walks
from tests.vector.test_saved_states import same
from tests.waiting import until

# --- A collector that was loaded from a file makes the batches of the one that went on, bit by bit


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


# --- envs whose states cannot be saved begin new episodes; what ran in them is lost, and counted


class Closed(ParallelWalk):
    """Keeps its state to itself."""

    get_state = set_state = None  # type: ignore[assignment]


def partly_closed(batch_mode: Any, closed: tuple[int, ...] = (1, 3), **options: Any) -> Collector:
    factories = walks("parallel", 4)
    for i in closed:
        factories[i] = partial(Closed, i)
    return Collector(vectorize("sync", factories, **options), RandomPolicy(), batch_mode=batch_mode, seed=3)


LATER: Amounts = [{"env_steps": 13}, {"episodes": 5}, {"agent_steps": 40}]


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("closed", [(1, 3), (0, 1, 2, 3)])
def test_their_episodes_are_lost_and_counted(batch_mode: Any, closed: tuple[int, ...], tmp_path: Path) -> None:
    collector = partly_closed(batch_mode, closed)
    with collector.envs:
        assert np.flatnonzero(~collector.resumes_exactly).tolist() == list(closed)
        batches = [collector.collect(env_steps=23)]
        running = collector._current.state.eps_id_N[list(closed)].tolist()
        collector.save(tmp_path / "one.npz")
        before = counted(collector)
    runs = []
    for _ in range(2):
        other = partly_closed(batch_mode, closed)
        with other.envs:
            other.load(tmp_path / "one.npz")
            after = counted(other)
            assert after["episodes_restarted"] == before["episodes_restarted"] + len(closed)
            assert after["env_steps"] == before["env_steps"]
            waits = before["env_steps"] - batches[0].env_steps if batch_mode == "complete" else 0
            assert 0 <= after["env_steps_lost"] - before["env_steps_lost"] <= waits
            if closed == (0, 1, 2, 3) and batch_mode == "truncate":
                assert after["agent_steps_lost"] == after["agent_steps"] - batches[0].agent_steps
            came = [other.collect(**amount) for amount in LATER]
            for batch in came:
                assert not set(batch["main"].eps_id.tolist()) & set(running)
            own = counted(other)
            waiting = other._current.state.counters.waiting_env_steps
            delivered = batches[0].env_steps + sum(batch.env_steps for batch in came)
            assert own["env_steps"] == delivered + own["env_steps_lost"] + waiting
            runs.append([dict(batch["main"].items()) for batch in came])
    same(runs[0], runs[1])  # the new episodes have seeds that follow from the state


def test_masked_envs_stay_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_one = partial(fragile, 4)
    goes_on_alike(make_one, tmp_path, [{"env_steps": 60}], LATER)
    assert caplog.records
    caplog.clear()


class Fragile(ParallelWalk):
    """Raises in one of its steps, once."""

    def step(self, actions: Any) -> Any:
        if self.walk.index == 2 and self.walk.t == 3 and self.walk.episode > 0:
            raise RuntimeError("it broke")
        return super().step(actions)


def fragile(n: int) -> Collector:
    envs = vectorize("sync", [partial(Fragile, i) for i in range(n)], on_fault="mask")
    return Collector(envs, RandomPolicy(), seed=2)


def test_state_saved_after_a_policy_error_repeats_the_call(tmp_path: Path) -> None:
    """A state in the middle of a batch, with answers that were made and not sent."""

    class Failing(RandomPolicy):
        fails_at, asked = 9, 0

        def act(self, rows: Any, *, explore: bool = True) -> Any:
            self.asked += 1
            if self.asked == self.fails_at:
                raise RuntimeError("out of order")
            return super().act(rows, explore=explore)

    def build(fails_at: int = 0) -> Collector:
        failing = Failing()
        failing.fails_at = fails_at
        envs = vectorize("sync", walks("parallel", 3))
        return Collector(envs, {"a": RandomPolicy(), "b": failing}, dict(zip("abc", "aba", strict=True)), seed=4)

    collector, other = build(9), build()
    with collector.envs, other.envs:
        with pytest.raises(RuntimeError, match="out of order"):
            collector.collect(env_steps=40)
        collector.save(tmp_path / "one.npz")
        want = batches_of(collector, LATER)
        other.load(tmp_path / "one.npz")
        same(batches_of(other, LATER), want)
        same(without_clock(other.get_state()), without_clock(collector.get_state()))


@pytest.mark.parametrize("lockstep", [False, True])
def test_envs_driven_from_outside_have_no_state(lockstep: bool) -> None:
    with external.make(partial(PlainSingleWalk, 0), 2, lockstep=lockstep) as envs:
        collector = Collector(envs, RandomPolicy())
        with pytest.raises(StateError, match="external envs cannot be saved"):
            collector.get_state()


# --- what a collector's state has beside rows: evaluations, generators, loggers; and that all of it is plain data


SHORT = [{"env_steps": 13}, {"episodes": 4}]


def make(**options: Any) -> Collector:
    return Collector(
        vectorize("sync", walks("parallel", 3)), options.pop("policies", RandomPolicy()), seed=6, **options
    )


def test_evaluations_have_the_seeds_that_they_would_have_had(tmp_path: Path) -> None:
    def evaluated(collector: Collector) -> list[Any]:
        with vectorize("sync", walks("parallel", 2)) as others:
            found = [collector.evaluate(4, others, explore=True) for _ in range(2)]
        return [[(one.eps_id, one.episode_return, one.length) for one in each.episodes] for each in found]

    collector, other = make(), make()
    with collector.envs, other.envs:
        batches_of(collector, SHORT)
        first = evaluated(collector)
        collector.save(tmp_path / "one.npz")
        want = evaluated(collector)
        other.load(tmp_path / "one.npz")
        assert evaluated(other) == want != first
        same(batches_of(other, SHORT), batches_of(collector, SHORT))


def test_resumed_torch_policy_draws_the_same_actions(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from marlvec.interop.torch import TorchPolicy

    def build() -> Collector:
        torch.manual_seed(0)
        return make(policies=TorchPolicy(torch.nn.Linear(6, 3)))

    goes_on_alike(build, tmp_path, [{"env_steps": 40}], SHORT)


def test_a_logger_writes_the_lines_that_it_would_have_written(tmp_path: Path) -> None:
    def lines(path: Path, *, saved: Path | None = None) -> list[Any]:
        with JSONLinesLogger(path) as logger:
            collector = make(callbacks=[logger])
            with collector.envs:
                if saved is None:
                    batches_of(collector, SHORT)
                    collector.save(tmp_path / "one.npz")
                else:
                    collector.load(saved)
                batches_of(collector, SHORT)
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in ("duration", "time")} for line in found]

    want = lines(tmp_path / "log.jsonl")
    assert lines(tmp_path / "log.jsonl", saved=tmp_path / "one.npz") == want, "those after the state were cut off"
    assert len(want) > 8


def plain(value: Any, where: str = "state") -> None:
    """Fails where there is anything but numbers, texts, None and arrays of them, in dicts, lists and tuples."""
    if type(value) is dict:
        for key, part in value.items():
            assert type(key) in (str, int), f"{where}: {key!r}"
            plain(part, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for k, part in enumerate(value):
            plain(part, f"{where}[{k}]")
    elif type(value) is np.ndarray:
        assert value.dtype.kind in "biufUS", f"{where}: {value.dtype}"
    else:
        assert value is None or type(value) in (bool, int, float, str), f"{where}: {value!r}"


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=6)
@pytest.mark.parametrize("kind", ["parallel", "turns", "single"])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_all_of_it_is_plain_data_and_nothing_in_the_file_is_a_pickle(
    kind: str, batch_mode: str, tmp_path: Path
) -> None:
    collector = Plan(kind, batch_mode=batch_mode, policies="by lot", connectors="memory", follows=True).make()
    with collector.envs:
        batches_of(collector, [{"env_steps": 50}])
        plain(collector.get_state())
        collector.save(tmp_path / "one.npz")
    with np.load(tmp_path / "one.npz", allow_pickle=False) as file:
        assert len([file[name] for name in file.files]) > 5


def test_another_setting_of_a_connector_is_named() -> None:
    def stacked(k: int) -> Collector:
        return make(agent_connectors=AgentPipeline([NormalizeObs(), FrameStack(k)]))

    one, other = stacked(2), stacked(3)
    with one.envs, other.envs:
        batches_of(one, SHORT)
        with pytest.raises(ArgumentError) as caught:
            other.set_state(one.get_state())
        said = str(caught.value)
        assert said.startswith("set_state(): the state is of another collector. connectors:")
        changed = [
            line.strip(" +-,") for line in said.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ]
        assert sorted(changed) == ['"k": 2', '"k": 3']


class Yes(Space[str]):
    """One of a user's own, without a `__repr__`: that of `object` has an address."""

    def contains(self, x: Any) -> bool:
        return bool(x == "yes")

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "yes"


class Agreeing(ParallelEnv[str, Any, Any]):
    """Says yes."""

    metadata: ClassVar[dict[str, Any]] = {"name": "agreeing"}
    possible_agents: ClassVar[list[str]] = ["a"]

    def observation_space(self, agent: str) -> Any:
        return Dict(said=Yes())

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["a"]
        return {"a": {"said": "yes"}}, {"a": {}}

    def step(self, actions: Any) -> Any:
        return {"a": {"said": "yes"}}, {"a": 1.0}, {"a": False}, {"a": False}, {"a": {}}


def test_an_own_space_without_a_repr_is_the_same_in_another_process() -> None:
    collectors = [Collector(vectorize("sync", [Agreeing]), RandomPolicy(), seed=0) for _ in range(2)]
    with collectors[0].envs, collectors[1].envs:
        collectors[0].collect(env_steps=3)
        collectors[1].set_state(collectors[0].get_state())
        assert collectors[1].collect(env_steps=2)["main"]["obs"]["said"].tolist() == ["yes"] * 2


# --- what `set_state` refuses, and what is left where it is refused or interrupted


NEXT = [{"env_steps": 9}, {"episodes": 3}, {"agent_steps": 20}]


def noting(n: int = 3, **options: Any) -> Collector:
    connectors: Any = AgentPipeline([NormalizeObs(), FrameStack(2)])
    options = {"agent_connectors": connectors, "callbacks": [{"on_episode_step": noted}], "seed": 1} | options
    return Collector(vectorize("sync", walks("parallel", n)), RandomPolicy(), **options)


def noted(step: Any) -> None:
    for episode in step.episodes:
        episode.custom["steps"] = episode.custom.get("steps", 0) + 1


def test_states_of_other_collectors_are_refused_by_name() -> None:
    with noting().envs as envs:
        collector = Collector(envs, RandomPolicy(), seed=1)
        collector.collect(env_steps=7)
        state = collector.get_state()
    others: dict[str, Callable[[], Collector]] = {
        "num_envs: the state is of 3, this collector has 4": partial(noting, 4, agent_connectors=None, callbacks=()),
        "batch_mode: the state is of 'truncate', this collector has 'complete'": partial(
            noting, agent_connectors=None, batch_mode="complete"
        ),
        "stream: the state is of 0, this collector has 3": partial(noting, agent_connectors=None, stream=3),
        "connectors:": noting,
    }
    for text, build in others.items():
        other = build()
        with other.envs, pytest.raises(ArgumentError, match=text):
            other.set_state(state)
    with marlvec.make("simple_spread", 3) as envs, pytest.raises(ArgumentError, match=r"agents: .*spaces:"):
        Collector(envs, RandomPolicy()).set_state(state)
    with noting().envs as envs:
        named = Collector(envs, {"a": RandomPolicy(), "b": RandomPolicy()}, "a")
        with pytest.raises(ArgumentError, match=r"policies: .* \['main'\], .* \['a', 'b'\]"):
            named.set_state(state)


def broken(state: Any, path: list[Any], how: str) -> Any:
    """A state with one thing in it that is wrong."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if how == "gone":
        del inner[path[-1]]
    elif how == "more":
        inner[path[-1]] = {"more": 1} if not isinstance(inner[path[-1]], dict) else {**inner[path[-1]], "more": 1}
    else:
        value = inner[path[-1]]
        inner[path[-1]] = value[:-1] if isinstance(value, np.ndarray) and value.ndim and len(value) else "odd"
    return state


def paths(value: Any, upto: tuple[Any, ...] = ()) -> list[list[Any]]:
    """All places in a state."""
    found = [[*upto]] if upto else []
    if isinstance(value, dict):
        for key, part in value.items():
            found += paths(part, (*upto, key))
    return found


# These may lack something, or be of another mode; these columns hold nothing yet. Policies may know of more.
_OPEN = {"living", "numbers", "actions", "actions_for_env", "policy_version", "autoreset"}


@pytest.mark.slow("collects whole runs on several backends")
@settings(max_examples=120)
@given(data=st.data())
def test_bad_states_change_nothing(data: st.DataObject) -> None:
    with _shared() as (collector, state):
        places = [path for path in paths(state) if not _OPEN & set(path) and not str(path[-1]).startswith("final/")]
        place = data.draw(st.sampled_from(places))
        how = data.draw(st.sampled_from(["gone", "odd"] if "policy" in place else ["gone", "more", "odd"]))
        before = without_clock(collector.get_state())
        with pytest.raises(ArgumentError):
            collector.set_state(broken(state, place, how))
        same(without_clock(collector.get_state()), before)


def rewarded() -> Collector:
    envs = vectorize("sync", factories_of("parallel", 4), env_state="deepcopy")
    connectors = AgentPipeline([NormalizeReward(), DelayObs(1), PrevRewards(), NormalizeObs(per_agent=True)])
    return Collector(envs, Drawing(), agent_connectors=connectors, batch_mode="complete", seed=0)


class Failing(Drawing):
    """Fails once, when another policy has answered already."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        if self.calls == 40:
            self.calls = 41
            raise OSError("once")
        return super().act(rows, explore=explore)


def unsent() -> Collector:
    collector = Plan("parallel", connectors="memory").make()
    mapping: Any = dict(zip(collector.envs.agents, ("a", "b", "b"), strict=True))
    return Collector(collector.envs, {"a": Drawing(), "b": Failing()}, mapping, seed=1)


_RICH: dict[str, Callable[[Path], Collector]] = {
    "waiting batches": lambda _: Plan("turns", policies="by lot", random_steps=30).make(),
    "memory": lambda _: Plan(
        "parallel", connectors="memory", random_steps=300, follows=True, frozen=True, policies="two"
    ).make(),
    "turns": lambda _: Plan("turns", batch_mode="complete", policies="by lot", connectors="repeat", frozen=True).make(),
    "objects": lambda _: Plan("single").make(),
    "rewards": lambda _: rewarded(),
    "self-play": lambda folder: killed.league(folder).collector,
    "an unsent answer": lambda _: unsent(),
}


def _saved(collector: Collector, case: str) -> Any:
    """A state in which all is that a collector of this kind may have."""
    if case == "waiting batches":
        with collector.background(env_steps=14, ahead=3) as batches:
            next(batches)
            until(lambda: len(batches) > 1)
            state = collector.get_state()
        assert state["waiting"]
        return state
    with nullcontext() if case != "an unsent answer" else pytest.raises(OSError, match="once"):
        for _ in range(20 if case == "an unsent answer" else 2):
            collector.collect(env_steps=25)
    return collector.get_state()


def _arrays(value: Any, upto: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], np.ndarray[Any, Any]]]:
    if isinstance(value, np.ndarray):
        yield upto, value
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _arrays(part, (*upto, key))


def _at(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    for key in path:
        value = value[key]
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    part = _replaced(value[path[0]], path[1:], new)
    if isinstance(value, dict):
        return {**value, path[0]: part}
    return type(value)(part if k == path[0] else one for k, one in enumerate(value))


@pytest.mark.mostly_slow("loads some hundred states", quick=4)
@pytest.mark.parametrize("case", _RICH)
def test_an_array_of_another_dtype_or_shape_is_named_and_changes_nothing(case: str, tmp_path: Path) -> None:
    """Each array of each part, one after the other; but for those that envs and policies of users' own check."""
    one, other, twin = (_RICH[case](tmp_path / name) for name in ("one", "other", "twin"))
    with one.envs, other.envs, twin.envs:
        state = _saved(one, case)
        for collector in (other, twin):
            collector.collect(env_steps=9)
        tried = 0
        places = [
            (path, array)
            for path, array in _arrays(state)
            if not ("user" in path or path[-2:-1] == ("policy",) or ("waiting" in path and path[-1] == "call"))
        ]
        for path, array in places:
            longer = np.concatenate([array, np.zeros((1, *array.shape[1:]), array.dtype)])
            wrong = [np.zeros(array.shape, complex), np.full(array.shape, "x"), array[..., None], longer]
            for bad in wrong[:3] if "connectors" in path and path[-1] == "values" else wrong:
                with pytest.raises(ArgumentError) as caught:
                    other.set_state(_replaced(state, path, bad))
                said = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
                names = [key for key in path if isinstance(key, str)][-1:]
                if bad is longer:  # where one array says how long the others are
                    names += [key for key, part in _at(state, path[:-1]) if isinstance(part, np.ndarray)]
                assert any(name in said for name in names), (path, said)
                tried += 1
        assert tried > 200
        write_value(tmp_path / "bad.npz", "collector", _replaced(state, path, wrong[1]), "it")
        with pytest.raises(ArgumentError):
            other.load(tmp_path / "bad.npz")
        later = [{"env_steps": 20}, {"env_steps": 30}]
        same(batches_of(other, later), batches_of(twin, later))


def test_counts_that_cannot_be_are_refused_before_they_are_stepped_for() -> None:
    with _shared() as (collector, state):
        before = without_clock(collector.get_state())
        for name in ("env_steps_delivered", "env_steps_lost", "unroll_id"):
            bad = copy.deepcopy(state)
            bad["rollout"]["reached"]["counters"][name] += 1 << 62
            with pytest.raises(ArgumentError, match=r"counters: .*46116860184273879"):
                collector.set_state(bad)
        same(without_clock(collector.get_state()), before)


_MADE: list[Any] = []


class _shared:
    """One collector that all examples use, which has gone on since its state was saved."""

    def __enter__(self) -> Any:
        if not _MADE:
            collector = noting()
            collector.collect(env_steps=31)
            _MADE.extend([collector, collector.get_state()])
            collector.collect(env_steps=8)
        return _MADE

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Any:
    yield
    if _MADE:
        _MADE[0].envs.close()
        _MADE.clear()


@pytest.mark.slow("interrupts at many lines")
def test_an_interrupt_leaves_the_old_state_or_the_new_one_or_asks_for_a_reset() -> None:
    collector = noting()
    with collector.envs:
        collector.collect(env_steps=20)
        old = collector.get_state()
        was = batches_of(collector, NEXT)
        new = collector.get_state()
        will = batches_of(collector, NEXT)
        outcomes: dict[str, int] = {"old": 0, "new": 0, "asks": 0}
        at = 1
        while True:
            collector.set_state(old)
            try:
                with Tracer(("/marlvec/",), at, everywhere=True) as tracer:
                    collector.set_state(new)
            except KeyboardInterrupt:
                pass
            if tracer.place is None:
                break
            at += 53
            try:
                got = batches_of(collector, NEXT)
            except StateError as error:
                assert "reset" in str(error)  # noqa: PT017  (what follows is of that case alone)
                outcomes["asks"] += 1
                with pytest.raises(StateError, match="was interrupted"):
                    collector.get_state()
                if at % 2:
                    collector.reset(seed=1)
                    assert collector.collect(env_steps=9).env_steps == 9
                continue
            first = [batches[0]["columns"]["main"]["obs"] for batches in (got, was)]
            outcome = "old" if np.array_equal(*first) else "new"
            outcomes[outcome] += 1
            same(got, was if outcome == "old" else will)
        assert min(outcomes["old"], outcomes["asks"]) > 0, outcomes


def test_a_new_collector_has_a_state_too(tmp_path: Path) -> None:
    collector = noting()
    with collector.envs:
        collector.save(tmp_path / "new.npz")
        want = batches_of(collector, NEXT)
        collector.load(tmp_path / "new.npz")  # which begins anew, with the seed that it was built with
        same(batches_of(collector, NEXT), want)


def test_a_file_of_an_older_version_of_this_format_loads() -> None:
    """Written by ``make(2)`` after ``collect(env_steps=31)``."""
    path = Path(__file__).with_name("format_2.npz")
    collector = noting(2)
    with collector.envs:
        collector.load(path)
        same(without_clock(collector.get_state()), without_clock(read_value(path, "collector", "collector")))
        assert collector.metrics.env_steps == 31
        batches_of(collector, NEXT)


def test_files_that_are_damaged_or_of_something_else_are_refused(tmp_path: Path) -> None:
    collector = noting()
    with collector.envs:
        with pytest.raises(CheckpointError, match="No such file"):
            collector.load(tmp_path / "none.npz")
        collector.agent_connectors["main"].save(tmp_path / "pipeline.npz")
        with pytest.raises(CheckpointError, match="holds no collector"):
            collector.load(tmp_path / "pipeline.npz")
        collector.save(tmp_path / "one.npz")
        whole = (tmp_path / "one.npz").read_bytes()
        (tmp_path / "one.npz").write_bytes(whole[:-300] + whole[-299:])
        with pytest.raises(CheckpointError):
            collector.load(tmp_path / "one.npz")
        write_archive(tmp_path / "one.npz", {"collector": {"$connector": {"connector": "NoSuch"}}})
        with pytest.raises(CheckpointError, match="holds no collector: no connector is registered as 'NoSuch'"):
            collector.load(tmp_path / "one.npz")


def test_it_is_asked_between_two_calls_alone() -> None:
    collector = noting()
    with collector.envs:
        said = []

        def ask(batch: Any, metrics: Any) -> None:
            with pytest.raises(StateError, match="on_sample_end"):
                collector.get_state()
            said.append(batch)

        collector._callback_list._listeners["on_sample_end"].append(("one", ask))
        collector.collect(env_steps=3)
        assert said
        collector.envs.reset()
        with pytest.raises(EnvsDriven):
            collector.get_state()
