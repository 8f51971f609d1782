"""Logged episodes come out as they went in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import Collector, FunctionPolicy, MultiAgentBatch, SampleBatch, external
from marlvec.connectors import RnnState
from marlvec.errors import ArgumentError, CheckpointError, DriverGone
from marlvec.external import replay
from marlvec.testing.scripted import Script, TurnEnv
from tests.external.exchange.test_same_batches import CASES, factory, leaves
from tests.external.helpers.drivers import by_sight

LEFT_OUT = ("eps_id", "unroll_id", "off_policy", "policy_version", "env_id")


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


def same(found: MultiAgentBatch, wanted: MultiAgentBatch) -> None:
    one, other = leaves(found), leaves(wanted)
    for name, leaf in other.items():
        if name.split("/")[1] not in LEFT_OUT:
            np.testing.assert_array_equal(one[name], leaf, err_msg=name)
            assert one[name].dtype == leaf.dtype, name


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
            with pytest.raises(DriverGone, match="no simulator is running"):
                again.collect(episodes=1)
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
            with pytest.raises(ArgumentError, match=says):
                replay(dataset, envs)
        with pytest.raises(ArgumentError, match="agent number"):
            replay(batch, one)
        for name in ("text.npz", "nowhere.npz"):
            with pytest.raises(CheckpointError):
                replay(tmp_path / name, envs)
        with pytest.raises(ArgumentError, match="repeat"):
            replay(batch, envs, repeat=0)
        holey = batch.map(lambda rows: rows.take(rows.t != 1))
        with replay(holey, envs), pytest.raises(DriverGone, match="rows are missing between its decision number 0"):
            collector(envs, refuse).collect(episodes=1)
