"""Pipelines: edits, calls, what they tell their pieces, and which spaces they declare."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors.leafwise import space_summary
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.spaces.tree import map_space
from marlvec.trees import tree_leaves
from tests.connectors.lives import AGENTS, action_pipelines, agent_pipelines, live, sampled_steps
from tests.connectors.samples import Space, all_inside, any_spaces, batch, pairs_of, rows_of, same_tree, vectors
from tests.vector.support.reference import refused


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
            raised = refused(error, "", getattr(pipeline, way), *((target,) if way == "remove" else (target, new)))
            assert all(name in str(raised) for name, _ in model if error is KeyError)
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
    refused(ArgumentError, text, c.AgentPipeline, [piece])
    with pytest.raises(ArgumentError, match="takes ActionConnectors"):
        c.ActionPipeline([c.FlattenObs()])  # type: ignore[list-item]  # the wrong side is the point


def test_no_piece_sees_a_row_twice() -> None:
    piece = c.NormalizeObs()
    inner = c.AgentPipeline([piece])
    outer = c.AgentPipeline([inner])
    for again in (piece, inner, outer):
        refused(ArgumentError, "already", outer.append, again)
    refused(ArgumentError, "already", inner.append, outer)
    refused(ArgumentError, "already", c.AgentPipeline, [piece, piece])
    refused(ArgumentError, "part of a pipeline", c.AgentPipeline, [inner])
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
        refused(StateError, r"AgentPipeline is not bound: call bind\(space\) first", use)


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
    raised = refused(ContractError, text, pipeline, rows)
    assert raised.__notes__ == ["in connector 'inner' of AgentPipeline"]
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
    raised = refused(ValueError, "boom", pipeline, rows)
    assert raised.__notes__ == ["in connector 'Breaks' of inner", "in connector 'inner' of AgentPipeline"]
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
    raised = refused(UnsupportedSpaceError, "FlattenObs", inner.remove, "FlattenObs")
    assert raised.__notes__ == ["in connector 'AgentIndicator' of AgentPipeline"]
    refused(UnsupportedSpaceError, "", inner.replace, "FlattenObs", outside)
    assert outside.training
    assert outside not in inner
    assert outside.agents == ()
    assert pipeline.output_space_.shape == (10,)
    same_tree(pipeline.state_dict(), state)
    assert pipeline(rows).obs.tolist() == [[1] * 8 + [1, 0], [1] * 8 + [0, 1]]
    state = pipeline.state_dict()
    refused(ArgumentError, "no key", pipeline.prepend, c.FlattenObs(keys=["x"]))
    refused(ArgumentError, "agents are not known", pipeline.bind, Box(-1, 1, (2, 2)))
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
        refused(ArgumentError, "expected a state of the connectors", other.merge_states, [wrong])


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
    refused(ArgumentError, "is part of ActionPipeline; bind ActionPipeline", inner.bind, Discrete(2))
    out = outer(c.Rows(actions=np.array([[9.0, 0.5]], np.float32)))
    assert out.actions_for_env.tolist() == [[3.0, 0.5]]
    assert isinstance(inner, c.Connector)


# --- What pipelines tell their pieces: spaces, agents, the policy's actions, and which envs are over


class Notes(c.AgentConnector):
    """Writes down what it knew each time it was set up."""

    def __init__(self, *, refuse: Any = None) -> None:
        self.refuse = refuse
        self.known: list[Any] = []

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows

    def setup(self, space: Space) -> None:
        self.known.append((self.agents, self.action_space))
        if self.refuse is not None and self.refuse == self.action_space:
            raise ArgumentError("not these actions")


class ActionNotes(c.ActionConnector):
    def __init__(self) -> None:
        self.known: list[Any] = []

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows

    def setup(self, space: Space) -> None:
        self.known.append((self.action_space, space))


def test_every_piece_is_told_the_policys_actions_before_it_is_set_up() -> None:
    """At any depth, and those that come later; a new bind tells all of them anew."""
    deep, late, inner_late = Notes(), Notes(), Notes()
    inner = c.AgentPipeline([deep])
    pipeline = c.AgentPipeline([c.FlattenObs(), inner])
    assert pipeline.action_space is None
    pipeline.bind(vectors(), ["a", "b"], Discrete(3))
    pipeline.append(late)
    inner.append(inner_late)
    assert deep.known[0] == late.known[0] == inner_late.known[0] == (("a", "b"), Discrete(3))
    assert pipeline.action_space == inner.action_space == Discrete(3)
    pipeline.bind(vectors(), ["a"], Discrete(4))
    pipeline.bind(vectors())
    for piece in (deep, late, inner_late):
        assert piece.known[-2:] == [(("a",), Discrete(4)), ((), None)]


def test_a_bind_that_fails_leaves_all_that_was_known() -> None:
    picky = Notes(refuse=Discrete(4))
    inner = c.AgentPipeline([picky])
    pipeline = c.AgentPipeline([inner])
    pipeline.bind(vectors(), ["a"], Discrete(3))
    refused(ArgumentError, "not these actions", pipeline.bind, vectors(2), ["b"], Discrete(4))
    for piece in (pipeline, inner, picky):
        assert (piece.agents, piece.action_space) == (("a",), Discrete(3))
    assert pipeline.input_space == vectors()


def test_a_piece_that_is_refused_forgets_what_it_was_told() -> None:
    pipeline = c.AgentPipeline([c.FlattenObs()])
    pipeline.bind(vectors(), ["a"], Discrete(3))
    picky = Notes(refuse=Discrete(3))
    for piece in (picky, c.AgentPipeline([picky])):
        refused(ArgumentError, "not these actions", pipeline.append, piece)
        assert (picky.agents, picky.action_space) == (piece.agents, piece.action_space) == ((), None)
    assert pipeline.names == ("FlattenObs",)


def test_the_action_side_works_out_the_policys_space_and_tells_it_after_each_edit() -> None:
    """All pieces, wherever they stand, hear of the one space the policy acts in; `setup` gives each its own."""
    first, last = ActionNotes(), ActionNotes()
    inner = c.ActionPipeline([c.UnsquashActions(), last])
    pipeline = c.ActionPipeline([first, inner, c.ClipActions()])
    env, unit = Box(-2, 3, (2,)), Box(-1, 1, (2,))
    pipeline.bind(env)
    assert first.known[-1] == (unit, unit)
    assert last.known[-1] == (unit, env)
    assert pipeline.action_space == inner.action_space == pipeline.policy_space_ == unit
    assert pipeline.env_space == env
    inner.remove(c.UnsquashActions)
    assert first.known[-1] == last.known[-1] == (env, env)
    inner.prepend(c.UnsquashActions())
    assert first.known[-1] == (unit, unit)
    pipeline.bind(env, action_space=unit)
    with pytest.raises(ArgumentError, match=r"through ActionPipeline the policy acts in Box\(-1.*not in Discrete\(3\)"):
        pipeline.bind(env, action_space=Discrete(3))
    assert pipeline.action_space == unit


def test_a_pipeline_is_across_agents_where_a_piece_is() -> None:
    class Team(Notes):
        across_agents = True

    inner = c.AgentPipeline([c.FlattenObs()])
    pipeline = c.AgentPipeline([inner])
    assert not pipeline.across_agents
    inner.append(Team())
    assert pipeline.across_agents
    assert inner.across_agents
    inner.remove(Team)
    assert not pipeline.across_agents
    inner.append(Team())
    pipeline.remove(inner)
    assert not pipeline.across_agents
    assert inner.across_agents


# --- the learner side


class Double(c.LearnerConnector):
    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs * 2)


def test_a_learner_pipeline_runs_unbound_and_says_its_pieces_without_spaces() -> None:
    @c.learner_connector
    def add_one(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs + 1)

    pipeline = c.LearnerPipeline([Double(), c.LearnerPipeline([add_one])])
    assert pipeline(c.Rows(obs=np.array([1.0]))).obs.tolist() == [3.0]
    lines = ["LearnerPipeline (training)", "  0. Double()", "  1. LearnerPipeline", "     0. add_one"]
    assert pipeline.describe().splitlines() == lines
    pipeline.bind(vectors(), ["a"])
    assert pipeline.describe().splitlines() == lines
    assert pipeline(c.Rows(obs=np.array([1.0]))).obs.tolist() == [3.0]
    assert pipeline.timings["Double"].calls == 2
    refused(ArgumentError, "takes LearnerConnectors, got FlattenObs", pipeline.append, c.FlattenObs())


def test_a_learner_function_may_change_the_number_of_rows_where_it_says_so() -> None:
    def half(rows: c.Rows) -> c.Rows:
        return rows.take(slice(0, len(rows) // 2))

    rows = c.Rows(obs=np.arange(4.0))
    assert len(c.LearnerPipeline([c.learner_connector(name="half", changes_length=True)(half)])(rows)) == 2
    with pytest.raises(ContractError, match="connector 'half' of LearnerPipeline got 4 rows and returned 2"):
        c.LearnerPipeline([c.learner_connector(half)])(rows)


# --- resets


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(93)
@given(pipeline=st.one_of(agent_pipelines(), action_pipelines()), gone=st.sampled_from([(0,), (1, 2), None]))
def test_a_reset_reaches_all_pieces_and_takes_exactly_the_named_envs(pipeline: Any, gone: Any) -> None:
    """A chain that was reset goes on like one that never saw those envs. No policy is asked, so none need be there."""
    other = type(pipeline).from_config(pipeline.to_config())
    if isinstance(pipeline, c.AgentPipeline):
        other.bind(pipeline.input_space, AGENTS, pipeline.action_space)
    else:
        other.bind(pipeline.env_space, AGENTS)
    steps = sampled_steps(4, 14)
    stay = tuple({0, 1, 2} - set(gone or (0, 1, 2)))
    live(pipeline.eval(), steps[:7])
    live(other.eval(), [step.of_envs(stay) for step in steps[:7]])
    pipeline.reset(gone)
    for expected, got in zip(live(other, steps[7:]), live(pipeline, steps[7:]), strict=True):
        same_tree(got, expected)


# --- edits


@pytest.mark.fault("E9")
def test_a_name_that_is_taken_gets_a_number_and_never_two_pieces() -> None:
    pipeline = c.AgentPipeline()
    for _ in range(3):
        piece = Notes()
        piece.name = "notes"
        pipeline.append(piece)
    twin = Notes()
    twin.name = "notes_2"
    pipeline.prepend(twin)
    assert pipeline.names == ("notes_2_2", "notes", "notes_2", "notes_3")
    assert pipeline["notes_2_2"] is twin


# --- What a pipeline works out ahead of its calls: which pieces run, and that every edit is seen


class Doubles(c.ActionConnector):
    """Also counts what it is told."""

    def __init__(self) -> None:
        self.told = self.forgot = 0

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(actions_for_env=rows.actions_for_env * 2)

    def on_policy_output(self, rows: c.Rows) -> None:
        self.told += 1

    def reset(self, env_ids: Any = None) -> None:
        self.forgot += 1


class ClipsAndMore(c.ClipActions):
    """What `ClipActions` says of itself is not true of this one's call."""

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(more=np.ones(len(rows)))


def calls(pipeline: c.ActionPipeline) -> dict[str, int]:
    return {name: timing.calls for name, timing in pipeline.timings.items()}


def test_pieces_that_change_nothing_are_not_called() -> None:
    rows = c.Rows(actions=np.array([0, 2]))
    pipeline = c.ActionPipeline.default()
    pipeline.bind(spaces.Discrete(3))
    pipeline(rows)
    assert calls(pipeline) == {"ToNumpy": 1, "UnsquashActions": 0, "ClipActions": 0, "ReadOnlyActions": 1}
    pipeline.bind(spaces.Box(-1, 0.5, (), np.float32))  # now they do
    out = pipeline(c.Rows(actions=np.array([0.0, 2.0], np.float32)))
    assert calls(pipeline) == {"ToNumpy": 2, "UnsquashActions": 1, "ClipActions": 1, "ReadOnlyActions": 2}
    assert out.actions_for_env.tolist() == [-0.25, 0.5]
    assert not c.ClipActions().is_identity  # nobody knows yet


def test_class_flags_do_not_apply_to_a_subclass_with_its_own_call() -> None:
    pipeline = c.ActionPipeline([ClipsAndMore()])
    pipeline.bind(spaces.Discrete(3))
    assert "more" in pipeline(c.Rows(actions=np.array([0, 2])))


def test_a_piece_of_the_users_may_say_so_too() -> None:
    class Nothing(c.AgentConnector):
        is_identity = True

        def __call__(self, rows: c.Rows) -> c.Rows:
            raise AssertionError("called")

    pipeline = c.AgentPipeline([Nothing()])
    pipeline.bind(spaces.Discrete(3))
    rows = c.Rows(obs=np.zeros(2, np.int64))
    assert pipeline(rows) is rows


@given(edits=st.lists(st.tuples(st.sampled_from(["add", "remove", "nest"]), st.integers(0, 9)), max_size=12))
def test_every_edit_of_every_pipeline_inside_is_seen(edits: list[tuple[str, int]]) -> None:
    """Pieces come, go and are nested at any depth; a call runs those that are there, once each."""
    outer = c.ActionPipeline([])
    outer.bind(spaces.Box(-np.inf, np.inf, ()))
    chains = [outer]
    for edit, k in edits:
        chain = chains[k % len(chains)]
        if edit == "add":
            chain.append(Doubles())
        elif edit == "nest":
            chains.append(c.ActionPipeline([c.UnsquashActions()]))
            chain.append(chains[-1])
        elif plain := [piece for piece in chain if isinstance(piece, Doubles)]:
            chain.remove(plain[k % len(plain)])
        there = [piece for each in chains for piece in each if isinstance(piece, Doubles)]
        before = [(piece.told, piece.forgot) for piece in there]
        out = outer(c.Rows(actions=np.ones(2)))
        outer.on_policy_output(out)
        outer.reset([0])
        assert out.actions_for_env.tolist() == [2.0 ** len(there)] * 2
        assert [(piece.told, piece.forgot) for piece in there] == [(a + 1, b + 1) for a, b in before]


# --- What spaces a pipeline declares, and that what comes out of it lies in them


WOLVES_AND_HARE = ("wolf_0", "wolf_1", "hare")
PAIRS = pairs_of(3, 3)


@c.agent_connector(output_space=lambda space: space)
def unchanged(rows: c.Rows) -> c.Rows:
    return rows


def pieces() -> st.SearchStrategy[c.AgentConnector]:
    stacks = st.builds(
        c.FrameStack,
        st.integers(1, 3),
        axis=st.sampled_from([0, -1]),
        new_axis=st.booleans(),
        pad=st.sampled_from(["zero", "repeat"]),
    )
    norms = st.builds(c.NormalizeObs, per_agent=st.booleans(), clip=st.sampled_from([10.0, 0.1, None]))
    indicators = st.builds(c.AgentIndicator, mode=st.sampled_from(["one_hot", "type"]))
    nested = st.builds(lambda piece: c.AgentPipeline([piece]), norms)
    others = st.builds(c.FlattenObs), st.builds(c.ClipReward, sign=st.just(True)), st.just(unchanged)
    return st.one_of(stacks, norms, indicators, nested, *others)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(81)
@given(space=any_spaces(), data=st.data())
def test_spaces_follow_every_edit_and_hold_what_comes_out(space: Space, data: st.DataObject) -> None:
    """Random edits of a pipeline on a random space: those that fit and those that are refused."""
    pipeline = c.AgentPipeline()
    pipeline.bind(space, WOLVES_AND_HARE)
    for edit in range(data.draw(st.integers(1, 5))):
        before = list(pipeline), pipeline.output_space_
        try:
            if len(pipeline) and data.draw(st.booleans()):
                at = data.draw(st.integers(0, len(pipeline) - 1))
                way = data.draw(st.sampled_from(["remove", "replace", "insert_before", "insert_after"]))
                getattr(pipeline, way)(*([at] if way == "remove" else [at, data.draw(pieces())]))
            else:
                pipeline.append(data.draw(pieces()))
        except UnsupportedSpaceError:
            assert (list(pipeline), pipeline.output_space_) == before
        declared = space
        for piece in pipeline:
            declared = piece.output_space(declared)
        assert pipeline.output_space_ == declared
        assert pipeline.input_space == space
        for tick in range(2):
            rows = rows_of(
                PAIRS, batch(space, len(PAIRS), 10 * edit + tick), rewards=np.zeros(9), first=np.zeros(9, bool)
            )
            assert all_inside(declared, pipeline(rows).obs, len(PAIRS))
        last = data.draw(st.booleans())
        pipeline.reset([1])
        if last:
            pipeline.eval()
        assert all_inside(declared, pipeline(rows).obs, len(PAIRS))
        assert len(pipeline(rows.take([])).obs) == 0 if isinstance(declared, spaces.Box) else True


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    space = spaces.Dict(OrderedDict([("z", spaces.Discrete(2)), ("a", spaces.Box(0, 1, (2,)))]))
    mapped = map_space(lambda leaf: leaf, space)
    assert isinstance(mapped, spaces.Dict)
    assert list(mapped.spaces) == ["z", "a"]


def test_spaces_in_a_few_words() -> None:
    space = spaces.Dict(
        {"a": spaces.Box(-1, 1, (2, 3)), "b": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (0,))])}
    )
    assert space_summary(space) == "{a: Box (2, 3) float32 [-1, 1], b: (Discrete(3), Box (0,) float32 [0, 0])}"


@pytest.mark.parametrize(
    "piece", [c.FrameStack(3), c.MaxObs(3), c.DelayObs(2), c.View("before", "obs", "-2:-1"), c.TeamObs()], ids=repr
)
def test_what_was_seen_before_an_edit_is_not_shown_where_it_does_not_belong(piece: c.AgentConnector) -> None:
    """In mid-episode the observations get other bounds: those from before are not in the new space."""
    pipeline = c.AgentPipeline([c.ScaleObs(5, 9), piece])
    pipeline.bind(spaces.Box(0, 1, (2,)), ("a", "b"))
    rows = rows_of([(0, 0), (0, 1)], np.full((2, 2), 0.5, np.float32))
    pipeline(rows)
    pipeline.remove(0)
    out = pipeline(rows)
    assert all_inside(pipeline.output_space_, out.obs, 2)
    shown = [out.obs, out.get("before", np.zeros(2))]
    assert max(float(np.max(leaf)) for _, leaf in tree_leaves(tuple(shown))) <= 1
