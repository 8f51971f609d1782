"""Other libraries' frame stacks and normalisations, around the rows that the benchmark of connectors gives to ours."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray

__all__ = ["NORMALIZE", "PEERS", "SCALE", "STACK", "version"]

Tick = Callable[[], Any]
Floats = NDArray[np.float32]
Answers = Iterator[tuple[str, str, Tick]]
"""Of each contestant: the question it answers, its name, and one call of it with all rows."""

STACK, NORMALIZE, SCALE = "frame stack of 4", "running mean and standard deviation", "from bounds to [0, 1]"


class _Still(gymnasium.Env[Any, Any]):
    """One agent; hands out prepared observations."""

    def __init__(self, obs: Floats) -> None:
        self.observation_space, self.action_space = _box(obs.shape), Discrete(5)
        self._result = obs, 0.0, False, False, {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._result[0], {}

    def step(self, action: Any) -> Any:
        return self._result


class _StillVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """As many envs as there are rows."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, obs: NDArray[Any]) -> None:
        self.num_envs = len(obs)
        self.single_observation_space, self.single_action_space = _box(obs.shape[1:]), Discrete(5)
        self.observation_space = _box(obs.shape)
        zeros = np.zeros(len(obs)), np.zeros(len(obs), np.bool_), np.zeros(len(obs), np.bool_)
        self._result = obs, *zeros, {}

    def step(self, actions: Any) -> Any:
        return self._result


def _gymnasium(obs_EAd: Floats, unit_EAd: Floats) -> Answers:
    from gymnasium.wrappers import FrameStackObservation
    from gymnasium.wrappers.vector import NormalizeObservation

    obs = obs_EAd.reshape(-1, obs_EAd.shape[-1])
    singles = [FrameStackObservation(_Still(row), 4) for row in obs]
    for env in singles:
        env.reset()
    yield STACK, "Gymnasium, env by env", lambda: [env.step(0)[0] for env in singles]
    vector = NormalizeObservation(_StillVector(obs))
    yield NORMALIZE, "Gymnasium, vectorized", lambda: vector.step(None)[0]


def _supersuit(obs_EAd: Floats, unit_EAd: Floats) -> Answers:
    import supersuit
    from pettingzoo import ParallelEnv

    names = _names(obs_EAd)

    class Still(ParallelEnv[str, Any, int]):
        """Three agents; hands out prepared observations."""

        metadata = {"name": "still", "render_modes": []}
        possible_agents = agents = names
        render_mode = None

        def __init__(self, obs_An: Any, space: Box) -> None:
            self._space = space
            self._obs = dict(zip(names, obs_An, strict=True))
            flags = dict.fromkeys(names, False)
            self._rest = dict.fromkeys(names, 0.0), flags, flags, {agent: {} for agent in names}

        def observation_space(self, agent: str) -> Box:
            return self._space

        def action_space(self, agent: str) -> Discrete:
            return Discrete(5)

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return self._obs, self._rest[-1]

        def step(self, actions: Any) -> Any:
            return self._obs, *self._rest

    actions = dict.fromkeys(names, 0)
    for question, obs, space, wrap in (
        (STACK, obs_EAd, _box(obs_EAd.shape[2:]), lambda env: supersuit.frame_stack_v2(env, 4)),
        (SCALE, unit_EAd, Box(-1.0, 1.0, unit_EAd.shape[2:], np.float32), supersuit.normalize_obs_v0),
    ):
        wrapped = [wrap(Still(each, space)) for each in obs]
        for env in wrapped:
            env.reset()
        yield question, "SuperSuit, agent by agent", lambda wrapped=wrapped: [env.step(actions)[0] for env in wrapped]


def _rllib(obs_EAd: Floats, unit_EAd: Floats) -> Answers:
    from ray.rllib.connectors.agent.mean_std_filter import MeanStdObservationFilterAgentConnector
    from ray.rllib.connectors.connector import ConnectorContext
    from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
    from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
    from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
    from ray.rllib.utils.typing import AgentConnectorDataType

    names, space = _names(obs_EAd), _box(obs_EAd.shape[2:])
    old = MeanStdObservationFilterAgentConnector(
        ConnectorContext({}, observation_space=space, action_space=Discrete(5))
    )
    ids = [(env, agent, obs_EAd[env, agent]) for env, agent in np.ndindex(obs_EAd.shape[:2])]

    def row_by_row() -> list[Any]:
        return [old.transform(AgentConnectorDataType(env, agent, {"obs": obs})).data["obs"] for env, agent, obs in ids]

    yield NORMALIZE, "RLlib, old stack, row by row", row_by_row

    def episodes(shape: tuple[int, ...]) -> tuple[Dict, Dict, list[Any]]:
        spaces = Dict({agent: _box(shape) for agent in names})
        actions = Dict({agent: Discrete(5) for agent in names})
        made = []
        for of_env in obs_EAd.reshape(*obs_EAd.shape[:2], *shape):
            obs = dict(zip(names, of_env, strict=True))
            episode = MultiAgentEpisode(observation_space=spaces, action_space=actions)
            episode.add_env_reset(observations=obs, infos={})
            for _ in range(4):
                zeros = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0), {agent: {} for agent in names}
                ends = {"terminateds": {"__all__": False}, "truncateds": {"__all__": False}}
                episode.add_env_step(obs, *zeros, **ends)
            made.append(episode)
        return spaces, actions, made

    for question, piece, shape in (
        (NORMALIZE, MeanStdFilter(multi_agent=True), space.shape),
        (STACK, FrameStackingEnvToModule(num_frames=4, multi_agent=True), (*space.shape, 1, 1)),  # images only
    ):
        spaces, actions, running = episodes(shape)
        # Not in the constructor: RLlib asks for the new space there before it has kept the other arguments.
        piece.input_action_space, piece.input_observation_space = actions, spaces
        yield (
            question,
            "RLlib, new stack, episode by episode",
            lambda piece=piece, running=running: piece(rl_module=None, batch={}, episodes=running),
        )


def _box(shape: tuple[int, ...]) -> Box:
    return Box(-np.inf, np.inf, shape, np.float32)


def _names(obs_EAd: Floats) -> list[str]:
    return [f"agent_{i}" for i in range(obs_EAd.shape[1])]


PEERS: dict[str, Callable[[Floats, Floats], Answers]] = {
    "gymnasium": _gymnasium,
    "supersuit": _supersuit,
    "ray": _rllib,
}
"""Library to its contestants, for observations (E, A, d) of E envs with A agents, without bounds and in [-1, 1]."""


def version(name: str) -> str | None:
    """Which version of a library is installed, if any."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
