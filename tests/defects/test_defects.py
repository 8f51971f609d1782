"""The suite finds every defect that is put into marlvec, most in `make test`; a failure is a find or a mistake."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis.errors import FlakyFailure

from marlvec.connectors import Rows
from marlvec.errors import ContractError, EnvRaised
from marlvec.vector.shard import EnvPhase, Shard
from tests.conftest import COLLECTED
from tests.defects import plugin  # noqa: F401  (all defects are in the registry then)
from tests.defects.finders import QUICK, files_of, read_table
from tests.defects.hunting import FOUND, NOT_FOUND, Hunter
from tests.defects.plugin import is_find
from tests.defects.registry import DEFECTS, WRONG, Defect

# --- The suite finds every defect that is put into marlvec, most of them in `make test`


ROOT = Path(__file__).resolve().parents[2]
LONGEST = 900  # seconds that the tests of one defect may take
SEEDS = range(1, 6)

every_defect = pytest.mark.parametrize("defect", DEFECTS.values(), ids=lambda defect: defect.name)
from_many_seeds = pytest.mark.parametrize("seeded", SEEDS, indirect=True)


def hunt(hunter: Hunter, tests: tuple[str, ...], defect: Defect) -> None:
    outcome = hunter.run(tests, defect=defect.name)
    what = {NOT_FOUND: "not found", WRONG: "wrong itself"}.get(outcome.code, f"pytest ended with {outcome.code}")
    assert outcome.code == FOUND, f"{what}: {defect.title}\n{outcome.output[-3000:]}"


@pytest.fixture(scope="module")
def hunter() -> Iterator[Hunter]:
    with Hunter(files_of(DEFECTS.values())) as started:
        yield started


@pytest.fixture(scope="module")
def seeded(request: pytest.FixtureRequest) -> Iterator[Hunter]:
    with Hunter(files_of(DEFECTS.values()), seed=request.param) as started:
        yield started


@every_defect
def test_defect_can_be_put_into_the_code_of_today(defect: Defect) -> None:
    assert re.fullmatch(r"[A-Z].*\.", defect.title)
    for test in defect.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), test
    with pytest.MonkeyPatch.context() as patch:
        defect.apply(patch)  # raises where a name is gone


def test_every_defect_has_a_finder_and_four_in_five_a_quick_one() -> None:
    table = read_table()
    assert table.keys() == DEFECTS.keys(), "make the table anew: python -m tests.defects.finders"
    assert len(table) >= 95
    assert sum(found.tier == QUICK for found in table.values()) >= 0.8 * len(table)


def test_parts_of_marlvec_have_defects() -> None:
    parts = Counter(Path(defect.apply.__code__.co_filename).stem for defect in DEFECTS.values())
    least = {"collect": 12, "connectors": 5, "selfplay": 3, "external": 4, "distributed": 3, "interop": 3, "native": 2}
    assert {part: parts[part] for part, number in least.items() if parts[part] < number} == {}


def test_table_names_tests_of_the_tier_that_it_says(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected; in `make test` and `make test-all` these are all."""
    collected = request.config.stash[COLLECTED]
    files = {test.partition("::")[0] for test in collected}
    for found in read_table().values():
        for test in found.tests:
            if test.partition("::")[0] in files:
                assert collected.get(test) == found.tier, test


@pytest.mark.slow("runs the tests of another run")
@pytest.mark.time_limit(LONGEST)
@every_defect
def test_defect_is_found_by_its_finder(defect: Defect, hunter: Hunter) -> None:
    """Or by another of its tests: where workers are killed, who is faster has a say in what shows."""
    if hunter.run(read_table()[defect.name].tests[:1], defect=defect.name).code != FOUND:
        hunt(hunter, defect.tests, defect)


@pytest.mark.soak
@pytest.mark.time_limit(LONGEST)
@from_many_seeds
@every_defect
def test_defect_is_found_from_any_seed(defect: Defect, seeded: Hunter) -> None:
    hunt(seeded, defect.tests, defect)


@pytest.mark.soak
@pytest.mark.time_limit(LONGEST)
@from_many_seeds
@pytest.mark.parametrize("test", sorted({test for defect in DEFECTS.values() for test in defect.tests}))
def test_nothing_is_found_without_a_defect(test: str, seeded: Hunter) -> None:
    """Else the others would prove nothing. In `make test-all` these tests run by themselves."""
    outcome = seeded.run([test])
    assert outcome.code == NOT_FOUND, outcome.output[-3000:]


# --- A failure tells of a defect, or of a mistake in it


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
