"""The pacing rule alone: lag is bounded, there is always a batch, and nobody starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.distributed.accounting import Ledger, Pacing, Shares, may_publish


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**32))
def test_lag_is_bounded_whatever_comes_when_and_is_lost(fragments: int, lag: int, seed: int) -> None:
    """Stragglers that come last of all, losses, one to four batches a version."""
    rng, pacing = random.Random(seed), Pacing(fragments, lag)
    bases: list[int] = []
    ready: list[int] = []
    for version in range(60):
        for _ in range(rng.choice((1, 1, 1, 2, 4)) if lag else 1):
            bases += [version] * (pacing.most - len(bases))  # type: ignore[operator]  # there is a bound
            while (chosen := pacing.pick(ready, bases, version)) is None:
                absent = [k for k in range(len(bases)) if k not in ready]
                assert absent, "all that was asked for is there, and yet it waits"
                k = rng.choice(absent) if rng.random() < 0.7 else max(absent)
                if rng.random() < 0.1:  # lost; another one is asked for at the present version
                    del bases[k]
                    ready = [x - (x > k) for x in ready]
                    bases.append(version)
                else:
                    ready.append(k)
            assert len(set(chosen)) == fragments
            assert chosen == [k for k in ready if k in chosen], "in the order in which they came"
            assert max(version - bases[k] for k in chosen) <= lag
            kept = [k for k in range(len(bases)) if k not in chosen]
            ready = [kept.index(k) for k in ready if k in kept]
            bases = [bases[k] for k in kept]
        bases += [version] * (fragments * lag - len(bases))
        assert may_publish(bases, version, lag)


def test_without_a_bound_it_is_first_come_first_served() -> None:
    pacing = Pacing(2, None)
    assert pacing.most is None
    assert pacing.pick([3], [0, 0, 0, 0], 9) is None
    assert pacing.pick([3, 1, 2], [0, 7, 0, 9], 9) == [3, 1]
    assert may_publish([0], 99, None)


@pytest.mark.parametrize(
    ("bases", "version", "may"), [([], 3, True), ([3], 3, True), ([2], 3, False), ([3, 2], 3, False)]
)
def test_a_version_waits_for_what_it_would_make_too_old(bases: list[int], version: int, may: bool) -> None:
    assert may_publish(bases, version, 1) is may


def test_a_smaller_batch_than_what_is_due_takes_the_oldest() -> None:
    assert Pacing(1, 1).pick([2, 0, 1], [0, 0, 1], 1) == [0]


def test_a_plan_saved_with_the_ids_of_its_requests_is_read() -> None:
    shares, ledger = Shares(), Ledger()
    shares.prepare({"goal": ["env_steps", 5], "shares": [[0, 3, 7], [1, 2, None]]})()
    assert shares.requests(ledger, [0, 1]) == [(0, 3), (1, 2)]
    ledger.issue(1, 0, 2, 0)
    assert shares.requests(ledger, [0, 1]) == [(0, 3)]
    assert shares.requests(ledger, [1]) == [(1, 3)], "collector 0 is masked"
