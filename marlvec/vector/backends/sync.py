"""`SyncVectorEnv`: all envs in the calling process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.faults.failures import raise_failures
from marlvec.vector.faults.recovery import survived_failures
from marlvec.vector.settings import Settings, SettingsArguments
from marlvec.vector.shards.env_builder import ShardFailed
from marlvec.vector.shards.shard import Shard
from marlvec.vector.vector_env import VectorEnv

__all__ = ["SyncVectorEnv"]


class SyncVectorEnv(VectorEnv):
    """One shard, run by the caller.

    Args:
        factories: One zero-argument callable per env.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate``, ``state``, ``spaces``,
            ``on_fault`` and ``max_restarts``, as in `marlvec.make`.

    Raises:
        EnvRaised: A factory raised.
        ContractError: Something is no env, or the envs' spaces differ.
    """

    backend = "sync"
    _place_name = "this process"

    def __init__(self, factories: Sequence[Callable[[], Any]], **settings: Unpack[SettingsArguments]) -> None:
        chosen = Settings(**settings)
        super().__init__(len(factories), chosen)
        try:
            self._shard = Shard(factories, 0, **chosen.of_shard())
        except ShardFailed as failed:
            failures = failed.failures
        else:
            failures = []
        raise_failures(failures, self._place_name)
        buffers = Buffers(self._shard.spec, self.num_envs)
        self._shard.attach(buffers)
        self._requests: list[tuple[str, NDArray[np.int64], tuple[Sequence[Any], ...]]] = []
        self._bind(self._shard.spec, buffers)
        self._recovery.note_survived(survived_failures(self._shard.survived))

    @property
    def envs(self) -> tuple[MultiAgentEnv, ...]:
        """The envs behind their adapters; ``.unwrapped`` of each is the user's own."""
        return tuple(self._shard.envs)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        self._is_sending = True
        self._requests.append((operation, env_ids, arguments))

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        if not self._requests:  # an env is to be built anew, but not yet; or an interrupt came before the request
            time.sleep(timeout or 0.0)
            if timeout is None:
                self._replies.append((np.array(self._call_state.in_flight, np.int64), None))
            return timeout is None
        try:
            operation, env_ids, arguments = self._requests.pop(0)
            report = self._shard.run(operation, env_ids.tolist(), arguments)
            self._replies.append((env_ids, report))
        except Exception:
            raise
        except BaseException:
            # Ctrl-C in the middle of an env: nobody knows how far it came, so these envs have to be reset.
            self.drive_count += 1
            left = np.array(self._call_state.in_flight, np.int64)
            self._call_state.arrive(left)
            self._call_state.hand_out()
            self._call_state.lose_episodes(left)
            self._requests.clear()
            self._replies.clear()
            raise
        return True

    def _forget_requests(self) -> bool:
        self._requests.clear()
        return True

    def _shut_down(self, timeout: float) -> None:
        self._requests.clear()
        failures = self._shard.close()
        for failure in failures:
            if not isinstance(failure.exception, Exception):
                raise failure.exception  # Ctrl-C is the caller's, not the env's
        raise_failures(failures, self._place_name)
