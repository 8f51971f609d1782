"""Ids that say how an env is built: ``"lbf/Foraging-8x8-2p-3f-v3"`` has eight rows, two players and three foods."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marlvec.envs.making.factory import EnvEntry
from marlvec.errors import UnknownEnvError

__all__ = ["GRIDS", "grid_entry"]


@dataclass(frozen=True)
class _Family:
    entry_point: str
    package: str
    example: str
    form: str  # of all its ids, in words
    read: Callable[[str], dict[str, Any] | None]  # arguments of an id; None: no such id


_FORAGING = re.compile(
    r"Foraging(?P<grid>-grid)?(-(?P<sight>\d+)s)?-(?P<size>\d+)x(?P=size)-(?P<players>\d+)p-(?P<foods>\d+)f"
    r"(?P<coop>-coop)?(?P<ind>-ind)?(?P<pen>-pen)?-v3"
)


def _foraging(name: str) -> dict[str, Any] | None:
    """Return the arguments that ``lbforaging/__init__.py`` registers under such a name; any size, number and sight."""
    found = _FORAGING.fullmatch(name)
    if found is None:
        return None
    size = int(found["size"])
    return {
        "players": int(found["players"]),
        "min_player_level": 1,
        "max_player_level": 2,
        "min_food_level": 1,
        "max_food_level": 1 if found["ind"] else None,
        "field_size": (size, size),
        "max_num_food": int(found["foods"]),
        "sight": int(found["sight"] or size),
        "max_episode_steps": 50,
        "force_coop": bool(found["coop"]),
        "grid_observation": bool(found["grid"]),
        "penalty": 0.1 if found["pen"] else 0.0,
    }


_WAREHOUSE = re.compile(
    r"rware(?P<kind>-img|-imgdict)?(?P<north>-Nd)?(-(?P<sight>\d+)s)?"
    r"-((?P<size>tiny|small|medium|large)|(?P<rows>\d+)x(?P<columns>\d+))(-(?P<height>\d+)h)?-(?P<agents>\d+)ag"
    r"((?P<hard>-easy|-hard)|-(?P<requests>\d+)req-(?P<reward>indiv|global|twostage))?-v2"
)
_SIZES = {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}
_REQUESTS = {"-easy": 2.0, None: 1.0, "-hard": 0.5}
_KINDS = {None: "flattened", "-img": "image", "-imgdict": "image_dict"}
_REWARDS = {None: "individual", "indiv": "individual", "global": "global", "twostage": "two_stage"}


def _warehouse(name: str) -> dict[str, Any] | None:
    """Return the arguments that ``rware/__init__.py`` registers under such a name; any size, number and range."""
    found = _WAREHOUSE.fullmatch(name)
    if found is None or bool(found["size"]) == bool(found["requests"]):
        return None
    rows, columns = _SIZES[found["size"]] if found["size"] else (int(found["rows"]), int(found["columns"]))
    agents = int(found["agents"])
    return {
        "column_height": int(found["height"] or 8),
        "shelf_rows": rows,
        "shelf_columns": columns,
        "n_agents": agents,
        "msg_bits": 0,
        "sensor_range": int(found["sight"] or 1),
        "request_queue_size": int(found["requests"] or agents * _REQUESTS[found["hard"]]),
        "max_inactivity_steps": None,
        "max_steps": 500,
        "reward_type": _REWARDS[found["reward"]],
        "observation_type": _KINDS[found["kind"]],
        "image_observation_directional": not found["north"],
    }


GRIDS = {
    "lbf": _Family(
        "marlvec.envs.grids.foraging:ForagingEnv",
        "lbforaging",
        "Foraging-8x8-2p-3f-v3",
        "Foraging[-grid][-SIGHTs]-SIZExSIZE-PLAYERSp-FOODSf[-coop][-ind][-pen]-v3",
        _foraging,
    ),
    "overcooked": _Family(
        "marlvec.envs.grids.overcooked:OvercookedEnv",
        "overcooked_ai_py",
        "cramped_room",
        "LAYOUT, one of overcooked-ai's",
        lambda name: {"layout": name} if re.fullmatch(r"\w+", name) else None,
    ),
    "rware": _Family(
        "marlvec.envs.grids.warehouse:Warehouse",
        "rware",
        "rware-tiny-2ag-v2",
        "rware[-img|-imgdict][-Nd][-RANGEs]-SIZE[-HEIGHTh]-AGENTSag[-easy|-hard]-v2, or, in place of -SIZE … -hard, "
        "-ROWSxCOLUMNS-HEIGHTh-AGENTSag-REQUESTSreq-REWARD-v2",
        _warehouse,
    ),
}
"""Families whose ids are read, by their namespace."""


def grid_entry(family: str, name: str) -> EnvEntry:
    """Return the entry of an env whose id, e.g. ``"Foraging-8x8-2p-3f-v3"``, says how it is built."""
    known = GRIDS[family]
    kwargs = known.read(name)
    if kwargs is None:
        raise UnknownEnvError(
            f"unknown env {f'{family}/{name}'!r}: expected {family}/{known.form}, e.g. {family}/{known.example}"
        )
    return EnvEntry(
        f"{family}/{name}", known.entry_point, kwargs, family=family, extra=family, packages=(known.package,)
    )
