"""`save_checkpoint` and `load_checkpoint`: what a training must not lose, in a folder, as data alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from marlvec.connectors import ActionPipeline, AgentPipeline, LearnerPipeline
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError
from marlvec.extras import import_extra
from marlvec.policies.policy import Policy
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import decode, encode

__all__ = ["HasPolicies", "HasState", "load_checkpoint", "save_checkpoint"]

_CHAINS = ("agent_connectors", "action_connectors", "learner_connectors")
_FILES = {"last": "last.npz", "best": "best.npz"}


class HasState(Protocol):
    """Whatever can say its state and take it over: a torch module or optimizer, a `Policy`, a pipeline, a rating."""

    def state_dict(self) -> Any:
        """Say it: dicts, lists and tuples of numbers, texts, arrays and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over what `state_dict` gave."""


class HasPolicies(Protocol):
    """What of a `Collector` goes into a checkpoint."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policy id to policy."""

    @property
    def trained_policies(self) -> Sequence[str]:
        """Ids of those that are in it; opponents of a pool, which has files of its own, are not."""

    agent_connectors: Mapping[str, AgentPipeline]
    action_connectors: Mapping[str, ActionPipeline]
    learner_connectors: Mapping[str, LearnerPipeline]


def save_checkpoint(
    folder: FilePath,
    *,
    collector: HasPolicies | None = None,
    learner: Mapping[str, HasState] | None = None,
    progress: Mapping[str, Any] | None = None,
    score: float | None = None,
) -> Path:
    """Save what a training script must not lose: the last state as ``last.npz``, and the best one as ``best.npz``.

    Running episodes are not in it: who goes on begins new ones. A file is there as a whole or not at all, and holds
    data alone: nothing in it is ever executed.

        marlvec.save_checkpoint("runs/mine", collector=collector, learner={"adam": adam}, progress={"done": done})
        done = marlvec.load_checkpoint("runs/mine", collector=collector, learner={"adam": adam})["done"]

    Args:
        folder: Where to; made if it is not there.
        collector: A `Collector`, whose trained policies are saved, with their connectors.
        learner: What else learns, under any names: optimizers, networks, schedulers, ratings; whatever has
            ``state_dict()`` and ``load_state_dict()``.
        progress: Plain values that a script goes on from: how far it is, its curve. Numbers, texts, arrays, and lists,
            tuples and dicts of them.
        score: How good it is, more is better; saved as ``best.npz`` as well where none before was better. None: there
            is no best.

    Returns:
        The path of ``last.npz``.

    Raises:
        SerialisationError: There is something in it that a file cannot hold; nothing was written.
        CheckpointError: There is a ``best.npz`` that is damaged.
        OSError: A file cannot be written; the old one is as it was.
    """
    parts: dict[str, Any] = {"progress": dict(progress or {}), "learner": _states(learner or {})}
    if collector is not None:
        parts["collector"] = _policies_of(collector)
    tensors: list[list[Any]] = []
    data = {
        "score": encode(None if score is None else float(score), "the score"),
        "parts": encode(_without_tensors(parts, [], tensors), "the checkpoint"),
        "tensors": encode(tensors, "the checkpoint"),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    best, last = (Path(folder) / _FILES[which] for which in ("best", "last"))
    if score is not None and not math.isnan(score) and (not best.exists() or score >= _read(best)["score"]):
        write_archive(best, data)
    write_archive(last, data)
    return last


def load_checkpoint(
    folder: FilePath,
    *,
    collector: HasPolicies | None = None,
    learner: Mapping[str, HasState] | None = None,
    which: Literal["last", "best"] = "last",
) -> dict[str, Any]:
    """Have a training go on where `save_checkpoint` was called.

    Args:
        folder: The folder.
        collector: One with policies and connectors as they were; they take over what they had learned. None: what is
            saved of them is left alone, e.g. to look at ``progress`` first.
        learner: What else learned, all of it, under the names that it had; None: likewise.
        which: The last state, or the best.

    Returns:
        What was given as ``progress``.

    Raises:
        CheckpointError: There is no such file, or it is damaged.
        ArgumentError: It is of other policies, or of a learner of other names; nothing was loaded.
    """
    if which not in _FILES:
        raise ArgumentError(f"which must be 'last' or 'best', got {which!r}")
    path = Path(folder) / _FILES[which]
    parts = _read(path)["parts"]
    if learner is not None:
        _check_names(path, "learner", parts["learner"], learner)
    saved = parts.get("collector")
    if collector is not None:
        if saved is None:
            raise ArgumentError(f"{path} was saved without a collector")
        _check_names(path, "policies", saved["policies"], collector.trained_policies)
        for name, found in saved["policies"].items():
            policy = collector.policies[name]
            policy.load_state_dict(found["state"])
            policy.version = found["version"]
        for kind in _CHAINS:
            for name, state in saved[kind].items():
                getattr(collector, kind)[name].load_state_dict(state)
    for name, one in (learner or {}).items():
        one.load_state_dict(parts["learner"][name])
    progress: dict[str, Any] = parts["progress"]
    return progress


def _policies_of(collector: HasPolicies) -> dict[str, Any]:
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
