"""`EnvRecipe`: a factory with arguments, wrappers and limits for one env; a worker calls it to build the env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from marlvec.envs.adapters.joint import AGENTS
from marlvec.envs.detect import adapt
from marlvec.envs.making.factory import EnvFactory, offer
from marlvec.envs.wrappers.padding import PaddedEnv
from marlvec.envs.wrappers.time_limit import TimeLimit, check_limit
from marlvec.errors import ArgumentError

__all__ = ["EnvKwargs", "EnvRecipe", "RenderModes", "Wrapper", "write_recipes"]

Wrapper = Callable[..., Any]
"""A class or function that takes an env and returns an env."""

EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Keyword arguments for all envs, or one dict for each."""

RenderModes = str | Sequence[str | None] | None
"""One mode for all envs, ``"single_<mode>"`` for env 0 alone, or one mode or None per env."""

_SINGLE = "single_"


@dataclass(frozen=True)
class EnvRecipe:
    """Everything needed to build env number ``env_index``; ``agents`` and ``lenient`` as in `marlvec.envs.adapt`."""

    factory: EnvFactory
    env_index: int = 0
    num_envs: int = 1
    wrappers: tuple[Wrapper, ...] = ()  # the first one innermost
    render_mode: str | None = None
    max_episode_steps: int | None = None
    pad: bool = False  # agents of different spaces to one group
    agents: str = "auto"
    lenient: bool = False

    def __call__(self) -> Any:
        env = self._build()
        try:
            return self._finish(env)
        except BaseException:
            _close(env)
            raise

    def _build(self) -> Any:
        mode = self.render_mode
        if mode is None:
            return self._call_factory()
        try:
            env = self._call_factory(render_mode=mode)
        except Exception as error:
            self._check_mode(self._modes_of_a_plain_env(), error)
            raise
        try:
            self._check_mode(_render_modes(env))  # most constructors accept any mode; such envs fail when they render
        except ArgumentError:
            _close(env)
            raise
        return env

    def _call_factory(self, **kwargs: Any) -> Any:
        return self.factory(env_index=self.env_index, num_envs=self.num_envs, **kwargs)

    def _check_mode(self, known: list[str] | None, cause: Exception | None = None) -> None:
        if known is not None and self.render_mode not in known:
            supported = ", ".join(map(repr, known)) or "none at all"
            raise ArgumentError(
                f"render_mode={self.render_mode!r}: {self.factory.entry.id} supports {supported}"
            ) from cause

    def _modes_of_a_plain_env(self) -> list[str] | None:
        """Return the render modes of an env built without a mode; None if it cannot be built."""
        try:
            env = self._call_factory()
        except Exception:  # it cannot be built without a mode either
            return None
        known = _render_modes(env)
        _close(env)
        return known

    def _finish(self, env: Any) -> Any:
        for wrapper in self.wrappers:
            env = wrapper(env, **offer(wrapper, self.env_index, self.num_envs))
        if self.pad or self.max_episode_steps is not None or self.agents != "auto" or self.lenient:
            env = adapt(env, agents=self.agents, lenient=self.lenient)
        if self.pad and len(env.spec().groups) > 1:
            env = PaddedEnv(env)
        if self.max_episode_steps is not None:
            env = TimeLimit(env, self.max_episode_steps)
        return env


def write_recipes(
    factories: Sequence[EnvFactory],
    *,
    kwargs: Mapping[str, Any],
    env_kwargs: EnvKwargs = None,
    wrappers: Wrapper | Sequence[Wrapper] = (),
    render_mode: RenderModes = None,
    max_episode_steps: int | None = None,
    pad: bool = False,
    agents: str = "auto",
    lenient: bool = False,
) -> list[EnvRecipe]:
    """Write one recipe per env; arguments as in `marlvec.make`."""
    n = len(factories)
    layers = tuple(wrappers) if isinstance(wrappers, (list, tuple)) else (wrappers,)
    if not all(map(callable, layers)):
        raise ArgumentError(f"wrappers: expected classes or functions from env to env, got {wrappers!r}")
    if max_episode_steps is not None:
        check_limit(max_episode_steps)
    if agents not in AGENTS:
        raise ArgumentError(
            f"agents must be one of {', '.join(map(repr, AGENTS))}, got {agents!r}; an env's own argument of that name "
            f"goes into env_kwargs"
        )
    per_env = zip(factories, _spread_kwargs(env_kwargs, n), _spread_modes(render_mode, n), strict=True)
    recipes = []
    for i, (factory, own, mode) in enumerate(per_env):
        if mode is not None and "render_mode" in own:
            raise ArgumentError(f"render_mode is given twice for env {i}: as an argument, and in env_kwargs")
        # This limit replaces Gymnasium's own one, as in gymnasium.make(max_episode_steps=...).
        limited = max_episode_steps is not None and factory.entry.family == "gymnasium"
        limit = {"max_episode_steps": -1} if limited else {}
        built = factory.with_kwargs(**{**limit, **kwargs, **own})
        recipes.append(EnvRecipe(built, i, n, layers, mode, max_episode_steps, bool(pad), agents, bool(lenient)))
    return recipes


def _spread_kwargs(env_kwargs: Any, n: int) -> list[dict[str, Any]]:
    if env_kwargs is None or isinstance(env_kwargs, Mapping):
        return [dict(env_kwargs or {})] * n
    if not isinstance(env_kwargs, (list, tuple)) or not all(isinstance(own, Mapping) for own in env_kwargs):
        raise ArgumentError(f"env_kwargs: expected a dict, or a list of one dict per env, got {env_kwargs!r}")
    if len(env_kwargs) != n:
        raise ArgumentError(f"env_kwargs: expected one dict per env, {n} in all, got {len(env_kwargs)}")
    return [dict(own) for own in env_kwargs]


def _spread_modes(render_mode: Any, n: int) -> list[str | None]:
    if isinstance(render_mode, str) and render_mode.startswith(_SINGLE):
        return [render_mode.removeprefix(_SINGLE), *[None] * (n - 1)]
    if render_mode is None or isinstance(render_mode, str):
        return [render_mode] * n
    if not isinstance(render_mode, (list, tuple)) or not all(m is None or isinstance(m, str) for m in render_mode):
        raise ArgumentError(
            f"render_mode: expected a mode such as 'rgb_array', 'single_rgb_array' for env 0 alone, "
            f"or a list of one mode or None per env, got {render_mode!r}"
        )
    if len(render_mode) != n:
        raise ArgumentError(f"render_mode: expected one mode or None per env, {n} in all, got {len(render_mode)}")
    return list(render_mode)


def _render_modes(env: Any) -> list[str] | None:
    """Return the render modes in an env's metadata; None if they are not declared."""
    metadata = getattr(env, "metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    modes = metadata.get("render_modes", metadata.get("render.modes"))
    return [mode for mode in modes if isinstance(mode, str)] if isinstance(modes, (list, tuple, set)) else None


def _close(env: Any) -> None:
    with suppress(Exception):  # the first error is the one to report
        env.close()
