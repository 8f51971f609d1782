"""The interpreter that runs the scripts of the docs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.warm import WarmInterpreter


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmInterpreter]:
    with WarmInterpreter() as interpreter:
        yield interpreter
