"""`RecordedDataset`: a recording, read back; `joint_rows` joins rows of several agents into one row per moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect.agent_episodes import MultiAgentEpisode
from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.batch_files import arrow_libraries
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.external.vector_env import ExternalVectorEnv, Replay, replay
from marlvec.recording.files import Manifest, RecordingSession, read_manifest, read_schema, space_from
from marlvec.recording.rows import RecordedRows
from marlvec.serialization.atomic_file import FilePath
from marlvec.trees import Tree, tree_leaves, zip_trees

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


_CHUNK_ROWS = 1 << 16
_FOR_TABLE = ("eps_id", "agent_index", "rewards", "t", "env_t", "next_env_t", "terminated", "truncated")


class EpisodeTable(NamedTuple):
    """Episodes of a recording, one entry each.

    Attributes:
        session: (E,) the session that recorded the episode.
        eps_id: (E,) the episode's id in that session.
        length: (E,) env steps from its first recorded decision to its last outcome.
        returns: (E,) sum of the recorded rewards of all agents.
        whole: (E,) bool, whether the recording has the episode from its reset to its end.
    """

    session: NDArray[np.int64]
    eps_id: NDArray[np.int64]
    length: NDArray[np.int64]
    returns: NDArray[np.float64]
    whole: NDArray[np.bool_]


class RecordedDataset(Mapping[str, RecordedRows]):
    """A recording: `RecordedRows` by policy id. Made by `load_dataset`.

    A file is opened when it is first read; `close` or the end of a ``with`` block closes all.

    Attributes:
        folder: The recording's folder.
        notes: The recorder's ``notes``.
        sessions: One per recorder that wrote to it; ``closed`` is False while a recorder runs, and if it was killed.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, envs: Mapping[str, Any] | None, notes: dict[str, Any], *, verify: bool
    ) -> None:
        self.folder, self.notes = folder, notes
        self._manifest, self._envs = manifest, envs
        self.sessions: tuple[RecordingSession, ...] = tuple(manifest.sessions)
        ids = dict.fromkeys(file.policy for part in manifest.parts for file in part.files)
        self._policies = {name: RecordedRows(folder, manifest, name, verify=verify) for name in ids}

    def __getitem__(self, policy_id: str) -> RecordedRows:
        try:
            return self._policies[policy_id]
        except KeyError:
            raise KeyError(f"no policy {policy_id!r}; {str(self.folder)!r} has {list(self._policies)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def __repr__(self) -> str:
        name = "" if self._envs is None else f" of {self.env_name}"
        state = "" if self.is_closed else ", not closed"
        head = f"RecordedDataset {str(self.folder)!r}{name}: {self.env_steps:,} env steps{state}"
        lines = [f"  {name}: {len(rows):,} rows in {len(rows.files)} files" for name, rows in self.items()]
        return "\n".join([head, *lines])

    # --- facts

    @property
    def env_steps(self) -> int:
        """Env steps of all batches together."""
        return sum(part.env_steps for part in self._manifest.parts)

    @property
    def is_closed(self) -> bool:
        """Whether every session was closed. If not, rows of the unfinished part are missing or not written yet."""
        return all(session.closed for session in self.sessions)

    @property
    def size_bytes(self) -> int:
        """Bytes of the files with rows."""
        return sum(rows.size_bytes for rows in self.values())

    @property
    def env_name(self) -> str | None:
        """Name of the env; None if the recorder was not given the envs."""
        return None if self._envs is None else str(self._envs["name"])

    @property
    def agents(self) -> tuple[str, ...] | None:
        """Names of the agents, in order; None if the recorder was not given the envs."""
        return None if self._envs is None else tuple(map(str, self._envs["agents"]))

    def observation_space(self, agent: str) -> Space[Any] | None:
        """Return an agent's observation space, before the connectors.

        Returns:
            The space; None if the recorder was not given the envs.

        Raises:
            KeyError: The agent does not exist.
        """
        return self._space("observation_spaces", agent)

    def action_space(self, agent: str) -> Space[Any] | None:
        """Return an agent's action space, behind the connectors.

        Returns:
            The space; None if the recorder was not given the envs.

        Raises:
            KeyError: The agent does not exist.
        """
        return self._space("action_spaces", agent)

    def _space(self, name: str, agent: str) -> Space[Any] | None:
        agents = self.agents or ()
        if agent not in agents:
            raise KeyError(f"no agent {agent!r}; {str(self.folder)!r} has {list(agents)}")
        assert self._envs is not None
        return space_from(self._envs[name][agents.index(agent)])

    # --- episodes

    def episode_table(self) -> EpisodeTable:
        """Read lengths and returns of all episodes, in the order of session and ``eps_id``.

        Returns:
            One entry an episode.

        Raises:
            ArgumentError: A column is missing.
            CheckpointError: A file is damaged; names it.
        """
        found = []
        for session, ranges in self._ranges():
            for name in ranges:
                _need(_FOR_TABLE, name, self[name])
            parts = {name: self[name].read(start, stop, _FOR_TABLE) for name, (start, stop) in ranges.items()}
            ids_B = np.concatenate([rows["eps_id"] for rows in parts.values()])
            column = {name: np.concatenate([rows[name] for rows in parts.values()]) for name in _FOR_TABLE}
            eps_id_E, episode_B = np.unique(ids_B, return_inverse=True)
            count = len(eps_id_E)
            first_E = np.full(count, np.iinfo(np.int64).max)
            last_E = np.zeros(count, np.int64)
            np.minimum.at(first_E, episode_B, column["env_t"])
            np.maximum.at(last_E, episode_B, column["next_env_t"])
            returns_E = np.bincount(episode_B, column["rewards"], count)
            # Whole: each agent's first row is its first decision, and its last row an end. It may have ended before.
            order = np.lexsort([column["t"], column["agent_index"], ids_B])
            is_new = np.append(True, (np.diff(ids_B[order]) != 0) | (np.diff(column["agent_index"][order]) != 0))
            starts, stops = order[is_new], order[np.roll(is_new, -1)]
            open_B = ~(column["terminated"] | column["truncated"])
            torn_E = np.bincount(episode_B[starts], column["t"][starts] != 0, count)
            torn_E += np.bincount(episode_B[stops], open_B[stops], count)
            whole_E = torn_E == 0
            found.append((np.full(count, session), eps_id_E, last_E - first_E, returns_E, whole_E))
        if not found:
            none = np.zeros(0, np.int64)
            return EpisodeTable(none, none, none, none.astype(np.float64), none.astype(np.bool_))
        return EpisodeTable(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def episode_batches(
        self, rows: int = _CHUNK_ROWS, columns: Sequence[str] | None = None
    ) -> Iterator[MultiAgentBatch]:
        """Yield batches of whole episodes, about ``rows`` rows each, with all policies' rows; their ``env_steps`` is 0.

        Args:
            rows: Rows in a batch; an episode with more rows is a batch alone.
            columns: Names of columns; None for all.

        Returns:
            Batches; each episode is in one.

        Raises:
            ArgumentError: A column is missing.
            CheckpointError: A file is damaged; names it.
        """
        for _, ranges in self._ranges():
            ids = {name: np.asarray(self[name].column("eps_id")[slice(*span)]) for name, span in ranges.items()}
            orders = {name: np.argsort(ids_B, kind="stable") for name, ids_B in ids.items()}
            eps_id_E, counts_E = np.unique(np.concatenate(list(ids.values())), return_counts=True)
            group_E = (np.cumsum(counts_E) - 1) // max(1, rows)
            stops = np.flatnonzero(np.diff(group_E, append=-1))
            starts_at = dict.fromkeys(ids, 0)
            for last in stops.tolist():
                found = {}
                for name, ids_B in ids.items():
                    start, order = starts_at[name], orders[name]
                    stop = int(np.searchsorted(ids_B, eps_id_E[last], "right", sorter=order))
                    starts_at[name] = stop
                    if stop > start:
                        numbers = np.sort(order[start:stop]) + ranges[name][0]
                        found[name] = self[name].take(numbers, columns)
                yield MultiAgentBatch(found, env_steps=0, known=tuple(self))

    def episodes(self) -> Iterator[MultiAgentEpisode]:
        """Yield all episodes, incomplete ones too, in the order of session and ``eps_id``.

        Raises:
            ArgumentError: Rows do not form an episode; see `MultiAgentEpisode.of_rows`.
            CheckpointError: A file is damaged; names it.
        """
        for batch in self.episode_batches():
            yield from batch.episodes(self.agents)

    def joint(self, columns: Sequence[str] | None = None, agents: Sequence[str] | None = None) -> Iterator[SampleBatch]:
        """Yield one batch per episode with an axis of agents, for centralised critics, QMIX and the like.

        A row is a moment: an env step at which some agent decided. T moments, A agents:

        ==================================  ======  ==========================================================
        ``obs``, ``actions``, ``rewards``   (T, A,  the agents' columns, those that all policies have; zeros
        and so on                           …)      where ``acting`` is False
        ``acting``                          (T, A)  bool: the agent decided, and has a row here
        ``state``, ``next_state``           (T, …)  where recorded
        ``eps_id``, ``env_id``, ``env_t``   (T,)    of the moment
        ``t``, ``unroll_id``                (T,)    number of the moment in the episode, and of the episode here
        ==================================  ======  ==========================================================

        ``SampleBatch.concat(list(data.joint()))`` has the moments of all episodes, and its ``right_zero_pad()`` makes
        them sequences (B, T, A, …) with ``loss_mask``.

        Args:
            columns: Names of columns; None for all that the policies have in common.
            agents: Names of the agents that make the axis; None for all.

        Returns:
            The episodes, in the order of session and ``eps_id``.

        Raises:
            ArgumentError: Agents differ in a column's structure, dtype or shape; or a column or agent is missing.
            CheckpointError: A file is damaged; names it.
        """
        names = joint_columns({name: rows.keys() for name, rows in self.items()}, columns)
        return self._joint(names, self._agent_numbers(agents))

    def _joint(self, names: Sequence[str], numbers: Sequence[int] | None) -> Iterator[SampleBatch]:
        done = 0
        if numbers is None:  # without agent names: the agents that have rows
            highest = [int(np.max(rows.column("agent_index")[:], initial=0)) for rows in self.values()]
            numbers = range(max(highest, default=0) + 1)
        for batch in self.episode_batches(columns=names):
            for episode in joint_rows(batch, numbers, names, done):
                done += 1
                yield episode

    def _agent_numbers(self, agents: Sequence[str] | None) -> list[int] | None:
        known = self.agents
        if agents is None:
            return None if known is None else list(range(len(known)))
        if isinstance(agents, str) or not agents or not set(agents) <= set(known or ()):
            raise ArgumentError(
                f"joint(agents={agents!r}): expected names among {list(known or ())}"
                + ("" if known else "; the recorder was not given the envs")
            )
        return [(known or ()).index(agent) for agent in agents]

    def replay(self, envs: ExternalVectorEnv, *, repeat: int | None = 1, training_enabled: bool = True) -> Replay:
        """Feed the episodes to an external vectorizer, one group of episodes in memory at a time.

            envs = marlvec.external.make({"agent_0": (observations, actions)}, num_envs=8)
            with data.replay(envs):
                batch = collector.collect(episodes=100)

        Args:
            envs: The external vectorizer.
            repeat: How often to play all episodes; None: until stopped.
            training_enabled: False: policies act and connectors run, but no batch gets the rows.

        Returns:
            The running replay; see `marlvec.external.vector_env`.

        Raises:
            ArgumentError: A column is missing, or the agents differ from the vectorizer's.
        """
        return replay(self, envs, repeat=repeat, training_enabled=training_enabled)

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        for rows in self._policies.values():
            rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ranges(self) -> Iterator[tuple[int, dict[str, tuple[int, int]]]]:
        """Return each session with rows, and its range of rows by policy id."""
        at = dict.fromkeys(self._policies, 0)
        spans: dict[int, dict[str, tuple[int, int]]] = {}
        for part in self._manifest.parts:
            for file in part.files:
                start = spans.setdefault(part.session, {}).get(file.policy, (at[file.policy], 0))[0]
                at[file.policy] += file.rows
                spans[part.session][file.policy] = start, at[file.policy]
        for name, rows in self.items():
            _need(("eps_id",), name, rows)
        yield from spans.items()


def _need(columns: Sequence[str], policy_id: str, rows: RecordedRows) -> None:
    if missing := [column for column in columns if column not in rows]:
        raise ArgumentError(f"rows of policy {policy_id!r} lack the columns {missing}, so they are no episodes")


def load_dataset(folder: FilePath, *, verify: bool = True) -> RecordedDataset:
    """Open a `Recorder`'s recording. Loading executes no code from it, and opens no file outside the folder.

        data = marlvec.load_dataset("runs/spread")
        data["main"].column("obs")[:100]
        for rows in data["main"].minibatches(4096, seed=0, epochs=3): ...

    Args:
        folder: The recording's folder.
        verify: Whether to compare a file's CRC-32 with the manifest's when it is first read; this reads the whole file.
            Sizes and columns are always compared, with False also the checksums of Parquet's pages.

    Returns:
        The recording: all parts that its manifest lists. If the recorder was killed, or still runs, these are the
        complete parts.

    Raises:
        CheckpointError: The folder is not a recording, or has another format; or a file is missing, cut or outside of
            the folder; names the file.
        MissingExtraError: pyarrow is not installed.
    """
    arrow_libraries()
    path = Path(folder)
    manifest = read_manifest(path)
    envs, notes = read_schema(path)
    root = path.resolve()
    for part in manifest.parts:
        for file in part.files:
            place = path / part.path(file)
            try:
                size = place.stat().st_size if place.is_file() else -1
            except OSError as error:
                raise CheckpointError(place, f"cannot be read: {error}") from error
            if size != file.bytes:
                got = "there is no such file" if size < 0 else f"got {size}: it was cut or changed"
                raise CheckpointError(place, f"is not as the manifest has it: expected {file.bytes} bytes, {got}")
            if not place.resolve().is_relative_to(root):
                raise CheckpointError(place, f"leads out of {path}")
    return RecordedDataset(path, manifest, envs, notes, verify=verify)
