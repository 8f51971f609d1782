"""`GivenActions`: actions that did not come from the policy, because the env or a simulator outside chose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect.columns.plain import columns_from, plain_columns
from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.plain_objects import object_from, plain_object
from marlvec.serialization.state_fields import State, check_fields, check_value, flag_field
from marlvec.spaces import SpaceTree, describe_difference
from marlvec.trees import Tree, map_tree, to_array, zip_trees

__all__ = ["GivenActions"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Ask = Callable[[Rows], tuple[Tree, Mapping[str, Tree]]]

COLUMN = "off_policy"


class GivenActions:
    """Actions of one policy's agents that the policy does not choose.

    The policy is not asked about these rows, unless a connector needs a column of its output there
    (`Connector.policy_columns`), as `RnnState` needs the state: then it acts on them, and the given action replaces its
    action. ``tree`` and ``env_space`` are spaces of one action of the policy and of the env.
    """

    def __init__(self, tree: SpaceTree, env_space: Space[Any], who: str) -> None:
        self._tree, self._who = tree, who
        self._differs = describe_difference(env_space, tree.space)
        self._actions: dict[int, list[Any]] = {}
        self._blanks: dict[str, Tree] = {}  # of the columns that the policy adds: one row, filled with NaN or 0
        self._dtypes: list[np.dtype[Any]] | None = None  # of actions in batches, leaf by leaf; None: not known yet
        self.used = self.knows_columns = False

    def learn(self, columns: Mapping[str, Tree], actions: Tree) -> None:
        """Note which columns (n, …) the policy adds, and, if no action was given before, the dtypes of its actions."""
        self._blanks = {name: map_tree(_blank, column) for name, column in columns.items()}
        self.knows_columns = True
        if self._dtypes is None:
            self._settle(actions)

    def _settle(self, actions: Tree) -> None:
        try:
            leaves = self._arrays(actions)
        except ContractError:  # the collector refuses these actions, and says why
            return
        pairs = zip(leaves, self._tree.leaves, strict=True)
        self._dtypes = [leaf.dtype if leaf.is_object else value.dtype for value, leaf in pairs]

    def _arrays(self, actions: Tree) -> list[Any]:
        """Return the leaves of actions: arrays, but for leaves of objects, which stay as they are."""
        pairs = zip(self._tree.flatten(actions), self._tree.leaves, strict=True)
        return [value if leaf.is_object else to_array(value) for value, leaf in pairs]

    def __len__(self) -> int:
        return len(self._actions)

    def note(self, lane: int, action: Any, where: str, *, is_env: bool = False) -> None:
        """Note an agent's next action, of the policy's space; ``is_env``: of the env's, as it was carried out.

        The latter is refused where action connectors have given the policy another space.
        """
        if is_env and self._differs is not None:
            raise ContractError(
                f"{where}: a logged env action cannot be mapped back to the action space of {self._who}: its "
                f"action connectors give it another space {self._differs}. Leave those out, as "
                f"action_connectors=[ToNumpy(), ClipActions()] does"
            )
        try:
            leaves = self._tree.flatten(action)
        except ContractError as error:
            raise self._bad(action, where) from error
        values = []
        for value, leaf in zip(leaves, self._tree.leaves, strict=True):
            one = value if leaf.is_object else np.asarray(value)
            if not leaf.is_object and one.dtype != leaf.dtype and np.can_cast(one.dtype, leaf.dtype, "same_kind"):
                one = one.astype(leaf.dtype)
            if not leaf.space.contains(one):
                raise self._bad(action, where)
            values.append(one)
        self._actions[lane] = values
        self.used = True

    def _bad(self, action: Any, where: str) -> ContractError:
        return ContractError(
            f"{where} says that it does {action!r}, which is not in the action space of {self._who}: {self._tree.space}"
        )

    def forget(self, lanes: IntArray) -> None:
        """Forget the noted actions of these lanes."""
        if self._actions:
            for lane in lanes.tolist():
                self._actions.pop(lane, None)

    def clear(self) -> None:
        """Nothing is noted."""
        self._actions.clear()

    def get_state(self) -> State:
        """Return the noted actions, and one blank row of the policy's columns and actions."""
        blanks = dict(self._blanks)
        if self._dtypes is not None:
            pairs = zip(self._tree.leaves, self._dtypes, strict=True)
            blanks["actions"] = self._tree.unflatten([np.zeros((1, *leaf.shape), dtype) for leaf, dtype in pairs])
        return {
            "actions": [[lane, [plain_object(value) for value in values]] for lane, values in self._actions.items()],
            "blanks": plain_columns(blanks, "columns of the policy"),
            "used": self.used,
            "knows_columns": self.knows_columns,
        }

    def prepare(self, state: State) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it."""
        where = f"actions that {self._who} was not asked for"
        check_fields(state, ("actions", "blanks", "used", "knows_columns"), where)
        actions, leaves = {}, len(self._tree.leaves)
        for one in state["actions"]:
            if not isinstance(one, list) or len(one) != 2 or len(one[1]) != leaves:
                raise ArgumentError(f"{where}: expected a lane and {leaves} arrays, got {one!r:.200}")
            values = [object_from(value) for value in one[1]]
            for value, leaf in zip(values, self._tree.leaves, strict=True):
                if not leaf.is_object:
                    check_value(value, leaf.dtype, leaf.shape, f"{where}: {leaf}")
            actions[int(one[0])] = values
        blanks = columns_from(state["blanks"], 1, where)
        dtypes = None
        if "actions" in blanks:
            try:
                values = self._tree.flatten(blanks.pop("actions"))
            except ContractError as error:
                raise ArgumentError(f"{where}: actions: {error}") from error
            for value, leaf in zip(values, self._tree.leaves, strict=True):
                if not leaf.is_object and (value.dtype.kind not in "fiub" or value.shape != (1, *leaf.shape)):
                    raise ArgumentError(
                        f"{where}: actions: expected numbers of shape {(1, *leaf.shape)} for {leaf}, "
                        f"got {value.dtype} of {value.shape}"
                    )
            dtypes = [value.dtype for value in values]
        new = {
            "_actions": actions,
            "_blanks": blanks,
            "_dtypes": dtypes,
            "used": flag_field(state, "used", where),
            "knows_columns": flag_field(state, "knows_columns", where),
        }
        return partial(vars(self).update, new)

    def among(self, lanes: IntArray) -> BoolArray:
        """For which of these an action is noted: (n,)."""
        return np.fromiter((lane in self._actions for lane in lanes.tolist()), np.bool_, len(lanes))

    def answer(self, rows: Rows, lanes: IntArray, ask: Ask, needed: Sequence[str] = ()) -> tuple[Tree, dict[str, Tree]]:
        """Return actions and columns of all n rows, with the noted actions in their rows.

        In rows with a noted action a column of the policy is NaN (floats) or 0 (others), and an ``x_out`` beside a
        column ``x_in`` of the rows repeats it: a state that the policy has not touched. If connectors need columns in
        every row (``needed``), the policy acts on all rows, and these columns are its own there, too.
        """
        given = self.among(lanes)
        asked = np.ones(len(rows), np.bool_) if needed else ~given
        if asked.any():
            actions, own = ask(rows if asked.all() else rows.take(asked))
            if self._dtypes is None:
                self._settle(actions)
            if not given.any():
                return self._cast(actions), {**own, COLUMN: given}
            extras = {
                name: column if name in needed else self._spread(column, name, rows, given, asked)
                for name, column in own.items()
            }
            parts = [to_array(value) for value in self._tree.flatten(self._cast(actions))]
        else:
            if self._dtypes is None:
                self._dtypes = [leaf.dtype for leaf in self._tree.leaves]
            extras = {name: self._spread(None, name, rows, given, asked) for name in self._blanks}
            pairs = zip(self._tree.leaves, self._dtypes, strict=True)
            parts = [np.empty((0, *leaf.shape), dtype) for leaf, dtype in pairs]
        noted = [self._actions[lane] for lane in lanes[given].tolist()]
        whole = []
        for k, (leaf, part) in enumerate(zip(self._tree.leaves, parts, strict=True)):
            column = np.empty((len(rows), *leaf.shape), object if leaf.is_object else part.dtype)
            column[asked] = part
            for i, action in zip(np.flatnonzero(given).tolist(), noted, strict=True):
                column[i] = action[k]
                if column.dtype.kind in "iub" and not np.array_equal(column[i], action[k]):
                    raise ContractError(
                        f"{self._who} returns its actions of {leaf} as {part.dtype}, which cannot hold the given "
                        f"action {action[k]!r}: return {leaf.dtype}"
                    )
            whole.append(column)
        return self._tree.unflatten(whole), {**extras, COLUMN: given}

    def _cast(self, actions: Tree) -> Tree:
        """Return the policy's actions in the dtypes that batches have, where those can hold them."""
        try:
            leaves = self._arrays(actions)
        except ContractError:  # the collector refuses these actions, and says why
            return actions
        if self._dtypes is None:
            return actions
        pairs = zip(leaves, self._dtypes, strict=True)
        cast = [value if dtype.hasobject else _held(value, dtype) for value, dtype in pairs]
        return actions if all(a is b for a, b in zip(cast, leaves, strict=True)) else self._tree.unflatten(cast)

    def _spread(self, own: Tree | None, name: str, rows: Rows, given: BoolArray, asked: BoolArray) -> Tree:
        """Return a column of all rows: the policy's where no action was given, and blank elsewhere.

        ``own`` is the column of the rows ``asked`` (n,) about; None where there are none. ``given`` (n,): with a noted
        action.
        """
        blank = self._blanks[name]
        came = name[:-4] + "_in" if name.endswith("_out") else ""
        whole = map_tree(lambda leaf: np.repeat(leaf, len(rows), axis=0), blank)
        if came in rows:
            whole = zip_trees(lambda pair: np.array(pair[1], pair[0].dtype), [whole, rows[came]])
        if own is None:
            return whole

        def put(pair: list[Any]) -> NDArray[Any]:
            column: NDArray[Any] = pair[0]
            column[~given] = to_array(pair[1])[~given[asked]]
            return column

        return zip_trees(put, [whole, own])


def _held(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in a dtype; the array itself where that would change its meaning."""
    if array.dtype == dtype:
        return array
    if dtype.kind == "f":
        return array.astype(dtype) if array.dtype.kind in "fiu" else array
    if array.dtype.kind not in "iub":
        return array
    cast = array.astype(dtype)
    return cast if np.array_equal(cast, array) else array


def _blank(leaf: Any) -> NDArray[Any]:
    array = to_array(leaf)
    return np.full((1, *array.shape[1:]), np.nan if array.dtype.kind in "fc" else 0, array.dtype)
