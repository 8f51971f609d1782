"""Actions that nobody can change on their way to the env."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.trees import map_tree

__all__ = ["ReadOnlyActions"]


class ReadOnlyActions(ActionConnector):
    """Makes ``actions_for_env`` read-only views; the policy's own arrays stay as writeable as they were."""

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=map_tree(_read_only, rows.actions_for_env))


def _read_only(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array
