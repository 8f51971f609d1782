"""The envs that one worker steps: a contiguous slice of rows.

Sync and async vectorizers run this same class; they differ only in where it runs, which is why they agree bit for bit.
Everything that must hold for one env holds here once: autoreset, the snapshot of final observations, zeroed rows of
dead agents, faults caught per env.

Env indices in here are local, 0 to ``len(envs) - 1``; failures carry the global index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.adapt import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info
from marlvec.errors import ContractError, Failure, NotResetError
from marlvec.vector.buffers import Buffers
from marlvec.vector.faults import capture

__all__ = ["AUTORESET_MODES", "DONE_ON", "Report", "Shard", "ShardFailed"]

AUTORESET_MODES = ("same_step", "next_step", "disabled")
DONE_ON = ("all", "any")

# What an env's episode is doing: it runs, it is over, or there is none (never begun, or lost to a fault).
_RUNNING, _OVER, _UNREADY = 0, 1, 2


@dataclass(slots=True)
class Report:
    """What one call leaves behind apart from numbers in the buffers.

    Attributes:
        infos: Non-empty infos by env index; after a same-step autoreset those of the reset.
        final_infos: Infos of the last step of episodes that a same-step autoreset ended.
        failures: What went wrong, at most one per env.
    """

    infos: dict[int, Info] = field(default_factory=dict)
    final_infos: dict[int, Info] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.infos or self.final_infos or self.failures)

    def update(self, other: Report) -> None:
        """Take in another shard's report."""
        self.infos.update(other.infos)
        self.final_infos.update(other.final_infos)
        self.failures.extend(other.failures)


class ShardFailed(Exception):
    """Some envs could not be built. Carries the failures; never reaches users."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(f"{len(failures)} envs could not be built")
        self.failures = failures


class Shard:
    """A slice of envs and their rows.

    Args:
        factories: One zero-argument callable per env.
        first_env_id: Global index of the first one.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``.
        done_on: ``"all"``: an episode is over when its last agent has ended; ``"any"``: when the first has.

    Raises:
        ShardFailed: A factory raised, or its env's spec differs from its neighbour's. Envs already built are closed.

    Attributes:
        envs: The envs behind their adapters.
        spec: What they have in common.
        everyone: Indices of all.
    """

    def __init__(
        self, factories: Sequence[Callable[[], Any]], first_env_id: int, autoreset_mode: str, done_on: str
    ) -> None:
        self._first = first_env_id
        self._mode = autoreset_mode
        self._done_on_any = done_on == "any"
        self.envs: list[MultiAgentEnv] = []
        failures: list[Failure] = []
        for i, factory in enumerate(factories):
            try:
                env = adapt(factory())
                self.envs.append(env)
                self._check_spec(env.spec(), first_env_id + i)
            except Exception as error:
                failures.append(capture(first_env_id + i, "__init__", error))
                break
        if failures:
            self.close()
            raise ShardFailed(failures)
        n = len(self.envs)
        self.everyone = range(n)
        self._slots: list[Slot] = []
        self._status = [_UNREADY] * n
        self._began = [False] * n  # at the next step the last episode's final observations are cleared
        self._ended: dict[int, list[int]] = {}  # agents that ended before their env: their rows are cleared

    def _check_spec(self, spec: EnvSpec, env_id: int) -> None:
        if not hasattr(self, "spec"):
            self.spec = spec
        elif differs := self.spec.difference(spec):
            raise ContractError(f"its spaces differ from those of env {self._first}: {differs} (env {env_id})")

    def attach(self, buffers: Buffers) -> None:
        """Give the shard its rows. Must come before `reset`."""
        self._buffers = buffers
        self._slots = [buffers.slot(i) for i in range(len(self.envs))]
        self._flags = np.zeros_like(buffers.terminated)

    def reset(
        self,
        ids: Sequence[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
    ) -> Report:
        """Begin new episodes in these envs. Cancels any autoreset that was due."""
        report = Report()
        self._clear_step(self._rows(ids))
        for i, seed, option in zip(ids, seeds, options, strict=True):
            self._reset_env(i, seed, option, report)
        return report

    def step(self, ids: Sequence[int]) -> Report:
        """Step these envs with the actions in their rows."""
        report = Report()
        buffers = self._buffers
        rows = self._rows(ids)
        self._clear_step(rows)
        envs, slots, status = self.envs, self._slots, self._status
        if self._ended:
            self._clear_ended(ids)
        for i in ids:
            if status[i] != _RUNNING:
                self._step_without_episode(i, report)
                continue
            if self._began[i]:
                self._began[i] = False
                for leaves in buffers.final_obs:
                    for leaf in leaves:
                        leaf[i] = 0
            slot = slots[i]
            slot.done = False
            try:
                info = envs[i].step(slot)
            except Exception as error:
                self._fail(i, "step", error, report)
                continue
            if info:
                report.infos[i] = info
            if self._done_on_any and not slot.done:
                self._cut_short(i, slot)
            if slot.done:
                self._finish(i, report)
        ended = self._flags[rows]
        np.logical_or(buffers.terminated[rows], buffers.truncated[rows], out=ended)
        if ended.any():
            self._record_early_ends(ids, ended)
        return report

    def write_state(self, ids: Sequence[int]) -> Report:
        """Write these envs' global states into their rows."""
        report = Report()
        for i in ids:
            try:
                self.envs[i].write_state(self._slots[i])
            except Exception as error:
                report.failures.append(capture(self._first + i, "state", error))
        return report

    def close(self) -> list[Failure]:
        """Close every env, whatever the others do."""
        failures: list[Failure] = []
        for i, env in enumerate(self.envs):
            try:
                env.close()
            except Exception as error:
                failures.append(capture(self._first + i, "close", error))
        self.envs = []
        return failures

    def _clear_step(self, rows: slice | NDArray[np.int64]) -> None:
        buffers = self._buffers
        buffers.reward[rows] = 0
        buffers.events[rows] = False

    def _clear_ended(self, ids: Sequence[int]) -> None:
        for i in self._ended.keys() & set(ids):
            for a in self._ended.pop(i):
                self._slots[i].zero_obs(a)
                self._slots[i].clear_mask(a)

    def _step_without_episode(self, i: int, report: Report) -> None:
        """In next_step mode the step after the last one begins the next episode; otherwise it is a mistake."""
        if self._mode == "next_step" and self._status[i] == _OVER:
            self._reset_env(i, None, None, report)
            self._buffers.reset_mask[i] = True
        else:
            self._fail(i, "step", NotResetError("its episode is over or was never begun; reset it first"), report)

    def _reset_env(self, i: int, seed: int | None, options: dict[str, Any] | None, report: Report) -> None:
        buffers, slot = self._buffers, self._slots[i]
        for leaves in buffers.obs:
            for leaf in leaves:
                leaf[i] = 0
        buffers.alive[i] = False
        buffers.acting[i] = False
        buffers.clear_masks(i)
        self._ended.pop(i, None)
        slot.done = False
        try:
            info = self.envs[i].reset(slot, seed=seed, options=options)
            if slot.done or not buffers.alive[i].any():
                raise ContractError("the episode is over right after reset: no agent is alive")
        except Exception as error:
            self._fail(i, "reset", error, report)
            return
        self._status[i] = _RUNNING
        self._began[i] = True
        if info:
            report.infos[i] = info

    def _finish(self, i: int, report: Report) -> None:
        """An episode is over: keep its final observations, then begin the next one if the mode says so."""
        buffers = self._buffers
        ended = buffers.terminated[i] | buffers.truncated[i]
        self._snapshot(i, ended)
        buffers.done[i] = True
        self._status[i] = _OVER
        if self._mode == "same_step":
            if info := report.infos.pop(i, None):
                report.final_infos[i] = info
            self._reset_env(i, None, None, report)

    def _cut_short(self, i: int, slot: Slot) -> None:
        """With ``done_on="any"``: if an agent has ended, time is up for the others."""
        buffers = self._buffers
        if buffers.terminated[i].any() or buffers.truncated[i].any():
            buffers.truncated[i] |= buffers.alive[i]
            buffers.alive[i] = False
            buffers.acting[i] = False
            buffers.clear_masks(i)
            slot.done = True

    def _snapshot(self, i: int, ended: NDArray[np.bool_]) -> None:
        """Copy the observations of agents that ended, before the env can reuse its buffers."""
        buffers = self._buffers
        everyone = bool(ended.all())
        for group, obs, final in zip(buffers.spec.groups, buffers.obs, buffers.final_obs, strict=True):
            for source, target in zip(obs, final, strict=True):
                if everyone:
                    target[i] = source[i]
                else:
                    who = ended[list(group.agents)]
                    target[i, who] = source[i, who]

    def _record_early_ends(self, ids: Sequence[int], ended: NDArray[np.bool_]) -> None:
        """Agents that ended while their env goes on: keep their final observation, clear their row at the next step."""
        done = self._buffers.done
        for k in np.flatnonzero(ended.any(axis=1)).tolist():
            i = ids[k]
            if not done[i]:
                self._snapshot(i, ended[k])
                self._ended.setdefault(i, []).extend(np.flatnonzero(ended[k]).tolist())

    def _fail(self, i: int, operation: str, error: Exception, report: Report) -> None:
        self._status[i] = _UNREADY
        report.failures.append(capture(self._first + i, operation, error))

    def _rows(self, ids: Sequence[int]) -> slice | NDArray[np.int64]:
        """These envs' rows: a slice, so that nothing is copied, where all are meant, in order."""
        if ids is self.everyone or list(ids) == list(self.everyone):
            return slice(None)
        return np.asarray(ids, np.int64)
