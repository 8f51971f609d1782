"""`NativeShard`: the counterpart of `Shard` for compiled envs, all in one call; its rows are equal, bit for bit.

`BatchedShard` is the base that it shares with pools.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.spec import AutoresetRules, EnvSpec, refuse_masks
from marlvec.errors import ArgumentError
from marlvec.native.native_env import Ids, NativeEnv, NativeEnvView
from marlvec.serialization.saved import check_array
from marlvec.vector.buffers import Buffers, EnvSelection
from marlvec.vector.calls import Command, EnvHandle, run_commands
from marlvec.vector.infos import ShardReport
from marlvec.vector.shard import BatchedPhases, EnvEvent, EnvPhase
from marlvec.vector.thread_team import ThreadTeam

_LARGE = 1 << 20  # bytes; less is copied before another thread has begun
_FEWEST = 64  # envs per thread; fewer are stepped before another thread has begun


class BatchedShard(ABC):
    """All envs of a native env or a pool: their rows, their phases, their final observations."""

    _inner: str  # name, in a state, of the states that the native env or the pool has
    _advice: str = ""  # for a state with other names

    def __init__(self, spec: EnvSpec, num_envs: int, autoreset_mode: str) -> None:
        self.spec = spec
        self._autoreset = AutoresetRules.of(autoreset_mode)
        self._phases = BatchedPhases(num_envs)
        self._finals_kept = np.zeros(num_envs, np.bool_)  # the row has final observations of the last episode
        # State of the shard, (N, …) each, by its name in a state.
        self._saved: dict[str, NDArray[Any]] = {"phase": self._phases.values, "finals_kept": self._finals_kept}

    def attach(self, buffers: Buffers) -> None:
        """Set the rows of the envs. Must be called before the first request."""
        self._buffers = buffers

    # --- states

    def get_state(self, ids: Ids) -> dict[str, Any]:
        """Copy the states of these envs, name → (n, …)."""
        saved = {name: array[ids] for name, array in self._saved.items()}
        return {**saved, self._inner: self._get_inner(ids)}

    def check_state(self, state: Any, n: int) -> None:
        """Validate a state from `get_state` of ``n`` envs."""
        expected = {*self._saved, self._inner}
        if not isinstance(state, Mapping) or state.keys() != expected:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else f"{state!r:.200}"
            raise ArgumentError(f"set_state(): envs: expected {sorted(expected)}, got {got}{self._advice}")
        for name, own in self._saved.items():
            check_array(state, name, own.dtype, (n, *own.shape[1:]), "set_state()")
        self._phases.check_saved(state["phase"])
        self._check_inner(state[self._inner], n)

    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        """Restore these envs; ``places`` are the indices of their states in ``state``."""
        self._set_inner(ids, state[self._inner], places)
        for name, array in self._saved.items():
            array[ids] = state[name][places]

    @abstractmethod
    def _get_inner(self, ids: Ids) -> dict[str, Any]:
        """Copy the states that the native env or the pool has of these envs."""

    @abstractmethod
    def _check_inner(self, inner: Any, n: int) -> None:
        """Validate states from `_get_inner`."""

    @abstractmethod
    def _set_inner(self, ids: Ids, inner: Mapping[str, Any], places: Ids) -> None:
        """Restore states from `_get_inner`."""

    # --- steps

    def _split(self, ids: Ids, rows: EnvSelection) -> tuple[Ids | None, BoolArray | None]:
        """Return the envs that have just begun, and whose episode is over, (n,) bool; None for none, or if all run."""
        if self._phases.are_all(rows, EnvPhase.RUNNING):
            return None, None
        over = self._phases.where(rows, EnvPhase.OVER)
        return ids[self._phases.where(rows, EnvPhase.BEGUN)], over if np.count_nonzero(over) else None

    def _mark_finals(self, rows: EnvSelection) -> None:
        """Mark these rows: they have final observations, until the first step of the next episode."""
        self._finals_kept[rows] = True

    def _clear_finals(self, ids: Ids) -> None:
        """Clear final observations in these envs' rows."""
        ids = ids[self._finals_kept[rows_of(ids)]]
        if not len(ids):
            return
        self._finals_kept[ids] = False
        for leaves in self._buffers.final_obs:
            for leaf in leaves:
                leaf[ids] = 0


class NativeShard(BatchedShard):
    """All envs of a `NativeEnv`, in this process; ``num_threads`` includes the caller's."""

    def __init__(
        self,
        env: NativeEnv,
        *,
        num_threads: int,
        autoreset_mode: str,
        keep_state: bool,
        max_episode_steps: int | None,
        render_modes: Sequence[str | None],
    ) -> None:
        super().__init__(env.spec(), env.num_envs, autoreset_mode)
        self._env = env
        if keep_state and self.spec.state_space is None:
            raise ArgumentError(f"state=True: {env.name} has no global state: it declares no state_space")
        self._keep_state = keep_state
        self._limit = max_episode_steps
        self._elapsed = np.zeros(env.num_envs, np.int64)
        if max_episode_steps is not None:
            self._saved["elapsed"] = self._elapsed
        self._declares_masks = any(size is not None for size in self.spec.mask_sizes)
        self._env_handle = cache(partial(_env_handle, env, render_modes))
        self._thread_team = ThreadTeam(num_threads - 1)

    def attach(self, buffers: Buffers) -> None:
        super().attach(buffers)
        self._env.attach(buffers)

    def do(self, operation: str, ids: Ids, arguments: tuple[Sequence[Any], ...] = ()) -> ShardReport:
        """Run an operation of a request; each of ``arguments`` has one entry per env."""
        match operation:
            case "step" | "send":
                return self._step(_ascending(ids))
            case "reset":
                return self._reset(ids, *arguments)
            case "control":
                return self._control(ids, *arguments)
            case "state":
                self._env.write_state(_ascending(ids))
                return ShardReport()
        raise ValueError(f"no such operation: {operation!r}")

    def copy(self, out: NDArray[Any], array: NDArray[Any]) -> None:
        """Copy an array of all envs' rows into another one; use all threads if it is large."""
        threads = self._thread_team.size
        if threads == 1 or array.nbytes < _LARGE:
            np.copyto(out, array)
            return
        bounds = np.linspace(0, len(array), threads + 1, dtype=np.int64).tolist()
        self._thread_team.run([partial(np.copyto, out[lo:hi], array[lo:hi]) for lo, hi in pairwise(bounds)])

    def close(self) -> None:
        self._thread_team.close()

    def _share(self, work: Callable[[Ids], None], ids: Ids) -> None:
        """Run ``work`` for these envs, split among the threads."""
        # Only for compiled functions and large copies: Python code in two threads takes turns, and gets slower.
        n, threads = len(ids), self._thread_team.size
        if threads == 1 or n < threads * _FEWEST:
            work(ids)
            return
        bounds = [n * w // threads for w in range(threads + 1)]
        self._thread_team.run([partial(work, ids[lo:hi]) for lo, hi in pairwise(bounds)])

    # --- resets ---

    def _reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> ShardReport:
        """Begin new episodes. Cancels any autoreset that was due. Options are ignored, as by the reference envs."""
        given = [k for k, seed in enumerate(seeds) if seed is not None]
        if given:
            from marlvec.native.kernels import seed_envs  # imports numba, which the env has imported already

            seed_envs(self._env.rng, ids[given], [seeds[k] or 0 for k in given])
        ids = _ascending(ids)
        self._clear_step(rows_of(ids))
        self._begin(ids, report := ShardReport())
        return report

    def _begin(self, ids: Ids, report: ShardReport) -> None:
        rows, buffers = rows_of(ids), self._buffers
        buffers.alive[rows] = False
        buffers.acting[rows] = False
        if self._declares_masks:
            buffers.clear_masks(rows)
        self._share(self._env.reset, ids)
        self._phases.on(rows, EnvEvent.BEGIN)
        self._elapsed[rows] = 0
        self._report_infos(ids, report)
        if self._keep_state:
            self._env.write_state(ids)

    def _report_infos(self, ids: Ids, report: ShardReport) -> None:
        for i, info in self._env.infos(ids).items() if self._env.has_infos else ():
            refuse_masks(self.spec, info, f"{self._env.name}: env {i}: ")
            report.infos[i] = info

    # --- steps ---

    def _step(self, ids: Ids) -> ShardReport:
        report = ShardReport()
        rows = rows_of(ids)
        self._clear_step(rows)
        begun, over = self._split(ids, rows)
        if over is not None:
            begin, ids = ids[over], ids[~over]
            self._begin(begin, report)
            self._buffers.reset_mask[begin] = True
            if not len(ids):
                return report
            rows = rows_of(ids)
        if begun is not None:
            self._phases.on(rows, EnvEvent.STEP)
            self._clear_finals(begun)
        self._share(self._env.step, ids)
        if self._limit is not None:
            self._cut_short(ids, self._limit)
        self._report_infos(ids, report)
        if self._keep_state:
            self._env.write_state(ids)
        done = self._buffers.done[rows]
        if np.count_nonzero(done):
            self._finish(ids[done], report)
        return report

    def _cut_short(self, ids: Ids, limit: int) -> None:
        """Truncate episodes that reach ``max_episode_steps``."""
        buffers, rows = self._buffers, rows_of(ids)
        self._elapsed[rows] += 1
        late = ids[(self._elapsed[rows] >= limit) & ~buffers.done[rows]]
        if not len(late):
            return
        self._env.cut_short(late)
        buffers.truncated[late] = buffers.alive[late]
        buffers.alive[late] = False
        buffers.acting[late] = False
        buffers.done[late] = True
        if self._declares_masks:
            buffers.clear_masks(late)

    def _finish(self, ids: Ids, report: ShardReport) -> None:
        """Keep the final observations of ended episodes, then begin the next episodes in same-step mode."""
        buffers, rows = self._buffers, rows_of(ids)
        self._share(self._copy_finals, ids)
        self._mark_finals(rows)
        self._phases.on(rows, EnvEvent.END)
        if self._keep_state:
            assert buffers.state is not None
            assert buffers.final_state is not None
            buffers.final_state[rows] = buffers.state[rows]
        if self._autoreset.begins_at_once:
            for i in ids.tolist() if report.infos else ():
                if i in report.infos:
                    report.final_infos[i] = report.infos.pop(i)
            self._begin(ids, report)

    def _copy_finals(self, ids: Ids) -> None:
        rows = rows_of(ids)
        for obs, final in zip(self._buffers.obs, self._buffers.final_obs, strict=True):
            for source, target in zip(obs, final, strict=True):
                target[rows] = source[rows]

    def _clear_step(self, rows: EnvSelection) -> None:
        self._buffers.reward[rows] = 0
        self._buffers.events[rows] = False

    # --- states ---

    _inner = "arrays"
    _advice = "; set max_episode_steps in both vectorizers, or in none"

    def _get_inner(self, ids: Ids) -> dict[str, Any]:
        return {name: array[ids] for name, array in self._env.state_arrays().items()}

    def _check_inner(self, inner: Any, n: int) -> None:
        own = self._env.state_arrays()
        if not isinstance(inner, Mapping) or own.keys() != inner.keys():
            got = sorted(map(str, inner)) if isinstance(inner, Mapping) else f"{inner!r:.200}"
            raise ArgumentError(f"set_state(): expected the arrays {sorted(own)}, got {got}")
        for name, array in own.items():
            check_array(inner, name, array.dtype, (n, *array.shape[1:]), "set_state()")
        self._env.check_limits(inner)

    def _set_inner(self, ids: Ids, inner: Mapping[str, Any], places: Ids) -> None:
        for name, array in self._env.state_arrays().items():
            array[ids] = inner[name][places]

    # --- control calls ---

    def _control(self, ids: Ids, commands: Sequence[Command]) -> ShardReport:
        advice = "(A native env is not a Python object; with backend='async' it is.)"
        return run_commands(ids.tolist(), commands, self._env_handle, advice=advice)


def _env_handle(env: NativeEnv, render_modes: Sequence[str | None], i: int) -> EnvHandle:
    return EnvHandle(NativeEnvView(env, i, render_modes[i]), env.name)


def _ascending(ids: Ids) -> Ids:
    """Return ids in ascending order; they mostly are, and checking costs less than sorting."""
    return np.sort(ids) if np.count_nonzero(ids[1:] < ids[:-1]) else ids


BoolArray = NDArray[np.bool_]
