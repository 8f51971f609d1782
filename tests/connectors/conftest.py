from __future__ import annotations

import pytest

from marlvec.serialization.values import CLASSES, FUNCTIONS


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for names in (CLASSES, FUNCTIONS):
        monkeypatch.setattr(names, "_things", dict(names._things))
