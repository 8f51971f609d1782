"""What `set_state` refuses, and what is left where it is refused or interrupted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import Collector
from marlvec.connectors import Rows
from marlvec.connectors.agent import (
    AgentPipeline,
    DelayObs,
    FrameStack,
    NormalizeObs,
    NormalizeReward,
    PrevRewards,
)
from marlvec.errors import ArgumentError, CheckpointError, EnvsDriven, StateError
from marlvec.policies import RandomPolicy
from marlvec.serialization.archive import write_archive
from marlvec.serialization.values import read_value, write_value
from tests.checkpoints import training as killed
from tests.collect.state.saved import batches_of, without_clock
from tests.collect.state.test_exact_resume import Drawing, Plan
from tests.tracer import Tracer
from tests.vector.support.kinds import factories_of, vectorize, walks
from tests.vector.test_saved_states import same
from tests.waiting import until

LATER = [{"env_steps": 9}, {"episodes": 3}, {"agent_steps": 20}]


def make(n: int = 3, **options: Any) -> Collector:
    connectors: Any = AgentPipeline([NormalizeObs(), FrameStack(2)])
    options = {"agent_connectors": connectors, "callbacks": [{"on_episode_step": noted}], "seed": 1} | options
    return Collector(vectorize("sync", walks("parallel", n)), RandomPolicy(), **options)


def noted(step: Any) -> None:
    for episode in step.episodes:
        episode.custom["steps"] = episode.custom.get("steps", 0) + 1


def test_states_of_other_collectors_are_refused_by_name() -> None:
    with make().envs as envs:
        collector = Collector(envs, RandomPolicy(), seed=1)
        collector.collect(env_steps=7)
        state = collector.get_state()
    others: dict[str, Callable[[], Collector]] = {
        "num_envs: the state is of 3, this collector has 4": partial(make, 4, agent_connectors=None, callbacks=()),
        "batch_mode: the state is of 'truncate', this collector has 'complete'": partial(
            make, agent_connectors=None, batch_mode="complete"
        ),
        "stream: the state is of 0, this collector has 3": partial(make, agent_connectors=None, stream=3),
        "connectors:": make,
    }
    for text, build in others.items():
        other = build()
        with other.envs, pytest.raises(ArgumentError, match=text):
            other.set_state(state)
    with marlvec.make("simple_spread", 3) as envs, pytest.raises(ArgumentError, match=r"agents: .*spaces:"):
        Collector(envs, RandomPolicy()).set_state(state)
    with make().envs as envs:
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
            collector = make()
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
    collector = make()
    with collector.envs:
        collector.collect(env_steps=20)
        old = collector.get_state()
        was = batches_of(collector, LATER)
        new = collector.get_state()
        will = batches_of(collector, LATER)
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
                got = batches_of(collector, LATER)
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
    collector = make()
    with collector.envs:
        collector.save(tmp_path / "new.npz")
        want = batches_of(collector, LATER)
        collector.load(tmp_path / "new.npz")  # which begins anew, with the seed that it was built with
        same(batches_of(collector, LATER), want)


def test_a_file_of_an_older_version_of_this_format_loads() -> None:
    """Written by ``make(2)`` after ``collect(env_steps=31)``."""
    path = Path(__file__).with_name("format_2.npz")
    collector = make(2)
    with collector.envs:
        collector.load(path)
        same(without_clock(collector.get_state()), without_clock(read_value(path, "collector", "collector")))
        assert collector.metrics.env_steps == 31
        batches_of(collector, LATER)


def test_files_that_are_damaged_or_of_something_else_are_refused(tmp_path: Path) -> None:
    collector = make()
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
    collector = make()
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
