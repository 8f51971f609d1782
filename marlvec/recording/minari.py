"""Converts recordings to Minari datasets, which hold one agent each, and back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Space, Tuple

from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError
from marlvec.external.vector_env import make
from marlvec.extras import import_extra
from marlvec.recording.dataset import RecordedDataset
from marlvec.recording.files import Format
from marlvec.recording.recorder import Recorder
from marlvec.serialization.atomic_file import FilePath
from marlvec.trees import map_tree, tree_leaves, zip_trees

_NEEDED = ["obs", "actions_for_env", "rewards", "next_obs", "terminated", "truncated", "t", "eps_id", "agent_index"]


def to_minari(
    data: RecordedDataset,
    dataset_id: str,
    agent: str | None = None,
    *,
    observation_space: Space[Any] | None = None,
    action_space: Space[Any] | None = None,
    **options: Any,
) -> Any:
    """Create a local Minari dataset of one agent's episodes.

    Make one dataset per agent, for example ``"simple_spread/agent_0/seek-v0"``. Actions are the env's
    (``actions_for_env``). An episode whose end is not recorded is truncated where the recording ends. If an agent ended
    without a final observation, its last observation is repeated. An agent that ended and came back in the same episode
    has several episodes.

        with marlvec.load_dataset("runs/seek") as data:
            for agent in data.agents:
                to_minari(data, f"simple_spread/{agent}/seek-v0", agent)

    Args:
        data: The recording.
        dataset_id: Minari's name of the dataset.
        agent: Name of the agent; None: the recording's only agent.
        observation_space: Space of the recorded observations; None: the env's space of the agent.
        action_space: Space of the actions; None: the env's space of the agent.
        options: Arguments of ``minari.create_dataset_from_buffers``: ``algorithm_name``, ``description``,
            ``data_format`` and so on.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        MissingExtraError: minari is not installed.
        ArgumentError: The recording has several agents, and ``agent`` is None; connectors changed the observations, so
            that they are not in the space; an episode lacks rows in its middle; Minari cannot save a space; or a key of
            a Dict space has a "/", which HDF5 reads as a path.
        KeyError: The agent is unknown.
    """
    minari = import_extra("minari", "to_minari()", 'pip install "marlvec[minari]"')
    buffer = import_extra("minari.data_collector", "to_minari()", 'pip install "marlvec[minari]"').EpisodeBuffer
    agents = data.agents or ()
    if agent is None and len(agents) != 1:
        raise ArgumentError(
            f"to_minari(agent=None): expected a recording of one agent, it has {list(agents)}; name one"
        )
    agent = agents[0] if agent is None else agent
    spaces = observation_space or data.observation_space(agent), action_space or data.action_space(agent)
    if None in spaces:
        raise ArgumentError(f"to_minari(): the spaces of {agent!r} are not known: give observation_space, action_space")
    for what, space in zip(("observation", "action"), spaces, strict=True):
        _check_form(space, what, agent)
        if options.get("data_format") in (None, "hdf5"):
            _check_keys(space, what, agent)
    made: Any = None
    for group in data.episode_batches(columns=_NEEDED):
        episodes = list(_agent_episodes(group, agents.index(agent)))
        if made is None and episodes:
            _check_space(map_tree(lambda leaf: leaf[0], episodes[0]["obs"]), spaces[0], agent)
        buffers = [buffer(**_arrays(rows)) for rows in episodes]
        if not buffers:
            continue
        if made is None:
            made = minari.create_dataset_from_buffers(
                dataset_id, buffers, observation_space=spaces[0], action_space=spaces[1], **options
            )
        else:
            made.update_dataset_from_buffer(buffers)
    if made is None:
        raise ArgumentError(f"to_minari(): there is no episode of {agent!r} in {str(data.folder)!r}")
    return made


def from_minari(dataset: Any, folder: FilePath, format: Format = "parquet", *, agent: str = "agent_0") -> None:
    """Record the episodes of a Minari dataset, as rows of policy ``"main"``.

    Args:
        dataset: A ``minari.MinariDataset``.
        folder: Folder of the recording, as for `Recorder`.
        format: ``"parquet"`` or ``"arrow"``.
        agent: Name of the agent.

    Raises:
        ArgumentError: The folder holds something else; or an episode has not one observation more than steps.
        MissingExtraError: pyarrow is not installed.
    """
    notes = {"minari": str(dataset.spec.dataset_id)}
    with (
        make({agent: (dataset.observation_space, dataset.action_space)}, num_envs=1) as envs,
        Recorder(folder, format, envs=envs, notes=notes) as recorder,
    ):
        for number, episode in enumerate(dataset.iterate_episodes()):
            recorder.write(_batch(episode, number))


def _agent_episodes(group: MultiAgentBatch, agent: int) -> Iterator[SampleBatch]:
    """Yield an agent's rows episode by episode, in order of time, from all policies that played it."""
    parts = [rows.take(np.flatnonzero(rows["agent_index"] == agent)) for rows in group.values()]
    rows = SampleBatch.concat([part for part in parts if len(part)] or parts[:1])
    rows = rows.take(np.lexsort([rows["t"], rows["eps_id"]]))
    is_same = rows["eps_id"][1:] == rows["eps_id"][:-1]
    gaps = np.flatnonzero(is_same & (np.diff(rows["t"]) != 1))
    if len(gaps):
        raise ArgumentError(f"to_minari(): episode {int(rows['eps_id'][gaps[0]])} lacks rows of agent number {agent}")
    # An agent may end, and come back in the same episode: these are two of Minari's.
    begins = np.flatnonzero(~is_same | (rows["terminated"] | rows["truncated"])[:-1]) + 1
    for start, stop in pairwise([0, *begins.tolist(), len(rows)] if len(rows) else []):
        yield rows.slice(start, stop)


def _arrays(rows: SampleBatch) -> dict[str, Any]:
    """Return an episode in Minari's form: arrays over time, with one more observation than actions."""
    last = len(rows) - 1
    final = map_tree(lambda leaf: leaf[last:], rows["next_obs"])
    truncated = rows["truncated"].copy()
    truncated[last] |= not rows["terminated"][last]
    return {
        "observations": zip_trees(np.concatenate, [rows["obs"], final]),
        "actions": rows["actions_for_env"],
        "rewards": rows["rewards"].tolist(),
        "terminations": rows["terminated"].tolist(),
        "truncations": truncated.tolist(),
    }


def _check_space(obs: Any, space: Any, agent: str) -> None:
    if not space.contains(obs):
        raise ArgumentError(
            f"to_minari(): recorded observations of {agent!r} are not in {space}, as connectors have changed them: "
            f"give their space as observation_space="
        )


def _check_form(space: Any, what: str, agent: str) -> None:
    """Refuse spaces that Minari cannot save."""
    try:
        import_extra("minari.serialization", "to_minari()", 'pip install "marlvec[minari]"').serialize_space(space)
    except NotImplementedError as error:
        raise ArgumentError(
            f"to_minari(): Minari saves Gymnasium's spaces alone, and the {what} space of {agent!r} is {space}: give "
            f"{what}_space=, for texts gymnasium.spaces.Text(max_length, charset=…) with all characters that occur"
        ) from error


def _check_keys(space: Any, what: str, agent: str) -> None:
    """Refuse keys of Dict spaces that HDF5 cannot hold as names."""
    for key in space.spaces if isinstance(space, Dict) else ():
        if "/" in str(key) or key in ("", "."):
            raise ArgumentError(
                f"to_minari(): the {what} space of {agent!r} has the key {key!r}, which HDF5 reads as a path, so that "
                f'Minari could not read the dataset: give data_format="arrow", or rename the key'
            )
    parts = space.spaces.values() if isinstance(space, Dict) else space.spaces if isinstance(space, Tuple) else ()
    for part in parts:
        _check_keys(part, what, agent)


def _batch(episode: Any, number: int) -> MultiAgentBatch:
    """Convert an episode of Minari to a batch in a collector's form."""
    n = len(episode.rewards)
    for path, leaf in tree_leaves(episode.observations):
        if len(leaf) != n + 1:
            raise ArgumentError(
                f"from_minari(): episode {number}{path and f', observations at {path}'}: expected {n + 1} observations "
                f"of {n} steps, got {len(leaf)}"
            )
    ids = np.arange(n)
    last = ids == n - 1
    same = np.full(n, number)
    none = np.zeros(n, np.int64)
    terminated = np.asarray(episode.terminations, np.bool_)
    rows = SampleBatch(
        {
            "obs": map_tree(lambda leaf: leaf[:n], episode.observations),
            "actions": episode.actions,
            "actions_for_env": episode.actions,
            "rewards": np.asarray(episode.rewards, np.float64),
            "next_obs": map_tree(lambda leaf: leaf[1 : n + 1], episode.observations),
            "terminated": terminated,
            "truncated": np.asarray(episode.truncations, np.bool_) | (last & ~terminated),
            "next_obs_missing": np.zeros(n, np.bool_),
            "t": ids,
            "env_t": ids,
            "next_env_t": ids + 1,
            "eps_id": same,
            "unroll_id": same,
            "env_id": none,
            "agent_index": none,
            "policy_version": none,
        }
    )
    return MultiAgentBatch({"main": rows}, env_steps=n, known=("main",))
