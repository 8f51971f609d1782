"""The door itself: what comes in arrives whole, and what is wrong stays outside."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import Collector, FunctionPolicy, external
from marlvec.connectors import RnnState
from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    BusyError,
    ClosedError,
    ContractError,
    EpisodeCut,
    EpisodeOver,
    EpisodesFull,
    FetchTimeout,
    MarlvecError,
    StateError,
)
from marlvec.external import EpisodeGateway, ExternalEpisode, ExternalVectorEnv
from tests.vector.support.reference import refused

OBS = Box(-1000, 1000, (2,), np.float32)
SPACES = {"a": (OBS, Discrete(5)), "b": (OBS, Discrete(5))}
Drive = Callable[..., "Collecting"]


def see(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


class Collecting:
    """A collector in a thread, and what became of it."""

    def __init__(
        self,
        envs: ExternalVectorEnv,
        policy: Any = None,
        mapping: Any = None,
        batch_mode: Any = "complete",
        **options: Any,
    ) -> None:
        act = FunctionPolicy(lambda rows: rows["obs"][:, 0].astype(int) % 5) if policy is None else policy
        self.collector = Collector(envs, act, mapping, batch_mode=batch_mode, seed=0, **options)
        self.result: Any = None

    def collect(self, **amount: Any) -> Collecting:
        def work() -> None:
            try:
                self.result = self.collector.collect(**amount)
            except BaseException as error:
                self.result = error

        self.thread = threading.Thread(target=work)
        self.thread.start()
        return self

    def wait(self) -> Any:
        self.thread.join(30)
        assert not self.thread.is_alive(), "it waits for something that never comes"
        return self.result


@pytest.fixture
def envs() -> Iterator[ExternalVectorEnv]:
    with external.make(SPACES, num_envs=2) as made:
        yield made


def ask(episode: ExternalEpisode, obs: Any, **more: Any) -> dict[str, Any]:
    box: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    episode.ask(obs, answer=box.put, **more)
    return box.get(timeout=30)


def play(episode: ExternalEpisode, length: int = 3, stamp: int = 0, **end: Any) -> None:
    """Agent b acts every other time, and is paid in between."""
    for t in range(length):
        acting = {"a": see(stamp, t)} if t % 2 else {"a": see(stamp, t), "b": see(stamp, t + 0.5)}
        actions = ask(episode, acting)
        assert actions == dict.fromkeys(acting, stamp % 5)
        episode.log_returns({"a": 1.0, "b": 10.0 + t})
    episode.end({"a": see(stamp, 99), "b": see(stamp, 99.5)}, **end)


@pytest.mark.checklist(121)
@pytest.mark.parametrize("truncated", [False, True])
def test_an_episode_from_begin_to_end(envs: ExternalVectorEnv, truncated: bool) -> None:
    collecting = Collecting(envs).collect(episodes=1)
    episode = envs.gateway.begin(timeout=5)
    play(episode, stamp=7, truncated=truncated)
    rows = collecting.wait()["main"]
    a, b = rows.agent_index == 0, rows.agent_index == 1
    assert rows.obs[a].tolist() == [[7, 0], [7, 1], [7, 2]]
    assert rows.next_obs[a].tolist() == [[7, 1], [7, 2], [7, 99]]
    assert rows.rewards[a].tolist() == [1, 1, 1]
    assert rows.obs[b].tolist() == [[7, 0.5], [7, 2.5]]
    assert rows.rewards[b].tolist() == [21, 12], "what it was paid while it waited belongs to what it did before"
    assert rows.actions.tolist() == [2] * 5
    assert rows.truncated[rows.env_t > 1].tolist() == [truncated] * 2
    assert rows.terminated[rows.env_t > 1].tolist() == [not truncated] * 2
    assert not (rows.terminated | rows.truncated)[rows.env_t < 2].any()
    assert episode.over is not None
    assert envs.gateway.episodes == ()
    (record,) = collecting.collector.metrics.episodes
    assert (record.length, record.returns_A.tolist(), record.truncated_A.tolist()) == (3, [3, 33], [truncated] * 2)


@pytest.mark.checklist(121)
def test_agents_end_one_by_one(envs: ExternalVectorEnv) -> None:
    collecting = Collecting(envs).collect(episodes=1)
    episode = envs.gateway.begin()
    ask(episode, {"a": see(1, 0), "b": see(1, 0)})
    episode.log_returns({"a": 1, "b": 2})
    episode.end_agents({"b": see(1, 50)}, truncated=True, rewards={"b": 0.5})
    assert episode.agents == ("a",)
    assert ask(episode, {"a": see(1, 1)}) == {"a": 1}
    refused(StateError, "'b'.* ended already", episode.ask, {"a": see(1, 1), "b": see(1, 1)}, answer=print)
    refused(StateError, "'b' has ended, and can get no reward", episode.log_returns, {"b": 1})
    episode.end(rewards={"a": 4})
    rows = collecting.wait()["main"]
    assert rows.next_obs.tolist() == [[1, 1], [1, 1], [1, 50]]  # a has no last observation of its own
    assert rows.next_obs_missing.tolist() == [False, True, False]
    assert rows.terminated.tolist() == [False, True, False]
    assert rows.truncated.tolist() == [False, False, True]
    assert rows.rewards.tolist() == [1, 4, 2.5]


@pytest.mark.checklist(122)
def test_logged_actions_need_no_policy(envs: ExternalVectorEnv) -> None:
    def refuse(rows: Any) -> Any:
        raise AssertionError("nobody is to be asked")

    collecting = Collecting(envs, FunctionPolicy(refuse)).collect(episodes=3)
    for stamp in range(3):
        episode = envs.gateway.begin(timeout=30)
        for t in range(4):
            episode.wait_for_room(30)
            episode.log_action({"a": see(stamp, t)}, {"a": t}, rewards={"a": 0.0 if t == 0 else t - 1.0})
        episode.end({"a": see(stamp, 9)}, rewards={"a": 3.0})
    rows = collecting.wait()["main"]
    assert rows.off_policy.all()
    assert rows.actions.tolist() == [0, 1, 2, 3] * 3
    assert rows.rewards.tolist() == [0, 1, 2, 3] * 3
    assert rows.actions_for_env.tolist() == rows.actions.tolist()


def test_logged_actions_before_the_first_request_of_a_recurrent_policy(envs: ExternalVectorEnv) -> None:
    def act(rows: Any) -> Any:
        state = rows["state_in"] + rows["obs"][:, 1:]
        return state[:, 0].astype(np.int64) % 5, {"state_out": state}

    chain = [RnnState(np.zeros(1))]
    collecting = Collecting(envs, FunctionPolicy(act), agent_connectors=chain).collect(episodes=1)
    episode = envs.gateway.begin(timeout=30)
    episode.log_action({"a": see(1, 1)}, {"a": 0})
    episode.log_action({"a": see(1, 2)}, {"a": 4})
    assert ask(episode, {"a": see(1, 4)}) == {"a": 2}  # (1 + 2 + 4) % 5
    episode.log_action({"a": see(1, 8)}, {"a": 3})
    episode.end({"a": see(1, 9)})
    rows = collecting.wait()["main"]
    assert rows.actions.tolist() == [0, 4, 2, 3]
    assert rows.off_policy.tolist() == [True, True, False, True]
    assert rows.state_in.ravel().tolist() == [0, 1, 3, 7]
    assert rows.state_out.ravel().tolist() == [1, 3, 7, 15]


def test_of_some_agents_actions_are_logged_and_others_are_asked(envs: ExternalVectorEnv) -> None:
    asked: list[int] = []

    def act(rows: Any) -> Any:
        asked.extend(rows["agent_index"].tolist())
        return np.full(len(rows), 4)

    collecting = Collecting(envs, FunctionPolicy(act)).collect(episodes=1)
    episode = envs.gateway.begin()
    assert ask(episode, {"a": see(1, 0), "b": see(1, 0)}, logged={"b": 3}) == {"a": 4, "b": 3}
    episode.end()
    rows = collecting.wait()["main"]
    assert (rows.actions.tolist(), rows.off_policy.tolist(), asked) == ([4, 3], [False, True], [0])


@pytest.mark.checklist(122)
def test_infos_are_told_once_and_are_copies(envs: ExternalVectorEnv) -> None:
    told: list[Any] = []
    info = {"hp": 3, "list": [1]}
    collecting = Collecting(envs, callbacks=[{"on_episode_step": lambda step: told.extend(step.infos)}])
    collecting.collect(episodes=1)
    episode = envs.gateway.begin()
    ask(episode, {"a": see(1, 0)})
    episode.log_returns({"a": 1}, {"a": info, "__common__": {"wind": 2}})
    info["list"].append(2)
    ask(episode, {"a": see(1, 1)})
    ask(episode, {"a": see(1, 2)})
    episode.end(infos={"a": {"won": True}})
    collecting.wait()
    assert told == [{"a": {"hp": 3, "list": [1]}, "__common__": {"wind": 2}}, {}, {"a": {"won": True}}]


@pytest.mark.checklist(123)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_episodes_that_are_not_for_training_are_in_no_batch(envs: ExternalVectorEnv, batch_mode: Any) -> None:
    collecting = Collecting(envs, batch_mode=batch_mode)
    collecting.collect(episodes=6)
    for stamp in range(6):
        play(envs.gateway.begin(timeout=30, training_enabled=stamp % 2 == 0), stamp=stamp)
    batch = collecting.wait()
    assert sorted(set(batch["main"].obs[:, 0].tolist())) == [0, 2, 4]
    assert len(batch["main"]) == 15
    assert (batch.env_steps, batch.agent_steps, collecting.collector.metrics.episodes_total) == (18, 30, 6)
    collecting.collect(episodes=1)  # which drops what the last batch had
    play(envs.gateway.begin(timeout=30), stamp=6)
    collecting.wait()
    assert collecting.collector._episodes.untrained == set(), "finished ids do not accumulate"


def test_a_batch_of_episodes_that_are_not_for_training_is_empty(envs: ExternalVectorEnv) -> None:
    collecting = Collecting(envs).collect(episodes=1)
    play(envs.gateway.begin(training_enabled=False))
    assert len(collecting.wait()) == 0


@pytest.mark.checklist(122)
def test_many_threads_with_many_episodes_lose_nothing() -> None:
    threads_num, each, length = 8, 12, 5
    with external.make(SPACES, num_envs=3, batch_wait=0.0) as envs:
        collecting = Collecting(envs).collect(episodes=threads_num * each)

        def work(k: int) -> None:
            for e in range(each):
                play(envs.gateway.begin(timeout=60), length=length, stamp=k * each + e)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(threads_num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = collecting.wait()["main"]
        a = rows.agent_index == 0
        wanted = sorted((float(s), float(t)) for s in range(threads_num * each) for t in range(length))
        assert sorted(map(tuple, rows.obs[a].tolist())) == wanted
        assert sorted(rows.obs[a & rows.terminated][:, 0].tolist()) == list(range(threads_num * each))
        assert (rows.next_obs[a & rows.terminated][:, 1] == 99).all()
        assert envs.gateway.episodes == ()
        assert all(not place.rows and place.running is None for place in envs._exchange.places)


@pytest.mark.parametrize("as_policy", [False, True])
def test_logged_actions_of_another_space_than_the_policys(as_policy: bool) -> None:
    """What an env was given is not what the policy would have said: nothing is taken for what it is not."""
    with external.make({"a": (OBS, Box(0, 10, (1,), np.float32))}) as envs:
        collecting = Collecting(envs, FunctionPolicy(lambda rows: rows["obs"][:, :1])).collect(episodes=1)
        episode = envs.gateway.begin()
        episode.log_action({"a": see(0, 0)}, {"a": [0.5]}, as_policy=as_policy)
        if as_policy:
            episode.end()
            assert collecting.wait()["main"].actions_for_env.tolist() == [[7.5]]
        else:
            error = collecting.wait()
            assert isinstance(error, ContractError)
            assert "action connectors give it another space" in str(error)


# --- what is wrong


def put(episode: ExternalEpisode, obs: Any, **more: Any) -> None:
    episode.ask(obs, answer=print, **more)


HERE = {"a": see(0, 0)}
WRONG: list[tuple[str, type[Exception], str, Callable[[ExternalEpisode], None]]] = [
    ("shape", ContractError, r"observation of agent 'a'.*\(2,\), got \(3,\)", lambda e: put(e, {"a": see(1, 2, 3)})),
    ("bounds", ContractError, r"agent 'a'.*in \[-1000.0, 1000.0\], got 2000.0", lambda e: put(e, {"a": see(0, 2000)})),
    ("NaN", ContractError, "agent 'b'.*nan", lambda e: put(e, {**HERE, "b": see(np.nan, 0)})),
    ("text", ContractError, "agent 'a'", lambda e: put(e, {"a": "no"})),
    ("object", ContractError, "agent 'a'", lambda e: put(e, {"a": np.array([None, 1])})),
    ("unknown agent", ArgumentError, "unknown agents 'c'; there are 'a', 'b'", lambda e: put(e, {"c": see(0, 0)})),
    ("no dict", ArgumentError, "expected a dict", lambda e: put(e, see(0, 0))),
    ("nobody", StateError, "obs is empty", lambda e: put(e, {})),
    ("action", ContractError, "action of agent 'a'.*5", lambda e: e.log_action(HERE, {"a": 5})),
    ("action of another", ArgumentError, "'b'", lambda e: e.log_action(HERE, {"a": 1, "b": 1})),
    ("no action", StateError, r"\['b'\].*no action", lambda e: e.log_action({**HERE, "b": see(0, 0)}, {"a": 1})),
    ("reward", ContractError, "agent 'a'.*finite number, got nan", lambda e: e.log_returns({"a": np.nan})),
    ("reward of two", ContractError, "finite number", lambda e: e.log_returns({"a": [1, 2]})),
    ("reward of nobody", ArgumentError, "unknown agents 'z'", lambda e: e.log_returns({"z": 1})),
    ("mask", ContractError, "mask of agent 'a'", lambda e: put(e, HERE, masks={"a": [1, 1]})),
    ("empty mask", ContractError, "at least one allowed action", lambda e: put(e, HERE, masks={"a": [0] * 5})),
    ("mask of another", ArgumentError, "'b'", lambda e: put(e, HERE, masks={"b": [1] * 5})),
    (
        "mask in an info",
        ArgumentError,
        r"infos of 'a': expected no 'action_mask'.*masks=\{'a'",
        lambda e: put(e, HERE, infos={"a": {"action_mask": [1] * 5}}),
    ),
    ("info", ContractError, "info of agent 'a'", lambda e: e.log_returns({}, {"a": 3})),  # type: ignore[dict-item]
    ("our words", ArgumentError, "is reserved", lambda e: e.log_returns({}, {"a": {"off_policy_action": 9}})),
    ("no end", ArgumentError, "terminated or truncated", lambda e: e.end_agents({"a": None}, terminated=False)),
    ("end of nobody", ArgumentError, "unknown agents 'z'", lambda e: e.end({"z": see(0, 0)})),
    ("final", ContractError, "observation of agent 'b'", lambda e: e.end({"b": see(0)})),
    ("flag", ArgumentError, "expected bools", lambda e: e.end({"a": None}, truncated={"a": 1})),
]


@pytest.mark.fault("G8")
@pytest.mark.parametrize(("kind", "expected", "says", "do"), WRONG, ids=[case[0] for case in WRONG])
def test_what_is_wrong_raises_where_it_is_said_and_changes_nothing(
    envs: ExternalVectorEnv, kind: str, expected: type[Exception], says: str, do: Callable[[ExternalEpisode], None]
) -> None:
    collecting = Collecting(envs).collect(episodes=2)
    episode, other = envs.gateway.begin(), envs.gateway.begin()
    ask(episode, {"a": see(1, 0), "b": see(1, 0)}, rewards={"a": 1})
    refused(expected, f"(?s)episode {episode.id} in slot 0.*{says}", do, episode)
    episode.log_returns({"a": 1})
    assert ask(episode, {"a": see(1, 1)}) == {"a": 1}
    episode.end(rewards={"a": 1})
    play(other, stamp=4)
    rows = collecting.wait()["main"]
    mine = rows.obs[:, 0] == 1
    assert rows.obs[mine].tolist() == [[1, 0], [1, 1], [1, 0]]
    assert rows.rewards[mine].tolist() == [2, 1, 0], "what was said before the first row goes to the first transition"
    assert mine.sum() == 3
    assert len(rows) == 8


@pytest.mark.fault("G8")
def test_calls_at_the_wrong_time(envs: ExternalVectorEnv) -> None:
    episode = envs.gateway.begin()
    refused(StateError, "no agent has acted yet", episode.end_agents, {"a": None})
    episode.ask({"a": see(0, 0)}, answer=print)
    for call in (lambda: episode.ask({"a": see(0, 0)}, answer=print), lambda: episode.end_agents({"a": None})):
        refused(BusyError, "has not come", call)
    episode.end()
    for call in (lambda: episode.ask({"a": see(0, 0)}, answer=print), episode.end, lambda: episode.log_returns({})):
        refused(EpisodeOver, f"episode {episode.id} has ended", call)
    episode.abandon(RuntimeError())  # nothing is left to abandon
    assert envs.faults == ()


def test_masks_are_taken_from_observations_and_from_beside_them() -> None:
    spaces = {"a": (Dict(observation=OBS, action_mask=Box(0, 1, (5,), np.int8)), Discrete(5)), "b": (OBS, Discrete(5))}
    mask = np.array([0, 0, 1, 0, 0], np.int8)
    with external.make(spaces) as envs:

        def act(rows: Any) -> Any:
            return np.argmax(rows["action_mask"], axis=1)

        policies = {"p": FunctionPolicy(act), "q": FunctionPolicy(act)}
        collecting = Collecting(envs, policies, {"a": "p", "b": "q"})
        collecting.collect(episodes=1)
        episode = envs.gateway.begin()
        seen = {"a": {"observation": see(1, 1), "action_mask": mask}, "b": see(1, 1)}
        assert ask(episode, seen, masks={"b": [False, True, True, True, True]}) == {"a": 2, "b": 1}
        refused(ContractError, "expected an action mask with it", episode.ask, {"a": see(1, 1)}, answer=print)
        assert ask(episode, {"a": see(1, 1)}, masks={"a": mask[::-1]}) == {"a": 2}
        episode.end({"a": {"observation": see(1, 1), "action_mask": mask * 0}})
        batch = collecting.wait()
        assert batch["p"].action_mask.tolist() == [mask.tolist(), mask[::-1].tolist()]
        assert batch["q"].action_mask.tolist() == [[False, True, True, True, True]]


# --- slots


def test_no_more_episodes_than_slots(envs: ExternalVectorEnv) -> None:
    freed: list[int] = []
    one, _ = envs.gateway.begin(), envs.gateway.begin()
    refused(EpisodesFull, "2 episodes run, as many as can", envs.gateway.begin, on_free=lambda: freed.append(1))
    refused(EpisodesFull, "slot 1 is taken", envs.gateway.begin, env_id=1, timeout=0.01)
    refused(ArgumentError, "slots are 0 to 1", envs.gateway.begin, env_id=2)
    threading.Timer(0.05, one.end).start()
    assert envs.gateway.begin(timeout=30).env_id == 0
    assert freed == [1]


@pytest.mark.fault("G9")
def test_who_only_begins_and_logs_meets_a_bound(envs: ExternalVectorEnv) -> None:
    """Nobody collects: nothing grows without end."""
    for _ in range(200):
        try:
            episode = envs.gateway.begin(env_id=0)
            for _ in range(100):
                episode.log_action({"a": see(0, 0)}, {"a": 0})
        except BusyError:
            refused(AnswerTimeout, "is a collector collecting", episode.wait_for_room, 0.001)
            episode.end()
    assert len(envs._exchange.places[0].rows) <= 2 * 64


def test_an_episode_in_which_nobody_acted_leaves_no_trace(envs: ExternalVectorEnv) -> None:
    collecting = Collecting(envs).collect(episodes=1)
    for _ in range(3):
        envs.gateway.begin(env_id=0).end()
        envs.gateway.begin(env_id=0).abandon(RuntimeError("gone"))
    play(envs.gateway.begin(env_id=0))
    assert collecting.wait().env_steps == 3
    assert envs.faults == ()


# --- what goes wrong


@pytest.mark.parametrize("moment", ["first asked", "answered", "asked", "logged ahead"])
def test_an_abandoned_episode_is_a_fault_of_its_own(
    envs: ExternalVectorEnv, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[Any] = []
    collecting = Collecting(envs, callbacks=[{"on_episode_lost": lambda episode, why: lost.append(why)}])
    collecting.collect(episodes=3)
    play(envs.gateway.begin(), stamp=1)
    bad, good = envs.gateway.begin(timeout=5), envs.gateway.begin(timeout=5)
    if moment != "first asked":
        ask(bad, {"a": see(3, 0), "b": see(3, 0)})
        bad.log_returns({"a": 100})
    if moment == "logged ahead":
        for _ in range(10):
            bad.log_action({"a": see(3, 1)}, {"a": 0})
    elif moment != "answered":
        ask(bad, {"a": see(3, 0)})
    with caplog.at_level(logging.WARNING, "marlvec"):
        bad.abandon(ConnectionError("the line is dead"))
        bad.abandon(ConnectionError("twice"))
        play(good, stamp=4)
        play(envs.gateway.begin(timeout=5, env_id=bad.env_id), stamp=2)
        batch = collecting.wait()
    assert sorted(set(batch["main"].obs[:, 0].tolist())) == [1, 2, 4]
    assert collecting.collector.metrics.episodes_faulty == len(lost) == len(envs.faults) == 1
    assert [fault.summary for fault in envs.faults] == ["ConnectionError: the line is dead"]
    assert [record.message for record in caplog.records] == [
        f"env {bad.env_id} is without its episode: ConnectionError: the line is dead"
    ]
    refused(EpisodeOver, "abandoned.*the line is dead", bad.log_returns, {})


def test_a_callback_that_raises_costs_its_own_episode(envs: ExternalVectorEnv) -> None:
    collecting = Collecting(envs).collect(episodes=1)
    episode = envs.gateway.begin()

    def broken(actions: Any) -> None:
        raise ValueError("of no use")

    episode.ask({"a": see(1, 0)}, answer=broken)
    play(envs.gateway.begin(), stamp=2)
    assert collecting.wait()["main"].obs[:, 0].tolist() == [2] * 5
    assert [fault.summary for fault in envs.faults] == ["ValueError: of no use"]


def test_callbacks_that_fail_are_nobody_elses_affair(envs: ExternalVectorEnv, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("of no use")

    collecting = Collecting(envs).collect(episodes=1)
    dropped = envs.gateway.begin(on_lost=broken)
    ask(dropped, {"a": see(3, 0)})
    other = envs.gateway.begin()
    refused(EpisodesFull, "", envs.gateway.begin, on_free=broken)
    play(other, stamp=1)
    collecting.wait()
    collecting.collector.reset()
    collecting.collect(episodes=1)
    play(envs.gateway.begin(), stamp=2)
    assert len(collecting.wait()["main"]) == 5
    assert [record.message for record in caplog.records] == ["a callback of an external episode has failed"] * 2


def test_what_the_collector_drops_is_told(envs: ExternalVectorEnv) -> None:
    """It begins anew: running episodes are lost, and who waits for an answer hears of it."""
    told: list[Exception] = []
    collecting = Collecting(envs).collect(episodes=1)
    running = envs.gateway.begin(on_lost=told.append)
    ask(running, {"a": see(3, 0)})
    waiting = envs.gateway.begin(on_lost=told.append)
    play_on = threading.Thread(target=lambda: ask(waiting, {"a": see(3, 0)}))
    play_on.start()
    play_on.join()
    waiting.end()
    collecting.wait()
    collecting.collector.reset()
    assert [type(error) for error in told] == [EpisodeCut]
    assert "the collector" in str(told[0])
    refused(EpisodeOver, "", running.ask, {"a": see(3, 1)}, answer=print)
    collecting.collect(episodes=2)
    play(envs.gateway.begin(), stamp=1)
    play(envs.gateway.begin(timeout=5), stamp=2)
    assert sorted(set(collecting.wait()["main"].obs[:, 0].tolist())) == [1, 2]


@pytest.mark.slow("many clients and connections")
def test_close_tells_everybody(envs: ExternalVectorEnv) -> None:
    told: list[Exception] = []
    episode = envs.gateway.begin(on_lost=told.append)
    episode.ask({"a": see(0, 0)}, answer=print)
    envs.gateway.begin()
    waiting = threading.Thread(target=lambda: told.append(_error(lambda: envs.gateway.begin(timeout=None))))
    waiting.start()
    collecting = Collecting(external.make(SPACES)).collect(episodes=1)
    envs.close()
    collecting.collector.envs.close()
    waiting.join(10)
    assert [type(error) for error in told] == [ClosedError] * 2
    assert isinstance(collecting.wait(), ClosedError)
    for call in (envs.gateway.begin, episode.end, lambda: episode.log_returns({})):
        refused(ClosedError, "", call)


def _error(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it went well")


# --- as a vectorizer


def test_it_is_a_vectorizer_like_others() -> None:
    with external.make(SPACES, num_envs=2, lockstep=True) as envs:
        refused(ArgumentError, "episodes begin outside", envs.reset, options={"a": 1})
        answers: list[Any] = []
        envs.reset_send(seed=3)
        one, two = envs.gateway.begin(), envs.gateway.begin()
        one.ask({"a": see(1, 0), "b": see(1, 1)}, answer=answers.append)
        refused(FetchTimeout, r"\[0, 1\]|\[1\]", envs.reset_fetch, timeout=0.01)
        two.ask({"b": see(2, 1)}, answer=answers.append)
        obs, infos = envs.reset_fetch(timeout=5)
        assert obs.tolist() == [[[1, 0], [1, 1]], [[0, 0], [2, 1]]]
        assert infos["acting"].tolist() == infos["alive"].tolist() == [[True, True], [False, True]]
        envs.step_send(np.array([[1, 2], [3, 4]]))
        assert answers == [{"a": 1, "b": 2}, {"b": 4}]
        one.end({"a": see(1, 9), "b": see(1, 8)}, truncated=True, rewards={"a": 1, "b": 2})
        two.ask({"a": see(2, 2)}, rewards={"a": 5}, answer=answers.append)
        _, rewards, terminated, truncated, infos = envs.step_fetch(timeout=5)
        assert rewards.tolist() == [[1, 2], [5, 0]]
        assert truncated.tolist() == [[True, True], [False, False]]
        assert not terminated.any()
        assert infos["final_observation"][0].tolist() == [[1, 9], [1, 8]]
        assert infos["acting"].tolist() == [[False, False], [True, False]]
        envs.async_reset(env_ids=[0])
        result = envs.drain()
        assert (result.env_ids.tolist(), result.alive.any(), result.fault.tolist()) == ([0], False, [False])
        envs.send(np.array([[1, 2]]), [1])
        result = envs.drain()
        assert (result.env_ids.tolist(), result.done.tolist(), result.fault.tolist()) == ([1], [True], [True])
        refused(EpisodeOver, "", two.end)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_wait": -1.0}, "batch_wait"),
        ({"max_backlog": 0}, "max_backlog"),
        ({"validate": "perhaps"}, "validate"),
        ({"colour": 1}, "colour"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    refused(ArgumentError, says, external.make, SPACES, **arguments)


@pytest.mark.parametrize("spaces", [{}, {"a": OBS}, {"a": (OBS,)}, {3: (OBS, OBS)}])
def test_wrong_spaces_are_refused(spaces: Any) -> None:
    refused(ArgumentError, "expected", external.make, spaces)


def test_rows_are_answered_together() -> None:
    """All who ask within the time that it waits are in one call of the policy, and no more than are allowed."""
    sizes: list[int] = []

    def act(rows: Any) -> Any:
        sizes.append(len(rows))
        return np.zeros(len(rows), int)

    spaces = {"a": (OBS, Discrete(5))}
    with external.make(spaces, num_envs=6, batch_size=4, batch_wait=0.2) as envs:
        collecting = Collecting(envs, FunctionPolicy(act))
        episodes = [envs.gateway.begin() for _ in range(6)]
        boxes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for episode in episodes:
            episode.ask({"a": see(0, 0)}, answer=boxes.put)
        collecting.collect(episodes=6)
        for _ in episodes:
            boxes.get(timeout=30)
        for episode in episodes:
            episode.end()
        collecting.wait()
    assert sizes == [4, 2]


# --- Whatever is called, in whatever order: what a batch holds is what was said, and every wrong call is refused


AGENTS = ("a", "b", "c")
NUMBERED = Box(-1, 10_000, (3,), np.float32)  # episode, agent, time
SLOTS = 2
FINAL, MISSING, MOST = 9_000, -1, 1_000

WHO = st.frozensets(st.sampled_from(AGENTS), min_size=1)
ACT = st.tuples(st.sampled_from(["ask", "log", "log"]), WHO)
PAY = st.tuples(st.just("pay"), WHO, st.integers(-3, 3))
END = st.tuples(st.sampled_from(["end_agents", "end"]), st.frozensets(st.sampled_from(AGENTS)), st.booleans())
OTHER = st.tuples(st.sampled_from(["abandon", "wrong", "begin"]))
SLOT = st.integers(0, SLOTS)
# A handful of plain steps, then one that may end something; a new episode begins where none runs.
ROUNDS = st.lists(
    st.tuples(
        st.lists(st.tuples(SLOT, st.one_of(ACT, ACT, PAY)), min_size=2, max_size=10), SLOT, st.one_of(END, OTHER)
    ),
    min_size=2,
    max_size=5,
)
ORDERS = ROUNDS.map(lambda rounds: [call for steps, k, last in rounds for call in (*steps, (k, last))])


class Told:
    """One episode, and what a batch must hold of it.

    Args:
        number: Its number.
        episode: The episode.
    """

    def __init__(self, number: int, episode: ExternalEpisode) -> None:
        self.number, self.episode = number, episode
        self.t = 0
        self.gone: set[str] = set()
        self.alive: set[str] = set()
        self.owed = Counter[str]()
        self.open: dict[str, tuple[Any, ...]] = {}
        self.ending: dict[str, tuple[int, bool, bool]] = {}  # until the next row
        self.rows: list[tuple[Any, ...]] = []

    def obs(self, who: Any, t: int) -> dict[str, list[int]]:
        return {agent: [self.number, AGENTS.index(agent), t] for agent in who}

    def act(self, who: Any, *, logged: bool) -> None:
        self.flush()
        for agent in who:
            if agent in self.open:
                self.close(agent, self.t, False, False)
            self.open[agent] = (self.number, AGENTS.index(agent), self.t, (self.t + logged) % 5, logged)
        self.alive |= who
        self.t += 1

    def close(self, agent: str, t: int, terminated: bool, truncated: bool) -> None:
        self.rows.append((*self.open.pop(agent), self.owed.pop(agent, 0), t, terminated, truncated))

    def end(self, who: Any, final: Any, truncated: bool) -> None:
        for agent in who:
            self.ending[agent] = (FINAL if agent in final else MISSING, not truncated, truncated)
        self.gone |= who
        self.alive -= who

    def flush(self) -> None:
        for agent, how in self.ending.items():
            if agent in self.open:
                self.close(agent, *how)
        self.ending.clear()


def call(told: Told, kind: str, *what: Any) -> bool:
    """Make one call, and note what it means; whether the episode is over. Raises what the episode raises."""
    episode = told.episode
    if kind == "ask":
        (who,) = what
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        t = told.t
        episode.ask(told.obs(who, t), answer=box.put)
        assert box.get(timeout=20) == dict.fromkeys(who, t % 5)
        told.act(who, logged=False)
    elif kind == "log":
        (who,) = what
        episode.wait_for_room(20)
        episode.log_action(told.obs(who, told.t), dict.fromkeys(who, (told.t + 1) % 5))
        told.act(who, logged=True)
    elif kind == "pay":
        who, amount = what
        episode.log_returns(dict.fromkeys(who, amount))
        for agent in who:
            told.owed[agent] += amount
    elif kind == "end_agents":
        who, truncated = what
        episode.end_agents(told.obs(who, FINAL), truncated=truncated)
        told.end(who, who, truncated)
    elif kind == "end":
        final, truncated = what
        episode.end(told.obs(final, FINAL), truncated=truncated)
        told.end(told.alive | final, final, truncated)
        told.flush()
        return True
    elif kind == "abandon":
        episode.abandon(RuntimeError("on purpose"))
        told.rows.clear()
        return True
    else:
        episode.ask({"a": [0, 0]}, answer=print)
    return False


def is_refused(told: Told, kind: str, who: Any) -> bool:
    """Whether such a call has to be refused."""
    if kind == "wrong" or (kind in ("ask", "log") and not who):
        return True
    if kind in ("end_agents", "end") and who and not told.t:
        return True
    return kind != "abandon" and bool(who & told.gone - (told.ending.keys() if kind == "pay" else set()))


def carry_out(order: Any, gateway: EpisodeGateway) -> tuple[list[Told], int]:
    """Make these calls, then end what runs. Episodes, and how many of them a collector has to meet."""
    running: dict[int, Told] = {}
    every: list[Told] = []
    ended = 0
    for k, (kind, *what) in [*order, *((k, ("end", frozenset(), True)) for k in range(SLOTS + 1))]:
        told = running.get(k)
        if told is None and k in range(SLOTS + 1) and len(every) < MOST:
            try:
                told = running[k] = Told(len(every), gateway.begin())
            except EpisodesFull:
                assert len(running) == SLOTS
            else:
                every.append(told)
        if told is not None and kind != "begin":
            rejected = is_refused(told, kind, what[0] if what else None)
            try:
                over = call(told, kind, *what)
            except MarlvecError:
                assert rejected, (kind, what)
                continue
            assert not rejected, (kind, what)
            if over:
                del running[k]
                ended += kind == "end" and told.t > 0
    return every, ended


@pytest.mark.slow("many clients and connections")
@settings(max_examples=50, deadline=None)
@given(ORDERS)
def test_what_was_said_is_what_a_batch_holds(order: Any) -> None:
    policy = FunctionPolicy(lambda rows: rows["obs"][:, 2].astype(int) % 5)
    found: list[tuple[Any, ...]] = []
    wanted: list[float] = [float("inf")]
    met = 0
    with external.make(dict.fromkeys(AGENTS, (NUMBERED, Discrete(5))), num_envs=SLOTS, batch_wait=0.0) as envs:
        collector = Collector(envs, policy, batch_mode="complete", seed=0)

        def collect() -> None:
            nonlocal met
            with suppress(MarlvecError):  # closed, because the test has failed
                while met < wanted[0]:
                    found.extend(rows_of(collector.collect(episodes=1)))
                    met += 1

        thread = threading.Thread(target=collect)
        thread.start()
        every, ended = carry_out(order, envs.gateway)
        wanted[0] = ended + 1
        last = Told(len(every), envs.gateway.begin(timeout=20))  # it wakes the collector up
        call(last, "log", frozenset("a"))
        call(last, "end", frozenset(), False)
        thread.join(20)
        assert not thread.is_alive(), f"{met} of {ended + 1} episodes have arrived"
        assert envs.gateway.episodes == ()
    assert Counter(found) == Counter(row for told in [*every, last] for row in told.rows)


def rows_of(batch: Any) -> list[tuple[Any, ...]]:
    if "main" not in batch:
        return []
    rows = batch["main"]
    following = np.where(rows.next_obs_missing, MISSING, rows.next_obs[:, 2])
    logged = rows["off_policy"] if "off_policy" in rows else np.zeros(len(rows), np.bool_)
    columns = (*rows.obs.T, rows.actions, logged, rows.rewards, following, rows.terminated, rows.truncated)
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]
