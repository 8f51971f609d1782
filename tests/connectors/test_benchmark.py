"""The benchmark of connectors measures all of them, runs as it stands, and asks all contestants the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import connector_peers as peers
from benchmarks.connector_cases import AGENTS, CASES, QUESTIONS, SMALL, UNIT, VECTOR, WIDTH, Case, chains, rows_of
from marlvec.connectors.registry import catalogue

ROOT = Path(__file__).resolve().parents[2]


def test_every_connector_there_is_has_its_case() -> None:
    assert sorted(case.name for case in CASES) == sorted(row.name for row in catalogue())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_tick_takes_all_rows(case: Case) -> None:
    tick = case.tick(4)
    counts = [len(tick()) for _ in range(3)]
    if case.make().changes_length:
        assert any(counts)
    else:
        assert counts == [4 * len(AGENTS)] * 3


def test_the_chains_run() -> None:
    for tick in chains(4).values():
        tick()


def test_the_questions_are_those_of_the_peers() -> None:
    assert set(QUESTIONS) == {peers.STACK, peers.NORMALIZE, peers.SCALE}


@pytest.mark.parametrize("library", peers.PEERS)
def test_who_is_asked_answers_for_every_row(library: str) -> None:
    if peers.version(library) is None:
        pytest.skip(f"{library} is not installed")
    plain, unit = (rows_of(SMALL, space).obs for space in (VECTOR, UNIT))
    shaped = [obs.reshape(SMALL, len(AGENTS), WIDTH) for obs in (plain, unit)]
    answered = set()
    for question, label, tick in peers.PEERS[library](*shaped):
        out = tick()
        answered.add(question)
        if library == "gymnasium":
            _agrees(question, out, plain)
        elif question == peers.SCALE:
            got = np.concatenate([list(of_env.values()) for of_env in out])
            np.testing.assert_allclose(got, (unit + 1) / 2, atol=1e-6)
        assert label
    assert answered
    assert answered <= set(QUESTIONS)


def _agrees(question: str, out: Any, obs: NDArray[np.float32]) -> None:
    """Whether what Gymnasium computes is what we do."""
    if question == peers.NORMALIZE:
        np.testing.assert_allclose(out, (obs - obs.mean(axis=0)) / obs.std(axis=0), rtol=1e-3, atol=1e-3)
    else:
        assert np.array(out).shape == (len(obs), 4, WIDTH)
        np.testing.assert_array_equal(np.array(out)[:, -1], obs)


@pytest.mark.slow("draws many batches")
def test_it_runs_as_it_stands() -> None:
    command = [sys.executable, "benchmarks/connectors.py", "--rounds", "1", "--seconds", "0.0001"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for words in ("48 rows of 18 numbers", "12,288 rows", "ns per row", *QUESTIONS, "Gymnasium", "usable cores"):
        assert words in result.stdout, words
    for library in peers.PEERS:
        if peers.version(library) is None:
            assert f"{library}: not installed, left out" in result.stdout
