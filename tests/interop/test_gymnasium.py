"""The Gymnasium view: of envs with one agent as Gymnasium's own vector envs, of several agents a row for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.utils.performance import benchmark_vector_step
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.errors import ActionError, ArgumentError, ClosedError, NotResetError
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.testing import Script, ScriptedParallelEnv, TurnEnv, decode
from tests.interop.envs import IMAGE, SPACES, CountEnv, SampleEnv
from tests.interop.row_views import rows_of, words
from tests.vector.support.kinds import SCRIPTED, asynchronous, factories_of, recorded, sync
from tests.vector.support.reference import Call, Frame, assert_same, assert_trees_equal, flatten, record

# --- the Gymnasium view of envs with one agent gives what Gymnasium's own vector envs give, to the last bit


MODES = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}
SEEDS = [3, 1, 4, 1]

Factory = Callable[[], Any]


def view_of(*factories: Factory, mode: str = "same_step", backend: str = "sync", **options: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(marlvec.make(list(factories), backend=backend, autoreset_mode=mode, **options))


def cart_pole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=25)


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=15)


def images() -> Any:
    return SampleEnv(IMAGE, Discrete(2))


def dicts() -> Any:
    return SampleEnv(SPACES["dict"], Discrete(2))


def assert_equal_traces(ours: Any, theirs: Any, *, steps: int, seeds: Any = SEEDS, forget: str = "") -> int:
    """Reset and step both, and compare all that comes back; how many episodes that were."""

    def compare(mine: Any, expected: Any) -> None:
        for infos in (mine[-1], expected[-1]):
            for info in infos if isinstance(infos, list) else [infos]:
                if forget in info:
                    info[forget].pop("t")
        assert data_equivalence(mine, expected, exact=True), f"{mine}\nexpected\n{expected}"

    compare(ours.reset(seed=seeds), theirs.reset(seed=seeds))
    theirs.action_space.seed(9)
    episodes = 0
    for _ in range(steps):
        actions = theirs.action_space.sample()
        # Copies: some of Gymnasium's wrappers write into the actions and options they are given.
        mine, expected = ours.step(actions.copy()), theirs.step(actions.copy())
        over = expected[2] | expected[3]
        compare(mine, expected)
        episodes += int(over.sum())
        if over.any() and theirs.metadata["autoreset_mode"] is AutoresetMode.DISABLED:
            seeds = [None if k % 2 else k for k in range(theirs.num_envs)]
            pair = [envs.reset(seed=seeds, options={"reset_mask": over.copy()}) for envs in (ours, theirs)]
            compare(*pair)
    return episodes


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@pytest.mark.checklist(127)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_cart_pole_is_gymnasiums(mode: str, backend: str) -> None:
    """Observations, rewards, flags, final observations and infos of whole episodes."""
    theirs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, autoreset_mode=MODES[mode])
    ours = GymnasiumVectorEnv(marlvec.make("CartPole-v1", 4, backend=backend, autoreset_mode=mode))
    assert ours.num_envs == 4
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.metadata == theirs.metadata
    assert ours.metadata["autoreset_mode"] is MODES[mode]
    assert assert_equal_traces(ours, theirs, steps=300) > 30
    ours.close()
    theirs.close()


@pytest.mark.mostly_slow("steps two vectorizers", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("space", SPACES)
def test_every_space_is_gymnasiums(space: str, mode: str) -> None:
    """And infos of every kind; also under words that marlvec has another use for."""
    factories = [partial(SampleEnv, SPACES[space], Discrete(3), length) for length in (2, 3, 5)]
    theirs = SyncVectorEnv(factories, autoreset_mode=MODES[mode])
    ours = view_of(*factories, mode=mode)
    assert assert_equal_traces(ours, theirs, steps=30, seeds=[5, 6, 7]) > 15
    ours.close()
    theirs.close()


@pytest.mark.parametrize("space", SPACES)
def test_spaces_hold_what_they_describe(space: str) -> None:
    view = view_of(*[partial(SampleEnv, SPACES[space], SPACES[space], length) for length in (2, 3, 3)])
    assert view.observation_space == view.action_space
    obs, infos = view.reset(seed=[1, 2, 3])
    assert infos["episode_number"].tolist() == [1, 1, 1]
    assert obs in view.observation_space
    for step in range(1, 7):
        obs, _, terminated, truncated, infos = view.step(view.action_space.sample())
        assert obs in view.observation_space
        ends = [step % length == 0 for length in (2, 3, 3)]
        assert (terminated | truncated).tolist() == ends
        assert ("final_obs" in infos) == any(ends)
        if any(ends):
            assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == ends
            for final, end in zip(infos["final_obs"], ends, strict=True):
                assert final in view.single_observation_space if end else final is None
    view.close()


# --- what Gymnasium's own tests of its vector envs look at


def counts(mode: str, **options: Any) -> GymnasiumVectorEnv:
    return view_of(*[partial(CountEnv, length, **options) for length in (2, 3, 3)], mode=mode)


def check_counts(step: Any, obs: list[int], rewards: list[int], ends: str, infos: dict[str, Any] | None = None) -> None:
    assert step[0].tolist() == obs
    assert step[1].tolist() == rewards
    assert step[2].tolist() == [end == "x" for end in ends]
    assert step[3].tolist() == [False] * 3
    assert data_equivalence(step[4], infos or {}, exact=True), step[4]


def test_an_explicit_reset_cancels_the_autoreset_that_was_due() -> None:
    view = counts("next_step")
    view.reset()
    for _ in range(2):
        step = view.step([1, 2, 3])
    assert step[2].tolist() == [True, False, False]
    obs, _ = view.reset(options={"reset_mask": np.array([True, False, True])})
    assert obs.tolist() == [0, 2, 0]
    check_counts(view.step([1, 2, 3]), [1, 3, 1], [1, 2, 3], ".x.")
    view.close()


# --- resets


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_reset_seeds_only_whom_it_resets(mode: str) -> None:
    view = view_of(*[cart_pole] * 3, mode=mode)
    first, _ = view.reset(seed=[0, 1, 2])
    for _ in range(3):
        now, *_ = view.step([0, 1, 0])
    options = {"reset_mask": np.array([True, True, False])}
    again, infos = view.reset(seed=[0, 1, 0], options=options)
    assert again[:2].tobytes() == first[:2].tobytes()
    assert again[2].tobytes() == now[2].tobytes()
    assert infos == {}
    assert options.keys() == {"reset_mask"}, "the caller's dict is as it was"
    view.close()


def test_options_reach_the_envs_that_are_reset() -> None:
    view = counts("disabled")
    view.reset(seed=[7, None, 9], options={"level": 2})
    view.reset(seed=[1, 2, 3], options={"level": 5, "reset_mask": np.array([False, True, False])})
    view.reset(options={"reset_mask": np.array([True, False, False])})
    heard = view.envs.get_attr("heard")
    assert heard[0] == [(7, {"level": 2}), (None, None)]
    assert heard[1] == [(None, {"level": 2}), (2, {"level": 5})]
    assert heard[2] == [(9, {"level": 2})]
    view.close()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.array([True]), r"expected shape \(3,\), dtype bool, got shape \(1,\)"),
        (np.array([True, True, False, False]), r"got shape \(4,\)"),
        (np.array([[True, True, True]]), r"got shape \(1, 3\)"),
        (np.array([1, 1, 0]), r"expected shape \(3,\), dtype bool, got shape \(3,\), dtype int64"),
        (np.array([1.0, 1.0, 0.0]), "dtype float64"),
        (np.array([False, False, False]), "expected at least one True"),
        (None, r"got shape \(\)"),
    ],
)
def test_a_wrong_reset_mask_is_refused(mask: Any, message: str) -> None:
    view = counts("disabled")
    view.reset()
    view.step([1, 2, 3])
    with pytest.raises(ArgumentError, match=message):
        view.reset(options={"reset_mask": mask})
    check_counts(view.step([1, 2, 3]), [2, 2, 2], [1, 2, 3], "x..")
    view.close()


def test_a_first_reset_of_some_envs_leaves_the_others_to_be_reset() -> None:
    view = counts("next_step")
    view.reset(options={"reset_mask": np.array([True, False, True])})
    with pytest.raises(NotResetError, match=r"envs \[1\] have no running episode"):
        view.step([1, 2, 3])
    view.close()


def test_an_int_seed_is_spread_marlvecs_way() -> None:
    view = view_of(*[cart_pole] * 3)
    obs, _ = view.reset(seed=5)
    assert view.np_random_seed == tuple(marlvec.env_seeds(5, 3))
    again, _ = view.reset(seed=marlvec.env_seeds(5, 3))
    assert again.tobytes() == obs.tobytes()
    once_more, _ = view.reset(seed=np.int64(5))
    assert once_more.tobytes() == obs.tobytes()
    for seed in (-1, True, 1.5, "5", [1, 2], [1, 2, -3], np.array([1, 2, 3, 4])):
        with pytest.raises(ArgumentError, match="seed"):
            view.reset(seed=seed)  # type: ignore[arg-type]
    view.close()


# --- actions, closing, rendering


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([1, 2], r"actions: expected shape \(3,\), one row per env and agent, got \(2,\)"),
        (1, r"expected shape \(3,\), one row per env and agent, got \(\)"),
        ([[1, 2], [1, 2], [1, 2]], r"got \(3, 1, 2\)"),
        ([1.0, 2.0, 3.0], "expected dtype int64, got float64"),
        ([1, 2, 5], "env 2, agent 'agent_0': 5 is not in Discrete"),
        ([[1], [2, 3], [1]], "not an array"),
    ],
)
def test_wrong_actions_are_refused_before_anything_is_sent(actions: Any, message: str) -> None:
    view = counts("same_step")
    view.reset()
    with pytest.raises(ActionError, match=message):
        view.step(actions)
    check_counts(view.step(np.array([[1], [2], [3]])), [1, 1, 1], [1, 2, 3], "...")
    view.close()


def test_wrong_trees_of_actions_are_refused() -> None:
    view = view_of(*[partial(SampleEnv, SPACES["box"], SPACES["dict"])] * 2)
    view.reset()
    actions = view.action_space.sample()
    with pytest.raises(ActionError, match=r"actions: expected a dict with keys \['what', 'where'\]"):
        view.step({"what": actions["what"]})
    with pytest.raises(ActionError, match=r"actions of leaf 'where': expected shape \(2, 2\)"):
        view.step({**actions, "where": actions["where"][:1]})
    view.step(actions)
    view.close()


def test_close_closes_the_viewed_envs() -> None:
    view = counts("same_step")
    view.reset()
    assert not view.closed
    assert view.unwrapped is view
    assert view.spec is None
    assert repr(view) == "GymnasiumVectorEnv(num_envs=3)"
    view.close()
    view.close()
    assert view.closed
    assert view.envs.closed
    with pytest.raises(ClosedError):
        view.step([1, 2, 3])


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_render_gives_a_frame_per_env(backend: str) -> None:
    factories = [partial(CountEnv, length, render_mode="rgb_array") for length in (2, 3)]
    view = view_of(*factories, backend=backend)
    assert view.render_mode == "rgb_array"
    assert view.metadata["render_fps"] == 7
    view.reset()
    view.step([0, 0])
    frames = view.render()
    assert isinstance(frames, tuple)
    assert [frame.tolist() for frame in frames] == [np.full((2, 4, 3), 1).tolist()] * 2
    view.close()


def test_the_render_mode_is_what_all_envs_have_in_common() -> None:
    same = view_of(partial(CountEnv, render_mode="ansi"), partial(CountEnv, render_mode="ansi"))
    mixed = view_of(partial(CountEnv, render_mode="ansi"), partial(CountEnv, render_mode="rgb_array"))
    none, without = counts("same_step"), view_of(_NoRenderMode)
    assert [view.render_mode for view in (same, mixed, none, without)] == ["ansi", None, None, None]
    same.reset()
    assert same.render() == ("count 0", "count 0")
    for view in (same, mixed, none, without):
        view.close()


class _NoRenderMode:
    """Like an env of before render modes."""

    observation_space = Discrete(2)
    action_space = Discrete(2)

    def reset(self, seed: int | None = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 1, 0.0, False, False, {}


# --- Gymnasium's wrappers


def half(value: Any) -> Any:
    return value * np.float32(0.5)


WRAPPERS: dict[str, tuple[Factory, Callable[[Any], Any]]] = {
    "RecordEpisodeStatistics": (cart_pole, wrappers.RecordEpisodeStatistics),
    "DictInfoToList": (dicts, wrappers.DictInfoToList),
    "DictInfoToList of statistics": (
        dicts,
        lambda envs: wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(envs)),
    ),
    "NormalizeObservation": (cart_pole, wrappers.NormalizeObservation),
    "NormalizeReward": (pendulum, wrappers.NormalizeReward),
    "ClipReward": (pendulum, partial(wrappers.ClipReward, min_reward=-3.0, max_reward=-1.0)),
    "TransformReward": (pendulum, partial(wrappers.TransformReward, func=half)),
    "VectorizeTransformReward": (
        pendulum,
        partial(wrappers.VectorizeTransformReward, wrapper=gymnasium.wrappers.TransformReward, func=half),
    ),
    "TransformObservation": (pendulum, partial(wrappers.TransformObservation, func=half)),
    "VectorizeTransformObservation": (
        pendulum,
        partial(
            wrappers.VectorizeTransformObservation,
            wrapper=gymnasium.wrappers.TransformObservation,
            func=half,
            observation_space=Box(-8.0, 8.0, (3,), np.float32),
        ),
    ),
    "FilterObservation": (dicts, partial(wrappers.FilterObservation, filter_keys=["where"])),
    "FlattenObservation": (dicts, wrappers.FlattenObservation),
    "FlattenObservation of images": (images, wrappers.FlattenObservation),
    "GrayscaleObservation": (images, wrappers.GrayscaleObservation),
    "ReshapeObservation": (cart_pole, partial(wrappers.ReshapeObservation, shape=(2, 2))),
    "RescaleObservation": (
        pendulum,
        partial(wrappers.RescaleObservation, min_obs=np.float32(-1), max_obs=np.float32(1)),
    ),
    "DtypeObservation": (cart_pole, partial(wrappers.DtypeObservation, dtype=np.float64)),
    "TransformAction": (pendulum, partial(wrappers.TransformAction, func=half)),
    "VectorizeTransformAction": (
        pendulum,
        partial(
            wrappers.VectorizeTransformAction,
            wrapper=gymnasium.wrappers.TransformAction,
            func=half,
            action_space=Box(-2.0, 2.0, (1,), np.float32),
        ),
    ),
    "ClipAction": (pendulum, wrappers.ClipAction),
    "RescaleAction": (pendulum, partial(wrappers.RescaleAction, min_action=np.float32(-1), max_action=np.float32(1))),
}
NEEDS_MORE = {"ResizeObservation", "HumanRendering"}  # opencv
TESTED_BELOW = {"RecordVideo"}


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any]]:
    """Ours, theirs, and a wrapper for both."""
    name, mode = request.param
    factory, wrapper = WRAPPERS[name]
    ours, theirs = view_of(*[factory] * 4, mode=mode), SyncVectorEnv([factory] * 4, autoreset_mode=MODES[mode])
    yield ours, theirs, wrapper
    ours.close()
    theirs.close()


# With a partial reset SyncVectorEnv takes the mask out of the caller's options, so that the wrapper around it forgets
# the statistics of all envs. What it says over a view is tested with several agents below.
COMPARABLE = [
    (name, mode)
    for name in WRAPPERS
    for mode in MODES
    if not (mode == "disabled" and name in ("RecordEpisodeStatistics", "DictInfoToList of statistics"))
]


def refusal_of(wrapper: Callable[[Any], Any], envs: Any) -> str:
    try:
        wrapper(envs)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.mostly_slow("steps or trains with another library", quick=4)
@pytest.mark.parametrize("pair", COMPARABLE, indirect=True, ids=lambda case: f"{case[0]}, {case[1]}")
def test_a_wrapper_says_the_same_over_both(pair: tuple[Any, Any, Any]) -> None:
    """Or refuses both, in a mode that it cannot work in."""
    ours, theirs, wrapper = pair
    refusals = [refusal_of(wrapper, envs) for envs in (theirs, ours)]
    assert refusals[0] == refusals[1]
    if refusals[0]:
        assert "autoreset_mode" in refusals[0]
        return
    wrapped = wrapper(theirs)
    mine = wrapper(ours)
    assert mine.observation_space == wrapped.observation_space
    assert mine.action_space == wrapped.action_space
    assert mine.unwrapped is ours
    if wrapper is wrappers.NormalizeObservation:
        assert ours.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert assert_equal_traces(mine, wrapped, steps=60, forget="episode") >= 8


def test_no_wrapper_is_left_out() -> None:
    """But for those that need a library beside Gymnasium, and the conversions to such libraries' arrays."""
    conversions = {"ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"}
    tried = {name.partition(" ")[0] for name in WRAPPERS}
    assert set(wrappers.__all__) == tried | NEEDS_MORE | TESTED_BELOW | conversions


@pytest.mark.slow("steps or trains with another library")
@pytest.mark.parametrize("mode", MODES)
def test_a_video_can_be_recorded(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Up to the library that writes the file, of which only the name is needed here."""
    clips: dict[str, list[Any]] = {}

    class Clip:
        def __init__(self, frames: list[Any], fps: int) -> None:
            assert fps == 7
            self.frames = list(frames)

        def write_videofile(self, path: str, logger: Any) -> None:
            clips[path.rpartition("/")[2]] = self.frames

    for name in ("moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip"):
        module = ModuleType(name)
        module.ImageSequenceClip = Clip  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    view = view_of(*[partial(CountEnv, 3, render_mode="rgb_array")] * 4, mode=mode)
    if mode == "same_step":
        with pytest.warns(UserWarning, match="same-step"):
            envs: Any = wrappers.RecordVideo(view, str(tmp_path / "videos"), episode_trigger=lambda episode: True)
    else:
        envs = wrappers.RecordVideo(view, str(tmp_path / "videos"), episode_trigger=lambda episode: True)
    envs.reset()
    for _ in range(8):
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        over = terminated | truncated
        if mode == "disabled" and over.any():
            envs.reset(options={"reset_mask": over})
    envs.close()
    frames = clips["rl-video-episode-0.mp4"]
    assert [int(frame.max()) for frame in frames] == ([0, 1, 2] if mode == "same_step" else [0, 1, 2, 3])
    assert {frame.shape for frame in frames} == {(4, 8, 3)}, "four frames in a square"
    assert len(clips) == 3


# --- Gymnasium's registry


def vector_entry_point(num_envs: int, **kwargs: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(marlvec.make(CountEnv, num_envs, backend="sync", **kwargs))


@pytest.fixture
def registered() -> Iterator[str]:
    gymnasium.register("MarlvecCount-v0", vector_entry_point=f"{__name__}:vector_entry_point", kwargs={"length": 4})
    yield "MarlvecCount-v0"
    del gymnasium.registry["MarlvecCount-v0"]


def test_make_vec_makes_one(registered: str) -> None:
    envs = gymnasium.make_vec(registered, num_envs=3, autoreset_mode="next_step")
    assert isinstance(envs, GymnasiumVectorEnv)
    assert envs.spec is not None
    assert envs.spec.id == registered
    assert repr(envs) == "GymnasiumVectorEnv(MarlvecCount-v0, num_envs=3)"
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    envs.reset()
    ends = [envs.step(envs.action_space.sample())[2].tolist() for _ in range(10)]
    assert ends == [[step in (3, 8)] * 3 for step in range(10)]
    assert benchmark_vector_step(envs, target_duration=0.02, seed=1) > 0  # type: ignore[arg-type]  # any number does
    envs.close()


# --- the Gymnasium view of envs with several agents: one row each, and padding where an agent is not there


N = 3


def plain(value: Any) -> Any:
    """Scalars as Python's."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.item() if isinstance(value, np.generic) else value


class Rows:
    """What a frame must look like as rows, put together from what a plain loop over the raw envs gave."""

    def __init__(self, frame: Frame, names: tuple[str, ...], mode: str, *, stepped: bool) -> None:
        agent_num = len(names)
        self.rewards = rows_of(frame.rewards)
        self.terminated, self.truncated = rows_of(frame.flags["terminated"]), rows_of(frame.flags["truncated"])
        self.ended = self.terminated | self.truncated
        self.obs = [rows_of(leaf) for leaf in frame.obs[0]]
        early = self.ended & ~np.repeat(frame.done, agent_num)
        self.infos = words(frame.infos, names)
        last = words(frame.final_infos, names)
        for row, info in enumerate(self.infos):
            i, a = divmod(row, agent_num)
            info |= {"alive": bool(frame.flags["alive"][i, a]), "acting": bool(frame.flags["acting"][i, a])}
            info |= {"reset_mask": bool(frame.reset_mask[i])}
            if frame.masks[0] is not None:
                info["action_mask"] = frame.masks[0][i, a]
            if mode == "same_step" and stepped and self.ended[row]:
                mine = words(frame.infos, names)[row] if early[row] else last[row]
                info |= {"final_obs": rows_of(frame.final[0][0])[row], "final_info": mine}
        if mode == "same_step":
            for leaf in self.obs:
                leaf[early] = 0
        self.stepped = stepped

    def check(self, got: Any, where: str, *, whole: bool = True) -> None:
        """``whole``: whether the call was about all envs; else what the last step said of the others is left out."""
        for mine, expected in zip(flatten(got[0]), self.obs, strict=True):
            assert_same(np.ascontiguousarray(mine), expected, f"{where} obs")
        if self.stepped:
            assert_same(got[1], self.rewards, f"{where} rewards")
            assert_same(np.ascontiguousarray(got[2]), self.terminated, f"{where} terminated")
            assert_same(np.ascontiguousarray(got[3]), self.truncated, f"{where} truncated")
        infos = got[-1]
        for key, value in infos.items():
            assert len(value) == len(self.rewards) or isinstance(value, dict), key
            assert key.startswith("_") or infos["_" + key].shape == self.rewards.shape
        listed = DictInfoToList._convert_info_to_list(_Rows(len(self.rewards)), infos)  # type: ignore[arg-type]
        if not whole:
            for info in (*listed, *self.infos):
                del info["reset_mask"]
        assert_trees_equal([plain(info) for info in listed], self.infos, f"{where} infos")
        assert ("final_obs" in infos) == any("final_obs" in info for info in self.infos)


class _Rows:
    """As much of a vector env as Gymnasium's own reader of infos needs."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._convert_info_to_list = partial(DictInfoToList._convert_info_to_list, self)  # type: ignore[arg-type]


def replay(view: GymnasiumVectorEnv, calls: list[Call]) -> None:
    """Make these calls through the view and compare every row."""
    envs = view.envs
    for number, call in enumerate(calls):
        where = f"call {number}, {call.kind}"
        frame = Rows(call.expected, envs.agents, envs.autoreset_mode, stepped=call.kind == "step")
        if call.kind == "step":
            frame.check(view.step(rows_of(call.actions[0])), where)
        elif call.env_ids is None:
            frame.check(view.reset(seed=call.seed), where)
        else:
            mask = np.isin(np.arange(view.num_envs) // envs.agent_num, call.env_ids)
            seeds = [None] * envs.num_envs
            for i, seed in zip(call.env_ids, call.seed, strict=True):
                seeds[i] = seed
            frame.check(view.reset(seed=seeds, options={"reset_mask": mask}), where, whole=False)


@pytest.mark.mostly_slow("steps or trains with another library", quick=6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*SCRIPTED, "simple_spread", "pettingzoo/classic/tictactoe"])
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_rows_are_what_a_plain_loop_gives(kind: str, mode: str, copy: bool) -> None:
    """Agents that enter, wait and leave, in whole episodes, to the last bit."""
    with sync(kind, N, mode, copy=copy) as envs:
        view = GymnasiumVectorEnv(envs)
        assert view.num_envs == N * envs.agent_num
        replay(view, recorded(kind, N, mode))


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_workers_and_of_a_named_group_are_the_same(mode: str) -> None:
    with asynchronous("masked", N, mode, num_workers=2) as envs:
        replay(GymnasiumVectorEnv(envs), recorded("masked", N, mode))
    with sync("masked", N, mode, grouped=True) as envs:
        replay(GymnasiumVectorEnv(envs), recorded("masked", N, mode))


@settings(max_examples=30)
@given(
    n=st.integers(1, 4),
    agent_num=st.integers(2, 4),
    longest=st.integers(1, 9),
    mode=st.sampled_from(list(MODES)),
    kind=st.sampled_from(["parallel", "turns, masked", "keyed"]),
    seed=st.integers(0, 2**32),
)
def test_rows_of_any_script(n: int, agent_num: int, longest: int, mode: str, kind: str, seed: int) -> None:
    factories = factories_of(kind, n, agent_num=agent_num, longest=longest)
    with marlvec.SyncVectorEnv(factories, autoreset_mode=mode) as envs:
        replay(GymnasiumVectorEnv(envs), record(factories, mode, seed=seed, interrupt=0.1))


class Talker(ScriptedParallelEnv):
    """Says at both levels what Gymnasium and marlvec have words for."""

    def step(self, actions: dict[str, Any]) -> Any:
        *rest, infos = super().step(actions)
        infos = {
            agent: {"alive": 5, "_alive": 6, "shared": 1, "_x": 2, "final_obs": 3, "__common__": 4} for agent in infos
        }
        return *rest, {**infos, "__common__": {"shared": 7, "reset_mask": 8, "elsewhere": 9}}


@pytest.mark.parametrize("mode", MODES)
def test_words_that_are_taken_stand_aside(mode: str) -> None:
    script = Script([0, 0], [2, 3], ["terminated"] * 2)
    view = GymnasiumVectorEnv(
        marlvec.make(partial(Talker, [script], agent_num=2), 1, backend="sync", autoreset_mode=mode)
    )
    view.reset()
    infos = view.step([0, 0])[4]
    assert infos["alive"].tolist() == infos["_alive"].tolist() == [True, True]
    assert infos["shared"].tolist() == [1, 1]
    assert infos["_x"].tolist() == [2, 2]
    assert infos["elsewhere"].tolist() == [9, 9]
    aside = {
        level: {key: (values.tolist(), there.tolist()) for key, (values, there) in infos[level].items()}
        for level in ("__agents__", "__common__")
    }
    everyone = [True, True]
    assert aside["__agents__"] == {
        key: ([n, n], everyone) for key, n in (("alive", 5), ("_alive", 6), ("final_obs", 3), ("__common__", 4))
    }
    assert aside["__common__"] == {"shared": ([7, 7], everyone), "reset_mask": ([8, 8], everyone)}
    infos = view.step([0, 0])[4]
    if mode == "same_step":  # there nothing is taken
        final = infos["final_info"]
        assert {key: final[key].tolist() for key in ("alive", "shared", "_x", "final_obs", "reset_mask")} == {
            "alive": [5, 0],
            "shared": [1, 0],
            "_x": [2, 0],
            "final_obs": [3, 0],
            "reset_mask": [8, 0],
        }
        values, there = final["__common__"]["shared"]
        assert (values.tolist(), there.tolist()) == ([7, 0], [True, False])
    view.close()


def test_the_global_state_is_in_every_row() -> None:
    envs = marlvec.SyncVectorEnv(
        [partial(ScriptedParallelEnv, [Script.together(2, 2)], agent_num=2, state=True)] * 2, state=True
    )
    view = GymnasiumVectorEnv(envs)
    _, infos = view.reset()
    states = envs.state()
    assert infos["state"].tolist() == states.repeat(2, axis=0).tolist()
    assert "final_state" not in infos
    view.step([0] * 4)
    infos = view.step([0] * 4)[4]
    assert infos["_state"].tolist() == infos["_final_state"].tolist() == [True] * 4
    assert infos["final_state"][:, 2:4].tolist() == [[0, 2]] * 4, "episode and step"
    assert infos["state"][:, 2:4].tolist() == [[1, 0]] * 4
    view.close()


# --- resets and actions


def test_a_partial_reset_shows_nothing_of_an_agent_that_has_just_gone() -> None:
    script = Script([0, 0], [2, 9], ["terminated"] * 2)
    envs = marlvec.make(partial(ScriptedParallelEnv, [script], agent_num=2), 2, backend="sync")
    view = GymnasiumVectorEnv(envs)
    view.reset()
    view.step([0] * 4)
    stepped, _, terminated, _, _ = view.step([0] * 4)
    assert terminated.tolist() == [True, False, True, False]
    obs, infos = view.reset(options={"reset_mask": np.array([False, False, True, True])})
    assert obs[:2].tolist() == stepped[:2].tolist()
    assert obs.any(axis=1).tolist() == infos["alive"].tolist() == [False, True, True, True]
    view.close()


def test_agents_of_an_env_are_reset_together() -> None:
    envs = marlvec.make(ScriptedParallelEnv, 2, backend="sync", autoreset_mode="disabled", agent_num=3)
    view = GymnasiumVectorEnv(envs)
    view.reset(seed=[1, 2])
    with pytest.raises(
        ArgumentError, match=r"the same for all 3 agents.*env 1 \(rows 3 to 5\) has \[True, False, True"
    ):
        view.reset(options={"reset_mask": np.array([True, True, True, True, False, True])})
    with pytest.raises(ArgumentError, match=r"expected shape \(6,\), dtype bool, got shape \(2,\)"):
        view.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ArgumentError, match="seed: expected one per env, 2 in all, got 6"):
        view.reset(seed=[0] * 6)
    obs, infos = view.reset(seed=[5, 6], options={"reset_mask": np.repeat([False, True], 3)})
    assert [int(decode(row)[2]) for row, alive in zip(obs, infos["alive"], strict=True) if alive] == [
        i for i, alive in zip([0, 0, 0, 1, 1, 1], infos["alive"], strict=True) if alive
    ], "episodes"
    view.close()


def test_several_groups_are_refused() -> None:
    with marlvec.make("simple_tag", 2, backend="sync") as envs:
        with pytest.raises(ArgumentError, match=r"simple_tag_v3 has 2: adversary, .*pad=True") as refusal:
            GymnasiumVectorEnv(envs)
        assert "one group" in str(refusal.value)


def test_sampling_the_view_leaves_the_envs_alone() -> None:
    """An env in this process may draw from the very space that it showed."""
    env = ScriptedParallelEnv(action_space=SPACES["discrete"])
    view = GymnasiumVectorEnv(marlvec.make([lambda: env], backend="sync"))
    env.action_space("agent_0").seed(3)
    expected = [int(draw) for draw in (SPACES["discrete"].sample() for _ in range(5))]
    SPACES["discrete"].seed(3)
    view.single_action_space.seed(1)
    view.single_action_space.sample()
    view.action_space.sample()
    assert [int(SPACES["discrete"].sample()) for _ in range(5)] == expected
    view.close()


def test_a_frame_is_shown_in_every_row_of_its_env() -> None:
    envs = marlvec.make("simple_spread", 2, backend="sync", render_mode="rgb_array")
    view = GymnasiumVectorEnv(envs)
    view.reset(seed=0)
    frames = view.render()
    assert view.render_mode == "rgb_array"
    assert len(frames) == view.num_envs == 6
    assert all(frames[row] is frames[3 * (row // 3)] for row in range(6))
    assert frames[0].shape[2] == 3
    view.close()


# --- Gymnasium's statistics


@pytest.mark.checklist(127)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turns", [False, True])
def test_statistics_of_rows_are_those_of_agents(mode: str, turns: bool) -> None:
    """Returns are exact whoever ends when; lengths count the row's steps since its last flag, padding included."""
    scripts = [
        Script([0, 0, 0], [2, 4, 5], ["terminated", "truncated", "terminated"]),
        Script([0, 2, 0], [3, 3, 3], ["truncated"] * 3),
    ]
    kind = partial(TurnEnv, agent_num=3) if turns else ScriptedParallelEnv
    view = GymnasiumVectorEnv(marlvec.make(partial(kind, scripts), 2, backend="sync", autoreset_mode=mode))
    envs = RecordEpisodeStatistics(view)
    _, infos = envs.reset(seed=4)
    returns, since = np.zeros(6), np.zeros(6, int)
    resetting = np.zeros(6, bool)  # Gymnasium's wrapper leaves out the one step behind a flag
    told: list[tuple[float, int]] = []
    for _ in range(60):
        over = ~infos["alive"].reshape(2, 3).any(axis=1).repeat(3)
        if mode == "disabled" and over.any():
            _, infos = envs.reset(options={"reset_mask": over})
            returns[over], since[over], resetting[over] = 0, 0, False
            continue
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(6, int))
        returns += rewards
        since += ~resetting
        ended = terminated | truncated
        resetting = ended & (mode != "same_step")
        assert ("episode" in infos) == ended.any()
        if ended.any():
            assert infos["_episode"].tolist() == ended.tolist()
            assert infos["episode"]["r"].tolist() == np.where(ended, returns, 0).tolist()
            assert infos["episode"]["l"].tolist() == np.where(ended, since, 0).tolist()
            told += [(returns[row], since[row]) for row in np.flatnonzero(ended)]
            returns[ended], since[ended] = 0, 0
    assert list(zip(envs.return_queue, envs.length_queue, strict=True)) == told
    assert len(told) > 40
    envs.close()
