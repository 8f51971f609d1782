"""Gymnasium's vector envs as a backend: against a plain loop, and against the sync backend over the same envs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, Text, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import marlvec
from marlvec.errors import ArgumentError, BrokenError, ContractError, EnvRaised
from marlvec.testing import SingleEnv
from marlvec.vector.pool_env import PoolVectorEnv
from tests.vector.support.reference import MODES, assert_trees_equal, record, refused, replay

pytestmark = pytest.mark.checklist(125)


ROOT = Path(__file__).resolve().parents[2]


def factories_of(n: int, **options: Any) -> list[Callable[[], Any]]:
    return [partial(SingleEnv, [3, 1, 5], info_every=2, env_index=i, **options) for i in range(n)]


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_plain_loop(mode: str, masked: bool, copy: bool) -> None:
    """Whole episodes, with resets of some envs and seeds of theirs in between, and infos now and then."""
    calls = record(factories_of(4, masked=masked), mode, interrupt=0.2)
    envs = SyncVectorEnv(factories_of(4, masked=masked), autoreset_mode=AutoresetMode[mode.upper()])
    with PoolVectorEnv(envs, autoreset_mode=mode, copy=copy) as mine:
        replay(mine, calls)
    assert envs.closed


def test_same_step_over_envs_that_leave_resets_to_others() -> None:
    calls = record(factories_of(3), "same_step", interrupt=0.2)
    with PoolVectorEnv(SyncVectorEnv(factories_of(3), autoreset_mode=AutoresetMode.DISABLED)) as mine:
        replay(mine, calls)


@pytest.mark.slow("plays whole pools")
def test_worker_processes_of_gymnasium() -> None:
    """Run apart: multiprocessing keeps a tracker and shared memory for as long as the process lives that asked."""
    code = f"import {__name__} as tests; tests.play_in_worker_processes()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT, timeout=150)


def play_in_worker_processes() -> None:
    """Calls come in halves; envs in other processes cannot be asked for anything else."""
    calls = record(factories_of(2), "next_step", interrupt=0.2)
    with PoolVectorEnv(AsyncVectorEnv(factories_of(2)), autoreset_mode="next_step") as mine:
        replay(mine, calls)
        mine.reset()
        mine.step_send(mine.random_action())
        assert mine.step_fetch(timeout=60)[1].any()
        refused(EnvRaised, "not in this process", mine.get_attr, "world")


@pytest.mark.parametrize("mode", MODES)
def test_make_takes_ids_of_gymnasium(mode: str) -> None:
    """Time limits are truncations, final observations are true, in every mode what the sync backend brings."""
    options: dict[str, Any] = {"num_envs": 3, "autoreset_mode": mode, "max_episode_steps": 12}
    with (
        marlvec.make("CartPole-v1", backend="pool", **options) as mine,
        marlvec.make("CartPole-v1", backend="sync", **options) as theirs,
    ):
        assert (mine.backend, mine.agents, mine.observation_space) == ("pool", theirs.agents, theirs.observation_space)
        assert_trees_equal(mine.reset(seed=4), theirs.reset(seed=4))
        cut = 0
        for _ in range(40):
            actions = theirs.random_action()
            step = theirs.step(actions)
            assert_trees_equal(mine.step(actions), step)
            cut += int(step[3].sum())
            if mode == "disabled" and (over := (step[2] | step[3]).any(axis=1)).any():
                assert_trees_equal(mine.reset(env_ids=over)[0], theirs.reset(env_ids=over)[0])
        assert cut


def test_an_env_that_is_all_its_envs() -> None:
    """It has one random stream, one way to end episodes, and resets all or none."""
    options: dict[str, Any] = {"backend": "pool", "vectorization_mode": "vector_entry_point"}
    with marlvec.make("CartPole-v1", 3, autoreset_mode="next_step", **options) as envs:
        first, _ = envs.reset(seed=3)
        resets = 0
        for _ in range(60):
            *_, infos = envs.step(envs.random_action())
            resets += int(infos["reset_mask"].sum())
        assert resets
        assert np.array_equal(envs.reset(seed=3)[0], first)
        refused(ArgumentError, "resets all its envs at once", envs.reset, env_ids=[1])
    with pytest.raises(ArgumentError, match="'next_step'; take that"):
        marlvec.make("CartPole-v1", 3, autoreset_mode="same_step", **options)


def test_wrappers_of_gymnasium_go_with_it() -> None:
    inner = SyncVectorEnv(factories_of(2), autoreset_mode=AutoresetMode.NEXT_STEP)
    with PoolVectorEnv(RecordEpisodeStatistics(inner), autoreset_mode="next_step") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            *_, infos = envs.step(np.zeros((2, 1), np.int64))
        assert infos["episode"]["l"].tolist() == [3, 3]
        assert [env.world.env_index for env in envs.exec_func(lambda env: env.unwrapped)] == [0, 1]


def test_what_it_cannot_do_is_refused() -> None:
    def envs(mode: str = "NEXT_STEP", **options: Any) -> SyncVectorEnv:
        return SyncVectorEnv(factories_of(2), autoreset_mode=AutoresetMode[mode], **options)

    for own, wanted in (("NEXT_STEP", "same_step"), ("SAME_STEP", "disabled"), ("DISABLED", "next_step")):
        refused(ArgumentError, f"autoreset_mode='{wanted}'", PoolVectorEnv, envs(own), autoreset_mode=wanted)
    with PoolVectorEnv(envs(), autoreset_mode="next_step") as mine:
        mine.reset(options={"a": 1})
        refused(ArgumentError, "steps all its envs at once", mine.send, np.zeros((1, 1), np.int64), [1])
        refused(ArgumentError, "one dict for all envs", mine.reset, options=[{"a": 1}, None])
        mine.send(mine.random_action())
        assert mine.recv().env_ids.tolist() == [0, 1]
    refused(ArgumentError, "num_envs=1", PoolVectorEnv, envs(), num_envs=1)
    silent = envs()
    silent.metadata = {}
    refused(ContractError, "autoreset_mode", PoolVectorEnv, silent)
    silent.single_observation_space = Text(3)
    silent.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    refused(ContractError, "no fixed-size array form", PoolVectorEnv, silent)


def test_an_env_that_raises_breaks_it() -> None:
    class Bad(SingleEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("no more")

    with PoolVectorEnv(SyncVectorEnv([Bad, Bad]), autoreset_mode="next_step") as envs:
        envs.reset()
        refused(RuntimeError, "no more", envs.step, envs.random_action())
        refused(BrokenError, "no more", envs.reset)


def test_a_factory_may_return_one() -> None:
    def build(num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return SyncVectorEnv(factories_of(num_envs), autoreset_mode=AutoresetMode.SAME_STEP)

    with marlvec.make(build, 3, backend="pool") as envs:
        assert envs.reset(seed=1)[0].shape == (3, 1, 7)


class InfoMask(gymnasium.Env[Any, Any]):
    """Gives a mask in most of its infos."""

    observation_space = Box(0, 9, (1,))

    def __init__(self, space: Any = None, mask: Any = None) -> None:
        self.action_space, self._mask = Discrete(3) if space is None else space, mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return np.zeros(1, np.float32), self._info()

    def step(self, action: Any) -> Any:
        self._t += 1
        return np.full(1, self._t, np.float32), 1.0, self._t == 4, False, self._info()

    def _info(self) -> dict[str, Any]:
        mask = np.roll([1, 0, 1], self._t) if self._mask is None else self._mask
        return {"action_mask": mask} if self._t % 3 < 2 else {}


@pytest.mark.parametrize("mode", MODES)
def test_masks_in_infos_are_those_of_the_plain_loop(mode: str) -> None:
    calls = record([InfoMask] * 3, mode)
    envs = SyncVectorEnv([InfoMask] * 3, autoreset_mode=AutoresetMode[mode.upper()])
    with PoolVectorEnv(envs, autoreset_mode=mode) as mine:
        replay(mine, calls)
        assert mine.reset(seed=0)[1]["action_mask"].tolist() == [[[True, False, True]]] * 3


@pytest.mark.parametrize(
    ("space", "mask", "words"),
    [
        (
            Tuple((Discrete(3), Discrete(2))),
            (np.ones(3, np.int8), np.ones(2, np.int8)),
            "expected none, got one for Tuple",
        ),
        (MultiBinary(3), np.array([0, 1, 2], np.int8), "expected none, got one for MultiBinary"),
        (Discrete(3), np.ones(4, np.int8), r"expected shape \(3,\), got \(4,\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(space: Any, mask: Any, words: str) -> None:
    with (
        PoolVectorEnv(SyncVectorEnv([partial(InfoMask, space, mask)] * 2), autoreset_mode="next_step") as envs,
        pytest.raises(ContractError, match=f"env 0: action mask in its info: {words}"),
    ):
        envs.reset(seed=0)
