"""Memory of earlier observations, actions, rewards and recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors.agent.shape import FlattenObs
from marlvec.connectors.agent_tables import (
    AgentTable,
    LastValues,
    Remembers,
    Shift,
    TreeForm,
    action_tree,
    blank_action,
    blank_obs,
    cast_row_leaf,
    check_column_is_new,
    fixed_size_tree,
    including_blank,
    load_tables,
    parse_shifts,
    save_tables,
    stacked_space,
)
from marlvec.connectors.connector import AgentConnector, EnvIds, NonNegativeInt, PositiveInt, State, from_setup
from marlvec.connectors.leafwise import append_to_obs, appended_space
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.tree import map_space
from marlvec.trees import Tree, map_tree, to_array


@dataclass(eq=False, repr=False)
class DelayObs(Remembers, AgentConnector):
    """Shows each agent its observation of k rows ago; before that its episode's first observation.

    Only the observation is delayed. ``action_mask`` stays current.

    Args:
        k: Number of rows, at least 0.

    Raises:
        ArgumentError: ``k`` is below 0.
        UnsupportedSpaceError: In `bind`: a leaf has no fixed size.
    """

    k: NonNegativeInt

    _tree = from_setup(SpaceTree)
    _history = from_setup(LastValues)

    def __call__(self, rows: Rows) -> Rows:
        leaves = self._tree.flatten(rows.obs)
        self._history.begin(rows)
        self._history.push(rows, leaves, "obs")
        late = [leaf[:, 0] for leaf in self._history.look(rows, np.array([-self.k]))]
        return rows.replace(obs=self._tree.unflatten(late))

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, self.name)
        if not self._tables or tree.space != self._tree.space:
            self._history = LastValues(self.k + 1, [blank_obs(leaf) for leaf in tree.leaves], repeat=True)
            self._tables = self._history.tables
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, self.name)
        return space


@dataclass(eq=False, repr=False)
class FrameStack(Remembers, AgentConnector):
    """Replaces an observation by the agent's last k observations, oldest first; leaf by leaf.

    By default they are concatenated along the last axis, to a longer vector or an image with more channels: ``(d,)``
    becomes ``(k*d,)``, ``(H, W, C)`` becomes ``(H, W, k*C)``. With ``new_axis`` they are stacked on a new axis:
    ``(d,)`` becomes ``(d, k)``, and ``(k, d)`` with ``axis=0``. A leaf without axes, such as Discrete, always becomes
    ``(k,)``.

    The history restarts where ``rows.first`` is set and after `reset`; missing frames are padding.

    Args:
        k: Number of observations, at least 1.
        axis: Axis of the concatenation; with ``new_axis``, position of the new axis.
        new_axis: Whether to stack on a new axis.
        pad: ``"zero"``, or ``"repeat"`` for the episode's first observation. The zero of a Discrete that does not
            start at 0 is its start.

    Raises:
        ArgumentError: ``k`` is below 1, or ``pad`` has another value.
        UnsupportedSpaceError: In `bind`: a leaf lacks the axis, or has no fixed size.
    """

    k: PositiveInt
    _: KW_ONLY
    axis: int = -1
    new_axis: bool = False
    pad: Literal["zero", "repeat"] = "zero"

    _tree = from_setup(SpaceTree)
    _started = from_setup(AgentTable)

    def __call__(self, rows: Rows) -> Rows:
        env_id, agent_index = rows.env_id, rows.agent_index
        fresh = ~self._started.get(env_id, agent_index)
        if "first" in rows:
            fresh |= rows.first
        begins = np.flatnonzero(fresh)
        leaves = self._tree.flatten(rows.obs)
        stacked = [
            frames.push(env_id, agent_index, leaf, begins, self.pad == "repeat")
            for frames, leaf in zip(self._frames, leaves, strict=True)
        ]
        if len(begins):
            self._started.set(env_id, agent_index, True)
        return rows.replace(obs=self._tree.unflatten(stacked))

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, repr(self))
        if not self._tables or tree.space != self._tree.space:  # frames from another space are not in this one
            self._frames = [self._frames_of(leaf) for leaf in tree.leaves]
            self._started = AgentTable((), np.bool_)
            self._tables = {"started": self._started, "frames": [frames.table for frames in self._frames]}
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        frames = map(self._frames_of, fixed_size_tree(space, repr(self)).leaves)  # as map_space meets them
        with_blank = including_blank if self.pad == "zero" and self.k > 1 else lambda leaf: leaf
        return map_space(lambda leaf: stacked_space(with_blank(leaf), next(frames).stack), space)

    def _frames_of(self, leaf: Leaf) -> _Frames:
        shape = leaf.shape
        rank = len(shape) + (1 if self.new_axis else 0)
        if not shape:
            return _Frames(leaf, (self.k,), 0, self.k)
        if not -rank <= self.axis < rank:
            raise UnsupportedSpaceError(f"{self!r}: axis {self.axis} does not exist in {leaf.space}")
        at = self.axis % rank
        after = (self.k, *shape[at:]) if self.new_axis else (self.k * shape[at], *shape[at + 1 :])
        return _Frames(leaf, (*shape[:at], *after), at, self.k)


class _Frames:
    """One leaf's history: frames lie on axis ``at`` of every slot of the table."""

    def __init__(self, leaf: Leaf, out: tuple[int, ...], at: int, k: int) -> None:
        self.out = out
        self.at = at
        self.k = k
        lead: tuple[Any, ...] = (slice(None),) * (1 + at)
        self.older, self.newer, self.last = (*lead, slice(None, -1)), (*lead, slice(1, None)), (*lead, -1)
        self.zero = blank_obs(leaf)
        self.table = AgentTable((*leaf.shape[:at], k, *leaf.shape[at:]), self.zero.dtype)

    def push(
        self, env_id: NDArray[Any], agent_index: NDArray[Any], leaf_n: Any, begins: NDArray[Any], repeat: bool
    ) -> NDArray[Any]:
        """Add (n, *shape) to the rows' histories; return the histories, (n, *out)."""
        history = self.table.get(env_id, agent_index)
        stack = np.empty_like(history)
        stack[self.older] = history[self.newer]
        stack[self.last] = leaf_n
        if len(begins):
            pad = np.expand_dims(leaf_n[begins], 1 + self.at) if repeat else np.expand_dims(self.zero, self.at)
            part = stack[begins]
            part[self.older] = pad
            stack[begins] = part
        self.table.set(env_id, agent_index, stack)
        return stack.reshape(len(stack), *self.out)

    def stack(self, value: Any) -> NDArray[Any]:
        """Return k frames of one value, (*out)."""
        return np.stack([np.asarray(value)] * self.k, axis=self.at).reshape(self.out)


_PREV_ACTIONS = "prev_actions"


@dataclass(eq=False, repr=False)
class PrevActions(Remembers, AgentConnector):
    """Shows the policy its actions in the agent's last n decisions.

    Adds a column ``prev_actions``, a tree in the form of the action space: ``(n_rows, …)`` if n is 1, else
    ``(n_rows, n, …)``, oldest first. Before an episode's first decisions it holds a blank action: the start of a
    Discrete, the Box member nearest 0.

    Actions are the policy's, before the action connectors. With ``PrevRewards(n)``, reward i belongs to action i.

    Args:
        n: Number of actions, at least 1.
        into_obs: Append them to the observation, a vector, instead of adding a column; flattened and one-hot, as in
            `FlattenObs`.

    Raises:
        ArgumentError: ``n`` is below 1; or, in `bind`, the action space is not known.
        UnsupportedSpaceError: In `bind`, with ``into_obs``: the observation is not a vector, or part
            of an action has no fixed size.
    """

    n: PositiveInt = 1
    into_obs: bool = False

    _tree = from_setup(SpaceTree)
    _history = from_setup(LastValues)
    _flat = from_setup(FlattenObs)
    _dtype = from_setup(np.dtype[Any])

    def __call__(self, rows: Rows) -> Rows:
        self._history.begin(rows)
        leaves = self._history.look(rows, np.arange(1 - self.n, 1))
        if self.into_obs:
            # Each of a row's n actions is flattened like a row.
            each = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
            flat = self._flat(Rows(obs=self._tree.unflatten(each))).obs
            return append_to_obs(rows, flat.reshape(len(rows), self.n * flat.shape[1]), self._dtype)
        check_column_is_new(rows, _PREV_ACTIONS, self.name)
        actions = self._tree.unflatten(leaves)
        return rows.replace(**{_PREV_ACTIONS: actions if self.n > 1 else map_tree(lambda leaf: leaf[:, 0], actions)})

    def on_policy_output(self, rows: Rows) -> None:
        tree = self._tree
        if "actions" not in rows:
            raise ContractError(
                f"{self.name} needs the column 'actions' of the policy's output, got {list(rows.keys())}"
            )
        self._history.push(rows, tree.flatten(rows["actions"]), "actions")

    def setup(self, space: Space[Any]) -> None:
        actions = action_tree(self.action_space, self.name)
        if not self._tables or actions.space != self._tree.space:
            self._history = LastValues(self.n, [blank_action(leaf) for leaf in actions.leaves])
            self._tables = self._history.tables
        self._tree = actions
        if self.into_obs:
            self._flat = FlattenObs()
            self._flat.setup(actions.space)
            self._dtype = np.dtype(self.output_space(space).dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        actions = action_tree(self.action_space, self.name)
        if not self.into_obs:
            return space
        flat = FlattenObs().output_space(actions.space)
        assert isinstance(flat, Box)
        return appended_space(space, flat, self.n, self.name)


_PREV_REWARDS = "prev_rewards"
_ANY = Box(-np.inf, np.inf, (1,), np.float32)


@dataclass(eq=False, repr=False)
class PrevRewards(Remembers, AgentConnector):
    """Shows the policy its agent's rewards for the last n decisions.

    Adds a column ``prev_rewards`` of float64: ``(n_rows,)`` if n is 1, else ``(n_rows, n)``, oldest first. The last
    entry is the row's own ``rewards``, after the connectors before this one. Before an episode's first decisions, and
    in its first row, entries are 0.

    Args:
        n: Number of rewards, at least 1.
        into_obs: Append them to the observation, a vector, instead of adding a column, in its dtype, or float32 for
            integers; rewards that are too large for it become infinite.

    Raises:
        ArgumentError: ``n`` is below 1.
        UnsupportedSpaceError: In `bind`, with ``into_obs``: the observation is not a vector.
    """

    n: PositiveInt = 1
    into_obs: bool = False

    _dtype = from_setup(np.dtype[Any])

    def __post_init__(self) -> None:
        super().__post_init__()
        self._history = LastValues(self.n, [np.zeros(())])
        self._tables = self._history.tables

    def __call__(self, rows: Rows) -> Rows:
        self._history.begin(rows)
        reward = rows.rewards
        if "first" in rows and rows.first.any():
            reward = np.where(rows.first, 0.0, reward)  # an episode's first rows have no reward yet
        self._history.push(rows, [reward], "rewards")
        (rewards,) = self._history.look(rows, np.arange(1 - self.n, 1))
        if self.into_obs:
            return append_to_obs(rows, rewards, self._dtype)
        check_column_is_new(rows, _PREV_REWARDS, self.name)
        return rows.replace(**{_PREV_REWARDS: rewards if self.n > 1 else rewards[:, 0]})

    def setup(self, space: Space[Any]) -> None:
        if self.into_obs:
            self._dtype = appended_space(space, _ANY, self.n, self.name).low.dtype

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return appended_space(space, _ANY, self.n, self.name) if self.into_obs else space


_LAST = np.zeros(1, np.int64)


@dataclass(eq=False, repr=False)
class RnnState(Remembers, AgentConnector):
    """Returns to the policy its recurrent state of the agent's previous row; per (env, agent).

    Adds a column ``state_in``, a tree of ``(n, …)`` arrays: ``initial`` at an episode's start, then the policy's column
    ``state_out`` for the agent's previous row. In rows whose action is given (``random_steps``, logged actions) the
    policy is called for its state, and the given action replaces its action.

    Args:
        initial: State of one row, without a row axis: an array, or a dict or tuple of arrays. It defines shapes and
            dtypes.
        column: Name of the added column.
        source: Name of the policy's column.

    Raises:
        ContractError: ``initial`` is not made of numbers; or the policy's column is missing, or differs from
            ``initial`` in structure or shape.
    """

    initial: Tree
    column: str = "state_in"
    source: str = "state_out"

    def __post_init__(self) -> None:
        self._form = TreeForm(self.initial)
        self._history = LastValues(1, self._form.blanks)
        self._tables = self._history.tables

    def __call__(self, rows: Rows) -> Rows:
        check_column_is_new(rows, self.column, self.name)
        self._history.begin(rows)
        state = self._form.unflatten(self._history.look(rows, _LAST))
        return rows.replace(**{self.column: map_tree(lambda leaf: leaf[:, 0], state)})

    @property
    def policy_columns(self) -> tuple[str, ...]:
        return (self.source,)

    def on_policy_output(self, rows: Rows) -> None:
        if self.source not in rows:
            raise ContractError(
                f"{self.name} needs the column {self.source!r} of the policy's output, which has only "
                f"{list(rows.keys())}; the policy returns it as (actions, {{{self.source!r}: state}})"
            )
        self._history.push(rows, self._form.flatten(rows[self.source]), repr(self.source))


AnyArray = NDArray[Any]

_KEPT = (
    *("env_id", "agent_index", "eps_id", "t", "obs", "rewards"),
    *("terminated", "truncated", "first", "last", "actions"),
)


@dataclass(eq=False, repr=False)
class View(AgentConnector):
    """Adds a column with another column's values in the agent's earlier rows: RLlib's view requirement.

    For one shift it is ``(n, …)``, for a list or range of k shifts ``(n, k, …)``, oldest first; tree for tree.

    Columns of the rows (``obs``, ``rewards``, ``t``, ``action_mask``, columns of earlier connectors) are available from
    shift 0 on. Columns of the policy's answer (``actions`` and its other columns) are available from shift -1 on.
    ``rewards`` at shift 0 is the reward for the action at shift -1.

    Args:
        column: Name of the column to add.
        source: Name of the source column.
        shift: ``0``, ``-1``, ``[-4, -2]``, ``"-3:-1"``, ``"-6:0:2"``; see `parse_shifts`. For later rows use `AddView`
            on the learner side.
        fill: Value for rows before the episode. None: zeros, or the blank action; ``"repeat"``: the episode's first
            value (columns of the rows only); or one row's value, where a number fills the array. Required for a
            policy's column other than ``actions``, with its shapes and dtypes.

    Raises:
        ArgumentError: ``shift`` is invalid or positive, ``column`` exists, or ``fill`` does not fit; or,
            in `bind`, ``source`` is ``actions`` and the action space is unknown.
        UnsupportedSpaceError: In `bind`: the source has a part without a fixed size.
    """

    column: str
    source: str
    shift: Shift
    fill: Tree = None

    def __post_init__(self) -> None:
        shifts = parse_shifts(self.shift)
        if shifts[-1] > 0:
            raise ArgumentError(
                f"shift {self.shift!r} looks ahead, to rows that are still to come; use AddView on the learner side"
            )
        if self.column in _KEPT:
            raise ArgumentError(f"column {self.column!r} belongs to the row itself; choose another name")
        if self.source == "actions" and shifts[-1] == 0:
            raise ArgumentError(
                f"shift {self.shift!r} asks for the action that is still to be chosen; the last is at -1"
            )
        if isinstance(self.fill, str) and (self.fill != "repeat" or self.source == "actions"):
            raise ArgumentError(
                f'fill must be None, one row\'s value, or "repeat" for columns of the rows; got {self.fill!r}'
            )
        self._single = not isinstance(self.shift, str) and np.ndim(self.shift) == 0
        self._shifts = np.array(shifts, np.int64)
        # Whether the source is a column of the policy's answer; None before the first rows.
        self._from_policy: bool | None = {"actions": True, "obs": False, "rewards": False}.get(self.source)
        self._form: SpaceTree | TreeForm | None = None
        self._history: LastValues | None = None
        self._loaded: State = {}  # a loaded state, until the column's form is known
        if self.source == "rewards":
            self._learn(TreeForm(np.zeros(())), [np.zeros(())])

    def __call__(self, rows: Rows) -> Rows:
        check_column_is_new(rows, self.column, self.name)
        form, history = self._known(rows)
        history.begin(rows)
        shifts = self._shifts
        if self._from_policy:
            shifts = shifts + 1  # the last answer belongs to the row before
        else:
            history.push(rows, form.flatten(rows[self.source]), repr(self.source))
        leaves = history.look(rows, shifts)
        return rows.replace(
            **{self.column: form.unflatten([leaf[:, 0] for leaf in leaves] if self._single else leaves)}
        )

    @property
    def policy_columns(self) -> tuple[str, ...]:
        return (self.source,) if self._from_policy and self.source != "actions" else ()

    def on_policy_output(self, rows: Rows) -> None:
        if not self._from_policy or self._history is None or self._form is None:
            return
        if self.source not in rows:
            raise ContractError(
                f"{self.name} needs the column {self.source!r}, which neither the rows have nor the policy's output, "
                f"{list(rows.keys())}"
            )
        self._history.push(rows, self._form.flatten(rows[self.source]), repr(self.source))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        if self._loaded:
            waiting = AgentTable((), np.int64)
            waiting.load_state_dict(self._loaded["history"]["count"])
            waiting.reset(env_ids)
            self._loaded["history"]["count"] = waiting.state_dict()
        if self._history is not None:
            self._history.count.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        if self.source == "obs":
            tree = fixed_size_tree(space, self.name)
            self._learn(tree, [blank_obs(leaf) for leaf in tree.leaves])
        elif self.source == "actions":
            tree = action_tree(self.action_space, self.name)
            self._learn(tree, [blank_action(leaf) for leaf in tree.leaves])

    def output_space(self, space: Space[Any]) -> Space[Any]:
        if self.source == "obs":
            fixed_size_tree(space, self.name)
        elif self.source == "actions":
            action_tree(self.action_space, self.name)
        return space

    def state_dict(self) -> State:
        if self._loaded:
            return deepcopy(self._loaded)
        if self._history is None:
            return {}
        return {"from_policy": bool(self._from_policy), "history": save_tables(self._history.tables)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state and self.source not in ("obs", "actions", "rewards"):  # saved before the first row
            self._from_policy, self._form, self._history, self._loaded = None, None, None, {}
            return
        if state.keys() != {"from_policy", "history"} or self._from_policy not in (None, bool(state["from_policy"])):
            raise ArgumentError(f"expected the history of column {self.source!r}, got {list(state)}")
        if self._history is not None:
            load_tables(state["history"], self._history.tables, self.name)
        elif self.source in ("obs", "actions"):
            raise self._not_set_up()
        else:
            self._loaded = deepcopy(dict(state))
            if state["from_policy"] and self.fill is not None and not isinstance(self.fill, str):
                self._from_policy = True
                self._learn(form := TreeForm(self.fill), form.blanks)

    def _known(self, rows: Rows) -> tuple[SpaceTree | TreeForm, LastValues]:
        """Return the column's form and history; create both from this column if they are unknown."""
        if self._form is None or self._history is None:
            if self.source in ("obs", "actions"):
                raise self._not_set_up()
            self._from_policy = self.source not in rows
            if self._from_policy:
                self._check_policy_column(rows)
                form = TreeForm(self.fill)
            else:
                form = TreeForm(map_tree(_blank_of, rows[self.source]))
            self._learn(form, form.blanks)
            assert self._form is not None
            assert self._history is not None
        return self._form, self._history

    def _learn(self, form: SpaceTree | TreeForm, blanks: list[AnyArray]) -> None:
        repeat = isinstance(self.fill, str)
        if not repeat and self.fill is not None:
            blanks = self._filled(form, blanks)
        oldest = int(-self._shifts[0])
        history = LastValues(oldest if self._from_policy else oldest + 1, blanks, repeat=repeat)
        if self._loaded:
            load_tables(self._loaded["history"], history.tables, self.name)
            self._loaded = {}
        before = self._form.space if isinstance(self._form, SpaceTree) else None
        other = isinstance(form, SpaceTree) and before is not None and form.space != before
        if self._history is None or other or not history.same_form(self._history):
            self._history = history
        else:
            self._history.blanks = history.blanks
        self._form = form

    def _filled(self, form: SpaceTree | TreeForm, blanks: list[AnyArray]) -> list[AnyArray]:
        """Return one row's value made of ``fill``, per leaf."""
        if not isinstance(self.fill, (dict, tuple)) and np.ndim(self.fill) == 0:
            values = [self.fill] * len(blanks)
        else:
            try:
                values = form.flatten(self.fill)
            except ContractError as error:
                raise ArgumentError(f"fill: expected one row's value of {self.source!r}: {error}") from None
        return [cast_row_leaf(value, blank, "fill") for value, blank in zip(values, blanks, strict=True)]

    def _check_policy_column(self, rows: Rows) -> None:
        if self._shifts[-1] == 0:
            raise ContractError(
                f"{self.name} looks at column {self.source!r} at shift 0, but the rows have only {list(rows.keys())}; "
                f"a policy's column is known from shift -1 on"
            )
        if self.fill is None or isinstance(self.fill, str):
            raise ContractError(
                f"{self.name} looks at column {self.source!r}, but the rows have only {list(rows.keys())}; if it is "
                f"one of the policy's, give fill: one row's value before the policy's first answer"
            )


def _blank_of(column: Any) -> AnyArray:
    array = to_array(column)
    return np.zeros(array.shape[1:], array.dtype)
