"""Which arguments a function takes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from marlvec.arguments import signature_of


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when a function is defined")
def test_annotations_may_name_what_only_type_checkers_know() -> None:
    scope: dict[str, Any] = {}
    exec(
        compile("def build(width: Unknown, *, env_index: int) -> Unknown: ...", "a file", "exec", dont_inherit=True),
        scope,
    )
    assert list(signature_of(scope["build"]).parameters) == ["width", "env_index"]


def test_callables_without_signature_raise_their_own_error() -> None:
    with pytest.raises(TypeError, match="not a callable"):
        signature_of(5)  # type: ignore[arg-type]
    assert str(signature_of(lambda a, *, b=2: a)) == "(a, *, b=2)"
