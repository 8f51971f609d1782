"""Compiled code: numpy's random numbers, and kernels that are kept on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")

import numba

import marlvec.native.kernels
from marlvec.native import kernels as rng_kernels
from marlvec.native.kernels import kernel
from marlvec.native.rng_streams import as_generator, fresh_streams, row_of

# numpy's random numbers in compiled code.


SEEDS = st.integers(0, 2**64 - 1)
COUNTS = st.one_of(st.integers(1, 9), st.integers(1, 300))


def seeded(seeds: list[int]) -> np.ndarray:
    rng = fresh_streams(len(seeds))
    rng_kernels.seed_envs(rng, np.arange(len(seeds)), seeds)
    return rng


@given(st.lists(SEEDS, min_size=1, max_size=30))
def test_seeds_begin_numpys_streams(seeds: list[int]) -> None:
    rng = seeded(seeds)
    for row, seed in zip(rng, seeds, strict=True):
        assert row.tolist() == row_of(np.random.default_rng(seed)).tolist()


@given(SEEDS, st.lists(st.one_of(st.integers(1, 2**32 - 1), st.sampled_from([1, 2, 3, 2**31 + 1]), st.none())))
def test_draws_are_numpys(seed: int, draws: list[int | None]) -> None:
    """Small integers take half of 64 bits and keep the other half, across draws of floats."""
    rng, generator = seeded([0, seed]), np.random.default_rng(seed)
    for n in draws:
        if n is None:
            assert rng_kernels.uniform(rng, 1, -0.9, 0.9) == generator.uniform(-0.9, 0.9)
        else:
            assert rng_kernels.bounded(rng, 1, n) == generator.integers(n)
    assert rng[1].tolist() == row_of(generator).tolist()
    assert rng_kernels.double(rng, 1) == generator.random()
    assert rng_kernels.next_uint64(rng, 1) == generator.bit_generator.random_raw()


@given(SEEDS)
def test_a_row_goes_on_as_numpys_generator(seed: int) -> None:
    rng = seeded([seed])
    rng_kernels.bounded(rng, 0, 5)  # leaves a half
    generator = as_generator(rng[0])
    assert generator.integers(7) == rng_kernels.bounded(rng, 0, 7)
    assert generator.random() == rng_kernels.double(rng, 0)


@pytest.mark.slow("compiles")
@given(SEEDS, st.lists(st.tuples(st.sampled_from(["interval", "shuffle", "permutation", "sample", "choice"]), COUNTS)))
def test_orders_and_samples_are_numpys(seed: int, draws: list[tuple[str, int]]) -> None:
    """One after the other from one stream, which is the same at the end."""
    rng, generator = seeded([0, seed]), np.random.default_rng(seed)
    for name, n in draws:
        if name == "interval":  # what numpy shuffles two numbers by
            pair = [0, 1]
            generator.shuffle(pair)
            assert rng_kernels.interval(rng, 1, 1) == int(pair == [0, 1])
        elif name == "shuffle":
            mine, theirs = np.arange(n) * 0.5, np.arange(n) * 0.5
            rng_kernels.shuffle(rng, 1, mine)
            generator.shuffle(theirs)
            assert mine.tolist() == theirs.tolist()
        elif name == "permutation":
            out = np.empty(n, np.int64)
            rng_kernels.permutation(rng, 1, out)
            assert out.tolist() == generator.permutation(n).tolist()
        elif name == "sample":
            out = np.empty(seed % (n + 1), np.int64)
            rng_kernels.sample(rng, 1, n, out)
            assert out.tolist() == generator.choice(n, len(out), replace=False).tolist()
        else:
            assert [rng_kernels.bounded(rng, 1, n) for _ in range(3)] == generator.choice(n, 3).tolist()
    assert rng[1].tolist() == row_of(generator).tolist()


@pytest.mark.slow("compiles")
@pytest.mark.parametrize(("n", "size"), [(10_000, 300), (10_001, 200), (10_001, 201), (10_050, 10_050), (12_000, 0)])
def test_samples_of_many_are_numpys_by_either_method(n: int, size: int) -> None:
    rng, generator = seeded([5]), np.random.default_rng(5)
    out = np.empty(size, np.int64)
    rng_kernels.sample(rng, 0, n, out)
    assert out.tolist() == generator.choice(n, size, replace=False).tolist()
    assert rng[0].tolist() == row_of(generator).tolist()


def test_streams_without_a_seed_differ() -> None:
    rng = fresh_streams(50)
    assert len({rng_kernels.double(rng, i) for i in range(50)}) == 50


# Kernels are kept on disk, and thrown away when anything that they call has changed.


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
    shutil.copy(SOURCE / "kernels.py", package / "jit.py")
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
