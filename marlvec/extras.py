"""Optional libraries: `import_extra` imports one, or raises with the extra to install."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from marlvec.errors import MissingExtraError


@contextmanager
def needs_extra(library: str, what: str, install: str) -> Iterator[None]:
    """In this context, a failed import raises `MissingExtraError` with the command that installs the library."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs {library}, which cannot be imported ({error}); to install it: {install}"
        ) from error


def import_extra(module: str, what: str, install: str) -> Any:
    """Import an optional library; ``what`` needs it and ``install`` installs it, in the `MissingExtraError`."""
    with needs_extra(module.partition(".")[0], what, install):
        found = importlib.import_module(module)
    return found
