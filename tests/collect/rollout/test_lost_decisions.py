"""Every decision is in one batch or counts as lost: recounted from what policies were asked and what batches hold."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.errors import EnvFault, StateError
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.mortal import DEATHS, Deaths, mortals
from tests.collect.helpers.plans import BATCH_MODES, FEW_OR_MANY, for_examples
from tests.collect.helpers.players import MODES, EchoPolicy

Key = tuple[int, int, int]  # episode, agent, its turn

TURNS = ("turns", "masked turns", "late turns", "keyed", "keyed, no last obs")


class Recounting(EchoPolicy):
    """Keeps what it was asked."""

    def __init__(self, salt: int) -> None:
        super().__init__(salt)
        self.decided: Counter[Key] = Counter()

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        self.decided.update(keys_of(rows))
        return super().act(rows, explore=explore)


def keys_of(rows: Any) -> list[Key]:
    return list(zip(*(rows[name].tolist() for name in ("eps_id", "agent_index", "t")), strict=True))


def by_number(name: str, episode: Any) -> str:
    return "ab"[(episode.number + int(name[-1])) % 2]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of envs die here, and each is a warning."""
    log = logging.getLogger("marlvec")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.mark.slow("collects whole runs on several backends")
@FEW_OR_MANY
def test_decisions_of_lost_episodes_are_all_counted(tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    deaths: Deaths = {(0, 0): ("step", 4, False), (1, 0): ("step", 7, False)}
    calls = [("env_steps", 7), ("env_steps", 7), ("reset", 1), ("agent_steps", 5), ("reset", 1)]
    for on_fault in ("restart", "mask", "raise"):
        for batch_mode in BATCH_MODES:
            recount(tmp_path_factory, "turns", "same_step", 3, on_fault, batch_mode, deaths, False, calls)
    deaths = {(0, 0): ("step", 0, True), (0, 1): ("reset", 2, False)}  # one ends in the tick in which another fails
    calls = [("episodes", 2), ("episodes", 3)]
    recount(tmp_path_factory, "turns", "next_step", 2, "raise", "truncate", deaths, False, calls)
    units = st.sampled_from(["env_steps", "agent_steps", "episodes", "reset"])
    for_examples(
        examples,
        partial(recount, tmp_path_factory),
        kind=st.sampled_from(TURNS),
        mode=st.sampled_from(MODES),
        agent_num=st.integers(2, 4),
        on_fault=st.sampled_from(["restart", "mask", "raise", "raise"]),
        batch_mode=st.sampled_from(BATCH_MODES),
        deaths=DEATHS,
        overlap=st.booleans(),
        calls=st.lists(st.tuples(units, st.integers(1, 12)), min_size=2, max_size=7),
    )


def recount(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    mode: str,
    agent_num: int,
    on_fault: str,
    batch_mode: Any,
    deaths: Deaths,
    overlap: bool,
    calls: list[tuple[Any, int]],
) -> None:
    marks: Path = tmp_path_factory.mktemp("marks")
    policies = {"a": Recounting(0), "b": Recounting(1)}
    held: Counter[Key] = Counter()
    over: set[int] = set()  # lost, or ended, perhaps in a tick that was not finished
    callback_list = {
        "on_episode_lost": lambda episode, why: over.add(episode.eps_id),
        "on_episode_end": lambda episode, record: over.add(episode.eps_id),
    }
    options = {"autoreset_mode": mode, "on_fault": on_fault}
    with SyncVectorEnv(mortals(kind, 3, agent_num, deaths, marks), **options) as envs:
        collector = Collector(
            envs, policies, by_number, batch_mode=batch_mode, seed=0, overlap=overlap, callbacks=[callback_list]
        )
        try:
            for call, amount in calls:
                try:
                    if call == "reset":
                        collector.reset()
                    else:
                        for rows in collector.collect(**{call: amount}).values():
                            held.update(keys_of(rows))
                except EnvFault:
                    collector.reset()
            collector.reset()
        except (StateError, EnvFault):
            return  # all envs are out, or one does not even begin: nothing more is collected here
        decided = policies["a"].decided + policies["b"].decided
        assert max(held.values(), default=1) == max(decided.values(), default=1) == 1
        assert held <= decided
        metrics = collector.metrics
        assert metrics.agent_steps == decided.total()
        assert metrics.agent_steps_lost == (decided - held).total()
        if batch_mode == "truncate":
            assert {eps_id for eps_id, _, _ in decided - held} <= over
