"""A slow collector that is plainly right, its batches as dicts of rows, and a callback held against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.collect.callbacks import HOOKS, Callback, EpisodeStep, LossReason, RunningEpisode
from marlvec.collect.metrics import EpisodeRecord
from marlvec.trees import tree_leaves
from marlvec.vector.settings import env_seeds
from tests.collect.players import build, choose
from tests.vector.support.drivers import Driver, News, driver_of

# --- A collector that is slow and obviously right: plain Python, one env at a time, dicts, the envs' own APIs


Seen = tuple[Any, Any]  # one agent's observation and action mask (or None)


def seen_by(news: News) -> dict[int, Seen]:
    """What each agent sees that must act now."""
    return {a: (news.obs[a], news.masks.get(a)) for a in sorted(news.acting)}


@dataclass
class Row:
    """One decision."""

    env: int
    agent: int
    eps_id: int
    t: int
    policy: str
    obs: Any
    mask: Any
    action: int
    sent: int
    env_t: int
    next_env_t: int = -1
    reward: float = 0.0
    next_obs: Any = None
    next_mask: Any = None
    terminated: bool = False
    truncated: bool = False
    missing: bool = False


@dataclass
class Record:
    """One finished episode."""

    eps_id: int
    env: int
    number: int
    length: int
    returns: list[float]
    decisions: list[int]
    present: list[bool]
    truncated: list[bool]
    policies: tuple[str, ...]


@dataclass
class World:
    """One env and the episode it is in."""

    env: int
    driver: Driver
    names: Sequence[str]
    eps_id: int = -1
    number: int = -1
    length: int = 0
    acting: dict[int, Seen] = field(default_factory=dict)
    open: dict[int, Row] = field(default_factory=dict)
    owed: dict[int, float] = field(default_factory=dict)
    returns: dict[int, float] = field(default_factory=dict)
    decisions: dict[int, int] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    truncated: set[int] = field(default_factory=set)
    policies: tuple[str, ...] = ()
    steps: int = 0
    stepped: int = 0
    begun: int = 0  # episodes, since the last reset of all
    counted: int = 0  # env steps of the running episode that batches have counted


Mapping = Callable[[str, int, int], str]  # agent name, env, number of the episode → policy id


class Reference:
    """What a collector should give.

    Args:
        kind: Which env.
        num_envs, agent_num, seed: As the collector's.
        mapping: Who plays whom.
        salts: Policy id to its `choose` salt; in the order of the collector's policies.
        see: What the agent connectors make of an observation.
        worth: What they make of a reward.
        send: What the action connectors make of an action.
        learns: Which policies get batches.
        stream: Where ids begin.

    Attributes:
        made, decided: Env steps and decisions of all envs, from the start.
        lost_steps, lost_rows: Those of them that no batch will ever hold.
        faulty, restarted: Episodes lost, by why; here nobody dies.
        told: Rounds of steps of which at least one was not lost.
        calls: By policy, the (env, agent) pairs of each call.
        paid: By episode, the rewards of each step.
        lost: By episode that was lost: why.
    """

    def __init__(
        self,
        kind: str,
        num_envs: int,
        agent_num: int,
        seed: int,
        *,
        mapping: Mapping,
        salts: dict[str, int],
        see: Callable[[Any], Any] = lambda obs: obs,
        worth: Callable[[float], float] = lambda reward: reward,
        send: Callable[[int], int] = lambda action: action,
        learns: Callable[[str], bool] = lambda policy: True,
        stream: int = 0,
    ) -> None:
        self.mapping, self.salts, self.see, self.worth, self.send = mapping, salts, see, worth, send
        self.learns = learns
        self.made = self.decided = self.lost_steps = self.lost_rows = 0
        self.handed_steps = self.handed_rows = self.faulty = self.restarted = 0
        self.num_envs, self.first_id, self.most_begun = num_envs, stream << 43, 0
        self.unroll_count, self.ticks, self.told, self.results = stream << 43, 0, 0, 0
        self.calls: dict[str, list[list[tuple[int, int]]]] = {policy: [] for policy in salts}
        self.paid: dict[int, list[list[float]]] = {}
        self.lost: dict[int, str] = {}
        self.records: list[Record] = []
        self.closed: list[tuple[int, Row]] = []  # tick and row, not handed out
        self.finished: list[Record] = []  # not handed out
        self.seed, self.begun = seed, False
        self.worlds = []
        for i in range(num_envs):
            env = build(kind, i, agent_num)
            self.worlds.append(World(i, driver_of(env), env.possible_agents))

    def _begin(self, world: World, seed: int | None) -> None:
        news = world.driver.reset(seed, None)
        world.number, world.length, world.counted = world.number + 1, 0, 0
        world.eps_id = self.first_id + world.begun * self.num_envs + world.env
        world.begun += 1
        self.most_begun = max(self.most_begun, world.begun)
        world.open, world.owed, world.returns, world.decisions = {}, {}, {}, {}
        world.acting, world.present, world.truncated = seen_by(news), set(news.alive), set()
        world.policies = tuple(self.mapping(name, world.env, world.number) for name in world.names)
        self.paid[world.eps_id] = []

    def reset(self, seed: int | None) -> None:
        """Begin anew everywhere; what was not handed out is lost."""
        if not self.begun:
            self.begun, seed = True, self.seed if seed is None else seed
        self.lost_steps, self.lost_rows = self.made - self.handed_steps, self.decided - self.handed_rows
        self.closed, self.finished = [], []
        self.first_id, self.most_begun = self.first_id + self.most_begun * self.num_envs, 0
        seeds: Sequence[int | None] = [None] * self.num_envs if seed is None else env_seeds(seed, self.num_envs)
        for world in list(self.worlds):
            if world.eps_id >= 0:
                self.lost[world.eps_id] = "reset"
            world.steps = world.stepped = world.begun = 0
            if seed is not None:
                world.number = -1
            self._begin(world, seeds[world.env])

    def _step(self, world: World) -> bool:
        """Step one env; returns whether its episode ended."""
        self.made += 1
        self.decided += len(world.acting)
        actions = {}
        for agent, (obs, mask) in world.acting.items():
            policy = world.policies[agent]
            action = choose(self.salts[policy], self.see(obs), mask)
            t = world.decisions.get(agent, 0)
            world.decisions[agent] = t + 1
            actions[agent] = self.send(action)
            seen = self.see(obs)
            world.open[agent] = Row(
                world.env, agent, world.eps_id, t, policy, seen, mask, action, actions[agent], world.length
            )
        news = world.driver.step(actions)
        world.length += 1
        world.steps += 1
        world.present |= news.alive | set(news.ended)
        for agent, reward in news.rewards.items():
            world.owed[agent] = world.owed.get(agent, 0.0) + reward
            world.returns[agent] = world.returns.get(agent, 0.0) + reward
        self.paid[world.eps_id].append([news.rewards.get(a, 0.0) for a in range(len(world.names))])
        for agent, (terminated, truncated) in news.ended.items():
            self._close(world, agent, news.obs.get(agent), None, terminated=terminated, truncated=truncated)
            world.truncated |= {agent} if truncated and not terminated else set()
        world.acting = seen_by(news)
        for agent, (obs, mask) in world.acting.items():
            self._close(world, agent, obs, mask, terminated=False, truncated=False)
        self.results += 1
        return not news.alive

    def _close(self, world: World, agent: int, obs: Any, mask: Any, *, terminated: bool, truncated: bool) -> None:
        row = world.open.pop(agent, None)
        if row is None:
            return
        row.reward, row.missing = self.worth(world.owed.pop(agent, 0.0)), obs is None
        row.next_obs = row.obs if row.missing else self.see(obs)
        if row.mask is not None:
            row.next_mask = np.ones_like(row.mask) if terminated or truncated else mask
        row.terminated, row.truncated, row.next_env_t = terminated, truncated, world.length
        self.closed.append((self.ticks, row))

    def _tick(self, k: int) -> None:
        """Step the k envs that have waited longest."""
        self.ticks += 1
        order = sorted(self.worlds, key=lambda world: (world.stepped, world.steps, world.env))[:k]
        order.sort(key=lambda world: world.env)
        for policy, calls in self.calls.items():
            asked = [(w.env, a) for w in order for a in sorted(w.acting) if w.policies[a] == policy]
            calls += [asked] if asked else []
        before = self.results
        for world in order:
            world.stepped = self.ticks
            if self._step(world):
                assert not world.open
                seats = range(len(world.names))
                record = Record(
                    world.eps_id,
                    world.env,
                    world.number,
                    world.length,
                    [world.returns.get(a, 0.0) for a in seats],
                    [world.decisions.get(a, 0) for a in seats],
                    [a in world.present for a in seats],
                    [a in world.truncated for a in seats],
                    world.policies,
                )
                self.records.append(record)
                self.finished.append(record)
                self._begin(world, None)
        self.told += self.results > before

    # --- what collect() should return: (rows by policy, env steps)

    def truncate(self, unit: str, amount: int) -> tuple[dict[str, list[Row]], int]:
        if not self.begun:
            self.reset(None)
        before, episodes = self.made - self.lost_steps, len(self.records)
        while True:
            steps = self.made - self.lost_steps - before
            n, agents = len(self.worlds), len(self.worlds[0].names)
            if unit == "env_steps":
                lacking = amount - steps
            elif unit == "agent_steps":
                lacking = -(-(amount - len(self.closed)) // agents)
            else:
                lacking = n if len(self.records) - episodes < amount else 0
            if lacking <= 0:
                break
            self._tick(min(n, lacking))
        take = self.closed
        if unit == "agent_steps":
            take = sorted(take, key=lambda item: (item[0], item[1].env, item[1].agent))[:amount]
        chosen = {id(row) for _, row in take}
        self.closed = [item for item in self.closed if id(item[1]) not in chosen]
        for world in self.worlds:
            world.counted = world.length
        return self._hand_out([row for _, row in take], steps)

    def complete(self, unit: str, amount: int) -> tuple[dict[str, list[Row]], int]:
        def measure(record: Record) -> int:
            return {"env_steps": record.length, "agent_steps": sum(record.decisions), "episodes": 1}[unit]

        if not self.begun:
            self.reset(None)
        while sum(map(measure, self.finished)) < amount:
            self._tick(len(self.worlds))
        taken: list[Record] = []
        while sum(map(measure, taken)) < amount:
            taken.append(self.finished.pop(0))
        ids = {record.eps_id for record in taken}
        rows = [row for _, row in self.closed if row.eps_id in ids]
        self.closed = [item for item in self.closed if item[1].eps_id not in ids]
        return self._hand_out(rows, sum(record.length for record in taken))

    def _hand_out(self, rows: list[Row], steps: int) -> tuple[dict[str, list[Row]], int]:
        self.handed_steps += steps
        self.handed_rows += len(rows)
        found = {policy: [row for row in rows if row.policy == policy] for policy in self.salts}
        for own in found.values():
            own.sort(key=lambda row: (row.env, row.agent, row.eps_id, row.t))
        return {policy: own for policy, own in found.items() if own}, steps

    def unroll_ids(self, rows: list[Row]) -> list[int]:
        """Fragments' numbers of sorted rows; call once per policy, in order."""
        ids, last = [], None
        for row in rows:
            if (row.env, row.agent, row.eps_id) != last:
                last = (row.env, row.agent, row.eps_id)
                self.unroll_count += 1
            ids.append(self.unroll_count - 1)
        return ids


def same_batch(got: MultiAgentBatch, want: MultiAgentBatch) -> None:
    """Check that two batches are equal bit for bit, ids and order included."""
    assert (got.env_steps, got.agent_steps, list(got)) == (want.env_steps, want.agent_steps, list(want))
    for policy, rows in want.items():
        assert list(got[policy].keys()) == list(rows.keys())
        for name, column in rows.items():
            for (path, leaf), (other, own) in zip(tree_leaves(got[policy][name]), tree_leaves(column), strict=True):
                assert path == other
                np.testing.assert_array_equal(leaf, own, err_msg=f"{policy} {name} {path}", strict=True)


def check_rows(batch: Any) -> None:
    """Check that rows of one lane and episode follow each other: what came next is what the next row saw."""
    for rows in batch.values():
        order = np.lexsort((rows["t"], rows["agent_index"], rows["eps_id"]))
        obs, after = rows["obs"][order], rows["next_obs"][order]
        same = (np.diff(rows["eps_id"][order]) == 0) & (np.diff(rows["agent_index"][order]) == 0)
        assert (np.diff(rows["t"][order])[same] == 1).all()
        np.testing.assert_array_equal(after[:-1][same], obs[1:][same])


def check_batch(reference: Reference, batch: Any, expected: tuple[dict[str, list[Row]], int]) -> None:
    """Compare a batch with the reference's, row for row and column for column."""
    policies, env_steps = expected
    learning = [policy for policy in policies if reference.learns(policy)]
    assert list(batch) == learning
    assert batch.env_steps == env_steps
    assert batch.agent_steps == sum(map(len, policies.values()))
    for policy in learning:
        rows = policies[policy]
        own = batch[policy]
        columns: dict[str, list[Any]] = {
            "obs": [row.obs for row in rows],
            "actions": [row.action for row in rows],
            "actions_for_env": [row.sent for row in rows],
            "rewards": [row.reward for row in rows],
            "next_obs": [row.next_obs for row in rows],
            "terminated": [row.terminated for row in rows],
            "truncated": [row.truncated for row in rows],
            "next_obs_missing": [row.missing for row in rows],
            "t": [row.t for row in rows],
            "env_t": [row.env_t for row in rows],
            "next_env_t": [row.next_env_t for row in rows],
            "eps_id": [row.eps_id for row in rows],
            "unroll_id": reference.unroll_ids(rows),
            "env_id": [row.env for row in rows],
            "agent_index": [row.agent for row in rows],
            "policy_version": [0] * len(rows),
            "seen": [row.obs.sum() for row in rows],
            "salt": [reference.salts[policy]] * len(rows),
        }
        if "actions_executed" in own:  # its action connectors count as choices
            columns["actions_executed"] = [row.sent for row in rows]
        if rows[0].mask is not None:
            columns["action_mask"] = [row.mask for row in rows]
            columns["next_action_mask"] = [row.next_mask for row in rows]
        assert set(own.keys()) == set(columns)
        for name, values in columns.items():
            np.testing.assert_array_equal(own[name], np.array(values), err_msg=f"{policy} {name}", strict=True)


# --- A callback that keeps all it is told, and holds it against metrics and reference


class Life:
    """One episode, as it was told."""

    def __init__(self, episode: RunningEpisode) -> None:
        self.episode = episode
        self.stage = "created"
        self.rewards: list[list[float]] = []
        self.ended: set[int] = set()
        self.record: EpisodeRecord | None = None
        self.why: LossReason | None = None

    def come_to(self, stage: str, *before: str) -> None:
        assert self.stage in before, f"{self.episode} came from {self.stage} to {stage}"
        self.stage = stage


class Spy(Callback):
    """Keeps all it is told, and objects to what comes out of turn.

    Attributes:
        lives: eps_id → what was told of the episode.
        running: env id → the episode it is in.
        calls: How often each hook was called.
    """

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.running: dict[int, Life] = {}
        self.calls = dict.fromkeys(HOOKS, 0)

    def on_episode_created(self, episode: RunningEpisode) -> None:
        self.calls["on_episode_created"] += 1
        assert episode.eps_id not in self.lives
        assert episode.env_id not in self.running
        self.lives[episode.eps_id] = self.running[episode.env_id] = Life(episode)

    def on_episode_start(self, episode: RunningEpisode) -> None:
        self.calls["on_episode_start"] += 1
        self._life(episode).come_to("started", "created")

    def on_episode_step(self, step: EpisodeStep) -> None:
        self.calls["on_episode_step"] += 1
        assert len(step) > 0
        assert (np.diff(step.env_ids) > 0).all()
        assert [episode.env_id for episode in step.episodes] == step.env_ids.tolist()
        for k, episode in enumerate(step.episodes):
            life = self._life(episode)
            life.come_to("last step" if step.done[k] else "stepped", "started", "stepped")
            life.rewards.append(step.rewards[k].tolist())
            ended = set(np.flatnonzero(step.terminated[k] | step.truncated[k]).tolist())
            assert not ended & life.ended
            life.ended |= ended

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self.calls["on_episode_end"] += 1
        life = self._life(episode)
        life.come_to("ended", "last step")
        life.record = record
        del self.running[episode.env_id]

    def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
        self.calls["on_episode_lost"] += 1
        life = self._life(episode)
        life.come_to("lost", "created", "started", "stepped")
        life.why = why
        del self.running[episode.env_id]

    def on_sample_end(self, batch: Any, metrics: Any) -> None:
        self.calls["on_sample_end"] += 1

    def _life(self, episode: RunningEpisode) -> Life:
        life = self.running[episode.env_id]
        assert life.episode is episode
        return life

    def check(self, collector: Collector) -> None:
        """Check that what was told adds up to what the metrics say."""
        metrics = collector.metrics
        ended = [life for life in self.lives.values() if life.record is not None]
        reasons = [life.why for life in self.lives.values()]
        assert metrics.episodes_total == len(ended)
        assert metrics.episodes_faulty == reasons.count("fault")
        assert metrics.episodes_restarted == reasons.count("restart")
        assert len(self.lives) == len(ended) + len(self.running) + sum(why is not None for why in reasons)
        failed = metrics.episodes_faulty + metrics.episodes_restarted  # the step in which it was lost is one, too
        assert metrics.env_steps == sum(len(life.rewards) for life in self.lives.values()) + failed
        known = {record.eps_id: record for record in metrics.episodes}
        for life in ended:
            record, episode = life.record, life.episode
            assert record is not None
            assert (record.eps_id, record.env_id, record.number) == (episode.eps_id, episode.env_id, episode.number)
            assert record.policies == episode.policies
            assert record.length == len(life.rewards)
            assert record.returns_A.tolist() == np.sum(life.rewards, axis=0).tolist()
            assert set(np.flatnonzero(record.present_A).tolist()) == life.ended
            assert known.get(record.eps_id, record) is record

    def check_against(self, reference: Reference) -> None:
        """Check that what was told is what the reference did."""
        assert {eps_id: life.rewards for eps_id, life in self.lives.items()} == reference.paid
        assert {eps_id: life.why for eps_id, life in self.lives.items() if life.why} == reference.lost
        for world in reference.worlds:
            life = self.running[world.env]
            assert life.stage in ("started", "stepped")
            assert (life.episode.eps_id, life.episode.number) == (world.eps_id, world.number)
            assert life.episode.policies == world.policies
        assert len(self.running) == len(reference.worlds)

    def story(self) -> list[Any]:
        """Return all that was told, to be compared with another's; times are left out."""
        return [
            (str(life.episode), life.episode.policies, life.stage, life.why, sorted(life.ended), life.rewards)
            for life in self.lives.values()
        ]
