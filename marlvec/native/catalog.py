"""Catalog of native envs: id, class, exactness."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from marlvec.errors import AlreadyRegisteredError, MissingExtraError, RegistryError
from marlvec.native.native_env import NativeEnv


@dataclass(frozen=True)
class NativeEntry:
    """Catalog entry of a native env."""

    id: str  # of its reference env for `marlvec.make`
    entry_point: str | type[NativeEnv]  # "module:Class" is imported only when an env is built, as it imports numba
    exact: bool = True  # numbers equal the reference's bit for bit; backend="auto" uses only exact entries

    def load(self) -> type[NativeEnv]:
        """Import the class; raise MissingExtraError without numba."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module, _, name = self.entry_point.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise MissingExtraError(
                f"the native form of env {self.id!r} needs a package that cannot be imported ({error}); "
                f'install it with: pip install "marlvec[native]", or take backend="async"'
            ) from error
        if not (isinstance(found, type) and issubclass(found, NativeEnv)):
            raise RegistryError(f"native env {self.id!r}: expected a subclass of NativeEnv, got {self.entry_point!r}")
        return found


_MPE = {
    "mpe/collect_treasure_v1": "mpe.scenarios.treasure:CollectTreasure",
    "mpe/simple_v3": "mpe.scenarios.simple:Simple",
    "mpe/simple_adversary_v3": "mpe.scenarios.adversary:SimpleAdversary",
    "mpe/simple_crypto_v3": "mpe.scenarios.crypto:SimpleCrypto",
    "mpe/simple_formation_v1": "mpe.scenarios.assignment:SimpleFormation",
    "mpe/simple_line_v1": "mpe.scenarios.assignment:SimpleLine",
    "mpe/simple_push_v3": "mpe.scenarios.push:SimplePush",
    "mpe/simple_reference_v3": "mpe.scenarios.reference:SimpleReference",
    "mpe/simple_speaker_listener_v4": "mpe.scenarios.speaker_listener:SimpleSpeakerListener",
    "mpe/simple_spread_v3": "mpe.scenarios.spread:SimpleSpread",
    "mpe/simple_tag_v3": "mpe.scenarios.tag:SimpleTag",
    "mpe/simple_world_comm_v3": "mpe.scenarios.world_comm:SimpleWorldComm",
}

_GAMES = {
    "cards/kuhn_poker": "games.kuhn:KuhnPoker",
    "cards/leduc_poker": "games.leduc:LeducPoker",
    "pettingzoo/classic/connect_four_v3": "games.connect_four:ConnectFour",
    "pettingzoo/classic/rps_v2": "games.rps:RockPaperScissors",
    "pettingzoo/classic/tictactoe_v3": "games.tictactoe:TicTacToe",
    "pettingzoo/sisl/pursuit_v5": "grids.pursuit:Pursuit",
}
"""Boards, cards and grids: id → ``"module:Class"`` under ``marlvec.native``."""

_GRIDS = {
    "lbf": "grids.foraging:Foraging",
    "overcooked": "grids.overcooked:Overcooked",
    "rware": "grids.warehouse:Warehouse",
}
"""Families whose ids `marlvec.envs.builtin_ids` reads: namespace → ``"module:Class"`` under ``marlvec.native``."""

_entries: dict[str, NativeEntry] = {
    env_id: NativeEntry(env_id, f"marlvec.native.{where}") for env_id, where in {**_MPE, **_GAMES}.items()
}


def native_entry(env_id: str) -> NativeEntry | None:
    """Return the entry of a full env id, or None."""
    family, _, name = env_id.partition("/")
    if name and family in _GRIDS and env_id not in _entries:
        return NativeEntry(env_id, f"marlvec.native.{_GRIDS[family]}")
    return _entries.get(env_id)


def register_native(
    id: str, entry_point: str | type[NativeEnv], *, exact: bool = True, overwrite: bool = False
) -> NativeEntry:
    """Register a native form of an env that `marlvec.make` knows; ``backend="auto"`` uses it if it is exact.

    Args:
        id: The env's full id, e.g. ``"mpe/simple_spread_v3"``.
        entry_point: A subclass of `NativeEnv`, or ``"module:Class"``.
        exact: Whether its numbers equal the env's, bit for bit.
        overwrite: Whether it may replace a registered native form.

    Raises:
        AlreadyRegisteredError: The env already has a native form.
    """
    if id in _entries and not overwrite:
        raise AlreadyRegisteredError(f"env {id!r} has a native form already; pass overwrite=True to replace it")
    entry = NativeEntry(id, entry_point, exact)
    _entries[id] = entry
    return entry
