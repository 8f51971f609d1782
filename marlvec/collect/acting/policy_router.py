"""`PolicyRouter`: which rows go to which policy, and from the policies' answers to the envs' actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.noop_actions import GroupActions
from marlvec.collect.acting.policy_runner import PolicyRunner, Selection
from marlvec.collect.scheduling.env_step import index_of
from marlvec.envs.spec import AgentGroup
from marlvec.errors import ContractError

__all__ = ["PolicyRouter", "Share"]

AnyArray = NDArray[Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_REMEMBERED = 64  # sets of envs whose rows are remembered: the same envs often come back together again


class Share(NamedTuple):
    """Rows of one policy among those of several: from ``start`` to ``stop``."""

    runner: PolicyRunner
    start: int
    stop: int


class PolicyRouter:
    """The policies' runners, and which agents each of them plays.

    Args:
        runners: All of them, by number.
        groups: The envs' groups of agents.
        agents: Agent names.
        policy_NA: (N, A) number of each agent's policy; read anew at every `update`.
        seed: A policy's number → its seed.

    Attributes:
        runners, groups: as given; runners come and go, in the same mapping.
        playing: Runners of policies that play somebody in a running episode, group by group.
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
        place = np.zeros(len(agents), np.int64)
        for columns in self._columns:
            place[columns] = np.arange(len(columns))
        self._place_A = place  # position of each agent within its group
        self._players: list[list[PolicyRunner]] = [[] for _ in groups]
        self.playing: list[PolicyRunner] = []
        self._everyone: dict[tuple[int, bytes], Selection] = {}
        for runner in self.runners.values():
            self.prepare(runner)

    def prepare(self, runner: PolicyRunner) -> None:
        """Give a runner its group of agents where there is one only, with no need to wait and see whom it plays."""
        if len(self.groups) == 1:
            self.bind(runner, 0)

    def update(self) -> None:
        """Take over a change of ``policy_NA``.

        Raises:
            ContractError: A policy is to play agents of different spaces.
        """
        self._everyone.clear()
        for g, columns in enumerate(self._columns):
            found = np.unique(self._policy_NA[:, columns]).tolist()  # where no episode runs, also of some who are gone
            self._players[g] = [self.bind(self.runners[i], g) for i in found if i in self.runners]
        self.playing = [runner for players in self._players for runner in players]

    def bind(self, runner: PolicyRunner, g: int) -> PolicyRunner:
        """Make sure that a policy may play agents of a group.

        Raises:
            ContractError: It plays those of another one.
        """
        if runner.group_index == -1:
            runner.bind(g, self.groups[g], self._agents, len(self._policy_NA), self._seed(runner.number))
        elif runner.group_index != g:
            a, b = self.groups[runner.group_index].name, self.groups[g].name
            raise ContractError(
                f"policy {runner.policy_id!r} is to play agents of group {a!r} and of group {b!r}, whose spaces "
                f"differ; "
                f"give each group a policy of its own"
            )
        return runner

    def everyone(self, runner: PolicyRunner, env_ids: IntArray) -> Selection:
        """All rows a policy plays in these envs: the same object where the same envs are asked for again."""
        key = runner.number, env_ids.tobytes()
        if (found := self._everyone.get(key)) is None:
            mask = np.ones((len(env_ids), len(self._columns[runner.group_index])), np.bool_)
            found = self._select(runner, env_ids, mask)
            flat = None if len(found.lanes) == mask.size else found.flat
            found = Selection(flat, found.env_id, found.agent_index, found.lanes, index_of(found.lanes))
            if len(self._everyone) >= _REMEMBERED:
                self._everyone.clear()
            self._everyone[key] = found
        return found

    def pick(self, group_index: int, chosen: Selection, array_nA: AnyArray) -> AnyArray:
        """Rows of a group of an array over all agents."""
        return chosen.pick(array_nA[:, self._columns[group_index]])

    def plays_alone(self, runner: PolicyRunner) -> bool:
        """Whether nobody else plays in a policy's group."""
        return len(self._players[runner.group_index]) == 1

    def split(self, env_ids: IntArray, mask_nA: BoolArray) -> list[tuple[int, Selection, list[Share]]]:
        """Rows of several policies, where a mask over these envs is True: each policy's stand side by side.

        Returns:
            Per group in which several policies play: its position, its rows, and whose they are.
        """
        found = []
        for g, columns in enumerate(self._columns):
            if len(self._players[g]) < 2:
                continue
            env, place = np.nonzero(mask_nA if len(self.groups) == 1 else mask_nA[:, columns])
            if not len(env):
                continue
            flat, env_id, agent = env * len(columns) + place, env_ids[env], columns[place]
            numbers = self._policy_NA[env_id, agent]
            order = np.argsort(numbers.astype(np.uint16), kind="stable")  # a radix sort; there are not so many policies
            env_id, agent, numbers = env_id[order], agent[order], numbers[order]
            lanes = env_id * len(self._agents) + agent
            ends = np.searchsorted(numbers, [runner.number for runner in self._players[g]], side="right").tolist()
            shares = [
                Share(runner, start, stop)
                for runner, start, stop in zip(self._players[g], [0, *ends], ends, strict=False)
                if start < stop
            ]
            found.append((g, Selection(flat[order], env_id, agent, lanes, lanes), shares))
        return found

    def select(self, runner: PolicyRunner, env_ids: IntArray, mask_nA: BoolArray) -> Selection:
        """Rows a policy plays, where a mask over these envs is True."""
        columns = self._columns[runner.group_index]
        return self._select(runner, env_ids, mask_nA if len(self.groups) == 1 else mask_nA[:, columns])

    def _select(self, runner: PolicyRunner, env_ids: IntArray, mask: BoolArray) -> Selection:
        columns = self._columns[runner.group_index]
        if len(self._players[runner.group_index]) > 1:
            mask = mask & (self._policy_NA[env_ids[:, None], columns] == runner.number)
        flat = np.flatnonzero(mask)
        env_id = env_ids[flat // len(columns)]
        agent = columns[flat % len(columns)]
        lanes = env_id * len(self._agents) + agent
        return Selection(flat, env_id, agent, lanes, lanes)

    def actions(self, parts: Sequence[GroupActions], env_ids: IntArray, *, grouped: bool) -> Any:
        """Actions of these envs in the form the vectorizer takes; zeros for agents that do not act.

        Args:
            parts: What is to be done, for agents of these envs.
            env_ids: (n,) the envs, ascending.
            grouped: Whether the vectorizer wants a dict of groups.
        """
        trees = {}
        for g, group in enumerate(self.groups):
            own = [part for part in parts if part.group_index == g]
            lead = (len(env_ids), len(group.agents))
            if len(own) == 1 and len(own[0].lanes) == lead[0] * lead[1]:  # every one of them, in order
                leaves = [leaf.reshape(*lead, *leaf.shape[1:]) for leaf in own[0].leaves]
            else:
                leaves = group.action_tree.zeros(*lead)
                for part in own:
                    env, agent = np.divmod(part.lanes, len(self._agents))
                    at = np.searchsorted(env_ids, env) * lead[1] + self._place_A[agent]
                    for leaf, values in zip(leaves, part.leaves, strict=True):
                        leaf.reshape(lead[0] * lead[1], *leaf.shape[2:])[at] = values
            trees[group.name] = group.action_tree.unflatten(leaves)
        return trees if grouped else trees[self.groups[0].name]
