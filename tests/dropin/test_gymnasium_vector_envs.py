"""What Gymnasium 1.4.0 expects of its vector envs (tests/vector), asked of `GymnasiumVectorEnv`.

Different on purpose, each beside its test: a timeout leaves the request pending; one int seed is spread by
`marlvec.env_seeds` and not as ``seed + i``; a wrong ``reset_mask`` is a ValueError whatever is wrong with it, and is
not taken out of the caller's options; ``get_attr`` does not call what it finds; what an env raises comes as an
`EnvRaised` that names the env, with the original as its cause, and the worker goes on; values of custom spaces are
arrays of objects, not tuples; ``close(timeout=None)`` waits 5 seconds and not for ever.

Not asked: ``worker=``, ``max_concurrency=`` and ``observation_mode=`` of their constructors, which `make` has in its
own words (``worker=``, ``num_workers=``, ``spaces=``).
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_differing_spaces
from gymnasium.wrappers import TransformObservation

import marlvec
from marlvec.errors import ArgumentError, BusyError, EnvContractError, EnvRaised
from marlvec.interop.cleanrl import CleanRLVectorEnv
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.interop.supersuit import SuperSuitVecEnv
from tests.interop.envs import SPACES, CountEnv, SampleEnv
from tests.vector.support.reference import refused
from tests.waiting import Gate

BACKENDS = [("sync", {}), ("async", {"num_workers": 2})]
PLACES = pytest.mark.parametrize("place", BACKENDS, ids=[name for name, _ in BACKENDS])
Place = tuple[str, dict[str, Any]]


def view_of(factories: list[Callable[[], Any]], place: Place, mode: str = "next_step", **options: Any) -> Any:
    backend, workers = place
    workers = {name: min(number, len(factories)) for name, number in workers.items()}
    return GymnasiumVectorEnv(marlvec.make(factories, backend=backend, autoreset_mode=mode, **workers, **options))


def cart_poles(number: int = 4, **kwargs: Any) -> list[Callable[[], Any]]:
    return [partial(gymnasium.make, "CartPole-v1", **kwargs)] * number


class SlowEnv(CountEnv):
    """Waits at a gate, in the call that it is told."""

    def __init__(self, gate: Gate, at: str) -> None:
        super().__init__()
        self._gate, self._at = gate, at

    def reset(self, **kwargs: Any) -> Any:
        if self._at == "reset":
            self._gate.wait()
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self._at == "step":
            self._gate.wait()
        return super().step(action)

    def linger(self) -> int:
        self._gate.wait()
        return 7


class FailingEnv(CountEnv):
    """Raises in a reset with such an option, and in a step with such an action."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options and options.get("fail"):
            raise ValueError("error in reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if action == 4:
            raise ValueError("error in step")
        return super().step(action)


class CustomSpace(gymnasium.Space[Any]):
    """Of words; with neither shape nor dtype."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "word"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomSpace)

    __hash__ = None  # type: ignore[assignment]  # as of all spaces


class WordEnv(gymnasium.Env[Any, Any]):
    """Says what it was told."""

    metadata = {"render_modes": []}
    observation_space = CustomSpace()
    action_space = CustomSpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return "reset", {}

    def step(self, action: str) -> Any:
        return f"step({action})", 0, False, False, {}


class OneSpaceEnv(CountEnv):
    """Observes zeros of any space."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        _, info = super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), info

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return (np.zeros(self.observation_space.shape, self.observation_space.dtype), *rest)


# --- making, resetting, stepping, rendering


@PLACES
def test_reset_and_step(place: Place) -> None:
    view = view_of(cart_poles(8), place)
    assert view.num_envs == 8
    assert isinstance(view.observation_space, Box)
    assert isinstance(view.single_action_space, Discrete)
    assert isinstance(view.action_space, MultiDiscrete)
    obs, infos = view.reset(seed=0)
    assert obs.dtype == view.observation_space.dtype
    assert obs.shape == view.observation_space.shape == (8, *view.single_observation_space.shape)
    assert infos == {}
    singles = [view.single_action_space.sample() for _ in range(8)]
    for actions in (view.action_space.sample(), singles, tuple(singles)):
        obs, rewards, terminated, truncated, _ = view.step(actions)
        assert obs.dtype == view.observation_space.dtype
        assert obs.shape == view.observation_space.shape
        for array, dtype in ((rewards, np.float64), (terminated, np.bool_), (truncated, np.bool_)):
            assert isinstance(array, np.ndarray)
            assert (array.shape, array.dtype) == ((8,), dtype)
    view.close()


@PLACES
def test_metadata_has_the_mode_and_that_of_the_env_has_not(place: Place) -> None:
    for mode, theirs in (("next_step", AutoresetMode.NEXT_STEP), ("same_step", AutoresetMode.SAME_STEP)):
        view = view_of([CountEnv] * 3, place, mode)
        assert view.metadata["autoreset_mode"] == theirs
        assert "autoreset_mode" not in CountEnv.metadata
        view.close()


@PLACES
def test_render(place: Place) -> None:
    view = view_of([partial(CountEnv, render_mode="rgb_array")] * 3, place)
    assert view.render_mode == "rgb_array"
    view.reset()
    frames = view.render()
    assert isinstance(frames, tuple)
    assert [type(frame) for frame in frames] == [np.ndarray] * 3
    assert view.call("render")[0].shape == frames[0].shape
    view.close()
    view = view_of([CountEnv] * 3, place)
    assert view.render_mode is None
    view.close()


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@PLACES
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_any_place_gives_the_same(place: Place, mode: str) -> None:
    ours, theirs = view_of(cart_poles(), place, mode), SyncVectorEnv(cart_poles(), autoreset_mode=mode_of(mode))
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert data_equivalence(ours.reset(seed=[0, 1, 2, 3]), theirs.reset(seed=[0, 1, 2, 3]), exact=True)
    ours.action_space.seed(123)
    theirs.action_space.seed(123)
    for _ in range(100):
        actions = ours.action_space.sample()
        assert actions.tolist() == theirs.action_space.sample().tolist()
        assert actions in theirs.action_space
        assert data_equivalence(ours.step(actions), theirs.step(actions), exact=True)
    ours.close()
    theirs.close()


def mode_of(name: str) -> AutoresetMode:
    return AutoresetMode[name.upper()]


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@PLACES
def test_every_space_for_observations_and_actions(place: Place) -> None:
    for space in SPACES.values():
        view = view_of([partial(SampleEnv, space, space)] * 3, place)
        assert view.observation_space == view.action_space
        obs, _ = view.reset()
        assert obs in view.observation_space
        obs, *_ = view.step(view.action_space.sample())
        assert obs in view.observation_space
        view.close()


@PLACES
def test_what_is_said_in_the_last_step_and_at_the_reset_after_it(place: Place) -> None:
    view = view_of([partial(CountEnv, 3, talks=True)], place)
    assert told(view.reset()) == ([0], {"began": [True], "_began": [True]})
    for k in (1, 2, 3):
        obs, _, terminated, _, infos = view.step([k])
        assert told((obs, infos)) == ([k], {"action": [k], "_action": [True]})
        assert terminated.tolist() == [k == 3]
    obs, rewards, terminated, _, infos = view.step([4])
    assert told((obs, infos)) == ([0], {"began": [True], "_began": [True]})
    assert (rewards.tolist(), terminated.tolist()) == ([0.0], [False])
    view.close()


def told(pair: Any) -> Any:
    return pair[0].tolist(), {key: value.tolist() for key, value in pair[1].items()}


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize("kind", [GymnasiumVectorEnv, CleanRLVectorEnv, SuperSuitVecEnv])
def test_a_view_that_is_thrown_away_closes_nothing(kind: Any) -> None:
    """Gymnasium up to 1.2 closes it: then the vectorizer under it, which may be in use; or what was never finished."""
    with marlvec.make("simple_tag", 1, backend="sync") as envs, pytest.raises(ArgumentError, match="one group"):
        kind(envs)
    kind.__new__(kind)
    with marlvec.make("simple_spread", 1, backend="sync") as envs:
        kind(envs)
        gc.collect()
        assert not envs.closed
        view = kind(envs)
        view.close()
        assert envs.closed
        assert view.closed


@PLACES
def test_actions_are_counted(place: Place) -> None:
    view = view_of(cart_poles(), place, "disabled")
    view.reset()
    actions = view.action_space.sample()
    obs, *others, _ = view.step(actions)
    assert [len(part) for part in (obs, *others)] == [4] * 4
    for wrong in (actions[:3], np.concatenate([actions, actions[:1]]), 0):  # here the last one is a ValueError, too
        refused(ValueError, "one row per env and agent", view.step, wrong)
    view.close()


@PLACES
@pytest.mark.parametrize("copy", [True, False])
def test_copy(place: Place, copy: bool) -> None:
    view = view_of(cart_poles(), place, copy=copy)
    first, _ = view.reset(seed=1)
    before = first.copy()
    view.step(np.ones(4, np.int64))
    assert (first == before).all() == copy  # what is no copy shows the next step
    del first
    view.close()


def test_half_precision() -> None:
    view = view_of([partial(OneSpaceEnv, Box(-1, 1, (3,), np.float16))] * 2, BACKENDS[1])
    assert (view.reset()[0].dtype, view.step([0, 0])[0].dtype) == (np.float16, np.float16)
    view.close()


@PLACES
def test_custom_spaces(place: Place) -> None:
    """Theirs needs ``shared_memory=False``, and gives tuples; here such leaves are arrays of objects."""
    view = view_of([WordEnv] * 3, place)
    assert isinstance(view.single_action_space, CustomSpace)
    obs, _ = view.reset()
    assert obs in view.observation_space
    assert list(obs) == ["reset"] * 3
    obs, *_ = view.step(("a", "b", "c"))
    assert list(obs) == ["step(a)", "step(b)", "step(c)"]
    view.close()


# --- unlike observation spaces


@PLACES
def test_observation_spaces_that_differ(place: Place) -> None:
    """``observation_mode="different"`` is ``spaces="compatible"`` here; without it both refuse."""
    spaces = [Box(0, high, (2,)) for high in (1, 2, 3)]
    factories: list[Callable[[], Any]] = [partial(OneSpaceEnv, space) for space in spaces]
    refused(RuntimeError, "observation space of agent", view_of, factories, place)
    view = view_of(factories, place, spaces="compatible")
    assert view.single_observation_space.shape == spaces[0].shape
    assert batch_differing_spaces(spaces).shape == view.observation_space.shape
    view.reset()
    view.step(view.action_space.sample())
    view.close()
    with pytest.raises(RuntimeError, match="observation space of agent"):
        view_of([partial(OneSpaceEnv, Box(0, 1, (k,))) for k in (1, 2, 3)], place, spaces="compatible")


@PLACES
def test_observation_spaces_of_ones_own(place: Place) -> None:
    """A pair of spaces for ``observation_mode`` has no counterpart: each env declares the space, by a wrapper."""
    wide = Box(0, 9, (2,))
    factories: list[Callable[[], Any]] = [partial(OneSpaceEnv, Box(0, high, (2,))) for high in (1, 2, 3)]
    view = view_of([lambda made=made: TransformObservation(made(), lambda obs: obs, wide) for made in factories], place)
    assert view.single_observation_space == wide
    assert view.reset()[0] in view.observation_space
    view.close()


# --- methods and attributes of the envs


@PLACES
def test_call_calls_methods_and_reads_properties(place: Place) -> None:
    view = view_of(cart_poles(render_mode="rgb_array"), place)
    view.reset()
    assert view.call("gravity") == view.get_attr("gravity") == (9.8,) * 4
    assert [type(answer) for answer in view.call("gravity")] == [float] * 4
    images = view.call("render")
    assert isinstance(images, tuple)
    assert [image.ndim for image in images] == [3] * 4
    spaces = view.call("get_wrapper_attr", "action_space")
    assert spaces == (view.single_action_space,) * 4
    view.call_async("get_wrapper_attr", name="gravity")
    assert view.call_wait(timeout=60) == (9.8,) * 4
    refused(AttributeError, "no layer of the env has an attribute 'grvity'", view.call, "grvity")
    refused(AttributeError, "grvity", view.get_attr, "grvity")
    view.call_async("grvity")
    refused(AttributeError, "grvity", view.call_wait)
    view.step(view.action_space.sample())
    view.close()


@PLACES
def test_set_attr(place: Place) -> None:
    view = view_of(cart_poles(), place)
    view.set_attr("gravity", [9.81, 3.72, 8.87, 1.62])
    assert view.get_attr("gravity") == (9.81, 3.72, 8.87, 1.62)
    view.set_attr("gravity", (1.0, 2.0, 3.0, 4.0))
    assert view.get_attr("gravity") == (1.0, 2.0, 3.0, 4.0)
    view.set_attr("gravity", 5.0)
    assert view.get_attr("gravity") == (5.0,) * 4
    refused(ValueError, "expected one per row, 4 in all, got 3", view.set_attr, "gravity", [1, 2, 3])
    view.close()


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_call_refuses_what_has_a_call_of_its_own(name: str) -> None:
    view = view_of([CountEnv], BACKENDS[0])
    refused(ValueError, f"{name}.*use {name}", view.call, name)
    view.close()


def test_here_get_attr_calls_nothing() -> None:
    view = view_of([CountEnv], BACKENDS[0])
    (method,) = view.get_attr("render")
    assert callable(method)
    view.close()


@PLACES
def test_spec(place: Place) -> None:
    view = view_of(cart_poles(), place)
    assert view.spec.id == "CartPole-v1"
    assert view.spec.max_episode_steps == 500
    assert str(view) == "GymnasiumVectorEnv(CartPole-v1, num_envs=4)"
    assert gymnasium.wrappers.vector.ClipReward(view, 0, 1).spec is view.spec
    view.close()
    assert "CartPole-v1" in str(view)
    view = view_of([CountEnv], place)
    assert view.spec is None
    view.close()


# --- seeds


@PLACES
def test_random_streams_of_the_envs(place: Place) -> None:
    view = view_of(cart_poles(), place)
    streams = view.np_random
    assert isinstance(streams, tuple)
    assert [type(stream) for stream in streams] == [np.random.Generator] * 4
    view.reset(seed=42)
    assert view.np_random_seed == tuple(marlvec.env_seeds(42, 4))  # theirs: 42, 43, 44, 45
    view.reset(seed=None)
    assert view.np_random_seed == tuple(marlvec.env_seeds(42, 4))
    view.reset(seed=[3, None, 4, 5])
    assert view.np_random_seed == (3, marlvec.env_seeds(42, 4)[1], 4, 5)
    view.close()


@PLACES
def test_envs_without_a_seed_are_not_alike(place: Place) -> None:
    view = view_of(cart_poles(), place)
    assert len(set(view.np_random_seed)) == 4
    view.close()


def test_agents_have_their_envs_answers() -> None:
    view = GymnasiumVectorEnv(marlvec.make("simple_spread", 2, backend="sync"))
    assert view.num_envs == 6
    view.set_attr("mark", 7)
    assert view.get_attr("mark") == (7,) * 6
    view.set_attr("mark", [1, 1, 1, 2, 2, 2])
    assert view.get_attr("mark") == (1, 1, 1, 2, 2, 2)
    view.set_attr("mark", view.get_attr("mark"))
    with pytest.raises(ArgumentError, match="equal values for rows of one env; row 1 differs from them: 2"):
        view.set_attr("mark", [1, 2, 1, 2, 2, 2])
    view.close()


# --- partial resets


@PLACES
def test_partial_reset(place: Place) -> None:
    view = view_of(cart_poles(3), place, "disabled")
    begun, _ = view.reset(seed=[0, 1, 2])
    for _ in range(3):
        stepped, *_ = view.step(view.action_space.sample())
    options = {"reset_mask": np.array([True, True, False])}
    view.reset_async(seed=[0, 1, 0], options=options)
    obs, _ = view.reset_wait()
    assert (obs[:2] == begun[:2]).all()
    assert (obs[2] == stepped[2]).all()
    assert list(options) == ["reset_mask"], "here the caller's options stay as they are"
    view.close()


@pytest.mark.mostly_slow("steps or trains with another library", quick="each")
@PLACES
@pytest.mark.parametrize(
    "mask", [[True], [True, True, False, False], [[True] * 3], [False] * 3, [1, 1, 0], [1.0, 1.0, 0.0]]
)
def test_a_wrong_mask(place: Place, mask: Any) -> None:
    view = view_of([CountEnv] * 3, place, "disabled")
    view.reset(options={"reset_mask": np.ones(3, np.bool_)})
    with pytest.raises(ValueError, match=r"options\['reset_mask'\]"):  # theirs: a TypeError where the dtype is wrong
        view.reset(options={"reset_mask": np.array(mask)})
    view.step([1, 1, 1])
    view.close()


# --- the order of calls


@PLACES
def test_calls_out_of_order(place: Place) -> None:
    view = view_of([CountEnv] * 2, place)
    begins = {
        "reset": view.reset_async,
        "step": partial(view.step_async, [0, 0]),
        "call": partial(view.call_async, "render"),
    }
    waits = {"reset": view.reset_wait, "step": view.step_wait, "call": view.call_wait}
    for name, wait in waits.items():
        nothing = refused(NoAsyncCallError, "", wait)
        assert nothing.name == name
    refused(ResetNeeded, "", view.step_async, [0, 0])
    view.reset()
    blocking: list[Callable[[], Any]] = [view.reset, partial(view.step, [0, 0]), view.render]
    blocking += [partial(view.get_attr, "length"), partial(view.set_attr, "length", 3)]
    for pending, begin in begins.items():
        begin()
        for other in (*begins.values(), *blocking):
            busy = refused(AlreadyPendingCallError, "", other)
            assert busy.name == pending
            assert isinstance(busy, BusyError)
        for name, wait in waits.items():
            if name != pending:
                refused(NoAsyncCallError, "", wait)
        waits[pending](timeout=60)
    view.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as one:
        yield one


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@pytest.mark.parametrize("call", ["reset", "step", "call"])
def test_a_timeout_here_leaves_the_call_pending(gate: Gate, call: str) -> None:
    """Theirs forgets it, and takes its reply for the next call's."""
    view = view_of([partial(SlowEnv, gate, call)] * 2, BACKENDS[1])
    if call != "reset":
        view.reset()
    begin = {
        "reset": view.reset_async,
        "step": partial(view.step_async, [0, 1]),
        "call": partial(view.call_async, "linger"),
    }
    wait = {"reset": view.reset_wait, "step": view.step_wait, "call": view.call_wait}[call]
    begin[call]()
    for kind in (TimeoutError, multiprocessing.TimeoutError):
        refused(kind, "", wait, timeout=0.01)
    refused(AlreadyPendingCallError, "", begin[call])
    gate.let_through(2)
    answer = wait(timeout=60)
    if call == "step":
        assert (answer[0].tolist(), answer[1].tolist()) == ([1, 1], [0.0, 1.0])
    view.close()


# --- errors of envs


@PLACES
def test_errors_of_envs(place: Place) -> None:
    view = view_of([FailingEnv] * 3, place)
    caught = refused(RuntimeError, r"env 0.* reset\(\): ValueError: error in reset", view.reset, options={"fail": True})
    assert isinstance(caught, EnvRaised)  # theirs: the ValueError itself
    assert isinstance(caught.__cause__, ValueError)
    assert caught.env_ids == (0, 1, 2)
    view.reset()
    caught = refused(EnvRaised, "error in step", view.step, [0, 4, 0])
    assert caught.env_ids == (1,)
    view.reset()  # theirs has closed the worker
    view.step([0, 0, 0])
    view.close()


def test_what_breaks_the_contract_is_a_value_error() -> None:
    class Wrong(CountEnv):
        def step(self, action: Any) -> Any:
            return "not a count", 0.0, False, False, {}

    view = view_of([Wrong], BACKENDS[0])
    view.reset()
    caught = refused(ValueError, "env 0", view.step, [0])
    assert isinstance(caught, EnvContractError)
    view.close()


# --- the end


@PLACES
def test_what_is_closed(place: Place) -> None:
    view = view_of([CountEnv] * 2, place)
    view.reset()
    view.close()
    view.close()
    assert view.closed
    calls: list[Callable[[], Any]] = [view.reset, partial(view.step, [0, 0]), view.reset_async, view.reset_wait]
    calls += [partial(view.step_async, [0, 0]), view.step_wait, partial(view.call, "render"), view.call_wait]
    for call in calls:
        refused(ClosedEnvironmentError, "", call)


@pytest.mark.parametrize("how", [{"terminate": True}, {"timeout": 0.0}])
def test_close_with_a_call_pending_and_envs_that_hang(gate: Gate, how: dict[str, Any]) -> None:
    view = view_of([partial(SlowEnv, gate, "step")] * 2, BACKENDS[1])
    view.reset()
    view.step_async([0, 0])
    view.close(**how)
    assert view.closed


@PLACES
def test_close_with_a_call_pending(place: Place) -> None:
    view = view_of([CountEnv] * 2, place)
    view.reset_async()
    view.close()
    assert view.closed
