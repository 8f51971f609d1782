"""What tells of a defect, and what of a mistake in the defect itself."""

from __future__ import annotations

import re
import traceback
from enum import Enum

import pytest

from marlvec.errors import ContractWarning, MarlvecError
from tests.faults.harness.machine import Hung

__all__ = ["is_find"]

CAUGHT = (AssertionError, pytest.fail.Exception, MarlvecError, ContractWarning, Hung)
"""Whatever else a test fails with is a mistake in the defect."""

MISTAKES = (AttributeError, NameError, TypeError)
"""The same where they have happened in a worker, and an error above tells of them."""

_LAST_FRAME_IS_OURS = re.compile(
    r'  File "[^"\n]*/tests/(?:defects|properties)/(?!test_)\w+\.py", line \d+, in .*\n'
    r"(?:    .*\n)*"  # the line itself, and what Python marks below it
    rf"(?:{'|'.join(error.__name__ for error in MISTAKES)})\b"
)


def is_find(error: BaseException, said: str = "") -> bool:
    """Whether a failed test tells of a defect.

    Args:
        error: What it failed with.
        said: What it and its workers have written; a worker that ends by an exception writes it there.
    """
    if isinstance(error, BaseExceptionGroup):  # of Hypothesis: what was found does not happen in every run
        return any(is_find(found, said) for found in error.exceptions)
    if type(error).__name__ == "_WrappedBaseException" and error.__cause__ is not None:  # Hypothesis's, in such a group
        return is_find(error.__cause__, said)
    if isinstance(error, KeyError) and _is_ours(error):
        return True  # a table of marlvec's does not know, e.g., a way from this state
    if not isinstance(error, CAUGHT) or isinstance(error.__cause__, MISTAKES):
        return False
    return not _LAST_FRAME_IS_OURS.search(f"{said}\n{error}")


def _is_ours(error: KeyError) -> bool:
    """Whether it is of a table of transitions, or was raised in marlvec, and not in a defect."""
    frames = traceback.extract_tb(error.__traceback__)
    is_in_marlvec = bool(frames) and "/marlvec/" in frames[-1].filename and "/tests/" not in frames[-1].filename
    return is_in_marlvec or any(isinstance(state, Enum) for state in error.args)
