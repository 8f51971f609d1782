"""What all pieces of the action side have in common, and what they are for: lines 97 and 98 of the checklist."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.connectors import ActionConnector, ActionPipeline, Rows, action_connector
from marlvec.connectors.action.conversions import MapActions, PadActions
from marlvec.connectors.action.discretize_actions import DiscretizeActions
from marlvec.connectors.action.epsilon_greedy import EpsilonGreedy
from marlvec.connectors.action.held_actions import RepeatActions, StickyActions
from marlvec.connectors.action.noise import GaussianNoise, OrnsteinUhlenbeckNoise
from marlvec.connectors.action.valid_actions import MaskInvalid, ReplaceNaN
from marlvec.errors import ArgumentError, StateError
from marlvec.trees import map_tree
from tests.connectors.helpers.action_samples import bind, decisions, play, send
from tests.connectors.helpers.samples import all_inside, same_tree

GEAR = spaces.Discrete(5, start=-2)
DIALS = spaces.MultiDiscrete(np.array([[2, 3], [4, 1]]), start=np.array([[1, 0], [0, 5]]))
ARM = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([3.0, 0.3], np.float32))
ROBOT = spaces.Dict(
    {
        "arm": ARM,
        "dial": spaces.Box(0, 9, (1,), np.int64),
        "gear": GEAR,
        "head": spaces.Tuple([spaces.Box(-1, 1, (2, 1), np.float64), DIALS]),
        "lights": spaces.MultiBinary(2),
    }
)


def negate(actions: Any) -> Any:
    return map_tree(lambda leaf: -leaf, actions)


Make = Callable[[], ActionConnector]
PIECES: list[tuple[Make, spaces.Space[Any], int | None]] = [
    (lambda: MapActions(negate), spaces.Box(-1, 1, (2,)), None),
    (lambda: DiscretizeActions(3), ARM, None),
    (lambda: DiscretizeActions([2, 5], joint=True), ARM, None),
    (lambda: DiscretizeActions(2), ROBOT, None),
    (MaskInvalid, GEAR, 5),
    (lambda: MaskInvalid("random", seed=3), GEAR, 5),
    (lambda: MaskInvalid("random"), spaces.MultiDiscrete([3, 4], start=[1, -1]), 7),
    (lambda: StickyActions(0.5), ROBOT, None),
    (lambda: StickyActions(0.5, seed=7), GEAR, None),
    (lambda: GaussianNoise(0.3), ARM, None),
    (lambda: GaussianNoise(0.5, final=0.01, decay_steps=4), ROBOT, None),
    (lambda: OrnsteinUhlenbeckNoise(sigma=2), ARM, None),
    (lambda: OrnsteinUhlenbeckNoise(sigma=2, clip=True), ROBOT, None),
    (lambda: EpsilonGreedy(0.5), GEAR, 5),
    (lambda: EpsilonGreedy(0.9, final=0, decay_steps=3), ROBOT, None),
    (lambda: RepeatActions(3), ROBOT, None),
    (ReplaceNaN, ROBOT, None),
    (lambda: ReplaceNaN("random"), ARM, None),
    (lambda: PadActions(8), GEAR, None),
    (lambda: PadActions(6, invalid=1), ROBOT, None),
]
STOCHASTIC: list[tuple[Callable[[int], ActionConnector], spaces.Space[Any], int | None]] = [
    (lambda seed: MaskInvalid("random", seed=seed), GEAR, 5),
    (lambda seed: StickyActions(seed=seed), ROBOT, None),
    (lambda seed: GaussianNoise(seed=seed), ARM, None),
    (lambda seed: OrnsteinUhlenbeckNoise(seed=seed), ARM, None),
    (lambda seed: EpsilonGreedy(0.5, seed=seed), GEAR, 5),
    (lambda seed: ReplaceNaN("random", seed=seed), ARM, None),
]
each_piece = pytest.mark.parametrize(
    ("make", "space", "mask"), PIECES, ids=lambda value: repr(value()) if callable(value) else ""
)


def with_nan(actions: Any) -> Any:
    """The same with NaN in every float leaf, in half of the rows."""

    def spoil(leaf: Any) -> Any:
        if leaf.dtype.kind != "f" or leaf.ndim < 2:
            return leaf
        leaf = leaf.copy()
        leaf[::2, 0] = np.nan
        return leaf

    return map_tree(spoil, actions)


def ticks_of(piece: ActionPipeline, count: int, mask: int | None, seed: int = 0) -> list[Rows]:
    """A rollout of members of the policy's space; spoilt by NaN for a piece that wants those."""
    ticks = play(piece.policy_space_, count, seed=seed, mask=mask)
    if "ReplaceNaN" in piece:
        ticks = [rows.replace(actions=with_nan(rows.actions)) for rows in ticks]
    return ticks


@pytest.mark.mostly_slow("draws many batches", quick=12)
@each_piece
@settings(max_examples=20)  # each is a rollout of several calls for every row
@given(data=st.data())
def test_a_row_comes_out_the_same_in_any_batch(
    make: Make, space: spaces.Space[Any], mask: int | None, data: st.DataObject
) -> None:
    """Whole ticks, against single rows in any order, by one connector and by one for each env; with resets between."""
    whole, single = bind(make(), space), bind(make(), space)
    apart = {env: bind(make(), space) for env in range(3)}
    for rows in ticks_of(whole, data.draw(st.integers(1, 6)), mask, data.draw(st.integers(0, 99))):
        together = whole(rows)
        for i in data.draw(st.permutations(range(len(rows)))):
            row = rows.take([i])
            same_tree(single(row), together.take([i]))
            same_tree(apart[int(row.env_id[0])](row), together.take([i]))
        ended = sorted(data.draw(st.sets(st.integers(0, 2))))
        whole.reset(ended)
        single.reset(ended)
        for env in ended:
            apart[env].reset()


@pytest.mark.mostly_slow("draws many batches", quick=3)
@each_piece
def test_what_comes_out_is_of_the_envs_space_and_what_went_in_is_as_it_was(
    make: Make, space: spaces.Space[Any], mask: int | None
) -> None:
    pipeline = bind(make(), space)
    for rows in ticks_of(pipeline, 8, mask):
        given_columns = dict(rows)
        before = map_tree(np.copy, given_columns)
        out = pipeline(rows)
        assert all_inside(space, out.actions_for_env, len(rows))
        same_tree(map_tree(np.asarray, given_columns), before)
        assert out.keys() == {*given_columns, "actions_for_env"}
        same_tree({name: out[name] for name in given_columns}, before)
    empty = pipeline(ticks_of(pipeline, 1, mask)[0].take([]))
    assert len(empty) == 0


@pytest.mark.mostly_slow("interrupts at many lines", quick=2)
@each_piece
def test_it_goes_on_from_a_state_as_if_never_interrupted(
    make: Make, space: spaces.Space[Any], mask: int | None
) -> None:
    """In the middle of episodes; also a copy does, and one that is set up anew for an equal space."""
    one, two = bind(make(), space), bind(make(), space)
    ticks = ticks_of(one, 14, mask)
    send(one, ticks[:7])
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    three, four = copy.deepcopy(one), bind(make(), space)
    four.load_state_dict(one.state_dict())
    four.bind(copy.deepcopy(space))
    for rows in ticks[7:]:
        out = one(rows)
        for other in (two, three, four):
            same_tree(other(rows), out)
            same_tree(other.state_dict(), one.state_dict())


@pytest.mark.mostly_slow("draws many batches", quick=2)
@each_piece
def test_reset_forgets_the_named_envs_and_no_others(make: Make, space: spaces.Space[Any], mask: int | None) -> None:
    """An env that was reset goes on as in a fresh connector, whatever its rows say; a decay alone is not forgotten."""
    piece, fresh = bind(make(), space), bind(make(), space)
    untouched = bind(make(), space)
    ticks = ticks_of(piece, 12, mask)
    send(piece, ticks[:6])
    send(untouched, ticks[:6])
    piece.reset([1])
    decays = getattr(piece[0], "decay_steps", None) is not None
    for rows in ticks[6:]:
        rows = rows.drop("first")
        mine, others = rows.env_id == 1, rows.env_id != 1
        out = piece(rows)
        same_tree(out.take(others), untouched(rows.take(others)))
        same_tree(out.take(mine), (untouched if decays else fresh)(rows.take(mine)))


@each_piece
def test_before_it_knows_its_space_it_says_so(make: Make, space: spaces.Space[Any], mask: int | None) -> None:
    piece = make()
    if isinstance(piece, MapActions):
        return
    rows = ticks_of(bind(make(), space), 1, mask)[0]
    with pytest.raises(StateError, match="does not know its space"):
        piece(rows.replace(actions_for_env=rows.actions))


@each_piece
def test_a_state_that_is_not_its_own_is_refused(make: Make, space: spaces.Space[Any], mask: int | None) -> None:
    pipeline = bind(make(), space)
    with pytest.raises(ArgumentError):
        pipeline[0].load_state_dict({"something": 1})


@pytest.mark.mostly_slow("draws many batches", quick=2)
@pytest.mark.checklist(97)
@pytest.mark.parametrize(("make", "space", "mask"), STOCHASTIC, ids=lambda v: repr(v(0)) if callable(v) else "")
def test_masking_lambda_discretise_sticky_and_noise_exist_and_what_is_random_has_a_seed(
    make: Callable[[int], ActionConnector], space: spaces.Space[Any], mask: int | None
) -> None:
    """Equal seeds send equal actions, other seeds others, in the same episodes; numpy's own generator stays as it is.

    The chain of the second half has all five kinds; the pieces' own tests say what each does.
    """
    np.random.seed(7)  # noqa: NPY002  # that nobody draws from it is the point
    untouched = np.random.random(3).tolist()  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    sent = []
    for seed in (1, 1, 2):
        pipeline = bind(make(seed), space)
        sent.append([rows.actions_for_env for rows in send(pipeline, ticks_of(pipeline, 10, mask))])
    assert np.random.random(3).tolist() == untouched  # noqa: NPY002
    same_tree(sent[0], sent[1])
    with pytest.raises(AssertionError):
        same_tree(sent[0], sent[2])

    chain = ActionPipeline(
        [
            MapActions(lambda actions: actions[:, ::-1]),
            GaussianNoise(0.2, seed=5),
            StickyActions(seed=5),
            MapActions(lambda actions: (actions[:, 0] > 0).astype(np.int64), spaces.Box(-1, 1, (2,))),
            MaskInvalid("random", seed=5),
            DiscretizeActions(2),
        ]
    )
    chain.bind(spaces.Box(-3, 3, ()))
    assert chain.policy_space_ == spaces.Box(-1, 1, (2,))
    for rows in play(chain.policy_space_, 5, mask=2):
        assert np.isin(chain(rows).actions_for_env, [-3, 3]).all()


@pytest.mark.checklist(98)
def test_action_connectors_see_the_rows_and_may_change_states_and_extras() -> None:
    """The connector half of it; tests/collect has the other, where these columns arrive in batches."""
    seen: list[dict[str, Any]] = []

    @action_connector
    def cautious(rows: Rows) -> Rows:
        """Near a wall (obs above 1) the agent stands still, its state is cleared, and its logp says so."""
        seen.append(dict(rows))
        stops = rows.obs[:, 0] > 1
        return rows.replace(
            actions_for_env=np.where(stops[:, None], 0, rows.actions_for_env),
            state_out={"h": np.where(stops[:, None], 0, rows.state_out["h"])},
            logp=np.where(stops, 0, rows.logp),
            stopped=stops,
        )

    space = spaces.Box(-1, 1, (2,))
    chain = ActionPipeline([GaussianNoise(0.1), cautious])
    chain.bind(space)
    rows = decisions(
        np.ones((4, 2), np.float32),
        envs=2,
        agents=2,
        t=3,
        obs=np.array([[0.0], [2.0], [0.5], [9.0]]),
        rewards=np.arange(4.0),
        action_mask=np.ones((4, 1), bool),
        state_in={"h": np.zeros((4, 3))},
        state_out={"h": np.ones((4, 3))},
        logp=np.full(4, -1.5),
    )
    out = chain(rows)
    inputs = ("env_id", "agent_index", "eps_id", "t", "first", "obs", "rewards", "action_mask", "state_in", "state_out")
    for name in (*inputs, "logp", "actions"):
        assert seen[0][name] is rows[name]
    np.testing.assert_array_equal(out.stopped, [False, True, False, True])
    np.testing.assert_array_equal(out.logp, [-1.5, 0, -1.5, 0])
    np.testing.assert_array_equal(out.state_out["h"][:, 0], [1, 0, 1, 0])
    np.testing.assert_array_equal(out.actions_for_env[[1, 3]], np.zeros((2, 2)))
    assert (out.actions_for_env[[0, 2]] > 0).all()
    np.testing.assert_array_equal(out.actions, np.ones((4, 2)))
    np.testing.assert_array_equal(rows.state_out["h"], np.ones((4, 3)))


@each_piece
def test_a_repr_rebuilds_what_was_given(make: Make, space: spaces.Space[Any], mask: int | None) -> None:
    piece = make()
    again = type(piece)(**piece.params())
    assert repr(again) == repr(piece)
    ticks = ticks_of(bind(make(), space), 5, mask)
    for one, two in zip(send(bind(piece, space), ticks), send(bind(again, space), ticks), strict=True):
        same_tree(one, two)
