"""Callbacks: who is told what, when, in which order, and what becomes of the collector when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector
from marlvec.collect.callbacks import HOOKS, Callback, EpisodeStep, LossReason, RunningEpisode
from marlvec.collect.metrics import EpisodeRecord, Stats
from marlvec.connectors import AgentConnector, LearnerConnector, Rows
from marlvec.errors import ArgumentError, EnvFault, StateError
from marlvec.policies import RandomPolicy
from marlvec.testing.scripted import CounterEnv, KeyedEnv, RaisingEnv, ScriptedParallelEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.plans import dying_counters
from tests.collect.players import MODES, EchoPolicy, noop
from tests.collect.reference import Spy, same_batch


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="pairs")
@pytest.mark.checklist(118)
@pytest.mark.fault("E13")
@pytest.mark.parametrize(
    ("where", "on_fault"),
    [("step", "restart"), ("step", "mask"), ("reset", "restart"), ("reset", "mask"), ("init", "restart")],
)
@pytest.mark.parametrize("mode", MODES)
def test_envs_that_fail_are_told_of_once_and_only_if_an_episode_ran(mode: str, where: Any, on_fault: str) -> None:
    """Env 1 is built anew each time it fails: in its third step, or in its third reset, or when it is first made."""

    def bear(i: int, births: Any) -> Any:
        at = {"init": 0}.get(where, 2) if i == 1 and next(births) == 0 else -1
        return RaisingEnv(4, where=where, at=at, env_index=i, agent_num=2)

    spy = Spy()
    with SyncVectorEnv([partial(bear, i, count()) for i in range(3)], autoreset_mode=mode, on_fault=on_fault) as envs:
        collector = Collector(envs, noop(), callbacks=[spy], seed=0)
        for _ in range(4):
            collector.collect(env_steps=12)
        spy.check(collector)
        assert spy.calls["on_episode_lost"] == (1 if where == "step" else 0)
        assert set(spy.running) == {0, 1, 2} - set(envs.masked_env_ids)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_an_env_ends_leaves_its_episodes_to_be_lost_by_reset(mode: str) -> None:
    spy = Spy()
    envs = [lambda i=i: RaisingEnv(9, at=4 if i else -1, env_index=i, agent_num=1) for i in range(2)]
    with SyncVectorEnv(envs, autoreset_mode=mode) as vector:
        collector = Collector(vector, noop(), callbacks=[spy], seed=0)
        with pytest.raises(EnvFault):
            collector.collect(env_steps=30)
        assert spy.calls["on_episode_lost"] == 0
        collector.reset()
        assert [life.why for life in spy.lives.values()] == ["reset", "reset", None, None]
        collector.collect(env_steps=6)
        assert sorted(spy.running) == [0, 1]


# --- order


@pytest.mark.checklist(118)
@pytest.mark.parametrize("mode", MODES)
def test_hooks_connectors_and_learner_connectors_come_in_this_order(mode: str) -> None:
    """Two envs of two steps an episode; connectors say what they see of env 0."""
    told: list[str] = []

    class Before(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            for k in np.flatnonzero(rows["env_id"] == 0):
                told.append("last row" if rows["last"][k] else "first row" if rows["first"][k] else "row")
            return rows

    class After(LearnerConnector):
        def __call__(self, rows: Rows) -> Rows:
            told.append("learner")
            return rows

    def note(hook: str) -> Callable[..., None]:
        def listen(what: Any, *_: Any) -> None:
            if getattr(what, "env_id", 0) == 0:
                told.append(hook.removeprefix("on_").removeprefix("episode_"))

        return listen

    with dying_counters({}, length=2, agent_num=1, autoreset_mode=mode) as envs:
        collector = Collector(
            envs,
            noop(),
            agent_connectors=[Before()],
            learner_connectors=[After()],
            callbacks=[{hook: note(hook) for hook in HOOKS}],
        )
        collector.collect(env_steps=6)
    episode = ["created", "first row", "start", "step", "row", "step", "last row", "end"]
    assert told == ["collector_created", *episode, *episode[:5], "learner", "sample_end"]


@pytest.mark.checklist(118)
def test_callbacks_and_plain_functions_stack_in_order() -> None:
    told: list[str] = []

    class Loud(Callback):
        def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
            told.append("object")

    def on_episode_end(episode: RunningEpisode, record: EpisodeRecord) -> None:
        told.append("function")

    class Louder(Loud):
        def on_sample_end(self, *_: Any) -> None:
            told.append("batch")

    with dying_counters({}, 1, length=3) as envs:
        entry = {"on_episode_end": lambda *_: told.append("entry")}
        collector = Collector(envs, noop(), callbacks=(Loud(), on_episode_end, entry, Louder(), Callback(), Loud()))
        collector.collect(env_steps=3)
    assert told == ["object", "function", "entry", "object", "object", "batch"]


def test_one_object_may_serve_two_collectors_and_a_method_may_be_set_on_it() -> None:
    told = []
    listener = Callback()
    listener.on_sample_end = lambda batch, metrics: told.append((batch.env_steps, metrics))  # type: ignore[method-assign]
    with dying_counters({}, 1) as a, dying_counters({}) as b:
        first, second = (Collector(envs, noop(), callbacks=[listener]) for envs in (a, b))
        first.collect(env_steps=3)
        second.collect(env_steps=4)
        assert told == [(3, first.metrics), (4, second.metrics)]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Callback(), r"write callbacks=\[...\]"),
        ({"on_sample_end": print}, r"write callbacks=\[...\]"),
        (3, "must be a list of callbacks, got 3"),
        ([Callback], r"is the class Callback; give an object of it: Callback\(\)"),
        ([Callback(), lambda *_: None], r"callbacks\[1\]: expected a Callback, or a dict of on_episode_created, "),
        ([{"on_episode_stop": print}], r"callbacks\[0\]: expected .*on_episode_stop"),
        ([{"on_episode_end": 3}], r"callbacks\[0\]: expected"),
        ([{}], r"callbacks\[0\]: expected"),
        (["on_episode_end"], r"callbacks\[0\]: expected"),
    ],
)
def test_invalid_callback_raises(callbacks: Any, message: str) -> None:
    with dying_counters({}, 1) as envs, pytest.raises(ArgumentError, match=message):
        Collector(envs, noop(), callbacks=callbacks)


# --- failures


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.fault("E11")
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("hook", HOOKS[:5])
@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_raises_is_named_and_nothing_is_lost(mode: str, hook: str, kind: type[BaseException]) -> None:
    """The others hear all there is to hear, and the rows are those of a collector without callbacks."""
    error = kind("no idea")
    deaths = {(1, 0): ("step", 3, False), (0, 0): ("step", 12, True)}
    times = count()

    def fail(*_: Any) -> None:
        if next(times) % 3 == 0:
            raise error

    with dying_counters(deaths, length=3, autoreset_mode=mode) as envs:
        plain = Collector(envs, EchoPolicy(), seed=0)
        expected = [plain.collect(env_steps=9) for _ in range(5)]
    before, after = Spy(), Spy()
    with dying_counters(deaths, length=3, autoreset_mode=mode) as envs:
        collector = Collector(envs, EchoPolicy(), callbacks=[before, {hook: fail}, after], seed=0)
        batches: list[Any] = []
        caught: list[BaseException] = []
        while len(batches) < 5:
            try:
                batches.append(collector.collect(env_steps=9))
            except type(error) as raised:
                caught.append(raised)
        before.check(collector)
        assert before.story() == after.story()
    assert caught
    assert {id(one) for one in caught} == {id(error)}
    assert all(note.startswith((f"in {hook} of callbacks[1], fail", "also raised: ")) for note in error.__notes__)
    for got, want in zip(batches, expected, strict=True):
        same_batch(got, want)


@pytest.mark.fault("E11")
def test_a_batch_that_could_not_be_told_of_comes_again() -> None:
    failing = [True]
    told = []

    def on_sample_end(batch: Any, metrics: Any) -> None:
        if failing[0]:
            raise OSError("disk full")

    with dying_counters({}) as envs:
        entry = {"on_sample_end": lambda batch, metrics: told.append(batch.env_steps)}
        collector = Collector(envs, noop(), callbacks=[on_sample_end, entry], seed=0)
        for _ in range(2):
            with pytest.raises(OSError, match="disk full") as caught:
                collector.collect(env_steps=7)
        assert caught.value.__notes__ == [
            "in on_sample_end of callbacks[0], on_sample_end",
            "the batch is not returned; no row is lost: call collect() again",
        ]
        assert (collector.metrics.env_steps_lost, collector.metrics.agent_steps_lost) == (0, 0)
        failing[0] = False
        batch = collector.collect(env_steps=7)
        assert (batch.env_steps, told) == (7, [7, 7, 7])
        assert collector.metrics.env_steps == 7


def test_of_several_failures_ctrl_c_comes_first_and_names_the_others() -> None:
    def fail(error: BaseException) -> Any:
        def listen(*_: Any) -> None:
            raise error

        return {"on_episode_step": listen}

    with dying_counters({}, 1) as envs:
        callbacks = [fail(ValueError("one")), fail(KeyboardInterrupt()), fail(OSError("three"))]
        collector = Collector(envs, noop(), callbacks=callbacks, seed=0)
        with pytest.raises(KeyboardInterrupt) as caught:
            collector.collect(env_steps=5)
        assert [note.partition(", in")[0] for note in caught.value.__notes__] == [
            "in on_episode_step of callbacks[1], listen",
            "also raised: ValueError: one",
            "also raised: OSError: three",
        ]
        assert collector.metrics.env_steps == 1


@pytest.mark.parametrize("hook", HOOKS[:4])
def test_a_callback_may_not_reset_in_the_middle_of_a_step(hook: str) -> None:
    with dying_counters({}, 1, length=2) as envs:
        collector: Collector
        collector = Collector(envs, noop(), callbacks=[{hook: lambda *_: collector.reset()}], seed=0)
        with pytest.raises(StateError, match=rf"may not reset its collector in {hook}\(\)"):
            collector.collect(env_steps=4)
    with dying_counters({}, 1, length=2) as envs:
        collector = Collector(envs, noop(), callbacks=[{"on_sample_end": lambda *_: collector.reset()}], seed=0)
        assert collector.collect(env_steps=3).env_steps == 3  # but between two calls it may
        assert collector.metrics.env_steps_lost == 0


def test_what_reset_tells_may_fail_too() -> None:
    class Fussy(Spy):
        def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
            super().on_episode_lost(episode, why)
            raise ValueError("what a loss")

    spy = Fussy()
    with dying_counters({}) as envs:
        collector = Collector(envs, noop(), callbacks=[spy], seed=0)
        collector.collect(env_steps=4)
        with pytest.raises(ValueError, match="what a loss"):
            collector.reset()
        assert collector.collect(env_steps=4).env_steps == 4
        assert [life.stage for life in spy.lives.values()] == ["lost", "lost", "stepped", "stepped"]


# --- what a step brings


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.checklist(110)
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ScriptedParallelEnv, KeyedEnv])
def test_infos_are_those_of_the_step_whatever_the_autoreset_mode(kind: Any, mode: str, copy: bool) -> None:
    """Also those of an agent whose first observation is its last."""
    given: dict[tuple[int, int, int], Any] = {}
    kept: list[tuple[EpisodeStep, list[tuple[int, int, int]]]] = []

    class Talker(kind):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            infos = dict(result[4])
            if "common" in infos:  # as PettingZoo has it
                infos["__common__"] = {"common": infos.pop("common")}
            given[self.world.env_index, self.world.episode, self.world.t] = plain(infos)
            return result

    def plain(infos: Any) -> Any:
        return {
            who: {key: np.asarray(value).tolist() for key, value in entries.items()}
            for who, entries in infos.items()
            if entries
        }

    def on_episode_step(step: EpisodeStep) -> None:
        for episode in step.episodes:
            episode.custom["t"] = episode.custom.get("t", 0) + 1
        kept.append((step, [(episode.env_id, episode.number, int(episode.custom["t"])) for episode in step.episodes]))

    envs = [lambda i=i: Talker(agent_num=3, env_index=i, longest=5) for i in range(3)]
    with SyncVectorEnv(envs, autoreset_mode=mode, copy=copy) as vector:
        Collector(vector, RandomPolicy(), callbacks=[on_episode_step], seed=3).collect(env_steps=200)
    assert sum(map(bool, given.values())) > 50
    got = {key: plain(infos) for step, keys in kept for key, infos in zip(keys, step.infos, strict=True)}
    assert got == given


def test_arrays_of_a_step_can_be_kept() -> None:
    kept: list[EpisodeStep] = []
    with dying_counters({}, length=3, copy=False) as envs:
        Collector(envs, noop(), callbacks=[{"on_episode_step": kept.append}], seed=0).collect(env_steps=14)
    assert [step.done.tolist() for step in kept] == [[k % 3 == 2] * 2 for k in range(7)]
    numbers = [[episode.number for episode in step.episodes] for step in kept]
    assert numbers == [[k // 3] * 2 for k in range(7)]
    assert [step.rewards[0, 0] for step in kept] == [k // 3 * 1e6 + (k % 3 + 1) * 1e3 for k in range(7)]
    assert repr(kept[2]) == "EpisodeStep(env_ids=[0, 1], done=[True, True])"


def test_who_does_not_listen_to_steps_costs_none() -> None:
    class Quiet(Callback):
        def on_sample_end(self, batch: Any, metrics: Any) -> None:
            pass

    with SyncVectorEnv([lambda: CounterEnv(3, agent_num=1)]) as envs:
        collector = Collector(envs, noop(), callbacks=[Quiet()], seed=0)
        collector.collect(env_steps=30)
        assert collector.metrics.timers["callbacks"].calls == 1
        assert collector._callback_list._running_N.tolist() == [None]
        assert collector.metrics.returns == Stats(10, 6000.0, 6000.0 + 4.5e6 * 3, 6000.0 + 27e6)
