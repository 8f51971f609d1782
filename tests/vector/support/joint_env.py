"""A Gymnasium env of several agents, in every form in which such envs say what happens to whom."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Tuple

from marlvec.testing.scripted import Script
from marlvec.testing.scripted.script import ScriptedState

__all__ = ["JOINT", "JointEnv", "script_of"]


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
