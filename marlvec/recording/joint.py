"""`joint_rows`: joins rows of several agents into one row per moment, with an agent axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, tree_leaves, zip_trees

__all__ = ["joint_columns", "joint_rows"]

_NEEDED = ("eps_id", "env_id", "env_t", "agent_index")
_OF_MOMENT = ("eps_id", "env_id", "env_t", "state", "next_state")
_MADE_ANEW = ("t", "unroll_id", "agent_index", "acting")

Form = list[tuple[str, np.dtype[Any], tuple[int, ...]]]


def joint_columns(columns: Mapping[str, Sequence[str]], chosen: Sequence[str] | None) -> list[str]:
    """Return the columns to read: the chosen ones, which every policy must have, or all that every policy has."""
    common = [name for name in next(iter(columns.values()), ()) if all(name in own for own in columns.values())]
    wanted = common if chosen is None else list(dict.fromkeys([*chosen, *_NEEDED]))
    for policy_id, own in columns.items():
        if missing := [name for name in (*wanted, *_NEEDED) if name not in own]:
            raise ArgumentError(f"joint(): policy {policy_id!r} has no columns {missing}; it has {list(own)}")
    return wanted


def joint_rows(
    batch: MultiAgentBatch, agents: Sequence[int], names: Sequence[str], first: int
) -> Iterator[SampleBatch]:
    """Yield one batch per episode, one row per moment: an env step at which some agent decided.

    ``batch`` has rows of whole episodes; ``agents`` are the agent axis; ``names`` the columns to join; ``first`` is the
    first episode's ``unroll_id``. Refuses agents that differ in a column's structure, dtype or shape.
    """
    places = np.full(max([*agents, *(int(rows["agent_index"].max(initial=0)) for rows in batch.values())]) + 1, -1)
    places[list(agents)] = np.arange(len(agents))
    parts = []
    for policy_id, rows in batch.items():
        chosen = rows.take(np.flatnonzero(places[rows["agent_index"]] >= 0))
        if len(chosen):
            parts.append((policy_id, chosen))
    if not parts:
        return
    keys = np.concatenate([np.stack([rows["eps_id"], rows["env_t"]], axis=1) for _, rows in parts])
    moments, moment_B = np.unique(keys, axis=0, return_inverse=True)
    moment_B = moment_B.reshape(-1)
    agent_B = np.concatenate([places[rows["agent_index"]] for _, rows in parts])
    shape = len(moments), len(agents)
    acting = np.zeros(shape, np.bool_)
    acting[moment_B, agent_B] = True
    columns: dict[str, Tree] = {}
    for name in names:
        if name in _MADE_ANEW:
            continue
        leaves = _joined(name, parts)
        where = (moment_B,) if name in _OF_MOMENT else (moment_B, agent_B)
        columns[name] = zip_trees(partial(_scatter, where=where, shape=shape), leaves)
    begins = [0, *(np.flatnonzero(np.diff(moments[:, 0])) + 1).tolist(), len(moments)]
    for k, (start, stop) in enumerate(pairwise(begins)):
        length = stop - start
        episode = SampleBatch({**columns, "acting": acting}).slice(start, stop)
        yield episode.replace(t=np.arange(length), unroll_id=np.full(length, first + k))


def _joined(name: str, parts: Sequence[tuple[str, SampleBatch]]) -> list[Tree]:
    """Join one column of all policies, after checking that dtypes and shapes agree."""
    first_id, first = parts[0]
    expected = _form(first[name])
    for policy_id, rows in parts[1:]:
        if (got := _form(rows[name])) != expected:
            raise ArgumentError(
                f"joint(): column {name!r} of policy {policy_id!r} is {_said(got)}, that of {first_id!r} "
                f"{_said(expected)}: choose columns= or agents= that fit together"
            )
    return [rows[name] for _, rows in parts]


def _form(column: Tree) -> Form:
    return [(path, leaf.dtype, leaf.shape[1:]) for path, leaf in tree_leaves(column)]


def _said(form: Form) -> str:
    return ", ".join(f"{path or 'one array'}: {dtype} of {shape}" for path, dtype, shape in form)


def _scatter(pieces: Sequence[NDArray[Any]], where: tuple[NDArray[Any], ...], shape: tuple[int, int]) -> NDArray[Any]:
    values = np.concatenate(pieces)
    found = np.zeros((*shape[: len(where)], *values.shape[1:]), values.dtype)
    found[where] = values
    return found
