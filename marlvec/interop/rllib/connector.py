"""marlvec's agent connectors in RLlib's env-to-module pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Space
from numpy.typing import NDArray

from marlvec.connectors import AgentPipeline, Pipeline, Rows
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.extras import needs_extra
from marlvec.interop.rllib.dicts import MASK, OBSERVATIONS
from marlvec.interop.rows.view_checks import value_at
from marlvec.spaces import SpaceTree

with needs_extra("ray", "RLlibConnector", "pip install 'marlvec[rllib]'"):
    from ray.rllib.connectors.connector_v2 import ConnectorV2

__all__ = ["RLlibConnector"]

_Chosen = list[tuple[int, int, Any]]  # env number, agent index, SingleAgentEpisode


class RLlibConnector(ConnectorV2):  # type: ignore[misc]  # Any where ray is not installed
    """An `AgentPipeline` as a `ConnectorV2`, for multi-agent envs.

    ``config.env_runners(env_to_module_connector=lambda env, spaces, device: RLlibConnector(AgentPipeline([…])))``.

    Each new observation passes through once, including the last ones of episodes, and is written back into its episode,
    as RLlib's own filters do; so modules and learners see the pipeline's output. Changed rewards are written back, too,
    and then count in RLlib's returns.

    * Agents with equal spaces share one copy of the pipeline, whichever module plays them.
    * Of observations ``{"observations": …, "action_mask": …}`` only the former pass through; connectors find the mask
      in the column ``action_mask``.
    * If RLlib does not explore, running statistics are frozen.
    * `get_state` returns the learned state. Memory of running episodes, e.g. frame stacks, stays in its runner, since
      RLlib copies one runner's state to others.
    * RLlib stores states by class name and merges them by position: use one `RLlibConnector` per pipeline, before
      pieces that are not RLlib's defaults.

    Args:
        pipeline: Copied. Must not set ``changes_length``, since RLlib needs an action of every agent.
        input_observation_space: A Dict space, agent to space; RLlib sets it.
        input_action_space: A Dict space, agent to space; RLlib sets it.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: ``pipeline`` is not an `AgentPipeline`, or it changes the number of rows.
    """

    def __init__(
        self,
        pipeline: AgentPipeline,
        input_observation_space: Space[Any] | None = None,
        input_action_space: Space[Any] | None = None,
    ) -> None:
        if not isinstance(pipeline, AgentPipeline) or pipeline.changes_length:
            raise ArgumentError(
                f"RLlibConnector: expected an AgentPipeline that returns as many rows as it receives, got {pipeline!r}"
            )
        self._pipeline = pipeline
        self._shared: dict[tuple[str, str], _Group] = {}
        self._groups: list[_Group] = []
        self._where: dict[str, tuple[_Group, int]] = {}  # agent: its group, its index
        self._slots: dict[str, int] = {}  # id of a running episode: its env number in the pipeline
        self._numbers: dict[str, int] = {}  # id of a running episode: its episode number
        self._episode_num = 0
        super().__init__(input_observation_space, input_action_space)

    def recompute_output_observation_space(
        self, input_observation_space: Space[Any], input_action_space: Space[Any]
    ) -> Space[Any]:
        """Return the pipeline's output space for each agent; binds copies of the pipeline to the spaces.

        Returns:
            A Dict space of agent name to its space.

        Raises:
            ArgumentError: The observation space is not a Dict of agents.
            UnsupportedSpaceError: A connector does not support a space; a note names it.
        """
        if not isinstance(input_observation_space, Dict):
            raise ArgumentError(
                f"RLlibConnector: expected a Dict space, agent to space, got {input_observation_space}; use RLlib's "
                f"own runners for single agents"
            )
        if not isinstance(input_action_space, Dict):
            return input_observation_space  # RLlib calls again once it has set the action space
        agents = tuple(input_observation_space)
        found: dict[tuple[str, str], _Group] = {}
        for index, agent in enumerate(agents):
            space, action_space = input_observation_space[agent], input_action_space[agent]
            key = repr(space), repr(action_space)  # spaces with equal reprs may differ in long bounds
            while key in found and (found[key].space, found[key].action_space) != (space, action_space):
                key = f"{key[0]}'", key[1]
            if key not in found:
                group = self._shared.get(key) or _Group(deepcopy(self._pipeline))
                group.bind(space, action_space, agents)
                found[key] = group
            self._where[agent] = found[key], index
        self._shared, self._groups = found, list(found.values())
        return Dict(OrderedDict((agent, self._where[agent][0].output_space) for agent in agents))

    def __call__(
        self, *, rl_module: Any, batch: Any, episodes: Sequence[Any], explore: bool | None = None, **kwargs: Any
    ) -> Any:
        """Pass the newest observations of these episodes through the pipelines; ``batch`` is unchanged."""
        if not self._groups:
            raise StateError("RLlibConnector: no spaces yet; RLlib must set observation and action spaces first")
        self._number_episodes(episodes)
        chosen: dict[int, _Chosen] = {}
        for episode in episodes:
            for single in self.single_agent_episode_iterator([episode]):
                group, index = self._where[single.agent_id]
                chosen.setdefault(id(group), []).append((self._slots[episode.id_], index, single))
        for group in self._groups:
            if own := chosen.get(id(group)):
                numbers = [self._numbers[single.multi_agent_episode_id] for _, _, single in own]
                group.run(own, np.array(numbers), learn=explore is not False)
        for episode in episodes:
            if episode.is_done:
                self._leave(episode.id_)
        return batch

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the learned state of the pipelines."""
        states = [_learnt(group.pipeline, group.pipeline.state_dict()) for group in self._groups]
        return {"groups": states} if any(states) else {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from `get_state` or `merge_states`; running episodes continue."""
        if not state:
            return
        if len(state.get("groups", ())) != len(self._groups):
            raise ArgumentError(f"RLlibConnector: expected the state of {len(self._groups)} pipelines, got {state}")
        for group, own in zip(self._groups, state["groups"], strict=True):
            group.pipeline.load_state_dict(own)

    def reset_state(self) -> None:
        """Drop all state, as in a new object."""
        self._shared, self._groups, self._slots, self._numbers = {}, [], {}, {}
        self.recompute_output_observation_space(self.input_observation_space, self.input_action_space)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the learned states of copies in several runners."""
        if not states or not all(states):
            return {}
        pairs = zip(self._groups, zip(*(state["groups"] for state in states), strict=True), strict=True)
        return {"groups": [group.pipeline.merge_states(copies) for group, copies in pairs]}

    def _number_episodes(self, episodes: Sequence[Any]) -> None:
        """Assign every episode an env number; free those of episodes that RLlib has dropped."""
        if any(not episode.is_done for episode in episodes):  # then `episodes` are all running ones
            running = {episode.id_ for episode in episodes}
            for gone in [key for key in self._slots if key not in running]:
                self._leave(gone)
        free = iter(sorted(set(range(len(self._slots) + len(episodes))) - set(self._slots.values())))
        for episode in episodes:
            if episode.id_ not in self._slots:
                slot = self._slots[episode.id_] = next(free)
                self._numbers[episode.id_] = self._episode_num
                self._episode_num += 1
                for group in self._groups:
                    group.pipeline.reset(np.array([slot]))

    def _leave(self, episode_id: str) -> None:
        del self._slots[episode_id], self._numbers[episode_id]


class _Group:
    """Agents with equal spaces, and their shared pipeline."""

    def __init__(self, pipeline: AgentPipeline) -> None:
        self.pipeline = pipeline

    def bind(self, space: Space[Any], action_space: Space[Any], agents: tuple[str, ...]) -> None:
        """Bind the pipeline to the spaces; its state is kept if they are equal."""
        self.space, self.action_space = space, action_space
        self.masked = isinstance(space, Dict) and set(space) == {OBSERVATIONS, MASK}
        inner = space[OBSERVATIONS] if self.masked and isinstance(space, Dict) else space
        self.pipeline.bind(inner, agents, action_space)
        self._obs, self._actions, self._out = map(SpaceTree, (inner, action_space, self.pipeline.output_space_))
        self.output_space: Space[Any] = self._out.space
        if self.masked and isinstance(space, Dict):
            self.output_space = Dict({OBSERVATIONS: self._out.space, MASK: space[MASK]})

    def run(self, chosen: _Chosen, eps_id: NDArray[np.int64], *, learn: bool) -> None:
        """Pass these agents' newest observations through the pipeline, and write the output into their episodes."""
        env_id, agent_index = (np.array([row[k] for row in chosen]) for k in (0, 1))
        singles = [single for _, _, single in chosen]
        t = np.array([single.t for single in singles])
        if len(acted := np.flatnonzero(t)):
            actions = self._batch(self._actions, [singles[k].get_actions(-1) for k in acted])
            before = {"env_id": env_id[acted], "agent_index": agent_index[acted], "eps_id": eps_id[acted]}
            self.pipeline.on_policy_output(Rows({**before, "t": t[acted] - 1, "actions": actions}))
        seen = [single.get_observations(-1) for single in singles]
        rewards = np.array([float(single.get_rewards(-1)) if single.t else 0.0 for single in singles])
        columns = {
            "env_id": env_id,
            "agent_index": agent_index,
            "eps_id": eps_id,
            "t": t,
            "obs": self._batch(self._obs, [obs[OBSERVATIONS] for obs in seen] if self.masked else seen),
            "rewards": rewards,
            "terminated": np.array([bool(single.is_terminated) for single in singles]),
            "truncated": np.array([bool(single.is_truncated) for single in singles]),
            "first": t == 0,
            "last": np.array([bool(single.is_done) for single in singles]),
        }
        if self.masked:
            columns[MASK] = np.array([obs[MASK] for obs in seen]) > 0
        out = self._through(Rows(columns), learn=learn)
        leaves = self._out.flatten(out.obs)
        for k, single in enumerate(singles):
            new = value_at(self._out, leaves, (k,))
            single.observation_space = self.output_space
            obs = {OBSERVATIONS: new, MASK: seen[k][MASK]} if self.masked else new
            single.set_observations(at_indices=-1, new_data=obs)
            if t[k] and out.rewards[k] != rewards[k]:
                single.set_rewards(at_indices=-1, new_data=float(out.rewards[k]))

    def _through(self, rows: Rows, *, learn: bool) -> Rows:
        was_training = self.pipeline.training
        if was_training and not learn:
            self.pipeline.eval()
        try:
            out = self.pipeline(rows)
        finally:
            if was_training and not learn:
                self.pipeline.train()
        if new := [name for name, _ in out.items() if name not in rows]:
            raise ContractError(
                f"RLlibConnector: the pipeline adds the columns {new}, but RLlib's modules receive observations only; "
                f"set into_obs=True on the connector if it has that, or remove it"
            )
        return out

    def _batch(self, tree: SpaceTree, values: Sequence[Any]) -> Any:
        """Stack values to a tree of arrays (n, …)."""
        parts = zip(*(tree.flatten(value) for value in values), strict=True)
        batch = []
        for leaf, part in zip(tree.leaves, parts, strict=True):
            cells = leaf.blank(len(part))
            for k, value in enumerate(part):
                cells[k] = value
            batch.append(cells)
        return tree.unflatten(batch)


def _learnt(pipeline: Pipeline[Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without connectors that learn nothing: `merge_states` cannot merge them."""
    kept = {}
    for name, piece in zip(pipeline.names, pipeline, strict=True):
        if isinstance(piece, Pipeline):
            kept[name] = _learnt(piece, state[name])
        else:
            kept[name] = state[name] if state[name] and piece.merge_states([state[name]]) else {}
    return kept
