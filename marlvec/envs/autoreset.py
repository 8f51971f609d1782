"""What happens when an env's episode ends: the three autoreset modes, and what follows from each."""

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
    """The step after that begins the next one, and ignores its action."""
    DISABLED = "disabled"
    """The caller begins it, by `reset`."""

    @classmethod
    def named(cls, word: Any) -> AutoresetMode | None:
        """The mode that another library's word means; None if it means none.

        Args:
            word: Text, or Gymnasium's enum: ``"same_step"``, ``"SameStep"``, ``"same-step"``.
        """
        plain = _letters(getattr(word, "value", word))
        return next((mode for mode in cls if _letters(mode.value) == plain), None)

    @classmethod
    def declared_by(cls, metadata: Mapping[str, Any], name: str) -> AutoresetMode | None:
        """The mode that an env's or a pool's metadata declare; None if they say nothing of it.

        Args:
            metadata: The metadata.
            name: Whose they are, for the message.

        Raises:
            ContractError: They name something that is no mode.
        """
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
    """What follows from an autoreset mode. All code asks these, and compares no names.

    Attributes:
        mode: The mode.
        begins_at_once: The step that ends an episode begins the next one.
        begins_on_next_step: The next step of that env begins it, whatever its action.
        caller_begins: Nothing begins it but the caller's `reset`.
    """

    mode: AutoresetMode

    @classmethod
    def of(cls, mode: str) -> AutoresetRules:
        """The rules of the mode of that name."""
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
        """Make sure that an env can serve this mode.

        Args:
            name: The env's name.
            resets_itself: Whether its step that ends an episode begins the next one.
            keeps_state: Whether the global state in which an episode ends is wanted.

        Raises:
            ArgumentError: It cannot.
        """
        if not resets_itself:
            return
        if not self.begins_at_once:
            raise ArgumentError(
                f"{name} resets itself in the step that ends its episode: expected autoreset_mode='same_step', "
                f"got {self.mode.value!r}"
            )
        if keeps_state:
            raise ArgumentError(
                f"state=True, and {name} resets itself: the state in which an episode ended is gone by then"
            )

    def check_pool(self, name: str, own: AutoresetMode, *, steps_all: bool) -> None:
        """Make sure that a pool of envs can serve this mode.

        Args:
            name: The pool's name.
            own: What it does by itself.
            steps_all: Whether it steps all its envs at once or none.

        Raises:
            ArgumentError: It cannot.
        """
        if own is self.mode:
            return
        wanted = f"autoreset_mode={self.mode.value!r}: {name}"
        if own is AutoresetMode.SAME_STEP:
            raise ArgumentError(f"{wanted} begins the next episode in the same step by itself; take 'same_step'")
        if steps_all and not (own is AutoresetMode.DISABLED and self.begins_at_once):
            raise ArgumentError(f"{wanted} steps all its envs at once, and its own mode is {own.value!r}; take that")

    def next_episode_request(self, own: AutoresetMode) -> Literal["reset", "step"] | None:
        """What a pool is asked for so that an env's next episode begins, when this mode says that it does.

        Args:
            own: What the pool does by itself.

        Returns:
            ``"step"`` where a step of an ended env begins it, whatever the action; None where nothing is asked:
            it has begun by itself, or the caller begins it.
        """
        if self.caller_begins or own is AutoresetMode.SAME_STEP:
            return None
        return "step" if own is AutoresetMode.NEXT_STEP else "reset"


def _letters(word: Any) -> str:
    return str(word).lower().replace("_", "").replace("-", "")
