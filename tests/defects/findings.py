"""What tells of a defect, and what of a mistake in the defect itself."""

from __future__ import annotations

import re
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
    if isinstance(error, KeyError) and any(isinstance(state, Enum) for state in error.args):
        return True  # a table of transitions knows no way from this state
    if not isinstance(error, CAUGHT) or isinstance(error.__cause__, MISTAKES):
        return False
    return not _LAST_FRAME_IS_OURS.search(f"{said}\n{error}")
