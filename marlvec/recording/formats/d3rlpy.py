"""d3rlpy's datasets of recordings."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.collect.batch import SampleBatch
from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.recording.dataset import RecordedDataset
from marlvec.recording.recorded_rows import executed_column

__all__ = ["to_mdp_dataset"]

# d3rlpy 2.8 asks for gymnasium 1.0.0 exactly, and runs with later ones: an extra could not be installed.
_INSTALL_D3RLPY = (
    "pip install --no-deps d3rlpy; pip install torch gym h5py scikit-learn structlog colorama dataclasses-json"
)
_NEEDED = ("obs", "rewards", "terminated", "truncated", "t", "eps_id", "agent_index")


def to_mdp_dataset(data: RecordedDataset, policy_id: str = "main", **options: Any) -> Any:
    """Make a d3rlpy dataset of one policy's rows, in memory.

    Each agent's episode is an episode; an agent that ended and came back has several. ``terminals`` are True where the
    agent terminated, ``timeouts`` where its recorded rows end otherwise: truncated, cut off, or followed by missing
    rows. d3rlpy has no final observations, so it does not use the last decision before a timeout. Actions are
    ``actions_executed`` if recorded, else ``actions``. Ints are discrete actions, from 0: of a ``Discrete(n, start)``,
    ``start`` is subtracted. Floats are continuous actions, also if they are whole numbers.

        with marlvec.load_dataset("runs/seek") as data:
            dataset = to_mdp_dataset(data)
        d3rlpy.algos.DiscreteCQLConfig().create().fit(dataset, n_steps=10_000)

    Args:
        data: The recording.
        policy_id: The policy.
        options: Arguments of ``d3rlpy.dataset.MDPDataset``: ``action_size``, ``transition_picker`` and so on. The
            default ``action_size`` comes from the agents' action spaces, if these are known and of equal size.

    Returns:
        A ``d3rlpy.dataset.MDPDataset``.

    Raises:
        MissingExtraError: d3rlpy is not installed.
        ArgumentError: Observations are not one array; actions are neither one int nor floats, or ints below 0 that no
            ``Discrete`` explains; executed actions are marked as missing in some rows; or there are no rows.
        KeyError: The policy is unknown.
        CheckpointError: A file is damaged; names it.
    """
    library = import_extra("d3rlpy.dataset", "to_mdp_dataset()", _INSTALL_D3RLPY)
    name = executed_column(data[policy_id], "to_mdp_dataset()")
    groups = [group[policy_id] for group in data.episode_batches(columns=[*_NEEDED, name]) if policy_id in group]
    if not groups:
        raise ArgumentError(f"to_mdp_dataset(): expected rows of policy {policy_id!r}, there are none")
    parts = [_with_timeouts(rows) for rows in groups]
    rows = SampleBatch.concat(parts)
    obs, actions = _array(rows, "obs"), _array(rows, name)
    if is_discrete := actions.dtype.kind in "iu":
        actions = actions.reshape(len(actions), -1)
    if actions.dtype.kind not in "iuf" or (is_discrete and actions.shape[1] != 1):
        got = f"{actions.shape[1:]} of {actions.dtype}"
        raise ArgumentError(f"to_mdp_dataset(): expected one int or several floats an action, got {got}")
    kinds = import_extra("d3rlpy.constants", "to_mdp_dataset()", _INSTALL_D3RLPY).ActionSpace
    options = {"action_space": kinds.DISCRETE if is_discrete else kinds.CONTINUOUS} | options
    if is_discrete:
        actions, size = _from_0(data, rows["agent_index"], actions)
        options = ({} if size is None else {"action_size": size}) | options
    return library.MDPDataset(
        obs,
        actions.reshape(len(actions), -1),
        np.asarray(rows["rewards"], np.float32),
        rows["terminated"].astype(np.float32),
        rows["timeouts"].astype(np.float32),
        **options,
    )


def _with_timeouts(rows: SampleBatch) -> SampleBatch:
    """Sort rows by episode, agent and time; end each run of rows without gaps or ends with a terminal or a timeout."""
    rows = rows.take(np.lexsort([rows["t"], rows["agent_index"], rows["eps_id"]]))
    keys = np.stack([rows["eps_id"], rows["agent_index"], rows["t"] - np.arange(len(rows))])
    last_B = np.append((keys[:, 1:] != keys[:, :-1]).any(axis=0), True)
    last_B |= rows["terminated"] | rows["truncated"]  # an agent may end, and come back in the same episode
    return rows.replace(timeouts=last_B & ~rows["terminated"])


def _array(rows: SampleBatch, name: str) -> NDArray[Any]:
    column = rows[name]
    if not isinstance(column, np.ndarray):
        raise ArgumentError(f"to_mdp_dataset(): column {name!r}: expected one array, got a {type(column).__name__}")
    return column


def _from_0(data: RecordedDataset, agent_B: NDArray[Any], actions: NDArray[Any]) -> tuple[NDArray[Any], int | None]:
    """Return discrete actions (B, 1) that count from 0, and their number; None if agents differ or it is unknown."""
    agents, found = data.agents or (), actions.copy()
    sizes: set[int | None] = set()
    for k in np.unique(agent_B).tolist():
        own_B, space = agent_B == k, data.action_space(agents[k]) if k < len(agents) else None
        own = actions[own_B]
        if not isinstance(space, Discrete) or (own < space.start).any() or (own >= space.start + space.n).any():
            sizes.add(None)  # connectors may have given the policy another space
            continue
        found[own_B] = own - space.start
        sizes.add(int(space.n))
    if (found < 0).any():
        raise ArgumentError(f"to_mdp_dataset(): expected discrete actions from 0, got {int(found.min())}")
    return found, sizes.pop() if len(sizes) == 1 else None
