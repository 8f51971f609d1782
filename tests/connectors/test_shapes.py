"""Observations whose form changes: flattened, images, of a team, and Dicts without some keys."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from marlvec import connectors as c
from marlvec.connectors import AgentPipeline, FlattenObs, Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree
from tests.connectors import samples
from tests.connectors.samples import Space, all_inside, any_spaces, batch, bound, rows_of, through, unbatch, vectors
from tests.vector.support.reference import refused


def bound_flat(space: Space, **kwargs: Any) -> AgentPipeline:
    return bound(FlattenObs(**kwargs), space)


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), n=st.integers(0, 4))
def test_it_flattens_as_gymnasium_does(space: Space, n: int) -> None:
    pipeline, obs = bound_flat(space), batch(space, n)
    flat = pipeline(Rows(obs=obs)).obs
    dtype = np.float64 if any(leaf.dtype == np.float64 for leaf in SpaceTree(space).leaves) else np.float32
    assert flat.dtype == dtype == pipeline.output_space_.dtype
    assert flat.shape == (n, spaces.flatdim(space))
    for i in range(n):
        np.testing.assert_array_equal(flat[i], np.asarray(spaces.flatten(space, unbatch(space, obs, i)), dtype))


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), data=st.data())
def test_keys_to_keep_or_to_drop(space: Space, data: st.DataObject) -> None:
    """Any set of paths, of leaves or of what holds them: keep is what drop of the others is."""
    paths = [leaf.path for leaf in SpaceTree(space).leaves]
    prefixes = sorted({"/".join(path.split("/")[: i + 1]) for path in paths for i in range(path.count("/") + 1)})
    chosen = data.draw(st.lists(st.sampled_from(prefixes), min_size=1, unique=True))
    kept = [any(path == key or path.startswith(f"{key}/") for key in chosen) for path in paths]
    leaves = SpaceTree(space).flatten(batch(space, 3))
    parts = [
        bound_flat(leaf.space)(Rows(obs=array)).obs for leaf, array in zip(SpaceTree(space).leaves, leaves, strict=True)
    ]
    for key, keep in (("keys", kept), ("drop", [not k for k in kept])):
        if not any(keep):
            refused(ArgumentError, "leaves nothing", bound_flat, space, **{key: chosen})
            continue
        flat = bound_flat(space, **{key: chosen})(Rows(obs=batch(space, 3))).obs
        np.testing.assert_array_equal(flat, np.concatenate([p for p, k in zip(parts, keep, strict=True) if k], axis=1))


def test_float64_counts_only_where_it_is_kept() -> None:
    space = spaces.Dict({"wide": spaces.Box(-1, 1, (2,), np.float64), "n": spaces.Discrete(2)})
    assert bound_flat(space).output_space_.dtype == np.float64
    assert bound_flat(space, drop=["wide"]).output_space_ == spaces.Box(0, 1, (2,))


def test_a_vector_that_is_flat_already_is_not_copied() -> None:
    pipeline = bound_flat(spaces.Box(-1, 1, (3,)))
    rows = Rows(obs=np.zeros((2, 3), np.float32))
    assert pipeline(rows) is rows
    wide = Rows(obs=np.zeros((2, 3), np.float64))
    assert pipeline(wide).obs.dtype == np.float32


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(3, start=1), np.array([1, 4])),
        (spaces.Discrete(3, start=1), np.array([3, 0])),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 0], [2, 2]])),
    ],
)
def test_a_category_that_is_not_there_is_an_error(space: Space, obs: Any) -> None:
    refused(ContractError, r"the value is \d in row 1, outside of", bound_flat(space), Rows(obs=obs))


# --- ResizeObs, GrayscaleObs and TransposeObs, and images through a whole chain


Image = NDArray[Any]
BYTES = (np.uint8, np.int8, np.uint16, np.int32)


def image_space(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return spaces.Box(-1, 2, shape, dtype)
    return spaces.Box(np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype)


# --- resizing against pixels worked out one by one, in fractions


def weights(source: int, target: int, i: int, method: str) -> dict[int, Fraction]:
    """Which old pixels new pixel i is made of."""
    step = Fraction(source, target)
    centre = (i + Fraction(1, 2)) * step
    if method == "nearest":
        return {int(centre): Fraction(1)}
    if method == "area":
        shares = {j: min((i + 1) * step, j + 1) - max(i * step, j) for j in range(source)}
        return {j: Fraction(share) / step for j, share in shares.items() if share > 0}
    at = centre - Fraction(1, 2)
    left = at.__floor__()
    found: dict[int, Fraction] = {}
    for j, share in ((left, 1 - (at - left)), (left + 1, at - left)):
        inside = min(max(j, 0), source - 1)
        found[inside] = found.get(inside, Fraction(0)) + share
    return found


def resized(image: Image, size: tuple[int, int], method: str) -> Image:
    """The plain reference: one image, every pixel and channel by itself."""
    image = image[..., None] if image.ndim == 2 else image
    height, width, channels = image.shape
    out = np.zeros((*size, channels), image.dtype)
    for y in range(size[0]):
        for x in range(size[1]):
            rows, columns = weights(height, size[0], y, method), weights(width, size[1], x, method)
            for channel in range(channels):
                exact = sum(
                    a * b * Fraction(image[j, k, channel].item()) for j, a in rows.items() for k, b in columns.items()
                )
                out[y, x, channel] = round(exact) if image.dtype.kind in "iu" else float(exact)  # type: ignore[arg-type]
    return out


@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    channels=st.sampled_from([None, 1, 2, 3]),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    method=st.sampled_from(["area", "linear", "nearest"]),
    dtype=st.sampled_from([*BYTES, np.float32, np.float64]),
    n=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_every_pixel_is_what_it_should_be(
    shape: tuple[int, int], channels: int | None, size: tuple[int, int], method: Any, dtype: Any, n: int, seed: int
) -> None:
    space = image_space(shape if channels is None else (*shape, channels), dtype)
    images = batch(space, n, seed)
    pipeline = bound(c.ResizeObs(size, method), space)
    out = pipeline(c.Rows(obs=images)).obs
    assert out.dtype == dtype
    assert out.shape == (n, *size, *space.shape[2:])
    assert all_inside(pipeline.output_space_, out, n)
    for before, after in zip(images, out, strict=True):
        want = resized(before, size, method).reshape(after.shape)
        if np.dtype(dtype).kind == "f":
            np.testing.assert_allclose(after, want, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("method", ["area", "linear", "nearest"])
def test_an_image_of_one_value_stays_so_at_any_size(method: Any) -> None:
    """Also where sums are large: an Atari screen of white, and floats whose weights cannot be exact."""
    screen = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    white = np.full((2, 210, 160, 3), 255, np.uint8)
    assert (through(c.ResizeObs((84, 84), method), screen, white) == 255).all()
    tenth = np.full((1, 210, 160), 0.1, np.float32)
    space = spaces.Box(0, np.float32(0.1), (210, 160))
    out = through(c.ResizeObs((84, 84), method), space, tenth)
    np.testing.assert_allclose(out, 0.1, rtol=1e-5)
    assert all_inside(bound(c.ResizeObs((84, 84), method), space).output_space_, out, 1)


def test_sizes_and_axes_may_be_lists() -> None:
    assert repr(c.TransposeObs([1, 0])) == "TransposeObs(axes=(1, 0))"
    assert c.ResizeObs([84, 96]).params() == {"size": (84, 96), "method": "area", "keys": None}  # type: ignore[arg-type]


# --- grayscale


@pytest.mark.parametrize("keep_axis", [True, False])
@pytest.mark.parametrize("dtype", [*BYTES, np.float32, np.float64])
def test_gray_is_the_weighted_mean_of_the_channels(dtype: Any, keep_axis: bool) -> None:
    space = image_space((4, 5, 3), dtype)
    images = np.concatenate([batch(space, 6), space.low[None], space.high[None]])
    pipeline = bound(c.GrayscaleObs(keep_axis=keep_axis), space)
    out = pipeline(c.Rows(obs=images)).obs
    assert out.dtype == dtype
    assert out.shape == ((8, 4, 5, 1) if keep_axis else (8, 4, 5))
    assert pipeline.output_space_ == image_space(out.shape[1:], dtype)
    assert all_inside(pipeline.output_space_, out, 8)
    for color, gray in zip(images.reshape(-1, 3).tolist(), out.reshape(-1).tolist(), strict=True):
        exact = Fraction(299 * Fraction(color[0]) + 587 * Fraction(color[1]) + 114 * Fraction(color[2])) / 1000
        if np.dtype(dtype).kind == "f":
            assert gray == pytest.approx(float(exact), rel=1e-5, abs=1e-6)
        else:
            assert gray == round(exact)


# --- axes


def test_channels_go_first_without_a_copy() -> None:
    space = image_space((4, 5, 3), np.uint8)
    images = batch(space, 2)
    out = through(c.TransposeObs(), space, images)
    np.testing.assert_array_equal(out, np.stack([np.moveaxis(image, 2, 0) for image in images]))
    assert np.shares_memory(out, images)
    np.testing.assert_array_equal(
        through(c.TransposeObs((1, 2, 0)), bound(c.TransposeObs(), space).output_space_, out), images
    )


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), axes=st.sampled_from([(1, 0), (2, 0, 1), (0, 2, 1), (0,)]), n=st.integers(0, 3))
def test_any_order_of_axes_of_boxes_of_that_rank(space: Space, axes: tuple[int, ...], n: int) -> None:
    leaves = SpaceTree(space).leaves
    if not any(isinstance(leaf.space, spaces.Box) and len(leaf.shape) == len(axes) for leaf in leaves):
        refused(UnsupportedSpaceError, f"works on Boxes of {len(axes)} axes", bound, c.TransposeObs(axes), space)
        return
    pipeline, obs = bound(c.TransposeObs(axes), space), batch(space, n)
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    for leaf, before, after in zip(leaves, SpaceTree(space).flatten(obs), SpaceTree(space).flatten(out), strict=True):
        for i in range(n):
            same = not isinstance(leaf.space, spaces.Box) or len(leaf.shape) != len(axes)
            np.testing.assert_array_equal(after[i], before[i] if same else np.transpose(before[i], axes))


# --- all together


def nested_with_camera(inner: Space, height: int, width: int) -> spaces.Dict:
    camera = spaces.Box(0, 255, (height, width, 3), np.uint8)
    return spaces.Dict({"eye": spaces.Dict({"left": camera, "mode": spaces.Discrete(3, start=1)}), "rest": inner})


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(86)
@given(inner=any_spaces(), height=st.integers(2, 6), width=st.integers(2, 6), n=st.integers(0, 3), drop=st.booleans())
def test_images_and_choices_anywhere_in_a_space_become_what_a_network_takes(
    inner: Space, height: int, width: int, n: int, drop: bool
) -> None:
    """Resize, gray, channels first, scale and cast for the camera, one-hots for the rest, keys dropped, all flattened.

    Against the same done to one row at a time by hand and by Gymnasium's own flatten.
    """
    space = nested_with_camera(inner, height, width)
    camera = ["eye/left"]
    pipeline = c.AgentPipeline(
        [
            c.ResizeObs((2, 3), keys=camera),
            c.GrayscaleObs(keys=camera),
            c.TransposeObs(keys=camera),
            c.ScaleObs(-1, 1, keys=camera),
            c.CastObs("float64", keys=camera),
            c.OneHotObs(),
            *([c.DropKeys("rest")] if drop else []),
        ]
    )
    pipeline.bind(space)
    obs = batch(space, n)
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    assert ("rest" in out) is not drop
    for i in range(n):
        picture = resized(obs["eye"]["left"][i], (2, 3), "area").astype(float)
        gray = np.rint(np.round(picture @ [0.299, 0.587, 0.114], 9))  # away with what the float sum is off by
        np.testing.assert_allclose(out["eye"]["left"][i], [gray / 255 * 2 - 1], atol=1e-6)
        assert out["eye"]["mode"][i].tolist() == [obs["eye"]["mode"][i] == k for k in (1, 2, 3)]
    assert out["eye"]["left"].dtype == np.float64
    dropped = bound(c.FlattenObs(drop=["rest", "eye/left"]), space)(c.Rows(obs=obs)).obs
    np.testing.assert_array_equal(dropped, out["eye"]["mode"])
    flat = bound(c.FlattenObs(), space)(c.Rows(obs=obs)).obs
    for i in range(n):
        np.testing.assert_array_equal(flat[i], spaces.flatten(space, unbatch(space, obs, i)).astype(flat.dtype))


NAMES = ("wolf_0", "wolf_1", "hare_0")
bound_team = partial(samples.bound, agents=NAMES)
EVERYONE = [(0, 0), (0, 1), (0, 2)]


class Team:
    """The plain reference: for each env the last observation, as a list of leaves, of each agent that is there."""

    def __init__(self, space: Space) -> None:
        self.leaves = SpaceTree(space).leaves
        self.seen: dict[tuple[int, int], tuple[int, list[Any]]] = {}

    def see(self, pair: tuple[int, int], episode: int, values: list[Any]) -> None:
        self.seen[pair] = (episode, values)

    def look(self, env: int, episode: int) -> tuple[list[list[Any]], list[int]]:
        """Per leaf a value of each agent, and who is there."""
        there = [self.seen.get((env, agent), (None, []))[0] == episode for agent in range(3)]
        blanks = [np.broadcast_to(getattr(leaf.space, "start", 0), leaf.shape) for leaf in self.leaves]
        return [
            [self.seen[env, agent][1][k] if there[agent] else blanks[k] for agent in range(3)]
            for k in range(len(self.leaves))
        ], [int(here) for here in there]

    def end(self, pair: tuple[int, int]) -> None:
        del self.seen[pair]

    def reset(self, env: int) -> None:
        self.seen = {pair: value for pair, value in self.seen.items() if pair[0] != env}


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), with_episodes=st.booleans(), data=st.data())
def test_each_sees_what_its_team_last_saw(space: Space, with_episodes: bool, data: st.DataObject) -> None:
    """Episodes of 3 envs × 3 agents that come, take turns, end and are lost, rows in any order; against a plain dict.

    With ``eps_id`` an episode may end unseen, without a reset: nothing of it is left in the next one.
    """
    piece = c.TeamObs()
    pipeline, team = bound_team(piece, space), Team(space)
    tree, after = SpaceTree(space), SpaceTree(pipeline.output_space_)
    episode = np.zeros(3, np.int64)
    for tick in range(data.draw(st.integers(1, 6))):
        pairs = data.draw(st.lists(st.sampled_from([(e, a) for e in range(3) for a in range(3)]), unique=True))
        n, ids = len(pairs), np.array(pairs, np.int64).reshape(-1, 2)
        obs = batch(space, n, tick)
        last = np.array([data.draw(st.sampled_from([False, False, True])) for _ in pairs], bool)
        columns = {"eps_id": episode[ids[:, 0]]} if with_episodes else {}
        out = pipeline(rows_of(pairs, obs, last=last, **columns)).obs
        assert all_inside(pipeline.output_space_, out, n)
        leaves = tree.flatten(obs)
        for i, pair in enumerate(pairs):
            team.see(pair, int(episode[pair[0]]), [leaf[i] for leaf in leaves])
        got = after.flatten(out)[len(leaves) : -1]
        for i, (env, _) in enumerate(pairs):
            wanted, there = team.look(env, int(episode[env]))
            assert out["team_mask"][i].tolist() == there
            for k, want in enumerate(wanted):
                np.testing.assert_array_equal(got[k][i], np.stack(want))
        for k, leaf in enumerate(leaves):
            assert after.flatten(out)[k] is leaf
            assert got[k].dtype == leaf.dtype
        for i in np.flatnonzero(last):
            team.end(pairs[i])
        for env in data.draw(st.sets(st.integers(0, 3))):
            pipeline.reset([env])
            team.reset(env)
        if with_episodes:
            episode[data.draw(st.integers(0, 2))] += 1


def test_team_obs_function() -> None:
    """How far the others are: what RLlib's examples do for two agents by hand."""

    def distances(team_obs_nA: Any, team_mask_nA: Any, rows: c.Rows) -> Any:
        assert rows.keys() == {"env_id", "agent_index", "obs"}
        for array in (team_obs_nA, team_mask_nA, rows.obs):
            assert not array.flags.writeable
        far = np.linalg.norm(team_obs_nA - rows.obs[:, None], axis=-1)
        return np.where(team_mask_nA, far, 99)

    pipeline = bound_team(c.TeamObs(distances, spaces.Box(0, 99, (3,))), vectors(2))
    obs = np.array([[3, 4], [0, 0]], np.float32)
    out = pipeline(rows_of([(0, 2), (0, 0)], obs)).obs
    assert out.tolist() == [[5, 99, 0], [0, 99, 5]]
    assert out.dtype == np.float32
    wrong = bound_team(c.TeamObs(lambda team, mask, rows: team, vectors(2)), vectors(2))
    with pytest.raises(ContractError, match=r"the function of TeamObs returned float32 of shape \(2, 3, 2\)"):
        wrong(rows_of([(0, 2), (0, 0)], obs))


def test_an_agent_beyond_the_last_is_an_error() -> None:
    with pytest.raises(ContractError, match="agent_index 3 in rows of 3 agents"):
        bound_team(c.TeamObs(), vectors())(rows_of([(0, 3)], np.zeros((1, 3), np.float32)))


def joint(team_obs_nA: Any, team_mask_nA: Any, rows: c.Rows) -> Any:
    return np.concatenate([team_obs_nA.reshape(len(rows), -1), team_mask_nA], axis=1)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(91)
@given(mode=st.sampled_from(["one_hot", "type"]), data=st.data())
def test_who_i_am_padding_death_functions_and_the_team_in_one_chain(mode: Any, data: st.DataObject) -> None:
    """Agents die at times of their own in 2 envs; each row against the same worked out by hand, one row at a time."""
    pipeline = c.AgentPipeline(
        [
            c.MapObs(lambda obs: obs * 2),
            c.PerAgent(lambda obs, agent: -obs if agent == "hare_0" else obs),
            c.DeathMask(append=True),
            c.PadObs(4),
            c.TeamObs(joint, spaces.Box(-np.inf, np.inf, (15,))),
            c.AgentIndicator(mode=mode),
        ]
    )
    pipeline.bind(vectors(2, -9, 9), NAMES)
    code = {"one_hot": np.eye(3), "type": np.array([[1, 0], [1, 0], [0, 1]])}[mode]
    width = 15 + code.shape[1]
    assert pipeline.output_space_.shape == (width,)
    alive = {(env, agent) for env in range(2) for agent in range(3)}
    tick = 0
    while alive:
        tick += 1
        pairs = data.draw(st.permutations(sorted(alive)))
        obs = batch(vectors(2, -9, 9), len(pairs), tick)
        ends = np.array([tick > 3 or data.draw(st.booleans()) for _ in pairs], bool)
        dies = ends & np.array([data.draw(st.booleans()) for _ in pairs], bool)
        out = pipeline(rows_of(pairs, obs, terminated=dies, truncated=ends & ~dies, last=ends)).obs
        shown = {}
        for i, (env, agent) in enumerate(pairs):
            mine = obs[i] * 2 * (-1 if agent == 2 else 1)
            shown[env, agent] = [0, 0, 0, 0] if dies[i] else [*mine, 1, 0]
        for i, (env, agent) in enumerate(pairs):
            team = [shown.get((env, other), [0, 0, 0, 0]) for other in range(3)]
            there = [(env, other) in shown for other in range(3)]
            np.testing.assert_array_equal(out[i], np.concatenate([*team, there, code[agent]]).astype(np.float32))
        assert all_inside(pipeline.output_space_, map_tree(np.asarray, out), len(pairs))
        alive -= {pair for pair, end in zip(pairs, ends, strict=True) if end}


# --- DropKeys and ActionMaskFromObs: parts taken out of Dicts


BOX = spaces.Box(-1, 1, (2,))
SEEN = spaces.Dict(OrderedDict([("z", BOX), ("eye", spaces.Dict({"l": BOX, "r": BOX})), ("t", spaces.Tuple([BOX]))]))
GAME = spaces.Dict({"observation": BOX, "action_mask": spaces.MultiBinary(4)})


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), n=st.integers(0, 3), data=st.data())
def test_dropped_keys_are_removed_and_others_unchanged(space: Space, n: int, data: st.DataObject) -> None:
    """Any paths of any space: the leaves that are left are the very same arrays, at the same paths, in order."""
    tree = SpaceTree(space)
    prefixes = {
        "/".join(leaf.path.split("/")[: i + 1]) for leaf in tree.leaves for i in range(leaf.path.count("/") + 1)
    }
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return
    paths = data.draw(st.lists(st.sampled_from(sorted(prefixes)), min_size=1, max_size=3, unique=True))
    obs = batch(space, n)
    try:
        pipeline = bound(c.DropKeys(*paths), space)
    except ArgumentError as error:
        assert any(text in str(error) for text in ("entry of a Tuple", "leaves nothing"))  # noqa: PT017  # rightly refused
        return
    out = pipeline(c.Rows(obs=obs)).obs
    assert all_inside(pipeline.output_space_, out, n)
    kept = [(leaf.path, array) for leaf, array in zip(tree.leaves, tree.flatten(obs), strict=True)]
    kept = [(path, array) for path, array in kept if not any(path == p or path.startswith(f"{p}/") for p in paths)]
    after = SpaceTree(pipeline.output_space_)
    assert [leaf.path for leaf in after.leaves] == [path for path, _ in kept]
    for got, (_, want) in zip(after.flatten(out), kept, strict=True):
        assert got is want


def test_a_dict_of_one_key_stays_a_dict_and_keys_keep_their_order() -> None:
    after = bound(c.DropKeys("eye/l"), SEEN).output_space_
    assert isinstance(after, spaces.Dict)
    assert list(after.spaces) == ["z", "eye", "t"]
    assert after["eye"] == spaces.Dict({"r": BOX})
    assert bound(c.DropKeys("eye", "eye/l", "t"), SEEN).output_space_ == spaces.Dict({"z": BOX})


def test_what_cannot_be_dropped_and_the_config() -> None:
    with pytest.raises(ContractError, match="expected a dict with keys"):
        bound(c.DropKeys("z"), SEEN)(c.Rows(obs={"z": np.zeros((1, 2))}))
    piece = c.DropKeys("eye/l", "z")
    assert repr(piece) == "DropKeys('eye/l', 'z')"
    assert repr(c.DropKeys.from_config(piece.to_config())) == repr(piece)


@pytest.mark.parametrize("kind", [spaces.MultiBinary(4), spaces.Box(0, 1, (4,), np.int8), spaces.Box(0, 1, (4,))])
def test_a_mask_moves_from_the_observation_to_its_column(kind: Any) -> None:
    space = spaces.Dict({"game": spaces.Dict({"board": BOX, "legal": kind}), "rest": BOX})
    mask = np.array([[1, 0, 0, 1], [0, 1, 1, 1]], kind.dtype)
    obs = {"game": {"board": np.zeros((2, 2), np.float32), "legal": mask}, "rest": np.ones((2, 2), np.float32)}
    pipeline = bound(c.ActionMaskFromObs("game/legal"), space, (), spaces.Discrete(4))
    out = pipeline(c.Rows(obs=obs))
    assert out.action_mask.dtype == np.bool_
    assert out.action_mask.tolist() == (mask == 1).tolist()
    assert out.obs["game"].keys() == {"board"}
    assert pipeline.output_space_ == spaces.Dict({"game": spaces.Dict({"board": BOX}), "rest": BOX})
    assert all_inside(pipeline.output_space_, out.obs, 2)
    assert obs["game"]["legal"] is mask  # type: ignore[index]  # nested dicts


def test_two_masks_must_both_allow() -> None:
    obs = {"observation": np.zeros((1, 2), np.float32), "action_mask": np.array([[1, 1, 0, 0]], np.int8)}
    given_ = np.array([[True, False, True, False]])
    out = bound(c.ActionMaskFromObs(), GAME)(c.Rows(obs=obs, action_mask=given_))
    assert out.action_mask.tolist() == [[True, False, False, False]]
    assert given_.tolist() == [[True, False, True, False]]
    with pytest.raises(ContractError, match=r"action_mask of shape \(1, 3\) already, and 'action_mask' .* \(1, 4\)"):
        bound(c.ActionMaskFromObs(), GAME)(c.Rows(obs=obs, action_mask=given_[:, :3]))
