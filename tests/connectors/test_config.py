"""Values and connectors as JSON-able data and back; and whose the names in the registry are."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import marlvec
from marlvec import connectors as c
from marlvec.connectors import (
    ActionPipeline,
    AgentConnector,
    AgentIndicator,
    AgentPipeline,
    Connector,
    FrameStack,
    NormalizeObs,
    Rows,
)
from marlvec.connectors.pipeline import LearnerPipeline
from marlvec.connectors.registry import connector_from_config, register_connector
from marlvec.errors import AlreadyRegisteredError, ArgumentError, RegistryError, SerialisationError
from marlvec.selfplay import OpponentPool
from marlvec.serialization.values import CLASSES, FUNCTIONS, OWN_SPACES, decode, encode, outline
from marlvec.spaces import describe_difference
from tests.connectors.samples import Space, any_spaces
from tests.vector.support.reference import refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for names in (CLASSES, FUNCTIONS, OWN_SPACES):
        monkeypatch.setattr(names, "_things", dict(names._things))


# --- Values and connectors as JSON-able data, and back


DTYPES = st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), hnp.byte_string_dtypes()).filter(
    lambda dtype: dtype.itemsize > 0
)
NUMPY_NUMBERS = st.one_of(
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.float64, st.floats()),
    st.builds(np.uint8, st.integers(0, 255)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(np.bool_, st.booleans()),
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    NUMPY_NUMBERS,
    hnp.scalar_dtypes(),
    st.just("$tuple"),
)
KEYS = st.one_of(
    st.text(max_size=3), st.just("$tuple"), st.integers(-2, 2), st.booleans(), st.tuples(st.integers(0, 1))
)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        return st.one_of(lists, lists.map(tuple), st.dictionaries(KEYS, inner, max_size=3))

    return st.recursive(leaves, more, max_leaves=8)


def same(a: Any, b: Any) -> bool:
    """Equal in type and to the bit, NaN and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, other) and same(v, b[other]) for (k, v), other in zip(a.items(), b, strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return repr(a) == repr(b)


@pytest.mark.slow("draws many batches")
@given(nested(ATOMS))
def test_values_come_back_from_json_as_they_were(value: Any) -> None:
    text = json.dumps(encode(value, "x"), allow_nan=False)
    assert same(decode(json.loads(text)), value)


@given(nested(st.one_of(ATOMS, hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0)))))
def test_arrays_stand_in_the_data_as_they_are_and_come_back_as_copies(value: Any) -> None:
    encoded = encode(value, "x")
    json.dumps(encoded, allow_nan=False, default=lambda left: {"$array": isinstance(left, np.ndarray)})
    assert same(decode(encoded), value)


def test_an_array_is_copied_when_it_comes_back() -> None:
    array = np.arange(3)
    encoded = encode([array], "x")
    assert encoded[0] is array
    decode(encoded)[0][:] = 9
    assert array.tolist() == [0, 1, 2]


OTHER_SPACES: list[Space] = [
    spaces.Text(5),
    spaces.Text(3, min_length=0, charset="ab"),
    spaces.Sequence(spaces.Box(0, 1, (2,))),
    spaces.Sequence(spaces.Discrete(3), stack=True),
    spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
    spaces.Graph(spaces.Discrete(2), None),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
    spaces.Box(np.array([-np.inf, 0]), np.array([1, np.inf]), dtype=np.float64),
    spaces.Box(-5, 5, (), np.int16),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32, start=[[0, 1], [-2, 3]]),
]


@pytest.mark.slow("draws many batches")
@given(st.one_of(any_spaces(), st.sampled_from(OTHER_SPACES)))
def test_spaces_come_back_as_they_were(space: Space) -> None:
    rebuilt = decode(encode(space, "the space"))
    assert describe_difference(space, rebuilt) is None
    space.seed(3), rebuilt.seed(3)
    assert str(space.sample()) == str(rebuilt.sample())


def test_a_dict_space_keeps_the_order_of_its_keys() -> None:
    space = spaces.Dict(OrderedDict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))]))
    assert list(decode(encode(space, "x")).spaces) == ["z", "a"]


class OwnSpace(spaces.Box):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1, 2}, r"what\['x'\]\[0\] cannot be saved: expected numbers, .*, got \{1, 2\}"),
        (b"bytes", "got b'bytes'"),
        (1j, "got 1j"),
        (np.complex64(1), "cannot be saved"),
        (np.array([None]), "cannot be saved: expected .*plain arrays"),
        (np.zeros(2, [("a", "i4")]), "cannot be saved"),
        (np.dtype([("a", "i4")]), "cannot be saved"),
        (np.ma.masked_array([1], [True]), "cannot be saved"),
        (object(), "cannot be saved"),
        (np.tanh, "is <ufunc 'tanh'>, which is not registered"),
        (OwnSpace(0, 1, (2,)), "is a OwnSpace, which is not registered: write @marlvec.register_space"),
    ],
)
def test_what_has_no_form_is_an_error_that_says_where(value: Any, text: str) -> None:
    raised = refused(SerialisationError, text, encode, {"x": [value]}, "what")
    assert str(raised).startswith("what['x'][0] ")


@marlvec.register_space(name="tests/words")
class Words(spaces.Space[str]):
    """Some words; equal if the words are, whatever their order. No __repr__: that of a plain object has an address."""

    __repr__ = object.__repr__

    def __init__(self, words: Any, *, longest: int = 9, seed: int | None = None) -> None:
        self.words, self.longest = tuple(words), longest
        super().__init__((), None, seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return str(self.np_random.choice(self.words))

    def contains(self, x: Any) -> bool:
        return x in self.words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and set(self.words) == set(other.words)

    __hash__ = None  # type: ignore[assignment]


@marlvec.register_space
class Even(spaces.Discrete):
    """Without an ``==`` of its own class."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        super().__init__(2 * pairs)


@pytest.mark.parametrize(
    "space",
    [
        Words(["a", "b c"], longest=3),
        Even(4),
        spaces.Dict(said=spaces.Tuple([Words("xy"), Even(1)]), at=spaces.Discrete(2)),
    ],
    ids=["Words", "Even", "nested"],
)
def test_a_space_of_a_registered_class_is_stored_by_name(space: Any) -> None:
    data = json.loads(json.dumps(encode(space, "the space"), default=lambda array: array.tolist()))
    assert "address" not in str(data)
    rebuilt = decode(encode(space, "the space"))
    assert describe_difference(space, rebuilt) is None
    space.seed(3), rebuilt.seed(3)
    assert space.sample() == rebuilt.sample()


def test_what_a_class_of_spaces_must_have_to_be_stored() -> None:
    class Hides(spaces.Discrete):
        def __init__(self, pairs: int, *more: int) -> None:
            super().__init__(2 * pairs)

    class Drifts(spaces.Discrete):
        def __init__(self, pairs: int) -> None:
            self.pairs = pairs + 1
            super().__init__(2 * pairs)

    refused(SerialisationError, "is a Hides, which is not registered", encode, Hides(2), "x")
    for cls, text in ((Hides, "got none for pairs, \\*more"), (Drifts, "would be another space when read back")):
        assert marlvec.register_space(cls, name=f"tests/{cls.__name__}") is cls
        refused(SerialisationError, text, encode, cls(2), "x")
    refused(ArgumentError, "expected a class derived from gymnasium.spaces.Space", marlvec.register_space, int)
    for cls, name in ((Hides, "Box"), (spaces.Box, "tests/box"), (Drifts, "tests/words"), (Words, "other")):
        refused(AlreadyRegisteredError, "", marlvec.register_space, cls, name=name)
    refused(
        RegistryError,
        "no space class is registered as 'tests/wrds'.*did you mean 'tests/words'",
        decode,
        {"$space": "tests/wrds", "args": {}},
    )
    refused(ArgumentError, "cannot make a 'tests/words'", decode, {"$space": "tests/words", "args": {"word": 3}})


class Chat(marlvec.MultiAgentEnv):
    """Two who say words in turns."""

    agents = ("ann", "bob")
    observation_spaces = action_spaces = (Words(["yes", "no"]),) * 2

    def reset(self, slot: Any, *, seed: int | None = None, options: Any = None) -> None:
        self.t = 0
        for a in (0, 1):
            slot.alive[a] = slot.acting[a] = True
            slot.write_obs(a, "yes")

    def step(self, slot: Any) -> None:
        self.t += 1
        for a, said in enumerate(slot.read_actions()):
            slot.write_obs(1 - a, said)
        if self.t == 5:
            self.cut_short(slot)

    def get_state(self) -> int:
        return self.t

    def set_state(self, state: int) -> None:
        self.t = state


def run_chat(folder: Path, load: bool) -> str:
    """Collect, with a pool and a checkpoint; what follows is returned."""
    with marlvec.make(Chat, 2, backend="sync") as envs:
        collector = marlvec.Collector(envs, {"main": marlvec.RandomPolicy()}, seed=0)
        pool = OpponentPool.load(folder / "pool", marlvec.RandomPolicy) if load else OpponentPool(marlvec.RandomPolicy)
        if load:
            marlvec.load_checkpoint(folder / "run", collector=collector)
            assert list(pool) == ["main_0"]
            assert pool["main_0"].agent_connectors().input_space == Chat.observation_spaces[0]
        else:
            collector.collect(env_steps=7)
            pool.snapshot(collector, "main")
            pool.save(folder / "pool")
            marlvec.save_checkpoint(folder / "run", collector=collector)
        return str(collector.collect(env_steps=9)["main"].actions.tolist())


def test_a_pool_and_a_checkpoint_take_own_spaces_and_a_new_process_reads_them(tmp_path: Path) -> None:
    expected = run_chat(tmp_path, load=False)
    assert run_chat(tmp_path, load=True) == expected
    program = (
        "import pathlib, sys, tests.connectors.test_config as t; print(t.run_chat(pathlib.Path(sys.argv[1]), True))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == expected, result.stderr


def test_a_space_that_is_more_than_its_arguments_is_not_written_down() -> None:
    space = spaces.Box(0, 1, (2,))
    space._shape = (3,)  # bent by hand
    with pytest.raises(SerialisationError, match="the space would be another space when read back: at /: expected Box"):
        encode(space, "the space")


@pytest.mark.parametrize(
    "data",
    [
        {"$unknown": 1},
        {"$tuple": 3},
        {"$float": "x"},
        {"$float": []},
        {"$scalar": "nonsense", "value": 1},
        {"$scalar": "<f4"},
        {"$dtype": "nonsense"},
        {"$items": [1, 2]},
        {"$items": [[[], 1]]},
        {"$connector": 3},
        {"$connector": {}},
        {"$connector": {"connector": []}},
        {"$space": "Nowhere", "args": []},
        {"$space": "Box", "args": [1]},
        {"$space": "Box"},
        {"$space": "Discrete", "args": [-1, 0, {"$dtype": "<i8"}]},
        {"$space": [], "args": []},
        {"$space": "MultiBinary", "args": [3, "seed"]},
        {"$connector": {"connector": "FrameStack", "args": [1]}},
    ],
    ids=str,
)
def test_data_that_nothing_gave_is_refused(data: Any) -> None:
    refused((ArgumentError, RegistryError), "", decode, [data])


HOSTILE = ["f4,,", "(((", "(" * 10**6, "i4," * 10**5, "(1000000000,)f4", "9" * 10**6, "\0", "V2000000000,f4", "x=1", ""]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:15])
def test_a_hostile_text_is_a_typed_error_of_bounded_size(text: str) -> None:
    """Of a dtype, a number, a name and a space; numpy's grammar of dtypes goes to Python's parser."""
    cases: list[Any] = [
        {"$dtype": text},
        {"$scalar": text, "value": 1},
        {"$scalar": "|V2000000000", "value": 1},
        {"$scalar": "<f4", "value": text},
        {"$scalar": "<f4", "value": 1e300},
        {"$float": text},
        {"$function": text + "?"},
        {"$space": text, "args": [text]},
        {"$space": "Box", "args": [text, text, {"$dtype": text}]},
        {"$connector": {"connector": text + "?", "args": {}}},
        {"$connector": {"connector": "FrameStack", "args": {text + "?": 1}}},
        {f"${text}": text},
    ]
    for data in cases:
        raised = refused((ArgumentError, RegistryError), "", decode, data)
        assert len(str(raised)) < 2000


@pytest.mark.slow("draws many batches")
def test_what_is_nested_too_deeply_is_a_typed_error() -> None:
    lists: Any = []
    tuples: Any = {"$tuple": []}
    for _ in range(10**5):
        lists, tuples = [lists], {"$tuple": [tuples]}
    for data in (lists, tuples, {"$connector": {"connector": "FrameStack", "args": {"k": lists}}}):
        refused(ArgumentError, "nested too deeply", decode, data)


def test_data_is_said_in_lines_that_differ_where_it_does() -> None:
    one, two = ({"a": [1, np.zeros(3)], "b": x} for x in (np.arange(3), np.arange(1, 4)))
    different = [pair for pair in zip(outline(one), outline(two), strict=True) if pair[0] != pair[1]]
    assert len(different) == 1
    assert "int64 array of (3,)" in different[0][0]


# --- connectors


class Odd(AgentConnector):
    """Every kind of constructor argument at once."""

    def __init__(self, a: int, /, b: Any, *rest: Any, c: Any = None, **more: Any) -> None:
        self.a, self.b, self.rest, self.c, self.more = a, b, rest, c, more

    def __call__(self, rows: Rows) -> Rows:
        return rows


def test_every_kind_of_constructor_argument_comes_back() -> None:
    register_connector(Odd)
    piece = Odd(1, (2, [np.float32(3)]), "x", None, c={"k": float("inf")})
    rebuilt = connector_from_config(json.loads(json.dumps(piece.to_config())))
    assert isinstance(rebuilt, Odd)
    assert same(rebuilt.params(), piece.params())
    assert rebuilt.rest == ("x", None)


def test_connectors_among_the_arguments_come_back() -> None:
    register_connector(Odd)
    piece = Odd(1, [NormalizeObs(clip=2.0), AgentPipeline([FrameStack(3)])], c=spaces.Discrete(3))
    rebuilt: Any = connector_from_config(piece.to_config())
    assert repr(rebuilt.b) == repr(piece.b)
    assert rebuilt.c == piece.c


class Forgetful(AgentConnector):
    def __init__(self, kept: int = 1, lost: int = 2) -> None:
        self.kept = kept

    def __call__(self, rows: Rows) -> Rows:
        return rows


def test_an_argument_that_is_not_kept_is_an_error_and_not_left_out() -> None:
    register_connector(Forgetful)
    with pytest.raises(SerialisationError, match=r"Forgetful: expected attributes named like its arguments \['lost'\]"):
        Forgetful(lost=3).to_config()


@register_connector(name="tests/Dim")
@dataclass(eq=False, repr=False)
class Dim(AgentConnector):
    """A user's dataclass; its types are nobody's business."""

    factor: float = 0.5
    way: Literal["up"] | OnlyForTypeCheckers = "up"  # type: ignore[name-defined]  # noqa: F821  # such names there are

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(obs=rows.obs * self.factor)


def test_a_dataclass_has_its_fields_as_arguments() -> None:
    piece = Dim(0.25, way="down")
    assert piece.to_config()["args"] == {"factor": 0.25, "way": "down"}
    assert repr(connector_from_config(piece.to_config())) == repr(piece) == "Dim(factor=0.25, way='down')"
    assert piece != Dim(0.25, way="down")


@pytest.mark.checklist(82)
def test_a_pipeline_is_rebuilt_with_its_order_parameters_and_names() -> None:
    """Names too that edits have left behind, those of pieces inside, and those the user gave."""
    inner = AgentPipeline([NormalizeObs(), NormalizeObs(clip=None, per_agent=True)])
    inner.name = "norm"
    inner.remove(0)
    named = FrameStack(2)
    named.name = "stack"
    pipeline = AgentPipeline([inner, named, AgentIndicator(["a", "b"])])
    config = json.loads(json.dumps(pipeline.to_config(), allow_nan=False))
    rebuilt = AgentPipeline.from_config(config)
    assert repr(rebuilt) == repr(pipeline)
    assert rebuilt.names == pipeline.names == ("norm", "stack", "AgentIndicator")
    assert isinstance(rebuilt["norm"], AgentPipeline)
    assert rebuilt["norm"].names == ("NormalizeObs_2",)
    assert rebuilt.to_config() == pipeline.to_config()
    rebuilt["norm"].append(NormalizeObs())
    assert rebuilt["norm"].names == ("NormalizeObs_2", "NormalizeObs")
    for whole in (AgentPipeline(), ActionPipeline.default(), LearnerPipeline()):
        assert repr(connector_from_config(whole.to_config())) == repr(whole)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "expected a dict that names its 'connector', as .* got None"),
        ({"args": {}}, "expected a dict that names its 'connector'"),
        ({"connector": 3}, "expected a dict that names its 'connector'"),
        ({"connector": "FrameStack", "args": {}}, "expected the config of a AgentPipeline, got that of a FrameStack"),
        ({"connector": "AgentPipeline"}, "this is no config of a AgentPipeline: KeyError"),
        ({"connector": "AgentPipeline", "pieces": 3, "names": []}, "this is no config of a AgentPipeline: TypeError"),
        ({"connector": "AgentPipeline", "pieces": [], "names": ["x"]}, "a name for each of the 0 connectors"),
        (
            {"connector": "AgentPipeline", "pieces": [ActionPipeline().to_config()], "names": ["x"]},
            "expected the config of a AgentConnector, got that of a ActionPipeline",
        ),
        (
            {"connector": "AgentPipeline", "pieces": [{"connector": "FrameStack"}], "names": ["x"]},
            "this is no config of a FrameStack: KeyError",
        ),
        (
            {
                "connector": "AgentPipeline",
                "pieces": [{"connector": "FrameStack", "args": {"k": 2, "depth": 3}}],
                "names": ["x"],
            },
            r"FrameStack takes no \['depth'\]; its arguments are \['k', 'axis'",
        ),
    ],
)
def test_invalid_pipeline_config_raises(config: Any, text: str) -> None:
    refused(ArgumentError, text, AgentPipeline.from_config, config)


def test_a_config_changes_with_no_edit_after_it() -> None:
    pipeline = AgentPipeline([FrameStack(2)])
    config = pipeline.to_config()
    pipeline.append(NormalizeObs())
    assert len(config["pieces"]) == 1
    assert issubclass(type(connector_from_config(config)), Connector)


# --- Names in the registry: whose they are, and what is not to be had under one


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
    refused(SerialisationError, "output_space of halve is <function .*not registered", piece.to_config)


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
    refused(AlreadyRegisteredError, "the function 'halve'", c.register_function, lambda rows: rows, name="halve")
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
    refused(SerialisationError, "Cell is not registered", found[0].Cell().to_config)


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
    refused(ArgumentError, text, call)


def test_unregistered_name_raises() -> None:
    with pytest.raises(
        RegistryError, match=r"no connector is registered as 'NormaliseObs': .*did you mean 'NormalizeObs"
    ):
        c.connector_from_config({"connector": "NormaliseObs", "args": {}})
    config = c.agent_connector(c.register_function(halve)).to_config()
    config["args"]["function"] = {"$function": "nobody"}
    with pytest.raises(RegistryError, match="no function is registered as 'nobody': first import the module that has"):
        c.connector_from_config(config)
