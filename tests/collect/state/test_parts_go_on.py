"""What a collector's state has beside rows: evaluations, generators, loggers; and that all of it is plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import Collector
from marlvec.collect.loggers import JSONLinesLogger
from marlvec.connectors.agent import AgentPipeline, FrameStack, NormalizeObs
from marlvec.errors import ArgumentError
from marlvec.policies import RandomPolicy
from tests.collect.state.saved import batches_of, goes_on_alike
from tests.collect.state.test_exact_resume import Plan
from tests.vector.support.kinds import vectorize, walks
from tests.vector.test_saved_states import same

LATER = [{"env_steps": 13}, {"episodes": 4}]


def make(**options: Any) -> Collector:
    return Collector(
        vectorize("sync", walks("parallel", 3)), options.pop("policies", RandomPolicy()), seed=6, **options
    )


def test_evaluations_have_the_seeds_that_they_would_have_had(tmp_path: Path) -> None:
    def evaluated(collector: Collector) -> list[Any]:
        with vectorize("sync", walks("parallel", 2)) as others:
            found = [collector.evaluate(4, others, explore=True) for _ in range(2)]
        return [[(one.eps_id, one.episode_return, one.length) for one in each.episodes] for each in found]

    collector, other = make(), make()
    with collector.envs, other.envs:
        batches_of(collector, LATER)
        first = evaluated(collector)
        collector.save(tmp_path / "one.npz")
        want = evaluated(collector)
        other.load(tmp_path / "one.npz")
        assert evaluated(other) == want != first
        same(batches_of(other, LATER), batches_of(collector, LATER))


def test_resumed_torch_policy_draws_the_same_actions(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from marlvec.interop.torch import TorchPolicy

    def build() -> Collector:
        torch.manual_seed(0)
        return make(policies=TorchPolicy(torch.nn.Linear(6, 3)))

    goes_on_alike(build, tmp_path, [{"env_steps": 40}], LATER)


def test_a_logger_writes_the_lines_that_it_would_have_written(tmp_path: Path) -> None:
    def lines(path: Path, *, saved: Path | None = None) -> list[Any]:
        with JSONLinesLogger(path) as logger:
            collector = make(callbacks=[logger])
            with collector.envs:
                if saved is None:
                    batches_of(collector, LATER)
                    collector.save(tmp_path / "one.npz")
                else:
                    collector.load(saved)
                batches_of(collector, LATER)
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in ("duration", "time")} for line in found]

    want = lines(tmp_path / "log.jsonl")
    assert lines(tmp_path / "log.jsonl", saved=tmp_path / "one.npz") == want, "those after the state were cut off"
    assert len(want) > 8


def plain(value: Any, where: str = "state") -> None:
    """Fails where there is anything but numbers, texts, None and arrays of them, in dicts, lists and tuples."""
    if type(value) is dict:
        for key, part in value.items():
            assert type(key) in (str, int), f"{where}: {key!r}"
            plain(part, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for k, part in enumerate(value):
            plain(part, f"{where}[{k}]")
    elif type(value) is np.ndarray:
        assert value.dtype.kind in "biufUS", f"{where}: {value.dtype}"
    else:
        assert value is None or type(value) in (bool, int, float, str), f"{where}: {value!r}"


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=6)
@pytest.mark.parametrize("kind", ["parallel", "turns", "single"])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_all_of_it_is_plain_data_and_nothing_in_the_file_is_a_pickle(
    kind: str, batch_mode: str, tmp_path: Path
) -> None:
    collector = Plan(kind, batch_mode=batch_mode, policies="by lot", connectors="memory", follows=True).make()
    with collector.envs:
        batches_of(collector, [{"env_steps": 50}])
        plain(collector.get_state())
        collector.save(tmp_path / "one.npz")
    with np.load(tmp_path / "one.npz", allow_pickle=False) as file:
        assert len([file[name] for name in file.files]) > 5


def test_another_setting_of_a_connector_is_named() -> None:
    def stacked(k: int) -> Collector:
        return make(agent_connectors=AgentPipeline([NormalizeObs(), FrameStack(k)]))

    one, other = stacked(2), stacked(3)
    with one.envs, other.envs:
        batches_of(one, LATER)
        with pytest.raises(ArgumentError) as caught:
            other.set_state(one.get_state())
        said = str(caught.value)
        assert said.startswith("set_state(): the state is of another collector. connectors:")
        changed = [
            line.strip(" +-,") for line in said.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ]
        assert sorted(changed) == ['"k": 2', '"k": 3']
