"""`Shard`: the envs that one worker steps: a contiguous slice of rows, with autoreset and checks.

`EnvPhase` and its table say which changes are allowed; `PlainEnvs` steps a shard of simple Gymnasium envs faster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from enum import IntEnum
from operator import or_
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.adapters.base import PLAIN_REWARDS
from marlvec.envs.adapters.gymnasium import GymnasiumAdapter
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import AutoresetRules, EnvSpec, Info, refuse_masks
from marlvec.envs.user_env import plain_copy
from marlvec.envs.wrappers import adapter_in
from marlvec.errors import ArgumentError, ContractError, Failure, MarlvecError, NotResetError
from marlvec.spaces.action_masks import find_forbidden
from marlvec.vector.buffers import Buffers, EnvSelection
from marlvec.vector.calls import Command, run_commands
from marlvec.vector.env_builder import EnvBuilder, count_generators
from marlvec.vector.failures import capture
from marlvec.vector.infos import ShardReport
from marlvec.vector.settings import Settings

_PART_SECONDS = 4e-3  # seconds of work after which ready rows are sent, for send() and recv()

_METHODS = {
    "step": "step",
    "send": "step",
    "reset": "reset",
    "restart": "restart",
    "control": "control",
    "state": "write_state",
    "get_state": "get_state",
    "set_state": "set_state",
}
"""Operation of a request → the method that runs it."""


class Shard:
    """A slice of envs and their rows. `ShardFailed`: a factory failed, and envs already built are closed.

    `progress[0]` is the env that runs, counted from 1, or 0; the parent process reads it.
    """

    def __init__(self, factories: Sequence[Callable[[], Any]], first_env_id: int, settings: Settings) -> None:
        self._first = first_env_id
        self.progress: memoryview[int] | list[int] = [0]
        self._autoreset = AutoresetRules.of(settings.autoreset_mode)
        self._done_on_any = settings.done_on == "any"
        self._keep_state = bool(settings.state)
        self._pace = 0.0  # moving average of an env step's seconds
        self._builder = EnvBuilder(factories, first_env_id, settings)
        self.envs: list[MultiAgentEnv] = self._builder.build_all()
        self.spec: EnvSpec = self._builder.spec
        self.survived: list[Failure] = self._builder.survived
        self.generators: Counter[str] = count_generators(self.envs)
        n = len(self.envs)
        self.everyone = range(n)
        self._slots: list[Slot] = []
        self._steps: list[Callable[[Slot], Info | None]] = [env.step for env in self.envs]
        self._phases = EnvPhases(n)
        self._careful = self._done_on_any or self._keep_state
        self._ended: dict[int, list[int]] = {}  # agents that ended before their env: their rows are cleared
        self._num_final_flags = 0  # number of agents' end flags that were set with the end of their env, in this step
        self._next_seeds: dict[int, int | None] = {}  # seeds of rebuilt envs, for the autoreset that is due

    def attach(self, buffers: Buffers) -> None:
        """Set the rows of the shard. Must be called before `reset`."""
        self._buffers = buffers
        self._slots = [buffers.slot(i) for i in range(len(self.envs))]
        self._end_flags = buffers.events[:, : 2 * len(self.spec.agents)]  # terminated and truncated, of all agents
        self._find_plain()

    def reset(
        self,
        ids: Sequence[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
    ) -> ShardReport:
        """Begin new episodes in these envs. Cancels any autoreset that was due."""
        report = ShardReport()
        self._clear_step(self._rows(ids))
        for i, seed, option in zip(ids, seeds, options, strict=True):
            self._reset_env(i, seed, option, report)
        self.progress[0] = 0
        return report

    def restart(
        self,
        ids: Sequence[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
        build: Sequence[bool],
        begin: Sequence[bool],
        keep: Sequence[bool],
    ) -> ShardReport:
        """Revive envs whose episode was lost to a fault; `seeds` and `options` are those of their first reset.

        `build`: rebuild the env, else it is new already. `begin`: begin an episode now, else the autoreset or the
        caller does. `keep`: the row keeps the end of an episode.
        """
        report = ShardReport()
        for i, seed, option, anew, now, whole in zip(ids, seeds, options, build, begin, keep, strict=True):
            self.progress[0] = i + 1
            if anew and not self._rebuild(i, report):
                continue
            if not whole:
                self._buffers.reward[i] = 0
                self._buffers.events[i] = False
                self._buffers.clear_final_obs(i)
            if now:
                self._reset_env(i, seed, option, report)
            else:
                self._clear_row(i)
                self._phases.on(i, EnvEvent.WAIT)
                self._next_seeds[i] = seed
        self.progress[0] = 0
        return report

    def _rebuild(self, i: int, report: ShardReport) -> bool:
        """Replace a failed env by a new one; return whether that succeeded."""
        if self._phases[i] is not EnvPhase.ABSENT:
            self._phases.on(i, EnvEvent.CLOSE)
            with suppress(Exception):  # close() of a broken env may raise
                self.envs[i].close()
        try:
            env = self._builder.build(i)
        except Exception as error:
            self._record_failure(i, "__init__", error, report)
            return False
        self._phases.on(i, EnvEvent.BUILD)
        self.envs[i], self._steps[i] = env, env.step
        self._find_plain()
        return True

    def _find_plain(self) -> None:
        """Choose between the plain loop and the adapters for stepping."""
        may_be_plain = len(self.spec.agents) == 1 and not self._careful
        self._plain = PlainEnvs.of(self.envs, self._slots, self._buffers) if may_be_plain else None

    def step_in_parts(self, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], ShardReport]]:
        """Step these envs, and yield ready ones every few milliseconds, so that a slow env delays few others."""
        start = 0
        while start < len(ids):
            stop = start + max(1, int(_PART_SECONDS / self._pace)) if self._pace else start + 1
            part = ids if start == 0 and stop >= len(ids) else ids[start:stop]
            began = time.perf_counter()
            report = self.step(part)
            pace = (time.perf_counter() - began) / len(part)
            self._pace = pace if not self._pace else 0.8 * self._pace + 0.2 * pace
            yield part, report
            start += len(part)

    def step(self, ids: Sequence[int]) -> ShardReport:
        """Step these envs with the actions in their rows."""
        report = ShardReport()
        rows = self._rows(ids)
        self._clear_step(rows)
        if self._ended:
            self._clear_ended(ids)
        running = self._handle_special(ids, report) if self._phases.special else ids
        if self._plain is not None and not self._plain.have_masks:
            actions = self._plain.actions(rows)
            by_env = actions if ids is self.everyone else dict(zip(ids, actions, strict=True))
            self._step_plain(self._plain, running, by_env, report)
        else:
            self._step_each(running, report)
            if np.count_nonzero(self._end_flags[rows]) != self._num_final_flags:
                self._record_early_ends(ids, rows)
        self.progress[0] = 0
        return report

    def _step_each(self, running: Sequence[int], report: ShardReport) -> None:
        steps, slots, careful, progress = self._steps, self._slots, self._careful, self.progress
        self._num_final_flags = 0
        for i in running:
            slot = slots[i]
            progress[0] = i + 1
            try:
                if info := steps[i](slot):
                    refuse_masks(self.spec, info)
                    report.infos[i] = info
                if slot.final_info:
                    refuse_masks(self.spec, slot.final_info)
            except Exception as error:
                self._record_failure(i, "step", error, report)
                continue
            if slot.done or careful:
                self._after_step(i, slot, report)

    def _step_plain(
        self, plain: PlainEnvs, running: Sequence[int], actions: Sequence[Any] | Mapping[int, Any], report: ShardReport
    ) -> None:
        """Step plain envs: a step that returns only an observation and a reward needs no adapter."""
        envs, obs_rows, rewards, progress = plain.envs, plain.obs_rows, plain.rewards, self.progress
        for i in running:
            progress[0] = i + 1
            try:
                result = envs[i].step(actions[i])
                if result.__class__ is tuple and len(result) == 5:
                    obs, reward, ended, cut, info = result
                    says_more = ended is not False or cut is not False or info.__class__ is not dict or info
                    if not says_more and reward.__class__ in PLAIN_REWARDS:
                        try:
                            obs_rows[i][:] = obs
                        except (ValueError, TypeError):
                            pass  # another form of observation: the adapter handles it, or raises
                        else:
                            rewards[i] = reward
                            continue
                slot = self._slots[i]
                new_infos = plain.adapters[i].read_step(slot, result)
            except Exception as error:
                self._record_failure(i, "step", error, report)
                continue
            if new_infos:
                report.infos[i] = new_infos
            if slot.done:
                self._finish(i, slot, report)

    def _handle_special(self, ids: Sequence[int], report: ShardReport) -> Sequence[int]:
        """Handle envs whose last call began or ended an episode; return those of ``ids`` with an episode to step."""
        special = self._phases.special
        idle = set()
        for i in list(special) if ids is self.everyone else special.intersection(ids):
            if self._phases[i] is EnvPhase.BEGUN:
                self._phases.on(i, EnvEvent.STEP)
                self._buffers.clear_final_obs(i)  # of the previous episode
            else:
                idle.add(i)
                self._step_without_episode(i, report)
        return [i for i in ids if i not in idle] if idle else ids

    def _after_step(self, i: int, slot: Slot, report: ShardReport) -> None:
        """Finish a step that ended an episode, or that needs a state or ``done_on="any"``."""
        if self._done_on_any and not slot.done and not self._cut_short(i, slot, report):
            return
        if slot.done:
            self._finish(i, slot, report)
        elif self._keep_state:
            self._write_global_state(i, report)

    def serve(
        self, operation: str, ids: Sequence[int], arguments: tuple[Sequence[Any], ...]
    ) -> Iterator[tuple[Sequence[int], ShardReport]]:
        """Run a request, and yield envs that are ready; all at once but for ``"send"``."""
        if operation == "send":
            yield from self.step_in_parts(ids)
        else:
            yield ids, self.do(operation, ids, arguments)

    def do(self, operation: str, ids: Sequence[int], arguments: tuple[Sequence[Any], ...] = ()) -> ShardReport:
        """Run an operation of a request; each of ``arguments`` has one entry per env."""
        report: ShardReport = getattr(self, _METHODS[operation])(ids, *arguments)
        return report

    def write_state(self, ids: Sequence[int]) -> ShardReport:
        """Write these envs' global states into their rows."""
        report = ShardReport()
        for i in ids:
            try:
                self.envs[i].write_state(self._slots[i])
            except Exception as error:
                report.failures.append(capture(self._first + i, "state", error))
        return report

    def control(self, ids: Sequence[int], commands: Sequence[Command]) -> ShardReport:
        return run_commands(ids, commands, self.envs.__getitem__, self._first)

    def get_state(self, ids: Sequence[int]) -> ShardReport:
        """Answer with each env's state and the shard's state of its episode; costs no episode."""
        report = ShardReport()
        for i in ids:
            try:
                state = self.envs[i].get_state()
                if adapter_in(self.envs[i]) is None:  # adapters make copies themselves
                    state = plain_copy(state, self.envs[i].name)
            except Exception as error:
                report.failures.append(capture(self._first + i, "get_state", error))
                continue
            report.answers[i] = {
                "phase": int(self._phases[i]),
                "done": bool(self._slots[i].done),
                "ended": list(self._ended.get(i, ())),
                "next_seed": self._next_seeds.get(i),
                "env": state,
            }
        return report

    def set_state(
        self, ids: Sequence[int], states: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any] | None]
    ) -> ShardReport:
        """Restore envs from answers of `get_state`. An env that fails has no episode then."""
        # A row from `Buffers.get_rows` is written too; None if the caller writes it.
        report = ShardReport()
        for i, state, row in zip(ids, states, rows, strict=True):
            self.progress[0] = i + 1
            phase = EnvPhase(state["phase"])
            if self._phases[i] is EnvPhase.ABSENT and not self._rebuild(i, report):
                continue
            try:
                if self._phases[i] is EnvPhase.UNREADY and phase is not EnvPhase.UNREADY:
                    self._clear_row(i)
                    self.envs[i].reset(self._slots[i])  # many envs create attributes in their first reset only
                env_state = state["env"] if adapter_in(self.envs[i]) else deepcopy(state["env"])
                self.envs[i].set_state(env_state)
            except Exception as error:
                self._record_failure(i, "set_state", error, report)
                continue
            self._phases.restore(i, phase)
            self._slots[i].done, self._slots[i].begun = state["done"], False
            self._ended.pop(i, None)
            self._next_seeds.pop(i, None)
            if state["ended"]:
                self._ended[i] = list(state["ended"])
            if state["next_seed"] is not None:
                self._next_seeds[i] = state["next_seed"]
            if row is not None:
                self._buffers.set_rows(np.array([i]), row, np.zeros(1, np.int64))
            report.answers[i] = None
        self.progress[0] = 0
        return report

    def close(self) -> list[Failure]:
        """Close every env, even if others raise."""
        failures: list[Failure] = []
        for i, env in enumerate(self.envs):
            if self._phases[i] is EnvPhase.ABSENT:
                continue
            self.progress[0] = i + 1
            try:
                env.close()
            except BaseException as error:  # sys.exit(), Ctrl-C: the other envs must still be closed
                failures.append(capture(self._first + i, "close", error))
        self.envs = []
        self.progress[0] = 0
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

    def _step_without_episode(self, i: int, report: ShardReport) -> None:
        """Begin the next episode in next-step mode; otherwise record a failure."""
        if self._autoreset.begins_on_next_step and self._phases[i] is EnvPhase.OVER:
            self._reset_env(i, None, None, report)
            self._buffers.reset_mask[i] = True
        else:
            self._record_failure(
                i, "step", NotResetError("its episode is over or was never begun; reset it first"), report
            )

    def _reset_env(self, i: int, seed: int | None, options: dict[str, Any] | None, report: ShardReport) -> None:
        slot = self._slots[i]
        self.progress[0] = i + 1
        self._clear_row(i)
        if self._phases[i] is EnvPhase.ABSENT and not self._rebuild(i, report):
            return
        pending = self._next_seeds.pop(i, None)
        seed = pending if seed is None else seed
        try:
            info = self.envs[i].reset(slot, seed=seed, options=options)
            if slot.done or True not in slot.alive.tolist():
                raise ContractError("the episode is over right after reset: no agent is alive")
            if info:
                refuse_masks(self.spec, info)
        except Exception as error:
            self._record_failure(i, "reset", error, report)
            return
        self._phases.on(i, EnvEvent.BEGIN)
        if info:
            report.infos[i] = info
        if self._keep_state:
            self._write_global_state(i, report)

    def _clear_row(self, i: int) -> None:
        slot = self._slots[i]
        self._buffers.clear_row(i)
        self._ended.pop(i, None)
        slot.done = slot.begun = False

    def _finish(self, i: int, slot: Slot, report: ShardReport) -> None:
        """Keep the final observations of an ended episode, then begin the next one in same-step mode."""
        buffers = self._buffers
        buffers.done[i] = True
        ended = [*map(or_, slot.terminated, slot.truncated)]
        self._num_final_flags += sum(slot.terminated) + sum(slot.truncated)
        if slot.begun:  # the env has reset itself, and written the final observations of the ended episode
            self._phases.on(i, EnvEvent.FOLLOW)
            slot.done = slot.begun = False
            if slot.final_info:
                report.final_infos[i], slot.final_info = slot.final_info, None
            return
        buffers.snapshot(i, ended)
        self._phases.on(i, EnvEvent.END)
        if self._keep_state:
            if not self._write_global_state(i, report):
                return
            assert buffers.state is not None
            assert buffers.final_state is not None
            buffers.final_state[i] = buffers.state[i]
        if self._autoreset.begins_at_once:
            if info := report.infos.pop(i, None):
                report.final_infos[i] = info
            self._reset_env(i, None, None, report)

    def _cut_short(self, i: int, slot: Slot, report: ShardReport) -> bool:
        """With ``done_on="any"``, truncate the other agents once an agent has ended; return whether that succeeded."""
        buffers = self._buffers
        if buffers.terminated[i].any() or buffers.truncated[i].any():
            try:
                self.envs[i].cut_short(slot)
            except Exception as error:
                self._record_failure(i, "step", error, report)
                return False
        return True

    def _record_early_ends(self, ids: Sequence[int], rows: slice | NDArray[np.int64]) -> None:
        """Keep final observations of agents that ended before their env; their rows are cleared at the next step."""
        buffers = self._buffers
        ended = buffers.terminated[rows] | buffers.truncated[rows]
        early = ended > buffers.done[rows, None]
        if not np.count_nonzero(early):
            return
        for k in np.flatnonzero(early.any(axis=1)).tolist():
            i = ids[k]
            buffers.snapshot(i, who := ended[k].tolist())
            self._ended.setdefault(i, []).extend(a for a, over in enumerate(who) if over)

    def _write_global_state(self, i: int, report: ShardReport) -> bool:
        """Write the global state as part of a reset or step; return whether that succeeded."""
        try:
            self.envs[i].write_state(self._slots[i])
        except Exception as error:
            self._record_failure(i, "state", error, report)
            return False
        return True

    def _record_failure(self, i: int, operation: str, error: Exception, report: ShardReport) -> None:
        self._phases.on(i, EnvEvent.FAIL)
        failure = capture(self._first + i, operation, error)
        if operation == "step" and not isinstance(error, MarlvecError) and (forbidden := self._forbidden_in(i)):
            failure = replace(failure, summary=f"{failure.summary} ({forbidden})")
        report.failures.append(failure)

    def _forbidden_in(self, i: int) -> str:
        """Return in words which actions of a failed step the masks forbid; empty if none."""
        buffers, found = self._buffers, []
        for group, actions, mask in zip(self.spec.groups, buffers.actions, buffers.action_masks, strict=True):
            if mask is not None:
                acting = buffers.acting[i, list(group.agents)]
                forbidden = find_forbidden(group.action_space, actions[0][i], mask[i]) & acting
                found += [
                    (self.spec.agents[group.agents[j]], actions[0][i, j].tolist()) for j in np.flatnonzero(forbidden)
                ]
        return "; ".join(f"the action mask of agent {agent!r} forbids its action {action}" for agent, action in found)

    def _rows(self, ids: Sequence[int]) -> slice | NDArray[np.int64]:
        """Return these envs' rows: a slice, which copies nothing, if they are consecutive."""
        if ids is self.everyone:
            return slice(None)
        if ids and list(ids) == list(range(ids[0], ids[0] + len(ids))):
            return slice(ids[0], ids[0] + len(ids))
        return np.asarray(ids, np.int64)


class PlainEnvs:
    """Data of the loop that steps such envs; their adapters are used only in rare cases. Made by `of`."""

    def __init__(self, adapters: Sequence[GymnasiumAdapter], obs_rows: list[memoryview], buffers: Buffers) -> None:
        self.adapters = list(adapters)
        self.envs = [adapter.env for adapter in adapters]
        self.obs_rows = obs_rows
        self.rewards = cast("memoryview[float]", buffers.reward[:, 0].data)
        self._actions: NDArray[Any] = buffers.actions[0][0][:, 0]
        self._is_number = self._actions.ndim == 1
        self._gave_mask = buffers.gave_mask

    @classmethod
    def of(cls, envs: Sequence[MultiAgentEnv], slots: Sequence[Slot], buffers: Buffers) -> PlainEnvs | None:
        """Return a `PlainEnvs` of these envs, or None if one of them is of another kind."""
        adapters = [
            env
            for env in envs
            if env.__class__ is GymnasiumAdapter and not env.resets_itself and env.reward_weights is None
        ]
        rows = [row for slot in slots if (row := slot.fast_rows[0]) is not None]
        tree = buffers.spec.groups[0].action_tree
        acts_plainly = tree.is_leaf and not tree.leaves[0].is_object
        if not len(envs) == len(adapters) == len(rows) or buffers.spec.mask_sizes[0] is not None or not acts_plainly:
            return None
        leaf = tree.leaves[0]
        return cls(adapters, rows, buffers) if leaf.shape or isinstance(leaf.space, Discrete) else None

    @property
    def have_masks(self) -> bool:
        """Whether an env has returned an action mask in its infos: then the row must be cleared after each step."""
        return bool(np.count_nonzero(self._gave_mask))

    def actions(self, rows: EnvSelection) -> list[Any]:
        """Return these envs' actions: Python numbers, or copies of arrays that the envs may keep."""
        actions = self._actions[rows]
        return actions.tolist() if self._is_number else list(actions.copy())


class EnvPhase(IntEnum):
    """Phase of an env's episode; from `STEPPING` on, only of a pool, whose requests are answered later."""

    UNREADY = 0
    """The env has no episode: none was begun, or it was lost to a fault."""
    BEGUN = 1
    """The episode has begun, and its next step is the first; the row still has final observations of the last one."""
    RUNNING = 2
    """The episode runs; the env was stepped."""
    OVER = 3
    """The episode has ended, or was lost, and the autoreset or the caller begins the next one."""
    ABSENT = 4
    """The env was closed and could not be built again."""
    STEPPING = 5
    """A step is requested."""
    BEGINNING = 6
    """A new episode is requested."""
    REPLACING = 7
    """A new episode is requested within the step that ended the last one; the row still shows the end."""


class EnvEvent(IntEnum):
    """Events that change the phase of an env."""

    BEGIN = 0
    """The env has begun an episode."""
    STEP = 1
    """The env is stepped, with an action."""
    END = 2
    """The episode has ended."""
    FOLLOW = 3
    """The episode has ended, and the env has already begun the next one by itself."""
    FAIL = 4
    """The env raised, or violated its contract."""
    WAIT = 5
    """The episode was lost; the next one begins as if it had ended."""
    CLOSE = 6
    """The env was closed, to be rebuilt."""
    BUILD = 7
    """The env was rebuilt."""
    ASK_RESET = 8
    """The caller requests a new episode from a pool."""
    ASK_STEP = 9
    """The caller requests a step from a pool; after an end, this requests the next episode."""
    REPLY = 10
    """The pool has replied; the env's episode continues."""
    REPLACE = 11
    """The episode has ended; the next one is requested at once."""


_UNREADY, _BEGUN, _RUNNING, _OVER, _ABSENT, _STEPPING, _BEGINNING, _REPLACING = EnvPhase
SAVED = (_UNREADY, _BEGUN, _RUNNING, _OVER)
"""Phases in which an env can be saved: it is there, and nothing is requested."""

TRANSITIONS: Mapping[EnvEvent, Mapping[EnvPhase, EnvPhase]] = {
    EnvEvent.BEGIN: dict.fromkeys(SAVED, _BEGUN),
    EnvEvent.STEP: {_BEGUN: _RUNNING, _RUNNING: _RUNNING},
    EnvEvent.END: {_RUNNING: _OVER},
    EnvEvent.FOLLOW: {_RUNNING: _BEGUN},
    EnvEvent.FAIL: {**dict.fromkeys(SAVED, _UNREADY), _ABSENT: _ABSENT},
    EnvEvent.WAIT: dict.fromkeys(SAVED, _OVER),
    EnvEvent.CLOSE: dict.fromkeys((*SAVED, _ABSENT), _ABSENT),
    EnvEvent.BUILD: {_ABSENT: _UNREADY},
    EnvEvent.ASK_RESET: dict.fromkeys((*SAVED, _STEPPING, _BEGINNING, _REPLACING), _BEGINNING),
    EnvEvent.ASK_STEP: {_RUNNING: _STEPPING, _BEGUN: _STEPPING, _OVER: _BEGINNING},
    EnvEvent.REPLY: {_STEPPING: _RUNNING, _BEGINNING: _BEGUN, _REPLACING: _BEGUN},
    EnvEvent.REPLACE: {_RUNNING: _REPLACING},
}
"""Event, phase before → phase after. A missing pair is a bug and raises KeyError."""


class EnvPhases:
    """The phases of a shard's envs, one by one; changed only by `TRANSITIONS`, and by restoring saved states.

    `special` has the envs that are not RUNNING, which a step handles apart. Empty in most steps.
    """

    def __init__(self, num_envs: int) -> None:
        self._phases = [_UNREADY] * num_envs
        self.special = set(range(num_envs))

    def __getitem__(self, i: int) -> EnvPhase:
        return self._phases[i]

    def restore(self, i: int, phase: EnvPhase) -> None:
        """Set env ``i``, which must not be absent, to a saved phase."""
        self._phases[i] = phase
        if phase is _RUNNING:
            self.special.discard(i)
        else:
            self.special.add(i)

    def on(self, i: int, event: EnvEvent) -> None:
        self.restore(i, TRANSITIONS[event][self._phases[i]])


_IMPOSSIBLE = 255
_AFTER = [  # per event, a table for `bytes.translate`
    bytes(TRANSITIONS[event].get(phase, _IMPOSSIBLE) for phase in EnvPhase).ljust(256, b"\xff") for event in EnvEvent
]


class BatchedPhases:
    """The phases of many envs, ``values`` (N,) uint8; changed only by `TRANSITIONS`, and by restoring saved states."""

    def __init__(self, num_envs: int) -> None:
        self.values: NDArray[np.uint8] = np.full(num_envs, _UNREADY, np.uint8)

    def on(self, rows: EnvSelection, event: EnvEvent) -> None:
        """Apply an event to these envs. If it is invalid in a phase, it raises `KeyError`, and no phase was changed."""
        before = self.values[rows].tobytes()
        after = before.translate(_AFTER[event])
        if _IMPOSSIBLE in after:
            wrong = {EnvPhase(a).name for a, b in zip(before, after, strict=True) if b == _IMPOSSIBLE}
            raise KeyError(f"{event.name} of envs that are {', '.join(sorted(wrong))}")
        self.values[rows] = np.frombuffer(after, np.uint8)

    @staticmethod
    def check_saved(values: NDArray[np.uint8]) -> None:
        """Validate saved phases: an env with a pending request cannot be saved."""
        if not np.isin(values, SAVED).all():
            saved = [int(phase) for phase in SAVED]
            raise ArgumentError(f"set_state(): phases: expected some of {saved}, got {np.unique(values).tolist()}")

    def are_all(self, rows: EnvSelection, phase: EnvPhase) -> bool:
        """Return whether all of these envs are in this phase, which each step checks first."""
        values = self.values[rows].tobytes()
        return values.count(phase) == len(values)

    def where(self, rows: EnvSelection, phase: EnvPhase) -> NDArray[np.bool_]:
        """Return which of these envs are in this phase, (n,) bool."""
        found: NDArray[np.bool_] = self.values[rows] == int(phase)
        return found
