"""Logged episodes: what was seen, done and paid, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.external.row import Ending
from marlvec.trees import map_tree

__all__ = ["Dataset", "Log", "Moment", "read_logs"]

Dataset = Any
"""A `MultiAgentBatch` or `SampleBatch`, the file of one, a list of these, or a Minari dataset."""

_NEEDED = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
_IN_TIME = ("t", "env_t", "next_env_t", "eps_id", "agent_index")


@dataclass(slots=True)
class Moment:
    """What happened between two env steps; everything by agent name.

    Attributes:
        rewards: What was paid since the moment before.
        ended: Who ended, and how.
        obs: What those saw who acted.
        actions: What they did.
        masks: What they were allowed, of those of whom it is known.
    """

    rewards: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Ending] = field(default_factory=dict)
    obs: dict[str, Any] = field(default_factory=dict)
    actions: dict[str, Any] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Log:
    """One episode.

    Attributes:
        moments: In order; nobody acts in the last one.
        as_policy: Whether its actions are what a policy said, and not what the env was given.
    """

    moments: Sequence[Moment]
    as_policy: bool


def read_logs(dataset: Dataset, agents: Sequence[str]) -> Callable[[], Iterator[Log]]:
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
    if path.suffix == ".parquet":
        return SampleBatch.load(path)
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


def _of_batch(batch: MultiAgentBatch, agents: Sequence[str]) -> Iterator[Log]:
    ids = [rows["eps_id"] for rows in batch.values()]
    for eps_id in np.unique(np.concatenate(ids)).tolist() if ids else ():
        yield Log(_moments(eps_id, batch, agents), as_policy=True)


def _moments(eps_id: int, batch: Mapping[str, SampleBatch], agents: Sequence[str]) -> list[Moment]:
    moments: dict[int, Moment] = {}
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


def _note(rows: SampleBatch, i: int, agent: str, moments: dict[int, Moment]) -> None:
    begins = moments.setdefault(int(rows["env_t"][i]), Moment())
    begins.obs[agent], begins.actions[agent] = _at(rows["obs"], i), _at(rows["actions"], i)
    if "action_mask" in rows:
        begins.masks[agent] = rows["action_mask"][i]
    ends = moments.setdefault(int(rows["next_env_t"][i]), Moment())
    ends.rewards[agent] = float(rows["rewards"][i])
    terminated, truncated = bool(rows["terminated"][i]), bool(rows["truncated"][i])
    if terminated or truncated:
        is_missing = "next_obs_missing" in rows and rows["next_obs_missing"][i]
        ends.ended[agent] = (None if is_missing else _at(rows["next_obs"], i), terminated, truncated)


def _of_arrays(episode: Any, agent: str) -> Log:
    """One of Minari's: arrays over time, of observations one more than of the rest."""
    length = len(episode.rewards)
    moments = [
        Moment(
            rewards={agent: float(episode.rewards[t - 1])} if t else {},
            obs={agent: _at(episode.observations, t)},
            actions={agent: _at(episode.actions, t)},
        )
        for t in range(length)
    ]
    terminated, truncated = bool(episode.terminations[-1]), bool(episode.truncations[-1])
    ending = (_at(episode.observations, length), terminated, truncated or not terminated)
    return Log([*moments, Moment({agent: float(episode.rewards[-1])}, {agent: ending})], as_policy=False)


def _at(tree: Any, i: int) -> Any:
    return map_tree(lambda leaf: leaf[i], tree)
