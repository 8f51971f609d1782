"""The Gymnasium view of envs with one agent gives what Gymnasium's own vector envs give, to the last bit."""

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

import marlvec
from marlvec.errors import ActionError, ArgumentError, ClosedError, NotResetError
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from tests.interop.envs import IMAGE, SPACES, CountEnv, SampleEnv

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
# the statistics of all envs. What it says over a view is tested with several agents, in test_gymnasium_rows.py.
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
