"""A collector's policies with their connectors: some are there from the start, others come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyRunner, ReadyRows
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.rollout import RolloutLoop
from marlvec.connectors import ActionPipeline, AgentPipeline, LearnerPipeline, Pipeline
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import Policy, PolicyLike, PolicyMap, as_policy
from marlvec.policies.policy_map import policy_or_make
from marlvec.trees import map_tree
from marlvec.vector.vector_env import VectorEnv

__all__ = ["pipelines_for", "PoliciesToTrain", "TrainedPolicies", "Chain", "PolicySet", "Connectors", "NewPolicy"]

P = TypeVar("P", bound=Pipeline[Any])


def pipelines_for(
    kind: type[P],
    given: P | Iterable[Any] | Mapping[str, Any] | None,
    policy_ids: Sequence[str],
    default: Callable[[], P],
) -> dict[str, P]:
    """Return one pipeline per policy id.

    Args:
        kind: AgentPipeline or ActionPipeline.
        given: None for the default; one chain (a pipeline, or connectors) for every policy, copied where there are
            several; or policy id to chain, with the default for those left out.
        policy_ids: All policies.
        default: Makes a default pipeline.

    Raises:
        ArgumentError: An unknown policy id, something that is no chain, or one pipeline given to two policies.
    """
    if given is None:
        return {name: default() for name in policy_ids}
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in policy_ids]:
            raise ArgumentError(
                f"connectors given for unknown policies {unknown}; the policies are {list(policy_ids)}: name those "
                f"alone, and give a policy that comes later its connectors in add_policy()"
            )
        found = {
            name: _chain(kind, given[name], f" for policy {name!r}") if name in given else default()
            for name in policy_ids
        }
        if len({id(chain) for chain in found.values()}) < len(found):
            raise ArgumentError(
                "one pipeline was given to two policies; it keeps state per agent, so each needs its own"
            )
        return found
    chain = _chain(kind, given, ", or a dict of policy id to those")
    if len(policy_ids) == 1:
        return {policy_ids[0]: chain}
    return {name: copy.deepcopy(chain) for name in policy_ids}


def _chain(kind: type[P], given: Any, where: str) -> P:
    if isinstance(given, kind):
        return given
    if isinstance(given, (list, tuple)):
        return kind(given)
    hint = "; leave it out for the default ones, or give [] for none" if given is None else ""
    raise ArgumentError(f"expected an {kind.__name__} or a list of connectors{where}, got {given!r:.200}{hint}")


PoliciesToTrain: TypeAlias = Collection[str] | Callable[[str], bool] | None
"""Ids of the policies that get batches, or a function ``(policy id) -> bool``; None for all."""


class TrainedPolicies:
    """Says of each policy whether it gets batches.

    Args:
        given: What the user gave.
        known: Ids of the policies there are.

    Raises:
        ArgumentError: It is neither, or names an unknown policy.

    Attributes:
        given: As given.
    """

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
        """Whether this policy gets batches.

        Raises:
            Exception: What the function raises, with a note that nothing is lost.
        """
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
    """The roles, who of them leaves, and all that changes when one comes or goes.

    A policy that is removed is asked no more. Its role stays, *leaving*, for as long as an agent waits for the outcome
    of what it decided last, and until its last rows are in a batch; then it is gone.

    Args:
        envs: The envs.
        policies: Policy id to policy; changed in place.
        connectors: Chains of agent, action and learner connectors, as the collector was given them.
        episodes: The accounts of the running episodes.
        seed: A policy's number, from 0 → its seed.

    Attributes:
        policies: As given; without those that leave.
        pipelines: Policy id to pipeline, of agent, action and learner connectors.
        runners: All roles, leaving ones too.
        leaving: Runner that leaves to the one that takes its place.
        router: Who plays whom.
    """

    def __init__(
        self,
        envs: VectorEnv,
        policies: MutableMapping[str, Policy],
        connectors: Sequence[Connectors],
        episodes: EpisodeTracker,
        seed: Callable[[int], int],
    ) -> None:
        self._envs, self._given, self._episodes, self._seed = envs, tuple(connectors), episodes, seed
        self.policies = policies
        self.pipelines: tuple[dict[str, Any], ...] = tuple(
            pipelines_for(kind, given, tuple(policies), _default(kind))
            for kind, given in zip(_KINDS, connectors, strict=True)
        )
        self._count = 0
        self.runners: list[PolicyRunner] = []
        for name in policies:
            self.runners.append(self._runner(name))
        self.leaving: dict[PolicyRunner, PolicyRunner] = {}
        self.router = PolicyRouter(self.runners, envs.spec.groups, envs.agents, episodes.policy_NA, seed)
        if episodes.is_static:
            self.router.update()

    def _runner(self, name: str) -> PolicyRunner:
        n, a = self._envs.num_envs, self._envs.agent_num
        before, behind, learner = (found[name] for found in self.pipelines)
        return PolicyRunner(
            len(self.runners), self._next_number(), name, self.policies, before, behind, learner, a, n * a
        )

    def _next_number(self) -> int:
        self._count += 1
        return self._count - 1

    def find(self, policy_id: str) -> PolicyRunner:
        """The role of a policy that does not leave.

        Raises:
            KeyError: There is none; lists those there are.
        """
        for runner in self.runners:
            if runner.policy_id == policy_id and runner not in self.leaving:
                return runner
        raise KeyError(f"no policy {policy_id!r}; the policies are {list(self.policies)}")

    def reseed(self) -> None:
        """Begin new random streams in all policies."""
        for runner in self.runners:
            if runner.group_index >= 0 and runner not in self.leaving:
                runner.policy.reseed(self._seed(runner.number))

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
            raise ArgumentError(f"there is a policy {policy_id!r} already: call replace_policy(), or choose another id")
        if any(runner.policy_id == policy_id for runner in self.leaving):
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
        self.runners.append(self._runner(policy_id))
        if is_frozen:
            self.runners[-1].freeze()
        try:
            self.router.prepare(self.runners[-1])
        except BaseException:
            self.runners.pop()
            self._let_go(policy_id)
            raise
        self._recast()

    def _policy(self, policy_id: str, given: NewPolicy) -> Policy | Callable[[], PolicyLike]:
        """What was given, as a policy; a `PolicyMap` takes a function that builds one, too."""
        if isinstance(self.policies, PolicyMap):
            return policy_or_make(given, policy_id)
        policy = as_policy(given, f"policy {policy_id!r}")  # type: ignore[arg-type]  # it looks at what it is
        if taken := [name for name, known in self.policies.items() if known is policy]:
            raise ArgumentError(f"this policy object has the id {taken[0]!r} already; each id needs one of its own")
        return policy

    def _chain(self, k: int, policy_id: str, own: Chain | None, model: PolicyRunner | None) -> Any:
        """One pipeline for a new policy: its own, or a copy of its model's, or as the collector would have made it."""
        kind, given = _KINDS[k], self._given[k]
        if own is not None:
            pipeline = pipelines_for(kind, own, (policy_id,), _default(kind))[policy_id]
            if any(pipeline is known for known in self.pipelines[k].values()):
                raise ArgumentError(f"the {kind.__name__} given for {policy_id!r} is another policy's; copy it")
            return pipeline
        if model is not None:
            pipeline = copy.deepcopy(model.chains[k])
            pipeline.reset(np.arange(self._envs.num_envs))
            return pipeline
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(
                f"one chain of connectors was given for all policies, and it has been in use since: name with like= "
                f"the policy whose connectors {policy_id!r} gets copies of, or give it an {kind.__name__} of its own"
            )
        return _default(kind)()

    def replace(self, policy_id: str, policy: NewPolicy, slot_L: IntArray) -> None:
        """See `Collector.replace_policy`."""
        runner = self.find(policy_id)
        given = self._policy(policy_id, policy)
        number = self._next_number()
        if isinstance(given, Policy) and runner.group_index >= 0:
            runner.set_up(given, self._seed(number))
        self.policies[policy_id] = given  # type: ignore[assignment]  # a PolicyMap takes functions, too
        if not isinstance(given, Policy) and runner.group_index >= 0:
            runner.set_up(runner.policy, self._seed(number))
        # Another object, so that an answer of the old policy which a failed call has left behind is not taken for its.
        fresh = self.runners[runner.index] = copy.copy(runner)
        self.leaving = {old: fresh if other is runner else other for old, other in self.leaving.items()}
        fresh.number = number
        fresh.forget_answers(slot_L)
        if self.router.playing:
            self.router.update()

    # --- going

    def remove(self, policy_id: str, remap_to: str | None, loop: RolloutLoop) -> None:
        """See `Collector.remove_policy`."""
        runner = self.find(policy_id)
        target = None if remap_to is None else self.find(remap_to)
        if target is runner:
            raise ArgumentError(f"policy {policy_id!r} cannot take its own place; name another one as remap_to")
        plays_NA = self._episodes.runs(runner.index)
        plays_NA[np.setdiff1d(np.arange(self._envs.num_envs), loop.living)] = False
        waited_for = [old for old, other in self.leaving.items() if other is runner]
        if target is None:
            self._check_idle(runner, plays_NA, waited_for)
        else:
            if runner.group_index >= 0 and (plays_NA.any() or self._episodes.seats(runner.index) or waited_for):
                self.router.bind(target, runner.group_index)
            self._episodes.reseat(runner.index, target.index)
            for old in waited_for:
                self.leaving[old] = target
        # Where no running episode waits for the policy that leaves, nothing is handed over: it stands for itself.
        self.leaving[runner] = runner if target is None else target
        self._let_go(policy_id)
        self._recast()
        self._settle_masked(loop)
        if loop.state in ("new", "lost"):  # no row that is there will be in a batch
            self._episodes.policy_NA[self._episodes.policy_NA == runner.index] = self.leaving[runner].index
            self._drop(runner)
        else:
            self.hand_over(loop)
            self.drop_idle(loop)

    def _check_idle(
        self, runner: PolicyRunner, plays_NA: NDArray[np.bool_], waited_for: Sequence[PolicyRunner]
    ) -> None:
        """Raise where somebody would have to take this role's place."""
        if seats := self._episodes.seats(runner.index):
            why = f"by the policy_mapping it plays {seats}"
        elif plays_NA.any():
            env, agent = np.argwhere(plays_NA)[0].tolist()
            count = int(np.count_nonzero(plays_NA))
            why = f"it plays {count} agents in running episodes, {self._envs.agents[agent]!r} of env {env} first"
        elif waited_for:
            why = f"it takes the place of {waited_for[0].policy_id!r} in running episodes"
        else:
            return
        raise StateError(
            f"policy {runner.policy_id!r} cannot be removed: {why}. Say who takes its place: "
            f"remove_policy({runner.policy_id!r}, remap_to=...)"
        )

    def hand_over(self, loop: RolloutLoop) -> None:
        """Give rows that wait for a policy that leaves to the one in its place, through that one's connectors.

        Raises:
            Exception: What those connectors raise; the loop's state is then ``"lost"``.
        """
        for old, new in self.leaving.items():
            if len(old.ready.lanes):
                state, loop.state = loop.state, "lost"
                self._pass_on(old, new, loop.slot_L)
                loop.state = state

    def _pass_on(self, old: PolicyRunner, new: PolicyRunner, slot_L: IntArray) -> None:
        lanes, agents = old.ready.lanes, self._envs.agents
        raw = old.raw.of(lanes)
        # For its new policy it is the agent's first row, and what was paid before was for the old one's decision.
        raw = raw.replace(first=np.ones(len(lanes), np.bool_), reward=np.zeros(len(lanes)))
        given = old.off_policy.among(lanes)
        if given.any():
            actions, _ = old.off_policy.answer(raw.take(given), lanes[given], _nobody)
            for i, lane in enumerate(lanes[given].tolist()):
                where = f"env {lane // len(agents)}: agent {agents[lane % len(agents)]!r}"
                new.off_policy.note(lane, map_tree(itemgetter(i), actions), where)
            old.off_policy.forget(lanes)
        rows, kept = new.observe(raw)
        old.ready = ReadyRows.none()
        self._episodes.policy_NA.reshape(-1)[lanes] = new.index
        slot_L[lanes] = -1
        if kept is not None:
            new.noops.add(lanes[~kept])
            lanes = lanes[kept]
        if len(lanes):
            env_t = self._episodes.length_N[lanes // len(agents)]
            slots = new.trajectories.append(rows.columns, lanes, 0, env_t)  # it closes nothing, so nobody asks when
            slot_L[lanes] = slots
            new.ready = new.ready.join(ReadyRows.block(lanes, lanes, slots))
        self.router.update()

    def drop_idle(self, loop: RolloutLoop) -> None:
        """Let those go for good who leave, play nobody, and have no row that is still to come."""
        if not self.leaving:
            return
        self._settle_masked(loop)
        for runner in tuple(self.leaving):
            if not self._episodes.runs(runner.index).any() and not len(runner.trajectories.closed()):
                self._drop(runner)

    def _settle_masked(self, loop: RolloutLoop) -> None:
        """Have masked envs, in which nobody plays any more, name no role that may go."""
        policy_NA, living = self._episodes.policy_NA, loop.living
        if len(living):
            policy_NA[np.setdiff1d(np.arange(len(policy_NA)), living)] = policy_NA[living[0]]

    def _drop(self, runner: PolicyRunner) -> None:
        del self.leaving[runner]
        self.runners.remove(runner)
        for later in self.runners[runner.index :]:
            later.index -= 1
        self._episodes.close_up(runner.index)
        self._recast()
        if self.router.playing:
            self.router.update()

    def _let_go(self, policy_id: str) -> None:
        for table in (self.policies, *self.pipelines):
            del table[policy_id]

    def _recast(self) -> None:
        leaving = [runner.policy_id for runner in self.leaving]
        self._episodes.recast([runner.policy_id for runner in self.runners], leaving)


def _default(kind: type[Any]) -> Callable[[], Any]:
    make: Callable[[], Any] = kind.default
    return make


def _nobody(_: Any) -> Any:
    raise AssertionError("every action was given")  # so no policy is asked


def named(policies: Mapping[str, PolicyLike] | PolicyLike) -> MutableMapping[str, Policy]:
    """Policies by id, as a dict of the collector's own; a `PolicyMap` stays what it is.

    Raises:
        ArgumentError: There is none, or one is no policy, or two ids have one object.
    """
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
