"""Answers for trained policies, to whoever plays outside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marlvec.collect import Collector
from marlvec.errors import ArgumentError
from marlvec.policies import Policy, load_policy

__all__ = ["answer", "apart", "restore"]

_AT_A_TIME = 64  # env steps between two looks at whether it is time to go


def apart(texts: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """Take ``[ID=]WHAT[@FILE]`` apart: what `marlvec.cli.arguments.policies` takes, and policy id to file.

    Raises:
        ArgumentError: There is no such file.
    """
    whats: list[str] = []
    files: dict[str, Path] = {}
    for text in texts:
        what, at, file = text.rpartition("@")
        if not at:
            whats.append(text)
            continue
        if not Path(file).is_file():
            raise ArgumentError(f"--policy {text}: there is no file {file}; save_policy() writes one")
        whats.append(what)
        match = re.match(r"([\w.-]+)=", what)
        files[match[1] if match else what.rpartition(":")[2]] = Path(file)
    return whats, files


def restore(collector: Collector, policies: Mapping[str, Policy], files: Mapping[str, Path]) -> None:
    """Have policies and their connectors know what they had learned.

    Raises:
        CheckpointError: A file is damaged, or holds something else.
        ArgumentError: It is another policy's, or other connectors'.
    """
    for policy_id, file in files.items():
        found = load_policy(file)
        chains: list[tuple[Any, Any]] = [
            (collector.agent_connectors[policy_id], found.agent_connectors),
            (collector.action_connectors[policy_id], found.action_connectors),
        ]
        try:
            policies[policy_id].load_state_dict(found.state)
            policies[policy_id].version = found.version
            for chain, state in chains:
                if state is not None:
                    chain.load_state_dict(state)
                    chain.reset()  # what it remembers is of other episodes
        except (ArgumentError, ValueError, KeyError) as error:
            raise ArgumentError(f"{file} does not fit policy {policy_id!r} or its connectors: {error}") from error


def answer(collector: Collector) -> None:
    """Answer until Ctrl-C."""
    collector.eval()
    try:
        while True:
            collector.collect(env_steps=_AT_A_TIME)
    except KeyboardInterrupt:
        pass
