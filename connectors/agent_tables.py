"""What a connector remembers of each agent: `AgentTable`, and `LastValues`, rows of the last steps in order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import DTypeLike, NDArray

from marlvec.connectors.connector import Connector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.serialization.saved import array_field, check_fields
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, map_tree, to_array, zip_trees


class AgentTable:
    """One slot per (env, agent), in an array that grows as envs and agents show up.

    Rows of any subset of envs, in any order, read and write their own slots only. No (env, agent) pair may appear
    twice in one call: of two writes to one slot the last would win.

    Args:
        shape: Shape of one slot.
        dtype: Its dtype.
        fill: Value of a slot before its first write, and after `reset`; broadcast to ``shape``.

    Attributes:
        values: (N, A, *shape); N and A grow with the env ids and agent indices seen.
    """

    def __init__(self, shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64, fill: Any = 0) -> None:
        self.fill = np.broadcast_to(np.asarray(fill, dtype), shape)
        self.values: NDArray[Any] = np.zeros((0, 0, *shape), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one slot."""
        return self.values.shape[2:]

    def __repr__(self) -> str:
        n, a = self.values.shape[:2]
        return f"AgentTable({self.shape}, {self.values.dtype}; {n} envs, {a} agents)"

    def get(self, env_id: NDArray[Any], agent_index: NDArray[Any]) -> NDArray[Any]:
        """Copy the slots of the rows ``env_id``, ``agent_index``, (n,) each: ``(n, *shape)``, of the table's dtype."""
        try:
            slots: NDArray[Any] = self.values[env_id, agent_index]
        except IndexError:
            self._grow(env_id, agent_index)
            slots = self.values[env_id, agent_index]
        return slots

    def set(self, env_id: NDArray[Any], agent_index: NDArray[Any], values: Any) -> None:
        """Write ``values``, broadcast to ``(n, *shape)``, to the slots of the rows ``env_id``, ``agent_index``."""
        try:
            self.values[env_id, agent_index] = values
        except IndexError:
            self._grow(env_id, agent_index)
            self.values[env_id, agent_index] = values

    def reset(self, env_ids: EnvIds | None = None) -> None:
        """Refill the slots of every agent of these envs, or of all; envs never seen need no refill."""
        if env_ids is None:
            self.values[:] = self.fill
            return
        where = np.asarray(env_ids, np.int64)
        self.values[where[where < len(self.values)]] = self.fill

    def state_dict(self) -> State:
        """Exact copy of every slot."""
        return {"values": self.values.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over every slot.

        Raises:
            ArgumentError: Slots of another shape or dtype.
        """
        self.values = self.checked(state, "slots of agents")

    def checked(self, state: Mapping[str, Any], where: str) -> NDArray[Any]:
        """Return a copy of a state's slots, (N, A, *shape); ArgumentError names ``where`` if shape or dtype differ."""
        check_fields(state, ["values"], where)
        return array_field(state, "values", self.values.dtype, (None, None, *self.shape), where)

    def _grow(self, env_id: NDArray[Any], agent_index: NDArray[Any]) -> None:
        if env_id.size and (env_id.min() < 0 or agent_index.min() < 0):
            raise ArgumentError("env_id and agent_index must not be negative")
        n, a = self.values.shape[:2]
        grown = np.empty((_room(n, env_id), _room(a, agent_index), *self.shape), self.values.dtype)
        grown[:] = self.fill
        grown[:n, :a] = self.values
        self.values = grown


Tables = Mapping[str, AgentTable | Sequence[AgentTable]]


def save_tables(tables: Tables) -> State:
    """Return exact copies of tables, and of lists of them, by name."""
    return {
        name: table.state_dict() if isinstance(table, AgentTable) else [one.state_dict() for one in table]
        for name, table in tables.items()
    }


def load_tables(state: Mapping[str, Any], tables: Tables, owner: str) -> None:
    """Load a state from `save_tables`, completely or not at all."""
    check_fields(state, tables, owner)
    found = []
    for name, table in tables.items():
        own, saved = ([table], [state[name]]) if isinstance(table, AgentTable) else (table, state[name])
        if len(saved) != len(own):
            raise ArgumentError(f"{owner}: {name}: expected {len(own)} leaves, got {len(saved)}")
        found += [(one, one.checked(part, f"{owner}: {name}")) for one, part in zip(own, saved, strict=True)]
    for one, values in found:
        one.values = values


class Remembers(Connector):
    """A connector that stores data of each agent's running episode in tables.

    `reset` refills single tables. A list holds a table per leaf; a single table beside it marks the valid slots.
    """

    # by names in the state; {} until `setup` creates them, if the constructor does not
    _tables: Tables = MappingProxyType({})

    def reset(self, env_ids: EnvIds | None = None) -> None:
        for table in self._tables.values():
            if isinstance(table, AgentTable):
                table.reset(env_ids)

    def state_dict(self) -> State:
        return save_tables(self._tables)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._tables:
            raise self._not_set_up()
        load_tables(state, self._tables, self.name)


def _room(have: int, index: NDArray[Any]) -> int:
    return max(have, int(index.max()) + 1) if index.size else have


AnyArray = NDArray[Any]


def including_blank(leaf: Space[Any]) -> Space[Any]:
    """Return a leaf's space with its blank value: a Box is extended by zeros; other spaces contain theirs."""
    if isinstance(leaf, Box):
        low, high = np.minimum(leaf.low, 0), np.maximum(leaf.high, 0)
        return Box(low, high, leaf.shape, leaf.low.dtype.type)
    return leaf


def stacked_space(leaf: Space[Any], stack: Callable[[Any], AnyArray]) -> Space[Any]:
    """Return the space of several values of a leaf in one array, which ``stack`` builds from one value, repeated."""
    if isinstance(leaf, Box):
        return Box(stack(leaf.low), stack(leaf.high), dtype=leaf.low.dtype.type)
    if isinstance(leaf, (Discrete, MultiDiscrete)):
        choices = leaf.n if isinstance(leaf, Discrete) else leaf.nvec
        return MultiDiscrete(stack(choices), dtype=np.dtype(leaf.dtype).type, start=stack(leaf.start))
    assert isinstance(leaf, MultiBinary)
    return MultiBinary(stack(np.zeros(leaf.shape)).shape)


class LastValues:
    """The last k values of every (env, agent) in its running episode, leaf by leaf: a ring buffer.

    A new episode only sets its count to 0, which hides all earlier values. Before it are ``blanks``, a value of one row
    each, which also define shapes and dtypes; or, with ``repeat``, the episode's first value.
    """

    def __init__(self, k: int, blanks: Sequence[AnyArray], *, repeat: bool = False) -> None:
        self.k = k
        self.blanks = tuple(blanks)
        self.repeat = repeat
        self.count = AgentTable((), np.int64)
        # Agent a's ring takes the slots a*k to a*k + k-1 of the table's second axis.
        self.rings = [AgentTable(blank.shape, blank.dtype) for blank in self.blanks]

    def begin(self, rows: Rows) -> None:
        """Clear the histories of agents with ``first`` rows; rows without that column clear nothing."""
        if "first" in rows and rows.first.any():
            self.count.set(rows.env_id[rows.first], rows.agent_index[rows.first], 0)

    def push(self, rows: Rows, leaves: Sequence[Any], what: str) -> None:
        """Add one value (n, *shape) per leaf; if one does not fit, nothing changes. Errors name ``what``."""
        arrays = [_fit(leaf, blank, len(rows), what) for leaf, blank in zip(leaves, self.blanks, strict=True)]
        env_id, agent_index = rows.env_id, rows.agent_index
        count = self.count.get(env_id, agent_index)
        slot = self._slot(agent_index, count)
        for ring, array in zip(self.rings, arrays, strict=True):
            ring.set(env_id, slot, array)
        self.count.set(env_id, agent_index, count + 1)

    def look(self, rows: Rows, shifts: NDArray[np.int64]) -> list[AnyArray]:
        """Return copies (n, m, *shape) of the values at ``shifts`` (m,): 0 is the last, -1 the one before; above -k."""
        env_id, agent_index = rows.env_id[:, None], rows.agent_index[:, None]
        number = self.count.get(rows.env_id, rows.agent_index)[:, None] + (shifts - 1)
        missing = number < 0
        some = bool(missing.any())
        if some and self.repeat:
            number = np.maximum(number, 0)
        slot = self._slot(agent_index, number)
        values = [ring.get(env_id, slot) for ring in self.rings]
        if some and not self.repeat:
            for value, blank in zip(values, self.blanks, strict=True):
                value[missing] = blank
        return values

    @property
    def tables(self) -> Tables:
        """All tables, for `Remembers`."""
        return {"count": self.count, "rings": self.rings}

    def same_form(self, other: LastValues | None) -> bool:
        return (
            other is not None
            and self.k == other.k
            and [(b.shape, b.dtype) for b in self.blanks] == [(b.shape, b.dtype) for b in other.blanks]
        )

    def _slot(self, agent_index: AnyArray, number: AnyArray) -> AnyArray:
        # From the ring's last slot to its first, so that the table grows once.
        slot: AnyArray = agent_index * self.k + (self.k - 1 - number % self.k)
        return slot


class TreeForm:
    """Structure of a column without a space, taken from one row's value; used like a `SpaceTree`."""

    def __init__(self, row: Tree) -> None:
        self._row = map_tree(to_array, row)
        self.blanks: list[AnyArray] = self.flatten(self._row)

    def flatten(self, tree: Tree) -> list[Any]:
        """List the leaves of a tree of the same structure; ContractError names the place where it differs."""
        leaves: list[Any] = []
        try:
            zip_trees(lambda pair: leaves.append(pair[1]), [self._row, tree])
        except ArgumentError as error:
            raise ContractError(str(error)) from None
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Tree:
        rest = iter(leaves)
        return map_tree(lambda _: next(rest), self._row)


def action_tree(space: Space[Any] | None, owner: str) -> SpaceTree:
    """Return the tree of the policy's action space, or raise ArgumentError if it is unknown."""
    if space is None:
        raise ArgumentError(
            f"{owner} does not know the action space: give it to the pipeline, bind(space, agents, action_space)"
        )
    return SpaceTree(space)


def blank_action(leaf: Leaf) -> AnyArray:
    """Return the blank action of a leaf: the start of a Discrete, the Box member nearest 0.

    If the space contains neither, it is another member, the same each time.
    """
    blank = blank_obs(leaf)
    if isinstance(leaf.space, Box):
        blank = np.asarray(np.clip(blank, leaf.space.low, leaf.space.high), leaf.dtype)
    if leaf.is_object or not leaf.space.contains(blank):
        blank[()] = _member(leaf.space)
    return blank


def blank_obs(leaf: Leaf) -> AnyArray:
    """Return zeros, or the start of a Discrete or MultiDiscrete."""
    start = getattr(leaf.space, "start", None)
    return leaf.blank() if start is None else np.array(start, leaf.dtype)


def cast_row_leaf(value: Any, blank: AnyArray, what: str) -> AnyArray:
    """Convert one leaf of a user's row value to the shape and dtype of ``blank``; ArgumentError names ``what``."""
    given = to_array(value) if blank.dtype != object else np.asarray(value)
    try:
        with np.errstate(invalid="ignore"):  # NaN for an int: raises below
            full = np.broadcast_to(given, blank.shape).astype(blank.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what}: a value of shape {given.shape} does not fit shape {blank.shape}") from error
    # Floats are rounded; a number outside an integer's range raises.
    if blank.dtype.kind not in "fO" and not np.array_equal(full, np.broadcast_to(given, blank.shape)):
        raise ArgumentError(f"{what}: {value!r} does not fit dtype {blank.dtype}")
    return full


def fixed_size_tree(
    space: Space[Any], owner: str, advice: str = "put FlattenObs(drop=[…]) before it, or encode the leaf"
) -> SpaceTree:
    """Return the tree of a space whose values are all stored in arrays, or raise UnsupportedSpaceError."""
    tree = SpaceTree(space)
    for leaf in tree.leaves:
        if leaf.is_object:
            raise UnsupportedSpaceError(
                f"{owner} cannot keep {leaf} of {type(leaf.space).__name__}, which has no fixed size; {advice}"
            )
    return tree


def check_column_is_new(rows: Rows, column: str, owner: str) -> None:
    """Raise ContractError if a column exists already."""
    if column in rows:
        raise ContractError(f"{owner} adds column {column!r}, but the rows have one of that name already")


def _member(space: Space[Any]) -> Any:
    own = deepcopy(space)  # never draw from the caller's space
    own.seed(0)
    return own.sample()


def _fit(leaf: Any, blank: AnyArray, n: int, what: str) -> AnyArray:
    array = to_array(leaf)
    if array.shape != (n, *blank.shape) or not np.can_cast(array.dtype, blank.dtype, "same_kind"):
        raise ContractError(
            f"expected {what} as {blank.dtype} of shape {(n, *blank.shape)}, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(blank.dtype, copy=False)


Shift = int | str | Sequence[int]
"""One shift, several, or a range ``"a:b"`` or ``"a:b:step"`` with both ends in it."""

_RANGE = re.compile(r"(-?[0-9]{1,9}):(-?[0-9]{1,9})(?::([0-9]{1,9}))?")
_MOST = 100_000  # more rows are surely a mistake, and would fill the memory


def parse_shifts(spec: Shift) -> tuple[int, ...]:
    """List the shifts of a spec, in ascending order: the oldest row first.

    0 is the row itself, -1 the agent's row before it, 1 the row after it. ``"-3:-1"`` is -3, -2, -1 and ``"0:4:2"`` is
    0, 2, 4: both ends belong to a range, as in RLlib's view requirements.
    """
    if isinstance(spec, str):
        return _parse_range(spec)
    if isinstance(spec, Sequence) and not isinstance(spec, bytes):
        shifts = tuple(sorted(_integer(item, spec) for item in spec))
        if not shifts:
            raise ArgumentError(f"expected at least one shift, got {spec!r}")
        if len(set(shifts)) < len(shifts):
            raise ArgumentError(f"expected different shifts, got {spec!r}")
        return shifts
    return (_integer(spec, spec),)


def _parse_range(spec: str) -> tuple[int, ...]:
    found = _RANGE.fullmatch(spec)
    if found is None:
        raise _bad(spec)
    start, stop, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if start > stop or step == 0:
        raise ArgumentError(f'expected "a:b" or "a:b:step" with a <= b and a step above 0, got {spec!r}')
    shifts = range(start, stop + 1, step)
    if len(shifts) > _MOST:
        raise ArgumentError(f"expected at most {_MOST} shifts, got {len(shifts)} in {spec!r}")
    return tuple(shifts)


def _integer(item: object, spec: object) -> int:
    try:
        # A bool is an index to Python, but True as a shift is a mistake.
        if not isinstance(item, bool):
            return operator.index(item)  # type: ignore[arg-type]  # what has no index is what is caught here
    except TypeError:
        pass
    raise _bad(spec)


def _bad(spec: object) -> ArgumentError:
    return ArgumentError(f'a shift is an int, a list of ints, "a:b" or "a:b:step" (both ends included), got {spec!r}')
