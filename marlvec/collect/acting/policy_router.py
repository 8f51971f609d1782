"""`PolicyRouter`: which rows go to which policy, and from the policies' answers to the envs' actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.noop_actions import GroupActions
from marlvec.collect.acting.policy_runner import PolicyRunner, Selection
from marlvec.collect.scheduling.env_step import index_of
from marlvec.envs.spec import AgentGroup
from marlvec.errors import ContractError

__all__ = ["PolicyRouter", "Share", "joined"]

AnyArray = NDArray[Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_SORTED_BY_DIGITS = 1 << 16  # numbers below are sorted as uint16, by their digits, which takes half the time or less
_REMEMBERED = 64  # sets of envs whose rows are remembered: the same envs often come back together again


Share = tuple[PolicyRunner, slice, IntArray]
"""Rows of one policy among those of several: which, and their lanes."""
Split = list[tuple[int, "Selection", list[Share]]]
"""Per group in which several policies play: its position, its rows, and whose they are."""


class PolicyRouter:
    """The policies' runners by number, and which agents each of them plays.

    ``policy_NA`` is read at every `update`; runners come and go, in the same mapping; ``seed`` maps a policy's number
    to its seed.
    """

    def __init__(
        self,
        runners: Mapping[int, PolicyRunner],
        groups: Sequence[AgentGroup],
        agents: tuple[str, ...],
        policy_NA: IntArray,
        seed: Callable[[int], int],
    ) -> None:
        self.runners = runners
        self.groups, self._agents, self._policy_NA, self._seed = tuple(groups), agents, policy_NA, seed
        self._columns = [np.array(group.agents) for group in groups]
        self._group_A, self._place_A = np.zeros((2, len(agents)), np.int64)  # each agent's, and its position there
        for g, columns in enumerate(self._columns):
            self._group_A[columns], self._place_A[columns] = g, np.arange(len(columns))
        self._policy_L = policy_NA.reshape(-1)
        self._env_L, self._agent_L = np.divmod(np.arange(policy_NA.size), len(agents))
        self._is_one_group = len(groups) == 1  # which has all agents, in order
        self._players: list[list[PolicyRunner]] = [[] for _ in groups]
        self.playing: list[PolicyRunner] = []  # of policies that play an agent in a running episode, group by group
        self.alone: list[PolicyRunner] = []  # of these, those whose group no other policy plays in
        self.is_shared = False  # whether several policies play in one group
        self._everyone: dict[tuple[int, bytes], Selection] = {}
        self._split: dict[bytes, Split] = {}  # of all agents, by the same envs
        for runner in self.runners.values():
            self.prepare(runner)

    def prepare(self, runner: PolicyRunner) -> None:
        """Give a runner its group of agents where there is one only: which agents it plays need not be known."""
        if len(self.groups) == 1:
            self.bind(runner, 0)

    def update(self) -> None:
        """Take over a change of ``policy_NA``; a policy must not play agents of different spaces (`ContractError`)."""
        self._everyone.clear()
        self._split.clear()
        for g, columns in enumerate(self._columns):
            numbers = self._policy_L if self._is_one_group else self._policy_NA[:, columns].reshape(-1)
            found = np.flatnonzero(np.bincount(numbers)).tolist()  # also removed ones, where no episode runs
            players = [self.runners[i] for i in found if i in self.runners]
            self._players[g] = [runner if runner.group_index == g else self.bind(runner, g) for runner in players]
        self.alone = [players[0] for players in self._players if len(players) == 1]
        self.is_shared = len(self.alone) < sum(map(bool, self._players))
        self.playing = [runner for players in self._players for runner in players]

    def bind(self, runner: PolicyRunner, g: int) -> PolicyRunner:
        """Make sure that a policy may play agents of a group; refuse one that plays another group."""
        if runner.group_index == -1:
            runner.bind(g, self.groups[g], self._agents, len(self._policy_NA), self._seed(runner.seed_number))
        elif runner.group_index != g:
            a, b = self.groups[runner.group_index].name, self.groups[g].name
            raise ContractError(
                f"policy {runner.policy_id!r} is to play agents of group {a!r} and of group {b!r}, whose spaces "
                f"differ; "
                f"give each group a policy of its own"
            )
        return runner

    def everyone(self, runner: PolicyRunner, env_ids: IntArray) -> Selection:
        """Return all rows that a policy plays in these envs; cached by envs."""
        key = runner.number, env_ids.tobytes()
        if (found := self._everyone.get(key)) is None:
            mask = np.ones((len(env_ids), len(self._agents)), np.bool_)
            found = self.select(runner, env_ids, self.lanes(env_ids, mask))
            size = len(env_ids) * len(self._columns[runner.group_index])
            flat = None if len(found.lanes) == size else found.flat
            found = Selection(flat, found.env_id, found.agent_index, found.lanes, index_of(found.lanes))
            if len(self._everyone) >= _REMEMBERED:
                self._everyone.clear()
            self._everyone[key] = found
        return found

    def lanes(self, env_ids: IntArray, mask_nA: BoolArray) -> IntArray:
        """Lanes of these envs for which a mask is True, ascending as the envs are."""
        flat = mask_nA.reshape(-1).nonzero()[0]
        if len(env_ids) == len(self._policy_NA):
            return flat
        env = flat // len(self._agents)
        lanes: IntArray = flat + (env_ids[env] - env) * len(self._agents)
        return lanes

    def _positions(self, width: int, env_ids: IntArray, lanes: IntArray) -> IntArray:
        """Positions of some lanes among (these envs, agents of their group), flattened."""
        is_everywhere = len(env_ids) == len(self._policy_NA)
        if self._is_one_group and is_everywhere:
            return lanes
        env, place = self._env_L[lanes], self._place_A[self._agent_L[lanes]]
        positions: IntArray = (env if is_everywhere else np.searchsorted(env_ids, env)) * width + place
        return positions

    def index(self, env_ids: IntArray, lanes: IntArray) -> tuple[IntArray, IntArray]:
        """Some lanes of these envs as an index of arrays (envs, A, …)."""
        env = self._env_L[lanes]
        is_everywhere = len(env_ids) == len(self._policy_NA)
        return env if is_everywhere else np.searchsorted(env_ids, env), self._agent_L[lanes]

    def pick(self, group_index: int, chosen: Selection, array_nA: AnyArray) -> AnyArray:
        """Rows of a group of an array over all agents."""
        columns = self._columns[group_index]
        if chosen.flat is None:
            return chosen.pick(array_nA if self._is_one_group else array_nA[:, columns])
        is_everywhere = len(array_nA) == len(self._policy_NA)
        picked: AnyArray = array_nA[chosen.env_id if is_everywhere else chosen.flat // len(columns), chosen.agent_index]
        return picked

    def played_by(self, runners: Sequence[PolicyRunner], lanes: IntArray) -> BoolArray:
        """Return which of these lanes some policies play: (n,)."""
        numbers = np.zeros(max(self.runners) + 1, np.bool_)
        numbers[[runner.number for runner in runners]] = True
        played: BoolArray = numbers[self._policy_L[lanes]]
        return played

    def select(self, runner: PolicyRunner, env_ids: IntArray, lanes: IntArray) -> Selection:
        """Rows of those of some lanes of these envs that a policy plays."""
        if not self._is_one_group or self.is_shared:
            lanes = lanes[self._policy_L[lanes] == runner.number]
        return self._selection(runner.group_index, env_ids, lanes)

    def _selection(self, g: int, env_ids: IntArray, lanes: IntArray) -> Selection:
        at = self._positions(len(self._columns[g]), env_ids, lanes)
        return Selection(at, self._env_L[lanes], self._agent_L[lanes], lanes, lanes)

    def split_everyone(self, env_ids: IntArray) -> Split:
        """Return `split` of all lanes of these envs, cached by envs."""
        key = env_ids.tobytes()
        if (found := self._split.get(key)) is None:
            if len(self._split) >= _REMEMBERED:
                self._split.clear()
            mask = np.ones((len(env_ids), len(self._agents)), np.bool_)
            self._split[key] = found = self.split(env_ids, self.lanes(env_ids, mask))
        return found

    def split(self, env_ids: IntArray, lanes: IntArray) -> Split:
        """Return rows of several policies, of some lanes of these envs, sorted by policy."""
        found = []
        for g, players in enumerate(self._players):
            own = lanes if self._is_one_group else lanes[self._group_A[self._agent_L[lanes]] == g]
            if len(players) < 2 or not len(own):
                continue
            numbers = self._policy_L[own]
            counts = np.bincount(numbers)
            narrow = np.uint16 if len(counts) <= _SORTED_BY_DIGITS else np.int64
            own = own[numbers.astype(narrow).argsort(kind="stable")]
            shares, start = [], 0
            for number in counts.nonzero()[0].tolist():  # not all: a league's policies may have thousands before them
                part = slice(start, start + int(counts[number]))
                shares.append((self.runners[number], part, own[part]))
                start = part.stop
            found.append((g, self._selection(g, env_ids, own), shares))
        return found

    def actions(self, parts: Sequence[GroupActions], env_ids: IntArray, *, grouped: bool) -> Any:
        """Return actions of n envs, ascending, in the vectorizer's form (a dict if grouped); zeros for idle agents."""
        trees = {}
        for g, group in enumerate(self.groups):
            own = [part for part in parts if part.group_index == g]
            lead = (len(env_ids), len(group.agents))
            if len(own) == 1 and len(own[0].lanes) == lead[0] * lead[1]:  # every one of them, in order
                leaves = [leaf.reshape(*lead, *leaf.shape[1:]) for leaf in own[0].leaves]
            else:
                leaves = group.action_tree.zeros(*lead)
                if own:
                    at = self._positions(lead[1], env_ids, joined([part.lanes for part in own]))
                    for leaf, *values in zip(leaves, *(part.leaves for part in own), strict=True):
                        leaf.reshape(lead[0] * lead[1], *leaf.shape[2:])[at] = joined(values)
            trees[group.name] = leaves[0] if group.action_tree.is_leaf else group.action_tree.unflatten(leaves)
        return trees if grouped else trees[self.groups[0].name]


def joined(parts: Sequence[AnyArray]) -> AnyArray:
    """Concatenate arrays; one alone is returned as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
