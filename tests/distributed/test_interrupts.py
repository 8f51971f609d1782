"""Ctrl-C at the lines of the head, one after the other: the next call goes on, each row comes once, and all is counted.

At some lines here, at every single one in the soak. What runs beside the envs is another process's, and not looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec.distributed
from marlvec.distributed import Collectors
from tests.distributed.helpers import MANY, Shift, check_metrics, check_rows, plain
from tests.tracer import Tracer

HERE = str(Path(marlvec.distributed.__file__).parent)
ELSEWHERE = tuple(f"{HERE}/{name}" for name in ("server", "engine.py"))
CHAINS: Any = {"agent_connectors": [], "action_connectors": []}


def publish(many: Collectors) -> None:
    many.set_weights({"main": {"shift": np.array([float(many.version + 1)])}})


def die(many: Collectors) -> None:
    many._group.collectors[1].handle.is_gone = True


CALLS: dict[str, tuple[Callable[[Collectors], Any], Callable[[Collectors], Any]]] = {
    "collect": (lambda many: None, lambda many: many.collect(env_steps=12)),
    "die": (die, lambda many: many.collect(env_steps=12)),
    "grow": (lambda many: None, lambda many: many.resize(3)),
    "shrink": (lambda many: None, lambda many: many.resize(1)),
    "add": (lambda many: None, lambda many: many.add_policy("b", Shift(), **CHAINS)),
    "remove": (lambda many: many.add_policy("b", Shift(), **CHAINS), lambda many: many.remove_policy("b")),
    "state": (lambda many: None, lambda many: many.get_state()),
}
"""What is done before, and the call in which Ctrl-C comes."""


def interrupted(name: str, sync: bool, number: int, on_fault: Any = "restart") -> int:
    """Interrupt a call at a line of it, and go on; returns how many lines it lacks to have so many."""
    before, call = CALLS[name]
    options: Any = {"sync": sync, "fragment": None if sync else 6, "on_fault": on_fault, "max_restarts": MANY}
    with Collectors(plain, 2, "sync", seed=0, window=1000, **options) as many:
        batches = [many.collect(env_steps=12)]
        publish(many)
        batches.append(many.collect(env_steps=12))
        before(many)
        tracer = Tracer((HERE,), number, but=ELSEWHERE, everywhere=True)
        try:
            with tracer:
                call(many)
        except KeyboardInterrupt:
            pass
        else:
            assert tracer.left > 0, f"nobody heard of Ctrl-C at {tracer.place}"
            return tracer.left
        try:
            if name == "add" and "b" in many.policies:
                publish(many)  # it was added
            elif not (name == "remove" and "b" not in many.policies) and name not in ("collect", "die"):
                call(many)
            told = sum(batch.env_steps for batch in batches)
            lost = many.accounting.delivered - told  # by Ctrl-C in the last line of collect()
            for _ in range(4):
                batches.append(many.collect(env_steps=12))
                publish(many)
            assert lost in (0, 12)
            if not lost:
                check_rows(batches)
                check_metrics(many, batches)
            for rows in (batch["main"] for batch in batches):
                np.testing.assert_array_equal(rows.weight, rows.policy_version)
            sums = many.accounting
            assert sums.delivered == sum(batch.env_steps for batch in batches) + lost
            assert sums.refused == 0
            assert sums.restarts <= (name == "die")
            assert len(many.places) == {"grow": 3, "shrink": 1}.get(name, 2), "Ctrl-C costs no collector"
        except BaseException as error:
            error.add_note(f"after Ctrl-C at line {number}: {tracer.place}")
            raise
        return 0


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", list(CALLS))
def test_at_some_lines(name: str, sync: bool) -> None:
    lines = 10**6 - interrupted(name, sync, 10**6)
    assert lines > 10
    for number in random.Random(f"{name} {sync}").sample(range(1, lines + 1), 8):
        interrupted(name, sync, number)


@pytest.mark.parametrize("on_fault", ["restart", "mask"])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.soak
@pytest.mark.time_limit(3600)
def test_at_every_line(name: str, sync: bool, on_fault: Any) -> None:
    if (name, on_fault) == ("die", "mask"):
        pytest.skip("one that died stays away")
    number = 1
    while not interrupted(name, sync, number, on_fault):
        number += 1
