"""Section D of the catalogue: many agents. What is here adds to the marked tests of tests/envs and tests/collect."""

from __future__ import annotations

import gc
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Space
from pettingzoo import ParallelEnv

from marlvec import Collector, FunctionPolicy, SyncVectorEnv, make
from marlvec.collect.row_log import RowLog
from marlvec.envs import adapt
from marlvec.errors import ContractError, EnvContractError, EnvRaised, NotResetError
from marlvec.testing import CounterEnv, KeyedEnv, Script, ScriptedParallelEnv, TurnEnv, decode
from tests.vector.support.kinds import HERE_AND_AWAY, acts, hooked, vectorize
from tests.vector.support.reference import MODES, refused

N = 3
A = 3
TWO = Script([0, 0], [2, 6], ["terminated"] * 2)  # agent 0 ends in step 2, agent 1 in step 6


def breaks(backend: str, good: Any, bad: Any, steps: int, words: str) -> None:
    """Env 1 breaks its contract in that step, and is told of; the others never know, and it goes on after a reset."""
    with vectorize(backend, [good, bad, good]) as envs, vectorize("sync", [good]) as twin:
        for seed in range(2):
            envs.reset(seed=[seed] * 3)
            twin.reset(seed=[seed])
            for _ in range(steps - 1):
                envs.step(acts(envs))
                twin.step(acts(twin))
            caught = refused(EnvContractError, rf"^env 1, step\(\): .*{words}", envs.step, acts(envs))
            obs, rewards, *_ = twin.step(acts(twin))
            result = caught.result
            assert (caught.env_ids, result.env_ids.tolist()) == ((1,), [0, 2])
            assert [row.tobytes() for row in result.obs] == [obs[0].tobytes()] * 2
            assert result.rewards.tolist() == rewards.tolist() * 2
            refused(NotResetError, r"envs \[1\]", envs.step, acts(envs))


# --- D1, D2, D4: who is told of


PLACES = [("observations", 0), ("rewards", 1), ("terminations", 2), ("truncations", 3)]


def tampered(kind: Any, tamper: Callable[[Any, Any], None], **options: Any) -> Any:
    """A factory of an env whose results go through a function that may change them."""

    def step_and_tamper(env: Any, step: Any, actions: Any) -> Any:
        result = step(actions)
        tamper(env, result)
        return result

    return partial(hooked, kind, hooks={"step": step_and_tamper}, **options)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("D1")
@pytest.mark.parametrize(("what", "place"), PLACES)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_a_live_agent_that_is_left_out(backend: str, what: str, place: int) -> None:
    def leave_out(env: Any, result: Any) -> None:
        if env.world.t == 3:
            del result[place]["agent_1"]

    good = partial(CounterEnv, 5)
    breaks(
        backend, good, tampered(CounterEnv, leave_out, length=5), 3, f"{what}: expected one of the live agent 'agent_1'"
    )


@pytest.mark.fault("D1")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_one_that_is_left_out_rllibs_way_waits(backend: str) -> None:
    """That is how such an env says it: masks tell, the observation stays, the reward is there if it is given."""

    def leave_out(env: Any, result: Any) -> None:
        for table in result[: env.world.t]:  # of the observations; of the rewards, too; of the flags, too
            table.pop("agent_1", None)
        env._acting = [agent for agent in env._acting if agent != "agent_1"]

    with vectorize(backend, [tampered(KeyedEnv, leave_out, script=Script.together(3, 4))] * 2) as envs:
        envs.reset(seed=0)
        for t in range(1, 4):
            obs, rewards, terminated, truncated, infos = envs.step(acts(envs))
            assert infos["alive"].tolist() == [[True] * 3] * 2
            assert infos["acting"].tolist() == [[True, False, True]] * 2
            assert [decode(row).t for row in obs[0]] == [t, 0, t]
            assert (rewards[:, 1] != 0).tolist() == [t == 1] * 2
            assert not (terminated | truncated).any()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("D1")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_a_player_that_vanishes_from_a_game(backend: str) -> None:
    def vanish(env: Any, result: Any) -> None:
        if env.world.t == 3:
            env.agents = [agent for agent in env.agents if agent == env.agent_selection]

    script = Script.together(3, 9)
    good = partial(TurnEnv, script, agent_num=3)
    bad = tampered(TurnEnv, vanish, script=script, agent_num=3)
    breaks(backend, good, bad, 3, r"env.agents: expected agent 'player_\d', whose flags are False, got it has left")


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("D2")
@pytest.mark.parametrize("agent", ["agent_9", "__all__", "", 7, ("agent_0",), None, b"agent_0"], ids=repr)
@pytest.mark.parametrize(("form", "backend"), [("parallel", "sync"), ("parallel", "async"), ("keyed", "thread")])
def test_an_unknown_agent_raises(form: str, backend: str, agent: Any) -> None:
    kind: Any = CounterEnv if form == "parallel" else partial(KeyedEnv, Script.together(3, 5))
    base = CounterEnv if form == "parallel" else KeyedEnv
    options: dict[str, Any] = {"length": 5} if form == "parallel" else {"script": Script.together(3, 5)}
    for place, value in ((0, np.zeros(7)), (1, 0.0), (2, False), (3, False)):
        if form == "keyed" and agent == "__all__" and place > 1:
            continue  # there it is what it should be

        def add(env: Any, result: Any, place: int = place, value: Any = value) -> None:
            if env.world.t == 2:
                result[place][agent] = value

        words = rf"expected agents of 'agent_0', .*, got the unknown agent {re.escape(repr(agent))}"
        breaks(backend, kind if form == "keyed" else partial(CounterEnv, 5), tampered(base, add, **options), 2, words)


def named(kind: Any, names: Any) -> Callable[[], Any]:
    """An env with these agents."""

    def build() -> Any:
        size = len(names) if isinstance(names, (list, tuple)) else 3
        env = kind(Script.together(size, 9), agent_num=size)
        env.possible_agents = names
        if isinstance(env, KeyedEnv):
            env.observation_space, env.action_space = env.world.observation_space, env.world.action_space
            del env.observation_spaces, env.action_spaces
        return env

    return build


GAMES: dict[str, Any] = {"parallel": ScriptedParallelEnv, "turns": TurnEnv, "keyed": KeyedEnv}


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("D2")
@pytest.mark.parametrize("form", list(GAMES))
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_names_that_are_none(backend: str, form: str) -> None:
    """Refused when the env is built; names that are no text become text, and must differ as such."""
    wrong: list[tuple[Any, str]] = [
        (["a", ["b"], "c"], r"expected strings or other keys of dicts, got list: \['b'\]"),
        (["a", {"b": 1}, "c"], r"expected strings or other keys of dicts, got dict"),
        (["a", ("b", [1]), "c"], r"expected strings or other keys of dicts, got tuple: \('b', \[1\]\)"),
        ([np.zeros(2), "b", "c"], "expected strings or other keys of dicts, got ndarray"),
        (["a", "__all__", "c"], "'__all__' is a reserved word"),
        (["__common__", "b", "c"], "'__common__' is a reserved word"),
        (["a", "a", "b"], "names an agent twice"),
        ([1, "1", "b"], "names an agent twice"),
    ]
    if form != "keyed":  # which has other places to look for agents
        wrong += [(7, "expected a list of agents, got int: 7"), ("abc", "expected a list of agents, got str: 'abc'")]
    for names, words in wrong:
        with pytest.raises(ContractError, match=rf"env 1, __init__\(\): .*{words}"):
            vectorize(backend, [named(GAMES[form], ["a", "b", "c"]), named(GAMES[form], names)])


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("D2")
@pytest.mark.parametrize(
    ("form", "words"), [("parallel", "env.agents: .* the unknown agent"), ("turns", "unknown agent")]
)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_unhashable_names_in_the_middle_of_an_episode(backend: str, form: str, words: str) -> None:
    def spoil(env: Any, result: Any) -> None:
        if env.world.t == 2:
            if form == "turns":
                env.agent_selection = ["player_0"]
            else:
                env.agents = [["agent_0"], *env.agents]

    script = Script.together(3, 9)
    good = partial(GAMES[form], script, agent_num=3)
    breaks(backend, good, tampered(GAMES[form], spoil, script=script, agent_num=3), 2, rf"{words} \['\w+'\]")


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=8)
@pytest.mark.fault("D4")
@pytest.mark.parametrize("form", ["parallel", "keyed", "turns"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_data_of_an_ended_agent_raises(backend: str, form: str) -> None:
    places = {"parallel": (0, 1, 2, 3), "keyed": (0, 1), "turns": (1,)}[form]
    for place in places:

        def haunt(env: Any, result: Any, place: int = place) -> None:
            if env.world.t == 4 and form == "turns":
                env.rewards["player_0"] = 1.0
            elif env.world.t == 4:
                result[place]["agent_0"] = (np.ones(7), 1.0, True, False)[place]

        good = partial(GAMES[form], TWO, agent_num=2)
        bad = tampered(GAMES[form], haunt, script=TWO, agent_num=2)
        breaks(backend, good, bad, 4, r"agent '\w+_0'.* has ended")


# --- D3: coming, going, coming back


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=8)
@pytest.mark.fault("D3")
@pytest.mark.parametrize("form", list(GAMES))
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_no_agent_returns_in_the_same_episode(backend: str, form: str) -> None:
    def revive(env: Any, result: Any) -> None:
        if env.world.t != 4:
            return
        if form == "turns":
            env.agents.append("player_0")
            for table in (env.rewards, env._cumulative_rewards):
                table["player_0"] = 0.0
            env.terminations["player_0"] = env.truncations["player_0"] = False
            env.infos["player_0"] = {}
            return
        if form == "parallel":
            env.agents.append("agent_0")
        for table, value in zip(result, (np.ones(7), 0.0, False, False, {}), strict=True):
            table["agent_0"] = value

    good = partial(GAMES[form], TWO, agent_num=2)
    bad = tampered(GAMES[form], revive, script=TWO, agent_num=2)
    breaks(backend, good, bad, 4, r"agent '\w+_0'.* has ended and cannot come back")


# --- D5, D6: nobody, and those who never act


def collector_of(factories: list[Any], mode: str = "same_step", **options: Any) -> Collector:
    noop = FunctionPolicy(lambda rows: np.ones(len(rows), np.int64))
    return Collector(SyncVectorEnv(factories, autoreset_mode=mode), noop, seed=0, **options)


@pytest.mark.fault("D5")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_agents_makes_no_rows(mode: str) -> None:
    """Of six env steps an episode, one has nobody to ask: five rows, and every env step counts."""
    factory = partial(KeyedEnv, Script([0], [6], ["terminated"]), agent_num=1, waits=lambda t, a: t == 2)
    collector = collector_of([factory] * 2, mode)
    asked = 0
    for amount in (1, 2, 3, 1, 5, 12, 36):
        batch = collector.collect(env_steps=amount)
        asked += amount
        assert batch.env_steps == amount
        assert all(len(rows) for rows in batch.values()), "a policy without rows has no key"
    assert collector.metrics.env_steps == asked == 60
    assert collector.metrics.agent_steps == 50
    assert {record.lengths_A.tolist()[0] for record in collector.metrics.episodes} == {5}


class Hermit(KeyedEnv):
    """Agent 1 is seen once, at the reset, and never again; it is paid all the same. Agent 0 acts on and on.

    Args:
        length: Steps until all is over; None: it never is.
    """

    def __init__(self, length: int | None, env_index: int = 0) -> None:
        super().__init__(
            Script.together(2, length or 10**9, "terminated"),
            agent_num=2,
            waits=lambda t, a: a == 1,
            last_obs=False,
            env_index=env_index,
        )

    def step(self, actions: dict[Any, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, rewards | {"agent_1": 0.5}, *rest


def trajectories() -> list[RowLog]:
    return [found for found in gc.get_objects() if type(found) is RowLog]


@pytest.fixture
def rows_kept() -> Callable[[], int]:
    """Number of rows that the test's own collectors hold back."""
    others = trajectories()  # of earlier tests, whose exceptions may hold them
    return lambda: sum(len(found) for found in trajectories() if not any(found is other for other in others))


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("D6")
def test_an_agent_that_never_acts_again_does_not_block(rows_kept: Callable[[], int]) -> None:
    """In an episode without end: what is kept does not grow, and ``reset`` ends it at any time."""
    collector = collector_of([partial(Hermit, None, i) for i in range(2)])
    sizes = []
    for k in range(1, 151):
        batch = collector.collect(env_steps=10)
        assert batch.agent_steps == 10
        assert set(batch["main"]["agent_index"].tolist()) == {0}
        if k % 50 == 0:
            sizes.append(rows_kept())
    assert sizes[0] == sizes[1] == sizes[2] <= 8 + 10, "one open row an agent, and what the last batch had"
    assert collector.metrics.episodes_total == 0
    collector.reset()
    rows = collector.collect(env_steps=20)["main"]
    assert rows["t"].min() == 0


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("D6")
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_with_one_who_never_acts_again_ends_and_counts(
    mode: str, limit: int | None, batch_mode: Any, rows_kept: Callable[[], int]
) -> None:
    """By itself after 40 steps, or cut by a time limit: one row for the one who waited, with all that it was paid."""
    length = limit or 40
    options = {} if limit is None else {"max_episode_steps": limit}
    with make(partial(Hermit, 40), 2, backend="sync", autoreset_mode=mode, **options) as envs:
        noop = FunctionPolicy(lambda rows: np.ones(len(rows), np.int64))
        collector = Collector(envs, noop, seed=0, batch_mode=batch_mode)
        rows = collector.collect(episodes=6)["main"]
        records = {record.eps_id: record for record in collector.metrics.episodes}
        complete = [eps for eps in set(rows["eps_id"].tolist()) if eps in records]
        assert len(complete) >= 6
        for eps in complete:
            own = rows.take((rows["eps_id"] == eps) & (rows["agent_index"] == 1))
            assert own.rewards.tolist() == [0.5 * length]
            assert own.truncated.tolist() == [limit is not None]
            assert own.terminated.tolist() == [limit is None]
            assert records[eps].lengths_A.tolist() == [length, 1]
            assert records[eps].returns_A[1] == 0.5 * length
        for _ in range(4):
            batch = collector.collect(episodes=6)
            kept = rows_kept() - batch.agent_steps  # what the last batch had is let go of by the next tick
            assert kept <= 4 * length, "what the running episodes have, and a last row or two"


# --- D7: rewards of those who are not asked


def last_says(players: int, seed: int, script: Script) -> dict[tuple[int, int], list[float]]:
    """What PettingZoo's own loop pays: by episode and player, what ``last()`` says at each turn, the dead one too."""
    env = TurnEnv(script, agent_num=players)
    paid: dict[tuple[int, int], list[float]] = defaultdict(list)
    for episode in range(3):
        env.reset(seed=seed)
        for agent in env.agent_iter():
            _, reward, ended, cut, _ = env.last()
            paid[episode, env.possible_agents.index(agent)].append(float(reward))
            env.step(None if ended or cut else 1)
    return paid


@pytest.mark.fault("D7")
@pytest.mark.parametrize("players", [2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_rewards_between_turns_belong_to_the_earlier_row(mode: str, players: int) -> None:
    """All players are paid at every move, each another sum; also those that leave early, and before a first turn."""
    script = Script([0] * players, [5, *[11] * (players - 1)], ["terminated"] * players)
    said = last_says(players, 0, script)
    collector = collector_of([partial(TurnEnv, script, agent_num=players)], mode, batch_mode="complete")
    rows = collector.collect(episodes=3)["main"]
    for (episode, a), rewards in said.items():
        first = collector.metrics.episodes[episode].eps_id
        own = rows.take((rows["eps_id"] == first) & (rows["agent_index"] == a))
        # What came before the first turn goes to the first row; the last one is said at the dead turn.
        expected = [rewards[0] + rewards[1], *rewards[2:]]
        assert own.rewards.tolist() == expected, f"episode {episode}, player {a}"
        assert collector.metrics.episodes[episode].returns_A[a] == sum(rewards)


# --- D8: ends at the boundary of a fragment


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("D8")
@pytest.mark.parametrize("kind", ["together", "early", "turns", "waits"])
@pytest.mark.parametrize("mode", MODES)
def test_an_end_on_the_boundary_of_a_fragment_is_one_row(mode: str, kind: str) -> None:
    """Fragments of every length, so that every end is on a boundary once: the same rows as in one go, none twice."""
    n, total = 2, 96
    early = Script([0, 0, 1], [4, 2, 3], ["truncated", "terminated", "both"])
    factories: dict[str, Any] = {
        "together": partial(CounterEnv, 4),
        "early": partial(ScriptedParallelEnv, early),
        "turns": partial(TurnEnv, Script.together(3, 6), agent_num=3),
        "waits": partial(KeyedEnv, early, waits=lambda t, a: (t + a) % 3 == 0),
    }

    def key(rows: Any) -> list[tuple[Any, ...]]:
        columns = ("eps_id", "agent_index", "t", "terminated", "truncated", "rewards")
        found = zip(*(rows[name].tolist() for name in columns), rows["obs"][:, 3].tolist(), strict=True)
        return sorted(found)

    whole = key(collector_of([factories[kind]] * n, mode).collect(env_steps=total)["main"])
    ends = [row[:2] for row in whole if row[3] or row[4]]
    assert len(ends) == len(set(ends)) >= 24, "one end an agent and episode"
    for length in (1, 2, 3, 4, 8):
        collector = collector_of([factories[kind]] * n, mode)
        parts: list[Any] = []
        for _ in range(total // length):
            for rows in collector.collect(env_steps=length).values():
                parts += key(rows)
        assert sorted(parts) == whole, f"fragments of {length}"


# --- D9: integers of those who are not there


# --- D10: the order of keys


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("D10")
@pytest.mark.parametrize("form", list(GAMES))
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_rows_go_by_name_whatever_the_order(backend: str, form: str) -> None:
    """Another order in every dict of every env in every step."""
    kind = GAMES[form]

    class Shuffled(kind):  # type: ignore[misc, valid-type]  # the class is a parameter
        order = random.Random(0)

        def shuffled(self, result: Any) -> Any:
            if form != "keyed":
                self.order.shuffle(self.agents)
            if result is None:
                for name in ("rewards", "terminations", "truncations", "infos"):
                    setattr(self, name, self.mix(getattr(self, name)))
            return None if result is None else tuple(self.mix(table) for table in result)

        def mix(self, table: dict[Any, Any]) -> dict[Any, Any]:
            return dict(self.order.sample(list(table.items()), len(table)))

        def reset(self, *args: Any, **kwargs: Any) -> Any:
            return self.shuffled(super().reset(*args, **kwargs))

        def step(self, action: Any) -> Any:
            return self.shuffled(super().step(action))

    script = Script([0, 0, 1, 0], [6, 3, 5, 6], ["terminated", "truncated", "both", "terminated"])
    plain, shuffled = ([partial(cls, script, agent_num=4, env_index=i) for i in range(N)] for cls in (kind, Shuffled))
    with vectorize(backend, shuffled) as envs, vectorize("sync", plain) as twin:
        for _ in range(3):
            assert envs.reset(seed=1)[0].tobytes() == twin.reset(seed=1)[0].tobytes()
            for _ in range(9):
                actions = np.arange(N * 4).reshape(N, 4) % 5
                for one, other in zip(envs.step(actions)[:4], twin.step(actions)[:4], strict=True):
                    assert one.tobytes() == other.tobytes()


@pytest.mark.fault("D10")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_envs_that_list_their_agents_in_another_order_are_refused(backend: str) -> None:
    """The agent axis has one order; nothing is mixed up in silence."""
    names = ["a", "b", "c"]
    for other in (["c", "b", "a"], ["a", "c", "b"]):
        with pytest.raises(ContractError, match=r"env 1\b.*agents: expected \('a', 'b', 'c'\), got"):
            vectorize(backend, [named(ScriptedParallelEnv, names), named(ScriptedParallelEnv, other)])


# --- D11: crowds


class Crowd(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Many agents, of whom every tenth leaves in step 2; its own work grows with their number and no faster.

    Args:
        agent_num: How many.
        kinds: How many different spaces they have.
    """

    metadata = {"name": "crowd", "render_modes": []}
    render_mode = None

    def __init__(self, agent_num: int, kinds: int = 1, env_index: int = 0) -> None:
        self.possible_agents = [f"agent_{k}" for k in range(agent_num)]
        self.agents: list[str] = []
        spaces = [Box(-1, 1e6, (3 + k,), np.float32) for k in range(kinds)]
        self._spaces = {agent: spaces[k % kinds] for k, agent in enumerate(self.possible_agents)}
        self._actions = Discrete(3)
        self._rows = {}
        for k, agent in enumerate(self.possible_agents):
            row = np.zeros(3 + k % kinds, np.float32)
            row[:2] = env_index, k
            self._rows[agent] = row
        self._t = 0

    def observation_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent]

    def action_space(self, agent: str) -> Space[Any]:
        return self._actions

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        self.agents = self.possible_agents[:]
        return self._look(self.agents), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self._t += 1
        here = self.agents
        ended = dict.fromkeys(here, self._t == 4)
        if self._t == 2:
            ended.update(dict.fromkeys(here[::10], True))
        self.agents = [agent for agent in here if not ended[agent]]
        rewards = {agent: float(action) for agent, action in actions.items()}
        return self._look(here), rewards, ended, dict.fromkeys(here, False), {}

    def _look(self, agents: list[str]) -> dict[str, Any]:
        for agent in agents:
            self._rows[agent][2] = self._t
        return {agent: self._rows[agent] for agent in agents}


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("D11")
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_thousand_agents_in_a_hundred_envs(backend: str) -> None:
    n, a = 100, 1000
    with vectorize(backend, [partial(Crowd, a, env_index=i) for i in range(n)]) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (n, a, 3)
        actions = (np.arange(n)[:, None] + np.arange(a)) % 3
        for t in range(1, 5):
            obs, rewards, terminated, _, infos = envs.step(actions)
            here = np.ones(a, bool) if t <= 2 else np.arange(a) % 10 != 0
            then = 0 if t == 4 else t
            rows = infos["final_observation"] if t == 4 else obs  # of those who had left before, the last that they saw
            assert (rows[:, here, 0] == np.arange(n)[:, None]).all()
            assert (rows[:, here, 1] == np.arange(a)[here]).all()
            assert (obs[:, here, 2] == then).all()
            np.testing.assert_array_equal(rewards, np.where(here, actions, 0))
            assert (terminated == (here if t == 4 else (t == 2) & (np.arange(a) % 10 == 0))).all()


def work_of(agent_num: int, kinds: int) -> tuple[dict[str, int], float]:
    """Calls of functions, in Python and C, for building and for an episode; and its processor seconds at best."""
    calls: dict[str, int] = {}
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def counted(name: str, function: Callable[[], Any]) -> Any:
        nonlocal count
        before = sys.getprofile()
        count = 0
        sys.setprofile(note)
        try:
            return function()
        finally:
            sys.setprofile(before)
            calls[name] = count

    envs = counted("build", lambda: SyncVectorEnv([partial(Crowd, agent_num, kinds, env_index=i) for i in range(2)]))
    with envs:
        actions: Any = np.ones((2, agent_num), np.int64)
        if envs.grouped:
            actions = {name: np.ones((2, len(members)), np.int64) for name, members in envs.groups.items()}

        def episode() -> None:
            envs.reset(seed=0)
            for _ in range(4):
                envs.step(actions)

        counted("episode", episode)
        best = float("inf")
        for _ in range(5):
            began = time.thread_time()  # other programs' time does not count, and under load there is much of it
            episode()
            best = min(best, time.thread_time() - began)
    return calls, best


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("D11")
@pytest.mark.parametrize("kinds", ["one", "all"])
def test_ten_times_the_agents_are_ten_times_the_work(kinds: str) -> None:
    """Counted in calls, with all agents alike and with all of them different; and, generously, in time."""
    few, many = 60, 600
    (small, soon), (large, late) = (work_of(n, 1 if kinds == "one" else n) for n in (few, many))
    for part in ("build", "episode"):
        assert large[part] < 12 * small[part], part
    assert late < 40 * soon


@pytest.mark.fault("D11")
@pytest.mark.parametrize("form", list(GAMES))
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_names_of_any_length_in_any_script(backend: str, form: str) -> None:
    names = ["агент-1", "智能体/2", "🙂\n'quoted' \"twice\"", "x" * 10_000, " ", "_private", "0", "alive"]
    with vectorize(backend, [named(GAMES[form], names)] * 2) as envs:
        assert envs.agents == tuple(names)
        assert sum(len(members) for members in envs.groups.values()) == len(names)
        _, infos = envs.reset(seed=0)
        assert infos["alive"].all()
        for name in names:
            assert envs.agent_action_space(name) == Discrete(5)
        obs, *_ = envs.step(acts(envs))
        assert obs.shape == (2, len(names), 7)
        assert envs.agents_at(1) == tuple(names)
    spec = adapt(named(GAMES[form], names)()).spec()
    assert spec.agents == tuple(names)


@pytest.mark.fault("D11")
def test_names_of_any_kind_in_metrics() -> None:
    names = ["агент-1", "🙂\n", "x" * 10_000]
    collector = collector_of([named(ScriptedParallelEnv, names)])
    collector.collect(env_steps=40)
    for name in names:
        assert collector.metrics.agent(name)["length"].count == 4


# --- D12: games


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("D12")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_illegal_moves_are_left_to_the_game(backend: str) -> None:
    """A game that ends for it (PettingZoo's wrapper) ends; one that raises is named, with the player's move."""
    factory = partial(__import__("pettingzoo").make, "aec", "classic/tictactoe_v3")
    with vectorize(backend, [factory] * 2, validate="off") as envs:
        envs.reset(seed=0)
        envs.step(np.array([[4, 0], [4, 0]]))
        _, rewards, terminated, _, infos = envs.step(np.array([[0, 4], [0, 5]]))
        assert terminated.tolist() == [[True, True], [False, False]]
        assert rewards.tolist() == [[0, -1], [0, 0]]
        assert infos["_final_observation"].tolist() == [True, False]
    masked = partial(TurnEnv, Script.together(2, 9), agent_num=2, masked=True)
    with vectorize(backend, [masked] * 3, validate="off") as envs:
        _, infos = envs.reset(seed=0)
        legal = np.argmax(infos["action_mask"], axis=-1)
        wrong = legal.copy()
        wrong[1] = np.argmin(infos["action_mask"][1], axis=-1)
        caught = refused(EnvRaised, r"env 1 raised in step\(\): ValueError: action .* is masked", envs.step, wrong)
        assert caught.result.env_ids.tolist() == [0, 2]
        envs.reset(env_ids=[1])


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=5)
@pytest.mark.fault("D12")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
@pytest.mark.parametrize(
    ("selected", "words"),
    [
        ("player_1", "agent_selection: expected a live agent, of 'player_0', 'player_2', got 'player_1'"),
        ("nobody", "agent_selection: expected agents of 'player_0', .*, got the unknown agent 'nobody'"),
        (None, "unknown agent None"),
        (0, "unknown agent 0"),
    ],
)
def test_an_empty_agent_selection(backend: str, selected: Any, words: str) -> None:
    def confuse(env: Any, result: Any) -> None:
        if env.world.t == 4 and len(env.agents) < 3:
            env.agent_selection = selected

    script = Script([0, 0, 0], [8, 2, 8], ["terminated"] * 3)
    good = partial(TurnEnv, script, agent_num=3)
    breaks(backend, good, tampered(TurnEnv, confuse, script=script, agent_num=3), 4, words)
