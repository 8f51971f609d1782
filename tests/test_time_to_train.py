"""`benchmarks/time_to_train.py` judges, counts and bounds trainings correctly, and runs as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpe2 import simple_spread_v3

import marlvec
from benchmarks import time_to_train
from benchmarks.time_to_train import SCRIPTS, Contestant, Evaluator, code_lines, interpreter_of, table_of, train

ROOT = Path(__file__).resolve().parents[1]

# A script that learns nothing: its actor is one layer whose bias is the number of updates.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import numpy as np
from exchange import Exchange

class Parameter:
    def __init__(self, value):
        self.value = value
    def detach(self):
        return self
    def numpy(self):
        return np.array(self.value)

exchange, updates = Exchange(), 0
print("no message")
exchange.ready()
while not exchange.stops(1000 * updates, [Parameter([[1.0]]), Parameter([float(updates)])]):
    updates += 1
    if exchange.variant == "fails" and updates == 2:
        raise OSError("the disk is full")
"""


def test_evaluation_is_a_plain_loop_over_the_reference_envs() -> None:
    rng = np.random.default_rng(0)
    layers = [rng.standard_normal(shape).astype(np.float32) for shape in ((8, 18), (8,), (5, 8), (5,))]
    returns = []
    for seed in marlvec.env_seeds(1_000_000, 3):
        env = simple_spread_v3.parallel_env()
        obs, _ = env.reset(seed=seed)
        total = 0.0
        while env.agents:
            logits = {
                agent: layers[2] @ np.tanh(layers[0] @ each + layers[1]) + layers[3] for agent, each in obs.items()
            }
            obs, rewards, _, _, _ = env.step({agent: int(each.argmax()) for agent, each in logits.items()})
            total += sum(rewards.values())
        returns.append(total)
    evaluate = Evaluator(3)
    assert evaluate(layers) == pytest.approx(np.mean(returns), rel=1e-6)
    assert evaluate(layers) == evaluate(layers)  # the same first states again
    evaluate.close()


@pytest.mark.parametrize(
    ("goal", "bounds", "env_steps", "reached"),
    [(-57.0, (9_000, 60.0), 3_000, True), (-40.0, (5_000, 60.0), 5_000, False), (-40.0, (9_000, 0.0), 0, False)],
    ids=["the goal", "env steps", "processor time"],
)
def test_training_ends_at(
    goal: float,
    bounds: tuple[int, float],
    env_steps: int,
    reached: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, notes = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    monkeypatch.setitem(time_to_train.CONTESTANTS, "stub", Contestant(str(script), ()))

    def evaluate(layers: list[np.ndarray]) -> float:
        return float(-60 + layers[1][0])

    training = train("stub", sys.executable, 7, goal, bounds, evaluate, lambda *found: notes.append(found))
    assert (training.name, training.seed, training.env_steps, training.reached) == ("stub", 7, env_steps, reached)
    assert training.team_return == -60 + env_steps / 1000
    assert notes == [(steps, -60 + steps / 1000) for steps in range(0, env_steps + 1, 1000)]
    assert 0 < training.start_up <= training.processor


def test_script_that_fails_is_an_error_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setitem(time_to_train.CONTESTANTS, "stub", Contestant(str(script), (), "fails"))
    with pytest.raises(RuntimeError, match="stub ended before it was trained: OSError: the disk is full"):
        train("stub", sys.executable, 0, 0.0, (9_000, 60.0), lambda layers: -60.0, lambda *found: None)


def test_interpreter_has_all_modules_or_is_not_taken() -> None:
    assert interpreter_of(Contestant("", ("marlvec", "numpy")), [sys.executable]) == sys.executable
    assert interpreter_of(Contestant("", ("marlvec", "no_such_module")), [sys.executable]) is None


def test_lines_are_those_with_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        '"""What it is.\n\nMore."""\n\n# why\ndef f(\n    x,\n):\n    """Return."""\n    return "a" """b\n"""\n'
    )
    assert code_lines(script) == 5


@pytest.mark.time_limit(600)
@pytest.mark.slow("imports torch twice and learns from a batch of Python envs")
def test_compiled_and_python_envs_are_one_training(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    names = ["marlvec, compiled envs", "marlvec, Python envs"]
    command = [sys.executable, "benchmarks/time_to_train.py", "--seeds", "3", "--max-steps", "3200", "--episodes", "4"]
    command += ["--goal", "0", "--json", str(path), "--only", *names, "RLlib, new stack"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = [time_to_train.Training(**json.loads(line)) for line in path.read_text().splitlines()]
    compiled, python = (training for training in found if training.name in names)
    assert (compiled.name, python.name) == tuple(names)
    assert compiled.env_steps == python.env_steps == 3200
    assert compiled.team_return == python.team_return
    assert table_of(found).row_count == len(found)
    assert "0 of 1" in result.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # nothing is left to do
    assert again.stdout.splitlines()[-5:] == result.stdout.splitlines()[-5:]
    assert len(path.read_text().splitlines()) == len(found)
