"""`AECAdapter`: PettingZoo AEC (turn-based) envs as `MultiAgentEnv`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from marlvec.envs.adapters.base import (
    ENDED,
    LIVE,
    NOT_JOINED,
    VECTOR_HINT,
    Adapter,
    AgentId,
    Sink,
    contract_error,
    live_agents,
    mapping,
    names_of,
    warn_of_contract,
)
from marlvec.envs.adapters.dicts import agents_and_spaces, space_of
from marlvec.envs.env import Slot
from marlvec.envs.spec import Info
from marlvec.envs.user_env import one_each
from marlvec.errors import ContractError

_ROUNDING = 0.01  # relative tolerance for sums of rewards, which may be float16
_DEAD_STEP_HINT = "call self._was_dead_step(action) and return where the selected agent has ended"
_SELECT_HINT = "select an agent of self.agents"


class AECAdapter(Adapter):
    """A PettingZoo AEC env: one step is one agent's move.

    Dead agents' steps (``step(None)``) are taken in the same step as the move before them, so that the selected agent
    is always live. An agent ends in the step in which the env selects it for that last, dead turn: until then it is
    alive and may get rewards, exactly as in a loop over ``agent_iter()`` and ``last()``.

    An agent observes at its turn, as in ``last()``, and once more when it ends. In between it keeps its observation.
    Before its first turn its row is zeros: an env need not have observations of agents that it has not selected yet
    (SuperSuit's wrappers do not). So an agent that ends without any turn, even a dead one, has no final observation
    (`Slot.final_missing`).

    The reward of a step is the sum of all ``env.rewards`` in it, for every agent, even for agents that wait. If
    ``last()`` has another sum at an agent's turn, there is one `ContractWarning` per env.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, *agents_and_spaces(env))
        self._seen = [False] * len(self.ids)  # agents that were selected in this game, and so can be observed
        self._acting: int | None = None
        self._owed = [0.0] * len(self.ids)  # sum of rewards since each agent's last turn, as in last()
        self._size = [0.0] * len(self.ids)  # sum of their absolute values, for the rounding tolerance
        self._agrees_with_last = True  # until a difference is found
        self._state_owner = self.env
        if self.resets_itself:
            raise ContractError(
                f"{self.name} is turn-based and declares that it resets itself, so the flags of the ended episode "
                f"cannot be read; expected an env that leaves resets to marlvec"
            )

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        self._status = [NOT_JOINED] * len(self.ids)
        self._seen = [False] * len(self.ids)
        self._acting = None
        self._owed, self._size = [0.0] * len(self.ids), [0.0] * len(self.ids)
        sink = self.at_reset
        self.call_reset(seed, options)
        self._state_owner = state_owner(self.env)
        if not hasattr(self._state_owner, "terminations") and hasattr(self._state_owner, "dones"):
            refuse_dones(sink)
        agents = live_agents(self._state_owner.agents, self._index, sink)
        for a, agent in enumerate(self.ids):
            if agent in agents:
                if any(self._flags_of(agent, sink)):
                    change = "set every termination and truncation to False in reset()"
                    sink.fault("life", f"flags of agent {agent!r}", "False before the first move", "True", change)
                self._status[a] = LIVE
                slot.alive[a] = True
        if not agents:
            change = "set self.agents = self.possible_agents[:] in reset()"
            sink.fault("agents", "env.agents", "at least one live agent", "none", change)
        self._select(slot, sink)
        return self._infos(slot, {}, sink)

    def step(self, slot: Slot) -> Info | None:
        """Take the selected agent's move, and all dead turns after it."""
        env, owner, mover, sink = self.env, self._state_owner, self._acting, self.at_step
        if mover is None:
            contract_error(self.name, "step()", "no agent has a turn: the game is over, or it was never reset")
        self._acting = None
        env.step(slot.read_actions()[mover])
        slot.acting[mover] = False
        slot.clear_mask(mover)
        self._owed[mover] = self._size[mover] = 0.0
        last_infos: dict[AgentId, Any] = {}
        self._read_step(slot, last_infos)
        # Dead agents take their turns until a live agent is selected or none is left.
        while owner.agents:
            agent = owner.agent_selection
            a = self._place(agent, "agent_selection", sink)
            flags = self._flags_of(agent, sink)
            if not any(flags):
                self._select(slot, sink)
                break
            self._seen[a] = True
            self._compare_with_last(a)
            self._end(slot, a, flags, last_infos)
            env.step(None)
            if agent in owner.agents:
                expected = f"the dead agent {agent!r} to leave it in step(None)"
                sink.fault("life", "env.agents", expected, "it still there", _DEAD_STEP_HINT)
            self._read_step(slot, last_infos)
        slot.done = LIVE not in self._status
        return self._infos(slot, last_infos, sink)

    def cut_short(self, slot: Slot) -> None:
        """End the game here: every agent that has had a turn observes once more."""
        self._acting = None
        for a, agent in enumerate(self.ids):
            if self._status[a] == LIVE:
                flags = self._flags_of(agent, self.at_step)
                if any(flags):  # it ended by itself, and has not had its dead turn yet
                    self._end(slot, a, flags, {})
                else:
                    self._observe_last(slot, a)
                    self._status[a] = ENDED
        super().cut_short(slot)

    def _agents_now(self) -> dict[str, Any]:
        return {**super()._agents_now(), "seen": list(self._seen), "acting": self._acting}

    def _recall_agents(self, now: dict[str, Any]) -> None:
        super()._recall_agents(now)
        self._seen, self._acting = one_each(now["seen"], len(self.ids), f"{self.name}: seen"), now["acting"]
        self._state_owner = state_owner(self.env)
        self._owed = [0.0] * len(self.ids)  # default if the env keeps no sum
        self._owed = [self._cumulative_reward(a) for a in range(len(self.ids))]
        self._size = [abs(owed) for owed in self._owed]

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return space_of(self.env, kind, agent, self.ids)

    def _read_step(self, slot: Slot, last_infos: dict[AgentId, Any]) -> None:
        """Write the rewards of the env's last step, and note agents that joined or left."""
        status, reward, sink = self._status, slot.reward, self.at_step
        for agent, value in mapping(self._state_owner.rewards, sink, "env.rewards").items():
            number = self._reward(value, agent, VECTOR_HINT)
            if number != 0.0:
                a = self._place(agent, "env.rewards", sink)
                if status[a] == ENDED and agent not in last_infos:
                    no_reward_of(agent, number, sink)
                reward[a] += number
                self._owed[a] += number
                self._size[a] += abs(number)
        agents = live_agents(self._state_owner.agents, self._index, sink)
        for a, agent in enumerate(self.ids):
            if agent in agents:
                if status[a] == ENDED:
                    expected = f"no agent {agent!r}, which has ended and cannot come back"
                    sink.fault("life", "env.agents", expected, "it again")
                if status[a] == NOT_JOINED:
                    status[a] = LIVE
                    slot.alive[a] = True
            elif status[a] == LIVE:
                flags = self._flags_of(agent, sink)
                if not any(flags):
                    sink.fault("life", "env.agents", f"agent {agent!r}, whose flags are False", "it has left")
                self._end(slot, a, flags, last_infos)

    def _end(self, slot: Slot, a: int, flags: tuple[bool, bool], last_infos: dict[AgentId, Any]) -> None:
        """End one agent, while the env still has its last observation and info."""
        agent = self.ids[a]
        self._status[a] = ENDED
        slot.terminated[a], slot.truncated[a] = flags
        slot.alive[a] = slot.acting[a] = False
        self._observe_last(slot, a)
        info = mapping(self._state_owner.infos, self.at_step, "env.infos", "infos").get(agent)
        last_infos[agent] = dict(info) if isinstance(info, Mapping) else info

    def _observe_last(self, slot: Slot, a: int) -> None:
        """Write an agent's final observation; if it was never selected, mark it as missing."""
        if self._seen[a]:
            self._observe(slot, a, self.env.observe(self.ids[a]), False)
        else:
            slot.final_missing[a] = True

    def _select(self, slot: Slot, sink: Sink) -> None:
        agent = self._state_owner.agent_selection
        a = self._place(agent, "agent_selection", sink)
        if self._status[a] != LIVE or agent not in self._state_owner.agents:
            live = [name for name, status in zip(self.ids, self._status, strict=True) if status == LIVE]
            sink.fault("agents", "agent_selection", f"a live agent, of {names_of(live)}", repr(agent), _SELECT_HINT)
        self._acting = a
        self._compare_with_last(a)
        slot.acting[a] = self._seen[a] = True
        self._observe(slot, a, self.env.observe(agent), True)

    def _compare_with_last(self, a: int) -> None:
        """Warn if PettingZoo's ``last()`` has another sum of rewards for the agent whose turn it is."""
        if not self._agrees_with_last or self.at_step.collects:  # check_env looks more closely
            return
        cumulative, owed = self._cumulative_reward(a), self._owed[a]
        if cumulative == owed or abs(cumulative - owed) <= _ROUNDING * max(self._size[a], 1.0):
            return
        self._agrees_with_last = math.isnan(cumulative) and math.isnan(owed)
        if not self._agrees_with_last:
            warn_of_contract(  # without the numbers, so that envs of one class give one warning
                f"{self.name}: last() and env.rewards disagree on an agent's reward since its last turn; marlvec uses "
                f"env.rewards. In step(), set self.rewards, and call self._accumulate_rewards() once, when it is "
                f"complete; marlvec.testing.check_env() finds where they differ"
            )

    def _cumulative_reward(self, a: int) -> float:
        """Return an agent's reward since its last turn according to ``last()``; `_owed` if the env keeps no sum.

        Only the env's own sum is read: a wrapper may change ``rewards`` without changing ``last()`` on purpose.
        """
        sums = vars(self._state_owner).get("_cumulative_rewards")
        reward = sums.get(self.ids[a]) if isinstance(sums, dict) else None
        return float(reward) if isinstance(reward, (int, float, np.number)) else self._owed[a]

    def _place(self, agent: AgentId, what: str, sink: Sink) -> int:
        try:
            a = self._index.get(agent)
        except TypeError:  # not hashable
            a = None
        if a is None:
            sink.fault("agents", what, f"agents of {names_of(self.ids)}", f"the unknown agent {agent!r}")
        return a

    def _flags_of(self, agent: AgentId, sink: Sink) -> tuple[bool, bool]:
        terminations = mapping(self._state_owner.terminations, sink, "env.terminations")
        truncations = mapping(self._state_owner.truncations, sink, "env.truncations")
        return self._flags_in(agent, terminations, truncations)

    def _infos(self, slot: Slot, last_infos: dict[AgentId, Any], sink: Sink) -> Info | None:
        infos = mapping(self._state_owner.infos, sink, "env.infos", "infos")
        if last_infos:
            infos = {**infos, **last_infos}
        return self._take_masks(slot, self._infos_by_agent(infos, sink) if any(infos.values()) else None)


_SAID = ("agents", "agent_selection", "rewards", "terminations", "truncations", "infos")
_HAND_ON = ("BaseWrapper.__getattr__", "OrderEnforcingWrapper.__getattr__")


def state_owner(env: Any) -> Any:
    """Return the innermost PettingZoo env whose attributes ``env`` forwards; valid after a reset.

    PettingZoo's wrappers forward attributes to one another, which takes 1 µs each, and a move reads ten. Only
    PettingZoo's own wrappers are skipped, and only if they have none of these attributes: a user's wrapper counts.
    """
    while _hands_on(env):
        env = env.env
    return env


def _hands_on(env: Any) -> bool:
    kind: Any = type(env)
    return (
        kind.__module__.startswith("pettingzoo.utils.wrappers.")
        and getattr(getattr(kind, "__getattr__", None), "__qualname__", "") in _HAND_ON
        and "env" in vars(env)
        and not any(hasattr(kind, name) or name in vars(env) for name in _SAID)
    )


def no_reward_of(agent: AgentId, reward: float, sink: Sink) -> None:
    """Report a reward of an agent that has ended."""
    change = "set no reward of an agent that has left env.agents"
    sink.report("life", f"reward of agent {agent!r}", "none, for it has ended", f"{reward!r}", change)


def refuse_dones(sink: Sink) -> NoReturn:
    """Refuse an env with the flags of PettingZoo's old API."""
    got = "none, and env.dones: PettingZoo's old API"
    change = "set self.terminations and self.truncations in place of self.dones; last() returns 5 values"
    sink.fault("results", "env.terminations", "a dict of flags by agent", got, change)
