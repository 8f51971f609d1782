"""`import_extra`: imports an optional library, or raises with the extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from marlvec.errors import MissingExtraError

__all__ = ["import_extra"]


def import_extra(module: str, what: str, install: str) -> Any:
    """Import an optional library.

    Args:
        module: Name of the module.
        what: The feature that needs it, for the message.
        install: The command that installs it, for the message.

    Raises:
        MissingExtraError: It cannot be imported; has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(
            f"{what} needs {library}, which cannot be imported ({error}); install it with: {install}"
        ) from error
