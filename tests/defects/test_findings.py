"""A failure tells of a defect, or of a mistake in it."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis.errors import FlakyFailure

from marlvec.connectors import Rows
from marlvec.errors import ContractError, EnvRaised
from marlvec.vector.shard import EnvPhase, Shard
from tests.defects import plugin  # noqa: F401  (all defects are in the registry then)
from tests.defects.findings import is_find
from tests.defects.hunting import FOUND, NOT_FOUND, Hunter
from tests.defects.registry import DEFECTS, WRONG


@pytest.mark.slow("runs the tests of another run")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("assert 1 == 2", FOUND),
        ("assert 1 == 1", NOT_FOUND),
        ("None.gone", WRONG),
    ],
)
def test_the_exit_code_says_what_it_was(text: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text(f"def test_one():\n    {text}\n")
    with Hunter([]) as hunter:
        outcome = hunter.run([str(path)])
    assert outcome.code == code, outcome.output


def test_what_the_tests_and_marlvec_itself_raise_is_a_find() -> None:
    assert is_find(AssertionError())
    assert is_find(pytest.fail.Exception())
    assert is_find(ContractError("rows must keep their order"))
    assert is_find(EnvRaised("env 0 raised"))
    assert is_find(KeyError(EnvPhase.ABSENT))


def test_what_is_not_in_a_dict_is_no_find_unless_it_is_one_of_marlvecs() -> None:
    assert not is_find(KeyError("seed"))
    with pytest.raises(KeyError) as found:
        Rows()["nothing"]
    assert is_find(found.value)


def test_what_happens_in_some_runs_only_is_a_find_if_it_is_one() -> None:
    assert is_find(FlakyFailure("inconsistent results", [AssertionError()]))
    assert is_find(FlakyFailure("inconsistent results", [pytest.fail.Exception()]))
    assert not is_find(FlakyFailure("inconsistent results", [AttributeError()]))


def test_a_mistake_in_a_worker_is_none() -> None:
    error = EnvRaised("env 0 raised")
    error.__cause__ = AttributeError("no such name")
    assert not is_find(error)


def test_neither_is_one_that_has_ended_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that sees it die fails in earnest; what the worker wrote says why."""
    DEFECTS["reward_of_the_step_before"].apply(monkeypatch)
    try:
        Shard.restart(SimpleNamespace(), [0])  # type: ignore[arg-type]
    except AttributeError:
        said = traceback.format_exc()
    assert not is_find(AssertionError(), said)
    deeper = said.replace(
        "AttributeError", '  File "marlvec/vector/shard.py", line 1, in restart\n    step()\nAttributeError'
    )
    assert is_find(AssertionError(), deeper)
