"""`Opponent`: one frozen snapshot of a policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors import ActionPipeline, AgentPipeline, Rows
from marlvec.errors import ArgumentError, CheckpointError, StateError
from marlvec.policies import Policy, PolicyLike, RandomPolicy, as_policy, load_policy
from marlvec.policies.policy import PolicyOutput, PolicyState
from marlvec.serialization.archive import FilePath, read_archive
from marlvec.serialization.values import decode

__all__ = ["FrozenPolicy", "MakePolicy", "Opponent"]

MakePolicy = Callable[[], PolicyLike]
"""Builds a policy in its initial form: two policies of a kind differ only in their state."""


@dataclass(frozen=True)
class Opponent:
    """A frozen snapshot of a policy, stored in files.

    Attributes:
        opponent_id: Its id, in its pool and in collectors.
        of: Id of the learner it is a snapshot of, or a name given to it.
        step: When it was taken, in steps of its pool.
        anchor: Whether it never leaves its pool.
        make: Builds such a policy.
        files: Files of its policy, agent connectors and action connectors; None: default connectors.
    """

    opponent_id: str
    of: str
    step: int
    anchor: bool
    make: MakePolicy
    files: tuple[Path, Path | None, Path | None]

    @classmethod
    def from_file(cls, path: FilePath, make: MakePolicy, *, opponent_id: str | None = None) -> Self:
        """Make an opponent, in no pool, of a file of `marlvec.policies.save_policy`; executes nothing from it.

            best = Opponent.from_file("best.npz", make_net)
            evaluate_match({"best": best, "random": RandomPolicy()}, "connect_four", 400)

        Args:
            path: The file. It is read again when the policy and its connectors are built.
            make: Builds the policy in its initial form.
            opponent_id: Its id; None: the file's name without its ending.

        Returns:
            The opponent, with the connectors in the file.

        Raises:
            CheckpointError: The file is missing or damaged, or holds no policy.
            ArgumentError: ``make`` is not a function.
        """
        if not callable(make):
            raise ArgumentError(f"make must be a function that builds a policy, got {make!r:.200}")
        file, found = Path(path), load_policy(path)
        chains = (found.agent_connectors, found.action_connectors)
        agent, action = (None if state is None else file for state in chains)
        name = file.stem if opponent_id is None else opponent_id
        return cls(name, name, 0, False, make, (file, agent, action))

    @property
    def digest(self) -> str:
        """SHA-256 over its files: equal if their contents are."""
        combined = hashlib.sha256()
        for file in self.files:
            combined.update(b"-" if file is None else hashlib.sha256(file.read_bytes()).digest())
        return combined.hexdigest()

    def policy_state(self) -> PolicyState:
        """Return a copy of the policy's stored `Policy.state_dict`.

        Returns:
            Numbers, texts, arrays, and dicts, lists and tuples of these.

        Raises:
            CheckpointError: Its file is damaged or missing.
        """
        return self.read()[0]

    def read(self) -> tuple[PolicyState, int]:
        """Return the policy's state and version."""
        found = read_archive(self.files[0])
        try:
            return decode(found["state"]), decode(found["version"])
        except KeyError as error:
            raise CheckpointError(self.files[0], f"holds no opponent: {error!r}") from error

    def policy(self) -> FrozenPolicy:
        """Return a policy with its weights; each call builds another one."""
        return FrozenPolicy(self)

    def agent_connectors(self) -> AgentPipeline:
        """Return its connectors with their learned state, in eval mode; default connectors if it has none."""
        if self.files[1] is None:
            return AgentPipeline.default()
        pipeline = AgentPipeline.load(self.files[1]).eval()
        pipeline.reset()  # files of `save_policy` have its memory of running episodes
        return pipeline

    def action_connectors(self) -> ActionPipeline:
        """Return its action connectors with their learned state, in eval mode; default connectors if it has none."""
        if self.files[2] is None:
            return ActionPipeline.default()
        pipeline = ActionPipeline.load(self.files[2]).eval()
        pipeline.reset()
        return pipeline

    def pack(self) -> dict[str, Any]:
        """Return it as plain data, with the contents of its files.

        Returns:
            Numbers, texts and arrays of bytes.

        Raises:
            CheckpointError: A file is missing.
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
        """Return whether `packed`, data from `pack` of any opponent, equals this opponent's, including the files."""
        own = self.pack()
        files = [[None if file is None else bytes(file) for file in one["files"]] for one in (own, packed)]
        return files[0] == files[1] and all(packed[name] == own[name] for name in own.keys() - {"files"})


def _content(file: Path) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(file.read_bytes(), np.uint8)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror or error}") from error


class FrozenPolicy(Policy):
    """An opponent's policy: `setup` builds it, loads weights from its file, which is never written to, and seeds it."""

    def __init__(self, opponent: Opponent) -> None:
        self._opponent = opponent  # its files exist as long as it is referenced
        self._inner: Policy | None = None

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        name, make = self._opponent.opponent_id, self._opponent.make
        state, version = self._opponent.read()
        inner = as_policy(make(), f"the policy built by {make!r} for opponent {name!r}")
        inner.setup(observation_space, action_space, seed=seed)
        try:
            inner.load_state_dict(state)
        except ArgumentError as error:
            error.add_note(f"while opponent {name!r} was built by {make!r}; its state is in {self._opponent.files[0]}")
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # user code
            raise ArgumentError(
                f"{self._opponent.files[0]} does not fit policy {name!r}, as built by {make!r}: {error!r:.300}"
            ) from error
        self.version = inner.version = version
        self._inner = inner
        super().setup(observation_space, action_space, seed=seed)  # its random generator is not the stored one

    def reseed(self, seed: int) -> None:
        if self._inner is not None:
            self._inner.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self._built().act(rows, explore=explore)

    def probabilities(self, rows: Rows) -> Any:
        """Return the probability of each action, for n rows: (n, k)."""
        method = getattr(self._built(), "probabilities", None)
        if method is None:
            raise ArgumentError(
                f"{self!r}: expected probabilities, but {self._inner!r} has no method probabilities(rows)"
            )
        return method(rows)

    def state_dict(self) -> PolicyState:
        return self._built().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._built().load_state_dict(state)

    def _built(self) -> Policy:
        if self._inner is None:
            raise StateError(f"{self!r} has no spaces yet: call setup() first, or use a Collector")
        return self._inner

    def __repr__(self) -> str:
        return f"FrozenPolicy({self._opponent.opponent_id!r})"
