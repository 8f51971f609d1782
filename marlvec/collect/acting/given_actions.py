"""`GivenActions`: actions that did not come from the policy, because the env or a simulator outside chose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect.storage.plain_columns import columns_from, plain_columns
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
    """What the agents of one policy do without asking it.

    Args:
        tree: Space of one action of the policy.
        env_space: Of one action of the env.
        who: The policy, for messages.

    Attributes:
        used: Whether there has ever been such an action; from then on answers have column ``off_policy``.
        knows_columns: Whether `learn` was called.
    """

    def __init__(self, tree: SpaceTree, env_space: Space[Any], who: str) -> None:
        self._tree, self._who = tree, who
        self._differs = describe_difference(env_space, tree.space)
        self._actions: dict[int, list[Any]] = {}
        self._blanks: dict[str, Tree] = {}  # of the columns that the policy adds: one row that says nothing
        self.used = self.knows_columns = False

    def learn(self, columns: Mapping[str, Tree]) -> None:
        """See what the policy adds to its actions: columns (n, …)."""
        self._blanks = {name: map_tree(_blank, column) for name, column in columns.items()}
        self.knows_columns = True

    def __len__(self) -> int:
        return len(self._actions)

    def note(self, lane: int, action: Any, where: str, *, is_env: bool = False) -> None:
        """An agent will do this when its row is due.

        Args:
            lane: Whose action.
            action: One action of the policy's.
            where: The same agent, for messages.
            is_env: Whether it is one of the env's instead, as it was carried out.

        Raises:
            ContractError: It is not in the policy's action space; or it is the env's, and action connectors have given
                the policy another space.
        """
        if is_env and self._differs is not None:
            raise ContractError(
                f"{where} has logged the env's action, and what {self._who} would have said for it is not known: its "
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
        """What was noted for these is done, or will never be."""
        if self._actions:
            for lane in lanes.tolist():
                self._actions.pop(lane, None)

    def clear(self) -> None:
        """Nothing is noted."""
        self._actions.clear()

    def get_state(self) -> State:
        """What is noted, and what is known of the policy's columns."""
        return {
            "actions": [[lane, [plain_object(value) for value in values]] for lane, values in self._actions.items()],
            "blanks": plain_columns(self._blanks, "columns of the policy"),
            "used": self.used,
            "knows_columns": self.knows_columns,
        }

    def prepare(self, state: State) -> Callable[[], None]:
        """Look at what `get_state` gave; returns what puts it in place.

        Raises:
            ArgumentError: It is none.
        """
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
        new = {
            "_actions": actions,
            "_blanks": columns_from(state["blanks"], 1, where),
            "used": flag_field(state, "used", where),
            "knows_columns": flag_field(state, "knows_columns", where),
        }
        return partial(vars(self).update, new)

    def among(self, lanes: IntArray) -> BoolArray:
        """For which of these an action is noted: (n,)."""
        return np.fromiter((lane in self._actions for lane in lanes.tolist()), np.bool_, len(lanes))

    def answer(self, rows: Rows, lanes: IntArray, ask: Ask) -> tuple[Tree, dict[str, Tree]]:
        """Actions and columns of all rows; the policy is asked about those alone for which nothing is noted.

        Columns that the policy adds say nothing where it was not asked: NaN in floats, 0 elsewhere. An ``x_out`` beside
        a column ``x_in`` of the rows says what came in: a state that the policy has not touched.

        Args:
            rows: n rows.
            lanes: (n,) whose they are.
            ask: Gives the policy's actions and columns for some rows.
        """
        given = self.among(lanes)
        extras: dict[str, Tree] = {}
        if not given.all():
            actions, own = ask(rows.take(~given) if given.any() else rows)
            if not given.any():
                return actions, {**own, COLUMN: given}
            extras = {name: self._spread(column, name, rows, given) for name, column in own.items()}
            parts = self._tree.flatten(map_tree(to_array, actions))
        else:
            parts = [np.empty((0, *leaf.shape), leaf.dtype) for leaf in self._tree.leaves]
            extras = {name: self._spread(None, name, rows, given) for name in self._blanks}
        noted = [self._actions[lane] for lane in lanes[given].tolist()]
        whole = []
        for k, (leaf, part) in enumerate(zip(self._tree.leaves, parts, strict=True)):
            column = np.empty((len(rows), *leaf.shape), leaf.dtype if given.all() else part.dtype)
            column[~given] = part
            for i, action in zip(np.flatnonzero(given).tolist(), noted, strict=True):
                column[i] = action[k]
            whole.append(column)
        return self._tree.unflatten(whole), {**extras, COLUMN: given}

    def _spread(self, own: Tree | None, name: str, rows: Rows, given: BoolArray) -> Tree:
        """A column of all rows from that of the rows the policy was asked about."""
        blank = self._blanks[name]
        came = name[:-4] + "_in" if name.endswith("_out") else ""
        whole = map_tree(lambda leaf: np.repeat(leaf, len(rows), axis=0), blank)
        if came in rows:
            whole = zip_trees(lambda pair: np.array(pair[1], pair[0].dtype), [whole, rows[came]])
        if own is None:
            return whole

        def put(pair: list[Any]) -> NDArray[Any]:
            column: NDArray[Any] = pair[0]
            column[~given] = to_array(pair[1])
            return column

        return zip_trees(put, [whole, own])


def _blank(leaf: Any) -> NDArray[Any]:
    array = to_array(leaf)
    return np.full((1, *array.shape[1:]), np.nan if array.dtype.kind in "fc" else 0, array.dtype)
