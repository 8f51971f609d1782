"""`render_mode=`: for all envs, for one of them, or for each its own."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import marlvec
from marlvec.errors import ArgumentError, EnvRaised
from marlvec.testing.scripted import ScriptedParallelEnv, SingleEnv

BACKENDS = ("sync", "async")


class Painter(SingleEnv):
    """Renders its index; ``strict`` says what its constructor does with a mode that it does not know."""

    modes = ["rgb_array", "ansi"]

    def __init__(self, render_mode: str | None = None, *, env_index: int = 0, strict: bool = False) -> None:
        super().__init__(9, env_index=env_index)
        self.metadata = {**self.metadata, "render_modes": self.modes}
        if strict:
            assert render_mode is None or render_mode in self.modes
        self.render_mode = render_mode
        self.renderer = None if render_mode is None else object()

    def render(self) -> Any:
        assert self.renderer is not None
        if self.render_mode == "ansi":
            return f"env {self.world.env_index}"
        return np.full((2, 3, 3), self.world.env_index, np.uint8)


class Shy(SingleEnv):
    """Knows no render mode, and has no argument for one."""


def modes_of(envs: marlvec.VectorEnv) -> list[Any]:
    return list(envs.get_attr("render_mode"))


@pytest.mark.mostly_slow("starts programs of its own", quick=2)
@pytest.mark.checklist(77)
@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_for_all_for_one_and_for_each(backend: str) -> None:
    def made(mode: Any, **kwargs: Any) -> marlvec.VectorEnv:
        return marlvec.make(Painter, 3, backend=backend, render_mode=mode, **kwargs)

    with made("rgb_array") as envs:
        assert modes_of(envs) == ["rgb_array"] * 3
        envs.reset(seed=0)
        assert [frame[0, 0, 0] for frame in envs.render()] == [0, 1, 2]
    with made("single_ansi") as envs:
        assert modes_of(envs) == ["ansi", None, None]
        assert [renderer is not None for renderer in envs.exec_func(lambda env: env.renderer is not None or None)] == [
            True,
            False,
            False,
        ]
        envs.reset(seed=0)
        assert envs.render(indices=[0]) == ("env 0",)
    with made([None, "ansi", "rgb_array"]) as envs:
        assert modes_of(envs) == [None, "ansi", "rgb_array"]
        envs.reset(seed=0)
        text, frame = envs.render(indices=[1, 2])
        assert text == "env 1"
        assert frame.shape == (2, 3, 3)
    for mode in ("human", "single_human", [None, "human", "ansi"]):
        for strict in (False, True):
            with pytest.raises(
                ArgumentError, match=r"render_mode='human': .*Painter supports 'rgb_array', 'ansi'"
            ) as caught:
                made(mode, strict=strict)
            assert isinstance(caught.value, ValueError)


def test_a_mode_is_refused_before_anything_is_left_running() -> None:
    closed: list[int] = []

    class Closing(Painter):
        def close(self) -> None:
            closed.append(self.world.env_index)

    with pytest.raises(ArgumentError, match="supports 'rgb_array', 'ansi'"):
        marlvec.make(Closing, 3, backend="sync", render_mode=["ansi", "rgb_array", "human"])
    assert sorted(closed) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["nonsense", "single_nonsense"])
@pytest.mark.parametrize(
    ("env", "modes"),
    [("simple_spread", "'human', 'rgb_array'"), ("CartPole-v1", "'human', 'rgb_array'")],
)
@pytest.mark.filterwarnings("ignore:.*The environment is being initialised with render_mode.*")
def test_libraries_that_take_any_mode_are_asked_what_they_support(env: str, modes: str, mode: str) -> None:
    with pytest.raises(ArgumentError, match=f"render_mode='nonsense': .* supports {modes}"):
        marlvec.make(env, 2, backend="sync", render_mode=mode)


def test_a_warning_that_is_an_error_does_not_hide_the_reason() -> None:
    """Gymnasium warns of modes it does not know, and in these tests warnings are errors."""
    with pytest.raises(ArgumentError, match="render_mode='nonsense': .*CartPole-v1 supports 'human', 'rgb_array'"):
        marlvec.make("CartPole-v1", 1, backend="sync", render_mode="nonsense")


def test_gymnasiums_lists_of_frames_are_supported() -> None:
    with marlvec.make("CartPole-v1", 2, backend="sync", render_mode="single_rgb_array_list") as envs:
        assert modes_of(envs) == ["rgb_array_list", None]


def test_envs_that_support_none_say_so() -> None:
    with pytest.raises(ArgumentError, match="supports none at all"):
        marlvec.make(ScriptedParallelEnv, 2, backend="sync", render_mode="rgb_array")


def test_envs_that_do_not_say_what_they_support_are_believed() -> None:
    class Silent(Painter):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            del self.metadata["render_modes"]

    with marlvec.make(Silent, 2, backend="sync", render_mode="holo") as envs:
        assert modes_of(envs) == ["holo", "holo"]


def test_envs_without_an_argument_for_it_refuse_it() -> None:
    with pytest.raises(ArgumentError, match=r"render_mode='rgb_array': .*Shy supports none at all"):
        marlvec.make(Shy, 2, backend="sync", render_mode="rgb_array")

    def broken(render_mode: str | None = None) -> Any:
        raise RuntimeError("out of paint")

    with pytest.raises(EnvRaised, match="out of paint"):
        marlvec.make(broken, 2, backend="sync", render_mode="rgb_array")


def test_wrappers_may_render_what_the_env_does_not() -> None:
    class Framed(gymnasium.Wrapper[Any, Any, Any, Any]):
        render_mode = "framed"

    with marlvec.make(Painter, 1, backend="sync", render_mode="ansi", wrappers=Framed) as envs:
        assert modes_of(envs) == ["framed"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (7, "render_mode: expected a mode such as 'rgb_array'"),
        (["ansi", 7], "render_mode: expected a mode such as 'rgb_array'"),
        (["ansi"], "render_mode: expected one mode or None per env, 2 in all, got 1"),
        (["ansi"] * 3, "render_mode: expected one mode or None per env, 2 in all, got 3"),
    ],
)
def test_wrong_modes_are_refused_before_anything_starts(mode: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        marlvec.make(Painter, 2, render_mode=mode)
    with pytest.raises(ArgumentError, match="render_mode is given twice for env 1"):
        marlvec.make(Painter, 2, render_mode="ansi", env_kwargs=[{}, {"render_mode": "rgb_array"}])


def test_a_mode_may_come_with_an_envs_own_arguments() -> None:
    with marlvec.make(
        partial(Painter, strict=True), 2, backend="sync", env_kwargs=[{}, {"render_mode": "ansi"}]
    ) as envs:
        assert modes_of(envs) == [None, "ansi"]
