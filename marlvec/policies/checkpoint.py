"""A policy's learned state in a file (`save_policy`), a training's in a folder (`save_checkpoint`), as data only."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, Protocol, cast

from marlvec.arguments import count_from, whole_number
from marlvec.connectors import ActionPipeline, AgentPipeline, LearnerPipeline
from marlvec.connectors.pipeline import is_packed
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError
from marlvec.extras import import_extra
from marlvec.policies.policy import Policy, PolicyState
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath, atomic_link, locked_folder, remove_drafts
from marlvec.serialization.values import decode, encode

_CHAINS = ("agent_connectors", "action_connectors", "learner_connectors")
_FILES = {"last": "last.npz", "best": "best.npz"}
_OLD = re.compile(r"old-\d{6,12}\.npz", re.ASCII)
_known_scores: dict[Path, tuple[tuple[int, ...], float]] = {}  # score of each best.npz that this process wrote
_known_envs: dict[Path, tuple[tuple[int, ...], Any]] = {}  # env of each last.npz that this process wrote


class HasState(Protocol):
    """An object with a state: a torch module or optimizer, a `Policy`, a pipeline, a rating."""

    def state_dict(self) -> Any:
        """Return the state: dicts, lists and tuples of numbers, texts, arrays and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state from `state_dict`."""


class HasWholeState(Protocol):
    """An object whose complete state can be saved: a `Collector`, or `marlvec.distributed.Collectors`."""

    def get_state(self) -> Any:
        """Return the complete state as plain data."""

    def set_state(self, state: Any, /) -> Any:
        """Continue from a state of `get_state`; on an error, nothing has changed."""


class HasPolicies(Protocol):
    """The parts of a `Collector` that ``exact=False`` saves."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policy id to policy."""

    @property
    def trained_policies(self) -> Sequence[str]:
        """Ids of the trained policies."""

    agent_connectors: Mapping[str, AgentPipeline]
    action_connectors: Mapping[str, ActionPipeline]
    learner_connectors: Mapping[str, LearnerPipeline]


def save_checkpoint(
    folder: FilePath,
    *,
    collector: HasWholeState | HasPolicies | None = None,
    learner: Mapping[str, HasState] | None = None,
    progress: Mapping[str, Any] | None = None,
    score: float | None = None,
    keep: int = 1,
    exact: bool = True,
    overwrite: bool = False,
) -> Path:
    """Save a training, to continue it bit for bit: the last state as ``last.npz``, the best one as ``best.npz``.

    Call it between two batches. Files are written atomically, also if the process is killed, and hold data only:
    nothing in them is ever executed.

        marlvec.save_checkpoint("runs/mine", collector=collector, learner={"adam": adam}, progress={"done": done})
        done = marlvec.load_checkpoint("runs/mine", collector=collector, learner={"adam": adam})["done"]

    Args:
        folder: The folder; created if missing. One training at a time writes there: if several do, each file is
            complete, and the last writer wins.
        collector: A `Collector`, saved with its complete state (see `Collector.get_state`): policies, connectors, envs
            with their running episodes, rows that are in no batch yet, metrics, callbacks with a state, opponents. Or
            `marlvec.distributed.Collectors`.
        learner: Other parts of the learner, by any names: optimizers, networks, schedulers, ratings; all objects with
            ``state_dict()`` and ``load_state_dict()``.
        progress: Plain values of the script, e.g. its step and its curve: numbers, texts, arrays, and lists, tuples and
            dicts of these.
        score: Score of this state, more is better; it is also saved as ``best.npz`` if no earlier score was better.
            None: there is no best.
        keep: How many of the last states to keep: ``last.npz``, and earlier ones as ``old-000001.npz`` and so on.
        exact: False saves only a collector's trained policies and their connectors: a small file, after which new
            episodes begin. Needed for external envs, which cannot be saved.
        overwrite: Whether a saved training of another env in the folder may be replaced, with its best and older
            states.

    Returns:
        The path of ``last.npz``.

    Raises:
        ArgumentError: ``keep`` is less than 1; or the folder holds a training of another env, and ``overwrite`` is
            False.
        SerialisationError: A value cannot be stored in a file; nothing was written.
        StateError: The collector is in the middle of a call; see `Collector.get_state`.
        CheckpointError: An existing ``best.npz`` is damaged.
        OSError: A file cannot be written; the old one is unchanged.
    """
    kept = count_from(keep, f"keep={keep!r}")
    parts: dict[str, Any] = {"progress": dict(progress or {}), "learner": _states(learner or {})}
    if collector is not None:
        parts["collector"] = _state_of(collector) if exact else _policies_of(collector)
    tensors: list[list[Any]] = []
    env = _env_of(collector)
    data = {
        "score": encode(None if score is None else float(score), "the score"),
        "env": encode(env, "the env"),
        "parts": encode(_without_tensors(parts, [], tensors), "the checkpoint"),
        "tensors": encode(tensors, "the checkpoint"),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    with locked_folder(folder):
        return _write(Path(folder), data, env, score, kept, overwrite=overwrite)


def _write(folder: Path, data: dict[str, Any], env: Any, score: float | None, kept: int, *, overwrite: bool) -> Path:
    """Write a checkpoint into a locked folder."""
    best, last = (folder / _FILES[which] for which in ("best", "last"))
    remove_drafts(best)
    remove_drafts(last)
    replaces = _is_of_another_env(last, env, overwrite=overwrite)
    if replaces:
        for old in (best, *_older(last)):
            old.unlink(missing_ok=True)
    is_best = score is not None and not math.isnan(score) and (not best.exists() or score >= _score_of(best))
    if is_best:
        write_archive(best, data)
        _known_scores[best] = _identity(best), cast(float, score)
    if kept > 1 and not replaces:
        _keep_last(last)
    # best.npz first: if killed in between, the training continues from the last state and reaches the best one again.
    if is_best:
        atomic_link(best, last)
    else:
        write_archive(last, data)
    _known_envs[last] = _identity(last), env
    for old in _older(last)[kept - 1 :]:
        old.unlink(missing_ok=True)
    return last


def load_checkpoint(
    folder: FilePath,
    *,
    collector: HasWholeState | HasPolicies | None = None,
    learner: Mapping[str, HasState] | None = None,
    which: Literal["last", "best"] | int = "last",
    exact: bool = True,
) -> dict[str, Any]:
    """Continue a training from a checkpoint of `save_checkpoint`.

    Args:
        folder: The folder.
        collector: A collector made with the same arguments. None: its saved state is ignored, e.g. to read only
            ``progress``.
        learner: All other parts of the learner, under the names they were saved with. None: ignored.
        which: The last state, or the best; or a number of states before the last: 1 is the one before it.
        exact: False loads only the collector's trained policies and their connectors, in whichever way it was saved,
            e.g. into a collector with other envs, or more of them, whose episodes continue.

    Returns:
        The saved ``progress``.

    Raises:
        CheckpointError: The file is missing or damaged.
        ArgumentError: The file is of a different collector, or of a learner with other names; nothing was loaded.
        StateError: As for `Collector.set_state`.
        Exception: As raised by ``load_state_dict`` of a ``learner`` entry: the collector, and earlier entries, have
            been loaded by then. Fix it, and call this function again.
    """
    with locked_folder(folder, shared=True):
        path = _path_of(Path(folder), which)
        parts = _read(path)["parts"]
    if learner is not None:
        _check_names(path, "learner", parts["learner"], learner)
    if collector is not None:
        _load_collector(path, collector, parts.get("collector"), exact=exact)
    for name, one in (learner or {}).items():
        one.load_state_dict(parts["learner"][name])
    progress: dict[str, Any] = parts["progress"]
    return progress


def _load_collector(path: Path, collector: Any, saved: Mapping[str, Any] | None, *, exact: bool) -> None:
    """Load a collector's saved state, or its trained policies only."""
    if saved is None:
        raise ArgumentError(f"collector: {path} was saved without a collector; leave it out")
    if not isinstance(saved, dict):
        raise CheckpointError(path, f"holds no collector, but {saved!r:.200}")
    if exact and hasattr(collector, "set_state"):
        if "whole" not in saved:
            raise ArgumentError(
                f"{path} holds only policies and connectors, as written by save_checkpoint(exact=False); load it with "
                f"load_checkpoint(exact=False)"
            )
        collector.set_state(saved["whole"])
        return
    policies = _policies_in(path, saved, collector)
    for name, found in policies["policies"].items():
        policy = collector.policies[name]
        policy.load_state_dict(found["state"])
        policy.version = found["version"]
    for kind in _CHAINS:
        for name, state in policies[kind].items():
            getattr(collector, kind)[name].load_state_dict(state)


def _policies_in(path: Path, saved: Mapping[str, Any], collector: HasPolicies) -> Mapping[str, Any]:
    """Return a collector's trained policies and their connectors, in whichever way they were saved."""
    ids = collector.trained_policies
    if "whole" not in saved:
        if saved.keys() != {"policies", *_CHAINS}:
            raise CheckpointError(path, f"holds no policies and connectors, but {sorted(map(str, saved))}")
        _check_names(path, "policies", saved["policies"], ids)
        return saved
    try:  # the layout of Collector.get_state()
        runners = saved["whole"]["policies"]["runners"]
        if absent := [name for name in ids if name not in runners]:
            raise ArgumentError(f"{path} holds the policies {list(runners)}, not {absent}")
        policies = {name: {"version": runners[name]["version"], "state": runners[name]["policy"]} for name in ids}
        chains = {
            kind: {name: runners[name]["connectors"][k] for name in ids if runners[name]["connectors"][k]}
            for k, kind in enumerate(_CHAINS)
        }
    except (LookupError, TypeError) as error:
        raise ArgumentError(f"{path} does not hold the policies of one collector: {error!r:.200}") from error
    return {"policies": policies, **chains}


def _path_of(folder: Path, which: str | int) -> Path:
    number = None if isinstance(which, str) else whole_number(which)
    if number is not None and number >= 0:
        files = [folder / _FILES["last"], *_older(folder / _FILES["last"])]
        if number >= len(files):
            raise CheckpointError(folder, f"holds {len(files) - 1} checkpoints before the last, not {number}")
        return files[number]
    if which not in _FILES:
        raise ArgumentError(f"which: expected 'last', 'best' or the number of an earlier checkpoint, got {which!r}")
    return folder / _FILES[which]


def _kept(last: Path) -> list[Path]:
    """Return the older checkpoints, the newest first."""
    found = (path for path in last.parent.glob("old-*.npz") if _OLD.fullmatch(path.name))
    return sorted(found, key=_number, reverse=True)


def _number(old: Path) -> int:
    return int(old.stem.removeprefix("old-"))


def _older(last: Path) -> list[Path]:
    """As `_kept`, without one that a killed process had not yet replaced as last.npz."""
    return [path for path in _kept(last) if not (last.exists() and path.samefile(last))]


def _keep_last(last: Path) -> None:
    """Give last.npz another name as well, before it is replaced."""
    kept = _kept(last)
    if last.exists() and len(kept) == len(_older(last)):
        old = last.with_name(f"old-{_number(kept[0]) + 1 if kept else 1:06}.npz")
        remove_drafts(old)
        atomic_link(last, old)


def _score_of(best: Path) -> float:
    """Return the score of best.npz, from memory if this process wrote the file."""
    identity, score = _known_scores.get(best, (None, math.nan))
    return score if identity == _identity(best) else float(_read(best)["score"])


def _env_of(collector: Any) -> dict[str, Any] | None:
    """Return name and agents of the env, as far as the collector knows them."""
    envs, metrics = (getattr(collector, name, None) for name in ("envs", "metrics"))
    if metrics is None:
        return None
    return {"name": None if envs is None else envs.spec.name, "agents": list(metrics.agents)}


def _is_of_another_env(last: Path, env: Mapping[str, Any] | None, *, overwrite: bool) -> bool:
    """Return whether the folder holds a training of another env; if so, and not ``overwrite``, raise.

    Unreadable files count as no training.
    """
    if env is None or not last.exists():
        return False
    identity, saved = _known_envs.get(last, (None, None))
    if identity != _identity(last):
        try:
            saved = decode(read_archive(last)["env"])
        except (KeyError, MarlvecError):
            return False
    if saved is None or all(env[name] == saved[name] for name in env if None not in (env[name], saved[name])):
        return False
    if not overwrite:
        raise ArgumentError(
            f"save_checkpoint(): folder: expected one of {_describe_env(env)}, or a new one, got {str(last.parent)!r}, "
            f"which holds a training of {_describe_env(saved)}; save into another folder, or pass overwrite=True"
        )
    return True


def _describe_env(env: Mapping[str, Any]) -> str:
    return f"{env['name'] or 'an env'} with the agents {short(env['agents'])}"


def _identity(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _state_of(collector: Any) -> dict[str, Any]:
    return {"whole": collector.get_state()} if hasattr(collector, "get_state") else _policies_of(collector)


def _policies_of(collector: Any) -> dict[str, Any]:
    ids = collector.trained_policies
    policies = {name: collector.policies[name] for name in ids}
    return {
        "policies": {name: {"version": int(one.version), "state": one.state_dict()} for name, one in policies.items()},
        **{kind: _states({name: getattr(collector, kind)[name] for name in ids}) for kind in _CHAINS},
    }


def _states(named: Mapping[str, HasState]) -> dict[str, Any]:
    return {name: one.state_dict() for name, one in named.items()}


def _check_names(path: Path, what: str, saved: Mapping[str, Any], given: Sequence[str] | Mapping[str, Any]) -> None:
    if set(saved) != set(given):
        raise ArgumentError(f"{path} holds the {what} {list(saved)}, not {list(given)}")


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint's parts and score, with arrays converted to tensors where they were tensors."""
    found = read_archive(path)
    try:
        data = {name: decode(found[name]) for name in ("score", "parts", "tensors")}
        if not all(isinstance(data["parts"][name], dict) for name in ("progress", "learner")):
            raise TypeError(f"expected dicts as progress and learner, got {data['parts']!r:.200}")
        if tensors := {tuple(place) for place in data["tensors"]}:
            torch = import_extra("torch", "this checkpoint", "pip install torch")
            data["parts"] = _with_tensors(data["parts"], (), tensors, torch)
    except (KeyError, IndexError, TypeError, ValueError, MarlvecError) as error:
        if isinstance(error, ImportError):  # torch is not installed
            raise
        raise CheckpointError(path, f"holds no checkpoint of a training: {error!r:.300}") from error
    return data


def _without_tensors(value: Any, place: list[Any], tensors: list[list[Any]]) -> Any:
    """Replace torch tensors by arrays, and record their places."""
    if isinstance(value, dict):
        return {key: _without_tensors(item, [*place, key], tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, [*place, k], tensors) for k, item in enumerate(value))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    tensors.append(place)
    try:
        return value.detach().cpu().numpy()
    except TypeError as error:
        raise SerialisationError(
            f"the checkpoint, at {place}: numpy has no {value.dtype}; save it as float32"
        ) from error


def _with_tensors(value: Any, place: tuple[Any, ...], tensors: set[tuple[Any, ...]], torch: Any) -> Any:
    """Convert arrays at the recorded places to tensors."""
    if isinstance(value, dict):
        return {key: _with_tensors(item, (*place, key), tensors, torch) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, (*place, k), tensors, torch) for k, item in enumerate(value))
    return torch.from_numpy(value) if place in tensors else value


@dataclass(frozen=True, slots=True)
class PolicyCheckpoint:
    """Contents of a policy's file: its version, a state from its ``state_dict``, and states of its connectors.

    `AgentPipeline.load` and `ActionPipeline.load` build the connectors themselves from the same file.
    """

    version: int
    state: PolicyState
    agent_connectors: Mapping[str, Any] | None  # with its memory of running episodes; None: not saved
    action_connectors: Mapping[str, Any] | None


def save_policy(
    path: FilePath,
    policy: Policy,
    agent_connectors: AgentPipeline | None = None,
    action_connectors: ActionPipeline | None = None,
) -> None:
    """Save a policy's learned state and its connectors, e.g. for ``marlvec serve``.

    The connectors are stored as `Pipeline.save` stores them, with arguments, states and spaces: what builds the policy
    and this file are all that serving it needs, and `Opponent.from_file` makes a player of them.

    Args:
        path: The file, by convention ``.npz``. An old file is replaced atomically.
        policy: The policy.
        agent_connectors: Its agent connectors, e.g. ``collector.agent_connectors["main"]``; None: not saved.
        action_connectors: Its action connectors; None: not saved.

    Raises:
        ArgumentError: The connectors are part of another pipeline: pass the outer one.
        SerialisationError: A value in its state cannot be stored in a file; or a connector's class or function is not
            registered (`register_connector`, `register_function`). An old file is unchanged.
    """
    chains = {"agent_connectors": agent_connectors, "action_connectors": action_connectors}
    write_archive(
        path,
        {
            "version": encode(int(policy.version), "its version"),
            "state": encode(dict(policy.state_dict()), "the policy's state"),
            **{name: chain.pack() for name, chain in chains.items() if chain is not None},
        },
    )


def load_policy(path: FilePath) -> PolicyCheckpoint:
    """Read a file of `save_policy`; executes nothing from it. Raises `CheckpointError` if it is missing or damaged."""
    found = read_archive(path)
    try:
        states = (found.get(name) for name in ("agent_connectors", "action_connectors"))
        agent, action = (decode(state["state"] if is_packed(state) else state) for state in states)
        return PolicyCheckpoint(decode(found["version"]), decode(found["state"]), agent, action)
    except (KeyError, MarlvecError) as error:
        raise CheckpointError(path, f"holds no policy: {error!r:.300}") from error
