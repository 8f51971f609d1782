"""`PolicyRunner`: one policy with its connectors, its spaces, its ready rows and its buffer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numpy.typing import NDArray

from marlvec.collect.acting.given_actions import GivenActions
from marlvec.collect.acting.noop_actions import NoopActions, declared_noop
from marlvec.collect.columns.forms import BATCH_COLUMNS, ColumnForms
from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.moment import Moment
from marlvec.collect.storage.row_log import RowLog
from marlvec.connectors import ActionPipeline, AgentPipeline, LearnerPipeline, Rows, UnsquashActions
from marlvec.connectors.pipeline import with_inner
from marlvec.env_ids import Where
from marlvec.envs.spec import AgentGroup
from marlvec.errors import ContractError, ContractWarning
from marlvec.policies import FunctionPolicy, Policy, PolicyOutput, ScriptedPolicy
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, to_array, tree_leaves

__all__ = ["Selection", "kinds_for", "PolicyAnswer", "PolicyRunner", "split_output"]


@dataclass(slots=True)
class Selection:
    """The rows of one policy among those of one group in some envs."""

    flat: IntArray | None  # (n,) positions among (envs, agents of the group), flattened; None: all
    env_id: IntArray
    agent_index: IntArray
    lanes: IntArray  # env * A + agent, ascending
    places: Where  # the lanes as an index

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


IntArray = NDArray[np.int64]


AnyArray = NDArray[Any]
IDENTITY = ("env_id", "agent_index", "eps_id", "t")


@dataclass(slots=True)
class PolicyAnswer:
    """A policy's answer to ready rows; stored once the envs have taken it."""

    runner: PolicyRunner
    ready: Moment
    given: Rows  # the rows the policy was given
    actions: Tree
    columns: Mapping[str, Tree]  # the policy's other output
    version: int
    rows: Rows | None = None  # as the action connectors left them; None where those had nothing to do
    # leaves of actions_for_env in the env's own dtypes, set by `transform`
    for_env: list[AnyArray] = field(default_factory=list)
    parts: list[list[AnyArray]] = field(default_factory=list)  # leaves of the columns to store, set by `transform`


class PolicyRunner:
    """A policy of a collector, with its connectors and waiting rows.

    ``number``: how many policies were added to the collector before it. ``unread`` counts all policies' unread rows.
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
        num_lanes: int,
        unread: RowLog,
    ) -> None:
        self.number, self.policy_id, self._policies = number, policy_id, policies
        self.seed_number = number  # what its seed follows from; after loading a state not always its number
        self.agent_connectors, self.action_connectors = agent_connectors, action_connectors
        self.learner_connectors = learner_connectors
        self.chains = agent_connectors, action_connectors, learner_connectors
        self.group_index = -1  # position of the group of agents it plays; -1: none yet
        self.ready = Moment.none()  # rows that wait for its answer
        self._who, self._num_agents = f"policy {policy_id!r}", num_agents
        # what it saw and did; empty unless `keeps_rows`, else it is counted in `unread`
        self.log = RowLog(ColumnForms(self._who), num_lanes, BatchMemory())
        self.keeps_rows, self._unread = True, unread
        # frozen: never trained; retired: removed, and some of its rows are in no batch yet
        self.is_frozen = self.is_retired = False
        # An answer that its action connectors have seen, and that was not sent because another policy failed. It is
        # given again to the same rows, so that connectors see every answer once; set to None before anything is sent.
        self.unsent: PolicyAnswer | None = None
        self._declared = False
        self._plain: tuple[np.dtype[Any], tuple[int, ...]] | None = None  # the form of one array that is an action
        self._stores_plain = False  # whether all columns that are stored of an answer follow from such an array
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
        self._declared = noop is not None
        self.off_policy = GivenActions(SpaceTree(action_space), group.action_space, self._who)
        self.env_tree, self._policy_tree = group.action_tree, SpaceTree(action_space)
        forms = {(leaf.dtype, leaf.shape) for tree in (self.env_tree, self._policy_tree) for leaf in tree.leaves}
        if self.env_tree.is_leaf and self._policy_tree.is_leaf and len(forms) == 1:
            self._plain = None if self.env_tree.leaves[0].is_object else forms.pop()
        self.set_up(self.policy, seed)
        self.seed_connectors(seed)
        self._scaled_leaves = self._leaves_of_units()
        self.group_index = group_index

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
        if not self._declared:
            raise ContractError(
                f"{what}, and none declares an action for the removed rows: set noop, an action or 'repeat', "
                f"as FilterRows(keep, noop=...) does"
            )
        return kept

    def begin(self, env_ids: IntArray) -> None:
        """New episodes begin in these envs, or none any more: what is remembered of the last ones goes."""
        if self.group_index < 0:  # it never played, and its connectors do not even know their spaces
            return
        self.agent_connectors.reset(env_ids)
        self.action_connectors.reset(env_ids)
        self.noops.begin(env_ids)
        if len(self.off_policy):
            self.off_policy.forget(np.add.outer(env_ids * self._num_agents, np.arange(self._num_agents)).ravel())

    def keep_ended(self, ended_N: IntArray) -> None:
        """Drop all rows but those of episodes with ids below their env's in ``ended_N``, (N,)."""
        self.log.keep_ended(ended_N)
        self._forget_waiting()

    def clear(self) -> None:
        """Drop all rows."""
        self.log.clear()
        self.keeps_rows = True
        self._forget_waiting()

    # --- where rows are stored

    def keep_rows(self, keeps_rows: bool) -> None:
        """Have rows kept from now on, or counted alone; nothing changes where there are some."""
        if keeps_rows != self.keeps_rows and not len(self.log if self.keeps_rows else self._unread):
            self.keeps_rows = keeps_rows

    def forget_ready(self, env_ids: IntArray) -> int:
        """Drop the rows of some envs that wait for an answer, and agents there that are idle; returns how many rows."""
        ready = self.ready
        gone = np.isin(ready.lanes // self._num_agents, env_ids)
        self.ready, self.unsent = ready.take(~gone), None
        if self.group_index >= 0:
            self.noops.lanes = self.noops.lanes[~np.isin(self.noops.lanes // self._num_agents, env_ids)]
        return int(np.count_nonzero(gone))

    def _forget_waiting(self) -> None:
        self.ready, self.unsent = Moment.none(), None
        if self.group_index >= 0:
            self.noops.clear()
            self.off_policy.clear()

    def take_ready(self, ready: Moment, unsent: PolicyAnswer | None) -> None:
        """Replace the waiting rows, after the log has stored the old ones."""
        self._stores_plain = False
        self.ready, self.unsent = ready, unsent

    # --- from ready rows to actions

    def act(self, ready: Moment, *, explore: bool) -> PolicyAnswer:
        """Ask the policy about ready rows; errors, also of the policy itself, name it."""
        unsent = self.unsent
        if unsent is not None and np.array_equal(unsent.ready.lanes, ready.lanes):
            unsent.ready = ready
            return unsent
        rows = ready.given()
        policy = self._policies[self.policy_id]
        version = int(policy.version)
        columns: Mapping[str, Tree]
        if self.off_policy.used:

            def ask(some: Rows) -> tuple[Tree, Mapping[str, Tree]]:
                return self._ask(policy, some, explore=explore)

            actions, columns = self.off_policy.answer(rows, ready.lanes, ask, self.agent_connectors.policy_columns)
        else:
            actions, columns = self._ask(policy, rows, explore=explore)
        return PolicyAnswer(self, ready, rows, actions, columns, version)

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
        return actions, extras

    def transform(self, answer: PolicyAnswer) -> None:
        """Send an answer through the action connectors, once; check structure, shape, dtype and NaN of the result."""
        if answer is self.unsent:
            return
        n, said = len(answer.ready.lanes), answer.actions
        is_plain = (
            said.__class__ is np.ndarray
            and (said.dtype, said.shape[1:]) == self._plain
            and not answer.columns
            and self.action_connectors.only_converts
        )
        rows: Rows | None = None
        if is_plain:
            own = for_env = [said]
            if said.dtype.kind == "f":
                self._refuse_nan(said, answer, "actions_for_env")
        else:
            rows, own, for_env = self._connected(answer, n)
        parts: list[list[AnyArray]] = []
        if self.keeps_rows:
            if len(self._version_n) != n or self._version_n[0] != answer.version:
                self._version_n = np.full(n, answer.version)
            if is_plain and self._stores_plain:
                parts = [own, own, [self._version_n]]
            else:
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
    ) -> list[list[AnyArray]]:
        """Leaves of all columns that are stored of an answer."""
        given, forms = answer.given.keys(), self.log.forms
        columns = {} if rows is None else {name: column for name, column in rows.items() if name not in given}
        columns["actions"] = self._policy_tree.unflatten(own)
        columns["actions_for_env"] = self.env_tree.unflatten(for_env)
        columns["policy_version"] = self._version_n
        parts = forms.check_answer(columns, asked=not np.all(columns.get("off_policy", False)))
        self._stores_plain = (
            list(forms.answers) == ["actions", "actions_for_env", "policy_version"]
            and (forms.answers["actions"].dtype, forms.answers["actions"].shape) == self._plain
        )
        return parts

    def note_sent(self, answer: PolicyAnswer) -> None:
        """The envs have taken an answer: store it, and call the agent connectors with it."""
        if self.keeps_rows:
            self.log.answer(answer.ready.lanes, answer.parts)
        if self._declared:
            self.noops.note_sent(answer.ready.lanes, answer.for_env)
        if self.off_policy.used:
            self.off_policy.forget(answer.ready.lanes)
        if self.agent_connectors.is_watchful:
            rows = answer.rows
            if rows is None:
                sent = answer.for_env[0].view()
                sent.flags.writeable = False
                rows = answer.given.replace(actions=answer.actions, actions_for_env=sent)
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
            array = to_array(value)
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
