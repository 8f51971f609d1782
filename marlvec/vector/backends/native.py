"""`NativeVectorEnv`: thousands of envs stepped by compiled kernels in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.making.recipe import EnvRecipe
from marlvec.errors import ArgumentError, BrokenError, ContractError, MissingExtraError
from marlvec.native.catalog import NativeEntry, native_entry
from marlvec.native.native_env import NativeEnv, refuse
from marlvec.native.padding import PaddedNativeEnv
from marlvec.vector.backends.in_process import InProcessVectorEnv
from marlvec.vector.call_state import CallEvent, is_interrupt
from marlvec.vector.data.buffer_reuse import BufferReuse
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture, raise_failures
from marlvec.vector.processes.limits import check_memory, memory_for
from marlvec.vector.settings import Settings, SettingsArguments
from marlvec.vector.shards.native_shard import NativeShard
from marlvec.vector.shards.partition import Partition, usable_cores

__all__ = ["NativeVectorEnv", "is_exact", "make_native", "NativePlan", "plan_native"]

_WORTH_A_THREAD = 512  # envs per thread; with fewer, waking a thread takes more time than it saves


class NativeVectorEnv(InProcessVectorEnv):
    """All envs of one `NativeEnv`; see `marlvec.native`.

    Actions are checked against their spaces in every call, whatever ``validate`` is: with a wrong action a compiled
    function could write outside its arrays. Kernels run no Python and cannot fail for one env alone, so ``on_fault``
    has no effect.

    Args:
        env: The envs.
        num_workers: Threads; default: one per usable core, at most one per 512 envs. Results do not depend on it.
        max_episode_steps: Truncate agents that are still alive after this many steps; None: never.
        render_modes: ``"rgb_array"`` or None per env.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate`` and ``state``, as in
            `marlvec.make`; ``spaces``, ``on_fault`` and ``max_restarts`` are accepted and have no effect.

    Attributes:
        num_workers: Number of threads, including the caller's.
    """

    backend = "native"
    _works_in_forks = True
    _always_checks_actions = True

    def __init__(
        self,
        env: NativeEnv,
        *,
        num_workers: int | None = None,
        max_episode_steps: int | None = None,
        render_modes: Sequence[str | None] | None = None,
        **settings: Unpack[SettingsArguments],
    ) -> None:
        chosen = Settings(**settings)
        n = env.num_envs
        super().__init__(n, chosen)
        if num_workers is None:
            num_workers = max(1, min(usable_cores(), n // _WORTH_A_THREAD))
        self.num_workers = Partition(n, num_workers).num_workers
        self._env = env
        self._batch = self._shard = NativeShard(
            env,
            num_threads=self.num_workers,
            autoreset_mode=chosen.autoreset_mode,
            keep_state=chosen.state,
            max_episode_steps=max_episode_steps,
            render_modes=[None] * n if render_modes is None else render_modes,
        )
        self._copier = BufferReuse(self._shard.copy)
        spec = self._shard.spec
        buffers = Buffers(spec, n)
        self._shard.attach(buffers)
        self._bind(spec, buffers)

    def _request_step(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        self._action_writer.write(self._buffers, actions, ids, self._selection(ids))
        self._env.check_actions(ids)
        self._request(call, ids)

    _state_kind = "native"

    def _find_obstacles(self) -> dict[int, str]:
        problem = self._env.state_obstacle()
        return {} if problem is None else dict.fromkeys(range(self.num_envs), problem)

    def _run(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> Report | None:
        try:
            return self._shard.do(operation, env_ids, arguments)
        except ArgumentError:  # the operation was not begun
            self._lose_in_flight()
            raise
        except Exception as error:
            if not is_interrupt(error):
                text = f"the envs are left in the middle of a {operation}: {error}"
                self._call_state.on(CallEvent.BREAK, BrokenError(text))
            raise

    def _shut_down(self, timeout: float) -> None:
        self._requests.clear()
        self._shard.close()


def make_native(
    recipes: Sequence[EnvRecipe], *, num_workers: int | None, **settings: Unpack[SettingsArguments]
) -> NativeVectorEnv:
    """Build native envs and compile all their functions; see `NativeVectorEnv` and `plan_native`."""
    found, n = plan_native(recipes), len(recipes)
    try:
        few = found.build(min(n, 2))
    except TypeError as error:
        raise_failures([capture(0, "__init__", error)], NativeVectorEnv._place_name)
        raise
    what, size = f"the rows of {n:,} envs of {found.entry.id}", Buffers.nbytes(few.spec(), n)
    check_memory(size, what)
    with memory_for(what, size):
        env = found.build()
        # Compile now, not in the first step. With a single env, array layouts and compiled signatures differ.
        _warm_up(few)
        return NativeVectorEnv(
            env,
            num_workers=num_workers,
            max_episode_steps=found.max_episode_steps,
            render_modes=found.render_modes,
            **settings,
        )


def is_exact(recipes: Sequence[EnvRecipe]) -> bool:
    """Return whether native envs exist for these recipes, with exactly equal results; compiles nothing."""
    try:
        found = plan_native(recipes)
        if found.entry.exact:
            found.build(1)
    except (ArgumentError, ContractError, MissingExtraError, TypeError):
        return False  # if the arguments are wrong, the reference env raises
    return found.entry.exact


def _warm_up(env: NativeEnv) -> None:
    """Compile every function of a `NativeEnv`, or load it from the disk cache; ``env`` is used for nothing else."""
    with NativeVectorEnv(env, state=env.state_space is not None) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())


@dataclass(frozen=True)
class NativePlan:
    """Everything needed to build the envs: a catalog entry, its constructor's arguments, and a mode or None per env."""

    entry: NativeEntry
    kwargs: dict[str, Any]
    render_modes: tuple[str | None, ...]
    max_episode_steps: int | None
    pad: bool

    def build(self, num_envs: int | None = None) -> NativeEnv:
        """Build ``num_envs`` envs; None: all. `TypeError`: the constructor has no such argument."""
        env = self.entry.load()(num_envs or len(self.render_modes), **self.kwargs)
        known = env.metadata.get("render_modes", ())
        for mode in self.render_modes:
            if mode is not None and mode not in known:
                supported = ", ".join(map(repr, known)) or "none at all"
                raise ArgumentError(f"render_mode={mode!r}: {self.entry.id} supports {supported}")
            if mode == "human":  # the reference draws in every step
                raise refuse(self.entry.id, "render_mode='human'")
        return PaddedNativeEnv(env) if self.pad and len(env.spec().groups) > 1 else env


def plan_native(recipes: Sequence[EnvRecipe]) -> NativePlan:
    """Find the native form of the envs that these recipes describe; `ArgumentError` has the reason if none."""
    first = recipes[0]
    name = first.factory.entry.id
    entry = native_entry(name)
    if entry is None:
        raise ArgumentError(f"env {name!r} has no native form; backend='async' runs every env")
    kwargs = _arguments(first)
    for recipe in recipes:
        if recipe.factory.entry != first.factory.entry:
            raise refuse(name, f"another env beside it ({recipe.factory.entry.id!r})")
        if _arguments(recipe) != kwargs:
            raise refuse(name, f"envs of different arguments (env 0 has {kwargs}, env {recipe.env_index} others)")
    if first.wrappers:
        raise refuse(name, "wrappers")
    if first.agents != "auto":
        raise refuse(name, f"agents={first.agents!r}")
    if first.lenient:
        raise refuse(name, "lenient=True")
    modes = tuple(recipe.render_mode or kwargs.get("render_mode") for recipe in recipes)
    kwargs.pop("render_mode", None)
    return NativePlan(entry, kwargs, modes, first.max_episode_steps, first.pad)


def _arguments(recipe: EnvRecipe) -> dict[str, Any]:
    return {**recipe.factory.entry.kwargs, **recipe.factory.kwargs}
