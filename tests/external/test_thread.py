"""A simulator in a thread: what it may call and when, how it ends, and what is told to whom."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import Collector, FunctionPolicy, RandomPolicy, SampleBatch, external
from marlvec.collect import MultiAgentBatch
from marlvec.connectors import FlattenObs, FrameStack, NormalizeObs, RnnState
from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    BusyError,
    CheckpointError,
    ClosedError,
    DriverGone,
    EpisodeCut,
    EpisodeOver,
    EpisodesFull,
    StateError,
)
from marlvec.external import ExternalEnv, ExternalVectorEnv, replay
from marlvec.registry import resolve
from marlvec.testing.scripted import Script, ScriptedParallelEnv, TurnEnv
from marlvec.trees import tree_leaves
from tests.external.served import Play, by_sight, play_parallel, play_turns
from tests.vector.support.reference import refused

OBS = Box(-1000, 1000, (1,), np.float32)
ONE = {"agent": (OBS, Discrete(5))}


class Game(ExternalEnv):
    """Counts: obs (t,), reward t + 1 for the step from t; all actions are noted.

    Args:
        envs: Where.
        length: Of its episodes.
        episodes: How many it plays; None: until it is stopped.
        fail_at: In which of its steps it raises.
        options: As `ExternalEnv`.
    """

    def __init__(
        self,
        envs: ExternalVectorEnv,
        length: int = 4,
        episodes: int | None = None,
        fail_at: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(envs, **options)
        self.length, self.episodes, self.fail_at = length, episodes, fail_at
        self.ended, self.steps = 0, 0
        self.actions: list[int] = []
        self.how: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping and self.ended != self.episodes:
                self.play()
        except BaseException as error:
            self.how = error
            raise

    def play(self) -> None:
        episode = self.start_episode()
        for t in range(self.length):
            self.actions.append(self.get_action(episode, [t]))
            self.steps += 1
            if self.steps == self.fail_at:
                raise ZeroDivisionError("the physics broke")
            self.log_returns(episode, t + 1, {"t": t})
        self.end_episode(episode, [self.length], truncated=True)
        self.ended += 1


def echo() -> FunctionPolicy:
    return FunctionPolicy(lambda rows: rows["obs"][:, -1].astype(int) % 5)


def collecting(envs: ExternalVectorEnv, **options: Any) -> Collector:
    return Collector(envs, echo(), batch_mode="complete", seed=0, **options)


@pytest.mark.checklist(123)
def test_run_is_called_in_a_thread_and_connectors_apply() -> None:
    with external.make(ONE) as envs, Game(envs) as game:
        batch = collecting(envs, agent_connectors=[FrameStack(2)]).collect(episodes=2)
        assert batch["main"].obs.tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]] * 2
        assert batch["main"].rewards.tolist() == [1, 2, 3, 4] * 2
        assert game.actions[:8] == [0, 1, 2, 3] * 2
        assert game.is_alive
    assert not game.is_alive
    assert isinstance(game.how, StateError), "a call that waits is how run() learns of stop()"


@pytest.mark.checklist(123)
def test_who_collects_is_told_at_once_that_run_raised() -> None:
    with external.make(ONE, num_envs=2) as envs:
        collector = collecting(envs)
        with Game(envs, fail_at=6):
            with pytest.raises(DriverGone, match=r"Game.run\(\) raised ZeroDivisionError: the physics broke") as caught:
                collector.collect(episodes=100)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with Game(envs, episodes=2):  # nothing but its own episode is lost: the first one is still there
            batch = collector.collect(episodes=3)
        assert batch["main"].obs[:, 0].tolist() == [0, 1, 2, 3] * 3
        assert [fault.summary for fault in envs.faults] == ["ZeroDivisionError: the physics broke"]
        assert collector.metrics.episodes_faulty == 1


def test_who_collects_is_told_that_nobody_is_left() -> None:
    with external.make(ONE) as envs:
        collector = collecting(envs)
        with Game(envs, episodes=2):
            assert len(collector.collect(episodes=1)["main"]) == 4
            refused(DriverGone, "no simulator is running: every run", collector.collect, episodes=2)
        with Game(envs, episodes=1):
            assert len(collector.collect(episodes=2)["main"]) == 8, "nothing was lost"


class Leaver(Game):
    def play(self) -> None:
        self.get_action(self.start_episode(), [0])
        self.ended += 1


def test_what_run_leaves_behind_is_lost() -> None:
    with external.make(ONE) as envs:
        collector = collecting(envs)
        with Leaver(envs, episodes=1), pytest.raises(DriverGone, match="no simulator is running"):
            collector.collect(episodes=1)
        summary = "DriverGone: Leaver.run() returned while the episode was running"
        assert [fault.summary for fault in envs.faults] == [summary]


@pytest.mark.checklist(123)
@pytest.mark.parametrize("moment", ["get_action", "start_episode", "log_action", "busy"])
def test_stop_joins_wherever_run_waits(moment: str) -> None:
    """Nobody collects, so that every call waits for ever."""
    entered = threading.Event()

    class Stuck(ExternalEnv):
        def run(self) -> None:
            episode = None if moment == "start_episode" else self.start_episode()
            entered.set()
            if moment == "get_action":
                self.get_action(episode, [0])
            while moment == "log_action":
                self.log_action(episode, [0], 1)
            while moment == "busy" and not self.stopping:
                time.sleep(0.01)
            self.start_episode()

    with external.make(ONE) as envs:
        if moment == "start_episode":
            envs.gateway.begin()
        stuck = Stuck(envs).start()
        entered.wait(10)
        time.sleep(0.05)
        stuck.stop()
        stuck.stop()
        assert not stuck.is_alive
        refused(ClosedError, r"stop\(\) was called", stuck.start_episode)


def test_stop_says_so_where_run_does_not_end() -> None:
    free = threading.Event()

    class Deaf(ExternalEnv):
        def run(self) -> None:
            free.wait(30)

    with external.make(ONE) as envs:
        deaf = Deaf(envs).start()
        refused(StateError, r"Deaf.run\(\) has not returned 0.05 s after stop", deaf.stop, timeout=0.05)
        free.set()
        deaf.stop()


def test_closing_the_vectorizer_ends_run() -> None:
    envs = external.make(ONE)
    game = Game(envs).start()
    collecting(envs).collect(episodes=1)
    envs.close()
    game.stop()
    assert isinstance(game.how, (ClosedError, type(None)))
    assert game.stopping


@pytest.mark.checklist(121)
def test_every_wait_has_a_timeout_of_its_own_error() -> None:
    with external.make(ONE, max_backlog=2) as envs:
        game = ExternalEnv(envs, timeout=0.02)
        episode = game.start_episode()
        refused(AnswerTimeout, r"no action within 0.02 s; is a collector collecting\?", game.get_action, episode, [0])
        refused(AnswerTimeout, "within 0.01 s", game.wait_for_action, episode, timeout=0.01)
        for call in (lambda: game.get_action(episode, [1]), lambda: game.log_action(episode, [1], 1)):
            refused(BusyError, "still to be taken", call)
        refused(EpisodesFull, "", game.start_episode, timeout=0.01)
        game.end_episode(episode, [1], truncated=True)
        logged = game.start_episode()
        with pytest.raises(AnswerTimeout, match="rows wait"):
            for _ in range(5):
                game.log_action(logged, [0], 1)
        assert issubclass(AnswerTimeout, TimeoutError)


@pytest.mark.checklist(121)
def test_an_answer_that_came_too_late_can_be_taken() -> None:
    with external.make(ONE) as envs:
        game = ExternalEnv(envs, timeout=0.01)
        episode = game.start_episode("mine")
        assert episode == "mine"
        refused(StateError, "nothing was asked", game.wait_for_action, episode)
        refused(AnswerTimeout, "", game.get_action, episode, [3])
        collector = collecting(envs)
        thread = threading.Thread(target=lambda: collector.collect(episodes=1))
        thread.start()
        assert game.wait_for_action(episode, timeout=30) == 3
        assert game.get_action(episode, [4], timeout=30) == 4
        game.end_episode(episode)
        thread.join()


@pytest.mark.checklist(122)
def test_ids_are_those_of_running_episodes_and_of_no_others() -> None:
    with external.make(ONE, num_envs=3) as envs:
        game = ExternalEnv(envs, max_episodes=2)
        one = game.start_episode("x")
        refused(StateError, "'x'.*runs", game.start_episode, "x")
        game.start_episode()
        refused(EpisodesFull, "max_episodes", game.start_episode)
        game.end_episode(one)
        for call in (game.end_episode, lambda key: game.get_action(key, [0]), lambda key: game.log_returns(key, 1)):
            refused(EpisodeOver, "no episode 'x' runs", call, one)
        game.start_episode("x")
        assert len(game._episodes) == 2
        game.stop()
        assert len(game._episodes) == 0
        assert envs.gateway.episodes == ()


def test_with_several_agents_everything_goes_by_name() -> None:
    spaces = {"a": (OBS, Discrete(5)), "b": (OBS, Discrete(5))}

    class Pair(ExternalEnv):
        def run(self) -> None:
            episode = self.start_episode(training_enabled=True)
            assert self.get_action(episode, {"a": [1], "b": [2]}) == {"a": 1, "b": 2}
            self.log_returns(episode, {"a": 1, "b": 2})
            self.end_agents(episode, {"a": [7]})
            self.log_action(episode, {"b": [3]}, {"b": 0})
            self.log_returns(episode, {"b": 4})
            self.end_episode(episode, {"b": [8]}, truncated=True)

    with external.make(spaces) as envs, Pair(envs):
        rows = collecting(envs).collect(episodes=1)["main"]
    assert rows.next_obs[:, 0].tolist() == [7, 3, 8]
    assert rows.rewards.tolist() == [1, 2, 4]
    assert rows.terminated.tolist() == [True, False, False]
    assert rows.truncated.tolist() == [False, False, True]


def test_one_agent_by_name_where_that_is_asked_for() -> None:
    with external.make(ONE) as envs:
        game = ExternalEnv(envs, dicts=True)
        thread = threading.Thread(target=lambda: collecting(envs).collect(episodes=1))
        thread.start()
        episode = game.start_episode(env_id=0)
        assert game.get_action(episode, {"agent": [2]}) == {"agent": 2}
        game.end_episode(episode)
        thread.join()


def test_wrong_uses_are_refused() -> None:
    with external.make(ONE) as envs:
        refused(ArgumentError, "max_episodes", ExternalEnv, envs, max_episodes=0)
        refused(StateError, r"has no run\(\)", ExternalEnv(envs).start)
        with Game(envs) as game, pytest.raises(StateError, match="runs already"):
            game.start()


def test_an_interrupt_loses_nothing() -> None:
    """Ctrl-C while nobody comes: what there is stays, and collecting goes on."""
    with external.make(ONE) as envs:
        collector = collecting(envs)
        game = ExternalEnv(envs)
        episode = game.start_episode()
        game.log_action(episode, [1], 1)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        refused(KeyboardInterrupt, "", collector.collect, episodes=1)
        timer.join()
        game.log_returns(episode, 5)
        game.end_episode(episode)
        assert collector.collect(episodes=1)["main"].rewards.tolist() == [5]


def test_one_collector_after_the_other() -> None:
    with external.make(ONE, num_envs=2) as envs:
        for _ in range(2):
            with Game(envs), Game(envs):
                assert len(collecting(envs).collect(episodes=3)["main"]) == 12


@pytest.mark.parametrize("unit", ["env_steps", "agent_steps"])
def test_batches_have_exactly_the_size_that_was_asked_for(unit: str) -> None:
    with external.make(ONE, num_envs=4) as envs:
        games = [Game(envs, length=k + 2).start() for k in range(4)]
        collector = Collector(envs, RandomPolicy(), seed=0)
        for amount in (1, 7, 30, 2):
            batch = collector.collect(**{unit: amount})
            assert getattr(batch, unit) == amount
        for game in games:
            game.stop()


def test_policies_come_and_go_while_slots_are_empty() -> None:
    """A slot in which no episode runs is played by nobody: a policy that is removed does not stay for its sake."""
    with external.make(ONE, num_envs=4) as envs, Game(envs):
        collector = Collector(envs, {"old": echo(), "new": echo()}, lambda agent, episode: choice[0], seed=0)
        choice = ["old"]
        collector.collect(episodes=2)
        choice[0] = "new"
        collector.collect(episodes=8)
        collector.remove_policy("old")
        collector.collect(episodes=3)
        collector.collect(episodes=3)
        assert [runner.policy_id for runner in collector._runners.values()] == ["new"]


def test_collecting_in_the_background_and_from_here_again() -> None:
    with external.make(ONE, num_envs=2) as envs, Game(envs) as game:
        collector = collecting(envs)
        with collector.background(episodes=2, total=6) as batches:
            assert [len(batch["main"]) for batch in batches] == [8, 8, 8]
        assert len(collector.collect(episodes=1)["main"]) == 4
        assert game.is_alive
        collector.reset()  # the running episodes are lost, and their simulator begins anew
        assert len(collector.collect(episodes=1)["main"]) == 4
        assert envs.faults == ()


@pytest.mark.fault("G9")
def test_an_episode_that_does_not_end_is_cut() -> None:
    with external.make(ONE, max_episode_steps=3) as envs:
        game = ExternalEnv(envs)
        collector, batches = collecting(envs), []
        thread = threading.Thread(target=lambda: batches.append(collector.collect(episodes=2)))
        thread.start()
        for _ in range(2):
            episode = game.start_episode()
            for t in range(3):
                game.get_action(episode, [t], timeout=30)
                game.log_returns(episode, 1)
            with pytest.raises(EpisodeCut, match="was cut: it has made as many steps as max_episode_steps allows"):
                game.get_action(episode, [3])
            assert len(game._episodes) == 0
        thread.join()
        rows = batches[0]["main"]
        assert rows.next_obs[:, 0].tolist() == [1, 2, 3] * 2
        assert rows.truncated.tolist() == [False, False, True] * 2
        assert rows.rewards.tolist() == [1] * 6
        assert not rows.terminated.any()


def test_run_is_called_again_where_time_was_up() -> None:
    """It need not look at the limit: the last row is there all the same, and it plays on."""
    with external.make(ONE, max_episode_steps=3) as envs, Game(envs, length=10):
        rows = collecting(envs).collect(episodes=4)["main"]
    assert rows.next_obs[:, 0].tolist() == [1, 2, 3] * 4
    assert rows.truncated.tolist() == [False, False, True] * 4


@pytest.mark.slow("many clients and connections")
@pytest.mark.fault("G9")
def test_an_episode_of_which_nothing_is_heard_is_lost() -> None:
    with external.make(ONE, num_envs=2, idle_timeout=1.0) as envs:
        silent, game = ExternalEnv(envs), ExternalEnv(envs)
        collector, batches = collecting(envs), []
        thread = threading.Thread(target=lambda: batches.append(collector.collect(episodes=1)))
        thread.start()
        never = silent.start_episode()  # asks nothing at all
        once = silent.start_episode()
        silent.get_action(once, [0], timeout=120)
        episode = game.start_episode(timeout=120)  # a slot is free as soon as one of them is cut off
        for t in range(24):  # longer than that in all, and a twentieth of it at a time
            game.get_action(episode, [t], timeout=120)
            time.sleep(0.05)
        game.end_episode(episode)
        thread.join()
        for key in (never, once):
            refused(EpisodeOver, "nothing was heard for 1.0 s", silent.log_returns, key, 1)
        assert len(batches[0]["main"]) == 24
        assert [fault.summary for fault in envs.faults] == ["TimeoutError: nothing was heard for 1.0 s"]


def test_an_idle_episode_makes_room_where_nobody_collects() -> None:
    with external.make(ONE, idle_timeout=0.05) as envs:
        gone: list[Exception] = []
        envs.gateway.begin(on_lost=gone.append)
        time.sleep(0.1)
        envs.gateway.begin()
        assert [str(error) for error in gone] == ["episode 0 was cut off: nothing was heard for 0.05 s"]


# --- Whether an env runs inside or drives from outside: the batches are the same


def simple_tag() -> Any:
    return resolve("simple_tag")(max_cycles=12)


def connect_four() -> Any:
    return resolve("connect_four")()


def leavers(env_index: int) -> ScriptedParallelEnv:
    """Agents leave one by one, some before others; lengths differ."""
    return ScriptedParallelEnv(agent_num=4, env_index=env_index, longest=7)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "simple_tag": (simple_tag, play_parallel),
    "connect_four": (connect_four, play_turns),
    "leaving early": (leavers, play_parallel),
}
NUM_ENVS, SEED = 3, 11
LEFT_OUT = ("eps_id", "unroll_id", "off_policy", "policy_version", "env_id")  # what a replay does not bring again


def factory(kind: str, i: int) -> Any:
    build = CASES[kind][0]
    return build(i) if build is leavers else build()


@contextmanager
def outside(kind: str, *, lockstep: bool, **options: Any) -> Iterator[ExternalVectorEnv]:
    """A vectorizer, and as many threads that drive their own env each."""
    with ExitStack() as stack:
        envs = stack.enter_context(external.make(partial(factory, kind, 0), NUM_ENVS, lockstep=lockstep, **options))
        for i, seed in enumerate(marlvec.env_seeds(SEED, NUM_ENVS)):
            driver = Play(envs, factory(kind, i), CASES[kind][1], env_id=i, seed=seed, timeout=60)
            stack.enter_context(driver)
        yield envs


def collector_of_kind(envs: Any, kind: str, **options: Any) -> Collector:
    """With connectors that remember and that learn, and two policies where there are two sides."""
    policies = {"a": by_sight(1), "b": by_sight(2)}
    mapping: Any = lambda agent, episode: "a" if agent == envs.agents[0] else "b"  # noqa: E731
    if kind == "simple_tag":
        mapping = {agent: "a" if agent.startswith("adversary") else "b" for agent in envs.agents}
    chain = [FlattenObs(), NormalizeObs(), FrameStack(2)]
    return Collector(envs, policies, mapping, agent_connectors=chain, seed=SEED, **options)


def leaves(batch: MultiAgentBatch) -> dict[str, Any]:
    return {
        f"{policy_id}/{name}/{path}": np.asarray(leaf)
        for policy_id, own in sorted(batch.items())
        for name, column in own.items()
        for path, leaf in tree_leaves(column)
    }


def assert_same(one: MultiAgentBatch, other: MultiAgentBatch) -> None:
    assert leaves(one).keys() == leaves(other).keys()
    same(one, other, left_out=())
    assert (one.env_steps, one.agent_steps) == (other.env_steps, other.agent_steps)


def same(found: MultiAgentBatch, wanted: MultiAgentBatch, left_out: Sequence[str] = LEFT_OUT) -> None:
    one = leaves(found)
    for name, leaf in leaves(wanted).items():
        if name.split("/")[1] not in left_out:
            np.testing.assert_array_equal(one[name], leaf, err_msg=name, strict=True)


@pytest.mark.mostly_slow("many clients and connections", quick=8)
@pytest.mark.checklist(123)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("kind", CASES)
def test_in_rounds_batches_are_the_same_bit_for_bit(kind: str, batch_mode: Any) -> None:
    inside = [partial(factory, kind, i) for i in range(NUM_ENVS)]
    with marlvec.make(inside, backend="sync") as envs, outside(kind, lockstep=True) as others:
        one = collector_of_kind(envs, kind, batch_mode=batch_mode)
        other = collector_of_kind(others, kind, batch_mode=batch_mode)
        for amount in (70, 41, 90):
            assert_same(one.collect(amount), other.collect(amount))
        records = [
            [
                (e.env_id, e.number, e.length, e.returns_A.tolist(), e.lengths_A.tolist(), e.truncated_A.tolist())
                for e in c.metrics.episodes
            ]
            for c in (one, other)
        ]
        assert records[0] == records[1]
        assert len(records[0]) > 5


def test_a_time_limit_cuts_as_it_does_inside() -> None:
    kind, inside = "leaving early", [partial(leavers, i) for i in range(NUM_ENVS)]
    with (
        marlvec.make(inside, backend="sync", max_episode_steps=3) as envs,
        outside(kind, lockstep=True, max_episode_steps=3) as others,
    ):
        one, other = collector_of_kind(envs, kind), collector_of_kind(others, kind)
        for amount in (40, 25):
            assert_same(one.collect(amount), other.collect(amount))


@pytest.mark.parametrize("kind", ["connect_four", "leaving early"])
def test_out_of_step_every_episode_is_the_same(kind: str) -> None:
    """Who is faster plays more episodes; what happens in each does not depend on it."""
    inside = [partial(factory, kind, i) for i in range(NUM_ENVS)]
    chain = [FlattenObs(), FrameStack(2)]
    with marlvec.make(inside, backend="sync") as envs, outside(kind, lockstep=False, copy=False) as others:
        one, other = (
            Collector(each, {"a": by_sight()}, agent_connectors=chain, batch_mode="complete", seed=SEED)
            for each in (envs, others)
        )
        wanted, found = (by_episode(c, c.collect(episodes=30)["a"]) for c in (one, other))
        assert len(wanted) == len(found) == 30  # one more may have ended with the last one, and comes next time
        common = wanted.keys() & found.keys()
        assert len(common) >= 10
        for key in common:
            for name, column in wanted[key].items():
                np.testing.assert_array_equal(found[key][name], column, err_msg=f"{key} {name}")


def by_episode(owner: Collector, rows: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """(env, n-th episode there) → its rows, of the episodes that are in the batch."""
    names = (
        "obs",
        "actions",
        "rewards",
        "next_obs",
        "terminated",
        "truncated",
        "t",
        "env_t",
        "next_env_t",
        "agent_index",
    )
    out = {}
    for record in owner.metrics.episodes:
        mine = rows["eps_id"] == record.eps_id
        if not mine.any():
            continue
        out[record.env_id, record.number] = {name: rows[name][mine] for name in names}
    return out


# --- Logged episodes come out as they went in


def refuse() -> FunctionPolicy:
    def act(rows: Any) -> Any:
        raise AssertionError("nobody is to be asked")

    return FunctionPolicy(act)


def mapping(agent: str, episode: Any) -> str:
    return "a" if agent.startswith(("adversary", "player_0")) else "b"


def collector(envs: Any, make: Any, **options: Any) -> Collector:
    return Collector(envs, {"a": make(), "b": make()}, mapping, agent_connectors=[], seed=0, **options)


def recorded(kind: str, num_envs: int, **amount: int) -> MultiAgentBatch:
    with marlvec.make([partial(factory, kind, i) for i in range(num_envs)], backend="sync") as envs:
        return collector(envs, by_sight, batch_mode="complete").collect(**amount)


@pytest.mark.mostly_slow("many clients and connections", quick=3)
@pytest.mark.parametrize("kind", CASES)
def test_episodes_come_out_as_they_went_in(kind: str, tmp_path: Path) -> None:
    wanted = recorded(kind, 1, episodes=5)
    wanted.save(tmp_path / "log.npz")
    with external.make(partial(factory, kind, 0)) as envs:
        again = collector(envs, refuse, batch_mode="complete")
        with replay(tmp_path / "log.npz", envs, repeat=2):
            for _ in range(2):
                same(again.collect(episodes=5), wanted)
            refused(DriverGone, "no simulator is running", again.collect, episodes=1)
        assert again.metrics.episodes_total == 10
        assert envs.faults == ()


def test_recurrent_policy_gets_its_states_of_logged_episodes() -> None:
    """States are those of a live run with the same observations; actions are the log's."""

    def act(rows: Any) -> Any:
        return np.full(len(rows), 1), {"state_out": rows["state_in"] + rows.obs.sum(axis=1, keepdims=True)}

    log = recorded("leaving early", 1, episodes=4)
    with external.make(partial(factory, "leaving early", 0)) as envs, replay(log, envs):
        recurrent = Collector(
            envs,
            {"a": FunctionPolicy(act), "b": FunctionPolicy(act)},
            mapping,
            agent_connectors=[RnnState(np.zeros(1))],
            batch_mode="complete",
            seed=0,
        )
        found = recurrent.collect(episodes=4)
    same(found, log)
    for rows in found.values():
        assert rows.off_policy.all()
        for unroll in np.unique(rows.unroll_id):
            mine = rows.take(rows.unroll_id == unroll)
            total = np.cumsum(mine.obs.sum(axis=1))[:, None]
            np.testing.assert_array_equal(mine.state_out, total)
            np.testing.assert_array_equal(mine.state_in, np.concatenate([[[0]], total[:-1]]))


def test_many_at_a_time_and_cut_where_the_data_ends() -> None:
    kind = "leaving early"
    with marlvec.make([partial(factory, kind, i) for i in range(3)], backend="sync") as envs:
        live = collector(envs, by_sight)
        parts = [live.collect(env_steps=7) for _ in range(3)]
    whole = MultiAgentBatch.concat(parts)
    ids = set(np.concatenate([rows.eps_id for rows in whole.values()]).tolist())
    with external.make(partial(factory, kind, 0), num_envs=2) as envs, replay(parts, envs):
        found = collector(envs, refuse, batch_mode="complete").collect(episodes=len(ids))
    for policy_id, rows in whole.items():
        assert rows_of(found[policy_id]) == rows_of(rows)
        ends = ~(rows.terminated | rows.truncated)
        assert found[policy_id].truncated.sum() > rows.truncated.sum() or not ends.any()


def rows_of(rows: SampleBatch) -> list[Any]:
    columns = (rows.obs, rows.actions[:, None], rows.rewards[:, None], rows.next_obs, rows.terminated[:, None])
    return sorted(np.concatenate(columns, axis=1).tolist())


def times(rows: Any) -> list[list[int]]:
    return np.stack([rows.t, rows.env_t, rows.next_env_t], axis=1).tolist()


def test_env_steps_are_the_logs_where_it_is_whole_and_count_its_rows_elsewhere() -> None:
    """By hand: two players in turns; the log lacks one of them, or the first decision of each."""
    with marlvec.make([lambda: TurnEnv(Script.together(2, 5, "terminated"), agent_num=2)], backend="sync") as envs:
        log = Collector(envs, by_sight(), agent_connectors=[], batch_mode="complete", seed=0).collect(episodes=1)
        spaces = {agent: (envs.agent_observation_space(agent), envs.agent_action_space(agent)) for agent in envs.agents}
    assert times(log["main"]) == [[0, 0, 2], [1, 2, 4], [2, 4, 5], [0, 1, 3], [1, 3, 5]]
    one_side = log.map(lambda rows: rows.take(rows.agent_index == 0))
    later = log.map(lambda rows: rows.take(rows.t > 0))
    for part, wanted in (
        (log, times(log["main"])),
        (one_side, [[0, 0, 1], [1, 1, 2], [2, 2, 3]]),  # env steps of the other player are left out
        (later, [[0, 0, 2], [1, 2, 3], [0, 1, 3]]),  # counted from the first row that is there
    ):
        with external.make(spaces) as envs, replay(part, envs):
            found = Collector(envs, refuse(), agent_connectors=[], batch_mode="complete").collect(episodes=1)["main"]
        assert times(found) == wanted
        assert found.rewards.tolist() == part["main"].rewards.tolist()


class Minari:
    """Looks as Minari's datasets do: observations are one longer than the rest."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def iterate_episodes(self) -> Any:
        for k, length in enumerate(self.lengths):
            time = np.arange(length + 1, dtype=np.float32)
            yield SimpleNamespace(
                observations={"eye": time[:, None], "ear": np.full((length + 1, 2), k)},
                actions=np.arange(length) % 5,
                rewards=np.arange(length) / 2,
                terminations=np.arange(length) == length - 1 if k % 2 else np.zeros(length, bool),
                truncations=np.zeros(length, bool),
            )


def test_a_minari_dataset() -> None:
    from gymnasium.spaces import Dict

    space = Dict(eye=Box(0, 99, (1,), np.float32), ear=Box(0, 9, (2,), np.int64))
    with external.make({"only": (space, Discrete(5))}) as envs, replay(Minari([3, 2]), envs):
        rows = Collector(envs, refuse(), agent_connectors=[], batch_mode="complete").collect(episodes=2)["main"]
    assert rows.obs["eye"][:, 0].tolist() == [0, 1, 2, 0, 1]
    assert rows.next_obs["eye"][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert rows.obs["ear"][:, 0].tolist() == [0, 0, 0, 1, 1]
    assert rows.actions.tolist() == [0, 1, 2, 0, 1]
    assert rows.rewards.tolist() == [0, 0.5, 1, 0, 0.5]
    assert rows.terminated.tolist() == [False, False, False, False, True]
    assert rows.truncated.tolist() == [False, False, True, False, False]


def test_episodes_that_are_not_for_training() -> None:
    with external.make(partial(factory, "leaving early", 0)) as envs:
        batch = recorded("leaving early", 1, episodes=2)
        with replay(batch, envs, training_enabled=False, repeat=None):
            assert len(collector(envs, refuse, batch_mode="complete").collect(episodes=5)) == 0


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    batch = recorded("leaving early", 1, episodes=1)
    (tmp_path / "text.npz").write_text("no")
    with (
        external.make(partial(factory, "leaving early", 0)) as envs,
        external.make({"x": (Box(0, 1), Discrete(2))}) as one,
    ):
        for dataset, says in (
            (3, "got int"),
            ([], "empty list"),
            (batch.map(lambda rows: rows.drop("next_env_t")), "lack the columns"),
            (Minari([1]), "has one agent"),
        ):
            refused(ArgumentError, says, replay, dataset, envs)
        refused(ArgumentError, "agent number", replay, batch, one)
        for name in ("text.npz", "nowhere.npz"):
            refused(CheckpointError, "", replay, tmp_path / name, envs)
        refused(ArgumentError, "repeat", replay, batch, envs, repeat=0)
        holey = batch.map(lambda rows: rows.take(rows.t != 1))
        with replay(holey, envs), pytest.raises(DriverGone, match="rows are missing between its decision number 0"):
            collector(envs, refuse).collect(episodes=1)
