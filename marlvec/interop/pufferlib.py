"""A marlvec vectorizer as a PufferEnv: agents are rows, and results are written into PufferLib's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.extras import needs_extra
from marlvec.interop.rows import RowDriver
from marlvec.vector.vector_env import VectorEnv

with needs_extra("pufferlib", "PufferView", "see https://puffer.ai/docs.html: it compiles extensions for torch"):
    from pufferlib import PufferEnv

__all__ = ["PufferView"]


class PufferView(PufferEnv):  # type: ignore[misc]  # Any where pufferlib is not installed
    """A view of a `VectorEnv` with one group of agents, for PufferLib's vectorizers and its trainer.

    PufferLib's buffers hold the R = N * A rows: ``observations`` (R, …), ``rewards`` (R,) float32, ``terminals`` and
    ``truncations`` (R,) bool, and ``masks`` (R,) bool, True in rows whose agent must act. Each call writes into them.
    `marlvec.interop.rows.RowDriver` describes flags, padding and the ends of episodes; an agent's last
    observation is lost, since PufferLib has no place for it.

    The infos are a list with one dict per agent that ended: ``"episode_return"``, ``"episode_length"``, ``"agent"``
    (its name), and the agent's infos, without arrays and without marlvec's own keys.

    A view is a native env for PufferLib, with many agents: ``pufferlib.vector.make(lambda buf=None, seed=0:
    PufferView(marlvec.make(...), buf), backend=pufferlib.PufferEnv)``.

    Args:
        envs: The vectorizer, in same-step mode. No other code may step or reset it.
        buf: PufferLib's buffers; None: the view allocates them.

    Raises:
        MissingExtraError: (By the import.) pufferlib is not installed.
        ArgumentError: There are several groups, the mode differs, or PufferLib does not support the spaces:
            observations must be one Box, actions Discrete or MultiDiscrete starting at 0, or a Box.

    Attributes:
        envs: The vectorizer.
        driver: The `RowDriver` that steps it.
        num_agents: R, the number of rows.
        single_observation_space, single_action_space: Spaces of one row.
    """

    def __init__(self, envs: VectorEnv, buf: Any = None) -> None:
        self.driver = RowDriver(envs, "PufferView")
        group = self.driver.rows.group
        seen, done = group.observation_space, group.action_space
        if not isinstance(seen, Box) or not isinstance(done, (Discrete, MultiDiscrete, Box)):
            raise ArgumentError(
                f"PufferView: expected one Box of observations and Discrete, MultiDiscrete or Box actions; "
                f"{envs.spec.name} has {seen} and {done}. Flatten them with marlvec.make(..., wrappers=[…])"
            )
        if np.any(getattr(done, "start", 0)):
            raise ArgumentError(
                f"PufferView: expected choices that start at 0, as PufferLib requires; {envs.spec.name} has {done}"
            )
        self.envs = envs
        self.num_agents = self.driver.rows.row_num
        self.single_observation_space, self.single_action_space = deepcopy(seen), deepcopy(done)
        super().__init__(buf)

    def reset(self, seed: int | Sequence[int] | None = None) -> tuple[NDArray[Any], list[dict[str, Any]]]:
        """Begin new episodes in all envs.

        Args:
            seed: Spread over the envs by `marlvec.env_seeds`; None: the envs' random generators continue. A list with
                one seed is accepted, as passed by PufferLib's Multiprocessing.

        Returns:
            ``(observations, [])``, the buffer.
        """
        if isinstance(seed, (list, tuple)) and len(seed) == 1:
            (seed,) = seed
        obs, _ = self.driver.reset(seed)
        self.observations[:], self.masks[:] = obs, self.driver.acting
        self.rewards[:], self.terminals[:], self.truncations[:] = 0, False, False
        return self.observations, []

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], list[dict[str, Any]]]:
        """Step all envs.

        Args:
            actions: (R, …); rows that do not act may have any action.

        Returns:
            ``(observations, rewards, terminals, truncations, infos)``: the buffers, and one dict per agent that ended.

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
        """
        self.driver.send(actions)
        step = self.driver.recv()
        self.observations[:], self.masks[:], self.rewards[:] = step.obs, self.driver.acting, step.rewards
        self.terminals[:], self.truncations[:] = step.terminated, step.truncated
        names = self.envs.agents
        infos = [_summary(info, names[row % len(names)]) for row, info in enumerate(step.infos) if "episode" in info]
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def close(self) -> None:
        """Close the vectorizer."""
        self.envs.close()


_OURS = ("TimeLimit.truncated", "alive", "acting", "action_mask", "terminal_observation", "episode", "fault")


def _summary(info: dict[str, Any], agent: str) -> dict[str, Any]:
    """Return the numbers and texts of an agent's last info: PufferLib's trainer can log these."""
    own = {key: value for key, value in info.items() if key not in _OURS and np.ndim(value) == 0}
    return {**own, "episode_return": info["episode"]["r"], "episode_length": info["episode"]["l"], "agent": agent}
