"""check_connector: sound connectors pass it, and each kind of broken one is caught by the check of that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space

import marlvec.connectors as connectors
from marlvec.connectors import (
    ActionPipeline,
    AgentIndicator,
    AgentPipeline,
    ClipActions,
    ClipReward,
    Connector,
    FlattenObs,
    FrameStack,
    NormalizeObs,
    ReadOnlyActions,
    Rows,
    ToNumpy,
    UnsquashActions,
    action_connector,
    agent_connector,
)
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.testing.check_connector import check_connector
from marlvec.trees import map_tree
from tests.connectors import broken, sound
from tests.connectors.sound import UNIT, VECTOR

BROKEN: dict[str, list[tuple[type[Connector], str]]] = {
    "rows": [
        (broken.ReturnsNothing, "expected Rows, got NoneType"),
        (broken.LosesARow, "the number of rows that come out of 12: expected 12, got 11"),
        (broken.Sorts, "'env_id': expected the rows in their order"),
        (broken.Renumbers, "'eps_id': expected the rows in their order"),
        (broken.DropsIds, "expected 't' among them"),
        (broken.SaysItIsIdentity, "is_identity is for one that returns all rows as they are"),
        (broken.RemovesLastRows, "the last row of an episode: expected never removed"),
        (broken.SaysNoNoop, "noop"),
        (broken.RepeatsRows, "their order kept, each once"),
        (broken.Raises, "the call: expected no error, got ValueError: matmul"),
        (broken.NeedsAColumn, "no column 'belief'.*columns="),
    ],
    "inputs": [
        (broken.WritesIntoObs, "column 'obs' of env 0, agent 0"),
        (broken.AddsAColumnInPlace, "the columns that were given"),
        (broken.WritesIntoAnswers, "column 'logp' of env 0, agent 0"),
        (broken.KeepsObs, "whatever became of earlier calls' arrays, got 101"),
    ],
    "outputs": [(broken.ReturnsItsBuffer, "step 0, column 'obs' of env 0, agent 0.*as when it was returned")],
    "inside": [
        (broken.Doubles, "expected values in .-1.0, 1.0., got"),
        (broken.Widens, "column 'obs': expected dtype float32, got float64"),
        (broken.Grows, r"expected shape \(12, 3\), got \(12, 6\)"),
        (broken.PushesTooFar, "column 'actions_for_env' of env .*: expected values in .-1.0, 1.0., got"),
        (broken.MakesNaN, "expected values in .-1.0, 1.0., got .*nan"),
    ],
    "repeat": [(broken.DrawsFromTheClock, "RowRandom"), (broken.SharesWithAll, "share nothing between instances")],
    "empty": [
        (broken.WantsRows, "the call: expected no error, got IndexError"),
        (broken.ForgetsColumnsOfNoRows, "expected 'extra' among them"),
    ],
    "mode": [
        (broken.LearnsInEval, "freeze it in eval"),
        (broken.ReturnsNoSelf, "the connector itself, got NoneType"),
        (broken.NeverSwitches, "training of NeverSwitches after eval"),
    ],
    "batched": [
        (broken.CentresTheBatch, "step 0, column 'obs' of env 0, agent 0"),
        (broken.CountsRows, "as in a call of its own"),
        (broken.MixesEnvs, "step 1"),
        (broken.LooksAcross, "sets across_agents"),
        (broken.LearnsInSecret, "says what in merge_states"),
        (broken.LooksAtOtherEnvs, "column 'obs'"),
        (broken.RollsTheDice, "column 'actions_for_env'"),
    ],
    "order": [
        (broken.DrawsInOrder, "step 0, column 'obs' of env"),
        (broken.FollowsTheFirst, "as in another order.*go by env_id and agent_index"),
    ],
    "subsets": [(broken.SharesAClock, "as where there is only env")],
    "learning": [(broken.CountsCalls, "what is learnt from rows in calls of their own, 'sum'")],
    "merge": [
        (broken.CountsTwice, "what two have learnt, merged, 'sum'"),
        (broken.TakesTheFirstState, "the merged state in another order"),
        (broken.MergesHistories, "'values'"),
    ],
    "hand_over": [
        (broken.LosesWhatComesBetween, "what two have learnt, merged round after round, 'sum'"),
        (broken.HandsOverAllAgain, "what two have learnt, merged round after round, 'sum'"),
        (broken.KeepsItsOwn, "what another one has learnt that takes over the merged state, 'sum'"),
        (broken.HandsOverHistories, "expected {}, as merge_states\\(\\) gives nothing"),
    ],
    "first": [(broken.IgnoresFirst, "step 6, column 'obs' of env 0.*as at an episode's beginning")],
    "reset": [
        (broken.IgnoresReset, r"column 'obs' of env [02], agent \d.*after reset\(\[0, 2\]\)"),
        (broken.ForgetsEverybody, r"column 'obs' of env [13], agent \d.*after reset\(\[0, 2\]\)"),
        (broken.ForgetsNeighbours, r"column 'obs' of env [13], agent \d.*after reset\(\[0, 2\]\)"),
        (broken.CannotForgetAll, r"reset\(None\): expected no error, got TypeError"),
        (broken.KnowsNoNewEnvs, r"reset\(\[9\]\): expected no error, got IndexError"),
        (broken.CountsResets, r"column 'obs' of env"),
        (broken.ForgetsWhatItLearnt, r"what was learnt, after reset\(\), 'sum'"),
    ],
    "copy": [(broken.SharesInCopies, "share nothing")],
    "setup": [
        (broken.ForgetsAtSetup, "the state after setup"),
        (broken.ForgetsWhenAsked, "the state after it was asked for a space"),
    ],
    "state": [
        (broken.KeepsItsHistoryToItself, "step 6, column 'obs'.*must hold all that it remembers"),
        (broken.GivesItsTable, "a state that was taken, later"),
        (broken.TakesTheTable, "a state that was taken, later"),
        (broken.RoundsItsState, "must hold all that it remembers"),
        (broken.GivesObjects, "strings and None, got the key 0 at /values"),
        (broken.TakesAnything, "expected ArgumentError, got no error"),
        (broken.StumblesOverAnything, "expected ArgumentError, got KeyError"),
    ],
    "config": [
        (broken.ShrinksItsArgument, r"expected ShrinksItsArgument\(factor=2.0\), got ShrinksItsArgument\(factor=1.0\)")
    ],
}
LEARNER: dict[str, list[tuple[type[Connector], str]]] = {
    "rows": [
        (broken.LosesTransitions, "one that may do so sets changes_length"),
        (broken.TurnsTransitions, "column 'env_id': expected the rows in their order"),
    ],
    "inputs": [(broken.WritesIntoRewards, "column 'rewards', row")],
    "empty": [(broken.WantsTransitions, "the call: expected no error, got IndexError")],
    "batched": [
        (broken.MixesFragments, "each fragment as in a call of its own, column 'later', row"),
        (broken.CentresRewards, "sets across_agents"),
    ],
    "order": [(broken.CountsFromTheFirst, "with its fragments in another order, column 'later', row")],
    "state": [(broken.CountsBatches, "must hold all that it remembers")],
}
CASES = [(check, make, said) for check, cases in BROKEN.items() for make, said in cases]
LEARNERS = [(check, make, said) for check, cases in LEARNER.items() for make, said in cases]


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize(("check", "make", "said"), CASES, ids=[make.__name__ for _, make, _ in CASES])
def test_a_broken_one_is_caught_by_the_right_check_and_told_why(check: str, make: type[Connector], said: str) -> None:
    space = UNIT if check == "inside" or issubclass(make, connectors.ActionConnector) else VECTOR
    with pytest.raises(ContractError, match=f"(?s)^{make.__name__}, check '{check}', on Box .*{said}"):
        check_connector(make, space)


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize(("check", "make", "said"), LEARNERS, ids=[make.__name__ for _, make, _ in LEARNERS])
def test_and_so_is_one_of_the_learner_side(check: str, make: type[Connector], said: str) -> None:
    with pytest.raises(ContractError, match=f"(?s)^{make.__name__}, check '{check}', on batches with obs .*{said}"):
        check_connector(make)


def test_every_broken_one_was_tried() -> None:
    tried = {make for _, make, _ in [*CASES, *LEARNERS]}
    defined = {c for c in vars(broken).values() if isinstance(c, type) and c.__module__ == broken.__name__}
    assert tried == defined
    assert len(tried) >= 20


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize(
    "make", [sound.Change, sound.Centre, sound.Team, sound.Noise, sound.Awake], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("seed", range(3))
def test_what_they_were_broken_from_is_sound(make: type[Connector], seed: int) -> None:
    check_connector(make, VECTOR, seed=seed, num_envs=2 + seed, agents=[f"a_{i}" for i in range(3 - seed)])


def test_and_so_are_the_other_sides() -> None:
    check_connector(sound.Halve, UNIT)
    check_connector(sound.Later)


# --- ours

CHAIN = [FlattenObs, NormalizeObs, lambda: FrameStack(4), AgentIndicator]
OURS: dict[str, Callable[[], Connector]] = {
    "FlattenObs": FlattenObs,
    "NormalizeObs": NormalizeObs,
    "NormalizeObs, per agent": lambda: NormalizeObs(per_agent=True, clip=None),
    "NormalizeObs, frozen": lambda: NormalizeObs(update=False),
    "FrameStack": lambda: FrameStack(3),
    "FrameStack, new axis": lambda: FrameStack(3, new_axis=True, axis=0, pad="repeat"),
    "AgentIndicator": AgentIndicator,
    "AgentIndicator, types": lambda: AgentIndicator(mode="type"),
    "ClipReward, sign": lambda: ClipReward(sign=True),
    "ClipReward, limit": lambda: ClipReward(limit=0.5),
    "ToNumpy": ToNumpy,
    "UnsquashActions": UnsquashActions,
    "ClipActions": ClipActions,
    "ReadOnlyActions": ReadOnlyActions,
    "default actions": ActionPipeline.default,
    "default observations": AgentPipeline.default,
    "a chain": lambda: AgentPipeline([make() for make in CHAIN]),
    "a chain in a chain": lambda: AgentPipeline([AgentPipeline([FlattenObs(), NormalizeObs()]), NormalizeObs()]),
    "actions in a chain in a chain": lambda: ActionPipeline([ActionPipeline.default(), ClipActions()]),
}


@pytest.mark.slow("checks whole envs or connectors many times")
@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_ours_pass_on_every_space_they_take(make: Callable[[], Connector]) -> None:
    check_connector(make)


@pytest.mark.slow("checks whole envs or connectors many times")
def test_functions_pass() -> None:
    @agent_connector
    def same(rows: Rows) -> Rows:
        return rows.replace(obs=map_tree(lambda leaf: leaf.copy(), rows.obs))

    @action_connector
    def also_the_same(rows: Rows) -> Rows:
        return rows.replace(actions_for_env=map_tree(np.array, rows.actions_for_env))

    check_connector(same)
    check_connector(also_the_same)


# --- how it is called


def test_one_that_is_given_is_copied() -> None:
    piece = sound.Change()
    check_connector(piece, VECTOR)
    assert not piece._last.values.size


def test_columns_come_from_a_space_or_from_a_function_of_the_rows() -> None:
    seen: dict[str, Any] = {}

    class Adds(connectors.AgentConnector):
        def __call__(self, rows: Rows) -> Rows:
            seen.update({name: rows[name] for name in ("belief", "twice")})
            return rows.replace(obs=rows.obs + rows.belief)

        def on_policy_output(self, rows: Rows) -> None:
            assert rows.belief.shape == (len(rows), 3)

    columns = {"belief": Box(0.0, 1.0, (3,), np.float32), "twice": lambda rows: rows.belief * 2}
    check_connector(Adds, VECTOR, columns=columns)
    np.testing.assert_array_equal(seen["twice"], seen["belief"] * 2)
    with pytest.raises(ArgumentError, match="column 'belief': expected a space or a function"):
        check_connector(Adds, VECTOR, columns={"belief": 3})  # type: ignore[dict-item]  # that is what is wrong


def test_it_is_told_the_agents_and_the_actions() -> None:
    told: list[tuple[Any, Any]] = []

    class Listens(connectors.AgentConnector):
        def setup(self, space: Space[Any]) -> None:
            told.append((self.agents, self.action_space))

        def __call__(self, rows: Rows) -> Rows:
            assert rows.action_mask.shape == (len(rows), 7)
            assert rows.action_mask.any(axis=1).all()
            return rows

        def on_policy_output(self, rows: Rows) -> None:
            assert not rows.last.any()
            assert ((rows.actions >= 0) & (rows.actions < 7)).all()

    check_connector(Listens, VECTOR, agents=("wolf", "hare"), action_space=Discrete(7))
    assert {names for names, _ in told} == {("wolf", "hare")}
    assert [space for _, space in told] == [Discrete(7)] * len(told)


def test_a_space_it_refuses() -> None:
    nested = Dict(a=VECTOR)
    with pytest.raises(UnsupportedSpaceError, match="put FlattenObs before it"):
        check_connector(AgentIndicator, nested)
    with pytest.raises(ArgumentError, match="no key 'camera'") as caught:
        check_connector(lambda: FlattenObs(keys=["camera"]))
    assert "give check_connector(..., space=)" in caught.value.__notes__[-1]


def test_arguments_that_are_wrong() -> None:
    with pytest.raises(ArgumentError, match="num_envs: expected at least 2, got 1"):
        check_connector(sound.Change, VECTOR, num_envs=1)
    with pytest.raises(ArgumentError, match="at least one agent"):
        check_connector(sound.Change, VECTOR, agents=())
    for what in (3, lambda: 3):
        with pytest.raises(ArgumentError, match="expected a connector, or a function that makes one, got 3"):
            check_connector(what)  # type: ignore[arg-type]  # that is what is wrong


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (None, {}, "a connector, or a function that makes one, got None"),
        ({"x": None}, {}, r"got \{'x': None\}"),
        ([None], {}, r"got \[None\]"),
        (lambda: None, {}, "got None, which <function .* made"),
        (
            FrameStack,
            {},
            r"got FrameStack \(missing a required argument: 'k'\): give an instance, FrameStack\(\.\.\.\)",
        ),
        (FrameStack(2), {"space": 3}, "space: expected a Gymnasium space or None, got 3"),
        (FrameStack(2), {"action_space": int}, "action_space: expected a Gymnasium space"),
        (FrameStack(2), {"num_envs": None}, "num_envs: expected at least 2, got None"),
        (FrameStack(2), {"columns": {"x": None}}, "column 'x': expected a space or a function of rows"),
    ],
)
def test_what_is_no_connector_is_an_argument_error(make: Any, options: dict[str, Any], message: str) -> None:
    """The class of error that a Collector has for connectors that are none."""
    with pytest.raises(ArgumentError, match=message):
        check_connector(make, **options)
