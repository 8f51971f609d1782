"""OG-MARL's Vaults: recordings as Vaults, and back; their key-value store."""

from __future__ import annotations

import json
import shutil
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.external.vector_env import make
from marlvec.extras import import_extra
from marlvec.recording.dataset import RecordedDataset
from marlvec.recording.files import Format
from marlvec.recording.recorder import Recorder
from marlvec.serialization.atomic_file import FilePath, atomic_file
from marlvec.trees import Tree, map_tree

_STEPS = 1 << 16  # time steps written or read together
_COLUMNS = {
    "obs": "observations",
    "actions_for_env": "actions",
    "rewards": "rewards",
    "terminated": "terminals",
    "truncated": "truncations",
}
_ACTIONS, _REWARDS, _TERMINALS, _TRUNCATIONS = [(name,) for name in list(_COLUMNS.values())[1:]]
_ACTING, _STATE, _LEGALS = ("infos", "acting"), ("infos", "state"), ("infos", "legals")
_OPTIONAL = {"state": _STATE, "action_mask": _LEGALS}


Leaf = tuple[str, ...]
"""Keys from the root of a tree to an array."""


Arrays = dict[Leaf, NDArray[Any]]
Form = dict[Leaf, tuple[np.dtype[Any], tuple[int, ...]]]


def to_vault(data: RecordedDataset, folder: FilePath, agents: Sequence[str] | None = None) -> int:
    """Write a recording as an OG-MARL Vault: all episodes of all agents, one episode after another.

    Actions are the env's (``actions_for_env``). Global states and action masks are written if recorded. A Vault has no
    final observations. When an agent does not act, its numbers are 0, its mask is True and ``infos/acting`` is False.
    ``terminals`` and ``truncations`` stay True from an agent's end to the end of the episode, or until it comes back.
    If all agents have ended and some come back, the Vault has another episode. An agent whose end is not recorded is
    truncated where the recording ends.

        with marlvec.load_dataset("runs/seek") as data:
            to_vault(data, "vaults/mpe/simple_spread.vlt/Seek")
        flashbax.vault.Vault("mpe/simple_spread.vlt", vault_uid="Seek").read()

    Args:
        data: The recording.
        folder: The Vault's folder, ``VAULTS/NAME.vlt/UID``; new or empty.
        agents: Names of the agents on the axis N; None for all.

    Returns:
        T, the number of time steps.

    Raises:
        MissingExtraError: tensorstore is not installed.
        ArgumentError: The folder is not empty; the recording has no episodes; agents differ in the shapes of
            observations or actions; or a column holds tuples or strings, which a Vault cannot hold.
        CheckpointError: A file of the recording is damaged; names it.
        OSError: The folder cannot be written to.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArgumentError(f"to_vault(folder={str(path)!r}): expected a new or empty folder")
    optional = {name: leaf for name, leaf in _OPTIONAL.items() if all(name in rows for rows in data.values())}
    store: VaultStore | None = None
    written = 0
    path.mkdir(parents=True, exist_ok=True)
    try:
        for arrays in _joined(_experience(one, optional) for one in data.joint([*_COLUMNS, *optional], agents)):
            if store is None:
                store = VaultStore.create(path, _form(arrays), "to_vault()")
            store.write(arrays, written)
            written += len(arrays[_REWARDS])
        if store is None:
            raise ArgumentError(f"to_vault(): expected at least one episode, {str(data.folder)!r} has none")
        store.finish(written, {"marlvec": {"folder": str(data.folder), "env": data.env_name}})
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return written


def from_vault(
    vault: FilePath,
    folder: FilePath,
    format: Format = "parquet",
    *,
    spaces: Mapping[str, tuple[Space[Any], Space[Any]]] | None = None,
) -> None:
    """Record the episodes of an OG-MARL Vault, as rows of policy ``"main"``.

    Nothing in the Vault is executed, and nothing outside its folder is opened. An episode ends when all agents are
    terminated or truncated. An agent decides at every time step until its end, or at those marked in ``infos/acting``
    (which `to_vault` writes): an agent that decides after its end has come back. A Vault has no final observations:
    each end of an agent has ``next_obs_missing``. If the Vault ends inside an episode, that episode is truncated there.
    ``infos/legals`` become ``action_mask``. Arrays with other names are left out; the recording's notes list them.

        from_vault("vaults/smac_v1/3m.vlt/Good", "runs/3m")
        data = marlvec.load_dataset("runs/3m")

    Args:
        vault: The Vault's folder, ``VAULTS/NAME.vlt/UID``.
        folder: Folder of the recording, as for `Recorder`.
        format: ``"parquet"`` or ``"arrow"``.
        spaces: Agent names in order, each with its observation space and action space, which a Vault lacks; None: the
            recording has no names and spaces.

    Raises:
        MissingExtraError: tensorstore or pyarrow is not installed.
        CheckpointError: The Vault is damaged, of another version, or not of OG-MARL's form; names the file. Episodes
            before the damage are recorded.
        ArgumentError: ``folder`` holds something else, or ``spaces`` has another number of agents.
    """
    store = VaultStore.open(Path(vault), "from_vault()")
    used = _used_leaves(store)
    batch_size, length, agent_num = store.shapes[_REWARDS]
    if spaces is not None and len(spaces) != agent_num:
        raise ArgumentError(f"from_vault(spaces={list(spaces)}): expected {agent_num} agents, got {len(spaces)}")
    left_out = ["/".join(leaf) for leaf in store.shapes if leaf not in used]
    notes = {"vault": str(vault), "left_out": left_out}
    with ExitStack() as stack:
        envs = None if spaces is None else stack.enter_context(make(spaces, num_envs=1))
        recorder = stack.enter_context(Recorder(folder, format, envs=envs, notes=notes))
        episodes = fragments = 0
        for b in range(batch_size):
            for start, moments in _pieces(store, b, length):
                arrays = {leaf: store.read(leaf, b, start, start + len(moments.ends_T)) for leaf in used}
                rows = _rows(arrays, moments, b, episodes, fragments)
                recorder.write(MultiAgentBatch({"main": rows}, env_steps=len(moments.ends_T), known=("main",)))
                episodes += int(moments.first_T.sum())
                fragments += int(rows["next_obs_missing"].sum())


# --- writing


def _experience(episode: SampleBatch, optional: Mapping[str, Leaf]) -> Arrays:
    """Return an episode's arrays (T, …) by leaf, in OG-MARL's form."""
    acting_TN: NDArray[np.bool_] = episode["acting"]
    length, agent_num = acting_TN.shape
    time_T1, agents_N = np.arange(length)[:, None], np.arange(agent_num)
    has_acted_N = acting_TN.any(axis=0)
    terminated_TN, truncated_TN = (episode[name] & acting_TN for name in ("terminated", "truncated"))
    last_N = length - 1 - acting_TN[::-1].argmax(axis=0)
    truncated_TN[last_N, agents_N] |= has_acted_N & ~terminated_TN[last_N, agents_N]
    # An agent's flags are those of its latest decision: it may end, and come back in the same episode.
    latest_TN = np.maximum.accumulate(np.where(acting_TN, time_T1, 0), axis=0)
    terminated_TN, truncated_TN = terminated_TN[latest_TN, agents_N], truncated_TN[latest_TN, agents_N]
    terminated_TN |= ~has_acted_N  # an agent without a decision is over from the start
    found: Arrays = {}
    for column, name in _COLUMNS.items():
        for keys, leaf in leaves_of(episode[column]):
            _check_leaf(leaf, keys, column)
            found[(name, *keys)] = leaf
    found |= {_TERMINALS: terminated_TN, _TRUNCATIONS: truncated_TN, _ACTING: acting_TN}
    for column, leaf in optional.items():
        found[leaf] = episode[column]
    if _LEGALS in found:
        found[_LEGALS] = found[_LEGALS] | ~acting_TN[..., None]
    return found


def _check_leaf(leaf: Any, keys: Leaf, column: str) -> None:
    if isinstance(leaf, tuple):
        raise ArgumentError(f"to_vault(): column {column!r}: expected arrays or dicts, got a tuple; flatten it first")
    if leaf.dtype.kind not in "biuf":
        raise ArgumentError(f"to_vault(): column {column!r}: expected bools, ints or floats, got {leaf.dtype}")
    if any("." in key for key in keys):
        raise ArgumentError(f"to_vault(): column {column!r}: expected keys without a dot, got {keys}; rename them")


def _form(arrays: Arrays) -> Form:
    return {leaf: (array.dtype, array.shape[1:]) for leaf, array in arrays.items()}


def _joined(episodes: Iterator[Arrays]) -> Iterator[Arrays]:
    """Join episodes to pieces of some ten thousand time steps."""
    waiting: list[Arrays] = []
    steps = 0
    form: Form = {}
    for one in episodes:
        if (got := _form(one)) != (form := form or got):
            differs = next(leaf for leaf in {**form, **got} if form.get(leaf) != got.get(leaf))
            raise ArgumentError(
                f"to_vault(): {'/'.join(differs)} is not of one dtype and shape in all episodes: expected "
                f"{form.get(differs)}, got {got.get(differs)}; choose agents= that fit together"
            )
        waiting.append(one)
        steps += len(one[_REWARDS])
        if steps >= _STEPS:
            yield {leaf: np.concatenate([each[leaf] for each in waiting]) for leaf in one}
            waiting, steps = [], 0
    if waiting:
        yield {leaf: np.concatenate([each[leaf] for each in waiting]) for leaf in waiting[0]}


# --- reading


class _Moments(NamedTuple):
    """Flags of consecutive time steps: (T,) whether an episode begins or ends there; (T, N) an agent's flags."""

    first_T: NDArray[np.bool_]
    ends_T: NDArray[np.bool_]
    acting_TN: NDArray[np.bool_]
    terminated_TN: NDArray[np.bool_]
    truncated_TN: NDArray[np.bool_]

    def before(self, stop: int) -> _Moments:
        """Return the time steps before ``stop``."""
        return _Moments(*(flags[:stop] for flags in self))


def _used_leaves(store: VaultStore) -> list[Leaf]:
    """Return the leaves that rows are made of, after a check of their shapes."""
    shapes = store.shapes
    place = store.folder / "metadata.json"
    observations = [leaf for leaf in shapes if leaf[0] == "observations"]
    if missing := [leaf[0] for leaf in (_ACTIONS, _REWARDS, _TERMINALS) if leaf not in shapes]:
        raise CheckpointError(
            place, f"is not of OG-MARL's form: it lacks {missing}, it has {sorted(map('/'.join, shapes))}"
        )
    if not observations:
        raise CheckpointError(place, "is not of OG-MARL's form: it lacks ['observations']")
    per_agent = [
        leaf for leaf in (*observations, _ACTIONS, _TERMINALS, _TRUNCATIONS, _ACTING, _LEGALS) if leaf in shapes
    ]
    expected = shapes[_REWARDS]
    for leaf in per_agent:
        is_flag = leaf in (_TERMINALS, _TRUNCATIONS, _ACTING)
        if len(expected) != 3 or shapes[leaf][:3] != expected or (is_flag and len(shapes[leaf]) != 3):
            raise CheckpointError(
                place,
                f"is not of OG-MARL's form: expected {'/'.join(leaf)} of (B, T, N) as rewards are, {expected}, got "
                f"{shapes[leaf]}",
            )
    if _STATE in shapes and shapes[_STATE][:2] != expected[:2]:
        raise CheckpointError(place, f"is not of OG-MARL's form: infos/state is of {shapes[_STATE]}")
    return [*per_agent, _REWARDS, *([_STATE] if _STATE in shapes else [])]


def _pieces(store: VaultStore, b: int, length: int) -> Iterator[tuple[int, _Moments]]:
    """Yield whole episodes, some ten thousand time steps at a time: index of the first time step, and flags."""
    start, size = 0, _STEPS
    while start < length:
        stop = min(length, start + size)
        moments = _moments(store, b, start, stop)
        if stop < length:
            ends = np.flatnonzero(moments.ends_T)
            if not len(ends):  # an episode longer than that
                size *= 2
                continue
            moments = moments.before(int(ends[-1]) + 1)
        yield start, moments
        start, size = start + len(moments.ends_T), _STEPS


def _moments(store: VaultStore, b: int, start: int, stop: int) -> _Moments:
    def flags(leaf: Leaf) -> NDArray[np.bool_]:
        return store.read(leaf, b, start, stop).astype(np.bool_)  # OG-MARL's dtypes vary

    terminated_TN = flags(_TERMINALS)
    truncated_TN = flags(_TRUNCATIONS) if _TRUNCATIONS in store.shapes else np.zeros_like(terminated_TN)
    over_TN: NDArray[np.bool_] = terminated_TN | truncated_TN
    ends_T = np.asarray(over_TN.all(axis=1))
    first_T = np.concatenate([[True], ends_T[:-1]])
    if _ACTING in store.shapes:
        acting_TN = flags(_ACTING)
    else:  # at every time step until its end
        before_TN = over_TN.cumsum(axis=0) - over_TN
        begin_T = np.maximum.accumulate(np.where(first_T, np.arange(len(first_T)), 0))
        acting_TN = before_TN == before_TN[begin_T]
    return _Moments(first_T, ends_T, acting_TN, terminated_TN, truncated_TN)


def _rows(arrays: Arrays, moments: _Moments, env_id: int, episodes: int, fragments: int) -> SampleBatch:
    """Return the rows of whole episodes in a collector's order: by agent, then by time."""
    agent_B, moment_B = np.nonzero(moments.acting_TN.T)
    n, (length, agent_num) = len(agent_B), moments.acting_TN.shape
    eps_id_T = episodes + moments.first_T.cumsum() - 1
    env_t_T = np.arange(length) - np.maximum.accumulate(np.where(moments.first_T, np.arange(length), 0))
    eps_id_B, env_t_B, numbers_B = eps_id_T[moment_B], env_t_T[moment_B], np.arange(n)
    part_B = eps_id_B * agent_num + agent_B
    first_B = np.diff(part_B, prepend=-1) != 0
    terminated_B, truncated_B = (flags[moment_B, agent_B] for flags in (moments.terminated_TN, moments.truncated_TN))
    last_B = (np.diff(part_B, append=-1) != 0) | terminated_B | truncated_B
    truncated_B = truncated_B | (last_B & ~terminated_B)
    next_B = np.where(last_B, numbers_B, numbers_B + 1)
    actions_B = arrays[_ACTIONS][moment_B, agent_B]
    obs: Tree = {leaf[1:]: array[moment_B, agent_B] for leaf, array in arrays.items() if leaf[0] == "observations"}
    obs = obs[()] if () in obs else tree_of(obs)
    columns: dict[str, Tree] = {
        "obs": obs,
        "actions": actions_B,
        "actions_for_env": actions_B,
        "rewards": arrays[_REWARDS][moment_B, agent_B].astype(np.float64),
        "next_obs": map_tree(lambda leaf: leaf[next_B], obs),
        "terminated": terminated_B,
        "truncated": truncated_B,
        "next_obs_missing": last_B,
    }
    if _STATE in arrays:
        state_B = arrays[_STATE][moment_B]
        columns |= {"state": state_B, "next_state": state_B[next_B]}
    if _LEGALS in arrays:
        mask_B = arrays[_LEGALS][moment_B, agent_B] != 0
        columns |= {"action_mask": mask_B, "next_action_mask": mask_B[next_B] | last_B[:, None]}
    columns |= {
        "t": numbers_B - np.maximum.accumulate(np.where(first_B, numbers_B, 0)),
        "env_t": env_t_B,
        "next_env_t": np.where(last_B, env_t_B + 1, env_t_B[next_B]),
        "eps_id": eps_id_B,
        "unroll_id": fragments + last_B.cumsum() - last_B,
        "env_id": np.full(n, env_id),
        "agent_index": agent_B,
        "policy_version": np.zeros(n, np.int64),
    }
    return SampleBatch(columns)


_VERSION = 1.2
_METADATA, _STORE = "metadata.json", "manifest.ocdbt"
_INDEX = "vault_index"
_LONGEST = 10**13
_GZIP = {"id": "gzip", "level": 5}  # as flashbax compresses
_CACHE_BYTES = 1 << 27  # decoded chunks, which several reads share


class VaultStore:
    """A Vault open for reading, or a new one open for writing. Made by `open` and `create`."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self.shapes: dict[Leaf, tuple[int, ...]] = {}  # of each leaf, (B, T, …)
        self._library = import_extra("tensorstore", what, 'pip install "marlvec[vault]"')
        self._context = self._library.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._arrays: dict[Leaf, Any] = {}

    @classmethod
    def create(cls, folder: Path, forms: Mapping[Leaf, tuple[np.dtype[Any], tuple[int, ...]]], what: str) -> Self:
        """Create the arrays of a Vault with B = 1; ``forms``: dtype, and shape after (B, T), of each leaf."""
        store = cls(folder, what)
        with store._writing():
            for leaf, (dtype, shape) in forms.items():
                options = {"shape": (1, _LONGEST, *shape), "dtype": dtype.name, "create": True}
                store._arrays[leaf] = store._array(_name(leaf), {"compressor": _GZIP}, **options)
        return store

    @classmethod
    def open(cls, folder: Path, what: str) -> Self:
        """Open a Vault for reading. Nothing in it is executed, and nothing outside of the folder is opened."""
        store = cls(folder, what)
        root = folder.resolve()
        for name in (_METADATA, _STORE):
            if not (folder / name).is_file():
                raise CheckpointError(folder / name, "is missing: expected the folder of a Vault, VAULTS/NAME.vlt/UID")
        if outside := [path for path in folder.rglob("*") if not path.resolve().is_relative_to(root)]:
            raise CheckpointError(outside[0], f"leads out of {folder}")
        expected = _read_metadata(folder / _METADATA)
        with store._reading(_INDEX):
            index = int(store._array(_INDEX, {}, open=True, read=True).read().result()[0])
            if not 0 <= index <= _LONGEST:
                raise ValueError(f"its index is {index}")
        for leaf, (dtype, shape) in expected.items():
            with store._reading(_name(leaf)):
                array = store._arrays[leaf] = store._array(_name(leaf), {}, open=True, read=True)
                found = array.dtype.name, (array.shape[0], *array.shape[2:])
                if found != (dtype, (shape[0], *shape[2:])) or array.shape[1] < index:
                    raise ValueError(
                        f"expected {dtype} of {shape}, as {_METADATA} has it, got {found[0]} of {array.shape}"
                    )
                store.shapes[leaf] = shape[0], index, *shape[2:]
        return store

    def write(self, arrays: Mapping[Leaf, NDArray[Any]], at: int) -> None:
        """Write arrays (n, …) of all leaves as time steps ``at`` to ``at + n - 1``."""
        with self._writing():
            for leaf, array in arrays.items():
                self._arrays[leaf][0, at : at + len(array)].write(array).result()

    def finish(self, steps: int, notes: Mapping[str, Any]) -> None:
        """Write the number of time steps and the metadata, without which the folder is not a valid Vault."""
        shapes: dict[Leaf, Any] = {
            leaf: str((1, steps, *map(int, array.shape[2:]))) for leaf, array in self._arrays.items()
        }
        dtypes: dict[Leaf, Any] = {leaf: array.dtype.name for leaf, array in self._arrays.items()}
        about = {"version": _VERSION, "structure_shape": tree_of(shapes), "structure_dtype": tree_of(dtypes), **notes}
        with self._writing():
            index = self._array(_INDEX, {}, shape=(1,), dtype="int32", create=True)
            index.write(np.array([steps], np.int32)).result()
        with atomic_file(self.folder / _METADATA) as file:
            file.write(json.dumps(about).encode())

    def read(self, leaf: Leaf, b: int, start: int, stop: int) -> NDArray[Any]:
        """Read a leaf's time steps, (stop - start, …)."""
        with self._reading(_name(leaf)):
            array: NDArray[Any] = self._arrays[leaf][b, start:stop].read().result()
            return array

    def _array(self, name: str, metadata: Mapping[str, Any], **options: Any) -> Any:
        files = {"driver": "file", "path": f"{self.folder.resolve().as_posix()}/"}
        store = {"driver": "ocdbt", "base": files, "path": name}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata}
        return self._library.open(spec, context=self._context, **options).result()

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except _LIBRARY_ERRORS as error:
            raise CheckpointError(self.folder, f"is damaged in its array {name!r}: {error!r:.400}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except _LIBRARY_ERRORS as error:
            raise OSError(f"the Vault {str(self.folder)!r} cannot be written: {error!r:.400}") from error


_LIBRARY_ERRORS = (ValueError, LookupError, NotImplementedError, OSError)
"""What tensorstore raises for errors of files, by the kind of the error."""


def leaves_of(tree: Any, path: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Yield the leaves of a tree of dicts, each with its keys."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, part in tree.items():
        yield from leaves_of(part, (*path, str(key)))


def tree_of(leaves: Mapping[Leaf, Any]) -> dict[str, Any]:
    """Return the tree of dicts that has these leaves."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return tree


def _name(leaf: Leaf) -> str:
    return "".join(f"{key}." for key in leaf)


def _read_metadata(path: Path) -> dict[Leaf, tuple[str, tuple[int, ...]]]:
    """Read the dtype and shape of each leaf."""
    try:
        about = json.loads(path.read_bytes())
        version = about["version"]
        if type(version) not in (int, float) or version // 1 != _VERSION // 1:
            raise CheckpointError(path, f"is of the Vaults' version {version!r:.50}; this marlvec reads 1")
        shapes = dict(leaves_of(about["structure_shape"]))
        dtypes = dict(leaves_of(about["structure_dtype"]))
        if shapes.keys() != dtypes.keys():
            raise ValueError("shapes and dtypes are of different trees")
        found = {leaf: (str(dtypes[leaf]), literal_eval(shape)) for leaf, shape in shapes.items()}
        for leaf, (_, shape) in found.items():
            if type(shape) is not tuple or len(shape) < 2 or any(type(size) is not int for size in shape):
                raise ValueError(f"the shape of {_name(leaf)!r} is {shape!r:.100}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r:.300}") from error
    return found
