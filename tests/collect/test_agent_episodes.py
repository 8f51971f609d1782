"""Episodes as values, against plain dicts of rows that a slow reference collected."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, MultiAgentBatch, MultiAgentEpisode, SingleAgentEpisode
from marlvec.connectors import AddLastObs, NStep, PadSequences
from marlvec.errors import ArgumentError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.testing.scripted import CounterEnv, SampledEnv, Script, ScriptedParallelEnv
from marlvec.trees import tree_leaves
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.plans import SALTS, by_agent, by_episode, given_mapping, one
from tests.collect.players import KINDS, MODES, EchoPolicy, sync
from tests.collect.reference import Reference, Row

FILL = -7


def collector_of(envs: Any, mapping: Any, seed: int, batch_mode: str = "complete") -> Collector:
    policies = {name: EchoPolicy(salt) for name, salt in SALTS.items()}
    return Collector(envs, policies, given_mapping(mapping, envs.agents), seed=seed, batch_mode=batch_mode)


def collected(
    kind: str, mapping: Any, seed: int, mode: str, num_envs: int, agent_num: int, episodes: int
) -> tuple[MultiAgentBatch, tuple[str, ...], list[Row]]:
    """A batch of whole episodes, agent names, and the reference's rows."""
    with sync(kind, num_envs, agent_num, mode) as envs:
        batch = collector_of(envs, mapping, seed).collect(episodes=episodes)
        reference = Reference(kind, num_envs, agent_num, seed, mapping=mapping, salts=SALTS)
        policies, _ = reference.complete("episodes", episodes)
        return batch, envs.agents, [row for rows in policies.values() for row in rows]


def assert_same(one: Any, other: Any, leave_out: tuple[str, ...] = ()) -> None:
    """The same episode to the bit, dtypes and order of columns included."""

    def compare(a: Any, b: Any, where: str) -> None:
        assert type(a) is type(b), where
        if isinstance(a, dict):
            assert list(a) == list(b), where
            for key in a:
                if key not in leave_out:
                    compare(a[key], b[key], f"{where}/{key}")
        elif isinstance(a, (list, tuple)):
            assert len(a) == len(b), where
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{where}/{i}")
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=where, strict=True)
        else:
            assert a == b, where

    compare(one.state_dict(), other.state_dict(), "")


class Dicts:
    """An episode as dicts: what an agent decided and saw at which env step."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: (row.agent, row.t))
        self.decision = {(row.agent, row.env_t): row for row in rows}
        self.seen = {(row.agent, row.next_env_t): row.next_obs for row in rows if not row.missing}
        self.seen |= {(row.agent, row.env_t): row.obs for row in rows}
        self.start = min(row.env_t for row in rows)
        self.stop = max(row.next_env_t for row in rows)

    def decided(self, agent_num: int, start: int, stop: int) -> list[list[bool]]:
        return [[(a, e) in self.decision for a in range(agent_num)] for e in range(start, stop)]

    def obs(self, agent: int, start: int, stop: int) -> Any:
        return np.array([self.seen.get((agent, e), np.full(7, float(FILL))) for e in range(start, stop)]).reshape(-1, 7)

    def rewards(self, agent: int, start: int, stop: int) -> Any:
        found = [self.decision.get((agent, e)) for e in range(start, stop)]
        return np.array([FILL if row is None else row.reward for row in found], np.float64)

    def own(self, agent: int) -> list[Row]:
        return [row for row in self.rows if row.agent == agent]


def by_id(rows: list[Row]) -> dict[int, Dicts]:
    return {i: Dicts([row for row in rows if row.eps_id == i]) for i in sorted({row.eps_id for row in rows})}


WORLDS: dict[str, Any] = {
    "mapping": st.sampled_from([one, by_agent, by_episode]),
    "seed": st.integers(0, 10_000),
    "mode": st.sampled_from(MODES),
    "num_envs": st.integers(1, 3),
    "agent_num": st.integers(1, 4),
    "episodes": st.integers(1, 5),
}


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.checklist(108)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(**WORLDS, span=st.tuples(st.integers(-3, 9), st.integers(-3, 9)))
def test_agents_stand_side_by_side_whenever_they_act_come_and_go(
    kind: str, span: tuple[int, int], **world: Any
) -> None:
    batch, agents, rows = collected(kind, **world)
    found = batch.episodes(agents)
    expected = by_id(rows)
    assert [episode.eps_id for episode in found] == list(expected)
    for episode, want in zip(found, expected.values(), strict=True):
        a_num = len(agents)
        assert (episode.env_start, episode.env_stop, len(episode)) == (want.start, want.stop, want.stop - want.start)
        assert episode.decided().tolist() == want.decided(a_num, want.start, want.stop)
        start, stop = span
        assert episode.decided(start, stop).tolist() == want.decided(a_num, start, stop)
        obs, rewards = episode.at("obs", start, stop, fill=FILL), episode.at("rewards", start, stop, fill=FILL)
        assert obs.shape == (max(0, stop - start), a_num, 7)
        for a, name in enumerate(agents):
            np.testing.assert_array_equal(obs[:, a], want.obs(a, start, stop), strict=True)
            np.testing.assert_array_equal(rewards[:, a], want.rewards(a, start, stop), strict=True)
            for track in episode.episodes_of(name):
                check_track(track, want.own(a))
                own = episode.at("obs", start, stop, agent=name, fill=FILL)
                np.testing.assert_array_equal(own, want.obs(a, start, stop), strict=True)


def check_track(track: SingleAgentEpisode, own: list[Row]) -> None:
    """All that an agent did in an episode, in its own time."""
    assert (len(track), track.first_t, track.policy_id) == (len(own), 0, own[0].policy)
    assert track.env_t.tolist() == [own[0].env_t, *(row.next_env_t for row in own)]
    np.testing.assert_array_equal(track["obs"], np.array([own[0].obs, *(row.next_obs for row in own)]), strict=True)
    assert track["rewards"].tolist() == [row.reward for row in own]
    assert track["actions_for_env"].tolist() == [row.sent for row in own]
    assert (track.terminated, track.truncated) == (own[-1].terminated, own[-1].truncated)
    assert track.has_last_obs is not own[-1].missing
    assert track.is_done
    got = track.get("rewards", -2, len(own) + 2, fill=FILL)
    assert got.tolist() == [FILL, FILL, *(row.reward for row in own), FILL, FILL]
    assert track.get("t", 1).tolist() == list(range(1, len(own)))
    assert track.get("obs", stop=1).tolist() == [own[0].obs.tolist()]


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=8)
@pytest.mark.checklist(111)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(**WORLDS, lookback=st.integers(0, 4), again=st.integers(0, 4), further=st.integers(0, 4))
def test_cut_and_concat_are_inverse_at_every_step(
    kind: str, lookback: int, again: int, further: int, **world: Any
) -> None:
    batch, agents, rows = collected(kind, **world)
    expected = by_id(rows)
    for episode in batch.episodes(agents):
        want = expected[episode.eps_id]
        for step in range(want.start - 1, want.stop + 2):
            head, tail = episode.cut(step, lookback)
            assert (head is None) is (step < min(row.next_env_t for row in want.rows))
            assert (tail is None) is (step >= want.stop)
            for part, closed in ((head, True), (tail, False)):
                got = [] if part is None else [(t.agent_index, n) for t in part.agent_episodes for n in t["t"].tolist()]
                assert got == [(row.agent, row.t) for row in want.rows if (row.next_env_t <= step) is closed]
            if head is None or tail is None:
                assert_same(head or tail, episode)
                continue
            assert_same(head.concat(tail), episode)
            for track in tail.agent_episodes:
                before = [row for row in want.own(track.agent_index) if row.next_env_t <= step]
                check_lookback(track, before, lookback)
            # What is cut again and put together again is what it was, lookbacks and all.
            first, second = tail.cut(step + further, again)
            whole = first if second is None else second if first is None else first.concat(second)
            assert whole is not None
            assert_same(whole, tail)
            assert_same(head.concat(whole), episode)


def check_lookback(track: SingleAgentEpisode, before: list[Row], lookback: int) -> None:
    carried = before[max(0, len(before) - lookback) :]
    assert track.lookback == len(carried)
    got = track.get("rewards", -lookback - 1, 0, fill=FILL).tolist()
    assert got == [FILL] * (lookback + 1 - len(carried)) + [row.reward for row in carried]
    for k, row in enumerate(reversed(carried), start=1):
        np.testing.assert_array_equal(track.get("obs", -k, 1 - k)[0], row.obs)
        np.testing.assert_array_equal(track.at("obs", row.env_t, row.env_t + 1)[0], row.obs)
    assert len(track.rows()["t"]) == len(track) == len(track["actions"]) == len(track["obs"]) - 1


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(111)
@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    **WORLDS,
    span=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    lookback=st.integers(0, 3),
)
def test_a_slice_is_two_cuts(span: tuple[int, int], lookback: int, **world: Any) -> None:
    batch, agents, rows = collected(**world)
    expected = by_id(rows)
    for episode in batch.episodes(agents):
        part = episode.slice(*span, lookback)
        got = [] if part is None else [(t.agent_index, n) for t in part.agent_episodes for n in t["t"].tolist()]
        want = [r for r in expected[episode.eps_id].rows if span[0] < r.next_env_t <= span[1]]
        assert got == [(row.agent, row.t) for row in want]


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(108)
@pytest.mark.checklist(111)
@settings(max_examples=40)
@given(kind=st.sampled_from(sorted(KINDS)), **WORLDS, size=st.integers(1, 9))
def test_batches_cut_an_episode_as_cut_does(size: int, **world: Any) -> None:
    """Collected piece by piece and put together, episodes are those of a collector that delivers them whole."""
    kind, mapping, seed, agent_num = (world[key] for key in ("kind", "mapping", "seed", "agent_num"))
    with sync(kind, 1, agent_num, world["mode"]) as envs:
        whole = collector_of(envs, mapping, seed).collect(episodes=world["episodes"]).episodes(envs.agents)
    pieces: dict[int, MultiAgentEpisode] = {}
    with sync(kind, 1, agent_num, world["mode"]) as envs:
        collector = collector_of(envs, mapping, seed, "truncate")
        while collector.metrics.episodes_total < world["episodes"]:
            for piece in collector.collect(env_steps=size).episodes(envs.agents):
                before = pieces.get(piece.eps_id)
                pieces[piece.eps_id] = piece if before is None else before.concat(piece)
    for episode in whole:
        assert_same(pieces[episode.eps_id], episode, leave_out=("unroll_id",))


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(111)
@settings(max_examples=40)
@given(kind=st.sampled_from(sorted(KINDS)), **WORLDS, lookback=st.integers(0, 2))
def test_batches_and_plain_data_come_back_to_the_bit(lookback: int, **world: Any) -> None:
    batch, agents, _ = collected(**world)
    episodes = batch.episodes(agents)
    again = MultiAgentBatch.of_episodes(episodes[::-1], batch.env_steps)
    assert (set(again), again.env_steps, again.agent_steps) == (set(batch), batch.env_steps, batch.agent_steps)
    for policy_id, rows in batch.items():
        assert set(again[policy_id].keys()) == set(rows.keys())
        for name, column in rows.items():
            np.testing.assert_array_equal(again[policy_id][name], column, err_msg=name, strict=True)
    for episode in episodes:
        for part in (episode, *episode.cut(2, lookback)):
            if part is not None:
                state = part.state_dict()
                assert_same(MultiAgentEpisode.from_state_dict(state), part)
                assert_plain(state)
                for _, leaf in tree_leaves(state["agent_episodes"][0]["moments"]):
                    leaf[...] = 0  # a copy: the episode does not change
        assert_same(episode, next(e for e in batch.episodes(agents) if e.eps_id == episode.eps_id))


def assert_plain(data: Any) -> None:
    """Nothing that needs a pickle to be written down."""
    if isinstance(data, dict):
        assert all(type(key) is str for key in data)
        for item in data.values():
            assert_plain(item)
    elif isinstance(data, list):
        for item in data:
            assert_plain(item)
    else:
        assert type(data) in (int, str, type(None)) or (type(data) is np.ndarray and not data.dtype.hasobject)


# --- ids


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.checklist(111)
@pytest.mark.parametrize("mode", MODES)
def test_ids_are_unique_come_from_the_seed_and_leave_global_streams_alone(mode: str) -> None:
    def play(seed: int) -> list[tuple[int, int]]:
        with sync("keyed", 3, 2, mode) as envs:
            collector = collector_of(envs, by_episode, seed, "truncate")
            found = [(e.eps_id, e.env_id) for _ in range(4) for e in collector.collect(env_steps=30).episodes()]
            collector.reset(seed=seed)  # ids go on: what was collected before is not mistaken for what comes
            after = [(e.eps_id, e.env_id) for e in collector.collect(env_steps=30).episodes()]
            assert not {i for i, _ in found} & {i for i, _ in after}
            return found + after

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002, the global stream is what this is about
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = play(3)
    assert found == play(3)
    assert len({eps_id for eps_id, _ in found}) == len(set(found))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


# --- any spaces, several tracks, wrong calls


@pytest.mark.parametrize(
    "space",
    [
        Discrete(7, start=-3),
        Dict(a=Box(-1, 1, (0,)), b=Tuple((Discrete(3), Box(-1, 1, (2,), np.float16)))),
        Dict(word=Text(5), at=Box(0, 255, (2, 2), np.uint8)),
    ],
)
def test_any_space(space: Any) -> None:
    with SyncVectorEnv([lambda: SampledEnv(space, Discrete(3))]) as envs:
        batch = Collector(envs, RandomPolicy(), batch_mode="complete", seed=0).collect(episodes=2)
    for episode in batch.episodes():
        head, tail = episode.cut(2, lookback=1)
        assert head is not None
        assert tail is not None
        assert_same(head.concat(tail), episode)
        assert_same(MultiAgentEpisode.from_state_dict(episode.state_dict()), episode)
        for (path, leaf), (other, row) in zip(
            tree_leaves(episode.at("obs", 0, 1)), tree_leaves(episode.agent_episodes[0]["obs"]), strict=True
        ):
            assert path == other
            assert leaf.dtype == row.dtype
            assert np.array_equal(leaf[0, 0], row[0])


def test_a_change_of_policy_begins_a_new_track() -> None:
    with SyncVectorEnv([lambda: CounterEnv(9, agent_num=2)]) as envs:
        policies = {name: EchoPolicy(salt) for name, salt in SALTS.items()}
        collector = Collector(envs, policies, "first", seed=0)
        early = collector.collect(env_steps=4)
        rest = collector.collect(env_steps=5)
        late = MultiAgentBatch({"second": rest["first"]}, env_steps=5)
    (first,), (second,) = early.episodes(), late.episodes()
    whole = first.concat(second)
    assert [(t.agent_index, t.policy_id, t.first_t, len(t)) for t in whole.agent_episodes] == [
        (0, "first", 0, 4),
        (0, "second", 4, 5),
        (1, "first", 0, 4),
        (1, "second", 4, 5),
    ]
    assert whole.decided().all()
    np.testing.assert_array_equal(whole.at("obs")[:, 0, 3], np.arange(10))
    for step in range(1, 9):
        head, tail = whole.cut(step, lookback=2)
        assert head is not None
        assert tail is not None
        assert_same(head.concat(tail), whole)


def counted(**options: Any) -> MultiAgentEpisode:
    with SyncVectorEnv([lambda: CounterEnv(6, agent_num=2)]) as envs:
        policy = FunctionPolicy(lambda rows: np.ones(len(rows), np.int64))
        collector = Collector(envs, policy, batch_mode="complete", seed=0, **options)
        return collector.collect(episodes=1).episodes(envs.agents)[0]


@pytest.mark.checklist(111)
def test_missing_entries_are_filled_or_raise() -> None:
    episode = counted()
    track = episode.agent_episodes[0]
    assert track.get("rewards", 2, 4).shape == (2,)
    assert track.get("rewards", 4, 2).shape == (0,)
    assert track.get("obs", 6).shape == (1, track["obs"].shape[1])
    with pytest.raises(IndexError, match="'rewards' of agent 0, -1 to 2: nothing is there at 1 of 3 places"):
        track.get("rewards", -1, 2)
    with pytest.raises(IndexError, match="fill="):
        track.get("rewards", 0, 7)
    with pytest.raises(IndexError, match="fill="):
        episode.at("rewards")  # the last env step has observations only
    assert episode.at("rewards", stop=6).shape == (6, 2)
    with pytest.raises(ArgumentError, match=r"int64, which cannot hold fill=0\.5"):
        track.get("actions", 0, 9, fill=0.5)
    with pytest.raises(ArgumentError, match="cannot hold fill=nan"):
        track.get("t", 0, 9, fill=np.nan)
    assert track.get("truncated", 5, 7, fill=False).tolist() == [True, False]
    assert np.isnan(track.get("rewards", 5, 7, fill=np.nan)[1])
    with pytest.raises(KeyError, match="no column 'logp'; the columns are"):
        track.get("logp")
    for wrong in (1.5, "2", True):
        with pytest.raises(ArgumentError, match="must be a whole number"):
            track.get("rewards", wrong)
        with pytest.raises(ArgumentError, match="must be a whole number"):
            episode.cut(wrong)
    with pytest.raises(ArgumentError, match="lookback must be at least 0"):
        episode.cut(2, -1)
    with pytest.raises(KeyError, match="no agent 'nobody'"):
        episode.episodes_of("nobody")
    with pytest.raises(KeyError, match="no agent 2"):
        episode.at("obs", agent=2)


def test_an_agent_without_rows_is_filled_in() -> None:
    script = Script([0, None], [3, 1], ["terminated", "terminated"])
    with SyncVectorEnv([lambda: ScriptedParallelEnv(script, agent_num=2)]) as envs:
        batch = Collector(envs, RandomPolicy(), batch_mode="complete", seed=0).collect(episodes=1)
        (episode,) = batch.episodes(envs.agents)
    assert episode.episodes_of("agent_1") == ()
    rewards = episode.at("rewards", stop=3, fill=np.nan)
    assert np.isnan(rewards).tolist() == [[False, True]] * 3
    with pytest.raises(IndexError, match="not all agents have rows"):
        episode.at("rewards", stop=3)
    with pytest.raises(IndexError, match="agent 1 has no rows"):
        episode.at("rewards", agent="agent_1", fill=0)
    assert batch.episodes()[0].agent_num == 1


@pytest.mark.checklist(111)
def test_only_parts_that_follow_on_one_another_are_joined() -> None:
    episode = counted()
    head, tail = episode.cut(3)
    assert head is not None
    assert tail is not None
    middle, end = tail.cut(4, lookback=1)
    assert middle is not None
    assert end is not None
    for one_, other, problem in (
        (head, end, "has a lookback that is not in the part before it"),
        (tail, head, "more than once"),
        (head, head, "more than once"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            one_.concat(other)
    spoilt = MultiAgentEpisode.from_state_dict(tail.state_dict())
    spoilt.agent_episodes[1].whole("obs")[0] += 1
    with pytest.raises(ArgumentError, match="does not begin at the moment at which"):
        head.concat(spoilt)
    stranger = MultiAgentEpisode(episode.eps_id + 1, 0, tail.agent_episodes, tail.agents)
    with pytest.raises(ArgumentError, match="expected a part of eps_id 0"):
        head.concat(stranger)


def test_rows_that_are_no_single_decisions_any_more_are_refused() -> None:
    for chain, problem in (([NStep(2)], "is not the .* of its next one"), ([PadSequences(3)], "of sequences")):
        with pytest.raises(ArgumentError, match=problem):
            counted(learner_connectors=chain)
    assert_same(counted(learner_connectors=[AddLastObs()]).cut(9)[0], counted(learner_connectors=[AddLastObs()]))
    with SyncVectorEnv([lambda: CounterEnv(6, agent_num=2)]) as envs:
        batch = Collector(envs, RandomPolicy(), seed=0).collect(env_steps=9)
    doubled = MultiAgentBatch.concat([batch, batch])
    with pytest.raises(ArgumentError, match="more than once"):
        doubled.episodes()
    bare = batch.map(lambda rows: rows.drop("env_t"))
    with pytest.raises(ArgumentError, match="needs a column 'env_t'"):
        bare.episodes()
    shuffled = batch.map(lambda rows: rows.shuffle(1))
    for one_, other in zip(shuffled.episodes(), batch.episodes(), strict=True):
        assert_same(one_, other)


def test_phantom_rows_are_no_decisions() -> None:
    plain, spread = counted(), counted(learner_connectors=[AddLastObs()])
    assert [len(track) for track in spread.agent_episodes] == [len(track) for track in plain.agent_episodes] == [6, 6]


def test_how_they_look() -> None:
    _, tail = counted().cut(2, lookback=1)
    assert repr(tail).splitlines() == [
        "MultiAgentEpisode 0 of env 0, env steps 2 to 6",
        "  SingleAgentEpisode(agent 0 by 'main': 4 decisions from t=2 in env steps 2 to 6, truncated, lookback 1)",
        "  SingleAgentEpisode(agent 1 by 'main': 4 decisions from t=2 in env steps 2 to 6, truncated, lookback 1)",
    ]
