"""The catalogue is what ``marlvec.connectors`` exports, no more and no less."""

from __future__ import annotations

import inspect

import pytest

from marlvec import connectors
from marlvec.connectors import AgentConnector, Rows
from marlvec.connectors.registry import SIDES, CatalogueRow, catalogue
from marlvec.errors import ArgumentError

NOT_PIECES = {
    "Connector",
    "AgentConnector",
    "ActionConnector",
    "LearnerConnector",
    "Pipeline",
    "AgentPipeline",
    "ActionPipeline",
    "LearnerPipeline",
    "RowFilter",
    "FunctionAgentConnector",
    "FunctionActionConnector",
    "FunctionLearnerConnector",
}


def test_every_exported_connector_is_in_it_once() -> None:
    classes = {
        name
        for name in connectors.__all__
        if inspect.isclass(getattr(connectors, name)) and issubclass(getattr(connectors, name), connectors.Connector)
    }
    assert sorted(row.name for row in catalogue()) == sorted(classes - NOT_PIECES)


def test_each_says_its_side_and_what_it_does_in_one_line() -> None:
    rows = catalogue()
    assert CatalogueRow("action", "ToNumpy", "Converts every column that is not numpy to arrays, leaf by leaf") in rows
    for side, name, line in rows:
        assert issubclass(getattr(connectors, name), SIDES[side])
        assert 10 < len(line) <= 140, (name, line)
        assert "\n" not in line
    assert [row.side for row in rows] == sorted((row.side for row in rows), key=list(SIDES).index)


def test_it_can_be_searched_by_name_and_side() -> None:
    assert [row.name for row in catalogue("NORMALIZEo")] == ["NormalizeObs"]
    assert {row.side for row in catalogue(side="action")} == {"action"}
    assert catalogue("FrameStack", "action") == catalogue("no such") == []
    with pytest.raises(ArgumentError, match=r"expected a side of \['agent', 'action', 'learner'\], got 'env'"):
        catalogue(side="env")


def test_a_new_piece_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newcomer(AgentConnector):
        """Does
        this and that.

        And says more. Much more.
        """

        def __call__(self, rows: Rows) -> Rows:
            return rows

    monkeypatch.setattr(connectors.agent, "Newcomer", Newcomer, raising=False)
    monkeypatch.setattr(connectors.agent, "__all__", [*connectors.agent.__all__, "Newcomer"])
    assert CatalogueRow("agent", "Newcomer", "Does this and that") in catalogue()
