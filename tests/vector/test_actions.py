"""What may be given as actions: arrays, dicts by agent, and actions that a mask forbids."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Tuple

import marlvec
from marlvec import VectorEnv
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ActionError, ArgumentError, ContractWarning, EnvRaised, NothingPendingError
from marlvec.spaces import SpaceTree
from marlvec.testing import CounterEnv, SampledEnv, Script, ScriptedParallelEnv, checksum, decode
from marlvec.vector.checks import join_agents
from tests.envs.support import Forgetful
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, vectorize
from tests.vector.support.reference import refused

# What may be given as actions: everything wrong raises before anything is sent, and what is right arrives as it is.


N = 3
A = 3
F, I64 = np.float32, np.int64


def counters(backend: str, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, 4, env_index=i) for i in range(N)], **options)


def sampled(backend: str, action_space: Any, **options: Any) -> VectorEnv:
    return vectorize(
        backend, [partial(SampledEnv, Discrete(2), action_space, env_index=i) for i in range(N)], **options
    )


def assert_untouched(envs: VectorEnv, t: int) -> None:
    """All envs are just after step ``t``, their agents have seen only good actions, and a step works."""
    obs, *_ = envs.step(np.ones((N, A), I64))
    assert {decode(row).t for row in obs.reshape(-1, obs.shape[-1])} == {t + 1}
    expected = 1
    for _ in range(t + 1):
        expected = expected * 31 + 2
    assert {checksum(row) for row in obs.reshape(-1, obs.shape[-1])} == {expected % 65_521}


class OnDevice:
    """Raises what it likes where an array is asked for, as tensors do."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    def detach(self) -> Any:
        return self


WRONG: list[tuple[str, Any, str]] = [
    ("too few envs", np.zeros((N - 1, A), I64), r"expected shape \(3, 3\) = \(num_envs=3, agents=3\), got \(2, 3\)"),
    ("too many envs", np.zeros((N + 1, A), I64), "got .4, 3"),
    ("too few agents", np.zeros((N, A - 1), I64), "got .3, 2"),
    ("too many agents", np.zeros((N, A + 1), I64), "got .3, 4"),
    ("one number", 1, "got .."),
    ("one row", np.zeros(A, I64), "got .3,"),
    ("flat", np.zeros(N * A, I64), "got .9,"),
    ("transposed list", [[0] * (A + 1)] * N, "got .3, 4"),
    ("trailing axis", np.zeros((N, A, 2), I64), "got .3, 3, 2"),
    ("two trailing axes", np.zeros((N, A, 1, 1), I64), "got .3, 3, 1, 1"),
    ("floats", np.zeros((N, A)), "expected dtype int64, got float64"),
    ("bools", np.zeros((N, A), bool), "got bool"),
    ("complex", np.zeros((N, A), complex), "got complex"),
    ("text", np.full((N, A), "1"), "got <U1"),
    ("objects", np.full((N, A), None), "got object"),
    ("ragged", [[0, 1, 2], [0, 1], [0]], "not an array"),
    ("None", None, "got"),
    ("a dict", {"agents": np.zeros((N, A), I64)}, r"got a dict with the keys \['agents'\]; stack"),
    ("a long dict", {f"a{i}": 0 for i in range(9)}, r"keys \['a0', .*'a4'\] and 4 more"),
    ("dicts", [{"agent_0": 0, "agent_1": 1}] * N, r"env 0, agent 'agent_2': expected an action, since it acts"),
    ("dicts in lists", [[{"move": 0}] * A] * N, r"got object\. There is a dict with keys \['move'\] in a list"),
    ("unreadable", OnDevice(), r"expected an array of shape \(3, 3\), dtype int64, got OnDevice, not an array: no\. "),
    ("one env's row", np.zeros(A, I64), "That is the shape of one env; give such a row for each of 3 envs"),
    ("flat, to be reshaped", [0] * (N * A), r"give actions\.reshape\(3, 3\)"),
    ("above", np.full((N, A), 5), r"env 0, agent 'agent_0': 5 is not in Discrete\(5\) \(8 more\)"),
    ("below", np.full((N, A), -1), "-1 is not in"),
]


@pytest.mark.checklist(24)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_wrong_actions_raise_before_anything_is_sent(backend: str) -> None:
    with counters(backend, validate="strict") as envs:
        for episode in range(3):
            envs.reset(seed=episode)
            for t in range(3):
                for name, wrong, words in WRONG:
                    for call in (envs.step, envs.step_send, envs.send):
                        caught = refused(ActionError, words, call, wrong)
                        assert isinstance(caught, (ArgumentError, ValueError)), name
                for wrong in (np.zeros((2, A), I64), np.zeros((N, A), I64)):
                    refused(ActionError, "num_envs=1", envs.send, wrong, [1])
                assert_untouched(envs, t)


@pytest.mark.checklist(24)
def test_tensors_are_actions_unless_they_have_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    with sampled("sync", Box(-1, 1, (2,), F)) as envs:
        envs.reset(seed=0)
        tensor = torch.zeros((N, 2, 2), requires_grad=True)
        for wrong in (tensor, [tensor[0], tensor[1], tensor[2]]):
            refused(ActionError, r"tensor with a gradient.*give tensor\.detach\(\)\.cpu\(\)\.numpy", envs.step, wrong)
        refused(ActionError, r"got \(2, 2\)\. That is the shape of one env", envs.step, tensor.detach()[0])
        envs.step(tensor.detach())
    with counters("sync") as envs:
        envs.reset(seed=0)
        envs.step(torch.zeros((N, A), dtype=torch.int64))


@pytest.mark.checklist(24)
def test_what_to_do_about_a_wrong_shape_is_said() -> None:
    script = Script.together(2, 4)
    with vectorize("sync", [partial(ScriptedParallelEnv, script, agent_num=2, env_index=i) for i in range(N)]) as envs:
        envs.reset(seed=0)
        for shape, words in (
            ((2,), "shape of one env; give such a row for each of 3 envs"),
            ((3,), "one action per env; give one for each of its 2 agents, along axis 1"),
            ((2, 3), r"Its axes are swapped: give np\.swapaxes\(actions, 0, 1\)"),
            ((6,), r"give actions\.reshape\(3, 2\)"),
        ):
            refused(ActionError, words, envs.step, np.zeros(shape, I64))
    with sampled("sync", Dict({"a": Discrete(2), "b": Discrete(3)})) as envs:
        envs.reset(seed=0)
        with pytest.raises(
            ActionError, match=r"keys \['a', 'b'\] at /, got list\. There is a dict with keys.* in a list"
        ):
            envs.step([[{"a": 0, "b": 1}] * A] * N)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.checklist(24)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_discrete_actions_with_and_without_a_last_axis_of_one(backend: str) -> None:
    for dtype in (np.int64, np.int32, np.int8, np.uint8):
        with counters(backend) as envs:
            seen = []
            for shape in ((N, A), (N, A, 1)):
                envs.reset(seed=1)
                rng = np.random.default_rng(0)
                for _ in range(3):
                    actions = rng.integers(5, size=(N, A)).astype(dtype)
                    obs, *_ = envs.step(actions.reshape(shape))
                seen.append([checksum(row) for row in obs.reshape(-1, obs.shape[-1])])
            envs.reset(seed=1)
            obs, *_ = envs.step([[4, 3, 2]] * N)  # lists too
            assert checksum(obs[2, 1]) == 31 + 3 + 1
            assert seen[0] == seen[1]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.checklist(24)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (Box(-1, 1, (2,), F), [np.zeros((N, A), F), np.zeros((N, A, 3), F), np.zeros((N, A, 2), complex)]),
        (Box(-1, 1, (2,), F), [np.full((N, A, 2), np.nan, F), np.full((N, A, 2), 1.5), np.full((N, A, 2), np.inf)]),
        (MultiDiscrete([2, 3]), [np.zeros((N, A, 1), I64), np.zeros((N, A, 2), F), np.full((N, A, 2), 2)]),
        (MultiBinary(4), [np.zeros((N, A, 3), np.int8), np.zeros((N, A, 4), F), np.full((N, A, 4), 2)]),
        (Discrete(3, start=-1), [np.full((N, A), 2), np.full((N, A), -2)]),
        (
            Dict({"a": Discrete(2), "b": Box(0, 1, (), F)}),
            [
                np.zeros((N, A), I64),
                {"a": np.zeros((N, A), I64)},
                {"a": np.zeros((N, A), I64), "b": np.zeros((N, A), F), "c": 0},
                {"a": np.zeros((N, A), I64), "b": np.zeros((N, A, 2), F)},
            ],
        ),
        (Tuple([Discrete(2), Discrete(3)]), [np.zeros((N, A), I64), (np.zeros((N, A), I64),), {"a": 1}]),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, list) else "",
)
def test_wrong_actions_of_every_space(backend: str, space: Any, wrong: list[Any]) -> None:
    with sampled(backend, space, validate="strict") as envs:
        envs.action_space.seed(3)
        for episode in range(3):
            envs.reset(seed=episode)
            for actions in wrong:
                refused(ActionError, "", envs.step, actions)
            for _ in range(5):
                good = envs.action_space.sample()
                _, rewards, *_ = envs.step(good)
                assert (rewards != 0).all()
            # The episode was exactly five steps long: none of the wrong ones got through.
            assert envs.step(envs.action_space.sample())[3].any() == np.False_


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.fault("E1")
@pytest.mark.checklist(25)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_invalid_actions_of_who_acts_raise_or_pass_through(backend: str) -> None:
    wild = np.full((N, 2), 3)
    space = Discrete(3)
    factories = [partial(SampledEnv, Discrete(2), space, env_index=i) for i in range(N)]
    with vectorize(backend, factories, validate="strict") as envs:
        for episode in range(3):
            envs.reset(seed=episode)
            for _ in range(20):  # in every step, also long after the first ones
                envs.step(np.zeros((N, 2), I64))
                refused(ActionError, "env 0, agent 'agent_0': 3 is not in", envs.step, wild)
    with vectorize(backend, [partial(Careless, env_index=i) for i in range(N)], validate="off") as envs:
        envs.reset()
        for _ in range(3 * 4):
            _, rewards, *_ = envs.step(wild)
            np.testing.assert_array_equal(rewards, np.full((N, 2), 3.0))
    refused(ArgumentError, "validate must be one of", vectorize, "sync", factories, validate="never")


class Careless(CounterEnv):
    """Takes any action and pays it out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(4, agent_num=2, **options)

    def step(self, actions: dict[str, Any]) -> Any:
        obs, _, *rest = super().step(dict.fromkeys(actions, 0))
        return obs, {agent: float(action) for agent, action in actions.items()}, *rest


# Actions said agent by agent: some envs alone, what keys mean, and what is wrong in them.
#
# That they do what the same actions do as arrays is held by tests/properties.


def sampled_pairs(space: Any) -> list[Callable[[], Any]]:
    return [partial(SampledEnv, Discrete(2), space, agent_num=2, length=3, env_index=i) for i in range(N)]


def test_send_to_some_envs() -> None:
    with (
        vectorize("sync", sampled_pairs([Discrete(3), Discrete(5)])) as given,
        vectorize("sync", sampled_pairs([Discrete(3), Discrete(5)])) as expected,
    ):
        for envs in (given, expected):
            envs.reset(seed=0)
        given.send([{"agent_0": 1, "agent_1": 4}, {"agent_1": 3, "agent_0": 2}], [2, 0])
        (one, other) = expected.spec.groups
        expected.send({one.name: np.array([[1], [2]]), other.name: np.array([[4], [3]])}, [2, 0])
        assert given.recv().rewards.tolist() == expected.recv().rewards.tolist()
        with pytest.raises(
            ActionError, match="env 2, agent 'agent_1': expected an action, since it acts, got None; actions are"
        ):
            given.send([{"agent_0": 1, "agent_1": 4}, {"agent_0": 2}], [0, 2])


def test_a_discrete_action_may_have_a_last_axis_of_one() -> None:
    with vectorize("sync", sampled_pairs(Discrete(4))) as envs:
        envs.reset(seed=0)
        envs.step({"agent_0": np.zeros((N, 1), np.int64), "agent_1": np.zeros(N, np.int64)})
        envs.step([{"agent_0": np.zeros(1, np.int64), "agent_1": 3}] * N)


def test_as_many_dicts_as_a_tuple_has_parts_are_one_for_each_env() -> None:
    """A random program found them taken for the parts of one action."""
    with vectorize("sync", sampled_pairs(Tuple([Discrete(2), Discrete(3), Discrete(2)]))) as envs:
        envs.reset(seed=0)
        envs.step([dict.fromkeys(envs.agents, (1, 2, 0))] * N)


def test_keys_of_the_action_space_are_not_agents() -> None:
    space = Dict({"agent_0": Discrete(2), "agent_1": Discrete(3)})
    with vectorize("sync", sampled_pairs(space), validate="strict") as envs:
        envs.reset(seed=0)
        envs.step({"agent_0": np.ones((N, 2), np.int64), "agent_1": np.full((N, 2), 2)})
        envs.step([{name: {"agent_0": 1, "agent_1": 2} for name in envs.agents}] * N)


NOTHING = (Dict(), Tuple([]), Tuple([Dict(), Dict()]))
SOMETHING = (
    (Discrete(4), [3, 0, 2]),
    (Dict(a=Dict(), b=Box(-1, 1, (2,))), {"a": {}, "b": np.ones((N, 2), F)}),
    (Sequence(Discrete(2)), [(0, 1), (), (1,)]),
    (Sequence(Discrete(2)), [(0,), (1,), (1,)]),
)


@pytest.mark.parametrize("nothing", NOTHING, ids=str)
@pytest.mark.parametrize("something", SOMETHING, ids=lambda one: str(one[0]))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["nothing first", "nothing last"])
def test_actions_by_agent_beside_an_agent_whose_action_space_is_empty(
    nothing: Any, something: tuple[Any, Any], order: tuple[int, int]
) -> None:
    """A random program found actions (N, …) of one agent taken for actions (N, 1, …) of a group of one agent."""
    empty = SpaceTree(nothing).unflatten([])
    (spaces, actions) = ([pair[k] for k in order] for pair in ((nothing, something[0]), (empty, something[1])))
    with (
        vectorize("sync", sampled_pairs(spaces), validate="strict") as given,
        vectorize("sync", sampled_pairs(spaces), validate="strict") as expected,
    ):
        for envs in (given, expected):
            envs.reset(seed=0)
        step = given.step(dict(zip(given.agents, actions, strict=True)))
        rows = [{name: part(action, i) for name, action in zip(given.agents, actions, strict=True)} for i in range(N)]
        np.testing.assert_equal(step[:4], expected.step(rows)[:4])
        step = given.step({name: with_axis(action) for name, action in zip(given.agents, actions, strict=True)})
        np.testing.assert_equal(step[:4], expected.step(rows)[:4])


@pytest.mark.parametrize("space", [Discrete(4), *NOTHING], ids=str)
def test_actions_by_agent_for_no_env(space: Any) -> None:
    with vectorize("sync", sampled_pairs([space, Dict(a=Dict())])) as envs:
        envs.reset(seed=0)
        none = SpaceTree(space).unflatten([leaf.blank(0) for leaf in SpaceTree(space).leaves])
        envs.send({"agent_0": none, "agent_1": {"a": {}}}, [])
        refused(NothingPendingError, "nothing sent", envs.recv)


def part(action: Any, i: int) -> Any:
    """Env ``i``'s action of actions in all envs."""
    if isinstance(action, dict):
        return {key: part(own, i) for key, own in action.items()}
    return tuple(part(own, i) for own in action) if isinstance(action, tuple) else action[i]


def with_axis(action: Any) -> Any:
    """Actions in all envs as those of a group of one agent."""
    if isinstance(action, dict):
        return {key: with_axis(own) for key, own in action.items()}
    if isinstance(action, tuple):
        return tuple(map(with_axis, action))
    return action[:, None] if isinstance(action, np.ndarray) else [[own] for own in action]


WRONG_DICTS: list[tuple[Any, str]] = [
    ({"agent_0": np.zeros(N, np.int64)}, r"env 0, agent 'agent_1': expected an action, .* given for \['agent_0'\]"),
    ({"agent_0": [0] * N, "agent_1": None}, "env 0, agent 'agent_1': expected an action, since it acts"),
    ({"agent_0": [0] * N, "agent_1": [0]}, r"actions\['agent_1'\]: expected shape \(3,\), got \(1,\)"),
    ({"agent_0": [0] * N, "agent_1": 1}, r"actions\['agent_1'\]: expected shape \(3,\), got \(\)"),
    ({"agent_0": [0] * N, "agent_1": [0, [1], 2]}, r"actions\['agent_1'\]: .* got list, not an array"),
    ({"agent_0": [0] * N, "agent_1": [0.5] * N}, "expected dtype int64, got float64"),
    ({"agent_0": [0] * N, "agent_1": [9] * N}, r"env 0, agent 'agent_1': 9 is not in Discrete\(5\)"),
    ({"agent_0": [0] * N, "nobody": [0] * N}, r"np\.stack\(\[actions\[agent\] for agent in envs\.agents\], axis=1\)"),
    ([{"agent_0": 0, "agent_1": 1}] * (N - 1), "expected a dict of agents for each of 3 envs, got 2 dicts"),
    ([{"agent_0": 0, "agent_1": 1}, {}, {}], "env 1, agent 'agent_0': expected an action, since it acts"),
    ([{"agent_0": 0, "agent_1": [1, 2]}] * N, r"env 0, agent 'agent_1': expected shape \(\), got \(2,\)"),
    ([{"agent_0": 0, "agent_1": 1.5}] * N, "expected dtype int64, got float64"),
    ([{"agent_0": 0, "agent_1": -1}] * N, "env 0, agent 'agent_1': -1 is not in"),
]


def test_wrong_ones_raise_and_nothing_is_sent() -> None:
    factories = [partial(CounterEnv, 9, env_index=i, agent_num=2) for i in range(N)]
    with vectorize("sync", factories, validate="strict") as envs, vectorize("sync", factories) as others:
        envs.reset(seed=0)
        others.reset(seed=0)
        for wrong, words in WRONG_DICTS:
            refused(ActionError, words, envs.step, wrong)
        actions = np.ones((N, 2), np.int64)
        np.testing.assert_equal(envs.step(actions), others.step(actions))


def test_agents_that_do_not_act_leave_the_dtype_of_others_as_it_is() -> None:
    spec = EnvSpec("turns", ("a", "b"), (Discrete(2),) * 2, (Discrete(4),) * 2, (None, None))
    for acting in ([[True, False]], [[True, True]]):
        joined = join_agents(spec, False, [{"a": np.uint64(3), "b": np.uint64(1)}], np.array(acting), np.arange(1))
        assert joined.dtype == np.uint64, "int64 zeros beside it would make floats of both"
        assert joined.tolist() == [[3, int(acting[0][1])]]
    assert join_agents(spec, False, [{}], np.zeros((1, 2), np.bool_), np.arange(1)).tolist() == [[0, 0]]


# Actions that an action mask forbids: what `validate` makes of them, and what an env's own error says.


LENGTH = 4
STEPS = 40


def gives(t: int, a: int, i: int) -> bool:
    return (t + a + i) % 3 != 1


class Unforgiving(Forgetful):
    """Raises at what its masks forbid."""

    def step(self, actions: dict[str, Any]) -> Any:
        for a, agent in enumerate(self.agents):
            if self.gives(self.t, a) and actions[agent] != self.t % 3:
                raise ValueError("an illegal move")
        return super().step(actions)


def envs_of(backend: str, validate: str, kind: type[Forgetful] = Forgetful, space: Any = None) -> marlvec.VectorEnv:
    return vectorize(backend, [partial(kind, partial(gives, i=i), LENGTH, space) for i in range(N)], validate=validate)


def forbidden_at(t: int, actions: np.ndarray[Any, Any]) -> int:
    """How many of the actions are forbidden at an env's step ``t``."""
    given = np.array([[gives(t, a, i) for a in range(2)] for i in range(N)])
    return int((given & (actions.reshape(N, 2) != t % 3)).sum())


def plan(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Actions of whole episodes: half of them legal, and in some calls all of them."""
    rng = np.random.default_rng(seed)
    return [
        np.where(rng.random((N, 2)) < rng.choice([0.5, 2]), t % LENGTH % 3, rng.integers(0, 3, (N, 2)))
        for t in range(STEPS)
    ]


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([3])])
@pytest.mark.parametrize("validate", ["warn", "sample", "off"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_sent_with_a_warning(backend: str, validate: str, space: Any) -> None:
    """In each call that has some, in the first one that is looked at, or in none; the line of the call is named."""
    told: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    with envs_of(backend, validate, space=space) as envs:
        envs.reset(seed=0)
        for call, actions in enumerate(plan()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                obs, *_ = envs.step(actions.reshape(N, 2, *space.shape))
            assert (obs == (call + 1) % LENGTH).all()  # it was sent
            told += [(call, 1 + int(*re.findall(r"\((\d+) more", str(found.message)))) for found in caught]
            assert all(found.category is ContractWarning and found.filename == __file__ for found in caught)
            if n := forbidden_at(call % LENGTH, actions):
                expected.append((call, n))
    assert told == {"warn": expected, "sample": expected[:1], "off": []}[validate]


@pytest.mark.parametrize("backend", BACKENDS)
def test_strict_refuses_them_and_nothing_is_sent(backend: str) -> None:
    with envs_of(backend, "strict", Unforgiving) as envs:
        envs.reset(seed=0)
        for call, actions in enumerate(plan()):
            t = call % LENGTH
            if forbidden_at(t, actions):
                i, a = next((i, a) for i in range(N) for a in range(2) if gives(t, a, i) and actions[i, a] != t % 3)
                what = "expected an action that its action mask allows, got"
                refused(ActionError, f"env {i}, agent '{envs.agents[a]}': {what} {actions[i, a]}", envs.step, actions)
                actions = np.full((N, 2), t % 3)
            obs, *_ = envs.step(actions)
            assert (obs == (t + 1) % LENGTH).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_env_says_that_a_mask_forbade_the_action(backend: str) -> None:
    with envs_of(backend, "off", Unforgiving) as envs:
        envs.reset(seed=0)
        for t in range(3):
            envs.step(np.full((N, 2), t))
        with pytest.raises(
            EnvRaised
        ) as caught:  # action 0 is allowed, and without a mask all are: bob's in env 0, ann's in env 1
            envs.step([[1, 1], [1, 0], [2, 2]])
    said = {failure.env_id: failure.summary.partition("an illegal move ")[2] for failure in caught.value.failures}
    assert said == {
        0: "(the action mask of agent 'ann' forbids its action 1)",
        2: "(the action mask of agent 'ann' forbids its action 2; the action mask of agent 'bob' forbids its action 2)",
    }


def test_an_error_that_has_another_reason_does_not() -> None:
    class Broken(Forgetful):
        def step(self, actions: dict[str, Any]) -> Any:
            raise ValueError("broken")

    with envs_of("sync", "strict", Broken) as envs:
        envs.reset(seed=0)
        caught = refused(EnvRaised, "broken", envs.step, np.zeros((N, 2), np.int64))
        assert "mask" not in str(caught)


@pytest.mark.parametrize("backend", ["native", "sync"])
def test_a_board_game_warns_once_and_refuses_with_strict(backend: str) -> None:
    """A native env looks at the values of actions in every call, and at masks as all do."""
    with marlvec.make("tictactoe_v3", 2, backend=backend) as envs:
        envs.reset(seed=0)
        envs.step(np.full((2, 2), 4))
        with pytest.warns(ContractWarning, match="env 0, agent 'player_2': .* got 4 .1 more."):
            envs.step(np.full((2, 2), 4))
        envs.step(np.full((2, 2), 4))  # player_2 has lost, the next game has begun
        envs.step(np.full((2, 2), 4))
    with marlvec.make("tictactoe_v3", 2, backend=backend, validate="strict") as envs:
        envs.reset(seed=0)
        envs.step(np.full((2, 2), 4))
        refused(ActionError, "got 4", envs.step, np.full((2, 2), 4))
