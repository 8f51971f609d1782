"""Recordings in TorchRL's replay buffers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("numba")


@pytest.mark.slow("imports torchrl, in a process of its own")
def test_a_replay_buffer_has_all_rows_under_torchrl_s_names(tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    subprocess.run([sys.executable, "-m", "tests.recording.buffers", str(tmp_path)], check=True)
