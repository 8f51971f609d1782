"""All envs in the calling process: nothing to start, nothing to copy, and every breakpoint works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.vector.buffers import Buffers
from marlvec.vector.faults import raise_failures
from marlvec.vector.shard import Report, Shard, ShardFailed
from marlvec.vector.vector_env import VectorEnv

__all__ = ["SyncVectorEnv"]


class SyncVectorEnv(VectorEnv):
    """One shard, run by the caller.

    Args:
        factories: One zero-argument callable per env.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``.
        done_on: ``"all"``: an episode is over when its last agent has ended; ``"any"``: when the first has.
        copy: Return copies; False for read-only views, valid until the next call that steps.
        grouped: Dicts of groups also where there is one group.
        validate: How often action values are checked: ``"strict"``, ``"sample"`` or ``"off"``.

    Raises:
        EnvRaised: A factory raised.
        ContractError: Something is no env, or the envs' spaces differ.
    """

    backend = "sync"
    _place = "this process"

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        *,
        autoreset_mode: str = "same_step",
        done_on: str = "all",
        copy: bool = True,
        grouped: bool = False,
        validate: str = "sample",
    ) -> None:
        super().__init__(len(factories), autoreset_mode=autoreset_mode, done_on=done_on, copy=copy, validate=validate)
        try:
            self._shard = Shard(factories, 0, autoreset_mode, done_on)
        except ShardFailed as failed:
            failures = failed.failures
        else:
            failures = []
        raise_failures(failures, self._place)
        buffers = Buffers(self._shard.spec, self.num_envs)
        self._shard.attach(buffers)
        self._requests: list[tuple[str, NDArray[np.int64], Any]] = []
        self._bind(self._shard.spec, buffers, grouped=grouped)

    @property
    def envs(self) -> tuple[MultiAgentEnv, ...]:
        """The envs behind their adapters; ``.unwrapped`` of each is the user's own."""
        return tuple(self._shard.envs)

    def _dispatch(self, operation: str, env_ids: NDArray[np.int64], arguments: Any) -> None:
        self._requests.append((operation, env_ids, arguments))

    def _gather(
        self, timeout: float | None, everyone: bool
    ) -> Sequence[tuple[NDArray[np.int64], Report | None]] | None:
        operation, env_ids, arguments = self._requests.pop(0)
        try:
            return [(env_ids, self._run(operation, env_ids.tolist(), arguments))]
        except BaseException:
            # Ctrl-C in the middle of an env: nobody knows how far it came, so these envs have to be reset.
            self._calls.arrive(env_ids)
            self._calls.hand_out()
            self._calls.lose_episodes(env_ids)
            raise

    def _run(self, operation: str, ids: list[int], arguments: Any) -> Report:
        if operation == "step":
            return self._shard.step(ids)
        if operation == "reset":
            return self._shard.reset(ids, *arguments)
        return self._shard.write_state(ids)

    def _shut_down(self, timeout: float) -> None:
        self._requests.clear()
        raise_failures(self._shard.close(), self._place)
