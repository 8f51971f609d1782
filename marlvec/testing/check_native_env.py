"""`check_native_env`: steps a native env beside its reference, and names the first number that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np

from marlvec.arguments import whole_number
from marlvec.envs.spec import AutoresetMode
from marlvec.errors import ArgumentError, ContractError
from marlvec.making import make
from marlvec.native.native_env import NativeEnv
from marlvec.registry import EnvLike
from marlvec.testing.findings import episodes_bar
from marlvec.testing.native_checks import Call, Pair, Unequal, shorten
from marlvec.trees import map_tree
from marlvec.vector.in_process import NativeVectorEnv
from marlvec.vector.vector_env import VectorEnv

_MODES = tuple(mode.value for mode in AutoresetMode)
# Steps between partial resets (only after an episode has ended, so that long episodes can end), and between loads of
# the state into new envs.
_RESET, _RESUME = 0.04, 0.02
_SHOWN = 40  # calls of a script

Actions = Callable[[VectorEnv, np.random.Generator], Any]


@dataclass(frozen=True)
class NativeMatch:
    """Counts of steps, episodes and numbers that were equal bit for bit.

    Attributes:
        env_steps: Steps of envs.
        episodes: Episodes that ended.
        numbers: Numbers that were compared.
    """

    env_steps: int
    episodes: int
    numbers: int


def check_native_env(
    native: str | Callable[..., NativeEnv],
    reference: EnvLike,
    *,
    num_envs: int = 3,
    episodes: int = 3,
    seeds: Sequence[int] = (0, 1),
    actions: str | Actions = "random",
    autoreset_modes: Iterable[str] = _MODES,
    max_steps: int = 10_000,
    max_episode_steps: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> NativeMatch:
    """Step a native env and its reference side by side; raise at the first number that differs.

    For each autoreset mode and seed, both get the same calls until every env has ended ``episodes`` episodes: steps,
    and now and then a reset of some envs, with or without a seed. Random streams continue from one episode to the
    next, so that one draw too many shows in all later episodes. After each call all results are compared byte by byte:
    observations, rewards, flags, masks, infos, final observations, and global states if the env has them. Now and then
    the native envs' state is saved and loaded into new native envs, if they declare their state.

    Args:
        native: A subclass of `marlvec.native.NativeEnv`, a function from ``num_envs`` (and ``env_kwargs``) to one, or
            the id of an env that has a native form.
        reference: The env that it must equal: anything that `marlvec.make` takes. It runs with ``backend="sync"``.
        num_envs: Number of envs of each, at least 2.
        episodes: Number of episodes of each env.
        seeds: Seeds, one run each; env ``i`` gets ``seed + i``.
        actions: ``"random"``: random actions that masks allow. Or a function ``(envs, rng)`` that returns a step's
            actions, for states that random actions do not reach; ``envs`` is the reference's `marlvec.VectorEnv`,
            ``rng`` a numpy generator.
        autoreset_modes: Modes to play.
        max_steps: Steps in which every env must end an episode.
        max_episode_steps: A time limit for both, as in `marlvec.make`.
        env_kwargs: Arguments for both envs.
        progress: Whether to draw a progress bar on stderr.

    Returns:
        The numbers of compared steps, episodes and values.

    Raises:
        ContractError: Agents, spaces or a number differ. The message names the number, its env, agent and step, and the
            seed; and the shortest sequence of calls found that shows the difference in a single env.
        ArgumentError: An argument is wrong.

    Example:
        ::

            check_native_env(Chase, "chase_v0", episodes=5, env_kwargs={"size": 9})
    """
    modes = list(autoreset_modes)
    for name, number, least in (
        ("num_envs", num_envs, 2),
        ("episodes", episodes, 1),
        ("max_steps", max_steps, 1),
    ):
        if (whole_number(number) or 0) < least:
            raise ArgumentError(f"check_native_env(): {name}: expected an int of at least {least}, got {number!r}")
    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise ArgumentError(f"check_native_env(): autoreset_modes: expected some of {_MODES}, got {unknown[0]!r}")
    if actions != "random" and not callable(actions):
        raise ArgumentError(f"check_native_env(): actions: expected 'random' or a function, got {actions!r}")
    kwargs = dict(env_kwargs or {})
    with make(reference, 1, backend="sync", env_kwargs=kwargs) as one:
        settings = {"max_episode_steps": max_episode_steps, "state": one.state_space is not None}
    # An id's registered arguments apply, too; every run uses the same builder.
    natives, references = partial(_native, native, kwargs, settings), partial(_reference, reference, kwargs, settings)
    draw = _random if actions == "random" else actions
    assert callable(draw)
    total = NativeMatch(0, 0, 0)
    with episodes_bar(len(modes) * len(seeds) * episodes * num_envs, "env steps", shown=progress) as show:
        for mode in modes:
            build = partial(Pair, natives, references, mode)
            for seed in seeds:
                with build(num_envs) as pair:
                    found = _Run(pair, mode, int(seed), draw, build).play(episodes, max_steps)
                total = NativeMatch(*map(sum, zip(astuple(total), astuple(found), strict=True)))
                show(total.episodes, total.env_steps)
    return total


def _native(native: str | Callable[..., NativeEnv], kwargs: Any, settings: Any, num_envs: int, mode: str) -> VectorEnv:
    settings = {"autoreset_mode": mode, "num_workers": 1, **settings}
    if isinstance(native, str):
        return make(native, num_envs, backend="native", env_kwargs=kwargs, **settings)
    env = native(num_envs, **kwargs)
    if not isinstance(env, NativeEnv):
        raise ArgumentError(f"check_native_env(): native: expected a NativeEnv, got {type(env).__name__}")
    return NativeVectorEnv(env, **settings)


def _reference(reference: EnvLike, kwargs: Any, settings: Any, num_envs: int, mode: str) -> VectorEnv:
    return make(reference, num_envs, backend="sync", autoreset_mode=mode, env_kwargs=kwargs, **settings)


def _random(envs: VectorEnv, rng: np.random.Generator) -> Any:
    return envs.random_action(seed=int(rng.integers(2**31)))


class _Run:
    def __init__(self, pair: Pair, mode: str, seed: int, draw: Actions, build: Callable[[int], Pair]) -> None:
        self._pair, self._mode, self._seed, self._draw, self._build = pair, mode, seed, draw, build
        self._rng = np.random.default_rng(seed)
        self._n = pair.reference.num_envs
        self._calls: list[list[Call]] = [[] for _ in range(self._n)]
        self._step = 0
        self._may_interrupt = True

    def play(self, episodes: int, max_steps: int) -> NativeMatch:
        pair, rng, everyone = self._pair, self._rng, list(range(self._n))
        pair.check_spec()
        ended = np.zeros(self._n, np.int64)
        self._reset([(self._seed + i) % 2**64 for i in everyone], everyone)
        while ended.min() < episodes:
            if self._step == max_steps and not ended.all():
                raise ContractError(
                    f"check_native_env: {self._name}: episodes: expected every env to end one within {max_steps} "
                    f"steps, got none from env {int(ended.argmin())}; pass max_steps or max_episode_steps"
                )
            over = np.flatnonzero(pair.over).tolist() if self._mode == "disabled" else []
            interrupts = self._may_interrupt and rng.random() < _RESET
            if over or interrupts:
                some = np.flatnonzero(rng.random(self._n) < 0.5).tolist() if interrupts else []
                chosen = sorted({*over, *some})
                if chosen:
                    self._may_interrupt &= not interrupts
                    seeds = [None if rng.random() < 0.5 else int(rng.integers(2**63)) for _ in chosen]
                    self._reset(seeds, chosen)
                    continue
            if pair.can_resume and rng.random() < _RESUME:
                pair.resume()
                for calls in self._calls:
                    calls.append(Call("resume"))
            self._take_step()
            ended += pair.ended
            self._may_interrupt |= bool(pair.ended.any())
        return NativeMatch(self._step * self._n, int(ended.sum()), pair.numbers)

    @property
    def _name(self) -> str:
        return str(self._pair.reference.spec.name)

    def _reset(self, seeds: list[int | None], env_ids: list[int]) -> None:
        for seed, i in zip(seeds, env_ids, strict=True):
            self._calls[i].append(Call("reset", seed))
        self._refuse(self._pair.reset(seeds, env_ids), "reset")

    def _take_step(self) -> None:
        actions = self._draw(self._pair.reference, self._rng)
        self._step += 1
        for i, calls in enumerate(self._calls):
            calls.append(Call("step", actions=_row(actions, i)))
        self._refuse(self._pair.step(actions), "step")

    def _refuse(self, found: Unequal | None, call: str) -> None:
        if found is None:
            return
        where = f"{call} {self._step}" if call == "step" else f"a reset after step {self._step}"
        text = f"check_native_env: {self._name}: {found.what}: {_place(found)}, {where} of seed {self._seed}, "
        text += f"autoreset_mode={self._mode!r}: expected {found.expected} (the reference's), got {found.got}"
        if found.at:
            text += "\n" + self._story(found.at[0])
        raise ContractError(text)

    def _story(self, i: int) -> str:
        short = shorten(self._calls[i], self._build)
        if short is None:
            return f"What env {i} was asked leads to no difference in an env alone: envs change one another"
        calls, found = short
        lines = [f"  {call}" for call in calls]
        if len(lines) > _SHOWN:
            lines[_SHOWN // 2 : -_SHOWN // 2] = [f"  … {len(lines) - _SHOWN} calls more …"]
        end = f"{found.what}: {_place(found, alone=True)}: expected {found.expected}, got {found.got}"
        return "\n".join(
            [f"In an env alone, {len(calls)} of {len(self._calls[i])} calls lead there:", *lines, f"  {end}"]
        )


def _row(actions: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i : i + 1].copy(), actions)


def _place(found: Unequal, *, alone: bool = False) -> str:
    parts = [f"env {found.at[0]}"] if found.at and not alone else []
    parts += [] if found.agent is None else [f"agent {found.agent!r}"]
    rest = found.at[1 if found.agent is None else 2 :]
    parts += [f"index {rest[0] if len(rest) == 1 else rest}"] if rest else []
    return ", ".join(parts) or "all of it"
