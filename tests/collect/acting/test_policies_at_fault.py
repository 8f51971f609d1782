"""Policies that answer wrongly, late or not at all: nothing reaches an env, and the collector goes on from there."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from marlvec.collect import Collector
from marlvec.connectors import Rows
from marlvec.errors import ActionError, ContractError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import EchoPolicy, sync
from tests.collect.helpers.reference import Reference, check_batch, same_batch
from tests.vector.test_actions import Careless

NUM_ENVS, AGENTS, ROWS = 2, 2, 4
OBS, DISCRETE, BOX = Box(-1, 1, (3,), np.float32), Discrete(5), Box(-1, 1, (2,), np.float32)
PAIR = Dict(a=Discrete(2), b=Discrete(2))


def sampled(action_space: Any, **options: Any) -> SyncVectorEnv:
    factories = [lambda i=i: SampledEnv(OBS, action_space, env_index=i) for i in range(NUM_ENVS)]
    return SyncVectorEnv(factories, validate="strict", **options)


def zeros(space: Any, n: int = ROWS) -> Any:
    if isinstance(space, Dict):
        return {key: zeros(sub, n) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(zeros(sub, n) for sub in space.spaces)
    return np.zeros((n, *space.shape), space.dtype)


class OnDevice:
    """A tensor that numpy cannot read where it lives."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = array.shape

    def __len__(self) -> int:
        return len(self._array)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor on another device to numpy")

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> OnDevice:
        return self

    def numpy(self) -> Any:
        return self._array


ENV_1 = "env 1, agent 'agent_0': "
INT = zeros(DISCRETE)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "above": (DISCRETE, np.array([0, 0, 5, 0]), rf"{ENV_1}5 is not in Discrete\(5\)"),
    "below": (DISCRETE, np.array([0, 0, -1, 0]), f"{ENV_1}-1 is not in"),
    "outside": (BOX, np.array([[0, 0]] * 2 + [[0, 1.5], [0, 0]], np.float32), rf"{ENV_1}.* 1\.5.* is not in Box"),
    "NaN": (BOX, np.full((4, 2), np.nan, np.float32), "NaN, first for env 0, agent 0"),
    "one NaN": (
        BOX,
        np.array([[0, 0]] * 3 + [[0, np.nan]]),
        "gave 'actions_for_env' with NaN, first for env 1, agent 1",
    ),
    "dtype": (DISCRETE, INT + 0.5, "gave 'actions' as float64.*int64"),
    "too few": (DISCRETE, INT[1:], r"was given 4 rows.*shape \(3,\); expected 4 on the"),
    "too many": (DISCRETE, np.repeat(INT, 2), "was given 4 rows"),
    "turned": (DISCRETE, INT[None], r"was given 4 rows.*shape \(1, 4\)"),
    "two choices": (DISCRETE, np.zeros((4, 2), int), r"shape \(4, 2\)"),
    "none": (DISCRETE, None, "returned None; act.. must return the actions"),
    "ragged": (DISCRETE, [[0], [0, 1], [0], [0]], "was given 4 rows"),
    "generator": (DISCRETE, iter([0] * 4), "was given 4 rows"),
    "tuple of 3": (DISCRETE, (INT, {}, {}), "tuple of 3"),
    "short column": (DISCRETE, (INT, {"logp": np.zeros(3)}), r"'logp' of shape \(3,\)"),
    "one number": (DISCRETE, (INT, {"logp": 0.0}), r"'logp' of shape \(\)"),
    "column t": (DISCRETE, (INT, {"t": np.zeros(4)}), r"columns named \['t'\]"),
    "column rewards": (DISCRETE, (INT, {"rewards": np.zeros(4)}), r"columns named \['rewards'\]"),
    "narrow": (BOX, np.zeros((4, 1), np.float32), r"\(4, 1\)"),
    "wide": (BOX, np.zeros((4, 3), np.float32), r"shape \(4, 3\)"),
    "key missing": (PAIR, {"a": INT}, r"expected a dict with keys \['a', 'b'\]"),
    "no tuple": (Tuple((Discrete(2), Discrete(2))), INT, "expected a tuple of length 2"),
}
"""Space, answer, and what is said of it; where the action is in no space, the policy is not named."""
OF_ENVS = ("above", "below", "outside")


class Slipping(Policy):
    """All zeros, but for what it is to give in some of its answers."""

    def __init__(self, space: Any, answer: Any, wrong: range) -> None:
        self.space, self.answer, self.wrong, self.asked = space, answer, wrong, 0

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        self.asked += 1
        return self.answer if self.asked in self.wrong else zeros(self.space, len(rows))


LATE = 1000


@pytest.mark.mostly_slow("a thousand steps", quick=3)
@pytest.mark.fault("E1")
@pytest.mark.fault("E3")
@pytest.mark.parametrize(
    ("name", "at"),
    [(name, 3) for name in WRONG]
    + [
        pytest.param(name, LATE, marks=pytest.mark.slow("a thousand steps"))
        for name in [*OF_ENVS, "NaN", "dtype", "too few"]
    ],
)
def test_a_wrong_answer_is_named_and_reaches_no_env_however_late_it_comes(name: str, at: int) -> None:
    """And the next call goes on: its batch holds what came before, too."""
    space, answer, message = WRONG[name]
    chain = {"action_connectors": []} if name in (*OF_ENVS, "one NaN") else {}  # else they were clipped
    found = []
    for wrong in (range(at, at + 2), range(0)):
        with sampled(space) as envs:
            collector = Collector(envs, {"culprit": Slipping(space, answer, wrong)}, seed=0, **chain)
            collector.collect(env_steps=NUM_ENVS * (at - 2))
            for _ in wrong:
                with pytest.raises(ActionError if name in OF_ENVS else ContractError, match=message) as caught:
                    collector.collect(env_steps=NUM_ENVS * 20)
                assert name in OF_ENVS or "'culprit'" in str(caught.value)
                assert collector.metrics.env_steps == NUM_ENVS * (at - 1)
            found.append(collector.collect(env_steps=NUM_ENVS * 20))
            assert collector.metrics.env_steps == NUM_ENVS * (at + 18)
    same_batch(*found)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.fault("E1")
@pytest.mark.parametrize("name", ["above", "below"])
def test_where_a_sample_of_calls_is_looked_at_it_is_found_within_sixteen(name: str) -> None:
    """As `make(validate=…)` says; what is no matter of values is looked at in every call."""
    space, answer, message = WRONG[name]
    with SyncVectorEnv([lambda i=i: Careless(env_index=i) for i in range(NUM_ENVS)], validate="sample") as envs:
        policy = Slipping(space, answer, range(LATE, 10**9))
        collector = Collector(envs, {"culprit": policy}, action_connectors=[], seed=0)
        with pytest.raises(ActionError, match=message):
            collector.collect(env_steps=NUM_ENVS * (LATE + 50))
        assert LATE <= policy.asked < LATE + 16


@pytest.mark.fault("E3")
def test_tensors_are_brought_from_where_they_live() -> None:
    with sampled(Box(-1, 1, (2,))) as envs:
        column = np.arange(4.0)
        policy = FunctionPolicy(lambda rows: (OnDevice(np.full((4, 2), 0.25, np.float32)), {"logp": OnDevice(column)}))
        rows = Collector(envs, policy, seed=0).collect(env_steps=6)["main"]
        assert rows.actions.dtype == np.float32
        assert (rows.actions == 0.25).all()
        assert rows["logp"].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3


def test_actions_that_wrap_around_are_refused() -> None:
    """By default ClipActions sees to it; without it nobody would notice."""
    with sampled(Box(0, 9, (1,), np.int8)) as envs:
        policy = FunctionPolicy(lambda rows: np.full((len(rows), 1), 257))
        with pytest.raises(ContractError, match="'main'.*do not fit int8"):
            Collector(envs, policy, action_connectors=[]).collect(env_steps=4)
        rows = Collector(envs, policy).collect(env_steps=4)["main"]
        assert (rows["actions"] == 257).all()
        assert (rows["actions_for_env"] == 9).all()


def test_columns_may_not_change_on_the_way() -> None:
    for later in ({}, {"logp": np.zeros(4, np.float32)}, {"logp": np.zeros((4, 1))}, {"value": np.zeros(4)}):
        with sampled(Discrete(5)) as envs:
            columns: list[dict[str, Any]] = [{"logp": np.zeros(4)}]
            policy = FunctionPolicy(lambda rows, columns=columns: (np.zeros(4, int), columns[0]))
            collector = Collector(envs, {"fickle": policy}, seed=0)
            collector.collect(env_steps=4)
            columns[0] = later
            with pytest.raises(ContractError, match="'fickle'.*until now"):
                collector.collect(env_steps=4)
            columns[0] = {"logp": np.ones(4)}
            assert collector.collect(env_steps=4)["fickle"]["logp"].tolist() == [1.0] * 8


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.fault("E4")
@pytest.mark.fault("E11")
@pytest.mark.parametrize("error", [ValueError("no idea"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_policy_error_names_it_and_collecting_continues(kind: str, error: BaseException) -> None:
    class Moody(EchoPolicy):
        tempers = 0

        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            self.tempers += 1
            if self.tempers % 5 == 0:
                raise error
            return super().act(rows, explore=explore)

    with sync(kind, 3, 2) as envs:
        names = {name: ("first", "moody")[a % 2] for a, name in enumerate(envs.agents)}
        collector = Collector(envs, {"first": EchoPolicy(0), "moody": Moody(1)}, names, seed=4)
        reference = Reference(
            kind, 3, 2, 4, mapping=lambda name, env, number: names[name], salts={"first": 0, "moody": 1}
        )
        failures = 0
        for _ in range(4):
            batch = None
            while batch is None:
                try:
                    batch = collector.collect(env_steps=40)
                except type(error):
                    failures += 1
            check_batch(reference, batch, reference.truncate("env_steps", 40))
        assert failures >= 4
        assert all("in policy 'moody'; nothing was sent" in note for note in error.__notes__[-failures:])


@pytest.mark.fault("E4")
@pytest.mark.fault("E11")
def test_a_policy_that_hangs_is_named_when_someone_ends_the_wait_and_nothing_is_lost() -> None:
    """Nobody can tell a slow policy from one that hangs; Ctrl-C ends both."""
    main = threading.get_ident()

    class Stuck(EchoPolicy):
        asked = 0

        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            self.asked += 1
            if self.asked == 5:
                ctrl_c = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
                ctrl_c.start()
                time.sleep(60)
            return super().act(rows, explore=explore)

    with sync("turns", 3, 2) as envs:
        collector = Collector(envs, {"stuck": Stuck(3)}, seed=4)
        reference = Reference("turns", 3, 2, 4, mapping=lambda name, env, number: "stuck", salts={"stuck": 3})
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            collector.collect(env_steps=40)
        assert time.monotonic() - began < 30  # a tenth of a second, as a rule; and sixty that it hangs
        assert caught.value.__notes__[0].startswith("in policy 'stuck'; nothing was sent")
        assert collector.metrics.env_steps == 3 * 4
        check_batch(reference, collector.collect(env_steps=40), reference.truncate("env_steps", 40))


@pytest.mark.fault("E14")
def test_every_row_carries_the_version_it_was_decided_with() -> None:
    class Learner(Policy):
        def act(self, rows: Rows, *, explore: bool = True) -> Any:
            used = self.version
            self.version += 1  # as another thread might, at the worst moment
            return np.zeros(len(rows), int), {"used": np.full(len(rows), used)}

    with sync("turns", 3, 2) as envs:
        policy = Learner()
        collector = Collector(envs, policy, seed=0)
        for _ in range(5):
            policy.version += 100
            rows = collector.collect(env_steps=20)["main"]
            np.testing.assert_array_equal(rows["policy_version"], rows["used"])


@pytest.mark.fault("E1")
@pytest.mark.slow("a thousand steps")
@pytest.mark.parametrize("name", [*OF_ENVS, "NaN", "dtype", "too few"])
def test_a_vectorizer_finds_a_wrong_action_however_late_it_comes(name: str) -> None:
    space, answer, _ = WRONG[name]
    wrong = answer.reshape(NUM_ENVS, AGENTS, *answer.shape[1:]) if len(answer) == ROWS else answer
    right = zeros(space).reshape(NUM_ENVS, AGENTS, *(space.shape or ()))
    with sampled(space) as envs:
        envs.reset(seed=0)
        for _ in range(LATE - 1):
            envs.step(right)
        with pytest.raises(ActionError, match="actions: "):
            envs.step(wrong)
        envs.step(right)
