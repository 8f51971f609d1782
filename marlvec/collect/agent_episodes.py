"""`SingleAgentEpisode` and `MultiAgentEpisode`: the rows of a batch by episode, in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.connectors.rows import join_columns
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree, tree_leaves, zip_trees

IntArray = NDArray[np.int64]
Columns = Mapping[str, Tree]

MOMENTS = ("obs", "env_t", "state")
"""Columns that are there once more than there are decisions: rows have the next one beside each, as ``next_…``."""


class SingleAgentEpisode:
    """One agent's consecutive decisions in one episode, under one policy: T decisions and T + 1 moments.

    Each observation is stored once, although two rows of a batch have it. Columns of moments (``obs``, ``env_t``, and
    ``state`` if the env has one) have T + 1 entries: each decision's, and that of the last outcome. All other columns
    (``actions``, ``rewards``, ``t``, ``logp``, …) have T.

    It may have a *lookback*: the last decisions of the previous chunk. Read them at negative positions; they are not
    part of ``len()``, ``episode["obs"]`` or `rows`.

    Get them from `MultiAgentBatch.episodes` and `MultiAgentEpisode.cut`. Arrays may be shared with these: do not write
    to them.

    Attributes:
        agent_index: The agent.
        policy_id: The policy that decided.
        lookback: Its number of decisions.
    """

    __slots__ = ("_decisions", "_moments", "_order", "agent_index", "lookback", "policy_id")

    def __init__(
        self,
        agent_index: int,
        policy_id: str,
        moments: Columns,
        decisions: Columns,
        order: tuple[str, ...],
        lookback: int = 0,
    ) -> None:
        self.agent_index, self.policy_id, self.lookback = agent_index, policy_id, lookback
        self._moments, self._decisions, self._order = dict(moments), dict(decisions), order

    @classmethod
    def of_rows(cls, agent_index: int, policy_id: str, rows: Columns) -> SingleAgentEpisode:
        """Make an episode from an agent's consecutive rows: each begins with the last one's next observation."""
        moments, decisions = {}, {}
        for name, column in rows.items():
            if name.startswith("next_") and name[5:] in MOMENTS and name[5:] in rows:
                continue
            if name not in MOMENTS or f"next_{name}" not in rows:
                decisions[name] = column
                continue
            after = rows[f"next_{name}"]
            if not all(same(a[:-1], b[1:]) for a, b in _pairs(after, column)):
                raise ArgumentError(
                    f"next_{name} of a row of agent {agent_index} is not the {name} of its next one: rows are missing, "
                    f"or NStep or another connector has made others of them"
                )
            moments[name] = zip_trees(lambda parts: np.concatenate([parts[0], parts[1][-1:]]), [column, after])
        return cls(agent_index, policy_id, moments, decisions, tuple(rows))

    def __len__(self) -> int:
        return self._total - self.lookback

    def __repr__(self) -> str:
        flags = (name for name in ("terminated", "truncated") if getattr(self, name))
        end = " and ".join(flags) or "open"
        carried = f", lookback {self.lookback}" if self.lookback else ""
        return (
            f"SingleAgentEpisode(agent {self.agent_index} by {self.policy_id!r}: "
            f"{len(self)} decisions from t={self.first_t} "
            f"in env steps {self.env_start} to {self.env_stop}, {end}{carried})"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._moments or name in self._decisions

    __iter__ = None  # len() counts decisions and [] names columns, so iterating could mean either

    def keys(self) -> list[str]:
        """Names of the columns."""
        return [*self._moments, *self._decisions]

    def __getitem__(self, name: str) -> Tree:
        """Return a column without the lookback, as views: (T + 1, …) of moments, (T, …) of decisions."""
        column, _ = self._column(name)
        return map_tree(lambda leaf: leaf[self.lookback :], column)

    @property
    def first_t(self) -> int:
        """``t`` of its first decision; without decisions, of the next one."""
        t = self._decisions["t"]
        return int(t[self.lookback] if len(self) else t[-1] + 1)

    @property
    def env_t(self) -> IntArray:
        """(T + 1,) env step of each moment."""
        env_t: IntArray = self["env_t"]
        return env_t

    @property
    def env_start(self) -> int:
        """Env step of its first decision."""
        return int(self.env_t[0])

    @property
    def env_stop(self) -> int:
        """Env step in which the outcome of its last decision came."""
        return int(self.env_t[-1])

    @property
    def terminated(self) -> bool:
        """Whether the agent was terminated at the end of it."""
        return bool(self._decisions["terminated"][-1])

    @property
    def truncated(self) -> bool:
        """Whether the agent was truncated at the end of it."""
        return bool(self._decisions["truncated"][-1])

    @property
    def is_done(self) -> bool:
        """Whether the agent ended with it."""
        return self.terminated or self.truncated

    @property
    def has_last_obs(self) -> bool:
        """Whether the env gave a last observation; if not, the one before is repeated."""
        return "next_obs_missing" not in self or not self._decisions["next_obs_missing"][-1]

    # --- reading

    def get(self, name: str, start: int | None = None, stop: int | None = None, *, fill: Any = None) -> Tree:
        """Copy entries ``start`` to ``stop - 1`` of a column, counted in the agent's own decisions or moments.

        0 is its first decision, and -1 the last of the lookback: a negative number never counts from the end.

        Args:
            name: The column.
            start: First position; None for 0.
            stop: Position after the last one; None for the end.
            fill: Value for positions outside the episode and its lookback; None raises.

        Raises:
            KeyError: The column is unknown.
            IndexError: An entry is missing, and ``fill`` is None.
            ArgumentError: ``fill`` does not fit the column's dtype, or a position is not a whole number.
        """
        column, there = self._column(name)
        first = 0 if start is None else check_step("start", start)
        last = there - self.lookback if stop is None else check_step("stop", stop)
        where = np.arange(first, max(first, last)) + self.lookback
        where[(where < 0) | (where >= there)] = -1
        return gather(column, where, fill, f"{name!r} of agent {self.agent_index}, {first} to {last}")

    def at(self, name: str, start: int, stop: int, *, fill: Any = None) -> Tree:
        """Copy a column for env steps ``start`` to ``stop - 1`` of the episode; 0 is the reset.

        An observation belongs to the env step in which it was made; an action and its reward to the env step of the
        decision. A step has no entry while the agent waits for its turn, before it joins and after it ended, and if the
        env gave no final observation; ``fill`` is the value there, and None raises as in `get`. The lookback's entries
        are included.
        """
        steps = np.arange(check_step("start", start), max(start, check_step("stop", stop)))
        return self.at_steps(name, steps, fill)

    def at_steps(self, name: str, env_steps: IntArray, fill: Any) -> Tree:
        """Return a column's entries at these env steps; see `at`."""
        return self.gather(self.whole(name), name, self.places(name, env_steps), fill)

    def gather(self, column: Tree, name: str, places: IntArray, fill: Any) -> Tree:
        """Gather entries of a column by position; see `windows.gather`."""
        return gather(column, places, fill, f"{name!r} of agent {self.agent_index} by env step")

    def places(self, name: str, env_steps: IntArray) -> IntArray:
        """Return each env step's position in a column, lookback included; -1 if it has none."""
        times: IntArray = self._moments["env_t"]
        _, there = self._column(name)
        if name == "obs" and not self.has_last_obs:
            there -= 1
        times = times[:there]
        if not there:
            return np.full(len(env_steps), -1, np.int64)
        where = np.minimum(np.searchsorted(times, env_steps), there - 1)
        return np.where(times[where] == env_steps, where, -1)

    def whole(self, name: str) -> Tree:
        """Return a column with the lookback, not copied."""
        return self._column(name)[0]

    def size(self, name: str) -> int:
        """Return the number of a column's entries, the lookback's included."""
        return self._column(name)[1]

    # --- cutting and joining

    def cut(self, env_step: int, lookback: int) -> tuple[SingleAgentEpisode | None, SingleAgentEpisode | None]:
        """Split into decisions whose outcome had come by this env step, and the others; None for an empty part.

        The first part keeps the lookback, even if it has nothing else.
        """
        p = max(self.lookback, int(np.searchsorted(self._moments["env_t"][1:], env_step, side="right")))
        head = self._part(0, p, self.lookback) if p else None
        return head, None if p == self._total else self._part(max(0, p - lookback), self._total, min(lookback, p))

    def goes_on_in(self, other: SingleAgentEpisode) -> bool:
        """Return whether the other's first decision directly follows this one's last decision."""
        follows = (other.agent_index, other.policy_id) == (self.agent_index, self.policy_id)
        return follows and not self.is_done and other.first_t == self.first_t + len(self)

    def joined(self, other: SingleAgentEpisode) -> SingleAgentEpisode:
        """Join this and the following agent episode, which begins at this one's end, without its lookback."""
        if not all(same(a[-1:], b[:1]) for name in self._moments for a, b in _pairs(self[name], other[name])):
            raise ArgumentError(f"{other} does not begin at the moment at which {self} ends")
        if self._order != other._order:
            raise ArgumentError(f"{other} has the columns {list(other._order)}, {self} has {list(self._order)}")
        decisions = join_columns([self._decisions, {name: other[name] for name in other._decisions}])
        rest = {name: map_tree(lambda leaf: leaf[1:], other[name]) for name in other._moments}
        moments = join_columns([self._moments, rest])
        return SingleAgentEpisode(self.agent_index, self.policy_id, moments, decisions, self._order, self.lookback)

    def rows(self) -> dict[str, Tree]:
        """Return batch columns (T, …), as passed to `of_rows`, without the lookback."""
        found = {}
        for name in self._order:
            if name in self._moments:
                found[name] = map_tree(lambda leaf: leaf[:-1], self[name])
            elif name in self._decisions:
                found[name] = self[name]
            else:
                found[name] = map_tree(lambda leaf: leaf[1:], self[name.removeprefix("next_")])
        return found

    # --- plain data

    def state_dict(self) -> dict[str, Any]:
        """Return the episode as plain data: numbers, texts, lists of texts, and trees of copied arrays."""
        return {
            "agent_index": self.agent_index,
            "policy_id": self.policy_id,
            "lookback": self.lookback,
            "order": list(self._order),
            "moments": {name: map_tree(np.copy, column) for name, column in self._moments.items()},
            "decisions": {name: map_tree(np.copy, column) for name, column in self._decisions.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SingleAgentEpisode:
        """Rebuild an agent episode from the result of `state_dict`."""
        episode = cls(
            int(state["agent_index"]),
            str(state["policy_id"]),
            state["moments"],
            state["decisions"],
            tuple(state["order"]),
            int(state["lookback"]),
        )
        total = episode._total
        for name in (*episode._moments, *episode._decisions):
            wanted = total + (name in episode._moments)
            if any(len(leaf) != wanted for _, leaf in tree_leaves(episode.whole(name))):
                raise ArgumentError(f"column {name!r} of agent {episode.agent_index} should have {wanted} entries")
        if not 0 <= episode.lookback <= total or not total:
            raise ArgumentError(
                f"agent {episode.agent_index} has a lookback of {episode.lookback} and {total} decisions"
            )
        return episode

    @property
    def _total(self) -> int:
        return len(self._moments["env_t"]) - 1

    def _column(self, name: str) -> tuple[Tree, int]:
        """Return a column with the lookback, and its number of entries."""
        if name in self._moments:
            return self._moments[name], self._total + 1
        if name in self._decisions:
            return self._decisions[name], self._total
        raise KeyError(f"no column {name!r}; the columns are {self.keys()}")

    def _part(self, start: int, stop: int, lookback: int) -> SingleAgentEpisode:
        moments = {name: map_tree(lambda leaf: leaf[start : stop + 1], c) for name, c in self._moments.items()}
        decisions = {name: map_tree(lambda leaf: leaf[start:stop], c) for name, c in self._decisions.items()}
        return SingleAgentEpisode(self.agent_index, self.policy_id, moments, decisions, self._order, lookback)


def _pairs(one: Tree, other: Tree) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for (_, a), (_, b) in zip(tree_leaves(one), tree_leaves(other), strict=True):
        yield np.asarray(a), np.asarray(b)


def check_step(name: str, value: Any) -> int:
    """Return a position or step as an int; refuse anything but a whole number."""
    step = whole_number(value)
    if step is None:
        raise ArgumentError(f"{name} must be a whole number, got {value!r}")
    return step


def gather(tree: Tree, where: IntArray, fill: Any, what: str) -> Tree:
    """Copy entries ``where`` (k,) of every leaf (n, …) to (k, …); for missing ones (-1) copy ``fill``.

    ``fill`` None raises `IndexError`; a leaf's dtype must be able to hold it (`ArgumentError`).
    """
    missing = where < 0
    if fill is None and missing.any():
        raise IndexError(
            f"{what}: nothing is there at {np.flatnonzero(missing).size} of {len(where)} places, first at number "
            f"{int(np.flatnonzero(missing)[0])}; give fill=, the value to put there"
        )

    def chosen(leaf: NDArray[Any]) -> NDArray[Any]:
        if not missing.any():
            return leaf.take(where, axis=0)
        out: NDArray[Any] = np.empty((len(where), *leaf.shape[1:]), leaf.dtype)
        out[~missing] = leaf[where[~missing]]
        out[missing] = _as_dtype(fill, leaf.dtype, what)
        return out

    return map_tree(chosen, tree)


def _as_dtype(fill: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Convert the fill value to this dtype; unlike numpy, raise instead of wrapping or truncating it."""
    if dtype == np.object_:
        return fill
    try:
        with np.errstate(all="ignore"):
            cast = np.asarray(fill).astype(dtype)
        # Only floats may be rounded.
        fits = cast.shape == () and bool(dtype.kind in "fc" or cast == fill)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ArgumentError(f"{what} is {dtype}, which cannot hold fill={fill!r}")
    return cast


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether dtype, shape and all entries are equal; NaN equals NaN, and objects must be identical."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == np.object_:
        return all(a is b for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True))
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


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


def check_size(name: str, value: Any) -> int:
    """Return a number of rows, which must be a whole number above 0, as an int."""
    size = whole_number(value)
    if size is None or size < 1:
        raise ArgumentError(f"{name} must be a whole number of at least 1, got {value!r}")
    return size


def ids(columns: Columns, name: str, why: str) -> NDArray[Any]:
    """Return a column (n,) of one number a row; ``why``, for messages, is the call that needs it."""
    if name not in columns:
        raise ArgumentError(f"{why} needs a column {name!r}; the columns are {list(columns)}")
    shape = getattr(columns[name], "shape", None)
    if shape is None or len(shape) != 1:
        got = "a tree" if shape is None else f"shape {tuple(shape)}"
        raise ArgumentError(f"{why} needs one {name!r} a row, got {got}; of sequences (B, T, …), call unpad() first")
    return np.asarray(columns[name])


def fragments(columns: Columns, n: int) -> list[tuple[int, int]]:
    """Return (first row, end) of each fragment: consecutive decisions of one agent in one episode."""
    unroll = ids(columns, "unroll_id", "splitting by fragment")
    begins = np.ones(n, np.bool_)
    begins[1:] = unroll[1:] != unroll[:-1]
    # Concatenated batches, of two collectors or one batch twice, may have neighbours of equal unroll_id.
    for name in ("eps_id", "env_id", "agent_index"):
        if name in columns:
            values = ids(columns, name, "splitting by fragment")
            begins[1:] |= values[1:] != values[:-1]
    if "t" in columns:
        t = ids(columns, "t", "splitting by fragment")
        begins[1:] |= t[1:] <= t[:-1]
    return list(pairwise([*np.flatnonzero(begins).tolist(), n])) if n else []


def episodes(columns: Columns) -> list[IntArray]:
    """Return the positions of each episode's rows, ascending; episodes in order of first appearance.

    An ``eps_id`` with rows of two envs, or a decision twice, belongs to several episodes and is refused.
    """
    eps = ids(columns, "eps_id", "splitting by episode")
    _check_unique(columns, eps)
    _, first, number = np.unique(eps, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # an episode's rank by first appearance
    return _groups(rank[number], len(first))


def moments(batches: Mapping[str, Columns], k: int, by: str) -> list[tuple[int, dict[str, IntArray]]]:
    """Cut the rows of all policies into chunks of k moments, ascending; a moment is one value of (``eps_id``, ``by``).

    Returns each chunk's number of moments, and the positions of its rows by policy.
    """
    if not batches:
        return []
    keys = []
    for name, columns in batches.items():
        why = f"timeslices() of policy {name!r}"
        keys.append((ids(columns, by, why), ids(columns, "eps_id", why)))
    time, eps = (np.concatenate(parts) for parts in zip(*keys, strict=True))
    order = np.lexsort((time, eps))
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (time[order][1:] != time[order][:-1]) | (eps[order][1:] != eps[order][:-1])
    moment = np.empty(len(order), np.int64)
    moment[order] = np.cumsum(is_new) - 1
    total = int(is_new.sum())
    count = -(-total // k)
    per_policy = np.split(moment // k, np.cumsum([len(own) for own, _ in keys])[:-1])
    groups = {name: _groups(own, count) for name, own in zip(batches, per_policy, strict=True)}
    return [
        (min(k, total - i * k), {name: own[i] for name, own in groups.items() if len(own[i])}) for i in range(count)
    ]


def _groups(number_n: IntArray, count: int) -> list[IntArray]:
    """Return the positions of each of the numbers 0 … count - 1, ascending."""
    order = np.argsort(number_n, kind="stable")
    bounds = np.searchsorted(number_n[order], np.arange(count + 1))
    return [order[start:stop] for start, stop in pairwise(bounds.tolist())]


def _check_unique(columns: Columns, eps: NDArray[Any]) -> None:
    why = "splitting by episode"
    true = ~ids(columns, "phantom", why).astype(np.bool_) if "phantom" in columns else np.ones(len(eps), np.bool_)
    if "env_id" in columns:
        env = ids(columns, "env_id", why)
        order = np.lexsort((env, eps))
        torn = (eps[order][1:] == eps[order][:-1]) & (env[order][1:] != env[order][:-1])
        if torn.any():
            where = order[np.flatnonzero(torn)[0]]
            raise ArgumentError(f"eps_id {eps[where]} has rows of several envs; {_TWO_SOURCES}")
    if "t" in columns and "agent_index" in columns:
        t, agent, own = (ids(columns, name, why)[true] for name in ("t", "agent_index", "eps_id"))
        order = np.lexsort((t, agent, own))
        keys = np.stack([own[order], agent[order], t[order]])
        if (twice := np.flatnonzero((keys[:, 1:] == keys[:, :-1]).all(0))).size:
            e, a, moment = keys[:, twice[0]].tolist()
            raise ArgumentError(f"eps_id {e} has decision t={moment} of agent {a} more than once; {_TWO_SOURCES}")


_TWO_SOURCES = (
    "where batches of several collectors were concatenated, split each before, or give each its own range of eps_id"
)
