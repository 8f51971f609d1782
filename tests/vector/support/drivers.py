"""Plain loops over single envs, one per kind of API, by hand: dicts in, dicts out, nothing of marlvec's vectorizers.

Agents are places on the agent axis. What is handed out is copied: some envs reuse their buffers.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
import numpy as np
import pettingzoo

from tests.vector.support.incomplete_env import IncompleteEnv
from tests.vector.support.joint_env import JointEnv

__all__ = ["Driver", "News", "SingleDriver", "cut_short", "driver_of"]

COMMON = "__common__"


@dataclass
class News:
    """What one reset or step of one env brought.

    Attributes:
        obs: Who was observed, without masks.
        masks: Masks of those who act next.
        rewards: What each was paid.
        ended: Who ended: terminated, truncated.
        alive, acting: Who is in the episode now, and who must act next.
        infos: Agent name to its info, where it is not empty, and ``"__common__"``.
    """

    obs: dict[int, Any]
    alive: set[int]
    acting: set[int]
    masks: dict[int, Any] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    ended: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)


class Driver(Protocol):
    env: Any
    names: list[str]

    def reset(self, seed: int | None, options: Any) -> News: ...

    def step(self, actions: dict[int, Any]) -> News: ...


def split(obs: Any) -> tuple[Any, Any]:
    """A copied observation and its mask."""
    obs = deepcopy(obs)
    if not isinstance(obs, dict) or "action_mask" not in obs:
        return obs, None
    mask = obs.pop("action_mask").astype(bool)
    return obs["observation"] if obs.keys() == {"observation"} else obs, mask


def split_all(found: dict[int, Any], acting: set[int]) -> tuple[dict[int, Any], dict[int, Any]]:
    pairs = {a: split(obs) for a, obs in found.items()}
    return {a: obs for a, (obs, _) in pairs.items()}, {a: m for a, (_, m) in pairs.items() if a in acting}


def told(infos: dict[Any, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Infos that are not empty; what is no agent's stands under ``"__common__"``."""
    out: dict[str, dict[str, Any]] = {str(who): deepcopy(info) for who, info in infos.items() if who in names and info}
    rest = {who: deepcopy(info) for who, info in infos.items() if who not in names and info}
    common = {**rest.pop(COMMON, {}), **rest}
    return {**out, COMMON: common} if common else out


class ParallelDriver:
    def __init__(self, env: Any) -> None:
        self.env, self.names = env, list(env.possible_agents)

    def reset(self, seed: int | None, options: Any) -> News:
        obs, infos = self.env.reset(seed=seed, options=options)
        here = {self.names.index(name) for name in self.env.agents}
        seen, masks = split_all({self.names.index(name): value for name, value in obs.items()}, here)
        return News(seen, here, here, masks, infos=told(infos, self.names))

    def step(self, actions: dict[int, Any]) -> News:
        place = self.names.index
        obs, rewards, term, trunc, infos = self.env.step({self.names[a]: action for a, action in actions.items()})
        here = {place(name) for name in self.env.agents}
        seen, masks = split_all({place(name): value for name, value in obs.items()}, here)
        ended = {place(name): (bool(term[name]), bool(trunc[name])) for name in obs if term[name] or trunc[name]}
        paid = {place(name): float(reward) for name, reward in rewards.items()}
        return News(seen, here, here, masks, paid, ended, told(infos, self.names))


class LenientDriver:
    """A Parallel env that leaves things out: who leaves without a flag is truncated, with what there is of it."""

    def __init__(self, env: Any) -> None:
        self.env = env
        if not hasattr(env, "possible_agents"):
            env.reset()
        self.names = list(getattr(env, "possible_agents", env.agents))
        self.plain = ParallelDriver.__new__(ParallelDriver)
        self.plain.env, self.plain.names = env, self.names
        self.alive: set[int] = set()

    def reset(self, seed: int | None, options: Any) -> News:
        news = self.plain.reset(seed, options)
        self.alive = set(news.alive)
        return news

    def step(self, actions: dict[int, Any]) -> News:
        obs, rewards, term, trunc, infos = self.env.step({self.names[a]: action for a, action in actions.items()})
        here = {self.names.index(name) for name in self.env.agents}
        seen, masks = split_all({self.names.index(name): value for name, value in obs.items()}, here)
        flags = {a: (term.get(name, False), trunc.get(name, False)) for a, name in enumerate(self.names)}
        ended = {a: pair for a, pair in flags.items() if any(pair)}
        ended |= dict.fromkeys(self.alive - here - set(ended), (False, True))
        self.alive = here
        paid = {self.names.index(name): float(reward) for name, reward in rewards.items()}
        return News(seen, set(here), set(here), masks, paid, ended, told(infos, self.names))


class KeyedDriver:
    """RLlib style: who is observed acts next."""

    def __init__(self, env: Any) -> None:
        self.env, self.names = env, [str(agent) for agent in env.possible_agents]
        self.alive: set[int] = set()

    def reset(self, seed: int | None, options: Any) -> News:
        obs, infos = self.env.reset(seed=seed, options=options)
        self.alive = {self.names.index(str(agent)) for agent in obs}
        seen, masks = split_all({self.names.index(str(agent)): value for agent, value in obs.items()}, self.alive)
        return News(seen, set(self.alive), set(self.alive), masks, infos=told(self._named(infos), self.names))

    def step(self, actions: dict[int, Any]) -> News:
        ids = self.env.possible_agents
        obs, rewards, term, trunc, infos = self.env.step({ids[a]: action for a, action in actions.items()})
        ended = {ids.index(g): (bool(term[g]), bool(trunc[g])) for g in ids if term.get(g) or trunc.get(g)}
        observed = {ids.index(agent): value for agent, value in obs.items()}
        self.alive = (self.alive | set(observed)) - set(ended)
        seen, masks = split_all(observed, acting := set(observed) & self.alive)
        paid = {ids.index(agent): float(reward) for agent, reward in rewards.items()}
        return News(seen, set(self.alive), acting, masks, paid, ended, told(self._named(infos), self.names))

    def _named(self, infos: dict[Any, Any]) -> dict[str, Any]:
        return {str(agent): info for agent, info in infos.items()}


class TurnDriver:
    """PettingZoo AEC: whoever is selected observes, as ``last()`` has it; the dead go at once."""

    def __init__(self, env: Any) -> None:
        self.env, self.names = env, list(env.possible_agents)
        self.alive: set[int] = set()
        self.had_turn: set[int] = set()

    def reset(self, seed: int | None, options: Any) -> News:
        env, place = self.env, self.names.index
        env.reset(seed=seed, options=options)
        self.alive = {place(name) for name in env.agents}
        acting = {place(env.agent_selection)}
        self.had_turn = set(acting)
        seen, masks = split_all({a: env.observe(self.names[a]) for a in acting}, acting)
        return News(seen, set(self.alive), acting, masks, infos=told(env.infos, self.names))

    def step(self, actions: dict[int, Any]) -> News:
        env, place = self.env, self.names.index
        assert list(actions) == [place(env.agent_selection)]
        paid, ended, gone_infos, found = dict.fromkeys(range(len(self.names)), 0.0), {}, {}, {}
        env.step(next(iter(actions.values())))
        acting: set[int] = set()
        while True:
            for name, reward in env.rewards.items():
                paid[place(name)] += float(reward)
            self.alive |= {place(name) for name in env.agents} - set(ended)
            if not env.agents:
                break
            name = env.agent_selection
            a = place(name)
            found[a] = split(env.observe(name))
            self.had_turn.add(a)
            if not (env.terminations[name] or env.truncations[name]):
                acting = {a}
                break
            ended[a] = bool(env.terminations[name]), bool(env.truncations[name])
            gone_infos[name] = deepcopy(env.infos.get(name, {}))
            self.alive.discard(a)
            env.step(None)
        masks = {a: found[a][1] for a in acting}
        infos = told({**env.infos, **gone_infos}, self.names)
        return News({a: o for a, (o, _) in found.items()}, set(self.alive), acting, masks, paid, ended, infos)


class SingleDriver:
    def __init__(self, env: Any) -> None:
        self.env, self.names = env, ["agent_0"]

    def reset(self, seed: int | None, options: Any) -> News:
        obs, info = self.env.reset(seed=seed, options=options)
        seen, masks = split_all({0: obs}, {0})
        return News(seen, {0}, {0}, masks, infos={COMMON: deepcopy(info)} if info else {})

    def step(self, actions: dict[int, Any]) -> News:
        obs, reward, term, trunc, info = self.env.step(actions[0])
        here = set() if term or trunc else {0}
        seen, masks = split_all({0: obs}, here)
        ended = {} if here else {0: (bool(term), bool(trunc))}
        return News(seen, here, here, masks, {0: float(reward)}, ended, {COMMON: deepcopy(info)} if info else {})


class JointDriver:
    """A Gymnasium env of several agents: values are one for all, or one for each."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.keys = list(env.observation_space.spaces) if env.keys is not None else list(range(env.world.agent_num))
        self.names = [str(key) if env.keys is not None else f"agent_{key}" for key in self.keys]
        self.alive: set[int] = set()

    def reset(self, seed: int | None, options: Any) -> News:
        result = self.env.reset(seed=seed, options=options)
        obs, info = (result, {}) if self.env._old_api else result
        self.alive = set(range(len(self.names)))
        return self._news(obs, info, set(self.alive))

    def step(self, actions: dict[int, Any]) -> News:
        joint: Any = [actions.get(a, 0) for a in range(len(self.names))]
        result = self.env.step(joint if self.env.keys is None else dict(zip(self.keys, joint, strict=True)))
        before = set(self.alive)
        if len(result) == 5:
            obs, rewards, term, trunc, info = result
        else:
            obs, rewards, done, info = result
            late = "TimeLimit.truncated" in info
            term, trunc = (False, done) if late else (done, False)
        flags = list(zip(map(bool, self._each(term)), map(bool, self._each(trunc)), strict=True))
        ended = {a: flags[a] for a in before if any(flags[a])}
        self.alive -= set(ended)
        news = self._news(obs, info, before)
        news.rewards = {a: float(reward) for a, reward in enumerate(self._each(rewards)) if a in before}
        news.ended = ended
        return news

    def _news(self, obs: Any, info: Any, observed: set[int]) -> News:
        seen, masks = split_all({a: self._each(obs)[a] for a in observed}, self.alive)
        return News(seen, set(self.alive), set(self.alive), masks, infos=self._infos(info))

    def _infos(self, info: Any) -> dict[str, dict[str, Any]]:
        if self.env._forms["infos"] == "each":
            return told(dict(zip(self.names, self._each(info), strict=True)), self.names)
        common = deepcopy(info)
        masks = common.pop(self.env._masks, None)
        dealt = {} if masks is None else {n: {"action_mask": m} for n, m in zip(self.names, masks, strict=True)}
        return {**dealt, COMMON: common} if common else dealt

    def _each(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value[key] for key in self.keys]
        return list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * len(self.names)


def cut_short(driver: Driver, alive: set[int]) -> tuple[dict[int, Any], dict[int, tuple[bool, bool]]]:
    """Time is up for these agents: what they observe anew, and their flags. In a game, who had a turn looks again."""
    if not isinstance(driver, TurnDriver):
        return {}, dict.fromkeys(alive, (False, True))
    env, names = driver.env, driver.names
    flags = {a: (bool(env.terminations[names[a]]), bool(env.truncations[names[a]])) for a in alive}
    return (
        {a: split(env.observe(names[a]))[0] for a in alive & driver.had_turn},
        {a: own if any(own) else (False, True) for a, own in flags.items()},
    )


def driver_of(env: Any) -> Driver:
    """The loop for this env."""
    if isinstance(env, IncompleteEnv):
        return LenientDriver(env)
    if isinstance(env, pettingzoo.ParallelEnv):
        return ParallelDriver(env)
    if isinstance(env, pettingzoo.AECEnv):
        return TurnDriver(env)
    if isinstance(env, JointEnv):
        return JointDriver(env)
    return SingleDriver(env) if isinstance(env, gymnasium.Env) else KeyedDriver(env)


def spaces_of(driver: Driver) -> list[tuple[Any, Any, int | None]]:
    """Per agent: observation space without mask, action space, length of the mask or None."""
    env, out = driver.env, []
    for name in driver.names:
        if isinstance(driver, (ParallelDriver, LenientDriver, TurnDriver)):
            space, action = env.observation_space(name), env.action_space(name)
        elif isinstance(driver, JointDriver):
            key = driver.keys[driver.names.index(name)]
            space, action = env.observation_space[key], env.action_space[key]
        elif isinstance(driver, SingleDriver):
            space, action = env.observation_space, env.action_space
        else:
            agent = env.possible_agents[driver.names.index(name)]
            space, action = env.observation_spaces[agent], env.action_spaces[agent]
        out.append((*without_mask(space), action))
    return [(space, action, size) for space, size, action in out]


def without_mask(space: Any) -> tuple[Any, int | None]:
    """An observation space without its mask, and the mask's length."""
    if not isinstance(space, gymnasium.spaces.Dict) or "action_mask" not in space.spaces:
        return space, None
    size = int(np.prod(space["action_mask"].shape))
    if set(space.spaces) == {"observation", "action_mask"}:
        return space["observation"], size
    return gymnasium.spaces.Dict({key: sub for key, sub in space.spaces.items() if key != "action_mask"}), size
