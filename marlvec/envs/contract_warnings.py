"""Warnings of broken contracts, attributed to the line of the user's code that called marlvec."""

from __future__ import annotations

import sys
import warnings

from marlvec.errors import ContractWarning

__all__ = ["warn_of_contract"]


def warn_of_contract(message: str) -> None:
    """Emit a `ContractWarning` at the innermost frame outside of marlvec."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "marlvec":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ContractWarning, stacklevel=level + 1)
