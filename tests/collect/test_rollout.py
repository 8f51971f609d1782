"""A tick of the collector: rows beside a slow reference, moments, successors, and ends without an observation."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import strategies as st

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import (
    FrameStack,
    GeneralAdvantageEstimation,
    NormalizeReward,
    Rows,
    TeamObs,
    action_connector,
    agent_connector,
)
from marlvec.connectors.agent import FilterRows, NormalizeObs, PrevActions, PrevRewards, View
from marlvec.connectors.learner import AddLastObs
from marlvec.envs import MultiAgentEnv, RLlibAdapter
from marlvec.envs.env import Slot
from marlvec.envs.wrappers import TimeLimit
from marlvec.errors import ContractError, EnvFault
from marlvec.making import make
from marlvec.policies import FunctionPolicy, Policy
from marlvec.testing import check_env
from marlvec.testing.scripted import CounterEnv, KeyedEnv, Script, ScriptedParallelEnv, decode
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.plans import DRAWN, FEW_OR_MANY, LONG, PROGRAMS, Plan, for_examples, one, play
from tests.collect.players import GAMES, KINDS, MODES, noop
from tests.collect.test_row_log import World
from tests.vector.support.kinds import vectorize
from tests.vector.test_calls import calls_by_file

# --- the collector against a slow reference, row for row, over whole runs


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@pytest.mark.checklist(49)
@pytest.mark.checklist(100)
@pytest.mark.checklist(105)
@pytest.mark.checklist(106)
@pytest.mark.checklist(112)
@pytest.mark.checklist(114)
@pytest.mark.checklist(115)
@pytest.mark.checklist(117)
@pytest.mark.checklist(118)
@pytest.mark.checklist(119)
@FEW_OR_MANY
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_the_references(kind: str, examples: int) -> None:
    """Rows, counts, records and what callbacks are told, whatever order envs reply in; resets anywhere."""
    for_examples(examples, play, plan=st.builds(Plan, st.just(kind), **DRAWN), calls=PROGRAMS)


@pytest.mark.mostly_slow("collects long runs", quick=12, slow="pairs")
@pytest.mark.checklist(49)
@pytest.mark.checklist(52)
@pytest.mark.checklist(105)
@pytest.mark.checklist(112)
@pytest.mark.checklist(118)
@pytest.mark.fault("D7")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
def test_a_long_run_is_the_references(mode: str, batch_mode: str, overlap: bool, kind: str) -> None:
    play(Plan(kind, mode, batch_mode=batch_mode, order=7, overlap=overlap, copy=mode == "disabled", watched=True), LONG)


@pytest.mark.mostly_slow("plays many games", quick=6)
@pytest.mark.checklist(52)
@pytest.mark.checklist(114)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("game", GAMES)
def test_each_rows_reward_is_all_that_was_paid_until_the_players_next_turn(
    game: str, mode: str, batch_mode: str
) -> None:
    """PettingZoo's own games, in batches that cut through them; seats change from game to game."""
    plan = Plan(game, mode, agent_num=3 if game == "hanabi" else 2, seed=3, batch_mode=batch_mode)
    records = play(plan, [("env_steps", 37)] * 8).metrics.episodes
    assert len(records) >= 8
    assert sum(record.returns_A.any() for record in records) >= 2


def test_rows_of_a_batch_larger_than_any_before_are_the_references() -> None:
    play(Plan(num_envs=2, agent_num=1, mapping=one), [("env_steps", 800)])


@agent_connector(name="double")
def double(rows: Rows) -> Rows:
    return rows.replace(obs=rows["obs"] * 2.0 + 1.0)


@agent_connector(name="small")
def small(rows: Rows) -> Rows:
    return rows.replace(rewards=np.sign(rows["rewards"]))


@action_connector(name="shift")
def shift(rows: Rows) -> Rows:
    return rows.replace(actions_for_env=(rows["actions_for_env"] + 2) % 5)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.checklist(96)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_connectors_stand_between_envs_policies_and_batches(kind: str, mode: str) -> None:
    """Batches hold what the policy saw and gave, beside what the env got; metrics count what the env paid."""
    collector = play(
        Plan(kind, mode, seed=11),
        [("env_steps", 100), ("episodes", 4), ("env_steps", 31)],
        connectors={"agent_connectors": [double, small], "action_connectors": [shift]},
        see=lambda obs: obs * 2.0 + 1.0,
        worth=lambda reward: float(np.sign(reward)),
        send=lambda action: (action + 2) % 5,
    )
    assert collector.metrics.returns.max > 1000  # raw, not the signs in the batches


# --- rows of one moment belong together: what connectors show of other agents is of the same moment, also at an end


GONE, LENGTH = 2, 5  # when the second agent ends, and all others


def team(truncates: bool, env_index: int) -> ScriptedParallelEnv:
    """Three agents, of whom the second one ends before the others; episodes of odd envs are one step longer."""
    length = LENGTH + env_index % 2
    end: Any = "truncated" if truncates else "terminated"
    script = Script([0, 0, 0], [length, GONE, length], ["terminated", end, "terminated"])
    return ScriptedParallelEnv(script, agent_num=3, env_index=env_index)


def check_team(obs: Any, i: int, agent: int, t: int, there: list[int]) -> None:
    """Check that a row of ``agent`` shows the team of its own env and moment: those who are there, and nobody else."""
    own = decode(obs["own"][i])
    assert (own.t, own.agent) == (t, agent)
    for mate, row in enumerate(obs["team"][i]):
        assert decode(row) == own._replace(agent=mate) if mate in there else not row.any()
    assert obs["team_mask"][i].tolist() == [mate in there for mate in range(3)]


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_a_last_row_shows_the_team_of_its_own_moment(mode: str, truncates: bool, split: bool) -> None:
    """Where one agent ends and its team goes on, all rows of that moment show the same team, later ones the rest."""
    policies = {name: noop() for name in ("pq" if split else "p")}
    mapping: Any = {"agent_0": "p", "agent_1": "p", "agent_2": "q"} if split else "p"
    chains = {name: [TeamObs()] for name in policies}
    with vectorize("sync", [partial(team, truncates, i) for i in range(3)], autoreset_mode=mode) as envs:
        rows = Collector(envs, policies, mapping, agent_connectors=chains, seed=0).collect(env_steps=3 * 14)["p"]
    mates = [0, 1] if split else [0, 1, 2]
    left = [agent for agent in mates if agent != 1]
    tried = 0
    for i in range(len(rows)):
        agent, t = int(rows["agent_index"][i]), int(rows["t"][i])
        check_team(rows["obs"], i, agent, t, mates if t <= GONE else left)
        check_team(rows["next_obs"], i, agent, t + 1, mates if t + 1 <= GONE else left)
        tried += bool((rows["terminated"][i] or rows["truncated"][i]) and agent == 1)
    assert tried >= 6


def test_other_connectors_of_the_pipeline_see_each_row_once() -> None:
    """In the same rows as without `TeamObs`: stacks, running statistics, and rows that are taken out."""

    def batch(*chain: Any) -> Any:
        with vectorize("sync", [partial(team, True, i) for i in range(3)]) as envs:
            return Collector(envs, noop(), agent_connectors=list(chain), seed=0).collect(env_steps=3 * 14)["main"]

    def evens(rows: Any) -> Any:
        return (rows["t"] % 2 == 0) | rows["last"]

    before = [FilterRows(evens, noop=0), NormalizeObs(), FrameStack(2)]
    plain = batch(*before)
    before = [FilterRows(evens, noop=0), NormalizeObs(), FrameStack(2)]
    with_team = batch(*before, TeamObs())
    np.testing.assert_array_equal(with_team["t"], plain["t"])
    np.testing.assert_array_equal(with_team["terminated"], plain["terminated"])
    assert with_team["obs"]["own"].shape == plain["obs"].shape


# --- what a value function sees behind the last row of a fragment is the row that comes next, as in the run, uncut


COLUMNS = ("obs", "state", "action_mask", "prev_actions", "prev_rewards", "two_before", "t")
Key = tuple[int, int, int]


class Numbers(Policy):
    """Acts by numbers that follow from the row alone; recurrent: its state counts its decisions."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        number = rows["eps_id"] * 7 + rows["t"] * 3 + rows["agent_index"]
        actions = np.where(rows["action_mask"][np.arange(len(rows)), number % 4], number % 4, 1)
        return actions, {"values": np.zeros(len(rows))}


def noted(into: dict[Key, dict[str, Any]], rows: Rows, at: Any = None) -> None:
    for i in range(len(rows)) if at is None else at:
        key = tuple(int(rows[name][i]) for name in ("eps_id", "agent_index", "t"))
        into.setdefault(key, {}).update({name: np.array(rows[name][i]) for name in COLUMNS})


def run(
    amounts: list[int], odd: str, backend: str, learner: str
) -> tuple[dict[Key, dict[str, Any]], dict[Key, dict[str, Any]]]:
    """Rows that came out of the agent connectors, and rows of which the value function was asked, by moment."""
    came: dict[Key, dict[str, Any]] = {}
    asked: dict[Key, dict[str, Any]] = {}

    @agent_connector(name="spy")
    def spy(rows: Rows) -> Rows:
        noted(came, rows)
        return rows

    def value(rows: Rows) -> Any:
        noted(asked, rows)
        return np.zeros(len(rows))

    view = View("two_before", "obs", -2)
    chain = [PrevActions(), PrevRewards(), view, spy]
    with vectorize(backend, [partial(World, "box", odd, 0, i) for i in range(3)], state=True) as envs:
        collector = Collector(
            envs,
            {"p": Numbers()},
            "p",
            agent_connectors={"p": chain},
            learner_connectors={
                "p": [GeneralAdvantageEstimation(value_function=value)] if learner == "gae" else [AddLastObs()]
            },
            seed=0,
        )
        for amount in amounts:
            rows = collector.collect(env_steps=amount)["p"]
            if learner == "phantom":
                noted(asked, rows, np.flatnonzero(rows["phantom"]).tolist())
    return came, asked


@pytest.mark.parametrize("learner", ["gae", "phantom"])
@pytest.mark.parametrize("odd", ["", "death", "late"])
@pytest.mark.parametrize("amounts", [[9] * 8, [7] * 9], ids=["whole rounds", "parts"])
def test_what_comes_after_a_fragment_is_the_next_row(amounts: list[int], odd: str, learner: str) -> None:
    """Observations, states, masks, and all that connectors add: at cuts, at truncations, where the agent dies."""
    came, _ = run([3 * 24 + 24], odd, "sync", learner)
    _, asked = run(amounts, odd, "sync", learner)
    assert len(asked) > 20
    for key, columns in asked.items():
        for name, value in columns.items():
            np.testing.assert_array_equal(value, came[key][name], err_msg=f"{name} of {key}")


def test_next_action_mask_is_that_of_the_next_row_and_allows_all_at_ends() -> None:
    with vectorize("sync", [partial(World, "box", "death", 0, i) for i in range(3)]) as envs:
        rows = Collector(envs, {"p": Numbers()}, "p", seed=0).collect(env_steps=60)["p"]
    ends = rows["terminated"] | rows["truncated"]
    assert ends.any()
    assert rows["next_action_mask"][ends].all()
    goes_on = np.flatnonzero(~ends[:-1] & (rows["unroll_id"][1:] == rows["unroll_id"][:-1]))
    np.testing.assert_array_equal(rows["next_action_mask"][goes_on], rows["action_mask"][goes_on + 1])


def test_a_connector_may_not_take_the_name_of_another_columns_successor() -> None:
    @agent_connector(name="both")
    def both(rows: Rows) -> Rows:
        return rows.replace(height=rows["t"], next_height=rows["t"])

    with vectorize("sync", [partial(World, "box", "", 0, i) for i in range(3)]) as envs:
        collector = Collector(envs, {"p": Numbers()}, "p", agent_connectors={"p": [both]}, seed=0)
        with pytest.raises(ContractError, match="may not add a column named 'next_height'"):
            collector.collect(env_steps=6)


# --- agents that end without a final observation, over whole episodes: what is not known is marked, never made up


SCRIPT = Script([0, 1, 0, 0], [4, 3, 5, 6], ["terminated", "truncated", "both", "truncated"])


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


def silent(**options: Any) -> KeyedEnv:
    return KeyedEnv(SCRIPT, agent_num=4, waits=waits, last_obs=False, **options)


def valued() -> FunctionPolicy:
    """Acts anyhow, and says of each observation what it is worth."""
    return FunctionPolicy(lambda rows: (np.zeros(len(rows), np.int64), {"values": worth(rows["obs"])}))


def worth(obs: Any) -> Any:
    return np.asarray(obs, np.float64).sum(axis=1) % 17.0


class Ragged(KeyedEnv):
    """Agent 0 sees less than the others, so that with ``pad=True`` an env writes into a part of its row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SCRIPT, agent_num=4, waits=waits, last_obs=False, **options)
        self.observation_spaces["agent_0"] = Box(-np.inf, np.inf, (5,), np.float64)

    def reset(self, **kwargs: Any) -> Any:
        obs, infos = super().reset(**kwargs)
        return self.cut(obs), infos

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return self.cut(obs), *rest

    def cut(self, obs: Any) -> Any:
        return {agent: seen[:5] if agent == "agent_0" else seen for agent, seen in obs.items()}


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("pad", [False, True])
def test_the_vectorizer_marks_missing_final_observations(backend: Any, mode: Any, pad: bool) -> None:
    factories = [partial(Ragged if pad else silent, env_index=i) for i in range(3)]
    workers = 2 if backend == "async" else None
    with marlvec.make(factories, backend=backend, num_workers=workers, autoreset_mode=mode, pad=pad) as envs:
        obs, infos = envs.reset(seed=0)
        before, told = obs.copy(), 0
        assert "final_observation_missing" not in infos
        for _ in range(30):
            actions = np.zeros((3, 4), np.int64)
            obs, _, terminated, truncated, infos = envs.step(actions)
            ended = terminated | truncated
            missing = infos.get("final_observation_missing", np.zeros((3, 4), bool))
            np.testing.assert_array_equal(missing, ended, err_msg="nobody in these envs has one")
            if ended.any():
                # It repeats what the agent was shown last.
                np.testing.assert_array_equal(infos["final_observation"][ended], before[ended])
                told += 1
            before = obs.copy()
            if mode == "disabled" and infos.get("_final_observation", np.zeros(3, bool)).any():
                before = envs.reset()[0].copy()
        assert told > 10


@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
def test_next_obs_repeats_what_the_policy_saw_and_is_marked(mode: str) -> None:
    """Through connectors too: a stack of frames is not pushed on by a frame that there never was."""
    chain = [FrameStack(3), NormalizeReward()]
    with SyncVectorEnv([partial(silent, env_index=i) for i in range(2)], autoreset_mode=mode) as envs:
        rows = Collector(envs, valued(), agent_connectors=chain, batch_mode="complete", seed=0).collect(episodes=6)[
            "main"
        ]
    ended = rows["terminated"] | rows["truncated"]
    np.testing.assert_array_equal(rows["next_obs_missing"], ended)
    np.testing.assert_array_equal(rows["next_obs"][ended], rows["obs"][ended])
    assert ended.sum() == 6 * 4
    inner = np.flatnonzero(~ended)
    np.testing.assert_array_equal(rows["next_obs"][inner], rows["obs"][inner + 1])


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
def test_advantages_bootstrap_from_nothing_that_was_made_up(mode: str) -> None:
    """Terminated: the end is worth 0. Truncated: the last row is left out, and its own value is the end of the rest."""
    asked: list[int] = []

    def value_of(rows: Rows) -> Any:
        asked.append(len(rows))
        return worth(rows["obs"])

    gae = GeneralAdvantageEstimation(0.9, 0.8, value_of)
    with SyncVectorEnv([partial(silent, env_index=i) for i in range(2)], autoreset_mode=mode) as envs:
        collector = Collector(envs, valued(), learner_connectors=[gae], batch_mode="complete", seed=0)
        rows = collector.collect(episodes=4)["main"]
    assert not asked  # no fragment was cut in the middle, and at no end is there anything to ask about
    assert len(rows.split_by_fragment()) == 16
    for part in rows.split_by_fragment():
        values, rewards = part["values"], part["rewards"]
        known = len(part) - (not part["terminated"][-1])
        advantages, ahead = np.zeros(len(part)), 0.0
        for t in reversed(range(known)):
            after = values[t + 1] if t + 1 < len(part) else 0.0
            ahead = rewards[t] + 0.9 * after - values[t] + 0.9 * 0.8 * ahead
            advantages[t] = ahead
        np.testing.assert_allclose(part["advantages"], advantages, rtol=1e-6)
        np.testing.assert_allclose(part["value_targets"], advantages + values, rtol=1e-6)


@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [2, 3, 4])
def test_time_limit_gives_waiting_agents_no_final_observation(mode: str, limit: int) -> None:
    """The others are observed in the step in which time is up, so theirs is a true one."""
    forever = Script.together(3, 10**6)

    def factory() -> Any:
        return TimeLimit(RLlibAdapter(KeyedEnv(forever, agent_num=3, waits=waits)), limit)

    with SyncVectorEnv([factory] * 2, autoreset_mode=mode) as envs:
        rows = Collector(envs, valued(), batch_mode="complete", seed=0).collect(episodes=6)["main"]
    last = rows.take(rows["truncated"])
    assert len(last) == 6 * 3
    assert not last["terminated"].any()
    np.testing.assert_array_equal(last["next_env_t"], limit)
    np.testing.assert_array_equal(last["next_obs_missing"], (limit + last["agent_index"]) % 3 == 0)
    # The fourth number in a scripted observation is the step it was made in.
    np.testing.assert_array_equal(last["next_obs"][~last["next_obs_missing"], 3], limit)


@pytest.mark.checklist(109)
def test_envs_that_always_show_the_end_are_never_marked() -> None:
    for kind in (ScriptedParallelEnv, KeyedEnv):
        with SyncVectorEnv([partial(kind, agent_num=3, env_index=i) for i in range(2)]) as envs:
            rows = Collector(envs, valued(), seed=0).collect(env_steps=100)["main"]
            assert rows["terminated"].any()
            assert not rows["next_obs_missing"].any()


@pytest.mark.checklist(109)
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_where_the_api_demands_one_its_absence_is_an_error(end: Any) -> None:
    class Mute(ScriptedParallelEnv):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            obs.pop("agent_0") if self.world.t == 2 else None
            return obs, *rest

    with SyncVectorEnv([lambda: Mute(Script([0, 0], [2, 4], [end, end]), agent_num=2)]) as envs:
        collector = Collector(envs, valued(), seed=0)
        with pytest.raises(EnvFault, match="observations: expected one of the live agent 'agent_0', got none"):
            collector.collect(env_steps=4)


def test_a_policy_may_not_use_the_names() -> None:
    for name in ("env_t", "next_env_t", "next_obs_missing"):
        policy = FunctionPolicy(lambda rows, name=name: (np.zeros(len(rows), int), {name: np.zeros(len(rows))}))
        with SyncVectorEnv([lambda: CounterEnv(3)]) as envs, pytest.raises(ContractError, match=name):
            Collector(envs, policy, seed=0).collect(env_steps=3)


# --- agents that come only to end, and the dead


@pytest.mark.checklist(110)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ScriptedParallelEnv, KeyedEnv])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_agent_whose_first_observation_is_its_last_is_in_the_metrics(kind: Any, mode: str, end: Any) -> None:
    script = Script([0, 2], [4, 2], ["terminated", end])
    with SyncVectorEnv([lambda: kind(script, agent_num=2)], autoreset_mode=mode) as envs:
        collector = Collector(envs, valued(), seed=0, batch_mode="complete")
        batch = collector.collect(episodes=3)
    assert set(batch["main"]["agent_index"].tolist()) == {0}
    assert len(batch["main"]) == 3 * 4
    for record in collector.metrics.episodes:
        assert record.present_A.tolist() == [True, True]
        assert record.lengths_A.tolist() == [4, 0]
        assert record.returns_A[1] > 0
    assert collector.metrics.agent("agent_1")["return"].count == 3


@pytest.mark.checklist(110)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ScriptedParallelEnv, KeyedEnv])
def test_data_of_an_agent_that_has_ended_is_an_error(kind: Any, mode: str) -> None:
    class Haunted(kind):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            obs, rewards, *rest = super().step(actions)
            if self.world.t == 4 and self.world.episode == 1:
                obs["agent_0"], rewards["agent_0"] = obs["agent_1"], 1.0
            return obs, rewards, *rest

    script = Script([0, 0], [3, 6], ["terminated", "terminated"])
    with SyncVectorEnv([lambda: Haunted(script, agent_num=2)], autoreset_mode=mode) as envs:
        collector = Collector(envs, valued(), seed=0)
        assert collector.collect(env_steps=9).agent_steps == 9 + 6  # an episode, and half of the next
        with pytest.raises(EnvFault, match="agent 'agent_0'.* has ended"):
            collector.collect(env_steps=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_team_sees_no_more_of_an_agent_that_ended_without_a_final_observation(mode: Any) -> None:
    """What stands in its place repeats what was seen before, and belongs to no moment."""
    with marlvec.make([partial(silent, env_index=i) for i in range(3)], backend="sync", autoreset_mode=mode) as envs:
        rows = Collector(envs, noop(), agent_connectors=[TeamObs()], seed=0).collect(env_steps=3 * 30)["main"]
    looked = 0
    for i in range(len(rows)):
        gone = [a for a, death in enumerate(SCRIPT.deaths) if rows["env_t"][i] >= death]
        assert not rows["obs"]["team_mask"][i][gone].any()
        looked += len(gone)
    assert looked > 20


# --- agents that end and are born again in the same episode: each life is a trajectory of its own


PHOENIX_LENGTH, LIFE, PAUSE = 12, 3, 2


class Phoenix(MultiAgentEnv):
    """Agent 0 lives on; agent 1 dies after three steps, and is born again two steps later."""

    def __init__(self) -> None:
        self.name, self.agents = "phoenix", ("a", "b")
        self.observation_spaces = (Box(0, 99, (2,), np.float64),) * 2
        self.action_spaces = (Discrete(2),) * 2

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.t = 0
        for a in range(2):
            self.show(slot, a)
            slot.alive[a] = slot.acting[a] = True

    def step(self, slot: Slot) -> None:
        slot.read_actions()
        self.t += 1
        phase = self.t % (LIFE + PAUSE)
        over = self.t == PHOENIX_LENGTH
        slot.reward[0] = 1.0
        self.show(slot, 0)
        if slot.alive[1]:
            slot.reward[1] = 10.0 + self.t
            self.show(slot, 1)
            if phase == LIFE:
                slot.terminated[1], slot.alive[1], slot.acting[1] = True, False, False
        elif phase == 0:
            self.show(slot, 1)
            slot.alive[1] = slot.acting[1] = True
        if over:
            for a in range(2):
                if slot.alive[a]:
                    slot.truncated[a], slot.alive[a], slot.acting[a] = True, False, False
            slot.done = True

    def show(self, slot: Slot, a: int) -> None:
        slot.write_obs(a, np.array([self.t, a], np.float64))


def policy() -> FunctionPolicy:
    return FunctionPolicy(lambda rows: (np.zeros(len(rows), np.int64), {"values": rows["obs"][:, 0] * 0.5}))


@pytest.mark.checklist(108)
@pytest.mark.fault("D3")
@pytest.mark.parametrize("mode", MODES)
def test_each_revival_begins_a_new_trajectory(mode: str) -> None:
    chain, gae = [FrameStack(2)], GeneralAdvantageEstimation(0.9, 0.8, lambda rows: rows["obs"][:, 0])
    with SyncVectorEnv([Phoenix] * 2, autoreset_mode=mode) as envs:
        collector = Collector(
            envs, policy(), agent_connectors=chain, learner_connectors=[gae], batch_mode="complete", seed=0
        )
        batch = collector.collect(episodes=4)
        episodes = batch.episodes(envs.agents)
    rows = batch["main"]
    mine = rows.take((rows["agent_index"] == 1) & (rows["eps_id"] == 0))
    lives = mine.split_by_fragment()
    assert [part["env_t"].tolist() for part in lives] == [[0, 1, 2], [5, 6, 7], [10, 11]]
    assert [part["next_env_t"].tolist() for part in lives] == [[1, 2, 3], [6, 7, 8], [11, 12]]
    assert mine["t"].tolist() == list(range(8))
    assert len(set(mine["unroll_id"].tolist())) == 3
    assert mine["terminated"].tolist() == [False, False, True, False, False, True, False, False]
    assert mine["rewards"].tolist() == [11, 12, 13, 16, 17, 18, 21, 22]
    for part in lives:
        # The first stack of a life holds nothing of the one before.
        born = float(part["env_t"][0])
        assert set(part["obs"][0].ravel().tolist()) <= {0.0, 1.0, born}
        assert part["next_obs"][-1][-2] == part["next_env_t"][-1]
    # Nothing of a later life flows into the advantages of an earlier one: its end is worth 0.
    first = lives[0]
    delta = 13.0 - first["values"][-1]
    np.testing.assert_allclose(first["advantages"][-1], delta, rtol=1e-6)
    record = collector.metrics.episodes[0]
    assert record.returns_A.tolist() == [12.0, 11 + 12 + 13 + 16 + 17 + 18 + 21 + 22]
    assert record.lengths_A.tolist() == [12, 8]
    for episode in episodes:
        agent_episodes = episode.episodes_of("b")
        assert [(t.env_start, t.env_stop, t.first_t, t.terminated) for t in agent_episodes] == [
            (0, 3, 0, True),
            (5, 8, 3, True),
            (10, 12, 6, False),
        ]
        there = episode.decided()[:, 1]
        assert there.tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
        seen = episode.at("obs", agent="b", fill=-1)[:, -2]
        assert seen.tolist() == [0, 1, 2, 3, -1, 5, 6, 7, 8, -1, 10, 11, 12]
        for step in range(1, PHOENIX_LENGTH):
            head, tail = episode.cut(step, lookback=2)
            assert head is not None
            assert tail is not None
            whole = head.concat(tail)
            assert [len(track) for track in whole.agent_episodes] == [12, 3, 3, 2]
            np.testing.assert_array_equal(whole.at("obs", fill=-1), episode.at("obs", fill=-1))


@pytest.mark.parametrize("size", [1, 5, 7])
def test_pieces_of_batches_keep_lives_apart(size: int) -> None:
    with SyncVectorEnv([Phoenix]) as envs:
        collector = Collector(envs, policy(), seed=0)
        found = [e for _ in range(24 // size + 1) for e in collector.collect(env_steps=size).episodes()]
    whole = [e for e in found if e.eps_id == 0]
    joined = whole[0]
    for piece in whole[1:]:
        joined = joined.concat(piece)
    assert [(t.env_start, t.env_stop) for t in joined.agent_episodes] == [(0, 12), (0, 3), (5, 8), (10, 12)]


def test_the_check_of_envs_lets_them_be() -> None:
    check_env(Phoenix)


def test_acting_without_being_alive_is_an_error() -> None:
    class Haunted(Phoenix):
        def step(self, slot: Slot) -> None:
            super().step(slot)
            if self.t == 4:
                slot.acting[1] = True

    with SyncVectorEnv([Haunted]) as envs:
        collector = Collector(envs, policy(), seed=0)
        with pytest.raises(ContractError, match="agent 'b' is to act, but it has ended already"):
            collector.collect(env_steps=6)


# --- how many of marlvec's own functions run for one tick of `collect()`, and in how many files: a count, not a clock
# Two envs, one policy; a tick that ends nobody, and whose values are not checked.


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.parametrize(("backend", "calls", "files"), [("sync", 90, 24), ("async", 98, 30)])
def test_tick(backend: str, calls: int, files: int) -> None:
    options = {"num_workers": 2} if backend == "async" else {}
    with make("simple_spread", num_envs=2, backend=backend, max_cycles=1000, **options) as envs:
        collector = Collector(envs, FunctionPolicy(lambda rows: np.ones(len(rows), np.int64)), seed=0)
        collector.collect(env_steps=2 * 33)  # the first steps are checked, and then every 16th
        few, more = (calls_by_file(lambda k=k: collector.collect(env_steps=2 * k)) for k in (2, 12))
    of_ten = {file: more[file] - few[file] for file in more if more[file] > few[file]}
    assert sum(of_ten.values()) <= 10 * calls
    assert len(of_ten) <= files
