"""Splits rows of batches into `SingleAgentEpisode`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.episode.cuts import episodes, ids
from marlvec.collect.episode.single_agent_episode import SingleAgentEpisode
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree

__all__ = ["check_order", "read_agent_episodes"]

IntArray = NDArray[np.int64]
Columns = Mapping[str, Tree]

_NEEDED = ("eps_id", "env_id", "agent_index", "t", "env_t", "next_env_t", "terminated", "truncated")
_IDENTITY = ("eps_id", "env_id", "agent_index")


def read_agent_episodes(batches: Mapping[str, Columns]) -> dict[tuple[int, int], list[SingleAgentEpisode]]:
    """Split policies' rows into agent episodes, ordered by agent and time, by (eps_id, env_id), ascending.

    See `MultiAgentEpisode.of_rows`. An agent's row must begin with the outcome of its previous row.
    """
    found: dict[tuple[int, int], list[SingleAgentEpisode]] = {}
    for policy_id, columns in batches.items():
        for eps_id, env_id, single in _agent_episodes(policy_id, columns):
            found.setdefault((eps_id, env_id), []).append(single)
    if len({eps_id for eps_id, _ in found}) < len(found):
        raise ArgumentError("an eps_id has rows of several envs; split batches of several collectors one by one")
    for key, agent_episodes in found.items():
        agent_episodes.sort(key=lambda single: (single.agent_index, single.first_t))
        check_order(agent_episodes, f"eps_id {key[0]}")
    return dict(sorted(found.items()))


def check_order(agent_episodes: Sequence[SingleAgentEpisode], where: str) -> None:
    """Refuse agent episodes of one agent that overlap."""
    for one, other in pairwise(agent_episodes):
        if one.agent_index == other.agent_index and one.first_t + len(one) > other.first_t:
            raise ArgumentError(f"{where}: agent {one.agent_index} has decision t={other.first_t} more than once")
        if one.agent_index == other.agent_index and one.env_stop > other.env_start:
            raise ArgumentError(
                f"{where}: agent {one.agent_index} decides in env step {other.env_start}, and the decision before has "
                f"its outcome in env step {one.env_stop} only"
            )


def _agent_episodes(policy_id: str, columns: Columns) -> Iterator[tuple[int, int, SingleAgentEpisode]]:
    why = f"an episode of policy {policy_id!r}"
    named = {name: ids(columns, name, why) for name in _NEEDED}
    if "obs" not in columns or "next_obs" not in columns:
        raise ArgumentError(f"{why} needs the columns 'obs' and 'next_obs'; the columns are {list(columns)}")
    episodes(columns)  # raises if an eps_id belongs to several episodes
    order = np.lexsort((named["t"], named["agent_index"], named["eps_id"]))
    if "phantom" in columns:
        order = order[~ids(columns, "phantom", why).astype(np.bool_)[order]]
    if not len(order):
        return
    if (order != np.arange(len(named["t"]))[: len(order)]).any():
        columns = {name: map_tree(lambda leaf: leaf[order], column) for name, column in columns.items()}
        named = {name: column[order] for name, column in named.items()}
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (named["terminated"] | named["truncated"])[: len(order) - 1]
    for name, step in (("eps_id", 0), ("agent_index", 0), ("t", 1)):
        values = named[name][: len(order)]
        begins[1:] |= values[1:] != values[:-1] + step
    rest = {name: column for name, column in columns.items() if name not in _IDENTITY}
    for start, stop in pairwise([*np.flatnonzero(begins).tolist(), len(order)]):
        rows = {name: _part(column, start, stop) for name, column in rest.items()}
        eps_id, env_id, agent_index = (int(named[name][start]) for name in _IDENTITY)
        yield eps_id, env_id, SingleAgentEpisode.of_rows(agent_index, policy_id, rows)


def _part(column: Tree, start: int, stop: int) -> Tree:
    return map_tree(lambda leaf: leaf[start:stop], column)
