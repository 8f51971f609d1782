from __future__ import annotations

import copy
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from tests.connectors.helpers.samples import pairs_of, rows_of, same_tree, vectors


class Trace(c.AgentConnector):
    """Writes its letter into the observation, so that order and number of calls show."""

    def __init__(self, letter: str = "?") -> None:
        self.letter = letter

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=np.char.add(rows.obs, self.letter))


class TraceA(Trace):
    pass


class TraceB(Trace):
    pass


class TraceC(Trace):
    pass


KINDS = (TraceA, TraceB, TraceC)
WAYS = ("append", "prepend", "insert_before", "insert_after", "replace", "remove")


def run(pipeline: c.AgentPipeline) -> str:
    return str(pipeline(c.Rows(obs=np.array([""], "U64"))).obs[0])


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(80)
@pytest.mark.fault("E9")
@given(data=st.data())
def test_a_pipeline_is_edited_like_a_list(data: st.DataObject) -> None:
    """Any edits, with any kind of target, against a plain list of (name, piece); names are unique; misses raise."""
    pipeline = c.AgentPipeline()
    pipeline.bind(vectors())
    model: list[tuple[str, Trace]] = []
    for count in range(data.draw(st.integers(0, 12))):
        way = data.draw(st.sampled_from(WAYS))
        new = data.draw(st.sampled_from(KINDS))(chr(ord("a") + count))
        target, at = (None, None) if way in ("append", "prepend") else _draw_target(data, model)
        if at is None and target is not None:
            error = ArgumentError if _many(target, model) else KeyError
            with pytest.raises(error) as raised:
                getattr(pipeline, way)(*((target,) if way == "remove" else (target, new)))
            assert all(name in str(raised.value) for name, _ in model if error is KeyError)
        elif way == "remove":
            assert at is not None
            assert pipeline.remove(target) is model.pop(at)[1]  # type: ignore[arg-type]  # drawn from all kinds
        else:
            others = [pair for i, pair in enumerate(model) if not (way == "replace" and i == at)]
            named = (_free_name(type(new).__name__, [name for name, _ in others]), new)
            if way == "append":
                pipeline.append(new)
                model.append(named)
            elif way == "prepend":
                pipeline.prepend(new)
                model.insert(0, named)
            elif way == "replace":
                assert at is not None
                assert pipeline.replace(target, new) is model[at][1]  # type: ignore[arg-type]  # as above
                model[at] = named
            else:
                assert at is not None
                getattr(pipeline, way)(target, new)
                model.insert(at + (way == "insert_after"), named)
        _equal(pipeline, model)


def _draw_target(data: st.DataObject, model: list[tuple[str, Trace]]) -> tuple[Any, int | None]:
    """A target of any kind, and the position it means, None if it is missing or means several."""
    kind = data.draw(st.sampled_from(["position", "name", "type", "piece"]))
    if kind == "position":
        at = data.draw(st.integers(-4, 4))
        return at, at % len(model) if -len(model) <= at < len(model) else None
    if kind == "name":
        name = data.draw(st.sampled_from([*(name for name, _ in model), "TraceB", "Nobody"]))
        return name, next((i for i, pair in enumerate(model) if pair[0] == name), None)
    if kind == "type":
        cls = data.draw(st.sampled_from([*KINDS, c.FlattenObs]))
        found = [i for i, (_, piece) in enumerate(model) if isinstance(piece, cls)]
        return cls, found[0] if len(found) == 1 else None
    piece = data.draw(st.sampled_from([*(piece for _, piece in model), TraceA("x")]))
    return piece, next((i for i, pair in enumerate(model) if pair[1] is piece), None)


def _many(target: Any, model: list[tuple[str, Trace]]) -> bool:
    return isinstance(target, type) and sum(isinstance(piece, target) for _, piece in model) > 1


def _free_name(wanted: str, taken: list[str]) -> str:
    return next(name for name in [wanted, *(f"{wanted}_{i}" for i in range(2, 99))] if name not in taken)


def _equal(pipeline: c.AgentPipeline, model: list[tuple[str, Trace]]) -> None:
    assert list(pipeline.names) == [name for name, _ in model]
    assert len(set(pipeline.names)) == len(pipeline) == len(model)
    assert list(pipeline) == [piece for _, piece in model]
    assert run(pipeline) == "".join(piece.letter for _, piece in model)
    for i, (name, piece) in enumerate(model):
        assert pipeline[i] is pipeline[i - len(model)] is pipeline[name] is pipeline[piece] is piece
        assert name in pipeline
        assert piece in pipeline
        assert type(piece) in pipeline
        if sum(type(other) is type(piece) for _, other in model) == 1:
            assert pipeline[type(piece)] is piece
    assert "Nobody" not in pipeline
    assert c.FlattenObs not in pipeline


def test_names_of_two_pieces_of_one_class_and_chosen_names() -> None:
    first = c.NormalizeObs()
    pipeline = c.AgentPipeline([first, c.NormalizeObs()])
    named = c.NormalizeObs()
    named.name = "mine"
    pipeline.append(named)
    assert pipeline.names == ("NormalizeObs", "NormalizeObs_2", "mine")
    pipeline.remove(first)
    assert list(pipeline.names) == ["NormalizeObs_2", "mine"]
    with pytest.raises(ArgumentError, match=r"\['NormalizeObs_2', 'mine'\] are all NormalizeObs"):
        pipeline[c.NormalizeObs]
    with pytest.raises(KeyError, match=r"no connector 'NormalizeObs' in AgentPipeline; .*NormalizeObs_2"):
        pipeline.insert_before("NormalizeObs", c.FlattenObs())


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (c.ToNumpy(), r"takes AgentConnectors, got ToNumpy\(\); it belongs into action_connectors$"),
        (c.FlattenObs, "give an instance, not the class"),
        (lambda rows: rows, "decorate the function with @agent_connector"),
        (None, "takes AgentConnectors, got None$"),
    ],
)
def test_a_piece_of_the_wrong_kind(piece: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        c.AgentPipeline([piece])
    with pytest.raises(ArgumentError, match="takes ActionConnectors"):
        c.ActionPipeline([c.FlattenObs()])  # type: ignore[list-item]  # the wrong side is the point


def test_no_piece_sees_a_row_twice() -> None:
    piece = c.NormalizeObs()
    inner = c.AgentPipeline([piece])
    outer = c.AgentPipeline([inner])
    for again in (piece, inner, outer):
        with pytest.raises(ArgumentError, match="already"):
            outer.append(again)
    with pytest.raises(ArgumentError, match="already"):
        inner.append(outer)
    with pytest.raises(ArgumentError, match="already"):
        c.AgentPipeline([piece, piece])
    with pytest.raises(ArgumentError, match="part of a pipeline"):
        c.AgentPipeline([inner])
    other = c.AgentPipeline([c.FlattenObs()])
    with pytest.raises(ArgumentError, match="takes AgentConnectors"):
        c.AgentPipeline([other, None])  # type: ignore[list-item]  # fails after the first piece came in
    outer.append(other)
    outer.remove(inner)
    c.AgentPipeline([inner])
    assert outer.replace(other, piece) is other


def test_an_unbound_pipeline_says_so() -> None:
    rows = c.Rows(obs=np.zeros((1, 2)))
    assert c.AgentPipeline.default()(rows) is rows
    pipeline = c.AgentPipeline([c.NormalizeObs()])
    assert not pipeline.bound
    for use in (lambda: pipeline(rows), lambda: pipeline.input_space, lambda: pipeline.output_space_):
        with pytest.raises(StateError, match=r"AgentPipeline is not bound: call bind\(space\) first"):
            use()


class Breaks(c.AgentConnector):
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def __call__(self, rows: c.Rows) -> c.Rows:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(rows)  # type: ignore[no-any-return]  # a wrong answer is the point


@pytest.mark.fault("E7")
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda rows: None, "connector 'Breaks' of inner must return Rows, got NoneType"),
        (dict, "connector 'Breaks' of inner must return Rows, got dict"),
        (lambda rows: rows.take([0]), "connector 'Breaks' of inner got 2 rows and returned 1"),
        (lambda rows: c.Rows.concat([rows, rows]), "connector 'Breaks' of inner got 2 rows and returned 4"),
    ],
)
def test_a_wrong_answer_is_an_error_at_its_piece(answer: Any, text: str) -> None:
    inner = c.AgentPipeline([Breaks(answer)])
    inner.name = "inner"
    pipeline = c.AgentPipeline([c.ClipReward(sign=True), inner, c.FrameStack(2)])
    pipeline.bind(vectors())
    rows = rows_of([(0, 0), (1, 0)], np.zeros((2, 3), np.float32), rewards=np.zeros(2))
    with pytest.raises(ContractError, match=text) as raised:
        pipeline(rows)
    assert raised.value.__notes__ == ["in connector 'inner' of AgentPipeline"]
    assert pipeline.timings["FrameStack"].calls == 0
    with pytest.raises(ArgumentError, match="rows"):
        pipeline.replace(inner, Breaks(lambda rows: rows.replace(obs=rows.obs[:1])))
        pipeline(rows)


@pytest.mark.fault("E6")
def test_an_exception_names_every_pipeline_on_its_way_and_reset_makes_the_pieces_whole() -> None:
    """The pieces before it keep the rows, as documented; after a reset the pipeline works as a new one."""
    assert c.AgentPipeline.__call__.__doc__ is not None
    assert "reset these envs" in c.AgentPipeline.__call__.__doc__
    breaks = Breaks(ValueError("boom"))
    inner = c.AgentPipeline([c.FrameStack(2), breaks])
    inner.name = "inner"
    pipeline = c.AgentPipeline([inner, c.NormalizeObs()])
    pipeline.bind(vectors(1))
    rows = rows_of([(0, 0)], np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="boom") as raised:
        pipeline(rows)
    assert raised.value.__notes__ == ["in connector 'Breaks' of inner", "in connector 'inner' of AgentPipeline"]
    assert pipeline[c.NormalizeObs].state_dict()["moments"][""]["count"].tolist() == [0]
    breaks.answer = lambda rows: rows
    pipeline.reset([0])
    pipeline.eval()
    assert pipeline(rows).obs.tolist() == [[0, 1]]


def test_a_piece_may_declare_that_it_changes_the_number_of_rows() -> None:
    class Drops(c.AgentConnector):
        changes_length = True

        def __call__(self, rows: c.Rows) -> c.Rows:
            return rows.take(rows.obs[:, 0] > 0)

    inner = c.AgentPipeline([c.AgentPipeline([Drops()]), c.FlattenObs()])
    pipeline = c.AgentPipeline([inner])
    pipeline.bind(vectors(1))
    out = pipeline(c.Rows(obs=np.array([[1], [-1], [2]], np.float32)))
    assert out.obs.tolist() == [[1], [2]]
    inner.remove(c.AgentPipeline)
    assert not pipeline.changes_length


def test_each_piece_has_its_own_timer() -> None:
    pipeline = c.AgentPipeline([c.FlattenObs(), c.AgentPipeline([c.NormalizeObs()])])
    pipeline.bind(vectors())
    for _ in range(3):
        pipeline(c.Rows(obs=np.zeros((2, 3), np.float32)))
    timings = pipeline.timings
    assert {name: t.calls for name, t in timings.items()} == {"FlattenObs": 3, "AgentPipeline": 3}
    assert all(t.seconds > 0 for t in timings.values())
    inner = pipeline["AgentPipeline"]
    assert isinstance(inner, c.AgentPipeline)
    assert inner.timings["NormalizeObs"] == timings["AgentPipeline"]


def test_mode_reaches_every_piece_and_newcomers() -> None:
    inner = c.AgentPipeline([c.NormalizeObs()])
    pipeline = c.AgentPipeline([inner]).eval()
    late = c.NormalizeObs()
    inner.append(late)
    assert not late.training
    assert pipeline.train().training
    assert all(piece.training for piece in (inner, late, inner[0]))


def test_an_edit_that_does_not_fit_is_taken_back_whole() -> None:
    """Also one far inside, whose error arises in the outer pipeline; state and mode are what they were."""
    inner = c.AgentPipeline([c.FlattenObs()])
    pipeline = c.AgentPipeline([inner, c.FrameStack(2), c.AgentIndicator()])
    pipeline.bind(Box(-1, 1, (2, 2)), ["a", "b"])
    pipeline.eval()
    rows = rows_of(pairs_of(1, 2), np.ones((2, 2, 2), np.float32))
    pipeline(rows)
    state = pipeline.state_dict()
    outside = c.NormalizeObs()
    with pytest.raises(UnsupportedSpaceError, match="FlattenObs") as raised:
        inner.remove("FlattenObs")
    assert raised.value.__notes__ == ["in connector 'AgentIndicator' of AgentPipeline"]
    with pytest.raises(UnsupportedSpaceError):
        inner.replace("FlattenObs", outside)
    assert outside.training
    assert outside not in inner
    assert outside.agents == ()
    assert pipeline.output_space_.shape == (10,)
    same_tree(pipeline.state_dict(), state)
    assert pipeline(rows).obs.tolist() == [[1] * 8 + [1, 0], [1] * 8 + [0, 1]]
    state = pipeline.state_dict()
    with pytest.raises(ArgumentError, match="no key"):
        pipeline.prepend(c.FlattenObs(keys=["x"]))
    with pytest.raises(ArgumentError, match="agents are not known"):
        pipeline.bind(Box(-1, 1, (2, 2)))
    same_tree(pipeline.state_dict(), state)
    assert pipeline.agents == ("a", "b")


def test_an_edit_keeps_the_state_of_the_pieces_it_does_not_concern() -> None:
    pipeline = c.AgentPipeline([c.NormalizeObs(), c.FrameStack(2)])
    pipeline.bind(vectors())
    pipeline(rows_of(pairs_of(2, 2), np.ones((4, 3), np.float32)))
    state = pipeline.state_dict()
    pipeline.prepend(c.FlattenObs())
    pipeline.append(c.AgentIndicator(2))
    pipeline.remove("FlattenObs")
    pipeline.remove("AgentIndicator")
    same_tree(pipeline.state_dict(), state)
    pipeline.bind(vectors(2))  # another shape: what was known is of no use
    assert pipeline.state_dict()["NormalizeObs"]["moments"][""]["count"].tolist() == [0]


def test_state_is_kept_by_name() -> None:
    def make(*, turned: bool) -> c.AgentPipeline:
        inner = c.AgentPipeline([c.NormalizeObs(clip=None), c.NormalizeObs()])
        inner.name = "inner"
        pipeline = c.AgentPipeline([c.FlattenObs(), inner, c.FrameStack(2)])
        if turned:
            pipeline.append(pipeline.remove("inner"))
            pipeline.prepend(pipeline.remove("FrameStack"))
        pipeline.bind(vectors())
        return pipeline

    one, two = make(turned=False), make(turned=False)
    rows = rows_of(pairs_of(2, 2), np.arange(12, dtype=np.float32).reshape(4, 3))
    for _ in range(3):
        one(rows)
    two.load_state_dict(one.state_dict())
    same_tree(one.state_dict(), two.state_dict())
    same_tree(one(rows), two(rows))
    merged = one.merge_states([one.state_dict(), two.state_dict()])
    assert merged["FrameStack"] == {}  # running episodes stay where they run
    history = two.state_dict()["FrameStack"]
    two.load_state_dict(merged)
    same_tree(two.state_dict()["FrameStack"], history)
    assert two.state_dict()["inner"]["NormalizeObs_2"]["moments"][""]["count"].tolist() == [32]
    other = c.AgentPipeline([c.NormalizeObs()])
    for wrong in (one.state_dict(), {}):
        with pytest.raises(ArgumentError, match=r"expected a state of the connectors \['NormalizeObs'\], got"):
            other.load_state_dict(wrong)
        with pytest.raises(ArgumentError, match="expected a state of the connectors"):
            other.merge_states([wrong])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: cloudpickle.loads(cloudpickle.dumps(p))])
def test_a_copy_goes_on_by_itself(duplicate: Any) -> None:
    @c.agent_connector
    def double(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs * 2)

    pipeline = c.AgentPipeline([double, c.AgentPipeline([c.NormalizeObs()]), c.FrameStack(2)])
    pipeline.bind(vectors())
    rows = rows_of(pairs_of(2, 2), np.arange(12, dtype=np.float32).reshape(4, 3))
    pipeline(rows)
    other = duplicate(pipeline)
    state = pipeline.state_dict()
    same_tree(other.state_dict(), state)
    for _ in range(2):
        other(rows)
    same_tree(pipeline.state_dict(), state)
    for _ in range(2):
        pipeline(rows)
    same_tree(other.state_dict(), pipeline.state_dict())
    other[1].append(c.ClipReward(sign=True))
    assert len(pipeline[1]) == 1  # type: ignore[arg-type]  # a pipeline


def test_it_describes_itself() -> None:
    inner = c.AgentPipeline([c.NormalizeObs(clip=5.0), c.NormalizeObs()])
    inner.name = "norm"
    pipeline = c.AgentPipeline([c.FlattenObs(), inner, c.FrameStack(4), c.AgentIndicator()])
    assert repr(pipeline) == (
        "AgentPipeline([FlattenObs(), AgentPipeline([NormalizeObs(clip=5.0), NormalizeObs()]), FrameStack(k=4), "
        "AgentIndicator()])"
    )
    assert "not bound" in pipeline.describe()
    pipeline.bind(Box(-1, 1, (2, 3)), ["a", "b"])
    assert pipeline.describe().splitlines() == [
        "AgentPipeline (training)",
        "     Box (2, 3) float32 [-1, 1]",
        "  0. FlattenObs()",
        "     Box (6,) float32 [-1, 1]",
        "  1. norm",
        "     0. NormalizeObs(clip=5.0)",
        "        Box (6,) float32 [-5, 5]",
        "     1. NormalizeObs_2: NormalizeObs()",
        "        Box (6,) float32 [-10, 10]",
        "  2. FrameStack(k=4)",
        "     Box (24,) float32 [-10, 10]",
        "  3. AgentIndicator()",
        "     Box (26,) float32 [-10, 10]",
    ]
    actions = c.ActionPipeline.default().eval()
    actions.bind(Box(-2, 3, (2,)))
    assert actions.describe().splitlines()[:4] == [
        "ActionPipeline (eval)",
        "     Box (2,) float32 [-1, 1]",
        "  0. ToNumpy()",
        "     Box (2,) float32 [-1, 1]",
    ]
    actions.bind(Discrete(3))
    assert "Discrete(3)" in actions.describe()


def test_an_inner_pipeline_is_bound_by_the_outer_one() -> None:
    inner = c.ActionPipeline.default()
    outer = c.ActionPipeline([inner])
    outer.bind(Box(-2, 3, (2,)))
    assert inner.policy_space_ == outer.policy_space_ == Box(-1, 1, (2,))
    assert inner.env_space == Box(-2, 3, (2,))
    inner.remove("UnsquashActions")
    assert outer.policy_space_ == Box(-2, 3, (2,))
    with pytest.raises(ArgumentError, match="is part of ActionPipeline; bind ActionPipeline"):
        inner.bind(Discrete(2))
    out = outer(c.Rows(actions=np.array([[9.0, 0.5]], np.float32)))
    assert out.actions_for_env.tolist() == [[3.0, 0.5]]
    assert isinstance(inner, c.Connector)
