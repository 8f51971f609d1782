"""Gymnasium envs of several agents: what a plain loop over them gives, byte for byte, in every form they may have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.vector.support.joint_env import JOINT, JointEnv
from tests.vector.support.kinds import vectorize
from tests.vector.support.reference import MODES, record, replay

N = 3


def factories(form: str) -> list[Callable[[], Any]]:
    return [partial(JointEnv, env_index=i, **JOINT[form]) for i in range(N)]


@pytest.mark.mostly_slow("plays whole episodes", quick=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", JOINT)
def test_sync_is_the_plain_loop(form: str, mode: str) -> None:
    with vectorize("sync", factories(form), autoreset_mode=mode) as envs:
        agent_num = JOINT[form].get("agent_num", 3)
        assert envs.agent_num == agent_num
        assert len(envs.groups) == (2 if form == "unlike" else 1)
        replay(envs, record(factories(form), mode))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize("backend", ["thread", "async"])
@pytest.mark.parametrize("form", JOINT)
def test_threads_and_processes_are_the_plain_loop(form: str, backend: str) -> None:
    mode = MODES[(len(form) + len(backend)) % 3]
    with vectorize(backend, factories(form), autoreset_mode=mode) as envs:
        replay(envs, record(factories(form), mode))
