"""Scenarios on a real Ray: `python -m tests.distributed.ray_scenarios NAME [NUMBER]`, each in a process of its own.

A test runs this as a program, and looks afterwards whether a process is left: a cluster that lived for several tests
would hide what one of them leaves behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
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
from marlvec.distributed.ray_engine import fetch
from marlvec.errors import CollectorDied, CollectorTimeout, StateError
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import ScriptedParallelEnv
from tests.distributed.helpers import Shift, check_metrics, check_rows, envs_of, learning, named_by, plain, same_batch
from tests.waiting import until

MANY = marlvec.RestartLimit(10_000, backoff=0.01)


def here(scenario: Any) -> None:
    """Run a scenario in a cluster on this machine."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    try:
        scenario()
    finally:
        ray.shutdown()


def same_numbers() -> None:
    """To the bit those of the sync backend, with statistics, exploration, two policies, and new weights."""
    for kind in ("python", "turns"):
        build = partial(learning, kind=kind)
        with Collectors(build, 2, "ray", seed=3) as one, Collectors(build, 2, "sync", seed=3) as other:
            for k in range(4):
                same_batch(one.collect(env_steps=31), other.collect(env_steps=31))
                weights = {"a": {"shift": np.array([k + 2.0])}}
                assert one.set_weights(weights) == other.set_weights(weights)
            assert one.metrics.returns == other.metrics.returns
            assert one.accounting == other.accounting
            assert all(pid not in (None, os.getpid()) for pid in one.pids)


def policies() -> None:
    """They come, go, and are trained or not, to the bit as on the sync backend; one that dies has them, too."""
    options: Any = {"seed": 3, "window": 1000}
    with Collectors(learning, 2, "ray", **options) as one, Collectors(learning, 2, "sync", **options) as other:
        for k in range(8):
            batches = []
            for many in (one, other):
                if k == 1:
                    many.add_policy("old", Shift(3.0), like="a", frozen=True)
                    many.add_policy("c", Shift(4.0), like="b", policy_mapping=named_by(["a", "b", "c", "old"]))
                if k == 3:
                    many.policies_to_train = lambda policy_id: policy_id != "b"
                    many.set_weights({"c": {"shift": np.array([9.0])}})
                if k == 4:
                    many.remove_policy("old", policy_mapping=named_by(["a", "c"]))
                    many.remove_policy("c", policy_mapping=named_by(["a", "b"]))
                if k == 5:
                    many.resize(3)
                batches.append(many.collect(env_steps=31))
            same_batch(*batches)
            assert one.accounting == other.accounting
    build = partial(plain, policy_mapping=named_by(["main"]))
    with Collectors(build, 2, "ray", sync=False, fragment=12, max_restarts=MANY, **options) as many:
        batches = [many.collect(env_steps=24)]
        chains: Any = {"agent_connectors": [], "action_connectors": []}
        many.add_policy("new", Shift(7.0), **chains, policy_mapping=named_by(["new"]))
        for pid in many.pids:
            os.kill(pid or 0, signal.SIGKILL)
        batches += [many.collect(env_steps=24) for _ in range(5)]
        assert set(batches[-1]) == {"new"}
        assert many.accounting.restarts == 2
        check_metrics(many, batches)


def versions(number: int = 1000) -> None:
    """So many versions of weights of 1 MB, five times what the store holds: old ones are freed."""

    def build(place: Place) -> Collector:
        chains: dict[str, Any] = {"agent_connectors": [], "action_connectors": []}
        return Collector(envs_of("parallel", 1, 0), {"main": Wide()}, seed=place.seed, **chains)

    total = ray.cluster_resources()["object_store_memory"]

    def used() -> float:
        return float(total - ray.available_resources().get("object_store_memory", 0.0)) / 1e6

    with Collectors(build, 2, "ray", sync=False, fragment=1, max_policy_lag=1, seed=0) as many:
        most = 0.0
        for version in range(1, number + 1):
            many.collect(env_steps=2)
            many.set_weights({"main": {"shift": np.full(130_000, float(version))}})
            if version % 20 == 0:
                most = max(most, used())
        rows = many.collect(env_steps=2)["main"]
        np.testing.assert_array_equal(rows.weight, rows.policy_version)
        assert 0.9 < most < 60, f"{most} MB in the store"
        small, large = {"shift": np.arange(100.0)}, {"shift": np.arange(130_000.0)}
        for value, is_sent_along in ((small, True), (large, False)):
            stored = many._engine.put(value)
            assert isinstance(stored, bytes) == is_sent_along
            np.testing.assert_array_equal(fetch(stored)["shift"], value["shift"])
        print(f"{number} versions, at most {most:.0f} MB in the store", flush=True)


class Wide(Shift):
    """Shift with weights of 1 MB."""

    def get_weights(self) -> dict[str, Any]:
        return {"shift": np.full(130_000, self.shift[0])}


def free_running() -> None:
    """As fragments come, while the learner learns, with more collectors and fewer."""
    with Collectors(plain, 2, "ray", sync=False, fragment=8, seed=0, window=10_000, max_restarts=MANY) as many:
        batches = []
        for version, number in enumerate((2, 2, 2, 4, 4, 4, 1, 1, 1), 1):
            many.resize(number)
            assert len(many.places) == number
            many.set_weights({"main": {"shift": np.array([float(version)])}})
            batches.append(many.collect(env_steps=16))
            rows = batches[-1]["main"]
            np.testing.assert_array_equal(rows.weight, rows.policy_version)
            check_metrics(many, batches)
        check_rows(batches)
        assert many.accounting.max_lag <= 1
        assert many.accounting.lost == 0
        ids = np.unique(batches[-1]["main"].eps_id).tolist()
        assert {many.place_of(eps_id).index for eps_id in ids} <= {0, 1, 2, 3}


def dying(place: Place, where: str) -> Collector:
    """Ends its process, in its first two incarnations."""
    ends = place.index == 1 and place.incarnation < 2
    if ends and where == "build":
        os._exit(3)
    calls = [0]

    def act(rows: Any) -> Any:
        calls[0] += 1
        if ends and calls[0] == 9:
            if where == "act":
                os._exit(3)
            if where == "raise":
                raise ZeroDivisionError("ninth")
            if where == "hang":
                time.sleep(3600)
        actions = np.zeros(len(rows), np.int64)
        if where != "unsent":
            return actions
        things = np.full(len(rows), None)
        if ends and calls[0] == 9:
            things[:] = [threading.Lock() for _ in range(len(rows))]
        return actions, {"things": things}

    return Collector(envs_of("parallel", 2, 0), FunctionPolicy(act), seed=place.seed, agent_connectors=[])


def faults() -> None:
    """A death while it is built, and in code of the user's, each twice in a row; a hang; what is raised, or lost."""
    reasons = {"build": None, "act": "died", "hang": "timeout", "raise": "raised", "unsent": "object_lost"}
    for where, reason in reasons.items():
        build = partial(dying, where=where)
        timeout = 20.0 if where == "hang" else 60.0  # to build one, too
        with Collectors(build, 2, "ray", seed=0, window=1000, timeout=timeout, max_restarts=MANY) as many:
            batches = []
            while len(batches) < 6:
                try:
                    batches.append(many.collect(env_steps=24))
                except ZeroDivisionError as error:
                    assert where == "raise"
                    assert "in act" in "".join(error.__notes__)
                except TypeError as error:
                    assert where == "unsent"
                    assert "lock" in str(error)
                check_metrics(many, batches)
            check_rows(batches)
            assert {batch.env_steps for batch in batches} == {24}
            assert many.accounting.lost_by == ({} if reason is None else {reason: 1 if where == "raise" else 2})
            assert many.accounting.restarts >= (0 if where == "raise" else 2)
    try:
        Collectors(_refuses, 2, "ray")
    except KeyError as error:
        assert "in build(Place(index=0" in "".join(error.__notes__)
    else:
        raise AssertionError("what build raises comes out")


def _refuses(place: Place) -> Collector:
    raise KeyError("no such thing")


def patience(number: int) -> float:
    """After how many seconds a collector counts as hung: far more than it takes to begin here, as busy as it is now."""
    began = time.monotonic()
    with Collectors(plain, number, "ray", seed=0, timeout=math.inf) as many:
        many.collect(env_steps=24)
        return max(8.0, 3 * (time.monotonic() - began))


def stopped() -> None:
    """By SIGSTOP and SIGKILL, with the three words of on_fault."""
    timeout = patience(3)
    for on_fault in ("restart", "raise", "mask"):
        options: Any = {"on_fault": on_fault, "timeout": timeout, "window": 1000, "max_restarts": MANY}
        with Collectors(plain, 3, "ray", seed=0, **options) as many:
            batches = [many.collect(env_steps=24)]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                pid = next(pid for pid in many.pids if pid is not None)
                os.kill(pid, number)
                while True:
                    try:
                        batches.append(many.collect(env_steps=24))
                        break
                    except CollectorDied as error:
                        assert on_fault == "raise"
                        assert isinstance(error, CollectorTimeout) == (number == signal.SIGSTOP)
                check_metrics(many, batches)
            check_rows(batches)
            assert set(many.accounting.lost_by) == {"timeout", "died"}
            assert len(many.places) == (1 if on_fault == "mask" else 3)


def kills(number: int = 15) -> None:
    """So many deaths, seeded, at any moment, by SIGKILL and now and then SIGSTOP."""
    rng, done, halt = random.Random(number), [0], threading.Event()
    options: Any = {"sync": False, "fragment": 16, "timeout": patience(2), "max_restarts": MANY, "window": 1_000_000}
    with Collectors(plain, 2, "ray", seed=1, **options) as many:

        def kill() -> None:
            while many.accounting.restarts < number and not halt.wait(rng.random() * 0.6):
                pids = [pid for pid in many.pids if pid is not None]
                for pid in rng.sample(pids, min(len(pids), rng.choice((1, 1, 1, 2)))):
                    with contextlib.suppress(ProcessLookupError):  # killed already, and nobody has noticed yet
                        os.kill(pid, signal.SIGSTOP if rng.random() < 0.1 else signal.SIGKILL)
                        done[0] += 1

        killer = threading.Thread(target=kill)
        killer.start()
        batches = []
        try:
            while killer.is_alive() or len(batches) < 5:
                batches.append(many.collect(env_steps=32))
                assert batches[-1].env_steps == 32
                many.set_weights({"main": {"shift": np.array([float(many.version + 1)])}})
                sums = many.accounting
                assert sums.requested == sums.delivered + sums.lost + sums.outstanding
                rows = batches[-1]["main"]
                np.testing.assert_array_equal(rows.weight, rows.policy_version)
        finally:
            halt.set()
            killer.join()
        found = check_rows(batches)
        check_metrics(many, batches)
        assert many.accounting.max_lag <= 1
        assert many.accounting.refused == 0
        print(f"{done[0]} signals, {len(batches)} batches, {len(found)} trajectories: {many.accounting}", flush=True)


def wide(place: Place) -> Collector:
    """Answers of 20 MB."""

    def act(rows: Any) -> Any:
        return np.zeros(len(rows), np.int64), {"wide": np.zeros((len(rows), 40_000))}

    return Collector(envs_of("parallel", 2, 0), FunctionPolicy(act), seed=place.seed, agent_connectors=[])


def far(place: Place) -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {"far" if place.index else "near": 1}}


def nodes() -> None:
    """Two on this machine; the second is removed while a large answer lies in its store, then another one comes."""
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 300_000_000, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "resources": {"near": 4}})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        for on_fault in ("restart", "mask"):
            node = cluster.add_node(**size, resources={"far": 4})
            options: Any = {"sync": False, "fragment": 32, "on_fault": on_fault, "remote_args": far, "timeout": 120}
            with Collectors(wide, 2, "ray", seed=0, window=1000, **options) as many:
                batches = [many.collect(env_steps=64)]
                time.sleep(2.0)  # what was asked for ahead is made, and lies in the node's store
                cluster.remove_node(node)
                if on_fault == "restart":
                    node = cluster.add_node(**size, resources={"far": 4})
                left = 2 if on_fault == "restart" else 1
                # A worker whose node is gone may answer for a moment yet, and the other collector goes on alone.
                while len(batches) < 5 or not many.accounting.lost or len(many.places) != left:
                    batches.append(many.collect(env_steps=64))
                    check_metrics(many, batches)
                    time.sleep(0.0 if len(batches) < 5 else 0.2)
                check_rows(batches)
                print(many.accounting, flush=True)
            if on_fault == "restart":
                cluster.remove_node(node)
    finally:
        ray.shutdown()
        cluster.shutdown()


def beside(is_joined: bool) -> None:
    """`Collectors` without ray.init() before it, where a cluster runs on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"object_store_memory": 100_000_000, "num_cpus": 2})
    try:
        if is_joined:
            os.environ["RAY_ADDRESS"] = cluster.address
        with Collectors(plain, 2, "ray", seed=0, timeout=120) as many:
            many.collect(env_steps=20)
            assert (ray.get_runtime_context().gcs_address == cluster.address) == is_joined
            if is_joined:  # each collector takes a CPU, which is what places it
                until(lambda: ray.available_resources().get("CPU", 0.0) == 0.0)
            else:
                assert ray.available_resources()["CPU"] > 0.0
                with Collectors(plain, 3, "ray", seed=0, timeout=120) as more:  # on the same one, which the last ends
                    more.collect(env_steps=20)
                    many.close()
                    more.collect(env_steps=20)
        assert not ray.is_initialized()
        with Collectors(plain, 1, "ray", seed=0, timeout=math.inf) as many:
            many.collect(env_steps=4)
            ray.shutdown()
            try:
                many.collect(env_steps=4)
            except StateError as error:
                assert "connection to Ray" in str(error)
            else:
                raise AssertionError("Ray must not connect to another cluster by itself")
            assert not ray.is_initialized()
    finally:
        cluster.shutdown()


def own_cluster() -> None:
    """It has one of its own, whatever else runs on the machine."""
    beside(is_joined=False)


def joined_cluster() -> None:
    """It has that of RAY_ADDRESS, as `ray job submit` sets it."""
    beside(is_joined=True)


def main(scenarios: Mapping[str, Any], own_cluster: Collection[str]) -> None:
    """Run the scenario that the command line names, in a cluster on this machine unless it has one of its own.

    After SCENARIO_SECONDS it says in which line each thread is, and ends.
    """
    name, *numbers = sys.argv[1:]
    faulthandler.dump_traceback_later(float(os.environ.get("SCENARIO_SECONDS", "86400")), exit=True)
    scenario = partial(scenarios[name], *map(int, numbers))
    scenario() if name in own_cluster else here(scenario)
    print("done", flush=True)


# --- deaths at a chosen moment, and from within
# (What is killed above dies from outside, at random.)


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
    main(globals(), ("nodes", "own_cluster", "joined_cluster", "weights", "out_of_memory"))
