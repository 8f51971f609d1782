"""`save_state` and `load_state`: states of envs in files of plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlvec.errors import ArgumentError, CheckpointError
from marlvec.serialization.archive import FilePath
from marlvec.serialization.saved_value import read_value, write_value
from marlvec.vector.data.saved_states import FORMATS, is_state

__all__ = ["load_state", "save_state"]


def save_state(path: FilePath, state: Mapping[str, Any]) -> None:
    """Write the state of envs to a file. The write is atomic: the file is complete or unchanged.

        marlvec.save_state("before.npz", envs.get_state([3]))
        envs.set_state(marlvec.load_state("before.npz"))

    ``marlvec record ENV --from before.npz -o after.mp4`` records the steps that follow it.

    Args:
        path: The file, by convention ``.npz``; an old one is replaced.
        state: A state from `VectorEnv.get_state`. For a collector, use `Collector.save`.

    Raises:
        ArgumentError: ``state`` is something else.
        OSError: The file cannot be written; an old file is unchanged.
    """
    if not is_state(state):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(
            f"save_state(): expected a state from envs.get_state(), got {got!r:.200}; collectors and trainings are "
            f"saved by collector.save(path) and save_checkpoint(folder)"
        )
    write_value(path, "envs", dict(state), "the state")


def load_state(path: FilePath) -> dict[str, Any]:
    """Read a file that `save_state` wrote; no code in it is executed.

    Args:
        path: The file.

    Returns:
        The state, for `VectorEnv.set_state`, which checks that the envs fit.

    Raises:
        CheckpointError: The file does not exist, is damaged, of another version, or holds something else.
    """
    state = read_value(path, "envs", "state of envs")
    read = FORMATS.get(str(state["kind"])) if is_state(state) else FORMATS["env"]
    if not is_state(state) or state["format"] != read:
        what = state.get("format") if isinstance(state, Mapping) else state
        raise CheckpointError(path, f"holds a state of envs of the format {what!r:.50}; this version reads {read}")
    return dict(state)
