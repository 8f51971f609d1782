"""Seeds: one int for all, one each, or none; in the parent everything that is no seed is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec import VectorEnv, env_seeds
from marlvec.errors import ArgumentError
from marlvec.testing.scripted import CounterEnv, decode, draw
from tests.vector.support.kinds import HERE_AND_AWAY, vectorize

N = 4


def counters(backend: str, lengths: Any = 3, n: int = N, **options: Any) -> VectorEnv:
    own = lengths if isinstance(lengths, dict) else dict.fromkeys(range(n), lengths)
    return vectorize(backend, [partial(CounterEnv, own[i], agent_num=2, env_index=i) for i in range(n)], **options)


def draws(obs: Any) -> list[int]:
    return [draw(row[0]) for row in obs]


@pytest.mark.checklist(20)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_int_is_spread_and_a_list_is_taken_as_it_is(backend: str) -> None:
    with counters(backend) as envs:
        first = draws(envs.reset(seed=5)[0])
        assert first == draws(envs.reset(seed=env_seeds(5, N))[0]), "one int is env_seeds of it"
        assert first == [int(np.random.default_rng(s).integers(65_536)) for s in env_seeds(5, N)]
        for number in (np.int64(5), np.uint8(5), np.int32(5)):
            assert first == draws(envs.reset(seed=number)[0])
        assert first == draws(envs.reset(seed=np.array(env_seeds(5, N), np.uint64))[0])
        assert not set(first) & set(draws(envs.reset(seed=6)[0]))
        with_none = draws(envs.reset(seed=[7, None, np.int64(7), None])[0])
        assert with_none[0] == with_none[2] == int(np.random.default_rng(7).integers(65_536))
        # None goes on with the env's own stream: the second number of the one that seed 6 began.
        rng = np.random.default_rng(env_seeds(6, N)[1])
        assert with_none[1] == [int(rng.integers(65_536)) for _ in range(2)][1]
        assert draws(envs.reset(seed=9, env_ids=[2, 0])[0])[2] == draws(envs.reset(seed=9)[0])[2], "by env, not place"


@pytest.mark.checklist(20)
@given(seed=st.integers(0, 2**64 - 2), n=st.integers(1, 64))
def test_seeds_of_neighbours_do_not_overlap(seed: int, n: int) -> None:
    mine, next_ones = env_seeds(seed, n), env_seeds(seed + 1, n)
    assert len(set(mine)) == len(mine) or n > 40  # 64 words of 32 bits may collide once in a while
    assert env_seeds(seed, n + 3)[:n] == mine, "the number of envs does not matter"
    assert len(set(mine) & set(next_ones)) <= 1
    assert all(0 <= s < 2**32 and type(s) is int for s in mine)


@pytest.mark.checklist(20)
def test_no_two_of_many_base_seeds_share_an_env_seed() -> None:
    seeds = [s for base in range(200) for s in env_seeds(base, 16)]
    assert len(set(seeds)) >= len(seeds) - 1


@pytest.mark.checklist(20)
@pytest.mark.fault("B10")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_what_is_no_seed_is_refused_in_the_parent(backend: str) -> None:
    wrong: list[tuple[Any, str]] = [
        (-1, "-1"),
        (2**64, str(2**64)),
        (1.5, r"1\.5 \(float\)"),
        (True, r"True \(bool\)"),
        (np.float64(1), "float64"),
        (np.bool_(True), "bool"),
        ("1", "'1'"),
        ([1], "a list of 1 for 4 envs"),
        ([1] * 5, "a list of 5 for 4 envs"),
        ([], "a list of 0"),
        (np.arange(3), "a list of 3"),
        ([1, 2, -1, 3], r"seed\[2\].*-1"),
        ([1, 2, 3, 2**64], r"seed\[3\]"),
        ((1, None, 1.5, 3), r"seed\[2\].*1\.5"),
        ([1, False, 2, 3], r"seed\[1\].*False"),
    ]
    with counters(backend) as envs:
        envs.reset(seed=1)
        for t in range(1, 10):
            for seed, words in wrong:
                with pytest.raises(ArgumentError, match=words):
                    envs.reset(seed=seed)
                with pytest.raises(ValueError, match=words):
                    envs.reset_send(seed=seed)
            with pytest.raises(ArgumentError, match="a list of 4 for 2 envs"):
                envs.reset(seed=[1, 2, 3, 4], env_ids=[0, 1])
            obs, *_ = envs.step(np.ones((N, 2), np.int64))
            assert {decode(row).t for row in obs[:, 0]} == {t % 3}, "the envs know nothing of it"
