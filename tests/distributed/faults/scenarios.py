"""Faults on a real Ray: `python -m tests.distributed.faults.scenarios NAME [NUMBER]`, each in a process of its own.

What `tests.distributed.ray_scenarios` kills from outside, at random, dies here at a chosen moment, and from within.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import NormalizeObs
from marlvec.connectors.connector import State
from marlvec.distributed import Collectors, Place
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import ScriptedParallelEnv
from tests.distributed.helpers import Shift, check_metrics, check_rows, envs_of, plain
from tests.distributed.ray_scenarios import MANY, far, main, wide


def _collect(many: Collectors, batches: list[Any], env_steps: int, *expected: type[BaseException]) -> None:
    """One batch more, however often these are raised before; accounting balances after each call."""
    while True:
        try:
            batches.append(many.collect(env_steps=env_steps))
            break
        except expected:
            check_metrics(many, batches)
    assert batches[-1].env_steps == env_steps
    check_metrics(many, batches)


class ExitingEnv(ScriptedParallelEnv):
    """Ends the process it is in at its n-th step, as a crash in a simulator's C code does."""

    def __init__(self, exits_at: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.exits_at, self.steps = exits_at, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.steps == self.exits_at:
            os._exit(3)
        return super().step(actions)


def with_exiting_env(place: Place, backend: Any) -> Collector:
    """In the first two incarnations of the second collector one env of two ends its process."""
    exits = place.index == 1 and place.incarnation < 2
    makers: Any = [
        partial(ExitingEnv, 7 if exits and i == 1 else None, agent_num=2, env_index=i, longest=6) for i in range(2)
    ]
    on_fault: Any = "raise" if backend == "sync" else "restart"
    envs = marlvec.make(makers, 2, backend=backend, on_fault=on_fault, max_restarts=MANY)
    return Collector(envs, Shift(), seed=place.seed, agent_connectors=[], action_connectors=[])


def exiting_env() -> None:
    """`os._exit` in an env: beside the collector it costs the collector, in a worker of its own that worker alone."""
    for backend, sync in (("sync", True), ("sync", False), ("async", True)):
        options: Any = {"sync": sync, "window": 10_000, "max_restarts": MANY}
        with Collectors(partial(with_exiting_env, backend=backend), 2, "ray", seed=0, **options) as many:
            batches: list[Any] = []
            deaths = 2 if backend == "sync" else 0
            while len(batches) < 8 or many.accounting.restarts < deaths:
                _collect(many, batches, 24)
                time.sleep(0.0 if len(batches) < 8 else 0.2)  # not in `sync`: the other one goes on alone meanwhile
            check_rows(batches)
            sums = many.accounting
            print(backend, sync, sums, flush=True)
            assert sums.restarts == deaths
            assert set(sums.lost_by) - {"after_a_loss"} == ({"died"} if backend == "sync" else set())


class ExitingNormalizeObs(NormalizeObs):
    """Ends its process while a round of merging is on, the first time that it gets so far."""

    exits: str | None = None

    def hand_over(self) -> State:
        if self.exits == "before":
            os._exit(3)
        return super().hand_over()

    def take_merged(self, state: Mapping[str, Any]) -> None:
        if self.exits == "after":
            os._exit(3)
        super().take_merged(state)

    def __call__(self, rows: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.exits == "between" and self.calls == 30:
            os._exit(3)
        return super().__call__(rows)


def with_exiting_connector(place: Place, where: str) -> Collector:
    """The second collector's statistics end its process, in its first two incarnations."""
    connector = ExitingNormalizeObs()
    # One that is restarted after the first round takes what is merged while it is built; it is to die there once.
    connector.exits = where if place.index == 1 and place.incarnation < (1 if where == "after" else 2) else None
    chains: Any = {"agent_connectors": [connector], "action_connectors": []}
    return Collector(envs_of("python", 2, place.seed), Shift(), seed=place.seed, **chains)


def merging() -> None:
    """A death while statistics are merged: before they are handed over, between two rounds, and when they come back."""
    for where in ("before", "between", "after"):
        for sync in (True, False):
            options: Any = {"sync": sync, "window": 10_000, "max_restarts": MANY}
            with Collectors(partial(with_exiting_connector, where=where), 2, "ray", seed=0, **options) as many:
                batches: list[Any] = []
                deaths = 1 if where == "after" else 2
                while len(batches) < 10 or many.accounting.restarts < deaths:
                    _collect(many, batches, 28)
                    time.sleep(0.0 if len(batches) < 10 else 0.2)  # likewise
                # All that a dead one had seen was merged before; rounds wait until it is restarted, and catch up.
                while where == "after" and _merged(many) < _rows(batches) - 3 * 28 * 2 and len(batches) < 50:
                    _collect(many, batches, 28)
                    time.sleep(0.2)
                check_rows(batches)
                sums, count, rows = many.accounting, _merged(many), _rows(batches)
                assert sums.restarts == deaths
                # Of each episode one observation more than decisions; and what was on the head, or on its way.
                most = rows + 3 * 2 * (28 // 7 + 4) * len(batches) + 3 * (sums.outstanding + sums.lost)
                print(where, sync, count, rows, most, sums, flush=True)
                assert 0 < count <= most
                if where == "after":
                    assert count >= rows - 3 * 28 * 2


def _merged(many: Collectors) -> int:
    """How many rows the merged statistics are of."""
    state: Any = many._rounds.merged
    return int(state["main"][0]["ExitingNormalizeObs"]["moments"][""]["count"].item())


def _rows(batches: Sequence[Any]) -> int:
    return sum(len(batch["main"]) for batch in batches)


def weights() -> None:
    """A node is removed while it fetches 120 MB of weights; what comes after has them."""
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 700_000_000, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "resources": {"near": 4}})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        node = cluster.add_node(**size, resources={"far": 4})
        options: Any = {"remote_args": far, "timeout": 120, "window": 1000, "max_restarts": MANY}
        with Collectors(plain, 2, "ray", seed=0, **options) as many:
            batches = [many.collect(env_steps=24)]
            for deaths, seconds in ((1, 0.05), (2, 0.2)):
                another = cluster.add_node(**size, resources={"far": 4})
                heavy = np.full(15_000_000, float(many.version + 1))
                many.set_weights({"main": {"shift": heavy[:1], "heavy": heavy}})
                remover = threading.Timer(seconds, cluster.remove_node, (node,), {"allow_graceful": False})
                remover.start()
                _collect(many, batches, 24)
                remover.join()
                begin = len(batches) - 1
                # A worker whose node is gone may answer for a moment yet.
                while len(batches) < begin + 2 or many.accounting.restarts < deaths:
                    _collect(many, batches, 24)
                    time.sleep(0.1)
                node = another
                for batch in batches[begin:]:
                    np.testing.assert_array_equal(batch["main"].weight, batch["main"].policy_version)
            check_rows(batches)
            print(many.accounting, flush=True)
            assert many.accounting.restarts >= 2  # more where the cluster puts one onto the node that is going
    finally:
        ray.shutdown()
        cluster.shutdown()


def large_answers(number: int = 6) -> None:
    """Killed again and again while an answer of 20 MB is made and written."""
    rng, halt = random.Random(number), threading.Event()
    options: Any = {"sync": False, "fragment": 32, "max_restarts": MANY, "window": 1_000_000}
    with Collectors(wide, 2, "ray", seed=1, **options) as many:

        def kill() -> None:
            while many.accounting.restarts < number and not halt.wait(0.05 + rng.random() * 0.3):
                pids = [pid for pid in many.pids if pid is not None]
                for pid in rng.sample(pids, min(len(pids), rng.choice((1, 1, 2)))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        batches: list[Any] = []
        try:
            while killer.is_alive() or len(batches) < 4:
                _collect(many, batches, 64)
                batches[-1] = {name: own.drop("wide") for name, own in batches[-1].items()}  # there is no room for it
        finally:
            halt.set()
            killer.join()
        check_rows(batches)
        print(len(batches), many.accounting, flush=True)


def tree_of(pids: Sequence[int]) -> set[int]:
    """These processes and all they have started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def with_workers(place: Place) -> Collector:
    """Envs in processes of their own."""
    envs = marlvec.make("simple_spread", 2, backend="async", num_workers=2)
    return Collector(envs, Shift(), seed=place.seed, agent_connectors=[], action_connectors=[])


def leaves_nothing() -> None:
    """15 s after `close` no process of a collector is there, nor of its envs, whatever had happened to it before."""
    for number in (None, signal.SIGKILL, signal.SIGSTOP):
        many = Collectors(with_workers, 3, "ray", seed=0, sync=False, fragment=8)
        many.collect(env_steps=24)
        pids = [pid for pid in many.pids if pid is not None]
        ours = tree_of(pids)
        assert len(ours) >= 9
        if number is not None:
            os.kill(pids[1], number)
        many.close()
        deadline = time.monotonic() + 15
        while left := {pid for pid in ours if Path(f"/proc/{pid}").exists()}:
            assert time.monotonic() < deadline, f"after {number}: {left} of {ours} are left"
            time.sleep(0.1)
        assert many.accounting.outstanding == 0
        assert ray.is_initialized()  # it is the caller's
        print(number, len(ours), "gone", flush=True)


def hungry(place: Place) -> Collector:
    """The second collector takes 3 GB once, and is ended for it."""
    kept: list[Any] = []

    def act(rows: Any) -> Any:
        if place.index == 1 and place.incarnation == 0 and len(kept) < 30:
            kept.append(np.ones(12_500_000))
            time.sleep(0.1)
        return np.zeros(len(rows), np.int64)

    return Collector(envs_of("parallel", 2, 0), FunctionPolicy(act), seed=place.seed, agent_connectors=[])


def out_of_memory() -> None:
    """Ray ends a collector that takes more memory than there is."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    used = 1 - meminfo["MemAvailable"] / meminfo["MemTotal"]
    share = used + 1.8e6 / meminfo["MemTotal"]
    config = {"memory_usage_threshold": share, "memory_monitor_refresh_ms": 100}
    ray.init(include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False, _system_config=config)
    try:
        with Collectors(hungry, 2, "ray", seed=0, window=1000, max_restarts=MANY) as many:
            batches: list[Any] = []
            for _ in range(8):
                _collect(many, batches, 24)
            check_rows(batches)
            print(f"{share:.2f}", many.accounting, flush=True)
            assert many.accounting.restarts >= 1
            assert set(many.accounting.lost_by) == {"died"}
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(globals(), ("weights", "out_of_memory"))
