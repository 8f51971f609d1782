"""Recordings as TorchRL's replay buffers and d3rlpy's datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.collect.batch import SampleBatch
from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.recording.dataset import RecordedDataset
from marlvec.recording.rows import RecordedRows, executed_column
from marlvec.trees import Tree, map_tree, tree_leaves

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


_ROWS = 1 << 16
_INSTALL_TORCHRL = 'pip install "marlvec[torchrl]"'
_NEXT = {"rewards": "reward", "terminated": "terminated", "truncated": "truncated", "next_obs": "observation"}
_TRAJECTORY = ("unroll_id", "eps_id", "agent_index", "t")
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def to_replay_buffer(
    rows: RecordedRows, batch_size: int, *, columns: Sequence[str] = (), storage: Any = None, **options: Any
) -> Any:
    """Make a TorchRL replay buffer of one policy's rows, with the names that TorchRL's losses read.

    ``observation`` (n, …); ``action`` (n, …), which is ``actions_executed`` if recorded, else ``actions``; under
    ``next``, ``observation`` (n, …), ``reward`` (n, 1) float32, and ``terminated``, ``truncated`` and ``done`` (n, 1).
    Rows are copied some ten thousand at a time. PyTorch cannot index uint16, uint32 and uint64: these become int32,
    int64 and int64.

    ``("collector", "traj_ids")`` (n,) numbers the trajectories: consecutive decisions of one agent, until its end or
    the end of a recorded batch. TorchRL's ``SliceSampler(slice_len=…)`` finds it by itself. Do not give it
    ``end_key=("next", "done")``: a batch ends without ``done``, and its slices would mix agents.

        with marlvec.load_dataset("runs/seek") as data:
            buffer = to_replay_buffer(data["main"], batch_size=256)
        loss = dqn_loss(buffer.sample())

    Args:
        rows: A policy's rows.
        batch_size: Rows of a sample.
        columns: Names of further columns, which keep their names.
        storage: TorchRL's storage of the rows; None: memory-mapped files, ``LazyMemmapStorage(len(rows))``.
        options: Arguments of ``TensorDictReplayBuffer``: ``sampler``, ``prefetch``, ``transform`` and so on.

    Returns:
        A ``torchrl.data.TensorDictReplayBuffer`` that holds all rows.

    Raises:
        MissingExtraError: torchrl is not installed.
        ArgumentError: The recording has no rows of the policy; executed actions are marked as missing in some; a number
            of dtype uint64 is 2**63 or more; or rows of a column have no entries, as of shape (0,), which memory-mapped
            files cannot hold.
        KeyError: A column does not exist.
    """
    data = import_extra("torchrl.data", "to_replay_buffer()", _INSTALL_TORCHRL)
    torch = import_extra("torch", "to_replay_buffer()", _INSTALL_TORCHRL)
    if not len(rows):
        raise ArgumentError("to_replay_buffer(): expected at least one row")
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyMemmapStorage(len(rows)) if storage is None else storage, batch_size=batch_size, **options
    )
    keys = [name for name in _TRAJECTORY if name in rows]
    now = {"obs": "observation", executed_column(rows, "to_replay_buffer()"): "action"}
    needed = [*now, *_NEXT, *columns, *keys]
    last, number = None, -1
    for start, batch in zip(range(0, len(rows), _ROWS), rows.batches(_ROWS, needed), strict=True):
        fitting = batch.replace(**{name: _fitting(name, batch[name], storage is None) for name in needed})
        found = _tensordict(fitting, now, columns)
        if len(keys) == len(_TRAJECTORY):
            # One column a row; t minus the row's number is the same along a trajectory.
            row_keys = np.stack([batch[name] for name in keys])
            row_keys[-1] -= np.arange(start, start + len(batch))
            before = np.full((len(keys), 1), -1) if last is None else last
            begins = (np.diff(row_keys, axis=1, prepend=before) != 0).any(axis=0)
            begins[0] |= last is None
            traj_ids = number + np.cumsum(begins)
            last, number = row_keys[:, -1:], int(traj_ids[-1])
            found["collector", "traj_ids"] = torch.from_numpy(traj_ids)
        buffer.extend(found)
    return buffer


def _fitting(name: str, column: Tree, is_memmap: bool) -> Tree:
    """Return a column in dtypes that PyTorch can index."""
    for path, leaf in tree_leaves(column):
        where = f"to_replay_buffer(): column {name!r}{f' at {path}' if path else ''}"
        if is_memmap and 0 in leaf.shape[1:]:
            raise ArgumentError(
                f"{where}: rows of shape {leaf.shape[1:]} have no entries, which memory-mapped files cannot hold: give "
                f"storage=LazyTensorStorage(len(rows))"
            )
        if leaf.dtype == np.uint64 and leaf.max(initial=0) > np.iinfo(np.int64).max:
            raise ArgumentError(f"{where}: expected numbers below 2**63, as PyTorch indexes int64, got {leaf.max()}")

    def widened(leaf: NDArray[Any]) -> NDArray[Any]:
        return leaf.astype(_WIDER[leaf.dtype]) if leaf.dtype in _WIDER else leaf

    return map_tree(widened, column)


def _tensordict(batch: SampleBatch, now: Mapping[str, str], columns: Sequence[str]) -> Any:
    """Convert rows to a tensordict with TorchRL's names."""
    found = batch.to_tensordict()
    names = {name: found[name] for name in columns}
    names |= {theirs: found[ours] for ours, theirs in now.items()}
    after = {theirs: found[ours] for ours, theirs in _NEXT.items()}
    for name in ("reward", "terminated", "truncated"):
        after[name] = after[name].unsqueeze(-1)
    after["reward"] = after["reward"].float()
    after["done"] = after["terminated"] | after["truncated"]
    return type(found)({**names, "next": type(found)(after, batch_size=found.batch_size)}, batch_size=found.batch_size)
