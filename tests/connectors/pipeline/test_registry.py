"""Names in the registry: whose they are, and what is not to be had under one."""

from __future__ import annotations

import types
from typing import Any

import pytest

from marlvec import connectors as c
from marlvec.errors import AlreadyRegisteredError, ArgumentError, RegistryError, SerialisationError
from marlvec.serialization.values import CLASSES

pytestmark = pytest.mark.usefixtures("registry")


class Shift(c.AgentConnector):
    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs + self.by)


class Mine(c.NormalizeObs):
    pass


def halve(rows: c.Rows) -> c.Rows:
    return rows.replace(obs=rows.obs / 2)


def test_a_class_is_registered_by_a_decorator_or_a_call() -> None:
    assert c.register_connector(Shift) is Shift
    assert c.register_connector()(Mine) is Mine
    assert Shift(2).to_config() == {"connector": "Shift", "args": {"by": 2}}
    rebuilt = c.connector_from_config({"connector": "Shift", "args": {"by": 2.5}})
    assert isinstance(rebuilt, Shift)
    assert rebuilt.by == 2.5
    assert type(c.connector_from_config(Mine(clip=3.0).to_config())) is Mine
    c.register_connector(Shift)  # the same once more is fine
    c.register_connector(Shift, name="Shift")


def test_a_class_can_have_a_name_of_its_own_choice() -> None:
    c.register_connector(name="lab/shift")(Shift)
    assert Shift().to_config()["connector"] == "lab/shift"
    assert isinstance(c.connector_from_config({"connector": "lab/shift", "args": {}}), Shift)


@pytest.mark.checklist(82)
def test_what_is_not_registered_raises_when_written_down_and_says_what_to_do() -> None:
    with pytest.raises(SerialisationError, match="Shift is not registered: write @register_connector over the class"):
        c.AgentPipeline([Shift()]).to_config()
    with pytest.raises(SerialisationError, match="Mine is not registered"):  # though its base is ours
        Mine().to_config()
    with pytest.raises(
        SerialisationError, match=r"function of <lambda> is <function .*@register_function over its def"
    ):
        c.AgentPipeline([c.agent_connector(lambda rows: rows)]).to_config()
    piece = c.agent_connector(output_space=lambda space: space)(halve)
    c.register_function(halve)
    with pytest.raises(SerialisationError, match="output_space of halve is <function .*not registered"):
        piece.to_config()


def test_our_own_classes_are_known_by_their_names() -> None:
    ours = [cls for cls in _all_of(c.Connector) if cls.__module__.startswith("marlvec.connectors.")]
    assert len({cls.__name__ for cls in ours}) == len(ours) > 10
    assert all(CLASSES.find(cls.__name__) is cls for cls in ours)


def _all_of(cls: type[Any]) -> set[type[Any]]:
    return set().union(*({sub, *_all_of(sub)} for sub in cls.__subclasses__()))


def test_a_name_stands_for_one_thing() -> None:
    c.register_connector(Shift)
    with pytest.raises(
        AlreadyRegisteredError, match=r"'Shift' is tests\..*Shift already; register .*Mine with another"
    ):
        c.register_connector(Mine, name="Shift")
    with pytest.raises(AlreadyRegisteredError, match="is registered as the connector 'Shift' already"):
        c.register_connector(Shift, name="Other")
    with pytest.raises(AlreadyRegisteredError, match=r"'NormalizeObs' is marlvec\.connectors"):
        c.register_connector(Mine, name="NormalizeObs")
    c.register_function(halve)
    with pytest.raises(AlreadyRegisteredError, match="the function 'halve'"):
        c.register_function(lambda rows: rows, name="halve")
    assert CLASSES.find("Shift") is Shift


def test_a_cell_of_a_notebook_that_runs_twice_puts_its_new_class_in_place() -> None:
    source = (
        "class Cell(AgentConnector):\n    def __call__(self, rows):\n        return rows\ndef cell(rows): return rows"
    )
    found = []
    for _ in range(2):
        module = types.ModuleType("notebook")
        module.__dict__.update(AgentConnector=c.AgentConnector, __name__="notebook")
        exec(source, module.__dict__)
        c.register_connector(module.Cell)
        c.register_function(module.cell)
        found.append(module)
    assert CLASSES.find("Cell") is found[1].Cell is not found[0].Cell
    with pytest.raises(SerialisationError, match="Cell is not registered"):
        found[0].Cell().to_config()


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("decorate", [c.agent_connector, c.action_connector, c.learner_connector])
def test_a_function_is_registered_over_or_under_its_decorator(decorate: Any, over: bool) -> None:
    def change(rows: c.Rows) -> c.Rows:
        return rows

    piece = c.register_function(decorate(change)) if over else decorate(c.register_function(change))
    rebuilt = c.connector_from_config(piece.to_config())
    assert type(rebuilt) is type(piece)
    assert rebuilt.function is change  # type: ignore[attr-defined]  # a FunctionConnector
    assert rebuilt.to_config() == piece.to_config()


def test_a_function_can_be_registered_by_a_name() -> None:
    @c.agent_connector(name="half", output_space=c.register_function(lambda space: space, name="same space"))
    @c.register_function(name="lab/halve")
    def halve_it(rows: c.Rows) -> c.Rows:
        return halve(rows)

    assert halve_it.to_config() == {
        "connector": "FunctionAgentConnector",
        "args": {"function": {"$function": "lab/halve"}, "name": "half", "output_space": {"$function": "same space"}},
        "name": "half",
    }
    assert c.connector_from_config(halve_it.to_config()).name == "half"


class Abstract(c.AgentConnector):
    pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: c.register_connector(Shift()), "expected a class of connectors, got Shift"),
        (lambda: c.register_connector(dict), "expected a class of connectors, got <class 'dict'>"),
        (lambda: c.register_connector(halve), "a plain function: register_function"),
        (lambda: c.register_connector(Abstract), r"Abstract is abstract, as it lacks \['__call__'\]"),
        (lambda: c.register_connector(Shift, name=""), "needs a name to be registered under, got ''"),
        (lambda: c.register_connector(Shift, name=3), "needs a name to be registered under, got 3"),
        (lambda: c.register_function(lambda rows: rows), r"needs a name .* got '<lambda>': give function name="),
        (lambda: c.register_function(Shift), "a class of connectors: register_connector"),
        (lambda: c.register_function(Shift()), r"expected a function, got Shift\(\)"),
        (lambda: c.register_function(3), "expected a function, got 3"),
    ],
)
def test_what_cannot_be_registered(call: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        call()


def test_unregistered_name_raises() -> None:
    with pytest.raises(
        RegistryError, match=r"no connector is registered as 'NormaliseObs': .*did you mean 'NormalizeObs"
    ):
        c.connector_from_config({"connector": "NormaliseObs", "args": {}})
    config = c.agent_connector(c.register_function(halve)).to_config()
    config["args"]["function"] = {"$function": "nobody"}
    with pytest.raises(RegistryError, match="no function is registered as 'nobody': first import the module that has"):
        c.connector_from_config(config)
