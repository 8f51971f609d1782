"""Copies in memory that was used before: nobody ever sees that it was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec.testing import CounterEnv
from marlvec.vector import buffers as buffer_reuse
from marlvec.vector.buffers import BufferReuse

LARGE = 1 << 14  # numbers of 8 bytes in a piece that is large enough


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["float64", "uint8", "bool", ">i4", "S3"])
def test_a_copy_is_equal_writable_and_independent(dtype: str) -> None:
    original = (np.arange(3 * 2 * LARGE) % 7).reshape(3, 2, LARGE).astype(dtype)
    for array in (original, original[:, ::2], original.transpose(2, 0, 1), original[:, :, :1]):
        made = BufferReuse()(array)
        assert made.dtype == array.dtype
        np.testing.assert_array_equal(made, array)
        assert made.flags.c_contiguous
        assert made.flags.writeable
        assert not np.shares_memory(made, array)


def test_memory_that_nobody_has_any_more_serves_again() -> None:
    copy, array = BufferReuse(), np.ones(LARGE)
    first, second = copy(array), copy(array)
    places = {address(first), address(second)}
    assert len(places) == 2
    del first, second
    for _ in range(10):
        assert address(copy(array)) in places


@pytest.mark.parametrize(
    "hold",
    [
        lambda made: made[1:].reshape(-1)[::3],
        lambda made: made.view(np.uint8),
        lambda made: made.T,
        memoryview,
        lambda made: memoryview(made)[3:],
        lambda made: made.data,
        lambda made: made.flat,
        lambda made: [{"obs": made[0:1]}],
        lambda made: pytest.importorskip("torch").from_numpy(made)[2:].numpy(),
        lambda made: np.from_dlpack(made),
        lambda made: np.asarray(made).__array_interface__ and made,
    ],
)
def test_whatever_was_made_of_it_keeps_it(hold: Any) -> None:
    copy, array = BufferReuse(), np.zeros((4, LARGE))
    made = copy(array)
    place = address(made)
    held = hold(made)
    del made
    for _ in range(3 * buffer_reuse._MAX_PER_SIZE):
        assert address(copy(np.ones_like(array))) != place
    assert held is not None


@pytest.mark.slow("plays whole episodes in worker processes")
@given(data=st.data())
def test_who_keeps_some_and_lets_go_of_others_never_sees_one_change(data: st.DataObject) -> None:
    copy = BufferReuse()
    kept: list[tuple[np.ndarray[Any, Any], int]] = []
    for step in range(data.draw(st.integers(1, 30), "steps")):
        made = copy(np.full((2, data.draw(st.sampled_from([LARGE // 2, LARGE]), "size")), step))
        if data.draw(st.booleans(), "keep"):
            kept.append(
                (made[data.draw(st.integers(0, 1), "row")] if data.draw(st.booleans(), "a view") else made, step)
            )
        del made
        while kept and data.draw(st.booleans(), "let go"):
            del kept[data.draw(st.integers(0, len(kept) - 1), "which")]
        for array, number in kept:
            assert (array == number).all()


def test_who_keeps_everything_is_not_in_the_way_of_who_comes_later() -> None:
    copy, array = BufferReuse(), np.ones(LARGE)
    kept = [copy(array) for _ in range(3 * buffer_reuse._MAX_PER_SIZE)]
    places = {address(made) for made in kept}
    assert len(places) == len(kept)
    for _ in range(3):
        made = copy(array)
        places.add(address(made))
        del made
    assert len(places) == len(kept) + 1


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_reuse, "_MAX_BYTES", 3 * LARGE * 8)
    copy = BufferReuse()
    made = [copy(np.ones(LARGE)) for _ in range(buffer_reuse._MAX_PER_SIZE)]
    made += [copy(np.ones(LARGE + k)) for k in range(8)]
    assert sum(memory.nbytes for known in copy._known.values() for memory in known) <= 3 * LARGE * 8
    for array in made:
        assert (array == 1).all()


@pytest.mark.slow("plays whole episodes in worker processes")
def test_forgetting_frees_it_and_leaves_to_others_what_is_theirs() -> None:
    copy = BufferReuse()
    mine, dropped = copy(np.ones(LARGE)), copy(np.ones(LARGE))
    gone = weakref.ref(dropped.base)
    del dropped
    assert gone() is not None
    copy.forget()
    gc.collect()
    assert gone() is None
    assert (mine == 1).all()
    assert (copy(np.zeros(LARGE)) == 0).all()
    assert (mine == 1).all()


def test_small_ones_and_objects_are_plain_copies() -> None:
    copy = BufferReuse()
    objects = np.full(LARGE, None)
    for array in (np.ones(8), objects, np.empty((0, 3))):
        made = copy(array)
        assert made.base is None
        assert made.shape == array.shape
    assert not copy._known


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize("backend", ["sync", "async", "thread"])
def test_steps_of_whole_episodes_stay_as_they_were_handed_out(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_reuse, "_LARGE", 0)
    with marlvec.make(CounterEnv, 6, backend=backend) as envs:
        seen = []
        obs, _ = envs.reset(seed=0)
        for t in range(40):
            seen.append((obs, obs.copy()))
            del seen[: t % 3]
            obs, rewards, _, _, infos = envs.step(envs.random_action(t))
            final = infos.get("final_observation")
            seen += [(array, array.copy()) for array in (rewards, infos["alive"], final) if array is not None]
            for array, then in seen:
                np.testing.assert_array_equal(array, then)
        made = envs._copier
        assert made._known
    assert not made._known
