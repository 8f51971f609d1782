"""What envs must not return, what they may raise, and what can be pickled and not unpickled."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, Space

from marlvec import AsyncVectorEnv, RestartLimit, VectorEnv, infos_to_list
from marlvec.errors import (
    ContractError,
    EnvContractError,
    EnvRaised,
    MarlvecError,
    NotResetError,
    SerialisationError,
    WorkerDied,
)
from marlvec.testing import CounterEnv, KeyedEnv, RaisingEnv, Script, SingleEnv, decode
from marlvec.vector.infos import RESERVED
from marlvec.vector.workers import worker as report_packing
from tests.faults.harness.programs import run
from tests.faults.harness.spoilt import FORMS, OBS_SPACE, Spoil, good_obs
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, hooked, vectorize
from tests.vector.support.reference import assert_trees_equal, pick, refused
from tests.vector.test_recovery import ERRORS

# Section C of the catalogue: what an env may return. What stands here adds to the marked tests of other folders.
#
# Form (C5 to C7, C9 to C11) is held against all four kinds of API and, in each of them, against every value that the
# catalogue names; one vectorizer sees all of it, and its other envs see nothing of it.


N = 3


# --- C5, C6, C7, C9, C10, C11: the form of what a step returns

BAD_FORMS: dict[str, list[Spoil]] = {
    "C5": [
        Spoil("grid", np.zeros((2, 3), np.complex64), "leaf 'grid': expected dtype float32, got complex64"),
        Spoil("grid", np.zeros((2, 3), object), "leaf 'grid': expected dtype float32, got object"),
        Spoil("grid", np.zeros((2, 3), "U3"), "leaf 'grid': expected dtype float32, got <U3"),
        Spoil("grid", np.zeros((2, 3), "S3"), r"leaf 'grid': expected dtype float32, got \|S3"),
        Spoil("grid", np.zeros((2, 3), "M8[s]"), "leaf 'grid': expected dtype float32, got datetime64"),
        Spoil("grid", np.zeros((2, 3), [("x", "f4")]), "leaf 'grid': expected dtype float32, got "),
        Spoil("grid", [["0"] * 3] * 2, "leaf 'grid': expected dtype float32, got <U1"),
        Spoil("kind", 1.0, "leaf 'kind': expected dtype int64, got float64"),
        Spoil("kind", np.float32(1), "leaf 'kind': expected dtype int64, got float32"),
        Spoil("kind", "1", "leaf 'kind': expected dtype int64, got <U1"),
        Spoil("kind", 2**80, "leaf 'kind': expected dtype int64, got object"),
        Spoil("kind", np.uint64(2**63), "leaf 'kind': the value .* does not fit dtype int64"),
        Spoil("pair", (1j, np.zeros(3, np.int8)), "leaf 'pair/0': expected dtype float64, got complex128"),
        Spoil("pair", (0.0, np.zeros(3)), "leaf 'pair/1': expected dtype int8, got float64"),
        Spoil("pair", (0.0, np.array([0, 1, 300])), "leaf 'pair/1': the value .* does not fit dtype int8"),
    ],
    "C6": [
        Spoil("grid", np.zeros((3, 2), np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(3, 2\)"),
        Spoil("grid", np.zeros(6, np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(6,\)"),
        Spoil("grid", np.zeros(1, np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(1,\)"),
        Spoil("grid", np.zeros(3, np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(3,\)"),
        Spoil("grid", np.float32(0), r"leaf 'grid': expected shape \(2, 3\), got \(\)"),
        Spoil("grid", 0.0, r"leaf 'grid': expected shape \(2, 3\), got \(\)"),
        Spoil("grid", np.zeros((2, 1), np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(2, 1\)"),
        Spoil("grid", np.zeros((1, 2, 3), np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(1, 2, 3\)"),
        Spoil("grid", np.zeros((2, 3, 1), np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(2, 3, 1\)"),
        Spoil("grid", np.zeros((0, 3), np.float32), r"leaf 'grid': expected shape \(2, 3\), got \(0, 3\)"),
        Spoil("grid", [[0.0] * 3, [0.0] * 2], r"leaf 'grid': expected shape \(2, 3\), got no array at all"),
        Spoil("kind", np.zeros(1, np.int64), r"leaf 'kind': expected shape \(\), got \(1,\)"),
        Spoil("pair", (np.zeros((1, 1)), np.zeros(3, np.int8)), r"leaf 'pair/0': expected shape \(\), got \(1, 1\)"),
        Spoil("pair", (0.0, np.zeros((3, 1), np.int8)), r"leaf 'pair/1': expected shape \(3,\), got \(3, 1\)"),
    ],
    "C7": [
        Spoil("obs", None, "expected a dict with keys .*got NoneType"),
        Spoil("obs", {}, r"expected a dict with keys .*got \[\]"),
        Spoil("obs", {k: v for k, v in good_obs(2, 1).items() if k != "kind"}, r"got \['grid', 'pair'\]"),
        Spoil("obs", {**good_obs(2, 1), "more": 1}, r"got \['grid', 'kind', 'more', 'pair'\]"),
        Spoil("obs", tuple(good_obs(2, 1).values()), "expected a dict with keys .*got tuple"),
        Spoil("obs", np.zeros(7), "expected a dict with keys .*got ndarray"),
        Spoil("grid", None, r"leaf 'grid': expected shape \(2, 3\), got \(\)"),
        Spoil("kind", None, "leaf 'kind': expected dtype int64, got object"),
        Spoil("pair", None, "expected a tuple of length 2 at /pair, got NoneType"),
        Spoil("pair", [0.0], "expected a tuple of length 2 at /pair, got length 1"),
        Spoil("pair", (0.0, np.zeros(3, np.int8), 1), "expected a tuple of length 2 at /pair, got length 3"),
        Spoil("pair", {"0": 0.0, "1": 1}, "expected a tuple of length 2 at /pair, got dict"),
        Spoil("pair", (None, np.zeros(3, np.int8)), "leaf 'pair/0': expected dtype float64, got object"),
    ],
    "C9": [
        *(
            Spoil("reward", value, rf"expected a real number, got {type(value).__name__}")
            for value in (None, "1.0", b"1", 1j, np.complex64(1), [1.0], (1.0,), {}, Decimal(1), object())
        ),
        Spoil("reward", np.zeros(1), r"expected a real number, got ndarray of shape \(1,\).*make\(…, lenient=True\)"),
        Spoil("reward", np.zeros((1, 1)), r"expected a real number, got ndarray of shape \(1, 1\)"),
        Spoil("reward", np.array(1j), r"expected a real number, got ndarray of shape \(\)"),
        Spoil("reward", np.array("1"), r"expected a real number, got ndarray of shape \(\)"),
        Spoil("reward", 10**400, "expected a real number that a float can hold, got int 100"),
        Spoil("reward", -(10**400), "expected a real number that a float can hold, got int -100"),
    ],
    "C10": [
        Spoil(place, value, f"expected a bool, got {type(value).__name__}{hint}")
        for place in ("terminated", "truncated")
        for hint, values in {
            r" (?!.*lenient)": ("no", "", 2, None, 0.0, [], [False], np.zeros(2, bool)),
            r".*make\(…, lenient=True\)": (0, 1, np.int8(0), np.zeros(1, bool), np.array(False)),
        }.items()
        for value in values
    ],
    "C11": [
        Spoil(
            "result", (1, 2, 3), "tuple of 5, .* 4, got a tuple of 3.*observations, rewards, terminations, truncations"
        ),
        Spoil(
            "result",
            tuple(range(6)),
            "tuple of 5, .* 4, got a tuple of 6.*observations, rewards, terminations, truncations",
        ),
        Spoil("result", (), "got a tuple of 0"),
        Spoil("result", None, "got NoneType"),
        Spoil("result", {}, "got dict"),
        Spoil("result", "five!", "got str"),
    ],
}
PLACES = [(form, "sync") for form in FORMS] + [("parallel", "thread"), ("turns", "async"), ("keyed", "async")]
# The step of a game returns nothing.
CASES = [(fault, *place) for fault in BAD_FORMS for place in PLACES if (fault, place[0]) != ("C11", "turns")]


def spoilt(backend: str, form: str, spoils: list[Spoil], **options: Any) -> VectorEnv:
    """Three envs, of which the one in the middle can spoil things."""
    return vectorize(backend, [partial(FORMS[form], spoils, i == 1) for i in range(N)], **options)


def rows(step: Any, envs: list[int]) -> list[Any]:
    return [pick(OBS_SPACE, step.obs, i, a) for i in envs for a in range(step.rewards.shape[1])]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=8)
@pytest.mark.parametrize(
    ("fault", "form", "backend"), [pytest.param(*case, marks=pytest.mark.fault(case[0])) for case in CASES]
)
def test_a_form_that_is_wrong_is_an_error_of_that_env_alone(fault: str, form: str, backend: str) -> None:
    """With env, agent, leaf, what was expected and what came; whatever ``validate`` says, in every single step."""
    spoils = BAD_FORMS[fault]
    with spoilt(backend, form, spoils, validate="off") as envs:
        actions = np.zeros((N, envs.agent_num), np.int64)

        def step() -> Any:
            envs.send(actions)
            return envs.recv()

        envs.reset(seed=0)
        step()
        clean = step()
        agent = {"single": "agent_0", "turns": "ann"}.get(form, "bob")
        whose = "" if fault == "C11" else f"agent '{agent}'.*"
        for k, spoil in enumerate(spoils):
            envs.reset(seed=0, options={"spoil": k})
            step()
            caught = refused(EnvContractError, rf"^env 1, step\(\): .*{whose}{spoil.words}", step)
            result = caught.result
            assert (caught.env_ids, result.env_ids.tolist()) == ((1,), [0, 2])
            assert_trees_equal(rows(result, [0, 1]), rows(clean, [0, 2]), "the others")
            assert result.rewards.tolist() == clean.rewards[[0, 2]].tolist()
            refused(NotResetError, r"envs \[1\]", step)
            envs.reset(env_ids=[1])
        envs.reset()
        step()
        assert_trees_equal(rows(step(), [0, 1, 2]), rows(clean, [0, 1, 2]), "all of them, as if nothing had been")


# What is taken though it is of another type, because it means the same: place, what comes, what is delivered.
SAME: list[tuple[str, Any, Any]] = [
    ("grid", np.full((2, 3), 0.1), np.full((2, 3), 0.1, np.float32)),  # no one's space is float64
    ("grid", np.full((2, 3), 0.5, np.float16), np.full((2, 3), 0.5, np.float32)),
    ("grid", np.ones((2, 3), np.int64), np.ones((2, 3), np.float32)),
    ("grid", [[0.5, 0, 1], [0, 1, True]], np.float32([[0.5, 0, 1], [0, 1, 1]])),
    ("kind", np.int8(3), 3),
    ("kind", np.uint64(3), 3),
    ("kind", np.array(3), 3),
    ("kind", True, 1),
    ("pair", (np.float32(0.5), [1, 0, 1]), (0.5, np.array([1, 0, 1], np.int8))),
    ("pair", [3, np.array([1, 0, 1], np.int64)], (3.0, np.array([1, 0, 1], np.int8))),
    ("pair", (-1.5, np.array([True, False, True])), (-1.5, np.array([1, 0, 1], np.int8))),
]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("C5")
@pytest.mark.fault("C7")
@pytest.mark.parametrize(("form", "backend"), PLACES)
def test_what_means_the_same_is_taken_as_it_is(form: str, backend: str) -> None:
    """Wider floats and ints of other sizes, exactly; a list in place of a tuple. Never complex → real, float → int."""
    spoils = [Spoil(place, came, "") for place, came, _ in SAME]
    with spoilt(backend, form, spoils, validate="strict") as envs:
        actions = np.zeros((N, envs.agent_num), np.int64)
        a = 0 if form in ("single", "turns") else 1
        for k, (place, _, expected) in enumerate(SAME):
            envs.reset(seed=0, options={"spoil": k})
            envs.step(actions)
            obs, *_ = envs.step(actions)
            got = pick(OBS_SPACE, obs, 1, a)[place]
            assert_trees_equal(pick(OBS_SPACE[place], {place: obs[place]}[place], 1, a), got, place)
            for one, other in zip(np_leaves(got), np_leaves(expected), strict=True):
                np.testing.assert_array_equal(one, other)


def np_leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in np_leaves(part)] if isinstance(value, tuple) else [value]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("C11")
@pytest.mark.parametrize("kind", [CounterEnv, partial(KeyedEnv, Script.together(3, 3)), SingleEnv])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_four_values_and_observations_alone_are_the_older_api(backend: str, kind: Any) -> None:
    """No breach: old envs are taken as they are, and say the same (checklist 8)."""
    with (
        vectorize(backend, [partial(kind, old_api=True, env_index=i) for i in range(2)]) as old,
        vectorize("sync", [partial(kind, env_index=i) for i in range(2)]) as new,
    ):
        actions = np.ones((2, old.agent_num), np.int64)
        first, _ = old.reset(seed=3)
        assert first.tobytes() == new.reset(seed=3)[0].tobytes()
        for _ in range(12):
            for one, other in zip(old.step(actions)[:4], new.step(actions)[:4], strict=True):
                assert one.tobytes() == other.tobytes()


# --- C1 to C4: exceptions


class Upset(RaisingEnv):
    """Has a method and a picture that raise, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, render_mode="rgb_array", **options)

    def render(self) -> Any:
        self._strike_at("render")  # type: ignore[arg-type]  # one more operation
        return np.full((2, 2, 3), self.world.env_index, np.uint8)


@pytest.mark.fault("C1")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_a_raising_render_is_reported_and_costs_no_episode(backend: str) -> None:
    factories = [partial(Upset, where="render", at=1, only_env=1, env_index=i, length=50) for i in range(N)]
    with vectorize(backend, factories) as envs:
        envs.reset(seed=0)
        for t in range(1, 5):
            if t == 2:
                caught = refused(EnvRaised, r"env 1 raised in render\(\): ValueError: scripted failure", envs.render)
                assert type(caught.__cause__) is ValueError
                assert "Traceback" in str(caught)
                assert caught.env_ids == (1,)
                assert {i: int(frame[0, 0, 0]) for i, frame in caught.result.items()} == {0: 0, 2: 2}
            else:
                assert [int(frame[0, 0, 0]) for frame in envs.render()] == [0, 1, 2]
            obs, *_ = envs.step(np.ones((N, 3), np.int64))
            assert [decode(row[0]).t for row in obs] == [t] * N


ODD = ("plain", "unpicklable", "many arguments", "mute", "huge")


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("C1")
@pytest.mark.fault("C2")
@pytest.mark.fault("C3")
@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_under_restart_the_others_never_notice(backend: str, where: Any) -> None:
    """Whatever is raised, and however little of it can cross: the env goes on anew.

    One row tells that its episode was lost; of a reset that follows on a whole episode there is nothing to lose.
    """
    lengths, n = [2, 1, 3], 4
    limit = RestartLimit(1000, backoff=0.0)
    for name in ODD if backend in ("sync", "async") else ODD[1:3]:
        striking = {"where": where, "at": 2, "only_env": 1, "error": ERRORS[name][0]}
        faulty = [partial(RaisingEnv, lengths, env_index=i, **striking) for i in range(n)]
        plain = [partial(CounterEnv, lengths, env_index=i) for i in range(n)]
        with (
            vectorize(backend, faulty, on_fault="restart", max_restarts=limit) as envs,
            vectorize("sync", plain) as twin,
        ):
            envs.reset(seed=3)
            twin.reset(seed=3)
            lost = 0
            for t in range(14):
                actions = np.full((n, 3), t % 5)
                envs.send(actions)
                twin.send(actions)
                step, expected = envs.recv(), twin.recv()
                assert step.env_ids.tolist() == [0, 1, 2, 3]
                assert not step.fault[[0, 2, 3]].any()
                for field in ("rewards", "terminated", "truncated", "alive", "acting", "done", "obs"):
                    got, want = (getattr(each, field)[[0, 2, 3]] for each in (step, expected))
                    assert got.tobytes() == want.tobytes(), (name, t, field)
                if step.fault[1]:
                    lost += 1
                    assert step.truncated[1].all()
                    assert step.done[1]
                    assert not step.rewards[1].any()
                    assert decode(step.obs[1, 0])[2:4] == (0, 0), "the first observation of the one built anew"
            faults = len(envs.faults)
            assert faults >= 2
            assert lost == (faults if where == "step" else 0)
            assert envs.incarnations.tolist() == [0, faults, 0, 0]
            assert [fault.env_ids for fault in envs.faults] == [(1,)] * faults
            assert all(ERRORS[name][1][:100] in fault.summary for fault in envs.faults)


def dig() -> Any:
    return dig()


def exhaust(what: list[str], env: Any, step: Any, actions: Any) -> Any:
    """Call itself in env 1 until Python has enough of it, or ask for more memory than there is; once."""
    if env.world.env_index == 1 and what:
        return dig() if what.pop() == "RecursionError" else np.zeros(2**55)
    return step(actions)


@pytest.mark.fault("C4")
@pytest.mark.parametrize("kind", ["RecursionError", "MemoryError"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_real_recursion_and_real_lack_of_memory(backend: str, kind: str) -> None:
    hooks = {"step": partial(exhaust, [kind])}
    with vectorize(backend, [partial(hooked, CounterEnv, 4, env_index=i, hooks=hooks) for i in range(N)]) as envs:
        envs.reset()
        caught = refused(EnvRaised, rf"env 1 raised in step\(\): .*{kind}", envs.step, np.ones((N, 3), np.int64))
        assert isinstance(caught.__cause__, (RecursionError, MemoryError))
        assert caught.result.env_ids.tolist() == [0, 2]
        envs.reset(env_ids=[1])
        envs.step(np.ones((N, 3), np.int64))


class Unusual(BaseException):
    """No Exception: most handlers let it pass."""


ENDS = (SystemExit, KeyboardInterrupt, GeneratorExit, Unusual)
OPERATIONS = ("init", "reset", "step")


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("C4")
@pytest.mark.parametrize(
    ("backend", "operation", "kind"),
    [(backend, operation, kind) for backend in ("sync", "thread") for operation in OPERATIONS for kind in ENDS]
    + [("async", "step", kind) for kind in ENDS]
    + [("async", "init", KeyboardInterrupt), ("async", "reset", GeneratorExit)],
)
def test_base_exceptions_are_never_lost(
    backend: str, operation: Any, kind: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    """The caller's own process: it comes through, as from any call. A thread: as every error. A process: a death."""
    factories = [partial(RaisingEnv, where=operation, error=kind, only_env=1, env_index=i) for i in range(2)]
    expected: type[BaseException] = {"sync": kind, "thread": EnvRaised}.get(backend, WorkerDied)

    def run() -> None:
        with vectorize(backend, factories) as envs:
            envs.reset()
            envs.step(np.ones((2, 3), np.int64))

    caught = refused(expected, "", run)
    if expected is EnvRaised:
        assert type(caught.__cause__) is kind
        assert f"env 1 raised in {'__init__' if operation == 'init' else operation}(): {kind.__name__}" in str(caught)
    elif isinstance(caught, WorkerDied):
        assert caught.env_ids == (1,)
        assert caught.exitcode == (0 if kind is SystemExit else 1)
        if kind is not SystemExit:
            assert kind.__name__ in capfd.readouterr().err, "and its traceback is on stderr"


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("C4")
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_base_exceptions_in_close_are_never_lost(backend: str, kind: type[BaseException], tmp_path: Path) -> None:
    """And the other envs are closed all the same."""

    class Leaving(RaisingEnv):
        def close(self) -> None:
            Path(tmp_path, f"closed-{self.world.env_index}").touch()
            super().close()

    factories = [partial(Leaving, where="close", error=kind, only_env=1, env_index=i) for i in range(4)]
    envs = vectorize(backend, factories)
    envs.reset()
    caught = refused(kind if backend == "sync" else EnvRaised, "", envs.close)
    if backend != "sync":
        assert caught.env_ids == (1,)  # type: ignore[attr-defined]  # seen above
    assert envs.closed
    assert len(list(tmp_path.iterdir())) == 4


# --- C8: values


# --- C12: infos


def informers(make: Callable[[str], Any]) -> list[Callable[[], Any]]:
    """Envs of which env 1 has in its infos what is made, in step 2 of an episode whose options name it."""

    def reset_and_note(env: Any, reset: Any, seed: int | None = None, options: Any = None) -> Any:
        env.what = options["info"] if options and env.world.env_index == 1 else None
        return reset(seed, options)

    def step_and_inform(env: Any, step: Any, actions: Any) -> Any:
        *rest, infos = step(actions)
        if env.what is not None and env.world.t == 2:
            infos["agent_1"] = make(env.what)
        return *rest, infos

    hooks = {"reset": reset_and_note, "step": step_and_inform}
    return [partial(hooked, CounterEnv, 3, agent_num=2, env_index=i, hooks=hooks) for i in range(N)]


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def info_of(what: str) -> Any:
    """What is no info, by name: some of it could not even be sent to a worker."""
    itself: dict[str, Any] = {"a": {}}
    itself["a"]["b"] = itself
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"x": deep}
    rows: list[Any] = []
    for _ in range(50_000):
        rows = [rows]
    table = {
        "an int": 5,
        "a list": [("a", 1)],
        "a dict in itself": itself,
        "a dict in itself, by value": {"value": itself},
        "dicts without end": {"x": deep},
        "lists without end": {"rows": rows},
        "two keys of one text": {1: "one", "1": "other"},
        "a list that refuses": {"x": [Refuses()]},
        "a lock": {"lock": threading.Lock()},
        "one that refuses": {"x": Refuses()},
    }
    return table[what]


IN_EVERY_BACKEND = {
    "an int": "info of agent 'agent_1': expected a dict, got int",
    "a list": "info of agent 'agent_1': expected a dict, got list",
    "a dict in itself": "the value of 'a' in an info: expected at most 32 dicts in a row",
    "a dict in itself, by value": "the value of 'value' in an info: expected at most 32 dicts in a row",
    "dicts without end": "the value of 'x' in an info: expected at most 32 dicts in a row",
    "lists without end": r"the value of 'rows' in an info: expected .*, got one that cannot be copied \(RecursionError",
    "a list that refuses": r"the value of 'x' in an info: .* cannot be copied \(RuntimeError: not me\)",
    "two keys of one text": r"expected keys that differ as text, got '1' twice",
}
FROM_A_PROCESS = {
    "a lock": r"the info of env 1 cannot be pickled.*lock",
    "one that refuses": r"the info of env 1 cannot be pickled.*RuntimeError: not me",
}


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("C12")
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_invalid_info_is_an_error_of_its_env(backend: str) -> None:
    crosses = backend == "async"
    cases = [(what, words, ContractError) for what, words in IN_EVERY_BACKEND.items()]
    if crosses:
        cases += [(what, words, SerialisationError) for what, words in FROM_A_PROCESS.items()]
    with vectorize(backend, informers(info_of)) as envs:
        actions = np.ones((N, 2), np.int64)
        for what, words, kind in cases:
            envs.reset(options={"info": what})
            envs.step(actions)
            refused(kind, rf"^env 1, \w+\(\): .*{words}", envs.step, actions)
            refused(NotResetError, r"envs \[1\]", envs.step, actions)
        envs.reset()
        for _ in range(3):
            envs.step(actions)
        if not crosses:  # in this process it is simply there
            envs.reset(options={"info": "a lock"})
            envs.step(actions)
            infos = envs.step(actions)[4]
            assert type(infos["lock"][1, 1]).__name__ == "lock"


@pytest.mark.fault("C12")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_no_info_is_none_at_all_and_lists_may_contain_themselves(backend: str) -> None:
    def make(what: str) -> Any:
        if what == "none":
            return None
        itself: list[Any] = [1]
        itself.append(itself)
        return {"itself": itself, "deep": {"a": {"b": {"c": [1, {"d": None}]}}}}

    with vectorize(backend, informers(make)) as envs:
        for what in ("none", "itself"):
            envs.reset(options={"info": what})
            envs.step(np.ones((N, 2), np.int64))
            infos = envs.step(np.ones((N, 2), np.int64))[4]
            assert ("itself" in infos) == (what == "itself")
        cell = infos["itself"][1, 1]
        assert cell[1] is cell
        assert infos_to_list(infos, envs.agents, N)[1]["agent_1"]["deep"] == {"a": {"b": {"c": [1, {"d": None}]}}}


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("C12")
@pytest.mark.parametrize("final", [True, False])
def test_infos_that_come_from_a_process_are_bounded(final: bool) -> None:
    """Per env and call; those of the others are there, and so is a lot that is within bounds."""

    class Large(SingleEnv):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            if self.world.t == self.at:
                info["blob"] = np.ones(self.size, np.uint8)
            return *rest, info

        def __init__(self, env_index: int) -> None:
            super().__init__(4, env_index=env_index)
            self.at = 4 if final else 2
            self.size = report_packing.MAX_BYTES + (-2000, 1, -2000)[env_index]

    with vectorize("async", [partial(Large, i) for i in range(N)], num_workers=1, context="fork") as envs:
        envs.reset()
        for _ in range(3 if final else 1):
            envs.step(np.ones((N, 1), np.int64))
        words = (
            r"env 1, infos\(\): its infos take 67,1\d\d,\d\d\d bytes, pickled; expected at most 67,108,864 in one call"
        )
        caught = refused(EnvContractError, words, envs.step, np.ones((N, 1), np.int64))
        assert caught.result.env_ids.tolist() == [0, 2]
        infos = caught.result.infos["final_info"] if final else caught.result.infos
        assert infos["blob"].shape[0] == 2
        assert infos["_blob"].all()
        envs.reset(env_ids=[1])
        envs.step(np.ones((N, 1), np.int64))


WORDS = (*sorted(RESERVED - {"action_mask"}), "_alive", "_", "__x")  # a mask is the env's own word


def use_own_words(env: Any, step: Any, actions: Any) -> Any:
    """Use every word that is marlvec's own, in the info of an agent and in that of the whole env."""
    *rest, infos = step(actions)
    infos["agent_0"] = dict.fromkeys(WORDS, env.world.t)
    infos["__common__"] = dict.fromkeys(WORDS, env.world.t)
    return *rest, infos


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("C12")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_reserved_keys_of_an_env_displace_none_of_marlvecs(backend: str) -> None:
    assert {"alive", "acting", "final_observation", "final_info", "reset_mask", "action_mask", "fault"} <= RESERVED
    with (
        vectorize(
            backend, [partial(hooked, CounterEnv, 3, env_index=i, hooks={"step": use_own_words}) for i in range(2)]
        ) as envs,
        vectorize("sync", [partial(CounterEnv, 3, env_index=i) for i in range(2)]) as plain,
    ):
        envs.reset(seed=0)
        plain.reset(seed=0)
        for t in range(1, 7):
            infos, expected = (each.step(np.ones((2, 3), np.int64))[4] for each in (envs, plain))
            own = infos.pop("final_info") if t % 3 == 0 else infos
            told = {who: dict.fromkeys(WORDS, (t - 1) % 3 + 1) for who in ("agent_0", "__common__")}
            assert infos_to_list(own, envs.agents, 2) == [told] * 2
            for name in ("__agents__", "__common__", "final_info", "_final_info"):
                infos.pop(name, None)
                expected.pop(name, None)
            assert_trees_equal(infos, expected, "marlvec's own")


# --- C14: views


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("C14")
@pytest.mark.parametrize("backends", [("sync", "thread"), ("async", "file")])
def test_views_kept_for_ever_never_crash(backends: tuple[str, ...], tmp_path: Path) -> None:
    """Past the next step, past a death and past close, in every order of letting go; in a process of its own."""
    program = f"""
from tests.vector.support.kinds import vectorize

def arrays(value):
    if isinstance(value, np.ndarray):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [array for part in parts for array in arrays(part)]

faulthandler.enable()
kept = []
for backend in {backends!r}:
    for copy, how in ((False, "close"), (False, "forget"), (False, "kill"), (True, "close"), (True, "kill")):
        envs = vectorize(backend, [partial(CounterEnv, 3, env_index=i, state=True) for i in range(4)], copy=copy,
                         state=True)
        found = arrays(envs.reset(seed=0))
        for t in range(4):
            found += arrays(envs.step(np.full((4, 3), t)))
        envs.send(np.ones((4, 3), int))
        step = envs.recv()
        found += [step.rewards, step.state, step.done, *arrays(step.obs_leaves), *arrays(step.final_leaves)]
        if not copy:
            for array in found:
                try:
                    array[...] = 0
                except ValueError:
                    continue
                assert not any(np.shares_memory(array, row) for row in arrays(envs._buffers.obs)), "it was written to"
        before = [array.copy() for array in found]
        if how == "kill" and hasattr(envs, "worker_pids"):
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            try:
                envs.step(np.ones((4, 3), int))
            except WorkerDied:
                before = [array.copy() for array in found]
        if how != "forget":
            envs.close()
        del envs, step
        gc.collect()
        for array, old in zip(found, before):
            assert array.tobytes() == old.tobytes()
        kept.append(found)
for found in kept:
    assert np.isfinite(sum(float(array.astype(float).sum()) for array in found if array.dtype != object))
del kept[::2]
gc.collect()
print(sum(len(found) for found in kept) > 50)
"""
    assert run(program, tmp_path) == ["True"]


# --- C18: determinism


# What can be pickled and not unpickled: it is told whose it is, and everybody goes on.


A = 3
MODES = ["raise", "restart", "mask"]
HERE = os.getpid()  # the test's own process; in others this module may be imported anew
UNREADABLE: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "SystemExit": SystemExit,
    "GeneratorExit": GeneratorExit,
    "MarlvecError": MarlvecError,
}


class Bomb:
    """Raises where it is unpickled, if that is one of these processes, or any but them."""

    def __init__(self, error: str = "ValueError", *, spare: tuple[int, ...] = ()) -> None:
        self.error, self.spare = error, spare

    def __reduce__(self) -> Any:
        return go_off, (self.error, self.spare)


def go_off(error: str, spare: tuple[int, ...]) -> Any:
    if os.getpid() in spare:
        return Bomb(error, spare=spare)
    raise UNREADABLE[error]("not here")


class BombingEnv(CounterEnv):
    """Gives its infos something of which the parent will have no joy."""

    where: tuple[str, ...] = ()
    error = "ValueError"

    def _tainted(self, infos: Any, when: str) -> Any:
        if when in self.where:
            # Deep inside, and beside what is fine.
            infos["agent_1"] = {"fine": 1, "load": [{"deep": Bomb(self.error, spare=(os.getpid(),))}]}
        if "both" in self.where:
            infos["agent_0"] = {"mine": Fine(self.world.env_index)}
        return infos

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return obs, self._tainted(infos, "reset")

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        return *rest, self._tainted(infos, "last" if self.world.t == 5 else "step")


class Fine:
    """A class of one's own that travels well."""

    def __init__(self, number: int) -> None:
        self.number = number


def arm(env: Any, *where: str, error: str = "ValueError") -> None:
    env.where, env.error = where, error


def acts() -> Any:
    return np.ones((4, A), np.int64)


def make(**options: Any) -> VectorEnv:
    return vectorize("async", [partial(BombingEnv, 5, env_index=i, render_mode="ansi") for i in range(4)], **options)


def goes_on(envs: VectorEnv, env_id: int = 2) -> None:
    """That env has no episode, and can have one; the others have theirs."""
    envs.exec_func(arm)
    refused(NotResetError, rf"envs \[{env_id}\]", envs.step, acts())
    envs.reset(env_ids=[env_id])
    for _ in range(7):
        obs, *_ = envs.step(acts())
    obs, _ = envs.reset(seed=1)
    assert obs.shape[:2] == (4, A)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=4)
@pytest.mark.parametrize(
    ("on_fault", "error"), [*(("raise", error) for error in UNREADABLE), *((mode, "ValueError") for mode in MODES[1:])]
)
def test_an_info(on_fault: str, error: str) -> None:
    with make(on_fault=on_fault) as envs:
        for when in ("reset", "step", "last"):
            envs.reset(seed=0)
            envs.exec_func(arm, [2], when, error=error)
            words = rf"^env 2, infos\(\): this process cannot unpickle the info of agent 'agent_1': {error}: not here"
            with pytest.raises(SerialisationError, match=words):
                if when == "reset":
                    envs.reset(seed=0)
                for _ in range(5):
                    envs.step(acts())
            goes_on(envs)


def test_infos_of_ones_own_classes_arrive(tmp_path: Path) -> None:
    """Beside one that does not, too; and what agents of an env share they go on sharing."""
    with make() as envs:
        envs.reset(seed=0)
        envs.exec_func(arm, None, "both")
        *_, infos = envs.step(acts())
        assert [value.number for value in infos["mine"][:, 0]] == [0, 1, 2, 3]
        envs.exec_func(arm, [2], "both", "step")
        envs.send(acts())
        with pytest.raises(SerialisationError, match="env 2, infos"):
            envs.recv()
            goes_on(envs)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("error", UNREADABLE)
def test_an_answer(error: str) -> None:
    """Of every call that brings any."""
    with make() as envs:
        envs.reset(seed=0)
        envs.step(acts())
        bomb = partial(exploding, error=error)
        calls: list[Any] = [
            lambda: envs.exec_func(bomb),
            lambda: envs.call("exploding"),
            lambda: envs.get_attr("bomb"),
            lambda: envs.render(),
        ]
        envs.exec_func(install, None, error)
        for call in calls:
            words = rf"^env 2, call\(\): this process cannot unpickle the answer: {error}: not here"
            refused(SerialisationError, words, call)
        envs.step(acts())  # it costs no episode


def exploding(env: Any, error: str) -> Any:
    return Bomb(error, spare=(os.getpid(),)) if env.world.env_index == 2 else env.world.env_index


def install(env: Any, error: str) -> None:
    env.bomb = exploding(env, error)
    env.exploding = env.render = partial(exploding, env, error)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("error", UNREADABLE)
def test_on_the_way_to_a_worker(error: str) -> None:
    """Arguments, functions, values and options: the worker lives, and says for which envs it was."""
    bomb = Bomb(error, spare=(HERE,))
    with make() as envs:
        envs.reset(seed=0)
        pids = envs.worker_pids  # type: ignore[attr-defined]  # these backends have it
        calls: dict[str, Any] = {
            "exec_func": lambda: envs.exec_func(arm, [3, 1], bomb),
            "call": lambda: envs.call("reset_", bomb, indices=[3, 1]),
            "set_attr": lambda: envs.set_attr("where", bomb, [3, 1]),
        }
        for name, call in calls.items():
            words = (
                rf"^env 1, {name}\(\): its worker process cannot .* the arguments of {name}.* for env 1: {error}: not"
            )
            refused(SerialisationError, words, call)
        envs.step(acts())
        words = (
            rf"reset\(\): its worker process cannot unpickle the arguments of reset\(\) for env 3: {error}: not here"
        )
        refused(SerialisationError, words, envs.reset, options=[None, None, None, {"bomb": bomb}], env_ids=[0, 1, 2, 3])
        envs.reset()
        envs.step(acts())
        assert envs.worker_pids == pids  # type: ignore[attr-defined]


def test_an_exception_that_goes_off(tmp_path: Path) -> None:
    class Explosive(Exception):
        def __reduce__(self) -> Any:
            return go_off, ("SystemExit", (os.getpid(),))

    def fails(env: Any) -> None:
        raise Explosive(Bomb("SystemExit", spare=(os.getpid(),)))

    with make() as envs:
        envs.reset(seed=0)
        refused(EnvRaised, "Explosive", envs.exec_func, fails)
        envs.step(acts())


class BombSpace(Discrete):
    """Cannot be rebuilt by the test's process."""

    def __init__(self, n: int, error: str) -> None:
        super().__init__(n)
        self.error = error

    def __reduce__(self) -> Any:
        return go_off, (self.error, (os.getpid(),))


class Declaring(CounterEnv):
    def __init__(self, *args: Any, error: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._space = BombSpace(5, error)

    def action_space(self, agent: str) -> Space[Any]:
        return self._space


@pytest.mark.parametrize("error", UNREADABLE)
def test_spaces(error: str) -> None:
    with pytest.raises(SerialisationError, match=rf"the spaces of envs . to .: {error}: not here"):
        AsyncVectorEnv([partial(Declaring, error=error, env_index=i) for i in range(4)], num_workers=2)


@pytest.mark.parametrize("error", UNREADABLE)
def test_factories(error: str) -> None:
    factory: Any = partial(CounterEnv, note=Bomb(error, spare=(HERE,)))
    refused(MarlvecError, f"{error}: not here", AsyncVectorEnv, [factory] * 2, num_workers=1)


class Hand(Space[Any]):
    """Values of a class of one's own."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, (Fine, Bomb))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hand)

    __hash__ = None  # type: ignore[assignment]


class Dealing(CounterEnv):
    """Observations are objects; that of agent 2 in env 1 goes off when it is told to."""

    armed: str | None = None

    def observation_space(self, agent: str) -> Space[Any]:
        return HAND

    def _dealt(self, obs: Any) -> Any:
        dealt: dict[str, Any] = {agent: Fine(self.world.t) for agent in obs}
        if self.armed:
            dealt["agent_2"] = Bomb(self.armed, spare=(os.getpid(),))
        return dealt

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return self._dealt(obs), infos

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return self._dealt(obs), *rest


HAND = Hand()


def deal(env: Any, armed: str | None) -> None:
    env.armed = armed


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("error", UNREADABLE)
def test_an_observation(error: str) -> None:
    with vectorize("async", [partial(Dealing, 4, env_index=i) for i in range(4)]) as envs:
        envs.reset(seed=0)
        envs.exec_func(deal, [1], error)
        words = rf"^env 1, {{}}\(\): this process cannot unpickle the observation of agent 'agent_2': {error}: not here"
        refused(SerialisationError, words.format("step"), envs.step, acts())
        refused(SerialisationError, words.format("reset"), envs.reset)
        envs.exec_func(deal, None, None)
        envs.reset(env_ids=[1])
        for _ in range(6):
            obs, *_ = envs.step(acts())
        assert [[hand.number for hand in row] for row in obs[[1]]] == [[2] * A]


PROGRAM = """
here = os.getpid()

def go_off(here):
    if os.getpid() == here:
        raise KeyboardInterrupt

class Bomb:
    def __reduce__(self):
        return go_off, (here,)

with AsyncVectorEnv([CounterEnv] * 2, num_workers=1) as envs:
    envs.reset()
    try:
        envs.exec_func(lambda env: Bomb())
    except KeyboardInterrupt:
        print("passed")
    try:
        envs.reset()
    except BrokenError as error:
        assert "was interrupted" in str(error)
"""


@pytest.mark.slow("kills, stops or starts many workers")
def test_ctrl_c_passes(tmp_path: Path) -> None:
    assert run(PROGRAM, tmp_path) == ["passed"]
