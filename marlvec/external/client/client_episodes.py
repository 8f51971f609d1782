"""`ClientEpisodes`: a client's running episodes, with values not sent yet and actions not received yet."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from typing import Any

from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    ConnectionLost,
    ContractError,
    EpisodeOver,
    EpisodesFull,
    MarlvecError,
    ProtocolError,
    RefusedError,
    StateError,
)
from marlvec.external.client.env_form import EnvForm
from marlvec.external.client.local_actor import LocalActor
from marlvec.external.client.request_channel import PendingRequest, RequestChannel
from marlvec.external.exchange.external_episode import Flags
from marlvec.external.protocol.messages import Type
from marlvec.external.protocol.values import write_mask
from marlvec.external.settings import LocalInference

__all__ = ["ClientEpisodes"]

_KINDS = {"value": ContractError, "order": StateError, "episode": EpisodeOver, "full": EpisodesFull}


class _Run:
    __slots__ = ("asked", "era", "infos", "number", "rewards", "unconfirmed")

    def __init__(self, number: int, era: int) -> None:
        self.number, self.era = number, era
        self.rewards: dict[str, float] = {}  # logged since the last message, as are infos
        self.infos: dict[str, dict[str, Any]] = {}
        self.asked: PendingRequest | None = None  # for actions
        self.unconfirmed: list[PendingRequest] = []  # by the server


class ClientEpisodes:
    """All episodes of one client; see `RunningEpisodes`."""

    def __init__(self, caller: RequestChannel, form: EnvForm, local: LocalInference | None) -> None:
        self.form = form
        self._caller = caller
        self._runs: dict[Hashable, _Run] = {}
        self._lock = threading.Lock()
        self._numbers = 0
        self._actor = None if local is None else LocalActor(local, form, caller)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def weights_version(self) -> int:
        """Version of the weights used in this process; 0: none were fetched."""
        return 0 if self._actor is None else self._actor.version

    def update(self, timeout: float | None) -> int:
        """Fetch the newest weights; `StateError` without local inference."""
        if self._actor is None:
            raise StateError("update_weights(): the server decides, not this client; give Client(local=…)")
        self._actor.update(timeout)
        return self._actor.version

    def begin(
        self, key: Hashable | None, *, training_enabled: bool, env_id: int | None, timeout: float | None
    ) -> Hashable:
        if self._actor is not None:
            self._actor.look(timeout)
        with self._lock:
            self._numbers += 1
            key = f"episode-{self._numbers}" if key is None else key
            if key in self._runs:
                raise StateError(f"start_episode({key!r}): an episode with this id runs; end_episode() it first")
            fields = {"episode": self._numbers, "training": bool(training_enabled)}
            pending = self._caller.request(
                Type.BEGIN, fields if env_id is None else {**fields, "slot": int(env_id)}, timeout
            )
            run = _Run(self._numbers, pending.era)
            self._runs[key] = run
        try:
            self._caller.wait(pending, timeout)
        except AnswerTimeout:
            self._forget(key)
            self._caller.request(Type.ABANDON, {"episode": run.number, "reason": "no slot in time"}, timeout)
            raise EpisodesFull(f"start_episode(): no slot was free within {timeout} s") from None
        except MarlvecError as error:
            self._forget(key)
            raise _typed(error) from None
        if self._actor is not None:
            self._actor.begin(run.number)
        return key

    def ask(self, key: Hashable, obs: Any, masks: Any, timeout: float | None) -> dict[str, Any]:
        run = self._running(key)
        if run.asked is not None:
            raise StateError(f"episode {key!r} waits for an answer already: wait_for_action(), or end_episode()")
        seen, allowed = self.form.split(obs, masks)
        data = self.form.write_obs(seen)
        if self._actor is not None:
            actions = self._actor.decide(run.number, seen, allowed, run.rewards)
            self._log(key, run, data, actions, allowed, timeout, {"version": self._actor.version})
            self._actor.look(timeout)
            return actions
        run.asked = self._send(key, run, Type.STEP, {"obs": data, **self._masks(allowed)}, timeout)
        return self.wait(key, timeout)

    def wait(self, key: Hashable, timeout: float | None) -> dict[str, Any]:
        run = self._running(key)
        if run.asked is None:
            raise StateError(f"wait_for_action({key!r}): nothing was asked for; call get_action() first")
        try:
            reply = self._caller.wait(run.asked, timeout)
        except AnswerTimeout:
            raise AnswerTimeout(
                f"episode {key!r}: no action within {timeout} s; is a collector collecting? The request stays "
                f"pending: call wait_for_action() again, or end_episode()"
            ) from None
        except MarlvecError as error:
            run.asked = run.asked if isinstance(error, ConnectionLost) and run.era == self._caller.era else None
            raise self._explained(key, error) from None
        run.asked = None
        return self.form.read_actions(reply.fields["actions"])

    def log(self, key: Hashable, obs: Any, actions: Any, masks: Any, timeout: float | None) -> None:
        run = self._running(key)
        seen, allowed = self.form.split(obs, masks)
        done = self.form.check(actions, "actions")
        if done.keys() != seen.keys():
            raise ArgumentError(f"actions: expected actions of {sorted(seen)}, got actions of {sorted(done)}")
        self._log(key, run, self.form.write_obs(seen), done, allowed, timeout, {})

    def _log(
        self,
        key: Hashable,
        run: _Run,
        obs: Mapping[str, Any],
        actions: Mapping[str, Any],
        masks: Mapping[str, Any],
        timeout: float | None,
        more: Mapping[str, Any],
    ) -> None:
        fields = {"obs": obs, "actions": self.form.write_actions(actions), **self._masks(masks), **more}
        run.unconfirmed.append(self._send(key, run, Type.LOG, fields, timeout))

    def log_returns(self, key: Hashable, rewards: Any, infos: Any) -> None:
        run = self._running(key)
        total, new_infos = dict(run.rewards), dict(run.infos)
        for name, reward in self.form.check(rewards, "rewards").items():
            try:
                number = float(reward)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise ContractError(f"reward of agent {name!r}: expected a finite number, got {reward!r}")
            total[name] = total.get(name, 0.0) + number
        for name, info in ({} if infos is None else self.form.write_infos(infos)).items():
            new_infos[name] = {**new_infos.get(name, {}), **info}
        run.rewards, run.infos = total, new_infos

    def leave(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        run = self._running(key)
        table = self.form.check(final_obs, "final_obs")
        cut = _flags(truncated, table)
        over = {name: not cut[name] for name in table} if terminated is None else _flags(terminated, table)
        seen, _ = self.form.split({name: obs for name, obs in table.items() if obs is not None}, None)
        fields = {
            "obs": self.form.write_obs(seen),
            "terminated": [name for name in table if over[name]],
            "truncated": [name for name in table if cut[name]],
        }
        if neither := [name for name in table if not (over[name] or cut[name])]:
            raise ArgumentError(f"agents {neither} end: expected terminated or truncated True, got False for both")
        run.unconfirmed.append(self._send(key, run, Type.LEAVE, fields, timeout))
        if self._actor is not None:
            self._actor.leave(run.number, table)

    def end(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        run = self._running(key)
        if isinstance(terminated, Mapping) or isinstance(truncated, Mapping) or (terminated and truncated):
            self.leave(key, final_obs, terminated, truncated, timeout)
            final_obs, truncated = {}, False
        seen, _ = self.form.split(self.form.check(final_obs, "final_obs"), None)
        data = self.form.write_obs({name: obs for name, obs in seen.items() if obs is not None})
        run.asked = None  # a pending answer is dropped
        pending = self._send(key, run, Type.END, {"obs": data, "truncated": bool(truncated)}, timeout)
        self._forget(key)
        try:
            self._caller.wait(pending, timeout)
            self._check(run)
        except MarlvecError as error:
            raise _typed(error) from None

    # --- inside

    def _masks(self, masks: Mapping[str, Any]) -> dict[str, Any]:
        return {"masks": {name: write_mask(mask) for name, mask in masks.items()}} if masks else {}

    def _send(
        self, key: Hashable, run: _Run, kind: Type, fields: Mapping[str, Any], timeout: float | None
    ) -> PendingRequest:
        """Send a message about an episode, with the rewards and infos logged since the last one."""
        try:
            self._check(run)
        except MarlvecError as error:
            raise self._explained(key, error) from None
        if run.asked is not None:
            raise StateError(f"episode {key!r} waits for an answer: wait_for_action(), or end_episode()")
        outcome = {name: what for name, what in (("rewards", run.rewards), ("infos", run.infos)) if what}
        try:
            pending = self._caller.request(kind, {"episode": run.number, **fields, **outcome}, timeout)
        except ProtocolError as error:  # too large: drop the infos, which would make the next message too large as well
            run.infos = {}
            raise _typed(error) from None
        run.rewards, run.infos = {}, {}
        return pending

    def _check(self, run: _Run) -> None:
        """Raise the first error with which the server replied to an earlier message."""
        if run.era != self._caller.era:
            raise ConnectionLost("the server has lost this client's session, and its episodes with it")
        while run.unconfirmed and run.unconfirmed[0].reply is not None:
            self._caller.wait(run.unconfirmed.pop(0), 0.0)

    def _running(self, key: Hashable) -> _Run:
        run = self._runs.get(key)
        if run is None:
            raise EpisodeOver(f"no episode {key!r} runs: it has ended, was lost, or never began")
        if run.era != self._caller.era:
            self._forget(key)
            raise ConnectionLost(f"episode {key!r} is lost: the server has lost this client's session")
        return run

    def _explained(self, key: Hashable, error: MarlvecError) -> MarlvecError:
        """Translate an error of the server; forget the episode if it is over."""
        typed = _typed(error)
        if isinstance(typed, EpisodeOver):
            self._forget(key)
        return typed

    def _forget(self, key: Hashable) -> None:
        run = self._runs.pop(key, None)
        if run is not None and self._actor is not None:
            self._actor.end(run.number)


def _typed(error: MarlvecError) -> MarlvecError:
    if isinstance(error, RefusedError) and error.code in _KINDS:
        return _KINDS[error.code](str(error))
    if isinstance(error, ProtocolError) and error.code == "limit":
        return ContractError(str(error))
    return error


def _flags(given: Flags, table: Mapping[str, Any]) -> dict[str, bool]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(table, bool(given))
    if stray := [name for name in given if name not in table]:
        raise ArgumentError(f"flags name agents {stray}, who do not end; leave them out")
    return {name: bool(given.get(name, False)) for name in table}
