"""`SingleAgentEpisode`: one agent's observations, actions and rewards, in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.connectors.rows import join_columns
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree, tree_leaves, zip_trees

__all__ = ["SingleAgentEpisode", "check_step"]

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
