"""Files of one value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from marlvec.errors import CheckpointError
from marlvec.serialization.archive import write_archive
from marlvec.serialization.values import read_value, write_value


def test_what_was_written_is_read(tmp_path: Path) -> None:
    value = {"rows": np.arange(3), "names": ("a", None), 4: 0.5}
    write_value(tmp_path / "a.npz", "thing", value, "the thing")
    found = read_value(tmp_path / "a.npz", "thing", "thing")
    np.testing.assert_array_equal(found.pop("rows"), value.pop("rows"))
    assert found == value


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    write_value(tmp_path / "a.npz", "thing", 1, "the thing")
    with pytest.raises(CheckpointError, match=r"a\.npz holds no other thing, but \['thing'\]"):
        read_value(tmp_path / "a.npz", "other", "other thing")


@pytest.mark.parametrize(
    "form", [{"$function": "there is no such function"}, {"$space": "Odd", "args": []}, {"$odd": 1}]
)
def test_what_cannot_be_made_of_it_is_a_checkpoint_error(form: object, tmp_path: Path) -> None:
    """Whatever `decode` raises: of collectors on Ray a function that is not registered came out raw."""
    write_archive(tmp_path / "a.npz", {"thing": form})
    with pytest.raises(CheckpointError, match="holds no thing: "):
        read_value(tmp_path / "a.npz", "thing", "thing")
