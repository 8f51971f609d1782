"""Memory of results: shared and private, copies into memory that was used before, and infos as columns."""

from __future__ import annotations

import gc
import tempfile
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import example, given
from hypothesis import strategies as st

import marlvec
from marlvec import AsyncVectorEnv, VectorEnv, infos_from_list, infos_to_list, make
from marlvec.errors import SerialisationError
from marlvec.testing import CounterEnv, SampledEnv, ScriptedParallelEnv, SingleEnv
from marlvec.vector import buffers as buffer_reuse
from marlvec.vector.buffers import BufferReuse
from marlvec.vector.infos import RESERVED
from marlvec.vector.workers import channel
from tests.vector.support.kinds import BACKENDS, factories_of, vectorize
from tests.vector.support.reference import MODES, assert_trees_equal, flatten

# Shared memory: private, nameless, fixed in size, safe to look at for ever; and whose the results' arrays are.


N = 3
A = 2


def mapped(pid: int | str = "self") -> set[str]:
    """Mappings of memfds of ours in a process: their inode numbers."""
    lines = Path("/proc", str(pid), "maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:marlvec" in line}


def counters(backend: str = "async", **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, 3, agent_num=A, env_index=i) for i in range(N)], **options)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(16)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_infos_sends_headers_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the observations' size: all there is on the pipes is one header each way per worker."""
    sizes: list[tuple[str, int]] = []
    send, take = channel.Channel.send, channel.Channel.take

    def watched_send(self: Any, code: int, number: int, payload: bytes = b"", **rest: Any) -> None:
        sizes.append(("send", len(payload)))
        send(self, code, number, payload, **rest)

    def watched_take(self: Any, number: int | None = None) -> Any:
        found = take(self, number)
        if found is not None:
            sizes.append(("recv", len(found.payload)))
        return found

    space = Dict({"image": Box(0, 255, (64, 64, 3), np.uint8), "place": Box(-1, 1, (2,), np.float64)})
    actions = Dict({"move": Box(-1, 1, (3,), np.float32), "kind": Discrete(4)})
    factories = [partial(SampledEnv, space, actions, length=4, env_index=i) for i in range(N)]
    masked = [partial(ScriptedParallelEnv, masked=True, env_index=i, script=together(3)) for i in range(N)]
    with vectorize("async", factories, autoreset_mode=mode) as envs, vectorize("async", masked) as masks:
        for each in (envs, masks):
            each.reset(seed=1)
            each.action_space.seed(1)
        monkeypatch.setattr(channel.Channel, "send", watched_send)
        monkeypatch.setattr(channel.Channel, "take", watched_take)
        ends = 0
        for t in range(1, 16):
            if mode == "disabled" and t > 1 and t % 4 == 1:
                monkeypatch.undo()
                envs.reset()
                monkeypatch.setattr(channel.Channel, "send", watched_send)
                monkeypatch.setattr(channel.Channel, "take", watched_take)
            _, _, _, truncated, infos = envs.step(envs.action_space.sample())
            ends += int(truncated.any())
            assert ("final_observation" in infos) == truncated.any()
        assert ends == 3
        assert len(sizes) == 15 * 2 * 2
        assert set(sizes) == {("send", 0), ("recv", 0)}
        sizes.clear()
        legal = np.argmax(masks._buffers.action_masks[0], axis=-1)
        masks.step(legal)
        assert set(sizes) == {("send", 0), ("recv", 0)}
        monkeypatch.undo()


def together(agent_num: int) -> Any:
    from marlvec.testing.scripted import Script

    return Script.together(agent_num, 4)


@pytest.mark.checklist(16)
def test_shared_memory_is_the_default_and_holds_every_array() -> None:
    factories = factories_of("masked", N)
    known = mapped()
    with make(factories, num_workers=2) as envs:
        envs.reset(seed=0)
        assert len(mapped() - known) == 1
        buffers = envs._buffers
        names = set(buffers._arrays)
        assert {"obs/0/0", "final/0/0", "action/0/0", "mask/0", "reward", "flags"} <= names
        bases = {root(array) for array in buffers._arrays.values()}
        assert len(bases) == 1, "all of them are views of the one block"
        for view in (buffers.terminated, buffers.truncated, buffers.alive, buffers.acting, buffers.done):
            assert np.shares_memory(view, buffers.flags)


@pytest.mark.checklist(16)
def test_without_shared_memory_rows_are_in_a_file_that_has_no_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    known = mapped()
    with make(factories_of("masked", N), num_workers=2, shared_memory=False) as envs:
        envs.reset(seed=0)
        assert mapped() == known
        assert len({root(array) for array in envs._buffers._arrays.values()}) == 1
        assert list(tmp_path.iterdir()) == []
        for pid in ("self", *envs.worker_pids):  # type: ignore[attr-defined]
            assert f" {tmp_path}/" in Path(f"/proc/{pid}/maps").read_text()


def root(array: Any) -> int:
    while getattr(array, "base", None) is not None and isinstance(array.base, np.ndarray):
        array = array.base
    return id(array.base)


@pytest.mark.checklist(18)
@pytest.mark.fault("C14")
@pytest.mark.parametrize("backend", BACKENDS)
def test_views_copy_nothing_and_cannot_be_written_to(backend: str) -> None:
    with counters(backend, copy=False) as envs:
        obs, infos = envs.reset(seed=0)
        first = obs
        for t in range(1, 10):
            obs, rewards, terminated, truncated, infos = envs.step(np.ones((N, A), np.int64))
            buffers = envs._buffers
            pairs = [(obs, buffers.obs[0][0]), (rewards, buffers.reward), (terminated, buffers.flags)]
            pairs += [(truncated, buffers.flags), (infos["alive"], buffers.flags), (infos["acting"], buffers.flags)]
            if t % 3 == 0:
                pairs.append((infos["final_observation"], buffers.final_obs[0][0]))
            for view, buffer in pairs:
                assert np.shares_memory(view, buffer), "no copy is made"
                assert not view.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    view[...] = 0
            np.testing.assert_array_equal(first, obs)  # the same memory: a view is the newest step
        assert np.shares_memory(first, obs)
    assert "views, valid until the next call that steps" in (VectorEnv.__doc__ or "")


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=5)
@pytest.mark.fault("C14")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_what_was_handed_out_outlives_close(context: str, copy: bool) -> None:
    """Reading it later neither crashes nor shows anything else."""
    envs = AsyncVectorEnv([partial(CounterEnv, agent_num=A)] * N, num_workers=2, copy=copy, context=context)
    obs, _ = envs.reset(seed=0)
    obs, rewards, *_ = envs.step(np.ones((N, A), np.int64))
    kept = obs.tobytes(), rewards.tobytes()
    envs.close()
    del envs
    gc.collect()
    for _ in range(3):
        assert (obs.tobytes(), rewards.tobytes()) == kept
        assert np.isfinite(flatten(obs)[0]).all()


# Copies in memory that was used before: nobody ever sees that it was.


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


# Infos: dicts of arrays with presence masks, and back without loss.


AGENTS = ("red", "green", "blue")

SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)


def arrays(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    return (np.random.default_rng(seed).random(shape) * 200).astype(dtype)


VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        st.text(max_size=4),
        st.none(),
        st.builds(
            arrays, st.sampled_from(["bool", "uint8", "int64", "float16", "float64", "U3"]), SHAPES, st.integers(0, 99)
        ),
        st.just(b"bytes"),
        st.just((1, "two")),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(["a", "b", "_c", ""]), st.integers(0, 2)), inner, max_size=3),
    ),
    max_leaves=6,
)
KEYS = st.one_of(
    st.sampled_from([*sorted(RESERVED), "reward", "_reward", "t", "", "_", "__agents__x"]), st.text(max_size=3)
)
ENTRIES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=3)
INFOS = st.lists(st.dictionaries(st.sampled_from([*AGENTS, "__common__"]), ENTRIES, max_size=4), min_size=1, max_size=4)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(26)
@given(infos=INFOS)
@example(infos=[{"red": {"x": 1}}, {"red": {"x": 1.5}}, {"red": {"x": True}}])
@example(infos=[{"red": {"x": {"y": 1}}}, {"blue": {"x": 3}}, {"__common__": {"x": {"y": {"z": None}}}}])
@example(infos=[{"red": {"x": {}}}, {"red": {"x": {"y": 1}}}])
@example(infos=[{"red": {"alive": 3, "_x": 1}, "__common__": {"x": [1]}}, {}])
@example(infos=[{"red": {"x": np.zeros(2)}}, {"red": {"x": np.zeros(3)}}, {"red": {"x": np.zeros(2, np.int8)}}])
def test_there_and_back(infos: list[Any]) -> None:
    """Every value, key and type comes back, whatever is beside it."""
    packed = infos_from_list(infos, AGENTS)
    back = infos_to_list(packed, AGENTS, len(infos))
    assert_trees_equal(back, infos, "infos")


@pytest.mark.checklist(26)
def test_the_form() -> None:
    packed = infos_from_list(
        [{"red": {"hits": 3, "place": np.array([1.0, 2.0])}, "__common__": {"level": 7}}, {"blue": {"hits": 4}}, {}],
        AGENTS,
    )
    assert packed["hits"].tolist() == [[3, 0, 0], [0, 0, 4], [0, 0, 0]]
    assert packed["hits"].dtype == np.int64
    assert packed["_hits"].tolist() == [[True, False, False], [False, False, True], [False] * 3]
    assert packed["place"].shape == (3, 3, 2)
    assert packed["level"].tolist() == [7, 0, 0]
    assert packed["_level"].tolist() == [True, False, False]
    assert packed["_level"].dtype == packed["_hits"].dtype == np.bool_


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("C12")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_an_info_that_cannot_cross_is_an_error_of_its_env(context: str) -> None:
    import threading

    class Locked(SingleEnv):
        def _info(self) -> dict[str, Any]:
            return (
                {"lock": threading.Lock()} if self.world.t == 2 and self.world.env_index == 1 else {"fine": lambda: 3}
            )

    with vectorize("async", [partial(Locked, 4, env_index=i) for i in range(3)], context=context) as envs:
        for _ in range(3):
            infos = envs.reset()[1]
            assert infos["fine"][2]() == 3, "a function travels by value"
            envs.step(np.zeros((3, 1), np.int64))
            with pytest.raises(
                SerialisationError, match=r"env 1, infos\(\): the info of env 1 cannot be pickled.*lock"
            ):
                envs.step(np.zeros((3, 1), np.int64))
