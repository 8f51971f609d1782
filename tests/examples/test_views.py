"""Scripts written for the envs of other libraries, on views of marlvec: they run as they stand, and they learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import run

pytest.importorskip("torch", reason="torch is not installed, and `run` looks after its seed")

pytestmark = pytest.mark.checklist(125)


@pytest.mark.slow("trains")
@pytest.mark.parametrize(
    ("script", "amount", "gain"),
    [("gymnasium_wrappers", ("--total-timesteps", 144_000), 2), ("cleanrl_ppo", ("--total-timesteps", 57_600), 1)],
)
def test_agents_learn_to_spread(
    script: str, amount: tuple[str, int], gain: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba", reason="native worlds need numba")
    run(script, *amount, "--backend", "native", "--checkpoint", tmp_path)
    found = re.match(r"mean return per agent: random (\S+), after .* (\S+)\nwrote last.npz, ", capsys.readouterr().out)
    assert found
    random, learned = map(float, found.groups())
    assert -28.5 < random < -25
    assert learned > random + gain
    assert (tmp_path / "return.png").stat().st_size > 5_000


@pytest.mark.slow("trains")
def test_pettingzoo_q_learning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("pettingzoo_q_learning", "--total-timesteps", 9_600, "--test-games", 100, "--checkpoint", tmp_path)
    found = re.search(r"lost against random moves: (\d+)% before, (\d+)% after 96\d\d moves", capsys.readouterr().out)
    assert found
    before, after = map(int, found.groups())
    assert 30 < before < 60
    assert after < before - 10
    assert (tmp_path / "lost.png").stat().st_size > 5_000
