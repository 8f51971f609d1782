"""`PoolVectorEnv`: envs in one object of another library: EnvPool's pools, Gymnasium's vector envs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options, check_env_ids, spread_options
from marlvec.envs.making.recipe import EnvRecipe
from marlvec.errors import ArgumentError, BrokenError, BusyError, MarlvecError
from marlvec.vector.backends.in_process import InProcessVectorEnv
from marlvec.vector.call_state import STREAM_CALLS, CallEvent
from marlvec.vector.commands import CommandTarget, run_commands
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture, raise_failures
from marlvec.vector.pools.adapt import adapt_pool, build_pool
from marlvec.vector.pools.pool import Pool
from marlvec.vector.seeding import spread_seeds
from marlvec.vector.settings import Settings, SettingsArguments
from marlvec.vector.shards.pool_shard import PoolShard

__all__ = ["PoolVectorEnv", "make_pool"]


class PoolVectorEnv(InProcessVectorEnv):
    """The envs of one pool.

    Every autoreset mode works with true final observations, whatever the pool does by itself; steps in which it only
    resets an env are marked, or not seen at all. A pool that hands out ``batch_size`` rows at a time continues to do
    so: `send` and `recv` overlap with its threads, and its spare envs, if any, fill up batches that would never become
    full.

    The pool owns its envs: none is restarted (``on_fault`` has no effect), wrappers cannot reach them, and an exception
    of the pool leaves it broken. Actions are checked against their spaces in every call, whatever ``validate`` is:
    with a wrong action, compiled code would read outside its arrays.

    EnvPool's pools take their seeds when they are made: ``reset(seed=…)`` of all envs closes the old pool and makes a
    new one; it raises if the pool cannot be made again.

    Args:
        pool: A pool of EnvPool or of its interface, a Gymnasium vector env, or a `marlvec.vector.pools.pool.Pool`. The
            vectorizer owns it from now on, and closes it.
        num_envs: How many of the pool's envs are for use; None: all. The others are spares.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped`` and ``validate``, as in `marlvec.make`;
            ``spaces``, ``on_fault`` and ``max_restarts`` are accepted and have no effect.

    Raises:
        ArgumentError: The pool cannot do that.
        ContractError: It is no pool.
    """

    backend = "pool"
    _always_checks_actions = True
    _place_name = "the pool"

    def __init__(self, pool: Any, *, num_envs: int | None = None, **settings: Unpack[SettingsArguments]) -> None:
        chosen = Settings(**settings)
        self._pool: Pool = adapt_pool(pool, num_envs=num_envs)
        spec = self._pool.spec
        if chosen.env_state is not None:
            raise ArgumentError(f"env_state={chosen.env_state!r}: a pool keeps its envs' states")
        if chosen.state and spec.state_space is None:
            raise ArgumentError(f"state=True: expected envs with a global state, and {spec.name} has none")
        self._pool.brings_state = bool(chosen.state)
        if chosen.done_on != "all" and len(spec.agents) > 1:
            raise ArgumentError(f"done_on={chosen.done_on!r}: {spec.name} decides by itself when an episode is over")
        super().__init__(self._pool.num_envs, chosen)
        self._batch = self._shard = PoolShard(self._pool, chosen.autoreset_mode)
        self._command_target = cache(partial(_command_target, self._pool))
        buffers = Buffers(spec, self.num_envs)
        self._shard.attach(buffers)
        self._bind(spec, buffers)
        self._pool.warm_up()

    def _request_reset(self, call: str, seed: Any, options: Options, env_ids: EnvIds | None) -> None:
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._call_state.check_free(ids, call)
        self._pool.check_reset(ids, spread_seeds(seed, ids.tolist(), self.num_envs), spread_options(options, len(ids)))
        self._check_batch(call, len(ids))
        super()._request_reset(call, seed, options, env_ids)

    def _check_batch(self, call: str, count: int) -> None:
        """Check that a call that is pending alone can end."""
        if call not in STREAM_CALLS and (missing := self._shard.queue.missing_for(count)):
            raise ArgumentError(
                f"{call}() of {count} envs: {self.spec.name} hands out {self._pool.batch_size} rows at a time, and has "
                f"no spare envs to fill up the last batch; {missing} are missing. Take a number that divides"
            )

    def _request_step(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        self._call_state.check_episodes(ids, call)
        if self._pool.steps_all and len(ids) < self.num_envs:
            raise ArgumentError(f"{call}(): {self.spec.name} steps all its envs at once, got {ids.tolist()}")
        super()._request_step(call, actions, ids)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        if operation in ("control", "state"):
            super()._send_request(operation, env_ids, arguments)
            return
        self._is_sending = True
        if operation == "reset":
            self._shard.ask_reset(env_ids, *arguments, alone=self._call_state.outstanding == len(env_ids))
        else:
            self._shard.ask_step(env_ids)

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        queue = self._shard.queue
        if self._requests or queue.empty:
            return super()._receive(timeout, everyone)
        try:
            reply = queue.receive(timeout)
            if reply is None:
                return False
            ids, report = self._shard.read(reply)
            self._replies.append((ids, report))
            return True
        except BusyError:  # nothing was done
            raise
        except Exception as error:  # what of it was done is not known
            text = f"the pool is left in the middle of a call: {type(error).__name__}: {error}"
            self._call_state.on(CallEvent.BREAK, BrokenError(text))
            raise
        except BaseException as error:  # likewise, but it is not the pool's fault: another one may take its place
            self._tear(f"the pool is left in the middle of a call: {type(error).__name__}")
            raise

    def _forget_requests(self) -> bool:
        super()._forget_requests()
        queue = self._shard.queue
        is_idle = not self._is_sending and queue.empty  # else the pool goes on with what it was asked
        return is_idle or queue.forget()

    _state_kind = "pool"

    def _find_obstacles(self) -> dict[int, str]:
        problem = self._pool.state_obstacle()
        return {} if problem is None else dict.fromkeys(range(self.num_envs), problem)

    def _run(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> Report | None:
        if operation == "state":
            assert self._buffers.state is not None
            self._buffers.state[...] = self._pool.state()
            return Report()
        return run_commands(env_ids.tolist(), arguments[0], self._command_target)

    def _shut_down(self, timeout: float) -> None:
        self._shard.queue.close(timeout)
        self._pool.close()


def _command_target(pool: Pool, i: int) -> CommandTarget:
    return CommandTarget(pool.env(i), pool.spec.name)


def make_pool(recipes: Sequence[EnvRecipe], **settings: Unpack[SettingsArguments]) -> PoolVectorEnv:
    """Build the pool that recipes, one per env, describe (see `build_pool`), and the vectorizer of its envs."""
    chosen = Settings(**settings)
    try:
        pool = build_pool(recipes, chosen.autoreset_mode)
    except MarlvecError:
        raise
    except Exception as error:
        raise_failures([capture(0, "__init__", error)], PoolVectorEnv._place_name)
        raise
    try:
        return PoolVectorEnv(pool, **settings)
    except BaseException:
        pool.close()
        raise
