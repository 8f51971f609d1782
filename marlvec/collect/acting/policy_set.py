"""`PolicySet`: a collector's policies with their runners; they can be added and removed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_logs import PolicyLogs
from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyRunner
from marlvec.collect.acting.runner_state import get_runner_state, prepare_runner
from marlvec.collect.columns.forms import ColumnForms
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.row_log import RowLog
from marlvec.connectors import ActionPipeline, AgentPipeline, Connector, LearnerPipeline, Pipeline
from marlvec.connectors.pipeline import with_inner
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import Policy, PolicyLike, PolicyMap, as_policy
from marlvec.policies.policy_map import policy_or_make
from marlvec.serialization.state_fields import State, check_fields, number_field
from marlvec.vector.vector_env import VectorEnv

__all__ = ["pipelines_for", "PoliciesToTrain", "TrainedPolicies", "Chain", "PolicySet", "Connectors", "NewPolicy"]

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
IntArray = NDArray[np.int64]
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
        forms = ColumnForms("policies whose rows are not read")
        self.unread = RowLog(forms, envs.num_envs * envs.agent_num, BatchMemory())  # counts rows that are not read
        self.runners: dict[int, PolicyRunner] = {}  # by number, in order, retired ones too
        self.logs = PolicyLogs(self.runners, self.unread)
        for name in policies:
            self._append(name)
        self.router = PolicyRouter(self.runners, envs.spec.groups, envs.agents, episodes.policy_NA, seed)
        if episodes.is_static:
            self.router.update()

    def _append(self, name: str) -> PolicyRunner:
        n, a = self._envs.num_envs, self._envs.agent_num
        before, behind, learner = (found[name] for found in self.pipelines)
        number, self._count = self._count, self._count + 1
        runner = PolicyRunner(number, name, self.policies, before, behind, learner, a, n * a, self.unread)
        runner.run_mark = self._run_mark
        runner.seed_number, self.seed_count = self.seed_count, self.seed_count + 1
        self.runners[number] = runner
        return runner

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
        return {"runners": runners, "unread": self.unread.get_state(), "seed_count": self.seed_count}

    def prepare(self, state: State, leaving: Collection[str] = ()) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it, without policies and connectors.

        Runners that had no agents to play get them as they had then. Policies in ``leaving`` are not in the state; the
        function removes them. Raises `StateError` if a policy has played that had not then.
        """
        check_fields(state, ("runners", "unread", "seed_count"), "policies")
        saved = check_fields(state["runners"], [name for name in self.policies if name not in leaving], "policies")
        count, puts = number_field(state, "seed_count", "policies"), [self.unread.prepare(state["unread"])]
        for policy_id, one in saved.items():
            runner = self.find(policy_id)
            g = number_field(one, "bound", f"policy {policy_id!r}", least=-1)
            if runner.group_index < 0 <= g < len(self.router.groups):
                self.router.bind(runner, g)
            puts.append(prepare_runner(runner, one))

        def put() -> None:
            for name in leaving:
                self.find(name).is_retired = True
                self._forget(name)
            for runner in self.runners.values():
                if runner.is_retired:
                    runner.clear()
            for part in puts:
                part()
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
            del self.runners[runner.number]
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
            if runner.is_retired and not (runner.keeps_rows and len(runner.log.closed())):
                del self.runners[runner.number]
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
