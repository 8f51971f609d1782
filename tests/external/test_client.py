"""A client does over a socket what `ExternalEnv` does in a thread; and the batches are those of envs inside."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import marlvec
from marlvec import external
from marlvec.connectors import FlattenObs, NormalizeObs
from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    ClosedError,
    ConnectionLost,
    ContractError,
    EpisodeOver,
    EpisodesFull,
    ProtocolError,
    RefusedError,
    StateError,
)
from marlvec.external import Client, Limits, LocalInference, Server
from marlvec.external.client_episodes import LocalActor
from marlvec.external.handshake import ServerHandshake, Welcome
from marlvec.external.messages import Message, Type
from marlvec.policies import FunctionPolicy, Policy
from tests.external.served import expected, obs_of, served
from tests.external.test_thread import CASES, NUM_ENVS, SEED, assert_same, collector_of_kind, factory
from tests.vector.support.reference import refused
from tests.waiting import LONG, until

ROOT = Path(__file__).resolve().parents[2]


def both(number: int) -> dict[str, Any]:
    return {"a": obs_of(number), "b": obs_of(number)}


def answer(number: int) -> dict[str, int]:
    return {"a": expected(obs_of(number)), "b": expected(obs_of(number))}


# --- the same batches


def drive(kind: str, url: str, i: int, seed: int) -> None:
    env = factory(kind, i)
    try:
        with Client(url, timeout=60, reconnect_timeout=20) as client:
            first = seed
            while True:
                CASES[kind][1](client, env, i, first)
                first = None
    except (ConnectionLost, EpisodeOver, ClosedError, RefusedError):
        pass  # the collector has enough
    finally:
        env.close()


@pytest.mark.checklist(124)
@pytest.mark.parametrize("kind", ["connect_four", "leaving early"])
def test_in_rounds_batches_are_the_same_bit_for_bit(kind: str) -> None:
    inside = [partial(factory, kind, i) for i in range(NUM_ENVS)]
    with ExitStack() as stack:
        envs = stack.enter_context(marlvec.make(inside, backend="sync"))
        others = stack.enter_context(external.make(partial(factory, kind, 0), NUM_ENVS, lockstep=True))
        server = stack.enter_context(Server(others))
        threads = [
            threading.Thread(target=drive, args=(kind, server.url, i, seed))
            for i, seed in enumerate(marlvec.env_seeds(SEED, NUM_ENVS))
        ]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(server.close)
        one, other = collector_of_kind(envs, kind), collector_of_kind(others, kind)
        for amount in (70, 41):
            assert_same(one.collect(amount), other.collect(amount))
        assert other.metrics.episodes_total > 2


@pytest.mark.slow("many clients and connections")
@pytest.mark.checklist(124)
def test_four_processes_give_the_batches_of_four_envs_inside() -> None:
    kind, num = "simple_tag", 4
    with ExitStack() as stack:
        envs = stack.enter_context(marlvec.make([partial(factory, kind, i) for i in range(num)], backend="sync"))
        others = stack.enter_context(external.make(partial(factory, kind, 0), num, lockstep=True))
        server = stack.enter_context(Server(others))
        for i, seed in enumerate(marlvec.env_seeds(SEED, num)):
            code = f"from tests.external.test_client import drive; drive({kind!r}, {server.url!r}, {i}, {seed})"
            process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
            stack.callback(process.wait)
        stack.callback(server.close)
        one, other = collector_of_kind(envs, kind), collector_of_kind(others, kind)
        for amount in (100, 60):
            assert_same(one.collect(amount), other.collect(amount))
        assert server.counters.sessions == num
        assert other.metrics.episodes_total > 8


# --- the calls


@pytest.mark.checklist(124)
def test_several_clients_with_several_episodes_each() -> None:
    with served(6) as there, Client(there.url, timeout=10) as one, Client(there.url, timeout=10) as other:
        assert one.agents == ("a", "b")
        assert one.observation_space("a") == spaces.Box(-1000, 1000, (3,))
        assert one.action_space("b") == spaces.Discrete(50)
        episodes = [(client, client.start_episode()) for client in (one, other) for _ in range(3)]
        for t in range(5):
            for k, (client, episode) in enumerate(episodes):
                assert client.get_action(episode, both(10 * k + t)) == answer(10 * k + t)
                client.log_returns(episode, {"a": 1.0})
        assert len(there.envs.gateway.episodes) == 6
        assert "3 episodes" in repr(one)
        for client, episode in episodes:
            client.end_episode(episode, both(99), truncated=True)
        until(lambda: not there.envs.gateway.episodes)
        refused(EpisodeOver, "has ended", one.get_action, episodes[0][1], both(1))


@pytest.mark.slow("many clients and connections")
def test_two_hundred_clients_at_a_time() -> None:
    """More than slots: each waits for its turn, and gets the answers to its own questions."""
    wrong: list[int] = []
    done: list[int] = []

    def play(url: str, k: int) -> None:
        with Client(url, timeout=LONG) as client:
            for _ in range(2):
                episode = client.start_episode()
                wrong.extend(n for n in range(k, k + 5) if client.get_action(episode, both(n)) != answer(n))
                client.end_episode(episode, both(0))
            done.append(k)

    with served(16) as there:
        threads = [threading.Thread(target=play, args=(there.url, k)) for k in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(done) == list(range(200))
    assert not wrong


def test_rewards_and_infos_travel_with_the_next_row() -> None:
    with served(1, collect=False) as there, Client(there.url, timeout=10) as client:
        seen: list[Any] = []

        def collect() -> None:
            there.envs.reset_send()
            there.envs.reset_fetch()
            there.envs.send(np.zeros((1, 2), np.int64))
            seen.append(there.envs.recv())
            there.envs.send(np.zeros((1, 2), np.int64))
            seen.append(there.envs.recv())

        thread = threading.Thread(target=collect)
        thread.start()
        episode = client.start_episode("mine")
        assert episode == "mine"
        client.get_action(episode, both(1))
        client.log_returns(episode, {"a": 1.5}, {"a": {"x": np.float32(2), "y": np.arange(3), "z": "text"}, "b": {}})
        client.log_returns(episode, {"a": 1.0, "b": -1})
        client.get_action(episode, both(2))
        client.log_returns(episode, {"b": 4})
        client.end_agents(episode, {"b": obs_of(7)}, truncated=True)
        client.end_episode(episode, {"a": obs_of(8)})
        thread.join()
        step, last = seen
        assert step.rewards.tolist() == [[2.5, -1.0]]
        assert step.infos["x"][0].tolist() == [2.0, 0.0]
        assert step.infos["y"][0, 0].tolist() == [0, 1, 2]
        assert step.infos["z"][0, 0] == "text"
        assert "x" not in last.infos
        assert last.rewards.tolist() == [[0.0, 4.0]]
        assert (last.terminated.tolist(), last.truncated.tolist()) == ([[True, False]], [[False, True]])
        final = last.infos["final_observation"][0]
        assert np.array_equal(final, [obs_of(8), obs_of(7)])


def test_one_agent_needs_no_dicts() -> None:
    alone = {"a": (spaces.Box(-1000, 1000, (3,)), spaces.Discrete(50))}
    with served(2, spaces=alone) as there, Client(there.url, timeout=10) as client:
        episode = client.start_episode()
        assert client.get_action(episode, obs_of(3)) == expected(obs_of(3))
        client.log_returns(episode, 1.0, {"why": "x"})
        client.log_action(episode, obs_of(4), 2)
        client.end_episode(episode, obs_of(5))
        with Client(there.url, timeout=10, dicts=True) as other:
            assert other.get_action(other.start_episode(), {"a": obs_of(3)}) == {"a": expected(obs_of(3))}


def test_logged_actions_are_rows_off_policy() -> None:
    with served(1) as there, Client(there.url, timeout=10) as client:
        episode = client.start_episode()
        for t in range(200):  # more than wait in one place: the collector keeps up, or the client is slowed down
            client.log_action(episode, both(t), {"a": t % 50, "b": 1})
            client.log_returns(episode, {"a": t})
        client.end_episode(episode, both(0))
        rows = there.rows
        until(lambda: sum(bool(batch.truncated.any() or batch.terminated.any()) for batch in rows))
        assert all(batch["off_policy"].all() for batch in rows if "off_policy" in batch)
        assert any("off_policy" in batch for batch in rows)


def test_what_a_client_sees_wrong_itself_is_never_sent() -> None:
    with served(2) as there, Client(there.url, timeout=10) as client:
        episode = client.start_episode()
        before = there.server.counters.messages
        for error, what, call in (
            (
                ContractError,
                "agent 'b': .*expected float32",
                lambda: client.get_action(episode, {"a": obs_of(1), "b": 1}),
            ),
            (ArgumentError, "unknown agents", lambda: client.get_action(episode, {"c": obs_of(1)})),
            (ArgumentError, "expected a dict", lambda: client.get_action(episode, obs_of(1))),
            (ArgumentError, "expected actions of", lambda: client.log_action(episode, both(1), {"a": 1})),
            (ContractError, "finite number", lambda: client.log_returns(episode, {"a": float("nan")})),
            (ContractError, "finite number", lambda: client.log_returns(episode, {"a": "x"})),
            (ContractError, "does not go over", lambda: client.log_returns(episode, {}, {"a": {"x": object()}})),
            (ContractError, "are texts", lambda: client.log_returns(episode, {}, {"a": {1: 1}})),
            (ArgumentError, "expected a dict", lambda: client.log_returns(episode, {}, {"a": 1})),
            (ArgumentError, "terminated or truncated", lambda: client.end_agents(episode, both(1), terminated=False)),
            (ArgumentError, "who do not end", lambda: client.end_agents(episode, {"a": None}, truncated={"b": True})),
            (StateError, "nothing was asked", lambda: client.wait_for_action(episode)),
            (StateError, "with this id runs", lambda: client.start_episode(episode)),
            (EpisodeOver, "no episode 'other' runs", lambda: client.get_action("other", both(1))),
            (StateError, "the server decides", client.update_weights),
        ):
            refused(error, what, call)
        assert there.server.counters.messages == before
        assert client.get_action(episode, both(1)) == answer(1)


@pytest.mark.fault("G8")
def test_what_the_server_refuses_is_told_and_changes_nothing() -> None:
    with served(2) as there, Client(there.url, timeout=10) as client:
        episode = client.start_episode()
        with pytest.raises(ContractError, match="agent 'a'"):
            client.get_action(episode, {"a": obs_of(2000), "b": obs_of(1)})  # out of bounds
        assert client.get_action(episode, both(1)) == answer(1)
        client.log_action(episode, both(2), {"a": 77, "b": 1})  # no such action; told with the next call
        with pytest.raises(ContractError, match="action of agent 'a'"):
            for _ in range(1000):
                client.get_action(episode, both(3))
        client.end_agents(episode, {"a": obs_of(4)})
        refused(StateError, "have ended already", client.get_action, episode, both(5))
        client.get_action(episode, {"b": obs_of(5)})
        client.end_episode(episode)


def test_timeouts_are_the_clients_own_and_answers_are_kept() -> None:
    with served(1, collect=False) as there, Client(there.url, timeout=0.05) as client:
        episode = client.start_episode(timeout=LONG)
        refused(EpisodesFull, r"no slot was free within 0.05 s", client.start_episode)
        with pytest.raises(AnswerTimeout, match=r"no action within 0.05 s; is a collector collecting\?"):
            client.get_action(episode, both(1))
        refused(StateError, "waits for an answer already", client.get_action, episode, both(1))
        thread = threading.Thread(target=there.collect)
        thread.start()
        try:
            assert client.wait_for_action(episode, timeout=LONG) == answer(1)
            client.timeout = LONG
            client.end_episode(episode)
            assert client.get_action(client.start_episode(), both(2)) == answer(2)
        finally:
            there.stop(thread)


def test_an_episode_may_end_while_it_waits() -> None:
    with served(1, collect=False) as there, Client(there.url, timeout=10) as client:
        episode = client.start_episode()
        refused(AnswerTimeout, "", client.get_action, episode, both(1), timeout=0.01)
        client.log_returns(episode, {"a": 1})
        client.end_episode(episode, both(2), truncated=True)
        assert there.envs.gateway.episodes == ()
        assert not there.envs.faults


def test_masks_in_the_observation_and_beside_it() -> None:
    space = spaces.Dict(observation=spaces.Box(0, 9, (1,)), action_mask=spaces.MultiBinary(3))

    class Least(Policy):
        def act(self, rows: Any, *, explore: bool = True) -> Any:
            return rows["action_mask"].argmax(axis=1)

    with (
        ThreadPoolExecutor(1) as threads,
        external.make({"a": (space, spaces.Discrete(3))}, 1) as envs,
        Server(envs) as server,
    ):
        collecting = threads.submit(marlvec.Collector(envs, Least()).collect, env_steps=2)
        with Client(server.url, timeout=10) as client:
            assert client.observation_space("a") == spaces.Box(0, 9, (1,))
            episode = client.start_episode()
            one = np.ones(1, np.float32)
            assert client.get_action(episode, {"observation": one, "action_mask": np.array([0, 1, 1], np.int8)}) == 1
            assert client.get_action(episode, one, masks=[False, False, True]) == 2
            refused(ContractError, "expected an action mask", client.get_action, episode, one)
            client.end_episode(episode, one)
        assert collecting.result().env_steps == 2


def test_who_is_not_there_and_who_closes() -> None:
    refused(ConnectionLost, "no server answers", Client, "ws://127.0.0.1:1/", reconnect_timeout=0.1)
    for url in ("http://127.0.0.1:1/", "127.0.0.1:80", "wss://127.0.0.1:1/", ""):
        refused(ArgumentError, "url|TLS", Client, url)
    refused(ArgumentError, "reconnect_timeout", Client, "ws://127.0.0.1:1/", reconnect_timeout=0)
    with served(2) as there:
        client = Client(there.url, timeout=5)
        episode = client.start_episode()
        client.get_action(episode, both(1))
        client.close()
        client.close()
        assert client.closed
        for call in (client.start_episode, lambda: client.get_action(episode, both(1))):
            refused((ClosedError, EpisodeOver), "", call)
        until(lambda: not there.envs.gateway.episodes)
        assert there.server.clients == 0
        assert "closed" in repr(client)


def test_a_server_that_closes_says_so() -> None:
    with served(2, collect=False) as there, Client(there.url, timeout=5, reconnect_timeout=0.2) as client:
        episode = client.start_episode()
        there.server.close()
        there.server.close()
        assert there.server.closed
        assert "closed" in repr(there.server)
        refused(ConnectionLost, "", client.get_action, episode, both(1))
        assert there.envs.gateway.episodes == ()
        assert len(there.envs.faults) == 0 or there.envs.faults[-1].summary.startswith("ConnectionLost")


# --- deciding here


class Counting(Policy):
    """Does what its one number says."""

    def __init__(self, number: int = 0) -> None:
        self.number = np.array(number)
        self.asked = 0

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        self.asked += len(rows)
        first = rows["obs"][:, 0].astype(np.int64)
        return (first + self.number) % 50, {"logp": np.zeros(len(rows))}

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]


@pytest.mark.checklist(124)
def test_weights_come_in_numbered_versions_and_the_client_decides() -> None:
    there_policy, here_policy = Counting(3), Counting()
    with ThreadPoolExecutor(1) as threads, external.make(served_spaces(), 2) as envs, Server(envs) as server:
        assert server.publish(there_policy) == 1
        collecting = threads.submit(marlvec.Collector(envs, there_policy, agent_connectors=[]).collect, env_steps=20)
        with Client(server.url, timeout=10, local=LocalInference(policies=here_policy, agent_connectors=[])) as client:
            episode = client.start_episode()
            assert client.weights_version == 1
            said = []
            for t in range(20):
                if t == 10:
                    there_policy.number = np.array(40)
                    assert server.publish(there_policy, version=7) == 7
                    assert client.update_weights() == 7
                    assert client.update_weights() == 7
                actions = client.get_action(episode, both(t))
                assert actions == {"a": (t + (3 if t < 10 else 40)) % 50, "b": (t + (3 if t < 10 else 40)) % 50}
                said.append(actions["a"])
                client.log_returns(episode, {"a": float(t)})
            client.end_episode(episode, both(0))
            batch = collecting.result()["main"]
        assert here_policy.asked == 40
        assert there_policy.asked == 0
        mine = batch["agent_index"] == 0
        assert batch["off_policy"].all()
        assert batch["actions"][mine].tolist() == said
        assert batch["rewards"][mine].tolist() == [float(t) for t in range(20)]
        refused(ArgumentError, "expected a number above 7", server.publish, there_policy, version=7)
        assert server.weights_version == 7


def served_spaces() -> Any:
    return {name: (spaces.Box(-1000, 1000, (3,)), spaces.Discrete(50)) for name in ("a", "b")}


@pytest.mark.slow("many clients and connections")
def test_a_client_decides_as_the_server_would() -> None:
    """Through connectors that remember and that have learned; the same batches, but for what only a policy can say."""

    def act(rows: Any) -> Any:
        return np.abs(np.floor(rows["obs"].sum(axis=1) * 997)).astype(np.int64) % 5

    def chain() -> list[Any]:
        return [FlattenObs(), NormalizeObs()]

    found = {}
    for kind in ("remote", "local"):
        envs = external.make("simple_spread", 1, max_cycles=6)
        with envs, Server(envs) as server:
            collector = marlvec.Collector(envs, FunctionPolicy(act), agent_connectors=chain(), batch_mode="complete")
            env = marlvec.registry.resolve("simple_spread")(max_cycles=6)
            learned = marlvec.Collector(
                marlvec.make("simple_spread", 1, backend="sync"), FunctionPolicy(act), agent_connectors=chain(), seed=0
            )
            learned.collect(30)
            collector.agent_connectors["main"].load_state_dict(learned.agent_connectors["main"].state_dict())
            collector.agent_connectors["main"].reset()
            learned.envs.close()
            collector.eval()
            server.publish(collector)
            local = None if kind == "remote" else LocalInference(policies=FunctionPolicy(act), agent_connectors=chain())

            def play(url: str, env: Any = env, local: Any = local) -> None:
                from tests.external.served import play_parallel

                with Client(url, timeout=10, local=local) as client:
                    for seed in (1, 2):
                        play_parallel(client, env, 0, seed)
                env.close()

            thread = threading.Thread(target=play, args=(server.url,))
            thread.start()
            found[kind] = collector.collect(episodes=2)["main"]
            thread.join()
    for name in ("obs", "actions", "rewards", "next_obs", "terminated", "truncated", "t"):
        np.testing.assert_array_equal(found["local"][name], found["remote"][name], err_msg=name)
    assert found["local"]["off_policy"].all()


@pytest.mark.parametrize("says_more", [False, True])
def test_a_client_decides_where_an_action_is_a_pair(says_more: bool) -> None:
    """A pair of actions is not actions and columns, as with a collector."""
    pair = spaces.Tuple([spaces.Discrete(9), spaces.MultiDiscrete([50, 50])])

    def act(rows: Any) -> Any:
        actions = (rows["obs"][:, 0].astype(np.int64) % 9, rows["obs"][:, :2].astype(np.int64))
        return (actions, {"logp": np.zeros(len(rows), np.float32)}) if says_more else actions

    with (
        ThreadPoolExecutor(1) as threads,
        external.make({"a": (spaces.Box(-1000, 1000, (3,)), pair)}, 1) as envs,
        Server(envs) as server,
    ):
        collector = marlvec.Collector(envs, FunctionPolicy(act), agent_connectors=[], batch_mode="complete")
        collecting = threads.submit(collector.collect, episodes=1)
        local = LocalInference(policies=FunctionPolicy(act), agent_connectors=[])
        with Client(server.url, timeout=10, local=local) as client:
            episode = client.start_episode()
            said = [client.get_action(episode, obs_of(t)) for t in range(12)]
            client.end_episode(episode, obs_of(12))
        assert [int(number) for number, _ in said] == [t % 9 for t in range(12)]
        np.testing.assert_array_equal([place for _, place in said], [obs_of(t)[:2] for t in range(12)])
        numbers, places = collecting.result()["main"].actions
        np.testing.assert_array_equal(numbers, [number for number, _ in said])
        np.testing.assert_array_equal(places, [place for _, place in said])


def test_a_policy_that_says_three_things_is_named() -> None:
    local = LocalInference(policies=FunctionPolicy(lambda rows: (1, 2, 3)), agent_connectors=[])
    with served(1, collect=False) as there, Client(there.url, timeout=5, local=local) as client:
        episode = client.start_episode()
        with pytest.raises(ContractError, match=r"policy 'main' must return actions or \(actions, columns\)"):
            client.get_action(episode, both(1))


def test_local_arguments() -> None:
    with external.make(served_spaces(), 1) as envs, Server(envs) as server:
        two = {"x": Counting(), "y": Counting()}
        for local, what in (
            (LocalInference(policies=two), "policy_mapping: expected a policy for each agent"),
            (LocalInference(policies=two, policy_mapping={"a": "x"}), "for each of"),
            (LocalInference(policies=two, policy_mapping="z"), "one of"),
        ):
            refused(ArgumentError, what, Client, server.url, local=local)
        with Client(
            server.url, timeout=5, local=LocalInference(policies=two, policy_mapping={"a": "x", "b": "y"})
        ) as client:
            assert client.update_weights() == 0  # there are none


def test_limits_are_numbers() -> None:
    for wrong in ({"clients": 0}, {"clients": 1.5}, {"window": True}, {"idle_seconds": -1}, {"message_bytes": 10}):
        refused(ArgumentError, "expected", Limits, **wrong)


# --- a server whose welcome cannot be


@pytest.mark.fault("G7")
@pytest.mark.parametrize(
    ("part", "value", "what"),
    [
        ("limits", {"window": -3}, "limits: window: expected a number from 1, got -3"),
        ("limits", {"window": 0}, "limits: window: expected a number from 1, got 0"),
        ("limits", {"max_message": -1}, "limits: max_message: expected a number from 1, got -1"),
        ("limits", {"heartbeat": 0}, "limits: heartbeat: expected a number from 0.001, got 0"),
        ("limits", None, "limits: max_message: expected a number from 1, got None"),
        ("groups", {"agents": 3}, "agents: expected a list of names, got 3"),
        ("groups", {"agents": [["a"], "b"]}, "agents: expected a list of names, got list"),
        ("groups", {"agents": ["a"]}, "expected every agent in one group"),
        ("groups", {"mask": -3}, "mask: expected a length from 1, or None, got -3"),
        ("groups", {"mask": [-3]}, "mask: expected a length from 1, or None, got list"),
        ("groups", {"mask": True}, "mask: expected a length from 1, or None, got True"),
    ],
)
def test_a_welcome_that_cannot_be_ends_in_an_error_that_says_where(
    part: str, value: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ServerHandshake.welcome

    def spoilt(self: ServerHandshake, welcome: Welcome) -> Any:
        if part == "limits":
            return whole(self, welcome._replace(limits={} if value is None else {**welcome.limits, **value}))
        return whole(self, welcome._replace(groups=[{**welcome.groups[0], **value}, *welcome.groups[1:]]))

    monkeypatch.setattr(ServerHandshake, "welcome", spoilt)
    with served(collect=False) as there, pytest.raises(ProtocolError, match=f"WELCOME: .*{what}"):
        Client(there.url, timeout=5)


def test_weights_in_more_parts_than_bytes_are_refused_before_the_first_is_fetched() -> None:
    offer = {"version": 1, "size": 3, "parts": 2**53 - 1, "sha256": b"s" * 32}

    class Offering:
        def call(self, kind: Type, fields: dict[str, Any], timeout: float | None) -> Message:
            assert kind is Type.WEIGHTS
            return Message(Type.OFFER, offer)

    actor = object.__new__(LocalActor)
    actor._caller, actor.version = Offering(), 0  # type: ignore[assignment]  # it asks nothing else
    refused(ProtocolError, r"3 bytes of weights in 9007199254740991 parts", actor._fetch, None)
