"""Kernels are kept on disk, and thrown away when anything that they call has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the extra `native` is not installed")

import numba

import marlvec.native.kernels
from marlvec.native.kernels import kernel

SOURCE = Path(marlvec.native.kernels.__file__).parent

CODE = """
import sys
sys.path.insert(0, {folder!r})
import kernels.use as use
print(use.double_of(3.0), sum(use.double_of.stats.cache_hits.values()))
"""


@pytest.mark.slow("compiles, and plays whole games")
@pytest.mark.parametrize("folder", ["kernels", "kernels/deep/deeper"])
def test_what_a_kernel_calls_is_a_part_of_its_stamp(folder: str, tmp_path: Path) -> None:
    """A change in another file of the package, however deep, is seen, which numba alone would not."""
    package = tmp_path / "kernels"
    package.mkdir()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for path in (tmp_path / folder, *(tmp_path / folder).parents):
        if path.is_relative_to(package):
            (path / "__init__.py").touch()
    shutil.copy(SOURCE / "jit.py", package / "jit.py")
    (package / "use.py").write_text(
        f"from kernels.jit import kernel\nfrom {folder.replace('/', '.')}.base import twice\n\n\n"
        "@kernel\ndef double_of(x):\n    return twice(x)\n"
    )

    def run(factor: int) -> list[str]:
        (tmp_path / folder / "base.py").write_text(
            f"from kernels.jit import kernel\n\n\n@kernel\ndef twice(x):\n    return {factor} * x\n"
        )
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(folder=str(tmp_path))], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run(2) == ["6.0", "0"]
    assert run(2) == ["6.0", "1"]
    assert run(5) == ["15.0", "0"]


def test_without_a_file_to_keep_it_beside_it_is_compiled_all_the_same() -> None:
    space: dict[str, object] = {"kernel": kernel}
    exec(compile("@kernel\ndef triple(x):\n    return 3 * x\n", "<nowhere>", "exec"), space)
    triple = space["triple"]
    assert callable(triple)
    assert triple(2.0) == 6.0
    assert isinstance(triple, numba.core.dispatcher.Dispatcher)
