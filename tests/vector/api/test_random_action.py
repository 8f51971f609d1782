"""Random actions: always allowed, the same on every backend, and fixed by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Discrete,
    MultiDiscrete,
    Space,
)
from hypothesis import given
from hypothesis import strategies as st

from marlvec import VectorEnv, make
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.settings import random_actions
from tests.vector.support.kinds import factories_of, vectorize
from tests.vector.support.trees import pick

N = 3
OBSERVATION = Box(-1, 1, (2,))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return (a.dtype, a.shape, repr(a.tolist())) == (b.dtype, b.shape, repr(b.tolist()))


def played(envs: VectorEnv, steps: int = 25) -> Iterator[Any]:
    """Random actions of whole episodes. The envs raise on what is not allowed; so does the vectorizer."""
    _, infos = envs.reset(seed=7)
    for _ in range(steps):
        if envs.autoreset_mode == "disabled" and not infos["alive"].any(axis=1).all():
            _, infos = envs.reset(env_ids=~infos["alive"].any(axis=1))
        actions = envs.random_action()
        yield actions
        infos = envs.step(actions)[4]


def test_the_vectorizers_own_stream_begins_with_the_seed_of_a_reset() -> None:
    with vectorize("sync", factories_of("parallel", N)) as envs:
        envs.reset(seed=1)
        first = [envs.random_action() for _ in range(3)]
        envs.random_action(seed=9)
        further = envs.random_action()
        envs.reset(seed=1)
        again = [envs.random_action() for _ in range(3)]
        assert all(equal(a, b) for a, b in zip(first, again, strict=True))
        assert equal(further, envs.random_action()), "a seed of its own leaves the stream alone"
        envs.reset(seed=2)
        assert not equal(first, [envs.random_action() for _ in range(3)])


def test_some_envs_alone() -> None:
    with vectorize("sync", factories_of("turns, masked", 5)) as envs:
        envs.reset(seed=1)
        for _ in range(20):
            envs.send(envs.random_action(env_ids=[4, 1]), [4, 1])
            assert sorted(envs.recv().env_ids.tolist()) == [1, 4]
        assert envs.random_action(env_ids=np.array([True, False, False, True, True])).shape == (3, 3)
        with pytest.raises(ArgumentError, match="from 0 to 4"):
            envs.random_action(env_ids=[5])
        with pytest.raises(ArgumentError, match="seed must be"):
            envs.random_action(seed=-1)


def spec_of(spaces: list[Space[Any]], mask_sizes: list[int | None]) -> EnvSpec:
    agents = tuple(f"agent_{a}" for a in range(len(spaces)))
    return EnvSpec("x", agents, (OBSERVATION,) * len(agents), tuple(spaces), tuple(mask_sizes))


@given(
    allowed=st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=1, max_size=4),
    acting=st.integers(0, 15),
    seed=st.integers(0, 999),
)
def test_masks_bind_those_who_act(allowed: list[list[bool]], acting: int, seed: int) -> None:
    n = len(allowed)
    spec = spec_of([Discrete(5, start=1), MultiDiscrete([3, 2], start=[0, 7]), Discrete(5, start=1)], [5, 5, 5])
    bits = np.array(allowed).reshape(n, 2, 5)
    masks = [np.stack([bits[:, 0], bits[:, 1]], axis=1), bits[:, :1]]
    possible = np.stack([m.any(-1) for m in (bits[:, 0], bits[:, 0], bits[:, 1])], axis=1)
    possible[:, 1] = bits[:, 0, :3].any(-1) & bits[:, 0, 3:].any(-1)
    who = possible & ((acting >> np.arange(3)) & 1).astype(np.bool_)
    draw = partial(random_actions, spec, acting=who, masks=masks, env_ids=np.arange(n), grouped=True)
    actions, again = draw(np.random.default_rng(seed)), draw(np.random.default_rng(seed))
    assert equal(actions, again)
    for g, group in enumerate(spec.groups):
        for i in range(n):
            for j, a in enumerate(group.agents):
                action = pick(group.action_space, actions[group.name], i, j)
                assert group.action_space.contains(action)
                if who[i, a]:
                    choices = np.ravel(action - group.action_space.start)
                    offsets = [0, 3][: len(choices)]
                    assert all(masks[g][i, j, offset + c] for offset, c in zip(offsets, choices, strict=True))


def test_an_agent_that_may_do_nothing_is_named() -> None:
    spec = spec_of([Discrete(2)] * 3, [2, 2, 2])
    mask = np.ones((2, 3, 2), np.bool_)
    mask[1, 2] = False
    acting = np.ones((2, 3), np.bool_)
    draw = partial(
        random_actions, spec, np.random.default_rng(0), masks=[mask], env_ids=np.array([4, 7]), grouped=False
    )
    with pytest.raises(ContractError, match="action mask of env 7, agent 'agent_2' allows nothing"):
        draw(acting=acting)
    acting[1, 2] = False
    assert draw(acting=acting).shape == (2, 3)


def test_padded_choices_are_never_drawn() -> None:
    """With padding all agents share one action space, and what an agent lacks counts as masked."""
    own = [Discrete(2), Discrete(6), Discrete(4)]
    factories = [partial(SampledEnv, OBSERVATION, own, agent_num=3, length=4, env_index=i) for i in range(N)]
    with make(factories, backend="sync", pad=True, validate="strict") as envs:
        drawn = np.stack(list(played(envs, 60)))
    assert [int(drawn[:, :, a].max()) for a in range(3)] == [1, 5, 3]


class Undrawable(Space[Any]):
    """Has no sample of its own."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Undrawable)

    __hash__ = None  # type: ignore[assignment]


class Unruly(Discrete):
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not today")


@pytest.mark.parametrize(("space", "why"), [(Undrawable(), "NotImplementedError"), (Unruly(3), "RuntimeError: not")])
def test_a_space_that_cannot_be_drawn_from_says_so(space: Any, why: str) -> None:
    with vectorize("sync", [partial(SampledEnv, Discrete(2), space, env_index=i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        words = rf"expected a space that can be drawn from, got {type(space).__name__}, whose sample\(\) raised {why}"
        with pytest.raises(UnsupportedSpaceError, match=words):
            envs.random_action()
