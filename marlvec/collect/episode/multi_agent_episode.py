"""`MultiAgentEpisode`: an episode of a batch, or a part of an episode, with all its agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.episode.cuts import episodes, ids
from marlvec.collect.episode.single_agent_episode import SingleAgentEpisode, check_step
from marlvec.connectors.rows import join_columns
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree, zip_trees

__all__ = ["MultiAgentEpisode"]

AnyArray = NDArray[Any]

Agent = int | str


class MultiAgentEpisode:
    """An episode's rows by agent, indexed by env time.

    Agents act at different times, join late and end early. Each agent has agent episodes, which count its own
    decisions; all share the number of env steps since the reset (``env_t``). An agent has several
    `SingleAgentEpisode` if its policy changed in the middle, or if it ended and joined again.

    As in batches, its rows are decisions with a known outcome, after the agent connectors. So `cut` divides it like
    two calls of ``collect``. No method changes an episode; its arrays are shared with the batch: do not write to them.

    Get episodes from `MultiAgentBatch.episodes`; make a batch of them with `MultiAgentBatch.of_episodes`.

    Attributes:
        eps_id, env_id: Its id and env.
        agent_episodes: Ordered by agent and time; at least one, and no two of one agent overlap.
        agents: Names of all agents of the env, in order; None if unknown.
    """

    __slots__ = ("agent_episodes", "agents", "env_id", "eps_id")

    def __init__(
        self,
        eps_id: int,
        env_id: int,
        agent_episodes: Sequence[SingleAgentEpisode],
        agents: Sequence[str] | None = None,
    ) -> None:
        self.eps_id, self.env_id, self.agent_episodes = eps_id, env_id, tuple(agent_episodes)
        self.agents = None if agents is None else tuple(agents)
        if not self.agent_episodes:
            raise ArgumentError("an episode needs at least one agent episode")
        check_order(self.agent_episodes, f"eps_id {eps_id}")
        highest = max(single.agent_index for single in self.agent_episodes)
        if self.agents is not None and highest >= len(self.agents):
            raise ArgumentError(f"eps_id {eps_id} has rows of agent {highest}, and agents names {len(self.agents)}")

    @classmethod
    def of_rows(
        cls, batches: Mapping[str, Mapping[str, Tree]], agents: Sequence[str] | None = None
    ) -> list[MultiAgentEpisode]:
        """Make episodes from policies' rows (columns by policy id), ordered by ``eps_id``.

        A new agent episode begins after the agent's end, at a change of policy, and after missing decisions. Phantom
        rows are left out.

        Raises:
            ArgumentError: A column is missing; an ``eps_id`` belongs to several episodes; or rows are no longer single
                decisions, as after `NStep` or `PadSequences`.
        """
        return [
            cls(eps, env, agent_episodes, agents) for (eps, env), agent_episodes in read_agent_episodes(batches).items()
        ]

    def __len__(self) -> int:
        return self.env_stop - self.env_start

    def __repr__(self) -> str:
        lines = [f"  {single}" for single in self.agent_episodes]
        head = f"MultiAgentEpisode {self.eps_id} of env {self.env_id}, env steps {self.env_start} to {self.env_stop}"
        return "\n".join([head, *lines])

    # --- who, and when

    @property
    def agent_num(self) -> int:
        """A, the number of agents; if names are unknown, the highest agent index plus 1."""
        if self.agents is not None:
            return len(self.agents)
        return max(single.agent_index for single in self.agent_episodes) + 1

    @property
    def env_start(self) -> int:
        """Env step of its first decision."""
        return min(single.env_start for single in self.agent_episodes)

    @property
    def env_stop(self) -> int:
        """Env step of its last outcome."""
        return max(single.env_stop for single in self.agent_episodes)

    def episodes_of(self, agent: Agent) -> tuple[SingleAgentEpisode, ...]:
        """Return an agent's agent episodes, in order of time; empty if it made no decision."""
        index = self._index(agent)
        return tuple(single for single in self.agent_episodes if single.agent_index == index)

    def decided(self, start: int | None = None, stop: int | None = None) -> NDArray[np.bool_]:
        """Return (S, A) bool, whether an agent decided, for env steps ``start`` to ``stop - 1``; None: all steps."""
        steps = self._steps(start, stop)
        found = np.zeros((len(steps), self.agent_num), np.bool_)
        for single in self.agent_episodes:
            found[:, single.agent_index] |= single.places("t", steps) >= single.lookback
        return found

    # --- reading by env time; by an agent's own time read its agent episodes

    def at(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        agent: Agent | None = None,
        fill: Any = None,
    ) -> Tree:
        """Copy a column for env steps ``start`` to ``stop - 1``, of all agents or of one: (S, A, …) or (S, …).

        `SingleAgentEpisode.at` defines which entry belongs to which step. Steps before the episode's first are read
        from the lookback.

        Args:
            name: The column.
            start: First env step (0 is the reset); None for the episode's first.
            stop: Env step after the last one; None includes the episode's last outcome, which has observations but no
                decision.
            agent: Its name or index; None for all.
            fill: Value for missing entries; None raises.

        Raises:
            KeyError: The agent or column is unknown.
            IndexError: An entry is missing, and ``fill`` is None.
            ArgumentError: ``fill`` does not fit the dtype; the column's shape or dtype differs between agents (pass
                ``agent``); or no agent has rows that show them.
        """
        steps = self._steps(start, stop, ends=True)
        if agent is not None:
            return self._of_agent(name, self._index(agent), steps, fill)
        if fill is None and len({single.agent_index for single in self.agent_episodes}) < self.agent_num:
            raise IndexError(f"{name!r}: not all agents have rows; give fill=, the value to put there")
        like = self.agent_episodes[0]
        columns = []
        for index in range(self.agent_num):
            own = self.episodes_of(index)
            column = self._of_agent(name, index, steps, fill) if own else _blank(like, name, len(steps), fill)
            columns.append(column)

        def stacked(leaves: list[AnyArray]) -> AnyArray:
            if any(leaf.shape != leaves[0].shape or leaf.dtype != leaves[0].dtype for leaf in leaves):
                raise ArgumentError(f"{name!r} differs in shape or dtype between agents: ask with agent= for each")
            return np.stack(leaves, axis=1)

        return zip_trees(stacked, columns)

    def _of_agent(self, name: str, index: int, steps: NDArray[np.int64], fill: Any) -> Tree:
        agent_episodes = [single for single in self.agent_episodes if single.agent_index == index]
        if not agent_episodes:
            raise IndexError(f"{name!r}: agent {index} has no rows in this episode; give fill=, the value to put there")
        if len(agent_episodes) == 1:
            return agent_episodes[0].at_steps(name, steps, fill)
        # If one ends and the next begins in the same step, the later observation counts: the agent decided on it.
        where = [single.places(name, steps) for single in agent_episodes]
        joined = join_columns([{name: single.whole(name)} for single in agent_episodes])[name]
        sizes = [single.size(name) for single in agent_episodes]
        places = np.full(len(steps), -1, np.int64)
        for own, offset in zip(where, np.cumsum([0, *sizes]).tolist(), strict=False):
            places = np.where(own >= 0, own + offset, places)
        return agent_episodes[0].gather(joined, name, places, fill)

    # --- cutting and joining

    def cut(self, env_step: int, lookback: int = 0) -> tuple[MultiAgentEpisode | None, MultiAgentEpisode | None]:
        """Divide it at an env step; ``concat`` of both parts gives the whole again.

        As in batches of a collector that stopped there, the first part has the decisions whose outcome had come. The
        second part repeats the last ``lookback`` decisions of each agent. An empty part is None; if the first part
        would have only lookbacks, it has these and length 0.
        """
        if check_step("lookback", lookback) < 0:
            raise ArgumentError(f"lookback must be at least 0, got {lookback}")
        parts = [single.cut(check_step("env_step", env_step), lookback) for single in self.agent_episodes]
        heads, tails = ([part for part in side if part is not None] for side in zip(*parts, strict=True))
        return self._of(heads), self._of(tails)

    def slice(self, start: int, stop: int, lookback: int = 0) -> MultiAgentEpisode | None:
        """Return the decisions with outcomes after env step ``start`` up to ``stop``, with lookback; None if empty."""
        _, rest = self.cut(start, lookback)
        return None if rest is None else rest.cut(stop)[0]

    def concat(self, other: MultiAgentEpisode) -> MultiAgentEpisode:
        """Join this part and the next part of the episode, without its lookback."""
        if (self.eps_id, self.env_id, self.agents) != (other.eps_id, other.env_id, other.agents):
            raise ArgumentError(
                f"expected a part of eps_id {self.eps_id} of env {self.env_id}, agents {self.agents}, "
                f"got eps_id {other.eps_id} of env {other.env_id}, agents {other.agents}"
            )
        agent_episodes = list(self.agent_episodes)
        for single in other.agent_episodes:
            before = next((one for one in reversed(agent_episodes) if one.agent_index == single.agent_index), None)
            if before is not None and before.goes_on_in(single):
                agent_episodes[agent_episodes.index(before)] = before.joined(single)
            elif single.lookback:
                raise ArgumentError(f"{single} has a lookback that is not in the part before it: {before}")
            else:
                agent_episodes.append(single)
        agent_episodes.sort(key=lambda single: single.agent_index)  # stable: each agent's stay in order of time
        return MultiAgentEpisode(self.eps_id, self.env_id, agent_episodes, self.agents)

    def rows(self) -> dict[str, dict[str, Tree]]:
        """Return policy id to the columns of its rows, ordered by agent and time, without lookbacks."""
        found: dict[str, list[Mapping[str, Tree]]] = {}
        for single in self.agent_episodes:
            if not len(single):
                continue
            columns = single.rows()
            ids = {"eps_id": self.eps_id, "env_id": self.env_id, "agent_index": single.agent_index}
            columns |= {name: np.full(len(single), value, np.int64) for name, value in ids.items()}
            found.setdefault(single.policy_id, []).append(columns)
        return {policy_id: join_columns(parts) for policy_id, parts in found.items()}

    # --- plain data

    def state_dict(self) -> dict[str, Any]:
        """Return the episode as plain data: numbers, texts, lists, dicts, and trees of copied arrays."""
        return {
            "eps_id": self.eps_id,
            "env_id": self.env_id,
            "agents": None if self.agents is None else list(self.agents),
            "agent_episodes": [single.state_dict() for single in self.agent_episodes],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MultiAgentEpisode:
        """Rebuild an episode from the result of `state_dict`."""
        agent_episodes = [SingleAgentEpisode.from_state_dict(single) for single in state["agent_episodes"]]
        return cls(int(state["eps_id"]), int(state["env_id"]), agent_episodes, state["agents"])

    def _of(self, agent_episodes: list[SingleAgentEpisode]) -> MultiAgentEpisode | None:
        return MultiAgentEpisode(self.eps_id, self.env_id, agent_episodes, self.agents) if agent_episodes else None

    def _index(self, agent: Agent) -> int:
        if isinstance(agent, str):
            if self.agents is None:
                raise KeyError(f"the agents' names are not known, so ask for {agent!r} by its index; or give agents=")
            if agent not in self.agents:
                raise KeyError(f"no agent {agent!r}; the agents are {list(self.agents)}")
            return self.agents.index(agent)
        index = check_step("agent", agent)
        if not 0 <= index < self.agent_num:
            raise KeyError(f"no agent {index}; there are {self.agent_num}")
        return index

    def _steps(self, start: int | None, stop: int | None, *, ends: bool = False) -> NDArray[np.int64]:
        first = self.env_start if start is None else check_step("start", start)
        last = self.env_stop + ends if stop is None else check_step("stop", stop)
        return np.arange(first, max(first, last))


def _blank(like: SingleAgentEpisode, name: str, n: int, fill: Any) -> Tree:
    """Return a column of n ``fill`` values, with the dtypes and shapes of another agent's column."""
    return like.gather(map_tree(lambda leaf: leaf[:0], like.whole(name)), name, np.full(n, -1, np.int64), fill)


IntArray = NDArray[np.int64]
Columns = Mapping[str, Tree]

_NEEDED = ("eps_id", "env_id", "agent_index", "t", "env_t", "next_env_t", "terminated", "truncated")
_IDENTITY = ("eps_id", "env_id", "agent_index")


def read_agent_episodes(batches: Mapping[str, Columns]) -> dict[tuple[int, int], list[SingleAgentEpisode]]:
    """Split policies' rows into agent episodes, ordered by agent and time, by (eps_id, env_id), ascending.

    See `MultiAgentEpisode.of_rows`. An agent's row must begin with the outcome of its previous row.
    """
    found: dict[tuple[int, int], list[SingleAgentEpisode]] = {}
    for policy_id, columns in batches.items():
        for eps_id, env_id, single in _agent_episodes(policy_id, columns):
            found.setdefault((eps_id, env_id), []).append(single)
    if len({eps_id for eps_id, _ in found}) < len(found):
        raise ArgumentError("an eps_id has rows of several envs; split batches of several collectors one by one")
    for key, agent_episodes in found.items():
        agent_episodes.sort(key=lambda single: (single.agent_index, single.first_t))
        check_order(agent_episodes, f"eps_id {key[0]}")
    return dict(sorted(found.items()))


def check_order(agent_episodes: Sequence[SingleAgentEpisode], where: str) -> None:
    """Refuse agent episodes of one agent that overlap."""
    for one, other in pairwise(agent_episodes):
        if one.agent_index == other.agent_index and one.first_t + len(one) > other.first_t:
            raise ArgumentError(f"{where}: agent {one.agent_index} has decision t={other.first_t} more than once")
        if one.agent_index == other.agent_index and one.env_stop > other.env_start:
            raise ArgumentError(
                f"{where}: agent {one.agent_index} decides in env step {other.env_start}, and the decision before has "
                f"its outcome in env step {one.env_stop} only"
            )


def _agent_episodes(policy_id: str, columns: Columns) -> Iterator[tuple[int, int, SingleAgentEpisode]]:
    why = f"an episode of policy {policy_id!r}"
    named = {name: ids(columns, name, why) for name in _NEEDED}
    if "obs" not in columns or "next_obs" not in columns:
        raise ArgumentError(f"{why} needs the columns 'obs' and 'next_obs'; the columns are {list(columns)}")
    episodes(columns)  # raises if an eps_id belongs to several episodes
    order = np.lexsort((named["t"], named["agent_index"], named["eps_id"]))
    if "phantom" in columns:
        order = order[~ids(columns, "phantom", why).astype(np.bool_)[order]]
    if not len(order):
        return
    if (order != np.arange(len(named["t"]))[: len(order)]).any():
        columns = {name: map_tree(lambda leaf: leaf[order], column) for name, column in columns.items()}
        named = {name: column[order] for name, column in named.items()}
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (named["terminated"] | named["truncated"])[: len(order) - 1]
    for name, step in (("eps_id", 0), ("agent_index", 0), ("t", 1)):
        values = named[name][: len(order)]
        begins[1:] |= values[1:] != values[:-1] + step
    rest = {name: column for name, column in columns.items() if name not in _IDENTITY}
    for start, stop in pairwise([*np.flatnonzero(begins).tolist(), len(order)]):
        rows = {name: _part(column, start, stop) for name, column in rest.items()}
        eps_id, env_id, agent_index = (int(named[name][start]) for name in _IDENTITY)
        yield eps_id, env_id, SingleAgentEpisode.of_rows(agent_index, policy_id, rows)


def _part(column: Tree, start: int, stop: int) -> Tree:
    return map_tree(lambda leaf: leaf[start:stop], column)
