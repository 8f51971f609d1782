"""A simulator in a thread: what it may call and when, how it ends, and what is told to whom."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec import Collector, FunctionPolicy, RandomPolicy, external
from marlvec.connectors import FrameStack
from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    BusyError,
    ClosedError,
    DriverGone,
    EpisodeCut,
    EpisodeOver,
    EpisodesFull,
    StateError,
)
from marlvec.external import ExternalEnv, ExternalVectorEnv

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
            with pytest.raises(DriverGone, match="no simulator is running: every run"):
                collector.collect(episodes=2)
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
        with pytest.raises(ClosedError, match=r"stop\(\) was called"):
            stuck.start_episode()


def test_stop_says_so_where_run_does_not_end() -> None:
    free = threading.Event()

    class Deaf(ExternalEnv):
        def run(self) -> None:
            free.wait(30)

    with external.make(ONE) as envs:
        deaf = Deaf(envs).start()
        with pytest.raises(StateError, match=r"Deaf.run\(\) has not returned 0.05 s after stop"):
            deaf.stop(timeout=0.05)
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
        with pytest.raises(AnswerTimeout, match=r"no action within 0.02 s; is a collector collecting\?"):
            game.get_action(episode, [0])
        with pytest.raises(AnswerTimeout, match="within 0.01 s"):
            game.wait_for_action(episode, timeout=0.01)
        for call in (lambda: game.get_action(episode, [1]), lambda: game.log_action(episode, [1], 1)):
            with pytest.raises(BusyError, match="still to be taken"):
                call()
        with pytest.raises(EpisodesFull):
            game.start_episode(timeout=0.01)
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
        with pytest.raises(StateError, match="nothing was asked"):
            game.wait_for_action(episode)
        with pytest.raises(AnswerTimeout):
            game.get_action(episode, [3])
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
        with pytest.raises(StateError, match="'x'.*runs"):
            game.start_episode("x")
        game.start_episode()
        with pytest.raises(EpisodesFull, match="max_episodes"):
            game.start_episode()
        game.end_episode(one)
        for call in (game.end_episode, lambda key: game.get_action(key, [0]), lambda key: game.log_returns(key, 1)):
            with pytest.raises(EpisodeOver, match="no episode 'x' runs"):
                call(one)
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
        with pytest.raises(ArgumentError, match="max_episodes"):
            ExternalEnv(envs, max_episodes=0)
        with pytest.raises(StateError, match=r"has no run\(\)"):
            ExternalEnv(envs).start()
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
        with pytest.raises(KeyboardInterrupt):
            collector.collect(episodes=1)
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
            with pytest.raises(EpisodeOver, match="nothing was heard for 1.0 s"):
                silent.log_returns(key, 1)
        assert len(batches[0]["main"]) == 24
        assert [fault.summary for fault in envs.faults] == ["TimeoutError: nothing was heard for 1.0 s"]


def test_an_idle_episode_makes_room_where_nobody_collects() -> None:
    with external.make(ONE, idle_timeout=0.05) as envs:
        gone: list[Exception] = []
        envs.gateway.begin(on_lost=gone.append)
        time.sleep(0.1)
        envs.gateway.begin()
        assert [str(error) for error in gone] == ["episode 0 was cut off: nothing was heard for 0.05 s"]
