"""From what the user gave as connectors to one pipeline per policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from marlvec.connectors import Pipeline
from marlvec.errors import ArgumentError

__all__ = ["chains"]

P = TypeVar("P", bound=Pipeline[Any])


def chains(
    kind: type[P],
    given: P | Iterable[Any] | Mapping[str, Any] | None,
    policy_ids: Sequence[str],
    default: Callable[[], P],
) -> dict[str, P]:
    """Return one pipeline per policy id.

    Args:
        kind: AgentPipeline or ActionPipeline.
        given: None for the default; one chain (a pipeline, or connectors) for every policy, copied where there are
            several; or policy id to chain, with the default for those left out.
        policy_ids: All policies.
        default: Makes a default pipeline.

    Raises:
        ArgumentError: An unknown policy id, something that is no chain, or one pipeline given to two policies.
    """
    if given is None:
        return {name: default() for name in policy_ids}
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in policy_ids]:
            raise ArgumentError(
                f"connectors given for unknown policies {unknown}; the policies are {list(policy_ids)}: name those "
                f"alone, and give a policy that comes later its connectors in add_policy()"
            )
        found = {
            name: _chain(kind, given[name], f" for policy {name!r}") if name in given else default()
            for name in policy_ids
        }
        if len({id(chain) for chain in found.values()}) < len(found):
            raise ArgumentError(
                "one pipeline was given to two policies; it keeps state per agent, so each needs its own"
            )
        return found
    chain = _chain(kind, given, ", or a dict of policy id to those")
    if len(policy_ids) == 1:
        return {policy_ids[0]: chain}
    return {name: copy.deepcopy(chain) for name in policy_ids}


def _chain(kind: type[P], given: Any, where: str) -> P:
    if isinstance(given, kind):
        return given
    if isinstance(given, (list, tuple)):
        return kind(given)
    hint = "; leave it out for the default ones, or give [] for none" if given is None else ""
    raise ArgumentError(f"expected an {kind.__name__} or a list of connectors{where}, got {given!r:.200}{hint}")
