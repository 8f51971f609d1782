"""`NoopActions`: the actions of agents whose rows a connector has removed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors import ActionPipeline, AgentPipeline, Pipeline, Rows
from marlvec.connectors._support.history import blank_action
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.saved import Saved, SavedField
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree

__all__ = ["NoopActions", "GroupActions", "declared_noop"]

AnyArray = NDArray[Any]
IntArray = NDArray[np.int64]

REPEAT = "repeat"


class GroupActions(NamedTuple):
    """Actions of some agents of one group, for the envs."""

    group_index: int
    lanes: IntArray  # (n,) env * A + agent
    leaves: Sequence[AnyArray]  # (n, …) per leaf of the action space


class NoopActions(Saved):
    """The idle agents of one policy, and what is sent for them.

    ``noop``: leaves (1, …) of one action of the env's; ``"repeat"`` for the agent's last action, before there is one an
    action that stands for none, as `PrevActions` shows it; None where no connector says it.
    """

    saved_as = "idle agents"
    saved_fields: ClassVar = {"lanes": SavedField("lanes", (None,)), "last": SavedField("_last")}

    def __init__(self, noop: str | list[AnyArray] | None, tree: SpaceTree, num_envs: int, num_agents: int) -> None:
        self._noop = noop
        self._agents = num_agents
        self._blanks = [blank_action(leaf)[None] for leaf in tree.leaves] if noop == REPEAT else []
        self._last = [np.repeat(blank, num_envs * num_agents, axis=0) for blank in self._blanks]
        self.lanes = np.zeros(0, np.int64)  # the agents that are idle now, ascending

    def add(self, lanes: IntArray) -> None:
        """These agents are idle until their env has been sent something."""
        self.lanes = np.union1d(self.lanes, lanes)

    def actions(self, lanes: IntArray) -> list[AnyArray]:
        """Return the no-op actions of these lanes: per leaf (n, …)."""
        if self._noop == REPEAT:
            return [leaf[lanes] for leaf in self._last]
        assert isinstance(self._noop, list)  # where it is not declared, no agent becomes idle
        return [np.repeat(leaf, len(lanes), axis=0) for leaf in self._noop]

    def note_sent(self, lanes: IntArray, leaves: Sequence[AnyArray]) -> None:
        """Remember what was sent for agents that were not idle."""
        for last, leaf in zip(self._last, leaves, strict=False):  # there are none unless they are repeated
            last[lanes] = leaf

    def begin(self, env_ids: IntArray) -> None:
        """New episodes: there is no last action."""
        for last, blank in zip(self._last, self._blanks, strict=True):
            last.reshape(-1, self._agents, *last.shape[1:])[env_ids] = blank

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check who is idle."""
        lanes = values["lanes"]
        if (np.diff(lanes, prepend=-1) <= 0).any() or (len(lanes) and self._noop is None):
            raise ArgumentError(f"{self.saved_as}: lanes: expected ascending ones with a no-op, got {lanes.tolist()}")
        return values

    def clear(self) -> None:
        """No agent is idle."""
        self.lanes = np.zeros(0, np.int64)


def declared_noop(
    before: AgentPipeline, behind: ActionPipeline, tree: SpaceTree, who: str
) -> str | list[AnyArray] | None:
    """Return the no-op that a policy's connectors declare for agents whose rows they take out; see `NoopActions`.

    A no-op is an action of the policy's; a copy of the action connectors, in eval mode, makes it one of the env's.
    """
    said = [noop for piece in _pieces(before) if (noop := getattr(piece, "noop", None)) is not None]
    if not said:
        return None
    if any(isinstance(noop, str) for noop in said):
        if any(not isinstance(noop, str) or noop != REPEAT for noop in said):
            raise ContractError(f"the agent connectors of {who} declare different no-ops: {said}; declare one")
        return REPEAT
    if any(repr(noop) != repr(said[0]) for noop in said[1:]):
        raise ContractError(f"the agent connectors of {who} declare different no-ops: {said}; declare one")
    one = np.zeros(1, np.int64)
    action = map_tree(lambda leaf: np.asarray(leaf)[None], said[0])
    obs: Tree = SpaceTree(before.output_space_)
    rows = Rows(
        {
            **dict.fromkeys(("env_id", "agent_index", "eps_id", "t"), one),
            "obs": obs.unflatten(obs.zeros(1)),
            "rewards": np.zeros(1),
            **dict.fromkeys(("terminated", "truncated", "last"), np.zeros(1, np.bool_)),
            "first": np.ones(1, np.bool_),
            "actions": action,
        }
    )
    try:
        sent = tree.flatten(copy.deepcopy(behind).eval()(rows)["actions_for_env"])
        return [np.asarray(value).astype(leaf.dtype, copy=False) for value, leaf in zip(sent, tree.leaves, strict=True)]
    except Exception as error:
        error.add_note(f"while the no-op {said[0]!r} of {who} went through its action connectors")
        raise


def _pieces(pipeline: Pipeline[Any]) -> list[Any]:
    found = []
    for piece in pipeline:
        found += _pieces(piece) if isinstance(piece, Pipeline) else [piece]
    return found
