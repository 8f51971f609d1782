"""Shared memory: private, nameless, fixed in size, safe to look at for ever; and whose the results' arrays are."""

from __future__ import annotations

import gc
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from marlvec import AsyncVectorEnv, VectorEnv, make
from marlvec.testing.scripted import CounterEnv, SampledEnv, ScriptedParallelEnv
from marlvec.vector.workers import channel
from tests.vector.support.kinds import BACKENDS, factories_of, vectorize
from tests.vector.support.reference import MODES
from tests.vector.support.trees import flatten

N, A = 3, 2


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
