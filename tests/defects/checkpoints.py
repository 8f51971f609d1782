"""Defects of checkpoints."""

from __future__ import annotations

from typing import Any

from marlvec.policies import checkpoint
from tests.defects.registry import Patch, found_by

SAVE = "tests/checkpoints/test_checkpoint.py"


@found_by(SAVE)
def checkpoint_learner_not_restored(patch: Patch) -> None:
    """The learner's part of a checkpoint is saved as it was at first."""
    states: dict[int, Any] = {}
    state_of = checkpoint._without_tensors

    def at_first(value: Any, place: list[Any], tensors: list[list[Any]]) -> Any:
        if place == ["learner"]:
            value = states.setdefault(0, value)
        return state_of(value, place, tensors)

    patch.setattr(checkpoint, "_without_tensors", at_first)


@found_by(SAVE)
def checkpoint_best_is_the_last(patch: Patch) -> None:
    """The best checkpoint is replaced by every new one."""
    patch.setattr(checkpoint, "_score_of", lambda best: -float("inf"))


@found_by(f"{SAVE}::test_a_training_of_another_env_is_replaced_only_with_overwrite")
def checkpoint_of_another_env_replaced(patch: Patch) -> None:
    """The folder of a training of another env is taken for one's own."""
    patch.setattr(checkpoint, "_is_of_another_env", lambda *_, **__: False)


@found_by(SAVE)
def checkpoint_older_ones_in_another_order(patch: Patch) -> None:
    """Of the checkpoints before the last the oldest is found first."""
    kept = checkpoint._kept

    patch.setattr(checkpoint, "_kept", lambda last: kept(last)[::-1])
