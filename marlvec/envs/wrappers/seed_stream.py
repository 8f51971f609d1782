"""`SeedStream`: a new seed for every reset, for envs that are not reproducible otherwise; `ClearDeadStepRewards`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np

__all__ = ["ClearDeadStepRewards", "SeedStream"]

_LIMIT = 2**31


class _WrapperForms:
    """Base of a class whose constructor returns an object of the subclass registered for the wrapped env's class.

    A subclass registers itself by ``class Form(Base, LibraryWrapper, of=LibraryEnv)``. Subclasses for PettingZoo are in
    a module that imports PettingZoo, and is loaded when the first env needs it.
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
        for load in (lambda: None, lambda: importlib.import_module("marlvec.envs.wrappers.pettingzoo_wrappers")):
            load()
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
