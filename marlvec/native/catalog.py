"""Which envs have a native form, and where it is."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from marlvec.errors import AlreadyRegisteredError, MissingExtraError, RegistryError
from marlvec.native.native_env import NativeEnv

__all__ = ["NativeEntry", "native_entry", "register_native"]


@dataclass(frozen=True)
class NativeEntry:
    """One env that has a native form.

    Attributes:
        id: The id of the env whose numbers it has, as `marlvec.make` knows it.
        entry_point: ``"module:Class"``, a `NativeEnv`; imported only where it is built, as it imports numba.
        exact: Whether it has its reference's numbers bit for bit. ``backend="auto"`` takes no other.
    """

    id: str
    entry_point: str | type[NativeEnv]
    exact: bool = True

    def load(self) -> type[NativeEnv]:
        """Import it.

        Raises:
            MissingExtraError: numba is not installed.
            RegistryError: There is no such class.
        """
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module, _, name = self.entry_point.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise MissingExtraError(
                f"the native form of env {self.id!r} needs something that cannot be imported ({error}); "
                f'install it with: pip install "marlvec[native]", or take backend="async"'
            ) from error
        if not (isinstance(found, type) and issubclass(found, NativeEnv)):
            raise RegistryError(f"native env {self.id!r}: {self.entry_point!r} is no subclass of NativeEnv")
        return found


_MPE = {
    "mpe/collect_treasure_v1": "mpe.scenarios.treasure:CollectTreasure",
    "mpe/simple_v3": "mpe.scenarios.simple:Simple",
    "mpe/simple_adversary_v3": "mpe.scenarios.adversary:SimpleAdversary",
    "mpe/simple_crypto_v3": "mpe.scenarios.crypto:SimpleCrypto",
    "mpe/simple_formation_v1": "mpe.scenarios.formation:SimpleFormation",
    "mpe/simple_line_v1": "mpe.scenarios.line:SimpleLine",
    "mpe/simple_push_v3": "mpe.scenarios.push:SimplePush",
    "mpe/simple_reference_v3": "mpe.scenarios.reference:SimpleReference",
    "mpe/simple_speaker_listener_v4": "mpe.scenarios.speaker_listener:SimpleSpeakerListener",
    "mpe/simple_spread_v3": "mpe.scenarios.spread:SimpleSpread",
    "mpe/simple_tag_v3": "mpe.scenarios.tag:SimpleTag",
    "mpe/simple_world_comm_v3": "mpe.scenarios.world_comm:SimpleWorldComm",
}

_GAMES = {
    "cards/kuhn_poker": "cards.kuhn:KuhnPoker",
    "cards/leduc_poker": "cards.leduc:LeducPoker",
    "pettingzoo/classic/connect_four_v3": "boards.connect_four:ConnectFour",
    "pettingzoo/classic/rps_v2": "boards.rps:RockPaperScissors",
    "pettingzoo/classic/tictactoe_v3": "boards.tictactoe:TicTacToe",
    "pettingzoo/sisl/pursuit_v5": "grids.pursuit.env:Pursuit",
}
"""Boards, cards and grids: id → ``"module:Class"`` under ``marlvec.native``."""

_GRIDS = {
    "lbf": "grids.foraging:Foraging",
    "overcooked": "grids.overcooked.env:Overcooked",
    "rware": "grids.warehouse:Warehouse",
}
"""Families whose ids `marlvec.envs.making.grid_ids` reads: namespace → ``"module:Class"`` under ``marlvec.native``."""

_entries: dict[str, NativeEntry] = {
    env_id: NativeEntry(env_id, f"marlvec.native.{where}") for env_id, where in {**_MPE, **_GAMES}.items()
}


def native_entry(env_id: str) -> NativeEntry | None:
    """The native form of an env, by its whole id; None where there is none."""
    family, _, name = env_id.partition("/")
    if name and family in _GRIDS and env_id not in _entries:
        return NativeEntry(env_id, f"marlvec.native.{_GRIDS[family]}")
    return _entries.get(env_id)


def register_native(
    id: str, entry_point: str | type[NativeEnv], *, exact: bool = True, overwrite: bool = False
) -> NativeEntry:
    """Give an env that `marlvec.make` knows a native form.

    Args:
        id: The env's whole id, e.g. ``"mpe/simple_spread_v3"``.
        entry_point: A subclass of `NativeEnv`, or ``"module:Class"``.
        exact: Whether it has the same numbers as the env, bit for bit.
        overwrite: Whether it may replace another.

    Raises:
        AlreadyRegisteredError: The env has one.
    """
    if id in _entries and not overwrite:
        raise AlreadyRegisteredError(f"env {id!r} has a native form already; pass overwrite=True to replace it")
    entry = NativeEntry(id, entry_point, exact)
    _entries[id] = entry
    return entry
