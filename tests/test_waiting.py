"""What tests wait with does what it says."""

from __future__ import annotations

import pickle
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from marlvec.testing.scripted import CounterEnv
from tests.vector.support.kinds import vectorize
from tests.waiting import Gate, GatedEnv, overdue, until, within


def test_a_gate_lets_the_given_number_through(tmp_path: Path) -> None:
    through: list[int] = []

    def go(gate: Gate) -> None:
        gate.wait()
        through.append(1)

    with Gate(tmp_path) as gate:
        threads = [threading.Thread(target=go, args=(pickle.loads(pickle.dumps(gate)),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for wanted in (1, 3):
            time.sleep(0.02)
            gate.let_through(wanted - len(through))
            until(lambda wanted=wanted: len(through) >= wanted)
            assert len(through) == wanted
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("backend", ["thread", "async"])
def test_only_waiters_at_a_gate_are_overdue(backend: str, tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, Gate(tmp_path) as other:
        factories = [CounterEnv, partial(GatedEnv, gate, env_index=1), partial(GatedEnv, other, env_index=2, at=0)]
        with vectorize(backend, factories, num_workers=3) as envs:
            envs.reset()
            envs.step_send(np.ones((3, 3), np.int64))
            assert "did not reply within 0.02 s" in str(overdue(envs.step_fetch, [1, 2]))
            other.let_through()
            overdue(envs.step_fetch, [1])
            gate.let_through(2)
            envs.step_fetch()
            envs.step(np.ones((3, 3), np.int64))
            envs.step_send(np.ones((3, 3), np.int64))
            overdue(envs.step_fetch, [1])
            gate.let_through()


def test_a_bound_is_ten_times_the_usual() -> None:
    with pytest.raises(AssertionError, match="ten times the usual"), within(1, usual=0.2):
        pass
    with pytest.raises(AssertionError, match="took"), within(0.01, usual=0.001):
        time.sleep(0.02)
