"""`ParallelAdapter` and `RLlibAdapter`: envs whose values are dicts by agent, as `MultiAgentEnv`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Space

from marlvec.envs.adapters.base import (
    ENDED,
    LIVE,
    MISSING,
    NOT_JOINED,
    VECTOR_HINT,
    AgentId,
    DictAdapter,
    Sink,
    agent_ids,
    contract_error,
    five_dicts,
    live_agents,
    missing_hint,
    names_of,
    refuse_unknown,
)
from marlvec.envs.env import Slot
from marlvec.envs.spec import Info
from marlvec.errors import ContractError

_FLOATS = frozenset({"e", "f", "d", "g"})  # formats of numpy's floats in a memoryview
_LEFT_HINT = (
    "set its termination or truncation in the step that takes it out of env.agents; make(…, lenient=True) treats this "
    "as a truncation"
)
_LEAVE_HINT = (
    "leave those that have ended out of env.agents: self.agents = [agent for agent in self.agents if not "
    "(terminations[agent] or truncations[agent])]"
)
_TABLES = ("observations", "rewards", "terminations", "truncations")
_SCALARS = frozenset({float, int, np.float64, np.float32})  # rewards of other classes leave the fast path


class ParallelAdapter(DictAdapter):
    """A PettingZoo Parallel env: all live agents act in every step.

    Agents may end at different times, be absent at reset and join later. An agent is live while it is in ``env.agents``
    and none of its flags was True; every live agent acts. An ended agent stays ended until the next reset.

    Old envs are supported, too: ``step`` may return 4 dicts, with one of dones (done means terminated, unless
    ``info["TimeLimit.truncated"]`` is True), and ``reset`` observations alone.

    ``lenient`` accepts other forms of rewards and flags (`Adapter.is_lenient`), one number as the reward of each live
    agent, one flag for all of them, and two omissions. Without
    ``possible_agents``, the agents are those present after a reset (without a seed), which is called here. An agent
    that leaves ``env.agents`` without a flag is truncated in that step; if the env returns no observation for it, its
    final observation is marked as missing (`Slot.final_missing`).
    """

    def __init__(self, env: Any, *, lenient: bool = False) -> None:
        super().__init__(env, *agents_and_spaces(env, can_be_lenient=True, lenient=lenient))
        self.is_lenient = lenient
        self._live: tuple[tuple[int, AgentId], ...] = ()
        # For the fast path: env.agents while no agent joins or leaves, and (index, agent, row) of each agent.
        self._expected: list[AgentId] | None = None
        self._cells: tuple[tuple[int, AgentId, memoryview | None], ...] = ()
        self._slot: Slot | None = None
        self._rows: list[memoryview | None] = []

    def close(self) -> None:
        """Close the env and drop references to the buffers."""
        self._slot, self._rows, self._cells, self._expected = None, [], (), None
        super().close()

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._expected = None
        return super().reset(slot, seed=seed, options=options)

    def _begin(self, slot: Slot, obs: Mapping[Any, Any], sink: Sink) -> None:
        refuse_unknown(obs, self._index, sink, "observations")
        listed = self._present(sink)
        for a, agent in enumerate(self.ids):
            here = agent in listed
            if here is not (agent in obs):
                expected = (
                    f"{'one' if here else 'none'} of agent {agent!r}, which is {'' if here else 'not '}in env.agents"
                )
                sink.report("keys", "observations", expected, "no observation" if here else "one", kind="observations")
            self._status[a] = NOT_JOINED
            if here:
                self._join(slot, a, obs.get(agent, MISSING))
        if not listed:
            change = "set self.agents = self.possible_agents[:] in reset()"
            sink.fault("agents", "env.agents", "at least one live agent", "none", change)
        self._update_live_agents(slot)

    def step(self, slot: Slot) -> Info | None:
        expected = self._expected
        actions = slot.read_actions()
        if expected is None or slot is not self._slot:
            return self._read_carefully(slot, self.env.step({agent: actions[a] for a, agent in self._live}))
        cells = self._cells
        table: dict[AgentId, Any] = {}
        for a, agent, _ in cells:  # three times as fast as dict(zip(..., strict=True))
            table[agent] = actions[a]
        result = self.env.step(table)
        # Fast path for the common case, in which no agent joins or leaves. Any other case is left to
        # `_read_carefully`, which starts again from the same result, and handles all cases and errors.
        try:
            obs, rewards, terminations, truncations, infos = result
            size = len(cells)
            # Sizes first: looking up a missing key in a defaultdict would add it.
            if len(obs) != size or len(rewards) != size or len(terminations) != size or len(truncations) != size:
                return self._read_carefully(slot, result)
            reward = slot.reward
            for a, agent, cell in cells:
                value = rewards[agent]
                kind = value.__class__
                if kind not in _SCALARS:
                    return self._read_carefully(slot, result)
                reward[a] = value
                ended = terminations[agent]
                cut = truncations[agent]
                if (ended is not False and (ended.__class__ is not np.bool_ or ended)) or (
                    cut is not False and (cut.__class__ is not np.bool_ or cut)
                ):
                    return self._read_carefully(slot, result)
                if cell is None:
                    self._observe(slot, a, obs[agent], True)
                    continue
                try:
                    cell[:] = obs[agent]
                except (ValueError, TypeError):
                    self._cast(slot, a, obs[agent])
            if self.env.agents == expected:
                if not any(infos.values()) and not slot.gave_mask[0]:  # else masks of the last step must be cleared
                    return None
                return self._take_masks(slot, self._infos_by_agent(infos, self.at_step))
        except (ContractError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            pass
        return self._read_carefully(slot, result)

    def _recall_agents(self, now: dict[str, Any]) -> None:
        super()._recall_agents(now)
        self._live = tuple((a, agent) for a, agent in enumerate(self.ids) if self._status[a] == LIVE)
        self._expected, self._cells = None, ()  # the next step does not take the fast path

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return space_of(self.env, kind, agent, self.ids)

    def _read_carefully(self, slot: Slot, result: Any) -> Info | None:
        """Check the result of a step, in all cases, and write it into the slot."""
        status, sink = self._status, self.at_step
        team = [agent for _, agent in self._live] if self.is_lenient else ()
        obs, rewards, terminations, truncations, infos = five_dicts(result, sink, _TABLES, team=team, ends=team)
        tables = dict(zip(_TABLES, (obs, rewards, terminations, truncations), strict=True))
        for what, table in tables.items():
            refuse_unknown(table, self._index, sink, what)
        new_infos = self._infos_by_agent(infos, sink)
        if self.resets_itself and self._live:
            ends = [self._flags_in(agent, terminations, truncations) for _, agent in self._live]
            if all(map(any, ends)):
                return self._read_self_reset(slot, obs, rewards, ends, new_infos)
        listed = self._present(sink)
        for a, agent in enumerate(self.ids):
            if status[a] == ENDED:
                self._expect_nothing(agent, tables, listed)
                continue
            given = (agent in obs) + (agent in rewards) + (agent in terminations) + (agent in truncations)
            was_live = status[a] == LIVE
            if not (was_live or given or agent in listed):
                continue
            ended, cut = self._flags_in(agent, terminations, truncations)
            left = was_live and agent not in listed and not (ended or cut)
            if left:
                if not self.is_lenient:
                    expected = f"agent {agent!r}, whose flags are False"
                    sink.report("life", "env.agents", expected, "it has left", _LEFT_HINT)
                cut = True
            elif given < len(tables):
                for what, table in tables.items() if was_live else (("observations", obs),):
                    if agent not in table:
                        sink.report("keys", what, f"one of the live agent {agent!r}", "none: it is missing", kind=what)
            here = not (ended or cut)
            if here and agent not in listed:
                sink.report("life", "env.agents", f"agent {agent!r}, which got data", "none: it is missing")
            elif agent in listed and not here:
                expected = f"agent {agent!r}, which has ended, to leave it"
                sink.remark("life", "env.agents", expected, "it still there", _LEAVE_HINT)
            reward = self._reward(rewards[agent], agent, VECTOR_HINT) if agent in rewards else 0.0
            self._record(slot, a, obs.get(agent, MISSING), reward, ended, cut)
        self._update_live_agents(slot)
        slot.done = not self._live
        return self._take_masks(slot, new_infos)

    def _expect_nothing(self, agent: AgentId, tables: Mapping[str, Mapping[Any, Any]], listed: Set[AgentId]) -> None:
        """Check that an agent that has ended is in no table."""
        for what, table in tables.items():
            if agent in table:
                expected = f"nothing of agent {agent!r}, which has ended and cannot come back"
                self.at_step.report("life", what, expected, "data")
        if agent in listed:
            expected = f"no agent {agent!r}, which has ended and cannot come back"
            self.at_step.remark("life", "env.agents", expected, "it again")

    def _read_self_reset(
        self,
        slot: Slot,
        obs: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        ends: Sequence[tuple[bool, bool]],
        new_infos: Info | None,
    ) -> Info | None:
        """Write a step in which an env that resets itself ended an episode and began the next."""
        for (a, agent), flags in zip(self._live, ends, strict=True):
            if agent not in rewards:
                expected = f"one of the live agent {agent!r}"
                self.at_step.report("keys", "rewards", expected, "none: it is missing", kind="rewards")
            reward = self._reward(rewards[agent], agent, VECTOR_HINT) if agent in rewards else 0.0
            self._record(slot, a, MISSING, reward, *flags)
        new_infos = self._end_and_begin(slot, new_infos)
        self._begin(slot, obs, self.at_step)
        return self._take_masks(slot, new_infos)

    def _present(self, sink: Sink) -> frozenset[AgentId]:
        return live_agents(getattr(self.env, "agents", None), self._index, sink)

    def _update_live_agents(self, slot: Slot) -> None:
        """Record which agents are live now, and prepare the fast path if possible."""
        self._live = tuple((a, agent) for a, agent in enumerate(self.ids) if self._status[a] == LIVE)
        if slot is not self._slot:
            self._slot = slot
            # The observation of an agent with a mask has two parts, so it does not take the fast path.
            rows = zip(slot.fast_rows, self.mask_sizes, strict=True)
            self._rows = [row if size is None else None for row, size in rows]
        agents = self.env.agents
        plain = isinstance(agents, list) and len(agents) == len(self._live)
        plain = plain and not self.at_step.collects and self.reward_weights is None
        self._expected = agents[:] if plain else None
        self._cells = tuple((a, agent, self._rows[a]) for a, agent in self._live) if plain else ()

    def _cast(self, slot: Slot, a: int, value: Any) -> None:
        """Write an observation whose dtype is not that of its space, mostly floats of another size."""
        row = self._rows[a]
        floats = row is not None and row.format in _FLOATS and isinstance(value, np.ndarray) and value.dtype.kind == "f"
        if row is not None and floats and value.shape == row.shape:
            np.asarray(row)[...] = value
        else:
            slot.write_obs(a, value)


def agents_and_spaces(
    env: Any, *, can_be_lenient: bool = False, lenient: bool = False
) -> tuple[list[AgentId], list[Any], list[Any]]:
    """Return the agents of a PettingZoo env with their observation and action spaces.

    `can_be_lenient`: the error for missing ``possible_agents`` may name ``lenient``, which takes those after a reset.
    """
    label = type(env).__name__
    agents = getattr(env, "possible_agents", None)
    if agents is None and lenient:
        env.reset()
        agents = getattr(env, "agents", None)
    if agents is None:
        hint = "; make(…, lenient=True) uses the agents after a reset" if can_be_lenient else ""
        hint += missing_hint("possible_agents = [agent, …]")
        problem = f"missing: expected the names of all agents that may ever appear{hint}"
        contract_error(label, "possible_agents", problem)
    agents = agent_ids(agents, label, "possible_agents")
    if not agents:
        hint = missing_hint("possible_agents = [agent, …]")
        contract_error(label, "possible_agents", f"empty: expected at least one agent{hint}")
    observation_spaces, action_spaces = (
        [space_of(env, kind, agent, agents) for agent in agents] for kind in ("observation", "action")
    )
    return agents, observation_spaces, action_spaces


def space_of(env: Any, kind: str, agent: AgentId, agents: Iterable[AgentId]) -> Any:
    """Return one agent's observation or action space; `ContractError` if the env declares none."""
    function = getattr(env, f"{kind}_space", None)
    # PettingZoo's own default warns and then reads the dict; read the dict here without the warning.
    inherited = getattr(getattr(function, "__func__", None), "__module__", "") == "pettingzoo.utils.env"
    try:
        return function(agent) if callable(function) and not inherited else getattr(env, f"{kind}_spaces")[agent]
    except (KeyError, AttributeError, TypeError, NotImplementedError) as error:
        table = getattr(env, f"{kind}_spaces", None)
        if isinstance(error, TypeError) and table is not None:
            raise  # else the dict of spaces is None until reset()
        if isinstance(table, Mapping) and agent in table:  # beside a method that has none of it
            return table[agent]
        label = type(env).__name__
        if isinstance(function, Space):
            raise ContractError(
                f"{label}.{kind}_space: expected a method, got the space {function}; write "
                f"def {kind}_space(self, agent): return …"
            ) from error
        raise ContractError(
            f"{label}.{kind}_space(): no space for agent {agent!r} ({type(error).__name__}: {error}); "
            f"possible agents are {names_of(agents)}{missing_hint(f'{kind}_spaces = {{agent: space, …}}')}"
        ) from error


ALL = "__all__"
"""Key of an RLlib-style env's flags for the whole episode."""

_ALL_HINT = (
    f"set terminateds[{ALL!r}] in every step: True when the episode of an RLlib-style env is over. If this is a "
    f"PettingZoo Parallel env, derive it from pettingzoo.ParallelEnv, or wrap it in ParallelAdapter yourself"
)
_RLLIB_TABLES = ("observations", "rewards", "terminateds", "truncateds")


class RLlibAdapter(DictAdapter):
    """An RLlib-style env: the agents in the observations act next.

    An agent joins with its first observation and ends with its own flag or with ``"__all__"``. Live agents that are not
    in the observations wait: they are alive, do not act, keep their observation, and may get rewards. An agent that
    ends without an observation keeps its previous one, and is marked (`Slot.final_missing`). The episode is over when
    ``"__all__"`` is True in terminateds or truncateds, or when every possible agent has ended.

    Agents come from ``possible_agents``, else from the keys of ``observation_spaces``, else from ``get_agent_ids()``,
    ``_agent_ids`` or ``agents``; spaces from ``observation_spaces`` and ``action_spaces``,
    ``get_observation_space(agent)`` and ``get_action_space(agent)``, or one space shared by all. Old envs are
    supported, too: ``step`` may return 4 dicts with one of dones, and ``reset`` observations alone.
    """

    def __init__(self, env: Any) -> None:
        agents = _agents(env)
        super().__init__(
            env,
            agents,
            [_space(env, "observation", agent) for agent in agents],
            [_space(env, "action", agent) for agent in agents],
        )
        self._has_flags = {**self._index, ALL: -1}
        self._acting: tuple[int, ...] = ()

    def _begin(self, slot: Slot, obs: Mapping[Any, Any], sink: Sink) -> None:
        refuse_unknown(obs, self._index, sink, "observations")
        if not obs:
            sink.fault("agents", "observations", "at least one agent's", "none", "observe who is to act first")
        self._status = [NOT_JOINED] * len(self.ids)
        for a, agent in enumerate(self.ids):
            if agent in obs:
                self._join(slot, a, obs[agent])
        self._acting = tuple(a for a, status in enumerate(self._status) if status == LIVE)

    def step(self, slot: Slot) -> Info | None:
        actions = slot.read_actions()
        result = self.env.step({self.ids[a]: actions[a] for a in self._acting})
        sink = self.at_step
        team = [agent for agent, status in zip(self.ids, self._status, strict=True) if status == LIVE]
        shared: Any = {"team": team, "ends": (ALL,)} if self.is_lenient else {}
        obs, rewards, terminateds, truncateds, infos = five_dicts(result, sink, _RLLIB_TABLES, **shared)
        if ALL not in terminateds:
            got = f"{sorted(map(str, terminateds))}"
            kind = "dones" if len(result) == 4 else "terminateds"
            sink.report("keys", kind, f"a flag of {ALL!r}", got, _ALL_HINT, breaks=True)
        over = (
            self._flag(terminateds.get(ALL, False), ALL, "termination"),
            self._flag(truncateds.get(ALL, False), ALL, "truncation"),
        )
        refuse_unknown(obs, self._index, sink, "observations")
        refuse_unknown(rewards, self._index, sink, "rewards")
        refuse_unknown(terminateds, self._has_flags, sink, "terminateds")
        refuse_unknown(truncateds, self._has_flags, sink, "truncateds")
        new_infos = self._infos_by_agent(infos, sink)
        # If an env resets itself, its observations at an end belong to the next episode.
        last = self.resets_itself and (any(over) or self._all_flagged(terminateds, truncateds))
        seen: Mapping[Any, Any] = {} if last else obs
        self._acting = tuple(
            a for a in range(len(self.ids)) if self._read_agent(slot, a, seen, rewards, terminateds, truncateds, over)
        )
        if last:
            new_infos = self._end_and_begin(slot, new_infos)
            self._begin(slot, obs, sink)
        else:
            slot.done = any(over) or all(status == ENDED for status in self._status)
        return self._take_masks(slot, new_infos)

    def cut_short(self, slot: Slot) -> None:
        """End the episode here; waiting agents have no final observation."""
        for a, alive in enumerate(slot.alive):
            if alive and not slot.acting[a]:
                slot.final_missing[a] = True
        super().cut_short(slot)

    def _agents_now(self) -> dict[str, Any]:
        return {**super()._agents_now(), "acting": list(self._acting)}

    def _recall_agents(self, now: dict[str, Any]) -> None:
        super()._recall_agents(now)
        self._acting = tuple(now["acting"])

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return _space(self.env, kind, agent)

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space of agent {agent!r}"

    def _all_flagged(self, terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]) -> bool:
        return all(
            status == ENDED or any(self._flags_in(agent, terminateds, truncateds))
            for agent, status in zip(self.ids, self._status, strict=True)
        )

    def _read_agent(
        self,
        slot: Slot,
        a: int,
        obs: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        over: tuple[bool, bool],
    ) -> bool:
        """Write the results of a step for one agent; return whether it acts next."""
        agent, sink = self.ids[a], self.at_step
        ended, cut = self._flags_in(agent, terminateds, truncateds)
        reward = self._reward(rewards[agent], agent, VECTOR_HINT) if agent in rewards else 0.0
        if self._status[a] == ENDED:
            # Such envs often repeat flags of ended agents, which is harmless; data for them is an error.
            if agent in obs or reward != 0.0:
                expected = "no data, for it has ended and cannot come back"
                sink.report("life", f"agent {agent!r}", expected, "an observation or a reward")
            return False
        if self._status[a] == NOT_JOINED and agent not in obs:
            if ended or cut or agent in rewards:
                tell = sink.report if ended or cut or reward != 0.0 else sink.remark
                change = "give an agent's first observation before, or with, its first reward"
                tell("life", f"agent {agent!r}", "nothing before its first observation", "a reward or flag", change)
            return False
        if not (ended or cut):
            # "__all__" ends all agents without a flag of their own.
            ended, cut = over
        return self._record(slot, a, obs.get(agent, MISSING), reward, ended, cut, agent in obs)


def _look_up(env: Any, attribute: str) -> Any:
    """Read an attribute of an env, or of the env inside: Gymnasium's wrappers do not forward attributes."""
    found = getattr(env, attribute, None)
    return getattr(getattr(env, "unwrapped", None), attribute, None) if found is None else found


def _agents(env: Any) -> list[AgentId]:
    """Return the agents of an RLlib-style env, in a fixed order."""
    label = type(env).__name__
    for attribute in ("possible_agents", "observation_spaces", "get_agent_ids", "_agent_ids", "agents"):
        found = _look_up(env, attribute)
        if callable(found) and attribute == "get_agent_ids":
            found = found()
        if isinstance(found, Dict):
            found = found.spaces
        if isinstance(found, Iterable) and not isinstance(found, (str, Space)) and (listed := list(found)):
            agents = agent_ids(listed, label, attribute)
            # A set has no order, and every worker must use the same one.
            return sorted(agents, key=str) if isinstance(found, (set, frozenset)) else agents
    hint = missing_hint("observation_spaces = {agent: space, …}")
    problem = f"missing: expected all agents there, or as the keys of observation_spaces{hint}"
    contract_error(label, "possible_agents", problem)


def _space(env: Any, kind: str, agent: AgentId) -> Any:
    """Return one agent's space, from the first of the known attributes that has it."""
    spaces = _look_up(env, f"{kind}_spaces")
    spaces = spaces.spaces if isinstance(spaces, Dict) else spaces
    if isinstance(spaces, Mapping) and agent in spaces:
        return spaces[agent]
    function = _look_up(env, f"get_{kind}_space")
    if callable(function):
        return function(agent)
    shared = _look_up(env, f"{kind}_space")
    if callable(shared) and not isinstance(shared, Space):
        return shared(agent)
    # RLlib's older form: one Dict space of all agents' spaces, keyed by agent.
    if isinstance(shared, Dict) and agent in shared.spaces and isinstance(agent, str):
        return shared.spaces[agent]
    return shared
