"""Records become plain data and back, wrong ones are refused by name, and states of the format's first day are read."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from marlvec.collect.background import SampleTarget
from marlvec.collect.metrics import Counters, CurrentState, Metrics, RolloutState, WholeEpisode
from marlvec.collect.state import StateLoader
from marlvec.distributed import Collectors
from marlvec.distributed.accounting import FragmentPlan, Ledger, LedgerState, Shares
from marlvec.distributed.collector_group import CollectorGroup, HeadPolicies, MergeRounds
from marlvec.distributed.server import Answer, HandedOver, Started
from marlvec.distributed.stateful_collectors import answer_from, get_answer_state
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.policies import RandomPolicy
from marlvec.selfplay import (
    BradleyTerry,
    Elo,
    Every,
    Game,
    MatchTable,
    OnWinRate,
    OpenSkill,
    OpponentPool,
    Ratings,
    RatingTracker,
)
from marlvec.serialization.records import Count, PositiveCount, from_plain, read_fields, to_plain
from marlvec.serialization.values import read_value, write_value
from tests.distributed.helpers import plain
from tests.vector.support.reference import same

# --- Records become plain data, and data of the wrong type is refused with the name of the part that is wrong


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    ends: tuple[Point, Point]
    marks: Mapping[str, Count]
    closed: bool
    kind: Literal["thin", "thick"] = "thin"
    note: str | None = None


LINE = Line("a", (Point(1, 2.5), Point(-3)), {"one": 1}, True, "thick")

PLAIN = ["a", ([1, 2.5], [-3, 0.0]), {"one": 1}, True, "thick", None]

READ = [
    (Line, PLAIN, LINE),
    (Line, tuple(PLAIN), LINE),
    (list[Point], [[1, 2], {"x": 3, "y": math.inf}], [Point(1, 2.0), Point(3, math.inf)]),
    (tuple[int, ...], [3, 4], (3, 4)),
    (tuple[int, ...], [], ()),
    (set[str], ["b", "a"], {"a", "b"}),
    (dict[str, list[int]], {"a": (1, 2)}, {"a": [1, 2]}),
    (dict[int, Any], {3: {4}}, {3: {4}}),
    (float, 3, 3.0),
    (float, np.float32(0.5), 0.5),
    (int, np.int64(7), 7),
    (Real, 7, 7),
    (Real, 7.0, 7.0),
    (bool, np.bool_(True), True),
    (Count, 0, 0),
    (int | None, None, None),
    (int | None, 5, 5),
]


@pytest.mark.parametrize(("kind", "data", "value"), READ)
def test_data_that_fits_is_read(kind: Any, data: Any, value: Any) -> None:
    same(from_plain(kind, data, "it"), value)


def test_a_record_is_written_as_a_list_and_read_back() -> None:
    same(to_plain(LINE), PLAIN)
    same(from_plain(Line, to_plain(LINE), "it"), LINE)
    same(to_plain({"points": deque([Point(1)]), "names": {"b", "a"}, "pair": (1, 2)}), {
        "points": [[1, 0.0]],
        "names": ["a", "b"],
        "pair": (1, 2),
    })  # fmt: skip


WRONG = [
    (int, True, "it: expected an integer, got True"),
    (int, 1.0, "it: expected an integer, got 1.0"),
    (int, np.bool_(True), "it: expected an integer"),
    (Count, -1, "it: expected an integer of at least 0, got -1"),
    (PositiveCount, 0, "at least 1, got 0"),
    (float, "1", "it: expected a number, got '1'"),
    (float, True, "it: expected a number"),
    (Real, True, "it: expected a number, got True"),
    (Real, "1", "it: expected a number"),
    (float, 10**400, "it: expected a number, got 1000"),
    (bool, 1, "it: expected True or False, got 1"),
    (str, b"a", "it: expected a string"),
    (Literal["thin", "thick"], "wide", "expected one of .*'thin', 'thick'.*, got 'wide'"),
    (Literal["thin", "thick"], ["thin"], "expected one of"),
    (list[int], "12", "it: expected a list, got '12'"),
    (list[int], np.arange(3), "it: expected a list"),
    (list[int], {1: 2}, "it: expected a list"),
    (list[int], [1, None], r"it\[1\]: expected an integer, got None"),
    (tuple[int, str], [1], r"it: expected a list of 2, got \[1\]"),
    (tuple[int, str], [1, 2], r"it\[1\]: expected a string, got 2"),
    (dict[str, int], [], "it: expected a dict"),
    (dict[str, int], {1: 1}, "it: a key: expected a string, got 1"),
    (dict[str, int], {"a": "b"}, r"it\['a'\]: expected an integer, got 'b'"),
    (Point, [1], r"it: expected a list of 2, got \[1\]"),
    (Point, 3, "it: expected a list of 2, got 3"),
    (Point, {"x": 1}, r"it: expected other fields; missing \['y'\], unknown \[\]"),
    (Point, {"x": 1, "y": None}, "it: y: expected a number, got None"),
    (Line, ["a", [[1, 2], [3, "4"]], {}, True, "thin", None], r"it: ends\[1\]: y: expected a number, got '4'"),
    (Point | None, [None, 1.0], "it: x: expected an integer, got None"),
]


@pytest.mark.parametrize(("kind", "data", "words"), WRONG)
def test_data_of_another_type_is_refused(kind: Any, data: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        from_plain(kind, data, "it")


def test_fields_of_a_state() -> None:
    assert read_fields({"a": 1, "b": [2]}, "it", a=int, b=tuple[int]) == {"a": 1, "b": (2,)}
    for state, words in (
        ({"a": 1, "c": 2}, r"it: expected other fields; missing \['b'\], unknown \['c'\]"),
        ([1, 2], r"it: expected a saved state, got \[1, 2\]"),
        ({"a": "1", "b": [2]}, "it: a: expected an integer, got '1'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            read_fields(state, "it", a=int, b=tuple[int])


# --- States as they were written when this format began: the present code reads them, and writes the same
#
# `python -m tests.serialization.test_records` makes the files in ``golden/`` anew. Do so only for a new format: users
# have files of the old one. (The files of whole collectors and recordings have tests beside those of their folders.)


FOLDER = Path(__file__).with_name("golden")
AGENTS = ("north", "east", "south")
SIDES = {"north": ["north"], "others": ["east", "south"]}


class Golden(NamedTuple):
    """Makes an object that has a state worth saving, and one that has none yet; reads and loads their states."""

    make: Callable[[], Any]
    get: Callable[[Any], Any]
    load: Callable[[Any, Any], Any]  # the new object and the state; returns the object that has it
    new: Callable[[], Any]


def load_dict(new: Any, state: Any) -> Any:
    new.load_state_dict(state)
    return new


def install(new: Any, state: Any, *more: Any) -> Any:
    new.prepare(state, *more)()
    return new


def played(ratings: Ratings) -> RatingTracker:
    """Games of two and three sides, of several policies on one, drawn, cut short, and over before a move."""
    found = RatingTracker(AGENTS, SIDES, table=MatchTable(0.9), ratings=ratings, keep=4)
    sides, three = tuple(SIDES), AGENTS
    for number in range(3):
        found.add(Game(sides, (("main",), ("old", "new")), (1.5, -1.0), 7, False, (), 0, number))
    found.add(Game(sides, (("old",), ("main",)), (0.0, 0.0), 9, True, ("others",), 1, 0))
    found.add(Game(three, (("main",), ("third",), ("old",)), (0.0, 2.0, 2.0), 3, False, ("east", "south"), 1, 1))
    found.ratings.copy("main", "snapshot")
    return found


def tracked(make: Callable[[], Ratings]) -> Golden:
    return Golden(
        lambda: played(make()),
        RatingTracker.state_dict,
        load_dict,
        lambda: RatingTracker(AGENTS, SIDES, table=MatchTable(0.9), ratings=make(), keep=4),
    )


def pool(*, new: bool) -> OpponentPool:
    """A pool that counts what it has taken, with a rule of each kind."""
    table = MatchTable()
    found = OpponentPool(RandomPolicy, when=[Every(10), OnWinRate(table, games=1)])
    if not new:
        table.add_result("main", "old", 1.0)
        for step in (10, 20):
            found.add(f"main-{step}", RandomPolicy(seed=step), of="main", step=step, anchor=step == 10)
        for rule in found._when:
            rule.taken("main", 20)
        found._counts = {"main": 2}
    return found


def ledger() -> Ledger:
    """One request of each fate."""
    found = Ledger()
    entries = [found.issue(index % 2, index // 4, 10 + index, index // 2) for index in range(6)]
    for entry in entries[:3]:
        found.hold(entry.id, entry.epoch)
    found.state = found.after_delivery([entries[0].id], 3, row_lag=4)
    found.lose([entries[3].id], "died")
    found.record_restart()
    return found


def from_ledger_state(new: Ledger, state: Any) -> Ledger:
    new.state = LedgerState.from_state(state)
    return new


def shares(*, new: bool) -> Shares:
    found = Shares()
    if not new:
        found.begin(SampleTarget("env_steps", 11), [0, 2, 3])
    return found


def fragments(*, new: bool) -> FragmentPlan:
    found = FragmentPlan(None, 2, 1)
    if not new:
        found.begin(SampleTarget("episodes", 12), [0, 1])
    return found


def rounds(*, new: bool) -> MergeRounds:
    """In the middle of the second round, where one collector has handed over, one is asked, and one will be."""
    found = MergeRounds(1)
    if not new:
        found.merged, found.number = {"main": ({"count": 3, "mean": [0.5]}, {})}, 1
        found.record_batch([0, 1, 2])
        for index in (0, 2):
            found.ask(index)
        found.take(0, HandedOver({"main": ({"count": 5, "mean": [0.25]}, {})}, None))
    return found


def head_policies(*, new: bool) -> HeadPolicies:
    started = Started(None, AGENTS, ("main", "old", "gone"), "env_steps", ("main",), {"main": {"w": np.arange(3.0)}})
    found = HeadPolicies(started, {"main": []}, lambda content: content)
    found.remove("gone")
    if new:
        found._removed.clear()
    else:
        found.set_weights({"main": {"w": np.arange(2.0)}}, [], None)
    return found


def metrics(*, new: bool) -> Metrics:
    current = CurrentState(2)
    found = Metrics(AGENTS, ("main", "old"), window=3, current=current)
    if not new:
        found.take_delta()
        found.timers["env_wait"].add(0.5)
        found.add_value("kl", 0.25)
        found.add_value("loss", 3)
        found._numbers = {"far": 4}
    return found


def answer() -> Answer:
    """One whose metrics have an episode's worth of counters, timers and values, and which has no rows."""
    found = metrics(new=False)
    counters = Counters(env_steps=7, agent_steps=20, noop_steps=1)
    found._current.state = found._current.state._replace(counters=counters)
    return Answer(4, 1, delta=found.take_delta(), seconds=(0.25, 1.5))


def rollout() -> RolloutState:
    return RolloutState.new(2)._replace(
        tick=9,
        counters=Counters(*range(16)),
        finished=(WholeEpisode(3, 0, 1, 7, 20), WholeEpisode(4, 1, 2, 6, 18, 2)),
    )


def group(*, new: bool) -> CollectorGroup:
    """Of two collectors that were built, one of them twice."""
    with Collectors(plain, 2, "sync", seed=None if new else 3) as many:
        found = many._group
        if not new:
            found._end(found.collectors[1], "died", "it was killed")
            many._restart_missing()
            found.collectors[0].is_masked, found.collectors[0].merged = True, 2
            found.collectors[0].why = "timeout", "it took too long"
        return copy.copy(found)


GOLDEN: dict[str, Golden] = {
    "elo": tracked(lambda: Elo(fixed={"old": 900.0})),
    "openskill": tracked(OpenSkill),
    "bradley_terry": tracked(BradleyTerry),
    "pool": Golden(
        lambda: pool(new=False),
        OpponentPool.state_dict,
        load_dict,
        lambda: pool(new=True),
    ),
    "ledger": Golden(ledger, lambda found: found.state.get_state(), from_ledger_state, Ledger),
    "shares": Golden(lambda: shares(new=False), Shares.get_state, install, lambda: shares(new=True)),
    "fragments": Golden(lambda: fragments(new=False), FragmentPlan.get_state, install, lambda: fragments(new=True)),
    "rounds": Golden(lambda: rounds(new=False), MergeRounds.get_state, install, lambda: rounds(new=True)),
    "head_policies": Golden(
        lambda: head_policies(new=False),
        HeadPolicies.get_state,
        lambda new, state: install(new, state, StateLoader()),
        lambda: head_policies(new=True),
    ),
    "group": Golden(
        lambda: group(new=False),
        lambda found: found.get_state({0: {"tick": 1}}),
        lambda new, state: install(new, state, {}, {}),
        lambda: group(new=True),
    ),
    "answer": Golden(answer, get_answer_state, lambda _, state: answer_from(state), lambda: None),
    "metrics": Golden(
        lambda: metrics(new=False),
        Metrics.get_state,
        lambda new, state: install(new, state, {}),
        lambda: metrics(new=True),
    ),
    "rollout": Golden(
        rollout, RolloutState.get_state, lambda new, state: new.with_state(state), lambda: RolloutState.new(2)
    ),
}


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(FOLDER.glob("*.npz")):
        found |= read_value(path, "states", "golden states")
    assert found.keys() == GOLDEN.keys()
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_state_is_read_and_written_as_it_was(name: str, states: dict[str, Any]) -> None:
    if name == "openskill":
        pytest.importorskip("openskill")
    golden, state = GOLDEN[name], states[name]
    same(golden.get(golden.load(golden.new(), copy.deepcopy(state))), state)


WRONG_STATES: tuple[Any, ...] = (None, True, -1, 0.5, "x", [], {}, [[None]], {"a": 1}, np.zeros(2))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_changed_state_is_read_or_refused(name: str, states: dict[str, Any]) -> None:
    """Each part in turn is something else: no other error comes than those of a wrong state."""
    if name == "openskill":
        pytest.importorskip("openskill")
    golden, new = GOLDEN[name], GOLDEN[name].new()
    refused = 0
    for path in paths(states[name]):
        for value in WRONG_STATES:
            try:
                golden.load(new, changed(states[name], path, value))
            except (ArgumentError, CheckpointError):
                refused += 1
    assert refused > 10
    same(golden.get(golden.load(golden.new(), copy.deepcopy(states[name]))), states[name])


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each part of nested dicts, lists and tuples, and of the whole."""
    yield at
    if isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(part, (*at, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested data in which one part is another."""
    if not path:
        return copy.deepcopy(new)
    if isinstance(value, dict):
        return {key: changed(part, path[1:], new) if key == path[0] else part for key, part in value.items()}
    return type(value)(changed(part, path[1:], new) if k == path[0] else part for k, part in enumerate(value))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = {name: golden.get(golden.make()) for name, golden in GOLDEN.items()}
    selfplay, collect = ["elo", "openskill", "bradley_terry", "pool"], ["metrics", "rollout"]
    distributed = [name for name in GOLDEN if name not in (*selfplay, *collect)]
    files = {"selfplay": selfplay, "collect": collect, "distributed": distributed}
    for file, names in files.items():
        write_value(FOLDER / f"{file}.npz", "states", {name: made[name] for name in sorted(names)}, file)


if __name__ == "__main__":
    main()
