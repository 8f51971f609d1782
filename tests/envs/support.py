"""What tests of envs share: a vectorizer in miniature, whole episodes, an env that gives masks now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec import VectorEnv
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import Info
from tests.vector.support.drivers import LivesEnv

# --- A vectorizer in miniature: one env, its row of arrays on the heap, and what a shard does before each call


class Rig:
    """One env with its slot. Arrays have the axes of one env: (A,), and per group and leaf (A_group, ...)."""

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.spec = spec = env.spec()
        agent_num = len(spec.agents)
        self.obs = [group.observation_tree.zeros(len(group.agents)) for group in spec.groups]
        self.final = [group.observation_tree.zeros(len(group.agents)) for group in spec.groups]
        self.actions = [group.action_tree.zeros(len(group.agents)) for group in spec.groups]
        self.masks: list[NDArray[np.bool_] | None] = [
            None if group.choices is None else np.ones((len(group.agents), group.choices), np.bool_)
            for group in spec.groups
        ]
        self.reward_A = np.zeros(agent_num)
        self.terminated_A, self.truncated_A, self.alive_A, self.acting_A = np.zeros((4, agent_num), np.bool_)
        self.final_missing_A = np.zeros(agent_num, np.bool_)
        self.state = (
            None if spec.state_space is None else np.zeros(spec.state_space.shape or (), spec.state_space.dtype)
        )
        self.gave_mask = np.zeros(1, np.bool_)
        self.slot = Slot.of_groups(
            spec,
            obs=self.obs,
            final_obs=self.final,
            actions=self.actions,
            action_mask=self.masks,
            gave_mask=self.gave_mask,
            reward=self.reward_A,
            terminated=self.terminated_A,
            truncated=self.truncated_A,
            final_missing=self.final_missing_A,
            alive=self.alive_A,
            acting=self.acting_A,
            state=self.state,
        )

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        for leaf in (leaf for group in self.obs for leaf in group):
            leaf[...] = 0
        for mask in self.masks:
            if mask is not None:
                mask[...] = True
        self.alive_A[...] = self.acting_A[...] = False
        self.reward_A[...] = 0
        self.terminated_A[...] = self.truncated_A[...] = self.final_missing_A[...] = False
        self.slot.done = False
        return self.env.reset(self.slot, seed=seed, options=options)

    def step(self, actions: list[Any]) -> Info | None:
        """Step with one action per agent, of any kind the agent's action space has."""
        for group, leaves in zip(self.spec.groups, self.actions, strict=True):
            for j, a in enumerate(group.agents):
                for leaf, part in zip(leaves, group.action_tree.flatten(actions[a]), strict=True):
                    leaf[j] = part
        for a in np.flatnonzero(~self.alive_A):
            self.slot.zero_obs(int(a))
        self.reward_A[...] = 0
        self.terminated_A[...] = self.truncated_A[...] = self.final_missing_A[...] = False
        self.slot.done = False
        return self.env.step(self.slot)

    @property
    def done(self) -> bool:
        return self.slot.done

    def row(self, a: int) -> Any:
        """Agent ``a``'s observation, a tree of copies."""
        group, j = self._home(a)
        leaves = [leaf[j].copy() for leaf in self.obs[group]]
        return self.spec.groups[group].observation_tree.unflatten(leaves)

    def mask(self, a: int) -> NDArray[np.bool_] | None:
        group, j = self._home(a)
        mask = self.masks[group]
        declared = self.spec.groups[group].mask_size is not None
        return mask[j].copy() if mask is not None and (declared or self.gave_mask[0]) else None

    def flags(self) -> dict[str, list[bool]]:
        """All four flags, as lists."""
        named = {"terminated": self.terminated_A, "truncated": self.truncated_A}
        named |= {"alive": self.alive_A, "acting": self.acting_A}
        return {name: flag_A.tolist() for name, flag_A in named.items()}

    def _home(self, a: int) -> tuple[int, int]:
        for g, group in enumerate(self.spec.groups):
            if a in group.agents:
                return g, group.agents.index(a)
        raise IndexError(a)


# --- Whole episodes with random actions, and everything that came back


def play(envs: VectorEnv, steps: int, seed: int = 0) -> list[Any]:
    """What a reset and so many steps return; envs whose episode is over are reset where nobody else does it."""
    results: list[Any] = [envs.reset(seed=seed)]
    envs.random_action(seed=seed)
    for _ in range(steps):
        obs, rewards, terminated, truncated, infos = envs.step(envs.random_action())
        results.append((obs, rewards, terminated, truncated, infos))
        if envs.autoreset_mode == "disabled" and not (alive := infos["alive"].any(axis=1)).all():
            results.append(envs.reset(env_ids=~alive))
    return results


# --- `Forgetful`: an env whose agents get an action mask with their infos, now and then


class Forgetful(LivesEnv):
    """Two agents; ``gives(t, a)`` says whether agent ``a`` has a mask, which allows action ``t % 3`` alone."""

    metadata = {"name": "forgetful", "render_modes": []}

    def __init__(self, gives: Any, length: int = 4, action_space: Any = None) -> None:
        lives = dict.fromkeys(["ann", "bob"], (0, length))
        space = Discrete(3) if action_space is None else action_space
        super().__init__(lives, Box(0, 9, (1,)), space, "truncated")
        self.gives = gives

    def look(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        obs = {agent: np.full(1, self.t, np.float32) for agent in agents}
        given = [agent for a, agent in enumerate(agents) if self.gives(self.t, a)]
        return obs, {agent: {"action_mask": np.arange(3) == self.t % 3} for agent in given}
