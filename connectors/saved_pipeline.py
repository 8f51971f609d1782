"""The content of a pipeline's file: its config and its learned state."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from gymnasium.spaces import Space

from marlvec.connectors.connector import State
from marlvec.errors import CheckpointError, RegistryError
from marlvec.serialization.archive import FilePath, read_archive
from marlvec.serialization.values import Config, decode, encode, outline
from marlvec.spaces import describe_difference

__all__ = ["SavedPipeline", "explained", "is_packed"]


_SAVE_AGAIN = (
    "an earlier save_policy() wrote it: load this state (load_policy) into the connectors that it is of, and "
    "save_policy() with them again"
)


def is_packed(found: Any) -> TypeGuard[Config]:
    """Return whether data are a whole pipeline from `SavedPipeline.pack`, not just its state."""
    return isinstance(found, dict) and found.keys() >= {"config", "state", "training"}


@contextmanager
def explained(path: FilePath) -> Iterator[None]:
    """Convert errors of building a pipeline from a valid file (other versions, for one) to `CheckpointError`."""
    try:
        yield
    except (CheckpointError, RegistryError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(path, f"cannot be built here: {error!r:.500}") from error


@dataclass(frozen=True, slots=True)
class SavedPipeline:
    """Complete content of a pipeline at one moment; spaces are None if it is unbound."""

    config: Config  # from `Connector.to_config`
    state: State
    training: list[bool]  # mode of the pipeline and each piece, outer pieces first
    space: Space[Any] | None
    agents: tuple[str, ...]
    action_space: Space[Any] | None

    def pack(self) -> Config:
        """Return the content as data for `write_archive`."""
        parts = {
            "state": encode(self.state, "the state"),
            "training": self.training,
            "space": encode(self.space, "the space"),
            "agents": list(self.agents),
            "action_space": encode(self.action_space, "the action space"),
        }
        return {"config": self.config, **parts}

    @classmethod
    def read(cls, path: FilePath, section: str) -> Self:
        """Read a file of `Pipeline.save`, or the section of a file of `save_policy`."""
        found = read_archive(path)
        if "config" not in found and section in found:
            found = found[section]
            if not is_packed(found):
                raise CheckpointError(path, f"holds a state of {section} without their configuration; {_SAVE_AGAIN}")
        with explained(path):
            decoded = {key: decode(found[key]) for key in ("state", "space", "action_space")}
            return cls(config=found["config"], training=found["training"], agents=tuple(found["agents"]), **decoded)

    def check_same(self, own: SavedPipeline, path: FilePath) -> None:
        """Raise CheckpointError, with the difference, if this content of a file does not fit an existing pipeline."""
        if own.space is None and self.space is not None:
            raise CheckpointError(
                path, "is of a bound pipeline, this one is not bound: call bind() first, or reset() of its Collector"
            )
        if own.agents != self.agents:
            raise CheckpointError(path, f"expected the agents {list(own.agents)}, got {list(self.agents)}")
        for what in ("space", "action_space"):
            mine, other = getattr(own, what), getattr(self, what)
            if mine is None or other is None:
                difference = None if mine is other else f"expected {mine}, got {other}"
            else:
                difference = describe_difference(mine, other)
            if difference is not None:
                raise CheckpointError(path, f"is of another {what.replace('_', ' ')}: {difference}")
        lines = list(difflib.unified_diff(outline(own.config), outline(self.config), "here", "file", n=2, lineterm=""))
        if lines:
            raise CheckpointError(path, "\n".join(["is of another pipeline:", *lines]))
