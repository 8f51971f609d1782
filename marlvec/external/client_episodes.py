"""`ClientEpisodes`: a client's running episodes, with values not sent yet and actions not received yet.

`EnvForm` packs and unpacks values as the server declared them; `LocalActor` runs a policy in the client's process.
"""

from __future__ import annotations

import copy
import hashlib
import math
import secrets
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from marlvec.collect.policies import named, pipelines_for
from marlvec.collect.policy_runner import split_output
from marlvec.connectors import ActionPipeline, AgentPipeline, Rows
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
from marlvec.external.episode import Flags
from marlvec.external.exchange import LocalInference, split_mask
from marlvec.external.handshake import Welcome
from marlvec.external.messages import (
    DTYPES,
    Type,
    ValueReader,
    read_space,
    short,
    unpack_plain,
    write_array,
    write_mask,
)
from marlvec.external.request_channel import PendingRequest, RequestChannel
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import why_no_mask
from marlvec.trees import map_tree, to_array, zip_trees

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


_COMMON = ("common", "__common__")  # keys of infos that belong to no single agent


class EnvForm:
    """Agents and spaces of a server, by agent name, and conversion of their values. `masks`: agents that need one."""

    def __init__(self, welcome: Welcome) -> None:
        self.agents = welcome.agents
        self.obs: dict[str, ValueReader] = {}
        self.actions: dict[str, ValueReader] = {}
        self.masks: set[str] = set()
        for group in welcome.groups:
            if not isinstance(group, dict) or group.keys() != {"agents", "observation", "action", "mask"}:
                raise ProtocolError("WELCOME: groups: expected dicts of agents, observation, action and mask")
            names, mask_size = group["agents"], group["mask"]
            if type(names) is not list or not all(type(name) is str for name in names):
                raise ProtocolError(f"WELCOME: groups: agents: expected a list of names, got {short(names)}")
            if mask_size is not None and (type(mask_size) is not int or mask_size < 1):
                raise ProtocolError(f"WELCOME: groups: mask: expected a length from 1, or None, got {short(mask_size)}")
            obs, action = ValueReader(read_space(group["observation"])), ValueReader(read_space(group["action"]))
            self.obs |= dict.fromkeys(names, obs)
            self.actions |= dict.fromkeys(names, action)
            if mask_size is not None:
                self.masks.update(names)
        if self.obs.keys() != set(self.agents):
            raise ProtocolError("WELCOME: groups: expected every agent in one group, and no others")

    def check(self, table: Any, what: str) -> Mapping[str, Any]:
        """Require a dict keyed by known agents."""
        if not isinstance(table, Mapping):
            raise ArgumentError(f"{what}: expected a dict of agent name to value, got {type(table).__name__}")
        if unknown := [name for name in table if name not in self.obs]:
            raise ArgumentError(f"{what}: unknown agents {unknown}; there are {list(self.agents)}")
        return table

    def split(self, obs: Any, masks: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separate observations from action masks, also if an env puts the mask into the observation.

        `ContractError`: a mask for an action space that cannot have one.
        """
        bare = dict(self.check(obs, "observations"))
        found = {} if masks is None else dict(self.check(masks, "masks"))
        for name in self.masks & bare.keys():
            bare[name], mask = split_mask(bare[name])
            if mask is not None:
                found.setdefault(name, mask)
        for name in found:
            if reason := why_no_mask(self.actions[name].space):
                raise ContractError(f"action mask of agent {name!r}: {reason}")
        return bare, found

    def write_obs(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Pack observations; `ContractError` names an agent whose structure, shapes or dtypes are not its space's."""
        return {name: _write(self.obs[name], value, "observation", name) for name, value in obs.items()}

    def write_actions(self, actions: Mapping[str, Any]) -> dict[str, Any]:
        """Pack actions; raises as `write_obs`."""
        return {name: _write(self.actions[name], value, "action", name) for name, value in actions.items()}

    def read_actions(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack received actions; `ProtocolError` if they do not match the action spaces."""
        try:
            return {name: self.actions[name].read(value, f"action of {name!r}") for name, value in data.items()}
        except (KeyError, ContractError) as error:
            raise ProtocolError(f"the server sent invalid actions: {error}") from None

    def write_infos(self, infos: Any) -> dict[str, dict[str, Any]]:
        """Pack infos; `ContractError` if the protocol has no type for a value."""
        self.check({n: None for n in infos if n not in _COMMON} if isinstance(infos, Mapping) else infos, "infos")
        out: dict[str, dict[str, Any]] = {}
        for name, info in infos.items():
            if not isinstance(info, Mapping):
                raise ArgumentError(f"infos of {name!r}: expected a dict, got {type(info).__name__}")
            if info:
                out[name] = {
                    _key(key, name): _write_info(value, f"info {key!r} of {name!r}") for key, value in info.items()
                }
        return out


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise ContractError(f"infos of {name!r}: expected keys that are texts, got {key!r}")
    return key


def _write(writer: ValueReader, value: Any, what: str, name: str) -> Any:
    try:
        return writer.write(value)
    except ContractError as error:
        raise ContractError(f"{what} of agent {name!r}: {error}") from None


def _write_info(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.name in DTYPES:
        return write_array(value)
    raise ContractError(
        f"{where}: expected None, a bool, a number, a text or a numeric array, got {type(value).__name__}, which does "
        f"not go over a socket"
    )


_MAX_WEIGHTS = 2**31


class _Episode:
    __slots__ = ("before", "behind", "rewards", "turns")

    def __init__(self, before: Mapping[str, AgentPipeline], behind: Mapping[str, ActionPipeline]) -> None:
        # agent connectors by policy id, for this episode alone; `behind`: action connectors
        self.before = {name: copy.deepcopy(chain) for name, chain in before.items()}
        self.behind = {name: copy.deepcopy(chain) for name, chain in behind.items()}
        self.turns: dict[str, int] = {}  # agent name → number of its next decision
        self.rewards: dict[str, float] = {}  # agent name → sum since its last decision


class LocalActor:
    """Policies and connectors of a client. Threads may call it at the same time; a lock serializes policy calls."""

    def __init__(self, local: LocalInference, form: EnvForm, caller: RequestChannel) -> None:
        policies = dict(named(local.policies))
        ids = tuple(policies)
        self._policies, self._caller, self._explore = policies, caller, local.explore
        self._agents, self._index = form.agents, {name: a for a, name in enumerate(form.agents)}
        self._played_by = _mapping(local.policy_mapping, ids, form.agents)
        self._before = pipelines_for(AgentPipeline, local.agent_connectors, ids, AgentPipeline.default)
        self._behind = pipelines_for(ActionPipeline, local.action_connectors, ids, ActionPipeline.default)
        self._trees: dict[str, SpaceTree] = {}  # of the spaces that policies act in
        seed = secrets.randbits(63) if local.seed is None else local.seed
        for number, name in enumerate(ids):
            mine = [agent for agent in form.agents if self._played_by[agent] == name]
            if not mine:
                continue
            before, behind = self._before[name], self._behind[name]
            behind.bind(form.actions[mine[0]].space, form.agents)
            before.bind(form.obs[mine[0]].space, form.agents, behind.policy_space_)
            before.policy_id = behind.policy_id = name
            before.eval()
            behind.eval()
            policy_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
            self._trees[name] = SpaceTree(behind.policy_space_)
            policies[name].setup(before.output_space_, behind.policy_space_, seed=policy_seed)
        self._episodes: dict[int, _Episode] = {}
        self._lock = threading.RLock()
        self._every, self._next_look = local.update_seconds, 0.0
        self.version = 0  # of the weights in use; 0: the policies' initial weights

    # --- episodes

    def begin(self, number: int) -> None:
        """Begin an episode: copy the connectors with their newest state, without memory of other episodes."""
        with self._lock:
            self._episodes[number] = _Episode(self._before, self._behind)

    def end(self, number: int) -> None:
        """End an episode."""
        self._episodes.pop(number, None)

    def leave(self, number: int, agents: Iterable[str]) -> None:
        """Drop the rewards of agents that have ended."""
        episode = self._episodes[number]
        for agent in agents:
            episode.rewards.pop(agent, None)

    def decide(
        self, number: int, obs: Mapping[str, Any], masks: Mapping[str, Any], rewards: Mapping[str, float]
    ) -> dict[str, Any]:
        """Choose actions for the env; all dicts are by agent name, `rewards` since the last call.

        Raises `ContractError` if the agent connectors removed rows: only the server can decide for these.
        """
        episode = self._episodes[number]
        for agent, reward in rewards.items():
            episode.rewards[agent] = episode.rewards.get(agent, 0.0) + reward
        for_env: dict[str, Any] = {}
        for policy_id in dict.fromkeys(self._played_by[agent] for agent in obs):
            mine = [agent for agent in self._agents if agent in obs and self._played_by[agent] == policy_id]
            rows = self._rows(number, episode, mine, obs, masks)
            with self._lock:
                rows = episode.before[policy_id](rows)
                if len(rows) != len(mine):
                    raise ContractError(
                        f"the agent connectors of policy {policy_id!r} removed rows; let the server decide for them"
                    )
                output = self._policies[policy_id].act(rows, explore=self._explore)
            try:
                actions, columns = split_output(output, self._trees[policy_id])
            except ContractError as error:
                raise ContractError(f"policy {policy_id!r} {error}") from None
            answer = rows.replace(actions=actions, **columns)
            done = episode.behind[policy_id](answer)
            episode.before[policy_id].on_policy_output(done)
            for i, agent in enumerate(mine):
                for_env[agent] = _pick(done["actions_for_env"], i)
        return for_env

    def _rows(
        self, number: int, episode: _Episode, mine: list[str], obs: Mapping[str, Any], masks: Mapping[str, Any]
    ) -> Rows:
        n = len(mine)
        turns = [episode.turns.get(agent, 0) for agent in mine]
        first = np.array(turns) == 0
        reward_B = np.array(
            [0.0 if turn == 0 else episode.rewards.get(agent, 0.0) for agent, turn in zip(mine, turns, strict=True)]
        )
        for agent, turn in zip(mine, turns, strict=True):
            episode.turns[agent] = turn + 1
            if turn:  # rewards before an agent's first row go to its first transition
                episode.rewards[agent] = 0.0
        columns: dict[str, Any] = {
            "env_id": np.zeros(n, np.int64),
            "agent_index": np.array([self._index[agent] for agent in mine], np.int64),
            "eps_id": np.full(n, number),
            "t": np.array(turns, np.int64),
            "obs": zip_trees(np.stack, [obs[agent] for agent in mine]),
            "rewards": reward_B,
            "terminated": np.zeros(n, np.bool_),
            "truncated": np.zeros(n, np.bool_),
            "first": first,
            "last": np.zeros(n, np.bool_),
        }
        if any(agent in masks for agent in mine):
            columns["action_mask"] = np.stack([np.asarray(masks[agent], np.bool_) for agent in mine])
        return Rows(columns)

    # --- weights

    def look(self, timeout: float | None) -> None:
        """Check for newer weights, if it is time."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_look:
                return
            self._next_look = now + self._every
        self.update(timeout)

    def update(self, timeout: float | None) -> None:
        """Fetch the newest weights if they are newer than those in use.

        Raises `ProtocolError` if they differ from the offer, `ArgumentError` if they do not fit the policies here.
        """
        for _ in range(5):
            try:
                version, data = self._fetch(timeout)
            except RefusedError as error:
                if error.code not in ("weights", "limit"):
                    raise
                continue  # newer weights were published meanwhile
            if version > self.version:
                self._load(version, unpack_plain(data))
            return
        raise StateError("weights were replaced five times while they were fetched; publish less often")

    def _fetch(self, timeout: float | None) -> tuple[int, bytes]:
        offer = self._caller.call(Type.WEIGHTS, {"have": self.version}, timeout).fields
        if not offer["parts"]:
            return self.version, b""
        if offer["size"] > _MAX_WEIGHTS:
            raise ProtocolError(f"the server offers weights of {offer['size']} bytes, more than {_MAX_WEIGHTS}")
        if offer["parts"] > offer["size"]:
            raise ProtocolError(f"the server offers {offer['size']} bytes of weights in {offer['parts']} parts")
        whole = bytearray()
        for part in range(offer["parts"]):
            chunk = self._caller.call(Type.PART, {"version": offer["version"], "part": part}, timeout).fields["data"]
            whole += chunk
            if len(whole) > offer["size"]:
                break
        if hashlib.sha256(whole).digest() != offer["sha256"]:
            raise ProtocolError("the checksum of the received weights differs from the offered one")
        return offer["version"], bytes(whole)

    def _load(self, version: int, content: Any) -> None:
        names = {"version", "policies", "agent_connectors", "action_connectors"}
        if not isinstance(content, dict) or content.keys() != names or content["version"] != version:
            raise ProtocolError(f"received weights: expected a dict of {sorted(names)} of version {version}")
        with self._lock:
            for part, mine in (
                ("policies", self._policies),
                ("agent_connectors", self._before),
                ("action_connectors", self._behind),
            ):
                if not isinstance(content[part], dict):
                    raise ProtocolError(f"received weights: expected a dict of {part}")
                for name, state in content[part].items():
                    if name in mine:
                        mine[name].load_state_dict(state)
            for policy in self._policies.values():
                policy.version = version
            self.version = version


def _mapping(given: str | Mapping[str, str] | None, ids: tuple[str, ...], agents: tuple[str, ...]) -> Mapping[str, str]:
    if given is None and len(ids) > 1:
        raise ArgumentError(f"policy_mapping: expected a policy for each agent, one of {list(ids)}, got None")
    played_by = dict(given) if isinstance(given, Mapping) else dict.fromkeys(agents, ids[0] if given is None else given)
    if played_by.keys() != set(agents) or not set(played_by.values()) <= set(ids):
        raise ArgumentError(f"policy_mapping: expected one of {list(ids)} for each of {list(agents)}, got {given!r}")
    return played_by


def _pick(tree: Any, i: int) -> Any:
    return map_tree(lambda leaf: to_array(leaf)[i], tree)
