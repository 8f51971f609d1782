"""Check: a connector rebuilt from its config is equal."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from marlvec.connectors.connector import Connector
from marlvec.connectors.registry import connector_from_config
from marlvec.errors import SerialisationError
from marlvec.testing.connector_checks._support.report import Report
from marlvec.testing.connector_checks._support.trial import Trial

__all__ = ["check_config"]


def check_config(trial: Trial) -> None:
    """The connector built from the config is equal, and continues from the state."""
    player = trial.player(training=True)
    if (built := _read_back(trial.report, player.piece)) is None:
        return
    other = trial.driver(trial.piece(built))
    trial.load(other.piece, player.watch(trial.before).piece.state_dict())
    trial.go_on(player, [other], "from one built from the config")


def _read_back(report: Report, piece: Connector) -> Connector | None:
    """Build a connector from another one's config; None if the config names an unregistered class or function."""
    with report.asking("to_config()"):
        try:
            config = piece.to_config()
        except SerialisationError:
            return None
    try:
        json.dumps(config, default=_array)
    except TypeError as error:
        report.broken("the config", "JSON-able data and arrays", str(error))
    with report.asking("building from the config"):
        built = connector_from_config(copy.deepcopy(config))
        again = built.to_config()
    if type(built) is not type(piece) or repr(built) != repr(piece):
        report.broken("what is built from the config", repr(piece), repr(built), "keep arguments under their own names")
    report.same(config, again, "the config of what was built from it")
    return built


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON-able")
