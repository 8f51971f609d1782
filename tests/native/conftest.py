"""What all tests of compiled envs have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_envs_are_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share also so few envs that it does not pay: where ``num_workers`` is given it is about threads."""
    monkeypatch.setattr("marlvec.vector.native_shard._FEWEST", 1)
    monkeypatch.setattr("marlvec.vector.thread_team.usable_cores", lambda: 8)
