"""Seeds: one int for all, one each, or none; in the parent everything that is no seed is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec import SyncVectorEnv, VectorEnv, env_seeds
from marlvec.errors import ArgumentError
from marlvec.testing.scripted import CounterEnv, decode, draw
from tests.vector.support.kinds import HERE_AND_AWAY, vectorize

N = 4


def counters(backend: str, lengths: Any = 3, n: int = N, **options: Any) -> VectorEnv:
    own = lengths if isinstance(lengths, dict) else dict.fromkeys(range(n), lengths)
    return vectorize(backend, [partial(CounterEnv, own[i], agent_num=2, env_index=i) for i in range(n)], **options)


def draws(obs: Any) -> list[int]:
    return [draw(row[0]) for row in obs]


def play(envs: VectorEnv, steps: int) -> list[list[int]]:
    """Per env, what its random stream gave for each episode that an autoreset began."""
    out: list[list[int]] = [[] for _ in range(envs.num_envs)]
    seen = [-1] * envs.num_envs
    for _ in range(steps):
        obs, *_ = envs.step(np.ones((envs.num_envs, 2), np.int64))
        for i, row in enumerate(obs):
            stamp = decode(row[0])
            if stamp.t == 0 and stamp.episode != seen[i]:
                seen[i] = stamp.episode
                out[i].append(draw(row[0]))
    return out


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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=4)
@pytest.mark.checklist(21)
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_autoreset_goes_on_with_the_envs_own_stream(backend: str, mode: str) -> None:
    """Episodes differ, are those of the env's own generator, and depend on nobody else's lengths."""
    expected = []
    for seed in env_seeds(11, N):
        rng = np.random.default_rng(seed)
        expected.append([int(rng.integers(65_536)) for _ in range(30)])
    for others in (1, 2, 5, 9):
        lengths = {0: 3, 1: others, 2: [others, 2], 3: 3}
        with counters(backend, lengths, autoreset_mode=mode) as envs:
            first = draws(envs.reset(seed=11)[0])
            later = play(envs, 24)
        for i in range(N):
            stream = [first[i], *later[i]]
            assert len(stream) >= 3
            assert stream == expected[i][: len(stream)]
            assert len(set(stream)) == len(stream), "no episode is the first one again"


@pytest.mark.checklist(22)
@pytest.mark.fault("B7")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_partial_resets(backend: str) -> None:
    with counters(backend, 5) as envs:
        obs, _ = envs.reset(seed=2)
        t = [0] * N
        for k, chosen in enumerate([[1], [3, 0], [True, False, False, True], np.array([2, 1]), [], [False] * N] * 2):
            for _ in range(2):
                obs, *_ = envs.step(np.ones((N, 2), np.int64))
            before = obs.copy()
            t = [(x + 2) % 5 for x in t]
            new, infos = envs.reset(seed=None if k % 2 else k, env_ids=chosen)
            ids = np.flatnonzero(chosen) if np.asarray(chosen).dtype == bool else np.array(chosen, int)
            for i in range(N):
                if i in ids:
                    t[i] = 0
                    assert decode(new[i, 0]).t == 0
                    assert decode(new[i, 0]).episode == decode(before[i, 0]).episode + 1
                else:
                    assert new[i].tobytes() == before[i].tobytes(), "the others keep theirs"
            assert infos["alive"].all()
            obs, *_ = envs.step(np.ones((N, 2), np.int64))
            t = [(x + 1) % 5 for x in t]
            assert [decode(row[0]).t for row in obs] == t, "and are in the middle of their episodes"
        wrong: list[Any] = [
            [4],
            [-1],
            [0, 0],
            [1.0],
            [[0, 1]],
            [True, False],
            [True] * 5,
            np.ones((N, 2), bool),
            "0",
            2,
            [None],
            np.array([1], object),
        ]
        for env_ids in wrong:
            for call in (envs.reset, envs.reset_send):
                with pytest.raises(ArgumentError, match="env_ids"):
                    call(env_ids=env_ids)
        obs, *_ = envs.step(np.ones((N, 2), np.int64))
        assert [decode(row[0]).t for row in obs] == [(x + 1) % 5 for x in t]


class Optional(CounterEnv):
    """Notes its options, and spoils them."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        infos["agent_0"] = {"level": -1 if options is None else options["nested"]["level"]}
        if options is not None:
            options["nested"]["level"] = 999
            options.clear()
        return obs, infos


@pytest.mark.checklist(22)
@pytest.mark.checklist(23)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_options_for_all_or_for_each_are_never_altered(backend: str) -> None:
    with vectorize(backend, [partial(Optional, 2, env_index=i) for i in range(N)]) as envs:
        one = {"nested": {"level": 3}}
        for _ in range(3):
            assert envs.reset(options=one)[1]["level"][:, 0].tolist() == [3] * N
            assert one == {"nested": {"level": 3}}
            many = [{"nested": {"level": i}} if i % 2 else None for i in range(N)]
            assert envs.reset(options=many)[1]["level"][:, 0].tolist() == [-1, 1, -1, 3]
            assert many == [{"nested": {"level": i}} if i % 2 else None for i in range(N)]
            some = envs.reset(options=one, env_ids=[2])[1]
            assert some["_level"][:, 0].tolist() == [False, False, True, False]
            _, _, _, _, infos = envs.step(np.ones((N, 3), np.int64))
            _, _, _, _, infos = envs.step(np.ones((N, 3), np.int64))
            assert infos["level"][:, 0].tolist() == [-1] * N, "an autoreset has no options"
        for wrong, words in (([one], "a list of 1 for 4"), ([1, 2, 3, 4], r"options\[0\]"), ([one] * 5, "list of 5")):
            with pytest.raises(ArgumentError, match=words):
                envs.reset(options=wrong)


@pytest.mark.fault("B11")
def test_zero_envs_and_zero_workers() -> None:
    factories = [CounterEnv] * 3
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        SyncVectorEnv([])
    for backend, options in (
        ("async", {"num_workers": 0}),
        ("async", {"num_workers": 4}),
        ("async", {"num_workers": -1}),
    ):
        with pytest.raises(ValueError, match="num_workers must be an integer from 1 to num_envs=3"):
            vectorize(backend, factories, **options)
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        vectorize("async", [], num_workers=1)
    with vectorize("async", factories, num_workers=2) as envs:  # 3 on 2: uneven is fine
        envs.reset()
        envs.step(np.ones((3, 3), np.int64))
