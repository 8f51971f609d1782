"""How many cores there are: those a process may run on, or what its control groups grant, if that is less."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from marlvec.vector.cores import quota, usable_cores


def say(root: Path, files: dict[str, str], own: str) -> float:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "own").write_text(own)
    return quota(root / "own", root)


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "0::/\n", math.inf),
        ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 2.5),
        ({"cpu.max": "250000 100000\n"}, "0::/docker/5ab\n", 2.5),  # seen from inside, where that path leads nowhere
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "150000 100000\n"}, "0::/a/b\n", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", math.inf),
        ({"cpu/x/cpu.cfs_quota_us": "50000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/x\n0::/\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpuset:/\n", math.inf),
        ({"cpu.max": "nonsense"}, "0::/\n", math.inf),
    ],
)
def test_the_strictest_quota_holds(tmp_path: Path, files: dict[str, str], own: str, expected: float) -> None:
    assert say(tmp_path, files, own) == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path / "none", tmp_path) == math.inf


@pytest.mark.parametrize(("granted", "most"), [(math.inf, 10**6), (0.2, 1), (1.5, 2)])
def test_cores_are_what_is_granted_and_never_none(monkeypatch: pytest.MonkeyPatch, granted: float, most: int) -> None:
    monkeypatch.setattr("marlvec.vector.cores.quota", lambda own, root: granted)
    assert usable_cores() == max(1, min(len(os.sched_getaffinity(0)), most))
