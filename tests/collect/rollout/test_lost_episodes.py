"""Episodes that are lost with their env: none of their rows comes to a batch any more, and every one is counted."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from marlvec.cli.commands.rollout import roll_out
from marlvec.cli.display.rollout_table import print_rollout
from marlvec.collect import Collector, Episode
from marlvec.connectors import ActionConnector, AgentConnector, FrameStack, Rows
from marlvec.errors import EnvRaised, Failure, RestartQuietly, StateError
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import CounterEnv, ExitingEnv, FaultyEnv, HangingEnv, RaisingEnv
from marlvec.vector import AsyncVectorEnv, VectorEnv
from marlvec.vector.backends.sync import SyncVectorEnv
from marlvec.vector.backends.thread import ThreadVectorEnv
from marlvec.vector.faults.restarts import RestartLimit
from marlvec.vector.vector_step import VectorStep
from tests.collect.helpers.mortal import DEATHS, Deaths, MortalReference, mortals
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy
from tests.collect.rollout.test_reference import BATCH_MODES, CALLS, LEARNERS, MAPPINGS, one, run

POISON = -999.0

noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))


class Doomed(SyncVectorEnv):
    """Healthy envs, of which some rows say that the episode was lost, as if a fault had struck.

    What means nothing in such a row is poison. Sending anything to a masked env is a mistake.

    Args:
        factories: The envs.
        doom: (env, its n-th row from 1, beginnings not counted) → ``"fault"``, ``"quiet"`` or ``"mask"``.
        failing_begins: How often each episode after a lost one fails to begin, where a step begins it.
        settings: As `SyncVectorEnv`'s.
    """

    def __init__(
        self, factories: Any, doom: dict[tuple[int, int], str], *, failing_begins: int = 0, **settings: Any
    ) -> None:
        self.doom, self.masked = doom, set[int]()
        self.failing_begins = failing_begins
        self.due: dict[int, int] = {}  # env → how often its next episode is still to fail to begin
        self.told = dict.fromkeys(range(len(factories)), 0)
        self.knows_alive = np.zeros((len(factories), 0), np.bool_)
        super().__init__(factories, **settings)
        self.knows_alive = np.zeros((self.num_envs, self.agent_num), np.bool_)

    @property
    def masked_env_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.masked))

    def _check_living(self, env_ids: Any) -> None:
        asked = range(self.num_envs) if env_ids is None else env_ids
        assert not self.masked.intersection(int(i) for i in asked), "a masked env was waited for"

    def send(self, actions: Any, env_ids: Any = None) -> None:
        self._check_living(env_ids)
        if env_ids is not None and self.due.keys() & set(env_ids.tolist()):
            super().reset_send(env_ids=env_ids)  # these are steps that begin episodes, all of them
        else:
            super().send(actions, env_ids)

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> VectorStep:
        begins = self._call_state.pending == "reset"
        step = super().recv(min_envs, timeout)
        rows = dict(zip(step.env_ids.tolist(), range(len(step)), strict=True))
        lost: dict[int, str] = {}
        for i in rows:
            if begins or step.reset_mask[rows[i]]:
                if left := self.due.pop(i, 0):
                    lost[i], self.due[i] = "fault", left - 1
            else:
                self.told[i] += 1
                if kind := self.doom.get((i, self.told[i])):
                    lost[i] = kind
        if begins and self.masked.intersection(rows):
            step.alive[[rows[i] for i in self.masked]] = step.acting[[rows[i] for i in self.masked]] = False
        if lost:
            self._lose(step, rows, lost)
            if not begins and self.autoreset_mode != "same_step":  # there it has begun already
                self.due.update(dict.fromkeys(lost, self.failing_begins))
        self.knows_alive[step.env_ids] = step.alive
        return step

    def _lose(self, step: VectorStep, rows: dict[int, int], lost: dict[int, str]) -> None:
        at = [rows[i] for i in lost]
        step._faults = {
            i: Failure(i, "step", "scripted", "", RestartQuietly() if kind == "quiet" else ValueError())
            for i, kind in lost.items()
        }
        step.final_leaves = [[leaf.copy() for leaf in leaves] for leaves in step.obs_leaves]
        for leaf in (leaf for leaves in (*step.final_leaves, *step.obs_leaves) for leaf in leaves):
            leaf[at] = POISON
        step.rewards[at] = 0.0
        step.terminated[at] = False
        step.truncated[at] = self.knows_alive[list(lost)]
        step.done[at] = True
        step.alive[at] = step.acting[at] = False
        self.masked |= {i for i, kind in lost.items() if kind == "mask"}
        if self.autoreset_mode == "same_step" and (back := np.array([i for i in lost if lost[i] != "mask"], int)).size:
            super().reset_send(env_ids=back)
            fresh = super().recv()
            for leaves, new in zip(step.obs_leaves, fresh.obs_leaves, strict=True):
                for leaf, part in zip(leaves, new, strict=True):
                    leaf[[rows[i] for i in back.tolist()]] = part
            step.alive[[rows[i] for i in back.tolist()]] = fresh.alive
            step.acting[[rows[i] for i in back.tolist()]] = fresh.acting


def counters(num_envs: int, *, length: Any = 5, agent_num: int = 2) -> list[Any]:
    """Envs whose observations tell (env, incarnation, episode, t, agent)."""
    return [lambda i=i: CounterEnv(length, agent_num=agent_num, env_index=i) for i in range(num_envs)]


def places(batch: Any, env_id: int) -> list[tuple[int, int]]:
    """(episode, t) of one env's rows of agent 0, as they are stamped."""
    if "main" not in batch:
        return []
    rows = batch["main"]
    own = rows.take((rows["env_id"] == env_id) & (rows["agent_index"] == 0))
    assert (own["obs"] != POISON).all()
    assert (own["next_obs"] != POISON).all()
    return [(int(e), int(t)) for e, t in own["obs"][:, 2:4]]


def steps_of(episode: int, *steps: int) -> list[tuple[int, int]]:
    return [(episode, t) for t in steps]


def check_sums(collector: Collector, batches: Sequence[Any]) -> None:
    """Nothing goes astray: what was asked of envs was handed out, was lost, or is stored."""
    metrics, runners = collector.metrics, collector._runners.values()
    collector._batch_builder.drop_delivered()
    decided = sum(int((runner.use_slots()._next[: len(runner.use_slots())] >= 0).sum()) for runner in runners)
    decided += sum(int((runner.trajectories.slot_L >= 0).sum()) - len(runner.ready.lanes) for runner in runners)
    waiting = collector._current.state.counters.waiting_env_steps
    assert metrics.env_steps == sum(b.env_steps for b in batches) + metrics.env_steps_lost + waiting
    assert metrics.agent_steps == sum(b.agent_steps for b in batches) + metrics.agent_steps_lost + decided


# --- what is dropped, and what it counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["fault", "quiet"])
def test_what_is_stored_of_a_lost_episode_is_dropped_and_does_not_count(mode: str, kind: str) -> None:
    """Env 1 is lost in the 4th step of its 2nd episode: 9 rows in all, of which its first batch holds 7."""
    with Doomed(counters(2), {(1, 9): kind}, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, seed=0)
        first = collector.collect(env_steps=14)
        assert places(first, 1) == steps_of(0, *range(5)) + steps_of(1, 0, 1)
        # Steps 8 and 9 of env 1 are lost; each env makes up for one of them, after which 8 of 14 are wanted.
        second = collector.collect(env_steps=14)
        assert (second.env_steps, second.agent_steps) == (14, 28)
        assert places(second, 0) == steps_of(1, 2, 3, 4) + steps_of(2, *range(5))
        assert places(second, 1) == steps_of(2, *range(5)) + steps_of(3, 0)
        metrics = collector.metrics
        assert (metrics.env_steps, metrics.env_steps_lost) == (30, 2)
        assert (metrics.agent_steps, metrics.agent_steps_lost) == (60, 4)
        assert (metrics.episodes_faulty, metrics.episodes_restarted) == ((1, 0) if kind == "fault" else (0, 1))
        assert [(e.env_id, e.number) for e in metrics.episodes] == [(0, 0), (1, 0), (0, 1), (1, 2), (0, 2)]
        assert {e.length for e in metrics.episodes} == {5}
        check_sums(collector, [first, second])


@pytest.mark.parametrize("mode", MODES)
def test_rows_left_over_from_an_earlier_call_are_dropped_too(mode: str) -> None:
    """The first call needs one of the two rows it made, and the env step it counted stays counted."""
    with Doomed(counters(1), {(0, 2): "fault"}, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, seed=0)
        first = collector.collect(agent_steps=1)
        assert (first.env_steps, first.agent_steps) == (1, 1)
        second = collector.collect(agent_steps=3)
        assert places(second, 0) == steps_of(1, 0, 1)
        assert (second.env_steps, second.agent_steps) == (2, 3)
        metrics = collector.metrics
        assert (metrics.env_steps_lost, metrics.agent_steps_lost) == (1, 3)
        check_sums(collector, [first, second])


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_whole_episodes_hold_no_lost_one(mode: str) -> None:
    """Env 1 loses its first and its third episode; env 0 its third, in the same tick in which env 1 ends its fourth."""
    doom = {(0, 13): "fault", (1, 1): "quiet", (1, 10): "fault"}
    with Doomed(counters(2, length=[4, 5, 6, 3]), doom, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, batch_mode="complete", seed=0)
        batches = [collector.collect(episodes=1)]
        assert places(batches[0], 0) == steps_of(0, *range(4))
        batches.append(collector.collect(env_steps=12))  # 5 of each env's next episode, and then one of 3
        assert places(batches[1], 0) == steps_of(1, *range(5))
        assert places(batches[1], 1) == steps_of(1, *range(5)) + steps_of(3, *range(3))
        assert batches[1].env_steps == 13
        metrics = collector.metrics
        assert (metrics.episodes_total, metrics.episodes_faulty, metrics.episodes_restarted) == (4, 2, 1)
        assert metrics.env_steps_lost == 4 + 1 + 4
        assert metrics.agent_steps_lost == 2 * metrics.env_steps_lost
        assert [(e.env_id, e.number, e.length) for e in metrics.episodes] == [
            (0, 0, 4),
            (1, 1, 5),
            (0, 1, 5),
            (1, 3, 3),
        ]
        check_sums(collector, batches)


@pytest.mark.parametrize("mode", MODES)
def test_episodes_that_had_ended_are_kept_when_the_next_one_is_lost(mode: str) -> None:
    with Doomed(counters(2, length=3), {(1, 4): "fault"}, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, batch_mode="complete", seed=0)
        batches = [collector.collect(episodes=1)]
        batches.append(collector.collect(episodes=2))  # env 1's first has waited through the loss
        assert places(batches[1], 1) == steps_of(0, *range(3))
        assert places(batches[1], 0) == steps_of(1, *range(3))
        check_sums(collector, batches)


@pytest.mark.parametrize("kind", ["fault", "mask"])
@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_connectors_forget_that_env_and_never_see_a_last_row_of_what_was_lost(
    mode: str, batch_mode: Any, kind: str
) -> None:
    told: list[tuple[str, list[int]]] = []
    seen: list[tuple[int, int, int, bool, bool, float]] = []

    class AgentSpy(AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            assert (rows["obs"] != POISON).all()
            names = ("env_id", "eps_id", "t", "first", "last", "rewards")
            seen.extend(zip(*(rows[name].tolist() for name in names), strict=True))
            return rows

        def reset(self, env_ids: Any = None) -> None:
            told.append(("agent", sorted(np.asarray(env_ids).tolist())))

    class ActionSpy(ActionConnector):
        def __call__(self, rows: Rows) -> Rows:
            return rows

        def reset(self, env_ids: Any = None) -> None:
            told.append(("action", sorted(np.asarray(env_ids).tolist())))

    with Doomed(counters(3, length=9, agent_num=1), {(1, 4): kind}, autoreset_mode=mode) as envs:
        collector = Collector(
            envs, noop, batch_mode=batch_mode, agent_connectors=[AgentSpy()], action_connectors=[ActionSpy()], seed=0
        )
        collector.collect(env_steps=9)
        if batch_mode == "truncate":
            assert told == [("agent", [0, 1, 2]), ("action", [0, 1, 2])]
            collector.collect(env_steps=6)
        assert told[2:4] == [("agent", [1]), ("action", [1])]  # once, beside the beginning of all
        assert all(ids != [1] for _, ids in told[4:6])
        own = [row for row in seen if row[0] == 1]
        assert [row[1:5] for row in own[:4]] == [(1, t, t == 0, False) for t in range(4)]
        assert not any(last for _, eps, _, _, last, _ in own if eps == 1)
        if kind == "mask":
            assert len(own) == 4
        else:
            assert own[4] == (1, 4, 0, True, False, 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_who_plays_is_settled_anew_and_streams_of_episodes_stay_what_they_are(mode: str) -> None:
    def run(doom: dict[tuple[int, int], str]) -> tuple[dict[tuple[int, int], list[int]], dict[int, tuple[int, ...]]]:
        drawn: dict[tuple[int, int], list[int]] = {}

        def mapping(name: str, episode: Episode) -> str:
            drawn.setdefault((episode.env_id, episode.number), []).append(int(episode.rng.integers(1000)))
            return ("even", "odd")[episode.number % 2]

        with Doomed(counters(2, length=4), doom, autoreset_mode=mode) as envs:
            policies = {"even": EchoPolicy(0), "odd": EchoPolicy(1)}
            collector = Collector(envs, policies, mapping, seed=0)
            batch = collector.collect(env_steps=40)
            players: dict[int, tuple[int, ...]] = {}
            for k, policy in enumerate(policies):
                own = batch[policy]
                for i, episode in set(zip(own["env_id"].tolist(), own["obs"][:, 2].tolist(), strict=True)):
                    players[int(episode) * 2 + i] = (*players.get(int(episode) * 2 + i, ()), k)
            check_sums(collector, [batch])
            return drawn, players

    plain, _ = run({})
    drawn, players = run({(1, 6): "fault"})
    assert all(drawn[key] == plain[key] for key in drawn if key in plain)
    assert (1, 1) in drawn
    assert (1, 2) in drawn
    assert players.pop(1 * 2 + 1, None) is None  # env 1's episode 1, which "odd" played, is nowhere
    assert all(who == (key // 2 % 2,) for key, who in players.items())


# --- masked envs


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_others_go_on_without_masked_envs_in_turn(mode: str, copy: bool) -> None:
    with Doomed(counters(4, length=7), {(1, 3): "mask", (3, 5): "mask"}, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, seed=0)
        batches = [collector.collect(env_steps=8)]
        assert [len(places(batches[0], i)) for i in range(4)] == [2, 2, 2, 2]
        for amount in (3, 2, 9, 1, 1, 4, 1, 12):
            batches.append(collector.collect(env_steps=amount))
            assert batches[-1].env_steps == amount
            counts = [sum(len(places(batch, i)) for batch in batches) for i in range(4)]
            assert abs(counts[0] - counts[2]) <= 1
            check_sums(collector, batches)
        assert envs.masked_env_ids == (1, 3)
        assert counts[1] == 2
        assert collector.metrics.episodes_faulty == 2
        collector.reset()
        batches.append(collector.collect(env_steps=10))
        assert set(batches[-1]["main"]["env_id"].tolist()) == {0, 2}
        check_sums(collector, batches)


@pytest.mark.parametrize("mode", MODES)
def test_whole_episodes_are_waited_for_only_where_one_can_end(mode: str) -> None:
    with Doomed(counters(3, length=4), {(0, 2): "mask", (2, 9): "mask"}, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, batch_mode="complete", seed=0)
        batches = [collector.collect(episodes=n) for n in (1, 2, 1, 3, 4)]
        owners = [e.env_id for e in collector.metrics.episodes]
        assert owners == [1, 2, 1, 2, 1, 1, 1, 1, 1, 1, 1][: len(owners)]
        assert collector.metrics.env_steps_lost == 2 + 1
        check_sums(collector, batches)


@pytest.mark.parametrize("batch_mode", BATCH_MODES)
def test_when_nobody_is_left_collect_says_so(batch_mode: Any) -> None:
    with Doomed(counters(2), {(0, 2): "mask", (1, 3): "mask"}) as envs:
        collector = Collector(envs, noop, batch_mode=batch_mode, seed=0)
        for _ in range(2):
            with pytest.raises(StateError, match="all envs are masked"):
                collector.collect(env_steps=20)
        assert collector.metrics.env_steps == collector.metrics.env_steps_lost == 5
        collector.reset()
        with pytest.raises(StateError, match="all envs are masked"):
            collector.collect(env_steps=20)


@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_a_beginning_that_fails_is_tried_again_and_loses_nothing(mode: str, batch_mode: Any) -> None:
    with Doomed(counters(3), {(1, 4): "fault"}, failing_begins=3, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, batch_mode=batch_mode, seed=0)
        batches = [collector.collect(env_steps=60)]
        assert collector.metrics.episodes_faulty == 1
        assert collector.metrics.env_steps_lost == 4
        numbers = [e.number for e in collector.metrics.episodes if e.env_id == 1]
        assert numbers == list(range(1, 1 + len(numbers)))
        rows = batches[0]["main"].take(batches[0]["main"]["env_id"] == 1)
        np.testing.assert_array_equal(rows["obs"][:, 3], rows["t"])
        assert rows["obs"][:, 2].min() == 1 + 3  # the env counts those that the collector did not hear of
        check_sums(collector, batches)


# --- what is told of it


def test_what_a_reset_drops_is_counted_as_lost() -> None:
    with Doomed(counters(2, length=4), {}) as envs:
        collector = Collector(envs, noop, batch_mode="complete", seed=0)
        batches = [collector.collect(episodes=1)]
        collector.reset()
        metrics = collector.metrics
        assert (metrics.env_steps, metrics.env_steps_lost, metrics.agent_steps_lost) == (8, 4, 8)
        assert (metrics.episodes_total, metrics.episodes_faulty, metrics.episodes_restarted) == (2, 0, 0)
        batches.append(collector.collect(episodes=2))
        check_sums(collector, batches)


@pytest.mark.checklist(120)
@pytest.mark.fault("E13")
def test_losses_are_in_the_summary_and_the_repr() -> None:
    with Doomed(counters(2), {(0, 2): "fault", (1, 3): "quiet", (0, 5): "quiet"}) as envs:
        collector = Collector(envs, noop, seed=0)
        assert "lost" not in repr(collector.metrics)
        collector.collect(env_steps=20)
        summary = collector.metrics.summary()
        assert summary["episodes_faulty"] == 1
        assert summary["episodes_restarted"] == 2
        assert summary["env_steps_lost"] == 2 + 3 + 3
        assert summary["agent_steps_lost"] == 2 * (2 + 3 + 3)
        assert "episodes and 3 lost;" in repr(collector.metrics)


# --- real faults, row for row


MORTAL: dict[str, st.SearchStrategy[Any]] = {
    "agent_num": st.integers(1, 3),
    "seed": st.integers(0, 2**32),
    "mapping": MAPPINGS,
    "learners": LEARNERS,
    "batch_mode": st.sampled_from(BATCH_MODES),
    "copy": st.booleans(),
    "deaths": DEATHS,
    "masks": st.booleans(),
}


def live_and_die(
    vectorizer: Callable[..., VectorEnv],
    mode: str,
    kind: str,
    calls: list[tuple[str, Any]],
    *,
    num_envs: int,
    agent_num: int,
    seed: int,
    mapping: Any,
    learners: set[str] | None,
    batch_mode: str,
    copy: bool,
    deaths: Deaths,
    masks: bool,
) -> None:
    """Hold the collector against the reference, in envs that die."""
    if masks:  # env 0 lives on: where all are masked there are no more batches
        deaths = {(i, k): (*death[:2], death[2] or i == 0) for (i, k), death in deaths.items()}
    with (
        TemporaryDirectory() as marks,
        vectorizer(
            mortals(kind, num_envs, agent_num, deaths, Path(marks)),
            autoreset_mode=mode,
            copy=copy,
            on_fault="mask" if masks else "restart",
            max_restarts=RestartLimit(count=100, backoff=0.0),
        ) as envs,
    ):
        run(
            envs,
            kind,
            seed,
            mapping,
            batch_mode,
            calls,
            learners=learners,
            reference_class=MortalReference,
            check_sums=check_sums,
            deaths=deaths,
            masks=masks,
        )


@pytest.mark.checklist(71)
@pytest.mark.checklist(114)
@pytest.mark.fault("E13")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=36)
@given(num_envs=st.integers(1, 4), calls=CALLS, drawn=st.fixed_dictionaries(MORTAL))
@example(  # lost because it asked for it, whatever becomes of the next incarnation
    num_envs=2,
    calls=[("env_steps", 12)],
    drawn={
        "agent_num": 1,
        "seed": 0,
        "mapping": one,
        "learners": None,
        "batch_mode": "truncate",
        "copy": True,
        "deaths": {(1, 0): ("step", 2, True), (1, 1): ("reset", 0, False)},
        "masks": True,
    },
)
def test_every_row_and_every_count_is_the_references_whoever_dies(
    kind: str, num_envs: int, calls: list[tuple[str, int]], drawn: dict[str, Any]
) -> None:
    for mode in MODES:
        live_and_die(partial(SyncVectorEnv, validate="strict"), mode, kind, calls, num_envs=num_envs, **drawn)


@pytest.mark.checklist(114)
@pytest.mark.fault("E13")
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(
    kind=st.sampled_from(list(KINDS)),
    num_envs=st.integers(1, 6),
    num_workers=st.integers(1, 3),
    calls=CALLS,
    drawn=st.fixed_dictionaries(MORTAL),
)
def test_any_number_of_worker_processes_gives_the_references_rows_whoever_dies(
    mode: str, kind: str, num_envs: int, num_workers: int, calls: list[tuple[str, int]], drawn: dict[str, Any]
) -> None:
    vectorizer = partial(AsyncVectorEnv, num_workers=min(num_workers, num_envs))
    live_and_die(vectorizer, mode, kind, calls, num_envs=num_envs, **drawn)


# --- real faults, wherever envs run

TROUBLES: dict[str, tuple[type[VectorEnv], type[FaultyEnv], tuple[int, ...]]] = {
    "sync": (SyncVectorEnv, RaisingEnv, (1,)),
    "thread": (ThreadVectorEnv, RaisingEnv, (1,)),
    "async": (AsyncVectorEnv, RaisingEnv, (1,)),
    "exit": (AsyncVectorEnv, ExitingEnv, (0, 1)),
    "hang": (AsyncVectorEnv, HangingEnv, (0, 1)),
}
"""How to run the envs, what env 1 is, and whose episodes are lost with it."""


def trouble(kind: type[FaultyEnv], i: int, marks: Path, at: int | None, where: Any, options: dict[str, Any]) -> Any:
    """Env 1 gets into trouble in one call of its first incarnation; all episodes are of 5 steps."""
    only = 0 if at is not None else -1
    return kind(
        5, agent_num=2, env_index=i, marks=marks, where=where, at=at, only_env=1, only_incarnation=only, **options
    )


def in_trouble(
    name: str,
    marks: Path,
    *,
    at: int | None = 7,
    where: Any = "step",
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Four envs; where there are workers, two with two envs each."""
    vectorizer, kind, _ = TROUBLES[name]
    factories = [partial(trouble, kind, i, marks, at, where, options or {}) for i in range(4)]
    if vectorizer is AsyncVectorEnv:
        settings |= {"num_workers": 2, "step_timeout": 1.0 if name == "hang" else None}
    return vectorizer(factories, **settings)


def told_in(batches: Sequence[Any]) -> dict[tuple[int, int, int], list[int]]:
    """The steps that batches hold of each (env, incarnation, episode), by the stamps of agent 0."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for batch in batches:
        rows = batch["main"].take(batch["main"]["agent_index"] == 0)
        np.testing.assert_array_equal(rows["next_obs"][:, :3], rows["obs"][:, :3])
        np.testing.assert_array_equal(rows["next_obs"][:, 3], rows["obs"][:, 3] + 1)
        np.testing.assert_array_equal(rows["truncated"], rows["obs"][:, 3] == 4)
        for i, incarnation, episode, t in rows["obs"][:, :4].astype(int).tolist():
            found.setdefault((i, incarnation, episode), []).append(t)
    return found


@pytest.mark.checklist(71)
@pytest.mark.fault("E13")
@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TROUBLES)
def test_what_is_lost_is_dropped_and_counted_wherever_envs_run(
    name: str, mode: str, batch_mode: Any, tmp_path: Path
) -> None:
    """Env 1 gets into trouble in the third step of its second episode; its first step is in the first batch."""
    casualties = TROUBLES[name][2]
    with in_trouble(name, tmp_path, autoreset_mode=mode, on_fault="restart") as envs:
        collector = Collector(envs, noop, batch_mode=batch_mode, seed=0)
        batches = [collector.collect(env_steps=24 if batch_mode == "truncate" else 20)]
        assert collector.metrics.episodes_faulty == 0
        while collector.metrics.episodes_total < 40:
            batches.append(collector.collect(env_steps=24))
            check_sums(collector, batches)
            assert batches[-1].env_steps == 24 if batch_mode == "truncate" else batches[-1].env_steps >= 24
        metrics = collector.metrics
        assert (metrics.episodes_faulty, metrics.episodes_restarted) == (len(casualties), 0)
        assert [int(k) for k in envs.incarnations] == [int(i in casualties) for i in range(4)]
        # An env beside the one in trouble hears of it in the same step, or in the next if it had replied already.
        least = 2 if batch_mode == "truncate" else 3
        assert least * len(casualties) <= metrics.env_steps_lost <= least * len(casualties) + len(casualties) - 1
        assert metrics.agent_steps_lost == 2 * metrics.env_steps_lost
        told = told_in(batches)
        for i in range(4):
            own = sorted(key for key in told if key[0] == i)
            if i not in casualties:
                assert {incarnation for _, incarnation, _ in own} == {0}
            elif batch_mode == "truncate":
                assert told[i, 0, 1] == [0]
                own.remove((i, 0, 1))
            assert own == [(i, 0, 0), *((i, 1, e) for e in range(len(own) - 1))] or i not in casualties
            last = own.pop() if batch_mode == "truncate" else None
            assert last is None or told[last] == list(range(len(told[last])))
            assert all(told[key] == list(range(5)) for key in own)
            assert len(own) >= 5


@pytest.mark.parametrize("where", ["reset", "init"])
@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_fails_while_it_begins_has_nothing_to_lose(mode: str, where: Any, tmp_path: Path) -> None:
    at = 2 if where == "reset" else 0
    with in_trouble("sync", tmp_path, at=at, where=where, autoreset_mode=mode, on_fault="restart") as envs:
        collector = Collector(envs, noop, batch_mode="complete", seed=0)
        batches = [collector.collect(episodes=20)]
        metrics = collector.metrics
        assert metrics.episodes_faulty == metrics.env_steps_lost == metrics.agent_steps_lost == 0
        assert envs.incarnations.tolist() == [0, 1, 0, 0]
        assert len(told_in(batches)) == 20
        check_sums(collector, batches)


@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_is_masked_while_it_begins_is_left_out_from_there(
    mode: str, at: int, batch_mode: Any, tmp_path: Path
) -> None:
    with in_trouble("sync", tmp_path, at=at, where="reset", autoreset_mode=mode, on_fault="mask") as envs:
        collector = Collector(envs, noop, batch_mode=batch_mode, seed=0)
        batches = [collector.collect(env_steps=60), collector.collect(env_steps=15)]
        assert [batch.env_steps for batch in batches] == [60, 15]
        assert {key[2] for key in told_in(batches) if key[0] == 1} == ({0} if at else set())
        metrics = collector.metrics
        assert metrics.episodes_faulty == metrics.env_steps_lost == metrics.agent_steps_lost == 0
        check_sums(collector, batches)


def histories(batches: Sequence[Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Each agent's rows in the order in which they came to be; ids that count across envs are left out."""
    rows = {name: np.concatenate([batch["main"][name] for batch in batches]) for name in batches[0]["main"].keys()}  # noqa: SIM118  (a batch is no iterable)
    order = np.lexsort((rows["t"], rows["eps_id"]))
    found = {}
    for i, a in set(zip(rows["env_id"].tolist(), rows["agent_index"].tolist(), strict=True)):
        own = order[(rows["env_id"][order] == i) & (rows["agent_index"][order] == a)]
        found[i, a] = {name: column[own] for name, column in rows.items() if name not in ("eps_id", "unroll_id")}
    return found


@pytest.mark.checklist(71)
@pytest.mark.parametrize("on_fault", ["restart", "mask"])
@pytest.mark.parametrize("batch_mode", BATCH_MODES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sync", "async", "exit"])
def test_the_others_rows_are_what_they_would_have_been(
    name: str, mode: str, batch_mode: Any, on_fault: str, tmp_path: Path
) -> None:
    def run(marks: Path, at: int | None) -> tuple[list[Any], tuple[int, ...]]:
        marks.mkdir()
        with in_trouble(name, marks, at=at, autoreset_mode=mode, on_fault=on_fault) as envs:
            collector = Collector(envs, EchoPolicy(), batch_mode=batch_mode, agent_connectors=[FrameStack(3)], seed=5)
            return [collector.collect(env_steps=24) for _ in range(5)], envs.masked_env_ids

    casualties = TROUBLES[name][2]
    (plain, _), (batches, masked) = run(tmp_path / "plain", None), run(tmp_path / "faulty", 7)
    assert masked == (casualties if on_fault == "mask" else ())
    expected, got = histories(plain), histories(batches)
    for (i, a), rows in expected.items():
        n = min(len(rows["t"]), len(got[i, a]["t"]))
        if i in casualties:
            if on_fault == "mask":
                assert got[i, a]["env_id"].size == (6 if batch_mode == "truncate" else 5)
            continue
        assert n >= 20
        for column, values in rows.items():
            np.testing.assert_array_equal(got[i, a][column][:n], values[:n], err_msg=column)


@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_asks_for_a_restart_gets_it_without_a_fuss(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with in_trouble("sync", tmp_path, options={"error": RestartQuietly}, autoreset_mode=mode) as envs:
        collector = Collector(envs, noop, seed=0)
        batches = [collector.collect(env_steps=60)]
        metrics = collector.metrics
        assert (metrics.episodes_faulty, metrics.episodes_restarted, metrics.env_steps_lost) == (0, 1, 3)
        assert told_in(batches)[1, 1, 0] == list(range(5))
        check_sums(collector, batches)
    assert not caplog.records


@pytest.mark.parametrize("name", ["sync", "async"])
def test_too_many_restarts_end_the_call_and_what_is_reset_away_is_counted(name: str, tmp_path: Path) -> None:
    with in_trouble(name, tmp_path, on_fault="restart", max_restarts=0) as envs:
        collector = Collector(envs, noop, seed=0)
        batches = [collector.collect(env_steps=24)]
        with pytest.raises(EnvRaised, match="Gave up"):
            collector.collect(env_steps=24)
        collector.reset()
        assert collector.metrics.env_steps_lost == 4  # step 7 of each; the eighth brought no rows
        batches.append(collector.collect(env_steps=24))
        check_sums(collector, batches)


def test_a_rollout_at_the_command_line_tells_of_losses() -> None:
    def printed(doom: dict[tuple[int, int], str]) -> str:
        text = io.StringIO()
        console = Console(file=text, width=160)
        with Doomed(counters(2), doom) as envs:
            collector = Collector(envs, noop, batch_mode="complete", seed=0, window=10**6)
            result = roll_out(collector, dict.fromkeys(envs.agents, "main"), 60, console)
            assert result.env_steps >= 60
            print_rollout(console, result)
        return text.getvalue()

    assert "lost" not in printed({})
    assert "lost besides: 1 episode to faults, 3 env steps together\n" in printed({(0, 3): "fault"})
    both = printed({(0, 3): "fault", (1, 2): "fault", (1, 4): "quiet"})
    assert "2 episodes to faults and 1 episode to restarts that envs asked for, 7 env steps together\n" in both
