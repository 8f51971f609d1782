"""`SyncVectorEnv`: all envs in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.vector.backends.in_process import InProcessVectorEnv
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import raise_failures
from marlvec.vector.settings import Settings, SettingsArguments
from marlvec.vector.shards.env_builder import ShardFailed, drawn_by_several
from marlvec.vector.shards.shard import Shard

__all__ = ["SyncVectorEnv"]


class SyncVectorEnv(InProcessVectorEnv):
    """One shard, run by the caller.

    Args:
        factories: One zero-argument callable per env.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate``, ``state``, ``spaces``,
            ``env_state``, ``on_fault`` and ``max_restarts``, as in `marlvec.make`.

    Raises:
        EnvRaised: A factory raised.
        ContractError: A factory returned something that is not an env, or the envs' spaces differ.
    """

    backend = "sync"
    _works_in_forks = True

    def __init__(self, factories: Sequence[Callable[[], Any]], **settings: Unpack[SettingsArguments]) -> None:
        chosen = Settings(**settings)
        super().__init__(len(factories), chosen)
        try:
            self._shard = Shard(factories, 0, chosen)
        except ShardFailed as failed:
            failures = failed.failures
        else:
            failures = []
        if failures:
            raise_failures(failures, self._place_name)
        buffers = Buffers(self._shard.spec, self.num_envs)
        self._shard.attach(buffers)
        self._bind(self._shard.spec, buffers)
        self.shared_generators = drawn_by_several(self._shard.generators)
        self._recovery.note_survived(self._shard.survived)

    @property
    def envs(self) -> tuple[MultiAgentEnv, ...]:
        """The envs as adapters; ``.unwrapped`` of each is the user's env."""
        return tuple(self._shard.envs)

    def _run(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> Report | None:
        shard = self._shard
        ids = shard.everyone if env_ids is self._everyone else env_ids.tolist()
        return shard.step(ids) if operation == "step" else shard.do(operation, ids, arguments)

    def _shut_down(self, timeout: float) -> None:
        self._requests.clear()
        failures = self._shard.close()
        for failure in failures:
            if not isinstance(failure.exception, Exception):
                raise failure.exception  # Ctrl-C is the caller's, not the env's
        raise_failures(failures, self._place_name)
