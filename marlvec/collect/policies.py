"""`PolicySet`: a collector's policies; `PolicyRouter`: whose rows are whose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns import ColumnForms, ColumnSpecs, columns_from, plain_columns, plain_rows, rows_from
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics import CurrentState
from marlvec.collect.policy_runner import GroupActions, PolicyAnswer, PolicyRunner, Selection
from marlvec.collect.row_log import RowLog
from marlvec.collect.rows import UNREAD, PolicyPart
from marlvec.collect.scheduling import index_of
from marlvec.connectors import ActionPipeline, AgentPipeline, Connector, LearnerPipeline, Pipeline, Rows
from marlvec.connectors.pipeline import with_inner
from marlvec.envs.spec import AgentGroup
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies import Policy, PolicyLike, PolicyMap, as_policy
from marlvec.policies.policy_map import asynchronous, policy_or_make
from marlvec.serialization.saved import State, array_field, check_fields, flag_field, number_field
from marlvec.serialization.values import array_from, plain_array
from marlvec.trees import Tree
from marlvec.vector.vector_env import VectorEnv

if TYPE_CHECKING:
    from marlvec.collect.async_policies import AsyncScheduler

AnyArray = NDArray[Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_SORTED_BY_DIGITS = 1 << 16  # numbers below are sorted as uint16, by their digits, which takes half the time or less
_REMEMBERED = 64  # sets of envs whose rows are remembered: the same envs often come back together again


Share = tuple[PolicyRunner, slice, IntArray]
"""Rows of one policy among those of several: which, and their lanes."""
Split = list[tuple[int, "Selection", list[Share]]]
"""Per group in which several policies play: its position, its rows, and whose they are."""


class PolicyRouter:
    """The policies' runners by number, and which agents each of them plays.

    ``policy_NA`` is read at every `update`; runners come and go, in the same mapping; ``seed`` maps a policy's number
    to its seed.
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
        self._group_A, self._place_A = np.zeros((2, len(agents)), np.int64)  # each agent's, and its position there
        for g, columns in enumerate(self._columns):
            self._group_A[columns], self._place_A[columns] = g, np.arange(len(columns))
        self._policy_L = policy_NA.reshape(-1)
        self._env_L, self._agent_L = np.divmod(np.arange(policy_NA.size), len(agents))
        self._is_one_group = len(groups) == 1  # which has all agents, in order
        self._players: list[list[PolicyRunner]] = [[] for _ in groups]
        self.playing: list[PolicyRunner] = []  # of policies that play an agent in a running episode, by number
        self.alone: list[PolicyRunner] = []  # of these, those whose group no other policy plays in
        self.is_shared = False  # whether several policies play in one group
        self._remembering: tuple[Any, list[PolicyRunner]] = (None, [])  # and what it followed from
        self._everyone: dict[tuple[int, bytes], Selection] = {}
        self._of_all: dict[int, Selection] = {}  # of these, those of all envs, by policy
        self._split: dict[bytes, Split] = {}  # of all agents, by the same envs
        for runner in self.runners.values():
            self.prepare(runner)

    def prepare(self, runner: PolicyRunner) -> None:
        """Give a runner its group of agents where there is one only: which agents it plays need not be known."""
        if len(self.groups) == 1:
            self.bind(runner, 0)

    def update(self) -> None:
        """Take over a change of ``policy_NA``; a policy must not play agents of different spaces (`ContractError`)."""
        self._everyone.clear()
        self._of_all.clear()
        self._split.clear()
        for g, columns in enumerate(self._columns):
            numbers = self._policy_L if self._is_one_group else self._policy_NA[:, columns].reshape(-1)
            found = np.flatnonzero(np.bincount(numbers)).tolist()  # also removed ones, where no episode runs
            players = [self.runners[i] for i in found if i in self.runners]
            self._players[g] = [runner if runner.group_index == g else self.bind(runner, g) for runner in players]
        self.alone = [players[0] for players in self._players if len(players) == 1]
        self.is_shared = len(self.alone) < sum(map(bool, self._players))
        playing = [runner for players in self._players for runner in players]
        self.playing = sorted(playing, key=attrgetter("number"))

    @property
    def remembering(self) -> list[PolicyRunner]:
        """Those of all policies, also of ones that play nowhere, whose connectors forget where episodes begin."""
        known = Pipeline.edits, len(self.runners)
        if self._remembering[0] != known:
            self._remembering = known, [runner for runner in self.runners.values() if runner.remembers]
        return self._remembering[1]

    def bind(self, runner: PolicyRunner, g: int) -> PolicyRunner:
        """Make sure that a policy may play agents of a group; refuse one that plays another group."""
        if runner.group_index == -1:
            runner.bind(g, self.groups[g], self._agents, len(self._policy_NA), self._seed(runner.seed_number))
        elif runner.group_index != g:
            a, b = self.groups[runner.group_index].name, self.groups[g].name
            raise ContractError(
                f"policy {runner.policy_id!r} is to play agents of group {a!r} and of group {b!r}, whose spaces "
                f"differ; "
                f"give each group a policy of its own"
            )
        return runner

    def everyone(self, runner: PolicyRunner, env_ids: IntArray) -> Selection:
        """Return all rows that a policy plays in these envs; cached by envs."""
        if len(env_ids) == len(self._policy_NA) and (found := self._of_all.get(runner.number)) is not None:
            return found
        key = runner.number, env_ids.tobytes()
        if (found := self._everyone.get(key)) is None:
            mask = np.ones((len(env_ids), len(self._agents)), np.bool_)
            found = self.select(runner, env_ids, self.lanes(env_ids, mask))
            size = len(env_ids) * len(self._columns[runner.group_index])
            flat = None if len(found.lanes) == size else found.flat
            found = Selection(flat, found.env_id, found.agent_index, found.lanes, index_of(found.lanes))
            if len(self._everyone) >= _REMEMBERED:
                self._everyone.clear()
            self._everyone[key] = found
        if len(env_ids) == len(self._policy_NA):
            self._of_all[runner.number] = found
        return found

    def lanes(self, env_ids: IntArray, mask_nA: BoolArray) -> IntArray:
        """Lanes of these envs for which a mask is True, ascending as the envs are."""
        flat = mask_nA.reshape(-1).nonzero()[0]
        if len(env_ids) == len(self._policy_NA):
            return flat
        env = flat // len(self._agents)
        lanes: IntArray = flat + (env_ids[env] - env) * len(self._agents)
        return lanes

    def _positions(self, width: int, env_ids: IntArray, lanes: IntArray) -> IntArray:
        """Positions of some lanes among (these envs, agents of their group), flattened."""
        is_everywhere = len(env_ids) == len(self._policy_NA)
        if self._is_one_group and is_everywhere:
            return lanes
        env, place = self._env_L[lanes], self._place_A[self._agent_L[lanes]]
        positions: IntArray = (env if is_everywhere else np.searchsorted(env_ids, env)) * width + place
        return positions

    def index(self, env_ids: IntArray, lanes: IntArray) -> tuple[IntArray, IntArray]:
        """Some lanes of these envs as an index of arrays (envs, A, …)."""
        env = self._env_L[lanes]
        is_everywhere = len(env_ids) == len(self._policy_NA)
        return env if is_everywhere else np.searchsorted(env_ids, env), self._agent_L[lanes]

    def pick(self, group_index: int, chosen: Selection, array_nA: AnyArray) -> AnyArray:
        """Rows of a group of an array over all agents."""
        columns = self._columns[group_index]
        if chosen.flat is None:
            return chosen.pick(array_nA if self._is_one_group else array_nA[:, columns])
        is_everywhere = len(array_nA) == len(self._policy_NA)
        picked: AnyArray = array_nA[chosen.env_id if is_everywhere else chosen.flat // len(columns), chosen.agent_index]
        return picked

    def played_by(self, runners: Sequence[PolicyRunner], lanes: IntArray) -> BoolArray:
        """Return which of these lanes some policies play: (n,)."""
        numbers = np.zeros(max(self.runners) + 1, np.bool_)
        numbers[[runner.number for runner in runners]] = True
        played: BoolArray = numbers[self._policy_L[lanes]]
        return played

    def select(self, runner: PolicyRunner, env_ids: IntArray, lanes: IntArray) -> Selection:
        """Rows of those of some lanes of these envs that a policy plays."""
        if not self._is_one_group or self.is_shared:
            lanes = lanes[self._policy_L[lanes] == runner.number]
        return self._selection(runner.group_index, env_ids, lanes)

    def _selection(self, g: int, env_ids: IntArray, lanes: IntArray) -> Selection:
        at = self._positions(len(self._columns[g]), env_ids, lanes)
        return Selection(at, self._env_L[lanes], self._agent_L[lanes], lanes, lanes)

    def split_everyone(self, env_ids: IntArray) -> Split:
        """Return `split` of all lanes of these envs, cached by envs."""
        key = env_ids.tobytes()
        if (found := self._split.get(key)) is None:
            if len(self._split) >= _REMEMBERED:
                self._split.clear()
            mask = np.ones((len(env_ids), len(self._agents)), np.bool_)
            self._split[key] = found = self.split(env_ids, self.lanes(env_ids, mask))
        return found

    def split(self, env_ids: IntArray, lanes: IntArray) -> Split:
        """Return rows of several policies, of some lanes of these envs, sorted by policy."""
        found = []
        for g, players in enumerate(self._players):
            own = lanes if self._is_one_group else lanes[self._group_A[self._agent_L[lanes]] == g]
            if len(players) < 2 or not len(own):
                continue
            numbers = self._policy_L[own]
            counts = np.bincount(numbers)
            narrow = np.uint16 if len(counts) <= _SORTED_BY_DIGITS else np.int64
            own = own[numbers.astype(narrow).argsort(kind="stable")]
            shares, start = [], 0
            for number in counts.nonzero()[0].tolist():  # not all: a league's policies may have thousands before them
                part = slice(start, start + int(counts[number]))
                shares.append((self.runners[number], part, own[part]))
                start = part.stop
            found.append((g, self._selection(g, env_ids, own), shares))
        return found

    def all_actions(self, answer: PolicyAnswer, env_ids: IntArray, *, grouped: bool) -> Any:
        """As `actions`, where one policy plays all agents of these envs; None: it does not."""
        n, a = len(env_ids), len(self._agents)
        if not self._is_one_group or len(answer.ready.lanes) != n * a:
            return None
        leaves, tree = answer.for_env, self.groups[0].action_tree
        actions: Tree
        if tree.is_leaf:
            actions = leaves[0].reshape(n, a, *leaves[0].shape[1:])
        else:
            actions = tree.unflatten([leaf.reshape(n, a, *leaf.shape[1:]) for leaf in leaves])
        return {self.groups[0].name: actions} if grouped else actions

    def actions(self, parts: Sequence[GroupActions], env_ids: IntArray, *, grouped: bool) -> Any:
        """Return actions of n envs, ascending, in the vectorizer's form (a dict if grouped); zeros for idle agents."""
        trees = {}
        for g, group in enumerate(self.groups):
            own = [part for part in parts if part.group_index == g]
            lead = (len(env_ids), len(group.agents))
            if len(own) == 1 and len(own[0].lanes) == lead[0] * lead[1]:  # every one of them, in order
                leaves = [leaf.reshape(*lead, *leaf.shape[1:]) for leaf in own[0].leaves]
            else:
                leaves = group.action_tree.zeros(*lead)
                if own:
                    at = self._positions(lead[1], env_ids, joined([part.lanes for part in own]))
                    for leaf, *values in zip(leaves, *(part.leaves for part in own), strict=True):
                        leaf.reshape(lead[0] * lead[1], *leaf.shape[2:])[at] = joined(values)
            trees[group.name] = leaves[0] if group.action_tree.is_leaf else group.action_tree.unflatten(leaves)
        return trees if grouped else trees[self.groups[0].name]


def joined(parts: Sequence[AnyArray]) -> AnyArray:
    """Concatenate arrays; one alone is returned as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_FIELDS = ("version", "policy", "connectors", "training", "frozen", "seed_number", "bound", "rows")
_ROWS = ("forms", "stored", "ready", "unsent", "noops", "off_policy")


def get_runner_state(runner: PolicyRunner) -> State:
    """Return the state of a runner, its policy and its connectors."""
    is_bound = runner.group_index >= 0
    policy = runner.policy
    return {
        "version": int(policy.version),
        "policy": policy.state_dict(),
        "connectors": [chain.state_dict() if is_bound else {} for chain in runner.chains],
        "training": [[piece.training for piece in with_inner(chain)] for chain in runner.chains],
        "frozen": runner.is_frozen,
        "seed_number": runner.seed_number,
        "bound": runner.group_index,
        "rows": _get_rows(runner) if is_bound else None,
    }


def _get_rows(runner: PolicyRunner) -> State:
    who = f"policy {runner.policy_id!r}"
    return {
        "forms": runner.forms.get_state(),
        "stored": runner.log.get_state(runner.number) if runner.keeps_rows else None,
        "ready": {"lanes": runner.ready.lanes.copy(), "rows": plain_rows(runner.ready.rows, who)},
        "unsent": None if runner.unsent is None else _get_answer(runner.unsent, who),
        "noops": runner.noops.get_state(),
        "off_policy": runner.off_policy.get_state(),
    }


def _get_answer(answer: PolicyAnswer, who: str) -> State:
    """An answer that its action connectors have seen, and that the envs have not got."""
    parts = [[plain_array(leaf, who) for leaf in leaves] for leaves in answer.parts]
    return {
        "lanes": answer.ready.lanes.copy(),
        "given": plain_rows(answer.given, who),
        "said": plain_columns({"actions": answer.actions, **answer.columns}, who),
        "version": answer.version,
        "rows": None if answer.rows is None else plain_rows(answer.rows, who),
        "for_env": [plain_array(leaf, who) for leaf in answer.for_env],
        "parts": parts,
    }


Stored = tuple[State, ColumnForms | None]
"""A policy's stored rows out of a state, and the forms of its columns; None: its rows are counted alone."""


def prepare_runner(runner: PolicyRunner, state: State, stored: MutableMapping[int, Stored]) -> Callable[[], None]:
    """Validate a state from `get_runner_state()`; return a function that installs it, without policy and connectors.

    What is to be in the log goes into ``stored``, by the policy's number. A runner that had not played then, and has
    now, must play agents of the same spaces (`StateError`).
    """
    where = f"policy {runner.policy_id!r}"
    check_fields(state, _FIELDS, where)
    version, seed_number = number_field(state, "version", where), number_field(state, "seed_number", where)
    bound, frozen = number_field(state, "bound", where, least=-1), flag_field(state, "frozen", where)
    modes = [[piece.training for piece in with_inner(chain)] for chain in runner.chains]
    if [len(part) for part in state["training"]] != [len(part) for part in modes]:
        raise ArgumentError(f"{where}: training: expected a flag for each connector, {modes}, got {state['training']}")
    if runner.group_index not in (-1, bound):
        raise StateError(f"{where} has played agents of other spaces than the saved policy did: make a new collector")
    put_rows = runner.clear if bound < 0 else _prepare_rows(runner, state["rows"], where, stored)

    def put() -> None:
        runner.is_frozen, runner.seed_number = frozen, seed_number
        put_rows()
        put_modes(runner, state["training"])
        if runner.policy.version != version:
            runner.policy.version = version

    return put


def put_modes(runner: PolicyRunner, training: list[list[bool]]) -> None:
    """Say for each connector whether it learns."""
    for chain, flags in zip(runner.chains, training, strict=True):
        for piece, flag in zip(with_inner(chain), flags, strict=True):
            piece.training = flag


def column_specs(runner: PolicyRunner, *, of_batch: bool = False) -> ColumnSpecs:
    """Return what saved rows of a bound runner are checked against, or rows of a batch, behind learner connectors."""
    spaces = {
        "obs": runner.agent_connectors.output_space_,
        "actions": runner.action_connectors.policy_space_,
        "actions_executed": runner.action_connectors.policy_space_,
        "actions_for_env": runner.env_tree.space,
    }
    exact = {"actions_for_env", *(["obs"] if runner.agent_connectors.is_identity else [])}
    return ColumnSpecs(spaces, exact, any_shape=of_batch and len(runner.learner_connectors) > 0)


def _prepare_rows(
    runner: PolicyRunner, state: Any, where: str, stored: MutableMapping[int, Stored]
) -> Callable[[], None]:
    check_fields(state, _ROWS, where)
    specs = column_specs(runner)
    forms = ColumnForms.from_state(state["forms"], specs, where)
    ready, keeps_rows = check_fields(state["ready"], ("lanes", "rows"), where), state["stored"] is not None
    if keeps_rows:
        stored[runner.number] = state["stored"], forms
    rows = _rows_from(ready["rows"], forms, specs, f"{where}: ready rows")
    if len(rows) and forms.rows and (rows.keys() ^ forms.rows.keys()) - {"action_mask"}:
        raise ArgumentError(
            f"{where}: expected ready rows with the columns {list(forms.rows)}, got {list(rows.keys())}"
        )
    lanes = array_field(ready, "lanes", np.int64, (len(rows),), where)
    answer = None if state["unsent"] is None else _answer_from(runner, state["unsent"], forms, f"{where}: unsent")
    puts = runner.noops.prepare(state["noops"]), runner.off_policy.prepare(state["off_policy"])
    if runner.action_connectors.only_converts:  # else the columns that are stored may be others
        forms.fit_saved(columns_from(state["off_policy"]["blanks"], 1, where), f"{where}: blanks", known=forms.answers)

    def put() -> None:
        runner.clear()
        runner.keeps_rows, runner.forms = keeps_rows, forms
        for part in puts:
            part()
        runner.take_ready(_waiting(runner, lanes, rows), answer)

    return put


def _rows_from(state: Any, forms: ColumnForms, specs: ColumnSpecs, where: str) -> Rows:
    """The rows of a state, once the dtype and shape of each column were found to be right."""
    rows = rows_from(state, where)
    columns = dict(rows.items())
    specs.check(columns, where)
    forms.fit_saved(columns, where, known=forms.rows)
    return rows


def _waiting(runner: PolicyRunner, lanes: NDArray[np.int64], rows: Rows) -> PolicyPart:
    return PolicyPart(runner.number, lanes, dict(rows.items()))


def _answer_from(runner: PolicyRunner, state: Any, forms: ColumnForms, where: str) -> PolicyAnswer:
    check_fields(state, ("lanes", "given", "said", "version", "rows", "for_env", "parts"), where)
    specs = column_specs(runner)
    given = _rows_from(state["given"], forms, specs, f"{where}: given")
    lanes = array_field(state, "lanes", np.int64, (len(given),), where)
    said = columns_from(state["said"], len(given), f"{where}: said")
    specs.check(said, f"{where}: said")
    rows = None if state["rows"] is None else _rows_from(state["rows"], forms, specs, f"{where}: rows")
    for_env = [array_from(leaf) for leaf in state["for_env"]]
    specs.check({"actions_for_env": runner.env_tree.unflatten(for_env)}, f"{where}: for_env")
    parts = [[array_from(leaf) for leaf in leaves] for leaves in state["parts"]]
    if parts and len(parts) != len(forms.answers):
        raise ArgumentError(f"{where}: parts: expected {len(forms.answers)} columns, got {len(parts)}")
    if parts:
        columns = {name: form.tree(leaves) for (name, form), leaves in zip(forms.answers.items(), parts, strict=True)}
        forms.fit_saved(columns, f"{where}: parts")
    return PolicyAnswer(
        runner,
        _waiting(runner, lanes, given),
        given,
        said.pop("actions"),
        said,
        number_field(state, "version", where),
        rows,
        for_env,
        parts,
    )


P = TypeVar("P", bound=Pipeline[Any])
C = TypeVar("C", bound=Connector)


def pipelines_for(
    kind: type[P],
    given: P | Iterable[Any] | Mapping[str, Any] | None,
    policy_ids: Sequence[str],
    default: Callable[[], P],
    known: Iterable[Connector] = (),
) -> dict[str, P]:
    """Return one pipeline per policy id.

    ``given``: None for the default; one chain (a pipeline, or connectors) for every policy, copied where there are
    several; or policy id to chain, with the default for those left out. One pipeline, or one connector that remembers
    something, must not be given to two policies. One that another collector has got is copied, as it was then;
    ``known``: connectors that this collector has.
    """
    own = _Own(known)
    if given is None:
        return {name: _in_use(default()) for name in policy_ids}
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in policy_ids]:
            raise ArgumentError(
                f"connectors given for unknown policies {unknown}; the policies are {list(policy_ids)}: name those "
                f"alone, and give a policy that comes later its connectors in add_policy()"
            )
        found = {
            name: _chain(kind, given[name], f" for policy {name!r}", own) if name in given else _in_use(default())
            for name in policy_ids
        }
        if len({id(chain) for chain in found.values()}) < len(found):
            raise ArgumentError(
                "one pipeline was given to two policies; it keeps state per agent, so each needs its own"
            )
        _refuse_shared(found)
        own.keep()
        return found
    chain = _chain(kind, given, ", or a dict of policy id to those", own)
    own.keep()
    if len(policy_ids) == 1:
        return {policy_ids[0]: chain}
    return {name: _in_use(_copied(chain)) for name in policy_ids}


def _copied(chain: C) -> C:
    """Copy a chain, so that no other collector or policy shares its state; functions and policies in it are shared."""
    parts = (value for piece in with_inner(chain) for value in vars(piece).values())
    kept = [
        value for value in parts if isinstance(value, Policy) or (callable(value) and not isinstance(value, Connector))
    ]
    return copy.deepcopy(chain, {id(value): value for value in kept})


def _refuse_shared(chains: Mapping[str, Pipeline[Any]]) -> None:
    """Refuse a connector with state in two policies' chains: it would mix up their agents."""
    found: dict[int, tuple[str, int]] = {}
    for policy_id, chain in chains.items():
        for position, outer in enumerate(chain):
            for piece in with_inner(outer):
                other, place = found.setdefault(id(piece), (policy_id, position))
                if other != policy_id and _remembers(piece):
                    name = type(piece).__name__
                    raise ArgumentError(
                        f"connectors: expected each policy to have instances of its own, got one {name} in two chains, "
                        f"at position {place} for policy {other!r} and at position {position} for policy "
                        f"{policy_id!r}; it remembers something of each env and agent. Make one for each, {name}(…) in "
                        f"both chains, or give one chain for all policies, which is copied"
                    )


def _remembers(piece: Connector) -> bool:
    kind = type(piece)
    return any(
        getattr(kind, name) is not getattr(Connector, name) for name in ("state_dict", "reset", "on_policy_output")
    )


class _FirstForm:
    """A copy of a connector as a collector first got it; None: the connector counts as it is.

    The connector itself holds it, so that both end together: a form may hold a policy, and so the whole collector. A
    copy of the connector is another connector, and has none.
    """

    def __init__(self, owner: Connector | None = None, form: Connector | None = None) -> None:
        self._owner = None if owner is None else ref(owner)
        self.form = form

    def __reduce__(self) -> tuple[type[_FirstForm], tuple[()]]:
        return _FirstForm, ()

    @classmethod
    def of(cls, connector: Connector) -> _FirstForm | None:
        """Return the first form of a connector in use; None if no collector got it yet."""
        found = vars(connector).get(_FIRST_FORM)
        return found if isinstance(found, cls) and found._owner is not None and found._owner() is connector else None

    @classmethod
    def set(cls, connector: Connector, form: Connector | None) -> None:
        vars(connector)[_FIRST_FORM] = cls(connector, form)


_FIRST_FORM = "_first_form"  # the attribute


def _in_use(made: C) -> C:
    """Have later collectors get a copy of a chain that a collector has made, with what it has learnt until then."""
    _FirstForm.set(made, None)
    return made


class _Own:
    """Gives one collector connectors that no other has; ``known``: those that it has already.

    A connector goes to the first collector itself, and to each later one as a copy of its form at that time.
    """

    def __init__(self, known: Iterable[Connector]) -> None:
        self._given: dict[int, tuple[Connector, Connector]] = {id(one): (one, one) for one in known}
        self._firsts: list[tuple[Connector, Connector | None]] = []

    def __call__(self, given: C) -> C:
        if id(given) not in self._given:
            self._given[id(given)] = given, self._take(given)
        return cast("C", self._given[id(given)][1])

    def keep(self) -> None:
        """Have later collectors get copies of these connectors."""
        for connector, form in self._firsts:
            _FirstForm.set(connector, form)

    def _take(self, given: C) -> C:
        if (first := _FirstForm.of(given)) is None:
            form: Connector | None = None
            with suppress(Exception):  # of a user's class, which can be in one collector only
                form = _copied(given)
            self._firsts.append((given, form))
            return given
        copied = _copied(given if first.form is None else cast("C", first.form))
        self._firsts.append((copied, None))
        return copied


def _chain(kind: type[P], given: Any, where: str, own: _Own) -> P:
    if isinstance(given, kind):
        return own(given)
    if isinstance(given, (list, tuple)):
        made = kind(own(piece) if isinstance(piece, Connector) else piece for piece in given)
        return _in_use(made)
    hint = f"; write [{given!r:.200}]" if isinstance(given, Connector) else ""
    if given is None:
        hint = "; leave it out for the default ones, or give [] for none"
    raise ArgumentError(f"expected an {kind.__name__} or a list of connectors{where}, got {given!r:.200}{hint}")


PoliciesToTrain: TypeAlias = Collection[str] | Callable[[str], bool] | None
"""Ids of the policies that get batches, or a function ``(policy id) -> bool``; None for all."""


class TrainedPolicies:
    """Says of each policy whether it gets batches, by the user's ids or function."""

    def __init__(self, given: PoliciesToTrain, known: Collection[str]) -> None:
        if given is not None and not callable(given):
            if isinstance(given, str) or not isinstance(given, Collection):
                raise ArgumentError(
                    f"policies_to_train must be a list of policy ids, or a function (policy id) -> bool, got {given!r}"
                )
            if unknown := [name for name in given if name not in known]:
                raise ArgumentError(
                    f"policies_to_train names unknown policies {unknown}; the policies are {list(known)}"
                )
            given = tuple(given)
        self.given = given

    def __call__(self, policy_id: str) -> bool:
        if self.given is None:
            return True
        if not callable(self.given):
            return policy_id in self.given
        try:
            return bool(self.given(policy_id))
        except Exception as error:
            error.add_note(f"in policies_to_train({policy_id!r}); no row is lost: call collect() again")
            raise


Chain: TypeAlias = Iterable[Any]
NewPolicy: TypeAlias = PolicyLike | Callable[[], PolicyLike]
Connectors: TypeAlias = Chain | Mapping[str, Chain] | None
"""One chain for every policy, or policy id to chain, or None."""
_KINDS: tuple[type[Pipeline[Any]], ...] = (AgentPipeline, ActionPipeline, LearnerPipeline)


class PolicySet:
    """The policies that act, each with its runner, and what changes when one comes or goes.

    A policy is removed when it plays in no running episode. Where rows of it are in no batch yet its runner stays,
    *retired*, until they are. ``connectors``: chains of agent, action and learner connectors, as the collector was
    given them. ``seed`` maps a policy's number to its seed; ``run_mark`` keeps
    connectors' draws apart from those of collectors with the same seed and another mark.
    """

    def __init__(
        self,
        envs: VectorEnv,
        policies: MutableMapping[str, Policy],
        connectors: Sequence[Connectors],
        episodes: EpisodeTracker,
        seed: Callable[[int], int],
        run_mark: int,
    ) -> None:
        self._envs, self._given, self._episodes, self._seed = envs, tuple(connectors), episodes, seed
        self.policies = policies  # changed in place
        self.pipelines: tuple[dict[str, Any], ...] = tuple(
            pipelines_for(kind, given, tuple(policies), _default(kind))
            for kind, given in zip(_KINDS, connectors, strict=True)
        )  # of agent, action and learner connectors
        self._count = self.seed_count = 0
        self._run_mark = run_mark
        self.log = RowLog(envs.num_envs * envs.agent_num, envs.agent_num)
        self.runners: dict[int, PolicyRunner] = {}  # by number, in order, retired ones too
        for name in policies:
            self._append(name)
        self.router = PolicyRouter(self.runners, envs.spec.groups, envs.agents, episodes.policy_NA, seed)
        if episodes.is_static:
            self.router.update()

    def _append(self, name: str) -> PolicyRunner:
        a = self._envs.agent_num
        before, behind, learner = (found[name] for found in self.pipelines)
        number, self._count = self._count, self._count + 1
        kind = PolicyRunner
        if self._is_async(name):
            from marlvec.collect.async_policies import AsyncRunner as kind  # here: it loads asyncio
        runner = kind(number, name, self.policies, before, behind, learner, a, self.log)
        runner.run_mark = self._run_mark
        runner.seed_number, self.seed_count = self.seed_count, self.seed_count + 1
        self.runners[number] = runner
        return runner

    def _is_async(self, name: str) -> bool:
        policies = self.policies
        policy = policies.given(name) if isinstance(policies, PolicyMap) else policies[name]
        return asynchronous(policy) is not None

    def scheduler(
        self, current: CurrentState, note_random: Callable[[PolicyRunner, PolicyPart], object], **settings: bool
    ) -> AsyncScheduler | None:
        """Return a scheduler that requests answers; None: no policy is asynchronous, or simulators drive the envs."""
        if not self._envs.lockstep or not any(map(self._is_async, self.policies)):
            return None
        from marlvec.collect.async_policies import AsyncScheduler  # here: it loads asyncio

        return AsyncScheduler(self._envs, self.runners, self._episodes, current, note_random=note_random, **settings)

    def find(self, policy_id: str) -> PolicyRunner:
        """Return the runner of a policy that was not removed; a `KeyError` lists those."""
        for runner in self.runners.values():
            if runner.policy_id == policy_id and not runner.is_retired:
                return runner
        raise KeyError(f"no policy {policy_id!r}; the policies are {list(self.policies)}")

    def reseed(self) -> None:
        """Begin new random streams in all policies."""
        for runner in self.runners.values():
            if runner.group_index >= 0 and not runner.is_retired:
                runner.policy.reseed(self._seed(runner.seed_number))
        self.seed_connectors()

    def seed_connectors(self) -> None:
        """Derive the connectors' draws from the collector's seed again."""
        for runner in self.runners.values():
            if runner.group_index >= 0:
                runner.seed_connectors(self._seed(runner.seed_number))

    def train(self) -> None:
        """Let connectors learn, but for those of frozen policies."""
        for runner in self.runners.values():
            if runner.is_frozen:
                continue
            for chain in runner.chains:
                chain.train()

    def eval(self) -> None:
        """Freeze what connectors have learned."""
        for runner in self.runners.values():
            for chain in runner.chains:
                chain.eval()

    @property
    def all_ids(self) -> list[str]:
        """Ids of all policies of which rows may still come."""
        return [runner.policy_id for runner in self.runners.values()]

    def trained(self, wanted: TrainedPolicies) -> tuple[str, ...]:
        """Ids of the policies that get batches: those that are wanted and not frozen."""
        frozen = {runner.policy_id for runner in self.runners.values() if runner.is_frozen}
        return tuple(name for name in self.policies if name not in frozen and wanted(name))

    # --- saved

    @property
    def numbers(self) -> dict[str, int]:
        """Number by id, of the policies that were not removed."""
        return {runner.policy_id: number for number, runner in self.runners.items() if not runner.is_retired}

    def get_state(self) -> State:
        """Return the state of each policy with its runner; refused while rows of a removed policy are still to come."""
        self.drop_retired()
        if gone := [runner.policy_id for runner in self.runners.values() if runner.is_retired]:
            raise StateError(f"the policies {gone} were removed, and rows of theirs are still to come: collect them")
        runners = {runner.policy_id: get_runner_state(runner) for runner in self.runners.values()}
        return {"runners": runners, "unread": self.log.get_state(UNREAD), "seed_count": self.seed_count}

    def prepare(self, state: State, leaving: Collection[str] = ()) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it, without policies and connectors.

        Runners that had no agents to play get them as they had then. Policies in ``leaving`` are not in the state; the
        function removes them. Raises `StateError` if a policy has played that had not then.
        """
        check_fields(state, ("runners", "unread", "seed_count"), "policies")
        saved = check_fields(state["runners"], [name for name in self.policies if name not in leaving], "policies")
        count, puts = number_field(state, "seed_count", "policies"), []
        stored: dict[int, Stored] = {UNREAD: (state["unread"], None)}
        for policy_id, one in saved.items():
            runner = self.find(policy_id)
            g = number_field(one, "bound", f"policy {policy_id!r}", least=-1)
            if runner.group_index < 0 <= g < len(self.router.groups):
                self.router.bind(runner, g)
            puts.append(prepare_runner(runner, one, stored))
        put_log = self.log.prepare(stored)

        def put() -> None:
            for name in leaving:
                self.find(name).is_retired = True
                self._forget(name)
            for runner in self.runners.values():
                if runner.is_retired:
                    runner.clear()
            for part in puts:
                part()
            put_log()
            self.drop_retired()
            for number in map(self.numbers.__getitem__, saved):  # which are asked in this order
                self.runners[number] = self.runners.pop(number)
            self.seed_count = count

        return put

    # --- coming

    def add(
        self,
        policy_id: str,
        policy: NewPolicy,
        like: str | None,
        own: Sequence[Chain | None],
        *,
        is_frozen: bool = False,
    ) -> None:
        """See `Collector.add_policy`."""
        if not isinstance(policy_id, str):
            raise ArgumentError(f"a policy id must be a string, got {policy_id!r}")
        if policy_id in self.policies:
            raise ArgumentError(f"there is a policy {policy_id!r} already: choose another id")
        self.drop_retired()
        if any(runner.policy_id == policy_id for runner in self.runners.values()):
            raise StateError(
                f"a policy {policy_id!r} was removed and has rows that are still to come: collect them, or choose "
                f"another id"
            )
        given = self._policy(policy_id, policy)
        model = None if like is None else self.find(like)
        made = [self._chain(k, policy_id, own[k], model) for k in range(len(_KINDS))]
        self.policies[policy_id] = given  # type: ignore[assignment]  # a PolicyMap takes functions, too
        for pipelines, chain in zip(self.pipelines, made, strict=True):
            pipelines[policy_id] = chain
        runner = self._append(policy_id)
        if is_frozen:
            runner.freeze()
        try:
            self.router.prepare(runner)
        except BaseException:
            del self.runners[runner.number], self.log.forms[runner.number]
            self._forget(policy_id)
            raise
        self._report_policies()

    def _policy(self, policy_id: str, given: NewPolicy) -> Policy | Callable[[], PolicyLike]:
        """Return the argument as a policy; a `PolicyMap` also takes a function that builds one."""
        if isinstance(self.policies, PolicyMap):
            return policy_or_make(given, policy_id)
        policy = as_policy(given, f"policy {policy_id!r}")  # type: ignore[arg-type]  # it looks at what it is
        if taken := [name for name, known in self.policies.items() if known is policy]:
            raise ArgumentError(f"this policy object has the id {taken[0]!r} already; each id needs one of its own")
        return policy

    def _chain(self, k: int, policy_id: str, own: Chain | None, model: PolicyRunner | None) -> Any:
        """Return a pipeline for a new policy: its own, a copy of its model's, or the collector's default."""
        kind, given = _KINDS[k], self._given[k]
        if own is not None:
            known = (piece for chain in self.pipelines[k].values() for piece in with_inner(chain))
            pipeline = pipelines_for(kind, own, (policy_id,), _default(kind), known)[policy_id]
            if any(pipeline is other for other in self.pipelines[k].values()):
                raise ArgumentError(f"the {kind.__name__} given for {policy_id!r} is another policy's; copy it")
            _refuse_shared({**self.pipelines[k], policy_id: pipeline})
            return pipeline
        if model is not None:
            pipeline = _in_use(copy.deepcopy(model.chains[k]))
            pipeline.reset(np.arange(self._envs.num_envs))
            return pipeline
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(
                f"one chain of connectors was given for all policies, and it has been in use since: name with like= "
                f"the policy whose connectors {policy_id!r} gets copies of, or give it an {kind.__name__} of its own"
            )
        return _default(kind)()

    # --- going

    def remove(self, policy_id: str, living: IntArray) -> None:
        """See `Collector.remove_policy`; ``living``: ids of envs that are not masked."""
        runner = self.find(policy_id)
        if agents := self._episodes.fixed_agents(runner.number):
            raise StateError(f"policy {policy_id!r} cannot be removed: by the policy_mapping it plays {agents}")
        plays = self._episodes.running_of(runner.number, living)
        if len(plays):
            env, agent = plays[0].tolist()
            raise StateError(
                f"policy {policy_id!r} cannot be removed: it plays {len(plays)} agents in running episodes, "
                f"{self._envs.agents[agent]!r} of env {env} first. Have the mapping name others, and remove it once "
                f"those have ended"
            )
        runner.is_retired = True
        self._forget(policy_id)
        self.drop_retired()

    def drop_retired(self) -> None:
        """Let removed policies go for good whose last rows are in a batch, or will be in none."""
        for runner in tuple(self.runners.values()):
            if runner.is_retired and not self.log.has_closed(runner.number):
                del self.runners[runner.number]
                if not self.log.size(runner.number):
                    self.log.forms.pop(runner.number, None)
        self._report_policies()

    def _forget(self, policy_id: str) -> None:
        for table in (self.policies, *self.pipelines):
            del table[policy_id]

    def _report_policies(self) -> None:
        known = {number: runner.policy_id for number, runner in self.runners.items()}
        self._episodes.set_policies(known, [runner.policy_id for runner in self.runners.values() if runner.is_retired])


def _default(kind: type[Any]) -> Callable[[], Any]:
    make: Callable[[], Any] = kind.default
    return make


def named(policies: Mapping[str, PolicyLike] | PolicyLike) -> MutableMapping[str, Policy]:
    """Return policies by id, as a dict of the collector's own; a `PolicyMap` stays what it is."""
    if isinstance(policies, PolicyMap) and policies:
        return policies
    if not isinstance(policies, Mapping):
        return {"main": as_policy(policies, "policies", also=", or a dict of policy id to those")}
    if not policies:
        raise ArgumentError("policies must be a policy, or a dict of policy id to policy; got an empty dict")
    if odd := [name for name in policies if not isinstance(name, str)]:
        raise ArgumentError(f"a policy id must be a string, got {odd[0]!r}")
    found = {name: as_policy(policy, f"policy {name!r}") for name, policy in policies.items()}
    if len({id(policy) for policy in found.values()}) < len(found):
        raise ArgumentError("one policy object has two ids; each id needs an object of its own")
    return found
