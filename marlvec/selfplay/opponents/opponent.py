"""`Opponent`: one frozen snapshot of a policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors import ActionPipeline, AgentPipeline, Rows
from marlvec.errors import ArgumentError, CheckpointError, StateError
from marlvec.policies import Policy, PolicyLike, RandomPolicy, as_policy
from marlvec.policies.policy import PolicyOutput, PolicyState
from marlvec.serialization.archive import read_archive
from marlvec.serialization.values import decode

__all__ = ["FrozenPolicy", "MakePolicy", "Opponent"]

MakePolicy = Callable[[], PolicyLike]
"""Builds a policy as it was at first: all that differs between two of a kind is in their state."""


@dataclass(frozen=True)
class Opponent:
    """One policy as it was at one moment; all of it is in files, and does not change.

    Attributes:
        opponent_id: Its id, in its pool and in collectors.
        of: Whose snapshot it is: a learner's policy id; or what it was said to be.
        step: When it was taken, in whatever its pool counts.
        anchor: Whether it never leaves its pool.
        make: Builds a policy of its kind.
        files: Its policy's file; and those of its connectors, where it has some of its own.
    """

    opponent_id: str
    of: str
    step: int
    anchor: bool
    make: MakePolicy
    files: tuple[Path, Path | None, Path | None]

    @property
    def digest(self) -> str:
        """Sha256 over its files: equal where all of it is."""
        whole = hashlib.sha256()
        for file in self.files:
            whole.update(b"-" if file is None else hashlib.sha256(file.read_bytes()).digest())
        return whole.hexdigest()

    def policy_state(self) -> PolicyState:
        """What `Policy.state_dict` gave when it was kept; a copy.

        Returns:
            Numbers, texts, arrays, and dicts, lists and tuples of those.

        Raises:
            CheckpointError: Its file is damaged, or gone.
        """
        return self.read()[0]

    def read(self) -> tuple[PolicyState, int]:
        """That, and the policy's version."""
        found = read_archive(self.files[0])
        try:
            return decode(found["state"]), decode(found["version"])
        except KeyError as error:
            raise CheckpointError(self.files[0], f"holds no opponent: {error!r}") from error

    def policy(self) -> FrozenPolicy:
        """A policy that plays as it did; each call builds another one."""
        return FrozenPolicy(self)

    def agent_connectors(self) -> AgentPipeline:
        """Its connectors with what they had learned, in eval mode; the default ones where it has none of its own."""
        return AgentPipeline.default() if self.files[1] is None else AgentPipeline.load(self.files[1]).eval()

    def action_connectors(self) -> ActionPipeline:
        """Likewise."""
        return ActionPipeline.default() if self.files[2] is None else ActionPipeline.load(self.files[2]).eval()

    def pack(self) -> dict[str, Any]:
        """All of it as plain data, with what is in its files.

        Returns:
            Numbers, texts and arrays of bytes.

        Raises:
            CheckpointError: A file is gone.
        """
        return {
            "id": self.opponent_id,
            "of": self.of,
            "step": self.step,
            "anchor": self.anchor,
            "random": self.make is RandomPolicy,
            "files": [None if file is None else _content(file) for file in self.files],
        }

    def is_packed(self, packed: Mapping[str, Any]) -> bool:
        """Whether this is what `pack` gave, file by file.

        Args:
            packed: That, of this one or another.

        Returns:
            True or False.
        """
        own = self.pack()
        files = [[None if file is None else bytes(file) for file in one["files"]] for one in (own, packed)]
        return files[0] == files[1] and all(packed[name] == own[name] for name in own.keys() - {"files"})


def _content(file: Path) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(file.read_bytes(), np.uint8)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror or error}") from error


class FrozenPolicy(Policy):
    """A policy with the weights that a file holds.

    It is built, and its file read, when it is set up; that needs no more than the file, which is never written to. Its
    random stream comes from the seed that it is set up with.

    Args:
        opponent: Whose.
    """

    def __init__(self, opponent: Opponent) -> None:
        self._opponent = opponent  # as long as it is held, its files stay
        self._inner: Policy | None = None

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Build it.

        Raises:
            CheckpointError: Its file is damaged, or gone.
            ArgumentError: What was built is no policy, or of another kind than the one that was kept.
        """
        name, make = self._opponent.opponent_id, self._opponent.make
        state, version = self._opponent.read()
        inner = as_policy(make(), f"what {make!r} builds for opponent {name!r}")
        inner.setup(observation_space, action_space, seed=seed)
        try:
            inner.load_state_dict(state)
        except ArgumentError as error:
            error.add_note(f"while opponent {name!r} was built by {make!r}; its state is in {self._opponent.files[0]}")
            raise
        self.version = inner.version = version
        self._inner = inner
        super().setup(observation_space, action_space, seed=seed)  # its random stream is not the one it was kept with

    def reseed(self, seed: int) -> None:
        if self._inner is not None:
            self._inner.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self._built().act(rows, explore=explore)

    def probabilities(self, rows: Rows) -> Any:
        """How likely each action is, for n rows: (n, k).

        Raises:
            ArgumentError: A policy of its kind does not say.
        """
        said = getattr(self._built(), "probabilities", None)
        if said is None:
            raise ArgumentError(f"{self!r} says no probabilities: {self._inner!r} has no method probabilities(rows)")
        return said(rows)

    def state_dict(self) -> PolicyState:
        return self._built().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._built().load_state_dict(state)

    def _built(self) -> Policy:
        if self._inner is None:
            raise StateError(f"{self!r} does not know its spaces: call setup() first, or use a Collector")
        return self._inner

    def __repr__(self) -> str:
        return f"FrozenPolicy({self._opponent.opponent_id!r})"
