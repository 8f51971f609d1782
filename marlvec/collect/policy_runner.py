"""`PolicyRunner`: asks one policy, through its connectors, with its spaces and its ready rows.

`NoopActions` answers for rows that a connector has removed; `GivenActions` come from an env or a simulator.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.collect.columns import BATCH_COLUMNS, ColumnForms, Leaves, columns_from, plain_columns
from marlvec.collect.row_log import RowLog
from marlvec.collect.rows import UNREAD, PolicyPart
from marlvec.connectors import ActionPipeline, AgentPipeline, LearnerPipeline, Pipeline, Rows, UnsquashActions
from marlvec.connectors.agent_tables import blank_action
from marlvec.connectors.pipeline import with_inner
from marlvec.env_ids import Where
from marlvec.envs.spec import AgentGroup
from marlvec.errors import ArgumentError, ContractError, ContractWarning
from marlvec.policies import FunctionPolicy, Policy, PolicyOutput, ScriptedPolicy
from marlvec.serialization.saved import Saved, SavedField, State, check_fields, check_value, flag_field
from marlvec.serialization.values import object_from, plain_object
from marlvec.spaces import Leaf, SpaceTree, describe_difference
from marlvec.trees import Tree, column_array, map_tree, to_array, tree_leaves, zip_trees

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
            self._learn_dtypes(actions)

    def _learn_dtypes(self, actions: Tree) -> None:
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
                self._learn_dtypes(actions)
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


@dataclass(slots=True)
class Selection:
    """The rows of one policy among those of one group in some envs."""

    flat: IntArray | None  # (n,) positions among (envs, agents of the group), flattened; None: all
    env_id: IntArray
    agent_index: IntArray
    lanes: IntArray  # env * A + agent, ascending
    places: Where  # the lanes as an index
    eps_id: tuple[IntArray, IntArray] | None = None  # the episodes of all envs, and those of the rows

    def pick(self, leaf: AnyArray) -> AnyArray:
        """Rows of an array (envs, agents of the group, …); views where these are all."""
        rows = leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])  # not -1: leaves may be empty
        return rows if self.flat is None else rows.take(self.flat, axis=0)


def kinds_for(leaf: Leaf) -> str:
    """Dtype kinds that go into a leaf without changing their meaning."""
    if leaf.is_object:
        return "OU"
    if isinstance(leaf.space, (Discrete, MultiDiscrete)):
        return "iu"
    if isinstance(leaf.space, MultiBinary) or leaf.dtype.kind == "b":
        return "iub"
    assert isinstance(leaf.space, Box)  # there are no other array leaves
    return "fiu" if leaf.dtype.kind == "f" else "iu"


IDENTITY = ("env_id", "agent_index", "eps_id", "t")


@dataclass(slots=True)
class PolicyAnswer:
    """A policy's answer to ready rows; stored once the envs have taken it."""

    runner: PolicyRunner
    ready: PolicyPart
    given: Rows  # the rows the policy was given
    actions: Tree
    columns: Mapping[str, Tree]  # the policy's other output
    version: int
    rows: Rows | None = None  # as the action connectors left them; None where those had nothing to do
    # leaves of actions_for_env in the env's own dtypes, set by `transform`
    for_env: Sequence[AnyArray] = ()
    parts: Sequence[Leaves] = ()  # leaves of the columns to store, set by `transform`


class PolicyRunner:
    """A policy of a collector, with its connectors and waiting rows.

    ``number``: how many policies were added to the collector before it. ``log`` has all policies' rows and answers.
    """

    run_mark = 0  # sets its connectors' draws in evaluations apart from those in training, where seeds are equal
    noops: NoopActions  # agents whose rows its connectors took out; set once it is bound
    off_policy: GivenActions  # what its agents do without asking it; set once it is bound
    env_tree: SpaceTree  # action space of its agents; set once it is bound
    _policy_tree: SpaceTree  # set once it is bound

    def __init__(
        self,
        number: int,
        policy_id: str,
        policies: Mapping[str, Policy],
        agent_connectors: AgentPipeline,
        action_connectors: ActionPipeline,
        learner_connectors: LearnerPipeline,
        num_agents: int,
        log: RowLog,
    ) -> None:
        self.number, self.policy_id, self._policies = number, policy_id, policies
        self.seed_number = number  # what its seed follows from; after loading a state not always its number
        self.agent_connectors, self.action_connectors = agent_connectors, action_connectors
        self.learner_connectors = learner_connectors
        self.chains = agent_connectors, action_connectors, learner_connectors
        self.group_index = -1  # position of the group of agents it plays; -1: none yet
        self.ready = PolicyPart.none()  # rows that wait for its answer
        self._who, self._num_agents = f"policy {policy_id!r}", num_agents
        self.log, self.keeps_rows = log, True  # whether its rows are stored there, or counted alone
        self.forms = ColumnForms(self._who)
        # frozen: never trained; retired: removed, and some of its rows are in no batch yet
        self.is_frozen = self.is_retired = False
        # An answer that its action connectors have seen, and that was not sent because another policy failed. It is
        # given again to the same rows, so that connectors see every answer once; set to None before anything is sent.
        self.unsent: PolicyAnswer | None = None
        self.declares_noop = False  # whether its connectors may take rows out
        self._plain: tuple[np.dtype[Any], tuple[int, ...]] | None = None  # the form of one array that is an action
        self._stores_plain = False  # whether all that is stored of an answer are such an array and its own columns
        self._extras: Collection[str] | None = None  # names of those in the last answer that was looked at closely
        self._width = 0  # how many columns its rows had
        self._scaled_leaves: tuple[int, ...] = ()  # of actions that must be in [-1, 1]; () once it warned
        self._version_n = np.zeros(0, np.int64)  # the policy's, for each row

    def bind(self, group_index: int, group: AgentGroup, agents: tuple[str, ...], num_envs: int, seed: int) -> None:
        """Give it the group of agents it plays, once: spaces go through the connectors to the policy."""
        for chain in self.chains:
            chain.policy_id = self.policy_id
        self.action_connectors.bind(group.action_space, agents)
        action_space = self.action_connectors.policy_space_
        self.agent_connectors.bind(group.observation_space, agents, action_space)
        self.learner_connectors.bind(self.agent_connectors.output_space_, agents, action_space)
        noop = declared_noop(self.agent_connectors, self.action_connectors, group.action_tree, self._who)
        self.noops = NoopActions(noop, group.action_tree, num_envs, len(agents))
        self.declares_noop = noop is not None
        self.off_policy = GivenActions(SpaceTree(action_space), group.action_space, self._who)
        self.env_tree, self._policy_tree = group.action_tree, SpaceTree(action_space)
        forms = {(leaf.dtype, leaf.shape) for tree in (self.env_tree, self._policy_tree) for leaf in tree.leaves}
        if self.env_tree.is_leaf and self._policy_tree.is_leaf and len(forms) == 1:
            self._plain = None if self.env_tree.leaves[0].is_object else forms.pop()
        self.set_up(self.policy, seed)
        self.seed_connectors(seed)
        self._scaled_leaves = self._leaves_of_units()
        self.group_index = group_index

    @property
    def forms(self) -> ColumnForms:
        """Forms of the columns of its rows and answers."""
        return self.log.forms[self.number]

    @forms.setter
    def forms(self, forms: ColumnForms) -> None:
        self.log.forms[self.number] = forms

    def seed_connectors(self, seed: int) -> None:
        """Have random draws of its connectors follow from a seed, beside the connectors' own."""
        for chain in self.chains:
            chain.follow_run(seed ^ self.run_mark)

    def freeze(self) -> None:
        """Have it never trained, nor its connectors."""
        self.is_frozen = True
        for chain in self.chains:
            chain.eval()

    @property
    def policy(self) -> Policy:
        """The policy; a `PolicyMap` may have to read it from a file."""
        return self._policies[self.policy_id]

    def set_up(self, policy: Policy, seed: int) -> None:
        """Give a policy the spaces of its agents."""
        policy.setup(self.agent_connectors.output_space_, self.action_connectors.policy_space_, seed=seed)

    def observe(self, rows: Rows) -> tuple[Rows, NDArray[np.bool_] | None]:
        """Send rows through the agent connectors; also return which came out: (n,) bool, or None for all."""
        try:
            out = self.agent_connectors(rows)
        except Exception as error:
            error.add_note(f"in the agent connectors of policy {self.policy_id!r}")
            raise
        if out is rows:
            return rows, None
        kept = None
        if len(out) != len(rows):
            kept = self._kept(rows, out)
            rows = rows.take(kept)
        for name in IDENTITY:
            # Connectors pass on what they do not touch, so this is nearly always the same array.
            if out.get(name) is not rows[name] and not np.array_equal(out.get(name, ()), rows[name]):
                raise ContractError(
                    f"the agent connectors of policy {self.policy_id!r} changed column {name!r}: "
                    f"rows must keep their order"
                )
        return out, kept

    def _kept(self, rows: Rows, out: Rows) -> NDArray[np.bool_]:
        """Return which rows the connectors have kept: (n,) bool."""
        env_id, agent_index = rows["env_id"], rows["agent_index"]
        width = int(agent_index.max()) + 1
        there = out.get("env_id", ()), out.get("agent_index", ())
        kept = np.isin(env_id * width + agent_index, np.multiply(there[0], width) + there[1])
        what = f"the agent connectors of policy {self.policy_id!r} got {len(rows)} rows and returned {len(out)}"
        if len(out) > len(rows):
            raise ContractError(f"{what}; they may remove rows, but not add rows")
        if (rows["last"] & ~kept).any():
            raise ContractError(f"{what}; the last row of an agent must stay")
        if not self.declares_noop:
            raise ContractError(
                f"{what}, and none declares an action for the removed rows: set noop, an action or 'repeat', "
                f"as FilterRows(keep, noop=...) does"
            )
        return kept

    def begin(self, env_ids: IntArray) -> None:
        """New episodes begin in these envs, or none any more: what its agents did last in the old ones goes."""
        if self.group_index < 0:  # it never played
            return
        self.noops.begin(env_ids)
        if len(self.off_policy):
            self.off_policy.forget(np.add.outer(env_ids * self._num_agents, np.arange(self._num_agents)).ravel())

    @property
    def remembers(self) -> bool:
        """Whether its connectors are to be told of new episodes."""
        return self.agent_connectors.is_forgetful or self.action_connectors.is_forgetful

    def reset_connectors(self, env_ids: IntArray) -> None:
        """New episodes begin in these envs, whoever played or plays there."""
        if self.group_index >= 0:  # else it never played, and its connectors do not even know their spaces
            self.agent_connectors.reset(env_ids)
            self.action_connectors.reset(env_ids)

    def clear(self) -> None:
        """Forget the rows that wait, and have rows kept."""
        self.keeps_rows = True
        self.forget_waiting()

    # --- where rows are stored

    def keep_rows(self, keeps_rows: bool) -> None:
        """Have rows kept from now on, or counted alone; nothing changes where there are some."""
        if keeps_rows != self.keeps_rows and not self.log.size(self.number if self.keeps_rows else UNREAD):
            self.keeps_rows = keeps_rows

    def forget_ready(self, env_ids: IntArray) -> int:
        """Drop the rows of some envs that wait for an answer, and agents there that are idle; returns how many rows."""
        ready = self.ready
        gone = np.isin(ready.lanes // self._num_agents, env_ids)
        self.ready, self.unsent = ready.take(~gone), None
        if self.group_index >= 0:
            self.noops.lanes = self.noops.lanes[~np.isin(self.noops.lanes // self._num_agents, env_ids)]
        return int(np.count_nonzero(gone))

    def forget_waiting(self) -> None:
        """Forget the rows that wait for an answer, agents that are idle, and what is known of next actions."""
        self.ready, self.unsent = PolicyPart.none(), None
        if self.group_index >= 0:
            self.noops.clear()
            self.off_policy.clear()

    def take_ready(self, ready: PolicyPart, unsent: PolicyAnswer | None) -> None:
        """Replace the waiting rows, after the log has stored the old ones."""
        self._stores_plain = False
        self.ready, self.unsent = ready, unsent

    # --- from ready rows to actions

    def act(self, ready: PolicyPart, *, explore: bool) -> PolicyAnswer:
        """Ask the policy about ready rows; errors, also of the policy itself, name it."""
        unsent = self.unsent
        if unsent is not None and np.array_equal(unsent.ready.lanes, ready.lanes):
            unsent.ready = ready
            return unsent
        rows = ready.given()
        policy = self._policies[self.policy_id]
        version = int(policy.version)
        if not self.off_policy.used:
            return PolicyAnswer(self, ready, rows, *self._ask(policy, rows, explore=explore), version)

        def ask(some: Rows) -> tuple[Tree, Mapping[str, Tree]]:
            return self._ask(policy, some, explore=explore)

        said = self.off_policy.answer(rows, ready.lanes, ask, self.agent_connectors.policy_columns)
        return PolicyAnswer(self, ready, rows, *said, version)

    def _ask(self, policy: Policy, rows: Rows, *, explore: bool) -> tuple[Tree, Mapping[str, Tree]]:
        """The policy's actions and columns for some rows, of the right length."""
        try:
            output = policy.act(rows, explore=explore)
        except BaseException as error:  # Ctrl-C and sys.exit() too
            error.add_note(f"in policy {self.policy_id!r}; nothing was sent to the envs, collect() may be called again")
            raise
        n = len(rows)
        if output is None:
            raise self._bad(f"returned None; act() must return the actions, one for each of its {n} rows")
        if output.__class__ is np.ndarray and output.shape[:1] == (n,) and self.off_policy.knows_columns:
            return output, _NO_COLUMNS
        if output.__class__ is tuple and self._said_again(output, rows):
            return output
        try:
            actions, extras = split_output(output, self._policy_tree)
        except ContractError as error:
            raise self._bad(str(error)) from None
        if taken := [name for name in extras if name in rows or name in BATCH_COLUMNS]:
            raise self._bad(f"added columns named {taken}, which the collector gives")
        for name, column in (("actions", actions), *extras.items()):
            for path, leaf in tree_leaves(column):
                shape = _shape(leaf)
                if not shape or shape[0] != n:
                    where = f"{name}/{path}" if path else name
                    raise self._bad(
                        f"was given {n} rows and returned {where!r} of shape {shape}; expected {n} on the first axis, "
                        f"one for each row"
                    )
        if not self.off_policy.knows_columns:
            self.off_policy.learn(extras, actions)
        self._extras = frozenset(extras) if self._policy_tree.is_leaf else None
        self._width = len(rows.keys())
        return actions, extras

    def _said_again(self, output: tuple[Any, ...], rows: Rows) -> bool:
        """Whether an output has the columns of the last one that was looked at closely, and all are arrays."""
        if self._extras is None or len(output) != 2 or output[1].__class__ is not dict:
            return False
        if output[1].keys() != self._extras or len(rows.keys()) != self._width:
            return False
        n = (len(rows),)
        for column in (output[0], *output[1].values()):
            if column.__class__ is not np.ndarray or column.shape[:1] != n:
                return False
        return True

    def transform(self, answer: PolicyAnswer) -> None:
        """Send an answer through the action connectors, once; check structure, shape, dtype and NaN of the result."""
        if answer is self.unsent:
            return
        n, said = len(answer.ready.lanes), answer.actions
        is_plain = (
            said.__class__ is np.ndarray
            and self._plain is not None
            and said.dtype == self._plain[0]
            and said.shape[1:] == self._plain[1]
            and self.action_connectors.only_converts
            and (not answer.columns or (not self.off_policy.used and all(map(_is_array, answer.columns.values()))))
        )
        rows: Rows | None = None
        if is_plain:
            own = for_env = [said]
            if said.dtype.kind == "f":
                self._refuse_nan(said, answer, "actions_for_env")
        else:
            rows, own, for_env = self._connected(answer, n)
        parts: Sequence[Leaves] = ()
        if self.keeps_rows:
            if len(self._version_n) != n or self._version_n[0] != answer.version:
                self._version_n = np.full(n, answer.version)
            if is_plain and self._stores_plain:
                parts = self._plain_parts(said, answer.columns)
            if not parts:
                parts = self._checked_parts(answer, rows, own, for_env)
        answer.rows, answer.parts, answer.for_env = rows, parts, for_env
        self.unsent = answer

    def _connected(self, answer: PolicyAnswer, n: int) -> tuple[Rows, list[AnyArray], list[AnyArray]]:
        """Rows behind the action connectors; leaves of the policy's own actions; and of what is sent to the envs."""
        own = self._own_leaves(answer)
        if self._scaled_leaves:
            self._warn_of_units(own)
        try:
            rows = self.action_connectors(answer.given.replace(actions=answer.actions, **answer.columns))
        except Exception as error:
            for value in own:
                self._refuse_nan(value, answer, "actions")  # a better reason than that they would not take it
            error.add_note(f"in the action connectors of policy {self.policy_id!r}; nothing was sent to the envs")
            raise
        if len(rows) != n:
            raise self._bad(f"has action connectors that got {n} rows and returned {len(rows)}")
        return rows, own, self._env_leaves(answer, rows["actions_for_env"])

    def _leaves_of_units(self) -> tuple[int, ...]:
        """Return the leaves of a function's or script's actions that `UnsquashActions` rescales: it may not know."""
        scales = any(isinstance(piece, UnsquashActions) for piece in with_inner(self.action_connectors))
        if not scales or not isinstance(self.policy, (FunctionPolicy, ScriptedPolicy)):
            return ()
        pairs = zip(self._policy_tree.leaves, self.env_tree.leaves, strict=False)
        return tuple(
            k
            for k, (own, env) in enumerate(pairs)
            if own.space != env.space and own.space == Box(-1, 1, own.shape, own.dtype.type)
        )

    def _warn_of_units(self, own: list[AnyArray]) -> None:
        """Warn once of an answer outside of [-1, 1]: it may be in the env's units, and is scaled all the same."""
        for k in self._scaled_leaves:
            if own[k].size and (most := float(np.abs(own[k]).max())) > 1 + 1e-6:
                env = self.env_tree.leaves[k]
                warnings.warn(
                    f"policy {self.policy_id!r} answered {most:.4g} for {env}: expected an action in [-1, 1], which "
                    f"UnsquashActions, of the default action connectors, scales to the bounds of {env.space}; to "
                    f"answer in the env's units pass action_connectors=[ToNumpy(), ClipActions()]",
                    ContractWarning,
                    stacklevel=2,
                )
                self._scaled_leaves = ()
                return

    def _checked_parts(
        self, answer: PolicyAnswer, rows: Rows | None, own: list[AnyArray], for_env: list[AnyArray]
    ) -> list[Leaves]:
        """Leaves of all columns that are stored of an answer, in arrays that the policy does not have."""
        given, forms = answer.given.keys(), self.forms
        if rows is None:
            columns = {"actions": own[0], **answer.columns}
        else:
            columns = {name: rows[name] for name in list(rows.keys()) if name not in given}
        columns["actions"] = self._policy_tree.unflatten(own)
        columns["actions_for_env"] = self.env_tree.unflatten(for_env)
        columns["policy_version"] = self._version_n
        parts = forms.check_answer(columns, asked=not np.all(columns.get("off_policy", False)))
        said = forms.answers.keys() - {"actions", "actions_for_env", "policy_version"}
        self._stores_plain = said == answer.columns.keys() and all(
            (forms.answers[name].dtype, forms.answers[name].shape) == self._plain
            for name in ("actions", "actions_for_env")
        )
        return [
            leaves if name == "policy_version" else [leaf.copy() for leaf in leaves]
            for name, leaves in zip(forms.answers, parts, strict=True)
        ]

    def _plain_parts(self, actions: AnyArray, columns: Mapping[str, Tree]) -> Sequence[Leaves]:
        """What `_checked_parts` returns, where columns are arrays of the forms that they had; or else nothing."""
        answers = self.log.forms[self.number].answers
        if len(columns) != len(answers) - 3:
            return ()
        own = [actions.copy()]
        parts: list[Leaves] = []
        for name, form in answers.items():
            if name == "actions" or name == "actions_for_env":
                parts.append(own)
            elif name == "policy_version":
                parts.append([self._version_n])
            else:
                column = columns.get(name)
                if column is None or column.dtype != form.dtype or column.shape[1:] != form.shape:
                    return ()
                parts.append([column.copy()])
        return parts

    def note_sent(self, answer: PolicyAnswer) -> None:
        """The envs have taken an answer: call the agent connectors with it."""
        if self.declares_noop:
            self.noops.note_sent(answer.ready.lanes, answer.for_env)
        if self.off_policy.used:
            self.off_policy.forget(answer.ready.lanes)
        if self.agent_connectors.is_watchful:
            rows = answer.rows
            if rows is None:
                sent = answer.for_env[0].view()
                sent.flags.writeable = False
                rows = answer.given.replace(actions=answer.actions, **answer.columns, actions_for_env=sent)
            self.agent_connectors.on_policy_output(rows)

    def _own_leaves(self, answer: PolicyAnswer) -> list[AnyArray]:
        """Leaves of the policy's own actions."""
        value, leaves = answer.actions, self._policy_tree.leaves
        if _is_plain(value, leaves, len(answer.given)):
            return [value]
        given = self._flatten(self._policy_tree, value, "actions")
        return [self._checked(one, leaf, answer, "actions") for one, leaf in zip(given, leaves, strict=True)]

    def _env_leaves(self, answer: PolicyAnswer, value: Tree) -> list[AnyArray]:
        """Leaves of what is sent to the envs."""
        leaves = self.env_tree.leaves
        if _is_plain(value, leaves, len(answer.given)):
            self._refuse_nan(value, answer, "actions_for_env")
            return [value]
        sent = self._flatten(self.env_tree, value, "actions_for_env")
        return [
            self._cast(self._checked(one, leaf, answer, "actions_for_env"), leaf)
            for one, leaf in zip(sent, leaves, strict=True)
        ]

    def _flatten(self, tree: SpaceTree, value: Tree, name: str) -> list[Any]:
        try:
            return tree.flatten(value)
        except ContractError as error:
            raise self._bad(f"gave {name!r} of the wrong structure: {error}") from None

    def _checked(self, value: Any, leaf: Leaf, answer: PolicyAnswer, name: str) -> AnyArray:
        try:
            array = column_array(value)
        except ContractError as error:
            raise self._bad(f"gave {name!r} of the wrong form: {error}") from None
        n = len(answer.given)
        fits = array.dtype == leaf.dtype or array.dtype.kind in kinds_for(leaf)
        if array.shape != (n, *leaf.shape) or not fits:
            raise self._bad(
                f"gave {name!r} as {array.dtype} of shape {array.shape}; {leaf} of {leaf.space} needs "
                f"{leaf.dtype} of shape {(n, *leaf.shape)}"
            )
        # Where the policy itself says NaN, its action connectors may still do something about it.
        if name == "actions_for_env":
            self._refuse_nan(array, answer, name)
        return array.astype(leaf.dtype, copy=False) if leaf.is_object else array  # texts have a dtype of each length

    def _refuse_nan(self, array: AnyArray, answer: PolicyAnswer, name: str) -> None:
        if array.dtype.kind == "f" and np.isnan(array).any():
            i = int(np.argwhere(np.isnan(array))[0][0])
            env, agent = int(answer.given["env_id"][i]), int(answer.given["agent_index"][i])
            raise self._bad(f"gave {name!r} with NaN, first for env {env}, agent {agent}")

    def _cast(self, array: AnyArray, leaf: Leaf) -> AnyArray:
        if array.dtype == leaf.dtype:
            return array
        cast = array.astype(leaf.dtype)
        if leaf.dtype.kind in "iub" and not np.array_equal(cast, array):
            raise self._bad(f"gave 'actions_for_env' that do not fit {leaf.dtype}, the dtype of {leaf.space}")
        return cast

    def _bad(self, what: str) -> ContractError:
        return ContractError(f"policy {self.policy_id!r} {what}; nothing was sent to the envs")


_NO_COLUMNS: Mapping[str, Tree] = {}


def _is_array(column: Tree) -> bool:
    return column.__class__ is np.ndarray


def _is_plain(value: Any, leaves: Sequence[Leaf], n: int) -> bool:
    """Whether it is one array of just the form that a space of one leaf has: there is nothing to convert."""
    if value.__class__ is not np.ndarray or len(leaves) != 1:
        return False
    leaf = leaves[0]
    return bool(value.dtype == leaf.dtype and value.dtype != object and value.shape == (n, *leaf.shape))


def _shape(leaf: Any) -> tuple[int, ...]:
    """Shape of an array, tensor or list; ``()`` of what has none."""
    try:
        return tuple(np.shape(leaf))
    except ValueError:  # a ragged list
        return ()


def split_output(output: PolicyOutput, tree: SpaceTree) -> tuple[Tree, Mapping[str, Tree]]:
    """Split ``actions`` or ``(actions, columns)`` from `Policy.act`, also where actions are tuples."""
    if not isinstance(output, tuple):
        return output, {}
    if len(output) == 2 and isinstance(output[1], Mapping) and all(isinstance(name, str) for name in output[1]):
        if tree.is_leaf or not _fits(tree, output):
            return output[0], output[1]
    elif tree.is_leaf:
        raise ContractError(f"must return actions or (actions, columns), got a tuple of {len(output)}")
    return output, {}


def _fits(tree: SpaceTree, value: Tree) -> bool:
    try:
        leaves = tree.flatten(value)
    except ContractError:
        return False
    return not any(isinstance(leaf, (tuple, Mapping)) for leaf in leaves)
