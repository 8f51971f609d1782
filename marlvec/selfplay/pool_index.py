"""What a pool's folder says is in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlvec.errors import ArgumentError, CheckpointError
from marlvec.policies import RandomPolicy
from marlvec.selfplay.opponent import MakePolicy, Opponent
from marlvec.serialization.archive import FilePath, read_file, write_file
from marlvec.serialization.values import decode, encode

__all__ = ["INDEX", "KINDS", "MakeOf", "PoolIndex", "inside", "make_of", "read_opponents"]

INDEX = "pool.npz"
KINDS = ("policy", "agent", "action")
"""What an opponent's files hold, in their order, as their names say."""

_OWN_FILE = re.compile(rf"[\w.~%-]+\.({'|'.join(KINDS)})-[0-9a-f]{{16}}-[0-9]+\.npz", re.ASCII)

MakeOf = Callable[[str], MakePolicy]
"""From whose snapshot an opponent is to what builds such a policy."""


def make_of(make: MakePolicy | Mapping[str, MakePolicy]) -> MakeOf:
    """Say who is built by what.

    Args:
        make: What builds all policies; or whose snapshot one is to what builds it.

    Raises:
        ArgumentError: It is neither; or, when asked, nothing builds policies of this one.
    """
    if not isinstance(make, Mapping):
        if not callable(make):
            raise ArgumentError(f"make must be a function that builds a policy, or a dict of such, got {make!r}")
        return lambda of: make
    if not all(map(callable, make.values())):
        raise ArgumentError(f"make must be a function that builds a policy, or a dict of such, got {make!r}")

    def find(of: str) -> MakePolicy:
        if of not in make:
            raise ArgumentError(f"nothing says how to build a policy of {of!r}; make has {list(make)}")
        return make[of]

    return find


@dataclass(frozen=True)
class PoolIndex:
    """What is written of a pool.

    Attributes:
        opponents: By id, oldest first.
        counts: Snapshots taken, by whose they are.
        rules: States of the rules for snapshots.

    A `RandomPolicy` needs nobody to say how it is built: the index names those that are.
    """

    opponents: Mapping[str, Opponent]
    counts: Mapping[str, int]
    rules: tuple[Mapping[str, Any], ...]

    def write(self, folder: Path) -> None:
        """Write it into a folder, whole or not at all.

        Raises:
            OSError: It cannot be written; an old one is as it was.
            CheckpointError: A link stands in its place, and leads out of the folder.
        """
        rows = [
            [o.opponent_id, o.of, o.step, o.anchor, [None if file is None else file.name for file in o.files]]
            for o in self.opponents.values()
        ]
        rules = [encode(state, "a rule's state") for state in self.rules]
        counts = encode(dict(self.counts), "counts")
        at_random = [name for name, opponent in self.opponents.items() if opponent.make is RandomPolicy]
        data = {"opponents": rows, "counts": counts, "rules": rules, "random": at_random}
        write_file(inside(folder, INDEX), data)

    @classmethod
    def read(cls, folder: Path, make: MakeOf) -> PoolIndex:
        """Read it.

        Raises:
            CheckpointError: There is none, a file is damaged or missing, or it names one that is not the pool's.
            ArgumentError: Nothing says how to build some of its policies.
        """
        path = inside(folder, INDEX)
        found = read_file(path)
        opponents: dict[str, Opponent] = {}
        known: set[str] = set()
        try:
            counts = decode(found["counts"])
            rules = tuple(decode(state) for state in found["rules"])
            at_random = found.get("random", [])  # an older index names none
            for opponent_id, of, step, anchor, names in found["opponents"]:
                if not isinstance(opponent_id, str) or opponent_id in opponents:
                    raise ValueError(f"expected an id that no other opponent has, got {opponent_id!r}")
                policy, agent, action = (
                    None if name is None else _own_file(path, opponent_id, kind, name, known)
                    for kind, name in zip(KINDS, names, strict=True)
                )
                if policy is None:
                    raise ValueError(f"opponent {opponent_id!r} has no policy")
                built_by = RandomPolicy if opponent_id in at_random else make(of)
                opponents[opponent_id] = Opponent(opponent_id, of, step, anchor, built_by, (policy, agent, action))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise CheckpointError(path, f"holds no pool of opponents: {error!r}") from error
        for opponent in opponents.values():
            for file in opponent.files:
                if file is not None:
                    read_file(file)  # to see that it is there, and sound
        return cls(opponents, counts, rules)


def inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder.

    Raises:
        CheckpointError: It is a link that leads out of the folder.
    """
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise CheckpointError(path, f"is a link that leads out of the pool's folder, to {path.resolve()}: remove it")
    return path


def _own_file(index: Path, opponent_id: str, kind: str, name: Any, known: set[str]) -> Path:
    """The file that an index names, if it can be one that a pool has written: it is read, and one day removed."""
    match = _OWN_FILE.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] != kind or name in known:
        raise CheckpointError(
            index,
            f"names {name!r} as a file of opponent {opponent_id!r}; expected NAME.{kind}-DIGEST-NUMBER.npz in the "
            f"pool's own folder, which no other opponent has: use a pool that OpponentPool has written",
        )
    known.add(name)
    return inside(index.parent, name)


def read_opponents(folder: FilePath, make: MakePolicy | Mapping[str, MakePolicy]) -> dict[str, Opponent]:
    """The opponents in a pool's folder, to look at or to play against: nothing is written there, nor cleaned up.

    So a training may go on with the folder meanwhile. An opponent that it takes out can no longer be built.

    Args:
        folder: The folder of an `OpponentPool`.
        make: Builds a policy as it was at first; or who it is of to such a function.

    Returns:
        Opponent id to opponent, oldest first.

    Raises:
        CheckpointError: There is no pool, a file is damaged or missing, or lies outside the folder.
        ArgumentError: Nothing says how to build some of its policies.
    """
    return dict(PoolIndex.read(Path(folder), make_of(make)).opponents)
