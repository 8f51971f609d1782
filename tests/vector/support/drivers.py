"""Plain loops over single envs, one per kind of API, by hand: dicts in, dicts out, nothing of marlvec's vectorizers.

Agents are places on the agent axis. What is handed out is copied: some envs reuse their buffers. Before them stand the
envs of two APIs that nothing else has: Parallel envs that leave things out, and Gymnasium envs of several agents.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
import numpy as np
import pettingzoo
from gymnasium.spaces import Box, Dict, Space, Tuple
from pettingzoo import ParallelEnv

from marlvec.testing import Script, ScriptedParallelEnv
from marlvec.testing.scripted.script import ScriptedState


class LivesEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A Parallel env whose agents come and go by a table; subclasses say in `look` what they are shown.

    Args:
        lives: First and last step of each agent.
        observation_space: One for all, or a dict by agent.
        action_space: Likewise.
        end: How agents end.
    """

    metadata: dict[str, Any] = {"name": "lives", "render_modes": []}
    render_mode = None
    reward = 0.0

    def __init__(
        self, lives: dict[str, tuple[int, int]], observation_space: Any, action_space: Any, end: str = "terminated"
    ) -> None:
        self.lives, self.spaces, self.end = lives, (observation_space, action_space), end
        self.possible_agents = list(lives)
        self.agents: list[str] = []
        self.t = 0

    def observation_space(self, agent: str) -> Space[Any]:
        space = self.spaces[0]
        return space[agent] if type(space) is dict else space

    def action_space(self, agent: str) -> Space[Any]:
        space = self.spaces[1]
        return space[agent] if type(space) is dict else space

    def look(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Observations and infos of these agents, at ``self.t``."""
        raise NotImplementedError

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t = 0
        self.agents = [agent for agent, (born, _) in self.lives.items() if born == 0]
        return self.look(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        assert actions.keys() == set(self.agents)
        self.t += 1
        here = [agent for agent, (born, _) in self.lives.items() if agent in self.agents or born == self.t]
        self.agents = [agent for agent in here if self.lives[agent][1] > self.t]
        obs, infos = self.look(here)
        ended, never = {agent: agent not in self.agents for agent in here}, dict.fromkeys(here, False)
        flags = (ended, never) if self.end == "terminated" else (never, ended)
        return obs, dict.fromkeys(here, self.reward), *flags, infos


SCRIPTS = [
    Script([0, 0, 0], [3, 5, 4], ["truncated", "truncated", "terminated"], {(3, 0): {"last": 3}, (2, 1): {"t": 2}}),
    Script([0, 2, None], [4, 3, 1], ["truncated", "truncated", "both"], {(0, 0): {"t": 0}}, {2: {"clock": 2}}),
    Script([0, 0, 1], [2, 2, 2], ["truncated", "truncated", "truncated"]),
    Script([0, 0, 0], [1, 6, 2], ["both", "terminated", "truncated"]),
]
"""Of the first, all agents are there at the reset; every way to leave, the last of them all among these."""

INCOMPLETE: dict[str, dict[str, Any]] = {
    "no names": {"has_names": False},
    "gone": {"leave": "gone"},
    "observed": {"leave": "observed"},
    "observed alone": {"leave": "observed alone"},
    "all": {"has_names": False, "leave": "gone", "masked": True},
}
"""Arguments of `IncompleteEnv`, by what it leaves out."""


class IncompleteEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Its data say where they come from; see `ScriptedParallelEnv`.

    Args:
        has_names: Whether there are ``possible_agents``.
        leave: What is said of agents that the script truncates: ``"flag"``: all; ``"observed"``: all but the flag;
            ``"observed alone"``: their observation; ``"gone"``: nothing. They are not in `agents` any more.
        options: See `ScriptedParallelEnv`.
    """

    def __init__(self, *, has_names: bool = True, leave: str = "flag", **options: Any) -> None:
        self._env = ScriptedParallelEnv(SCRIPTS, **options)
        self._leave = leave
        self.metadata = {"name": "incomplete"}
        self.agents: list[str] = []
        if has_names:
            self.possible_agents = self._env.possible_agents

    def observation_space(self, agent: str) -> Space[Any]:
        return self._env.observation_space(agent)

    def action_space(self, agent: str) -> Space[Any]:
        return self._env.action_space(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self._env.reset(seed=seed, options=options)
        self.agents = self._env.agents
        return result

    def step(self, actions: dict[str, Any]) -> Any:
        result = self._env.step(actions)
        obs, rewards, terminations, truncations, infos = result
        self.agents = self._env.agents
        leaving = [agent for agent in obs if truncations[agent] and not terminations[agent]]
        if self._leave == "flag":
            return result
        for agent in leaving:
            truncations[agent] = False
            for table in (rewards, terminations, truncations, infos) if self._leave != "observed" else ():
                table.pop(agent, None)
            if self._leave == "gone":
                del obs[agent]
        return result


def script_of(episode: int, agent_num: int, *, early: bool) -> Script:
    """An episode in which all are there from the start, and some end before the others."""
    rng = np.random.default_rng([episode, agent_num])
    length = int(rng.integers(1, 7))
    deaths = [int(rng.integers(1, length + 1)) for _ in range(agent_num)] if early else [length] * agent_num
    deaths[int(rng.integers(agent_num))] = length
    kinds = ("terminated", "truncated", "both")
    ends: list[Any] = [kinds[int(rng.integers(3))] for _ in range(agent_num)] if early else [kinds[episode % 3]] * 9
    infos = {(t, a): {"t": t, "agent": a} for t in range(length + 1) for a in range(agent_num) if (t + a) % 3 == 0}
    return Script([0] * agent_num, deaths, ends[:agent_num], infos, {t: {"clock": t} for t in range(0, length + 1, 2)})


class JointEnv(gymnasium.Env[Any, Any]):
    """Its data say where they come from; see `ScriptedState`.

    Args:
        agent_num: How many agents.
        keys: Names of the agents, for dicts; None: tuples.
        rewards: ``"team"``: one for all; ``"list"``, ``"array"``: one each.
        flags: ``"one"``: for all; ``"list"``, ``"array"``: one each, and some end early.
        infos: ``"common"``: one dict; ``"each"``: one for each agent.
        masks: Under which key the common info has a mask for each agent, or None.
        unlike: Whether the first agent sees one number more than the others.
        old_api: Whether ``reset`` gives the observation alone and ``step`` four values.
        stacked: Whether observations come as one array.
        count: Name of the attribute that says how many agents there are.
        options: See `ScriptedState`.
    """

    def __init__(
        self,
        agent_num: int = 3,
        *,
        keys: tuple[Any, ...] | None = None,
        rewards: str = "list",
        flags: str = "list",
        infos: str = "common",
        masks: str | None = None,
        unlike: bool = False,
        old_api: bool = False,
        stacked: bool = False,
        count: str = "n_agents",
        env_index: int = 0,
        **options: Any,
    ) -> None:
        early = flags != "one" and not old_api

        def script(episode: int) -> Script:
            return script_of(episode + 7 * env_index, agent_num, early=early)

        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.metadata = {"name": "joint", "render_modes": []}
        self.keys = keys
        seen: list[Any] = [self.world.observation_space] * agent_num
        if unlike:
            seen[0] = Box(-np.inf, np.inf, (seen[0].shape[0] + 1,), np.float64)
        self.observation_space = self._join(seen, Tuple, Dict)
        self.action_space = self._join([self.world.action_space] * agent_num, Tuple, Dict)
        setattr(self, count, agent_num)
        self._forms = {"rewards": rewards, "flags": flags, "infos": infos}
        self._masks, self._unlike, self._old_api, self._stacked = masks, unlike, old_api, stacked
        self._here = [False] * agent_num
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.world.reset(seed)
        self._here = [True] * self.world.agent_num
        return self._obs() if self._old_api else (self._obs(), self._infos())

    def step(self, action: Any) -> Any:
        """Take one step; who has ended is given an action, which is 0."""
        world, k = self.world, self.world.agent_num
        if self.keys is not None:
            assert action.keys() == set(self.keys)
            action = [action[key] for key in self.keys]
        assert isinstance(action, (list, tuple))
        assert len(action) == k
        assert all(action[a] == 0 for a in range(k) if not self._here[a])
        world.act({a: action[a] for a in range(k) if self._here[a]})
        ended, cut = world.script.terminated(world.t), world.script.truncated(world.t)
        rewards: Any = [world.reward(a, action[a]) if self._here[a] else 0 for a in range(k)]
        rewards = rewards[0] if self._forms["rewards"] == "team" else self._each(rewards, self._forms["rewards"])
        over = [ended[a] or cut[a] for a in range(k)]
        obs, infos = self._obs(), self._infos()
        self._here = [here and not gone for here, gone in zip(self._here, over, strict=True)]
        if self._forms["flags"] == "one":
            flags: Any = (ended[0], cut[0])
        else:  # they stay up, as such envs have it
            flags = [self._each(now, self._forms["flags"]) for now in (ended, cut)]
        if not self._old_api:
            return obs, rewards, *flags, infos
        if self._forms["flags"] == "one":
            return obs, rewards, flags[0] or flags[1], {**infos, "TimeLimit.truncated": True} if flags[1] else infos
        return obs, rewards, self._each(over, self._forms["flags"]), infos

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True

    def _obs(self) -> Any:
        found: list[Any] = [self.world.observe_masked(a) for a in range(self.world.agent_num)]
        if self._unlike:
            found[0] = np.append(found[0], float(self.world.t))
        return np.stack(found) if self._stacked else self._join(found, tuple, dict)

    def _infos(self) -> Any:
        world = self.world
        if self._forms["infos"] == "each":
            return self._each([world.info(a) for a in range(world.agent_num)], "list")
        info = dict(world.script.common.get(world.t, {}))
        if self._masks:
            info[self._masks] = [world.mask(a) for a in range(world.agent_num)]
        return info

    def _each(self, values: list[Any], form: str) -> Any:
        if self.keys is not None:
            return dict(zip(self.keys, values, strict=True))
        return np.array(values) if form == "array" else values

    def _join(self, parts: list[Any], sequence: Any, table: Any) -> Any:
        return sequence(parts) if self.keys is None else table(dict(zip(self.keys, parts, strict=True)))


JOINT: dict[str, dict[str, Any]] = {
    "one of each": {},
    "a team": {"rewards": "team", "flags": "one", "count": "num_agents"},
    "arrays": {"rewards": "array", "flags": "array", "stacked": True, "agent_num": 2},
    "infos each": {"rewards": "team", "infos": "each"},
    "old": {"old_api": True, "flags": "one"},
    "old, flags each": {"old_api": True, "agent_num": 2},
    "alone": {"agent_num": 1, "rewards": "team", "flags": "one"},
    "alone, in lists": {"agent_num": 1, "masked": True},
    "two dicts": {"agent_num": 2, "masked": True, "old_api": True, "flags": "one"},
    "masks in infos": {"masks": "avail_actions"},
    "masks in arrays": {"masks": "action_mask", "flags": "array"},
    "unlike": {"unlike": True, "reuse_buffer": True},
    "numbers": {"keys": (0, 1, 2), "infos": "each", "count": "whatever"},
    "names": {"keys": ("left", "right"), "agent_num": 2, "masked": True},
}
"""One env per form."""


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
