"""The content of a pipeline's file: its config and its learned state."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from gymnasium.spaces import Space

from marlvec.connectors.connector import State
from marlvec.errors import CheckpointError, RegistryError
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import Config, decode, encode, outline
from marlvec.spaces import describe_difference

__all__ = ["SavedPipeline", "explained"]


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

    def write(self, path: FilePath) -> None:
        """Write the content to a file, or leave an existing file unchanged."""
        parts = {
            "state": encode(self.state, "the state"),
            "training": self.training,
            "space": encode(self.space, "the space"),
            "agents": list(self.agents),
            "action_space": encode(self.action_space, "the action space"),
        }
        write_archive(path, {"config": self.config, **parts})

    @classmethod
    def read(cls, path: FilePath) -> Self:
        found = read_archive(path)
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
