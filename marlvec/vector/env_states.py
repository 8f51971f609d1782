"""`StatefulVectorEnv`: saves the states of envs, and lets envs go on from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds
from marlvec.errors import ArgumentError, Failure, StateError
from marlvec.vector.base import VectorEnvBase
from marlvec.vector.call_state import exclusive
from marlvec.vector.commands import StateObstacle
from marlvec.vector.data.report import Report
from marlvec.vector.data.saved_states import (
    FORMAT,
    check_each,
    check_entries,
    check_states,
    choose_states,
    describe_obstacles,
    stream_from,
    take_states,
)
from marlvec.vector.faults.failures import raise_failures
from marlvec.vector.shards.phase import EnvPhase

__all__ = ["StatefulVectorEnv"]

_SAVED = frozenset(EnvPhase) - {EnvPhase.ABSENT}


class StatefulVectorEnv(VectorEnvBase):
    """The part of `VectorEnv` that saves and restores states of envs, between two of its other calls."""

    _rng: np.random.Generator | None = None  # for `random_action`; made where it is wanted first
    _obstacles: dict[int, str] | None = None  # to saving states, by env; None: not asked yet
    _no_entries: dict[str, Any] | None = None  # what `recovery` says of no envs: names, dtypes and shapes
    _state_kind = "env"  # of states that fit these envs
    _sends_rows = False  # whether workers do not see all that is written into rows here: they hold objects

    @exclusive(fetches=True)
    def state_obstacles(self) -> dict[int, str]:
        """Which envs' states cannot be saved by `get_state`, and why.

        Returns:
            Env index → what is missing and what to do about it; empty where all can be saved, exactly.

        Raises:
            BusyError: Another call is pending.
        """
        self._call_state.check_idle("state_obstacles")
        return dict(self._find_obstacles())

    @exclusive(fetches=True)
    def get_state(self, env_ids: EnvIds | None = None) -> dict[str, Any]:
        """Save the state of envs, so that `set_state` lets them, or others like them, go on from it bit by bit.

        The state is plain data: numbers, texts, None, arrays, lists, tuples and dicts. It has all that the next steps
        depend on: the envs' own states with their random streams, the rows that were handed out last, and what is due
        in them (an autoreset, seeds of restarts). It costs no episode.

        What belongs to no env is not in it: `faults`, `incarnations`, the budget of restarts. The random stream of
        `random_action` is in a state of all envs (``env_ids=None``) only.

        Args:
            env_ids: The envs, as indices or as an (N,) bool mask; None for all.

        Returns:
            The state of these envs: the first axis of its arrays is theirs, in their order.

        Raises:
            ArgumentError: The state of one of them cannot be saved; says why, and what to do (see `state_obstacles`).
            StateError: One lost its episode to a fault that the next step or reset will show.
            BusyError: Another call is pending.
            EnvRaised: An env's own ``get_state()`` raised; names it.
            SerialisationError: What it returned is no plain data; names the env and the part.
        """
        ids = self._chosen_ids("get_state", env_ids)
        self._check_states(ids, "get_state")
        envs, over = self._get_env_states(ids)
        stream = self._rng if env_ids is None else None
        return {
            "format": FORMAT,
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
        """Let envs go on from a state that `get_state` saved, here or in another vectorizer of the same envs.

        The state of one env may go into many: they go on alike until their actions differ, since their random streams
        are equal, too. Running episodes of the envs that get a state are gone; the others are left alone. An env that
        was never reset is reset once before. ``set_state(state)`` of a state of all envs restores the random stream of
        `random_action` as well.

        Args:
            state: What `get_state` returned, or what was read from a file of it; it is copied.
            env_ids: The envs that get one, as indices or as an (N,) bool mask. None: those that it was saved from; with
                ``from_ids``: all.
            from_ids: For each of them, by the index that it had when it was saved, the env whose state it gets. None:
                one each, in order, or to all the only one there is.

        Returns:
            ``(obs, infos)`` of all envs, as they were handed out last before the state was saved; of infos there are
            marlvec's own.

        Raises:
            ArgumentError: It is no state, one of other envs, or says of an env that is masked that it is not, or the
                other way round where nothing is masked; nothing was changed.
            StateError: One of the envs lost its episode to a fault that the next step or reset will show.
            BusyError: Another call is pending.
            EnvRaised: An env could not take its state; it has no episode now, the others have theirs.
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
        self._call_state.lose_episodes(ids)  # until they have gone on
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
        """Why states cannot be saved, by env; asked once, as envs are built anew by the same factories."""
        if self._obstacles is None:
            self._control("state_obstacles", StateObstacle(), None)
            answers = self._fetch_answers("state_obstacles")
            self._obstacles = {i: found for i, found in enumerate(answers) if found is not None}
        return self._obstacles

    def _check_states(self, ids: NDArray[np.int64], call: str) -> None:
        """Refuse envs whose states cannot be had, and those whose fault is to be shown first."""
        if problem := describe_obstacles(self._find_obstacles(), ids, call):
            raise ArgumentError(problem)
        if with_faults := self._recovery.unseen_faults(ids):
            raise StateError(
                f"{call}(): envs {with_faults} lost their episodes to a fault that the next step or reset shows; "
                f"step or reset them first"
            )

    def _get_env_states(self, ids: NDArray[np.int64]) -> tuple[Any, NDArray[np.bool_]]:
        """What shards say of these envs, and whose episodes are over; of a masked one, None."""
        self._asked = ids
        self._request("get_state", ids)
        answers = self._fetch_answers("get_state")
        over = [answer is not None and answer["phase"] == EnvPhase.OVER for answer in answers]
        return list(answers), np.array(over, np.bool_)

    def _check_env_states(self, saved: Any, n: int, masked: NDArray[np.bool_]) -> None:
        """Make sure that this is what `_get_env_states` gave of ``n`` such envs."""
        check_each(saved, n, _SAVED, len(self.spec.agents), masked)

    def _set_env_states(
        self, ids: NDArray[np.int64], state: Mapping[str, Any], places: NDArray[np.int64]
    ) -> list[Failure]:
        """Have shards put their envs into such states; returns what went wrong."""
        alive = np.array([state["envs"][k] is not None for k in places.tolist()], np.bool_)
        self._asked, chosen = ids[alive], places[alive].tolist()
        if not chosen:
            return []
        rows: list[Any] = [None] * len(chosen)
        if self._sends_rows:
            rows = [{name: part[k : k + 1] for name, part in state["rows"].items()} for k in chosen]
        self._request("set_state", self._asked, ([state["envs"][k] for k in chosen], rows))
        self._wait(self._call_state.outstanding, None, "set_state")
        return self._take_results()[1].failures
