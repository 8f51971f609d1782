"""Asynchronous policies: an env goes on as soon as its own answers are there, and batches do not depend on speed."""

from __future__ import annotations

import _thread
import asyncio
import gc
import json
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import external
from marlvec.connectors import AgentConnector, AgentPipeline, FilterRows, PrevActions
from marlvec.errors import AnswerTimeout, ArgumentError, ContractError, ContractWarning
from marlvec.policies import AnswerLimit, AsyncPolicy, Policy, PolicyMap, as_policy
from marlvec.spaces import AnyText
from tests.examples.scripts import EXAMPLES


@pytest.fixture(autouse=True)
def no_thread_of_answers_left() -> Any:
    """The event loop's thread ends once no policy uses it."""
    yield
    until = time.monotonic() + 10
    while any(thread.name == "marlvec-answers" for thread in threading.enumerate()) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)


# --- games and answers


class Turns:
    """Two players by turns; what happens, and for how long, follows from the seed and the actions."""

    possible_agents = ("left", "right")

    def __init__(self, *, together: bool = False) -> None:
        self.observation_spaces = dict.fromkeys(self.possible_agents, Box(-1e6, 1e6, (3,)))
        self.action_spaces = dict.fromkeys(self.possible_agents, Discrete(5))
        self.together, self.rng = together, np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = self.sum = 0
        return self._seen(["left", "right"] if self.together else ["left"]), {}

    def _seen(self, who: list[str]) -> dict[str, Any]:
        return {name: self.rng.normal(size=3).astype(np.float32) + self.sum for name in who}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        self.sum += sum(map(int, actions.values()))
        done = (self.t >= 4 and self.sum % 4 == 0) or self.t > 11
        who = ["left", "right"] if done or self.together else ["left", "right"][self.t % 2 :][:1]
        rewards = {"left": float(self.sum), "right": -float(self.sum)}
        return self._seen(who), rewards, {"__all__": done}, {"__all__": False}, {}

    def get_state(self) -> Any:
        return {"t": self.t, "sum": self.sum, "rng": self.rng.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.t, self.sum = state["t"], state["sum"]
        self.rng.bit_generator.state = state["rng"]


def choice(row: Any) -> int:
    """An answer that depends on the row alone."""
    return int(abs(row.obs.sum()) * 7 + row.seed) % 5


def policy_of(sleep: Callable[[Any], float] = lambda row: 0.0, **settings: Any) -> AsyncPolicy:
    async def answer(row: Any) -> Any:
        if seconds := sleep(row):
            await asyncio.sleep(seconds)
        return choice(row), {"logp": 0.5 * row.t, "seed": row.seed}

    return AsyncPolicy(answer, **settings)


def collector_of(policy: Any, num_envs: int = 5, *, backend: str = "sync", together: bool = False, **settings: Any):
    envs = marlvec.make(Turns, num_envs=num_envs, backend=backend, together=together)
    return marlvec.Collector(envs, policy, seed=3, **settings)


def check_equal(batches: list[Any], others: list[Any]) -> None:
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert list(batch) == list(other)
        for name in batch:
            rows, wanted = batch[name], other[name]
            assert list(rows.keys()) == list(wanted.keys())
            for column in list(rows.keys()):
                np.testing.assert_array_equal(rows[column], wanted[column], err_msg=column, strict=True)


SPEEDS = {
    "5 ms": lambda row: 0.005,
    "50 ms": lambda row: 0.05 * (row.t % 2),
    "first envs slow": lambda row: 0.004 * (5 - row.env_id),
    "last envs slow": lambda row: 0.004 * row.env_id,
    "like dice": lambda row: (row.seed % 7) * 0.002,
}
EXACT = {
    "games": ({"batch_mode": "complete"}, {"episodes": 8}),
    "games of so many steps": ({"batch_mode": "complete"}, {"env_steps": 60}),
    "games of so many decisions": ({"batch_mode": "complete", "overlap": True}, {"agent_steps": 60}),
    "games with overlap": ({"batch_mode": "complete", "overlap": True}, {"episodes": 8}),
    "steps": ({}, {"env_steps": 43}),
}


# --- what does not depend on speed


SLOW = pytest.mark.slow("sleeps for seconds")


@pytest.mark.parametrize("speed", [pytest.param(name, marks=SLOW if name == "50 ms" else ()) for name in SPEEDS])
@pytest.mark.parametrize("what", EXACT)
def test_batches_do_not_depend_on_speed(what: str, speed: str) -> None:
    settings, amount = EXACT[what]
    wanted = [collector.collect(**amount) for collector in [collector_of(policy_of(), **settings)] for _ in range(3)]
    collector = collector_of(policy_of(SPEEDS[speed]), **settings)
    check_equal([collector.collect(**amount) for _ in range(3)], wanted)


@pytest.mark.parametrize("backend", ["thread", "async"])
@pytest.mark.parametrize("together", [False, True])
def test_batches_are_equal_on_all_backends(backend: str, together: bool) -> None:
    settings = {"batch_mode": "complete", "overlap": True, "together": together}
    wanted = collector_of(policy_of(), **settings)
    collector = collector_of(policy_of(SPEEDS["like dice"]), backend=backend, **settings)
    with collector.envs:
        check_equal([collector.collect(episodes=9) for _ in range(2)], [wanted.collect(episodes=9) for _ in range(2)])


class Twin(Policy):
    """Answers all rows in one call."""

    def act(self, rows: Any) -> Any:
        return np.array([int(abs(rows.obs[i].sum()) * 7) % 5 for i in range(len(rows))])


async def twin(row: Any) -> int:
    return int(abs(row.obs.sum()) * 7) % 5


@pytest.mark.parametrize("together", [False, True])
def test_env_steps_equal_those_of_a_policy_that_acts(together: bool) -> None:
    lockstep, collector = (collector_of(policy, together=together) for policy in (Twin(), as_policy(twin)))
    for amount in (43, 20, 7):
        check_equal([collector.collect(env_steps=amount)], [lockstep.collect(env_steps=amount)])


def test_whole_games_are_those_of_a_policy_that_acts() -> None:
    wanted = collector_of(Twin(), batch_mode="complete").collect(episodes=60)["main"]
    rows = collector_of(as_policy(twin), batch_mode="complete").collect(episodes=20)["main"]
    of_both = np.isin(rows.eps_id, wanted.eps_id)
    assert of_both.all()
    same = np.isin(wanted.eps_id, rows.eps_id)
    for name in ("obs", "actions", "rewards", "eps_id", "t", "next_obs"):
        np.testing.assert_array_equal(rows[name], wanted[name][same])


def test_complete_mode_takes_each_envs_games_in_their_order() -> None:
    collector = collector_of(policy_of(SPEEDS["first envs slow"]), batch_mode="complete", overlap=True)
    numbers = []
    for _ in range(4):
        batch = collector.collect(episodes=7)["main"]
        numbers += [np.unique(batch.eps_id)]
    assert np.concatenate(numbers).tolist() == list(range(28))  # eps_id: game by game, then env by env


def test_row_seed_belongs_to_the_row_and_the_policy() -> None:
    seeds = [
        np.sort(collector_of(policy_of(), num, batch_mode="complete").collect(episodes=6)["main"]["seed"])
        for num in (6, 6, 3)
    ]
    assert np.array_equal(seeds[0], seeds[1])
    assert len(np.unique(seeds[0])) == len(seeds[0])
    assert 0 <= seeds[0].min() <= seeds[0].max() < 2**31
    envs = marlvec.make(Turns, num_envs=2, backend="sync")
    both = marlvec.Collector(envs, {"a": policy_of(), "b": policy_of()}, {"left": "a", "right": "b"}, seed=3)
    batch = both.collect(env_steps=40)
    assert not set(batch["a"]["seed"].tolist()) & set(batch["b"]["seed"].tolist())


# --- who waits for whom


class ByHand:
    """Requests that the test answers."""

    def __init__(self, **settings: Any) -> None:
        self.rows: dict[Future[Any], Any] = {}
        self.most = 0
        vars(self).update(settings)

    def ask(self, row: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.rows[future] = row
        self.most = max(self.most, sum(not f.done() for f in self.rows))
        if row.env_id != self.late or self.release:
            future.set_result(choice(row))
        return future

    late, release = 0, False


def test_an_env_goes_on_without_the_others() -> None:
    policy = ByHand(answer_timeout=60.0)
    collector = collector_of(policy, batch_mode="complete", overlap=True)
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(collector.collect(episodes=10)))
    thread.start()
    until, games = time.monotonic() + 20, {0: 0}
    while time.monotonic() < until and games != {0: 0, 1: 3, 2: 3, 3: 3, 4: 3}:
        time.sleep(0.01)
        for row in tuple(policy.rows.values()):
            games[row.env_id] = max(games.get(row.env_id, 0), row.eps_id // 5)
    time.sleep(0.05)
    rows = tuple(policy.rows.values())
    assert [row.t for row in rows if row.env_id == 0] == [0]
    assert max(row.eps_id // 5 for row in rows) == 3  # four games each: the batch's, and as many ahead of it
    assert not out
    policy.release = True
    for future, row in tuple(policy.rows.items()):
        if not future.done():
            future.set_result(choice(row))
    thread.join(20)
    wanted = collector_of(policy_of(), batch_mode="complete").collect(episodes=10)
    np.testing.assert_array_equal(out[0]["main"].actions, wanted["main"].actions)


def test_without_overlap_no_request_is_made_that_the_batch_does_not_need() -> None:
    for settings, amount in ((EXACT["games"]), EXACT["steps"]):
        policy = ByHand(late=-1)
        collector = collector_of(policy, **settings)
        for _ in range(2):
            collector.collect(**amount)
            made = collector.metrics.agent_steps
            assert len(policy.rows) == made


def test_a_limit_holds_over_all_policies_that_share_it() -> None:
    limit, lock = AnswerLimit(3), threading.Lock()
    counts = {"now": 0, "most": 0}

    async def answer(row: Any) -> int:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
        await asyncio.sleep(0.004)
        with lock:
            counts["now"] -= 1
        return choice(row)

    policies = {name: AsyncPolicy(answer, max_in_flight=limit) for name in "ab"}
    envs = marlvec.make(Turns, num_envs=8, backend="sync")
    collector = marlvec.Collector(envs, policies, {"left": "a", "right": "b"}, seed=0)
    others = collector_of(AsyncPolicy(answer, max_in_flight=limit), num_envs=8)
    thread = threading.Thread(target=others.collect, kwargs={"env_steps": 60})
    thread.start()
    collector.collect(env_steps=60)
    thread.join(30)
    assert not thread.is_alive()
    assert counts == {"now": 0, "most": 3}


def test_asynchronous_and_other_policies_play_together() -> None:
    envs = [marlvec.make(Turns, num_envs=4, backend="sync", together=True) for _ in range(2)]
    slow = AsyncPolicy(policy_of(SPEEDS["like dice"])._way[1])
    mapping = {"left": "act", "right": "slow"}
    settings: dict[str, Any] = {"batch_mode": "complete", "seed": 1}
    one, other = (
        marlvec.Collector(some, {"act": Twin(), "slow": policy}, mapping, **settings)
        for some, policy in zip(envs, (slow, policy_of()), strict=True)
    )
    check_equal([one.collect(episodes=6) for _ in range(2)], [other.collect(episodes=6) for _ in range(2)])


# --- versions


def test_policy_version_is_that_of_the_request() -> None:
    policy = policy_of(lambda row: 0.01)
    collector = collector_of(policy, batch_mode="complete", overlap=True)
    versions = []
    for _ in range(4):
        versions.append(collector.collect(episodes=5)["main"]["policy_version"])
        with collector.updating():
            assert all(request.future.done() for request in collector._answers._flying)
            policy.version += 1
    assert versions[0].max() == 0
    assert all(version.max() <= k for k, version in enumerate(versions))
    assert versions[3].min() < 3  # games that were ahead when the weights changed


def test_without_overlap_each_row_is_of_the_weights_of_its_call() -> None:
    policy = policy_of(lambda row: 0.002)
    collector = collector_of(policy)
    for k in range(3):
        assert (collector.collect(env_steps=30)["main"]["policy_version"][-1:] <= k).all()
        policy.version += 1
    assert set(collector.collect(env_steps=30)["main"]["policy_version"].tolist()) <= {2, 3}


# --- failures


class Broken:
    """Fails at some rows, the first time that it is asked for them."""

    def __init__(self, how: str, **settings: Any) -> None:
        self.how, self.seen = how, set()
        self.max_in_flight, self.answer_timeout = 16, 0.05 if how == "late" else None
        vars(self).update(settings)

    async def answer(self, row: Any) -> Any:
        key = row.eps_id, row.t
        if row.eps_id in (1, 7) and row.t == 2 and row.agent_index == 0 and key not in self.seen:
            self.seen.add(key)
            if self.how == "late":
                await asyncio.sleep(10)
            raise RuntimeError("the server is down")
        return choice(row)


@pytest.mark.parametrize("how", ["raises", "late"])
def test_a_failed_answer_raises_and_is_requested_again(how: str) -> None:
    collector = collector_of(Broken(how), batch_mode="complete")
    failed, said = 0, []
    batches: list[Any] = []
    while len(batches) < 2:
        try:
            batches.append(collector.collect(episodes=10))
        except (RuntimeError, AnswerTimeout) as error:
            failed += 1
            text = "".join(error.__notes__)
            assert "policy 'main', env " in text
            assert "nothing was sent to this env, collect() may be called again" in text
            said.append(str(error))
    assert failed == collector.policies["main"].failures == 2
    assert set(said) == {"the server is down" if how == "raises" else "no answer within answer_timeout=0.05 seconds"}

    async def well(row: Any) -> int:
        return choice(row)

    wanted = collector_of(AsyncPolicy(well), batch_mode="complete")
    check_equal(batches, [wanted.collect(episodes=10) for _ in range(2)])


@pytest.mark.parametrize("how", ["raises", "late"])
def test_a_failed_answer_costs_its_episode(how: str) -> None:
    collector = collector_of(Broken(how, on_failure="restart"), batch_mode="complete", overlap=True)
    with pytest.warns(ContractWarning, match="its episode is lost"):
        batches = [collector.collect(episodes=10) for _ in range(2)]
    assert collector.metrics.episodes_restarted == 2
    ids = np.unique(np.concatenate([batch["main"].eps_id for batch in batches]))
    assert not {1, 7} & set(ids.tolist())
    assert len(ids) == 20
    others = collector_of(Broken("raises", on_failure="restart"), batch_mode="complete")
    with pytest.warns(ContractWarning):
        check_equal(batches, [others.collect(episodes=10) for _ in range(2)])


@pytest.mark.parametrize("how", ["raises", "late"])
def test_a_failed_answer_is_the_fallback(how: str) -> None:
    collector = collector_of(Broken(how, on_failure="fallback", fallback=4), batch_mode="complete")
    with pytest.warns(ContractWarning, match="4 is sent"):
        rows = collector.collect(episodes=10)["main"]
    failed = np.isin(rows.eps_id, (1, 7)) & (rows.t == 2) & (rows.agent_index == 0)
    assert np.array_equal(rows.off_policy, failed)
    assert (rows.actions[failed] == 4).all()
    assert collector.metrics.episodes_restarted == 0


def test_a_fallback_outside_of_the_space_is_refused() -> None:
    collector = collector_of(Broken("raises", on_failure="fallback", fallback=9), batch_mode="complete")
    with pytest.warns(ContractWarning), pytest.raises(ContractError, match="which is not in the action space"):
        collector.collect(episodes=10)
    collector.policies["main"].fallback = 4
    assert len(np.unique(collector.collect(episodes=10)["main"].eps_id)) == 10


@pytest.mark.parametrize("bad", [9.5, (1, {"logp": [1, 2, 3]}), "left"])
def test_an_answer_of_the_wrong_form_is_requested_again(bad: Any) -> None:
    asked = []

    async def answer(row: Any) -> Any:
        asked.append(row.t)
        return bad if len(asked) == 12 else (choice(row), {"logp": 0.5 * row.t})

    collector = collector_of(AsyncPolicy(answer), batch_mode="complete")
    with pytest.raises(ContractError, match="policy 'main'|answer"):
        collector.collect(episodes=10)
    batch = collector.collect(episodes=10)
    wanted = collector_of(policy_of(), batch_mode="complete").collect(episodes=10)
    np.testing.assert_array_equal(batch["main"].actions, wanted["main"].actions)


# --- Ctrl-C, saving


def test_ctrl_c_cancels_requests_and_loses_no_game() -> None:
    interrupted = threading.Event()
    cancelled: list[Any] = []

    async def answer(row: Any) -> Any:
        try:
            await asyncio.sleep(0 if interrupted.is_set() or row.eps_id < 6 else 30)
        except asyncio.CancelledError:
            cancelled.append(row.eps_id)
            raise
        return choice(row), {"logp": 0.5 * row.t, "seed": row.seed}

    collector = collector_of(AsyncPolicy(answer), batch_mode="complete")
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        collector.collect(episodes=12)
    timer.join()
    until = time.monotonic() + 10
    while not cancelled and time.monotonic() < until:
        time.sleep(0.01)
    assert cancelled
    interrupted.set()
    assert collector.metrics.episodes_interrupted == 0
    wanted = collector_of(policy_of(), batch_mode="complete")
    check_equal([collector.collect(episodes=12)], [wanted.collect(episodes=12)])


@pytest.mark.parametrize("settings", [{"batch_mode": "complete", "overlap": True}, {"batch_mode": "complete"}, {}])
def test_a_saved_collector_goes_on_in_the_middle_of_requests(settings: Any, tmp_path: Any) -> None:
    amount = {"episodes": 7} if settings else {"env_steps": 33}
    collector = collector_of(policy_of(SPEEDS["like dice"]), **settings)
    collector.collect(**amount)
    collector.save(tmp_path / "state.npz")
    wanted = [collector.collect(**amount) for _ in range(2)]
    other = collector_of(policy_of(), **settings)
    other.collect(**amount)
    other.load(tmp_path / "state.npz")
    check_equal([other.collect(**amount) for _ in range(2)], wanted)
    assert other.metrics.env_steps_lost == 0


def test_reset_drops_requests() -> None:
    found = []
    for sleep in (lambda row: 0.0, lambda row: 0.002):
        collector = collector_of(policy_of(sleep), batch_mode="complete", overlap=True)
        collector.collect(episodes=7)
        collector.reset(seed=3)
        found.append(collector.collect(episodes=5))
    rows, others = (batch["main"] for batch in found)
    np.testing.assert_array_equal(rows.eps_id[0] % 5, 0)
    assert len(np.unique(rows.eps_id)) == len(np.unique(others.eps_id)) == 5


# --- with other parts of a collector


def test_random_steps_make_no_requests() -> None:
    policy = ByHand(late=-1)
    collector = collector_of(policy, random_steps=25)
    rows = collector.collect(env_steps=50)["main"]
    assert int(rows.off_policy.sum()) <= 25
    assert len(policy.rows) == 25


def test_connectors_work_as_with_other_policies() -> None:
    for chain in ([PrevActions()], [FilterRows(lambda rows: rows.t % 2 == 0, noop=1)]):
        one, other = (
            collector_of(policy, agent_connectors=AgentPipeline(chain), together=True)
            for policy in (as_policy(first_sum), FirstSum())
        )
        check_equal([one.collect(env_steps=40)], [other.collect(env_steps=40)])


async def first_sum(row: Any) -> int:
    return int(abs(sum(float(np.sum(leaf)) for leaf in _leaves(row.obs))) * 3) % 5


class FirstSum(Policy):
    def act(self, rows: Any) -> Any:
        sums = [int(abs(sum(float(np.sum(leaf[i])) for leaf in _leaves(rows.obs))) * 3) % 5 for i in range(len(rows))]
        return np.array(sums)


def _leaves(obs: Any) -> list[Any]:
    return list(obs) if isinstance(obs, tuple) else list(obs.values()) if isinstance(obs, dict) else [obs]


def test_evaluate_plays_the_same_games_at_any_speed() -> None:
    found = []
    for sleep in (lambda row: 0.0, SPEEDS["like dice"]):
        collector = collector_of(policy_of(sleep))
        games = marlvec.make(Turns, num_envs=3, backend="sync")
        found.append([record.episode_return for record in collector.evaluate(7, games, seed=5).episodes])
    assert len(found[0]) == 7
    np.testing.assert_array_equal(*found)


def test_batches_in_the_background() -> None:
    collector = collector_of(policy_of(lambda row: 0.002), batch_mode="complete", overlap=True)
    policy, found = collector.policies["main"], []
    with collector.background(episodes=6, total=18) as batches:
        for batch in batches:
            found.append(batch)
            with collector.updating():
                policy.version += 1
    ids = np.unique(np.concatenate([batch["main"].eps_id for batch in found]))
    assert ids.tolist() == list(range(18))


def test_policies_of_a_map_and_policies_that_come() -> None:
    policies = PolicyMap({"main": policy_of(), "built": lambda: policy_of()}, capacity=2)
    envs = marlvec.make(Turns, num_envs=3, backend="sync")
    collector = marlvec.Collector(envs, policies, {"left": "main", "right": "built"}, seed=0)
    assert len(collector.collect(env_steps=30)) == 2
    named = ["main"]
    collector = marlvec.Collector(envs, {"main": Twin()}, lambda agent, episode: named[0], seed=0)
    collector.collect(env_steps=10)
    collector.add_policy("late", policy_of(), like="main")  # answers all rows of a tick at once
    named[0] = "late"
    assert "late" in collector.collect(env_steps=60)


class Simulator(external.ExternalEnv):
    """Plays `Turns` outside."""

    def run(self) -> None:
        seed = 0
        while not self.stopping:
            game, seed = Turns(), seed + 1
            obs, done = game.reset(seed=seed)[0], False
            episode = self.start_episode()
            while not done:
                obs, rewards, ended, _, _ = game.step(self.get_action(episode, obs))
                done = ended["__all__"]
                self.log_returns(episode, rewards)
            self.end_episode(episode, obs)


def test_simulators_outside_wait_for_the_answers_of_a_tick() -> None:
    game, found = Turns(), []
    spaces = {name: (game.observation_spaces[name], game.action_spaces[name]) for name in game.possible_agents}
    for policy in (as_policy(twin), Twin()):
        with external.make(spaces, 1) as envs, Simulator(envs):
            found.append([marlvec.Collector(envs, policy, seed=0, batch_mode="complete").collect(episodes=3)])
    check_equal(*found)


class Prefix(AgentConnector):
    """Gives texts of numpy's own kind."""

    def __call__(self, rows: Any) -> Any:
        return rows.replace(obs=np.array([f"{'<' * int(t)}{text}" for t, text in zip(rows.t, rows.obs, strict=True)]))


def test_frozen_policies_get_texts_as_objects_too() -> None:
    seen = []

    class Look(Policy):
        def act(self, rows: Any) -> Any:
            seen.append(rows.obs.dtype)
            return np.full(len(rows), "yes", object)

    envs = marlvec.make(Talk, num_envs=2, backend="sync")
    chain = {"main": [Prefix()], "old": [Prefix()]}
    number = ["main", "old"]
    collector = marlvec.Collector(
        envs,
        {"main": Look()},
        lambda agent, episode: number[agent == "right" and len(number) > 2],
        seed=0,
        agent_connectors={"main": chain["main"]},
    )
    collector.add_policy("old", Look(), agent_connectors=chain["old"], frozen=True)
    number.append("on")
    collector.reset()
    collector.collect(env_steps=30)
    assert set(seen) == {np.dtype(object)}


def test_ask_may_use_threads() -> None:
    with ThreadPoolExecutor(4) as pool:

        class Threads(AsyncPolicy):
            def ask(self, row: Any) -> Future[Any]:
                return pool.submit(lambda: (choice(row), {"logp": 0.5 * row.t, "seed": row.seed}))

        collector = collector_of(Threads(), batch_mode="complete")
        wanted = collector_of(policy_of(), batch_mode="complete")
        check_equal([collector.collect(episodes=8)], [wanted.collect(episodes=8)])


# --- the class alone


def test_act_answers_rows_without_a_collector() -> None:
    rows = marlvec.connectors.Rows(obs=np.arange(12.0).reshape(4, 3))

    async def total(row: Any) -> Any:
        return float(row.obs.sum()), {"text": "x" * int(row.obs[0]), "explore": row.explore}

    actions, columns = AsyncPolicy(total, max_in_flight=2).act(rows, explore=False)
    assert actions.tolist() == [3.0, 12.0, 21.0, 30.0]
    assert columns["text"].tolist() == ["", "xxx", "x" * 6, "x" * 9]
    assert columns["explore"].tolist() == [False] * 4


def test_answers_may_have_lists_of_tokens() -> None:
    async def answer(row: Any) -> Any:
        return choice(row), {"tokens": list(range(row.t % 3)), "said": "x" * row.t}

    rows = collector_of(AsyncPolicy(answer, ragged={"tokens": np.int32})).collect(env_steps=40)["main"]
    assert [row.tolist() for row in rows["tokens"]] == [list(range(t % 3)) for t in rows.t]
    assert {row.dtype for row in rows["tokens"]} == {np.dtype(np.int32)}
    assert rows["said"].tolist() == ["x" * t for t in rows.t]
    with pytest.raises(ContractError, match=r"declare lists by ragged=\{'tokens': dtype\}"):
        collector_of(AsyncPolicy(answer)).collect(env_steps=40)


def test_lists_that_change_their_length_from_call_to_call_are_named() -> None:
    """Where all rows of a call have lists of one length, it is the next call that shows that they are not alike."""

    class Growing(marlvec.RandomPolicy):
        calls = 0

        def act(self, rows: Any, *, explore: bool = True) -> Any:
            self.calls += 1
            return super().act(rows, explore=explore), {"tokens": np.zeros((len(rows), self.calls), np.int64)}

    message = r"'tokens' was int64 of shape \(n, 1,\) until now, got .*declare lists by ragged=\{'tokens': dtype\}"
    with pytest.raises(ContractError, match=message):
        collector_of(Growing()).collect(env_steps=40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AsyncPolicy(7), "expected an async function of a row"),
        (lambda: AsyncPolicy(twin, max_in_flight=0), "max_in_flight"),
        (lambda: AsyncPolicy(twin, answer_timeout=-1), "answer_timeout"),
        (lambda: AsyncPolicy(twin, on_failure="ignore"), "on_failure"),
        (lambda: AsyncPolicy(twin, on_failure="fallback"), "fallback"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_nothing_is_imported_where_policies_act() -> None:
    code = """
import json, sys, marlvec
from tests.collect.test_async_policies import Turns, Twin
marlvec.Collector(marlvec.make(Turns, num_envs=2, backend="sync"), Twin()).collect(env_steps=20)
modules = "marlvec.policies.answers", "marlvec.collect.async_policies"
print(json.dumps([name for name in modules if name in sys.modules]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []


# --- a client of a server


class Talk(Turns):
    """The same game in text."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spaces = dict.fromkeys(self.possible_agents, AnyText())
        self.action_spaces = dict.fromkeys(self.possible_agents, AnyText())

    def _seen(self, who: list[str]) -> dict[str, Any]:
        return {name: f"move {self.t} of {name}: {self.rng.integers(1000)}" for name in who}

    def step(self, actions: dict[str, Any]) -> Any:
        return super().step({name: len(text) for name, text in actions.items()})


class ChatServer(BaseHTTPRequestHandler):
    """Answers chat completions from a table, and every tenth request with an error."""

    bodies: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append((self.path, body))
        time.sleep(0.01)
        prompt = body["messages"][0]["content"]
        self.send_response(500 if "move 3" in prompt else 200)
        self.end_headers()
        tokens = [{"token": "x", "logprob": -0.5}] * (body["seed"] % 3)
        choice = {"message": {"content": f"{TABLE[len(prompt) % 3]}"}, "logprobs": {"content": tokens}}
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, *_: Any) -> None: ...


TABLE = ["left", "right it is", "none"]


def test_a_client_of_a_server_plays() -> None:
    example = runpy.run_path(str(EXAMPLES / "openai_policy.py"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        policy = example["ChatPolicy"](url, "small", max_in_flight=4, on_failure="fallback", fallback="")
        envs = marlvec.make(Talk, num_envs=6, backend="sync")
        collector = marlvec.Collector(envs, policy, batch_mode="complete", seed=0)
        with pytest.warns(ContractWarning, match="HTTPError 500"):
            rows = collector.collect(episodes=9)["main"]
        answered = ~rows.off_policy
        said = [TABLE[len(prompt) % 3] for prompt in rows.obs]
        assert rows.actions[answered].tolist() == [text for text, here in zip(said, answered, strict=True) if here]
        assert (rows.actions[~answered] == "").all()
        assert np.array_equal(~answered, ["move 3" in prompt for prompt in rows.obs])
        np.testing.assert_allclose(rows.logp[rows.num_tokens > 0], -0.5 * rows.num_tokens[rows.num_tokens > 0])
        path, body = ChatServer.bodies[0]
        assert path == "/v1/chat/completions"
        assert body["model"] == "small"
        assert body["temperature"] == 1.0
        assert len(ChatServer.bodies) == len(rows)
    finally:
        example["THREADS"].shutdown()
        server.shutdown()
        server.server_close()
        thread.join()
