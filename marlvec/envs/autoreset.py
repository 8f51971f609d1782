"""The three autoreset modes, and their rules for the end of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from marlvec.errors import ArgumentError, ContractError

__all__ = ["AutoresetMode", "AutoresetRules"]


class AutoresetMode(StrEnum):
    """Gymnasium's three modes, by marlvec's names; equal to the plain strings."""

    SAME_STEP = "same_step"
    """The step that ends an episode begins the next one, and returns its first observation."""
    NEXT_STEP = "next_step"
    """The step after the end begins the next episode, and ignores its action."""
    DISABLED = "disabled"
    """The caller begins the next episode, by `reset`."""

    @classmethod
    def named(cls, word: Any) -> AutoresetMode | None:
        """Return the mode for text or Gymnasium's enum, ``"same_step"``, ``"SameStep"``, ``"same-step"``, or None."""
        plain = _letters(getattr(word, "value", word))
        return next((mode for mode in cls if _letters(mode.value) == plain), None)

    @classmethod
    def declared_by(cls, metadata: Mapping[str, Any], name: str) -> AutoresetMode | None:
        """Return the mode that the metadata of an env or a pool declare; None if they declare none."""
        word = metadata.get("autoreset_mode")
        if word is None:
            return None
        if (mode := cls.named(word)) is None:
            raise ContractError(
                f"{name}: metadata: autoreset_mode is {word!r}: expected {' or '.join(repr(m.value) for m in cls)}"
            )
        return mode


@dataclass(frozen=True)
class AutoresetRules:
    """The rules of an autoreset mode. Other code uses these flags instead of comparing names."""

    mode: AutoresetMode

    @classmethod
    def of(cls, mode: str) -> AutoresetRules:
        """Return the rules of the mode with that name."""
        return cls(AutoresetMode(mode))

    @cached_property
    def begins_at_once(self) -> bool:
        return self.mode is AutoresetMode.SAME_STEP

    @cached_property
    def begins_on_next_step(self) -> bool:
        return self.mode is AutoresetMode.NEXT_STEP

    @cached_property
    def caller_begins(self) -> bool:
        return self.mode is AutoresetMode.DISABLED

    def check_env(self, name: str, *, resets_itself: bool, keeps_state: bool) -> None:
        """Raise if an env does not support this mode. `keeps_state`: the global state at the end is requested."""
        if not resets_itself:
            return
        if not self.begins_at_once:
            raise ArgumentError(
                f"{name} resets itself in the step that ends its episode: expected autoreset_mode='same_step', "
                f"got {self.mode.value!r}"
            )
        if keeps_state:
            raise ArgumentError(
                f"state=True: {name} resets itself, so the state at the end of an episode cannot be read"
            )

    def check_pool(self, name: str, own: AutoresetMode, *, steps_all: bool) -> None:
        """Raise if a pool does not support this mode. `steps_all`: it can only step all its envs at once."""
        if own is self.mode:
            return
        wanted = f"autoreset_mode={self.mode.value!r}: {name}"
        if own is AutoresetMode.SAME_STEP:
            raise ArgumentError(f"{wanted} begins the next episode in the same step by itself; take 'same_step'")
        if steps_all and not (own is AutoresetMode.DISABLED and self.begins_at_once):
            raise ArgumentError(f"{wanted} steps all its envs at once, and its own mode is {own.value!r}; take that")

    def next_episode_request(self, own: AutoresetMode) -> Literal["reset", "step"] | None:
        """Return the request that begins an env's next episode in a pool of the mode `own`, when this mode begins one.

        ``"step"`` if a step of an ended env begins it, whatever the action. None: no request is needed, since the pool
        has begun it by itself, or the caller begins it.
        """
        if self.caller_begins or own is AutoresetMode.SAME_STEP:
            return None
        return "step" if own is AutoresetMode.NEXT_STEP else "reset"


def _letters(word: Any) -> str:
    return str(word).lower().replace("_", "").replace("-", "")
