"""Another build of marlvec beside this one: the same random programs give the same batches, episodes and counts.

Run it while what `collect()` does is rebuilt, with the folder of the older package in ``MARLVEC_OLD_BUILD``:
``git archive OLD marlvec connectors | tar -x -C /tmp/old; MARLVEC_OLD_BUILD=/tmp/old pytest -m "" THIS_FILE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = os.environ.get("MARLVEC_OLD_BUILD", "")


def printed(build: Path, first: int, last: int) -> list[str]:
    """What programs give in a build, whose package is found first where its folder is the current one."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.collect.both_builds", str(first), str(last)]
    paths = os.pathsep.join(map(str, (build, ROOT)))
    found = subprocess.run(
        command, cwd=build, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    return found.stdout.splitlines()


@pytest.mark.slow("runs many programs in two builds")
@pytest.mark.skipif(not OLD, reason="needs the folder of an older build in MARLVEC_OLD_BUILD")
@pytest.mark.parametrize("first", range(0, 450, 90))
def test_batches_episodes_and_counts_are_those_of_the_older_build(first: int) -> None:
    old, new = (printed(build, first, first + 90) for build in (Path(OLD), ROOT))
    assert len(new) > 900
    assert new == old


def test_programs_collect() -> None:
    lines = printed(ROOT, 0, 4)
    assert len(lines) > 20
    assert not any("Error" in line for line in lines)
