"""`GymnasiumAdapter`: Gymnasium envs with one agent; `JointAdapter`: with several, in a Tuple or a Dict by agent.

`MarlenvAdapter`: envs of the package marlenv (``multi-agent-rlenv``), whose steps are joint, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NoReturn, TypeGuard

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple

from marlvec.envs.adapters.base import (
    ENDED,
    LIVE,
    OBSERVATION_KEYS,
    VECTOR_HINT,
    Adapter,
    AgentId,
    Sink,
    common_info,
    five_values,
    infos_in,
    only_element,
    refuse_unknown,
    remark_old_reset,
)
from marlvec.envs.env import Slot
from marlvec.envs.spec import COMMON, Info
from marlvec.envs.user_env import wrapper_chain
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import read_mask
from marlvec.spaces.equality import short

AGENT = "agent_0"
"""Name of the only agent of a Gymnasium env."""


class GymnasiumAdapter(Adapter):
    """A Gymnasium env as a multi-agent env with the single agent ``"agent_0"``.

    Its infos belong to the env, so they are under `COMMON`. Old envs are supported, too: ``step`` may return 4 values
    (done means terminated, unless ``info["TimeLimit.truncated"]`` is True), and ``reset`` the observation alone.
    """

    _declaration = "{}_space"

    def __init__(self, env: Any) -> None:
        spaces = [getattr(env, kind, None) for kind in ("observation_space", "action_space")]
        super().__init__(env, (AGENT,), spaces[:1], spaces[1:])
        space = self.env.observation_space
        joint = joint_keys(space, self.env.action_space)
        form = "tuple" if isinstance(space, Tuple) else "dict"
        self._agent_num = len(joint or ())  # if it is an env of several agents
        self._flags_hint = (
            f"if it is one per agent, as the spaces seem to be: make(…, agents={form!r}), or marlvec.envs.adapt(env, "
            f"agents={form!r}); an env whose self.n_agents is their number is taken for one of several"
            if joint
            else ""
        )
        self._vector_hint = "; ".join(filter(None, (self._flags_hint, VECTOR_HINT)))
        self._info_keys = (COMMON,)
        self._pair = pair_tree(space)
        self._slot: Slot | None = None  # the slot that `_read_actions` reads
        self._read_actions: Callable[[], list[Any]] = list

    def close(self) -> None:
        """Close the env and drop references to the buffers."""
        self._slot, self._read_actions = None, list
        super().close()

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        if slot is not self._slot:
            self._bind(slot)
        obs, info = split_reset(self.call_reset(seed, options), self._pair, _is_one_info, self.at_reset)
        self._join(slot, 0, obs)
        return self._take_masks(slot, common_info(infos_in(info, self.at_reset, "info"), self.at_reset))

    def _check_spaces(self) -> None:
        (_, _, space), (_, _, action_space) = self._declared
        try:
            same = self.env.observation_space is space and self.env.action_space is action_space
        except Exception:  # the other space can still be checked
            same = False
        if not same:
            super()._check_spaces()

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return self.env.observation_space if kind == "observation" else self.env.action_space

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space"

    def step(self, slot: Slot) -> Info | None:
        if slot is not self._slot:
            self._bind(slot)
        return self.read_step(slot, self.env.step(self._read_actions()[0]))

    def read_step(self, slot: Slot, result: Any) -> Info | None:
        """Check the result of the env's ``step``, and write it into the slot; return infos, or None if empty."""
        obs, reward, terminated, truncated, info = five_values(result, self.at_step)
        ended = (
            terminated
            if terminated.__class__ is bool
            else self._flag(terminated, AGENT, "termination", self._flags_hint)
        )
        cut = truncated if truncated.__class__ is bool else self._flag(truncated, AGENT, "truncation", self._flags_hint)
        slot.reward[0] = (
            reward if reward.__class__ in self.plain_rewards else self._reward(reward, AGENT, self._vector_hint)
        )
        over = ended or cut
        new_infos = None
        if info.__class__ is not dict or info:
            new_infos = common_info(infos_in(info, self.at_step, "info"), self.at_step)
        if over:
            slot.terminated[0] = ended
            slot.truncated[0] = cut
            if self.resets_itself:
                new_infos, over = self._end_and_begin(slot, new_infos), False
            else:
                slot.done = True
            slot.alive[0] = slot.acting[0] = not over
        self._observe(slot, 0, obs, not over)
        return self._take_masks(slot, new_infos)

    def _reward(self, value: Any, agent: AgentId, vector_hint: str = "") -> float:
        if self._agent_num and self.reward_weights is None and _is_list(value) and len(value) == self._agent_num:
            expected = "a real number, as of an env of one agent"
            self.at_step.fault("form", "the reward", expected, short(value), vector_hint)
        return super()._reward(value, agent, vector_hint)

    def _bind(self, slot: Slot) -> None:
        self._slot = slot
        self._read_actions = slot.fast_actions or slot.read_actions


def _is_one_info(value: Any) -> bool:
    # The first test is faster, and nearly always enough. None is no observation, but an info that is refused.
    return value.__class__ is dict or value is None or isinstance(value, Mapping)


def joint_space(space: Any) -> Any:
    """Return a plain dict of spaces by agent, as some envs declare, as a Dict; other spaces unchanged."""
    is_table = isinstance(space, dict) and space and all(isinstance(part, Space) for part in space.values())
    return Dict(space) if is_table else space


def joint_keys(observation: Any, action: Any) -> list[Any] | None:
    """Return the keys of the agents in joint spaces; None if the two are not joint, or their agents differ."""
    if isinstance(observation, Tuple) and isinstance(action, Tuple):
        size = len(observation.spaces)
        return list(range(size)) if 0 < size == len(action.spaces) else None
    if isinstance(observation, Dict) and isinstance(action, Dict):
        keys = list(observation.spaces)
        return keys if keys and action.spaces.keys() == observation.spaces.keys() else None
    return None


def pair_tree(space: Any) -> SpaceTree | None:
    """Return the structure of a space whose values ``(first, {…})`` look like an observation and its info, or None."""
    is_pair = isinstance(space, Tuple) and len(space.spaces) == 2 and isinstance(space.spaces[1], Dict)
    return SpaceTree(space) if is_pair else None


def split_reset(result: Any, pair: SpaceTree | None, is_info: Callable[[Any], bool], sink: Sink) -> tuple[Any, Any]:
    """Split the result of a reset into observation and info; old envs return the observation alone.

    `pair` is the `pair_tree` of the observation space; `is_info` returns whether an object can be an info.
    """
    if isinstance(result, tuple) and len(result) == 2 and is_info(result[1]):
        if pair is None:
            return result
        try:
            pair.flatten(result[0])  # checks dicts and tuples only, not values
        except ContractError:
            pass
        else:
            return result
    remark_old_reset(result, sink)
    return result, {}


AGENTS = ("auto", "tuple", "dict", "single")
"""Values of ``agents`` in `marlvec.make`."""

_COUNTS = ("n_agents", "num_agents")
_TEAM_HINT = "return one number for the team, or one for each agent"
MASKS = ("action_mask", "avail_actions")  # the second is SMAC's name
"""Keys of the common info that may have a mask for each agent."""


class JointAdapter(Adapter):
    """A Gymnasium env whose observation and action are joint: one entry per agent, in a Tuple or a Dict.

    Agents of a Tuple are named ``"agent_0"``, ``"agent_1"``, …, agents of a Dict by their keys. All agents act in every
    step. Each result of `step` may be one value for all agents, or one for each:

    * rewards: one number is the team's reward, which each alive agent gets; or one number for each agent.
    * flags: one flag ends every agent; or one flag for each agent, and the episode is over when all have ended. For an
      agent that has ended, the env gets an action of zeros (or, if its space has no zeros, a fixed action).
    * infos: one dict, in which ``"action_mask"`` or ``"avail_actions"`` may have a mask for each agent; or one dict
      for each agent.

    Old envs are supported, too: ``step`` may return 4 values (done means terminated, unless
    ``info["TimeLimit.truncated"]`` is True), and ``reset`` the observations alone.
    """

    def __init__(self, env: Any) -> None:
        joint = joint_space(env.observation_space), joint_space(env.action_space)
        self.is_dict = isinstance(joint[0], Dict)  # the spaces are Dicts
        self.keys: list[Any] = joint_keys(*joint) or []  # the agents' keys in the Dicts, or indices in the Tuples
        ids = self.keys if self.is_dict else [f"agent_{key}" for key in self.keys]
        super().__init__(env, ids, *([space.spaces[key] for key in self.keys] for space in joint))
        self._idle_actions: dict[int, Any] = {}
        self._pair = pair_tree(joint[0])

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        obs, info = split_reset(self.call_reset(seed, options), self._pair, _is_info, self.at_reset)
        self._begin(slot, obs, self.at_reset)
        return self._take_masks(slot, self._by_agent(slot, info, self.at_reset))

    def _begin(self, slot: Slot, obs: Any, sink: Sink) -> None:
        entries = self._observations(obs, sink, everyone=True)
        for a in range(len(self.ids)):
            self._join(slot, a, entries[a])

    def step(self, slot: Slot) -> Info | None:
        actions, live = slot.read_actions(), []
        for a, status in enumerate(self._status):
            if status == LIVE:
                live.append(a)
            else:
                actions[a] = self.idle_action(a)
        result = self.env.step(self.join(actions))
        obs, rewards, terminated, truncated, info = five_values(result, self.at_step)
        self._write_rewards(slot, rewards)
        if terminated is not False or truncated is not False:
            self._write_flags(slot, terminated, truncated)
        new_infos = self._by_agent(slot, info, self.at_step)
        if self.resets_itself and all(slot.terminated[a] or slot.truncated[a] for a in live):
            new_infos = self._end_and_begin(slot, new_infos)
            self._begin(slot, obs, self.at_step)
            return self._take_masks(slot, new_infos)
        entries = self._observations(obs, self.at_step, everyone=False)
        for a in live:
            stays = not (slot.terminated[a] or slot.truncated[a])
            self._observe(slot, a, entries[a], stays)
            if not stays:
                slot.alive[a] = slot.acting[a] = False
                self._status[a] = ENDED
        slot.done = LIVE not in self._status
        return self._take_masks(slot, new_infos)

    def space_of(self, kind: str, agent: AgentId) -> Any:
        joint = self.env.observation_space if kind == "observation" else self.env.action_space
        return joint_space(joint).spaces[self.keys[self._index[agent]]]

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space[{self.keys[self._index[agent]]!r}]"

    def join(self, actions: Sequence[Any]) -> tuple[Any, ...] | dict[Any, Any]:
        """Join one action per agent to an action of the env. It is a tuple, not a list: some envs require that."""
        return dict(zip(self.keys, actions, strict=True)) if self.is_dict else tuple(actions)

    def idle_action(self, a: int) -> Any:
        """Return the action for an agent that has ended: the env requires actions of all agents."""
        if a not in self._idle_actions:
            space = self.action_spaces[a]
            tree = SpaceTree(space)
            action = tree.unflatten([0 if isinstance(leaf.space, Discrete) else leaf.blank() for leaf in tree.leaves])
            try:
                has_zeros = space.contains(action)
            except Exception:  # contains() of a user's space may raise
                has_zeros = False
            if not has_zeros:
                twin = deepcopy(space)
                twin.seed(0)
                action = twin.sample()
            self._idle_actions[a] = action
        return deepcopy(self._idle_actions[a])

    def _write_rewards(self, slot: Slot, rewards: Any) -> None:
        # With weights a flat list is the team's reward, a number for each objective.
        is_team = self.reward_weights is not None and not isinstance(rewards, Mapping) and np.ndim(rewards) == 1
        entries = None if is_team else self._entries(rewards, "rewards", self.at_step)
        for a, agent in enumerate(self.ids):
            value = rewards if entries is None else entries[a]
            if self._status[a] == LIVE:
                is_plain = value.__class__ in self.plain_rewards
                slot.reward[a] = value if is_plain else self._reward(value, agent, _TEAM_HINT)
            elif entries is not None and value is not None and self._reward(value, agent) != 0.0:
                change = "give 0 as the reward of an agent that has ended"
                self.at_step.report("life", f"reward of agent {agent!r}", "0, for it has ended", f"{value!r}", change)

    def _write_flags(self, slot: Slot, terminated: Any, truncated: Any) -> None:
        ended, cut = (
            (value, self._entries(value, f"{what}s", self.at_step), what)
            for value, what in ((terminated, "termination"), (truncated, "truncation"))
        )
        for a, agent in enumerate(self.ids):
            if self._status[a] == LIVE:
                slot.terminated[a], slot.truncated[a] = (
                    self._flag(value if entries is None else entries[a], agent, what)
                    for value, entries, what in (ended, cut)
                )

    def _observations(self, obs: Any, sink: Sink, *, everyone: bool) -> Sequence[Any]:
        entries = self._entries(obs, "observations", sink, everyone=everyone)
        if entries is None:
            self._refuse_entries("observations", type(obs).__name__, sink)
        return entries

    def _entries(self, value: Any, what: str, sink: Sink, *, everyone: bool = False) -> Sequence[Any] | None:
        """Return one entry per agent, in order of the agent axis; None if ``value`` is one value for all.

        In a dict, entries of agents that have ended may be missing; they are None.
        """
        if isinstance(value, Mapping):
            refuse_unknown(value, self._index, sink, what)
            needed = [agent for a, agent in enumerate(self.ids) if everyone or self._status[a] == LIVE]
            if missing := [agent for agent in needed if agent not in value]:
                sink.fault("keys", what, "one for each agent", f"none for {missing}", kind=what)
            return [value.get(agent) for agent in self.ids]
        if not _is_list(value):
            return None
        if self.is_lenient and len(value) == 1 < len(self.ids) and only_element(value) is not None:
            return None
        if len(value) != len(self.ids):
            self._refuse_entries(what, str(len(value)), sink)
        return value

    def _refuse_entries(self, what: str, got: str, sink: Sink) -> NoReturn:
        change = f"return a tuple with one for each agent as {what}"
        if what == "rewards":
            change = f"return one number for the team, or one for each agent; {VECTOR_HINT}"
        sink.fault("results", what, f"one for each agent, {len(self.ids)} in all", got, change, kind=what)

    def _by_agent(self, slot: Slot, info: Any, sink: Sink) -> Info | None:
        if isinstance(info, (list, tuple)):
            entries = self._entries(info, "infos", sink)
            info = dict(zip(self.ids, entries or (), strict=True))
        elif not self.is_dict or not isinstance(info, Mapping):
            new_infos = common_info(info, sink)
            if new_infos is not None:
                self._deal_out(slot, new_infos, sink)
            return new_infos
        return self._infos_by_agent(info, sink)

    def _deal_out(self, slot: Slot, new_infos: Info, sink: Sink) -> None:
        """Move each agent's mask and final observation from the common info to the agent's own info."""
        shared = new_infos[COMMON]
        # Beside masks in the observations, or Boxes, these are entries like others.
        takes_masks = None in self.mask_sizes and not all(isinstance(space, Box) for space in self.action_spaces)
        have_masks = any(row is not None for row in slot.action_mask)
        for key in MASKS if takes_masks else ():
            if shared.get(key) is not None or (have_masks and key in shared):
                masks = self._masks(slot, key, shared.pop(key), sink)
                for agent, mask in zip(self.agents, masks, strict=True):
                    if mask is not None:
                        new_infos.setdefault(agent, {})["action_mask"] = mask
        for key in OBSERVATION_KEYS if self.resets_itself else ():
            if _is_list(shared.get(key)) and len(shared[key]) == len(self.ids):
                for agent, obs in zip(self.agents, shared.pop(key), strict=True):
                    new_infos.setdefault(agent, {})[key] = obs
        if not shared:
            del new_infos[COMMON]

    def _masks(self, slot: Slot, key: str, value: Any, sink: Sink) -> list[Any]:
        """Return one mask per agent. A mask longer than the agent's number of actions must be False beyond it.

        Entries of agents whose action spaces cannot have a mask are returned as they are.
        """
        if not _is_list(value) or len(value) != len(self.ids):
            got = f"{len(value)}" if _is_list(value) else f"{type(value).__name__} {short(value)}"
            change = f"put a list with one mask for each agent under {key!r}"
            expected = f"one for each agent, {len(self.ids)} in all"
            sink.fault("masks", f"{key!r} of the info", expected, got, change, kind="values")
        found = []
        for a, one in enumerate(value):
            row = slot.action_mask[a]
            if row is not None:
                try:
                    mask = read_mask(one)
                except ContractError as error:
                    expected, _, got = str(error).removeprefix("expected ").partition(", got ")
                    subject = f"{key!r}: action mask of agent {self.agents[a]!r}"
                    sink.report("masks", subject, expected, got, kind="values")
                    one = None
                else:
                    one = mask[: len(row)] if len(mask) > len(row) and not mask[len(row) :].any() else mask
            found.append(one)
        return found


class MarlenvAdapter(Adapter):
    """An env of marlenv (PyPI: ``multi-agent-rlenv``): arrays of all agents, and one reward for the team.

    Agents are ``"agent_0"``, ``"agent_1"``, …; all act in every step, and end together by ``done`` or ``truncated``. An
    observation is marlenv's ``data``, or, if the env has extras, a dict of ``data`` and ``extras``; available actions
    are the action mask. Every agent gets the team's reward; of several objectives `reward_weights` make one.
    """

    def __init__(self, env: Any) -> None:
        num, (sizes, bounds) = env.n_agents, _marlenv_actions(env)
        seen: Any = Box(-np.inf, np.inf, tuple(env.observation_shape), np.float32)
        if env.extras_size:
            seen = Dict(data=seen, extras=Box(-np.inf, np.inf, tuple(env.extras_shape), np.float32))
        self._has_extras = bool(env.extras_size)
        masks = [Box(0, 1, (size,), np.int8) for size in sizes]
        parts = dict(seen.spaces) if self._has_extras else {"observation": seen}
        observations: list[Any] = [Dict({**parts, "action_mask": mask}) for mask in masks] or [seen] * num
        super().__init__(env, [f"agent_{a}" for a in range(num)], observations, [Discrete(n) for n in sizes] or bounds)
        if not env.state_extras_size:
            self.state_space = Box(-np.inf, np.inf, tuple(env.state_shape), np.float32)
        declared = {"observation": observations, "action": self.action_spaces}
        self._spaces = {kind: dict(zip(self.ids, spaces, strict=True)) for kind, spaces in declared.items()}

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        result = self.call_reset(seed, options)
        obs = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        for a, entry in enumerate(self._each(obs, self.at_reset)):
            self._join(slot, a, entry)
        return None

    def step(self, slot: Slot) -> Info | None:
        result, sink = tuple(self.env.step(np.asarray(slot.read_actions()))), self.at_step
        if len(result) != 6:
            sink.fault("results", "the result", "marlenv's Step, of 6 values", f"{len(result)}")
        obs, _, reward, done, truncated, info = result
        if self.reward_weights is None:  # an array of one number is marlenv's usual form
            one = only_element(reward)
            reward = reward if one is None else float(one)
        for a, entry in enumerate(self._each(obs, sink)):
            agent = self.ids[a]
            flags = self._flag(done, agent, "termination"), self._flag(truncated, agent, "truncation")
            self._record(slot, a, entry, self._reward(reward, agent, VECTOR_HINT), *flags)
        slot.done = LIVE not in self._status
        return common_info(info, sink)

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self.env.get_state().data)

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return self._spaces[kind][agent]

    def _each(self, obs: Any, sink: Sink) -> list[Any]:
        """Return one entry per agent, as its space has it."""
        num = len(self.ids)
        try:
            entries: list[dict[str, Any]] = [{"observation": obs.data[a]} for a in range(num)]
            if self._has_extras:
                entries = [{"data": obs.data[a], "extras": obs.extras[a]} for a in range(num)]
            if None in self.mask_sizes:  # continuous actions
                return entries if self._has_extras else [entry["observation"] for entry in entries]
            masks = np.asarray(obs.available_actions, np.int8)
            return [{**entry, "action_mask": masks[a]} for a, entry in enumerate(entries)]
        except (AttributeError, IndexError, TypeError, ValueError):
            sink.fault("results", "the observation", f"marlenv's Observation of {num} agents", type(obs).__name__)


def _marlenv_actions(env: Any) -> tuple[list[int], list[Box]]:
    """Return each agent's number of actions, or else its Box of continuous ones."""
    space = env.action_space
    if space.is_discrete:
        parts = getattr(space, "spaces", None)
        return [int(part.size) for part in parts] if parts else [int(space.size)] * env.n_agents, []
    return [], [Box(low, high, low.shape, np.float32) for low, high in zip(space.low, space.high, strict=True)]


def is_marlenv(env: Any) -> bool:
    """Return whether an env derives from marlenv's base class; does not import marlenv."""
    return any(kind.__name__ == "MARLEnv" and kind.__module__.startswith("marlenv.") for kind in type(env).__mro__)


def has_joint_spaces(env: Any, agents: str = "auto") -> bool:
    """Return whether a Gymnasium env has several agents.

    It has if its observation and action spaces are Tuples of equal length, or Dicts with equal keys, and either its
    ``n_agents`` or ``num_agents`` is that number, or the keys are ints; or if both are plain dicts of spaces; with
    ``agents`` not ``"auto"``, if that says so.
    """
    if agents == "single":
        return False
    declared = [getattr(env, name, None) for name in ("observation_space", "action_space")]
    observation, action = map(joint_space, declared)
    keys = joint_keys(observation, action)
    if agents != "auto":
        wanted = Tuple if agents == "tuple" else Dict
        if keys is None or not isinstance(observation, wanted):
            expected = "Tuples of one length" if agents == "tuple" else "Dicts of the same keys"
            raise ArgumentError(
                f"agents={agents!r}: expected observation and action spaces that are {expected}, got {observation} and "
                f"{action}"
            )
        return True
    if keys is None:
        return False
    if all(isinstance(space, dict) for space in declared):
        return True
    if isinstance(observation, Dict) and all(isinstance(key, (int, np.integer)) for key in keys):
        return True
    counts = (getattr(layer, name, None) for layer in wrapper_chain(env) for name in _COUNTS)
    return any(isinstance(number, (int, np.integer)) and number == len(keys) for number in counts)


def _is_info(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_info, value))
    return value is None or isinstance(value, Mapping)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value has entries: a list, a tuple, or an array that is not a single number."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)
