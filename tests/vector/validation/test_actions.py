"""What may be given as actions: everything wrong raises before anything is sent, and what is right arrives as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from marlvec import VectorEnv
from marlvec.errors import ActionError, ArgumentError
from marlvec.testing.scripted import CounterEnv, SampledEnv, Script, ScriptedParallelEnv, checksum, decode
from tests.vector.support.kinds import HERE_AND_AWAY, vectorize

N, A = 3, 3
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
                        with pytest.raises(ActionError, match=words) as caught:
                            call(wrong)
                        assert isinstance(caught.value, (ArgumentError, ValueError)), name
                for wrong in (np.zeros((2, A), I64), np.zeros((N, A), I64)):
                    with pytest.raises(ActionError, match="num_envs=1"):
                        envs.send(wrong, [1])
                assert_untouched(envs, t)


@pytest.mark.checklist(24)
def test_tensors_are_actions_unless_they_have_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    with sampled("sync", Box(-1, 1, (2,), F)) as envs:
        envs.reset(seed=0)
        tensor = torch.zeros((N, 2, 2), requires_grad=True)
        for wrong in (tensor, [tensor[0], tensor[1], tensor[2]]):
            with pytest.raises(ActionError, match=r"tensor with a gradient.*give tensor\.detach\(\)\.cpu\(\)\.numpy"):
                envs.step(wrong)
        with pytest.raises(ActionError, match=r"got \(2, 2\)\. That is the shape of one env"):
            envs.step(tensor.detach()[0])
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
            with pytest.raises(ActionError, match=words):
                envs.step(np.zeros(shape, I64))
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
                with pytest.raises(ActionError):
                    envs.step(actions)
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
                with pytest.raises(ActionError, match="env 0, agent 'agent_0': 3 is not in"):
                    envs.step(wild)
    with vectorize(backend, [partial(Careless, env_index=i) for i in range(N)], validate="off") as envs:
        envs.reset()
        for _ in range(3 * 4):
            _, rewards, *_ = envs.step(wild)
            np.testing.assert_array_equal(rewards, np.full((N, 2), 3.0))
    with pytest.raises(ArgumentError, match="validate must be one of"):
        vectorize("sync", factories, validate="never")


class Careless(CounterEnv):
    """Takes any action and pays it out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(4, agent_num=2, **options)

    def step(self, actions: dict[str, Any]) -> Any:
        obs, _, *rest = super().step(dict.fromkeys(actions, 0))
        return obs, {agent: float(action) for agent, action in actions.items()}, *rest
