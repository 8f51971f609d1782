"""Wrappers of a `MultiAgentEnv`: their base, padding of spaces, seeds for each reset, limits of episodes."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.envs.adapters.base import Adapter
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import EnvSpec, Info, refuse_masks
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces.action_masks import count_choices, own_choices
from marlvec.spaces.padding import crops_of, pad_actions, pad_observations


class EnvWrapper(MultiAgentEnv):
    """Forwards all calls to another env; ``unwrapped`` is still the user's env."""

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.name = env.name
        self.agents = env.agents
        self.observation_spaces = env.observation_spaces
        self.action_spaces = env.action_spaces
        self.mask_sizes = env.mask_sizes
        self.state_space = env.state_space
        self.metadata = env.metadata
        self.resets_itself = env.resets_itself

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        return self.env.reset(slot, seed=seed, options=options)

    def step(self, slot: Slot) -> Info | None:
        return self.env.step(slot)

    def cut_short(self, slot: Slot) -> None:
        self.env.cut_short(slot)

    def write_state(self, slot: Slot) -> None:
        self.env.write_state(slot)

    def spec(self) -> EnvSpec:
        return self.env.spec()

    def state_obstacle(self) -> str | None:
        return super().state_obstacle() or self.env.state_obstacle()

    def close(self) -> None:
        self.env.close()


def adapter_in(env: MultiAgentEnv) -> Adapter | None:
    """Return the adapter inside of marlvec's wrappers; None if the env has none."""
    while isinstance(env, EnvWrapper):
        env = env.env
    return env if isinstance(env, Adapter) else None


BoolArray = NDArray[np.bool_]


class PaddedEnv(EnvWrapper):
    """An env whose agents have one observation space and one action space, each large enough for all of them.

    Smaller observations are padded with zeros. Discrete or MultiDiscrete action spaces of different sizes get an action
    mask, which forbids actions that an agent does not have, besides those that its own mask forbids. From an action in
    a Box or MultiBinary an agent gets its own first part. The env itself still has its own spaces, and writes straight
    into the padded rows. `ContractError` names a leaf for which there is no common space.
    """

    def __init__(self, env: MultiAgentEnv) -> None:
        super().__init__(env)
        spec = env.spec()
        agents = spec.agents
        padded = padded_spec(spec)
        self._own, self._padded = spec, padded
        self.observation_spaces = padded.observation_spaces
        self.action_spaces = padded.action_spaces
        self.mask_sizes = padded.mask_sizes
        self._obs_crops = [crops_of(own, self.observation_spaces[0]) for own in spec.observation_spaces]
        self._action_crops = [crops_of(own, self.action_spaces[0]) for own in spec.action_spaces]
        # The spec of the inner slot: padded spaces, so that leaves have the same order, and the env's own masks.
        self._shown = EnvSpec(self.name, agents, self.observation_spaces, self.action_spaces, spec.mask_sizes)
        self._outer: Slot | None = None
        self._inner: Slot | None = None
        self._scattered: list[tuple[BoolArray, BoolArray, BoolArray]] = []

    def spec(self) -> EnvSpec:
        return self._padded

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        inner = self._enter(slot)
        for _, _, mask in self._scattered:
            mask[...] = True
        return self._leave(slot, inner, self.env.reset(inner, seed=seed, options=options))

    def step(self, slot: Slot) -> Info | None:
        inner = self._enter(slot)
        return self._leave(slot, inner, self.env.step(inner))

    def cut_short(self, slot: Slot) -> None:
        inner = self._enter(slot)
        self.env.cut_short(inner)
        self._leave(slot, inner, None)

    def write_state(self, slot: Slot) -> None:
        self.env.write_state(self._enter(slot))

    def get_state(self) -> Any:
        """Return the env's own state; this wrapper's state is in the slot."""
        return self.env.get_state()

    def set_state(self, state: Any) -> None:
        self._outer = self._inner = None  # so that scattered masks are read from the row again
        self.env.set_state(state)

    def close(self) -> None:
        """Close the env and drop references to the buffers."""
        self._outer = self._inner = None
        self._scattered = []
        super().close()

    def _enter(self, slot: Slot) -> Slot:
        if self._inner is None or slot is not self._outer:
            self._outer, self._inner = slot, self._narrow(slot)
        self._inner.done = slot.done
        return self._inner

    def _leave(self, slot: Slot, inner: Slot, info: Info | None) -> Info | None:
        """Copy back everything that the inner slot does not share with the row."""
        slot.done, slot.begun, slot.final_info = inner.done, inner.begun, inner.final_info
        inner.begun, inner.final_info = False, None
        for row, places, mask in self._scattered:
            row[places] = mask
        if info:
            refuse_masks(self._shown, info)  # the padded spec has masks
        return info

    def _narrow(self, slot: Slot) -> Slot:
        masks: list[BoolArray | None] = []
        self._scattered = []
        for a, (own, padded) in enumerate(zip(self._own.action_spaces, self.action_spaces, strict=True)):
            row = slot.action_mask[a]
            size = count_choices(own)
            if row is None or own == padded or size is None:
                masks.append(row)
                continue
            places = own_choices(own, padded, stand_ins=False)
            if places[:size].all():
                masks.append(row[:size])
            else:  # a MultiDiscrete's dimensions: its choices are not contiguous in the padded mask
                mask = row[places].copy()
                masks.append(mask)
                self._scattered.append((row, places, mask))
        return slot.narrowed(self._shown, obs=self._obs_crops, actions=self._action_crops, action_mask=masks)


def padded_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec of an env whose agents are padded to one group."""
    agents = spec.agents
    return replace(
        spec,
        observation_spaces=(pad_observations(spec.observation_spaces, agents),) * len(agents),
        action_spaces=(pad_actions(spec.action_spaces, agents),) * len(agents),
        mask_sizes=(_mask_size(spec),) * len(agents),
        original_observation_spaces=spec.observation_spaces,
        original_action_spaces=spec.action_spaces,
    )


def _mask_size(spec: EnvSpec) -> int | None:
    """Return the mask length of all agents after padding, or None."""
    padded = pad_actions(spec.action_spaces, spec.agents)
    if all(own == padded for own in spec.action_spaces):
        sizes = set(spec.mask_sizes) - {None}
        if len(sizes) > 1:
            raise ContractError(f"pad=True: {spec.name} declares action masks of different sizes, {spec.mask_sizes}")
        return sizes.pop() if sizes else None
    for agent, own, size in zip(spec.agents, spec.action_spaces, spec.mask_sizes, strict=True):
        if size not in (None, count_choices(own)):
            raise ContractError(
                f"pad=True: agent {agent!r} declares an action mask of {size} entries over {own}, "
                f"expected {count_choices(own)}"
            )
    return count_choices(padded)


_LIMIT = 2**31


class _WrapperForms:
    """Base of a class whose constructor returns an object of the subclass registered for the wrapped env's class.

    A subclass registers itself by ``class Form(Base, LibraryWrapper, of=LibraryEnv)``. Subclasses for PettingZoo are
    made when the first env needs them, since they import PettingZoo.
    """

    _forms: ClassVar[dict[type, type]]
    _wraps: ClassVar[str]

    def __init_subclass__(cls, *, of: type | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if of is not None:
            cls._forms[of] = cls

    def __new__(cls, env: Any = None, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls._form_of(env) if "_forms" in vars(cls) else cls)

    @classmethod
    def _form_of(cls, env: Any) -> type:
        if not any(isinstance(env, kind) for kind in cls._forms):
            _pettingzoo_forms()
        for kind, form in cls._forms.items():
            if isinstance(env, kind):
                return form
        raise TypeError(f"{cls.__name__}: expected {cls._wraps}, got {type(env).__name__}")


class SeedStream(_WrapperForms):
    """Makes an env reproducible by Gymnasium's rules: one seed determines this episode and all that follow.

    For envs that draw from the system's entropy after a reset without a seed, so that only the first episode can be
    reproduced, and for envs whose seed must fit a C ``int``. The result is a wrapper of the env's own API: PettingZoo's
    for AEC and Parallel envs, else Gymnasium's::

        marlvec.make(lambda: SeedStream(MyEnv()), num_envs=16)

    Args:
        env: A PettingZoo AEC or Parallel env, or a Gymnasium env (RLlib's derive from that, too).
        set_seed: Seeds an env whose ``reset`` takes no seed, or ignores it, for example
            ``lambda env, seed: env.generator.seed(seed)``. Called before each reset with ``env``. None: use
            ``reset(seed=…)``.

    Raises:
        TypeError: The env has none of these APIs.
    """

    _forms: ClassVar[dict[type, type]] = {}
    _wraps = "a PettingZoo AEC or Parallel env or a Gymnasium env"
    _stream: np.random.Generator
    _set_seed: Callable[[Any, int], Any] | None

    def __init__(self, env: Any, set_seed: Callable[[Any, int], Any] | None = None) -> None:
        super().__init__(env)  # type: ignore[call-arg]  # the other base is a library's wrapper
        self._stream = np.random.default_rng()
        self._set_seed = set_seed

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode.

        Args:
            seed: Passed to the env unchanged if it is below 2**31, else reduced to 31 bits. None: the next seed from
                the stream that the last seed began.
            options: Passed to the env.

        Returns:
            The result of the env's ``reset``.
        """
        if seed is not None:
            self._stream = np.random.default_rng(seed)
            small = seed if seed < _LIMIT else int(np.random.SeedSequence(seed).generate_state(1)[0]) % _LIMIT
        else:
            small = int(self._stream.integers(_LIMIT))
        inner: Any = super()
        if self._set_seed is None:
            return inner.reset(seed=small, options=options)
        env: Any = self
        self._set_seed(env.env, small)
        return env.env.reset() if options is None else env.env.reset(options=options)


class _GymnasiumSeedStream(SeedStream, gymnasium.Wrapper[Any, Any, Any, Any], of=gymnasium.Env):
    pass


class ClearDeadStepRewards(_WrapperForms):
    """Clears an AEC env's rewards before the dead step of an agent, as PettingZoo's own envs do.

    For envs that do not clear them, so that a loop over ``agent_iter()`` and ``last()`` counts them several times: with
    shimmy's ``OpenSpielCompatibilityV0`` the second player's twice, the third player's three times, and so on. The
    result is a PettingZoo wrapper.

    Args:
        env: A PettingZoo AEC env.

    Raises:
        TypeError: The env is not an AEC env.
    """

    _forms: ClassVar[dict[type, type]] = {}
    _wraps = "a PettingZoo AEC env"

    def __init__(self, env: Any) -> None:
        super().__init__(env)  # type: ignore[call-arg]  # the other base is PettingZoo's wrapper

    def step(self, action: Any) -> None:
        """Take the selected agent's move, or its dead step.

        Args:
            action: The action; None for the dead step.
        """
        wrapper: Any = self
        inner = wrapper.env.unwrapped
        if action is None:
            inner.rewards = dict.fromkeys(inner.rewards, 0.0)
        super().step(action)  # type: ignore[misc]  # of PettingZoo's wrapper


_FORMS = ("AECSeedStream", "ParallelSeedStream", "AECClearDeadStepRewards")


def _pettingzoo_forms() -> None:
    """Make the wrappers that derive from PettingZoo's, once, under names of this module, by which pickle finds them."""
    if _FORMS[0] in globals():
        return
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.utils import BaseParallelWrapper, BaseWrapper

    bases: tuple[tuple[type, ...], ...] = (
        (SeedStream, BaseWrapper),
        (SeedStream, BaseParallelWrapper),
        (ClearDeadStepRewards, BaseWrapper),
    )
    for name, form_bases, kind in zip(_FORMS, bases, (AECEnv, ParallelEnv, AECEnv), strict=True):
        form = types.new_class(name, form_bases, {"of": kind})
        form.__module__, form.__doc__ = __name__, f"`{form_bases[0].__name__}` for PettingZoo's `{kind.__name__}`."
        globals()[name] = form


def __getattr__(name: str) -> Any:
    if name not in _FORMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _pettingzoo_forms()
    return globals()[name]


def check_limit(max_episode_steps: Any) -> int:
    """Return a number of steps as an int, at least 1."""
    number = whole_number(max_episode_steps)
    if number is None or number < 1:
        raise ArgumentError(f"max_episode_steps: expected an int of at least 1, got {max_episode_steps!r}")
    return number


class TimeLimit(EnvWrapper):
    """Truncates every agent that is still alive after ``max_episode_steps`` steps of the env.

    An agent that ends by itself in that step keeps its own flags; an agent that ended before does not change. In a
    turn-based env one move is one step.
    """

    def __init__(self, env: MultiAgentEnv, max_episode_steps: int) -> None:
        super().__init__(env)
        self._limit = check_limit(max_episode_steps)
        self._steps = 0

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._steps = 0
        return self.env.reset(slot, seed=seed, options=options)

    def step(self, slot: Slot) -> Info | None:
        info = self.env.step(slot)
        self._steps += 1
        if slot.begun:
            self._steps = 0
        elif self._steps >= self._limit and not slot.done:
            self.env.cut_short(slot)
        return info

    def get_state(self) -> dict[str, Any]:
        return {"steps": self._steps, "env": self.env.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.keys() != {"steps", "env"}:
            raise ArgumentError(f"{self.name}: state has no step count: it was saved without max_episode_steps")
        self._steps = state["steps"]
        self.env.set_state(state["env"])
