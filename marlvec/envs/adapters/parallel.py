"""`ParallelAdapter`: PettingZoo Parallel envs as `MultiAgentEnv`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from marlvec.envs.adapters.base import ENDED, LIVE, MISSING, NOT_JOINED, DictAdapter
from marlvec.envs.adapters.return_values import (
    AgentId,
    agent_ids,
    contract_error,
    five_dicts,
    missing_hint,
    names_of,
    refuse_unknown,
)
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info
from marlvec.errors import ContractError

__all__ = ["ParallelAdapter", "agents_and_spaces", "space_of"]

_FLOATS = frozenset({"e", "f", "d", "g"})  # formats of numpy's floats in a memoryview
_VECTOR_HINT = (
    "If it is one number per objective, combine them: momaland.utils.parallel_wrappers.LinearizeReward(env, weights)"
)
_LEFT_HINT = "make(…, lenient=True) treats this as a truncation"
_SCALARS = frozenset({float, int, np.float64, np.float32})  # rewards of other classes leave the fast path


class ParallelAdapter(DictAdapter):
    """A PettingZoo Parallel env: all live agents act in every step.

    Agents may end at different times, be absent at reset and join later. An agent is live while it is in ``env.agents``
    and none of its flags was True; every live agent acts. An ended agent stays ended until the next reset.

    Old envs are supported, too: ``step`` may return 4 dicts, with one of dones (done means terminated, unless
    ``info["TimeLimit.truncated"]`` is True), and ``reset`` observations alone.

    ``lenient`` accepts other forms of rewards and flags (`Adapter.is_lenient`), and two omissions. Without
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

    def _begin(self, slot: Slot, obs: Mapping[Any, Any], call: str) -> None:
        refuse_unknown(obs, self._index, self.name, call, "observations")
        listed = self._present(call)
        for a, agent in enumerate(self.ids):
            here = agent in listed
            if here is not (agent in obs):
                problem = "but got no observation" if here else "yet got an observation"
                where = "in env.agents" if here else "not in env.agents"
                contract_error(self.name, call, f"agent {agent!r} is {where} {problem}")
            self._status[a] = NOT_JOINED
            if here:
                self._join(slot, a, obs[agent])
        if not listed:
            contract_error(self.name, call, "env.agents is empty after a reset: expected at least one live agent")
        self._note_live_agents(slot)

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
                return self._take_masks(slot, self._infos_by_agent(infos))
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
        name, index, status = self.name, self._index, self._status
        words = ("terminations", "truncations")
        obs, rewards, terminations, truncations, infos = five_dicts(result, name, words)
        tables = {"observations": obs, "rewards": rewards, "terminations": terminations, "truncations": truncations}
        for what, table in tables.items():
            refuse_unknown(table, index, name, "step()", what)
        new_infos = self._infos_by_agent(infos)
        if self.resets_itself and self._live:
            ends = [self._flags_in(agent, terminations, truncations) for _, agent in self._live]
            if all(map(any, ends)):
                return self._read_self_reset(slot, obs, rewards, ends, new_infos)
        listed = self._present("step()")
        for a, agent in enumerate(self.ids):
            given = (agent in obs) + (agent in rewards) + (agent in terminations) + (agent in truncations)
            if status[a] == ENDED:
                if given:
                    where = [what for what, table in tables.items() if agent in table]
                    contract_error(name, "step()", f"agent {agent!r} has ended and cannot come back, yet is in {where}")
                continue
            if status[a] == NOT_JOINED and not given and agent not in listed:
                continue
            ended, cut = self._flags_in(agent, terminations, truncations)
            left = status[a] == LIVE and agent not in listed and not (ended or cut)
            if left and self.is_lenient:
                cut = True
            elif agent not in obs or (status[a] == LIVE and given < len(tables)):
                where = [what for what, table in tables.items() if agent not in table]
                hint = f", and not in env.agents. {_LEFT_HINT}" if left else ""
                contract_error(name, "step()", f"live agent {agent!r} is missing from {where}{hint}")
            here = not (ended or cut)
            if here and agent not in listed:
                what, hint = ("left env.agents", f". {_LEFT_HINT}") if left else ("got data", "")
                contract_error(
                    name, "step()", f"agent {agent!r} {what} without being in env.agents, terminated or truncated{hint}"
                )
            seen = obs.get(agent, MISSING)
            reward = self._reward(rewards[agent], agent, _VECTOR_HINT) if agent in rewards else 0.0
            self._record(slot, a, seen, reward, ended, cut)
        self._note_live_agents(slot)
        slot.done = not self._live
        return self._take_masks(slot, new_infos)

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
                contract_error(self.name, "step()", f"live agent {agent!r} is missing from rewards")
            self._record(slot, a, MISSING, self._reward(rewards[agent], agent, _VECTOR_HINT), *flags)
        new_infos = self._end_and_begin(slot, new_infos)
        self._begin(slot, obs, "step()")
        return self._take_masks(slot, new_infos)

    def _present(self, call: str) -> frozenset[AgentId]:
        agents = getattr(self.env, "agents", None)
        if agents is None:
            contract_error(self.name, call, "it has no `agents`: expected the list of live agents")
        return self._listed(agents, call)

    def _note_live_agents(self, slot: Slot) -> None:
        """Note which agents are live now, and prepare the fast path if possible."""
        self._live = tuple((a, agent) for a, agent in enumerate(self.ids) if self._status[a] == LIVE)
        if slot is not self._slot:
            self._slot = slot
            # The observation of an agent with a mask has two parts, so it does not take the fast path.
            rows = zip(slot.fast_rows, self.mask_sizes, strict=True)
            self._rows = [row if size is None else None for row, size in rows]
        agents = self.env.agents
        plain = isinstance(agents, list) and len(agents) == len(self._live)
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
        if isinstance(error, TypeError) and getattr(env, f"{kind}_spaces", None) is not None:
            raise  # else the dict of spaces is None until reset()
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
