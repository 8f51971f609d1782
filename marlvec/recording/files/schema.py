"""`schema.json`: the envs of a recording, and the recorder's notes."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError
from marlvec.recording.files.manifest import FORMAT, SCHEMA
from marlvec.serialization.atomic_file import atomic_file
from marlvec.serialization.values import decode, encode
from marlvec.vector.vector_env import VectorEnv

__all__ = ["check_same_envs", "describe_envs", "read_schema", "space_from", "write_schema"]


_DTYPE = re.compile(r"[<>|][biuf][1248]", re.ASCII)
_PER_AGENT = ("observation_spaces", "action_spaces")


def describe_envs(envs: VectorEnv) -> dict[str, Any]:
    """Return the name, agents, groups and spaces of envs, JSON-able; None for a space that has no JSON form."""
    spec = envs.spec
    return {
        "name": spec.name,
        "agents": list(spec.agents),
        "groups": {group.name: list(group.agents) for group in spec.groups},
        "observation_spaces": [_space(space) for space in spec.observation_spaces],
        "action_spaces": [_space(space) for space in spec.action_spaces],
        "state_space": None if spec.state_space is None else _space(spec.state_space),
    }


def space_from(data: Any) -> Space[Any] | None:
    """Rebuild a space from `describe_envs`; None for None."""
    space = None if data is None else decode(data)
    if space is not None and not isinstance(space, Space):
        raise ArgumentError(f"expected a space, got {space!r:.100}")
    return space


def check_same_envs(known: Mapping[str, Any], envs: Mapping[str, Any], folder: Path) -> None:
    """Check that envs equal those of a recording; the error names the differences."""
    for name, value in known.items():
        own, other = envs.get(name), value
        if _json_text(own) == _json_text(other):
            continue
        if name in _PER_AGENT:  # agents are compared first
            pairs = zip(known["agents"], own or [], other, strict=True)
            agent, own, other = next(pair for pair in pairs if _json_text(pair[1]) != _json_text(pair[2]))
            name = f"the {name.removesuffix('s').replace('_', ' ')} of {agent!r}"
        raise ArgumentError(
            f"Recorder({str(folder)!r}): the envs differ from the recording's in {name}: expected {_short(other)}, got "
            f"{_short(own)}; record into another folder"
        )


def write_schema(folder: Path, envs: Mapping[str, Any] | None, notes: Mapping[str, Any]) -> None:
    """Write ``schema.json``, atomically."""
    about = {"format": FORMAT, "marlvec": sys.modules["marlvec"].__version__, "envs": envs, "notes": dict(notes)}
    with atomic_file(folder / SCHEMA) as file:
        file.write(_json_text(about, indent=1).encode() + b"\n")


def read_schema(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Read ``schema.json``: the envs, with spaces as JSON; and the notes."""
    path = folder / SCHEMA
    try:
        about = json.loads(path.read_bytes(), object_hook=_array)
        if about["format"] != FORMAT:
            raise CheckpointError(path, f"is of format {about['format']!r:.50}; this marlvec reads {FORMAT}")
        envs, notes = about["envs"], dict(about["notes"])
        if envs is not None:
            agents = [str(agent) for agent in envs["agents"]]
            spaces = [[space_from(space) for space in envs[name]] for name in _PER_AGENT]
            if any(len(each) != len(agents) for each in spaces):
                raise ValueError(f"{len(agents)} agents have {[len(each) for each in spaces]} spaces")
            space_from(envs["state_space"])
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MarlvecError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r:.300}") from error
    return envs, notes


def _space(space: Space[Any]) -> Any:
    try:
        return encode(space, "space")
    except SerialisationError:
        return None


def _json_text(data: Any, indent: int | None = None) -> str:
    return json.dumps(data, default=_plain, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": value.dtype.str, "shape": list(value.shape), "base64": data}
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    return str(value)


def _array(data: dict[str, Any]) -> Any:
    if "$array" not in data:
        return data
    if _DTYPE.fullmatch(data["$array"]) is None:
        raise ValueError(f"expected the dtype of numbers, got {data['$array']!r:.50}")
    return np.frombuffer(base64.b64decode(data["base64"]), data["$array"]).reshape(data["shape"])


def _short(value: Any) -> str:
    try:
        space = space_from(value) if isinstance(value, dict) and "$space" in value else value
    except MarlvecError:
        space = value
    return f"{space!r:.300}"
