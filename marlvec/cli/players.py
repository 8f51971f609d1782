"""Who plays: policies, and opponents that a training has kept, as a command line names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from marlvec.cli import arguments
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.policies import Policy
from marlvec.selfplay import Opponent, read_opponents
from marlvec.selfplay.opponents.opponent_pool import INDEX

__all__ = ["one_player", "players"]

_PLAYER_ID = r"([\w./-]+)="


def players(texts: Sequence[str]) -> dict[str, Policy | Opponent]:
    """Players of the arguments ``[ID=]WHAT``, in their order; a ``WHAT`` that ends in ``/*`` is several.

    Raises:
        ArgumentError: One cannot be found, is no policy, or an id is used twice.
        CheckpointError: A pool's file is damaged.
    """
    found: dict[str, Policy | Opponent] = {}
    for text in texts:
        for name, player in _players(text).items():
            if name in found:
                raise ArgumentError(f"{text}: there are two players {name!r}; give one another id: ID={text}")
            found[name] = player
    return found


def one_player(text: str) -> tuple[str, Policy | Opponent]:
    """The player of ``[ID=]WHAT``, and its id.

    Raises:
        ArgumentError: It cannot be found, is no policy, or stands for several.
        CheckpointError: A pool's file is damaged.
    """
    found = players([text])
    if len(found) != 1:
        raise ArgumentError(f"{text}: expected one player, got {len(found)}: {list(found)}")
    return next(iter(found.items()))


def _players(text: str) -> dict[str, Policy | Opponent]:
    what, at, path = text.rpartition("@")
    if not at:
        return dict(arguments.policies([text]))
    match = re.match(_PLAYER_ID, what)
    opponents = _opponents(text, what[match.end() :] if match else what, Path(path))
    if match is None:
        return dict(opponents)
    if path.endswith("*"):
        return {f"{match[1]}/{name}": one for name, one in opponents.items()}
    (only,) = opponents.values()
    return {match[1]: only}


def _opponents(text: str, what: str, path: Path) -> dict[str, Opponent]:
    """Of the pool in a folder the newest; or, where the path goes on behind the folder, one of them or all."""
    folder, wanted = (path, None) if (path / INDEX).exists() else (path.parent, path.name)
    if not (folder / INDEX).exists():
        raise ArgumentError(f"{text}: there is no pool of opponents in {path}, nor in {path.parent}")
    make = arguments.load(text, what)
    if not callable(make) and not isinstance(make, Mapping):
        raise ArgumentError(f"{text}: before @ expected a function that builds the policy, or a dict, got {make!r}")
    try:
        opponents = read_opponents(folder, make)
    except CheckpointError as error:
        error.add_note(f"while {text} was looked up")
        raise
    if not opponents:
        raise ArgumentError(f"{text}: there is nobody in the pool yet")
    if wanted == "*":
        return opponents
    name = next(reversed(opponents)) if wanted is None else wanted
    if name not in opponents:
        raise ArgumentError(f"{text}: no opponent {name!r} in {folder}; there are {', '.join(opponents)}")
    return {name: opponents[name]}
