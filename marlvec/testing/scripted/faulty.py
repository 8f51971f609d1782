"""Scripted envs that are slow, raise, hang, or end their process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal

from marlvec.testing.scripted.parallel import CounterEnv

__all__ = ["ExitingEnv", "FaultyEnv", "HangingEnv", "Operation", "RaisingEnv", "SlowEnv"]

Operation = Literal["init", "reset", "step", "close"]


class FaultyEnv(CounterEnv):
    """A `CounterEnv` that fails before one of its operations; subclasses define how, in `strike`.

    Args:
        length: See `CounterEnv`.
        where: The operation.
        at: Number of the call that fails, from 0 over the env's life; None: every call.
        only_env: Index of the env that fails; None: all.
        only_incarnation: The incarnation that fails; None: all. Needs ``marks``.
        options: See `CounterEnv`.
    """

    def __init__(
        self,
        length: int | list[int] = 5,
        *,
        where: Operation = "step",
        at: int | None = 0,
        only_env: int | None = None,
        only_incarnation: int | None = None,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(length, env_index=env_index, **options)
        self._where, self._at, self._only_env, self._only_incarnation = where, at, only_env, only_incarnation
        self._calls = 0
        self._strike_at("init")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._strike_at("reset")
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        self._strike_at("step")
        return super().step(actions)

    def close(self) -> None:
        self._strike_at("close")
        super().close()

    def strike(self) -> None:
        """Fail in this env's way."""

    def _strike_at(self, operation: Operation) -> None:
        if operation != self._where:
            return
        call, self._calls = self._calls, self._calls + 1
        if self._at is not None and call != self._at:
            return
        if self._only_env is not None and self._only_env != self.world.env_index:
            return
        if self._only_incarnation is not None and self._only_incarnation != self.world.incarnation:
            return
        self.strike()


class RaisingEnv(FaultyEnv):
    """An env that raises.

    Args:
        error: Makes the exception.
        options: See `FaultyEnv`.
    """

    def __init__(
        self,
        *args: Any,
        error: Callable[[], BaseException] = lambda: ValueError("scripted failure"),
        env_index: int = 0,
        **options: Any,
    ) -> None:
        self._error = error
        super().__init__(*args, env_index=env_index, **options)

    def strike(self) -> None:
        raise self._error()


class SlowEnv(FaultyEnv):
    """An env that sleeps, in every step unless ``at`` is given.

    Args:
        seconds: Seconds to sleep.
        options: See `FaultyEnv`.
    """

    def __init__(
        self, *args: Any, seconds: float = 0.01, at: int | None = None, env_index: int = 0, **options: Any
    ) -> None:
        self._seconds = seconds
        super().__init__(*args, at=at, env_index=env_index, **options)

    def strike(self) -> None:
        time.sleep(self._seconds)


class HangingEnv(FaultyEnv):
    """An env that never returns."""

    def strike(self) -> None:
        while True:
            time.sleep(3600.0)


class ExitingEnv(FaultyEnv):
    """An env that ends its process. Never run it in a process that you need.

    Args:
        code: Exit code, given to ``os._exit``.
        signal: Signal number to end by instead.
        options: See `FaultyEnv`.
    """

    def __init__(
        self, *args: Any, code: int = 3, signal: int | None = None, env_index: int = 0, **options: Any
    ) -> None:
        self._code, self._signal = code, signal
        super().__init__(*args, env_index=env_index, **options)

    def strike(self) -> None:
        if self._signal is None:
            os._exit(self._code)
        os.kill(os.getpid(), self._signal)
