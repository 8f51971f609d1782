"""`SeedStream`: a new seed for every reset of envs that would not repeat themselves; `ClearDeadStepRewards`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

__all__ = ["ClearDeadStepRewards", "SeedStream"]

_LIMIT = 2**31


class SeedStream:
    """Makes an env as repeatable as Gymnasium's rules want it: one seed settles this episode and all that follow.

    For envs that keep a generator of their own: those that go back to the system's entropy at a reset without a seed,
    so that only the first episode can be repeated, and those that take no seed beyond a C ``int``. What is made is a
    wrapper of the env's own kind: PettingZoo's for its AEC and Parallel envs, else Gymnasium's::

        marlvec.make(lambda: SeedStream(MyEnv()), num_envs=16)

    Args:
        env: A PettingZoo AEC or Parallel env, or a Gymnasium env (RLlib's derive from that, too).
        set_seed: How the env gets its seed where its ``reset`` takes none, or takes no notice of it:
            ``lambda env, seed: env.generator.seed(seed)``, say. Called before each reset with the env as it was given.
            None: ``reset(seed=…)``.

    Raises:
        TypeError: The env is none of these.
    """

    _stream: np.random.Generator
    _set_seed: Callable[[Any, int], Any] | None

    def __new__(cls, env: Any = None, set_seed: Any = None) -> Any:
        return object.__new__(_form_of(env) if cls is SeedStream else cls)

    def __init__(self, env: Any, set_seed: Callable[[Any, int], Any] | None = None) -> None:
        super().__init__(env)  # type: ignore[call-arg]  # the other base is a library's wrapper
        self._stream = np.random.default_rng()
        self._set_seed = set_seed

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode.

        Args:
            seed: Given to the env as it is if it is below 2**31, else folded to 31 bits. None: the next one of the
                stream that the last seed began.
            options: For the env.

        Returns:
            What the env returns.
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


class _GymnasiumSeedStream(SeedStream, gymnasium.Wrapper[Any, Any, Any, Any]):
    pass


def _form_of(env: Any) -> type[SeedStream]:
    if isinstance(env, gymnasium.Env):
        return _GymnasiumSeedStream
    # Imports PettingZoo, which not everyone needs.
    from marlvec.envs.wrappers.pettingzoo_wrappers import SEED_STREAMS

    for kind, form in SEED_STREAMS.items():
        if isinstance(env, kind):
            return form
    raise TypeError(
        f"SeedStream: expected a PettingZoo AEC or Parallel env or a Gymnasium env, got {type(env).__name__}"
    )


class ClearDeadStepRewards:
    """Clears an AEC env's rewards before the dead step of an agent, as PettingZoo's own envs do.

    For envs that leave them as they are, so that a loop over ``agent_iter()`` and ``last()`` counts them twice: with
    shimmy's ``OpenSpielCompatibilityV0`` the second player's count twice, the third one's three times, and so on. What
    is made is one of PettingZoo's wrappers.

    Args:
        env: A PettingZoo AEC env.
    """

    def __new__(cls, env: Any = None) -> Any:
        from marlvec.envs.wrappers.pettingzoo_wrappers import AECClearDeadStepRewards

        return object.__new__(AECClearDeadStepRewards)

    def __init__(self, env: Any) -> None:
        super().__init__(env)  # type: ignore[call-arg]  # the other base is PettingZoo's wrapper

    def step(self, action: Any) -> None:
        """Let the selected agent move, or take its dead step.

        Args:
            action: For the env; None for the dead step.
        """
        wrapper: Any = self
        inner = wrapper.env.unwrapped
        if action is None:
            inner.rewards = dict.fromkeys(inner.rewards, 0.0)
        super().step(action)  # type: ignore[misc]  # likewise
