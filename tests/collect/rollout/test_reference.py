"""The collector against a slow reference, row for row, over whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from marlvec.connectors import Rows, action_connector, agent_connector
from tests.collect.helpers.plans import DRAWN, FEW_OR_MANY, LONG, PROGRAMS, Plan, for_examples, one, play
from tests.collect.helpers.players import GAMES, KINDS, MODES


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
