"""The identity of a collector: its settings, which must be equal when a state is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from gymnasium.spaces import Space

from marlvec.collect.acting.policy_set import PolicySet
from marlvec.collect.episodes import EpisodeTracker
from marlvec.connectors import Pipeline
from marlvec.errors import ArgumentError, SerialisationError
from marlvec.serialization.state_fields import State, check_fields
from marlvec.serialization.values import encode, outline
from marlvec.vector.vector_env import VectorEnv

__all__ = ["check_identity", "describe_collector", "describe_pipeline"]


def describe_collector(
    envs: VectorEnv,
    policies: PolicySet,
    episodes: EpisodeTracker,
    settings: Mapping[str, Any],
    leaving: Collection[str] = (),
) -> State:
    """Return the identity of a collector, without the policies in ``leaving``, as strings and numbers."""
    mapping = episodes.mapping
    policy_ids = sorted(set(policies.policies) - set(leaving))
    return {
        "env": envs.spec.name,
        "num_envs": envs.num_envs,
        "agents": list(envs.agents),
        "spaces": {
            group.name: [
                [envs.agents[a] for a in group.agents],
                _of_space(group.observation_space),
                _of_space(group.action_space),
            ]
            for group in envs.spec.groups
        },
        "policies": policy_ids,
        "policy_mapping": "a function" if callable(mapping) else mapping,
        "connectors": {
            name: [describe_pipeline(pipelines[name]) for pipelines in policies.pipelines] for name in policy_ids
        },
        **settings,
    }


def _of_space(space: Space[Any]) -> list[str]:
    try:
        return outline(encode(space, "a space"))
    except SerialisationError:  # one of the user's own
        return [repr(space)]


def describe_pipeline(pipeline: Pipeline[Any]) -> list[str]:
    """Return a line per connector of a pipeline: its class and arguments, without its learned state."""
    try:
        return outline(pipeline.to_config())
    except SerialisationError:  # a class or a function in it is not registered
        return [f"{name}: {type(piece).__name__}" for name, piece in zip(pipeline.names, pipeline, strict=True)]


def check_identity(saved: Any, own: State, who: str = "this collector has") -> None:
    """Check that a state's identity equals that of the collector(s) to load it into; name all differences."""
    where = "set_state()"
    check_fields(saved, own, f"{where}: what it belongs to")
    found = []
    for name, here in own.items():
        if saved[name] == here:
            continue
        if isinstance(here, Mapping) and isinstance(saved[name], Mapping):
            there, here = _lines(saved[name]), _lines(here)
            lines = list(difflib.unified_diff(here, there, "here", "state", n=3, lineterm=""))
            found.append("\n".join([f"{name}:", *lines[:_MOST_LINES]]))
        else:
            found.append(f"{name}: the state is of {saved[name]!r:.300}, {who} {here!r:.300}")
    if found:
        raise ArgumentError(f"{where}: the state is of another collector. " + "; ".join(found))


_MOST_LINES = 40


def _lines(value: Any, indent: str = "") -> list[str]:
    """Return nested texts as indented lines below their names."""
    if isinstance(value, Mapping):
        return [line for key, part in value.items() for line in (f"{indent}{key}:", *_lines(part, f"{indent}  "))]
    if isinstance(value, (list, tuple)):
        return [line for part in value for line in _lines(part, indent)]
    return [f"{indent}{value}"]
