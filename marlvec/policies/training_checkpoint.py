"""`save_checkpoint` and `load_checkpoint`: what a training must not lose, in a folder, as data alone."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, Protocol, cast

from marlvec.arguments import whole_number
from marlvec.connectors import ActionPipeline, AgentPipeline, LearnerPipeline
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError
from marlvec.extras import import_extra
from marlvec.policies.policy import Policy
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.atomic_file import atomic_link, locked_folder, remove_drafts
from marlvec.serialization.values import decode, encode

__all__ = ["HasPolicies", "HasState", "HasWholeState", "load_checkpoint", "save_checkpoint"]

_CHAINS = ("agent_connectors", "action_connectors", "learner_connectors")
_FILES = {"last": "last.npz", "best": "best.npz"}
_OLD = re.compile(r"old-\d{6,12}\.npz", re.ASCII)
_known_scores: dict[Path, tuple[tuple[int, ...], float]] = {}  # of best.npz as this process has written it
_known_envs: dict[Path, tuple[tuple[int, ...], Any]] = {}  # likewise, of last.npz


class HasState(Protocol):
    """Whatever can say its state and take it over: a torch module or optimizer, a `Policy`, a pipeline, a rating."""

    def state_dict(self) -> Any:
        """Say it: dicts, lists and tuples of numbers, texts, arrays and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over what `state_dict` gave."""


class HasWholeState(Protocol):
    """Whatever can go on where it was: a `Collector`, or `marlvec.distributed.Collectors`."""

    def get_state(self) -> Any:
        """Say where it is, as plain data."""

    def set_state(self, state: Any, /) -> Any:
        """Go on where `get_state` was called; or change nothing, and raise."""


class HasPolicies(Protocol):
    """What of a `Collector` goes into a checkpoint where it is not saved whole."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policy id to policy."""

    @property
    def trained_policies(self) -> Sequence[str]:
        """Ids of those that are in batches."""

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
    """Save a training, so that it goes on bit by bit: the last state as ``last.npz``, and the best one as ``best.npz``.

    Call it between two batches. A file is there as a whole or not at all, also after a kill at any moment, and holds
    data alone: nothing in it is ever executed.

        marlvec.save_checkpoint("runs/mine", collector=collector, learner={"adam": adam}, progress={"done": done})
        done = marlvec.load_checkpoint("runs/mine", collector=collector, learner={"adam": adam})["done"]

    Args:
        folder: Where to; made if it is not there. One training at a time writes there: of several, each leaves whole
            files, and the last to finish wins.
        collector: A `Collector`, which is saved whole (see `Collector.get_state`): policies, connectors, envs in the
            middle of their episodes, rows that no batch holds yet, metrics, callbacks that have a state, opponents. Or
            `marlvec.distributed.Collectors`.
        learner: What else learns, under any names: optimizers, networks, schedulers, ratings; whatever has
            ``state_dict()`` and ``load_state_dict()``.
        progress: Plain values that a script goes on from: how far it is, its curve. Numbers, texts, arrays, and lists,
            tuples and dicts of them.
        score: How good it is, more is better; saved as ``best.npz`` as well where none before was better. None: there
            is no best.
        keep: How many of the last states to keep: beside ``last.npz`` those before it, as ``old-000001.npz`` and so on.
        exact: False saves of a collector trained policies and their connectors alone: a small file, after which new
            episodes begin. So it is with external envs, which cannot be saved here.
        overwrite: Whether a training of another env that is saved in the folder may be replaced, its best and older
            states included.

    Returns:
        The path of ``last.npz``.

    Raises:
        ArgumentError: ``keep`` is less than 1; or the folder holds a training of another env, and ``overwrite`` is
            False.
        SerialisationError: There is something in it that a file cannot hold; nothing was written.
        StateError: The collector is in the middle of something; see `Collector.get_state`.
        CheckpointError: There is a ``best.npz`` that is damaged.
        OSError: A file cannot be written; the old one is as it was.
    """
    if (kept := whole_number(keep)) is None or kept < 1:
        raise ArgumentError(f"keep must be an integer of at least 1, got {keep!r}")
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
    """Write a checkpoint into a folder that is locked."""
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
    # The best first: killed in between, the training goes on from the last one and comes to the best once more.
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
    """Have a training go on where `save_checkpoint` was called.

    Args:
        folder: The folder.
        collector: One that was made with the same arguments, which goes on where that one was. None: what is saved of
            it is left alone, e.g. to look at ``progress`` first.
        learner: What else learned, all of it, under the names that it had; None: likewise.
        which: The last state, or the best; or of those that were kept a number: 1 is the one before the last.
        exact: False loads of the collector trained policies and their connectors alone, whichever way it was saved:
            into one with other envs, or with more of them, whose episodes stay as they are.

    Returns:
        What was given as ``progress``.

    Raises:
        CheckpointError: There is no such file, or it is damaged.
        ArgumentError: It is of another collector, which is described, or of a learner of other names; nothing was
            loaded.
        StateError: As of `Collector.set_state`.
        Exception: What an entry of ``learner`` raises in ``load_state_dict``: the collector, and the entries before it,
            have been loaded by then. Mend it, and call this again.
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
    """Load what was saved of a collector, as far as it is wanted."""
    if saved is None:
        raise ArgumentError(f"{path} was saved without a collector")
    if not isinstance(saved, dict):
        raise CheckpointError(path, f"holds no collector, but {saved!r:.200}")
    if exact and hasattr(collector, "set_state"):
        if "whole" not in saved:
            raise ArgumentError(
                f"{path} holds policies and connectors alone, as save_checkpoint(exact=False) writes them; load them "
                f"by load_checkpoint(exact=False)"
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
    """The trained policies of a collector and their connectors, by whatever way they were saved."""
    ids = collector.trained_policies
    if "whole" not in saved:
        if saved.keys() != {"policies", *_CHAINS}:
            raise CheckpointError(path, f"holds no policies and connectors, but {sorted(map(str, saved))}")
        _check_names(path, "policies", saved["policies"], ids)
        return saved
    try:  # as collect/ writes it, where runners are what has policies and connectors
        runners = saved["whole"]["policies"]["runners"]
        if absent := [name for name in ids if name not in runners]:
            raise ArgumentError(f"{path} holds the policies {list(runners)}, not {absent}")
        policies = {name: {"version": runners[name]["version"], "state": runners[name]["policy"]} for name in ids}
        chains = {
            kind: {name: runners[name]["connectors"][k] for name in ids if runners[name]["connectors"][k]}
            for k, kind in enumerate(_CHAINS)
        }
    except (LookupError, TypeError) as error:
        raise ArgumentError(f"{path} holds no policies of a single collector: {error!r:.200}") from error
    return {"policies": policies, **chains}


def _path_of(folder: Path, which: str | int) -> Path:
    number = None if isinstance(which, str) else whole_number(which)
    if number is not None and number >= 0:
        files = [folder / _FILES["last"], *_older(folder / _FILES["last"])]
        if number >= len(files):
            raise CheckpointError(folder, f"holds {len(files) - 1} checkpoints before the last, not {number}")
        return files[number]
    if which not in _FILES:
        raise ArgumentError(f"which must be 'last', 'best' or a number of those before the last, got {which!r}")
    return folder / _FILES[which]


def _kept(last: Path) -> list[Path]:
    """Those that were kept, the newest first."""
    found = (path for path in last.parent.glob("old-*.npz") if _OLD.fullmatch(path.name))
    return sorted(found, key=_number, reverse=True)


def _number(old: Path) -> int:
    return int(old.stem.removeprefix("old-"))


def _older(last: Path) -> list[Path]:
    """The same but for one that was about to be kept when its writer was killed: it is still the last one."""
    return [path for path in _kept(last) if not (last.exists() and path.samefile(last))]


def _keep_last(last: Path) -> None:
    """Have the last state under another name, too, before another one takes its place."""
    kept = _kept(last)
    if last.exists() and len(kept) == len(_older(last)):
        old = last.with_name(f"old-{_number(kept[0]) + 1 if kept else 1:06}.npz")
        remove_drafts(old)
        atomic_link(last, old)


def _score_of(best: Path) -> float:
    """Read from the file, unless it is the one that was written here."""
    identity, score = _known_scores.get(best, (None, math.nan))
    return score if identity == _identity(best) else float(_read(best)["score"])


def _env_of(collector: Any) -> dict[str, Any] | None:
    """Name and agents of the env that is collected from, as far as the collector knows them."""
    envs, metrics = (getattr(collector, name, None) for name in ("envs", "metrics"))
    if metrics is None:
        return None
    return {"name": None if envs is None else envs.spec.name, "agents": list(metrics.agents)}


def _is_of_another_env(last: Path, env: Mapping[str, Any] | None, *, overwrite: bool) -> bool:
    """Return whether the folder holds a training of another env; one that cannot be read is of none.

    Raises:
        ArgumentError: It does, and is not to be overwritten.
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
    """A checkpoint's parts and score, with tensors where there were some."""
    found = read_archive(path)
    try:
        data = {name: decode(found[name]) for name in ("score", "parts", "tensors")}
        if not all(isinstance(data["parts"][name], dict) for name in ("progress", "learner")):
            raise TypeError(f"progress and learner are no dicts in {data['parts']!r:.200}")
        if tensors := {tuple(place) for place in data["tensors"]}:
            torch = import_extra("torch", "this checkpoint", "pip install torch")
            data["parts"] = _with_tensors(data["parts"], (), tensors, torch)
    except (KeyError, IndexError, TypeError, ValueError, MarlvecError) as error:
        if isinstance(error, ImportError):  # there is no torch here
            raise
        raise CheckpointError(path, f"holds no checkpoint of a training: {error!r:.300}") from error
    return data


def _without_tensors(value: Any, place: list[Any], tensors: list[list[Any]]) -> Any:
    """The same with arrays in place of torch's tensors, whose places are noted."""
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
    """The other way round."""
    if isinstance(value, dict):
        return {key: _with_tensors(item, (*place, key), tensors, torch) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, (*place, k), tensors, torch) for k, item in enumerate(value))
    return torch.from_numpy(value) if place in tensors else value
