"""A plugin of pytest for runs on a mutant: the first find will do, as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings

import marlvec


def pytest_sessionstart(session: pytest.Session) -> None:
    """After tests/conftest.py has loaded its own profile."""
    if not Path(marlvec.__file__).is_relative_to(Path.cwd()):
        raise pytest.UsageError(f"these would be tests of {marlvec.__file__}, not of the mutant in {Path.cwd()}")
    settings.register_profile(
        "hunt", settings(), phases=[Phase.generate], database=None, derandomize=False, report_multiple_bugs=False
    )
    settings.load_profile("hunt")
