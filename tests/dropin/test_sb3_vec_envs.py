"""What Stable-Baselines3 2.9.2 expects of its vec envs (tests/test_vec_envs.py), asked of `SB3VecEnv`.

Different on purpose, each beside its test: an attribute that no layer has is set on the env itself and not on the
outermost wrapper; seeds are spread by `marlvec.env_seeds` and not as ``seed + i``; what an env raises comes as an
`EnvRaised` that names the env, with the original as its cause, except for `AttributeError`; each row's info says more
(`marlvec.interop.rows.RowDriver`); ``start_method`` is ``context`` of `make`.

Not asked: ``VecEnvWrapper.__getattr__``, which is theirs alone, and windows (``mode="human"``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import marlvec
from marlvec.errors import ArgumentError, EnvRaised
from tests.dropin.sb3_envs import BOX, CountEnv, CustomEnv, Outer, wrapped
from tests.vector.support.reference import refused

pytest.importorskip("stable_baselines3")

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize, VecTransposeImage

from marlvec.interop.sb3 import SB3VecEnv

pytestmark = pytest.mark.filterwarnings("ignore:The environment is already wrapped with a `Monitor`:UserWarning")

N = 3
PLACES = pytest.mark.parametrize("backend", ["sync", "async"])
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda view: view,
    "normalised": VecNormalize,
    "stacked": partial(VecFrameStack, n_stack=2),
    "monitored": VecMonitor,
}
WRAPPED = pytest.mark.parametrize(
    ("wrapper", "backend"), [("none", "async"), *((wrapper, "sync") for wrapper in WRAPPERS)]
)


def view_of(factories: list[Callable[[], Any]], backend: str, **options: Any) -> SB3VecEnv:
    workers = {"num_workers": min(2, len(factories))} if backend == "async" else {}
    return SB3VecEnv(marlvec.make(factories, backend=backend, **workers, **options))


def test_envs_instead_of_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="CustomEnv"):
        marlvec.make([CustomEnv(), CustomEnv()], backend="sync")  # type: ignore[list-item]  # on purpose


# --- methods and attributes


@WRAPPED
def test_calls_for_envs(backend: str, wrapper: str) -> None:
    view = WRAPPERS[wrapper](view_of([wrapped] * N, backend))
    view.seed(0)
    assert not view.has_attr("dummy")
    assert view.set_attr("dummy", 12) is None
    assert view.get_attr("dummy") == [12] * N
    assert view.env_method("get_wrapper_attr", "dummy") == [12] * N
    assert not view.has_attr("dummy2")
    view.env_method("set_wrapper_attr", "dummy2", 2)
    assert view.get_attr("dummy2") == [2] * N
    answers = view.env_method("custom_method", 1, indices=None, dim_1=2)
    assert [answer.shape for answer in answers] == [(1, 2)] * N
    for i in range(N):
        assert view.set_attr("dummy1", i, indices=i) is None
    assert view.get_attr("dummy1") == list(range(N))
    answers = view.env_method("custom_method", 1, indices=[0, 2], dim_1=3)
    assert [answer.shape for answer in answers] == [(1, 3)] * 2
    view.set_attr("dummy1", 42, indices=None)
    assert view.get_attr("dummy1") == [42] * N
    view.close()


@PLACES
def test_indices(backend: str) -> None:
    view = view_of([wrapped] * N, backend)
    for chosen, left in (([0, 1], [2]), ([0, -1], [1]), (np.array([1, 2]), [0]), (range(2), [2]), (-1, [0, 1])):
        view.reset()
        number = 1 if isinstance(chosen, int) else len(chosen)
        assert view.env_method("set_wrapper_attr", "current_step", 12, indices=chosen) == [True] * number
        assert view.get_attr("current_step", indices=chosen) == [12] * number
        assert [view.get_attr("current_step")[i] for i in left] == [0] * len(left)
    for wrong in (N, -N - 1, [0, N]):
        refused(ArgumentError, "expected rows from 0 to 2", view.get_attr, "current_step", indices=wrong)
    view.close()


@PLACES
def test_what_the_envs_lack_is_an_attribute_error(backend: str) -> None:
    view = view_of([wrapped] * N, backend)
    for call in (view.get_attr, view.env_method):
        refused(AttributeError, "no layer of the env has an attribute 'nothing'", call, "nothing")
    assert not view.has_attr("nothing")
    with pytest.raises(
        EnvRaised, match=r"env 0 raised in custom_method\(\): TypeError"
    ) as caught:  # theirs: the TypeError itself
        view.env_method("custom_method", 1, 2, 3)
    assert isinstance(caught.value.__cause__, TypeError)
    assert view.get_attr("current_step") == [0] * N, "and nothing is broken"
    view.close()


@PLACES
def test_options_are_for_one_reset(backend: str) -> None:
    view = view_of([wrapped] * N, backend)
    options: Any = {"hello": 1}
    view.set_options(options)
    assert view.get_attr("current_options") == [None] * N
    view.reset()
    assert view.get_attr("current_options") == [options] * N
    view.reset()
    assert view.get_attr("current_options") == [None] * N
    options = [{"other": 2}, {"hello": 1}, {"hello": 1}]
    view.set_options(options)
    view.reset()
    assert view.get_attr("current_options") == options
    view.close()


@PLACES
def test_env_is_wrapped(backend: str) -> None:
    view = view_of([CustomEnv, wrapped], backend)
    assert view.env_is_wrapped(Outer) == [False, True]
    assert VecFrameStack(view, 2).env_is_wrapped(Outer) == [False, True]
    view.close()


# --- observations


@WRAPPED
def test_the_terminal_observation_is_among_the_infos(backend: str, wrapper: str) -> None:
    lengths = [5, 6, 7]
    view = WRAPPERS[wrapper](view_of([partial(CountEnv, length) for length in lengths], backend))
    before = view.reset()
    for step in range(1, 8):
        obs, rewards, dones, infos = view.step(np.zeros(N, np.int64))
        assert len(obs) == len(rewards) == len(dones) == len(infos) == N
        for i, length in enumerate(lengths):
            assert dones[i] == (step % length == 0)
            assert ("terminal_observation" in infos[i]) == dones[i]
            if dones[i]:
                last = infos[i]["terminal_observation"]
                assert (before[i] < last).all()
                assert infos[i]["TimeLimit.truncated"]
                assert (obs[i] < before[i]).all()
                if wrapper != "normalised":
                    assert (last[..., -1] == length).all()
                    assert (obs[i] == 0).all()
        before = obs
    view.close()


@pytest.mark.mostly_slow("steps or trains with another library", quick="each")
@PLACES
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        BOX,
        spaces.Dict({"a": spaces.Discrete(3), "b": BOX}),
        spaces.Tuple((spaces.Discrete(2), BOX)),
    ],
    ids=["discrete", "multi discrete", "multi binary", "box", "dict", "tuple"],
)
def test_spaces(space: Any, backend: str) -> None:
    view = view_of([partial(CustomEnv, space)] * N, backend)
    theirs = DummyVecEnv([partial(CustomEnv, space)] * N)
    for _ in range(3):
        check_form(view.reset(), theirs.reset(), space)
        for _ in range(2):
            actions = [view.action_space.sample() for _ in range(N)]
            check_form(view.step(actions)[0], theirs.step(actions)[0], space)
    view.close()
    theirs.close()


def check_form(ours: Any, theirs: Any, space: Any) -> None:
    if isinstance(space, spaces.Dict):
        assert set(ours) == set(theirs)
        for key, sub in space.spaces.items():
            check_form(ours[key], theirs[key], sub)
    elif isinstance(space, spaces.Tuple):
        assert isinstance(ours, tuple)
        for mine, other, sub in zip(ours, theirs, space.spaces, strict=True):
            check_form(mine, other, sub)
    else:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert all(space.contains(value) for value in ours)


@PLACES
def test_frames_are_stacked_on_the_axis_of_channels(backend: str) -> None:
    for shape, axis in (((4, 4, 3), -1), ((3, 4, 4), 1)):
        image = spaces.Box(0, 255, shape, np.uint8)
        view = VecFrameStack(view_of([partial(CustomEnv, image)] * N, backend), 2)
        obs = view.reset()
        assert obs.shape[axis] == 6
        obs, *_ = view.step([view.action_space.sample() for _ in range(N)])
        assert obs.shape[axis] == 6
        view.close()


def test_images_are_transposed() -> None:
    view = VecTransposeImage(view_of([partial(CustomEnv, spaces.Box(0, 255, (4, 6, 3), np.uint8))] * N, "sync"))
    assert view.reset().shape == (N, 3, 4, 6)
    view.close()


# --- seeds


@PLACES
def test_seeds(backend: str) -> None:
    view = view_of([partial(gymnasium.make, "Pendulum-v1")] * N, backend)
    assert view.seed(3) == list(marlvec.env_seeds(3, N))  # theirs: 3, 4, 5
    first = view.reset()
    view.seed(3)
    assert (view.reset() == first).all()
    normalised = VecNormalize(view)
    normalised.seed(3)
    assert (view.reset() == first).all()
    assert (view.reset() != first).any(), "a seed is for one reset"
    view.close()


@PLACES
def test_without_a_seed_envs_are_not_alike(backend: str) -> None:
    view = view_of([CustomEnv] * N, backend)
    view.seed()
    obs = view.reset()
    _, rewards, _, _ = view.step(np.array([view.action_space.sample() for _ in range(N)]))
    assert len({row.tobytes() for row in obs}) == len(set(rewards.tolist())) == N
    view.close()


@PLACES
def test_what_it_gives_is_what_dummy_vec_env_gives(backend: str) -> None:
    theirs = make_vec_env("CartPole-v1", N, seed=1)
    ours = view_of([partial(gymnasium.make, "CartPole-v1")] * N, backend)
    seeds = theirs.seed(1)
    ours._seeds = list(seeds)
    assert (ours.reset() == theirs.reset()).all()
    rng = np.random.default_rng(0)
    for _ in range(80):
        actions = rng.integers(2, size=N)
        (obs, rewards, dones, infos), expected = ours.step(actions), theirs.step(actions)
        assert (obs == expected[0]).all()
        assert (rewards == expected[1]).all()
        assert rewards.dtype == expected[1].dtype
        assert (dones == expected[2]).all()
        for info, other in zip(infos, expected[3], strict=True):
            assert info["TimeLimit.truncated"] == other["TimeLimit.truncated"]
            if "terminal_observation" in other:
                assert (info["terminal_observation"] == other["terminal_observation"]).all()
                assert info["episode"]["r"] == other["episode"]["r"]
                assert info["episode"]["l"] == other["episode"]["l"]
    ours.close()
    theirs.close()


# --- rendering


@WRAPPED
def test_render(backend: str, wrapper: str) -> None:
    view = WRAPPERS[wrapper](view_of([wrapped] * N, backend))
    assert view.render_mode == "rgb_array"
    view.reset()
    image = view.render()
    assert (image == view.render(mode="rgb_array")).all()
    assert image.shape == (8, 8, 3)
    assert len(view.get_images()) == N
    with pytest.warns(UserWarning, match="something_else"):
        assert view.render(mode="something_else") is None
    view.close()


def test_render_without_a_mode_warns() -> None:
    view = view_of([partial(CustomEnv, render_mode=None)] * N, "sync")
    view.reset()
    with pytest.warns(UserWarning, match="no `render_mode`"):
        assert view.render() is None
    view.close()


# --- several agents


def test_actions_by_agent() -> None:
    """Here alone: what each agent does, by its name."""
    views = [SB3VecEnv(marlvec.make("simple_spread", 2, backend="sync", max_cycles=5)) for _ in range(3)]
    for view in views:
        view.seed(0)
        view.reset()
    rng = np.random.default_rng(0)
    agents = views[0].envs.agents
    for _ in range(7):
        rows = rng.integers(5, size=6)
        per_agent = {name: rows.reshape(2, 3)[:, a] for a, name in enumerate(agents)}
        per_env = [dict(zip(agents, own, strict=True)) for own in rows.reshape(2, 3).tolist()]
        results = [view.step(given) for view, given in zip(views, (rows, per_agent, per_env), strict=True)]
        for result in results[1:]:
            for mine, expected in zip(result[:3], results[0][:3], strict=True):
                assert (mine == expected).all()
    refused(ValueError, "expected an action, since it acts, got None", views[0].step, {agents[0]: [0, 0]})
    for view in views:
        view.close()
