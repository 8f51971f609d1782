"""`Replay`: feeds logged episodes through an external vectorizer, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, CheckpointError, EpisodesFull
from marlvec.external.exchange.row import Ending
from marlvec.external.external_env import ExternalEnv
from marlvec.external.vector_env import ExternalVectorEnv
from marlvec.trees import map_tree

__all__ = ["Dataset", "EpisodeLog", "LoggedStep", "read_logs", "Replay", "replay"]

Dataset = Any
"""A `MultiAgentBatch` or `SampleBatch`, the file of one, a list of these, a recording, or a Minari dataset."""
_NEEDED = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
_IN_TIME = ("t", "env_t", "next_env_t", "eps_id", "agent_index")


@dataclass(slots=True)
class LoggedStep:
    """What happened between two env steps; everything by agent name.

    Attributes:
        rewards: Those since the moment before.
        ended: Who ended, and how.
        obs: What those saw who acted.
        actions: What they did.
        masks: What they were allowed, of those for which it is known.
    """

    rewards: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Ending] = field(default_factory=dict)
    obs: dict[str, Any] = field(default_factory=dict)
    actions: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeLog:
    """One episode.

    Attributes:
        moments: In order; no agent acts in the last one.
        as_policy: Whether its actions are what a policy said, and not what the env was given.
    """

    moments: Sequence[LoggedStep]
    as_policy: bool


def read_logs(dataset: Dataset, agents: Sequence[str]) -> Callable[[], Iterator[EpisodeLog]]:
    """What goes through the episodes of a dataset, from the first one, each time it is called.

    An episode whose end is not there is truncated where the data ends. One of which rows in the middle are missing
    raises `ArgumentError` when it is its turn.

    Args:
        dataset: The dataset.
        agents: Names of the agents, in order of the agent axis.

    Raises:
        ArgumentError: It is no dataset; a column is missing; or it is of more agents, or of other ones.
        CheckpointError: A file cannot be read.
    """
    if hasattr(dataset, "iterate_episodes"):
        if len(agents) != 1:
            raise ArgumentError(f"a Minari dataset is of one agent; there are {list(agents)}")
        return lambda: (_of_arrays(episode, agents[0]) for episode in dataset.iterate_episodes())
    if hasattr(dataset, "episode_batches"):

        def read_groups() -> Iterator[EpisodeLog]:
            for group in dataset.episode_batches():
                _check(group, agents)
                yield from _of_batch(group, agents)

        return read_groups
    batches = [_batch(part) for part in (dataset if isinstance(dataset, (list, tuple)) else [dataset])]
    if not batches:
        raise ArgumentError("expected a dataset, got an empty list")
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
        f"expected a MultiAgentBatch or SampleBatch, a file that one of them saved, a list of these, or a Minari "
        f"dataset; got {type(part).__name__}"
    )


def _load(path: Path) -> MultiAgentBatch | SampleBatch:
    try:
        return MultiAgentBatch.load(path)
    except CheckpointError:
        if not path.is_file():
            raise
        return SampleBatch.load(path)  # says what is wrong, if that is none either


def _check(batch: MultiAgentBatch, agents: Sequence[str]) -> None:
    for policy_id, rows in batch.items():
        if missing := [name for name in (*_NEEDED, *_IN_TIME) if name not in rows]:
            raise ArgumentError(f"rows of policy {policy_id!r} lack the columns {missing}, so they are no episodes")
        if (most := int(rows["agent_index"].max(initial=0))) >= len(agents):
            raise ArgumentError(f"rows of policy {policy_id!r} are of agent number {most}; there are {list(agents)}")


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
            own = mine[rows["agent_index"][mine] == a]
            own = own[np.argsort(rows["t"][own], kind="stable")]
            _check_whole(rows, own, f"episode {eps_id}, agent {agents[a]!r}")
            for i in own.tolist():
                _note(rows, i, agents[a], moments)
            last = int(own[-1])
            if not (rows["terminated"][last] or rows["truncated"][last]):
                cut[agents[a]] = (_at(rows["next_obs"], last), False, True)
    moments[max(moments)].ended.update(cut)
    return [moments[t] for t in sorted(moments)]


def _check_whole(rows: SampleBatch, own: NDArray[np.int64], whose: str) -> None:
    if (gaps := np.flatnonzero(np.diff(rows["t"][own]) != 1)).size:
        t = int(rows["t"][own[gaps[0]]])
        raise ArgumentError(f"{whose}: rows are missing between its decision number {t} and the next that is there")


def _note(rows: SampleBatch, i: int, agent: str, moments: dict[int, LoggedStep]) -> None:
    begins = moments.setdefault(int(rows["env_t"][i]), LoggedStep())
    actions = rows["actions_executed"] if "actions_executed" in rows else rows["actions"]
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
    """One of Minari's: arrays over time, of observations one more than of the rest."""
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
    """Plays logged episodes again, as many at a time as there are free slots. Made by `replay`.

    Args:
        envs: Where.
        dataset: The episodes.
        repeat: How often; None: until it is stopped.
        training_enabled: Whether their rows go into batches.
    """

    def __init__(
        self, envs: ExternalVectorEnv, dataset: Dataset, *, repeat: int | None = 1, training_enabled: bool = True
    ) -> None:
        if repeat is not None and repeat < 1:
            raise ArgumentError(f"repeat must be at least 1, or None, got {repeat}")
        super().__init__(envs, dicts=True)
        self._read = read_logs(dataset, self.gateway.agents)
        self._repeat, self._training_enabled = repeat, training_enabled

    def run(self) -> None:
        """Play them all."""
        logs = self._logs()
        playing: list[Iterator[None]] = []
        todo = next(logs, None)
        while (todo is not None or playing) and not self.stopping:
            if todo is not None and len(playing) < self.gateway.num_envs:
                try:  # others may have taken the slots that are left
                    playing.append(self._play(todo, timeout=0.0 if playing else None))
                    next(playing[-1])
                except EpisodesFull:
                    playing.pop()
                else:
                    todo = next(logs, None)
                    continue
            # In turns, so that the collector finds rows of all of them.
            playing = [play for play in playing if next(play, self) is not self]

    def _logs(self) -> Iterator[EpisodeLog]:
        rounds = 0
        while self._repeat is None or rounds < self._repeat:
            before = rounds
            for log in self._read():
                rounds = before + 1
                yield log
            if rounds == before:
                return  # there is none in it

    def _play(self, log: EpisodeLog, timeout: float | None) -> Iterator[None]:
        """Begin an episode, and then say one row each time."""
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
    """Feed logged episodes to the vectorizer, as rows whose actions are the log's, and not a policy's.

        envs = marlvec.external.make({"agent": (observations, actions)}, num_envs=8)
        with replay("run.npz", envs):
            batch = collector.collect(episodes=100)

    Everything applies to them as to episodes that run: connectors, mapping, metrics, batches. When all have been played
    and a call waits for more, it raises `DriverGone`.

    Observations and actions of a saved batch are those on the policy's side of the connectors they were collected
    with: let the agent connectors pass on what these have done already. Where exploration changed actions, those that
    were executed are replayed (``actions_executed``), and exploration leaves them alone. What policies added
    (``logp``, …) says nothing, as in every row that is off-policy; only a recurrent policy is asked, for its state (see
    `RnnState`). Actions of a Minari dataset are those that the env was given; see `Episode.log_action`.

    ``t``, ``env_t`` and ``next_env_t`` are the log's where it has an episode from its reset, and the row of some agent
    at each env step. Otherwise they count from the first row of the log, and leave out env steps at which no agent of
    the log decides.

    Args:
        dataset: A `MultiAgentBatch` or `SampleBatch`, a file that one saved (``.npz``, ``.parquet``), a list of these,
            which may hold parts of the same episodes, or a Minari dataset.
        envs: Where they are played.
        repeat: How often to play them all; None: until it is stopped.
        training_enabled: False: their rows go through everything, and into no batch.

    Returns:
        A `Replay`, to be used in a ``with`` block.

    Raises:
        ArgumentError: It is no dataset, or does not fit; see `read_logs`. An episode that lacks rows raises when it
            is its turn.
        CheckpointError: A file cannot be read.
    """
    return Replay(envs, dataset, repeat=repeat, training_enabled=training_enabled)
