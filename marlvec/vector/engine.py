"""How requests go out and replies come in, whatever the backend."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, FetchTimeout, WorkerDied
from marlvec.vector.actions import VALIDATE_MODES, ActionWriter
from marlvec.vector.arguments import check_choice
from marlvec.vector.buffers import Buffers, Selection
from marlvec.vector.calls import STREAM, Calls
from marlvec.vector.described import Described
from marlvec.vector.faults import out_of_space, raise_failures
from marlvec.vector.reports import Report
from marlvec.vector.result import VectorStep
from marlvec.vector.seeding import stream
from marlvec.vector.shard import AUTORESET_MODES, DONE_ON
from marlvec.vector.validation import ObsValidator

__all__ = ["Engine", "Settings", "SettingsArguments"]

SPACES = ("equal", "compatible")


class SettingsArguments(TypedDict, total=False):
    """`Settings` as keyword arguments."""

    autoreset_mode: str
    done_on: str
    copy: bool
    grouped: bool
    validate: str
    state: bool
    spaces: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all backends have in common; `marlvec.make` says what each of these does.

    Raises:
        ArgumentError: A value is none of those allowed.
    """

    autoreset_mode: str = "same_step"
    done_on: str = "all"
    copy: bool = True
    grouped: bool = False
    validate: str = "sample"
    state: bool = False
    spaces: str = "equal"

    def __post_init__(self) -> None:
        check_choice("autoreset_mode", self.autoreset_mode, AUTORESET_MODES)
        check_choice("done_on", self.done_on, DONE_ON)
        check_choice("validate", self.validate, VALIDATE_MODES)
        check_choice("spaces", self.spaces, SPACES)

    def of_shard(self) -> dict[str, Any]:
        """Those that a `Shard` takes."""
        return {
            "autoreset_mode": self.autoreset_mode,
            "done_on": self.done_on,
            "keep_state": self.state,
            "spaces": self.spaces,
        }


class Engine(Described, ABC):
    """Sends requests to shards and hands out their replies; every reply belongs to one numbered request.

    Attributes:
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``; also in ``metadata["autoreset_mode"]``.
        done_on: ``"all"`` or ``"any"``: the end of which agents ends an episode.
        copy: Whether results are copies; else read-only views that are valid until the next call that steps.
        backend: ``"sync"``, ``"thread"`` or ``"async"``.
    """

    backend: str = "?"
    _place: str = "?"  # where envs run, for messages

    def __init__(self, num_envs: int, settings: Settings) -> None:
        if num_envs < 1:
            raise ArgumentError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs = num_envs
        self.autoreset_mode = settings.autoreset_mode
        self.done_on = settings.done_on
        self.copy = bool(settings.copy)
        self._settings = settings
        self._calls = Calls(num_envs)
        self._everyone = np.arange(num_envs)
        self._everyone.flags.writeable = False
        self._rng = stream(None)  # for `random_action`
        self._report = Report()  # of replies that have arrived and were not handed out yet

    def _bind(self, spec: EnvSpec, buffers: Buffers) -> None:
        """Take on what is known once the envs are built."""
        self._describe(spec, grouped=self._settings.grouped, autoreset_mode=self.autoreset_mode)
        self._buffers = buffers
        self._action_writer = ActionWriter(spec, grouped=self.grouped, validate=self._settings.validate)
        self._validator = ObsValidator(spec, self._settings.validate)

    # --- what a backend provides ---

    @abstractmethod
    def _dispatch(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        """Ask these idle envs to do something; must not wait.

        Args:
            operation: ``"reset"``, ``"step"``, ``"send"`` (a step whose rows are wanted as they become ready),
                ``"state"`` or ``"control"``.
            env_ids: The envs.
            arguments: Seeds and options of a reset, commands of a control call: each with one entry per env.
        """

    @abstractmethod
    def _gather(
        self, timeout: float | None, everyone: bool
    ) -> Sequence[tuple[NDArray[np.int64], Report | None]] | None:
        """Wait for replies: envs that are ready now, and what they report. None if time ran out.

        Args:
            timeout: Seconds; None for ever.
            everyone: Whether all that is in flight is wanted, so that the order of arrival does not matter.

        Raises:
            WorkerDied: A worker is gone.
        """

    @abstractmethod
    def _shut_down(self, timeout: float) -> None:
        """Release everything, whatever state it is in, in bounded time."""

    # --- the way out, and the way in ---

    def _begin(
        self, call: str, operation: str, ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...] = ()
    ) -> None:
        if not len(ids) and call in STREAM:
            return  # nobody to wait for
        self._calls.begin(call, ids)
        self._last_call = "reset" if operation == "reset" else "step"  # for messages
        if not len(ids):
            return
        if operation == "reset":
            self._calls.lose_episodes(ids)  # until the new ones have begun
        try:
            self._dispatch(operation, ids, arguments)
        except WorkerDied as error:
            self._calls.broken = error
            raise

    def _fetch_all(self, call: str, timeout: float | None = None) -> VectorStep:
        """The rows of the envs that ``call`` asked, or of all after a partial reset."""
        self._calls.check_pending(call)
        self._wait_for(self._calls.outstanding, timeout, f"{call}_fetch")
        return self._deliver(everything=True)

    def _wait_for(self, wanted: int, timeout: float | None, call: str) -> None:
        """Take in replies until ``wanted`` envs are ready."""
        calls = self._calls
        deadline = None if timeout is None else time.monotonic() + timeout
        while calls.arrived < wanted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                news = self._gather(left, wanted == calls.outstanding)
            except WorkerDied as error:
                calls.broken = error
                raise
            if news is None:
                raise FetchTimeout(
                    f"{call}(): envs {calls.in_flight} did not reply within {timeout} s; "
                    f"their requests stay pending, fetch again"
                )
            for ids, report in news:
                calls.arrive(ids)
                if report is not None:
                    self._report.update(report)

    def _take_arrived(self) -> tuple[NDArray[np.int64], Report]:
        """All that has arrived, and what was reported with it."""
        report, self._report = self._report, Report()
        return self._calls.hand_out(), report

    def _deliver(self, *, everything: bool = False) -> VectorStep:
        """Hand out rows of envs that were reset or stepped, or raise what went wrong in them."""
        arrived, report = self._take_arrived()
        ids = self._everyone if everything or len(arrived) == self.num_envs else arrived
        self._calls.have_episodes(arrived)
        if self.autoreset_mode == "disabled":
            self._calls.lose_episodes(arrived[self._buffers.done[arrived]])
        result = self._result(ids, report)
        if wrong := self._validator.check(result, arrived):
            report.failures += [out_of_space(env_id, self._last_call, text) for env_id, text in wrong]
            result = self._result(result.env_ids, report)
        raise_failures(report.failures, self._place, result)
        return result

    def _result(self, ids: NDArray[np.int64], report: Report) -> VectorStep:
        """Rows of those of these envs that did not fail; the others have no episode now."""
        if failed := [failure.env_id for failure in report.failures]:
            ids = ids[~np.isin(ids, failed)]
            self._calls.lose_episodes(failed)
        return VectorStep(
            self._buffers,
            ids,
            self._rows(ids),
            report,
            grouped=self.grouped,
            copy=self.copy,
            state=self._settings.state,
        )

    def _rows(self, ids: NDArray[np.int64]) -> Selection:
        """A slice where all envs are meant, in order: no index array, no copies."""
        if ids is self._everyone or (len(ids) == self.num_envs and np.array_equal(ids, self._everyone)):
            return slice(None)
        return ids
