"""`StatefulVectorEnv`: saves and restores the states of envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds
from marlvec.errors import ArgumentError, Failure, StateError
from marlvec.vector.base import VectorEnvBase
from marlvec.vector.call_state import exclusive
from marlvec.vector.commands import Command
from marlvec.vector.data.report import Report
from marlvec.vector.data.saved_states import (
    FORMATS,
    check_each,
    check_entries,
    check_states,
    choose_states,
    describe_obstacles,
    stream_from,
    take_states,
)
from marlvec.vector.faults.failures import raise_failures
from marlvec.vector.shards.batched_shard import BatchedShard
from marlvec.vector.shards.phase import SAVED, EnvPhase

__all__ = ["StatefulVectorEnv"]


class StatefulVectorEnv(VectorEnvBase):
    """The part of `VectorEnv` that saves and restores states of envs, between two of its other calls."""

    _rng: np.random.Generator | None = None  # for `random_action`; made on first use
    _obstacles: dict[int, str] | None = None  # env → why its state cannot be saved; None: not requested yet
    _no_entries: dict[str, Any] | None = None  # state of `recovery` for no envs: names, dtypes and shapes
    _state_kind = "env"  # kind of the states that fit these envs
    _batch: BatchedShard | None = None  # has all envs' states as arrays: of native envs, or of a pool
    _sends_rows = False  # whether rows hold objects, which workers see only if they are sent

    @exclusive(fetches=True)
    def state_obstacles(self) -> dict[int, str]:
        """Return which envs' states `get_state` cannot save, and why.

        Returns:
            Env index → what is missing and what to do about it; empty if all states can be saved exactly.

        Raises:
            BusyError: Another call is pending.
        """
        self._call_state.check_idle("state_obstacles")
        return dict(self._find_obstacles())

    @exclusive(fetches=True)
    def get_state(self, env_ids: EnvIds | None = None) -> dict[str, Any]:
        """Save the state of envs, so that after `set_state` they, or equal envs, continue bit for bit.

        The state is plain data: numbers, texts, None, arrays, lists, tuples and dicts. It holds everything that the
        next steps depend on: the envs' own states with their random streams, the last returned rows, and what is due
        next (an autoreset, seeds of restarts). Saving costs no episode.

        Not in the state: `faults`, `incarnations` and the budget of restarts. The random stream of `random_action` is
        only in a state of all envs (``env_ids=None``).

        Args:
            env_ids: The envs, as indices or as an (N,) bool mask; None for all.

        Returns:
            The state of these envs: the first axis of its arrays has one row per env, in the order of ``env_ids``.

        Raises:
            ArgumentError: An env's state cannot be saved; the text has the reason and the remedy (`state_obstacles`).
            StateError: An env lost its episode to a fault that the next step or reset will raise.
            BusyError: Another call is pending.
            EnvRaised: An env's own ``get_state()`` raised; names the env.
            SerialisationError: An env's own state is not plain data; names the env and the part.
        """
        ids = self._chosen_ids("get_state", env_ids)
        self._check_states(ids, "get_state")
        envs, over = self._get_env_states(ids)
        stream = self._rng if env_ids is None else None
        return {
            "format": FORMATS[self._state_kind],
            "kind": self._state_kind,
            "env": self.spec.name,
            "agents": list(self.spec.agents),
            "autoreset": self.autoreset_mode,
            "env_ids": ids.copy(),
            "running": self._call_state.has_episodes(ids),
            "over": over,
            "rows": self._buffers.get_rows(ids),
            "recovery": self._recovery.get_state(ids),
            "envs": envs,
            "actions": None if stream is None else stream.bit_generator.state,
        }

    @exclusive(fetches=True)
    def set_state(
        self, state: Mapping[str, Any], env_ids: EnvIds | None = None, *, from_ids: EnvIds | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Restore envs from a state that `get_state` saved, here or in another vectorizer of the same envs.

        The state of one env may go into several: they behave alike until their actions differ, since their random
        streams are equal, too. The envs that receive a state lose their running episodes; the other envs do not change.
        An env that was never reset is reset once first. A state of all envs, passed as ``set_state(state)``, also
        restores the random stream of `random_action`.

        Args:
            state: A state from `get_state`, or one read from its file; it is copied.
            env_ids: The envs that receive a state, as indices or as an (N,) bool mask. None: the envs that were saved;
                with ``from_ids``: all.
            from_ids: For each of ``env_ids``, the index of the saved env whose state it receives. None: one state each,
                in order; if only one was saved, that one for all.

        Returns:
            ``(obs, infos)`` of all envs, as they were last returned before the state was saved; infos hold only
            marlvec's own keys.

        Raises:
            ArgumentError: Not a state, a state of other envs, or saved and present masks of envs differ; no env was
                changed.
            StateError: One of the envs lost its episode to a fault that the next step or reset will raise.
            BusyError: Another call is pending.
            EnvRaised: An env could not restore its state; it has no episode now, the other envs were restored.
        """
        self._call_state.check_idle("set_state")
        of = check_states(state, kind=self._state_kind, spec=self.spec, autoreset_mode=self.autoreset_mode)
        ids, places = choose_states(of, env_ids, from_ids, self.num_envs)
        self._check_states(ids, "set_state")
        self._buffers.check_rows(state["rows"], len(of))
        if self._no_entries is None:
            self._no_entries = self._recovery.get_state(np.zeros(0, np.int64))
        check_entries(state["recovery"], self._no_entries, len(of), "set_state(): recovery")
        recovery = take_states(state["recovery"], places)
        self._recovery.check_masks(ids, recovery["masked"])
        self._check_env_states(state["envs"], len(of), state["recovery"]["masked"])
        stream = None if state["actions"] is None else stream_from(state["actions"])
        self.drive_count += 1
        self._call_state.lose_episodes(ids)  # until they are restored
        failures = self._set_env_states(ids, state, places)
        good = ~np.isin(ids, [failure.env_id for failure in failures])
        ids, places = ids[good], places[good]
        self._buffers.set_rows(ids, state["rows"], places)
        self._recovery.set_state(ids, take_states(state["recovery"], places))
        self._call_state.have_episodes(ids[state["running"][places]])
        if env_ids is None and from_ids is None and stream is not None:
            self._rng = stream
        raise_failures(failures, self._place_name)
        result = self._make_step(self._everyone, Report())
        return result.obs, result.infos

    def _find_obstacles(self) -> dict[int, str]:
        """Return env → why its state cannot be saved. Requested once: restarted envs come from the same factories."""
        if self._obstacles is None:
            answers = self._answers_to(Command("state_obstacles"), None)
            self._obstacles = {i: found for i, found in enumerate(answers) if found is not None}
        return self._obstacles

    def _check_states(self, ids: NDArray[np.int64], call: str) -> None:
        if problem := describe_obstacles(self._find_obstacles(), ids, call):
            raise ArgumentError(problem)
        if with_faults := self._recovery.unseen_faults(ids):
            raise StateError(
                f"{call}(): envs {with_faults} lost their episodes to a fault that the next step or reset shows; "
                f"step or reset them first"
            )

    def _get_env_states(self, ids: NDArray[np.int64]) -> tuple[Any, NDArray[np.bool_]]:
        """Return the shards' states of these envs (None if masked), and whose episodes are over."""
        if self._batch is not None:
            saved = self._batch.get_state(ids)
            return saved, saved["phase"] == EnvPhase.OVER
        self._ask("get_state", ids)
        answers = self._fetch_answers("get_state")
        over = [answer is not None and answer["phase"] == EnvPhase.OVER for answer in answers]
        return list(answers), np.array(over, np.bool_)

    def _check_env_states(self, saved: Any, n: int, masked: NDArray[np.bool_]) -> None:
        if self._batch is None:
            check_each(saved, n, SAVED, len(self.spec.agents), masked)
        else:
            self._batch.check_state(saved, n)

    def _set_env_states(
        self, ids: NDArray[np.int64], state: Mapping[str, Any], places: NDArray[np.int64]
    ) -> list[Failure]:
        """Restore envs in their shards; return the failures."""
        if self._batch is not None:
            self._batch.set_state(ids, state["envs"], places)
            return []
        alive = np.array([state["envs"][k] is not None for k in places.tolist()], np.bool_)
        chosen = places[alive].tolist()
        if not chosen:
            return []
        rows: list[Any] = [None] * len(chosen)
        if self._sends_rows:
            rows = [{name: part[k : k + 1] for name, part in state["rows"].items()} for k in chosen]
        self._ask("set_state", ids[alive], [state["envs"][k] for k in chosen], rows)
        return self._fetch_report("set_state").failures
