"""`Replay`: replays logged episodes in an external vectorizer, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.connectors.action.valid_actions import EXECUTED, EXECUTED_MISSING
from marlvec.errors import ArgumentError, CheckpointError, EpisodesFull
from marlvec.external.exchange.row import Ending
from marlvec.external.external_env import ExternalEnv
from marlvec.external.vector_env import ExternalVectorEnv
from marlvec.trees import map_tree

__all__ = ["Dataset", "EpisodeLog", "LoggedStep", "read_logs", "Replay", "replay"]

Dataset = Any
"""A `MultiAgentBatch` or `SampleBatch`, a saved file of either, a list of these, a recording, or a Minari dataset."""
_NEEDED = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
_IN_TIME = ("t", "env_t", "next_env_t", "eps_id", "agent_index")


@dataclass(slots=True)
class LoggedStep:
    """Everything that happened between two env steps, by agent name."""

    rewards: dict[str, float] = field(default_factory=dict)  # since the previous step
    ended: dict[str, Ending] = field(default_factory=dict)
    obs: dict[str, Any] = field(default_factory=dict)  # of the agents that act
    actions: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)  # where known


@dataclass(frozen=True, slots=True)
class EpisodeLog:
    """One episode."""

    moments: Sequence[LoggedStep]  # in order; no agent acts in the last one
    as_policy: bool  # its actions are a policy's outputs, and not the actions that the env received


def read_logs(dataset: Dataset, agents: Sequence[str]) -> Callable[[], Iterator[EpisodeLog]]:
    """Return a function that iterates over a dataset's episodes, from the first one at each call.

    An episode without an end is truncated at its last row. An episode that lacks rows in the middle raises
    `ArgumentError` when it is reached.
    """
    if hasattr(dataset, "iterate_episodes"):
        if len(agents) != 1:
            raise ArgumentError(f"dataset: Minari data has one agent, got agents {list(agents)}")
        return lambda: (_of_arrays(episode, agents[0]) for episode in dataset.iterate_episodes())
    if hasattr(dataset, "episode_batches"):

        def read_groups() -> Iterator[EpisodeLog]:
            for group in dataset.episode_batches():
                _check(group, agents)
                yield from _of_batch(group, agents)

        return read_groups
    batches = [_batch(part) for part in (dataset if isinstance(dataset, (list, tuple)) else [dataset])]
    if not batches:
        raise ArgumentError("dataset: expected episodes, got an empty list")
    batch = batches[0] if len(batches) == 1 else MultiAgentBatch.concat(batches)
    _check(batch, agents)
    return lambda: _of_batch(batch, agents)


def _batch(part: Any) -> MultiAgentBatch:
    if isinstance(part, (str, PathLike)):
        part = _load(Path(part))
    if isinstance(part, SampleBatch):
        return MultiAgentBatch({"main": part}, env_steps=0)
    if isinstance(part, MultiAgentBatch):
        return part
    raise ArgumentError(
        f"dataset: expected a MultiAgentBatch or SampleBatch, a file that one of them saved, a list of these, or a "
        f"Minari dataset; got {type(part).__name__}"
    )


def _load(path: Path) -> MultiAgentBatch | SampleBatch:
    try:
        return MultiAgentBatch.load(path)
    except CheckpointError:
        if not path.is_file():
            raise
        return SampleBatch.load(path)  # raises if the file holds neither


def _check(batch: MultiAgentBatch, agents: Sequence[str]) -> None:
    for policy_id, rows in batch.items():
        if missing := [name for name in (*_NEEDED, *_IN_TIME) if name not in rows]:
            raise ArgumentError(
                f"rows of policy {policy_id!r} lack the columns {missing}; save batches with all of their columns"
            )
        if np.any(rows.get(EXECUTED_MISSING, False)):
            raise ArgumentError(
                f"rows of policy {policy_id!r} are marked in {EXECUTED_MISSING!r}: their executed actions are "
                f"unknown; put noise and masks before the connectors that convert actions"
            )
        if (most := int(rows["agent_index"].max(initial=0))) >= len(agents):
            raise ArgumentError(
                f"rows of policy {policy_id!r} have agent number {most}, but the agents are {list(agents)}"
            )


def _of_batch(batch: MultiAgentBatch, agents: Sequence[str]) -> Iterator[EpisodeLog]:
    ids = [rows["eps_id"] for rows in batch.values()]
    for eps_id in np.unique(np.concatenate(ids)).tolist() if ids else ():
        yield EpisodeLog(_moments(eps_id, batch, agents), as_policy=True)


def _moments(eps_id: int, batch: Mapping[str, SampleBatch], agents: Sequence[str]) -> list[LoggedStep]:
    moments: dict[int, LoggedStep] = {}
    cut: dict[str, Ending] = {}
    for rows in batch.values():
        mine = np.flatnonzero(rows["eps_id"] == eps_id)
        for a in np.unique(rows["agent_index"][mine]).tolist():
            indices = mine[rows["agent_index"][mine] == a]
            indices = indices[np.argsort(rows["t"][indices], kind="stable")]
            _check_whole(rows, indices, f"episode {eps_id}, agent {agents[a]!r}")
            for i in indices.tolist():
                _note(rows, i, agents[a], moments)
            last = int(indices[-1])
            if not (rows["terminated"][last] or rows["truncated"][last]):
                cut[agents[a]] = (_at(rows["next_obs"], last), False, True)
    moments[max(moments)].ended.update(cut)
    return [moments[t] for t in sorted(moments)]


def _check_whole(rows: SampleBatch, indices: NDArray[np.int64], whose: str) -> None:
    if (gaps := np.flatnonzero(np.diff(rows["t"][indices]) != 1)).size:
        t = int(rows["t"][indices[gaps[0]]])
        raise ArgumentError(f"{whose}: rows are missing between its decision number {t} and the next one")


def _note(rows: SampleBatch, i: int, agent: str, moments: dict[int, LoggedStep]) -> None:
    begins = moments.setdefault(int(rows["env_t"][i]), LoggedStep())
    actions = rows[EXECUTED] if EXECUTED in rows else rows["actions"]
    begins.obs[agent], begins.actions[agent] = _at(rows["obs"], i), _at(actions, i)
    if "action_mask" in rows:
        begins.masks[agent] = rows["action_mask"][i]
    ends = moments.setdefault(int(rows["next_env_t"][i]), LoggedStep())
    ends.rewards[agent] = float(rows["rewards"][i])
    terminated, truncated = bool(rows["terminated"][i]), bool(rows["truncated"][i])
    if terminated or truncated:
        is_missing = "next_obs_missing" in rows and rows["next_obs_missing"][i]
        ends.ended[agent] = (None if is_missing else _at(rows["next_obs"], i), terminated, truncated)


def _of_arrays(episode: Any, agent: str) -> EpisodeLog:
    """Convert a Minari episode: arrays over time T, observations T + 1."""
    length = len(episode.rewards)
    moments = [
        LoggedStep(
            rewards={agent: float(episode.rewards[t - 1])} if t else {},
            obs={agent: _at(episode.observations, t)},
            actions={agent: _at(episode.actions, t)},
        )
        for t in range(length)
    ]
    terminated, truncated = bool(episode.terminations[-1]), bool(episode.truncations[-1])
    ending = (_at(episode.observations, length), terminated, truncated or not terminated)
    return EpisodeLog([*moments, LoggedStep({agent: float(episode.rewards[-1])}, {agent: ending})], as_policy=False)


def _at(tree: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i], tree)


class Replay(ExternalEnv):
    """Replays logged episodes, as many at a time as there are free slots. Made by `replay`.

    Args:
        envs: The vectorizer.
        dataset: The episodes.
        repeat: How often to replay all; None: until stopped.
        training_enabled: Whether their rows go into batches.
    """

    def __init__(
        self, envs: ExternalVectorEnv, dataset: Dataset, *, repeat: int | None = 1, training_enabled: bool = True
    ) -> None:
        if repeat is not None and repeat < 1:
            raise ArgumentError(f"repeat: expected at least 1, or None, got {repeat}")
        super().__init__(envs, dicts=True)
        self._read = read_logs(dataset, self.gateway.agents)
        self._repeat, self._training_enabled = repeat, training_enabled

    def run(self) -> None:
        """Replay all episodes."""
        logs = self._logs()
        playing: list[Iterator[None]] = []
        todo = next(logs, None)
        while (todo is not None or playing) and not self.stopping:
            if todo is not None and len(playing) < self.gateway.num_envs:
                try:  # other drivers may have taken the remaining slots
                    playing.append(self._play(todo, timeout=0.0 if playing else None))
                    next(playing[-1])
                except EpisodesFull:
                    playing.pop()
                else:
                    todo = next(logs, None)
                    continue
            # In turns, so that the collector finds rows of all episodes.
            playing = [play for play in playing if next(play, self) is not self]

    def _logs(self) -> Iterator[EpisodeLog]:
        rounds = 0
        while self._repeat is None or rounds < self._repeat:
            before = rounds
            for log in self._read():
                rounds = before + 1
                yield log
            if rounds == before:
                return  # the dataset has no episode

    def _play(self, log: EpisodeLog, timeout: float | None) -> Iterator[None]:
        """Begin an episode, then log one row each time."""
        episode = self.start_episode(training_enabled=self._training_enabled, timeout=timeout)
        yield
        for moment in log.moments:
            if moment.rewards:
                self.log_returns(episode, moment.rewards)
            final_obs = {agent: obs for agent, (obs, _, _) in moment.ended.items()}
            terminated = {agent: over for agent, (_, over, _) in moment.ended.items()}
            truncated = {agent: cut for agent, (_, _, cut) in moment.ended.items()}
            if moment is log.moments[-1]:
                self.end_episode(episode, final_obs, terminated=terminated, truncated=truncated)
            elif moment.ended:
                self.end_agents(episode, final_obs, terminated=terminated, truncated=truncated)
            if moment.obs:
                self.log_action(
                    episode, moment.obs, moment.actions, masks=moment.masks or None, as_policy=log.as_policy
                )
                yield


def replay(
    dataset: Dataset, envs: ExternalVectorEnv, *, repeat: int | None = 1, training_enabled: bool = True
) -> Replay:
    """Replay logged episodes in a vectorizer; the rows hold the log's actions, not a policy's.

        envs = marlvec.external.make({"agent": (observations, actions)}, num_envs=8)
        with replay("run.npz", envs):
            batch = collector.collect(episodes=100)

    They are treated as live episodes: connectors, mapping, metrics, batches. Once all have been replayed, a call that
    waits for more raises `DriverGone`.

    Observations and actions of a saved batch are on the policy's side of the connectors that collected it: replay them
    with agent connectors that do not repeat that work. If exploration changed actions, the executed ones are replayed
    (``actions_executed``), and exploration does not change them. Columns that policies added (``logp``, …) are
    meaningless, as in every off-policy row; only a recurrent policy is called, for its state (see `RnnState`). Actions
    of a Minari dataset are those that the env received; see `Episode.log_action`.

    ``t``, ``env_t`` and ``next_env_t`` equal the log's if the log has the episode from its reset and a row of some
    agent at each env step. Otherwise they count from the log's first row, without env steps at which no agent of the
    log decides.

    Args:
        dataset: A `MultiAgentBatch` or `SampleBatch`, a saved file of either (``.npz``, ``.parquet``), a list of these
            (which may hold parts of the same episodes), or a Minari dataset.
        envs: The vectorizer.
        repeat: How often to replay all; None: until stopped.
        training_enabled: False: their rows are in no batch, but pass through everything else.

    Returns:
        A `Replay`, for use in a ``with`` block.

    Raises:
        ArgumentError: Not a dataset, or it does not fit the agents; see `read_logs`. An episode that lacks rows raises
            when it is reached.
        CheckpointError: A file cannot be read.
    """
    return Replay(envs, dataset, repeat=repeat, training_enabled=training_enabled)
