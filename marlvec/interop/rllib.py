"""marlvec in RLlib: its envs as MultiAgentEnv and VectorMultiAgentEnv, its connectors, and an env runner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marlvec.connectors import AgentPipeline, Pipeline, Rows
from marlvec.envs.spec import COMMON, AgentGroup
from marlvec.errors import ActionError, ArgumentError, BusyError, ContractError, StateError
from marlvec.extras import needs_extra
from marlvec.interop.rows import (
    check_view,
    join_actions,
    merged,
    metadata_of,
    places_of,
    render_mode_of,
    value_at,
    viewed,
)
from marlvec.making import make
from marlvec.registry import EnvLike
from marlvec.spaces import SpaceTree
from marlvec.vector.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

with needs_extra("ray", "marlvec.interop.rllib", "pip install 'marlvec[rllib]'"):
    from ray.rllib.callbacks.utils import make_callback
    from ray.rllib.connectors.connector_v2 import ConnectorV2
    from ray.rllib.env.env_context import EnvContext
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
    from ray.tune.registry import ENV_CREATOR, _global_registry


__all__ = ["RLlibConnector", "RLlibEnvRunner", "RLlibMultiAgentEnv", "RLlibVectorEnv"]


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


ALL = "__all__"
OBSERVATIONS, MASK = "observations", "action_mask"  # the keys of RLlib's own modules with masks


class EnvDicts(NamedTuple):
    """RLlib's five results for some envs: one dict per env in each list."""

    obs: list[dict[str, Any]]
    rewards: list[dict[str, float]]
    terminateds: list[dict[str, bool]]
    truncateds: list[dict[str, bool]]
    infos: list[dict[str, dict[str, Any]]]


class AgentDicts:
    """Converts between the arrays of a `VectorEnv` and RLlib's dicts.

    * RLlib requests an action for every observation, so only agents that must act get one, and agents that ended, as
      their last. An agent that waits for its turn gets only a reward; RLlib adds it to the agent's previous action.
    * If any agent reached the time limit, ``truncateds`` is True under ``"__all__"`` alone: with a flag per agent,
      RLlib would treat the episode as terminated, and bootstrap no agent.
    * RLlib ends an episode when all agents that it has seen have ended. If others live that it has not seen, these ends
      are reported one step later.
    * After a fault an agent's last observation is the one before it, and ``infos[agent]["fault"]`` is True.
    * With ``action_masks``, masks of discrete actions are float32 in the observations; else int8 in the infos.
    """

    def __init__(self, envs: VectorEnv, *, action_masks: bool) -> None:
        self._envs = envs
        spec = envs.spec
        self._names = spec.agents
        self._mask_sizes = [group.choices if action_masks else None for group in spec.groups]
        self._places = places_of(spec)
        self._arrays = [_array_leaf(group) for group in spec.groups]
        self.observation_spaces: dict[str, Space[Any]] = OrderedDict()
        self.action_spaces: dict[str, Space[Any]] = OrderedDict()
        for name in self._names:
            g, _ = self._places[name]
            self.observation_spaces[name] = _with_mask(spec.groups[g].observation_space, self._mask_sizes[g])
            self.action_spaces[name] = deepcopy(spec.groups[g].action_space)
        self._acting = np.zeros((envs.num_envs, envs.agent_num), np.bool_)
        # Agents of the running episode that RLlib has seen and that have not ended; ends to report later.
        self._open: list[set[str]] = [set() for _ in range(envs.num_envs)]
        self._late: list[dict[str, list[Any]]] = [{} for _ in range(envs.num_envs)]
        # Last observations; only needed after faults.
        self._last: list[dict[str, Any]] | None = None
        if envs.on_fault != "raise":
            self._last = [{} for _ in range(envs.num_envs)]

    def read(self, result: VectorStep, *, begins: bool = False) -> EnvDicts:
        """Convert a step of all envs, or a reset if ``begins``."""
        self._acting = result.acting.copy()
        raw_infos = infos_to_list(result.infos, self._names, len(result))
        ended = result.ended
        arrays = ended, result.acting | ended, result.alive | ended, result.rewards, result.terminated, result.truncated
        envs = result.done, result.fault, result.reset_mask
        # Plain lists, since reading single array entries is slow.
        rows = zip(*(array.tolist() for array in (*arrays, *envs)), strict=True)
        found = [self._env(result, i, row, raw_infos[i], begins=begins) for i, row in enumerate(rows)]
        return EnvDicts(*map(list, zip(*found, strict=True)))

    def _env(
        self, result: VectorStep, i: int, row: tuple[Any, ...], raw_infos: Mapping[str, Any], *, begins: bool
    ) -> tuple[dict[str, Any], ...]:
        is_over, seen, present, *values, done, fault, was_reset = row
        if begins or was_reset:
            begins, self._open[i], self._late[i] = True, set(), {}
        ended = set(compress(self._names, is_over))
        obs = {
            name: self._observation(result, i, name)
            for a, name in enumerate(self._names)
            if seen[a] and not (fault and name in ended)
        }
        if self._last is not None:
            last = self._last[i]
            obs.update((name, last[name]) for name in self._names if fault and name in ended and name in last)
            self._last[i] = {} if done else {**({} if begins else last), **obs}
        here = [] if begins else [(a, name) for a, name in enumerate(self._names) if present[a]]
        rewards, terminated, truncated = ({name: of_agent[a] for a, name in here} for of_agent in values)
        given = obs, rewards, terminated, truncated, self._infos(result, i, obs, raw_infos, fault=fault)
        self._write_ends(i, given, ended, done=done)
        return given

    def _write_ends(self, i: int, given: tuple[dict[str, Any], ...], ended: set[str], *, done: bool) -> None:
        obs, _, terminated, truncated, _ = given
        late, self._late[i] = self._late[i], {}
        known = self._open[i]
        if not done and known and known <= ended:
            self._late[i] = {name: [column.pop(name) for column in given] for name in known}
        for name, entries in late.items():
            for column, entry in zip(given, entries, strict=True):
                column[name] = entry
        # An agent that is both terminated and truncated counts as terminated; RLlib does not know agents without an
        # observation.
        cut = done and any(
            truncated[name] and not terminated[name] for name in truncated.keys() & (known | late.keys())
        )
        if done:
            truncated.update(dict.fromkeys(truncated, False))
        terminated[ALL], truncated[ALL] = done and not cut, cut
        self._open[i] = (known | obs.keys()) - ended - late.keys()

    def arrays(self, actions: Sequence[Mapping[str, Any]]) -> Any:
        """Convert one dict of actions per env to the form of `VectorEnv.step`; see `join_actions`."""
        n_envs = self._envs.num_envs
        if len(actions) != n_envs:
            raise ActionError(f"actions: expected one dict per env, {n_envs} in all, got {len(actions)}")
        return join_actions(self._envs, actions, self._acting)

    def _observation(self, result: VectorStep, i: int, name: str) -> Any:
        g, j = self._places[name]
        leaves = result.obs_leaves[g]
        # Results are copies already, so a view of a plain array is enough.
        tree = self._envs.spec.groups[g].observation_tree
        obs = leaves[0][i, j] if self._arrays[g] else value_at(tree, leaves, (i, j))
        if (size := self._mask_sizes[g]) is None:
            return obs
        mask = result.action_masks[g]
        allowed = np.ones(size, np.float32) if mask is None else mask[i, j].astype(np.float32)
        return {OBSERVATIONS: obs, MASK: allowed}

    def _infos(
        self, result: VectorStep, i: int, obs: Mapping[str, Any], raw_infos: Mapping[str, Any], *, fault: bool
    ) -> dict[str, dict[str, Any]]:
        """Return infos of agents with an observation: RLlib keeps no info without one."""
        common, infos = raw_infos.get(COMMON, {}), {}
        for name in self._names:
            if name not in obs:
                continue
            ours: dict[str, Any] = {"fault": True} if fault else {}
            g, j = self._places[name]
            mask = result.action_masks[g]
            if mask is not None and self._mask_sizes[g] is None:
                ours[MASK] = mask[i, j].astype(np.int8)
            infos[name] = merged(raw_infos.get(name, {}), common, ours)
        return infos


def _array_leaf(group: AgentGroup) -> bool:
    """Return whether an observation is one array, or one Discrete number."""
    leaves = group.observation_tree.leaves
    return (
        len(leaves) == 1
        and not leaves[0].path
        and not leaves[0].is_object
        and (bool(leaves[0].shape) or isinstance(leaves[0].space, Discrete))
    )


def _with_mask(space: Space[Any], size: int | None) -> Space[Any]:
    space = deepcopy(space)
    return space if size is None else Dict({OBSERVATIONS: space, MASK: Box(0.0, 1.0, (size,), np.float32)})


class RLlibMultiAgentEnv(MultiAgentEnv):  # type: ignore[misc]  # Any where ray is not installed
    """A view of the single env of a `VectorEnv`, for code written for RLlib's envs.

    For training, use `marlvec.interop.rllib.RLlibEnvRunner`, which steps many envs at once.
    `marlvec.interop.rllib.AgentDicts` describes each agent's entries, and time limits.

    Args:
        envs: The vectorizer, made with ``num_envs=1, autoreset_mode="disabled"``, as by `make`. No other code may step
            or reset it.
        action_masks: Whether observations are ``{"observations": …, "action_mask": …}`` wherever actions are discrete.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: It has several envs, or resets them itself.

    Attributes:
        envs: The vectorizer.
        possible_agents: All agents' names.
        agents: Names of agents alive now; all before the first reset.
        observation_spaces, action_spaces: Agent to space.
        metadata, render_mode: From the env.
    """

    def __init__(self, envs: VectorEnv, *, action_masks: bool = False) -> None:
        check_view(envs, "RLlibMultiAgentEnv")
        self.envs = envs
        self.possible_agents = list(envs.agents)
        self.agents = list(envs.agents)
        self._agent_ids = set(envs.agents)  # read by RLlib's env check
        self._dicts = AgentDicts(envs, action_masks=action_masks)
        self.observation_spaces, self.action_spaces = self._dicts.observation_spaces, self._dicts.action_spaces
        self.observation_space = Dict(OrderedDict(self.observation_spaces))
        self.action_space = Dict(OrderedDict(self.action_spaces))
        self.metadata = metadata_of(envs)
        self.render_mode = render_mode_of(envs)
        super().__init__()

    @classmethod
    def make(cls, env: EnvLike, *, backend: str = "sync", action_masks: bool = False, **kwargs: Any) -> Self:
        """Build one env and a view of it.

        Args:
            env: As in `marlvec.make`.
            backend: Where it runs; ``"sync"``: in this process.
            action_masks: As in the constructor.
            kwargs: Other arguments of `marlvec.make`, except ``num_envs`` and ``autoreset_mode``.
        """
        envs = make(env, 1, backend=backend, autoreset_mode="disabled", **kwargs)
        return viewed(cls, envs, action_masks=action_masks)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin an episode.

        Args:
            seed: For the env, used as it is; None: its random generator continues.
            options: For the env.

        Returns:
            ``(obs, infos)`` of the agents that must act.
        """
        self.envs.reset_send(seed=None if seed is None else [seed], options=options)
        result = self.envs.recv()
        self._note(result)
        given = self._dicts.read(result, begins=True)
        return given.obs[0], given.infos[0]

    def step(
        self, action_dict: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Step the env.

        Args:
            action_dict: Agent to action, for every agent that must act.

        Returns:
            ``(obs, rewards, terminateds, truncateds, infos)``.

        Raises:
            ActionError: An agent must act and has no action, a name is unknown, or an action is not in its space.
            NotResetError: The episode is over, or none has begun.
        """
        self.envs.step_send(self._dicts.arrays([action_dict]))
        result = self.envs.recv()
        self._note(result)
        given = self._dicts.read(result)
        return given.obs[0], given.rewards[0], given.terminateds[0], given.truncateds[0], given.infos[0]

    def render(self) -> Any:
        """The frame of the env's ``render()``."""
        return self.envs.render()[0]

    def close(self) -> None:
        """Close the vectorizer and the env."""
        self.envs.close()

    def _note(self, result: VectorStep) -> None:
        alive = result.alive[0].tolist()
        self.agents = [name for name, here in zip(self.possible_agents, alive, strict=True) if here]


_OURS = "marlvec"  # key in env_config for the arguments of marlvec.make()


class RLlibEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc]  # Any where ray is not installed
    """RLlib's `MultiAgentEnvRunner` with one marlvec vectorizer for all envs of the runner.

    ``config.environment("simple_spread", env_config={"N": 5, "marlvec": {"backend": "native"}})`` and
    ``config.env_runners(env_runner_cls=RLlibEnvRunner, num_envs_per_env_runner=16)``.

    * The env is anything that `marlvec.make` accepts or, as usual in RLlib, a `MultiAgentEnv` class or a name
      registered by ``ray.tune.register_env``; then each env is built from ``env_config``.
    * ``env_config`` goes to the env, except ``"marlvec"``: the arguments of `marlvec.make`, and ``action_masks`` of
      `RLlibVectorEnv`.
    * A runner's first reset uses RLlib's seed, spread over the envs by `marlvec.env_seeds`.
    * RLlib's check of single envs is not run, since single envs cannot be stepped. `make` has its own checks.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: (When the runner is built.) There is no env, or ``env_config["marlvec"]`` contains arguments that
            RLlib sets: the number of envs, the mode, the env's own arguments.
    """

    env: RLlibVectorEnv | None

    def make_env(self) -> None:
        """Build the vectorizer, and close the previous one."""
        if self.env is not None:
            self.env.close()
            self.env = None
        context = self._context()
        ours = dict(context.pop(_OURS, {}))
        if taken := {"num_envs", "autoreset_mode", "env_kwargs", "copy"}.intersection(ours):
            raise ArgumentError(
                f"env_config[{_OURS!r}]: expected no {sorted(taken)}: RLlib sets the number of envs "
                f"(num_envs_per_env_runner) and the mode 'next_step'; put the env's arguments beside {_OURS!r}"
            )
        action_masks = ours.pop("action_masks", False)
        own: dict[str, Any] = {}
        env = self.config.env
        if not env:
            raise ArgumentError("RLlibEnvRunner: expected an env, got none; set it with config.environment(env)")
        if isinstance(env, str) and _global_registry.contains(ENV_CREATOR, env):
            env = partial(_global_registry.get(ENV_CREATOR, env), context)
        elif isinstance(env, type) and issubclass(env, MultiAgentEnv):
            env = partial(env, context)
        else:
            own = dict(context)
        envs = make(
            env, self.config.num_envs_per_env_runner, autoreset_mode="next_step", env_kwargs=own or None, **ours
        )
        self.env = viewed(RLlibVectorEnv, envs, action_masks=action_masks)
        self.num_envs = self.env.num_envs
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={"env_runner": self, "metrics_logger": self.metrics, "env": self.env, "env_context": context},
        )

    def _context(self) -> EnvContext:
        given = self.config.env_config
        if isinstance(given, EnvContext):
            return given.copy_with_overrides()
        return EnvContext(
            dict(given),
            worker_index=self.worker_index,
            num_workers=self.config.num_env_runners,
            remote=self.config.remote_worker_envs,
        )


class RLlibVectorEnv(VectorMultiAgentEnv):  # type: ignore[misc]  # Any where ray is not installed
    """A view of a `VectorEnv` with any groups of agents, for RLlib's new API stack.

    `marlvec.interop.rllib.AgentDicts` describes each agent's entries, and time limits. An env whose episode is
    over ignores its actions in the next call, which returns the next episode's first observations.

    Args:
        envs: The vectorizer, in next-step mode. No other code may step or reset it.
        action_masks: Whether observations are ``{"observations": …, "action_mask": …}`` wherever actions are discrete.

    Raises:
        MissingExtraError: (By the import.) ray is not installed, or has no RLlib.
        ArgumentError: The mode differs, ``copy=False``, or ``on_fault="mask"``.

    Attributes:
        vectorizer: The vectorizer.
        envs: N objects with the spaces of an env, and its ``render``; they cannot be stepped.
        num_envs: N.
        single_observation_spaces, single_action_spaces: Agent to space; without the ``s``, the same as Dict spaces.
        metadata, render_mode: From the envs.
    """

    closed = True  # until the constructor ends; RLlib's __del__ reads it

    def __init__(self, envs: VectorEnv, *, action_masks: bool = False) -> None:
        check_view(envs, "RLlibVectorEnv")
        super().__init__()
        self.vectorizer = envs
        self.num_envs = envs.num_envs
        self.metadata = dict(envs.metadata)
        self.render_mode = render_mode_of(envs)
        self._dicts = AgentDicts(envs, action_masks=action_masks)
        self.single_observation_spaces = self._dicts.observation_spaces
        self.single_action_spaces = self._dicts.action_spaces
        # OrderedDict, since Dict sorts the keys of plain dicts.
        self.single_observation_space = Dict(OrderedDict(self.single_observation_spaces))
        self.single_action_space = Dict(OrderedDict(self.single_action_spaces))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.envs = [_EnvSpaces(self, i) for i in range(self.num_envs)]
        self.closed = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, dict[str, Any]]]]:
        """Begin new episodes in all envs.

        Args:
            seed: One int, spread over the envs by `marlvec.env_seeds`; or one per env; or None.
            options: For all envs.

        Returns:
            ``(obs, infos)`` of agents that must act, one dict per env.
        """
        self.vectorizer.reset_send(seed=seed, options=options)
        given = self._dicts.read(self.vectorizer.recv(), begins=True)
        return given.obs, given.infos

    def step(self, actions: Sequence[Mapping[str, Any]]) -> EnvDicts:
        """Step all envs.

        Args:
            actions: Per env, agent to action, for every agent that must act.

        Returns:
            ``(obs, rewards, terminateds, truncateds, infos)``, one dict per env in each.

        Raises:
            ActionError: An agent must act and has no action, a name is unknown, or an action is not in its space.
        """
        self.vectorizer.step_send(self._dicts.arrays(actions))
        return self._dicts.read(self.vectorizer.recv())

    def render(self) -> tuple[Any, ...]:
        """The frames of each env's ``render()``."""
        return tuple(self.vectorizer.render())

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env."""
        return tuple(self.vectorizer.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env."""
        return tuple(self.vectorizer.get_attr(name))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the vectorizer."""
        self.vectorizer.close()


class _EnvSpaces(MultiAgentEnv):  # type: ignore[misc]  # Any where ray is not installed
    """One env of an `RLlibVectorEnv`, for code that reads its spaces."""

    def __init__(self, view: RLlibVectorEnv, index: int) -> None:
        self.possible_agents = list(view.vectorizer.agents)
        self.agents = list(self.possible_agents)
        self.observation_spaces, self.action_spaces = view.single_observation_spaces, view.single_action_spaces
        self.observation_space, self.action_space = view.single_observation_space, view.single_action_space
        self.metadata, self.render_mode = view.metadata, view.render_mode
        self._view, self._index = view, index
        super().__init__()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> NoReturn:
        raise self._busy("reset")

    def step(self, action_dict: Mapping[str, Any]) -> NoReturn:
        raise self._busy("step")

    def render(self) -> Any:
        return self._view.vectorizer.render(indices=[self._index])[0]

    def _busy(self, call: str) -> BusyError:
        return BusyError(f"{call}() of env {self._index}: one env cannot step alone; {call}() its RLlibVectorEnv")
