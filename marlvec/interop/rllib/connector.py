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

_Chosen = list[tuple[int, int, Any]]  # number of its env, index of its agent, an agent's SingleAgentEpisode


class RLlibConnector(ConnectorV2):  # type: ignore[misc]  # Any where ray is not installed
    """An `AgentPipeline` as a `ConnectorV2`, for multi-agent envs.

    ``config.env_runners(env_to_module_connector=lambda env, spaces, device: RLlibConnector(AgentPipeline([…])))``.

    Each new observation passes through once, last ones of episodes included, and is written back into its episode, as
    RLlib's own filters do; so modules and learners see what the pipeline made. A reward that a piece changes is written
    back, too, and RLlib's returns are then of the changed ones.

    * Agents of equal spaces share one copy of the pipeline, whatever module plays them.
    * Of observations ``{"observations": …, "action_mask": …}`` only the former pass through; pieces find the mask in
      the column ``action_mask``.
    * Where RLlib does not explore, running statistics are frozen.
    * `get_state` holds what was learnt. Frame stacks and their like belong to the episodes that a runner plays, and
      stay with it: RLlib hands one runner's state to others.
    * RLlib keeps states by the class's name and merges them by position: let it be the only one of its class, and
      stand before pieces that are not RLlib's default ones.

    Args:
        pipeline: Copied; one whose ``changes_length`` is set is refused, since RLlib needs an action of every agent.
        input_observation_space: A Dict space, agent to space; RLlib sets it.
        input_action_space: Likewise.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: This is no pipeline that may stand here.
    """

    def __init__(
        self,
        pipeline: AgentPipeline,
        input_observation_space: Space[Any] | None = None,
        input_action_space: Space[Any] | None = None,
    ) -> None:
        if not isinstance(pipeline, AgentPipeline) or pipeline.changes_length:
            raise ArgumentError(
                f"RLlibConnector: expected an AgentPipeline that returns as many rows as it is given, got {pipeline!r}"
            )
        self._pipeline = pipeline
        self._shared: dict[tuple[str, str], _Group] = {}
        self._groups: list[_Group] = []
        self._where: dict[str, tuple[_Group, int]] = {}  # agent: its group, its index
        self._slots: dict[str, int] = {}  # id of a running episode: the number of its env, for the pipeline
        self._numbers: dict[str, int] = {}  # likewise: the number of the episode
        self._episode_num = 0
        super().__init__(input_observation_space, input_action_space)

    def recompute_output_observation_space(
        self, input_observation_space: Space[Any], input_action_space: Space[Any]
    ) -> Space[Any]:
        """The pipeline's output space for each agent; copies of the pipeline are bound to the spaces.

        Returns:
            A Dict space of agent name to its space.

        Raises:
            ArgumentError: The observation space is no Dict of agents.
            UnsupportedSpaceError: A piece cannot work on a space; a note names it.
        """
        if not isinstance(input_observation_space, Dict):
            raise ArgumentError(
                f"RLlibConnector: expected a Dict space, agent to space, got {input_observation_space}; of single "
                f"agents, RLlib has its own runners"
            )
        if not isinstance(input_action_space, Dict):
            return input_observation_space  # the action space comes in a call of its own, after which it is asked again
        agents = tuple(input_observation_space)
        found: dict[tuple[str, str], _Group] = {}
        for index, agent in enumerate(agents):
            space, action_space = input_observation_space[agent], input_action_space[agent]
            key = repr(space), repr(action_space)  # spaces that are printed alike may differ in long bounds
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
        """Send the newest observations of these episodes through; ``batch`` stays as it is."""
        if not self._groups:
            raise StateError("RLlibConnector: RLlib has not said what the spaces are, or agents have no actions")
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
        """What the pipelines have learnt."""
        states = [_learnt(group.pipeline, group.pipeline.state_dict()) for group in self._groups]
        return {"groups": states} if any(states) else {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` or `merge_states` gave; running episodes go on.

        Raises:
            ArgumentError: It is not of such pipelines.
        """
        if not state:
            return
        if len(state.get("groups", ())) != len(self._groups):
            raise ArgumentError(f"RLlibConnector: expected the state of {len(self._groups)} pipelines, got {state}")
        for group, own in zip(self._groups, state["groups"], strict=True):
            group.pipeline.load_state_dict(own)

    def reset_state(self) -> None:
        """Forget everything, as if newly made."""
        self._shared, self._groups, self._slots, self._numbers = {}, [], {}, {}
        self.recompute_output_observation_space(self.input_observation_space, self.input_action_space)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join what copies in several runners have learnt."""
        if not states or not all(states):
            return {}
        pairs = zip(self._groups, zip(*(state["groups"] for state in states), strict=True), strict=True)
        return {"groups": [group.pipeline.merge_states(copies) for group, copies in pairs]}

    def _number_episodes(self, episodes: Sequence[Any]) -> None:
        """Give every episode a number as that of an env; those that RLlib has dropped leave theirs."""
        if any(not episode.is_done for episode in episodes):  # then these are all that are running
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
    """Agents of equal spaces, and the pipeline they share."""

    def __init__(self, pipeline: AgentPipeline) -> None:
        self.pipeline = pipeline

    def bind(self, space: Space[Any], action_space: Space[Any], agents: tuple[str, ...]) -> None:
        """Learn the spaces; state survives spaces that are equal."""
        self.space, self.action_space = space, action_space
        self.masked = isinstance(space, Dict) and set(space) == {OBSERVATIONS, MASK}
        inner = space[OBSERVATIONS] if self.masked and isinstance(space, Dict) else space
        self.pipeline.bind(inner, agents, action_space)
        self._obs, self._actions, self._out = (
            SpaceTree(inner),
            SpaceTree(action_space),
            SpaceTree(self.pipeline.output_space_),
        )
        self.output_space: Space[Any] = self._out.space
        if self.masked and isinstance(space, Dict):
            self.output_space = Dict({OBSERVATIONS: self._out.space, MASK: space[MASK]})

    def run(self, chosen: _Chosen, eps_id: NDArray[np.int64], *, learn: bool) -> None:
        """Send these agents' newest observations through, and write what comes out into their episodes."""
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
                f"RLlibConnector: the pipeline adds the columns {new}, and RLlib's modules are shown observations "
                f"only; give the piece into_obs=True where it has that, or take it out"
            )
        return out

    def _batch(self, tree: SpaceTree, values: Sequence[Any]) -> Any:
        """A tree of arrays (n, …)."""
        parts = zip(*(tree.flatten(value) for value in values), strict=True)
        batch = []
        for leaf, part in zip(tree.leaves, parts, strict=True):
            cells = leaf.blank(len(part))
            for k, value in enumerate(part):
                cells[k] = value
            batch.append(cells)
        return tree.unflatten(batch)


def _learnt(pipeline: Pipeline[Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without those of pieces in which nothing is learnt: `merge_states` would give nothing for them."""
    kept = {}
    for name, piece in zip(pipeline.names, pipeline, strict=True):
        if isinstance(piece, Pipeline):
            kept[name] = _learnt(piece, state[name])
        else:
            kept[name] = state[name] if state[name] and piece.merge_states([state[name]]) else {}
    return kept
