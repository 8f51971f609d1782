"""What a value function sees behind the last row of a fragment is the row that comes next, as in the run, uncut."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec import Collector
from marlvec.connectors import Rows, agent_connector
from marlvec.connectors.agent import PrevActions, PrevRewards, View
from marlvec.connectors.learner import AddLastObs, GeneralAdvantageEstimation
from marlvec.errors import ContractError
from marlvec.policies import Policy
from tests.collect.storage.test_columns import World
from tests.vector.support.kinds import vectorize

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
