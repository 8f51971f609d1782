"""How many of marlvec's own functions run for one tick of `collect()`, and in how many files: a count, not a clock.

Two envs, one policy; a tick that ends nobody, and whose values are not checked.
"""

from __future__ import annotations

import numpy as np
import pytest

from marlvec import Collector, FunctionPolicy
from marlvec.making import make
from tests.vector.test_calls import calls_by_file


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.parametrize(("backend", "calls", "files"), [("sync", 89, 30), ("async", 98, 30)])
def test_tick(backend: str, calls: int, files: int) -> None:
    options = {"num_workers": 2} if backend == "async" else {}
    with make("simple_spread", num_envs=2, backend=backend, max_cycles=1000, **options) as envs:
        collector = Collector(envs, FunctionPolicy(lambda rows: np.ones(len(rows), np.int64)), seed=0)
        collector.collect(env_steps=2 * 33)  # the first steps are checked, and then every 16th
        few, more = (calls_by_file(lambda k=k: collector.collect(env_steps=2 * k)) for k in (2, 12))
    of_ten = {file: more[file] - few[file] for file in more if more[file] > few[file]}
    assert sum(of_ten.values()) <= 10 * calls
    assert len(of_ten) <= files
