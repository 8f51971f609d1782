"""`import_extra`: imports an optional library, or says which extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from marlvec.errors import MissingExtraError

__all__ = ["import_extra"]


def import_extra(module: str, what: str, install: str) -> Any:
    """Import a library by name, so that nothing here needs it to be there.

    Args:
        module: Its module.
        what: What needs it, for the message.
        install: How to install it, likewise.

    Raises:
        MissingExtraError: It cannot be imported; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {library}, which cannot be imported ({error}); install it with: {install}"
        ) from error
