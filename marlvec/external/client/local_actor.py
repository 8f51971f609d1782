"""`LocalActor`: runs a policy in the client's process, with weights from the server."""

from __future__ import annotations

import copy
import hashlib
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from marlvec.collect.acting.policy_runner import split_output
from marlvec.collect.acting.policy_set import named, pipelines_for
from marlvec.connectors import ActionPipeline, AgentPipeline, Rows
from marlvec.errors import ArgumentError, ContractError, ProtocolError, RefusedError, StateError
from marlvec.external.client.env_form import EnvForm
from marlvec.external.client.request_channel import RequestChannel
from marlvec.external.protocol.messages import Type
from marlvec.external.protocol.weights import unpack_plain
from marlvec.external.settings import LocalInference
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree, to_array, zip_trees

__all__ = ["LocalActor"]

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
